"""Arguments and answers of the scripts, as values and errors. Law: no bytes of Redis' protocol leave this module.

An answer by which commit.lua refuses a write becomes the caller's error; its message never contains a user's value.

Design: section 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distributed_state.errors import (
    Backpressure,
    Conflict,
    Fenced,
    Locked,
    StateError,
    TooLarge,
    WarmUnavailable,
)
from distributed_state.settings import Settings
from distributed_state.values import codec, field_ttl
from distributed_state.values.journal import Operation
from distributed_state.values.keys import RecordKeys
from distributed_state.values.levels import Level
from distributed_state.values.model import DELETED, INBOX, ITEMS, PHASE, SCHEDULE, SCHEMA, deleted_error
from distributed_state.values.schedule import Schedule
from distributed_state.values.search import MOST

REFUSALS = (
    *("backpressure", "conflict", "deleted", "epoch", "exists"),
    *("fenced", "forgotten", "inbox", "item", "locked", "misused", "tags", "toolarge"),
)
_SHOWN = {PHASE: "phase", SCHEMA: "schema version"}
_PLAIN = frozenset((b"s", b"d"))  # operations that are in the journal as they were sent
_OF_INBOX = frozenset((b"I", b"T", b"W", b"D"))
_REPEATED = 6  # words of an answer that repeats a lost one: known_op.lua

Expectations = Sequence[tuple[bytes, bytes | None]]
"""Fields with their stored bytes, None for an absent one: the write is refused if they differ."""


class Draft(NamedTuple):
    """A change that a caller requests; `OpId` has the other arguments of commit.lua.

    - `kind`, `owner`, `actor`: stored in the journal. Kind '' means that the change is only checked.
    - `operations`: changes of fields, messages and items, as in `journal.Op`. `items`: whether any is about items.
    - `events`: additional operations: lifecycle events ('e') and another lifetime ('x'); see operations.lua.
    - `ends_output`: the operation that ends what a turn streamed, to those who follow it; None: it streamed nothing.
    - `lifetime`: of a session that begins with this commit: idle and total, in ms, 0 for no end.
    - `handler`: of the session, if the change may affect when the session is served; it then has an operation 'D'.

    Conditions, all checked by commit.lua:

    - `expected`: the record's version, None for any; `epoch`: the epoch under which it was read, '' for any.
    - `deleted`: what to do with a deleted record; see commit.lua.
    - `expectations`: the store's own compare-and-swaps of stored bytes.
    - `preconditions`: the user's, as pairs of field and commit.lua's word. `expected_items`: those on items, as
      operations 'A', 'P' and 'M'.

    `level` is how durable the commit must be before it is acknowledged; None: the store's default. `creation` says what
    the caller knows of a record that is not in Redis: '*' if its id was just generated; the hydration token under which
    SQL did not have the record; or '' for nothing.
    """

    kind: str
    operations: Sequence[Operation]
    events: Sequence[Operation] = ()
    expectations: Expectations = ()
    preconditions: Sequence[tuple[bytes, bytes]] = ()
    expected: int | None = None
    epoch: str = ""
    deleted: str = "refuse"
    owner: str = ""
    actor: str = ""
    lifetime: tuple[int, int] = (0, 0)
    level: Level | None = None
    items: bool = False
    expected_items: Sequence[Operation] = ()
    creation: str = ""
    ends_output: Operation | None = None
    handler: str = ""

    def scheduled(self, handler: str, mode: bytes = b"") -> Draft:
        """The change as one of a session with this handler; `mode` as in schedule.lua."""
        operations = [each for each in self.operations if each[0] != b"D"]
        return self._replace(operations=(*operations, (b"D", handler.encode(), mode)), handler=handler)


class Committed(NamedTuple):
    """A write that was applied. If only SQL knows it, `first_message` and `results` are None and `offset` is 0.

    `first_message` is the number that the next message had before the write, even if it adds none: see `added`.
    `time_ms` is also None if the answer repeats one that was lost. `archived`: the offset up to which the partition is
    archived under this epoch. `text`: the whole answer. `trailing`: the answer of the script sent after this one.
    `operations`: those of the last attempt, which may have swaps in place of increments.
    """

    version: int
    epoch: str
    first_message: int | None
    results: tuple[int, ...] | None
    offset: int
    time_ms: int | None = None
    trailing: Any = None
    archived: int = 0
    text: bytes = b""
    operations: Sequence[Operation] = ()

    @property
    def added(self) -> int | None:
        """The number of the first message that the write added; None without a message, or if only SQL has it."""
        return self.first_message if any(operation == b"m" for operation, _, _ in self.operations) else None

    @property
    def begins(self) -> bool:
        """Whether this commit created the record, or created it again after a deletion."""
        return self.version == 1 or b"b" in self.flags

    @property
    def flags(self) -> bytes:
        """The letters by which commit.lua reports what it added to the operations."""
        return self.text.rpartition(b" ")[2]

    @property
    def first_items(self) -> list[Operation]:
        """The operation that commit.lua adds when a record gets its first items."""
        return [(b"s", ITEMS, b"%d" % self.version)] if b"i" in self.flags else []

    @property
    def begun_again(self) -> list[Operation]:
        """The operation that commit.lua adds when it begins an expired record again."""
        return [(b"d", DELETED, b"")] if b"a" in self.flags else []

    def applied(self, events: Sequence[Operation] = ()) -> list[Operation] | None:
        """Return the operations as in the journal, with sums, numbers and times; None if the answer lacks any.

        `events`: the journal's operations for the events, at their place among the others.
        """
        if self.first_message is None or self.results is None:
            return None
        number = self.first_message
        sums = iter(self.results)
        flags = self.flags
        applied: list[Operation] = []
        inputs: Sequence[Operation] = ()
        for each in self.operations:
            operation, name, value = each
            if operation in _PLAIN:
                pass
            elif operation == b"i":
                each = (b"s", name, b"%d" % next(sums))
            elif operation == b"m" and name:
                number = int(name) + 1  # a copy keeps its number and its time
            elif operation == b"m":
                if self.time_ms is None:
                    return None
                each = (b"m", b"%d" % number, field_ttl.dated(value, self.time_ms))
                number += 1
            elif operation == b"r":
                each = (b"s", name, field_ttl.note(value, self.version))
            elif operation in _OF_INBOX:
                inputs = (*inputs, each)  # commit.lua does these last
                continue
            elif operation == b"w":
                each = (b"w", b"", b"%d" % self.first_message)
            elif operation == b"n":
                if not next(sums):
                    continue
                each = (b"p", name, value)
            elif operation == b"y":
                if not self.text:
                    return None
                if b"y" not in flags:
                    continue
                each = (b"s", ITEMS, b"%d %b" % (self.version, value))
            applied.append(each)
        applied += events
        for each in inputs:
            if self.time_ms is None:
                return None
            applied += _of_inbox(each, sums, self.version, self.time_ms)
        return applied


def _of_inbox(operation: Operation, results: Iterator[int], version: int, time_ms: int) -> Iterator[Operation]:
    """The operations that commit.lua makes of one on the inbox, or on the schedule."""
    kind, name, value = operation
    if kind == b"D":
        due, failed, retry, written = [next(results) for _ in range(4)]
        if written:
            at, after = (None if each < 0 else each for each in (due, retry))
            yield b"s", SCHEDULE, Schedule(name.decode(), at, failed, after, retry == -2).stored
        return
    if kind == b"W":
        if replaced := next(results):
            yield b"d", INBOX + b"%d" % replaced, b""
        time_ms = next(results)
        value = value.partition(b" ")[2]
        if not time_ms:
            name = kind = b""  # it was cancelled meanwhile
    if kind == b"T":
        for each in value.split():
            number, _, request = each.partition(b":")
            if next(results):
                yield b"d", INBOX + number, b""
                if request:
                    yield b"s", INBOX + b"q" + request, b"%b %d" % (number, version)
        for each in name.split():
            if next(results):
                yield b"d", INBOX + b"q" + each.partition(b":")[2], b""
    following, entries, used, wakes = [next(results) for _ in range(4)]
    if kind in (b"I", b"W"):
        yield b"s", INBOX + b"%d" % (following - 1), field_ttl.note(value, time_ms)
    pending = b"".join(b" %d:%d" % (next(results), next(results)) for _ in range(wakes))
    yield b"s", INBOX, b"%d %d %d%b" % (following, entries, used, pending)
    if kind in (b"I", b"W") and name:
        yield b"s", INBOX + b"q" + name, b"%d" % (following - 1)


def committed(text: bytes, operations: Sequence[Operation], trailing: Any = None) -> Committed:
    """Parse commit.lua's answer for an applied write; keep the answer of the script sent after it."""
    words = text.split(b" ")
    if len(words) == _REPEATED:
        _, version, epoch, first, results, offset = words
        sums = _sums(results) if results else ()
        return Committed(
            int(version), epoch.decode(), int(first), sums, int(offset), None, trailing, operations=operations
        )
    _, version, epoch, first, results, offset, seconds, micros, archived, _ = words
    sums = _sums(results) if results else ()
    time_ms = int(seconds) * 1000 + int(micros) // 1000
    return _new(
        Committed,
        (
            int(version),
            epoch.decode(),
            int(first),
            sums,
            int(offset),
            time_ms,
            trailing,
            int(archived),
            text,
            operations,
        ),
    )


