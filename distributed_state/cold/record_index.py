"""The rows of `records`: one per record, how it stands at its head. Law: who changes a record locks its row first.

Design: section 9.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, select

from distributed_state.cold.bulk import Row, chunks, put
from distributed_state.cold.entries import Parsed
from distributed_state.cold.tables import records
from distributed_state.values.model import DELETED, LIFETIME, OWNER, PARENT

ERASED = "erased"  # the scope of rows that only keep the version of a record of which nothing else is left
Head = Mapping[Any, Any]


def hashed(namespace: str, record: str) -> str:
    """The text under which the version of an erased record is kept."""
    return "hash:" + hashlib.sha256(f"{namespace}\0{record}".encode()).hexdigest()


def forgotten(namespace: str, user: str) -> str:
    """The text under which it is kept that all of a user was forgotten, and when. No record has such a name."""
    return hashed(namespace, f"forgotten:{user}")


def find(connection: Connection, namespace: str, record: str) -> Head | None:
    """The row of a record, or the one that was left when it was erased."""
    names = [record, hashed(namespace, record)]
    query = select(records).where(records.c.namespace == namespace, records.c.record.in_(names))
    rows = {row["record"]: row for row in connection.execute(query).mappings()}
    return rows.get(names[0]) or rows.get(names[1])


def lock(connection: Connection, namespace: str, wanted: Iterable[str]) -> dict[str, Head]:
    """Read rows and hold them until the transaction ends, always in the same order."""
    found: dict[str, Head] = {}
    for chunk in chunks(sorted(wanted), 1000):
        query = select(records).where(records.c.namespace == namespace, records.c.record.in_(chunk))
        query = query.order_by(records.c.record).with_for_update()
        found.update((row["record"], row) for row in connection.execute(query).mappings())
    return found


def save(
    connection: Connection,
    namespace: str,
    accepted: Sequence[Parsed],
    refused: Sequence[Parsed],
    existing: Mapping[str, Head],
) -> None:
    """Write the rows of the records that these entries changed, one row each however many the changes."""
    heads: dict[str, dict[str, Any]] = {}
    for item in accepted:
        record = item.entry.record
        if record not in heads:
            heads[record] = dict(existing[record]) if record in existing else _new(namespace, item)
        _follow(heads[record], item)
    for item in refused:
        # It used up its version, which the next change may not get again.
        head = heads.get(item.entry.record) or dict(existing.get(item.entry.record, {}))
        if head:
            head["version"] = max(head["version"], item.entry.version)
            heads[item.entry.record] = head
    names = [column.name for column in records.columns]
    rows: list[Row] = [tuple(heads[record][name] for name in names) for record in sorted(heads)]
    put(connection, records, rows, [(namespace, record) for record in existing])


def _new(namespace: str, item: Parsed) -> dict[str, Any]:
    record = item.entry.record
    scope, _, name = record.partition(":")
    head: dict[str, Any] = {"namespace": namespace, "record": record, "scope": scope, "id": name}
    return head | {"created_ms": item.entry.time_ms, "owner": None, "deleted": False, "parent": None, "lifetime": None}


def _follow(head: dict[str, Any], item: Parsed) -> None:
    head.update(partition=item.partition, epoch=item.epoch, version=item.entry.version, updated_ms=item.entry.time_ms)
    if item.touched:
        if OWNER in item.touched:
            head["owner"] = item.owner
        if DELETED in item.touched:
            head["deleted"] = item.deleted
        if PARENT in item.touched:
            head["parent"] = item.parent
        if LIFETIME in item.touched:
            head["lifetime"] = item.lifetime
