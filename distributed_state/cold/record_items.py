"""The items of records: their rows, their layers, and how they are read.

Law: each put or delete of an item writes a new row, and rows never change. An item at a version is its newest row up to
there; an empty one means that it was deleted.

Below a record's own rows lie layers. A fork shows, below its own items, the items that its source showed at that
version. Each ancestor that contributes items has its own layer, up to the version that was forked from it; layers are
noted only where there are items. A rollback adds layers of the record itself: new items go into an open layer above
those that it restores. After a clear there is only the open layer.

Every read is as of one version, mostly the one that Redis reported. An answer is valid as long as its version is
readable; a purge in between is detected.

Design: sections 9, 11.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import merge
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
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
    union_all,
)

from distributed_state.cold.engine import Row, Sql, chunks
from distributed_state.cold.record_index import ERASED, LARGEST, Head, Parsed, find, keys, oldest
from distributed_state.cold.tables import TEXT, items, layers, records
from distributed_state.errors import NotFound

Name = tuple[bytes, bytes, int]  # collection, key and version of a row of a record
_AT_ONCE = (1, 10, 100)  # rows in one statement
_READ_AT_ONCE = (1, 10, 50)  # names in one statement
_MOST = 1000  # keys in one statement


# Reading: some items by their names, a page of a collection, the greatest key


class ItemRow(NamedTuple):
    """A row of an item, written by `source` at `version` (0: unknown, that record is gone). No frame: deleted."""

    source: str
    version: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class FoundItems:
    """Items by name, as of a version; `archived`: the version up to which SQL has the record.

    `greatest` has the greatest key, including deleted ones, of each requested collection.
    """

    archived: int
    rows: dict[bytes, ItemRow]
    greatest: dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Range:
    """Keys of a collection: those with a prefix, between two (exclusive), and in which order."""

    collection: bytes
    prefix: bytes = b""
    after: bytes | None = None
    before: bytes | None = None
    reverse: bool = False


@dataclass(frozen=True, slots=True)
class FoundPage:
    """Items of a range in its order; `more`: there may be others after the last one."""

    archived: int
    rows: list[tuple[bytes, ItemRow]]
    more: bool


class _Source(NamedTuple):
    """Adjacent layers of one record, in which the newest row of an item wins."""

    number: int
    record: str
    spans: tuple[tuple[int, int], ...]  # of its versions, first and last


class _Place(NamedTuple):
    archived: int
    sources: list[_Source]  # the uppermost first


def found(
    sql: Sql,
    record: str,
    version: int | None,
    names: Collection[bytes],
    collections: Collection[bytes] = (),
    *,
    exact: bool = False,
) -> FoundItems | None:
    """The newest rows of these items up to a version, and collections' greatest keys; None: purged meanwhile, retry.

    `exact`: raise NotFound unless the record can be read at that version.
    """
    place = _place(sql, record, version, exact=exact)
    if place is None:
        return None
    rows: dict[bytes, ItemRow] = {}
    for source in place.sources:
        left = [name for name in names if name not in rows]
        for collection, key, at, origin, data in _newest(sql, source, left):
            rows[collection + b"\0" + key] = ItemRow(origin or source.record, at, data)
    return FoundItems(place.archived, rows, {each: _greatest(sql, place, each) for each in collections})


def _newest(sql: Sql, source: _Source, names: Sequence[bytes]) -> Iterable[Any]:
    for chunk in chunks(names, _READ_AT_ONCE[-1]):
        size = next(size for size in _READ_AT_ONCE if size >= len(chunk))
        given: dict[str, Any] = {"r": source.number, "first": source.spans[0][0], "last": source.spans[0][1]}
        for at in range(size):
            collection, _, key = chunk[min(at, len(chunk) - 1)].partition(b"\0")
            given |= {f"c{at}": collection, f"k{at}": key}
        if len(source.spans) == 1:
            yield from sql.execute(_by_name_in_one(size), given)
        else:
            yield from sql.execute(_by_name(size, _among(sql, source.spans)), given)


def _in_one() -> ColumnElement[bool]:
    """Whether a row is in the only span of a source; without rollbacks there is one."""
    return items.c.version.between(bindparam("first", type_=BigInteger), bindparam("last", type_=BigInteger))


def _among(sql: Sql, spans: Collection[tuple[int, int]]) -> ColumnElement[bool]:
    given = sql.listed({"first": BigInteger(), "last": BigInteger()}, spans)
    within = items.c.version.between(given.c.first, given.c.last)
    return select(literal(1)).select_from(given).where(within).correlate(items).exists()


@cache
def _by_name_in_one(size: int) -> Any:
    """Built once for each of a few sizes: that takes longer than executing it."""
    return _by_name(size, _in_one())


def _by_name(size: int, within: ColumnElement[bool]) -> Any:
    """One index lookup for each name, however often it was put."""
    i = items.c
    each = []
    for at in range(size):
        named = (i.record == bindparam("r"), i.collection == bindparam(f"c{at}"), i.key == bindparam(f"k{at}"))
        query = select(i.collection, i.key, i.version, i.origin, i.data).where(*named, within)
        each.append(select(query.order_by(i.version.desc()).limit(1).subquery()))
    return union_all(*each) if size > 1 else each[0]


def _greatest(sql: Sql, place: _Place, collection: bytes) -> bytes:
    """'=' and the greatest key; '-' if there never was one."""
    i = items.c
    greatest = b"-"
    for number, _, spans in place.sources:
        last = max(last for _, last in spans)
        query = select(i.key).where(i.record == number, i.collection == collection, i.version <= last)
        key = sql.execute(query.order_by(i.key.desc()).limit(1)).scalar()
        greatest = greatest if key is None else max(greatest, b"=" + key)
    return greatest


def page(
    sql: Sql,
    record: str,
    version: int | None,
    wanted: Range,
    limit: int,
    size: int,
    known: Collection[bytes] = (),
    *,
    exact: bool = False,
) -> FoundPage | None:
    """The first items of a range as of a version, without `known` ones; None: purged meanwhile, retry.

    At most `limit` items of `size` bytes together, but at least one.
    """
    place = _place(sql, record, version, exact=exact)
    if place is None:
        return None
    chosen: list[tuple[bytes, int, str, int]] = []  # key, number and name of the source, version
    more = False
    for key, number, source, at, length in _merged(sql, place, wanted, limit, known):
        if len(chosen) == limit or (chosen and size < length):
            more = True
            break
        size -= length
        chosen.append((key, number, source, at))
    frames: dict[tuple[int, bytes], bytes] = {}
    for number in {number for _, number, _, _ in chosen}:
        names = [(wanted.collection, key, at) for key, of, _, at in chosen if of == number]
        for (_, key, _), data in bodies(sql, number, names).items():
            frames[number, key] = data
    rows = [(key, ItemRow(source, at, frames[number, key])) for key, number, source, at in chosen]
    return FoundPage(place.archived, rows, more)


def _merged(
    sql: Sql, place: _Place, wanted: Range, limit: int, known: Collection[bytes]
) -> Iterable[tuple[bytes, int, str, int, int]]:
    """The items that all sources show, in order: each from the uppermost source that has it, unless deleted there."""
    order: Callable[[Any], Any] = lambda row: row[0]  # noqa: E731  # one for both
    # One more key than wanted shows that there are others; a second one shows that the key before it is complete.
    streams = [_keys(sql, source, above, wanted, limit + 2) for above, source in enumerate(place.sources)]
    together = merge(*streams, key=order, reverse=wanted.reverse)
    for key, rows in groupby(together, key=order):
        _, _, number, source, at, length = min(rows, key=lambda row: row[1])
        if length and key not in known:
            yield key, number, source, at, length


def _keys(
    sql: Sql, source: _Source, above: int, wanted: Range, some: int
) -> Iterable[tuple[bytes, int, int, str, int, int]]:
    """The newest row of each key of a source, including deleted ones, a limited number at a time."""
    given: dict[str, Any] = {
        "r": source.number,
        "c": wanted.collection,
        "source": source.record,
        "prefix": wanted.prefix,
    }
    # Only one bound on each side: SQLite seeks by one of two, and reads all rows that the other excludes.
    ends = [each for each in (wanted.before, behind(wanted.prefix)) if each is not None]
    given["after"] = wanted.after if wanted.after is not None and wanted.after >= wanted.prefix else None
    given["below"] = min(ends, default=None)
    given["first"], given["last"] = source.spans[0]
    while True:
        given["some"] = some
        bounds = frozenset(name for name in ("after", "below") if given[name] is not None)
        if len(source.spans) == 1:
            query = _in_range_of_one(bounds, wanted.reverse)
        else:
            query = _in_range(bounds, _among(sql, source.spans), reverse=wanted.reverse)
        rows = sql.execute(query, given).all()
        for key, version, origin, length in rows:
            yield key, above, source.number, origin, version, length
        if len(rows) < some:
            return
        # Deleted and hidden items do not count, so each read is larger, to find an item after many of them.
        some = max(some, min(4 * some, _MOST))
        given["below" if wanted.reverse else "after"] = rows[-1][0]


@cache
def _in_range_of_one(bounds: frozenset[str], reverse: bool) -> Select[Any]:
    """Built once for each kind, because building takes longer than executing."""
    return _in_range(bounds, _in_one(), reverse=reverse)


def _in_range(bounds: frozenset[str], within: ColumnElement[bool], *, reverse: bool) -> Select[Any]:
    """Go from key to key by one index lookup each, so that an item that was put a thousand times costs one lookup.

    *With "rows without a newer one", PostgreSQL without statistics read the whole collection for each. With the bounds
    of the range besides the last key, SQLite read everything from the range's beginning for each.*
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


