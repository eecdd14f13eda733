"""Values <-> bytes. Law: a value is read back equal to the written value, or it is refused.

A value is JSON text, or bytes after one byte 0x02, which never begins JSON. orjson writes and reads JSON. Values that
it cannot hold exactly (integers beyond 64 bits, lone surrogates) are written by `json` after one leading space, which
is still JSON and makes the reader use `json` too. A value of a subclass (a StrEnum, a Counter) and a numpy scalar are
written as the plain value that they equal.

Design: section 4.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any

import orjson
from pydantic import BaseModel, ValidationError

from distributed_state.errors import CorruptState, DecryptionFailed, InvalidValue, TooLarge
from distributed_state.values import field_ttl
from distributed_state.values.model import Message, has_pair, is_input, refuse_pair

_OPTIONS = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS
_CONSTANTS = {None: b"null", True: b"true", False: b"false"}
_LARGEST = 10**4300  # sys.int_info.default_max_str_digits
SEALED = b"\x01"  # the first byte of encrypted values; JSON never begins with it
BYTES = b"\x02"  # the first byte of values that are bytes, not JSON
_FRAMED = (SEALED, b"!")
MESSAGE = "#message"  # the name of every message; names of fields never begin with #
EVENT = "#event "  # the prefix of the name of an event's data
OUTPUT = "#output "  # the prefix of the name of chunks that a turn streams
ITEM = "#item "  # the prefix of the name of an item
Scalar = (str, int, float, bool, type(None))
_ADVICE: tuple[tuple[type | tuple[type, ...], str], ...] = (
    ((tuple, set, frozenset), "use a list"),
    (bytes, "bytes stand alone, as the value of a field"),
    (bytearray, "use bytes"),
    (Enum, "use its .value"),
    (Decimal, "use str() to keep it exact, or float()"),
    ((date, time), "use .isoformat(), or .timestamp() of a datetime"),
    (timedelta, "use .total_seconds()"),
    (BaseModel, 'use .model_dump(mode="json"), or schema= for a whole record'),
)


def encode(value: Any, name: str = "value") -> bytes:
    """JSON text of a value. Raises InvalidValue naming the path to a part that JSON cannot hold."""
    kind = type(value)
    if kind is bool or value is None:
        return _CONSTANTS[value]
    if kind is int:
        return b"%d" % value if -(2**63) <= value < 2**64 else _encode_exactly(value, name)
    if kind is float and not math.isfinite(value):
        raise InvalidValue(f"{_shown(name)}: {value!r} is not a JSON number")
    try:
        data = orjson.dumps(value, option=_OPTIONS)
        # orjson writes NaN as null, tuples as lists and enums as their values; only reading the result reveals it.
        if kind is str or kind is float or orjson.loads(data) == value:
            return data
    except (TypeError, orjson.JSONDecodeError, RecursionError):
        pass
    return _encode_exactly(value, name)


def encode_value(value: Any, name: str = "value") -> bytes:
    """The stored form of a field's or an item's value: JSON text, or framed `bytes`."""
    return BYTES + value if isinstance(value, bytes) else encode(value, name)


def _encode_exactly(value: Any, name: str) -> bytes:
    if (complaint := _complaint(value)) is not None:
        raise InvalidValue(_shown(name) + complaint)
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), default=_without_numpy)
    plain = json.loads(text)
    if plain != value:
        raise InvalidValue(f"{_shown(name)}: does not survive JSON unchanged")
    try:
        # A subclass, as a StrEnum or a Counter, is stored as its plain value is: conditions compare the stored bytes.
        data = orjson.dumps(plain, option=_OPTIONS)
        if orjson.loads(data) == plain:
            return data
    except (TypeError, orjson.JSONDecodeError):
        pass
    return b" " + text.encode()


def _without_numpy(value: Any) -> Any:
    """The plain value of a numpy scalar; other values as they are. Without an import of numpy."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value


def _shown(name: str) -> str:
    return name[1:].replace("\0", " ") if name.startswith(ITEM) else name


def _complaint(value: Any) -> str | None:
    """Find the first place that JSON cannot hold, and describe it, as a suffix to the value's name."""
    open_containers: set[int] = set()

    def search(value: Any, path: str, depth: int) -> str | None:
        if depth > 200:
            return f"{path}: nested more than 200 levels deep"
        value = _without_numpy(value)
        if isinstance(value, float) and not math.isfinite(value):
            return f"{path}: {value!r} is not a JSON number"
        if isinstance(value, (dict, list)):
            if id(value) in open_containers:
                return f"{path}: contains itself"
            open_containers.add(id(value))
            pairs: Any = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in pairs:
                if isinstance(value, dict) and not isinstance(key, str):
                    return f"{path}: the key {key!r} is {_a(key)}, JSON has only str"
                place = f"{path}[{key!r}]"
                found = search(key, place, depth) or search(item, place, depth + 1)
                if found:
                    return found
            open_containers.discard(id(value))
        elif isinstance(value, str) and has_pair(value):
            return f"{path}: two surrogates in a row, which JSON reads back as one character"
        elif isinstance(value, int) and abs(value) >= _LARGEST:
            return f"{path}: an integer of more than 4300 digits, which Python does not read back"
        elif not isinstance(value, Scalar):
            return f"{path}: {_a(value)} is not a JSON value{_advice(value)}"
        return None

    return search(value, "", 0)


