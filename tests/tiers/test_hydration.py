"""G7: nothing leaves Redis before it is archived, the next access brings it back, and never an older state."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from below import keys_of, redis_of, until
from controls import sabotage
from sync_api import core

from distributed_state import Backpressure, ConfigurationError, StateStore
from distributed_state.programs.servers import redis_server

QUIET: dict[str, Any] = {"archiver": False, "durability": "memory"}


def evicted(store: Any, id: str = "s") -> None:
    """What volatile-lru or the TTL may do at any time: take an archived record. Refuses to take another."""
    with redis_of(store) as client:
        assert client.pttl(keys_of(store, id).record) > 0, "only archived records carry a TTL"
        client.delete(keys_of(store, id).record)


def ttl(store: Any, id: str = "s") -> int:
    with redis_of(store) as client:
        return int(client.pttl(keys_of(store, id).record))


async def test_only_an_archived_record_has_a_ttl(opener: Any) -> None:
    store = await opener(**QUIET)
    session = store.session("s")
    await session.set("a", 1)
    assert ttl(store) == -1
    await session.get("a", fresh=True)
    assert ttl(store) == -1, "a read sets no TTL, it only extends one"
    await store.admin.archive()
    assert ttl(store) > 0
    await session.set("a", 2)
    assert ttl(store) == -1, "what is not archived yet may not expire"
    await store.admin.archive()
    assert ttl(store) > 0


async def test_a_write_without_persist_would_let_redis_lose_it(opener: Any) -> None:
    """Negative control of the test above."""
    store = await opener(**QUIET)
    with (
        sabotage("commit", "call('PERSIST', record)", "local kept = nil"),
        pytest.raises(AssertionError, match="not arch"),
    ):
        session = store.session("s")
        await session.set("a", 1)
        await store.admin.archive()
        await session.set("a", 2)
        assert ttl(store) == -1, "what is not archived yet may not expire"


async def frozen_creator(opener: Any) -> None:
    """The same for whoever found nothing in SQL and is about to create the record."""
    slow, quick = await opener(**QUIET), await opener(**QUIET)
    looked, go, load = threading.Event(), threading.Event(), core(slow)._lifecycle.cold.load

    def freezing(*arguments: Any, **named: Any) -> Any:
        found = load(*arguments, **named)
        looked.set()
        assert go.wait(20)
        return found

    core(slow)._lifecycle.cold.load = freezing

    async def write() -> int:
        return int(await slow.session("s").set("slow", 1))

    writer = asyncio.create_task(write())
    await until(looked.is_set)
    core(slow)._lifecycle.cold.load = load
    session = quick.session("s")
    await session.set("quick", 1)
    await quick.admin.archive()
    evicted(quick)
    go.set()
    assert await writer == 2
    assert await session.get_all(fresh=True) == {"quick": 1, "slow": 1}


ASKS = ("install", "if known == '1' then", "if false then")  # SQL is asked for each name


@pytest.mark.replicas
async def test_a_record_is_not_created_twice(opener: Any) -> None:
    with sabotage(*ASKS):
        await frozen_creator(opener)


@pytest.mark.replicas
async def test_without_the_token_it_would_be(opener: Any) -> None:
    """Negative control."""
    guard = "or call('GET', hydration) ~= creation)"
    with sabotage(*ASKS), sabotage("commit", guard, ")"), pytest.raises(AssertionError):
        await frozen_creator(opener)


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
def test_a_policy_that_evicts_anything_is_refused(policy: str) -> None:
    with redis_server("--maxmemory-policy", policy) as server, pytest.raises(ConfigurationError, match="volatile-lru"):
        StateStore.open(server.url, archive="memory")


@pytest.mark.wide
@pytest.mark.only(warm="single")
def test_a_full_redis_evicts_only_what_is_archived() -> None:
    """volatile-lru with little memory: archived records make room; what is not archived stays or is refused."""
    options = ("--maxmemory-policy", "volatile-lru", "--maxmemory", "6mb", "--maxmemory-samples", "10")
    quiet = {"archiver": False, "beat": 0}
    with redis_server(*options) as server, StateStore.open(server.url, archive="memory", **quiet) as store:
        written: list[str] = []

        def fill() -> None:
            while True:
                id = f"s{len(written)}"
                store.session(id).set("text", id + "x" * 20_000)
                written.append(id)

        with pytest.raises(Backpressure, match="maxmemory"):
            fill()
        first = len(written)
        assert first > 50
        with redis_of(StateInside(store)) as client:
            # A few tokens at most: the full server made room with those of the session that it refused.
            assert client.info("stats")["evicted_keys"] < 10
            store.admin.archive()
            later = 0
            while client.info("stats")["evicted_keys"] <= 10:  # makes room by evicting
                store.session(f"later-{later}").set("text", "y" * 20_000)
                store.admin.archive()
                later += 1
        for id in written:
            assert store.session(id).get("text") == id + "x" * 20_000
            store.admin.archive()


class StateInside:
    """Lets `redis_of` look below a store that was opened without the fixture."""

    def __init__(self, store: StateStore) -> None:
        self.settings, self._lifecycle = store.settings, store._core._lifecycle
