"""A lock on a record of a service. Law: what is written inside `with` carries the lease, and nothing else does.

The service keeps nothing of it but the lock. It is renewed in the background for as long as somebody holds it: the
`with` that entered it, or by hand whoever keeps the object, and no longer than that task or thread lives. A lease that
has ended is noticed by the next write under it, which raises Fenced.

Design: section 26.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self
from weakref import ref

from distributed_state.errors import Locked, LockTimeout, StateError, Unavailable
from distributed_state.port import callers
from distributed_state.port.bodies import Body, leaving
from distributed_state.remote.requests import Requests

# What the running task, or this thread, holds: by service and path of the record. Tasks begun inside inherit it.
# Weakly: a lease that its holder let go of is not kept by the context that took it.
_Found = Callable[[], "AsyncRemoteLease | None"]
_held: ContextVar[Mapping[tuple[int, str], _Found]] = ContextVar("distributed_state_remote_leases")
_ONCE = 5.0  # seconds of waiting in one request: less than a worker lets anybody wait
HEADER = "Lease"


def carried(requests: Requests, path: str) -> dict[str, str]:
    """The header for a write of this record: the lease that is held here, if there is one."""
    lease = _holder(requests, path)
    return {} if lease is None or not lease.lease else {HEADER: lease.lease}


def _holder(requests: Requests, path: str) -> AsyncRemoteLease | None:
    """The lease of a record that is held here; not one whose body is over, which was interrupted before its release."""
    found = _held.get({}).get((id(requests), path))
    lease = found() if found is not None else None
    return lease if lease is not None and lease.body.there else None


def _others(mine: AsyncRemoteLease) -> dict[tuple[int, str], _Found]:
    """The other leases held in this context, without interrupted ones, which would otherwise stay in it for good."""
    found = ((name, each, each()) for name, each in _held.get({}).items())
    return {name: each for name, each, lease in found if lease not in (None, mine) and lease.body.there}


async def _give_back(requests: Requests, path: str, lease: str) -> None:
    # A lease that cannot be given back ends with its ttl. An error here would replace that of the body.
    with suppress(StateError):
        await requests.order("DELETE", path + "/lease", headers={HEADER: lease}, repeatable=True)


class AsyncRemoteLease:
    """A record held alone, from `record.lock()`.

    Example::

        async with record.lock(wait=5.0) as lease:
            await record.set("seat", "12A")
    """

    def __init__(self, requests: Requests, path: str, *, wait: float, ttl: float) -> None:
        self._requests = requests
        self._path = path
        self._wait = wait
        self._ttl = ttl
        self._stop: Callable[[], None] | None = None
        self._outer: AsyncRemoteLease | None = None
        self.lease = ""
        self.owner: object = None
        self.body = Body()
        self._token = 0
        self._lost = self._released = False

    @property
    def token(self) -> int:
        """The fencing token, greater for every later holder."""
        return self._token

    @property
    def lost(self) -> bool:
        """Whether it is known to have ended; writes under it raise Fenced."""
        return self._lost or (self._outer is not None and self._outer.lost)

    async def renew(self) -> bool:
        """Hold it for another `ttl` seconds; False if it has ended. It is done in the background, too."""
        try:
            await self._requests.order(
                "PUT", self._path + "/lease", {"ttl": self._ttl}, headers={HEADER: self.lease}, repeatable=True
            )
        except Unavailable:
            return True  # nothing is known: the next time, or the next write, tells
        except StateError:
            self._lost = True
            return False
        return True

    async def acquire(self) -> Self:
        """Hold the record, or raise LockTimeout after `wait` seconds. Held already by this task: nests."""
        outer = _holder(self._requests, self._path)
        # A task started inside the body writes under the lease, but locks like anybody else.
        nests = outer is not None and outer.owner == callers.owner()
        self._outer = outer if nests else None
        if self._outer is not None:
            if self._outer is self:
                raise Locked("held by this task already, by this very lease")
            self.lease, self._token = self._outer.lease, self._outer.token
            return self
        self.body.begin()
        try:
            found = await self._taken()
            self._lost = self._released = False
            self.lease = found["lease"]
            self._token = found["token"]
            self.owner = callers.owner()
            self._stop = self._requests.http.every(self._ttl / 3, self._renewing())
            _held.set({**_others(self), (id(self._requests), self._path): ref(self)})
        except BaseException:
            self.body.leave()  # also one that was taken by hand: its caller does not have it
            raise
        return self

    def wanted(self) -> bool:
        """Whether anybody holds it; it is lost otherwise, unless it was released."""
        if self._released:
            return False
        if not self.body.held_by(self.owner):
            self._lost = True
        return not self._lost

    def _renewing(self) -> Callable[[], Coroutine[Any, Any, bool]]:
        """The work in the background, which does not keep the lease alive; it returns False once renewal may end."""
        me, held = ref(self), (self._requests, self._path, self.lease)

        async def renew() -> bool:
            lease = me()
            if lease is not None and lease.wanted():
                return await lease.renew()
            await _give_back(*held)
            return False

        return renew

    async def _taken(self) -> Any:
        clock = self._requests.http.monotonic
        end = clock() + self._wait
        while True:
            wait = max(0.0, min(_ONCE, end - clock()))
            try:
                body = {"wait": wait, "ttl": self._ttl}
                return await self._requests.order("POST", self._path + "/lease", body, patience=wait)
            except Locked as error:
                if clock() >= end:
                    raise LockTimeout(f"{error}; waited {self._wait:g} s") from error

    async def release(self) -> None:
        """Give the record back. Harmless when the lease was lost: only its own holder can release it."""
        if self._stop is None:  # it nests, or is not held
            return
        self._released = True
        stop, self._stop = self._stop, None
        self.owner = None  # a task whose error leads back to here would wait for the garbage collector
        _held.set(_others(self))
        await _give_back(self._requests, self._path, self.lease)
        stop()  # last: if this is interrupted, the work in the background gives it back

    async def __aenter__(self) -> Self:
        return await self.acquire()

    @leaving("body")
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()
