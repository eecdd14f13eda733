"""When the journals that an archiver looks at would be full. Law: by what they gained between two looks, by our clock.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

from distributed_state.settings import Settings
from distributed_state.warm.answers import PartitionState

_APART = 1.0  # seconds between two looks: within less a burst would count as a rate
_WEIGHT = 0.5  # of the newer look


class _Look(NamedTuple):
    epoch: str
    moment: float
    fill: float
    rate: float  # of the fill, a second


class Filling:
    """How fast journals fill, by partition: what is written there, less what is archived."""

    def __init__(self, settings: Settings, monotonic: Callable[[], float]) -> None:
        self._settings = settings
        self._monotonic = monotonic
        self._looks: dict[int, _Look] = {}

    def note(self, places: Mapping[int, PartitionState]) -> None:
        """Note how partitions are now; those that are not among them are somebody else's."""
        now = self._monotonic()
        looks = {}
        for partition, place in places.items():
            fill = place.fill(self._settings)
            before = self._looks.get(partition)
            if before is None or before.epoch != place.epoch:
                looks[partition] = _Look(place.epoch, now, fill, 0.0)
            elif now - before.moment < _APART:
                looks[partition] = before
            else:
                rate = (fill - before.fill) / (now - before.moment)
                looks[partition] = _Look(place.epoch, now, fill, before.rate + _WEIGHT * (rate - before.rate))
        self._looks = looks  # as a whole: a scrape reads it in another thread

    def seconds_left(self) -> dict[int, float]:
        """Until each is full at the present rate and writes are refused there; infinite if it does not grow."""
        return {
            partition: max(0.0, 1.0 - look.fill) / look.rate if look.rate > 0 else (0.0 if look.fill >= 1 else inf)
            for partition, look in self._looks.items()
        }
