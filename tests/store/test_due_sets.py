"""Due sets that Redis has lost. Law: they are filled from SQL, while the worker serves sessions."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from below import keys_of, redis_of, said, tiers, until
from working import answering, due_set, working

from distributed_state.store import due_sets, work

pytestmark = pytest.mark.only(warm="real")


async def lost(store: Any, count: int) -> None:
    """So many sessions with a wake in an hour, and a Redis that has lost them."""
    for number in range(count):
        await store.session(f"s{number}").wake("later", after=3600, handler="a")
    await store.admin.archive()
    with redis_of(store) as redis:
        redis.flushall()
    store.invalidate()


def looked(store: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The pages of due sessions that SQL is asked for: each partition, and whether it is its first page."""
    cold = tiers(store).cold
    seen: list[tuple[int, bool]] = []
    look = cold.due

    def due(partition: int, handler: str, *, after: Any, limit: int) -> Any:
        seen.append((partition, after is None))
        return look(partition, handler, after=after, limit=limit)

    monkeypatch.setattr(cold, "due", due)
    return seen


async def test_sessions_are_served_while_a_set_is_filled(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = tiers(store).cold
    look, asked, go = cold.due, threading.Event(), threading.Event()

    def due(*given: Any, **named: Any) -> Any:
        asked.set()
        assert go.wait(60)
        return look(*given, **named)

    monkeypatch.setattr(cold, "due", due)
    await lost(store, 3)
    seen: list[Any] = []
    async with working(store, {"a": answering(seen)}):
        await until(asked.is_set)
        await store.session("posted").post(said("1"), handler="a")
        await until(lambda: seen == ["1"])
        assert not due_set(store, "s0")
        go.set()
        await until(lambda: all(b"session:s%d" % number in due_set(store, f"s{number}") for number in range(3)))


async def test_each_partition_gets_a_page_in_turn(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due_sets, "_PAGE", 2)
    # All partitions are the worker's from the beginning: its own come first.
    monkeypatch.setattr(work.SessionWorker, "_places", lambda worker: set(worker._names.values()))
    seen = looked(store, monkeypatch)
    partitions = tiers(store).keys.partitions
    await lost(store, 6 * partitions)
    async with working(store, {"a": answering([])}):
        await until(lambda: sum(len(due_set(store, f"s{number}")) for number in range(6 * partitions)) > 0)
        await until(lambda: all(due_set(store, f"s{number}") for number in range(6 * partitions)), 60.0)
    pages = [partition for partition, _ in seen]
    assert set(pages) == set(range(partitions))
    for at, partition in enumerate(pages):
        if partition in pages[at + 1 :]:
            again = pages.index(partition, at + 1)
            begun = {*pages[:at]} & {*pages[again:]}
            assert begun <= {partition, *pages[at:again]}, "each gets a page between two of another one"


async def test_a_set_that_another_worker_has_filled_is_left_alone(store: Any) -> None:
    await lost(store, 1)
    async with working(store, {"a": answering([])}):
        await until(lambda: b"session:s0" in due_set(store, "s0"))
    keys = tiers(store).keys.partition(keys_of(store, "s0").partition)
    with redis_of(store) as redis:
        redis.zrem(keys.due_of("a"), "session:s0")
        epoch = redis.hget(keys.meta, "epoch").decode()
    sets = due_sets.DueSets(tiers(store), ["a"], list, lambda place: None)
    sets.note([], [], {("a", keys_of(store, "s0").partition): epoch})
    sets.begin()
    await until(lambda: not sets._unfilled)
    await sets.close()
    assert not due_set(store, "s0")
