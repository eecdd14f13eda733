"""Frozen values that travel between the tiers.

Law: a record at a version is the fold of its changes up to that version, and `fold` is the only fold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict

from distributed_state.errors import CorruptState, InvalidValue, TooLarge

Scope = Literal["session", "user", "app", "task"]
SCOPES: tuple[Scope, ...] = ("session", "user", "app", "task")
MAX_ID_BYTES = 1024  # an index row of PostgreSQL holds an id and an owner, in 2,704 bytes

# Reserved hash fields. All that belongs to the state starts with '#' and is folded like a user's field.
PHASE, OWNER, DELETED, PARENT, SCHEMA = b"#phase", b"#owner", b"#deleted", b"#parent", b"#schema"
SEGMENTS, START, NEXT = b"#segments", b"#ms", b"#mn"
SUMMARY = b"#summary"  # of messages that a model is not sent any more
TIMED, INITIALIZED = b"#timed", b"#initialized"  # some field has or had a deadline; defaults were set
RESTORED = b"#restored"  # set by each rollback: the version whose state it is
LIFETIME = b"#lifetime"  # "idle_ms until_ms", 0 for none: how long it lives without a commit, and until when at all
FORGET, ERASE = (
    "forget",
    "erase",
)  # kinds of tombstones that ask for more: to erase the record, with its forks or without
STATE_FIELDS = frozenset(
    {PHASE, OWNER, DELETED, PARENT, SEGMENTS, START, NEXT, SCHEMA, SUMMARY, TIMED, INITIALIZED, RESTORED, LIFETIME}
)
REQUEST = b"#q"  # followed by the id of a request that was answered; what it came to


def is_state(name: bytes) -> bool:
    """Whether a stored field is part of the state; the other reserved ones are the tiers' own book-keeping."""
    return name[:1] != b"#" or name in STATE_FIELDS or name[:2] == REQUEST


def is_value(name: bytes) -> bool:
    """Whether what is stored under this name holds what users said: a field, what a request came to, a summary."""
    return name[:1] != b"#" or name == SUMMARY or name[:2] == REQUEST


@dataclass(frozen=True, slots=True)
class Ref:
    """The address of a record: a scope and an id. `text` is its escaped form, the same in Redis and SQL."""

    scope: str
    id: str
    text: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise InvalidValue(f"scope {self.scope!r} is none of {', '.join(SCOPES)}")
        if not isinstance(self.id, str) or not self.id:
            raise InvalidValue(f"an id must be a non-empty str, not {self.id!r}")
        # Length first: escaping 10 MB to reject it afterwards would be work done for an attacker.
        escaped = escape(self.id) if len(self.id) <= MAX_ID_BYTES else ""
        if not 0 < len(escaped.encode()) <= MAX_ID_BYTES:
            raise TooLarge(f"an id of {len(self.id)} characters takes more than {MAX_ID_BYTES} bytes when escaped")
        object.__setattr__(self, "text", f"{self.scope}:{escaped}")

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> Ref:
        """Read back what `text` wrote."""
        scope, _, name = text.partition(":")
        return cls(scope, unescape(name))


_UNSAFE = re.compile("[%:\x00-\x1f\x7f\ud800-\udfff]")
_ESCAPED = re.compile("%(u[0-9A-F]{4}|[0-9A-F]{2})")


def escape(text: str) -> str:
    """Make text printable, free of ':' and storable in any database; two texts never give the same result."""
    return _UNSAFE.sub(lambda m: f"%{ord(m[0]):02X}" if ord(m[0]) < 256 else f"%u{ord(m[0]):04X}", text)


def unescape(text: str) -> str:
    """Undo `escape`."""
    return _ESCAPED.sub(lambda m: chr(int(m[1].lstrip("u"), 16)), text)


class Op(NamedTuple):
    """One step of a change: `kind` is a letter.

    s set a field   d delete a field   c clear the user's fields   m append a message (name: its sequence number)
    w wipe the messages (value: sequence number of the next)   l label, changes nothing
    e an event told with the change, changes nothing (name: offset, type and subject; value: JSON text of its data)
    i add an integer (in requests only; the journal keeps the result as s)
    """

    kind: bytes
    name: bytes
    value: bytes


