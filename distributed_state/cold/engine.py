"""Access to SQL: opens a database, runs transactions on it, and translates its errors into those of the package.

Law: every transaction goes through `Database.read`, `write` or `apart`; only they begin, commit or catch errors, and
every wait has a limit.

After `Database` come a transaction, the methods of a store, and special cases: a database that was down when its store
was opened, the settings of an SQLite connection and transaction, and fork().

Design: section 9.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import sqlite3
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial, wraps
from itertools import islice
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Dialect,
    Engine,
    FromClause,
    Integer,
    LargeBinary,
    Select,
    StaticPool,
    Table,
    Text,
    UpdateBase,
    any_,
    bindparam,
    create_engine,
    delete,
    event,
    exc,
    func,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import URL
from sqlalchemy.types import TypeDecorator, TypeEngine
from tenacity import retry, retry_if_exception, stop_after_delay, wait_fixed

from distributed_state.cold.connections import (
    LONG,
    Watcher,
    display_name,
    driver_arguments,
    is_memory,
    limit_postgresql,
    parse_url,
    places,
    sign_of_postgresql,
    sqlite_file,
    watch,
)
from distributed_state.cold.tables import TEXT
from distributed_state.errors import ColdUnavailable, ConfigurationError, StateError
from distributed_state.settings import create_private

Row = tuple[Any, ...]
P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)
# While a database is opened, these words in an error mean that waiting does not help. Servers that answer in another
# language raise ColdUnavailable instead, with the server's own words.
_REFUSED = re.compile(
    r"password|authentication|pg_hba|does not exist|permission denied|not permitted|SSL|invalid connection option"
    r"|invalid value for parameter|unable to open|readonly|read-only|not a database|is malformed",
    re.IGNORECASE,
)
_INSUFFICIENT_PRIVILEGE = "42501"
_INTERNAL = "XX"  # the prefix of these codes: data_corrupted, index_corrupted
# A transaction that was idle too long, and a missing table, which means that a dump is being restored.
_AWAY = ("25006", "25P03", "25P04", "42P01", "3F000")
_TYPES: dict[type, TypeEngine[Any]] = {str: TEXT, int: BigInteger(), bytes: LargeBinary()}
_COPIED_AS = ((BigInteger, "int8"), (Integer, "int4"), (Boolean, "bool"), (LargeBinary, "bytea"), (Text, "text"))
_LOOK_SECONDS = 1.0
_ROWS = 5000  # rows in one statement: more might exceed its time limit
_FORK_SECONDS = 10.0  # seconds that a fork waits for open transactions


class Database:
    """One SQL database, for any number of threads."""

    def __init__(self, url: str | URL, timeout: float = 10.0) -> None:
        parsed = parse_url(url)
        self.memory = is_memory(parsed)
        self.name = "memory" if self.memory else display_name(parsed)
        self.opened = self._closed = False
        self.away = ""  # why SQL was unavailable to the last transaction, "" if it was available
        self._timeout = timeout
        self._opening = Opening()
        self._watcher: Watcher | None = None
        self._here = threading.local()  # `sql`: the transaction of the `one_read` that this thread is in
        # A database in memory has one connection, which one thread at a time may use.
        self._gate: AbstractContextManager[Any] = threading.RLock() if self.memory else nullcontext()
        self._engine = self._create(parsed)
        if self.dialect == "sqlite" and not self.memory:
            self._gate = GATE
            GATE.watch(self._engine)
        self._writer = self._engine.execution_options(writes=True)
        self._long_reader = self._engine.execution_options(long=True)
        self._long_writer = self._engine.execution_options(writes=True, long=True)

    @property
    def dialect(self) -> str:
        """The name of the SQL dialect: sqlite, postgresql, ..."""
        return self._engine.dialect.name

    def open_later(self, prove: Callable[[], None]) -> None:
        """Call `prove` before the first transaction: this database has not been checked yet."""

        def once() -> None:
            prove()
            self.opened = True

        self.away = f"{self.name}: was away when the store was opened"
        self._opening = Opening(once)

    def read(self, namespace: str = "") -> AbstractContextManager[Sql]:
        """A transaction that only reads; all its statements see one snapshot of the database."""
        return self._around() or self._transaction(self._engine, namespace)

    def write(self, namespace: str = "") -> AbstractContextManager[Sql]:
        """A transaction that writes: committed at the end of the block, rolled back by an exception."""
        return self._transaction(self._writer, namespace)

    def long_read(self, namespace: str = "") -> AbstractContextManager[Sql]:
        """Like `read`, for maintenance, whose statements may take long; a silent server is still noticed."""
        return self._around() or self._transaction(self._long_reader, namespace, LONG)

    def long_write(self, namespace: str = "") -> AbstractContextManager[Sql]:
        """Like `write`, for maintenance."""
        return self._transaction(self._long_writer, namespace, LONG)

    @contextmanager
    def one_read(self, namespace: str = "", *, long: bool = False) -> Iterator[None]:
        """Run all reads of this thread inside the block in one `read`, or one `long_read`, with its limits."""
        with self.long_read(namespace) if long else self.read(namespace) as self._here.sql:
            try:
                yield
            finally:
                self._here.sql = None

    def _around(self) -> AbstractContextManager[Sql] | None:
        found: Sql | None = getattr(self._here, "sql", None)
        return None if found is None else nullcontext(found)

    @contextmanager
    def _transaction(self, engine: Engine, namespace: str, times: int = 1) -> Iterator[Sql]:
        if self._closed:
            raise ColdUnavailable(f"{self.name}: closed, with the store that opened it")
        self._opening.require(self.name)
        try:
            with self._gate, self._translated(), self._attempt(times), engine.begin() as connection:
                yield Sql(connection, namespace)
            self.away = ""
        except ColdUnavailable as error:
            self.away = str(error)
            raise
        finally:
            if self._closed:
                # The database was closed meanwhile, perhaps before this connection was opened, so it is closed here.
                self._engine.pool.dispose()

    def _attempt(self, times: int = 1) -> AbstractContextManager[Any]:
        # Longer than the server's own limits: this ends the wait for an answer that was lost in the network.
        return self._watcher.attempt(2 * self._timeout * times) if self._watcher else nullcontext()

    @contextmanager
    def apart(self, prepare: Callable[[Sql], None]) -> Iterator[None]:
        """Keep a transaction open on a connection outside the pool while the block runs, then roll it back.

        `prepare` runs its statements.
        """
        with self._translated(), self._attempt():
            # Isolated like a write: a read transaction would see old rows for its whole duration.
            connection = self._engine.connect().execution_options(writes=True)
            raw: Any = connection.connection.driver_connection
            try:
                connection.detach()
                prepare(Sql(connection, ""))
            except BaseException:
                raw.close()
                raise
        try:
            yield
        finally:
            raw.close()  # without waiting; the server rolls back
            with suppress(exc.SQLAlchemyError):
                connection.close()

    def checkpoint(self) -> bool:
        """Move SQLite's write-ahead log into the database file, leaving it empty; False if a reader was in the way."""
        if self.dialect != "sqlite" or self.memory:
            return True
        with self._gate, self._translated():
            raw = self._engine.raw_connection()
            try:
                row = raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                raw.close()
        return bool(row[0] == 0)

    def close(self) -> None:
        """Close every connection. A transaction under way closes its own at its end: see `_transaction`."""
        self._closed = True
        if self.memory:
            with self._gate:
                self._engine.dispose()
            return
        self._engine.pool.dispose()
        if self._watcher:
            self._watcher.end()

    def abandon(self) -> None:
        """In a forked child: drop the parent's connections without sending anything on them."""
        if self.memory:
            self._gate = threading.RLock()  # the parent's may be held by a thread that the child does not have
            return
        keep_for_ever(self._engine.pool)
        self._engine.dispose(close=False)
        self._opening.forget()
        if self._watcher:
            self._watcher.forget()

    def _create(self, url: URL) -> Engine:
        options: dict[str, Any] = {"hide_parameters": True}
        if self.memory:
            options |= {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
        else:
            options |= {"pool_size": 5, "max_overflow": 10, "pool_timeout": min(10.0, self._timeout)}
        if url.get_backend_name() == "postgresql":
            url, options["connect_args"] = driver_arguments(url, self._timeout)
            options["isolation_level"] = "AUTOCOMMIT"  # `limit_postgresql` sends BEGIN itself
        try:
            engine = create_engine(url, **options)
        except ImportError as error:
            raise ConfigurationError(
                f"{self.name}: the driver is not installed: {error}: pip install 'distributed-state[postgres]'"
            ) from error
        except (exc.ArgumentError, TypeError) as error:
            raise ConfigurationError(f"{self.name}: {error}") from error
        if engine.dialect.name == "sqlite":
            prepare_sqlite(engine, self._timeout)
            return engine
        limit_postgresql(engine, self._timeout)
        self._watcher = Watcher(self.name, partial(sign_of_postgresql, places(url)))
        watch(engine, self._watcher)
        event.listen(engine, "connect", self._require_unicode)
        return engine

    def _require_unicode(self, connection: Any, _: Any) -> None:
        # Another encoding cannot store every id and actor; a commit with an id that it lacks would be quarantined.
        encoding = connection.info.parameter_status("server_encoding")
        if encoding is None:  # behind a proxy that does not report it
            (encoding,) = connection.execute("SHOW server_encoding", prepare=False).fetchone()
        if encoding not in ("UTF8", "SQL_ASCII"):
            connection.close()
            raise ConfigurationError(f"{self.name}: the database's encoding is {encoding}; create one in UTF8")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except StateError:
            raise
        except Exception as error:
            ours = self._ours(error)
            if ours is None:
                raise
            if self._damaged(error) and not self.memory:
                # Open connections cache pages, and would not notice that the file was repaired.
                self._engine.dispose()
            raise ours from error

    def _damaged(self, error: Exception) -> bool:
        """Whether the error means damaged data. SQLite has no class of its own for it, PostgreSQL a class of codes."""
        driver: Any = self._engine.dialect.dbapi
        original: Any = error.orig if isinstance(error, exc.DBAPIError) else error
        return type(original) is driver.DatabaseError or (getattr(original, "sqlstate", None) or "")[:2] == _INTERNAL

    def _ours(self, error: Exception) -> StateError | None:
        """The package's error for a driver's error; None for a bug, which is raised unchanged."""
        if isinstance(error, exc.TimeoutError):
            return ColdUnavailable(f"{self.name}: no connection became free in time")
        error = _cause(error)
        driver: Any = self._engine.dialect.dbapi
        original: Any = error.orig if isinstance(error, exc.DBAPIError) else error
        if not isinstance(original, driver.Error):
            return None
        code = getattr(original, "sqlstate", None)
        message = f"{self.name}: {str(original).strip()}"
        if code == _INSUFFICIENT_PRIVILEGE:
            return ConfigurationError(f"{message}; grant the right, or let a role that has it run the command")
        if not self.opened and code is None and isinstance(original, driver.ProgrammingError):
            return ConfigurationError(message)  # an option of the URL, refused by the driver itself
        lost = isinstance(error, exc.DBAPIError) and error.connection_invalidated
        kinds = (driver.OperationalError, driver.InterfaceError)
        damaged = self._damaged(error)
        if not self.opened and (isinstance(original, kinds) or damaged):
            return (ConfigurationError if _REFUSED.search(str(original)) else ColdUnavailable)(message)
        if lost or damaged or isinstance(original, kinds) or code in _AWAY:
            return ColdUnavailable(message)
        return None


# A transaction


class Sql:
    """One transaction in one namespace; `execute` and the like are those of SQLAlchemy's connection.

    Any number of rows goes in statements of some thousands; a row is a tuple in the order of its table's columns.
    Measured for batches of 1,000 rows (PostgreSQL 15): COPY 35,649 rows/s, executemany 19,239, multi-VALUES about
    1,000.
    """

    def __init__(self, connection: Connection, namespace: str) -> None:
        self.connection = connection
        self.namespace = namespace
        self.postgresql = connection.dialect.name == "postgresql"
        self.execute = connection.execute
        self.exec_driver_sql = connection.exec_driver_sql
        self.begin_nested = connection.begin_nested

    def among(self, column: Column[Any], wanted: Collection[str] | Collection[int]) -> ColumnElement[bool]:
        """Whether a column is one of these, passed as one parameter: the statement does not depend on their number."""
        if self.postgresql:
            return column == any_(_array(wanted, column.type))
        return column.in_(select(func.json_each(json.dumps(list(wanted))).table_valued("value").c.value))

    def rows(self, query: Select[Any], column: Column[Any], wanted: Iterable[Any]) -> Iterable[Any]:
        """The rows of a query in which a column is one of these. Without values the database is not asked."""
        for some in chunks(sorted(wanted), _ROWS):
            yield from self.execute(query.where(self.among(column, some)))

    def each(self, statement: UpdateBase, rows: Iterable[Mapping[str, Any]]) -> int:
        """Execute a statement for each of these parameters; return how many rows it changed."""
        return sum(self.execute(statement, some).rowcount for some in chunks(rows, _ROWS))

    def listed(self, columns: Mapping[str, TypeEngine[Any]], rows: Collection[Row]) -> FromClause:
        """A table of these rows, texts and integers, in a statement that does not depend on their number."""
        if self.postgresql:
            each = zip(*rows, strict=True) if rows else [()] * len(columns)
            arrays = [_array(values, type) for type, values in zip(columns.values(), each, strict=True)]
            return func.unnest(*arrays).table_valued(*columns, name="listed").render_derived()
        given = func.json_each(json.dumps(list(rows))).table_valued("value")
        places = enumerate(columns.items())
        names = [func.json_extract(given.c.value, f"$[{at}]", type_=type).label(name) for at, (name, type) in places]
        return select(*names).subquery("listed")

    def add(self, table: Table, rows: Sequence[Row], columns: Sequence[Column[Any]] = ()) -> None:
        """Insert new rows. A row is in the order of `columns`, or of all columns of the table."""
        if not rows:
            return
        columns = columns or list(table.columns)
        quote = self.connection.dialect.identifier_preparer.quote
        into = f"{quote(table.name)} ({', '.join(quote(column.name) for column in columns)})"
        if not self.postgresql:
            # This skips SQLAlchemy's processing of parameters, which takes twice as long as SQLite itself.
            for some in chunks(rows, _ROWS):
                self.exec_driver_sql(f"INSERT INTO {into} VALUES ({', '.join('?' * len(columns))})", some)
            return
        types = [next(name for kind, name in _COPIED_AS if isinstance(column.type, kind)) for column in columns]
        raw: Any = self.connection.connection.driver_connection
        for some in chunks(rows, _ROWS):
            with raw.cursor() as cursor, cursor.copy(f"COPY {into} FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(types)
                for row in some:
                    copy.write_row(row)

    def change(self, table: Table, key: Column[Any], columns: Sequence[Column[Any]], rows: Sequence[Row]) -> None:
        """Update these columns of the rows with these keys; a row is its key, then the columns."""
        if not self.postgresql:
            # This skips SQLAlchemy's processing, which takes longer than SQLite itself.
            quote = self.connection.dialect.identifier_preparer.quote
            settings = ", ".join(f"{quote(column.name)} = ?" for column in columns)
            query = f"UPDATE {quote(table.name)} SET {settings} WHERE {quote(key.name)} = ?"
            for some in chunks(rows, _ROWS):
                self.exec_driver_sql(query, [(*values, known) for known, *values in some])
            return
        # One statement for all rows: a statement for each takes PostgreSQL twice as long.
        for some in chunks(rows, _ROWS):
            new = self.listed({column.name: column.type for column in (key, *columns)}, some)
            changed = update(table).where(key == new.c[key.name])
            self.execute(changed.values({column: new.c[column.name] for column in columns}))

    def remove(
        self, table: Table, rows: Sequence[Mapping[str, Any]], which: Callable[[Any], ColumnElement[bool]]
    ) -> int:
        """Delete the table's rows that match any of these (of texts, integers and bytes); return how many were deleted.

        `which` makes the condition from columns that are named as the rows' values are.
        """
        if not rows:
            return 0
        if not self.postgresql:
            marks = SimpleNamespace(**{name: bindparam(name) for name in rows[0]})
            return self.each(delete(table).where(which(marks)), rows)
        types = {name: _TYPES[type(value)] for name, value in rows[0].items()}
        removed = 0
        for some in chunks(rows, _ROWS):
            given = self.listed(types, [tuple(row.values()) for row in some])
            removed += self.execute(delete(table).where(which(given.c))).rowcount
        return removed

    def put(self, table: Table, rows: Sequence[Row]) -> None:
        """Insert rows, or overwrite those with the same primary key."""
        new = (postgresql_insert if self.postgresql else sqlite_insert)(table)
        others = {column: new.excluded[column.name] for column in table.columns if not column.primary_key}
        new = new.on_conflict_do_update(index_elements=list(table.primary_key), set_=others)
        names = [column.name for column in table.columns]
        self.each(new, (dict(zip(names, row, strict=True)) for row in rows))


class Array(TypeDecorator[Sequence[Any]]):
    """An array that is sent as PostgreSQL's text: the driver's conversion of each value takes three times as long.

    The driver also escapes bytes by the `standard_conforming_strings` of the last connection.
    """

    impl = ARRAY
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], str]:
        """Write the list as text."""
        return lambda values_: "{" + ",".join(map(_written, values_)) + "}"


