"""The rows of `records`: one per record, how it stands at its head, and the number that names it in other tables.

Law: who changes a record locks its row first. The rows of `tags` are the tags of the record's head, in order of its
text. A row follows the entries of the journal; bytes in them that cannot be read are named, never guessed.

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
from distributed_state.errors import CorruptState, NotFound, UnknownStep
from distributed_state.values import message_ranges
from distributed_state.values.journal import KINDS, Happened, JournalEntry, Op, Segment, State, item_of, pack, unpack
from distributed_state.values.model import DELETED, ITEMS, LIFETIME, OWNER, PARENT, PHASE, SEGMENTS, TAG, escape
from distributed_state.values.search import tag_of

LARGEST = 2**63 - 1


class ParsedEvent(NamedTuple):
    """An event as it stands in a journal entry. `offset` is its place among the partition's events."""

    offset: int
    id: str
    type: str
    subject: str
    data: bytes


@dataclass(slots=True)
class Parsed:
    """An entry with its steps, and what of them the tables keep in columns of their own."""

    entry: JournalEntry
    partition: int
    epoch: str
    data: bytes  # the steps as `changes` has them: without what messages and items say, which those tables have
    label: str | None = None
    messages: Sequence[tuple[int, bytes]] = ()
    items: Sequence[tuple[tuple[bytes, bytes], bytes]] = ()  # collection and key, and the frame; empty: deleted
    runs: Sequence[Segment] = ()
    owner: str | None = None
    parent: str | None = None
    parent_version: int = 0
    shows: int | None = None  # the version whose items it shows from now on, below a new layer; 0: none of before
    touched: Collection[bytes] = ()  # which of these fields were set or deleted
    deleted: bool = False
    tags: Sequence[tuple[str, bool]] = ()  # in order, whether it is there then; '': all go
    lifetime: str | None = None
    phase: str | None = None
    events: Sequence[ParsedEvent] = ()

    @property
    def ops(self) -> list[Op]:
        """The steps, read once more: few are asked for, and kept they would be most of what the collector walks."""
        return unpack(self.entry.data)


def parse(entry: JournalEntry, partition: int, epoch: str) -> Parsed:
    """Read an entry. Raises ValueError or CorruptState if no database could hold it as it is.

    Raises UnknownStep if it may well, and only a newer release knows how.
    """
    steps = unpack(entry.data)
    # Before anything that may be wrong with it: what cannot be read is put aside, and this may not be.
    _refuse_unknown(entry, partition, steps)
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
    for op in steps:
        kind, name, value = op
        if kind == b"m":
            messages.append((_number(name, "message"), value))
        elif kind == b"l":
            parsed.label = escape((value or name).decode("utf-8", "surrogatepass"))
        elif kind == b"e":
            events.append(_parsed_event(entry.event, len(events), op))
        elif kind == b"p" or kind == b"q":
            # An empty frame is what stands for a deleted item.
            if (kind == b"p") != bool(value):
                raise ValueError(f"a step {kind.decode()} with {len(value)} bytes")
            items[item_of(name)] = value
        elif kind == b"c":
            tags += [("", False)] if name == TAG else []
        elif name[:2] == TAG:
            tags.append((tag_of(name), kind == b"s"))
        elif name[:1] == b"#":
            _read_reserved(parsed, op)
    # What there is none of is shared: the collector would walk an empty list of each entry.
    parsed.messages, parsed.items, parsed.events = messages or (), tuple(items.items()), events or ()
    parsed.tags = tags or ()
    if messages or items:
        parsed.data = pack((op.kind, op.name, b"" if _is_kept_apart(op, items) else op.value) for op in steps)
    return parsed


def _refuse_unknown(entry: JournalEntry, partition: int, steps: Sequence[Op]) -> None:
    if unknown := {kind for kind, _, _ in steps} - KINDS:
        kind = min(unknown)
        what = f"entry {entry.offset} of partition {partition} has a step {kind!r}, which this release does not know"
        complaint = f"{what}: a newer one wrote it, and has to archive it"
        raise UnknownStep(complaint, partition=partition, offset=entry.offset, kind=kind)


