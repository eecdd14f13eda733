"""What a run found, as tables, JSON and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import nan
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.load.faults import Broke
from deploy.load.measures import Outage, Result, carried
from deploy.load.verifying import Difference

_BEFORE = 8.0  # seconds of the timeline before the first fault


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with what it must be; `reached` is None if there is no goal."""

    name: str
    measured: str
    beside: str = ""
    goal: str = ""
    reached: bool | None = None


@dataclass
class Report:
    """Everything of one run."""

    setting: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    ramp: list[Result] = field(default_factory=list)
    bare: list[Result] = field(default_factory=list)  # the ramp of workers without the library
    max_p99: float = 0.0
    broke: list[Broke] = field(default_factory=list)
    recoveries: list[float | None] = field(default_factory=list)
    outages: list[Outage | None] = field(default_factory=list)  # of each fault, None if it replaced no primary
    figures: list[Figure] = field(default_factory=list)
    by_second: list[tuple[int, int, float, float]] = field(default_factory=list)
    acknowledged: int = 0
    differences: list[Difference] = field(default_factory=list)
    lost_by_failover: list[Difference] = field(default_factory=list)  # which does not fail the run
    missed: list[str] = field(default_factory=list)
    verified: str = "not verified"
    judged: bool = True  # False: broken off

    @property
    def missed_figures(self) -> list[Figure]:
        """Those with a goal that is not reached."""
        return [figure for figure in self.figures if figure.reached is False]

    @property
    def passed(self) -> bool:
        """Whether nothing is lost and no threshold missed, and that was looked at."""
        return self.judged and not self.differences and not self.missed

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"passed": self.passed}


def show(console: Console, report: Report) -> None:
    """Print the tables."""
    for title, results in (("ramp", report.ramp), ("without the library", report.bare), ("load", report.results)):
        if results:
            console.print(_phases(title, results))
    if report.broke:
        console.print(_faults(report))
    if report.figures:
        console.print(_figures(report.figures))
    errors: dict[str, int] = {}
    for result in report.results:
        for reason, count in result.errors.items():
            errors[reason] = errors.get(reason, 0) + count
    if errors:
        told = ", ".join(
            f"{reason} x{count}" for reason, count in sorted(errors.items(), key=lambda each: -each[1])[:8]
        )
        console.print(f"answers that were not the ones hoped for: {escape(told)}")
    late = max((result.late for result in report.results), default=0.0)
    if late > 0.25:
        console.print(f"[yellow]the generator itself was up to {late:.2f} s late: its machine is too busy[/]")
    console.print(f"{report.acknowledged:,} turns acknowledged; {report.verified}")
    if report.lost_by_failover:
        turns = sum(each.turns for each in report.lost_by_failover)
        console.print(f"[yellow]lost by an asynchronous failover: {turns} acknowledged turns are not there[/]")
        for each in report.lost_by_failover[:20]:
            console.print(f"[yellow]  {escape(each.text)}[/]")
    for text in [*(difference.text for difference in report.differences[:20]), *report.missed]:
        console.print(f"[red]{escape(text)}[/]")
    if len(report.differences) > 20:
        console.print(f"[red]and {len(report.differences) - 20} differences more[/]")
    if report.judged:
        console.print("[green]passed[/]" if report.passed else "[red]failed[/]")


