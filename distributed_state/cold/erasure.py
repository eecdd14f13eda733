"""Removes every row of records. Law: what stays is a hash and a version, so that no version is ever used twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, delete, insert, or_

from distributed_state.cold.bulk import chunks
from distributed_state.cold.heads import ERASED, Head, hashed, lock
from distributed_state.cold.tables import changes, events, messages, quarantine, records, shares, snapshots


def erase(connection: Connection, namespace: str, names: Sequence[str]) -> None:
    """Delete all rows of these records, and leave the version of each under its hash."""
    for chunk in chunks(sorted(set(names)), 200):
        hashes = {hashed(namespace, record): record for record in chunk}
        rows = lock(connection, namespace, [*chunk, *hashes])
        for table in (changes, messages, snapshots, quarantine):
            connection.execute(delete(table).where(table.c.namespace == namespace, table.c.record.in_(chunk)))
        connection.execute(delete(events).where(events.c.namespace == namespace, events.c.subject.in_(chunk)))
        held = or_(shares.c.record.in_(chunk), shares.c.source.in_(chunk))
        connection.execute(delete(shares).where(shares.c.namespace == namespace, held))
        gone = {name for name, record in hashes.items() if record in rows}
        rest = [_stone(rows[hashes[name]], name, rows.get(name)) for name in sorted(gone)]
        old = records.c.record.in_([*chunk, *gone])
        connection.execute(delete(records).where(records.c.namespace == namespace, old))
        if rest:
            connection.execute(insert(records), rest)


def _stone(row: Head, name: str, former: Head | None) -> dict[str, Any]:
    version = max(row["version"], former["version"] if former else 0)
    hidden = {"record": name, "id": name, "scope": ERASED, "owner": None, "parent": None, "lifetime": None}
    return {**row, **hidden, "deleted": True, "version": version}
