"""How a partition starts, and starts again after Redis lost data. Law: SQL has an epoch before Redis does.

A replica that finds a partition without an epoch, or one from another data id (`port.identities`), starts it
(`Recovery.start`):

1. `_attempt` compares the partition's data id with the server's. If the server only renamed its data, or the slot moved
   here, nothing was lost: the new name is noted (`rename.lua`), and the epoch continues.
2. Otherwise it requests the right to start the partition (`mint.lua`). One replica at a time has it. Writes are blocked
   until recovery ends.
3. `_bring_together` compares the journal's entry at SQL's cursor with the cursor, by event. If they are equal, the
   entries after it are archived. If not, Redis is older than SQL: records that are newer in SQL leave Redis and are
   hydrated at their next read.
4. `_restore_unarchived` asks the live replicas for their unarchived commits. Those that continue SQL's history are
   archived; the others, and journal entries that SQL cannot continue with, are kept in branches.
5. `_start` has SQL close the epoch and mint the next one, by a compare-and-set that fails if anything was archived
   meanwhile. Then `install.lua` writes the new epoch to Redis.

Design: section 14.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from distributed_state.cold.engine import chunks
from distributed_state.cold.record_index import hashed
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Backfilled, Batch, Cursor, Kept
from distributed_state.errors import RecoveryInProgress, StateError, WarmUnavailable
from distributed_state.port import Port, waited
from distributed_state.port.identities import ServerIdentity
from distributed_state.settings import Settings
from distributed_state.tiers.archive_pass import why_unmatched
from distributed_state.tiers.reconcile import Backfill, reconcile
from distributed_state.values import chance
from distributed_state.values.journal import Journal, JournalEntry, unpack
from distributed_state.values.keys import Keys, PartitionKeys, RecordKeys
from distributed_state.values.model import Ref
from distributed_state.warm.answers import PartitionState
from distributed_state.warm.client import Warm
from distributed_state.warm.partitions import Beginning
from distributed_state.warm.stream import count

log = logging.getLogger(__name__)
_PAGE = 1000  # entries of a journal
_AT_ONCE = 200  # records
CLOCKS_MS = 60_000  # maximum difference between the clocks of two servers that wrote one history, one after the other
_MARGIN_US = 2_000_000  # maximum difference between the clocks of SQL and Redis
_UPTIME_MS = 2_000  # error of a start time: `uptime_in_seconds` has whole seconds, and clocks of servers differ
_SILENCE = 1.0  # seconds without an answer after which a replica counts as silent
_LONGEST = 0.25


@dataclass(frozen=True, slots=True)
class _Together:
    """SQL's cursor once SQL and Redis have one state; `fits`: Redis' stream of events lacks none that SQL has.

    Commits that SQL lacked: those kept in branches, how many were restored, and how many replicas did not answer.
    """

    cursor: Cursor | None
    fits: bool = False
    kept: Sequence[Kept] = ()
    put_back: int = 0
    silent: int = 0


Gather = Callable[[int, str, float], Awaitable[tuple[list[JournalEntry], set[str]]]]


class Recovery:
    """Starts the partitions of one replica. `leave_mark` writes the store's identity to Redis.

    `gather` asks all replicas for their unarchived commits of a partition under an epoch, and waits that many seconds
    for silent ones; it returns the commits, and the replicas that did not answer. `diverged` is called with the
    branches that were kept.
    """

    def __init__(
        self,
        port: Port,
        warm: Warm,
        cold: ColdStore,
        keys: Keys,
        settings: Settings,
        *,
        leave_mark: Callable[[], Awaitable[object]],
        gather: Gather,
        diverged: Callable[[Sequence[Kept]], Awaitable[None]],
    ) -> None:
        self._port = port
        self._warm = warm
        self._partitions = warm.partitions
        self._cold = cold
        self._keys = keys
        self._timeout = settings.timeout
        self._limit = settings.timeout + settings.retry_for
        self._leave_mark = leave_mark
        self._gather = gather
        self._diverged = diverged
        self._embedded = settings.url is None
        self.count = 0
        """How many partitions this replica started again after Redis lost data, or may have lost some."""
        self.last = 0.0
        """When this replica last did so, by the server's clock; 0 if never."""
        self.complete = 0
        """How many it started again where Redis has everything that SQL and the running replicas know of."""
        self.last_complete = 0.0

    async def start(self, partition: int, *, over: str = "", backfilled: Backfilled | None = None) -> None:
        """Return when this or another replica has started the partition.

        Raises RecoveryInProgress if it takes too long.

        Ends the epoch `over` even if it has this data id. `backfilled`: see `_start`.
        """
        token = chance.token_hex(8)
        began = self._port.monotonic()
        account = waited.present()
        end = began + (self._limit if account is None else self._warm.left())
        pause = 0.02
        while True:
            held_up: StateError = RecoveryInProgress(f"partition {partition}: another replica is starting it")
            try:
                if await self._port.drive_start(
                    self._attempt(self._keys.partition(partition), token, over, backfilled)
                ):
                    return
            except WarmUnavailable as error:
                held_up = error
            if account is not None:
                account.add(began)  # this call waits for Redis even if another replica starts the partition
            left = end - self._port.monotonic()
            if left <= 0:
                raise held_up
            await self._port.sleep(min(left, pause * chance.source.uniform(0.5, 1.0)))
            pause = min(pause * 1.5, _LONGEST)

    async def heal(self, partition: int) -> bool:
        """Start a partition again whose journal does not match SQL.

        Returns False and does nothing if SQL lacks entries.

        SQL lacks entries if it is older, or the journal has a gap. Redis serves such a partition, which is not archived
        until an operator repairs it.
        """
        keys = self._keys.partition(partition)
        place = (await self._partitions.states([keys]))[partition]
        cursor = await self._port.sql(self._cold.cursor, partition)
        if not place.epoch or cursor is None or _sql_is_older(cursor, place):
            return False
        if await self._journal_at(keys, place, cursor) is not None:
            return False  # the journal has SQL's last entry, with or without a gap after it
        await self.start(partition, over=place.epoch)
        return True

    async def behind(self) -> dict[int, str]:
        """The partitions that need `repair`, with the reason: SQL lacks entries that the journal no longer has."""
        cursors = await self._port.sql(self._cold.cursors)
        states = await self._partitions.states([self._keys.partition(each) for each in range(self._keys.partitions)])
        places = {each: place for each, place in states.items() if place.epoch}
        asked = [(self._keys.partition(each), cursors[each].offset if each in cursors else 0) for each in places]
        journals = dict(zip(places, await self._partitions.journals(asked, 2), strict=True)) if asked else {}
        found = {
            each: why for each, journal in journals.items() if (why := _lacks(cursors.get(each), places[each], journal))
        }
        # If a cursor moved meanwhile, the entries were archived between the two reads.
        again = await self._port.sql(self._cold.cursors) if found else {}
        return {each: why for each, why in found.items() if again.get(each) == cursors.get(each)}

    async def repair(self, partition: int, *, dry_run: bool) -> Backfilled | None:
        """Bring SQL up to Redis and start a new epoch; None if SQL is not behind (see `_is_behind`).

        Reads and writes of the partition wait meanwhile. With `dry_run` nothing is changed or blocked.
        """
        keys = self._keys.partition(partition)
        place = (await self._partitions.states([keys]))[partition]
        cursor = await self._port.sql(self._cold.cursor, partition)
        if not place.epoch or not await self._is_behind(keys, place, cursor):
            return None
        if dry_run:
            return await self._backfill(None).run(place, keys, cursor)
        backfilled = Backfilled()
        await self.start(partition, over=place.epoch, backfilled=backfilled)
        return backfilled

    def _backfill(self, discard: Callable[[list[RecordKeys]], Awaitable[bool]] | None) -> Backfill:
        return Backfill(self._port, self._warm, self._cold, self._keys, discard=discard)

    async def _is_behind(self, keys: PartitionKeys, place: PartitionState, cursor: Cursor | None) -> bool:
        """Whether SQL lacks entries that the journal no longer has: SQL was restored, or the journal has a gap."""
        if _sql_is_older(cursor, place):
            return True
        journal = await self._journal_at(keys, place, cursor) if cursor is not None else None
        if journal is None or not why_unmatched(cursor, journal):
            return False
        # If the cursor moved meanwhile, the entries were archived and trimmed between the two reads.
        return bool(await self._port.sql(self._cold.cursor, keys.partition) == cursor)

    async def _journal_at(self, keys: PartitionKeys, place: PartitionState, cursor: Cursor) -> Journal | None:
        """The journal from SQL's cursor on; None if the cursor is of another epoch or its entry is missing."""
        if cursor.epoch != place.epoch:
            return None
        onward = await self._partitions.entries(keys, max(0, cursor.offset - 1), 2)
        if cursor.offset and [entry.event for entry in onward[:1]] != [cursor.event]:
            return None
        return Journal(place.epoch, place.offset, [], onward)

    async def _attempt(self, keys: PartitionKeys, token: str, over: str, backfilled: Backfilled | None) -> bool:
        """Try once to start the partition; returns whether this or another replica has started it."""
        node = self._port.node_of(keys.meta)
        server = await self._port.identity_of(node)
        if not server.primary:
            await self._port.relocate()
            raise WarmUnavailable(f"{node} is a replica")
        place = (await self._partitions.states([keys]))[keys.partition]
        elsewhere = await self._is_elsewhere(place, server, node)
        if place.epoch and place.epoch != over and await self._is_same(place, server, node, elsewhere=elsewhere):
            return place.data_id == server.data_id or await self._partitions.rename(keys, place.epoch, place.data_id)
        # SQL is read before the right is requested, because that blocks writes, and SQL may be down.
        cursor = await self._port.sql(self._cold.cursor, keys.partition)
        older = _sql_is_older(cursor, place)
        if place.data_id == "?":  # a replica that was starting or repairing the partition has died
            older = older or await self._is_behind(keys, place, cursor)
        if place.epoch and backfilled is None and older:
            text = "partition %d: SQL is older than Redis, which continues under epoch %s; archiving stops"
            renamed = await self._partitions.rename(keys, place.epoch, place.data_id)
            if renamed:
                log.error(text, keys.partition, place.epoch)
            return renamed
        mixed = backfilled is None and cursor is not None
        mixed = mixed and await self._is_mixed(place, server, node, elsewhere=elsewhere)
        # The right is valid under this data id only: data of the next one may be older than what this recovery reads.
        token = f"{token}@{server.data_id}"
        word, seen = await self._partitions.request_right(keys, token, over)
        start = partial(self._start, keys, token, seen, backfilled, mixed=mixed, silence=self._silence(server))
        if word != "ok" or self._embedded:
            return word == "live" or (word == "ok" and await start())
        # The right is short and renewed in the background: if this process is stopped, others wait only that long.
        keeping = self._port.spawn(partial(self._partitions.keep_right, keys, token), "distributed-state-starting")
        try:
            return await start()
        finally:
            keeping.ask()

    def _silence(self, server: ServerIdentity) -> float:
        """For how many seconds a replica has to be silent to count as gone.

        While a server was away, a replica may have begun an attempt to connect, which takes up to `timeout`.
        """
        return _SILENCE + (0.0 if self._embedded else max(0.0, self._timeout - server.uptime))

    async def _is_elsewhere(self, place: PartitionState, server: ServerIdentity, node: str) -> bool:
        """Whether another server still runs with the data id under which the partition was written."""
        is_here = (
            place.data_id in ("", "?", server.data_id) or server.renames(place.data_id) or server.follows(place.data_id)
        )
        return not is_here and await self._port.has_data_elsewhere(place.data_id, node)

    async def _is_same(self, place: PartitionState, server: ServerIdentity, node: str, *, elsewhere: bool) -> bool:
        """Whether nothing was lost: the server renamed its data, or the slot moved here from a running server."""
        if place.data_id == server.data_id or server.renames(place.data_id):
            return True
        if not elsewhere:
            return False
        return not server.former and await self._runs_since(node, place.proved_ms - _UPTIME_MS)

    async def _is_mixed(self, place: PartitionState, server: ServerIdentity, node: str, *, elsewhere: bool) -> bool:
        """Whether a partition's keys may have different ages, because a server ended while its slot was moving here.

        The former server may have restarted with older keys than those that it had moved, or this one may have lost
        keys that it received.
        """
        if not self._port.is_cluster:
            return False
        # Its slot has been moving since its epoch began, or its meta was lost, perhaps without the rest. Or a worker
        # that was starting it died without leaving a reason; or the journal does not match SQL for an unknown reason.
        if elsewhere or not place.proved_ms or place.data_id in ("?", server.data_id):
            return True
        return not server.follows(place.data_id) and await self._runs_since(node, place.proved_ms)

    async def _runs_since(self, node: str, ms: int) -> bool:
        """Whether a server has been running since then, by its own clock.

        If it has not, a slot may have moved there before it restarted: later writes, and the note of the move, were
        lost with the process, and the partition has the state that its former server left.
        """
        text = (await self._port.command_with(node, b"INFO", b"server")).decode(errors="replace")
        seconds, _ = await self._port.command_with(node, b"TIME")
        up = next((line for line in text.splitlines() if line.startswith("uptime_in_seconds:")), ":0")
        return (int(seconds) - int(up.partition(":")[2])) * 1000 <= ms

    async def _start(
        self,
        keys: PartitionKeys,
        token: str,
        seen: str,
        backfilled: Backfilled | None,
        *,
        mixed: bool,
        silence: float,
    ) -> bool:
        """Bring SQL and Redis to one state and begin an epoch. False: try again.

        `seen` is the previous epoch in Redis. In a repair, `backfilled` counts what an older SQL receives first; it is
        None in any other start. `mixed`: see `_is_mixed`; `silence`: see `_silence`.
        """
        partition = keys.partition
        cursor = await self._port.sql(self._cold.cursor, partition)
        before = cursor
        # An epoch that Redis shows has begun. One that only SQL knows may have been minted by a replica that died
        # before `install.lua`: then nothing was acknowledged, and nothing can have been lost. An embedded server begins
        # empty at each start, which is not a loss.
        had_epoch = before is not None and not self._embedded
        had_epoch = had_epoch and (seen != "" or await self._port.sql(self._cold.any_begun, partition))
        if backfilled is not None and seen:
            cursor = await self._catch_up(keys, token, cursor, backfilled)
        together: _Together | None = _Together(None)
        if cursor is not None:
            together = await self._bring_together(keys, token, seen, cursor, silence)
        if together is None:
            return False
        cursor = together.cursor
        fits = together.fits
        # Or the replica that repaired the partition died after that, and the journal still fits.
        repaired = backfilled is not None or (fits and await self._port.sql(self._cold.is_repaired, partition, seen))
        if mixed:
            if records := await self._records_in_redis(keys, token):
                text = "partition %d: a server ended while its slot was moving; %d records leave Redis, and are in SQL"
                log.warning(text, partition, len(records))
            if not await self._discard(keys, token, seen, records):
                return False
            fits = False  # the stream of events may have another age as well
        complete = fits and not together.kept and not together.silent
        # Tokens use SQL's clock: a worker's clock may be wrong, and this server's may be behind the former server's.
        floor = await self._port.sql(self._cold.clock_us) + _MARGIN_US if seen or before else 0
        minted = await self._port.sql(self._cold.mint, partition, cursor)
        if minted is None:
            return False
        await self._leave_mark()
        # Read after the mint: from here on only an import adds records to SQL, and it checks the epoch there.
        texts = await self._port.sql(self._cold.known_names, partition)
        if not self._embedded:
            begin = self._cold.begin_complete if repaired or complete else self._cold.begin
            await self._port.sql(begin, partition, minted.epoch)
        new = Beginning(minted.epoch, continued=fits, ended=minted.ended, floor=floor, texts=texts)
        word = await self._partitions.install(keys, token, seen, new)
        lost = had_epoch and not repaired and not complete
        former = seen or (before.epoch if before else "")
        if word != "ok":
            await self._mark_never_begun(minted)
        elif lost:
            await self._diverged(together.kept)
            self.count += 1
            self.last = self._warm.clock.now()
        elif had_epoch and not repaired:
            self.complete += 1
            self.last_complete = self._warm.clock.now()
        if word == "ok" and lost and cursor is not None:
            _log_loss(minted, former, cursor, together, why=_loss_cause(seen, fits))
        elif word == "ok" and had_epoch and not repaired:
            _log_complete(minted, former, together)
        else:
            _log_begin(minted, former, began=word == "ok", repaired=repaired)
        return word != "lost"

    async def _mark_never_begun(self, minted: Cursor) -> None:
        """Note in SQL that this epoch never began, because another replica was first."""
        try:
            await self._port.sql(self._cold.never_begun, minted.partition, minted.epoch)
        except StateError as error:
            log.debug(
                "partition %d: %s; its next epoch is reported as a loss although nothing was lost",
                minted.partition,
                error,
            )

    async def _bring_together(
        self, keys: PartitionKeys, token: str, seen: str, cursor: Cursor, silence: float
    ) -> _Together | None:
        """Archive the entries that continue SQL, and discard from Redis records that are newer in SQL.

        None: try again.
        """
        unmatched: list[JournalEntry] | None = []
        moved: Cursor | None = cursor
        fits = bool(seen) and await self._fits(keys, cursor)
        if fits:
            moved = await self._archive_rest(keys, token, cursor)
        elif seen and not (fits := await self._is_all_archived(keys, seen)):
            unmatched = await self._discard_newer(keys, token, seen)
        if moved is None or unmatched is None:
            return None
        together = await self._restore_unarchived(keys, token, seen, moved, unmatched, silence)
        return None if together is None else replace(together, fits=fits and together.fits)

    async def _catch_up(
        self, keys: PartitionKeys, token: str, cursor: Cursor | None, backfilled: Backfilled
    ) -> Cursor | None:
        """Bring an older SQL up to Redis; the cursor afterwards."""
        place = (await self._partitions.states([keys]))[keys.partition]
        if await self._is_behind(keys, place, cursor):
            discard = partial(self._discard, keys, token, place.epoch)
            # Unarchived commits of live replicas fill gaps of the journal.
            unarchived, _ = await self._gather(keys.partition, place.epoch, _SILENCE)
            done = await self._backfill(discard).run(place, keys, cursor, unarchived)
            if done is None:
                raise RecoveryInProgress(f"partition {keys.partition}: another replica is starting it")
            backfilled.add(done)
        return await self._port.sql(self._cold.cursor, keys.partition)

    async def _fits(self, keys: PartitionKeys, cursor: Cursor) -> bool:
        """Whether the journal has the entry at SQL's cursor, and continues from there without a gap."""
        (journal,) = await self._partitions.journals([(keys, cursor.offset)], 2)
        return not why_unmatched(cursor, journal)

    async def _is_all_archived(self, keys: PartitionKeys, seen: str) -> bool:
        """Whether SQL has all of Redis' epoch, and has minted a later one that never began in Redis."""
        last = await self._port.sql(self._cold.last_begun, keys.partition, seen)
        if last is None or not await self._fits(keys, last):
            return False
        return not await self._partitions.entries(keys, last.offset, 1)

    async def _archive_rest(self, keys: PartitionKeys, token: str, cursor: Cursor) -> Cursor | None:
        """Archive the journal's entries after the cursor; the cursor afterwards, None if another replica does so."""
        while entries := await self._partitions.entries(keys, cursor.offset, _PAGE):
            carried = await self._archive(keys, token, cursor, entries)
            if carried is None:
                return None
            cursor = carried
        return cursor

    async def _archive(
        self, keys: PartitionKeys, token: str, cursor: Cursor, entries: Sequence[JournalEntry]
    ) -> Cursor | None:
        batch = Batch(keys.partition, cursor.epoch, cursor.offset, list(entries), cursor.event)
        if not await self._port.sql(self._cold.archive, [batch]) or not await self._partitions.renew_right(keys, token):
            return None
        return replace(cursor, offset=entries[-1].offset, event=entries[-1].event)

    async def _discard_newer(self, keys: PartitionKeys, token: str, seen: str) -> list[JournalEntry] | None:
        """Discard from Redis the records that are newer in SQL; the journal's entries that SQL lacks.

        None if another replica does so.
        """
        after = since_ms = 0
        common = True  # whether SQL has all entries so far
        unmatched: list[JournalEntry] = []
        while entries := await self._partitions.entries(keys, after, _PAGE):
            lacking = await self._port.sql(self._cold.lacking, keys.partition, seen, entries)
            unmatched += [entry for entry in entries if entry.event in lacking]
            for entry in entries:
                common = common and entry.event not in lacking
                since_ms = entry.time_ms if common else since_ms
            after = entries[-1].offset
            if not await self._partitions.renew_right(keys, token):
                return None
        newer = await self._port.sql(self._cold.changed_since, keys.partition, max(0, since_ms - CLOCKS_MS))
        changed = {entry.record for entry in unmatched if entry.record}
        records = {self._keys.of(Ref.parse(text)) for text in changed.union(newer.records)}
        if newer.erased:
            records |= await self._erased(keys, token, newer.erased)
        return unmatched if await self._discard(keys, token, seen, records) else None

    async def _restore_unarchived(
        self,
        keys: PartitionKeys,
        token: str,
        seen: str,
        cursor: Cursor,
        unmatched: list[JournalEntry],
        silence: float,
    ) -> _Together | None:
        """Archive the commits of live replicas and of the journal that continue SQL; keep the others in branches.

        None: try again.
        """
        partition = keys.partition
        unarchived, silent = await self._gather(partition, cursor.epoch, silence)
        # Gathering may have taken long. A server that took over meanwhile may have the commits that would become
        # branches.
        if not await self._partitions.renew_right(keys, token):
            return None
        own = unmatched if seen == cursor.epoch else []
        known = await self._port.sql(self._cold.known, partition, cursor.epoch, [*own, *unarchived])
        plan = reconcile(cursor.epoch, cursor.offset, known, own, unarchived)
        kept: list[Kept] = []
        for epoch, entries in ((seen, [] if own else unmatched), (cursor.epoch, plan.diverged)):
            if entries:
                kept += await self._keep(
                    keys, epoch, entries, f"Redis lost what SQL has up to {cursor.epoch} {cursor.offset}"
                )
        if silent:
            log.warning("partition %d: %d replicas do not report their unarchived commits", partition, len(silent))
        if not plan.continued:
            return _Together(cursor, True, kept, 0, len(silent))
        for some in chunks(plan.continued, _PAGE):
            carried = await self._archive(keys, token, cursor, [*some, _mark(cursor, some[-1], token)])
            if carried is None:
                return None
            cursor = carried
        records = {self._keys.of(Ref.parse(entry.record)) for entry in plan.continued if entry.record}
        if not await self._discard(keys, token, seen, records):
            return None
        lacks_events = any(kind == b"e" for entry in plan.continued for kind, _, _ in unpack(entry.data))
        return _Together(cursor, not lacks_events, kept, len(plan.continued), len(silent))

    async def _keep(self, keys: PartitionKeys, epoch: str, entries: Sequence[JournalEntry], cause: str) -> list[Kept]:
        """Keep entries that SQL cannot continue with: changes of records in branches, other events in quarantine."""
        text = "partition %d: %d entries of epoch %s do not continue SQL's history"
        log.error(text, keys.partition, len(entries), epoch)
        changes = [entry for entry in entries if entry.record]
        alone = [entry for entry in entries if not entry.record]
        kept: list[Kept] = await self._port.sql(self._cold.branches.keep, keys.partition, epoch, changes, cause)
        if alone:
            await self._port.sql(self._cold.set_aside, keys.partition, epoch, alone)
        return kept

    async def _discard(self, keys: PartitionKeys, token: str, seen: str, records: Iterable[RecordKeys]) -> bool:
        """Delete records from Redis, and renew the right even if there are none; False if this replica lost it."""
        ordered = sorted(records, key=lambda each: each.ref.text)
        for at in range(0, len(ordered) or 1, _AT_ONCE):
            if not await self._partitions.discard(keys, token, seen, ordered[at : at + _AT_ONCE]):
                return False
            if not await self._partitions.renew_right(keys, token):
                return False
        return True

    async def _erased(self, keys: PartitionKeys, token: str, hashes: set[str]) -> set[RecordKeys]:
        """The records of the partition in Redis that were erased: SQL has only a hash of each one's name."""
        found = await self._records_in_redis(keys, token)
        return {each for each in found if hashed(self._keys.namespace, each.ref.text) in hashes}

    async def _records_in_redis(self, keys: PartitionKeys, token: str) -> set[RecordKeys]:
        """All records of the partition in Redis, found by scanning its keys."""
        found: set[RecordKeys] = set()
        cursor, texts = await self._partitions.records_page(keys, 0)
        while True:
            pairs = ((text, self._keys.of(Ref.parse(text))) for text in texts)
            found.update(each for text, each in pairs if each.ref.text == text)  # not a record's lock or queue
            if not cursor:
                return found
            await self._partitions.renew_right(keys, token)
            cursor, texts = await self._partitions.records_page(keys, cursor)