def _is_kept_apart(op: Op, items: Mapping[tuple[bytes, bytes], bytes]) -> bool:
    # Of two steps for one item `items` has the last.
    return op.kind == b"m" or (op.kind == b"p" and items[item_of(op.name)] == op.value)


def happened(entry: JournalEntry, partition: int, epoch: str) -> list[Happened]:
    """The events of an entry as `events` has them, none if it cannot be read."""
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
    """What is in a `#phase` field, escaped as labels are."""
    return escape(value.decode("utf-8", "surrogatepass"))


def parent_record(value: bytes) -> str:
    """The record in a `#parent` field, `<record text>@<version>`."""
    return value.decode().rpartition("@")[0]


def lifetime_text(value: bytes) -> str:
    """What is in a `#lifetime` field, if it can be read."""
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
    """The event in a step of kind `e`. It is called after the commit that it was written with."""
    place, type, subject = op.name.split(b" ", 2)
    offset = _number(place, "event")
    return ParsedEvent(offset, f"{event.rpartition('.')[0]}.{number}", _text(type), _text(subject), op.value)


def subject(data: bytes) -> str:
    """What the first event in these steps is about, "" if that cannot be read."""
    try:
        return unpack(data)[0].name.split(b" ", 2)[2].decode("utf-8", "replace")
    except (CorruptState, IndexError):
        return ""


def _read_reserved(parsed: Parsed, op: Op) -> None:
    value = op.value if op.kind == b"s" else None
    if op.name == SEGMENTS and value is not None:
        parsed.runs = message_ranges.parse(value)
        if any("\0" in run.source or not 0 <= run.start <= run.stop <= LARGEST for run in parsed.runs):
            raise CorruptState("#segments names what cannot be", field="#segments", data=value)
    elif op.name == OWNER:
        parsed.owner = None if value is None else _text(value)
    elif op.name == PARENT:
        parsed.parent = None if value is None else _text(parent_record(value).encode())
        parsed.parent_version = 0 if value is None else _number(value.rpartition(b"@")[2], "version")
    elif op.name == ITEMS and value is not None:
        # Where the record gets its first ones, or is forked, it has no second word; and a repair brings a state whole.
        since, _, below = value.partition(b" ")
        if below and _number(since, "version") == parsed.entry.version:
            parsed.shows = _number(below, "version")
        return
    elif op.name == LIFETIME:
        parsed.lifetime = None if value is None else lifetime_text(value)
    elif op.name == PHASE:
        parsed.phase = None if value is None else phase_text(value)
    elif op.name == DELETED:
        parsed.deleted = value is not None
    else:
        return
    parsed.touched = {*parsed.touched, op.name}


def _text(value: bytes) -> str:
    if b"\0" in value:
        raise ValueError("a NUL in a reserved field or an event")
    return value.decode()


def refuse_long(item: Parsed) -> None:
    """Raise ValueError for a text that is longer than an index holds; whoever wrote it was to be refused."""
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


def _within(column: str, text: str | None) -> None:
    most = LONGEST[column]
    # Most are so short that their bytes need not be counted.
    if text and len(text) * 4 > most and len(text.encode()) > most:
        raise ValueError(f"{column}: {len(text.encode())} bytes are more than the {most} that an index holds")


