"""Restores an earlier state of a record, or starts a fork from one. Law: both are one commit; history is not rewritten.

A rollback does not count as a step: it notes the version whose state it restored, and the next rollback counts its
steps back from that version. Answered requests are not part of a state: a rollback leaves them as they are.

A fork shares messages by reference: only a branch's own messages are copied. It also copies the answers to the requests
that were answered in the state that it starts from, but not later answers.

An exported state, one dict (`export_state`), is checked as a whole before any part of it is restored.

Design: section 11.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed_state.cold.values import BranchState
from distributed_state.errors import Deleted, InvalidValue, NotFound
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records import branches, history, lifecycle
from distributed_state.records import messages as shown_messages
from distributed_state.records.access import ITEMS as ALL_ITEMS
from distributed_state.records.access import MESSAGES, MOVES, written
from distributed_state.records.context import Note, RecordContext
from distributed_state.records.lifecycle import ForkUnderWay
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.changes import Changes
from distributed_state.values import as_text, codec, field_ttl, message_ranges
from distributed_state.values.codec import Codec
from distributed_state.values.journal import State
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import (
    DELETED,
    INBOX,
    ITEMS,
    LIFETIME,
    NEXT,
    OWNER,
    PARENT,
    PHASE,
    REQUEST,
    RESTORED,
    SEGMENTS,
    START,
    USAGE,
    Message,
    Ref,
    deleted_error,
    is_kept,
    is_value,
)
from distributed_state.warm.answers import Draft


@dataclass(frozen=True, slots=True)
class Target:
    """The state that a rollback restores: one of these; by default one step back."""

    steps: int | None = None
    label: str | None = None
    version: int | None = None
    checkpoints: int | None = None

    def __post_init__(self) -> None:
        given = sum(each is not None for each in (self.steps, self.label, self.version, self.checkpoints))
        if given > 1:
            raise InvalidValue("rollback takes one of steps, label, version and checkpoints")
        if not given:
            object.__setattr__(self, "steps", 1)
        for name, count in ("steps", self.steps), ("checkpoints", self.checkpoints):
            if count is not None and (type(count) is not int or count < 1):
                raise InvalidValue(f"{name} is an int from 1 on, not {count!r:.80}")


async def rollback(context: RecordContext, target: Target, *, note: Note | None = None) -> int:
    """Restore an earlier state of the record; the new version."""
    context.allow("write", None)

    async def once() -> int:
        draft = await plan(context.tiers, context.keys, context.changes(), target, note)
        return (await context.commit(draft)).version

    return await write_path.until_no_conflict(context.tiers, once)


async def plan(tiers: Tiers, keys: RecordKeys, changes: Changes, to: Target, note: Note | None = None) -> Draft:
    """The change that restores an earlier state; it applies only at the version that it was made for."""
    present = await read_path.read(tiers, keys, fresh=True)
    version = await _version_of(tiers, keys, present, to)
    target = await history.state_at(tiers, keys, version)
    if target.deleted:
        raise deleted_error(keys.ref.text, version, target.fields[DELETED])
    _restore(changes, present, target)
    if ITEMS in present.fields and await _items_differ(tiers, keys, present, target):
        changes.layer(version if ITEMS in target.fields else 0)
    changes.reserved(RESTORED, b"%d" % version)  # the next rollback counts its steps back from this version
    changes.undelete()  # this also forces a commit if nothing differs
    changes.emit("session.rollback", {"version": version})
    if note is not None:
        note(present, changes)
    return changes.draft("rollback", expected=present.version, epoch=present.epoch, deleted="revive")


async def _version_of(tiers: Tiers, keys: RecordKeys, present: CachedRecord, to: Target) -> int:
    if to.version is not None:
        return to.version
    if to.steps is not None:
        if to.steps >= present.version:
            text = f"{keys.ref.text[:200]}: has had {present.version} commits, {to.steps} back there is none"
            raise NotFound(text)
        back = partial(tiers.cold.step_back, keys.ref.text, present.version, to.steps)
        return await read_path.archived(tiers, keys, back)
    if to.label is not None:
        labelled = [each for each in await history.named(tiers, keys) if each.label == to.label]
        if not labelled:
            raise NotFound(f"{keys.ref.text[:200]}: no checkpoint {to.label!r}")
        return labelled[-1].version
    count = to.checkpoints or 1
    newest = await history.named(tiers, keys, shown_messages.Page(limit=count, order="desc"))
    if len(newest) < count:
        raise NotFound(f"{keys.ref.text[:200]}: has {len(newest)} checkpoints, not {count}")
    return newest[-1].version


async def _items_differ(tiers: Tiers, keys: RecordKeys, present: CachedRecord, target: State) -> bool:
    """Whether items may have changed since that state; if not, the newest items stay in Redis."""
    if present.fields[ITEMS] != target.fields.get(ITEMS):
        return True
    return await tiers.port.sql(tiers.cold.items_changed_since, keys.ref.text, target.version)


def _restore(changes: Changes, present: CachedRecord, target: State) -> None:
    """Add only the differences. Messages are restored by reference to their numbers, which are never used twice."""
    form = present.codec
    text = present.codec.record
    past = message_ranges.segments(text, target.fields)
    now = message_ranges.segments(text, present.fields)
    if past != now:
        runs = message_ranges.close(text, target.fields)
        message_ranges.refuse_many(text, runs, present.fields.get(SEGMENTS, b"[]"))
        changes.wipe()
        changes.reserved(SEGMENTS, runs)
    handled = {SEGMENTS, START, NEXT, OWNER, PARENT, LIFETIME, RESTORED, ITEMS}
    handled |= {name for name in (*present.fields, *target.fields) if is_kept(name)}
    # Remove expired fields too: if no field of the target expires, `#timed` is removed, and they would reappear.
    for name in sorted(present.all_stored.keys() - target.fields.keys() - handled):
        changes.reserved(name, None)
    for name, value in target.fields.items():
        if name not in handled and present.raw(name) != value:
            changes.reserved(name, carried(form, form, name, value))


def carried(form: Codec, to: Codec, name: bytes, value: bytes) -> bytes:
    """Convert a stored field to the form in which another record, or another version of this one, stores it."""
    return form.carry(value, codec.place_of(name), to) if is_value(name) else value


_PARTS = ("fields", "bytes", "phase", "expires", "messages")


async def export_state(context: RecordContext, *, messages: bool) -> dict[str, Any]:
    """Read the state of a record, with its messages if asked."""
    context.allow("read", MOVES, *([MESSAGES] if messages else []))
    entry = await context.read(fresh=True)
    if not messages:
        return export(entry, context.fields(entry), None)
    # The record is read once for fields and messages: a second read might show another conversation.
    entry = await read_path.load_whole(context.tiers, context.keys, entry)
    runs = message_ranges.segments(context.text, entry.fields)
    shown = (await shown_messages.shown_in(context.tiers, context.keys, entry, runs)).messages()
    return export(entry, context.fields(entry), shown)


async def restore_state(context: RecordContext, state: Mapping[str, Any]) -> int:
    """Replace the state of a record; the new version."""
    context.allow("write", None)
    changes = context.changes()
    changes.whole()
    clock = context.tiers.clock
    await clock.know()
    restore(changes, state, clock.now())
    return (await context.commit(changes.draft("restore"))).version


def export(entry: CachedRecord, fields: dict[str, Any], messages: list[Message] | None) -> dict[str, Any]:
    """The state as JSON: fields, phase, bytes in base64 and deadlines (if there are any), and messages (if given)."""
    phase = entry.fields.get(PHASE)
    state: dict[str, Any] = {
        **as_text.apart(fields),
        "phase": None if phase is None else phase.decode("utf-8", "surrogatepass"),
    }
    if entry.expires != field_ttl.NEVER:
        ends = {name: field_ttl.split(data)[0] for name, data in entry.fields.items() if name[:1] != b"#"}
        state["expires"] = {codec.decode_key(name): end for name, end in ends.items() if end != field_ttl.NEVER}
    if messages is not None:
        # Each message gets the time of its commit; otherwise a restore would give it the time of the restore.
        dated = ({"timestamp": each.timestamp} if each.timestamp is not None else {} for each in messages)
        state["messages"] = [each.to_dict() | time for each, time in zip(messages, dated, strict=True)]
    return state


def restore(changes: Changes, state: Mapping[str, Any], now: float) -> None:
    """Make `changes` replace a record's state by this one. Raises one InvalidValue that names every bad entry."""
    if not isinstance(state, Mapping):
        raise InvalidValue(f"a state to restore is a mapping, as export_state returns it, not a {type(state).__name__}")
    if "fields" not in state:
        state = {"fields": state}  # this is a result of get_all(); an export always has `fields`
    bad: list[str] = []

    def tried(place: str, step: Callable[..., Any], *given: Any) -> None:
        try:
            step(*given)
        except InvalidValue as error:
            bad.append(f"{place}: {error}")

    bad += [f"{part!r:.80}: none of {', '.join(_PARTS)}" for part in state if part not in _PARTS]
    fields = _part(state, "fields", Mapping, bad)
    try:
        fields = as_text.together(fields, _part(state, "bytes", Mapping, bad))
    except InvalidValue as error:
        bad.append(f"bytes: {error}")
    expires = _part(state, "expires", Mapping, bad)
    messages = _part(state, "messages", list, bad)
    changes.clear(messages="messages" in state)
    for key, value in fields.items():
        end = expires.get(key)
        if end is None:
            tried("fields", changes.set, key, value)
        elif isinstance(end, bool) or not isinstance(end, (int, float)) or not 0 <= end < 1e12:
            bad.append(f"expires[{key!r:.80}]: {end!r:.80} is not a time in seconds since 1970")
        elif end > now:
            tried("fields", partial(changes.set, until=float(end)), key, value)
    bad += [f"expires[{key!r:.80}]: there is no such field" for key in expires if key not in fields]
    for at, message in enumerate(messages):
        tried(f"messages[{at}]", changes.append, message)
    if "phase" in state:
        tried("phase", changes.phase, state["phase"])
    if bad:
        raise InvalidValue(f"nothing was restored, {len(bad)} bad: " + "; ".join(bad))


