"""Requests under way. Law: each is answered in time; what one that was given up leaves is tidied up behind its answer.

A turn that is cancelled gives its lease back, which takes a while where Redis does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from distributed_state.errors import Unavailable

T = TypeVar("T")
_TIDYING = 2.0


class Work:
    """The requests that are running, and those that are tidied up."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    async def within(self, seconds: float, work: Coroutine[Any, Any, T]) -> T:
        """What the work comes to. Raises Unavailable after so many seconds, or when `finish` gives it up."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)
        over = loop.create_future()
        self._tasks.add(task)
        self._waiting.add(over)
        task.add_done_callback(lambda _: self._done(task, over))
        timer = loop.call_later(seconds, _settle, over)
        try:
            await over
        finally:
            timer.cancel()
            self._waiting.discard(over)
            if not task.done():
                task.cancel()
        if not task.done():
            raise Unavailable(
                f"given up after {seconds:g} s or as the worker ends; a turn with a request_id may be repeated"
            )
        return task.result()

    def _done(self, task: asyncio.Task[Any], over: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        _settle(over)
        if not task.cancelled():
            task.exception()  # marked as seen: who asked may have been answered before

    async def finish(self, seconds: float) -> None:
        """Wait for what is running, at most so long; then give it up."""
        await self._ended(seconds)
        for over in list(self._waiting):
            _settle(over)
        await self._ended(_TIDYING)

    async def _ended(self, seconds: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
