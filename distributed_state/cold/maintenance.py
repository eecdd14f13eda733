"""Maintenance of many records: purges old data, encrypts values again, and compacts old rows.

Law: a page or a record is one transaction; readers notice no difference except in speed.

A purge keeps everything newer than a cutoff, and everything that a fork still shows. A live record keeps a snapshot at
its last change before the cutoff, the base; a record deleted before the cutoff keeps only its row in `records`.

Design: sections 9, 11, 15, 17.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Select,
    Table,
    and_,
    bindparam,
    case,
    delete,
    func,
    or_,
    select,
    tuple_,
    union_all,
    update,
)

from distributed_state.cold import aside, blocks, record_items, tables
from distributed_state.cold.aside import records_with
from distributed_state.cold.blocks import Kind
from distributed_state.cold.engine import Part, Row, Sql, chunks
from distributed_state.cold.erasure import hand_down, hand_down_all, let_go
from distributed_state.cold.record_history import note_shown, snapshot_row, states
from distributed_state.cold.record_index import ERASED, LARGEST, following, lock
from distributed_state.cold.tables import (
    OF_A_RECORD,
    change_blocks,
    changes,
    events,
    items,
    message_blocks,
    messages,
    quarantine,
    records,
    shares,
    snapshots,
)
from distributed_state.cold.values import RESOLVED, Compacted, Purged
from distributed_state.errors import CorruptState
from distributed_state.values import codec, message_ranges
from distributed_state.values.journal import Op, Segment, State, pack, unpack
from distributed_state.values.model import NEXT, SEGMENTS, is_value

_COMPACTED_TOGETHER = 500  # records in one read
_ROWS = 1000  # changes in one transaction
_LEAST = 4  # a record with this many old changes or fewer is not compacted
_ROW_BYTES = 64  # of a row besides its data, uncompressed
_Packed = blocks.ChangeRow | blocks.MessageRow
CHUNK = 200
T = TypeVar("T")
_TOGETHER = 10_000  # events, or rows of the quarantine, removed in one transaction


def purge_all(
    part: Part,
    before_ms: int,
    *,
    keep: int | None = None,
    events_before_ms: int | None = None,
    branches_before_ms: int | None = None,
) -> Purged:
    """Remove history and events older than `before_ms`; every state at or after it stays readable, and so do forks.

    With `keep`, only that many of each record's newest changes stay at most. Events and branches may have their own
    cutoffs. No transaction removes more than some hundred records or branches, or some thousand events.
    """
    branches_before = before_ms if branches_before_ms is None else branches_before_ms
    # Branches first: the versions that a branch continues stay until it is old.
    cut = partial(aside.purge, before_ms=branches_before, limit=CHUNK)
    total = Purged(0, _by_batches(part, cut), 0)
    cut = partial(purge_quarantine, before_ms=before_ms)
    total += Purged(0, _by_batches(part, cut), 0)
    after: int | None = 0
    while after is not None:
        with part.database.long_read(part.namespace) as sql:
            names, after = candidates(sql, before_ms, keep, after)
        if names:
            with part.database.long_write(part.namespace) as sql:
                total += purge(sql, names, before_ms, keep)
    events_before = before_ms if events_before_ms is None else events_before_ms
    cut = partial(purge_events, before_ms=events_before)
    return total + Purged(0, 0, 0, _by_batches(part, cut))


def _by_batches(part: Part, cut: Callable[[Sql], int]) -> int:
    """Remove batches, each in its own transaction, until nothing is left; return how much that was."""
    total = 0
    while True:
        with part.database.long_write(part.namespace) as sql:
            removed = cut(sql)
        total += removed
        if removed <= 0:
            return total


# Records


def candidates(sql: Sql, before_ms: int, keep: int | None, after: int) -> tuple[list[str], int | None]:
    """The records with data to purge among the next ones, in order of their keys; and where the next page begins."""
    c, b = changes.c, change_blocks.c
    s = snapshots.c
    rows, further = following(sql, after, before_ms if keep is None else LARGEST, CHUNK)
    keys = [row.key for row in rows]
    deleted = [row.key for row in rows if row.deleted and row.updated_ms < before_ms]
    # The oldest change of each record is enough: changes after a newer one stay, whatever their time.
    given = sql.listed({"key": BigInteger()}, [(key,) for key in keys])
    oldest = select(c.time_ms).where(c.record == given.c.key).order_by(c.version).limit(1).scalar_subquery()
    # In separate statements: with subqueries PostgreSQL may read a whole table for each page.
    queries = (
        select(given.c.key).where(oldest < before_ms),
        select(b.record).where(sql.among(b.record, keys), b.oldest_ms < before_ms),
        select(s.record).where(sql.among(s.record, deleted)),
    )
    found = {key for query in queries for key in sql.execute(query.distinct()).scalars()}
    if keep is not None:
        long = [(row.key, row.version - keep) for row in rows if row.key not in found and row.version > keep]
        upto = sql.listed({"key": BigInteger(), "last": BigInteger()}, long)
        for place, first in ((c.record, c.version), (b.record, b.first)):
            beyond = select(place).join(upto, and_(place == upto.c.key, first <= upto.c.last))
            found.update(sql.execute(beyond.distinct()).scalars())
    return [row.record for row in rows if row.key in found], further


def purge(sql: Sql, names: Sequence[str], before_ms: int, keep: int | None = None) -> Purged:
    """Purge these records in one transaction."""
    # Locked first: archive() also locks the rows of its records, so neither sees half of the other's work.
    rows = lock(sql, names)
    held = aside.bases(sql, rows)
    old = (record for record, row in rows.items() if row["deleted"] and row["updated_ms"] < before_ms)
    gone = {record: rows[record]["key"] for record in old if record not in held}
    living = {record: row["key"] for record, row in rows.items() if record not in gone}
    spare = {} if keep is None else {record: rows[record]["version"] - keep for record in living}
    bases = _bases(sql, living, before_ms, held, spare)
    removed = [_purge_deleted(sql, gone), _purge_live(sql, bases, living)]
    counts = [sum(numbers) for numbers in zip(*removed, strict=True)]
    return Purged(len(gone) + len(bases), *counts)


def _bases(
    sql: Sql, living: Mapping[str, int], before_ms: int, held: Mapping[str, int], spare: Mapping[str, int]
) -> dict[str, State]:
    """The base of each record: its state at the last change before the first one that is newer than the cutoff.

    If the version in `spare` is higher, that is the base; but never a version after the one in `held`, which a branch
    continues.
    """
    b = change_blocks.c
    mine = sql.among(b.record, list(living.values()))
    blocks.expand_some(sql, blocks.CHANGES, and_(mine, b.oldest_ms < before_ms, b.newest_ms >= before_ms))
    targets: dict[str, int] = {}
    spans = _spans(sql, living, before_ms)
    for record, key in living.items():
        if key in spans:
            first, last, kept = spans[key]
            target = min(max(kept - 1, spare.get(record, 0)), last, held.get(record, last))
            if target >= first:
                targets[record] = target
    cut = sql.listed({"key": BigInteger(), "target": BigInteger()}, [(living[r], v) for r, v in targets.items()])
    within = and_(b.record == cut.c.key, b.first <= cut.c.target, b.last > cut.c.target)
    named = sql.among(b.record, [living[record] for record in targets])  # without this SQLite reads all blocks
    blocks.expand_some(sql, blocks.CHANGES, and_(named, select(cut.c.key).where(within).exists()))
    return states(sql, targets)


def _spans(sql: Sql, living: Mapping[str, int], before_ms: int) -> dict[int, tuple[int, int, int]]:
    """The first and the last version of each record, and its first version that is newer than the cutoff."""
    c, b = changes.c, change_blocks.c
    found: dict[int, tuple[int, int, int]] = {}
    for chunk in chunks(sorted(living.values()), CHUNK):
        # The server's clock may have been set back: a newer change keeps all changes after it, whatever their time.
        newer = func.coalesce(func.min(case((c.time_ms >= before_ms, c.version))), LARGEST)
        rows = select(c.record, func.min(c.version), func.max(c.version), newer).group_by(c.record)
        newer = func.coalesce(func.min(case((b.oldest_ms >= before_ms, b.first))), LARGEST)
        packed = select(b.record, func.min(b.first), func.max(b.last), newer).group_by(b.record)
        mine = [sql.among(place, chunk) for place in (c.record, b.record)]
        for key, first, last, kept in sql.execute(union_all(rows.where(mine[0]), packed.where(mine[1]))):
            before = found.get(key, (first, last, kept))
            found[key] = (min(first, before[0]), max(last, before[1]), min(kept, before[2]))
    return found


def _purge_deleted(sql: Sql, gone: Mapping[str, int]) -> tuple[int, int]:
    if not gone:
        return 0, 0
    keys = sorted(gone.values())
    hand_down_all(sql, keys)
    packed = (change_blocks, message_blocks)
    removed = [_packed(sql, table, sql.among(table.c.record, keys)) for table in packed]
    for table in OF_A_RECORD:
        count = sql.execute(delete(table).where(sql.among(table.c.record, keys))).rowcount
        removed[0] += count if table is changes else 0
        removed[1] += count if table is messages else 0
    let_go(sql, gone)
    return removed[0], removed[1]


def _purge_live(sql: Sql, bases: Mapping[str, State], keys: Mapping[str, int]) -> tuple[int, int]:
    if not bases:
        return 0, 0
    hidden = _hidden(sql, bases, keys)
    hand_down(sql, hidden)
    m, b = messages.c, message_blocks.c
    for some in chunks(hidden, CHUNK):
        runs = (and_(b.record == run["r"], b.stop > run["low"], b.start < run["high"]) for run in some)
        blocks.expand_some(sql, blocks.MESSAGES, or_(*runs))
    removed_messages = sql.remove(
        messages, hidden, lambda run: and_(m.record == run.r, m.version <= run.v, m.seq >= run.low, m.seq < run.high)
    )
    upto = [{"r": keys[record], "v": state.version} for record, state in bases.items()]
    c = change_blocks.c
    there = sql.listed({"r": BigInteger(), "v": BigInteger()}, [tuple(each.values()) for each in upto])
    packed = select(func.sum(c.count)).join(there, and_(c.record == there.c.r, c.last <= there.c.v))
    removed_changes = sql.execute(packed).scalar() or 0
    for number in (changes.c.version, snapshots.c.version, c.last):
        removed = sql.remove(number.table, upto, partial(_upto, number))
        removed_changes += removed if number is changes.c.version else 0
    s = shares.c
    passed = [{"r": record, "v": state.version} for record, state in bases.items()]
    sql.remove(shares, passed, lambda base: and_(s.namespace == sql.namespace, s.record == base.r, s.version <= base.v))
    sql.add(snapshots, [snapshot_row(keys[record], state) for record, state in bases.items()])
    note_shown(sql, bases)
    _thin_items(sql, {record: state.version for record, state in bases.items()}, keys)
    return int(removed_changes), removed_messages


def _thin_items(sql: Sql, bases: Mapping[str, int], keys: Mapping[str, int]) -> None:
    """Reduce items to those that these records show from their bases on, and those that forks show."""
    have = record_items.with_items(sql, [keys[record] for record in bases])
    if here := {record: base for record, base in bases.items() if keys[record] in have}:
        record_items.needless(sql, here)
        numbers = {keys[record]: base for record, base in here.items()}
        record_items.thin(sql, numbers, record_items.layer_ends(sql, list(here)))
        for record, shown in record_items.layer_spans(sql, here).items():
            record_items.drop_hidden(sql, keys[record], here[record], shown)
        alone = here.keys() - record_items.layered(sql, list(here))
        record_items.forget_deleted(sql, {keys[record]: here[record] for record in alone})


def _hidden(sql: Sql, bases: Mapping[str, State], keys: Mapping[str, int]) -> list[dict[str, Any]]:
    """The runs of messages that neither the base nor any later state of its record shows."""
    s = shares.c
    shown: dict[str, list[Segment]] = {
        record: message_ranges.segments(record, state.fields) for record, state in bases.items()
    }
    query = select(s.record, s.version, s.source, s.start, s.stop).where(s.namespace == sql.namespace)
    # A later state may show messages that the base hides: a rollback sets `#segments`, and `shares` notes that.
    for record, version, *run in sql.execute(query.where(sql.among(s.record, list(bases)))):
        if version > bases[record].version:
            shown[record].append(Segment(*run))
    return [
        {"r": keys[record], "low": low, "high": high, "v": state.version}
        for record, state in bases.items()
        for low, high in _gaps(shown[record], int(state.fields.get(NEXT, b"0")))
    ]


def _gaps(runs: Iterable[Segment], stop: int) -> list[tuple[int, int]]:
    """The parts of 0 .. `stop` that are in none of the runs."""
    gaps = []
    at = 0
    for run in sorted(runs, key=lambda run: run.start):
        if run.start > at:
            gaps.append((at, min(run.start, stop)))
        at = max(at, run.stop)
    if at < stop:
        gaps.append((at, stop))
    return [(low, high) for low, high in gaps if low < high]


def _upto(number: Column[Any], base: Any) -> ColumnElement[bool]:
    return and_(number.table.c.record == base.r, number <= base.v)


def _packed(sql: Sql, table: Table, which: ColumnElement[bool]) -> int:
    """The number of rows in blocks."""
    return sql.execute(select(func.sum(table.c.count)).where(which)).scalar() or 0


# Events, and rows of the quarantine


def purge_events(sql: Sql, before_ms: int) -> int:
    """Remove the oldest events before the cutoff, some thousands at most; return how many."""
    e = events.c
    old = and_(e.namespace == sql.namespace, e.time_ms < before_ms)
    last = sql.execute(select(e.time_ms).where(old).order_by(e.time_ms).offset(_TOGETHER - 1).limit(1)).scalar()
    # Also remove all other events of the last one's millisecond, so that the cut is between two times.
    some = old if last is None else and_(e.namespace == sql.namespace, e.time_ms <= last)
    return sql.execute(delete(events).where(some)).rowcount


def purge_quarantine(sql: Sql, before_ms: int) -> int:
    """Remove the oldest resolved rows of the quarantine, some thousands at most; return how many."""
    q = quarantine.c
    old = and_(q.namespace == sql.namespace, q.reason == RESOLVED, q.time_ms < before_ms)
    some = select(q.id).where(old).order_by(q.id).limit(_TOGETHER).scalar_subquery()
    return sql.execute(delete(quarantine).where(q.id.in_(some))).rowcount


# Re-encryption. Values stay the same, and one record is one transaction. Events are a separate table, and many have no
# record; a page of them is one transaction.

# Converts the stored bytes of a field, a message or an event: (record it was written under, name, bytes).
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
    """Rewrite all values of a record; return how many changed. With `keep` they are only counted."""
    row = lock(sql, [record]).get(record)
    work = _Work(sql, record, row["key"] if row else -1, convert, keep)
    for table in (snapshots, changes, quarantine, tables.branches):
        work.rows(table, lambda key, data: work.change(data, key.get("event", "")))
    work.rows(change_blocks, work.block(blocks.CHANGES, lambda row: work.change(row.data, row.event)))
    # Read after the changes, which name the record that each message was written under.
    work.rows(messages, lambda key, data: work.message(key["seq"], data))
    work.rows(message_blocks, work.block(blocks.MESSAGES, lambda row: work.message(row.seq, row.data)))
    work.items()
    return work.count


def rewrite_events(sql: Sql, after: EventKey, convert: Rewrite, *, keep: bool) -> tuple[EventKey | None, int]:
    """Rewrite the events of the next page; return its end (None after the last page), and how many changed.

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

    def rows(self, table: Table, rewritten: Callable[[dict[str, Any], bytes], bytes]) -> None:
        """Rewrite the `data` of a table's rows; `rewritten` gets the key and the data of each."""
        for rows in self._pages(table):
            self._store(table, [(key, data, rewritten(key, data)) for key, data in rows])

    def block(self, kind: Kind, rewritten: Callable[[Any], bytes]) -> Callable[[dict[str, Any], bytes], bytes]:
        """Make a function for `rows` that rewrites each row in a block."""

        def convert(_: dict[str, Any], data: bytes) -> bytes:
            rows = kind.unpack(data)
            again = [row._replace(data=rewritten(row)) for row in rows]
            return data if again == rows else kind.pack(again)

        return convert

    def items(self) -> None:
        """Rewrite the items. Inherited ones are encrypted under the record that they were written under."""
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

    def message(self, seq: int, data: bytes) -> bytes:
        """Rewrite a message."""
        # A copy of a message of a record that was purged is encrypted under that record.
        return self._value(self._sources.get(seq, self._record), codec.MESSAGE, data)

    def change(self, data: bytes, event: str) -> bytes:
        """Rewrite the values in the operations of a commit."""
        try:
            ops = unpack(data)
        except CorruptState:
            return data  # quarantined because it cannot be read
        again = []
        for kind, name, value in ops:
            if kind == b"s" and name == SEGMENTS:
                for run in message_ranges.parse(value):
                    self._sources.update(dict.fromkeys(range(run.start, run.stop), run.source))
            elif kind == b"s" and is_value(name):
                value = self._value(self._record, codec.place_of(name), value)
            elif kind == b"m" and value:
                value = self._value(self._record, codec.MESSAGE, value)
            elif kind == b"p" and value:
                value = self._value(self._record, codec.item_name(name), value)
            elif kind == b"e" and name.count(b" ") >= 2:
                _, type, subject = name.decode("utf-8", "replace").split(" ", 2)
                # Not counted, because the event also has its own row.
                value = self._convert(subject, codec.event_name(type, event), value)
            again.append(Op(kind, name, value))
        return pack(again)

    def _value(self, source: str, name: str, data: bytes) -> bytes:
        again = self._convert(source, name, data)
        self.count += again != data
        return again

    def _pages(self, table: Table) -> Iterable[list[tuple[dict[str, Any], bytes]]]:
        """Pages of the record's rows, each row as its key and its data."""
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


