"""The rows of `records`: one per record, with its state at the head and the key by which other tables name it.

Law: a transaction that changes a record locks its row first. The rows of `tags` are the tags at the record's head, in
the order of its text. A row is computed from the entries of the journal; unreadable bytes raise an error that names
them.

Design: section 9.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from sqlalchemy import (
    CompoundSelect,
    Integer,
    ScalarSelect,
    Select,
    and_,
    bindparam,
    delete,
    func,
    literal,
    select,
    union_all,
)

from distributed_state.cold.engine import Row, Sql
from distributed_state.cold.tables import LONGEST, TEXT, change_blocks, changes, quarantine, records, snapshots, tags
from distributed_state.errors import CorruptState, NotFound, UnknownOperation
from distributed_state.values import message_ranges
from distributed_state.values.journal import KINDS, Happened, JournalEntry, Op, Segment, State, item_of, pack, unpack
from distributed_state.values.model import (
    DELETED,
    ITEMS,
    LIFETIME,
    OWNER,
    PARENT,
    PHASE,
    SCHEDULE,
    SEGMENTS,
    TAG,
    USAGE,
    Expiry,
    escape,
)
from distributed_state.values.schedule import Schedule
from distributed_state.values.search import tag_of
from distributed_state.values.usage import Counted, Tokens

LARGEST = 2**63 - 1


class ParsedEvent(NamedTuple):
    """An event in a journal entry. `offset` is its number among the partition's events."""

    offset: int
    id: str
    type: str
    subject: str
    data: bytes


@dataclass(slots=True)
class Parsed:
    """An entry with its operations, and the values that the tables have in columns of their own."""

    entry: JournalEntry
    partition: int
    epoch: str
    data: bytes  # the operations as in `changes`: messages and items are without contents, which their tables have
    label: str | None = None
    messages: Sequence[tuple[int, bytes]] = ()
    items: Sequence[tuple[tuple[bytes, bytes], bytes]] = ()  # collection and key, and the frame; empty: deleted
    runs: Sequence[Segment] = ()
    owner: str | None = None
    parent: str | None = None
    parent_version: int = 0
    shows: int | None = None  # the version whose items it shows from now on, below a new layer; 0: no earlier items
    touched: Collection[bytes] = ()  # which of the reserved fields were set or deleted
    deleted: bool = False
    tags: Sequence[tuple[str, bool]] = ()  # in order: set or removed; '': all are removed
    lifetime: str | None = None
    phase: str | None = None
    due: str | None = None
    usage: Sequence[tuple[str, Tokens]] = ()  # of a turn: the tokens that it used, by model
    events: Sequence[ParsedEvent] = ()

    @property
    def ops(self) -> list[Op]:
        """The operations, parsed again: few callers need them, and stored ones would slow the garbage collector."""
        return unpack(self.entry.data)


def parse(entry: JournalEntry, partition: int, epoch: str) -> Parsed:
    """Read an entry. Raises ValueError or CorruptState if no database could store it.

    Raises UnknownOperation if only a newer release can read it.
    """
    operations = unpack(entry.data)
    # Checked first: unreadable entries go to quarantine, but an entry of a newer release must not.
    _refuse_unknown(entry, partition, operations)
    "".join((entry.record, entry.event, entry.kind, entry.actor)).encode()
    if "\0" in entry.record or "\0" in entry.event or "\0" in entry.kind or "\0" in entry.actor:
        raise ValueError("a NUL in its record, event, kind or actor")
    numbers = (entry.version, entry.time_ms, entry.token, entry.offset)
    if min(numbers) < 0 or max(numbers) > LARGEST:
        raise ValueError("a number outside of 0 .. 2**63 - 1")
    parsed = Parsed(entry, partition, epoch, entry.data)
    messages: list[tuple[int, bytes]] = []
    items: dict[tuple[bytes, bytes], bytes] = {}
    events: list[ParsedEvent] = []
    tags: list[tuple[str, bool]] = []
    for op in operations:
        kind, name, value = op
        if kind == b"m":
            messages.append((_number(name, "message"), value))
        elif kind == b"l":
            parsed.label = escape((value or name).decode("utf-8", "surrogatepass"))
        elif kind == b"e":
            events.append(_parsed_event(entry.event, len(events), op))
        elif kind == b"p" or kind == b"q":
            # An empty frame means a deleted item.
            if (kind == b"p") != bool(value):
                raise ValueError(f"an operation {kind.decode()} with {len(value)} bytes")
            items[item_of(name)] = value
        elif kind == b"c":
            if name == TAG:
                tags.append(("", False))
                parsed.due, parsed.touched = None, {*parsed.touched, SCHEDULE}
        elif name[:2] == TAG:
            tags.append((tag_of(name), kind == b"s"))
        elif name[:1] == b"#":
            _read_reserved(parsed, op)
    # Empty values are shared: the garbage collector would walk an empty list for each entry.
    parsed.messages, parsed.items, parsed.events = messages or (), tuple(items.items()), events or ()
    parsed.tags = tags or ()
    if messages or items:
        parsed.data = pack((op.kind, op.name, b"" if _is_kept_apart(op, items) else op.value) for op in operations)
    return parsed


