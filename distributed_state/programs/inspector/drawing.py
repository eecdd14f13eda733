"""The graph of a conversation: a line a version, the newest at the top. Law: what is drawn is in words beside it, too.

Phases colour the line, a rollback is a bow to the version that it brought back, branches and forks lead away from the
version behind which they begin.

Design: section 28.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ROW, TOP, LANE = 26, 18, 110  # pixels: between two versions, above the first, left of the line
_BOW = 90  # the widest
_COLOURS = 6
_LETTERS = 60  # of a name; the lists have more
_AWAY = 3  # that lead away from one version; the lists have all


@dataclass(slots=True)
class Dot:
    """A version: where it is, its colour, what stands beside it, and what leads away from it as kind, name and id."""

    version: int
    y: int
    colour: int
    words: str
    marked: bool
    bow: str = ""
    away: list[tuple[str, str, str]] = field(default_factory=list)


def drawn(rows: list[dict[str, Any]], branches: list[dict[str, Any]], forks: list[dict[str, Any]]) -> list[Dot]:
    """A dot for each of these rows of a timeline, the newest first."""
    places = {each["version"]: TOP + at * ROW for at, each in enumerate(rows)}
    found: list[Dot] = []
    colours = {"": 0}
    colour = 0
    for each in reversed(rows):
        if each["phase"] is not None:
            colour = colours.setdefault(each["phase"], (len(colours) - 1) % _COLOURS + 1)
        found.append(_dot(each, places, colour))
    dots = {each.version: each for each in found}
    for branch in branches:
        if branch["base"] in dots:
            dots[branch["base"]].away.append(("branch", f"branch {branch['id']}: {branch['commits']} commits", ""))
    for fork in forks:
        if fork["version"] in dots:
            dots[fork["version"]].away.append(("fork", f"fork {fork['id']}"[:_LETTERS], fork["id"]))
    for each_dot in found:
        each_dot.away[_AWAY:] = []
    return found[::-1]


def _dot(row: dict[str, Any], places: dict[int, int], colour: int) -> Dot:
    marks = [f"phase {row['phase'] or 'none'}"] if row["phase"] is not None else []
    marks += [f"checkpoint {row['label']}"] if row["label"] is not None else []
    marks += [f"back to {row['restored']}"] if row["restored"] is not None else []
    y = places[row["version"]]
    words = " · ".join([f"{row['version']} {row['kind']}", *(each[:_LETTERS] for each in marks)])
    dot = Dot(row["version"], y, colour, words, bool(marks))
    if row["restored"] in places:
        end = places[row["restored"]]
        left = LANE - min(_BOW, 20 + abs(end - y) // 4)
        dot.bow = f"M{LANE} {y} C{left} {y} {left} {end} {LANE} {end}"
    return dot
