"""Commands that tell of the fleet and tell it something. Law: people and programs can read what is shown."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import distributed_state
from distributed_state.errors import InvalidValue, NotFound
from distributed_state.programs.cli.auditing import ago, moment
from distributed_state.programs.cli.looking import plain, printable, when
from distributed_state.programs.cli.shell import app, err, open_store, out

_COLOURS = {
    "conversation": "green",
    "session": "cyan",
    "agent": "magenta",
    "directory": "blue",
    "config": "yellow",
    "lock": "red",
    "replica": "red",
    "resync": "bold white on red",
}
_PAGE = 1000
send = typer.Typer(
    help="Tell every replica of something: what a user did, or an event of your own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(send, name="send")
Conversation = Annotated[str, typer.Argument(help="Id of the conversation.", show_default=False)]
Client = Annotated[str, typer.Option(help="Whose: a name of the window or program that the user has before them.")]


@app.command()
def replicas(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List the replicas that are there, the oldest first.

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents replicas[/]
    """
    with open_store(context) as store:
        found = store.replicas()
    if as_json:
        # ASCII: what a terminal would obey comes escaped.
        sys.stdout.writelines(json.dumps(_fields(each)) + "\n" for each in found)
        return
    table = Table("replica", "host", "pid", "version", "started", "seen", "load", "events", "archived", "status")
    now = time.time()
    for each in found:
        waiting = each.stats.get("events_waiting", 0)
        events = f"{each.positions.get('events', 0)}" + (f" ({waiting} wait)" if waiting else "")
        archived = each.positions.get("archived", 0)
        status = _short(each.status, 60)
        row = [each.id, each.host, str(each.pid), each.version, f"{ago(now - each.started)} ago"]
        row += [f"{each.seen:.1f} s ago", f"{each.load:.2f}", events, str(archived), status]
        table.add_row(*(plain(text) for text in row))
    out.print(table)


