"""Google ADK: what any of its session services does, ours beside two of its own; and what only ours does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from below import until
from frameworks.examples import run_examples
from google.adk.agents import LlmAgent
from google.adk.apps.app import App
from google.adk.errors import StaleSessionError
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions, EventCompaction
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig
from google.adk.sessions.database_session_service import DatabaseSessionService
from google.adk.tools.tool_context import ToolContext
from google.genai import types
from reaping import Sweeps, quiet

from distributed_state import (
    AccessDenied,
    AsyncStateStore,
    ConfigurationError,
    InvalidValue,
    Request,
    StateStore,
    WarmUnavailable,
)
from distributed_state.adapters.adk import DistributedSessionService, register
from distributed_state.adapters.stores import joined, parted

pytestmark = pytest.mark.only(api="asyncio")
ALL = ("ours", "in memory", "sqlite")
STORED = ("ours", "sqlite")  # those that look for stale sessions
WHERE = {"app_name": "shop", "user_id": "ada"}


@asynccontextmanager
async def service_of(kind: str, opener: Any, tmp_path: Path) -> AsyncIterator[Any]:
    if kind == "ours":
        yield DistributedSessionService(await opener())
    elif kind == "in memory":
        yield InMemorySessionService()
    else:
        async with DatabaseSessionService(f"sqlite+aiosqlite:///{tmp_path}/adk.db") as service:
            yield service


def said(text: str, author: str = "user", at: float | None = None, **more: Any) -> Event:
    role = "user" if author == "user" else "model"
    content = types.Content(role=role, parts=[types.Part(text=text)])
    return Event(author=author, content=content, **({} if at is None else {"timestamp": at}), **more)


def sets(author: str = "system", at: float | None = None, **state: Any) -> Event:
    """An event that says nothing and changes the state; `user__k` is the key `user:k`."""
    delta = {key.replace("__", ":"): value for key, value in state.items()}
    return Event(author=author, actions=EventActions(state_delta=delta), **({} if at is None else {"timestamp": at}))


def texts(session: Session | None) -> list[str]:
    assert session is not None
    return [part.text for event in session.events if event.content for part in event.content.parts or [] if part.text]


# What every service does


@pytest.mark.parametrize("kind", ALL)
async def test_a_session_is_created_read_and_deleted(kind: str, opener: Any, tmp_path: Path) -> None:
    async with service_of(kind, opener, tmp_path) as service:
        made = await service.create_session(**WHERE, state={"city": "Oslo"}, session_id="s1")
        assert (made.id, made.app_name, made.user_id, made.state, made.events) == (
            "s1",
            "shop",
            "ada",
            {"city": "Oslo"},
            [],
        )
        read = await service.get_session(**WHERE, session_id="s1")
        assert read == made
        with pytest.raises(AlreadyExistsError):
            await service.create_session(**WHERE, session_id="s1")
        generated = await service.create_session(**WHERE)
        assert generated.id
        assert generated.id != "s1"
        await service.append_event(made, said("hello"))
        await service.delete_session(**WHERE, session_id="s1")
        await service.delete_session(**WHERE, session_id="s1")
        assert await service.get_session(**WHERE, session_id="s1") is None
        with pytest.raises(SessionNotFoundError):
            await service.append_event(made, said("is anybody there?"))
        again = await service.create_session(**WHERE, session_id="s1")
        assert (again.state, again.events) == ({}, [])
        assert (await service.get_session(**WHERE, session_id="s1")).events == []


@pytest.mark.parametrize("kind", ["ours", "in memory"])
async def test_whitespace_around_an_id_is_no_part_of_it(kind: str, opener: Any, tmp_path: Path) -> None:
    async with service_of(kind, opener, tmp_path) as service:
        assert (await service.create_session(**WHERE, session_id="  s1 ")).id == "s1"
        with pytest.raises(AlreadyExistsError):
            await service.create_session(**WHERE, session_id="s1\n")
        assert (await service.create_session(**WHERE, session_id="   ")).id.strip()
        assert (await service.get_session(**WHERE, session_id=" s1 ")).id == "s1"
        await service.delete_session(**WHERE, session_id=" s1 ")
        assert await service.get_session(**WHERE, session_id="s1") is None


@pytest.mark.parametrize("kind", ALL)
async def test_sessions_of_one_id_under_two_users_or_apps_are_two(kind: str, opener: Any, tmp_path: Path) -> None:
    odd = [("shop", "ada"), ("shop", "bob"), ("other", "ada"), ("a/b", "c"), ("a", "b/c"), ("a%2Fb", "c"), ("a:b", "c")]
    async with service_of(kind, opener, tmp_path) as service:
        for app, user in odd:
            await service.create_session(app_name=app, user_id=user, session_id="s", state={"of": [app, user]})
        for app, user in odd:
            session = await service.get_session(app_name=app, user_id=user, session_id="s")
            assert session.state == {"of": [app, user]}
            [listed] = (await service.list_sessions(app_name=app, user_id=user)).sessions
            assert (listed.app_name, listed.user_id, listed.id) == (app, user, "s")


@pytest.mark.parametrize("kind", ALL)
async def test_an_event_comes_back_as_it_was(kind: str, opener: Any, tmp_path: Path) -> None:
    parts = [
        types.Part(text="thinking", thought=True, thought_signature=b"\xfe\xff\x00signature"),
        types.Part(inline_data=types.Blob(data=bytes(range(256)), mime_type="image/png", display_name="a.png")),
        types.Part(
            function_call=types.FunctionCall(id="f1", name="book", args={"nights": 2, "view": None, "to": [1.5]})
        ),
        types.Part(function_response=types.FunctionResponse(id="f1", name="book", response={"ok": True, "left": []})),
        types.Part(text="\u00e5 \u2603 \U0001f600 \u0000 end"),
    ]
    event = Event(
        author="agent",
        invocation_id="i1",
        branch="root.agent",
        content=types.Content(role="model", parts=parts),
        actions=EventActions(
            state_delta={"k": {"deep": [None, 1, 2.5, "x"]}, "none": None}, artifact_delta={"a.png": 3}
        ),
        long_running_tool_ids={"f1", "f0"},
        custom_metadata={"a": {"b": None}},
        usage_metadata=types.GenerateContentResponseUsageMetadata(prompt_token_count=7),
        error_code="E",
        timestamp=1_700_000_000.123456,
    )
    async with service_of(kind, opener, tmp_path) as service:
        session = await service.create_session(**WHERE, session_id="s")
        assert await service.append_event(session, event) is event
        summary = EventCompaction(
            start_timestamp=1.0, end_timestamp=2.5, compacted_content=types.Content(parts=[types.Part(text="short")])
        )
        compaction = Event(author="user", actions=EventActions(compaction=summary))
        await service.append_event(session, compaction)
        read = await service.get_session(**WHERE, session_id="s")
        assert (
            read.events == session.events == [event, compaction] or kind == "sqlite"
        )  # which loses the order of a set
        assert read.events[0].content == event.content
        assert read.state == {"k": {"deep": [None, 1, 2.5, "x"]}, "none": None}
        assert read.last_update_time == session.last_update_time == pytest.approx(compaction.timestamp, abs=1e-5)


@pytest.mark.parametrize("kind", ALL)
async def test_keys_live_where_their_prefix_says(kind: str, opener: Any, tmp_path: Path) -> None:
    async with service_of(kind, opener, tmp_path) as service:
        first = await service.create_session(
            **WHERE, session_id="s1", state={"k": 1, "user:lang": "nb", "app:open": True, "temp:x": 1}
        )
        assert {key: value for key, value in first.state.items() if key != "temp:x"} == {
            "k": 1, "user:lang": "nb", "app:open": True
        }  # fmt: skip
        event = said("hi", "agent")
        event.actions.state_delta = {"k": 2, "user:visits": 1, "app:hits": 5, "temp:scratch": "t", "user:": "empty"}
        await service.append_event(first, event)
        assert first.state["temp:scratch"] == "t", "the session in hand keeps it"
        assert "temp:scratch" not in event.actions.state_delta
        read = await service.get_session(**WHERE, session_id="s1")
        shared = {"user:lang": "nb", "user:visits": 1, "user:": "empty", "app:open": True, "app:hits": 5}
        assert read.state == {"k": 2, **shared}
        assert not any(key.startswith("temp:") for event in read.events for key in event.actions.state_delta)
        assert (await service.create_session(**WHERE, session_id="s2")).state == shared
        stranger = await service.create_session(app_name="shop", user_id="bob", session_id="s1")
        assert stranger.state == {"app:open": True, "app:hits": 5}
        assert await service.get_user_state(**WHERE) == {"lang": "nb", "visits": 1, "": "empty"}
        assert await service.get_user_state(app_name="shop", user_id="nobody") == {}
        assert await service.get_user_state(app_name="other", user_id="ada") == {}


@pytest.mark.parametrize("kind", ALL)
async def test_any_name_can_be_a_key(kind: str, opener: Any, tmp_path: Path) -> None:
    names = ["", "#x", "%", "%#x", "adk:updated", "adk:revision", "a:b", "user", "\u00e5", "_adk_internal", " "]
    async with service_of(kind, opener, tmp_path) as service:
        state = {name: f"of {name}" for name in names}
        await service.create_session(**WHERE, session_id="s", state=state)
        assert (await service.get_session(**WHERE, session_id="s")).state == state
        session = await service.get_session(**WHERE, session_id="s")
        changed = {name: [name] for name in names}
        await service.append_event(session, Event(author="a", actions=EventActions(state_delta=changed)))
        assert (await service.get_session(**WHERE, session_id="s")).state == changed


@pytest.mark.parametrize("kind", ALL)
async def test_a_partial_event_is_not_stored(kind: str, opener: Any, tmp_path: Path) -> None:
    async with service_of(kind, opener, tmp_path) as service:
        session = await service.create_session(**WHERE, session_id="s")
        event = said("hal", "agent", partial=True)
        event.actions.state_delta = {"k": 1}
        assert await service.append_event(session, event) is event
        read = await service.get_session(**WHERE, session_id="s")
        assert (session.events, session.state, read.events, read.state) == ([], {}, [], {})


@pytest.mark.parametrize("kind", ALL)
async def test_a_session_is_read_in_part(kind: str, opener: Any, tmp_path: Path) -> None:
    async with service_of(kind, opener, tmp_path) as service:
        session = await service.create_session(**WHERE, session_id="s")
        for number in range(250):
            await service.append_event(session, said(f"e{number}", at=1000.0 + number))

        async def some(**config: Any) -> list[str]:
            return texts(await service.get_session(**WHERE, session_id="s", config=GetSessionConfig(**config)))

        assert len(await some()) == 250
        assert await some(num_recent_events=3) == ["e247", "e248", "e249"]
        assert await some(num_recent_events=0) == []
        assert len(await some(num_recent_events=1000)) == 250
        assert await some(after_timestamp=1247.0) == ["e247", "e248", "e249"]
        assert await some(after_timestamp=1246.5) == ["e247", "e248", "e249"]
        assert await some(after_timestamp=1100.0) == [f"e{number}" for number in range(100, 250)]
        assert await some(after_timestamp=1050.0) == [f"e{number}" for number in range(50, 250)]
        assert len(await some(after_timestamp=1.0)) == 250
        assert await some(after_timestamp=5000.0) == []
        assert await some(num_recent_events=2, after_timestamp=1100.0) == ["e248", "e249"]
        assert await some(num_recent_events=5, after_timestamp=1248.0) == ["e248", "e249"]
        # What was read in part is as good as the whole to append to.
        part = await service.get_session(**WHERE, session_id="s", config=GetSessionConfig(num_recent_events=0))
        await service.append_event(part, said("e250", at=1250.0))
        assert await some(num_recent_events=2) == ["e249", "e250"]


@pytest.mark.parametrize("kind", ALL)
async def test_sessions_are_listed_by_their_last_event(kind: str, opener: Any, tmp_path: Path) -> None:
    async with service_of(kind, opener, tmp_path) as service:
        assert (await service.list_sessions(app_name="shop")).sessions == []
        made = {}
        for user, id in (("ada", "a"), ("ada", "b"), ("bob", "a"), ("bob", "c")):
            made[user, id] = await service.create_session(
                app_name="shop", user_id=user, session_id=id, state={"k": id, "user:name": user, "app:x": 1}
            )
        await service.create_session(app_name="shopping", user_id="ada", session_id="z")
        for at, place in enumerate([("bob", "a"), ("ada", "b"), ("bob", "c"), ("ada", "a")]):
            await service.append_event(made[place], said("hi", at=2_000_000_000.0 + at))
        listed = (await service.list_sessions(app_name="shop")).sessions
        assert [(each.user_id, each.id) for each in listed] == [("bob", "a"), ("ada", "b"), ("bob", "c"), ("ada", "a")]
        assert [each.last_update_time for each in listed] == [2_000_000_000.0 + at for at in range(4)]
        assert all(not each.events for each in listed)
        assert [each.state for each in listed] == [
            {"k": each.id, "user:name": each.user_id, "app:x": 1} for each in listed
        ]
        assert [each.id for each in (await service.list_sessions(app_name="shop", user_id="ada")).sessions] == [
            "b",
            "a",
        ]
        assert (await service.list_sessions(app_name="shop", user_id="nobody")).sessions == []
        await service.delete_session(app_name="shop", user_id="ada", session_id="b")
        assert [each.id for each in (await service.list_sessions(app_name="shop", user_id="ada")).sessions] == ["a"]
        # What was listed can be appended to.
        [mine] = (await service.list_sessions(app_name="shop", user_id="ada")).sessions
        await service.append_event(mine, said("from the list", "agent"))
        await service.flush()


@pytest.mark.parametrize("kind", STORED)
async def test_who_goes_on_with_a_conversation_that_went_on_elsewhere_is_refused(
    kind: str, opener: Any, tmp_path: Path
) -> None:
    """google/adk-python #4751: two workers that run one session mix its events, for good."""
    async with service_of(kind, opener, tmp_path) as service:
        await service.create_session(**WHERE, session_id="s")
        one = await service.get_session(**WHERE, session_id="s")
        other = await service.get_session(**WHERE, session_id="s")
        await service.append_event(one, said("from one"))
        refused = said("from the other")
        refused.actions.state_delta = {"k": 1, "user:k": 1, "app:k": 1}
        with pytest.raises(StaleSessionError):
            await service.append_event(other, refused)
        read = await service.get_session(**WHERE, session_id="s")
        assert texts(read) == ["from one"]
        assert read.state == {}, "nothing of what is refused is stored, in no record"
        await service.append_event(one, said("and more"))
        fresh = await service.get_session(**WHERE, session_id="s")
        await service.append_event(fresh, said("now in order"))
        with pytest.raises(StaleSessionError):
            await service.append_event(one, said("too late"))
        assert texts(await service.get_session(**WHERE, session_id="s")) == ["from one", "and more", "now in order"]


