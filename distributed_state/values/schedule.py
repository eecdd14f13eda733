"""When a worker serves a session next. Law: the commit keeps it, and SQL has it too.

A session with a handler has the field `#bh`: the handler, when the session is due, how many turns in a row failed, and
when the next attempt may begin. commit.lua writes it (schedule.lua), the archiver copies it into a column of the
record's row, and each partition has a sorted set of the due sessions of a handler. So a due session is found again by
any worker, also after Redis has lost its data.

Design: section 31.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from distributed_state.errors import InvalidValue

_HANDLER = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_STORED = re.compile(rb"([A-Za-z0-9_.-]{1,64}) (\d{1,18}|-) (\d{1,9}) (\d{1,18}|[-!])")


def checked_handler(name: str) -> str:
    """The name of a handler. Raises InvalidValue."""
    if not isinstance(name, str) or not _HANDLER.fullmatch(name):
        raise InvalidValue(f"a handler's name has 1 to 64 letters, digits, '_', '.' or '-', unlike {name!r:.80}")
    return name


@dataclass(frozen=True, slots=True)
class Schedule:
    """The content of `#bh`, with times in ms by the server's clock.

    `due`: when the session is served, None: when something is posted or changed. `failed`: how many turns in a row
    failed. `retry`: when the next attempt may begin, None: at once. `stuck`: no further attempt is made.
    """

    handler: str
    due: int | None = None
    failed: int = 0
    retry: int | None = None
    stuck: bool = False

    @classmethod
    def read(cls, stored: bytes) -> Self:
        """Parse the field. Raises ValueError."""
        found = _STORED.fullmatch(stored)
        if found is None:
            raise ValueError(f"#bh is {stored!r:.80}, not a schedule")
        handler, due, failed, retry = (part.decode() for part in found.groups())
        at, after = (int(each) if each.isdigit() else None for each in (due, retry))
        return cls(handler, at, int(failed), after, retry == "!")

    @property
    def stored(self) -> bytes:
        """The content of the field."""
        due = "-" if self.due is None else str(self.due)
        retry = "!" if self.stuck else "-" if self.retry is None else str(self.retry)
        return f"{self.handler} {due} {self.failed} {retry}".encode()

    @property
    def column(self) -> str | None:
        """The content of SQL's column `due`: the handler and the due time, in an order that sorts by time."""
        if self.stuck:
            return f"{STUCK}{self.handler}"
        return None if self.due is None else f"{self.handler} {self.due:015d}"


@dataclass(frozen=True, slots=True)
class Failure:
    """The content of `#be`: the class of the error of the handler's last turn, and when it failed, as in `Schedule`."""

    error: str
    at: int

    @classmethod
    def read(cls, stored: bytes) -> Self:
        """Parse the field. Raises ValueError."""
        at, found, error = stored.decode().partition(" ")
        if not (found and at.isascii() and at.isdecimal() and len(at) <= 18 and error.isprintable()):
            raise ValueError(f"#be is {stored!r:.80}, not the time and the class of an error")
        return cls(error, int(at))

    @property
    def stored(self) -> bytes:
        """The content of the field."""
        return f"{self.at} {self.error}".encode()


STUCK = "! "
"""Stands in SQL's column before the handler of a session that is stuck."""


def due_ms(column: str) -> int:
    """The due time in SQL's column."""
    return int(column.rpartition(" ")[2])
