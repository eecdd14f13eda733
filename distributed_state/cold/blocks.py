"""Old changes and messages of a record in compressed blocks. Law: a block says what its rows said, to the byte.

A row stands in its table or in a block of its record, never in both. Who changes what is in a block puts its rows back
first (`expand`), in the same transaction and with the record locked; the next compaction makes them a block again.

What is encrypted stays encrypted: a block needs no key, and its steps and messages are bytes here.

Design: section 9.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import (
    Column,
    ColumnElement,
    ScalarSelect,
    Select,
    Table,
    and_,
    delete,
    false,
    func,
    or_,
    select,
    true,
    union_all,
)

from distributed_state.cold.engine import Sql, chunks
from distributed_state.cold.record_index import LARGEST
from distributed_state.cold.tables import change_blocks, changes, message_blocks, messages
from distributed_state.errors import CorruptState
from distributed_state.values.journal import Op, pack, unpack

RAW_BYTES = 65_536  # of the rows in a block; a row that is longer has a block of its own
_AT_ONCE = 4  # blocks that a walk reads in one statement
Key = int | ScalarSelect[int]
T = TypeVar("T")


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


class Kind(NamedTuple):
    """What blocks of changes and those of messages differ in. Rows begin with their number in the record."""

    table: Table
    end: Column[Any]
    beyond: int  # 1 if the end is exclusive
    number: Column[Any]
    columns: list[Column[Any]]  # of rows as they are put back
    put_back: Callable[[Any], tuple[Any, ...]]
    pack: Callable[[Iterable[Any]], bytes]
    unpack: Callable[[bytes], Sequence[Any]]


def _pack_changes(rows: Iterable[ChangeRow]) -> bytes:
    return zlib.compress(pack((b"c", json.dumps(row[:-1]).encode(), row.data) for row in rows))


def unpack_changes(data: bytes) -> list[ChangeRow]:
    """The changes in a block, ascending. Raises CorruptState if the bytes are none."""
    return _unpacked(data, lambda op: ChangeRow._make((*json.loads(op.name), op.value)))


def _pack_messages(rows: Iterable[MessageRow]) -> bytes:
    return zlib.compress(pack((b"m", b"%d %d %d" % row[:-1], row.data) for row in rows))


def unpack_messages(data: bytes) -> list[MessageRow]:
    """The messages in a block, ascending. Raises CorruptState if the bytes are none."""
    return _unpacked(data, lambda op: MessageRow._make((*map(int, op.name.split(b" ")), op.value)))


def _unpacked(data: bytes, row: Callable[[Op], T]) -> list[T]:
    try:
        return [row(op) for op in unpack(zlib.decompress(data))]
    except (zlib.error, ValueError, TypeError) as error:
        raise CorruptState(f"a block of {len(data)} bytes cannot be read: {error}", data=data) from error


CHANGE = [changes.c[name] for name in ChangeRow._fields]
CHANGES = Kind(change_blocks, change_blocks.c.last, 0, changes.c.version, CHANGE, tuple, _pack_changes, unpack_changes)
MESSAGES = Kind(
    message_blocks,
    message_blocks.c.stop,
    1,
    messages.c.seq,
    [messages.c.seq, messages.c.version, messages.c.data],
    lambda row: (row.seq, row.version, row.data),
    _pack_messages,
    unpack_messages,
)


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
    for kind in (CHANGES, MESSAGES):
        expand_some(sql, kind, sql.among(kind.table.c.record, some))


def expand_some(sql: Sql, kind: Kind, which: ColumnElement[bool]) -> None:
    """Put back the rows of the blocks that fit. Their records are locked."""
    rows = sql.execute(select(kind.table.c.record, kind.table.c.data).where(which)).all()
    if not rows:
        return
    found = [(record, row) for record, data in rows for row in kind.unpack(data)]
    sql.execute(delete(kind.table).where(which))
    table = kind.number.table
    assert isinstance(table, Table)
    sql.add(table, sorted((record, *kind.put_back(row)) for record, row in found), [table.c.record, *kind.columns])
