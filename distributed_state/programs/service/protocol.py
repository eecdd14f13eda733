"""One connection. Law: whenever it waits for its client, a clock runs.

uvicorn's own has no limit for the time that a head, a body or the reading of an answer takes, and none for what all
connections hold together. Of h11, which costs a tenth of a millisecond more than httptools: that one knows no limit of
a request's head, loses the body of a request that offers an upgrade to HTTP/2, and does not report every disconnect.

Design: section 24.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any

import h11
import orjson
from uvicorn.protocols.http.h11_impl import H11Protocol

from distributed_state.programs.service.budget import Taken
from distributed_state.programs.service.connections import CONNECTION, Connections

_HEAD = 16 * 1024  # bytes of a head that has no end yet
_LAST = 1.0  # seconds for a request that has not begun when the worker stops
_FAST = 16  # times the slowest rate: a client that reads so fast is not disconnected to make room for another
_STATUS = {408: ("Request Timeout", "Timeout"), 503: ("Service Unavailable", "Unavailable")}


class Wire(h11.Connection):
    """HTTP as h11 reads it, each event seen by the connection, and a body of two lengths refused."""

    def __init__(self, seen: Callable[[Any], None]) -> None:
        super().__init__(h11.SERVER, _HEAD)
        self._seen: Callable[[Any], None] | None = seen

    def forget(self) -> None:
        """Tell the connection of no more events."""
        self._seen = None

    def next_event(self) -> Any:
        """The next event. Raises RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            # A proxy in front that goes by the other one of the two takes the body's rest for another request.
            if b"content-length" in names and b"transfer-encoding" in names:
                raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding, of which one is right")
        if self._seen is not None:
            self._seen(event)
        return event


