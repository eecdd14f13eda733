"""The rows of a benchmark: what was measured, beside what, and the goal. Law: a missed goal is exit status 1."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROUNDS = 9


@dataclass(frozen=True)
class Row:
    """One line of the table. `ratio` is measured / baseline; `goal` is what it must be."""

    name: str
    measured: str
    baseline: str
    ratio: float
    goal: str
    reached: bool


def at_most(name: str, measured: float, baseline: float, limit: float, unit: str, versus: str) -> Row:
    ratio = measured / baseline
    return Row(
        name, f"{measured:,.4g} {unit}", f"{versus}: {baseline:,.4g} {unit}", ratio, f"<= {limit:g}x", ratio <= limit
    )


def at_least(name: str, measured: float, baseline: float, limit: float, unit: str, versus: str) -> Row:
    ratio = measured / baseline
    return Row(
        name, f"{measured:,.4g} {unit}", f"{versus}: {baseline:,.4g} {unit}", ratio, f">= {limit:g}x", ratio >= limit
    )


def per_call(call: Callable[[], Any], times: int) -> float:
    """Microseconds a call."""
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times * 1e6


def interleaved(calls: dict[str, tuple[Callable[[], Any], int]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median microseconds a call, the candidates in turn."""
    for call, times in calls.values():
        per_call(call, max(times // 10, 1))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (call, times) in calls.items():
            taken[name].append(per_call(call, times))
    return {name: statistics.median(values) for name, values in taken.items()}


def plot(rows: list[Row], path: Path) -> None:
    """Ratios on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 0.45 * len(rows) + 1.2))
    names = [row.name for row in rows][::-1]
    ratios = [row.ratio for row in rows][::-1]
    colours = ["#2a7f62" if row.reached else "#b3392f" for row in rows][::-1]
    axes.barh(names, ratios, color=colours)
    axes.axvline(1, color="#444444", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("measured / baseline (see the table for what each is measured against)")
    for at, row in enumerate(rows[::-1]):
        axes.annotate(f" {row.ratio:.3g}x   goal {row.goal}", (row.ratio, at), va="center", fontsize=8)
    axes.margins(x=0.35)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def report(console: Console, rows: list[Row], png: Path | None, as_json: Path | None, code: int | None = None) -> None:
    """Print the table, write what was asked for, and exit: with this code, or else with 1 if a goal is missed."""
    table = Table("what", "measured", "compared with", "ratio", "goal", "")
    for row in rows:
        table.add_row(
            row.name, row.measured, row.baseline, f"{row.ratio:.3g}x", row.goal, "ok" if row.reached else "MISSED"
        )
    console.print(table)
    if as_json:
        as_json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if png:
        plot(rows, png)
    sys.exit((0 if all(row.reached for row in rows) else 1) if code is None else code)
