"""A record's past: its changes, its versions, its checkpoints. Law: it is read from SQL and never rewritten.

Pages that show the past to people use an outline of each change, with its first words instead of its contents, and an
overview of a version, which leaves out values that are too large.

Design: sections 9, 11, 28.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from distributed_state.cold.record_items import ItemRow
from distributed_state.cold.store import ColdStore
from distributed_state.errors import CorruptState, InvalidValue, NotFound, TooLarge
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.port import waited
from distributed_state.records import branches, messages
from distributed_state.records.access import ITEMS as ALL_ITEMS
from distributed_state.records.access import MESSAGES, MOVES, TAGS, VERSION
from distributed_state.records.context import RecordContext
from distributed_state.records.items import opened
from distributed_state.results import Change, ChangeOutline, Checkpoint, Forked, Snapshot
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import codec, message_ranges, turn_times
from distributed_state.values.codec import Codec
from distributed_state.values.items import Item
from distributed_state.values.journal import JournalEntry, Operation, Segment, State, item_of, unpack
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import (
    DELETED,
    ITEMS,
    PARENT,
    PHASE,
    RESTORED,
    SEGMENTS,
    START,
    TAG,
    TIMES,
    Message,
    Ref,
    unescape,
)
from distributed_state.values.search import split_tag, tags_in
from distributed_state.values.usage import Usage, spent

_TOGETHER = 200  # changes that are read at once where their bytes are limited
_PAGE = 2**18  # bytes of changes in a page; a larger change is a page of its own
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

    Raises TooLarge if their stored form exceeds `most` bytes; reading then stops near that limit.
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
    first = partial(read_path.archived, context.tiers, context.keys, long=True)
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
    """The fields whose contents these changes show, for the policy."""
    names = dict.fromkeys(name for change in changes for name in (*change.set, *change.deleted))
    if any(change.appended for change in changes):
        names[MESSAGES] = None
    if any(change.items for change in changes):
        names[ALL_ITEMS] = None
    if any(change.phase is not None for change in changes):
        names[MOVES] = None
    if any(change.tagged or change.untagged for change in changes):
        names[TAGS] = None
    return names


def replica_of(entry: JournalEntry) -> str:
    """The replica that wrote a change: the commit's id begins with it (`warm/client.py`)."""
    return entry.event.partition(".")[0]


def _item_key(name: bytes) -> tuple[str, str]:
    collection, key = (part.decode("utf-8", "surrogatepass") for part in item_of(name))
    return collection, key


def _taken_away(version: int, operations: Iterable[Operation]) -> dict[str, Any]:
    """The parts that a change emptied, and where it went back to, as a Change names them."""
    cleared: dict[str, None] = {}
    found: dict[str, Any] = {}
    for kind, name, value in operations:
        if kind == b"c":
            cleared |= dict.fromkeys(("fields", "tags") if name == TAG else ("fields",))
        elif kind == b"s" and name == ITEMS and value == b"%d 0" % version:
            cleared["items"] = None
        elif kind == b"d" and name == PHASE:
            cleared["phase"] = None
        elif kind == b"s" and name == DELETED:
            cleared["record"] = None
        elif kind == b"s" and name == RESTORED and value.isdigit():
            found["restored"] = int(value)
        elif kind == b"s" and name == PARENT and (begun := value.rpartition(b"@")[2]).isdigit():
            found["from_version"] = int(begun)
    kept = _kept(operations)
    if kept == ():
        cleared["messages"] = None
    return found | {"cleared": tuple(cleared), "kept": kept}


def _kept(operations: Iterable[Operation]) -> tuple[tuple[int, int | None], ...] | None:
    """The earlier messages that a change keeps, in runs of numbers; None if it does not change which are shown."""
    runs: list[tuple[int, int | None]] = []
    wiped = False
    opened: int | None = None  # where the run begins to which new messages are added
    for kind, name, value in operations:
        if kind == b"w":
            wiped = True
        elif kind == b"s" and name == START:
            opened = int(value)
        elif kind == b"s" and name == SEGMENTS:
            runs = [(run.start, run.stop - 1) for run in message_ranges.parse(value)]
    if opened is not None:
        runs.append((opened, None))
    return tuple(runs) if wiped or opened is not None else None


def _usage(entry: JournalEntry, operations: Iterable[Operation]) -> Usage | None:
    """The tokens that a turn used; None for other changes, and for a turn that named none."""
    found = spent(operations) if entry.kind == "turn" else {}
    return Usage.of(found) if found else None


