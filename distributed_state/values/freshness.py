"""Until when hot may answer. Law: an entry is as good as the subscription under which it was read, and ends with it.

The only value that changes: whoever proves a subscription moves its end on, whoever answers from hot looks at it. Each
subscription to a partition has one of its own, which is over for good when that ends.

Design: section 7.
"""

from __future__ import annotations

from typing import Any

from distributed_state.errors import InvalidValue


def check_staleness(seconds: Any) -> None:
    """Raise InvalidValue unless an answer may be so old."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise InvalidValue(f"max_staleness is a number of seconds from 0 on, not {seconds!r:.80}")


class Freshness:
    """`good_until` is a time by the monotonic clock; 0 before the first proof."""

    __slots__ = ("good_until", "partition")

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.good_until = 0.0

    @property
    def over(self) -> bool:
        """Whether the subscription has ended: what was read under it never answers again."""
        return self.good_until < 0

    def prove(self, until: float) -> None:
        """Answer until then, unless it is over."""
        if not self.over:
            self.good_until = max(self.good_until, until)

    def end(self) -> None:
        """Answer no more."""
        self.good_until = -1.0


UNHEARD = Freshness(-1)  # of what was read without a subscription
UNHEARD.end()
