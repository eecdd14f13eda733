"""Commands that move records in and out: `export`, `import`, and `adopt` from the stores of frameworks.

Law: an interrupted command can be run again without harm. Each record is imported whole or not at all.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

import distributed_state
from distributed_state.errors import (
    ConfigurationError,
    Conflict,
    InvalidValue,
    NotFound,
    StateError,
)
from distributed_state.programs.cli.shell import (
    Scope,
    app,
    err,
    group,
    named,
    open_existing,
    open_store,
    printable,
)

_HEADER = '{"format":'
_SCOPES = ("user", "app", "task", "session")
_MINUTE = 60.0  # a listing is sorted by the newest change only to the minute


@app.command()
def export(
    context: typer.Context,
    id: Annotated[str | None, typer.Argument(help="Id of the record.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option(help="File to write; by default stdout.")] = None,
    scope: Scope = "session",
    all: Annotated[bool, typer.Option("--all", help="All records of all scopes, except deleted ones.")] = False,
) -> None:
    """Write a record, or all records, with the whole history, as JSON lines.

    Example: [cyan]distributed-state export user-123 --output user-123.jsonl[/]
    """
    from distributed_state.settings import private_opener

    if (id is None) != all:
        raise typer.BadParameter("give either the id of a record or --all")
    with ExitStack() as stack:
        store = stack.enter_context(open_existing(context))
        if id is not None:
            lines = store.admin.export(id, scope=scope)
        file = sys.stdout
        if output is not None:
            file = stack.enter_context(open(output, "w", encoding="utf-8", opener=private_opener))
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
                    lines = store.admin.export(row.id, scope=scope)
                except NotFound:
                    continue  # erased since it was listed
                file.writelines(f"{line}\n" for line in lines)
                written += 1
                status.update(f"{written} records written")
    err.print(f"{written} records written")


def _everything(store: distributed_state.StateStore, scope: str) -> Iterator[distributed_state.results.SessionInfo]:
    """Yield each record of a scope once, including records that move to the front as they change meanwhile."""
    seen = set[str]()
    store.admin.archive()
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


def _listed(
    store: distributed_state.StateStore, scope: str, until: float
) -> Iterator[distributed_state.results.SessionInfo]:
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
    id: Annotated[
        str | None, typer.Option(help="Import the record under this id; only for a file with a single record.")
    ] = None,
    skip_existing: Annotated[
        bool,
        typer.Option(help="Skip records that exist or were erased, for example to resume an interrupted import."),
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
                raise InvalidValue(f"{file}: has {len(found)} records, but --id needs a file with a single record")
        for first, record in found:
            try:
                typer.echo(store.admin.import_(record, id=id))
                done += 1
            except Conflict:
                if not skip_existing:
                    raise
                skipped += 1
            except StateError as error:
                if first > 1:
                    err.print(f"{done} records were imported; the record that begins at line {first} failed:")
                raise error
            status.update(f"{done} imported, {skipped} skipped")
    if done + skipped > 1:
        err.print(f"{done} imported, {skipped} skipped")


def _records(lines: Iterable[str], file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of each record, with the number of its first line."""
    record: list[str] = []
    first = 1
    try:
        for number, line in enumerate(lines, start=1):
            if record and line.startswith(_HEADER):
                yield first, record
                record, first = [], number
            record.append(line)
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{file}: is not UTF-8 text ({error})") from error
    yield first, record


_log = logging.getLogger(__name__)
_HELP_OF_ADOPT = "Copy threads or sessions from a framework's own store, and verify the copies."
adopt = group("adopt", _HELP_OF_ADOPT)

_SOURCE = "or module:NAME of your program: the store object, or a function that makes it."
_INTO = "The adapter that receives the copies, needed if yours has special options such as a prefix, owners or a serde."
_NAME = re.compile(r"[\w.]+:[A-Za-z_]\w*")
Into = Annotated[str | None, typer.Option(metavar="MODULE:NAME", help=_INTO)]
_SESSION = "A function of an id and the store that returns the session there, needed if sessions have owners."
IntoSession = Annotated[str | None, typer.Option("--into", metavar="MODULE:NAME", help=_SESSION)]
Only = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Copy only the one with this name; may be given several times.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Stop after this many are copied.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only compare; change nothing.")]


