"""Responses: JSON, errors, and answers that are sent as they are made.

Law: one table maps errors to statuses, and error texts do not show internal details to clients. A client that reads
slowly costs a bounded number of bytes, and a client that reconnects to a stream misses no event.

Errors are problem details (RFC 9457). Clients see the text of an error only if it is about their own request. Errors of
an unavailable server, a setting or stored bytes name addresses, roles and files, so their texts go to the log.

Events are server-sent events, each with the position after it. The process buffers a bounded number of them; the others
wait in Redis. A client that reads nothing for a while is disconnected, and continues from `Last-Event-ID` when it
reconnects. A download is read a page at a time, as its client takes it. Source: the WHATWG HTML standard, "Server-sent
events".

A position counts the events of each partition, of all tenants together. In plain text it would reveal how busy other
tenants are, and when a given record of theirs may have changed. So callers of one tenant get it encrypted, and padded
to one of a few lengths. Every worker of the store can decrypt it: the key is derived from the id of the archive, which
is never part of an answer. Callers of all tenants get the position in plain text.

Design: sections 23, 28.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import logging
import os
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from http import HTTPStatus
from importlib.resources.abc import Traversable
from typing import Any, Protocol
from urllib.parse import quote

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from distributed_state.conversation.output import AsyncOutput
from distributed_state.errors import (
    AccessDenied,
    Backpressure,
    ColdUnavailable,
    ConfigurationError,
    Conflict,
    CorruptState,
    Deleted,
    DurabilityUnknown,
    Fenced,
    Interrupted,
    InvalidTransition,
    InvalidValue,
    Locked,
    NotFound,
    NotPermitted,
    RecoveryInProgress,
    StateError,
    Stopped,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UsageExceeded,
    WarmUnavailable,
)
from distributed_state.events.consumer import AsyncEvents
from distributed_state.programs.service import requests
from distributed_state.programs.service.connections import CONNECTION
from distributed_state.programs.service.limits import Budget, Buffered, Limits, Taken
from distributed_state.programs.service.requests import IF_MATCH, IF_NONE_MATCH, LEASE, Query, copying, turn
from distributed_state.results import Event, OutputPart
from distributed_state.store.export import PAGE, Export

log = logging.getLogger(__name__)

# The most specific class wins. Any other error is a fault of the worker or of the stored data: 500.
STATUS: dict[type[BaseException], int] = {
    Unauthenticated: 401,
    AccessDenied: 403,
    NotFound: 404,
    Conflict: 409,
    InvalidTransition: 409,
    UsageExceeded: 409,
    Interrupted: 409,
    Stopped: 409,
    Deleted: 410,
    TooLarge: 413,
    InvalidValue: 422,
    Locked: 423,
    ConfigurationError: 501,  # the request needs a setting that the service does not have
    NotPermitted: 503,  # an operator has disabled the service's user, or is changing its password
    Fenced: 503,  # the lease was lost, nothing was written: retry
    Unavailable: 503,
    DurabilityUnknown: 503,  # applied or possibly applied: see _UNKNOWN
}
_LATER = frozenset({423, 429, 503})  # the same request may be repeated after a while
# Clients get the texts of these errors, which are about the request. For all other errors they get a text of _SAID.
PUBLIC = (
    Unauthenticated, AccessDenied, NotFound, Conflict, InvalidTransition, UsageExceeded, Interrupted, Stopped, Deleted,
    InvalidValue,
)  # fmt: skip
_SAID: dict[type[BaseException], str] = {
    Locked: "another caller holds the record's lease",
    Fenced: "the lease was lost, and nothing was written",
    WarmUnavailable: "the store did not answer in time; repeat the request with the same Idempotency-Key",
    ColdUnavailable: "the archive did not answer in time, and the answer is only there",
    RecoveryInProgress: "the store is recovering; nothing was written",
    Backpressure: "the store is temporarily full; nothing was written",
    Unavailable: "the service cannot answer this now; repeat a write with the same Idempotency-Key",
    CorruptState: "stored data cannot be read; see the service's log",
    NotPermitted: "the store refuses the service's login; see the service's log",
    ConfigurationError: "the service is not configured for this; see its log",
    StateError: "the worker failed; see its log",
}
# A turn that is repeated with its request id is completed; without one the repetition would be a second turn.
_APPLIED = "the turn is applied, but some of its changes to other records are not: repeat it with the same request id"
_UNKNOWN = (
    "the write may have been applied: read the record before you repeat it, and repeat it with an Idempotency-Key"
)
_HTTP = {
    404: "NotFound",
    405: "MethodNotAllowed",
    415: "UnsupportedMediaType",
    421: "UnknownHost",
    429: "TooManyRequests",
    501: "NotImplemented",
    503: "Unavailable",
}
_DETAIL = 500  # characters
_QUIET = 60.0  # seconds between two log lines about the same missing setting
_logged: dict[str, float] = {}
PROBLEM = "application/problem+json"


def encode(value: Any) -> bytes:
    """Encode a value of the store as JSON."""
    try:
        return orjson.dumps(value)
    except TypeError:
        # The store keeps large integers and lone surrogates, which orjson does not write.
        return json.dumps(value, separators=(",", ":")).encode()


def answer(
    value: Any, status: int = 200, *, version: int | None = None, headers: dict[str, str] | None = None
) -> Response:
    """Return the response to a successful request; its ETag is the `version` of the record."""
    response = Response(encode(value), status, headers, media_type="application/json")
    response.headers["Cache-Control"] = "private, no-cache"  # only the client caches it, and revalidates it
    if version is not None:
        response.headers["ETag"] = f'"{version}"'
    return response


def refusal(error: Exception, request: Request | None = None) -> Response:
    """Return the response to a request that raised this error."""
    if isinstance(error, HTTPException):
        name = _HTTP.get(error.status_code, "HTTPException")
        return _refused(name, str(error.detail), error.status_code, request, dict(error.headers or {}))
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)
    if not isinstance(error, StateError):
        log.error("request failed", exc_info=error)
        return _refused("InternalError", _SAID[StateError], 500, request, {})
    if status == 500 or isinstance(error, NotPermitted):
        log.error("request failed: %s: %s", type(error).__name__, error)
    elif status == 501:
        log_seldom(str(error))
    elif status == 503:
        log.info("request refused: %s: %s", type(error).__name__, error)
    found = _conditional(error, status, request)
    return _refused(type(error).__name__, said(error), found, request, {}, _found(error))


def log_seldom(problem: str) -> None:
    """Log a missing setting at most once a minute, so that repeated requests do not fill the log."""
    about = problem.partition(":")[0]
    now = time.monotonic()
    if now - _logged.get(about, -_QUIET) >= _QUIET:
        _logged[about] = now
        log.warning("request refused: %s", problem)


def said(error: StateError) -> str:
    """The text of an error that its client may see."""
    if isinstance(error, PUBLIC):
        return str(error)
    if isinstance(error, DurabilityUnknown):
        return _UNKNOWN if error.request_id is None else _APPLIED
    return next(_SAID[kind] for kind in type(error).__mro__ if kind in _SAID)


def _conditional(error: StateError, status: int, request: Request | None) -> int:
    """The status; 412 if a condition of the request does not hold."""
    if request is not None:
        if isinstance(error, Conflict) and (IF_MATCH in request.headers or IF_NONE_MATCH in request.headers):
            return 412
        if isinstance(error, Fenced) and LEASE in request.headers:
            return 412
    return status


def _found(error: StateError) -> dict[str, Any]:
    """Details that a caller needs to continue, such as the version that was found."""
    names: tuple[str, ...] = ()
    if isinstance(error, Deleted):
        names = ("version",) if error.expired is None else ("version", "expired", "begins_again")
    elif isinstance(error, (Conflict, DurabilityUnknown)):
        names = ("version",)
    elif isinstance(error, InvalidTransition):
        names = ("phase", "event")
    elif isinstance(error, UsageExceeded):
        names = ("tokens", "limit")
    elif isinstance(error, Stopped):
        names = ("reason",)
    return {name: getattr(error, name) for name in names}


def _refused(
    name: str, detail: str, status: int, request: Request | None, headers: dict[str, str],
    found: dict[str, Any] | None = None,
) -> Response:  # fmt: skip
    problem: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail[:_DETAIL],
    }
    problem |= found or {}
    if request is not None:
        problem["instance"] = requests.request_id(request)
    response = Response(encode(problem | {"error": name}), status, headers, media_type=PROBLEM)
    if status in _LATER:
        response.headers.setdefault("Retry-After", "1")
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if status == 413:
        response.headers["Connection"] = "close"  # so that the rest of the body need not be read
    return response


class PaidResponse(Response):
    """A response that holds bytes of the budget until it is sent, or its client has left."""

    def __init__(self, response: Response, taken: Taken) -> None:
        self._response = response
        self._taken = taken

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        # Servers that do not count connections, such as those of tests, do not provide a connection.
        connection = scope.get("state", {}).get(CONNECTION)
        if connection is not None:
            connection.pay(self._taken)
        try:
            await self._response(scope, receive, send)
        finally:
            if connection is None:
                self._taken.give_back()
            else:
                connection.answered(self._taken)


async def compress(response: Response) -> None:
    """Compress the body in a thread: compressing megabytes takes as long as many requests."""
    response.body = await asyncio.to_thread(gzip.compress, bytes(response.body), 1)
    response.headers["Content-Encoding"] = "gzip"
    response.headers["Content-Length"] = str(len(response.body))
    if (tag := response.headers.get("ETag")) is not None:
        response.headers["ETag"] = f'{tag[:-1]}{GZIP}"'  # other bytes than without compression


GZIP = "-gzip"  # ends the ETag of a compressed answer
_TOGETHER = 64 * 1024  # bytes in one write
_RETRY_MS = 1000
_LOOK_SECONDS = 1.0  # after which the end of a turn is noticed that streamed nothing, so that nothing shows its end
_MANY = 8  # a stream with this many waiting events counts as catching up
_NONCE = 12  # bytes
_STEP = 256  # lengths of positions are multiples of it
A_PAGE = 4 * PAGE  # bytes that a page of lines takes while it is made: stored, unpacked, written, encoded


# Events


class EventQuery(Query):
    """Selects events: `types` are names or patterns, repeated or separated by commas; `since` is a position."""

    types: list[str] = Field(default_factory=list)
    since: str | None = None


class Stream(Response):
    """Writes server-sent events until the client disconnects or is too slow, or the worker stops."""

    media_type = "text/event-stream"

    def __init__(
        self, limits: Limits, over: Callable[[Stream], None], count: Callable[[int], None], buffered: Buffered
    ) -> None:
        # `over` is called when the stream ends, `count` gets the bytes sent
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._limits = limits
        self._over = over
        self._count = count
        self.buffered = buffered
        """The bytes that the stream holds, including those of waiting events."""
        self._ended = False

    async def join(self) -> None:
        """Begin before the answer does, so that an error still gets its own status."""
        raise NotImplementedError

    def end(self) -> None:
        """End the stream. The client reconnects, here or to another worker, with its position."""
        self._ended = True

    async def _next(self) -> bytes | None:
        """Return the next bytes to write, None at the end."""
        raise NotImplementedError

    async def _close(self) -> None:
        raise NotImplementedError

    def _first(self) -> str:
        """Return lines to begin with."""
        return ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write events until the client leaves or the events end."""
        leaving = asyncio.create_task(self._notice_leaving(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._write(send, f"retry: {_RETRY_MS}\n{self._first()}\n".encode())
            while (block := await self._next()) is not None:
                await self._write(send, block)
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            log.info("a client of an event stream read nothing for %g s and was disconnected", self._limits.slow)
            connection = scope.get("state", {}).get(CONNECTION)
            if connection is not None:
                connection.abort()  # closing would wait until the client has read the buffer
                await asyncio.wait((leaving,), timeout=1)  # or uvicorn would log the response as incomplete
        finally:
            self._over(self)
            leaving.cancel()
            try:
                await self._close()
            except StateError as error:
                log.warning("an event stream ended: %s", error)

    async def _write(self, send: Send, block: bytes) -> None:
        self._count(len(block))
        self.buffered.count(len(block))
        async with asyncio.timeout(self._limits.slow):
            await send({"type": "http.response.body", "body": block, "more_body": True})
        self.buffered.count(-len(block))

    async def _notice_leaving(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end()


class EventStream(Stream):
    """Writes the store's events."""

    def __init__(
        self,
        events: AsyncEvents,
        limits: Limits,
        over: Callable[[Stream], None],
        hears: Callable[[Event], bool],
        count: Callable[[int], None],
        shown: Callable[[str], str],
        buffered: Buffered,
    ) -> None:
        # `hears` selects the events of this client, `shown` turns a position into the client's form of it
        super().__init__(limits, over, count, buffered)
        self._events = events
        self._hears = hears
        self._shown_position = shown
        self._sent_position = ""

    async def join(self) -> None:
        """Subscribe."""
        await self._events.join()

    def end(self) -> None:
        """End the stream."""
        super().end()
        self._events.end()

    async def _next(self) -> bytes | None:
        """Return the next bytes to write, None at the end."""
        event = await self._readable(self._limits.heartbeat)
        if event is None:
            # A position without an event lets the client skip events of other types.
            return None if self._ended else b":\n%b\n" % self._first().encode()
        if self._events.waiting < _MANY:
            return await self._block(event)
        # Hundreds of streams that catch up at once would delay all other requests.
        async with turn():
            return await self._block(event)

    async def _block(self, event: Event) -> bytes:
        """This event, and the events that already wait after it, as one block of bytes."""
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
        """Return the next event that the client may receive, or None after `timeout` seconds.

        A corrupt event is skipped: a client that reconnects would get the same error forever.
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
        return b"%bevent: %b\ndata: %b\n\n" % (self._first().encode(), event.type.encode(), encode(event.to_dict()))

    def _first(self) -> str:
        """Return the line with the client's position, if it changed since the last one."""
        position = self._events.position
        if position == self._sent_position:
            return ""
        self._sent_position = position
        return f"id: {self._shown_position(position)}\n"

    async def _close(self) -> None:
        await self._events.close()


class Form(Protocol):
    """A form of the output of turns, as a client reads it."""

    first: str
    """Lines to begin with."""
    last: bytes
    """The end of the stream."""
    over: bool
    """Whether what was shown last is all that the client wants."""
    patient: bool
    """Whether the client waits although no turn runs."""

    def show(self, part: OutputPart) -> bytes:
        """A part as events."""


class OutputStream(Stream):
    """Writes the output of a session's turns."""

    def __init__(
        self,
        output: AsyncOutput,
        form: Form,
        limits: Limits,
        over: Callable[[Stream], None],
        count: Callable[[int], None],
        buffered: Buffered,
    ) -> None:
        super().__init__(limits, over, count, buffered)
        self._output = output
        self._form = form
        self._waiting: OutputPart | None = None
        self._done = False

    async def join(self) -> None:
        """Begin to follow, and look at what is there."""
        self._waiting = await self._output.next(0)

    @property
    def waiting(self) -> OutputPart | None:
        """The first part; None if there is nothing to be seen yet."""
        return self._waiting

    @property
    def over(self) -> bool:
        """Whether nothing will come that the client waits for."""
        return self._waiting is None and (self._output.over or not (self._form.patient or self._output.running))

    def _first(self) -> str:
        return self._form.first

    def end(self) -> None:
        """End the stream."""
        super().end()
        self._closing = asyncio.ensure_future(self._output.close())  # a reference, or the task may be collected

    async def _next(self) -> bytes | None:
        if self._done:
            return None
        part, self._waiting = self._waiting, None
        try:
            seconds = self._limits.heartbeat if self._form.patient else min(self._limits.heartbeat, _LOOK_SECONDS)
            part = part or await self._output.next(seconds)
        except (WarmUnavailable, ColdUnavailable) as error:
            log.info("an output stream waits: %s", error)
            return b":\n\n"
        except StateError as error:
            log.error("an output stream ends: %s", error)
            return None
        blocks: list[bytes] = []
        size = 0
        while part is not None:
            blocks.append(self._form.show(part))
            size += len(blocks[-1])
            more = size < _TOGETHER and not self._form.over and self._output.ready
            part = await self._output.next(0) if more else None
        if self._form.over or self._output.over or (not blocks and self.over):
            self._done = True
            blocks.append(b"" if self._ended else self._form.last)
        return b"".join(blocks) or (None if self._done else b":\n\n")

    async def _close(self) -> None:
        await self._output.close()


class Positions:
    """Encrypts positions for the callers of one tenant, and decrypts those that were encrypted for it."""

    def __init__(self, archive_id: str, tenant: str) -> None:
        key = hashlib.blake2b(archive_id.encode(), digest_size=32, person=b"event positions")
        self._cipher = AESGCM(key.digest()) if tenant else None
        self._tenant = tenant.encode()

    def seal(self, position: str) -> str:
        """Encrypt a position for the tenant."""
        if self._cipher is None:
            return position
        plain = position.encode()
        nonce = os.urandom(_NONCE)
        sealed = self._cipher.encrypt(nonce, plain.ljust(-(-len(plain) // _STEP) * _STEP), self._tenant)
        return urlsafe_b64encode(nonce + sealed).decode()

    def open(self, sealed: str) -> str:
        """Decrypt a position; "oldest" and "" pass unchanged.

        Raises InvalidValue if it was not sealed for this tenant.
        """
        if self._cipher is None or sealed in ("oldest", ""):
            return sealed
        try:
            data = urlsafe_b64decode(sealed.encode())
            return self._cipher.decrypt(data[:_NONCE], data[_NONCE:], self._tenant).decode().rstrip()
        except (InvalidTag, ValueError) as error:
            raise InvalidValue("this is not a position in this tenant's event stream") from error


# Pages

_TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}


def page_headers() -> dict[str, str]:
    """The headers of a page that loads everything from its own server."""
    return {
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
            "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        ),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }


class PageFiles:
    """The files in the folder of a page, by name."""

    def __init__(self, folder: Traversable, headers: dict[str, str]) -> None:
        self._files = {each.name: each.read_bytes() for each in folder.iterdir()}
        self._headers = headers

    def answer(self, name: str) -> Response:
        """Answer with a file."""
        if name not in self._files:
            raise HTTPException(404)
        return Response(self._files[name], headers=self._headers, media_type=_TYPES[name.rpartition(".")[2]])

    async def serve(self, request: Request) -> Response:
        """Answer with the file that the path names."""
        return self.answer(request.path_params["name"])


# Downloads


class Download(Response):
    """Writes the lines of an export, a page at a time. An error after the first page ends the connection."""

    media_type = "application/jsonl"

    def __init__(
        self,
        lines: list[str],
        export: Export,
        name: str,
        limits: Limits,
        budget: Budget,
        taken: Taken,
        count: Callable[[int], None],
    ) -> None:
        # `lines` are the first lines; `taken` holds their bytes. `count` is called with the bytes that are sent.
        title = quote(name[:200], safe="", errors="replace")
        named = f"attachment; filename=\"export.jsonl\"; filename*=UTF-8''{title}.jsonl"
        super().__init__(headers={"Content-Disposition": named, "Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._lines = lines
        self._export = export
        self._limits = limits
        self._budget = budget
        self._taken = taken
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write all lines, as long as the client reads them in time."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            while self._lines:
                block = "".join(f"{line}\n" for line in self._lines).encode()
                self._lines = []
                self._taken.become(len(block))
                self._count(len(block))
                async with asyncio.timeout(self._limits.slow):
                    await send({"type": "http.response.body", "body": block, "more_body": True})
                del block
                self._taken.give_back()
                self._taken = await self._budget.take(self._taken.party, A_PAGE)
                async with copying(self._taken.party):
                    self._lines = await self._export.following()
        except (TimeoutError, StateError, HTTPException) as error:
            slow = f"the client read nothing for {self._limits.slow:g} s"
            log.warning("an export was cut off: %s", slow if isinstance(error, TimeoutError) else error)
            connection = scope.get("state", {}).get(CONNECTION)
            if connection is None:
                raise
            connection.abort()  # a regular end would make the file look complete
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):  # or uvicorn would log the response as incomplete
                    await receive()
            return
        finally:
            self._taken.give_back()
        await send({"type": "http.response.body", "body": b""})
