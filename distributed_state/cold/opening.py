"""Opens an archive: migrates its tables, registers the namespace, and locks an embedded archive for one store.

Law: one process at a time changes tables, all steps in one transaction; the namespace's row is written once; the lock
of an embedded archive ends when its store is closed or its process dies.

Design: sections 9, 14.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from sqlalchemy import Connection, Inspector, MetaData, exc, func, insert, inspect, select, text
from sqlalchemy.engine import URL

from distributed_state.cold.connections import parse_url, sqlite_file
from distributed_state.cold.engine import Database, Sql
from distributed_state.cold.tables import CONTRACTS, HEAD, REVISIONS, UNRELEASED, metadata, namespaces
from distributed_state.errors import ConfigurationError
from distributed_state.settings import create_private
from distributed_state.values import chance

_LOCK = 0x6473_7461_7465  # an arbitrary number that other programs are unlikely to lock
_alembic = threading.Lock()
LAYOUT = 1
_ADVICE = "another store has it open embedded; give all workers one Redis url to share it"
_NAMED = 5  # tables and columns that one error names
_KILLED_SECONDS = 1.0  # PostgreSQL takes a moment to notice that a process was killed
log = logging.getLogger(__name__)
_UNLIMITED = text(
    "SELECT set_config(name, '0', true) FROM pg_settings "
    "WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')"
)


# The tables of this release
#
# Only one thread of a process changes them at a time, on any database: Alembic keeps the current connection in its
# modules, so with two threads one would write into the other's database, or the process would end with a segmentation
# fault.


def ready(database: Database, may_migrate: bool) -> None:
    """Expand the tables to those of this release if allowed, and require that they have what it needs.

    Tables of a newer release may have more. If the database is at this release's revision, this is one small query.
    Raises ConfigurationError.
    """
    with database.read() as sql:
        found = revision(sql)
    if found in UNRELEASED:
        raise ConfigurationError(
            f"{database.name} has the tables of a version before the first release (revision {found}): run "
            "`distributed-state export` with that version, then `distributed-state import` with this one, into another "
            "database"
        )
    if may_migrate and found != expanded(found):
        migrate(database)
        with database.read() as sql:
            found = revision(sql)
    if found == HEAD:
        return
    with database.read() as sql:
        missing = lacking(inspect(sql.connection))
    if not missing:
        if found not in REVISIONS:
            log.info("%s is at revision %s, of a newer release, and has all that this one needs", database.name, found)
        return
    problem = f"{database.name} is at revision {found}, and this release ({HEAD}) needs {', '.join(missing[:_NAMED])}: "
    if found is not None and found not in REVISIONS:
        raise ConfigurationError(f"{problem}install the newer release that removed it, or use another database")
    if found == expanded(found):
        raise ConfigurationError(f"{problem}run `distributed-state migrate --contract` of the release before")
    raise ConfigurationError(f"{problem}run `distributed-state migrate`")


def expanded(found: str | None) -> str:
    """The newest revision to which a database may be migrated beside workers of the release before."""
    if found is None:
        return HEAD
    if found in REVISIONS:
        for each in REVISIONS[REVISIONS.index(found) + 1 :]:
            if each in CONTRACTS:
                break
            found = each
    return found


def lacking(found: Inspector, wanted: MetaData = metadata) -> list[str]:
    """Name the tables and columns that a database lacks, and those that a writer without them cannot fill."""
    there = {name: columns for (_, name), columns in found.get_multi_columns().items()}
    missing = []
    for table in wanted.sorted_tables:
        if table.name not in there:
            missing.append(table.name)
            continue
        columns = {each["name"]: each for each in there[table.name]}
        missing += [f"{table.name}.{each.name}" for each in table.columns if each.name not in columns]
        missing += [
            f"{table.name} without a required {name}"
            for name, each in columns.items()
            if name not in table.columns and not each["nullable"] and each["default"] is None
        ]
    return missing


def migrate(database: Database, contract: bool = False) -> None:
    """Migrate the database as far as `expanded` says, or to this release's revision."""
    with database.long_write() as sql:
        if sql.postgresql:
            # Another process may be migrating, for as long as that takes.
            sql.exec_driver_sql("SET LOCAL lock_timeout = 0")
            sql.execute(select(func.pg_advisory_xact_lock(_LOCK)))
        # Another process may have migrated during the wait for the lock.
        found = revision(sql)
        wanted = HEAD if contract and found in REVISIONS else expanded(found)
        if found != wanted:
            _upgrade(sql.connection, wanted)


