"""Which items a record shows that others wrote. Law: noted are all records that it needs, however far up the line.

A fork shows below its own items those that what it was made from showed then. So each of those lies in a layer of its
own, up to the version at which the line left it. A layer is noted only where there are items.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, and_, select

from distributed_state.cold import bulk
from distributed_state.cold.entries import Parsed
from distributed_state.cold.tables import layers, records


class Layer(NamedTuple):
    """What the record `source` put and deleted at its versions `first` to `last`."""

    source: str
    first: int
    last: int


def of(connection: Connection, namespace: str, record: str, version: int) -> list[Layer]:
    """Where a record's items are at a version, the uppermost first: its own, and those of others."""
    return [Layer(record, 0, version), *_at(_noted(connection, namespace, [record]).get(record, {}), version)[::-1]]


def _noted(connection: Connection, namespace: str, names: Collection[str]) -> dict[str, dict[int, list[Layer]]]:
    """What is noted of these records, by the version since when it is so; of each the lowest layer first."""
    c = layers.c
    found: dict[str, dict[int, list[Layer]]] = {}
    for chunk in bulk.chunks(sorted(names), 500):
        query = select(c.record, c.version, c.source, c.first, c.last)
        query = query.where(c.namespace == namespace, bulk.among(connection, c.record, chunk))
        for record, version, *layer in connection.execute(query.order_by(c.record, c.version, c.place)):
            found.setdefault(record, {}).setdefault(version, []).append(Layer(*layer))
    return found


def _at(noted: Mapping[int, list[Layer]], version: int) -> list[Layer]:
    return noted[max(since)] if (since := [each for each in noted if each <= version]) else []


def note(
    connection: Connection, namespace: str, accepted: Iterable[Parsed], keys: Mapping[str, int], have: Collection[int]
) -> None:
    """Note what these forks show; `have` are the numbers of those of their sources that have items of their own."""
    made = [item for item in accepted if item.parent is not None and item.parent in keys]
    known = _noted(connection, namespace, {str(item.parent) for item in made})
    rows: list[bulk.Row] = []
    for item in made:
        source, record, version = str(item.parent), item.entry.record, item.entry.version
        shown = list(_at(known.get(source, {}), item.parent_version))
        if keys[source] in have:
            shown.append(Layer(source, 0, item.parent_version))
        if shown:
            known.setdefault(record, {})[version] = shown
        rows += [(namespace, record, version, place, *layer) for place, layer in enumerate(shown)]
    bulk.add(connection, layers, rows)


def ends(connection: Connection, namespace: str, names: Sequence[str]) -> dict[int, set[int]]:
    """The versions of these records, by their numbers, at which others show them."""
    c, r = layers.c, records.c
    query = select(r.key, c.last).where(c.namespace == namespace, bulk.among(connection, c.source, names)).distinct()
    query = query.join_from(layers, records, and_(r.namespace == c.namespace, r.record == c.source))
    found: dict[int, set[int]] = {}
    for key, last in connection.execute(query):
        found.setdefault(key, set()).add(last)
    return found


def layered(connection: Connection, namespace: str, names: Sequence[str]) -> set[str]:
    """Those of these records that show anything of others."""
    c = layers.c
    query = select(c.record).where(c.namespace == namespace, bulk.among(connection, c.record, names)).distinct()
    return set(connection.execute(query).scalars())
