"""The archive of one namespace in SQL. Blocking, and safe to call from many threads.

Law: every method is one transaction (a purge: one per chunk), so it happened, or it did not.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar, Unpack

from sqlalchemy.engine import URL

from distributed_state.cold import (
    archive,
    backfill,
    blocks,
    commits,
    epochs,
    erasure,
    history,
    import_record,
    inspection,
    listing,
    opening,
    purging,
    quarantine,
    record_index,
    record_items,
    reencrypt,
)
from distributed_state.cold.access_tokens import AccessTokenStore
from distributed_state.cold.branches import BranchStore
from distributed_state.cold.engine import Database, keep_for_ever
from distributed_state.cold.entries import Parsed
from distributed_state.cold.opening import Known
from distributed_state.cold.record_items import FoundItems, FoundPage, OlderItem, Range
from distributed_state.cold.search_store import SearchStore
from distributed_state.cold.values import (
    Backfilled,
    Batch,
    Commits,
    Compacted,
    Cursor,
    Erasure,
    Held,
    Listed,
    Minted,
    Mortal,
    Purged,
    Quarantined,
    Sought,
    Wanted,
)
from distributed_state.errors import ConfigurationError
from distributed_state.values.journal import Happened, JournalEntry, Loaded, Segment, State

T = TypeVar("T")


class ColdStore:
    """One namespace of a SQL database. Record texts, ids and users are given as `model.escape` writes them."""

    def __init__(self, database: Database, namespace: str, snapshot_every: int, opened: ExitStack) -> None:
        self.namespace = namespace
        self.snapshot_every = snapshot_every
        self.branches = BranchStore(database, namespace)
        self.search = SearchStore(database, namespace)
        self.access_tokens = AccessTokenStore(database, namespace)
        self._database = database
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

    def cursor(self, partition: int) -> Cursor | None:
        """How far a partition was archived, in its newest epoch; None if it has none yet."""
        with self._database.read() as connection:
            return epochs.newest(connection, self.namespace, partition).get(partition)

    def read_if(
        self, partition: int, there: Callable[[Cursor | None], bool], read: Callable[[], T], *, long: bool
    ) -> list[T]:
        """[read()] if `there` accepts the cursor of the partition, else []. Both see the database at one moment.

        With `long` the statements may take as long as those of maintenance.
        """
        with self._database.one_read(long=long):
            return [read()] if there(self.cursor(partition)) else []

    def cursors(self) -> dict[int, Cursor]:
        """How far each partition was archived, in its newest epoch."""
        with self._database.read() as connection:
            return epochs.newest(connection, self.namespace)

    def mint(self, partition: int, after: Cursor | None) -> Cursor | None:
        """Start a new epoch if the archive still is at `after`, else return None.

        From then on nothing is archived under an older epoch.
        """
        with self._database.write() as connection:
            return epochs.mint(connection, self.namespace, partition, after)

    def known_names(self, partition: int) -> list[str] | None:
        """The texts of all records of a partition; None if that is not known, or would take long."""
        with self._database.read() as connection:
            return record_index.known_names(connection, self.namespace, partition)

    def last_begun(self, partition: int, epoch: str) -> Cursor | None:
        """How far an epoch was archived, if nothing was of any that was minted after it."""
        with self._database.read() as connection:
            return epochs.last_begun(connection, self.namespace, partition, epoch)

    def last_events(self) -> dict[int, tuple[int, int | None]]:
        """How many epochs of each partition were used, and the last lifecycle event of the last one, if it is open."""
        with self._database.read() as connection:
            return epochs.last_events(connection, self.namespace)

    def is_repaired(self, partition: int, epoch: str) -> bool:
        """Whether a repair brought SQL all of an epoch, which was to end then."""
        with self._database.read() as connection:
            return epochs.is_repaired(connection, self.namespace, partition, epoch)

    def begin(self, partition: int, epoch: str) -> None:
        """Note that Redis is told of an epoch now."""
        with self._database.write() as connection:
            epochs.begin(connection, self.namespace, partition, epoch)

    def begin_repaired(self, partition: int, epoch: str) -> None:
        """As `begin`, for an epoch that a repair of SQL begins."""
        with self._database.write() as connection:
            epochs.begin_repaired(connection, self.namespace, partition, epoch)

    def never_begun(self, partition: int, epoch: str) -> None:
        """Note that Redis did not take it."""
        with self._database.write() as connection:
            epochs.never_begun(connection, self.namespace, partition, epoch)

    def any_begun(self, partition: int) -> bool:
        """Whether an epoch of the partition ever began: else Redis cannot have lost any of it."""
        with self._database.read() as connection:
            return epochs.any_begun(connection, self.namespace, partition)

    def minted_since(self, seconds: float) -> Minted:
        """The partitions that began another epoch within the last seconds, behind one that had begun; no repairs."""
        with self._database.read() as connection:
            return epochs.minted_since(connection, self.namespace, seconds)

    def changed_since(self, partition: int, since_ms: int) -> epochs.Changed:
        """Which records of a partition changed since then, and which were erased."""
        with self._database.read() as connection:
            return epochs.changed_since(connection, self.namespace, partition, since_ms)

    def clock_us(self) -> int:
        """The database's clock, in microseconds since 1970."""
        with self._database.read() as connection:
            return epochs.clock_us(connection)

    def archive(self, batches: Sequence[Batch]) -> dict[int, set[str]]:
        """Archive in one transaction; return the partitions whose cursor was where the batch begins and moved.

        An entry that the database refuses for what is in it goes to quarantine, and the others go on: of each partition
        the events of those are returned.
        """
        with self._database.write() as connection:
            return archive.archive(connection, self.namespace, batches, self.snapshot_every)

    def holds(self, record: str, version: int, event: str) -> bool:
        """Whether this very change was archived: at its version there may be another one, or it is in quarantine."""
        with self._database.read() as connection:
            return commits.holds(connection, self.namespace, record, version, event)

    def has_version(self, record: str, version: int) -> bool:
        """Whether SQL has a record's version, or had it and purged or erased it, or has a later one that came whole."""
        with self._database.read() as connection:
            return history.has_version(connection, self.namespace, record, version)

    def refusal(self, event: str) -> str:
        """Why the entry of this event is in quarantine; "" if it is not."""
        with self._database.read() as connection:
            return quarantine.refusal(connection, self.namespace, event)

    def lacking(self, partition: int, epoch: str, entries: Sequence[JournalEntry]) -> set[str]:
        """The events of those entries that are held nowhere, without those of records that were erased since."""
        with self._database.read() as connection:
            return commits.lacking(connection, self.namespace, partition, epoch, entries)

    def known(self, partition: int, epoch: str, entries: Sequence[JournalEntry]) -> Commits:
        """What SQL has of these entries of an epoch, and of their records."""
        with self._database.read() as connection:
            return commits.known_commits(connection, self.namespace, partition, epoch, entries)

    def set_aside(self, partition: int, epoch: str, entries: Sequence[JournalEntry]) -> int:
        """Put into quarantine those of the entries that are held nowhere; how many that are."""
        reason = f"acknowledged under epoch {epoch}, which ended before it was archived"
        with self._database.write() as connection:
            return quarantine.set_aside_lacking(connection, self.namespace, partition, epoch, entries, reason)

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

    def reach(self, after: Cursor | None, to: Cursor) -> bool:
        """Note that SQL has all of a partition up to there, if its cursor still is `after`."""
        with self._database.write() as connection:
            return epochs.reach(connection, self.namespace, after, to)

    def event_archived(self, partition: int, epoch: str, offset: int, id: str) -> bool:
        """Whether this very event was archived: at its offset there may be another one, or it is in quarantine."""
        with self._database.read() as connection:
            return inspection.event_archived(connection, self.namespace, partition, epoch, offset, id)

    def load(self, record: str, *, window: int) -> Loaded | None:
        """The head of a record and its last `window` visible messages.

        None if it was never archived. One that was erased, or purged when deleted, has only `#deleted` and its version.
        """
        with self._database.read() as connection:
            return history.load(connection, self.namespace, record, window)

    def applied(self, record: str, event: str, since_ms: int) -> int:
        """The version that a commit became, given its event id; 0 if there is none, of those from a time on at least.

        Raises NotFound if what was committed since was purged, so that it cannot be said.
        """
        with self._database.read() as connection:
            return history.applied(connection, self.namespace, record, event, since_ms)

    def state_at(self, record: str, version: int) -> State:
        """The state of a record at a version. Raises NotFound, naming the oldest, if it cannot be read."""
        with self._database.read() as connection:
            return history.state_at(connection, self.namespace, record, version)

    def step_back(self, record: str, version: int, steps: int) -> int:
        """The version whose state is this many before that of `version`. Raises NotFound if there are not so many."""
        with self._database.read() as connection:
            return history.step_back(connection, self.namespace, record, version, steps)

    def messages(self, record: str, runs: Sequence[Segment], parent: str | None = None) -> dict[int, bytes]:
        """The messages of these runs, by sequence number; `parent` is what the record was forked from."""
        with self._database.long_read() as connection:
            return history.messages_of(connection, self.namespace, record, runs, parent)

    def message_lengths(self, record: str, runs: Sequence[Segment]) -> dict[int, int]:
        """How many bytes the messages of these runs have at most, by sequence number."""
        with self._database.read() as connection:
            return history.message_lengths(connection, self.namespace, record, runs)

    def since(self, record: str, runs: Sequence[Segment], since_ms: int) -> list[Segment]:
        """The runs cut down to the messages that were committed at this time or later."""
        with self._database.read() as connection:
            return history.since(connection, self.namespace, record, runs, since_ms)

    def items(
        self,
        record: str,
        version: int | None,
        names: Collection[bytes],
        collections: Collection[bytes] = (),
        *,
        exact: bool = False,
    ) -> FoundItems | None:
        """Items of a record, by collection, NUL and key, as of a version, None: its head; see `item_reading.found`."""
        with self._database.read() as connection:
            return record_items.found(connection, self.namespace, record, version, names, collections, exact=exact)

    def list_items(
        self,
        record: str,
        version: int | None,
        wanted: Range,
        limit: int,
        size: int,
        known: Collection[bytes] = (),
        *,
        exact: bool = False,
    ) -> FoundPage | None:
        """A page of a collection, without the keys that are known; see `item_reading.page`."""
        with self._database.read() as connection:
            given = (record, version, wanted, limit, size, known)
            return record_items.page(connection, self.namespace, *given, exact=exact)

    def older_items(self, record: str, base: int, rollbacks: Mapping[int, int]) -> list[OlderItem]:
        """The items that an exported record needs beside its changes behind a version; see `item_export.older`."""
        with self._database.long_read() as connection:
            return record_items.older(connection, self.namespace, record, base, rollbacks)

    def items_changed_since(self, record: str, version: int) -> bool:
        """Whether a record put or deleted any item after a version."""
        with self._database.read() as connection:
            return record_items.changed_since(connection, self.namespace, record, version)

    def history(
        self,
        record: str,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        most: int | None = None,
    ) -> list[JournalEntry]:
        """The changes with versions between `after` and `before`, both exclusive, ascending.

        With `most` they are about that many bytes together, but at least one change.
        """
        with self._database.long_read() as connection:
            return commits.entries(connection, self.namespace, record, after, before, limit, most)

    def outlines(
        self,
        record: str,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        most: int | None = None,
    ) -> list[JournalEntry]:
        """The same without what their messages and items say."""
        with self._database.long_read() as connection:
            return commits.outlines(connection, self.namespace, record, after, before, limit, most)

    def version(self, record: str) -> int | None:
        """The archived head version; None if the record was never archived."""
        with self._database.read() as connection:
            head = record_index.find(connection, self.namespace, record)
        return head["version"] if head else None

    def oldest(self, record: str) -> int:
        """The first version that can still be read. Raises NotFound if the record was never archived."""
        with self._database.read() as connection:
            return history.oldest(connection, self.namespace, record)

    def checkpoints(
        self, record: str, after: int = 0, before: int | None = None, limit: int | None = None, order: str = "asc"
    ) -> list[tuple[str, int, int]]:
        """Labels with their versions and times in milliseconds, between two versions (exclusive), in this order."""
        with self._database.read() as connection:
            return commits.checkpoints(connection, self.namespace, record, after, before, limit, order)

    def listing(self, wanted: Wanted, late: Sequence[Parsed] = ()) -> list[Listed]:
        """A page of records, with what these changes did to them, which were read before.

        `wanted.after` is the `cursor` of the last row seen; anything else raises InvalidValue.
        """
        with self._database.read() as connection:
            return listing.listing(connection, self.namespace, wanted, late)

    def forked(self, record: str, limit: int) -> list[tuple[str, int | None, int, bool]]:
        """What was forked from a record, the newest first; see `inspection.forked`."""
        with self._database.read() as connection:
            return inspection.forked(connection, self.namespace, record, limit)

    def count(self, scope: str, prefix: str, most: int) -> int:
        """How many records of a scope begin so, up to `most`; deleted ones are not counted."""
        with self._database.read() as connection:
            return listing.count(connection, self.namespace, scope, prefix, most)

    def count_items(self, prefix: str, most: int) -> int:
        """How many items have the records that begin so, up to `most`; see `listing.count_items`."""
        with self._database.read() as connection:
            return listing.count_items(connection, self.namespace, prefix, most)

    def mortal(self, partitions: Sequence[int], *, after: str, limit: int) -> list[Mortal]:
        """Records of these partitions that have a lifetime, those after `after`, in order of their texts."""
        with self._database.read() as connection:
            return listing.mortal(connection, self.namespace, partitions, after, limit)

    def audit(self, sought: Sought) -> list[Happened]:
        """The events asked for, oldest first."""
        with self._database.read() as connection:
            return inspection.audit(connection, self.namespace, sought)

    def event(self, partition: int, id: str, since_ms: int) -> Happened | None:
        """An event by its id, among those of a partition from a time on."""
        with self._database.read() as connection:
            return inspection.event(connection, self.namespace, partition, id, since_ms)

    def owned(self, user: str) -> list[str]:
        """The records of a user in any scope, deleted ones too, and transitively all their forks."""
        with self._database.read() as connection:
            return listing.owned(connection, self.namespace, user)

    def request_owned(self, user: str, actor: str = "") -> list[Erasure]:
        """Note what `owned` finds as to be erased; what is pending for the user, from earlier requests too."""
        with self._database.write() as connection:
            return erasure.request_owned(connection, self.namespace, user, actor)

    def request(self, record: str, actor: str = "") -> list[Erasure]:
        """Note a record as to be erased if there is anything of it here; what is pending for it."""
        with self._database.write() as connection:
            return erasure.request(connection, self.namespace, record, actor)

    def pending(
        self,
        *,
        names: Sequence[str] | None = None,
        partitions: Sequence[int] | None = None,
        limit: int | None = None,
    ) -> list[Erasure]:
        """Erasures that were begun and are not complete."""
        with self._database.read() as connection:
            return erasure.pending(connection, self.namespace, names=names, partitions=partitions, limit=limit)

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

    def names(self, after: str) -> list[str]:
        """Some records that follow this one in the order of their texts, deleted ones too."""
        with self._database.read() as connection:
            return reencrypt.names(connection, self.namespace, after)

    def rewrite(self, record: str, convert: reencrypt.Rewrite, *, keep: bool) -> int:
        """Store all values of a record under another encryption; how many. With `keep` nothing is changed."""
        with self._database.long_write() as connection:
            return reencrypt.rewrite(connection, self.namespace, record, convert, keep=keep)

    def rewrite_events(
        self, after: reencrypt.EventKey, convert: reencrypt.Rewrite, *, keep: bool
    ) -> tuple[reencrypt.EventKey | None, int]:
        """Store a page of events under another encryption; where it ends, None after the last one, and how many."""
        with self._database.long_write() as connection:
            return reencrypt.rewrite_events(connection, self.namespace, after, convert, keep=keep)

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

    def overfull(self, keep: int | None, before_ms: int | None, after: int) -> tuple[list[str], int | None]:
        """Of the next records those that show more than `keep` messages, or older ones; and where to go on."""
        with self._database.long_read() as connection:
            return history.overfull(connection, self.namespace, keep, before_ms, after)

    def compact(self, before_ms: int, *, after: int = 0) -> tuple[Compacted, int | None]:
        """Pack old changes and messages of some records into compressed blocks, which are read as their rows were.

        Returns how much, and what `after` is for the next ones; None: those were the last.
        """
        return blocks.compact_page(self._database, self.namespace, before_ms, after)

    def adopt(self, record: str, **imported: Unpack[import_record.Imported]) -> None:
        """Import a record with its history: `base` and its messages, then the changes after it.

        Raises Conflict if the record exists, or was erased at a version that is not below the first imported one.
        """
        with self._database.long_write() as connection:
            import_record.adopt(connection, self.namespace, record, snapshot_every=self.snapshot_every, **imported)

    def quarantined(self) -> list[Quarantined]:
        """The entries that could not be archived, or that a newer epoch replaced, oldest first."""
        with self._database.read() as connection:
            return quarantine.quarantined(connection, self.namespace)

    def newest_quarantined(self) -> tuple[str, int, str] | None:
        """The entry that came into quarantine last: its record, version and the reason."""
        with self._database.read() as connection:
            return quarantine.newest_quarantined(connection, self.namespace)

    def count_quarantined(self) -> int:
        """How many entries are in quarantine, without those of which nothing is lost."""
        with self._database.read() as connection:
            return quarantine.count_quarantined(connection, self.namespace)

    def check(self) -> dict[str, str]:
        """Facts about the database, for a doctor."""
        facts = {"database": self._database.name, "dialect": self._database.dialect}
        with self._database.read() as connection:
            return facts | inspection.facts(connection, self.namespace)

    def connections(self) -> tuple[int, int] | None:
        """How many connections the server has, and how many it allows; None for a file."""
        with self._database.read() as connection:
            return inspection.connections(connection)

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
