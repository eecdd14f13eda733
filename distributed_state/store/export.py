"""Exports a record as lines of JSON.

Law: stored bytes are unchanged, written as text if they are UTF-8, else as base64.

A value is a string, or an object `{"base64": "..."}`: users' data is always inside a string.

The first line counts the lines that follow, so that a truncated file is detected. The history is therefore read twice:
first for the counts, without contents of messages and items, and then page by page. For a record of any length, memory
holds only the counts, the items whose change a purge or a fork removed, and one branch.

Design: section 11.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from distributed_state.cold.engine import chunks
from distributed_state.cold.record_items import OlderItem
from distributed_state.cold.store import ColdStore
from distributed_state.errors import NotFound, StateError
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import as_text, message_ranges
from distributed_state.values.journal import JournalEntry, Segment, unpack
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import ITEMS, SEGMENTS, Ref, unescape

FORMAT = "distributed_state/1"
PAGE = 2**18  # bytes of changes or messages that are read at once; a larger one is read by itself
_TOGETHER = 200  # changes, messages or items that are read at once, if they are small
_COUNTED = 500  # changes that are counted at once, without their contents


class Export:
    """A record's lines, in pages: header, state before the first kept change, messages, items, changes, branches.

    Changes after its start are left out. If exported parts are erased or purged meanwhile, it ends with an error.
    """

    def __init__(self, tiers: Tiers, keys: RecordKeys) -> None:
        self._tiers = tiers
        self._names = keys
        self._rest = _parts(tiers.cold, keys.ref)

    async def begin(self) -> list[str]:
        """The first lines. Raises NotFound if the record never existed."""
        await read_path.reach(self._tiers, self._names)
        return await self.following()

    async def following(self) -> list[str]:
        """The next lines, [] after the last one."""
        # A generator that failed looks exhausted, so an export that ended with an error returns no further lines.
        return await self._tiers.port.sql(next, self._rest, [])


async def export(tiers: Tiers, keys: RecordKeys) -> list[str]:
    """All of the record's lines."""
    reading = Export(tiers, keys)
    found: list[str] = []
    some = await reading.begin()
    while some:
        found += some
        some = await reading.following()
    return found


@dataclass(slots=True)
class _Outline:
    """The contents of a file; `base` is the version of its first state (0: it begins with the first change).

    `runs` are the messages that its states show, `own` the messages that its changes append, and `back` maps a version
    that restores items to the version that it restores.
    """

    base: int = 0
    changes: int = 0
    runs: dict[Segment, None] = field(default_factory=dict)
    own: list[Segment] = field(default_factory=list)
    back: dict[int, int] = field(default_factory=dict)

    def take(self, text: str, entry: JournalEntry) -> None:
        """Note a change's contents."""
        self.changes += 1
        for kind, name, value in unpack(entry.data):
            if kind == b"m":
                self._appended(text, int(name))
            elif kind == b"s" and name == SEGMENTS:
                self.runs |= dict.fromkeys(message_ranges.segments(text, {SEGMENTS: value}))
            elif kind == b"s" and name == ITEMS and b" " in value:
                self.back[entry.version] = int(value.split()[1])

    def _appended(self, text: str, number: int) -> None:
        start = number
        if self.own and self.own[-1].stop == number:
            start = self.own.pop().start
        self.own.append(Segment(text, start, number + 1))

    def appends(self, number: int) -> bool:
        """Whether a change in the file appends this message."""
        return any(run.start <= number < run.stop for run in self.own)


def _outlined(cold: ColdStore, text: str, version: int) -> _Outline:
    """The contents of a file of the record up to this version."""
    found = _Outline()
    at = 0
    for entry in chain.from_iterable(_pages(cold.outlines, text, 0, version, _COUNTED)):
        if at and entry.version != at + 1:
            # The versions in a file have no gaps: it begins with the state after the last gap.
            found = _Outline(base=entry.version)
        elif not at and entry.version != 1:
            found = _Outline(base=cold.oldest(text))
        at = entry.version
        if at > found.base:
            found.take(text, entry)
    return found if at else _Outline(base=cold.oldest(text))


