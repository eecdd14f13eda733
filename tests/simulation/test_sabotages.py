"""The simulator finds the removal of each guard that this project once lacked, from a recorded seed."""

from __future__ import annotations

import pytest

from tests.simulation.sabotages import SABOTAGES, Reached, search

RUNS = 30  # a change of the product or the simulator changes what a seed does; then one of the next seeds finds it


def test_there_are_enough() -> None:
    assert len(SABOTAGES) >= 40


# A default run replays one in sixteen, a wide run all.
EACH = [pytest.param(name, marks=[pytest.mark.wide] if at % 16 else []) for at, name in enumerate(SABOTAGES)]


@pytest.mark.parametrize("name", EACH)
def test_a_sabotage_is_found(name: str) -> None:
    sabotage = SABOTAGES[name]
    found = search(sabotage, sabotage.seed, RUNS)
    assert found.reached, "its guard was not reached"
    assert found.result.broken, f"search another seed: python -m tests.simulation --sabotage '{name}' --runs 500"
    # The sabotage was found, not another fault.
    assert not sabotage.control(found.result.plan.seed).broken


def test_a_sabotage_ends_with_its_run() -> None:
    sabotage = SABOTAGES["a write whose answer was lost is applied again"]
    reached = Reached()
    broken = sabotage.run(sabotage.seed, reached)
    counted = reached.count
    assert broken.digest != sabotage.control(sabotage.seed).digest
    assert reached.count == counted
    assert broken.digest == sabotage.run(sabotage.seed, Reached()).digest
