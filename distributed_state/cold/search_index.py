"""The search index: its tables, the records that have unindexed changes, and their documents.

Law: one transaction moves a record's index from one version to a later one, and deletes the notes that it was due.

Triggers note changes in the transaction that makes them. So any change of a record - by the archiver, an import, a
repair or an erasure, of any release - is noted, and that code needs no knowledge of the index. A trigger does bounded
work: a row for each record, and the removal of erased documents.

A claim on a partition is a token in its row, valid for a while. A writer has a claim and locks its row while it writes.
So a worker whose claim was taken over writes nothing, and a worker with a claim notices if a record was erased or
encrypted again meanwhile. One transaction writes documents and the record's indexed version, and deletes its notes. The
record is read before that, without locks.

Design: section 21.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    and_,
    cast,
    column,
    delete,
    distinct,
    func,
    insert,
    literal,
    null,
    select,
    table,
    tuple_,
    update,
)
from sqlalchemy import inspect as inspect_database
from sqlalchemy.types import UserDefinedType

from distributed_state.cold import record_history, record_index, record_items
from distributed_state.cold.engine import Row, Sql
from distributed_state.cold.record_items import Layer
from distributed_state.cold.tables import SERIAL, TEXT, items, records
from distributed_state.values import message_ranges
from distributed_state.values.journal import Op, Segment, item_of, unpack
from distributed_state.values.model import DELETED, NEXT, OWNER, PARENT, REPAIR, SEGMENTS, START

# Tables and triggers, made when search is switched on

metadata = MetaData()

indexes = Table(
    "search_indexes",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("settings", TEXT, nullable=False),
    Column("filled", Boolean, nullable=False),
)

# A worker that writes the index of a partition locks its row, so that only an erasure waits for it.
partitions = Table(
    "search_partitions",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("partition", Integer, primary_key=True, autoincrement=False),
    Column("claim", TEXT, nullable=False),
    Column("until_ms", BigInteger, nullable=False),
)

# Records with unindexed changes; several rows of one record mean the same as one. `gone`: the text of an erased record,
# for a user's own index.
due = Table(
    "search_due",
    metadata,
    Column("id", SERIAL, primary_key=True, autoincrement=True),
    Column("namespace", TEXT, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("record", BigInteger, nullable=False),
    Column("gone", TEXT, nullable=True),
    sqlite_autoincrement=True,
)
Index("search_due_partitions", due.c.namespace, due.c.partition, due.c.id)
Index("search_due_records", due.c.record)

# The version of each record that is in the index. An empty epoch means none, as its stored data was encrypted again.
# The version then changes each time, so that a worker that read the record earlier cannot write it.
heads = Table(
    "search_heads",
    metadata,
    Column("record", BigInteger, primary_key=True, autoincrement=False),
    Column("epoch", TEXT, nullable=False),
    Column("version", BigInteger, nullable=False),
)

documents = Table(
    "search_documents",
    metadata,
    Column("id", SERIAL, primary_key=True, autoincrement=True),
    Column("record", BigInteger, nullable=False),
    Column("kind", TEXT, nullable=False),
    Column("collection", LargeBinary, nullable=False),
    Column("name", LargeBinary, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("ends_ms", BigInteger, nullable=True),
    Column("digest", LargeBinary, nullable=False),
    Column("text", Text, nullable=False),
    Column("value", LargeBinary, nullable=False),
    sqlite_autoincrement=True,
)
_NAME = (documents.c.record, documents.c.kind, documents.c.collection, documents.c.name)
Index("search_documents_named", *_NAME, unique=True)

_CHANGED = ("changes", "messages", "items", "change_blocks", "message_blocks")  # tables that re-encryption updates

_SQLITE_NOTE = (
    "INSERT INTO search_due (namespace, partition, record) SELECT r.namespace, r.partition, r.key "
    "FROM records r JOIN search_indexes i ON i.namespace = r.namespace WHERE r.key = NEW.record{0};"
)
_SQLITE = (
    "CREATE VIRTUAL TABLE search_words USING fts5(text, content='search_documents', content_rowid='id', "
    "tokenize='unicode61 remove_diacritics 2')",
    "CREATE TRIGGER search_put AFTER INSERT ON search_documents BEGIN "
    "INSERT INTO search_words (rowid, text) VALUES (NEW.id, NEW.text); END",
    "CREATE TRIGGER search_removed AFTER DELETE ON search_documents BEGIN "
    "INSERT INTO search_words (search_words, rowid, text) VALUES ('delete', OLD.id, OLD.text); END",
    "CREATE TRIGGER search_changed AFTER INSERT ON changes BEGIN " + _SQLITE_NOTE.format("") + " END",
    "CREATE TRIGGER search_imported AFTER INSERT ON snapshots BEGIN "
    + _SQLITE_NOTE.format(" AND NOT EXISTS (SELECT 1 FROM search_heads h WHERE h.record = r.key)")
    + " END",
    "CREATE TRIGGER search_erased AFTER DELETE ON records "
    "WHEN OLD.scope <> 'erased' AND EXISTS (SELECT 1 FROM search_indexes i WHERE i.namespace = OLD.namespace) BEGIN "
    "DELETE FROM search_documents WHERE record = OLD.key; DELETE FROM search_heads WHERE record = OLD.key; "
    "INSERT INTO search_due (namespace, partition, record, gone) "
    "VALUES (OLD.namespace, OLD.partition, OLD.key, OLD.record); END",
)
_SQLITE_CHANGED = (
    "CREATE TRIGGER search_rewritten_{0} AFTER UPDATE ON {0} BEGIN "
    "DELETE FROM search_documents WHERE record = NEW.record; "
    "INSERT INTO search_heads (record, epoch, version) SELECT r.key, '', 1 FROM records r "
    "JOIN search_indexes i ON i.namespace = r.namespace WHERE r.key = NEW.record ON CONFLICT (record) "
    "DO UPDATE SET epoch = '', version = CASE epoch WHEN '' THEN version + 1 ELSE 1 END; "
    + _SQLITE_NOTE.format(" AND NOT EXISTS (SELECT 1 FROM search_due d WHERE d.record = r.key)")
    + " END"
)

# SECURITY DEFINER: an archiver needs no rights on the tables of search; a missing right would stop it.
_FUNCTION = (
    "CREATE FUNCTION {0}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT "
    "AS $$ BEGIN {1} RETURN NULL; END $$"
)
_NOTE = (
    "INSERT INTO search_due (namespace, partition, record) SELECT DISTINCT r.namespace, r.partition, r.key "
    "FROM new_rows n JOIN records r ON r.key = n.record JOIN search_indexes i ON i.namespace = r.namespace{}; "
)
_UNKNOWN = " WHERE NOT EXISTS (SELECT 1 FROM search_heads h WHERE h.record = n.record)"
# A transaction that rewrites a record row by row notes it once.
_NOTE_REWRITTEN = (
    "WITH rewritten AS (INSERT INTO search_heads AS h (record, epoch, version) "
    "SELECT DISTINCT r.key, '', txid_current() FROM new_rows n JOIN records r ON r.key = n.record "
    "JOIN search_indexes i ON i.namespace = r.namespace "
    "ON CONFLICT (record) DO UPDATE SET epoch = '', version = excluded.version "
    "WHERE h.epoch <> '' OR h.version <> excluded.version RETURNING h.record) "
    "INSERT INTO search_due (namespace, partition, record) SELECT r.namespace, r.partition, r.key "
    "FROM rewritten w JOIN records r ON r.key = w.record; "
)
# Wait for workers that are writing the index now, so that their rows are visible here and are removed, too.
_WAIT = (
    "PERFORM 1 FROM search_partitions p WHERE (p.namespace, p.partition) IN (SELECT r.namespace, r.partition FROM {0}) "
    "ORDER BY p.partition FOR UPDATE; "
)
_REMOVE = "DELETE FROM search_{1} WHERE record IN (SELECT {0}); "
_POSTGRESQL = (
    "ALTER TABLE search_documents ADD COLUMN words tsvector",
    "CREATE INDEX search_documents_words ON search_documents USING gin (words)",
    _FUNCTION.format("search_note_changes", _NOTE.format("")),
    "CREATE TRIGGER search_changed AFTER INSERT ON changes REFERENCING NEW TABLE AS new_rows "
    "FOR EACH STATEMENT EXECUTE FUNCTION search_note_changes()",
    _FUNCTION.format(
        "search_note_erased",
        _WAIT.format("old_rows r")
        + _REMOVE.format("key FROM old_rows", "documents")
        + _REMOVE.format("key FROM old_rows", "heads")
        + "INSERT INTO search_due (namespace, partition, record, gone) SELECT r.namespace, r.partition, r.key, "
        "r.record FROM old_rows r JOIN search_indexes i ON i.namespace = r.namespace WHERE r.scope <> 'erased';",
    ),
    "CREATE TRIGGER search_erased AFTER DELETE ON records REFERENCING OLD TABLE AS old_rows "
    "FOR EACH STATEMENT EXECUTE FUNCTION search_note_erased()",
    _FUNCTION.format(
        "search_note_rewritten",
        _WAIT.format("new_rows n JOIN records r ON r.key = n.record")
        + _REMOVE.format("record FROM new_rows", "documents")
        + _NOTE_REWRITTEN,
    ),
    # An imported record whose history was purged has only a snapshot.
    _FUNCTION.format("search_note_imported", _NOTE.format(_UNKNOWN)),
    "CREATE TRIGGER search_imported AFTER INSERT ON snapshots REFERENCING NEW TABLE AS new_rows "
    "FOR EACH STATEMENT EXECUTE FUNCTION search_note_imported()",
)
_POSTGRESQL_CHANGED = (
    "CREATE TRIGGER search_rewritten_{0} AFTER UPDATE ON {0} REFERENCING NEW TABLE AS new_rows "
    "FOR EACH STATEMENT EXECUTE FUNCTION search_note_rewritten()"
)
# Vectors of any number of dimensions; each index covers one number of them.
VECTORS = (
    "CREATE TABLE IF NOT EXISTS search_vectors (document bigint PRIMARY KEY REFERENCES search_documents (id) "
    "ON DELETE CASCADE, embedding vector NOT NULL)"
)
VECTOR_INDEX = (
    "CREATE INDEX IF NOT EXISTS search_vectors_{0} ON search_vectors USING hnsw "
    "((embedding::vector({0})) vector_cosine_ops) WHERE vector_dims(embedding) = {0}"
)


def there(sql: Sql) -> bool:
    """Whether the tables of search exist in this database."""
    return inspect_database(sql.connection).has_table(indexes.name)


def found(sql: Sql) -> tuple[str, bool] | None:
    """The settings of the index in this namespace, and whether all records were noted since."""
    if not there(sql):
        return None
    i = indexes.c
    row = sql.execute(select(i.settings, i.filled).where(i.namespace == sql.namespace)).first()
    return (row[0], row[1]) if row else None


def settings(sql: Sql) -> str | None:
    """The settings of the index in this namespace; None if it is off, or was not switched on to the end."""
    there_ = found(sql)
    return there_[0] if there_ and there_[1] else None


def lock(sql: Sql, mode: str) -> None:
    """Wait for all transactions that change what the triggers note, and block new ones until this one ends."""
    if sql.postgresql:
        sql.exec_driver_sql(f"LOCK TABLE records, snapshots, {', '.join(_CHANGED)} IN {mode} MODE")


def create(sql: Sql) -> None:
    """Make the tables and the triggers."""
    metadata.create_all(sql.connection)
    postgresql = sql.postgresql
    for statement in _POSTGRESQL if postgresql else _SQLITE:
        sql.exec_driver_sql(statement)
    for name in _CHANGED:
        sql.exec_driver_sql((_POSTGRESQL_CHANGED if postgresql else _SQLITE_CHANGED).format(name))


def drop(sql: Sql) -> None:
    """Drop the triggers and the tables with all their data."""
    postgresql = sql.postgresql
    triggers = [("search_changed", "changes"), ("search_erased", "records"), ("search_imported", "snapshots")]
    triggers += [(f"search_rewritten_{name}", name) for name in _CHANGED]
    for trigger, name in triggers:
        sql.exec_driver_sql(f"DROP TRIGGER IF EXISTS {trigger}" + (f" ON {name}" if postgresql else ""))
    if postgresql:
        for name in ("changes", "erased", "rewritten", "imported"):
            sql.exec_driver_sql(f"DROP FUNCTION IF EXISTS search_note_{name}()")
        sql.exec_driver_sql("DROP TABLE IF EXISTS search_vectors")
    else:
        sql.exec_driver_sql("DROP TABLE IF EXISTS search_words")
    metadata.drop_all(sql.connection)


def scrub(sql: Sql) -> None:
    """Scrub removed words from SQLite's index, which keeps them until its parts are merged."""
    if there(sql):
        sql.exec_driver_sql("INSERT INTO search_words (search_words) VALUES ('optimize')")


