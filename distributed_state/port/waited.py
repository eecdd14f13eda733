"""How long one call waits for a Redis that does not answer. Law: the whole call has one limit for all its requests.

The limit is `retry_for`. A call of the public API opens an account here (`bounded`, or `call`), which everything that
it calls uses: the port waits for a reply only for the time that is left, and retries stop when no time is left. Only
time in which Redis did not answer counts. Time in which it answers is credited, second for second, so that a long call
may survive several outages that are each shorter than the limit.

*Earlier, each command had its own limit, which began after a first attempt of `timeout`: a call with several commands
took 20 to 30 s where 10 were promised.*

Time in which a call queues before its request, for example for room in memory, counts as well (`queued`). If a call
ahead of it got no answer from Redis (`unanswered`), it has waited for the same servers.

*Earlier, while Redis did not answer, 200 reads of a service took 20 s and 200 exports 31 s: each call had its own
limit, which began when the call had queued.*

Design: section 5.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from distributed_state.errors import WarmUnavailable

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_ENTRANCES = ("__aenter__", "__aexit__", "__anext__")
_GRACE = 0.25  # seconds for a server that was not asked before others used up the limit
_HARDLY = 0.005  # seconds: too short for any server to answer


class Limits(NamedTuple):
    """How many seconds a call waits for the servers at `place`: in total, and at most for one reply."""

    total: float
    reply: float
    place: str


class Waited:
    """How long one call has waited for Redis without a reply. `silent`: servers that did not answer."""

    __slots__ = ("_seconds", "_until", "over", "silent")

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.over = False  # the call has ended: a task that it started and that outlives it does not belong to it
        self._seconds = 0.0
        self._until = -math.inf

    def seconds(self, now: float) -> float:
        """Return how much of the limit is used up."""
        return max(0.0, self._seconds - max(0.0, now - self._until))

    def left(self, now: float, node: str, limits: Limits) -> float:
        """Return for how many more seconds to wait for this server's reply.

        Raises WarmUnavailable if this call has used up its limit, and this server was silent already.
        """
        left = limits.total - self.seconds(now)
        if left < _HARDLY:
            if node in self.silent:
                raise WarmUnavailable(f"{limits.place}: no answer for {limits.total:g} s")
            left = _GRACE  # one of several servers may be down while the others answer
        return min(left, limits.reply)

    def add(self, since: float, node: str | None = None) -> None:
        """Count the time since then, in which no reply came. Overlapping waits count once."""
        if node is not None:
            self.silent.add(node)
        now = time.monotonic()
        since = max(since, self._until)
        self._seconds = self.seconds(since) + now - since
        self._until = now


_present: ContextVar[Waited | None] = ContextVar("distributed_state_waited", default=None)


def present() -> Waited | None:
    """Return the account of the current call; None outside of any, as in the background."""
    found = _present.get()
    return None if found is None or found.over else found


@contextmanager
def call() -> Iterator[Waited]:
    """Open an account for the code inside, or use that of the surrounding call."""
    found = present()
    if found is not None:
        yield found
        return
    found = Waited()
    try:  # set inside it: an interruption may come right after that
        _present.set(found)
        yield found
    finally:
        # Not reset by a token: an unfinished coroutine that is garbage-collected ends in an arbitrary context.
        found.over = True


class _Unanswered:
    """The last call that Redis did not answer within its limit: when it ended, and which servers were silent."""

    at = -math.inf
    silent: frozenset[str] = frozenset()


def unanswered(account: Waited) -> None:
    """Note that this call ended without an answer: calls that queue after it must not wait as long again."""
    _Unanswered.at, _Unanswered.silent = time.monotonic(), frozenset(account.silent)


@contextmanager
def queued() -> Iterator[None]:
    """Count time in which this call waits for other calls as time that it waits for Redis."""
    began = time.monotonic()
    yield
    account = present()
    if account is not None:
        account.add(began)
        if _Unanswered.at > began:
            account.silent |= _Unanswered.silent


class Room(Protocol):
    """Room in memory for one answer."""

    def take(self, size: int) -> bool:
        """Count this many bytes that were read for it; False if there is no room for them now."""

    async def wait(self, size: int) -> None:
        """Wait until there is room for this many bytes, and take it."""


class _Full(Exception):
    def __init__(self, size: int) -> None:
        self.size = size


_room: ContextVar[Room | None] = ContextVar("distributed_state_room", default=None)
_counted: ContextVar[Room | None] = ContextVar("distributed_state_counted", default=None)  # set inside `with_room`


@contextmanager
def _set(variable: ContextVar[Room | None], room: Room | None) -> Iterator[None]:
    before = variable.get()
    try:
        variable.set(room)
        yield
    finally:
        variable.set(before)


def making_room(room: Room) -> AbstractContextManager[None]:
    """Make reads inside use this room for their answers."""
    return _set(_room, room)


def room(size: int) -> None:
    """Count bytes that were read for an answer. If there is no room for them, the read ends and is repeated later."""
    found = _counted.get()
    if found is not None and not found.take(size):
        raise _Full(size)


async def with_room(read: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `read`, with room for the bytes that it counts.

    If there is no room, the result is dropped, and `read` is called again after a wait.
    """
    found = _room.get()
    while True:
        try:
            with _set(_counted, found):
                return await read()
        except _Full as full:
            size = full.size
        # Outside the `except` block: until it ends, the exception holds everything that was read.
        assert found is not None, "there was no room"
        with queued():
            await found.wait(size)


def bounded(*others: str) -> Callable[[C], C]:
    """Make each public coroutine method of a class one call, except `others`.

    Those are parts of calls, or read once: a read that hot answers should not pay for this, and the part that asks the
    server is a call itself.
    """

    def decorate(kind: C) -> C:
        for name, work in list(vars(kind).items()):
            public = not name.startswith("_") or name in _ENTRANCES
            if public and name not in others and inspect.iscoroutinefunction(work):
                setattr(kind, name, one_call(work))
        return kind

    return decorate


def one_call(work: F) -> F:
    """Let each call of a coroutine function have one limit, as in `call`."""

    @functools.wraps(work)
    async def entered(*arguments: Any, **named: Any) -> Any:
        found = _present.get()
        if found is not None and not found.over:
            return await work(*arguments, **named)
        found = Waited()
        try:  # set inside it: an interruption may come right after that
            _present.set(found)
            return await work(*arguments, **named)
        finally:
            found.over = True

    return cast(F, entered)
