"""Tools in turns. Law: a tool's change is kept with its call, once, in the session and in the user's record."""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import MutableMapping
from typing import Annotated, Any

import pytest
from below import Worker, keys_of, redis_of, tiers, until
from proxy import Proxy
from pydantic import AfterValidator
from recording_agents import now
from sync_api import Blocking, core, unwrap

from distributed_state import (
    TOOLBOX,
    ColdUnavailable,
    Deleted,
    DurabilityUnknown,
    InvalidValue,
    LockTimeout,
    TooLarge,
    ToolCall,
    Unavailable,
    WarmUnavailable,
    Workflow,
    tool,
)
from distributed_state.conversation import tools
from distributed_state.formats import to_anthropic, to_openai
from distributed_state.tiers import commit as write_path
from distributed_state.warm.scripts import COMMIT

State = MutableMapping[str, Any]


WITHOUT_DOCSTRINGS = """
from distributed_state import TOOLBOX, InvalidValue, tool

def look(city: str) -> str:
    'Look.'
    return city

print(tool(description="Look.")(look).description, all(each.description for each in TOOLBOX))
try:
    tool(look)
except InvalidValue as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("option", "said"), [("-O", ["Look. True"]), ("-OO", ["Look. True", "look: python -OO removes docstrings"])]
)
def test_without_docstrings_a_tool_needs_a_description(option: str, said: list[str]) -> None:
    ran = subprocess.run([sys.executable, option, "-c", WITHOUT_DOCSTRINGS], capture_output=True, text=True, timeout=60)
    lines = ran.stdout.splitlines()
    assert len(lines) == len(said), ran.stderr
    assert all(line.startswith(begin) for line, begin in zip(lines, said, strict=True))


@tool
def visit(state: State, user_state: State, city: str) -> int:
    """Count a visit, for the conversation and for the user."""
    state["visits"] = [*state.get("visits", []), city]
    user_state["visits"] = user_state.get("visits", 0) + 1
    return len(state["visits"])


@tool
def fail(state: State, user_state: State, how: str = "error") -> Any:
    """Change everything, then fail."""
    state["visits"] = "spoiled"
    user_state.setdefault("list", []).append(1)
    if how == "error":
        raise ZeroDivisionError("no")
    if how == "value":
        state["bad"] = object()
    if how == "deep":
        state["list"] = [1]
        state["list"].append({2})
    return object()


async def test_a_tool_changes_its_session_and_its_user(store: Any) -> None:
    session, user = store.session("s", user="u1"), store.user("u1")
    async with session.turn(request_id="r") as turn:
        call = await turn.call(visit, {"city": "Oslo"}, call_id="c1")
        assert (call.result, call.succeeded, call.tool_name, call.call_id) == (1, True, "visit", "c1")
        assert call.arguments == {"city": "Oslo"}
        assert call.duration_ms is not None
        assert call.duration_ms >= 0
        assert (await turn.call(visit, '{"city": "Rome"}', call_id="c2")).result == 2
        assert [each.call_id for each in turn.tool_calls] == ["c1", "c2"]
        assert await user.get("visits", fresh=True) is None, "nothing before the end of the turn"
    assert await session.get("visits", fresh=True) == ["Oslo", "Rome"]
    assert (await user.get("visits", fresh=True), await user.version()) == (2, 1)
    assert await session.version() == 1


async def test_a_call_repeated_by_the_model_is_run_once(store: Any) -> None:
    session = store.session("s", user="u1")
    async with session.turn() as turn:
        first = await turn.call(visit, {"city": "Oslo"}, call_id="c")
        assert await turn.call(visit, {"city": "Oslo"}, call_id="c") == first
        other = await turn.call(visit, {"city": "Rome"}, call_id="c")
        assert not other.succeeded
        assert "'c' is that of another call of visit" in other.error
        assert turn.tool_calls == (first,)
        # Without an id each call is another one.
        await turn.call(visit, {"city": "Oslo"})
    assert await session.get("visits", fresh=True) == ["Oslo", "Oslo"]


@pytest.mark.parametrize("how", ["error", "value", "deep", "result"])
async def test_a_tool_that_fails_changes_nothing(store: Any, how: str) -> None:
    session = store.session("s", user="u1")
    await session.set("list", [0])
    async with session.turn() as turn:
        await turn.call(visit, {"city": "Oslo"})
        call = await turn.call(fail, {"how": how})
        assert not call.succeeded
        assert call.result is None
        assert call.error.startswith("ZeroDivisionError: no" if how == "error" else "InvalidValue: ")
        assert "fail failed: " in call.to_observation()
    assert await session.get_all(fresh=True) == {"list": [0], "visits": ["Oslo"]}
    assert await store.user("u1").get_all(fresh=True) == {"visits": 1}


@tool
def pack(state: State, items: list[str], weight: float = 0.0) -> str:
    """Pack a suitcase."""
    state["packed"] = items
    return "packed"


TAKES = "pack takes items: array, weight: number (optional)"
MALFORMED: list[tuple[Any, Any, str]] = [
    (pack, "{bad", "the 4 characters of arguments are not JSON"),
    (pack, "null", "the arguments are an object, not null"),
    (pack, "[1]", "the arguments are an object, not a list"),
    (pack, [1], "the arguments are an object, not a list"),
    (pack, '"text"', "the arguments are an object, not a str"),
    (pack, "\ud800", "not JSON"),
    (pack, '{"items": [], "weight": 1e999}', "not JSON"),
    (pack, ' {"items": [], "weight": NaN}', "not JSON"),
    (pack, '{"items": ' + "[" * 5000 + "]" * 5000 + "}", "not JSON"),
    (pack, {"items": [], 5: 1}, "not JSON"),
    (pack, {"items": {1, 2}}, "not JSON"),
    (pack, None, "items: Field required"),
    (pack, "", "items: Field required"),
    (pack, {"items": "socks", "weight": "heavy"}, "items: Input should be a valid list; weight: Input should be"),
    (pack, {"items": [], "colour": "red"}, "colour: Extra inputs are not permitted"),
    (pack, {"items": []} | {"c" * 9999 + str(n): 1 for n in range(50)}, f"{'c' * 80}: Extra inputs"),
    (pack, {"items": [], "state": {}, "user_state": {}}, "state: Extra inputs are not permitted; user_state: Extra"),
    ("pack", '{"items": 3}', "items: Input should be a valid list"),
    ("fly", "{}", "there is no tool 'fly'; there are visit, pack"),
    ("fly to\ud800 Rome!" * 40, "{}", "there is no tool 'fly to"),
    ("", "{}", "there is no tool ''"),
]  # fmt: skip


async def test_what_a_model_got_wrong_is_a_failed_call_and_the_turn_goes_on(store: Any) -> None:
    for number, (asked, arguments, error) in enumerate(MALFORMED):
        await goes_on(store.session(f"s{number}", user=f"u{number}"), asked, arguments, error)


async def goes_on(session: Any, asked: Any, arguments: Any, error: str) -> None:
    async with session.turn() as turn:
        await turn.call(visit, {"city": "Oslo"}, call_id="c0")
        call = await turn.call(asked, arguments, call_id="c1", tools=[visit, pack])
        assert isinstance(call, ToolCall)
        assert not call.succeeded
        assert error in call.error
        assert len(call.error) < 1000
        assert TAKES in call.error or "there is no tool" in call.error, "what was expected"
        assert turn.tool_calls[-1] is call
        # The model answers, under the same id if it likes.
        again = await turn.call("pack", '{"items": ["socks"]}', call_id="c1", tools=[visit, pack])
        assert (again.result, again.call_id) == ("packed", "c1")
        for each in call, again:
            turn.append({"role": "assistant", "tool_calls": [each.to_request()]}, each.to_message())
    fields = await session.get_all(fresh=True)
    assert fields == {"visits": ["Oslo"], "packed": ["socks"]}
    stored = await session.messages()
    sent = to_openai(stored, orphans="refuse")
    assert [each["role"] for each in sent] == ["assistant", "tool"] * 2
    for asking, answering in (sent[:2], sent[2:]):
        function = asking["tool_calls"][0]["function"]
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", function["name"])
        assert isinstance(json.loads(function["arguments"]), dict)
        assert answering["tool_call_id"] == asking["tool_calls"][0]["id"]
    assert error in sent[1]["content"]
    _, blocks = to_anthropic(stored, orphans="refuse")
    parts = [part for each in blocks for part in each["content"] if isinstance(part, dict)]
    uses = [part for part in parts if part["type"] == "tool_use"]
    results = [part for part in parts if part["type"] == "tool_result"]
    assert [each["id"] for each in uses] == [each["tool_use_id"] for each in results]
    assert all(isinstance(each["input"], dict) for each in uses)
    assert [each.get("is_error", False) for each in results] == [True, False]


async def test_a_single_call_that_a_model_got_wrong_is_a_failed_call_too(store: Any) -> None:
    session = store.session("s", user="u1")
    for asked, arguments in (pack, "{bad"), (pack, "null"), ("pack", {"items": 1}), ("fly", None):
        call = await session.call(asked, arguments, call_id="c", turn_id="t", tools=[pack])
        assert not call.succeeded
        assert call.call_id == "c"
    assert await session.version(fresh=True) == 0
    for _ in range(2):
        assert (await session.call("pack", {"items": []}, call_id="c", turn_id="t", tools=[pack])).result == "packed"
    with pytest.raises(InvalidValue, match="was pack, not fly"):
        await session.call("fly", call_id="c", turn_id="t", tools=[pack])


async def test_a_step_of_a_workflow_goes_on_after_a_malformed_call(store: Any) -> None:
    told: list[str] = []

    async def plan(state: Any, turn: Any) -> Any:
        for asked, arguments in (pack, "{bad"), ("fly", "{}"), (pack, '{"items": ["socks"]}'):
            call = await now(turn.call(asked, arguments, call_id=f"c{len(told)}", tools=[pack]))
            told.append(call.to_observation())
        return state.to_done(told[-1])

    def blocking_plan(state: Any, turn: Any) -> Any:
        return asyncio.run(plan(state, turn))

    step = plan if not isinstance(store, Blocking) else blocking_plan
    state = await store.run(Workflow({"planning": step}), "pack", session_id="s")
    assert state.final_answer == "packed"
    assert "not JSON" in told[0]
    assert "no tool 'fly'; there are pack" in told[1]
    assert await store.session("s").get("packed", fresh=True) == ["socks"]


def odd(value: str) -> str:
    raise LookupError(f"no {value}")


@tool
def look(thing: Annotated[str, AfterValidator(odd)]) -> str:
    """Look for something that is never there."""
    return thing


async def test_a_failure_in_a_validator_is_told_to_the_model(store: Any) -> None:
    async with store.session("s").turn() as turn:
        assert (await turn.call(look, {"thing": "hat"})).error == "LookupError: no hat"


@tool
def keep_count(agent_state) -> str:  # type: ignore[no-untyped-def]
    """Count, in the way of a record."""
    count = agent_state.get("counter", 0) + 1
    agent_state.set("counter", count)
    agent_state.update("user", {"seen": count})
    agent_state.update({"as": "a dict"}, also=True)
    agent_state.delete("gone")
    agent_state.delete("gone")
    assert agent_state.has("counter")
    assert not agent_state.has("gone")
    assert agent_state.get_all()["user"] == {"name": "Ana", "seen": count}
    return f"{count}"


async def test_the_session_is_given_as_agent_state_too_with_the_methods_of_a_record(store: Any) -> None:
    session = store.session("s")
    await session.set_many({"user": {"name": "Ana"}, "gone": 1})
    async with session.turn() as turn:
        assert [(await turn.call(keep_count)).result for _ in range(2)] == ["1", "2"]
    assert await session.get_all(fresh=True) == {
        "counter": 2, "user": {"name": "Ana", "seen": 2}, "as": "a dict", "also": True,
    }  # fmt: skip
    assert keep_count.parameters["properties"] == {}


async def test_a_tool_that_needs_a_user_needs_one(store: Any) -> None:
    with pytest.raises(InvalidValue, match="user="):
        async with store.session("s").turn() as turn:
            await turn.call(visit, {"city": "Oslo"})
    await store.session("owned", user="u%1:é").set("n", 1)
    # The owner is known from the record, whoever opens it.
    async with store.session("owned").turn() as turn:
        await turn.call(visit, {"city": "Oslo"})
    assert await store.user("u%1:é").get("visits", fresh=True) == 1


async def test_a_tool_may_change_its_user_alone(store: Any) -> None:
    for request_id in (None, "r1", "r1", "r2"):
        async with store.session("s", user="u1").turn(request_id=request_id) as turn:
            if not turn.repeated:
                await turn.call(tools.set_preference, {"name": f"seat {request_id}", "value": "aisle"})
    preferences = await store.user("u1").get("preferences", fresh=True)
    assert preferences == {"seat None": "aisle", "seat r1": "aisle", "seat r2": "aisle"}
    fresh = store.session(user="u2")
    async with fresh.turn() as turn:
        await turn.call(visit, {"city": "Oslo"})
    assert await fresh.get("visits") == ["Oslo"]
    assert await store.user("u2").get("visits") == 1


async def test_a_turn_that_fails_drops_its_tools_changes(store: Any) -> None:
    session = store.session("s", user="u1")
    with pytest.raises(ZeroDivisionError):
        async with session.turn(request_id="r") as turn:
            await turn.call(visit, {"city": "Oslo"})
            raise ZeroDivisionError
    assert await session.version(fresh=True) == 0
    assert await store.user("u1").version(fresh=True) == 0


async def test_a_repeated_turn_counts_once(store: Any) -> None:
    session = store.session("s", user="u1")
    for _ in range(3):
        async with session.turn(request_id="r") as turn:
            if not turn.repeated:
                await turn.call(visit, {"city": "Oslo"}, call_id="c")
    assert await store.user("u1").get("visits", fresh=True) == 1
    assert await session.get("visits", fresh=True) == ["Oslo"]


async def test_the_same_call_id_in_another_turn_is_another_call(store: Any) -> None:
    """Ids that models give repeat from turn to turn."""
    session = store.session("s", user="u1")
    for number in range(3):
        async with session.turn(request_id=f"r{number}") as turn:
            await turn.call(visit, {"city": "Oslo"}, call_id="call_0")
        call = await session.call(visit, {"city": "Rome"}, call_id="call_0", turn_id=f"t{number}")
        assert call.result == 2 * number + 2
    assert await store.user("u1").get("visits", fresh=True) == 6


async def test_a_single_call_is_a_turn_of_its_own(store: Any) -> None:
    session = store.session("s", user="u1")
    calls = [await session.call(visit, {"city": "Oslo"}, call_id="c", turn_id="t") for _ in range(3)]
    assert calls[0] == calls[1] == calls[2]
    assert isinstance(calls[0], ToolCall)
    assert await session.version(fresh=True) == 1
    failed = await session.call(fail, call_id="f", turn_id="t")
    assert failed.error == "ZeroDivisionError: no"
    assert await session.version(fresh=True) == 1, "a failure is not remembered"


@pytest.mark.replicas
async def test_a_call_sent_to_many_replicas_counts_once(opener: Any) -> None:
    replicas = [await opener() for _ in range(3)]

    async def call(store: Any, number: int) -> Any:
        session = store.session("s", user="u1")
        return (await session.call(visit, {"city": "Oslo"}, call_id="c", turn_id=f"t{number}")).result

    for number in range(8):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call(store, number)) for store in replicas]
        assert [task.result() for task in tasks] == [number + 1] * 3
    assert await replicas[0].user("u1").get("visits", fresh=True) == 8


@pytest.mark.replicas
async def test_tools_of_many_sessions_add_up_in_one_user(opener: Any) -> None:
    """Nobody holds the user's record; what two sessions change there at once is added."""
    await add_up(opener)


