"""What takes the event loop long. Law: it is done one after the other, and all else gets its turn in between.

Tasks that are ready together run together: thirty large answers of 40 ms each would keep /healthz waiting for all of
them, and one of them at a time does for 40 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
_ROUNDS = 10  # of the loop: a new connection is accepted, read and answered in six
_LARGE = 64 * 1024  # from which on reading and writing JSON counts as long
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def in_turn(size: int, work: Callable[[], T]) -> T:
    """Do what takes long if that is `size` bytes of JSON, when nobody else of this event loop does."""
    if size < _LARGE:
        return work()
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        done = work()
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)
        return done
