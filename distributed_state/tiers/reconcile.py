"""What of an epoch that ended continues the archive, and what is a branch. Law: no version ever has two states.

SQL has a record up to a version. What the surviving journal and the writers know beyond it is put in one order, and of
each record what continues it without a gap is to be archived. Everything else diverged.

Two commits at one offset, or of one version of one record, are of two histories: a Redis that came back older counts on
from where it was. An entry does not say which one it continues, only its number, so histories must not be mixed by
number: then a state would come about that nobody ever saw. The journal that survived is one history, whole and without
gaps, and what its Redis shows is made of it: its entries are preferred. Where only writers know of both, the commit
with the lower offset is taken, which is nearer to what is archived: fewer unknown ones can lie between. The rest of the
order (time, event) is there so that every replica chooses alike.

A journal may itself be another history than the one that was archived: then it goes on only where that had nothing.
From the lowest offset on at which two histories are known (the fork) a record goes on only within the history of its
last entry. Within the journal that is known. What writers remember is one history as long as no two of them disagree;
if they do, a record goes on no further than to its first entry past that point. And where one entry of a record does
not continue, none that follows it does. Too little put back is a branch, and nothing is lost; too much would be a state
that nobody wrote.

A SQL that was restored to an older state is brought up to Redis (`Backfill`) while nobody writes in the partition, so
all pieces are of one state: each record as it is at the end of the journal, which is SQL's cursor afterwards. Until
the cursor is moved, all of it may be repeated.

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
from distributed_state.values.journal import Happened, JournalEntry, Loaded, Op, Step, pack, unpack
from distributed_state.values.keys import Keys, PartitionKeys, RecordKeys
from distributed_state.values.model import ITEMS, Ref
from distributed_state.warm.answers import PartitionState
from distributed_state.warm.client import Warm
from distributed_state.warm.stream import count

_ARCHIVED, _SURVIVED, _REMEMBERED = "archived", "survived", "remembered"


@dataclass(frozen=True, slots=True)
class Reconciled:
    """`continued` is to be archived, `diverged` cannot be; both in the order of their offsets."""

    continued: list[JournalEntry]
    diverged: list[JournalEntry]


def reconcile(
    epoch: str, archived_offset: int, known: Commits, tail: Iterable[JournalEntry], remembered: Iterable[JournalEntry]
) -> Reconciled:
    """Choose among what is known of a partition's epoch that ended; what SQL has, and what was erased, is left out.

    SQL has the epoch up to `archived_offset`, and `known` of all these entries; `tail` is what the surviving journal
    holds, `remembered` what writers gave. Events whose numbers are taken get others.
    """
    journal = {entry.event: entry for entry in tail if entry.event in known.lacking}
    others = {entry.event: entry for entry in remembered if entry.event in known.lacking}
    survived = sorted(journal.values(), key=_place)
    given = sorted((entry for event, entry in others.items() if event not in journal), key=_place)
    chains = _Chains(epoch, known.heads)
    parting = _fork(archived_offset, known.heads, [], survived)  # where the journal is no more what SQL has
    for entry in survived:
        chains.add(entry, {_ARCHIVED: parting}, _SURVIVED)
    fork = min(parting, _fork(archived_offset, known.heads, survived, given))
    limits = {_ARCHIVED: fork, _SURVIVED: fork, _REMEMBERED: _dispute(given)}
    for entry in given:
        chains.add(entry, limits, _REMEMBERED)
    continued = sorted(chains.continued, key=_place)
    return Reconciled(_numbered(continued, set(journal), known.last_event), sorted(chains.diverged, key=_place))


def _place(entry: JournalEntry) -> tuple[int, int, str]:
    return entry.offset, entry.time_ms, entry.event


@dataclass(slots=True)
class _Head:
    """Where a record stands: its version, the offset of its last entry under this epoch (0: none), and where from."""

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
        """Where a record stands by now."""
        found = self.heads.get(record)
        if found is None:
            known = self.archived.get(record)
            found = _Head(known.version, known.offset if known.epoch == self.epoch else 0) if known else _Head()
            self.heads[record] = found
        return found

    def add(self, entry: JournalEntry, limits: Mapping[str, float], origin: str) -> None:
        """Add an entry if it continues its record, whose last entry lies below the limit for where that is from.

        An event alone continues always.
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
    """The lowest offset at which what writers gave is known to be another history than SQL or the surviving journal."""
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
    """The lowest offset from which on writers are known to remember two histories."""
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
    """The entries with another number for each lifecycle event whose number is taken; the journal's keep theirs."""
    ops = {entry.event: unpack(entry.data) for entry in entries}
    top = max([last_event, *(_number(op) for some in ops.values() for op in some if op.kind == b"e")])
    taken = set[int]()
    renamed: dict[str, JournalEntry] = {}
    for entry in sorted(entries, key=lambda each: each.event not in survived):
        steps = list[Step]()
        for op in ops[entry.event]:
            step: Step = op
            if op.kind == b"e":
                number = _number(op)
                if number in taken or number <= last_event:
                    number = top = top + 1
                    step = (b"e", b"%d %b" % (number, op.name.partition(b" ")[2]), op.value)
                taken.add(number)
            steps.append(step)
        data = pack(steps)
        renamed[entry.event] = entry if data == entry.data else replace(entry, data=data)
    return [renamed[entry.event] for entry in entries]


