"""What takes the event loop long. Law: it is done one after the other, and all else gets its turn in between.

Tasks that are ready together run together: thirty large answers of 40 ms each would keep /healthz waiting for all of
them, and one of them at a time does for 40 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from distributed_state.port import waited
from distributed_state.programs.service import memory

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
            memory.trim()


@asynccontextmanager
async def searching(party: str) -> AsyncIterator[None]:
    """Search inside: a few at a time of each party, so that others find SQL and a thread for it free.

    A request of fifty bytes may have thousands of documents looked at.
    """
    own = _searches.setdefault((id(asyncio.get_running_loop()), party), asyncio.Semaphore(_SEARCHES))
    async with in_line(own):
        yield