@pytest.mark.parametrize("kind", STORED)
async def test_a_summary_is_refused_when_the_conversation_went_on(kind: str, opener: Any, tmp_path: Path) -> None:
    """google/adk-python #5194: compaction against the next turn."""
    async with service_of(kind, opener, tmp_path) as service:
        session = await service.create_session(**WHERE, session_id="s")
        await service.append_event(session, said("one"))
        compacting = await service.get_session(**WHERE, session_id="s")
        await service.append_event(session, said("two"))
        summary = EventCompaction(start_timestamp=1, end_timestamp=2, compacted_content=types.Content(role="model"))
        with pytest.raises(StaleSessionError):
            await service.append_event(compacting, Event(author="user", actions=EventActions(compaction=summary)))


@pytest.mark.parametrize("kind", STORED)
async def test_a_session_without_its_marker_is_known_by_what_it_shows(kind: str, opener: Any, tmp_path: Path) -> None:
    """One that came as JSON, as between a server and its client."""
    async with service_of(kind, opener, tmp_path) as service:
        session = await service.create_session(**WHERE, session_id="s")
        await service.append_event(session, said("one", at=100.0))
        copy = Session.model_validate_json(session.model_dump_json())
        old = Session.model_validate_json(session.model_dump_json())
        await service.append_event(copy, said("two", at=200.0))
        with pytest.raises(StaleSessionError):
            await service.append_event(old, said("three", at=300.0))
        assert texts(await service.get_session(**WHERE, session_id="s")) == ["one", "two"]
        gone = Session(app_name="shop", user_id="ada", id="nowhere")
        with pytest.raises(SessionNotFoundError):
            await service.append_event(gone, said("?"))