def as_change(record_codec: Codec, entry: JournalEntry) -> Change:
    """A journal entry, decoded."""
    fields: dict[str, Any] = {}
    deleted, appended = list[str](), list[Message]()
    tags: dict[bytes, list[tuple[str, str]]] = {b"s": [], b"d": []}
    phase = label = times = None
    items: dict[tuple[str, str], Item | None] = {}
    operations = unpack(entry.data)
    for kind, name, value in operations:
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
            items[_item_key(name)] = opened(record_codec, name, row, "") if value else None
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
        usage=_usage(entry, operations),
        **_taken_away(entry.version, operations),
    )


async def at(
    context: RecordContext,
    version: int | None,
    branch: str | None,
    *,
    last: int | None = None,
    most: int | None = None,
) -> Snapshot:
    """The record at a version or on a branch, including its phase and messages: all, or the `last`.

    Raises TooLarge if its stored form exceeds `most` bytes; reading then stops near that limit.
    """
    context.allow("read", None)
    tiers = context.tiers
    keys = context.keys
    if branch is not None:
        found = await branches.state_at(tiers, keys, branch, version)
        state = found.state
        entry = branches.entry(tiers, keys, found)
    else:
        state = await state_at(tiers, keys, version)
        entry = CachedRecord(tiers.codec_of(keys.ref.text), state.epoch, state.version, state.fields, {})
    runs = message_ranges.segments(keys.ref.text, state.fields)
    if last is not None:
        runs = message_ranges.last(runs, last)
    size = sum(map(len, state.fields.values()))
    if most is not None and size > most:
        raise TooLarge(f"{keys.ref.text[:200]}: its fields are {size} bytes, more than {most}")
    if most is not None:
        waited.room(size)
    shown = await messages.shown_in(tiers, keys, entry, runs, None if most is None else most - size)
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


async def state_at(tiers: Tiers, keys: RecordKeys, version: int | None) -> State:
    """The record's content at a version. Raises NotFound if the version does not exist, or was purged."""
    if type(version) is not int or version < 1:
        raise InvalidValue(f"a version is an int from 1 on, not {version!r:.80}")
    if version >= 2**63:
        raise NotFound(f"{keys.ref.text[:200]} has no version {version!r:.80}: no database counts so far")
    return await read_path.archived(tiers, keys, partial(tiers.cold.state_at, keys.ref.text, version))


async def checkpoints(context: RecordContext, page: messages.Page) -> list[Checkpoint]:
    """A page of the named versions."""
    context.allow("read", VERSION)
    return await named(context.tiers, context.keys, page)


async def named(tiers: Tiers, keys: RecordKeys, page: messages.Page = _ALL) -> list[Checkpoint]:
    """The checkpoints, without asking the policy."""
    page.checked()
    given = page.after or 0, page.before, page.limit, page.order
    rows = await read_path.archived(tiers, keys, partial(tiers.cold.checkpoints, keys.ref.text, *given))
    return [Checkpoint(label, version, time_ms / 1000) for label, version, time_ms in rows]


_OUTLINED = 10  # changes that are read at once: each may have fields of megabytes
_NAMES = 20
_HEARD = 8  # messages of a change that are looked at for its words
_HEARD_BYTES = 2**19  # of all changes of a page
_LONGEST_WORDS = 200  # characters
_FEWER = (10, 3, 1)  # messages to try next when more are too large


