"""The index of one namespace. Blocking, and safe to call from many threads. Law: every method is one transaction.

Design: section 21.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection, delete, distinct, exc, func, insert, select, text, update

from distributed_state.cold import search_feed, search_query
from distributed_state.cold import search_tables as tables
from distributed_state.cold.engine import Database
from distributed_state.cold.layers import Layer
from distributed_state.cold.record_index import ERASED
from distributed_state.cold.tables import namespaces, records
from distributed_state.errors import ConfigurationError
from distributed_state.values.journal import Segment
from distributed_state.values.search import SearchQuery

_MOST_DIMENSIONS = 2000  # of an index of pgvector
_OLDEST_PGVECTOR = (0, 8)  # before, what a filter left out was not made up for
_NO_RIGHT = "42501"


class SearchStore:
    """The index in the archive's database, and what it lacks."""

    def __init__(self, database: Database, namespace: str) -> None:
        self._database = database
        self._namespace = namespace

    def settings(self) -> str | None:
        """What search was switched on with in this namespace; None if it was not."""
        with self._database.read() as connection:
            return self._settings(connection)

    def _settings(self, connection: Connection) -> str | None:
        if not tables.there(connection):
            return None
        i = tables.indexes.c
        found: str | None = connection.execute(select(i.settings).where(i.namespace == self._namespace)).scalar()
        return found

    def switch_on(self, settings: str, dimensions: int | None) -> str:
        """Make the index, unless it is there; the settings that it has. All records are due then."""
        if self._database.dialect not in ("sqlite", "postgresql"):
            raise ConfigurationError(f"search: {self._database.dialect} has no index here: use SQLite or PostgreSQL")
        if dimensions is not None and self._database.dialect != "postgresql":
            raise ConfigurationError("search: `embed` needs PostgreSQL with pgvector, or an `index` of your own")
        with self._database.long_write() as connection, _refused():
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql("SELECT pg_advisory_xact_lock(110420230914)")
            found = self._settings(connection)
            if found is None:
                if not tables.there(connection):
                    tables.create(connection)
                if dimensions is not None:
                    self._make_vectors(connection, dimensions)
                self._note(connection, settings)
        # After that: whatever is archived from now on is noted by the triggers, and nobody waits for this.
        with self._database.long_write() as connection:
            self._fill(connection)
        return found or settings

    def _make_vectors(self, connection: Connection, dimensions: int) -> None:
        installed = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
        if connection.exec_driver_sql(installed).scalar() is None:
            try:
                with connection.begin_nested():
                    connection.exec_driver_sql("CREATE EXTENSION vector")
            except exc.DBAPIError as error:
                why = str(error.orig).strip().partition("\n")[0]
                needs = "search: `embed` needs the extension pgvector in the database"
                raise ConfigurationError(f"{needs}: {why}") from error
        version = str(connection.exec_driver_sql(installed).scalar())
        if tuple(map(int, version.split(".")[:2])) < _OLDEST_PGVECTOR:
            raise ConfigurationError(f"search: `embed` needs pgvector 0.8 or newer, the database has {version}")
        connection.exec_driver_sql(tables.VECTORS)
        if dimensions <= _MOST_DIMENSIONS:
            connection.exec_driver_sql(tables.VECTOR_INDEX.format(dimensions))

    def _note(self, connection: Connection, settings: str) -> None:
        row = {"namespace": self._namespace, "settings": settings, "filled": False}
        connection.execute(insert(tables.indexes), row)
        n = namespaces.c
        count = connection.execute(select(n.partitions).where(n.namespace == self._namespace)).scalar() or 0
        rows = [{"namespace": self._namespace, "partition": at, "claim": "", "until_ms": 0} for at in range(count)]
        if rows:
            connection.execute(insert(tables.partitions), rows)

    def _fill(self, connection: Connection) -> None:
        """Note all records as due, once."""
        i, r = tables.indexes.c, records.c
        mine = i.namespace == self._namespace
        if connection.execute(select(i.filled).where(mine).with_for_update()).scalar() is not False:
            return
        every = select(r.namespace, r.partition, r.key).where(r.namespace == self._namespace, r.scope != ERASED)
        query = insert(tables.due).from_select(["namespace", "partition", "record"], every)
        if connection.dialect.name == "sqlite":
            query = query.prefix_with("OR IGNORE")
        connection.execute(query)
        connection.execute(update(tables.indexes).where(mine).values(filled=True))

    def switch_off(self) -> bool:
        """Remove the index of this namespace; False if there is none."""
        with self._database.long_write() as connection, _refused():
            if self._settings(connection) is None:
                return False
            r = records.c
            mine = select(r.key).where(r.namespace == self._namespace)
            for table in (tables.documents, tables.heads):
                connection.execute(delete(table).where(table.c.record.in_(mine)))
            for table in (tables.due, tables.partitions, tables.indexes):
                connection.execute(delete(table).where(table.c.namespace == self._namespace))
            if connection.execute(select(func.count()).select_from(tables.indexes)).scalar() == 0:
                tables.drop(connection)
            return True

    def behind(self, up_to: int | None = None) -> tuple[int, int]:
        """How many records there are, and how many have changes that the index lacks, of those noted up to there."""
        with self._database.read() as connection:
            if not tables.there(connection):
                return 0, 0
            r, d = records.c, tables.due.c
            mine = select(func.count()).where(r.namespace == self._namespace, r.scope != ERASED)
            lacking = select(func.count(distinct(d.record))).where(d.namespace == self._namespace)
            if up_to is not None:
                lacking = lacking.where(d.id <= up_to)
            return connection.execute(mine).scalar() or 0, connection.execute(lacking).scalar() or 0

    def last_due(self) -> int:
        """The number of the newest note."""
        with self._database.read() as connection:
            d = tables.due.c
            query = select(d.id).where(d.namespace == self._namespace).order_by(d.id.desc()).limit(1)
            return connection.execute(query).scalar() or 0

    def claim(self, some: Collection[int], claimer: str, now_ms: int, seconds: float) -> list[int]:
        """Those of the partitions that have something due and are nobody else's: the claimer's for so long."""
        with self._database.write() as connection:
            until_ms = now_ms + int(seconds * 1000)
            return search_feed.claim(connection, self._namespace, some, claimer, now_ms, until_ms)

    def waiting(self) -> list[int]:
        """The partitions that have something due."""
        with self._database.read() as connection:
            d = tables.due.c
            query = select(d.partition).where(d.namespace == self._namespace).distinct()
            return list(connection.execute(query).scalars())

    def release(self, claimer: str) -> None:
        """Leave to others what is claimed."""
        with self._database.write() as connection:
            search_feed.release(connection, self._namespace, claimer)

    def next_due(self, some: Collection[int], limit: int) -> list[tuple[search_feed.Due, search_feed.Changed | None]]:
        """The records that have waited longest, with their changes, or None where all has to be compared."""
        with self._database.long_read() as connection:
            found = search_feed.next_due(connection, self._namespace, some, limit)
            return [(one, None if one.gone else search_feed.changed(connection, one)) for one in found]

    def whole(self, one: search_feed.Due) -> search_feed.Whole:
        """All that a record shows, but for messages and items."""
        with self._database.long_read() as connection:
            return search_feed.whole(connection, self._namespace, one)

    def messages(self, one: search_feed.Due, run: Segment) -> list[search_feed.Piece]:
        """The messages of a run."""
        with self._database.long_read() as connection:
            return search_feed.messages(connection, self._namespace, one, run)

    def items_page(self, layer: Layer, after: tuple[bytes, bytes]) -> list[search_feed.Piece]:
        """The next items of a layer."""
        with self._database.long_read() as connection:
            return search_feed.items_page(connection, self._namespace, layer, after)

    def gone(self) -> list[str]:
        """The texts of erased records that an index elsewhere may have."""
        with self._database.read() as connection:
            d = tables.due.c
            query = select(d.gone).where(d.namespace == self._namespace, d.gone.is_not(None)).order_by(d.id)
            return list(connection.execute(query).scalars())

    def write(self, claimer: str, until_ms: int, writes: Sequence[search_feed.Write], language: str) -> set[int] | None:
        """Change the index; the records that it is done with. None: the claim is somebody else's now."""
        with self._database.long_write() as connection:
            return search_feed.write(connection, self._namespace, claimer, until_ms, writes, language)

    def search(
        self, query: SearchQuery, now_ms: int, language: str, vector: str | None, dimensions: int
    ) -> list[search_query.Row]:
        """What fits a query."""
        with self._database.read() as connection:
            return search_query.search(connection, self._namespace, query, now_ms, language, vector, dimensions)

    def languages(self) -> list[str]:
        """The text search configurations that the database has."""
        with self._database.read() as connection:
            if connection.dialect.name != "postgresql":
                return ["simple"]
            return list(connection.execute(text("SELECT cfgname FROM pg_ts_config")).scalars())


@contextmanager
def _refused() -> Iterator[None]:
    """Say what can be done where the database has no FTS5, or the role no right to make tables and triggers."""
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
