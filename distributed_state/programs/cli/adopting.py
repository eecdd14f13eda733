"""Commands that bring the threads of a framework's own store. Law: they may be ended at any time and run again."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

import distributed_state
from distributed_state.errors import ConfigurationError, InvalidValue, StateError
from distributed_state.programs.cli.looking import printable
from distributed_state.programs.cli.running import named
from distributed_state.programs.cli.shell import app, err, open_store

_log = logging.getLogger(__name__)
_HELP = "Copy what LangGraph, OpenAI Agents, ADK or Agno keep elsewhere, compare, and go on where it was ended."
adopt = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(adopt, name="adopt")

_SOURCE = "or module:NAME of your program, imported from the current folder: an object, or what makes it."
_INTO = (
    "What your program makes of a store, as module:NAME, if not as the README shows: with a prefix, owners, a serde."
)
_NAME = re.compile(r"[\w.]+:[A-Za-z_]\w*")
Into = Annotated[str | None, typer.Option(metavar="MODULE:NAME", help=_INTO)]
Only = Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this thread; may be given several times.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Stop after copying this many.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only compare; change nothing.")]


@adopt.command()
def langgraph(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help=f"postgresql://..., sqlite:///file, {_SOURCE}")],
    into: Into = None,
    only: Only = None,
    limit: Limit = None,
    dry_run: DryRun = False,
) -> None:
    """Copy the threads of a saver: all checkpoints with their writes, metadata, parents and namespaces.

    Both are read back and compared. Run again, what is equal is passed over, what is half copied or went on in the
    source is finished, and what went on here is named and left: then the exit code is 1.

    Example: [cyan]distributed-state --url redis://host --archive postgresql://host/agents adopt langgraph
    postgresql://host/graphs[/]
    """
    _adopt(context, "langgraph.adopting", source, into, only, limit, dry_run)


@adopt.command()
def openai(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help=f"sqlite:///file, postgresql://..., redis://..., {_SOURCE}")],
    ids: Annotated[
        Path | None, typer.Option(help="Ids of sessions, one a line, for a source whose sessions cannot be listed.")
    ] = None,
    into: Into = None,
    only: Only = None,
    limit: Limit = None,
    dry_run: DryRun = False,
) -> None:
    """Copy the sessions of the OpenAI Agents SDK: all items in their order.

    A function as SOURCE makes a session of its id. Run again, what is equal is passed over, what went on in the source
    is finished, and what went on here is named and left: then the exit code is 1.

    Example: [cyan]distributed-state --url redis://host adopt openai redis://old-host[/]
    """
    more = {} if ids is None else {"ids": _lines(ids)}
    _adopt(context, "openai_agents_adopting", source, into, only, limit, dry_run, **more)


@adopt.command()
def adk(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help=f"URL of a DatabaseSessionService, {_SOURCE}")],
    app_: Annotated[list[str] | None, typer.Option("--app", help="Only this app; may be given several times.")] = None,
    into: Into = None,
    only: Only = None,
    limit: Limit = None,
    dry_run: DryRun = False,
) -> None:
    """Copy the sessions of Google ADK: events, state, and what users and apps share.

    Names are app/user/id of a session, app/user of what a user's sessions share, app of what all do. Run again, what is
    equal is passed over, what went on in the source is finished, and what somebody changed here is named and left:
    then the exit code is 1.

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

    Names are session/id and memories/user. Run again, what is equal is passed over, what went on in the source is
    finished, and what somebody changed here is named and left: then the exit code is 1.

    Example: [cyan]distributed-state --url redis://host adopt agno sqlite:///agno.db[/]
    """
    _adopt(context, "agno.adopting", source, into, only, limit, dry_run)


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
    done: Any = None  # until it is known what there is

    def show(now: Any) -> None:
        nonlocal done
        done = now
        seen = done.copied + done.there + len(done.differ) + len(done.failed)
        if sys.stderr.isatty():
            status.update(f"{seen} of {done.listed}: {done.copied} copied, {done.there} there already")
        elif seen % 100 == 0:
            err.print(f"{seen} of {done.listed}", highlight=False)

    async def work(store: distributed_state.StateStore) -> None:
        async with AsyncExitStack() as stack:
            threads = await framework.threads(stack, store, given, **more)
            chosen = {"only": only or (), "limit": limit, "dry_run": dry_run, "progress": show}
            await frame.adopt(threads, store, **chosen)

    try:
        with open_store(context) as store, err.status("looking for threads") as status:
            asyncio.run(work(store))
    except ImportError as error:
        raise ConfigurationError(f"a driver for {source.partition('://')[0]} is not installed: {error}") from error
    except (StateError, OSError, typer.Exit):
        raise
    except Exception as error:  # of whatever the source is
        _log.debug("the source", exc_info=True)
        raise StateError(f"the source: {type(error).__name__}: {error}") from error
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
    counts = f"{done.copied} {verb}, {done.there} there already, {len(done.differ)} differ, {len(done.failed)} failed"
    typer.echo(f"{done.listed} listed: {counts}")


def _loaded(part: str) -> Any:
    try:
        return import_module(f"distributed_state.adapters.{part}")
    except ImportError as error:
        raise ConfigurationError(str(error)) from error  # it names the extra
