"""Commands that show the fleet: replicas, events, leases, and what a doctor finds; and the screen of `top`.

Law: people and programs can read what is shown. On a screen text of others is escaped, and cut to fit.

A lease is named by its fencing token, and ended only if it is that one.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

import distributed_state
from distributed_state.errors import NotFound, StateError, Unavailable
from distributed_state.port.background import finish
from distributed_state.programs.cli.shell import (
    Id,
    Scope,
    ago,
    app,
    err,
    moment,
    open_existing,
    out,
    plain,
    print_json_lines,
    printable,
    say_more,
    stop_on_signals,
    when,
)
from distributed_state.store.fleet import FleetLooks, Overview, ReplicaRates
from distributed_state.store.lifecycle import twin_of

_SAMPLE = 0.25  # seconds between two looks at the ends of the journals
_OLD = 10.0  # seconds that a commit waits for SQL before that is shown in red
_SILENT = 10.0  # and that a replica was not heard of
_FRAME = 9  # lines of the screen that are no rows of a table


class Watched:
    """A store's fleet, looked at every `interval` seconds."""

    def __init__(self, store: distributed_state.StateStore, interval: float) -> None:
        twin = twin_of(store)
        self._watch = FleetLooks(twin.tiers())
        self._namespace = twin.settings.namespace
        self._interval = interval

    def once(self) -> Overview:
        """Two looks, an interval apart: the second one. Raises WarmUnavailable."""
        finish(self._watch.look())
        self._wait()
        return finish(self._watch.look())

    def live(self, console: Console) -> None:
        """Show the fleet until Ctrl-C."""
        logging.disable(logging.ERROR)  # the screen says which server is unavailable, and lines of a log would break it
        seen: Overview | None = None
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                try:
                    seen, away = finish(self._watch.look()), ""
                except StateError as error:
                    away = str(error)
                live.update(self.shown(seen, away, rows=max(2, console.height - _FRAME)), refresh=True)
                self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + self._interval
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _SAMPLE))
            try:
                finish(self._watch.sample())
            except StateError:
                return  # the look that follows says so

    def shown(self, seen: Overview | None, away: str = "", *, rows: int) -> RenderableType:
        """One screen. `away` says why Redis does not answer; then what was seen before is shown, as such."""
        head = Text.assemble(("distributed-state top", "bold"), f"  namespace {printable(self._namespace)}  ")
        head.append(time.strftime("%H:%M:%S"), style="dim")
        parts: list[RenderableType] = [head]
        if away:
            parts.append(Text(f"Redis does not answer; below is what was seen before: {printable(away)}", style="red"))
        if seen is None:
            return Group(*parts)
        if seen.trouble:
            parts.append(Text(printable(seen.trouble), style="red", no_wrap=True, overflow="ellipsis"))
        most = max(1, min(len(seen.replicas), rows * 2 // 3))
        total = round((seen.commits or 0.0) * (seen.seconds or 0.0))
        sample = f"Busiest, by {seen.sampled} of {total} commits that were still in the journals"
        parts += [_totals(seen), Text(), Text("Replicas, the slowest first", style="bold"), _replicas(seen, most)]
        parts += [Text(), Text(sample, style="bold"), _busiest(seen, max(1, rows - most))]
        return Group(*parts)


def fields(seen: Overview) -> dict[str, Any]:
    """An overview as JSON."""
    replicas = [asdict(each) | {"role": each.replica.role} for each in seen.replicas]
    return asdict(seen) | {"replicas": replicas, "busiest": [list(each) for each in seen.busiest]}


def _totals(seen: Overview) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{_number(seen.commits)} commits/s", style="bold green")
    text.append(f"   {_number(seen.archived)} archived/s   {len(seen.replicas)} replicas   ")
    late = "bold red" if seen.oldest > _OLD or seen.fullest > 0.5 else ""
    lag = f"{seen.waiting} wait for SQL, the oldest {seen.oldest:.1f} s" if seen.waiting else "none waits for SQL"
    text.append(f"{lag}; the fullest journal {seen.fullest:.0%}", style=late)
    return text


def _replicas(seen: Overview, rows: int) -> Table:
    columns = [
        "replica",
        "host",
        "pid",
        "role",
        "seen",
        "load",
        "ops/s",
        "mean",
        "slow",
        "hot/s",
        "archived/s",
        "events",
    ]
    table = Table(*(Column(each, no_wrap=True, overflow="ellipsis") for each in columns), box=None, pad_edge=False)
    ordered = sorted(seen.replicas, key=_slowness)
    for each in ordered[:rows]:
        table.add_row(*_row(each))
    if len(ordered) > rows:
        table.caption, table.caption_justify = f"and {len(ordered) - rows} more", "left"
    return table


def _slowness(each: ReplicaRates) -> tuple[bool, float]:
    """Archivers come last: what they do is a batch, and takes longer than a turn's commit."""
    return each.replica.role == "archiver", -(each.milliseconds or 0.0)


def _row(each: ReplicaRates) -> list[Text]:
    replica = each.replica
    waiting = replica.stats.get("events_waiting", 0)
    texts = [
        replica.id,
        replica.host,
        str(replica.pid),
        replica.role,
        f"{replica.seen:.0f} s ago",
        f"{replica.load:.2f}",
    ]
    mean = "-" if each.milliseconds is None else f"{each.milliseconds:.1f} ms"
    texts += [_number(each.operations), mean, "-" if each.slow is None else str(each.slow)]
    texts += [_number(each.hot), _number(each.archived), f"{waiting} wait" if waiting else "-"]
    bad = replica.seen > _SILENT or replica.archiving or each.slow
    return [Text(printable(text), style="red" if bad else "") for text in texts]


def _busiest(seen: Overview, rows: int) -> Table:
    table = Table(
        Column("record", no_wrap=True, overflow="ellipsis", ratio=1), "share", "about", box=None, pad_edge=False
    )
    for record, count in seen.busiest[:rows]:
        share = count / seen.sampled
        table.add_row(Text(printable(record)), f"{share:.0%}", f"{_number(share * (seen.commits or 0.0))}/s")
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


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
            help="Where to start: an age (10m, 2h), a date and time, 'oldest' in Redis, or a position `tail` printed."
        ),
    ] = None,
    conversation: Annotated[str | None, typer.Option(help="Only events of this conversation.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many events.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one CloudEvent per line.")] = False,
) -> None:
    """Follow the events of all replicas until Ctrl-C. At the end the position to continue from is printed.

    Example: [cyan]distributed-state --url redis://host --archive sqlite:///a.db tail "conversation.*" --since 10m[/]
    """
    stopping = stop_on_signals()
    named = since is not None and (since == "oldest" or "@" in since)
    begin = None if named else moment("--since", since, time.time())
    wanted = types or ["*"]
    left = count
    with (
        open_existing(context) as store,
        store.events(*wanted, since=since if named else None) as events,
    ):
        try:
            past = _past(store, begin, wanted, conversation)
            reached: dict[tuple[str, int], int] = {}
            while not stopping() and left != 0:
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
            place = events.position
            err.print(f"to continue from here: --since {place}", markup=False, highlight=False, soft_wrap=True)


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


