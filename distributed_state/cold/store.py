"""The archive of one namespace in SQL. Blocking, and safe to call from many threads.

Law: every method is one transaction (maintenance: one for each page), so it happens completely or not at all. Most
methods are functions of this folder's other files, which take the transaction first; they are described there.

Design: sections 9, 17.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar, Unpack

from sqlalchemy import Row, Table, func, insert, select, tuple_, update
from sqlalchemy.engine import URL

from distributed_state.cold import (
    archive,
    aside,
    backfill,
    epochs,
    erasure,
    listings,
    maintenance,
    opening,
    record_history,
    record_index,
    record_items,
    usage,
)
from distributed_state.cold.archive import Imported
from distributed_state.cold.aside import BranchStore
from distributed_state.cold.engine import Database, Part, Sql, keep_for_ever, reads, reads_long, writes, writes_long
from distributed_state.cold.epochs import clock_us
from distributed_state.cold.opening import Known
from distributed_state.cold.search_store import SearchStore
from distributed_state.cold.tables import access_tokens, branches, cursors, erasures, records
from distributed_state.cold.values import Backfilled, Batch, Cursor, Held
from distributed_state.errors import ConfigurationError, InvalidValue, NotFound, Unauthenticated
from distributed_state.values.access_tokens import AccessToken, FoundToken
from distributed_state.values.journal import Happened

_c = access_tokens.c
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
T = TypeVar("T")
_CONNECTIONS = """
select (select count(*) from pg_stat_activity where backend_type = 'client backend'), setting
from pg_settings where name = 'max_connections'
"""
RECENT = 600.0  # seconds for which a new epoch is reported
MINTED = "epochs minted lately"
NEWEST = "newest quarantined"
NONE_MINTED = "none began behind another one lately"
_COUNTED = {"records": records, "cursors": cursors, "erasures": erasures}


class ColdStore(Part):
    """One namespace of a SQL database.

    Record texts, ids and users are passed in the form that `model.escape` writes.
    """

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
        """Open a database: `memory`, `sqlite:///path` or `postgresql://...`.

        With `migrate` its tables are created or brought up to date first. `?prepare_threshold=none` makes
        PostgreSQL work behind PgBouncer. `timeout` is the limit for one answer, in seconds. With `alone` no other
        embedded store may have the database open. Raises ConfigurationError if waiting does not help, else
        ColdUnavailable.
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
        """Open a database that is down: every method raises ColdUnavailable until it is available.

        It is then checked like in `open`, and must be the `known` one; else every method raises ConfigurationError.
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
        """Why SQL was unreachable at the last transaction, "" if it was not. Does not ask the server."""
        return self.database.away

    def register(self, partitions: int) -> tuple[str, int]:
        """Return the archive's id and its partition count; at first use the id is random, the count is `partitions`."""
        return opening.register(self.database, self.namespace, partitions)

    # Epochs, and how far each partition is archived

    cursor = reads(epochs.cursor)
    cursors = reads(epochs.newest)
    mint = writes(epochs.mint)
    begin = writes(epochs.begin)
    begin_complete = writes(epochs.begin_complete)
    never_begun = writes(epochs.never_begun)
    any_begun = reads(epochs.any_begun)
    last_begun = reads(epochs.last_begun)
    last_events = reads(epochs.last_events)
    is_repaired = reads(epochs.is_repaired)
    minted_since = reads(epochs.minted_since)
    clock_us = reads(epochs.clock_us)

    def read_if(
        self, partition: int, there: Callable[[Cursor | None], bool], read: Callable[[], T], *, long: bool
    ) -> list[T]:
        """[read()] if `there` accepts the cursor of the partition, else []. Both see one snapshot of the database.

        With `long` the statements have the limits of maintenance.
        """
        with self.database.one_read(self.namespace, long=long):
            return [read()] if there(self.cursor(partition)) else []

    # Archiving

    def archive(self, batches: Sequence[Batch]) -> dict[int, set[str]]:
        """Archive in one transaction; return the partitions whose cursor was at the start of its batch and moved.

        If the database refuses an entry for its content, the entry goes to quarantine and the others are archived. Each
        partition comes with the events of its quarantined entries.
        """
        with self.database.write(self.namespace) as sql:
            return archive.archive(sql, batches, self.snapshot_every)

    known_names = reads(record_index.known_names)
    holds = reads(record_history.holds)
    has_version = reads(record_history.has_version)
    lacking = reads(record_history.lacking)
    known = reads(record_history.known_commits)
    set_aside = writes(aside.set_aside_acknowledged)
    event_archived = reads(listings.event_archived)

    # Repair of a database that is older than Redis

    changed_since = reads(epochs.changed_since)
    reach = writes(epochs.reach)

    def backfill(self, held: Held, after: Cursor | None, *, keep: bool) -> Backfilled | None:
        """Bring SQL up to Redis for these records, if the partition's cursor is still `after`.

        `keep`: change nothing, only report what would be done. None: the cursor moved.
        """
        transaction = self.database.long_read if keep else self.database.long_write
        with transaction(self.namespace) as sql:
            return backfill.backfill(sql, held, after, self.snapshot_every, keep=keep)

    def add_events(self, happened: Sequence[Happened], *, keep: bool) -> int:
        """Add the events of a partition that SQL lacks; return how many. `keep`: only count them."""
        with (self.database.read if keep else self.database.write)(self.namespace) as sql:
            return backfill.add_events(sql, happened, keep=keep)

    # Reading a record

    version = reads(record_index.version)
    oldest = reads(record_index.oldest)
    load = reads(record_history.load)
    applied = reads(record_history.applied)
    state_at = reads(record_history.state_at)
    step_back = reads(record_history.step_back)
    history = reads_long(record_history.entries)
    outlines = reads_long(record_history.outlines)
    checkpoints = reads(record_history.checkpoints)
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
    usage = reads(usage.total)
    mortal = reads(listings.mortal)
    due = reads(listings.due)
    count_stuck = reads(listings.count_stuck)
    forked = reads(listings.forked)
    owned = reads(listings.owned)
    audit = reads(listings.audit)
    event = reads(listings.event_by_id)

    # Erasure

    request = writes(erasure.request)
    request_owned = writes(erasure.request_owned)
    pending = reads(erasure.pending)

    def erase(self, names: Sequence[str]) -> None:
        """Remove every row of these records; a row under a hash of its text keeps each record's version.

        Forks keep what they share with a record, unless the request includes forks: then an erasure is noted for each.
        """
        with self.database.long_write(self.namespace) as sql:
            erasure.erase(sql, names)
        self.sync()

    def complete(self, done: Mapping[str, int]) -> None:
        """Complete the erasure of these records up to these versions, because Redis no longer has them."""
        with self.database.write(self.namespace) as sql:
            erasure.complete(sql, done)
        self.sync()

    # Maintenance

    def adopt(self, record: str, **imported: Unpack[Imported]) -> None:
        """Import a record with its history: `base` and its messages, then the changes after it.

        Raises Conflict if the record exists, or was erased at a version that is not below the first imported one.
        """
        with self.database.long_write(self.namespace) as sql:
            archive.adopt(sql, record, snapshot_every=self.snapshot_every, **imported)

    names = reads(maintenance.names)
    rewrite = writes_long(maintenance.rewrite)
    rewrite_events = writes_long(maintenance.rewrite_events)
    purge = maintenance.purge_all
    overfull = reads_long(record_history.overfull)
    compact = maintenance.compact_page

    # The quarantine

    quarantined = reads(aside.quarantined)
    newest_quarantined = reads(aside.newest_quarantined)
    count_quarantined = reads(aside.count_quarantined)
    refusal = reads(aside.refusal)

    # The database

    def check(self) -> dict[str, str]:
        """Facts about the database, for the doctor."""
        with self.database.read(self.namespace) as sql:
            return {"database": self.database.name, "dialect": self.database.dialect} | _facts(sql)

    def connections(self) -> tuple[int, int] | None:
        """How many connections the server has, and how many it allows; None for a file."""
        with self.database.read() as sql:
            return _connections(sql)

    def sync(self) -> bool:
        """On SQLite: move all commits into the database file. False if a reader prevented it."""
        return self.database.checkpoint()

    def close(self) -> None:
        """Close the database and release its locks."""
        self._opened.close()

    def abandon(self) -> None:
        """In a forked child: drop the parent's connections and locks without sending anything."""
        keep_for_ever(self._opened)
        self._opened = ExitStack()
        self._opened.callback(self.database.close)
        self.database.abandon()


