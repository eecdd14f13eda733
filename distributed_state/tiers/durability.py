"""How durable a commit is before it is acknowledged. Law: a level that is not reached is always reported.

The level is that of the write itself, its batch or its turn; else that of the innermost `with store.durable()` of the
context for this store (`ambient`); else the store's setting. It is confirmed after the commit, in a separate exchange,
so commits at the level "memory" have no extra cost. A repeated request is also acknowledged only at its level.

Design: section 14.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from distributed_state.errors import DurabilityUnknown, StateError, Unavailable
from distributed_state.tiers import ambient
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.keys import PartitionKeys, RecordKeys
from distributed_state.values.levels import ARCHIVED, MEMORY, Level
from distributed_state.warm.answers import Committed
from distributed_state.warm.client import OpId
from distributed_state.warm.confirming import ABSENT, REACHED, Claim

log = logging.getLogger(__name__)
_LOST = "Redis lost it before it was archived"


class Applied(NamedTuple):
    """An applied commit, and its requested level."""

    keys: RecordKeys
    done: Committed
    op: OpId
    level: Level


def asked(tiers: Tiers) -> Level:
    """The current level for writes without a level of their own."""
    return ambient.level(tiers.settings) or tiers.confirming.level


async def admit(tiers: Tiers, level: Level) -> None:
    """Check, once, whether the servers can reach this level. Raises ConfigurationError if they never can.

    A temporary problem, such as a replica that is down, is only logged, because it may end at any time.
    """
    if level is MEMORY or level in tiers.confirming.admitted:
        return
    for missing in await tiers.warm.retry(tiers.confirming.possible, level):
        log.warning("durability %r cannot be reached now, and writes raise DurabilityUnknown: %s", level.text, missing)
    tiers.confirming.admitted.add(level)


async def ensure_durability(tiers: Tiers, keys: RecordKeys, done: Committed, op: OpId, level: Level) -> None:
    """Wait until the commit has its level.

    Raises DurabilityUnknown: the commit is applied, but may not have its level.
    """
    (missed,) = await ensure_many(tiers, [Applied(keys, done, op, level)])
    if missed is not None:
        raise missed


async def ensure_many(tiers: Tiers, many: Sequence[Applied]) -> list[DurabilityUnknown | None]:
    """Like `ensure_durability` for the commits of a batch, grouped by level; None for each that has its level."""
    results: list[DurabilityUnknown | None] = [None] * len(many)
    levels: dict[Level, list[int]] = {}
    for at, each in enumerate(many):
        if each.done.offset and each.level is not MEMORY:  # without an offset, the answer came from SQL
            levels.setdefault(each.level, []).append(at)
    for level, group in levels.items():
        reasons = await _reasons(tiers, level, [many[at] for at in group])
        for at, (reason, cause) in zip(group, reasons, strict=True):
            if reason:
                results[at] = _unknown(tiers, many[at].keys, many[at].done.version, level, reason, cause)
    return results


async def ensure_version(tiers: Tiers, keys: RecordKeys, epoch: str, version: int) -> None:
    """Like `ensure_durability` for the commit of a record's version, read under this epoch, at the current level.

    Used for the answer to a repeated request: the first one may have received DurabilityUnknown.
    """
    level = asked(tiers)
    if level is MEMORY:
        return
    await admit(tiers, level)
    reason, cause = ABSENT, None
    if level is not ARCHIVED:
        claim = Claim(keys.journal, keys.meta, keys.record, epoch, 0, "", version)
        reason, cause = (await _confirmed(tiers, level, [claim]))[0]
    if reason == ABSENT:
        # For the level `archived`: the record's version is in SQL when the whole partition is archived.
        try:
            await tiers.archiver.drain([keys.partition])
            archived = await tiers.port.sql(tiers.cold.has_version, keys.ref.text, version)
            reason = REACHED if archived else _LOST
        except Unavailable as error:
            reason, cause = f"it is not archived yet: {error}", error
    if reason:
        raise _unknown(tiers, keys, version, level, reason, cause)


async def ensure_event(tiers: Tiers, keys: PartitionKeys, epoch: str, offset: int, id: str) -> None:
    """Like `ensure_durability` for a lifecycle event that was written without a commit, at the current level."""
    level = asked(tiers)
    if level is MEMORY:
        return
    reason, cause = ABSENT, None
    try:
        if level is not ARCHIVED:
            reason, cause = await _event_confirmed(tiers, level, keys, epoch, f"{id.rpartition('.')[0]}.emit")
        if reason == ABSENT:
            await tiers.archiver.drain([keys.partition])
            archived = await tiers.port.sql(tiers.cold.event_archived, keys.partition, epoch, offset, id)
            reason = REACHED if archived else _LOST
    except Unavailable as error:
        reason, cause = f"it is not archived yet: {error}", error
    if reason:
        tiers.confirming.missed[level.text] += 1
        raise DurabilityUnknown(f"event {id} is written, but not {level.text}: {reason}") from cause


async def _event_confirmed(
    tiers: Tiers, level: Level, keys: PartitionKeys, epoch: str, event: str
) -> tuple[str, StateError | None]:
    tail = await tiers.warm.partitions.tail(keys)
    if tail is None or tail[0] != epoch:
        return ABSENT, None
    # Other entries may follow it: it is searched near the journal's end, and in SQL if it is too far back.
    claim = Claim(keys.journal, keys.meta, keys.meta, epoch, tail[1], event, 0, again=True)
    return (await _confirmed(tiers, level, [claim]))[0]


async def _reasons(tiers: Tiers, level: Level, many: Sequence[Applied]) -> list[tuple[str, StateError | None]]:
    """Why each commit may not have the level, and the error that caused it; '' for those that have it."""
    events = [tiers.warm.ops.event(each.op) for each in many]
    if level is ARCHIVED:
        return [await _archived(tiers, each, event) for each, event in zip(many, events, strict=True)]
    claims = [
        Claim(
            each.keys.journal, each.keys.meta, each.keys.record, each.done.epoch, each.done.offset, event,
            each.done.version, again=each.done.time_ms is None,
        )
        for each, event in zip(many, events, strict=True)
    ]  # fmt: skip
    found = await _confirmed(tiers, level, claims)
    for at, (reason, _) in enumerate(found):
        if reason == ABSENT:
            # The commit was archived and trimmed, or lost. If SQL has it, it has every level.
            found[at] = await _held(tiers, many[at], events[at])
    return found


async def _confirmed(tiers: Tiers, level: Level, claims: Sequence[Claim]) -> list[tuple[str, StateError | None]]:
    try:
        return [(reason, None) for reason in await tiers.confirming.confirm(claims, level)]
    except StateError as error:
        return [(str(error), error)] * len(claims)


async def _archived(tiers: Tiers, each: Applied, event: str) -> tuple[str, StateError | None]:
    try:
        await tiers.archiver.keep(each.keys, each.done, event)
    except Unavailable as error:
        return f"not yet: {error}", error
    return REACHED, None


async def _held(tiers: Tiers, each: Applied, event: str) -> tuple[str, StateError | None]:
    """Whether SQL has exactly this change. After a repeated send it may be too far back in the journal to be found."""
    try:
        if each.done.time_ms is None:
            await tiers.archiver.keep(each.keys, each.done, event)
            return REACHED, None
        if await tiers.port.sql(tiers.cold.holds, each.keys.ref.text, each.done.version, event):
            return REACHED, None
        refused = await tiers.port.sql(tiers.cold.refusal, event)
    except Unavailable as error:
        return f"{ABSENT}, and SQL cannot be asked: {error}", error
    return f"it is in quarantine: {refused}" if refused else _LOST, None


def _unknown(
    tiers: Tiers, keys: RecordKeys, version: int, level: Level, reason: str, cause: StateError | None
) -> DurabilityUnknown:
    tiers.confirming.missed[level.text] += 1
    text = f"{keys.ref.text[:200]}: version {version} is applied, but not {level.text}: {reason}"
    unknown = DurabilityUnknown(text, version=version)
    unknown.__cause__ = cause
    return unknown
