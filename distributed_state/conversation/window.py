"""The part of a conversation that is sent to a model: the newest whole turns that fit, and a summary of the others.

Law: a window reads only the messages that decide what fits, and never changes stored messages.

Messages are read in pages, the newest first, until they no longer fit; system messages are read from the beginning. A
tool result is never kept without its call. A summary is made once, under the session's lock, and stored at once, with
the numbers of the messages that it replaces.

Retention (`leave_out`) is an ordinary commit: earlier versions still show all messages, until a purge removes those
versions and the messages.

A Context holds the last messages of the conversation, its fields, and other records, read in one round trip at most.

Design: sections 11, 15.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from distributed_state.errors import Conflict, CorruptState, Deleted, InvalidValue, StateError, TooLarge
from distributed_state.formats import Counter, calls, counted, estimate, results
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records import messages
from distributed_state.records.context import RecordContext
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import codec, message_ranges
from distributed_state.values.codec import Codec
from distributed_state.values.journal import Segment
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import PHASE, SEGMENTS, START, SUMMARY, Message
from distributed_state.warm.lease import AsyncLease


def turns(messages: Sequence[Message]) -> list[int]:
    """The places where turns begin: each user message, except one between a call and its late result.

    A call's result is searched only in the same turn and the next: otherwise a call without a result would join all
    turns.
    """
    starts: list[int] = []
    before: set[str] = set()  # calls of the previous turn without a result
    waiting: set[str] = set()  # calls of this turn without a result
    for place, message in enumerate(messages):
        if message.role == "user":
            starts.append(place)
            before = waiting
            waiting = set()
        for id in results(message):
            if id in waiting:
                waiting.remove(id)
            elif id in before and starts:
                starts.pop()
                before = set()
        waiting.update(call.id for call in calls(message))
    return starts


def choose(
    messages: Sequence[Message],
    counts: Sequence[int],
    *,
    room: int,
    keep_last: int,
    complete: bool,
    must: int | None = None,
) -> int | None:
    """The place of the first kept message. Whole turns are kept, the newest first, as long as they fit in `room`.

    The last `keep_last` turns, and all from the place `must` on, are kept regardless of their size. Messages before the
    first user message are a turn too. Returns None if older messages are needed to decide, because these are not all
    (`complete` is false).
    """
    starts = turns(messages)
    first = next((place for place, message in enumerate(messages) if message.role == "user"), None)
    unsure = None
    if complete:
        starts = sorted({0, *starts}) if messages else []
    elif first is not None and not _answers_itself(messages, first):
        unsure = first  # a result in the oldest turn may belong to a call that was not read
    must = len(messages) if must is None else must
    cut = len(messages)
    kept = 0
    total = 0
    for start in reversed(starts):
        total += sum(counts[start:cut])
        if total > room and kept >= keep_last and cut <= must:
            return cut
        if start == unsure:
            return None
        cut = start
        kept = kept + 1
    total += sum(counts[:cut])
    return cut if complete or (total > room and kept >= keep_last and cut <= must) else None


def _answers_itself(messages: Sequence[Message], start: int) -> bool:
    known: set[str] = set()
    for place in range(start, len(messages)):
        if place > start and messages[place].role == "user":
            break
        if not known.issuperset(results(messages[place])):
            return False
        known.update(call.id for call in calls(messages[place]))
    return True


def with_calls(messages: Sequence[Message]) -> list[int]:
    """The places of all messages except results whose calls are missing."""
    known: set[str] = set()
    places = []
    for place, message in enumerate(messages):
        if message.role != "tool" or known.issuperset(results(message)):
            places.append(place)
        known.update(call.id for call in calls(message))
    return places


M = TypeVar("M", bound=Message | dict[str, Any])
Strategy = Literal["drop", "summarize"]
Summarizer = Callable[[list[Message], str | None], str | Awaitable[str]]
_TITLE = "Summary of the conversation so far:\n"


@dataclass(frozen=True, slots=True)
class Summary:
    """The text that replaces the messages with the numbers `start` to `stop` (exclusive)."""

    text: str
    start: int
    stop: int

    def message(self) -> Message:
        """The message for a model."""
        return Message(role="system", content=_TITLE + self.text, metadata={"summary": [self.start, self.stop]})

    def pack(self, record_codec: Codec) -> bytes:
        """The stored form."""
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

    `messages`: the system messages at the beginning, then the summary (a system message) if there is one, then the
    newest turns, oldest first. `tokens`: their tokens. `dropped`: how many messages of the conversation are left out,
    including summarized ones. `read` and `read_bytes`: how many stored messages were read, and their size.
    """

    messages: tuple[Message, ...]
    tokens: int
    dropped: int
    summary: Summary | None
    read: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a window. Raises InvalidValue for invalid ones."""

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
        if self.summarizer is not None and not _takes_two(self.summarizer):
            raise InvalidValue("summarizer= takes two arguments: the messages, and the previous summary or None")
        if self.strategy == "drop" and self.summarizer is not None:
            raise InvalidValue("strategy 'drop' calls no summarizer; give strategy='summarize'")
        if isinstance(self.wait, bool) or not isinstance(self.wait, (int, float)) or not self.wait >= 0:
            raise InvalidValue(f"wait is a number of seconds from 0 on, not {self.wait!r:.80}")


def _takes_two(summarizer: Summarizer) -> bool:
    try:
        inspect.signature(summarizer).bind([], None)
    except TypeError:
        return False
    except ValueError:  # a function in C may have no signature
        return True
    return True


def is_system(message: Message) -> bool:
    """Whether the message has the role system or developer."""
    return message.role in ("system", "developer")


def truncate_history(
    messages: Sequence[M], max_tokens: int = 100_000, *, keep_last: int = 1, counter: Counter = estimate
) -> list[M]:
    """Choose from a plain list the messages that fit in `max_tokens`: system messages, and the newest whole turns.

    Applies the rules of `session.window` to messages that are stored elsewhere. They are dicts or Messages, and are
    returned unchanged and in order. The last `keep_last` turns and all system messages are kept even if they do not
    fit.
    """
    bounds = Bounds(max_tokens, keep_last, counter=counter)
    read = [
        each if isinstance(each, Message) else codec.as_message(each, f"messages[{place}]")
        for place, each in enumerate(messages)
    ]
    counts = [counted(bounds.counter, message) for message in read]
    head = [place for place, message in enumerate(read) if is_system(message)]
    rest = [place for place, message in enumerate(read) if not is_system(message)]
    said = [read[place] for place in rest]
    room = max_tokens - sum(counts[place] for place in head)
    cut = choose(said, [counts[place] for place in rest], room=room, keep_last=keep_last, complete=True)
    kept = [rest[cut or 0 :][each] for each in with_calls(said[cut or 0 :])]
    return [messages[place] for place in sorted([*head, *kept])]


_HEAD = 4
_LEAST = 16
PAGE = 512  # messages that are read at once


class StoredConversation:
    """A conversation that is read from both ends. Stored messages have places from 0 on; pending messages follow."""

    def __init__(self, tiers: Tiers, keys: RecordKeys, entry: CachedRecord, bounds: Bounds) -> None:
        self._tiers = tiers
        self._names = keys
        self._bounds = bounds
        self.entry = CachedRecord(entry.codec, entry.epoch, entry.version, entry.fields, dict(entry.messages))
        self.runs = [] if entry.deleted else message_ranges.segments(keys.ref.text, entry.fields)
        self.length = message_ranges.count(self.runs)
        self.bytes = 0
        self._known: dict[int, tuple[Message, int]] = {}

    async def read(self, *spans: tuple[int, int]) -> list[tuple[Message, int]]:
        """The messages at the places of these spans, with their tokens; one query reads all that are not loaded yet."""
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
                # Some were neither hot nor archived at the first read; they were archived since, so SQL has them at the
                # second read.
                newer = await read_path.load_whole(self._tiers, self._names, self.entry)
                self.entry.messages.update(newer.messages)
        name = self._names.ref.text[:200]
        lacking = sorted(numbers - found.keys())
        if (newer.epoch, newer.version) != (self.entry.epoch, self.entry.version):
            raise Conflict(f"{name}: changed while it was read", version=newer.version)
        raise StateError(f"{name}: messages {lacking[0]} to {lacking[-1]} are in neither Redis nor SQL")

    @property
    def looked_at(self) -> int:
        """The number of stored messages that were read."""
        return len(self._known)

    def summary(self) -> Summary | None:
        """The stored summary, if the messages that it replaces are still shown."""
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
    """The messages that fit.

    So that everything fits, the stored messages from `floor` to `target` have to be summarized.
    """

    window: Window
    conversation: StoredConversation
    floor: int
    target: int


class _Fitting:
    """Reads a conversation from its end until the kept messages are known."""

    def __init__(self, it: StoredConversation, bounds: Bounds, pending: Sequence[Message]) -> None:
        self._it = it
        self._bounds = bounds
        self._pending = pending
        self._tail = [(message, counted(bounds.counter, message)) for message in pending]
        self._start = it.length  # messages before this place have not been read yet

    async def fit(self, recent: int) -> Fitted:
        """The messages that fit; `recent` messages are loaded without a query."""
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
        """How many of the loaded messages are left out; reads pages, from place `read` on, until that is known."""
        while (cut := self._place(room, floor)) is None:
            self._tail = await self._it.read((read, self._start)) + self._tail
            self._start = read
            used = sum(count for _, count in self._tail)
            most = min(PAGE, max(_LEAST, (room - used) * len(self._tail) // (used + 1)))
            read = max(floor, self._start - most)
        return cut

    def _place(self, room: int, floor: int) -> int | None:
        """The place of the first kept message among those that were read; None if more must be read."""
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
    tiers: Tiers, keys: RecordKeys, entry: CachedRecord, bounds: Bounds, pending: Sequence[Message] = ()
) -> Fitted:
    """Read the newest messages, in pages, until the kept ones are known."""
    if inspect.iscoroutinefunction(bounds.summarizer) and not tiers.port.suspends:
        raise InvalidValue("a coroutine function is a summarizer for asyncio only, not for blocking code")
    it = StoredConversation(tiers, keys, entry, bounds)
    return await _Fitting(it, bounds, pending).fit(tiers.settings.recent_messages)


async def _head(it: StoredConversation, newest: int) -> list[tuple[Message, int]]:
    """The system messages at the beginning. The first read loads the newest messages as well."""
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


Look = Callable[[], Awaitable[CachedRecord]]
Keep = Callable[[CachedRecord, bytes], Awaitable[Any]]


async def of_session(context: RecordContext, bounds: Bounds) -> Window:
    """The window of a stored conversation. A new summary is made under the session's lock."""
    tiers = context.tiers
    keys = context.keys
    fresh = False

    async def fitted() -> Fitted:
        nonlocal fresh
        entry = await read_path.read(tiers, keys, fresh=fresh)
        fresh = True
        return await fit(tiers, keys, entry, bounds)

    first = await write_path.until_no_conflict(tiers, fitted)
    if first.target == first.floor:
        return first.window

    async def keep(seen: CachedRecord, data: bytes) -> None:
        change = context.changes()
        change.put(SUMMARY, data)
        # Stored only if its messages and the stored summary are unchanged: another worker's summary is never replaced.
        expectations = [(name, seen.fields.get(name)) for name in (SUMMARY, SEGMENTS, START)]
        await context.commit(change.draft("summary", epoch=seen.epoch, expectations=expectations))

    async with _alone(context, bounds.wait):
        return await summarized(
            tiers, keys, bounds, look=lambda: read_path.read(tiers, keys, fresh=True), keep=keep
        )  # fmt: skip