def _part(state: Mapping[str, Any], part: str, kind: type, bad: list[str]) -> Any:
    found = state.get(part, kind() if kind is list else {})
    if isinstance(found, kind):
        return found
    bad.append(f"{part}: a {type(found).__name__}, not a {kind.__name__.lower()}")
    return [] if kind is list else {}


async def fork(
    context: RecordContext,
    new_id: str,
    version: int | None,
    branch: str | None,
    *,
    note: Callable[[Changes], None] | None = None,
) -> int:
    """Start another record from this one's state, or that of one of its branches; the new record's version.

    `note` adds to the new record's first commit.
    """
    tiers = context.tiers
    target = context.store.keys.of(Ref(context.ref.scope, new_id))
    context.allow("read", None)
    context.allow("write", None, ref=target.ref)
    changes = context.changes()
    if note is not None:
        note(changes)
    async with ForkUnderWay(tiers, context.keys, target) as under_way:
        draft = await plan_fork(tiers, context.keys, target, changes, version, branch)
        context.allow("read", *_copied(draft))
        context.allow_operations(draft, target.ref)
        under_way.require_time()
        done = await write_path.commit(tiers, target, draft)
    if under_way.over:
        # An erasure of the source may no longer have waited for this fork; then SQL has a note of the erasure.
        await read_path.reach(tiers, target)
        if noted := await tiers.port.sql(partial(tiers.cold.pending, names=[target.ref.text])):
            await lifecycle.finish(tiers, noted)
            raise Deleted(f"{context.text[:200]}: was erased while it was forked")
    return done.version


