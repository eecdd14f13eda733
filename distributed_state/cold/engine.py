"""The door to SQL: opens a database, runs transactions on it, and turns its errors into ours.

Law: every transaction goes through `Database.read`, `write` or `apart`; nobody else begins, commits or catches.

Design: section 9.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine, StaticPool, create_engine, event, exc
from sqlalchemy.engine import URL

from distributed_state.cold import dialects
from distributed_state.cold.forking import GATE
from distributed_state.cold.opening import Opening
from distributed_state.cold.patience import Patience, sign_of_postgresql
from distributed_state.cold.urls import display_name, driver_arguments, is_memory, parse_url, places
from distributed_state.errors import ColdUnavailable, ConfigurationError, StateError

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
        return self._around() or self._transaction(self._long_reader, dialects.LONG)

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
        return self._transaction(self._long_writer, dialects.LONG)

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
            # With psycopg we begin ourselves: see `dialects`.
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
            dialects.prepare_sqlite(engine, self._timeout)
        if engine.dialect.name == "postgresql":
            dialects.limit_postgresql(engine, self._timeout)
        if engine.dialect.driver == "psycopg":
            self._patience = Patience(self.name, partial(sign_of_postgresql, places(url)))
            dialects.watch(engine, self._patience)
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
