"""Import of an exported record from an untrusted file. Law: nothing in the file is trusted.

The whole file is replayed, change by change, before a server is asked. Every intermediate state must be one that
ordinary writes could have made, within their size limits, and every message that a state shows must be in the file
before it is shown. Then the record is written in one transaction, or not at all.

Names of other records in the file are not looked up. Messages become the record's own, and a turn's changes to its user
are left out. An import therefore cannot read other records or their messages.

Design: section 11.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import orjson

from distributed_state.cold.record_items import OlderItem
from distributed_state.errors import Conflict, CorruptState, InvalidValue, TooLarge, WarmUnavailable
from distributed_state.settings import MOST_INPUTS, Settings
from distributed_state.store.export import FORMAT
from distributed_state.tiers import ambient
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import as_text, codec, field_ttl, message_ranges
from distributed_state.values.codec import Codec
from distributed_state.values.journal import JournalEntry, Op, State, fold, item_of, pack, unpack
from distributed_state.values.model import (
    DELETED,
    FAILURE,
    INBOX,
    INITIALIZED,
    ITEMS,
    LIFETIME,
    NEXT,
    OWNER,
    PARENT,
    PHASE,
    REQUEST,
    SCHEDULE,
    SCHEMA,
    SEGMENTS,
    START,
    SUMMARY,
    TAG,
    TIMED,
    USAGE,
    Expiry,
    Ref,
    checked_phase,
    escape,
    is_input,
    is_state,
    is_value,
    unescape,
)
from distributed_state.values.schedule import Failure, Schedule
from distributed_state.values.search import MOST as MOST_TAGS
from distributed_state.values.search import tag_of
from distributed_state.values.usage import Counted, checked_model
from distributed_state.warm.lease import AsyncLease

MOST = 10**15  # limit of versions and message numbers: Lua has doubles, which are exact up to here
LATEST_MS = 253_402_300_799_999  # the year 9999: later times cannot be displayed
LONGEST = 2048  # a reserved field's name or text
WRONG = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, CorruptState)


def raw(text: Any) -> bytes:
    """The bytes of a text in the file."""
    if not isinstance(text, str):
        raise ValueError(f"{type(text).__name__} instead of a string")
    return text.encode("utf-8", "surrogateescape")


def raw_value(given: Any) -> bytes:
    """The stored bytes of a value in the file: a text, or an object that holds it in base64."""
    if isinstance(given, dict) and given.keys() == {"base64"}:
        return as_text.bytes_of(given["base64"], "base64")
    return raw(given)


def whole(row: dict[str, Any], name: str, least: int, most: int) -> int:
    """A whole number of a row."""
    value = row[name]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r:.80}, not an int from {least} to {most}")
    return value


def digits(name: bytes, value: bytes) -> int:
    """A number that the store keeps as text."""
    if not re.fullmatch(rb"0|[1-9]\d{0,15}", value) or int(value) > MOST:
        raise ValueError(f"{name.decode()} is {value!r:.80}, not a number from 0 to {MOST}")
    return int(value)


def record_of(text: str) -> Ref:
    """Return a record by scope and id. Raises InvalidValue for a scope that does not exist."""
    ref = Ref.parse(text)
    if ref.text != text:
        raise ValueError(f"{text!r:.80} is not the text of a record")
    return ref


def runs_of(value: bytes) -> list[tuple[str, int, int]]:
    """The runs in `#segments`, in order and without invalid gaps."""
    runs = []
    at = 0
    for source, start, stop in orjson.loads(value):
        record_of(source)
        if type(start) is not int or type(stop) is not int or not at <= start <= stop <= MOST:
            raise ValueError(f"#segments: {start!r:.40} to {stop!r:.40} does not follow {at}")
        runs.append((source, start, stop))
        at = stop
    return runs


def check_reserved(name: bytes, value: bytes) -> None:
    """Check an internal field of a state."""
    if name == SEGMENTS:
        runs_of(value)
        return
    if len(value) > LONGEST and name != INITIALIZED:
        raise TooLarge(f"{name.decode()}: {len(value)} bytes are more than {LONGEST}")
    if name[:2] == TAG:
        tag_of(name)
    if name in (START, NEXT):
        digits(name, value)
    elif name == PHASE:
        checked_phase(value.decode("utf-8", "surrogatepass"))
    elif name == OWNER:
        owner = value.decode()
        if escape(Ref("user", unescape(owner)).id) != owner:
            raise ValueError(f"#owner is {owner!r:.80}, not the id of a user")
    elif name == PARENT:
        text, _, version = value.decode().rpartition("@")
        record_of(text)
        digits(name, version.encode())
    elif name == SCHEMA:
        if not digits(name, value):
            raise ValueError("#schema is 0")
    elif name == ITEMS:
        since, _, below = value.partition(b" ")
        if below and digits(name, below) >= digits(name, since):
            raise ValueError(f"#items is {value!r:.80}: its numbers must not decrease")
        digits(name, since)
    elif name == LIFETIME:
        idle, _, until = value.partition(b" ")
        digits(name, idle), digits(name, until)
    elif name == INBOX:
        counts = value.split(b" ")
        _following, _entries, _bytes = (digits(name, number) for number in counts[:3])
        for wake in counts[3:]:
            _wake, _due = (digits(name, each) for each in wake.split(b":"))
    elif name == SCHEDULE:
        Schedule.read(value)
    elif name == FAILURE:
        Failure.read(value)
    elif name[:2] == INBOX:
        number, *_served = (digits(name, each) for each in value.split(b" ", 1))
        if name[2:3] != b"q" or not number:
            raise ValueError(f"{name!r:.80} is not the request of an input")
    elif name[:2] == USAGE:
        Counted.read(value)
        checked_model(name[2:].decode())
    elif name == DELETED and Expiry.read(value):
        return
    elif (name in (DELETED, TIMED) or name[:2] == TAG) and value != b"1":
        raise ValueError(f"{name.decode()} is {value!r:.80}, not 1")


def check_text(name: bytes, text: bytes) -> None:
    """Check a user's text before it is encoded, by the rules for a write."""
    key = codec.decode_key(name)
    value = codec.decode_value(text, key)
    codec.encode_value(value, key)
    if name == SUMMARY:
        if not isinstance(value["text"], str) or type(value["start"]) is not int or type(value["stop"]) is not int:
            raise ValueError("#summary is invalid")
    elif name[:2] == REQUEST and not (isinstance(value, list) and len(value) in (1, 4) and type(value[0]) is int):
        raise ValueError(f"{key!r:.80} is not the result of a request")
    elif is_input(name):
        message, request_id, *wake = value
        codec.as_message(message)
        if wake and not (len(wake) == 2 and isinstance(wake[0], str)):
            raise ValueError(f"{key!r:.80} is not a wake")
        if request_id is not None and not isinstance(request_id, str):
            raise ValueError(f"{key!r:.80} has the request {request_id!r:.80}")