def behind(prefix: bytes) -> bytes | None:
    """The first key, in the order of bytes, after all with this prefix; None if there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def _place(sql: Sql, record: str, version: int | None, *, exact: bool) -> _Place | None:
    """The place of a record's items at a version (None: at its head). None if that version was purged meanwhile."""
    head = find(sql, record)
    if head is None or head["scope"] == ERASED:
        if exact:
            raise NotFound(f"{record} is not in the archive")
        return _Place(head["version"] if head else 0, [])
    version = head["version"] if version is None else version
    if exact and not oldest(sql, record) <= version <= head["version"]:
        first = oldest(sql, record)
        raise NotFound(f"{record} has no version {version}: the oldest is {first}, the newest {head['version']}")
    if head["version"] > version and oldest(sql, record) > version:
        return None
    return _Place(head["version"], _numbered(sql, record, head, version))


def _numbered(sql: Sql, record: str, head: Head, version: int) -> list[_Source]:
    places = layers_of(sql, record, version)
    others = {layer.source for layer in places} - {record}
    numbers = keys(sql, others) if others else {}
    numbers[record] = head["key"]
    return [
        _Source(numbers[source], source, tuple((layer.first, layer.last) for layer in some))
        for source, some in groupby(places, lambda layer: layer.source)
        if source in numbers
    ]


