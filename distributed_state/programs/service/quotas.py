"""How many conversations a tenant may have. Law: they are counted in the archive, once in a while, not at each request.

So the bound is not exact: what was begun by other workers since, and what is not archived, is not in the count.

Design: section 24.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.exceptions import HTTPException

from distributed_state.programs.service.callers import Caller, serving
from distributed_state.store.asyncio import AsyncStateStore

_AGE = 60.0  # seconds that a count is used for
_PAGE = 1000
_TENANTS = 10_000  # whose counts are remembered


@dataclass(slots=True)
class _Count:
    found: int = 0
    until: float = 0.0


class Quota:
    """The conversations of each tenant, at most so many; 0: any number."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._counts: OrderedDict[str, _Count] = OrderedDict()

    def counts(self, caller: Caller) -> bool:
        """Whether conversations of this caller's are counted: not those of one who is of no tenant."""
        return bool(self._most and caller.prefix)

    async def ask(self, store: AsyncStateStore, caller: Caller) -> None:
        """Count one conversation more. Raises HTTPException 429 if the tenant has as many as it may."""
        if not self.counts(caller):
            return
        count = self._counts.setdefault(caller.prefix, _Count())
        self._counts.move_to_end(caller.prefix)
        if len(self._counts) > _TENANTS:
            self._counts.popitem(last=False)
        if self._clock() >= count.until:
            # Who comes meanwhile goes by the count before, and counts nothing itself.
            count.until = self._clock() + _AGE
            # As the service's own work: a caller who may write need not be one who may list.
            with serving(None):
                count.found = await self._counted(store, caller.prefix)
        if count.found >= self._most:
            wait = str(max(1, int(count.until - self._clock())))
            raise HTTPException(429, f"there are {self._most} conversations, as many as may be", {"Retry-After": wait})
        count.found += 1

    async def _counted(self, store: AsyncStateStore, prefix: str) -> int:
        """How many there are, as far as it matters."""
        found, after = 0, None
        while found < self._most:
            rows = await store.sessions(prefix=prefix, limit=_PAGE, after=after)
            found += len(rows)
            if len(rows) < _PAGE:
                break
            after = rows[-1].cursor
        return found
