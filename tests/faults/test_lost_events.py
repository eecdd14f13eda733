"""What becomes of events when connections, consumers and Redis fail (G6).

Law: what a replica received equals the stream, or there is one resync where something is missing.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import pytest
import redis
from below import own_server, tiers, until

from distributed_state import Event, feed
from distributed_state.feed import RESYNC, Feed, Subscription

real = pytest.mark.only(warm=("valkey", "redis"))
Heard = list[tuple[int, str, int, str]]


class Listener:
    """A replica that writes down what it is told."""

    def __init__(self, store: Any) -> None:
        self.store, self.heard = store, list[Event]()
        store.on("*", self.hear)

    def hear(self, event: Event) -> None:
        self.heard.append(event)

    def told(self) -> list[Event]:
        return [event for event in self.heard if event.type != RESYNC]

    @property
    def resyncs(self) -> int:
        return sum(event.type == RESYNC for event in self.heard)


def streams(url: str, store: Any) -> dict[int, list[tuple[str, int]]]:
    """Every event that Redis holds, by partition: its id and offset."""
    keys = tiers(store).keys
    with redis.Redis.from_url(url) as client:
        return {
            at: [(fields[b"h"].split(b"\n")[0].decode(), int(name.split(b"-")[0])) for name, fields in found]
            for at in range(keys.partitions)
            if (found := client.xrange(keys.partition(at).events))
        }


def by_partition(events: list[Event]) -> dict[int, list[tuple[str, int]]]:
    found = defaultdict(list)
    for event in events:
        found[event.partition].append((event.id, event.sequence))
    return dict(found)


async def emit_many(store: Any, count: int, tasks: int = 20) -> None:
    async def some(task: int) -> None:
        for n in range(task, count, tasks):
            await store.emit("test.counted", {"n": n}, subject=f"subject {n % 50}")

    await asyncio.gather(*(some(task) for task in range(tasks)))


async def kill_subscribers(url: str, done: asyncio.Event) -> int:
    """Cut every subscription, all or some, at random moments."""
    kills = 0
    with redis.Redis.from_url(url) as client:
        while not done.is_set():
            await asyncio.sleep(random.uniform(0.01, 0.15))
            links = [each["id"] for each in client.client_list(_type="pubsub")]
            chosen = links if random.random() < 0.3 else random.sample(links, len(links) // 2)
            for each in chosen:
                kills += client.client_kill_filter(_id=each)
    return kills


@real
@pytest.mark.only(face="asyncio")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("count", [20_000])
async def test_nothing_is_missed_when_subscribers_are_cut_off_at_random(opener: Any, count: int) -> None:
    with own_server(opener) as server:
        opener.url = server.url
        replicas = [await opener(partitions=8) for _ in range(5)]
        listeners = [Listener(each) for each in replicas]
        done = asyncio.Event()
        killer = asyncio.create_task(kill_subscribers(server.url, done))
        await emit_many(replicas[0], count)
        done.set()
        assert await killer > 20
        expected = streams(server.url, replicas[0])
        assert sum(map(len, expected.values())) == count
        await until(lambda: all(len(each.heard) >= count for each in listeners), 60)
        for each in listeners:
            assert each.resyncs == 0
            assert by_partition(each.told()) == expected
