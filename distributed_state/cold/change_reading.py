"""Reads changes back as they were committed. Law: what messages and items said comes from where those are kept.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from sqlalchemy import Connection, select

from distributed_state.cold import blocks, item_rows
from distributed_state.cold.bulk import chunks
from distributed_state.cold.record_index import key_of, keys
from distributed_state.cold.tables import changes, quarantine
from distributed_state.cold.values import RESOLVED
from distributed_state.values.journal import JournalEntry, Op, item_of, pack, unpack
from distributed_state.values.model import unescape


def entries(
    connection: Connection,
    namespace: str,
    record: str,
    after: int,
    before: int | None,
    limit: int | None,
    most: int | None = None,
) -> list[JournalEntry]:
    """The changes between two versions, both exclusive, ascending, of about `most` bytes together, but at least one."""
    key = keys(connection, namespace, [record]).get(record)
    if key is None:
        return []
    return [entry for _, entry in whole(connection, key, record, after, before, limit, most)]


def outlines(
    connection: Connection,
    namespace: str,
    record: str,
    after: int,
    before: int | None,
    limit: int | None,
    most: int | None = None,
) -> list[JournalEntry]:
    """The same without what their messages and items say."""
    key = keys(connection, namespace, [record]).get(record)
    rows = [] if key is None else blocks.changes_between(connection, key, after, before, limit, most)
    return [_entry(record, row, row.data) for row in rows]


def _entry(record: str, row: blocks.ChangeRow, steps: bytes) -> JournalEntry:
    return JournalEntry(
        row.offset, row.event, record, row.version, row.time_ms, row.kind, row.actor, row.token, steps, total_bytes=0
    )


def whole(
    connection: Connection,
    key: int,
    record: str,
    after: int,
    before: int | None = None,
    limit: int | None = None,
    most: int | None = None,
) -> list[tuple[str, JournalEntry]]:
    """The changes of a record between two versions as they were committed, with what was kept apart, and their epochs.

    What a purge removed is empty.
    """
    found = []
    rows = blocks.changes_between(connection, key, after, before, limit, most)
    if most is not None:
        rows = _first(connection, key, rows, most)
    for chunk in chunks(rows, 500):
        apart = [(row.version, op) for row in chunk for op in _apart(row.data)]
        said = blocks.bodies(connection, key, [int(op.name) for _, op in apart if op.kind == b"m"])
        put = item_rows.bodies(connection, key, [(*item_of(op.name), at) for at, op in apart if op.kind == b"p"])
        found += [(row.epoch, _entry(record, row, _together(row.version, row.data, said, put))) for row in chunk]
    return found


def _first(connection: Connection, key: int, rows: list[blocks.ChangeRow], most: int) -> list[blocks.ChangeRow]:
    """The first of these changes: `most` bytes together with what is kept apart, or one."""
    apart = [_apart(row.data) for row in rows]
    numbers = [int(op.name) for ops in apart for op in ops if op.kind == b"m"]
    said = blocks.lengths(connection, [key], min(numbers), max(numbers) + 1) if numbers else {}
    named = [
        [(*item_of(op.name), row.version) for op in ops if op.kind == b"p"]
        for row, ops in zip(rows, apart, strict=True)
    ]
    put = item_rows.lengths(connection, key, chain.from_iterable(named))
    size = 0
    for at, (row, ops, names) in enumerate(zip(rows, apart, named, strict=True)):
        length = len(row.data) + sum(put.get(name, 0) for name in names)
        length += sum(said.get(int(op.name), 0) for op in ops if op.kind == b"m")
        if size and size + length > most:
            return rows[:at]
        size += length
    return rows


def _apart(data: bytes) -> list[Op]:
    """The steps whose values another table has."""
    steps = unpack(data) if b"m" in data or b"p" in data else []
    return [op for op in steps if op.kind in (b"m", b"p") and not op.value]


def _together(version: int, data: bytes, said: Mapping[int, bytes], put: Mapping[item_rows.Name, bytes]) -> bytes:
    if not _apart(data):
        return data

    def whole(op: Op) -> bytes:
        if op.kind == b"m":
            return op.value or said.get(int(op.name), b"")
        return op.value or put.get((*item_of(op.name), version), b"") if op.kind == b"p" else op.value

    return pack(op._replace(value=whole(op)) for op in unpack(data))


def holds(connection: Connection, namespace: str, record: str, version: int, event: str) -> bool:
    """Whether this very change was archived, or what it did was, with a later version."""
    q = quarantine.c
    kept = blocks.changes_between(connection, key_of(namespace, record), version - 1, version + 1, None)
    if event in {row.event for row in kept}:
        return True
    resolved = select(q.id).where(q.namespace == namespace, q.event == event, q.reason == RESOLVED)
    return connection.execute(resolved).first() is not None


def checkpoints(
    connection: Connection, namespace: str, record: str, after: int, before: int | None, limit: int | None, order: str
) -> list[tuple[str, int, int]]:
    """The labels of a record with their versions and times: between two versions (exclusive), in this order."""
    c = changes.c
    query = select(c.label, c.version, c.time_ms).where(c.record == key_of(namespace, record), c.label.is_not(None))
    if after:
        query = query.where(c.version > after)
    if before is not None:
        query = query.where(c.version < before)
    rows = connection.execute(query.order_by(c.version if order == "asc" else c.version.desc()).limit(limit))
    return [(unescape(label), version, time_ms) for label, version, time_ms in rows]
