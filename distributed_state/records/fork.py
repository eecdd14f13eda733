"""Starts a record from another one's state. Law: messages are shared by reference, and none is copied.

A fork has the answers to requests that the state which it starts from had. It remembers none that came later.

Design: section 11.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from distributed_state.cold.values import BranchState
from distributed_state.errors import Deleted, NotFound
from distributed_state.records import branches, history, lifecycle
from distributed_state.records.access import ITEMS as ALL_ITEMS
from distributed_state.records.access import MESSAGES, written
from distributed_state.records.context import RecordContext
from distributed_state.records.lifecycle import ForkUnderWay
from distributed_state.records.rollback import carried
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.changes import Changes
from distributed_state.values import codec, message_ranges
from distributed_state.values.codec import Codec
from distributed_state.values.journal import State
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import (
    DELETED,
    ITEMS,
    LIFETIME,
    NEXT,
    PARENT,
    REQUEST,
    RESTORED,
    SEGMENTS,
    START,
    Ref,
)
from distributed_state.warm.answers import Draft


async def fork(
    context: RecordContext,
    new_id: str,
    version: int | None,
    branch: str | None,
    *,
    note: Callable[[Changes], None] | None = None,
) -> int:
    """Start another record from this one's state, or that of one of its branches; the new record's version.

    `note` puts something beside it into the new record's first commit.
    """
    tiers = context.tiers
    target = context.store.keys.of(Ref(context.ref.scope, new_id))
    context.allow("read", None)
    context.allow("write", None, ref=target.ref)
    changes = context.changes()
    if note is not None:
        note(changes)
    async with ForkUnderWay(tiers, context.keys, target) as under_way:
        draft = await plan(tiers, context.keys, target, changes, version, branch)
        context.allow("read", *_copied(draft))
        context.allow_steps(draft, target.ref)
        under_way.require_time()
        done = await write_path.commit(tiers, target, draft)
    if under_way.over:
        # An erasure of its source may have stopped waiting for this fork. SQL has a note of that.
        await write_path.reach(tiers, target)
        if noted := await tiers.port.sql(partial(tiers.cold.pending, names=[target.ref.text])):
            await lifecycle.finish(tiers, noted)
            raise Deleted(f"{context.text[:200]}: was erased while it was forked")
    return done.version


async def plan(
    tiers: Tiers,
    names: RecordKeys,
    target: RecordKeys,
    changes: Changes,
    version: int | None,
    branch: str | None = None,
) -> Draft:
    """The first change of a record that starts as this one was. Messages are shared; a branch's own are copied.

    What is in `changes` already is not overwritten by what is copied.
    """
    source = names.ref.text
    form = tiers.codec_of(source)
    to = tiers.codec_of(target.ref.text)
    if branch is None:
        state = await _past(tiers, names, version)
        begun = items = state.version
        runs = message_ranges.segments(source, state.fields)
        following = int(state.fields.get(NEXT, b"0"))
    else:
        found = await branches.state_at(tiers, names, branch, version)
        state = found.state
        begun = found.base
        shown = branches.messages_of(source, found)
        runs = shown.runs(target.ref.text)
        following = shown.following
        changes.copy_messages(shown.copied(form, to))
        items = await _copy_items(tiers, names, to, changes, branch, found)
    if state.deleted:
        raise Deleted(f"{names.ref.text[:200]}: deleted at version {state.version}", version=state.version)
    # Archived above, so that a fork of something that is being erased is noted there by now, and ends with it: else
    # forks of forks would be made as fast as they are erased.
    if await tiers.port.sql(partial(tiers.cold.pending, names=[names.ref.text])):
        raise Deleted(f"{names.ref.text[:200]}: is being erased")
    fields = state.fields
    own = {SEGMENTS, START, PARENT, DELETED, LIFETIME, RESTORED, ITEMS, *changes.fields}
    for name, value in fields.items():
        if name not in own:
            answer = name[:2] == REQUEST
            data = _answer(form, to, name, value, state.version) if answer else carried(form, to, name, value)
            changes.reserved(name, data)
    if ITEMS in fields:
        # Since its first version it shows those of its source, which are noted by what it was made from.
        changes.reserved(ITEMS, b"1" if items else b"1 0")
        begun = items or begun
    changes.reserved(PARENT, f"{source}@{begun}".encode())
    if following:
        data = message_ranges.dump(runs)
        message_ranges.refuse_many(source, data)
        changes.reserved(SEGMENTS, data)
        changes.reserved(START, b"%d" % following)
    # Not even a deleted record may be there: its own message numbers would stand between the shared ones. Its owner is
    # among the fields that are copied.
    return changes.draft("fork", expected=0)._replace(owner="")


def _answer(form: Codec, to: Codec, name: bytes, value: bytes, version: int) -> bytes:
    """The answer to a request as a fork of this version keeps it: older than every answer of the fork's own.

    Its first number is the version before it. Left as it is, it would seem younger than the fork's own answers, and
    those would be forgotten first.
    """
    key = codec.decode_key(name)
    before, *rest = form.decode(value, key)
    return to.encode([before - version, *rest], key)


async def _copy_items(
    tiers: Tiers, names: RecordKeys, to: Codec, changes: Changes, branch: str, found: BranchState
) -> int:
    """Put what a branch put itself; the version of its record whose items lie below, 0: of none."""
    form = tiers.codec_of(names.ref.text)
    below, own = await branches.items_of(tiers, names, branch, found)
    for name, frame in own.items():
        changes.items.put_stored(name, frame and form.carry(frame, codec.item_name(name), to))
    return below


async def _past(tiers: Tiers, names: RecordKeys, version: int | None) -> State:
    present = await read_path.read(tiers, names, fresh=True)
    if present.version == 0:
        raise NotFound(f"{names.ref.text[:200]}: there is nothing to fork")
    return await history.state_at(tiers, names, present.version if version is None else version)


def _copied(draft: Draft) -> list[str]:
    """What a fork hands on of the record that it is made from, as a policy is asked for it."""
    names = [field for _, field in written(draft.steps) if field is not None]
    shown = any(name == SEGMENTS for _, name, _ in draft.steps)
    layered = any(name == ITEMS for _, name, _ in draft.steps)
    names += [ALL_ITEMS] if layered and ALL_ITEMS not in names else []
    return [*names, *([MESSAGES] if shown and MESSAGES not in names else [])]
