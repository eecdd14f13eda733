"""Packs old changes and messages into blocks. Law: whoever reads notices nothing, and no archiver waits for long.

A chunk of records is one transaction. Records that somebody else has locked are left for the next time. The newest
change of a record stays a row: it tells how far the record is archived. So do changes with a label, by which they are
found, and messages that were handed down, which are told from others by their version 0.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Column, Connection, Select, Table, and_, case, func, select

from distributed_state.cold import blocks, bulk
from distributed_state.cold.blocks import CHANGE, ChangeRow, MessageRow
from distributed_state.cold.engine import Database
from distributed_state.cold.record_index import following
from distributed_state.cold.tables import change_blocks, changes, message_blocks, messages, records
from distributed_state.cold.values import Compacted

_PAGE = 500  # records that are looked at in one read
_ROWS = 1000  # changes in one transaction
_LEAST = 4  # changes of a record that are worth a block
_ROW_BYTES = 64  # what a row takes beside its data, before it is compressed
_Row = ChangeRow | MessageRow


def compact_page(database: Database, namespace: str, before_ms: int, after: int) -> tuple[Compacted, int | None]:
    """Pack what the next records in order of their keys committed before a time; how much, and where to go on."""
    total = Compacted(0, 0, 0)
    with database.long_read() as connection:
        counts, following = _candidates(connection, namespace, before_ms, after)
    for some in _portions(counts):
        left = sum(counts[key] for key in some)
        while left > 0:
            with database.long_write() as connection:
                moved = compact(connection, some, before_ms)
            total += moved
            left = left - _ROWS if moved.changes else 0
    return total, following


def _candidates(
    connection: Connection, namespace: str, before_ms: int, after: int
) -> tuple[dict[int, int], int | None]:
    """Of the next records in order of their keys, those with enough old rows, and how many; and where to go on."""
    c = changes.c
    keys = [row.key for row in following(connection, namespace, after, before_ms, _PAGE)]
    old = and_(bulk.among(connection, c.record, keys), c.time_ms < before_ms, c.label.is_(None))
    count = select(c.record, func.count().label("rows")).where(old).group_by(c.record).having(func.count() > _LEAST)
    found = {row.record: int(row.rows) for row in connection.execute(count.order_by(c.record))}
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


def compact(connection: Connection, some: Sequence[int], before_ms: int) -> Compacted:
    """Pack old rows of these records, the oldest ones if there are many."""
    r = records.c
    query = select(r.key, r.version).where(bulk.among(connection, r.key, some))
    heads = dict(tuple(row) for row in connection.execute(query.with_for_update(skip_locked=True)))
    last = _bounds(connection, heads, before_ms)
    found = _rows(connection, last)
    if not found:
        return Compacted(0, 0, 0)
    said = _messages(connection, {record: rows[-1].version for record, rows in found.items()})
    newest = _newest(connection, _CHANGES, found), _newest(connection, _MESSAGES, said)
    late = {record for record, rows in newest[0].items() if rows[-1][0] >= found[record][0][0]}
    late |= {record for record, rows in newest[1].items() if rows[-1][0] >= said[record][0][0]}
    # Something was put back, or came late. As rows all of it is packed in order, the next time.
    blocks.expand(connection, sorted(late))
    found = {record: rows for record, rows in found.items() if record not in late}
    said = {record: rows for record, rows in said.items() if record not in late}
    packed = _pack(connection, _CHANGES, found, newest[0])
    return Compacted(len(found), packed, _pack(connection, _MESSAGES, said, newest[1]))


def _bounds(connection: Connection, heads: Mapping[int, int], before_ms: int) -> dict[int, int]:
    """Up to which version each record may be packed: all of it is old, and is not its head."""
    c = changes.c
    newer = func.min(case((c.time_ms >= before_ms, c.version)))
    query = select(c.record, newer).where(bulk.among(connection, c.record, list(heads))).group_by(c.record)
    # The server's clock may have gone back: a change that is newer keeps those after it, whatever their time.
    return {
        record: min(heads[record], heads[record] if first is None else first) - 1
        for record, first in connection.execute(query)
    }


def _rows(connection: Connection, last: Mapping[int, int]) -> dict[int, list[ChangeRow]]:
    """The oldest rows of `changes` up to these versions, by record."""
    c = changes.c
    query = _upto(connection, select(c.record, *CHANGE), c.record, c.version, last).where(c.label.is_(None))
    if len(last) == 1:
        query = query.order_by(c.version).limit(_ROWS)  # of several there are no more, see `_portions`
    # Sorted here: asked for the first so many of several records, PostgreSQL walks all of `changes` in that order.
    rows = sorted(map(tuple, connection.execute(query)), key=itemgetter(0, 1))
    return {record: [ChangeRow(*row) for _, *row in group] for record, group in groupby(rows, itemgetter(0))}


def _messages(connection: Connection, last: Mapping[int, int]) -> dict[int, list[MessageRow]]:
    """The rows of `messages` that were written up to these versions, with their times, by record."""
    c, m = changes.c, messages.c
    query = _upto(
        connection, select(m.record, m.seq, m.version, func.coalesce(c.time_ms, -1), m.data), m.record, m.version, last
    )
    query = query.outerjoin(changes, and_(c.record == m.record, c.version == m.version)).where(m.version > 0)
    rows = sorted(map(tuple, connection.execute(query)), key=itemgetter(0, 1))
    return {record: [MessageRow(*row) for _, *row in group] for record, group in groupby(rows, itemgetter(0))}


def _upto(
    connection: Connection, query: Select[Any], record: Column[Any], version: Column[Any], last: Mapping[int, int]
) -> Select[Any]:
    """Of a query those rows of these records that are not beyond a version."""
    upto = bulk.listed(connection, {"key": BigInteger(), "last": BigInteger()}, list(last.items()))
    return query.join_from(record.table, upto, and_(record == upto.c.key, version <= upto.c.last))


class _Kind(NamedTuple):
    """What blocks of changes and those of messages differ in. Rows begin with their number in the record."""

    blocks: Table
    end: Column[Any]
    beyond: int  # 1 if the end is exclusive
    number: Column[Any]
    unpack: Callable[[bytes], Sequence[_Row]]
    pack: Callable[[Iterable[Any]], bytes]


_CHANGES = _Kind(change_blocks, change_blocks.c.last, 0, changes.c.version, blocks.unpack_changes, blocks.pack_changes)
_MESSAGES = _Kind(
    message_blocks, message_blocks.c.stop, 1, messages.c.seq, blocks.unpack_messages, blocks.pack_messages
)


def _newest(connection: Connection, kind: _Kind, some: Iterable[int]) -> dict[int, Sequence[_Row]]:
    """What is in the newest block of each of these records."""
    b = kind.blocks.c
    newest = select(b.record, func.max(kind.end).label("end")).where(bulk.among(connection, b.record, list(some)))
    top = newest.group_by(b.record).subquery()
    query = select(b.record, b.data).join(top, and_(b.record == top.c.record, kind.end == top.c.end))
    return {record: kind.unpack(data) for record, data in connection.execute(query)}


def _pack(
    connection: Connection, kind: _Kind, found: Mapping[int, Sequence[_Row]], newest: Mapping[int, Sequence[_Row]]
) -> int:
    """Move rows, ascending, into blocks that go on from the newest there is; how many those are."""
    added: list[bulk.Row] = []
    for record, rows in found.items():
        for some in _cut([*newest.get(record, ()), *rows]):
            times = [row.time_ms for row in some]
            place = (record, some[-1][0] + kind.beyond, some[0][0])
            added.append((*place, min(times), max(times), len(some), kind.pack(some)))
    replaced = [{"r": record, "n": newest[record][-1][0] + kind.beyond} for record in found if record in newest]
    bulk.remove(
        connection, kind.blocks, replaced, lambda block: and_(kind.blocks.c.record == block.r, kind.end == block.n)
    )
    table = kind.number.table
    assert isinstance(table, Table)
    gone = [{"r": record, "n": row[0]} for record, rows in found.items() for row in rows]
    bulk.remove(connection, table, gone, lambda row: and_(table.c.record == row.r, kind.number == row.n))
    bulk.add(connection, kind.blocks, added)
    return len(gone)


def _cut(rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    """The rows in lists that fit into a block."""
    some: list[_Row] = []
    size = 0
    for row in rows:
        bytes_ = len(row.data) + _ROW_BYTES
        if some and size + bytes_ > blocks.RAW_BYTES:
            yield some
            some, size = [], 0
        some.append(row)
        size += bytes_
    if some:
        yield some