@dataclass(frozen=True, slots=True)
class Overview:
    """A record at a version, as far as it fits: `entry` has the fields that fit, `left_out` the sizes of the others.

    `newest` is the record's present version. `shown` are the last of the requested messages; `earlier`: there are more
    before them. If even the last message is too large, `too_large` is its number.
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
    """The record at a version (None: at present), with at most this many bytes of fields and of messages.

    The shortest fields come first. Raises NotFound if the version does not exist.
    """
    context.allow("read", None)
    context.allow("read", MESSAGES, MOVES, TAGS)
    newest = (await context.read(True)).version
    past = None if version is None else await fields_at(context, version)
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


async def fields_at(context: RecordContext, version: int) -> CachedRecord:
    """The fields of a record as they were at a version. Raises NotFound if the version does not exist."""
    state = await state_at(context.tiers, context.keys, version)
    return CachedRecord(context.tiers.codec_of(context.text), state.epoch, state.version, state.fields, {})


def _fitting(fields: dict[bytes, bytes], most: int) -> tuple[dict[bytes, bytes], dict[str, int]]:
    """The fields that fit into this many bytes, the shortest first, and all internal ones; the sizes of the others."""
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
    """The changes before a version (None: the last ones), newest first.

    Returns fewer than `limit` if they have more than `most` bytes, but at least one if there is one.
    """
    context.allow("read", None)
    read = partial(_outlines_of, context.tiers.cold, context.text, before, limit, most)
    rows, words = await read_path.archived(context.tiers, context.keys, read, long=True)
    found = [_outline(row, _spoken(context.codec, row, words)) for row in rows]
    names = dict.fromkeys(name for each in found for name in (*each.fields, *each.deleted))
    parts = {MESSAGES: any(each.messages for each in found), ALL_ITEMS: any(each.items for each in found)}
    parts[MOVES] = any(each.phase is not None for each in found)
    context.allow("read", *names, *(name for name, there in parts.items() if there))
    return found


def _outlines_of(
    cold: ColdStore, text: str, before: int | None, limit: int, most: int
) -> tuple[list[JournalEntry], dict[int, bytes]]:
    """The changes without the contents of messages, and some of their messages by number."""
    try:
        first = cold.oldest(text)
    except NotFound:
        return [], {}
    at = (cold.version(text) or 0) + 1
    at = at if before is None else min(at, before)
    found: list[JournalEntry] = []
    while len(found) < limit and at > first and most > 0:
        after = max(0, at - 1 - min(_OUTLINED, limit - len(found)))
        rows = cold.outlines(text, after=after, before=at)
        most -= sum(len(row.data) for row in rows)
        found += rows[::-1]
        at = after + 1
    return found, _first_messages(cold, text, found)


def _first_messages(cold: ColdStore, text: str, rows: Iterable[JournalEntry]) -> dict[int, bytes]:
    """The first messages of each of these changes; those of the last changes only if all are too large together."""
    numbers = [number for row in rows for number in _appended(row)[:_HEARD]]
    sizes, room = cold.message_lengths(text, _runs(text, numbers)), _HEARD_BYTES
    fitting = []
    for number in numbers:
        room -= sizes.get(number, 0)
        if room >= 0:
            fitting.append(number)
    return cold.messages(text, _runs(text, fitting))


def _runs(text: str, numbers: Iterable[int]) -> list[Segment]:
    return message_ranges.joined(Segment(text, number, number + 1) for number in sorted(numbers))


def _appended(entry: JournalEntry) -> list[int]:
    return [int(name) for kind, name, _ in unpack(entry.data) if kind == b"m"]


def _spoken(record_codec: Codec, entry: JournalEntry, stored: dict[int, bytes]) -> tuple[str | None, tuple[str, ...]]:
    """The first words of a change, a user's if there are any, and the tools that it calls."""
    texts, tools = list[tuple[bool, str]](), dict[str, None]()
    for number in _appended(entry):
        with suppress(CorruptState):  # or its key is missing here, an error that a reader of the message gets
            if number in stored:
                fields, _ = record_codec.read_message(stored[number], number)
                text, called = _words(fields)
                texts += [(fields.get("role") == "user", text)] if text else []
                tools |= dict.fromkeys(called)
    said = next((text for by_user, text in texts if by_user), texts[-1][1] if texts else None)
    return said and said[:_LONGEST_WORDS], tuple(tools)[:_NAMES]


def _words(message: dict[str, Any]) -> tuple[str, list[str]]:
    """A message's text, and the names of the tools that it calls, as OpenAI's and Anthropic's interfaces have them."""
    content = message.get("content")
    parts = [each for each in content if isinstance(each, dict)] if isinstance(content, list) else []
    text = content if isinstance(content, str) else next((each["text"] for each in parts if "text" in each), "")
    given = message.get("tool_calls")
    calls = [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    calls = [each["function"] if isinstance(each.get("function"), dict) else each for each in calls]
    calls += [each for each in parts if each.get("type") == "tool_use"]
    names = [each["name"][:_LONGEST_WORDS] for each in calls if isinstance(each.get("name"), str)]
    return text if isinstance(text, str) and message.get("role") != "tool" else "", names


def _outline(entry: JournalEntry, spoken: tuple[str | None, tuple[str, ...]]) -> ChangeOutline:
    changed: dict[bytes, list[str]] = {b"s": [], b"d": []}
    said = items = 0
    found: dict[str, Any] = dict.fromkeys(("phase", "label", "restored", "times"))
    operations = unpack(entry.data)
    for kind, name, value in operations:
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
        replica=replica_of(entry), token=entry.token, fields=tuple(fields[:_NAMES]),
        deleted=tuple(deleted[:_NAMES]), more=len(fields[_NAMES:]) + len(deleted[_NAMES:]), messages=said, items=items,
        size=len(entry.data), usage=_usage(entry, operations), said=spoken[0], tools=spoken[1], **found,
    )  # fmt: skip


async def forks(context: RecordContext, limit: int) -> list[Forked]:
    """The records that were forked from one and are archived, the newest first."""
    context.allow("read", None)
    rows = await context.tiers.port.sql(context.tiers.cold.forked, context.text, limit)
    return [Forked(Ref.parse(text).id, version, created / 1000, gone) for text, version, created, gone in rows]
