"""Places that tenants take in a worker. Law: whoever has many leaves as many free, so that one more tenant finds one.

A tenant that waits a lot, for leases or turns, would else take all places with a few bytes each. One alone gets half of
them, two a third each. Callers of all tenants have no share: they may do everything anyway. Source: A. Choudhury and
E. Hahne, "Dynamic queue length thresholds for shared-memory packet switches" (1998).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.exceptions import HTTPException

from distributed_state.programs.service.callers import Caller


class Shares:
    """So many places. `what` is for the text of the error."""

    def __init__(self, places: int, what: str) -> None:
        self._places = places
        self._what = what
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._taken.total()

    def take(self, caller: Caller) -> None:
        """Take a place, until `leave`. Raises HTTPException if there is none, or none for this tenant."""
        free = self._places - self._taken.total()
        if free <= 0 or (caller.prefix and self._taken[caller.prefix] >= free):
            own = f", {self._taken[caller.prefix]} of them for {caller.prefix!r:.80}" if caller.prefix else ""
            raise HTTPException(
                429, f"this worker already has {self._places - free} of {self._places} {self._what}{own}"
            )
        self._taken[caller.prefix] += 1

    def leave(self, caller: Caller) -> None:
        """Give a place back."""
        self._taken[caller.prefix] -= 1
        if not self._taken[caller.prefix]:
            del self._taken[caller.prefix]

    @contextmanager
    def one(self, caller: Caller) -> Iterator[None]:
        """Have a place meanwhile. Raises HTTPException."""
        self.take(caller)
        try:
            yield
        finally:
            self.leave(caller)
