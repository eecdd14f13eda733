"""The command `distributed-state`. Laws: it only uses what any program may use; an error is one line on stderr.

Commands refer to the package as `distributed_state.StateStore`, which is loaded as they run. So `--help` and mistyped
options are answered without loading the libraries of Redis and SQL.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import signal
import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

import distributed_state
from distributed_state.errors import ColdUnavailable, InvalidValue, NotFound, StateError, WarmUnavailable
from distributed_state.programs import logs

_HELP = (
    "State for agents that run on many servers: read it, change it, archive it, and watch it survive killed workers."
)
log = logging.getLogger(__name__)
_WIDE = 200
_PEEK = 2.0  # seconds for SQL to answer whether a namespace exists; while SQL is unavailable Redis knows


_IN_CONTAINERS = ("serve", "archiver", "probe", "migrate", "purge", "token")


def _is_logged(command: str | None) -> bool:
    """Whether a log, and no terminal, shows why this command ends."""
    return command in _IN_CONTAINERS and not err.is_terminal


class _Commands(TyperGroup):
    """The commands. Containers log the error that ends one; for a global option after a command, it says where."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            # click's NoSuchOption; recent releases of typer have their own copy of it
            name = getattr(error, "option_name", None)
            if type(error).__name__ == "NoSuchOption" and any(name in each.opts for each in self.params):
                error.message += f"; write it before the command: distributed-state {name} ..."  # type: ignore[attr-defined]
            shown = getattr(error, "format_message", None)  # click's ClickException, or typer's copy
            text = shown() if shown else str(error) if isinstance(error, StateError | OSError) else ""
            if not text or not _is_logged(ctx.invoked_subcommand):
                raise
            logs.ended(text)
            raise typer.Exit(2 if shown else 1) from error


