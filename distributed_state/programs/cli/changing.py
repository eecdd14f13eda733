"""Commands that change and remove records. Law: what cannot be undone asks first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from distributed_state.errors import InvalidValue
from distributed_state.programs.cli.shell import Id, Scope, app, open_store, record_of


@app.command("set")
def set_(
    context: typer.Context,
    id: Id,
    key: Annotated[str, typer.Argument(help="Name of the field.", show_default=False)],
    value: Annotated[str, typer.Argument(help="Its value as JSON; text needs quotes.", show_default=False)],
    scope: Scope = "session",
) -> None:
    """Set one field and print the record's new version.

    Example: [cyan]distributed-state set user-123 name '"Alice"'[/]
    """
    try:
        decoded = json.loads(value)
    except ValueError as error:
        raise InvalidValue(f"{value!r} is not JSON ({error}); text needs quotes: '\"text\"'") from error
    with open_store(context) as store:
        version = record_of(store, scope, id).set(key, decoded)
    typer.echo(version)


@app.command()
def fork(
    context: typer.Context,
    id: Id,
    new_id: Annotated[str, typer.Argument(help="Id of the new record.", show_default=False)],
    version: Annotated[int | None, typer.Option(help="Fork the state at this version; by default the present.")] = None,
    branch: Annotated[str | None, typer.Option(help="Fork the state of this branch; see `branches`.")] = None,
    scope: Scope = "session",
) -> None:
    """Start another record from a record's state, and print its version. Messages are shared.

    Example: [cyan]distributed-state fork user-123 user-123-lost --branch 3-9f2c01ab[/]
    """
    with open_store(context) as store:
        typer.echo(record_of(store, scope, id).fork(new_id, version=version, branch=branch))


@app.command()
def delete(context: typer.Context, id: Id, scope: Scope = "session") -> None:
    """Delete a record. Its history stays until it is purged or erased, or its user is forgotten.

    Example: [cyan]distributed-state delete user-123[/]
    """
    with open_store(context) as store:
        version = store.delete(id, scope=scope)
    typer.echo(f"deleted as version {version}")


@app.command()
def erase(
    context: typer.Context,
    id: Id,
    scope: Scope = "session",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a record with its messages, history and events. Its forks stay. This cannot be undone.

    Example: [cyan]distributed-state erase user-123[/]
    """
    if not yes:
        typer.confirm(f"Remove {scope} {id!r}, with its history, for good?", abort=True, err=True)
    with open_store(context) as store:
        found = store.erase(id, scope=scope)
    typer.echo("erased" if found else "there was nothing to erase")


@app.command()
def forget(
    context: typer.Context,
    user: Annotated[str, typer.Argument(help="Id of the user.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove every trace of a user: records, sessions, history, forks. This cannot be undone.

    Example: [cyan]distributed-state forget u1[/]
    """
    if not yes:
        typer.confirm(f"Remove everything about user {user!r}, with its history, for good?", abort=True, err=True)
    with open_store(context) as store:
        count = store.forget(user)
    typer.echo(f"{count} records removed")


@app.command("reload-config")
def reload_config(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A YAML file, or JSON if its name ends so.", show_default=False)],
    agent: Annotated[str, typer.Option(help="Only for the agent with this name.")] = "",
) -> None:
    """Replace the config of the running agents, on every replica, without a restart.

    Example: [cyan]distributed-state reload-config agents.yaml --agent note_agent[/]
    """
    with open_store(context) as store:
        version = store.reload_config(file, agent=agent)
    typer.echo(f"config of {f'agent {agent}' if agent else 'all agents'} is version {version}")
