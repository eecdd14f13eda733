"""A record's past: its changes, its versions, its checkpoints. Law: it is read from SQL and never rewritten.

Design: sections 9, 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from distributed_state.cold.record_items import ItemRow
from distributed_state.errors import InvalidValue, NotFound, TooLarge
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.port import waited
from distributed_state.records import branches, messages
from distributed_state.records.access import ITEMS, MESSAGES, MOVES, TAGS, VERSION
from distributed_state.records.context import RecordContext
from distributed_state.records.items import opened
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import codec, message_ranges, turn_times
from distributed_state.values.codec import Codec
from distributed_state.values.items import Item
from distributed_state.values.journal import JournalEntry, State, item_of, unpack
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import PHASE, TAG, TIMES, Message, unescape
from distributed_state.values.results import Change, Checkpoint, Snapshot
from distributed_state.values.search import split_tag, tags_in

_TOGETHER = 200  # changes that are read at once where their bytes are limited
_PAGE = 2**18  # bytes of them, but for one that is larger
_ALL = messages.Page(after=0)


async def history(
    context: RecordContext,
    after: int,
    before: int | None,
    limit: int | None,
    branch: str | None,
    *,
    most: int | None = None,
) -> list[Change]:
    """The changes between two versions (exclusive), oldest first; those of a branch, if one is given.

    Raises TooLarge if they are more than `most` bytes as they are stored; no more than about those are read then.
    """
    context.allow("read", None)
    for name, value in ("after", after), ("before", before), ("limit", limit):
        if (value is not None or name == "after") and (type(value) is not int or not 0 <= value < 2**63):
            raise InvalidValue(f"{name} is an int from 0 on{'' if name == 'after' else ' or None'}, not {value!r:.80}")
    tiers = context.tiers
    if branch is None:
        rows = await _rows(context, after, before, limit, most)
    else:
        rows = branches.between(await branches.entries(tiers, context.keys, branch), after, before, limit)
    changes = [as_change(context.codec, row) for row in rows]
    context.allow("read", *_shown(changes))
    return changes


async def _rows(
    context: RecordContext, after: int, before: int | None, limit: int | None, most: int | None
) -> list[JournalEntry]:
    first = partial(write_path.archived, context.tiers, context.keys, long=True)
    read = partial(context.tiers.cold.history, context.text, before=before)
    if most is None:
        return await first(partial(read, after=after, limit=limit))
    found: list[JournalEntry] = []
    size = 0
    while limit is None or len(found) < limit:
        some = _TOGETHER if limit is None else min(_TOGETHER, limit - len(found))
        page = partial(read, after=after, limit=some, most=min(most, _PAGE))
        rows = await (context.tiers.port.sql(page) if found else first(page))
        found += rows
        size += sum(len(row.data) for row in rows)
        if size > most:
            raise TooLarge(f"{context.text[:200]}: {len(found)} changes are {size} bytes, more than {most}")
        if not rows:
            break
        waited.room(size)
        after = rows[-1].version
    return found


def _shown(changes: Sequence[Change]) -> dict[str, None]:
    """What these changes show the contents of, as a policy is asked for it."""
    names = dict.fromkeys(name for change in changes for name in (*change.set, *change.deleted))
    if any(change.appended for change in changes):
        names[MESSAGES] = None
    if any(change.items for change in changes):
        names[ITEMS] = None
    if any(change.phase is not None for change in changes):
        names[MOVES] = None
    if any(change.tagged or change.untagged for change in changes):
        names[TAGS] = None
    return names


def replica_of(entry: JournalEntry) -> str:
    """The replica that wrote a change: the id of the commit begins with it (`warm/client.py`)."""
    return entry.event.partition(".")[0]


def _item_key(name: bytes) -> tuple[str, str]:
    collection, key = (part.decode("utf-8", "surrogatepass") for part in item_of(name))
    return collection, key


def as_change(record_codec: Codec, entry: Any, epoch: str = "") -> Change:
    """What a journal entry says, decoded."""
    fields: dict[str, Any] = {}
    deleted, appended = list[str](), list[Message]()
    tags: dict[bytes, list[tuple[str, str]]] = {b"s": [], b"d": []}
    phase = label = times = None
    items: dict[tuple[str, str], Item | None] = {}
    for kind, name, value in unpack(entry.data):
        if kind == b"s" and name[:1] != b"#":
            fields[codec.decode_key(name)] = record_codec.decode(value, codec.decode_key(name))
        elif kind == b"d" and name[:1] != b"#":
            deleted.append(codec.decode_key(name))
        elif name[:2] == TAG and kind in tags:
            tags[kind].append(split_tag(name))
        elif kind == b"m":
            appended.append(record_codec.decode_message(value, record_codec.record, int(name)))
        elif kind == b"s" and name == PHASE:
            phase = value.decode("utf-8", "surrogatepass")
        elif kind == b"l":
            label = value.decode("utf-8", "surrogatepass")
        elif kind == b"d" and name.startswith(TIMES):
            times = turn_times.read(name)
        elif kind in (b"p", b"q"):
            row = ItemRow(record_codec.record, entry.version, value)
            items[_item_key(name)] = opened(record_codec, name, row, epoch) if value else None
    return Change(
        version=entry.version,
        time=entry.time_ms / 1000,
        kind=entry.kind,
        actor=unescape(entry.actor),
        token=entry.token,
        replica=replica_of(entry),
        set=fields,
        deleted=tuple(deleted),
        appended=tuple(appended),
        phase=phase,
        label=label,
        tagged=tuple(tags[b"s"]),
        untagged=tuple(tags[b"d"]),
        items=items,
        times=times,
    )


async def at(
    context: RecordContext,
    version: int | None,
    branch: str | None,
    *,
    last: int | None = None,
    most: int | None = None,
) -> Snapshot:
    """The record as it was at a version, or on a branch, phase and messages included: all, or the `last`.

    Raises TooLarge if it is more than `most` bytes as it is stored; no more than about those are read then.
    """
    context.allow("read", None)
    tiers = context.tiers
    names = context.keys
    if branch is not None:
        found = await branches.state_at(tiers, names, branch, version)
        state = found.state
        entry = branches.entry(tiers, names, found)
    else:
        state = await state_at(tiers, names, version)
        entry = CachedRecord(tiers.codec_of(names.ref.text), state.epoch, state.version, state.fields, {})
    runs = message_ranges.segments(names.ref.text, state.fields)
    if last is not None:
        runs = message_ranges.last(runs, last)
    size = sum(map(len, state.fields.values()))
    if most is not None and size > most:
        raise TooLarge(f"{names.ref.text[:200]}: its fields are {size} bytes, more than {most}")
    if most is not None:
        waited.room(size)
    shown = await messages.shown_in(tiers, names, entry, runs, None if most is None else most - size)
    phase = state.fields.get(PHASE)
    snapshot = Snapshot(
        version=state.version,
        fields=shown.entry.all(),
        messages=tuple(shown.messages()),
        phase=None if phase is None else phase.decode("utf-8", "surrogatepass"),
        deleted=state.deleted,
        tags=tags_in(state.fields),
    )
    context.allow("read", *snapshot.fields, MESSAGES, MOVES, *([TAGS] if snapshot.tags else []))
    return snapshot


async def state_at(tiers: Tiers, names: RecordKeys, version: int | None) -> State:
    """What a record held at a version. Raises NotFound if it has no such version, or that was purged."""
    if type(version) is not int or version < 1:
        raise InvalidValue(f"a version is an int from 1 on, not {version!r:.80}")
    if version >= 2**63:
        raise NotFound(f"{names.ref.text[:200]} has no version {version!r:.80}: no database counts so far")
    return await write_path.archived(tiers, names, partial(tiers.cold.state_at, names.ref.text, version))


async def checkpoints(context: RecordContext, page: messages.Page) -> list[Checkpoint]:
    """The named versions, a page of them."""
    context.allow("read", VERSION)
    return await named(context.tiers, context.keys, page)


async def named(tiers: Tiers, names: RecordKeys, page: messages.Page = _ALL) -> list[Checkpoint]:
    """The checkpoints, whoever asks."""
    page.checked()
    given = page.after or 0, page.before, page.limit, page.order
    rows = await write_path.archived(tiers, names, partial(tiers.cold.checkpoints, names.ref.text, *given))
    return [Checkpoint(label, version, time_ms / 1000) for label, version, time_ms in rows]
