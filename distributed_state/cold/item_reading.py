"""Reads items: some by their names, a page of a collection, the greatest key. Law: what is read is as of one version.

A reader that was told by Redis at which version the record is asks for that one. What is said of it holds as long as it
can be read at all, so a purge that came in between is noticed.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import merge
from itertools import groupby
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, ColumnElement, Connection, Select, bindparam, func, literal, select, union_all

from distributed_state.cold import bulk, item_rows, layers
from distributed_state.cold.history import oldest
from distributed_state.cold.record_index import ERASED, Head, find, keys
from distributed_state.cold.tables import TEXT, items
from distributed_state.errors import NotFound

_AT_ONCE = (1, 10, 50)  # names in one statement
_MOST = 1000  # keys in one statement


class ItemRow(NamedTuple):
    """An item as a record wrote it: `source` at its `version`; 0: who knows, that record is gone. No frame: deleted."""

    source: str
    version: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class FoundItems:
    """Items by name, as of a version; `archived`: up to which SQL has the record.

    `greatest` has of each collection that was asked for the greatest key that ever was, deleted ones too.
    """

    archived: int
    rows: dict[bytes, ItemRow]
    greatest: dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Range:
    """Which keys of a collection: those that begin with a prefix, between two (exclusive), and in which order."""

    collection: bytes
    prefix: bytes = b""
    after: bytes | None = None
    before: bytes | None = None
    reverse: bool = False


@dataclass(frozen=True, slots=True)
class FoundPage:
    """Items of a range in its order; `more`: there may be more behind the last one."""

    archived: int
    rows: list[tuple[bytes, ItemRow]]
    more: bool


class _Source(NamedTuple):
    """Layers of one record that lie upon each other: of an item in several the newest row counts."""

    number: int
    record: str
    spans: tuple[tuple[int, int], ...]  # of its versions, first and last


class _Place(NamedTuple):
    archived: int
    sources: list[_Source]  # the uppermost first


def _place(connection: Connection, namespace: str, record: str, version: int | None, *, exact: bool) -> _Place | None:
    """Where the items of a record lie at a version, None: at its head. None if that was purged meanwhile."""
    head = find(connection, namespace, record)
    if head is None or head["scope"] == ERASED:
        if exact:
            raise NotFound(f"{record} is not in the archive")
        return _Place(head["version"] if head else 0, [])
    version = head["version"] if version is None else version
    if exact and not oldest(connection, namespace, record) <= version <= head["version"]:
        first = oldest(connection, namespace, record)
        raise NotFound(f"{record} has no version {version}: the oldest is {first}, the newest {head['version']}")
    if head["version"] > version and oldest(connection, namespace, record) > version:
        return None
    return _Place(head["version"], _numbered(connection, namespace, record, head, version))


def _numbered(connection: Connection, namespace: str, record: str, head: Head, version: int) -> list[_Source]:
    places = layers.of(connection, namespace, record, version)
    others = {layer.source for layer in places} - {record}
    numbers = keys(connection, namespace, others) if others else {}
    numbers[record] = head["key"]
    return [
        _Source(numbers[source], source, tuple((layer.first, layer.last) for layer in some))
        for source, some in groupby(places, lambda layer: layer.source)
        if source in numbers
    ]


def found(
    connection: Connection,
    namespace: str,
    record: str,
    version: int | None,
    names: Collection[bytes],
    collections: Collection[bytes] = (),
    *,
    exact: bool = False,
) -> FoundItems | None:
    """The newest of these items up to a version, and the greatest keys of collections; None: look again.

    `exact`: raise NotFound unless the record can be read at that version.
    """
    place = _place(connection, namespace, record, version, exact=exact)
    if place is None:
        return None
    rows: dict[bytes, ItemRow] = {}
    for source in place.sources:
        left = [name for name in names if name not in rows]
        for collection, key, at, origin, data in _newest(connection, source, left):
            rows[collection + b"\0" + key] = ItemRow(origin or source.record, at, data)
    return FoundItems(place.archived, rows, {each: _greatest(connection, place, each) for each in collections})


def _newest(connection: Connection, source: _Source, names: Sequence[bytes]) -> Iterable[Any]:
    for chunk in bulk.chunks(names, _AT_ONCE[-1]):
        size = next(size for size in _AT_ONCE if size >= len(chunk))
        given: dict[str, Any] = {"r": source.number, "first": source.spans[0][0], "last": source.spans[0][1]}
        for at in range(size):
            collection, _, key = chunk[min(at, len(chunk) - 1)].partition(b"\0")
            given |= {f"c{at}": collection, f"k{at}": key}
        if len(source.spans) == 1:
            yield from connection.execute(_by_name_in_one(size), given)
        else:
            yield from connection.execute(_by_name(size, _among(connection, source.spans)), given)


def _in_one() -> ColumnElement[bool]:
    """Whether a row is of the one span of a source, which has but one if nothing was rolled back."""
    return items.c.version.between(bindparam("first", type_=BigInteger), bindparam("last", type_=BigInteger))


def _among(connection: Connection, spans: Collection[tuple[int, int]]) -> ColumnElement[bool]:
    given = bulk.listed(connection, {"first": BigInteger(), "last": BigInteger()}, spans)
    within = items.c.version.between(given.c.first, given.c.last)
    return select(literal(1)).select_from(given).where(within).correlate(items).exists()


@cache
def _by_name_in_one(size: int) -> Any:
    """Made once for each of a few sizes: that takes longer than to execute it."""
    return _by_name(size, _in_one())


def _by_name(size: int, within: ColumnElement[bool]) -> Any:
    """One look into the index for each name, however often it was put."""
    i = items.c
    each = []
    for at in range(size):
        named = (i.record == bindparam("r"), i.collection == bindparam(f"c{at}"), i.key == bindparam(f"k{at}"))
        query = select(i.collection, i.key, i.version, i.origin, i.data).where(*named, within)
        each.append(select(query.order_by(i.version.desc()).limit(1).subquery()))
    return union_all(*each) if size > 1 else each[0]


def _greatest(connection: Connection, place: _Place, collection: bytes) -> bytes:
    """'=' and a key, '-' if there never was one."""
    i = items.c
    greatest = b"-"
    for number, _, spans in place.sources:
        last = max(last for _, last in spans)
        query = select(i.key).where(i.record == number, i.collection == collection, i.version <= last)
        key = connection.execute(query.order_by(i.key.desc()).limit(1)).scalar()
        greatest = greatest if key is None else max(greatest, b"=" + key)
    return greatest


def page(
    connection: Connection,
    namespace: str,
    record: str,
    version: int | None,
    wanted: Range,
    limit: int,
    size: int,
    known: Collection[bytes] = (),
    *,
    exact: bool = False,
) -> FoundPage | None:
    """The first items of a range as of a version, without those that are `known`; None: look again.

    So many at most, and of so many bytes, but for the first.
    """
    place = _place(connection, namespace, record, version, exact=exact)
    if place is None:
        return None
    chosen: list[tuple[bytes, int, str, int]] = []  # key, number and name of the source, version
    more = False
    for key, number, source, at, length in _merged(connection, place, wanted, limit, known):
        if len(chosen) == limit or (chosen and size < length):
            more = True
            break
        size -= length
        chosen.append((key, number, source, at))
    frames: dict[tuple[int, bytes], bytes] = {}
    for number in {number for _, number, _, _ in chosen}:
        names = [(wanted.collection, key, at) for key, of, _, at in chosen if of == number]
        for (_, key, _), data in item_rows.bodies(connection, number, names).items():
            frames[number, key] = data
    rows = [(key, ItemRow(source, at, frames[number, key])) for key, number, source, at in chosen]
    return FoundPage(place.archived, rows, more)


def _merged(
    connection: Connection, place: _Place, wanted: Range, limit: int, known: Collection[bytes]
) -> Iterable[tuple[bytes, int, str, int, int]]:
    """The items that all sources show, in order: of those that lie upon each other the uppermost, if that is none."""
    order: Callable[[Any], Any] = lambda row: row[0]  # noqa: E731  # one for both
    # One more than is wanted shows that there are more, and another one that this one is read to its end.
    streams = [_keys(connection, source, above, wanted, limit + 2) for above, source in enumerate(place.sources)]
    together = merge(*streams, key=order, reverse=wanted.reverse)
    for key, rows in groupby(together, key=order):
        _, _, number, source, at, length = min(rows, key=lambda row: row[1])
        if length and key not in known:
            yield key, number, source, at, length


def _keys(
    connection: Connection, source: _Source, above: int, wanted: Range, some: int
) -> Iterable[tuple[bytes, int, int, str, int, int]]:
    """The newest row of each key of a source, deleted ones too, some at a time."""
    given: dict[str, Any] = {
        "r": source.number,
        "c": wanted.collection,
        "source": source.record,
        "prefix": wanted.prefix,
    }
    # One bound on each side: of two SQLite seeks by one, and walks past all that the other leaves out.
    ends = [each for each in (wanted.before, item_rows.behind(wanted.prefix)) if each is not None]
    given["after"] = wanted.after if wanted.after is not None and wanted.after >= wanted.prefix else None
    given["below"] = min(ends, default=None)
    given["first"], given["last"] = source.spans[0]
    while True:
        given["some"] = some
        bounds = frozenset(name for name in ("after", "below") if given[name] is not None)
        if len(source.spans) == 1:
            query = _in_range_of_one(bounds, wanted.reverse)
        else:
            query = _in_range(bounds, _among(connection, source.spans), reverse=wanted.reverse)
        rows = connection.execute(query, given).all()
        for key, version, origin, length in rows:
            yield key, above, source.number, origin, version, length
        if len(rows) < some:
            return
        # Those that were deleted, or lie hidden, are not counted: who asks for one does not ask for each of them.
        some = max(some, min(4 * some, _MOST))
        given["below" if wanted.reverse else "after"] = rows[-1][0]


@cache
def _in_range_of_one(bounds: frozenset[str], reverse: bool) -> Select[Any]:
    """Made once for each kind: that takes longer than to execute it."""
    return _in_range(bounds, _in_one(), reverse=reverse)


def _in_range(bounds: frozenset[str], within: ColumnElement[bool], *, reverse: bool) -> Select[Any]:
    """From key to key by a look into the index each, so that what was put a thousand times costs no more than once.

    *As rows that no newer one follows, PostgreSQL without statistics read all of the collection for each. With the
    bounds of the range beside that of the last key, SQLite read all from the range's beginning for each.*
    """
    i = items.c
    mine = [i.record == bindparam("r"), i.collection == bindparam("c"), within]
    lower = i.key > bindparam("after") if "after" in bounds else i.key >= bindparam("prefix")
    upper = [i.key < bindparam("below")] if "below" in bounds else []

    def nearest(*within: ColumnElement[bool]) -> ColumnElement[bytes]:
        query = select(i.key).where(*mine, *within).order_by(i.key.desc() if reverse else i.key)
        return query.limit(1).scalar_subquery()

    keys_ = select(nearest(lower, *upper).label("key")).cte("keys", recursive=True)
    following = nearest(lower, i.key < keys_.c.key) if reverse else nearest(i.key > keys_.c.key, *upper)
    keys_ = keys_.union_all(select(following).where(keys_.c.key.is_not(None)))

    def newest(what: ColumnElement[Any]) -> ColumnElement[Any]:
        query = select(what).where(*mine, i.key == keys_.c.key).order_by(i.version.desc()).limit(1)
        return query.correlate(keys_).scalar_subquery()

    source = func.coalesce(i.origin, bindparam("source", type_=TEXT))
    query = select(keys_.c.key, newest(i.version), newest(source), newest(func.length(i.data)))
    return query.where(keys_.c.key.is_not(None)).limit(bindparam("some", type_=BigInteger))
