"""Finds records and events. Law: a page costs the same at any depth, because it begins after a row, not at a count.

Records have two orders, each that of an index: by newest change, to the minute, and by id, which keeps the records of a
prefix, or with a tag, together.

A page may include unarchived commits. The journals are read before SQL, so commits that are archived in between are
read twice, and count once by their versions. No record appears in two places: records that the journals change are left
out of the pages of SQL, and appear at the places that they will have when they are archived.

Design: sections 9, 12.
"""

from __future__ import annotations

import binascii
import hashlib
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, func, literal, or_, select, true, tuple_

from distributed_state.cold import aside, epochs, record_history, record_index
from distributed_state.cold.engine import Sql
from distributed_state.cold.record_index import LARGEST, Head, Parsed, parse
from distributed_state.cold.tables import cursors, events, items, layers, records, shares, tags
from distributed_state.cold.values import Batch, DueRow, Listed, Mortal, Sought, Wanted
from distributed_state.errors import CorruptState, InvalidValue
from distributed_state.values.journal import Happened, unpack
from distributed_state.values.model import PARENT, SCOPES
from distributed_state.values.schedule import STUCK

_UNNUMBERED = 2**62  # places from here on are of records without a number
_FEW = 1000  # stuck records that a listing reads whole
_MORE = 1000  # extra rows of SQL read with a page, as the journals may have changed their records
_SET_BACK_MS = 600_000
_JOINED = 8  # tags, by a join each; SQLite joins at most 64 tables
_ORDER = (events.c.time_ms, events.c.partition, events.c.epoch, events.c.offset)
Place = tuple[int, int] | str


@dataclass(slots=True)
class _Late:
    """The rows and tags of records whose last changes are not in SQL."""

    heads: dict[str, Head] = field(default_factory=dict)
    tags: dict[str, set[str]] = field(default_factory=dict)


def parsed(batch: Batch, wanted: Wanted) -> list[Parsed]:
    """Parse the entries of records that may be listed, without their messages, items and events.

    Raises UnknownOperation for entries that only a newer release can read: without them acknowledged commits would be
    missing.
    """
    found = []
    for entry in batch.entries:
        if entry.record.startswith(wanted.text):
            try:
                item = parse(entry, batch.partition, batch.epoch)
            except (ValueError, CorruptState):
                continue  # it will be quarantined, and listings do not show the quarantine
            nothing: dict[str, Any] = dict.fromkeys(("messages", "items", "runs", "events"), ())
            found.append(replace(item, entry=replace(entry, data=b""), data=b"", **nothing))
    return found


def listing(sql: Sql, wanted: Wanted, unarchived: Sequence[Parsed] = ()) -> list[Listed]:
    """A page of records, with the effect of these entries, which were read before this transaction began.

    `wanted.after` is the `cursor` of the last row seen; anything else raises InvalidValue.
    """
    after = None if wanted.after is None else _place(wanted.after, wanted)
    late = _late(sql, unarchived) if unarchived else _Late()
    more = wanted.limit + min(len(late.heads), _MORE)
    found: list[Head] = []
    place = after
    while True:
        page = _page(sql, wanted, place, more)
        found += [row for row in page if row["record"] not in late.heads and not _was_last(row, after)]
        if len(page) < more or len(found) >= wanted.limit:
            break
        place = _at(page[-1], wanted)
    overlaid = (head for head in late.heads.values() if _fits(head, late, wanted))
    found += [head for head in overlaid if after is None or _behind(_at(head, wanted), after)]
    return [_listed(row, wanted) for row in _ordered(found, wanted)[: wanted.limit]]


def _page(sql: Sql, wanted: Wanted, after: Place | None, limit: int) -> list[Head]:
    if wanted.stuck and not wanted.tags and count_stuck(sql) <= _FEW:
        return _few_stuck(sql, wanted, after)[:limit]
    if wanted.by_id:
        return [*sql.execute(_by_id(sql, wanted, after).limit(limit)).mappings()]
    found: list[Head] = []
    # Two short scans of the index, merged: a single scan over both kinds would have to sort everything.
    for deleted in (False, True) if wanted.deleted else (False,):
        found += sql.execute(_newest(sql, wanted, after, deleted).limit(limit)).mappings()
    return _ordered(found, wanted)[:limit]


