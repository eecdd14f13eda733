"""All connections of a worker. Law: there is room for one more client, whatever those do that are here.

Beyond a limit the connection that waits for its client longest is closed: who sends and reads in time waits for
a moment only, and is never the oldest. Those whose client was answered before go after all others.

Design: section 24.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from typing import Protocol

from distributed_state.programs.service import memory
from distributed_state.programs.service.budget import Budget, Taken
from distributed_state.programs.service.limits import Limits

log = logging.getLogger(__name__)
CONNECTION = "connection"  # in the state of a request: the one it came by, which ASGI itself cannot abort
_OTHERS = 256  # descriptors for Redis, SQL, logs, and what the interpreter opens
_CROWD = 500  # connections whose memory is given back once they are gone
BACKLOG = 1024  # connections that wait to be accepted; the loop may accept all of them before it tells us of the first


class Connection(Protocol):
    """What this needs to know of a connection."""

    @property
    def address(self) -> str:
        """Its client's."""
        ...

    @property
    def held(self) -> int:
        """Bytes of its request and of its unread answer."""
        ...

    def look(self, now: float) -> None:
        """Disconnect its client if that took too long."""
        ...

    def hold(self, size: int) -> None:
        """Count bytes that are kept for its request. Disconnects its client if there is no room for them."""
        ...

    def pay(self, taken: Taken) -> None:
        """Have what was taken for the answer that comes count for its bytes, until the client has read them."""
        ...

    def answered(self, taken: Taken) -> None:
        """The answer is written, or there is none: give back what was taken for it once it is read."""
        ...

    def end(self, status: int, why: str) -> None:
        """Disconnect its client, with this answer if it waits for one."""
        ...

    def abort(self) -> None:
        """Disconnect its client, whatever it has not read yet."""
        ...


class Connections:
    """Counts connections and the bytes that they hold; one for each worker."""

    def __init__(self, limits: Limits, budget: Budget | None = None) -> None:
        self.limits = limits
        self.most = room(limits.connections)
        self.budget = budget or Budget(limits.in_flight)
        self.evicted = 0
        self._gone = 0
        self._all: set[Connection] = set()
        self._addresses: Counter[str] = Counter()
        # Those that wait for their client, the longest first: of clients that were never answered, and of others.
        self._strangers: dict[Connection, None] = {}
        self._known: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def in_flight(self) -> int:
        """Bytes of requests and answers that are held."""
        return self.budget.held

    # Connections

    def enter(self, connection: Connection) -> str:
        """Why this connection cannot be served, "" if it can be. It leaves by `leave` in any case."""
        self._all.add(connection)
        self._addresses[connection.address] += 1
        most = self.limits.per_address
        if most and self._addresses[connection.address] > most:
            return f"this worker has {most} connections of your address"
        if len(self._all) > self.most and not self._evict_one(connection, "the worker needs its connection"):
            return f"this worker has {self.most} connections"
        return ""

    def leave(self, connection: Connection) -> None:
        """It is closed."""
        if connection in self._all:
            self._all.discard(connection)
            self._gone += 1
            self.goes_on(connection)
            self._addresses[connection.address] -= 1
            if not self._addresses[connection.address]:
                del self._addresses[connection.address]

    def waits(self, connection: Connection, *, known: bool) -> None:
        """From now on it waits for its client, of whom a request was answered before if it is `known`."""
        self.goes_on(connection)
        if connection in self._all:
            (self._known if known else self._strangers)[connection] = None

    def goes_on(self, connection: Connection) -> None:
        """It waits for its client no more."""
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)

    def _evict_one(self, but: Connection, why: str) -> bool:
        for waiting in (self._strangers, self._known):
            for each in waiting:
                if each is not but:
                    self._evict(each, why)
                    return True
        return False

    def _evict(self, connection: Connection, why: str) -> None:
        self.evicted += 1
        self.leave(connection)
        connection.end(503, why)

    # Bytes

    def hold(self, connection: Connection, size: int) -> bool:
        """Count `size` bytes more that this connection holds; False: there is no room for them.

        Those that wait for their clients make room, the longest first, and this one not before them.
        """
        if self.budget.arrive(size):
            return True
        for waiting in (self._strangers, self._known):
            for each in [each for each in waiting if each.held and each is not connection]:
                self._evict(each, "the worker needs the memory")
                if self.budget.has_room:
                    return True
        return False

    def drop(self, size: int) -> None:
        """So many bytes are held no more."""
        self.budget.leave(size)

    # Time

    async def watch(self) -> None:
        """Look at all connections again and again, and give the memory of crowds of them back."""
        limits = self.limits
        pause = min(1.0, min(limits.head, limits.arriving, limits.leaving) / 4)
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(pause)
            now = loop.time()
            for each in list(self._all):
                each.look(now)
            if self.evicted:
                log.warning("disconnected %d clients that were waited for, to make room", self.evicted)
                self.evicted = 0
            if self._gone >= _CROWD:
                memory.trim()
                self._gone = 0


def room(wanted: int) -> int:
    """How many connections there can be, at most `wanted`, by the descriptors that this process may open.

    The soft limit of those is raised, as far as it may be, to what is wanted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = wanted + BACKLOG + _OTHERS
    if soft < need:
        soft = min(need, hard) if hard != resource.RLIM_INFINITY else need
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft - min(_OTHERS, soft // 4) - min(BACKLOG, soft // 4)))
