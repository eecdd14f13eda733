"""Opens an archive: brings its tables up to date, finds the namespace's own row, and has it alone if it is embedded.

Law: one process at a time changes tables, all steps in one transaction; the namespace's row is written once; an archive
that one store has alone is free again when that store is closed or its process dies.

Design: sections 9, 14.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from sqlalchemy import Connection, exc, func, insert, inspect, select, text
from sqlalchemy.engine import URL

from distributed_state.cold.connections import parse_url, sqlite_file
from distributed_state.cold.engine import Database, Sql
from distributed_state.cold.tables import HEAD, REVISIONS, UNRELEASED, namespaces
from distributed_state.errors import ConfigurationError
from distributed_state.settings import create_private
from distributed_state.values import chance

_LOCK = 0x6473_7461_7465  # any number that others are unlikely to lock
_alembic = threading.Lock()
LAYOUT = 1
_ADVICE = "another store has it open embedded; give all workers one Redis url to share it"
_KILLED_SECONDS = 1.0  # PostgreSQL notices a moment later that a process was killed
_UNLIMITED = text(
    "SELECT set_config(name, '0', true) FROM pg_settings "
    "WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')"
)


# The tables of this release
#
# In a process one thread at a time changes them, whatever the database: Alembic keeps in its modules which connection
# it works on, so of two threads one would write into the other's database, or the process would end with a
# segmentation fault.


def ready(database: Database, may_migrate: bool) -> None:
    """Bring the database to this release's revision if that may be done, else require that it is.

    Costs one small query if it is there already.
    """
    with database.read() as sql:
        found = revision(sql)
    if found in UNRELEASED:
        raise ConfigurationError(
            f"{database.name} has the tables of a version before the first release (revision {found}): run "
            "`distributed-state export` with that version, then `distributed-state import` with this one, into another "
            "database"
        )
    if found is not None and found not in REVISIONS:
        raise ConfigurationError(
            f"{database.name} is at revision {found}, which this release ({HEAD}) does not know: "
            "install the newer release, or use another database"
        )
    if found != HEAD and not may_migrate:
        raise ConfigurationError(
            f"{database.name} is at revision {found}, this release needs {HEAD}: run `distributed-state migrate`"
        )
    if found != HEAD:
        migrate(database)


def migrate(database: Database) -> None:
    """Bring the database to this release's revision."""
    with database.long_write() as sql:
        if sql.postgresql:
            # Others may be at it, for as long as it takes them.
            sql.exec_driver_sql("SET LOCAL lock_timeout = 0")
            sql.execute(select(func.pg_advisory_xact_lock(_LOCK)))
        # Whoever waited for the lock finds the work done.
        if revision(sql) != HEAD:
            _upgrade(sql.connection)


def revision(sql: Sql) -> str | None:
    """The revision that the database is at; None if it has none."""
    if not inspect(sql.connection).has_table("alembic_version"):
        return None
    found: str | None = sql.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return found


def _upgrade(connection: Connection) -> None:
    # Imported here because it takes a quarter of a second, and is needed once in a database's life.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    # Taken last, inside the transaction: whoever has it waits for nobody who could wait for it.
    with _alembic:
        command.upgrade(config, HEAD)


def _after_fork() -> None:
    global _alembic
    _alembic = threading.Lock()  # perhaps held by a thread that the child does not have


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# The namespace's own row: the archive's id and its partition count


@dataclass(frozen=True, slots=True)
class Known:
    """What Redis knows of a namespace in SQL."""

    namespace: str
    archive_id: str
    partitions: int


def register(database: Database, namespace: str, partitions: int) -> tuple[str, int]:
    """Return the archive's id and its partition count; at first use the id is random, the count is `partitions`."""
    with database.read(namespace) as sql:
        row = _registered(sql)
    if row is None:
        new = {"namespace": namespace, "archive_id": chance.token_hex(16), "partitions": partitions, "layout": LAYOUT}
        with database.write(namespace) as sql:
            try:
                with sql.begin_nested():
                    sql.execute(insert(namespaces), new)
            except exc.IntegrityError:
                pass  # somebody registered it since we looked
            row = _registered(sql)
        assert row is not None
    return row.archive_id, row.partitions


def _registered(sql: Sql) -> Any:
    """The row of a namespace, None if there is none. Raises ConfigurationError for the layout of another release."""
    row = sql.execute(select(namespaces).where(namespaces.c.namespace == sql.namespace)).first()
    if row is not None and row.layout != LAYOUT:
        raise ConfigurationError(f"namespace {sql.namespace} has layout {row.layout}, this release needs {LAYOUT}")
    return row


def require_known(database: Database, known: Known) -> None:
    """Raise ConfigurationError unless the database has this very namespace. Nothing is written."""
    with database.read(known.namespace) as sql:
        row = _registered(sql)
    if row is None:
        raise ConfigurationError(
            f"{database.name} has no namespace {known.namespace!r}, and Redis has: give the archive that this Redis had"
        )
    if (row.archive_id, row.partitions) != (known.archive_id, known.partitions):
        raise ConfigurationError(
            f"{database.name}, namespace {known.namespace!r}: archive is {row.archive_id!r}, expected "
            f"{known.archive_id!r}: give the archive that this Redis had, or another namespace"
        )


def is_there(url: str, namespace: str, timeout: float) -> bool:
    """Whether a database has anything of a namespace. Nothing is made there. Raises ColdUnavailable."""
    file = sqlite_file(parse_url(url))
    if file is not None and not Path(file).exists():
        return False  # connecting would make it
    database = Database(url, timeout)
    try:
        with database.read(namespace) as sql:
            return revision(sql) is not None and _registered(sql) is not None
    finally:
        database.close()


# Alone
#
# Of SQLite the whole file, by a lock on another one beside it. Of PostgreSQL the namespace, by an advisory lock. A
# transaction holds that, open for as long as the store is, on a connection apart: behind PgBouncer a session's lock
# would stay with a connection that is lent to others. Such a transaction has no snapshot, so it holds up no vacuum.


@contextmanager
def file_alone(url: str | URL) -> Iterator[None]:
    """Have SQLite's file alone; nothing where there is none. Raises ConfigurationError if somebody else has it."""
    path = sqlite_file(parse_url(url))
    if path is None:
        yield
        return
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ConfigurationError(f"{path}: there is no folder {folder}")  # FileLock would make it
    create_private(f"{path}.lock")
    # Opened in one thread, perhaps closed in another.
    lock = FileLock(f"{path}.lock", blocking=False, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ConfigurationError(f"{path}: {_ADVICE}") from error
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be opened: {error}") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def namespace_alone(database: Database, name: str) -> Iterator[None]:
    """Have a namespace of PostgreSQL alone; nothing elsewhere. Raises ConfigurationError if somebody else has it."""
    if database.dialect != "postgresql":
        yield
        return
    digest = hashlib.blake2b(f"distributed-state embedded {name}".encode(), digest_size=8).digest()
    hold = select(func.pg_try_advisory_xact_lock(int.from_bytes(digest, signed=True)))

    def take(sql: Sql) -> None:
        deadline = time.monotonic() + _KILLED_SECONDS
        while not sql.execute(hold).scalar():
            if time.monotonic() > deadline:
                raise ConfigurationError(f"{database.name}, namespace {name!r}: {_ADVICE}")
            time.sleep(0.02)
        # Last, because it has no parameters: what has some keeps its snapshot until the next statement.
        sql.execute(_UNLIMITED)

    with database.apart(take):
        yield
