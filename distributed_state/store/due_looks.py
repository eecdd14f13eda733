"""Where nothing is due for a while: nothing was, and nothing was written since. Law: a look is spared, never put off.

Design: section 10.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

_SECONDS = 10.0  # whatever is said of it, what was not due is looked at again so soon


class _Look(NamedTuple):
    """When it was asked what is due, and when something will be; by our monotonic clock."""

    asked: float
    due: float


class DueLooks:
    """The last look at each partition that found nothing due. `resting`: since when nothing was written there."""

    def __init__(self, monotonic: Callable[[], float], resting: Callable[[int], float | None]) -> None:
        self._monotonic = monotonic
        self._resting = resting
        self._looks: dict[int, _Look] = {}

    def note(self, partition: int, asked: float, now_ms: bytes = b"0", later_ms: bytes = b"") -> None:
        """Nothing was due when that was asked; by the server's clock, something will be later, or nothing at all."""
        # Counted from when it was asked: the server's answer was made after that, so this is not too late.
        left = (float(later_ms) - int(now_ms)) / 1000 if later_ms else math.inf
        self._looks[partition] = _Look(asked, asked + left)

    def forget(self, partition: int) -> None:
        """Something is, or nobody knows."""
        self._looks.pop(partition, None)

    def nothing_due(self, partition: int) -> bool:
        """Whether a look would surely find nothing."""
        look, since = self._looks.get(partition), self._resting(partition)
        if look is None or since is None or since > look.asked:
            return False
        return self._monotonic() < min(look.due, look.asked + _SECONDS)