def _facts(sql: Sql) -> dict[str, str]:
    """Facts about the server and the namespace's tables, by name."""
    version = sql.connection.dialect.server_version_info or ()
    found = {"server version": ".".join(str(part) for part in version), "revision": str(opening.revision(sql))}
    found |= {name: str(_count(sql, table)) for name, table in _COUNTED.items()}
    found["quarantined"] = str(aside.count_quarantined(sql))
    b = branches.c
    records_of = select(func.count(b.record.distinct())).where(b.namespace == sql.namespace)
    minted = epochs.minted_since(sql, RECENT)
    lately = f"{minted.partitions} partitions began another one within ten minutes, the last {minted.ago:.0f} s ago"
    found[MINTED] = lately if minted.partitions else NONE_MINTED
    if newest := aside.newest_quarantined(sql):
        found[NEWEST] = f"{newest[0][:200]} version {newest[1]}: {newest[2][:500]}"
    found["branched records"] = str(sql.execute(records_of).scalar_one())
    found["stuck"] = str(listings.count_stuck(sql))
    if sql.postgresql:
        used, most = _connections(sql) or (0, 0)
        found |= {"connections": str(used), "most connections": str(most)}
    if not sql.postgresql:
        found["journal mode"] = str(sql.exec_driver_sql("PRAGMA journal_mode").scalar())
    return found


