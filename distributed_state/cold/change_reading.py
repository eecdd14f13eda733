"""Reads changes back as they were committed. Law: what a change added as a message comes from where messages are kept.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, select

from distributed_state.cold import blocks
from distributed_state.cold.bulk import chunks
from distributed_state.cold.record_index import key_of, keys
from distributed_state.cold.tables import changes, quarantine
from distributed_state.values.journal import JournalEntry, Op, pack, unpack
from distributed_state.values.model import unescape


def entries(
    connection: Connection, namespace: str, record: str, after: int, before: int | None, limit: int | None
) -> list[JournalEntry]:
    """The changes between two versions, both exclusive, ascending."""
    key = keys(connection, namespace, [record]).get(record)
    if key is None:
        return []
    return [entry for _, entry in whole(connection, key, record, after, before, limit)]


def whole(
    connection: Connection, key: int, record: str, after: int, before: int | None = None, limit: int | None = None
) -> list[tuple[str, JournalEntry]]:
    """The changes of a record between two versions as they were committed, with what messages say, and their epochs."""
    found = []
    for chunk in chunks(blocks.changes_between(connection, key, after, before, limit), 500):
        said = blocks.bodies(connection, key, [int(op.name) for row in chunk for op in _added(row.data)])
        for version, offset, time_ms, token, epoch, event, kind, actor, data in chunk:
            steps = _with_messages(data, said)
            entry = JournalEntry(offset, event, record, version, time_ms, kind, actor, token, steps, total_bytes=0)
            found.append((epoch, entry))
    return found


def _added(data: bytes) -> list[Op]:
    return [op for op in unpack(data) if op.kind == b"m"] if b"m" in data else []


def _with_messages(data: bytes, said: Mapping[int, bytes]) -> bytes:
    if not _added(data):
        return data
    ops = unpack(data)
    return pack(op if op.kind != b"m" else Op(b"m", op.name, op.value or said.get(int(op.name), b"")) for op in ops)


def holds(connection: Connection, namespace: str, record: str, version: int, event: str) -> bool:
    """Whether this very change was archived, or quarantined."""
    q = quarantine.c
    kept = blocks.changes_between(connection, key_of(namespace, record), version - 1, version + 1, None)
    if event in {row.event for row in kept}:
        return True
    return connection.execute(select(q.id).where(q.namespace == namespace, q.event == event)).first() is not None


def checkpoints(connection: Connection, namespace: str, record: str) -> list[tuple[str, int, int]]:
    """The labels of a record with their versions and times, ascending."""
    c = changes.c
    query = select(c.label, c.version, c.time_ms).where(c.record == key_of(namespace, record))
    rows = connection.execute(query.where(c.label.is_not(None)).order_by(c.version))
    return [(unescape(label), version, time_ms) for label, version, time_ms in rows]
