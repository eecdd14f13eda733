"""Background threads of a store, users' coroutines that blocking code waits for, and signals.

Law: a thread that is asked to end does so in its current or next wait. A background thread keeps one event loop until
it ends, because objects that a user's coroutine opens may be bound to the loop. Threads and tasks of any event loop can
wait for a `SharedSignal`; setting one never blocks. A handler of an operating system signal only notifies, and the
previous handler is restored.

Design: sections 16, 27.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar, cast

from distributed_state.errors import StateError
from distributed_state.port import bodies

T = TypeVar("T")
log = logging.getLogger(__name__)
JOINED = 10.0  # seconds to wait for a job that is asked to end
CUT = 9.5  # seconds after which waits for Redis end; waits for SQL may take longer
REPLICA: ContextVar[str] = ContextVar("distributed_state_replica", default="")
"""The replica of the store that began the present job; "" outside of any."""


_kept = threading.local()


def run_users(work: Awaitable[T], *, lasting: bool) -> T:
    """Run a user's coroutine in the caller's context.

    `lasting`: on the loop that this thread keeps until `close_loop`.
    """

    async def whole() -> T:
        return await work

    context = copy_context()
    if _in_event_loop():
        # That loop is blocked by this call, so it cannot run anything meanwhile.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(context.run, asyncio.run, whole()).result()
    if not lasting:
        return context.run(asyncio.run, whole())
    if getattr(_kept, "runner", None) is None:
        _kept.runner = asyncio.Runner()
    return cast(T, _kept.runner.run(whole(), context=context))


def close_loop() -> None:
    """Close the loop that this thread keeps, if it has one."""
    if getattr(_kept, "runner", None) is not None:
        _kept.runner.close()


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Here(threading.local):
    job: BlockingJob | None = None  # whose thread this is


_here = _Here()


def finish(core: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose every await is answered at once; raise RuntimeError if one is not."""
    loop = bodies.running()
    before = None if loop is None else bodies.hold_up(loop)
    try:
        core.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]  # StopIteration.value is untyped
    finally:
        if loop is not None:
            bodies.hold_up(before)
    core.close()
    raise RuntimeError("core code may await only its port")


class JobStopped(BaseException):
    """Ends a background thread at its next sleep, as cancellation ends a task."""


ENDINGS = (JobStopped, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt)
"""These end a job or the program. Any other error is one of the code that raises it."""


def here() -> bool:
    """Whether the caller runs in a `BlockingJob`'s thread."""
    return _here.job is not None


def end_if_stopped() -> None:
    """Raise JobStopped if this thread is asked to end."""
    if _here.job is not None and _here.job.asked:
        raise JobStopped


async def join(thread: threading.Thread, seconds: float) -> None:
    """Wait for a thread to end; if the caller is a task, its loop continues meanwhile."""
    if bodies.loop() is None:
        thread.join(max(0.0, seconds))
        return
    # asyncio's own thread pool is not used, because the user's work may fill it.
    end = time.monotonic() + seconds
    pause = 0.001
    while thread.is_alive() and time.monotonic() < end:
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.02)


def sleep(seconds: float) -> None:
    """Wait. Raises JobStopped if this thread is asked to end."""
    if _here.job is None:
        time.sleep(seconds)
    elif _here.job.waits(seconds):
        raise JobStopped


def doze(waiter: threading.Lock, seconds: float) -> None:
    """Wait until the lock is released, or until this thread is asked to end."""
    if _here.job is None:
        waiter.acquire(timeout=seconds)
    else:
        _here.job.doze(waiter, seconds)


