"""Commands that keep SQL small. Law: what cannot be undone asks first."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from distributed_state.programs.cli.auditing import span
from distributed_state.programs.cli.shell import app, err, open_to_tidy


@app.command()
def compact(
    context: typer.Context,
    older_than: Annotated[str, typer.Option(metavar="AGE", help="Pack what is older, as 12h or 7d.")] = "1d",
) -> None:
    """Pack old history into compressed blocks in SQL. Everything reads it as before. Safe beside workers.

    Example: [cyan]distributed-state --archive postgresql://host/agents compact --older-than 7d[/]
    """
    with open_to_tidy(context) as store, err.status("looking") as status:
        done = store.compact(
            older_than=span("--older-than", older_than), progress=lambda records: status.update(f"{records} records")
        )
    typer.echo(f"packed {done['changes']} changes and {done['messages']} messages of {done['records']} records")


def _age(variable: str, help: str) -> Any:
    return typer.Option(envvar=variable, metavar="AGE", help=help)


def _count(variable: str, help: str) -> Any:
    return typer.Option(envvar=variable, min=1, help=help)


_older = _age("DISTRIBUTED_STATE_PURGE_OLDER_THAN", "Versions, branches and events older than 90d.")
_changes = _count("DISTRIBUTED_STATE_PURGE_KEEP_CHANGES", "All but so many changes of each record.")
_messages = _age("DISTRIBUTED_STATE_PURGE_MESSAGES_OLDER_THAN", "Let conversations show no older messages.")
_shown = _count("DISTRIBUTED_STATE_PURGE_KEEP_MESSAGES", "Let conversations show no more messages.")
_events = _age("DISTRIBUTED_STATE_PURGE_EVENTS_OLDER_THAN", "Events older than that, if not of the age of versions.")
_branches = _age("DISTRIBUTED_STATE_PURGE_BRANCHES_OLDER_THAN", "Branches older, if not of the age of versions.")


@app.command()
def purge(
    context: typer.Context,
    older_than: Annotated[str | None, _older] = None,
    keep_changes: Annotated[int | None, _changes] = None,
    messages_older_than: Annotated[str | None, _messages] = None,
    keep_messages: Annotated[int | None, _shown] = None,
    events_older_than: Annotated[str | None, _events] = None,
    branches_older_than: Annotated[str | None, _branches] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove what is old from SQL: versions, events, messages. The present states stay. This cannot be undone.

    Messages that conversations show no more are removed with the versions that showed them. Safe beside workers: no
    transaction takes more than some hundred records or some thousand events.

    Example: [cyan]distributed-state --archive postgresql://host/agents purge --older-than 90d --keep-messages 1000[/]
    """
    ages = {
        "older_than": older_than,
        "messages_older_than": messages_older_than,
        "events_older_than": events_older_than,
        "branches_older_than": branches_older_than,
    }
    seconds = {name: None if age is None else span(f"--{name.replace('_', '-')}", age) for name, age in ages.items()}
    if not yes:
        typer.confirm("Remove it for good?", abort=True, err=True)
    with open_to_tidy(context) as store, err.status("purging"):
        done = store.purge(**seconds, keep_changes=keep_changes, keep_messages=keep_messages)
    typer.echo(
        f"removed {done['changes']} changes, {done['messages']} messages and {done['events']} events of "
        f"{done['records']} records; {done['left_out']} messages are shown no more"
    )
