"""Where a consumer is in a partition's events, and whether the stream goes on there. Law: pure.

Epochs count up, and a stream may go on with the events of those before: then their offsets are its own.

Design: sections 12, 14.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from distributed_state.errors import InvalidValue

_COUNT = re.compile(r"(\d{1,18})-", re.ASCII)  # which of its partition an epoch is: its name begins with it
_TOKEN = re.compile(r"(\d{1,4})=([\w-]{1,80})@(\d{1,18})", re.ASCII)


class Position(NamedTuple):
    """How far a consumer is in a partition. Epoch "3-": behind the third, from the beginning of the next that comes.

    Epoch "" is what others wrote that did not know of this: from the beginning of whichever epoch comes.
    """

    epoch: str
    offset: int

    @classmethod
    def behind(cls, epochs: int) -> Position:
        """Where so many epochs are over, and no other has begun."""
        return cls(f"{epochs}-", 0)

    @classmethod
    def missed(cls, epochs: int) -> Position:
        """Somewhere in an epoch of which nothing is known, the last of so many: a resync follows."""
        return cls(f"{epochs}-lost", 0)

    @property
    def waits(self) -> bool:
        """Whether the epoch whose events come next has yet to begin."""
        return not self.epoch or self.epoch.endswith("-")

    def leads_to(self, epoch: str) -> bool:
        """Whether no event lies between this and the beginning of an epoch, or a later place in it."""
        return self.epoch in ("", epoch) or (self.waits and count(epoch) == count(self.epoch) + 1)

    def __str__(self) -> str:
        return f"{self.epoch} {self.offset}"

    @classmethod
    def parse(cls, text: bytes) -> Position:
        """Read back what `str` wrote."""
        epoch, _, offset = text.decode().rpartition(" ")
        return cls(epoch, int(offset))


BEGINNING = Position("", 0)


def count(epoch: str) -> int:
    """How many epochs a partition has had with this one; 0 without a name."""
    found = _COUNT.match(epoch)
    return int(found[1]) if found else 0


def shown(positions: Mapping[int, Position]) -> str:
    """Positions by partition as `since=` takes them; "oldest" if there is none."""
    parts = [f"{each}={at.epoch}@{at.offset}" for each, at in sorted(positions.items()) if at.epoch]
    return ",".join(parts) or "oldest"


def parsed(since: str, partitions: int) -> dict[int, Position]:
    """Read back what `shown` wrote. Raises InvalidValue."""
    found = {}
    for part in since.split(",") if isinstance(since, str) else [""]:
        match = _TOKEN.fullmatch(part)
        if match is None or int(match[1]) >= partitions:
            raise InvalidValue(f"since is a position of this namespace's events, 'oldest' or None, not {since!r:.80}")
        found[int(match[1])] = Position(match[2], int(match[3]))
    return found


class Head(NamedTuple):
    """The newest event of a partition, and the newest that is not kept any more; epoch '' if it holds nothing.

    `continues` names the epochs before whose events the stream has as well, with where each ended: "3-a@17 2-b@5".
    `interests` has the types that some hear alone, with their newest event: "turn.ended,conversation.*@12 ".
    """

    epoch: str
    offset: int
    floor: int
    continues: str = ""
    interests: str = ""

    def last_of(self, types: str) -> int | None:
        """The offset of the newest event of these types; None if nobody asked for them."""
        lists = (each.rpartition("@") for each in self.interests.split())
        return next((int(last) for each, _, last in lists if each == types), None)

    def passed(self, at: Position, types: str) -> Position:
        """Where a consumer of these types is, if there were none since: here."""
        here = self.seen_from(at)
        last = self.last_of(types)
        if last is None or here.epoch != self.epoch or not last <= here.offset <= self.offset:
            return at
        return Position(self.epoch, self.offset)

    def end_of(self, epoch: str) -> int:
        """Where an epoch before ended that the stream continues; -1 if it does not."""
        ends = (each.rpartition("@") for each in self.continues.split())
        return next((int(end) for name, _, end in ends if name == epoch), -1)

    def seen_from(self, position: Position) -> Position:
        """A consumer's position, under the present epoch if it lies in what the stream continues."""
        if position.epoch in ("", self.epoch) or position.offset > self.end_of(position.epoch):
            return position
        return Position(self.epoch, position.offset)

    def lost(self, at: Position) -> str:
        """Why the stream does not go on where a consumer is; "" if it does."""
        if at.waits and not self.epoch:
            return ""
        at = self.seen_from(at)
        if not at.leads_to(self.epoch):
            return "epoch"
        return "trimmed" if at.offset < self.floor else "rewound" if at.offset > self.offset else ""

    @property
    def beginning(self) -> Position:
        """The position from which a consumer gets one resync, and then all events since this epoch began."""
        former, _, end = self.continues.partition(" ")[0].rpartition("@")
        return Position(former, int(end) + 1) if former else Position.missed(count(self.epoch) - 1)

    def next(self, at: Position) -> Position:
        """Where a consumer goes on for which something is lost."""
        if not self.epoch:
            return Position.behind(count(at.epoch))
        if self.lost(at) == "rewound":
            return Position(self.epoch, self.offset)
        # If the stream goes on from before where the consumer was, it has heard all up to there.
        end = self.end_of(at.epoch)
        return Position(self.epoch, max(self.floor, end if at.offset > end else 0))
