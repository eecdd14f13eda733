"""Responses as JSON. Law: one table maps errors to statuses, and what a client reads of one names nothing inside.

Errors are problem details (RFC 9457). The text of an error is a client's only where it is about what the client asked;
that of an unavailable server, of a setting or of stored bytes names addresses, roles and files, and is for the log.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import time
from http import HTTPStatus
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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
    TooLarge,
    Unauthenticated,
    Unavailable,
    WarmUnavailable,
)
from distributed_state.programs.service import requests
from distributed_state.programs.service.connections import CONNECTION
from distributed_state.programs.service.limits import Taken
from distributed_state.programs.service.requests import IF_MATCH, IF_NONE_MATCH, LEASE

log = logging.getLogger(__name__)

# The most specific class counts. Any other error is a fault of the worker or of the stored data: 500.
STATUS: dict[type[BaseException], int] = {
    Unauthenticated: 401,
    AccessDenied: 403,
    NotFound: 404,
    Conflict: 409,
    InvalidTransition: 409,
    Interrupted: 409,
    Deleted: 410,
    TooLarge: 413,
    InvalidValue: 422,
    Locked: 423,
    ConfigurationError: 501,  # what was asked takes a setting that the service has not
    NotPermitted: 503,  # an operator has switched our user off, or is changing its password
    Fenced: 503,  # the lease was lost, nothing was written: retry
    Unavailable: 503,
    DurabilityUnknown: 503,  # applied, or perhaps: see _UNKNOWN
}
_LATER = frozenset({423, 429, 503})  # the same request may be repeated after a while
# Their texts say what was asked, and are passed on. Of all others a client reads what stands below.
PUBLIC = (Unauthenticated, AccessDenied, NotFound, Conflict, InvalidTransition, Interrupted, Deleted, InvalidValue)
_SAID: dict[type[BaseException], str] = {
    Locked: "somebody else holds the record",
    Fenced: "the lease was lost, and nothing was written",
    WarmUnavailable: "the store did not answer in time; repeat the request with the same Idempotency-Key",
    ColdUnavailable: "the archive did not answer in time, and it alone could tell",
    RecoveryInProgress: "the store is recovering; nothing was written",
    Backpressure: "the store is full for now; nothing was written",
    Unavailable: "the service cannot answer this now; repeat a write with the same Idempotency-Key",
    CorruptState: "stored data cannot be read; the log says which",
    NotPermitted: "the store does not let the service in; its log says why",
    ConfigurationError: "the service is not set up for this; its log says why",
    StateError: "the worker failed; its log says how",
}
# A repeated turn with a request id completes what it began; without one it would be a second turn.
_APPLIED = "the turn is applied, not all that belongs to it is: repeat it under its request id"
_UNKNOWN = "it may have been applied: read the record before it is sent again, and send it with an Idempotency-Key"
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
_QUIET = 60.0  # seconds between two lines of a log about one thing that is not set up
_logged: dict[str, float] = {}
PROBLEM = "application/problem+json"


def encode(value: Any) -> bytes:
    """Encode a value of the store as JSON."""
    try:
        return orjson.dumps(value)
    except TypeError:
        # Large integers and lone surrogates, which the store keeps and orjson does not write.
        return json.dumps(value, separators=(",", ":")).encode()


def answer(
    value: Any, status: int = 200, *, version: int | None = None, headers: dict[str, str] | None = None
) -> Response:
    """The response to a request that succeeded; its ETag is the `version` of the record."""
    response = Response(encode(value), status, headers, media_type="application/json")
    response.headers["Cache-Control"] = "private, no-cache"  # kept by its client alone, which asks whether it holds
    if version is not None:
        response.headers["ETag"] = f'"{version}"'
    return response


def refusal(error: Exception, request: Request | None = None) -> Response:
    """The response to a request that raised this error."""
    if isinstance(error, HTTPException):
        name = _HTTP.get(error.status_code, "HTTPException")
        return _refused(name, str(error.detail), error.status_code, request, dict(error.headers or {}))
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)
    if not isinstance(error, StateError):
        log.error("a request failed", exc_info=error)
        return _refused("InternalError", _SAID[StateError], 500, request, {})
    if status == 500 or isinstance(error, NotPermitted):
        log.error("a request failed: %s: %s", type(error).__name__, error)
    elif status == 501:
        log_seldom(str(error))
    elif status == 503:
        log.info("a request was refused: %s: %s", type(error).__name__, error)
    found = _conditional(error, status, request)
    return _refused(type(error).__name__, said(error), found, request, {}, _found(error))


def log_seldom(problem: str) -> None:
    """Log what the service is not set up for, once a minute: who asks for it again and again fills no log."""
    about = problem.partition(":")[0]
    now = time.monotonic()
    if now - _logged.get(about, -_QUIET) >= _QUIET:
        _logged[about] = now
        log.warning("a request was refused: %s", problem)


def said(error: StateError) -> str:
    """The text of an error for its client."""
    if isinstance(error, PUBLIC):
        return str(error)
    if isinstance(error, DurabilityUnknown):
        return _UNKNOWN if error.request_id is None else _APPLIED
    return next(_SAID[kind] for kind in type(error).__mro__ if kind in _SAID)


def _conditional(error: StateError, status: int, request: Request | None) -> int:
    """The status, 412 where a condition that the request named does not hold."""
    if request is not None:
        if isinstance(error, Conflict) and (IF_MATCH in request.headers or IF_NONE_MATCH in request.headers):
            return 412
        if isinstance(error, Fenced) and LEASE in request.headers:
            return 412
    return status


def _found(error: StateError) -> dict[str, Any]:
    """Details that a caller needs to go on, such as the version that was found."""
    names: tuple[str, ...] = ()
    if isinstance(error, (Conflict, Deleted, DurabilityUnknown)):
        names = ("version",)
    elif isinstance(error, InvalidTransition):
        names = ("phase", "event")
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
    """A response for which bytes were taken: they are given back when the socket has taken it, or its client left."""

    def __init__(self, response: Response, taken: Taken) -> None:
        self._response = response
        self._taken = taken

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        # A server that does not count connections, as in a test, gives none.
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
    """Compress the body, in a thread: for megabytes it takes as long as many requests."""
    response.body = await asyncio.to_thread(gzip.compress, bytes(response.body), 1)
    response.headers["Content-Encoding"] = "gzip"
    response.headers["Content-Length"] = str(len(response.body))
    response.headers["Vary"] = "Accept-Encoding"
