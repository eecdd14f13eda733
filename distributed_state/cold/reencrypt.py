"""Stores values under another encryption, in place. Law: what a row says stays the same; one record is one transaction.

Events are a table of their own, in which many are about no record; a page of them is one transaction.

Design: section 17.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import ColumnElement, Table, and_, bindparam, select, tuple_, update

from distributed_state.cold import blocks
from distributed_state.cold.branches import records_with
from distributed_state.cold.engine import Sql, chunks
from distributed_state.cold.record_index import ERASED, lock
from distributed_state.cold.tables import (
    branches,
    change_blocks,
    changes,
    events,
    items,
    message_blocks,
    messages,
    quarantine,
    records,
    snapshots,
)
from distributed_state.errors import CorruptState
from distributed_state.values import codec, message_ranges
from distributed_state.values.journal import Op, pack, unpack
from distributed_state.values.model import SEGMENTS, is_value

# The bytes to store for those of a field, a message or an event: (record it was written under, name, bytes).
Rewrite = Callable[[str, str, bytes], bytes]
EventKey = tuple[int, str, int]  # partition, epoch, offset
PAGE = 100


def names(sql: Sql, after: str) -> list[str]:
    """The next records in order of their texts."""
    query = select(records.c.record).where(records.c.namespace == sql.namespace, records.c.record > after)
    query = query.where(records.c.scope != ERASED).order_by(records.c.record).limit(PAGE)
    branched = records_with(sql, after, PAGE)
    return sorted({*sql.execute(query).scalars(), *branched}, key=str.encode)[:PAGE]


def rewrite(sql: Sql, record: str, convert: Rewrite, *, keep: bool) -> int:
    """Rewrite all values of a record and return how many changed; with `keep` they are only counted."""
    row = lock(sql, [record]).get(record)
    work = _Work(sql, record, row["key"] if row else -1, convert, keep)
    for table in (snapshots, changes, quarantine, branches):
        work.packed(table)
    work.change_blocks()
    work.messages()
    work.message_blocks()
    work.items()
    return work.count


def rewrite_events(sql: Sql, after: EventKey, convert: Rewrite, *, keep: bool) -> tuple[EventKey | None, int]:
    """Rewrite the events of the next page; where it ends, None after the last one, and how many changed.

    With `keep` they are only counted.
    """
    e = events.c
    key = (e.partition, e.epoch, e.offset)
    query = select(*key, e.id, e.type, e.subject, e.data).where(e.namespace == sql.namespace, tuple_(*key) > after)
    rows = sql.execute(query.order_by(*key).limit(PAGE)).all()
    new = []
    for row in rows:
        data = convert(row.subject, codec.event_name(row.type, row.id), row.data)
        if data != row.data:
            new.append({"p": row.partition, "e": row.epoch, "o": row.offset, "d": data})
    if new and not keep:
        place = (e.partition == bindparam("p"), e.epoch == bindparam("e"), e.offset == bindparam("o"))
        sql.execute(update(events).where(e.namespace == sql.namespace, *place).values(data=bindparam("d")), new)
    return (tuple(rows[-1][:3]) if rows else None), len(new)


class _Work:
    def __init__(self, sql: Sql, record: str, key: int, convert: Rewrite, keep: bool) -> None:
        self._sql = sql
        self._record = record
        self._key = key
        self._convert = convert
        self._keep = keep
        self._sources: dict[int, str] = {}
        self.count = 0

    def packed(self, table: Table) -> None:
        """The tables whose `data` is a change."""
        for rows in self._pages(table):
            self._store(table, [(key, data, self._change(data, key.get("event", ""))) for key, data in rows])

    def change_blocks(self) -> None:
        """What a block has of changes, in its place."""
        for page in self._pages(change_blocks):
            for key, data in page:
                rows = blocks.unpack_changes(data)
                again = [row._replace(data=self._change(row.data, row.event)) for row in rows]
                self._store(change_blocks, [(key, data, data if again == rows else blocks.pack_changes(again))])

    def messages(self) -> None:
        """The messages, after the changes, which tell whose they were."""
        for rows in self._pages(messages):
            self._store(messages, [(key, data, self._message(key["seq"], data)) for key, data in rows])

    def message_blocks(self) -> None:
        """What a block has of messages, in its place."""
        for page in self._pages(message_blocks):
            for key, data in page:
                rows = blocks.unpack_messages(data)
                again = [row._replace(data=self._message(row.seq, row.data)) for row in rows]
                self._store(message_blocks, [(key, data, data if again == rows else blocks.pack_messages(again))])

    def items(self) -> None:
        """The items. What was handed down is sealed as it was where it was written."""
        i = items.c
        names = (i.collection, i.key, i.version)
        query = select(*names, i.origin, i.data).where(self._mine(items), i.data != b"").order_by(*names).limit(PAGE)
        after: tuple[bytes, bytes, int] = (b"", b"", -1)
        while rows := self._sql.execute(query.where(tuple_(*names) > after)).all():
            new = []
            for collection, key, version, origin, data in rows:
                name = codec.item_name(collection + b"\0" + key)
                place = {"collection": collection, "key": key, "version": version}
                new.append((place, data, self._value(origin or self._record, name, data)))
            self._store(items, new)
            after = rows[-1][:3]

    def _message(self, seq: int, data: bytes) -> bytes:
        # What was shared by a record that was purged since is kept here, as it was written there.
        return self._value(self._sources.get(seq, self._record), codec.MESSAGE, data)

    def _change(self, data: bytes, event: str) -> bytes:
        try:
            ops = unpack(data)
        except CorruptState:
            return data  # in quarantine, for that reason
        again = []
        for kind, name, value in ops:
            if kind == b"s" and name == SEGMENTS:
                for run in message_ranges.parse(value):
                    self._sources.update(dict.fromkeys(range(run.start, run.stop), run.source))
            elif kind == b"s" and is_value(name):
                value = self._value(self._record, codec.decode_key(name), value)
            elif kind == b"m" and value:
                value = self._value(self._record, codec.MESSAGE, value)
            elif kind == b"p" and value:
                value = self._value(self._record, codec.item_name(name), value)
            elif kind == b"e" and name.count(b" ") >= 2:
                _, type, subject = name.decode("utf-8", "replace").split(" ", 2)
                # Not counted: the event has a row of its own.
                value = self._convert(subject, codec.event_name(type, event), value)
            again.append(Op(kind, name, value))
        return pack(again)

    def _value(self, source: str, name: str, data: bytes) -> bytes:
        again = self._convert(source, name, data)
        self.count += again != data
        return again

    def _pages(self, table: Table) -> Iterable[list[tuple[dict[str, Any], bytes]]]:
        """Rows of the record, each as its key and its data, some at a time."""
        own = [column for column in table.primary_key if column.name not in ("namespace", "record")]
        own += [table.c.event] if "event" in table.c and not table.c.event.primary_key else []
        mine = self._mine(table)
        numbers = self._sql.execute(select(own[0]).where(mine).distinct().order_by(own[0])).scalars().all()
        for page in chunks(numbers, PAGE):
            query = select(table.c.data, *own).where(mine, own[0].in_(page)).order_by(own[0])
            names = [column.name for column in own]
            yield [(dict(zip(names, key, strict=True)), data) for data, *key in self._sql.execute(query)]

    def _mine(self, table: Table) -> ColumnElement[bool]:
        if "namespace" in table.c:
            return and_(table.c.namespace == self._sql.namespace, table.c.record == self._record)
        return table.c.record == self._key

    def _store(self, table: Table, rows: Iterable[tuple[dict[str, Any], bytes, bytes]]) -> None:
        new = [key | {"new": again} for key, data, again in rows if again != data]
        if new and not self._keep:
            named = [{f"b_{name}": value for name, value in row.items()} for row in new]
            place = [table.c[name] == bindparam(f"b_{name}") for name in new[0] if name != "new"]
            query = update(table).where(self._mine(table), *place)
            self._sql.execute(query.values(data=bindparam("b_new")), named)