def _count(sql: Sql, table: Table) -> int:
    """How many rows of this table the namespace has."""
    query = select(func.count()).select_from(table).where(table.c.namespace == sql.namespace)
    return int(sql.execute(query).scalar_one())


def _connections(sql: Sql) -> tuple[int, int] | None:
    """How many connections the server has, and how many it allows; None for a file."""
    if not sql.postgresql:
        return None
    used, most = sql.exec_driver_sql(_CONNECTIONS).one()
    return int(used), int(most)


# The tokens of the service's callers. The database's clock decides what has expired, not a worker's


class AccessTokenStore(Part):
    """The tokens that identify callers of this namespace's service."""

    def __init__(self, database: Database, namespace: str) -> None:
        super().__init__(database, namespace)
        self._here = _c.namespace == namespace

    def add(
        self, id: str, digest: bytes, *, prefix: str, rights: Collection[str], actor: str, seconds: float | None,
        made_by: str | None = None,
    ) -> AccessToken:  # fmt: skip
        """Store a new token, valid for this many seconds from now; None: it does not expire.

        `made_by` is the token that requested it. Raises InvalidValue, and Unauthenticated if that token is revoked.
        """
        if _UNSTORABLE.search(actor):
            raise InvalidValue(f"the actor of a token must have no NUL and no lone surrogate, unlike {actor!r:.80}")
        with self.database.write(self.namespace) as sql:
            if made_by is not None:
                self._hold(sql, made_by)
            now_ms = clock_us(sql) // 1000
            row = {
                "namespace": self.namespace, "id": id, "digest": digest, "prefix": prefix, "actor": actor,
                "rights": ",".join(sorted(rights)), "created_ms": now_ms, "revoked_ms": None,
                "expires_ms": None if seconds is None else now_ms + round(seconds * 1000), "made_by": made_by,
            }  # fmt: skip
            sql.execute(insert(access_tokens), row)
            return _token(sql.execute(select(access_tokens).where(self._here, _c.id == id)).one())

    def all(self) -> list[AccessToken]:
        """Every token, including expired and revoked ones, the oldest first."""
        with self.database.read(self.namespace) as sql:
            query = select(access_tokens).where(self._here).order_by(_c.created_ms, _c.id)
            return [_token(row) for row in sql.execute(query)]

    def page(self, prefix: str, after: str | None, limit: int) -> list[AccessToken]:
        """At most `limit` tokens whose prefix begins so, after the token `after`. Raises InvalidValue if unknown."""
        # Compared byte by byte: SQLite's LIKE takes "acme:" for "ACME:", which is another tenant.
        within = (self._here, func.substr(_c.prefix, 1, len(prefix)) == prefix)
        query = select(access_tokens).where(*within).order_by(_c.created_ms, _c.id).limit(limit)
        with self.database.read(self.namespace) as sql:
            if after is not None:
                last = sql.execute(select(_c.created_ms).where(*within, _c.id == after)).scalar()
                if last is None:
                    raise InvalidValue(f"there is no token {after!r:.80} to continue after")
                query = query.where(tuple_(_c.created_ms, _c.id) > tuple_(last, after))
            return [_token(row) for row in sql.execute(query)]

    def _hold(self, sql: Sql, maker: str) -> None:
        """Block the revocation of this token until the transaction ends. Raises Unauthenticated if it is revoked.

        Another worker may accept a revoked token for some seconds: a token made with it then would escape `revoke`.
        """
        asked = select(_c.revoked_ms).where(self._here, _c.id == maker).with_for_update(read=True)
        row = sql.execute(asked).one_or_none()
        if row is None or row.revoked_ms is not None:
            raise Unauthenticated

    def revoke(self, id: str) -> tuple[AccessToken, set[str]]:
        """Revoke a token and all tokens made with it, directly or not; their ids, too. Raises NotFound."""
        with self.database.write(self.namespace) as sql:
            made: set[str] = set()
            # Repeated until nothing is new: a token that was being made is visible once the lock of its maker is held.
            while more := self._made_with(sql, id) - made:
                self._revoke(sql, more)
                made |= more
            return self._one(sql, id), made

    def _made_with(self, sql: Sql, id: str) -> set[str]:
        """This token and all tokens made with it, directly or not.

        All made tokens are read at once: level by level, a chain of ten thousand kept SQLite busy for 40 s.
        """
        query = select(_c.id, _c.made_by).where(self._here, _c.made_by.is_not(None))
        by_maker = defaultdict(list)
        for made, maker in sql.execute(query):
            by_maker[maker].append(made)
        found, level = {id}, [id]
        while level:
            level = [made for maker in level for made in by_maker[maker] if made not in found]
            found.update(level)
        return found

    def revoke_alone(self, id: str) -> tuple[AccessToken, set[str]]:
        """Revoke a token, but not those made with it. Raises NotFound."""
        with self.database.write(self.namespace) as sql:
            self._revoke(sql, [id])
            return self._one(sql, id), {id}

    def _revoke(self, sql: Sql, ids: Collection[str]) -> None:
        now_ms = clock_us(sql) // 1000
        these = self._here, sql.among(_c.id, ids)
        sql.execute(update(access_tokens).where(*these, _c.revoked_ms.is_(None)).values(revoked_ms=now_ms))

    def _one(self, sql: Sql, id: str) -> AccessToken:
        row = sql.execute(select(access_tokens).where(self._here, _c.id == id)).one_or_none()
        if row is None:
            raise NotFound(f"there is no token {id!r:.80}")
        return _token(row)

    def find(self, ids: Collection[str]) -> dict[str, FoundToken]:
        """The tokens with these ids."""
        with self.database.read(self.namespace) as sql:
            rows = list(sql.rows(select(access_tokens).where(self._here), _c.id, ids))
            now = clock_us(sql) / 1_000_000 if rows else 0.0
        return {row.id: FoundToken(token := _token(row), row.digest, _left(token, now)) for row in rows}


def _token(row: Row[Any]) -> AccessToken:
    return AccessToken(
        id=row.id, prefix=row.prefix, rights=tuple(row.rights.split(",")), actor=row.actor,
        created=row.created_ms / 1000, expires=_seconds(row.expires_ms), revoked=_seconds(row.revoked_ms),
        made_by=row.made_by,
    )  # fmt: skip


def _seconds(time_ms: int | None) -> float | None:
    return None if time_ms is None else time_ms / 1000


def _left(token: AccessToken, now: float) -> float | None:
    if token.revoked is not None:
        return 0.0
    return None if token.expires is None else max(0.0, token.expires - now)
