"""Copies the threads of a framework's own store into ours: the common part. Law: the target is never overwritten.

A thread is read from both stores and compared; missing parts are copied, and both are read again until they are equal.
No progress is stored: a killed run is simply run again, even while others still write to the source. Threads that
others changed in the target are reported and not changed. The `adopting` module of each framework defines its threads
and copies them.

A source is only read. Most classes of frameworks create missing tables, so the tables are checked before such a class
opens the source.

Design: section 22.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from sqlalchemy import Connection, create_engine, exc
from sqlalchemy import inspect as inspected
from sqlalchemy.pool import NullPool

from distributed_state import AsyncRecord, AsyncStateStore, InvalidValue, NotFound, StateStore, Unavailable
from distributed_state.results import Change

ACTOR = "distributed-state adopt"  # the actor of the copied changes in the history
_ROUNDS = 5
_FAILURES = 10
Name = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a comparison: equal, the remaining work, or the reason to leave the target alone."""

    work: Any = None
    differs: str = ""

    @property
    def equal(self) -> bool:
        """Whether the target has everything that the source has."""
        return self.work is None and not self.differs


EQUAL = Found()


class Threads(Protocol):
    """The threads of a source and of a target, each by its framework's interface."""

    async def names(self) -> Sequence[Name]:
        """The names of all threads in the source."""

    async def compare(self, name: Name) -> Found:
        """Read a thread from both."""

    async def copy(self, name: Name, work: Any) -> None:
        """Copy the parts that a comparison found missing."""


@dataclass(slots=True)
class Adopted:
    """The progress: which of the `listed` threads were copied, existed already, differ, or could not be read."""

    listed: int = 0
    copied: int = 0
    there: int = 0
    differ: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


async def adopt(
    threads: Threads,
    store: StateStore | AsyncStateStore,
    *,
    only: Collection[str] = (),
    limit: int | None = None,
    dry_run: bool = False,
    progress: Callable[[Adopted], None] = lambda now: None,
) -> Adopted:
    """Copy the threads in `only`, or all, at most `limit` that are still missing; with `dry_run` only compare.

    Raises NotFound for a name in `only` that the source does not have, and the source's own error if it is down.
    Cancellation leaves at most one thread partly copied; the next run completes it.
    """
    done = Adopted()
    names = {label(name): name for name in await threads.names()}
    if lacking := sorted(set(only) - names.keys()):
        raise NotFound(f"the source has no {lacking[0]!r:.80}")
    chosen = [each for each in names if not only or each in only]
    done.listed = len(chosen)
    in_a_row = 0
    progress(done)
    with store.acting_as(ACTOR):
        for each in chosen:
            if limit is not None and done.copied >= limit:
                break
            try:
                await _one(threads, names[each], done, dry_run)
                in_a_row = 0
            except (Unavailable, OSError):
                raise
            except Exception as error:  # an error of one thread is reported, and the next thread is tried
                done.failed[each] = f"{type(error).__name__}: {error}"
                in_a_row += 1
                if in_a_row >= _FAILURES:
                    raise
            progress(done)
    return done


async def _one(threads: Threads, name: Name, done: Adopted, dry_run: bool) -> None:
    for copies in range(_ROUNDS):
        found = await threads.compare(name)
        if found.equal and not copies:
            done.there += 1
            return
        if found.differs:
            done.differ[label(name)] = found.differs
            return
        if found.equal or dry_run:
            done.copied += 1
            return
        await threads.copy(name, found.work)
    done.differ[label(name)] = (
        "the copy still differs from the source, or the source changes faster than it can be copied"
    )


def label(name: Name) -> str:
    """A thread's name as one string."""
    return "/".join(name)


async def untouched(record: AsyncRecord) -> bool:
    """Whether a record is new, or has only been changed by adopting."""
    version = await record.version(fresh=True)
    changes = await record.history(after=version - 1) if version else []
    return len(changes) == min(version, 1) and all(change.actor == ACTOR for change in changes)


async def deleted(record: AsyncRecord) -> bool:
    """Whether a record was deleted here. It is not restored: its deletion may have been required by law."""
    return not await record.exists(fresh=True) and await record.version(fresh=True) > 0


