"""How costs grow: the measurements run, and a curve says what its numbers say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.load.curves.archiving import archiving
from deploy.load.curves.claims import claims
from deploy.load.curves.collection import collections
from deploy.load.curves.curve import Curve
from deploy.load.curves.events import events, unwanted
from deploy.load.curves.first_writes import first_writes
from deploy.load.curves.forgetting import forgetting
from deploy.load.curves.idle import extrapolated, idle, resting
from deploy.load.curves.purging import purging
from deploy.load.curves.small_sessions import small_sessions
from deploy.load.curves.sql_bytes import sql_bytes
from deploy.load.growth import MEASURED
from distributed_state.warm.node_channels import NodeChannels

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
def test_a_fleet_at_rest_is_measured() -> None:
    curve = idle([1, 2], lambda _: None, settled=0.5, seconds=1.0)
    assert curve.sizes == [1, 2, 1000]
    assert min(curve.costs) >= 0


def test_what_a_thousand_at_rest_would_take_is_extrapolated_by_the_last_two() -> None:
    assert extrapolated([20, 80, 320], [9.0, 1.0, 1.6]) == pytest.approx(3.3)
    assert extrapolated([80, 320], [1.0, 0.9]) == 0.9, "a line that sinks is noise"
    assert extrapolated([500], [2.0]) == 4.0


def probes_for_each_beat() -> float:
    """Of replicas that have nothing in hot; both are counted by the server in the same seconds."""
    _, asked = resting(2, settled=4.0, seconds=12.0)
    return asked["persist"] / asked["pexpire"]


@pytest.mark.wide
def test_replicas_at_rest_hardly_probe() -> None:
    assert probes_for_each_beat() < 1.2


@pytest.mark.wide
def test_if_no_link_rested_they_would_probe_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeChannels, "nothing_kept", False)
    assert probes_for_each_beat() > 3


@pytest.mark.wide
@pytest.mark.parametrize("measure", [events, unwanted])
def test_events_to_many_connections_are_measured(measure: Callable[..., Curve]) -> None:
    curve = measure([2, 4], lambda _: None, rate=200, seconds=1.0)
    assert len(curve.costs) == 2
    assert min(curve.costs) > 0


@pytest.mark.wide
def test_first_writes_are_measured() -> None:
    curve = first_writes([10, 100], lambda _: None)
    assert min(curve.costs) > 0.5
    assert max(curve.costs) < 3, "without the names it is 5"


def test_what_a_small_session_takes_is_measured() -> None:
    curve = small_sessions([1, 3], lambda _: None)
    assert min(curve.costs) > 200
    assert curve.reached


@pytest.mark.wide
def test_what_sql_takes_is_measured() -> None:
    curve = sql_bytes([3, 30], lambda _: None)
    assert 1 < curve.costs[1] < curve.costs[0], "of few conversations most is what tables have at least"


@pytest.mark.wide
@pytest.mark.parametrize(("measure", "sizes"), [(archiving, [5]), (purging, [4_000]), (forgetting, [3])])
def test_what_sql_does_is_measured(measure: Callable[..., Curve], sizes: list[int]) -> None:
    curve = measure(sizes, lambda _: None)
    assert len(curve.costs) == 1
    assert min(curve.costs) > 0


@pytest.mark.wide
def test_more_records_in_hot_are_no_more_objects_to_collect() -> None:
    (few, taken, before), (many, _, after) = collections([200, 1200], lambda _: None)
    assert (few, many) == (200, 1200)
    assert taken > 0
    # What is remembered of keys and of absence is bounded, and four objects each until then. A record itself is none.
    assert after - before <= 4.1 * (many - few)


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
