"""What it takes to remove a person: every record, message and event of theirs, from Redis and from SQL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from deploy.load.curves.curve import Curve, Progress
from distributed_state import AsyncStateStore
from distributed_state.programs.servers import postgres_server, redis_server

_MESSAGES = 4


async def _forget(url: str, archive: str, sessions: int) -> float:
    async with AsyncStateStore.open(url, archive=archive, namespace=f"f{sessions}") as store:
        for first in range(0, sessions, 100):
            some = [store.session(f"s{number}", user="ada") for number in range(first, min(first + 100, sessions))]
            for _ in range(_MESSAGES):
                await asyncio.gather(*(each.append({"role": "user", "content": "hello" * 20}) for each in some))
        await store.admin.archive()
        began = time.perf_counter()
        removed = await store.forget("ada")
        taken = time.perf_counter() - began
        assert removed == sessions, f"{removed} of {sessions} were removed"
        return taken


def forgetting(sizes: Sequence[int], progress: Progress) -> Curve:
    """`store.forget` of a user with so many sessions that are archived and still in Redis."""
    costs = []
    with redis_server() as server, postgres_server() as database:
        for size in sizes:
            progress(f"{size} sessions of one user")
            costs.append(asyncio.run(_forget(server.url, database.url, size)))
    return Curve("forget a user", "s", "sessions", list(sizes), costs, 1.0)
