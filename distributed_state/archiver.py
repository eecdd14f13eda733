"""The archiver: journal -> SQL. Law: SQL first, then settle, then trim; SQL's cursor alone decides who was first."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from distributed_state.cold.store import Batch, ColdStore, Cursor
from distributed_state.errors import ColdUnavailable, StateError
from distributed_state.keys import Keys
from distributed_state.model import Entry, Ref
from distributed_state.port import Job, Port, Signal
from distributed_state.settings import Settings
from distributed_state.shares import Shares
from distributed_state.telemetry import observed, several
from distributed_state.warm import Place, Warm

log = logging.getLogger(__name__)
_ENTRIES_A_PASS, _BYTES_A_PASS, _BYTES_TOGETHER = 8000, 32 * 2**20, 2**20
_ASIDE_SECONDS, _SHORTEST = 15.0, 0.001


class Archiver:
    """Carries commits of some partitions to SQL. Two on one partition are harmless, only wasteful."""

    def __init__(self, port: Port, warm: Warm, cold: ColdStore, keys: Keys, settings: Settings) -> None:
        self._port, self._warm, self._cold, self._keys, self._settings = port, warm, cold, keys, settings
        self._cursors: dict[int, Cursor] = {}
        self._driven: dict[int, Signal] = {}
        self._mutex = port.mutex()
        self._shares = Shares(
            port,
            warm,
            keys,
            team=keys.archivers,
            member=warm.replica,
            claim=lambda partition: keys.partition(partition).archiver,
        )
        self._job: Job | None = None
        self.archived = 0
        self.behind = False  # whether the last pass left entries in a journal that it read
        self.diverged: dict[int, str] = {}
        self.telemetry = warm.telemetry
        self.places: dict[int, Place] = {}  # as last seen
        self.oldest: dict[int, int] = {}  # when the oldest entry on its way to SQL was written, in ms
        self.aside: int | None = None  # how much SQL holds in quarantine; None: not asked yet
        self._aside_at = 0.0

    @property
    def mine(self) -> list[int]:
        """The partitions that this replica takes care of now."""
        return self._shares.mine

    def begin(self) -> None:
        """Archive in the background."""
        self._job = self._port.spawn(self._run, "distributed-state-archiver")

    async def close(self) -> None:
        """Stop, and leave the partitions to others at once."""
        if self._job is None:
            return
        await self._job.stop()
        self._job = None
        await self._shares.leave()

    async def reach(self, partition: int, epoch: str, offset: int) -> None:
        """Archive a partition at least up to an offset of an epoch. Raises ColdUnavailable if that cannot be done."""
        while not self._reached(partition, epoch, offset):
            driver = self._driven.get(partition)
            if driver is not None:
                # Whoever drives now may have read the journal before our entry came: look again afterwards.
                await driver.wait()
            elif not await self._port.shield(self._drive([partition])) and not self._reached(partition, epoch, offset):
                await self._lagging(partition)

    async def drain(self, partitions: Iterable[int] | None = None) -> int:
        """Archive everything written so far; how many commits that were. What others write meanwhile does not count."""
        wanted = range(self._keys.partitions) if partitions is None else partitions
        before, goals = self.archived, await self._unarchived(wanted)
        while goals:
            if not await self._port.shield(self._drive(list(goals))):
                for partition in goals:
                    await self._lagging(partition)
                await self._port.sleep(0.01)
            left = await self._unarchived(goals)
            goals = {
                each: goal
                for each, goal in goals.items()
                if each in left and left[each].epoch == goal.epoch and left[each].archived < goal.offset
            }
        return self.archived - before

    async def _unarchived(self, partitions: Iterable[int]) -> dict[int, Place]:
        """Those of the partitions that hold what is not archived yet."""
        places = await self._warm.places([self._keys.partition(each) for each in partitions])
        self.places.update(places)
        return {partition: place for partition, place in places.items() if place.offset > place.archived}

    async def backlog(self) -> dict[int, int]:
        """Commits not archived yet, by partition."""
        places = await self._warm.places([self._keys.partition(each) for each in range(self._keys.partitions)])
        return {partition: place.offset - place.archived for partition, place in places.items()}

    def _reached(self, partition: int, epoch: str, offset: int) -> bool:
        cursor = self._cursors.get(partition)
        if cursor is None or cursor.epoch == epoch:
            return cursor is not None and cursor.offset >= offset
        if cursor.ordinal > int(epoch.split("-")[0]):
            raise ColdUnavailable(f"partition {partition}: Redis lost what was written under epoch {epoch}")
        return False

    async def _lagging(self, partition: int) -> None:
        """Nothing moved: another archiver was faster, or something is wrong."""
        if partition in self.diverged:
            raise ColdUnavailable(f"partition {partition} is not archived: {self.diverged[partition]}")
        before, cursor = self._cursors.get(partition), await self._port.sql(self._cold.cursor, partition)
        if cursor is not None:
            self._cursors[partition] = cursor
            if cursor == before:
                await self._port.sleep(0.005)

    # One pass

    async def _drive(self, partitions: Sequence[int]) -> int:
        """One pass over those of the partitions that nobody else of this replica is at.

        To be shielded: who waits for a pass waits for as long as it is noted here.
        """
        done = self._port.signal()
        with self._mutex:
            ours = [partition for partition in partitions if partition not in self._driven]
            self._driven.update(dict.fromkeys(ours, done))
        try:
            return await self._archive(ours) if ours else 0
        finally:
            with self._mutex:
                for partition in ours:
                    del self._driven[partition]
            done.set()

    @observed("archive", "cold", several)
    async def _archive(self, partitions: Sequence[int]) -> int:
        """Read, insert, settle, trim. Returns how many commits were archived."""
        most = max(2, min(self._settings.archive_batch, _ENTRIES_A_PASS // len(partitions)) + 1)
        batches: list[tuple[Cursor, Batch]] = []
        size = 0
        settled: dict[int, tuple[str, list[Entry]]] = {}
        for some in self._groups(partitions):
            if size > _BYTES_A_PASS:
                self.behind = True
                break  # the others have their turn in the next pass
            journals = await self._warm.journals([self._keys.partition(each) for each in some], most)
            for partition, (epoch, end, entries) in zip(some, journals, strict=True):
                if not epoch:
                    self.diverged[partition] = "Redis was emptied"
                    continue
                known = self._cursors.get(partition)
                cursor = await self._cursor(partition, epoch)
                if cursor is None:
                    continue
                fresh = self._continue(cursor, cursor is known, end, entries, len(entries) < most)
                if fresh is None or not entries:
                    continue
                settled[partition] = (epoch, entries)
                # Not where the journal and SQL do not fit: there is nothing to hurry for.
                self.behind = self.behind or len(entries) == most
                size += entries[-1].total_bytes - entries[0].total_bytes
                if fresh:
                    self.oldest[partition] = fresh[0].time_ms
                    batches.append((cursor, Batch(partition, epoch, cursor.offset, fresh)))
        moved = await self._port.sql(self._cold.archive, [batch for _, batch in batches]) if batches else set()
        count = 0
        for cursor, batch in batches:
            self.oldest.pop(batch.partition, None)
            if batch.partition in moved:
                last = batch.entries[-1]
                self._cursors[batch.partition] = replace(cursor, offset=last.offset, event=last.event)
                count += len(batch.entries)
            else:
                # Another archiver was faster, or the epoch was closed.
                self._cursors.pop(batch.partition, None)
                settled.pop(batch.partition, None)
        await self._settle(settled)
        self.archived += count
        return count

    def _groups(self, partitions: Sequence[int]) -> Iterator[list[int]]:
        """The partitions in random order, those together whose journals are read in one round trip."""
        group: list[int] = []
        size = 0
        for partition in random.sample(partitions, len(partitions)):
            place = self.places.get(partition)
            group.append(partition)
            size += place.waiting if place else 0
            if size > _BYTES_TOGETHER:
                yield group
                group, size = [], 0
        if group:
            yield group

    async def _cursor(self, partition: int, epoch: str) -> Cursor | None:
        cursor = self._cursors.get(partition)
        if cursor is None or cursor.epoch != epoch:
            cursor = await self._port.sql(self._cold.cursor, partition)
            if cursor is not None:
                self._cursors[partition] = cursor
        if cursor is None or cursor.epoch != epoch:
            self._diverge(partition, f"Redis is at epoch {epoch}, SQL at {cursor.epoch if cursor else 'none'}")
            return None
        return cursor

    def _continue(self, cursor: Cursor, older: bool, end: int, entries: list[Entry], whole: bool) -> list[Entry] | None:
        """The entries after the cursor, or None if the journal does not continue it, or not for sure.

        `older`: the cursor was known before the journal was read. `whole`: these are all of its entries.
        """
        partition = cursor.partition
        for entry in entries:
            if entry.offset == cursor.offset and entry.event != cursor.event:
                self._diverge(partition, f"entry {entry.offset} is {entry.event}, SQL has {cursor.event}")
                return None
        fresh = [entry for entry in entries if entry.offset > cursor.offset]
        if cursor.offset > end:
            # Another archiver may have gone on since the journal was read, unless the cursor was known before.
            if older:
                self._diverge(partition, f"Redis ends at offset {end}, SQL at {cursor.offset}")
            return None
        if (fresh[0].offset != cursor.offset + 1) if fresh else (whole and cursor.offset < end):
            # Another archiver may have gone on and trimmed since the cursor was read, unless it was read just now.
            self._cursors.pop(partition, None)
            if not older:
                found = f"goes on at {fresh[0].offset}" if fresh else f"lacks what was written up to {end}"
                self._diverge(partition, f"SQL ends at offset {cursor.offset}, the journal {found}")
            return None
        self.diverged.pop(partition, None)
        return fresh

    def _diverge(self, partition: int, why: str) -> None:
        self._cursors.pop(partition, None)
        if self.diverged.get(partition) != why:
            self.diverged[partition] = why
            log.error("partition %d: journal and archive do not fit, archiving stops there: %s", partition, why)

    async def _settle(self, passed: dict[int, tuple[str, list[Entry]]]) -> None:
        """Entries that SQL has already, too: an archiver that died before settling left them in the journal."""
        calls = []
        for epoch, entries in passed.values():
            latest = {entry.record: entry for entry in entries if entry.record}
            for record, entry in latest.items():
                calls.append((self._keys.of(Ref.parse(record)), epoch, entry.version, entry.next_message))
        for answer in await self._warm.settle(calls):
            if isinstance(answer, StateError):
                log.warning("settle: %s", answer)
        trims = [
            (self._keys.partition(partition), epoch, entries[-1]) for partition, (epoch, entries) in passed.items()
        ]
        for answer in await self._warm.trim(trims):
            if isinstance(answer, StateError):
                log.warning("trim: %s", answer)

    # In the background

    async def _run(self) -> None:
        longest = pause = self._settings.archive_every
        while True:
            # Here, because others who drive may only add to it.
            self.behind = False
            try:
                await self._shares.hold()
                await self._shares.give_back(self._shares.excess)
                found = await self._unarchived(self._shares.mine)
                moved = await self._drive(list(found))
                fills = (place.fill(self._settings) for each, place in found.items() if each not in self.diverged)
                # So that a journal gets no more than a quarter full meanwhile: a full one refuses commits.
                pause = min(max(pause * 0.25 / max([0.125, *fills]), _SHORTEST), longest)
                await self._look_aside()
            except StateError as error:
                moved, pause = 0, min(max(pause, longest) * 2, 5.0)
                log.warning("archiver: %s; trying again in %.1f s", error, pause)
            if not moved or not self.behind:
                # Together, commits are archived at a fraction of the cost.
                await self._port.sleep(pause)

    async def _look_aside(self) -> None:
        """Count what SQL set aside, now and then, if anybody measures."""
        now = self._port.monotonic()
        if self.telemetry.measures and now >= self._aside_at:
            self._aside_at = now + _ASIDE_SECONDS
            self.aside = await self._port.sql(self._cold.aside)
