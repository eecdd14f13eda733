"""The door to SQL: opens a database, runs transactions on it, and turns its errors into ours.

Law: every transaction goes through `Database.read`, `write` or `apart`; nobody else begins, commits or catches, and
nothing waits without a bound.

After `Database` come its parts: a database that was down when its store was opened, what is set when a connection and
a transaction begin, and fork().

Design: section 9.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import Connection, Engine, StaticPool, create_engine, event, exc
from sqlalchemy.engine import URL
from tenacity import retry, retry_if_exception, stop_after_delay, wait_fixed

from distributed_state.cold import private_files
from distributed_state.cold.patience import Line, Patience, sign_of_postgresql
from distributed_state.cold.urls import display_name, driver_arguments, is_memory, parse_url, places, sqlite_file
from distributed_state.errors import ColdUnavailable, ConfigurationError, StateError

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
LONG = 60  # what may take long may take so many times as long
# Maintenance looks rows up by their keys. As long as there are no statistics, as after a restore, PostgreSQL would read
# whole tables for each few records instead.
_BY_KEYS = {"enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off", "jit": "off"}
_ISOLATION = {True: "READ COMMITTED", False: "REPEATABLE READ"}
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
        self._here = threading.local()  # `connection`: of the `one_read` that a thread is in
        # A database in memory has one connection, which one thread at a time may use.
        self._gate: AbstractContextManager[Any] = threading.RLock() if self.memory else nullcontext()
        self._engine = self._create(parsed)
        if self.dialect == "sqlite" and not self.memory:
            self._gate = GATE
            GATE.watch(self._engine)
        self._writer = self._engine.execution_options(writes=True)
        self._reader = self._engine
        if self.dialect == "postgresql" and self._engine.dialect.driver != "psycopg":
            # All statements of one read see the same moment, although a purge may run beside it.
            self._reader = self._engine.execution_options(isolation_level="REPEATABLE READ")
        self._long_reader = self._reader.execution_options(long=True)
        self._long_writer = self._writer.execution_options(long=True)

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

    def read(self) -> AbstractContextManager[Connection]:
        """A transaction that only reads; all its statements see the database at one moment."""
        return self._around() or self._transaction(self._reader)

    def write(self) -> AbstractContextManager[Connection]:
        """A transaction that writes: committed at the end of the block, undone by an exception."""
        return self._transaction(self._writer)

    def long_read(self) -> AbstractContextManager[Connection]:
        """As `read`, for maintenance, whose statements may take long; a silent server is noticed all the same."""
        return self._around() or self._transaction(self._long_reader, LONG)

    @contextmanager
    def one_read(self, *, long: bool = False) -> Iterator[None]:
        """Inside, all reads of this thread belong to one `read`, or to one `long_read`, and have its limits."""
        with self.long_read() if long else self.read() as self._here.connection:
            try:
                yield
            finally:
                self._here.connection = None

    def _around(self) -> AbstractContextManager[Connection] | None:
        found: Connection | None = getattr(self._here, "connection", None)
        return None if found is None else nullcontext(found)

    def long_write(self) -> AbstractContextManager[Connection]:
        """As `write`, for maintenance."""
        return self._transaction(self._long_writer, LONG)

    @contextmanager
    def _transaction(self, engine: Engine, times: int = 1) -> Iterator[Connection]:
        if self._closed:
            raise ColdUnavailable(f"{self.name}: closed, with the store that opened it")
        self._opening.require(self.name)
        try:
            with self._gate, self._translated(), self._attempt(times), engine.begin() as connection:
                yield connection
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
    def apart(self, prepare: Callable[[Connection], None]) -> Iterator[None]:
        """A transaction on a connection of its own, none of the pool's, for as long as the block lasts; then undone.

        `prepare` does in it what is to be done.
        """
        with self._translated(), self._attempt():
            # As one that writes: a transaction that reads would see old rows for as long as it lasts.
            connection = self._engine.connect().execution_options(writes=True)
            raw: Any = connection.connection.driver_connection
            try:
                connection.detach()
                prepare(connection)
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
        if url.get_backend_name() == "postgresql":
            url, arguments = driver_arguments(url, self._timeout)
            # With psycopg we begin ourselves: see `limit_postgresql`.
            isolation = "AUTOCOMMIT" if url.drivername == "postgresql+psycopg" else "READ COMMITTED"
            options |= {"connect_args": arguments, "isolation_level": isolation}
        if self.memory:
            options |= {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
        else:
            options |= {"pool_size": 5, "max_overflow": 10, "pool_timeout": min(10.0, self._timeout)}
            options["pool_pre_ping"] = url.drivername != "postgresql+psycopg" and url.get_backend_name() != "sqlite"
        try:
            engine = create_engine(url, **options)
        except ImportError as error:
            hint = ": pip install 'distributed-state[postgres]'" if url.drivername == "postgresql+psycopg" else ""
            raise ConfigurationError(f"{self.name}: the driver is not installed: {error}{hint}") from error
        except (exc.ArgumentError, TypeError) as error:
            raise ConfigurationError(f"{self.name}: {error}") from error
        if engine.dialect.is_async:
            raise ConfigurationError(f"{self.name}: use a blocking driver, for example postgresql+psycopg://")
        if engine.dialect.name == "sqlite":
            prepare_sqlite(engine, self._timeout)
        if engine.dialect.name == "postgresql":
            limit_postgresql(engine, self._timeout)
        if engine.dialect.driver == "psycopg":
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


class Part:
    """What a store offers of one namespace of a database. Law: every method is one transaction.

    Most methods are functions of this folder, which take the connection and the namespace first: `reads` and the like
    make a method of one.
    """

    def __init__(self, database: Database, namespace: str) -> None:
        self.namespace = namespace
        self._database = database


def _in(
    transaction: Callable[[Database], AbstractContextManager[Connection]],
    function: Callable[Concatenate[Connection, str, P], T],
) -> Callable[Concatenate[Part, P], T]:
    @wraps(function)
    def method(self: Part, /, *args: P.args, **options: P.kwargs) -> T:
        with transaction(self._database) as connection:
            return function(connection, self.namespace, *args, **options)

    return method


def reads(function: Callable[Concatenate[Connection, str, P], T]) -> Callable[Concatenate[Part, P], T]:
    """A method that calls this function in a transaction that only reads."""
    return _in(Database.read, function)


def writes(function: Callable[Concatenate[Connection, str, P], T]) -> Callable[Concatenate[Part, P], T]:
    """A method that calls this function in a transaction that writes."""
    return _in(Database.write, function)


def reads_long(function: Callable[Concatenate[Connection, str, P], T]) -> Callable[Concatenate[Part, P], T]:
    """As `reads`, with the limits of maintenance."""
    return _in(Database.long_read, function)


def writes_long(function: Callable[Concatenate[Connection, str, P], T]) -> Callable[Concatenate[Part, P], T]:
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


# What is set when a connection and a transaction begin
#
# PostgreSQL is given its limits with each BEGIN, in the same exchange: as options of the connection PgBouncer refuses
# them, and set once for a session they would stay with a connection that is lent to others. They end what is slow or
# waits for a lock, and they end a transaction whose worker was stopped in the middle of it, which others would wait
# for. A server that answers nothing at all they cannot end: see `patience`.


def limit_postgresql(engine: Engine, seconds: float) -> None:
    """Begin every transaction with limits: of a statement, of waiting for a lock, of doing nothing."""
    short = _limits(seconds, 2 * seconds, seconds)
    # Even what may take long waits for others' locks for a while only.
    long = _limits(seconds * LONG, seconds * LONG, seconds) | _BY_KEYS

    def begin(connection: Connection) -> None:
        chosen = connection.get_execution_options()
        limits = long if chosen.get("long") else short
        raw: Any = connection.connection.dbapi_connection  # also of one that is detached
        if engine.dialect.driver == "psycopg":
            # One text of several statements, which is one exchange, and cannot be prepared.
            settings = "; ".join(f"SET LOCAL {name} = {value}" for name, value in limits.items())
            isolation = _ISOLATION[bool(chosen.get("writes"))]
            raw.execute(f"BEGIN ISOLATION LEVEL {isolation}; {settings}", prepare=False)
        else:
            calls = ", ".join(f"set_config('{name}', '{value}', true)" for name, value in limits.items())
            connection.exec_driver_sql(f"SELECT {calls}")

    event.listen(engine, "begin", begin)


def _limits(statement: float, idle: float, lock: float) -> dict[str, int | str]:
    return {
        "statement_timeout": int(statement * 1000),
        "lock_timeout": int(lock * 1000),
        "idle_in_transaction_session_timeout": int(idle * 1000),
    }


def watch(engine: Engine, patience: Patience) -> None:
    """Tell `patience` of each connection and statement, and look at a pooled connection before it is used."""

    def connecting(*_: Any) -> None:
        patience.require_life()

    def connected(raw: Any, record: Any) -> None:
        record.info["line"] = line = Line(raw.fileno())
        patience.connected(line)

    def taken(raw: Any, record: Any, _: Any) -> None:
        patience.connected(record.info["line"])
        if not record.fresh:
            try:
                engine.dialect.do_ping(raw)
            except engine.dialect.loaded_dbapi.Error as error:
                raise exc.InvalidatePoolError("the connection was lost while nobody used it") from error

    event.listen(engine, "do_connect", connecting)
    # The first of all: others ask the server something when a connection is new.
    event.listen(engine, "connect", connected, insert=True)
    event.listen(engine, "checkout", taken)
    event.listen(engine, "close", lambda _, record: _close_line(record))
    event.listen(engine, "before_cursor_execute", lambda *_: patience.asked())
    event.listen(engine, "after_cursor_execute", lambda *_: patience.heard())
    event.listen(engine, "commit", lambda _: patience.asked())


def _close_line(record: Any) -> None:
    line = record.info.pop("line", None) if record is not None else None
    if line is not None:
        line.close()


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
            private_files.create(path)

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
