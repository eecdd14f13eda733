"""Which replicas there are: as they tell of themselves, gone at once when they leave, lost once when they die."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import time
from typing import Any

import pytest
from below import Worker, keys_of, own_server, redis_of, tiers, until
from controls import sabotage
from sync_api import core

from distributed_state import Fenced, InvalidValue, LockTimeout, TooLarge
from distributed_state.results import Replica
from distributed_state.warm import heartbeat

real = pytest.mark.only(warm="real")
single = pytest.mark.only(warm="single")


async def test_a_replica_tells_of_itself(opener: Any) -> None:
    before = time.time()
    store = await opener()
    (one,) = await store.admin.replicas()
    assert isinstance(one, Replica)
    assert (one.id, one.host, one.pid) == (store.replica, platform.node(), os.getpid())
    assert before - 1 <= one.started <= time.time() + 1
    assert one.load >= 0
    assert one.seen < 1
    assert one.status == {}
    assert one.positions == {"archived": 0, "archives": one.positions["archives"], "events": 0}
    asked = {"unarchived", "indexed", "unindexed"}
    received = {"link_silence_ms"}  # from when a link is needed, which may be between the beat and now
    assert one.stats.keys() - received == (await store.admin.stats()).keys() - asked - received


async def test_it_is_told_without_being_asked(opener: Any) -> None:
    """By a background job, at once when it opens."""
    store = await opener()

    def on_the_roll() -> bool:
        with redis_of(store) as client:
            return bool(client.zscore(core(store)._lifecycle.context.keys.roll, store.replica))

    await until(on_the_roll, 5)


async def test_a_full_redis_evicts_the_report_of_no_living_replica(opener: Any) -> None:
    """With volatile-lru it evicts what has an expiry; the report of a lost replica has one."""
    store = await opener(beat=0.05)
    key = core(store)._lifecycle.context.keys.replica
    await store.admin.replicas()
    with redis_of(store) as client:
        assert client.ttl(key(store.replica)) == -1
        client.set(key("away"), b"{}")
        lose(store, "away")
        await until(lambda: client.ttl(key("away")) > 0)
        assert client.ttl(key(store.replica)) == -1


async def test_what_is_announced_goes_with_the_next_beat(opener: Any) -> None:
    store = await opener(beat=0.05)
    store.announce(agent="notes", sections={"help": "?"}, n=2**70)
    store.announce(mood="good", agent=None)

    async def told() -> bool:
        (one,) = await store.admin.replicas()
        return bool(one.status == {"sections": {"help": "?"}, "n": 2**70, "mood": "good"})

    await until(told)
    for nonsense in ({"a": {1}}, {"a": float("nan")}, {"a": object()}):
        with pytest.raises(InvalidValue, match=r"status"):
            store.announce(**nonsense)
    with pytest.raises(TooLarge, match="16384"):
        store.announce(a="x" * 20_000)
    with pytest.raises(TooLarge):
        store.announce(**{f"k{n}": "x" * 1000 for n in range(20)})
    await until(told)


async def test_what_is_announced_later_does_not_change_with_what_was_given(store: Any) -> None:
    given = {"a": [1]}
    store.announce(x=given)
    given["a"].append(2)

    async def told() -> Any:
        return (await store.admin.replicas())[0].status

    assert await until(told) == {"x": {"a": [1]}}


@pytest.mark.wide
@pytest.mark.replicas
async def test_replicas_are_listed_the_oldest_first_until_they_leave(opener: Any) -> None:
    """Leaving is no loss: nobody is told."""
    stores = [await opener(beat=0.5) for _ in range(3)]
    received: list[Any] = []
    stores[0].on("replica.*", received.append)
    await stores[0].ready()
    ids = [each.replica for each in stores]

    async def listed() -> list[str]:
        return [each.id for each in await stores[0].admin.replicas()]

    async def all_there() -> bool:
        return await listed() == ids

    await until(all_there)
    await stores[1].close()
    assert await listed() == [ids[0], ids[2]]
    await asyncio.sleep(2.5)  # four beats and more: that nothing comes cannot be waited for
    assert received == []


@real
async def test_without_heartbeats_a_replica_is_not_seen(opener: Any) -> None:
    store = await opener(beat=0)
    store.announce(a=1)
    assert await store.admin.replicas() == []
    with redis_of(store) as client:
        assert not client.exists(core(store)._lifecycle.context.keys.roll)


@real
async def test_what_cannot_be_read_hides_no_other(opener: Any) -> None:
    store = await opener()
    await store.admin.replicas()
    keys = core(store)._lifecycle.context.keys
    with redis_of(store) as client:
        for id, card in (
            ("odd", b"{"),
            ("list", b"[1]"),
            ("half", b'{"host": "h", "pid": "x"}'),
            ("new", b'{"more": 1}'),
        ):
            client.set(keys.replica(id), card)
            client.zadd(keys.roll, {id: 2**52})
        client.zadd(keys.roll, {"silent": 2**52})
    found = {each.id: each for each in await store.admin.replicas()}
    assert found.keys() == {"odd", "list", "half", "new", "silent", store.replica}
    assert found["odd"].host == ""
    assert found[store.replica].pid == os.getpid()


# Losses


def lose(store: Any, id: str) -> None:
    """As if this replica had fallen silent long ago."""
    with redis_of(store) as client:
        client.zadd(core(store)._lifecycle.context.keys.roll, {id: 1000})


async def survive(opener: Any, seconds: float = 1.5) -> tuple[list[Any], str]:
    """Three replicas see a fourth one killed; what they tell of it, as it is archived."""
    settings = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace, "beat": 0.4}
    stores = [await opener(beat=0.4) for _ in range(3)]
    with Worker("present", **settings) as worker:
        replica = worker.line()

        async def seen() -> bool:
            return all([replica in [each.id for each in await store.admin.replicas()] for store in stores])

        await until(seen)
        await asyncio.sleep(1.3)  # they judge once they have been there for the time in which one is lost
        worker.kill()
        pid = worker.process.pid
        killed = time.monotonic()

        async def gone() -> bool:
            return replica not in [each.id for each in await stores[1].admin.replicas()]

        await until(gone)
        assert time.monotonic() - killed < 10, "three beats, however slow the machine"

        async def told() -> bool:
            return bool(await stores[0].admin.audit(type="replica.lost"))

        await until(told)
        await asyncio.sleep(seconds)
    # Of this one: on a machine that stands still for a second the others lose one another.
    events = [each for each in await stores[0].admin.audit(type="replica.lost") if each.data["replica"] == replica]
    assert all(each.data == {"replica": replica, "host": platform.node(), "pid": pid} for each in events)
    assert all((each.subject, each.partition) == (f"replica:{replica}", 0) for each in events)
    return events, replica


@pytest.mark.wide
@pytest.mark.replicas
async def test_of_a_replica_that_dies_one_other_tells_once(opener: Any) -> None:
    events, _ = await survive(opener)
    assert len(events) == 1


@pytest.mark.wide
@pytest.mark.replicas
async def test_if_it_stayed_on_the_roll_it_would_be_told_of_again(opener: Any) -> None:
    with sabotage("emit", "if member ~= '' then call('ZREM', roll, member) end", ""):
        events, _ = await survive(opener)
    assert len(events) > 3, "each of three, again and again"


@pytest.mark.wide
@pytest.mark.replicas
async def test_a_replica_that_was_only_paused_comes_back(opener: Any) -> None:
    settings = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace, "beat": 0.4}
    store = await opener(beat=0.4)
    received: list[Any] = []
    store.on("replica.*", received.append)
    await store.ready()
    with Worker("present", **settings) as worker:
        replica = worker.line()

        async def listed() -> bool:
            return replica in [each.id for each in await store.admin.replicas()]

        async def lost() -> bool:
            return not await listed()

        await until(listed)
        os.kill(worker.process.pid, signal.SIGSTOP)
        await until(lost)
        await until(lambda: received)
        os.kill(worker.process.pid, signal.SIGCONT)
        await until(listed)
        worker.say("close")
        await until(lost)
    await asyncio.sleep(2)
    assert [(each.type, each.data["replica"]) for each in received] == [("replica.lost", replica)]


async def all_late(opener: Any) -> list[str]:
    """All are late at once, as when Redis was away; the replicas that are then told of as lost."""
    stores = []
    for _ in range(3):
        stores.append(await opener(beat=0.6))
        await asyncio.sleep(0.2)  # so that they do not beat at the same moment
    received: list[Any] = []
    stores[0].on("replica.lost", received.append)
    await stores[0].ready()
    # Where such events go: what comes first there waits for SQL, and those that are late are soon late no more.
    partition_of = tiers(stores[0]).keys.partition_of
    await stores[0].emit("first", subject=next(f"s{n}" for n in range(10_000) if partition_of(f"s{n}") == 0))
    await asyncio.sleep(2.0)  # from now on they judge others
    with redis_of(stores[0]) as client:
        client.zadd(core(stores[0])._lifecycle.context.keys.roll, {each.replica: 1000 for each in stores})
    await asyncio.sleep(1.5)
    assert len(await stores[0].admin.replicas()) == 3
    return [each.data["replica"] for each in received]


@pytest.mark.wide
@pytest.mark.replicas
async def test_a_replica_that_was_late_itself_judges_nobody(opener: Any) -> None:
    """When Redis was away, whoever comes back first finds all the others late."""
    assert await all_late(opener) == []


@pytest.mark.wide
@pytest.mark.replicas
async def test_without_that_rule_the_living_are_told_of_as_lost(opener: Any) -> None:
    with sabotage("beat", "if not before or tonumber(before) <= now_ms then return {'late', members} end", ""):
        assert await all_late(opener) != []


async def counts_for(opener: Any, others: int) -> float:
    """How many of its `beat`s a replica counts from a beat on, where there are so many others."""
    store = await opener(beat=0.1)
    roll, longest = core(store)._lifecycle.context.keys.roll, 0.0
    with redis_of(store) as client:
        client.zadd(roll, {f"other-{n}": time.time() * 1000 + 3_600_000 for n in range(others)})
        for _ in range(60):
            until_ms = client.zscore(roll, store.replica) or 0
            seconds, micros = client.time()
            left = until_ms - seconds * 1000 - micros / 1000
            longest = max(longest, left / 100)
            await asyncio.sleep(0.02)
        client.delete(roll)
    return longest


@pytest.mark.wide
@single
async def test_in_a_large_fleet_each_beats_more_rarely_and_says_so(opener: Any) -> None:
    """What it says counts for three of its pauses. The pauses have an end, so that a loss is noticed."""
    assert await counts_for(opener, 9) <= 3
    assert 5 < await counts_for(opener, 97) <= 6
    assert 12 < await counts_for(opener, 2000) <= 15


@single
async def test_if_all_beat_alike_a_large_fleet_would_beat_as_much_as_it_is_large(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_CALM", 10**9)
    assert await counts_for(opener, 2000) <= 3


@pytest.mark.wide
@single
@pytest.mark.replicas
async def test_while_redis_stands_still_nobody_is_lost(opener: Any) -> None:
    with own_server(opener) as server:
        stores = [await opener(url=server.url, beat=0.5) for _ in range(3)]
        received: list[Any] = []
        stores[0].on("replica.lost", received.append)
        await stores[0].ready()
        server.pause()
        await asyncio.sleep(2.5)
        server.resume()
        await asyncio.sleep(1.5)
        assert len(await stores[0].admin.replicas()) == 3
        assert received == []
        for store in stores:
            await store.close()


@pytest.mark.wide
@real
async def test_whoever_died_with_the_whole_fleet_is_told_of_by_the_next(opener: Any) -> None:
    store = await opener(beat=0.1)
    received: list[Any] = []
    store.on("replica.lost", received.append)
    await store.ready()
    lose(store, "long-gone")
    await until(lambda: received)
    assert received[0].data == {"replica": "long-gone", "host": "", "pid": 0}
    assert received[0].subject == "replica:long-gone"


@single
async def test_a_redis_that_was_emptied_knows_everybody_again(opener: Any) -> None:
    with own_server(opener) as server:
        store = await opener(url=server.url, beat=0.1)
        await store.admin.replicas()
        with redis_of(store) as client:
            client.flushall()

        def back() -> bool:
            with redis_of(store) as client:
                return client.zscore(core(store)._lifecycle.context.keys.roll, store.replica) is not None

        await until(back)
        lose(store, "x")  # its event has to start the partition first

        async def told() -> bool:
            return bool(await store.admin.audit(type="replica.lost"))

        await until(told)
        await store.close()


# Locks


async def lost_locks(store: Any) -> list[Any]:
    return [(each.subject, each.data) for each in await store.admin.audit(type="lock.lost")]


@pytest.mark.wide
@real
async def test_a_lost_lock_is_told_once(opener: Any) -> None:
    store = await opener()
    session = store.session("s:1")
    with pytest.raises(Exception, match="lost"):
        async with session.lock(ttl=1) as lease:
            held = core(lease)
            with redis_of(store) as client:
                client.set(keys_of(store, "s:1").lock, "x99:somebody")
            await until(lambda: lease.lost)
            await session.set("a", 1)

    async def told() -> bool:
        return bool(await store.admin.audit(type="lock.lost"))

    await until(told)
    assert await lost_locks(store) == [("session:s%3A1", {"token": held.token, "holder": held.holder})]


@real
async def test_a_lock_that_nobody_saw_lost_is_told_when_it_is_given_back(opener: Any) -> None:
    store = await opener()
    async with store.session("s").lock(ttl=30) as lease:
        with redis_of(store) as client:
            client.set(keys_of(store, "s").lock, "x99:somebody")

    async def told() -> bool:
        return bool(await store.admin.audit(type="lock.lost"))

    await until(told)
    assert (await lost_locks(store))[0][1]["token"] == core(lease).token


@real
async def test_locks_that_are_given_back_are_not_lost(opener: Any) -> None:
    """Nor one that was never got, nor one that was given back behind a turn's commit and taken by another."""
    store = await opener()
    session = store.session("s")
    async with session.lock(ttl=0.3):
        await asyncio.sleep(0.5)  # renewed meanwhile

    async def other() -> None:
        with pytest.raises(Exception, match="still held"):
            await session.lock(wait=0.05).acquire()

    async with session.lock():
        await asyncio.create_task(other())
        async with session.lock():
            await session.set("a", 1)
    async with session.turn() as turn:
        turn["a"] = 2
    await asyncio.gather(*(asyncio.create_task(_turn(session)) for _ in range(5)))
    await store.emit("last.one")

    async def archived() -> bool:
        return bool(await store.admin.audit(type="last.one"))

    await until(archived)
    assert await lost_locks(store) == []


