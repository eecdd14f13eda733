"""The checks of live turns have cases to check, in most runs."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.live import CHECKS
from tests.simulation.plan import SHAPES, Plan
from tests.simulation.run import Run

SELDOM = "fenced"  # a holder that streams without knowing that it lost its lock: the shape of a sabotage has such cases
RARE = {"kept though stopped", "abandoned", "restarted", "truncated", "stopped", "ended without a write"}
SEEDS = range(1, 9)


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_each_check_has_cases_in_most_runs() -> None:
    met = Counter[str]()
    for seed in SEEDS:
        result = Run(Plan.of(seed, SHAPES["live"])).result()
        assert not result.broken, f"seed {seed}: {result.broken}"
        met.update(each for each in CHECKS if result.met[each])
    expected = [each for each in CHECKS if each != SELDOM]
    lacking = {each: met[each] for each in expected if met[each] < (1 if each in RARE else len(SEEDS) / 2)}
    assert not lacking, f"runs of {len(SEEDS)} that had a case"
