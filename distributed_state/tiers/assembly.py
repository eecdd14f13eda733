"""The three tiers of a process, for all its threads and event loops. Law: they are made and closed only here.

Known ids save queries to SQL. Redis has the ids of all records of a partition (known_ids.lua). A replica has the ids of
records that it wrote, which exist, and of records that it did not find in SQL (`KnownIds`). When SQL does not have a
record, a hydration token is left in Redis for half a minute; every commit and every hydration of the record removes it.
While the same token exists, SQL still does not have the record. Tokens are never used twice, and a token of another
epoch is not valid.

*Without the token, a record could be started a second time: another worker had started and archived it, and it had left
Redis again.*

Branches are kept in SQL before their event is published. The replica that keeps a branch publishes the event; if that
process dies in between, a replica that archives the partition does. The event's id is derived from the branch, so it is
published once.

Closing tries every step, even if an earlier one fails.

Design: sections 10, 14.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import orjson

from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Branched, Kept
from distributed_state.errors import ColdUnavailable, ConfigurationError, InvalidValue, StateError
from distributed_state.hot.cache import Hot
from distributed_state.port import Mutex, Port, Signal, waited
from distributed_state.settings import Settings
from distributed_state.tiers.archive_pass import IdleJournals
from distributed_state.tiers.archiver import Archiver
from distributed_state.tiers.recovery import Recovery
from distributed_state.tiers.refill import Refill
from distributed_state.tiers.unarchived import Gathering, UnarchivedCommits
from distributed_state.tiers.workers import HandlerWorker, WorkCounts, Worker
from distributed_state.values import codec
from distributed_state.values.codec import Codec
from distributed_state.values.journal import Happened, JournalEntry, unpack
from distributed_state.values.keys import Keys, RecordKeys
from distributed_state.values.levels import Freshness, check_staleness
from distributed_state.values.model import Ref
from distributed_state.warm.client import Warm
from distributed_state.warm.clock import Rounds, ServerClock
from distributed_state.warm.confirming import Confirming
from distributed_state.warm.consumers import Consumers
from distributed_state.warm.heartbeat import Figures, Heartbeat
from distributed_state.warm.lease import AsyncLease, Leases
from distributed_state.warm.link import Link
from distributed_state.warm.lock import Taken
from distributed_state.warm.maintenance import Maintenance
from distributed_state.warm.output import Followers, Received
from distributed_state.warm.stream import BackgroundEvents, Position, Stream

log = logging.getLogger(__name__)
Step = Callable[[], Awaitable[None] | None]
_LOOK_EVERY = 0.05  # seconds between two looks at the last archiving
_LOOK_SECONDS = 15.0  # between two looks for branches whose event was not published
_CLOCKS_MS = 600_000  # maximum lead of a replica's clock over Redis' clock, for the time at which a branch was kept
_KNOWN_IDS = 16_384
_SILENT_SECONDS = 10.0  # seconds for which a silent replica is not waited for again


class Tiers:
    """Hot, warm and cold, and the parts that move data between them."""

    def __init__(
        self,
        port: Port,
        settings: Settings,
        keys: Keys,
        codec_of: Callable[[str], Codec],
        cold: ColdStore,
        replica: str,
        layout: dict[str, Any],
    ) -> None:
        self.port = port
        self.settings = settings
        self.keys = keys
        self.cold, self.archive_id = cold, str(layout["archive"])
        self.replica = replica
        self._name = replica.encode()
        self.codec_of = codec_of
        self.warm = Warm(port, settings, replica, codec_of)
        self.clock, self.telemetry = self.warm.clock, self.warm.telemetry
        self.rounds = Rounds(port.monotonic)
        self.hot, self.link = self._local_and_link()
        mark = partial(leave_mark, self.warm.command, keys, layout)
        self.recovery = Recovery(
            port, self.warm, cold, keys, settings, leave_mark=mark, gather=self._gather, diverged=self._diverged
        )
        self.start = self.recovery.start
        self.refill = Refill(port, self.warm, self.hot, self.link, keys, self.see, self.start)
        self.known_ids = KnownIds()
        self.handlers = KnownIds()  # handlers of sessions, by their texts
        self.confirming = Confirming(port, self.warm, settings)
        self.leases = Leases(
            port, self.warm, self.link, self.start, on_granted=self._lock_granted, on_lost=self._lock_lost
        )
        self.followers = Followers(port, self.link)
        self._uses_hot = settings.max_staleness > 0 and settings.hot_entries > 0 and settings.hot_bytes > 0
        link = self.link if self._uses_hot else None
        idle_journals = IdleJournals(port, keys, link if settings.url else None)
        self.archiver = Archiver(port, self.warm, cold, keys, settings, self.recovery, self.rounds, idle_journals)
        self.unarchived = UnarchivedCommits(port, self.warm, cold, self.archiver, keys, settings, self._late)
        self.last_archiving = LastArchiving(port, self.archiver, self.unarchived, self.clock, settings)
        self.stream = Stream(port, self.warm, self._archived, self.start, self.unarchived.add_event)
        self.branches = Branches(port, cold, self.stream, keys)
        self.background_events = BackgroundEvents(port, self.stream, keys)
        self.consumers = Consumers(port, self.stream, keys, self.link, self._epochs_over)
        self.heartbeat = Heartbeat(port, self.warm, self.stream, keys, settings, self.rounds, self.figures)
        self.maintenance = Maintenance(port, self.warm, keys)
        self.gathering = Gathering(port, self.warm, keys, self.unarchived, link, active=settings.beat > 0)
        self._silent: dict[str, float] = {}  # replicas that did not report their unarchived commits, and when
        self.handlings: list[HandlerWorker] = []
        self.work = WorkCounts()
        self.workers: list[Worker] = []
        self._epochs: dict[int, str] = {}
        self._listening: dict[str, bytes] = {}
        self._handler = self._receive  # one bound method for all channels
        self._observing: dict[bytes, WeakKeyDictionary[Received, None]] = {}
        self._mutex = port.mutex()

    def _local_and_link(self) -> tuple[Hot, Link]:
        settings = self.settings
        hot = Hot(
            self.port,
            entries=settings.hot_entries,
            size=settings.hot_bytes,
            recent=settings.recent_messages,
            max_staleness=settings.max_staleness,
            evicted=self._stop_listening,
        )
        link = Link(
            self.port,
            self.keys,
            self.replica,
            max_staleness=settings.max_staleness,
            rounds=self.rounds,
            lost=self._lost,
            epoch_received=self.see,
            time_received=lambda *answer: self.clock.received(*answer),
        )
        return hot, link

    def within(self, text: str, max_staleness: float) -> bool:
        """Whether hot has this record and its copy is at most this old."""
        check_staleness(max_staleness)
        most = self.settings.max_staleness
        if 0 < most < max_staleness:
            # A silent limit would look like a broken cache. With hot off (0) every read is fresh enough.
            text = f"max_staleness={max_staleness:g} is more than the store's {most:g}, and hot reads are never older"
            raise InvalidValue(f"{text}: leave it out, or open the store with max_staleness={max_staleness:g}")
        entry = self.hot.entries.get(text)
        return entry is not None and self.hot.clock() < entry.freshness.good_until - most + max_staleness

    def _lost(self, lost: list[Freshness]) -> None:
        self.hot.lose(lost)
        for each in lost:
            self._epochs.pop(each.partition, None)

    def listen(self, keys: RecordKeys) -> Freshness | None:
        """Listen for the record's changes, if hot is in use.

        Returns the freshness to keep with a record that is read from now on; None: it must not be kept.
        """
        if self._uses_hot and keys.ref.text not in self._listening:
            self._begin_listening(keys)
        return self.link.freshness(keys.channel)

    def _begin_listening(self, keys: RecordKeys) -> None:
        text = keys.ref.text
        silent: list[str] = []
        with self._mutex:
            self._listening[text] = keys.channel
            # Records that are read only once are not kept in hot, so subscriptions for records without a hot copy have
            # their own limit.
            while len(self._listening) - len(silent) > 2 * self.settings.hot_entries + 100:
                oldest = next(iter(self._listening))
                self._listening[oldest] = self._listening.pop(oldest)
                if self.hot.cached(oldest) is None:
                    silent.append(oldest)
        self.link.watch(keys.channel, self._handler)
        for each in silent:
            self._stop_listening(each)

    def _stop_listening(self, text: str) -> None:
        channel = self._listening.pop(text, None)
        if channel is not None and channel not in self._observing:
            self.link.leave(channel)
        # Last, so that a load that started during the subscription is not kept.
        self.hot.forget(text)

    def observe(self, keys: RecordKeys, received: Received) -> None:
        """Give this follower the messages about commits of a record, also of this replica's own."""
        with self._mutex:
            self._observing.setdefault(keys.channel, WeakKeyDictionary())[received] = None
        self.link.echo(keys.channel)
        self.link.watch(keys.channel, self._handler)
        if self.link.confirmed(keys.channel):
            received.put_change(b"")

    def stop_observing(self, channel: bytes, received: Received | None = None) -> None:
        """Undo `observe`, or notice that the last follower was dropped."""
        with self._mutex:
            observing = self._observing.get(channel)
            if observing and received is not None:
                observing.pop(received, None)
            if observing:
                return
            self._observing.pop(channel, None)
        self.link.echoed.discard(channel)
        if self.keys.text_of(channel) not in self._listening:
            self.link.leave(channel)

    def _receive(self, channel: bytes, payload: bytes) -> None:
        if channel in self._observing:
            with self._mutex:
                observing = list(self._observing.get(channel, ()))
            for each in observing:
                each.put_change(payload)
            if not observing:
                self.stop_observing(channel)
        if not payload:
            self.refill.confirmed(channel)
            return
        epoch, version, replica, change = payload.split(b" ", 3)
        if change[:1] == b"!":
            self.leases.seized(replica.decode())
        elif change[:1] == b"?":
            self.leases.stop(replica.decode(), change[1:].decode())
        elif replica != self._name:
            ops = unpack(change[1:]) if change[:1] == b"+" else None
            self.hot.apply(self.keys.text_of(channel), epoch.decode(), int(version), ops)

    def see(self, partition: int, epoch: str) -> None:
        """Note the epoch of an answer ("": none). A new epoch drops data cached under the earlier one."""
        known = self._epochs.get(partition)
        if known != epoch and (known or epoch):
            if known:
                # If one partition was emptied, the whole server was, and it is unknown which entries changed.
                self.link.renew(partition)
                # Their channels are confirmed already, so no later confirmation restores them.
                self.refill.add([at for text in self.hot.all_aside() if (at := self._listening.get(text))])
            self._epochs[partition] = epoch

    def epoch(self, partition: int) -> str:
        """The epoch last seen for a partition."""
        return self._epochs.get(partition, "")

    async def _epochs_over(self) -> dict[int, Position]:
        """A consumer's positions in partitions that Redis lacks, from the epochs in SQL."""
        try:
            over = await self.port.sql(self.cold.last_events)
        except ColdUnavailable:
            return {}  # as if SQL had no epochs: at worst a consumer gets a resync without having missed an event
        return {at: Position.behind(epochs, known) for at, (epochs, known) in over.items()}

    async def listening(self) -> bool:
        """Wait until every handler receives events, so that later writes are not missed.

        Returns whether all of them do.
        """
        until = self.port.monotonic() + min(self.settings.timeout, self.warm.left())
        every = True
        for each in list(self.handlings):
            if self.port.holds_up(each.here) and not await each.joined.wait(0):
                held_up = "ready: a handler is to listen in the event loop that this call holds up"
                raise ConfigurationError(f"{held_up}: `await store.aio.ready()` there")
            every = await each.joined.wait(max(0.0, until - self.port.monotonic())) and every
        return every

    def _lock_granted(self, text: str, taken: Taken) -> None:
        if taken.version or taken.trailing is not None:
            self.hot.expect(text, taken.epoch, taken.version)
        else:
            # Redis does not have the record, which may have been evicted, so the hot copy may be stale.
            self.hot.forget(text)

    def _lock_lost(self, lease: AsyncLease) -> None:
        self.background_events.emit("lock.lost", lease.text, {"token": lease.token, "holder": lease.holder})

    async def _gather(self, partition: int, epoch: str, silence: float) -> tuple[list[JournalEntry], set[str]]:
        if not self.unarchived.enabled:
            return [], set()
        now = self.port.monotonic()
        known = await self.heartbeat.replica_ids()
        # A replica that was silent for one partition is not waited for again in each of the others.
        waited = {each for each in known if now - self._silent.get(each, -math.inf) > _SILENT_SECONDS}
        found, silent = await self.gathering.gather(partition, epoch, waited, silence=silence)
        self._silent.update(dict.fromkeys(silent, now))
        return found, silent | (known - waited)

    async def _diverged(self, kept: Sequence[Kept]) -> None:
        self.branches.noted(kept)
        records = sorted({each.record for each in kept})
        if any(self.archiver.is_at(self.keys.of(Ref.parse(each)).partition) for each in records):
            # Publishing is done later: this may run in an archiver pass that starts an epoch, and publishing would wait
            # for that pass.
            self.port.spawn(partial(self.branches.tell, records), "distributed-state-diverged")
        else:
            await self.branches.tell(records)

    async def _late(self, partition: int, epoch: str, entries: list[JournalEntry]) -> None:
        """Keep, as branches, acknowledged commits of this replica that were missing when their epoch ended."""
        changes = [entry for entry in entries if entry.record]
        await self.branches.keep(partition, epoch, changes, "its writer did not answer when Redis had lost it")
        alone = [entry for entry in entries if not entry.record]
        if alone:
            await self.port.sql(self.cold.set_aside, partition, epoch, alone)

    async def _archived(self, partition: int, id: str, since_ms: int) -> Happened | None:
        """An event by its id, if it was written at this time or later."""
        await self.archiver.drain([partition])
        return await self.port.sql(self.cold.event, partition, id, since_ms)

    def figures(self) -> Figures:
        """This replica's state, collected without a request."""
        handlings = list(self.handlings)
        archiver = self.archiver
        return Figures(
            {"archived": archiver.archived, "archives": len(archiver.mine), "events": self.consumers.reached},
            {
                "hot_hits": self.hot.hits,
                "hot_misses": self.hot.misses,
                "hot_entries": len(self.hot.entries),
                "hot_bytes": self.hot.bytes,
                "archived": archiver.archived,
                "unarchived_bytes": self.unarchived.bytes,
                **self.link.figures,
                "leases": self.leases.held,
                "events_waiting": self.consumers.waiting,
                "events_handled": sum(each.handled for each in handlings),
                "events_failed": sum(each.failed for each in handlings),
                "slow_handlers": sum(each.slowed for each in handlings),
                "resyncs": self.consumers.resyncs,
                **self.telemetry.totals(),
                "full_at": int(self.warm.full_at),
                "output_dropped": self.leases.outputs.dropped,
                "output_dropped_at": int(self.leases.outputs.dropped_at),
                "restarted": self.recovery.count,
                "restarted_at": int(self.recovery.last),
                "complete": self.recovery.complete,
                "complete_at": int(self.recovery.last_complete),
            },
            *archiver.trouble,
        )

    async def archive_rest(self) -> None:
        """Archive the remaining commits if possible, because an embedded Redis ends with its store."""
        try:
            await self.archiver.drain()
        except StateError as error:
            log.warning("close: the remaining unarchived commits are lost: %s", error)

    async def close(self) -> None:
        """Stop the background work and drop the connections."""
        # All jobs are asked to end before waiting for any of them: otherwise each would wait for a silent server in
        # turn.
        steps: list[Step] = [] if self.settings.url else [self.archive_rest]
        handlings = list(self.handlings)
        steps += [each.end for each in handlings]
        steps += [each.finish for each in handlings] + [each.close for each in handlings]
        steps += [self.background_events.close, *([self.last_archiving.finish] if self.settings.url else [])]
        # Leave the list of replicas first: while a job waits for a hanging SQL, this replica would seem to have died.
        steps += [self.port.ask_all, self.heartbeat.close, *(each.close for each in self.workers)]
        steps += [self.refill.close, self.consumers.close, self.gathering.close, self.archiver.close]
        steps += [self.leases.close, self.link.close, self.port.close]
        await try_each(steps)


