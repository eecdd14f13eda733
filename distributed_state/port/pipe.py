"""The connection that all tasks of an event loop share. Law: answers come in the order of the commands.

So a caller that was cancelled leaves its place in the queue, its answer is read all the same, and where the order is
in doubt, after a reply that did not come in time, the connection is given up.

Design: section 19.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import redis.exceptions as driver

from distributed_state.port import Words
from distributed_state.port.errors import ReplyError
from distributed_state.port.lives import Packer
from distributed_state.port.sockets import LATE, nothing, reader

_STOOD_STILL = 0.5  # seconds that a loop is late, which was blocked then
GROUP = 16  # commands that leave together, at most


class _Gone:
    """What a stream has in place of a transport that it has no more."""

    def is_closing(self) -> bool:
        """Yes, so that nothing is left to do."""
        return True


class Taken(asyncio.Protocol):
    """A connection of the driver's, taken over once its handshake is done. Law: nobody else reads or closes it."""

    def __init__(self, connection: Any, on_error: Callable[[str], Exception] = ReplyError) -> None:
        parser = reader(on_error)
        self._feed = parser.feed
        self._gets = parser.gets
        stream: Any = getattr(connection, "_writer", None)
        transport: Any = stream.transport
        # The driver has no door to what it connected. Neither its connection nor the stream may close this now, which
        # both do when they are collected.
        vars(stream)["_transport"] = _Gone()
        for name in ("_reader", "_writer"):
            setattr(connection, name, None)
        self._transport: asyncio.WriteTransport = transport
        transport.set_protocol(self)

    def drop(self) -> None:
        """Close it without waiting for anything."""
        self._transport.abort()


class Pipe(Taken):
    """Commands of all tasks: those of one turn of the loop leave in a few writes, of GROUP commands each.

    In one write of all, the server would have nothing to do until the last task has made its command, and the tasks
    nothing until the server has answered all: the two would take turns. In groups they work at the same time.

    `lost` is called when the connection is; `late` for each second in which the one who waits longest got no answer.
    `life` is the one that it was made in.
    """

    def __init__(
        self,
        connection: Any,
        timeout: float,
        on_error: Callable[[str], Exception],
        lost: Callable[[], None],
        late: Callable[[], None] = nothing,
        life: str = "",
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._packer = Packer(life)
        self.broken: Exception | None = None
        self._timeout = timeout
        self._lost = lost
        self._late = late
        self._patience = timeout if late is nothing else min(timeout, LATE)
        self._outgoing: list[bytes] = []
        self._waiting: deque[tuple[asyncio.Future[list[Any]], int, float]] = deque()
        self._answers: list[Any] = []
        self._watched = False
        self._due = 0.0  # when `_watch` is to be called
        super().__init__(connection, on_error)

    def send(self, commands: Sequence[Words]) -> asyncio.Future[list[Any]]:
        """Send commands together; their answers, when all are there."""
        packed = self._packer.pack(commands)
        loop = self.loop
        waiting: asyncio.Future[list[Any]] = loop.create_future()
        if self._outgoing:
            self._outgoing.append(packed)
            if len(self._outgoing) >= GROUP:
                self._flush()
        elif self._waiting:
            # Others are at it as well: what they send in this turn of the loop leaves together.
            self._outgoing.append(packed)
            loop.call_soon(self._flush)  # one for each group; of one that was full and has left it finds nothing
        elif not self._transport.is_closing():  # else connection_lost is on its way
            self._transport.write(packed)
        self._waiting.append((waiting, len(commands), loop.time()))
        if not self._watched:
            self._watch_in(self._patience)
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
        """Hand answers to those who wait for them."""
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
                    if not future.done():  # its caller may have been cancelled; the answer is read all the same
                        future.set_result(answers)
        except (driver.RedisError, ValueError) as error:
            self.fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        """Tell all who wait."""
        self.fail(error or driver.ConnectionError("the server closed the connection"))

    def _watch(self) -> None:
        """Look whether the one who waits longest has waited too long.

        Later answers could be taken for others', so the connection is over then.
        """
        self._watched = False
        if self._waiting and self.broken is None:
            now = self.loop.time()
            if now - self._due > _STOOD_STILL:
                # Nothing was read meanwhile: what came is to be read before it is missed.
                self._watch_in(_STOOD_STILL)
                return
            waited = now - self._waiting[0][2]
            left = self._patience - waited
            if waited >= self._timeout:
                self.fail(driver.TimeoutError("no answer in time"))
                return
            if left <= 0:
                self._late()
                left = min(self._patience, self._timeout - waited)
            self._watch_in(left)

    def fail(self, error: Exception) -> None:
        """Give the connection up."""
        if self.broken is None:
            self.broken = error
            self.drop()
            self._lost()
        while self._waiting:
            future, _, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(driver.ConnectionError(f"connection lost: {error}"))
                future.exception()  # marked as seen: its caller may be gone
