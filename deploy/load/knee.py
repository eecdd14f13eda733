"""The highest rate that is carried, by bisection. Law: a knee has a rate above it, tried and not carried, within 5 %.

A search that ended without such a rate has found none: that no higher rate was tried says nothing about the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from deploy.load.measures import Result, carried

PRECISION = 1.05
PHASES = 30  # at most, attempts included: with phases of 4 s a search ends within two and a half minutes
_GROWTH = 2.0
_ATTEMPTS = 2


class Knee:
    """One search, from a first rate on.

    The rate is doubled until one is not carried, or halved until one is; then the distance is halved, on a logarithmic
    scale, until the bounds are within `PRECISION`. A rate has two attempts, because on a machine that others use too
    one moment is enough to miss the last.
    """

    def __init__(self, start: float, max_p99: float) -> None:
        self.steps: list[Result] = []
        self._rate = start
        self._max_p99 = max_p99
        self._carried = 0.0
        self._refused = inf

    @property
    def found(self) -> bool:
        """Whether the knee is known as closely as it is to be."""
        return self._refused <= self._carried * PRECISION

    @property
    def best(self) -> Result | None:
        """The step at the knee, or at the highest rate that was carried so far."""
        borne = (step for step in self.steps if carried(step, self._max_p99))
        return max(borne, key=lambda step: step.per_second, default=None)

    def search(self, measure: Callable[[float], Result]) -> Iterator[Result]:
        """Measure one rate after the other, each step as it is measured."""
        while not self.found and len(self.steps) < PHASES:
            for _ in range(_ATTEMPTS):
                self.steps.append(measure(self._rate))
                yield self.steps[-1]
                if carried(self.steps[-1], self._max_p99):
                    break
            if carried(self.steps[-1], self._max_p99):
                self._carried = self._rate
            else:
                self._refused = self._rate
            self._rate = self._next()

    def _next(self) -> float:
        if self._refused == inf:
            return self._carried * _GROWTH
        if not self._carried:
            return self._refused / _GROWTH
        return (self._carried * self._refused) ** 0.5
