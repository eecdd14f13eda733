"""The items of records: their rows, the layers that they lie in, and how they are read.

Law: a row is written each time that an item is put or deleted, and what it says is never changed. An item at a version
is what its newest row up to there says; an empty one says that it was deleted.

Below a record's own rows lie its layers: what it shows of the record that it was forked from. A fork shows below its
own items those that what it was made from showed then. So each of those lies in a layer of its own, up to the version
at which the line left it; noted are all records that it needs, however far up the line. A layer is noted only where
there are items. What a rollback brings back lies in layers as well, of the record itself: what it puts from then on, in
a layer that is open, is shown above those. Where all was cleared, there is the open one alone.

What is read is as of one version. A reader that was told by Redis at which version the record is asks for that one.
What is said of it holds as long as it can be read at all, so a purge that came in between is noticed.

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
_AT_ONCE = (1, 10, 100)  # names in one statement
_READ_AT_ONCE = (1, 10, 50)  # names in one statement
_MOST = 1000  # keys in one statement


# Reading: some items by their names, a page of a collection, the greatest key


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


def found(
    sql: Sql,
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
    """Whether a row is of the one span of a source, which has but one if nothing was rolled back."""
    return items.c.version.between(bindparam("first", type_=BigInteger), bindparam("last", type_=BigInteger))


def _among(sql: Sql, spans: Collection[tuple[int, int]]) -> ColumnElement[bool]:
    given = sql.listed({"first": BigInteger(), "last": BigInteger()}, spans)
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


def _greatest(sql: Sql, place: _Place, collection: bytes) -> bytes:
    """'=' and a key, '-' if there never was one."""
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
    """The first items of a range as of a version, without those that are `known`; None: look again.

    So many at most, and of so many bytes, but for the first.
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
    """The items that all sources show, in order: of those that lie upon each other the uppermost, if that is none."""
    order: Callable[[Any], Any] = lambda row: row[0]  # noqa: E731  # one for both
    # One more than is wanted shows that there are more, and another one that this one is read to its end.
    streams = [_keys(sql, source, above, wanted, limit + 2) for above, source in enumerate(place.sources)]
    together = merge(*streams, key=order, reverse=wanted.reverse)
    for key, rows in groupby(together, key=order):
        _, _, number, source, at, length = min(rows, key=lambda row: row[1])
        if length and key not in known:
            yield key, number, source, at, length


def _keys(
    sql: Sql, source: _Source, above: int, wanted: Range, some: int
) -> Iterable[tuple[bytes, int, int, str, int, int]]:
    """The newest row of each key of a source, deleted ones too, some at a time."""
    given: dict[str, Any] = {
        "r": source.number,
        "c": wanted.collection,
        "source": source.record,
        "prefix": wanted.prefix,
    }
    # One bound on each side: of two SQLite seeks by one, and walks past all that the other leaves out.
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


def behind(prefix: bytes) -> bytes | None:
    """The first key, in the order of bytes, that is behind all that begin with a prefix; None if there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def _place(sql: Sql, record: str, version: int | None, *, exact: bool) -> _Place | None:
    """Where the items of a record lie at a version, None: at its head. None if that was purged meanwhile."""
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
    """Those of the records with these numbers that have any rows."""
    any_of_it = select(literal(1)).where(items.c.record == records.c.key).exists()
    query = select(records.c.key).where(sql.among(records.c.key, some), any_of_it)
    return set(sql.execute(query).scalars())


def changed_since(sql: Sql, record: str, version: int) -> bool:
    """Whether a record put or deleted any item after a version."""
    head = find(sql, record)
    if head is None:
        return False
    query = select(items.c.version).where(items.c.record == head["key"], items.c.version > version).limit(1)
    return sql.execute(query).first() is not None


def bodies(sql: Sql, key: int, wanted: Iterable[Name]) -> dict[Name, bytes]:
    """The frames of these rows of a record, without those that a purge removed."""
    return {name: data for name, (_, data) in written(sql, key, wanted).items()}


def written(sql: Sql, key: int, wanted: Iterable[Name]) -> dict[Name, tuple[str | None, bytes]]:
    """The same with the record that wrote each, None for this one."""
    return {name: (origin, data) for name, origin, data in _rows(sql, key, wanted, items.c.data)}


def lengths(sql: Sql, key: int, wanted: Iterable[Name]) -> dict[Name, int]:
    """How many bytes these frames have."""
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
    """Made once for each of a few sizes: that takes longer than to execute it."""
    i = items.c
    # Not a list of tuples: for that SQLite looks at all rows of the record.
    named = [
        and_(i.record == bindparam("r"), i.collection == bindparam(f"c{n}"), i.key == bindparam(f"k{n}"),
             i.version == bindparam(f"v{n}"))
        for n in range(size)
    ]  # fmt: skip
    return select(i.collection, i.key, i.version, i.origin).where(or_(*named))


def newer(last: int | ColumnElement[int]) -> Exists:
    """Whether a row of `items` is followed by another one of its item, up to a version."""
    i, n = items.c, items.alias("newer")
    return select(literal(1)).select_from(n).where(_same(n), n.c.version > i.version, n.c.version <= last).exists()


def _same(other: FromClause) -> ColumnElement[bool]:
    i, o = items.c, other.c
    return and_(o.record == i.record, o.collection == i.collection, o.key == i.key)


# Layers


class Layer(NamedTuple):
    """What the record `source` put and deleted at its versions `first` to `last`."""

    source: str
    first: int
    last: int


def layers_of(sql: Sql, record: str, version: int) -> list[Layer]:
    """Where a record's items are at a version, the uppermost first: its own, and those of others."""
    return _shown(_noted(sql, [record]).get(record, {}), record, version)[::-1]


