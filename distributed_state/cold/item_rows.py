"""The rows of items: one for each time that an item was put or deleted. Law: what a row says is never changed.

What an item is at a version is said by its newest row up to there, an empty one says that it was deleted. Below a
record's own rows lie its layers: what it shows of the record that it was forked from (`cold/layers.py`).

Design: section 9.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import accumulate
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Exists,
    FromClause,
    Select,
    and_,
    bindparam,
    delete,
    func,
    literal,
    or_,
    select,
)

from distributed_state.cold import bulk
from distributed_state.cold.entries import LARGEST
from distributed_state.cold.record_index import find
from distributed_state.cold.tables import items, records

Name = tuple[bytes, bytes, int]  # collection, key and version of a row of a record
_AT_ONCE = (1, 10, 100)  # names in one statement


def with_items(connection: Connection, some: Collection[int]) -> set[int]:
    """Those of the records with these numbers that have any rows."""
    any_of_it = select(literal(1)).where(items.c.record == records.c.key).exists()
    query = select(records.c.key).where(bulk.among(connection, records.c.key, some), any_of_it)
    return set(connection.execute(query).scalars())


def changed_since(connection: Connection, namespace: str, record: str, version: int) -> bool:
    """Whether a record put or deleted any item after a version."""
    head = find(connection, namespace, record)
    if head is None:
        return False
    query = select(items.c.version).where(items.c.record == head["key"], items.c.version > version).limit(1)
    return connection.execute(query).first() is not None


def bodies(connection: Connection, key: int, wanted: Iterable[Name]) -> dict[Name, bytes]:
    """The frames of these rows of a record, without those that a purge removed."""
    return {name: data for name, (_, data) in written(connection, key, wanted).items()}


def written(connection: Connection, key: int, wanted: Iterable[Name]) -> dict[Name, tuple[str | None, bytes]]:
    """The same with the record that wrote each, None for this one."""
    return {name: (origin, data) for name, origin, data in _rows(connection, key, wanted, items.c.data)}


def lengths(connection: Connection, key: int, wanted: Iterable[Name]) -> dict[Name, int]:
    """How many bytes these frames have."""
    return {name: length for name, _, length in _rows(connection, key, wanted, func.length(items.c.data))}


def _rows(
    connection: Connection, key: int, wanted: Iterable[Name], value: ColumnElement[Any]
) -> Iterator[tuple[Name, str | None, Any]]:
    for chunk in bulk.chunks(wanted, _AT_ONCE[-1]):
        size = next(size for size in _AT_ONCE if size >= len(chunk))
        given: dict[str, Any] = {"r": key}
        for number in range(size):
            name = chunk[min(number, len(chunk) - 1)]
            given |= {f"c{number}": name[0], f"k{number}": name[1], f"v{number}": name[2]}
        for collection, name, version, origin, found in connection.execute(_named(size).add_columns(value), given):
            yield (collection, name, version), origin, found


@cache
def _named(size: int) -> Select[Any]:
    """Made once for each of a few sizes: that takes longer than to execute it."""
    i = items.c
    # Not a list of tuples: for that SQLite looks at all rows of the record.
    named = [
        and_(i.record == bindparam("r"), i.collection == bindparam(f"c{n}"), i.key == bindparam(f"k{n}"),
             i.version == bindparam(f"v{n}"))
        for n in range(size)
    ]  # fmt: skip
    return select(i.collection, i.key, i.version, i.origin).where(or_(*named))


def behind(prefix: bytes) -> bytes | None:
    """The first key, in the order of bytes, that is behind all that begin with a prefix; None if there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def newer(last: int | ColumnElement[int]) -> Exists:
    """Whether a row of `items` is followed by another one of its item, up to a version."""
    i, n = items.c, items.alias("newer")
    return select(literal(1)).select_from(n).where(_same(n), n.c.version > i.version, n.c.version <= last).exists()


def _same(other: FromClause) -> ColumnElement[bool]:
    i, o = items.c, other.c
    return and_(o.record == i.record, o.collection == i.collection, o.key == i.key)


def thin(connection: Connection, bases: Mapping[int, int], ends: Mapping[int, Collection[int]]) -> None:
    """Remove what nobody can ask for any more of records that can be read from the version in `bases` on.

    Of each item the newest row up to the base stays, and up to each of the record's `ends`: there a fork was made.
    """
    spans: list[dict[str, int]] = []
    for record, base in bases.items():
        low = -1
        for end in sorted({base, *(end for end in ends.get(record, ()) if end < base)}):
            spans.append({"r": record, "low": low, "high": end})
            low = end
    i = items.c

    def superseded(span: Any) -> ColumnElement[bool]:
        return and_(i.record == span.r, i.version > span.low, i.version <= span.high, newer(span.high))

    bulk.remove(connection, items, spans, superseded)


def drop_hidden(connection: Connection, record: int, base: int, shown: Collection[tuple[int, int]]) -> None:
    """Remove what a record that began layers put before its base and shows in none of them any more."""
    i = items.c
    query = select(i.version).where(i.record == record, i.version <= base).distinct()
    # Not as conditions: each rollback leaves a span, and SQLite takes a thousand of them at most.
    spans = sorted(shown)
    reach = list(accumulate((last for _, last in spans), max))
    hidden = []
    for version in connection.execute(query).scalars():
        at = bisect_right(spans, (version, LARGEST))
        if not at or reach[at - 1] < version:
            hidden.append(version)
    connection.execute(delete(items).where(i.record == record, bulk.among(connection, i.version, hidden)))


def forget_deleted(connection: Connection, bases: Mapping[int, int]) -> None:
    """Remove, up to a version, that items were deleted of which nothing is left. Not of records that have layers."""
    i, older = items.c, items.alias("older")
    left = select(literal(1)).select_from(older).where(_same(older), older.c.version < i.version).exists()

    def needless(base: Any) -> ColumnElement[bool]:
        return and_(i.record == base.r, i.version <= base.v, i.data == b"", ~left)

    bulk.remove(connection, items, [{"r": record, "v": base} for record, base in bases.items()], needless)