class LastArchiving:
    """Archives this process's commits before its store closes, in `close_timeout` seconds at most.

    It runs in its own thread, so that a server that does not answer blocks this thread, but not the caller of `close`.
    """

    def __init__(
        self, port: Port, archiver: Archiver, commits: UnarchivedCommits, clock: ServerClock, settings: Settings
    ) -> None:
        self._port = port
        self._archiver = archiver
        self._unarchived = commits
        self._clock = clock
        self._settings = settings
        self._left: dict[int, tuple[str, int]] = {}
        self._why = ""

    async def finish(self) -> None:
        """Wait until everything is archived or the time is over, and log how many commits are not."""
        seconds = self._settings.close_timeout
        self._left = self._unarchived.written()
        if not seconds or not self._left:
            return
        self._why = f"close_timeout={seconds:g} is over"
        over, began = self._port.signal(), self._port.monotonic()
        job = self._port.spawn(partial(self._run, over), "distributed-state-last-archiving")
        try:
            await over.wait(seconds)
        finally:
            job.ask()
        if self._left:
            if (account := waited.present()) is not None:
                account.add(began)  # so that the next steps do not wait again for a Redis that does not answer
            count = f"up to {len(self._unarchived)} commits" if self._unarchived.enabled else "commits"
            text = "close: %s of this process in %d partitions are in Redis and not archived yet: %s"
            log.warning(text, count, len(self._left), self._why)

    async def _run(self, over: Signal) -> None:
        try:
            with waited.call():  # this thread has its own account of waited time, apart from the call of `close`
                await self._unarchived.look()  # drops archived commits, and keeps those that were lost with an epoch
                await self._archive()
                await self._unarchived.look()
        except StateError as error:
            self._why = str(error)
        finally:
            over.set()

    async def _archive(self) -> None:
        self._left = await self._archiver.unreached(self._unarchived.written())
        if self._left and self._settings.archiver:
            # Done even if another worker archives: two archivers are harmless, and the other one may be slow or dead.
            await self._archiver.drain(self._left)
            self._left = await self._archiver.unreached(self._left)
        while self._left:
            await self._clock.know()
            if not await self._archiver.anybody(self._clock.now()):
                self._why = "no worker archives now"
                return
            await self._port.sleep(_LOOK_EVERY)
            self._left = await self._archiver.unreached(self._left)


