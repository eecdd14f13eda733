"""The items that Redis has of a record. Law: what is not said to be absent is to be looked for in SQL.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distributed_state.values.keys import RecordKeys
from distributed_state.warm.answers import Cold, Uninitialised
from distributed_state.warm.client import Warm
from distributed_state.warm.scripts import ITEMS, LIST_ITEMS


class Held(NamedTuple):
    """An item as Redis has it: the version at which it was put, and its frame; an empty one of a deleted item."""

    version: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class Window:
    """What Redis knows of items at a version of the record; `since`: of the layer that is open, 0: it never had any."""

    epoch: str
    version: int
    since: int


@dataclass(frozen=True, slots=True)
class Known(Window):
    """Items by name, None if there is none; those that are missing are in SQL, or nowhere."""

    items: dict[bytes, Held | None]


@dataclass(frozen=True, slots=True)
class Listed(Window):
    """The items of a collection that Redis has in a range, in order, deleted ones too.

    `whole`: SQL knows no others up to the last. `more`: there are more here, behind the last.
    """

    whole: bool
    more: bool
    items: dict[bytes, Held]


def _held(text: bytes) -> Held:
    version, _, frame = text.partition(b" ")
    return Held(int(version), frame)


async def read(warm: Warm, names: RecordKeys, wanted: Sequence[bytes]) -> Known | Cold | Uninitialised:
    """Items by name: collection, NUL, key."""
    answer = await warm.script(ITEMS, [names.record, names.items, names.meta], [warm.ttl_ms, *wanted])
    if answer[0] != b"ok":
        return _absent(answer)
    _, epoch, version, since, *items = answer
    found = {
        name: None if item == b"-" else _held(item) for name, item in zip(wanted, items, strict=True) if item != b""
    }
    return Known(epoch.decode(), int(version), int(since or 0), found)


async def listed(
    warm: Warm,
    names: RecordKeys,
    collection: bytes,
    prefix: bytes,
    after: bytes | None,
    before: bytes | None,
    *,
    reverse: bool,
    limit: int,
    size: int,
) -> Listed | Cold | Uninitialised:
    """The first of a range of keys, so many at most and of so many bytes."""
    bounds = [b"" if bound is None else b"=" + bound for bound in (after, before)]
    arguments = [warm.ttl_ms, collection, prefix, *bounds, b"1" if reverse else b"", limit, size]
    answer = await warm.script(LIST_ITEMS, [names.record, names.items, names.meta], arguments)
    if answer[0] != b"ok":
        return _absent(answer)
    _, epoch, version, since, whole, more, *pairs = answer
    items = {key: _held(text) for key, text in zip(pairs[::2], pairs[1::2], strict=True)}
    return Listed(epoch.decode(), int(version), int(since or 0), whole == b"1", more == b"1", items)


def _absent(answer: list[Any]) -> Cold | Uninitialised:
    return Cold(answer[1].decode(), "") if answer[0] == b"cold" else Uninitialised()
