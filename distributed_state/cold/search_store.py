"""Makes, updates, searches and removes the search index of one namespace. Safe to call from many threads.

Law: every method is one transaction. Users' input is always words, never query syntax. A search finds only documents of
existing records that have not expired.

Design: section 21.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Float,
    FromClause,
    Select,
    and_,
    cast,
    column,
    delete,
    exc,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    table,
    text,
    union_all,
    update,
)

from distributed_state.cold import search_index
from distributed_state.cold.engine import Part, Sql, reads, reads_long, writes
from distributed_state.cold.listings import end
from distributed_state.cold.record_index import ERASED
from distributed_state.cold.search_index import PostgresType, documents
from distributed_state.cold.tables import namespaces, records
from distributed_state.errors import ConfigurationError
from distributed_state.values.model import escape
from distributed_state.values.search import SearchQuery

_MOST_DIMENSIONS = 2000  # of an index of pgvector
_OLDEST_PGVECTOR = (0, 8)  # older versions return too few rows when a filter leaves some out
_NO_RIGHT = "42501"
PAGE_BYTES = 4 * 2**20  # of the values in one page
# Join in this order: from the matches to their documents to their records. Without statistics, as after a restore,
# PostgreSQL would scan all records instead.
_IN_THIS_ORDER = "SELECT set_config('join_collapse_limit', '1', true), " + ", ".join(
    f"set_config('enable_{plan}', 'off', true)" for plan in ("seqscan", "hashjoin", "mergejoin")
)
_IN_ANY_ORDER = _IN_THIS_ORDER.replace("'1'", "'8'").replace("'off'", "'on'")
_words: ColumnElement[Any] = literal_column("search_documents.words")


class SearchStore(Part):
    """The index in the archive's database, and the changes that it lacks."""

    settings = reads(search_index.settings)

    def switch_on(self, settings: str, dimensions: int | None) -> str:
        """Make the index if there is none, and mark all records as due. Returns the settings of the index."""
        if dimensions is not None and self.database.dialect != "postgresql":
            raise ConfigurationError("search: `embed` needs PostgreSQL with pgvector, or an `index` of your own")
        with self.database.long_write(self.namespace) as sql, _refused():
            _hold(sql)
            found = search_index.found(sql)
            if found is None:
                # Wait for transactions that began before this namespace was noted; the triggers see all later ones.
                search_index.lock(sql, "SHARE ROW EXCLUSIVE")
                if not search_index.there(sql):
                    search_index.create(sql)
                if dimensions is not None:
                    _make_vectors(sql, dimensions)
                _note(sql, settings)
        # In a separate transaction: the triggers note everything archived from now on, so other writers do not wait for
        # this.
        with self.database.long_write(self.namespace) as sql:
            _fill(sql)
        return found[0] if found else settings

    def switch_off(self) -> bool:
        """Remove the index of this namespace; False if there is none."""
        with self.database.long_write(self.namespace) as sql, _refused():
            _hold(sql)
            if search_index.found(sql) is None:
                return False
            _remove(sql)
            return True

    def languages(self) -> list[str]:
        """The text search configurations of the database."""
        if self.database.dialect != "postgresql":
            return ["simple"]
        with self.database.read() as sql:
            return list(sql.execute(text("SELECT cfgname FROM pg_ts_config")).scalars())

    records = reads(search_index.count_records)
    lacking = reads(search_index.lacking)
    last_due = reads(search_index.last_due)
    waits = reads(search_index.waits)
    waiting = reads(search_index.waiting)
    claim = writes(search_index.claim)
    release = writes(search_index.release)
    next_due = reads_long(search_index.next_due)
    erased_texts = reads(search_index.erased_texts)
    changes = reads_long(search_index.changes)
    whole = reads_long(search_index.whole)
    messages = reads_long(search_index.messages)
    items_page = reads_long(search_index.items_page)

    def write(
        self, claimer: str, until_ms: int, writes: Sequence[search_index.Write], language: str
    ) -> set[int] | None:
        """Change the index; return the records that are now complete in it. None: another worker has the claim."""
        with self.database.long_write(self.namespace) as sql:
            return search_index.write(sql, claimer, until_ms, writes, language)

    def scrub(self) -> None:
        """Scrub removed words: SQLite's index keeps them until it is merged."""
        if self.database.dialect == "sqlite":
            with self.database.long_write() as sql:
                search_index.scrub(sql)

    def search(
        self, query: SearchQuery, now_ms: int, language: str, vector: str | None, dimensions: int, settings: str,
        apart: bool,
    ) -> Page | None:  # fmt: skip
        """The matches of a query. None: the index no longer has these settings."""
        with self.database.read(self.namespace) as sql:
            if search_index.settings(sql) != settings:
                return None
            return search(sql, query, now_ms, language, vector, dimensions, apart)


