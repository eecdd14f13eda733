"""Run fleets from seeds: `python -m tests.simulation`.

Each run opens a fleet in this process, works on it, harms it, heals it and checks every promise. If a run breaks a
promise, its schedule is shortened as far as possible, and its seed replays it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from dataclasses import replace

from tests.simulation.plan import SHAPES, Plan
from tests.simulation.run import Result, Run
from tests.simulation.sabotages import SABOTAGES, search
from tests.simulation.shrinking import shown, shrink


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="all", help="the kind of run (default: all, of most faults)")
    parser.add_argument("--seed", type=int, default=1, help="the seed of the first run (default: 1)")
    parser.add_argument("--runs", type=int, default=1, help="how many runs, each with the next seed (default: 1)")
    parser.add_argument("--operations", type=int, help="operations of each run")
    parser.add_argument("--dense", action="store_true", help="three times the operations in the same simulated time")
    parser.add_argument("--trace", action="store_true", help="print the story of each run: who sent what to whom, when")
    parser.add_argument("--no-shrink", action="store_true", help="show a failure as it was found")
    parser.add_argument("--sabotage", metavar="NAME", help="search a seed that finds a sabotage: its name, or `all`")
    parser.add_argument("--json", action="store_true", help="print one object a run")
    return parser


def main() -> int:
    """Return the exit status: 1 if a promise was broken, 130 after Ctrl-C."""
    parser = _parser()
    given = parser.parse_args()
    if given.runs < 1 or (given.operations is not None and given.operations < 1):
        parser.error("--runs and --operations are at least 1")
    logging.disable(logging.CRITICAL)
    if given.sabotage:
        names = [name for name in SABOTAGES if given.sabotage in ("all", name)]
        if not names:
            parser.error(f"--sabotage is `all` or one of: {'; '.join(SABOTAGES)}")
        return _search(names, given)
    shape = SHAPES[given.shape].dense if given.dense else SHAPES[given.shape]
    if given.operations:
        shape = replace(shape, operations=given.operations)
    began, operations, simulated, broken = time.perf_counter(), 0, 0.0, 0
    states: Counter[str] = Counter()
    try:
        for seed in range(given.seed, given.seed + given.runs):
            result = Run(Plan.of(seed, shape), trace=given.trace).result()
            operations, simulated = operations + result.operations, simulated + result.seconds
            states += result.states
            if given.trace:
                sys.stdout.writelines(result.lines)
            if result.broken:
                broken += 1
            _report(given, result)
            if not given.json and sys.stderr.isatty():
                print(f"\r{seed - given.seed + 1} of {given.runs} runs, {broken} broken", end="", file=sys.stderr)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    real = time.perf_counter() - began
    if not given.json:
        print(
            f"{given.runs} runs, {operations} operations, {broken} broken; "
            f"{simulated:.0f} s simulated in {real:.1f} s ({simulated / real:.1f} times as fast), "
            f"{operations / real:.0f} operations a second"
        )
    return 1 if broken else 0


def _search(names: list[str], given: argparse.Namespace) -> int:
    """Search a seed that finds each of these sabotages; return 1 if one is not found."""
    rows, missed = [], 0
    for name in names:
        found = search(SABOTAGES[name], given.seed, given.runs)
        result, promise = found.result, found.result.broken.partition(":")[0]
        missed += not result.broken
        rows.append(f"{result.plan.seed:>5} {found.runs:>5} {found.reached:>8} {promise or 'NOT FOUND':<12} {name}")
        if given.json:
            row = {"sabotage": name, "seed": result.plan.seed, "runs": found.runs, "operations": found.operations}
            print(json.dumps(row | {"reached": found.reached, "broken": result.broken}), flush=True)
        else:
            told = result.broken or f"not found in {found.runs} runs; its guard was reached {found.reached} times"
            print(f"{name}\n  seed {result.plan.seed}, {found.operations} operations: {told}", flush=True)
    if not given.json:
        print(f"\n{'seed':>5} {'runs':>5} {'reached':>8} {'broken':<12} sabotage", *rows, sep="\n")
        print(f"{len(names) - missed} of {len(names)} sabotages were found")
    return 1 if missed else 0


def _report(given: argparse.Namespace, result: Result) -> None:
    seed = result.plan.seed
    if given.json:
        found = {"seed": seed, "shape": given.shape, "digest": result.digest, "operations": result.operations}
        print(json.dumps(found | {"broken": result.broken, "outcomes": dict(result.states)}), flush=True)
        return
    if not result.broken:
        return
    print(f"seed {seed}: {result.broken}", flush=True)
    if not given.no_shrink:
        short = shrink(result, lambda text: print(f"\r{text}   ", end="", file=sys.stderr))
        print(f"\nthe shortest found that breaks it, too: {short.broken}", *shown(short.plan), sep="\n  ", flush=True)
    density = " --dense" if given.dense else ""
    print(f"replay: python -m tests.simulation --shape {given.shape}{density} --seed {seed} --trace", flush=True)


if __name__ == "__main__":
    sys.exit(main())
