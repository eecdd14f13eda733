"""The port for blocking callers. Law: no await here ever suspends, so a coroutine of the core runs in one step.

Design: section 16.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

import redis.exceptions as driver
from hiredis import pack_command

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import Words, user_coroutines
from distributed_state.port.calls import Calls
from distributed_state.port.connections import Connections
from distributed_state.port.errors import LOST, translate
from distributed_state.port.uninterruptible import UninterruptibleThread

T = TypeVar("T")
log = logging.getLogger(__name__)
_here = threading.local()


def finish(core: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose every await is answered at once; fail loudly if one is not."""
    try:
        core.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]  # StopIteration.value is untyped
    finally:
        core.close()
    raise RuntimeError("the core may await nothing but its port")


def here() -> int:
    """Each event loop has tiers of its own."""
    return 0


class Stopped(BaseException):
    """Ends a background thread at its next sleep, as cancellation ends a task."""


class BlockingPort(Calls):
    """Connections in a stack: a caller takes one, uses it alone, puts it back."""

    monotonic = staticmethod(time.monotonic)
    suspends = False
    wall = staticmethod(time.time)
    several = False

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._free: list[Any] = []
        self._closed = False
        self._place = connections.place
        self._uninterruptible = UninterruptibleThread()

    async def open(self) -> None:
        await self.command(b"PING")

    async def close(self) -> None:
        self._closed = True
        self._uninterruptible.close()
        while self._free:
            self._free.pop().disconnect()

    def abandon(self) -> None:
        """After fork(): drop the parent's sockets. redis-py closes them here without shutting them down."""
        self._free.clear()

    async def exchange(self, commands: Sequence[Words]) -> list[Any]:
        if self._connections.embedded:
            # There the scripts run in this process: an interrupted one would be half a commit.
            return self._uninterruptible.run(self._exchange, commands)
        return self._exchange(commands)

    def _exchange(self, commands: Sequence[Words]) -> list[Any]:
        if not commands:
            return []
        try:
            connection = self._free.pop()
        except IndexError:
            connection = self._connections.blocking()
        answers: list[Any] = []
        try:
            packed = [pack_command(words) for words in commands]
            connection.send_packed_command(packed if len(packed) == 1 else (b"".join(packed),), check_health=False)
            for _ in commands:
                try:
                    answers.append(connection.read_response())
                except driver.ResponseError as error:
                    answers.append(error)
        except (driver.RedisError, *LOST) as error:
            connection.disconnect()
            raise translate(error, self._place) from error
        except BaseException:
            # A half-read connection would give its next user somebody else's answer.
            connection.disconnect()
            raise
        if self._closed:
            connection.disconnect()
        else:
            self._free.append(connection)
        return answers

    async def wire(self, node: str) -> BlockingWire:
        connection = self._connections.blocking()
        try:
            connection.connect()
        except (driver.RedisError, OSError) as error:
            raise translate(error, self._place) from error
        return BlockingWire(connection, self._place)

    async def sleep(self, seconds: float) -> None:
        stop: threading.Event | None = getattr(_here, "stop", None)
        if stop is None:
            time.sleep(seconds)
        elif stop.wait(seconds):
            raise Stopped

    async def sql(self, call: Callable[..., T], *arguments: Any) -> T:
        return self._uninterruptible.run(call, *arguments)

    async def thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return call(*arguments)

    async def complete(self, work: Awaitable[T]) -> T:
        try:
            # A background thread of ours keeps its event loop, which what users open may be bound to.
            return user_coroutines.run(work, lasting=getattr(_here, "stop", None) is not None)
        except asyncio.CancelledError as error:
            raise RuntimeError("what it waited for was cancelled") from error

    def soon(self, call: Callable[[], Any]) -> None:
        call()

    async def shield(self, work: Coroutine[Any, Any, T]) -> T:
        # As a task has it: what is done for the caller knows the caller's context.
        context = copy_context()
        return self._uninterruptible.run(lambda: context.run(finish, work))

    def spawn(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> BlockingJob:
        return BlockingJob(job, name)

    def mutex(self) -> threading.Lock:
        return threading.Lock()

    def signal(self) -> BlockingSignal:
        return BlockingSignal()

    def guard(self) -> BlockingGuard:
        return BlockingGuard()

    def owner(self) -> threading.Thread:
        return threading.current_thread()


class BlockingJob:
    """A daemon thread that runs one coroutine of the core."""

    def __init__(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._job = job
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        _here.stop = self._stop
        try:
            finish(self._job())
        except Stopped:
            log.debug("%s stopped", threading.current_thread().name)
        except StateError as error:
            log.error("%s ended: %s", threading.current_thread().name, error)
        finally:
            user_coroutines.close()

    async def stop(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10)


class BlockingSignal:
    """An event that also ends when its thread is asked to stop.

    Not threading.Event, whose waiting is Python code: Ctrl-C in the middle of it breaks the event for other threads.
    """

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[threading.Lock] = []

    def set(self) -> None:
        self._set = True
        waiters = self._waiters
        self._waiters = []
        for waiter in waiters:
            with suppress(RuntimeError):  # another set() was faster
                waiter.release()

    def clear(self) -> None:
        self._set = False

    async def wait(self, seconds: float | None = None) -> bool:
        stop: threading.Event | None = getattr(_here, "stop", None)
        end = None if seconds is None else time.monotonic() + seconds
        while not self._set:
            if stop is not None and stop.is_set():
                raise Stopped
            # In short steps: a background thread notices its own stop, and nobody depends on being woken.
            left = 0.1 if stop is not None else 1.0
            if end is not None:
                left = min(left, end - time.monotonic())
                if left <= 0:
                    return False
            self._doze(left)
        return True

    def _doze(self, seconds: float) -> None:
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        # Looked at again: set() may have taken the list of waiters before this one was in it.
        if not self._set:
            waiter.acquire(timeout=seconds)
        with suppress(ValueError):
            self._waiters.remove(waiter)


class BlockingWire:
    """A subscription read by one thread and written by any."""

    def __init__(self, connection: Any, place: str) -> None:
        self._connection = connection
        self._place = place
        self._writing = threading.Lock()
        self._closed = False

    def post(self, *words: Any) -> None:
        with self._writing:
            try:
                self._connection.send_packed_command((pack_command(words),), check_health=False)
            except (driver.RedisError, OSError) as error:
                # The reader meets the same broken socket and reports it.
                log.debug("link: %s", error)

    async def receive(self) -> list[Any]:
        stop: threading.Event | None = getattr(_here, "stop", None)
        if self._closed or (stop is not None and stop.is_set()):
            raise WarmUnavailable(f"{self._place}: the link is closed")
        try:
            answer = self._connection.read_response()
        except driver.ResponseError as error:
            return [b"error", f"{error}".encode()]
        except (driver.RedisError, *LOST, AttributeError, ValueError) as error:
            # close() from another thread takes the socket away under the reader: AttributeError or ValueError.
            raise WarmUnavailable(f"{self._place}: link lost: {error}") from error
        return list(answer) if isinstance(answer, (list, tuple)) else [answer]

    def close(self) -> None:
        self._closed = True
        responses = getattr(getattr(self._connection, "_sock", None), "responses", None)
        if responses is not None:  # embedded: nothing but a message wakes its reader
            responses.put([b"closed", b"", b""])
        else:
            self._connection.disconnect()


class BlockingGuard:
    """Threads cannot be interrupted: the holder sees `lease.lost`, and its writes raise Fenced."""

    def interrupt(self) -> None: ...

    def leave(self, error: BaseException | None) -> bool:
        return False
