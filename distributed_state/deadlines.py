"""Values that end by themselves. Law: the deadline stands before the value in the same bytes, so they change together.

`!<milliseconds since 1970> <JSON>`: what replaces the field replaces the deadline too, in Redis, journal and SQL.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from distributed_state.errors import InvalidValue

NEVER = math.inf
_MARK = b"!"
_LONGEST = 100 * 366 * 86400.0


def after(ttl: Any, now: float) -> float:
    """The deadline of a value that lasts `ttl` seconds from now."""
    if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 0 < ttl <= _LONGEST:
        raise InvalidValue(f"a ttl is a number of seconds above 0 and of at most 100 years, not {ttl!r:.80}")
    return now + ttl


def wrap(data: bytes, deadline: float) -> bytes:
    """The stored form of a value that ends at `deadline`, in seconds since 1970."""
    return data if deadline == NEVER else b"%b%d %b" % (_MARK, math.ceil(deadline * 1000), data)


def marked(data: bytes | None) -> bool:
    """Tell whether stored bytes carry a deadline."""
    return data is not None and data[:1] == _MARK


def split(data: bytes) -> tuple[float, bytes]:
    """Deadline and value of stored bytes; NEVER for what has none."""
    if data[:1] != _MARK:
        return NEVER, data
    number, space, rest = data[1:].partition(b" ")
    return (int(number) / 1000, rest) if space and number.isdigit() else (NEVER, data)


def over(data: bytes, now: float) -> bool:
    """Tell whether stored bytes are past their deadline."""
    return data[:1] == _MARK and split(data)[0] <= now


def earliest(values: Iterable[bytes]) -> float:
    """The first deadline among stored values."""
    return min((split(data)[0] for data in values if data[:1] == _MARK), default=NEVER)