def _array(values_: Iterable[Any], type: TypeEngine[Any]) -> ColumnElement[Any]:
    return bindparam(None, list(values_), type_=Array(type))


def _written(value: str | bytes | int | None) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, bytes):
        return '"\\\\x' + value.hex() + '"'
    return "NULL" if value is None else str(value)


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in lists of at most `size`: databases limit a statement's parameters."""
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk


# A store's methods


class Part:
    """The methods of a store for one namespace of a database. Law: every method is one transaction.

    Most methods are functions of this folder that take the transaction first; `reads` and the like turn them into
    methods.
    """

    def __init__(self, database: Database, namespace: str) -> None:
        self.namespace = namespace
        self.database = database


def _in(
    transaction: Callable[[Database, str], AbstractContextManager[Sql]], function: Callable[Concatenate[Sql, P], T]
) -> Callable[Concatenate[Part, P], T]:
    @wraps(function)
    def method(self: Part, /, *args: P.args, **options: P.kwargs) -> T:
        with transaction(self.database, self.namespace) as sql:
            return function(sql, *args, **options)

    return method


def reads(function: Callable[Concatenate[Sql, P], T]) -> Callable[Concatenate[Part, P], T]:
    """Make a method that calls this function in a read-only transaction."""
    return _in(Database.read, function)


