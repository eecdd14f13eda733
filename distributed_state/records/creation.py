"""How a record begins. Law: of many replicas that try, one does it, and nothing that was set is overwritten.

Design: section 4.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from distributed_state.errors import Conflict
from distributed_state.records.context import RecordContext
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.changes import Changes
from distributed_state.values.model import INITIALIZED, OWNER, escape
from distributed_state.warm.answers import Draft

Defaults = Mapping[str, Any] | Callable[[], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]


def creation(context: RecordContext, changes: Changes, is_clear: bool) -> Draft:
    """The change that starts a record with these fields, which is refused if it exists."""
    if is_clear:
        changes.emit("conversation.created", {"is_clear": True})
    changes.undelete()
    changes.reserved(OWNER, context.owner.encode() or None)  # not the owner that it had before it was deleted
    draft = changes.draft("create")
    draft.deleted = "create"
    return draft


def revival(changes: Changes) -> Draft:
    """The change as a `write` that begins a deleted record again."""
    changes.undelete()
    draft = changes.draft("write")
    draft.deleted = "begin"
    return draft


async def initialize(context: RecordContext, defaults: Defaults, whose: str = "1") -> bool:
    """Set the fields that are not there yet, once for each whose defaults they are; True if this call did it."""
    mark = escape(whose).encode()
    values: Mapping[str, Any] | None = None
    entry = await context.read()

    async def once() -> bool:
        nonlocal values, entry
        done = entry.fields[INITIALIZED].split(b"\n") if INITIALIZED in entry.fields else []
        if mark in done and not entry.deleted:
            return False
        if values is None:
            found = defaults() if callable(defaults) else defaults
            values = await found if inspect.isawaitable(found) else found
        changes = context.changes()
        changes.set_many(values)
        for name in sorted(changes.fields.keys() & entry.fields.keys()):
            changes.leave(name)
        changes.reserved(INITIALIZED, b"\n".join([*done, mark]))
        draft = changes.draft("initialize")
        draft.expected = entry.version
        draft.epoch = entry.epoch
        try:
            await context.commit(draft)
        except Conflict:
            entry = await context.read(fresh=True)
            raise
        return True

    return await write_path.until_no_conflict(context.tiers, once)
