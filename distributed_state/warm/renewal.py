"""Keeps leases alive, all of a replica together. Law: a holder knows of a loss before anybody else can hold its lock.

So the deadlines are watched apart from the renewing, which may hang with the server.

Design: section 8.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from distributed_state.errors import StateError
from distributed_state.port import Job, Port
from distributed_state.values.keys import RecordKeys
from distributed_state.warm.scripts import RENEW

log = logging.getLogger(__name__)
_IDLE_SECONDS = 60.0
_SHORTEST = 0.005


class Renewable(Protocol):
    """A lease as this module sees it; times are by the monotonic clock."""

    names: RecordKeys
    lock_value: str
    ttl: float
    ttl_ms: int
    deadline: float
    ends: float
    renew_at: float

    @property
    def lost(self) -> bool:
        """Whether it is held no more."""
        ...

    def renewed(self, sent: float) -> None:
        """The server renewed it; `sent` is when it was asked, by the monotonic clock."""
        ...


L = TypeVar("L", bound=Renewable)


class Renewal(Generic[L]):
    """The leases that are renewed, by their holders' names; `lose(lease, why)` is called for one that cannot be."""

    def __init__(self, port: Port, lose: Callable[[L, str], None]) -> None:
        self._port = port
        self._lose = lose
        self._mutex = port.mutex()
        self._kept = port.signal()
        self._watched = port.signal()
        # Until when each job sleeps. While it is awake, it is told of every lease: it may have looked already.
        self._renews_at = self._watches_at = math.inf
        self._jobs: list[Job] = []
        self.held: dict[str, L] = {}

    def keep(self, holder: str, lease: L) -> None:
        """Renew it from now on."""
        self.held[holder] = lease
        with self._mutex:
            if not self._jobs:
                self._jobs = [
                    self._port.spawn(self._renew, "distributed-state-leases"),
                    self._port.spawn(self._watch, "distributed-state-deadlines"),
                ]
        if lease.renew_at < self._renews_at:
            self._kept.set()
        if min(lease.deadline, lease.ends) < self._watches_at:
            self._watched.set()

    def drop(self, holder: str) -> bool:
        """Renew it no more; whether it was."""
        return self.held.pop(holder, None) is not None

    async def _renew(self) -> None:
        while True:
            self._kept.clear()  # first: a lease kept from here on ends the wait below
            self._renews_at = math.inf
            now = self._port.monotonic()
            due = [lease for lease in list(self.held.values()) if not lease.lost and now >= lease.renew_at]
            if due:
                await self._renew_all(due)
            now = self._port.monotonic()
            first = min((lease.renew_at for lease in list(self.held.values())), default=now + _IDLE_SECONDS)
            self._renews_at = max(first, now + _SHORTEST)
            await self._kept.wait(self._renews_at - now)

    async def _watch(self) -> None:
        while True:
            self._watched.clear()
            self._watches_at = math.inf
            now = self._port.monotonic()
            for lease in list(self.held.values()):
                if now >= lease.deadline:
                    self._lose(lease, "could not be renewed in time")
                elif now >= lease.ends:
                    self._lose(lease, "was held for as long as it may be")
            ends = (min(lease.deadline, lease.ends) for lease in list(self.held.values()))
            self._watches_at = max(min(ends, default=now + _IDLE_SECONDS), now + _SHORTEST)
            await self._watched.wait(self._watches_at - now)

    async def _renew_all(self, due: list[L]) -> None:
        sent = self._port.monotonic()
        for lease in due:
            lease.renew_at = sent + lease.ttl / 10  # tried again soon if this one fails
        calls = [(RENEW, [each.names.lock, each.names.meta], [each.lock_value, each.ttl_ms]) for each in due]
        try:
            answers = await self._port.scripts(calls)
        except StateError as error:
            log.warning("leases: renewal failed: %s", error)
            return
        for lease, answer in zip(due, answers, strict=True):
            if isinstance(answer, StateError):
                log.warning("leases: renewal of %s failed: %s", lease.names.ref.text[:200], answer)
            elif answer[0] == b"ok":
                lease.renewed(sent)
            elif answer[0] != b"uninitialised":  # what becomes of it then is decided by who starts the partition
                self._lose(lease, "is held by somebody else or expired")

    async def close(self) -> None:
        """Stop renewing; what is still held expires by itself."""
        jobs = self._jobs
        self._jobs = []
        for job in jobs:
            await job.stop()
