"""Reads commits back as they were written, and says which of some commits SQL has.

Law: what messages and items said comes from where those are kept. A commit is known by its event, never by record and
version.

Design: sections 9, 14.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from sqlalchemy import (
    BigInteger,
    FromClause,
    Join,
    LargeBinary,
    and_,
    func,
    literal,
    outerjoin,
    select,
    union_all,
)

from distributed_state.cold import blocks, record_index, record_items
from distributed_state.cold.engine import Sql, chunks
from distributed_state.cold.epochs import last_event
from distributed_state.cold.record_index import key_of, keys
from distributed_state.cold.tables import TEXT, change_blocks, changes, events, quarantine, records
from distributed_state.cold.values import RESOLVED, Archived, Commits
from distributed_state.values.journal import JournalEntry, Op, item_of, pack, unpack
from distributed_state.values.model import unescape

# Reading


def entries(
    sql: Sql,
    record: str,
    *,
    after: int = 0,
    before: int | None = None,
    limit: int | None = None,
    most: int | None = None,
) -> list[JournalEntry]:
    """The changes between two versions, both exclusive, ascending, of about `most` bytes together, but at least one."""
    key = keys(sql, [record]).get(record)
    if key is None:
        return []
    return [entry for _, entry in whole(sql, key, record, after, before, limit, most)]


def outlines(
    sql: Sql,
    record: str,
    *,
    after: int = 0,
    before: int | None = None,
    limit: int | None = None,
    most: int | None = None,
) -> list[JournalEntry]:
    """The changes between two versions as `entries` has them, without what their messages and items say."""
    key = keys(sql, [record]).get(record)
    rows = [] if key is None else blocks.changes_between(sql, key, after, before, limit, most)
    return [_entry(record, row, row.data) for row in rows]


def checkpoints(
    sql: Sql,
    record: str,
    after: int = 0,
    before: int | None = None,
    limit: int | None = None,
    order: str = "asc",
) -> list[tuple[str, int, int]]:
    """The labels of a record with their versions and times: between two versions (exclusive), in this order."""
    c = changes.c
    query = select(c.label, c.version, c.time_ms).where(c.record == key_of(sql, record), c.label.is_not(None))
    if after:
        query = query.where(c.version > after)
    if before is not None:
        query = query.where(c.version < before)
    rows = sql.execute(query.order_by(c.version if order == "asc" else c.version.desc()).limit(limit))
    return [(unescape(label), version, time_ms) for label, version, time_ms in rows]


def whole(
    sql: Sql,
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
    rows = blocks.changes_between(sql, key, after, before, limit, most)
    if most is not None:
        rows = _first(sql, key, rows, most)
    for chunk in chunks(rows, 500):
        apart = [(row.version, op) for row in chunk for op in _apart(row.data)]
        said = blocks.bodies(sql, key, [int(op.name) for _, op in apart if op.kind == b"m"])
        put = record_items.bodies(sql, key, [(*item_of(op.name), at) for at, op in apart if op.kind == b"p"])
        found += [(row.epoch, _entry(record, row, _together(row.version, row.data, said, put))) for row in chunk]
    return found


def _entry(record: str, row: blocks.ChangeRow, steps: bytes) -> JournalEntry:
    return JournalEntry(
        row.offset, row.event, record, row.version, row.time_ms, row.kind, row.actor, row.token, steps, total_bytes=0
    )


def _first(sql: Sql, key: int, rows: list[blocks.ChangeRow], most: int) -> list[blocks.ChangeRow]:
    """The first of these changes: `most` bytes together with what is kept apart, or one."""
    apart = [_apart(row.data) for row in rows]
    numbers = [int(op.name) for ops in apart for op in ops if op.kind == b"m"]
    said = blocks.lengths(sql, [key], min(numbers), max(numbers) + 1) if numbers else {}
    named = [
        [(*item_of(op.name), row.version) for op in ops if op.kind == b"p"]
        for row, ops in zip(rows, apart, strict=True)
    ]
    put = record_items.lengths(sql, key, chain.from_iterable(named))
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


def _together(version: int, data: bytes, said: Mapping[int, bytes], put: Mapping[record_items.Name, bytes]) -> bytes:
    if not _apart(data):
        return data

    def whole(op: Op) -> bytes:
        if op.kind == b"m":
            return op.value or said.get(int(op.name), b"")
        return op.value or put.get((*item_of(op.name), version), b"") if op.kind == b"p" else op.value

    return pack(op._replace(value=whole(op)) for op in unpack(data))


# Which of some commits SQL has


def holds(sql: Sql, record: str, version: int, event: str) -> bool:
    """Whether this very change was archived, or what it did was, with a later version."""
    q = quarantine.c
    kept = blocks.changes_between(sql, key_of(sql, record), version - 1, version + 1, None)
    if event in {row.event for row in kept}:
        return True
    resolved = select(q.id).where(q.namespace == sql.namespace, q.event == event, q.reason == RESOLVED)
    return sql.execute(resolved).first() is not None


def known_commits(sql: Sql, partition: int, epoch: str, entries: Sequence[JournalEntry]) -> Commits:
    """What SQL has of these entries of an epoch, and of their records."""
    return Commits(
        lacking(sql, partition, epoch, entries),
        heads(sql, [entry.record for entry in entries if entry.record]),
        last_event(sql, partition, epoch),
    )


def heads(sql: Sql, wanted: Iterable[str]) -> dict[str, Archived]:
    """How far each record is archived; an erased one up to the version that was erased. The others are left out."""
    c = changes.c
    found: dict[str, Archived] = {}
    for chunk in chunks(sorted(set(wanted)), 500):
        hashes = {record_index.hashed(sql.namespace, record): record for record in chunk}
        r = records.c
        query = select(r.record, r.version, r.epoch).where(
            r.namespace == sql.namespace, r.record.in_([*chunk, *hashes])
        )
        for row in sql.execute(query).all():
            record = hashes.get(row.record, row.record)
            # The row of the record itself wins: one that was erased may have begun again.
            if row.record == record or record not in found:
                found[record] = Archived(row.version, row.epoch, 0, "")
        names = _wanted(sql, ((record, found[record].version) for record in chunk if record in found))
        at = select(names.c.record, c.version, c.epoch, c.offset, c.event).select_from(_changes(sql, names))
        for record, *head in sql.execute(at).all():
            if head[0] is not None:
                found[record] = Archived(*head)
    return found


def lacking(sql: Sql, partition: int, epoch: str, entries: Sequence[JournalEntry]) -> set[str]:
    """The events of those entries that SQL holds nowhere, without those whose record was erased since.

    Marks, which change nothing, are left out, too.
    """
    q = quarantine.c
    held = _alone(sql, partition, epoch, entries)
    for chunk in chunks(entries, 500):
        names = _wanted(sql, {(entry.record, entry.version) for entry in chunk})
        held.update(_events_of(sql, names))
        aside = and_(q.namespace == sql.namespace, q.event.in_([entry.event for entry in chunk]))
        held.update(sql.execute(select(q.event).where(aside)).scalars())
    left = [entry for entry in entries if entry.event not in held]
    erased = _erased(sql, left)
    left = [entry for entry in left if entry.version > erased.get(entry.record, -1)]
    return {entry.event for entry in left} - _purged(sql, left)


def _events_of(sql: Sql, wanted: FromClause) -> Iterator[str]:
    """The events of the changes of these versions, in rows and in blocks, and of others that are in those blocks."""
    b = change_blocks.c
    around = and_(b.record == records.c.key, b.first <= wanted.c.version, b.last >= wanted.c.version)
    found = select(b.record, b.last, b.data).select_from(_named(sql, wanted).outerjoin(change_blocks, around))
    packed = found.distinct().subquery()
    rows = select(changes.c.event, literal(b"", LargeBinary)).select_from(_changes(sql, wanted))
    # One statement, which sees one moment: rows may become a block meanwhile, and a block rows.
    for event, data in sql.execute(union_all(rows, select(literal("", TEXT), packed.c.data))):
        if data:
            yield from (row.event for row in blocks.unpack_changes(data))
        elif event:
            yield event


def _purged(sql: Sql, entries: Sequence[JournalEntry]) -> set[str]:
    """Those of a version before the oldest that is kept of their record: nothing of them may come back."""
    c = changes.c
    oldest: dict[str, int] = {}
    for chunk in chunks(sorted({entry.record for entry in entries}), 500):
        names = {key: record for record, key in record_index.keys(sql, chunk).items()}
        for version in (c.version, change_blocks.c.first):
            place = version.table.c.record
            query = select(place, func.min(version)).where(place.in_(names)).group_by(place)
            for key, first in sql.execute(query):
                oldest[names[key]] = min(first, oldest.get(names[key], first))
    return {entry.event for entry in entries if entry.version < oldest.get(entry.record, 0)}


def _alone(sql: Sql, partition: int, epoch: str, entries: Sequence[JournalEntry]) -> set[str]:
    """Those that belong to no record and that SQL has: events that were written alone. Marks have none."""
    e = events.c
    alone = {f"{entry.event.rpartition('.')[0]}.0": entry for entry in entries if not entry.record}
    held = {entry.event for entry in alone.values() if not entry.data}
    for chunk in chunks([entry for entry in alone.values() if entry.data], 500):
        # By their numbers, which the primary key has; of two histories two events may have the same one.
        numbers = [int(unpack(entry.data)[0].name.partition(b" ")[0]) for entry in chunk]
        here = and_(e.namespace == sql.namespace, e.partition == partition, e.epoch == epoch, e.offset.in_(numbers))
        found = sql.execute(select(e.id).where(here)).scalars()
        held.update(alone[id].event for id in found if id in alone)
    return held


def _wanted(sql: Sql, pairs: Iterable[tuple[str, int]]) -> FromClause:
    return sql.listed({"record": TEXT, "version": BigInteger()}, sorted(pairs))


def _changes(sql: Sql, wanted: FromClause) -> Join:
    """The changes of these records and versions, without values where there is none."""
    same = and_(changes.c.record == records.c.key, changes.c.version == wanted.c.version)
    return _named(sql, wanted).outerjoin(changes, same)


def _named(sql: Sql, wanted: FromClause) -> Join:
    # An outer join is done in this order. Of an inner one SQLite takes the list last, for each change that there is.
    return outerjoin(wanted, records, and_(records.c.namespace == sql.namespace, records.c.record == wanted.c.record))


def _erased(sql: Sql, entries: Sequence[JournalEntry]) -> dict[str, int]:
    """Up to which version each of these records was erased, if it was."""
    hashes = {record_index.hashed(sql.namespace, entry.record): entry.record for entry in entries}
    r = records.c
    found: dict[str, int] = {}
    for chunk in chunks(hashes, 500):
        query = select(r.record, r.version).where(r.namespace == sql.namespace, r.record.in_(chunk))
        found.update((hashes[name], version) for name, version in sql.execute(query).all())
    return found
