"""Removes every row of records. Law: a hash and a version stay, so that no version is ever used twice.

An erasure is noted in SQL from before it begins until Redis is clean too, so that any worker can continue it. Late
commits get a note as well, in the transaction that archives them, because only SQL has the list of erased records. A
late commit is a fork of an erased state or a rollback to one, which read the state before the erasure, or a tombstone
by a worker that had not noticed the completed erasure. A fork has its source archived first and checks here, so late
records have no forks.

Before an erasure or a purge removes data that forks of a record show, the forks get copies of their own.

Design: sections 9, 11, 15.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from sqlalchemy import BigInteger, and_, bindparam, delete, func, insert, literal, literal_column, or_, select, update

from distributed_state.cold import aside, blocks, record_index
from distributed_state.cold.engine import Row, Sql, chunks
from distributed_state.cold.listings import forks, owned
from distributed_state.cold.record_index import ERASED, NOWHERE, Head, Parsed, erased_unknown, forgotten, hashed, lock
from distributed_state.cold.tables import (
    OF_A_RECORD,
    erasures,
    events,
    items,
    layers,
    message_blocks,
    messages,
    quarantine,
    records,
    shares,
    tags,
    usage,
)
from distributed_state.cold.values import Erasure
from distributed_state.values.model import ERASE, FORGET


def request(sql: Sql, record: str, actor: str = "") -> list[Erasure]:
    """Note that a record, if it has rows, is to be erased without its forks; return what is pending for it."""
    rows = aside.heads(sql, [record]) | lock(sql, [record])
    if not rows:
        _note_when(sql, erased_unknown(sql.namespace, record))
    _note(sql, [Erasure(each, row["partition"], None, False, 0, actor) for each, row in rows.items()])
    return pending(sql, names=[record])


def request_owned(sql: Sql, user: str, actor: str = "") -> list[Erasure]:
    """Note that all records of a user, and all their forks, are to be erased; return what is pending for the user."""
    locked = _locked(sql, user)
    _note(sql, [Erasure(each, row["partition"], user, True, 0, actor) for each, row in locked.items()])
    _note_when(sql, forgotten(sql.namespace, user))
    return pending(sql, owner=user)


def pending(
    sql: Sql,
    *,
    names: Iterable[str] | None = None,
    owner: str | None = None,
    partitions: Sequence[int] | None = None,
    limit: int | None = None,
) -> list[Erasure]:
    """The incomplete erasures: of these records, for this user, in these partitions."""
    e = erasures.c
    query = select(e.record, e.partition, e.owner, e.forks, e.version, e.actor).where(e.namespace == sql.namespace)
    if owner is not None:
        query = query.where(e.owner == owner)
    if partitions is not None:
        query = query.where(sql.among(e.partition, partitions))
    query = query.order_by(e.record)
    found = sql.execute(query.limit(limit)) if names is None else islice(sql.rows(query, e.record, names), limit)
    return [Erasure(*row) for row in found]


def erase(sql: Sql, names: Sequence[str]) -> None:
    """Delete all rows of these records, and keep the version of each under its hash.

    Their forks first get copies of shared data, or an erasure is noted for them, as requested.
    """
    for chunk in chunks(sorted(set(names)), 200):
        hashes = {hashed(sql.namespace, record): record for record in chunk}
        rows = lock(sql, [*chunk, *hashes])
        noted = pending(sql, names=chunk)
        _note_forks(sql, [each for each in noted if each.forks])
        alone = set(chunk) - {each.record for each in noted if each.forks}
        if alone:
            hand_down_all(sql, [rows[each]["key"] for each in sorted(alone) if each in rows])
        keys = [row["key"] for row in rows.values()]
        for table in (*OF_A_RECORD, usage):
            sql.execute(delete(table).where(sql.among(table.c.record, keys)))
        q = quarantine.c
        sql.execute(delete(quarantine).where(q.namespace == sql.namespace, sql.among(q.record, chunk)))
        aside.erase(sql, chunk)
        sql.execute(delete(events).where(events.c.namespace == sql.namespace, sql.among(events.c.subject, chunk)))
        let_go(sql, chunk)
        gone = {name for name, record in hashes.items() if record in rows}
        rest = [_stone(rows[hashes[name]], name, rows.get(name)) for name in sorted(gone)]
        record_index.remove(sql, [row["key"] for name, row in rows.items() if name in gone or name in chunk])
        record_index.put(sql, rest)
        left = {hashes[name]: row["version"] for name, row in rows.items() if name in hashes}
        left |= {hashes[row["record"]]: row["version"] for row in rest}
        mine = and_(erasures.c.namespace == sql.namespace, erasures.c.record == bindparam("r"))
        known = [{"r": each.record, "v": left[each.record]} for each in noted if each.record in left]
        sql.each(update(erasures).where(mine).values(version=bindparam("v")), known)
        never = [{"r": each.record} for each in noted if each.record not in left]
        sql.each(delete(erasures).where(mine), never)


def complete(sql: Sql, done: Mapping[str, int]) -> None:
    """Delete the notes of erasures up to these versions, now that Redis is clean; also late events and branches."""
    e = erasures.c
    for chunk in chunks(sorted(done), 200):
        living = lock(sql, chunk)
        gone = [record for record in chunk if record not in living]
        sql.execute(delete(events).where(events.c.namespace == sql.namespace, sql.among(events.c.subject, gone)))
        aside.erase(sql, gone)
        mine = and_(e.namespace == sql.namespace, e.record == bindparam("r"), e.version == bindparam("v"))
        sql.each(delete(erasures).where(mine), [{"r": record, "v": done[record]} for record in chunk])


def note_late(sql: Sql, accepted: Iterable[Parsed], existing: Mapping[str, Head]) -> None:
    """Note an erasure for changes that derive from an erased record, or from one to be erased with its forks.

    Their rows and those of their sources are locked. So an erasure waits for this transaction, or came earlier; then a
    statement that begins now sees its result.
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
    noted = {each.record: each for each in pending(sql, names=sorted(made)) if each.forks} if made else {}
    gone = record_index.erased(sql, made)
    for source, forks_ in sorted(made.items()):
        for item, version in forks_:
            if source in noted or (source in gone and version <= gone[source]["version"]):
                by = noted.get(source)
                owner, actor = (item.owner, "") if by is None else (by.owner, by.actor)
                record = item.entry.record
                wanted[record] = Erasure(record, item.partition, owner, True, 0, actor)
    _note(sql, list(wanted.values()))


