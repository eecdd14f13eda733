"""`python -m deploy.load.matrix.soak --minutes 60`: faults at random, one after the other. Law: the matrix' judge."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.load.matrix import report, running
from deploy.load.matrix.cells import Cell, random_cell
from deploy.load.matrix.topology import TOPOLOGIES

_FAULTS = 6


def cells(minutes: float, seed: int, topologies: Sequence[str], faults: int) -> Iterator[Cell]:
    """New ones until the time is over."""
    chance, until = random.Random(seed), time.monotonic() + minutes * 60
    while time.monotonic() < until:
        yield random_cell(chance, topologies, faults)


def main(words: Sequence[str] | None = None) -> int:
    """Run random cells for so long."""
    parser = argparse.ArgumentParser(prog="python -m deploy.load.matrix.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=8.0, help="of load around each fault")
    parser.add_argument("--faults", type=int, default=_FAULTS, help="one after the other on the same servers")
    parser.add_argument("--topology", action="append", choices=TOPOLOGIES, help="may be repeated")
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=None, help="to have the same faults again; else it is printed")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    given = parser.parse_args(words)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 30)
    print(f"--seed {seed}", flush=True)
    running.prepare()
    endless = cells(given.minutes, seed, given.topology or TOPOLOGIES, given.faults)
    outcomes, whole = running.run_all(endless, seconds=given.seconds, seed=seed, lanes=given.lanes, shown=running.show)
    if given.markdown is not None:
        command = f"python -m deploy.load.matrix.soak --minutes {given.minutes:g} --seed {seed}"
        report.put(given.markdown, "soak", report.markdown(outcomes, (), command))
    return running.conclude(outcomes, whole=whole)


if __name__ == "__main__":
    sys.exit(main())
