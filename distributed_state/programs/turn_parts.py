"""Says where the time of a turn went. Law: by what its version notes, and in words for who has never seen one.

Design: section 28.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_EXPLAINED = {
    "lock": ("waiting for the lease", "others held this conversation"),
    "read": ("reading", "Redis, and SQL for what Redis had no more"),
    "elsewhere": ("elsewhere", "the worker's own code, and what was not measured"),
}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a turn: what it was, what that means, how long it took and what share of the turn, 0 to 1."""

    name: str
    meaning: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Spent:
    """A turn's time: of all its parts the longest is the answer to why it took so long."""

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