def writes(function: Callable[Concatenate[Sql, P], T]) -> Callable[Concatenate[Part, P], T]:
    """Make a method that calls this function in a transaction that writes."""
    return _in(Database.write, function)


def reads_long(function: Callable[Concatenate[Sql, P], T]) -> Callable[Concatenate[Part, P], T]:
    """Like `reads`, with the limits of maintenance."""
    return _in(Database.long_read, function)


def writes_long(function: Callable[Concatenate[Sql, P], T]) -> Callable[Concatenate[Part, P], T]:
    """Like `writes`, with the limits of maintenance."""
    return _in(Database.long_write, function)


def _cause(error: Exception) -> Exception:
    """The original error if SQLite rolled back the whole transaction, and with it the savepoint.

    SQLite does that on a full disk; otherwise only the missing savepoint would be reported.
    """
    found: BaseException | None = error
    while found is not None and "no such savepoint" in str(found):
        found = found.__context__
    return found if isinstance(found, exc.DBAPIError) else error


def keep_for_ever(inherited: object) -> None:
    """In a forked child: never destroy this object; its destructor would close or unlock what the parent uses."""
    # A reference that is never released, so that the end of the interpreter does not destroy it either.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


# A database that was down when its store was opened


class Opening:
    """Checks of a database before its first use. Without `prove` they were made already.

    Law: nothing is read or written before the checks. They show whether the tables are of this release, and whether the
    database belongs to this Redis. The first caller that needs SQL after it came up makes the checks; other callers
    wait a moment, then raise ColdUnavailable.
    """

    def __init__(self, prove: Callable[[], None] | None = None) -> None:
        self._prove = prove
        self.forget()

    def forget(self) -> None:
        """In a forked child: no other thread is checking here."""
        self._lock = threading.Lock()
        self._here = threading.local()

    def require(self, name: str) -> None:
        """Check the database, unless that was done.

        Raises ColdUnavailable while the database is down, and ConfigurationError, each time, if it is the wrong one.
        """
        if self._prove is None or getattr(self._here, "proving", False):
            return
        if not self._lock.acquire(timeout=_LOOK_SECONDS):
            raise ColdUnavailable(f"{name}: was down when the store was opened, and is being checked")
        try:
            if self._prove is not None:
                self._here.proving = True
                self._prove()
                self._prove = None
                log.warning("%s: answers now; it was down when the store was opened", name)
        finally:
            self._here.proving = False
            self._lock.release()