@app.command()
def tail(
    context: typer.Context,
    types: Annotated[list[str] | None, typer.Argument(help="As conversation.deleted, or 'conversation.*'.")] = None,
    since: Annotated[
        str | None,
        typer.Option(help="So long ago, as 10m or 2h, a date and time, 'oldest' in Redis, or a position from before."),
    ] = None,
    conversation: Annotated[str | None, typer.Option(help="Only what happens to this conversation.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="End after so many.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One CloudEvent a line.")] = False,
) -> None:
    """Show what happens on any replica, as it happens, until Ctrl-C. At the end the position to go on from is told.

    Example: [cyan]distributed-state --url redis://host --archive sqlite:///a.db tail "conversation.*" --since 10m[/]
    """
    stopping = False

    def stop(*_: Any) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    position = since is not None and (since == "oldest" or "@" in since)
    begin = None if position else moment("--since", since, time.time())
    wanted = types or ["*"]
    left = count
    with open_store(context) as store, store.events(*wanted, since=since if position else None) as events:
        try:
            past = _past(store, begin, wanted, conversation)
            reached: dict[tuple[str, int], int] = {}
            while not stopping and left != 0:
                event = next(past, None)
                if event is not None:
                    reached[event.epoch, event.partition] = event.sequence
                else:
                    event = events.next(0.2)
                    # Both tell of what happened while we looked back.
                    if event is None or event.sequence <= reached.get((event.epoch, event.partition), -1):
                        continue
                if conversation is None or event.type == "resync" or event.conversation_id == conversation:
                    _show(event, as_json)
                    left = None if left is None else left - 1
        except BrokenPipeError:
            # Whoever read this has left; nothing else may be written there, at exit neither.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        finally:
            err.print(f"to go on from here: --since {events.position}", markup=False, highlight=False, soft_wrap=True)


def _past(
    store: distributed_state.StateStore, begin: float | None, types: list[str], conversation: str | None
) -> Iterator[distributed_state.Event]:
    """What was archived since then, the oldest first."""
    if begin is None:
        return
    after = "oldest"
    while page := store.audit(conversation=conversation, since=begin, after=after, limit=_PAGE):
        yield from (each for each in page if any(fnmatchcase(each.type, pattern) for pattern in types))
        after = page[-1].cursor


def _show(event: distributed_state.Event, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(event.to_dict()) + "\n")
    else:
        # Captured: where nobody reads any more, rich ends the program in its own way.
        with out.capture() as shown:
            out.print(_line(event), soft_wrap=True)
        sys.stdout.write(shown.get())
    sys.stdout.flush()


def _line(event: distributed_state.Event) -> Text:
    colour = _COLOURS.get(event.type.partition(".")[0], "white")
    line = Text()
    line.append(when(event.time or time.time())[11:23], style="dim")
    line.append(f"  {printable(event.type):<22}", style=colour)
    if event.type == "resync":
        partitions = len(event.data.get("partitions", []))
        line.append(f" events of {partitions} partitions were missed here ({event.data.get('reason')})", style="red")
    else:
        line.append(f" {printable(event.subject)}" if event.subject else "", style="bold")
        line.append(f" v{event.version}" if event.version else "")
        line.append(f" by {printable(event.actor)}" if event.actor else "")
        line.append(f" {_short(event.data, 300)}" if event.data else "", style="dim")
    return line


def _short(value: Any, length: int) -> str:
    text = printable(json.dumps(value, ensure_ascii=False)) if value else ""
    return text if len(text) <= length else text[: length - 3] + "..."


def _fields(replica: distributed_state.Replica) -> dict[str, Any]:
    return {name: getattr(replica, name) for name in distributed_state.Replica.__dataclass_fields__}


# Telling


@send.command("new-conversation")
def new_conversation(
    context: typer.Context,
    id: Conversation,
    clear: Annotated[bool, typer.Option("--clear", help="Begin an existing one anew: no fields, no messages.")] = False,
    user: Annotated[str | None, typer.Option(help="Whose conversation it is.")] = None,
) -> None:
    """Begin a conversation.

    Example: [cyan]distributed-state send new-conversation c1 --user u1[/]
    """
    with open_store(context) as store:
        session = store.session(id, user=user)
        if clear:
            _existing(store, id)
            _written("conversation.cleared", id, session.clear(messages=True))
        else:
            _written("conversation.created", id, session.create())


@send.command()
def switch(
    context: typer.Context,
    id: Conversation,
    previous: Annotated[str, typer.Option(help="Id of the conversation before.")] = "",
    client: Client = "",
) -> None:
    """Tell that a client goes on with this conversation.

    Example: [cyan]distributed-state send switch c2 --previous c1 --client web[/]
    """
    with open_store(context) as store:
        _existing(store, id)
        _written("conversation.switched", id, store.session(id).switch(previous_id=previous, client=client))


@send.command()
def delete(context: typer.Context, id: Conversation) -> None:
    """Delete a conversation.

    Example: [cyan]distributed-state send delete c1[/]
    """
    with open_store(context) as store:
        _written("conversation.deleted", id, store.delete(id))


@send.command()
def activate(
    context: typer.Context,
    agent: Annotated[str, typer.Argument(help="Name of the agent that a client chose.", show_default=False)],
    previous: Annotated[
        str | None, typer.Option(help="Name of the agent before; by default the one that this client chose last.")
    ] = None,
    conversation: Annotated[str, typer.Option(help="Id of the conversation that it goes on with.")] = "",
    client: Client = "",
) -> None:
    """Tell that a client chose an agent. The one that it had before is deactivated.

    Example: [cyan]distributed-state send activate notes --client web[/]
    """
    with open_store(context) as store:
        _told(store.activate_agent(agent, client=client, conversation_id=conversation, previous_agent=previous))


@send.command()
def directory(
    context: typer.Context,
    old: Annotated[str, typer.Argument(help="The folder that the client was in.", show_default=False)],
    new: Annotated[str, typer.Argument(help="The folder that it is in now.", show_default=False)],
    client: Client = "",
) -> None:
    """Tell that a client is in another folder.

    Example: [cyan]distributed-state send directory /home/u /home/u/project --client web[/]
    """
    with open_store(context) as store:
        _told(store.change_directory(new, client=client, old_path=old))


@send.command()
def event(
    context: typer.Context,
    type_: Annotated[str, typer.Argument(metavar="TYPE", help="As mail.sent.", show_default=False)],
    subject: Annotated[str, typer.Option(help="What it is about, as session:c1.")] = "",
    data: Annotated[str, typer.Option(help="A JSON object.")] = "{}",
) -> None:
    """Tell of anything else.

    Example: [cyan]distributed-state send event mail.sent --subject user:u1 --data '{"id": 7}'[/]
    """
    try:
        decoded = json.loads(data)
    except ValueError as error:
        raise InvalidValue(f"--data {data!r:.80} is not JSON ({error})") from error
    if not isinstance(decoded, dict):
        raise InvalidValue(f"--data is a JSON object, not {data!r:.80}")
    with open_store(context) as store:
        _told(store.emit(type_, decoded, subject=subject))


def _told(event: distributed_state.Event) -> None:
    typer.echo(json.dumps(event.to_dict()))


def _existing(store: distributed_state.StateStore, id: str) -> None:
    if not store.session(id).exists(fresh=True):
        raise NotFound(f"there is no session {id!r}")


def _written(type: str, id: str, version: int) -> None:
    typer.echo(f"{type} {printable(id)} version {version}")
