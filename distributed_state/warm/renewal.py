"""Keeps leases alive, all of a replica together. Law: a holder knows of a loss before anybody else can hold its lock.

So the deadlines are watched apart from the renewing, which may hang with the server. Where there are several servers,
each has a renewing job of its own, or one that is silent would cost the leases that the others keep.

Design: sections 8, 20.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

from distributed_state.errors import StateError, WarmUnavailable
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


class _Server(Generic[L]):
    """What one server is to renew next, by holder."""

    def __init__(self, port: Port) -> None:
        self.due: dict[str, L] = {}
        self.handed = port.signal()
        self.job: Job | None = None


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
        self._servers: dict[str, _Server[L]] = {}
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
            due = {
                holder: lease for holder, lease in list(self.held.items()) if not lease.lost and now >= lease.renew_at
            }
            if self._port.several:
                self._hand_out(due, now)
            elif due:
                await self._renew_all(list(due.values()))
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

    def _hand_out(self, due: dict[str, L], now: float) -> None:
        """Give each lease to the job of the server that has its lock now. Waits for none of them."""
        for holder, lease in due.items():
            lease.renew_at = now + lease.ttl / 10
            node = self._server_of(lease)
            with self._mutex:
                server = self._servers.get(node)
                if server is None:
                    server = self._servers[node] = _Server(self._port)
                    server.job = self._port.spawn(partial(self._serve, node, server), "distributed-state-leases-of-one")
                server.due[holder] = lease
            server.handed.set()

    def _server_of(self, lease: L) -> str:
        try:
            return self._port.node_of(lease.names.lock)
        except WarmUnavailable:
            return ""  # nobody has it just now: who asks for it looks again

    async def _serve(self, node: str, server: _Server[L]) -> None:
        """Renew what one server has, until it has had nothing for a while."""
        while True:
            server.handed.clear()  # first: what is handed out from here on ends the wait below
            with self._mutex:
                due, server.due = server.due, {}
            if due:
                await self._renew_all(list(due.values()))
            elif not await server.handed.wait(_IDLE_SECONDS):
                with self._mutex:
                    if not server.due:
                        del self._servers[node]
                        return

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
                about = lease.names.ref.text[:200]
                log.warning("leases: renewal of %s failed: %s", about, answer, extra={"record": about})
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
        # After the one that hands out, so that there is none more.
        servers = list(self._servers.values())
        self._servers = {}
        for server in servers:
            if server.job is not None:
                await server.job.stop()
