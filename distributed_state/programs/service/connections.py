"""Connections of a worker. Law: each wait for a client has a time limit, and there is always room for another client.

Beyond a limit, the connection that has waited longest for its client is closed. A client that sends and reads in time
lets its connection wait only for moments, so that is never the longest wait. Connections whose client has already been
answered are closed after all others.

uvicorn's own protocol does not limit how long a head, a body or the reading of an answer takes, nor the bytes that all
connections hold together. This protocol uses h11, which costs a tenth of a millisecond more than httptools. httptools
does not limit the head of a request, loses the body of a request that offers an upgrade to HTTP/2, and does not report
every disconnect.

Design: section 24.
"""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import select
from collections import Counter
from collections.abc import Callable
from typing import Any

import h11
import orjson
from uvicorn.protocols.http.h11_impl import H11Protocol

from distributed_state.programs.service.limits import Budget, Limits, Taken, trim_memory

log = logging.getLogger(__name__)
CONNECTION = "connection"  # in the state of a request: its connection, which ASGI itself cannot abort
_OTHERS = 256  # descriptors for Redis, SQL, logs, and what the interpreter opens
_CROWD = 500  # closed connections after which memory is returned to the system
BACKLOG = 1024  # connections that wait to be accepted; the loop may accept all of them before the first is served
_HEAD = 16 * 1024  # bytes of an incomplete head
_LAST = 1.0  # seconds for a request that has not begun when the worker stops
_FAST = 16  # times the slowest rate: faster readers are not disconnected to make room
_PROBLEMS = {
    400: ("Bad Request", "BadRequest"),
    408: ("Request Timeout", "Timeout"),
    503: ("Service Unavailable", "Unavailable"),
}
_ABSOLUTE = re.compile(rb"https?://([^/?#]+)(.*)", re.IGNORECASE | re.DOTALL)


# All of them


class Connections:
    """Counts connections and the bytes that they hold; each worker has one."""

    def __init__(self, limits: Limits, budget: Budget | None = None) -> None:
        self.limits = limits
        self.most = room(limits.connections)
        self.budget = budget or Budget(limits.in_flight)
        self.evicted = 0
        self._gone = 0
        self._all: set[Connection] = set()
        self._addresses: Counter[str] = Counter()
        # Connections that wait for their client, the longest first: of clients that were never answered, and of others.
        self._strangers: dict[Connection, None] = {}
        self._known: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def in_flight(self) -> int:
        """Bytes of requests and answers that are held."""
        return self.budget.held

    # Connections

    def enter(self, connection: Connection) -> str:
        """Return why this connection cannot be served, "" if it can. It must call `leave` in both cases."""
        self._all.add(connection)
        self._addresses[connection.address] += 1
        most = self.limits.per_address
        if most and self._addresses[connection.address] > most:
            return f"this worker has {most} connections of your address"
        if len(self._all) > self.most and not self._evict_one(
            connection, "the worker needed the connection for another client"
        ):
            return f"this worker has {self.most} connections"
        return ""

    def leave(self, connection: Connection) -> None:
        """Stop counting a closed connection."""
        if connection in self._all:
            self._all.discard(connection)
            self._gone += 1
            self.goes_on(connection)
            self._addresses[connection.address] -= 1
            if not self._addresses[connection.address]:
                del self._addresses[connection.address]

    def waits(self, connection: Connection, *, known: bool) -> None:
        """Note that a connection waits for its client; `known`: the client was answered before."""
        self.goes_on(connection)
        if connection in self._all:
            (self._known if known else self._strangers)[connection] = None

    def goes_on(self, connection: Connection) -> None:
        """Note that a connection no longer waits for its client."""
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)

    def _evict_one(self, but: Connection, why: str) -> bool:
        for waiting in (self._strangers, self._known):
            for each in waiting:
                if each is not but:
                    self._evict(each, why)
                    return True
        return False

    def _evict(self, connection: Connection, why: str) -> None:
        self.evicted += 1
        self.leave(connection)
        connection.end(503, why)

    # Bytes

    def hold(self, connection: Connection, size: int) -> bool:
        """Count `size` more bytes that this connection holds; False if there is no room for them.

        To make room, connections that wait for their clients are closed, the longest first, but not this one.
        """
        if self.budget.arrive(size):
            return True
        for waiting in (self._strangers, self._known):
            for each in [each for each in waiting if each.held and each is not connection]:
                self._evict(each, "the worker needed the memory for another client")
                if self.budget.has_room:
                    return True
        return False

    def drop(self, size: int) -> None:
        """Stop counting this many bytes."""
        self.budget.leave(size)

    # Time

    async def watch(self) -> None:
        """Check the time limits of all connections in a loop, and return memory after many have closed."""
        limits = self.limits
        pause = min(1.0, min(limits.head, limits.arriving, limits.leaving) / 4)
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(pause)
            now = loop.time()
            for each in list(self._all):
                each.look(now)
            if self.evicted:
                log.warning("disconnected %d slow clients to make room", self.evicted)
                self.evicted = 0
            if self._gone >= _CROWD:
                trim_memory()
                self._gone = 0


