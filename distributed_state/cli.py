"""The command `distributed-state`. Law: it uses what any program may use, and an error is one line on stderr."""

from __future__ import annotations

import importlib
import json
import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table

from distributed_state import Change, InvalidValue, NotFound, Record, StateError, StateStore, Upcast
from distributed_state.model import SCOPES

app = typer.Typer(
    help="State for agents that run on many servers: look at it, move it, archive it, and try how it survives kills.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
out, err = Console(), Console(stderr=True)

_URL = "Redis or Valkey; without it, the embedded store of this folder."
_ARCHIVE = "SQL database, as postgresql+psycopg://... or sqlite:///..."
_NAMESPACE = "Which of several stores on the same servers."
Url = Annotated[str | None, typer.Option(envvar="DISTRIBUTED_STATE_URL", help=_URL)]
Archive = Annotated[str | None, typer.Option(envvar="DISTRIBUTED_STATE_ARCHIVE", help=_ARCHIVE)]
Namespace = Annotated[str | None, typer.Option(envvar="DISTRIBUTED_STATE_NAMESPACE", help=_NAMESPACE)]
Id = Annotated[str, typer.Argument(help="Id of the record.", show_default=False)]
Scope = Annotated[str, typer.Option(help="Kind of record: session, user, app or task.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(metadata.version("distributed-state"))
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    url: Url = None,
    archive: Archive = None,
    namespace: Namespace = None,
    log_level: Annotated[
        str, typer.Option(envvar="DISTRIBUTED_STATE_LOG_LEVEL", help="debug to critical.")
    ] = "warning",
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """State for agents that run on many servers: look at it, move it, archive it, and try how it survives kills."""
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise typer.BadParameter(f"{log_level!r} is none of debug, info, warning, error, critical")
    logging.basicConfig(level=level, format="%(name)s: %(message)s", handlers=[RichHandler(console=err)])
    context.obj = {"url": url, "archive": archive, "namespace": namespace}


# Looking


@app.command()
def get(
    context: typer.Context,
    id: Id,
    key: Annotated[str | None, typer.Argument(help="One field; without it, all.", show_default=False)] = None,
    scope: Scope = "session",
) -> None:
    """Print a record's fields as JSON.

    Example: [cyan]distributed-state get user-123 preferences[/]
    """
    with _store(context) as store:
        record = _record(store, scope, id)
        if not record.exists():
            raise NotFound(f"there is no {scope} {id!r}")
        fields = record.get_all()
    if key is not None and key not in fields:
        raise NotFound(f"{scope} {id!r} has no field {key!r}")
    _print_json(fields if key is None else fields[key])


@app.command()
def history(
    context: typer.Context,
    id: Id,
    scope: Scope = "session",
    last: Annotated[int, typer.Option(min=1, help="How many changes to show.")] = 50,
) -> None:
    """List a record's changes: version, when, by whom, what.

    Example: [cyan]distributed-state history user-123 --last 10[/]
    """
    with _store(context) as store:
        record = _record(store, scope, id)
        version = record.version()
        if not version:
            raise NotFound(f"there is no {scope} {id!r}")
        changes = record.history(after=max(0, version - last))
    table = Table("version", "time", "kind", "by", "token", "what")
    for change in changes:
        token = str(change.token) if change.token else ""
        row = (str(change.version), _when(change.time), change.kind, _plain(change.actor), token, _what(change))
        table.add_row(*row)
    out.print(table)


@app.command()
def sessions(
    context: typer.Context,
    user: Annotated[str | None, typer.Option(help="Only this user's.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Rows of a page.")] = 50,
    after: Annotated[str | None, typer.Option(help="Go on behind this cursor of the page before.")] = None,
    scope: Scope = "session",
) -> None:
    """List sessions, the last archived change first.

    Example: [cyan]distributed-state sessions --user u1[/]
    """
    with _store(context) as store:
        rows = store.sessions(user=user, limit=limit, after=after, scope=scope)
    table = Table("id", "user", "version", "created", "updated", "")
    for row in rows:
        deleted = "deleted" if row.deleted else ""
        table.add_row(
            _plain(row.id), _plain(row.user or ""), str(row.version), _when(row.created), _when(row.updated), deleted
        )
    out.print(table)
    if len(rows) == limit:
        err.print(f"more may follow: --after {rows[-1].cursor}", markup=False, highlight=False)


@app.command()
def doctor(context: typer.Context) -> None:
    """Examine Redis, SQL and the archiver, and say what to change. Exit code 1 if anything needs it.

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents doctor[/]
    """
    with _store(context) as store:
        findings = store.doctor()
    table = Table("", "what", "found", "advice")
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]bad[/]"
        table.add_row(mark, escape(finding.name), escape(finding.found), "" if finding.ok else escape(finding.advice))
    out.print(table)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


# Changing


@app.command("set")
def set_(
    context: typer.Context,
    id: Id,
    key: Annotated[str, typer.Argument(help="The field.", show_default=False)],
    value: Annotated[str, typer.Argument(help="Its value as JSON; a text needs quotes.", show_default=False)],
    scope: Scope = "session",
) -> None:
    """Set one field and print the record's new version.

    Example: [cyan]distributed-state set user-123 name '"Alice"'[/]
    """
    try:
        decoded = json.loads(value)
    except ValueError as error:
        raise InvalidValue(f"{value!r} is not JSON ({error}); a text needs quotes: '\"text\"'") from error
    with _store(context) as store:
        version = _record(store, scope, id).set(key, decoded)
    typer.echo(version)


@app.command()
def delete(context: typer.Context, id: Id, scope: Scope = "session") -> None:
    """Delete a record. Its history stays until it is purged or its user is forgotten.

    Example: [cyan]distributed-state delete user-123[/]
    """
    with _store(context) as store:
        version = store.delete(id, scope=scope)
    typer.echo(f"deleted as version {version}")


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
    with _store(context) as store:
        count = store.forget(user)
    typer.echo(f"{count} records removed")


@app.command()
def export(
    context: typer.Context,
    id: Id,
    output: Annotated[Path | None, typer.Option(help="File to write; without it, stdout.")] = None,
    scope: Scope = "session",
) -> None:
    """Write a record with its whole history as JSON lines.

    Example: [cyan]distributed-state export user-123 --output user-123.jsonl[/]
    """
    with _store(context) as store:
        lines = store.export(id, scope=scope)
    text = "".join(f"{line}\n" for line in lines)
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text, encoding="utf-8")


@app.command("import")
def import_(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="What `export` wrote; - is stdin.", show_default=False)],
    id: Annotated[str | None, typer.Option(help="Import under another id.")] = None,
) -> None:
    """Bring an exported record back, with its versions and history, and print its id.

    Example: [cyan]distributed-state import user-123.jsonl --id user-123-copy[/]
    """
    text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    with _store(context) as store:
        typer.echo(store.import_(text.splitlines(), id=id))


