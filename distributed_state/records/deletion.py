"""Deletes a record. Law: what stays is a tombstone, which a later commit may revive.

Design: section 15.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from distributed_state.errors import Deleted, NotFound
from distributed_state.settings import Settings
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.changes import Changes
from distributed_state.values.codec import Codec
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import DELETED, INITIALIZED, PHASE, Ref
from distributed_state.warm.answers import Draft


def tombstone(settings: Settings, codec: Codec, kind: str, *, expired: str = "") -> Draft:
    """The change that deletes a record, or ends a session that `expired` for this reason."""
    changes = Changes(settings, codec)
    changes.clear(messages=True, tags=True, items=True)
    changes.reserved(PHASE, None)
    changes.reserved(INITIALIZED, None)
    changes.reserved(DELETED, b"1")
    changes.set_lifetime(0, 0)
    if expired:
        changes.emit("session.expired", {"reason": expired})
    else:
        changes.emit("conversation.deleted", {})
    return changes.draft(kind)


async def delete(
    tiers: Tiers,
    names: RecordKeys,
    hooks: Sequence[Callable[[Ref], Awaitable[None]]],
    *,
    check: Callable[[int, bool], None] | None = None,
) -> int:
    """Delete a record that is there; the version of its tombstone. `hooks` are awaited if it was not deleted yet.

    `check` refuses a version, or one that is deleted; what it lets pass is deleted at that very version.
    """
    entry = await read_path.read(tiers, names, fresh=True)
    if entry.version == 0:
        raise NotFound(f"{names.ref.text[:200]}: there is nothing to delete")
    draft = tombstone(tiers.settings, entry.codec, "delete")
    if check is not None:
        check(entry.version, entry.deleted)
        draft.expected = entry.version
    if not entry.deleted:
        for hook in tuple(hooks):
            await hook(names.ref)
    try:
        return (await write_path.commit(tiers, names, draft)).version
    except Deleted:
        return (await read_path.read(tiers, names, fresh=True)).version
