"""What the archive knows when Redis came back with another life of its data. Law: by identity, never by numbers.

Design: section 14.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, insert, select, update

from distributed_state.cold.epochs import REPAIRED
from distributed_state.cold.record_index import ERASED, LISTED_MS, hashed
from distributed_state.cold.tables import cursors, erasures, records
from distributed_state.cold.values import Cursor
from distributed_state.values.model import SCOPES


@dataclass(frozen=True, slots=True)
class Changed:
    """Records of a partition that changed, and what those that were erased are called now (`record_index.hashed`)."""

    records: list[str]
    erased: set[str]


def changed_since(connection: Connection, namespace: str, partition: int, since_ms: int) -> Changed:
    """The records of a partition that changed since then, by the clocks of Redis, and what was erased."""
    r = records.c

    def found(scope: str) -> list[str]:
        rows: list[str] = []
        for deleted in (False, True):  # as the index has it
            here: list[ColumnElement[Any]] = [r.namespace == namespace, r.scope == scope, r.deleted.is_(deleted)]
            here += [r.listed_ms > since_ms - LISTED_MS, r.updated_ms >= since_ms, r.partition == partition]
            rows += connection.execute(select(r.record).where(*here)).scalars()
        return rows

    pending = select(erasures.c.record).where(erasures.c.namespace == namespace, erasures.c.partition == partition)
    erased = {hashed(namespace, record) for record in connection.execute(pending).scalars()}
    return Changed([record for scope in SCOPES for record in found(scope)], erased | set(found(ERASED)))


def reach(connection: Connection, namespace: str, after: Cursor | None, to: Cursor) -> bool:
    """Note that a repair brought SQL all up to there, if SQL still is where it was `after`."""
    if not is_at(connection, namespace, to.partition, after):
        return False
    c = cursors.c
    here = and_(c.namespace == namespace, c.partition == to.partition)
    if after is not None and after.epoch == to.epoch:
        at = update(cursors).where(here, c.epoch == to.epoch)
        connection.execute(at.values(offset=to.offset, event=to.event, minted_ms=REPAIRED))
        return True
    connection.execute(update(cursors).where(here).values(closed=True))
    row = {"namespace": namespace, "partition": to.partition, "ordinal": to.ordinal, "epoch": to.epoch}
    row |= {"offset": to.offset, "event": to.event, "closed": False, "minted_ms": REPAIRED, "begun": True}
    connection.execute(insert(cursors), row)
    return True


def is_at(connection: Connection, namespace: str, partition: int, after: Cursor | None) -> bool:
    """Whether SQL has a partition up to there and no further; held until the transaction ends."""
    c = cursors.c
    here = and_(c.namespace == namespace, c.partition == partition)
    query = select(c.ordinal, c.epoch, c.offset, c.event).where(here).with_for_update()
    newest = max(connection.execute(query).all(), default=None)
    return newest == ((after.ordinal, after.epoch, after.offset, after.event) if after else None)
