"""Reads of a conversation what a window holds. Law: nothing is read that is not needed to decide what fits.

The newest messages come first, in pages, until they are more than fit; system messages come from the beginning.

Design: section 11.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distributed_state.conversation.fit_window import choose, with_calls
from distributed_state.conversation.tokens import counted
from distributed_state.conversation.window import Bounds, Summary, Window, is_system
from distributed_state.errors import Conflict, InvalidValue, StateError
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records import messages
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import message_ranges
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import SUMMARY, Message

_HEAD = 4
_LEAST = 16
PAGE = 512  # messages that are read at once


class StoredConversation:
    """A conversation read from both ends. Its stored messages have places from 0 on, pending ones follow."""

    def __init__(self, tiers: Tiers, names: RecordKeys, entry: CachedRecord, bounds: Bounds) -> None:
        self._tiers = tiers
        self._names = names
        self._bounds = bounds
        self.entry = CachedRecord(entry.codec, entry.epoch, entry.version, entry.fields, dict(entry.messages))
        self.runs = [] if entry.deleted else message_ranges.segments(names.ref.text, entry.fields)
        self.length = message_ranges.count(self.runs)
        self.bytes = 0
        self._known: dict[int, tuple[Message, int]] = {}

    async def read(self, *spans: tuple[int, int]) -> list[tuple[Message, int]]:
        """The messages at the places of these spans and what each counts; one query for what is not at hand."""
        wanted: dict[int, tuple[int, str]] = {}
        for start, stop in spans:
            runs = message_ranges.part(self.runs, start, stop)
            numbers = [(number, run.source) for run in runs for number in range(run.start, run.stop)]
            wanted.update(zip(range(start, stop), numbers, strict=True))
        if any(place not in self._known for place in wanted):
            await self._fetch([run for start, stop in spans for run in message_ranges.part(self.runs, start, stop)])
        for place, (number, source) in wanted.items():
            if place not in self._known:
                data = self.entry.messages[number]
                message = self.entry.codec.decode_message(data, source, number)
                self.bytes += len(data)
                self._known[place] = message, counted(self._bounds.counter, message)
        return [self._known[place] for place in wanted]

    async def _fetch(self, runs: list[Any]) -> None:
        numbers = {number for run in runs for number in range(run.start, run.stop)}
        for whole in (False, True):
            found = await messages.find(self._tiers, self._names, self.entry, runs)
            self.entry.messages.update(found)
            if numbers <= found.keys():
                return
            if not whole:
                # Not archived yet, and no longer hot. Those that are archived just now are in SQL at the second look.
                newer = await read_path.load_whole(self._tiers, self._names, self.entry)
                self.entry.messages.update(newer.messages)
        name = self._names.ref.text[:200]
        lacking = sorted(numbers - found.keys())
        if (newer.epoch, newer.version) != (self.entry.epoch, self.entry.version):
            raise Conflict(f"{name}: changed while it was read", version=newer.version)
        raise StateError(f"{name}: messages {lacking[0]} to {lacking[-1]} are in neither Redis nor SQL")

    @property
    def looked_at(self) -> int:
        """How many stored messages were read."""
        return len(self._known)

    def summary(self) -> Summary | None:
        """The stored summary, if it stands for messages that are still shown."""
        data = self.entry.fields.get(SUMMARY)
        if data is None or not self.runs:
            return None
        summary = Summary.parse(data, self.entry.codec)
        return summary if summary.start <= self.runs[0].start < summary.stop else None

    def number(self, place: int) -> int:
        """The number of the message at a place."""
        return message_ranges.part(self.runs, place, place + 1)[0].start


@dataclass(frozen=True, slots=True)
class Fitted:
    """What fits, and what has to be summarized so that all fits: the stored messages from `floor` to `target`."""

    window: Window
    conversation: StoredConversation
    floor: int
    target: int


class _Fitting:
    """Reads a conversation from its end until it is known what is kept."""

    def __init__(self, it: StoredConversation, bounds: Bounds, pending: Sequence[Message]) -> None:
        self._it = it
        self._bounds = bounds
        self._pending = pending
        self._tail = [(message, counted(bounds.counter, message)) for message in pending]
        self._start = it.length  # what is before this place was not read yet

    async def fit(self, recent: int) -> Fitted:
        """What fits; `recent` messages are at hand without a query."""
        it = self._it
        bounds = self._bounds
        newest = max(0, it.length - recent)
        head = await _head(it, newest) if bounds.keep_system else []
        summary = it.summary() if bounds.strategy == "summarize" else None
        fixed = sum(count for _, count in head)
        if summary is not None:
            fixed += counted(bounds.counter, summary.message())
        floor = max(len(head), message_ranges.before(it.runs, summary.stop) if summary else 0)
        cut = await self._cut(bounds.max_tokens - fixed, floor, max(newest, floor))
        target = floor
        if bounds.strategy == "summarize" and self._start + cut > floor:
            half = self._place(bounds.max_tokens // 2 - fixed, floor)
            assert half is not None, "what decides on more room decides on less"
            target = self._start + half
        return Fitted(self._window(head, summary, fixed, cut), it, floor, target)

    async def _cut(self, room: int, floor: int, read: int) -> int:
        """How much of what was read is left out, when enough was read to know that: in pages, from place `read` on."""
        while (cut := self._place(room, floor)) is None:
            self._tail = await self._it.read((read, self._start)) + self._tail
            self._start = read
            used = sum(count for _, count in self._tail)
            most = min(PAGE, max(_LEAST, (room - used) * len(self._tail) // (used + 1)))
            read = max(floor, self._start - most)
        return cut

    def _place(self, room: int, floor: int) -> int | None:
        """Where in what was read the kept messages begin; None: more has to be read."""
        return choose(
            [message for message, _ in self._tail],
            [count for _, count in self._tail],
            room=room,
            keep_last=self._bounds.keep_last,
            complete=self._start <= floor,
            must=self._it.length - self._start,
        )

    def _window(self, head: list[tuple[Message, int]], summary: Summary | None, fixed: int, cut: int) -> Window:
        kept = self._tail[cut:]
        kept = [kept[each] for each in with_calls([message for message, _ in kept])]
        shown = [*head, *([(summary.message(), 0)] if summary else []), *kept]
        return Window(
            messages=tuple(message for message, _ in shown),
            tokens=fixed + sum(count for _, count in kept),
            dropped=self._it.length + len(self._pending) - len(head) - len(kept),
            summary=summary,
            read=self._it.looked_at,
            read_bytes=self._it.bytes,
        )


async def fit(
    tiers: Tiers, names: RecordKeys, entry: CachedRecord, bounds: Bounds, pending: Sequence[Message] = ()
) -> Fitted:
    """Read the newest messages, in pages, until it is known what is kept."""
    if inspect.iscoroutinefunction(bounds.summarizer) and not tiers.port.suspends:
        raise InvalidValue("a coroutine function is a summarizer for asyncio only, not for blocking code")
    it = StoredConversation(tiers, names, entry, bounds)
    return await _Fitting(it, bounds, pending).fit(tiers.settings.recent_messages)


async def _head(it: StoredConversation, newest: int) -> list[tuple[Message, int]]:
    """The system messages at the beginning. The newest messages come with the first look at it."""
    head: list[tuple[Message, int]] = []
    while len(head) < it.length:
        start = len(head)
        stop = min(len(head) + _HEAD, it.length)
        page = (await it.read((start, stop), (max(newest, stop), it.length)))[: stop - start]
        system = next((n for n, (message, _) in enumerate(page) if not is_system(message)), len(page))
        head += page[:system]
        if system < len(page):
            break
    return head
