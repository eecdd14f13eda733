"""How durable a write is before it is acknowledged, and until when the hot tier may answer a read.

Law: a level is one of a few words, and each has one meaning. A hot entry is valid as long as the subscription under
which it was read. `Freshness` is the only mutable value here, because each proof of a subscription extends it; each
subscription to a partition has its own.

Design: sections 7, 14.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from distributed_state.errors import InvalidValue

EVERY = -1  # all replicas that may be promoted
_FORM = re.compile(r"(memory|fsynced|archived)|replicated(?::([1-9]\d{0,2}))?", re.ASCII)
ALLOWED = "'memory', 'replicated', 'replicated:n' (n replicas), 'fsynced' or 'archived'"


@dataclass(frozen=True, slots=True)
class Level:
    """A level by its text. `replicas` is how many must have the write: EVERY for all that may be promoted, or 0."""

    text: str
    replicas: int = 0


@lru_cache(maxsize=256)
def _level(text: str) -> Level | None:
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    return Level(text) if found[1] else Level(text, int(found[2] or EVERY))


def level_of(text: Any) -> Level:
    """The level of this name, the same object each time. Raises InvalidValue for another text."""
    level = _level(text) if isinstance(text, str) else None
    if level is None:
        raise InvalidValue(f"durability is {ALLOWED}, not {text!r:.80}")
    return level


MEMORY = level_of("memory")
FSYNCED = level_of("fsynced")
ARCHIVED = level_of("archived")


def check_staleness(seconds: Any) -> None:
    """Raise InvalidValue unless this is a valid `max_staleness`."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise InvalidValue(f"max_staleness is a number of seconds from 0 on, not {seconds!r:.80}")


class Freshness:
    """`good_until` is a time by the monotonic clock; 0 before the first proof."""

    __slots__ = ("good_until", "partition")

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.good_until = 0.0

    @property
    def over(self) -> bool:
        """Whether the subscription has ended, so that hot never answers from entries read under it."""
        return self.good_until < 0

    def prove(self, until: float) -> None:
        """Allow answers until this time, unless the subscription has ended."""
        if not self.over:
            self.good_until = max(self.good_until, until)

    def end(self) -> None:
        """Stop answering forever."""
        self.good_until = -1.0


UNSUBSCRIBED = Freshness(-1)  # of records read without a subscription
UNSUBSCRIBED.end()