def _locked(sql: Sql, user: str) -> dict[str, Head]:
    """Lock and return the rows of all records of a user and of all their forks."""
    wanted = set(owned(sql, user))
    while True:
        held = sql.begin_nested()
        found = aside.heads(sql, wanted) | lock(sql, wanted)
        # A fork of a locked record is archived only after this commits, and its erasure is noted then.
        late = set(owned(sql, user)) - wanted
        if not late:
            held.commit()
            return found
        # All are unlocked and locked again in order: an archiver may hold one of these and wait for one locked here.
        held.rollback()
        wanted |= late


def _note_when(sql: Sql, name: str) -> None:
    """Note the time of an erasure: nothing else records it if only a lost server and its writer knew the record."""
    now = int(time.time() * 1000)
    row = {"namespace": sql.namespace, "record": name, "partition": NOWHERE, "scope": ERASED}
    row |= {"epoch": "", "version": 0, "created_ms": now, "updated_ms": now, "listed_ms": now, "deleted": True}
    row |= {**dict.fromkeys(record_index.ABOUT), "size": None}
    there = lock(sql, [name]).get(name)
    record_index.put(sql, [row | {"key": there["key"]} if there else row])


def _note(sql: Sql, wanted: Sequence[Erasure]) -> None:
    """Note erasures, updating existing notes. The rows of `records` are locked."""
    if not wanted:
        return
    known = {each.record: each for each in pending(sql, names=[each.record for each in wanted])}
    rows: dict[str, Row] = {}
    for each in wanted:
        before = known.get(each.record, each)
        # Keep the owner and the erasure of forks: an earlier request may have been for more.
        rows[each.record] = (sql.namespace, each.record, each.partition, each.owner or before.owner,
                             each.forks or before.forks, 0, each.actor or before.actor)  # fmt: skip
    sql.put(erasures, list(rows.values()))


