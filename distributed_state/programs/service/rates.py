"""How much a tenant may ask. Law: one that asks more is told when to come back, and takes nothing from others.

A tenant is a prefix of ids; where there are none, it is the actor. A request counts for each prefix that its caller's
lies within: else a tenant whose admin makes tokens of tenants within it would have their rates, too. The rates are of
this worker: behind a balancer that spreads requests evenly, a fleet of n workers allows n times as much. Headers:
RateLimit and RateLimit-Policy of the IETF's draft "RateLimit header fields for HTTP".

Design: section 24.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.exceptions import HTTPException

from distributed_state.programs.service.callers import Caller
from distributed_state.programs.service.limits import Limits
from distributed_state.programs.service.traffic import Traffic

_WINDOW = 10.0  # seconds whose quota may be used at once
_TENANTS = 10_000  # remembered; of one that is forgotten nothing was asked for longest


@dataclass(slots=True)
class _Bucket:
    """What is left of a quota, below zero if an answer was larger than that."""

    rate: float  # a second
    left: float
    since: float

    def fill(self, now: float) -> None:
        self.left = min(self.rate * _WINDOW, self.left + (now - self.since) * self.rate)
        self.since = now


class Rates:
    """The requests and bytes of each tenant in a second; with both 0, nothing is refused. `traffic` counts all."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        given = {"requests": float(limits.tenant_requests), "bytes": float(limits.tenant_bytes)}
        self._rates = {name: rate for name, rate in given.items() if rate}
        self._clock = clock
        self._tenants: OrderedDict[str, dict[str, _Bucket]] = OrderedDict()
        self.traffic = Traffic(clock)

    def __len__(self) -> int:
        return len(self._tenants)

    def ask(self, caller: Caller) -> None:
        """Count one request. Raises HTTPException 429 if the tenant has nothing left."""
        self.traffic.note(caller, requests=1)
        if not self._rates:
            return
        for name, bucket in self._scarcest(caller).items():
            least = 1.0 if name == "requests" else 0.0
            if bucket.left < least:
                wait = max(1, math.ceil((least - bucket.left) / bucket.rate))
                headers = {"Retry-After": str(wait), **self.headers(caller)}
                raise HTTPException(429, f"the quota of {bucket.rate:g} {name} a second is used up", headers)
        self._use(caller, "requests", 1)

    def count(self, caller: Caller, size: int) -> None:
        """Count bytes that were read or answered."""
        self.traffic.note(caller, size=size)
        self._use(caller, "bytes", size)

    def headers(self, caller: Caller) -> dict[str, str]:
        """What an answer says of the quotas."""
        if not self._rates:
            return {}
        policies, left = [], []
        for name, bucket in self._scarcest(caller).items():
            unit = ';qu="content-bytes"' if name == "bytes" else ""
            policies.append(f'"{name}";q={bucket.rate * _WINDOW:.0f};w={_WINDOW:.0f}{unit}')
            full = math.ceil((bucket.rate * _WINDOW - bucket.left) / bucket.rate)
            left.append(f'"{name}";r={max(0, int(bucket.left))};t={full}')
        return {"RateLimit-Policy": ", ".join(policies), "RateLimit": ", ".join(left)}

    def _use(self, caller: Caller, name: str, many: int) -> None:
        if name in self._rates:
            for party in caller.parties:
                self._buckets(party)[name].left -= many

    def _scarcest(self, caller: Caller) -> dict[str, _Bucket]:
        """For each quota, the bucket with the least left among those that the caller counts for."""
        found = [self._buckets(party) for party in caller.parties]
        return {name: min((each[name] for each in found), key=lambda bucket: bucket.left) for name in self._rates}

    def _buckets(self, key: str) -> dict[str, _Bucket]:
        now = self._clock()
        buckets = self._tenants.get(key)
        if buckets is None:
            buckets = {name: _Bucket(rate, rate * _WINDOW, now) for name, rate in self._rates.items()}
            self._tenants[key] = buckets
            if len(self._tenants) > _TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(key)
        for bucket in buckets.values():
            bucket.fill(now)
        return buckets
