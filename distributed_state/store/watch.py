"""Looks at the servers for metrics, in separate jobs. Law: a job never waits for the work that it measures.

An archiver whose SQL does not answer stops, and figures that it updated would stop with it. Therefore one job looks at
the journals in Redis, and another one at SQL; each reports the age of its last look. Both start when metrics are first
collected. The time until a journal is full is estimated from two looks, by this process's clock (`Filling`).

Design: sections 9, 27.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Generic, NamedTuple, TypeVar

from distributed_state.cold.store import RECENT
from distributed_state.errors import StateError
from distributed_state.settings import Settings
from distributed_state.store import doctor
from distributed_state.store.doctor import Journals, lasting_share, look, server_info
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.workers import JobWorker
from distributed_state.warm.answers import PartitionState

_APART = 1.0  # minimum seconds between two looks: over a shorter time a burst would count as a rate
_WEIGHT = 0.5  # of the newer look in the smoothed rate


class _Look(NamedTuple):
    epoch: str
    moment: float
    fill: float
    rate: float  # of the fill per second


class Filling:
    """How fast journals fill, by partition: bytes written minus bytes archived."""

    def __init__(self, settings: Settings, monotonic: Callable[[], float]) -> None:
        self._settings = settings
        self._monotonic = monotonic
        self._looks: dict[int, _Look] = {}

    def note(self, places: Mapping[int, PartitionState]) -> None:
        """Note the present state of partitions; missing ones are archived by other replicas."""
        now = self._monotonic()
        looks = {}
        for partition, place in places.items():
            fill = place.fill(self._settings)
            before = self._looks.get(partition)
            if before is None or before.epoch != place.epoch:
                looks[partition] = _Look(place.epoch, now, fill, 0.0)
            elif now - before.moment < _APART:
                looks[partition] = before
            else:
                rate = (fill - before.fill) / (now - before.moment)
                looks[partition] = _Look(place.epoch, now, fill, before.rate + _WEIGHT * (rate - before.rate))
        self._looks = looks  # replaced as a whole: a scrape reads it in another thread

    def seconds_left(self) -> dict[int, float]:
        """Seconds until each journal is full at the present rate and refuses writes; infinite if it does not grow."""
        return {
            partition: max(0.0, 1.0 - look.fill) / look.rate if look.rate > 0 else (0.0 if look.fill >= 1 else inf)
            for partition, look in self._looks.items()
        }


log = logging.getLogger(__name__)
T = TypeVar("T")
_EVERY = 2.0  # seconds between two looks at Redis
_SQL_EVERY = 15.0


@dataclass(frozen=True, slots=True)
class Seen:
    """The journals that this replica archives, and their servers.

    `memory` and `connections` are the used shares of the limits of the fullest Redis server; None without a limit.
    Memory that eviction can free is not counted.
    """

    journals: Journals
    seconds_left: dict[int, float]  # until each is full at the present rate
    failed_starts: int  # hosts on which a replica could not start, and has not started since
    memory: float | None
    connections: float | None


class Watch(JobWorker, Generic[T]):
    """The last result of `look`, and its time."""

    job_name = "distributed-state-watch"

    def __init__(self, tiers: Tiers, look: Callable[[Tiers], Awaitable[T]], every: float) -> None:
        super().__init__(tiers.port)
        self._tiers = tiers
        self._look = look
        self._every = every
        self._seen: tuple[T, float] | None = None

    @property
    def seen(self) -> T | None:
        """The last result; None before the first."""
        return None if self._seen is None else self._seen[0]

    @property
    def age(self) -> float | None:
        """Seconds since the last result."""
        return None if self._seen is None else max(0.0, self._port.monotonic() - self._seen[1])

    async def _run(self) -> None:
        while True:
            if self._tiers.telemetry.measures:
                asked = self._port.monotonic()
                try:
                    self._seen = await self._look(self._tiers), asked
                except StateError as error:
                    log.debug("metrics cannot be updated: %s", error)  # the age of the last look shows it
            await self._port.sleep(self._every)


class JournalWatch(Watch[Seen]):
    """Watches the journals that this replica archives, and the servers that they are on."""

    def __init__(self, tiers: Tiers) -> None:
        super().__init__(tiers, self._seen_of, _EVERY)
        self._filling = Filling(tiers.settings, tiers.port.monotonic)

    async def _seen_of(self, tiers: Tiers) -> Seen:
        asked, mine = self._port.monotonic(), list(tiers.archiver.mine)
        journals = await look(tiers, mine)
        if self.seen is not None and self.age is not None:
            journals = carried_on(journals, self.seen.journals, self.age - (self._port.monotonic() - asked), mine)
        self._filling.note(journals.places)
        await tiers.maintenance.refresh()
        return Seen(journals, self._filling.seconds_left(), await self._failed_starts(), *await _shares(tiers))

    async def _failed_starts(self) -> int:
        """How many hosts could not start; the last known number while the server with their notes is down."""
        try:
            return len(await doctor.lately(self._tiers))
        except StateError as error:
            log.debug("failed starts cannot be read: %s", error)
            return 0 if self.seen is None else self.seen.failed_starts


def carried_on(now: Journals, before: Journals, seconds: float, mine: Collection[int]) -> Journals:
    """The present figures; for partitions that cannot be seen the last known ones, with ages `seconds` higher.

    Partitions cannot be seen if their server is down, or if their unarchived commits are no longer in the journal:
    neither is a lag of 0. Other replicas archive the partitions that are no longer `mine`.
    """
    unseen = {each: place for each, place in before.places.items() if each in mine and each not in now.places}
    places = now.places | unseen
    dark = unseen.keys() | (now.behind.keys() - now.ages.keys())
    waiting = [each for each in dark if places[each].offset > places[each].archived]
    return Journals(places, now.ages | {each: before.ages.get(each, 0.0) + seconds for each in waiting})


@dataclass(frozen=True, slots=True)
class SqlSeen:
    """The used share of SQL's connection limit (None: no limit), recently restarted partitions, and stuck sessions."""

    connections: float | None
    minted: int
    stuck: int


class SqlWatch(Watch[SqlSeen]):
    """Watches figures that only SQL has: its connections, and what concerns all replicas."""

    def __init__(self, tiers: Tiers) -> None:
        super().__init__(tiers, _sql, _SQL_EVERY)


def begin(tiers: Tiers) -> None:
    """Watch in the background, until the tiers are closed."""
    for each in (JournalWatch(tiers), SqlWatch(tiers)):
        tiers.workers.append(each)
        each.begin()


async def _shares(tiers: Tiers) -> tuple[float | None, float | None]:
    """The shares of memory that cannot be freed, and of connections, of the fullest server.

    The embedded server has no limits.
    """
    memory = connections = None
    for node in tiers.port.nodes():
        try:
            info = await server_info(tiers.port, node, b"INFO")
        except StateError as error:
            log.debug("the limits of %s cannot be read: %s", node, error)
            continue
        if (lasting := lasting_share(info)) is not None:
            memory = max(memory or 0.0, lasting)
        if clients := int(info.get("maxclients", 0)):
            connections = max(connections or 0.0, int(info["connected_clients"]) / clients)
    return memory, connections


async def _sql(tiers: Tiers) -> SqlSeen:
    facts = await tiers.port.sql(tiers.cold.connections)
    embedded = tiers.settings.url is None  # an embedded server starts empty each time
    minted = 0 if embedded else (await tiers.port.sql(tiers.cold.minted_since, RECENT)).partitions
    stuck = await tiers.port.sql(tiers.cold.count_stuck)
    return SqlSeen(None if facts is None else facts[0] / facts[1], minted, stuck)
