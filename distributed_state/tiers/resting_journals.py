"""Which journals are at rest: all is archived, and what is written next is heard of. Law: only work is spared by it.

The first entry behind what is archived is published on the journal's channel (journal.lua). Who archives a partition
listens there, and looks every few seconds where it would look several times a second. Whatever is not heard, as a link
may be dead and not know it yet, is found by the next look.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from distributed_state.port import Port
from distributed_state.values.keys import Keys
from distributed_state.warm.answers import PartitionState
from distributed_state.warm.link import Link


class RestingJournals:
    """The journals that this replica archives, and since when each is at rest: never, without a link.

    The embedded server has none here: no look wakes it.
    """

    def __init__(self, port: Port, keys: Keys, link: Link | None) -> None:
        self._port = port
        self._keys = keys
        self._link = link
        self._mine = set[int]()
        self._seen: dict[int, tuple[str, int]] = {}
        self._clean: dict[int, float] = {}  # since when nothing was written, as looks say; by the monotonic clock
        self._stirred: dict[int, float] = {}  # when something was heard of them last, that they are heard included
        self.stirred = port.signal()

    def hear(self, partitions: Iterable[int]) -> None:
        """Hear of these, and of no others."""
        wanted = set(partitions)
        if self._link is None or wanted == self._mine:
            return
        for each in self._mine - wanted:
            self._link.leave(self._keys.partition(each).journal)
            self._stirred.pop(each, None)
        for each in wanted - self._mine:
            self._link.listen(self._keys.partition(each).journal, self._hear)
        self._mine = wanted

    def _hear(self, channel: bytes, _: bytes) -> None:
        self._stirred[self._keys.partition_at(channel)] = self._port.monotonic()
        self.stirred.set()

    def looked(self, asked: float, states: Mapping[int, PartitionState]) -> None:
        """Note how journals were found to be when that was asked at this moment; others are not at rest."""
        clean = {}
        for partition, state in states.items():
            before, self._seen[partition] = self._seen.get(partition), (state.epoch, state.offset)
            if state.offset <= state.archived:
                since = self.since(partition)
                clean[partition] = since if since is not None and before == self._seen[partition] else asked
        self._clean = clean

    def since(self, partition: int) -> float | None:
        """Since when nothing has been written to it for all we know; None if it is not at rest."""
        clean = self._clean.get(partition)
        # Heard of in that very moment counts as later: that a message comes late must not hide what it says.
        if clean is None or self._link is None or self._stirred.get(partition, inf) >= clean:
            return None
        return clean if self._link.confirmed(self._keys.partition(partition).journal) else None

    def all_rest(self, partitions: Iterable[int]) -> bool:
        """Whether all of these are at rest."""
        return all(self.since(each) is not None for each in partitions)
