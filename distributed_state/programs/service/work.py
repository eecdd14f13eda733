"""Running requests. Law: each is answered in time; one that was abandoned is cleaned up after its answer.

A turn that is cancelled releases its lease, which takes a while if Redis does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from distributed_state.errors import Unavailable

T = TypeVar("T")
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
        """Return the work's result. Raises Unavailable after so many seconds, or when `finish` abandons it."""
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