app = typer.Typer(
    cls=_Commands,
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def group(name: str, help: str) -> typer.Typer:
    """Add a group of commands."""
    made = typer.Typer(help=help, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.add_typer(made, name=name)
    return made


# Without emoji: rich would read a part of the record "session:a:" as one.
out = Console(emoji=False)
err = Console(stderr=True, emoji=False)
for _console in (out, err):
    if not _console.is_terminal and "COLUMNS" not in os.environ:
        _console.width = _WIDE  # rich would assume 80, too narrow for the tables of commands in a container

_URL = "URL of Redis or Valkey; by default the embedded store in the current folder."
_ARCHIVE = "URL of the SQL database, such as postgresql+psycopg://... or sqlite:///..."
_NAMESPACE = "Namespace of the store, if several stores share the servers."
Url = Annotated[str | None, typer.Option(envvar="DISTRIBUTED_STATE_URL", help=_URL)]
Archive = Annotated[str | None, typer.Option(envvar="DISTRIBUTED_STATE_ARCHIVE", help=_ARCHIVE)]
Namespace = Annotated[str | None, typer.Option(envvar="DISTRIBUTED_STATE_NAMESPACE", help=_NAMESPACE)]
Id = Annotated[str, typer.Argument(help="Id of the record.", show_default=False)]
Scope = Annotated[str, typer.Option(help="Kind of record: session, user, app or task.")]
_HOW = "A Search object of your program, such as shop.settings:search; by default the settings stored with the index."
How = Annotated[str | None, typer.Option("--search", metavar="MODULE:NAME", help=_HOW)]

_AGO = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d|w)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
WHEN = "an age, such as 10m, 2h or 7d, or a date and time in ISO 8601, local unless it has an offset"


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(metadata.version("distributed-state"))
        raise typer.Exit


def _variables(command: Any) -> Iterator[str]:
    """The environment variables that give the options of a command, and of those below it."""
    for parameter in command.params:
        if names := parameter.envvar:
            yield from [names] if isinstance(names, str) else names
    for each in getattr(command, "commands", {}).values():
        yield from _variables(each)


@app.callback()
def options(
    context: typer.Context,
    url: Url = None,
    archive: Archive = None,
    namespace: Namespace = None,
    log_level: Annotated[
        str,
        typer.Option(envvar="DISTRIBUTED_STATE_LOG_LEVEL", help="Log level: debug, info, warning, error or critical."),
    ] = "warning",
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Read the options that all commands share."""
    level = logging.getLevelNamesMapping().get(log_level.upper())
    logs.write(logging.WARNING if level is None else level, err)
    if level is None:
        raise typer.BadParameter(f"{log_level!r} is not one of debug, info, warning, error, critical")
    known = {*_variables(context.find_root().command)}
    if any(name.startswith("DISTRIBUTED_STATE_") and name not in known for name in os.environ):
        from distributed_state.settings import warn_of_misspelt

        warn_of_misspelt(known)
    context.obj = {"url": url, "archive": archive, "namespace": namespace}


@contextmanager
def open_store(context: typer.Context, **settings: Any) -> Iterator[distributed_state.StateStore]:
    """Open the store that the options name, for one command."""
    opened: list[str] = []
    try:
        # No heartbeat: a short command is not a replica of the fleet.
        with distributed_state.StateStore.open(**context.obj, **{"beat": 0.0, **settings}) as store:
            if isinstance(store, distributed_state.StateStore):  # a store behind a service is not a replica
                opened.append(store.replica)
                logs.opened(store.replica)
            yield store
    finally:
        for each in opened:  # only now, so that log lines about its end still carry its id
            logs.closed(each)


@contextmanager
def open_existing(context: typer.Context, **settings: Any) -> Iterator[distributed_state.StateStore]:
    """Open an existing store to read from. Raises NotFound if there is none; it creates neither store nor tables."""
    require_existing(context)
    with open_store(context, **settings) as store:
        yield store


def require_existing(context: typer.Context) -> None:
    """Raise NotFound if there is no store where the options name one."""
    url = context.obj["url"]
    if url is None:
        from distributed_state.cold.connections import parse_url, sqlite_file
        from distributed_state.store.lifecycle import EMBEDDED_ARCHIVE

        file = sqlite_file(parse_url(context.obj["archive"] or EMBEDDED_ARCHIVE))
        if file and not Path(file).exists():
            raise NotFound(
                f"there is no store in {file}: name another one with --url and --archive, or create one here with `set`"
            )
    elif not url.lower().startswith(("http://", "https://")):
        _require_namespace(context)


@contextmanager
def open_to_list(context: typer.Context, **settings: Any) -> Iterator[Any]:
    """Open a store to list from. While Redis is unavailable, open only the archive and print what is missing."""
    missing = "unarchived commits are not listed"
    with _opened_or_archive(context, open_existing(context, **settings), missing) as store:
        yield store


@contextmanager
def open_to_tidy(context: typer.Context) -> Iterator[Any]:
    """Open a store to clean up its archive. While Redis is unavailable, open only the archive and say so."""
    with _opened_or_archive(context, open_store(context), "unarchived commits are left unchanged") as store:
        yield store


@contextmanager
def _opened_or_archive(context: typer.Context, opening: AbstractContextManager[Any], said: str) -> Iterator[Any]:
    with ExitStack() as stack:
        try:
            store: Any = stack.enter_context(opening)
        except WarmUnavailable as error:
            from distributed_state.store.archive_alone import archive_alone

            settings = distributed_state.Settings.of(**context.obj)
            if settings.archive in (None, "memory"):
                raise
            store = stack.enter_context(archive_alone(settings, error))
            text = f"{said}, because Redis is unavailable: {error}"
            if _is_logged(context.info_name):
                log.warning("%s", text)
            else:
                err.print(text, style="yellow", markup=False, highlight=False)
        yield store


def _require_namespace(context: typer.Context) -> None:
    """Raise NotFound if SQL answers and does not have the namespace. While SQL is unavailable Redis knows."""
    from distributed_state.cold import opening
    from distributed_state.cold.connections import display_name, parse_url

    settings = distributed_state.Settings.of(**context.obj)
    archive = settings.archive
    if archive is None or archive == "memory":
        return
    try:
        there = opening.is_there(archive, settings.namespace, min(settings.sql_timeout, _PEEK))
    except ColdUnavailable:
        return
    if not there:
        place = display_name(parse_url(archive))
        raise NotFound(f"there is no namespace {settings.namespace!r} in {place}: the first worker or write creates it")


def record_of(store: distributed_state.StateStore, scope: str, id: str) -> distributed_state.Record:
    """Return a record of any scope. Raises InvalidValue for a scope that does not exist."""
    from distributed_state.values.model import SCOPES

    if scope not in SCOPES:
        raise InvalidValue(f"scope {scope!r} is not one of {', '.join(SCOPES)}")
    return getattr(store, scope)(id)  # type: ignore[no-any-return]  # each scope is a method that returns its records


def print_json_lines(values: Iterable[Any]) -> None:
    """Print one JSON object a line, in ASCII: control sequences that a terminal would obey are escaped.

    Bytes are printed in base64.
    """
    sys.stdout.writelines(json.dumps(each, default=_as_json) + "\n" for each in values)


def _as_json(value: Any) -> Any:
    return b64encode(value).decode() if isinstance(value, bytes) else value.to_dict()


def print_table(table: Table) -> None:
    """Print a table; without lines and blanks at the end of rows if it is not for a terminal."""
    if out.is_terminal:
        out.print(table)
        return
    table.box, table.pad_edge = None, False
    with out.capture() as shown:
        out.print(table)
    sys.stdout.writelines(line.rstrip() + "\n" for line in shown.get().splitlines())


def say_more(cursor: str) -> None:
    """Say that there may be more rows, and how to continue."""
    err.print(f"there may be more rows: continue with --after {cursor}", markup=False, highlight=False)


def print_json(value: Any) -> None:
    """Print a JSON value, indented."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


# Arguments of commands, and what they print


def moment(option: str, text: str | None, now: float) -> float | None:
    """The time that an option names, in seconds since 1970."""
    if text is None:
        return None
    if past := _AGO.fullmatch(text):
        return max(0.0, now - float(past[1]) * _SECONDS[past[2]])
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise InvalidValue(f"{option} is {WHEN}, not {text!r:.80}") from error


def span(option: str, text: str) -> float:
    """The length of time that an option names, in seconds."""
    if found := _AGO.fullmatch(text):
        return float(found[1]) * _SECONDS[found[2]]
    raise InvalidValue(f"{option} is a number and a unit, such as 30m, 12h or 7d, not {text!r:.80}")


def ago(seconds: float) -> str:
    """A length of time in its largest unit, in the form that `moment` reads."""
    unit = max((each for each in _SECONDS if _SECONDS[each] <= max(seconds, 1)), key=_SECONDS.__getitem__)
    return f"{max(seconds, 0) // _SECONDS[unit]:.0f}{unit}"


def plain(text: str) -> str:
    """Escape text that may hold anything: markup, and control sequences that a terminal would obey."""
    return escape(printable(text))


def printable(text: str) -> str:
    """Escape control sequences only, for output that is not parsed as markup."""
    return text if text.isprintable() else ascii(text)


def when(seconds: float) -> str:
    """Show a time in the zone of this machine, to the millisecond."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="milliseconds")


def named(place: str) -> Any:
    """Import what `module:NAME` names, with the current folder on the path."""
    module, _, name = place.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidValue(f"{place!r} is not found as module:NAME from the current folder: {error}") from error


def given_search(how: str | None) -> dict[str, Any]:
    """The setting that `--search` names; empty if it was not given."""
    return {} if how is None else {"search": named(how)}


def stop_on_signals() -> Callable[[], bool]:
    """Catch SIGTERM and Ctrl-C for a command that ends its loop itself. The result returns whether one came."""
    received: list[int] = []
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, _: received.append(number))
    return lambda: bool(received)


class _Terminated:
    """Treats SIGTERM as a Ctrl-C with exit code 143, as asyncio cancels its tasks only on KeyboardInterrupt."""

    def __init__(self) -> None:
        self.received = False
        # A shell starts background jobs with SIGINT ignored, and asyncio would leave it ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, _: int, frame: FrameType | None) -> None:
        self.received = True
        interrupted = signal.getsignal(signal.SIGINT)
        assert callable(interrupted)
        interrupted(signal.SIGINT, frame)


def main() -> None:
    """Run the command."""
    terminated = _Terminated()
    # Values may hold lone surrogates, which cannot be printed; they are escaped as in JSON.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a real stdout is a TextIOWrapper
    try:
        app()
    except KeyboardInterrupt:  # before typer handles it
        sys.exit(128 + signal.SIGINT)
    except (StateError, OSError) as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(1)
    finally:
        if terminated.received:
            sys.exit(128 + signal.SIGTERM)