# Rows


def with_items(sql: Sql, some: Collection[int]) -> set[int]:
    """Return the keys among these whose records have rows of items."""
    any_of_it = select(literal(1)).where(items.c.record == records.c.key).exists()
    query = select(records.c.key).where(sql.among(records.c.key, some), any_of_it)
    return set(sql.execute(query).scalars())


def changed_since(sql: Sql, record: str, version: int) -> bool:
    """Whether a record put or deleted an item after a version."""
    head = find(sql, record)
    if head is None:
        return False
    query = select(items.c.version).where(items.c.record == head["key"], items.c.version > version).limit(1)
    return sql.execute(query).first() is not None


def bodies(sql: Sql, key: int, wanted: Iterable[Name]) -> dict[Name, bytes]:
    """The frames of these rows of a record, except purged ones."""
    return {name: data for name, (_, data) in written(sql, key, wanted).items()}


def written(sql: Sql, key: int, wanted: Iterable[Name]) -> dict[Name, tuple[str | None, bytes]]:
    """The frames of these rows, each with the record that wrote it, None for this one."""
    return {name: (origin, data) for name, origin, data in _rows(sql, key, wanted, items.c.data)}


def lengths(sql: Sql, key: int, wanted: Iterable[Name]) -> dict[Name, int]:
    """The sizes of these frames in bytes."""
    return {name: length for name, _, length in _rows(sql, key, wanted, func.length(items.c.data))}


