"""Requests of which it is not known yet whose they are. Law: so many wait at once, and each for a bounded time.

They are not among the requests that are served: there they would take the places of callers who are known.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from starlette.exceptions import HTTPException

T = TypeVar("T")


class Strangers:
    """Counts those who wait, at most so many."""

    def __init__(self, most: int = 512) -> None:
        self._most = most
        self._waiting = 0

    async def wait(self, found: asyncio.Future[T], seconds: float) -> T:
        """What is found out. Raises TimeoutError, and HTTPException 429 at once if as many wait as may."""
        if self._waiting >= self._most:
            raise HTTPException(429, f"this worker already finds out whose {self._most} requests are")
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(found)
        finally:
            self._waiting -= 1
