"""The archive of one namespace in SQL. Blocking, and safe to call from many threads.

Law: every method is one transaction (a purge: one per chunk), so it happened, or it did not.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar, Unpack

from sqlalchemy import Connection, Table, func, select
from sqlalchemy.engine import URL

from distributed_state.cold import (
    archive,
    backfill,
    blocks,
    commits,
    epochs,
    erasure,
    listings,
    opening,
    purging,
    quarantine,
    record_history,
    record_index,
    record_items,
    reencrypt,
)
from distributed_state.cold.access_tokens import AccessTokenStore
from distributed_state.cold.archive import Imported
from distributed_state.cold.branches import BranchStore
from distributed_state.cold.engine import Database, Part, keep_for_ever, reads, reads_long, writes, writes_long
from distributed_state.cold.opening import Known
from distributed_state.cold.search_store import SearchStore
from distributed_state.cold.tables import branches, cursors, erasures, records
from distributed_state.cold.values import (
    Backfilled,
    Batch,
    Compacted,
    Cursor,
    Held,
    Purged,
)
from distributed_state.errors import ConfigurationError
from distributed_state.values.journal import Happened, JournalEntry

T = TypeVar("T")
_CONNECTIONS = """
select (select count(*) from pg_stat_activity where backend_type = 'client backend'), setting
from pg_settings where name = 'max_connections'
"""


RECENT = 600.0  # seconds for which an epoch that began is news


MINTED = "epochs minted lately"


NEWEST = "newest quarantined"


NONE_MINTED = "none began behind another one lately"


_COUNTED = {"records": records, "cursors": cursors, "erasures": erasures}


class ColdStore(Part):
    """One namespace of a SQL database. Record texts, ids and users are given as `model.escape` writes them."""

    def __init__(self, database: Database, namespace: str, snapshot_every: int, opened: ExitStack) -> None:
        super().__init__(database, namespace)
        self.snapshot_every = snapshot_every
        self.branches = BranchStore(database, namespace)
        self.search = SearchStore(database, namespace)
        self.access_tokens = AccessTokenStore(database, namespace)
        self._opened = opened

    @classmethod
    def open(
        cls,
        url: str | URL,
        namespace: str,
        *,
        migrate: bool = True,
        snapshot_every: int = 100,
        timeout: float = 10.0,
        alone: bool = False,
    ) -> ColdStore:
        """Open a database: `memory`, `sqlite:///path`, `postgresql://...` or another SQLAlchemy URL.

        With `migrate` its tables are created or brought up to date first. `?prepare_threshold=none` makes
        PostgreSQL work behind PgBouncer. `timeout` seconds is what one answer may take. With `alone` no other embedded
        store has it open meanwhile. Raises ConfigurationError if waiting does not help, else ColdUnavailable.
        """
        if snapshot_every < 1:
            raise ConfigurationError(f"snapshot_every is {snapshot_every}, must be at least 1")
        with ExitStack() as stack:
            if alone:
                stack.enter_context(opening.file_alone(url))
            database = Database(url, timeout)
            stack.callback(database.close)
            opening.ready(database, migrate)
            if alone:
                stack.enter_context(opening.namespace_alone(database, namespace))
            database.opened = True
            return cls(database, namespace, snapshot_every, stack.pop_all())

    @classmethod
    def open_later(
        cls, url: str | URL, known: Known, *, migrate: bool = True, snapshot_every: int = 100, timeout: float = 10.0
    ) -> ColdStore:
        """Open a database that is away: everything raises ColdUnavailable until it is there.

        Then it is looked at as `open` does, and must be the one that is `known`; else everything raises
        ConfigurationError.
        """
        database = Database(url, timeout)

        def prove() -> None:
            opening.ready(database, migrate)
            opening.require_known(database, known)

        database.open_later(prove)
        stack = ExitStack()
        stack.callback(database.close)
        return cls(database, known.namespace, snapshot_every, stack)

    @property
    def away(self) -> str:
        """Why SQL is thought not to answer, "" if it did when it was last asked. Asks nobody."""
        return self._database.away

    def register(self, partitions: int) -> tuple[str, int]:
        """Return the archive's id and its partition count; at first use the id is random, the count is `partitions`."""
        return opening.register(self._database, self.namespace, partitions)

    # Epochs, and how far each partition is archived

    def cursor(self, partition: int) -> Cursor | None:
        """How far a partition was archived, in its newest epoch; None if it has none yet."""
        with self._database.read() as connection:
            return epochs.newest(connection, self.namespace, partition).get(partition)

    cursors = reads(epochs.newest)

    def read_if(
        self, partition: int, there: Callable[[Cursor | None], bool], read: Callable[[], T], *, long: bool
    ) -> list[T]:
        """[read()] if `there` accepts the cursor of the partition, else []. Both see the database at one moment.

        With `long` the statements may take as long as those of maintenance.
        """
        with self._database.one_read(long=long):
            return [read()] if there(self.cursor(partition)) else []

    mint = writes(epochs.mint)
    begin = writes(epochs.begin)
    begin_repaired = writes(epochs.begin_repaired)
    never_begun = writes(epochs.never_begun)
    any_begun = reads(epochs.any_begun)
    last_begun = reads(epochs.last_begun)
    last_events = reads(epochs.last_events)
    is_repaired = reads(epochs.is_repaired)
    minted_since = reads(epochs.minted_since)

    def clock_us(self) -> int:
        """The database's clock, in microseconds since 1970."""
        with self._database.read() as connection:
            return epochs.clock_us(connection)

    # Archiving

    def archive(self, batches: Sequence[Batch]) -> dict[int, set[str]]:
        """Archive in one transaction; return the partitions whose cursor was where the batch begins and moved.

        An entry that the database refuses for what is in it goes to quarantine, and the others go on: of each partition
        the events of those are returned.
        """
        with self._database.write() as connection:
            return archive.archive(connection, self.namespace, batches, self.snapshot_every)

    known_names = reads(record_index.known_names)
    holds = reads(commits.holds)
    has_version = reads(record_history.has_version)
    lacking = reads(commits.lacking)
    known = reads(commits.known_commits)

    def set_aside(self, partition: int, epoch: str, entries: Sequence[JournalEntry]) -> int:
        """Put into quarantine those of the entries that are held nowhere; how many that are."""
        reason = f"acknowledged under epoch {epoch}, which ended before it was archived"
        with self._database.write() as connection:
            return quarantine.set_aside_lacking(connection, self.namespace, partition, epoch, entries, reason)

    event_archived = reads(listings.event_archived)

    # Repair of an SQL that is older than Redis

    changed_since = reads(epochs.changed_since)

    def backfill(self, held: Held, after: Cursor | None, *, keep: bool) -> Backfilled | None:
        """Bring to SQL what Redis has of these records and SQL lacks, if a partition's cursor still is `after`.

        `keep`: change nothing, only say what would be done. None: the cursor moved.
        """
        with self._database.long_read() if keep else self._database.long_write() as connection:
            return backfill.backfill(connection, self.namespace, held, after, self.snapshot_every, keep=keep)

    def add_events(self, happened: Sequence[Happened], *, keep: bool) -> int:
        """Add those of a partition's events that SQL lacks; how many. `keep`: only count them."""
        with self._database.read() if keep else self._database.write() as connection:
            return backfill.add_events(connection, self.namespace, happened, keep=keep)

    reach = writes(epochs.reach)

    # Reading a record

    def version(self, record: str) -> int | None:
        """The archived head version; None if the record was never archived."""
        with self._database.read() as connection:
            head = record_index.find(connection, self.namespace, record)
        return head["version"] if head else None

    oldest = reads(record_history.oldest)
    load = reads(record_history.load)
    applied = reads(record_history.applied)
    state_at = reads(record_history.state_at)
    step_back = reads(record_history.step_back)
    history = reads_long(commits.entries)
    outlines = reads_long(commits.outlines)
    checkpoints = reads(commits.checkpoints)
    messages = reads_long(record_history.messages_of)
    message_lengths = reads(record_history.message_lengths)
    since = reads(record_history.since)
    items = reads(record_items.found)
    list_items = reads(record_items.page)
    items_changed_since = reads(record_items.changed_since)
    older_items = reads_long(record_items.older)

    # Listings and events

    listing = reads(listings.listing)
    count = reads(listings.count)
    count_items = reads(listings.count_items)
    mortal = reads(listings.mortal)
    forked = reads(listings.forked)
    owned = reads(listings.owned)
    audit = reads(listings.audit)
    event = reads(listings.event_by_id)

    # Erasure

    request = writes(erasure.request)
    request_owned = writes(erasure.request_owned)
    pending = reads(erasure.pending)

    def erase(self, names: Sequence[str]) -> None:
        """Remove every row of these records; the version of each stays under a hash of its text.

        Forks of a record keep what they share, unless it was noted that they go too: then they are noted.
        """
        with self._database.long_write() as connection:
            erasure.erase(connection, self.namespace, names)
        self.sync()

    def complete(self, done: Mapping[str, int]) -> None:
        """Forget that these records were to be erased up to these versions: they are gone from Redis."""
        with self._database.write() as connection:
            erasure.complete(connection, self.namespace, done)
        self.sync()

    # Maintenance

    def adopt(self, record: str, **imported: Unpack[Imported]) -> None:
        """Import a record with its history: `base` and its messages, then the changes after it.

        Raises Conflict if the record exists, or was erased at a version that is not below the first imported one.
        """
        with self._database.long_write() as connection:
            archive.adopt(connection, self.namespace, record, snapshot_every=self.snapshot_every, **imported)

    names = reads(reencrypt.names)
    rewrite = writes_long(reencrypt.rewrite)
    rewrite_events = writes_long(reencrypt.rewrite_events)

    def purge(
        self,
        before_ms: int,
        *,
        keep: int | None = None,
        events_before_ms: int | None = None,
        branches_before_ms: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Purged:
        """Remove history and events older than `before_ms`; every state at or after it stays readable, and so do forks.

        With `keep` also all but so many of the newest changes of each record. Calls `progress` after each chunk with
        the number of records purged so far.
        """
        return purging.purge_all(
            self._database, self.namespace, before_ms, keep, events_before_ms, branches_before_ms, progress
        )

    overfull = reads_long(record_history.overfull)

    def compact(self, before_ms: int, *, after: int = 0) -> tuple[Compacted, int | None]:
        """Pack old changes and messages of some records into compressed blocks, which are read as their rows were.

        Returns how much, and what `after` is for the next ones; None: those were the last.
        """
        return blocks.compact_page(self._database, self.namespace, before_ms, after)

    # The quarantine

    quarantined = reads(quarantine.quarantined)
    newest_quarantined = reads(quarantine.newest_quarantined)
    count_quarantined = reads(quarantine.count_quarantined)
    refusal = reads(quarantine.refusal)

    # The database

    def check(self) -> dict[str, str]:
        """Facts about the database, for a doctor."""
        facts = {"database": self._database.name, "dialect": self._database.dialect}
        with self._database.read() as connection:
            return facts | _facts(connection, self.namespace)

    def connections(self) -> tuple[int, int] | None:
        """How many connections the server has, and how many it allows; None for a file."""
        with self._database.read() as connection:
            return _connections(connection)

    def sync(self) -> bool:
        """On SQLite: move all that was committed into the database file. False if a reader was in the way."""
        return self._database.checkpoint()

    def close(self) -> None:
        """Close every connection."""
        self._opened.close()

    def abandon(self) -> None:
        """In a forked child: forget the parent's connections and locks without a word on the wire."""
        keep_for_ever(self._opened)
        self._opened = ExitStack()
        self._opened.callback(self._database.close)
        self._database.abandon()


def _facts(connection: Connection, namespace: str) -> dict[str, str]:
    """Facts about the server and the namespace's tables, by name."""
    version = connection.dialect.server_version_info or ()
    found = {
        "server version": ".".join(str(part) for part in version),
        "revision": str(opening.revision(connection)),
    }
    found |= {name: str(_count(connection, namespace, table)) for name, table in _COUNTED.items()}
    found["quarantined"] = str(quarantine.count_quarantined(connection, namespace))
    b = branches.c
    records_of = select(func.count(b.record.distinct())).where(b.namespace == namespace)
    minted = epochs.minted_since(connection, namespace, RECENT)
    lately = f"{minted.partitions} partitions began another one within ten minutes, the last {minted.ago:.0f} s ago"
    found[MINTED] = lately if minted.partitions else NONE_MINTED
    if newest := quarantine.newest_quarantined(connection, namespace):
        found[NEWEST] = f"{newest[0][:200]} version {newest[1]}: {newest[2][:500]}"
    found["branched records"] = str(connection.execute(records_of).scalar_one())
    if connection.dialect.name == "postgresql":
        used, most = _connections(connection) or (0, 0)
        found |= {"connections": str(used), "most connections": str(most)}
    if connection.dialect.name == "sqlite":
        found["journal mode"] = str(connection.exec_driver_sql("PRAGMA journal_mode").scalar())
    return found


def _count(connection: Connection, namespace: str, table: Table) -> int:
    """How many rows of this table the namespace has."""
    query = select(func.count()).select_from(table).where(table.c.namespace == namespace)
    return int(connection.execute(query).scalar_one())


def _connections(connection: Connection) -> tuple[int, int] | None:
    """How many connections the server has, and how many it allows; None for a file."""
    if connection.dialect.name != "postgresql":
        return None
    used, most = connection.exec_driver_sql(_CONNECTIONS).one()
    return int(used), int(most)