_new = tuple.__new__  # like a NamedTuple, but without a Python function


def _sums(results: bytes) -> tuple[int, ...]:
    return tuple(map(int, results.split(b",")))


@dataclass(frozen=True, slots=True)
class UnknownItems:
    """A change has conditions on items that Redis does not have: SQL must be read at version `needed` or later."""

    epoch: str
    needed: int


@dataclass(frozen=True, slots=True)
class Uninitialised:
    """The partition has no epoch, or one of another data id: Redis is new, or may have lost data."""


@dataclass(frozen=True, slots=True)
class PartitionState:
    """How far a partition is written and archived; epoch '' if Redis does not have it. `waiting` is in bytes.

    `data_id`: the one that the partition notes, see `port.identities`; `proved_ms`: when a script last verified with
    the server that it is current, by that server's clock (`same_data.lua`).
    """

    epoch: str
    offset: int
    archived: int
    waiting: int
    data_id: str = ""
    proved_ms: int = 0

    def fill(self, settings: Settings) -> float:
        """Return how full the journal is, 0 to 1; at 1 writes are refused."""
        return max(0.0, (self.offset - self.archived) / settings.journal_entries, self.waiting / settings.journal_bytes)


@dataclass(frozen=True, slots=True)
class Cold:
    """The record is not in Redis. `token` was left there for its hydration; '' if Redis is too full for it."""

    epoch: str
    token: str


