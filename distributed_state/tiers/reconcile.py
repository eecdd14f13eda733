"""Decides which commits of an ended epoch continue SQL, and which are branches. Law: a version never has two states.

`reconcile` handles a Redis that lost data. SQL has each record up to a version. The surviving journal and the writers'
unarchived commits have later entries. All entries are taken in one order: an entry that continues its record without a
gap is archived, and the others have diverged.

Two commits at one offset, or two commits of one version of a record, belong to two histories: a Redis that came back
older continues its old numbers. An entry names its predecessor only by number, so entries of two histories must not be
chained by number, which would give a state that never existed. The rules are:

- Entries of the surviving journal are preferred: it is one history without gaps, and Redis shows its state.
- If only writers know two histories, the commit with the lower offset is taken. It is nearer to the archived ones, so
  fewer unknown commits can lie between. Time and event complete the order, so that all replicas choose alike.
- The fork is the lowest offset at which two histories are known. From there on a record continues only within the
  history of its last entry. The journal may itself be another history than the archived one.
- The writers' commits are one history until two of them disagree (`_dispute`). After that a record continues to its
  first entry past that point and no further.
- After an entry that does not continue its record, no later entry of the record does.

In doubt an entry becomes a branch, which loses nothing; restoring a wrong entry would give a state that was never
written.

`Backfill` handles a SQL that was restored to an older state. SQL is brought up to Redis while the partition takes no
writes, so all parts have the state of one moment. Each record gets its state at the end of the journal, where SQL's
cursor is afterwards. Until the cursor is moved, the backfill may be repeated.

Design: section 14.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from distributed_state.cold.engine import chunks
from distributed_state.cold.record_index import happened
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Archived, Backfilled, Commits, Cursor, Held
from distributed_state.port import Port
from distributed_state.values import message_ranges
from distributed_state.values.journal import Happened, JournalEntry, Loaded, Op, Operation, pack, unpack
from distributed_state.values.keys import Keys, PartitionKeys, RecordKeys
from distributed_state.values.model import ITEMS, Ref
from distributed_state.warm.answers import PartitionState
from distributed_state.warm.client import Warm
from distributed_state.warm.stream import count

# The origin of a record's last entry: SQL, the surviving journal, or a writer's unarchived commits.
_ARCHIVED, _SURVIVED, _UNARCHIVED = "archived", "survived", "unarchived"


@dataclass(frozen=True, slots=True)
class Reconciled:
    """`continued` is to be archived, `diverged` cannot be; both in the order of their offsets."""

    continued: list[JournalEntry]
    diverged: list[JournalEntry]


def reconcile(
    epoch: str, archived_offset: int, known: Commits, tail: Iterable[JournalEntry], unarchived: Iterable[JournalEntry]
) -> Reconciled:
    """Divide the entries of an ended epoch, except those that SQL has and those of erased records.

    `tail` is the surviving journal, `unarchived` the writers' commits. SQL has the epoch up to `archived_offset`;
    `known` is what SQL has of these entries and their records. Lifecycle events whose numbers are taken get new ones.
    """
    journal = {entry.event: entry for entry in tail if entry.event in known.lacking}
    others = {entry.event: entry for entry in unarchived if entry.event in known.lacking}
    survived = sorted(journal.values(), key=_place)
    given = sorted((entry for event, entry in others.items() if event not in journal), key=_place)
    chains = _Chains(epoch, known.heads)
    parting = _fork(archived_offset, known.heads, [], survived)  # where the journal leaves SQL's history
    for entry in survived:
        chains.add(entry, {_ARCHIVED: parting}, _SURVIVED)
    fork = min(parting, _fork(archived_offset, known.heads, survived, given))
    limits = {_ARCHIVED: fork, _SURVIVED: fork, _UNARCHIVED: _dispute(given)}
    for entry in given:
        chains.add(entry, limits, _UNARCHIVED)
    continued = sorted(chains.continued, key=_place)
    return Reconciled(_numbered(continued, set(journal), known.last_event), sorted(chains.diverged, key=_place))


def _place(entry: JournalEntry) -> tuple[int, int, str]:
    return entry.offset, entry.time_ms, entry.event


@dataclass(slots=True)
class _Head:
    """A record's version, the offset of its last entry under this epoch (0: none), and the origin of that entry."""

    version: int = 0
    offset: int = 0
    origin: str = _ARCHIVED
    broken: bool = False  # one of its entries did not continue


