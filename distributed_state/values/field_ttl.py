"""Values that expire. Law: a deadline is stored before its value in the same bytes, so they change together.

`!<milliseconds since 1970> <JSON>`: replacing the field replaces the deadline too, in Redis, journal and SQL.
For a message, which has no deadline, the same mark holds its commit time; commit.lua adds it. Before a reserved field's
value commit.lua notes a number (`noted`): the mark holds it plus 10^15, which is not a deadline.

Design: section 10.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from distributed_state.errors import InvalidValue

NEVER = math.inf
_MARK = b"!"
_LONGEST = 100 * 366 * 86400.0
_NUMBERS = 10**15  # ms, in the year 33658
NOTED = re.compile(rb"!1(\d{15}) ")
"""Matches the mark of a number that commit.lua noted."""


def after(ttl: Any, now: float) -> float:
    """The deadline of a value that lasts `ttl` seconds from now."""
    if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 0 < ttl <= _LONGEST:
        raise InvalidValue(f"a ttl is a number of seconds above 0 and of at most 100 years, not {ttl!r:.80}")
    return now + ttl


def span_ms(name: str, seconds: Any) -> int:
    """How long a session may live, in ms; 0 for None and `math.inf`, which mean no limit."""
    if seconds is None or (isinstance(seconds, float) and seconds == NEVER):
        return 0
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0.001 <= seconds <= _LONGEST:
        raise InvalidValue(
            f"{name} is a number of seconds from 0.001 to 100 years, None or math.inf, not {seconds!r:.80}"
        )
    return math.ceil(seconds * 1000)


def parse_lifetime(text: bytes) -> tuple[int, int]:
    """Parse `model.LIFETIME`: how long a session may be idle, and when it ends at the latest, in ms; 0: no limit."""
    idle_ms, _, until_ms = text.partition(b" ")
    return int(idle_ms), int(until_ms)


def end_ms(text: bytes, last_ms: int) -> int:
    """When a session of this lifetime ends, if its last commit was at this time."""
    idle_ms, until_ms = parse_lifetime(text)
    return min(([last_ms + idle_ms] if idle_ms else []) + ([until_ms] if until_ms else []), default=2**63 - 1)


def wrap(data: bytes, deadline: float) -> bytes:
    """The stored form of a value that ends at `deadline`, in seconds since 1970."""
    return data if deadline == NEVER else b"%b%d %b" % (_MARK, math.ceil(deadline * 1000), data)


def dated(data: bytes, time_ms: int) -> bytes:
    """The stored form of a message that was committed at this time."""
    return b"%b%d %b" % (_MARK, time_ms, data)


def note(data: bytes, number: int) -> bytes:
    """The stored form of a value with a number that commit.lua notes: a version, or a time in ms."""
    return dated(data, _NUMBERS + number)


def noted(data: bytes) -> int | None:
    """The number that commit.lua noted with a stored value; None if there is none."""
    found = NOTED.match(data)
    return None if found is None else int(found[1])


def mark(data: bytes) -> bytes:
    """The mark at the beginning of stored bytes, with the space behind it, or nothing."""
    return data[: len(data) - len(split(data)[1])]


def marked(data: bytes | None) -> bool:
    """Whether stored bytes carry a deadline."""
    return data is not None and data[:1] == _MARK


def split(data: bytes) -> tuple[float, bytes]:
    """Deadline and value of stored bytes; NEVER if they have no deadline."""
    if data[:1] != _MARK:
        return NEVER, data
    mark, space, rest = data.partition(b" ")
    if not space or not mark[1:].isdigit():
        return NEVER, data
    number = int(mark[1:])
    return NEVER if number >= _NUMBERS else number / 1000, rest


def over(data: bytes, now: float) -> bool:
    """Whether stored bytes are past their deadline."""
    return data[:1] == _MARK and split(data)[0] <= now


def earliest(values: Iterable[bytes]) -> float:
    """The first deadline among stored values."""
    return min((split(data)[0] for data in values if data[:1] == _MARK), default=NEVER)