def _advice(value: Any) -> str:
    """The suffix of a complaint that names a replacement for a value that JSON cannot hold."""
    if is_dataclass(value) and not isinstance(value, type):
        return "; use dataclasses.asdict(), or schema= for a whole record"
    if type(value).__name__ == "UUID":  # `uuid` makes ids by chance, so nothing but the port imports it
        return "; use str()"
    if hasattr(value, "tolist"):
        return "; use .tolist()"
    return next((f"; {text}" for kinds, text in _ADVICE if isinstance(value, kinds)), "")


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"


def decode(data: bytes, name: str = "value") -> Any:
    """Undo `encode`. Raises CorruptState with the bytes if they are not JSON."""
    try:
        if data[:1] == b" ":
            return json.loads(data)
        return orjson.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptState(f"{name}: {len(data)} stored bytes are not JSON", field=name, data=data) from error


def decode_value(data: bytes, name: str = "value") -> Any:
    """Undo `encode_value`."""
    return data[1:] if data[:1] == BYTES else decode(data, name)


def encode_key(key: str, limit: int = 1024) -> bytes:
    """The bytes of a field name, which has at least one character. Names that begin with '#' are reserved."""
    if not isinstance(key, str):
        raise InvalidValue(f"a field name must be a str, not {_a(key)}: {key!r}")
    if not key:
        raise InvalidValue("a field's name cannot be empty")
    if key[0] == "#":
        raise InvalidValue(f"field {key!r}: names that begin with '#' are reserved")
    if not key.isascii():
        refuse_pair(key, "field")
    data = key.encode("utf-8", "surrogatepass")
    if len(data) > limit:
        raise TooLarge(f"a field name of {len(data)} bytes is longer than {limit}")
    return data


def decode_key(data: bytes) -> str:
    """The field name of these bytes."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise CorruptState(f"a field name of {len(data)} bytes is not UTF-8", field=repr(data), data=data) from error


def encode_message(message: Message | dict[str, Any], name: str = "message") -> bytes:
    """JSON text of a message; a dict is checked first."""
    if not isinstance(message, Message):
        message = as_message(message, name)
    return encode(message.to_dict(), name)


def as_message(fields: dict[str, Any], name: str = "message") -> Message:
    """A message from its fields. Raises InvalidValue naming the wrong one."""
    try:
        return Message.model_validate(fields)
    except ValidationError as error:
        refusal = refused(error, name)
    raise refusal  # outside the `except`: pydantic's error holds the input, and would be its context


def refused(error: ValidationError, name: str) -> InvalidValue:
    """Convert pydantic's first error to ours, with the place inside `name`."""
    first = error.errors(include_url=False, include_input=False)[0]
    return InvalidValue(f"{'.'.join((name, *map(str, first['loc'])))}: {first['msg']}")


def checked_merge(key: Any, values: Any) -> Mapping[str, Any]:
    """The values that `update` merges into the object at `key`. Raises InvalidValue."""
    if isinstance(key, Mapping):
        raise InvalidValue("update(key, values) merges values into one field; set_many(values) sets several fields")
    if not isinstance(values, Mapping):
        raise InvalidValue(f"{key!r:.80}: update takes a mapping, not {type(values).__name__}")
    return values


def said(text: bytes) -> dict[str, Any]:
    """The fields of a message from its JSON text. Raises CorruptState."""
    fields = decode(text, "message")
    if type(fields) is dict and ("role" in fields or "type" in fields):
        return fields  # checked when it was written
    found = "no role and no type" if type(fields) is dict else _a(fields)
    complaint = f"message: {len(text)} stored bytes are not a message: {found}"
    raise CorruptState(complaint, field="message", data=text)


def key_id(data: bytes) -> str:
    """The id of the key that these stored bytes were encrypted with, '' if they are plain."""
    data = field_ttl.split(data)[1]
    return data[2 : 2 + data[1]].decode("ascii", "replace") if data[:1] == SEALED and len(data) > 1 else ""


def place_of(field: bytes) -> str:
    """The name under which a stored field is encrypted. An input has its number only once it is stored."""
    return MESSAGE if is_input(field) else decode_key(field)


def event_name(type: str, id: str) -> str:
    """The name under which an event's data is encrypted."""
    return f"{EVENT}{type} {id.rpartition('.')[0]}"


