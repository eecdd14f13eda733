"""Expiry: Redis is a cache of what is archived. Law: nothing leaves before, and nothing stale comes back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from below import keys_of, redis_of, tiers, until
from controls import sabotage
from sync_api import core

from distributed_state import Deleted, WarmUnavailable


def said(text: Any) -> dict[str, str]:
    return {"role": "user", "content": str(text)}


async def quiet(opener: Any, **settings: Any) -> Any:
    """A store that archives only when told to, and keeps nothing hot."""
    return await opener(**{"archiver": False, "durability": "memory", "max_staleness": 0} | settings)


def evict(store: Any, id: str) -> None:
    """What volatile-lru or the TTL does to an archived record."""
    with redis_of(store) as client:
        record = keys_of(store, id).record
        assert client.pttl(record) > 0, "only archived records can go"
        assert client.delete(record) == 1


def kept(store: Any, id: str) -> dict[bytes, bytes]:
    with redis_of(store) as client:
        found: dict[bytes, bytes] = client.hgetall(keys_of(store, id).record)
        return found


@contextmanager
def held_up(call: Any, name: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The first call of a method stops when it is done, before its caller hears of it."""
    original, done, go_on = getattr(call, name), threading.Event(), threading.Event()

    def slow(*arguments: Any, **named: Any) -> Any:
        answer = original(*arguments, **named)
        if not done.is_set():
            done.set()
            assert go_on.wait(20)
        return answer

    setattr(call, name, slow)
    try:
        yield done, go_on
    finally:
        go_on.set()
        setattr(call, name, original)


async def test_a_ttl_begins_when_a_record_is_archived_and_ends_with_the_next_write(opener: Any) -> None:
    store = await quiet(opener, warm_ttl=100)
    session = store.session("s")
    with redis_of(store) as client:
        record = keys_of(store, "s").record
        for number in range(3):
            await session.set("a", number)
            assert client.pttl(record) == -1
            assert await session.get("a") == number
            assert client.pttl(record) == -1, "a read sets no TTL"
            await store.admin.archive()
            assert 90_000 < client.pttl(record) <= 100_000


async def test_reads_of_an_archived_record_extend_its_ttl(opener: Any) -> None:
    store = await quiet(opener, warm_ttl=100)
    session = store.session("s")
    await session.set("a", 1)
    await store.admin.archive()
    with redis_of(store) as client:
        record = keys_of(store, "s").record
        reads = (session.get, lambda key: store.get_many([session]), lambda key: session.get(key, fresh=True))
        for read in reads:
            client.pexpire(record, 50_000)
            await read("a")
            assert client.pttl(record) > 90_000


async def test_an_idle_record_expires_and_comes_back_whole(opener: Any) -> None:
    store = await quiet(opener, warm_ttl=0.1)
    session = store.session("s", user="u")
    await session.write(set={"a": [1, {"b": None}], "c": "\x00\ud800"}, append=[said(n) for n in range(50)], phase="x")
    await store.admin.archive()
    with redis_of(store) as client:
        await until(lambda: not client.exists(keys_of(store, "s").record), 5)
    assert await session.get_all() == {"a": [1, {"b": None}], "c": "\x00\ud800"}
    assert await session.phase() == "x"
    assert await session.version() == 1
    assert [message.content for message in await session.messages()] == [str(n) for n in range(50)]
    with redis_of(store) as client:
        await until(lambda: not client.exists(keys_of(store, "s").record), 5)
    assert await session.set("a", 2) == 2
    assert await session.get_all() == {"a": 2, "c": "\x00\ud800"}
    await session.append(said("last"))
    assert [message.content for message in await session.messages(last=2)] == ["49", "last"]


async def test_what_is_hot_keeps_nothing_alive_in_redis(opener: Any) -> None:
    """And may live longer than the warm copy."""
    store = await quiet(opener, warm_ttl=0.3, max_staleness=5)
    session, hot = store.session("s"), tiers(store).hot
    await session.set("a", 1)

    async def is_hot() -> bool:
        hits = hot.hits
        await session.get("a")
        return bool(hot.hits > hits)

    await until(is_hot)
    await store.admin.archive()
    misses = hot.misses

    async def gone() -> bool:
        assert await session.get("a") == 1
        with redis_of(store) as client:
            return not client.exists(keys_of(store, "s").record)

    await until(gone, 5)
    assert await session.get("a") == 1
    assert hot.misses == misses
    assert await session.set("a", 2) == 2


# Stale hydration


