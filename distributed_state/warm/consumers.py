"""Events as they reach this replica. Law: the stream is the truth; what is heard only saves the look.

A consumer has a position in each partition. What is heard at the next offset is taken; on anything else - a gap, a new
connection, silence - the stream is read from the position on, and where it does not reach back that far, or belongs to
another life of Redis, the consumer is told once to resync. Epochs count up, so where Redis holds none the position says
which was the last one: a life that began and ended unseen shows as well.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from typing import Any

from distributed_state.errors import InvalidValue, StateError
from distributed_state.port import Job, Port
from distributed_state.values import codec
from distributed_state.values.codec import Codec
from distributed_state.values.keys import Keys
from distributed_state.values.model import unescape
from distributed_state.values.results import Event
from distributed_state.warm.stream import BEGINNING, Head, Position, Stream, StreamEvent, count
from distributed_state.warm.subscription import Link

log = logging.getLogger(__name__)
RESYNC = "resync"
_CHECK = 3.0
_ROOM = 2000
_ROOM_BYTES = 16 * 2**20
_AT_ONCE = 400
_HEAD = 6  # lines, as in commit.lua; then comes the data, which may be any bytes
_PATTERN = re.compile(r"[\w.*-]{1,200}", re.ASCII)
_TOKEN = re.compile(r"(\d{1,4})=([\w-]{1,80})@(\d{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Waiting:
    """An event that was taken and not handed over yet; a resync holds what it says.

    `before`: where whoever did not handle it begins again.
    """

    partition: int
    position: Position
    told: StreamEvent | None
    before: dict[int, Position]
    resync: dict[str, Any] | None = None

    def __len__(self) -> int:
        return 0 if self.told is None else len(self.told.head) + len(self.told.data)

    def event(self, codec_of: Callable[[str], Codec]) -> Event:
        """The event. Raises CorruptState if what it tells cannot be read, DecryptionFailed without the key."""
        if self.told is None:
            return Event("", RESYNC, "", 0.0, self.resync or {}, "", 0, "", -1, 0, "")
        id, type, subject, time, version, actor = self.told.head.decode().split("\n")
        seconds, micros = time.split()
        data = codec_of(subject).open_event(self.told.data, type, id)
        return Event(
            id=id, type=type, subject=subject, time=(int(seconds) * 1000 + int(micros) // 1000) / 1000,
            data=codec.decode(data, "data"), source=id.partition(".")[0], sequence=self.told.offset,
            epoch=self.position.epoch, partition=self.partition, version=int(version), actor=unescape(actor),
        )  # fmt: skip


def pattern(text: str) -> re.Pattern[bytes]:
    """What a type has to be: `*` stands for any characters. Raises InvalidValue."""
    if not isinstance(text, str) or not _PATTERN.fullmatch(text):
        raise InvalidValue(f"events are named as 'conversation.deleted', 'conversation.*' or '*', not {text!r:.80}")
    return _compiled(text)


@lru_cache(maxsize=1024)
def _compiled(text: str) -> re.Pattern[bytes]:
    # Not a plain ".*" for each: many of them would take for ever to say no.
    return re.compile(translate(text).encode())


class Subscription:
    """One consumer: what it has taken and not been given yet. The link, the feed and the consumer meet here."""

    def __init__(self, port: Port, types: Iterable[str]) -> None:
        self.patterns = [pattern(each) for each in types]
        self.ready = port.signal()
        self.closed = False
        self.starved = False
        self.resyncs = self.handed = self.replayed = 0
        self._mutex = port.mutex()
        self._taken: dict[int, Position] = {}
        self._waiting: deque[Waiting] = deque()
        self._bytes = 0

    def assign(self, positions: dict[int, Position]) -> None:
        """Take the events of these partitions, from there on."""
        with self._mutex:
            self._taken.update(positions)

    def revoke(self, partitions: Iterable[int]) -> None:
        """Take no more of these, and hand over nothing that was taken."""
        gone = set(partitions)
        with self._mutex:
            for each in gone:
                self._taken.pop(each, None)
            self._waiting = deque(each for each in self._waiting if each.partition not in gone)
            self._bytes = sum(map(len, self._waiting))

    def taken(self) -> dict[int, Position]:
        with self._mutex:
            return dict(self._taken)

    def delivered(self) -> dict[int, Position]:
        """How far the consumer is: what was handed over, and what it did not ask for."""
        with self._mutex:
            reached = dict(self._taken)
            for each in reversed(self._waiting):
                reached.update((at, position) for at, position in each.before.items() if at in reached)
            return reached

    def wants(self, type: bytes) -> bool:
        return any(each.fullmatch(type) for each in self.patterns)

    @property
    def room(self) -> int:
        return max(0, _ROOM - len(self._waiting)) if self._bytes < _ROOM_BYTES else 0

    def __len__(self) -> int:
        return len(self._waiting)

    def hear(self, partition: int, epoch: str, told: StreamEvent) -> bool:
        """Take an event that was published; False if the stream has to be looked at."""
        with self._mutex:
            at = self._taken.get(partition)
            if at is None or self.closed:
                return True
            if at.epoch == epoch and told.offset <= at.offset:
                return True
            if not told.head or not at.leads_to(epoch) or told.offset != at.offset + 1 or not self.room:
                return False
            self._take(partition, epoch, told)
        self.ready.set()
        return True

    def read(self, partition: int, before: Position, head: Head, told: list[StreamEvent], whole: bool) -> None:
        """Take what the stream holds behind a position. Nothing, if something was taken meanwhile."""
        with self._mutex:
            if self._taken.get(partition) != before:
                return
            waiting = len(self._waiting)
            for each in told:
                self._take(partition, head.epoch, each)
            self.replayed += len(self._waiting) - waiting
            if whole:
                # What is missing at the end was taken out of the stream.
                self._taken[partition] = Position(head.epoch, max(head.offset, self._taken[partition].offset))
        self.ready.set()

    def _take(self, partition: int, epoch: str, told: StreamEvent) -> None:
        self._taken[partition] = position = Position(epoch, told.offset)
        if self.wants(told.head.split(b"\n", 2)[1]):
            before = {partition: Position(epoch, told.offset - 1)}
            self._waiting.append(Waiting(partition, position, told, before))
            self._bytes += len(self._waiting[-1])

    def lose(self, gaps: dict[int, tuple[Position, Position]], reason: str) -> None:
        """Go on behind gaps, from one position to another each, and be told once to resync."""
        with self._mutex:
            real = {at: gap for at, gap in gaps.items() if self._taken.get(at) == gap[0]}
            if not real:
                return
            self._taken.update({partition: to for partition, (_, to) in real.items()})
            self.resyncs += 1
            data = {"reason": reason, "partitions": sorted(real)}
            before = {at: gap[0] for at, gap in real.items()}
            self._waiting.append(Waiting(-1, BEGINNING, None, before, data))
        self.ready.set()

    def pop(self) -> Waiting | None:
        """The next event; None: wait until `ready`."""
        with self._mutex:
            if self._waiting:
                self.handed += 1
                self._bytes -= len(self._waiting[0])
                return self._waiting.popleft()
            if not self.closed:
                self.ready.clear()
            return None

    def made_room(self) -> bool:
        """Whether the stream should be looked at again, because a full queue is half empty now."""
        if self.starved and self.room >= _ROOM // 2 and self._bytes < _ROOM_BYTES // 2:
            self.starved = False
            return True
        return False

    def close(self) -> None:
        self.closed = True
        self.ready.set()


class Consumers:
    """All consumers of this replica, and the reader of the stream that they share."""

    def __init__(
        self, port: Port, stream: Stream, keys: Keys, link: Link, epochs: Callable[[], Awaitable[dict[int, int]]]
    ) -> None:
        self._port = port
        self._stream = stream
        self._keys = keys
        self._link = link
        self._epochs = epochs  # how many each partition has had, as SQL knows
        self._mutex = port.mutex()
        self._subscriptions: list[Subscription] = []
        self._behind: set[int] = set()
        self._resyncs = self._replayed = 0  # of consumers that have left
        self.past: Counter[str] = Counter()  # of handlers that have left
        self._stirred = port.signal()
        self._job: Job | None = None
        self.watching: list[Callable[[], None]] = []  # called now and then

    @property
    def waiting(self) -> int:
        """How many events arrived and were not handed over yet."""
        return sum(len(each) for each in list(self._subscriptions))

    @property
    def resyncs(self) -> int:
        """How often a consumer was told to resync, those included that have left."""
        return self._resyncs + sum(each.resyncs for each in list(self._subscriptions))

    @property
    def replayed(self) -> int:
        """How many events were read from the stream and not heard as they were written."""
        return self._replayed + sum(each.replayed for each in list(self._subscriptions))

    @property
    def reached(self) -> int:
        """How far the slowest consumer of all partitions is, as the sum of its offsets; 0 without one."""
        places = [each.delivered() for each in list(self._subscriptions)]
        sums = [sum(at.offset for at in place.values()) for place in places if len(place) == self._keys.partitions]
        return min(sums, default=0)

    async def positions(self, since: str | None) -> dict[int, Position]:
        """Where a consumer begins: now, at what is kept from before ("oldest"), or where another one was."""
        if since is not None and since != "oldest":
            return dict.fromkeys(self._all(), BEGINNING) | self._parsed(since)
        partitions = [self._keys.partition(each) for each in self._all()]
        heads = await self._stream.heads(partitions)
        over = dict[int, int]()
        if not all(head.epoch for head in heads):
            # SQL first, then Redis: an epoch that SQL knew, and Redis does not hold then, is over.
            over = await self._epochs()
            heads = await self._stream.heads(partitions)
        return {
            at: Position(head.epoch, head.floor if since else head.offset)
            if head.epoch
            else Position.behind(over.get(at, 0))
            for at, head in enumerate(heads)
        }

    def _all(self) -> range:
        return range(self._keys.partitions)

    def check(self, since: str | None) -> None:
        """Raise InvalidValue unless a consumer may begin there."""
        if since is not None and since != "oldest":
            self._parsed(since)

    def _parsed(self, since: str) -> dict[int, Position]:
        found = {}
        for part in since.split(",") if isinstance(since, str) else [""]:
            match = _TOKEN.fullmatch(part)
            if match is None or int(match[1]) >= self._keys.partitions:
                raise InvalidValue(
                    f"since is a position of this namespace's events, 'oldest' or None, not {since!r:.80}"
                )
            found[int(match[1])] = Position(match[2], int(match[3]))
        return found

    @staticmethod
    def shown(positions: dict[int, Position]) -> str:
        """Positions as `since=` takes them; "oldest" if there is none."""
        parts = [f"{each}={at.epoch}@{at.offset}" for each, at in sorted(positions.items()) if at.epoch]
        return ",".join(parts) or "oldest"

    def join(self, subscription: Subscription) -> None:
        """Hand events to this consumer from now on."""
        with self._mutex:
            self._subscriptions.append(subscription)
            if self._job is None:
                self._job = self._port.spawn(self._follow, "distributed-state-events")
            for partition in self._all():
                self._watch(partition)
        self.stir(self._all())

    def leave(self, subscription: Subscription) -> None:
        """Forget a consumer; the last one's channels are left."""
        subscription.close()
        with self._mutex:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)
                self._resyncs += subscription.resyncs
                self._replayed += subscription.replayed
            # Still under the mutex: whoever joins meanwhile must not find channels that are about to be left.
            for partition in self._all() if not self._subscriptions else ():
                self._link.leave(self._keys.partition(partition).events_channel)

    def stir(self, partitions: Iterable[int]) -> None:
        """Look into the stream for what these partitions hold."""
        with self._mutex:
            self._behind.update(partitions)
        self._stirred.set()

    def _watch(self, partition: int) -> None:
        channel = self._keys.partition(partition).events_channel
        self._link.watch(channel, lambda payload: self._hear(partition, payload))

    def _hear(self, partition: int, payload: bytes) -> None:
        # An empty payload says that the channel is confirmed: what came before it may have been missed.
        missed = True
        if payload:
            place, _, entry = payload.partition(b"\n")
            epoch, _, offset = place.decode().partition(" ")
            *head, data = entry.split(b"\n", _HEAD) if entry else (b"",)
            told = StreamEvent(int(offset), b"\n".join(head), data)
            taken = [each.hear(partition, epoch, told) for each in list(self._subscriptions)]
            missed = not all(taken)
        if missed:
            self.stir([partition])

    async def _follow(self) -> None:
        pause = 0.05
        while True:
            # A lost tail shows no gap, so positions are compared every few seconds however quiet it is.
            if not await self._stirred.wait(_CHECK):
                self.stir(self._all())
            self._stirred.clear()
            for look in list(self.watching):
                look()
            with self._mutex:
                behind = self._behind
                self._behind = set()
            try:
                await self._catch_up(behind)
                pause = 0.05
            except StateError as error:
                log.warning("events: %s; trying again in %.2f s", error, pause)
                self.stir(behind)
                await self._port.sleep(pause)
                pause = min(pause * 2, 2.0)

    async def _catch_up(self, behind: set[int]) -> None:
        # Positions first: a head that was read after them can be behind one only in a stream that lost its end.
        taken = {each: each.taken() for each in list(self._subscriptions)}
        heads = await self._heads(behind & set().union(*taken.values()))
        if any(self._lost(at[each], heads[each]) for at in taken.values() for each in at.keys() & heads.keys()):
            # Whatever befell one partition befell others: told once for all.
            taken = {each: each.taken() for each in taken}
            heads = await self._heads(self._all())
        for subscription, at in taken.items():
            self._tell_lost(subscription, {each: (at[each], heads[each]) for each in at.keys() & heads.keys()})
        for subscription, at in taken.items():
            sound = [each for each in sorted(at.keys() & heads.keys()) if not self._lost(at[each], heads[each])]
            await self._read(subscription, sound, heads)

    async def _heads(self, partitions: Iterable[int]) -> dict[int, Head]:
        wanted = sorted(partitions)
        heads = await self._stream.heads([self._keys.partition(each) for each in wanted])
        return dict(zip(wanted, heads, strict=True))

    @staticmethod
    def _lost(at: Position, head: Head) -> str:
        """Why the stream does not go on where the consumer is; "" if it does."""
        if at.waits and not head.epoch:
            return ""
        if not at.leads_to(head.epoch):
            return "epoch"
        return "trimmed" if at.offset < head.floor else "rewound" if at.offset > head.offset else ""

    def _tell_lost(self, subscription: Subscription, places: dict[int, tuple[Position, Head]]) -> None:
        gaps = {}
        reasons = set()
        for partition, (at, head) in places.items():
            reason = self._lost(at, head)
            if reason:
                offset = head.offset if reason == "rewound" else head.floor
                gaps[partition] = at, (Position(head.epoch, offset) if head.epoch else Position.behind(count(at.epoch)))
                reasons.add(reason)
        if gaps:
            log.warning("events of %d partitions were missed (%s)", len(gaps), ", ".join(sorted(reasons)))
            subscription.lose(gaps, "+".join(sorted(reasons)))
            self.stir(gaps)

    async def _read(self, subscription: Subscription, partitions: list[int], heads: dict[int, Head]) -> None:
        taken = subscription.taken()
        wanted = [at for at in partitions if at in taken and heads[at].epoch and taken[at] != Position(*heads[at][:2])]
        if not wanted:
            return
        del wanted[_AT_ONCE:]
        share = min(_AT_ONCE, subscription.room) // len(wanted)
        if not share:
            subscription.starved = True  # looked at again when it has made room
            return
        calls = [(self._keys.partition(at), taken[at].offset, share) for at in wanted]
        for at, (before, after, told) in zip(wanted, await self._stream.events(calls), strict=True):
            position = taken[at]
            same = before.epoch == after.epoch and position.leads_to(before.epoch)
            if not before.epoch or not same or after.floor > position.offset or before.offset < position.offset:
                self.stir([at])
                continue
            subscription.read(at, position, before, told, len(told) < share)
            if len(told) == share:
                self.stir([at])

    async def close(self) -> None:
        for each in list(self._subscriptions):
            each.close()
        if self._job is not None:
            await self._job.stop()
            self._job = None
