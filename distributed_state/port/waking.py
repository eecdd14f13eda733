"""Signals that threads and the tasks of any event loop wait for. Law: who sets one never waits, in any thread.

Design: section 16.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

from distributed_state.port import background, callers

_LOOK_EVERY = 1.0  # in short steps, so that nobody depends on being woken


class SharedSignal:
    """An event that also ends when its thread is asked to stop.

    Not threading.Event, whose waiting is Python code: Ctrl-C in the middle of it breaks the event for other threads.
    """

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Any] = []  # each is woken by its `release`

    def set(self) -> None:
        """Wake all who wait."""
        self._set = True
        waiters = self._waiters
        self._waiters = []
        for waiter in waiters:
            with suppress(RuntimeError):  # another set() was faster, or the task's loop is closed
                waiter.release()

    def clear(self) -> None:
        """Let whoever waits from now on wait."""
        self._set = False

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until set, at most `seconds`; True if it was set."""
        loop = callers.loop()
        end = None if seconds is None else time.monotonic() + seconds
        while not self._set:
            background.end_if_stopped()
            left = _LOOK_EVERY if end is None else min(_LOOK_EVERY, end - time.monotonic())
            if left <= 0:
                return False
            if loop is None:
                self._doze(left)
            else:
                await self._pause(loop, left)
        return True

    def _doze(self, seconds: float) -> None:
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        # Looked at again: set() may have taken the list of waiters before this one was in it.
        if not self._set:
            background.doze(waiter, seconds)
        self._gone(waiter)

    async def _pause(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        waiter = _Task(loop)
        self._waiters.append(waiter)
        try:
            if not self._set:
                async with asyncio.timeout(seconds):
                    await waiter.woken
        except TimeoutError:
            return
        finally:
            self._gone(waiter)

    def _gone(self, waiter: Any) -> None:
        with suppress(ValueError):
            self._waiters.remove(waiter)


class _Task:
    """What a task leaves in place of the lock that a thread waits for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.woken: asyncio.Future[None] = loop.create_future()

    def release(self) -> None:
        """Wake it, from any thread. Raises RuntimeError if its loop is closed."""
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


class Exclusive:
    """Held by one caller at a time, a task of any loop or blocking code, for as long as what it does takes."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._free: SharedSignal | None = None  # set when whoever holds it now is done

    async def take(self, *, unless: bool) -> bool:
        """Hold it, once nobody else does. False if that has to be waited for and must not be: `unless` it is free."""
        while True:
            with self._mutex:
                free = self._free
                if free is None:
                    self._free = SharedSignal()
                    return True
            # Whoever holds it may wait for a task of the loop that the caller holds up.
            if unless or callers.held_up() is not None:
                return False
            await free.wait()

    def give_back(self) -> None:
        """Let the next one have it."""
        free, self._free = self._free, None
        if free is not None:
            free.set()