def _phases(title: str, results: Sequence[Result]) -> Table:
    # Narrow, so that a terminal of 80 columns shows it whole.
    table = Table(title=f"{title}, latency in ms", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("scenario", "offered", "done/s", "p50", "p90", "p99", "p99.9", "max", "again", "failed"):
        table.add_column(name, justify="left" if name == "scenario" else "right")
    for result in results:
        times = (_short(result.latency[each] * 1000) for each in ("50", "90", "99", "99.9", "100"))
        table.add_row(
            result.scenario, f"{result.rate:,.0f}", f"{result.per_second:,.0f}", *times, str(result.retries),
            str(result.failed),
        )  # fmt: skip
    return table


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def _faults(report: Report) -> Table:
    table = Table(title="faults, in seconds", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    replaced = any(report.outages)
    names = ["fault", "at", "over", "success after"]
    names += ["elected at", "success after", "no success for"] if replaced else []
    for name in names:
        table.add_column(name, justify="left" if name == "fault" else "right")
    for broke, recovery, outage in zip(report.broke, report.recoveries, report.outages, strict=True):
        over = escape(broke.error) or _seconds(broke.over, 1)
        row = [broke.kind, _seconds(broke.began, 1), over, _seconds(recovery)]
        if outage:
            row += [_seconds(broke.elected, 1), _seconds(outage.after), _seconds(outage.without)]
        table.add_row(*row)
    return table


def _seconds(number: float | None, digits: int = 2) -> str:
    return "never" if number is None else f"{number:.{digits}f}"


def _figures(figures: Sequence[Figure]) -> Table:
    table = Table(title="figures")
    for name in ("what", "measured", "beside", "goal", ""):
        table.add_column(name)
    for figure in figures:
        said = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[figure.reached]
        table.add_row(escape(figure.name), escape(figure.measured), escape(figure.beside), escape(figure.goal), said)
    return table


def draw(report: Report, folder: Path) -> list[Path]:
    """Draw the pictures. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = []
    wanted = {"latency": (_latency, report.results), "throughput": (_throughput, report.ramp)}
    wanted["timeline"] = (_timeline, report.results or report.ramp)
    for name, (paint, there) in wanted.items():
        if there:
            figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
            paint(axes, report)
            drawn.append(folder / f"{name}.png")
            figure.savefig(drawn[-1], dpi=110)
            pyplot.close(figure)
    return drawn


def _latency(axes: Any, report: Report) -> None:
    for result in report.results:
        points = [(1 / (1 - share / 100), seconds * 1000) for share, seconds in result.curve if share < 99.9999]
        points = [point for point in points if point[0] <= max(result.offered, 2)]
        axes.plot(*zip(*points, strict=True), label=f"{result.scenario}, {result.rate:,.0f}/s")
    axes.set(xscale="log", yscale="log", xlabel="percentile", ylabel="ms since the request was due", title="Latency")
    ticks = (50, 90, 99, 99.9, 99.99)
    axes.set_xticks([1 / (1 - share / 100) for share in ticks], [f"{share:g}%" for share in ticks])
    axes.grid(alpha=0.3)
    axes.legend()


def _throughput(axes: Any, report: Report) -> None:
    ways = ("", report.ramp, "tab:blue", "tab:orange"), ("without the library, ", report.bare, "0.6", "0.75")
    for whose, ramp, *colors in ways:
        for name, color in zip(("50", "99"), colors, strict=True):
            borne = sorted(
                (step.per_second, step.latency[name] * 1000) for step in ramp if carried(step, report.max_p99)
            )
            other = [(step.per_second, step.latency[name] * 1000) for step in ramp if not carried(step, report.max_p99)]
            if borne:
                axes.plot(*zip(*borne, strict=True), "o-", color=color, label=f"{whose}p{name}")
            if other:
                axes.plot(*zip(*other, strict=True), "x", color=color)
    axes.set(
        yscale="log", xlabel="turns answered/s (x: more was offered than is carried)",
        ylabel="ms since the request was due", title="Throughput against latency",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend()


def _timeline(axes: Any, report: Report) -> None:
    first = min((broke.began for broke in report.broke), default=0.0) - _BEFORE
    rows = [row for row in report.by_second if row[0] >= first]
    axes.plot([row[0] for row in rows], [row[1] for row in rows], color="tab:blue", label="answered/s")
    axes.set(xlabel="s since the start", ylabel="answered/s", title="Timeline")
    other = axes.twinx()
    other.plot(
        [row[0] for row in rows], [row[3] * 1000 if row[1] else nan for row in rows], color="tab:orange", label="p99 ms"
    )
    other.set(yscale="symlog", ylabel="p99 ms")
    for broke in report.broke:
        axes.axvspan(broke.began, broke.over or broke.began + 1, color="tab:red", alpha=0.15)
        place = {"rotation": 90, "va": "top", "ha": "left", "transform": axes.get_xaxis_transform()}
        axes.text(broke.began, 0.98, f" {broke.kind}", color="tab:red", fontsize=8, **place)
    lines = [*axes.get_lines(), *other.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines], loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