def _newest(sql: Sql, wanted: Wanted, after: Place | None, deleted: bool) -> Select[Any]:
    r = records.c
    query = select(records).where(r.namespace == sql.namespace, r.scope == wanted.scope, r.deleted == deleted)
    # `listed_ms`, which the index has, lags by less than a minute.
    if wanted.changed_from_ms is not None:
        query = query.where(r.listed_ms > wanted.changed_from_ms - record_index.LISTED_MS)
    # One upper bound, as in `_by_id`.
    if wanted.changed_to_ms is not None and (after is None or int(after[0]) >= wanted.changed_to_ms):
        query = query.where(r.listed_ms < wanted.changed_to_ms)
    query = query.where(*_conditions(wanted))
    if after is not None:
        query = query.where(tuple_(r.listed_ms, r.key) < after)
    return query.order_by(r.listed_ms.desc(), r.key.desc())


def count(sql: Sql, scope: str, prefix: str, most: int) -> int:
    """How many records have ids with this prefix, at most `most`."""
    some = _by_id(sql, Wanted(scope, most, prefix=prefix), None).limit(most).subquery()
    return sql.execute(select(func.count()).select_from(some)).scalar_one()


def count_items(sql: Sql, prefix: str, most: int) -> int:
    """How many items the records with this prefix have, at most `most`, without those of deleted records.

    Items that a rollback or a clear hides do count: they are kept, and another rollback shows them again.
    """
    r, i, later = records.c, items.c, items.alias().c
    same = later.record == i.record, later.collection == i.collection, later.key == i.key
    newer = select(literal(1)).where(*same, later.version > i.version).exists()
    texts = [f"{scope}:{prefix}" for scope in SCOPES]
    of_them = or_(*(and_(r.record >= text, r.record < end(text)) for text in texts))
    there = select(literal(1)).join_from(records, items, i.record == r.key).where(r.namespace == sql.namespace, of_them)
    some = there.where(~r.deleted, func.length(i.data) > 0, ~newer).limit(most).subquery()
    return sql.execute(select(func.count()).select_from(some)).scalar_one()


def _conditions(wanted: Wanted) -> list[ColumnElement[bool]]:
    """Conditions on a record's row besides its text and tags. `_says` tests the same on a row in memory."""
    r = records.c
    found = []
    if wanted.owner is not None:
        found.append(r.owner == wanted.owner)
    if wanted.phase is not None:
        found.append(r.phase == wanted.phase)
    if wanted.stuck:
        found += [r.due >= STUCK, r.due < STUCK + "~"]
    if wanted.changed_from_ms is not None:
        found.append(r.updated_ms >= wanted.changed_from_ms)
    if wanted.changed_to_ms is not None:
        found.append(r.updated_ms < wanted.changed_to_ms)
    if wanted.size is not None:
        found.append(r.size >= wanted.size)
    return found


def _says(head: Head, wanted: Wanted) -> bool:
    """Whether a row meets the conditions of `_conditions`."""
    for name in ("owner", "phase"):
        if getattr(wanted, name) is not None and head[name] != getattr(wanted, name):
            return False
    if wanted.stuck and not (head["due"] or "").startswith(STUCK):
        return False
    first, end = wanted.changed_from_ms or 0, LARGEST if wanted.changed_to_ms is None else wanted.changed_to_ms
    return bool(first <= head["updated_ms"] < end and (head["size"] or 0) >= (wanted.size or 0))


