"""The consumers of events. Law: the stream is authoritative; publishing only saves reads of it.

A consumer has a position in each partition. An event that is published at the next offset is taken; after anything else
- a gap, a new connection, silence - the stream is read from the position on. If it no longer reaches back that far, or
has another data id, the consumer gets one event that asks it to resync. Epochs are numbered, so while Redis has no
epoch, the position keeps the number of the last one: an epoch that begins and ends unseen is noticed later.

One of several servers may be down: its partitions are read again later, while the others continue.

Design: section 12.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from math import inf
from types import MappingProxyType
from typing import Any, Protocol

from distributed_state.errors import InvalidValue, StateError
from distributed_state.port import Job, Mutex, Port
from distributed_state.results import Event
from distributed_state.values import codec
from distributed_state.values.codec import Codec
from distributed_state.values.keys import Keys
from distributed_state.values.model import unescape
from distributed_state.warm.event_channels import (
    EventChannels,
    Types,
    are_within,
    published,
    types_of,
    types_together,
)
from distributed_state.warm.link import Link
from distributed_state.warm.stream import BEGINNING, Head, Position, Stream, StreamEvent, count, parsed

log = logging.getLogger(__name__)
RESYNC = "resync"
_CHECK = 3.0
_SHORTEST, _LONGEST = 0.05, 2.0  # seconds until a failed read is tried again
_REPLACED = 5.0  # seconds: a server that answers under an older epoch for this long was not replaced
_AT_ONCE = 400
_KEPT = 256  # for each partition: more events than a promoted replica usually lacks
_ROOM = 2000
_ROOM_BYTES = 16 * 2**20
_LEAST = 16  # events that a consumer with an empty queue takes even if the buffer is full, to make progress
_EVENT = 600  # bytes that an event takes in addition to its text
_PATTERN = re.compile(r"[\w.*-]{1,200}", re.ASCII)


class Consumers:
    """All consumers of this replica, and the reader of the stream that they share."""

    def __init__(
        self,
        port: Port,
        stream: Stream,
        keys: Keys,
        link: Link,
        over: Callable[[], Awaitable[dict[int, Position]]],
    ) -> None:
        self._port = port
        self._stream = stream
        self._keys = keys
        self._channels = EventChannels(port, keys, link, lambda *message: self._receive(*message))
        self._over = over  # positions after the epochs that each partition has had, as SQL knows
        self._mutex = port.mutex()
        self._subscriptions: list[Subscription] = []
        self._behind: set[int] = set()
        self._recent = RecentEvents()
        self._resyncs = self._replayed = 0  # of consumers that have left
        self.past: Counter[str] = Counter()  # of handlers that have left
        self._stirred = port.signal()
        self._older: dict[int, float] = {}  # partitions that showed an epoch that has ended, and since when
        self._job: Job | None = None
        port.when_a_loop_ends(self._loop_ended)
        self.watching: list[Callable[[], None]] = []  # called from time to time

    @property
    def waiting(self) -> int:
        """How many events arrived and were not delivered yet."""
        return sum(len(each) for each in list(self._subscriptions))

    @property
    def resyncs(self) -> int:
        """The number of resyncs of consumers, including those that have left."""
        return self._resyncs + sum(each.resyncs for each in list(self._subscriptions))

    @property
    def replayed(self) -> int:
        """How many events were read from the stream because their publication was missed."""
        return self._replayed + sum(each.replayed for each in list(self._subscriptions))

    @property
    def reached(self) -> int:
        """The sum of the offsets of the slowest consumer of all partitions; 0 without one."""
        places = [each.delivered() for each in list(self._subscriptions)]
        sums = [sum(at.offset for at in place.values()) for place in places if len(place) == self._keys.partitions]
        return min(sums, default=0)

    async def positions(self, since: str | None, among: Iterable[int] | None = None) -> dict[int, Position]:
        """Return a consumer's first positions: now, the oldest kept event ("oldest"), or an earlier consumer's."""
        wanted = list(self._all() if among is None else among)
        if since is not None and since != "oldest":
            given = parsed(since, self._keys.partitions)
            return {at: given.get(at, BEGINNING) for at in wanted}
        partitions = [self._keys.partition(each) for each in wanted]
        heads = await self._stream.heads(partitions)
        over = dict[int, Position]()
        if not all(head.epoch for head in heads):
            # SQL is read before Redis: an epoch that SQL has and Redis does not show afterwards has ended.
            over = await self._over()
            heads = await self._stream.heads(partitions)
        return {
            at: Position(head.epoch, head.floor if since else head.offset)
            if head.epoch
            else over.get(at, Position.behind(0))
            for at, head in zip(wanted, heads, strict=True)
        }

    def _all(self) -> range:
        return range(self._keys.partitions)

    def check(self, since: str | None) -> None:
        """Raise InvalidValue unless a consumer may begin there."""
        if since is not None and since != "oldest":
            parsed(since, self._keys.partitions)

    def join(self, subscription: Subscription) -> None:
        """Deliver events to this consumer from now on."""
        with self._mutex:
            # Channels first: they are subscribed to before this consumer takes an event.
            self._channels.choose(types_together(each.types for each in [*self._subscriptions, subscription]))
            subscription.here = self._port.here()
            self._subscriptions.append(subscription)
            if self._job is None:
                self._job = self._port.spawn(self._follow, "distributed-state-events")
        self.stir(self._all())

    def leave(self, subscription: Subscription) -> None:
        """Forget a consumer; after the last one, its channels are left."""
        subscription.close()
        with self._mutex:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)
                self._resyncs += subscription.resyncs
                self._replayed += subscription.replayed
            # Still under the mutex: a consumer that joins meanwhile must not find channels that are about to be left.
            self._channels.choose(types_together(each.types for each in self._subscriptions))

    def _loop_ended(self, loop: object) -> None:
        for each in [each for each in list(self._subscriptions) if each.here is loop]:
            self.leave(each)

    def stir(self, partitions: Iterable[int]) -> None:
        """Read the stream of these partitions."""
        with self._mutex:
            self._behind.update(partitions)
        self._stirred.set()

    def _receive(self, partition: int, payload: bytes, types: Types) -> None:
        if payload:
            self._take(partition, payload, types)
        else:
            # The channel is confirmed: earlier events may have been missed.
            self.stir([partition])

    def _take(self, partition: int, message: bytes, types: Types) -> None:
        epoch, stored, before = published(message)
        # A new consumer may want more types than the channel has.
        taken = [
            each.receive(partition, epoch, stored, before if are_within(each.types, types) else stored.offset - 1)
            for each in list(self._subscriptions)
        ]
        if any(taken):
            self._recent.note(partition, epoch, [stored])
        if not all(taken):
            self.stir([partition])

    async def _follow(self) -> None:
        pause = _SHORTEST
        away = set[int]()  # partitions that could not be read
        again = 0.0  # when they are read again; the other partitions do not wait for it
        while True:
            # Missed events at the end leave no gap, so positions are compared every few seconds even without messages.
            if not await self._stirred.wait(max(0.0, again - self._port.monotonic()) if away else _CHECK):
                self.stir(self._all())
            self._stirred.clear()
            for look in list(self.watching):
                look()
            with self._mutex:
                behind = self._behind
                self._behind = set()
            if self._port.monotonic() >= again:
                behind |= away
            try:
                missed = await self._catch_up(behind)
            except StateError as error:
                log.warning("events: %s", error)
                missed = behind
            away = (away - behind) | missed
            if missed:
                again = self._port.monotonic() + pause
                log.warning("events of %d partitions cannot be read; trying again in %.2f s", len(missed), pause)
                pause = min(pause * 2, _LONGEST)
            elif not away:
                pause = _SHORTEST

    async def _catch_up(self, behind: set[int]) -> set[int]:
        """Take the events that the stream holds of these partitions; return the partitions that could not be read."""
        wanted = behind & set().union(*(each.taken() for each in list(self._subscriptions)))
        taken, heads = await self._places(wanted)
        await self._channels.register(heads)
        if any(heads[each].lost(at[each]) for at in taken.values() for each in at.keys() & heads.keys()):
            # A failure of one partition usually affects others: one resync serves all.
            wanted = set(self._all())
            taken, heads = await self._places(wanted)
        missed = wanted - heads.keys()
        for subscription, at in taken.items():
            self._tell_lost(subscription, {each: (at[each], heads[each]) for each in sorted(at.keys() & heads.keys())})
        for subscription, at in taken.items():
            sound = [each for each in sorted(at.keys() & heads.keys()) if not heads[each].lost(at[each])]
            missed |= await self._read(subscription, sound, heads)
        return missed

    async def _places(
        self, partitions: Iterable[int]
    ) -> tuple[dict[Subscription, dict[int, Position]], dict[int, Head]]:
        """Return how far each consumer is, and the heads of these partitions."""
        # Positions are read first: a head that is read later is lower only if the stream lost its end.
        taken = {each: each.taken() for each in list(self._subscriptions)}
        types = self._channels.types
        heads = await self._heads(partitions)
        for subscription, places in taken.items() if types else ():
            for at in sorted(places.keys() & heads.keys()):
                # Also if the stream does not reach back that far, because the missing events were not wanted.
                before, places[at] = places[at], heads[at].passed(places[at], types)
                subscription.pass_over(at, before, places[at])
        return taken, heads

    async def _heads(self, partitions: Iterable[int]) -> dict[int, Head]:
        heads = await self._stream.reachable_heads([self._keys.partition(each) for each in sorted(partitions)])
        places = [each.taken() for each in list(self._subscriptions)]
        return {
            at: head
            for at, head in heads.items()
            if not self._is_over(at, head, max((count(each[at].epoch) for each in places if at in each), default=0))
        }

    def _is_over(self, partition: int, head: Head, reached: int) -> bool:
        """Whether the answer came from a replaced server, whose epoch has ended.

        False if it lasts: then SQL was emptied.
        """
        if not head.epoch or count(head.epoch) >= reached:
            self._older.pop(partition, None)
            return False
        now = self._port.monotonic()
        return now - self._older.setdefault(partition, now) < _REPLACED

    def _tell_lost(self, subscription: Subscription, places: dict[int, tuple[Position, Head]]) -> None:
        gaps = {}
        reasons = set()
        for partition, (at, head) in places.items():
            reason = head.lost(at)
            if reason:
                gaps[partition] = at, head.next(at)
                reasons.add(reason)
        if gaps:
            log.warning("events of %d partitions were missed (%s)", len(gaps), ", ".join(sorted(reasons)))
            seen = {each: self._recent.until(each, at, subscription.seen(each)) for each, (at, _) in gaps.items()}
            subscription.lose(gaps, "+".join(sorted(reasons)), seen)
            self.stir(gaps)

    async def _read(self, subscription: Subscription, partitions: list[int], heads: dict[int, Head]) -> set[int]:
        """Read on from a consumer's positions; return the partitions that could not be read."""
        taken = subscription.taken()
        wanted = [at for at in partitions if at in taken and heads[at].epoch and taken[at] != Position(*heads[at][:2])]
        if not wanted:
            return set()
        room = min(_AT_ONCE, subscription.room)
        self.stir(wanted[room:] if room else ())
        del wanted[max(1, room) :]
        share = room // len(wanted)
        if not share:
            subscription.starved = True  # read again when the consumer has made room
            return set()
        calls = [(self._keys.partition(at), taken[at].offset, share) for at in wanted]
        found = await self._stream.reachable_events(calls)
        for at, (before, after, stored) in found.items():
            position = taken[at]
            same = before.epoch == after.epoch and before.seen_from(position).leads_to(before.epoch)
            if not before.epoch or not same or after.floor > position.offset or before.offset < position.offset:
                self.stir([at])
                continue
            self._recent.note(at, before.epoch, stored)
            subscription.read(at, position, before, stored, len(stored) < share)
            if len(stored) == share:
                self.stir([at])
        return set(wanted) - found.keys()

    async def close(self) -> None:
        """Close all subscriptions and stop reading."""
        for each in list(self._subscriptions):
            each.close()
        if self._job is not None:
            await self._job.stop()
            self._job = None


