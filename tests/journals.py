"""Journals written by hand and carried into SQL without Redis, and a look at the rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Table, event, select

from distributed_state.cold import tables
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Batch, Cursor, Sought
from distributed_state.values import message_ranges
from distributed_state.values.journal import JournalEntry, State, fold, pack, unpack
from distributed_state.values.model import DELETED, ITEMS, NEXT, PARENT, SEGMENTS, START

Step = tuple[bytes, bytes, bytes]
EVERYTHING = Sought(None, None, 0, 2**53, 1000, None)


def put(name: str, value: str) -> Step:
    return (b"s", name.encode(), value.encode())


@dataclass
class Journal:
    """One partition's journal, written by hand: `commit` adds an entry, `flush` archives what was added."""

    store: ColdStore
    partition: int = 0
    cursor: Cursor | None = None
    pending: list[JournalEntry] = field(default_factory=list)
    states: dict[str, State] = field(default_factory=dict)
    past: dict[tuple[str, int], dict[bytes, bytes]] = field(default_factory=dict)
    offset: int = 0
    now: int = 1_000

    def __post_init__(self) -> None:
        self.store.register(64)
        self.renew()

    def renew(self) -> None:
        self.cursor = None
        while self.cursor is None:  # somebody archived since the cursor was read
            self.cursor = self.store.mint(self.partition, self.store.cursor(self.partition))
        self.offset = 0

    @property
    def epoch(self) -> str:
        assert self.cursor
        return self.cursor.epoch

    def commit(self, record: str, *ops: Step, messages: int = 0, **other: Any) -> JournalEntry:
        state = self.states.get(record) or State(self.epoch, 0, {})
        fields = dict(state.fields)
        fold(fields, unpack(pack(ops)))
        first = int(fields.get(NEXT, b"0"))
        added = [(b"m", b"%d" % n, f"{record} message {n}".encode()) for n in range(first, first + messages)]
        fold(fields, unpack(pack(added)))
        self.offset, self.now, version = self.offset + 1, self.now + 1, state.version + 1
        data = pack([*ops, *added])
        entry = JournalEntry(self.offset, f"e{self.now}", record, version, self.now, "set", "worker", 0, data, 0)
        entry = replace(entry, **other)
        self.states[record] = State(self.epoch, version, fields)
        self.past[record, version] = fields
        self.pending.append(entry)
        return entry

    def tell(self, step: bytes, data: bytes = b"{}", **other: Any) -> JournalEntry:
        """An event that is written alone."""
        self.offset, self.now = self.offset + 1, self.now + 1
        told = pack([(b"e", step, data)])
        entry = JournalEntry(self.offset, f"r.{self.now}.emit", "", 0, self.now, "emit", "worker", 0, told, 0)
        self.pending.append(replace(entry, **other))
        return self.pending[-1]

    def append(self, record: str, messages: int) -> JournalEntry:
        return self.commit(record, messages=messages)

    def wipe(self, record: str, *ops: Step) -> JournalEntry:
        return self.commit(record, (b"w", b"", self.states[record].fields.get(NEXT, b"0")), *ops)

    def delete(self, record: str) -> JournalEntry:
        return self.wipe(record, (b"c", b"", b""), (b"s", DELETED, b"1"))

    def fork(self, source: str, record: str, version: int | None = None) -> JournalEntry:
        version = version or self.states[source].version
        fields = self.past[source, version]
        ops = [(b"s", name, value) for name, value in fields.items() if name not in (SEGMENTS, START, PARENT, ITEMS)]
        ops += [(b"s", ITEMS, b"1")] if ITEMS in fields else []
        ops += [(b"s", PARENT, f"{source}@{version}".encode()), (b"s", SEGMENTS, message_ranges.close(source, fields))]
        return self.commit(record, *ops, (b"s", START, fields.get(NEXT, b"0")))

    def batch(self) -> Batch:
        at, before = self.store.cursor(self.partition), self.offset - len(self.pending)
        event = at.event if at is not None and at.offset == before else ""
        return Batch(self.partition, self.epoch, before, list(self.pending), event)

    def flush(self) -> set[int]:
        moved = self.store.archive([self.batch()])
        self.pending.clear()
        return set(moved)


def rows(store: ColdStore, table: Table, **where: Any) -> list[Any]:
    """The rows of the store's namespace in a table, those of which a column is so; of `record` its text is given."""
    query = select(table)
    if "namespace" in table.c:
        query = query.where(table.c.namespace == store.namespace)
    else:
        record = where.pop("record", None)
        named = select(tables.records.c.key).where(tables.records.c.namespace == store.namespace)
        named = named if record is None else named.where(tables.records.c.record == record)
        query = query.where(table.c.record.in_(named))
    for name, value in where.items():
        query = query.where(table.c[name] == value)
    with store.database.read() as connection:
        return list(connection.execute(query))


def statements(store: ColdStore) -> list[str]:
    """A list that grows with every statement the store sends from now on."""
    sent: list[str] = []
    event.listen(store.database._engine, "before_cursor_execute", lambda *a: sent.append(a[2]))
    return sent


def shown(store: ColdStore, record: str, window: int = 1000) -> list[bytes]:
    loaded = store.load(record, window=window)
    assert loaded
    return [data for _, data in loaded.messages]