def _by_id(sql: Sql, wanted: Wanted, after: Place | None) -> Select[Any]:
    r = records.c
    query = select(records).where(r.namespace == sql.namespace)
    text = r.record
    joined, others = wanted.tags[:_JOINED], wanted.tags[_JOINED:]
    for at, tag in enumerate(joined):
        t = tags.alias(f"tag{at}").c
        query = query.where(t.namespace == sql.namespace, t.tag == tag, t.record == text)
        text = t.record if at == 0 else text
    if others:
        held = select(func.count()).select_from(tags).where(tags.c.namespace == sql.namespace, tags.c.record == text)
        query = query.where(held.where(sql.among(tags.c.tag, others)).scalar_subquery() == len(others))
    # Only one lower bound: with two SQLite seeks by one, and reads all rows that the other excludes.
    lower = text > after if after is not None and str(after) >= wanted.text else text >= wanted.text
    query = query.where(lower, text < end(wanted.text), *_conditions(wanted))
    if not wanted.deleted:
        query = query.where(r.deleted.is_(False))
    return query.order_by(text)


def end(prefix: str) -> str:
    """The first text after all with this prefix, in the order of UTF-8's bytes, which is that of the code points."""
    rest, last = prefix[:-1], ord(prefix[-1])
    if last == 0x10FFFF:
        return end(rest)
    return rest + chr(0xE000 if last == 0xD7FF else last + 1)


def _listed(row: Head, wanted: Wanted) -> Listed:
    place = _at(row, wanted)
    cursor = _cursor(place if isinstance(place, str) else f"{place[0]}:{place[1]}")
    times = row["created_ms"], row["updated_ms"]
    facts = row["owner"], row["version"], *times, row["deleted"]
    return Listed(row["record"], *facts, cursor, row["phase"], row["size"])


def _at(row: Head, wanted: Wanted) -> Place:
    if wanted.by_id:
        return str(row["record"])
    return row["listed_ms"], row["key"] if "key" in row else _unnumbered(row["record"])


def _ordered(rows: Iterable[Head], wanted: Wanted) -> list[Head]:
    return sorted(rows, key=lambda row: _at(row, wanted), reverse=not wanted.by_id)


def _behind(place: Place, after: Place) -> bool:
    if isinstance(place, str) or isinstance(after, str):
        return str(place) > str(after)
    return place < after


# Unarchived commits


def lacking(sql: Sql, parsed: Sequence[Parsed]) -> tuple[list[Parsed], dict[str, Head]]:
    """The entries that SQL does not have yet, and the rows of their records."""
    names = {item.entry.record for item in parsed}
    existing = record_index.rows(sql, names)
    erased = record_index.erased(sql, names - existing.keys())
    new = []
    for item in parsed:
        row = existing.get(item.entry.record)
        if row is None:
            was = erased.get(item.entry.record)
            is_new = was is None or item.entry.version > was["version"]
        else:
            newer = epochs.ordinal(item.epoch) - epochs.ordinal(row["epoch"])
            is_new = newer > 0 or (newer == 0 and item.entry.version > row["version"])
        if is_new:
            new.append(item)
    return new, existing


def _late(sql: Sql, parsed: Sequence[Parsed]) -> _Late:
    """The rows of records as they are after the entries that SQL does not have yet."""
    new, existing = lacking(sql, parsed)
    late = _Late({**record_index.heads(sql, new, existing)})
    late.tags = record_index.tags_held(sql, late.heads)
    for item in new:
        mine = late.tags.setdefault(item.entry.record, set())
        for tag, there in item.tags:
            if not tag:
                mine.clear()
            elif there:
                mine.add(tag)
            else:
                mine.discard(tag)
    return late


def _fits(head: Head, late: _Late, wanted: Wanted) -> bool:
    record = head["record"]
    if not record.startswith(wanted.text) or (head["deleted"] and not wanted.deleted):
        return False
    if not _says(head, wanted):
        return False
    return late.tags.get(record, set()).issuperset(wanted.tags)


def _unnumbered(record: str) -> int:
    return _UNNUMBERED + int.from_bytes(hashlib.sha256(record.encode()).digest()[:7])


def _was_last(row: Head, after: Place | None) -> bool:
    """Whether the row was the last of the previous page, when its record had no number yet."""
    if after is None or isinstance(after, str) or after[1] < _UNNUMBERED:
        return False
    return bool(row["listed_ms"] == after[0]) and _unnumbered(row["record"]) == after[1]


# Cursors


def _cursor(place: str) -> str:
    return urlsafe_b64encode(place.encode()).decode().rstrip("=")