def _check_mark(name: bytes, value: bytes) -> None:
    """Check what precedes a value: the deadline of a user's field, a number that commit.lua noted with another."""
    if name[:1] != b"#":
        if field_ttl.split(value)[0] > 1e12:
            raise ValueError(f"{name!r:.80}: a deadline that no clock comes to")
    elif field_ttl.noted(value) is None or len(field_ttl.mark(value)) > 18:
        raise ValueError(f"{name!r:.80}: {value[:20]!r} is not a noted number")


def check_message(text: bytes, name: str = "message") -> None:
    """Check a user's message by the rules for a write."""
    codec.encode_message(codec.as_message(codec.decode(text, name), name), name)


def check_item(name: bytes, data: bytes, most: int) -> None:
    """Check an item's name, and its value if it is not deleted."""
    collection, key = (each.decode("utf-8", "surrogatepass") for each in item_of(name))
    what = f"item {key!r:.80} of {collection!r:.80}"
    if len(data) > most:
        raise TooLarge(f"{what}: {len(data)} bytes are more than max_field_bytes={most}")
    if data and not is_encrypted(data):
        if field_ttl.marked(data):
            raise ValueError(f"{what} has a deadline")
        codec.encode_value(codec.decode_value(data, codec.item_name(name)), codec.item_name(name))


def is_encrypted(data: bytes) -> bool:
    """Whether a stored value is encrypted."""
    return field_ttl.split(data)[1][:1] == codec.SEALED


def operation_of(operation: Any) -> tuple[bytes, bytes, bytes]:
    """One operation of a change."""
    if not isinstance(operation, list) or operation[0] not in ("s", "d", "c", "m", "w", "l", "p", "q"):
        raise ValueError(f"step {operation!r:.80} is unknown")
    kind, name, value = operation
    return raw(kind), raw(name), raw_value(value)


