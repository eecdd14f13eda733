"""Reads records and their commits, and checks which commits SQL has.

Law: a state is its latest snapshot and the changes after it, folded in order. `changes` has one row for each version:
versions that a new epoch replaced went to quarantine when that was archived. A commit is read as it was written; it is
identified by its event, never by record and version.

Design: sections 9, 11, 14.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import (
    BigInteger,
    FromClause,
    Join,
    LargeBinary,
    Select,
    and_,
    bindparam,
    case,
    func,
    literal,
    or_,
    outerjoin,
    select,
    union_all,
)

from distributed_state.cold import blocks, record_index, record_items
from distributed_state.cold.engine import Row, Sql, chunks
from distributed_state.cold.epochs import last_event
from distributed_state.cold.record_index import ERASED, LARGEST, Head, find, following, hashed, key_of, keys, oldest
from distributed_state.cold.tables import (
    TEXT,
    change_blocks,
    changes,
    events,
    messages,
    quarantine,
    records,
    shares,
    snapshots,
)
from distributed_state.cold.values import RESOLVED, Archived, Commits
from distributed_state.errors import NotFound
from distributed_state.values import message_ranges
from distributed_state.values.journal import JournalEntry, Loaded, Op, Segment, State, fold, item_of, pack, unpack
from distributed_state.values.model import DELETED, RESTORED, SEGMENTS, unescape

log = logging.getLogger(__name__)
_PAGE = 200
_STILL = ("checkpoint", "switch", "lifetime")  # kinds of commits that change nothing that a rollback restores


def _gone(head: Head) -> dict[bytes, bytes]:
    """The state of a record that was erased, or purged when deleted: whether it expired is all that is left."""
    return {DELETED: (head["lifetime"] or "1").encode()}


def snapshot_row(key: int, state: State) -> Row:
    """The row of `snapshots` for a state of the record with this key."""
    data = pack((b"s", name, value) for name, value in state.fields.items())
    return (key, state.version, state.epoch, data)


def note_shown(sql: Sql, bases: Mapping[str, State]) -> None:
    """Add to `shares` the messages that the oldest states of records show by `#segments`."""
    rows = {
        (sql.namespace, run.source, record, state.version, run.start, run.stop)
        for record, state in bases.items()
        for run in message_ranges.parse(state.fields.get(SEGMENTS, b"[]"))
    }
    sql.add(shares, list(rows))


# A record's head, and its state at a version


def load(sql: Sql, record: str, *, window: int) -> Loaded | None:
    """The head of a record and its last `window` visible messages, in three statements.

    None if it was never archived. A record that was erased, or purged when deleted, has only `#deleted` and its
    version.
    """
    head = _head_with_snapshot(sql, record)
    if head is None:
        return None
    if head["scope"] == ERASED:
        return Loaded(State(head["epoch"], head["version"], _gone(head)), [])
    base = head["base"] or 0
    fields = _fields(head["data"] or b"")
    c, b = changes.c, change_blocks.c
    at = base
    key, last = head["key"], head["version"]
    rows = select(c.epoch, c.version, c.data).where(c.record == key, c.version > base, c.version <= last)
    packed = select(literal(""), b.last, b.data).where(b.record == key, b.last > base)
    for _, version, data in sorted(blocks.operations(sql, rows, packed), key=lambda row: int(row[1])):
        if version <= base:
            continue
        if at and version != at + 1:
            text = "%s: versions %d to %d are missing; see the quarantine"
            log.warning(text, record, at + 1, version - 1, extra={"record": record})
        at = version
        fold(fields, unpack(data))
    if not at and head["deleted"]:
        fields = _gone(head)
    runs = message_ranges.last(message_ranges.segments(record, fields), window)
    shown = sorted(messages_of(sql, record, runs, key=head["key"]).items())
    return Loaded(State(head["epoch"], head["version"], fields), shown, head["updated_ms"])


def _head_with_snapshot(sql: Sql, record: str) -> Head | None:
    wanted = {"wanted_namespace": sql.namespace, "wanted": record, "names": [record, hashed(sql.namespace, record)]}
    rows = {row["record"]: row for row in sql.execute(_head(), wanted).mappings()}
    return rows.get(record) or next(iter(rows.values()), None)


@cache
def _head() -> Select[Any]:
    """Built once, because each new session waits for this query, and building it takes as long as executing it."""
    r = records.c
    s = snapshots.c
    namespace = bindparam("wanted_namespace", type_=TEXT)
    # The key does not depend on the joined row, so PostgreSQL looks up the snapshot by it instead of hashing all of
    # them.
    named = records.alias("named").c
    wanted = and_(named.namespace == namespace, named.record == bindparam("wanted", type_=TEXT))
    same = s.record == select(named.key).where(wanted).scalar_subquery()
    latest = select(func.max(s.version)).where(same).scalar_subquery()
    head = (r.key, r.record, r.scope, r.epoch, r.version, r.deleted, r.lifetime, r.updated_ms)
    query = select(*head, s.version.label("base"), s.data)
    query = query.outerjoin_from(records, snapshots, and_(same, s.version == latest))
    return query.where(r.namespace == namespace, r.record.in_(bindparam("names", expanding=True, type_=TEXT)))


def state_at(sql: Sql, record: str, version: int) -> State:
    """The state of a record at a version. Raises NotFound with the oldest and newest versions."""
    head = find(sql, record)
    if head is None:
        raise NotFound(f"{record} is not in the archive")
    state = states(sql, {record: version}).get(record)
    if version == head["version"]:
        fields = state.fields if state else _gone(head) if head["deleted"] else {}
        return State(head["epoch"], version, fields)
    if not state or state.version != version or version > head["version"]:
        first = oldest(sql, record)
        raise NotFound(f"{record} has no version {version}: the oldest is {first}, the newest {head['version']}")
    return state


def states(sql: Sql, targets: Mapping[str, int]) -> dict[str, State]:
    """The states of many records, each at its target version; records without any data are left out.

    A state has the version of the last change found, which is lower than the target if that is missing.
    """
    found: dict[str, State] = {}
    for chunk in chunks(targets.items(), 2000):
        _fold_states(sql, chunk, found)
    return found


def _fold_states(sql: Sql, targets: Sequence[Row], found: dict[str, State]) -> None:
    s = snapshots.c
    c = changes.c
    r = records.c
    wanted = sql.listed({"record": TEXT, "target": BigInteger()}, targets)
    same = and_(r.namespace == sql.namespace, r.record == wanted.c.record)
    # Outer joins run in this order. With inner joins SQLite scans the list for each existing row.
    named = select(r.key, r.record, wanted.c.target).select_from(wanted.outerjoin(records, same)).cte("named")
    base = select(func.max(s.version)).where(s.record == named.c.key, s.version <= named.c.target).scalar_subquery()
    bases = select(named.c.key, named.c.record, named.c.target, base.label("base")).cte("bases")
    at_base = and_(s.record == bases.c.key, s.version == bases.c.base)
    query = select(bases, s.epoch, s.data).join_from(bases, snapshots, at_base, isouter=True)
    known = {row.key: row for row in sql.execute(query)}
    after = and_(c.record == bases.c.key, c.version > func.coalesce(bases.c.base, 0), c.version <= bases.c.target)
    rows = select(c.record, c.epoch, c.version, c.data)
    b = change_blocks.c
    around = and_(b.record == bases.c.key, b.last > func.coalesce(bases.c.base, 0), b.first <= bases.c.target)
    packed = select(b.record, literal(""), b.last, b.data)
    later = blocks.operations(
        sql, rows.join_from(bases, changes, after), packed.join_from(bases, change_blocks, around)
    )
    # Sorted here: with ORDER BY, SQLite walks all of `changes` in that order.
    ordered = groupby(sorted(later, key=itemgetter(0, 2)), key=itemgetter(0))
    changed = {key: list(rows_) for key, rows_ in ordered}
    for key, (_, record, target, base, epoch, data) in known.items():
        fields = {} if epoch is None else _fields(data)
        version = base
        for _, its_epoch, its_version, operations in changed.get(key, ()):
            if (base or 0) < its_version <= target:  # a block may also have versions outside of the range
                fold(fields, unpack(operations))
                epoch, version = its_epoch, its_version
        if epoch is not None:
            found[record] = State(epoch, version, fields)


def _fields(snapshot: bytes) -> dict[bytes, bytes]:
    return {op.name: op.value for op in unpack(snapshot)}


# Existing versions


def applied(sql: Sql, record: str, event: str, since_ms: int) -> int:
    """The version that a commit of a record became, 0 if it was not archived. Raises NotFound if that was purged."""
    c = changes.c
    here = c.record == key_of(sql, record)
    version = sql.execute(select(c.version).where(here, c.event == event)).scalar()
    if version is not None:
        return int(version)
    head = find(sql, record)
    first = _first(sql, key_of(sql, record))
    # The commit is older than the first remaining change, so it was purged.
    purged_ms = head["updated_ms"] if head and not first else first[1] if first and first[0] > 1 else -1
    if purged_ms >= since_ms:
        raise NotFound(f"{record}: its latest commits were purged")
    return 0


def _first(sql: Sql, key: blocks.Key) -> tuple[int, int] | None:
    """The version and the time of the first remaining change of a record."""
    c, b = changes.c, change_blocks.c
    queries = (
        select(c.version, c.time_ms).where(c.record == key).order_by(c.version),
        select(b.first, b.oldest_ms).where(b.record == key).order_by(b.last),
    )
    found = [row for query in queries for row in sql.execute(query.limit(1))]
    return min((tuple(row) for row in found), default=None)


def has_version(sql: Sql, record: str, version: int) -> bool:
    """Whether SQL has a record's version, had it and purged or erased it, or has a later whole state."""
    head = find(sql, record)
    if head is None or head["version"] < version:
        return False
    if blocks.changes_between(sql, key_of(sql, record), version - 1, version + 1, 1):
        return True
    q = quarantine.c
    refused = and_(q.namespace == sql.namespace, q.record == record, q.version == version, q.reason != RESOLVED)
    return sql.execute(select(q.id).where(refused)).first() is None


