"""Old changes and messages of a record in compressed blocks. Law: a block says what its rows said, to the byte.

A row stands in its table or in a block of its record, never in both. Who changes what is in a block puts its rows back
first (`expand`), in the same transaction and with the record locked; the next compaction makes them a block again.

What is encrypted stays encrypted: a block needs no key, and its steps and messages are bytes here.

Design: section 9.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    ScalarSelect,
    Select,
    Table,
    and_,
    case,
    delete,
    false,
    func,
    or_,
    select,
    true,
    union_all,
)

from distributed_state.cold.engine import Part, Row, Sql, chunks
from distributed_state.cold.entries import LARGEST
from distributed_state.cold.record_index import following
from distributed_state.cold.tables import change_blocks, changes, message_blocks, messages, records
from distributed_state.cold.values import Compacted
from distributed_state.errors import CorruptState
from distributed_state.values.journal import pack, unpack

RAW_BYTES = 65_536  # of the rows in a block; a row that is longer has a block of its own
_AT_ONCE = 4  # blocks that a walk reads in one statement
_PAGE = 500  # records that are looked at in one read
_ROWS = 1000  # changes in one transaction
_LEAST = 4  # changes of a record that are worth a block
_ROW_BYTES = 64  # what a row takes beside its data, before it is compressed
Key = int | ScalarSelect[int]


class ChangeRow(NamedTuple):
    """A row of `changes` that has no label; those that have one stay in their table."""

    version: int
    offset: int
    time_ms: int
    token: int
    epoch: str
    event: str
    kind: str
    actor: str
    data: bytes


class MessageRow(NamedTuple):
    """A row of `messages` that was written with a change, and not handed down.

    `time_ms` is that of the change, -1 if it was purged. A block keeps it, as its change may be in another one.
    """

    seq: int
    version: int
    time_ms: int
    data: bytes


CHANGE = [changes.c[name] for name in ChangeRow._fields]
_MESSAGE = [messages.c[name] for name in ("record", "seq", "version", "data")]
_Row = ChangeRow | MessageRow


def pack_changes(rows: Iterable[ChangeRow]) -> bytes:
    """The bytes of a block of changes."""
    return zlib.compress(pack((b"c", json.dumps(row[:-1]).encode(), row.data) for row in rows))


def unpack_changes(data: bytes) -> list[ChangeRow]:
    """The changes in a block, ascending. Raises CorruptState if the bytes are none."""
    try:
        return [ChangeRow._make((*json.loads(op.name), op.value)) for op in unpack(zlib.decompress(data))]
    except (zlib.error, ValueError, TypeError) as error:
        raise CorruptState(f"a block of {len(data)} bytes cannot be read: {error}", data=data) from error


def pack_messages(rows: Iterable[MessageRow]) -> bytes:
    """The bytes of a block of messages."""
    return zlib.compress(pack((b"m", b"%d %d %d" % row[:-1], row.data) for row in rows))


def unpack_messages(data: bytes) -> list[MessageRow]:
    """The messages in a block, ascending. Raises CorruptState if the bytes are none."""
    try:
        return [MessageRow._make((*map(int, op.name.split(b" ")), op.value)) for op in unpack(zlib.decompress(data))]
    except (zlib.error, ValueError, TypeError) as error:
        raise CorruptState(f"a block of {len(data)} bytes cannot be read: {error}", data=data) from error


# Reading


def changes_between(
    sql: Sql, key: Key, after: int, before: int | None, limit: int | None, most: int | None = None
) -> list[ChangeRow]:
    """The changes of a record between two versions, both exclusive, ascending, at most so many.

    With `most` they end where the rows, or the blocks, would be more bytes than that; the first is there in any case.
    """
    c = changes.c
    end = LARGEST if before is None else before
    if most is not None:
        end = _end(sql, key, after, end, limit, most)
    query = select(*CHANGE).where(c.record == key, c.version > after, c.version < end)
    found = [ChangeRow(*row) for row in sql.execute(query.order_by(c.version).limit(limit))]
    size = 0
    for first, data in _upwards(sql, key, after, end):
        if limit is not None and len(found) >= limit and found[-1].version < first:
            break
        some = [row for row in unpack_changes(data) if after < row.version < end]
        size += sum(len(row.data) for row in some)
        if found and most is not None and size > most:
            found = [row for row in found if row.version < first] or some[:1]
            break
        found += some
        if limit is not None:
            found = sorted(found)[:limit]
    return sorted(found)


def _end(sql: Sql, key: Key, after: int, before: int, limit: int | None, most: int) -> int:
    """The version before which rows are `most` bytes together, or one row."""
    c = changes.c
    query = select(c.version, func.length(c.data)).where(c.record == key, c.version > after, c.version < before)
    size = 0
    for version, length in sql.execute(query.order_by(c.version).limit(limit)):
        if size and size + length > most:
            return int(version)
        size += length
    return before


def downwards(sql: Sql, key: Key, last: int) -> Iterator[list[ChangeRow]]:
    """The blocks of a record with changes up to a version, the newest first; each ascending, without what is newer."""
    b = change_blocks.c
    query = select(b.first, b.data).where(b.record == key).order_by(b.last.desc()).limit(_AT_ONCE)
    while found := sql.execute(query.where(b.first <= last)).all():
        for first, data in found:
            yield [row for row in unpack_changes(data) if row.version <= last]
            last = first - 1


def _upwards(sql: Sql, key: Key, after: int, before: int) -> Iterator[tuple[int, bytes]]:
    """The blocks with changes between two versions, the oldest first: the first version in each, and its bytes."""
    b = change_blocks.c
    query = select(b.last, b.first, b.data).where(b.record == key, b.first < before).order_by(b.last).limit(_AT_ONCE)
    while found := sql.execute(query.where(b.last > after)).all():
        yield from ((first, data) for _, first, data in found)
        after = found[-1].last


def steps(sql: Sql, rows: Select[Any], blocks: Select[Any]) -> Iterator[tuple[Any, ...]]:
    """What two queries find in one statement, of rows of `changes` and of blocks: `..., epoch, version, data` each.

    Both begin with columns of the caller's own. A block comes whole: some may lie outside of what was asked for.
    """
    both = union_all(rows.add_columns(false().label("packed")), blocks.add_columns(true().label("packed")))
    for row in sql.execute(both).all():
        if row.packed:
            yield from ((*row[:-4], each.epoch, each.version, each.data) for each in unpack_changes(row[-2]))
        else:
            yield row[:-1]


class Run(NamedTuple):
    """The messages `start` to `stop` (exclusive) that are kept under any of these records."""

    records: Collection[int]
    start: int
    stop: int


def messages_in(sql: Sql, runs: Sequence[Run], *besides: ColumnElement[bool]) -> Iterator[tuple[int, int, bytes]]:
    """The messages of runs, in rows and in blocks: number of the record, of the message, and bytes. One statement.

    `besides`: rows that are asked for as well.
    """
    m, b = messages.c, message_blocks.c
    mine = [and_(m.record.in_(run.records), m.seq >= run.start, m.seq < run.stop) for run in runs]
    packed = [and_(b.record.in_(run.records), b.stop > run.start, b.start < run.stop) for run in runs]
    rows = select(m.record, m.seq, m.data, false().label("packed")).where(or_(*mine, *besides))
    both = union_all(rows, select(b.record, b.stop, b.data, true().label("packed")).where(or_(*packed)))
    for record, seq, data, is_block in sql.execute(both):
        if not is_block:
            yield record, seq, data
            continue
        for row in unpack_messages(data):
            # Its neighbours in the block are not asked for: another record may have its own of that number.
            if any(run.start <= row.seq < run.stop and record in run.records for run in runs):
                yield record, row.seq, row.data


def bodies(sql: Sql, key: int, numbers: Collection[int]) -> dict[int, bytes]:
    """What these messages say, of those that are kept under this record."""
    found: dict[int, bytes] = {}
    for chunk in chunks(sorted(numbers), 500):
        # They follow each other, but for those of rolled back changes in between.
        wanted = set(chunk)
        run = Run({key}, chunk[0], chunk[-1] + 1)
        found.update((seq, data) for _, seq, data in messages_in(sql, [run]) if seq in wanted)
    return found


def lengths(sql: Sql, some: Collection[int], start: int, stop: int) -> dict[int, int]:
    """How many bytes the messages `start` to `stop` (exclusive) have that are kept under any of these records.

    Of one that has a block of its own that is not known without unpacking it: it counts as the largest there can be.
    """
    m, b = messages.c, message_blocks.c
    rows = select(m.seq, func.length(m.data)).where(m.record.in_(some), m.seq >= start, m.seq < stop)
    found: dict[int, int] = {}
    for seq, length in sql.execute(rows):
        found[seq] = max(length, found.get(seq, 0))
    packed = select(b.start, b.stop, b.count).where(b.record.in_(some), b.stop > start, b.start < stop)
    for first, end, count in sql.execute(packed):
        each = RAW_BYTES // count if count > 1 else LARGEST
        found |= {seq: max(each, found.get(seq, 0)) for seq in range(max(first, start), min(end, stop))}
    return found


def first_since(sql: Sql, key: Key, start: int, stop: int, since_ms: int) -> int | None:
    """The first of these messages in blocks of a record that was committed at this time or later."""
    b = message_blocks.c
    query = select(b.data).where(b.record == key, b.stop > start, b.start < stop, b.newest_ms >= since_ms)
    for data in sql.execute(query.order_by(b.stop)).scalars():
        for row in unpack_messages(data):
            if start <= row.seq < stop and row.time_ms >= since_ms:
                return row.seq
    return None


# Putting back


def expand(sql: Sql, some: Sequence[int]) -> None:
    """Put back the rows of all blocks of these records, which are locked."""
    b = change_blocks.c
    expand_changes(sql, sql.among(b.record, some))
    b = message_blocks.c
    expand_messages(sql, sql.among(b.record, some))


def expand_changes(sql: Sql, which: ColumnElement[bool]) -> None:
    """Put back the rows of the blocks of changes that fit. Their records are locked."""
    b = change_blocks.c
    rows = sql.execute(select(b.record, b.data).where(which)).all()
    if not rows:
        return
    found = [(record, row) for record, data in rows for row in unpack_changes(data)]
    sql.execute(delete(change_blocks).where(which))
    sql.add(changes, sorted((record, *row) for record, row in found), [changes.c.record, *CHANGE])


def expand_messages(sql: Sql, which: ColumnElement[bool]) -> None:
    """Put back the rows of the blocks of messages that fit. Their records are locked."""
    b = message_blocks.c
    rows = sql.execute(select(b.record, b.data).where(which)).all()
    if not rows:
        return
    found = [(record, row) for record, data in rows for row in unpack_messages(data)]
    sql.execute(delete(message_blocks).where(which))
    sql.add(messages, sorted((record, row.seq, row.version, row.data) for record, row in found), _MESSAGE)


# Compaction
#
# Whoever reads notices nothing, and no archiver waits for long. A chunk of records is one transaction. Records that
# somebody else has locked are left for the next time. The newest change of a record stays a row: it tells how far the
# record is archived. So do changes with a label, by which they are found, and messages that were handed down, which are
# told from others by their version 0.


def compact_page(part: Part, before_ms: int, *, after: int = 0) -> tuple[Compacted, int | None]:
    """Pack old changes and messages of some records into compressed blocks, which are read as their rows were.

    Returns how much, and what `after` is for the next ones; None: those were the last.
    """
    total = Compacted(0, 0, 0)
    with part.database.long_read(part.namespace) as sql:
        counts, following = _candidates(sql, before_ms, after)
    for some in _portions(counts):
        left = sum(counts[key] for key in some)
        while left > 0:
            with part.database.long_write(part.namespace) as sql:
                moved = compact(sql, some, before_ms)
            total += moved
            left = left - _ROWS if moved.changes else 0
    return total, following


def _candidates(sql: Sql, before_ms: int, after: int) -> tuple[dict[int, int], int | None]:
    """Of the next records in order of their keys, those with enough old rows, and how many; and where to go on."""
    c = changes.c
    keys = [row.key for row in following(sql, after, before_ms, _PAGE)]
    old = and_(sql.among(c.record, keys), c.time_ms < before_ms, c.label.is_(None))
    count = select(c.record, func.count().label("rows")).where(old).group_by(c.record).having(func.count() > _LEAST)
    found = {row.record: int(row.rows) for row in sql.execute(count.order_by(c.record))}
    return found, keys[-1] if len(keys) == _PAGE else None


def _portions(counts: Mapping[int, int]) -> Iterator[list[int]]:
    """The records in lists of about so many rows; one that has more is alone."""
    some: list[int] = []
    for key, count in counts.items():
        if some and sum(counts[each] for each in some) + count > _ROWS:
            yield some
            some = []
        some.append(key)
    if some:
        yield some


def compact(sql: Sql, some: Sequence[int], before_ms: int) -> Compacted:
    """Pack old rows of these records, the oldest ones if there are many."""
    r = records.c
    query = select(r.key, r.version).where(sql.among(r.key, some))
    heads = dict(tuple(row) for row in sql.execute(query.with_for_update(skip_locked=True)))
    last = _bounds(sql, heads, before_ms)
    found = _rows(sql, last)
    if not found:
        return Compacted(0, 0, 0)
    said = _messages(sql, {record: rows[-1].version for record, rows in found.items()})
    newest = _newest(sql, _CHANGES, found), _newest(sql, _MESSAGES, said)
    late = {record for record, rows in newest[0].items() if rows[-1][0] >= found[record][0][0]}
    late |= {record for record, rows in newest[1].items() if rows[-1][0] >= said[record][0][0]}
    # Something was put back, or came late. As rows all of it is packed in order, the next time.
    expand(sql, sorted(late))
    found = {record: rows for record, rows in found.items() if record not in late}
    said = {record: rows for record, rows in said.items() if record not in late}
    packed = _pack(sql, _CHANGES, found, newest[0])
    return Compacted(len(found), packed, _pack(sql, _MESSAGES, said, newest[1]))


def _bounds(sql: Sql, heads: Mapping[int, int], before_ms: int) -> dict[int, int]:
    """Up to which version each record may be packed: all of it is old, and is not its head."""
    c = changes.c
    newer = func.min(case((c.time_ms >= before_ms, c.version)))
    query = select(c.record, newer).where(sql.among(c.record, list(heads))).group_by(c.record)
    # The server's clock may have gone back: a change that is newer keeps those after it, whatever their time.
    return {
        record: min(heads[record], heads[record] if first is None else first) - 1
        for record, first in sql.execute(query)
    }


def _rows(sql: Sql, last: Mapping[int, int]) -> dict[int, list[ChangeRow]]:
    """The oldest rows of `changes` up to these versions, by record."""
    c = changes.c
    query = _upto(sql, select(c.record, *CHANGE), c.record, c.version, last).where(c.label.is_(None))
    if len(last) == 1:
        query = query.order_by(c.version).limit(_ROWS)  # of several there are no more, see `_portions`
    # Sorted here: asked for the first so many of several records, PostgreSQL walks all of `changes` in that order.
    rows = sorted(map(tuple, sql.execute(query)), key=itemgetter(0, 1))
    return {record: [ChangeRow(*row) for _, *row in group] for record, group in groupby(rows, itemgetter(0))}


def _messages(sql: Sql, last: Mapping[int, int]) -> dict[int, list[MessageRow]]:
    """The rows of `messages` that were written up to these versions, with their times, by record."""
    c, m = changes.c, messages.c
    query = _upto(
        sql, select(m.record, m.seq, m.version, func.coalesce(c.time_ms, -1), m.data), m.record, m.version, last
    )
    query = query.outerjoin(changes, and_(c.record == m.record, c.version == m.version)).where(m.version > 0)
    rows = sorted(map(tuple, sql.execute(query)), key=itemgetter(0, 1))
    return {record: [MessageRow(*row) for _, *row in group] for record, group in groupby(rows, itemgetter(0))}


def _upto(
    sql: Sql, query: Select[Any], record: Column[Any], version: Column[Any], last: Mapping[int, int]
) -> Select[Any]:
    """Of a query those rows of these records that are not beyond a version."""
    upto = sql.listed({"key": BigInteger(), "last": BigInteger()}, list(last.items()))
    return query.join_from(record.table, upto, and_(record == upto.c.key, version <= upto.c.last))


class _Kind(NamedTuple):
    """What blocks of changes and those of messages differ in. Rows begin with their number in the record."""

    blocks: Table
    end: Column[Any]
    beyond: int  # 1 if the end is exclusive
    number: Column[Any]
    unpack: Callable[[bytes], Sequence[_Row]]
    pack: Callable[[Iterable[Any]], bytes]


_CHANGES = _Kind(change_blocks, change_blocks.c.last, 0, changes.c.version, unpack_changes, pack_changes)
_MESSAGES = _Kind(message_blocks, message_blocks.c.stop, 1, messages.c.seq, unpack_messages, pack_messages)


def _newest(sql: Sql, kind: _Kind, some: Iterable[int]) -> dict[int, Sequence[_Row]]:
    """What is in the newest block of each of these records."""
    b = kind.blocks.c
    newest = select(b.record, func.max(kind.end).label("end")).where(sql.among(b.record, list(some)))
    top = newest.group_by(b.record).subquery()
    query = select(b.record, b.data).join(top, and_(b.record == top.c.record, kind.end == top.c.end))
    return {record: kind.unpack(data) for record, data in sql.execute(query)}


def _pack(sql: Sql, kind: _Kind, found: Mapping[int, Sequence[_Row]], newest: Mapping[int, Sequence[_Row]]) -> int:
    """Move rows, ascending, into blocks that go on from the newest there is; how many those are."""
    added: list[Row] = []
    for record, rows in found.items():
        for some in _cut([*newest.get(record, ()), *rows]):
            times = [row.time_ms for row in some]
            place = (record, some[-1][0] + kind.beyond, some[0][0])
            added.append((*place, min(times), max(times), len(some), kind.pack(some)))
    replaced = [{"r": record, "n": newest[record][-1][0] + kind.beyond} for record in found if record in newest]
    sql.remove(kind.blocks, replaced, lambda block: and_(kind.blocks.c.record == block.r, kind.end == block.n))
    table = kind.number.table
    assert isinstance(table, Table)
    gone = [{"r": record, "n": row[0]} for record, rows in found.items() for row in rows]
    sql.remove(table, gone, lambda row: and_(table.c.record == row.r, kind.number == row.n))
    sql.add(kind.blocks, added)
    return len(gone)


def _cut(rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    """The rows in lists that fit into a block."""
    some: list[_Row] = []
    size = 0
    for row in rows:
        bytes_ = len(row.data) + _ROW_BYTES
        if some and size + bytes_ > RAW_BYTES:
            yield some
            some, size = [], 0
        some.append(row)
        size += bytes_
    if some:
        yield some
