"""The messages that a record shows, a page of them or all. Law: a read returns every requested message or raises.

Messages are in runs: numbers from one record, its own or the one that it was forked from. Hot and Redis keep recent
messages, SQL keeps all that are archived.

Design: section 11.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import filterfalse
from typing import Any

from distributed_state.errors import InvalidValue, NotFound, StateError, TooLarge
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.port import waited
from distributed_state.records.access import MESSAGES
from distributed_state.records.context import RecordContext
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.changes import Changes
from distributed_state.values import message_ranges
from distributed_state.values.journal import Segment
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import PARENT, SUMMARY, Message, ReadMessage
from distributed_state.warm.answers import Draft

_TOGETHER = 32  # messages that are read at once where their bytes are limited


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The choice of messages: those between two numbers (exclusive), of these the last, or the first in this order."""

    last: int | None = None
    limit: int | None = None
    before: int | None = None
    after: int | None = None
    order: str = "asc"

    def checked(self) -> Page:
        """Raise InvalidValue if it is invalid, or exceeds a database's integers. Our own code may pass -1."""
        for name in ("last", "limit", "before", "after"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value < 2**63):
                raise InvalidValue(f"{name} is an int from 0 on or None, not {value!r:.80}")
        if self.order not in ("asc", "desc"):
            raise InvalidValue(f"order is 'asc', the oldest first, or 'desc', not {self.order!r:.80}")
        if self.last is not None and self.limit is not None:
            raise InvalidValue("give last or limit, not both: limit counts from the beginning of the order")
        return self

    def of(self, runs: list[Segment]) -> list[Segment]:
        """The runs cut down to this page."""
        runs = message_ranges.between(runs, self.after, self.before)
        if self.last is not None or (self.limit is not None and self.order == "desc"):
            return message_ranges.last(runs, self.last if self.last is not None else self.limit or 0)
        return runs if self.limit is None else message_ranges.part(runs, 0, self.limit)


@dataclass(frozen=True, slots=True)
class Shown:
    """The messages that a record shows in these runs, in their stored form, each under its number."""

    entry: CachedRecord
    runs: list[Segment]
    stored: Mapping[int, bytes]

    def messages(self) -> list[Message]:
        """The messages, decoded when accessed: CorruptState and DecryptionFailed are raised then."""
        found: list[Message] = []
        for read, numbers in self._reading():
            found += Message.unread(read, [*map(self.stored.__getitem__, numbers)], numbers)
        return found

    def raw(self) -> list[dict[str, Any]]:
        """The content of each message, and its metadata beside it. Raises CorruptState and DecryptionFailed."""
        found = []
        for read, numbers in self._reading():
            for number in numbers:
                fields, time = read(self.stored[number], number)
                if time is not None and "timestamp" not in fields:
                    fields["timestamp"] = time
                fields["number"] = number
                found.append(fields)
        return found

    def _reading(self) -> Iterator[tuple[ReadMessage, range]]:
        for run in self.runs:
            yield self.entry.codec.written_to(run.source).read_message, range(run.start, run.stop)


async def chosen(tiers: Tiers, keys: RecordKeys, page: Page, *, fresh: bool, most: int | None = None) -> Shown:
    """The messages of a page, oldest first, and the version of the record that shows them.

    Raises TooLarge if their stored form exceeds `most` bytes; reading then stops near that limit.
    """
    entry = await read_path.read(tiers, keys, fresh=fresh)
    while True:
        for whole in (False, True):
            if entry.deleted:
                return Shown(entry, [], {})
            runs = page.of(message_ranges.segments(keys.ref.text, entry.fields))
            if whole or holds(entry.messages, runs):
                break
            # Hot keeps only recent messages; Redis holds all that may not be in SQL yet.
            entry = await read_path.load_whole(tiers, keys, entry)
        try:
            return await shown_in(tiers, keys, entry, runs, most)
        except TooLarge:
            raise
        except StateError as error:
            seen = entry
            entry = await read_path.read(tiers, keys, fresh=True)
            if type(error) is not StateError or (seen.epoch, seen.version) == (entry.epoch, entry.version):
                raise
            # The record was erased or purged since it was read above.


async def message(tiers: Tiers, keys: RecordKeys, number: int, *, fresh: bool) -> Message:
    """The message of this number. Raises NotFound if the conversation does not show it."""
    if type(number) is not int or number < 0:
        raise InvalidValue(f"a message's number is an int from 0 on, not {number!r:.80}")
    found = (await chosen(tiers, keys, Page(after=number - 1, before=number + 1), fresh=fresh)).messages()
    if not found:
        raise NotFound(f"{keys.ref.text[:200]}: has no message {number}")
    return found[0].looked_at()


async def last_of(tiers: Tiers, keys: RecordKeys, entry: CachedRecord, last: int | None) -> list[Message]:
    """The last messages, or all, of a record that was read; messages that the entry lacks are read from SQL."""
    if entry.deleted:
        return []
    page = Page(last=last)
    runs = page.of(message_ranges.segments(keys.ref.text, entry.fields))
    if not holds(entry.messages, runs):
        entry = await read_path.load_whole(tiers, keys, entry)
        runs = page.of(message_ranges.segments(keys.ref.text, entry.fields))
    return (await shown_in(tiers, keys, entry, runs)).messages()


