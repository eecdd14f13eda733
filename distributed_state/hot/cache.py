"""The hot tier: records kept in this process. It never goes back in time.

An entry is kept only if it was read after its channel was confirmed; from then on every change arrives on that
channel. Entries answer only while the link proves itself (`good_until`).

What an entry is said to take is what it takes of the process's memory, all that comes with it included; what it keeps
is compact (see `codec.compact`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from distributed_state.errors import CorruptState
from distributed_state.port import Port
from distributed_state.values import codec, field_ttl
from distributed_state.values.codec import Codec
from distributed_state.values.journal import Op, fold
from distributed_state.values.model import DELETED, STATE_FIELDS, TIMED, is_state

MISSING: Any = object()
_KEEP_DECODED = 1024
# Measured, in bytes: an entry with its keys, its channel and who hears that; a field or a message with its place; the
# memo of a value with its name.
_ENTRY = 1200
_PIECE = 150
_MEMO = 150


class CachedRecord:
    """A record at one version. Never changed once made, but for the memo of decoded scalars."""

    __slots__ = (
        "_rest",
        "_whole",
        "codec",
        "epoch",
        "expires",
        "fields",
        "fields_size",
        "messages",
        "size",
        "used",
        "values",
        "version",
    )  # fmt: skip

    def __init__(
        self,
        record_codec: Codec,
        epoch: str,
        version: int,
        fields: dict[bytes, bytes],
        messages: dict[int, bytes],
        fields_size: int = -1,
    ) -> None:
        self.codec = record_codec
        self.epoch = epoch
        self.version = version
        self.fields = fields
        self.messages = messages
        self.values: dict[str, Any] = {}
        self.used = False
        self.fields_size = _size(fields, fields) if fields_size < 0 else fields_size
        self.size = self.fields_size + sum(map(len, messages.values())) + _PIECE * len(messages) + _ENTRY
        # When the first of its fields ends. Only a record that ever had a deadline is searched for them.
        self.expires = field_ttl.NEVER
        if TIMED in fields:
            self.expires = field_ttl.earliest(fields.values())
            self.size += _PIECE * len(fields) + _ENTRY // 2  # for `_rest`
        self._rest: CachedRecord | None = None
        self._whole: CachedRecord | None = None

    @classmethod
    def read(cls, record_codec: Codec, epoch: str, pairs: Sequence[bytes]) -> CachedRecord:
        """From the answer of HGETALL."""
        version = 0
        fields = {}
        messages = {}
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            if is_state(name):
                fields[name] = value
            elif name == b"#v":
                if not value.isdigit():
                    raise CorruptState(f"#v: {len(value)} bytes are not a version", field="#v", data=value)
                version = int(value)
            elif name[:2] == b"#m" and name[2:].isdigit():
                messages[int(name[2:])] = value
        return cls(record_codec, epoch, version, fields, messages)

    @property
    def deleted(self) -> bool:
        return DELETED in self.fields

    def value(self, key: str, default: Any) -> Any:
        """The decoded field. Containers are decoded anew each time, so that no caller can change the entry."""
        data = self.fields.get(codec.encode_key(key))
        if data is None:
            return default
        value = self.codec.decode(data, key)
        small = len(data) <= _KEEP_DECODED and isinstance(value, codec.Scalar) and not field_ttl.marked(data)
        # One wide letter makes every letter of a text wide: that would be more than was counted.
        if small and sys.getsizeof(value) <= len(data) + _MEMO:
            self.values[key] = value
        return value

    def living(self, now: float) -> CachedRecord:
        """The same without the fields whose time is over."""
        if now < self.expires:
            return self
        if self._rest is None:
            fields = {name: data for name, data in self.fields.items() if not field_ttl.over(data, now)}
            rest = CachedRecord(self.codec, self.epoch, self.version, fields, self.messages)
            rest._whole = self
            self._rest = rest
        return self._rest.living(now)

    def raw(self, name: bytes) -> bytes | None:
        """The bytes that are stored for a field, even if its time is over: what a write has to expect."""
        return self.fields.get(name) if self._whole is None else self._whole.raw(name)

    def deadline(self, name: bytes) -> float:
        """When a field ends."""
        return field_ttl.split(self.fields.get(name, b""))[0]

    def all(self) -> dict[str, Any]:
        """Every field of the user's, decoded."""
        pairs = ((codec.decode_key(name), data) for name, data in self.fields.items() if name[:1] != b"#")
        return {key: self.codec.decode(data, key) for key, data in pairs}

    def with_field(self, name: bytes, data: bytes) -> CachedRecord:
        """The same version, if this field were already in it."""
        return CachedRecord(self.codec, self.epoch, self.version, {**self.fields, name: data}, self.messages)

    def after(self, version: int, ops: Iterable[Op], recent: int) -> CachedRecord:
        """The entry that follows this one."""
        fields = dict(self.fields)
        messages = dict(self.messages)
        ops = list(ops)
        fold(fields, ops)
        for kind, name, value in ops:
            if kind == b"m":
                messages[int(name)] = value
            elif kind == b"w":
                messages.clear()
        for number in sorted(messages)[:-recent]:
            del messages[number]
        if any(kind == b"c" for kind, _, _ in ops):
            return CachedRecord(self.codec, self.epoch, version, fields, messages)
        # What did not change is not measured again: a record of many fields would make each small change slow.
        touched = {name for _, name, _ in ops} | STATE_FIELDS
        size = self.fields_size - _size(self.fields, touched) + _size(fields, touched)
        return CachedRecord(self.codec, self.epoch, version, fields, messages, size)


