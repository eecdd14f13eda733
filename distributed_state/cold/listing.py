"""Finds records. Law: a page costs the same at any depth; the place of a page is the last row, not a count.

Design: section 9.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, and_, select, tuple_

from distributed_state.cold import branch_reading
from distributed_state.cold.bulk import among, chunks
from distributed_state.cold.tables import layers, records, shares
from distributed_state.cold.values import Listed, Mortal
from distributed_state.errors import InvalidValue


def listing(
    connection: Connection, namespace: str, scope: str, owner: str | None, limit: int, after: str | None, deleted: bool
) -> list[Listed]:
    """The records of a scope, the newest change first, to the minute; with `deleted` deleted ones are among them."""
    place = None if after is None else _place(after)
    found = _page(connection, namespace, scope, owner, limit, place, False)
    if deleted:
        # Two short scans of the index, merged: one over both kinds would have to sort everything.
        found += _page(connection, namespace, scope, owner, limit, place, True)
    return sorted(found, key=lambda row: _place(row.cursor), reverse=True)[:limit]


def _page(
    connection: Connection,
    namespace: str,
    scope: str,
    owner: str | None,
    limit: int,
    place: tuple[int, int] | None,
    deleted: bool,
) -> list[Listed]:
    r = records.c
    names = (r.record, r.owner, r.version, r.created_ms, r.updated_ms, r.deleted)
    query = select(r.key, r.listed_ms, *names).where(r.namespace == namespace, r.scope == scope, r.deleted == deleted)
    if owner is not None:
        query = query.where(r.owner == owner)
    if place is not None:
        query = query.where(tuple_(r.listed_ms, r.key) < place)
    rows = connection.execute(query.order_by(r.listed_ms.desc(), r.key.desc()).limit(limit))
    return [Listed(*row[2:], cursor=_cursor(row.listed_ms, row.key)) for row in rows]


def _cursor(listed_ms: int, key: int) -> str:
    return urlsafe_b64encode(f"{listed_ms}:{key}".encode()).decode().rstrip("=")


def _place(cursor: str) -> tuple[int, int]:
    try:
        text = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        number, _, key = text.partition(":")
        place = int(number), int(key)
        # Decoding skips characters that it does not know; only what comes out the same was ours.
        if _cursor(*place) == cursor and 0 <= min(place) <= max(place) < 2**63:
            return place
    except (ValueError, binascii.Error):
        pass
    raise InvalidValue(f"{cursor[:100]!r} is not the cursor of a listing")


def owned(connection: Connection, namespace: str, user: str) -> list[str]:
    """All records of a user, deleted ones too, and every record forked from one of them, however far."""
    r = records.c
    # Two statements, because SQLite answers an OR of them by reading the whole namespace.
    found = branch_reading.owned(connection, namespace, user)
    for condition in (r.owner == user, r.record == f"user:{user}"):
        found.update(connection.execute(select(r.record).where(r.namespace == namespace, condition)).scalars())
    new = found
    while new:
        new = forks(connection, namespace, new).keys() - found
        found |= new
    return sorted(found)


def forks(connection: Connection, namespace: str, sources: Iterable[str]) -> dict[str, int]:
    """The records that were forked from one of these, or share its messages or items, with their partitions."""
    r = records.c
    found: dict[str, int] = {}
    for chunk in chunks(sorted(sources), 500):
        queries = [select(r.record, r.partition).where(r.namespace == namespace, among(connection, r.parent, chunk))]
        for table in (shares, layers):
            s = table.c
            sharers = select(r.record, r.partition).join(table, and_(r.namespace == s.namespace, r.record == s.record))
            queries.append(sharers.where(s.namespace == namespace, among(connection, s.source, chunk)).distinct())
        for query in queries:
            found.update((record, partition) for record, partition in connection.execute(query))
    return found


def mortal(connection: Connection, namespace: str, partitions: Sequence[int], after: str, limit: int) -> list[Mortal]:
    """Records of these partitions that have a lifetime, in order of their texts."""
    r = records.c
    query = select(r.record, r.partition, r.lifetime, r.updated_ms)
    query = query.where(r.namespace == namespace, r.partition.in_(partitions), r.lifetime.is_not(None))
    query = query.where(r.record > after, r.deleted.is_(False)).order_by(r.record).limit(limit)
    return [Mortal(*row) for row in connection.execute(query)]
