"""Which records have changes that the index lacks, and who brings them up. Law: what is noted goes when it is done.

A claim on a partition is a token in its row, for a while: who writes the index compares it (`cold/search_feed.py`).

Design: section 21.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, distinct, func, select, update

from distributed_state.cold import bulk
from distributed_state.cold.search_tables import due, heads, partitions
from distributed_state.cold.tables import records

_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class Due:
    """A record with changes that the index lacks, noted in these rows. `gone`: it was erased."""

    key: int
    partition: int
    rows: tuple[int, ...]
    record: str
    gone: bool = False
    owner: str | None = None
    epoch: str = ""
    version: int = 0
    deleted: bool = False
    known: tuple[str, int] | None = None  # the epoch and version that the index has


def waiting(connection: Connection, namespace: str) -> list[int]:
    """The partitions that have something due."""
    p = partitions.c
    return list(connection.execute(select(p.partition).where(p.namespace == namespace, _has_due())).scalars())


def _has_due() -> ColumnElement[bool]:
    # A look into the index for each partition, however much is due there.
    d, p = due.c, partitions.c
    return select(d.id).where(d.namespace == p.namespace, d.partition == p.partition).correlate(partitions).exists()


def claim(
    connection: Connection, namespace: str, some: Collection[int], claimer: str, now_ms: int, until_ms: int
) -> list[int]:
    """Those of the partitions that have something due and are nobody else's; they are the claimer's until then."""
    p = partitions.c
    free = (p.claim == claimer) | (p.until_ms < now_ms)
    query = select(p.partition).where(p.namespace == namespace, p.partition.in_(some), free, _has_due())
    query = query.order_by(p.partition).with_for_update(skip_locked=True)
    taken = list(connection.execute(query).scalars())
    mine = and_(p.namespace == namespace, p.partition.in_(taken))
    connection.execute(update(partitions).where(mine).values(claim=claimer, until_ms=until_ms))
    return taken


def release(connection: Connection, namespace: str, claimer: str) -> None:
    """Leave to others what is claimed."""
    p = partitions.c
    mine = and_(p.namespace == namespace, p.claim == claimer)
    # In the order in which all lock them: an erasure may be waiting for one of them.
    taken = connection.execute(select(p.partition).where(mine).order_by(p.partition).with_for_update()).scalars().all()
    if taken:
        connection.execute(update(partitions).where(mine).values(claim="", until_ms=0))


def next_due(connection: Connection, namespace: str, some: Collection[int], limit: int) -> tuple[list[Due], bool]:
    """The records of these partitions that have waited longest, erased ones first, and whether there may be more."""
    d, r, h = due.c, records.c, heads.c
    query = select(d.record).where(d.namespace == namespace, d.partition.in_(some)).order_by(d.id).limit(limit)
    oldest = list(connection.execute(query).scalars())
    # All that is noted of them, if it is not too much: what is brought up now is due no more, however often it changed.
    query = select(d.id, d.record, d.partition, d.gone).where(bulk.among(connection, d.record, list(set(oldest))))
    rows: dict[int, list[Any]] = {}
    for row in connection.execute(query.where(d.namespace == namespace).order_by(d.id).limit(_ROWS)):
        rows.setdefault(row.record, []).append(row)
    columns: tuple[Any, ...] = (r.key, r.record, r.owner, r.epoch, r.version, r.deleted, h.epoch, h.version)
    joined = select(*columns).outerjoin_from(records, heads, h.record == r.key)
    there = {row[0]: tuple(row) for row in connection.execute(joined.where(bulk.among(connection, r.key, list(rows))))}
    found = []
    for key, noted in rows.items():
        ids = tuple(row.id for row in noted)
        if key not in there:
            text = next((row.gone for row in noted if row.gone), "")
            found.append(Due(key, noted[0].partition, ids, text, gone=True))
            continue
        _, record, owner, epoch, version, deleted, *known = there[key]
        at = (known[0], known[1]) if known[0] is not None else None
        found.append(Due(key, noted[0].partition, ids, record, False, owner, epoch, version, deleted, at))
    return sorted(found, key=lambda each: not each.gone), len(oldest) == limit


def waits(connection: Connection, namespace: str, up_to: int) -> bool:
    """Whether anything of what was noted up to there is due still."""
    query = select(due.c.id).where(due.c.namespace == namespace, due.c.id <= up_to).order_by(due.c.id).limit(1)
    return connection.execute(query).first() is not None


def last(connection: Connection, namespace: str) -> int:
    """The number of the newest note."""
    query = select(due.c.id).where(due.c.namespace == namespace).order_by(due.c.id.desc()).limit(1)
    return connection.execute(query).scalar() or 0


def lacking(connection: Connection, namespace: str, up_to: int | None = None) -> int:
    """How many records have changes that the index lacks, of those noted up to there."""
    query = select(func.count(distinct(due.c.record))).where(due.c.namespace == namespace)
    if up_to is not None:
        query = query.where(due.c.id <= up_to)
    return connection.execute(query).scalar() or 0