_LEFT_OUT = (LIFETIME, SCHEDULE)
_EVENT = re.compile(r"[0-9A-Za-z]{1,64}\.\d{1,19}\.[0-9A-Za-z]{1,64}", re.ASCII)


class ImportedFile:
    """Exported lines, checked whole before any write. `ref` is the new record, `origin` the exported one."""

    def __init__(self, lines: Iterable[str], id: str | None, settings: Settings) -> None:
        self.base: State | None = None
        self.shared: list[tuple[int, bytes]] = []
        self.items: list[OlderItem] = []
        self.entries: list[JournalEntry] = []
        self.origin: Ref | None = None
        self.namespace: str | None = None
        self._settings = settings
        self._expected: tuple[int, ...] = ()
        self._older: set[tuple[int, bytes]] = set()
        self._fields: dict[bytes, bytes] = {}
        self._sizes = {False: 0, True: 0}  # of the user's fields (False) and the internal ones (True)
        self._tags: set[bytes] = set()
        # The messages in the file so far, as runs of numbers.
        self._starts: list[int] = []
        self._stops: list[int] = []
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip():
                    self._read(json.loads(line))
            except TooLarge as error:
                raise TooLarge(f"line {number}: {error}") from error
            except WRONG as error:
                raise InvalidValue(f"line {number}: is not of the export format ({error})") from error
        if self.origin is None:
            raise InvalidValue("line 1: the header is missing")
        self.ref: Ref = self.origin if id is None else Ref(self.origin.scope, id)
        found = len(self.shared), len(self.items), len(self.entries)
        if found != self._expected:
            raise InvalidValue(
                f"{found} messages, items and changes, the header says {self._expected}: the file is cut off"
            )
        if self.base is None and not self.entries:
            raise InvalidValue("the file contains no change")
        try:
            self._check_shown()
            self._check_inbox()
        except WRONG as error:
            raise InvalidValue(f"the last state is invalid: {error}") from error
        if self._stops and self._stops[-1] > int(self._fields.get(NEXT, b"0")):
            raise InvalidValue(f"message {self._stops[-1] - 1} is in the file, but was never appended")

    @property
    def version(self) -> int:
        """The record's last version."""
        return self.entries[-1].version if self.entries else self.base.version if self.base else 0

    @property
    def owner(self) -> str:
        """The record's future owner in stored form; '' without an owner."""
        return self._fields.get(OWNER, b"").decode("utf-8", "replace")

    def _read(self, row: dict[str, Any]) -> None:
        if self.origin is None:
            if row["format"] != FORMAT:
                raise ValueError(f"format {row['format']!r:.80} is not {FORMAT}")
            self.namespace = row.get("namespace")
            if self.namespace is not None and (not isinstance(self.namespace, str) or len(self.namespace) > 64):
                raise ValueError("the namespace is invalid")
            self.origin = Ref(row["scope"], row["id"])
            row.setdefault("items", 0)
            self._expected = tuple(whole(row, name, 0, MOST) for name in ("messages", "items", "changes"))
        elif "branch" in row:
            pass  # only shown to people: another store's epochs have no meaning here
        elif "base" in row:
            if self.base is not None or self.shared or self.entries:
                raise ValueError("a base comes once, before all messages and changes")
            fields = {raw(name): raw_value(value) for name, value in row["fields"].items()}
            self.base = State(str(row["epoch"]), whole(row, "base", 1, MOST), {})
            if _since(fields.get(ITEMS, b"0")) > self.base.version:
                raise ValueError(f"{fields[ITEMS]!r:.80} shows items since a version after {self.base.version}")
            for name, value in fields.items():
                self._set(name, value)
            self.base.fields.update(fields)
        elif "message" in row:
            if self.entries:
                raise ValueError("messages come before all changes")
            self._shared(whole(row, "message", 0, MOST), raw_value(row["data"]))
        elif "item" in row:
            if self.entries:
                raise ValueError("items come before all changes")
            self._item(row)
        else:
            self._change(row)

    def _shared(self, number: int, data: bytes) -> None:
        self._message(number, data)
        self._hold(number)
        self.shared.append((number, data))

    def _item(self, row: dict[str, Any]) -> None:
        """An item that states in the file show, but that is not put by a change in the file."""
        at = whole(row, "at", 0, self.base.version if self.base else 0)
        item = OlderItem(at, raw(row["item"]), record_of(row["origin"]).text, raw_value(row["data"]))
        if (item.at, item.name) in self._older:
            raise ValueError(f"item {item.name!r:.80} comes twice")
        self._older.add((item.at, item.name))
        check_item(item.name, item.data, self._settings.max_field_bytes)
        self.items.append(item)

    def _message(self, number: int, data: bytes) -> None:
        if len(data) > self._settings.max_message_bytes:
            limit = self._settings.max_message_bytes
            raise TooLarge(f"a message of {len(data)} bytes is more than max_message_bytes={limit}")
        time, text = field_ttl.split(data)  # a message's commit time precedes it, in the same form
        if field_ttl.marked(data) and time > LATEST_MS / 1000:
            raise ValueError(f"message {number}: an impossible time")
        if text[:1] != codec.SEALED:
            check_message(text, f"message {number}")

    def _hold(self, number: int) -> None:
        if self._stops and number < self._stops[-1]:
            raise ValueError(f"message {number} comes twice, or after a later one")
        if self._stops and number == self._stops[-1]:
            self._stops[-1] += 1
        else:
            self._starts.append(number)
            self._stops.append(number + 1)

    def _set(self, name: bytes, value: bytes) -> None:
        """Set one field of the state; only this field is checked."""
        if not is_state(name):
            raise ValueError(f"field {name.decode(errors='replace')!r:.80} is reserved")
        key = codec.decode_key(name)
        if name[:1] != b"#":
            codec.encode_key(key)
        elif len(name) > LONGEST:
            raise TooLarge(f"a reserved field's name of {len(name)} bytes is more than {LONGEST}")
        most = "max_message_bytes" if is_input(name) else "max_field_bytes"
        limit = getattr(self._settings, most)
        if len(value) > limit and name != SEGMENTS:
            raise TooLarge(f"{key!r:.80}: {len(value)} bytes are more than {most}={limit}")
        if not is_value(name):
            check_reserved(name, value)
        else:
            if field_ttl.marked(value):
                _check_mark(name, value)
            if not is_encrypted(value):
                check_text(name, field_ttl.split(value)[1])
        self._fold(Op(b"s", name, value))

    def _fold(self, op: Op) -> None:
        """Apply one operation, and update the state's size."""
        name = op.name
        ours = op.name[:1] == b"#"
        counts = op.kind in (b"s", b"d") and name not in (SEGMENTS, START, NEXT)
        if counts and name in self._fields:
            self._sizes[ours] -= len(name) + len(self._fields[name])
        tags = [each for each in self._tags if op.kind == b"c" and name == TAG]
        inbox = [each for each in self._fields if each[:2] == INBOX] if op.kind == b"c" and name == TAG else []
        self._sizes[True] -= sum(len(each) + len(self._fields[each]) for each in (*tags, *inbox))
        fold(self._fields, [op])
        if counts and name in self._fields:
            self._sizes[ours] += len(name) + len(self._fields[name])
        elif op.kind == b"c":
            self._sizes[False] = 0
        if tags or name[:2] == TAG:
            self._tags = {each for each in self._tags | {name} if each in self._fields}
        if len(self._tags) > MOST_TAGS:
            raise TooLarge(f"{len(self._tags)} tags are more than {MOST_TAGS}")
        if self._sizes[ours] > self._settings.max_record_bytes:
            limit = self._settings.max_record_bytes
            raise TooLarge(f"{self._sizes[ours]} bytes are more than max_record_bytes={limit}")

    def _change(self, row: dict[str, Any]) -> None:
        if self.base is not None and not self.entries:
            self._check_shown()
        version = whole(row, "version", 1, MOST)
        if version != self.version + 1:
            raise ValueError(f"version {version} follows {self.version}")
        data = pack(operation_of(operation) for operation in row["ops"] if operation[0] != "e")
        ops = unpack(data)
        moved = False
        for op in ops:
            moved = self._apply(op) or moved
        if moved:
            self._check_shown()
        if ITEMS not in self._fields and any(op.kind in (b"p", b"q") for op in ops):
            raise ValueError("a change of items of a record without items")
        if not isinstance(row["event"], str) or not _EVENT.fullmatch(row["event"]):
            raise ValueError(f"event {row['event']!r:.80} is unknown")
        kind = row["kind"]
        if not isinstance(kind, str) or not 0 < len(kind) <= 100 or escape(kind) != kind:
            raise ValueError(f"kind {kind!r:.80} is unknown")
        self.entries.append(
            JournalEntry(
                offset=0, event=row["event"], record="", version=version,
                time_ms=whole(row, "time_ms", 0, LATEST_MS), kind=kind, actor=ambient.noted(row["actor"]),
                token=whole(row, "token", 0, 2**63 - 1), data=data, total_bytes=0,
            )
        )  # fmt: skip

    def _apply(self, op: Op) -> bool:
        """Apply one operation; returns whether it may change which messages are shown, apart from an append."""
        kind, name, value = op
        following = int(self._fields.get(NEXT, b"0"))
        if kind == b"s":
            if name == NEXT and digits(name, value) < following:
                raise ValueError(f"#mn goes back from {following} to {int(value)}")
            if name == ITEMS and value != self._fields.get(ITEMS) and _since(value) != self.version + 1:
                # Reads of items wait until SQL has reached this version.
                raise ValueError(f"#items is {value.decode(errors='replace')!r:.80} at version {self.version + 1}")
            self._set(name, value)
            return name in (SEGMENTS, START, NEXT)
        if kind == b"d":
            if not is_state(name) or name in (START, NEXT, ITEMS) or value:
                raise ValueError(f"field {name.decode(errors='replace')!r:.80} cannot be deleted")
            if name[:1] != b"#":
                codec.encode_key(codec.decode_key(name))
        elif kind == b"m":
            if name != b"%d" % following:
                raise ValueError(f"message {name.decode(errors='replace')!r:.80} follows {following - 1}")
            self._message(following, value)
            self._hold(following)
        elif kind in (b"p", b"q"):
            if (kind == b"p") != bool(value):
                raise ValueError(f"an operation {kind.decode()} with {len(value)} bytes")
            check_item(name, value, self._settings.max_field_bytes)
        elif kind == b"l":
            label = value.decode("utf-8", "surrogatepass")
            if name or not 0 < len(label) <= 500:
                raise ValueError(f"a label is 1 to 500 characters, not {label!r:.80}")
        elif (name and (kind, name) != (b"c", TAG)) or value != (b"" if kind == b"c" else b"%d" % following):
            raise ValueError(
                f"an operation {kind.decode()} of {name.decode(errors='replace')!r:.80} and {len(value)} bytes"
            )
        self._fold(op)
        return kind == b"w" or name == SEGMENTS

    def _check_shown(self) -> None:
        """Raise ValueError unless every shown message is in the file exactly once."""
        start, stop = (int(self._fields.get(name, b"0")) for name in (START, NEXT))
        at = 0
        for _, first, last in [*runs_of(self._fields.get(SEGMENTS, b"[]")), ("", start, stop)]:
            if not at <= first <= last:
                raise ValueError(f"messages {first} to {last} are shown after {at}")
            held = bisect_right(self._starts, first) - 1
            if first < last and (held < 0 or last > self._stops[held]):
                raise ValueError(f"messages {first} to {last - 1} are shown, but some of them are missing in the file")
            at = last

    def _check_inbox(self) -> None:
        """Raise ValueError unless the inputs are counted as commit.lua counts them. Their bytes may have changed."""
        inputs = [digits(name, name[2:]) for name in self._fields if is_input(name)]
        counts = self._fields.get(INBOX, b"1 0 0").split()
        following, entries, wakes = int(counts[0]), int(counts[1]), counts[3:]
        if unknown := {int(each.split(b":")[0]) for each in wakes} - set(inputs):
            raise ValueError(f"input {min(unknown)} is a wake, and is not there")
        if entries != len(inputs) or entries > MOST_INPUTS:
            raise ValueError(f"an inbox of {len(inputs)} inputs has {entries}")
        if not following or not all(0 < number < following for number in inputs):
            raise ValueError(f"the next input is number {following}, after {inputs!r:.80}")


