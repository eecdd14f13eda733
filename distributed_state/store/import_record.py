"""Brings an exported record back, from a file that anybody may have written.

Law: the file is replayed whole, change by change, before anything is asked of a server, and nothing in it is believed.
Every state that it comes to must be one that ordinary writes could have made, of the sizes that they may have; every
message that a state shows must be in the file, before it is shown. What it names beyond its own record is not looked
at: messages become the record's own, and what a turn wanted of its user is left out. So no record, and no other one's
messages, can be read through it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import orjson

from distributed_state.errors import Conflict, CorruptState, InvalidValue, TooLarge, WarmUnavailable
from distributed_state.settings import Settings
from distributed_state.store.export import FORMAT
from distributed_state.tiers import actors
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import codec, field_ttl, message_ranges
from distributed_state.values.codec import Codec
from distributed_state.values.journal import JournalEntry, Op, State, fold, pack, unpack
from distributed_state.values.model import (
    DELETED,
    INITIALIZED,
    LIFETIME,
    NEXT,
    OWNER,
    PARENT,
    PHASE,
    REQUEST,
    SCHEMA,
    SEGMENTS,
    START,
    SUMMARY,
    TIMED,
    Ref,
    escape,
    is_state,
    is_value,
    unescape,
)

_EVENT = re.compile(r"[0-9A-Za-z]{1,64}\.\d{1,19}\.[0-9A-Za-z]{1,64}", re.ASCII)
_MOST = 10**15  # versions and numbers of messages are doubles in Lua, exact up to here
_LATEST_MS = 253_402_300_799_999  # the year 9999: no later time can be shown
_LONGEST = 2048  # a reserved field's name or text
_WRONG = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, CorruptState)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _whole(row: dict[str, Any], name: str, least: int, most: int) -> int:
    value = row[name]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r:.80}, not an int from {least} to {most}")
    return value


def _digits(name: bytes, value: bytes) -> int:
    if not re.fullmatch(rb"0|[1-9]\d{0,15}", value) or int(value) > _MOST:
        raise ValueError(f"{name.decode()} is {value!r:.80}, not a number from 0 to {_MOST}")
    return int(value)


def _record_text(text: str) -> Ref:
    ref = Ref.parse(text)
    if ref.text != text:
        raise ValueError(f"{text!r:.80} is not the text of a record")
    return ref


def _runs(value: bytes) -> list[tuple[str, int, int]]:
    """What `#segments` holds, in order and without gaps of its own making."""
    runs = []
    at = 0
    for source, start, stop in orjson.loads(value):
        _record_text(source)
        if type(start) is not int or type(stop) is not int or not at <= start <= stop <= _MOST:
            raise ValueError(f"#segments: {start!r:.40} to {stop!r:.40} does not follow {at}")
        runs.append((source, start, stop))
        at = stop
    return runs


def _check_reserved(name: bytes, value: bytes) -> None:
    """What the store keeps of its own in a state."""
    if name == SEGMENTS:
        _runs(value)
        return
    if len(value) > _LONGEST and name != INITIALIZED:
        raise TooLarge(f"{name.decode()}: {len(value)} bytes are more than {_LONGEST}")
    if name in (START, NEXT):
        _digits(name, value)
    elif name == PHASE:
        if not value.decode("utf-8", "surrogatepass"):
            raise ValueError("#phase is empty")
    elif name == OWNER:
        owner = value.decode()
        if escape(Ref("user", unescape(owner)).id) != owner:
            raise ValueError(f"#owner is {owner!r:.80}, not the id of a user")
    elif name == PARENT:
        text, _, version = value.decode().rpartition("@")
        _record_text(text)
        _digits(name, version.encode())
    elif name == SCHEMA:
        if not _digits(name, value):
            raise ValueError("#schema is 0")
    elif name == LIFETIME:
        idle, _, until = value.partition(b" ")
        _digits(name, idle), _digits(name, until)
    elif name in (DELETED, TIMED) and value != b"1":
        raise ValueError(f"{name.decode()} is {value!r:.80}, not 1")


def _check_text(name: bytes, text: bytes) -> None:
    """What users said, as JSON text: it must be what a write would have taken."""
    key = codec.decode_key(name)
    value = codec.decode(text, key)
    codec.encode(value, key)
    if name == SUMMARY:
        if not isinstance(value["text"], str) or type(value["start"]) is not int or type(value["stop"]) is not int:
            raise ValueError("#summary is none")
    elif name[:2] == REQUEST and not (isinstance(value, list) and len(value) in (1, 4) and type(value[0]) is int):
        raise ValueError(f"{key!r:.80} is not what a request came to")


def _check_message(text: bytes, name: str = "message") -> None:
    codec.encode_message(codec.as_message(codec.decode(text, name), name), name)


def _sealed(data: bytes) -> bool:
    return field_ttl.split(data)[1][:1] == codec.SEALED


def _step(step: Any) -> tuple[bytes, bytes, bytes]:
    if not isinstance(step, list) or step[0] not in ("s", "d", "c", "m", "w", "l"):
        raise ValueError(f"step {step!r:.80} is unknown")
    kind, name, value = map(_bytes, step)
    return kind, name, value


class Import:
    """Exported lines, checked whole before anything is touched. `ref` is the record to be, `origin` the one it was."""

    def __init__(self, lines: Iterable[str], id: str | None, settings: Settings) -> None:
        self.base: State | None = None
        self.shared: list[tuple[int, bytes]] = []
        self.entries: list[JournalEntry] = []
        self.origin: Ref | None = None
        self.namespace: str | None = None
        self._settings = settings
        self._expected = self._version = 0, 0
        self._fields: dict[bytes, bytes] = {}
        self._sizes = {False: 0, True: 0}  # of the user's fields, and of those that the store keeps for itself
        # The messages that are in the file so far, as runs of numbers.
        self._starts: list[int] = []
        self._stops: list[int] = []
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip():
                    self._read(json.loads(line))
            except TooLarge as error:
                raise TooLarge(f"line {number}: {error}") from error
            except _WRONG as error:
                raise InvalidValue(f"line {number}: is not of the export format ({error})") from error
        if self.origin is None:
            raise InvalidValue("line 1: the header is missing")
        self.ref: Ref = self.origin if id is None else Ref(self.origin.scope, id)
        found = len(self.shared), len(self.entries)
        if found != self._expected:
            raise InvalidValue(f"{found} messages and changes, the header says {self._expected}: the file is cut off")
        if self.base is None and not self.entries:
            raise InvalidValue("there is no change in it")
        try:
            self._check_shown()
        except _WRONG as error:
            raise InvalidValue(f"the last state is none: {error}") from error
        if self._stops and self._stops[-1] > int(self._fields.get(NEXT, b"0")):
            raise InvalidValue(f"message {self._stops[-1] - 1} is in it, and was never appended")

    @property
    def version(self) -> int:
        """The version that the record comes to."""
        return self.entries[-1].version if self.entries else self.base.version if self.base else 0

    @property
    def owner(self) -> str:
        """Whose record it will be, as that is stored; '' if nobody's."""
        return self._fields.get(OWNER, b"").decode("utf-8", "replace")

    def _read(self, row: dict[str, Any]) -> None:
        if self.origin is None:
            if row["format"] != FORMAT:
                raise ValueError(f"format {row['format']!r:.80} is not {FORMAT}")
            self.namespace = row.get("namespace")
            if self.namespace is not None and (not isinstance(self.namespace, str) or len(self.namespace) > 64):
                raise ValueError("namespace is none")
            self.origin = Ref(row["scope"], row["id"])
            self._expected = _whole(row, "messages", 0, _MOST), _whole(row, "changes", 0, _MOST)
        elif "base" in row:
            if self.base is not None or self.shared or self.entries:
                raise ValueError("a base stands before all messages and changes, once")
            fields = {_bytes(name): _bytes(value) for name, value in row["fields"].items()}
            self.base = State(str(row["epoch"]), _whole(row, "base", 1, _MOST), {})
            for name, value in fields.items():
                self._set(name, value)
            self.base.fields.update(fields)
        elif "message" in row:
            if self.entries:
                raise ValueError("messages stand before all changes")
            self._shared(_whole(row, "message", 0, _MOST), _bytes(row["data"]))
        else:
            self._change(row)

    def _shared(self, number: int, data: bytes) -> None:
        self._message(number, data)
        self._hold(number)
        self.shared.append((number, data))

    def _message(self, number: int, data: bytes) -> None:
        if len(data) > self._settings.max_message_bytes:
            limit = self._settings.max_message_bytes
            raise TooLarge(f"a message of {len(data)} bytes is more than max_message_bytes={limit}")
        time, text = field_ttl.split(data)  # before a message stands the time of its commit, in the same form
        if field_ttl.marked(data) and time > _LATEST_MS / 1000:
            raise ValueError(f"message {number}: a time that no clock comes to")
        if text[:1] != codec.SEALED:
            _check_message(text, f"message {number}")

    def _hold(self, number: int) -> None:
        if self._stops and number < self._stops[-1]:
            raise ValueError(f"message {number} comes twice, or behind a later one")
        if self._stops and number == self._stops[-1]:
            self._stops[-1] += 1
        else:
            self._starts.append(number)
            self._stops.append(number + 1)

    def _set(self, name: bytes, value: bytes) -> None:
        """One field of the state, checked by itself."""
        if not is_state(name):
            raise ValueError(f"field {name!r:.80} is reserved")
        key = codec.decode_key(name)
        if name[:1] != b"#":
            codec.encode_key(key)
        elif len(name) > _LONGEST:
            raise TooLarge(f"a reserved field's name of {len(name)} bytes is more than {_LONGEST}")
        if len(value) > self._settings.max_field_bytes and name != SEGMENTS:
            limit = self._settings.max_field_bytes
            raise TooLarge(f"{key!r:.80}: {len(value)} bytes are more than max_field_bytes={limit}")
        if not is_value(name):
            _check_reserved(name, value)
        elif not _sealed(value):
            if field_ttl.marked(value) and field_ttl.split(value)[0] > 1e12:
                raise ValueError(f"{key!r:.80}: a deadline that no clock comes to")
            _check_text(name, field_ttl.split(value)[1])
        self._fold(Op(b"s", name, value))

    def _fold(self, op: Op) -> None:
        """Take one step, and keep count of how large the state is."""
        name = op.name
        ours = op.name[:1] == b"#"
        counts = op.kind in (b"s", b"d") and name not in (SEGMENTS, START, NEXT)
        if counts and name in self._fields:
            self._sizes[ours] -= len(name) + len(self._fields[name])
        fold(self._fields, [op])
        if counts and name in self._fields:
            self._sizes[ours] += len(name) + len(self._fields[name])
        elif op.kind == b"c":
            self._sizes[False] = 0
        if self._sizes[ours] > self._settings.max_record_bytes:
            limit = self._settings.max_record_bytes
            raise TooLarge(f"{self._sizes[ours]} bytes are more than max_record_bytes={limit}")

    def _change(self, row: dict[str, Any]) -> None:
        if self.base is not None and not self.entries:
            self._check_shown()
        version = _whole(row, "version", 1, _MOST)
        if version != self.version + 1:
            raise ValueError(f"version {version} follows {self.version}")
        data = pack(_step(step) for step in row["ops"] if step[0] != "e")
        ops = unpack(data)
        moved = False
        for op in ops:
            moved = self._apply(op) or moved
        if moved:
            self._check_shown()
        if not isinstance(row["event"], str) or not _EVENT.fullmatch(row["event"]):
            raise ValueError(f"event {row['event']!r:.80} is none")
        kind = row["kind"]
        if not isinstance(kind, str) or not 0 < len(kind) <= 100 or escape(kind) != kind:
            raise ValueError(f"kind {kind!r:.80} is none")
        self.entries.append(
            JournalEntry(
                offset=0, event=row["event"], record="", version=version,
                time_ms=_whole(row, "time_ms", 0, _LATEST_MS), kind=kind, actor=actors.noted(row["actor"]),
                token=_whole(row, "token", 0, 2**63 - 1), data=data, total_bytes=0,
            )
        )  # fmt: skip

    def _apply(self, op: Op) -> bool:
        """Take one step; whether other messages may be shown behind it than before, but for one appended."""
        kind, name, value = op
        following = int(self._fields.get(NEXT, b"0"))
        if kind == b"s":
            if name == NEXT and _digits(name, value) < following:
                raise ValueError(f"#mn goes back from {following} to {int(value)}")
            self._set(name, value)
            return name in (SEGMENTS, START, NEXT)
        if kind == b"d":
            if not is_state(name) or name in (START, NEXT) or value:
                raise ValueError(f"field {name!r:.80} cannot be deleted")
            if name[:1] != b"#":
                codec.encode_key(codec.decode_key(name))
        elif kind == b"m":
            if name != b"%d" % following:
                raise ValueError(f"message {name!r:.80} follows {following - 1}")
            self._message(following, value)
            self._hold(following)
        elif kind == b"l":
            label = value.decode("utf-8", "surrogatepass")
            if name or not 0 < len(label) <= 500:
                raise ValueError(f"a label is 1 to 500 characters, not {label!r:.80}")
        elif name or value != (b"" if kind == b"c" else b"%d" % following):
            raise ValueError(f"a step {kind.decode()} of {name!r:.80} and {value!r:.80}")
        self._fold(op)
        return kind == b"w" or name == SEGMENTS

    def _check_shown(self) -> None:
        """Raise ValueError unless every message that the state shows is in the file, once."""
        start, stop = (int(self._fields.get(name, b"0")) for name in (START, NEXT))
        at = 0
        for _, first, last in [*_runs(self._fields.get(SEGMENTS, b"[]")), ("", start, stop)]:
            if not at <= first <= last:
                raise ValueError(f"messages {first} to {last} are shown behind {at}")
            held = bisect_right(self._starts, first) - 1
            if first < last and (held < 0 or last > self._stops[held]):
                raise ValueError(f"messages {first} to {last - 1} are shown, and not all of them are in the file")
            at = last

    def settle(self, codec_of: Callable[[str], Codec]) -> None:
        """Make the values what the record to be stores. Raises DecryptionFailed if a key for that is missing."""
        assert self.origin is not None
        target = codec_of(self.ref.text)
        source = target.of(self.origin.text, self.namespace)
        writers: dict[int, str] = {}

        def settled(name: bytes, value: bytes) -> bytes:
            if name == SEGMENTS:
                for run in message_ranges.parse(value):
                    writers.update(dict.fromkeys(range(run.start, run.stop), run.source))
                # All that is shown is in the file, and kept with this record: nobody else's is looked at.
                return message_ranges.taken_over(value, target.record)
            if not is_value(name):
                return value
            key = codec.decode_key(name)
            data = source.carry(value, key, target)
            hidden = _sealed(value)
            if hidden or name[:2] == REQUEST:
                deadline = field_ttl.split(data)[0]
                text = target.open(data, key)
                if hidden:
                    _check_text(name, text)
                kept = codec.decode(text, key) if name[:2] == REQUEST else [None]
                if len(kept) == 4 and kept[3]:
                    # What the turn did beside, in its user's record, it did there and then.
                    data = field_ttl.wrap(target.encode([*kept[:3], None], key), deadline)
            return data

        def written(data: bytes, writer: str) -> bytes:
            carried = source.of(writer).carry(data, codec.MESSAGE, target)
            if _sealed(data):
                _check_message(target.open(carried, codec.MESSAGE))
            return carried

        # Without its lifetime: a copy that was kept for long would end at once.
        if self.base is not None:
            fields = {name: settled(name, value) for name, value in self.base.fields.items() if name != LIFETIME}
            self.base = replace(self.base, fields=fields)
        for at, entry in enumerate(self.entries):
            ops = [
                op._replace(value=written(op.value, source.record) if op.kind == b"m" else settled(op.name, op.value))
                if op.kind in (b"s", b"m")
                else op
                for op in unpack(entry.data)
                if op.name != LIFETIME
            ]
            self.entries[at] = replace(entry, record=self.ref.text, data=pack(ops))
        self.shared = [(n, written(data, writers.get(n, source.record))) for n, data in self.shared]


