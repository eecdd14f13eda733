"""Journal entries read once, into what the tables want. Law: bytes that cannot be read are named, never guessed.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distributed_state.cold.tables import LONGEST
from distributed_state.errors import CorruptState, UnknownStep
from distributed_state.values import message_ranges
from distributed_state.values.journal import KINDS, Happened, JournalEntry, Op, Segment, item_of, pack, unpack
from distributed_state.values.model import (
    DELETED,
    ITEMS,
    LIFETIME,
    OWNER,
    PARENT,
    PHASE,
    SEGMENTS,
    TAG,
    escape,
    unescape,
)
from distributed_state.values.search import tag_of

LARGEST = 2**63 - 1


class ParsedEvent(NamedTuple):
    """An event as it stands in a journal entry. `offset` is its place among the partition's events."""

    offset: int
    id: str
    type: str
    subject: str
    data: bytes


@dataclass(slots=True)
class Parsed:
    """An entry with its steps, and what of them the tables keep in columns of their own."""

    entry: JournalEntry
    partition: int
    epoch: str
    data: bytes  # the steps as `changes` has them: without what messages and items say, which those tables have
    label: str | None = None
    messages: Sequence[tuple[int, bytes]] = ()
    items: Sequence[tuple[tuple[bytes, bytes], bytes]] = ()  # collection and key, and the frame; empty: deleted
    runs: Sequence[Segment] = ()
    owner: str | None = None
    parent: str | None = None
    parent_version: int = 0
    shows: int | None = None  # the version whose items it shows from now on, below a new layer; 0: none of before
    touched: Collection[bytes] = ()  # which of these fields were set or deleted
    deleted: bool = False
    tags: Sequence[tuple[str, bool]] = ()  # in order, whether it is there then; '': all go
    lifetime: str | None = None
    phase: str | None = None
    events: Sequence[ParsedEvent] = ()

    @property
    def ops(self) -> list[Op]:
        """The steps, read once more: few are asked for, and kept they would be most of what the collector walks."""
        return unpack(self.entry.data)


def parse(entry: JournalEntry, partition: int, epoch: str) -> Parsed:
    """Read an entry. Raises ValueError or CorruptState if no database could hold it as it is.

    Raises UnknownStep if it may well, and only a newer release knows how.
    """
    steps = unpack(entry.data)
    # Before anything that may be wrong with it: what cannot be read is put aside, and this may not be.
    _refuse_unknown(entry, partition, steps)
    "".join((entry.record, entry.event, entry.kind, entry.actor)).encode()
    if "\0" in entry.record or "\0" in entry.event or "\0" in entry.kind or "\0" in entry.actor:
        raise ValueError("a NUL in its record, event, kind or actor")
    numbers = (entry.version, entry.time_ms, entry.token, entry.offset)
    if min(numbers) < 0 or max(numbers) > LARGEST:
        raise ValueError("a number outside of 0 .. 2**63 - 1")
    parsed = Parsed(entry, partition, epoch, entry.data)
    messages: list[tuple[int, bytes]] = []
    items: dict[tuple[bytes, bytes], bytes] = {}
    events: list[ParsedEvent] = []
    tags: list[tuple[str, bool]] = []
    for op in steps:
        kind, name, value = op
        if kind == b"m":
            messages.append((_number(name, "message"), value))
        elif kind == b"l":
            parsed.label = escape((value or name).decode("utf-8", "surrogatepass"))
        elif kind == b"e":
            events.append(_parsed_event(entry.event, len(events), op))
        elif kind == b"p" or kind == b"q":
            # An empty frame is what stands for a deleted item.
            if (kind == b"p") != bool(value):
                raise ValueError(f"a step {kind.decode()} with {len(value)} bytes")
            items[item_of(name)] = value
        elif kind == b"c":
            tags += [("", False)] if name == TAG else []
        elif name[:2] == TAG:
            tags.append((tag_of(name), kind == b"s"))
        elif name[:1] == b"#":
            _read_reserved(parsed, op)
    # What there is none of is shared: the collector would walk an empty list of each entry.
    parsed.messages, parsed.items, parsed.events = messages or (), tuple(items.items()), events or ()
    parsed.tags = tags or ()
    if messages or items:
        parsed.data = pack((op.kind, op.name, b"" if _is_kept_apart(op, items) else op.value) for op in steps)
    return parsed


def _refuse_unknown(entry: JournalEntry, partition: int, steps: Sequence[Op]) -> None:
    if unknown := {kind for kind, _, _ in steps} - KINDS:
        kind = min(unknown)
        what = f"entry {entry.offset} of partition {partition} has a step {kind!r}, which this release does not know"
        complaint = f"{what}: a newer one wrote it, and has to archive it"
        raise UnknownStep(complaint, partition=partition, offset=entry.offset, kind=kind)


