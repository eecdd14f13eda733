"""What a server's CPU pays for replicas that have nothing to do, by how many they are."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import redis

from deploy.load.curves.curve import Curve, Progress
from distributed_state import AsyncStateStore
from distributed_state.programs.servers import redis_server

_SESSIONS = 500
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
    stores = [await AsyncStateStore.open(url, **settings) for _ in range(replicas)]
    try:
        with redis.Redis.from_url(url) as client:
            await asyncio.sleep(settled)
            before, calls = _counted(client)
            began = time.monotonic()
            await asyncio.sleep(seconds)
            took = time.monotonic() - began
            spent, later = _counted(client)
        asked = {name: count / took / replicas for name, count in (later - calls).items()}
        return (spent - before) / took * 100, asked
    finally:
        await asyncio.gather(*(store.close() for store in stores))


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
