"""What of a conversation a model is sent: the newest whole turns that fit, and a summary of what does not.

Law: nothing is read that is not needed to decide that, and raw messages are never changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from distributed_state.conversation.fit_window import choose, turns, with_calls
from distributed_state.conversation.tokens import Counter, counted, estimate
from distributed_state.errors import Conflict, CorruptState, InvalidValue, StateError, TooLarge
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records import history
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.changes import Changes
from distributed_state.values import codec, message_ranges
from distributed_state.values.codec import Codec
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import SEGMENTS, START, SUMMARY, Message
from distributed_state.warm.answers import Draft

M = TypeVar("M", bound=Message | dict[str, Any])
Strategy = Literal["drop", "summarize"]
Summarizer = Callable[[list[Message], str | None], str | Awaitable[str]]
_HEAD = 4
_LEAST = 16
_MOST = 512
_TITLE = "Summary of the conversation so far:\n"


@dataclass(frozen=True, slots=True)
class Summary:
    """The text that stands for the messages with the numbers `start` to `stop` (exclusive)."""

    text: str
    start: int
    stop: int

    def message(self) -> Message:
        """As a model is shown it."""
        return Message(role="system", content=_TITLE + self.text, metadata={"summary": [self.start, self.stop]})

    def pack(self, record_codec: Codec) -> bytes:
        """As it is stored."""
        return record_codec.encode({"text": self.text, "start": self.start, "stop": self.stop}, "#summary")

    @classmethod
    def parse(cls, data: bytes, record_codec: Codec) -> Summary:
        """Read back what `pack` wrote."""
        fields = record_codec.decode(data, "#summary")
        try:
            return cls(str(fields["text"]), int(fields["start"]), int(fields["stop"]))
        except (KeyError, TypeError, ValueError) as error:
            text = f"#summary: {len(data)} stored bytes are not a summary"
            raise CorruptState(text, field="#summary", data=data) from error


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a conversation that fits a budget of tokens.

    `messages`: system messages of its beginning, then the summary (a system message) if there is one, then the newest
    turns, oldest first. `tokens`: what they count. `dropped`: how many messages of the conversation are not among
    them, summarized ones included. `read` and `read_bytes`: how many stored messages were looked at, and their size.
    """

    messages: tuple[Message, ...]
    tokens: int
    dropped: int
    summary: Summary | None
    read: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a window may hold. Raises InvalidValue when made of anything that makes no sense."""

    max_tokens: int
    keep_last: int = 6
    keep_system: bool = True
    counter: Counter = estimate
    strategy: Strategy = "drop"
    summarizer: Summarizer | None = None
    wait: float = 60.0

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise InvalidValue(f"max_tokens is an int from 1 on, not {self.max_tokens!r:.80}")
        if type(self.keep_last) is not int or self.keep_last < 0:
            raise InvalidValue(f"keep_last is a number of turns, an int from 0 on, not {self.keep_last!r:.80}")
        if not isinstance(self.keep_system, bool):
            raise InvalidValue(f"keep_system is a bool, not {self.keep_system!r:.80}")
        if not callable(self.counter):
            raise InvalidValue(f"counter is a callable Message -> int, not {self.counter!r:.80}")
        if self.strategy not in get_args(Strategy):
            raise InvalidValue(f"strategy is one of {', '.join(get_args(Strategy))}, not {self.strategy!r:.80}")
        if self.strategy == "summarize" and not callable(self.summarizer):
            raise InvalidValue(
                "strategy 'summarize' takes summarizer=, a callable (messages, previous summary or None) -> text, "
                f"not {self.summarizer!r:.80}"
            )
        if self.strategy == "drop" and self.summarizer is not None:
            raise InvalidValue("strategy 'drop' calls no summarizer; give strategy='summarize'")
        if isinstance(self.wait, bool) or not isinstance(self.wait, (int, float)) or not self.wait >= 0:
            raise InvalidValue(f"wait is a number of seconds from 0 on, not {self.wait!r:.80}")


# What is read


class _Conversation:
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
            found = await history.find(self._tiers, self._names, self.entry, runs)
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
        return len(self._known)

    def summary(self) -> Summary | None:
        """The stored summary, if it tells of messages that are still shown."""
        data = self.entry.fields.get(SUMMARY)
        if data is None or not self.runs:
            return None
        summary = Summary.parse(data, self.entry.codec)
        return summary if summary.start <= self.runs[0].start < summary.stop else None

    def number(self, place: int) -> int:
        """The number of the message at a place."""
        return message_ranges.part(self.runs, place, place + 1)[0].start


@dataclass(frozen=True, slots=True)
class _Fitted:
    """What fits, and what has to be summarized so that all fits: the stored messages from `floor` to `target`."""

    window: Window
    conversation: _Conversation
    floor: int
    target: int


async def _fit(
    tiers: Tiers, names: RecordKeys, entry: CachedRecord, bounds: Bounds, pending: Sequence[Message] = ()
) -> _Fitted:
    """Read the newest messages, in pages, until it is known what is kept."""
    if inspect.iscoroutinefunction(bounds.summarizer) and not tiers.port.suspends:
        raise InvalidValue("a coroutine function is a summarizer for asyncio only, not for blocking code")
    it = _Conversation(tiers, names, entry, bounds)
    newest = max(0, it.length - tiers.settings.recent_messages)
    head = await _head(it, newest) if bounds.keep_system else []
    summary = it.summary() if bounds.strategy == "summarize" else None
    fixed = sum(count for _, count in head)
    if summary is not None:
        fixed += counted(bounds.counter, summary.message())
    floor = max(len(head), message_ranges.before(it.runs, summary.stop) if summary else 0)
    tail = [(message, counted(bounds.counter, message)) for message in pending]
    room = bounds.max_tokens - fixed
    start = it.length
    read = max(newest, floor)

    def place(room: int) -> int | None:
        messages = [message for message, _ in tail]
        counts = [count for _, count in tail]
        must = it.length - start
        keep_last = bounds.keep_last
        complete = start <= floor
        return choose(messages, counts, room=room, keep_last=keep_last, complete=complete, must=must)

    while (cut := place(room)) is None:
        tail = await it.read((read, start)) + tail
        start = read
        used = sum(count for _, count in tail)
        read = max(floor, start - min(_MOST, max(_LEAST, (room - used) * len(tail) // (used + 1))))
    target = floor
    if bounds.strategy == "summarize" and start + cut > floor:
        half = place(bounds.max_tokens // 2 - fixed)
        assert half is not None, "what decides on more room decides on less"
        target = start + half
    kept = tail[cut:]
    kept = [kept[each] for each in with_calls([message for message, _ in kept])]
    shown = [*head, *([(summary.message(), 0)] if summary else []), *kept]
    window = Window(
        messages=tuple(message for message, _ in shown),
        tokens=fixed + sum(count for _, count in kept),
        dropped=it.length + len(pending) - len(head) - len(kept),
        summary=summary,
        read=it.looked_at,
        read_bytes=it.bytes,
    )
    return _Fitted(window, it, floor, target)


async def _head(it: _Conversation, newest: int) -> list[tuple[Message, int]]:
    """The system messages at the beginning. The newest messages come with the first look at it."""
    head: list[tuple[Message, int]] = []
    while len(head) < it.length:
        start = len(head)
        stop = min(len(head) + _HEAD, it.length)
        page = (await it.read((start, stop), (max(newest, stop), it.length)))[: stop - start]
        system = next((n for n, (message, _) in enumerate(page) if not _is_system(message)), len(page))
        head += page[:system]
        if system < len(page):
            break
    return head


def _is_system(message: Message) -> bool:
    return message.role in ("system", "developer")


def truncate_history(
    messages: Sequence[M], max_tokens: int = 100_000, *, keep_last: int = 1, counter: Counter = estimate
) -> list[M]:
    """Choose of a plain list what fits in `max_tokens`: its system messages, and the newest whole turns.

    As `session.window` chooses, for messages that are kept elsewhere; they come back as they are, dicts or Messages, in
    their order. The last `keep_last` turns and all system messages are kept even if they do not fit.
    """
    bounds = Bounds(max_tokens, keep_last, counter=counter)
    read = [
        each if isinstance(each, Message) else codec.as_message(each, f"messages[{place}]")
        for place, each in enumerate(messages)
    ]
    counts = [counted(bounds.counter, message) for message in read]
    head = [place for place, message in enumerate(read) if _is_system(message)]
    rest = [place for place, message in enumerate(read) if not _is_system(message)]
    said = [read[place] for place in rest]
    room = max_tokens - sum(counts[place] for place in head)
    cut = choose(said, [counts[place] for place in rest], room=room, keep_last=keep_last, complete=True)
    kept = [rest[cut or 0 :][each] for each in with_calls(said[cut or 0 :])]
    return [messages[place] for place in sorted([*head, *kept])]


# Summaries

Look = Callable[[], Awaitable[CachedRecord]]
Keep = Callable[[CachedRecord, bytes], Awaitable[Any]]


async def of_session(
    tiers: Tiers, names: RecordKeys, bounds: Bounds, changes: Callable[[], Changes], commit: Callable[[Draft], Any]
) -> Window:
    """The window of a stored conversation. A summary that has to be made is made under the session's lock."""
    fresh = False

    async def fitted() -> _Fitted:
        nonlocal fresh
        entry = await read_path.read(tiers, names, fresh=fresh)
        fresh = True
        return await _fit(tiers, names, entry, bounds)

    first = await write_path.until_no_conflict(tiers, fitted)
    if first.target == first.floor:
        return first.window

    async def keep(seen: CachedRecord, data: bytes) -> None:
        change = changes()
        change.put(SUMMARY, data)
        draft = change.draft("summary")
        # Of the very messages that it was made from, and not over somebody else's.
        draft.epoch = seen.epoch
        draft.expectations += [(name, seen.fields.get(name)) for name in (SUMMARY, SEGMENTS, START)]
        await commit(draft)

    async with _alone(tiers, names, bounds.wait):
        return await summarized(
            tiers, names, bounds, look=lambda: read_path.read(tiers, names, fresh=True), keep=keep
        )  # fmt: skip


