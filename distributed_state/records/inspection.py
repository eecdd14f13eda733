"""A record's past as somebody looks at it: what happened when, without what was said. Law: a page of it is read.

Design: section 28.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from distributed_state.cold.store import ColdStore
from distributed_state.errors import NotFound, TooLarge
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records import history, messages
from distributed_state.records.access import ITEMS, MESSAGES, MOVES, TAGS
from distributed_state.records.context import RecordContext
from distributed_state.tiers import commit as write_path
from distributed_state.values import codec, message_ranges, turn_times
from distributed_state.values.journal import JournalEntry, unpack
from distributed_state.values.model import PHASE, RESTORED, TIMES, Ref, unescape
from distributed_state.values.results import ChangeOutline, Forked

_TOGETHER = 10  # changes that are read at once: each may have fields of megabytes
_NAMES = 20
_FEWER = (10, 3, 1)  # messages, where more of them are too large


@dataclass(frozen=True, slots=True)
class Overview:
    """A record at a version, as far as it fits: `entry` has the fields that do, `left_out` the sizes of the others.

    `newest` is the record's present version. `shown` are messages, the last of those asked for; `earlier`: there are
    more before them. `too_large` is the number of the message that alone is too large, if that is the last of them.
    """

    entry: CachedRecord
    newest: int
    left_out: dict[str, int]
    shown: messages.Shown
    earlier: bool
    too_large: int | None


async def overview(
    context: RecordContext, version: int | None, page: messages.Page, *, fields: int, said: int
) -> Overview:
    """The record at a version, None: as it is, with at most so many bytes of fields and of what was said.

    Of the fields the shortest come first. Raises NotFound if it has no such version.
    """
    context.allow("read", None)
    context.allow("read", MESSAGES, MOVES, TAGS)
    newest = (await context.read(True)).version
    past = None if version is None else await at(context, version)
    for some in (page.limit or 0, *(each for each in _FEWER if each < (page.limit or 0)), 0):
        try:
            shown = await _messages(context, past, replace(page, limit=some), said)
            break
        except TooLarge:
            continue
    entry = shown.entry
    runs = page.of(message_ranges.segments(context.text, entry.fields)) if not entry.deleted else []
    first = shown.runs[0].start if shown.runs else None if not runs else runs[-1].stop
    earlier = message_ranges.between(message_ranges.segments(context.text, entry.fields), None, first)
    kept, left = _fitting(entry.fields, fields)
    context.allow("read", *left)
    fitting = CachedRecord(entry.codec, entry.epoch, entry.version, kept, {})
    too_large = runs[-1].stop - 1 if runs and not shown.runs else None
    return Overview(fitting, max(newest, entry.version), left, shown, bool(first is not None and earlier), too_large)


async def _messages(
    context: RecordContext, past: CachedRecord | None, page: messages.Page, most: int
) -> messages.Shown:  # fmt: skip
    if past is None:
        return await messages.chosen(context.tiers, context.keys, page, fresh=False, most=most)
    runs = [] if past.deleted else page.of(message_ranges.segments(context.text, past.fields))
    return await messages.shown_in(context.tiers, context.keys, past, runs, most)


async def at(context: RecordContext, version: int) -> CachedRecord:
    """The fields of a record as they were at a version. Raises NotFound if it has no such version."""
    state = await history.state_at(context.tiers, context.keys, version)
    return CachedRecord(context.tiers.codec_of(context.text), state.epoch, state.version, state.fields, {})


def _fitting(fields: dict[bytes, bytes], most: int) -> tuple[dict[bytes, bytes], dict[str, int]]:
    """The fields that fit into so many bytes, the shortest first, with those of our own; the sizes of the others."""
    kept, left = {}, {}
    for name, value in sorted(fields.items(), key=lambda field: len(field[1])):
        if name[:1] == b"#":
            kept[name] = value
            continue
        most -= len(name) + len(value)
        if most >= 0:
            kept[name] = value
        else:
            left[codec.decode_key(name)] = len(value)
    return kept, left


async def timeline(context: RecordContext, before: int | None, limit: int, *, most: int) -> list[ChangeOutline]:
    """The changes below a version, None: the last ones, the newest first.

    They are fewer than `limit` where more than `most` bytes would have to be read, and one at least if there is one.
    """
    context.allow("read", None)
    read = partial(_rows, context.tiers.cold, context.text, before, limit, most)
    rows = await write_path.archived(context.tiers, context.keys, read, long=True)
    found = [_outline(row) for row in rows]
    names = dict.fromkeys(name for each in found for name in (*each.fields, *each.deleted))
    parts = {MESSAGES: any(each.messages for each in found), ITEMS: any(each.items for each in found)}
    parts[MOVES] = any(each.phase is not None for each in found)
    context.allow("read", *names, *(name for name, there in parts.items() if there))
    return found


def _rows(cold: ColdStore, text: str, before: int | None, limit: int, most: int) -> list[JournalEntry]:
    try:
        first = cold.oldest(text)
    except NotFound:
        return []
    at = (cold.version(text) or 0) + 1
    at = at if before is None else min(at, before)
    found: list[JournalEntry] = []
    while len(found) < limit and at > first and most > 0:
        after = max(0, at - 1 - min(_TOGETHER, limit - len(found)))
        rows = cold.outlines(text, after=after, before=at)
        most -= sum(len(row.data) for row in rows)
        found += rows[::-1]
        at = after + 1
    return found


def _outline(entry: JournalEntry) -> ChangeOutline:
    changed: dict[bytes, list[str]] = {b"s": [], b"d": []}
    said = items = 0
    found: dict[str, Any] = dict.fromkeys(("phase", "label", "restored", "times"))
    for kind, name, value in unpack(entry.data):
        if name[:1] != b"#" and kind in changed:
            changed[kind].append(codec.decode_key(name))
        elif kind == b"m":
            said += 1
        elif kind in (b"p", b"q"):
            items += 1
        elif kind == b"d" and name.startswith(TIMES):
            found["times"] = turn_times.read(name)
        elif kind == b"l":
            found["label"] = value.decode("utf-8", "surrogatepass")
        elif name == PHASE:
            found["phase"] = value.decode("utf-8", "surrogatepass") if kind == b"s" else ""
        elif kind == b"s" and name == RESTORED and entry.kind == "rollback":
            found["restored"] = int(value)
    fields, deleted = changed.values()
    return ChangeOutline(
        version=entry.version, time=entry.time_ms / 1000, kind=entry.kind, actor=unescape(entry.actor),
        replica=history.replica_of(entry), token=entry.token, fields=tuple(fields[:_NAMES]),
        deleted=tuple(deleted[:_NAMES]), more=len(fields[_NAMES:]) + len(deleted[_NAMES:]), messages=said, items=items,
        size=len(entry.data), **found,
    )  # fmt: skip


async def forks(context: RecordContext, limit: int) -> list[Forked]:
    """The records that were forked from one and are archived, the newest first."""
    context.allow("read", None)
    rows = await context.tiers.port.sql(context.tiers.cold.forked, context.text, limit)
    return [Forked(Ref.parse(text).id, version, created / 1000, gone) for text, version, created, gone in rows]