class PostgresType(UserDefinedType[str]):
    """A PostgreSQL type that SQLAlchemy lacks; its values are texts."""

    cache_ok = True

    def __init__(self, name: str) -> None:
        self.name = name

    def get_col_spec(self, **_: Any) -> str:
        """The type's name in SQL."""
        return self.name


Name = tuple[str, bytes, bytes]  # kind, collection and name of a document
_ENTRIES = 50  # read at once
_BYTES = 2**22  # of changes in one read
_PAGE = 200
_ROWS = 20_000
_NAMES = ("record", "kind", "collection", "name")
_COLUMNS = (*_NAMES, "version", "ends_ms", "digest", "text", "value")
# PostgreSQL has the column `words` as well; it stores only the words of the texts.
_WORDED = table("search_documents", *map(column, (*_COLUMNS, "words")))
_VECTORS = table("search_vectors", column("document"), column("embedding"))
# An operation on these fields can change other documents too, so the record is compared as a whole.
_VISIBLE = frozenset({SEGMENTS, START, NEXT, DELETED, OWNER, PARENT})


# Which records are due


@dataclass(frozen=True, slots=True)
class Due:
    """A record with unindexed changes, and the rows that note them. `erased`: the record was erased."""

    key: int
    partition: int
    rows: tuple[int, ...]
    record: str
    erased: bool = False
    owner: str | None = None
    epoch: str = ""
    version: int = 0
    deleted: bool = False
    indexed: tuple[str, int] | None = None  # the epoch and version that the index has


