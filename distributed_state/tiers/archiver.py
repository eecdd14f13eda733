"""The archiver: journal -> SQL. Law: insert into SQL, then mark as archived, then trim; SQL's cursor decides a race.

If the journal does not continue SQL (see `archive_pass`), the partition is diverged, and is not archived. The cursor is
read before the journal: otherwise another archiver might move it in between, and a healthy journal would not match. The
partition counts as diverged only if a second read finds the cursor unmoved.

Design: section 9.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from distributed_state.cold.aside import ArchivingStopped
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Cursor
from distributed_state.errors import ColdUnavailable, StateError, UnknownOperation, WarmUnavailable
from distributed_state.port import Job, Port
from distributed_state.settings import Settings
from distributed_state.tiers.archive_pass import IdleJournals, Pass, grouped
from distributed_state.tiers.recovery import Recovery
from distributed_state.values.journal import JournalEntry
from distributed_state.values.keys import Keys, PartitionKeys, RecordKeys
from distributed_state.values.model import Ref
from distributed_state.warm.answers import Committed, PartitionState
from distributed_state.warm.client import Warm
from distributed_state.warm.clock import ROUND_SECONDS, Rounds
from distributed_state.warm.partition_assignment import PartitionAssignment
from distributed_state.warm.stream import count
from distributed_state.warm.telemetry import observed, several

log = logging.getLogger(__name__)
T = TypeVar("T")
_ENTRIES_A_PASS = 8000
_BYTES_A_PASS = 32 * 2**20
_QUARANTINED_SECONDS = 15.0
_LOOK = 0.2  # seconds between checks while another caller archives
_SHORTEST = 0.001


class Archiver:
    """Archives commits of some partitions. Two archivers on one partition are harmless, but wasteful."""

    def __init__(
        self,
        port: Port,
        warm: Warm,
        cold: ColdStore,
        keys: Keys,
        settings: Settings,
        recovery: Recovery,
        rounds: Rounds,
        idle_journals: IdleJournals,
    ) -> None:
        self._port = port
        self._warm, self._partitions = warm, warm.partitions
        self._cold = cold
        self._keys = keys
        self._settings = settings
        self._recovery = recovery
        self._cursors: dict[int, Cursor] = {}
        self._driven: dict[int, Pass] = {}
        self._mutex = port.mutex()
        self._assignment = PartitionAssignment(
            port,
            keys,
            team=keys.archivers,
            member=warm.replica,
            claim=lambda partition: keys.partition(partition).archiver,
            rounds=rounds,
        )
        self._rounds = rounds
        self._job: Job | None = None
        self.idle_journals = idle_journals
        self.archived = 0
        self.failure = ""  # why the last round failed, "" if it succeeded
        self.behind = False  # whether the last pass left entries in a journal that it read
        self.diverged: dict[int, str] = {}
        self._refused: set[int] = set()  # partitions in which SQL did not take the next entry
        self.telemetry = warm.telemetry
        self.places: dict[int, PartitionState] = {}  # the state at the last look
        self.quarantined: int | None = None  # entries in SQL's quarantine; None: not counted yet
        self.newest_quarantined: tuple[str, int, str] | None = None  # record, version and reason of the newest of them
        self._quarantined_at = 0.0

    @property
    def mine(self) -> list[int]:
        """The partitions that this replica archives now."""
        return self._assignment.mine

    @property
    def trouble(self) -> tuple[str, dict[int, str]]:
        """Why the last round failed ("" if it succeeded), and why partitions of this replica are not archived."""
        mine = set(self.mine)
        return self.failure, {each: why for each, why in list(self.diverged.items()) if each in mine}

    def begin(self) -> None:
        """Archive in the background."""
        self._job = self._port.spawn(self._run, "distributed-state-archiver")

    async def close(self) -> None:
        """Stop, and release the partitions at once."""
        if self._job is None:
            return
        try:
            await self._job.stop()
        finally:
            self._job = None
            await self._assignment.leave()

    async def keep(self, keys: RecordKeys, done: Committed, event: str) -> None:
        """Archive a commit. Raises ColdUnavailable if SQL is down or refuses it, or Redis lost it before."""
        lost = ColdUnavailable(f"partition {keys.partition}: Redis lost it before it was archived")
        try:
            if await self.reach(keys.partition, done.epoch, done.offset, event):
                return
        except ColdUnavailable as error:
            lost = error
        # Another archiver passed its offset, or its epoch ended. SQL says whether the commit was archived or lost.
        if not await self._port.sql(self._cold.holds, keys.ref.text, done.version, event):
            if why := await self._port.sql(self._cold.refusal, event):
                raise ColdUnavailable(f"partition {keys.partition}: it is in quarantine: {why}")
            raise lost

    async def reach(self, partition: int, epoch: str, offset: int, event: str) -> bool:
        """Archive a partition up to an entry of its journal; returns whether SQL certainly has this entry now.

        False means that SQL's cursor is past that offset, perhaps with another entry. Raises ColdUnavailable if
        archiving is impossible.
        """
        later = False  # whether the pass certainly read the journal after this call had begun
        while True:
            cursor = self._cursors.get(partition)
            if cursor is not None and (cursor.epoch, cursor.offset, cursor.event) == (epoch, offset, event):
                return False  # SQL's cursor is past it; the entry may be in quarantine
            passed = self._driven.get(partition)
            if passed is None:
                passed = await self._port.drive(self._drive([partition]))
                later = True
            else:
                while not await passed.done.wait(_LOOK):
                    await self._partitions.tail(self._keys.partition(partition))  # raises if Redis is down
            if event in passed.carried.get(partition, ()):
                return True
            if later:
                fits = passed.fits.get(partition)
                if fits is not None and self._covers(fits, epoch, offset):
                    return False
                passed.refuse([partition])
                if fits is None:
                    await self._port.sleep(0.002)  # another archiver was faster, or is archiving it
            later = True

    async def bring(
        self, partition: int, epoch: str, offset: int, event: str, read: Callable[[], T], *, long: bool
    ) -> T:
        """Do as `reach`, then return the result of `read`, once SQL, which may have been restored, has everything.

        `long`: see `ColdStore.read_if`.
        """

        def there(cursor: Cursor | None) -> bool:
            return cursor is not None and (cursor.ordinal > count(epoch) or self._covers(cursor, epoch, offset))

        while True:
            await self.reach(partition, epoch, offset, event)
            # One thread call and one transaction do both: a second one would cost as much as a short read.
            found: list[T] = await self._port.sql(partial(self._cold.read_if, partition, there, read, long=long))
            if found:
                return found[0]
            self._cursors.pop(partition, None)

    def _covers(self, cursor: Cursor, epoch: str, offset: int) -> bool:
        if cursor.epoch != epoch and cursor.ordinal > int(epoch.split("-")[0]):
            raise ColdUnavailable(f"partition {cursor.partition}: Redis lost what was written under epoch {epoch}")
        return cursor.epoch == epoch and cursor.offset >= offset

    async def drain(self, partitions: Iterable[int] | None = None) -> int:
        """Archive everything written so far, without waiting for later writes; returns the number of commits.

        A partition with an earlier data id, or that Redis lost, is started first: workers may still have commits that
        it lacks, which are then archived too.
        """
        wanted = range(self._keys.partitions) if partitions is None else partitions
        before = self.archived
        goals = await self._unarchived(wanted)
        while goals:
            passed = await self._port.drive(self._drive(list(goals)))
            if not passed.count:
                passed.refuse(goals)
                await self._port.sleep(0.01)
            left = await self._unarchived(goals)
            goals = {
                each: goal
                for each, goal in goals.items()
                if each in left and left[each].epoch == goal.epoch and left[each].archived < goal.offset
            }
        return self.archived - before

    async def insist(self) -> None:
        """Raise WarmUnavailable unless the servers have the newest epochs that SQL has.

        A primary that was cut off from the others stays in an epoch that has ended, without the writes that the new
        primary accepts. SQL has each epoch before the first write in it, so no write acknowledged before this call is
        missed.
        """
        if self._settings.url is not None:
            await self._warm.retry(self._compare_epochs)

    async def _compare_epochs(self) -> None:
        places = await self._partitions.states(self._keys_of(range(self._keys.partitions)))
        cursors = await self._port.sql(self._cold.cursors)
        over = [each for each, at in cursors.items() if each in places and at.ordinal > count(places[each].epoch)]
        if over:
            await self._port.relocate()
            text = "another server has replaced this one: %d partitions have newer epochs, such as %d"
            raise WarmUnavailable(text % (len(over), over[0]))

    async def unreached(self, goals: dict[int, tuple[str, int]]) -> dict[int, tuple[str, int]]:
        """The entries among these (epoch and offset by partition) that are not known to be archived.

        Tries once. An entry of an epoch that ended is archived already, or never will be.
        """
        places = await self._partitions.reachable_states(self._keys_of(goals))
        return {
            each: (epoch, offset)
            for each, (epoch, offset) in goals.items()
            if each not in places or (places[each].epoch == epoch and places[each].archived < offset)
        }

    async def anybody(self, now: float) -> bool:
        """Whether any replica of the fleet archives now, by the server's clock."""
        return await self._assignment.anybody(now)

    async def _unarchived(self, partitions: Iterable[int]) -> dict[int, PartitionState]:
        """The partitions with unarchived commits, after all of these were started."""
        places = await self._partitions.states(self._keys_of(partitions))
        if ended := [*self.with_other_data(places), *await self._emptied(places)]:
            for partition in ended:
                await self._recovery.start(partition)
            places |= await self._partitions.states(self._keys_of(ended))
        return self._behind(places)

    async def _emptied(self, places: Mapping[int, PartitionState]) -> list[int]:
        """The partitions that SQL has and Redis lacks. An embedded Redis always ends with its only writer."""
        empty = [each for each, place in places.items() if not place.epoch]
        known = await self._port.sql(self._cold.cursors) if empty and self._settings.url is not None else {}
        return [each for each in empty if each in known]

    def with_other_data(self, places: Mapping[int, PartitionState]) -> list[int]:
        """The partitions with an earlier data id than their server's."""
        current = {
            each: self._port.known_data_id(self._port.node_of(self._keys.partition(each).meta)) for each in places
        }
        return [each for each, place in places.items() if place.epoch and current[each] not in ("", place.data_id)]

    def _behind(self, places: dict[int, PartitionState]) -> dict[int, PartitionState]:
        for partition in sorted(self.diverged.keys() & places.keys() & self.places.keys()):
            if self.places[partition].epoch != places[partition].epoch:
                del self.diverged[partition]  # the partition was repaired
        self.places.update(places)
        return {partition: place for partition, place in places.items() if place.offset > place.archived}

    def _keys_of(self, partitions: Iterable[int]) -> list[PartitionKeys]:
        return [self._keys.partition(each) for each in partitions]

    async def backlog(self) -> dict[int, int]:
        """Commits not archived yet, by partition."""
        places = await self._partitions.states(self._keys_of(range(self._keys.partitions)))
        return {partition: place.offset - place.archived for partition, place in places.items()}

    def is_at(self, partition: int) -> bool:
        """Whether this replica is archiving a partition now."""
        return partition in self._driven

    # One pass

    async def _drive(self, partitions: Sequence[int]) -> Pass:
        """One pass over the partitions that no other caller in this replica archives now.

        Passed to `Port.drive`: other callers wait for the pass as long as it is noted here.
        """
        passed = Pass(self._port.signal())
        with self._mutex:
            passed.partitions = [partition for partition in partitions if partition not in self._driven]
            self._driven.update(dict.fromkeys(passed.partitions, passed))
        try:
            if passed.partitions:
                await self._archive(passed.partitions, passed)
        finally:
            with self._mutex:
                for partition in passed.partitions:
                    del self._driven[partition]
            passed.done.set()
        return passed

    @observed("archive", "cold", several)
    async def _archive(self, partitions: Sequence[int], passed: Pass) -> None:
        """Read, compare, insert, mark as archived, trim."""
        cursors = await self._known(partitions)
        await self._read(partitions, passed, cursors)
        await self._insert(passed)
        for _, batch in passed.batches:
            if batch.partition not in passed.fits:
                self._cursors.pop(batch.partition, None)
        self._cursors.update(passed.fits)
        self.archived += passed.count
        await self._mark_archived(passed.archived)
        if passed.doubtful:
            passed.unmatched |= await self._diverged(passed.doubtful, cursors)

    async def _insert(self, passed: Pass) -> None:
        """Insert the batches; if SQL or this release cannot take an entry, insert the entries before it."""
        while passed.batches:
            try:
                passed.inserted(await self._port.sql(self._cold.archive, [batch for _, batch in passed.batches]))
                break
            # It was one transaction, so no batch was inserted.
            except UnknownOperation as error:
                self._stop(passed, {error.partition: (error.offset, str(error))})
            except ArchivingStopped as error:
                self._stop(passed, error.places)
                self._refused |= error.places.keys()
        for partition in sorted(passed.fits.keys() - passed.unmatched.keys()):
            self.diverged.pop(partition, None)
            self._refused.discard(partition)

    def _stop(self, passed: Pass, places: Mapping[int, tuple[int, str]]) -> None:
        for partition, (offset, why) in places.items():
            passed.stop_at(partition, offset, why)
            if self.diverged.get(partition) != why:
                log.error("partition %d: archiving stops: %s", partition, why)
            self.diverged[partition] = why

    async def _read(self, partitions: Sequence[int], passed: Pass, cursors: dict[int, Cursor]) -> None:
        """Read the journals around their cursors, and compare the two."""
        most = max(2, min(self._settings.archive_batch, _ENTRIES_A_PASS // len(partitions)) + 1)
        for some in grouped(partitions, self.places):
            if passed.size > _BYTES_A_PASS:
                passed.more = True
                break  # the next pass takes the others
            places = [(self._keys.partition(each), cursors[each].offset if each in cursors else 0) for each in some]
            for partition, journal in zip(some, await self._partitions.journals(places, most), strict=True):
                passed.read(partition, cursors.get(partition), journal, most)
                if partition in self._refused:
                    passed.try_first(partition)
        self.behind = self.behind or passed.more
        self.diverged.update(passed.unmatched)
        self._cursors.update(passed.fits)

    async def _known(self, partitions: Sequence[int]) -> dict[int, Cursor]:
        """The cursors before the journals are read; a partition unknown to SQL has no cursor."""
        known = {each: self._cursors.get(each) for each in partitions}
        if None in known.values():
            stored = await self._port.sql(self._cold.cursors)
            return {each: at for each, kept in known.items() if (at := kept or stored.get(each)) is not None}
        return {each: kept for each, kept in known.items() if kept is not None}

    async def _diverged(self, doubtful: dict[int, str], cursors: dict[int, Cursor]) -> dict[int, str]:
        """The partitions whose cursor in SQL has not moved and that cannot be healed; others restarted or continued."""
        stored = await self._port.sql(self._cold.cursors)
        found = {}
        for partition, why in doubtful.items():
            self._cursors.pop(partition, None)
            if stored.get(partition) == cursors.get(partition) and not await self._recovery.heal(partition):
                found[partition] = why
                if self.diverged.get(partition) != why:
                    text = "partition %d: archiving stops, because journal and archive do not match: %s"
                    log.error(text, partition, why)
        self.diverged.update(found)
        return found

    async def _mark_archived(self, passed: dict[int, tuple[str, list[JournalEntry]]]) -> None:
        """Also mark entries that SQL had before: an archiver that died in between left them unmarked in the journal."""
        calls = []
        for partition, (epoch, entries) in passed.items():
            latest = {entry.record: entry for entry in entries if entry.record}
            records = [
                (self._keys.of(Ref.parse(record)), entry.version, entry.next_message)
                for record, entry in latest.items()
            ]
            calls.append((self._keys.partition(partition), epoch, entries[-1], records))
        for answer in await self._partitions.mark_archived(calls):
            if isinstance(answer, StateError):
                log.warning("mark_archived: %s", answer)
        trims = [
            (self._keys.partition(partition), epoch, entries[-1]) for partition, (epoch, entries) in passed.items()
        ]
        # In a separate exchange, so that marking has ended, with any result, before the journal is trimmed.
        for partition, answer in zip(passed, await self._partitions.trim(trims), strict=True):
            if isinstance(answer, StateError):
                log.warning("trim: %s", answer)
            elif answer[0] == b"epoch":
                # The data or the server changed meanwhile, perhaps unnoticed by writers.
                await self._started(partition)

    # In the background

    async def _run(self) -> None:
        longest = pause = self._settings.archive_every
        while True:
            # Reset only here; other callers of a pass only set it.
            self.behind = idle = False
            self.idle_journals.written.clear()
            try:
                await self._hold()
                found = self._behind(await self._look())
                idle = self.idle_journals.all_idle(self._assignment.mine)
                moved = (await self._drive(list(found))).count
                fills = (place.fill(self._settings) for each, place in found.items() if each not in self.diverged)
                # The pause is short enough that a journal becomes at most a quarter full meanwhile: a full one refuses
                # commits.
                pause = min(max(pause * 0.25 / max([0.125, *fills]), _SHORTEST), longest)
                await self._count_quarantined()
                self.failure = ""
            except StateError as error:
                self.failure = str(error)
                moved = 0
                pause = min(max(pause, longest) * 2, 5.0)
                log.warning("archiver: %s; trying again in %.1f s", error, pause)
            except Exception as error:
                self.failure = f"it has ended: {type(error).__name__}"  # this replica's heartbeats continue
                raise
            if idle and not await self.idle_journals.written.wait(max(pause, min(self._rounds.left, ROUND_SECONDS))):
                continue
            if not moved or not self.behind:
                # After a pause commits are archived in larger groups, at a fraction of the cost.
                await self._port.sleep(pause)

    async def _look(self) -> dict[int, PartitionState]:
        """Look at the state of this replica's partitions."""
        mine = self._assignment.mine
        self.idle_journals.watch(mine)
        asked = self._port.monotonic()
        places = await self._partitions.reachable_states(self._keys_of(mine))
        self.idle_journals.looked(asked, places)
        await self._start_other_data(places)
        return places

    async def _start_other_data(self, places: dict[int, PartitionState]) -> None:
        """Start partitions with an earlier data id again, even if nothing is written there."""
        for partition in self.with_other_data(places):
            await self._started(partition)

    async def _started(self, partition: int) -> None:
        try:
            await self._recovery.start(partition)
        except StateError as error:
            log.warning("archiver: partition %d: %s", partition, error)

    async def _hold(self) -> None:
        """Keep this replica's share of the partitions; if the server does not answer, continue with the previous share.

        One server of a cluster has the list of archivers. While it is down, the journals on the others would fill up.
        Two archivers on one partition are harmless.
        """
        try:
            await self._assignment.hold()
            await self._assignment.give_back(self._assignment.excess)
        except WarmUnavailable as error:
            if not self._assignment.mine:
                raise
            log.warning("archiver: %s", error)

    async def _count_quarantined(self) -> None:
        """From time to time count the entries in SQL's quarantine, if metrics are collected."""
        now = self._port.monotonic()
        if self.telemetry.measures and now >= self._quarantined_at:
            self._quarantined_at = now + _QUARANTINED_SECONDS
            self.newest_quarantined = await self._port.sql(self._cold.newest_quarantined)
            self.quarantined = await self._port.sql(self._cold.count_quarantined)