@app.command()
def leases(
    context: typer.Context,
    scope: Annotated[str | None, typer.Option(help="Only of this kind: session, user, app or task.")] = None,
    prefix: Annotated[str, typer.Option(help="Only of ids that begin so.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Rows per page.")] = 100,
    after: Annotated[str | None, typer.Option(help="Continue behind this cursor, which the page before named.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List who holds which records, locks and running turns, and who waits for them; those held longest first.

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents leases[/]
    """
    with open_existing(context) as store:
        found = store.leases(scope=scope, prefix=prefix, limit=limit, after=after)
        now = store.time() if found and not as_json else 0.0
    if as_json:
        print_json_lines(map(asdict, found))
    else:
        table = Table("record", "kind", "token", "replica", "held", "ends in", "waiting")
        for each in found:
            times = [ago(now - each.since), f"{max(0.0, each.ends - now):.0f}s", str(each.waiting or "")]
            row = [f"{each.scope} {each.record_id}", each.kind, str(each.token), each.replica, *times]
            table.add_row(*(plain(text) for text in row))
        out.print(table)
    if len(found) == limit:
        say_more(found[-1].cursor)


@app.command(name="end-lease")
def end_lease(
    context: typer.Context,
    id: Id,
    token: Annotated[int, typer.Argument(help="Its fencing token, as `leases` shows it.", show_default=False)],
    scope: Scope = "session",
) -> None:
    """End a lease, whoever holds it: what its holder writes is refused from then on, and who waits is next.

    Example: [cyan]distributed-state end-lease c1 1764123456789012[/]
    """
    with open_existing(context) as store:
        if not store.end_lease(id, token, scope=scope):
            raise NotFound(f"{scope} {id!r:.200}: no lease with token {token} is held (any more)")


@app.command()
def doctor(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Check Redis, SQL, and who archives, and advise what to do. Exit code 1 if anything needs somebody.

    Each server is looked at by itself: while one is away, the other one is shown all the same.

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
        out.print(table)
    if not all(each.ok for each in findings):
        raise typer.Exit(1)


def _findings(context: typer.Context) -> list[distributed_state.Finding]:
    try:
        # It does not archive itself: whether others do is what is asked.
        with open_existing(context, archiver=False) as store:
            return store.doctor()
    except (Unavailable, NotFound) as error:
        from distributed_state.store.doctor import examine_apart

        settings = distributed_state.Settings.of(**context.obj)
        if settings.url is None:
            raise
        return examine_apart(settings, error)


def _told(finding: distributed_state.Finding) -> dict[str, Any]:
    return {"name": finding.name, "ok": finding.ok, "found": finding.found, "advice": finding.advice}


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
    # Not a replica: it archives nothing, and reports an unavailable server at once instead of retrying.
    quick = {"archiver": False, "timeout": 1.0, "retry_for": 0.0, "sql_timeout": 2.0}
    try:
        with open_existing(context, **quick) as store:
            watched = Watched(store, interval)
            if sys.stdout.isatty() and not once and not as_json:
                watched.live(out)
            elif as_json:
                sys.stdout.write(json.dumps(fields(watched.once())) + "\n")
            else:
                out.print(watched.shown(watched.once(), rows=sys.maxsize))
    except KeyboardInterrupt:
        raise typer.Exit from None