def layers_below(sql: Sql, record: str, version: int) -> list[Layer]:
    """What lies below the layer that a record began at a version, or before, the uppermost first."""
    return _shown(_noted(sql, [record]).get(record, {}), record, version)[-2::-1]


def _noted(sql: Sql, names: Collection[str]) -> dict[str, dict[int, list[Layer]]]:
    """What is noted of these records, by the version since when it is so; of each the lowest layer first."""
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
    """Note what these forks, and what went back or was cleared, show from then on.

    `have` are the numbers of those that it is taken from that have items of their own.
    """
    made = [item for item in accepted if source_of(item) in keys]
    known = _noted(sql, {source_of(item) for item in made})
    rows: list[Row] = []
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
        rows += [(sql.namespace, record, version, place, *layer) for place, layer in enumerate(shown)]
    sql.add(layers, rows)


def source_of(item: Parsed) -> str:
    """Which record's items this one shows below those that it puts from now on; '' if it changes nothing of that."""
    return item.entry.record if item.shows is not None else item.parent or ""


# Items of an exported record
#
# A file begins at a version, and changes in it may bring back what an older one showed. Of each such version it has all
# items, the older ones first, each as far as it differs from the one before.


class OlderItem(NamedTuple):
    """An item as it was at version `at`, and who put it: collection, NUL and key; an empty frame: there was none."""

    at: int
    name: bytes
    origin: str
    data: bytes


def older(sql: Sql, record: str, base: int, rollbacks: Mapping[int, int]) -> list[OlderItem]:
    """What a file needs that begins behind version `base`, 0: with the first one, where a fork shows others' items.

    `rollbacks` has for each later version that brings items back the one that it brings back.
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
    """All items that layers show, the uppermost first: who put each, and its frame."""
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
    """Insert what a file has of older items, as the record's own, and note which of its changes bring items back."""
    rows = [(key, *item.name.split(b"\0", 1), item.at, None, item.data) for item in older]
    sql.add(items, sorted(rows, key=lambda row: row[:4]))
    # Of the record itself alone: what a file says of others is not believed.
    note_layers(sql, [item for item in parsed if item.shows is not None], {record: key}, {key})


# What a purge leaves


def needless(sql: Sql, bases: Mapping[str, int]) -> None:
    """Forget how records showed items before the versions in `bases`, from which on they can be read."""
    c = layers.c
    for record, noted in _noted(sql, bases.keys()).items():
        held = max((since for since in noted if since <= bases[record]), default=0)
        if min(noted) < held:
            mine = and_(c.namespace == sql.namespace, c.record == record)
            sql.execute(delete(layers).where(mine, c.version < held))


def layer_spans(sql: Sql, bases: Mapping[str, int]) -> dict[str, set[tuple[int, int]]]:
    """Which versions of their items these records or others show, first and last, where it is not all of them.

    That is of records that had begun a layer at the version in `bases`, from which on they can be read.
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
    """The versions of these records, by their numbers, at which others show them."""
    c, r = layers.c, records.c
    closed = and_(c.namespace == sql.namespace, sql.among(c.source, names), c.last < LARGEST)
    query = select(r.key, c.last).where(closed).distinct()
    query = query.join_from(layers, records, and_(r.namespace == c.namespace, r.record == c.source))
    found: dict[int, set[int]] = {}
    for key, last in sql.execute(query):
        found.setdefault(key, set()).add(last)
    return found


def layered(sql: Sql, names: Sequence[str]) -> set[str]:
    """Those of these records below whose own items, or the present layer of these, lie any."""
    c = layers.c
    below = and_(c.namespace == sql.namespace, sql.among(c.record, names), c.last < LARGEST)
    query = select(c.record).where(below).distinct()
    return set(sql.execute(query).scalars())


def thin(sql: Sql, bases: Mapping[int, int], ends: Mapping[int, Collection[int]]) -> None:
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

    sql.remove(items, spans, superseded)


def drop_hidden(sql: Sql, record: int, base: int, shown: Collection[tuple[int, int]]) -> None:
    """Remove what a record that began layers put before its base and shows in none of them any more."""
    i = items.c
    query = select(i.version).where(i.record == record, i.version <= base).distinct()
    # Not as conditions: each rollback leaves a span, and SQLite takes a thousand of them at most.
    spans = sorted(shown)
    reach = list(accumulate((last for _, last in spans), max))
    hidden = []
    for version in sql.execute(query).scalars():
        at = bisect_right(spans, (version, LARGEST))
        if not at or reach[at - 1] < version:
            hidden.append(version)
    sql.execute(delete(items).where(i.record == record, sql.among(i.version, hidden)))


def forget_deleted(sql: Sql, bases: Mapping[int, int]) -> None:
    """Remove, up to a version, that items were deleted of which nothing is left. Not of records that have layers."""
    i, older = items.c, items.alias("older")
    left = select(literal(1)).select_from(older).where(_same(older), older.c.version < i.version).exists()

    def needless(base: Any) -> ColumnElement[bool]:
        return and_(i.record == base.r, i.version <= base.v, i.data == b"", ~left)

    sql.remove(items, [{"r": record, "v": base} for record, base in bases.items()], needless)