@pytest.mark.replicas
async def test_without_the_expected_version_changes_would_be_lost(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    commit = write_path.commit

    async def careless(tiers: Any, keys: Any, draft: Any, **more: Any) -> Any:
        return await commit(tiers, keys, draft._replace(expected=None), **more)

    monkeypatch.setattr(write_path, "commit", careless)
    with pytest.raises((AssertionError, ExceptionGroup)):
        await add_up(opener)


async def add_up(opener: Any) -> None:
    replicas = [await opener() for _ in range(3)]

    async def work(store: Any, name: str) -> None:
        for number in range(15):
            async with store.session(name, user="u1").turn(request_id=f"r{number}") as turn:
                await turn.call(visit, {"city": "Oslo"})
                await turn.call(tools.set_preference, {"name": f"{name}{number}", "value": number})

    async with asyncio.TaskGroup() as group:
        for at, store in enumerate(replicas):
            group.create_task(work(store, "abc"[at]))
    user = replicas[0].user("u1")
    assert await user.get("visits", fresh=True) == 45
    assert await user.get("preferences") == {f"{name}{n}": n for name in "abc" for n in range(15)}


@pytest.mark.only(warm="single")
async def test_what_a_lost_connection_cut_off_is_completed(opener: Any) -> None:
    """The answers of both commits are lost; the retry finds both applied."""
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, max_staleness=0)
        session = store.session("s", user="u1")
        await session.set("n", 1)
        for number in range(3):
            async with session.turn(request_id=f"r{number}") as turn:
                await turn.call(visit, {"city": "Oslo"})
                proxy.lose(COMMIT.sha).go.set()
        assert await store.user("u1").get("visits", fresh=True) == 3
        assert len(await session.get("visits", fresh=True)) == 3
        await opener.close()