def _mark(cursor: Cursor, last: JournalEntry, token: str) -> JournalEntry:
    """An entry that changes nothing and is not in a journal: SQL's cursor moves there after commits were restored.

    SQL may lack commits before the restored ones. If its cursor were at the last restored commit, the journal of a
    server that has all of them would match, and the commits that SQL lacks would count as archived.
    """
    return JournalEntry(max(cursor.offset, last.offset), f"{token}.put-back", "", 0, 0, "", "", 0, b"", 0)


def _epoch_fields(minted: Cursor, former: str) -> dict[str, object]:
    """Structured fields of a log line about an epoch."""
    return {"partition": minted.partition, "epoch": minted.epoch, "former_epoch": former}


def _log_begin(minted: Cursor, former: str, *, began: bool, repaired: bool) -> None:
    """Log an epoch that began, or was only minted, without an unexplained loss."""
    extra = _epoch_fields(minted, former)
    if not began:
        text = "partition %d: epoch %s was not used, because another replica started the partition: nothing lost"
        log.info(text, minted.partition, minted.epoch, extra=extra)
    elif repaired:
        text = "partition %d: epoch %s after %s, because SQL was repaired; `repair` lists the losses"
        log.warning(text, minted.partition, minted.epoch, former, extra=extra)
    else:
        text = "partition %d: epoch %s begins: the partition was empty before"
        log.info(text, minted.partition, minted.epoch, extra=extra)