@pytest.mark.parametrize("kind", ALL)
async def test_branches_that_run_at_once_share_a_session(kind: str, opener: Any, tmp_path: Path) -> None:
    async with service_of(kind, opener, tmp_path) as service:
        session = await service.create_session(**WHERE, session_id="s")
        events = [said(f"branch {number}", "agent", at=1000.0 + number) for number in range(20)]
        await asyncio.gather(*(service.append_event(session, event) for event in events))
        read = await service.get_session(**WHERE, session_id="s")
        assert sorted(texts(read)) == sorted(texts(session)) == sorted(f"branch {number}" for number in range(20))
        assert read.events == session.events or kind == "sqlite"  # which sorts them by time


# What ours does


async def test_who_only_sets_state_makes_nobody_stale(opener: Any) -> None:
    """google/adk-go #1229: a second writer that has its reasons; theirs ends the turn that runs."""
    service = DistributedSessionService(await opener())
    running = await service.create_session(**WHERE, session_id="s")
    await service.append_event(running, said("go"))
    second = await service.get_session(**WHERE, session_id="s")
    await service.append_event(second, sets(pending=["f1"], user__seen=1))
    await service.append_event(running, said("on it", "agent"))  # the one that runs goes on
    await service.append_event(second, sets(pending=[], app__n=2))  # and its session, which is old now, serves
    with pytest.raises(StaleSessionError):
        await service.append_event(second, said("a word"))
    read = await service.get_session(**WHERE, session_id="s")
    assert texts(read) == ["go", "on it"]
    assert read.state == {"pending": [], "user:seen": 1, "app:n": 2}
    assert len(read.events) == 4


