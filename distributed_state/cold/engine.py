"""The door to SQL: opens a database, runs transactions on it, and turns its errors into ours.

Law: every transaction goes through `Database.read`, `write` or `apart`; nobody else begins, commits or catches.

Design: section 9.
"""

from __future__ import annotations

import ctypes
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from sqlalchemy import Connection, Engine, QueuePool, StaticPool, create_engine, event, exc, make_url
from sqlalchemy.engine import URL
from tenacity import retry, retry_if_exception, stop_after_delay, wait_fixed

from distributed_state.cold.forking import GATE
from distributed_state.errors import ColdUnavailable, ConfigurationError, StateError
from distributed_state.settings import UNREADABLE, refuse_unescaped, require_files

MEMORY_URLS = ("memory", "memory://", "sqlite://", "sqlite:///:memory:")
_DIALECTS = ("sqlite", "postgresql")
_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
_BUSY_SECONDS = 30.0
_LAST_SECONDS = 5.0
# While opening, these words in a refusal mean that waiting does not help. Servers in other languages than English
# say it otherwise; then the refusal is ColdUnavailable, with the server's own words in it.
_REFUSED = re.compile(
    r"password|authentication|pg_hba|does not exist|permission denied|not permitted|SSL|invalid connection option"
    r"|invalid value for parameter|unable to open|readonly|read-only|not a database|is malformed",
    re.IGNORECASE,
)
_INSUFFICIENT_PRIVILEGE = "42501"
_READ_ONLY = "25006"