def _hold(sql: Sql) -> None:
    """Prevent others from switching the index on or off until this transaction ends."""
    if sql.postgresql:
        sql.exec_driver_sql("SELECT pg_advisory_xact_lock(110420230914)")


def _make_vectors(sql: Sql, dimensions: int) -> None:
    installed = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
    if sql.exec_driver_sql(installed).scalar() is None:
        try:
            with sql.begin_nested():
                sql.exec_driver_sql("CREATE EXTENSION vector")
        except exc.DBAPIError as error:
            why = str(error.orig).strip().partition("\n")[0]
            needs = "search: `embed` needs the extension pgvector in the database"
            raise ConfigurationError(f"{needs}: {why}") from error
    version = str(sql.exec_driver_sql(installed).scalar())
    if tuple(map(int, version.split(".")[:2])) < _OLDEST_PGVECTOR:
        raise ConfigurationError(f"search: `embed` needs pgvector 0.8 or newer, the database has {version}")
    sql.exec_driver_sql(search_index.VECTORS)
    if dimensions <= _MOST_DIMENSIONS:
        sql.exec_driver_sql(search_index.VECTOR_INDEX.format(dimensions))


def _note(sql: Sql, settings: str) -> None:
    row = {"namespace": sql.namespace, "settings": settings, "filled": False}
    sql.execute(insert(search_index.indexes), row)
    n = namespaces.c
    count = sql.execute(select(n.partitions).where(n.namespace == sql.namespace)).scalar() or 0
    sql.add(search_index.partitions, [(sql.namespace, at, "", 0) for at in range(count)])


def _fill(sql: Sql) -> None:
    """Mark all records as due, once."""
    i, r = search_index.indexes.c, records.c
    mine = i.namespace == sql.namespace
    if sql.execute(select(i.filled).where(mine).with_for_update()).scalar() is not False:
        return
    every = select(r.namespace, r.partition, r.key).where(r.namespace == sql.namespace, r.scope != ERASED)
    sql.execute(insert(search_index.due).from_select(["namespace", "partition", "record"], every))
    sql.execute(update(search_index.indexes).where(mine).values(filled=True))


def _remove(sql: Sql) -> None:
    """Remove the namespace's part of the index; the last namespace removes the index itself."""
    last = sql.execute(select(func.count()).select_from(search_index.indexes)).scalar() == 1
    if last:
        # Locked first, in the order of an erasure: the record, then the row of its partition.
        search_index.lock(sql, "ACCESS EXCLUSIVE")
    # Wait for workers that are writing the index now; when they continue, their claims have ended.
    p, r = search_index.partitions.c, records.c
    sql.execute(select(p.partition).where(p.namespace == sql.namespace).order_by(p.partition).with_for_update())
    mine = select(r.key).where(r.namespace == sql.namespace)
    for each in (search_index.documents, search_index.heads):
        sql.execute(delete(each).where(each.c.record.in_(mine)))
    for each in (search_index.due, search_index.partitions, search_index.indexes):
        sql.execute(delete(each).where(each.c.namespace == sql.namespace))
    if last:
        search_index.drop(sql)


