"""Due sets that Redis has lost are filled from SQL. Law: the worker serves sessions meanwhile.

A job starts the partitions that Redis lacks, and fills the sets in pages, one partition after the other: the sessions
that are due first come first, in all partitions. The partitions of this worker come before those of others; a set that
another worker has filled is left alone.

Design: section 31.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from distributed_state.cold.values import DueRow
from distributed_state.errors import StateError
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.workers import JobWorker
from distributed_state.values.schedule import due_ms
from distributed_state.warm.scripts import FILL

log = logging.getLogger(__name__)
Place = tuple[str, int]
"""A handler and a partition."""

_UNKNOWN_SECONDS = 5.0  # until SQL is asked again for partitions that Redis does not have
_PAGE = 1000
_SOON_MS = 1000  # the worker looks at all its partitions in this time anyway
_AGAIN_SECONDS = 1.0


def filled(handler: str) -> str:
    """The field of a partition's meta that has the epoch for which the handler's set was filled."""
    return f"due:{handler}"


@dataclass(frozen=True, slots=True)
class _Filling:
    """How far a set is filled, under this epoch; `after`: the last session, None: the set is empty still."""

    epoch: str
    after: DueRow | None = None


class DueSets(JobWorker):
    """The sets that one worker has found to be lost.

    `mine` returns the places of this worker. `found` is called with a place at which to look.
    """

    job_name = "distributed-state-due-sets"

    def __init__(
        self,
        tiers: Tiers,
        handlers: Collection[str],
        mine: Callable[[], Collection[Place]],
        found: Callable[[Place], None],
    ) -> None:
        super().__init__(tiers.port)
        self._tiers = tiers
        self._handlers = handlers
        self._mine = mine
        self._found = found
        self._news = tiers.port.signal()
        self._mutex = tiers.port.mutex()
        self._began: set[int] = set()  # partitions that SQL knows
        self._unknown = 0.0  # until then SQL is not asked for others
        self._absent: set[int] = set()
        self._unfilled: dict[Place, _Filling] = {}

    def note(self, there: Collection[int], absent: Collection[int], unfilled: Mapping[Place, str]) -> None:
        """Note which partitions Redis has, which it lacks, and the sets that are not filled, with their epochs."""
        with self._mutex:
            self._began.update(there)
            if self._port.monotonic() >= self._unknown or not self._began.isdisjoint(absent):
                self._absent.update(absent)
            for place, epoch in unfilled.items():
                if place not in self._unfilled or self._unfilled[place].epoch != epoch:
                    self._unfilled[place] = _Filling(epoch)
            if self._absent or self._unfilled:
                self._news.set()

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                while (place := self._next()) or self._absent:
                    await (self._start() if self._absent or place is None else self._fill(place))
            except StateError as error:
                log.warning("work: the sessions that Redis has lost are looked up later: %s", error)
                await self._port.sleep(_AGAIN_SECONDS)

    def _next(self) -> Place | None:
        """The set that gets the next page."""
        mine = self._mine()
        with self._mutex:
            return min(self._unfilled, key=lambda place: place not in mine, default=None)

    async def _start(self) -> None:
        """Start partitions that Redis does not have, if they have ever begun: SQL may have sessions of them."""
        with self._mutex:
            absent, self._absent = self._absent, set()
        known = set(await self._port.sql(self._tiers.cold.cursors))
        for partition in sorted(absent & known):
            await self._tiers.start(partition)
            for name in self._handlers:
                self._found((name, partition))
        with self._mutex:
            self._began = (self._began | known) - (absent - known)
            self._unknown = self._port.monotonic() + _UNKNOWN_SECONDS

    async def _fill(self, place: Place) -> None:
        """Put the next sessions that SQL has into a set."""
        name, partition = place
        filling = self._unfilled[place]
        keys = self._tiers.keys.partition(partition)
        look = partial(self._tiers.cold.due, partition, name, after=filling.after, limit=_PAGE)
        rows = await self._port.sql(look)
        last = len(rows) < _PAGE
        members = [word for row in rows for word in (b"%d" % due_ms(row.due), row.record.encode())]
        words = [filling.epoch, b"1" if last else b"0", filled(name), *members]
        answer = (await self._port.scripts([(FILL, [keys.due_of(name), keys.meta], words)]))[0]
        if isinstance(answer, StateError):
            raise answer
        with self._mutex:
            if self._unfilled.get(place) is filling:
                del self._unfilled[place]
                if answer[0] == b"ok" and not last:
                    self._unfilled[place] = replace(filling, after=rows[-1])  # behind the others
        if rows and due_ms(rows[0].due) <= self._tiers.clock.now() * 1000 + _SOON_MS:
            self._found(place)
