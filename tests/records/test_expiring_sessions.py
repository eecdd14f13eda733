"""Sessions that end by themselves. Law: once, told once, and never one that somebody just wrote to."""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from contextlib import nullcontext
from typing import Any

import pytest
from below import keys_of, redis_of, tiers, until
from controls import sabotage
from pydantic import BaseModel
from reaping import Sweeps, exists, quiet, run, score, told
from sync_api import core

from distributed_state import Deleted, InvalidValue
from distributed_state.results import Lifetime
from distributed_state.store.reaper import Reaper


async def elsewhere(work: Any) -> Any:
    """In a task that holds none of this one's leases."""
    return await asyncio.get_running_loop().create_task(work, context=contextvars.Context())


class Trip(BaseModel):
    """A schema."""

    days: int = 0


# What is set


async def test_a_session_begins_with_the_lifetime_of_its_handle(store: Any) -> None:
    """Times are the server's, and what is read is what Redis holds."""
    session = store.session("s", idle=60, lifetime=3600)
    assert await session.lifetime() == Lifetime(None, None, None)
    await session.set("a", 1)
    found, begun = await session.lifetime(), (await session.history())[0].time
    assert found == Lifetime(60.0, found.until, found.ends)
    assert found.until == pytest.approx(begun + 3600, abs=0.01)
    assert found.ends == pytest.approx(begun + 60, abs=0.01)
    await store.session("s", idle=5, lifetime=5).set("a", 2)
    assert (await session.lifetime()).until == found.until
    assert await store.session("t").lifetime() == Lifetime(None, None, None)


async def test_the_store_sets_the_lifetime_of_new_sessions(opener: Any) -> None:
    store = await opener(session_idle=60, session_lifetime=3600)
    await store.session("s").set("a", 1)
    await store.session("never", idle=math.inf, lifetime=math.inf).set("a", 1)
    await store.session("other", idle=5).append({"role": "user", "content": "x"})
    generated = store.session()
    await generated.set("a", 1)
    for handle, idle, absolute in (
        (store.session("s"), 60.0, True),
        (store.session("never"), None, False),
        (store.session("other"), 5.0, True),
        (generated, 60.0, True),
    ):
        found = await handle.lifetime()
        assert (found.idle, found.until is not None) == (idle, absolute)
    await store.user("u").set("a", 1)
    assert b"#lifetime" not in await raw(store, "u", "user")


async def raw(store: Any, id: str, scope: str = "session") -> dict[bytes, bytes]:
    with redis_of(store) as client:
        found: dict[bytes, bytes] = client.hgetall(keys_of(store, id, scope).record)
        return found


async def test_each_way_to_begin_a_session_gives_it_its_lifetime(store: Any) -> None:
    def handle(id: str) -> Any:
        return store.session(id, idle=60)

    await handle("create").create({"a": 1})
    await handle("increment").increment("n")
    await handle("append_to").append_to("l", 1)
    await handle("update").update("d", {"a": 1})
    async with handle("transaction").transaction() as view:
        view["a"] = 1
    async with handle("turn").turn() as turn:
        turn["a"] = 1
    async with store.batch() as batch:
        batch.on(handle("batch")).set("a", 1)
    await handle("initialize").initialize({"a": 1})
    await store.session("create").fork("plain")
    await handle("create").fork("fork")
    await handle("set_lifetime").set_lifetime(lifetime=5)
    await store.session("typed", idle=60, schema=Trip).modify(lambda trip: Trip(days=trip.days + 1))
    for id in (
        "typed",
        "create",
        "increment",
        "append_to",
        "update",
        "transaction",
        "turn",
        "batch",
        "initialize",
        "fork",
    ):
        assert (await store.session(id).lifetime()).idle == 60.0, id
    assert await store.session("plain").lifetime() == Lifetime(None, None, None), "a fork begins its own"
    assert (await store.session("set_lifetime").lifetime()).idle is None, "what is said later counts"


async def test_a_lifetime_is_changed_and_taken_back(store: Any) -> None:
    session = store.session("s")
    await session.set("a", 1)
    assert await session.set_lifetime(idle=60) == 2
    assert score(store, "s") == (await session.lifetime()).ends
    assert await session.set_lifetime(lifetime=30) == 3
    found = await session.lifetime()
    assert found.idle is None
    assert found.until == found.ends == score(store, "s")
    assert await session.set_lifetime() == 4
    assert await session.lifetime() == Lifetime(None, None, None)
    assert score(store, "s") is None
    assert [change.kind for change in await session.history()] == ["set", *["lifetime"] * 3]
    assert await session.get_all() == {"a": 1}