async def plan_fork(
    tiers: Tiers,
    keys: RecordKeys,
    target: RecordKeys,
    changes: Changes,
    version: int | None,
    branch: str | None = None,
) -> Draft:
    """The first change of a record that starts with this one's state. Messages are shared; a branch's own are copied.

    Copies do not overwrite changes that are already in `changes`.
    """
    source = keys.ref.text
    form = tiers.codec_of(source)
    to = tiers.codec_of(target.ref.text)
    if branch is None:
        state = await _past(tiers, keys, version)
        begun = items = state.version
        runs = message_ranges.segments(source, state.fields)
        following = int(state.fields.get(NEXT, b"0"))
    else:
        found = await branches.state_at(tiers, keys, branch, version)
        state = found.state
        begun = found.base
        shown = branches.messages_of(source, found)
        runs = shown.runs(target.ref.text)
        following = shown.following
        changes.copy_messages(shown.copied(form, to))
        items = await _copy_items(tiers, keys, to, changes, branch, found)
    if state.deleted:
        raise deleted_error(keys.ref.text, state.version, state.fields[DELETED])
    # The source is archived first, so that a fork of a record that is being erased is noted in SQL and erased too.
    # Otherwise forks of forks could be made as fast as they are erased.
    if await tiers.port.sql(partial(tiers.cold.pending, names=[keys.ref.text])):
        raise Deleted(f"{keys.ref.text[:200]}: is being erased")
    fields = state.fields
    own = {SEGMENTS, START, PARENT, DELETED, LIFETIME, RESTORED, ITEMS, *changes.fields}
    for name, value in fields.items():
        # Inputs wait for a turn of the source, and its tokens are not used again by the fork.
        if name not in own and name[:2] not in (INBOX, USAGE):
            answer = name[:2] == REQUEST
            data = _answer(form, to, name, value, state.version) if answer else carried(form, to, name, value)
            changes.reserved(name, data)
    if ITEMS in fields:
        # From its first version on, the fork shows its source's items; the note of its origin names the source.
        changes.reserved(ITEMS, b"1" if items else b"1 0")
        begun = items or begun
    changes.reserved(PARENT, f"{source}@{begun}".encode())
    if following:
        data = message_ranges.dump(runs)
        message_ranges.refuse_many(source, data)
        changes.reserved(SEGMENTS, data)
        changes.reserved(START, b"%d" % following)
    # The id must be unused, even by a deleted record, whose own message numbers would mix with the shared ones. The
    # owner is copied as one of the fields.
    return changes.draft("fork", expected=0)._replace(owner="")


