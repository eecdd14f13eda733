"""One cost at several sizes, and the slope that it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Curve:
    """One cost at several sizes; `goal` is the highest that it may be at the largest."""

    name: str
    unit: str
    of: str
    sizes: list[int]
    costs: list[float]
    goal: float

    @property
    def slope(self) -> float:
        """By least squares, of the logarithms; 0 with one size."""
        xs, ys = [list(map(math.log, values)) for values in (self.sizes, self.shown)]
        x, y = sum(xs) / len(xs), sum(ys) / len(ys)
        spread = sum((each - x) ** 2 for each in xs)
        return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / spread if spread else 0.0

    @property
    def shown(self) -> list[float]:
        """The costs as a logarithmic axis can show them: nothing is less than a thousandth of the goal."""
        return [max(cost, self.goal / 1000) for cost in self.costs]

    @property
    def reached(self) -> bool:
        """Whether the cost at the largest size is within the goal."""
        return self.costs[-1] <= self.goal


def short(cost: float) -> str:
    """A cost in three digits, or whole if it has more."""
    return f"{cost:,.0f}" if cost >= 1000 else f"{cost:.3g}"


Measure = Callable[[Sequence[int], Progress], Curve | list[Curve]]


def flat(name: str, unit: str, of: str, sizes: Sequence[int], costs: Sequence[float], allowed: float = 1.5) -> Curve:
    """A cost that must not grow: at the largest size it may be so many times that at the smallest."""
    return Curve(name, unit, of, list(sizes), list(costs), allowed * costs[0])