@pytest.mark.parametrize("wrong", [0, -1, True, "60", float("nan"), 4e9, [1]])
async def test_a_lifetime_that_is_none_is_refused(store: Any, wrong: Any) -> None:
    session = store.session("s")
    await session.set("a", 1)
    for given in ("idle", "lifetime"):
        with pytest.raises(InvalidValue, match=given):
            await session.set_lifetime(**{given: wrong})
        with pytest.raises(InvalidValue, match=given):
            store.session("t", **{given: wrong})
    assert await session.version(fresh=True) == 1


# How it ends


async def test_a_session_that_is_idle_too_long_expires_once(opener: Any) -> None:
    """It is as a deleted one then, with its history; the event says why, and no deletion is told."""
    store = await quiet(opener)
    sweeps, session = Sweeps(store), store.session("s", idle=0.6)
    await store.session("other").set("a", 1)
    assert await sweeps() == 0
    await session.set("a", 1)
    for number in range(4):
        await asyncio.sleep(0.2)
        await session.append({"role": "user", "content": str(number)})
        assert await sweeps() == 0
    assert await exists(store, "s")
    await until(sweeps)
    assert not await exists(store, "s")
    assert await sweeps() == 0
    with pytest.raises(Deleted):
        await session.set("a", 2)
    assert await session.messages() == []
    changes = await session.history()
    assert [change.kind for change in changes] == ["set", *["append"] * 4, "expire"]
    assert round((changes[-1].time - changes[-2].time) * 1000) >= 600
    assert await told(store) == [("s", {"reason": "idle"})]
    assert await told(store, "conversation.deleted") == []
    assert await exists(store, "other")
    assert score(store, "s") is None
    with redis_of(store) as client:
        left = [client.zcard(core(store)._lifecycle.context.keys.partition(each).lifetimes) for each in range(8)]
    assert not any(left)


async def test_writes_do_not_extend_an_absolute_lifetime(opener: Any) -> None:
    store = await quiet(opener)
    sweeps, session = Sweeps(store), store.session("s", idle=60, lifetime=0.3)
    await session.set("n", 0)
    ends = (await session.lifetime()).until
    with pytest.raises(Deleted):
        while True:
            await session.increment("n")
            await sweeps()
            await asyncio.sleep(0.001)
    last = (await session.history())[-1]
    assert last.kind == "expire"
    assert last.time >= ends
    assert await told(store) == [("s", {"reason": "lifetime"})]


async def test_a_session_that_expired_may_begin_anew(opener: Any) -> None:
    store = await quiet(opener)
    sweeps, session = Sweeps(store), store.session("s", idle=0.05)
    await session.set("a", 1)
    await until(sweeps)
    assert await session.create({"b": 2}) == 3
    assert (await session.lifetime()).idle == 0.05
    await until(sweeps)
    assert await store.session("s", idle=60).rollback(version=3) == 5
    assert (await session.lifetime()).idle == 60.0
    assert await session.get_all() == {"b": 2}
    other = store.session("s", idle=5)
    assert await other.rollback(version=1) == 6
    assert (await session.lifetime()).idle == 60.0, "what lives is not given another lifetime by a rollback"
    with sabotage(
        "commit", "if (operation == 'E' or operation == 'X') and (not version or head[3])", "if operation == 'X'"
    ):
        await other.rollback(version=3)
    assert (await session.lifetime()).idle == 5.0, "the negative control"
    assert len(await told(store)) == 2


async def test_what_was_deleted_does_not_expire(opener: Any) -> None:
    store = await quiet(opener)
    await store.session("s", idle=0.01).set("a", 1)
    await store.delete("s")
    assert score(store, "s") is None
    await asyncio.sleep(0.02)
    assert await Sweeps(store)() == 0
    assert await told(store) == []


async def test_a_replica_that_keeps_a_session_hot_hears_that_it_expired(opener: Any) -> None:
    store = await quiet(opener)
    session = store.session("s", idle=0.2)
    await session.set("a", 1)
    assert await session.get("a") == 1
    await until(Sweeps(store))
    assert await session.get("a") is None


