"""Events as server-sent events. Law: each carries the position after it, so a client that reconnects misses nothing.

For a slow client this process holds a bounded number of events; the others wait in Redis. A client that reads nothing
for a while is disconnected, and continues from `Last-Event-ID` when it reconnects. Source: the WHATWG
HTML standard, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from distributed_state.errors import CorruptState, StateError
from distributed_state.events.consumer import AsyncEvents
from distributed_state.programs.service.answers import encode
from distributed_state.programs.service.budget import Buffered
from distributed_state.programs.service.connections import CONNECTION
from distributed_state.programs.service.fairness import turn
from distributed_state.programs.service.limits import Limits
from distributed_state.values.results import Event

log = logging.getLogger(__name__)
_TOGETHER = 64 * 1024  # bytes in one write
_RETRY_MS = 1000
_MANY = 8  # events that are waiting: who has so many catches up


class EventStream(Response):
    """Writes events until the client disconnects or is too slow, or the worker stops; then closes the subscription."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncEvents,
        limits: Limits,
        over: Callable[[EventStream], None],
        hears: Callable[[Event], bool],
        count: Callable[[int], None],
        shown: Callable[[str], str],
        buffered: Buffered,
    ) -> None:
        # `over` is told of its end, `hears` says what the client may hear, `count` is given the bytes that are sent,
        # `shown` is a position as the client gets it
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._events = events
        self._limits = limits
        self._over = over
        self._hears = hears
        self._count = count
        self._shown_position = shown
        self._sent_position = ""
        self.buffered = buffered
        """The bytes that it holds; the events that wait count there, too."""
        self._ended = False

    async def join(self) -> None:
        """Subscribe before anything is answered, so that an error is answered with its own status."""
        await self._events.join()

    def end(self) -> None:
        """End the stream. The client reconnects, here or to another worker, with its position."""
        self._ended = True
        self._events.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write events until the client leaves or the events end."""
        leaving = asyncio.create_task(self._notice_leaving(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._write(send, f"retry: {_RETRY_MS}\n{self._position()}\n".encode())
            while (block := await self._next()) is not None:
                await self._write(send, block)
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            log.info("a client of the event stream read nothing for %g s and was disconnected", self._limits.slow)
            connection = scope.get("state", {}).get(CONNECTION)
            if connection is not None:
                connection.abort()  # closing it would wait for the client to read what is buffered
                await asyncio.wait((leaving,), timeout=1)  # or uvicorn would log the response as incomplete
        finally:
            self._over(self)
            leaving.cancel()
            await self._close()

    async def _write(self, send: Send, block: bytes) -> None:
        self._count(len(block))
        self.buffered.count(len(block))
        async with asyncio.timeout(self._limits.slow):
            await send({"type": "http.response.body", "body": block, "more_body": True})
        self.buffered.count(-len(block))

    async def _next(self) -> bytes | None:
        """Return what to write next, None at the end."""
        event = await self._readable(self._limits.heartbeat)
        if event is None:
            # A position without an event moves a client on past events of other types.
            return None if self._ended else b":\n%b\n" % self._position().encode()
        if self._events.waiting < _MANY:
            return await self._block(event)
        # Hundreds of streams that catch up together would hold up everything else.
        async with turn():
            return await self._block(event)

    async def _block(self, event: Event) -> bytes:
        """This event and those that are here already, as they are written together."""
        parts = [self._shown(event)]
        size = len(parts[0])
        while size < _TOGETHER and self._events.waiting:
            following = await self._readable(0)
            if following is None:
                break
            parts.append(self._shown(following))
            size += len(parts[-1])
        return b"".join(parts)

    async def _readable(self, timeout: float) -> Event | None:
        """Return the next event that the client may hear, or None after `timeout` seconds.

        A corrupt one is skipped: a client that reconnects would get the error forever.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                event = await self._events.next(max(0.0, deadline - time.monotonic()))
                if event is None or self._hears(event):
                    return event
            except CorruptState as error:
                log.error("skipped a corrupt event: %s", error)

    def _shown(self, event: Event) -> bytes:
        return b"%bevent: %b\ndata: %b\n\n" % (self._position().encode(), event.type.encode(), encode(event.to_dict()))

    def _position(self) -> str:
        """Return the line with the client's position, if it changed since the last one."""
        position = self._events.position
        if position == self._sent_position:
            return ""
        self._sent_position = position
        return f"id: {self._shown_position(position)}\n"

    async def _notice_leaving(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end()

    async def _close(self) -> None:
        try:
            await self._events.close()
        except StateError as error:
            log.warning("events: %s", error)