async def removed(record: AsyncRecord, shows: Callable[[Sequence[Change]], bool]) -> bool:
    """Whether the history of a record `shows` that a part was removed in the target. That part is not restored.

    If the history was purged, this is unknown; then it returns whether the record was changed in the target.
    """
    if await untouched(record):
        return False
    version = await record.version(fresh=True)
    changes = await record.history(before=version + 1)
    return len(changes) < version or shows(changes)


def removed_item(changes: Sequence[Change], collection: str) -> bool:
    """Whether these changes removed an item of a collection."""
    return any(each[0] == collection and item is None for change in changes for each, item in change.items.items())


DELETED = Found(differs="it was deleted here")


def canonical(value: Any) -> str:
    """A JSON value as text, equal for equal values: 1, 1.0 and true are different."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True)


# Sources


async def opened(stack: AsyncExitStack, given: Any, kinds: tuple[type, ...]) -> Any:
    """The saver, service or database: `given` itself, its result, or opened by this URL; closed with the stack."""
    managers = (AbstractAsyncContextManager, AbstractContextManager)
    if not isinstance(given, (*kinds, *managers)) and callable(given):
        try:
            inspect.signature(given).bind()
        except TypeError as error:
            raise InvalidValue(f"the source, {given!r:.80}, cannot be called without arguments: {error}") from error
        given = given()
    if inspect.isawaitable(given):
        given = await given
    if not isinstance(given, kinds):
        if isinstance(given, AbstractAsyncContextManager):
            given = await stack.enter_async_context(given)
        elif isinstance(given, AbstractContextManager):
            given = stack.enter_context(given)
    if not isinstance(given, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise InvalidValue(f"the source is not a {wanted}, and does not create one: {type(given).__name__}")
    return given


def sqlite_path(source: str) -> str | None:
    """The existing file of `sqlite:///path` or of a plain path; None for any other URL."""
    parts = urlsplit(source)
    if parts.scheme.partition("+")[0] == "sqlite":
        path = unquote(parts.path[1:])
    elif "://" not in source:
        path = source
    else:
        return None
    if not Path(path).is_file():
        raise NotFound(f"there is no file {path!r:.200}")
    return path


Needed = Mapping[str, Collection[str]]  # columns by table


def read_only(path: str) -> str:
    """The URI with which SQLite opens a file read-only."""
    return f"{Path(path).resolve().as_uri()}?mode=ro"


def read_only_url(path: str, driver: str = "sqlite") -> str:
    """The read-only URL for SQLAlchemy."""
    return f"{driver}:///{read_only(path)}&uri=true"


def demand_in_file(path: str, framework: str, needed: Needed) -> None:
    """Raise NotFound unless an SQLite file has these tables with these columns."""
    engine = create_engine(read_only_url(path), poolclass=NullPool)
    try:
        with engine.connect() as connection:
            demand(connection, framework, needed)
    except exc.DatabaseError as error:
        raise NotFound(f"no tables of {framework} in the source: {error.orig}") from error


def demand_in_postgresql(url: str, framework: str, needed: Needed) -> None:
    """Raise NotFound unless a PostgreSQL database has these tables with these columns."""
    import psycopg

    # psycopg parses the URL, which may name several hosts.
    connect: Any = psycopg.connect
    engine = create_engine("postgresql+psycopg://", creator=lambda: connect(url), poolclass=NullPool)
    with engine.connect() as connection:
        demand(connection, framework, needed)


def demand(connection: Connection, framework: str, needed: Needed) -> None:
    """Raise NotFound unless these tables exist with these columns."""
    looked = inspected(connection)
    for table in needed:
        if not looked.has_table(table):
            raise NotFound(f"no tables of {framework} in the source: it has no {table!r}")
    for table, columns in needed.items():
        there = {column["name"] for column in looked.get_columns(table)}
        if lacking := sorted(set(columns) - there):
            raise NotFound(
                f"no tables of {framework} in the source that can be read: {table!r} has no column {lacking[0]!r}. If "
                f"they were made by an older release, let {framework} bring them up to date first"
            )
