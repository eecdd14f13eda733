"""What a single value of an exported file may be. Law: nothing in it is believed; it must be what a write stores.

Design: section 11.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from distributed_state.errors import CorruptState, TooLarge
from distributed_state.values import bytes_as_text, codec, field_ttl
from distributed_state.values.journal import item_of
from distributed_state.values.model import (
    DELETED,
    INITIALIZED,
    ITEMS,
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
    TAG,
    TIMED,
    Ref,
    checked_phase,
    escape,
    unescape,
)
from distributed_state.values.tags import tag_of

MOST = 10**15  # versions and numbers of messages are doubles in Lua, exact up to here
LATEST_MS = 253_402_300_799_999  # the year 9999: no later time can be shown
LONGEST = 2048  # a reserved field's name or text
WRONG = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, CorruptState)


def raw(text: Any) -> bytes:
    """A text of the file as the bytes that it stands for."""
    if not isinstance(text, str):
        raise ValueError(f"{type(text).__name__} where a string belongs")
    return text.encode("utf-8", "surrogateescape")


def raw_value(given: Any) -> bytes:
    """A value of the file as it was stored: a text, or an object that holds it in base64."""
    if isinstance(given, dict) and given.keys() == {"base64"}:
        return bytes_as_text.bytes_of(given["base64"], "base64")
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
    """Return a record of any scope. Raises InvalidValue for a scope that does not exist."""
    ref = Ref.parse(text)
    if ref.text != text:
        raise ValueError(f"{text!r:.80} is not the text of a record")
    return ref


def runs_of(value: bytes) -> list[tuple[str, int, int]]:
    """What `#segments` holds, in order and without gaps of its own making."""
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
    """What the store keeps of its own in a state."""
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
            raise ValueError(f"#items is {value!r:.80}: what comes later lies below what came before")
        digits(name, since)
    elif name == LIFETIME:
        idle, _, until = value.partition(b" ")
        digits(name, idle), digits(name, until)
    elif (name in (DELETED, TIMED) or name[:2] == TAG) and value != b"1":
        raise ValueError(f"{name.decode()} is {value!r:.80}, not 1")


def check_text(name: bytes, text: bytes) -> None:
    """What users said, as it is before it is sealed: it must be what a write would have taken."""
    key = codec.decode_key(name)
    value = codec.decode_value(text, key)
    codec.encode_value(value, key)
    if name == SUMMARY:
        if not isinstance(value["text"], str) or type(value["start"]) is not int or type(value["stop"]) is not int:
            raise ValueError("#summary is none")
    elif name[:2] == REQUEST and not (isinstance(value, list) and len(value) in (1, 4) and type(value[0]) is int):
        raise ValueError(f"{key!r:.80} is not what a request came to")


def check_message(text: bytes, name: str = "message") -> None:
    """A message that users wrote: it must be what a write would have taken."""
    codec.encode_message(codec.as_message(codec.decode(text, name), name), name)


def check_item(name: bytes, data: bytes, most: int) -> None:
    """An item's name, and its value if it is not deleted."""
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


def step_of(step: Any) -> tuple[bytes, bytes, bytes]:
    """One step of a change."""
    if not isinstance(step, list) or step[0] not in ("s", "d", "c", "m", "w", "l", "p", "q"):
        raise ValueError(f"step {step!r:.80} is unknown")
    kind, name, value = step
    return raw(kind), raw(name), raw_value(value)