def _is_kept_apart(op: Op, items: Mapping[tuple[bytes, bytes], bytes]) -> bool:
    # Of two steps for one item `items` has the last.
    return op.kind == b"m" or (op.kind == b"p" and items[item_of(op.name)] == op.value)


def happened(entry: JournalEntry, partition: int, epoch: str) -> list[Happened]:
    """The events of an entry as `events` has them, none if it cannot be read."""
    try:
        found = parse(entry, partition, epoch).events
    except (ValueError, CorruptState):
        return []
    e = entry
    place = (partition, epoch)
    return [
        Happened(*place, each.offset, each.id, each.type, each.subject, e.time_ms, e.actor, e.version, each.data)
        for each in found
    ]


def label_text(stored: str) -> str:
    """A label as it was given; the tables hold it escaped, because text in PostgreSQL cannot hold a NUL."""
    return unescape(stored)


def phase_text(value: bytes) -> str:
    """What is in a `#phase` field, escaped as labels are."""
    return escape(value.decode("utf-8", "surrogatepass"))


def parent_record(value: bytes) -> str:
    """The record in a `#parent` field, `<record text>@<version>`."""
    return value.decode().rpartition("@")[0]


def lifetime_text(value: bytes) -> str:
    """What is in a `#lifetime` field, if it can be read."""
    idle_ms, _, until_ms = value.partition(b" ")
    if not 0 <= int(idle_ms) <= LARGEST or not 0 <= int(until_ms) <= LARGEST:
        raise ValueError("a lifetime outside of 0 .. 2**63 - 1")
    return value.decode()


def _number(text: bytes, what: str) -> int:
    number = int(text)
    if not 0 <= number <= LARGEST:
        raise ValueError(f"{what} number {number}")
    return number


def _parsed_event(event: str, number: int, op: Op) -> ParsedEvent:
    """The event in a step of kind `e`. It is called after the commit that it was written with."""
    place, type, subject = op.name.split(b" ", 2)
    offset = _number(place, "event")
    return ParsedEvent(offset, f"{event.rpartition('.')[0]}.{number}", _text(type), _text(subject), op.value)


def subject(data: bytes) -> str:
    """What the first event in these steps is about, "" if that cannot be read."""
    try:
        return unpack(data)[0].name.split(b" ", 2)[2].decode("utf-8", "replace")
    except (CorruptState, IndexError):
        return ""


def _read_reserved(parsed: Parsed, op: Op) -> None:
    value = op.value if op.kind == b"s" else None
    if op.name == SEGMENTS and value is not None:
        parsed.runs = message_ranges.parse(value)
        if any("\0" in run.source or not 0 <= run.start <= run.stop <= LARGEST for run in parsed.runs):
            raise CorruptState("#segments names what cannot be", field="#segments", data=value)
    elif op.name == OWNER:
        parsed.owner = None if value is None else _text(value)
    elif op.name == PARENT:
        parsed.parent = None if value is None else _text(parent_record(value).encode())
        parsed.parent_version = 0 if value is None else _number(value.rpartition(b"@")[2], "version")
    elif op.name == ITEMS and value is not None:
        # Where the record gets its first ones, or is forked, it has no second word; and a repair brings a state whole.
        since, _, below = value.partition(b" ")
        if below and _number(since, "version") == parsed.entry.version:
            parsed.shows = _number(below, "version")
        return
    elif op.name == LIFETIME:
        parsed.lifetime = None if value is None else lifetime_text(value)
    elif op.name == PHASE:
        parsed.phase = None if value is None else phase_text(value)
    elif op.name == DELETED:
        parsed.deleted = value is not None
    else:
        return
    parsed.touched = {*parsed.touched, op.name}


def _text(value: bytes) -> str:
    if b"\0" in value:
        raise ValueError("a NUL in a reserved field or an event")
    return value.decode()


def refuse_long(item: Parsed) -> None:
    """Raise ValueError for a text that is longer than an index holds; whoever wrote it was to be refused."""
    _within("record", item.entry.record)
    _within("event", item.entry.event)
    _within("owner", item.owner)
    _within("parent", item.parent)
    _within("phase", item.phase)
    for event in item.events:
        _within("type", event.type)
        _within("subject", event.subject)
    for run in item.runs:
        _within("source", run.source)


def _within(column: str, text: str | None) -> None:
    most = LONGEST[column]
    # Most are so short that their bytes need not be counted.
    if text and len(text) * 4 > most and len(text.encode()) > most:
        raise ValueError(f"{column}: {len(text.encode())} bytes are more than the {most} that an index holds")