def pending(found: str | None) -> dict[str, str]:
    """The contractions that a database has not had, each with the first release whose workers do without."""
    if found is None or found not in REVISIONS:
        return {}
    after = REVISIONS.index(found) + 1
    return {each: CONTRACTS[each] for each in REVISIONS[after:] if each in CONTRACTS}


def revision(sql: Sql) -> str | None:
    """The revision of the database; None without tables."""
    if not inspect(sql.connection).has_table("alembic_version"):
        return None
    found: str | None = sql.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return found


def _upgrade(connection: Connection, wanted: str) -> None:
    # Imported here: it takes a quarter of a second, and is needed once for a database.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    # Acquired last, inside the transaction: its holder waits for no lock that others hold while they wait for this one.
    with _alembic:
        command.upgrade(config, wanted)


def _after_fork() -> None:
    global _alembic
    _alembic = threading.Lock()  # the old lock may be held by a thread that the child lacks


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# The namespace's own row: the archive's id and its partition count


@dataclass(frozen=True, slots=True)
class Known:
    """The namespace of SQL to which Redis belongs, as Redis has it stored."""

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
                pass  # another worker registered it since the query above
            row = _registered(sql)
        assert row is not None
    return row.archive_id, row.partitions


def _registered(sql: Sql) -> Any:
    """The namespace's row, None without one. Raises ConfigurationError for the layout of another release."""
    row = sql.execute(select(namespaces).where(namespaces.c.namespace == sql.namespace)).first()
    if row is not None and row.layout != LAYOUT:
        raise ConfigurationError(f"namespace {sql.namespace} has layout {row.layout}, this release needs {LAYOUT}")
    return row


def require_known(database: Database, known: Known) -> None:
    """Raise ConfigurationError unless the database has exactly this namespace. Nothing is written."""
    with database.read(known.namespace) as sql:
        row = _registered(sql)
    if row is None:
        raise ConfigurationError(
            f"{database.name} has no namespace {known.namespace!r}, but Redis has it: give the archive of this Redis"
        )
    if (row.archive_id, row.partitions) != (known.archive_id, known.partitions):
        raise ConfigurationError(
            f"{database.name}, namespace {known.namespace!r}: archive is {row.archive_id!r}, expected "
            f"{known.archive_id!r}: give the archive that this Redis had, or another namespace"
        )


def is_there(url: str, namespace: str, timeout: float) -> bool:
    """Whether a database has a namespace. Nothing is created. Raises ColdUnavailable."""
    file = sqlite_file(parse_url(url))
    if file is not None and not Path(file).exists():
        return False  # connecting would create the file
    database = Database(url, timeout)
    try:
        with database.read(namespace) as sql:
            return revision(sql) is not None and _registered(sql) is not None
    finally:
        database.close()


# Exclusive use of an embedded archive
#
# SQLite: the whole file, by a lock on a second file beside it. PostgreSQL: the namespace, by an advisory lock. It is
# held by a transaction on a connection of its own that stays open as long as the store: behind PgBouncer a session's
# lock would stay with a connection that is lent to others. The transaction has no snapshot, so it does not delay
# vacuum.


@contextmanager
def file_alone(url: str | URL) -> Iterator[None]:
    """Lock SQLite's file; do nothing for other databases. Raises ConfigurationError if another store has it."""
    path = sqlite_file(parse_url(url))
    if path is None:
        yield
        return
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ConfigurationError(f"{path}: there is no folder {folder}")  # FileLock would create it
    create_private(f"{path}.lock")
    # Acquired in one thread, perhaps released in another.
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
    """Lock a namespace of PostgreSQL; do nothing elsewhere. Raises ConfigurationError if another store has it."""
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
        # Last, as it has no parameters: a statement with parameters keeps its snapshot until the next one.
        sql.execute(_UNLIMITED)

    with database.apart(take):
        yield
