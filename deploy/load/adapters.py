"""What adapters cost beside the stores that their frameworks bring: one run, the same servers, ratios.

    python deploy/load/adapters.py [--only openai] [--json adapters.json] [--into docs/figures/adapters.md]

Needs the extras of the frameworks that are measured. Starts its own Redis or Valkey and PostgreSQL on free ports.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

if not __package__:
    sys.path[0] = str(Path(__file__).parents[2])  # it is a program, and the rest of `deploy` is beside it

from deploy.load.frameworks import table
from deploy.load.rows import Row, report
from distributed_state.programs.servers import postgres_server, redis_server

# Of each the module whose `rows(redis, archive)` measures: imported when it is asked for, as it imports its framework.
MEASURED = {
    "openai": "deploy.load.frameworks.openai_agents",
    "langgraph": "deploy.load.frameworks.langgraph",
    "adk": "deploy.load.frameworks.adk",
    "agno": "deploy.load.frameworks.agno",
    "strands": "deploy.load.frameworks.strands",
}
# CrewAI fits beside no other, so it is measured in an environment of its own.
APART = {"crewai": "deploy.load.frameworks.crewai"}


def main(
    only: Annotated[str, typer.Option(help=f"of {', '.join([*MEASURED, *APART])}, with commas between")] = "",
    as_json: Annotated[Path | None, typer.Option("--json", help="write the rows as JSON")] = None,
    into: Annotated[Path | None, typer.Option(help="write them into the table of this document")] = None,
) -> None:
    """Measure and print ratios; exit 1 if a goal is missed."""
    console = Console()
    names = only.split(",") if only else list(MEASURED)
    known = MEASURED | APART
    if unknown := set(names) - known.keys():
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are {', '.join(known)}")
    rows: list[Row] = []
    for name in names:
        console.print(f"{name} ...")
        with redis_server() as server, postgres_server() as postgres:
            rows += import_module(known[name]).rows(server.url, postgres.url)
    if into:
        table.write(rows, into)
    report(console, rows, None, as_json)


if __name__ == "__main__":
    typer.run(main)
