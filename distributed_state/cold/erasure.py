"""Removes every row of records. Law: what stays is a hash and a version, so that no version is ever used twice.

An erasure is noted before it is begun and until Redis is clean too, so whoever finds it can go on with it. What comes
late is noted as well, in the transaction that archives it: SQL alone knows what was erased. A fork of an erased state
and a rollback to one were read before it went; a tombstone that asks for the erasure was written by somebody who did
not know that it is done. Who forks has the source archived first and looks here, so nothing that came late has forks.

Design: section 15.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, and_, bindparam, delete, select, update

from distributed_state.cold import branch_reading, record_index
from distributed_state.cold.bulk import Row, among, chunks, put
from distributed_state.cold.entries import Parsed
from distributed_state.cold.handing_down import hand_down_all, let_go
from distributed_state.cold.listing import forks, owned
from distributed_state.cold.record_index import ERASED, NOWHERE, Head, erased_unknown, forgotten, hashed, lock
from distributed_state.cold.tables import OF_A_RECORD, erasures, events, quarantine, records
from distributed_state.cold.values import Erasure
from distributed_state.values.model import ERASE, FORGET


def pending(
    connection: Connection,
    namespace: str,
    *,
    names: Sequence[str] | None = None,
    owner: str | None = None,
    partitions: Sequence[int] | None = None,
    limit: int | None = None,
) -> list[Erasure]:
    """The erasures that are not complete: of these records, for this user, in these partitions."""
    e = erasures.c
    query = select(e.record, e.partition, e.owner, e.forks, e.version, e.actor).where(e.namespace == namespace)
    if names is not None:
        query = query.where(among(connection, e.record, names))
    if owner is not None:
        query = query.where(e.owner == owner)
    if partitions is not None:
        query = query.where(e.partition.in_(partitions))
    return [Erasure(*row) for row in connection.execute(query.order_by(e.record).limit(limit))]


def request_owned(connection: Connection, namespace: str, user: str, actor: str) -> list[Erasure]:
    """Note all records of a user, and all their forks, as to be erased; what is pending for the user."""
    locked = _locked(connection, namespace, user)
    _note(
        connection, namespace, [Erasure(each, row["partition"], user, True, 0, actor) for each, row in locked.items()]
    )
    _note_when(connection, namespace, forgotten(namespace, user))
    return pending(connection, namespace, owner=user)


def _locked(connection: Connection, namespace: str, user: str) -> dict[str, Head]:
    """The rows of all records of a user and of all their forks, held."""
    wanted = set(owned(connection, namespace, user))
    while True:
        held = connection.begin_nested()
        found = branch_reading.heads(connection, namespace, wanted) | lock(connection, namespace, wanted)
        # A fork of a record that is held is not archived before this is committed, and noted then.
        late = set(owned(connection, namespace, user)) - wanted
        if not late:
            held.commit()
            return found
        # All are let go and held again in their order: an archiver may hold one of these and wait for one of ours.
        held.rollback()
        wanted |= late


def _note_when(connection: Connection, namespace: str, name: str) -> None:
    """Keep when this was erased: of a record that only a lost server and its writer knew of, nothing else says so."""
    now = int(time.time() * 1000)
    row = {"namespace": namespace, "record": name, "partition": NOWHERE, "scope": ERASED}
    row |= {"epoch": "", "version": 0, "created_ms": now, "updated_ms": now, "listed_ms": now, "deleted": True}
    row |= {**dict.fromkeys(record_index.ABOUT), "size": None}
    there = lock(connection, namespace, [name]).get(name)
    record_index.put(connection, [row | {"key": there["key"]} if there else row])


def request(connection: Connection, namespace: str, record: str, actor: str) -> list[Erasure]:
    """Note a record as to be erased, without its forks, if it has rows; what is pending for it."""
    rows = branch_reading.heads(connection, namespace, [record]) | lock(connection, namespace, [record])
    if not rows:
        _note_when(connection, namespace, erased_unknown(namespace, record))
    _note(connection, namespace, [Erasure(each, row["partition"], None, False, 0, actor) for each, row in rows.items()])
    return pending(connection, namespace, names=[record])


def _note(connection: Connection, namespace: str, wanted: Sequence[Erasure]) -> None:
    """Note erasures again, over those that are noted. The rows of `records` are locked."""
    known = {
        each.record: each
        for some in chunks(wanted, 500)
        for each in pending(connection, namespace, names=[each.record for each in some])
    }
    rows: dict[str, Row] = {}
    for each in wanted:
        before = known.get(each.record, each)
        # Whose it is and whether forks go, too, stays known: who noted it first may have asked for more.
        rows[each.record] = (namespace, each.record, each.partition, each.owner or before.owner,
                             each.forks or before.forks, 0, each.actor or before.actor)  # fmt: skip
    put(connection, erasures, list(rows.values()), [(namespace, record) for record in known])


def erase(connection: Connection, namespace: str, names: Sequence[str]) -> None:
    """Delete all rows of these records, and leave the version of each under its hash.

    Forks get what they share first, or are noted as to be erased, as it was asked for.
    """
    for chunk in chunks(sorted(set(names)), 200):
        hashes = {hashed(namespace, record): record for record in chunk}
        rows = lock(connection, namespace, [*chunk, *hashes])
        noted = pending(connection, namespace, names=chunk)
        _note_forks(connection, namespace, [each for each in noted if each.forks])
        alone = set(chunk) - {each.record for each in noted if each.forks}
        if alone:
            hand_down_all(connection, [rows[each]["key"] for each in sorted(alone) if each in rows])
        keys = [row["key"] for row in rows.values()]
        for table in OF_A_RECORD:
            connection.execute(delete(table).where(among(connection, table.c.record, keys)))
        q = quarantine.c
        connection.execute(delete(quarantine).where(q.namespace == namespace, among(connection, q.record, chunk)))
        branch_reading.erase(connection, namespace, chunk)
        connection.execute(
            delete(events).where(events.c.namespace == namespace, among(connection, events.c.subject, chunk))
        )
        let_go(connection, namespace, chunk)
        gone = {name for name, record in hashes.items() if record in rows}
        rest = [_stone(rows[hashes[name]], name, rows.get(name)) for name in sorted(gone)]
        record_index.remove(connection, [row["key"] for name, row in rows.items() if name in gone or name in chunk])
        record_index.put(connection, rest)
        left = {hashes[name]: row["version"] for name, row in rows.items() if name in hashes}
        left |= {hashes[row["record"]]: row["version"] for row in rest}
        mine = and_(erasures.c.namespace == namespace, erasures.c.record == bindparam("r"))
        known = [{"r": each.record, "v": left[each.record]} for each in noted if each.record in left]
        if known:
            connection.execute(update(erasures).where(mine).values(version=bindparam("v")), known)
        never = [{"r": each.record} for each in noted if each.record not in left]
        if never:
            connection.execute(delete(erasures).where(mine), never)


def _note_forks(connection: Connection, namespace: str, noted: Sequence[Erasure]) -> None:
    wanted: dict[str, Erasure] = {}
    for owner, actor in {(each.owner, each.actor) for each in noted}:
        sources = [each.record for each in noted if (each.owner, each.actor) == (owner, actor)]
        for record, partition in forks(connection, namespace, sources).items():
            wanted[record] = Erasure(record, partition, owner, True, 0, actor)
    # Those that are noted already, and not erased yet, stay as they are.
    for each in noted:
        wanted.pop(each.record, None)
    _note(connection, namespace, list(wanted.values()))


def _stone(row: Head, name: str, former: Head | None) -> dict[str, Any]:
    version = max(row["version"], former["version"] if former else 0)
    hidden = {"record": name, "scope": ERASED, **dict.fromkeys(record_index.ABOUT), "size": None}
    stone = {**row, **hidden, "deleted": True, "version": version}
    del stone["key"]  # that of the record, whose rows are gone
    return stone


def complete(connection: Connection, namespace: str, done: Mapping[str, int]) -> None:
    """Forget the erasures up to these versions: Redis is clean. What came late of these records goes, too."""
    e = erasures.c
    for chunk in chunks(sorted(done), 200):
        living = lock(connection, namespace, chunk)
        gone = [record for record in chunk if record not in living]
        connection.execute(
            delete(events).where(events.c.namespace == namespace, among(connection, events.c.subject, gone))
        )
        branch_reading.erase(connection, namespace, gone)
        mine = and_(e.namespace == namespace, e.record == bindparam("r"), e.version == bindparam("v"))
        connection.execute(delete(erasures).where(mine), [{"r": record, "v": done[record]} for record in chunk])


def note_late(connection: Connection, namespace: str, accepted: Iterable[Parsed], existing: Mapping[str, Head]) -> None:
    """Note what of these changes was made from something that is erased, or noted with its forks.

    Their rows and those of what they were forked from are locked: an erasure waits for this, or was before it, and then
    a statement that begins now sees what it left.
    """
    wanted: dict[str, Erasure] = {}
    made: dict[str, list[tuple[Parsed, int]]] = {}
    for item in accepted:
        entry = item.entry
        if entry.kind in (FORGET, ERASE):
            known = existing.get(entry.record)
            owner = known["owner"] if known else item.owner
            whole = entry.kind == FORGET
            wanted[entry.record] = Erasure(entry.record, item.partition, owner, whole, 0, entry.actor)
        elif item.parent is not None:
            made.setdefault(item.parent, []).append((item, item.parent_version))
        elif entry.kind == "rollback" and entry.record not in existing:
            made.setdefault(entry.record, []).append((item, 0))
    for chunk in chunks(sorted(made), 500):
        noted = {each.record: each for each in pending(connection, namespace, names=chunk) if each.forks}
        stones = {hashed(namespace, source): source for source in chunk}
        r = records.c
        query = select(r.record, r.version).where(r.namespace == namespace, r.record.in_(stones))
        erased = {stones[stone]: version for stone, version in connection.execute(query)}
        for source in chunk:
            for item, version in made[source]:
                if source in noted or version <= erased.get(source, -1):
                    by = noted.get(source)
                    owner, actor = (item.owner, "") if by is None else (by.owner, by.actor)
                    record = item.entry.record
                    wanted[record] = Erasure(record, item.partition, owner, True, 0, actor)
    if wanted:
        _note(connection, namespace, list(wanted.values()))