# Running


@app.command()
def archiver(
    context: typer.Context,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two lines of progress.")] = 10.0,
) -> None:
    """Carry commits from Redis to SQL until SIGTERM or Ctrl-C. Several share the work.

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents archiver[/]
    """
    stopping = False

    def stop(*_: Any) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with _store(context, archiver=True) as store:
        typer.echo("archiving")
        said = 0.0
        while not stopping:
            if time.monotonic() - said >= every:
                said = time.monotonic()
                typer.echo(_progress(store))
            time.sleep(0.1)
    typer.echo("stopped")


@app.command()
def reencrypt(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count, and change nothing.")] = False,
) -> None:
    """Encrypt everything anew under the current key of DISTRIBUTED_STATE_KEYS or DISTRIBUTED_STATE_KEY_FILE.

    What is done already is skipped, so it may be broken off and repeated. Exit code 1 if a record cannot be decrypted.

    Example: [cyan]distributed-state reencrypt --dry-run[/]
    """
    with _store(context) as store:
        done = store.reencrypt(
            dry_run=dry_run,
            progress=lambda done: err.print(f"{done.records} records, {done.values} values", highlight=False),
        )
    what = "to encrypt anew" if dry_run else "encrypted anew"
    counts = f"{done.records} records: {done.values} values and {done.copies} copies in Redis {what}"
    typer.echo(f"{counts}, {done.failed} records unreadable")
    if done.failed:
        raise typer.Exit(1)


@app.command()
def migrate(context: typer.Context) -> None:
    """Bring the SQL schema up to date. Safe while others do the same; stores also do it when they open.

    Example: [cyan]distributed-state --archive postgresql+psycopg://host/agents migrate[/]
    """
    with _store(context, migrate=True):
        typer.echo("the schema is up to date")


