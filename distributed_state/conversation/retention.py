"""Leaves old messages out of what a conversation shows. Law: what a summary has yet to stand for stays.

It is a commit like others: earlier versions show all of them, until a purge removes those versions and the messages.

Design: section 15.
"""

from __future__ import annotations

from distributed_state.conversation.window import Summary
from distributed_state.errors import Deleted
from distributed_state.records.context import RecordContext
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.values import message_ranges
from distributed_state.values.journal import Segment
from distributed_state.values.model import SUMMARY


async def leave_out(context: RecordContext, keep: int | None, before_ms: int | None) -> int:
    """Show the newest `keep` messages only, and none of before a time; how many it shows no more."""

    async def once() -> int:
        entry = await read_path.read(context.tiers, context.keys, fresh=True)
        if entry.deleted:
            return 0
        runs = message_ranges.segments(context.text, entry.fields)
        kept = runs if keep is None else message_ranges.last(runs, keep)
        if before_ms is not None:
            await write_path.reach(context.tiers, context.keys)
            kept = await context.tiers.port.sql(context.tiers.cold.since, context.text, kept, before_ms)
        data = entry.fields.get(SUMMARY)
        if data is not None and runs:
            kept = max(kept, _behind(runs, Summary.parse(data, entry.codec)), key=message_ranges.count)
        left_out = message_ranges.count(runs) - message_ranges.count(kept)
        if left_out:
            changes = context.changes()
            for name, value in message_ranges.shown(kept, entry.fields).items():
                changes.reserved(name, value)
            draft = changes.draft("retention")
            draft.expected, draft.epoch = entry.version, entry.epoch
            await context.commit(draft)
        return left_out

    try:
        return await write_path.until_no_conflict(context.tiers, once)
    except Deleted:
        return 0


def _behind(runs: list[Segment], summary: Summary) -> list[Segment]:
    """What has to stay for a summary: the last message that it stands for, by which it is known, and those after it."""
    if not summary.start <= runs[0].start < summary.stop:
        return []
    return message_ranges.between(runs, summary.stop - 2, None)