# Settings of a connection and a transaction of SQLite


def prepare_sqlite(engine: Engine, seconds: float) -> None:
    """Set up every connection; waits for other processes are limited to `seconds`."""
    path = sqlite_file(engine.url) or ""
    opened = False

    def connecting(*_: Any) -> None:
        if opened and path and not os.path.exists(path):
            # SQLite would create an empty database, which is in the way if the file is restored later.
            raise ColdUnavailable(f"{path}: was deleted since it was opened")
        # SQLite would make the file readable for all. Its other files get the mode of this one.
        if path and engine.url.query.get("mode", "rwc") == "rwc":
            create_private(path)

    def connect(connection: Any, record: Any) -> None:
        nonlocal opened
        # SQLAlchemy's events below begin and commit; the driver must not begin transactions itself.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
        _execute_with_retry(seconds, cursor, "PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA secure_delete = ON")
        cursor.execute("PRAGMA cache_size = -4000")  # KiB for each of up to 15 connections
        cursor.close()
        record.info["file"] = _identity(path)
        opened = True

    def begin(connection: Connection) -> None:
        # A transaction that begins as a read cannot wait for another writer: SQLite refuses at once to upgrade its
        # lock.
        if connection.get_execution_options().get("writes"):
            _refuse_removed(connection, path)
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            connection.exec_driver_sql("BEGIN")

    event.listen(engine, "do_connect", connecting)
    event.listen(engine, "connect", connect)
    event.listen(engine, "begin", begin)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _refuse_removed(connection: Connection, path: str) -> None:
    """Raise ColdUnavailable if the file is not the one that was opened.

    SQLite continues to write into a file that was deleted or replaced; commits archived there would be lost.
    """
    if connection.info.get("file") != _identity(path):
        connection.invalidate()
        raise ColdUnavailable(f"{path}: was deleted or replaced since it was opened")


