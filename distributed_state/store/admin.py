"""An operator's work on a whole store: `store.admin`.

Law: a method here is a few lines; its work is done in the modules beside it. Most need the right `admin`.

Design: sections 16, 27.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from distributed_state.errors import CorruptState, InvalidValue, TooLarge
from distributed_state.events import audit
from distributed_state.events.config import RECORD, Source, difference, field_of, of_fleet
from distributed_state.port.waited import bounded
from distributed_state.records import branches, messages
from distributed_state.records.context import RecordContext, StoreContext
from distributed_state.records.record import AsyncRecord
from distributed_state.records.schema import M, Schema
from distributed_state.results import Branch, Event, Finding, HeldLease, Indexed, Reencrypted, Repaired, Replica, Upcast
from distributed_state.search import querying
from distributed_state.store import doctor, export, importing, maintenance
from distributed_state.store.fleet import MAX_EVENT_BYTES
from distributed_state.store.importing import ImportedFile
from distributed_state.store.lifecycle import StoreLifecycle
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.changes import Changes
from distributed_state.values import codec
from distributed_state.values.model import SCOPES, Ref, escape, is_storable
from distributed_state.warm import held_leases
from distributed_state.warm.answers import Draft, Expectations


@bounded()
class AsyncAdmin:
    """The operator's methods of a whole store: `store.admin`.

    Example::

        for finding in await store.admin.doctor():
            if not finding.ok:
                print(finding.advice)
        await store.admin.compact(older_than=7 * 86400)
    """

    def __init__(self, context: StoreContext, lifecycle: StoreLifecycle) -> None:
        self._context = context
        self._lifecycle = lifecycle

    async def doctor(self) -> list[Finding]:
        """Examine the servers and the fleet; return the findings, with advice for each problem.

        Example::

            for finding in await store.admin.doctor():
                if not finding.ok:
                    print(finding.advice)
        """
        self._context.allow("admin")
        return await doctor.examine(self._context.tiers(), embedded=self._lifecycle.connections.embedded is not None)

    async def replicas(self) -> list[Replica]:
        """List the replicas that have this namespace open, the oldest first, with the data of their last heartbeats.

        A replica sends a heartbeat every `beat` seconds, and is listed until it is closed or has sent none for three
        times that; another replica then publishes the event `replica.lost` within another `beat`.
        """
        self._context.allow("admin")
        return await self._context.tiers().heartbeat.replicas()

    async def stats(self) -> dict[str, int]:
        """Return figures of this replica by name, and the number of unarchived commits in the fleet (`unarchived`).

        Figures of events: how many wait for its consumers, were handled, failed in their handlers or took longer than
        `slow_handler`, and how often a consumer had to resync. Figures of the search index: how many records this
        replica has indexed (`indexed`), and how many of the namespace were not indexed at its last count (`unindexed`).
        """
        self._context.allow("read")
        tiers = self._context.tiers()
        unarchived = sum((await tiers.archiver.backlog()).values())
        index = querying.follower_of(tiers)
        counts = {"indexed": index.indexed, "unindexed": index.behind or 0}
        return tiers.figures().stats | counts | {"unarchived": unarchived}

    async def leases(
        self, *, scope: str | None = None, prefix: str = "", limit: int = 100, after: str | None = None
    ) -> list[HeldLease]:
        """List the current leases (locks, running turns) with their holders and waiters, those held longest first.

        Example::

            for lease in await store.admin.leases():
                print(lease.record_id, lease.kind, lease.replica, lease.since, lease.waiting)

        With `scope`, only leases on records of that scope; with `prefix`, only on ids that begin with it. Returns the
        first `limit` (1 to 1000); `after` is the `cursor` of a previous page's last lease. The cost grows with the
        number of leases, not of records.
        """
        if type(limit) is not int or not 1 <= limit <= 1000:
            raise InvalidValue(f"limit is an int from 1 to 1000, not {limit!r}")
        if not isinstance(prefix, str):
            raise InvalidValue(f"prefix is a str, not {prefix!r:.80}")
        scopes = SCOPES if scope is None else (Ref(scope, "any").scope,)
        self._context.allow("admin", scope=scope, prefix=prefix or None)
        begins = tuple(f"{each}:{escape(prefix)}" for each in scopes)
        tiers = self._context.tiers()
        found = held_leases.HeldLeases(tiers.port, tiers.keys, tiers.clock)
        all_of_them = scope is None and not prefix
        return await found.page(limit, after, None if all_of_them else lambda text: text.startswith(begins))

    async def end_lease(self, id: str, token: int, *, scope: str = "session") -> bool:
        """End the lease with this fencing token, even another holder's; return False if it is no longer held.

        Example::

            for lease in await store.admin.leases(scope="session"):
                if await store.time() - lease.since > 600:
                    await store.admin.end_lease(lease.record_id, lease.token)

        Its holder's writes are refused (Interrupted, Fenced), and the first waiter gets the record. A turn whose lease
        was ended has written nothing. To hold the record instead: `record.lock(take_over=token)`.
        """
        ref = Ref(scope, id)
        self._context.allow("admin", ref)
        return await held_leases.end(self._context.tiers().leases, self._context.keys.of(ref), token)

    async def audit(
        self,
        *,
        conversation: str | None = None,
        subject: str | AsyncRecord | None = None,
        type: str | None = None,
        since: float | None = None,
        until: float | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Event]:
        """Read past events from SQL, the newest `limit` in the order of the servers' clocks, newest last.

        Example::

            for event in await store.admin.audit(conversation="c1", type="conversation.*", limit=20):
                print(event.time, event.type, event.data)

        Filters: a conversation, by its id; a subject (a record, its text, or the value given to `emit`); a type, or a
        pattern like "conversation.*"; events from a time on, and before another (seconds since 1970). To continue, pass
        the `cursor` of the last event as `after`: returns the first `limit` events after it, an empty list if there are
        none yet; `after="oldest"` starts at the beginning. Events that were purged, or forgotten with a user, are not
        found. Raises ColdUnavailable if the events so far cannot be archived.
        """
        ref, text = audit.about(conversation, subject.ref if isinstance(subject, AsyncRecord) else subject)
        wanted = audit.sought(text, type, since, until, limit, after)
        if ref is None:
            self._context.allow("read", scope="session")
        else:
            self._context.allow("read", ref)
        return await audit.audit(self._context.tiers(), wanted)

    async def reload_config(self, config: Source, *, agent: str = "") -> int:
        """Give all agents of the fleet, or one by its name, a new config; return the version of its record.

        `config` is a mapping, or the path of a YAML or JSON file read here. Every replica adopts it and calls
        `on_config_update` if it differs from its own; of two concurrent calls, one wins on all replicas. A replica that
        starts later adopts it unless its own file is newer. The event `config.changed` has the changed names and a
        digest, but not the values, which are in the record. Raises ConfigurationError for a broken file. An agent that
        finds the config invalid logs that and keeps its old one.
        """
        ref = Ref("app", RECORD)
        self._context.allow("admin", ref)
        record = RecordContext(self._context, ref)
        tiers = self._context.tiers()
        found = await tiers.port.thread(of_fleet, config)
        await tiers.clock.know()
        field = field_of(agent)

        def changed(raw: bytes | None) -> tuple[Changes, bytes]:
            try:
                before = None if raw is None else record.codec.decode(raw, field)
            except CorruptState:
                before = None  # an old config that cannot be decrypted or read is replaced
            changes = record.changes()
            changes.set(field, {"config": found, "time": tiers.clock.now()})
            return changes, codec.encode(difference(before, found, agent), "config")

        def draft(change: tuple[Changes, bytes], expectations: Expectations) -> Draft:
            changes, data = change
            if len(data) > MAX_EVENT_BYTES:
                raise TooLarge(f"config: its names are {len(data)} bytes, more than the {MAX_EVENT_BYTES} of an event")
            draft = record.sign(changes.draft("reload_config", expectations=expectations))
            return draft._replace(events=((b"e", b"config.changed", data),))

        name = codec.encode_key(field)
        return (await write_path.swap(tiers, record.keys, name, changed, draft))[1].version

    async def branches(
        self, id: str | None = None, *, scope: str = "session", limit: int = 100, after: str | None = None
    ) -> list[Branch]:
        """List the branches of a record, the oldest first; without an id, the branches of all records of any scope.

        Example::

            for branch in await store.admin.branches("c1"):
                print(branch.id, branch.commits, "commits after version", branch.base, "because:", branch.cause)
                print((await session.at(branch=branch.id)).fields)
                await session.fork(f"c1-{branch.id}", branch=branch.id)
                await store.admin.drop_branch("c1", branch.id)

        A branch holds acknowledged commits that are not part of their record's history. After failover to a lagging
        server, the lost commits are restored unless the record was written meanwhile. If it was, they become a branch:
        `at`, `history` and `fork` take its id. Few records have branches.

        Without an id, lists the first `limit` records (1 to 1000) with branches; `after` is the `cursor` of a previous
        page's last. For the branches of one record the right `read` is enough.
        """
        if type(limit) is not int or not 1 <= limit <= 1000:
            raise InvalidValue(f"limit is an int from 1 to 1000, not {limit!r}")
        if after is not None and (not isinstance(after, str) or not is_storable(after)):
            raise InvalidValue(f"{after!r:.100} is not the cursor of a branch")
        if id is not None:
            return await branches.branches(RecordContext(self._context, Ref(scope, id)))
        self._context.allow("admin")
        return await branches.page(self._context.tiers(), after or "", limit)

    async def drop_branch(self, id: str, branch: str, *, scope: str = "session") -> int:
        """Remove a branch permanently, by its id, and return how many commits it had.

        Raises NotFound if it does not exist.
        """
        return await branches.drop(RecordContext(self._context, Ref(scope, id)), branch)

    async def export(self, id: str, *, scope: str = "session") -> list[str]:
        """Read a record with its whole history as JSON lines, for `import_`.

        Example::

            await session.set("city", "Oslo")
            lines = await store.admin.export("c1")
            await store.admin.import_(lines, id="a copy of c1")

        Encrypted data stays encrypted. Branches come last, one line for each commit, and are not imported. Raises
        NotFound if the record never existed, ColdUnavailable rather than returning an incomplete export.
        """
        keys = self._context.keys.of(Ref(scope, id))
        self._context.allow("admin", keys.ref)
        return await export.export(self._context.tiers(), keys)

    async def import_(self, lines: Iterable[str], *, id: str | None = None) -> str:
        """Import an exported record, with its versions, and return its id. All or nothing.

        Raises Conflict if the record exists; InvalidValue names the line that cannot be read.
        """
        given = ImportedFile(lines, id, self._context.settings)
        self._context.allow("admin", given.ref, user=given.owner)
        return await importing.import_(self._context.tiers(), given)

    async def archive(self) -> int:
        """Archive everything written so far, by any replica; return how many commits this replica archived for it.

        Raises ColdUnavailable if the SQL database cannot be reached.
        """
        self._context.allow("admin")
        return await self._context.tiers().archiver.drain()

    async def compact(
        self, *, older_than: float = 86_400.0, progress: Callable[[int], None] | None = None
    ) -> dict[str, int]:
        """Pack history older than this many seconds into compressed blocks in SQL, which take less space.

        `history`, `at`, `rollback`, forks, exports and other reads work as before. It may run while workers run, and
        may be interrupted and repeated; once a day is enough. SQL reuses the freed space; files shrink only when you
        run SQL's own VACUUM. `progress` is called with the number of records so far. Returns counts of records, changes
        and messages. Raises InvalidValue if `older_than` is below `op_window`.

        Example: `store.admin.compact(older_than=7 * 86400)`
        """
        self._context.allow("admin")
        return await maintenance.compact(self._context.tiers(), older_than, progress)

    async def cleanup(self, id: str, *, days: float, scope: str = "session") -> int:
        """Hide the messages of a conversation that were committed more than `days` days ago; return how many.

        This is one commit, whose size does not depend on the number of messages. A message's age is that of its commit
        by the server's clock, not that of its own timestamp; history keeps the messages until `purge`. If a `purge`, or
        an `erase` of the record that messages were forked from, removed all commits of that age, no message is hidden.
        """
        return await messages.cleanup(RecordContext(self._context, Ref(scope, id)), days)

    async def purge(
        self,
        *,
        older_than: float | None = None,
        keep_changes: int | None = None,
        messages_older_than: float | None = None,
        keep_messages: int | None = None,
        events_older_than: float | None = None,
        branches_older_than: float | None = None,
    ) -> dict[str, int]:
        """Remove old data from SQL; the present state of live records stays readable.

        `older_than` (seconds): older versions, branches and events can no longer be read or restored;
        `events_older_than` and `branches_older_than` set another age for events and branches. `keep_changes`: only this
        many of each record's newest changes stay. `keep_messages`, `messages_older_than`: conversations show at most
        this many messages, and none older than that, except messages that their summary does not cover yet. Messages
        are hidden by a commit of the conversation, of kind `retention`; they are removed when `older_than` or
        `keep_changes` removes the last version that showed them. Forks keep the messages that they share.

        Returns counts of records, changes, messages and events that were removed, and of messages `left_out`.
        """
        self._context.allow("admin")
        wanted = maintenance.Retention(
            older_than=older_than, messages_older_than=messages_older_than, events_older_than=events_older_than,
            branches_older_than=branches_older_than, keep_changes=keep_changes, keep_messages=keep_messages,
        )  # fmt: skip
        return await maintenance.purge(self._context, wanted)

    async def upcast(
        self,
        schema: type[M] | Schema[M],
        *,
        scope: str = "session",
        user: str | None = None,
        dry_run: bool = False,
        limit: int | None = None,
        progress: Callable[[Upcast], None] | None = None,
    ) -> Upcast:
        """Upcast the records of a scope to this schema's version, like their next write would; return the counts.

        Records that cannot be upcast are counted as failed, stay as they are, and do not stop the run; `dry_run` only
        counts. At most `limit` are upcast. It may be interrupted and repeated at any time, and may run while workers
        run: records that an older worker writes meanwhile are upcast by the next run. All records of the scope must
        have this schema.
        """
        self._context.allow("admin", scope=scope)
        return await maintenance.upcast_many(self._context, schema, scope, user, dry_run, limit, progress)

    async def reencrypt(
        self, *, dry_run: bool = False, progress: Callable[[Reencrypted], None] | None = None
    ) -> Reencrypted:
        """Encrypt under the current key all data that is under another key or, with `accept_plaintext`, not encrypted.

        This includes history, messages, snapshots and events; versions stay as they are. It may run while workers that
        already use the key are busy, and does not wait for them. It may be interrupted and repeated: finished work is
        skipped. `dry_run` only counts. `progress` is called from time to time with the counts so far. A record that
        cannot be decrypted is left as it is and counted. Events that Redis keeps for consumers are dropped up to the
        last one under an old key: consumers that have not read them get a `resync`, and `audit` still finds them.
        Backups and the log files of Redis and SQL are not changed. The id of an event whose data was not encrypted
        keeps a checksum of 32 bits of that data until `purge` removes the event.
        """
        self._context.allow("admin")
        return await maintenance.reencrypt(self._context.tiers(), dry_run, progress)

    async def repair(self, *, dry_run: bool = False, progress: Callable[[Repaired], None] | None = None) -> Repaired:
        """Bring SQL up to date with Redis after an older backup of SQL was restored. `doctor` names the partitions.

        Before the repair Redis serves these partitions, and they are not archived. Commits that the journal still holds
        are archived one by one; other records that are newer in Redis are copied at their present version, and the
        versions in between are missing in their history. Data that neither Redis nor SQL has is lost, and is reported:
        messages older than the recent ones in Redis, records that may have lost items, and records that Redis no longer
        has. Partitions are repaired one by one: reads and writes of a partition wait during its repair, its leases end,
        and it starts a new epoch. It may be interrupted and repeated. `dry_run` only counts; `progress` is called with
        the counts after each partition.
        """
        self._context.allow("admin")
        return await maintenance.repair(self._context.tiers(), dry_run, progress)

    async def update_index(self, *, progress: Callable[[Indexed], None] | None = None) -> Indexed:
        """Turn search on, if it is off, and wait until the index covers all archived data; return its state.

        It may be interrupted and repeated: finished work is skipped. `progress` is called from time to time.

        Example: `print(store.admin.update_index().records)`
        """
        self._context.allow("admin")
        tiers = self._context.tiers()
        setting, index = self._lifecycle.search, tiers.cold.search
        await setting.renew(tiers.port, index)
        await setting.require(tiers.port, index, create=True)
        await tiers.archiver.drain()
        follower = querying.follower_of(tiers)
        goal = await follower.catch_up(progress)
        return await follower.reached(goal)

    async def remove_index(self) -> bool:
        """Turn search off and remove the index; False if there is none. `update_index` builds it again."""
        self._context.allow("admin")
        tiers = self._context.tiers()
        self._lifecycle.search.look_again()
        return await tiers.port.sql(tiers.cold.search.switch_off)
