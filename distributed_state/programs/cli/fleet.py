"""Commands that show the fleet: replicas, events, leases, and the findings of the doctor.

Law: people and programs can read all output.

A lease is named by its fencing token; ending it has no effect if the record's lease now has another token.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import distributed_state
from distributed_state.errors import ConfigurationError, NotFound, Unavailable
from distributed_state.programs.cli.shell import (
    Id,
    Scope,
    ago,
    app,
    err,
    group,
    moment,
    open_existing,
    out,
    plain,
    print_json_lines,
    print_table,
    printable,
    say_more,
    span,
    stop_on_signals,
    when,
)

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
    role: Annotated[
        str | None, typer.Option(help="Only replicas with this role: service, archiver, agents or worker.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Rows per page.")] = 100,
    after: Annotated[
        str | None, typer.Option(help="Continue after this replica, which the previous page printed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List the running replicas, the oldest first, each with its role, load and progress.

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents replicas[/]
    """
    with open_existing(context) as store:
        found = store.admin.replicas()
    found = [each for each in found if role is None or role in each.role.split(" + ")]
    begin = 0 if after is None else _behind(found, after)
    found, left = found[begin : begin + limit], len(found) - begin - limit
    if left > 0:
        err.print(f"{left} more replicas: continue with --after {found[-1].id}", markup=False, highlight=False)
    if as_json:
        print_json_lines(map(_fields, found))
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
    print_table(table)


def _behind(found: list[distributed_state.results.Replica], id: str) -> int:
    at = next((at for at, each in enumerate(found) if each.id == id), None)
    if at is None:
        raise NotFound(f"replica {id!r:.80} is no longer listed: start again without --after")
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
            help="Where to start: an age (10m), a date and time, 'oldest' in Redis, or a position that `tail` printed."
        ),
    ] = None,
    conversation: Annotated[str | None, typer.Option(help="Only events of this conversation.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many events.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one CloudEvent per line.")] = False,
) -> None:
    """Print the events of all replicas as they occur, until Ctrl-C; then print the position from which to continue.

    Example: [cyan]distributed-state --url redis://host --archive sqlite:///a.db tail "conversation.*" --since 10m[/]
    """
    stopping = stop_on_signals()
    named = since is not None and (since == "oldest" or "@" in since)
    begin = None if named else moment("--since", since, time.time())
    wanted = types or ["*"]
    left = count
    reached: dict[tuple[str, int], int] = {}
    with (
        open_existing(context) as store,
        store.events(*wanted, since=since if named else None) as events,
    ):
        try:
            past = _past(store, begin, wanted, conversation)
            while not stopping() and left != 0:
                event = archived = next(past, None)
                if event is None:
                    event = events.next(0.2)
                    # The archive and the stream overlap: events that the archive has shown are skipped here.
                    if event is None or event.sequence <= reached.get((event.epoch, event.partition), -1):
                        continue
                if conversation is None or event.type == "resync" or event.conversation_id == conversation:
                    _show(event, as_json)
                    left = None if left is None else left - 1
                if archived is not None:
                    reached[archived.epoch, archived.partition] = archived.sequence
        except BrokenPipeError:
            # The reader closed the pipe: nothing may be written to it from now on, not even at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        finally:
            place = _after(events.position, reached)
            err.print(f"to continue from here: --since {place}", markup=False, highlight=False, soft_wrap=True)


def _after(position: str, reached: dict[tuple[str, int], int]) -> str:
    """The position after what was shown: the archive may have been ahead of the stream."""
    from distributed_state.warm import stream

    places = stream.parsed(position, sys.maxsize) if position != "oldest" else {}
    for (epoch, partition), sequence in reached.items():
        if (at := places.get(partition)) is not None and at.epoch == epoch and at.offset < sequence:
            places[partition] = stream.Position(epoch, sequence)
    return stream.shown(places)