def pack(ops: Iterable[tuple[bytes, bytes, bytes]]) -> bytes:
    """Write steps as canonical bytes, `kind len(name):len(value):name value`; the scripts write the same form."""
    return b"".join(b"%b%d:%d:%b%b" % (kind, len(name), len(value), name, value) for kind, name, value in ops)


def unpack(data: bytes) -> list[Op]:
    """Read back what `pack` wrote. Raises CorruptState if the bytes are anything else."""
    ops, at, end = [], 0, len(data)
    try:
        while at < end:
            first = data.index(b":", at)
            second = data.index(b":", first + 1)
            middle = second + 1 + int(data[at + 1 : first])
            stop = middle + int(data[first + 1 : second])
            if not second < middle <= stop <= end:
                raise ValueError("cut off")
            ops.append(Op(data[at : at + 1], data[second + 1 : middle], data[middle:stop]))
            at = stop
    except ValueError as error:
        raise CorruptState(f"a change of {end} bytes cannot be read at byte {at}", data=data) from error
    return ops


def fold(fields: dict[bytes, bytes], ops: Iterable[Op]) -> None:
    """Apply one change to the fields of a state, in place. Messages only move the count; they live elsewhere."""
    for kind, name, value in ops:
        if kind == b"s":
            fields[name] = value
        elif kind == b"d":
            fields.pop(name, None)
        elif kind == b"m":
            fields[NEXT] = b"%d" % (int(name) + 1)
        elif kind == b"c":
            for key in [key for key in fields if not key.startswith(b"#")]:
                del fields[key]
        elif kind == b"w":
            fields[START] = value
            fields.pop(SEGMENTS, None)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of messages: sequence numbers `start` to `stop` (exclusive) kept under the record `source`."""

    source: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class State:
    """A record at one version: the user's fields as JSON text and the reserved ones, without messages."""

    epoch: str
    version: int
    fields: dict[bytes, bytes]

    @property
    def deleted(self) -> bool:
        """Whether this is a tombstone."""
        return DELETED in self.fields


@dataclass(frozen=True, slots=True)
class Entry:
    """One journal entry: a commit as it was written. `time_ms` is the server's clock, `data` is `pack`ed steps."""

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

    @classmethod
    def read(cls, identity: bytes, pairs: list[bytes]) -> Entry:
        """From its id and its fields in the stream."""
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


