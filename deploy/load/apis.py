"""Measure a store that both APIs share: connections, us of a write and of a hot read, writes of 50 tasks, stalls.

    python deploy/load/apis.py [--url redis://...] [--rounds 5]

A store that is used by one API only is opened beside it, in turn, on the same server. `pool`: the sync API called
by tasks through a pool of 8 threads, which is what code does that has no other API.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import redis

from distributed_state import AsyncStateStore, StateStore
from distributed_state.programs.servers import redis_server

WRITES, READS, TASKS = 1500, 20_000, 50
Figures = dict[tuple[str, str], list[float]]


async def many(write: Callable[[int, int], Any]) -> tuple[float, float]:
    """Writes a second of 50 tasks, and for how many ms the loop stood still at most."""
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - began - 0.001)

    async def one(task: int) -> None:
        for n in range(2 * WRITES // TASKS):
            await write(task, n)

    watching = asyncio.create_task(watch())
    began = time.perf_counter()
    await asyncio.gather(*map(one, range(TASKS)))
    took = time.perf_counter() - began
    watching.cancel()
    return 2 * WRITES / took, longest * 1000


async def by_tasks(store: AsyncStateStore, name: str, figures: Figures) -> None:
    """The asyncio API."""
    sessions = [store.session(f"s{each}") for each in range(TASKS)]
    for session in sessions:
        await session.set("n", 0)
    rate, longest = await many(lambda task, n: sessions[task].set("n", n))
    figures[name, "50 tasks, writes/s"].append(rate)
    figures[name, "50 tasks, longest stall ms"].append(longest)
    began = time.perf_counter()
    for n in range(WRITES):
        await sessions[0].set("n", n)
    figures[name, "write us"].append((time.perf_counter() - began) / WRITES * 1e6)
    for _ in range(100):
        await sessions[0].get("n")
        await asyncio.sleep(0.001)
    began = time.perf_counter()
    for _ in range(READS):
        await sessions[0].get("n")
    figures[name, "hot read us"].append((time.perf_counter() - began) / READS * 1e6)


def by_blocking_code(store: StateStore, name: str, figures: Figures) -> None:
    """The sync API."""
    session = store.session("s0")
    session.set("n", 0)
    began = time.perf_counter()
    for n in range(WRITES):
        session.set("n", n)
    figures[name, "write us"].append((time.perf_counter() - began) / WRITES * 1e6)
    for _ in range(100):
        session.get("n")
        time.sleep(0.001)
    began = time.perf_counter()
    for _ in range(READS):
        session.get("n")
    figures[name, "hot read us"].append((time.perf_counter() - began) / READS * 1e6)


def settings() -> dict[str, str]:
    """A namespace and an archive of its own for each store."""
    return {"archive": "memory", "namespace": f"apis{uuid.uuid4().hex[:8]}"}


async def measure(url: str, rounds: int) -> Figures:
    """Open the stores in turn."""
    figures: Figures = defaultdict(list)
    with redis.Redis.from_url(url) as client:
        for _ in range(rounds):
            async with AsyncStateStore.open(url, **settings()) as alone:
                await by_tasks(alone, "asyncio alone", figures)
            blocking = await asyncio.to_thread(lambda: StateStore.open(url, **settings()))
            await asyncio.to_thread(by_blocking_code, blocking, "blocking alone", figures)
            await asyncio.to_thread(blocking.close)
            before = len(client.client_list())
            async with AsyncStateStore.open(url, **settings()) as store:
                await by_tasks(store, "both, asyncio", figures)
                await asyncio.to_thread(by_blocking_code, store.blocking, "both, blocking", figures)
                by_blocking_code(store.blocking, "both, blocking in the loop", figures)
                figures["both", "connections"].append(len(client.client_list()) - before)
                figures["both", "names on the roll"].append(len(await store.admin.replicas()))
                with ThreadPoolExecutor(8) as pool:
                    sessions = [store.blocking.session(f"s{each}") for each in range(TASKS)]
                    run = asyncio.get_running_loop().run_in_executor
                    rate, _ = await many(lambda task, n: run(pool, sessions[task].set, "n", n))  # noqa: B023
                figures["pool", "50 tasks, writes/s"].append(rate)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with ExitStack() as stack:
        url = options.url or stack.enter_context(redis_server()).url
        figures = asyncio.run(measure(url, options.rounds))
    for (name, what), values in figures.items():
        best = max(values) if what.endswith("/s") else min(values)
        print(f"{name:28} {what:28} best {best:10.1f}   median {statistics.median(values):10.1f}")


if __name__ == "__main__":
    main()