def _note_forks(sql: Sql, noted: Sequence[Erasure]) -> None:
    wanted: dict[str, Erasure] = {}
    for owner, actor in {(each.owner, each.actor) for each in noted}:
        sources = [each.record for each in noted if (each.owner, each.actor) == (owner, actor)]
        for record, partition in forks(sql, sources).items():
            wanted[record] = Erasure(record, partition, owner, True, 0, actor)
    # Erasures of these that are noted and not yet done stay as they are.
    for each in noted:
        wanted.pop(each.record, None)
    _note(sql, list(wanted.values()))


def _stone(row: Head, name: str, former: Head | None) -> dict[str, Any]:
    version = max(row["version"], former["version"] if former else 0)
    hidden = {"record": name, "scope": ERASED, **dict.fromkeys(record_index.ABOUT), "size": None}
    stone = {**row, **hidden, "deleted": True, "version": version}
    del stone["key"]  # the record's key, whose rows are gone
    return stone


# Copies for forks


def hand_down_all(sql: Sql, gone: Collection[int]) -> None:
    """Copy every message and item of the records with these keys to the records that share them."""
    hand_down(sql, [{"r": each, "low": 0, "high": 2**63 - 1, "v": 2**63 - 1} for each in gone])
    _hand_down_items(sql, gone)


def hand_down(sql: Sql, runs: Sequence[Mapping[str, Any]]) -> None:
    """Copy messages that are about to be deleted to the records that share them."""
    if not runs:
        return
    _expand_shared(sql, {run["r"] for run in runs})
    m = messages.c
    s = shares.c
    source = records.alias("source").c
    heir = records.alias("heir").c
    own = messages.alias("own").c
    shared = and_(s.namespace == source.namespace, s.source == source.record, s.record != s.source)
    theirs = and_(heir.namespace == s.namespace, heir.record == s.record)
    run = and_(m.record == source.key, m.seq >= s.start, m.seq < s.stop)
    # Version 0 is older than any base of the heir. The heir's own purge removes copies that it no longer shows.
    query = select(heir.key, m.seq, literal_column("0"), m.data).distinct()
    query = query.select_from(source.key.table.join(shares, shared).join(heir.key.table, theirs).join(messages, run))
    query = query.where(source.key == bindparam("r"), m.record == bindparam("r"))
    query = query.where(m.seq >= bindparam("low"), m.seq < bindparam("high"), m.version <= bindparam("v"))
    query = query.where(~select(literal(1)).where(own.record == heir.key, own.seq == m.seq).exists())
    sql.each(insert(messages).from_select([column.name for column in messages.columns], query), runs)


def _hand_down_items(sql: Sql, gone: Collection[int]) -> None:
    """Give each record that shows items of these records one layer with copies of all inherited items.

    Layers are noted from the fork on, or from a rollback to the fork's state on: the same layers in the same order.
    Deletions are copied, too, as a lower layer may still have the item.
    """
    c, i = layers.c, items.c
    source = records.alias("source").c
    heir = records.alias("heir").c
    own = items.alias("own").c
    of_it = and_(c.namespace == source.namespace, c.source == source.record, c.source != c.record)
    theirs = and_(heir.namespace == c.namespace, heir.record == c.record)
    showing = select(heir.key).select_from(source.key.table.join(layers, of_it).join(heir.key.table, theirs))
    showing = showing.where(sql.among(source.key, gone))
    # Locked, because an heir that is erased meanwhile would get rows after its own were deleted, which nothing would
    # remove.
    query = select(records.c.key).where(records.c.key.in_(showing)).order_by(records.c.record)
    heirs = sql.execute(query.with_for_update(read=True)).scalars().all()
    if not heirs:
        return
    order = func.row_number().over(
        partition_by=(heir.key, i.collection, i.key), order_by=(c.place.desc(), i.version.desc())
    )
    # Version 0, as for messages. The original writer is stored too, because values were encrypted under its name.
    origin = func.coalesce(i.origin, source.record).label("origin")
    names = (heir.key.label("heir"), i.collection, i.key, origin, i.data)
    rows = and_(i.record == source.key, i.version.between(c.first, c.last))
    theirs = and_(theirs, sql.among(heir.key, heirs))
    joined = heir.key.table.join(layers, theirs).join(source.key.table, of_it).join(items, rows)
    uppermost = select(*names, order.label("nth")).select_from(joined).subquery().c
    there = and_(own.record == uppermost.heir, own.collection == uppermost.collection, own.key == uppermost.key)
    copies = select(
        uppermost.heir, uppermost.collection, uppermost.key, literal_column("0"), uppermost.origin, uppermost.data
    )
    copies = copies.where(uppermost.nth == 1, ~select(literal(1)).where(there, own.version == 0).exists())
    sql.execute(insert(items).from_select([column.name for column in items.columns], copies))