class Protocol(H11Protocol):
    """A connection that keeps to the limits, and that a request can abort."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._wire = self.conn = Wire(self._seen)
        self.address = ""
        self._all = connections
        self._limits = connections.limits
        self._answered = False  # a request of this client, before
        self._until: float | None = None  # when a head or a body has to be here; None: neither is waited for
        self._kept = 0  # bytes for the request that is served
        self._unread: tuple[float, int] | None = None  # since when the client reads too slowly, and how much it has to
        self._unpaid = 0  # of that nobody took anything for so much
        self._lost = False
        self._paid: list[Taken] = []  # for answers that are written, or about to be
        self._last = False  # the worker stops: the next request is the last one

    @property
    def held(self) -> int:
        """Bytes of its request and of its unread answer."""
        return self._kept + self._unpaid + sum(each.size for each in self._paid if self._unread)

    # The life of a connection

    def connection_made(self, transport: Any) -> None:
        """Wait for a request, if there is room for this connection."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.app_state: dict[str, Any] = {**self.app_state, CONNECTION: self}
        if refused := self._all.enter(self):
            transport.write(_words(503, refused))
            transport.close()
        else:
            self._wait(self._limits.head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._all.leave(self)
        self._until = None
        self._lost = True
        self._release()
        self._read()
        for each in self._paid:
            each.give_back()
        self._paid.clear()
        super().connection_lost(exc)
        # All of these lead back to here. Without them it is gone now; with them it would stay, and some 20 KB with it,
        # until the next full garbage collection, which may be long after thousands of connections.
        self._wire.forget()
        self.app_state.clear()
        self.scope = self.cycle = None  # type: ignore[assignment]  # as before the first request

    def data_received(self, data: bytes) -> None:
        """Read on: the first byte of a request starts its clock."""
        if self.transport.is_closing():
            return
        if self._until is None and self._complete():
            self._wait(self._limits.head)
        super().data_received(data)
        if self._last and self.cycle is not None:
            self.cycle.keep_alive = False

    def _seen(self, event: Any) -> None:
        """Take note of what h11 has read."""
        if isinstance(event, h11.Request):
            self._wait(self._limits.arriving)
        elif isinstance(event, h11.EndOfMessage):
            self._until = None
            self._all.goes_on(self)
        elif isinstance(event, h11.Data) and not self._complete():
            if self._until is not None:
                self._until += len(event.data) / self._limits.rate
            self.hold(len(event.data))

    def _complete(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        """Wait for the next request. What came of this one is held no more."""
        self._answered = True
        self._release()
        if self.conn.their_state is h11.SEND_BODY:
            pass  # answered before it was here: the rest is thrown away as it comes, until the clock ends it
        elif self.conn.trailing_data[0]:
            self._wait(self._limits.head)
        elif self._unread is None:
            self._all.waits(self, known=True)
        super().on_response_complete()

    # Clocks

    def _wait(self, seconds: float) -> None:
        self._until = self.loop.time() + seconds
        self._all.waits(self, known=self._answered)

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered."""
        super().pause_writing()
        self._leave_unread(self.loop.time())

    def _leave_unread(self, now: float) -> None:
        self._unread = (now, self.transport.get_write_buffer_size())
        self._unpaid = max(0, self._unread[1] - sum(each.size for each in self._paid))
        self._all.waits(self, known=False)
        if not self._all.hold(self, self._unpaid):
            self.abort()

    def resume_writing(self) -> None:
        """The client has read most of it."""
        super().resume_writing()
        self._read()
        self._all.goes_on(self)
        if self._complete():
            self._all.waits(self, known=True)

    def _read(self) -> None:
        if self._unread is not None:
            self._unread = None
            self._all.drop(self._unpaid)
            self._unpaid = 0
            for each in [each for each in self._paid if each.written]:
                self._give_back(each)

    def look(self, now: float) -> None:
        """Disconnect the client if it took too long."""
        if self._unread is not None:
            since, size = self._unread
            read = size - self.transport.get_write_buffer_size()
            if now > since + self._limits.leaving + read / self._limits.rate:
                self.abort()
        elif self.transport.is_closing():
            self._leave_unread(now)  # closing waits until all is read that was written
        elif self._until is not None and now > self._until and not self.flow.read_paused:
            self.end(408, "the request did not arrive in time")

    def timeout_keep_alive_handler(self) -> None:
        """No other request came."""
        if self.transport.get_write_buffer_size():
            self.abort()  # nor was the last answer read, for which closing would wait
        else:
            super().timeout_keep_alive_handler()

    # Bytes

    def hold(self, size: int) -> None:
        """Count bytes that are kept for this request. Disconnects the client if there is no room for them."""
        if self.transport.is_closing():
            return  # its request may go on for a moment, and nobody would take them off again
        self._kept += size
        if not self._all.hold(self, size):
            self.end(503, "this worker holds as many bytes of requests and answers as it may")

    def pay(self, taken: Taken) -> None:
        """Have what was taken for the answer that comes count for its bytes."""
        taken.reader = self._too_slow
        self._paid.append(taken)

    def answered(self, taken: Taken) -> None:
        """Give back what was taken once the client has read the answer."""
        taken.written = True
        if self._unread is None or self._lost:
            self._give_back(taken)

    def _give_back(self, taken: Taken) -> None:
        taken.give_back()
        if taken in self._paid:
            self._paid.remove(taken)

    def _too_slow(self, seconds: float) -> bool:
        """Disconnect a client that has read its answer for so long, and not fast."""
        if self._unread is None:
            return False
        since, size = self._unread
        took = self.loop.time() - since
        slow = took >= seconds and size - self.transport.get_write_buffer_size() < took * self._limits.rate * _FAST
        if slow:
            self.abort()
        return slow

    def _release(self) -> None:
        self._all.drop(self._kept)
        self._kept = 0

    # The end

    def shutdown(self) -> None:
        """Serve the request that runs, is here or on its way, and close the connection behind it.

        A connection that is idle after an answer is closed at once. A client that has just connected sends its first
        request, and one that was closed instead could not know whether it was served.
        """
        self._last = True
        begun = self._until is not None if self._answered else bool(self.conn.trailing_data[0])
        if not self._complete() or (self._answered and not begun and not _waiting(self.transport)):
            super().shutdown()
        elif not begun:
            end = self.loop.time() + _LAST
            self._until = end if self._until is None else min(self._until, end)

    def end(self, status: int, why: str) -> None:
        """Disconnect the client, with this answer if it waits for one and has read what came before."""
        self._until = None
        self._release()
        if self._unread is not None or not (self._complete() or not self.cycle.response_started):
            self.abort()
            return
        if self.transport.is_closing():
            return
        if not self._complete() or self.conn.trailing_data[0]:
            self.transport.write(_words(status, why))  # past h11, whose state need not allow it
        if not self._complete():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def abort(self) -> None:
        """Disconnect the client, whatever it has not read yet."""
        self._until = None
        self.transport.abort()


def _words(status: int, why: str) -> bytes:
    reason, error = _STATUS[status]
    problem = {"type": "about:blank", "title": reason, "status": status, "detail": why, "error": error}
    body = orjson.dumps(problem)
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/problem+json\r\nContent-Length: {len(body)}\r\n"
    later = "Retry-After: 1\r\n" if status == 503 else ""
    return f"{head}{later}Connection: close\r\n\r\n".encode() + body


def _waiting(transport: Any) -> bool:
    """Whether bytes are here that were not read yet."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))