def waiting(sql: Sql, expected: str) -> list[int] | None:
    """The partitions with due records. None: the index no longer has these settings."""
    if settings(sql) != expected:
        return None
    p = partitions.c
    return list(sql.execute(select(p.partition).where(p.namespace == sql.namespace, _has_due())).scalars())


def _has_due() -> ColumnElement[bool]:
    # One index lookup for each partition, however much is due there.
    d, p = due.c, partitions.c
    return select(d.id).where(d.namespace == p.namespace, d.partition == p.partition).correlate(partitions).exists()


def claim(
    sql: Sql, some: Collection[int], claimer: str, now_ms: int, seconds: float, expected: str
) -> list[int] | None:
    """Claim the free partitions with due records, for this many seconds; return them.

    None: the index no longer has these settings.
    """
    if settings(sql) != expected:
        return None
    p = partitions.c
    free = (p.claim == claimer) | (p.until_ms < now_ms)
    query = select(p.partition).where(p.namespace == sql.namespace, sql.among(p.partition, some), free, _has_due())
    query = query.order_by(p.partition).with_for_update(skip_locked=True)
    taken = list(sql.execute(query).scalars())
    mine = and_(p.namespace == sql.namespace, sql.among(p.partition, taken))
    sql.execute(update(partitions).where(mine).values(claim=claimer, until_ms=now_ms + int(seconds * 1000)))
    return taken


