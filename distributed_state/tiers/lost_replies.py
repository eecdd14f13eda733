"""What became of a write whose reply was lost and that Redis forgot. Law: if SQL cannot say, it stays unknown.

A record that left Redis and came back has forgotten the op ids of before; SQL has them all. A write that is neither
there nor remembered was not applied and may be sent again. Reported as refused it could be made twice, so while SQL is
away the caller gets DurabilityUnknown.

Design: section 5.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from distributed_state.errors import ColdUnavailable, DurabilityUnknown, NotFound
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.keys import RecordKeys
from distributed_state.warm.answers import Committed
from distributed_state.warm.op_ids import LOST, OpId, Unsure

T = TypeVar("T")


async def resolve(tiers: Tiers, names: RecordKeys, op: OpId, unsure: Unsure) -> Committed | None:
    """The commit that a write became although the record does not remember it; None: it can be sent again."""
    if op.doubted and unsure.late:
        raise DurabilityUnknown(f"{names.ref.text[:200]}: {LOST} too long ago")
    done = await applied(tiers, names, op, unsure.epoch)
    if done is None:
        if unsure.late:
            await tiers.clock.ask()  # the answer came at once, so our estimate of the server's time is wrong
        op.since_ms = unsure.time_ms
    return done


async def applied(tiers: Tiers, names: RecordKeys, op: OpId, epoch: str) -> Committed | None:
    """What SQL knows of a write whose reply was lost; None: it was not applied."""
    if not op.doubted:
        return None
    event = tiers.warm.ops.event(op)
    version = await from_sql(names, op, tiers.port.sql(tiers.cold.applied, names.ref.text, event, op.since_ms))
    return Committed(version, epoch, None, None, 0) if version else None


async def from_sql(names: RecordKeys, op: OpId, asking: Awaitable[T]) -> T:
    """What only SQL knows. Raises DurabilityUnknown if it cannot say and the write's reply was lost."""
    try:
        return await asking
    except (ColdUnavailable, NotFound) as error:
        if not op.doubted:
            raise
        raise DurabilityUnknown(f"{names.ref.text[:200]}: {LOST}, and only SQL knows: {error}") from error
