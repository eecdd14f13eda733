"""How a turn spent its time, and the note about it in the turn's commit. Law: the note does not change the state.

The note is an operation that deletes a field which no record has; the field's name holds the data. A new kind of
operation would stop archivers of earlier releases, which must not skip unknown operations. For them the note deletes an
unknown request: it changes nothing, and they archive, export and import it.

Design: section 13.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from distributed_state.errors import CorruptState
from distributed_state.values import codec
from distributed_state.values.journal import Operation
from distributed_state.values.model import TIMES

Ran = Literal["tool", "model"]
MOST_RUNS = 12  # runs that are kept individually
_DIGITS = 4  # of seconds
_NAME = 40  # characters of a name that are written


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One run of a tool or one call of a model: its name, of which 40 characters are kept, and how long it took."""

    kind: Ran
    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """How a turn spent its time, in seconds by its worker's monotonic clock.

    `total` is the time from the start of the turn until its commit was sent. `lock` was spent waiting for the lease,
    `read` on reads from Redis and SQL, and `elsewhere` was not measured. `runs` has the 12 slowest runs in the order in
    which they ended, and `more` other ones took `more_seconds` together. Concurrent runs may add up to more than the
    turn took. `commit` is the time of the commit itself; None if it is not known, as the commit cannot contain it.
    """

    total: float
    lock: float = 0.0
    read: float = 0.0
    elsewhere: float = 0.0
    runs: tuple[TimedRun, ...] = ()
    more: int = 0
    more_seconds: float = 0.0
    commit: float | None = None


_PARTS = ("total", "lock", "read", "elsewhere")
_KINDS: dict[str, Ran] = {"t": "tool", "m": "model"}


def operation_of(times: TurnTimes) -> Operation:
    """The operation that notes these times, without zero and unknown values."""
    noted: dict[str, Any] = {"total": round(times.total, _DIGITS)}
    if lock := round(times.lock, _DIGITS):
        noted["lock"] = lock
    if asked := round(times.read, _DIGITS):
        noted["read"] = asked
    if elsewhere := round(times.elsewhere, _DIGITS):
        noted["elsewhere"] = elsewhere
    if times.runs:
        noted["runs"] = [[each.kind[:1], each.name[:_NAME], round(each.seconds, _DIGITS)] for each in times.runs]
    if times.more:
        noted["more"] = [times.more, round(times.more_seconds, _DIGITS)]
    return b"d", TIMES + codec.encode(noted), b""


def read(name: bytes) -> TurnTimes | None:
    """Decode the note in a field's name; None if this release cannot read it, which must not make the change fail."""
    try:
        noted = codec.decode(name[len(TIMES) :])
        more, more_seconds = noted.get("more", (0, 0.0))
        runs = [TimedRun(_KINDS[kind], _text(name), _seconds(took)) for kind, name, took in noted.get("runs", ())]
        parts = {name: _seconds(noted.get(name, 0.0)) for name in _PARTS}
        runs = runs[:MOST_RUNS]
        return TurnTimes(**parts, runs=tuple(runs), more=int(more), more_seconds=_seconds(more_seconds))
    except (CorruptState, AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a name is a str, not {name!r:.80}")
    return name


def _seconds(given: Any) -> float:
    seconds = float(given)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{seconds} seconds")
    return seconds


_EXPLAINED = {
    "lock": ("waiting for the lease", "others held this conversation"),
    "read": ("reading", "Redis, and SQL for data that Redis no longer had"),
    "elsewhere": ("elsewhere", "the worker's own code, and what was not measured"),
}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a turn: its name, its meaning, how long it took, and its share of the turn, 0 to 1."""

    name: str
    meaning: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Spent:
    """A turn's time; its longest part explains why it took so long."""

    total: float
    parts: list[Part]

    @property
    def most(self) -> Part:
        """The longest part."""
        return max(self.parts, key=lambda part: part.seconds)


def spent(times: dict[str, Any] | None) -> Spent | None:
    """The parts of a turn, as a version's `times` note them: waiting and reading, what ran, and the rest."""
    if not times:
        return None
    total = times["total"]

    def part(name: str, meaning: str, seconds: float) -> Part:
        return Part(name, meaning, seconds, min(1.0, seconds / total) if total else 0.0)

    runs = [part(f"{each['kind']} {each['name']}", "", each["seconds"]) for each in times["runs"]]
    if times["more"]:
        runs.append(part(f"{times['more']} more", "quicker tools and models, together", times["more_seconds"]))
    lock, read, elsewhere = (part(*words, times[name]) for name, words in _EXPLAINED.items())
    return Spent(total, [lock, read, *runs, elsewhere])
