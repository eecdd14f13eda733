"""Asks the index. Law: what a user types is words, never the syntax of a query.

Shown is only what belongs to a record that is there, and has not ended.

Design: section 21.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Float,
    FromClause,
    Select,
    and_,
    cast,
    column,
    func,
    literal,
    literal_column,
    or_,
    select,
    table,
    text,
    union_all,
)
from sqlalchemy.types import UserDefinedType

from distributed_state.cold.listings import end
from distributed_state.cold.search_tables import documents
from distributed_state.cold.tables import records
from distributed_state.values.model import escape
from distributed_state.values.search import SearchQuery

PAGE_BYTES = 4 * 2**20  # of the values that are read at once

# What is matched leads to its document and that to its record, in this order. As long as it has no statistics, as after
# a restore, PostgreSQL would rather go through all records.
_IN_THIS_ORDER = "SELECT set_config('join_collapse_limit', '1', true), " + ", ".join(
    f"set_config('enable_{plan}', 'off', true)" for plan in ("seqscan", "hashjoin", "mergejoin")
)
_IN_ANY_ORDER = _IN_THIS_ORDER.replace("'1'", "'8'").replace("'off'", "'on'")
_words: ColumnElement[Any] = literal_column("search_documents.words")


class _Type(UserDefinedType[str]):
    """A type of PostgreSQL that SQLAlchemy has no name for; its values are texts."""

    cache_ok = True

    def __init__(self, name: str) -> None:
        self.name = name

    def get_col_spec(self, **_: Any) -> str:
        """As SQL writes it."""
        return self.name


class Row(NamedTuple):
    """A document that fits, as it is kept, and how well it does."""

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
    """Documents in order, how many were looked at for them, and whether there may be more behind those."""

    rows: list[Row]
    taken: int
    more: bool


def search(
    connection: Connection,
    namespace: str,
    query: SearchQuery,
    now_ms: int,
    language: str,
    vector: str | None,
    dimensions: int,
    apart: bool,
) -> Page:
    """What fits, the most relevant first; by `vector`, of so many dimensions, if it is given, else by its words.

    `apart`: how relevant something is says nothing of what else is in the index. Of a page that is larger than
    `PAGE_BYTES` its beginning, at least one.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(_IN_THIS_ORDER)
    if vector is not None:
        # So that what the filter leaves out is made up for by what comes next.
        connection.exec_driver_sql("SELECT set_config('hnsw.iterative_scan', 'strict_order', true)")
    if not query.words:
        found = _from(documents, literal(0.0)).order_by(documents.c.id.desc())
    elif vector is not None:
        found = _by_meaning(vector, dimensions)
    elif connection.dialect.name == "postgresql":
        found = _by_words_postgresql(query, language)
    else:
        found = _by_their_number(query) if apart else _by_words_sqlite(query)
    which = _which(namespace, query, now_ms)
    best = connection.execute(found.where(*which).limit(query.limit).offset(query.offset)).all()
    if vector is not None and len(best) < query.limit:
        # An index of vectors looks at the nearest few thousand, and finds none of what a narrow filter leaves of them.
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(_IN_ANY_ORDER)
        found = _by_meaning(vector, dimensions, exactly=True)
        best = connection.execute(found.where(*which).limit(query.limit).offset(query.offset)).all()
    scores: dict[int, float] = {}
    size = 0
    for id, length, score in best:
        if scores and size + length > PAGE_BYTES:
            break
        size += length
        scores[id] = float(score)
    return Page(_rows(connection, scores), len(scores), len(scores) < len(best) or len(best) == query.limit)


def _rows(connection: Connection, scores: Mapping[int, float]) -> list[Row]:
    """The documents of these ids, in their order."""
    d, r = documents.c, records.c
    wanted = select(d.id, r.record, r.owner, d.kind, d.collection, d.name, d.version, d.text, d.value)
    asked = wanted.select_from(documents.join(records, r.key == d.record)).where(d.id.in_(scores))
    found = {id: row for id, *row in connection.execute(asked)}
    return [Row._make((*found[id], score)) for id, score in scores.items() if id in found]


def _from(matched: FromClause, score: ColumnElement[Any]) -> Select[Any]:
    d, r = documents.c, records.c
    return select(d.id, func.length(d.value), score).select_from(matched.join(records, r.key == d.record))


def _which(namespace: str, query: SearchQuery, now_ms: int) -> list[ColumnElement[bool]]:
    d, r = documents.c, records.c
    which = [r.namespace == namespace, r.deleted.is_(False), r.scope.in_(query.scopes), d.kind.in_(query.kinds)]
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
    """Words as FTS5 takes them for nothing else: each in quotes, of which those within are doubled."""
    each = ['"' + word.replace('"', '""') + '"' for word in words.split()]
    return (" OR " if match == "any" else " AND ").join(each)


def _by_words_sqlite(query: SearchQuery) -> Select[Any]:
    words = table("search_words", column("rowid"), column("rank"))
    matches = text("search_words MATCH :words").bindparams(words=quoted(query.words, query.match))
    # FTS5 gives the best the lowest rank.
    found = _from(words.join(documents, words.c.rowid == documents.c.id), -words.c.rank).where(matches)
    return found.order_by(words.c.rank, documents.c.id.desc())


def _by_their_number(query: SearchQuery) -> Select[Any]:
    """What has the most of the words, the newest first.

    FTS5 ranks by how rare a word is among all documents, of other tenants and namespaces too: by its score, and by the
    order of two words, a tenant found out which words the others use, and how often.
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
    config = cast(language, _Type("regconfig"))
    folded = query.words.lower()  # as the index is
    words = folded.split() if query.match == "any" else [folded]
    # What the language makes of each; none of it is read as a query.
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
    # As the index of these vectors is written, else it is not used.
    same: ColumnElement[Any] = literal_column(f"(search_vectors.embedding::vector({dimensions}))")
    distance = same.op("<=>", return_type=Float())(cast(vector, _Type(f"vector({dimensions})")))
    found = _from(kept.join(documents, kept.c.document == documents.c.id), literal(1.0) - distance)
    found = found.where(text(f"vector_dims(search_vectors.embedding) = {dimensions}"))
    return found.order_by(distance + literal(0.0) if exactly else distance)
