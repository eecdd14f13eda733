"""Builds a change. Law: everything that can be checked without a server is checked here, before sending.

Changes may stay in memory for long, in a batch, a turn and then in hot, so they are compact. If a commit has several
operations for an item, the last one counts, with its expectation.

Design: section 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any

from distributed_state.errors import Conflict, InvalidValue, TooLarge
from distributed_state.settings import Settings
from distributed_state.tiers import ambient
from distributed_state.values import codec, field_ttl
from distributed_state.values.codec import Codec
from distributed_state.values.items import ANY, MOST_ITEMS, DeleteItem, Item, PutItem, name_of, stamp_of
from distributed_state.values.journal import Operation
from distributed_state.values.levels import level_of
from distributed_state.values.model import DELETED, LIFETIME, PHASE, SUMMARY, TAG, TIMED, Message, checked_phase
from distributed_state.values.search import tag_field, tag_texts
from distributed_state.warm.answers import Draft, Expectations


def _compact(data: bytes) -> bytes:
    """A copy of exactly the needed size, because bytes from orjson occupy a block of 4 KB or more."""
    return bytes(memoryview(data))


class ItemChanges:
    """Collects a record's item operations and expectations: `p` puts, `q` deletes, `n` puts if the item is absent."""

    __slots__ = ("_codec", "_epoch", "_expected", "_operations", "_settings", "_size")

    def __init__(self, settings: Settings, record_codec: Codec) -> None:
        self._settings = settings
        self._codec = record_codec
        self._operations: dict[bytes, Operation] = {}
        self._expected: dict[bytes, Operation] = {}
        self._epoch = ""
        self._size = 0

    def __bool__(self) -> bool:
        return bool(self._operations)

    def put(self) -> list[bytes]:
        """The names of the items that are put."""
        return [name for name, (kind, *_) in self._operations.items() if kind != b"q"]

    def copy(self) -> ItemChanges:
        """A copy; additions to it do not change the original."""
        other = ItemChanges(self._settings, self._codec)
        other._operations, other._expected = dict(self._operations), dict(self._expected)
        other._epoch, other._size = self._epoch, self._size
        return other

    def add(self, item: PutItem | DeleteItem) -> None:
        """Put or delete an item."""
        name = name_of(item.collection, item.key)
        expected = self._expectation(item, name)
        self._add((b"q", name, b"") if isinstance(item, DeleteItem) else self._put(item, name))
        self._expected.pop(name, None)
        if expected is not None:
            self._expected[name] = expected

    def put_stored(self, name: bytes, frame: bytes) -> None:
        """Put a stored item, or delete it if the frame is empty. The limit is ten times that of callers."""
        self._add((b"p" if frame else b"q", name, frame), 10 * MOST_ITEMS)

    def _put(self, item: PutItem, name: bytes) -> Operation:
        data = self._codec.encode(item.value, codec.item_name(name))
        if len(data) > self._settings.max_field_bytes:
            limit = self._settings.max_field_bytes
            raise TooLarge(f"item {item.key!r:.80}: {len(data)} bytes are more than max_field_bytes={limit}")
        return b"n" if item.keep else b"p", name, _compact(data)

    def _add(self, operation: Operation, most: int = MOST_ITEMS) -> None:
        _, name, data = operation
        before = self._operations.get(name)
        self._size += len(data) - len(before[2]) if before else len(data) + len(name)
        if self._size > self._settings.max_record_bytes:
            raise TooLarge(f"{self._size} bytes are more than max_record_bytes={self._settings.max_record_bytes}")
        self._operations[name] = operation
        if len(self._operations) > most:
            raise TooLarge(f"one commit changes at most {most} items")

    def _expectation(self, item: PutItem | DeleteItem, name: bytes) -> Operation | None:
        """An item's expectation, as an operation. `equals` is an Item here; a plain value was looked up before."""
        absent = isinstance(item, PutItem) and item.if_absent
        given = bool(absent) + bool(item.if_present) + (item.equals is not ANY)
        if given > 1:
            raise InvalidValue("expect one thing of an item: if_absent, if_present or equals")
        if isinstance(item, PutItem) and item.keep and given:
            raise InvalidValue(f"item {item.key!r:.80}: keep=True cannot be combined with a condition")
        if absent or item.equals is None:
            return b"A", name, b""
        if item.if_present:
            return b"P", name, b""
        return None if item.equals is ANY else (b"M", name, self._stamp(item))

    def _stamp(self, item: PutItem | DeleteItem) -> bytes:
        found = item.equals
        if not isinstance(found, Item):
            raise InvalidValue(f"equals takes an Item that was read, here, not {type(found).__name__}")
        if (found.collection, found.key) != (item.collection, item.key):
            what = f"{item.collection!r:.80} {item.key!r:.80}"
            raise InvalidValue(f"item {what}: equals names the item {found.collection!r:.80} {found.key!r:.80}")
        if not found.epoch:
            raise InvalidValue("an Item of a history cannot be expected to be unchanged: read it again")
        if self._epoch not in ("", found.epoch):
            raise InvalidValue("the expected items were read under two epochs: read them again")
        self._epoch = found.epoch
        return stamp_of(found.version, found.origin, self._codec.record)

    @property
    def operations(self) -> Sequence[Operation]:
        """One operation per item, in order."""
        return tuple(self._operations.values())

    @property
    def expected(self) -> Sequence[Operation]:
        """The expectations of items, as operations."""
        return tuple(self._expected.values())

    def under(self, epoch: str) -> str:
        """The epoch that both this and the expected items require ('': any). Raises Conflict if they differ."""
        if epoch and self._epoch not in ("", epoch):
            raise Conflict(f"{self._codec.record[:200]}: an item that is expected was read under another epoch")
        return epoch or self._epoch