NOWHERE = -1  # the partition of rows that are about no record
ERASED = "erased"  # the scope of rows that only keep the version of a record of which nothing else is left
_SAID = {OWNER: "owner", PARENT: "parent", LIFETIME: "lifetime", PHASE: "phase", DELETED: "deleted"}
ABOUT = ("owner", "parent", "lifetime", "phase")  # what a row says of what is in its record
LISTED = 10_000  # records of a namespace whose names are listed when a partition starts
LISTED_MS = (
    60_000  # a record that changes moves to the front of listings once in so long: `listed_ms` is behind by less
)
Head = Mapping[Any, Any]
_NAMES = [column.name for column in records.columns]
_COLUMNS = [column for column in records.columns if column is not records.c.key]
_RARE = ("partition", "owner", "deleted", "parent", "lifetime", "phase")
_USUAL = ("epoch", "version", "updated_ms", "listed_ms", "size")  # what else a commit may change


def hashed(namespace: str, record: str) -> str:
    """The text under which the version of an erased record is kept."""
    return "hash:" + hashlib.sha256(f"{namespace}\0{record}".encode()).hexdigest()


def forgotten(namespace: str, user: str) -> str:
    """The text under which it is kept that all of a user was forgotten, and when. No record has such a name."""
    return hashed(namespace, f"forgotten:{user}")


def erased_unknown(namespace: str, record: str) -> str:
    """The name of the row that says when a record was erased that SQL did not know then."""
    return hashed(namespace, f"unknown:{record}")


def erased(sql: Sql, names: Collection[str]) -> dict[str, Head]:
    """What is left of those of these records that were erased, the row with the version up to which it was."""
    stones = {hashed(sql.namespace, name): name for name in names}
    return {stones[stone]: row for stone, row in rows(sql, stones).items()}


def find(sql: Sql, record: str) -> Head | None:
    """The row of a record, or the one that was left when it was erased."""
    names = [record, hashed(sql.namespace, record)]
    query = select(records).where(records.c.namespace == sql.namespace, records.c.record.in_(names))
    rows = {row["record"]: row for row in sql.execute(query).mappings()}
    return rows.get(names[0]) or rows.get(names[1])


def version(sql: Sql, record: str) -> int | None:
    """The archived head version; None if the record was never archived."""
    head = find(sql, record)
    return None if head is None else head["version"]


def rows(sql: Sql, wanted: Iterable[str]) -> dict[str, Head]:
    """Rows as they are, by the texts of their records."""
    return _rows(sql, select(records), wanted)


def lock(sql: Sql, wanted: Iterable[str]) -> dict[str, Head]:
    """Read rows and hold them until the transaction ends, always in the same order."""
    return _rows(sql, select(records).order_by(records.c.record).with_for_update(), wanted)


def _rows(sql: Sql, query: Select[Any], wanted: Iterable[str]) -> dict[str, Head]:
    found = sql.rows(query.where(records.c.namespace == sql.namespace), records.c.record, wanted)
    # Plain dicts: of a batch of many records it is what their rows cost most.
    found = (dict(zip(_NAMES, row, strict=True)) for row in found)
    return {row["record"]: row for row in found}


def following(sql: Sql, after: int, before_ms: int, limit: int) -> tuple[Sequence[Any], int | None]:
    """The next records in order of their numbers that were there before a time, without erased ones.

    And what `after` is for those after them; None: these are the last.
    """
    r = records.c
    # Along the primary key. By an index of the namespace, which this is not, PostgreSQL would sort all for each page.
    mine = and_(r.namespace + "" == sql.namespace, r.key > after, r.created_ms < before_ms, r.scope != ERASED)
    query = select(r.key, r.record, r.version, r.deleted, r.updated_ms).where(mine)
    found = sql.execute(query.order_by(r.key).limit(limit)).all()
    return found, found[-1].key if len(found) == limit else None


def known_names(sql: Sql, partition: int) -> list[str] | None:
    """All records of a partition, those in quarantine too; None if that is a long list, or of an erased one."""
    given = {"wanted_namespace": sql.namespace, "wanted_partition": partition, "listed": LISTED}
    found = sql.execute(_known_names(), given).all()
    # Of one that was erased there is only a hash, and its versions go on if it begins again.
    if any(not record or scope == ERASED for record, scope in found):
        return None
    return sorted({record for record, _ in found})


