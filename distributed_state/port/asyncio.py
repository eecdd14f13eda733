"""What the tasks of one event loop ask of the outside. Law: everything here belongs to that loop.

All tasks share one connection: commands of one turn of the loop leave in one write, answers come back in order.

Design: section 16.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import redis.exceptions as driver

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import Words, waited
from distributed_state.port.connections import Connections
from distributed_state.port.errors import BROKEN, translate
from distributed_state.port.pipe import Pipe
from distributed_state.port.pools import Pools
from distributed_state.port.routing import Router
from distributed_state.port.sockets import nothing

T = TypeVar("T")


class AsyncioPort(Router):
    """One shared connection to each server for commands, and one more where they may wait."""

    def __init__(self, connections: Connections, pools: Pools) -> None:
        super().__init__(connections)
        self._pools = pools
        self._pipes: dict[str, Pipe] = {}
        self._apart: dict[str, Pipe] = {}  # where commands may wait
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._connecting: dict[str, asyncio.Lock] = {}
        self._handshakes: dict[str, set[asyncio.Timeout]] = defaultdict(set)
        connections.used(self._gone)

    def leave(self) -> None:
        """Drop all connections, in the thread of the loop."""
        self._closed = True
        self.forget()
        for pipe in (*self._pipes.values(), *self._apart.values()):
            pipe.fail(driver.ConnectionError("closed"))

    def forget(self) -> None:
        """Hear no more of servers that have left; from any thread."""
        self._connections.unused(self._gone)

    def abandon(self) -> None:
        """After fork() nothing of the parent's loop can be used or closed."""
        self._connections.inherited(self._gone)
        self._pipes.clear()
        self._apart.clear()

    def _gone(self, node: str) -> None:
        """A server is no more asked, or is in another life: who waits for its answers is told at once."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._drop, node)

    def _drop(self, node: str) -> None:
        for pipes in (self._pipes, self._apart):
            if pipe := pipes.pop(node, None):
                pipe.fail(driver.ConnectionError("another server has its keys now"))
        if node not in self._topology.nodes():  # in another life, who connects to it goes on
            for scope in self._handshakes.pop(node, ()):
                scope.reschedule(self._loop.time())

    async def look(self) -> None:
        account = waited.present()
        if account is None:
            await self._looking_by(self._connections.look)
            return
        began = time.monotonic()
        left = self._connections.left(account, began, "")
        try:
            async with asyncio.timeout(left):
                await self._looking_by(self._connections.look)
        except TimeoutError as error:
            account.add(began, "")
            raise WarmUnavailable(f"{self._place}: nobody has said yet where keys are") from error
        account.add(began)

    def _late(self) -> None:
        """An answer is late: look whether another server has the keys now, upon which this one is dropped."""
        with suppress(WarmUnavailable):  # closed meanwhile
            self._looking_late = self._looking_by(self._connections.late)

    def _looking_by(self, look: Callable[[], None]) -> asyncio.Future[None]:
        try:
            return self._loop.run_in_executor(self._pools.looks, look)
        except RuntimeError as error:
            raise WarmUnavailable("the store was closed meanwhile") from error

    async def _connected(self, pipes: dict[str, Pipe], node: str) -> Pipe:
        async with self._connecting.setdefault(node, asyncio.Lock()):
            pipe = pipes.get(node)
            if pipe is None or pipe.broken is not None:
                connection, life = await self._connect(node)
                late = self._late if self.several else nothing
                refused = partial(self._refused, node)
                pipe = Pipe(connection, self._connections.timeout, refused, self._topology.doubt, late, life)
                pipes[node] = pipe
                if self._closed:  # meanwhile; nobody would close it
                    pipe.fail(driver.ConnectionError("closed"))
            return pipe

    async def _connect(self, node: str) -> tuple[Any, str]:
        handshakes = self._handshakes[node]
        try:
            async with asyncio.timeout(None) as scope:
                handshakes.add(scope)
                return await self._connections.connect_asyncio(node)
        except TimeoutError as error:
            raise WarmUnavailable(f"{self._place}: another server has the keys of {node} now") from error
        except StateError:
            self._topology.doubt()
            raise
        finally:
            handshakes.discard(scope)

    async def exchange_with(self, node: str, commands: Sequence[Words]) -> list[Any]:
        if not commands:
            return []  # waiting for no answer would never end, and hold up everybody after it
        if self._embedded is not None:
            answers = self._embedded.exchange(commands)
            await asyncio.sleep(0)  # as while a server works, the loop's other tasks get their turn
            return answers
        return await self._exchange_over(self._pipes, node, commands)

    async def exchange_apart(self, node: str, commands: Sequence[Words]) -> list[Any]:
        return await self._exchange_over(self._apart, node, commands)

    async def _exchange_over(self, pipes: dict[str, Pipe], node: str, commands: Sequence[Words]) -> list[Any]:
        account = waited.present()
        began, left = 0.0, None
        if account is not None:
            began = time.monotonic()
            left = self._connections.left(account, began, node)
        pipe = pipes.get(node)
        try:
            if pipe is not None and pipe.broken is None and (left is None or left >= self._timeout):
                answers = await pipe.send(commands)  # which minds that time itself
            else:
                async with asyncio.timeout(left):
                    if pipe is None or pipe.broken is not None:
                        pipe = await self._connected(pipes, node)
                    answers = await pipe.send(commands)
        except (StateError, *BROKEN) as error:
            if account is not None:
                account.add(began, node)
            if isinstance(error, TimeoutError):
                raise WarmUnavailable(f"{self._place}: no answer in time") from error
            if isinstance(error, StateError):
                raise
            raise translate(error, self._place) from error
        if account is not None and account.silent:
            account.silent.discard(node)
        return answers

    async def exchange_with_all(self, groups: dict[str, list[Words]]) -> dict[str, list[Any] | WarmUnavailable]:
        if len(groups) == 1:
            ((node, commands),) = groups.items()
            found = {node: await self._tried(node, commands)}
        else:
            async with asyncio.TaskGroup() as together:
                tasks = {node: together.create_task(self._tried(node, sent)) for node, sent in groups.items()}
            found = {node: task.result() for node, task in tasks.items()}
        answers: dict[str, list[Any] | WarmUnavailable] = {}
        for node, part in found.items():
            if isinstance(part, StateError) and not isinstance(part, WarmUnavailable):
                raise part  # here, as a task of the group's own would raise it inside an ExceptionGroup
            answers[node] = part
        return answers

    async def _tried(self, node: str, commands: Sequence[Words]) -> Any:
        try:
            return await self.exchange_with(node, commands)
        except StateError as error:
            return error


async def complete(work: Awaitable[T]) -> T:
    """Wait for a user's coroutine; a cancellation that is not the caller's own is a RuntimeError."""
    try:
        return await work
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("what it waited for was cancelled") from error


async def shield(work: Awaitable[T], seconds: float) -> T:
    """Wait for it; who is cancelled meanwhile leaves when it is done, or after so long."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait((future,), timeout=seconds)
        raise


class AsyncioGuard:
    """Cancels the task that entered it, and knows its own cancellation from others', as asyncio.timeout does."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._before = self._task.cancelling() if self._task else 0
        self._fired = False

    def interrupt(self) -> None:
        with suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(self._cancel)  # who watches the deadlines may be a thread

    def _cancel(self) -> None:
        if self._task is not None and not self._task.done():
            self._fired = True
            self._task.cancel()

    def leave(self, error: BaseException | None) -> bool:
        task = self._task
        self._task = None  # an interruption that comes from here on is too late
        if not self._fired or task is None:
            return False
        ours = task.uncancel() <= self._before
        return ours and isinstance(error, asyncio.CancelledError)
