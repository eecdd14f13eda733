"""Old changes and messages of a record in compressed blocks. Law: a block returns its rows unchanged, byte for byte.

A row is in its table or in a block of its record, never in both. Code that changes rows in a block puts them back first
(`expand`), in the same transaction and with the record locked; the next compaction makes them a block again.

Encrypted values stay encrypted: a block needs no key, and its operations and messages are bytes here.

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

RAW_BYTES = 65_536  # of the rows in a block; a longer row has a block of its own
_AT_ONCE = 4  # blocks in one read
Key = int | ScalarSelect[int]
T = TypeVar("T")


class ChangeRow(NamedTuple):
    """A row of `changes` without a label; rows with labels stay in their table."""

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
    """A row of `messages` that was written with a change, not inherited from an erased or purged record.

    `time_ms` is the change's time, -1 if that was purged. A block keeps it, as the change may be in another block.
    """

    seq: int
    version: int
    time_ms: int
    data: bytes


class Kind(NamedTuple):
    """The differences between blocks of changes and of messages. Rows begin with their number in the record."""

    table: Table
    end: Column[Any]
    beyond: int  # 1 if the end is exclusive
    number: Column[Any]
    columns: list[Column[Any]]  # of the rows that are put back
    put_back: Callable[[Any], tuple[Any, ...]]
    pack: Callable[[Iterable[Any]], bytes]
    unpack: Callable[[bytes], Sequence[Any]]


def _pack_changes(rows: Iterable[ChangeRow]) -> bytes:
    return zlib.compress(pack((b"c", json.dumps(row[:-1]).encode(), row.data) for row in rows))


def unpack_changes(data: bytes) -> list[ChangeRow]:
    """The changes in a block, ascending. Raises CorruptState if the bytes are not a block."""
    return _unpacked(data, lambda op: ChangeRow._make((*json.loads(op.name), op.value)))


def _pack_messages(rows: Iterable[MessageRow]) -> bytes:
    return zlib.compress(pack((b"m", b"%d %d %d" % row[:-1], row.data) for row in rows))


def unpack_messages(data: bytes) -> list[MessageRow]:
    """The messages in a block, ascending. Raises CorruptState if the bytes are not a block."""
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
    """At most `limit` changes of a record between two versions, both exclusive, ascending.

    With `most` they end before the rows, or the blocks, exceed that many bytes; the first change always comes.
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
    """The version up to which (exclusive) the rows are at most `most` bytes, or one row."""
    c = changes.c
    query = select(c.version, func.length(c.data)).where(c.record == key, c.version > after, c.version < before)
    size = 0
    for version, length in sql.execute(query.order_by(c.version).limit(limit)):
        if size and size + length > most:
            return int(version)
        size += length
    return before


def downwards(sql: Sql, key: Key, last: int) -> Iterator[list[ChangeRow]]:
    """The blocks of a record up to a version, the newest first; each ascending, without newer changes."""
    b = change_blocks.c
    query = select(b.first, b.data).where(b.record == key).order_by(b.last.desc()).limit(_AT_ONCE)
    while found := sql.execute(query.where(b.first <= last)).all():
        for first, data in found:
            yield [row for row in unpack_changes(data) if row.version <= last]
            last = first - 1


def _upwards(sql: Sql, key: Key, after: int, before: int) -> Iterator[tuple[int, bytes]]:
    """The blocks with changes between two versions, the oldest first: the first version of each, and its bytes."""
    b = change_blocks.c
    query = select(b.last, b.first, b.data).where(b.record == key, b.first < before).order_by(b.last).limit(_AT_ONCE)
    while found := sql.execute(query.where(b.last > after)).all():
        yield from ((first, data) for _, first, data in found)
        after = found[-1].last


def operations(sql: Sql, rows: Select[Any], blocks: Select[Any]) -> Iterator[tuple[Any, ...]]:
    """Run two queries, of rows of `changes` and of blocks, as one statement; each row is `..., epoch, version, data`.

    Both begin with the caller's columns. Blocks are returned whole, so some rows may be outside the requested versions.
    """
    both = union_all(rows.add_columns(false().label("packed")), blocks.add_columns(true().label("packed")))
    for row in sql.execute(both).all():
        if row.packed:
            yield from ((*row[:-4], each.epoch, each.version, each.data) for each in unpack_changes(row[-2]))
        else:
            yield row[:-1]


class Run(NamedTuple):
    """The messages `start` to `stop` (exclusive) that are stored under any of these records."""

    records: Collection[int]
    start: int
    stop: int


def messages_in(sql: Sql, runs: Sequence[Run], *besides: ColumnElement[bool]) -> Iterator[tuple[int, int, bytes]]:
    """Select messages by ranges, from rows and from blocks: the record's key, the number, the bytes. One statement.

    `besides`: conditions for additional rows.
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
            # Others in the block were not requested: another record may have its own messages of these numbers.
            if any(run.start <= row.seq < run.stop and record in run.records for run in runs):
                yield record, row.seq, row.data


def bodies(sql: Sql, key: int, numbers: Collection[int]) -> dict[int, bytes]:
    """These messages, as far as they are stored under this record."""
    found: dict[int, bytes] = {}
    for chunk in chunks(sorted(numbers), 500):
        # The numbers are nearly contiguous: only numbers of rolled back changes are missing.
        wanted = set(chunk)
        run = Run({key}, chunk[0], chunk[-1] + 1)
        found.update((seq, data) for _, seq, data in messages_in(sql, [run]) if seq in wanted)
    return found


def lengths(sql: Sql, some: Collection[int], start: int, stop: int) -> dict[int, int]:
    """The sizes in bytes of the messages `start` to `stop` (exclusive) that are stored under any of these records.

    Sizes in a block are not known without unpacking, so an upper limit is returned: the largest integer for a block
    with one message.
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
    """Put back the rows of the blocks that match. Their records are locked."""
    rows = sql.execute(select(kind.table.c.record, kind.table.c.data).where(which)).all()
    if not rows:
        return
    found = [(record, row) for record, data in rows for row in kind.unpack(data)]
    sql.execute(delete(kind.table).where(which))
    table = kind.number.table
    assert isinstance(table, Table)
    sql.add(table, sorted((record, *kind.put_back(row)) for record, row in found), [table.c.record, *kind.columns])
