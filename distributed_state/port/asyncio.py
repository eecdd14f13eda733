"""The port of tasks in an event loop: shared connections, and threads for blocking work. Law: it belongs to one loop.

All tasks share one connection to a server (`Pipe`): the commands of one turn of the loop are sent in one write, and
replies come back in the order of the commands. The reply of a cancelled caller is still read. If a reply does not come
in time, the connection is closed, because later replies could be mistaken for it.

Blocking work runs in threads of the store (`Pools`), never in asyncio's default pool, which a user's work may fill.

Design: sections 16, 19.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import redis.exceptions as driver

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import Words, waited
from distributed_state.port.commands import BROKEN, Packer, ReplyError, translate
from distributed_state.port.connections import Connections
from distributed_state.port.routing import Router
from distributed_state.port.sockets import LATE, nothing, reader


class UsersThreads:
    """Threads for functions of the user, which may never return.

    They are daemons: Python waits for the threads of a ThreadPoolExecutor before it ends a process.
    """

    def __init__(self) -> None:
        self._free: list[SimpleQueue[Callable[[], None]]] = []  # the queue of each thread that waits for a call
        self._closed = False

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function in a thread, in the caller's context."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = copy_context()

        def end(result: Any, error: BaseException | None) -> None:
            if not ended.done():  # else the caller was cancelled
                ended.set_result((result, error))

        def run() -> None:
            result, error = None, None
            try:
                result = context.run(function)
            except BaseException as raised:  # noqa: BLE001 - it is raised where the call was made
                error = raised
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end, result, error)

        try:
            queue = self._free.pop()
        except IndexError:
            queue = SimpleQueue()
            threading.Thread(target=self._serve, args=(queue,), name="distributed-state-handler", daemon=True).start()
        queue.put(run)
        result, error = await ended
        if error is not None:
            raise error
        return cast(T, result)

    def _serve(self, queue: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            try:
                queue.get(timeout=_IDLE_SECONDS)()
            except Empty:
                pass
            else:
                self._free.append(queue)
                if not self._closed:
                    continue
            try:
                self._free.remove(queue)
            except ValueError:
                continue  # a call is on its way
            return

    def close(self) -> None:
        """End the threads that wait for a call, and others after theirs."""
        self._closed = True
        with suppress(IndexError):  # another thread takes from it, too
            while True:
                self._free.pop().put(_nothing)


def _nothing() -> None:
    """Wakes a thread."""


class Pools:
    """A thread pool for each kind of work, so that one kind that blocks does not delay the others."""

    def __init__(self) -> None:
        self.sql = ThreadPoolExecutor(max_workers=4, thread_name_prefix="distributed-state-sql")
        self.users = UsersThreads()
        self.looks = ThreadPoolExecutor(max_workers=1, thread_name_prefix="distributed-state-look")
        # All threads that use SQL together are fewer than its connections; the background needs some of them.
        self.passes = ThreadPoolExecutor(max_workers=4, thread_name_prefix="distributed-state-pass")
        self.starts = ThreadPoolExecutor(max_workers=4, thread_name_prefix="distributed-state-start")

    def close(self) -> threading.Thread:
        """Accept no further work.

        The returned thread ends when all SQL work has ended: the archive must not be closed before.
        """
        self.users.close()
        self.looks.shutdown(wait=False)
        ending = threading.Thread(target=self._end, name="distributed-state-closing", daemon=True)
        ending.start()
        return ending

    def _end(self) -> None:
        self.passes.shutdown()
        self.starts.shutdown()
        self.sql.shutdown()


_IDLE_SECONDS = 10.0  # after which a thread for the user's functions ends
_STOOD_STILL = 0.5  # a loop that is late by this many seconds was blocked
GROUP = 16  # maximum number of commands in one write


class _Gone:
    """Replaces the transport that was taken from a stream."""

    def is_closing(self) -> bool:
        """Return True, so that the stream has nothing left to close."""
        return True


class Taken(asyncio.Protocol):
    """A connection taken over from the driver after its handshake. Law: only this object reads or closes it."""

    def __init__(self, connection: Any, on_error: Callable[[str], Exception] = ReplyError) -> None:
        parser = reader(on_error)
        self._feed = parser.feed
        self._gets = parser.gets
        stream: Any = getattr(connection, "_writer", None)
        transport: Any = stream.transport
        # The driver has no public access to its connection. Neither the driver's object nor the stream may close it
        # now, which both do when they are garbage-collected.
        vars(stream)["_transport"] = _Gone()
        for name in ("_reader", "_writer"):
            setattr(connection, name, None)
        self._transport: asyncio.WriteTransport = transport
        transport.set_protocol(self)

    def drop(self) -> None:
        """Close the connection without waiting for anything."""
        self._transport.abort()


class Pipe(Taken):
    """Sends the commands of all tasks: those of one turn of the loop together, in writes of GROUP commands each.

    With a single write, server and tasks would take turns: the server would be idle until the last task has made its
    command, and the tasks until the server has answered all commands. With groups they work at the same time.

    `lost` is called when the connection is lost; `late` for each second in which the longest-waiting caller got no
    reply. `data_id` is the data id under which the connection was made.
    """

    def __init__(
        self,
        connection: Any,
        timeout: float,
        on_error: Callable[[str], Exception],
        lost: Callable[[], None],
        late: Callable[[], None] = nothing,
        data_id: str = "",
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._packer = Packer(data_id)
        self.broken: Exception | None = None
        self._timeout = timeout
        self._lost = lost
        self._late = late
        self._late_after = timeout if late is nothing else min(timeout, LATE)
        self._outgoing: list[bytes] = []
        self._waiting: deque[tuple[asyncio.Future[list[Any]], int, float]] = deque()
        self._answers: list[Any] = []
        self._watched = False
        self._due = 0.0  # when `_watch` is to be called
        super().__init__(connection, on_error)

    def send(self, commands: Sequence[Words]) -> asyncio.Future[list[Any]]:
        """Send commands together; return a future of all their replies."""
        packed = self._packer.pack(commands)
        loop = self.loop
        waiting: asyncio.Future[list[Any]] = loop.create_future()
        if self._outgoing:
            self._outgoing.append(packed)
            if len(self._outgoing) >= GROUP:
                self._flush()
        elif self._waiting:
            # Other tasks are sending too: commands of this turn of the loop are sent together.
            self._outgoing.append(packed)
            loop.call_soon(self._flush)  # one call for each group; finds nothing if the group was sent when full
        elif not self._transport.is_closing():  # else connection_lost will be called
            self._transport.write(packed)
        self._waiting.append((waiting, len(commands), loop.time()))
        if not self._watched:
            self._watch_in(self._late_after)
        return waiting

    def _watch_in(self, seconds: float) -> None:
        self._watched = True
        self._due = self.loop.time() + seconds
        self.loop.call_at(self._due, self._watch)

    def _flush(self) -> None:
        parts = self._outgoing
        self._outgoing = []
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    def data_received(self, data: bytes) -> None:
        """Give replies to their callers."""
        waiting = self._waiting
        gets = self._gets
        try:
            self._feed(data)
            while (answer := gets()) is not False:
                if not waiting:
                    raise driver.ConnectionError("unexpected answer")
                future, count, _ = waiting[0]
                answers = self._answers
                answers.append(answer)
                if len(answers) == count:
                    waiting.popleft()
                    self._answers = []
                    if not future.done():  # its caller may have been cancelled; the reply is still read
                        future.set_result(answers)
        except (driver.RedisError, ValueError) as error:
            self.fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail all waiting callers."""
        self.fail(error or driver.ConnectionError("the server closed the connection"))

    def _watch(self) -> None:
        """Check whether the longest-waiting caller has waited too long.

        Later replies could be mistaken for those of other commands, so the connection is closed then.
        """
        self._watched = False
        if self._waiting and self.broken is None:
            now = self.loop.time()
            if now - self._due > _STOOD_STILL:
                # Nothing was read meanwhile: read what has arrived before judging that a reply is missing.
                self._watch_in(_STOOD_STILL)
                return
            waited = now - self._waiting[0][2]
            left = self._late_after - waited
            if waited >= self._timeout:
                self.fail(driver.TimeoutError("no answer in time"))
                return
            if left <= 0:
                self._late()
                left = min(self._late_after, self._timeout - waited)
            self._watch_in(left)

    def fail(self, error: Exception) -> None:
        """Close the connection, and fail all waiting callers."""
        if self.broken is None:
            self.broken = error
            self.drop()
            self._lost()
        while self._waiting:
            future, _, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(driver.ConnectionError(f"connection lost: {error}"))
                future.exception()  # marked as seen: the caller may have been cancelled