def _answer(form: Codec, to: Codec, name: bytes, value: bytes, version: int) -> bytes:
    """The stored answer to a request, as a fork of this version keeps it: older than all answers of the fork itself.

    Its version becomes negative. Otherwise it would seem newer than the fork's own answers, and those would be dropped
    first.
    """
    key = codec.decode_key(name)
    before, *rest = form.decode(value, key)
    return to.encode([before - version, *rest], key)


async def _copy_items(
    tiers: Tiers, keys: RecordKeys, to: Codec, changes: Changes, branch: str, found: BranchState
) -> int:
    """Copy items that the branch changed; returns the version of the record whose items it inherits (0: none)."""
    form = tiers.codec_of(keys.ref.text)
    below, own = await branches.items_of(tiers, keys, branch, found)
    for name, frame in own.items():
        changes.items.put_stored(name, frame and form.carry(frame, codec.item_name(name), to))
    return below


async def _past(tiers: Tiers, keys: RecordKeys, version: int | None) -> State:
    present = await read_path.read(tiers, keys, fresh=True)
    if present.version == 0:
        raise NotFound(f"{keys.ref.text[:200]}: there is nothing to fork")
    return await history.state_at(tiers, keys, present.version if version is None else version)


def _copied(draft: Draft) -> list[str]:
    """The fields that a fork copies from its source, for the policy."""
    names = [field for _, field in written(draft.operations) if field is not None]
    shown = any(name == SEGMENTS for _, name, _ in draft.operations)
    layered = any(name == ITEMS for _, name, _ in draft.operations)
    names += [ALL_ITEMS] if layered and ALL_ITEMS not in names else []
    return [*names, *([MESSAGES] if shown and MESSAGES not in names else [])]
