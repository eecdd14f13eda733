"""Bodies of requests. Law: one is here whole before its request takes the place of another, and is bounded till then.

Design: section 24.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import ClientDisconnect, Request

from distributed_state.errors import InvalidValue, TooLarge, Unavailable
from distributed_state.programs.service import fairness, shape
from distributed_state.programs.service.limits import Limits


async def receive(request: Request, limits: Limits) -> int:
    """Read the body into `request.state.body`, and see that it is of a shape that may be read as JSON.

    Returns the bytes that it takes when it is read, at most about, beside those of its text.

    Raises TooLarge and InvalidValue, and Unavailable if the client leaves before its end.
    """
    request.state.body = data = await _bytes(request, limits.body)
    if not data:
        return 0
    found = await fairness.in_turn(len(data), lambda: shape.values(data, limits.values, limits.depth))
    return found * shape.A_VALUE


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


def bound(given: dict[str, Any], limits: Limits) -> None:
    """Raise InvalidValue if a member of a body has more members than one request may set, or append."""
    for name, value in given.items():
        most = limits.fields if isinstance(value, dict) else limits.messages
        if isinstance(value, (dict, list)) and len(value) > most:
            raise InvalidValue(f"{name} has {len(value)} entries, more than the {most} of one request: send several")
