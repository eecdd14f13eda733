"""Shortens the schedule of a failure. Law: leaving an operation or a fault out changes none of the others."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.plan import Plan
from tests.simulation.run import Result, Run


def promise(broken: str) -> str:
    """The promise that a verdict names; a shorter schedule must break the same one."""
    return broken.partition(":")[0]


def shrink(result: Result, progress: Callable[[str], None] = lambda _: None) -> Result:
    """The same failure, with as few operations and faults as the search can reach."""
    wanted = promise(result.broken)
    best = result
    size = max(1, len(best.plan.names) // 2)
    while True:
        at = 0
        while at < len(best.plan.names):
            part = best.plan.names[at : at + size]
            found = Run(best.plan.without(*part)).result()
            if promise(found.broken) == wanted:
                best = found
                progress(f"{len(best.plan.names)} operations and faults left")
            else:
                at += size
        if size == 1:
            return best
        size = max(1, size // 2)


def shown(plan: Plan) -> list[str]:
    """The remaining contents of a plan, ordered by time; operations in the order in which clients begin them."""
    faults = [
        f"{each.at:7.3f} s  {each.kind}, for {each.lasts:.3f} s, replica {each.who + 1}, {each.amount:.2f}"
        for each in sorted(plan.faults, key=lambda each: each.at)
        if f"f{each.number}" not in plan.left_out
    ]
    operations = [
        f"{each.name}: {each.kind} of s{each.record} by client {each.client}, {each.pause:.3f} s after its last"
        for each in plan.operations
        if f"o{each.number}" not in plan.left_out
    ]
    return faults + operations
