"""Whole fleets in this process, from seeds: every promise holds under every simulated fault."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.plan import SHAPES, Plan
from tests.simulation.run import Run

ROOT = Path(__file__).parents[2]
SEEDS = 3  # for each dense shape: about 20,000 operations in all
SLOW = {"cluster", "failover", "sentinel", "moved"}  # one seed each: they take longer
PARTS = 3  # with those of a default run more than 100,000 operations in CI
# Seeds that found a fault of the product or of the simulator, by the fault. The shapes are the same as then.
FOUND = {
    "a look that went on while its store was closed listened to Sentinels for good": ("sentinel", 39),
    "a renewal that the end of its turn overtook ended the turn as lost": ("leases", 1),
    "a turn whose answer was lost was refused, as its epoch had ended since": ("restarts", 27),
    "a read joined another's, whose answer was older than hot may be": ("hot", 6),
    "a field whose time was over came back with a rollback": ("maintained", 1),
    "sessions no longer ended at a worker none of whose partitions could be reached for a moment": ("cluster", 56),
    "a slot returned to a node, after the one between had lost its writes, and was gone on with": ("moved", 36),
    "a record that a node was handed before it restarted stayed there, although its meta was lost": ("moved", 72),
    "a user was forgotten before a commit that only its writer still knew was put back": ("sentinel", 10074),
    "commits put back for a server stood for all of the history that the next one still had": ("sentinel", 30071),
    "a simulated replica never followed a primary again that stood still when its cut ended": ("failover", 30045),
    "a simulated member did not join again after a server had closed its connection": ("events", 40006),
    "an event that a former primary took after a listener had joined at the new one was missed": ("sentinel", 52007),
}


def holds(name: str, seed: int, *, dense: bool) -> None:
    """Run one seed of a shape."""
    shape = SHAPES[name].dense if dense else SHAPES[name]
    result = Run(Plan.of(seed, shape)).result()
    replay = f"python -m tests.simulation --shape {name}{' --dense' if dense else ''} --seed {seed}"
    assert not result.broken, f"{result.broken}\nreplay: {replay}"
    assert result.operations >= shape.operations


@pytest.mark.parametrize("name", SHAPES)
def test_every_promise_holds(name: str) -> None:
    for seed in range(1, 2 if name in SLOW else 1 + SEEDS):
        holds(name, seed, dense=True)


@pytest.mark.wide
@pytest.mark.timeout(900)  # it computes, and other tests may take most of the processor
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", SHAPES)
def test_every_promise_holds_with_more_seeds(name: str, part: int) -> None:
    seeds = 1 if name in SLOW else 4
    for seed in range(1 + SEEDS + part * seeds, 1 + SEEDS + (part + 1) * seeds):
        holds(name, seed, dense=True)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", SHAPES)
def test_every_promise_holds_at_length(name: str, part: int) -> None:
    seeds = 1 if name in SLOW - {"moved"} else 9
    for seed in range(1 + part * seeds, 1 + (part + 1) * seeds):
        holds(name, seed, dense=False)


@pytest.mark.wide
@pytest.mark.parametrize("what", FOUND)
def test_a_fault_that_was_found_stays_mended(what: str) -> None:
    name, seed = FOUND[what]
    assert not Run(Plan.of(seed, SHAPES[name])).result().broken, what


def test_a_seed_gives_the_same_trace_in_every_process() -> None:
    command = [sys.executable, "-m", "tests.simulation", "--seed", "3", "--operations", "60", "--trace"]
    traces = []
    for hashing in ("0", "4711"):
        environment = os.environ | {"PYTHONHASHSEED": hashing}
        done = subprocess.run(command, capture_output=True, check=False, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr.decode()
        *trace, _ = done.stdout.splitlines()  # the last line contains the duration
        traces.append(trace)
    assert len(traces[0]) > 1000
    assert traces[0] == traces[1]