class Journal(NamedTuple):
    """A partition's journal about an offset: its oldest entries `before`, and the one there with those that follow.

    `end` is the offset of the last entry when it was read; epoch '' if Redis holds nothing of the partition.
    """

    epoch: str
    end: int
    before: list[Entry]
    onward: list[Entry]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What hydration needs: the state and its recent messages by sequence number."""

    state: State
    messages: list[tuple[int, bytes]]
    time_ms: int = 0  # of the last commit


class Message(BaseModel):
    """One message of a conversation, in the field names of the OpenAI chat format; unknown fields are kept as they are.

    `content` is text, a list of parts, or None (a call of tools). `timestamp` is in seconds since 1970. One that was
    appended without has, when it is read, the time of its commit by the server's clock. That time, and its number, are
    what the store knows of it, no part of what was said: `to_dict()` and `==` leave them out.
    """

    # A slot, not a private attribute: those make reading a message a third slower.
    __slots__ = ("_number",)
    model_config = ConfigDict(frozen=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Any] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    timestamp: float | None = None
    metadata: dict[str, Any] | None = None

    @property
    def number(self) -> int | None:
        """Its number in the conversation that it was read from; None for one that was not read. A copy has none."""
        return getattr(self, "_number", None)

    def placed(self, time: float | None, number: int | None) -> Self:
        """This message, made just now, as it was read: with the time of its commit and its number."""
        if time is not None and "timestamp" not in self.model_fields_set:
            self.__dict__["timestamp"] = time
        object.__setattr__(self, "_number", number)
        return self

    def to_dict(self) -> dict[str, Any]:
        """The fields that were given, as plain JSON values."""
        # Not getattr: an unknown field may be called as a method is.
        given = {**self.__dict__, **(self.__pydantic_extra__ or {})}
        return {name: value for name, value in given.items() if name in self.model_fields_set}

    def _said(self) -> dict[str, Any]:
        said = {**self.__dict__, **(self.__pydantic_extra__ or {})}
        return said if "timestamp" in self.model_fields_set else {**said, "timestamp": None}

    def __eq__(self, other: object) -> bool:
        return self._said() == other._said() if isinstance(other, Message) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.role, self.content if isinstance(self.content, str) else None, self.tool_call_id))


@dataclass(frozen=True, slots=True)
class Written:
    """What a `write` or a turn came to: the new version, results of increments, the number of its first message.

    That number is None if only SQL remembers it: the commit's reply was lost and asked for again much later.
    """

    version: int
    results: dict[str, int] = field(default_factory=dict)
    first_message: int | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of a record's history. `time` is in seconds since 1970; `set` and `appended` are decoded values."""

    version: int
    time: float
    kind: str
    actor: str
    token: int
    set: dict[str, Any]
    deleted: tuple[str, ...]
    appended: tuple[Message, ...]
    phase: str | None
    label: str | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A record as it was at `version`: fields decoded, messages in order."""

    version: int
    fields: dict[str, Any]
    messages: tuple[Message, ...]
    phase: str | None
    deleted: bool


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A version with a name. `time` is in seconds since 1970."""

    label: str
    version: int
    time: float


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How long a session lives: `idle` seconds without a commit, and at most until `until`; None is without end.

    `ends` is when that will be if nobody writes any more. Times are in seconds since 1970 by the server's clock.
    """

    idle: float | None
    until: float | None
    ends: float | None


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One row of a listing. Times are in seconds since 1970; `cursor` continues the listing after this row."""

    id: str
    user: str | None
    version: int
    created: float
    updated: float
    deleted: bool
    cursor: str


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to a conversation, an agent or the fleet.

    `subject` is the text of the record that it is about (`session:` and the escaped id), or what `emit` was given;
    `time` is in seconds since 1970 by the server's clock; `source` is the replica that told of it. `sequence` counts
    the events of a `partition` without a gap, within an `epoch`. `version` is the record's, as the change made it, and
    0 for an event that was written alone. `id` stays the same when an event is handed over again.
    """

    id: str
    type: str
    subject: str
    time: float
    data: dict[str, Any]
    source: str
    sequence: int
    epoch: str
    partition: int
    version: int
    actor: str

    @property
    def conversation_id(self) -> str:
        """The id of the session that it is about, "" if it is about something else."""
        scope, _, name = self.subject.partition(":")
        return unescape(name) if scope == "session" else ""

    @property
    def cursor(self) -> str:
        """Where `audit` goes on behind this event."""
        return f"{round(self.time * 1000)}.{self.partition}.{self.epoch}.{self.sequence}"

    def to_dict(self) -> dict[str, Any]:
        """The event as JSON values in the names of CloudEvents 1.0, our own attributes as extensions."""
        moment = datetime.fromtimestamp(self.time, UTC).isoformat(timespec="milliseconds")
        # An empty subject is left out: CloudEvents has no such thing.
        return {
            "specversion": "1.0",
            "id": self.id,
            "source": self.source,
            "type": self.type,
            "time": moment.replace("+00:00", "Z"),
            **({"subject": self.subject} if self.subject else {}),
            "datacontenttype": "application/json",
            "data": self.data,
            "sequence": self.sequence,
            "epoch": self.epoch,
            "partition": self.partition,
            "version": self.version,
            "actor": self.actor,
        }


@dataclass(frozen=True, slots=True)
class Replica:
    """A process, or an event loop of one, that has this namespace's store open, as it told of itself.

    `started` is in seconds since 1970 by its own clock, `seen` how many seconds ago it told this, by the server's.
    `load` is its machine's (of one minute). `positions` say how far its work is: `archived` commits, how many
    partitions it `archives`, and where its slowest consumer is in the `events`, as a sum over the partitions. `stats`
    are some of `store.stats()`, `status` is what it was given by `store.announce`.
    """

    id: str
    host: str
    pid: int
    version: str
    started: float
    seen: float
    load: float
    positions: dict[str, int]
    stats: dict[str, int]
    status: dict[str, Any]
