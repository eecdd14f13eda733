"""Places that tenants take in a worker. Law: whoever has many leaves as many free, so that one more tenant finds one.

A tenant that waits a lot, for leases or turns, would else take all places with a few bytes each. One alone gets half of
them, two a third each. Tenants that lie within a tenant share its part. Callers of all tenants have no share: they may
do everything anyway. Source: A. Choudhury and E. Hahne, "Dynamic queue length thresholds for shared-memory packet
switches" (1998).
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
        self._all = 0
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._all

    def take(self, caller: Caller) -> None:
        """Take a place, until `leave`. Raises HTTPException if there is none, or none for this tenant."""
        free = self._places - self._all
        most = max(caller.tenants, key=self._taken.__getitem__, default="")
        if free <= 0 or (most and self._taken[most] >= free):
            own = f", {self._taken[most]} of them for {most!r:.80}" if most else ""
            raise HTTPException(
                429, f"this worker already has {self._places - free} of {self._places} {self._what}{own}"
            )
        self._all += 1
        self._taken.update(caller.tenants)

    def leave(self, caller: Caller) -> None:
        """Give a place back."""
        self._all -= 1
        for each in caller.tenants:
            self._taken[each] -= 1
            if not self._taken[each]:
                del self._taken[each]

    @contextmanager
    def one(self, caller: Caller) -> Iterator[None]:
        """Have a place meanwhile. Raises HTTPException."""
        self.take(caller)
        try:
            yield
        finally:
            self.leave(caller)