def _past(
    store: distributed_state.StateStore, begin: float | None, types: list[str], conversation: str | None
) -> Iterator[distributed_state.Event]:
    """Yield the events archived since then, the oldest first."""
    if begin is None:
        return
    after = "oldest"
    while page := store.admin.audit(conversation=conversation, since=begin, after=after, limit=_PAGE):
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
        line.append(f" events of {partitions} partitions were missed ({event.data.get('reason')})", style="red")
    else:
        line.append(f" {printable(event.subject)}" if event.subject else "", style="bold")
        line.append(f" v{event.version}" if event.version else "")
        line.append(f" by {printable(event.actor)}" if event.actor else "")
        line.append(f" {_short(event.data, 300)}" if event.data else "", style="dim")
    return line


def _short(value: Any, length: int) -> str:
    text = printable(json.dumps(value, ensure_ascii=False)) if value else ""
    return text if len(text) <= length else text[: length - 3] + "..."


def _fields(replica: distributed_state.results.Replica) -> dict[str, Any]:
    fields = {name: getattr(replica, name) for name in distributed_state.results.Replica.__dataclass_fields__}
    return fields | {"role": replica.role}


@app.command()
def leases(
    context: typer.Context,
    scope: Annotated[
        str | None, typer.Option(help="Only leases of records of this kind: session, user, app or task.")
    ] = None,
    prefix: Annotated[str, typer.Option(help="Only records whose ids begin with this.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Rows per page.")] = 100,
    after: Annotated[
        str | None, typer.Option(help="Continue after this cursor, which the previous page printed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List the held leases of records, locks and running turns, the oldest first, and how many replicas wait for each.

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents leases[/]
    """
    with open_existing(context) as store:
        found = store.admin.leases(scope=scope, prefix=prefix, limit=limit, after=after)
        now = store.time() if found and not as_json else 0.0
    if as_json:
        print_json_lines(map(asdict, found))
    else:
        table = Table("record", "kind", "token", "replica", "held", "ends in", "waiting")
        for each in found:
            times = [ago(now - each.since), f"{max(0.0, each.ends - now):.0f}s", str(each.waiting or "")]
            row = [f"{each.scope} {each.record_id}", each.kind, str(each.token), each.replica, *times]
            table.add_row(*(plain(text) for text in row))
        print_table(table)
    if len(found) == limit:
        say_more(found[-1].cursor)


@app.command(name="end-lease")
def end_lease(
    context: typer.Context,
    id: Id,
    token: Annotated[int, typer.Argument(help="Fencing token of the lease, which `leases` shows.", show_default=False)],
    scope: Scope = "session",
) -> None:
    """End a lease, whoever holds it. The holder's later writes are refused, and the first waiter gets the record.

    Example: [cyan]distributed-state end-lease c1 1764123456789012[/]
    """
    with open_existing(context) as store:
        if not store.admin.end_lease(id, token, scope=scope):
            raise NotFound(f"{scope} {id!r:.200}: no lease with token {token} is held; `leases` lists the held ones")


@app.command()
def doctor(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Check Redis, SQL and the archivers, and advise what to do. Exit code 1 if a problem needs attention.

    Each server is checked separately: while one is down, the other one is still checked.

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents doctor[/]
    """
    findings = _findings(context)
    if as_json:
        print_json_lines(map(_told, findings))
    else:
        table = Table("", "what", "found", "what to do")
        for each in findings:
            mark = "[green]ok[/]" if each.ok else "[red]bad[/]"
            table.add_row(mark, plain(each.name), plain(each.found), plain(each.advice))
        print_table(table)
    if not all(each.ok for each in findings):
        raise typer.Exit(1)


def _findings(context: typer.Context) -> list[distributed_state.results.Finding]:
    try:
        # This store does not archive, because the doctor must see whether others do.
        with open_existing(context, archiver=False) as store:
            return store.admin.doctor()
    except (Unavailable, NotFound) as error:
        from distributed_state.store.doctor import examine_apart

        settings = distributed_state.Settings.of(**context.obj)
        if settings.url is None:
            raise
        return examine_apart(settings, error)


def _told(finding: distributed_state.results.Finding) -> dict[str, Any]:
    return {"name": finding.name, "ok": finding.ok, "found": finding.found, "advice": finding.advice}


@app.command()
def top(
    context: typer.Context,
    interval: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Measure for one interval, print the result, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Like --once, but print one JSON object.")] = False,
) -> None:
    """Show the fleet live: commits per second, unarchived commits, the slowest replicas, the busiest records.

    It reads only from Redis, so it works while SQL is down. While Redis is down, it shows the last figures. Ctrl-C ends
    it. If the output is not a terminal, it prints once. The busiest records are estimated from a sample of the newest
    commits; the output says how many.

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents top --interval 5[/]
    """
    # Not a replica: it archives nothing, and reports an unavailable server at once instead of retrying.
    quick = {"archiver": False, "timeout": 1.0, "retry_for": 0.0, "sql_timeout": 2.0}
    try:
        with open_existing(context, **quick) as store:
            from distributed_state.programs.cli import top as screen

            watched = screen.Watched(store, interval)
            if sys.stdout.isatty() and not once and not as_json:
                watched.live(out)
            elif as_json:
                sys.stdout.write(json.dumps(screen.fields(watched.once())) + "\n")
            else:
                out.print(watched.shown(watched.once(), rows=sys.maxsize))
    except KeyboardInterrupt:
        raise typer.Exit from None


maintenance = group(
    "maintenance",
    """Announce maintenance, so that planned restarts raise no alarm; end it; without a command, show it.

    Alerts about restarts are silent until its end, those about lost data or refused writes are not.

    Example: [cyan]distributed-state --url redis://host maintenance on --for 10m --reason "new Valkey"[/]
    """,
)

Actor = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Name of the person, for the audit; by default USER@HOST.", show_default=False),
]


@maintenance.callback(invoke_without_command=True, no_args_is_help=False)
def show_maintenance(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the announced maintenance, unless a command follows."""
    if context.invoked_subcommand is not None:
        return
    with _announcing(context) as (_, maintained, finish):
        found = finish(maintained.refresh())
    if as_json:
        sys.stdout.write(json.dumps(None if found is None else asdict(found)) + "\n")
    else:
        typer.echo(printable(str(found)) if found else "no maintenance")


@maintenance.command("on")
def begin_maintenance(
    context: typer.Context,
    lasts: Annotated[str, typer.Option("--for", metavar="TIME", help="How long, such as 10m; at most 4h.")],
    reason: Annotated[str, typer.Option(help="Why, for those who see it.")] = "",
    actor: Actor = None,
) -> None:
    """Announce maintenance from now on, also to extend or shorten an earlier one.

    Example: [cyan]distributed-state --url redis://host maintenance on --for 10m --reason "new Valkey"[/]
    """
    seconds = span("--for", lasts)
    with _announcing(context) as (store, maintained, finish):
        by = actor or _somebody()
        with store.acting_as(by):
            found = finish(maintained.begin(seconds, by, reason))
            with _audited():
                store.emit("maintenance.announced", {"ends": found.ends, "reason": reason})
    typer.echo(printable(str(found)))


@maintenance.command("off")
def end_maintenance(context: typer.Context, actor: Actor = None) -> None:
    """End the maintenance now.

    Example: [cyan]distributed-state --url redis://host maintenance off[/]
    """
    with _announcing(context) as (store, maintained, finish):
        by = actor or _somebody()
        with store.acting_as(by):
            finish(maintained.finish(by))
            with _audited():
                store.emit("maintenance.ended")
    typer.echo("no maintenance")


@contextmanager
def _announcing(context: typer.Context) -> Iterator[tuple[distributed_state.StateStore, Any, Any]]:
    """A fleet's store, its Maintenance, and the function that runs that; an embedded store is in this process alone."""
    if context.obj["url"] is None:
        raise ConfigurationError("an embedded store has no fleet to announce maintenance to: name its Redis by --url")
    with open_existing(context, archiver=False) as store:
        from distributed_state.port.background import finish
        from distributed_state.store.lifecycle import core_of, lifecycle_of

        yield store, lifecycle_of(core_of(store)).tiers().maintenance, finish


@contextmanager
def _audited() -> Iterator[None]:
    """The replicas know already; an event that needs SQL does not change that while SQL is under maintenance."""
    try:
        yield
    except Unavailable as error:
        err.print(f"the audit will not have this: {error}", markup=False, highlight=False)


def _somebody() -> str:
    """The user of this terminal; a container's user may have no name."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = str(os.getuid())
    return f"{name}@{platform.node()}"
