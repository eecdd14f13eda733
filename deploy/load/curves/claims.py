"""What replicas that have nothing to do ask of a server, by how many they are."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence

import redis

from deploy.load.curves.curve import Curve, Progress
from distributed_state import AsyncStateStore
from distributed_state.programs.servers import redis_server


async def _claims(url: str, archive: str, members: int, seconds: float) -> float:
    """Scripts a second and replica, of replicas that archive and have nothing to do."""

    def calls() -> int:
        with redis.Redis.from_url(url) as client:
            stats = client.info("commandstats")
        return sum(int(stats[name]["calls"]) for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats)

    stores = [
        await AsyncStateStore.open(url, archive=archive, namespace=f"g{members}", max_staleness=0)
        for _ in range(members)
    ]
    try:
        await asyncio.sleep(12)  # each has its share by then
        before = calls()
        await asyncio.sleep(seconds)
        return (calls() - before) / seconds / members
    finally:
        await asyncio.gather(*(store.close() for store in stores))


def claims(sizes: Sequence[int], progress: Progress, *, seconds: float = 10.0) -> Curve:
    """What replicas at rest send."""
    costs = []
    with redis_server() as server, tempfile.TemporaryDirectory(prefix="distributed-state-growth-") as folder:
        for size in sizes:
            progress(f"{size} replicas at rest")
            archive = f"sqlite:///{folder}/{size}.db"
            costs.append(asyncio.run(_claims(server.url, archive, size, seconds)))
    return Curve("scripts a second, each replica at rest", "/s", "replicas", list(sizes), costs, 2.0)