@adopt.command()
def langgraph(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help=f"postgresql://..., sqlite:///file, {_SOURCE}")],
    user: Annotated[
        str | None,
        typer.Option(
            help="The entry of a thread's metadata, from 'configurable', that has its owner, such as user_id."
        ),
    ] = None,
    into: Into = None,
    only: Only = None,
    limit: Limit = None,
    dry_run: DryRun = False,
) -> None:
    """Copy the threads of a LangGraph saver: all checkpoints with their writes, metadata, parents and namespaces.

    Each copy is compared with its source. The command can be repeated: it skips equal threads and completes those
    that are half copied or changed in the source. A thread that changed here is listed, not overwritten: exit code 1.
    A thread gets its owner with the first part that is copied.

    Example: [cyan]distributed-state --url redis://host --archive postgresql://host/agents adopt langgraph
    postgresql://host/graphs --user user_id[/]
    """
    _adopt(
        context, "langgraph.adopting", source, into, only, limit, dry_run, **({} if user is None else {"user": user})
    )


@adopt.command("langgraph-store")
def langgraph_store(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help=f"postgresql://..., sqlite:///file, {_SOURCE}")],
    into: Into = None,
    only: Only = None,
    limit: Limit = None,
    dry_run: DryRun = False,
) -> None:
    """Copy the values of a LangGraph store (BaseStore), namespace by namespace, with their times.

    A namespace is named with periods, as users.ada. The command can be repeated: it skips equal namespaces and
    completes those that changed in the source. A namespace that changed here is listed, not overwritten: exit code 1.

    Example: [cyan]distributed-state --url redis://host adopt langgraph-store postgresql://host/graphs[/]
    """
    _adopt(context, "langgraph.adopting_memories", source, into, only, limit, dry_run)


@adopt.command()
def openai(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help=f"sqlite:///file, postgresql://..., redis://..., {_SOURCE}")],
    ids: Annotated[
        Path | None, typer.Option(help="File of session ids, one per line, for a source that cannot list its sessions.")
    ] = None,
    into: Into = None,
    only: Only = None,
    limit: Limit = None,
    dry_run: DryRun = False,
) -> None:
    """Copy the sessions of the OpenAI Agents SDK: all items in their order.

    If SOURCE is a function, it takes an id and returns a session. The command can be repeated: it skips equal sessions
    and completes those that changed in the source. A session that changed here is listed, not overwritten: exit code 1.

    Example: [cyan]distributed-state --url redis://host adopt openai redis://old-host[/]
    """
    more = {} if ids is None else {"ids": _lines(ids)}
    _adopt(context, "openai_agents_adopting", source, into, only, limit, dry_run, **more)


@adopt.command()
def adk(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help=f"URL of a DatabaseSessionService, {_SOURCE}")],
    app_: Annotated[
        list[str] | None, typer.Option("--app", help="Copy only this app; may be given several times.")
    ] = None,
    into: Into = None,
    only: Only = None,
    limit: Limit = None,
    dry_run: DryRun = False,
) -> None:
    """Copy the sessions of Google ADK: events and state, and the shared state of users and apps.

    Names: app/user/id is a session, app/user the state of a user, app the state of an app. The command can be repeated:
    it skips what is equal and completes what changed in the source. Changes made here are listed, not overwritten:
    exit code 1.

    Example: [cyan]distributed-state --url redis://host adopt adk postgresql://host/sessions --app shop[/]
    """
    _adopt(context, "adk.adopting", source, into, only, limit, dry_run, apps=app_ or ())


@adopt.command()
def agno(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help=f"postgresql://..., sqlite:///file, redis://..., {_SOURCE}")],
    into: Into = None,
    only: Only = None,
    limit: Limit = None,
    dry_run: DryRun = False,
) -> None:
    """Copy the sessions, runs and user memories of Agno.

    Names: session/id is a session, memories/user the memories of a user. The command can be repeated: it skips what is
    equal and completes what changed in the source. Changes made here are listed, not overwritten: exit code 1.

    Example: [cyan]distributed-state --url redis://host adopt agno sqlite:///agno.db[/]
    """
    _adopt(context, "agno.adopting", source, into, only, limit, dry_run)


