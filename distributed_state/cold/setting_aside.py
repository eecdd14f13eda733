"""Moves what another life replaced out of a record. Law: nothing of it is lost, it is in quarantine, whole.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, and_, delete, insert, select, update

from distributed_state.cold import blocks, change_reading, record_index
from distributed_state.cold.bulk import chunks
from distributed_state.cold.record_index import Head
from distributed_state.cold.tables import changes, items, layers, messages, quarantine, shares, snapshots
from distributed_state.cold.values import RESOLVED, UNRESOLVED
from distributed_state.values.journal import State

_TOGETHER = 10_000


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
    _remove(connection, head, first)


def undo(connection: Connection, namespace: str, record: str, first: int, before: State | None) -> None:
    """Remove a record's changes from version `first` on, which nobody was acknowledged: it is as it was `before`."""
    head = record_index.lock(connection, namespace, [record])[record]
    blocks.expand(connection, [head["key"]])
    _remove(connection, head, first)
    record_index.put(connection, [{**head, "version": first - 1, **record_index.about(before)}])
    record_index.replace_tags(connection, namespace, record, before.fields if before else {})


def unresolve(connection: Connection, namespace: str, events: Collection[str]) -> None:
    """Note of commits that were to come with a later version that SQL refused that: they are not archived."""
    q = quarantine.c
    for chunk in chunks(sorted(events), 500):
        here = and_(q.namespace == namespace, q.event.in_(chunk), q.reason == RESOLVED)
        connection.execute(update(quarantine).where(here).values(reason=UNRESOLVED))


def purge(connection: Connection, namespace: str, before_ms: int) -> int:
    """Remove the oldest rows of the quarantine of which nothing is lost, some thousands at most; how many."""
    q = quarantine.c
    old = and_(q.namespace == namespace, q.reason == RESOLVED, q.time_ms < before_ms)
    some = select(q.id).where(old).order_by(q.id).limit(_TOGETHER).scalar_subquery()
    return connection.execute(delete(quarantine).where(q.id.in_(some))).rowcount


def _remove(connection: Connection, head: Head, first: int) -> None:
    for table in (changes, messages, snapshots, items):
        connection.execute(delete(table).where(table.c.record == head["key"], table.c.version >= first))
    for table in (shares, layers):
        mine = and_(table.c.namespace == head["namespace"], table.c.record == head["record"])
        connection.execute(delete(table).where(mine, table.c.version >= first))
