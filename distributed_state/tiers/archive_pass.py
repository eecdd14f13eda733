"""One pass of the archiver over some partitions. Law: commits are compared by their events, never by offset or version.

An offset does not identify a commit: a Redis that lost its last seconds gives the same offsets and versions to other
commits. Therefore the event of the journal's entry at SQL's cursor is compared. Unless that entry exists and has the
same event, no entry of the journal is archived, marked as archived or trimmed.

A fully archived journal is idle (`IdleJournals`). Its next entry is published, so the partition is checked every few
seconds instead of several times a second. If a dead link misses that message, the next check finds the entry.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import inf

from distributed_state.cold.values import Batch, Cursor
from distributed_state.errors import ColdUnavailable
from distributed_state.port import Port, Signal
from distributed_state.values import chance
from distributed_state.values.journal import Journal, JournalEntry
from distributed_state.values.keys import Keys
from distributed_state.warm.answers import PartitionState
from distributed_state.warm.link import Link

EMPTIED = "Redis was emptied"
_BYTES_TOGETHER = 2**20


@dataclass(slots=True)
class Pass:
    """The findings and results of a pass.

    `fits` has the cursors, moved by it or not, of partitions whose journals continue SQL; `carried` the events that it
    brought to SQL, `count` their number; `unmatched` the reason why another partition cannot continue. `doubtful` are
    journals that did not match the cursor that was read before them. `batches` are to be inserted, `archived` holds the
    entries that SQL has after that, with their epoch. `size` is in bytes; `more`: whether the pass left entries in a
    journal that it read.
    """

    done: Signal
    partitions: list[int] = field(default_factory=list)
    fits: dict[int, Cursor] = field(default_factory=dict)
    carried: dict[int, set[str]] = field(default_factory=dict)
    unmatched: dict[int, str] = field(default_factory=dict)
    doubtful: dict[int, str] = field(default_factory=dict)
    batches: list[tuple[Cursor, Batch]] = field(default_factory=list)
    archived: dict[int, tuple[str, list[JournalEntry]]] = field(default_factory=dict)
    count: int = 0
    size: int = 0
    more: bool = False

    def read(self, partition: int, cursor: Cursor | None, journal: Journal, most: int) -> None:
        """Note the entries of a journal for SQL; `most` entries at most were read on either side of the cursor."""
        if not journal.epoch:
            self.unmatched[partition] = EMPTIED
            return
        why = why_unmatched(cursor, journal)
        if cursor is None or why:
            self.doubtful[partition] = why
            return
        self.fits[partition] = cursor
        # An archiver that died before settling left the entries before the cursor: they are first.
        whole = len(journal.before) < most
        entries = journal.before + journal.onward if whole else journal.before
        if not entries:
            return
        self.archived[partition] = (journal.epoch, entries)
        # Partitions whose journal does not match SQL do not count: another pass at once would not help.
        self.more = self.more or not whole or len(journal.onward) == most
        self.size += entries[-1].total_bytes - entries[0].total_bytes
        fresh = [entry for entry in entries if entry.offset > cursor.offset]
        if fresh:
            self.batches.append((cursor, Batch(partition, cursor.epoch, cursor.offset, fresh, cursor.event)))

    def inserted(self, moved: Mapping[int, Set[str]]) -> None:
        """Note which batches SQL took, except for the entries that it put into quarantine."""
        for cursor, batch in self.batches:
            partition = batch.partition
            last = batch.entries[-1]
            if partition in moved:
                self.fits[partition] = replace(cursor, offset=last.offset, event=last.event)
                self.carried[partition] = {entry.event for entry in batch.entries} - moved[partition]
                self.count += len(batch.entries)
            else:
                # Another archiver was faster, or the epoch has ended.
                del self.fits[partition]
                del self.archived[partition]

    def stop_at(self, partition: int, offset: int, why: str) -> None:
        """Leave out an entry that cannot be archived now, and all later ones. Called before anything is inserted."""
        self.unmatched[partition] = why
        epoch, entries = self.archived.pop(partition)
        batches = []
        for cursor, batch in self.batches:
            if batch.partition == partition:
                batch = replace(batch, entries=[entry for entry in batch.entries if entry.offset < offset])
            if batch.entries:
                batches.append((cursor, batch))
        self.batches = batches
        if before := [entry for entry in entries if entry.offset < offset]:
            self.archived[partition] = (epoch, before)

    def try_first(self, partition: int) -> None:
        """Leave out all but the first entry that SQL lacks, because SQL refused it the last time."""
        for at, (cursor, batch) in enumerate(self.batches):
            if batch.partition == partition and len(batch.entries) > 1:
                first = batch.entries[0]
                self.batches[at] = (cursor, replace(batch, entries=[first]))
                epoch, entries = self.archived[partition]
                self.archived[partition] = (epoch, [entry for entry in entries if entry.offset <= first.offset])
                self.more = True

    def refuse(self, partitions: Iterable[int]) -> None:
        """Raise ColdUnavailable if archiving cannot continue in one of these."""
        for partition in partitions:
            if why := self.unmatched.get(partition):
                raise ColdUnavailable(f"partition {partition} is not archived: {why}")


def grouped(partitions: Sequence[int], places: Mapping[int, PartitionState]) -> Iterator[list[int]]:
    """The partitions in random order, grouped by reading their journals in one round trip."""
    group: list[int] = []
    size = 0
    for partition in chance.source.sample(partitions, len(partitions)):
        place = places.get(partition)
        group.append(partition)
        size += place.waiting if place else 0
        if size > _BYTES_TOGETHER:
            yield group
            group = []
            size = 0
    if group:
        yield group


def why_unmatched(cursor: Cursor | None, journal: Journal) -> str:
    """Why a journal does not continue SQL at this cursor, which was read before the journal; '' if it does."""
    if cursor is None or cursor.epoch != journal.epoch:
        return f"Redis is at epoch {journal.epoch}, SQL at {cursor.epoch if cursor else 'none'}"
    here = [entry for entry in journal.onward if entry.offset == cursor.offset]
    if cursor.offset and not here:
        return f"the journal lacks entry {cursor.offset}, SQL's last"
    if here and here[0].event != cursor.event:
        return f"entry {cursor.offset} is {here[0].event}, SQL has {cursor.event}"
    fresh = journal.onward[len(here) :]
    if fresh[0].offset != cursor.offset + 1 if fresh else journal.end > cursor.offset:
        return f"the journal lacks entry {cursor.offset + 1}, the next after SQL's last"
    return ""


class IdleJournals:
    """The journals that this replica archives, and since when each is idle. Without a link, no journal is idle.

    An embedded server does not use this, because it has no link whose messages wake the archiver.
    """

    def __init__(self, port: Port, keys: Keys, link: Link | None) -> None:
        self._port = port
        self._keys = keys
        self._link = link
        self._mine = set[int]()
        self._seen: dict[int, tuple[str, int]] = {}
        self._clean: dict[int, float] = {}  # since when nothing was written, as found by checks; monotonic clock
        self._written: dict[int, float] = {}  # time of the last message or of the confirmation
        self.written = port.signal()

    def watch(self, partitions: Iterable[int]) -> None:
        """Subscribe to the first entries of these journals, and of no others."""
        wanted = set(partitions)
        if self._link is None or wanted == self._mine:
            return
        for each in self._mine - wanted:
            self._link.leave(self._keys.partition(each).journal)
            self._written.pop(each, None)
        for each in wanted - self._mine:
            self._link.listen(self._keys.partition(each).journal, self._receive)
        self._mine = wanted

    def _receive(self, channel: bytes, _: bytes) -> None:
        self._written[self._keys.partition_at(channel)] = self._port.monotonic()
        self.written.set()

    def looked(self, asked: float, states: Mapping[int, PartitionState]) -> None:
        """Note the states of these journals, requested at this time; all other journals are not idle."""
        clean = {}
        for partition, state in states.items():
            before, self._seen[partition] = self._seen.get(partition), (state.epoch, state.offset)
            if state.offset <= state.archived:
                since = self.since(partition)
                clean[partition] = since if since is not None and before == self._seen[partition] else asked
        self._clean = clean

    def since(self, partition: int) -> float | None:
        """The time since which nothing is known to have been written to a journal; None if it is not idle."""
        clean = self._clean.get(partition)
        # A message at the same time counts as later than the check.
        if clean is None or self._link is None or self._written.get(partition, inf) >= clean:
            return None
        return clean if self._link.confirmed(self._keys.partition(partition).journal) else None

    def all_idle(self, partitions: Iterable[int]) -> bool:
        """Whether all of these are idle."""
        return all(self.since(each) is not None for each in partitions)