def _rows(
    sql: Sql, key: int, wanted: Iterable[Name], value: ColumnElement[Any]
) -> Iterator[tuple[Name, str | None, Any]]:
    for chunk in chunks(wanted, _AT_ONCE[-1]):
        size = next(size for size in _AT_ONCE if size >= len(chunk))
        given: dict[str, Any] = {"r": key}
        for number in range(size):
            name = chunk[min(number, len(chunk) - 1)]
            given |= {f"c{number}": name[0], f"k{number}": name[1], f"v{number}": name[2]}
        for collection, name, version, origin, found in sql.execute(_by_place(size).add_columns(value), given):
            yield (collection, name, version), origin, found


@cache
def _by_place(size: int) -> Select[Any]:
    """Built once for each of a few sizes: that takes longer than executing it."""
    i = items.c
    # No list of tuples, because SQLite would scan all rows of the record.
    named = [
        and_(i.record == bindparam("r"), i.collection == bindparam(f"c{n}"), i.key == bindparam(f"k{n}"),
             i.version == bindparam(f"v{n}"))
        for n in range(size)
    ]  # fmt: skip
    return select(i.collection, i.key, i.version, i.origin).where(or_(*named))


def newer(last: int | ColumnElement[int]) -> Exists:
    """Whether a row of `items` has a newer row of the same item, up to a version."""
    i, n = items.c, items.alias("newer")
    return select(literal(1)).select_from(n).where(_same(n), n.c.version > i.version, n.c.version <= last).exists()


def _same(other: FromClause) -> ColumnElement[bool]:
    i, o = items.c, other.c
    return and_(o.record == i.record, o.collection == i.collection, o.key == i.key)


# Layers


class Layer(NamedTuple):
    """The puts and deletes of the record `source` at its versions `first` to `last`."""

    source: str
    first: int
    last: int


def layers_of(sql: Sql, record: str, version: int) -> list[Layer]:
    """The layers of a record at a version, the uppermost first: its own, and those of others."""
    return _shown(_noted(sql, [record]).get(record, {}), record, version)[::-1]


def layers_below(sql: Sql, record: str, version: int) -> list[Layer]:
    """The layers below the one that a record began at a version, or earlier, the uppermost first."""
    return _shown(_noted(sql, [record]).get(record, {}), record, version)[-2::-1]


def _noted(sql: Sql, names: Collection[str]) -> dict[str, dict[int, list[Layer]]]:
    """The noted layers of these records, by the version from which on they apply; the lowest layer first."""
    c = layers.c
    found: dict[str, dict[int, list[Layer]]] = {}
    query = select(c.record, c.version, c.source, c.first, c.last).where(c.namespace == sql.namespace)
    for record, version, *layer in sql.rows(query.order_by(c.record, c.version, c.place), c.record, names):
        found.setdefault(record, {}).setdefault(version, []).append(Layer(*layer))
    return found


def _shown(noted: Mapping[int, list[Layer]], record: str, version: int) -> list[Layer]:
    """All layers of a record as they are at a version, the lowest first, the last one its own."""
    since = [each for each in noted if each <= version]
    shown = list(noted[max(since)]) if since else []
    first = shown.pop().first if shown and shown[-1].last == LARGEST else 0
    return [*shown, Layer(record, first, version)]