def room(wanted: int) -> int:
    """How many connections the limit of file descriptors allows, at most `wanted`.

    The soft limit is raised as needed, up to the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = wanted + BACKLOG + _OTHERS
    if soft < need:
        soft = min(need, hard) if hard != resource.RLIM_INFINITY else need
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft - min(_OTHERS, soft // 4) - min(BACKLOG, soft // 4)))


# One of them


class Connection(H11Protocol):
    """A connection that enforces the limits, and that a request can abort."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._wire = self.conn = Wire(self._seen)
        self.address = ""
        self._all = connections
        self._limits = connections.limits
        self._answered = False  # whether an earlier request of this client was answered
        self._until: float | None = None  # the deadline of a head or a body; None: it waits for neither
        self._kept = 0  # bytes of the current request
        self._unread: tuple[float, int] | None = None  # since when the client reads too slowly, and the unread bytes
        self._unpaid = 0  # unread bytes that no request has taken from the budget
        self._lost = False
        self._paid: list[Taken] = []  # for answers that are written, or about to be
        self._last = False  # true while the worker stops: the next request is the last one

    @property
    def held(self) -> int:
        """The bytes of its request and of its unread answer."""
        return self._kept + self._unpaid + sum(each.size for each in self._paid if self._unread)

    # The life of a connection

    def connection_made(self, transport: Any) -> None:
        """Wait for a request, if there is room for this connection."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.app_state: dict[str, Any] = {**self.app_state, CONNECTION: self}
        if refused := self._all.enter(self):
            transport.write(_problem_response(503, refused))
            transport.close()
        else:
            self._wait(self._limits.head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release all that the connection holds."""
        self._all.leave(self)
        self._until = None
        self._lost = True
        self._release()
        self._read()
        for each in self._paid:
            each.give_back()
        self._paid.clear()
        super().connection_lost(exc)
        # All of these refer back to the connection. Left in place, they would keep it and some 20 KB in memory until
        # the next full garbage collection, perhaps long after thousands of other connections.
        self._wire.forget()
        self.app_state.clear()
        self.scope = self.cycle = None  # type: ignore[assignment]  # their state before the first request

    def data_received(self, data: bytes) -> None:
        """Read data; the first byte of a request starts its time limit."""
        if self.transport.is_closing():
            return
        if self._until is None and self._complete():
            self._wait(self._limits.head)
        super().data_received(data)
        if self._last and self.cycle is not None:
            self.cycle.keep_alive = False

    def _seen(self, event: Any) -> None:
        """Note an event that h11 has read."""
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
        """Release the bytes of this request, and wait for the next one."""
        self._answered = True
        self._release()
        if self.conn.their_state is h11.SEND_BODY:
            pass  # answered before the body arrived: the rest of it is discarded until its time limit
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
        """Note that the client reads more slowly than the answer is written."""
        super().pause_writing()
        self._leave_unread(self.loop.time())

    def _leave_unread(self, now: float) -> None:
        self._unread = (now, self.transport.get_write_buffer_size())
        self._unpaid = max(0, self._unread[1] - sum(each.size for each in self._paid))
        self._all.waits(self, known=False)
        if not self._all.hold(self, self._unpaid):
            self.abort()

    def resume_writing(self) -> None:
        """Note that the client has read most of the answer."""
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
            self._leave_unread(now)  # close() would wait until the client has read everything
        elif self._until is not None and now > self._until and not self.flow.read_paused:
            self.end(408, "the request did not arrive in time")

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, as no other request came."""
        if self.transport.get_write_buffer_size():
            self.abort()  # closing would wait until the client has read the last answer
        else:
            super().timeout_keep_alive_handler()

    # Bytes

    def hold(self, size: int) -> None:
        """Count bytes that are kept for this request. Disconnects the client if there is no room for them."""
        if self.transport.is_closing():
            return  # the request may still run for a moment, and these bytes would never be subtracted
        self._kept += size
        if not self._all.hold(self, size):
            self.end(503, "this worker holds the maximum number of bytes of requests and answers")

    def pay(self, taken: Taken) -> None:
        """Let the bytes taken from the budget cover the coming answer."""
        taken.reader = self._too_slow
        self._paid.append(taken)

    def answered(self, taken: Taken) -> None:
        """Give back the taken bytes once the client has read the answer."""
        taken.written = True
        if self._unread is None or self._lost:
            self._give_back(taken)

    def _give_back(self, taken: Taken) -> None:
        taken.give_back()
        if taken in self._paid:
            self._paid.remove(taken)

    def _too_slow(self, seconds: float) -> bool:
        """Disconnect a client that has been reading its answer slowly for this long; return whether it was."""
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
        """Serve the request that runs or arrives, and close the connection after it.

        A connection that is idle after an answer is closed at once. A client that has just connected sends its first
        request; if its connection were closed instead, it could not know whether the request was served.
        """
        self._last = True
        begun = self._until is not None if self._answered else bool(self.conn.trailing_data[0])
        if not self._complete() or (self._answered and not begun and not _has_unread_bytes(self.transport)):
            super().shutdown()
        elif not begun:
            end = self.loop.time() + _LAST
            self._until = end if self._until is None else min(self._until, end)

    def end(self, status: int, why: str) -> None:
        """Disconnect the client, with this answer if it waits for one and has read the earlier answers."""
        self._until = None
        self._release()
        if self._unread is not None or not (self._complete() or not self.cycle.response_started):
            self.abort()
            return
        if self.transport.is_closing():
            return
        if not self._complete() or self.conn.trailing_data[0]:
            self.transport.write(_problem_response(status, why))  # bypasses h11, whose state may not allow it
        if not self._complete():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, and close the connection."""
        self.transport.write(_problem_response(400, msg))
        self.transport.close()

    def abort(self) -> None:
        """Disconnect the client at once, even if it has unread bytes."""
        self._until = None
        self.transport.abort()


