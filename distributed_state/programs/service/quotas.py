"""How much a tenant may have. Law: it is counted in the archive, once in a while, not at each request.

So the bounds are not exact: what was begun by other workers since, and what is not archived, is not in the count.
Whatever a tenant has counts for each prefix that its own lies within. Otherwise an admin who makes tokens for tenants
within the own one would get a whole quota with each token.

Design: section 24.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from starlette.exceptions import HTTPException

from distributed_state.programs.service.callers import Caller
from distributed_state.programs.service.limits import Limits
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.values.model import escape

_NAMES = {  # by what is counted: a scope of records, or items
    "session": "conversations",
    "task": "tasks",
    "user": "users",
    "item": "items",
}
_AGE = 60.0  # seconds that a count is used for
_TENANTS = 10_000  # whose counts are remembered


@dataclass(slots=True)
class _Count:
    found: int = 0
    until: float = 0.0
    counting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Quota:
    """Counts what each tenant has, and holds it to a limit of each kind; 0: no limit."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._most: dict[str, int] = {
            "session": limits.tenant_conversations, "task": limits.tenant_tasks, "user": limits.tenant_users,
            "item": limits.tenant_items,
        }  # fmt: skip
        self._clock = clock
        self._counts: OrderedDict[tuple[str, str], _Count] = OrderedDict()

    def counts(self, caller: Caller, kind: str) -> bool:
        """Whether what this caller has of a kind is counted: not that of one who is of no tenant."""
        return bool(self._most.get(kind) and caller.prefix)

    async def ask(self, store: AsyncStateStore, caller: Caller, kind: str, more: int = 1) -> None:
        """Count so many more. Raises HTTPException 429 if a tenant would have more than it may."""
        if not more or not self.counts(caller, kind):
            return
        counts = {prefix: self._count(kind, prefix) for prefix in caller.tenants}
        for prefix, count in counts.items():
            async with count.counting:
                if self._clock() >= count.until:
                    # While SQL is away the count before is gone by, and one request in a minute finds out.
                    count.until = self._clock() + _AGE
                    count.found = await self._counted(store, kind, prefix)
        most = self._most[kind]
        for prefix, count in counts.items():
            if count.found + more > most:
                wait = str(max(1, int(count.until - self._clock())))
                detail = f"there are {count.found} {_NAMES[kind]} of {prefix!r:.80}, of {most} that may be"
                raise HTTPException(429, detail, {"Retry-After": wait})
        for count in counts.values():
            count.found += more

    def _count(self, kind: str, prefix: str) -> _Count:
        count = self._counts.setdefault((kind, prefix), _Count())
        self._counts.move_to_end((kind, prefix))
        if len(self._counts) > _TENANTS:
            self._counts.popitem(last=False)
        return count

    async def _counted(self, store: AsyncStateStore, kind: str, prefix: str) -> int:
        """How many there are, as far as it matters. As the service's own work: who may write need not list."""
        tiers = store.tiers()
        begin, most = escape(prefix), self._most[kind]
        if kind == "item":
            return await tiers.port.sql(partial(tiers.cold.count_items, begin, most))
        return await tiers.port.sql(partial(tiers.cold.count, kind, begin, most))
