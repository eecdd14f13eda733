"""One run: the load at its rates, what is broken on the way, and what is read back. Law: what was measured is kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from deploy.load import faults, figures
from deploy.load.client import targets
from deploy.load.crew import Crew
from deploy.load.fleet import LocalFleet
from deploy.load.knee import Knee
from deploy.load.measures import Result, carried
from deploy.load.reporting import Report
from deploy.load.verifying import Source

_STEP = 4.0
_HALF = 10.0
_SETTLE = 0.5
_AFTER = 1.0


class Run:
    """One run: the fleet, the crew that loads it, and the report."""

    def __init__(self, console: Console, crew: Crew, fleet: Any, source: Source, report: Report) -> None:
        self.console = console
        self.crew = crew
        self.fleet = fleet
        self.source = source
        self.report = report
        self._used: list[tuple[dict[str, float], dict[str, float]]] = []  # CPU before and after each step of the ramp

    def ramp(self, scenario: str, start: float, max_p99: float) -> float | None:
        """Look for the knee; the rate there."""
        knee = Knee(start, max_p99)
        for step in self._search(knee, self.crew, scenario, max_p99):
            self.report.ramp.append(step)
        return self._at_the_knee(knee)

    def both_ramps(self, scenario: str, start: float, max_p99: float) -> float | None:
        """Look for our knee and that of workers without the library, in turn: whoever else uses the machine slows both.

        Returns the rate at ours.
        """
        from deploy.load.bare import bare_workers  # needs what --local needs: the extra `serve`

        count = len(self.fleet.workers)
        ours, bare = Knee(start, max_p99), Knee(start, max_p99)
        with self.console.status("watching what a turn asks of Redis"):
            commands = figures.commands(self.fleet, self.source)
        with (
            bare_workers(self.fleet.warm.url, count, commands) as urls,
            Crew(self.crew.processes, "bare", targets(urls), self.source) as crew,
        ):
            searches = [
                (self._search(ours, self.crew, scenario, max_p99), self.report.ramp),
                (self._search(bare, crew, scenario, max_p99, "bare workers"), self.report.bare),
            ]
            for each in zip_longest(*(search for search, _ in searches)):
                for step, (_, steps) in zip(each, searches, strict=True):
                    steps += [step] if step else []
            self.report.figures += figures.at_knees(ours, bare, count, commands)
            if ours.best is not None:
                figures.settle(self.fleet)
                halves = [each.run(scenario, ours.best.rate / 2, _HALF, retry_for=2.0) for each in (self.crew, crew)]
                self.report.figures.append(figures.at_half(*halves))
        return self._at_the_knee(ours)

    def _at_the_knee(self, knee: Knee) -> float | None:
        if (found := knee.best) is None:
            return None
        before, after = self._used[knee.steps.index(found)]
        if before:
            self.report.figures.append(figures.cpu(before, after, found))
        return found.rate

    def _search(self, knee: Knee, crew: Crew, scenario: str, max_p99: float, whose: str = "ramp") -> Iterator[Result]:
        def measure(rate: float) -> Result:
            time.sleep(_SETTLE)
            before = self._cpu()
            result = crew.run(scenario, rate, _STEP, retry_for=2.0)
            if crew is self.crew:
                self._used.append((before, self._cpu()))
            return result

        for step in knee.search(measure):
            yield step
            said = "carried" if carried(step, max_p99) else "too much"
            self.console.print(
                f"{whose}: {step.rate:,.0f}/s offered, {step.per_second:,.0f}/s, p99 {step.p99 * 1000:,.0f} ms: {said}"
            )

    def _cpu(self) -> dict[str, float]:
        return self.fleet.cpu() if isinstance(self.fleet, LocalFleet) else {}

    def load(self, scenario: str, rate: float, seconds: float, broken: list[faults.Fault], retry_for: float) -> None:
        """One scenario at one rate, with faults."""
        breaking = faults.Breaking(self.fleet, broken, self.crew.began) if broken else None
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
        )
        early = True
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(f"{scenario} {rate:,.0f}/s", total=seconds, facts="")
            before = self.crew.answered
            told = len(self.crew.results)

            def shown(at: float) -> None:
                progress.update(task, completed=min(at, seconds), facts=f"{self.crew.answered - before:,} answered")

            try:
                begun = breaking.begin if breaking else lambda at: None
                result = self.crew.run(scenario, rate, seconds, retry_for=retry_for, begun=begun, shown=shown)
                self.report.results.append(result)
                early = False
            except KeyboardInterrupt:
                self.report.results += self.crew.results[told:]  # none if it was still being prepared
                raise
            finally:
                if breaking:
                    self.report.broke += breaking.join(early=early)
        if any(broke.over and self.crew.timeline.first_due_after(broke.over) is None for broke in self.report.broke):
            # The fault outlasted the load: whether the fleet serves again shows only if it is asked.
            after = self.crew.run(scenario, rate, _AFTER, retry_for=retry_for)
            self.report.results.append(replace(after, scenario=f"{scenario}, after"))

    def verify(self) -> None:
        """Read back everything that was acknowledged."""
        expected = list(self.crew.expected.values())
        report = self.report
        with self.console.status(f"reading {len(expected):,} conversations back"):
            found = self.crew.verify()
        report.verified = f"{len(expected):,} conversations read back over HTTP"
        if isinstance(self.fleet, LocalFleet):
            with self.console.status("reading from SQL"):
                count, wrong = figures.archived(self.fleet, self.source, expected)
            found += wrong
            report.verified += f", {count:,} histories from SQL"
        if not found:
            report.verified += ": every one is there once"
        tolerant = self.fleet is not None and faults.may_lose(report.broke, self.fleet.warm_kind)
        report.differences = [each for each in found if not (tolerant and each.lost)]
        report.lost_by_failover = [each for each in found if tolerant and each.lost]

    def measure(self) -> None:
        """The figures of a fleet of our own, beside those of its knee."""
        report = self.report
        with self.console.status("figures"):
            report.figures.append(figures.compared(self.fleet, self.source, figures.commands(self.fleet, self.source)))
            report.figures.append(figures.idle_bytes(self.fleet))
            report.figures += figures.pages(self.fleet)

    def close(self) -> None:
        """Put into the report what is known at the end, however it came."""
        report = self.report
        timeline = self.crew.timeline
        report.acknowledged = sum(turn != "n" for each in self.crew.expected.values() for _, turn in each.acks)
        report.by_second = timeline.by_second()
        for broke in report.broke:
            first = timeline.first_due_after(broke.over) if broke.over is not None else None
            report.recoveries.append(None if first is None or broke.over is None else first - broke.over)
            replaced = broke.elected is not None
            report.outages.append(timeline.outage(broke.began, broke.elected) if replaced else None)