async def frozen_reader(store: Any, other: Any) -> None:
    """A reader has version 5 from SQL in its hands; 6 and 7 come, are archived and evicted; then it goes on."""
    session = store.session("s")
    for number in range(1, 6):
        await session.set("n", number)
    await store.admin.archive()
    evict(store, "s")
    with held_up(core(store)._lifecycle.cold, "load") as (loaded, go_on):
        reader = asyncio.create_task(session.get("n", fresh=True))
        await until(loaded.is_set)
        assert await other.session("s").set("n", 6) == 6
        assert await other.session("s").set("n", 7) == 7
        await other.admin.archive()
        evict(other, "s")
        go_on.set()
        assert await reader == 7
    assert await other.session("s").get("n", fresh=True) == 7
    assert await session.set("n", 8) == 8
    await store.admin.archive()
    assert [change.set["n"] for change in await session.history()] == list(range(1, 9))
    assert core(store)._lifecycle.cold.quarantined() == []


@pytest.mark.replicas
async def test_a_reader_that_slept_between_sql_and_redis_puts_nothing_stale_back(opener: Any) -> None:
    await frozen_reader(await quiet(opener), await quiet(opener))


@pytest.mark.replicas
@pytest.mark.only(api="asyncio")
async def test_without_the_hydration_token_the_stale_state_comes_back(opener: Any) -> None:
    """Negative control of G7."""
    guard = ("hydrate", "if redis.call('GET', hydration) ~= token then return {'lost'} end", "")
    with sabotage(*guard), pytest.raises(AssertionError):
        await frozen_reader(await quiet(opener), await quiet(opener))


@pytest.mark.replicas
async def test_two_frozen_readers_bring_the_record_back_once(opener: Any) -> None:
    """Both hold a state from SQL; the second comes when the first one's was changed already."""
    one, two = await quiet(opener), await quiet(opener)
    await one.session("s").set("n", 1)
    await one.admin.archive()
    evict(one, "s")
    with (
        held_up(core(one)._lifecycle.cold, "load") as (first, go_on),
        held_up(core(two)._lifecycle.cold, "load") as (second, go_on_too),
    ):
        readers = [asyncio.create_task(store.session("s").get("n")) for store in (one, two)]
        await until(lambda: first.is_set() and second.is_set())
        go_on.set()
        assert await readers[0] == 1
        assert await one.session("s").set("n", 2) == 2
        go_on_too.set()
        assert await readers[1] == 2
    assert await two.session("s").version() == 2


@pytest.mark.replicas
async def test_a_creator_that_slept_does_not_overwrite_what_was_created_meanwhile(opener: Any) -> None:
    """It looked into SQL when there was nothing; by now the record was created, archived and evicted."""
    one, two = await quiet(opener), await quiet(opener)
    tiers(one).known_ids.add("session:s")  # so it does not say that it may be new
    with held_up(core(one)._lifecycle.cold, "load") as (looked, go_on):
        creator = asyncio.create_task(one.session("s").set("mine", 1))
        await until(looked.is_set)
        assert await two.session("s").set("theirs", 1) == 1
        await two.admin.archive()
        evict(two, "s")
        go_on.set()
        assert await creator == 2
    assert await one.session("s").get_all() == {"mine": 1, "theirs": 1}


@pytest.mark.replicas
async def test_an_import_while_somebody_looks_is_seen(opener: Any) -> None:
    """The looker found nothing in SQL; it must not keep or create on that ground."""
    one, two = await quiet(opener), await quiet(opener)
    await two.session("from").write(set={"a": 1}, append=[said("hi")])
    lines = await two.admin.export("from")
    tiers(one).known_ids.add("session:to")
    with held_up(core(one)._lifecycle.cold, "load") as (looked, go_on):
        creator = asyncio.create_task(one.session("to").set("b", 2))
        await until(looked.is_set)
        assert await two.admin.import_(lines, id="to") == "to"
        go_on.set()
        assert await creator == 2
    assert await one.session("to").get_all() == {"a": 1, "b": 2}
    assert [message.content for message in await one.session("to").messages()] == ["hi"]


@pytest.mark.replicas
async def test_others_see_an_imported_record_although_they_know_it_as_absent(opener: Any) -> None:
    """That there is nothing is kept hot like anything else; an import must be heard of like any change."""
    one, two = [await opener(durability="memory") for _ in range(2)]
    await two.session("from").set("a", 1)
    lines = await two.admin.export("from")
    session = one.session("to")

    async def absence_is_hot() -> bool:
        assert await session.get("a") is None
        return "session:to" in tiers(one).hot.entries

    await until(absence_is_hot)
    await two.admin.import_(lines, id="to")
    await until(lambda: sees(session), 4)