async def test_whoever_holds_a_session_is_waited_for(opener: Any) -> None:
    store = await quiet(opener, sweep=0.02)
    sweeps, session = Sweeps(store), store.session("s", idle=0.05)
    await session.set("a", 1)
    async with session.lock():
        await asyncio.sleep(0.1)

        assert await elsewhere(sweeps()) == 0
        assert await exists(store, "s")
    await until(sweeps)
    assert not await exists(store, "s")


async def test_a_turn_keeps_its_session(opener: Any) -> None:
    store = await quiet(opener, sweep=0.02)
    sweeps, session = Sweeps(store), store.session("s", idle=0.5)
    await session.set("a", 1)
    async with session.turn() as turn:
        await asyncio.sleep(0.6)
        assert await elsewhere(sweeps()) == 0
        turn["a"] = 2
    assert await sweeps() == 0
    assert await session.get("a", fresh=True) == 2


# What may be in the way


async def test_a_session_that_left_redis_expires(opener: Any) -> None:
    store = await quiet(opener, max_staleness=0)
    sweeps = Sweeps(store)
    for id in ("s", "kept"):
        await store.session(id, idle=0.1 if id == "s" else 60).set("a", 1)
    await store.admin.archive()
    for id in ("s", "kept"):
        with redis_of(store) as client:
            assert client.delete(keys_of(store, id).record) == 1
    ends = (await store.session("kept").lifetime()).ends
    assert ends == pytest.approx((await store.session("kept").history())[0].time + 60, abs=0.001)
    await until(sweeps)
    assert await told(store) == [("s", {"reason": "idle"})]
    assert [change.kind for change in await store.session("s").history()] == ["set", "expire"]


@pytest.mark.parametrize("guard", [True, False])
async def test_a_look_is_not_put_off_over_a_change_that_came_between(opener: Any, guard: bool) -> None:
    """Two scores: the one that a look found, and the one that a change set meanwhile."""
    store = await quiet(opener)
    session, reaper = store.session("s", idle=0.3), Reaper(tiers(store))
    await session.set("a", 1)
    await asyncio.sleep(0.31)
    await session.set("a", 2)
    heads = reaper._heads

    async def slowly(due: Any) -> Any:
        found = await heads(due)
        assert due
        await core(session).set_lifetime(idle=30)
        return found

    reaper._heads = slowly  # type: ignore[method-assign]
    with nullcontext() if guard else sabotage("defer", "then return {'changed'} end", "then local nothing end"):
        await run(store, reaper.sweep(range(8)))
    assert (score(store, "s") == (await session.lifetime()).ends) == guard


async def rounds(store: Any, guard: bool, count: int) -> tuple[int, int]:
    """Writes in the moment in which sessions expire, until one is lost: whether one was, how many sessions went on."""
    sweeps = Sweeps(store)
    if not guard:
        end = sweeps.reaper._end

        def unguarded(*arguments: Any) -> Any:
            return end(*arguments)._replace(expected=None)

        sweeps.reaper._end = unguarded  # type: ignore[method-assign]
    lost = alive = 0
    took = 0.002
    for number in range(count):
        session = store.session(f"{guard}{number}", idle=0.02)
        await session.set("a", 0)
        await asyncio.sleep(0.025)

        async def write(pause: float, session: Any = session) -> int:
            await asyncio.sleep(pause)
            try:
                return int(await session.set("a", 1))
            except Deleted:
                return 0

        begun = time.monotonic()
        version, _ = await asyncio.gather(write(number % 20 / 20 * took), sweeps())
        took = 0.9 * took + 0.1 * (time.monotonic() - begun)
        changes = await session.history()
        if version and changes[-1].kind == "expire":
            lost += changes[-1].time - changes[-2].time < 0.02
        alive += changes[-1].kind != "expire"
        if lost:
            break
    return lost, alive


@pytest.mark.wide
@pytest.mark.timeout(120)
async def test_a_write_in_the_very_moment_wins_or_is_refused(opener: Any) -> None:
    """It is never taken away by an end that was decided before it."""
    store = await quiet(opener)
    lost, alive = await rounds(store, True, 40)
    assert lost == 0
    assert 0 < alive < 40, "the moment was met"


# Not on the embedded server: that is called, so that hardly anything comes between two things that it is asked.
@pytest.mark.only(warm="real")
@pytest.mark.timeout(120)
async def test_without_the_guard_a_write_in_that_moment_is_lost(opener: Any) -> None:
    lost, _ = await rounds(await quiet(opener), False, 1000)
    assert lost, "the moment was met"