def _alone(tiers: Tiers, names: RecordKeys, wait: float) -> AbstractAsyncContextManager[Any]:
    """The session's lock, unless this task holds it. Others may write meanwhile: a summarizer takes its time."""
    held = tiers.leases.of(names.ref.text)
    if held is not None and held.owner is tiers.port.owner():
        return nullcontext()
    return tiers.lock(names, wait=wait, ttl=30.0, advisory=True)


async def summarized(
    tiers: Tiers, names: RecordKeys, bounds: Bounds, *, look: Look, keep: Keep, pending: Sequence[Message] = ()
) -> Window:
    """Summarize until the window fits. For the holder of the session's lock.

    `look` reads the record as it is now, `#summary` included; `keep(entry, data)` stores a new `#summary` for the entry
    that it was made from, or raises Conflict. `pending` messages follow the stored ones and are always kept.
    """
    for _ in range(tiers.settings.conflict_retries):
        fitted = await _fit(tiers, names, await look(), bounds, pending)
        if fitted.target == fitted.floor:
            return fitted.window
        await _summarize(fitted, bounds, names.ref.text[:200], keep)
    raise Conflict(f"{names.ref.text[:200]}: its messages change faster than they can be summarized")


async def _summarize(fitted: _Fitted, bounds: Bounds, record: str, keep: Keep) -> None:
    """Summarize what is too much, in pieces of at most `max_tokens`, each stored when it is made.

    Ends early if the conversation was cleared or rolled back meanwhile.
    """
    it = fitted.conversation
    entry = fitted.conversation.entry
    summary = fitted.window.summary
    place = fitted.floor
    while place < fitted.target:
        messages, stop = await _piece(it, place, fitted.target, bounds.max_tokens)
        first = it.number(place)
        last = it.number(stop - 1)
        text = await _ask(bounds, messages, summary.text if summary else None, f"{record}: messages {first} to {last}")
        summary = Summary(text, summary.start if summary else it.number(0), last + 1)
        data = summary.pack(entry.codec)
        try:
            await keep(entry, data)
        except Conflict:
            return
        entry = entry.with_field(SUMMARY, data)
        place = stop


