"""Makes a record what it was. Law: history is not rewritten; a rollback is a new version.

States form a path. A rollback is no step of it: each says which version's state it is, and the next step back goes on
from that one. Answered requests are not part of a state: a rollback leaves them as they are.

Design: section 11.
"""

from __future__ import annotations

from functools import partial

from distributed_state.errors import Deleted, InvalidValue, NotFound
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records import history
from distributed_state.records.context import Note, RecordContext
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.changes import Changes
from distributed_state.values import codec, message_ranges
from distributed_state.values.codec import Codec
from distributed_state.values.journal import State
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import (
    ITEMS,
    LIFETIME,
    NEXT,
    OWNER,
    PARENT,
    REQUEST,
    RESTORED,
    SEGMENTS,
    START,
    is_value,
)
from distributed_state.warm.answers import Draft


async def rollback(
    context: RecordContext, steps: int | None, label: str | None, version: int | None, *, note: Note | None = None
) -> int:
    """Make the record what it was; the new version."""
    context.allow("write", None)

    async def once() -> int:
        draft = await plan(context.tiers, context.keys, context.changes(), steps, label, version, note)
        return (await context.commit(draft)).version

    return await write_path.until_no_conflict(context.tiers, once)


async def plan(
    tiers: Tiers,
    names: RecordKeys,
    changes: Changes,
    steps: int | None,
    label: str | None,
    version: int | None,
    note: Note | None = None,
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
        back = partial(tiers.cold.step_back, names.ref.text, present.version, steps)
        version = await write_path.archived(tiers, names, back)
    if label is not None:
        matching = [each.version for each in await history.named(tiers, names) if each.label == label]
        if not matching:
            raise NotFound(f"{names.ref.text[:200]}: no checkpoint {label!r}")
        version = matching[-1]
    assert version is not None
    target = await history.state_at(tiers, names, version)
    if target.deleted:
        raise Deleted(f"{names.ref.text[:200]}: was deleted at version {version} already", version=version)
    _restore(changes, present, target)
    if ITEMS in present.fields and await _items_differ(tiers, names, present, target):
        changes.layer(version if ITEMS in target.fields else 0)
    changes.reserved(RESTORED, b"%d" % version)  # from there the next step back goes on
    changes.undelete()  # and a change even where nothing differs
    changes.emit("session.rollback", {"version": version})
    if note is not None:
        note(present, changes)
    return changes.draft("rollback", expected=present.version, epoch=present.epoch, deleted="revive")


async def _items_differ(tiers: Tiers, names: RecordKeys, present: CachedRecord, target: State) -> bool:
    """Whether items may be others now than they were: where they are not, the newest stay in Redis."""
    if present.fields[ITEMS] != target.fields.get(ITEMS):
        return True
    return await tiers.port.sql(tiers.cold.items_changed_since, names.ref.text, target.version)


def _restore(changes: Changes, present: CachedRecord, target: State) -> None:
    """Only what differs. Messages come back by reference: their numbers are never used twice."""
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
    # A request that was answered stays answered: forgotten, it would be applied again when its caller repeats it.
    handled |= {name for name in (*present.fields, *target.fields) if name[:2] == REQUEST}
    # Expired fields go too: if the target has none that expire, `#timed` goes, and without it they would reappear.
    for name in sorted(present.all_stored.keys() - target.fields.keys() - handled):
        changes.reserved(name, None)
    for name, value in target.fields.items():
        if name not in handled and present.raw(name) != value:
            changes.reserved(name, carried(form, form, name, value))


def carried(form: Codec, to: Codec, name: bytes, value: bytes) -> bytes:
    """A stored field as another record, or this one at another version, stores it."""
    return form.carry(value, codec.decode_key(name), to) if is_value(name) else value
