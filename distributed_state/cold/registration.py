"""The row that a namespace has of its own: the archive's id and its partition count. Law: it is written once.

Design: sections 9, 14.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import exc, insert, select

from distributed_state.cold import schema
from distributed_state.cold.engine import Database
from distributed_state.cold.tables import namespaces
from distributed_state.cold.urls import parse_url, sqlite_file
from distributed_state.errors import ConfigurationError
from distributed_state.values import chance

LAYOUT = 1


@dataclass(frozen=True, slots=True)
class Known:
    """What Redis knows of a namespace in SQL."""

    namespace: str
    archive_id: str
    partitions: int


def require(database: Database, known: Known) -> None:
    """Raise ConfigurationError unless the database has this very namespace. Nothing is written."""
    query = select(namespaces).where(namespaces.c.namespace == known.namespace)
    with database.read() as connection:
        row = connection.execute(query).first()
    if row is None:
        raise ConfigurationError(
            f"{database.name} has no namespace {known.namespace!r}, and Redis has: give the archive that this Redis had"
        )
    _refuse_layout(known.namespace, row.layout)
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
        with database.read() as connection:
            if schema.revision(connection) is None:
                return False
            query = select(namespaces.c.namespace).where(namespaces.c.namespace == namespace)
            return connection.execute(query).first() is not None
    finally:
        database.close()


def register(database: Database, namespace: str, partitions: int) -> tuple[str, int]:
    """Return the archive's id and its partition count; at first use the id is random, the count is `partitions`."""
    query = select(namespaces).where(namespaces.c.namespace == namespace)
    with database.read() as connection:
        row = connection.execute(query).first()
    if row is None:
        new = {"namespace": namespace, "archive_id": chance.token_hex(16), "partitions": partitions}
        with database.write() as connection:
            try:
                with connection.begin_nested():
                    connection.execute(insert(namespaces), new | {"layout": LAYOUT})
            except exc.IntegrityError:
                pass  # somebody registered it since we looked
            row = connection.execute(query).one()
    _refuse_layout(namespace, row.layout)
    return row.archive_id, row.partitions


def _refuse_layout(namespace: str, layout: int) -> None:
    if layout != LAYOUT:
        raise ConfigurationError(f"namespace {namespace} has layout {layout}, this release needs {LAYOUT}")
