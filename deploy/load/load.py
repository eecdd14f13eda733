"""What a fleet carries: load at a constant rate, faults on the way, and everything read back.

    python -m deploy.load.load --local                                  # Redis, PostgreSQL and 2 workers of its own
    python -m deploy.load.load --local --fault kill-worker --fault stop-redis
    python -m deploy.load.load --local --scenario inbox --fault kill-handler --fault stop-redis
    python -m deploy.load.load --local --warm cluster --fault kill-primary --fault reshard
    python -m deploy.load.load --local --figures --out report           # the knee, beside bare redis-py: 5 minutes
    python -m deploy.load.load --url http://worker:8080 --ramp          # a fleet that runs already
    python -m deploy.load.load --compose --fault kill-worker            # the one of docker compose, with faults

Needs `pip install -e '.[load]'`, with --local also `.[bench,serve]`. Exits with 1 if an acknowledged turn is lost or
doubled, or a threshold or a goal missed. What a failover of Sentinel or of a cluster lost, as asynchronous replication
may, is printed.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from deploy.load import faults
from deploy.load.client import reached, targets
from deploy.load.compose_fleet import ComposeFleet
from deploy.load.crew import Crew
from deploy.load.fleet import local_fleet
from deploy.load.measures import without_lost
from deploy.load.reporting import Report, draw, show
from deploy.load.run import Run
from deploy.load.scenarios import INBOX, SCENARIOS
from deploy.load.thresholds import Thresholds
from deploy.load.verifying import Source
from distributed_state.errors import StateError
from distributed_state.programs.replay.coordinator import read_conversations
from distributed_state.programs.servers import working_folder

_KNEE_P99 = 0.25
_SHARE_OF_KNEE = 0.6
INTERRUPTED = 130
_NAMES = ", ".join(SCENARIOS)
_FAULTS = ", ".join(faults.KINDS)
_WARM = ", ".join(faults.WARM_KINDS)


def main(
    url: Annotated[list[str] | None, typer.Option(help="of a worker, or of a balancer; repeat for several")] = None,
    local: Annotated[bool, typer.Option("--local", help="start Redis, PostgreSQL and workers on this machine")] = False,
    compose: Annotated[bool, typer.Option("--compose", help="the fleet of `docker compose` in this folder")] = False,
    warm: Annotated[
        str, typer.Option(help=f"{_WARM}: with --local what is started, with --compose what runs")
    ] = "single",
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
    retry_for: Annotated[float, typer.Option(min=0.1, help="seconds for which a request is repeated")] = 30.0,
    subscribers: Annotated[int, typer.Option(min=1, help="of each process, in the scenario events")] = 10,
    balanced: Annotated[
        bool, typer.Option("--balanced", help="send nothing to a worker whose /readyz fails, as a balancer does")
    ] = False,
    attempts: Annotated[
        int | None,
        typer.Option(min=1, help="how often a request is sent at most; with 1 a refused connection fails it too"),
    ] = None,
    notice: Annotated[float, typer.Option(min=0, help="with --local: the workers' --notice, in seconds")] = 1.0,
    verify: Annotated[bool, typer.Option(help="read everything back")] = True,
    max_p50: Annotated[float | None, typer.Option(help="seconds")] = None,
    max_p99: Annotated[float | None, typer.Option(help="seconds")] = None,
    min_rate: Annotated[float | None, typer.Option(help="answered a second")] = None,
    max_errors: Annotated[float, typer.Option(help="share of the requests that may be given up")] = 0.0,
    max_recovery: Annotated[float, typer.Option(help="seconds from the end of a fault to the first success")] = 5.0,
    max_after_election: Annotated[
        float, typer.Option(help="seconds from the election of a primary to the first success")
    ] = 2.0,
    out: Annotated[Path | None, typer.Option(help="folder for report.json and pictures")] = None,
) -> None:
    """Load a fleet at a constant rate, break it on the way, and read everything back."""
    console = Console()
    everything = [name for name in SCENARIOS if local or name != INBOX]
    chosen = [name for each in scenario or ["chat"] for name in (everything if each == "all" else [each])]
    try:
        if bool(url) + local + compose != 1:
            raise ValueError("name one of --local, --compose, and --url http://worker:8080")
        if unknown := [name for name in chosen if name not in SCENARIOS]:
            raise ValueError(f"{unknown[0]!r}: a scenario is one of {', '.join(SCENARIOS)}, or all")
        if with_figures and not local:
            raise ValueError("--figures are of a fleet of our own: --local")
        if warm not in faults.WARM_KINDS:
            raise ValueError(f"{warm!r}: --warm is one of {_WARM}")
        if with_figures and warm != "single":
            raise ValueError("--figures compare with redis-py on one server: --warm single")
        if fault and url:
            raise ValueError("a fleet that is known by its URL cannot be broken from here: --local or --compose")
        if INBOX in chosen and not local:
            raise ValueError(f"{INBOX!r} needs processes with its handler: --local")
        broken = faults.parse(fault or [], seconds)
        if INBOX not in chosen and any(each.kind == "kill-handler" for each in broken):
            raise ValueError(f"'kill-handler' needs handlers: --scenario {INBOX}")
        faults.check([each.kind for each in broken], warm)
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
    handlers = workers if INBOX in chosen else 0
    thresholds = Thresholds(max_p50, max_p99, min_rate, max_errors, max_recovery, max_after_election)
    report = Report(_setting(source), max_p99=knee_p99)
    code = 1
    with ExitStack() as stack:
        try:
            fleet: Any = None
            if local:
                folder = stack.enter_context(working_folder(None))
                folder.chmod(0o755)  # PostgreSQL may run as another user
                with console.status("starting Redis, PostgreSQL and workers"):
                    fleet = stack.enter_context(local_fleet(workers, folder, "load", warm, notice, handlers))
            elif compose:
                fleet = ComposeFleet(warm)
            if fleet is not None:
                places = targets(fleet.urls)
            id = f"load-{uuid.uuid4().hex[:8]}"
            words: dict[str, Any] = {"subscribers": subscribers, "balanced": balanced, "attempts": attempts}
            crew = stack.enter_context(Crew(processes, id, places, source, **words))
            run = Run(console, crew, fleet, source, report)
            try:
                found = None
                if with_figures and chosen[0] == "chat":  # bare workers know no other requests
                    found = run.both_ramps(chosen[0], rate or 50.0, knee_p99)
                elif ramp or with_figures:
                    found = run.ramp(chosen[0], rate or 50.0, knee_p99)
                for name in chosen if seconds else []:
                    run.load(name, rate or (found * _SHARE_OF_KNEE if found else 50.0), seconds, broken, retry_for)
                if verify:
                    run.verify()
                if with_figures:
                    run.measure()
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
        results = report.results or report.ramp[:1]
        if faults.may_lose(report.broke, warm):
            results = [without_lost(each) for each in results]
        report.missed += thresholds.missed(results, report.recoveries, list(filter(None, report.outages)))
        report.missed += [f"{each.kind}: {each.error}" for each in report.broke if each.error]
        report.missed += [f"{each.name}: {each.measured}, not {each.goal}" for each in report.missed_figures]
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
