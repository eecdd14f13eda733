"""How costs grow: the measurements run, and a curve says what its numbers say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.load.curves.claims import claims
from deploy.load.curves.curve import Curve
from deploy.load.growth import MEASURED

GROWTH = Path(__file__).parents[2] / "deploy" / "load" / "growth.py"


def growth(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, GROWTH, *words], capture_output=True, text=True, check=False, timeout=120)


def test_a_slope_is_that_of_the_logarithms() -> None:
    def curve(*costs: float) -> Curve:
        return Curve("n", "s", "of", [10, 100, 1000], list(costs), 5.0)

    assert curve(2, 2, 2).slope == pytest.approx(0)
    assert curve(1, 10, 100).slope == pytest.approx(1)
    assert curve(1, 100, 10_000).slope == pytest.approx(2)
    assert curve(2, 2, 5).reached
    assert not curve(2, 2, 5.1).reached
    assert Curve("n", "s", "of", [10], [3.0], 5.0).slope == 0


@pytest.mark.wide
def test_starts_are_measured_and_said(tmp_path: Path) -> None:
    run = growth("--only", "starts", "--sizes", "2,1", "--json", str(tmp_path / "g.json"))
    (found,) = json.loads((tmp_path / "g.json").read_text())
    assert found["sizes"] == [1, 2]
    assert len(found["costs"]) == 2
    assert min(found["costs"]) > 0
    assert run.returncode == (0 if found["costs"][-1] <= found["goal"] else 1)
    assert "embedded" in run.stdout


@pytest.mark.wide
def test_replicas_at_rest_are_measured() -> None:
    curve = claims([1, 2], lambda _: None, seconds=2.0)
    assert min(curve.costs) > 0


@pytest.mark.wide
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "nothing"], "there are " + ", ".join(MEASURED)),
        (["--sizes", "some"], "sizes are numbers"),
        (["--sizes", "0,1"], "at least 1"),
    ],
)
def test_what_it_cannot_measure_it_says(words: list[str], said: str) -> None:
    run = growth(*words)
    assert run.returncode == 2
    assert said in " ".join(run.stderr.replace("│", " ").split())
