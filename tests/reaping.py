"""Reapers that sweep when told to, and what there is to be seen of them."""

from __future__ import annotations

from typing import Any

from below import keys_of, redis_of, tiers
from sync_api import core, in_thread

from distributed_state.port.blocking import finish
from distributed_state.store.reaper import Reaper


async def run(store: Any, work: Any) -> Any:
    """Run a coroutine of the core as this store's API would."""
    return await work if core(store) is store else await in_thread(lambda: finish(work))


class Sweeps:
    """A reaper that sweeps when told to, all partitions."""

    def __init__(self, store: Any) -> None:
        self._store, self.reaper = store, Reaper(tiers(store))

    async def __call__(self) -> int:
        """How many sessions it ended."""
        before = self.reaper.expired
        while await run(self._store, self.reaper.sweep(range(core(self._store).settings.partitions))):
            pass
        return self.reaper.expired - before


async def quiet(opener: Any, **settings: Any) -> Any:
    """A store without background work."""
    return await opener(**{"archiver": False, "durability": "memory", "partitions": 8} | settings)


def score(store: Any, id: str) -> float | None:
    """When the session is to be looked at, in seconds."""
    with redis_of(store) as client:
        keys = keys_of(store, id)
        found = client.zscore(keys.lifetimes, keys.text)
    return None if found is None else found / 1000


async def told(store: Any, type: str = "session.expired") -> list[tuple[str, Any]]:
    return [(event.conversation_id, event.data) for event in await store.admin.audit(type=type, limit=1000)]


async def exists(store: Any, id: str) -> bool:
    return bool(await store.session(id).exists(fresh=True))
