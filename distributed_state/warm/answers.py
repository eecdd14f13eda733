"""What is sent to the scripts and what they answer, as frozen values. Law: no bytes of Redis' protocol leave here.

Design: section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

from distributed_state.settings import Settings
from distributed_state.values import field_ttl
from distributed_state.values.journal import Step
from distributed_state.values.levels import Level
from distributed_state.values.model import ITEMS


class Draft:
    """A change ready to be sent. `steps` are as in model.Op; `expectations` pairs a field with its stored bytes.

    `events` are steps beside it, as commit.lua has them: lifecycle events written with the change ('e'), another
    lifetime ('x'); `sent_events` are those that were sent last, with the ones that the beginning of a session adds.
    `lifetime` is what the session has if it begins with this: idle and whole, in ms, 0 for no end. `level`: how hard it
    is kept before it is acknowledged, None: as is asked around it. `preconditions`: the user's, in commit.lua's words.
    `expected_items` are steps 'A', 'P' and 'M', what must be so of items; `proofs` 'V' and 'G', what SQL has of them.
    """

    # Defaults of the class: a dataclass would set each of them, which is what a commit would take longest for.
    expected: int | None = None
    deleted: str = "refuse"
    epoch: str = ""
    creation: str = ""
    actor: str = ""
    owner: str = ""
    lock_value: str = ""
    lifetime: tuple[int, int] = (0, 0)
    sent_events: Sequence[Step] = ()
    level: Level | None = None
    items: bool = False  # whether any step is about items
    expected_items: Sequence[Step] = ()
    proofs: Sequence[Step] = ()
    preconditions: Sequence[tuple[bytes, bytes]] = ()

    def __init__(self, kind: str, steps: list[Step], events: list[Step] | None = None) -> None:
        self.kind = kind
        self.steps = steps
        self.events = [] if events is None else events
        self.expectations: list[tuple[bytes, bytes | None]] = []

    def but(self, **changes: Any) -> Draft:
        """The same with other attributes; what is not named is shared."""
        other = copy(self)
        vars(other).update(changes)
        return other


class Committed(NamedTuple):
    """A write that was applied. `first_message`, `results` are None and `offset` is 0 if only SQL remembers it.

    `first_message` is the number that a message gets which the write adds, whether it adds one or not: see `added`.
    `time_ms` is None as well if it was repeated; `trailing` is the answer of the script that was sent after it.
    `archived`: up to which offset its partition is archived under this epoch; `text`: all of the answer.
    """

    version: int
    epoch: str
    first_message: int | None
    results: tuple[int, ...] | None
    offset: int
    time_ms: int | None = None
    trailing: Any = None
    archived: int = 0
    text: bytes = b""

    def added(self, steps: Iterable[Step]) -> int | None:
        """The number of the first message that these steps added; None if they added none, or only SQL remembers it."""
        return self.first_message if any(step == b"m" for step, _, _ in steps) else None

    @property
    def begins(self) -> bool:
        """Whether the record began with this, or began anew."""
        return self.version == 1 or b"b" in self.said

    @property
    def said(self) -> bytes:
        """What else the answer says of the entry: see commit.lua."""
        return self.text.rpartition(b" ")[2]

    @property
    def first_items(self) -> list[Step]:
        """The step that commit.lua adds where a record gets its first items."""
        return [(b"s", ITEMS, b"%d" % self.version)] if b"i" in self.said else []

    def applied(self, steps: Iterable[Step]) -> list[Step] | None:
        """The steps that were sent as the journal has them; None if the answer does not say what came of them."""
        if self.first_message is None or self.results is None:
            return None
        number = self.first_message
        sums = iter(self.results)
        said = self.said
        applied = []
        for each in steps:
            step, name, value = each
            if step == b"i":
                each = (b"s", name, b"%d" % next(sums))
            elif step == b"m" and name:
                number = int(name) + 1  # a copy, with the number and the time that it had
            elif step == b"m":
                if self.time_ms is None:
                    return None
                each = (b"m", b"%d" % number, field_ttl.dated(value, self.time_ms))
                number += 1
            elif step == b"w":
                each = (b"w", b"", b"%d" % self.first_message)
            elif step == b"n":
                if not next(sums):
                    continue
                each = (b"p", name, value)
            elif step == b"y":
                if not self.text:
                    return None
                if b"y" not in said:
                    continue
                each = (b"s", ITEMS, b"%d %b" % (self.version, value))
            applied.append(each)
        return applied


_REPEATED = 6  # words of an answer that came once more


def _sums(results: bytes) -> tuple[int, ...]:
    return tuple(map(int, results.split(b",")))


_new = tuple.__new__  # as a NamedTuple does it, without a function of its own


def committed(text: bytes, trailing: Any = None) -> Committed:
    """What commit.lua answered of a write that was applied, and the answer of the script that was sent after it."""
    words = text.split(b" ")
    if len(words) == _REPEATED:
        _, version, epoch, first, results, offset = words
        sums = _sums(results) if results else ()
        return Committed(int(version), epoch.decode(), int(first), sums, int(offset), None, trailing)
    _, version, epoch, first, results, offset, seconds, micros, archived, _ = words
    sums = _sums(results) if results else ()
    time_ms = int(seconds) * 1000 + int(micros) // 1000
    return _new(
        Committed,
        (int(version), epoch.decode(), int(first), sums, int(offset), time_ms, trailing, int(archived), text),
    )


@dataclass(frozen=True, slots=True)
class UnknownItems:
    """Only SQL knows how items are that a change expects to be so: as of version `needed` or later."""

    epoch: str
    needed: int


@dataclass(frozen=True, slots=True)
class Uninitialised:
    """The partition holds no epoch, or one of another life: Redis is new, or may have lost something."""


@dataclass(frozen=True, slots=True)
class PartitionState:
    """How far a partition was written and archived; epoch '' if Redis knows nothing of it. `waiting`: bytes.

    `life`: of the data, as the partition notes it, see `port.lives`; `proved_ms`: when a script last
    asked the server that it still is, by that server's clock (`same_data.lua`).
    """

    epoch: str
    offset: int
    archived: int
    waiting: int
    life: str = ""
    proved_ms: int = 0

    def fill(self, settings: Settings) -> float:
        """How full the journal is, 0 to 1; at 1 writes are refused."""
        return max(0.0, (self.offset - self.archived) / settings.journal_entries, self.waiting / settings.journal_bytes)


@dataclass(frozen=True, slots=True)
class Cold:
    """The record is not in Redis. `token` was left there before anything else; '' if Redis is too full for it."""

    epoch: str
    token: str


@dataclass(frozen=True, slots=True)
class Swap:
    """Increments that the server cannot do exactly: the fields, with what is stored in each."""

    fields: tuple[tuple[bytes, bytes], ...]
