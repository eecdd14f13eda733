"""Answers as JSON. Law: which status an error has is said here, in one table, and nowhere else."""

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

# The nearest class that an error is of counts. What is not here is a fault of the worker or of what is stored: 500.
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
    Fenced: 503,  # the lease was lost, nothing was written: to be repeated
    Unavailable: 503,
}
_LATER = frozenset({423, 429, 503})  # the same request may be repeated after a while
_HTTP = {404: "NotFound", 405: "MethodNotAllowed"}


def encode(value: Any) -> bytes:
    """JSON text of what the store gave."""
    try:
        return orjson.dumps(value)
    except TypeError:
        # Large integers and lone surrogates, which the store keeps and orjson does not write.
        return json.dumps(value, separators=(",", ":")).encode()


def answer(value: Any, status: int = 200) -> Response:
    """An answer that went well."""
    return Response(encode(value), status, media_type="application/json")


def refusal(error: Exception) -> Response:
    """The answer to a request that raised this."""
    if isinstance(error, HTTPException):
        name = _HTTP.get(error.status_code, "HTTPException")
        message = error.detail
        status = error.status_code
        return _refused(name, message, status, dict(error.headers or {}))
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)
    if isinstance(error, DurabilityUnknown) and error.request_id is not None:
        status = 503  # applied in part: the same request, repeated under its id, completes it. Without one: not again
    if not isinstance(error, StateError):
        # What went wrong inside is for the log: its text may hold anything.
        log.error("a request failed", exc_info=error)
        return _refused("InternalError", "the worker failed; its log says how", 500, {})
    if status == 500:
        log.error("a request failed: %s: %s", type(error).__name__, error)
    return _refused(type(error).__name__, str(error), status, {})


def _refused(name: str, message: str, status: int, headers: dict[str, str]) -> Response:
    response = answer({"error": name, "message": message}, status)
    response.headers.update(headers)
    if status in _LATER:
        response.headers["Retry-After"] = "1"
    if status == 413:
        response.headers["Connection"] = "close"  # the rest of the body is not worth reading
    return response
