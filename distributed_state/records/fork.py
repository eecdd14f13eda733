"""Starts a record from another one's state. Law: messages are shared by reference, and none is copied.

Design: section 11.
"""

from __future__ import annotations

from functools import partial

from distributed_state.errors import Deleted, NotFound
from distributed_state.records import history
from distributed_state.records.access import MESSAGES, written
from distributed_state.records.context import RecordContext
from distributed_state.records.rollback import carried
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.changes import Changes
from distributed_state.values import message_ranges
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import DELETED, LIFETIME, NEXT, PARENT, RESTORED, SEGMENTS, START, Ref
from distributed_state.warm.answers import Draft


async def fork(context: RecordContext, new_id: str, version: int | None) -> int:
    """Start another record from this one's state; the new record's version."""
    tiers = context.tiers
    target = context.store.keys.of(Ref(context.ref.scope, new_id))
    context.allow("read", None)
    context.allow("write", None, ref=target.ref)
    draft = await plan(tiers, context.keys, target, context.changes(), version)
    context.allow("read", *_copied(draft))
    context.allow_steps(draft, target.ref)
    draft.actor = context.actor
    draft.lifetime = context.lifetime
    return (await write_path.commit(tiers, target, draft)).version


async def plan(tiers: Tiers, names: RecordKeys, target: RecordKeys, changes: Changes, version: int | None) -> Draft:
    """The first change of a record that starts as this one was. Messages are shared, not copied."""
    present = await read_path.read(tiers, names, fresh=True)
    if present.version == 0:
        raise NotFound(f"{names.ref.text[:200]}: there is nothing to fork")
    state = await history.state_at(tiers, names, present.version if version is None else version)
    if state.deleted:
        raise Deleted(f"{names.ref.text[:200]}: deleted at version {state.version}")
    # Archived above, so that a fork of something that is being erased is noted there by now, and ends with it: else
    # forks of forks would be made as fast as they are erased.
    if await tiers.port.sql(partial(tiers.cold.pending, names=[names.ref.text])):
        raise Deleted(f"{names.ref.text[:200]}: is being erased")
    fields = state.fields
    form = tiers.codec_of(target.ref.text)
    for name, value in fields.items():
        if name not in (SEGMENTS, START, PARENT, DELETED, LIFETIME, RESTORED):
            changes.reserved(name, carried(present.codec, form, name, value))
    changes.reserved(PARENT, f"{names.ref.text}@{state.version}".encode())
    if int(fields.get(NEXT, b"0")):
        changes.reserved(SEGMENTS, message_ranges.close(names.ref.text, fields))
        changes.reserved(START, fields[NEXT])
    draft = changes.draft("fork")
    # Not even a deleted record may be there: its own message numbers would stand between the shared ones.
    draft.expected = 0
    return draft


def _copied(draft: Draft) -> list[str]:
    """What a fork hands on of the record that it is made from, as a policy is asked for it."""
    names = [field for _, field in written(draft.steps) if field is not None]
    shown = any(name == SEGMENTS for _, name, _ in draft.steps)
    return [*names, *([MESSAGES] if shown and MESSAGES not in names else [])]
