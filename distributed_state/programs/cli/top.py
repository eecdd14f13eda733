"""The fleet, live. Law: while a server is away it says so and goes on, and Ctrl-C ends it as one ends it."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from distributed_state.programs.cli.shell import app, open_existing, out


@app.command()
def top(
    context: typer.Context,
    interval: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look for one interval, print what was seen, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as one JSON object.")] = False,
) -> None:
    """Watch the fleet: commits a second, what waits for SQL, the slowest replicas, the busiest conversations.

    It asks Redis alone, so it works while SQL is away, and goes on while Redis is. Ctrl-C ends it. Where the output is
    no terminal it prints once. The busiest are a sample of the ends of the journals: see "sampled".

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents top --interval 5[/]
    """
    # It is no replica, archives nothing, and says what is away at once instead of trying for long.
    quick = {"archiver": False, "timeout": 1.0, "retry_for": 0.0, "sql_timeout": 2.0}
    try:
        with open_existing(context, **quick) as store:
            from distributed_state.programs import fleet_screen

            watched = fleet_screen.Watched(store, interval)
            if sys.stdout.isatty() and not once and not as_json:
                watched.live(out)
            elif as_json:
                sys.stdout.write(json.dumps(fleet_screen.fields(watched.once())) + "\n")
            else:
                out.print(watched.shown(watched.once(), rows=sys.maxsize))
    except KeyboardInterrupt:
        raise typer.Exit from None