def _since(value: bytes) -> int:
    """The version from which on items are shown, stored in `#items`."""
    return digits(ITEMS, value.partition(b" ")[0])


class Reencoded:
    """The contents of a file, encoded for the new record. Raises DecryptionFailed if a key is missing."""

    def __init__(self, given: ImportedFile, target: Codec) -> None:
        assert given.origin is not None
        self._target = target
        self._source = target.of(given.origin.text, given.namespace)
        self._writers: dict[int, str] = {}  # the record that a message was written under, if it was another one
        # The order matters: runs of messages name the writers of messages that follow.
        self.base = given.base
        if given.base is not None:
            # The lifetime is left out: an old copy would expire at once. So is the handler: it would run at once.
            kept = {name: value for name, value in given.base.fields.items() if name not in _LEFT_OUT}
            if ITEMS in kept:
                kept[ITEMS] = b"%d" % given.base.version  # the file holds the items of that state
            self.base = replace(given.base, fields={name: self._field(name, value) for name, value in kept.items()})
        self.entries = [
            replace(entry, record=given.ref.text, data=pack(self._ops(entry.data))) for entry in given.entries
        ]
        source = self._source.record
        self.items = [each._replace(data=self._item(each.name, each.data, each.origin)) for each in given.items]
        self.shared = [(n, self._message(data, self._writers.get(n, source))) for n, data in given.shared]

    def _ops(self, data: bytes) -> Iterator[Op]:
        for op in unpack(data):
            if op.name in _LEFT_OUT:
                continue
            if op.kind == b"m":
                yield op._replace(value=self._message(op.value, self._source.record))
            elif op.kind == b"p":
                yield op._replace(value=self._item(op.name, op.value, self._source.record))
            elif op.kind == b"s":
                yield op._replace(value=self._field(op.name, op.value))
            else:
                yield op

    def _field(self, name: bytes, value: bytes) -> bytes:
        if name == SEGMENTS:
            for run in message_ranges.parse(value):
                self._writers.update(dict.fromkeys(range(run.start, run.stop), run.source))
            # All shown messages are in the file and stored with this record: no other record is read.
            return message_ranges.taken_over(value, self._target.record)
        if not is_value(name):
            return value
        key = codec.place_of(name)
        data = self._source.carry(value, key, self._target)
        hidden = is_encrypted(value)
        if not hidden and name[:2] != REQUEST:
            return data
        text = self._target.open(data, key)
        if hidden:
            check_text(name, text)
        kept = codec.decode(text, key) if name[:2] == REQUEST else [None]
        if len(kept) == 4 and kept[3]:
            # The turn's changes to its user's record were applied when it ran.
            return field_ttl.mark(data) + self._target.encode([*kept[:3], None], key)
        return data

    def _item(self, name: bytes, data: bytes, writer: str) -> bytes:
        key = codec.item_name(name)
        carried = self._source.of(writer).carry(data, key, self._target) if data else data
        if is_encrypted(data):
            codec.decode_value(self._target.open(carried, key), key)
        return carried

    def _message(self, data: bytes, writer: str) -> bytes:
        carried = self._source.of(writer).carry(data, codec.MESSAGE, self._target)
        if is_encrypted(data):
            check_message(self._target.open(carried, codec.MESSAGE))
        return carried