def _log_complete(minted: Cursor, former: str, together: _Together) -> None:
    """Log an epoch that began because a server was restarted or promoted, and in which nothing is missing."""
    log.info(
        "partition %d: epoch %s after %s: Redis has another data id, and has everything that SQL and the running "
        "replicas know of; %d commits were restored from their writers",
        minted.partition,
        minted.epoch,
        former,
        together.put_back,
        extra=_epoch_fields(minted, former) | {"put_back": together.put_back},
    )


def _loss_cause(seen: str, fits: bool) -> str:
    if not seen:
        return "Redis was emptied"
    return "Redis has another data id" + (", and has what SQL has" if fits else ", and lacks what SQL has")


def _log_loss(minted: Cursor, former: str, reached: Cursor, together: _Together, *, why: str) -> None:
    """Log what is known of a loss. Commits known only to a process that has ended cannot be counted."""
    branched = sum(each.commits for each in together.kept)
    text = (
        "partition %d: epoch %s after %s: %s; %d commits were restored from their writers, %d are kept in "
        "branches; lost: commits acknowledged after offset %d that only ended processes had%s"
    )
    silent = f" or to {together.silent} replicas that did not answer" if together.silent else ""
    fields = _epoch_fields(minted, former) | {"put_back": together.put_back, "branched": branched}
    log.warning(
        text,
        minted.partition,
        minted.epoch,
        former,
        why,
        together.put_back,
        branched,
        reached.offset,
        silent,
        extra=fields,
    )


def _lacks(cursor: Cursor | None, place: PartitionState, journal: Journal) -> str:
    """Why SQL at this cursor cannot catch up from the journal; "" if it can, or has everything."""
    if cursor is None or _sql_is_older(cursor, place):
        known = "none" if cursor is None else f"epoch {cursor.epoch}, entry {cursor.offset}"
        return f"SQL is older: Redis had archived up to epoch {place.epoch}, entry {place.archived}; SQL has {known}"
    here = [entry.event for entry in journal.onward[:1]]
    if cursor.epoch != journal.epoch or (cursor.offset and here != [cursor.event]):
        return ""  # the partition will be started again, from SQL
    return why_unmatched(cursor, journal)


def _sql_is_older(cursor: Cursor | None, place: PartitionState) -> bool:
    """Whether SQL was restored or emptied: it lacks entries that Redis knows to be archived, or Redis' epoch."""
    if cursor is None or count(place.epoch) > cursor.ordinal:
        return True
    return cursor.epoch == place.epoch and place.archived > cursor.offset
