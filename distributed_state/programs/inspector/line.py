"""Draws a record's versions as a line, with checkpoints and branches. Law: it is as wide for ten as for a million.

Design: section 28.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WIDTH, _EDGE = 720, 20
MOST = 60  # marks of a kind


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on the line: `at` from the left, `kind` says what is there."""

    at: float
    kind: str
    version: int
    label: str
    to: float = 0.0  # where a branch ends


def drawn(newest: int, checkpoints: list[dict[str, Any]], branches: list[dict[str, Any]], seen: int) -> list[Mark]:
    """The marks of a record with so many versions, of which the page shows one."""
    span = max(1, newest - 1)

    def at(version: int) -> float:
        return round(_EDGE + (WIDTH - 2 * _EDGE) * min(1.0, max(0, version - 1) / span), 1)

    marks = [Mark(at(each["version"]), "checkpoint", each["version"], each["label"]) for each in checkpoints]
    marks += [
        Mark(at(each["base"]), "branch", each["base"], each["id"], at(each["version"])) for each in branches[-MOST:]
    ]
    return [*marks, Mark(at(seen), "seen", seen, f"version {seen}")]
