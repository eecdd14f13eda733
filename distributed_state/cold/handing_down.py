"""Gives forks copies of messages and items of their own. Law: what a fork shows is handed down before it goes.

Design: sections 9, 11.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    and_,
    bindparam,
    delete,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    update,
)

from distributed_state.cold import blocks, bulk, record_index
from distributed_state.cold.entries import Parsed
from distributed_state.cold.tables import items, layers, message_blocks, messages, records, shares, tags


def hand_down_all(connection: Connection, gone: Collection[int]) -> None:
    """Copy every message and item of the records with these keys to the records that share it."""
    hand_down(connection, [{"r": each, "low": 0, "high": 2**63 - 1, "v": 2**63 - 1} for each in gone])
    _hand_down_items(connection, gone)


def let_go(connection: Connection, namespace: str, names: Collection[str]) -> None:
    """Forget what these records share, and others of them, which have their own copies now; and their tags."""
    s, c = shares.c, layers.c
    connection.execute(delete(shares).where(s.namespace == namespace, bulk.among(connection, s.record, list(names))))
    # A purge of an heir leaves what a later state of it shows: its copies are what is meant from now on.
    theirs = update(shares).where(s.namespace == namespace, bulk.among(connection, s.source, list(names)))
    connection.execute(theirs.values(source=s.record))
    held = or_(*(bulk.among(connection, column, list(names)) for column in (c.record, c.source)))
    connection.execute(delete(layers).where(c.namespace == namespace, held))
    mine = bulk.among(connection, tags.c.record, list(names))
    connection.execute(delete(tags).where(tags.c.namespace == namespace, mine))


def _hand_down_items(connection: Connection, gone: Collection[int]) -> None:
    """Copy to each record that shows items of these all that it shows of any other, as one layer.

    Those are noted since it was forked, or since it went back to what it showed then, the same ones in the same order.
    Deletions, too: what lies below may be asked for where it is still.
    """
    c, i = layers.c, items.c
    source = records.alias("source").c
    heir = records.alias("heir").c
    own = items.alias("own").c
    of_it = and_(c.namespace == source.namespace, c.source == source.record, c.source != c.record)
    theirs = and_(heir.namespace == c.namespace, heir.record == c.record)
    showing = select(heir.key).select_from(source.key.table.join(layers, of_it).join(heir.key.table, theirs))
    showing = showing.where(bulk.among(connection, source.key, gone))
    # Held: one that is erased meanwhile would be handed rows after its own had gone, which nobody would ever remove.
    query = select(records.c.key).where(records.c.key.in_(showing)).order_by(records.c.record)
    heirs = connection.execute(query.with_for_update(read=True)).scalars().all()
    if not heirs:
        return
    order = func.row_number().over(
        partition_by=(heir.key, i.collection, i.key), order_by=(c.place.desc(), i.version.desc())
    )
    # Version 0, as of messages. Who wrote it first goes along: what is encrypted was sealed under that name.
    origin = func.coalesce(i.origin, source.record).label("origin")
    names = (heir.key.label("heir"), i.collection, i.key, origin, i.data)
    rows = and_(i.record == source.key, i.version.between(c.first, c.last))
    theirs = and_(theirs, bulk.among(connection, heir.key, heirs))
    joined = heir.key.table.join(layers, theirs).join(source.key.table, of_it).join(items, rows)
    uppermost = select(*names, order.label("nth")).select_from(joined).subquery().c
    there = and_(own.record == uppermost.heir, own.collection == uppermost.collection, own.key == uppermost.key)
    copies = select(
        uppermost.heir, uppermost.collection, uppermost.key, literal_column("0"), uppermost.origin, uppermost.data
    )
    copies = copies.where(uppermost.nth == 1, ~select(literal(1)).where(there, own.version == 0).exists())
    connection.execute(insert(items).from_select([column.name for column in items.columns], copies))


def hand_down(connection: Connection, runs: Sequence[Mapping[str, Any]]) -> None:
    """Copy messages that are about to go to the records that share them."""
    if not runs:
        return
    _expand_shared(connection, {run["r"] for run in runs})
    m = messages.c
    s = shares.c
    source = records.alias("source").c
    heir = records.alias("heir").c
    own = messages.alias("own").c
    shared = and_(s.namespace == source.namespace, s.source == source.record, s.record != s.source)
    theirs = and_(heir.namespace == s.namespace, heir.record == s.record)
    run = and_(m.record == source.key, m.seq >= s.start, m.seq < s.stop)
    # Version 0: older than any base of the heir, whose own purge removes them once it shows them no more.
    query = select(heir.key, m.seq, literal_column("0"), m.data).distinct()
    query = query.select_from(source.key.table.join(shares, shared).join(heir.key.table, theirs).join(messages, run))
    query = query.where(source.key == bindparam("r"), m.record == bindparam("r"))
    query = query.where(m.seq >= bindparam("low"), m.seq < bindparam("high"), m.version <= bindparam("v"))
    query = query.where(~select(literal(1)).where(own.record == heir.key, own.seq == m.seq).exists())
    connection.execute(insert(messages).from_select([column.name for column in messages.columns], query), list(runs))


def hand(connection: Connection, namespace: str, shares_of: Mapping[str, Mapping[int, bytes]]) -> None:
    """Give records messages of their own that they share, by number, but for those that they have."""
    m = messages.c
    for record, key in record_index.keys(connection, namespace, shares_of).items():
        given = shares_of[record]
        # `inherit` may just have brought some.
        here = select(m.seq).where(m.record == key, m.seq >= min(given), m.seq <= max(given))
        own = set(connection.execute(here).scalars())
        bulk.add(connection, messages, [(key, seq, 0, data) for seq, data in sorted(given.items()) if seq not in own])


def _expand_shared(connection: Connection, sources: Collection[int]) -> None:
    """Put back the messages of those of these records that others share."""
    r, s = records.c, shares.c
    shared = and_(s.namespace == r.namespace, s.source == r.record, s.record != s.source)
    query = select(r.key).join(shares, shared).where(bulk.among(connection, r.key, sources)).distinct()
    keys = connection.execute(query).scalars().all()
    blocks.expand_messages(connection, bulk.among(connection, message_blocks.c.record, keys))


def inherit(connection: Connection, accepted: Iterable[Parsed], keys: Mapping[str, int]) -> None:
    """Give forks of forks their own of what their parent was handed: where it was written it is not any more."""
    runs = [
        {"p": keys[item.parent], "r": keys[item.entry.record], "low": run.start, "high": run.stop}
        for item in accepted
        if item.parent is not None and item.parent in keys
        for run in item.runs
        if run.source != item.parent and run.start < run.stop
    ]
    if not runs:
        return
    blocks.expand_messages(connection, message_blocks.c.record.in_({run["p"] for run in runs}))
    m = messages.c
    own = messages.alias("own").c
    query = select(bindparam("r", type_=BigInteger), m.seq, literal_column("0"), m.data)
    query = query.where(m.record == bindparam("p"), m.seq >= bindparam("low"), m.seq < bindparam("high"))
    query = query.where(~select(literal(1)).where(own.record == bindparam("r"), own.seq == m.seq).exists())
    connection.execute(insert(messages).from_select([column.name for column in messages.columns], query), runs)
