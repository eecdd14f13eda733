"""Reapers that compete, die, and find Redis emptied. Law: an end is told once, and no session outlives it for good."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
from below import Worker, keys_of, own_server, redis_of, tiers, until
from controls import sabotage
from reaping import Sweeps, exists, quiet, run, score, told
from sync_api import core

from distributed_state.results import Lifetime
from distributed_state.tiers.archiver import Archiver


@pytest.mark.replicas
async def test_three_reapers_at_once_end_each_session_once(opener: Any) -> None:
    """All look at all partitions at the same time, again and again."""
    stores = [await quiet(opener) for _ in range(3)]
    ids = [f"s{number}" for number in range(200)]
    async with stores[0].events("session.*", "conversation.deleted") as events:
        for start in range(0, 200, 50):
            async with stores[0].batch() as batch:
                for id in ids[start : start + 50]:
                    batch.on(stores[0].session(id, idle=0.1)).set("a", 1)
        sweeps = [Sweeps(store) for store in stores]
        ended = [0, 0, 0]

        async def sweep(at: int) -> None:
            while sum(ended) < 200:
                ended[at] += await sweeps[at]()
                await asyncio.sleep(0.001)

        async with asyncio.timeout(20):
            await asyncio.gather(*(sweep(at) for at in range(3)))
        received = [await events.next(5) for _ in range(200)]
        assert await events.next(0.2) is None
    assert sorted(event.conversation_id for event in received) == sorted(ids)
    assert {event.type for event in received} == {"session.expired"}
    assert sum(ended) == 200
    assert Counter(id for id, _ in await told(stores[1])) == Counter(ids)
    for id in ids[::10]:
        assert [change.kind for change in await stores[2].session(id).history()] == ["batch", "expire"]


@pytest.mark.wide
@pytest.mark.replicas
async def test_replicas_in_the_background_share_the_work(opener: Any) -> None:
    """At most `sweep` seconds late, and one of them each."""
    stores = [await opener(sweep=0.1, durability="memory", partitions=64) for _ in range(3)]
    shares = [tiers(store).archiver for store in stores]
    await until(lambda: sorted(len(each.mine) for each in shares)[0] > 15, 15)
    for number in range(60):
        await stores[0].session(f"s{number}", idle=1).set("a", 1)

    async def all_told() -> bool:
        return len(await told(stores[0])) >= 60

    await until(all_told, every=0.1)
    for number in range(60):
        first, last = await stores[1].session(f"s{number}").history()
        assert last.kind == "expire"
        # Never early; how late depends on what else the machine does.
        assert 1.0 <= last.time - first.time <= 10.0
    assert len({event.source for event in await stores[0].admin.audit(type="session.expired", limit=1000)}) == 3


@pytest.mark.wide
@pytest.mark.only(api="asyncio", warm="real", cold=("sqlite", "postgres"))
@pytest.mark.timeout(90)
async def test_another_reaper_takes_over_from_one_that_was_killed(opener: Any) -> None:
    store = await quiet(opener, partitions=64)
    place = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace, "sweep": 0.2}
    with Worker("hold", id="x", ttl=60.0, **place) as worker:
        assert worker.line() == "opened"

        async def first_gone() -> bool:
            return not await exists(store, "first")

        await store.session("first", idle=0.1).set("a", 1)
        await until(first_gone)
        for number in range(20):
            await store.session(f"s{number}", idle=0.5).set("a", 1)
        worker.kill()
        killed = time.monotonic()
        await opener(sweep=0.2)

        async def all_gone() -> bool:
            return len(await told(store)) == 21

        await until(all_gone, 30, every=0.1)
        assert time.monotonic() - killed < 30
    for number in range(20):
        assert [change.kind for change in await store.session(f"s{number}").history()] == ["set", "expire"]


@pytest.mark.only(warm="single")
async def test_sessions_expire_although_redis_was_emptied(opener: Any) -> None:
    """Nobody touches their partitions any more: the reaper starts them, and SQL says what is in them."""
    with own_server(opener) as server:
        store = await quiet(opener, url=server.url)
        sweeps = Sweeps(store)
        await sweeps()
        await store.session("idle", idle=0.3).set("a", 1)
        await store.session("absolute", lifetime=0.3).set("a", 1)
        await store.session("later", idle=60).set("a", 1)
        await store.session("never").set("a", 1)
        await store.session("taken back", idle=0.1).set_lifetime()
        await store.admin.archive()
        await sweeps()
        before = await store.session("later").lifetime()
        with redis_of(store) as client:
            client.flushall()

        async def all_are_started() -> bool:
            await sweeps()
            return len(await told(store)) == 2 and score(store, "later") is not None

        await until(all_are_started)
        assert sorted(await told(store)) == [("absolute", {"reason": "lifetime"}), ("idle", {"reason": "idle"})]
        assert score(store, "later") == before.ends
        assert await store.session("later").lifetime() == before
        assert await store.session("never").lifetime() == Lifetime(None, None, None)
        assert await exists(store, "taken back")
        assert score(store, "taken back") is None
        for id, count in ("idle", 2), ("later", 1):
            assert len(await store.session(id).history()) == count
        await opener.close()


async def test_many_lifetimes_come_back_page_by_page(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed_state.store.reaper._PAGE", 3)
    store = await quiet(opener)
    ids = [f"s{number}" for number in range(20)]
    for id in ids:
        await store.session(id, idle=60).set("a", 1)
    await store.admin.archive()
    before = [score(store, id) for id in ids]
    with redis_of(store) as client:
        for partition in range(8):
            keys = core(store)._lifecycle.context.keys.partition(partition)
            client.delete(keys.lifetimes)
    assert not any(score(store, id) for id in ids)
    await Sweeps(store)()
    assert [score(store, id) for id in ids] == before


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.only(warm="single")
async def test_what_was_written_since_knows_better_than_sql(opener: Any, guard: bool) -> None:
    """Between the loss and the look into SQL somebody gives the session another lifetime."""
    with own_server(opener) as server:
        store = await quiet(opener, url=server.url)
        await store.session("s", idle=60).set("a", 1)
        await store.admin.archive()
        with redis_of(store) as client:
            client.flushall()
        await store.session("s").set_lifetime(idle=5)
        with nullcontext() if guard else sabotage("fill", "'NX', ", ""):
            await Sweeps(store)()
        assert (score(store, "s") == (await store.session("s").lifetime()).ends) == guard
        await opener.close()


@pytest.mark.parametrize("guard", [True, False])
async def test_what_was_found_for_another_epoch_is_not_put_into_this_one(opener: Any, guard: bool) -> None:
    store = await quiet(opener)
    session, place = store.session("s", idle=60), keys_of(store, "s")
    await session.set("a", 1)
    await store.admin.archive()
    with redis_of(store) as client:
        client.delete(place.lifetimes)
    old = {place.partition: "1-of-another-data-id"}
    with nullcontext() if guard else sabotage("fill", "then return {'epoch'} end", "then local nothing end"):
        await run(store, Sweeps(store).reaper._fill(old))
    assert (score(store, "s") is None) == guard
    await Sweeps(store)()
    assert score(store, "s") == (await session.lifetime()).ends


@pytest.mark.only(warm="real")
async def test_sql_is_asked_once_in_an_epoch(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await quiet(opener)
    asked: list[list[int]] = []
    cold = tiers(store).cold
    mortal = cold.mortal

    def counted(partitions: Any, **named: Any) -> Any:
        asked.append(list(partitions))
        return mortal(partitions, **named)

    monkeypatch.setattr(cold, "mortal", counted)
    await store.session("s", idle=60).set("a", 1)
    sweeps, place = Sweeps(store), keys_of(store, "s").partition
    await sweeps()
    await sweeps()
    assert [place] in asked
    assert len(asked) == 2, "for the one that is in use, and for those that are not"
    with redis_of(store) as client:
        client.hdel(keys_of(store, "s").meta, "lifetimes")
    await sweeps()
    assert asked[2:] == [[place]]


async def test_a_reaper_that_was_started_with_the_store_ends_with_it(opener: Any) -> None:
    store = await opener(sweep=0.05)
    assert isinstance(tiers(store).archiver, Archiver)
    await store.session("s", idle=0.05).set("a", 1)

    async def gone() -> bool:
        return not await exists(store, "s")

    await until(gone)
    reaper = tiers(store).workers[0]
    await store.close()
    assert core(store)._lifecycle.tiers_in_use is None
    assert reaper._job is None  # type: ignore[attr-defined]
