"""How fast the store is beside the obvious alternative: one run, interleaved, medians, ratios.

    python deploy/load/bench.py [--png bench.png] [--json bench.json] [--only set,lock]

Starts its own Redis or Valkey and PostgreSQL on free ports. Absolute times belong to the machine; ratios travel.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

if not __package__:
    sys.path[0] = str(Path(__file__).parents[2])  # it is a program, and the rest of `deploy` is beside it

from deploy.load.conversations import long_conversation, saving, turns, window
from deploy.load.hot_reads import hot, hot_memory, weight, writers_memory
from deploy.load.in_cluster import in_cluster
from deploy.load.long_reads import long_reads
from deploy.load.plain import same_commands
from deploy.load.rows import Row, at_most, report
from deploy.load.several import archiver, hand_off, processes
from deploy.load.turn_cpu import turn_cpu
from deploy.load.writes import asyncio_set, blocking_set, server_cpu, telemetry
from distributed_state import StateStore
from distributed_state.programs.servers import postgres_server, redis_server


def main(
    png: Annotated[Path | None, typer.Option(help="write the ratios as a picture")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="write the rows as JSON")] = None,
    only: Annotated[
        str,
        typer.Option(
            help="sections, by comma: import,hot,memory,set,telemetry,async,long,lock,agent,archiver,processes,cluster"
        ),
    ] = "",
) -> None:
    """Measure and print ratios; exit 1 if a goal is missed."""
    console = Console()
    rows = list[Row]()
    wanted = set(filter(None, only.split(",")))

    def run(name: str, measure: Callable[[], list[Row]]) -> None:
        if not wanted or name in wanted:
            console.print(f"{name} ...")  # no spinner: its thread would take part in the measurement
            rows.extend(measure())

    run("import", weight)
    with redis_server() as server, tempfile.TemporaryDirectory() as directory:
        with StateStore.open(server.url, archive="memory", namespace="bench", archiver=False) as store:
            console.print(f"a `set` executes: {same_commands(server.url, store)}")
            run("hot", lambda: hot(server.url, store))
            run("memory", lambda: hot_memory(server.url) + writers_memory(server.url))
            run("set", lambda: blocking_set(server.url, store))
            run("set", server_cpu)
            run("telemetry", lambda: telemetry(server.url))
            run("long", lambda: long_conversation(server.url, store))
            run("long", lambda: [at_most(*each) for each in long_reads(server.url)])
            run("lock", lambda: hand_off(server.url, store))
        run("async", lambda: asyncio.run(asyncio_set(server.url)))
        sqlite = f"sqlite:///{directory}/bench.db"
        run("agent", lambda: [
            *turn_cpu(server.url), *turns(server.url, sqlite), *saving(server.url, sqlite), *window(server.url, sqlite)
        ])  # fmt: skip
        run("archiver", lambda: [archiver(server.url, sqlite, "SQLite", 15_000)])
        if not wanted or "archiver" in wanted:
            with postgres_server() as postgres:
                run("archiver", lambda: [archiver(server.url, postgres.url, "PostgreSQL", 8_000)])
        run("processes", lambda: processes(server.url, sqlite))
        run("cluster", lambda: in_cluster(server))

    report(console, rows, png, as_json)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
