"""What SQL has of commits that writers remember. Law: a commit is known by its event, not by record and version.

Design: section 14.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sqlalchemy import (
    BigInteger,
    Connection,
    FromClause,
    Join,
    LargeBinary,
    and_,
    func,
    insert,
    literal,
    outerjoin,
    select,
    union_all,
)

from distributed_state.cold import blocks, record_index
from distributed_state.cold.bulk import chunks, listed
from distributed_state.cold.epochs import last_event
from distributed_state.cold.tables import TEXT, change_blocks, changes, events, quarantine, records
from distributed_state.cold.values import Archived, Commits
from distributed_state.values.journal import JournalEntry, unpack


def heads(connection: Connection, namespace: str, wanted: Iterable[str]) -> dict[str, Archived]:
    """How far each record is archived; an erased one up to the version that was erased. The others are left out."""
    c = changes.c
    found: dict[str, Archived] = {}
    for chunk in chunks(sorted(set(wanted)), 500):
        hashes = {record_index.hashed(namespace, record): record for record in chunk}
        r = records.c
        query = select(r.record, r.version, r.epoch).where(r.namespace == namespace, r.record.in_([*chunk, *hashes]))
        for row in connection.execute(query).all():
            record = hashes.get(row.record, row.record)
            # The row of the record itself wins: one that was erased may have begun again.
            if row.record == record or record not in found:
                found[record] = Archived(row.version, row.epoch, 0, "")
        names = _wanted(connection, ((record, found[record].version) for record in chunk if record in found))
        at = select(names.c.record, c.version, c.epoch, c.offset, c.event).select_from(_changes(namespace, names))
        for record, *head in connection.execute(at).all():
            if head[0] is not None:
                found[record] = Archived(*head)
    return found


def known(
    connection: Connection, namespace: str, partition: int, epoch: str, entries: Sequence[JournalEntry]
) -> Commits:
    """What SQL has of these entries of an epoch, and of their records."""
    return Commits(
        lacking(connection, namespace, partition, epoch, entries),
        heads(connection, namespace, [entry.record for entry in entries if entry.record]),
        last_event(connection, namespace, partition, epoch),
    )


def lacking(
    connection: Connection, namespace: str, partition: int, epoch: str, entries: Sequence[JournalEntry]
) -> set[str]:
    """The events of those entries that SQL holds nowhere, without those whose record was erased since.

    Marks, which change nothing, are left out, too.
    """
    q = quarantine.c
    held = _alone(connection, namespace, partition, epoch, entries)
    for chunk in chunks(entries, 500):
        names = _wanted(connection, {(entry.record, entry.version) for entry in chunk})
        held.update(_events_of(connection, namespace, names))
        aside = and_(q.namespace == namespace, q.event.in_([entry.event for entry in chunk]))
        held.update(connection.execute(select(q.event).where(aside)).scalars())
    left = [entry for entry in entries if entry.event not in held]
    erased = _erased(connection, namespace, left)
    left = [entry for entry in left if entry.version > erased.get(entry.record, -1)]
    return {entry.event for entry in left} - _purged(connection, namespace, left)


def _events_of(connection: Connection, namespace: str, wanted: FromClause) -> Iterator[str]:
    """The events of the changes of these versions, in rows and in blocks, and of others that are in those blocks."""
    b = change_blocks.c
    around = and_(b.record == records.c.key, b.first <= wanted.c.version, b.last >= wanted.c.version)
    found = select(b.record, b.last, b.data).select_from(_named(namespace, wanted).outerjoin(change_blocks, around))
    packed = found.distinct().subquery()
    rows = select(changes.c.event, literal(b"", LargeBinary)).select_from(_changes(namespace, wanted))
    # One statement, which sees one moment: rows may become a block meanwhile, and a block rows.
    for event, data in connection.execute(union_all(rows, select(literal("", TEXT), packed.c.data))):
        if data:
            yield from (row.event for row in blocks.unpack_changes(data))
        elif event:
            yield event


def _purged(connection: Connection, namespace: str, entries: Sequence[JournalEntry]) -> set[str]:
    """Those of a version before the oldest that is kept of their record: nothing of them may come back."""
    c = changes.c
    oldest: dict[str, int] = {}
    for chunk in chunks(sorted({entry.record for entry in entries}), 500):
        names = {key: record for record, key in record_index.keys(connection, namespace, chunk).items()}
        for version in (c.version, change_blocks.c.first):
            place = version.table.c.record
            query = select(place, func.min(version)).where(place.in_(names)).group_by(place)
            for key, first in connection.execute(query):
                oldest[names[key]] = min(first, oldest.get(names[key], first))
    return {entry.event for entry in entries if entry.version < oldest.get(entry.record, 0)}


def _alone(
    connection: Connection, namespace: str, partition: int, epoch: str, entries: Sequence[JournalEntry]
) -> set[str]:
    """Those that belong to no record and that SQL has: events that were written alone. Marks have none."""
    e = events.c
    alone = {f"{entry.event.rpartition('.')[0]}.0": entry for entry in entries if not entry.record}
    held = {entry.event for entry in alone.values() if not entry.data}
    for chunk in chunks([entry for entry in alone.values() if entry.data], 500):
        # By their numbers, which the primary key has; of two histories two events may have the same one.
        numbers = [int(unpack(entry.data)[0].name.partition(b" ")[0]) for entry in chunk]
        here = and_(e.namespace == namespace, e.partition == partition, e.epoch == epoch, e.offset.in_(numbers))
        found = connection.execute(select(e.id).where(here)).scalars()
        held.update(alone[id].event for id in found if id in alone)
    return held


def set_aside(
    connection: Connection, namespace: str, partition: int, epoch: str, entries: Sequence[JournalEntry], reason: str
) -> int:
    """Put entries that SQL lacks into quarantine, with the reason; how many those are."""
    # Who erases a record holds these rows, too: then it is seen here to be erased, and its entries stay away.
    named = {entry.record for entry in entries}
    record_index.lock(connection, namespace, named | {record_index.hashed(namespace, each) for each in named})
    lost = lacking(connection, namespace, partition, epoch, entries)
    rows = [
        {
            "namespace": namespace, "partition": partition, "epoch": epoch, "offset": entry.offset,
            "event": entry.event, "record": entry.record, "version": entry.version, "reason": reason,
            "data": entry.data, "time_ms": entry.time_ms,
        }
        for entry in entries if entry.event in lost
    ]  # fmt: skip
    if rows:
        connection.execute(insert(quarantine), rows)
    return len(rows)


def _wanted(connection: Connection, pairs: Iterable[tuple[str, int]]) -> FromClause:
    return listed(connection, {"record": TEXT, "version": BigInteger()}, sorted(pairs))


def _changes(namespace: str, wanted: FromClause) -> Join:
    """The changes of these records and versions, without values where there is none."""
    same = and_(changes.c.record == records.c.key, changes.c.version == wanted.c.version)
    return _named(namespace, wanted).outerjoin(changes, same)


def _named(namespace: str, wanted: FromClause) -> Join:
    # An outer join is done in this order. Of an inner one SQLite takes the list last, for each change that there is.
    return outerjoin(wanted, records, and_(records.c.namespace == namespace, records.c.record == wanted.c.record))


def _erased(connection: Connection, namespace: str, entries: Sequence[JournalEntry]) -> dict[str, int]:
    """Up to which version each of these records was erased, if it was."""
    hashes = {record_index.hashed(namespace, entry.record): entry.record for entry in entries}
    r = records.c
    found: dict[str, int] = {}
    for chunk in chunks(hashes, 500):
        query = select(r.record, r.version).where(r.namespace == namespace, r.record.in_(chunk))
        found.update((hashes[name], version) for name, version in connection.execute(query).all())
    return found