def _refuse_unknown(entry: JournalEntry, partition: int, operations: Sequence[Op]) -> None:
    if unknown := {kind for kind, _, _ in operations} - KINDS:
        kind = min(unknown)
        what = (
            f"entry {entry.offset} of partition {partition} has an operation {kind!r}, which this release does not know"
        )
        complaint = f"{what}: a newer one wrote it, and has to archive it"
        raise UnknownOperation(complaint, partition=partition, offset=entry.offset, kind=kind)


def _is_kept_apart(op: Op, items: Mapping[tuple[bytes, bytes], bytes]) -> bool:
    # If an item has two operations, `items` has the last one.
    return op.kind == b"m" or (op.kind == b"p" and items[item_of(op.name)] == op.value)


def happened(entry: JournalEntry, partition: int, epoch: str) -> list[Happened]:
    """The events of an entry as they are in `events`; an empty list if it cannot be read."""
    try:
        found = parse(entry, partition, epoch).events
    except (ValueError, CorruptState):
        return []
    e = entry
    place = (partition, epoch)
    return [
        Happened(*place, each.offset, each.id, each.type, each.subject, e.time_ms, e.actor, e.version, each.data)
        for each in found
    ]


def phase_text(value: bytes) -> str:
    """The content of a `#phase` field, escaped as labels are."""
    return escape(value.decode("utf-8", "surrogatepass"))


def parent_record(value: bytes) -> str:
    """The record in a `#parent` field, `<record text>@<version>`."""
    return value.decode().rpartition("@")[0]


def lifetime_text(value: bytes) -> str:
    """The content of a `#lifetime` field. Raises ValueError if it cannot be read."""
    idle_ms, _, until_ms = value.partition(b" ")
    if not 0 <= int(idle_ms) <= LARGEST or not 0 <= int(until_ms) <= LARGEST:
        raise ValueError("a lifetime outside of 0 .. 2**63 - 1")
    return value.decode()


def _number(text: bytes, what: str) -> int:
    number = int(text)
    if not 0 <= number <= LARGEST:
        raise ValueError(f"{what} number {number}")
    return number


def _parsed_event(event: str, number: int, op: Op) -> ParsedEvent:
    """The event of an operation of kind `e`. Its id is derived from its commit's."""
    place, type, subject = op.name.split(b" ", 2)
    offset = _number(place, "event")
    return ParsedEvent(offset, f"{event.rpartition('.')[0]}.{number}", _text(type), _text(subject), op.value)


def subject(data: bytes) -> str:
    """The subject of the first event in these operations, "" if it cannot be read."""
    try:
        return unpack(data)[0].name.split(b" ", 2)[2].decode("utf-8", "replace")
    except (CorruptState, IndexError):
        return ""


