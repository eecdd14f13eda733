"""A record's past: history, versions, checkpoints, rollback, fork. Law: it is read from SQL and never rewritten.

States form a path. A rollback is a new version and no step of it: each says which version's state it is, and the next
step back goes on from that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed_state.errors import Deleted, InvalidValue, NotFound, StateError
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records.access import MESSAGES, MOVES, written
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.changes import Changes
from distributed_state.values import codec, message_ranges
from distributed_state.values.codec import Codec
from distributed_state.values.journal import Segment, State, unpack
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import (
    DELETED,
    LIFETIME,
    NEXT,
    OWNER,
    PARENT,
    PHASE,
    REQUEST,
    RESTORED,
    SEGMENTS,
    START,
    SUMMARY,
    Message,
    Ref,
    is_value,
    unescape,
)
from distributed_state.values.results import Change, Checkpoint, Snapshot
from distributed_state.warm.answers import Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Which messages are asked for: between two numbers (exclusive), of these the last, or the first in this order."""

    last: int | None = None
    limit: int | None = None
    before: int | None = None
    after: int | None = None
    order: str = "asc"

    def checked(self) -> Page:
        """Raise InvalidValue if it cannot be. Inside of us a number of -1 is in order."""
        for name in ("last", "limit", "before", "after"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise InvalidValue(f"{name} is an int from 0 on or None, not {value!r:.80}")
        if self.order not in ("asc", "desc"):
            raise InvalidValue(f"order is 'asc', the oldest first, or 'desc', not {self.order!r:.80}")
        if self.last is not None and self.limit is not None:
            raise InvalidValue("give last or limit, not both: limit counts from the beginning of the order")
        return self

    def of(self, runs: list[Segment]) -> list[Segment]:
        """The runs cut down to this page."""
        runs = message_ranges.between(runs, self.after, self.before)
        if self.last is not None or (self.limit is not None and self.order == "desc"):
            return message_ranges.last(runs, self.last if self.last is not None else self.limit or 0)
        return runs if self.limit is None else message_ranges.part(runs, 0, self.limit)


async def history(tiers: Tiers, names: RecordKeys, after: int, before: int | None, limit: int | None) -> list[Change]:
    """The changes between two versions (exclusive), oldest first."""
    for name, value in ("after", after), ("before", before), ("limit", limit):
        if (value is not None or name == "after") and (type(value) is not int or not 0 <= value < 2**63):
            raise InvalidValue(f"{name} is an int from 0 on{'' if name == 'after' else ' or None'}, not {value!r:.80}")
    await write_path.reach(tiers, names)
    rows = await tiers.port.sql(_history, tiers, names.ref.text, after, before, limit)
    record_codec = tiers.codec_of(names.ref.text)
    return [as_change(record_codec, row) for row in rows]


def _history(tiers: Tiers, text: str, after: int, before: int | None, limit: int | None) -> Any:
    return tiers.cold.history(text, after=after, before=before, limit=limit)


def told(changes: Sequence[Change]) -> dict[str, None]:
    """What these changes say the contents of, as a policy is asked for it."""
    names = dict.fromkeys(name for change in changes for name in (*change.set, *change.deleted))
    if any(change.appended for change in changes):
        names[MESSAGES] = None
    if any(change.phase is not None for change in changes):
        names[MOVES] = None
    return names


def as_change(record_codec: Codec, entry: Any) -> Change:
    """What a journal entry says, decoded."""
    fields: dict[str, Any] = {}
    deleted = []
    appended = []
    phase = label = None
    for kind, name, value in unpack(entry.data):
        if kind == b"s" and name[:1] != b"#":
            fields[codec.decode_key(name)] = record_codec.decode(value, codec.decode_key(name))
        elif kind == b"d" and name[:1] != b"#":
            deleted.append(codec.decode_key(name))
        elif kind == b"m":
            appended.append(record_codec.decode_message(value, record_codec.record, int(name)))
        elif kind == b"s" and name == PHASE:
            phase = value.decode("utf-8", "surrogatepass")
        elif kind == b"l":
            label = value.decode("utf-8", "surrogatepass")
    return Change(
        version=entry.version,
        time=entry.time_ms / 1000,
        kind=entry.kind,
        actor=unescape(entry.actor),
        token=entry.token,
        set=fields,
        deleted=tuple(deleted),
        appended=tuple(appended),
        phase=phase,
        label=label,
    )


async def at(tiers: Tiers, names: RecordKeys, version: int) -> Snapshot:
    """The record as it was at a version, messages and phase included."""
    state = await _state(tiers, names, version)
    entry = CachedRecord(tiers.codec_of(names.ref.text), state.epoch, state.version, state.fields, {})
    messages = await visible(tiers, names, entry, message_ranges.segments(names.ref.text, state.fields))
    phase = state.fields.get(PHASE)
    return Snapshot(
        version=version,
        fields=entry.all(),
        messages=tuple(messages),
        phase=None if phase is None else phase.decode("utf-8", "surrogatepass"),
        deleted=state.deleted,
    )


async def _state(tiers: Tiers, names: RecordKeys, version: int) -> State:
    if type(version) is not int or version < 1:
        raise InvalidValue(f"a version is an int from 1 on, not {version!r:.80}")
    if version >= 2**63:
        raise NotFound(f"{names.ref.text[:200]} has no version {version!r:.80}: no database counts so far")
    await write_path.reach(tiers, names)
    return await tiers.port.sql(tiers.cold.state_at, names.ref.text, version)


async def messages(
    tiers: Tiers, names: RecordKeys, last: int | None, *, fresh: bool
) -> tuple[CachedRecord, list[Message]]:
    """The last messages, or all, oldest first, and the version of the record that shows them."""
    return await chosen(tiers, names, Page(last=last), fresh=fresh)


async def chosen(tiers: Tiers, names: RecordKeys, page: Page, *, fresh: bool) -> tuple[CachedRecord, list[Message]]:
    """The messages of a page, and the version of the record that shows them."""
    entry = await read_path.read(tiers, names, fresh=fresh)
    while True:
        for whole in (False, True):
            if entry.deleted:
                return entry, []
            runs = page.of(message_ranges.segments(names.ref.text, entry.fields))
            if whole or all(n in entry.messages for run in runs for n in range(run.start, run.stop)):
                break
            # Hot keeps only recent messages; Redis holds every one that SQL may not have yet.
            entry = await read_path.load_whole(tiers, names, entry)
        try:
            found = await visible(tiers, names, entry, runs)
        except StateError as error:
            seen = entry
            entry = await read_path.read(tiers, names, fresh=True)
            if type(error) is not StateError or (seen.epoch, seen.version) == (entry.epoch, entry.version):
                raise
            # It was erased, or purged, since that look at it.
        else:
            return entry, found[::-1] if page.order == "desc" else found


async def message(tiers: Tiers, names: RecordKeys, number: int, *, fresh: bool) -> Message:
    """The message of this number. Raises NotFound if the conversation does not show it."""
    if type(number) is not int or number < 0:
        raise InvalidValue(f"a message's number is an int from 0 on, not {number!r:.80}")
    _, found = await chosen(tiers, names, Page(after=number - 1, before=number + 1), fresh=fresh)
    if not found:
        raise NotFound(f"{names.ref.text[:200]}: shows no message {number}")
    return found[0]


async def visible(tiers: Tiers, names: RecordKeys, entry: CachedRecord, runs: list[Segment]) -> list[Message]:
    """The messages of these runs: from the entry where it has them, the rest from SQL."""
    known = await find(tiers, names, entry, runs)
    numbers = [number for run in runs for number in range(run.start, run.stop)]
    if any(number not in known for number in numbers):
        # A fork gets its own of what is not kept where it was written any more when it is archived.
        await write_path.reach(tiers, names)
        known = await find(tiers, names, entry, runs)
    lacking = [number for number in numbers if number not in known]
    if lacking:
        raise StateError(f"{names.ref.text[:200]}: messages {lacking[0]} to {lacking[-1]} are in neither Redis nor SQL")
    return [
        entry.codec.decode_message(known[number], run.source, number)
        for run in runs
        for number in range(run.start, run.stop)
    ]


async def find(tiers: Tiers, names: RecordKeys, entry: CachedRecord, runs: list[Segment]) -> Mapping[int, bytes]:
    """What is stored of these runs by number: all that the entry has, and from SQL what it lacks and SQL has."""
    missing = []
    for run in runs:
        lacking = [number for number in range(run.start, run.stop) if number not in entry.messages]
        if lacking:
            missing.append(Segment(run.source, lacking[0], lacking[-1] + 1))
    if not missing:
        return entry.messages
    parent = entry.fields.get(PARENT, b"").decode().rpartition("@")[0] or None
    rows = await tiers.port.sql(tiers.cold.messages, names.ref.text, missing, parent)
    # Kept with the hot entry, so that the next reader of an inherited or hydrated conversation finds them there.
    hot = tiers.hot.entries.get(names.ref.text)
    if hot is not None and hot.epoch == entry.epoch and hot.version == entry.version:
        shown = message_ranges.segments(names.ref.text, entry.fields)
        recent = message_ranges.last(shown, tiers.settings.recent_messages)
        kept = {number for run in recent for number in range(run.start, run.stop)}
        hot.messages.update({number: data for number, data in rows.items() if number in kept})
    return {**rows, **entry.messages}


async def checkpoints(tiers: Tiers, names: RecordKeys) -> list[Checkpoint]:
    """The named versions, oldest first."""
    await write_path.reach(tiers, names)
    rows = await tiers.port.sql(tiers.cold.checkpoints, names.ref.text)
    return [Checkpoint(label, version, time_ms / 1000) for label, version, time_ms in rows]


async def rollback(
    tiers: Tiers, names: RecordKeys, changes: Changes, steps: int | None, label: str | None, version: int | None
) -> Draft:
    """The change that makes the record what it was; it holds only for the version that it was made for."""
    if sum(each is not None for each in (steps, label, version)) != 1:
        raise InvalidValue("rollback takes exactly one of steps, label and version")
    present = await read_path.read(tiers, names, fresh=True)
    if steps is not None:
        if type(steps) is not int or steps < 1:
            raise InvalidValue(f"steps is an int from 1 on, not {steps!r}")
        if steps >= present.version:
            raise NotFound(f"{names.ref.text[:200]}: has had {present.version} commits, {steps} back there is none")
        await write_path.reach(tiers, names)
        version = await tiers.port.sql(tiers.cold.step_back, names.ref.text, present.version, steps)
    if label is not None:
        matching = [each.version for each in await checkpoints(tiers, names) if each.label == label]
        if not matching:
            raise NotFound(f"{names.ref.text[:200]}: no checkpoint {label!r}")
        version = matching[-1]
    assert version is not None
    target = await _state(tiers, names, version)
    if target.deleted:
        raise Deleted(f"{names.ref.text[:200]}: was deleted at version {version} already")
    _restore(changes, present, target)
    changes.reserved(RESTORED, b"%d" % version)  # from there the next step back goes on
    changes.undelete()  # and a change even where nothing differs
    changes.emit("session.rollback", {"version": version})
    draft = changes.draft("rollback")
    draft.expected = present.version
    draft.epoch = present.epoch
    draft.deleted = "revive"
    return draft


def _restore(changes: Changes, present: CachedRecord, target: State) -> None:
    """Only what differs. Messages come back by reference: their numbers are never used twice."""
    record_codec = present.codec
    text = present.codec.record
    past = message_ranges.segments(text, target.fields)
    now = message_ranges.segments(text, present.fields)
    if past != now:
        changes.wipe()
        changes.reserved(SEGMENTS, message_ranges.close(text, target.fields))
    handled = {SEGMENTS, START, NEXT, OWNER, PARENT, LIFETIME, RESTORED}
    if Ref.parse(text).scope == "user":
        # What sessions have changed of their user: forgotten, it would be done once more.
        handled |= {name for name in (*present.fields, *target.fields) if name[:2] == REQUEST}
    for name in present.fields.keys() - target.fields.keys() - handled:
        changes.reserved(name, None)
    for name, value in target.fields.items():
        if name not in handled and present.fields.get(name) != value:
            changes.reserved(name, _carried(record_codec, record_codec, name, value))


async def cleanup(tiers: Tiers, names: RecordKeys, changes: Changes, before: float) -> tuple[Draft | None, int]:
    """The change that hides messages committed before a time, None if there are none; and how many it hides."""
    present = await read_path.read(tiers, names, fresh=True)
    text = names.ref.text
    shown = [] if present.deleted else message_ranges.segments(text, present.fields)
    if not shown:
        return None, 0
    await write_path.reach(tiers, names)
    kept = await tiers.port.sql(tiers.cold.since, text, shown, int(before * 1000))
    hidden = message_ranges.count(shown) - message_ranges.count(kept)
    if not hidden:
        return None, 0
    # The last run shown is the open one, if that holds anything; it stays open, so that recent messages stay near.
    end = present.fields.get(NEXT, b"0")
    opened = bool(kept) and present.fields.get(START, b"0") != end
    changes.reserved(START, b"%d" % kept[-1].start if opened else end)
    changes.reserved(SEGMENTS, message_ranges.dump(kept[:-1] if opened else kept))
    changes.reserved(SUMMARY, None)  # it tells what they said
    draft = changes.draft("cleanup")
    draft.expected = present.version
    draft.epoch = present.epoch
    return draft, hidden


def _carried(record_codec: Codec, to: Codec, name: bytes, value: bytes) -> bytes:
    return record_codec.carry(value, codec.decode_key(name), to) if is_value(name) else value


def copied(draft: Draft) -> list[str]:
    """What a fork hands on of the record that it is made from, as a policy is asked for it."""
    names = [field for _, field in written(draft.steps) if field is not None]
    shown = any(name == SEGMENTS for _, name, _ in draft.steps)
    return [*names, *([MESSAGES] if shown and MESSAGES not in names else [])]


async def fork(tiers: Tiers, names: RecordKeys, target: RecordKeys, changes: Changes, version: int | None) -> Draft:
    """The first change of a record that starts as this one was. Messages are shared, not copied."""
    present = await read_path.read(tiers, names, fresh=True)
    if present.version == 0:
        raise NotFound(f"{names.ref.text[:200]}: there is nothing to fork")
    state = await _state(tiers, names, present.version if version is None else version)
    if state.deleted:
        raise Deleted(f"{names.ref.text[:200]}: deleted at version {state.version}")
    # Archived above, so that a fork of something that is being erased is noted there by now, and ends with it: else
    # forks of forks would be made as fast as they are erased.
    if await tiers.port.sql(partial(tiers.cold.pending, names=[names.ref.text])):
        raise Deleted(f"{names.ref.text[:200]}: is being erased")
    fields = state.fields
    record_codec = tiers.codec_of(target.ref.text)
    for name, value in fields.items():
        if name not in (SEGMENTS, START, PARENT, DELETED, LIFETIME, RESTORED):
            changes.reserved(name, _carried(present.codec, record_codec, name, value))
    changes.reserved(PARENT, f"{names.ref.text}@{state.version}".encode())
    if int(fields.get(NEXT, b"0")):
        changes.reserved(SEGMENTS, message_ranges.close(names.ref.text, fields))
        changes.reserved(START, fields[NEXT])
    draft = changes.draft("fork")
    # Not even a deleted record may be there: its own message numbers would stand between the shared ones.
    draft.expected = 0
    return draft
