"""Parsing of requests. Law: all input is validated before the store is used, and none is read without a limit."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from distributed_state.errors import InvalidValue, TooLarge, Unavailable
from distributed_state.values import bytes_as_text

MAX_LAST = 10_000


async def body(request: Request, limit: int, *allowed: str) -> dict[str, Any]:
    """Read the body, a JSON object with no other fields than those allowed; {} if there is none."""
    data = await _bytes(request, limit)
    try:
        # Not orjson: it reads large integers as floats, and a value must come back as it was sent.
        given = json.loads(data) if data else {}
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"the body is not JSON: {str(error)[:200]}") from error
    if not isinstance(given, dict):
        raise InvalidValue(f"the body is a JSON object, not {_kind(given)}")
    for name in given:
        if name not in allowed:
            raise InvalidValue(f"the body has {', '.join(allowed)}, not {name!r:.80}")
    return given


async def _bytes(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise TooLarge(f"a body of {announced:.20} bytes is more than {limit}")
    parts = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise TooLarge(f"the body is more than {limit} bytes")
            parts.append(part)
    except ClientDisconnect as error:
        raise Unavailable("the client disconnected before its request was complete") from error
    return b"".join(parts)


def text(given: dict[str, Any], name: str) -> str | None:
    """A field that is a string, or absent."""
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidValue(f"{name} is a string, not {_kind(value)}")
    return value


def fields(given: dict[str, Any], name: str) -> dict[str, Any]:
    """A field that is an object, or absent."""
    value = given.get(name)
    if value is not None and not isinstance(value, dict):
        raise InvalidValue(f"{name} is an object, not {_kind(value)}")
    return value or {}


def values(given: dict[str, Any], name: str) -> dict[str, Any]:
    """A field that is an object of JSON values, and what stands beside it as bytes."""
    return bytes_as_text.together(fields(given, name), fields(given, "bytes"))


def messages(given: dict[str, Any], name: str = "messages") -> list[dict[str, Any]]:
    """A field that is a list of objects, or absent."""
    value = given.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise InvalidValue(f"{name} is a list of messages as {{'role': 'user', 'content': 'hi'}}")
    return value


def number(request: Request, name: str, default: int, most: int) -> int:
    """An integer in the query."""
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdecimal() and len(given) < 10 and int(given) <= most):
        raise InvalidValue(f"{name} is a number from 0 to {most}, not {given!r:.40}")
    return int(given)


def flag(request: Request, name: str) -> bool:
    """A boolean in the query."""
    given = request.query_params.get(name, "false")
    if given not in ("true", "false"):
        raise InvalidValue(f"{name} is true or false, not {given!r:.40}")
    return given == "true"


def header(request: Request, name: str) -> str:
    """A header as UTF-8 text, "" if it was not sent."""
    return request.headers.get(name, "").encode("latin-1").decode("utf-8", "replace")


def _kind(value: Any) -> str:
    names = {"dict": "an object", "list": "a list", "str": "a string", "NoneType": "null", "bool": "true or false"}
    return names.get(type(value).__name__, "a number")
