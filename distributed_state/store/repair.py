"""Brings SQL up to Redis where it was restored older. Law: what neither has is named, and nothing else is given up.

Partition by partition; where SQL is not older nothing is done.

Design: section 14.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from distributed_state.tiers.assembly import Tiers
from distributed_state.values.journal import Segment
from distributed_state.values.model import unescape


@dataclass(frozen=True, slots=True)
class LostMessages:
    """Messages of a conversation that neither Redis nor SQL has: from number `first` to number `last`."""

    scope: str
    id: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Repaired:
    """What a repair brought to SQL, or would.

    `partitions` were looked at, `behind` are those where SQL was older. `commits` and `events` came one by one,
    `records` whole, at their present version, without the versions before. `aside` are commits in the quarantine: what
    came before them is not known, and a record that came whole has what they did. `branched` are commits that continue
    nothing that SQL or Redis has: each is in a branch of its record. `deleted` are (scope, id) of records
    that Redis only knows to have been deleted, or erased: they are deleted again; what was to be erased is to be
    erased once more. `lost` are messages that neither has; of the items of the records in `lost_items` some may be
    lost, as Redis keeps the newest alone. SQL refused something of the records in `refused`: that is in the
    quarantine, and not counted.
    """

    partitions: int = 0
    behind: tuple[int, ...] = ()
    records: int = 0
    commits: int = 0
    events: int = 0
    aside: int = 0
    branched: int = 0
    lost: tuple[LostMessages, ...] = ()
    deleted: tuple[tuple[str, str], ...] = ()
    lost_items: tuple[tuple[str, str], ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


Progress = Callable[[Repaired], None]


async def repair(tiers: Tiers, dry_run: bool, progress: Progress | None) -> Repaired:
    """All partitions of the namespace, one after the other."""
    done = Repaired()
    for partition in range(tiers.keys.partitions):
        found = await tiers.recovery.repair(partition, dry_run=dry_run)
        done = replace(done, partitions=done.partitions + 1)
        if found is not None:
            done = replace(
                done,
                behind=(*done.behind, partition),
                records=done.records + found.records,
                commits=done.commits + found.commits,
                events=done.events + found.events,
                aside=done.aside + found.aside,
                branched=done.branched + found.branched,
                lost=(*done.lost, *map(_lost, found.lost)),
                deleted=(*done.deleted, *map(_named, found.deleted)),
                lost_items=(*done.lost_items, *map(_named, found.lost_items)),
                refused=(*done.refused, *map(_named, found.refused)),
            )
        if progress is not None:
            progress(done)
    return done


def _lost(gap: Segment) -> LostMessages:
    return LostMessages(*_named(gap.source), gap.start, gap.stop - 1)


def _named(text: str) -> tuple[str, str]:
    scope, _, id = text.partition(":")
    return scope, unescape(id)