def note_layers(sql: Sql, accepted: Iterable[Parsed], keys: Mapping[str, int], have: Collection[int]) -> None:
    """Note the layers that these forks, rollbacks and clears show from then on.

    `have` are the keys of those of their sources that have items of their own.
    """
    made = [item for item in accepted if source_of(item) in keys]
    known = _noted(sql, {source_of(item) for item in made})
    rows: list[Row] = []
    for item in made:
        source, record, version = source_of(item), item.entry.record, item.entry.version
        shown: list[Layer] = []
        if item.shows != 0:
            shown = _shown(known.get(source, {}), source, item.parent_version if item.shows is None else item.shows)
            # Lower layers are noted even without items: copies may be put there when their records are erased.
            if item.shows is None and keys[source] not in have:
                shown.pop()
        if item.shows is not None:
            shown.append(Layer(record, version, LARGEST))
        if shown:
            known.setdefault(record, {})[version] = shown
        rows += [(sql.namespace, record, version, place, *layer) for place, layer in enumerate(shown)]
    sql.add(layers, rows)


def source_of(item: Parsed) -> str:
    """The record whose items this entry shows below later puts; '' if the entry does not change that."""
    return item.entry.record if item.shows is not None else item.parent or ""


# Items of an exported record
#
# A file begins at a version, and later changes in it may restore items of an older one. The file has all items of each
# such version, the oldest first, each as its difference from the one before.


class OlderItem(NamedTuple):
    """An item at version `at`, and its writer: collection, NUL and key; an empty frame: there was none."""

    at: int
    name: bytes
    origin: str
    data: bytes


def older(sql: Sql, record: str, base: int, rollbacks: Mapping[int, int]) -> list[OlderItem]:
    """The older items that a file needs if it begins after version `base`. For base 0, a fork's inherited items.

    `rollbacks` maps each later version that restores items to the version that it restores.
    """
    points: dict[int, Sequence[Layer]] = {}
    for version, back in rollbacks.items():
        if 0 < back < base:
            points[back] = layers_below(sql, record, version)
    points[base] = layers_of(sql, record, base) if base else layers_below(sql, record, 1)
    found: list[OlderItem] = []
    before: dict[bytes, tuple[str, bytes]] = {}
    for at in sorted(points):
        shown = _all_shown(sql, points[at])
        found += [OlderItem(at, name, record, b"") for name in sorted(before.keys() - shown.keys())]
        found += [OlderItem(at, name, *shown[name]) for name in sorted(shown) if before.get(name) != shown[name]]
        before = shown
    return found


def _all_shown(sql: Sql, places: Sequence[Layer]) -> dict[bytes, tuple[str, bytes]]:
    """All items that layers (the uppermost first) show, each with the record that wrote it and its frame."""
    i = items.c
    numbers = keys(sql, {layer.source for layer in places})
    found: dict[bytes, tuple[str, bytes]] = {}
    for layer in places:
        number = numbers.get(layer.source, -1)
        query = select(i.collection, i.key, func.max(i.version)).group_by(i.collection, i.key)
        rows = sql.execute(query.where(i.record == number, i.version.between(layer.first, layer.last))).all()
        newest = [tuple(row) for row in rows if row[0] + b"\0" + row[1] not in found]
        for (collection, key, _), (origin, data) in written(sql, number, newest).items():
            found[collection + b"\0" + key] = (origin or layer.source, data)
    return {name: item for name, item in found.items() if item[1]}


def bring(sql: Sql, record: str, key: int, older: Iterable[OlderItem], parsed: Sequence[Parsed]) -> None:
    """Insert a file's older items as the record's own, and note which of its changes restore items."""
    rows = [(key, *item.name.split(b"\0", 1), item.at, None, item.data) for item in older]
    sql.add(items, sorted(rows, key=lambda row: row[:4]))
    # Only layers of the record itself, because references to other records in a file are not trusted.
    note_layers(sql, [item for item in parsed if item.shows is not None], {record: key}, {key})