def release(sql: Sql, claimer: str) -> None:
    """Release the claimer's partitions."""
    p = partitions.c
    mine = and_(p.namespace == sql.namespace, p.claim == claimer)
    # In the common locking order, because an erasure may be waiting for one of the rows.
    taken = sql.execute(select(p.partition).where(mine).order_by(p.partition).with_for_update()).scalars().all()
    if taken:
        sql.execute(update(partitions).where(mine).values(claim="", until_ms=0))


def next_due(sql: Sql, some: Collection[int], limit: int) -> tuple[list[Due], bool]:
    """The records of these partitions that have waited longest, erased ones first, and whether there may be more."""
    d, r, h = due.c, records.c, heads.c
    query = (
        select(d.record).where(d.namespace == sql.namespace, sql.among(d.partition, some)).order_by(d.id).limit(limit)
    )
    oldest = list(sql.execute(query).scalars())
    # All notes of these records, up to a limit: a record that is indexed now has no note left, however often it
    # changed.
    query = select(d.id, d.record, d.partition, d.gone).where(sql.among(d.record, list(set(oldest))))
    rows: dict[int, list[Any]] = {}
    for row in sql.execute(query.where(d.namespace == sql.namespace).order_by(d.id).limit(_ROWS)):
        rows.setdefault(row.record, []).append(row)
    columns: tuple[Any, ...] = (r.key, r.record, r.owner, r.epoch, r.version, r.deleted, h.epoch, h.version)
    joined = select(*columns).outerjoin_from(records, heads, h.record == r.key)
    there = {row[0]: tuple(row) for row in sql.execute(joined.where(sql.among(r.key, list(rows))))}
    found = []
    for key, noted in rows.items():
        ids = tuple(row.id for row in noted)
        if key not in there:
            text = next((row.gone for row in noted if row.gone), "")
            found.append(Due(key, noted[0].partition, ids, text, erased=True))
            continue
        _, record, owner, epoch, version, deleted, *known = there[key]
        at = (known[0], known[1]) if known[0] is not None else None
        found.append(Due(key, noted[0].partition, ids, record, False, owner, epoch, version, deleted, at))
    return sorted(found, key=lambda each: not each.erased), len(oldest) == limit


