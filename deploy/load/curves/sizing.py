"""The table of `docs/running/sizing.md` from which a fleet is sized. Law: no figure in it that a curve did not give.

The table stands between two comments there, and a test compares it with what this makes of the stored curves.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.load.curves.stored import Stored

BEGIN, END = "<!-- begin: growth.py --sizing -->", "<!-- end: growth.py --sizing -->"


def _plain(unit: str) -> Callable[[float], str]:
    return lambda cost: f"{cost:,.0f} {unit}"


def _times(what: str) -> Callable[[float], str]:
    return lambda cost: f"{cost:.2f} x {what}"


def _rate(what: str) -> Callable[[float], str]:
    """Of microseconds for each how many there are in a second, to two digits: the rest is the weather."""
    return lambda cost: f"{float(f'{1e6 / cost:.2g}'):,.0f} {what}/s"


def _precise(unit: str) -> Callable[[float], str]:
    return lambda cost: f"{cost:.2g} {unit}"


@dataclass(frozen=True)
class Line:
    """A row: its letter in the formulas, what it is, and the curve of which measurement its figure is from."""

    letter: str
    what: str
    only: str
    figure: Callable[[float], str]
    curve: int = 0


LINES = [
    Line("a", "Redis: an archived session of 10 fields, beyond its JSON", "redis", _plain("bytes")),
    Line("b", "Redis: a small one, 170 bytes of JSON", "small", _plain("bytes")),
    Line("c", "SQL: conversations", "sql", _times("their JSON")),
    Line("d", "SQL: compacted", "sql-packed", _times("their JSON")),
    Line("e", "SQL: encrypted", "sql-encrypted", _times("their JSON")),
    Line("f", "SQL: encrypted and compacted", "sql-encrypted-packed", _times("their JSON")),
    Line("g", "PostgreSQL's log, standbys and backups", "wal", _plain("bytes a change")),
    Line("h", "an archiver into PostgreSQL", "archive", _rate("changes"), 1),
    Line("i", "an archiver into SQLite", "archive-sqlite", _rate("changes")),
    Line("j", "`purge`", "purge", _rate("changes")),
    Line("k", "`compact`", "compact", _rate("changes")),
    Line("l", "an archiver's pass during `purge`", "purge-beside", _times("one alone")),
    Line("m", "an archiver's pass during `compact`", "compact-beside", _times("one alone")),
    Line("n", "Redis' CPU: a commit that 2 replicas hold", "holders", _plain("us")),
    Line("o", "Redis' CPU: an event that all connections receive", "events", _plain("us")),
    Line("p", "Redis' CPU: an event of a type that one of them receives", "unwanted", _plain("us")),
    Line("q", "Redis' CPU: an idle fleet", "idle", _precise("% of a core")),
    Line("r", "a first write", "first", _times("a second one")),
    Line("s", "a page of 50 sessions, at any depth", "reads", _precise("ms")),
    Line("t", "a session that left Redis is read", "reads", _precise("ms"), 1),
    Line("u", "a worker: a record in hot of 100 letters in 5 fields", "collection", _plain("bytes"), 1),
    Line("v", "`forget` of a user", "forget", _precise("s")),
]


def sizing(stored: Stored) -> str:
    """The table in Markdown; what was not measured is left out."""
    rows = [
        "Measured on {date}: {cores} cores, with a load of {load} from other work; {software}.".format(
            **stored.setting
        ),
        "",
    ]
    rows += ["| | what | figure | at | slope | `growth.py --only` |", "|---|---|---|---|---|---|"]
    for line in LINES:
        if line.only in stored.curves:
            curve = stored.curves[line.only][line.curve]
            at = f"{curve.sizes[-1]:,} {curve.of}"
            cells = (line.letter, line.what, line.figure(curve.costs[-1]), at, f"{curve.slope:.2f}", f"`{line.only}`")
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def write(stored: Stored, document: Path) -> None:
    """Put the table into a document, in place of the one that is there."""
    between = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    text, count = between.subn(lambda _: f"{BEGIN}\n{sizing(stored)}\n{END}", document.read_text())
    if count != 1:
        raise ValueError(f"{document}: there is no place for the table, between {BEGIN} and {END}")
    document.write_text(text)
