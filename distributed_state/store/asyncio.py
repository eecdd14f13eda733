"""The store: opens and closes, hands out records, and works on many of them.

Law: a method here is a few lines; its work is done in `lifecycle` and the modules beside it. The methods that concern
the whole fleet are in `AsyncFleet`.

Design: section 16.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, Self, Unpack, cast, overload

from distributed_state.conversation import asks
from distributed_state.conversation.session import AsyncSession, AsyncTypedSession
from distributed_state.conversation.workflow import Workflow
from distributed_state.conversation.workflow import run as workflow_run
from distributed_state.port.connections import Credentials
from distributed_state.port.waited import bounded
from distributed_state.records import lifecycle
from distributed_state.records.access import MOVES, TAGS, Guard, Policy
from distributed_state.records.context import RecordContext, context_of
from distributed_state.records.record import AsyncRecord
from distributed_state.records.sanitizing import Clean, CleanMessage, Options, SessionOptions
from distributed_state.records.schema import M, Schema
from distributed_state.records.transaction import AsyncBatch
from distributed_state.records.typed import AsyncTypedRecord, TypedContext
from distributed_state.results import Ask, SessionInfo, Usage
from distributed_state.search import querying
from distributed_state.settings import Settings
from distributed_state.store import maintenance
from distributed_state.store.admin import AsyncAdmin
from distributed_state.store.fleet import AsyncFleet
from distributed_state.store.lifecycle import StoreLifecycle, blocking_of, hook, opened_remotely, resolve
from distributed_state.store.work import Handlers
from distributed_state.tiers import ambient
from distributed_state.tiers import read as read_path
from distributed_state.values import chance, field_ttl
from distributed_state.values.codec import Codec
from distributed_state.values.encryption import Encryption, Sealed
from distributed_state.values.levels import level_of
from distributed_state.values.model import Ref, escape
from distributed_state.values.search import KINDS, Filter, Kind, Search, SearchHit


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
        self._lifecycle = StoreLifecycle(settings, root.of, guard, blocking_of, credentials, search)
        self._context = self._lifecycle.context
        self._handlers = Handlers()
        self._session_of = self.session
        self._blocking = blocking

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

        Without `url` everything runs in this process, and each commit is archived to a SQLite file before it returns. A
        relative path is resolved against the folder in which `open` is called. With `url` the store is shared by all
        workers that name the same Redis, `archive` (a SQLAlchemy URL, or "memory" for throwaway use) and `namespace`:
        redis://host:6379/0, redis+sentinel://host:26379,host:26379/service/0 or redis+cluster://host:6379,host:6379;
        with TLS rediss://, rediss+sentinel:// or rediss+cluster://, and unix://. `credentials()` is called for each new
        connection and returns user and password, for tokens that expire. With https://, or http:// within a private
        network, it is the store behind that service (`token=`, extra `remote`), with the methods of this class that
        work remotely: see AsyncRemoteStore. More settings: see Settings.

        `encryption` sets which data is encrypted and with which keys (see Encryption; without it, from the
        environment); `access` is asked before each action and may deny it (see Request); `clean(key, value)` and
        `clean_messages(message)` return the value or message to store instead. `search=True`, or a Search with options,
        turns on `search`, which finds records by their content; without a `url` the first search turns it on, unless
        this is False. Raises ConfigurationError, WarmUnavailable or ColdUnavailable.
        """
        remote = opened_remotely(
            "remote.store.AsyncRemoteStore", url, settings, archive=archive, namespace=namespace,
            encryption=encryption, access=access, clean=clean, clean_messages=clean_messages, credentials=credentials,
            search=search,
        )  # fmt: skip
        if remote is not None:
            return cast(Self, remote)  # a remote store has the same methods
        given = resolve(url=url, archive=archive, namespace=namespace, **settings)
        store = cls(given, encryption=encryption, access=access, credentials=credentials, search=search)
        hook(store, clean, clean_messages)
        return store

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

        This process's commits are archived first: an embedded store archives all of them; with Redis this takes at most
        `close_timeout` seconds (setting, 5), and without an archiver (`archiver=False`) other processes archive them.
        Commits that are not archived in time stay in Redis, and a warning in the log says how many. Has no effect on a
        closed store.
        """
        self._handlers.close()
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
            self._blocking = blocking_of(self)
        return self._blocking

    @property
    def settings(self) -> Settings:
        """The settings that the store was opened with, including those from the environment."""
        return self._context.settings

    @property
    def replica(self) -> str:
        """The name of this replica, 12 hex digits: unique to each process, even after an os.fork."""
        return self._context.tiers().replica

    @property
    def admin(self) -> AsyncAdmin:
        """The methods for operators: examine the store, archive, compact and purge it, export and import records."""
        return AsyncAdmin(self._context, self._lifecycle)

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

        `user` owns the session from its first write on; `actor` is recorded with every change made through this handle.
        With `schema`, a pydantic model, a dataclass, or a Schema of either, its fields are those of the model.

        A session that starts with a commit through this handle expires after `idle` seconds without another commit, and
        at the age of `lifetime` seconds (see `set_lifetime`); None means the store's `session_idle` and
        `session_lifetime`, and `math.inf` means never.

        With `on_invalid="stringify"`, values that JSON cannot hold are stored as their `str()`, at any depth;
        `clean(key, value)` and `clean_messages(message)` return the value or message to store instead, or raise. The
        store's own hooks run after them.
        """
        store, settings = self._context, self._context.settings
        ref = Ref("session", chance.token_hex(16) if id is None else id)
        idle, lifetime = options.pop("idle", None), options.pop("lifetime", None)
        lives = (
            field_ttl.span_ms("idle", settings.session_idle if idle is None else idle),
            field_ttl.span_ms("lifetime", settings.session_lifetime if lifetime is None else lifetime),
        )
        rest, fresh = cast(Options, options), id is None
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
        """Return the record of a task, which `user` owns. No I/O. Options as for `session`."""
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
        """Record `actor` with every change made inside `with`, except by handles that have an actor of their own.

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

        "memory": Redis has the change. "replicated": every replica that may be promoted has it too; "replicated:n": n
        of these have it, which guarantees nothing if another one is promoted. "fsynced": it is on the disk of its Redis
        server, which guarantees nothing across a failover. "archived": SQL has it. DurabilityUnknown means that a
        change was applied, but did not reach the level in time; repeat a turn under its request id, and confirm other
        changes by `record.version(durability=...)`. `durability=` of the change, batch or turn itself wins over this;
        without both, the setting `durability` applies.

        Raises InvalidValue for an unknown level; and ConfigurationError, here or when a change is made, if the servers
        can never reach it. It is a variable of the context, as in `acting_as`, and applies only to this store.
        """
        level = level_of(durability)
        self._lifecycle.refuse_never_kept(level)
        return ambient.durable(self.settings, level)

    async def time(self) -> float:
        """Read the server's time in seconds since 1970: one clock for all workers, independent of their own clocks.

        Example::

            await store.app("shop").set("open_until", await store.time() + 3600)

        This is mostly without I/O. The time may be wrong by half the round trip of the last reply. In a cluster it is
        that of the server whose clock is furthest behind. Raises WarmUnavailable if no server can be reached.
        """
        clock = self._context.tiers().clock
        await clock.know()
        return clock.now()

    async def get_many(self, handles: Iterable[AsyncRecord], *, fresh: bool = False) -> list[dict[str, Any]]:
        """Read the fields of several records, in their order. One round trip reads all that are not in hot.

        Example::

            fields, preferences = await store.get_many([session, store.user("u1")])

        A missing or deleted record gives an empty dict. `fresh=True` asks the server for all of them.
        Raises CorruptState as `get` does.
        """
        many = [context_of(each, "get_many") for each in handles]
        for context in many:
            context.allow("read", None)
        keys = [each.keys for each in many]
        entries = await read_path.read_many(self._context.tiers(), keys, fresh=fresh) if many else []
        return [context.fields(entry) for context, entry in zip(many, entries, strict=True)]

    def batch(self, *, durability: str | None = None) -> AsyncBatch:
        """Collect changes of many records; they are sent in one round trip at the end of `async with`.

        Example::

            async with store.batch() as batch:
                batch.on(session).set("city", "Oslo")
                batch.on(store.user("u1")).increment("trips", 1)

        Each record has one commit and changes completely or not at all; the batch as a whole may be applied in part.
        The end of the block raises the first error of a record, and `batch.versions` says which records were changed.
        `durability` is as in `durable`.
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
    ) -> Any:
        """Run an agent until it is done, has failed or waits for its user, and return its state.

        Example::

            def plan(state, turn):
                return state.to_done("Oslo is nearer.")

            state = await store.run(Workflow({"planning": plan}), "Oslo or Bergen?", session_id="c2", request_id="r1")
            assert state.final_answer == "Oslo is nearer."

        Each step is one commit, so any worker can continue after another one died: call `run` again with the same
        `session_id`, and the same input or None. `user_input` starts a task if the session is new or its task has
        ended; it answers a task that waits for the user; otherwise it is added to the task as a message. A `request_id`
        that was accepted before does not start a task again. Errors of a step are raised here, and the step may be run
        again. While another worker runs a step this waits, at most `wait` seconds (LockTimeout); a step's lease lasts
        `ttl` seconds.
        """
        session = self.session(session_id, user=user)
        return await workflow_run(session, workflow, user_input, request_id, self._context.dressed, wait=wait, ttl=ttl)

    async def delete(self, id: str, *, scope: str = "session") -> int:
        """Delete a record in all tiers and return the version of its tombstone. Raises NotFound if it never existed.

        Writes raise Deleted from then on. Its history stays until `purge`, `erase` or `forget`.
        """
        keys = self._context.keys.of(Ref(scope, id))
        self._context.allow("write", keys.ref)
        return await lifecycle.delete(self._context.tiers(), keys, self._context.deleting)

    async def erase(self, id: str, *, scope: str = "session") -> bool:
        """Remove a record permanently from every tier: fields, messages, history, events.

        Return False if it never existed.

        Forks stay, and keep the messages and items that they share with it. Its versions are not used again. Redis
        keeps the event of the deletion for disconnected replicas for `events_for` seconds. Raises Locked while another
        owner holds the record. Once the erasure has started, any replica that archives finishes it, even if this call
        raises; another call continues it. A fork that is being made at the same time may be erased too.
        """
        keys = self._context.keys.of(Ref(scope, id))
        self._context.allow("admin", keys.ref)
        return await lifecycle.erase(self._context.tiers(), keys, self._context.deleting)

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
        stuck: bool = False,
    ) -> list[SessionInfo]:
        """List records, the most recently archived change first; `after` is the `cursor` of a previous page's last row.

        Example::

            page = await store.sessions(user="u1", limit=20)
            if page:
                page = await store.sessions(user="u1", limit=20, after=page[-1].cursor)

        With `user`, lists only records of this owner; `limit` is from 1 to 1000, else InvalidValue. A record moves
        to the front at most once a minute; `updated` says when it last changed.

        With `prefix`, lists only ids that begin with it; with `tags`, only records that have all of these (see
        `write`). Both list in the order of the ids, by the bytes of their escaped text, so that concurrent additions
        and changes do not shift a page: use `prefix=""` for all records. The first tag and the prefix are looked up in
        an index; other conditions filter the result row by row::

            page = await store.sessions(prefix="shop:", tags={"run": "r1"})

        With `phase`, lists only records in this phase of their state machine, by an index; with `changed_since` and
        `changed_before`, those whose last change is in between (seconds since 1970); with `larger_than`, those with
        more committed bytes; with `stuck`, those whose handler is not tried again (see `work`). `SessionInfo` says
        which figures are missing for old records.

        Unarchived changes are listed only with `fresh`, which also reads the journals in Redis to their end and merges
        them into the page. The cost grows with the number of unarchived commits, which is small while SQL is available.
        """
        wanted = maintenance.wanted(
            scope=scope, limit=limit, user=user, prefix=prefix, tags=tags, after=after, phase=phase,
            changed_since=changed_since, changed_before=changed_before, larger_than=larger_than, stuck=stuck,
        )  # fmt: skip
        # A listing by tags reveals them.
        for field in (None, *([TAGS] if tags else []), *([MOVES] if phase is not None else [])):
            self._context.allow("read", field=field, user=wanted.owner, scope=scope, prefix=prefix)
        return await maintenance.listing(self._context.tiers(), wanted, fresh=fresh)

    async def asks(
        self, *, user: str | None = None, prefix: str | None = None, limit: int = 50, fresh: bool = False
    ) -> list[Ask]:
        """List open questions to people, those of the last changed sessions first, of at most `limit` sessions.

        Example::

            for ask in await store.asks(user="u1"):
                print(ask.question)  # answered by store.session(ask.session).answer("yes", ask.name, id=ask.id)

        `prefix` and `fresh` are as in `sessions`. A question is asked by `turn.ask`; one that was answered or has
        expired is not listed.
        """
        page = await self.sessions(user=user, prefix=prefix, limit=limit, phase=asks.PHASE, fresh=fresh)
        return await asks.of_page([context_of(self.session(each.id)) for each in page], [each.user for each in page])

    async def usage(
        self,
        *,
        user: str | None = None,
        prefix: str | None = None,
        since: float | datetime | None = None,
        fresh: bool = False,
    ) -> Usage:
        """Add up the tokens that models used in the turns of sessions, by model and day: see `turn.model`.

        Example::

            from datetime import UTC, datetime

            month = datetime.now(UTC).replace(day=1)
            used = await store.usage(user="u1", since=month)
            print(used.tokens, used.models, used.days)

        With `user`, counts only sessions that this user owns; with `prefix`, only those whose ids begin with it.
        `since` is in seconds since 1970 or a datetime, and means the whole day, in UTC, that contains it. Deleted
        sessions count, erased ones do not. Commits that are not archived yet count only with `fresh`, as in `sessions`.
        """
        wanted = maintenance.wanted(scope="session", limit=1, user=user, prefix=prefix, tags=None, after=None)
        self._context.allow("read", user=wanted.owner, scope="session", prefix=prefix)
        return await maintenance.usage(self._context.tiers(), wanted, since, fresh=fresh)

    async def forget(self, user: str) -> int:
        """Remove every trace of a user: the user's records, sessions and tasks, their forks and history.

        The hash of each id stays with its last version, so that no version is used twice. Redis keeps the events of the
        deletions for disconnected replicas for `events_for` seconds. Forks that are being made at the same time fail or
        are erased too. Once the erasure has started, any replica that archives finishes it, even if this call raises;
        another call continues it. Returns the number of records.
        """
        owner = escape(Ref("user", user).id)
        self._context.allow("admin", user=owner)
        return await lifecycle.forget(self._context.tiers(), owner)

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

        Finds entries that have all words of `query` in any order, or any of them with `match="any"`; in a store with
        `embed`, entries of similar meaning. Query syntax is ignored: quotes, `*` or NEAR have no effect. Without a
        query it returns everything, the newest first. Filters: the `scope`, the `prefix` of records' ids, the owner
        (`user`), `kinds` ("message", "field", "item"), a `collection` of items, and objects with these values:
        `filter={"city": "Oslo"}`, or {"$gt": 3} as a value, with $eq, $ne, $gt, $gte, $lt, $lte. Skips the first
        `offset`.

        Entries are found once they are archived and indexed, mostly within a second of the write; `fresh` waits until
        everything written so far is. At most 10,000 candidates are examined. Entries that the store's policy denies are
        left out. Raises ConfigurationError if search is off (see `open`), TooLarge if the found values exceed 32 MiB,
        ColdUnavailable without SQL.
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
