"""What the archive knows when Redis came back with another life of its data. Law: by identity, never by numbers.

Design: section 14.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, func, insert, select, tuple_

from distributed_state.cold.bulk import chunks
from distributed_state.cold.entries import subject
from distributed_state.cold.record_index import ERASED, hashed
from distributed_state.cold.tables import changes, cursors, erasures, events, quarantine, records
from distributed_state.cold.values import Cursor
from distributed_state.values.journal import JournalEntry
from distributed_state.values.model import SCOPES


@dataclass(frozen=True, slots=True)
class Known:
    """The event ids that the archive has: `archived`.

    Of others, `kept` are in quarantine already, and `gone` are of records that were erased or purged since: nothing of
    those may come back.
    """

    archived: set[str]
    kept: set[str]
    gone: set[str]


@dataclass(frozen=True, slots=True)
class Changed:
    """Records of a partition that changed, and what those that were erased are called now (`record_index.hashed`)."""

    records: list[str]
    erased: set[str]


def last_begun(connection: Connection, namespace: str, partition: int, epoch: str) -> Cursor | None:
    """How far an epoch was archived, if nothing was of any that was minted after it."""
    c = cursors.c
    query = select(c.partition, c.epoch, c.ordinal, c.offset, c.event).where(c.namespace == namespace)
    rows = connection.execute(query.where(c.partition == partition).order_by(c.ordinal.desc())).all()
    for row in rows:
        if row.epoch == epoch:
            return Cursor(*row)
        if row.offset:
            break
    return None


def known(connection: Connection, namespace: str, partition: int, entries: Sequence[JournalEntry]) -> Known:
    """Which of these entries the archive has, in whatever form."""
    archived: set[str] = set()
    gone: set[str] = set()
    kept: set[str] = set()
    for some in chunks(entries, 200):
        kept |= _quarantined(connection, namespace, some)
    for chunk in chunks([entry for entry in entries if entry.record], 200):
        archived |= _changes(connection, namespace, chunk)
        rest = [entry for entry in chunk if entry.event not in archived]
        gone |= _erased_or_purged(connection, namespace, rest)
    for chunk in chunks([entry for entry in entries if not entry.record], 200):
        named = {f"{entry.event.rpartition('.')[0]}.0": entry.event for entry in chunk if entry.data}
        here = and_(events.c.namespace == namespace, events.c.partition == partition, events.c.id.in_(named))
        archived |= {named[id] for (id,) in connection.execute(select(events.c.id).where(here))}
        archived |= {entry.event for entry in chunk if not entry.data}  # a mark, of which nothing is kept
    return Known(archived, kept, gone)


def _changes(connection: Connection, namespace: str, entries: Sequence[JournalEntry]) -> set[str]:
    c = changes.c
    places = [(entry.record, entry.version) for entry in entries]
    query = select(c.event).where(c.namespace == namespace, tuple_(c.record, c.version).in_(places))
    return {event for (event,) in connection.execute(query)} & {entry.event for entry in entries}


def _quarantined(connection: Connection, namespace: str, entries: Sequence[JournalEntry]) -> set[str]:
    q = quarantine.c
    query = select(q.event).where(q.namespace == namespace, q.event.in_([entry.event for entry in entries]))
    return {event for (event,) in connection.execute(query)}


def _erased_or_purged(connection: Connection, namespace: str, entries: Sequence[JournalEntry]) -> set[str]:
    """Those whose version is behind what is kept of their records: nothing of them may come back."""
    names = {entry.record for entry in entries} | {hashed(namespace, entry.record) for entry in entries}
    r = records.c
    c = changes.c
    newest = select(r.record, r.version).where(r.namespace == namespace, r.record.in_(names))
    first = select(c.record, func.min(c.version).label("first")).where(c.namespace == namespace, c.record.in_(names))
    heads = {row.record: row.version for row in connection.execute(newest)}
    oldest = {row.record: row.first for row in connection.execute(first.group_by(c.record))}
    gone = set()
    for entry in entries:
        purged = entry.version <= heads.get(entry.record, 0) and entry.version < oldest.get(entry.record, 0)
        if purged or entry.version <= heads.get(hashed(namespace, entry.record), 0):
            gone.add(entry.event)
    return gone


def changed_since(connection: Connection, namespace: str, partition: int, since_ms: int) -> Changed:
    """The records of a partition that changed since then, by the clocks of Redis, and what was erased."""
    r = records.c

    def found(scope: str) -> list[str]:
        rows: list[str] = []
        for deleted in (False, True):  # as the index has it
            here: list[ColumnElement[Any]] = [r.namespace == namespace, r.scope == scope, r.deleted.is_(deleted)]
            here += [r.updated_ms >= since_ms, r.partition == partition]
            rows += connection.execute(select(r.record).where(*here)).scalars()
        return rows

    pending = select(erasures.c.record).where(erasures.c.namespace == namespace, erasures.c.partition == partition)
    erased = {hashed(namespace, record) for record in connection.execute(pending).scalars()}
    return Changed([record for scope in SCOPES for record in found(scope)], erased | set(found(ERASED)))


def set_aside(
    connection: Connection,
    namespace: str,
    partition: int,
    epoch: str,
    entries: Sequence[JournalEntry],
    reason: str,
) -> None:
    """Keep entries in quarantine, each once."""
    kept = _quarantined(connection, namespace, entries)
    rows = [
        {
            "namespace": namespace, "partition": partition, "epoch": epoch, "offset": entry.offset,
            "event": entry.event, "record": entry.record or subject(entry.data), "version": entry.version,
            "reason": reason, "data": entry.data, "time_ms": entry.time_ms,
        }
        for entry in entries
        if entry.event not in kept
    ]  # fmt: skip
    if rows:
        connection.execute(insert(quarantine), rows)


def clock_us(connection: Connection) -> int:
    """The database's clock, in microseconds since 1970."""
    if connection.dialect.name == "postgresql":
        return int(connection.execute(select(func.extract("epoch", func.clock_timestamp()) * 1_000_000)).scalar_one())
    julian = connection.execute(select(func.julianday("now"))).scalar_one()
    return int((julian - 2440587.5) * 86_400_000_000)