# Steps back. A rollback is not a step, and the changes that it undid are skipped


def step_back(sql: Sql, record: str, version: int, steps: int) -> int:
    """The version `steps` before `version`, along the states that led to it.

    A rollback is not a step: counting continues at the version that it restored, so changes that it undid are skipped.
    Commits that do not change the state are not steps either. The number of rows read depends on the steps, not on the
    length of the history.
    """
    at = version
    left = steps
    while left:
        # One more than the steps, because the first is the start.
        way = _way(sql, key_of(sql, record), at, left + 1)
        back = next(((passed, source) for passed, row in enumerate(way) if (source := _source(*row))), None)
        if back is not None:
            left = left - back[0]
            at = back[1]
            continue
        found = [version for version, _ in way]
        if len(found) <= left and (first := oldest(sql, record)) <= at and first not in found:
            found.append(first)  # the base that a purge or an import left
        if len(found) <= left:
            there = steps - left + max(len(found) - 1, 0)
            raise NotFound(f"{record[:200]}: version {version} has no state {steps} steps back, only {there} steps")
        return found[left]
    return at


def _way(sql: Sql, key: blocks.Key, last: int, count: int) -> list[tuple[int, bytes | None]]:
    """The newest changes of state up to a version, with the data of those that are rollbacks."""
    c = changes.c
    kept = and_(c.record == key, c.version <= last, or_(c.kind.not_in(_STILL), c.version == 1))
    query = select(c.version, case((c.kind == "rollback", c.data)).label("data")).where(kept)
    found = [(int(row.version), row.data) for row in sql.execute(query.order_by(c.version.desc()).limit(count))]
    for rows in blocks.downwards(sql, key, last):
        if len(found) == count and found[-1][0] > rows[-1].version:
            break
        found += [
            (row.version, row.data if row.kind == "rollback" else None)
            for row in rows
            if row.kind not in _STILL or row.version == 1
        ]
        found = sorted(found, key=lambda each: -each[0])[:count]
    return found