def _expand_shared(sql: Sql, sources: Collection[int]) -> None:
    """Expand blocks with messages of those of these records that others share."""
    r, s = records.c, shares.c
    shared = and_(s.namespace == r.namespace, s.source == r.record, s.record != s.source)
    query = select(r.key).join(shares, shared).where(sql.among(r.key, sources)).distinct()
    keys = sql.execute(query).scalars().all()
    blocks.expand_some(sql, blocks.MESSAGES, sql.among(message_blocks.c.record, keys))


def let_go(sql: Sql, names: Collection[str]) -> None:
    """Delete the shares, layers and tags of these records; their forks have copies now."""
    s, c = shares.c, layers.c
    sql.execute(delete(shares).where(s.namespace == sql.namespace, sql.among(s.record, list(names))))
    # A purge of an heir keeps messages that a later state shows; from now on these are the copies.
    theirs = update(shares).where(s.namespace == sql.namespace, sql.among(s.source, list(names)))
    sql.execute(theirs.values(source=s.record))
    held = or_(*(sql.among(column, list(names)) for column in (c.record, c.source)))
    sql.execute(delete(layers).where(c.namespace == sql.namespace, held))
    mine = sql.among(tags.c.record, list(names))
    sql.execute(delete(tags).where(tags.c.namespace == sql.namespace, mine))


def hand(sql: Sql, shares_of: Mapping[str, Mapping[int, bytes]]) -> None:
    """Give records their own copies of shared messages, by number, except those that they already have."""
    m = messages.c
    for record, key in record_index.keys(sql, shares_of).items():
        given = shares_of[record]
        # `inherit` may just have inserted some.
        here = select(m.seq).where(m.record == key, m.seq >= min(given), m.seq <= max(given))
        own = set(sql.execute(here).scalars())
        sql.add(messages, [(key, seq, 0, data) for seq, data in sorted(given.items()) if seq not in own])


def inherit(sql: Sql, accepted: Iterable[Parsed], keys: Mapping[str, int]) -> None:
    """Copy inherited messages to forks of forks: their parent has copies of them, and the original record may not."""
    runs = [
        {"p": keys[item.parent], "r": keys[item.entry.record], "low": run.start, "high": run.stop}
        for item in accepted
        if item.parent is not None and item.parent in keys
        for run in item.runs
        if run.source != item.parent and run.start < run.stop
    ]
    if not runs:
        return
    blocks.expand_some(sql, blocks.MESSAGES, sql.among(message_blocks.c.record, {run["p"] for run in runs}))
    m = messages.c
    own = messages.alias("own").c
    query = select(bindparam("r", type_=BigInteger), m.seq, literal_column("0"), m.data)
    query = query.where(m.record == bindparam("p"), m.seq >= bindparam("low"), m.seq < bindparam("high"))
    query = query.where(~select(literal(1)).where(own.record == bindparam("r"), own.seq == m.seq).exists())
    sql.each(insert(messages).from_select([column.name for column in messages.columns], query), runs)
