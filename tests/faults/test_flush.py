"""Redis is emptied while replicas keep records, leases and unarchived work. Law: nobody goes on as if nothing was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from below import keys_of, redis_of, tiers, until
from sync_api import core

from distributed_state import ColdUnavailable, Conflict, DurabilityUnknown, Fenced
from distributed_state.programs.servers import RedisServer, redis_server

pytestmark = pytest.mark.only(warm="single")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as own:
        yield own


def flush(store: Any) -> None:
    with redis_of(store) as client:
        client.flushall()


async def hot(store: Any, id: str, key: str, value: Any) -> None:
    """Wait until a replica answers from memory."""
    counts = tiers(store).hot

    async def answered() -> bool:
        hits = counts.hits
        return await store.session(id).get(key) == value and counts.hits > hits

    await until(answered)


async def test_hot_forgets_what_is_lost_even_if_another_replica_was_quicker(opener: Any, server: RedisServer) -> None:
    """It starts the partition again within a moment, so that a look at Redis finds nothing missing."""
    one, two = [await opener(url=server.url, unarchived_bytes=0, archiver=False, max_staleness=0.4) for _ in range(2)]
    await two.session("s").set("n", 1)
    await two.admin.archive()
    await two.session("s").set("n", 2)
    await hot(one, "s", "n", 2)
    flush(two)
    assert await two.session("s").get("n", fresh=True) == 1
    begun = time.monotonic()

    async def noticed() -> bool:
        return bool(await one.session("s").get("n") == 1)

    await until(noticed, 5)
    assert time.monotonic() - begun < 0.8
    await opener.close()


async def test_a_lease_does_not_survive(opener: Any, server: RedisServer) -> None:
    """Somebody else may hold the record now; the old holder's write must not be the first under the new epoch."""
    store = await opener(url=server.url, unarchived_bytes=0, archiver=False)
    session = store.session("s")
    await session.set("n", 1)
    await store.admin.archive()
    lease = session.lock(ttl=30)
    await lease.acquire()
    flush(store)
    for _ in range(2):
        with pytest.raises(Fenced):
            await session.set("n", 2)
    await lease.release()
    async with session.lock() as another:
        assert another.token > lease.token
        assert await session.set("n", 3) == 2
    assert [change.set["n"] for change in await session.history()] == [1, 3]
    await opener.close()


@pytest.mark.wide
async def test_waiters_go_on_waiting(opener: Any, server: RedisServer) -> None:
    """The queue is gone with everything else; those who stood in it line up again."""
    store = await opener(url=server.url)
    session, got = store.session("s"), []

    async def wait(number: int) -> None:
        async with session.lock(wait=20):
            got.append(number)
            await session.increment("n")

    async def queue() -> int:
        with redis_of(store) as client:
            return int(client.zcard(keys_of(store, "s").wait))

    # Whoever holds it does so from outside, and is gone after the loss.
    with redis_of(store) as client:
        await session.increment("n", 0)  # so that the partition has an epoch, which the lock is of
        epoch = client.hget(keys_of(store, "s").meta, "epoch").decode()
        client.set(keys_of(store, "s").lock, f"x1@{epoch}:somebody", px=60_000)
    tasks = [asyncio.create_task(wait(number)) for number in range(4)]

    async def all_wait() -> bool:
        return await queue() == 4

    await until(all_wait)
    flush(store)
    await asyncio.wait_for(asyncio.gather(*tasks), 15)
    assert sorted(got) == [0, 1, 2, 3]
    assert await session.get("n") == 4
    await opener.close()


async def test_waiting_for_the_archive_of_what_is_lost_ends(opener: Any, server: RedisServer) -> None:
    """Also if nobody has started the partition again."""
    store = await opener(url=server.url, unarchived_bytes=0, archiver=False, durability="memory")
    await store.session("s").set("n", 1)
    keys, archiver = keys_of(store, "s"), tiers(store).archiver
    epoch = tiers(store).epoch(keys.partition)
    flush(store)
    with pytest.raises(ColdUnavailable):
        await asyncio.wait_for(core(archiver).reach(keys.partition, epoch, 1, "lost"), 5)
    assert await store.session("s").set("n", 2) == 1
    with pytest.raises(ColdUnavailable, match="lost"):
        await asyncio.wait_for(archiver.reach(keys.partition, epoch, 1, "lost"), 5)
    await opener.close()


async def test_a_commit_that_is_lost_before_it_is_archived_is_reported(opener: Any, server: RedisServer) -> None:
    store = await opener(url=server.url, unarchived_bytes=0, archiver=False, durability="archived")
    session, warm = store.session("s"), tiers(store).warm
    await session.set("n", 1)
    send = warm.port.script

    async def lose(script: Any, keys: Any, arguments: Any) -> Any:
        answer = await send(script, keys, arguments)
        if script.name == "commit":
            warm.port.script = send
            flush(store)
        return answer

    warm.port.script = lose
    with pytest.raises(DurabilityUnknown) as report:
        await session.set("n", 2)
    assert report.value.version == 2
    assert await session.get("n", fresh=True) == 1
    assert await session.set("n", 3) == 2
    assert [change.set["n"] for change in await session.history()] == [1, 3]
    await opener.close()


async def test_items_that_are_lost_are_put_back_by_their_writer(opener: Any, server: RedisServer) -> None:
    """With the layers that rollbacks began, and what stands in the way of what was put only where there was none."""
    store = await opener(url=server.url, archiver=False, unarchived_bytes=2**20)
    user = store.user("u")
    items = user.items("x")
    await items.put_many({"a": 1, "b": 1, "c": 1})
    await store.admin.archive()
    await items.put("a", 2)
    await items.delete("b")
    assert await items.put_missing({"c": 2, "d": 2}) == {"d"}
    await user.clear(items=True)
    await items.put("e", b"\0bytes")
    flush(store)
    assert await items.get_many(["a", "e"]) == {"e": b"\0bytes"}
    page = await items.list()
    assert [item.key for item in page.items] == ["e"]
    with pytest.raises(Conflict):
        await items.put("e", 1, if_absent=True)
    await user.rollback(version=4)
    assert await items.get_many(["a", "b", "c", "d", "e"]) == {"a": 2, "c": 1, "d": 2}
    await opener.close()
