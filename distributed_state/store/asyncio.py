"""The store: opens and closes, hands out records, and works on many of them.

Law: a method here is a few lines; its work is done in `lifecycle` and the modules beside it. The methods that concern
the whole fleet are those of `AsyncFleet`.

Design: section 16.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, Self, Unpack, cast, overload

from distributed_state.conversation.agent_state import AgentState
from distributed_state.conversation.session import AsyncSession, AsyncTypedSession
from distributed_state.conversation.workflow import Workflow
from distributed_state.conversation.workflow import run as workflow_run
from distributed_state.errors import InvalidValue
from distributed_state.port.connections import Credentials
from distributed_state.port.waited import bounded
from distributed_state.records import branches, lifecycle
from distributed_state.records.access import MOVES, TAGS, Guard, Policy
from distributed_state.records.context import RecordContext, context_of
from distributed_state.records.record import AsyncRecord
from distributed_state.records.sanitizing import Clean, CleanMessage, Options, SessionOptions, sanitizer
from distributed_state.records.schema import M, Schema
from distributed_state.records.transaction import AsyncBatch
from distributed_state.records.typed import AsyncTypedRecord, TypedContext
from distributed_state.search import querying
from distributed_state.settings import Settings
from distributed_state.store import doctor, export, importing, maintenance
from distributed_state.store.doctor import Finding
from distributed_state.store.fleet import AsyncFleet
from distributed_state.store.importing import ImportedFile
from distributed_state.store.lifecycle import StoreLifecycle, face_of, opened_remotely, resolve
from distributed_state.store.maintenance import Reencrypted, Repaired, Upcast
from distributed_state.tiers import ambient
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import chance, field_ttl
from distributed_state.values.codec import Codec
from distributed_state.values.encryption import Encryption, Sealed
from distributed_state.values.levels import level_of
from distributed_state.values.model import Ref, escape, is_storable
from distributed_state.values.results import Branch, SessionInfo
from distributed_state.values.search import KINDS, Filter, Indexed, Kind, Search, SearchHit


@bounded()
class AsyncStateStore(AsyncFleet):
    """Tiered state for agents: open one per process and share it. `StateStore` is the same for blocking code.

    Example::

        async with AsyncStateStore.open() as store:  # in this process, archived to ./distributed-state.db
            session = store.session("c1", user="u1")
            await session.append({"role": "user", "content": "A weekend in Oslo, please"})
            await session.set("city", "Oslo")
            assert await session.get("city") == "Oslo"

    It may be used from several event loops, and as `store.blocking` from threads; all share one hot tier.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        encryption: Encryption | None = None,
        access: Policy | None = None,
        credentials: Credentials | None = None,
        blocking: Any = None,
        search: Search | bool | None = None,
    ) -> None:
        encryption = encryption or Encryption.from_environment()
        root = Codec(settings.namespace, "") if encryption is None else Sealed(encryption, settings.namespace, "")
        guard = None if access is None else Guard(access)
        self._lifecycle = StoreLifecycle(settings, root.of, guard, face_of, credentials, search)
        self._context = self._lifecycle.context
        self._blocking = blocking
        self.keys = self._context.keys
        self.ephemeral = self._context.ephemeral
        self.deleting = self._context.deleting

    @classmethod
    def open(
        cls,
        url: str | None = None,
        *,
        archive: str | None = None,
        namespace: str | None = None,
        encryption: Encryption | None = None,
        access: Policy | None = None,
        clean: Clean | None = None,
        clean_messages: CleanMessage | None = None,
        credentials: Credentials | None = None,
        search: Search | bool | None = None,
        **settings: Any,
    ) -> Self:
        """Open a store: `async with AsyncStateStore.open(...) as store`, or `store = await AsyncStateStore.open(...)`.

        Example::

            async with AsyncStateStore.open(archive="memory", namespace="shop", recent_messages=100) as store:
                await store.app("shop").set("open", True)

        Without `url` everything runs in this process and is archived to a SQLite file, each commit before it returns. A
        relative path is resolved against the current folder of this call. With `url` the store is shared by all workers
        that name the same Redis, `archive` (a SQLAlchemy URL, or "memory" for throwaway use) and `namespace`:
        redis://host:6379/0, redis+sentinel://host:26379,host:26379/service/0 or
        redis+cluster://host:6379,host:6379; with TLS rediss://, rediss+sentinel:// or rediss+cluster://, and unix://.
        `credentials()` is called for each new connection and returns user and password, for tokens that expire.
        With https://, or http:// within a private network, it is the store behind that service (`token=`, extra
        `remote`), with the methods of this class that work remotely: see AsyncRemoteStore.
        More settings: see Settings.

        `encryption` sets which data is encrypted and with which keys (see Encryption; without it, from the
        environment); `access` is asked before everything and may deny it (see Request); `clean(key, value)` and
        `clean_messages(message)` return the value or message to store instead. `search=True`, or a Search with options,
        lets `search` find records by their content; without a `url` the first search turns it on, unless False.
        Raises ConfigurationError, WarmUnavailable or ColdUnavailable.
        """
        remote = opened_remotely(
            "remote.store.AsyncRemoteStore", url, settings, archive=archive, namespace=namespace,
            encryption=encryption, access=access, clean=clean, clean_messages=clean_messages, credentials=credentials,
            search=search,
        )  # fmt: skip
        if remote is not None:
            return cast(Self, remote)  # it has the same methods
        given = resolve(url=url, archive=archive, namespace=namespace, **settings)
        store = cls(given, encryption=encryption, access=access, credentials=credentials, search=search)
        store.hook(clean, clean_messages)
        return store

    def hook(self, clean: Clean | None, clean_messages: CleanMessage | None) -> None:
        """Apply these hooks to everything that is stored from now on."""
        sanitizer({}, clean, clean_messages)
        self._context.clean = clean
        self._context.clean_messages = clean_messages

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        await self._lifecycle.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the background work, drop all connections and close the archive, for all threads and event loops.

        This process's commits are archived first: an embedded store archives all of them; with Redis it takes at most
        `close_timeout` seconds (setting, 5), and if it has no archiver (`archiver=False`), those of other processes do
        it. The others stay in Redis, and a warning in the log says how many. Has no effect on a closed store.
        """
        await self._lifecycle.close()

    @property
    def aio(self) -> AsyncStateStore:
        """This store, for symmetry with `store.blocking.aio`."""
        return self

    @property
    def blocking(self) -> Any:
        """The same open store for blocking code, a StateStore: one replica, one hot tier, from any thread.

        Example::

            async with store.session("c1").lock():
                store.blocking.session("c1").set("city", "Oslo")  # the same task, so it writes under the lock

        Called inside a running event loop, it blocks the loop until it returns.
        """
        if self._blocking is None:
            self._blocking = face_of(self)
        return self._blocking

    @property
    def settings(self) -> Settings:
        """The settings it was opened with, including those from the environment."""
        return self._context.settings

    @property
    def replica(self) -> str:
        """The name of this replica, 12 hex digits: unique to each process, also to a forked one."""
        return self.tiers().replica

    def tiers(self) -> Tiers:
        """The tiers, which all threads and event loops share."""
        return self._lifecycle.tiers()

    @property
    def tiers_in_use(self) -> Tiers | None:
        """The tiers, or None if the store is not open."""
        return self._lifecycle.tiers_in_use

    # Records

    @overload
    def session(
        self,
        id: str | None = None,
        *,
        user: str | None = None,
        schema: None = None,
        **options: Unpack[SessionOptions],
    ) -> AsyncSession: ...
    @overload
    def session(
        self,
        id: str | None = None,
        *,
        user: str | None = None,
        schema: type[M] | Schema[M],
        **options: Unpack[SessionOptions],
    ) -> AsyncTypedSession[M]: ...
    def session(
        self,
        id: str | None = None,
        *,
        user: str | None = None,
        schema: type[M] | Schema[M] | None = None,
        **options: Unpack[SessionOptions],
    ) -> AsyncSession:
        """Return a conversation by its id, or a new one. No I/O.

        Example::

            session = store.session("c1", user="u1", idle=3600)

        `user` owns it from its first write on; `actor` is recorded with every change made through this handle. With
        `schema`, a pydantic model or a Schema of one, its fields are those of the model.

        A session that starts with a commit through this handle expires after `idle` seconds without another commit, and
        at the age of `lifetime` seconds (see `set_lifetime`); None means the store's `session_idle` and
        `session_lifetime`, `math.inf` never.

        With `on_invalid="stringify"`, values that JSON cannot hold are stored as their `str()`, at any depth;
        `clean(key, value)` and `clean_messages(message)` return the value or message to store instead, or raise. The
        store's own hooks run after them.
        """
        ref = Ref("session", chance.token_hex(16) if id is None else id)
        idle, lifetime = options.pop("idle", None), options.pop("lifetime", None)
        lives = (
            field_ttl.span_ms("idle", self.settings.session_idle if idle is None else idle),
            field_ttl.span_ms("lifetime", self.settings.session_lifetime if lifetime is None else lifetime),
        )
        store, rest, fresh = self._context, cast(Options, options), id is None
        if schema is None:
            return AsyncSession(RecordContext(store, ref, user=user, fresh=fresh, lifetime=lives, **rest))
        return AsyncTypedSession(
            TypedContext(store, ref, schema=schema, user=user, fresh=fresh, lifetime=lives, **rest)
        )

    @overload
    def user(self, id: str, *, schema: None = None, **options: Unpack[Options]) -> AsyncRecord: ...
    @overload
    def user(self, id: str, *, schema: type[M] | Schema[M], **options: Unpack[Options]) -> AsyncTypedRecord[M]: ...
    def user(self, id: str, *, schema: type[M] | Schema[M] | None = None, **options: Unpack[Options]) -> AsyncRecord:
        """Return the record of a user, across sessions. No I/O. `schema` and further options as for `session`."""
        return self._record(Ref("user", id), id, schema, options)

    @overload
    def app(self, id: str, *, schema: None = None, **options: Unpack[Options]) -> AsyncRecord: ...
    @overload
    def app(self, id: str, *, schema: type[M] | Schema[M], **options: Unpack[Options]) -> AsyncTypedRecord[M]: ...
    def app(self, id: str, *, schema: type[M] | Schema[M] | None = None, **options: Unpack[Options]) -> AsyncRecord:
        """Return the record that all users of an application share. No I/O. Options as for `session`."""
        return self._record(Ref("app", id), None, schema, options)

    @overload
    def task(
        self, id: str, *, user: str | None = None, schema: None = None, **options: Unpack[Options]
    ) -> AsyncRecord: ...
    @overload
    def task(
        self,
        id: str,
        *,
        user: str | None = None,
        schema: type[M] | Schema[M],
        **options: Unpack[Options],
    ) -> AsyncTypedRecord[M]: ...
    def task(
        self,
        id: str,
        *,
        user: str | None = None,
        schema: type[M] | Schema[M] | None = None,
        **options: Unpack[Options],
    ) -> AsyncRecord:
        """Return the record of a piece of work, which `user` owns. No I/O. Options as for `session`."""
        return self._record(Ref("task", id), user, schema, options)

    def _record(self, ref: Ref, user: str | None, schema: type[M] | Schema[M] | None, options: Options) -> AsyncRecord:
        if schema is None:
            return AsyncRecord(RecordContext(self._context, ref, user=user, **options))
        return AsyncTypedRecord(TypedContext(self._context, ref, schema=schema, user=user, **options))

    # Several records

    def invalidate(self) -> None:
        """Drop this process's copies of all records; the next reads ask the server. No I/O."""
        self._context.tiers().hot.clear()

    def acting_as(self, actor: str) -> AbstractContextManager[None]:
        """Record `actor` with every change made inside `with`, by any handle that names no actor of its own.

        Example::

            with store.acting_as("support:ada"):
                await session.set("city", "Bergen")

        `history()` shows it. It is a variable of the context, as in `contextvars`: tasks created inside inherit it; a
        new thread does if it is started by `asyncio.to_thread` or with `contextvars.copy_context().run`.
        """
        return ambient.acting_as(actor)

    def durable(self, durability: str) -> AbstractContextManager[None]:
        """Set the durability that changes inside `with` must reach before they are acknowledged; the innermost wins.

        Example::

            with store.durable("archived"):
                await session.set("paid", True)  # SQL has it when this returns
                await session.set("seen", 1, durability="memory")

        "memory": Redis has it. "replicated": so has every replica that may be promoted; "replicated:n": n of them,
        which guarantees nothing if another one is promoted. "fsynced": it is on the disk of its Redis, which guarantees
        nothing across a failover. "archived": SQL has it. DurabilityUnknown means that a change was applied, but did
        not reach the level in time; repeat a turn under its request id, and confirm others by `record.confirm`. Without
        this, and without `durability=` of the change, batch or turn itself, the setting `durability` applies.

        Raises InvalidValue for an unknown level; and ConfigurationError, here or when a change is made, if the servers
        can never reach it. It is a variable of the context, as in `acting_as`, and applies to this store alone.
        """
        level = level_of(durability)
        self._lifecycle.refuse_never_kept(level)
        return ambient.durable(self.settings, level)

    async def time(self) -> float:
        """Read the server's time in seconds since 1970: one clock for all workers, whatever their own clocks say.

        Example::

            await store.app("shop").set("open_until", await store.time() + 3600)

        Mostly without I/O; it may be wrong by half the round trip of the last reply. In a cluster it is the slowest of
        the servers' clocks. Raises WarmUnavailable if no server can be reached.
        """
        clock = self.tiers().clock
        await clock.know()
        return clock.now()

    async def get_many(self, handles: Iterable[AsyncRecord], *, fresh: bool = False) -> list[dict[str, Any]]:
        """Read the fields of several records, in their order; all that are not hot take one round trip.

        Example::

            fields, preferences = await store.get_many([session, store.user("u1")])

        A missing or deleted record gives an empty dict. `fresh=True` asks the server for all of them.
        Raises CorruptState as `get` does.
        """
        many = [context_of(each, "get_many") for each in handles]
        for context in many:
            context.allow("read", None)
        keys = [each.keys for each in many]
        entries = await read_path.read_many(self.tiers(), keys, fresh=fresh) if many else []
        return [context.fields(entry) for context, entry in zip(many, entries, strict=True)]

    def batch(self, *, durability: str | None = None) -> AsyncBatch:
        """Collect changes of many records; they are sent in one round trip at the end of `async with`.

        Example::

            async with store.batch() as batch:
                batch.on(session).set("city", "Oslo")
                batch.on(store.user("u1")).increment("trips", 1)

        Each record has one commit and changes completely or not at all; the batch as a whole may be applied in part. At
        its end it raises the first error of a record, and `batch.versions` says which records were changed.
        `durability` as in `durable`.
        """
        return AsyncBatch(self._context, durability)

    async def run(
        self,
        workflow: Workflow,
        user_input: str | None = None,
        *,
        session_id: str | None = None,
        user: str | None = None,
        request_id: str | None = None,
        wait: float = 60.0,
        ttl: float = 30.0,
    ) -> AgentState:
        """Run an agent until it is done, has failed or waits for its user, and return its state.

        Example::

            def plan(state, turn):
                return state.to_done("Oslo is nearer.")

            state = await store.run(Workflow({"planning": plan}), "Oslo or Bergen?", session_id="c2", request_id="r1")
            assert state.final_answer == "Oslo is nearer."

        Each step is one commit, so any worker can continue after another one died: call it again with the same
        `session_id`, and the same input or None. `user_input` starts a task in a new session, or in one whose task is
        over; a waiting task takes it as the answer; it is added to a task that is under way. A `request_id` that was
        accepted before starts nothing. Errors of a step are raised here, and the step may be run again. While another
        worker runs a step this waits, at most `wait` seconds (LockTimeout); a step's lease lasts `ttl` seconds.
        """
        session = self.session(session_id, user=user)
        return await workflow_run(session, workflow, user_input, request_id, self._context.dressed, wait=wait, ttl=ttl)

    async def delete(self, id: str, *, scope: str = "session") -> int:
        """Delete a record in all tiers and return the version of its tombstone. Raises NotFound if it never existed.

        Writes raise Deleted from then on. Its history stays until `purge`, `erase` or `forget`.
        """
        names = self._context.keys.of(Ref(scope, id))
        self._context.allow("write", names.ref)
        return await lifecycle.delete(self._context.tiers(), names, self._context.deleting)

    async def erase(self, id: str, *, scope: str = "session") -> bool:
        """Remove a record for good, with history and messages; False if there was nothing. See `session.erase()`."""
        names = self._context.keys.of(Ref(scope, id))
        self._context.allow("admin", names.ref)
        return await lifecycle.erase(self._context.tiers(), names, self._context.deleting)

    # Many records

    async def sessions(
        self,
        *,
        user: str | None = None,
        prefix: str | None = None,
        tags: Mapping[str, str | Iterable[str]] | None = None,
        limit: int = 50,
        after: str | None = None,
        scope: str = "session",
        fresh: bool = False,
        phase: str | None = None,
        changed_since: float | None = None,
        changed_before: float | None = None,
        larger_than: int | None = None,
    ) -> list[SessionInfo]:
        """List records, the last archived change first; `after` is the `cursor` of a previous page's last row.

        Example::

            page = await store.sessions(user="u1", limit=20)
            if page:
                page = await store.sessions(user="u1", limit=20, after=page[-1].cursor)

        With `user`, lists only records of this owner; `limit` is from 1 to 1000, else InvalidValue. A record moves
        to the front at most once a minute; `updated` says when it last changed.

        With `prefix`, lists only ids that begin with it; with `tags`, only records that have all of these (see
        `write`). Both list in the order of the ids, by the bytes of their escaped text, so that concurrent additions
        and changes do not shift a page: use `prefix=""` for all records. The first tag and the prefix are looked up in
        an index; other conditions filter the result row by row, as for deleted records::

            page = await store.sessions(prefix="shop:", tags={"run": "r1"})

        With `phase`, lists only records in this phase of their state machine, by an index; with `changed_since` and
        `changed_before`, those whose last change is in between (seconds since 1970); with `larger_than`, those with
        more bytes committed. `SessionInfo` says which figures are missing for old records.

        Unarchived records are not listed, unless `fresh`: then the journals in Redis are read as well, up to their end,
        and merged into the page. The cost grows with the unarchived commits, which are few while SQL is available.
        """
        wanted = maintenance.wanted(
            scope=scope, limit=limit, user=user, prefix=prefix, tags=tags, after=after, phase=phase,
            changed_since=changed_since, changed_before=changed_before, larger_than=larger_than,
        )  # fmt: skip
        # A listing by tags reveals them.
        for field in (None, *([TAGS] if tags else []), *([MOVES] if phase is not None else [])):
            self._context.allow("read", field=field, user=wanted.owner, scope=scope, prefix=prefix)
        return await maintenance.listing(self._context.tiers(), wanted, fresh=fresh)

    async def branches(self, *, limit: int = 100, after: str | None = None) -> list[Branch]:
        """List the branches of all records, of any scope: acknowledged commits that are not continued (see `Session`).

        Example::

            for branch in await store.branches():
                print(branch.scope, branch.record_id, branch.id, branch.commits)

        Lists the first `limit` records (1 to 1000) with branches; `after` is the `cursor` of a previous page's last.
        """
        if type(limit) is not int or not 1 <= limit <= 1000:
            raise InvalidValue(f"limit is an int from 1 to 1000, not {limit!r}")
        if after is not None and (not isinstance(after, str) or not is_storable(after)):
            raise InvalidValue(f"{after!r:.100} is not the cursor of a branch")
        self._context.allow("admin")
        return await branches.page(self._context.tiers(), after or "", limit)

    async def export(self, id: str, *, scope: str = "session") -> list[str]:
        """Read a record with its whole history as JSON lines, for `import_`.

        Example::

            await session.set("city", "Oslo")
            lines = await store.export("c1")
            await store.import_(lines, id="a copy of c1")

        Encrypted data stays encrypted. Branches come last, a line a commit, and are not imported. Raises NotFound if
        the record never existed, ColdUnavailable rather than return an incomplete export.
        """
        names = self._context.keys.of(Ref(scope, id))
        self._context.allow("admin", names.ref)
        return await export.export(self._context.tiers(), names)

    async def import_(self, lines: Iterable[str], *, id: str | None = None) -> str:
        """Import an exported record, with its versions, and return its id. All or nothing.

        Raises Conflict if the record exists; InvalidValue names the line that cannot be read.
        """
        given = ImportedFile(lines, id, self._context.settings)
        self._context.allow("admin", given.ref, user=given.owner)
        return await importing.import_(self._context.tiers(), given)

    async def reencrypt(
        self, *, dry_run: bool = False, progress: Callable[[Reencrypted], None] | None = None
    ) -> Reencrypted:
        """Encrypt under the current key all data under another key or, with `accept_plaintext`, not encrypted.

        This includes history, messages, snapshots and events; versions stay as they are. It may run beside busy workers
        that already use the key, and waits for none. It may be interrupted and repeated: finished work is skipped.
        `dry_run` only counts. `progress` is called now and then with the counts so far. A record that cannot be
        decrypted is left as it is and counted. Events that Redis keeps for consumers are dropped up to the last old
        one: consumers that have not read them get a `resync`, and `audit` finds them. It does not reach backups, logs
        of Redis and SQL, and a checksum of 32 bits of unencrypted data in an event's id: `purge` removes those events.
        """
        self._context.allow("admin")
        return await maintenance.reencrypt(self._context.tiers(), dry_run, progress)

    async def repair(self, *, dry_run: bool = False, progress: Callable[[Repaired], None] | None = None) -> Repaired:
        """Bring SQL up to date with Redis after an older backup of SQL was restored: `doctor` names the partitions.

        Until then Redis serves these partitions, and nothing of them is archived. Commits that the journal still holds
        are archived one by one; other records that are newer in Redis are copied at their present version, and the
        versions between are missing in their history. Data that neither has is lost, and reported: messages older than
        the recent ones that Redis keeps, records that may have lost items, and anything that Redis no longer has.
        Partitions are repaired one by one: each one's reads and writes wait meanwhile, its leases end, and it starts a
        new epoch. It may be interrupted and repeated. `dry_run` only counts; `progress` is called with the counts after
        each partition.
        """
        self._context.allow("admin")
        return await maintenance.repair(self._context.tiers(), dry_run, progress)

    async def compact(
        self, *, older_than: float = 86_400.0, progress: Callable[[int], None] | None = None
    ) -> dict[str, int]:
        """Pack history older than this many seconds into compressed blocks in SQL, which take less space.

        `history`, `at`, `rollback`, forks, exports and other reads work as before. It may run beside workers, and be
        interrupted and repeated; once a day is enough. SQL reuses the freed space; files shrink only by its own VACUUM.
        `progress` is called with the number of records so far. Returns counts of records, changes and messages. Raises
        InvalidValue if `older_than` is below `op_window`.

        Example: `store.compact(older_than=7 * 86400)`
        """
        self._context.allow("admin")
        return await maintenance.compact(self._context.tiers(), older_than, progress)

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
        `events_older_than`, `branches_older_than` set another age for those. `keep_changes`: only this many of each
        record's newest changes stay. `keep_messages`, `messages_older_than`: conversations show at most this many
        messages, and none older than that, except messages that their summary does not cover yet. That is a commit of
        the conversation, of kind `retention`; the hidden messages are removed with the last versions that showed them,
        by `older_than` or `keep_changes`. Forks keep what they share.

        Returns counts of records, changes, messages and events that were removed, and of messages `left_out`.
        """
        self._context.allow("admin")
        wanted = maintenance.Retention(
            older_than=older_than, messages_older_than=messages_older_than, events_older_than=events_older_than,
            branches_older_than=branches_older_than, keep_changes=keep_changes, keep_messages=keep_messages,
        )  # fmt: skip
        return await maintenance.purge(self._context, wanted)

    async def forget(self, user: str) -> int:
        """Remove every trace of a user: the user's records, sessions and tasks, their forks and history.

        Hashed ids stay with their last version, so that no version is used twice, and Redis keeps the notices of the
        deletions for disconnected replicas, for `events_for` seconds. Forks that are being made at the same time fail
        or are erased too. Once started, the erasure is finished by any replica that archives, even if this raises;
        another call continues it. Returns the number of records.
        """
        owner = escape(Ref("user", user).id)
        self._context.allow("admin", user=owner)
        return await lifecycle.forget(self._context.tiers(), owner)

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
        """Upcast the records of a scope to this schema's version, as their next write would; return the counts.

        Records that cannot be upcast are counted as failed, stay as they are, and do not stop the run; `dry_run` only
        counts. At most `limit` are upcast. It may be interrupted and repeated at any time, and run beside workers:
        records that an older worker writes meanwhile are left to the next run. All records of the scope are assumed to
        have this schema.
        """
        self._context.allow("admin", scope=scope)
        return await maintenance.upcast_many(self._context, schema, scope, user, dry_run, limit, progress)

    async def archive(self) -> int:
        """Archive everything written so far, by any replica; return how many commits this replica archived for it.

        Raises ColdUnavailable if the SQL database cannot be reached.
        """
        self._context.allow("admin")
        return await self._context.tiers().archiver.drain()

    async def doctor(self) -> list[Finding]:
        """Examine the servers and the fleet; return the findings, with advice for each problem.

        Example::

            for finding in await store.doctor():
                if not finding.ok:
                    print(finding.advice)
        """
        self._context.allow("admin")
        return await doctor.examine(self._context.tiers(), embedded=self._lifecycle.connections.embedded is not None)

    async def stats(self) -> dict[str, int]:
        """Return figures of this replica by name, and the number of unarchived commits in the fleet (`unarchived`).

        For events: how many wait for its consumers, were handled, failed in their handlers or took longer than
        `slow_handler`, and how often a consumer had to resync. For records: how many it has indexed (`indexed`), and
        how many of the namespace were not indexed at its last count (`unindexed`).
        """
        self._context.allow("read")
        tiers = self._context.tiers()
        unarchived = sum((await tiers.archiver.backlog()).values())
        index = querying.follower_of(tiers)
        counts = {"indexed": index.indexed, "unindexed": index.behind or 0}
        return tiers.figures().stats | counts | {"unarchived": unarchived}

    # Searching

    async def search(
        self,
        query: str | None = None,
        *,
        scope: str | None = None,
        prefix: str = "",
        user: str | None = None,
        kinds: Sequence[Kind] = KINDS,
        collection: str | None = None,
        filter: Filter | None = None,
        match: Literal["all", "any"] = "all",
        limit: int = 10,
        offset: int = 0,
        fresh: bool = False,
    ) -> list[SearchHit]:
        """Find messages, fields and items by their text, the most relevant first.

        Example::

            for hit in await store.search("weekend Oslo", scope="session", user="u1", fresh=True):
                print(hit.id, hit.number, hit.text)

        Finds entries with all words of `query`, in any order, or with `match="any"` some; in a store with `embed`,
        entries of similar meaning. Query syntax is ignored: quotes, `*` or NEAR have no effect. Without a query it
        returns everything, the newest first. Filters: the `scope`, the `prefix` of records' ids, the `user` who owns
        them, `kinds` ("message", "field", "item"), a `collection` of items, and objects with these values:
        `filter={"city": "Oslo"}`, or {"$gt": 3} as a value, with $eq, $ne, $gt, $gte, $lt, $lte. Skips the first
        `offset`.

        Entries are found once they are archived and indexed, mostly within a second of the write; `fresh` waits for
        both. At most 10,000 candidates are examined. Entries that the store's policy denies are left out. Raises
        ConfigurationError if search is off (see `open`), TooLarge if the found values exceed 32 MiB, ColdUnavailable
        without SQL.
        """
        asked = querying.checked(query or "", match, scope, kinds, prefix, user, collection, limit, offset)
        owner = None if user is None else escape(user)
        self._context.allow("read", user=owner, scope=scope, prefix=prefix or None)
        tiers = self._context.tiers()
        setting, index = self._lifecycle.search, tiers.cold.search
        if fresh:
            await setting.renew(tiers.port, index)
        await setting.require(tiers.port, index)
        if fresh:
            await tiers.archiver.drain()
            await querying.follower_of(tiers).catch_up()
        return await querying.search(self._context, setting, asked, filter, said=bool(query))

    async def update_index(self, *, progress: Callable[[Indexed], None] | None = None) -> Indexed:
        """Turn search on, if it is off, and wait until the index covers all archived data; return its state.

        It may be interrupted and repeated: finished work is skipped. `progress` is called now and then.

        Example: `print(store.update_index().records)`
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
