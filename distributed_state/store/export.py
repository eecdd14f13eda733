"""A record as lines of JSON. Law: stored bytes travel whole, as the text that they are, or as base64 if they are none.

A value is a string, or an object `{"base64": "..."}`: what users wrote is always inside a string.

Design: section 11.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from distributed_state.errors import NotFound
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import bytes_as_text, message_ranges
from distributed_state.values.journal import JournalEntry, Segment, State, unpack
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import ITEMS, SEGMENTS, Ref, unescape

FORMAT = "distributed_state/1"


async def export(tiers: Tiers, names: RecordKeys) -> list[str]:
    """The record as lines: header, state before the first kept change, messages, items, changes; branches."""
    await write_path.reach(tiers, names)
    return await tiers.port.sql(_export, tiers, names.ref)


def _export(tiers: Tiers, ref: Ref) -> list[str]:
    cold = tiers.cold
    text = ref.text
    version = cold.version(text)
    branches = cold.branches.of(text)
    if version is None and not branches:
        raise NotFound(f"{text[:200]}: there is nothing to export")
    entries = cold.history(text)
    # A file has no gaps: it begins with the state behind the last one.
    behind = [later.version for entry, later in pairwise(entries) if later.version != entry.version + 1]
    whole = version is None or (entries and entries[0].version == 1 and not behind)
    base = None if whole else cold.state_at(text, behind[-1] if behind else cold.oldest(text))
    if base is not None:
        entries = [entry for entry in entries if entry.version > base.version]
    runs, own, back = _named(text, base, entries)
    shared = {number: data for number, data in cold.messages(text, runs).items() if number not in own}
    head = {"format": FORMAT, "namespace": cold.namespace, "scope": ref.scope, "id": ref.id, "version": version or 0}
    items = cold.older_items(text, base.version if base else 0, back) if version else []
    lines: list[dict[str, Any]] = [head | {"messages": len(shared), "items": len(items), "changes": len(entries)}]
    if base is not None:
        lines.append(
            {"base": base.version, "epoch": base.epoch, "fields": {_text(k): _value(v) for k, v in base.fields.items()}}
        )
    lines += [{"message": number, "data": _value(data)} for number, data in sorted(shared.items())]
    lines += [
        {"item": _text(each.name), "at": each.at, "origin": each.origin, "data": _value(each.data)} for each in items
    ]
    lines += map(_change, entries)
    for branch in branches:
        of = {"branch": branch.id, "base": branch.base, "cause": branch.cause}
        lines += [of | _change(entry) for entry in cold.branches.entries(text, branch.id)]
    return [json.dumps(line, separators=(",", ":")) for line in lines]


def _named(
    text: str, base: State | None, entries: Sequence[JournalEntry]
) -> tuple[list[Segment], set[int], dict[int, int]]:
    """Which messages the states show, the numbers of those that are appended, and which versions bring items back."""
    runs: list[Segment] = [] if base is None else message_ranges.segments(text, base.fields)
    own: set[int] = set()
    back: dict[int, int] = {}
    for entry in entries:
        for kind, name, value in unpack(entry.data):
            if kind == b"m":
                own.add(int(name))
            elif kind == b"s" and name == SEGMENTS:
                runs += message_ranges.segments(text, {SEGMENTS: value})
            elif kind == b"s" and name == ITEMS and b" " in value:
                back[entry.version] = int(value.split()[1])
    return runs, own, back


def _change(entry: JournalEntry) -> dict[str, Any]:
    # Without its events: those belong to the stream of this store, and have their numbers in it.
    steps = (op for op in unpack(entry.data) if op.kind != b"e")
    ops = [[kind.decode(), _text(name), _value(value)] for kind, name, value in steps]
    return {
        "version": entry.version, "time_ms": entry.time_ms, "kind": entry.kind, "actor": unescape(entry.actor),
        "token": entry.token, "event": entry.event, "ops": ops,
    }  # fmt: skip


def _value(data: bytes) -> str | dict[str, str]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": bytes_as_text.text_of(data)}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