@app.command()
def upcast(
    context: typer.Context,
    schema: Annotated[str, typer.Argument(help="The schema, as module:NAME; found from this folder.")],
    scope: Scope = "session",
    user: Annotated[str | None, typer.Option(help="Only this user's.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count and check.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="End after bringing up so many.")] = None,
) -> None:
    """Bring records up to a schema's version, beside the workers. End it and run it again as you like.

    Every record of the scope is taken to be of this schema. Exit code 1 if any failed; those stay as they are.

    Example: [cyan]distributed-state upcast my_agent.state:TRIP --dry-run[/]
    """
    wanted, sofar = _named(schema), Upcast()

    def show(now: Upcast) -> None:
        nonlocal sofar
        if now.failed > sofar.failed and len(now.failures) == now.failed:
            err.print(now.failures[-1], style="red", markup=False, highlight=False)
        sofar = now
        status.update(f"{now.upcast} upcast, {now.unchanged} unchanged, {now.failed} failed")

    try:
        with _store(context) as store, err.status("looking for records") as status:
            store.upcast(wanted, scope=scope, user=user, dry_run=dry_run, limit=limit, progress=show)
    finally:
        verb = "to upcast" if dry_run else "upcast"
        typer.echo(f"{sofar.upcast} {verb}, {sofar.unchanged} unchanged, {sofar.failed} failed")
    if sofar.failed:
        raise typer.Exit(1)


@app.command()
def replay(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="Conversations as JSON lines; without it, a sample.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 4,
    kill: Annotated[int, typer.Option(min=0, help="How many workers to kill in the middle of a turn.")] = 0,
    in_process: Annotated[bool, typer.Option("--in-process", help="Threads on the embedded store, no server.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Replay the file so many times.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Choose the same victims again.")] = None,
    url: Annotated[str | None, typer.Option(help="Servers to use; without it, one is started.")] = None,
    archive: Annotated[str | None, typer.Option(help="SQL database to use; without it, a SQLite file.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Without it, a new one.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep logs and databases in this folder.")] = None,
    report: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Replay recorded conversations on several workers, kill some, and verify that nothing acknowledged was lost.

    Every turn goes to whichever worker is free: it locks the session, reads the context, commits and releases. At the
    end every message is read back from SQL and compared. Exit code 1 if anything differs.

    Example: [cyan]distributed-state replay --workers 4 --kill 3[/]
    """
    from distributed_state.replay.conversations import read_conversations
    from distributed_state.replay.report import show
    from distributed_state.replay.run import Plan, replay

    conversations = read_conversations(file)
    given = context.obj
    plan = Plan(
        [conversation.again(number) for number in range(1, rounds + 1) for conversation in conversations],
        url=url or given["url"],
        archive=archive or given["archive"],
        namespace=namespace or given["namespace"],
        workers=workers,
        kills=kill,
        in_process=in_process,
        seed=seed,
        keep=keep,
    )
    result = replay(plan, err)
    show(result, out)
    if report is not None:
        report.write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    if result.differences:
        raise typer.Exit(1)


# What the commands share


@contextmanager
def _store(context: typer.Context, **settings: Any) -> Iterator[StateStore]:
    with StateStore.open(**context.obj, **settings) as store:
        yield store


def _record(store: StateStore, scope: str, id: str) -> Record:
    if scope not in SCOPES:
        raise InvalidValue(f"scope {scope!r} is none of {', '.join(SCOPES)}")
    return getattr(store, scope)(id)  # type: ignore[no-any-return]  # each scope is a method that gives its records


def _named(place: str) -> Any:
    """What `module:NAME` names, as seen from the present folder."""
    module, _, name = place.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidValue(f"{place!r} is not found as module:NAME from this folder: {error}") from error


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _progress(store: StateStore) -> str:
    try:
        stats = store.stats()
    except StateError as error:
        # An archiver outlives its servers' restarts.
        return f"waiting: {error}"
    return f"{stats['archived']} commits archived here, {stats['unarchived']} waiting"


def _plain(text: str) -> str:
    """Text that may hold anything, without what a terminal would obey."""
    return escape(text if text.isprintable() else ascii(text))


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="milliseconds")


def _what(change: Change) -> str:
    parts = [f"{key} = {json.dumps(value)}" for key, value in change.set.items()]
    parts += [f"{key} deleted" for key in change.deleted]
    parts += [f"+ {message.role}: {json.dumps(message.content)}" for message in change.appended]
    parts += [f"phase {change.phase}"] if change.phase else []
    parts += [f"label {change.label}"] if change.label else []
    return "\n".join(_plain(part if len(part) <= 100 else part[:97] + "...") for part in parts)


def _terminated(*_: Any) -> None:
    # SIGTERM as an exception, so that servers and workers that we started end with us.
    sys.exit(128 + signal.SIGTERM)


def main() -> None:
    """Run the command."""
    signal.signal(signal.SIGTERM, _terminated)
    # Lone surrogates are legal in our values and unprintable; JSON writes them as this does.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a real stdout is a TextIOWrapper
    try:
        app()
    except (StateError, OSError) as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(1)