@adopt.command()
def claude(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="Claude Code's folder, such as ~/.claude, or its folder projects.")],
    into: Into = None,
    only: Only = None,
    limit: Limit = None,
    dry_run: DryRun = False,
) -> None:
    """Copy the sessions of Claude Code or of the Claude Agent SDK: their transcripts and those of their subagents.

    Names: project/session. The command can be repeated: it skips equal sessions and completes those that went on in the
    source. A session that changed here is listed, not overwritten: exit code 1.

    Example: [cyan]distributed-state --url redis://host adopt claude ~/.claude[/]
    """
    _adopt(context, "claude_agent_sdk_adopting", source, into, only, limit, dry_run)


@adopt.command()
def strands(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="The folder of a FileSessionManager: its storage_dir.")],
    into: IntoSession = None,
    only: Only = None,
    limit: Limit = None,
    dry_run: DryRun = False,
) -> None:
    """Copy the sessions of Strands Agents: agents with their state and messages, and the state of graphs and swarms.

    The command can be repeated: it skips equal sessions and completes those that changed in the source. A session that
    changed here is listed, not overwritten: exit code 1.

    Example: [cyan]distributed-state --url redis://host adopt strands ~/.strands/sessions[/]
    """
    _adopt(context, "strands_adopting", source, into, only, limit, dry_run)


@adopt.command()
def crewai(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="sqlite:///file, the database of an SQLiteFlowPersistence.")],
    into: IntoSession = None,
    only: Only = None,
    limit: Limit = None,
    dry_run: DryRun = False,
) -> None:
    """Copy the flows of CrewAI: the newest state of each, and the feedback that it waits for.

    The command can be repeated: it skips equal flows and completes those that changed in the source. A flow that
    changed here is listed, not overwritten: exit code 1.

    Example: [cyan]distributed-state --url redis://host adopt crewai flow_states.db[/]
    """
    _adopt(context, "crewai_adopting", source, into, only, limit, dry_run)


def _adopt(
    context: typer.Context,
    part: str,
    source: str,
    into: str | None,
    only: list[str] | None,
    limit: int | None,
    dry_run: bool,
    **more: Any,
) -> None:
    given: Any = named(source) if _NAME.fullmatch(source) else source
    if into is not None:
        more["into"] = named(into)
    frame, framework = _loaded("adopting"), _loaded(part)
    done: Any = None  # until the source's threads are known

    def show(now: Any) -> None:
        nonlocal done
        done = now
        seen = done.copied + done.there + len(done.differ) + len(done.failed)
        if sys.stderr.isatty():
            status.update(f"{seen} of {done.listed}: {done.copied} copied, {done.there} already equal")
        elif seen % 100 == 0:
            err.print(f"{seen} of {done.listed}", highlight=False)

    async def work(store: distributed_state.StateStore) -> None:
        async with AsyncExitStack() as stack:
            threads = await framework.threads(stack, store, given, **more)
            chosen = {"only": only or (), "limit": limit, "dry_run": dry_run, "progress": show}
            await frame.adopt(threads, store, **chosen)
            if hasattr(threads, "ownerless") and not dry_run and (count := await threads.ownerless()):
                err.print(f"{count} of them have no owner: `store.forget` does not find these", highlight=False)

    try:
        with open_store(context) as store, err.status("looking for threads") as status:
            asyncio.run(work(store))
    except ImportError as error:
        raise ConfigurationError(f"a driver for {source.partition('://')[0]} is not installed: {error}") from error
    except (StateError, OSError, typer.Exit):
        raise
    except Exception as error:  # the source may raise errors of any library
        _log.debug("the source", exc_info=True)
        raise StateError(f"reading the source failed: {type(error).__name__}: {error}") from error
    finally:
        if done is not None:
            _report(done, "to copy" if dry_run else "copied")
    if done.differ or done.failed:
        raise typer.Exit(1)


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line]
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{path}: not UTF-8 at byte {error.start}") from error


def _report(done: Any, verb: str) -> None:
    for what, which in ("differs", done.differ), ("failed", done.failed):
        for name, why in which.items():
            err.print(f"{what}: {printable(name)}: {printable(why)}", style="red", markup=False, highlight=False)
    counts = f"{done.copied} {verb}, {done.there} already equal, {len(done.differ)} differ, {len(done.failed)} failed"
    typer.echo(f"{done.listed} found in the source: {counts}")


def _loaded(part: str) -> Any:
    try:
        return import_module(f"distributed_state.adapters.{part}")
    except ImportError as error:
        raise ConfigurationError(str(error)) from error  # it names the extra
