"""When a replica asks for what may wait: for all of it at common moments. Law: never later than it was to be.

To wake a server that has nothing to do costs it more than most commands do, so a replica at rest wakes it once for the
proof of its link, its heartbeat, its claims and its look at journals. The moments of different replicas lie apart.

Design: section 12.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from distributed_state.values import chance

SECONDS = 3.0  # between two moments
_CALM = 300  # so many replicas have rounds of that length; more of them as many together, if they can
_RAREST = 3.0  # but none that are longer than so many times that
_EARLY = 0.05  # a timer may be that early, and what is due so soon goes along


class Rounds:
    """The common moments of one replica, by its monotonic clock."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._phase = chance.source.random() * SECONDS
        self.seconds = SECONDS  # between two moments, in a fleet of the size that was heard of last

    def spread(self, members: int) -> None:
        """In a large fleet the moments lie further apart: so more replicas wake the server no more often."""
        self.seconds = SECONDS * min(max(members / _CALM, 1.0), _RAREST)

    def pause(self, seconds: float) -> float:
        """Seconds until the last common moment within so many; all of them if that is less than a round."""
        if seconds < self.seconds:
            return seconds
        now = self._monotonic()
        return self._count(now + seconds) * self.seconds + self._phase - now

    def due(self, at: float) -> bool:
        """Whether it is time for what was to be at this moment, or is in an instant."""
        return self._monotonic() + _EARLY >= at

    def passed(self, since: float) -> bool:
        """Whether a common moment has come since then."""
        return self._count(self._monotonic()) > self._count(since)

    @property
    def left(self) -> float:
        """Seconds until the next common moment."""
        return self.pause(self.seconds)

    def _count(self, at: float) -> int:
        return math.floor((at + _EARLY - self._phase) / self.seconds)
