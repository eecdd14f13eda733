"""The row that a namespace has of its own: the archive's id and its partition count. Law: it is written once.

Design: sections 9, 14.
"""

from __future__ import annotations

import uuid

from sqlalchemy import exc, insert, select

from distributed_state.cold.engine import Database
from distributed_state.cold.tables import namespaces
from distributed_state.errors import ConfigurationError

LAYOUT = 1


def register(database: Database, namespace: str, partitions: int) -> tuple[str, int]:
    """Return the archive's id and its partition count; at first use the id is random, the count is `partitions`."""
    query = select(namespaces).where(namespaces.c.namespace == namespace)
    with database.read() as connection:
        row = connection.execute(query).first()
    if row is None:
        new = {"namespace": namespace, "archive_id": uuid.uuid4().hex, "partitions": partitions}
        with database.write() as connection:
            try:
                with connection.begin_nested():
                    connection.execute(insert(namespaces), new | {"layout": LAYOUT})
            except exc.IntegrityError:
                pass  # somebody registered it since we looked
            row = connection.execute(query).one()
    if row.layout != LAYOUT:
        raise ConfigurationError(f"namespace {namespace} has layout {row.layout}, this release needs {LAYOUT}")
    return row.archive_id, row.partitions
