"""Finds events. Law: a page costs the same at any depth, whatever it is asked by.

Design: section 12.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, func, select, true, tuple_

from distributed_state.cold.tables import events
from distributed_state.cold.values import Sought
from distributed_state.values.journal import Happened

_SET_BACK_MS = 600_000
_TOGETHER = 10_000  # events that are removed in one transaction
_ORDER = (events.c.time_ms, events.c.partition, events.c.epoch, events.c.offset)


def audit(connection: Connection, namespace: str, sought: Sought) -> list[Happened]:
    """The events asked for, oldest first: the newest of them, or the first after a place."""
    found: list[Happened] = []
    for condition in _conditions(connection, namespace, sought):
        found += _page(connection, and_(events.c.namespace == namespace, condition), sought)
    found.sort(key=lambda row: row.place)
    return found[-sought.limit :] if sought.after is None else found[: sought.limit]


def event_archived(connection: Connection, namespace: str, partition: int, epoch: str, offset: int, id: str) -> bool:
    """Whether this very event, one that was written alone, was archived."""
    e = events.c
    place = and_(e.namespace == namespace, e.partition == partition, e.epoch == epoch, e.offset == offset)
    return bool(connection.execute(select(e.id).where(place)).scalar() == id)


def one(connection: Connection, namespace: str, partition: int, id: str, since_ms: int) -> Happened | None:
    """An event by its id, among those of a partition from a time on; a server's clock may be set back a little."""
    e = events.c
    recent = and_(e.namespace == namespace, e.time_ms >= since_ms - _SET_BACK_MS)
    row = connection.execute(select(*_columns()).where(recent, e.partition == partition, e.id == id)).first()
    return None if row is None else Happened(*row)


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


def purge(connection: Connection, namespace: str, before_ms: int) -> int:
    """Remove the oldest events that are older than the cutoff, some thousands at most; how many those were."""
    e = events.c
    old = and_(e.namespace == namespace, e.time_ms < before_ms)
    last = connection.execute(select(e.time_ms).where(old).order_by(e.time_ms).offset(_TOGETHER - 1).limit(1)).scalar()
    # All of the last one's millisecond go too: a cut between them would not be one by time.
    some = old if last is None else and_(e.namespace == namespace, e.time_ms <= last)
    return connection.execute(delete(events).where(some)).rowcount