def waits(sql: Sql, up_to: int) -> bool:
    """Whether a note up to this number is still there."""
    query = select(due.c.id).where(due.c.namespace == sql.namespace, due.c.id <= up_to).order_by(due.c.id).limit(1)
    return sql.execute(query).first() is not None


def last_due(sql: Sql) -> int:
    """The number of the newest note, 0 if there is none."""
    query = select(due.c.id).where(due.c.namespace == sql.namespace).order_by(due.c.id.desc()).limit(1)
    return sql.execute(query).scalar() or 0


def erased_texts(sql: Sql) -> list[str]:
    """The names of erased records that a user's own index may still have."""
    d = due.c
    query = select(d.gone).where(d.namespace == sql.namespace, d.gone.is_not(None)).order_by(d.id)
    return list(sql.execute(query).scalars())


def lacking(sql: Sql, up_to: int | None = None) -> int:
    """How many records have unindexed changes, counted up to the note `up_to`."""
    query = select(func.count(distinct(due.c.record))).where(due.c.namespace == sql.namespace)
    if up_to is not None:
        query = query.where(due.c.id <= up_to)
    return sql.execute(query).scalar() or 0


def count_records(sql: Sql) -> int:
    """How many records there are."""
    r = records.c
    query = select(func.count()).where(r.namespace == sql.namespace, r.scope != record_index.ERASED)
    return sql.execute(query).scalar() or 0


# The content of records


class Piece(NamedTuple):
    """Something that a record shows or, without data, no longer shows. `source`: the record it was written under."""

    name: Name
    data: bytes | None
    source: str


@dataclass(frozen=True, slots=True)
class Changed:
    """The pieces that a record's next changes set or removed, up to a version."""

    version: int
    pieces: list[Piece]
    size: int  # roughly, in bytes


@dataclass(frozen=True, slots=True)
class Whole:
    """All that a record shows, except messages and items, which are read by pages; and digests of its documents."""

    shown: list[Piece]
    runs: list[Segment]
    layers: list[Layer]
    existing: dict[Name, bytes]


def changes(sql: Sql, some: Sequence[Due]) -> list[Changed | None]:
    """The changes of the first of these records, as many as fit one read; None for a record to compare as a whole."""
    found: list[Changed | None] = []
    size = 0
    for one in some:
        found.append(None if one.erased else _changed(sql, one))
        size += found[-1].size if found[-1] else 0
        if size >= _BYTES:
            break
    return found