# Compaction
#
# Readers see no difference, and no archiver waits for long. A portion of records is one transaction. Locked records are
# left for the next time. The newest change of a record stays a row: it shows how far the record is archived. So do
# changes with a label, by which they are found, and copies of inherited messages, which have version 0.


def compact_page(part: Part, before_ms: int, *, after: int = 0) -> tuple[Compacted, int | None]:
    """Compact old changes and messages of some records into compressed blocks, which are read like rows.

    Returns the counts, and `after` for the next records (None: these were the last).
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
    """The records with enough old rows among the next ones, and their numbers; and where the next page begins."""
    c = changes.c
    rows, further = following(sql, after, before_ms, _COMPACTED_TOGETHER)
    keys = [row.key for row in rows]
    old = and_(sql.among(c.record, keys), c.time_ms < before_ms, c.label.is_(None))
    count = select(c.record, func.count().label("rows")).where(old).group_by(c.record).having(func.count() > _LEAST)
    found = {row.record: int(row.rows) for row in sql.execute(count.order_by(c.record))}
    return found, further


def _portions(counts: Mapping[int, int]) -> Iterator[list[int]]:
    """The records in lists of about `_ROWS` rows together; a larger record has a list of its own."""
    some: list[int] = []
    for key, count in counts.items():
        if some and sum(counts[each] for each in some) + count > _ROWS:
            yield some
            some = []
        some.append(key)
    if some:
        yield some


def compact(sql: Sql, some: Sequence[int], before_ms: int) -> Compacted:
    """Compact old rows of these records, only the oldest if there are many."""
    r = records.c
    query = select(r.key, r.version).where(sql.among(r.key, some))
    heads = dict(tuple(row) for row in sql.execute(query.with_for_update(skip_locked=True)))
    last = _bounds(sql, heads, before_ms)
    found = _rows(sql, last)
    if not found:
        return Compacted(0, 0, 0)
    said = _messages(sql, {record: rows[-1].version for record, rows in found.items()})
    newest = _newest(sql, blocks.CHANGES, found), _newest(sql, blocks.MESSAGES, said)
    late = {record for record, rows in newest[0].items() if rows[-1][0] >= found[record][0][0]}
    late |= {record for record, rows in newest[1].items() if rows[-1][0] >= said[record][0][0]}
    # Rows were put back, or came late. Expanding makes all of them rows, which the next compaction packs in order.
    blocks.expand(sql, sorted(late))
    found = {record: rows for record, rows in found.items() if record not in late}
    said = {record: rows for record, rows in said.items() if record not in late}
    packed = _pack(sql, blocks.CHANGES, found, newest[0])
    return Compacted(len(found), packed, _pack(sql, blocks.MESSAGES, said, newest[1]))


def _bounds(sql: Sql, heads: Mapping[int, int], before_ms: int) -> dict[int, int]:
    """The version up to which each record may be packed: its changes are old, and the head is excluded."""
    c = changes.c
    newer = func.min(case((c.time_ms >= before_ms, c.version)))
    query = select(c.record, newer).where(sql.among(c.record, list(heads))).group_by(c.record)
    # The server's clock may have been set back: a newer change keeps all changes after it, whatever their time.
    return {
        record: min(heads[record], heads[record] if first is None else first) - 1
        for record, first in sql.execute(query)
    }


def _rows(sql: Sql, last: Mapping[int, int]) -> dict[int, list[blocks.ChangeRow]]:
    """The oldest rows of `changes` up to these versions, by record."""
    c = changes.c
    query = _up_to_last(sql, select(c.record, *blocks.CHANGE), c.record, c.version, last).where(c.label.is_(None))
    if len(last) == 1:
        query = query.order_by(c.version).limit(_ROWS)  # several records together have at most this many: `_portions`
    return _by_record(sql, query, blocks.ChangeRow)


def _messages(sql: Sql, last: Mapping[int, int]) -> dict[int, list[blocks.MessageRow]]:
    """The rows of `messages` that were written up to these versions, with their times, by record."""
    c, m = changes.c, messages.c
    query = _up_to_last(
        sql, select(m.record, m.seq, m.version, func.coalesce(c.time_ms, -1), m.data), m.record, m.version, last
    )
    query = query.outerjoin(changes, and_(c.record == m.record, c.version == m.version)).where(m.version > 0)
    return _by_record(sql, query, blocks.MessageRow)


def _by_record(sql: Sql, query: Select[Any], row: Callable[..., T]) -> dict[int, list[T]]:
    # Sorted here: for an ORDER BY with LIMIT over several records PostgreSQL walks all of `changes` in that order.
    rows = sorted(map(tuple, sql.execute(query)), key=itemgetter(0, 1))
    return {record: [row(*rest) for _, *rest in group] for record, group in groupby(rows, itemgetter(0))}


def _up_to_last(
    sql: Sql, query: Select[Any], record: Column[Any], version: Column[Any], last: Mapping[int, int]
) -> Select[Any]:
    """Restrict a query to rows of these records up to their versions."""
    upto = sql.listed({"key": BigInteger(), "last": BigInteger()}, list(last.items()))
    return query.join_from(record.table, upto, and_(record == upto.c.key, version <= upto.c.last))


def _newest(sql: Sql, kind: Kind, some: Iterable[int]) -> dict[int, Sequence[_Packed]]:
    """The rows in the newest block of each of these records."""
    b = kind.table.c
    newest = select(b.record, func.max(kind.end).label("end")).where(sql.among(b.record, list(some)))
    top = newest.group_by(b.record).subquery()
    query = select(b.record, b.data).join(top, and_(b.record == top.c.record, kind.end == top.c.end))
    return {record: kind.unpack(data) for record, data in sql.execute(query)}


def _pack(sql: Sql, kind: Kind, found: Mapping[int, Sequence[_Packed]], newest: Mapping[int, Sequence[_Packed]]) -> int:
    """Move rows, ascending, into blocks after the newest existing one, which is filled up; return how many."""
    added: list[Row] = []
    for record, rows in found.items():
        for some in _cut([*newest.get(record, ()), *rows]):
            times = [row.time_ms for row in some]
            place = (record, some[-1][0] + kind.beyond, some[0][0])
            added.append((*place, min(times), max(times), len(some), kind.pack(some)))
    replaced = [{"r": record, "n": newest[record][-1][0] + kind.beyond} for record in found if record in newest]
    sql.remove(kind.table, replaced, lambda block: and_(kind.table.c.record == block.r, kind.end == block.n))
    table = kind.number.table
    assert isinstance(table, Table)
    gone = [{"r": record, "n": row[0]} for record, rows in found.items() for row in rows]
    sql.remove(table, gone, lambda row: and_(table.c.record == row.r, kind.number == row.n))
    sql.add(kind.table, added)
    return len(gone)


def _cut(rows: Iterable[_Packed]) -> Iterator[list[_Packed]]:
    """The rows in lists that each fit into a block."""
    some: list[_Packed] = []
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
