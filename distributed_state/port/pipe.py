"""The connection that all tasks of an event loop share. Law: answers come in the order of the commands.

So a caller that was cancelled leaves its place in the queue, its answer is read all the same, and where the order is
in doubt, after a reply that did not come in time, the connection is given up.

Design: section 16.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import redis.exceptions as driver
from hiredis import pack_command

from distributed_state.port import Words
from distributed_state.port.errors import LOST

BROKEN = (driver.RedisError, *LOST)


class Pipe:
    """A connection shared by all tasks of a loop."""

    def __init__(self, connection: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.broken: Exception | None = None
        self._connection = connection
        self._outgoing: list[bytes] = []
        self._waiting: deque[tuple[asyncio.Future[list[Any]], int]] = deque()
        self._wake = asyncio.Event()
        self._writer = asyncio.create_task(self._write(), name="distributed-state-writer")
        self._reader = asyncio.create_task(self._read(), name="distributed-state-reader")

    def send(self, commands: Sequence[Words]) -> asyncio.Future[list[Any]]:
        """Send commands together; their answers, when all are there."""
        self._outgoing.extend(map(pack_command, commands))
        waiting: asyncio.Future[list[Any]] = self.loop.create_future()
        self._waiting.append((waiting, len(commands)))
        self._wake.set()
        return waiting

    def fail_silent(self, waiting: asyncio.Future[list[Any]]) -> None:
        """The server has not answered in time. Later answers could be taken for others', so the connection is over."""
        if not waiting.done():
            self._fail(driver.TimeoutError("no answer in time"))

    async def _write(self) -> None:
        try:
            # Asked each time: asyncio.wait_for in the driver may swallow our cancellation (Python 3.11, bpo-37658).
            while self.broken is None:
                await self._wake.wait()
                self._wake.clear()
                parts = self._outgoing
                self._outgoing = []
                await self._connection.send_packed_command(parts, check_health=False)
        except BROKEN as error:
            self._fail(error)

    async def _read(self) -> None:
        read = self._connection.read_response
        waiting = self._waiting
        answers: list[Any] = []
        try:
            while self.broken is None:
                try:
                    answers.append(await read())
                except driver.ResponseError as error:
                    answers.append(error)
                future, count = waiting[0]
                if len(answers) == count:
                    waiting.popleft()
                    if not future.done():  # its caller may have been cancelled; the answer is read all the same
                        future.set_result(answers)
                    answers = []
        except (*BROKEN, IndexError) as error:
            self._fail(error if not isinstance(error, IndexError) else driver.ConnectionError("unexpected answer"))

    def _fail(self, error: Exception) -> None:
        if self.broken is None:
            self.broken = error
            for task in (self._reader, self._writer):
                if task is not asyncio.current_task():
                    task.cancel()
            self._forget = self.loop.create_task(self._connection.disconnect(nowait=True))
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(driver.ConnectionError(f"connection lost: {error}"))
                future.exception()  # marked as seen: its caller may be gone

    async def close(self) -> None:
        """Drop the connection. Who waits for an answer gets WarmUnavailable."""
        self._fail(driver.ConnectionError("closed"))
        await asyncio.gather(self._reader, self._writer, self._forget, return_exceptions=True)
