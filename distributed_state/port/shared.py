"""The port of a store that blocking code and the tasks of any event loop share. Law: only a caller's own work suspends.

The store's background work runs in threads, so it outlives every loop. A task exchanges with Redis over the connection
of its own loop, as on the asyncio port, and what it wakes or waits for may be another's, in any thread.

Design: section 16.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import Guard, Job, Words, callers
from distributed_state.port.asyncio import AsyncioGuard, AsyncioPort
from distributed_state.port.background import BlockingJob, BlockingSignal
from distributed_state.port.blocking import BlockingGuard, BlockingPort
from distributed_state.port.connections import Connections
from distributed_state.port.pools import Pools

T = TypeVar("T")
log = logging.getLogger(__name__)
_JOINED = 10.0  # seconds to wait for a job that was told to end
_STEP = 1.0  # nobody depends on being woken


def here() -> int:
    """All threads and event loops have the same tiers."""
    return 0


class SharedPort(BlockingPort):
    """The blocking port, and one for each event loop whose tasks call."""

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections)
        self._pools = Pools()
        self._loops: dict[asyncio.AbstractEventLoop, AsyncioPort] = {}
        self._keepers: dict[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = {}
        self._meeting = threading.Lock()

    @property
    def suspends(self) -> bool:
        return callers.loop() is not None

    def here(self) -> object:
        return callers.loop()

    def _tasks(self) -> AsyncioPort | None:
        """The port of the calling task's loop; None for blocking code."""
        loop = callers.loop()
        if loop is None:
            return None
        return self._loops.get(loop) or self._meet(loop)

    def _meet(self, loop: asyncio.AbstractEventLoop) -> AsyncioPort:
        for ended in [each for each in list(self._loops) if each.is_closed()]:
            self._part(ended)  # nobody shut its generators down
        with self._meeting:
            if self._closed:
                raise WarmUnavailable(f"{self._place}: the store was closed meanwhile")
            port = self._loops[loop] = AsyncioPort(self._connections, self._pools)
        # When a loop ends, it closes its generators after all tasks have ended, which may write to the last.
        keeper = self._keepers[loop] = self._keep(loop)
        with suppress(StopIteration):
            keeper.asend(None).send(None)
        return port

    async def _keep(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._part(loop)

    def _part(self, loop: asyncio.AbstractEventLoop) -> None:
        """A loop ends: what belongs to it is closed."""
        port = self._loops.pop(loop, None)
        self._keepers.pop(loop, None)
        if port is not None:
            with suppress(RuntimeError):  # it is closed
                port.leave()

    async def close(self) -> None:
        with self._meeting:
            self._closed = True
        for loop in list(self._loops):
            if loop is callers.running():
                self._part(loop)
            else:
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._part, loop)
        await super().close()
        ending = self._pools.close()
        await _join(ending, self._connections.timeout)
        if ending.is_alive():
            log.warning("closed while SQL did not answer")

    def abandon(self) -> None:
        super().abandon()
        for port in self._loops.values():
            port.abandon()
        self._loops.clear()
        self._keepers.clear()

    # What is done for a caller, as suits it

    def exchange_with(self, node: str, commands: Sequence[Words]) -> Coroutine[Any, Any, list[Any]]:
        tasks = self._tasks()
        return super().exchange_with(node, commands) if tasks is None else tasks.exchange_with(node, commands)

    def _exchange_apart(self, node: str, commands: Sequence[Words]) -> Coroutine[Any, Any, list[Any]]:
        tasks = self._tasks()
        return super()._exchange_apart(node, commands) if tasks is None else tasks._exchange_apart(node, commands)

    def _exchange_with_all(
        self, groups: dict[str, list[Words]]
    ) -> Coroutine[Any, Any, dict[str, list[Any] | WarmUnavailable]]:
        tasks = self._tasks()
        return super()._exchange_with_all(groups) if tasks is None else tasks._exchange_with_all(groups)

    def _look(self) -> Coroutine[Any, Any, None]:
        tasks = self._tasks()
        return super()._look() if tasks is None else tasks._look()

    def sleep(self, seconds: float) -> Coroutine[Any, Any, None]:
        return super().sleep(seconds) if callers.loop() is None else asyncio.sleep(seconds)

    def sql(self, call: Callable[..., T], *arguments: Any) -> Coroutine[Any, Any, T]:
        tasks = self._tasks()
        return super().sql(call, *arguments) if tasks is None else tasks.sql(call, *arguments)

    def thread(self, call: Callable[..., T], *arguments: Any) -> Coroutine[Any, Any, T]:
        tasks = self._tasks()
        return super().thread(call, *arguments) if tasks is None else tasks.thread(call, *arguments)

    def complete(self, work: Awaitable[T]) -> Coroutine[Any, Any, T]:
        tasks = self._tasks()
        return super().complete(work) if tasks is None else tasks.complete(work)

    def shield(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        tasks = self._tasks()
        return super().shield(work) if tasks is None else tasks.shield(work)

    def drive(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        tasks = self._tasks()
        return super().drive(work) if tasks is None else tasks.lend(work)

    def spawn(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> BlockingJob:
        return SharedJob(job, name)

    def spawn_here(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> Job:
        loop = callers.loop()
        return SharedJob(job, name) if loop is None else LoopJob(loop, job, name)

    def signal(self) -> SharedSignal:
        return SharedSignal()

    def guard(self) -> Guard:
        return BlockingGuard() if callers.loop() is None else AsyncioGuard()

    def owner(self) -> Any:
        # A task is its own also where it calls a blocking method.
        loop = callers.running()
        return (None if loop is None else asyncio.current_task(loop)) or super().owner()


class SharedSignal(BlockingSignal):
    """An event for threads and for the tasks of any loop."""

    async def wait(self, seconds: float | None = None) -> bool:
        loop = callers.loop()
        if loop is None:
            return await super().wait(seconds)
        end = None if seconds is None else loop.time() + seconds
        while not self._set:
            left = _STEP if end is None else min(_STEP, end - loop.time())
            if left <= 0:
                return False
            waiter = _TaskWaiter(loop)
            self._waiters.append(waiter)
            try:
                # Looked at again: set() may have taken the list of waiters before this one was in it.
                if not self._set:
                    async with asyncio.timeout(left):
                        await waiter.woken
            except TimeoutError:
                continue
            finally:
                with suppress(ValueError):
                    self._waiters.remove(waiter)
        return True


class _TaskWaiter:
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


class SharedJob(BlockingJob):
    """A thread that a task may wait for."""

    async def stop(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            await _join(self._thread, _JOINED)


class LoopJob:
    """A task of one loop, which any caller may stop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, job: Callable[[], Coroutine[Any, Any, None]], name: str
    ) -> None:
        self._name = name
        self._loop = loop
        self._ended = SharedSignal()
        self._task = loop.create_task(self._run(job), name=name)
        self._task.add_done_callback(lambda _: self._ended.set())

    async def _run(self, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await job()
        except StateError as error:
            log.error("%s ended: %s", self._name, error)

    async def stop(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._task.cancel)
        except RuntimeError:
            return  # its loop is closed
        here = callers.running()
        # Blocking code holds its own loop up, and one that does not run ends nothing.
        waits = callers.loop() is here if here is self._loop else self._loop.is_running()
        if waits and not (here is self._loop and asyncio.current_task() is self._task):
            await self._ended.wait(_JOINED)


async def _join(thread: threading.Thread, seconds: float) -> None:
    if callers.loop() is None:
        thread.join(seconds)
    else:
        await asyncio.to_thread(thread.join, seconds)