T = TypeVar("T")


class AsyncioPort(Router):
    """One shared connection to each server for commands, and another for commands that may block."""

    def __init__(self, connections: Connections, pools: Pools) -> None:
        super().__init__(connections)
        self._pools = pools
        self._pipes: dict[str, Pipe] = {}
        self._apart: dict[str, Pipe] = {}  # for commands that may block
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._connecting: dict[str, asyncio.Lock] = {}
        self._handshakes: dict[str, set[asyncio.Timeout]] = defaultdict(set)
        connections.used(self._gone)

    def leave(self) -> None:
        """Drop all connections; called in the thread of the loop."""
        self._closed = True
        self.forget()
        for pipe in (*self._pipes.values(), *self._apart.values()):
            pipe.fail(driver.ConnectionError("closed"))

    def forget(self) -> None:
        """Stop watching for servers that leave; callable from any thread."""
        self._connections.unused(self._gone)

    def abandon(self) -> None:
        """After fork(): nothing of the parent's loop can be used or closed."""
        self._connections.inherited(self._gone)
        self._pipes.clear()
        self._apart.clear()

    def _gone(self, node: str) -> None:
        """Fail the waiting callers of a server that left or has another data id now."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._drop, node)

    def _drop(self, node: str) -> None:
        for pipes in (self._pipes, self._apart):
            if pipe := pipes.pop(node, None):
                pipe.fail(driver.ConnectionError("another server has its keys now"))
        if node not in self._topology.nodes():  # with another data id, handshakes continue
            for scope in self._handshakes.pop(node, ()):
                scope.reschedule(self._loop.time())

    async def look(self) -> None:
        account = waited.present()
        if account is None:
            await self._looking_by(self._connections.look)
            return
        began = time.monotonic()
        left = account.left(began, "", self._limits)
        try:
            async with asyncio.timeout(left):
                await self._looking_by(self._connections.look)
        except TimeoutError as error:
            account.add(began, "")
            raise WarmUnavailable(f"{self._place}: the server that has the keys is not known yet") from error
        account.add(began)

    def _late(self) -> None:
        """Called when a reply is late: if another server has the keys now, drop this one."""
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
                connection, data_id = await self._connect(node)
                late = self._late if self.several else nothing
                refused = partial(self._refused, node)
                pipe = Pipe(connection, self._connections.timeout, refused, self._topology.doubt, late, data_id)
                pipes[node] = pipe
                if self._closed:  # closed meanwhile; nothing else would close this connection
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
            return []  # waiting for no reply would never end, and block all later callers
        if self._embedded is not None:
            answers = self._embedded.exchange(commands)
            await asyncio.sleep(0)  # lets other tasks of the loop run, as a wait for a real server would
            return answers
        return await self._exchange_over(self._pipes, node, commands)

    async def exchange_apart(self, node: str, commands: Sequence[Words]) -> list[Any]:
        return await self._exchange_over(self._apart, node, commands)

    async def _exchange_over(self, pipes: dict[str, Pipe], node: str, commands: Sequence[Words]) -> list[Any]:
        account = waited.present()
        began, left = 0.0, None
        if account is not None:
            began = time.monotonic()
            left = account.left(began, node, self._limits)
        pipe = pipes.get(node)
        try:
            if pipe is not None and pipe.broken is None and (left is None or left >= self._timeout):
                answers = await pipe.send(commands)  # `send` watches that time itself
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
                raise part  # raised here, because a task of the group would raise it inside an ExceptionGroup
            answers[node] = part
        return answers

    async def _tried(self, node: str, commands: Sequence[Words]) -> Any:
        try:
            return await self.exchange_with(node, commands)
        except StateError as error:
            return error


async def complete(work: Awaitable[T]) -> T:
    """Wait for a user's coroutine; a cancellation that is not the caller's own raises RuntimeError."""
    try:
        return await work
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("the awaited result was cancelled") from error


async def shield(work: Awaitable[T], seconds: float) -> T:
    """Wait for `work`; a cancelled caller returns when the work is done, or after `seconds`."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait((future,), timeout=seconds)
        raise


class AsyncioGuard:
    """Cancels the task that entered it, and can recognise its own cancellation, as asyncio.timeout does."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._before = self._task.cancelling() if self._task else 0
        self._asked = self._fired = False

    def interrupt(self, error: Exception | None = None) -> None:
        self._asked = True
        with suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(self._cancel)  # the job that watches the deadlines may be a thread

    def _cancel(self) -> None:
        if self._task is not None and not self._task.done():
            self._fired = True
            self._task.cancel()

    @property
    def fired(self) -> bool:
        return self._fired

    def check(self) -> None: ...

    async def absorb(self, error: BaseException | None) -> BaseException | None:
        if self._asked and error is None:
            try:
                await asyncio.sleep(0)  # the cancellation arrives now
            except asyncio.CancelledError as late:
                return late
        return error

    def leave(self, error: BaseException | None) -> bool:
        task = self._task
        self._task = None  # later interruptions have no effect
        if not self._fired or task is None:
            return False
        ours = task.uncancel() <= self._before
        return ours and isinstance(error, asyncio.CancelledError)
