"""What takes the event loop long. Law: it is done one after the other, and all else gets its turn in between.

Tasks that are ready together run together: thirty large answers of 40 ms each would keep /healthz waiting for all of
them, and one of them at a time does for 40 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from distributed_state.programs.service import memory

T = TypeVar("T")
_ROUNDS = 10  # of the loop: a new connection is accepted, read and answered in six
_LARGE = 64 * 1024  # from which on reading and writing JSON counts as long
_COPIES = 2  # at once, of whole records
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


_copying: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
_of_tenants: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()


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
async def copying(tenant: str) -> AsyncIterator[None]:
    """Copy a whole record inside: a few at a time, and one of each tenant ("" is none), which holds up itself alone.

    A request of ten bytes reads and writes as much as the record has.
    """
    loop = asyncio.get_running_loop()
    own: AbstractAsyncContextManager[None] = nullcontext()
    if tenant:
        # Kept by those who hold it or wait for it.
        own = _of_tenants.setdefault((id(loop), tenant), asyncio.Lock())
    async with own, _copying.setdefault(loop, asyncio.Semaphore(_COPIES)):
        try:
            yield
        finally:
            memory.trim()
