"""Reads changes back as they were committed. Law: what a change added as a message comes from where messages are kept.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, select

from distributed_state.cold.bulk import chunks
from distributed_state.cold.record_index import key_of, keys
from distributed_state.cold.tables import changes, messages, quarantine
from distributed_state.values.journal import JournalEntry, Op, pack, unpack
from distributed_state.values.model import unescape

_NAMES = ("epoch", "offset", "event", "version", "time_ms", "kind", "actor", "token", "data")
_COLUMNS = [changes.c[name] for name in _NAMES]


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
    c = changes.c
    query = select(*_COLUMNS).where(c.record == key, c.version > after)
    if before is not None:
        query = query.where(c.version < before)
    found = []
    for chunk in chunks(connection.execute(query.order_by(c.version).limit(limit)), 500):
        said = _said(connection, key, chunk)
        for epoch, offset, event, version, time_ms, kind, actor, token, data in chunk:
            steps = _with_messages(data, said)
            entry = JournalEntry(offset, event, record, version, time_ms, kind, actor, token, steps, total_bytes=0)
            found.append((epoch, entry))
    return found


def _said(connection: Connection, key: int, rows: Iterable[Any]) -> dict[bytes, bytes]:
    """What the messages say that these changes added, by their numbers."""
    m = messages.c
    numbers = [int(op.name) for row in rows for op in _added(row.data)]
    found: dict[bytes, bytes] = {}
    for chunk in chunks(numbers, 500):
        for seq, data in connection.execute(select(m.seq, m.data).where(m.record == key, m.seq.in_(chunk))):
            found[b"%d" % seq] = data
    return found


def _added(data: bytes) -> list[Op]:
    return [op for op in unpack(data) if op.kind == b"m"] if b"m" in data else []


def _with_messages(data: bytes, said: Mapping[bytes, bytes]) -> bytes:
    if not _added(data):
        return data
    ops = (op if op.kind != b"m" else Op(op.kind, op.name, op.value or said.get(op.name, b"")) for op in unpack(data))
    return pack(ops)


def holds(connection: Connection, namespace: str, record: str, version: int, event: str) -> bool:
    """Whether this very change was archived, or quarantined."""
    c = changes.c
    q = quarantine.c
    query = select(c.event).where(c.record == key_of(namespace, record), c.version == version)
    if event in connection.execute(query).scalars().all():
        return True
    return connection.execute(select(q.id).where(q.namespace == namespace, q.event == event)).first() is not None


def checkpoints(connection: Connection, namespace: str, record: str) -> list[tuple[str, int, int]]:
    """The labels of a record with their versions and times, ascending."""
    c = changes.c
    query = select(c.label, c.version, c.time_ms).where(c.record == key_of(namespace, record))
    rows = connection.execute(query.where(c.label.is_not(None)).order_by(c.version))
    return [(unescape(label), version, time_ms) for label, version, time_ms in rows]
