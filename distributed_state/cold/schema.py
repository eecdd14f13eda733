"""Brings a database to the tables of this release. Law: one process at a time, all steps in one transaction.

And in a process one thread at a time, whatever the database: Alembic keeps in its modules which connection it works on,
so of two threads one writes into the other's database, or the process ends with a segmentation fault.

Design: section 9.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from sqlalchemy import Connection, func, inspect, select, text

from distributed_state.cold.engine import Database
from distributed_state.cold.tables import HEAD, REVISIONS, UNRELEASED
from distributed_state.errors import ConfigurationError

_LOCK = 0x6473_7461_7465  # any number that others are unlikely to lock
_alembic = threading.Lock()


def revision(connection: Connection) -> str | None:
    """The revision that the database is at; None if it has none."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return found


def ready(database: Database, migrate_: bool) -> None:
    """Bring the database to this release's revision if that may be done, else require that it is."""
    migrate(database) if migrate_ else require_head(database)


def require_head(database: Database) -> None:
    """Raise ConfigurationError unless the database is at this release's revision."""
    with database.read() as connection:
        found = revision(connection)
    _refuse_unknown(database, found)
    if found != HEAD:
        raise ConfigurationError(
            f"{database.name} is at revision {found}, this release needs {HEAD}: run `distributed-state migrate`"
        )


def migrate(database: Database) -> None:
    """Bring the database to this release's revision; costs one small query if it is there already."""
    with database.read() as connection:
        found = revision(connection)
    _refuse_unknown(database, found)
    if found == HEAD:
        return
    with database.long_write() as connection:
        if database.dialect == "postgresql":
            # Others may be at it, for as long as it takes them.
            connection.exec_driver_sql("SET LOCAL lock_timeout = 0")
            connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
        # Whoever waited for the lock finds the work done.
        if revision(connection) != HEAD:
            _upgrade(connection)


def _refuse_unknown(database: Database, found: str | None) -> None:
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
