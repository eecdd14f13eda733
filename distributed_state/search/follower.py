"""Brings the index up to the archive. Law: whatever becomes of it, the archiver neither waits nor knows.

In a round: partitions are claimed, the records that have waited longest are read, their documents made - and given
vectors, by the user's function, while no transaction is under way - and written with how far the records are.

Design: section 21.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from distributed_state.cold.search_store import SearchStore
from distributed_state.errors import StateError
from distributed_state.search.documents import removed
from distributed_state.search.round import CLAIM_SECONDS, Round
from distributed_state.search.setting import Setting
from distributed_state.search.user_functions import call_user
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.workers import JobWorker
from distributed_state.values import chance
from distributed_state.values.search import Indexed

log = logging.getLogger(__name__)
_RECORDS = 100  # looked at in a round
_OFF_SECONDS = 60.0
_REST_SECONDS = 5.0
_TOGETHER_SECONDS = 1.0
_REPORT_SECONDS = 0.5
_WAIT = 0.05


class Moved(NamedTuple):
    """How many records a round brought up, and whether there is more to do at once."""

    records: int
    more: bool


class Follower(JobWorker):
    """Follows the archive: in the background, for the partitions that this replica archives, or when asked to."""

    job_name = "distributed-state-index"

    def __init__(self, tiers: Tiers, setting: Setting) -> None:
        super().__init__(tiers.port)
        self._tiers = tiers
        self._setting = setting
        self._search: SearchStore = tiers.cold.search
        self.indexed = 0
        self.behind: int | None = None  # records, as last counted; None: nobody counted, or search is off
        self.failure = ""  # why the last round failed, "" if it did not
        self.left_out: dict[str, None] = {}  # documents that `embed` refuses, the last few

    async def round(self, some: Sequence[int] | None, claimer: str) -> Moved:
        """Bring up what has waited longest in these partitions, or all, and what nobody else is at."""
        waiting = await self._port.sql(self._search.waiting, self._setting.stored)
        if waiting is None:
            self._setting.look_again()
        wanted = [each for each in waiting or () if some is None or each in some]
        if not wanted:
            return Moved(0, more=False)
        await self._tiers.clock.know()
        taken: list[int] | None = None
        try:
            taken = await self._port.shield(self._claim(wanted, claimer))
            if not taken:
                return Moved(0, more=False)
            work = Round(self._tiers, self._setting, claimer, self.left_out)
            left, more = await self._port.sql(self._search.next_due, taken, _RECORDS)
            count = len(left)
            while left:
                found = await self._port.sql(self._search.changes, left)
                for one, changed in zip(left, found, strict=False):
                    await work.take(one, changed)
                left = left[len(found) :]
            await work.flush()
        finally:
            # Whatever became of it: who waits for the index would wait until the claim ends.
            if taken != []:
                await self._port.shield(self._leave(claimer))
        self.indexed += work.done
        return Moved(work.done, more=(more or work.done < count) and not work.lost)

    async def _claim(self, wanted: Sequence[int], claimer: str) -> list[int]:
        now_ms = int(self._tiers.clock.now() * 1000)
        call = partial(self._search.claim, wanted, claimer, now_ms, CLAIM_SECONDS, self._setting.stored)
        taken = await self._port.sql(call)
        if taken is None:
            self._setting.look_again()
        return taken or []

    async def _leave(self, claimer: str) -> None:
        try:
            await self._port.sql(self._search.release, claimer)
        except StateError as error:
            log.warning("search: %s", error)

    async def erased(self) -> None:
        """Have the index forget what was erased: SQLite's the words, one of the user's own all of it.

        What a follower brings there at this very moment it removes next: the erasure is noted for it, too.
        """
        await self._port.sql(self._search.scrub)
        await self._setting.renew(self._port, self._search)
        index = self._setting.index
        if index is not None and await self._setting.follows(self._port, self._search):
            gone = [removed(text) for text in await self._port.sql(self._search.gone) if text]
            if gone:
                await call_user(self._port, "index.apply", index.apply, gone)

    async def catch_up(self, progress: Callable[[Indexed], None] | None = None) -> int:
        """Bring up all that is due now, or let others do it; the number of the last note of that."""
        claimer = chance.token_hex(8)
        # Not what is written meanwhile: there may always be more.
        goal = await self._port.sql(self._search.last_due)
        report_at = 0.0
        while True:
            waits = await self._port.sql(self._search.waits, goal)
            began = self._port.monotonic()
            if progress is not None and (began >= report_at or not waits):
                progress(await self.reached(goal))
                # All that is due is counted: mostly it is something else that takes the time.
                report_at = self._port.monotonic() + _REPORT_SECONDS + 10 * (self._port.monotonic() - began)
            if not waits:
                return goal
            await self._setting.require(self._port, self._search)
            if not (await self.round(None, claimer)).records:
                await self._port.sleep(_WAIT)

    async def reached(self, goal: int | None = None) -> Indexed:
        """How many records there are, and how many have changes that the index lacks, of those noted up to there."""
        records = await self._port.sql(self._search.records)
        return Indexed(records, await self._port.sql(self._search.lacking, goal))

    async def _run(self) -> None:
        claimer = chance.token_hex(8)
        archiver = self._tiers.archiver
        every = pause = self._tiers.settings.archive_every
        seen, rested = -1, math.inf
        look_at = 0.0
        while True:
            began = self._port.monotonic()
            try:
                if not self._setting.on and began < look_at:
                    await self._port.sleep(_WAIT * 20)  # the first search may switch it on at any time
                    continue
                look_at = began + _OFF_SECONDS
                if not await self._setting.follows(self._port, self._search):
                    self.behind, self.failure = None, ""
                    await self._port.sleep(_WAIT * 20)
                    continue
                look_at = 0.0
                # Without asking SQL: what others archived there, or imported, is found a little later.
                if archiver.archived != seen or rested >= _REST_SECONDS:
                    seen, rested = archiver.archived, 0.0
                    moved = await self.round(archiver.mine, claimer)
                    if moved.more:
                        seen = -1
                    elif moved.records:
                        # Together, changes are indexed at a fraction of the cost; SQLite has one writer at a time.
                        await self._port.sleep(_TOGETHER_SECONDS)
                    elif self._setting.on and (self._tiers.telemetry.measures or self.behind is None):
                        self.behind = await self._port.sql(self._search.lacking)
                self.failure, pause = "", every
            except Exception as error:  # noqa: BLE001  # a job that ended would be missed by nobody
                self.failure = str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}"[:500]
                self._setting.look_again()
                look_at = 0.0
                pause = min(max(pause, every) * 2, 5.0)
                seen = -1
                log.warning("search: %s; trying again in %.1f s", self.failure, pause)
            rested += pause
            # As long as a round took, too: so it has half of a process at most, and others the rest of the machine.
            await self._port.sleep(self._port.monotonic() - began if seen == -1 and not self.failure else pause)
