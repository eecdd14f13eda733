"""A cached record: one version, which never changes. Law: its memory is counted.

The count covers all memory that the process uses for the record, which is compact (`tiers/changes.py`). No object in an
entry refers to the entry: hot removes it from the garbage collector's list, so a cycle would never be freed.

Design: section 7.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping, Sequence
from gc import is_tracked
from typing import Any

from distributed_state.errors import CorruptState
from distributed_state.values import codec, field_ttl
from distributed_state.values.codec import Codec
from distributed_state.values.journal import Operation, fold
from distributed_state.values.levels import UNSUBSCRIBED
from distributed_state.values.model import DELETED, NEXT, SEGMENTS, START, TIMED, Expiry, is_state

# Accessed by index, which makes a separate function object: setting argtypes of the shared attribute would affect
# others.
_untrack = ctypes.pythonapi["PyObject_GC_UnTrack"]
_untrack.argtypes = (ctypes.py_object,)
_untrack.restype = None


def untrack(*objects: object) -> None:
    """Remove objects from the garbage collector's list; they must not be part of a cycle."""
    for each in objects:
        # Checked first: for an object that is never tracked, such as bytes, the call would write outside its memory.
        if is_tracked(each):
            _untrack(each)


MISSING: Any = object()
_KEEP_DECODED = 1024
_FIXED = (*codec.Scalar, bytes)  # immutable
_DICTS_ARE_TRACKED = sys.version_info >= (3, 14)  # before 3.14, dicts of only bytes and numbers are not tracked
# Measured, in bytes: an entry with its keys, its channel and the listener; a field or a message with its slot; a
# decoded value that is kept, with its name.
_ENTRY = 1200
_PIECE = 150
_MEMO = 150


class CachedRecord:
    """A record at one version. Immutable, except for the memo of decoded scalars and its freshness."""

    __slots__ = (
        "_rest",
        "_stored",
        "codec",
        "epoch",
        "expires",
        "fields",
        "fields_size",
        "freshness",
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
        self.freshness = UNSUBSCRIBED
        self.fields_size = _size(fields, fields) if fields_size < 0 else fields_size
        self.size = self.fields_size + _ENTRY
        if messages:
            self.size += sum(map(len, messages.values())) + _PIECE * len(messages)
        # The time at which the first field expires. Fields are searched only if the record ever had a deadline.
        self.expires = field_ttl.NEVER
        if TIMED in fields:
            self.expires = field_ttl.earliest(fields.values())
            self.size += _PIECE * len(fields) + _ENTRY // 2  # for `_rest`
        self._rest: CachedRecord | None = None
        self._stored = fields  # including expired ones

    @classmethod
    def read(cls, record_codec: Codec, epoch: str, pairs: Sequence[bytes]) -> CachedRecord:
        """Build an entry from the answer of HGETALL."""
        version = 0
        fields = {}
        messages = {}
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            # Messages first: a long conversation has more of them than of anything else.
            if name[:2] == b"#m" and (number := name[2:]).isdigit():
                messages[int(number)] = value
            elif is_state(name):
                fields[name] = value
            elif name == b"#v":
                if not value.isdigit():
                    raise CorruptState(f"#v: {len(value)} bytes are not a version", field="#v", data=value)
                version = int(value)
        return cls(record_codec, epoch, version, fields, messages)

    @property
    def deleted(self) -> bool:
        """Whether this is a tombstone."""
        return DELETED in self.fields

    @property
    def expiry(self) -> Expiry | None:
        """Why and when it expired; None if it is live or was deleted on request."""
        return Expiry.read(self.fields.get(DELETED))

    def value(self, key: str, default: Any) -> Any:
        """The decoded field. Containers are decoded each time, so that callers cannot change the entry."""
        data = self.fields.get(codec.encode_key(key))
        if data is None:
            return default
        value = self.codec.decode(data, key)
        small = len(data) <= _KEEP_DECODED and isinstance(value, _FIXED) and not field_ttl.marked(data)
        # One wide character makes all characters of a text wide, which would take more memory than was counted.
        if small and sys.getsizeof(value) <= len(data) + _MEMO:
            self.values[key] = value
        return value

    def living(self, now: float) -> CachedRecord:
        """The same record without expired fields."""
        if now < self.expires:
            return self
        if self._rest is None:
            fields = {name: data for name, data in self.fields.items() if not field_ttl.over(data, now)}
            rest = CachedRecord(self.codec, self.epoch, self.version, fields, self.messages)
            # The record itself is not stored here, because that would make a cycle.
            rest._stored = self._stored
            self._rest = rest
        return self._rest.living(now)

    @property
    def all_stored(self) -> Mapping[bytes, bytes]:
        """All fields as they are stored, including expired ones."""
        return self._stored

    def raw(self, name: bytes) -> bytes | None:
        """The stored bytes of a field, even if it has expired: a write has to expect these bytes."""
        return self._stored.get(name)

    def untrack(self) -> None:
        """Remove the entry from the garbage collector's list: it holds only bytes, numbers, its codec and freshness."""
        untrack(self, self.codec)
        if _DICTS_ARE_TRACKED:
            untrack(self.fields, self.messages, self.values)

    def deadline(self, name: bytes) -> float:
        """When a field expires."""
        return field_ttl.split(self.fields.get(name, b""))[0]

    def all(self) -> dict[str, Any]:
        """All of the user's fields, decoded."""
        pairs = ((codec.decode_key(name), data) for name, data in self.fields.items() if name[:1] != b"#")
        return {key: self.codec.decode(data, key) for key, data in pairs}

    def with_field(self, name: bytes, data: bytes) -> CachedRecord:
        """The same version of the record with this field added."""
        return CachedRecord(self.codec, self.epoch, self.version, {**self.fields, name: data}, self.messages)

    def after(self, version: int, operations: Sequence[Operation], recent: int) -> CachedRecord:
        """The entry for the next version."""
        fields = self.fields.copy()
        fold(fields, operations)
        messages = self.messages
        touched = set[bytes]()
        for kind, name, value in operations:
            if kind == b"s" or kind == b"d":
                touched.add(name)
            elif kind == b"m":
                touched.add(NEXT)
                messages = messages.copy() if messages is self.messages else messages
                messages[int(name)] = value
            elif kind == b"w":
                touched.update((START, SEGMENTS))
                messages = {}
            elif kind == b"c":
                touched.update(self.fields)
        if len(messages) > recent:
            messages = {number: messages[number] for number in sorted(messages)[-recent:]}
        # Only the changes are measured; otherwise each small change of a record with many fields would be slow.
        size = self.fields_size
        if touched:
            size += _size(fields, touched) - _size(self.fields, touched)
        return CachedRecord(self.codec, self.epoch, version, fields, messages, size)


def _size(fields: dict[bytes, bytes], names: Iterable[bytes]) -> int:
    total = 0
    for name in names:
        data = fields.get(name)
        if data is not None:
            size = len(name) + len(data)
            total += size + _PIECE if len(data) > _KEEP_DECODED else 2 * size + _PIECE + _MEMO
    return total
