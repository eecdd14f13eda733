"""The report of a replay. Law: every figure is counted or measured in the run that it reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from distributed_state.programs.replay.coordinator import Tally

OPERATIONS = ("begin", "read", "commit", "turn")
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one operation, in milliseconds."""

    p50_ms: float
    p99_ms: float
    count: int


@dataclass(frozen=True, slots=True)
class Report:
    """The result. `differences` is empty if everything acknowledged was kept as promised."""

    conversations: int
    messages: int
    turns: int
    seconds: float
    workers: int
    kills: int
    struck: dict[str, int]
    failures: list[str]
    latencies: dict[str, Latency]
    hot_hit_rate: float
    archive_lag_seconds: float
    differences: list[str]

    @property
    def turns_per_second(self) -> float:
        """Turns of all workers together."""
        return self.turns / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"turns_per_second": self.turns_per_second, "verified": not self.differences}


def latency(seconds: list[float]) -> Latency:
    """Median and 99th percentile, by the nearest rank."""
    ordered = sorted(seconds)

    def rank(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000, 3)

    return Latency(rank(0.5), rank(0.99), len(ordered))


def summarise(tally: Tally, *, conversations: int, messages: int, lag: float, differences: list[str]) -> Report:
    """Put the tally of a run and the outcome of its verification together."""
    hits = sum(hot["hot_hits"] for hot in tally.hot.values())
    reads = hits + sum(hot["hot_misses"] for hot in tally.hot.values())
    return Report(
        conversations=conversations,
        messages=messages,
        turns=tally.turns,
        seconds=round(tally.ended - tally.began, 3),
        workers=tally.workers,
        kills=tally.kills,
        struck={name: count for name, count in tally.struck.items() if count},
        failures=tally.failures,
        latencies={name: latency(tally.latencies[name]) for name in OPERATIONS if name in tally.latencies},
        hot_hit_rate=round(hits / reads, 4) if reads else 0.0,
        archive_lag_seconds=round(lag, 3),
        differences=differences,
    )


def show(report: Report, console: Console) -> None:
    """Print the table, then every difference by name."""
    table = Table("operation", "p50 ms", "p99 ms", "count", title="replay")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, took in report.latencies.items():
        table.add_row(name, f"{took.p50_ms:.2f}", f"{took.p99_ms:.2f}", f"{took.count:,}")
    console.print(table)
    facts = Table.grid(padding=(0, 2))
    for name, text in _facts(report):
        facts.add_row(name, text)
    console.print(facts)
    for text in report.differences[:_SHOWN]:
        console.print(text, style="red", markup=False)
    if len(report.differences) > _SHOWN:
        console.print(f"... and {len(report.differences) - _SHOWN} more", style="red")


def _facts(report: Report) -> list[tuple[str, str]]:
    struck = ", ".join(f"{count} {where}" for where, count in sorted(report.struck.items()))
    facts = [
        ("turns/s", f"{report.turns_per_second:,.0f} ({report.turns:,} turns in {report.seconds:.2f} s)"),
        ("hot hit rate", f"{report.hot_hit_rate:.1%}"),
        ("archive lag", f"{report.archive_lag_seconds:.2f} s until the last commit was in SQL"),
        ("kills survived", f"{report.kills}" + (f": {struck}" if struck else "")),
    ]
    if report.failures:
        facts.append(("turns repeated", f"{len(report.failures)}, the last: {report.failures[-1]}"))
    if report.differences:
        facts.append(("verification", f"[bold red]{len(report.differences)} differences[/]"))
    else:
        kept = f"{report.messages:,} messages of {report.conversations:,} conversations are in SQL"
        facts.append(
            ("verification", f"[bold green]{kept}, each once, in order, equal to the input; versions dense[/]")
        )
    return facts
