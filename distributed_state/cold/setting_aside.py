"""Moves what another life replaced out of a record. Law: nothing of it is lost, it is in quarantine, whole.

Design: section 9.
"""

from __future__ import annotations

from sqlalchemy import Connection, and_, delete, insert

from distributed_state.cold import blocks, change_reading
from distributed_state.cold.record_index import Head
from distributed_state.cold.tables import changes, items, layers, messages, quarantine, shares, snapshots


def set_aside(connection: Connection, head: Head, first: int, reason: str) -> None:
    """Move a record's changes from version `first` on to quarantine, with all that was derived from them."""
    blocks.expand(connection, [head["key"]])
    place = {"namespace": head["namespace"], "partition": head["partition"], "record": head["record"]}
    rows = [
        place | {
            "epoch": epoch, "offset": entry.offset, "event": entry.event, "version": entry.version,
            "data": entry.data, "time_ms": entry.time_ms, "reason": reason,
        }
        for epoch, entry in change_reading.whole(connection, head["key"], head["record"], first - 1)
    ]  # fmt: skip
    if rows:
        connection.execute(insert(quarantine), rows)
    for table in (changes, messages, snapshots, items):
        connection.execute(delete(table).where(table.c.record == head["key"], table.c.version >= first))
    for table in (shares, layers):
        mine = and_(table.c.namespace == head["namespace"], table.c.record == head["record"])
        connection.execute(delete(table).where(mine, table.c.version >= first))
