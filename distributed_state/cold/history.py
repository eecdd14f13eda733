"""Reads records back. Law: a state is its latest snapshot and the fold of the changes after it, in order.

One row of `changes` per version: what a new epoch replaced was moved to quarantine when it was archived.

Design: sections 9, 11.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import BigInteger, Connection, Select, and_, bindparam, case, func, or_, select

from distributed_state.cold.bulk import Row, chunks, listed
from distributed_state.cold.record_index import ERASED, Head, find, hashed, key_of, keys
from distributed_state.cold.tables import TEXT, changes, messages, records, snapshots
from distributed_state.errors import NotFound
from distributed_state.values import message_ranges
from distributed_state.values.journal import Loaded, Segment, State, fold, pack, unpack
from distributed_state.values.model import DELETED, RESTORED

log = logging.getLogger(__name__)
_GONE = {DELETED: b"1"}
_STILL = ("checkpoint", "switch", "lifetime")  # kinds of commits that change nothing of what a rollback restores


def snapshot_row(key: int, state: State) -> Row:
    """The row of `snapshots` that keeps a state of the record with this number."""
    data = pack((b"s", name, value) for name, value in state.fields.items())
    return (key, state.version, state.epoch, data)


def states(connection: Connection, namespace: str, targets: Mapping[str, int]) -> dict[str, State]:
    """The states of many records, each at its target version; a record of which nothing is left is left out.

    The version of a state is that of the last change found, which is lower than the target if that one is missing.
    """
    found: dict[str, State] = {}
    for chunk in chunks(targets.items(), 2000):
        _fold_states(connection, namespace, chunk, found)
    return found


def _fold_states(connection: Connection, namespace: str, targets: Sequence[Row], found: dict[str, State]) -> None:
    s = snapshots.c
    c = changes.c
    r = records.c
    wanted = listed(connection, {"record": TEXT, "target": BigInteger()}, targets)
    same = and_(r.namespace == namespace, r.record == wanted.c.record)
    named = select(r.key, r.record, wanted.c.target).join(wanted, same).cte("named")
    base = select(func.max(s.version)).where(s.record == named.c.key, s.version <= named.c.target).scalar_subquery()
    bases = select(named.c.key, named.c.record, named.c.target, base.label("base")).cte("bases")
    at_base = and_(s.record == bases.c.key, s.version == bases.c.base)
    query = select(bases.c.record, s.epoch, s.version, s.data).join_from(bases, snapshots, at_base)
    for record, epoch, version, data in connection.execute(query):
        found[record] = State(epoch, version, _fields(data))
    after = and_(c.record == bases.c.key, c.version > func.coalesce(bases.c.base, 0), c.version <= bases.c.target)
    query = select(bases.c.record, c.epoch, c.version, c.data).join_from(bases, changes, after)
    # Sorted here: asked to sort, SQLite walks all of `changes` in that order.
    later = sorted(connection.execute(query), key=lambda row: (row.record, row.version))
    for record, epoch, version, data in later:
        fields = found[record].fields if record in found else {}
        fold(fields, unpack(data))
        found[record] = State(epoch, version, fields)


def load(connection: Connection, namespace: str, record: str, window: int) -> Loaded | None:
    """The head of a record with its last messages, in three statements."""
    head = _head_with_snapshot(connection, namespace, record)
    if head is None:
        return None
    if head["scope"] == ERASED:
        return Loaded(State(head["epoch"], head["version"], dict(_GONE)), [])
    base = head["base"] or 0
    fields = _fields(head["data"] or b"")
    c = changes.c
    at = base
    query = select(c.version, c.data).where(c.record == head["key"], c.version > base, c.version <= head["version"])
    for version, data in connection.execute(query.order_by(c.version)):
        _warn_of_gap(record, at, version)
        at = version
        fold(fields, unpack(data))
    if not at and head["deleted"]:
        fields = dict(_GONE)
    runs = message_ranges.last(message_ranges.segments(record, fields), window)
    shown = sorted(messages_of(connection, namespace, record, runs, key=head["key"]).items())
    return Loaded(State(head["epoch"], head["version"], fields), shown, head["updated_ms"])


def applied(connection: Connection, namespace: str, record: str, event: str, since_ms: int) -> int:
    """The version that a commit of a record became, 0 if it did not. Raises NotFound if that was purged."""
    c = changes.c
    here = c.record == key_of(namespace, record)
    version = connection.execute(select(c.version).where(here, c.event == event)).scalar()
    if version is not None:
        return int(version)
    head = find(connection, namespace, record)
    first = connection.execute(select(c.version, c.time_ms).where(here).order_by(c.version).limit(1)).first()
    # What the first that is left does not follow was purged, and is no newer.
    purged_ms = head["updated_ms"] if head and not first else first.time_ms if first and first.version > 1 else -1
    if purged_ms >= since_ms:
        raise NotFound(f"{record}: what was committed lately was purged")
    return 0


def _head_with_snapshot(connection: Connection, namespace: str, record: str) -> Head | None:
    wanted = {"wanted_namespace": namespace, "wanted": record, "names": [record, hashed(namespace, record)]}
    rows = {row["record"]: row for row in connection.execute(_head(), wanted).mappings()}
    return rows.get(record) or next(iter(rows.values()), None)


@cache
def _head() -> Select[Any]:
    """Made once: this is what a new session waits for, and making it takes as long as executing it."""
    r = records.c
    s = snapshots.c
    namespace = bindparam("wanted_namespace", type_=TEXT)
    # The key does not depend on the row found: PostgreSQL looks the snapshot up by it, and could else hash them all.
    named = records.alias("named").c
    wanted = and_(named.namespace == namespace, named.record == bindparam("wanted", type_=TEXT))
    same = s.record == select(named.key).where(wanted).scalar_subquery()
    latest = select(func.max(s.version)).where(same).scalar_subquery()
    head = (r.key, r.record, r.scope, r.epoch, r.version, r.deleted, r.updated_ms)
    query = select(*head, s.version.label("base"), s.data)
    query = query.outerjoin_from(records, snapshots, and_(same, s.version == latest))
    return query.where(r.namespace == namespace, r.record.in_(bindparam("names", expanding=True, type_=TEXT)))


def _fields(snapshot: bytes) -> dict[bytes, bytes]:
    return {op.name: op.value for op in unpack(snapshot)}


def _warn_of_gap(record: str, before: int, version: int) -> None:
    if before and version != before + 1:
        log.warning("%s: versions %d to %d are missing; see the quarantine", record, before + 1, version - 1)


def state_at(connection: Connection, namespace: str, record: str, version: int) -> State:
    """The state of a record at a version. Raises NotFound saying which versions there are."""
    head = find(connection, namespace, record)
    if head is None:
        raise NotFound(f"{record} is not in the archive")
    state = states(connection, namespace, {record: version}).get(record)
    if version == head["version"]:
        fields = state.fields if state else dict(_GONE) if head["deleted"] else {}
        return State(head["epoch"], version, fields)
    if not state or state.version != version or version > head["version"]:
        first = oldest(connection, namespace, record)
        raise NotFound(f"{record} has no version {version}: the oldest is {first}, the newest {head['version']}")
    return state


def oldest(connection: Connection, namespace: str, record: str) -> int:
    """The first version that can still be read."""
    first = [
        select(func.min(table.c.version)).where(table.c.record == key_of(namespace, record))
        for table in (changes, snapshots)
    ]
    found = connection.execute(select(*(query.scalar_subquery() for query in first))).one()
    known = [version for version in found if version is not None]
    if known:
        return int(min(known))
    head = find(connection, namespace, record)
    if head is None:
        raise NotFound(f"{record} is not in the archive")
    return int(head["version"])


def step_back(connection: Connection, namespace: str, record: str, version: int, steps: int) -> int:
    """The version whose state is `steps` before that of `version`, on the way on which it came about.

    A rollback is no step: from it the way leads on from the version whose state it is, so what it took back is not met
    again. Nor is a commit that changes no state. Read are as many rows as steps, however long the history is.
    """
    c = changes.c
    at = version
    left = steps
    kept = and_(c.record == key_of(namespace, record), or_(c.kind.not_in(_STILL), c.version == 1))
    while left:
        query = select(c.version, case((c.kind == "rollback", c.data)).label("data")).where(kept, c.version <= at)
        # One more than steps: the first is where we stand.
        way = connection.execute(query.order_by(c.version.desc()).limit(left + 1)).all()
        back = next(((passed, source) for passed, row in enumerate(way) if (source := _source(*row))), None)
        if back is not None:
            left = left - back[0]
            at = back[1]
            continue
        found = [int(row.version) for row in way]
        if len(found) <= left and (first := oldest(connection, namespace, record)) <= at and first not in found:
            found.append(first)  # what a purge or an import left of the way here
        if len(found) <= left:
            there = steps - left + max(len(found) - 1, 0)
            raise NotFound(f"{record[:200]}: {steps} steps back from version {version} there is nothing, only {there}")
        return found[left]
    return at


def _source(version: int, data: bytes | None) -> int:
    """The version whose state a rollback is, 0 if this is none. A file that was imported may say anything."""
    marks = [op.value for op in unpack(data or b"") if op.name == RESTORED and op.value.isdigit()]
    source = int(marks[-1][:19]) if marks else 0
    return source if source < version else 0


def messages_of(
    connection: Connection,
    namespace: str,
    record: str,
    runs: Sequence[Segment],
    parent: str | None = None,
    key: int | None = None,
) -> dict[int, bytes]:
    """The messages of these runs by sequence number, wherever along the lineage they are kept.

    A fork that is not archived has no copies of its own yet; `parent`, what it was made from, has those it was handed.
    `key` is the number of the record, if it is known.
    """
    found: dict[int, bytes] = {}
    m = messages.c
    names = {run.source for run in runs} | {record, parent or record}
    known = {record: key} if key is not None else {}
    known |= keys(connection, namespace, names - known.keys()) if names - known.keys() else {}
    for chunk in chunks(runs, 50):
        places = [
            and_(
                or_(
                    m.record.in_({known[each] for each in (record, run.source) if each in known}),
                    and_(m.record == known.get(parent or record, -1), m.version == 0),
                ),
                m.seq >= run.start,
                m.seq < run.stop,
            )
            for run in chunk
            if run.start < run.stop
        ]
        if places:
            query = select(m.record, m.seq, m.data).where(or_(*places))
            kept: dict[int, dict[int, bytes]] = {}
            for place, seq, data in connection.execute(query).all():
                kept.setdefault(place, {})[seq] = data
            # Copies come last and stay: the source may have been purged or erased, and begun again since.
            last = (known.get(record), known.get(parent or ""))
            for place in sorted(kept, key=lambda place: (place == last[0], place == last[1])):
                found.update(kept[place])
    return found


def since(connection: Connection, namespace: str, record: str, runs: Sequence[Segment], since_ms: int) -> list[Segment]:
    """What follows the last message that was committed before a time, in the order of the runs.

    A message whose commit was purged is older than every commit that was not; that is all that is known of it.
    """
    m = messages.c
    c = changes.c
    for at, run in enumerate(runs):
        source = key_of(namespace, run.source)
        oldest = select(c.time_ms).where(c.record == source).order_by(c.version).limit(1)
        begun = connection.execute(oldest).scalar()
        if begun is None or begun >= since_ms:
            return list(runs[at:])
        mine = and_(m.record == source, m.seq >= run.start, m.seq < run.stop)
        same = and_(c.record == m.record, c.version == m.version)
        # In the order of the key, so that the search ends at the first: what it passes is hidden and not passed again.
        query = select(m.seq).join(changes, same).where(mine, c.time_ms >= since_ms).order_by(m.seq).limit(1)
        first = connection.execute(query).scalar()
        if first is not None:
            return [Segment(run.source, first, run.stop), *runs[at + 1 :]]
    return []