def _read_reserved(parsed: Parsed, op: Op) -> None:
    value = op.value if op.kind == b"s" else None
    if op.name == SEGMENTS and value is not None:
        parsed.runs = message_ranges.parse(value)
        if any("\0" in run.source or not 0 <= run.start <= run.stop <= LARGEST for run in parsed.runs):
            raise CorruptState("#segments names impossible ranges", field="#segments", data=value)
    elif op.name == OWNER:
        parsed.owner = None if value is None else _text(value)
    elif op.name == PARENT:
        parsed.parent = None if value is None else _text(parent_record(value).encode())
        parsed.parent_version = 0 if value is None else _number(value.rpartition(b"@")[2], "version")
    elif op.name == ITEMS and value is not None:
        # The second word is missing if the record gets its first items, is forked, or a repair brings a whole state.
        since, _, below = value.partition(b" ")
        if below and _number(since, "version") == parsed.entry.version:
            parsed.shows = _number(below, "version")
        return
    elif op.name == LIFETIME:
        if value is not None or not parsed.deleted:
            parsed.lifetime = None if value is None else lifetime_text(value)
    elif op.name == SCHEDULE:
        parsed.due = None if value is None else Schedule.read(value).column
    elif op.name == PHASE:
        parsed.phase = None if value is None else phase_text(value)
    elif op.name[:2] == USAGE:
        # A repair that brings a whole state has the field, too, and its tokens were counted before.
        if parsed.entry.kind == "turn" and value is not None:
            parsed.usage = (*parsed.usage, (_text(op.name[2:]), Counted.read(value).share))
        return
    elif op.name == DELETED:
        parsed.deleted = value is not None
        if Expiry.read(value):
            # The row of a session that expired says so in the column of its lifetime: a purge leaves only the row.
            parsed.lifetime = _text(value or b"")
            parsed.touched = {*parsed.touched, LIFETIME}
    else:
        return
    parsed.touched = {*parsed.touched, op.name}


def _text(value: bytes) -> str:
    if b"\0" in value:
        raise ValueError("a NUL in a reserved field or an event")
    return value.decode()


def refuse_long(item: Parsed) -> None:
    """Raise ValueError for a text that is too long for an index; the API should have refused it."""
    _within("record", item.entry.record)
    _within("event", item.entry.event)
    _within("owner", item.owner)
    _within("parent", item.parent)
    _within("phase", item.phase)
    for event in item.events:
        _within("type", event.type)
        _within("subject", event.subject)
    for run in item.runs:
        _within("source", run.source)
    for model, _ in item.usage:
        _within("model", model)


def _within(column: str, text: str | None) -> None:
    most = LONGEST[column]
    # Most texts are short enough that their bytes need not be counted.
    if text and len(text) * 4 > most and len(text.encode()) > most:
        raise ValueError(f"{column}: {len(text.encode())} bytes are more than the {most} that an index holds")


NOWHERE = -1  # the partition of rows that belong to no record
ERASED = "erased"  # the scope of rows that only keep the version of an erased record
_SAID = {OWNER: "owner", PARENT: "parent", LIFETIME: "lifetime", PHASE: "phase", DELETED: "deleted", SCHEDULE: "due"}
ABOUT = ("owner", "parent", "lifetime", "phase", "due")  # columns that come from a record's fields
LISTED = 10_000  # records of a namespace whose names are still listed when a partition starts
LISTED_MS = 60_000  # a record moves to the front of listings at most this often: `listed_ms` lags by less
Head = Mapping[Any, Any]
_NAMES = [column.name for column in records.columns]
_COLUMNS = [column for column in records.columns if column is not records.c.key]
_RARE = ("partition", "owner", "deleted", "parent", "lifetime", "phase", "due")
_USUAL = ("epoch", "version", "updated_ms", "listed_ms", "size")  # columns that most commits change


def hashed(namespace: str, record: str) -> str:
    """The text under which the version of an erased record is stored."""
    return "hash:" + hashlib.sha256(f"{namespace}\0{record}".encode()).hexdigest()


def forgotten(namespace: str, user: str) -> str:
    """The text under which the time is stored when a user was forgotten. No record has such a name."""
    return hashed(namespace, f"forgotten:{user}")


def erased_unknown(namespace: str, record: str) -> str:
    """The text under which the erasure time is stored of a record that SQL did not have at that time."""
    return hashed(namespace, f"unknown:{record}")


def erased(sql: Sql, names: Collection[str]) -> dict[str, Head]:
    """The rows, with the erased version, that remain of erased records among these."""
    stones = {hashed(sql.namespace, name): name for name in names}
    return {stones[stone]: row for stone, row in rows(sql, stones).items()}


def find(sql: Sql, record: str) -> Head | None:
    """The row of a record, or the one that remains after its erasure."""
    names = [record, hashed(sql.namespace, record)]
    query = select(records).where(records.c.namespace == sql.namespace, records.c.record.in_(names))
    rows = {row["record"]: row for row in sql.execute(query).mappings()}
    return rows.get(names[0]) or rows.get(names[1])


def version(sql: Sql, record: str) -> int | None:
    """The archived head version; None if the record was never archived."""
    head = find(sql, record)
    return None if head is None else head["version"]


def rows(sql: Sql, wanted: Iterable[str]) -> dict[str, Head]:
    """The rows of these records, by their texts."""
    return _rows(sql, select(records), wanted)


