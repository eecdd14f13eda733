"""The journal: operations as canonical bytes, entries, and the state that they produce.

Law: only `fold` applies changes.

Design: sections 9, 11.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from distributed_state.errors import CorruptState
from distributed_state.values.model import DELETED, INBOX, NEXT, SEGMENTS, START, TAG

Operation = tuple[bytes, bytes, bytes]  # an Op without the names of its parts


class Op(NamedTuple):
    """One operation of a change: `kind` is a letter.

    s set a field   d delete a field   c clear the user's fields (with the name ## the tags and the inbox, too)
    m append a message (name: its sequence number)
    w wipe the messages (value: sequence number of the next)   l label, changes nothing
    e an event written with the change, changes nothing (name: offset, type and subject; value: JSON text of its data)
    p put an item, which the fields do not show (name: collection, NUL, key; value: its frame)   q delete one
    In requests only; the journal keeps the results as s and d: i add an integer
    r note an answered request   I add an input to the inbox   T take inputs out of it
    """

    kind: bytes
    name: bytes
    value: bytes


# All kinds in the journal. A reader must stop at another kind, which only the newer release that wrote it can apply.
KINDS = frozenset((b"s", b"d", b"c", b"m", b"w", b"l", b"e", b"p", b"q"))
COLLECTION_BYTES = 64
KEY_BYTES = 1024


def item_of(name: bytes) -> tuple[bytes, bytes]:
    """The collection and the key that an operation `p` or `q` names. Raises ValueError."""
    collection, separator, key = name.partition(b"\0")
    if not separator or not 0 < len(collection) <= COLLECTION_BYTES or len(key) > KEY_BYTES:
        limits = f"{COLLECTION_BYTES} bytes and a key of at most {KEY_BYTES}"
        raise ValueError(f"an item's name of {len(name)} bytes is not a collection of at most {limits}")
    return collection, key


def pack(ops: Iterable[Operation]) -> bytes:
    """Write operations as canonical bytes, `kind len(name):len(value):name value`; the scripts write the same form."""
    return b"".join(b"%b%d:%d:%b%b" % (kind, len(name), len(value), name, value) for kind, name, value in ops)


def unpack(data: bytes) -> list[Op]:
    """Undo `pack`. Raises CorruptState for other bytes."""
    ops = []
    at = 0
    end = len(data)
    try:
        while at < end:
            first = data.index(b":", at)
            second = data.index(b":", first + 1)
            middle = second + 1 + int(data[at + 1 : first])
            stop = middle + int(data[first + 1 : second])
            if not second < middle <= stop <= end:
                raise ValueError("cut off")
            # Faster than `Op(...)`: every subscribed replica decodes every published change.
            ops.append(tuple.__new__(Op, (data[at : at + 1], data[second + 1 : middle], data[middle:stop])))
            at = stop
    except ValueError as error:
        raise CorruptState(f"a change of {end} bytes cannot be read at byte {at}", data=data) from error
    return ops


def fold(fields: dict[bytes, bytes], ops: Iterable[Operation]) -> None:
    """Apply one change to the fields of a state, in place. Messages change only the counter; others store them."""
    for kind, name, value in ops:
        if kind == b"s":
            fields[name] = value
        elif kind == b"d":
            fields.pop(name, None)
        elif kind == b"m":
            fields[NEXT] = b"%d" % (int(name) + 1)
        elif kind == b"c":
            more = (TAG, INBOX) if name == TAG else ()
            for key in [key for key in fields if not key.startswith(b"#") or key.startswith(more)]:
                del fields[key]
        elif kind == b"w":
            fields[START] = value
            fields.pop(SEGMENTS, None)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of messages: sequence numbers `start` to `stop` (exclusive), stored under the record `source`."""

    source: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class State:
    """A record at one version: the user's fields as JSON text, and the reserved ones, without messages."""

    epoch: str
    version: int
    fields: dict[bytes, bytes]

    @property
    def deleted(self) -> bool:
        """Whether this is a tombstone."""
        return DELETED in self.fields


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One journal entry: a commit as it was written. `time_ms` is the server's clock, `data` is `pack`ed operations."""

    offset: int
    event: str
    record: str
    version: int
    time_ms: int
    kind: str
    actor: str
    token: int
    data: bytes
    total_bytes: int
    next_message: int = 0

    @property
    def head(self) -> bytes:
        """Everything but its operations, as the scripts write it into the stream, with the time to the millisecond."""
        time = f"{self.time_ms // 1000} {self.time_ms % 1000 * 1000}"
        lines = (self.event, self.record, self.version, time, self.kind, self.actor, self.token)
        return "\n".join(map(str, (*lines, self.total_bytes, self.next_message))).encode()

    @classmethod
    def read(cls, identity: bytes, pairs: list[bytes]) -> JournalEntry:
        """Read an entry from its id and its fields in the stream."""
        _, head, _, data = pairs
        event, record, version, time, kind, actor, token, total, following = head.decode().split("\n")
        seconds, micros = time.split()
        return cls(
            offset=int(identity[:-2]),
            event=event,
            record=record,
            version=int(version),
            time_ms=int(seconds) * 1000 + int(micros) // 1000,
            kind=kind,
            actor=actor,
            token=int(token),
            data=data,
            total_bytes=int(total),
            next_message=int(following),
        )


