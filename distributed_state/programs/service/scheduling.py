"""How requests share the event loop. Law: each is answered in time, and what takes the loop long is done one by one.

Tasks that are ready together run together: thirty large answers of 40 ms each would keep /healthz waiting for all of
them, and one of them at a time does for 40 ms. A request that was abandoned is cleaned up after its answer: a turn that
is cancelled releases its lease, which takes a while if Redis does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from distributed_state.errors import Unavailable
from distributed_state.port import waited
from distributed_state.programs.service import budget

T = TypeVar("T")
_ROUNDS = 10  # of the loop: a new connection is accepted, read and answered in six
_LARGE = 64 * 1024  # from which on reading and writing JSON counts as long
_COPIES = 2  # at once, of whole records
_SEARCHES = 2  # at once, of one party
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
_copying: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
# Kept by those who hold one or wait for it.
_copies: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()
_searches: WeakValueDictionary[tuple[int, str], asyncio.Semaphore] = WeakValueDictionary()
_CLEANING_UP = 2.0


class Work:
    """The requests that are running, and those that are being cleaned up."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: set[asyncio.Future[None]] = set()
        self._end: float | None = None  # when all of it has to be over

    def __len__(self) -> int:
        return len(self._waiting)

    async def within(self, seconds: float, work: Coroutine[Any, Any, T]) -> T:
        """Return the work's result. Raises Unavailable after `seconds`, or when `finish` abandons it."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)
        over = loop.create_future()
        self._tasks.add(task)
        self._waiting.add(over)
        task.add_done_callback(partial(self._done, over))
        end = loop.time() + seconds
        timer = loop.call_at(end if self._end is None else min(end, self._end), _settle, over)
        try:
            await over
        finally:
            timer.cancel()
            self._waiting.discard(over)
            if not task.done():
                task.cancel()
        if not task.done():
            raise Unavailable(
                f"abandoned after {seconds:g} s or as the worker stops; a turn with a request_id may be repeated"
            )
        try:
            return task.result()
        finally:
            # What it raised leads to this frame, and all that its request had would wait for the garbage collector.
            del task

    def _done(self, over: asyncio.Future[None], task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        _settle(over)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the client may have been answered before

    async def finish(self, seconds: float) -> None:
        """Wait for what is running, and what begins meanwhile, at most so long; then abandon it."""
        self._end = asyncio.get_running_loop().time() + seconds
        await self._ended(seconds)
        for over in list(self._waiting):
            _settle(over)
        await self._ended(_CLEANING_UP)

    async def _ended(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        # Again for those that began meanwhile: they would be abandoned with all of their time left.
        while self._tasks and (left := end - loop.time()) > 0:
            await asyncio.wait(self._tasks, timeout=left)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def in_turn(size: int, work: Callable[[], T]) -> T:
    """Do what takes long if that is `size` bytes of JSON, when nobody else of this event loop does."""
    if size < _LARGE:
        return work()
    async with turn():
        return work()


@asynccontextmanager
async def turn() -> AsyncIterator[None]:
    """Do what takes long inside, when nobody else of this event loop does."""
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        yield
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)


@asynccontextmanager
async def in_line(*places: AbstractAsyncContextManager[Any]) -> AsyncIterator[None]:
    """Have all of these inside. To wait for them is part of what the request waits for Redis."""
    async with AsyncExitStack() as stack:
        with waited.queued():
            for each in places:
                await stack.enter_async_context(each)
        yield


@asynccontextmanager
async def copying(party: str) -> AsyncIterator[None]:
    """Copy a whole record inside: a few at a time, and one of each party, which holds up itself alone.

    A request of ten bytes reads and writes as much as the record has.
    """
    loop = asyncio.get_running_loop()
    own = _copies.setdefault((id(loop), party), asyncio.Lock())
    async with in_line(own, _copying.setdefault(loop, asyncio.Semaphore(_COPIES))):
        try:
            yield
        finally:
            budget.trim_memory()


@asynccontextmanager
async def searching(party: str) -> AsyncIterator[None]:
    """Search inside: a few at a time of each party, so that others find SQL and a thread for it free.

    A request of fifty bytes may have thousands of documents looked at.
    """
    own = _searches.setdefault((id(asyncio.get_running_loop()), party), asyncio.Semaphore(_SEARCHES))
    async with in_line(own):
        yield
