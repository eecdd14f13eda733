"""Ends expired sessions, prunes old events, and completes interrupted erasures and announcements.

Law: a session ends by an ordinary commit against the version that was read, so only one of two reapers succeeds, and a
write meanwhile keeps the session alive.

A sorted set for each partition holds the time at which to check each session. Commits do not update it: if the check
finds that a session was used meanwhile, it sets a later time. A partition with nothing due is not checked again until
something was written there (`DueLooks`).

Design: sections 10, 15.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from distributed_state.cold.values import Erasure, Mortal
from distributed_state.errors import Conflict, Deleted, DurabilityUnknown, Locked, StateError, Unavailable
from distributed_state.port import Call
from distributed_state.records import lifecycle
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.workers import JobWorker
from distributed_state.values import field_ttl
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import LIFETIME, Expiry, Ref, log_fields
from distributed_state.warm.answers import Committed, Draft
from distributed_state.warm.held_leases import HeldLeases
from distributed_state.warm.scripts import DEFER, DUE, FILL, PRUNE

_SECONDS = 10.0  # a partition without due sessions is checked again after this time in any case


class _Look(NamedTuple):
    """When the look was sent, and when a session will be due, by this process's monotonic clock."""

    asked: float
    due: float


class DueLooks:
    """The last look at each partition that found nothing due. `resting`: since when nothing was written there."""

    def __init__(self, monotonic: Callable[[], float], idle_since: Callable[[int], float | None]) -> None:
        self._monotonic = monotonic
        self._idle_since = idle_since
        self._looks: dict[int, _Look] = {}

    def note(self, partition: int, asked: float, now_ms: bytes = b"0", later_ms: bytes = b"") -> None:
        """Note that nothing was due; the next session is due at `later_ms` by the server's clock ('': never)."""
        # Counted from the request, which was before the server's answer, so the result is not too late.
        left = (float(later_ms) - int(now_ms)) / 1000 if later_ms else math.inf
        self._looks[partition] = _Look(asked, asked + left)

    def forget(self, partition: int) -> None:
        """Drop what is known of the partition: something is due, or may be."""
        self._looks.pop(partition, None)

    def nothing_due(self, partition: int) -> bool:
        """Whether it is certain that no session is due."""
        look, since = self._looks.get(partition), self._idle_since(partition)
        if look is None or since is None or since > look.asked:
            return False
        return self._monotonic() < min(look.due, look.asked + _SECONDS)


log = logging.getLogger(__name__)
_FILLED = "lifetimes"  # the field of a partition's meta: see due.lua
_AT_ONCE = 1000
_PAGE = 1000
_PRUNED = 1000
_EMPTY_SECONDS = 60.0
_TROUBLE_SECONDS = 30.0
_PRUNE_SECONDS = 60.0
_ERASE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Due:
    """A record in the set, with its score there."""

    keys: RecordKeys
    score: bytes
    epoch: str
    now_ms: int