class BlockingJob:
    """A daemon thread that runs one coroutine of the core."""

    def __init__(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._job = job
        self._end = threading.Event()
        self._dozes: threading.Lock | None = None  # the lock it waits for
        self._until = math.inf  # when `stop` stops waiting, after it asked the thread to end
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        _here.job = self
        try:
            finish(self._job())
        except JobStopped:
            log.debug("%s stopped", threading.current_thread().name)
        except StateError as error:
            log.error("%s ended: %s", threading.current_thread().name, error)
        finally:
            close_loop()

    @property
    def asked(self) -> bool:
        """Whether the job is asked to end."""
        return self._end.is_set()

    def waits(self, seconds: float) -> bool:
        """Wait, in this thread, until it is asked to end; return whether it was."""
        return self._end.wait(seconds)

    def doze(self, waiter: threading.Lock, seconds: float) -> None:
        """Wait, in this thread, for the lock to be released; `ask` releases it too."""
        self._dozes = waiter
        if not self.asked:  # checked after `_dozes` is set: from here on, `ask` wakes it
            waiter.acquire(timeout=seconds)
        self._dozes = None

    def ask(self) -> None:
        """Ask the job to end, and wake it if it waits."""
        self._until = min(self._until, time.monotonic() + JOINED)
        self._end.set()
        waiter = self._dozes
        if waiter is not None:
            with suppress(RuntimeError):  # it was woken just now
                waiter.release()

    async def stop(self) -> None:
        """Ask the job to end, and wait until it has, unless called in its own thread."""
        self.ask()
        if self._thread is not threading.current_thread():
            await join(self._thread, self._until - time.monotonic())


# Signals


HAS_RELOAD = hasattr(signal, "SIGHUP")  # not so on Windows


@contextmanager
def listening(handlers: Mapping[str, Callable[[], Any]]) -> Iterator[bool]:
    """Call these functions for signals, by name, until `with` ends. Yields False outside the main thread."""
    ours = threading.current_thread() is threading.main_thread()
    before: dict[int, Any] = {}
    try:
        for name, call in handlers.items() if ours else ():
            number = getattr(signal, name, None)
            if number is not None:
                before[number] = signal.signal(number, lambda *_, call=call: call())
        yield ours
    finally:
        for number, handler in before.items():
            # None: it was set by C code, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


_LOOK_EVERY = 1.0  # in short steps, so that a lost wake-up only delays


class SharedSignal:
    """An event whose `wait` also ends when its thread is asked to stop.

    Not threading.Event, which waits in Python code: a Ctrl-C during the wait breaks the event for other threads.
    """

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Any] = []  # `release` wakes each of them

    def set(self) -> None:
        """Wake all waiters."""
        self._set = True
        waiters = self._waiters
        self._waiters = []
        for waiter in waiters:
            with suppress(RuntimeError):  # another set() was faster, or the task's loop is closed
                waiter.release()

    def clear(self) -> None:
        """Make later calls of `wait` block again."""
        self._set = False

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until set, at most `seconds`; True if it was set."""
        loop = bodies.loop()
        end = None if seconds is None else time.monotonic() + seconds
        while not self._set:
            end_if_stopped()
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
        # Checked again: set() may have taken the list of waiters before this one was added.
        if not self._set:
            doze(waiter, seconds)
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
    """The waiter of a task, with the `release` of the lock that a thread waits for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.woken: asyncio.Future[None] = loop.create_future()

    def release(self) -> None:
        """Wake the task, from any thread. Raises RuntimeError if its loop is closed."""
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


class Exclusive:
    """A lock for a task of any loop or for blocking code, which may be held for a long time."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._free: SharedSignal | None = None  # set when the present holder is done

    async def take(self, *, unless: bool) -> bool:
        """Take the lock when it is free.

        With `unless`, or where the caller cannot wait, return False if it is not free.
        """
        while True:
            with self._mutex:
                free = self._free
                if free is None:
                    self._free = SharedSignal()
                    return True
            # The holder may wait for a task of the loop that the caller blocks.
            if unless or bodies.held_up() is not None:
                return False
            await free.wait()

    def give_back(self) -> None:
        """Let the next caller take it."""
        free, self._free = self._free, None
        if free is not None:
            free.set()