_EXACT = 10**15
MOST_STEPS = 10_000
"""The maximum of fields, messages and tags in a commit: Redis is blocked while it applies a commit."""


class Changes:
    """Collects the changes of one commit. The last change of a field wins.

    `prepare(key, value)` and `prepare_message(message)` convert a value to the one that is stored, or raise
    InvalidValue. `now` is the clock for field TTLs. `owner`, `actor` and `lifetime` are as in `Draft`; the default
    actor is the context's.
    """

    def __init__(
        self,
        settings: Settings,
        record_codec: Codec,
        prepare: Callable[[str, Any], Any] | None = None,
        prepare_message: Callable[[Message | dict[str, Any]], Message | dict[str, Any]] | None = None,
        now: Callable[[], float] | None = None,
        *,
        owner: str = "",
        actor: str = "",
        lifetime: tuple[int, int] = (0, 0),
    ) -> None:
        self._settings = settings
        self._codec = record_codec
        self._now = now
        self._prepare = prepare
        self._prepare_message = prepare_message
        self._owner = owner
        self._actor = actor
        self._lifetime = lifetime
        self._fields: dict[bytes, tuple[bytes, bytes, bytes]] = {}
        self._first: list[tuple[bytes, bytes, bytes]] = []
        self._last: list[tuple[bytes, bytes, bytes]] = []
        self._size = 0
        self._items: ItemChanges | None = None  # most changes have no items
        self._events: list[tuple[bytes, bytes, bytes]] = []
        self.sums: dict[str, None] = {}  # the names of the incremented fields, in order
        self._most: float = MOST_STEPS

    def __bool__(self) -> bool:
        return bool(self._fields or self._first or self._last or self._events or self._items)

    def whole(self) -> None:
        """Accept any number of operations: they form a record's whole state, which has its own limits."""
        self._most = math.inf

    def _admit(self, name: bytes | None = None) -> None:
        """Raise TooLarge if there is no room for this operation; a further change of the same field needs no room."""
        if len(self._fields) + len(self._last) >= self._most and name not in self._fields:
            raise TooLarge(f"one commit changes at most {MOST_STEPS} fields, messages and tags; make several commits")

    def copy(self) -> Changes:
        """A copy of the changes; additions to it do not change the original."""
        other = copy(self)
        other.detach()
        return other

    def detach(self) -> None:
        """Copy the lists and dicts that are shared with the original."""
        self._fields = dict(self._fields)
        self._first = list(self._first)
        self._last = list(self._last)
        self._events = list(self._events)
        self.sums = dict(self.sums)
        self._items = None if self._items is None else self._items.copy()

    @property
    def fields(self) -> Mapping[bytes, tuple[bytes, bytes, bytes]]:
        """The operation for each changed field, by its stored name."""
        return self._fields

    def set(self, key: str, value: Any, *, ttl: float | None = None, until: float = field_ttl.NEVER) -> Any:
        """Set a field, for `ttl` seconds or until a time in seconds since 1970; returns the value as it is stored."""
        name = codec.encode_key(key)
        if self._prepare is not None:
            value = self._prepare(key, value)
        data = self._codec.encode(value, key)
        self._admit(name)
        if ttl is not None:
            if self._now is None:
                raise InvalidValue(f"{key!r}: there is no clock for a ttl here")
            until = field_ttl.after(ttl, self._now())
        if until != field_ttl.NEVER:
            data = field_ttl.wrap(data, until)
            self.reserved(TIMED, b"1")
        self.put(name, data)
        return value

    def put(self, name: bytes, data: bytes) -> None:
        """Set a field to encoded bytes."""
        size = len(data)
        if size > self._settings.max_field_bytes:
            key = codec.decode_key(name)
            limit = self._settings.max_field_bytes
            raise TooLarge(f"{key!r:.80}: {size} bytes are more than max_field_bytes={limit}")
        before = self._fields.get(name)
        self._size += size - len(before[2]) if before else size + len(name)
        if self._size > self._settings.max_record_bytes:
            raise TooLarge(f"{self._size} bytes are more than max_record_bytes={self._settings.max_record_bytes}")
        self._fields[name] = (b"s", name, _compact(data))

    def set_many(self, values: Mapping[str, Any], *, ttl: float | None = None) -> None:
        """Set several fields."""
        if not isinstance(values, Mapping):
            raise InvalidValue(f"fields must come as a mapping, not as {type(values).__name__}")
        for key, value in values.items():
            self.set(key, value, ttl=ttl)

    def delete(self, key: str) -> None:
        """Delete a field; a missing one is not an error."""
        name = codec.encode_key(key)
        self._admit(name)
        self._fields[name] = (b"d", name, b"")

    def leave(self, name: bytes) -> None:
        """Drop the pending change of a field."""
        self._fields.pop(name, None)

    def increment(self, key: str, by: int) -> None:
        """Add an integer on the server. Several increments of one field add up."""
        name = codec.encode_key(key)
        if self._codec.covers(key):
            raise InvalidValue(f"{key!r}: is encrypted, so the server cannot add to it; increment() and apply() can")
        if type(by) is not int or abs(by) >= _EXACT:
            raise InvalidValue(f"{key!r}: {by!r} cannot be added on the server, it takes an int of at most 15 digits")
        self._admit(name)
        operation, _, before = self._fields.get(name, (b"i", name, b"0"))
        if operation != b"i":
            raise InvalidValue(f"{key!r}: set or deleted in the same change already")
        self.sums[key] = None
        self._fields[name] = (b"i", name, b"%d" % (int(before) + by))

    def append(self, message: Message | dict[str, Any]) -> Message:
        """Add a message; returns the message as it is stored."""
        self._admit()
        message = self._prepared(message)
        data = self._codec.encode_message(message)
        if len(data) > self._settings.max_message_bytes:
            limit = self._settings.max_message_bytes
            raise TooLarge(f"a message of {len(data)} bytes is more than max_message_bytes={limit}")
        self._last.append((b"m", b"", _compact(data)))
        return message

    def _prepared(self, message: Message | dict[str, Any]) -> Message:
        if self._prepare_message is not None:
            message = self._prepare_message(message)
        return message if isinstance(message, Message) else codec.as_message(message)

    def phase(self, phase: str | None) -> None:
        """Move to a phase and emit an event; None removes the phase."""
        if phase is None:
            self._fields[PHASE] = (b"d", PHASE, b"")
        else:
            self._fields[PHASE] = (b"s", PHASE, checked_phase(phase).encode("utf-8", "surrogatepass"))
        self._events = [each for each in self._events if each[1] != b"session.phase"]
        self.emit("session.phase", {"phase": phase})

    def tag(self, key: str, *texts: str) -> None:
        """Add one tag or several under a key, in addition to existing ones. Raises InvalidValue."""
        self.put_tags({key: texts}, {})

    def untag(self, key: str, *texts: str) -> None:
        """Remove tags. A missing one is not an error."""
        self.put_tags({}, {key: texts})

    def put_tags(self, tag: Mapping[str, str | Iterable[str]], untag: Mapping[str, str | Iterable[str]]) -> None:
        """Add some tags and remove others."""
        given, gone = tag_texts(tag, "tag"), tag_texts(untag, "untag")
        if both := set(given) & set(gone):
            raise InvalidValue(f"tag and untag both have {min(both)!r:.80}")
        for each, value in (*((each, None) for each in gone), *((each, b"1") for each in given)):
            self._admit(tag_field(each))
            self.reserved(tag_field(each), value)

    @property
    def items(self) -> ItemChanges:
        """The changes of items."""
        if self._items is None:
            self._items = ItemChanges(self._settings, self._codec)
        return self._items

    def put_items(self) -> list[bytes]:
        """The names of the items that are put."""
        return [] if self._items is None else self._items.put()

    def put_item(
        self,
        collection: str,
        key: str,
        value: Any,
        *,
        if_absent: bool = False,
        if_present: bool = False,
        equals: Any = ANY,
        keep: bool = False,
    ) -> None:
        """Put an item, with the arguments of `PutItem`; but `equals` takes an Item that was read, or None."""
        self.items.add(PutItem(
            collection=collection, key=key, value=value, if_absent=if_absent, if_present=if_present, equals=equals,
            keep=keep,
        ))  # fmt: skip

    def delete_item(self, collection: str, key: str, *, if_present: bool = False, equals: Any = ANY) -> None:
        """Delete an item; a missing one is not an error, unless it is required to exist."""
        self.items.add(DeleteItem(collection=collection, key=key, if_present=if_present, equals=equals))

    def layer(self, version: int) -> None:
        """Show the items of this version from now on (0: none); drops item operations collected so far."""
        self._items = None
        self._first = [operation for operation in self._first if operation[0] != b"y"] + [(b"y", b"", b"%d" % version)]

    def clear(self, *, messages: bool, items: bool = False, tags: bool = False) -> None:
        """Delete all fields, also those set so far in this change; hide messages, items, tags if requested."""
        self._first = [operation for operation in self._first if operation[0] != b"c"]
        self._first.append((b"c", TAG if tags else b"", b""))
        if items:
            self.layer(0)
        if messages:
            self.wipe()
            self.reserved(SUMMARY, None)  # the summary is of these messages
        self._fields = {name: operation for name, operation in self._fields.items() if name[:1] == b"#"}
        self._size = 0

    def undelete(self) -> None:
        """Start a deleted record again."""
        self.reserved(DELETED, None)

    def copy_messages(self, operations: Iterable[tuple[bytes, bytes, bytes]]) -> None:
        """Append stored messages of another record, with their numbers and times."""
        self._last += operations

    def wipe(self) -> None:
        """Hide all messages so far; their numbers are not used again."""
        self._first = [operation for operation in self._first if operation[0] != b"w"] + [(b"w", b"", b"")]
        self._last = [operation for operation in self._last if operation[0] != b"m"]

    def reserved(self, name: bytes, value: bytes | None) -> None:
        """Set or delete a field by its stored name, reserved ones included."""
        self._fields[name] = (b"d", name, b"") if value is None else (b"s", name, _compact(value))

    def answered(self, name: bytes, value: bytes) -> None:
        """Note an answered request under its stored name; the server adds the version."""
        self._fields[name] = (b"r", name, _compact(value))

    def post(self, message: Message | dict[str, Any], request_id: str | None, tag: bytes) -> None:
        """Add an input to the inbox, with the tag of its request, or an empty one."""
        text = codec.encode([self._prepared(message).to_dict(), request_id], "message")
        data = self._codec.seal(text, codec.MESSAGE)
        for name in ("max_message_bytes", "inbox_bytes"):
            if len(data) > getattr(self._settings, name):
                raise TooLarge(f"an input of {len(data)} bytes is more than {name}={getattr(self._settings, name)}")
        self._last.append((b"I", tag, _compact(data)))

    def wake(self, tag: bytes, when: bytes, text: str, name: str, every: float | None) -> None:
        """Add an input that is due later, in place of one with this tag that waits; `when` as in inbox.lua."""
        message = self._prepared({"role": "system", "content": text}).to_dict()
        data = self._codec.seal(codec.encode([message, None, name, every], "text"), codec.MESSAGE)
        if len(data) > self._settings.max_message_bytes:
            raise TooLarge(f"a wake of {len(data)} bytes is more than max_message_bytes")
        self._last.append((b"W", tag, b"%b %b" % (when, data)))

    def take(self, inputs: Mapping[int, bytes], forgotten: Mapping[int, bytes]) -> None:
        """Take inputs out of the inbox, and forget requests: the tag of the request by the number of the input."""
        self._last.append((b"T", _numbered(forgotten), _numbered(inputs)))

    def label(self, label: str) -> None:
        """Name the version that this change creates."""
        if not isinstance(label, str) or not label or len(label) > 500:
            raise InvalidValue(f"a label is a str of 1 to 500 characters, not {label!r:.80}")
        self._last.append((b"l", b"", label.encode("utf-8", "surrogatepass")))

    def emit(self, type: str, data: Mapping[str, Any]) -> None:
        """Write a lifecycle event with the change, if the record is a session."""
        if self._codec.record.startswith("session:"):
            self._events.append((b"e", type.encode(), _compact(codec.encode(data, "data"))))

    def set_lifetime(self, idle_ms: int, whole_ms: int) -> None:
        """End the session after `idle_ms` without a commit, and at the latest `whole_ms` from now; 0: no limit."""
        if not idle_ms and not whole_ms:
            self.reserved(LIFETIME, None)
        if self._codec.record.startswith("session:"):
            self._events.append((b"x", b"%d" % idle_ms, b"%d" % whole_ms))

    def draft(
        self,
        kind: str,
        *,
        expected: int | None = None,
        epoch: str = "",
        deleted: str = "refuse",
        expectations: Expectations = (),
        durability: str | None = None,
    ) -> Draft:
        """Build the change to send, optionally only for this version of the record and this epoch.

        Raises InvalidValue if it changes nothing; Conflict if an expected item was read under another epoch.
        """
        if expected is not None and (type(expected) is not int or expected < 0):
            raise InvalidValue(f"expect_version is an int from 0 on, not {expected!r}")
        operations: Sequence[Operation] = (*self._first, *self._fields.values(), *self._last)
        expected_items: Sequence[Operation] = ()
        about_items = False
        if self._items is not None and self._items:
            about_items = True
            operations = (*operations, *self._items.operations)
            expected_items = self._items.expected
            epoch = self._items.under(epoch)
        elif not operations and not self._events:
            raise InvalidValue("nothing to change")
        elif self._first:
            about_items = any(operation[0] == b"y" for operation in self._first)
        return Draft(
            kind, operations, tuple(self._events), expectations, (), expected, epoch, deleted,
            self._owner, self._actor or ambient.actor(), self._lifetime,
            ambient.level(self._settings) if durability is None else level_of(durability), about_items, expected_items,
        )  # fmt: skip


def _numbered(tags: Mapping[int, bytes]) -> bytes:
    return b" ".join(b"%d:%b" % (number, tag) if tag else b"%d" % number for number, tag in sorted(tags.items()))


def add(stored: Any, by: int | float, key: str) -> int | float:
    """The sum that replaces a stored number."""
    if isinstance(stored, bool) or not isinstance(stored, (int, float)):
        raise InvalidValue(f"{key!r}: holds a {type(stored).__name__}, not a number")
    try:
        return stored + by
    except OverflowError as error:
        raise InvalidValue(f"{key!r:.80}: a sum of a fraction and {by!r:.80} is not a number") from error
