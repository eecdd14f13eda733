"""Clocks that tests move by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sync_api import core


def moved_by_hand(turn: Any) -> Callable[[float], None]:
    """Has a turn measure by a clock that goes on by so many seconds when it is called, and stands still between."""
    passed = [0.0]
    clock = core(turn)._clock
    clock._clock = lambda: passed[0]
    held = clock.held
    clock.held = lambda waited: held(0.0)  # a lease measures for how long it waited by a clock of its own

    def go_on(seconds: float) -> None:
        passed[0] += seconds

    return go_on
