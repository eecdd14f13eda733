"""The port for asyncio callers. Law: everything here belongs to one event loop.

All tasks share one connection: commands of one turn of the loop leave in one write, answers come back in order.

Design: section 16.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import redis.exceptions as driver
from hiredis import pack_command

from distributed_state.errors import ColdUnavailable, StateError, WarmUnavailable
from distributed_state.port import Words
from distributed_state.port.calls import Calls
from distributed_state.port.connections import Connections
from distributed_state.port.errors import translate
from distributed_state.port.pipe import BROKEN, Pipe

T = TypeVar("T")
log = logging.getLogger(__name__)


def here() -> asyncio.AbstractEventLoop:
    """Each event loop has tiers of its own."""
    return asyncio.get_running_loop()


class AsyncioPort(Calls):
    """One shared connection for commands, one more for the link, threads for SQL."""

    monotonic = staticmethod(time.monotonic)
    suspends = True
    wall = staticmethod(time.time)
    several = False

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._place = connections.place
        self._pipe: Pipe | None = None
        self._loop = asyncio.get_running_loop()
        self._connecting = asyncio.Lock()
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="distributed-state-sql")
        self._handlers = ThreadPoolExecutor(max_workers=64, thread_name_prefix="distributed-state-handler")

    async def open(self) -> None:
        await self.command(b"PING")

    async def close(self) -> None:
        if self._pipe is not None:
            await self._pipe.close()
        self._handlers.shutdown(wait=False)
        try:
            async with asyncio.timeout(self._connections.timeout):
                # What a cancelled job asked of SQL still runs, on a connection that must not outlive the archive.
                await asyncio.to_thread(self._threads.shutdown)
        except TimeoutError:
            log.warning("closed while SQL did not answer")

    def abandon(self) -> None:
        """After fork() nothing of the parent's loop can be used or closed."""
        self._pipe = None

    async def _connected(self) -> Pipe:
        async with self._connecting:
            if self._pipe is None or self._pipe.broken is not None:
                self._pipe = Pipe(await self._connect())
            return self._pipe

    async def _connect(self) -> Any:
        connection = self._connections.asyncio()
        try:
            async with asyncio.timeout(self._connections.timeout):
                await connection.connect()
        except (TimeoutError, *BROKEN) as error:
            raise translate(error, self._place) from error
        return connection

    async def exchange(self, commands: Sequence[Words]) -> list[Any]:
        if not commands:
            return []  # waiting for no answer would never end, and hold up everybody after it
        pipe = self._pipe
        if pipe is None or pipe.broken is not None:
            pipe = await self._connected()
        waiting = pipe.send(commands)
        timer = pipe.loop.call_later(self._connections.timeout, pipe.fail_silent, waiting)
        try:
            return await waiting
        except BROKEN as error:
            raise translate(error, self._place) from error
        finally:
            timer.cancel()

    async def wire(self, node: str) -> AsyncioWire:
        return AsyncioWire(await self._connect(), self._place)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def sql(self, call: Callable[..., T], *arguments: Any) -> T:
        try:
            found = asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)
        except RuntimeError as error:
            raise ColdUnavailable("the store was closed meanwhile") from error
        return await found

    async def thread(self, call: Callable[..., T], *arguments: Any) -> T:
        # Not asyncio.to_thread: its few threads are everybody's, and some handlers that hang would hold up all others.
        loop = asyncio.get_running_loop()
        context = copy_context()
        return await loop.run_in_executor(self._handlers, partial(context.run, call, *arguments))

    async def complete(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RuntimeError("what it waited for was cancelled") from error

    def soon(self, call: Callable[[], Any]) -> None:
        self._loop.call_soon_threadsafe(call)

    async def shield(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait((task,), timeout=self._connections.timeout)
            raise

    def spawn(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> AsyncioJob:
        return AsyncioJob(job, name)

    def mutex(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def signal(self) -> AsyncioSignal:
        return AsyncioSignal()

    def guard(self) -> AsyncioGuard:
        return AsyncioGuard()

    def owner(self) -> object:
        return asyncio.current_task()


class AsyncioJob:
    """A task that runs one coroutine of the core."""

    def __init__(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._name = name
        self._task = asyncio.create_task(self._run(job), name=name)

    async def _run(self, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await job()
        except StateError as error:
            log.error("%s ended: %s", self._name, error)

    async def stop(self) -> None:
        self._task.cancel()
        if self._task is not asyncio.current_task():
            await asyncio.gather(self._task, return_exceptions=True)


class AsyncioSignal:
    """An event of one loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.set = self._event.set
        self.clear = self._event.clear

    async def wait(self, seconds: float | None = None) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._event.wait()
        except TimeoutError:
            return False


class AsyncioWire:
    """A subscription of one loop."""

    def __init__(self, connection: Any, place: str) -> None:
        self._connection = connection
        self._place = place
        self._outgoing: list[bytes] = []
        self._sending: asyncio.Task[None] | None = None

    def post(self, *words: Any) -> None:
        self._outgoing.append(pack_command(words))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while self._outgoing:
            parts = self._outgoing
            self._outgoing = []
            try:
                await self._connection.send_packed_command(parts, check_health=False)
            except BROKEN as error:
                # The reader meets the same broken socket and reports it.
                log.debug("link: %s", error)

    async def receive(self) -> list[Any]:
        try:
            answer = await self._connection.read_response()
        except driver.ResponseError as error:
            return [b"error", f"{error}".encode()]
        except (*BROKEN, AttributeError) as error:
            raise WarmUnavailable(f"{self._place}: link lost: {error}") from error
        return list(answer) if isinstance(answer, (list, tuple)) else [answer]

    def close(self) -> None:
        self._closing = asyncio.ensure_future(self._connection.disconnect(nowait=True))


class AsyncioGuard:
    """Cancels the task that entered it, and knows its own cancellation from others', as asyncio.timeout does."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._before = self._task.cancelling() if self._task else 0
        self._fired = False

    def interrupt(self) -> None:
        if self._task is not None and not self._task.done():
            self._fired = True
            self._task.cancel()

    def leave(self, error: BaseException | None) -> bool:
        if not self._fired or self._task is None:
            return False
        ours = self._task.uncancel() <= self._before
        return ours and isinstance(error, asyncio.CancelledError)
