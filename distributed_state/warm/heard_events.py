"""Which events this replica took last. Law: what comes again behind a loss, under another number, is known by its id.

A server publishes an event, and loses it. Its writer, who had no answer yet, writes it again, and it gets another
number. And where all that a consumer knows of its place is lost, the stream is read from its beginning.

Design: section 12.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from distributed_state.port import Mutex
from distributed_state.warm.positions import Position, count
from distributed_state.warm.stream import StreamEvent

_KEPT = 256  # of each partition: more than a replica is behind when it is promoted, unless writers hurry


class _Taken(NamedTuple):
    ordinal: int  # of the epoch
    offset: int
    id: bytes


class HeardEvents:
    """The last events of each partition that consumers of this replica took."""

    def __init__(self) -> None:
        self._mutex = Mutex()
        self._taken: dict[int, deque[_Taken]] = {}

    def note(self, partition: int, epoch: str, events: Iterable[StreamEvent]) -> None:
        """Note events that were taken, in their order; what a slower consumer takes is noted already."""
        ordinal = count(epoch)
        with self._mutex:
            taken = self._taken.setdefault(partition, deque(maxlen=_KEPT))
            last = taken[-1][:2] if taken else (0, 0)
            taken.extend(
                _Taken(ordinal, each.offset, each.id) for each in events if each.head and (ordinal, each.offset) > last
            )

    def until(self, partition: int, at: Position) -> frozenset[bytes]:
        """The ids of those up to a position."""
        place = (count(at.epoch), at.offset)
        with self._mutex:
            return frozenset(each.id for each in self._taken.get(partition, ()) if each[:2] <= place)