async def _piece(it: _Conversation, start: int, stop: int, most: int) -> tuple[list[Message], int]:
    """Whole turns from a place on that together count at most so much, at least one; and the place after them."""
    messages: list[Message] = []
    counts: list[int] = []
    end = start
    while end < stop:
        page = await it.read((end, min(end + _MOST, stop)))
        end += len(page)
        messages += [message for message, _ in page]
        counts += [count for _, count in page]
        if sum(counts) > most:
            starts = [place for place in turns(messages) if place > 0]
            size = max((place for place in starts if sum(counts[:place]) <= most), default=min(starts, default=0))
            if size:
                return messages[:size], start + size
    return messages, stop


async def _ask(bounds: Bounds, messages: list[Message], previous: str | None, what: str) -> str:
    assert bounds.summarizer is not None
    try:
        made = bounds.summarizer(messages, previous)
        text = await made if inspect.isawaitable(made) else made
    except Exception as error:
        error.add_note(f"{what} were being summarized; they are all still there, and no summary of them was stored")
        raise
    if not isinstance(text, str) or not text.strip():
        raise InvalidValue(f"{what}: the summarizer returned {text!r:.80}, not a text; nothing was stored")
    size = counted(bounds.counter, Summary(text, 0, 0).message())
    if size > bounds.max_tokens:
        raise TooLarge(f"{what}: the summary of {size} tokens is more than max_tokens={bounds.max_tokens}; not stored")
    return text
