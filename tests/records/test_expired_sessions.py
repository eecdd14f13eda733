"""Writes to sessions that expired. Law: the error says so, and no deletion on request is undone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from below import keys_of, redis_of, tiers, until
from controls import sabotage
from reaping import Sweeps, exists, quiet, told

from distributed_state import AgentState, Deleted, Workflow, tool

HELLO = {"role": "user", "content": "hello"}


async def expired(opener: Any, **settings: Any) -> tuple[Any, Any]:
    """A store and a session of it, with a field, a message and a phase, that expired at version 2."""
    store = await quiet(opener, session_idle=0.05, **settings)
    session = store.session("s", user="u1")
    await session.write(set={"city": "Oslo"}, append=[HELLO], phase="planning")
    await until(Sweeps(store))
    assert not await exists(store, "s")
    return store, session


async def in_a_turn(session: Any, **options: Any) -> None:
    async with session.turn(**options) as turn:
        assert dict(turn) == {}
        assert await turn.messages() == []
        turn["a"] = 1


async def in_a_transaction(session: Any) -> None:
    async with session.transaction() as view:
        assert dict(view) == {}
        view["a"] = 1


async def in_a_workflow(store: Any) -> None:
    state = await store.run(Workflow({"planning": lambda state, turn: state.to_done("Done")}), "Go", session_id="s")
    assert state.phase == "done"


@tool
def note(state: Any, text: str) -> str:
    """Keep a note."""
    state["note"] = text
    return text


WAYS: dict[str, Callable[[Any], Any]] = {
    "set": lambda session: session.set("a", 1),
    "set_many": lambda session: session.set_many({"a": 1}),
    "append": lambda session: session.append(HELLO),
    "update": lambda session: session.update("d", {"a": 1}),
    "append_to": lambda session: session.append_to("l", 1),
    "increment": lambda session: session.increment("n"),
    "write": lambda session: session.write(set={"a": 1}),
    "initialize": lambda session: session.initialize({"a": 1}),
    "transition": lambda session: session.transition("new_task"),
    "save_state": lambda session: session.save_state(AgentState(session_id="s")),
    "call": lambda session: session.call(note, {"text": "x"}, call_id="c1"),
    "turn": in_a_turn,
    "transaction": in_a_transaction,
    "run": in_a_workflow,  # of the store
}


async def use(way: str, store: Any, session: Any) -> None:
    await WAYS[way](store if way == "run" else session)


@pytest.mark.parametrize("way", WAYS)
async def test_a_write_to_an_expired_session_says_when_it_expired_and_how_to_go_on(opener: Any, way: str) -> None:
    store, session = await expired(opener)
    ended = (await session.history())[-1]
    assert ended.kind == "expire"
    with pytest.raises(Deleted, match=r"expired at .*session_idle.*revive=True.*begin again") as caught:
        await use(way, store, session)
    assert caught.value.version == 2
    assert caught.value.expired == pytest.approx(ended.time, abs=1.0)


@pytest.mark.parametrize("way", ["fork", "rollback"])
async def test_a_version_at_which_it_expired_is_refused_as_expired(opener: Any, way: str) -> None:
    _, session = await expired(opener)
    await session.create()
    with pytest.raises(Deleted, match=r"expired at .*\(version 2\)") as caught:
        await (session.fork("t", version=2) if way == "fork" else session.rollback(version=2))
    assert caught.value.expired is not None


async def test_what_was_deleted_on_request_did_not_expire(opener: Any) -> None:
    store, session = await expired(opener)
    await store.delete("s")
    with pytest.raises(Deleted, match="deleted at version 3") as caught:
        await session.set("a", 1)
    assert caught.value.expired is None


@pytest.mark.parametrize("on_request", [True, False])
async def test_append_and_turn_begin_a_session_again_if_told(opener: Any, on_request: bool) -> None:
    store, session = await expired(opener)
    if on_request:
        await store.delete("s")
    assert await session.append({"role": "user", "content": "again"}, revive=True) == 3 + on_request
    assert [message.content for message in await session.messages()] == ["again"]
    assert await session.get_all() == {}
    await store.delete("s")
    await in_a_turn(session, revive=True)
    assert await session.get_all() == {"a": 1}
    assert (await session.lifetime()).idle == 0.05
    await session.append(HELLO, revive=True)
    await in_a_live_turn(session)
    assert await session.get_all() == {"a": 2}


async def in_a_live_turn(session: Any) -> None:
    async with session.turn(revive=True) as turn:
        turn["a"] += 1


@pytest.mark.parametrize("way", WAYS)
async def test_by_the_setting_each_write_begins_an_expired_session_again(opener: Any, way: str) -> None:
    store, session = await expired(opener, expired="begin again")
    await use(way, store, session)
    assert await exists(store, "s")
    shown = await session.get_all(fresh=True)
    assert "city" not in shown
    assert (await session.lifetime()).idle == 0.05
    changes = await session.history()
    assert [change.kind for change in changes[:2]] == ["write", "expire"]
    assert [each for each, _ in await told(store, "conversation.created")] == ["s", "s"]
    assert (await session.at(version=3)).deleted is False


async def test_sessions_of_a_batch_begin_again(opener: Any) -> None:
    store, session = await expired(opener, expired="begin again")
    async with store.batch() as batch:
        batch.on(session).set("a", 1)
    assert await session.get_all() == {"a": 1}


async def test_beginning_again_needs_no_further_round_trip(opener: Any) -> None:
    store, session = await expired(opener, expired="begin again")
    other = store.session("other")
    await other.set("a", 1)
    warm, sent = tiers(store).warm, []
    attempt = warm._attempt

    async def counted(*given: Any) -> Any:
        sent.append(given[1].deleted)
        return await attempt(*given)

    warm._attempt = counted
    await session.set("a", 1)
    await other.set("a", 2)
    assert sent == ["expired", "expired"]


@pytest.mark.parametrize("guard", [True, False])
async def test_the_setting_never_begins_again_what_was_deleted_on_request(opener: Any, guard: bool) -> None:
    store, session = await expired(opener, expired="begin again")
    await store.delete("s")
    with nullcontext() if guard else sabotage("commit", "head[3] == '1' and deleted == 'expired'", "false"):
        for way in ("set", "append", "transition", "turn", "run", "transaction") if guard else ("set",):
            with pytest.raises(Deleted, match="deleted at version 3") if guard else nullcontext():
                await use(way, store, session)
    assert await exists(store, "s") is not guard


async def test_the_setting_never_begins_again_what_was_erased(opener: Any) -> None:
    store, session = await expired(opener, expired="begin again")
    await store.erase("s")
    with pytest.raises(Deleted) as caught:
        await session.set("a", 1)
    assert caught.value.expired is None
    assert not await exists(store, "s")


async def test_a_session_can_be_deleted_after_it_expired(opener: Any) -> None:
    """Only once: a deletion of what was deleted on request writes nothing, as before."""
    store, session = await expired(opener)
    assert await store.delete("s") == 3
    assert await store.delete("s") == 3
    assert [change.kind for change in await session.history()] == ["write", "expire", "delete"]


async def leave_redis(store: Any) -> None:
    await store.admin.archive()
    with redis_of(store) as client:
        assert client.delete(keys_of(store, "s").record) == 1


@pytest.mark.parametrize("purged", [False, True])
async def test_sql_knows_which_sessions_expired(opener: Any, purged: bool) -> None:
    """A purge leaves one row of a deleted record, and that it expired."""
    store, session = await expired(opener, max_staleness=0)
    for deleted in (False, True):
        if deleted:
            assert await session.create() == 3
            await store.delete("s")
        await store.admin.archive()
        if purged:
            await until(lambda: store.admin.purge(older_than=0.001))
        await leave_redis(store)
        with pytest.raises(Deleted) as caught:
            await session.set("a", 1)
        assert (caught.value.expired is None) is deleted


@pytest.mark.parametrize("purged", [False, True])
async def test_a_session_begins_again_from_sql(opener: Any, purged: bool) -> None:
    store, session = await expired(opener, expired="begin again")
    await store.admin.archive()
    if purged:
        assert (await store.admin.purge(older_than=0))["records"] == 1
        assert (await store.admin.purge(older_than=0))["records"] == 0
    await leave_redis(store)
    assert await session.set("a", 1) == 3
    await leave_redis(store)
    assert [each.deleted for each in await store.sessions()] == [False]
    await until(Sweeps(store))
    assert await told(store) == [("s", {"reason": "idle"})] * (1 if purged else 2), "a purge removes events"


async def test_a_copy_in_memory_shows_that_a_session_began_again(opener: Any) -> None:
    store, session = await expired(opener, expired="begin again", session_lifetime=3600)
    assert await session.get("city") is None
    assert await session.get("city") is None, "the tombstone is in memory"
    await session.set("city", "Bergen")
    assert await session.get("city") == "Bergen"

    async def keeps_its_copy() -> bool:
        await session.get("city")
        await session.set("city", "Voss")
        before = tiers(store).hot.hits
        assert await session.get("city") == "Voss"
        return tiers(store).hot.hits > before

    await until(keeps_its_copy)


async def test_an_exported_session_stays_expired(opener: Any) -> None:
    store, _ = await expired(opener, expired="begin again")
    await store.admin.import_(await store.admin.export("s"), id="t")
    assert await store.session("t").set("a", 1) == 3


async def test_users_and_tasks_are_deleted_as_ever(opener: Any) -> None:
    store = await quiet(opener, expired="begin again")
    for record in (store.user("u"), store.task("t")):
        await record.set("a", 1)
        await store.delete(record.ref.id, scope=record.ref.scope)
        with pytest.raises(Deleted):
            await record.set("a", 1)
