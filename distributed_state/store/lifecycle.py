"""The lifecycle of a store in this process: opening, sharing by threads and event loops, os.fork, closing.

Law: a store is one namespace on one Redis and one SQL database; opening it checks that they belong together. The URL of
a service opens a remote store instead, and settings that do not exist for a service are refused, not ignored.

Design: sections 14, 16, 26.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Literal

import orjson

from distributed_state.cold.connections import parse_url
from distributed_state.cold.opening import Known
from distributed_state.cold.store import ColdStore
from distributed_state.errors import ColdUnavailable, ConfigurationError
from distributed_state.events import handlers
from distributed_state.port import Mutex, Port
from distributed_state.port.addresses import SCHEMES
from distributed_state.port.background import Exclusive
from distributed_state.port.connections import Connections, Credentials
from distributed_state.port.shared import SharedPort
from distributed_state.records.access import Guard
from distributed_state.records.context import StoreContext
from distributed_state.records.sanitizing import Clean, CleanMessage, sanitizer
from distributed_state.search.follower import Follower, Setting
from distributed_state.settings import Settings
from distributed_state.store import doctor, watch
from distributed_state.store.doctor import Noting
from distributed_state.store.reaper import Reaper
from distributed_state.tiers.assembly import Tiers, leave_mark
from distributed_state.tiers.durability import admit
from distributed_state.values import chance
from distributed_state.values.codec import Codec
from distributed_state.values.keys import Keys
from distributed_state.values.levels import ARCHIVED, MEMORY, Level
from distributed_state.values.search import Search
from distributed_state.warm.confirming import never_embedded

_SCHEMES = ("http://", "https://")
_OWN = ("token", "retry_for", "timeout")
Kind = Literal["remote.store.AsyncRemoteStore", "remote.blocking.RemoteStore"]


def opened_remotely(kind: Kind, url: str | None, settings: Mapping[str, Any], **others: object) -> Any:
    """A remote store of this kind, or None if the URL is not that of a service. Raises ConfigurationError."""
    found = os.environ.get("DISTRIBUTED_STATE_URL") if url is None else url
    if not isinstance(found, str) or not found.lower().startswith(_SCHEMES):
        if "token" in settings:
            raise ConfigurationError("token: is for a store behind a service, at an http:// or https:// URL")
        return None
    theirs = [name for name, value in {**others, **settings}.items() if value is not None and name not in _OWN]
    if theirs:
        raise ConfigurationError(
            f"the URL is that of a service, and {', '.join(theirs)} is not for its clients to say; "
            "a store of one's own is at redis://"
        )
    module, _, name = kind.rpartition(".")
    return getattr(import_module(f"distributed_state.{module}"), name).open(found, **settings)


def core_of(handle: Any) -> Any:
    """The asyncio object of an object in the blocking API; anything else as it is."""
    return getattr(handle, "_core", handle)


def blocking_of(core: Any) -> Any:
    """An object of the blocking API for a store, a session or a turn of asyncio."""
    # The blocking API is generated from the asyncio API and imports it, so it is imported here, when it is needed.
    return import_module("distributed_state.store.blocking").blocking(core)


def lifecycle_of(store: Any) -> StoreLifecycle:
    """The lifecycle of a store of either API."""
    lifecycle: StoreLifecycle | None = getattr(core_of(store), "_lifecycle", None)
    if lifecycle is None:
        raise ConfigurationError(f"this takes a store that is open here, by its Redis URL, not {store!r:.80}")
    return lifecycle


def hook(store: Any, clean: Clean | None, clean_messages: CleanMessage | None) -> None:
    """Apply these functions to all values and messages that are stored through this store from now on."""
    sanitizer({}, clean, clean_messages)
    context = lifecycle_of(store).context
    context.clean, context.clean_messages = clean, clean_messages


log = logging.getLogger(__name__)
LAYOUT = 1
EMBEDDED_ARCHIVE = "sqlite:///distributed-state.db"
_open_stores: weakref.WeakSet[StoreLifecycle] = weakref.WeakSet()


class StoreLifecycle:
    """Opens and closes a store, and holds its tiers. `unusable` says why the store cannot be used."""

    def __init__(
        self,
        settings: Settings,
        codec_of: Callable[[str], Codec],
        guard: Guard | None,
        blocking_of: Callable[[Any], Any],
        credentials: Credentials | None = None,
        search: Search | bool | None = None,
    ) -> None:
        self.context = StoreContext(
            settings=settings,
            keys=Keys(settings.namespace, settings.partitions),
            codec_of=codec_of,
            guard=guard,
            tiers=self.tiers,
            blocking_of=blocking_of,
        )
        self.connections = Connections(settings.url, settings.timeout, credentials, retry_for=settings.retry_for)
        # Done before waiting for Redis: an invalid URL raises at once, and a relative path means the present folder.
        self._archive = parse_url(settings.archive or EMBEDDED_ARCHIVE)
        self.search = Setting(search, lazily=self.connections.embedded is not None, migrate=settings.migrate)
        self.cold: ColdStore | None = None
        self.unusable = "open it first: `async with AsyncStateStore.open(...) as store`"
        self._settings = settings
        self._tiers: Tiers | None = None
        self._openings: set[object] = set()
        self._mutex = Mutex()
        self._changing = Exclusive()  # held while the store is opened or closed
        self._layout: dict[str, Any] = {}

    async def open(self) -> None:
        """Open the store, unless it is open. Raises ConfigurationError, WarmUnavailable or ColdUnavailable."""
        if not await self._changing.take(unless=handlers.inside()):
            raise ConfigurationError("a task of the event loop that this call holds up opens or closes the store")
        try:
            if self.cold is None:
                await self._open()
        except BaseException:
            await self._to_the_end()
            raise
        self._changing.give_back()

    async def _open(self) -> None:
        await self._open_archive()
        tiers = self._assemble()
        await tiers.port.open()
        await tiers.clock.know()
        await admit(tiers, tiers.confirming.level)
        await self._require_index(tiers)

    async def _require_index(self, tiers: Tiers) -> None:
        """Raise an error of the index at once, unless SQL is unavailable."""
        if self.search.wanted:
            try:
                await self.search.require(tiers.port, tiers.cold.search)
            except ColdUnavailable as error:
                log.warning("opened without checking the index: %s", error)

    async def _open_archive(self) -> None:
        port = SharedPort(self.connections)
        try:
            await port.open()
            async with Noting(port, self._settings, self.context.keys):
                if not self.connections.embedded:
                    doctor.refuse(await doctor.check_server(port), self.connections.place)
                self._openings.add(opening := object())
                try:
                    await port.sql(self._open_cold, opening)
                    await self._check_layout(port)
                except ColdUnavailable as error:
                    self._let_go()
                    await self._open_without_sql(port, error)
            self.unusable = ""
            _watch_forks()
            _open_stores.add(self)
        finally:
            await port.close()

    def _open_cold(self, opening: object) -> None:
        """Open the archive, in a thread that continues when its caller is cancelled or interrupted."""
        settings = self._settings
        cold = ColdStore.open(
            self._archive,
            settings.namespace,
            migrate=settings.migrate,
            snapshot_every=settings.snapshot_every,
            timeout=settings.sql_timeout,
            alone=self.connections.embedded is not None,
        )
        with self._mutex:
            if opening in self._openings and self.cold is None:
                self.cold = cold
                return
        cold.close()  # the caller was cancelled before it got this, or another task was faster

    async def _check_layout(self, port: Port) -> None:
        """Require that the namespace's Redis and SQL database belong together."""
        assert self.cold is not None
        settings = self._settings
        archive_id, partitions = await port.sql(self.cold.register, settings.partitions)
        self._adopt(partitions)
        self._layout = wanted = {"layout": LAYOUT, "partitions": partitions, "archive": archive_id}
        self._compare(await leave_mark(port.command, self.context.keys, wanted), wanted)

    def _adopt(self, partitions: int) -> None:
        """Take over the namespace's number of partitions. Raises ConfigurationError if another number was given."""
        settings = self._settings
        if partitions == settings.partitions:
            return
        if "partitions" in settings.model_fields_set or not self.context.keys.adopt(partitions):
            raise ConfigurationError(
                f"namespace {settings.namespace!r} has {partitions} partitions, not {settings.partitions}; the number "
                f"is fixed at its first use: give partitions={partitions}, or DISTRIBUTED_STATE_PARTITIONS={partitions}"
            )
        self._settings = self.context.settings = settings.model_copy(update={"partitions": partitions})

    async def _open_without_sql(self, port: Port, error: ColdUnavailable) -> None:
        """Serve Redis' data until SQL is available. Raises `error` if Redis does not know the namespace."""
        mark = await port.command(b"GET", self.context.keys.store)
        if mark is None:
            raise error
        found = self._compare(mark, {"layout": LAYOUT}).get("partitions")
        if type(found) is int:
            self._adopt(found)
        settings = self._settings
        self._layout = self._compare(mark, {"layout": LAYOUT, "partitions": settings.partitions})
        self.cold = ColdStore.open_later(
            self._archive,
            Known(settings.namespace, str(self._layout.get("archive")), settings.partitions),
            migrate=settings.migrate,
            snapshot_every=settings.snapshot_every,
            timeout=settings.sql_timeout,
        )
        log.warning("opened with Redis only: data that is not in Redis is unavailable: %s", error)

    def _compare(self, mark: bytes | None, wanted: dict[str, Any]) -> dict[str, Any]:
        """The store's description in Redis; it must match the wanted one."""
        place = self.connections.place
        try:
            found = dict(orjson.loads(mark)) if mark else wanted
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"{place}: {self.context.keys.store!r} is not this package's") from error
        for name, value in wanted.items():
            if found.get(name) != value:
                raise ConfigurationError(
                    f"{place}, namespace {self._settings.namespace!r}: {name} is {found.get(name)!r}, "
                    f"expected {value!r}: they do not belong together (archive 'memory' is another "
                    "one in each process); give the archive that this Redis had, or another namespace"
                )
        return found

    def refuse_never_kept(self, level: Level) -> None:
        """Raise ConfigurationError for a level that the embedded server cannot reach."""
        if self.connections.embedded is not None and level not in (MEMORY, ARCHIVED):
            raise ConfigurationError(never_embedded(level))

    def tiers(self) -> Tiers:
        """The tiers of this process: all its threads and event loops share them."""
        return self._tiers or self._assemble()

    @property
    def tiers_in_use(self) -> Tiers | None:
        """The tiers, or None if the store is not open."""
        return self._tiers

    def _assemble(self) -> Tiers:
        with self._mutex:  # several threads of a forked child may get here at once
            if self._tiers is not None:
                return self._tiers
            if self.unusable or self.cold is None:
                raise ConfigurationError(f"this store cannot be used: {self.unusable}")
            replica = chance.token_hex(6)  # unique, and short because records store it
            port, context = SharedPort(self.connections, replica), self.context
            tiers = Tiers(port, self._settings, context.keys, context.codec_of, self.cold, replica, self._layout)
            tiers.heartbeat.begin()
            tiers.gathering.begin()
            follower = Follower(tiers, self.search)
            if self._settings.archiver:
                tiers.archiver.begin()
                tiers.workers.append(reaper := Reaper(tiers))
                reaper.begin()
                watch.begin(tiers)
                follower.begin()
            tiers.workers.append(follower)
            self._tiers = tiers
            return tiers

    async def close(self) -> None:
        """Stop the background work, drop all connections and close the archive. Concurrent calls wait for it."""
        if await self._changing.take(unless=handlers.inside()):
            await self._to_the_end()

    async def _to_the_end(self) -> None:
        """Close in a task that is not cancelled with the caller: a half-closed store would archive forever."""
        port = self._tiers and self._tiers.port
        await (port.shield(self._close()) if port and port.suspends else self._close())

    async def _close(self) -> None:
        try:
            if self._tiers is not None:
                await self._tiers.close()
        finally:
            self.unusable, self._tiers = "it is closed", None
            try:
                self._let_go()
            finally:
                self._changing.give_back()

    def _let_go(self) -> None:
        with self._mutex:
            self._openings.clear()
            cold = self.cold
            self.cold = None
        if cold is not None:
            cold.close()

    def after_fork(self) -> None:
        """Start as a new replica in a forked child: without leases, cached records and inherited sockets."""
        self._mutex = Mutex()  # the old one may be held by a thread that exists only in the parent
        self._changing = Exclusive()
        self.context.ephemeral.forget()
        self.context.deleting.clear()
        tiers, self._tiers = self._tiers, None
        if tiers is not None:
            tiers.leases.abandoned = True
            tiers.port.abandon()
        if self.cold is not None:
            self.cold.abandon()
        if self.connections.embedded:
            self.unusable = "an embedded store belongs to the process that opened it, and this one is forked from it"


def resolve(**given: Any) -> Settings:
    """The settings that result from the given ones."""
    settings = Settings.of(**given)
    changed: dict[str, Any] = {}
    if settings.url is not None and settings.url.startswith(SCHEMES) and settings.archive is None:
        raise ConfigurationError(
            "archive: name the SQL database that keeps the history, as postgresql://..., sqlite:///... or 'memory'"
        )
    if settings.durability is None:
        changed["durability"] = "archived" if settings.url is None else "memory"
    return settings.model_copy(update=changed)


@cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for store in list(_open_stores):
        try:
            store.after_fork()
        except Exception:  # if one store fails here, the others must still drop the parent's connections
            log.exception("a forked child could not close a store that it inherited")
