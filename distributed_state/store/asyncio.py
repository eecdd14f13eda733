"""The store: opens and closes, hands out records, and does what concerns many of them.

Law: a store is one namespace on one Redis and one SQL database; opening it checks that they belong together.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import AbstractContextManager
from functools import cache
from types import TracebackType
from typing import Any, Self

import orjson

import distributed_state.port.asyncio as asyncio_face
from distributed_state.cold.engine import parse_url
from distributed_state.cold.store import ColdStore
from distributed_state.conversation.agent_state import AgentState
from distributed_state.conversation.workflow import Workflow
from distributed_state.conversation.workflow import run as workflow_run
from distributed_state.errors import ConfigurationError, InvalidValue
from distributed_state.port import Mutex, Port
from distributed_state.port.connections import SCHEMES, Connections
from distributed_state.records import deletion, erasure
from distributed_state.records.access import Guard, Policy
from distributed_state.records.batch import AsyncBatch
from distributed_state.records.ephemeral import Ephemeral
from distributed_state.records.record import AsyncRecord
from distributed_state.records.sanitizing import Clean, CleanMessage, sanitizer
from distributed_state.records.schema import M, Schema
from distributed_state.settings import Settings
from distributed_state.store import doctor, export, import_record, maintenance, reencryption
from distributed_state.store.fleet import AsyncFleet
from distributed_state.store.reaper import Reaper
from distributed_state.store.reencryption import Reencrypted
from distributed_state.store.upcasting import Upcast, upcast_many
from distributed_state.tiers import actors
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers, leave_mark
from distributed_state.values.codec import Codec
from distributed_state.values.encryption import Encryption, Sealed
from distributed_state.values.keys import Keys
from distributed_state.values.model import Ref, escape
from distributed_state.values.results import SessionInfo

LAYOUT = 1
EMBEDDED_ARCHIVE = "sqlite:///distributed-state.db"
_open_stores: weakref.WeakSet[AsyncStateStore] = weakref.WeakSet()


class AsyncStateStore(AsyncFleet):
    """Tiered state for agents: open one per process and share it. `StateStore` is the same for blocking code.

    Example::

        async with AsyncStateStore.open() as store:  # in this process, archived to ./distributed-state.db
            session = store.session("c1", user="u1")
            await session.append({"role": "user", "content": "A weekend in Oslo, please"})
            await session.set("city", "Oslo")
            assert await session.get("city") == "Oslo"

    It may be used from several event loops; each gets connections and a hot tier of its own.
    """

    settings: Settings
    """The settings it was opened with, those from the environment included."""

    def __init__(
        self,
        settings: Settings,
        make_port: Callable[[Connections], Port] = asyncio_face.AsyncioPort,
        here: Callable[[], Any] = asyncio_face.here,
        *,
        encryption: Encryption | None = None,
        access: Policy | None = None,
    ) -> None:
        self.settings = settings
        self.keys = Keys(settings.namespace, settings.partitions)
        encryption = encryption or Encryption.from_environment()
        root = Codec(settings.namespace, "") if encryption is None else Sealed(encryption, settings.namespace, "")
        self.codec_of: Callable[[str], Codec] = root.of
        self.guard = None if access is None else Guard(access)
        self._make_port = make_port
        self._here = here
        self._connections = Connections(settings.url, settings.timeout)
        parse_url(settings.archive or EMBEDDED_ARCHIVE)  # what is wrong with it is said before Redis is waited for
        self._homes: dict[Any, Tiers] = {}
        self._cold: ColdStore | None = None
        self._openings: set[object] = set()
        self._mutex = Mutex()
        self._layout: dict[str, Any] = {}
        self.ephemeral = Ephemeral()
        self.deleting: list[Callable[[Ref], Awaitable[None]]] = []  # awaited before this replica deletes a record
        self.clean: Clean | None = None
        self.clean_messages: CleanMessage | None = None
        self.wrap: Callable[[Any], Any] = lambda twin: twin  # what user code is given in place of our own objects
        self._unusable = "open it first: `async with AsyncStateStore.open(...) as store`"

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
        **settings: Any,
    ) -> Self:
        """Open a store: `async with AsyncStateStore.open(...) as store`, or `store = await AsyncStateStore.open(...)`.

        Example::

            async with AsyncStateStore.open(archive="memory", namespace="shop", recent_messages=100) as store:
                await store.app("shop").set("open", True)

        Without `url` everything runs in this process, archived to a SQLite file, each commit before it returns. With
        `url` (redis://, rediss://, unix://) it is shared by all workers that name the same Redis, `archive` (a
        SQLAlchemy URL, or "memory" for throwaway use) and `namespace`. More settings: see Settings.
        `encryption` says what is encrypted and with which keys (see Encryption; without it, from the environment);
        `access` is asked before everything and may deny it (see Request); `clean(key, value)` and
        `clean_messages(message)` return what is stored in place of each value and message.
        Raises ConfigurationError, WarmUnavailable or ColdUnavailable.
        """
        given = resolve(url=url, archive=archive, namespace=namespace, **settings)
        store = cls(given, encryption=encryption, access=access)
        store.hook(clean, clean_messages)
        return store

    def hook(self, clean: Clean | None, clean_messages: CleanMessage | None) -> None:
        """Clean everything that is stored from now on."""
        sanitizer({}, clean, clean_messages)
        self.clean = clean
        self.clean_messages = clean_messages

    def __await__(self) -> Generator[Any, None, Self]:
        return self._opened().__await__()

    async def __aenter__(self) -> Self:
        return await self._opened()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _opened(self) -> Self:
        if self._cold is None:
            try:
                await self._open_archive()
                home = self._move_in()
                await home.port.open()
                await home.clock.know()
            except BaseException:
                await self.close()
                raise
        return self

    async def _open_archive(self) -> None:
        port = self._make_port(self._connections)
        try:
            if not self._connections.embedded:
                doctor.refuse(await doctor.check_server(port), self._connections.place)
            opening = object()
            self._openings.add(opening)
            await port.sql(self._open_cold, opening)
            await self._check_layout(port)
            self._unusable = ""
            _hear_forks()
            _open_stores.add(self)
        finally:
            await port.close()

    def _open_cold(self, opening: object) -> None:
        """Open the archive, in a thread: it goes on when its caller is cancelled or interrupted."""
        settings = self.settings
        cold = ColdStore.open(
            settings.archive or EMBEDDED_ARCHIVE,
            settings.namespace,
            migrate=settings.migrate,
            snapshot_every=settings.snapshot_every,
            alone=self._connections.embedded,
        )
        with self._mutex:
            if opening in self._openings and self._cold is None:
                self._cold = cold
                return
        cold.close()  # the caller has left, and cannot close what it never got; or another task was faster

    async def _check_layout(self, port: Port) -> None:
        """The namespace's Redis and SQL must have been together from the first."""
        assert self._cold is not None
        settings = self.settings
        archive_id, partitions = await port.sql(self._cold.register, settings.partitions)
        if partitions != settings.partitions:
            raise ConfigurationError(
                f"namespace {settings.namespace!r} has {partitions} partitions, not {settings.partitions}; "
                "the number is fixed at its first use"
            )
        wanted = {"layout": LAYOUT, "partitions": partitions, "archive": archive_id}
        self._layout = wanted
        stored = await leave_mark(port.command, self.keys, wanted)
        try:
            found = dict(orjson.loads(stored)) if stored else wanted
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"{self._connections.place}: {self.keys.store!r} is not this package's") from error
        for name, value in wanted.items():
            if found.get(name) != value:
                raise ConfigurationError(
                    f"{self._connections.place}, namespace {settings.namespace!r}: {name} is {found.get(name)!r}, "
                    f"expected {value!r}: they do not belong together (archive 'memory' is another "
                    "one in each process); give the archive that this Redis had, or another namespace"
                )

    @property
    def replica(self) -> str:
        """The name of this replica, 12 hex digits: another one for each event loop and each forked process."""
        return self.tiers().replica

    def tiers(self) -> Tiers:
        """The tiers of the running event loop."""
        try:
            return self._homes[self._here()]
        except KeyError:
            return self._move_in()

    def _move_in(self) -> Tiers:
        if self._unusable or self._cold is None:
            raise ConfigurationError(f"this store cannot be used: {self._unusable}")
        for loop in [loop for loop in list(self._homes) if getattr(loop, "is_closed", bool)()]:
            self._homes.pop(loop, None)
        port = self._make_port(self._connections)
        home = Tiers(port, self.settings, self.keys, self.codec_of, self._cold, _replica(), self._layout)
        # Threads of a forked child may come here at once; the first one's is everybody's.
        kept = self._homes.setdefault(self._here(), home)
        if kept is home:
            home.presence.begin()
            if self.settings.archiver:
                home.archiver.begin()
                reaper = Reaper(home)
                home.workers.append(reaper)
                reaper.begin()
        return kept

    async def close(self) -> None:
        """Stop the background work of the running loop and drop its connections; the last one closes the archive.

        An embedded store archives what is left first. Harmless when it is closed already.
        """
        home = self._homes.pop(self._here(), None)
        if home is not None:
            if self._connections.embedded:
                await home.archive_rest()
            await home.close()
        if not self._homes:
            self._unusable = "it is closed"
            await self._let_go()

    async def _let_go(self) -> None:
        with self._mutex:
            self._openings.clear()
            cold = self._cold
            self._cold = None
        if cold is not None:
            cold.close()

    def after_fork(self) -> None:
        """In a forked child: a new replica, no leases, nothing hot, no inherited sockets."""
        for home in self._homes.values():
            home.leases.abandoned = True
            home.port.abandon()
        self._homes.clear()
        self.ephemeral.forget()
        self.deleting.clear()
        if self._cold is not None:
            self._cold.abandon()
        if self._connections.embedded:
            self._unusable = "an embedded store belongs to the process that opened it, and this one is forked from it"

    # Several records

    def invalidate(self) -> None:
        """Drop everything that this process keeps of records; the next reads ask the server. No I/O."""
        self.tiers().hot.clear()

    def acting_as(self, actor: str) -> AbstractContextManager[None]:
        """Note `actor` with every change made inside `with`, by any handle that names no actor of its own.

        Example::

            with store.acting_as("support:ada"):
                await session.set("city", "Bergen")

        `history()` shows it. It is a variable of the context, as in `contextvars`: tasks created inside inherit it; a
        new thread does if it is started by `asyncio.to_thread` or with `contextvars.copy_context().run`.
        """
        return actors.acting_as(actor)

    async def get_many(self, handles: Iterable[AsyncRecord]) -> list[dict[str, Any]]:
        """Read the fields of several records, in their order; what is not hot comes in one round trip.

        Example::

            fields, preferences = await store.get_many([session, store.user("u1")])

        A record that is not there, or deleted, gives an empty dict. Raises CorruptState as `get` does.
        """
        many = list(handles)
        for handle in many:
            handle._allow("read", None)
        entries = await read_path.read_many(self.tiers(), [handle._names for handle in many]) if many else []
        return [handle._fields(entry) for handle, entry in zip(many, entries, strict=True)]

    def batch(self) -> AsyncBatch:
        """Collect changes of many records; they are sent in one round trip at the end of `async with`.

        Example::

            async with store.batch() as batch:
                batch.on(session).set("city", "Oslo")
                batch.on(store.user("u1")).increment("trips", 1)

        One commit a record: each record changes wholly or not at all, the batch as a whole may be applied in part. At
        its end it raises the first error of a record, and `batch.versions` says which records were changed.
        """
        return AsyncBatch(self)

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

        One commit a step, so any worker goes on where another one died: call it again with the same `session_id`, and
        the same input or None. A new session, or one whose task is over, begins a new task with `user_input`; one that
        waits takes it as the answer; one in the middle of another task is told it. With a `request_id` a request that
        was taken before begins nothing. What a step raises is raised here, and the step may be run again. While
        another worker runs a step it waits, at most `wait` seconds (LockTimeout); a step's lease lives `ttl` seconds.
        """
        session = self.session(session_id, user=user)
        return await workflow_run(session, workflow, user_input, request_id, self.wrap, wait=wait, ttl=ttl)

    async def delete(self, id: str, *, scope: str = "session") -> int:
        """Delete a record in all tiers and return the version of its tombstone. Raises NotFound if it never was.

        Writes raise Deleted from then on. Its history stays until `purge`, `erase` or `forget`.
        """
        names = self.keys.of(Ref(scope, id))
        self._allow("write", names.ref)
        return await deletion.delete(self.tiers(), names, self.deleting)

    async def erase(self, id: str, *, scope: str = "session") -> bool:
        """Remove a record for good, with history and messages; False if there was nothing. See `session.erase()`."""
        names = self.keys.of(Ref(scope, id))
        self._allow("admin", names.ref)
        return await erasure.erase(self.tiers(), names, self.deleting)

    # Many records

    async def sessions(
        self, *, user: str | None = None, limit: int = 50, after: str | None = None, scope: str = "session"
    ) -> list[SessionInfo]:
        """List records, the last archived change first; `after` is the `cursor` of a previous page's last row.

        Example::

            page = await store.sessions(user="u1", limit=20)
            if page:
                page = await store.sessions(user="u1", limit=20, after=page[-1].cursor)

        Only those that `user` owns, if given; `limit` is from 1 to 1000, else InvalidValue. What is not archived yet is
        not listed: `archive()` first where that matters.
        """
        if type(limit) is not int or not 1 <= limit <= 1000:
            raise InvalidValue(f"limit is an int from 1 to 1000, not {limit!r}")
        Ref(scope, "any")
        owner = None if user is None else escape(Ref("user", user).id)
        self._allow("read", user=owner, scope=scope)
        return await maintenance.listing(self.tiers(), scope, owner, limit, after)

    async def export(self, id: str, *, scope: str = "session") -> list[str]:
        """Read a record with its whole history as JSON lines, for `import_`.

        Example::

            await session.set("city", "Oslo")
            lines = await store.export("c1")
            await store.import_(lines, id="a copy of c1")

        What is encrypted stays so. Raises NotFound if it never was, ColdUnavailable rather than leave something out.
        """
        names = self.keys.of(Ref(scope, id))
        self._allow("admin", names.ref)
        return await export.export(self.tiers(), names)

    async def import_(self, lines: Iterable[str], *, id: str | None = None) -> str:
        """Bring an exported record back, with its versions, and return its id. All or nothing.

        Raises Conflict if the record exists; InvalidValue names the line that cannot be read.
        """
        given = import_record.Import(lines, id, self.settings)
        self._allow("admin", given.ref, user=given.owner)
        return await import_record.import_(self.tiers(), given)

    async def reencrypt(
        self, *, dry_run: bool = False, progress: Callable[[Reencrypted], None] | None = None
    ) -> Reencrypted:
        """Encrypt under the current key what is stored under another or, with `accept_plaintext`, not encrypted.

        History, messages, snapshots and events included; versions stay as they are. May run beside workers that write
        under the key already, however busy, and waits for none. It may be broken off and repeated: what is done is
        skipped. `dry_run` only counts. `progress` is called now and then with the counts so far. A record that cannot
        be decrypted is left as it is and counted. Events that Redis keeps for consumers leave it, up to the last old
        one: who has yet to read them gets a `resync`, and `audit` finds them. Not reached are backups, logs of
        Redis and SQL, and of what was plain once a checksum of 32 bits in the id of its event: `purge` removes those.
        """
        self._allow("admin")
        return await reencryption.reencrypt(self.tiers(), dry_run, progress)

    async def purge(self, *, older_than: float) -> dict[str, int]:
        """Remove history and events older than this many seconds; the present state of live records stays readable.

        Versions older than that can no longer be read or restored. Forks keep what they share. Returns counts of
        records, changes, messages and events.
        """
        self._allow("admin")
        return await maintenance.purge(self.tiers(), older_than)

    async def forget(self, user: str) -> int:
        """Remove every trace of a user: the user's records, sessions and tasks, their forks and history.

        Leaves hashed ids with their last version, so that no version is used twice, and in Redis, for replicas that
        are away, for `events_for` seconds that the conversations are deleted. Forks that are on their way meanwhile
        fail or go too. Once begun it is carried through by any replica that archives, even if this raises; called
        again it goes on. Returns the number of records.
        """
        owner = escape(Ref("user", user).id)
        self._allow("admin", user=owner)
        return await erasure.forget(self.tiers(), owner)

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
        """Bring the records of a scope up to this schema's version, as their next write would; return the counts.

        Records that cannot be are counted as failed, stay as they are and do not end it; `dry_run` only counts. At most
        `limit` are brought up. May be ended and run again at any time, and beside workers: what an older one writes
        meanwhile is left to the next run. All records of the scope are taken to be of this schema.
        """
        self._allow("admin", scope=scope)
        return await upcast_many(self, schema, scope, user, dry_run, limit, progress)

    async def archive(self) -> int:
        """Archive everything written so far, by any replica; return how many commits this replica archived for it.

        Raises ColdUnavailable if the SQL database cannot be reached.
        """
        self._allow("admin")
        return await self.tiers().archiver.drain()

    async def doctor(self) -> list[doctor.Finding]:
        """Examine the servers and return what was found, with advice where something is wrong.

        Example::

            for finding in await store.doctor():
                if not finding.ok:
                    print(finding.advice)
        """
        self._allow("admin")
        return await doctor.examine(self.tiers(), embedded=self._connections.embedded)

    async def stats(self) -> dict[str, int]:
        """Return figures of this replica by name, and how many commits of the fleet wait to be archived (`unarchived`).

        Of events: how many are waiting for its consumers, were handled by handlers, failed in them or took them longer
        than `slow_handler`, and how often a consumer had to resync.
        """
        self._allow("read")
        tiers = self.tiers()
        unarchived = sum((await tiers.archiver.backlog()).values())
        return tiers.figures().stats | {"unarchived": unarchived}


def resolve(**given: Any) -> Settings:
    """The settings that follow from what was given."""
    settings = Settings.of(**given)
    changed: dict[str, Any] = {}
    if settings.url is not None and settings.url.startswith(SCHEMES) and settings.archive is None:
        raise ConfigurationError(
            "archive: name the SQL database that keeps the history, as postgresql://..., sqlite:///... or 'memory'"
        )
    if settings.durability is None:
        changed["durability"] = "archived" if settings.url is None else "memory"
    return settings.model_copy(update=changed)


def _replica() -> str:
    """A name for one life of one replica: never used again, and short, because records remember it."""
    return secrets.token_hex(6)


@cache
def _hear_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for store in list(_open_stores):
        store.after_fork()
