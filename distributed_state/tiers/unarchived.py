"""What the journals hold that SQL may not have yet. Law: to be read before SQL is, and never a part of what was there.

Who reads SQL afterwards has all that was acknowledged before: what is archived in between is in both.

Design: section 9.
"""

from __future__ import annotations

from distributed_state.cold import listings
from distributed_state.cold.record_index import Parsed
from distributed_state.cold.values import Batch, Wanted
from distributed_state.tiers.assembly import Tiers
from distributed_state.warm.answers import PartitionState

_AT_ONCE = 2000  # entries of a journal in one answer
_BYTES_TOGETHER = 2**22


async def unarchived(tiers: Tiers, wanted: Wanted) -> list[Parsed]:
    """What the entries of all journals that are not noted as archived do to records that may be meant.

    Up to their ends as they are now. What they say is forgotten with each answer: a fleet's journals are gigabytes.
    Raises UnknownStep.
    """
    partitions = tiers.warm.partitions
    every = [tiers.keys.partition(each) for each in range(tiers.keys.partitions)]
    places = await partitions.states(every)
    others = tiers.archiver.of_other_lives(places)
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
                # Another life has begun since: what it goes on with is in SQL, and what it has is newer than our call.
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