@contextmanager
def _refused() -> Iterator[None]:
    """Explain what to do if the database has no FTS5, or the role may not make tables and triggers."""
    try:
        yield
    except exc.DBAPIError as error:
        why = f"search: the index cannot be made: {str(error.orig).strip()}".partition("\n")[0]
        if "no such module" in why:
            raise ConfigurationError(f"{why}; use an SQLite with FTS5, or PostgreSQL") from error
        if getattr(error.orig, "sqlstate", None) == _NO_RIGHT:
            may = "a role that may make tables and triggers, and owns those of the archive"
            raise ConfigurationError(f"{why}; have {may} run `distributed-state index` once") from error
        raise


# Queries


class Row(NamedTuple):
    """A matching document as it is stored, and its score."""

    record: str
    owner: str | None
    kind: str
    collection: bytes
    name: bytes
    version: int
    text: str
    value: bytes
    score: float


class Page(NamedTuple):
    """Documents in order, the number of matches that were read for them, and whether there may be further matches."""

    rows: list[Row]
    taken: int
    more: bool


def search(
    sql: Sql, query: SearchQuery, now_ms: int, language: str, vector: str | None, dimensions: int, apart: bool
) -> Page:
    """The matches, the most relevant first: by `vector` (of `dimensions`) if it is given, else by words.

    `apart`: a score must not depend on other documents of the index. If the page is larger than `PAGE_BYTES`, only its
    beginning is returned, at least one match.
    """
    if sql.postgresql:
        sql.exec_driver_sql(_IN_THIS_ORDER)
    if vector is not None:
        # Let the index scan continue until enough rows pass the filter.
        sql.exec_driver_sql("SELECT set_config('hnsw.iterative_scan', 'strict_order', true)")
    if not query.words:
        found = _from(documents, literal(0.0)).order_by(documents.c.id.desc())
    elif vector is not None:
        found = _by_meaning(vector, dimensions)
    elif sql.postgresql:
        found = _by_words_postgresql(query, language)
    else:
        found = _by_their_number(query) if apart else _by_words_sqlite(query)
    which = _which(sql, query, now_ms)
    best = sql.execute(found.where(*which).limit(query.limit).offset(query.offset)).all()
    if vector is not None and len(best) < query.limit:
        # A vector index scans only the nearest few thousand, and a narrow filter may match none of them.
        if sql.postgresql:
            sql.exec_driver_sql(_IN_ANY_ORDER)
        found = _by_meaning(vector, dimensions, exactly=True)
        best = sql.execute(found.where(*which).limit(query.limit).offset(query.offset)).all()
    scores: dict[int, float] = {}
    size = 0
    for id, length, score in best:
        if scores and size + length > PAGE_BYTES:
            break
        size += length
        scores[id] = float(score)
    return Page(_rows(sql, scores), len(scores), len(scores) < len(best) or len(best) == query.limit)


def _rows(sql: Sql, scores: Mapping[int, float]) -> list[Row]:
    """The documents with these ids, in this order."""
    d, r = documents.c, records.c
    wanted = select(d.id, r.record, r.owner, d.kind, d.collection, d.name, d.version, d.text, d.value)
    asked = wanted.select_from(documents.join(records, r.key == d.record))
    found = {id: row for id, *row in sql.rows(asked, d.id, scores)}
    return [Row._make((*found[id], score)) for id, score in scores.items() if id in found]


def _from(matched: FromClause, score: ColumnElement[Any]) -> Select[Any]:
    d, r = documents.c, records.c
    return select(d.id, func.length(d.value), score).select_from(matched.join(records, r.key == d.record))


