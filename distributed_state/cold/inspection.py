"""What is shown of an archive beside its records: events, forks, and facts for a doctor. Law: it only reads.

A page of events costs the same at any depth, whatever it is asked by.

Design: sections 9, 12.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, and_, func, select, true, tuple_

from distributed_state.cold import commits, epochs, opening, quarantine
from distributed_state.cold.tables import branches, cursors, erasures, events, records
from distributed_state.cold.values import Sought
from distributed_state.values.journal import Happened, unpack
from distributed_state.values.model import PARENT

_CONNECTIONS = """
select (select count(*) from pg_stat_activity where backend_type = 'client backend'), setting
from pg_settings where name = 'max_connections'
"""
RECENT = 600.0  # seconds for which an epoch that began is news
MINTED = "epochs minted lately"
NEWEST = "newest quarantined"
NONE_MINTED = "none began behind another one lately"
_COUNTED = {"records": records, "cursors": cursors, "erasures": erasures}
_SET_BACK_MS = 600_000
_ORDER = (events.c.time_ms, events.c.partition, events.c.epoch, events.c.offset)


# Events


def audit(connection: Connection, namespace: str, sought: Sought) -> list[Happened]:
    """The events asked for, oldest first: the newest of them, or the first after a place."""
    found: list[Happened] = []
    for condition in _conditions(connection, namespace, sought):
        found += _page(connection, and_(events.c.namespace == namespace, condition), sought)
    found.sort(key=lambda row: row.place)
    return found[-sought.limit :] if sought.after is None else found[: sought.limit]


def event(connection: Connection, namespace: str, partition: int, id: str, since_ms: int) -> Happened | None:
    """An event by its id, among those of a partition from a time on; a server's clock may be set back a little."""
    e = events.c
    recent = and_(e.namespace == namespace, e.time_ms >= since_ms - _SET_BACK_MS)
    row = connection.execute(select(*_columns()).where(recent, e.partition == partition, e.id == id)).first()
    return None if row is None else Happened(*row)


def event_archived(connection: Connection, namespace: str, partition: int, epoch: str, offset: int, id: str) -> bool:
    """Whether this very event, one that was written alone, was archived."""
    e = events.c
    place = and_(e.namespace == namespace, e.partition == partition, e.epoch == epoch, e.offset == offset)
    return bool(connection.execute(select(e.id).where(place)).scalar() == id)


def _columns() -> list[ColumnElement[Any]]:
    e = events.c
    return [e.partition, e.epoch, e.offset, e.id, e.type, e.subject, e.time_ms, e.actor, e.version, e.data]


def _page(connection: Connection, condition: ColumnElement[bool], sought: Sought) -> list[Happened]:
    e = events.c
    since = sought.since_ms if sought.after is None else max(sought.since_ms, sought.after[0])
    query = select(*_columns()).where(condition, e.time_ms >= since, e.time_ms < sought.until_ms)
    if sought.after is None:
        query = query.order_by(*(column.desc() for column in _ORDER))
    else:
        query = query.where(tuple_(*_ORDER) > sought.after).order_by(*_ORDER)
    return [Happened(*row) for row in connection.execute(query.limit(sought.limit))]


def _conditions(connection: Connection, namespace: str, sought: Sought) -> Iterable[ColumnElement[bool]]:
    """One for each walk along an index that is needed to find what is asked for."""
    e = events.c
    about = true() if sought.subject is None else e.subject == sought.subject
    if sought.type is None:
        return [about]
    if "*" not in sought.type:
        return [and_(about, e.type == sought.type)]
    types = _types(connection, namespace, sought.type)
    if sought.subject is None:
        # Several short walks, merged: one along all of these types would have to sort them by time.
        return [e.type == each for each in types]
    return [and_(about, e.type.in_(types))]


def _types(connection: Connection, namespace: str, pattern: str) -> list[str]:
    """The types that fit a pattern, by one look into the index for each that begins as it does."""
    e = events.c
    found = list[str]()
    wanted = re.compile(re.escape(pattern).replace(r"\*", ".*"))
    first = pattern.partition("*")[0]
    query = select(func.min(e.type)).where(e.namespace == namespace)
    following = connection.execute(query.where(e.type >= first)).scalar()
    while following is not None and following.startswith(first):
        if wanted.fullmatch(following):
            found.append(following)
        following = connection.execute(query.where(e.type > following)).scalar()
    return found


# Forks, and facts


def forked(connection: Connection, namespace: str, source: str, limit: int) -> list[tuple[str, int | None, int, bool]]:
    """The records that were forked from one, the newest first: the version of it, when that was, whether deleted."""
    r = records.c
    query = select(r.record, r.created_ms, r.deleted).where(r.namespace == namespace, r.parent == source)
    found = []
    for record, created_ms, deleted in connection.execute(query.order_by(r.key.desc()).limit(limit)):
        rows = commits.outlines(connection, namespace, record, before=2, limit=1)
        names = {name: value for row in rows for _, name, value in unpack(row.data)}
        version = names.get(PARENT, b"").rpartition(b"@")[2]
        found.append((record, int(version) if version.isdigit() else None, created_ms, deleted))
    return found


def facts(connection: Connection, namespace: str) -> dict[str, str]:
    """Facts about the server and the namespace's tables, by name."""
    version = connection.dialect.server_version_info or ()
    found = {
        "server version": ".".join(str(part) for part in version),
        "revision": str(opening.revision(connection)),
    }
    found |= {name: str(count(connection, namespace, table)) for name, table in _COUNTED.items()}
    found["quarantined"] = str(quarantine.count_quarantined(connection, namespace))
    b = branches.c
    records_of = select(func.count(b.record.distinct())).where(b.namespace == namespace)
    minted = epochs.minted_since(connection, namespace, RECENT)
    lately = f"{minted.partitions} partitions began another one within ten minutes, the last {minted.ago:.0f} s ago"
    found[MINTED] = lately if minted.partitions else NONE_MINTED
    if newest := quarantine.newest_quarantined(connection, namespace):
        found[NEWEST] = f"{newest[0][:200]} version {newest[1]}: {newest[2][:500]}"
    found["branched records"] = str(connection.execute(records_of).scalar_one())
    if connection.dialect.name == "postgresql":
        used, most = connections(connection) or (0, 0)
        found |= {"connections": str(used), "most connections": str(most)}
    if connection.dialect.name == "sqlite":
        found["journal mode"] = str(connection.exec_driver_sql("PRAGMA journal_mode").scalar())
    return found


def count(connection: Connection, namespace: str, table: Table) -> int:
    """How many rows of this table the namespace has."""
    query = select(func.count()).select_from(table).where(table.c.namespace == namespace)
    return int(connection.execute(query).scalar_one())


def connections(connection: Connection) -> tuple[int, int] | None:
    """How many connections the server has, and how many it allows; None for a file."""
    if connection.dialect.name != "postgresql":
        return None
    used, most = connection.exec_driver_sql(_CONNECTIONS).one()
    return int(used), int(most)