def _number(op: Op) -> int:
    return int(op.name.partition(b" ")[0])


_AT_ONCE = 200  # records
_PAGE = 1000  # entries, events
_ENDS = ("conversation.deleted", "session.expired")


class Backfill:
    """One partition of which Redis has more than SQL, `after` whose cursor it goes on.

    `discard` takes records out of Redis, and says whether it may still go on; None: nothing is changed, only counted.
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
        self._archived_ms = 0  # when the last commit was written that was archived, once
        self._happened: dict[int, Happened] = {}  # events by number
        self._ended: dict[str, int] = {}  # at which version records were deleted, as events tell

    async def run(
        self, place: PartitionState, keys: PartitionKeys, after: Cursor | None, remembered: Sequence[JournalEntry] = ()
    ) -> Backfilled | None:
        """Bring all of it, and move the cursor; None if it was moved meanwhile, or somebody else is at it.

        What writers remember of the epoch, and the journal lacks, is taken as if it were there.
        """
        await self._read_journal(place, keys, remembered)
        await self._read_events(place, keys)
        add = partial(self._cold.add_events, list(self._happened.values()))
        done = Backfilled(events=await self._port.sql(partial(add, keep=True)))
        seen: set[str] = set()
        cursor: int | None = None
        while cursor != 0:
            cursor, texts = await self._warm.partitions.records_page(keys, cursor or 0)
            # What lies beside a record is named behind another colon, which no id has.
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
        """Bring these records; whether it may go on."""
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
        """Whether nobody else may open the partition yet, and not for some seconds more; `stale` leave Redis."""
        return self._discard is None or await self._discard(list(stale))

    async def _elsewhere(self, states: Mapping[str, Loaded]) -> dict[str, Mapping[int, bytes]]:
        """The messages that Redis has of the records from which these were forked, in whatever partition."""
        sources = {
            run.source for text, each in states.items() for run in message_ranges.segments(text, each.state.fields)
        }
        every = dict(states)
        for some in chunks(sorted(sources - states.keys()), _AT_ONCE):
            every |= await self._warm.partitions.loaded("", [self._keys.of(Ref.parse(text)) for text in some])
        return {text: dict(each.messages) for text, each in every.items() if text in sources}

    async def _read_journal(
        self, place: PartitionState, keys: PartitionKeys, remembered: Sequence[JournalEntry]
    ) -> None:
        found: dict[int, JournalEntry] = {}
        after = 0
        while entries := await self._warm.partitions.entries(keys, after, _PAGE):
            found.update((entry.offset, entry) for entry in entries)
            after = entries[-1].offset
            await self._may_go_on()
        for entry in remembered:
            if entry.offset > place.archived:
                found.setdefault(entry.offset, entry)
        # The last archived entry stays in a journal. Without it the next one says until when it may have been.
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
                self._ended[each.subject] = max(each.version, self._ended.get(each.subject, 0))


def _has_items(states: Mapping[str, Loaded], names: RecordKeys) -> bool:
    there = states.get(names.ref.text)
    return there is not None and ITEMS in there.state.fields