def _changed(sql: Sql, one: Due) -> Changed | None:
    """The next changes of a record from its indexed version on; None if it must be compared as a whole."""
    if one.indexed is None or one.deleted or one.indexed[0] != one.epoch or one.indexed[1] > one.version:
        return None
    pieces: dict[Name, Piece] = {}
    at, size = one.indexed[1], 0
    while at < one.version and size < _BYTES:
        found = record_history.whole(sql, one.key, one.record, at, one.version + 1, _ENTRIES)
        if not found:
            return None
        for epoch, entry in found:
            # An index of a version that was replaced since cannot be continued, nor can one from whose next version on
            # changes were purged or are in quarantine.
            if epoch != one.epoch or entry.kind in (REPAIR, "rollback") or entry.version != at + 1:
                return None
            for op in unpack(entry.data):
                if op.kind in (b"c", b"w") or op.name in _VISIBLE:
                    return None
                piece = _piece(one.record, op)
                if piece is not None:
                    pieces[piece.name] = piece
            at, size = entry.version, size + len(entry.data) + _BYTES // 10_000
    return Changed(at, list(pieces.values()), size)


def _piece(record: str, op: Op) -> Piece | None:
    if op.kind == b"m":
        return Piece(("message", b"", op.name), op.value, record)
    if op.kind in (b"s", b"d") and op.name[:1] != b"#":
        return Piece(("field", b"", op.name), op.value if op.kind == b"s" else None, record)
    if op.kind in (b"p", b"q"):
        return Piece(("item", *item_of(op.name)), op.value or None, record)
    return None


def whole(sql: Sql, one: Due) -> Whole:
    """Everything that a record shows, to be compared with the index."""
    d = documents.c
    query = select(d.kind, d.collection, d.name, d.digest).where(d.record == one.key)
    existing = {(kind, bytes(of), bytes(name)): bytes(digest) for kind, of, name, digest in sql.execute(query)}
    if one.deleted:
        return Whole([], [], [], existing)
    state = record_history.states(sql, {one.record: one.version}).get(one.record)
    fields = state.fields if state else {}
    runs = [run for run in message_ranges.segments(one.record, fields) if run.start < run.stop]
    shown = [Piece(("field", b"", name), data, one.record) for name, data in fields.items() if name[:1] != b"#"]
    # Most records have only this, so one read is enough.
    if runs:
        first, rest = messages(sql, one, runs[0])
        shown += first
        runs[:1] = [rest] if rest else []
    places = record_items.layers_of(sql, one.record, one.version)
    if not record_items.with_items(sql, [one.key]):
        places = places[1:]
    # The lowest layer first: higher ones replace its items.
    return Whole(shown, runs, [layer._replace(last=min(layer.last, one.version)) for layer in places[::-1]], existing)


def messages(sql: Sql, one: Due, run: Segment) -> tuple[list[Piece], Segment | None]:
    """The next messages of a run, and the rest of it."""
    pieces: list[Piece] = []
    at, size = run.start, 0
    while at < run.stop and at - run.start < _PAGE and size < _BYTES:
        part = Segment(run.source, at, min(at + _ENTRIES, run.stop))
        found = record_history.messages_of(sql, one.record, [part], key=one.key)
        pieces += [Piece(("message", b"", b"%d" % seq), data, run.source) for seq, data in sorted(found.items())]
        at, size = part.stop, size + sum(map(len, found.values()))
    return pieces, Segment(run.source, at, run.stop) if at < run.stop else None


def items_page(sql: Sql, layer: Layer, after: tuple[bytes, bytes]) -> list[Piece]:
    """The next items of a layer after this collection and key, including those that it deletes."""
    i = items.c
    key = record_index.keys(sql, [layer.source]).get(layer.source, -1)
    here = and_(i.record == key, i.version.between(layer.first, layer.last), ~record_items.newer(layer.last))
    name = tuple_(i.collection, i.key)
    sizes = select(i.collection, i.key, func.length(i.data)).where(here, name > after)
    last, size = after, 0
    for collection, of, length in sql.execute(sizes.order_by(i.collection, i.key).limit(_PAGE)):
        if size and size + length > _BYTES:
            break
        last, size = (collection, of), size + length + 1
    query = select(i.collection, i.key, i.origin, i.data).where(here, name > after, name <= last)
    rows = sql.execute(query.order_by(i.collection, i.key))
    return [Piece(("item", row[0], row[1]), row[3] or None, row[2] or layer.source) for row in rows]


# Writing the index


@dataclass(frozen=True, slots=True)
class Stored:
    """A document as it is stored."""

    name: Name
    version: int
    ends_ms: int | None
    digest: bytes
    text: str
    value: bytes
    vector: str | None = None