_Place = tuple[int, int]  # the ordinal of the epoch, the offset


class RecentEvents:
    """The last events of each partition that consumers of this replica took, by their ids.

    A server may publish an event and then lose it. Its writer got no answer and writes it again, with another offset.
    Also, if a consumer has lost its position, the stream is read from its beginning.
    """

    def __init__(self) -> None:
        self._mutex = Mutex()
        self._taken: dict[int, dict[bytes, _Place]] = {}  # by id
        self._newest: dict[int, tuple[str, int]] = {}

    def note(self, partition: int, epoch: str, events: Iterable[StreamEvent]) -> None:
        """Note events that were taken, in any order; events far below the newest are left out."""
        ordinal = count(epoch)
        with self._mutex:
            taken = self._taken.setdefault(partition, {})
            for each in events:
                former, newest = self._newest.get(partition, ("", 0))
                far = epoch == former and each.offset <= newest - _KEPT
                if each.head and not far and each.id not in taken:
                    taken[each.id] = (ordinal, each.offset)
                    self._newest[partition] = (epoch, max(newest, each.offset) if epoch == former else each.offset)
            while len(taken) > _KEPT:
                del taken[next(iter(taken))]

    def until(self, partition: int, at: Position, also: frozenset[bytes] = frozenset()) -> frozenset[bytes]:
        """Return the ids of those up to a position, and of those in `also`."""
        last = (count(at.epoch), inf if at.waits else at.offset)
        with self._mutex:
            taken = self._taken.get(partition, {})
            return frozenset(id for id, place in taken.items() if place <= last or id in also)