def _source(version: int, data: bytes | None) -> int:
    """The version that a rollback restored; 0 for other changes. An imported file may contain anything here."""
    marks = [op.value for op in unpack(data or b"") if op.name == RESTORED and op.value.isdigit()]
    source = int(marks[-1][:19]) if marks else 0
    return source if source < version else 0


# Messages


def messages_of(
    sql: Sql, record: str, runs: Sequence[Segment], parent: str | None = None, key: int | None = None
) -> dict[int, bytes]:
    """The messages of these runs by sequence number, stored under any record of the lineage.

    A fork that is not archived has no copies of its own yet; its `parent` has copies of the messages that it inherited.
    `key` is the record's key, if it is known.
    """
    found: dict[int, bytes] = {}
    m = messages.c
    names = {run.source for run in runs} | {record, parent or record}
    known = {record: key} if key is not None else {}
    known |= keys(sql, names - known.keys()) if names - known.keys() else {}
    for chunk in chunks([run for run in runs if run.start < run.stop], 50):
        places = [
            blocks.Run({known[each] for each in (record, run.source) if each in known}, run.start, run.stop)
            for run in chunk
        ]
        asked = or_(*(and_(m.seq >= run.start, m.seq < run.stop) for run in chunk))
        handed = and_(m.record == known.get(parent or record, -1), m.version == 0, asked)
        kept: dict[int, dict[int, bytes]] = {}
        for place, seq, data in blocks.messages_in(sql, places, handed):
            kept.setdefault(place, {})[seq] = data
        # Copies are read last and win: the source may have been purged, or erased and begun again.
        last = (known.get(record), known.get(parent or ""))
        for place in sorted(kept, key=lambda place: (place == last[0], place == last[1])):
            found.update(kept[place])
    return found