async def import_(tiers: Tiers, given: ImportedFile) -> str:
    """Insert an exported record into SQL in one transaction; the next access hydrates it into Redis."""
    try:
        taken = Reencoded(given, tiers.codec_of(given.ref.text))
    except CorruptState:
        raise
    except WRONG as error:
        raise InvalidValue(
            f"{given.ref.text[:200]}: an encrypted value was changed after it was written ({error})"
        ) from error
    ref = given.ref
    keys = tiers.keys.of(ref)
    # Under the lock: the record must not be created between the check and the transaction.
    async with AsyncLease(tiers.leases, keys, wait=10.0, ttl=30.0) as lease:
        entry = await read_path.read(tiers, keys, fresh=True)
        if entry.version:
            raise Conflict(f"{ref.text[:200]}: exists already, at version {entry.version}", version=entry.version)
        if lease.lost:
            raise WarmUnavailable(f"{ref.text[:200]}: the lock was lost before the import began; nothing was changed")

        def adopt() -> None:
            tiers.cold.adopt(
                ref.text, partition=keys.partition, epoch=entry.epoch, base=taken.base,
                base_messages=taken.shared, entries=taken.entries,
                items=taken.items,
            )  # fmt: skip

        if not await tiers.warm.partitions.reserve(keys, entry.epoch):
            raise WarmUnavailable(f"{ref.text[:200]}: its partition was started again meanwhile; nothing was changed")
        await tiers.port.sql(adopt)
        # Replicas that read SQL before, or have the record as absent in hot, must read again.
        notice = f"{entry.epoch} {given.version} {tiers.replica} -".encode()
        await tiers.warm.commands([(b"DEL", keys.hydration), (b"SPUBLISH", keys.channel, notice)])
        tiers.hot.forget(ref.text)
    return ref.id