class Reaper(JobWorker):
    """Works on some or all partitions. Several reapers on one partition are harmless, but wasteful."""

    job_name = "distributed-state-reaper"

    def __init__(self, tiers: Tiers) -> None:
        super().__init__(tiers.port)
        self._tiers = tiers
        self._empty: dict[int, float] = {}
        self._looks = DueLooks(self._port.monotonic, tiers.archiver.idle_journals.since)
        self._leases = HeldLeases(tiers.port, tiers.keys, tiers.clock)
        self._prune_at = self._erase_at = 0.0
        self._unfinished: set[Erasure] = set()
        self.expired = 0

    async def _run(self) -> None:
        # A fifth is left for the sweep itself, so that its duration does not delay the end.
        pause = every = self._tiers.settings.sweep * 0.8
        while True:
            begun = self._port.monotonic()
            more = False
            try:
                more = await self.sweep(list(self._tiers.archiver.mine))
                pause = every
            except StateError as error:
                pause = min(pause * 2, max(every, 5.0))
                log.warning("reaper: %s; trying again in %.1f s", error, pause)
            if not more:
                await self._port.sleep(max(pause - (self._port.monotonic() - begun), every / 10))

    async def sweep(self, partitions: Sequence[int]) -> bool:
        """End expired sessions of these partitions; returns whether there were more than one pass handles.

        One of several servers may be down: its partitions are handled later. Raises WarmUnavailable if all are.
        """
        if not partitions:
            return False
        reached = [each for each in partitions if self._looks.nothing_due(each)]
        asked = [each for each in partitions if each not in reached]
        most = max(10, _AT_ONCE // len(partitions))
        began = self._port.monotonic()
        keys = map(self._tiers.keys.partition, asked)
        answers = await self._port.scripts([(DUE, [each.lifetimes, each.meta], [most, _FILLED, ""]) for each in keys])
        due, unfilled, empty, more = list[Due](), dict[int, str](), list[int](), False
        away: Unavailable | None = None
        for partition, answer in zip(asked, answers, strict=True):
            self._looks.forget(partition)
            if isinstance(answer, Unavailable):
                log.debug("reaper: partition %d: %s", partition, answer)
                away = answer
                continue
            if isinstance(answer, StateError):
                raise answer
            reached.append(partition)
            if answer[0] == b"uninitialised":
                empty.append(partition)
                self._looks.note(partition, began)
                continue
            self._empty.pop(partition, None)
            _, epoch, filled, now_ms, rows, later_ms = answer
            if filled != epoch:
                unfilled[partition] = epoch.decode()
            elif not rows:
                self._looks.note(partition, began, now_ms, later_ms)
            found, of = zip(rows[::2], rows[1::2], strict=True), self._tiers.keys.of
            due += [Due(of(Ref.parse(each.decode())), score, epoch.decode(), int(now_ms)) for each, score in found]
            more = more or len(rows) == 2 * most
        if away is not None and not reached:
            raise away
        await self._look(due)
        await self._fill(unfilled)
        await self._revive(empty)
        await self._erase(reached)
        await self._tiers.branches.look_after(reached)
        return await self._prune(reached) or more

    # Due sessions

    async def _look(self, due: Sequence[Due]) -> None:
        """End each session that has expired; for the others set the time of the next check, or remove it."""
        calls: list[Call] = []
        ends: list[tuple[Due, Draft]] = []
        for each, (version, last_ms, lifetime, deleted) in zip(due, await self._heads(due), strict=True):
            if version is None:
                continue  # the record could not be read
            if lifetime is None or deleted is not None or version == b"0":
                calls.append(_later(each, None))
                continue
            ends_ms = field_ttl.end_ms(lifetime, int(last_ms or each.now_ms))
            if ends_ms > each.now_ms:
                calls.append(_later(each, ends_ms))
            else:
                ends.append((each, self._end(each, int(version), lifetime)))
        if ends:
            await self._tiers.listening()
        results = await write_path.commit_many(self._tiers, [(each.keys, draft) for each, draft in ends])
        for (each, _), result in zip(ends, results, strict=True):
            calls += self._outcome(each, result)
        away = [result for result in results if isinstance(result, Unavailable)]
        if away:
            log.warning("%d sessions cannot expire now: %s", len(away), away[0])
        await self._send(calls)

    def _end(self, each: Due, version: int, lifetime: bytes) -> Draft:
        tiers = self._tiers
        until_ms = field_ttl.parse_lifetime(lifetime)[1]
        reason = "lifetime" if until_ms and until_ms <= each.now_ms else "idle"
        expiry = Expiry(reason, each.now_ms / 1000)
        changes = lifecycle.tombstone(tiers.settings, tiers.codec_of(each.keys.ref.text), expiry=expiry)
        return changes.draft("expire", expected=version, epoch=each.epoch)

    def _outcome(self, each: Due, result: Committed | StateError) -> list[Call]:
        if isinstance(result, Committed | DurabilityUnknown):
            self.expired += 1
        elif isinstance(result, Deleted):
            return [_later(each, None)]
        elif isinstance(result, Conflict | Locked):
            # Locked sessions are checked later: otherwise many of them would keep the others from being checked.
            return [_later(each, each.now_ms + int(self._tiers.settings.sweep * 1000))]
        elif not isinstance(result, Unavailable):
            return self._trouble(each, result)
        return []

    def _trouble(self, each: Due, error: StateError) -> list[Call]:
        log.warning("a record cannot expire now: %s", error, extra=log_fields(each.keys.ref.text))
        return [_later(each, each.now_ms + int(_TROUBLE_SECONDS * 1000))]

    async def _heads(self, due: Sequence[Due]) -> list[list[bytes | None]]:
        """For each record: version, time of the last commit, lifetime, whether it is deleted.

        Evicted records are loaded.
        """
        found = await self._read_heads(due)
        absent = [at for at, head in enumerate(found) if head[0] is None]
        gone = set()
        calls = []
        for at in absent:
            try:
                if not (await read_path.load_uncached(self._tiers, due[at].keys)).version:
                    gone.add(at)
            except Unavailable:
                raise
            except StateError as error:
                calls += self._trouble(due[at], error)
        for at, head in zip(absent, await self._read_heads([due[at] for at in absent]), strict=True):
            found[at] = [b"0", None, None, None] if at in gone else head
        await self._send(calls)
        return found

    async def _read_heads(self, due: Sequence[Due]) -> list[list[bytes | None]]:
        fields = (b"#v", b"#t", LIFETIME, b"#deleted")
        answers = await self._port.exchange([(b"HMGET", each.keys.record, *fields) for each in due]) if due else []
        return [[None] * 4 if isinstance(answer, Exception) else list(answer) for answer in answers]

    async def _send(self, calls: Sequence[Call]) -> list[Any]:
        answers = await self._port.scripts(calls) if calls else []
        for answer in answers:
            if isinstance(answer, StateError):
                raise answer
        return answers

    # Data that Redis lost

    async def _fill(self, epochs: dict[int, str]) -> None:
        """Put the sessions that SQL has into the sets, once in each epoch."""
        after = ""
        page = _PAGE
        while epochs and page == _PAGE:
            rows = await self._mortal(epochs, after)
            page = len(rows)
            members: dict[int, list[bytes]] = defaultdict(list)
            for row in rows:
                ends_ms = field_ttl.end_ms(row.lifetime.encode(), row.updated_ms)
                members[row.partition] += (b"%d" % ends_ms, row.record.encode())
            last = b"1" if page < _PAGE else b"0"
            calls: list[Call] = []
            for partition in epochs if page < _PAGE else members:
                keys = self._tiers.keys.partition(partition)
                # Each exchange has one call for a partition: the last call marks the set as filled with its last
                # members.
                calls.append(
                    (FILL, [keys.lifetimes, keys.meta], [epochs[partition], last, _FILLED, *members[partition]])
                )
            await self._send(calls)
            after = rows[-1].record if rows else ""

    async def _revive(self, empty: Iterable[int]) -> None:
        """Start partitions that Redis does not have, if they have sessions that will end."""
        now = self._port.monotonic()
        asked = {each: at for each, at in self._empty.items() if at > now}
        self._empty = asked
        unknown = [each for each in empty if each not in asked]
        rows = await self._mortal(unknown, "") if unknown else []
        for partition in sorted({row.partition for row in rows}):
            await self._tiers.start(partition)
        if len(rows) < _PAGE:
            asked.update(dict.fromkeys(unknown, now + _EMPTY_SECONDS))

    async def _mortal(self, partitions: Iterable[int], after: str) -> list[Mortal]:
        def page() -> list[Mortal]:
            return self._tiers.cold.mortal(list(partitions), after=after, limit=_PAGE)

        return await self._port.sql(page)

    # Unfinished erasures

    async def _erase(self, partitions: Sequence[int]) -> None:
        """Complete the erasures of these partitions that were already unfinished at the last look."""
        now = self._port.monotonic()
        if now < self._erase_at:
            return
        self._erase_at = now + _ERASE_SECONDS
        found = await self._port.sql(partial(self._tiers.cold.pending, partitions=partitions, limit=_PAGE))
        # Recent erasures are skipped: the replica that requested them is probably still working on them.
        left = [each for each in found if each in self._unfinished]
        self._unfinished = set(found)
        try:
            await lifecycle.finish(self._tiers, left)
        except Unavailable:
            raise
        except StateError as error:
            log.warning("%d records are not erased yet: %s; trying again", len(left), error)

    # Old events, and leases that ended by themselves

    async def _prune(self, partitions: Sequence[int]) -> bool:
        """Drop some events of each partition that are too old; returns whether there are more."""
        now = self._port.monotonic()
        if now < self._prune_at:
            return False
        age = self._tiers.settings.events_for
        keys = map(self._tiers.keys.partition, partitions)
        answers = await self._send([(PRUNE, [each.meta, each.events], [int(age * 1000), _PRUNED]) for each in keys])
        if any(int(answer[1]) == _PRUNED for answer in answers):
            return True
        await self._leases.tidy(partitions, max(10, _AT_ONCE // len(partitions)))
        # The next pruning after a hundredth of the events' maximum age is soon enough.
        self._prune_at = now + min(_PRUNE_SECONDS, age / 100)
        return False


def _later(each: Due, score: int | None) -> Call:
    """Set the time in ms of the next check (None: never), unless it was changed meanwhile."""
    keys = each.keys
    return DEFER, [keys.lifetimes], [keys.text, each.score, b"" if score is None else score]