def lock(sql: Sql, wanted: Iterable[str]) -> dict[str, Head]:
    """Read rows and lock them until the transaction ends, always in the same order."""
    return _rows(sql, select(records).order_by(records.c.record).with_for_update(), wanted)


def _rows(sql: Sql, query: Select[Any], wanted: Iterable[str]) -> dict[str, Head]:
    found = sql.rows(query.where(records.c.namespace == sql.namespace), records.c.record, wanted)
    # Plain dicts, because for a batch of many records SQLAlchemy's rows would be the largest cost.
    found = (dict(zip(_NAMES, row, strict=True)) for row in found)
    return {row["record"]: row for row in found}


def following(sql: Sql, after: int, before_ms: int, limit: int) -> tuple[Sequence[Any], int | None]:
    """The next records in the order of their keys that existed before a time, without erased ones.

    Also returns `after` for the next call (None: these are the last).
    """
    r = records.c
    # Along the primary key: with the namespace's index, which `+ ""` avoids, PostgreSQL would sort all for each page.
    mine = and_(r.namespace + "" == sql.namespace, r.key > after, r.created_ms < before_ms, r.scope != ERASED)
    query = select(r.key, r.record, r.version, r.deleted, r.updated_ms).where(mine)
    found = sql.execute(query.order_by(r.key).limit(limit)).all()
    return found, found[-1].key if len(found) == limit else None


def known_names(sql: Sql, partition: int) -> list[str] | None:
    """All records of a partition, including quarantined ones; None if there are too many, or one was erased."""
    given = {"wanted_namespace": sql.namespace, "wanted_partition": partition, "listed": LISTED}
    found = sql.execute(_known_names(), given).all()
    # An erased record has only a hash, and its versions continue if it begins again.
    if any(not record or scope == ERASED for record, scope in found):
        return None
    return sorted({record for record, _ in found})


@cache
def _known_names() -> CompoundSelect[Any]:
    """Built once, as each partition waits for it when it starts. A row without a name means that there are too many."""
    q, r = quarantine.c, records.c
    namespace = bindparam("wanted_namespace", type_=TEXT)
    partition = bindparam("wanted_partition", type_=Integer)
    # One lookup in the index, independent of the number of records. Counting those of one partition would scan all.
    many = select(r.key).where(r.namespace == namespace).offset(bindparam("listed", type_=Integer)).limit(1).exists()
    listed = select(r.record, r.scope).where(r.namespace == namespace, r.partition == partition, ~many)
    # A quarantined record may be in Redis, and get a row with its next commit.
    aside = select(q.record, literal("")).where(q.namespace == namespace, q.partition == partition)
    return union_all(listed, aside, select(literal(""), literal("")).where(many))


def keys(sql: Sql, names: Iterable[str]) -> dict[str, int]:
    """The keys of the records that have rows."""
    r = records.c
    query = select(r.record, r.key).where(r.namespace == sql.namespace)
    return dict(map(tuple, sql.rows(query, r.record, names)))


def key_of(sql: Sql, record: str) -> ScalarSelect[int]:
    """The key of a record, for use in a statement: it is looked up once, before all rows."""
    return (
        select(records.c.key).where(records.c.namespace == sql.namespace, records.c.record == record).scalar_subquery()
    )


def oldest(sql: Sql, record: str) -> int:
    """The first version that is still readable."""
    versions = (changes.c.version, snapshots.c.version, change_blocks.c.first)
    key = key_of(sql, record)
    first = [select(func.min(version)).where(version.table.c.record == key) for version in versions]
    found = sql.execute(select(*(query.scalar_subquery() for query in first))).one()
    known = [version for version in found if version is not None]
    if known:
        return int(min(known))
    head = find(sql, record)
    if head is None:
        raise NotFound(f"{record} is not in the archive")
    return int(head["version"])


def heads(sql: Sql, changes: Iterable[Parsed], existing: Mapping[str, Head]) -> dict[str, dict[str, Any]]:
    """The rows of records as they are after these entries, one row for each record."""
    found: dict[str, dict[str, Any]] = {}
    for item in changes:
        record = item.entry.record
        head = found.get(record)
        if head is None:
            head = found[record] = dict(existing[record]) if record in existing else _new(sql, item)
        _follow(head, item)
    return found