@pytest.mark.parametrize("scope", ["session", "user"])
@pytest.mark.only(warm="single")
async def test_a_turn_of_which_nobody_knows_whether_it_is_applied_leaves_its_user_alone(
    opener: Any, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit, or the question before it of what would come of the user's part, has no answer, and SQL is away."""

    def away(*_: Any) -> int:
        raise ColdUnavailable("it is away")

    other = await opener(archiver=False)
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, max_staleness=0, archiver=False, timeout=0.5)
        session, user = store.session("s", user="u1"), store.user("u1")
        await session.set("n", 1)
        await user.set("n", 1)
        with monkeypatch.context() as patch:
            patch.setattr(core(store)._lifecycle.cold, "applied", away)
            with pytest.raises(DurabilityUnknown if scope == "session" else Unavailable):
                async with session.turn(request_id="r") as turn:
                    await turn.call(visit, {"city": "Oslo"})
                    await other.admin.archive()
                    delays = [proxy.hold(COMMIT.sha) for _ in range(2)]
                    if scope == "session":
                        delays[0].go.set()
                    task = asyncio.ensure_future(unanswered(other, delays[scope == "session"], scope))
            await task
        assert await other.user("u1").version(fresh=True) == 1
        assert await other.session("s").version(fresh=True) == 1
        async with session.turn(request_id="r") as turn:
            assert not turn.repeated
            await turn.call(visit, {"city": "Oslo"})
        assert await other.user("u1").get("visits", fresh=True) == 1
        await opener.close()