async def shown_in(
    tiers: Tiers, keys: RecordKeys, entry: CachedRecord, runs: list[Segment], most: int | None = None
) -> Shown:
    """The stored form of every message in these runs. Raises TooLarge if that is more than `most` bytes."""
    known = await _found(tiers, keys, entry, runs, most)
    if not holds(known, runs):
        # When a fork is archived, it gets copies of messages that its source no longer has.
        await read_path.reach(tiers, keys)
        known = await _found(tiers, keys, entry, runs, most)
    lacking = [number for run in runs for number in lacked(known, run)]
    if lacking:
        raise StateError(f"{keys.ref.text[:200]}: messages {lacking[0]} to {lacking[-1]} are in neither Redis nor SQL")
    return Shown(entry, runs, known)


async def _found(
    tiers: Tiers, keys: RecordKeys, entry: CachedRecord, runs: list[Segment], most: int | None
) -> Mapping[int, bytes]:
    """Like `find`. Raises TooLarge if it is more than `most` bytes; reads a few at a time, the last first."""
    if most is None:
        return await find(tiers, keys, entry, runs)
    found: dict[int, bytes] = {}
    size, before = 0, None
    while some := message_ranges.last(message_ranges.between(runs, None, before), _TOGETHER):
        known = await find(tiers, keys, entry, some)
        part = {number: known[number] for run in some for number in range(run.start, run.stop) if number in known}
        size += sum(map(len, part.values()))
        found |= part
        if size > most:
            raise TooLarge(f"{keys.ref.text[:200]}: the last {len(found)} messages are {size} bytes, more than {most}")
        waited.room(size)
        before = some[0].start
    return found


def holds(known: Mapping[int, bytes], runs: list[Segment]) -> bool:
    """Whether `known` has every message of these runs."""
    return all(all(map(known.__contains__, range(run.start, run.stop))) for run in runs)


def lacked(known: Mapping[int, bytes], run: Segment) -> list[int]:
    """The numbers of a run that `known` lacks."""
    return [*filterfalse(known.__contains__, range(run.start, run.stop))]


async def find(tiers: Tiers, keys: RecordKeys, entry: CachedRecord, runs: list[Segment]) -> Mapping[int, bytes]:
    """The stored messages of these runs by number: all that the entry has, and from SQL the others."""
    missing = []
    for run in runs:
        lacking = lacked(entry.messages, run)
        if lacking:
            missing.append(Segment(run.source, lacking[0], lacking[-1] + 1))
    if not missing:
        return entry.messages
    parent = entry.fields.get(PARENT, b"").decode().rpartition("@")[0] or None
    rows = await tiers.port.sql(tiers.cold.messages, keys.ref.text, missing, parent)
    # Added to the hot entry, so that the next reader of a forked or hydrated conversation finds them there.
    hot = tiers.hot.entries.get(keys.ref.text)
    if hot is not None and hot.epoch == entry.epoch and hot.version == entry.version:
        shown = message_ranges.segments(keys.ref.text, entry.fields)
        recent = message_ranges.last(shown, tiers.settings.recent_messages)
        kept = {number for run in recent for number in range(run.start, run.stop)}
        hot.messages.update({number: data for number, data in rows.items() if number in kept})
    return {**rows, **entry.messages}


async def cleanup(context: RecordContext, days: float) -> int:
    """Hide messages that were committed more than this many days ago; returns the number of hidden messages."""
    if isinstance(days, bool) or not isinstance(days, (int, float)) or not 0 <= days < 1e6:
        raise InvalidValue(f"days is a number from 0 on, not {days!r:.80}")
    context.allow("write", MESSAGES)
    tiers = context.tiers
    await tiers.clock.know()
    before = tiers.clock.now() - days * 86400

    async def once() -> int:
        draft, hidden = await plan_cleanup(tiers, context.keys, context.changes(), before)
        if draft is not None:
            await context.commit(draft)
        return hidden

    return await write_path.until_no_conflict(tiers, once)


async def plan_cleanup(tiers: Tiers, keys: RecordKeys, changes: Changes, before: float) -> tuple[Draft | None, int]:
    """The change that hides messages committed before a time, None if there are none; and how many it hides."""
    present = await read_path.read(tiers, keys, fresh=True)
    text = keys.ref.text
    shown = [] if present.deleted else message_ranges.segments(text, present.fields)
    if not shown:
        return None, 0
    await read_path.reach(tiers, keys)
    kept = await tiers.port.sql(tiers.cold.since, text, shown, int(before * 1000))
    hidden = message_ranges.count(shown) - message_ranges.count(kept)
    if not hidden:
        return None, 0
    for name, value in message_ranges.shown(kept, present.fields).items():
        changes.reserved(name, value)
    changes.reserved(SUMMARY, None)  # the summary is of those messages
    return changes.draft("cleanup", expected=present.version, epoch=present.epoch), hidden