def _alone(context: RecordContext, wait: float) -> AbstractAsyncContextManager[Any]:
    """The session's advisory lock, unless this task holds a lock.

    Others may write meanwhile, as a summarizer is slow.
    """
    tiers = context.tiers
    held = tiers.leases.of(context.text)
    if held is not None and held.owner is tiers.port.owner():
        return nullcontext()
    return AsyncLease(tiers.leases, context.keys, wait=wait, ttl=30.0, advisory=True)


async def summarized(
    tiers: Tiers, keys: RecordKeys, bounds: Bounds, *, look: Look, keep: Keep, pending: Sequence[Message] = ()
) -> Window:
    """Summarize until the window fits. The caller holds the session's lock.

    `look` reads the record as it is now, `#summary` included; `keep(entry, data)` stores a new `#summary` for the entry
    that it was made from, or raises Conflict. `pending` messages follow the stored ones and are always kept.
    """
    for _ in range(tiers.settings.conflict_retries):
        fitted = await fit(tiers, keys, await look(), bounds, pending)
        if fitted.target == fitted.floor:
            return fitted.window
        await _summarize(fitted, bounds, keys.ref.text[:200], keep)
    raise Conflict(f"{keys.ref.text[:200]}: its messages change faster than they can be summarized")


async def _summarize(fitted: Fitted, bounds: Bounds, record: str, keep: Keep) -> None:
    """Summarize the excess, in pieces of at most `max_tokens`, each stored when it is made.

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


async def _piece(it: StoredConversation, start: int, stop: int, most: int) -> tuple[list[Message], int]:
    """Whole turns from a place on, at least one, with at most this many tokens in total; and the place after them."""
    messages: list[Message] = []
    counts: list[int] = []
    end = start
    while end < stop:
        page = await it.read((end, min(end + PAGE, stop)))
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


async def leave_out(context: RecordContext, keep: int | None, before_ms: int | None) -> int:
    """Show only the newest `keep` messages, and only those from a time on; returns how many are no longer shown."""

    async def once() -> int:
        entry = await read_path.read(context.tiers, context.keys, fresh=True)
        if entry.deleted:
            return 0
        runs = message_ranges.segments(context.text, entry.fields)
        kept = runs if keep is None else message_ranges.last(runs, keep)
        if before_ms is not None:
            await read_path.reach(context.tiers, context.keys)
            kept = await context.tiers.port.sql(context.tiers.cold.since, context.text, kept, before_ms)
        data = entry.fields.get(SUMMARY)
        if data is not None and runs:
            kept = max(kept, _behind(runs, Summary.parse(data, entry.codec)), key=message_ranges.count)
        left_out = message_ranges.count(runs) - message_ranges.count(kept)
        if left_out:
            changes = context.changes()
            for name, value in message_ranges.shown(kept, entry.fields).items():
                changes.reserved(name, value)
            await context.commit(changes.draft("retention", expected=entry.version, epoch=entry.epoch))
        return left_out

    try:
        return await write_path.until_no_conflict(context.tiers, once)
    except Deleted:
        return 0


def _behind(runs: list[Segment], summary: Summary) -> list[Segment]:
    """The runs that a summary needs: its last summarized message, which identifies it, and all later messages."""
    if not summary.start <= runs[0].start < summary.stop:
        return []
    return message_ranges.between(runs, summary.stop - 2, None)


_OWN = ("agent.", "workflow.")


@dataclass(frozen=True, slots=True)
class Context:
    """The result of one read of a session and other records.

    `messages` are the last ones, oldest first; `fields` are the session's, without those of an AgentState or Workflow;
    `facts` holds the fields of each other record under its scope and id, as in `facts["user:u1"]`; `context_tokens`
    counts the messages and the rendered state.
    """

    messages: tuple[Message, ...]
    fields: dict[str, Any]
    phase: str | None
    facts: dict[str, dict[str, Any]]
    context_tokens: int

    def render(self) -> str:
        """The state as text for a system message: a heading for each record, a line `name: JSON` for each field.

        Values are JSON on one line each, so that a user's text cannot pass for a heading or another field; bytes are
        shown as their length.
        """
        return _render(self.fields, self.phase, self.facts)

    def to_messages(self) -> list[Message]:
        """The messages with the rendered state in front, as a system message."""
        text = self.render()
        return [*([Message(role="system", content=text)] if text else []), *self.messages]


async def look(contexts: Sequence[RecordContext], last: int, counter: Counter) -> Context:
    """Read the session and the other records; those that are not in hot are read in one exchange."""
    if type(last) is not int or last < 0:
        raise InvalidValue(f"last is an int from 0 on, not {last!r}")
    session = contexts[0]
    entries = await read_path.read_many(session.tiers, [each.keys for each in contexts])
    shown = [_shown(each, entry) for each, entry in zip(contexts, entries, strict=True)]
    said = tuple(await messages.last_of(session.tiers, session.keys, entries[0], last))
    stored = None if entries[0].deleted else entries[0].fields.get(PHASE)
    phase = None if stored is None else stored.decode("utf-8", "surrogatepass")
    facts = {each.text: fields for each, fields in zip(contexts[1:], shown[1:], strict=True)}
    rendered = _render(shown[0], phase, facts)
    head = [Message(role="system", content=rendered)] if rendered else []
    tokens = sum(counted(counter, message) for message in (*head, *said))
    return Context(said, shown[0], phase, facts, tokens)


def _shown(context: RecordContext, entry: CachedRecord) -> dict[str, Any]:
    return {key: value for key, value in sorted(context.fields(entry).items()) if not key.startswith(_OWN)}


def _render(fields: dict[str, Any], phase: str | None, facts: dict[str, dict[str, Any]]) -> str:
    parts = [_part("session" if phase is None else f"session, in phase {_json(phase)}", fields)]
    parts += [_part(name, known) for name, known in facts.items()]
    return "\n\n".join(part for part in parts if part)


def _part(name: str, fields: dict[str, Any]) -> str:
    lines = [f"{_json(key) if _odd(key) else key}: {_json(value)}" for key, value in fields.items()]
    return "\n".join([f"# {name}", *lines]) if lines or "," in name else ""


def _odd(key: str) -> bool:
    return not key.isprintable() or key[:1] in ("#", '"') or ": " in key


def _json(value: Any) -> str:
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"  # JSON never begins with <
    return codec.encode(value).decode().strip()