def _which(sql: Sql, query: SearchQuery, now_ms: int) -> list[ColumnElement[bool]]:
    d, r = documents.c, records.c
    which = [r.namespace == sql.namespace, r.deleted.is_(False), r.scope.in_(query.scopes), d.kind.in_(query.kinds)]
    which.append(or_(d.ends_ms.is_(None), d.ends_ms > now_ms))
    if query.user is not None:
        which.append(r.owner == escape(query.user))
    if query.collection is not None:
        which.append(d.collection == query.collection.encode("utf-8", "surrogatepass"))
    if query.prefix:
        starts = [f"{scope}:{escape(query.prefix)}" for scope in query.scopes]
        which.append(or_(*(and_(r.record >= start, r.record < end(start)) for start in starts)))
    return which


def quoted(words: str, match: str) -> str:
    """Words as plain FTS5 strings: each in double quotes, with its own quotes doubled."""
    each = ['"' + word.replace('"', '""') + '"' for word in words.split()]
    return (" OR " if match == "any" else " AND ").join(each)


def _by_words_sqlite(query: SearchQuery) -> Select[Any]:
    words = table("search_words", column("rowid"), column("rank"))
    matches = text("search_words MATCH :words").bindparams(words=quoted(query.words, query.match))
    # FTS5 gives the best the lowest rank.
    found = _from(words.join(documents, words.c.rowid == documents.c.id), -words.c.rank).where(matches)
    return found.order_by(words.c.rank, documents.c.id.desc())


def _by_their_number(query: SearchQuery) -> Select[Any]:
    """The documents that have most of the words, the newest first.

    FTS5 ranks by how rare a word is among all documents, including those of other tenants and namespaces. From its
    scores, or from the order of two words, a tenant could find out which words others use, and how often.
    """
    asked = [query.words] if query.match == "all" else [*dict.fromkeys(query.words.lower().split())]
    each: list[Select[Any]] = [
        select(column("rowid")).select_from(table("search_words"))
        .where(text(f"search_words MATCH :words{at}").bindparams(**{f"words{at}": quoted(words, query.match)}))
        for at, words in enumerate(asked)
    ]  # fmt: skip
    matched = union_all(*each).subquery("matched").c.rowid
    score = (cast(func.count(), Float) / len(asked)).label("score")
    best = select(matched.label("id"), score).group_by(matched).subquery("best")
    found = _from(best.join(documents, best.c.id == documents.c.id), best.c.score)
    return found.order_by(best.c.score.desc(), documents.c.id.desc())


def _by_words_postgresql(query: SearchQuery, language: str) -> Select[Any]:
    config = cast(language, PostgresType("regconfig"))
    folded = query.words.lower()  # like the indexed texts
    words = folded.split() if query.match == "any" else [folded]
    # plainto_tsquery reads words in this language, and never query syntax.
    each = [func.plainto_tsquery(config, word) for word in words]
    asked: ColumnElement[Any] = each[0]
    for one in each[1:]:
        asked = asked.op("||")(one)
    d = documents.c
    score = cast(func.ts_rank_cd(_words, asked, 32), Float).label("score")
    best = select(d.id, score).where(_words.op("@@")(asked)).cte("matched").prefix_with("MATERIALIZED")
    found = _from(best.join(documents, best.c.id == d.id), best.c.score)
    return found.order_by(best.c.score.desc(), d.id.desc())


def _by_meaning(vector: str, dimensions: int, *, exactly: bool = False) -> Select[Any]:
    kept = table("search_vectors", column("document"), column("embedding"))
    # Written exactly like the expression of the vectors' index; otherwise PostgreSQL does not use that.
    same: ColumnElement[Any] = literal_column(f"(search_vectors.embedding::vector({dimensions}))")
    distance = same.op("<=>", return_type=Float())(cast(vector, PostgresType(f"vector({dimensions})")))
    found = _from(kept.join(documents, kept.c.document == documents.c.id), literal(1.0) - distance)
    found = found.where(text(f"vector_dims(search_vectors.embedding) = {dimensions}"))
    return found.order_by(distance + literal(0.0) if exactly else distance)