@real
async def test_whoever_waits_in_vain_loses_nothing(opener: Any) -> None:
    """No lease, no loss: neither an event nor a count, however often a turn is refused, rejected or cancelled."""
    store = await opener()
    session = store.session("s")

    async def refused(busy: str, wait: float) -> None:
        with pytest.raises(LockTimeout):
            async with session.turn(busy=busy, wait=wait):
                raise AssertionError("not reached")

    async with session.lock():
        for busy, wait in ("wait", 0.02), ("reject", 0.0), ("interrupt", 0.02):
            await asyncio.gather(*(asyncio.create_task(refused(busy, wait)) for _ in range(3)))
    await store.emit("last.one")

    async def archived() -> bool:
        return bool(await store.admin.audit(type="last.one"))

    await until(archived)
    assert (await lost_locks(store), tiers(store).leases.lost) == ([], 0)


@real
async def test_a_lost_lock_is_told_once_to_whoever_nests_in_it(opener: Any) -> None:
    store = await opener()
    session = store.session("s")
    lease = await session.lock(ttl=30).acquire()
    with redis_of(store) as client:
        client.set(keys_of(store, "s").lock, "x99:somebody")
    with pytest.raises(Fenced):
        async with session.turn() as turn:
            turn["a"] = 1
    await lease.release()
    await store.emit("last.one")

    async def archived() -> bool:
        return bool(await store.admin.audit(type="last.one"))

    await until(archived)
    assert [data["token"] for _, data in await lost_locks(store)] == [lease.token]
    assert tiers(store).leases.lost == 1