def _place(cursor: str, wanted: Wanted) -> Place:
    try:
        text = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        # Decoding ignores invalid characters, so a cursor is valid only if encoding gives the same text.
        if _cursor(text) == cursor:
            if wanted.by_id and text.startswith(f"{wanted.scope}:") and "\0" not in text:
                return text
            number, _, key = text.partition(":")
            place = int(number), int(key)
            if not wanted.by_id and text == f"{place[0]}:{place[1]}" and 0 <= min(place) <= max(place) < 2**63:
                return place
    except (ValueError, binascii.Error):
        pass
    raise InvalidValue(f"{cursor[:100]!r} is not the cursor of a listing")


# Users, forks and lifetimes


def owned(sql: Sql, user: str) -> list[str]:
    """All records of a user, including deleted ones, and every record forked from them, directly or not."""
    r = records.c
    # Separate statements: SQLite would answer an OR of them by reading the whole namespace.
    found = aside.owned(sql, user)
    for condition in (r.owner == user, r.record == f"user:{user}"):
        found.update(sql.execute(select(r.record).where(r.namespace == sql.namespace, condition)).scalars())
    new = found
    while new:
        new = forks(sql, new).keys() - found
        found |= new
    return sorted(found)


def forks(sql: Sql, sources: Iterable[str]) -> dict[str, int]:
    """The records that were forked from these, or share their messages or items, with their partitions."""
    r = records.c
    found: dict[str, int] = {}
    some = sorted(sources)
    query = select(r.record, r.partition).where(r.namespace == sql.namespace)
    found.update(map(tuple, sql.rows(query, r.parent, some)))
    for table in (shares, layers):
        s = table.c
        query = select(r.record, r.partition).join(table, and_(r.namespace == s.namespace, r.record == s.record))
        found.update(map(tuple, sql.rows(query.where(s.namespace == sql.namespace).distinct(), s.source, some)))
    return found


def forked(sql: Sql, source: str, limit: int) -> list[tuple[str, int | None, int, bool]]:
    """The forks of a record, the newest first: each with the version it was forked from, the time, whether deleted."""
    r = records.c
    query = select(r.record, r.created_ms, r.deleted).where(r.namespace == sql.namespace, r.parent == source)
    found = []
    for record, created_ms, deleted in sql.execute(query.order_by(r.key.desc()).limit(limit)):
        rows = record_history.outlines(sql, record, before=2, limit=1)
        names = {name: value for row in rows for _, name, value in unpack(row.data)}
        version = names.get(PARENT, b"").rpartition(b"@")[2]
        found.append((record, int(version) if version.isdigit() else None, created_ms, deleted))
    return found


def mortal(sql: Sql, partitions: Sequence[int], *, after: str, limit: int) -> list[Mortal]:
    """Records of these partitions with a lifetime, in the order of their texts."""
    r = records.c
    query = select(r.record, r.partition, r.lifetime, r.updated_ms)
    query = query.where(r.namespace == sql.namespace, sql.among(r.partition, partitions), r.lifetime.is_not(None))
    query = query.where(r.record > after, r.deleted.is_(False)).order_by(r.record).limit(limit)
    return [Mortal(*row) for row in sql.execute(query)]


def due(sql: Sql, partition: int, handler: str, *, after: DueRow | None, limit: int) -> list[DueRow]:
    """The sessions of a partition that this handler serves now or later, in the order in which they are due."""
    r = records.c
    query = select(r.record, r.due).where(r.namespace == sql.namespace, r.partition == partition)
    query = query.where(r.due >= f"{handler} ", r.due < f"{handler}!", r.deleted.is_(False))
    if after is not None:
        query = query.where(tuple_(r.due, r.record) > tuple_(literal(after.due), literal(after.record)))
    return [DueRow(*row) for row in sql.execute(query.order_by(r.due, r.record).limit(limit))]


def count_stuck(sql: Sql) -> int:
    """How many sessions are stuck: their handler failed too often to be called again."""
    query = select(func.count()).where(*_stuck(sql), records.c.deleted.is_(False))
    return int(sql.execute(query).scalar_one())