@dataclass(slots=True)
class _Chains:
    """The records' chains of versions, as entries are added to them."""

    epoch: str
    archived: Mapping[str, Archived]
    heads: dict[str, _Head] = field(default_factory=dict)
    continued: list[JournalEntry] = field(default_factory=list)
    diverged: list[JournalEntry] = field(default_factory=list)

    def head(self, record: str) -> _Head:
        """The head of a record, including the entries that were added so far."""
        found = self.heads.get(record)
        if found is None:
            known = self.archived.get(record)
            found = _Head(known.version, known.offset if known.epoch == self.epoch else 0) if known else _Head()
            self.heads[record] = found
        return found

    def add(self, entry: JournalEntry, limits: Mapping[str, float], origin: str) -> None:
        """Add an entry to `continued` if it continues its record, else to `diverged`.

        The record's last entry must lie below the limit for its origin. An event without a record always continues.
        """
        head = self.head(entry.record)
        below = head.offset < limits.get(head.origin, inf)
        continues = entry.version == head.version + 1 and entry.offset > head.offset and below
        if entry.record and (head.broken or not continues):
            head.broken = True
            self.diverged.append(entry)
            return
        self.continued.append(entry)
        if entry.record:
            head.version = entry.version
            head.offset = entry.offset
            head.origin = origin


def _fork(
    archived_offset: int,
    archived: Mapping[str, Archived],
    survived: Sequence[JournalEntry],
    given: Sequence[JournalEntry],
) -> float:
    """The lowest offset at which the entries `given` are known to be another history than SQL's or the journal's."""
    offsets = {entry.offset for entry in survived}
    versions = {(entry.record, entry.version): entry.offset for entry in survived if entry.record}
    fork = inf
    for entry in given:
        known = archived.get(entry.record)
        twice = known is not None and 0 < entry.version <= known.version
        if entry.offset <= archived_offset or entry.offset in offsets or twice:
            fork = min(fork, entry.offset)
        fork = min(fork, versions.get((entry.record, entry.version), inf))
    return fork


def _dispute(given: Sequence[JournalEntry]) -> float:
    """The lowest offset from which on the writers' commits belong to two histories."""
    offsets: dict[int, str] = {}
    versions: dict[tuple[str, int], int] = {}
    dispute = inf
    for entry in given:
        if entry.offset in offsets:
            dispute = min(dispute, entry.offset)
        offsets[entry.offset] = entry.event
        if entry.record:
            before = versions.setdefault((entry.record, entry.version), entry.offset)
            if before != entry.offset:
                dispute = min(dispute, before)
    return dispute


def _numbered(entries: Sequence[JournalEntry], survived: Set[str], last_event: int) -> list[JournalEntry]:
    """Give new numbers to lifecycle events whose numbers are taken; events of the surviving journal keep theirs."""
    ops = {entry.event: unpack(entry.data) for entry in entries}
    top = max([last_event, *(_number(op) for some in ops.values() for op in some if op.kind == b"e")])
    taken = set[int]()
    renamed: dict[str, JournalEntry] = {}
    for entry in sorted(entries, key=lambda each: each.event not in survived):
        operations = list[Operation]()
        for op in ops[entry.event]:
            operation: Operation = op
            if op.kind == b"e":
                number = _number(op)
                if number in taken or number <= last_event:
                    number = top = top + 1
                    operation = (b"e", b"%d %b" % (number, op.name.partition(b" ")[2]), op.value)
                taken.add(number)
            operations.append(operation)
        data = pack(operations)
        renamed[entry.event] = entry if data == entry.data else replace(entry, data=data)
    return [renamed[entry.event] for entry in entries]


def _number(op: Op) -> int:
    return int(op.name.partition(b" ")[0])


_AT_ONCE = 200  # records
_PAGE = 1000  # entries, events
_ENDS = ("conversation.deleted", "session.expired")