def _execute_with_retry(seconds: float, cursor: Any, words: str) -> None:
    """Switch to write-ahead logging. SQLite does not wait while another process switches too, so this function does."""
    again: Callable[..., Any] = retry(
        retry=retry_if_exception(lambda error: isinstance(error, sqlite3.OperationalError) and "locked" in str(error)),
        stop=stop_after_delay(seconds),
        wait=wait_fixed(0.01),
        reraise=True,
    )(cursor.execute)
    again(words)


# fork() and SQLite


_here = threading.local()


class Pool(Protocol):
    """A pool of connections."""

    def dispose(self) -> None:
        """Close the idle connections."""
        ...


class ForkGate:
    """A gate that makes a fork wait for transactions: a `with` block is one; a nested block belongs to the outer one.

    Law: no child inherits an open SQLite database. SQLite keeps a process-wide list of the locks that its connections
    hold on a file, and fork() copies the list without the locks. *If the parent was in a transaction, the child found
    the database locked forever. Otherwise the child relied on a lock that it did not have: the parent could remove the
    write-ahead log that the child was using.*

    A fork waits until no transaction is under way and closes all connections; afterwards transactions may begin again,
    on new connections.
    """

    def __init__(self) -> None:
        self.forks = 0  # under way or waiting
        self._transactions = 0
        self._changed = threading.Condition()
        self._pools: weakref.WeakSet[Pool] = weakref.WeakSet()

    def watch(self, pool: Pool) -> None:
        """Close the connections of this pool before each fork."""
        self._pools.add(pool)

    def __enter__(self) -> None:
        depth = getattr(_here, "depth", 0)
        if not depth:
            with self._changed:
                self._changed.wait_for(lambda: not self.forks)
                self._transactions += 1
        _here.depth = depth + 1

    def __exit__(self, *_: object) -> None:
        _here.depth -= 1
        if not _here.depth:
            with self._changed:
                self._transactions -= 1
                self._changed.notify_all()

    def before(self) -> None:
        """Before a fork in this thread: wait for transactions, then close connections."""
        own = getattr(_here, "depth", 0) > 0
        with self._changed:
            self.forks += 1
            if not self._changed.wait_for(lambda: self._transactions <= own, _FORK_SECONDS):
                log.warning("forked in the middle of a transaction of SQLite: the child may find the database locked")
        for pool in list(self._pools):
            pool.dispose()

    def after_in_parent(self) -> None:
        """After the fork, or its failure: let transactions begin again."""
        with self._changed:
            self.forks -= 1
            self._changed.notify_all()

    def after_in_child(self) -> None:
        """After the fork, in the child: make new locks, because threads that the child lacks may hold the old ones."""
        self._changed = threading.Condition()
        self.forks = 0
        self._transactions = int(getattr(_here, "depth", 0) > 0)


GATE = ForkGate()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=GATE.before, after_in_parent=GATE.after_in_parent, after_in_child=GATE.after_in_child)