class Database:
    """One SQL database, for any number of threads."""

    def __init__(self, url: str) -> None:
        self.memory = url in MEMORY_URLS
        parsed = parse_url(url)
        self.name = "memory" if self.memory else _name(parsed)
        self.opened = self._closed = False
        # A database in memory has one connection, which one thread at a time may use.
        self._gate: AbstractContextManager[Any] = threading.RLock() if self.memory else nullcontext()
        self._engine = self._create(parsed)
        if self.dialect == "sqlite" and not self.memory:
            self._gate = GATE
            GATE.watch(self._engine)
        self._writer = self._engine.execution_options(writes=True)
        self._reader = self._engine
        if self.dialect == "postgresql":
            # All statements of one read see the same moment, although a purge may run beside it.
            self._reader = self._engine.execution_options(isolation_level="REPEATABLE READ")

    @property
    def dialect(self) -> str:
        """The name of the SQL dialect: sqlite, postgresql, ..."""
        return self._engine.dialect.name

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads; all its statements see the database at one moment."""
        with self._transaction(self._reader) as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that writes: committed at the end of the block, undone by an exception."""
        with self._transaction(self._writer) as connection:
            yield connection

    @contextmanager
    def _transaction(self, engine: Engine) -> Iterator[Connection]:
        if self._closed:
            raise ColdUnavailable(f"{self.name}: closed, with the store that opened it")
        try:
            with self._gate, self._translated(), engine.begin() as connection:
                yield connection
        finally:
            if self._closed:
                # Closed meanwhile, perhaps before this connection was opened: nobody else would close it.
                self._engine.pool.dispose()

    @contextmanager
    def apart(self) -> Iterator[Connection]:
        """A transaction on a connection of its own, none of the pool's, for as long as the block lasts; then undone."""
        with self._translated():
            connection = self._engine.connect()
        try:
            connection.detach()
            with self._translated():
                yield connection
        finally:
            with suppress(exc.SQLAlchemyError):  # a server that went away has undone it
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
        """Close every connection, those that are still at work when they are done."""
        self._closed = True
        if self.memory:
            with self._gate:
                self._engine.dispose()
            return
        pool = self._engine.pool
        deadline = time.monotonic() + _LAST_SECONDS
        pool.dispose()
        # A thread whose task was cancelled goes on to the end of its transaction.
        while isinstance(pool, QueuePool) and pool.checkedout() and time.monotonic() < deadline:
            time.sleep(0.005)
            pool.dispose()
        pool.dispose()

    def abandon(self) -> None:
        """In a forked child: forget the parent's connections without a word on the wire."""
        if self.memory:
            self._gate = threading.RLock()  # the parent's may be held by a thread that the child does not have
            return
        keep_for_ever(self._engine.pool)
        self._engine.dispose(close=False)

    def _create(self, url: URL) -> Engine:
        options: dict[str, Any] = {"hide_parameters": True}
        if url.get_backend_name() == "postgresql":
            url, arguments = _postgresql(url)
            options |= {"connect_args": arguments, "isolation_level": "READ COMMITTED"}
        if self.memory:
            options |= {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
        else:
            options |= {"pool_size": 5, "max_overflow": 10, "pool_timeout": 10}
            options["pool_pre_ping"] = url.get_backend_name() != "sqlite"
        try:
            engine = create_engine(url, **options)
        except ImportError as error:
            raise ConfigurationError(f"{self.name}: the driver is not installed: {error}") from error
        except (exc.ArgumentError, TypeError) as error:
            raise ConfigurationError(f"{self.name}: {error}") from error
        if engine.dialect.is_async:
            raise ConfigurationError(f"{self.name}: use a blocking driver, for example postgresql+psycopg://")
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", _prepare_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
        if engine.dialect.driver == "psycopg":
            event.listen(engine, "connect", self._require_unicode)
        return engine

    def _require_unicode(self, connection: Any, _: Any) -> None:
        # In another encoding not every id and actor can be written, and a commit that has one would be quarantined.
        encoding = connection.info.parameter_status("server_encoding")
        if encoding not in (None, "UTF8", "SQL_ASCII"):  # None behind a proxy that does not report it
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
            raise ours from error

    def _ours(self, error: Exception) -> StateError | None:
        """What a driver's error is for our callers; None for a bug, which stays what it is."""
        if isinstance(error, exc.TimeoutError):
            return ColdUnavailable(f"{self.name}: no connection became free in time")
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
        # "file is not a database" has no class of its own.
        if not self.opened and (isinstance(original, kinds) or type(original) is driver.DatabaseError):
            return (ConfigurationError if _REFUSED.search(str(original)) else ColdUnavailable)(message)
        if lost or isinstance(original, kinds) or code == _READ_ONLY:
            return ColdUnavailable(message)
        return None


def parse_url(url: str) -> URL:
    """The URL of a database in parts. Raises ConfigurationError if it is wrong, as far as that is seen without I/O."""
    if url in MEMORY_URLS:
        return make_url("sqlite://")
    if url.startswith(("redis:", "rediss:", "unix:")):
        raise ConfigurationError("archive is a SQL database; Redis or Valkey is another parameter, url=")
    try:
        if not url.startswith("sqlite"):  # whose paths may hold anything
            refuse_unescaped(url, "archive")
        parsed = make_url(url)
        if parsed.port is not None and not 0 < parsed.port < 65536:
            raise ValueError
    except exc.ArgumentError:
        # Not the text itself, nor the cause: it may hold a password.
        raise ConfigurationError("the archive is not an SQLAlchemy URL; use sqlite:///path or postgresql://") from None
    except ValueError:
        raise ConfigurationError(f"archive: {UNREADABLE}") from None
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() not in _DIALECTS:
        # Others have other ideas of conflicts, locks and isolation: what was never tried there promises nothing.
        said = "the archive is SQLite or PostgreSQL, sqlite:///path or postgresql://user@host/database"
        raise ConfigurationError(f"archive: {parsed.drivername[:80]!r} was never tried, so it is refused: {said}")
    if parsed.get_backend_name() == "postgresql":
        files = {name: str(parsed.query[name]) for name in _FILES if name in parsed.query}
        require_files(_name(parsed), {name: path for name, path in files.items() if path != "system"})
    return parsed


def _name(url: URL) -> str:
    return url.set(query={}).render_as_string(hide_password=True)


def _postgresql(url: URL) -> tuple[URL, dict[str, Any]]:
    """Split off what psycopg wants as numbers, and give up on a silent server after seconds, not hours."""
    arguments: dict[str, Any] = {"connect_timeout": 5, "keepalives_idle": 30, "keepalives_interval": 5}
    # Of a database in SQL_ASCII psycopg would otherwise give bytes for text.
    arguments |= {"keepalives_count": 3, "client_encoding": "utf8"}
    query = dict(url.query)
    threshold = query.pop("prepare_threshold", None)
    if threshold is not None:
        off = str(threshold).lower() in ("none", "off", "0")
        if not off and not str(threshold).isdigit():
            raise ConfigurationError(f"prepare_threshold={threshold}: use a number, or `none` behind PgBouncer")
        arguments["prepare_threshold"] = None if off else int(str(threshold))
    return url.set(query=query), {name: value for name, value in arguments.items() if name not in query}


def keep_for_ever(inherited: object) -> None:
    """In a forked child: never destroy this; its destructor would close or unlock what is the parent's."""
    # One reference that nobody gives back, so that the end of the interpreter does not take it either.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


def _prepare_sqlite(connection: Any, _: Any) -> None:
    # SQLAlchemy begins and commits (below); the driver's own idea of when to begin must be off.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {int(_BUSY_SECONDS * 1000)}")
    _write_ahead(cursor)
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA secure_delete = ON")
    cursor.execute("PRAGMA cache_size = -16000")
    cursor.close()


@retry(
    retry=retry_if_exception(lambda error: isinstance(error, sqlite3.OperationalError) and "locked" in str(error)),
    stop=stop_after_delay(_BUSY_SECONDS),
    wait=wait_fixed(0.01),
    reraise=True,
)
def _write_ahead(cursor: Any) -> None:
    """Switch to write-ahead logging. SQLite does not wait here while another process switches too, so we do."""
    cursor.execute("PRAGMA journal_mode = WAL")


def _begin_sqlite(connection: Connection) -> None:
    # A write that begins as a read could not wait for another writer: SQLite refuses at once to raise the lock.
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