# One consumer


class Subscription:
    """One consumer: the events that it has taken and that were not delivered yet.

    Each offset is taken once, where it directly follows the consumer's position; anything else causes a read of the
    stream.
    """

    def __init__(self, port: Port, types: Iterable[str]) -> None:
        self.buffer: Buffer | None = None
        types = list(types)
        self.patterns = [pattern(each) for each in types]
        self.types = types_of(types)
        self.ready = port.signal()
        self.closed = False
        self.here: object = None  # its loop; when that ends, the subscription ends too
        self.starved = False
        self.resyncs = self.handed = self.replayed = 0
        self._mutex = port.mutex()
        self._taken: dict[int, Position] = {}
        self._waiting: deque[Waiting] = deque()
        self._bytes = 0
        self._seen: dict[int, frozenset[bytes]] = {}  # ids taken before a loss, which may come again

    def assign(self, positions: dict[int, Position]) -> None:
        """Take the events of these partitions from these positions on."""
        with self._mutex:
            self._taken.update(positions)

    def revoke(self, partitions: Iterable[int]) -> None:
        """Stop taking events of these partitions, and drop those that were not delivered."""
        gone = set(partitions)
        with self._mutex:
            for each in gone:
                self._taken.pop(each, None)
                self._seen.pop(each, None)
            self._waiting = deque(each for each in self._waiting if each.partition not in gone)
            self._bytes = sum(map(len, self._waiting))  # only used for a group, which has no buffer

    def taken(self) -> dict[int, Position]:
        """Return how far the reader is, by partition."""
        with self._mutex:
            return dict(self._taken)

    def delivered(self) -> dict[int, Position]:
        """Return how far the consumer is: after delivered events and those that it did not ask for."""
        with self._mutex:
            reached = dict(self._taken)
            for each in reversed(self._waiting):
                reached.update((at, position) for at, position in each.before.items() if at in reached)
            return reached

    def seen(self, partition: int) -> frozenset[bytes]:
        """Return the ids taken before a loss, after which the stream may have begun again."""
        # A server that lost events first shows a lower offset, and later a new epoch: that looks like a second loss.
        with self._mutex:
            return self._seen.get(partition, frozenset())

    def wants(self, type: bytes) -> bool:
        """Whether events of this type are asked for."""
        return any(each.fullmatch(type) for each in self.patterns)

    @property
    def room(self) -> int:
        """How many more events may wait here."""
        if self.buffer is not None and self.buffer.full:
            return 0 if self._waiting else _LEAST
        return max(0, _ROOM - len(self._waiting)) if self._bytes < _ROOM_BYTES else 0

    def __len__(self) -> int:
        return len(self._waiting)

    def receive(self, partition: int, epoch: str, stored: StreamEvent, before: int) -> bool:
        """Take an event that was published; False if the stream has to be read.

        `before`: the offset of the last earlier event of the channel's types.
        """
        with self._mutex:
            at = self._taken.get(partition)
            if at is None or self.closed:
                return True
            if at.epoch == epoch and stored.offset <= at.offset:
                return True
            if not stored.head or not at.leads_to(epoch) or at.offset < before or not self.room:
                return False
            if at.waits and at.known is not None:
                return False  # only the stream's head says whether the earlier epoch had more events
            self._take(partition, epoch, stored)
        self.ready.set()
        return True

    def pass_over(self, partition: int, before: Position, to: Position) -> None:
        """Continue from a position at a later one, because this consumer wants no event in between."""
        with self._mutex:
            if self._taken.get(partition) == before:
                self._taken[partition] = to

    def read(self, partition: int, before: Position, head: Head, stored: list[StreamEvent], whole: bool) -> None:
        """Take events that the stream has after a position. Has no effect if events were taken meanwhile."""
        with self._mutex:
            if self._taken.get(partition) != before:
                return
            waiting = len(self._waiting)
            for each in stored:
                self._take(partition, head.epoch, each)
            self.replayed += len(self._waiting) - waiting
            if whole:
                # Events that are missing at the end were removed from the stream.
                self._taken[partition] = Position(head.epoch, max(head.offset, self._taken[partition].offset))
        self.ready.set()

    def _take(self, partition: int, epoch: str, stored: StreamEvent) -> None:
        self._taken[partition] = position = Position(epoch, stored.offset)
        seen = self._seen.get(partition)
        if seen and stored.id in seen:
            return
        if self.wants(stored.head.split(b"\n", 2)[1]):
            before = {partition: Position(epoch, stored.offset - 1)}
            waiting = Waiting(partition, position, stored, before)
            self._waiting.append(waiting)
            self._bytes += len(waiting)
            if self.buffer is not None:
                self.buffer.count(len(waiting) + _EVENT)

    def lose(
        self,
        gaps: dict[int, tuple[Position, Position]],
        reason: str,
        seen: Mapping[int, frozenset[bytes]] = MappingProxyType({}),
    ) -> None:
        """Continue after gaps, each from one position to another, with one event that asks for a resync.

        Events whose ids are in `seen` are not delivered again.
        """
        with self._mutex:
            real = {at: gap for at, gap in gaps.items() if self._taken.get(at) == gap[0]}
            if not real:
                return
            self._taken.update({partition: to for partition, (_, to) in real.items()})
            self._seen.update({partition: ids for partition, ids in seen.items() if partition in real})
            self.resyncs += 1
            data = {"reason": reason, "partitions": sorted(real)}
            before = {at: gap[0] for at, gap in real.items()}
            self._waiting.append(Waiting(-1, BEGINNING, None, before, data))
        self.ready.set()

    def pop(self) -> Waiting | None:
        """Return the next event; None: wait until `ready`."""
        with self._mutex:
            if self._waiting:
                self.handed += 1
                waiting = self._waiting.popleft()
                self._bytes -= len(waiting)
                if self.buffer is not None and waiting.stored is not None:
                    self.buffer.count(-len(waiting) - _EVENT)
                return waiting
            if not self.closed:
                self.ready.clear()
            return None

    def made_room(self) -> bool:
        """Whether the stream should be read again, because a full queue is half empty now."""
        if self.starved and (not self._waiting or (self.room >= _ROOM // 2 and self._bytes < _ROOM_BYTES // 2)):
            self.starved = False
            return True
        return False

    def close(self) -> None:
        """Stop taking events, and wake the consumer."""
        self.closed = True
        self.ready.set()


@dataclass(frozen=True, slots=True)
class Waiting:
    """An event that was taken and not delivered yet; a resync holds its data.

    `before`: the positions from which to continue if the event is not handled.
    """

    partition: int
    position: Position
    stored: StreamEvent | None
    before: dict[int, Position]
    resync: dict[str, Any] | None = None

    def __len__(self) -> int:
        return 0 if self.stored is None else len(self.stored.head) + len(self.stored.data)

    def event(self, codec_of: Callable[[str], Codec]) -> Event:
        """Return the event. Raises CorruptState if its data cannot be read, DecryptionFailed without the key."""
        if self.stored is None:
            return Event("", RESYNC, "", 0.0, self.resync or {}, "", 0, "", -1, 0, "")
        id, type, subject, time, version, actor = self.stored.head.decode().split("\n")
        seconds, micros = time.split()
        data = codec_of(subject).open_event(self.stored.data, type, id)
        return Event(
            id=id, type=type, subject=subject, time=(int(seconds) * 1000 + int(micros) // 1000) / 1000,
            data=codec.decode(data, "data"), source=id.partition(".")[0], sequence=self.stored.offset,
            epoch=self.position.epoch, partition=self.partition, version=int(version), actor=unescape(actor),
        )  # fmt: skip


class Buffer(Protocol):
    """Counts the bytes of the events that wait for several consumers together."""

    def count(self, size: int) -> None:
        """Count bytes that were added or removed."""
        ...

    @property
    def full(self) -> bool:
        """Whether waiting events should be delivered before another one is taken."""
        ...


def pattern(text: str) -> re.Pattern[bytes]:
    """Return the pattern for a type: `*` stands for any characters. Raises InvalidValue."""
    if not isinstance(text, str) or not _PATTERN.fullmatch(text):
        raise InvalidValue(f"events are named as 'conversation.deleted', 'conversation.*' or '*', not {text!r:.80}")
    return _compiled(text)


@lru_cache(maxsize=1024)
def _compiled(text: str) -> re.Pattern[bytes]:
    # Not a plain ".*" for each: with many of them, backtracking would make a mismatch take very long.
    return re.compile(translate(text).encode())