async def sees(session: Any) -> bool:
    return bool(await session.get("a") == 1)


async def test_records_come_and_go_under_readers_and_writers(opener: Any) -> None:
    """Evicted as soon as archived, over and over: counts are exact, and nobody ever reads backwards."""
    store = await quiet(opener)
    stop, evicted = asyncio.Event(), 0

    async def count(id: str, times: int) -> None:
        for _ in range(times):
            await store.session(id).increment("n")

    async def watch(id: str) -> None:
        seen = 0
        while not stop.is_set():
            now = await store.session(id).get("n", 0, fresh=True)
            assert now >= seen
            seen = now
            await asyncio.sleep(0.001)  # a loop that never rests leaves the threads of SQL no time

    async def chase() -> None:
        nonlocal evicted
        while not stop.is_set():
            await asyncio.sleep(0.001)
            await store.admin.archive()
            with redis_of(store) as client:
                for id in ("a", "b"):
                    if client.pttl(keys_of(store, id).record) > 0:
                        evicted += client.delete(keys_of(store, id).record)

    others = [asyncio.create_task(work) for work in (watch("a"), watch("b"), chase())]
    await asyncio.gather(*(count(id, 20) for id in "aabb"))
    await until(lambda: evicted > 5)
    stop.set()
    await asyncio.gather(*others)
    for id in "ab":
        assert await store.session(id).get("n", fresh=True) == 40
        assert [change.set["n"] for change in await store.session(id).history()] == list(range(1, 41))


# What comes back


async def test_op_ids_come_back_with_a_hydrated_record(opener: Any) -> None:
    """An answer is lost; before the write is repeated its record is archived, evicted and back again: applied once."""
    store = await quiet(opener)
    session, warm = store.session("s"), tiers(store).warm
    await session.set("other", 1)
    send, lost = warm.port.script, 0

    async def lose(script: Any, keys: Any, arguments: Any) -> Any:
        nonlocal lost
        answer = await send(script, keys, arguments)
        if script.name == "commit" and not lost:
            lost = 1
            warm.port.script = send
            await core(store).admin.archive()
            evict(store, "s")
            assert await core(store).session("s").version() == 2  # hydrated by somebody
            raise WarmUnavailable("the answer was lost")
        return answer

    warm.port.script = lose
    assert await session.increment("n", 5) == 5
    assert lost
    assert await session.get("n") == 5
    assert [change.version for change in await session.history()] == [1, 2]


async def test_unarchived_messages_beyond_the_recent_ones_stay_readable(opener: Any) -> None:
    """Messages are in the hash or in SQL, always: only what is archived is dropped from the hash."""
    store = await quiet(opener, recent_messages=4)
    session = store.session("s")

    async def check(count: int) -> None:
        for last in (None, 1, 4, 5, count):
            wanted = [str(n) for n in range(count)]
            found = [message.content for message in await session.messages(last=last)]
            assert found == (wanted if last is None else wanted[-last:])

    for number in range(10):
        await session.append(said(number))
    await check(10)
    assert sum(name[:2] == b"#m" and name[2:].isdigit() for name in kept(store, "s")) == 10
    await store.admin.archive()
    assert sum(name[:2] == b"#m" and name[2:].isdigit() for name in kept(store, "s")) == 4
    await check(10)
    for number in range(10, 17):
        await session.append(said(number))
    await check(17)
    await store.admin.archive()
    await check(17)
    evict(store, "s")
    await check(17)
    await session.append(said(17))
    await check(18)


async def test_a_replica_with_a_hot_copy_reads_all_unarchived_messages(opener: Any) -> None:
    store = await quiet(opener, recent_messages=3, max_staleness=5)
    session = store.session("s")
    for number in range(12):
        await session.append(said(number))
        assert [message.content for message in await session.messages()] == [str(n) for n in range(number + 1)]
        assert [message.content for message in await session.messages(last=2)] == [
            str(n) for n in range(max(0, number - 1), number + 1)
        ]


async def test_a_deleted_record_stays_deleted_when_it_was_evicted(opener: Any) -> None:
    store = await quiet(opener)
    session = store.session("s")
    await session.write(set={"a": 1}, append=[said("hi")])
    await store.delete("s")
    await store.admin.archive()
    evict(store, "s")
    assert not await session.exists()
    assert await session.get_all() == {}
    with pytest.raises(Deleted):
        await session.set("a", 2)
    evict(store, "s")
    assert await session.create({"b": 1}) == 3
    assert await session.get_all() == {"b": 1}
    assert await session.messages() == []
