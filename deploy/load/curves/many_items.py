"""What an item costs in a record of many. Law: what is sent is counted exactly; times are ratios of one run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import redis

from deploy.load.curves.curve import Curve, Progress, flat
from distributed_state import StateStore
from distributed_state.programs.servers import RedisServer, redis_server

_MEASURED = 200
_VALUE = {"text": "x" * 500}


def _key(number: int) -> str:
    return f"{number:012}"


class _Record:
    """A user with so many items, all archived but the newest."""

    def __init__(self, store: StateStore, server: RedisServer, size: int) -> None:
        self.store, self.client = store, redis.Redis.from_url(server.url)
        self.user = store.user(f"of-{size}")
        self.items = self.user.items("checkpoints")
        self.next = size
        for first in range(0, size, 500):
            self.items.put_many({_key(number): _VALUE for number in range(first, min(first + 500, size))})
        store.admin.archive()
        self.items.get(_key(0))

    def put(self) -> None:
        self.items.put(_key(self.next), _VALUE)
        self.next += 1

    def put_if_absent(self) -> None:
        self.items.put(_key(self.next), _VALUE, if_absent=True)
        self.next += 1

    def get(self) -> None:
        self.items.get(_key(self.next - 1))

    def list(self) -> None:
        self.items.list(limit=10, reverse=True)

    def cold(self) -> None:
        """What a worker reads that never saw the record."""
        self.store.invalidate()
        self.user.get_all(fresh=True)

    def scripts(self, call: Callable[[], None]) -> float:
        """How many scripts one call takes."""
        before = self._calls()
        for _ in range(_MEASURED):
            call()
        return (self._calls() - before) / _MEASURED

    def _calls(self) -> int:
        return sum(stats["calls"] for name, stats in self.client.info("commandstats").items() if "eval" in name)

    def received(self, call: Callable[[], None]) -> float:
        """How many bytes the server sends for one call."""
        before = self._sent()
        for _ in range(_MEASURED):
            call()
        return (self._sent() - before) / _MEASURED

    def _sent(self) -> int:
        stats: dict[str, Any] = self.client.info("stats")
        return int(stats["total_net_output_bytes"])

    def microseconds(self, calls: Sequence[Callable[[], None]]) -> list[float]:
        """The medians, taken in turns."""
        taken: list[list[float]] = [[] for _ in calls]
        for _ in range(_MEASURED):
            for call, times in zip(calls, taken, strict=True):
                began = time.perf_counter()
                call()
                times.append(time.perf_counter() - began)
        return [median(times) * 1e6 for times in taken]


def many_items(sizes: Sequence[int], progress: Progress) -> list[Curve]:
    """Scripts, bytes and times of one item where the record has so many."""
    with ExitStack() as stack:
        server = stack.enter_context(redis_server())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="distributed-state-growth-"))
        archive = f"sqlite:///{folder}/state.db"
        given: dict[str, Any] = {"archiver": False, "durability": "memory", "max_staleness": 1.0}
        store = stack.enter_context(StateStore.open(server.url, archive=archive, **given))
        records = []
        for size in sizes:
            progress(f"{size} items")
            records.append(_Record(store, server, size))
        puts = [each.scripts(each.put) for each in records]
        guarded = [each.scripts(each.put_if_absent) for each in records]
        gets = [each.scripts(each.get) for each in records]
        progress("times")
        store.admin.archive()
        calls = [call for each in records for call in (each.put, each.get, each.list)]
        taken = records[0].microseconds(calls)
        progress("cold workers")
        read = [each.received(each.cold) for each in records]
    given_sizes = list(sizes)
    return [
        Curve("scripts of a put", "", "items", given_sizes, puts, 1.01),
        Curve("scripts of a put if absent", "", "items", given_sizes, guarded, 1.01),
        Curve("scripts of a get of a recent item", "", "items", given_sizes, gets, 1.01),
        flat("put of an item", "us", "items", sizes, taken[0::3]),
        flat("get of a recent item", "us", "items", sizes, taken[1::3]),
        flat("the newest ten, listed", "us", "items", sizes, taken[2::3], 2.0),
        flat("a cold worker reads the fields", "bytes", "items", sizes, read, 2.0),
    ]
