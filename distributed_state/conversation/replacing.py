"""Removes messages: the last one, or all after a given one. Law: a change removes exactly the messages that were read.

Removed messages are not erased: earlier versions still show them, and their numbers are not used again. A session's
runs of numbers say which messages it shows; a change that removes messages expects these runs to be unchanged.

Design: section 11.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from distributed_state.conversation.window import Summary
from distributed_state.errors import Conflict, InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records import messages
from distributed_state.records.access import MESSAGES
from distributed_state.records.context import Note, RecordContext
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.values import message_ranges
from distributed_state.values.journal import Segment
from distributed_state.values.model import NEXT, SEGMENTS, START, SUMMARY, Message

_SHOWN = (NEXT, START, SEGMENTS, SUMMARY)


async def pop(context: RecordContext, durability: str | None, *, note: Note | None = None) -> Message | None:
    """Remove the last message and return it, None if there is none."""
    context.allow("read", MESSAGES)
    fresh = False

    async def once() -> Message | None:
        nonlocal fresh
        shown = await messages.chosen(context.tiers, context.keys, messages.Page(last=1), fresh=fresh)
        if not shown.runs and not fresh:
            shown = await messages.chosen(context.tiers, context.keys, messages.Page(last=1), fresh=True)
        fresh = True
        if not shown.runs:
            return None
        message = shown.messages()[-1].looked_at()
        runs = message_ranges.segments(context.text, shown.entry.fields)
        kept = message_ranges.part(runs, 0, message_ranges.count(runs) - 1)
        await _commit(context, shown.entry, kept, (), "pop", durability, note)
        return message

    return await write_path.until_no_conflict(context.tiers, once)


async def replace(
    context: RecordContext,
    new: Iterable[Message | dict[str, Any]],
    after: int | None,
    expect_last: int | None,
    durability: str | None,
    *,
    note: Note | None = None,
) -> int:
    """Replace all messages after the number `after` by these; returns the new version."""
    given = [*new]
    for name, number in (("after", after), ("expect_last", expect_last)):
        if number is not None and (type(number) is not int or number < 0):
            raise InvalidValue(f"{name} is the number of a message or None, not {number!r:.80}")
    if after is not None or expect_last is not None:
        context.allow("read", MESSAGES)  # a refusal would reveal which messages are shown
    fresh = False

    async def once() -> int | Conflict:
        nonlocal fresh
        entry = await read_path.read(context.tiers, context.keys, fresh=fresh)
        runs = [] if entry.deleted else message_ranges.segments(context.text, entry.fields)
        refusal = _refusal(context, entry, runs, after, expect_last)
        kept = [] if after is None else _up_to(runs, after)
        vain = not given and kept == runs
        if (refusal is not None or vain) and not fresh:
            fresh = True
            return await once()  # hot may be stale
        fresh = True
        if refusal is not None:
            return refusal
        if vain:
            return entry.version
        return await _commit(context, entry, kept, given, "replace", durability, note)

    done = await write_path.until_no_conflict(context.tiers, once)
    if isinstance(done, Conflict):
        raise done
    return done


def _up_to(runs: Sequence[Segment], number: int) -> list[Segment]:
    """The runs up to the message of this number; [] if they do not show it."""
    at = next((at for at, run in enumerate(runs) if run.start <= number < run.stop), None)
    return [] if at is None else [*runs[:at], Segment(runs[at].source, runs[at].start, number + 1)]


def _refusal(
    context: RecordContext, entry: CachedRecord, runs: Sequence[Segment], after: int | None, expect_last: int | None
) -> Conflict | None:
    if after is not None and not _up_to(runs, after):
        return Conflict(f"{context.text[:200]}: shows no message {after} any more", version=entry.version)
    if expect_last is not None and (not runs or runs[-1].stop - 1 != expect_last):
        return Conflict(f"{context.text[:200]}: its last message is not {expect_last} any more", version=entry.version)
    return None


async def _commit(
    context: RecordContext,
    entry: CachedRecord,
    kept: Sequence[Segment],
    new: Iterable[Message | dict[str, Any]],
    kind: str,
    durability: str | None,
    note: Note | None,
) -> int:
    """Commit these runs followed by the new messages, if the record still shows the same messages as this entry."""
    changes = context.changes()
    shown = message_ranges.shown(kept, entry.fields)
    message_ranges.refuse_many(context.text, shown[SEGMENTS], entry.fields.get(SEGMENTS, b"[]"))
    for name, data in shown.items():
        changes.reserved(name, data)
    summary = entry.fields.get(SUMMARY)
    if summary is not None and not _stands(Summary.parse(summary, entry.codec), kept):
        changes.reserved(SUMMARY, None)  # the summary is of removed messages
    for message in new:
        changes.append(message)
    if note is not None:
        note(entry, changes)
    draft = changes.draft(
        kind, expected=None if note is None else entry.version, epoch=entry.epoch,
        expectations=[(name, entry.fields.get(name)) for name in _SHOWN], durability=durability,
    )  # fmt: skip
    return (await context.commit(draft)).version


def _stands(summary: Summary, kept: Sequence[Segment]) -> bool:
    """Whether all summarized messages are still shown: the end of the summary is not after the end of these runs."""
    return bool(kept) and summary.stop <= kept[-1].stop
