"""What was asked and answered, and what was found afterwards. Law: frozen values; a write carries its own name.

A write's name stands in everything that it changes, between << and >>, so that it is found in whatever keeps it: in
a message, in a row of SQL, in what was put aside. It says who wrote, at which level, the how manieth, and when it was
begun in microseconds of the clock that all processes of a machine share: `<<w0:memory:12:8123456789>>`.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

_NAME = re.compile(rb"<<([\w.'-]+:[\w.:-]+:\d+:\d+)>>")


@dataclass(frozen=True, slots=True)
class Write:
    """A write that ended. `version` is 0 if it was not acknowledged: then `error` says why."""

    name: str
    record: str
    level: str
    writer: str
    start: float
    end: float
    version: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Read:
    """A state that was read: `count` commits, the last of them `last`. `fresh`: the server was asked."""

    reader: str
    record: str
    start: float
    end: float
    count: int
    last: str
    fresh: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What is there of a record at the end.

    `shown`: the writes whose messages are read, in order; `count` and `version` are read with them. `archived`: those
    in SQL's history, by (epoch, version); `warm`: those anywhere in Redis. `branched` and `quarantined`: those put
    aside, with the cause. `problem`: it could not be read, and why.
    """

    record: str
    version: int = 0
    count: int = 0
    shown: tuple[str, ...] = ()
    archived: tuple[tuple[str, int, str], ...] = ()
    branched: dict[str, str] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)
    warm: frozenset[str] = frozenset()
    problem: str = ""


def name_of(writer: str, level: str, number: int, start: float) -> str:
    """The name of a write; a level's colon becomes a point."""
    return f"{writer}:{level.replace(':', '.')}:{number}:{int(start * 1e6)}"


def marked(name: str) -> str:
    """The name as it is written down."""
    return f"<<{name}>>"


def names_in(data: bytes | str) -> list[str]:
    """The names that stand in there, each once, in their order."""
    raw = data.encode("utf-8", "replace") if isinstance(data, str) else data
    return list(dict.fromkeys(found.decode() for found in _NAME.findall(raw)))


def begun(name: str) -> float:
    """When a write was begun, by time.monotonic()."""
    return int(name.rpartition(":")[2]) / 1e6


def now() -> float:
    """The clock that all processes of this machine share, in seconds."""
    return time.monotonic()
