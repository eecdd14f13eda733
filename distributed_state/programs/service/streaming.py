"""Events as server-sent events. Law: each carries the position behind it, so a reader that comes back misses nothing.

A slow reader costs the events that its consumer holds, which are bounded; the others wait in Redis. One that takes
nothing at all for a while is disconnected, and goes on from `Last-Event-ID` when it comes back. Source: the WHATWG
HTML standard, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from distributed_state.errors import CorruptState, StateError
from distributed_state.events.consumer import AsyncEvents
from distributed_state.programs.service.answers import encode
from distributed_state.programs.service.limits import Limits
from distributed_state.values.results import Event

log = logging.getLogger(__name__)
_TOGETHER = 64 * 1024  # bytes in one write
_RETRY_MS = 1000
TRANSPORT = "transport"  # in the state of a request: the connection, which ASGI itself cannot break off


class EventStream(Response):
    """Writes events until the reader leaves, is too slow, or the worker ends. Closes the events."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncEvents, limits: Limits, over: Callable[[EventStream], None]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._events = events
        self._limits = limits
        self._over = over
        self._told = ""
        self._ended = False

    async def join(self) -> None:
        """Begin to listen, before anything is answered: what cannot be is an error with a status of its own."""
        await self._events.join()

    def end(self) -> None:
        """Write no more. The reader comes back, here or elsewhere, with where it was."""
        self._ended = True
        self._events.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.create_task(self._notice_leaving(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._write(send, f"retry: {_RETRY_MS}\n{self._position()}\n".encode())
            while (block := await self._next()) is not None:
                await self._write(send, block)
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            log.info("a reader of events took nothing for %g s and was disconnected", self._limits.slow)
            transport = scope.get("state", {}).get(TRANSPORT)
            if transport is not None:
                transport.abort()  # closing it would wait for the reader to take what is under way
                await asyncio.wait((leaving,), timeout=1)  # or uvicorn would call the answer unfinished
        finally:
            self._over(self)
            leaving.cancel()
            await self._close()

    async def _write(self, send: Send, block: bytes) -> None:
        async with asyncio.timeout(self._limits.slow):
            await send({"type": "http.response.body", "body": block, "more_body": True})

    async def _next(self) -> bytes | None:
        """What to write next, None at the end."""
        event = await self._readable(self._limits.heartbeat)
        if event is None:
            # A position without an event moves a reader on past what it did not ask for.
            return None if self._ended else b":\n%b\n" % self._position().encode()
        parts = [self._shown(event)]
        size = len(parts[0])
        while size < _TOGETHER and self._events.waiting:
            event = await self._readable(0)
            if event is None:
                break
            parts.append(self._shown(event))
            size += len(parts[-1])
        return b"".join(parts)

    async def _readable(self, timeout: float) -> Event | None:
        """The next event. One that this worker cannot read is passed over: a reader would meet it again for ever."""
        while True:
            try:
                return await self._events.next(timeout)
            except CorruptState as error:
                log.error("an event is not shown: %s", error)

    def _shown(self, event: Event) -> bytes:
        return b"%bevent: %b\ndata: %b\n\n" % (self._position().encode(), event.type.encode(), encode(event.to_dict()))

    def _position(self) -> str:
        """The line that tells where the reader is, if it does not know yet."""
        position = self._events.position
        if position == self._told:
            return ""
        self._told = position
        return f"id: {position}\n"

    async def _notice_leaving(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end()

    async def _close(self) -> None:
        try:
            await self._events.close()
        except StateError as error:
            log.warning("events: %s", error)
