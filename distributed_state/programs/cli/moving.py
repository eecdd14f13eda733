"""Commands that move records from one store to another. Law: what comes in comes whole, record by record."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, TextIO

import typer

import distributed_state
from distributed_state.errors import Conflict, InvalidValue, NotFound, StateError
from distributed_state.programs.cli.shell import Scope, app, err, open_existing, open_store

_HEADER = '{"format":'
_SCOPES = ("user", "app", "task", "session")
_MINUTE = 60.0  # a listing has the newest change first, to the minute


@app.command()
def export(
    context: typer.Context,
    id: Annotated[str | None, typer.Argument(help="Id of the record.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option(help="File to write; by default stdout.")] = None,
    scope: Scope = "session",
    all: Annotated[bool, typer.Option("--all", help="All records of all scopes, but deleted ones.")] = False,
) -> None:
    """Write a record, or all, with their whole history as JSON lines.

    Example: [cyan]distributed-state export user-123 --output user-123.jsonl[/]
    """
    from distributed_state.cold.private_files import opener

    if (id is None) != all:
        raise typer.BadParameter("give the id of a record, or --all")
    with ExitStack() as stack:
        store = stack.enter_context(open_existing(context))
        if id is not None:
            lines = store.export(id, scope=scope)
        file = sys.stdout
        if output is not None:
            file = stack.enter_context(open(output, "w", encoding="utf-8", opener=opener))
        if id is not None:
            file.writelines(f"{line}\n" for line in lines)
        else:
            _export_all(store, file)


def _export_all(store: distributed_state.StateStore, file: TextIO) -> None:
    written = 0
    with err.status("") as status:
        for scope in _SCOPES:
            for row in _everything(store, scope):
                try:
                    lines = store.export(row.id, scope=scope)
                except NotFound:
                    continue  # erased since it was listed
                file.writelines(f"{line}\n" for line in lines)
                written += 1
                status.update(f"{written} records written")
    err.print(f"{written} records written")


def _everything(store: distributed_state.StateStore, scope: str) -> Iterator[distributed_state.SessionInfo]:
    """All records of a scope, each once, those too that are changed meanwhile, and listed further up then."""
    seen = set[str]()
    store.archive()
    until = float("-inf")
    while True:
        newest, found = until, False
        for row in _listed(store, scope, until):
            newest = max(newest, row.updated)
            if row.id not in seen:
                found = True
                seen.add(row.id)
                yield row
        if not found:
            return
        until = newest


def _listed(store: distributed_state.StateStore, scope: str, until: float) -> Iterator[distributed_state.SessionInfo]:
    page = store.sessions(scope=scope, limit=500)
    while page:
        for row in page:
            if row.updated < until - _MINUTE:
                return
            yield row
        page = store.sessions(scope=scope, limit=500, after=page[-1].cursor)


@app.command("import")
def import_(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="File that `export` wrote; - is stdin.", show_default=False)],
    id: Annotated[str | None, typer.Option(help="Import under another id; the file has one record.")] = None,
    skip_existing: Annotated[
        bool,
        typer.Option(help="Leave out records that are there, or were erased: to go on after an import that was ended."),
    ] = False,
) -> None:
    """Import exported records with their versions and history, and print their ids.

    Example: [cyan]distributed-state import user-123.jsonl --id user-123-copy[/]
    """
    done = skipped = 0
    with ExitStack() as stack:
        lines = sys.stdin if str(file) == "-" else stack.enter_context(file.open(encoding="utf-8"))
        store = stack.enter_context(open_store(context))
        status = stack.enter_context(err.status(""))
        found: Iterable[tuple[int, list[str]]] = _records(lines, file)
        if id is not None:
            found = list(found)
            if len(found) > 1:
                raise InvalidValue(f"{file}: has {len(found)} records; --id names one")
        for first, record in found:
            try:
                typer.echo(store.import_(record, id=id))
                done += 1
            except Conflict:
                if not skip_existing:
                    raise
                skipped += 1
            except StateError as error:
                if first > 1:
                    err.print(f"in the record that begins at line {first}, after {done} that were imported:")
                raise error
            status.update(f"{done} imported, {skipped} there already")
    if done + skipped > 1:
        err.print(f"{done} imported, {skipped} there already")


def _records(lines: Iterable[str], file: Path) -> Iterator[tuple[int, list[str]]]:
    """The lines of each record, with the number of its first."""
    record: list[str] = []
    first = 1
    try:
        for number, line in enumerate(lines, start=1):
            if record and line.startswith(_HEADER):
                yield first, record
                record, first = [], number
            record.append(line)
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{file}: is not text in UTF-8 ({error})") from error
    yield first, record
