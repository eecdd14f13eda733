"""Commands that show the fleet and its events. Law: people and programs can read what is shown."""

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
from distributed_state.errors import NotFound
from distributed_state.programs.cli.auditing import ago, moment
from distributed_state.programs.cli.looking import plain, printable, when
from distributed_state.programs.cli.shell import app, err, open_existing, out

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


@app.command()
def replicas(
    context: typer.Context,
    role: Annotated[str | None, typer.Option(help="Only those: service, archiver, agents or worker.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Rows per page.")] = 100,
    after: Annotated[
        str | None, typer.Option(help="Continue behind this replica, which the page before named.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List the running replicas, the oldest first, with what each does in the fleet.

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents replicas[/]
    """
    with open_existing(context) as store:
        found = store.replicas()
    found = [each for each in found if role is None or role in each.role.split(" + ")]
    begin = 0 if after is None else _behind(found, after)
    found, left = found[begin : begin + limit], len(found) - begin - limit
    if left > 0:
        err.print(f"{left} more follow: --after {found[-1].id}", markup=False, highlight=False)
    if as_json:
        # JSON in ASCII: control sequences that a terminal would obey are escaped.
        sys.stdout.writelines(json.dumps(_fields(each)) + "\n" for each in found)
        return
    table = Table(
        "replica", "role", "host", "pid", "version", "started", "seen", "load", "events", "archived", "status"
    )
    now = time.time()
    for each in found:
        waiting = each.stats.get("events_waiting", 0)
        events = f"{each.positions.get('events', 0)}" + (f" ({waiting} wait)" if waiting else "")
        archived = each.positions.get("archived", 0)
        status = printable(each.archiving)[:60] or _short(each.status, 60)
        row = [each.id, each.role, each.host, str(each.pid), each.version, f"{ago(now - each.started)} ago"]
        row += [f"{each.seen:.1f} s ago", f"{each.load:.2f}", events, str(archived), status]
        table.add_row(*(plain(text) for text in row))
    out.print(table)


def _behind(found: list[distributed_state.Replica], id: str) -> int:
    at = next((at for at, each in enumerate(found) if each.id == id), None)
    if at is None:
        raise NotFound(f"there is no replica {id!r:.80} (any more): begin with the first page")
    return at + 1


@app.command()
def tail(
    context: typer.Context,
    types: Annotated[
        list[str] | None, typer.Argument(help="Types of events, such as conversation.deleted or 'conversation.*'.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            help="Where to start: an age (10m, 2h), a date and time, 'oldest' in Redis, or a place that `tail` named."
        ),
    ] = None,
    conversation: Annotated[str | None, typer.Option(help="Only events of this conversation.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many events.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one CloudEvent per line.")] = False,
) -> None:
    """Follow the events of all replicas until Ctrl-C. At the end the position to continue from is printed.

    Example: [cyan]distributed-state --url redis://host --archive sqlite:///a.db tail "conversation.*" --since 10m[/]
    """
    stopping = False

    def stop(*_: Any) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    named = since is not None and (since == "oldest" or "@" in since)
    begin = None if named else moment("--since", since, time.time())
    wanted = types or ["*"]
    left = count
    with (
        open_existing(context) as store,
        store.events(*wanted, since=_position(store, since) if named else None) as events,
    ):
        try:
            past = _past(store, begin, wanted, conversation)
            reached: dict[tuple[str, int], int] = {}
            while not stopping and left != 0:
                event = next(past, None)
                if event is not None:
                    reached[event.epoch, event.partition] = event.sequence
                else:
                    event = events.next(0.2)
                    # The archive and the stream overlap: what the archive has shown is skipped here.
                    if event is None or event.sequence <= reached.get((event.epoch, event.partition), -1):
                        continue
                if conversation is None or event.type == "resync" or event.conversation_id == conversation:
                    _show(event, as_json)
                    left = None if left is None else left - 1
        except BrokenPipeError:
            # The reader closed the pipe: nothing more may be written to it, not even at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        finally:
            place = _place(store, events.position)
            err.print(f"to continue from here: --since {place}", markup=False, highlight=False, soft_wrap=True)


def _position(store: distributed_state.StateStore, since: str | None) -> str | None:
    """What `since` names: the position of a short name that `tail` printed, or a position itself."""
    from distributed_state.port.background import finish
    from distributed_state.store import bookmarks
    from distributed_state.store.twins import twin_of

    if since is None or not bookmarks.is_bookmark(since):
        return since
    return finish(bookmarks.find(twin_of(store).tiers(), since))


def _place(store: distributed_state.StateStore, position: str) -> str:
    """A short name of a position."""
    from distributed_state.port.background import finish
    from distributed_state.store import bookmarks
    from distributed_state.store.twins import twin_of

    return finish(bookmarks.keep(twin_of(store).tiers(), position))


def _past(
    store: distributed_state.StateStore, begin: float | None, types: list[str], conversation: str | None
) -> Iterator[distributed_state.Event]:
    """Yield what was archived since then, the oldest first."""
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
        # Captured, because rich would end the program itself if the pipe is closed.
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
    fields = {name: getattr(replica, name) for name in distributed_state.Replica.__dataclass_fields__}
    return fields | {"role": replica.role}