class Wire(h11.Connection):
    """h11's reading of HTTP. It passes each event to the connection, and refuses a body with two lengths."""

    def __init__(self, seen: Callable[[Any], None]) -> None:
        super().__init__(h11.SERVER, _HEAD)
        self._seen: Callable[[Any], None] | None = seen

    def forget(self) -> None:
        """Pass no further events to the connection."""
        self._seen = None

    def next_event(self) -> Any:
        """Return the next event. Raises RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            # A proxy that uses the other length would take the rest of the body for another request.
            if b"content-length" in names and b"transfer-encoding" in names:
                raise h11.RemoteProtocolError("a request has both Content-Length and Transfer-Encoding")
            if (absolute := _ABSOLUTE.fullmatch(event.target)) is not None:
                event = _in_origin_form(event, absolute[1], absolute[2])
        if self._seen is not None:
            self._seen(event)
        return event


def _in_origin_form(event: Any, host: bytes, path: bytes) -> h11.Request:
    """The request as a client that uses no proxy sends it. Its target decides the host: RFC 9112, section 3.2.2."""
    headers = [(name, host if name == b"host" else value) for name, value in event.headers]
    target = path if path.startswith(b"/") else b"/" + path
    return h11.Request(method=event.method, headers=headers, target=target, http_version=event.http_version)


def _problem_response(status: int, why: str) -> bytes:
    reason, error = _PROBLEMS[status]
    problem = {"type": "about:blank", "title": reason, "status": status, "detail": why, "error": error}
    body = orjson.dumps(problem)
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/problem+json\r\nContent-Length: {len(body)}\r\n"
    later = "Retry-After: 1\r\n" if status == 503 else ""
    return f"{head}{later}Connection: close\r\n\r\n".encode() + body


def _has_unread_bytes(transport: Any) -> bool:
    """Whether bytes have arrived that were not read yet."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))
