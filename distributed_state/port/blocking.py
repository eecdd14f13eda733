"""The port of blocking code. Law: no await here ever suspends, so the core runs in one step.

Each caller takes a connection of its own. Work that Ctrl-C must not interrupt runs to its end in a thread
(`UninterruptibleThread`), even if the caller no longer waits for it.

Design: sections 16, 19.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import Wire, Words, background, waited
from distributed_state.port.background import finish as finish  # used by the generated sync API
from distributed_state.port.bodies import interruptions
from distributed_state.port.commands import BROKEN, ReplyError, translate
from distributed_state.port.connections import Connections
from distributed_state.port.embedded import EmbeddedServer
from distributed_state.port.routing import Router
from distributed_state.port.sockets import Socket, SocketWire
from distributed_state.port.waited import Waited

_CLOSED = "the embedded server: the link is closed"


class EmbeddedWire:
    """A subscription read by one thread and written by any."""

    def __init__(self, server: EmbeddedServer, end_if_stopped: Callable[[], None]) -> None:
        self._messages: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._end_if_stopped = end_if_stopped
        self._subscription = server.subscribe(self._messages.put)
        self.post = self._subscription.post
        self.post_all = self._subscription.post_all

    async def receive(self) -> list[Any]:
        """Return the next message. Waits in short steps, so that a background thread notices its own stop."""
        while True:
            self._end_if_stopped()
            try:
                message = self._messages.get(timeout=0.5)
            except Empty:
                continue
            if message is not None:
                return message
            self._messages.put(None)  # for later calls of `receive`
            raise WarmUnavailable(_CLOSED)

    def close(self) -> None:
        """Close the subscription; a pending `receive` raises an error."""
        self._subscription.close()
        self._messages.put(None)


class UninterruptibleThread:
    """A thread for work that Ctrl-C must not interrupt; Python raises KeyboardInterrupt in the main thread only.

    The main thread waits in a SimpleQueue, which waits in C. A Future's wait is Python code: interrupted at a bad
    moment it leaves a lock held, and raises RuntimeError instead of KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self._closed = False
        self._calls: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], SimpleQueue[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="distributed-state-uninterruptible", daemon=True).start()

    def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run calls in order, to the end, even if the caller leaves with an interrupt."""
        if self._closed or threading.current_thread() is not threading.main_thread():
            return call(*arguments)
        outcome: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()
        self._calls.put((call, arguments, outcome))
        result, error = outcome.get()
        if error is not None:
            raise error
        return cast(T, result)

    def close(self) -> None:
        """End the thread when all earlier calls are done."""
        self._closed = True
        self._calls.put(None)

    def _serve(self) -> None:
        while work := self._calls.get():
            call, arguments, outcome = work
            try:
                outcome.put((call(*arguments), None))
            except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
                outcome.put((None, error))


T = TypeVar("T")
log = logging.getLogger(__name__)


class BlockingPort(Router):
    """Connections in a stack for each server: a caller takes one, is its only user, and puts it back."""

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections)
        self._free: dict[str, list[Socket]] = defaultdict(list)
        # `_made`: all, including links and connections in their handshake. `_used`: those with their server's data id.
        self._made: dict[str, weakref.WeakSet[Socket]] = defaultdict(weakref.WeakSet)
        self._used: dict[str, weakref.WeakSet[Socket]] = defaultdict(weakref.WeakSet)
        self._connecting = threading.Lock()  # guards `_made`, which cannot be iterated over while it grows
        self.closed = False
        self._is_cut = False
        self._parting: Waited | None = None  # the account of the closing call, which may connect even after the cut
        self._uninterruptible = UninterruptibleThread()
        connections.used(self._gone)

    def shut(self) -> None:
        """Drop all connections; calls that are running finish first."""
        self.closed = True
        self._connections.unused(self._gone)
        self._uninterruptible.close()
        for free in list(self._free.values()):
            self._close_free(free)

    def abandon(self) -> None:
        """After fork(): drop the parent's sockets. redis-py closes them here without shutting them down."""
        self._connections.inherited(self._gone)
        self._free.clear()
        self._made.clear()
        self._used.clear()

    def _gone(self, node: str) -> None:
        """Fail the waiting callers of a server that left or has another data id now.

        With another data id, subscriptions and handshakes continue: new connections will have the new data id.
        """
        asked = node in self._topology.nodes()
        with self._connecting:
            over = list(self._used.pop(node, ()))
            over += [] if asked else list(self._made.pop(node, ()))
        for socket in over:
            socket.shut()

    def cut(self, parting: Waited | None) -> None:
        """End every wait for a reply in all threads, now and later. Only the closing call may connect again."""
        self._parting, self._is_cut = parting, True
        for free in list(self._free.values()):
            self._close_free(free)  # no caller waits on these; left in the stack, they would fail for their next user
        with self._connecting:
            sockets = {socket for kept in (self._made, self._used) for node in kept.values() for socket in node}
        for socket in sockets:
            socket.shut()

    async def look(self) -> None:
        account = waited.present()
        if account is None:
            self._connections.look()
            return
        began = time.monotonic()
        left = account.left(began, "", self._limits)
        try:
            self._connections.look(left)
        except StateError:
            account.add(began, "")
            raise
        account.add(began)

    async def exchange_with(self, node: str, commands: Sequence[Words]) -> list[Any]:
        if interruptions.pending:
            interruptions.check()
        if self._embedded is not None:
            # The scripts run in this process: an interrupted one would be half a commit.
            return self._uninterruptible.run(self._embedded.exchange, commands)
        if not commands:
            return []
        free = self._free[node]
        count = len(commands)
        account = waited.present()
        began, seconds = 0.0, self._timeout
        if account is not None:
            began = time.monotonic()
            seconds = account.left(began, node, self._limits)
        try:
            if free:
                socket = self._taken(free, node, seconds)
            else:
                connecting = time.monotonic()
                socket = self._taken(free, node, seconds)
                seconds -= time.monotonic() - connecting if account is not None else 0.0
            answers = socket.exchange(socket.packer.pack(commands), count, seconds)
        except (StateError, *BROKEN) as error:
            if account is not None:
                account.add(began, node)
            if isinstance(error, StateError):
                raise
            self._topology.doubt()
            self._close_free(free)
            raise translate(error, self._place) from error
        self._put_back(free, socket)
        if account is not None and account.silent:
            account.silent.discard(node)
        return answers

    def _taken(self, free: list[Socket], node: str, seconds: float) -> Socket:
        """Take a free connection, or make one within `seconds`."""
        try:
            return free.pop()
        except IndexError:
            pass  # connected below, so that a later error does not show this one as its context
        socket = self._connect(node, partial(self._refused, node), seconds)
        with self._connecting:
            self._used[node].add(socket)
        return socket

    def _connect(self, node: str, on_error: Callable[[str], Exception], seconds: float = math.inf) -> Socket:
        def begun(socket: Socket) -> None:
            with self._connecting:
                self._made[node].add(socket)
            if self._is_over():
                socket.shut()

        try:
            if self._is_over():
                raise WarmUnavailable(f"{self._place}: the store is closed, and Redis did not answer")
            return self._connections.connect(node, on_error, begun, seconds)
        except StateError:
            self._topology.doubt()
            raise

    def _is_over(self) -> bool:
        """Whether the caller must not wait any longer, because `cut` was called and this is not the closing call."""
        return self._is_cut and (self._parting is None or waited.present() is not self._parting)

    def _close_free(self, free: list[Socket]) -> None:
        """Close the free connections: they go to the server that was lost."""
        with suppress(IndexError):  # another thread pops from it, too
            while free:
                free.pop().close()

    def _put_back(self, free: list[Socket], socket: Socket) -> None:
        if self.closed or self._is_cut:
            socket.close()
        else:
            free.append(socket)

    async def exchange_apart(self, node: str, commands: Sequence[Words]) -> list[Any]:
        return await self.exchange_with(node, commands)  # only this caller uses the connection

    async def exchange_with_all(self, groups: dict[str, list[Words]]) -> dict[str, list[Any] | WarmUnavailable]:
        """Send to all servers, then read, so that the servers work in parallel."""
        if interruptions.pending:
            interruptions.check()
        found: dict[str, list[Any] | WarmUnavailable] = {}
        sent: list[tuple[str, Socket]] = []
        account = waited.present()
        began = time.monotonic()
        end = began + self._timeout
        if account is not None:
            end = began + self._longest(account, began, groups, found)
        try:
            for node, commands in groups.items():
                if node in found:
                    continue
                try:
                    socket = self._taken(self._free[node], node, _until(end))
                    sent.append((node, socket))
                    socket.send(socket.packer.pack(commands), _until(end))
                except (StateError, *BROKEN) as error:
                    found[node] = self._lost(error, node)
            for node, socket in sent:
                if node not in found:
                    try:
                        found[node] = socket.answers(len(groups[node]), _until(end))
                    except BROKEN as error:
                        found[node] = self._lost(error, node)
                    else:
                        self._put_back(self._free[node], socket)
        except BaseException:
            for _, socket in sent:
                socket.close()  # replies that are still missing would be mistaken for later ones
            raise
        finally:
            if account is not None:
                self._note(account, began, found)
        return found

    def _note(self, account: Waited, began: float, found: dict[str, list[Any] | WarmUnavailable]) -> None:
        for node, each in found.items():
            if isinstance(each, WarmUnavailable):
                account.add(began, node)
            else:
                account.silent.discard(node)

    def _longest(
        self, account: Waited, began: float, nodes: Iterable[str], refused: dict[str, list[Any] | WarmUnavailable]
    ) -> float:
        """Return how long to wait for the slowest of these servers; put those that may not be asked into `refused`."""
        longest = 0.0
        for node in nodes:
            try:
                longest = max(longest, account.left(began, node, self._limits))
            except WarmUnavailable as error:
                refused[node] = error
        return longest

    def _lost(self, error: Exception, node: str) -> WarmUnavailable:
        """Return the error in place of a server's replies; raise it if it is not a WarmUnavailable."""
        self._topology.doubt()
        self._close_free(self._free[node])
        ours = translate(error, self._place)
        if not isinstance(ours, WarmUnavailable):
            raise ours from error
        return ours

    async def wire(self, node: str) -> Wire:
        if self._embedded is not None:
            return EmbeddedWire(self._embedded, background.end_if_stopped)
        return SocketWire(self._connect(node, ReplyError), self._place, background.end_if_stopped)

    async def sleep(self, seconds: float) -> None:
        background.sleep(seconds)

    async def sql(self, call: Callable[..., T], *arguments: Any) -> T:
        return self._uninterruptible.run(call, *arguments)

    async def thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return call(*arguments)

    async def complete(self, work: Awaitable[T]) -> T:
        try:
            # A background thread keeps its event loop, which users' objects may be bound to.
            return background.run_users(work, lasting=background.here())
        except asyncio.CancelledError as error:
            raise RuntimeError("the awaited result was cancelled") from error

    async def shield(self, work: Coroutine[Any, Any, T]) -> T:
        # As in a task, the work runs in the caller's context.
        context = copy_context()
        return self._uninterruptible.run(lambda: context.run(finish, work))


def _until(end: float) -> float:
    """Return the seconds left; if none, a few milliseconds to read replies that have already arrived."""
    return max(0.01, end - time.monotonic())


class BlockingGuard:
    """Threads cannot be interrupted: the holder of a lost lease sees `lease.lost`, and its writes raise Fenced.

    The error of an interruption, if it has one, is raised once by the body's next call to a server: see
    `bodies.Interruptions`.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._raised: Exception | None = None

    @property
    def fired(self) -> bool:
        return self._raised is not None

    def interrupt(self, error: Exception | None = None) -> None:
        if error is not None:
            self._error = error
            interruptions.count(1)

    def check(self) -> None:
        """Raise the error of an interruption that the body has not noticed yet."""
        error = self._take()
        if error is not None:
            raise error

    def _take(self) -> Exception | None:
        error, self._error = self._error, None
        if error is not None:
            self._raised = error
            interruptions.count(-1)
        return error

    async def absorb(self, error: BaseException | None) -> BaseException | None:
        return self._take() if error is None else error

    def leave(self, error: BaseException | None) -> bool:
        if self._error is not None:
            self._error = None
            interruptions.count(-1)
        return error is not None and error is self._raised
