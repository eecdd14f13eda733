"""The door to SQL: opens a database, runs transactions on it, and turns its errors into ours.

Law: every transaction goes through `Database.read`, `write` or `apart`; nobody else begins, commits or catches, and
nothing waits without a bound.

After `Database` come a transaction, the methods of a store, and the parts of a database: one that was down when its
store was opened, what is set when a connection and a transaction of SQLite begin, and fork().

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
    Patience,
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
# While opening, these words in a refusal mean that waiting does not help. Servers in other languages than English
# say it otherwise; then the refusal is ColdUnavailable, with the server's own words in it.
_REFUSED = re.compile(
    r"password|authentication|pg_hba|does not exist|permission denied|not permitted|SSL|invalid connection option"
    r"|invalid value for parameter|unable to open|readonly|read-only|not a database|is malformed",
    re.IGNORECASE,
)
_INSUFFICIENT_PRIVILEGE = "42501"
_INTERNAL = "XX"  # what these codes begin with: data_corrupted, index_corrupted
# A transaction that was too long idle, a table that is not there: a dump is being restored.
_AWAY = ("25006", "25P03", "25P04", "42P01", "3F000")
_TYPES: dict[type, TypeEngine[Any]] = {str: TEXT, int: BigInteger(), bytes: LargeBinary()}
_COPIED_AS = ((BigInteger, "int8"), (Integer, "int4"), (Boolean, "bool"), (LargeBinary, "bytea"), (Text, "text"))
_LOOK_SECONDS = 1.0
_FORK_SECONDS = 10.0  # seconds for the transactions that are under way


class Database:
    """One SQL database, for any number of threads."""

    def __init__(self, url: str | URL, timeout: float = 10.0) -> None:
        parsed = parse_url(url)
        self.memory = is_memory(parsed)
        self.name = "memory" if self.memory else display_name(parsed)
        self.opened = self._closed = False
        self.away = ""  # why the last transaction could not be done, "" if it could
        self._timeout = timeout
        self._opening = Opening()
        self._patience: Patience | None = None
        self._here = threading.local()  # `sql`: of the `one_read` that a thread is in
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
        """Call `prove` before the first transaction: nothing of this database was looked at yet."""

        def once() -> None:
            prove()
            self.opened = True

        self.away = f"{self.name}: was away when the store was opened"
        self._opening = Opening(once)

    def read(self, namespace: str = "") -> AbstractContextManager[Sql]:
        """A transaction that only reads; all its statements see the database at one moment."""
        return self._around() or self._transaction(self._engine, namespace)

    def write(self, namespace: str = "") -> AbstractContextManager[Sql]:
        """A transaction that writes: committed at the end of the block, undone by an exception."""
        return self._transaction(self._writer, namespace)

    def long_read(self, namespace: str = "") -> AbstractContextManager[Sql]:
        """As `read`, for maintenance, whose statements may take long; a silent server is noticed all the same."""
        return self._around() or self._transaction(self._long_reader, namespace, LONG)

    def long_write(self, namespace: str = "") -> AbstractContextManager[Sql]:
        """As `write`, for maintenance."""
        return self._transaction(self._long_writer, namespace, LONG)

    @contextmanager
    def one_read(self, namespace: str = "", *, long: bool = False) -> Iterator[None]:
        """Inside, all reads of this thread belong to one `read`, or to one `long_read`, and have its limits."""
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
                # Closed meanwhile, perhaps before this connection was opened: nobody else would close it.
                self._engine.pool.dispose()

    def _attempt(self, times: int = 1) -> AbstractContextManager[Any]:
        # Beyond what the server itself allows: this is for an answer that was lost on its way.
        return self._patience.attempt(2 * self._timeout * times) if self._patience else nullcontext()

    @contextmanager
    def apart(self, prepare: Callable[[Sql], None]) -> Iterator[None]:
        """A transaction on a connection of its own, none of the pool's, for as long as the block lasts; then undone.

        `prepare` does in it what is to be done.
        """
        with self._translated(), self._attempt():
            # As one that writes: a transaction that reads would see old rows for as long as it lasts.
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
            raw.close()  # which waits for nobody; the server undoes it
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
        """Close every connection. What is still at work closes its own when it is done: see `_transaction`."""
        self._closed = True
        if self.memory:
            with self._gate:
                self._engine.dispose()
            return
        self._engine.pool.dispose()
        if self._patience:
            self._patience.end()

    def abandon(self) -> None:
        """In a forked child: forget the parent's connections without a word on the wire."""
        if self.memory:
            self._gate = threading.RLock()  # the parent's may be held by a thread that the child does not have
            return
        keep_for_ever(self._engine.pool)
        self._engine.dispose(close=False)
        self._opening.forget()
        if self._patience:
            self._patience.forget()

    def _create(self, url: URL) -> Engine:
        options: dict[str, Any] = {"hide_parameters": True}
        if self.memory:
            options |= {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
        else:
            options |= {"pool_size": 5, "max_overflow": 10, "pool_timeout": min(10.0, self._timeout)}
        if url.get_backend_name() == "postgresql":
            url, options["connect_args"] = driver_arguments(url, self._timeout)
            options["isolation_level"] = "AUTOCOMMIT"  # we begin ourselves: see `limit_postgresql`
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
        self._patience = Patience(self.name, partial(sign_of_postgresql, places(url)))
        watch(engine, self._patience)
        event.listen(engine, "connect", self._require_unicode)
        return engine

    def _require_unicode(self, connection: Any, _: Any) -> None:
        # In another encoding not every id and actor can be written, and a commit that has one would be quarantined.
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
                # Open connections keep pages that they have read: they would not see that the file was repaired.
                self._engine.dispose()
            raise ours from error

    def _damaged(self, error: Exception) -> bool:
        """Whether what is stored cannot be read. SQLite has no class of its own for it, PostgreSQL one of codes."""
        driver: Any = self._engine.dialect.dbapi
        original: Any = error.orig if isinstance(error, exc.DBAPIError) else error
        return type(original) is driver.DatabaseError or (getattr(original, "sqlstate", None) or "")[:2] == _INTERNAL

    def _ours(self, error: Exception) -> StateError | None:
        """What a driver's error is for our callers; None for a bug, which stays what it is."""
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
    """One transaction about one namespace; `execute` and the like are those of SQLAlchemy's connection.

    Many rows go in few statements: a row is a tuple in the order of its table's columns. Measured for batches of 1,000
    rows (PostgreSQL 15): COPY 35,649 rows/s, executemany 19,239, multi-VALUES about 1,000.
    """

    def __init__(self, connection: Connection, namespace: str) -> None:
        self.connection = connection
        self.namespace = namespace
        self.postgresql = connection.dialect.name == "postgresql"
        self.execute = connection.execute
        self.exec_driver_sql = connection.exec_driver_sql
        self.begin_nested = connection.begin_nested

    def among(self, column: Column[Any], wanted: Collection[str] | Collection[int]) -> ColumnElement[bool]:
        """Whether a column is one of these, given as one parameter: the statement is the same however many they are."""
        if self.postgresql:
            return column == any_(_array(wanted, column.type))
        return column.in_(select(func.json_each(json.dumps(list(wanted))).table_valued("value").c.value))

    def rows(self, query: Select[Any], column: Column[Any], wanted: Iterable[Any]) -> Iterable[Any]:
        """The rows of a query in which a column is one of these. If there are none, the database is not asked."""
        some = sorted(wanted)
        return self.execute(query.where(self.among(column, some))) if some else ()

    def listed(self, columns: Mapping[str, TypeEngine[Any]], rows: Collection[Row]) -> FromClause:
        """A table of these rows, texts and integers, for a statement that is the same however many they are."""
        if self.postgresql:
            each = zip(*rows, strict=True) if rows else [()] * len(columns)
            arrays = [_array(values, type) for type, values in zip(columns.values(), each, strict=True)]
            return func.unnest(*arrays).table_valued(*columns, name="listed").render_derived()
        given = func.json_each(json.dumps(list(rows))).table_valued("value")
        places = enumerate(columns.items())
        names = [func.json_extract(given.c.value, f"$[{at}]", type_=type).label(name) for at, (name, type) in places]
        return select(*names).subquery("listed")

    def add(self, table: Table, rows: Sequence[Row], columns: Sequence[Column[Any]] = ()) -> None:
        """Insert rows that are not there yet. A row is in the order of these columns, if not of all of the table's."""
        if not rows:
            return
        columns = columns or list(table.columns)
        quote = self.connection.dialect.identifier_preparer.quote
        into = f"{quote(table.name)} ({', '.join(quote(column.name) for column in columns)})"
        if not self.postgresql:
            # Past the preparation of parameters, which takes twice as long as SQLite itself.
            self.exec_driver_sql(f"INSERT INTO {into} VALUES ({', '.join('?' * len(columns))})", list(rows))
            return
        types = [next(name for kind, name in _COPIED_AS if isinstance(column.type, kind)) for column in columns]
        raw: Any = self.connection.connection.driver_connection
        with raw.cursor() as cursor, cursor.copy(f"COPY {into} FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(types)
            for row in rows:
                copy.write_row(row)

    def change(self, table: Table, key: Column[Any], columns: Sequence[Column[Any]], rows: Sequence[Row]) -> None:
        """Write over these columns of the rows with these keys; a row is its key, then the columns."""
        if not rows:
            return
        if not self.postgresql:
            # Past the preparation of statements and parameters, which takes longer than SQLite itself.
            quote = self.connection.dialect.identifier_preparer.quote
            settings = ", ".join(f"{quote(column.name)} = ?" for column in columns)
            query = f"UPDATE {quote(table.name)} SET {settings} WHERE {quote(key.name)} = ?"
            self.exec_driver_sql(query, [(*values, known) for known, *values in rows])
            return
        # In one statement: one for each row takes PostgreSQL twice as long.
        new = self.listed({column.name: column.type for column in (key, *columns)}, rows)
        changed = update(table).where(key == new.c[key.name])
        self.execute(changed.values({column: new.c[column.name] for column in columns}))

    def remove(
        self, table: Table, rows: Sequence[Mapping[str, Any]], which: Callable[[Any], ColumnElement[bool]]
    ) -> int:
        """Delete for each of these rows, of texts, integers and bytes, what fits it; how many rows that were.

        `which` is given columns that are named as the rows' values are.
        """
        if not rows:
            return 0
        if self.postgresql:
            types = {name: _TYPES[type(value)] for name, value in rows[0].items()}
            given = self.listed(types, [tuple(row.values()) for row in rows])
            return self.execute(delete(table).where(which(given.c))).rowcount
        marks = SimpleNamespace(**{name: bindparam(name) for name in rows[0]})
        return self.execute(delete(table).where(which(marks)), list(rows)).rowcount

    def put(self, table: Table, rows: Sequence[Row]) -> None:
        """Insert rows, or overwrite those with the same primary key."""
        if not rows:
            return
        new = (postgresql_insert if self.postgresql else sqlite_insert)(table)
        others = {column: new.excluded[column.name] for column in table.columns if not column.primary_key}
        new = new.on_conflict_do_update(index_elements=list(table.primary_key), set_=others)
        names = [column.name for column in table.columns]
        self.execute(new, [dict(zip(names, row, strict=True)) for row in rows])


class Array(TypeDecorator[Sequence[Any]]):
    """An array that is sent as PostgreSQL writes it: the driver's way through each value takes three times as long.

    The driver also escapes bytes by what the server's last connection said of `standard_conforming_strings`.
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
    """The items in lists of at most `size`: databases limit the parameters of a statement."""
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk


# A store's methods


class Part:
    """What a store offers of one namespace of a database. Law: every method is one transaction.

    Most methods are functions of this folder, which take the transaction first: `reads` and the like make a method of
    one.
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
    """A method that calls this function in a transaction that only reads."""
    return _in(Database.read, function)


def writes(function: Callable[Concatenate[Sql, P], T]) -> Callable[Concatenate[Part, P], T]:
    """A method that calls this function in a transaction that writes."""
    return _in(Database.write, function)


def reads_long(function: Callable[Concatenate[Sql, P], T]) -> Callable[Concatenate[Part, P], T]:
    """As `reads`, with the limits of maintenance."""
    return _in(Database.long_read, function)


def writes_long(function: Callable[Concatenate[Sql, P], T]) -> Callable[Concatenate[Part, P], T]:
    """As `writes`, with the limits of maintenance."""
    return _in(Database.long_write, function)


def _cause(error: Exception) -> Exception:
    """What went wrong, where SQLite ended the whole transaction for it: then there is no savepoint to go back to.

    So it is with a full disk, and of that nobody would hear.
    """
    found: BaseException | None = error
    while found is not None and "no such savepoint" in str(found):
        found = found.__context__
    return found if isinstance(found, exc.DBAPIError) else error


def keep_for_ever(inherited: object) -> None:
    """In a forked child: never destroy this; its destructor would close or unlock what is the parent's."""
    # One reference that nobody gives back, so that the end of the interpreter does not take it either.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


# A database that was down when its store was opened


class Opening:
    """What has to be found out about a database before it is used. Without `prove` that was done.

    Law: before it was looked at, nothing is read or written there. Whether its tables are of this release, and whether
    it is the one that belongs to this Redis, is found out by the first caller that needs it once it is there. The
    others wait for that a moment, and then raise ColdUnavailable.
    """

    def __init__(self, prove: Callable[[], None] | None = None) -> None:
        self._prove = prove
        self.forget()

    def forget(self) -> None:
        """In a forked child: nobody else is at it here."""
        self._lock = threading.Lock()
        self._here = threading.local()

    def require(self, name: str) -> None:
        """Look at the database, unless somebody did.

        Raises ColdUnavailable while it is away, and ConfigurationError, each time, if it is not the right one.
        """
        if self._prove is None or getattr(self._here, "proving", False):
            return
        if not self._lock.acquire(timeout=_LOOK_SECONDS):
            raise ColdUnavailable(f"{name}: was away when the store was opened, and is being looked at")
        try:
            if self._prove is not None:
                self._here.proving = True
                self._prove()
                self._prove = None
                log.warning("%s: is there; it was away when the store was opened", name)
        finally:
            self._here.proving = False
            self._lock.release()


# What is set when a connection and a transaction of SQLite begin


def prepare_sqlite(engine: Engine, seconds: float) -> None:
    """Set every connection up, and let nobody wait for another process longer than this."""
    path = sqlite_file(engine.url) or ""
    opened = False

    def connecting(*_: Any) -> None:
        if opened and path and not os.path.exists(path):
            # SQLite would make an empty database here, and a file that is put back later would have to replace it.
            raise ColdUnavailable(f"{path}: was deleted since it was opened")
        # SQLite would make it readable for all. To the files beside it it gives the mode that it has.
        if path and engine.url.query.get("mode", "rwc") == "rwc":
            create_private(path)

    def connect(connection: Any, record: Any) -> None:
        nonlocal opened
        # SQLAlchemy begins and commits (below); the driver's own idea of when to begin must be off.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
        _patiently(seconds, cursor, "PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA secure_delete = ON")
        cursor.execute("PRAGMA cache_size = -4000")  # KiB of each connection, of which there may be 15
        cursor.close()
        record.info["file"] = _identity(path)
        opened = True

    def begin(connection: Connection) -> None:
        # A write that begins as a read could not wait for another writer: SQLite refuses at once to raise the lock.
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

    SQLite goes on writing into a file that was deleted or replaced: what it archived there would be gone with it.
    """
    if connection.info.get("file") != _identity(path):
        connection.invalidate()
        raise ColdUnavailable(f"{path}: was deleted or replaced since it was opened")


def _patiently(seconds: float, cursor: Any, words: str) -> None:
    """Switch to write-ahead logging. SQLite does not wait here while another process switches too, so we do."""
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
    """What keeps connections."""

    def dispose(self) -> None:
        """Close those that nobody uses now."""
        ...


class ForkGate:
    """A `with` block of it is a transaction, which a fork waits for. A block inside another one is a part of that.

    Law: no child inherits an open SQLite database. SQLite notes in the process what its connections have locked in a
    file, and fork() copies the notes without the locks. *So a child whose parent was in the middle of a transaction
    found the database locked for ever; and one whose parent was not believed in a lock on the file that it did not
    have: its parent might take the write-ahead log away under it.*

    A fork waits until no transaction is under way, closes what is open, and lets the next transactions begin when it
    is done; they connect again.
    """

    def __init__(self) -> None:
        self.forks = 0  # that are under way, or wait
        self._transactions = 0
        self._changed = threading.Condition()
        self._pools: weakref.WeakSet[Pool] = weakref.WeakSet()

    def watch(self, pool: Pool) -> None:
        """Close what this one keeps before each fork."""
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
        """A fork is to happen in this thread."""
        own = getattr(_here, "depth", 0) > 0
        with self._changed:
            self.forks += 1
            if not self._changed.wait_for(lambda: self._transactions <= own, _FORK_SECONDS):
                log.warning("forked in the middle of a transaction of SQLite: the child may find the database locked")
        for pool in list(self._pools):
            pool.dispose()

    def after_in_parent(self) -> None:
        """It happened, or failed."""
        with self._changed:
            self.forks -= 1
            self._changed.notify_all()

    def after_in_child(self) -> None:
        """Nobody else is here, and locks may be held by who is not."""
        self._changed = threading.Condition()
        self.forks = 0
        self._transactions = int(getattr(_here, "depth", 0) > 0)


GATE = ForkGate()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=GATE.before, after_in_parent=GATE.after_in_parent, after_in_child=GATE.after_in_child)