def pack_entries(entries: Iterable[JournalEntry]) -> bytes:
    """Write entries as canonical bytes: operations of kind `j`, named by the offset and the head."""
    return pack((b"j", b"%d-0\n%b" % (entry.offset, entry.head), entry.data) for entry in entries)


def unpack_entries(data: bytes) -> list[JournalEntry]:
    """Undo `pack_entries`. Raises CorruptState for other bytes."""
    entries = []
    for kind, name, value in unpack(data):
        identity, _, head = name.partition(b"\n")
        try:
            if kind != b"j":
                raise ValueError(f"an operation of kind {kind!r}")
            entries.append(JournalEntry.read(identity, [b"h", head, b"d", value]))
        except ValueError as error:
            raise CorruptState(f"an entry of {len(head)} bytes cannot be read: {error}", data=data) from error
    return entries


def unbroken(entries: list[JournalEntry]) -> list[JournalEntry]:
    """Entries up to the first missing offset: later ones continue an unknown state."""
    first = entries[0].offset if entries else 0
    if not entries or entries[-1].offset == first + len(entries) - 1:
        return entries
    return [entry for at, entry in enumerate(entries) if entry.offset == first + at]


class Journal(NamedTuple):
    """A partition's journal around an offset: its oldest entries `before` it, and the entry there with later ones.

    Those follow without a gap. `end` is the offset of the last entry when it was read; epoch is '' if Redis has nothing
    of the partition.
    """

    epoch: str
    end: int
    before: list[JournalEntry]
    onward: list[JournalEntry]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The data that hydration needs: the state, and its recent messages by sequence number."""

    state: State
    messages: list[tuple[int, bytes]]
    time_ms: int = 0  # of the last commit


@dataclass(frozen=True, slots=True)
class KeptItems:
    """A record's items in Redis: the version and the frame of each, by name; a deleted item has an empty frame.

    Items that changed at versions up to `missing` may be absent; 0 means that all of the open layer are here.
    """

    items: Mapping[bytes, tuple[int, bytes]]
    missing: int


@dataclass(frozen=True, slots=True)
class Happened:
    """One row of the events."""

    partition: int
    epoch: str
    offset: int
    id: str
    type: str
    subject: str
    time_ms: int
    actor: str
    version: int
    data: bytes

    @property
    def place(self) -> tuple[int, int, str, int]:
        """The event's place in the order of all events."""
        return self.time_ms, self.partition, self.epoch, self.offset