def _parts(cold: ColdStore, ref: Ref) -> Iterator[list[str]]:
    text = ref.text
    version = cold.version(text)
    branches = cold.branches.of(text)
    if version is None and not branches:
        raise NotFound(f"{text[:200]}: there is nothing to export")
    outline = _Outline() if version is None else _outlined(cold, text, version)
    base = cold.state_at(text, outline.base) if outline.base else None
    if base is not None:
        outline.runs |= dict.fromkeys(message_ranges.segments(text, base.fields))
    items = [] if version is None else cold.older_items(text, outline.base, outline.back)
    counts = {
        "messages": sum(map(len, _shared(cold, text, outline))), "items": len(items), "changes": outline.changes,
    }  # fmt: skip
    head = {"format": FORMAT, "namespace": cold.namespace, "scope": ref.scope, "id": ref.id, "version": version or 0}
    yield _lines([head | counts])
    if base is not None:
        fields = {_text(name): _value(value) for name, value in base.fields.items()}
        yield _lines([{"base": base.version, "epoch": base.epoch, "fields": fields}])
    for some in _shared(cold, text, outline):
        counts["messages"] -= len(some)
        yield _lines({"message": number, "data": _value(data)} for number, data in some)
    for older in chunks(items, _TOGETHER):
        yield _lines(map(_item, older))
    for entries in _pages(cold.history, text, outline.base, version or 0, _TOGETHER):
        counts["changes"] -= len(entries)
        yield _lines(map(_change, entries))
    if counts["messages"] or counts["changes"]:
        raise StateError(f"{text[:200]}: a part of it was removed while it was exported: export it again")
    for branch in branches:
        of = {"branch": branch.id, "base": branch.base, "cause": branch.cause}
        for entries in chunks(cold.branches.entries(text, branch.id), _TOGETHER):
            yield _lines(of | _change(entry) for entry in entries)


def _pages(
    read: Callable[..., list[JournalEntry]], text: str, after: int, version: int, limit: int
) -> Iterator[list[JournalEntry]]:
    """The changes after a version up to another one, in pages of limited number and bytes."""
    while entries := read(text, after=after, before=version + 1, limit=limit, most=PAGE):
        yield entries
        after = entries[-1].version


def _shared(cold: ColdStore, text: str, outline: _Outline) -> Iterator[list[tuple[int, bytes]]]:
    """The messages that states in the file show and no change in it appends, in the order of their numbers."""
    runs = sorted(message_ranges.without(outline.runs, outline.own), key=lambda run: run.start)
    at = 0
    while runs := message_ranges.between(runs, at - 1, None):
        first = min(run.start for run in runs)
        at = _end(cold.message_lengths(text, message_ranges.between(runs, first - 1, first + _TOGETHER)), first)
        found = cold.messages(text, message_ranges.between(runs, first - 1, at))
        if some := [(number, data) for number, data in sorted(found.items()) if not outline.appends(number)]:
            yield some


def _end(lengths: dict[int, int], first: int) -> int:
    """The number that ends a page of messages: the page is full, or holds one large message."""
    size = 0
    for number in sorted(lengths):
        if size and size + lengths[number] > PAGE:
            return number
        size += lengths[number]
    return first + _TOGETHER


def _item(item: OlderItem) -> dict[str, Any]:
    return {"item": _text(item.name), "at": item.at, "origin": item.origin, "data": _value(item.data)}


def _change(entry: JournalEntry) -> dict[str, Any]:
    # Without the change's events: they are numbered in this store's stream.
    operations = (op for op in unpack(entry.data) if op.kind != b"e")
    ops = [[kind.decode(), _text(name), _value(value)] for kind, name, value in operations]
    return {
        "version": entry.version, "time_ms": entry.time_ms, "kind": entry.kind, "actor": unescape(entry.actor),
        "token": entry.token, "event": entry.event, "ops": ops,
    }  # fmt: skip


def _lines(rows: Iterable[dict[str, Any]]) -> list[str]:
    return [json.dumps(row, separators=(",", ":")) for row in rows]


def _value(data: bytes) -> str | dict[str, str]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": as_text.text_of(data)}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
