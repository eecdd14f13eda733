"""Tools in turns. Law: a tool's change is kept with its call, once, in the session and in the user's record."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest
from faces import core
from proxy import Proxy

from distributed_state import TOOLBOX, Deleted, InvalidValue, TooLarge, ToolCall, WarmUnavailable, record, tool
from distributed_state.agent import toolbox
from distributed_state.warm import COMMIT

pytestmark = pytest.mark.brief("servers")

State = MutableMapping[str, Any]


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
        with pytest.raises(InvalidValue, match="other arguments"):
            await turn.call(visit, {"city": "Rome"}, call_id="c")
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


async def test_wrong_arguments_are_told_to_the_model(store: Any) -> None:
    async with store.session("s", user="u1").turn() as turn:
        call = await turn.call(visit, {"town": "Oslo"})
        assert call.error is not None
        assert "city" in call.error
        with pytest.raises(InvalidValue, match="not JSON"):
            await turn.call(visit, "{city")


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
                await turn.call(toolbox.set_preference, {"name": f"seat {request_id}", "value": "aisle"})
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
    commit = record.commit

    async def careless(tiers: Any, names: Any, draft: Any, **more: Any) -> Any:
        draft.expected = None
        return await commit(tiers, names, draft, **more)

    monkeypatch.setattr(record, "commit", careless)
    with pytest.raises((AssertionError, ExceptionGroup)):
        await add_up(opener)


async def add_up(opener: Any) -> None:
    replicas = [await opener() for _ in range(3)]

    async def work(store: Any, name: str) -> None:
        for number in range(15):
            async with store.session(name, user="u1").turn(request_id=f"r{number}") as turn:
                await turn.call(visit, {"city": "Oslo"})
                await turn.call(toolbox.set_preference, {"name": f"{name}{number}", "value": number})

    async with asyncio.TaskGroup() as group:
        for at, store in enumerate(replicas):
            group.create_task(work(store, "abc"[at]))
    user = replicas[0].user("u1")
    assert await user.get("visits", fresh=True) == 45
    assert await user.get("preferences") == {f"{name}{n}": n for name in "abc" for n in range(15)}


@pytest.mark.only(warm=("valkey", "redis"))
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


async def test_a_repeated_request_completes_what_a_crash_left_out(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session, user = store.session("s", user="u1"), store.user("u1")
    await user.set_many({"visits": 10, "other": 1})
    commit = record.commit

    async def half(tiers: Any, names: Any, draft: Any, **more: Any) -> Any:
        if names.ref.scope == "user":
            raise WarmUnavailable("the connection broke here")
        return await commit(tiers, names, draft, **more)

    monkeypatch.setattr(record, "commit", half)
    with pytest.raises(WarmUnavailable):
        async with session.turn(request_id="r") as turn:
            await turn.call(visit, {"city": "Oslo"})
    monkeypatch.setattr(record, "commit", commit)
    assert await session.get("visits", fresh=True) == ["Oslo"]
    await user.increment("visits", 5)
    for _ in range(3):
        async with session.turn(request_id="r") as turn:
            assert turn.repeated
    assert await user.get_all(fresh=True) == {"visits": 16, "other": 1}


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
        assert (await turn.call(toolbox.count)).result == 1
        assert (await turn.call(toolbox.count, {"by": 4})).result == 5
        assert (await turn.call(toolbox.reset)).result == 5
        assert (await turn.call(toolbox.count, {"name": "notes"})).result == 1
        assert not (await turn.call(toolbox.note, {"key": "a", "text": "b"})).succeeded
    async with session.turn() as turn:
        del turn["notes"]
        await turn.call(toolbox.note, {"key": "seat", "text": "aisle"})
        await turn.call(toolbox.set_preference, {"name": "airline", "value": "Delta"})
        assert (await turn.call(toolbox.get_preference, {"name": "airline"})).result == "Delta"
        assert (await turn.call(toolbox.get_preference, {"name": "hotel"})).result is None
        statistics = (await turn.call(toolbox.user_statistics)).result
        assert statistics == {
            "counters": {"counter": 0}, "notes": 1, "preferences": {"airline": "Delta"}, "conversations": 0,
        }  # fmt: skip
        assert not (await turn.call(toolbox.count, {"name": "notes"})).succeeded
    other = store.session("another", user="u1")
    async with other.turn() as turn:
        assert (await turn.call(toolbox.get_preference, {"name": "airline"})).result == "Delta"
    assert {each.name for each in TOOLBOX} == {
        "count", "reset", "note", "get_preference", "set_preference", "user_statistics",
    }  # fmt: skip


@pytest.mark.only(face="asyncio")
async def test_a_coroutine_may_be_a_tool(store: Any) -> None:
    @tool
    async def slow(state: State, session: Any) -> str:
        await asyncio.sleep(0)
        state["slow"] = True
        return str(session.id)

    async with store.session("s").turn() as turn:
        assert (await turn.call(slow)).result == "s"
    assert await store.session("s").get("slow", fresh=True) is True


@pytest.mark.only(face="blocking")
async def test_a_tool_is_given_the_session_of_its_face(store: Any) -> None:
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
    commit = record.commit

    async def half(tiers: Any, names: Any, draft: Any, **more: Any) -> Any:
        if names.ref.scope == "user":
            raise WarmUnavailable("the connection broke here")
        return await commit(tiers, names, draft, **more)

    monkeypatch.setattr(record, "commit", half)
    with pytest.raises(WarmUnavailable):
        await _visit(session, "r")
    monkeypatch.setattr(record, "commit", commit)
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
    for bad in ('{"city": "secret', '["secret"]'):
        with pytest.raises(InvalidValue) as raised:
            await store.session("s", user="u1").call(visit, bad, call_id="c")
        assert "secret" not in str(raised.value)