@dataclass(frozen=True, slots=True)
class Swap:
    """Increments that the server cannot compute exactly: the fields, with the stored bytes of each."""

    fields: tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Unsure:
    """Redis no longer has all op ids since `since_ms`, so the write may have been applied earlier.

    `late`: it is older than `op_window`, so the server no longer applies it. `time_ms`: the server's time then.
    """

    time_ms: int
    epoch: str
    late: bool


@dataclass(frozen=True, slots=True)
class HasHandler:
    """The session has this handler, which the change does not name."""

    handler: str


Answer = Committed | Cold | Swap | Uninitialised | UnknownItems | Unsure | HasHandler
"""An answer of commit.lua to a write that it does not refuse."""


class Posted(StateError):
    """An input of this request was accepted before, under `number`; 0: the input to withdraw is not in the inbox."""

    def __init__(self, number: int) -> None:
        super().__init__(f"accepted before, as number {number}")
        self.number = number


class HeldItem(NamedTuple):
    """An item as Redis has it: the version at which it was put, and its frame, which is empty for a deleted item."""

    version: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class ItemWindow:
    """A record's items in Redis at one version; `since`: the version of the open layer, 0 if it never had items."""

    epoch: str
    version: int
    since: int


@dataclass(frozen=True, slots=True)
class KnownItems(ItemWindow):
    """Items by name, None for items that do not exist; items whose names are missing here may be in SQL."""

    items: dict[bytes, HeldItem | None]


@dataclass(frozen=True, slots=True)
class ListedItems(ItemWindow):
    """The items of a collection that Redis has in a range, in order, including deleted ones.

    `whole`: SQL has no further items before the last one. `more`: Redis has more items after the last one.
    """

    whole: bool
    more: bool
    items: dict[bytes, HeldItem]


# Refusals