def item_name(name: bytes) -> str:
    """The name under which an item is encrypted, from its name in the journal; the names are unique."""
    return ITEM + name.decode("utf-8", "surrogateescape")


class Codec:
    """Writes and reads the values of one record: plain here, encrypted in `encryption`.

    `name` is the field's name, MESSAGE, or an event's (see `event_name`), whose record is the event's subject.
    """

    __slots__ = ("namespace", "record")
    seals = False  # whether anything is encrypted

    def __init__(self, namespace: str, record: str) -> None:
        self.namespace = namespace
        self.record = record

    def of(self, record: str, namespace: str | None = None) -> Codec:
        """The codec of another record of the same store."""
        return Codec(namespace or self.namespace, record)

    def covers(self, name: str) -> bool:
        """Whether values under this name are never stored as plain JSON."""
        return False

    def seal(self, text: bytes, name: str) -> bytes:
        """Convert JSON text or framed bytes to the stored form."""
        return text

    def open(self, data: bytes, name: str) -> bytes:
        """JSON text or framed bytes of a stored value, with or without a deadline. Raises DecryptionFailed."""
        if data[:1] not in _FRAMED:
            return data
        text = field_ttl.split(data)[1]
        if text[:1] == SEALED:
            raise self.failed(text, name, "and this store has no keys")
        return text

    def seal_event(self, text: bytes, type: str, writer: str) -> bytes:
        """The stored form of an event's data. `writer` is its id without the last part, which the server counts."""
        return self.seal(text, f"{EVENT}{type} {writer}")

    def open_event(self, data: bytes, type: str, id: str) -> bytes:
        """JSON text of an event's data. Raises DecryptionFailed."""
        return self.open(data, event_name(type, id))

    def stale(self, data: bytes, name: str) -> bool:
        """Whether these bytes would be written in another form now."""
        return False

    def carry(self, data: bytes, name: str, to: Codec) -> bytes:
        """Convert stored bytes to those that `to` stores. Raises DecryptionFailed."""
        same = (self.namespace, self.record) == (to.namespace, to.record)
        return data if same else field_ttl.mark(data) + self.open(data, name)

    def failed(self, data: bytes, name: str, why: str) -> DecryptionFailed:
        """The error for stored bytes that cannot be opened."""
        key = key_id(data)
        what = "a message" if name == MESSAGE else f"field {name!r:.80}"
        what = what if name[:2] != "#q" else "the outcome of a turn"
        what = what if not name.startswith(EVENT) else f"an event of type {name.split()[1]}"
        how = f"is encrypted with key {key!r}" if field_ttl.split(data)[1][:1] == SEALED else "is not encrypted"
        text = f"{self.record[:200]}: {what} {how} {why}"
        return DecryptionFailed(text, record=self.record, field=name, key=key)

    def text(self, value: Any, key: str) -> bytes:
        """A field's value before encryption. Raises InvalidValue."""
        return encode_value(value, key)

    def encode(self, value: Any, key: str) -> bytes:
        """The stored bytes of a field's value."""
        return encode_value(value, key)

    def decode(self, data: bytes, key: str) -> Any:
        """The value of a field from its stored bytes."""
        return decode_value(self.open(data, key), key)

    def encode_message(self, message: Message | dict[str, Any]) -> bytes:
        """The stored bytes of a message."""
        return self.seal(encode_message(message), MESSAGE)

    def decode_message(self, data: bytes, source: str, number: int | None = None) -> Message:
        """A message from its stored bytes; `source` is the record that it was appended to."""
        return Message.unread(self.written_to(source).read_message, [data], [number])[0].looked_at()

    def written_to(self, source: str) -> Codec:
        """The codec of the record that a visible message was appended to."""
        return self if source == self.record else self.of(source)

    def read_message(self, data: bytes, number: int | None) -> tuple[dict[str, Any], float | None]:
        """The fields of a stored message of this record, and its commit time."""
        time, text = field_ttl.split(data)
        try:
            fields = said(self.open(text, MESSAGE))
        except DecryptionFailed:
            raise
        except CorruptState as error:
            # The message may be decoded long after it was requested, so the error says which one it is.
            which = "" if number is None else f"message {number}: "
            complaint = f"{self.record[:200]}: {which}{error}"
            raise CorruptState(complaint, field=error.field, data=text) from error.__cause__
        return fields, None if time == field_ttl.NEVER else time


def check_containers(mappings: Mapping[str, Any], several: Mapping[str, Any]) -> None:
    """Raise InvalidValue for an argument that is not a mapping, or not a list; None stands for an absent mapping."""
    for name, given in mappings.items():
        if given is not None and not isinstance(given, Mapping):
            raise InvalidValue(f"{name} takes a mapping, as {{'name': ...}}, not {given!r:.80}")
    for name, given in several.items():
        if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
            raise InvalidValue(f"{name} takes several, as [...], not {given!r:.80}")
