"""Commands that read. Law: they change nothing but which records are in Redis."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

import distributed_state
from distributed_state.errors import InvalidValue, NotFound, Unavailable
from distributed_state.programs.cli.shell import (
    Id,
    Scope,
    app,
    err,
    open_existing,
    open_to_list,
    out,
    print_json,
    record_of,
)
from distributed_state.programs.turn_parts import spent

_PAGE = 1000


@app.command()
def get(
    context: typer.Context,
    id: Id,
    key: Annotated[
        str | None, typer.Argument(help="Name of a field; without it, all fields.", show_default=False)
    ] = None,
    scope: Scope = "session",
) -> None:
    """Print a record's fields as JSON, or one field; bytes are written as they are.

    Example: [cyan]distributed-state get user-123 preferences[/]
    """
    with open_existing(context) as store:
        record = record_of(store, scope, id)
        if not record.exists():
            raise NotFound(f"there is no {scope} {id!r}")
        fields = record.get_all()
    if key is not None and key not in fields:
        raise NotFound(f"{scope} {id!r} has no field {key!r}")
    given = {name: value for name, value in fields.items() if isinstance(value, bytes)}
    if key in given:
        if sys.stdout.isatty():  # it may hold control sequences that a terminal would obey
            raise InvalidValue(f"{key!r} holds {len(given[key])} bytes: send them to a file, as in: get ... > file")
        sys.stdout.buffer.write(given[key])
    elif key is not None:
        print_json(fields[key])
    else:
        print_json({name: value for name, value in fields.items() if name not in given})
        for name, data in given.items():
            err.print(plain(f"left out: {name} holds {len(data)} bytes, written by: get {id} {name}"))


@app.command()
def history(
    context: typer.Context,
    id: Id,
    scope: Scope = "session",
    last: Annotated[int, typer.Option(min=1, help="How many changes to show.")] = 50,
) -> None:
    """List a record's changes: version, when, by whom, on which worker, under which lease, what; of a turn its time.

    Example: [cyan]distributed-state history user-123 --last 10[/]
    """
    with open_to_list(context) as store:
        changes = _changes_of(store, scope, id, last)
    table = Table("version", "time", "kind", "by", "worker", "token", "what")
    for change in changes:
        token = str(change.token) if change.token else ""
        who = plain(change.actor), plain(change.replica)
        table.add_row(str(change.version), when(change.time), change.kind, *who, token, _what(change))
    out.print(table)


def _changes_of(store: Any, scope: str, id: str, last: int) -> list[distributed_state.Change]:
    from distributed_state.store.archive_alone import ArchiveAlone
    from distributed_state.values.model import Ref

    if isinstance(store, ArchiveAlone):
        changes = store.history(Ref(scope, id), last)
        if not changes:
            raise NotFound(f"there is no {scope} {id!r} in the archive")
        return changes
    record = record_of(store, scope, id)
    version = record.version()
    if not version:
        raise NotFound(f"there is no {scope} {id!r}")
    return record.history(after=max(0, version - last))


@app.command()
def branches(
    context: typer.Context,
    record: Annotated[
        str | None, typer.Argument(help="Only of this record, as session/user-123.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List branches: commits that were acknowledged and that their records do not continue, after a failover.

    Example: [cyan]distributed-state branches session/user-123[/]
    """
    with open_to_list(context) as store:
        if record is not None:
            scope, slash, id = record.partition("/")
            if not slash:
                raise InvalidValue(f"{record!r:.80} is no record: write it as session/{record:.80}")
            found = _branches_of(store, scope, id)
        else:
            found = page = store.branches(limit=_PAGE)
            while page:
                page = store.branches(limit=_PAGE, after=page[-1].cursor)
                found += page
    if as_json:
        # JSON in ASCII: control sequences that a terminal would obey are escaped.
        sys.stdout.writelines(json.dumps(asdict(each) | {"complete": each.complete}) + "\n" for each in found)
        return
    table = Table("record", "branch", "behind", "commits", "missing", "first", "last", "by", "cause")
    for each in found:
        lost = ", ".join(f"{first}-{last}" for first, last in each.missing)
        row = (f"{each.scope}/{each.record_id}", each.id, str(each.base), str(each.commits), lost)
        times = (when(each.first_time), when(each.last_time))
        table.add_row(*map(plain, (*row, *times, ", ".join(each.actors), each.cause)))
    out.print(table)


def _branches_of(store: Any, scope: str, id: str) -> list[distributed_state.Branch]:
    if isinstance(store, distributed_state.StateStore):
        return record_of(store, scope, id).branches()
    from distributed_state.values.model import Ref

    found: list[distributed_state.Branch] = store.record_branches(Ref(scope, id))
    return found


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
        sys.stdout.writelines(json.dumps(_told(each)) + "\n" for each in findings)
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
        from distributed_state.store.doctor_apart import examine_apart

        settings = distributed_state.Settings.of(**context.obj)
        if settings.url is None:
            raise
        return examine_apart(settings, error)


def _told(finding: distributed_state.Finding) -> dict[str, Any]:
    return {"name": finding.name, "ok": finding.ok, "found": finding.found, "advice": finding.advice}


def plain(text: str) -> str:
    """Escape text that may hold anything: markup, and control sequences that a terminal would obey."""
    return escape(printable(text))


def printable(text: str) -> str:
    """Escape control sequences only, for output that is not parsed as markup."""
    return text if text.isprintable() else ascii(text)


def when(seconds: float) -> str:
    """Show a time in the zone of this machine, to the millisecond."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="milliseconds")


def _shown(value: Any) -> str:
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else json.dumps(value)


def _said(message: distributed_state.Message) -> str:
    if message.role is None:
        return json.dumps(message.to_dict())
    return f"{message.role}: {json.dumps(message.content)}"


def _what(change: distributed_state.Change) -> str:
    parts = [f"{key} = {_shown(value)}" for key, value in change.set.items()]
    parts += [f"{key} deleted" for key in change.deleted]
    parts += [f"+ {_said(message)}" for message in change.appended]
    parts += [f"phase {change.phase}"] if change.phase else []
    parts += [f"label {change.label}"] if change.label else []
    parts += _took(change.times)
    return "\n".join(plain(part if len(part) <= 100 else part[:97] + "...") for part in parts)


def _took(times: distributed_state.TurnTimes | None) -> list[str]:
    """How long a turn took, and what of it the most; nothing of what no turn did."""
    it = spent(None if times is None else asdict(times))
    return [] if it is None else [f"took {it.total:.3f} s, {it.most.share:.0%} of it {it.most.name}"]