def _new(sql: Sql, item: Parsed) -> dict[str, Any]:
    record = item.entry.record
    head: dict[str, Any] = {"namespace": sql.namespace, "record": record, "scope": record.partition(":")[0]}
    head |= {"created_ms": item.entry.time_ms, "deleted": False, "size": None}
    return head | dict.fromkeys(ABOUT)


def _follow(head: dict[str, Any], item: Parsed) -> None:
    at = item.entry.time_ms
    head.update(partition=item.partition, epoch=item.epoch, version=item.entry.version, updated_ms=at)
    head["size"] = (head["size"] or 0) + len(item.entry.data)
    # `deleted` changes the indexes in any case, so moving the record to the front has no extra cost.
    turned = DELETED in item.touched and item.deleted != head["deleted"]  # `revive` sets it in each write
    if at - head.get("listed_ms", -LISTED_MS) >= LISTED_MS or turned:
        head["listed_ms"] = at
    if turned and not item.deleted:
        head["lifetime"] = None  # why it expired
    for field, column in _SAID.items():
        if field in item.touched:
            head[column] = getattr(item, column)


def about(state: State | None) -> dict[str, Any]:
    """The columns of a row that come from a record's state."""
    fields = state.fields.items() if state else ()
    said = parse(JournalEntry(0, "", "", 0, 0, "", "", 0, pack((b"s", *each) for each in fields), 0), 0, "")
    return {name: getattr(said, name) for name in _SAID.values()}


def put(sql: Sql, rows: Iterable[Mapping[str, Any]], before: Mapping[str, Head] = MappingProxyType({})) -> None:
    """Insert rows without a key, and update in the others the columns that a commit may change.

    `before` are the present rows: most commits change only some of the columns.
    """
    new: list[Row] = []
    usual: list[Row] = []
    every: list[Row] = []
    for row in rows:
        if "key" in row:
            was = before.get(row["record"])
            if was is not None and _rare(was) == _rare(row):
                usual.append(_usual(row))
            else:
                every.append(_every(row))
        else:
            new.append(tuple(row[column.name] for column in _COLUMNS))
    sql.change(records, records.c.key, [records.c[name] for name in _USUAL], usual)
    sql.change(records, records.c.key, [records.c[name] for name in (*_USUAL, *_RARE)], every)
    sql.add(records, new, _COLUMNS)


_rare = itemgetter(*_RARE)
_usual = itemgetter("key", *_USUAL)
_every = itemgetter("key", *_USUAL, *_RARE)


def remove(sql: Sql, some: Sequence[int]) -> None:
    """Delete rows."""
    if some:
        sql.execute(delete(records).where(sql.among(records.c.key, some)))


# Tags


def note_tags(sql: Sql, accepted: Iterable[Parsed]) -> None:
    """Apply the tag changes of these entries. The rows of their records are locked."""
    last: dict[str, dict[str, bool]] = {}
    cleared: set[str] = set()
    for item in accepted:
        record = item.entry.record
        for tag, there in item.tags:
            if tag:
                last.setdefault(record, {})[tag] = there
            else:
                cleared.add(record)
                last.pop(record, None)
    t = tags.c
    gone = [{"r": record} for record in sorted(cleared)]
    sql.remove(tags, gone, lambda row: and_(t.namespace == sql.namespace, t.record == row.r))
    # Tags to set are also removed first, because they may exist already.
    touched = [{"r": record, "g": tag} for record in sorted(last.keys() - cleared) for tag in sorted(last[record])]
    sql.remove(tags, touched, lambda row: and_(t.namespace == sql.namespace, t.tag == row.g, t.record == row.r))
    kept = sorted((tag, record) for record, changed in last.items() for tag, there in changed.items() if there)
    sql.add(tags, [(sql.namespace, *place) for place in kept])


def replace_tags(sql: Sql, record: str, fields: Mapping[bytes, bytes]) -> None:
    """Give the record exactly the tags of this state."""
    sql.execute(delete(tags).where(tags.c.namespace == sql.namespace, tags.c.record == record))
    found = sorted(tag_of(name) for name in fields if name[: len(TAG)] == TAG)
    sql.add(tags, [(sql.namespace, tag, record) for tag in found])


def tags_held(sql: Sql, names: Iterable[str]) -> dict[str, set[str]]:
    """The tags of these records."""
    found: dict[str, set[str]] = {}
    query = select(tags.c.record, tags.c.tag).where(tags.c.namespace == sql.namespace)
    for record, tag in sql.rows(query, tags.c.record, names):
        found.setdefault(record, set()).add(tag)
    return found