def refusal(keys: RecordKeys, draft: Draft, lock_value: str, answer: list[Any]) -> StateError:
    """Return the error for commit.lua's refusal. `lock_value` was sent with the write."""
    word = answer[0].decode()
    rest = answer[1:]
    record = keys.ref.text[:200]
    if word == "epoch":
        return Conflict(f"{record}: read under epoch {draft.epoch}, now it is {rest[0].decode()}")
    if word == "exists":
        return Conflict(f"{record}: exists already, at version {int(rest[0])}", version=int(rest[0]))
    if word == "conflict":
        return _conflict(record, draft, int(rest[0]), tuple(rest[1:]))
    if word == "item":
        return Conflict(f"{record}: {_expected_item(draft, *rest)}")
    if word == "deleted":
        return deleted_error(record, int(rest[0]), rest[1])
    if word == "fenced":
        held = rest[0].decode(errors="replace")
        text = f"{record}: {holder_of(lock_value)} no longer holds the lease, {holder_of(held)} does"
        return Fenced(text, holder=held)
    if word == "locked":
        return Locked(f"{record}: held by {holder_of(rest[0].decode(errors='replace'))}")
    if word == "backpressure":
        return Backpressure(f"{record}: {int(rest[0])} commits, {int(rest[1])} bytes of its partition are not archived")
    if word == "inbox":
        full = f"{int(rest[0])} inputs of {int(rest[1])} bytes wait for a turn"
        return Backpressure(f"{record}: its inbox is full, {full}")
    if word == "toolarge":
        return TooLarge(f"{record}: the record would grow to {int(rest[0])} bytes")
    if word == "tags":
        return TooLarge(f"{record}: the record would have {int(rest[0])} tags, more than {MOST}")
    if word == "forgotten":
        return WarmUnavailable(f"{record}: a repeated write came after its answer was forgotten; not applied again")
    return StateError(f"{record}: commit.lua answered {word}")


def _conflict(record: str, draft: Draft, version: int, found: tuple[bytes | None, ...]) -> Conflict:
    own = len(draft.preconditions)
    held, found = found[:own], found[own:]
    expected = f"version {draft.expected}" if draft.expected else "no record (version 0)"
    seen, why = f"version {version}", None
    if draft.expected in (None, version):  # then one of the conditions below failed
        judged = (unmet(record, *each, raw) for each, raw in zip(draft.preconditions, held, strict=False))
        why = next(filter(None, judged), None)
        pairs = zip(draft.expectations, found, strict=False)
        others = [(name, raw, now) for (name, raw), now in pairs if raw != now]
        expected = ", ".join(f"{_named(name)} = {_shown(name, raw)}" for name, raw, _ in others) or expected
        now_held = ", ".join(_shown(name, now) for name, _, now in others)
        seen = f"{now_held} at version {version}" if others else seen
    text = why or f"{record}: expected {expected}, found {seen}"
    return Conflict(text, version=version, found=found, preconditions=held)


def unmet(record: str, name: bytes, word: bytes, raw: bytes | None) -> str | None:
    """Return the message if a value does not meet the precondition (a word of commit.lua); None if it does."""
    absent = raw is None
    if name == b"#v":
        found, wanted = ("no record", "one") if absent else ("a record", "none")
        return f"{record[:200]}: expected {wanted}, found {found}" if absent is not (word == b"!") else None
    if (absent and word == b"!") or (not absent and word in (b"+", b"+" + (raw or b""))):
        return None
    found = "is not there" if absent else "is there" if word == b"!" else "holds another value"
    return f"{record[:200]}: {_field(name)} {found}"


def _expected_item(draft: Draft, name: bytes, version: bytes) -> str:
    collection, _, key = name.partition(b"\0")
    wanted = {each: value for operation, each, value in draft.expected_items if operation == b"M"}.get(name)
    found = "there is none" if version == b"-" else f"there is one, of version {version.decode()}"
    what = f"item {key[:80].decode(errors='replace')!r} of {collection.decode(errors='replace')!r}"
    return f"{what}: {found}" + (
        f", not the expected one of version {wanted.decode()}" if wanted else ", as was not expected"
    )


def holder_of(lock_value: str) -> str:
    """Name the holder of a lock, from the lock's value, for an error message."""
    head, _, name = lock_value.partition(":")
    token, _, _ = head[1:].partition("@")
    return f"{name.partition('.')[0][:80]!r} with token {token[:20]}" if name else "nobody"


def _shown(name: bytes, raw: bytes | None) -> str:
    """Describe the expected or present value of a field. Never a user's value: errors end up in logs."""
    if raw is None:
        return "nothing"
    return repr(raw[:40].decode(errors="replace")) if name in _SHOWN else f"{len(raw)} bytes"


def _named(name: bytes) -> str:
    return _SHOWN.get(name) or (name[1:].decode(errors="replace") if name[:1] == b"#" else _field(name))


def _field(name: bytes) -> str:
    return f"field {codec.decode_key(name)!r:.80}"
