"""Demos for newcomers. Law: a demo is real, verifies itself, and leaves nothing running."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from distributed_state.programs.cli.shell import app, out, print_json

_HELP = "Watch it work: real servers and processes, in this terminal, verified at the end."
demo = typer.Typer(
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(demo, name="demo")


@demo.callback()
def _demos() -> None:
    """Make `lifecycle` a subcommand, though it is the only one."""


@demo.command()
def lifecycle(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(help="Redis or Valkey to use; by default one is started.")] = None,
    archive: Annotated[str | None, typer.Option(help="SQL database to use; by default a SQLite file.")] = None,
    pause: Annotated[
        float | None, typer.Option(min=0, help="Seconds between steps; by default 0.8 on a terminal, else 0.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep notes, logs and the database in this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the result, as JSON.")] = False,
) -> None:
    """Run three replicas that create, switch, clear and delete conversations, and kill one of them meanwhile.

    Each replica is a process that runs the same agent. What one does runs the hooks of all; the one that was killed
    comes back and receives the events that it missed. At the end the events that each received are compared with the
    stream and with SQL. Takes less than half a minute; exit code 1 if anything differs.

    Example: [cyan]distributed-state demo lifecycle[/]
    """
    from distributed_state.programs.demo.lifecycle import Plan
    from distributed_state.programs.demo.lifecycle import lifecycle as run
    from distributed_state.programs.demo.screen import Screen

    given = context.obj
    if pause is None:
        pause = 0.8 if sys.stdout.isatty() and not as_json else 0.0
    screen = Screen(Console(quiet=True) if as_json else out)
    report = run(Plan(url=url or given["url"], archive=archive or given["archive"], keep=keep, pause=pause), screen)
    if as_json:
        print_json(report.to_dict())
    else:
        screen.close(report)
    if report.differences:
        raise typer.Exit(1)