def message_lengths(sql: Sql, record: str, runs: Sequence[Segment]) -> dict[int, int]:
    """The sizes in bytes of the messages of these runs, or upper limits, by sequence number."""
    known = keys(sql, {run.source for run in runs} | {record})
    found: dict[int, int] = {}
    for run in runs:
        some = [known[each] for each in {record, run.source} if each in known]
        for number, length in blocks.lengths(sql, some, run.start, run.stop).items():
            found[number] = max(length, found.get(number, 0))
    return found


def since(sql: Sql, record: str, runs: Sequence[Segment], since_ms: int) -> list[Segment]:
    """The rest of the runs after the last message that was committed before a time.

    A message whose commit was purged is older than every commit that was not; its exact time is unknown.
    """
    m = messages.c
    c = changes.c
    for at, run in enumerate(runs):
        source = key_of(sql, run.source)
        begun = _first(sql, source)
        if begun is None or begun[1] >= since_ms:
            return list(runs[at:])
        mine = and_(m.record == source, m.seq >= run.start, m.seq < run.stop)
        same = and_(c.record == m.record, c.version == m.version)
        # In the order of the key, so that the search ends at the first: messages before it are hidden and not read
        # again.
        query = select(m.seq).join(changes, same).where(mine, c.time_ms >= since_ms).order_by(m.seq).limit(1)
        newer = [sql.execute(query).scalar(), blocks.first_since(sql, source, run.start, run.stop, since_ms)]
        first = min((seq for seq in newer if seq is not None), default=None)
        if first is not None:
            return [Segment(run.source, first, run.stop), *runs[at + 1 :]]
    return []


def overfull(sql: Sql, keep: int | None, before_ms: int | None, after: int) -> tuple[list[str], int | None]:
    """The next records that show more than `keep` messages, or older ones; and where the next page begins."""
    created = before_ms if keep is None and before_ms is not None else LARGEST
    rows, further = following(sql, after, created, _PAGE)

    def is_overfull(record: str, state: State) -> bool:
        runs = message_ranges.segments(record, state.fields)
        if keep is not None and message_ranges.count(runs) > keep:
            return True
        return before_ms is not None and since(sql, record, runs, before_ms) != runs

    heads = states(sql, {row.record: row.version for row in rows})
    found = [record for record, state in heads.items() if is_overfull(record, state)]
    return found, further


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
    """The changes that `entries` returns, without the contents of their messages and items."""
    key = keys(sql, [record]).get(record)
    rows = [] if key is None else blocks.changes_between(sql, key, after, before, limit, most)
    return [_entry(record, row, row.data) for row in rows]


