"""The index of one namespace. Blocking, and safe to call from many threads. Law: every method is one transaction.

Design: section 21.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection, delete, exc, func, insert, select, text, update

from distributed_state.cold import search_due, search_feed, search_query
from distributed_state.cold import search_tables as tables
from distributed_state.cold.engine import Database
from distributed_state.cold.record_index import ERASED
from distributed_state.cold.record_items import Layer
from distributed_state.cold.search_due import Due
from distributed_state.cold.tables import namespaces, records
from distributed_state.errors import ConfigurationError
from distributed_state.values.journal import Segment
from distributed_state.values.search import SearchQuery

_MOST_DIMENSIONS = 2000  # of an index of pgvector
_OLDEST_PGVECTOR = (0, 8)  # before, what a filter left out was not made up for
_NO_RIGHT = "42501"
_BYTES = 2**22  # of changes that are read together


class SearchStore:
    """The index in the archive's database, and what it lacks."""

    def __init__(self, database: Database, namespace: str) -> None:
        self._database = database
        self._namespace = namespace

    def settings(self) -> str | None:
        """What search was switched on with in this namespace; None if it was not, or not to the end."""
        with self._database.read() as connection:
            return self._settings(connection)

    def _settings(self, connection: Connection) -> str | None:
        found = self._found(connection)
        return found[0] if found and found[1] else None

    def _found(self, connection: Connection) -> tuple[str, bool] | None:
        """The settings, and whether all records were noted since."""
        if not tables.there(connection):
            return None
        i = tables.indexes.c
        row = connection.execute(select(i.settings, i.filled).where(i.namespace == self._namespace)).first()
        return (row[0], row[1]) if row else None

    def switch_on(self, settings: str, dimensions: int | None) -> str:
        """Make the index, unless it is there; the settings that it has. All records are due then."""
        if self._database.dialect not in ("sqlite", "postgresql"):
            raise ConfigurationError(f"search: {self._database.dialect} has no index here: use SQLite or PostgreSQL")
        if dimensions is not None and self._database.dialect != "postgresql":
            raise ConfigurationError("search: `embed` needs PostgreSQL with pgvector, or an `index` of your own")
        with self._database.long_write() as connection, _refused():
            self._hold(connection)
            found = self._found(connection)
            if found is None:
                # What others are at was begun when nothing of this namespace was noted; after that it is.
                tables.lock(connection, "SHARE ROW EXCLUSIVE")
                if not tables.there(connection):
                    tables.create(connection)
                if dimensions is not None:
                    self._make_vectors(connection, dimensions)
                self._note(connection, settings)
        # After that: whatever is archived from now on is noted by the triggers, and nobody waits for this.
        with self._database.long_write() as connection:
            self._fill(connection)
        return found[0] if found else settings

    def _hold(self, connection: Connection) -> None:
        """Let nobody else switch it on or off."""
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(110420230914)")

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
        connection.execute(insert(tables.due).from_select(["namespace", "partition", "record"], every))
        connection.execute(update(tables.indexes).where(mine).values(filled=True))

    def switch_off(self) -> bool:
        """Remove the index of this namespace; False if there is none."""
        with self._database.long_write() as connection, _refused():
            self._hold(connection)
            if self._found(connection) is None:
                return False
            last = connection.execute(select(func.count()).select_from(tables.indexes)).scalar() == 1
            if last:
                # Before any row: an erasure that has deleted a record goes on to the row of its partition.
                tables.lock(connection, "ACCESS EXCLUSIVE")
            # Who writes the index just now is waited for, and has no claim any more when it goes on.
            p, r = tables.partitions.c, records.c
            connection.execute(
                select(p.partition).where(p.namespace == self._namespace).order_by(p.partition).with_for_update()
            )
            mine = select(r.key).where(r.namespace == self._namespace)
            for table in (tables.documents, tables.heads):
                connection.execute(delete(table).where(table.c.record.in_(mine)))
            for table in (tables.due, tables.partitions, tables.indexes):
                connection.execute(delete(table).where(table.c.namespace == self._namespace))
            if last:
                tables.drop(connection)
            return True

    def records(self) -> int:
        """How many records there are."""
        with self._database.read() as connection:
            r = records.c
            query = select(func.count()).where(r.namespace == self._namespace, r.scope != ERASED)
            return connection.execute(query).scalar() or 0

    def lacking(self, up_to: int | None = None) -> int:
        """How many records have changes that the index lacks, of those noted up to there."""
        with self._database.read() as connection:
            return search_due.lacking(connection, self._namespace, up_to)

    def last_due(self) -> int:
        """The number of the newest note."""
        with self._database.read() as connection:
            return search_due.last(connection, self._namespace)

    def waits(self, up_to: int) -> bool:
        """Whether anything of what was noted up to there is due still."""
        with self._database.read() as connection:
            return search_due.waits(connection, self._namespace, up_to)

    def waiting(self, settings: str) -> list[int] | None:
        """The partitions that have something due. None: the index is not the one of these settings any more."""
        with self._database.read() as connection:
            if self._settings(connection) != settings:
                return None
            return search_due.waiting(connection, self._namespace)

    def claim(
        self, some: Collection[int], claimer: str, now_ms: int, seconds: float, settings: str
    ) -> list[int] | None:
        """Those of the partitions that have something due and are nobody else's: the claimer's for so long.

        None: the index is not the one of these settings any more.
        """
        with self._database.write() as connection:
            if self._settings(connection) != settings:
                return None
            until_ms = now_ms + int(seconds * 1000)
            return search_due.claim(connection, self._namespace, some, claimer, now_ms, until_ms)

    def release(self, claimer: str) -> None:
        """Leave to others what is claimed."""
        with self._database.write() as connection:
            search_due.release(connection, self._namespace, claimer)

    def next_due(self, some: Collection[int], limit: int) -> tuple[list[Due], bool]:
        """The records that have waited longest, and whether there may be more."""
        with self._database.long_read() as connection:
            return search_due.next_due(connection, self._namespace, some, limit)

    def changes(self, some: Sequence[Due]) -> list[search_feed.Changed | None]:
        """What changed of the first of these, as many as are read together; None where all has to be compared."""
        found: list[search_feed.Changed | None] = []
        size = 0
        with self._database.long_read() as connection:
            for one in some:
                changed = None if one.gone else search_feed.changed(connection, one)
                found.append(changed)
                size += changed.size if changed else 0
                if size >= _BYTES:
                    break
        return found

    def whole(self, one: Due) -> search_feed.Whole:
        """All that a record shows, but for messages and items."""
        with self._database.long_read() as connection:
            return search_feed.whole(connection, self._namespace, one)

    def messages(self, one: Due, run: Segment) -> tuple[list[search_feed.Piece], Segment | None]:
        """The next messages of a run, and the rest of it."""
        with self._database.long_read() as connection:
            return search_feed.messages(connection, self._namespace, one, run)

    def items_page(self, layer: Layer, after: tuple[bytes, bytes]) -> list[search_feed.Piece]:
        """The next items of a layer."""
        with self._database.long_read() as connection:
            return search_feed.items_page(connection, self._namespace, layer, after)

    def scrub(self) -> None:
        """Have nothing left of what was removed: SQLite's index keeps the words until it is merged."""
        if self._database.dialect == "sqlite":
            with self._database.long_write() as connection:
                tables.scrub(connection)

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
        self, query: SearchQuery, now_ms: int, language: str, vector: str | None, dimensions: int, settings: str,
        apart: bool,
    ) -> search_query.Page | None:  # fmt: skip
        """What fits a query. None: the index is not the one of these settings any more."""
        with self._database.read() as connection:
            if self._settings(connection) != settings:
                return None
            how = (language, vector, dimensions, apart)
            return search_query.search(connection, self._namespace, query, now_ms, *how)

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
