"""Which items a record shows that others wrote. Law: noted are all records that it needs, however far up the line.

A fork shows below its own items those that what it was made from showed then. So each of those lies in a layer of its
own, up to the version at which the line left it. A layer is noted only where there are items. What a rollback brings
back lies in layers as well, of the record itself: what it puts from then on, in a layer that is open, is shown above
those. Where all was cleared, there is the open one alone.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, and_, delete, select

from distributed_state.cold import bulk
from distributed_state.cold.entries import LARGEST, Parsed
from distributed_state.cold.tables import layers, records


class Layer(NamedTuple):
    """What the record `source` put and deleted at its versions `first` to `last`."""

    source: str
    first: int
    last: int


def of(connection: Connection, namespace: str, record: str, version: int) -> list[Layer]:
    """Where a record's items are at a version, the uppermost first: its own, and those of others."""
    return _shown(_noted(connection, namespace, [record]).get(record, {}), record, version)[::-1]


def below(connection: Connection, namespace: str, record: str, version: int) -> list[Layer]:
    """What lies below the layer that a record began at a version, or before, the uppermost first."""
    return _shown(_noted(connection, namespace, [record]).get(record, {}), record, version)[-2::-1]


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


def _shown(noted: Mapping[int, list[Layer]], record: str, version: int) -> list[Layer]:
    """All layers of a record as they are at a version, the lowest first, the last one its own."""
    since = [each for each in noted if each <= version]
    shown = list(noted[max(since)]) if since else []
    first = shown.pop().first if shown and shown[-1].last == LARGEST else 0
    return [*shown, Layer(record, first, version)]


def note(
    connection: Connection, namespace: str, accepted: Iterable[Parsed], keys: Mapping[str, int], have: Collection[int]
) -> None:
    """Note what these forks, and what went back or was cleared, show from then on.

    `have` are the numbers of those that it is taken from that have items of their own.
    """
    made = [item for item in accepted if source_of(item) in keys]
    known = _noted(connection, namespace, {source_of(item) for item in made})
    rows: list[bulk.Row] = []
    for item in made:
        source, record, version = source_of(item), item.entry.record, item.entry.version
        shown: list[Layer] = []
        if item.shows != 0:
            shown = _shown(known.get(source, {}), source, item.parent_version if item.shows is None else item.shows)
            # Its own are noted in any case: what others show below may be handed down to there.
            if item.shows is None and keys[source] not in have:
                shown.pop()
        if item.shows is not None:
            shown.append(Layer(record, version, LARGEST))
        if shown:
            known.setdefault(record, {})[version] = shown
        rows += [(namespace, record, version, place, *layer) for place, layer in enumerate(shown)]
    bulk.add(connection, layers, rows)


def source_of(item: Parsed) -> str:
    """Which record's items this one shows below those that it puts from now on; '' if it changes nothing of that."""
    return item.entry.record if item.shows is not None else item.parent or ""


def needless(connection: Connection, namespace: str, bases: Mapping[str, int]) -> None:
    """Forget how records showed items before the versions in `bases`, from which on they can be read."""
    c = layers.c
    for record, noted in _noted(connection, namespace, bases.keys()).items():
        held = max((since for since in noted if since <= bases[record]), default=0)
        if min(noted) < held:
            mine = and_(c.namespace == namespace, c.record == record)
            connection.execute(delete(layers).where(mine, c.version < held))


def spans(connection: Connection, namespace: str, bases: Mapping[str, int]) -> dict[str, set[tuple[int, int]]]:
    """Which versions of their items these records or others show, first and last, where it is not all of them.

    That is of records that had begun a layer at the version in `bases`, from which on they can be read.
    """
    c = layers.c
    query = select(c.source, c.first, c.last, c.record)
    query = query.where(c.namespace == namespace, bulk.among(connection, c.source, list(bases)))
    found: dict[str, set[tuple[int, int]]] = {}
    began: set[str] = set()
    for source, first, last, record in connection.execute(query):
        found.setdefault(source, set()).add((first, last))
        if record == source and last == LARGEST and first <= bases[source]:
            began.add(source)
    return {record: found[record] for record in began}


def ends(connection: Connection, namespace: str, names: Sequence[str]) -> dict[int, set[int]]:
    """The versions of these records, by their numbers, at which others show them."""
    c, r = layers.c, records.c
    closed = and_(c.namespace == namespace, bulk.among(connection, c.source, names), c.last < LARGEST)
    query = select(r.key, c.last).where(closed).distinct()
    query = query.join_from(layers, records, and_(r.namespace == c.namespace, r.record == c.source))
    found: dict[int, set[int]] = {}
    for key, last in connection.execute(query):
        found.setdefault(key, set()).add(last)
    return found


def layered(connection: Connection, namespace: str, names: Sequence[str]) -> set[str]:
    """Those of these records below whose own items, or the present layer of these, lie any."""
    c = layers.c
    below = and_(c.namespace == namespace, bulk.among(connection, c.record, names), c.last < LARGEST)
    query = select(c.record).where(below).distinct()
    return set(connection.execute(query).scalars())