def checkpoints(
    sql: Sql, record: str, after: int = 0, before: int | None = None, limit: int | None = None, order: str = "asc"
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
    """The changes of a record between two versions as committed, messages and items included, with their epochs.

    Contents that a purge removed are empty.
    """
    found = []
    rows = blocks.changes_between(sql, key, after, before, limit, most)
    if most is not None:
        rows = _fitting(sql, key, rows, most)
    for chunk in chunks(rows, 500):
        apart = [(row.version, op) for row in chunk for op in _apart(row.data)]
        said = blocks.bodies(sql, key, [int(op.name) for _, op in apart if op.kind == b"m"])
        put = record_items.bodies(sql, key, [(*item_of(op.name), at) for at, op in apart if op.kind == b"p"])
        found += [(row.epoch, _entry(record, row, _together(row.version, row.data, said, put))) for row in chunk]
    return found


def _entry(record: str, row: blocks.ChangeRow, operations: bytes) -> JournalEntry:
    return JournalEntry(
        row.offset,
        row.event,
        record,
        row.version,
        row.time_ms,
        row.kind,
        row.actor,
        row.token,
        operations,
        total_bytes=0,
    )


def _fitting(sql: Sql, key: int, rows: list[blocks.ChangeRow], most: int) -> list[blocks.ChangeRow]:
    """The first of these changes: `most` bytes together with their messages and items, or one change."""
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
    """The operations whose values are in another table."""
    operations = unpack(data) if b"m" in data or b"p" in data else []
    return [op for op in operations if op.kind in (b"m", b"p") and not op.value]


def _together(version: int, data: bytes, said: Mapping[int, bytes], put: Mapping[record_items.Name, bytes]) -> bytes:
    if not _apart(data):
        return data

    def whole(op: Op) -> bytes:
        if op.kind == b"m":
            return op.value or said.get(int(op.name), b"")
        return op.value or put.get((*item_of(op.name), version), b"") if op.kind == b"p" else op.value

    return pack(op._replace(value=whole(op)) for op in unpack(data))


# Checks whether SQL has some commits


def holds(sql: Sql, record: str, version: int, event: str) -> bool:
    """Whether this change was archived, or its effect was, in a later version."""
    q = quarantine.c
    kept = blocks.changes_between(sql, key_of(sql, record), version - 1, version + 1, None)
    if event in {row.event for row in kept}:
        return True
    resolved = select(q.id).where(q.namespace == sql.namespace, q.event == event, q.reason == RESOLVED)
    return sql.execute(resolved).first() is not None


def known_commits(sql: Sql, partition: int, epoch: str, entries: Sequence[JournalEntry]) -> Commits:
    """Which of these entries of an epoch SQL has, and how far their records are archived."""
    return Commits(
        lacking(sql, partition, epoch, entries),
        heads(sql, [entry.record for entry in entries if entry.record]),
        last_event(sql, partition, epoch),
    )


def heads(sql: Sql, wanted: Iterable[str]) -> dict[str, Archived]:
    """How far each record is archived: an erased record up to the erased version. Unknown records are left out."""
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
            # The record's own row wins: an erased record may have begun again.
            if row.record == record or record not in found:
                found[record] = Archived(row.version, row.epoch, 0, "")
        names = _wanted(sql, ((record, found[record].version) for record in chunk if record in found))
        at = select(names.c.record, c.version, c.epoch, c.offset, c.event).select_from(_changes(sql, names))
        for record, *head in sql.execute(at).all():
            if head[0] is not None:
                found[record] = Archived(*head)
    return found


def lacking(sql: Sql, partition: int, epoch: str, entries: Sequence[JournalEntry]) -> set[str]:
    """The events of those entries that SQL lacks, except for records that were erased since.

    Marks, which change nothing, are left out.
    """
    q = quarantine.c
    held = _alone(sql, partition, epoch, entries)
    for chunk in chunks(entries, 500):
        names = _wanted(sql, {(entry.record, entry.version) for entry in chunk})
        held.update(_events_of(sql, names))
        aside = and_(q.namespace == sql.namespace, q.event.in_([entry.event for entry in chunk]))
        held.update(sql.execute(select(q.event).where(aside)).scalars())
    left = [entry for entry in entries if entry.event not in held]
    erased = record_index.erased(sql, {entry.record for entry in left})
    left = [each for each in left if each.record not in erased or each.version > erased[each.record]["version"]]
    return {entry.event for entry in left} - _purged(sql, left)


def _events_of(sql: Sql, wanted: FromClause) -> Iterator[str]:
    """The event ids of these versions, and of all other versions in the same blocks."""
    b = change_blocks.c
    around = and_(b.record == records.c.key, b.first <= wanted.c.version, b.last >= wanted.c.version)
    found = select(b.record, b.last, b.data).select_from(_named(sql, wanted).outerjoin(change_blocks, around))
    packed = found.distinct().subquery()
    rows = select(changes.c.event, literal(b"", LargeBinary)).select_from(_changes(sql, wanted))
    # One statement sees one snapshot: compaction may move rows to a block meanwhile, or back.
    for event, data in sql.execute(union_all(rows, select(literal("", TEXT), packed.c.data))):
        if data:
            yield from (row.event for row in blocks.unpack_changes(data))
        elif event:
            yield event


def _purged(sql: Sql, entries: Sequence[JournalEntry]) -> set[str]:
    """The entries of a version before their record's oldest remaining one: their data may not come back."""
    c = changes.c
    oldest: dict[str, int] = {}
    names = {key: record for record, key in record_index.keys(sql, {entry.record for entry in entries}).items()}
    for version in (c.version, change_blocks.c.first):
        place = version.table.c.record
        for key, first in sql.rows(select(place, func.min(version)).group_by(place), place, names):
            oldest[names[key]] = min(first, oldest.get(names[key], first))
    return {entry.event for entry in entries if entry.version < oldest.get(entry.record, 0)}


def _alone(sql: Sql, partition: int, epoch: str, entries: Sequence[JournalEntry]) -> set[str]:
    """The entries without a record that SQL has: events written without a commit. Marks always count."""
    e = events.c
    alone = {f"{entry.event.rpartition('.')[0]}.0": entry for entry in entries if not entry.record}
    held = {entry.event for entry in alone.values() if not entry.data}
    for chunk in chunks([entry for entry in alone.values() if entry.data], 500):
        # Found by their numbers, which are in the primary key, and compared, as two histories may use a number twice.
        numbers = [int(unpack(entry.data)[0].name.partition(b" ")[0]) for entry in chunk]
        here = and_(e.namespace == sql.namespace, e.partition == partition, e.epoch == epoch, e.offset.in_(numbers))
        found = sql.execute(select(e.id).where(here)).scalars()
        held.update(alone[id].event for id in found if id in alone)
    return held


def _wanted(sql: Sql, pairs: Iterable[tuple[str, int]]) -> FromClause:
    return sql.listed({"record": TEXT, "version": BigInteger()}, sorted(pairs))


def _changes(sql: Sql, wanted: FromClause) -> Join:
    """The changes of these records and versions, with NULLs for missing ones."""
    same = and_(changes.c.record == records.c.key, changes.c.version == wanted.c.version)
    return _named(sql, wanted).outerjoin(changes, same)


def _named(sql: Sql, wanted: FromClause) -> Join:
    # An outer join runs in this order. With an inner join SQLite scans the list for each existing change.
    return outerjoin(wanted, records, and_(records.c.namespace == sql.namespace, records.c.record == wanted.c.record))