@cache
def _known_names() -> CompoundSelect[Any]:
    """Made once, as each partition that starts waits for it. A row without a name says that there are too many."""
    q, r = quarantine.c, records.c
    namespace = bindparam("wanted_namespace", type_=TEXT)
    partition = bindparam("wanted_partition", type_=Integer)
    # A look at the index, whatever it holds. Rows of one partition are found only by looking at all of them.
    many = select(r.key).where(r.namespace == namespace).offset(bindparam("listed", type_=Integer)).limit(1).exists()
    listed = select(r.record, r.scope).where(r.namespace == namespace, r.partition == partition, ~many)
    # What is in quarantine may be in Redis, and get a row by its next commit.
    aside = select(q.record, literal("")).where(q.namespace == namespace, q.partition == partition)
    return union_all(listed, aside, select(literal(""), literal("")).where(many))


def keys(sql: Sql, names: Iterable[str]) -> dict[str, int]:
    """The numbers of those of these records that have rows."""
    r = records.c
    query = select(r.record, r.key).where(r.namespace == sql.namespace)
    return dict(map(tuple, sql.rows(query, r.record, names)))


def key_of(sql: Sql, record: str) -> ScalarSelect[int]:
    """The number of a record, for use in a statement: it is looked up once, before any row is."""
    return (
        select(records.c.key).where(records.c.namespace == sql.namespace, records.c.record == record).scalar_subquery()
    )


def oldest(sql: Sql, record: str) -> int:
    """The first version that can still be read."""
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
    """How the records that these entries changed stand then, one row each however many the changes."""
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
    # Where the indexes change all the same it costs nothing.
    turned = DELETED in item.touched and item.deleted != head["deleted"]  # who revives says so with each write
    if at - head.get("listed_ms", -LISTED_MS) >= LISTED_MS or turned:
        head["listed_ms"] = at
    for field, column in _SAID.items():
        if field in item.touched:
            head[column] = getattr(item, column)


def about(state: State | None) -> dict[str, Any]:
    """The columns of a row that follow from a record's state."""
    fields = state.fields.items() if state else ()
    said = parse(JournalEntry(0, "", "", 0, 0, "", "", 0, pack((b"s", *each) for each in fields), 0), 0, "")
    return {name: getattr(said, name) for name in _SAID.values()}


def put(sql: Sql, rows: Iterable[Mapping[str, Any]], before: Mapping[str, Head] = MappingProxyType({})) -> None:
    """Insert rows that have no key, and write over those of the others what a commit may change.

    `before` are rows as they stand: most commits change a part of their columns only.
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


# The tags by which records are found


def note_tags(sql: Sql, accepted: Iterable[Parsed]) -> None:
    """Follow what these entries do to the tags of their records, whose rows are locked."""
    last: dict[tuple[str, str], bool] = {}
    cleared: set[str] = set()
    for item in accepted:
        record = item.entry.record
        for tag, there in item.tags:
            if tag:
                last[record, tag] = there
            else:
                cleared.add(record)
                last = {place: there for place, there in last.items() if place[0] != record}
    t = tags.c
    gone = [{"r": record} for record in sorted(cleared)]
    sql.remove(tags, gone, lambda row: and_(t.namespace == sql.namespace, t.record == row.r))
    # Those that are set, too: whether they were there before nobody has asked.
    touched = [{"r": record, "g": tag} for record, tag in sorted(last)]
    sql.remove(tags, touched, lambda row: and_(t.namespace == sql.namespace, t.tag == row.g, t.record == row.r))
    kept = sorted((tag, record) for (record, tag), there in last.items() if there)
    sql.add(tags, [(sql.namespace, *place) for place in kept])


def replace_tags(sql: Sql, record: str, fields: Mapping[bytes, bytes]) -> None:
    """Let the record have the tags of this state, and no others."""
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
