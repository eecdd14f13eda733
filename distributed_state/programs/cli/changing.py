"""Commands that change records, and that publish events to the fleet.

Law: what cannot be undone asks first, and each command prints what was written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import distributed_state
from distributed_state.errors import InvalidValue, NotFound
from distributed_state.programs.cli.shell import Id, Scope, app, open_store, printable, record_of


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


send = typer.Typer(
    help="Publish an event to every replica: what a user did, or one of your own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(send, name="send")
Conversation = Annotated[str, typer.Argument(help="Id of the conversation.", show_default=False)]
Client = Annotated[str, typer.Option(help="Name of the client: the window or program that the user works in.")]


@send.command("new-conversation")
def new_conversation(
    context: typer.Context,
    id: Conversation,
    clear: Annotated[bool, typer.Option("--clear", help="Clear an existing one: no fields, no messages.")] = False,
    user: Annotated[str | None, typer.Option(help="Whose conversation it is.")] = None,
) -> None:
    """Create a conversation, or clear one.

    Example: [cyan]distributed-state send new-conversation c1 --user u1[/]
    """
    with open_store(context) as store:
        session = store.session(id, user=user)
        if clear:
            _require(store, id)
            _print_version("conversation.cleared", id, session.clear(messages=True))
        else:
            _print_version("conversation.created", id, session.create())


@send.command()
def switch(
    context: typer.Context,
    id: Conversation,
    previous: Annotated[str, typer.Option(help="Id of the previous conversation.")] = "",
    client: Client = "",
) -> None:
    """Switch a client to a conversation.

    Example: [cyan]distributed-state send switch c2 --previous c1 --client web[/]
    """
    with open_store(context) as store:
        _require(store, id)
        _print_version("conversation.switched", id, store.session(id).switch(previous_id=previous, client=client))


@send.command("delete")
def delete_conversation(context: typer.Context, id: Conversation) -> None:
    """Delete a conversation.

    Example: [cyan]distributed-state send delete c1[/]
    """
    with open_store(context) as store:
        _print_version("conversation.deleted", id, store.delete(id))


@send.command()
def activate(
    context: typer.Context,
    agent: Annotated[str, typer.Argument(help="Name of the agent to activate.", show_default=False)],
    previous: Annotated[
        str | None, typer.Option(help="Name of the previous agent; by default the one that this client activated last.")
    ] = None,
    conversation: Annotated[str, typer.Option(help="Id of the client's conversation.")] = "",
    client: Client = "",
) -> None:
    """Activate an agent for a client. The agent that it had before is deactivated.

    Example: [cyan]distributed-state send activate notes --client web[/]
    """
    with open_store(context) as store:
        _print_event(store.activate_agent(agent, client=client, conversation_id=conversation, previous_agent=previous))


@send.command()
def directory(
    context: typer.Context,
    old: Annotated[str, typer.Argument(help="The previous directory.", show_default=False)],
    new: Annotated[str, typer.Argument(help="The new directory.", show_default=False)],
    client: Client = "",
) -> None:
    """Change a client's working directory.

    Example: [cyan]distributed-state send directory /home/u /home/u/project --client web[/]
    """
    with open_store(context) as store:
        _print_event(store.change_directory(new, client=client, old_path=old))


@send.command()
def event(
    context: typer.Context,
    type_: Annotated[
        str, typer.Argument(metavar="TYPE", help="Type of the event, such as mail.sent.", show_default=False)
    ],
    subject: Annotated[str, typer.Option(help="What the event is about, such as session:c1.")] = "",
    data: Annotated[str, typer.Option(help="Data of the event, a JSON object.")] = "{}",
) -> None:
    """Publish an event of your own.

    Example: [cyan]distributed-state send event mail.sent --subject user:u1 --data '{"id": 7}'[/]
    """
    try:
        decoded = json.loads(data)
    except ValueError as error:
        raise InvalidValue(f"--data {data!r:.80} is not JSON ({error})") from error
    if not isinstance(decoded, dict):
        raise InvalidValue(f"--data is a JSON object, not {data!r:.80}")
    with open_store(context) as store:
        _print_event(store.emit(type_, decoded, subject=subject))


def _print_event(event: distributed_state.Event) -> None:
    typer.echo(json.dumps(event.to_dict()))


def _require(store: distributed_state.StateStore, id: str) -> None:
    if not store.session(id).exists(fresh=True):
        raise NotFound(f"there is no session {id!r}")


def _print_version(type: str, id: str, version: int) -> None:
    typer.echo(f"{type} {printable(id)} version {version}")
