"""Removes history and events older than a cutoff. Law: what is newer stays readable, and what a fork still shows too.

A live record keeps a snapshot at its last change before the cutoff, the base; a record that was deleted before the
cutoff keeps its row in `records` only.

Design: sections 11, 15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    Connection,
    Delete,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
)

from distributed_state.cold import branch_reading, bulk
from distributed_state.cold.engine import Database
from distributed_state.cold.entries import Parsed
from distributed_state.cold.history import snapshot_row, states
from distributed_state.cold.record_index import ERASED, lock
from distributed_state.cold.tables import TEXT, changes, events, messages, records, shares, snapshots
from distributed_state.cold.values import Purged
from distributed_state.values import message_ranges
from distributed_state.values.journal import Segment, State
from distributed_state.values.model import NEXT, SEGMENTS

CHUNK = 200
_EVENTS = 10_000


def purge_all(
    database: Database, namespace: str, before_ms: int, progress: Callable[[int], None] | None = None
) -> Purged:
    """Purge the namespace, chunk by chunk; `progress` is called after each with the number of records so far."""
    with database.write() as connection:
        # First: what a branch continues stays until the branch is old.
        total = Purged(0, branch_reading.purge(connection, namespace, before_ms), 0)
    after: str | None = ""
    while after is not None:
        with database.long_read() as connection:
            names, after = candidates(connection, namespace, before_ms, after)
        if names:
            with database.long_write() as connection:
                total += purge(connection, namespace, names, before_ms)
        if progress:
            progress(total.records)
    removed = 1
    while removed > 0:
        with database.long_write() as connection:
            removed = purge_events(connection, namespace, before_ms)
        total += Purged(0, 0, 0, removed)
    return total


def candidates(connection: Connection, namespace: str, before_ms: int, after: str) -> tuple[list[str], str | None]:
    """Of the next records in order of their texts, those that have something to purge; and where to go on."""
    r = records.c
    c = changes.c
    s = snapshots.c
    page = select(r.record, r.deleted, r.updated_ms).where(r.namespace == namespace, r.record > after)
    page = page.where(r.created_ms < before_ms, r.scope != ERASED).order_by(r.record).limit(CHUNK)
    rows = connection.execute(page).all()
    # In statements of their own: as subqueries, PostgreSQL may read all of `changes` for each page.
    old = select(c.record).where(c.namespace == namespace, c.record.in_([row.record for row in rows]))
    found = set(connection.execute(old.where(c.time_ms < before_ms).distinct()).scalars())
    deleted = [row.record for row in rows if row.deleted and row.updated_ms < before_ms]
    left = select(s.record).where(s.namespace == namespace, s.record.in_(deleted)).distinct()
    found.update(connection.execute(left).scalars())
    return sorted(found), rows[-1].record if len(rows) == CHUNK else None


def purge(connection: Connection, namespace: str, names: Sequence[str], before_ms: int) -> Purged:
    """Purge these records in one transaction."""
    # Locked first: archive() locks the rows of its records too, so neither sees the other's work half done.
    rows = lock(connection, namespace, names)
    held = branch_reading.bases(connection, namespace, rows)
    old = (record for record, row in rows.items() if row["deleted"] and row["updated_ms"] < before_ms)
    gone = [record for record in old if record not in held]
    bases = _bases(connection, namespace, rows.keys() - gone, before_ms, held)
    removed = [_purge_deleted(connection, namespace, gone), _purge_live(connection, namespace, bases)]
    counts = [sum(numbers) for numbers in zip(*removed, strict=True)]
    return Purged(len(gone) + len(bases), *counts)


def purge_events(connection: Connection, namespace: str, before_ms: int) -> int:
    """Remove the oldest events that are older than the cutoff, some thousands at most; how many those were."""
    e = events.c
    old = and_(e.namespace == namespace, e.time_ms < before_ms)
    last = connection.execute(select(e.time_ms).where(old).order_by(e.time_ms).offset(_EVENTS - 1).limit(1)).scalar()
    # All of the last one's millisecond go too: a cut between them would not be one by time.
    some = old if last is None else and_(e.namespace == namespace, e.time_ms <= last)
    return connection.execute(delete(events).where(some)).rowcount


def _bases(
    connection: Connection, namespace: str, names: Iterable[str], before_ms: int, held: Mapping[str, int]
) -> dict[str, State]:
    """The state of each record at its last change before the first one that is newer than the cutoff.

    Or before what a branch continues: `held` are the versions that one begins behind.
    """
    c = changes.c
    newer = func.min(case((c.time_ms >= before_ms, c.version)))
    targets: dict[str, int] = {}
    for chunk in bulk.chunks(sorted(names), CHUNK):
        query = select(c.record, func.min(c.version), func.max(c.version), newer)
        query = query.where(c.namespace == namespace, c.record.in_(chunk)).group_by(c.record)
        for record, first, last, kept in connection.execute(query):
            # The server's clock may have gone back: a change that is newer keeps those after it, whatever their time.
            target = min(last if kept is None else kept - 1, held.get(record, last))
            if target >= first:
                targets[record] = target
    return states(connection, namespace, targets)


def hand_down_all(connection: Connection, namespace: str, gone: Iterable[str]) -> None:
    """Copy every message of these records to the records that share it."""
    _hand_down(connection, namespace, [{"r": each, "low": 0, "high": 2**63 - 1, "v": 2**63 - 1} for each in gone])


def _purge_deleted(connection: Connection, namespace: str, gone: Sequence[str]) -> tuple[int, int]:
    if not gone:
        return 0, 0
    hand_down_all(connection, namespace, gone)
    removed = []
    for table in (changes, messages, snapshots):
        query = delete(table).where(table.c.namespace == namespace, table.c.record.in_(gone))
        removed.append(connection.execute(query).rowcount)
    # Those who shared have their own copies now.
    held = or_(shares.c.record.in_(gone), shares.c.source.in_(gone))
    connection.execute(delete(shares).where(shares.c.namespace == namespace, held))
    return removed[0], removed[1]


def _purge_live(connection: Connection, namespace: str, bases: Mapping[str, State]) -> tuple[int, int]:
    if not bases:
        return 0, 0
    hidden = _hidden(connection, namespace, bases)
    _hand_down(connection, namespace, hidden)
    m = messages.c
    run = and_(m.namespace == namespace, m.record == bindparam("r"), m.version <= bindparam("v"))
    run = and_(run, m.seq >= bindparam("low"), m.seq < bindparam("high"))
    removed_messages = _delete_each(connection, delete(messages).where(run), hidden)
    upto = [{"r": record, "v": state.version} for record, state in bases.items()]
    removed = [
        _delete_each(
            connection,
            delete(table).where(
                table.c.namespace == namespace, table.c.record == bindparam("r"), table.c.version <= bindparam("v")
            ),
            upto,
        )
        for table in (changes, snapshots, shares)
    ]
    bulk.add(connection, snapshots, [snapshot_row(namespace, record, state) for record, state in bases.items()])
    held = {
        (namespace, run.source, record, state.version, run.start, run.stop)
        for record, state in bases.items()
        for run in message_ranges.parse(state.fields.get(SEGMENTS, b"[]"))
    }
    bulk.add(connection, shares, list(held))
    return removed[0], removed_messages


def _hidden(connection: Connection, namespace: str, bases: Mapping[str, State]) -> list[dict[str, Any]]:
    """The runs of messages that neither the base nor any later state of its record shows."""
    s = shares.c
    shown: dict[str, list[Segment]] = {
        record: message_ranges.segments(record, state.fields) for record, state in bases.items()
    }
    query = select(s.record, s.version, s.source, s.start, s.stop)
    # A later state may show again what the base does not: a rollback sets `#segments`, which is noted in `shares`.
    for record, version, *run in connection.execute(query.where(s.namespace == namespace, s.record.in_(bases))):
        if version > bases[record].version:
            shown[record].append(Segment(*run))
    return [
        {"r": record, "low": low, "high": high, "v": state.version}
        for record, state in bases.items()
        for low, high in _gaps(shown[record], int(state.fields.get(NEXT, b"0")))
    ]


def _gaps(runs: Iterable[Segment], stop: int) -> list[tuple[int, int]]:
    """What of 0 .. `stop` lies in none of the runs."""
    gaps = []
    at = 0
    for run in sorted(runs, key=lambda run: run.start):
        if run.start > at:
            gaps.append((at, min(run.start, stop)))
        at = max(at, run.stop)
    if at < stop:
        gaps.append((at, stop))
    return [(low, high) for low, high in gaps if low < high]


def _hand_down(connection: Connection, namespace: str, runs: Sequence[Mapping[str, Any]]) -> None:
    """Copy messages that are about to go to the records that share them."""
    if not runs:
        return
    m = messages.c
    s = shares.c
    own = messages.alias("own")
    shared = and_(s.namespace == m.namespace, s.source == m.record, s.record != m.record)
    shared = and_(shared, m.seq >= s.start, m.seq < s.stop)
    theirs = and_(own.c.namespace == m.namespace, own.c.record == s.record, own.c.seq == m.seq)
    # Version 0: older than any base of the heir, whose own purge removes them once it shows them no more.
    query = select(m.namespace, s.record, m.seq, literal_column("0"), literal_column("''"), m.data).distinct()
    query = query.join_from(messages, shares, shared).where(m.namespace == namespace, m.record == bindparam("r"))
    query = query.where(m.seq >= bindparam("low"), m.seq < bindparam("high"), m.version <= bindparam("v"))
    query = query.where(~select(literal(1)).select_from(own).where(theirs).exists())
    connection.execute(insert(messages).from_select([column.name for column in messages.columns], query), list(runs))


def inherit(connection: Connection, namespace: str, accepted: Iterable[Parsed]) -> None:
    """Give forks of forks their own of what their parent was handed: where it was written it is not any more."""
    runs = [
        {"p": item.parent, "r": item.entry.record, "low": run.start, "high": run.stop}
        for item in accepted
        if item.parent is not None
        for run in item.runs
        if run.source != item.parent and run.start < run.stop
    ]
    if not runs:
        return
    m = messages.c
    own = messages.alias("own")
    theirs = and_(own.c.namespace == m.namespace, own.c.record == bindparam("r"), own.c.seq == m.seq)
    query = select(m.namespace, bindparam("r", type_=TEXT), m.seq, literal_column("0"), literal_column("''"), m.data)
    query = query.where(m.namespace == namespace, m.record == bindparam("p"))
    query = query.where(m.seq >= bindparam("low"), m.seq < bindparam("high"))
    query = query.where(~select(literal(1)).select_from(own).where(theirs).exists())
    connection.execute(insert(messages).from_select([column.name for column in messages.columns], query), runs)


def _delete_each(connection: Connection, query: Delete, parameters: Sequence[Mapping[str, Any]]) -> int:
    return connection.execute(query, list(parameters)).rowcount if parameters else 0
