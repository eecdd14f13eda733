"""What a fleet carries: load at a constant rate, faults on the way, and everything read back.

    python -m deploy.load.load --local                                  # Redis, PostgreSQL and 2 workers of its own
    python -m deploy.load.load --local --fault kill-worker --fault stop-redis
    python -m deploy.load.load --local --figures --out report           # the knee, beside bare redis-py
    python -m deploy.load.load --url http://worker:8080 --ramp          # a fleet that runs already
    python -m deploy.load.load --compose --fault kill-worker            # the one of docker compose, with faults

Needs `pip install -e '.[load]'`, with --local also `.[bench,serve]`. Exits with 1 if an acknowledged turn is lost or
doubled, or a threshold missed.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from deploy.load import faults, figures
from deploy.load.client import reached, targets
from deploy.load.crew import Crew
from deploy.load.fleet import ComposeFleet, LocalFleet, local_fleet
from deploy.load.measures import Result, carried
from deploy.load.reporting import Figure, Report, draw, show
from deploy.load.scenarios import SCENARIOS
from deploy.load.thresholds import Thresholds
from deploy.load.verifying import Source
from distributed_state.errors import StateError
from distributed_state.programs.replay.conversations import read_conversations

_KNEE_P99 = 0.25
_STEP = 4.0
_AFTER = 1.0
_SHARE_OF_KNEE = 0.6
INTERRUPTED = 130
_NAMES = ", ".join(SCENARIOS)
_FAULTS = ", ".join(faults.KINDS)


class Run:
    """One run: the fleet, the crew that loads it, and the report."""

    def __init__(self, console: Console, crew: Crew, fleet: Any, source: Source, report: Report) -> None:
        self.console = console
        self.crew = crew
        self.fleet = fleet
        self.source = source
        self.report = report

    def ramp(self, scenario: str, start: float, max_p99: float) -> float | None:
        """Look for the knee; the rate there."""
        used = [self._cpu()]
        for step in self._steps(self.crew, scenario, start, max_p99):
            self.report.ramp.append(step)
            used.append(self._cpu())
        found = figures.best(self.report.ramp, max_p99)
        if found and used[0]:
            at = self.report.ramp.index(found)
            self.report.figures.append(figures.cpu(used[at], used[at + 1], found))
        return found.rate if found else None

    def _steps(self, crew: Crew, scenario: str, start: float, max_p99: float) -> Iterator[Result]:
        for step in figures.knee(crew, scenario, start, _STEP, max_p99):
            yield step
            said = "carried" if carried(step, max_p99) else "too much"
            self.console.print(
                f"ramp: {step.rate:,.0f}/s offered, {step.per_second:,.0f}/s, p99 {step.p99 * 1000:,.0f} ms: {said}"
            )

    def _cpu(self) -> dict[str, float]:
        return self.fleet.cpu() if isinstance(self.fleet, LocalFleet) else {}

    def load(self, scenario: str, rate: float, seconds: float, broken: list[faults.Fault], patience: float) -> None:
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
                result = self.crew.run(scenario, rate, seconds, patience=patience, begun=begun, shown=shown)
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
            after = self.crew.run(scenario, rate, _AFTER, patience=patience)
            self.report.results.append(replace(after, scenario=f"{scenario}, after"))

    def verify(self) -> None:
        """Read back everything that was acknowledged."""
        expected = list(self.crew.expected.values())
        with self.console.status(f"reading {len(expected):,} conversations back"):
            self.report.differences = self.crew.verify()
        self.report.verified = f"{len(expected):,} conversations read back over HTTP"
        if isinstance(self.fleet, LocalFleet):
            with self.console.status("reading from SQL"):
                count, wrong = figures.archived(self.fleet, self.source, expected)
            self.report.differences += wrong
            self.report.verified += f", {count:,} histories from SQL"
        if not self.report.differences:
            self.report.verified += ": every one is there once"

    def measure(self, scenario: str, max_p99: float) -> None:
        """The figures of a fleet of our own."""
        found = figures.best(self.report.ramp, max_p99)
        report = self.report
        with self.console.status("watching what a turn asks of Redis"):
            commands = figures.commands(self.fleet, self.source)
        if found is not None and scenario == "chat":
            report.figures += self._beside_bare(scenario, found, commands, max_p99)
        with self.console.status("figures"):
            report.figures.append(figures.compared(self.fleet, self.source, commands))
            report.figures.append(figures.idle_bytes(self.fleet))
            report.figures += figures.pages(self.fleet)

    def _beside_bare(self, scenario: str, ours: Result, commands: Any, max_p99: float) -> list[Figure]:
        """The knee of workers without the library, under the same load."""
        from deploy.load.bare import bare_workers  # needs what --local needs: the extra `serve`

        count = len(self.fleet.workers)
        with (
            bare_workers(self.fleet.redis.url, count, commands) as urls,
            Crew(self.crew.processes, "bare", targets(urls), self.source) as crew,
        ):
            self.console.print("the same of workers without the library")
            for step in self._steps(crew, scenario, ours.rate, max_p99):
                self.report.bare.append(step)
        bare = figures.best(self.report.bare, max_p99)
        return figures.at_knees(ours, bare, count, commands) if bare else []

    def close(self) -> None:
        """Put into the report what is known at the end, however it came."""
        report = self.report
        timeline = self.crew.timeline
        report.acknowledged = sum(turn != "n" for each in self.crew.expected.values() for _, turn in each.acks)
        report.by_second = timeline.by_second()
        for broke in report.broke:
            first = timeline.first_due_after(broke.over) if broke.over is not None else None
            report.recoveries.append(None if first is None or broke.over is None else first - broke.over)


def main(
    url: Annotated[list[str] | None, typer.Option(help="of a worker, or of a balancer; repeat for several")] = None,
    local: Annotated[bool, typer.Option("--local", help="start Redis, PostgreSQL and workers on this machine")] = False,
    compose: Annotated[bool, typer.Option("--compose", help="the fleet of `docker compose` in this folder")] = False,
    workers: Annotated[int, typer.Option(min=1, help="with --local")] = 2,
    scenario: Annotated[
        list[str] | None, typer.Option(help=f"{_NAMES}, or all; repeat for several. Default chat")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.1, help="requests/s. Default 50; after --ramp 60 % of the knee")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="for each scenario; 0 leaves it out, after --ramp")] = 20.0,
    processes: Annotated[int, typer.Option(min=1, help="of the generator")] = 2,
    ramp: Annotated[bool, typer.Option("--ramp", help="look for the highest rate that is carried, first")] = False,
    knee_p99: Annotated[float, typer.Option(help="seconds of p99 above which a rate is not carried")] = _KNEE_P99,
    with_figures: Annotated[
        bool, typer.Option("--figures", help="--local --ramp, bare redis-py, memory, pages")
    ] = False,
    file: Annotated[Path | None, typer.Option(help="conversations, JSON lines; default: the package's sample")] = None,
    fault: Annotated[
        list[str] | None, typer.Option(help=f"{_FAULTS}, with @seconds if you like; repeat for several")
    ] = None,
    patience: Annotated[float, typer.Option(min=0.1, help="seconds for which a request is repeated")] = 30.0,
    subscribers: Annotated[int, typer.Option(min=1, help="of each process, in the scenario events")] = 10,
    verify: Annotated[bool, typer.Option(help="read everything back")] = True,
    max_p50: Annotated[float | None, typer.Option(help="seconds")] = None,
    max_p99: Annotated[float | None, typer.Option(help="seconds")] = None,
    min_rate: Annotated[float | None, typer.Option(help="answered a second")] = None,
    max_errors: Annotated[float, typer.Option(help="share of the requests that may be given up")] = 0.0,
    max_recovery: Annotated[float, typer.Option(help="seconds from the end of a fault to the first success")] = 5.0,
    out: Annotated[Path | None, typer.Option(help="folder for report.json and pictures")] = None,
) -> None:
    """Load a fleet at a constant rate, break it on the way, and read everything back."""
    console = Console()
    chosen = [name for each in scenario or ["chat"] for name in (SCENARIOS if each == "all" else [each])]
    try:
        if bool(url) + local + compose != 1:
            raise ValueError("name one of --local, --compose, and --url http://worker:8080")
        if unknown := [name for name in chosen if name not in SCENARIOS]:
            raise ValueError(f"{unknown[0]!r}: a scenario is one of {', '.join(SCENARIOS)}, or all")
        if with_figures and not local:
            raise ValueError("--figures are of a fleet of our own: --local")
        if fault and url:
            raise ValueError("a fleet that is known by its URL cannot be broken from here: --local or --compose")
        broken = faults.parse(fault or [], seconds)
        places = targets(url or [])
        if url and not reached(places):
            raise ValueError(f"nobody listens at {', '.join(url)}")
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "report.json").open("a").close()  # whether it can be written shows now, not after the load
        source = [[[message.to_dict() for message in turn] for turn in each.turns] for each in read_conversations(file)]
    except (ValueError, OSError, StateError) as error:
        console.print(f"[red]{escape(str(error))}[/]")
        raise typer.Exit(2) from error
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    thresholds = Thresholds(max_p50, max_p99, min_rate, max_errors, max_recovery)
    report = Report(_setting(source), max_p99=knee_p99)
    code = 1
    with ExitStack() as stack:
        try:
            fleet: Any = None
            if local:
                folder = Path(
                    stack.enter_context(
                        tempfile.TemporaryDirectory(prefix="distributed-state-load-", ignore_cleanup_errors=True)
                    )
                )
                folder.chmod(0o755)  # PostgreSQL may run as another user
                with console.status("starting Redis, PostgreSQL and workers"):
                    fleet = stack.enter_context(local_fleet(workers, folder, "load"))
            elif compose:
                fleet = ComposeFleet()
            if fleet is not None:
                places = targets(fleet.urls)
            id = f"load-{uuid.uuid4().hex[:8]}"
            crew = stack.enter_context(Crew(processes, id, places, source, subscribers=subscribers))
            run = Run(console, crew, fleet, source, report)
            try:
                found = run.ramp(chosen[0], rate or 50.0, knee_p99) if ramp or with_figures else None
                for name in chosen if seconds else []:
                    run.load(name, rate or (found * _SHARE_OF_KNEE if found else 50.0), seconds, broken, patience)
                if verify:
                    run.verify()
                if with_figures:
                    run.measure(chosen[0], knee_p99)
                code = 0
            except KeyboardInterrupt:
                code = INTERRUPTED
            finally:
                run.close()
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Exception as error:  # noqa: BLE001 - what was measured until then is shown all the same
            report.missed.append(f"{type(error).__name__}: {error}")
    report.judged = code != INTERRUPTED
    if not report.judged:
        console.print("interrupted: this is what was measured until then")
    else:
        report.missed += thresholds.missed(report.results or report.ramp[:1], report.recoveries)
        report.missed += [f"{each.kind}: {each.error}" for each in report.broke if each.error]
    if out is not None:
        try:
            _write(console, report, out)
        except OSError as error:
            report.missed.append(f"no report is written: {error}")
    show(console, report)
    raise typer.Exit(code or (0 if report.passed else 1))


def _setting(source: Source) -> dict[str, Any]:
    words = sys.argv[1:]
    if "--out" in words:  # where it is written says nothing of the run
        at = words.index("--out")
        words = words[:at] + words[at + 2 :]
    return {
        "command": " ".join(words), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count(),
        "conversations": len(source), "turns": sum(len(each) for each in source),
    }  # fmt: skip


def _write(console: Console, report: Report, folder: Path) -> None:
    (folder / "report.json").write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    try:
        draw(report, folder)
    except ImportError:
        console.print("no pictures: they need matplotlib")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