async def test_an_event_beside_the_turn_is_stored_whoever_runs_it(opener: Any) -> None:
    service = DistributedSessionService(await opener())
    running = await service.create_session(**WHERE, session_id="s")
    await service.append_event(running, said("go"))
    note = said("a note of the operator", "operator")
    note.actions.state_delta = {"noted": True, "temp:x": 1, "user:n": 1}
    assert await service.append_beside(note, **WHERE, session_id=" s ") is note
    await service.append_event(running, said("on it", "agent"))
    read = await service.get_session(**WHERE, session_id="s")
    assert texts(read) == ["go", "a note of the operator", "on it"]
    assert read.state == {"noted": True, "user:n": 1}
    partial = said("hal", partial=True)
    assert await service.append_beside(partial, **WHERE, session_id="s") is partial
    with pytest.raises(SessionNotFoundError):
        await service.append_beside(said("?"), **WHERE, session_id="nowhere")
    await service.delete_session(**WHERE, session_id="s")
    with pytest.raises(SessionNotFoundError):
        await service.append_beside(said("?"), **WHERE, session_id="s")


async def test_an_event_that_is_appended_again_is_stored_once_and_completed(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies between a session's commit and that of its user: another one appends the same event."""
    service = DistributedSessionService(await opener())
    session = await service.create_session(**WHERE, session_id="s")
    stale = await service.get_session(**WHERE, session_id="s")
    event = said("booked", "agent")
    event.actions.state_delta = {"k": 1, "user:booked": 1, "app:booked": 1}
    share = service._share

    async def dies(*_: Any) -> None:
        raise WarmUnavailable("as if the worker were killed here")

    monkeypatch.setattr(service, "_share", dies)
    with pytest.raises(WarmUnavailable):
        await service.append_event(session, event)
    monkeypatch.setattr(service, "_share", share)
    half = await service.get_session(**WHERE, session_id="s")
    assert (half.state, len(half.events)) == ({"k": 1}, 1), "the event is there, with all that it was to change"
    assert half.events[0].actions.state_delta == {"k": 1, "user:booked": 1, "app:booked": 1}
    await service.append_event(session, event)
    read = await service.get_session(**WHERE, session_id="s")
    assert read.state == {"k": 1, "user:booked": 1, "app:booked": 1}
    assert read.events == [event]
    assert session.events == [event]
    await service.append_event(session, said("and on"))
    # Another event under its id is another event.
    with pytest.raises(StaleSessionError):
        await service.append_event(stale, said("booked otherwise", "agent", id=event.id))


async def test_a_user_is_counted_by_many(opener: Any) -> None:
    """What sessions see as `user:visits` is a field of a record, to which can be added; ADK only sets what it read."""
    service = DistributedSessionService(await opener())
    visits = service.user_record(**WHERE)
    await asyncio.gather(*(visits.increment("visits") for _ in range(100)))
    assert (await service.create_session(**WHERE)).state == {"user:visits": 100}
    assert await service.app_record(app_name="shop").get_all() == {}


async def test_a_user_is_forgotten_with_all_sessions(opener: Any) -> None:
    store = await opener()
    service = DistributedSessionService(store)
    for user in ("ada", "bob"):
        session = await service.create_session(app_name="shop", user_id=user, session_id="s", state={"user:k": user})
        await service.append_event(session, said("hi"))
    await store.forget(service.user_record(**WHERE).id)
    assert await service.get_session(**WHERE, session_id="s") is None
    assert await service.get_user_state(**WHERE) == {}
    assert await service.get_user_state(app_name="shop", user_id="bob") == {"k": "bob"}
    assert len((await service.list_sessions(app_name="shop")).sessions) == 1


async def test_a_session_begins_where_something_is_that_is_none(opener: Any) -> None:
    """A field that was written to its record before, or after it was deleted, would refuse the id for good."""
    store = await opener()
    service = DistributedSessionService(store)
    for end in (store.erase, store.delete):
        record = service.session_record(**WHERE, session_id="s")
        await record.write(set={"note": end.__name__}, revive=True)
        assert await service.get_session(**WHERE, session_id="s") is None
        made = await service.create_session(**WHERE, session_id="s", state={"city": "Oslo"})
        assert made.state == {"note": end.__name__, "city": "Oslo"}
        assert await service.get_session(**WHERE, session_id="s") == made
        with pytest.raises(AlreadyExistsError):
            await service.create_session(**WHERE, session_id="s")
        await service.append_event(made, said("hello"))
        await end(record.id)
    assert (await service.create_session(**WHERE, session_id="s")).state == {}, "nor does what is left of one"


@pytest.mark.parametrize("expired", ["refuse", "begin again"])
async def test_only_create_session_begins_a_session_again_that_expired(opener: Any, expired: str) -> None:
    """A run that goes on without its events would be answered out of nothing."""
    store = await quiet(opener, session_idle=0.05, expired=expired)
    service = DistributedSessionService(store)
    made = await service.create_session(**WHERE, session_id="s", state={"city": "Oslo"})
    await service.append_event(made, said("hello"))
    await until(Sweeps(store))
    assert await service.get_session(**WHERE, session_id="s") is None
    with pytest.raises(SessionNotFoundError):
        await service.append_event(made, said("is anybody there?"))
    assert not await service.session_record(**WHERE, session_id="s").exists(fresh=True)
    again = await service.create_session(**WHERE, session_id="s")
    assert (again.state, again.events) == ({}, [])
    await service.append_event(again, said("hello again"))
    assert texts(await service.get_session(**WHERE, session_id="s")) == ["hello again"]


async def test_a_session_that_was_forked_to_a_name_below_its_own_is_not_listed(opener: Any) -> None:
    store = await opener()
    service = DistributedSessionService(store)
    made = await service.create_session(**WHERE, session_id="s", state={"k": 1})
    record = service.session_record(**WHERE, session_id="s")
    await record.fork(f"{record.id}/copy")
    await record.fork(joined("shop", "ada", "copy"))
    for where in ({"app_name": "shop"}, WHERE):
        found = (await service.list_sessions(**where)).sessions
        assert [each.id for each in found] == ["copy", "s"]
        assert found[1] == made


async def test_who_may_not_administer_lists(opener: Any) -> None:
    """And with a policy by which each sees what is their own, they list that."""

    def access(request: Request) -> bool:
        return request.action != "admin" and (request.scope == "app" or "shop/ada" in (request.user, request.id))

    service = DistributedSessionService(await opener(access=access))
    await service.create_session(**WHERE, session_id="s")
    assert [each.id for each in (await service.list_sessions(**WHERE)).sessions] == ["s"]
    with pytest.raises(AccessDenied):
        await service.list_sessions(app_name="shop")


async def test_what_cannot_be_stored_is_refused_and_changes_nothing(opener: Any) -> None:
    service = DistributedSessionService(await opener())
    session = await service.create_session(**WHERE, session_id="s")
    for bad in (sets(**{"k" * 2000: 1}), said("x" * 20_000_000)):
        with pytest.raises(InvalidValue):
            await service.append_event(session, bad)
    with pytest.raises(InvalidValue):
        await service.create_session(**WHERE, session_id="t", state={"k" * 2000: 1})
    with pytest.raises(InvalidValue):
        await service.create_session(**WHERE, session_id="x" * 2000)
    read = await service.get_session(**WHERE, session_id="s")
    assert (read.events, session.events, read.state) == ([], [], {})
    assert await service.get_session(**WHERE, session_id="t") is None


async def test_a_name_that_is_no_text_is_refused(opener: Any) -> None:
    service = DistributedSessionService(await opener())
    for where in ({"user_id": None}, {"session_id": 5}, {"app_name": 1}):
        whole: Any = {**WHERE, "session_id": "s1", **where}
        for ask in (service.create_session, service.get_session, service.delete_session):
            with pytest.raises(InvalidValue, match=r"str, not (None|5|1)"):
                await ask(**whole)


async def test_what_json_cannot_hold_is_stored_as_adk_writes_it(opener: Any) -> None:
    service = DistributedSessionService(await opener())
    state = {"none": float("nan"), "pair": (1, 2), "raw": b"\xff", "when": datetime(2026, 1, 1, tzinfo=UTC)}
    written = {"none": None, "pair": [1, 2], "raw": "_w==", "when": "2026-01-01T00:00:00Z"}
    session = await service.create_session(**WHERE, session_id="s", state=state)
    assert session.state == written
    await service.append_event(session, Event(author="a", actions=EventActions(state_delta={"other": state})))
    assert (await service.get_session(**WHERE, session_id="s")).state == {**written, "other": written}


@pytest.mark.only(warm="real")
async def test_a_service_is_used_from_several_event_loops(opener: Any) -> None:
    """`Runner.run` begins a loop of its own for each call."""
    service = DistributedSessionService(await opener())
    await service.create_session(**WHERE, session_id="s")
    failed: list[BaseException] = []

    def elsewhere() -> None:
        async def append() -> None:
            session = await service.get_session(**WHERE, session_id="s")
            await service.append_event(session, said("from a thread"))

        try:
            asyncio.run(append())
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            failed.append(error)

    for _ in range(3):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        await asyncio.to_thread(thread.join)
    assert not failed
    assert len((await service.get_session(**WHERE, session_id="s")).events) == 3


async def test_an_append_is_one_script(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await opener()
    service = DistributedSessionService(store)
    session = await service.create_session(**WHERE, session_id="s")
    await service.append_event(session, said("warm it up"))
    sent: list[str] = []
    monkeypatch.setattr(store, "batch", lambda: sent.append("batch"))
    write = service.session_record(**WHERE, session_id="s").__class__.write

    async def counted(*args: Any, **more: Any) -> Any:
        sent.append("write")
        return await write(*args, **more)

    monkeypatch.setattr("distributed_state.AsyncSession.write", counted)
    event = said("go on", "agent")
    event.actions.state_delta = {"k": 1}
    await service.append_event(session, event)
    assert sent == ["write"]


# By URI


async def test_the_example_runs() -> None:
    agent = LlmAgent(name="traveller", model=Scripted(answer=travel_agent))
    names = {"AsyncStateStore": AsyncStateStore, "DistributedSessionService": DistributedSessionService}
    names |= {"Runner": Runner, "agent": agent, "Event": Event, "EventActions": EventActions}
    assert await run_examples(DistributedSessionService, **names) == 1


async def test_a_store_of_either_api_will_do() -> None:
    with StateStore.open(archive="memory") as store:
        service = DistributedSessionService(store)
        await service.create_session(**WHERE, session_id="s", state={"user:k": 1})
        assert store.user(service.user_record(**WHERE).id).get("k") == 1


@pytest.mark.only(warm=("valkey", "redis"), cold="postgres")
async def test_adk_makes_the_service_of_a_uri(opener: Any) -> None:
    from google.adk.cli.service_registry import get_service_registry

    register()
    uri = f"distributed+{opener.url}?archive={opener.archive}&namespace={opener.namespace}"
    service = get_service_registry().create_session_service(uri, agents_dir="unused")
    assert isinstance(service, DistributedSessionService)
    async with service:
        made = await asyncio.gather(*(service.create_session(**WHERE, session_id=f"s{n}") for n in range(5)))
        assert len(made) == 5
        assert len((await service.list_sessions(app_name="shop")).sessions) == 5
    with pytest.raises(ConfigurationError):
        await service.get_session(**WHERE, session_id="s0")
    assert get_service_registry().create_session_service("distributed+nonsense://x") is None


def test_ids_are_made_of_parts_and_parted() -> None:
    many = [["a", "b"], ["a/b"], ["a%2Fb"], ["a", "", "b"], ["", ""], ["%", "/"], ["a%", "b"], ["a%25", "b"]]
    assert [parted(joined(*parts)) for parts in many] == many
    assert len({joined(*parts) for parts in many}) == len(many)


# A runner


class Scripted(BaseLlm):
    """A model that answers by a function of how the conversation stands."""

    model: str = "scripted"
    answer: Callable[[LlmRequest], types.Content]

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        await asyncio.sleep(0)
        yield LlmResponse(content=self.answer(llm_request))


def remember(city: str, tool_context: ToolContext) -> dict[str, Any]:
    """Remember a city."""
    tool_context.state["city"] = city
    tool_context.state["user:cities"] = [*tool_context.state.get("user:cities", []), city]
    tool_context.state["temp:last"] = city
    return {"remembered": city}


def travel_agent(request: LlmRequest) -> types.Content:
    """Calls the tool with what the user said last, and then says so."""
    last = request.contents[-1].parts[-1]
    if last.function_response is not None:
        text = f"remembered {last.function_response.response['remembered']} after {len(request.contents)} contents"
        return types.Content(role="model", parts=[types.Part(text=text)])
    call = types.FunctionCall(name="remember", args={"city": last.text})
    return types.Content(role="model", parts=[types.Part(function_call=call)])


def runner(service: Any, answer: Callable[[LlmRequest], types.Content] = travel_agent) -> Runner:
    agent = LlmAgent(name="traveller", model=Scripted(answer=answer), tools=[remember])
    return Runner(app=App(name="shop", root_agent=agent), session_service=service)


async def ask(asked: Runner, text: str) -> list[str]:
    content = types.Content(role="user", parts=[types.Part(text=text)])
    found = []
    async for event in asked.run_async(user_id="ada", session_id="s", new_message=content):
        found += [part.text for part in (event.content.parts if event.content else []) if part.text]
    return found


@pytest.mark.replicas
async def test_a_conversation_goes_on_at_another_replica(opener: Any) -> None:
    one, other = [DistributedSessionService(await opener()) for _ in range(2)]
    await one.create_session(**WHERE, session_id="s")
    assert await ask(runner(one), "Oslo") == ["remembered Oslo after 3 contents"]
    assert await ask(runner(other), "Bergen") == ["remembered Bergen after 7 contents"]
    assert await ask(runner(one), "Tromso") == ["remembered Tromso after 11 contents"]
    read = await other.get_session(**WHERE, session_id="s")
    assert read.state == {"city": "Tromso", "user:cities": ["Oslo", "Bergen", "Tromso"]}
    assert len(read.events) == 12
    assert [event.get_function_calls()[0].args for event in read.events[1::4]] == [
        {"city": "Oslo"}, {"city": "Bergen"}, {"city": "Tromso"}
    ]  # fmt: skip


@pytest.mark.replicas
async def test_two_replicas_that_run_one_session_do_not_mix_their_turns(opener: Any) -> None:
    one, other = [DistributedSessionService(await opener()) for _ in range(2)]
    await one.create_session(**WHERE, session_id="s")

    async def turn(service: Any, city: str) -> str | None:
        try:
            await ask(runner(service), city)
        except StaleSessionError:
            return None
        return city

    for round in range(10):
        done = await asyncio.gather(turn(one, f"{round} of one"), turn(other, f"{round} of the other"))
        assert any(done), "one of two that run at once gets through"
    events = (await one.get_session(**WHERE, session_id="s")).events
    # Each turn's own events stand together: what was refused stops there, and nobody goes on within it.
    turns = [event.invocation_id for event in events]
    assert [each for at, each in enumerate(turns) if at == 0 or turns[at - 1] != each] == list(dict.fromkeys(turns))


async def test_without_the_count_two_workers_mix_their_turns(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above."""
    monkeypatch.setattr("distributed_state.adapters.adk.service.continues", lambda stored: False)
    service = DistributedSessionService(await opener())
    one = await service.create_session(**WHERE, session_id="s")
    other = await service.get_session(**WHERE, session_id="s")
    for number in range(2):
        await service.append_event(one, said(f"{number} of one"))
        await service.append_event(other, said(f"{number} of the other"))
    read = await service.get_session(**WHERE, session_id="s")
    assert texts(read) == ["0 of one", "0 of the other", "1 of one", "1 of the other"]


@pytest.mark.replicas
@pytest.mark.timeout(120)
async def test_keys_of_a_user_and_an_app_are_kept_where_those_of_adks_redis_service_are_lost(opener: Any) -> None:
    """Twenty sessions of one user, ten keys each, at two replicas. The peer runs on the same server."""
    from google.adk.integrations.redis._redis_session_service import RedisSessionService, RedisSessionServiceConfig

    async def race(services: list[Any]) -> tuple[int, int]:
        sessions = [await services[n % 2].create_session(**WHERE, session_id=f"s{n}") for n in range(20)]

        async def write(n: int) -> None:
            for key in range(10):
                event = sets(**{f"user__{n}.{key}": key, f"app__{n}.{key}": key})
                await services[n % 2].append_event(sessions[n], event)

        await asyncio.gather(*map(write, range(20)))
        state = (await services[0].get_session(**WHERE, session_id="s0")).state
        return tuple(sum(key.startswith(prefix) for key in state) for prefix in ("user:", "app:"))  # type: ignore[return-value]

    assert await race([DistributedSessionService(await opener()) for _ in range(2)]) == (200, 200)
    if opener.warm in ("valkey", "redis"):
        config = RedisSessionServiceConfig(uri=opener.url, key_prefix=f"peer{opener.namespace}:")
        peers = [RedisSessionService(config) for _ in range(2)]
        try:
            theirs = await race(peers)
        finally:
            async with AsyncExitStack() as stack:
                for peer in peers:
                    stack.push_async_callback(peer._get_redis().aclose)
        assert theirs < (200, 200), "the race is one: the peer loses keys in it"


def test_a_store_that_is_not_open_says_so() -> None:
    service = DistributedSessionService(AsyncStateStore.open(archive="memory"))
    with pytest.raises(ConfigurationError, match="open it first"):
        asyncio.run(service.get_session(**WHERE, session_id="s"))
