"""The fixtures themselves: one test, both APIs, every backend."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sync_api import Blocking, core

from distributed_state import AsyncStateStore, Fenced, Locked, LockTimeout


async def test_a_store_of_either_api_reads_what_it_wrote(store: Any) -> None:
    session = store.session("s", user="u")
    assert await session.set("a", {"b": [1]}) == 1
    assert await session.get("a") == {"b": [1]}
    assert await store.user("u").set("x", 1) == 1
    assert (await session.write(set={"c": 2}, append=[{"role": "user", "content": "hi"}])).version == 2
    assert [message.content for message in await session.messages()] == ["hi"]
    assert [change.version for change in await session.history()] == [1, 2]
    async with session.transaction() as view:
        view["c"] += 1
    assert await session.get("c") == 3
    async with store.batch() as batch:
        batch.on(session).set("d", 4)
    assert await session.get_all() == {"a": {"b": [1]}, "c": 3, "d": 4}
    assert isinstance(core(store), AsyncStateStore)


async def test_tasks_of_a_test_are_independent_holders(store: Any) -> None:
    """A lock held by one task keeps another one out, which is a thread of its own on the sync API."""
    session = store.session("s")
    held, leave = asyncio.Event(), asyncio.Event()

    async def holder() -> None:
        async with session.lock() as lease:
            assert lease.token > 0
            held.set()
            await leave.wait()
            await session.set("a", 1)

    task = asyncio.create_task(holder())
    await held.wait()
    with pytest.raises(Locked):
        await session.set("a", 2)
    with pytest.raises(LockTimeout):
        await session.lock(wait=0.05).acquire()
    leave.set()
    await task
    assert await session.set("a", 3) == 2


async def test_concurrent_calls_really_overlap(store: Any) -> None:
    session, locked = store.session("s"), asyncio.Event()

    async def wait_for_the_lock() -> None:
        await locked.wait()
        async with session.lock(wait=5):
            await session.increment("n")

    waiting = [asyncio.create_task(wait_for_the_lock()) for _ in range(4)]
    async with session.lock():
        locked.set()
        await asyncio.sleep(0.05)
        assert await session.get("n") is None
    await asyncio.gather(*waiting)
    assert await session.get("n") == 4


@pytest.mark.replicas
async def test_replicas_share_what_they_know(opener: Any) -> None:
    first, second = await opener(), await opener()
    assert opener.warm != "fake"
    await first.session("s").set("a", 1)
    assert await second.session("s").get("a", fresh=True) == 1


@pytest.mark.only(api="blocking")
async def test_a_mark_chooses_combinations(store: Any) -> None:
    assert isinstance(store, Blocking)
    with pytest.raises(Fenced):
        raise Fenced("the errors are the same classes")
