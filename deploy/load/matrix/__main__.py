"""`python -m deploy.load.matrix`: every fault on every topology at every level. Law: exit code 1 if one is missed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.load.matrix import report, running
from deploy.load.matrix.cells import all_cells
from deploy.load.matrix.run import Outcome
from deploy.load.matrix.topology import TOPOLOGIES


def main(words: Sequence[str] | None = None) -> int:
    """Run the cells that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m deploy.load.matrix", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of load in each cell, beside the fault")
    parser.add_argument("--only", action="append", default=[], metavar="FAULT", help="cells with it; may be repeated")
    parser.add_argument("--topology", action="append", choices=TOPOLOGIES, help="may be repeated")
    parser.add_argument("--lanes", type=int, default=2, help="cells side by side, each with servers of its own")
    parser.add_argument("--seed", type=int, default=1, help="of what is left to chance")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--list", action="store_true", help="the cells, and those that cannot be, with the reason")
    given = parser.parse_args(words)
    try:
        cells = list(all_cells(given.only, given.topology or TOPOLOGIES))
    except ValueError as error:
        parser.error(str(error))
    impossible = [cell for cell in cells if cell.impossible]
    possible = [cell for cell in cells if not cell.impossible]
    if given.list:
        for cell in cells:
            print(f"{cell.name} on {cell.topology}: {cell.impossible or ', '.join(cell.levels)}")
        return 0
    running.prepare()
    began, count = time.monotonic(), 0

    def shown(outcome: Outcome) -> None:
        nonlocal count
        count += 1
        running.show(outcome)
        print(f"{count} of {len(possible)} cells, {time.monotonic() - began:.0f} s", file=sys.stderr)

    outcomes, whole = running.run_all(possible, seconds=given.seconds, seed=given.seed, lanes=given.lanes, shown=shown)
    for cell in impossible:
        print(f"not run: {cell.name} on {cell.topology}: {cell.impossible}")
    if given.markdown is not None:
        command = f"python -m deploy.load.matrix --seconds {given.seconds:g}"
        report.put(given.markdown, "matrix", report.markdown(outcomes, impossible, command))
    return running.conclude(outcomes, whole=whole)


if __name__ == "__main__":
    sys.exit(main())