def _few_stuck(sql: Sql, wanted: Wanted, after: Place | None) -> list[Head]:
    """The stuck records of a listing without tags. Its walk would read all records, because few are stuck, or none."""
    rows = sql.execute(select(records).where(*_stuck(sql))).mappings()
    found = [row for row in rows if _fits(row, _Late(), wanted)]
    return _ordered((row for row in found if after is None or _behind(_at(row, wanted), after)), wanted)


def _stuck(sql: Sql) -> list[ColumnElement[bool]]:
    r, c = records.c, cursors.c
    # The index has the partition before the due time, so this is one seek for each partition.
    known = select(c.partition).where(c.namespace == sql.namespace).distinct()
    return [r.namespace == sql.namespace, r.partition.in_(known), r.due >= STUCK, r.due < STUCK + "~"]


# Events


def audit(sql: Sql, sought: Sought) -> list[Happened]:
    """The requested events, oldest first: the newest of them, or the first after a place."""
    found: list[Happened] = []
    for condition in _walks(sql, sought):
        found += _events_page(sql, and_(events.c.namespace == sql.namespace, condition), sought)
    found.sort(key=lambda row: row.place)
    return found[-sought.limit :] if sought.after is None else found[: sought.limit]


def event_by_id(sql: Sql, partition: int, id: str, since_ms: int) -> Happened | None:
    """An event by its id, among a partition's events from a time on; the server's clock may have been set back."""
    e = events.c
    recent = and_(e.namespace == sql.namespace, e.time_ms >= since_ms - _SET_BACK_MS)
    row = sql.execute(select(*_event_columns()).where(recent, e.partition == partition, e.id == id)).first()
    return None if row is None else Happened(*row)


def event_archived(sql: Sql, partition: int, epoch: str, offset: int, id: str) -> bool:
    """Whether this event, which was written without a record, was archived."""
    e = events.c
    place = and_(e.namespace == sql.namespace, e.partition == partition, e.epoch == epoch, e.offset == offset)
    return bool(sql.execute(select(e.id).where(place)).scalar() == id)


def _events_page(sql: Sql, condition: ColumnElement[bool], sought: Sought) -> list[Happened]:
    e = events.c
    since = sought.since_ms if sought.after is None else max(sought.since_ms, sought.after[0])
    query = select(*_event_columns()).where(condition, e.time_ms >= since, e.time_ms < sought.until_ms)
    if sought.after is None:
        query = query.order_by(*(column.desc() for column in _ORDER))
    else:
        query = query.where(tuple_(*_ORDER) > sought.after).order_by(*_ORDER)
    return [Happened(*row) for row in sql.execute(query.limit(sought.limit))]


def _event_columns() -> list[ColumnElement[Any]]:
    e = events.c
    return [e.partition, e.epoch, e.offset, e.id, e.type, e.subject, e.time_ms, e.actor, e.version, e.data]


def _walks(sql: Sql, sought: Sought) -> Iterable[ColumnElement[bool]]:
    """The conditions of the index scans that find the requested events, one for each scan."""
    e = events.c
    about = true() if sought.subject is None else e.subject == sought.subject
    if sought.type is None:
        return [about]
    if "*" not in sought.type:
        return [and_(about, e.type == sought.type)]
    types = _types_like(sql, sought.type)
    if sought.subject is None:
        # Several short scans, merged: a single one over all these types would have to sort them by time.
        return [e.type == each for each in types]
    return [and_(about, sql.among(e.type, types))]


def _types_like(sql: Sql, pattern: str) -> list[str]:
    """The types that match a pattern, by one index lookup for each type with its fixed beginning."""
    e = events.c
    found = list[str]()
    wanted = re.compile(re.escape(pattern).replace(r"\*", ".*"))
    first = pattern.partition("*")[0]
    query = select(func.min(e.type)).where(e.namespace == sql.namespace)
    following = sql.execute(query.where(e.type >= first)).scalar()
    while following is not None and following.startswith(first):
        if wanted.fullmatch(following):
            found.append(following)
        following = sql.execute(query.where(e.type > following)).scalar()
    return found
