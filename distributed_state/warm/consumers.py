"""Events as they reach this replica. Law: the stream is the truth; what is published only saves the look.

A consumer has a position in each partition. What is published at the next offset is taken; on anything else - a gap, a
new connection, silence - the stream is read from the position on, and where it does not reach back that far, or belongs
to another life of Redis, the consumer gets one event that asks it to resync. Epochs count up, so where Redis holds none
the position says which was the last one: a life that began and ended unseen shows as well.

Of several servers one may be away: its partitions stay behind, and are looked at again; the others go on.

Design: section 12.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from distributed_state.errors import StateError
from distributed_state.port import Job, Port
from distributed_state.values.keys import Keys
from distributed_state.warm.consumer import Subscription
from distributed_state.warm.event_channels import EventChannels, Types, are_within, published, types_together
from distributed_state.warm.event_relay import BATCH, EventRelay, messages
from distributed_state.warm.heard_events import HeardEvents
from distributed_state.warm.positions import BEGINNING, Head, Position, count, parsed
from distributed_state.warm.stream import Stream
from distributed_state.warm.subscription import Link

log = logging.getLogger(__name__)
_CHECK = 3.0
_SHORTEST, _LONGEST = 0.05, 2.0  # seconds until what could not be read is tried again
_REPLACED = 5.0  # seconds: a server that answers under an older epoch for so long was not replaced
_AT_ONCE = 400


class Consumers:
    """All consumers of this replica, and the reader of the stream that they share."""

    def __init__(
        self,
        port: Port,
        stream: Stream,
        keys: Keys,
        link: Link,
        relay: EventRelay,
        epochs: Callable[[], Awaitable[dict[int, int]]],
    ) -> None:
        self._port = port
        self._stream = stream
        self._keys = keys
        self._channels = EventChannels(port, keys, link, lambda *heard: self._hear(*heard))
        self._relay = relay
        self._epochs = epochs  # how many each partition has had, as SQL knows
        self._mutex = port.mutex()
        self._subscriptions: list[Subscription] = []
        self._behind: set[int] = set()
        self._heard = HeardEvents()
        self._resyncs = self._replayed = 0  # of consumers that have left
        self.past: Counter[str] = Counter()  # of handlers that have left
        self._stirred = port.signal()
        self._older: dict[int, float] = {}  # partitions that showed an epoch that is over, and since when
        self._job: Job | None = None
        port.when_a_loop_ends(self._loop_ended)
        self.watching: list[Callable[[], None]] = []  # called now and then

    @property
    def waiting(self) -> int:
        """How many events arrived and were not delivered yet."""
        return sum(len(each) for each in list(self._subscriptions))

    @property
    def resyncs(self) -> int:
        """How often a consumer had to resync, those included that have left."""
        return self._resyncs + sum(each.resyncs for each in list(self._subscriptions))

    @property
    def replayed(self) -> int:
        """How many events were read from the stream because their publication was missed."""
        return self._replayed + sum(each.replayed for each in list(self._subscriptions))

    @property
    def reached(self) -> int:
        """How far the slowest consumer of all partitions is, as the sum of its offsets; 0 without one."""
        places = [each.delivered() for each in list(self._subscriptions)]
        sums = [sum(at.offset for at in place.values()) for place in places if len(place) == self._keys.partitions]
        return min(sums, default=0)

    async def positions(self, since: str | None, among: Iterable[int] | None = None) -> dict[int, Position]:
        """Where a consumer begins: now, at what is kept from before ("oldest"), or where another one was."""
        wanted = list(self._all() if among is None else among)
        if since is not None and since != "oldest":
            given = parsed(since, self._keys.partitions)
            return {at: given.get(at, BEGINNING) for at in wanted}
        partitions = [self._keys.partition(each) for each in wanted]
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
            # Chosen first: what this one asks for is heard of before it is told of any.
            self._channels.choose(types_together(each.types for each in [*self._subscriptions, subscription]))
            subscription.here = self._port.here()
            self._subscriptions.append(subscription)
            if self._job is None:
                self._job = self._port.spawn(self._follow, "distributed-state-events")
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
            self._channels.choose(types_together(each.types for each in self._subscriptions))

    def _loop_ended(self, loop: object) -> None:
        for each in [each for each in list(self._subscriptions) if each.here is loop]:
            self.leave(each)

    def stir(self, partitions: Iterable[int]) -> None:
        """Look into the stream for what these partitions hold."""
        with self._mutex:
            self._behind.update(partitions)
        self._stirred.set()

    def _hear(self, partition: int, payload: bytes, types: Types) -> None:
        if payload.startswith(BATCH):
            for at, message in messages(payload):
                self._take(at, message, types)
        elif payload:
            self._relay.noticed()
            self._take(partition, payload, types)
        else:
            # The channel is confirmed: what came before that may have been missed.
            self.stir([partition])

    def _take(self, partition: int, message: bytes, types: Types) -> None:
        epoch, stored, before = published(message)
        # One that has just joined may ask for more than the channel was of.
        taken = [
            each.hear(partition, epoch, stored, before if are_within(each.types, types) else stored.offset - 1)
            for each in list(self._subscriptions)
        ]
        if any(taken):
            self._heard.note(partition, epoch, [stored])
        if not all(taken):
            self.stir([partition])

    async def _follow(self) -> None:
        pause = _SHORTEST
        away = set[int]()  # what could not be looked at
        again = 0.0  # when that is looked at once more; the other partitions do not wait for it
        while True:
            # A lost tail shows no gap, so positions are compared every few seconds however quiet it is.
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
        """Take what the stream holds of these partitions; those that could not be looked at."""
        wanted = behind & set().union(*(each.taken() for each in list(self._subscriptions)))
        taken, heads = await self._places(wanted)
        await self._channels.settle(heads)
        if any(heads[each].lost(at[each]) for at in taken.values() for each in at.keys() & heads.keys()):
            # Whatever befell one partition befell others: one resync for all.
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
        """How far each consumer is, and the heads of these partitions."""
        # Positions first: a head that was read after them can be behind one only in a stream that lost its end.
        taken = {each: each.taken() for each in list(self._subscriptions)}
        types = self._channels.types
        heads = await self._heads(partitions)
        for subscription, places in taken.items() if types else ():
            for at in sorted(places.keys() & heads.keys()):
                # Also where the stream does not reach back that far: nothing of it was asked for.
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
        """Whether a server answered that was replaced: its epoch is over. Not if that lasts: SQL was emptied too."""
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
            heard = {each: self._heard.until(each, at, subscription.heard(each)) for each, (at, _) in gaps.items()}
            subscription.lose(gaps, "+".join(sorted(reasons)), heard)
            self.stir(gaps)

    async def _read(self, subscription: Subscription, partitions: list[int], heads: dict[int, Head]) -> set[int]:
        """Read on from where a consumer is; the partitions where that could not be done."""
        taken = subscription.taken()
        wanted = [at for at in partitions if at in taken and heads[at].epoch and taken[at] != Position(*heads[at][:2])]
        if not wanted:
            return set()
        room = min(_AT_ONCE, subscription.room)
        self.stir(wanted[room:] if room else ())
        del wanted[max(1, room) :]
        share = room // len(wanted)
        if not share:
            subscription.starved = True  # looked at again when it has made room
            return set()
        calls = [(self._keys.partition(at), taken[at].offset, share) for at in wanted]
        found = await self._stream.reachable_events(calls)
        for at, (before, after, stored) in found.items():
            position = taken[at]
            same = before.epoch == after.epoch and before.seen_from(position).leads_to(before.epoch)
            if not before.epoch or not same or after.floor > position.offset or before.offset < position.offset:
                self.stir([at])
                continue
            self._heard.note(at, before.epoch, stored)
            subscription.read(at, position, before, stored, len(stored) < share)
            if len(stored) == share:
                self.stir([at])
        return set(wanted) - found.keys()

    async def close(self) -> None:
        """Close all subscriptions and stop reading."""
        for each in list(self._subscriptions):
            each.close()
        await self._relay.close()
        if self._job is not None:
            await self._job.stop()
            self._job = None