async def unanswered(store: Any, delay: Any, scope: str) -> None:
    """When the request lies about, the record that it is for leaves Redis."""
    await until(delay.arrived.is_set)
    with redis_of(store) as client:
        client.delete(keys_of(store, "s" if scope == "session" else "u1", scope).record)


async def test_a_repeated_request_completes_what_a_crash_left_out(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session, user = store.session("s", user="u1"), store.user("u1")
    await user.set_many({"visits": 10, "other": 1})
    commit = write_path.commit

    async def half(tiers: Any, keys: Any, draft: Any, **more: Any) -> Any:
        if keys.ref.scope == "user":
            raise WarmUnavailable("the connection broke here")
        return await commit(tiers, keys, draft, **more)

    monkeypatch.setattr(write_path, "commit", half)
    with pytest.raises(DurabilityUnknown, match="the connection broke here"):
        async with session.turn(request_id="r") as turn:
            await turn.call(visit, {"city": "Oslo"})
    monkeypatch.setattr(write_path, "commit", commit)
    assert await session.get("visits", fresh=True) == ["Oslo"]
    await user.increment("visits", 5)
    for _ in range(3):
        async with session.turn(request_id="r") as turn:
            assert turn.repeated
    assert await user.get_all(fresh=True) == {"visits": 16, "other": 1}


# The user's part is refused, held up or cut off


def held(store: Any, id: str = "u1", px: int | None = None) -> None:
    """Somebody else holds the user's record."""
    with redis_of(store) as client:
        epoch = client.hget(keys_of(store, id, "user").meta, "epoch").decode()
        client.set(keys_of(store, id, "user").lock, f"x1@{epoch}:somebody", px=px)


def given_back(store: Any, id: str = "u1") -> None:
    with redis_of(store) as client:
        client.delete(keys_of(store, id, "user").lock)


def after_the_turns_own(monkeypatch: pytest.MonkeyPatch, happens: Any) -> None:
    """Let something happen between the commit of the next turn and that of its user's part."""
    commit = write_path.commit

    async def and_then(tiers: Any, keys: Any, draft: Any, **more: Any) -> Any:
        done = await commit(tiers, keys, draft, **more)
        if keys.ref.scope == "session":
            monkeypatch.setattr(write_path, "commit", commit)
            found = happens()
            if inspect.isawaitable(found):
                await found
        return done

    monkeypatch.setattr(write_path, "commit", and_then)


async def test_a_user_that_somebody_holds_is_waited_for_before_anything_is_written(store: Any) -> None:
    session, user = store.session("s", user="u1"), store.user("u1")
    await user.set("n", 1)
    held(store)
    for wait in (0.0, 0.05):
        with pytest.raises(LockTimeout, match="user:u1"):
            async with session.turn(request_id="r", wait=wait) as turn:
                await turn.call(visit, {"city": "Oslo"})
    assert (await session.version(fresh=True), await user.version(fresh=True)) == (0, 1)
    held(store, px=200)
    async with session.turn(request_id="r") as turn:
        assert not turn.repeated
        await turn.call(visit, {"city": "Oslo"})
    assert await session.get("visits", fresh=True) == ["Oslo"]
    assert await user.get("visits", fresh=True) == 1


async def test_a_user_that_would_grow_too_large_stops_the_turn(opener: Any) -> None:
    """As the server sees it now: the turn read the record before somebody filled it."""
    store = await opener(max_record_bytes=2000)
    session, user = store.session("s", user="u1"), store.user("u1")
    for number in range(2):
        with pytest.raises(TooLarge, match="user:u1"):
            async with session.turn(request_id="r") as turn:
                await turn.call(tools.set_preference, {"name": "seat", "value": "x" * 500})
                if not number:
                    await user.set("text", "y" * 1900)
    assert await session.version(fresh=True) == 0
    await user.delete("text")
    async with session.turn(request_id="r") as turn:
        assert not turn.repeated
        await turn.call(tools.set_preference, {"name": "seat", "value": "x" * 500})
    assert await user.get("preferences", fresh=True) == {"seat": "x" * 500}


async def test_a_user_that_is_held_just_then_is_waited_for(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = store.session("s", user="u1")
    after_the_turns_own(monkeypatch, lambda: held(store, px=200))
    for request_id in (None, "r"):
        async with session.turn(request_id=request_id, wait=0.0) as turn:
            await turn.call(visit, {"city": "Oslo"})
    assert await store.user("u1").get("visits", fresh=True) == 2
    assert await session.version(fresh=True) == 2


async def test_a_turn_whose_users_part_fails_is_applied_and_completed_when_repeated(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not refused: a refused turn may be done again, and this one would be doubled."""
    store = await opener(retry_for=1.0)
    session, user = store.session("s", user="u1"), store.user("u1")
    after_the_turns_own(monkeypatch, lambda: held(store))
    with pytest.raises(DurabilityUnknown, match=r"turn is applied.*user:u1.*request 'r'") as report:
        async with session.turn(request_id="r", wait=0.0) as turn:
            await turn.call(visit, {"city": "Oslo"})
            turn.outcome = "booked"
    assert (report.value.version, report.value.request_id) == (1, "r")
    assert isinstance(report.value.__cause__, LockTimeout)
    assert pickle.loads(pickle.dumps(report.value)).request_id == "r"
    assert turn.written.version == 1
    again = session.turn(request_id="r", wait=0.0)
    with pytest.raises(DurabilityUnknown, match="user:u1"):
        await again.__aenter__()
    assert (again.repeated, again.outcome) == (True, "booked"), "the outcome is there all the same"
    assert await user.version(fresh=True) == 0
    given_back(store)
    for _ in range(2):
        async with session.turn(request_id="r") as turn:
            assert (turn.repeated, turn.outcome) == (True, "booked")
    assert await session.get("visits", fresh=True) == ["Oslo"]
    assert (await user.get("visits", fresh=True), await user.version()) == (1, 1)


async def test_without_a_request_id_it_is_said_that_nothing_completes_the_turn(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opener(retry_for=1.0, max_record_bytes=2000)
    session, user = store.session("s", user="u1"), store.user("u1")
    after_the_turns_own(monkeypatch, lambda: unwrap(user).set("text", "y" * 1990))
    with pytest.raises(DurabilityUnknown, match=r"grow to .*no request id") as report:
        async with session.turn() as turn:
            await turn.call(visit, {"city": "Oslo"})
    assert (report.value.version, report.value.request_id) == (1, None)
    assert isinstance(report.value.__cause__, TooLarge)
    assert await session.get("visits", fresh=True) == ["Oslo"]


@pytest.mark.wide
@pytest.mark.replicas
async def test_a_worker_that_dies_between_the_two_commits_is_completed(opener: Any) -> None:
    store = await opener()
    place = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    with Worker("visit", id="s", user="u1", request_id="r", **place) as worker:
        worker.process.wait(30)
    assert worker.process.exit_code == -signal.SIGKILL
    session, user = store.session("s"), store.user("u1")
    assert (await session.get("visits", fresh=True), await user.version(fresh=True)) == (1, 0)
    for _ in range(2):
        async with session.turn(request_id="r") as turn:
            assert (turn.repeated, turn.outcome) == (True, {"version": 1})
    assert await user.get("visits", fresh=True) == 1


@pytest.mark.only(warm="real")
async def test_what_is_not_archived_yet_is_completed_all_the_same(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's part is applied: its user's has to follow, whatever is told of SQL."""
    store = await opener(durability="archived")
    session, reach, calls = store.session("s", user="u1"), tiers(store).archiver.reach, []

    async def away(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise ColdUnavailable("SQL is away")
        await reach(*arguments)

    monkeypatch.setattr(tiers(store).archiver, "reach", away)
    with pytest.raises(DurabilityUnknown, match="not archived"):
        async with session.turn() as turn:
            await turn.call(visit, {"city": "Oslo"})
    assert await store.user("u1").get("visits", fresh=True) == 1


@pytest.mark.replicas
async def test_a_turn_that_is_refused_leaves_its_user_alone(opener: Any) -> None:
    store = await opener(max_record_bytes=2000)
    session, user = store.session("s", user="u1"), store.user("u1")
    await session.set("text", "x" * 1500)
    for _ in range(2):
        with pytest.raises(TooLarge):
            async with session.turn(request_id="r") as turn:
                await turn.call(visit, {"city": "y" * 800})
    assert await user.version(fresh=True) == 0
    async with session.turn(request_id="r") as turn:
        assert not turn.repeated
        await turn.call(visit, {"city": "Oslo"})
    assert await user.get("visits", fresh=True) == 1


async def test_the_ready_tools(store: Any) -> None:
    session = store.session("s", user="u1")
    async with session.turn() as turn:
        assert (await turn.call(tools.count)).result == 1
        assert (await turn.call(tools.count, {"by": 4})).result == 5
        assert (await turn.call(tools.reset)).result == 5
        assert (await turn.call(tools.count, {"name": "notes"})).result == 1
        assert not (await turn.call(tools.note, {"key": "a", "text": "b"})).succeeded
    async with session.turn() as turn:
        del turn["notes"]
        await turn.call(tools.note, {"key": "seat", "text": "aisle"})
        await turn.call(tools.set_preference, {"name": "airline", "value": "Delta"})
        assert (await turn.call(tools.get_preference, {"name": "airline"})).result == "Delta"
        assert (await turn.call(tools.get_preference, {"name": "hotel"})).result is None
        statistics = (await turn.call(tools.user_statistics)).result
        assert statistics == {
            "counters": {"counter": 0}, "notes": 1, "preferences": {"airline": "Delta"}, "conversations": 0,
        }  # fmt: skip
        assert not (await turn.call(tools.count, {"name": "notes"})).succeeded
    other = store.session("another", user="u1")
    async with other.turn() as turn:
        assert (await turn.call(tools.get_preference, {"name": "airline"})).result == "Delta"
    assert {each.name for each in TOOLBOX} == {
        "count", "reset", "note", "get_preference", "set_preference", "user_statistics",
    }  # fmt: skip


@pytest.mark.only(api="asyncio")
async def test_a_coroutine_may_be_a_tool(store: Any) -> None:
    @tool
    async def slow(state: State, session: Any) -> str:
        await asyncio.sleep(0)
        state["slow"] = True
        return str(session.id)

    async with store.session("s").turn() as turn:
        assert (await turn.call(slow)).result == "s"
    assert await store.session("s").get("slow", fresh=True) is True


@pytest.mark.only(api="blocking")
async def test_a_tool_is_given_the_session_of_its_api(store: Any) -> None:
    @tool
    def ask(session: Any) -> Any:
        session.set("asked", True)
        return session.get("asked")

    @tool
    async def no() -> None: ...

    async with store.session("s").turn() as turn:
        assert (await turn.call(ask)).result is True
        with pytest.raises(InvalidValue, match="asyncio"):
            await turn.call(no)


async def _visit(session: Any, request_id: str) -> bool:
    async with session.turn(request_id=request_id) as turn:
        if not turn.repeated:
            await turn.call(visit, {"city": "Oslo"})
        return bool(turn.repeated)


@pytest.mark.replicas
async def test_what_the_users_record_has_forgotten_is_not_counted_again(opener: Any) -> None:
    store = await opener(remembered_requests=3)
    session, user = store.session("s", user="u1"), store.user("u1")
    async with session.turn(slot="step") as turn:
        core(turn).request_id = "s/1"
        await turn.call(visit, {"city": "Oslo"})
    await _visit(session, "r")
    for number in range(5):
        await _visit(store.session("other", user="u1"), f"r{number}")
    assert await user.get("visits", fresh=True) == 7
    assert await _visit(session, "r"), "remembered by the session"
    async with session.turn(slot="step") as turn:
        turn["x"] = 1
    assert await user.get("visits", fresh=True) == 7


async def test_a_fork_does_not_count_what_its_origin_counted(store: Any) -> None:
    await _visit(store.session("s", user="u1"), "r")
    await store.session("s").fork("t")
    assert await _visit(store.session("t"), "r")
    assert await store.user("u1").get("visits", fresh=True) == 1


async def test_a_user_that_was_rolled_back_stays_so(store: Any) -> None:
    session, user = store.session("s", user="u1"), store.user("u1")
    await user.set("visits", 10)
    await _visit(session, "r")
    await user.rollback(version=1)
    assert await _visit(session, "r")
    assert await user.get("visits", fresh=True) == 10


async def test_a_user_that_was_deleted_stops_tools_before_anything_is_written(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a request that was answered before finds its outcome, even if its change of the user was lost in a crash."""
    session, user = store.session("s", user="u1"), store.user("u1")
    await user.set("visits", 10)
    commit = write_path.commit

    async def half(tiers: Any, keys: Any, draft: Any, **more: Any) -> Any:
        if keys.ref.scope == "user":
            raise WarmUnavailable("the connection broke here")
        return await commit(tiers, keys, draft, **more)

    monkeypatch.setattr(write_path, "commit", half)
    with pytest.raises(DurabilityUnknown):
        await _visit(session, "r")
    monkeypatch.setattr(write_path, "commit", commit)
    await store.delete("u1", scope="user")
    assert await _visit(session, "r")
    with pytest.raises(Deleted, match="user:u1"):
        await _visit(session, "another")
    assert await session.get("visits", fresh=True) == ["Oslo"]


async def test_call_ids_do_not_collide(store: Any) -> None:
    session = store.session("s", user="u1")
    await session.call(visit, {"city": "Oslo"}, turn_id="a/b", call_id="c")
    assert (await session.call(visit, {"city": "Rome"}, turn_id="a", call_id="b/c")).arguments == {"city": "Rome"}
    with pytest.raises(InvalidValue, match="was visit, not fail"):
        await session.call(fail, turn_id="a", call_id="b/c")
    for bad in ("", None, 5):
        with pytest.raises(InvalidValue, match="call_id"):
            await session.call(visit, {"city": "Oslo"}, call_id=bad)
    with pytest.raises(InvalidValue, match="a Tool"):
        await session.call(visit.function, {"city": "Oslo"}, call_id="d")


async def test_arguments_that_are_refused_are_not_shown(store: Any) -> None:
    for bad in ('{"city": "secret', '["secret"]', {"city": ["secret"]}, {"city": "Oslo", "secret": {1}}):
        call = await store.session("s", user="u1").call(visit, bad, call_id="c")
        assert "secret" not in str(call.error)