def _size(fields: dict[bytes, bytes], names: Iterable[bytes]) -> int:
    total = 0
    for name in names:
        data = fields.get(name)
        if data is not None:
            size = len(name) + len(data)
            total += size + _PIECE if len(data) > _KEEP_DECODED else 2 * size + _PIECE + _MEMO
    return total


class Flight:
    """A load on its way. What it brings is kept only if nothing newer was heard of meanwhile."""

    __slots__ = ("done", "floor", "keepable", "open", "result")

    def __init__(self, done: Any, keepable: bool, open: bool) -> None:
        self.done = done
        self.keepable = keepable
        self.open = open
        self.floor = ("", 0)
        self.result: CachedRecord | None = None


class Hot:
    """A bounded cache of entries, evicted by SIEVE (Zhang et al., NSDI 2024): hits set one flag and move nothing."""

    def __init__(self, port: Port, *, entries: int, size: int, recent: int, evicted: Callable[[str], None]) -> None:
        self.entries: dict[str, CachedRecord] = {}
        self.good_until = 0.0
        self.hits = self.misses = self.bytes = 0
        self.clock = port.monotonic
        self._port = port
        self._mutex = port.mutex()
        self._most = entries
        self._size = size
        self._recent = recent
        self._evicted = evicted
        self._flights: dict[str, list[Flight]] = {}

    def get(self, text: str) -> CachedRecord | None:
        """The entry, if hot may answer now."""
        entry = self.entries.get(text)
        if entry is None or self.clock() >= self.good_until:
            self.misses += 1
            return None
        entry.used = True
        self.hits += 1
        return entry

    def count(self, hit: bool) -> None:
        """Note whether hot knew what a turn's lease was taken with; the server has confirmed it."""
        self.hits += hit
        self.misses += not hit

    def take_off(self, text: str, *, keepable: bool, alone: bool, private: bool = False) -> tuple[Flight, bool]:
        """Join the flight for this record, or start one; True if it is ours to fly. Nobody joins a `private` one."""
        with self._mutex:
            flights = self._flights.setdefault(text, [])
            joinable = [] if alone else [flight for flight in flights if flight.open]
            if joinable:
                return joinable[-1], False
            flight = Flight(self._port.signal(), keepable, not private)
            flights.append(flight)
            return flight, True

    def land(self, text: str, flight: Flight, entry: CachedRecord | None) -> None:
        """End a flight: keep what it brought if that is still the newest known, and let its followers go on."""
        dropped: list[str] = []
        with self._mutex:
            flights = self._flights[text]
            flights.remove(flight)
            if not flights:
                del self._flights[text]
            epoch, version = flight.floor
            if entry is not None and (entry.version >= version or entry.epoch != epoch):
                flight.result = entry
                present = self.entries.get(text)
                older = present is not None and present.epoch == entry.epoch and present.version >= entry.version
                if flight.keepable and not older and epoch in ("", entry.epoch):
                    dropped = self._put(text, entry)
        flight.done.set()
        for each in dropped:
            self._evicted(each)

    def apply(self, text: str, epoch: str, version: int, ops: Iterable[Op] | None) -> None:
        """A change was heard of: merge the next version, ignore an older one, forget on a gap."""
        dropped: list[str] = []
        with self._mutex:
            for flight in self._flights.get(text, ()):
                newer = flight.floor[0] != epoch or version > flight.floor[1]
                flight.floor = (epoch, version) if newer else flight.floor
            entry = self.entries.get(text)
            if entry is None or (entry.epoch == epoch and version <= entry.version):
                return
            self._drop(text)
            if entry.epoch == epoch and version == entry.version + 1 and ops is not None:
                following = entry.after(version, ops, self._recent)
                following.used = entry.used
                if not following.deleted:
                    dropped = self._put(text, following)
        for each in dropped:
            self._evicted(each)

    def expect(self, text: str, epoch: str, version: int) -> None:
        """The server was seen at this version; an older copy is forgotten, and one on its way is not good enough."""
        self.apply(text, epoch, version, None)

    def forget(self, text: str) -> None:
        """Drop one record; what is in the air is not kept either, nor joined by later readers."""
        with self._mutex:
            self._drop(text)
            for flight in self._flights.get(text, ()):
                flight.keepable = flight.open = False

    def clear(self) -> None:
        """Drop everything; flights in the air are not kept either."""
        with self._mutex:
            self.good_until = 0.0
            self.entries.clear()
            self.bytes = 0
            for flights in self._flights.values():
                for flight in flights:
                    flight.keepable = flight.open = False

    def _put(self, text: str, entry: CachedRecord) -> list[str]:
        """Keep an entry; the texts of those that had to make room for it.

        Entries used since the last look get a second chance at the young end.
        """
        self._drop(text)
        self.entries[text] = entry
        self.bytes += entry.size
        dropped = []
        while len(self.entries) > self._most or self.bytes > self._size:
            oldest = next(iter(self.entries))
            candidate = self.entries[oldest]
            if candidate.used and len(self.entries) > 1:
                candidate.used = False
                self.entries[oldest] = self.entries.pop(oldest)
            else:
                self._drop(oldest)
                dropped.append(oldest)
        return dropped

    def _drop(self, text: str) -> None:
        entry = self.entries.pop(text, None)
        if entry is not None:
            self.bytes -= entry.size