class Backfill:
    """Brings an older SQL up to Redis, for one partition.

    `discard` deletes records from Redis, and returns whether this replica may continue; None: only count, change
    nothing.
    """

    def __init__(
        self,
        port: Port,
        warm: Warm,
        cold: ColdStore,
        keys: Keys,
        *,
        discard: Callable[[list[RecordKeys]], Awaitable[bool]] | None,
    ) -> None:
        self._port = port
        self._warm = warm
        self._cold = cold
        self._keys = keys
        self._discard = discard
        self._entries: dict[str, list[JournalEntry]] = {}  # of the journal, by record
        self._last: JournalEntry | None = None
        self._archived_ms = 0  # time of the last commit that Redis notes as archived
        self._happened: dict[int, Happened] = {}  # events by number
        self._ended: dict[str, Happened] = {}  # the last event of each record that was deleted or expired

    async def run(
        self, place: PartitionState, keys: PartitionKeys, after: Cursor | None, unarchived: Sequence[JournalEntry] = ()
    ) -> Backfilled | None:
        """Bring all records and move the cursor from `after`; None if it was moved meanwhile or the right was lost.

        Entries of `unarchived`, the writers' unarchived commits, fill gaps of the journal.
        """
        await self._read_journal(place, keys, unarchived)
        await self._read_events(place, keys)
        add = partial(self._cold.add_events, list(self._happened.values()))
        done = Backfilled(events=await self._port.sql(partial(add, keep=True)))
        seen: set[str] = set()
        cursor: int | None = None
        while cursor != 0:
            cursor, texts = await self._warm.partitions.records_page(keys, cursor or 0)
            # Keys beside a record, such as its lock, have a second colon; a record's text has one.
            new = {text for text in texts if text.count(":") == 1} - seen
            seen |= new
            if not await self._bring(place, keys, after, sorted(new), done):
                return None
        gone = self._entries.keys() | self._ended.keys()
        if not await self._bring(place, keys, after, sorted(gone - seen), done):
            return None
        if self._discard is None:
            return done
        await self._port.sql(partial(add, keep=False))
        end = self._last if self._last and self._last.offset == place.offset else None
        to = Cursor(keys.partition, place.epoch, count(place.epoch), place.offset, end.event if end else "")
        return done if await self._port.sql(self._cold.reach, after, to) else None

    async def _bring(
        self, place: PartitionState, keys: PartitionKeys, after: Cursor | None, texts: list[str], done: Backfilled
    ) -> bool:
        """Bring these records to SQL; False if this replica must stop."""
        for some in chunks(texts, _AT_ONCE):
            records = [self._keys.of(Ref.parse(text)) for text in some if text]
            states = await self._warm.partitions.loaded(place.epoch, records) if records else {}
            entries = {text: self._entries[text] for text in some if text in self._entries}
            ended = {text: self._ended[text] for text in some if text in self._ended}
            held = Held(
                keys.partition, place.epoch, place.archived, self._archived_ms, states, entries, ended,
                await self._elsewhere(states),
                await self._warm.partitions.items([each for each in records if _has_items(states, each)]),
            )  # fmt: skip
            brought = await self._port.sql(partial(self._cold.backfill, held, after, keep=self._discard is None))
            if brought is None:
                return False
            done.add(brought)
            stale = [self._keys.of(Ref.parse(text)) for text in brought.stale]
            if not await self._may_go_on(stale):
                return False
        return True

    async def _may_go_on(self, stale: Sequence[RecordKeys] = ()) -> bool:
        """Delete `stale` records from Redis, and renew the right to start the partition; False if it was lost."""
        return self._discard is None or await self._discard(list(stale))

    async def _elsewhere(self, states: Mapping[str, Loaded]) -> dict[str, Mapping[int, bytes]]:
        """The messages that Redis has of the records from which these were forked, in any partition."""
        sources = {
            run.source for text, each in states.items() for run in message_ranges.segments(text, each.state.fields)
        }
        every = dict(states)
        for some in chunks(sorted(sources - states.keys()), _AT_ONCE):
            every |= await self._warm.partitions.loaded("", [self._keys.of(Ref.parse(text)) for text in some])
        return {text: dict(each.messages) for text, each in every.items() if text in sources}

    async def _read_journal(
        self, place: PartitionState, keys: PartitionKeys, unarchived: Sequence[JournalEntry]
    ) -> None:
        found: dict[int, JournalEntry] = {}
        after = 0
        while entries := await self._warm.partitions.entries(keys, after, _PAGE):
            found.update((entry.offset, entry) for entry in entries)
            after = entries[-1].offset
            await self._may_go_on()
        for entry in unarchived:
            if entry.offset > place.archived:
                found.setdefault(entry.offset, entry)
        # A journal keeps its last archived entry. If that is missing, the next entry's time is the latest possible one.
        self._archived_ms = next((found[each].time_ms for each in sorted(found) if each >= place.archived), 0)
        for offset in sorted(found):
            if offset <= place.offset:
                self._last = entry = found[offset]
                self._entries.setdefault(entry.record, []).append(entry)
                self._note(happened(entry, keys.partition, place.epoch))

    async def _read_events(self, place: PartitionState, keys: PartitionKeys) -> None:
        after = 0
        while found := await self._warm.partitions.events(keys, place.epoch, after, _PAGE):
            self._note(found)
            after = found[-1].offset
            await self._may_go_on()

    def _note(self, found: Iterable[Happened]) -> None:
        for each in found:
            self._happened[each.offset] = each
            if each.type in _ENDS:
                known = self._ended.get(each.subject, each)
                self._ended[each.subject] = max(known, each, key=lambda end: end.version)


def _has_items(states: Mapping[str, Loaded], keys: RecordKeys) -> bool:
    there = states.get(keys.ref.text)
    return there is not None and ITEMS in there.state.fields
