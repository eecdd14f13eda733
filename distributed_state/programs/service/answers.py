"""Responses as JSON. Law: one table maps errors to statuses, and it is here."""

from __future__ import annotations

import json
import logging
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from distributed_state.errors import (
    AccessDenied,
    Backpressure,
    Conflict,
    Deleted,
    DurabilityUnknown,
    Fenced,
    Interrupted,
    InvalidTransition,
    InvalidValue,
    Locked,
    NotFound,
    StateError,
    TooLarge,
    Unavailable,
)

log = logging.getLogger(__name__)

# The most specific class counts. Any other error is a fault of the worker or of the stored data: 500.
STATUS: dict[type[BaseException], int] = {
    AccessDenied: 403,
    NotFound: 404,
    Conflict: 409,
    InvalidTransition: 409,
    Interrupted: 409,
    Deleted: 410,
    TooLarge: 413,
    InvalidValue: 422,
    Locked: 423,
    Backpressure: 429,
    Fenced: 503,  # the lease was lost, nothing was written: retry
    Unavailable: 503,
    DurabilityUnknown: 503,  # applied, or perhaps: see _UNKNOWN
}
_LATER = frozenset({423, 429, 503})  # the same request may be repeated after a while
# A repeated turn with a request id completes what it began; without one it would be a second turn.
_UNKNOWN = "it may have been applied: read the conversation before it is sent again, with a request_id"
_HTTP = {404: "NotFound", 405: "MethodNotAllowed"}


def encode(value: Any) -> bytes:
    """Encode a value of the store as JSON."""
    try:
        return orjson.dumps(value)
    except TypeError:
        # Large integers and lone surrogates, which the store keeps and orjson does not write.
        return json.dumps(value, separators=(",", ":")).encode()


def answer(value: Any, status: int = 200) -> Response:
    """The response to a request that succeeded."""
    return Response(encode(value), status, media_type="application/json")


def refusal(error: Exception) -> Response:
    """The response to a request that raised this error."""
    if isinstance(error, HTTPException):
        name = _HTTP.get(error.status_code, "HTTPException")
        message = error.detail
        status = error.status_code
        return _refused(name, message, status, dict(error.headers or {}))
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)
    if not isinstance(error, StateError):
        # An unexpected error is for the log alone: its text may hold anything.
        log.error("a request failed", exc_info=error)
        return _refused("InternalError", "the worker failed; its log says how", 500, {})
    if status == 500:
        log.error("a request failed: %s: %s", type(error).__name__, error)
    message = str(error)
    if isinstance(error, DurabilityUnknown) and error.request_id is None:
        message = f"{message}; {_UNKNOWN}"
    return _refused(type(error).__name__, message, status, {})


def _refused(name: str, message: str, status: int, headers: dict[str, str]) -> Response:
    response = answer({"error": name, "message": message}, status)
    response.headers.update(headers)
    if status in _LATER:
        response.headers["Retry-After"] = "1"
    if status == 413:
        response.headers["Connection"] = "close"  # so that the rest of the body need not be read
    return response