@dataclass(slots=True)
class Write:
    """Changes of one record in the index. `done`: the epoch and version that the index then has."""

    due: Due
    put: list[Stored] = field(default_factory=list)
    remove: list[Name] = field(default_factory=list)
    done: tuple[str, int] | None = None


def write(sql: Sql, claimer: str, until_ms: int, writes: Sequence[Write], language: str) -> set[int] | None:
    """Change the index; return the keys of the records that are now complete. None: another worker has the claim."""
    p = partitions.c
    wanted = {each.due.partition for each in writes}
    mine = and_(p.namespace == sql.namespace, sql.among(p.partition, wanted))
    held = sql.execute(select(p.claim).where(mine).order_by(p.partition).with_for_update()).scalars().all()
    if set(held) != {claimer} or len(held) != len(wanted):
        return None
    sql.execute(update(partitions).where(mine).values(until_ms=until_ms))
    r, h = records.c, heads.c
    numbers = [each.due.key for each in writes]
    # Read after the rows are locked: a transaction that erases or rewrites a record waits for this, or came earlier.
    query = select(r.key, h.epoch, h.version).outerjoin_from(records, heads, h.record == r.key)
    rows = sql.execute(query.where(sql.among(r.key, numbers)))
    known = {key: None if epoch is None else (epoch, version) for key, epoch, version in rows}
    living = [each for each in writes if each.due.key in known and known[each.due.key] == each.due.indexed]
    _change(sql, living, language)
    at = [(each.due.key, *each.done) for each in living if each.done]
    sql.put(heads, at)
    done = [each for each in living if each.done and each.done[1] >= each.due.version]
    done += [each for each in writes if each.due.key not in known]
    # These notes are older than the read, so the documents include their changes.
    sql.execute(delete(due).where(sql.among(due.c.id, [row for each in done for row in each.due.rows])))
    return {each.due.key for each in done}


def _change(sql: Sql, writes: Iterable[Write], language: str) -> None:
    # If a transaction changes a document several times, the last change wins.
    last: dict[tuple[int, str, bytes, bytes], Stored | None] = {}
    for each in writes:
        last.update({(each.due.key, *one.name): one for one in each.put})
        last.update({(each.due.key, *name): None for name in each.remove})
    # Delete and insert again, not update: the newest documents then have the highest ids.
    sql.remove(documents, [dict(zip(_NAMES, name, strict=True)) for name in last], _same)
    new = {name: one for name, one in last.items() if one is not None}
    rows = [(*name, one.version, one.ends_ms, one.digest, one.text, one.value) for name, one in new.items()]
    if not sql.postgresql:
        sql.add(documents, rows, [documents.c[name] for name in _COLUMNS])
    elif rows:
        _put_postgresql(sql, rows, [one.vector for one in new.values()], language)


def _same(other: Any) -> ColumnElement[bool]:
    return and_(*(documents.c[name] == getattr(other, name) for name in _NAMES))


def _put_postgresql(sql: Sql, rows: Sequence[Row], vectors: Sequence[str | None], language: str) -> None:
    """Insert documents and their vectors, in statements that have a list for each column."""
    # In the locale C PostgreSQL lowercases only ASCII.
    lower = [(*place, text.lower(), value) for *place, text, value in rows]
    given = sql.listed({name: documents.c[name].type for name in _COLUMNS}, lower).c
    worded = all(vector is None for vector in vectors)
    words = func.to_tsvector(cast(language, PostgresType("regconfig")), given.text) if worded else null()
    values = [literal("") if name == "text" else given[name] for name in _COLUMNS]
    sql.execute(insert(_WORDED).from_select([*_COLUMNS, "words"], select(*values, words)))
    if not worded:
        types = {**{name: documents.c[name].type for name in _NAMES}, "vector": Text()}
        named = sql.listed(types, [(*row[:4], vector) for row, vector in zip(rows, vectors, strict=True)])
        query = select(documents.c.id, cast(named.c.vector, PostgresType("vector")))
        query = query.join_from(documents, named, _same(named.c))
        sql.execute(insert(_VECTORS).from_select(["document", "embedding"], query))