async def try_each(steps: Iterable[Step]) -> None:
    """Take each step; an error other than StateError, such as a cancellation, is raised after the last step."""
    failed: BaseException | None = None
    for step in steps:
        try:
            waits = step()
            if waits is not None:
                await waits
        except StateError as error:
            log.warning("close: %s", error)
        except BaseException as error:  # noqa: BLE001 - jobs that are not asked to end would run forever
            failed = failed or error
    if failed is not None:
        raise failed


class Branches:
    """Keeps branches for one replica. `count` is the number of branches in SQL; None: not counted yet."""

    def __init__(self, port: Port, cold: ColdStore, stream: Stream, keys: Keys) -> None:
        self._port = port
        self._cold = cold
        self._stream = stream
        self._keys = keys
        self._look_at = 0.0
        self.commits = 0
        self.count: int | None = None

    async def keep(self, partition: int, epoch: str, entries: Iterable[JournalEntry], cause: str) -> list[Kept]:
        """Keep commits of an ended epoch outside their records' history, and publish an event; returns the new ones.

        Commits that are kept, archived or erased already are skipped. If the partition has no epoch yet, the event is
        published later. Raises ColdUnavailable, and then nothing is kept.
        """
        kept = await self._port.sql(self._cold.branches.keep, partition, epoch, list(entries), cause)
        self.noted(kept)
        await self.tell({each.record for each in kept})
        return kept

    def noted(self, kept: Iterable[Kept]) -> None:
        """Count and log branches that were kept in another transaction, once it is committed."""
        for each in kept:
            about = each.record[:200]
            log.warning(
                "%s: %d commits are kept in branch %s", about, each.commits, each.branch, extra={"record": about}
            )
            self.commits += each.commits

    async def tell(self, records: Iterable[str]) -> None:
        """Publish `conversation.diverged` for each branch of these records that is not published yet."""
        for record in sorted(records):
            for branch in await self._port.sql(self._cold.branches.of, record):
                if not branch.published:
                    try:
                        await self._publish(branch)
                    except StateError as error:
                        text = "%s: branch %s is not published yet: %s"
                        log.warning(text, record[:200], branch.id, error, extra={"record": record[:200]})

    async def _publish(self, branch: Branched) -> None:
        data = {"branch": branch.id, "base": branch.base, "commits": len(branch.versions), "cause": branch.cause}
        keys = self._keys.partition(branch.partition)
        text = f"{self._keys.namespace}\0{branch.record}\0{branch.id}"
        writer = "d" + hashlib.sha256(text.encode()).hexdigest()[:15]
        since_ms = branch.kept_ms - _CLOCKS_MS
        encoded = codec.encode(data, "data")
        if await self._stream.emit_once(keys, writer, since_ms, "conversation.diverged", branch.record, encoded):
            await self._port.sql(self._cold.branches.mark_published, branch.record, branch.id)

    async def look_after(self, partitions: Sequence[int]) -> None:
        """From time to time count the branches, and publish events of these partitions that were not published."""
        now = self._port.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        self.count, untold = await self._port.sql(self._cold.branches.survey, partitions)
        await self.tell(untold)


class KnownIds(dict[str, str]):
    """The ids that this replica knows: those of records that it wrote, and of records that SQL did not have.

    The key is a record's text; the value is "" if it exists, else the hydration token under which SQL did not have it.
    The handlers of sessions are kept in the same way.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mutex = Mutex()

    def add(self, text: str, token: str = "") -> None:
        """Note that the record exists, or that SQL did not have it under this token."""
        if self.get(text) == token:
            return
        with self._mutex:
            self.pop(text, None)
            self[text] = token
            while len(self) > _KNOWN_IDS:
                del self[next(iter(self))]


async def leave_mark(ask: Callable[..., Awaitable[Any]], keys: Keys, layout: dict[str, Any]) -> bytes | None:
    """Read Redis' note about the store, or write it and return None if it did not exist. `ask` sends a command."""
    # Read first: a full Redis refuses SET NX even if the key exists.
    found: bytes | None = await ask(b"GET", keys.store)
    if found is None and await ask(b"SET", keys.store, orjson.dumps(layout), b"NX") is None:
        found = await ask(b"GET", keys.store)
    return found
