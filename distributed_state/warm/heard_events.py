"""Which events this replica took last. Law: what comes again behind a loss, under another number, is known by its id.

A server publishes an event, and loses it. Its writer, who had no answer yet, writes it again, and it gets another
number. And where all that a consumer knows of its place is lost, the stream is read from its beginning.

Design: section 12.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from distributed_state.port import Mutex
from distributed_state.warm.positions import Position, count
from distributed_state.warm.stream import StreamEvent

_KEPT = 256  # of each partition: more than a replica is behind when it is promoted, unless writers hurry
_Place = tuple[int, int]  # the ordinal of the epoch, the offset


class HeardEvents:
    """The last events of each partition that consumers of this replica took."""

    def __init__(self) -> None:
        self._mutex = Mutex()
        self._taken: dict[int, dict[bytes, _Place]] = {}  # by id
        self._newest: dict[int, tuple[str, int]] = {}

    def note(self, partition: int, epoch: str, events: Iterable[StreamEvent]) -> None:
        """Note events that were taken, in any order; what lies far behind the newest is left out."""
        ordinal = count(epoch)
        with self._mutex:
            taken = self._taken.setdefault(partition, {})
            for each in events:
                life, newest = self._newest.get(partition, ("", 0))
                far = epoch == life and each.offset <= newest - _KEPT
                if each.head and not far and each.id not in taken:
                    taken[each.id] = (ordinal, each.offset)
                    self._newest[partition] = (epoch, max(newest, each.offset) if epoch == life else each.offset)
            while len(taken) > _KEPT:
                del taken[next(iter(taken))]

    def until(self, partition: int, at: Position, also: frozenset[bytes] = frozenset()) -> frozenset[bytes]:
        """The ids of those up to a position, and of those in `also`."""
        last = (count(at.epoch), inf if at.waits else at.offset)
        with self._mutex:
            taken = self._taken.get(partition, {})
            return frozenset(id for id, place in taken.items() if place <= last or id in also)
