"""What a database is told when a connection and a transaction begin. Law: nothing here waits without a bound.

PostgreSQL is given its limits with each BEGIN, in the same exchange: as options of the connection PgBouncer refuses
them, and set once for a session they would stay with a connection that is lent to others. They end what is slow or
waits for a lock, and they end a transaction whose worker was stopped in the middle of it, which others would wait for.
What is silent altogether they cannot end: see `patience`.

Design: section 9.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Engine, event, exc
from tenacity import retry, retry_if_exception, stop_after_delay, wait_fixed

from distributed_state.cold import private_files
from distributed_state.cold.patience import Line, Patience
from distributed_state.cold.urls import sqlite_file
from distributed_state.errors import ColdUnavailable

LONG = 60  # what may take long may take so many times as long
# Maintenance looks rows up by their keys. As long as there are no statistics, as after a restore, PostgreSQL would read
# whole tables for each few records instead.
_BY_KEYS = {"enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off", "jit": "off"}
_ISOLATION = {True: "READ COMMITTED", False: "REPEATABLE READ"}


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
