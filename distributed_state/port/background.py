"""Threads of a store that work in the background, and users' coroutines that blocking code waits for.

Law: a thread that is asked to end does so in its current wait or at the next one. A background thread keeps one event
loop to its end, because what a user's coroutine opens may be bound to it.

Design: section 16.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar, cast

from distributed_state.errors import StateError
from distributed_state.port import callers

_kept = threading.local()


def run_users(work: Awaitable[T], *, lasting: bool) -> T:
    """Wait for it in the caller's context. `lasting`: on the loop that this thread keeps until `close`."""

    async def whole() -> T:
        return await work

    context = copy_context()
    if _in_event_loop():
        # That loop waits for us, so it cannot run anything meanwhile.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(context.run, asyncio.run, whole()).result()
    if not lasting:
        return context.run(asyncio.run, whole())
    if getattr(_kept, "runner", None) is None:
        _kept.runner = asyncio.Runner()
    return cast(T, _kept.runner.run(whole(), context=context))


def close_loop() -> None:
    """End the loop that this thread keeps, if it has one."""
    if getattr(_kept, "runner", None) is not None:
        _kept.runner.close()


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


T = TypeVar("T")
log = logging.getLogger(__name__)
JOINED = 10.0  # seconds to wait for a job that is asked to end
CUT = 9.5  # seconds after which one waits for Redis no longer: before the others, which wait for SQL, are given up


class _Here(threading.local):
    job: BlockingJob | None = None  # whose thread this is


_here = _Here()


def finish(core: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose every await is answered at once; fail loudly if one is not."""
    loop = callers.running()
    before = None if loop is None else callers.hold_up(loop)
    try:
        core.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]  # StopIteration.value is untyped
    finally:
        if loop is not None:
            callers.hold_up(before)
    core.close()
    raise RuntimeError("the core may await nothing but its port")


class Stopped(BaseException):
    """Ends a background thread at its next sleep, as cancellation ends a task."""


def here() -> bool:
    """Whether this is such a thread."""
    return _here.job is not None


def end_if_stopped() -> None:
    """Raise Stopped in a thread that is asked to end."""
    if _here.job is not None and _here.job.asked:
        raise Stopped


async def join(thread: threading.Thread, seconds: float) -> None:
    """Wait for a thread to end; a task's loop goes on meanwhile."""
    if callers.loop() is None:
        thread.join(max(0.0, seconds))
        return
    # Not in a thread of asyncio's own pool, which the user's work may fill.
    end = time.monotonic() + seconds
    pause = 0.001
    while thread.is_alive() and time.monotonic() < end:
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.02)


def sleep(seconds: float) -> None:
    """Wait. Raises Stopped in a thread that is asked to end."""
    if _here.job is None:
        time.sleep(seconds)
    elif _here.job.waits(seconds):
        raise Stopped


def doze(waiter: threading.Lock, seconds: float) -> None:
    """Wait until the lock is released, or this is a thread that is asked to end."""
    if _here.job is None:
        waiter.acquire(timeout=seconds)
    else:
        _here.job.doze(waiter, seconds)


class BlockingJob:
    """A daemon thread that runs one coroutine of the core."""

    def __init__(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._job = job
        self._end = threading.Event()
        self._dozes: threading.Lock | None = None  # what it waits for
        self._until = math.inf  # it is waited for, once it was asked to end
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        _here.job = self
        try:
            finish(self._job())
        except Stopped:
            log.debug("%s stopped", threading.current_thread().name)
        except StateError as error:
            log.error("%s ended: %s", threading.current_thread().name, error)
        finally:
            close_loop()

    @property
    def asked(self) -> bool:
        """Whether it is asked to end."""
        return self._end.is_set()

    def waits(self, seconds: float) -> bool:
        """Wait, in this thread, at most until it is asked to end; whether it was."""
        return self._end.wait(seconds)

    def doze(self, waiter: threading.Lock, seconds: float) -> None:
        """Wait, in this thread, for the lock to be released; `ask` does so as well."""
        self._dozes = waiter
        if not self.asked:  # looked at only now: from here on it is woken
            waiter.acquire(timeout=seconds)
        self._dozes = None

    def ask(self) -> None:
        """Ask it to end, and wake it if it waits."""
        self._until = min(self._until, time.monotonic() + JOINED)
        self._end.set()
        waiter = self._dozes
        if waiter is not None:
            with suppress(RuntimeError):  # it was woken just now
                waiter.release()

    async def stop(self) -> None:
        """Ask it to end, and wait for that unless it is the caller."""
        self.ask()
        if self._thread is not threading.current_thread():
            await join(self._thread, self._until - time.monotonic())
