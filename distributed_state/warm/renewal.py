"""Keeps leases alive, all of a replica together. Law: a holder knows of a loss before anybody else can hold its lock.

So the deadlines are watched apart from the renewing, which may hang with the server. Where there are several servers,
each has a renewing job of its own, or one that is silent would cost the leases that the others keep.

A lease is kept from before it is asked for, and not by this module alone: one that nobody holds any more, because its
holder was interrupted, has ended or was collected, is given back in the next round instead of being renewed.

Design: sections 8, 20.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar
from weakref import ref

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import Call, Job, Port
from distributed_state.values.keys import RecordKeys
from distributed_state.warm.lock import Lock
from distributed_state.warm.scripts import RENEW

log = logging.getLogger(__name__)
_IDLE_SECONDS = 60.0
_SHORTEST = 0.005
_GIVEN_BACK = 2  # times


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
    def granted(self) -> bool:
        """Whether it is to be renewed: the server granted it, and it is neither lost nor being given back."""
        ...

    @property
    def wanted(self) -> bool:
        """Whether anybody holds it, asks for it or gives it back."""
        ...

    def orphaned(self) -> None:
        """Nobody does any more."""
        ...

    def renewed(self, sent: float) -> None:
        """The server renewed it; `sent` is when it was asked, by the monotonic clock."""
        ...


L = TypeVar("L", bound=Renewable)


class Kept(Generic[L]):
    """A lease that is held or asked for under one name. Law: this keeps it alive at the server, not in memory."""

    __slots__ = ("_again_at", "_until", "given_back", "lease", "lock")

    def __init__(self, lease: L, lock: Lock) -> None:
        self.lease = ref(lease)
        self.lock = lock
        self.given_back = 0  # once nobody held it any more: one more than how often
        self._again_at = 0.0
        self._until = math.inf

    @property
    def due_at(self) -> float:
        """When it is to be looked at next."""
        lease = self.lease()
        return self._again_at if lease is None or self.given_back else max(lease.renew_at, self._again_at)

    def wait(self, now: float) -> None:
        """Look at it again soon, unless something comes of what is done with it now."""
        self._again_at = now + self.lock.ttl / 10

    def due_call(self, now: float) -> Call | None:
        """The command to send to its server, if any."""
        lease = self.lease()
        if lease is None or self.given_back or not lease.wanted:
            return self._orphaned(lease, now)
        lease.renew_at = now + lease.ttl / (10 if lease.granted else 3)  # tried again soon if this one fails
        if not lease.granted:
            return None
        return RENEW, [lease.names.lock, lease.names.meta], [lease.lock_value, lease.ttl_ms]

    def _orphaned(self, lease: L | None, now: float) -> Call:
        if not self.given_back:
            about = self.lock.names.ref.text[:200]
            log.warning("lease of %s is given back: nobody holds it any more", about, extra={"record": about})
            if lease is not None:
                lease.orphaned()
            self.given_back = 1
            self._until = now + self.lock.ttl
        self.wait(now)
        return self.lock.leave_call()

    def over(self, now: float) -> bool:
        """Whether it was given back, or has ended by its time. What was sent before may have arrived late: twice."""
        return (self.given_back > _GIVEN_BACK or now > self._until) and not self.lock.asked


class _Server(Generic[L]):
    """The commands that one server is sent next, by holder."""

    def __init__(self, port: Port) -> None:
        self.due: dict[str, Kept[L]] = {}
        self.handed = port.signal()
        self.job: Job | None = None


class Renewal(Generic[L]):
    """The leases that are kept, by their holders' names; `lose(lease, why)` is called for one that cannot be."""

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
        self._held: dict[str, Kept[L]] = {}

    @property
    def leases(self) -> list[L]:
        """Those that are held."""
        found = [kept.lease() for kept in list(self._held.values())]
        return [lease for lease in found if lease is not None and lease.granted]

    def keep(self, lease: L, lock: Lock) -> None:
        """Look after it from now on: it is about to be asked for under the lock's name."""
        self._held[lock.holder] = Kept(lease, lock)
        with self._mutex:
            if not self._jobs:
                self._jobs = [
                    self._port.spawn(self._renew, "distributed-state-leases"),
                    self._port.spawn(self._watch, "distributed-state-deadlines"),
                ]
        if lease.renew_at < self._renews_at:
            self._kept.set()

    def watch(self, lease: L) -> None:
        """It was granted: watch its deadline."""
        if min(lease.deadline, lease.ends) < self._watches_at:
            self._watched.set()

    def drop(self, holder: str) -> bool:
        """Stop renewing a lease. True if it was renewed until now, and not given back because nobody held it."""
        kept = self._held.pop(holder, None)
        return kept is not None and not kept.given_back

    async def _renew(self) -> None:
        while True:
            self._kept.clear()  # first: a lease kept from here on ends the wait below
            self._renews_at = math.inf
            await self._round()  # no variable of this one may keep a lease while it sleeps
            now = self._port.monotonic()
            first = min((kept.due_at for kept in list(self._held.values())), default=now + _IDLE_SECONDS)
            self._renews_at = max(first, now + _SHORTEST)
            await self._kept.wait(self._renews_at - now)

    async def _round(self) -> None:
        now = self._port.monotonic()
        for holder in [holder for holder, kept in list(self._held.items()) if kept.over(now)]:
            self._held.pop(holder, None)
        due = {holder: kept for holder, kept in list(self._held.items()) if now >= kept.due_at}
        if self._port.several:
            self._hand_out(due, now)
        elif due:
            await self._renew_all(list(due.values()))

    async def _watch(self) -> None:
        while True:
            self._watched.clear()
            self._watches_at = math.inf
            now = self._port.monotonic()
            self._watches_at = max(min(self._ends(now), default=now + _IDLE_SECONDS), now + _SHORTEST)
            await self._watched.wait(self._watches_at - now)

    def _ends(self, now: float) -> list[float]:
        """When leases end unless they are renewed; those of which it is over are lost."""
        ends = []
        for lease in self.leases:
            if now >= lease.deadline:
                self._lose(lease, "could not be renewed in time")
            elif now >= lease.ends:
                self._lose(lease, "was held for as long as it may be")
            else:
                ends.append(min(lease.deadline, lease.ends))
        return ends

    def _hand_out(self, due: dict[str, Kept[L]], now: float) -> None:
        """Give each lease to the job of the server that has its lock now. Waits for none of them."""
        for holder, kept in due.items():
            kept.wait(now)
            node = self._server_of(kept)
            with self._mutex:
                server = self._servers.get(node)
                if server is None:
                    server = self._servers[node] = _Server(self._port)
                    server.job = self._port.spawn(partial(self._serve, node, server), "distributed-state-leases-of-one")
                server.due[holder] = kept
            server.handed.set()

    def _server_of(self, kept: Kept[L]) -> str:
        try:
            return self._port.node_of(kept.lock.names.lock)
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

    async def _renew_all(self, due: list[Kept[L]]) -> None:
        sent = self._port.monotonic()
        asked = {kept: call for kept in due if (call := kept.due_call(sent)) is not None}
        try:
            answers = await self._port.scripts(list(asked.values())) if asked else []
        except StateError as error:
            log.warning("leases: renewal failed: %s", error)
            return
        for kept, answer in zip(asked, answers, strict=True):
            if isinstance(answer, StateError):
                about = kept.lock.names.ref.text[:200]
                log.warning("leases: renewal of %s failed: %s", about, answer, extra={"record": about})
            elif kept.given_back:
                kept.given_back += 1
            else:
                self._renewed(kept.lease(), answer[0], sent)

    def _renewed(self, lease: L | None, answer: bytes, sent: float) -> None:
        if lease is None:
            return  # it was collected meanwhile, and is given back in the next round
        if answer == b"ok":
            lease.renewed(sent)
        elif answer != b"uninitialised" and lease.granted:
            # In a partition that is not initialised, recovery decides what becomes of the lease. A lease that is being
            # given back is not lost: the server may have taken it back before it got this renewal.
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
