"""What each tenant asks of this worker. Law: counting costs a request nothing that can be seen, and is bounded.

Rates decay: each is the sum of what was asked for, weighted by how long ago that was.

Design: section 24.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from distributed_state.programs.service.callers import Caller

_TENANTS = 10_000  # remembered; forgotten is the one of which nothing was asked for longest
_SECONDS = 10.0  # after so long what was asked for counts for a third
_COUNTED_FOR = 60.0  # seconds that a count of conversations is shown


@dataclass(slots=True)
class _Tenant:
    requests: int = 0
    bytes: int = 0
    request_rate: float = 0.0
    byte_rate: float = 0.0
    at: float = 0.0
    conversations: int = 0
    counted: float = -math.inf


@dataclass(frozen=True, slots=True)
class TenantTraffic:
    """A tenant, "" for callers of all: what it asked for and was sent since the worker began, and in a second now.

    Tenants that lie within it are counted in it, and by themselves as well.
    """

    prefix: str
    requests: int
    bytes: int
    requests_per_second: float
    bytes_per_second: float


class Traffic:
    """The traffic of one worker, by tenant."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    def note(self, caller: Caller, *, requests: int = 0, size: int = 0) -> None:
        """Count requests and bytes."""
        for prefix in caller.tenants or (caller.tenant,):
            self._note(prefix, requests, size)

    def _note(self, prefix: str, requests: int, size: int) -> None:
        tenant = self._tenants.get(prefix)
        if tenant is None:
            tenant = self._tenants[prefix] = _Tenant()
            if len(self._tenants) > _TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(prefix)
        now = self._clock()
        kept = math.exp((tenant.at - now) / _SECONDS)
        tenant.at = now
        tenant.requests += requests
        tenant.bytes += size
        tenant.request_rate = tenant.request_rate * kept + requests / _SECONDS
        tenant.byte_rate = tenant.byte_rate * kept + size / _SECONDS

    def busiest(self, limit: int) -> list[TenantTraffic]:
        """Those who ask most now."""
        now = self._clock()
        found = []
        for prefix, each in list(self._tenants.items()):
            kept = math.exp((each.at - now) / _SECONDS)
            found.append(
                TenantTraffic(prefix, each.requests, each.bytes, each.request_rate * kept, each.byte_rate * kept)
            )
        return sorted(found, key=lambda each: each.requests_per_second, reverse=True)[:limit]

    async def conversations(self, prefix: str, count: Callable[[], Awaitable[int]]) -> int:
        """How many conversations a tenant has, counted once a minute."""
        tenant = self._tenants.get(prefix) or _Tenant()
        if self._clock() >= tenant.counted + _COUNTED_FOR:
            tenant.conversations = await count()
            tenant.counted = self._clock()
        return tenant.conversations