async def _turn(session: Any) -> None:
    async with session.turn() as turn:
        turn["n"] = turn.get("n", 0) + 1


@real
async def test_what_is_lost_just_before_closing_is_told(opener: Any) -> None:
    store, other = await opener(), await opener()
    lease = await store.session("s").lock(ttl=30).acquire()
    with redis_of(store) as client:
        client.set(keys_of(store, "s").lock, "x99:somebody")
    await lease.release()
    await store.close()
    assert len(await lost_locks(other)) == 1


@real
async def test_a_turn_that_is_taken_over_lost_its_lock(opener: Any) -> None:
    store = await opener()
    session, inside = store.session("s"), asyncio.Event()

    async def slow() -> None:
        async with session.turn(request_id="one") as turn:
            turn["a"] = 1
            inside.set()
            await until(lambda: turn.lost, 20)

    task = asyncio.create_task(slow())
    await inside.wait()
    async with session.turn(request_id="two", busy="interrupt") as turn:
        turn["b"] = 2
    with pytest.raises(Exception, match="taken over"):
        await task

    async def told() -> bool:
        return bool(await store.admin.audit(type="lock.lost"))

    await until(told)
    assert [subject for subject, _ in await lost_locks(store)] == ["session:s"]


@single
async def test_whoever_loses_a_lock_waits_for_nobody(opener: Any) -> None:
    """Redis is away, so it cannot be told; the holder knows in time all the same."""
    with own_server(opener) as server:
        store = await opener(url=server.url, retry_for=1, timeout=1)
        session = store.session("s")
        lease = await session.lock(ttl=1).acquire()
        began = time.monotonic()
        server.pause()
        try:
            await until(lambda: lease.lost, 5)
            assert time.monotonic() - began < 4
        finally:
            server.resume()
        await until(lambda: not tiers(store).background_events._waiting)
        await store.close()


async def test_figures_of_events_are_counted(store: Any) -> None:
    def fails(event: Any) -> None:
        raise ValueError(event.type)

    store.on("a.*", lambda event: None)
    store.on("a.*", fails)
    await store.ready()
    await store.emit("a.b")

    async def counted() -> bool:
        figures = await store.admin.stats()
        return bool(figures["events_handled"] == 2 and figures["events_failed"] == 1)

    await until(counted)
    figures = await store.admin.stats()
    assert (figures["events_waiting"], figures["resyncs"], figures["slow_handlers"]) == (0, 0, 0)

    async def reached() -> bool:
        return bool((await store.admin.replicas())[0].positions["events"] >= 1)

    await until(reached)
