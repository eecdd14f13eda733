"""How hard a write is kept before it is acknowledged. Law: a level is one of a few words, and each has one meaning.

Design: section 14.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from distributed_state.errors import InvalidValue

EVERY = -1  # of the replicas: all that may be promoted
_FORM = re.compile(r"(memory|fsynced|archived)|replicated(?::([1-9]\d{0,2}))?", re.ASCII)
ALLOWED = "'memory', 'replicated', 'replicated:n' (n replicas), 'fsynced' or 'archived'"


@dataclass(frozen=True, slots=True)
class Level:
    """A level by its text. `replicas`: how many have the write, EVERY for all that may be promoted, 0 if none must."""

    text: str
    replicas: int = 0


@lru_cache(maxsize=256)
def _level(text: str) -> Level | None:
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    return Level(text) if found[1] else Level(text, int(found[2] or EVERY))


def level_of(text: Any) -> Level:
    """The level of this name, the same object each time. Raises InvalidValue for what is none."""
    level = _level(text) if isinstance(text, str) else None
    if level is None:
        raise InvalidValue(f"durability is {ALLOWED}, not {text!r:.80}")
    return level


MEMORY = level_of("memory")
FSYNCED = level_of("fsynced")
ARCHIVED = level_of("archived")
