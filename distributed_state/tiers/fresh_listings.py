"""The changes in the journals that SQL may lack, for listings with `fresh=True`. Law: journals are read before SQL.

A listing that reads SQL afterwards then has all commits that were acknowledged before it began. Commits archived in
between are in both sources.

Design: section 9.
"""

from __future__ import annotations

from distributed_state.cold import listings
from distributed_state.cold.record_index import Parsed
from distributed_state.cold.values import Batch, Wanted
from distributed_state.tiers.assembly import Tiers
from distributed_state.warm.answers import PartitionState

_AT_ONCE = 2000  # journal entries in one answer
_BYTES_TOGETHER = 2**22


async def unarchived_changes(tiers: Tiers, wanted: Wanted) -> list[Parsed]:
    """Parse the unarchived entries of all journals, up to their present ends, for records that may match.

    Other changes are dropped while reading, because a fleet's journals are gigabytes. Raises UnknownOperation.
    """
    partitions = tiers.warm.partitions
    every = [tiers.keys.partition(each) for each in range(tiers.keys.partitions)]
    places = await partitions.states(every)
    others = tiers.archiver.with_other_data(places)
    for each in others:
        await tiers.start(each)
    if others:
        places |= await partitions.states([tiers.keys.partition(each) for each in others])
    found: list[Parsed] = []
    left = {each: place.archived for each, place in places.items() if place.offset > place.archived}
    while left:
        some = _together(left, places)
        asked = [(tiers.keys.partition(each), left[each] + 1) for each in some]
        for each, journal in zip(some, await partitions.journals(asked, _AT_ONCE), strict=True):
            place = places[each]
            if journal.epoch != place.epoch:
                # A new epoch began meanwhile: SQL has the commits of earlier epochs, and commits of the new one are
                # later than this call.
                del left[each]
                continue
            found += listings.parsed(Batch(each, place.epoch, place.archived, journal.onward), wanted)
            left[each] = journal.onward[-1].offset if journal.onward else place.offset
            if left[each] >= place.offset:
                del left[each]
    return found


def _together(left: dict[int, int], places: dict[int, PartitionState]) -> list[int]:
    """Partitions whose journals are read in one exchange."""
    some: list[int] = []
    size = 0
    for each in left:
        some.append(each)
        size += places[each].waiting
        if size > _BYTES_TOGETHER:
            break
    return some