# Purging


def needless(sql: Sql, bases: Mapping[str, int]) -> None:
    """Delete the layers of records before the versions in `bases`, from which on they stay readable."""
    c = layers.c
    for record, noted in _noted(sql, bases.keys()).items():
        held = max((since for since in noted if since <= bases[record]), default=0)
        if min(noted) < held:
            mine = and_(c.namespace == sql.namespace, c.record == record)
            sql.execute(delete(layers).where(mine, c.version < held))


def layer_spans(sql: Sql, bases: Mapping[str, int]) -> dict[str, set[tuple[int, int]]]:
    """The spans of versions (first and last) of these records' items that are shown, if not all are.

    Only for records that had begun a layer at the version in `bases`, from which on they stay readable.
    """
    c = layers.c
    query = select(c.source, c.first, c.last, c.record)
    query = query.where(c.namespace == sql.namespace, sql.among(c.source, list(bases)))
    found: dict[str, set[tuple[int, int]]] = {}
    began: set[str] = set()
    for source, first, last, record in sql.execute(query):
        found.setdefault(source, set()).add((first, last))
        if record == source and last == LARGEST and first <= bases[source]:
            began.add(source)
    return {record: found[record] for record in began}


def layer_ends(sql: Sql, names: Sequence[str]) -> dict[int, set[int]]:
    """The versions, by record key, at which other records show items of these."""
    c, r = layers.c, records.c
    closed = and_(c.namespace == sql.namespace, sql.among(c.source, names), c.last < LARGEST)
    query = select(r.key, c.last).where(closed).distinct()
    query = query.join_from(layers, records, and_(r.namespace == c.namespace, r.record == c.source))
    found: dict[int, set[int]] = {}
    for key, last in sql.execute(query):
        found.setdefault(key, set()).add(last)
    return found


def layered(sql: Sql, names: Sequence[str]) -> set[str]:
    """The records that have layers below their own items, or below their present layer."""
    c = layers.c
    below = and_(c.namespace == sql.namespace, sql.among(c.record, names), c.last < LARGEST)
    query = select(c.record).where(below).distinct()
    return set(sql.execute(query).scalars())


def thin(sql: Sql, bases: Mapping[int, int], ends: Mapping[int, Collection[int]]) -> None:
    """Remove rows that can no longer be read, of records that stay readable from the version in `bases` on.

    The newest row of each item up to the base stays, and up to each of the record's `ends`, where a fork was made.
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

    sql.remove(items, spans, superseded)


def drop_hidden(sql: Sql, record: int, base: int, shown: Collection[tuple[int, int]]) -> None:
    """Remove items that a record with layers put before its base and no longer shows in any of them."""
    i = items.c
    query = select(i.version).where(i.record == record, i.version <= base).distinct()
    # Spans are not conditions of the query: each rollback leaves a span, and SQLite allows at most a thousand
    # conditions.
    spans = sorted(shown)
    reach = list(accumulate((last for _, last in spans), max))
    hidden = []
    for version in sql.execute(query).scalars():
        at = bisect_right(spans, (version, LARGEST))
        if not at or reach[at - 1] < version:
            hidden.append(version)
    sql.execute(delete(items).where(i.record == record, sql.among(i.version, hidden)))


def forget_deleted(sql: Sql, bases: Mapping[int, int]) -> None:
    """Remove deletions up to a version if no older row of the item is left. Not for records that have layers."""
    i, older = items.c, items.alias("older")
    left = select(literal(1)).select_from(older).where(_same(older), older.c.version < i.version).exists()

    def needless(base: Any) -> ColumnElement[bool]:
        return and_(i.record == base.r, i.version <= base.v, i.data == b"", ~left)

    sql.remove(items, [{"r": record, "v": base} for record, base in bases.items()], needless)
