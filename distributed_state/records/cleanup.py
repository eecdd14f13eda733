"""Hides old messages of a conversation. Law: the server's time of each commit decides, and history keeps them.

Design: section 11.
"""

from __future__ import annotations

from distributed_state.errors import InvalidValue
from distributed_state.records.access import MESSAGES
from distributed_state.records.context import RecordContext
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.changes import Changes
from distributed_state.values import message_ranges
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import SUMMARY
from distributed_state.warm.answers import Draft


async def cleanup(context: RecordContext, days: float) -> int:
    """Hide what was committed more than so many days ago; how many messages."""
    if isinstance(days, bool) or not isinstance(days, (int, float)) or not 0 <= days < 1e6:
        raise InvalidValue(f"days is a number from 0 on, not {days!r:.80}")
    context.allow("write", MESSAGES)
    tiers = context.tiers
    await tiers.clock.know()
    before = tiers.clock.now() - days * 86400

    async def once() -> int:
        draft, hidden = await plan(tiers, context.keys, context.changes(), before)
        if draft is not None:
            await context.commit(draft)
        return hidden

    return await write_path.until_no_conflict(tiers, once)


async def plan(tiers: Tiers, names: RecordKeys, changes: Changes, before: float) -> tuple[Draft | None, int]:
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
    for name, value in message_ranges.shown(kept, present.fields).items():
        changes.reserved(name, value)
    changes.reserved(SUMMARY, None)  # it holds what they said
    draft = changes.draft("cleanup")
    draft.expected = present.version
    draft.epoch = present.epoch
    return draft, hidden
