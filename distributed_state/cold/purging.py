"""Removes history and events older than a cutoff. Law: what is newer stays readable, and what a fork still shows too.

A live record keeps a snapshot at its last change before the cutoff, the base; a record that was deleted before the
cutoff keeps its row in `records` only.

Design: sections 11, 15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Table,
    and_,
    case,
    delete,
    func,
    or_,
    select,
    union_all,
)

from distributed_state.cold import blocks, branches, record_items
from distributed_state.cold.engine import Part, Sql, chunks
from distributed_state.cold.entries import LARGEST
from distributed_state.cold.erasure import hand_down, hand_down_all, let_go
from distributed_state.cold.record_history import snapshot_row, states
from distributed_state.cold.record_index import following, lock
from distributed_state.cold.tables import (
    OF_A_RECORD,
    change_blocks,
    changes,
    events,
    message_blocks,
    messages,
    quarantine,
    shares,
    snapshots,
)
from distributed_state.cold.values import RESOLVED, Purged
from distributed_state.values import message_ranges
from distributed_state.values.journal import Segment, State
from distributed_state.values.model import NEXT, SEGMENTS

CHUNK = 200
_TOGETHER = 10_000  # events, or rows of the quarantine, that are removed in one transaction


def purge_all(
    part: Part,
    before_ms: int,
    *,
    keep: int | None = None,
    events_before_ms: int | None = None,
    branches_before_ms: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Purged:
    """Remove history and events older than `before_ms`; every state at or after it stays readable, and so do forks.

    With `keep` also all but so many of the newest changes of each record. Events and branches have a time of their own
    if it is given. Calls `progress` after each chunk with the number of records purged so far. No transaction takes
    more than some hundred records, or branches, or some thousand events.
    """
    branches_before = before_ms if branches_before_ms is None else branches_before_ms
    # First: what a branch continues stays until the branch is old.
    cut = partial(branches.purge, before_ms=branches_before, limit=CHUNK)
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
        if progress:
            progress(total.records)
    events_before = before_ms if events_before_ms is None else events_before_ms
    cut = partial(purge_events, before_ms=events_before)
    return total + Purged(0, 0, 0, _by_batches(part, cut))


def _by_batches(part: Part, cut: Callable[[Sql], int]) -> int:
    """Cut a batch in a transaction of its own until nothing is left; how much that was."""
    total = 0
    while True:
        with part.database.long_write(part.namespace) as sql:
            removed = cut(sql)
        total += removed
        if removed <= 0:
            return total


# Records


def candidates(sql: Sql, before_ms: int, keep: int | None, after: int) -> tuple[list[str], int | None]:
    """Of the next records in order of their keys, those that have something to purge; and where to go on."""
    c, b = changes.c, change_blocks.c
    s = snapshots.c
    rows = following(sql, after, before_ms if keep is None else LARGEST, CHUNK)
    keys = [row.key for row in rows]
    deleted = [row.key for row in rows if row.deleted and row.updated_ms < before_ms]
    # Of each record one row is looked at: what is behind a newer change stays, whatever its time is.
    given = sql.listed({"key": BigInteger()}, [(key,) for key in keys])
    oldest = select(c.time_ms).where(c.record == given.c.key).order_by(c.version).limit(1).scalar_subquery()
    # In statements of their own: as subqueries, PostgreSQL may read all of a table for each page.
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
    return [row.record for row in rows if row.key in found], rows[-1].key if len(rows) == CHUNK else None


def purge(sql: Sql, names: Sequence[str], before_ms: int, keep: int | None = None) -> Purged:
    """Purge these records in one transaction."""
    # Locked first: archive() locks the rows of its records too, so neither sees the other's work half done.
    rows = lock(sql, names)
    held = branches.bases(sql, rows)
    old = (record for record, row in rows.items() if row["deleted"] and row["updated_ms"] < before_ms)
    gone = {record: rows[record]["key"] for record in old if record not in held}
    living = {record: row["key"] for record, row in rows.items() if record not in gone}
    spare = {} if keep is None else {record: rows[record]["version"] - keep for record in living}
    bases = _bases(sql, living, before_ms, held, spare)
    removed = [_purge_deleted(sql, gone), _purge_live(sql, bases, living)]
    counts = [sum(numbers) for numbers in zip(*removed, strict=True)]
    return Purged(len(gone) + len(bases), *counts)


def _bases(
    sql: Sql,
    living: Mapping[str, int],
    before_ms: int,
    held: Mapping[str, int],
    spare: Mapping[str, int],
) -> dict[str, State]:
    """The state of each record at its last change before the first one that is newer than the cutoff.

    Or at the version in `spare`, if that is higher; but not behind the one in `held`, which a branch continues.
    """
    b = change_blocks.c
    mine = sql.among(b.record, list(living.values()))
    blocks.expand_changes(sql, and_(mine, b.oldest_ms < before_ms, b.newest_ms >= before_ms))
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
    named = sql.among(b.record, [living[record] for record in targets])  # else SQLite looks at all blocks
    blocks.expand_changes(sql, and_(named, select(cut.c.key).where(within).exists()))
    return states(sql, targets)


def _spans(sql: Sql, living: Mapping[str, int], before_ms: int) -> dict[int, tuple[int, int, int]]:
    """The first and the last version of each record, and the first that is newer than the cutoff."""
    c, b = changes.c, change_blocks.c
    found: dict[int, tuple[int, int, int]] = {}
    for chunk in chunks(sorted(living.values()), CHUNK):
        # The server's clock may have gone back: a change that is newer keeps those after it, whatever their time.
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
        blocks.expand_messages(sql, or_(*runs))
    removed_messages = sql.remove(
        messages,
        hidden,
        lambda run: and_(m.record == run.r, m.version <= run.v, m.seq >= run.low, m.seq < run.high),
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
    held = {
        (sql.namespace, run.source, record, state.version, run.start, run.stop)
        for record, state in bases.items()
        for run in message_ranges.parse(state.fields.get(SEGMENTS, b"[]"))
    }
    sql.add(shares, list(held))
    _thin_items(sql, {record: state.version for record, state in bases.items()}, keys)
    return int(removed_changes), removed_messages


def _thin_items(sql: Sql, bases: Mapping[str, int], keys: Mapping[str, int]) -> None:
    """Leave of items what these records show from their bases on, and what forks show of them."""
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
    # A later state may show again what the base does not: a rollback sets `#segments`, which is noted in `shares`.
    for record, version, *run in sql.execute(query.where(sql.among(s.record, list(bases)))):
        if version > bases[record].version:
            shown[record].append(Segment(*run))
    return [
        {"r": keys[record], "low": low, "high": high, "v": state.version}
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


def _upto(number: Column[Any], base: Any) -> ColumnElement[bool]:
    return and_(number.table.c.record == base.r, number <= base.v)


def _packed(sql: Sql, table: Table, which: ColumnElement[bool]) -> int:
    """How many rows are in blocks."""
    return sql.execute(select(func.sum(table.c.count)).where(which)).scalar() or 0


# Events, and rows of the quarantine


def purge_events(sql: Sql, before_ms: int) -> int:
    """Remove the oldest events that are older than the cutoff, some thousands at most; how many those were."""
    e = events.c
    old = and_(e.namespace == sql.namespace, e.time_ms < before_ms)
    last = sql.execute(select(e.time_ms).where(old).order_by(e.time_ms).offset(_TOGETHER - 1).limit(1)).scalar()
    # All of the last one's millisecond go too: a cut between them would not be one by time.
    some = old if last is None else and_(e.namespace == sql.namespace, e.time_ms <= last)
    return sql.execute(delete(events).where(some)).rowcount


def purge_quarantine(sql: Sql, before_ms: int) -> int:
    """Remove the oldest rows of the quarantine of which nothing is lost, some thousands at most; how many."""
    q = quarantine.c
    old = and_(q.namespace == sql.namespace, q.reason == RESOLVED, q.time_ms < before_ms)
    some = select(q.id).where(old).order_by(q.id).limit(_TOGETHER).scalar_subquery()
    return sql.execute(delete(quarantine).where(q.id.in_(some))).rowcount
