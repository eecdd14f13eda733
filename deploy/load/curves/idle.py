"""What a server's CPU pays for replicas that have nothing to do, by how many they are."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.synchronize import Event, Semaphore
from typing import Any

import redis

from deploy.load.curves.curve import Curve, Progress
from distributed_state import AsyncStateStore
from distributed_state.programs.servers import redis_server

_SESSIONS = 500
_IN_A_PROCESS = 80  # replicas: each has threads of its own, and thousands in one process keep each other from running
_SETTLED = 20.0  # seconds: each has its share, and beats and looks as rarely as it will


def _counted(client: redis.Redis) -> tuple[float, Counter[str]]:
    """Seconds of CPU, and commands by name, those that scripts call with them; until now."""
    cpu, stats = client.info("cpu"), client.info("commandstats")
    calls = {name.removeprefix("cmdstat_"): int(each["calls"]) for name, each in stats.items()}
    return float(cpu["used_cpu_sys"] + cpu["used_cpu_user"]), Counter(calls)


async def _rest(
    url: str, archive: str, replicas: int, settled: float, seconds: float
) -> tuple[float, dict[str, float]]:
    settings: dict[str, Any] = {"archive": archive, "namespace": f"idle{replicas}"}
    async with AsyncStateStore.open(url, **settings) as writer:  # there is something in each partition, and archived
        sessions = [writer.session(f"s{number}", idle=3600) for number in range(_SESSIONS)]
        await asyncio.gather(*(each.set("a", 1) for each in sessions))
    with _elsewhere(url, settings, replicas - _IN_A_PROCESS), redis.Redis.from_url(url) as client:
        async with _opened(url, settings, min(replicas, _IN_A_PROCESS)):
            await asyncio.sleep(settled)
            before, calls = _counted(client)
            began = time.monotonic()
            await asyncio.sleep(seconds)
            took = time.monotonic() - began
            spent, later = _counted(client)
    asked = {name: count / took / replicas for name, count in (later - calls).items()}
    return (spent - before) / took * 100, asked


@asynccontextmanager
async def _opened(url: str, settings: dict[str, Any], replicas: int) -> AsyncIterator[None]:
    """So many stores, open."""
    stores = [await AsyncStateStore.open(url, **settings) for _ in range(replicas)]
    try:
        yield
    finally:
        await asyncio.gather(*(store.close() for store in stores))


def _hold(url: str, settings: dict[str, Any], replicas: int, opened: Semaphore, over: Event) -> None:
    """A process that holds stores open until it is over."""

    async def hold() -> None:
        async with _opened(url, settings, replicas):
            opened.release()
            await asyncio.to_thread(over.wait)

    asyncio.run(hold())


@contextmanager
def _elsewhere(url: str, settings: dict[str, Any], replicas: int) -> Iterator[None]:
    """So many stores in other processes, all open."""
    spawning = multiprocessing.get_context("spawn")
    opened, over = spawning.Semaphore(0), spawning.Event()
    counts = [min(_IN_A_PROCESS, replicas - first) for first in range(0, replicas, _IN_A_PROCESS)]
    holders = [
        spawning.Process(target=_hold, args=(url, settings, count, opened, over), daemon=True) for count in counts
    ]
    try:
        for each in holders:
            each.start()
            if not opened.acquire(timeout=120):
                raise SystemExit("a process with replicas did not open them within 120 s")
        yield
    finally:
        over.set()
        for each in holders:
            each.join()


def resting(replicas: int, *, settled: float = _SETTLED, seconds: float = 20.0) -> tuple[float, dict[str, float]]:
    """Percent of a core that a server needs for so many replicas at rest; commands a second of each, by name."""
    with redis_server() as server, tempfile.TemporaryDirectory(prefix="distributed-state-growth-") as folder:
        archive = f"sqlite:///{folder}/idle.db"
        return asyncio.run(_rest(server.url, archive, replicas, settled, seconds))


def idle(sizes: Sequence[int], progress: Progress, *, settled: float = _SETTLED, seconds: float = 20.0) -> Curve:
    """What a fleet at rest takes of a server."""
    costs = []
    for size in sizes:
        progress(f"{size} replicas at rest")
        costs.append(resting(size, settled=settled, seconds=seconds)[0])
    return Curve("server CPU of a fleet at rest", "%", "replicas", list(sizes), costs, 4.0)


if __name__ == "__main__":
    import sys

    for size in map(int, sys.argv[1:] or ["80", "320", "1000"]):
        cost, asked = resting(size)
        sent = asked.get("evalsha", 0.0) + asked.get("eval", 0.0)
        each = ", ".join(f"{name} {count:.2f}" for name, count in sorted(asked.items(), key=lambda of: -of[1]))
        print(f"{size} replicas: {cost:.2f} % of a core; each {sent:.2f} scripts/s, in all {each}", flush=True)
