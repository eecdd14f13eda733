"""Brings what Redis has of a partition to a SQL that is older. Law: nobody writes there meanwhile.

So what is read in pieces is one state of the partition: each record as it stands at the end of the journal, which is
where SQL's cursor is afterwards. Until that is moved all of it may be repeated: what was brought is not brought again.

Design: section 14.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

from distributed_state.cold.bulk import chunks
from distributed_state.cold.entries import happened
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Backfilled, Cursor, Held
from distributed_state.port import Port
from distributed_state.values import message_ranges
from distributed_state.values.journal import Happened, JournalEntry, Loaded
from distributed_state.values.keys import Keys, PartitionKeys, RecordKeys
from distributed_state.values.model import ITEMS, Ref
from distributed_state.warm.answers import PartitionState
from distributed_state.warm.client import Warm
from distributed_state.warm.stream import count

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