async def import_(tiers: Tiers, given: Import) -> str:
    """Insert an exported record into SQL in one transaction; the next access brings it to Redis."""
    try:
        given.settle(tiers.codec_of)
    except CorruptState:
        raise
    except _WRONG as error:
        raise InvalidValue(f"{given.ref.text[:200]}: an encrypted value is none that was written ({error})") from error
    ref = given.ref
    rows = given.entries
    names = tiers.keys.of(ref)
    # Alone: nobody may create the record between the look and the transaction.
    async with tiers.lock(names, wait=10.0, ttl=30.0) as lease:
        entry = await read_path.read(tiers, names, fresh=True)
        if entry.version:
            raise Conflict(f"{ref.text[:200]}: exists already, at version {entry.version}", version=entry.version)
        if lease.lost:
            raise WarmUnavailable(f"{ref.text[:200]}: the lock was lost before the import began; nothing was changed")

        def adopt() -> None:
            tiers.cold.adopt(
                ref.text, partition=names.partition, epoch=entry.epoch, base=given.base,
                base_messages=given.shared, entries=rows,
            )  # fmt: skip

        await tiers.port.sql(adopt)
        # Whoever looked into SQL before, or keeps hot that there is nothing, must look again.
        told = f"{entry.epoch} {given.version} {tiers.replica} -".encode()
        await tiers.warm.commands([(b"DEL", names.hydration), (b"SPUBLISH", names.channel, told)])
        tiers.hot.forget(ref.text)
    return ref.id
