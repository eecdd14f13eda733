"""The port of a store, for blocking code and the tasks of any event loop. Law: a call suspends only its own task.

The store's background work runs in threads, so it outlives every loop. A task exchanges with Redis over a connection of
its own loop; tasks and threads can wait for each other's results.

Design: section 16.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from distributed_state.errors import ColdUnavailable, StateError, WarmUnavailable
from distributed_state.port import Guard, Job, Words, background, bodies, waited
from distributed_state.port.asyncio import AsyncioGuard, AsyncioPort, Pools, complete, shield
from distributed_state.port.background import CUT, JOINED, REPLICA, BlockingJob, SharedSignal, finish
from distributed_state.port.blocking import BlockingGuard, BlockingPort
from distributed_state.port.connections import Connections
from distributed_state.port.waited import Waited

T = TypeVar("T")
log = logging.getLogger(__name__)


class SharedPort(BlockingPort):
    """The port of blocking code, with an `AsyncioPort` for each event loop whose tasks call."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
    here = staticmethod(bodies.loop)
    owner = staticmethod(bodies.owner)
    mutex = staticmethod(threading.Lock)
    signal = staticmethod(SharedSignal)

    def __init__(self, connections: Connections, replica: str = "") -> None:
        super().__init__(connections)
        self.replica = replica
        self._pools = Pools()
        self._loops: dict[asyncio.AbstractEventLoop, AsyncioPort] = {}
        self._keepers: dict[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = {}
        self._meeting = threading.Lock()
        self._jobs: weakref.WeakSet[BlockingJob] = weakref.WeakSet()  # a running thread keeps its own job alive
        self._when_ended: list[Callable[[object], None]] = []
        self._cutting: threading.Timer | None = None

    async def open(self) -> None:
        await self.command(b"PING")

    async def close(self) -> None:
        with self._meeting:
            self.closed = True
        self.ask_all()
        for loop, port in list(self._loops.items()):
            port.forget()  # at once, because a loop that is not running closes its connections only when it ends
            if loop is bodies.running() or loop.is_closed():
                self._part(loop)
            else:
                with suppress(RuntimeError):  # it was closed just now
                    loop.call_soon_threadsafe(self._part, loop)
        self.shut()
        if self._cutting is not None:
            self._cutting.cancel()
        ending = self._pools.close()
        await background.join(ending, self._connections.timeout)
        if ending.is_alive():
            log.warning("the store was closed while SQL did not answer")

    def abandon(self) -> None:
        """After fork(): nothing of the parent's can be used or closed."""
        super().abandon()
        self._meeting = threading.Lock()  # perhaps held by a thread that does not exist here
        self._when_ended.clear()  # the parent's callbacks must not be called either
        ports = list(self._loops.values())
        self._loops.clear()
        for port in ports:
            port.abandon()
        for loop in list(self._keepers):
            self._part(loop)  # closed here, so that the parent's loop is not used for it

    # The calling event loops

    def _tasks(self) -> AsyncioPort | None:
        """Return the port of the calling task's loop; None for blocking code."""
        loop = bodies.loop()
        return None if loop is None else self._loops.get(loop) or self._meet(loop)

    def _meet(self, loop: asyncio.AbstractEventLoop) -> AsyncioPort:
        for ended in [each for each in list(self._loops) if each.is_closed()]:
            self._part(ended)  # the loop was closed without shutting down its generators
        with self._meeting:
            if self.closed:
                raise WarmUnavailable(f"{self._place}: the store was closed meanwhile")
            port = self._loops[loop] = AsyncioPort(self._connections, self._pools)
        # A loop that ends closes its generators after its tasks, so tasks can release their locks until then.
        keeper = self._keepers[loop] = self._keep(loop)
        with suppress(StopIteration):
            keeper.asend(None).send(None)
        return port

    async def _keep(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._keepers.pop(loop, None)
            port = self._loops.pop(loop, None)
            if port is not None:
                with suppress(RuntimeError):  # the loop is closed
                    port.leave()
            for call in [] if self.closed else list(self._when_ended):
                call(loop)

    def _part(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the port of a loop, in the loop's thread, unless it is closed."""
        keeper = self._keepers.pop(loop, None)
        if keeper is not None:
            with suppress(StopIteration):
                keeper.aclose().send(None)

    # Work that is done differently for tasks and for blocking code

    @property
    def suspends(self) -> bool:
        return bodies.loop() is not None

    def holds_up(self, here: object) -> bool:
        return here is not None and bodies.held_up() is here

    def loop_of(self, owner: object) -> object:
        return owner.get_loop() if isinstance(owner, asyncio.Task) else None

    def when_a_loop_ends(self, call: Callable[[object], None]) -> None:
        self._when_ended.append(call)

    def exchange_with(self, node: str, commands: Sequence[Words]) -> Coroutine[Any, Any, list[Any]]:
        tasks = self._tasks()
        return super().exchange_with(node, commands) if tasks is None else tasks.exchange_with(node, commands)

    def exchange_apart(self, node: str, commands: Sequence[Words]) -> Coroutine[Any, Any, list[Any]]:
        tasks = self._tasks()
        return super().exchange_apart(node, commands) if tasks is None else tasks.exchange_apart(node, commands)

    def exchange_with_all(
        self, groups: dict[str, list[Words]]
    ) -> Coroutine[Any, Any, dict[str, list[Any] | WarmUnavailable]]:
        tasks = self._tasks()
        return super().exchange_with_all(groups) if tasks is None else tasks.exchange_with_all(groups)

    def look(self) -> Coroutine[Any, Any, None]:
        tasks = self._tasks()
        return super().look() if tasks is None else tasks.look()

    def sleep(self, seconds: float) -> Coroutine[Any, Any, None]:
        return super().sleep(seconds) if bodies.loop() is None else asyncio.sleep(seconds)

    async def sql(self, call: Callable[..., T], *arguments: Any) -> T:
        loop = bodies.loop()
        if loop is None:
            return await super().sql(call, *arguments)
        try:
            found = loop.run_in_executor(self._pools.sql, call, *arguments)
        except RuntimeError as error:
            raise ColdUnavailable("the store was closed meanwhile") from error
        return await found

    async def thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return call(*arguments) if bodies.loop() is None else await self._pools.users.call(partial(call, *arguments))

    def complete(self, work: Awaitable[T]) -> Coroutine[Any, Any, T]:
        return super().complete(work) if bodies.loop() is None else complete(work)

    def shield(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return super().shield(work) if bodies.loop() is None else shield(work, self._connections.timeout)

    def drive(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return self._drive(self._pools.passes, work)

    def drive_start(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return self._drive(self._pools.starts, work)

    async def _drive(self, pool: ThreadPoolExecutor, work: Coroutine[Any, Any, T]) -> T:
        loop = bodies.loop()
        if loop is None:
            return await super().shield(work)
        # Run in a thread, because a caller that waits for it may be blocking code that blocks this loop.
        try:
            found = loop.run_in_executor(pool, copy_context().run, finish, work)
        except RuntimeError as error:
            work.close()
            raise WarmUnavailable("the store was closed meanwhile") from error
        return await shield(found, self._connections.timeout)

    def guard(self) -> Guard:
        return BlockingGuard() if bodies.loop() is None else AsyncioGuard()

    # Work for which any caller may wait

    def spawn(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> Job:
        made = BlockingJob(partial(self._as_replica, job), name)
        with self._meeting:
            self._jobs.add(made)
            late = self.closed
        if late:
            made.ask()  # `ask_all` has already run
        return made

    def ask_all(self) -> None:
        with self._meeting:
            jobs = list(self._jobs)
            if self._cutting is None and self._embedded is None:
                # A job that waits for a server which does not answer cannot notice that it is to end.
                account, now = waited.present(), time.monotonic()
                left = self._limits.total - (account.seconds(now) if account is not None else 0.0)
                # This is before the end of waits for SQL, so that the last commands to Redis are not cut.
                self._cutting = threading.Timer(max(0.0, min(left, CUT)), self._give_up, (account, now))
                self._cutting.daemon = True
                self._cutting.start()
        for job in jobs:
            job.ask()

    def _give_up(self, account: Waited | None, began: float) -> None:
        """Stop waiting for jobs that wait for Redis, and limit the time for the last commands to it."""
        if account is not None:
            account.add(began)
        self.cut(account)

    def spawn_here(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> Job:
        loop = bodies.loop()
        work = partial(self._as_replica, job)
        return BlockingJob(work, name) if loop is None else LoopJob(loop, work, name)

    async def _as_replica(self, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        REPLICA.set(self.replica)  # in this thread or task, which only the job uses
        await job()


class LoopJob:
    """A task of one event loop, which any caller may stop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, job: Callable[[], Coroutine[Any, Any, None]], name: str
    ) -> None:
        self._name = name
        self._loop = loop
        self._ended = SharedSignal()
        self._until = math.inf  # when `stop` stops waiting, after it asked the task to end
        self._task = loop.create_task(self._run(job), name=name)
        self._task.add_done_callback(lambda _: self._ended.set())

    async def _run(self, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await job()
        except StateError as error:
            log.error("%s ended: %s", self._name, error)

    def ask(self) -> None:
        """Cancel the task, once."""
        if self._until == math.inf:
            self._until = time.monotonic() + JOINED
            with suppress(RuntimeError):  # its loop is closed
                self._loop.call_soon_threadsafe(self._task.cancel)

    async def stop(self) -> None:
        """Cancel the task, and wait for its end; not if it waits for the caller, or if its loop does not run."""
        self.ask()
        if bodies.held_up() is self._loop or not self._loop.is_running():
            return
        if bodies.loop() is not self._loop or asyncio.current_task() is not self._task:
            await self._ended.wait(max(0.0, self._until - time.monotonic()))
