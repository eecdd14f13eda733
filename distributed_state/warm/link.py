"""The links of this replica: its subscriptions, each at the node that has the partition.

Law: silence is never taken for calm; only an echo of our own proves a node's link. Every so often each node is asked to
run a script that writes, and publishes when it was asked. While the newest echo is at most `max_staleness` old, all
that was published before it has arrived, because one connection keeps its order. Any other answer is silence: of a node
that lost its slots, that is a replica now, that is cut off from its cluster. Where hot keeps nothing of what the node
has, the link is idle: it is probed once a round, and at once when something is to be kept. Each node at which we
subscribe has a link of its own: one that falls silent ends only what hot answers of the partitions there.

A subscription ends together with what was read under it: when the connection is lost; when its slot moves, upon which
the server ends the subscriptions of that slot and says so; when Redis begins another life.

A write names our own channel of its partition if we subscribed to the record's too, so that the script can see whether
anybody else did. While that name has a subscriber, the same connection receives the record. So it lies in the same
slot: when that moves, the server ends both; a name in another slot would stay and hide that nobody else was notified.
And a name is used once: it changes at each subscription, as the server may keep an earlier one for long after we lost
it, and when a channel that was named with it is left.

Design: sections 7, 20.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import Job, Port, Wire
from distributed_state.values.keys import Keys
from distributed_state.values.levels import Freshness
from distributed_state.warm.clock import ROUND_SECONDS, Rounds
from distributed_state.warm.scripts import PROBE

log = logging.getLogger(__name__)
Handler = Callable[[bytes, bytes], None]  # the channel, and what was published there
_SILENCE = 5.0  # seconds
_ROUND = 1.5  # seconds, which one round of the probe counts at most
SUBSCRIBE = b"SSUBSCRIBE"
UNSUBSCRIBE = b"SUNSUBSCRIBE"


class Link:
    """Channels with a handler each, kept through reconnections, and while partitions move from node to node.

    Handlers are plain and quick; they run on the reader, and are called with the channel and what was published there.
    An empty payload says that the channel is confirmed. One handler serves many channels: a function made for each
    would be four objects more a record for the garbage collector.
    """

    def __init__(
        self,
        port: Port,
        keys: Keys,
        replica: str,
        *,
        max_staleness: float,
        rounds: Rounds,
        lost: Callable[[list[Freshness]], None],
        epoch_received: Callable[[int, str], None],
        time_received: Callable[[str, Any, float], None],
    ) -> None:
        self._port = port
        self._keys = keys
        self._replica = replica
        self._max_staleness = max_staleness
        self._rounds = rounds
        self._mutex = port.mutex()
        self._partitions: dict[int, PartitionSubscription] = {}
        self._nodes: dict[str, NodeLink] = {}
        self._ending: list[NodeLink] = []
        self._ended_breaks = 0
        self._closed = False
        self._subscriptions = Subscriptions(self._mutex, self._find, lost, self.relocate, epoch_received, time_received)
        self._handlers = self._subscriptions.handlers
        self._confirmed = self._subscriptions.confirmed

    @property
    def up(self) -> bool:
        """Whether the link to every node that we need stands."""
        nodes = list(self._nodes.values())
        return bool(nodes) and all(each.up for each in nodes)

    @property
    def breaks(self) -> int:
        """How often a connection was lost."""
        return self._ended_breaks + sum(each.breaks for each in list(self._nodes.values()))

    @property
    def silence(self) -> float | None:
        """For how many seconds the quietest link has proved nothing; None if nobody has needed one yet."""
        return max((each.silence for each in list(self._nodes.values())), default=None)

    @property
    def figures(self) -> dict[str, int]:
        """Whether it stands and, once somebody needed it, for how many milliseconds it has proved nothing."""
        silence = self.silence
        return {"link_up": int(self.up)} | ({} if silence is None else {"link_silence_ms": int(silence * 1000)})

    def confirmed(self, channel: bytes) -> bool:
        """Whether everything published on the channel from now on arrives here."""
        return channel in self._confirmed

    def freshness(self, channel: bytes) -> Freshness | None:
        """What is to be kept with a record that is read from now on; None: it must not be kept."""
        subscription = self._confirmed.get(channel)
        return None if subscription is None else subscription.freshness

    def subscribed_as(self, channel: bytes) -> bytes:
        """Our own channel if we subscribed to this one, else b"". On the server both end together."""
        subscription = self._confirmed.get(channel)
        if subscription is None:
            return b""
        own = subscription.own
        subscription.named.add(channel)
        # Looked at again: `leave` may have looked for the name just before it was noted.
        return own if channel in self._confirmed else b""

    def watch(self, channel: bytes, handler: Handler) -> None:
        """Ask for a channel. Does not wait."""
        with self._mutex:
            self._watch(channel, handler)

    def _watch(self, channel: bytes, handler: Handler) -> None:
        if channel not in self._handlers and not self._closed:
            self._handlers[channel] = handler
            subscription = self._partition(self._keys.partition_at(channel))
            subscription.channels[channel] = None
            if subscription.node is not None:
                self._nodes[subscription.node].watch(subscription, channel)
            else:
                self._subscribe_where_it_is(subscription)

    def listen(self, channel: bytes, handler: Handler) -> None:
        """Ask for a channel of which nothing is kept in hot: for it alone the link is proved more rarely."""
        with self._mutex:
            if channel not in self._handlers and not self._closed:
                self._subscriptions.unkept.add(channel)
                self._watch(channel, handler)

    def leave(self, channel: bytes) -> None:
        """Unsubscribe from a channel."""
        with self._mutex:
            if self._handlers.pop(channel, None) is None:
                return
            self._confirmed.pop(channel, None)
            self._subscriptions.unkept.discard(channel)
            subscription = self._partition(self._keys.partition_at(channel))
            subscription.channels.pop(channel, None)
            if subscription.node is not None:
                self._nodes[subscription.node].channels.leave(subscription, channel)

    def renew(self, partition: int) -> None:
        """This partition began another life: what was read of all that its node has is over."""
        subscription = self._partitions.get(partition)
        # It has just answered, so where it is is known.
        node = (subscription and subscription.node) or self._port.node_of(self._keys.partition(partition).meta)
        link = self._nodes.get(node)
        if link is not None:
            self._subscriptions.lost(link.renew())

    async def relocate(self) -> None:
        """Subscribe to each partition at the node that has it now."""
        await self._port.relocate()
        gone: list[Freshness] = []
        with self._mutex:
            for subscription in self._partitions.values() if not self._closed else ():
                gone += self._subscribe_where_it_is(subscription)
            for link in [each for each in self._nodes.values() if not each.channels.partitions]:
                del self._nodes[link.node]
                self._ended_breaks += link.breaks
                self._ending = [each for each in [*self._ending, link] if each.running]
                link.end()
        if gone:
            self._subscriptions.lost(gone)

    def _find(self, channel: bytes) -> PartitionSubscription | None:
        return self._partitions.get(self._keys.partition_at(channel))

    def _partition(self, partition: int) -> PartitionSubscription:
        subscription = self._partitions.get(partition)
        if subscription is None:
            keys = self._keys
            meta = keys.partition(partition).meta
            subscription = PartitionSubscription(
                partition, keys.slot(partition), meta, keys.link(partition, self._replica)
            )
            self._partitions[partition] = subscription
        return subscription

    def _subscribe_where_it_is(self, subscription: PartitionSubscription) -> list[Freshness]:
        """Subscribe to a partition at the node that has it now; what ends with that.

        A partition without a node stays as it is: reads of it fail, and it is subscribed to once a node has it.
        """
        try:
            node = self._port.node_of(subscription.meta)
        except WarmUnavailable:
            return []
        gone = []
        if subscription.node != node:
            if subscription.node is not None:
                gone.append(self._nodes[subscription.node].channels.remove(subscription))
            self._subscribe_at(subscription, node)
        return gone

    def _subscribe_at(self, subscription: PartitionSubscription, node: str) -> None:
        link = self._nodes.get(node)
        if link is None:
            link = NodeLink(
                self._port, node, self._subscriptions, max_staleness=self._max_staleness, rounds=self._rounds
            )
            self._nodes[node] = link
            link.begin()
        subscription.node = node
        link.channels.add(subscription)

    async def close(self) -> None:
        """End the links."""
        with self._mutex:
            self._closed = True
            links = [*self._nodes.values(), *self._ending]
            self._nodes = {}
            self._handlers.clear()
        for link in links:
            await link.close()


# One node


class NodeLink:
    """One connection after another to one node, while we subscribe to partitions there."""

    def __init__(
        self, port: Port, node: str, subscriptions: Subscriptions, *, max_staleness: float, rounds: Rounds
    ) -> None:
        self.node = node
        self.channels = NodeChannels(subscriptions)
        self.up = self.over = False
        self.breaks = 0
        self.running = 2  # jobs
        self._port = port
        self._subscriptions = subscriptions
        self._rounds = rounds
        self._max_staleness = max_staleness
        self._every = min(max(max_staleness / 4, 0.02), 1.0)
        self._echo = 0.0
        self._since = self._round = port.monotonic()
        self._quiet = 0.0  # seconds without an echo, as far as we were awake to receive one
        self._idle = False  # whether nobody waits for the next proof
        self._wanted = port.signal()
        self._jobs = list[Job]()

    def begin(self) -> None:
        """Connect, and stay connected."""
        self._jobs = [
            self._port.spawn(self._read, "distributed-state-link"),
            self._port.spawn(self._probe, "distributed-state-probe"),
        ]

    @property
    def silence(self) -> float:
        """For how many seconds it has proved nothing."""
        return self._port.monotonic() - max(self._echo, self._since)

    def renew(self) -> list[Freshness]:
        """Another life of Redis was met: what was read until now is over, the subscriptions are not."""
        with self._subscriptions.mutex:
            return [subscription.renew() for subscription in self.channels.partitions.values()]

    def watch(self, subscription: PartitionSubscription, channel: bytes) -> None:
        """Subscribe to a channel of one of the partitions here."""
        self.channels.watch(subscription, channel)
        if self._idle and channel not in self._subscriptions.unkept:
            self._wanted.set()

    # The reader

    async def _read(self) -> None:
        pause = 0.05
        try:
            while not self.over:
                wire = None
                try:
                    wire = await self._port.wire(self.node)
                    with self._subscriptions.mutex:
                        self._since = self._port.monotonic()
                        self._quiet = 0.0
                        self.channels.connected(wire)
                    while True:
                        if self._take(await wire.receive()):
                            await self._relocate()
                        pause = 0.05
                except StateError as error:
                    if not self.over:
                        log.warning("link: %s; trying again in %.2f s", error, pause)
                finally:
                    self._down(wire)
                if not self.over:
                    await self._relocate()
                    await self._port.sleep(pause)
                    pause = min(pause * 2, 2.0)
        finally:
            self.running -= 1

    def _down(self, wire: Wire | None) -> None:
        with self._subscriptions.mutex:
            self.breaks += self.up
            self.up = False
            gone = self.channels.down()
        self._subscriptions.lost(gone)
        if wire is not None:
            wire.close()

    def _take(self, message: list[bytes]) -> bool:
        """Take a message; whether a partition is to be looked for elsewhere."""
        kind, channel, payload = [*message, b"", b"", b""][:3]
        if kind == b"smessage":
            self._message(channel, payload)
        elif kind == b"ssubscribe":
            self._confirmed(channel)
        elif kind == b"sunsubscribe":
            return self._gone(self.channels.ended, channel, "its slot has moved")
        elif kind == b"error":
            return self._gone(self.channels.refused, channel, channel.decode(errors="replace"))
        return False

    def _message(self, channel: bytes, payload: bytes) -> None:
        prober = self.channels.prober
        if prober is not None and channel == prober.echoes:
            self._echoed(prober, payload)
            return
        handler = self._subscriptions.handlers.get(channel)
        if handler is not None:
            try:
                handler(channel, payload)
            except (StateError, ValueError) as error:
                log.error("link: a message on %r cannot be read: %s", channel, error)

    def _echoed(self, prober: PartitionSubscription, payload: bytes) -> None:
        epoch, _, sent = payload.decode().rpartition(" ")
        self._echo = float(sent)
        self._quiet = 0.0
        self._subscriptions.epoch_received(prober.partition, epoch)
        with self._subscriptions.mutex:
            for subscription in self.channels.partitions.values():
                if subscription.asked:
                    subscription.freshness.prove(self._echo + self._max_staleness)
            if not epoch and self.channels.prober is prober:
                # One that holds nothing cannot show that it was emptied: another one may.
                self.channels.probe_another()

    def _confirmed(self, channel: bytes) -> None:
        self.up = True
        with self._subscriptions.mutex:
            handler = self._subscriptions.handlers.get(channel) if self.channels.confirmed(channel) else None
            subscription = self._subscriptions.find(channel)
            if handler is not None and subscription is not None and self._echo >= self._since:
                # What is read from now on was true when the node last proved itself, on this very connection.
                subscription.freshness.prove(self._echo + self._max_staleness)
        if handler is not None:
            handler(channel, b"")

    def _gone(self, take: Callable[[bytes], PartitionSubscription | None], answer: bytes, why: str) -> bool:
        """Take the end of a subscription, or an error; whether a partition has left this node."""
        with self._subscriptions.mutex:
            subscription = take(answer)
            if subscription is None:
                return False
            gone = self.channels.end(subscription)
        log.info("link: no subscription to partition %d at %s: %s", subscription.partition, self.node, why)
        self._subscriptions.lost([gone])
        return True

    # The probe

    async def _probe(self) -> None:
        try:
            while not self.over:
                self._wanted.clear()
                was_idle = self._idle
                with self._subscriptions.mutex:
                    self._idle = self.up and self.channels.nothing_kept
                if was_idle and not self._idle:
                    self._quiet = 0.0  # what nobody asked for was no silence
                if (self._due() and not await self._prove()) or self.channels.refused_some:
                    await self._ask_again()
                self._give_up_if_silent()
                await self._wanted.wait(self._pause())
        finally:
            self.running -= 1

    def _pause(self) -> float:
        """Seconds until the next probe: an idle link is probed at the common moments of its replica."""
        if not self.up and not self.channels.refused_some:
            return 0.02
        return min(self._every, self._rounds.left) if self._idle else self._every

    def _due(self) -> bool:
        """Whether the node is to be probed: where hot keeps nothing, only so often that it is not taken for silent."""
        idle = self._idle and self._echo >= self._since
        return self.up and not (idle and not self._rounds.passed(self._echo))

    async def _prove(self) -> bool:
        """Have the node publish to us; whether it did."""
        sent = self._port.monotonic()
        prober = self.channels.prober
        done = False
        try:
            if prober is not None:
                words = PROBE.call([prober.meta, prober.echoes], [repr(sent)])
                (answer,) = await self._port.exchange_with(self.node, [words])
                if isinstance(answer, Exception) and str(answer).startswith("NOSCRIPT"):
                    (answer,) = await self._port.exchange_with(self.node, [PROBE.first_call(words)])
                if isinstance(answer, Exception):
                    # A partition whose slot is being moved answers TRYAGAIN until that is done: others prove the node.
                    with self._subscriptions.mutex:
                        self.channels.probe_another()
                    raise WarmUnavailable(f"{self.node}: {answer}") from answer
                if answer[0] == b"ok":
                    self._subscriptions.time_received(self.node, answer[1:], sent)
                    done = True
                else:
                    # Its connections are of another life of the data: they are made anew.
                    await self._port.life_of(self.node)
        except StateError as error:
            log.debug("probe: %s", error)
        return done

    async def _ask_again(self) -> None:
        """Look where the partitions are, and ask once more for those that are said to be here."""
        await self._relocate()
        with self._subscriptions.mutex:
            self.channels.ask_again()

    async def _relocate(self) -> None:
        try:
            await self._subscriptions.relocate()
        except StateError as error:
            log.debug("link: where keys are is not known: %s", error)

    def _give_up_if_silent(self) -> None:
        """A connection that died without a word is never read from again: close it, so that the reader reconnects.

        So is one on which the first request is never answered. But after a loop that was blocked, or a process that was
        stopped, the echoes may lie there unread: time in which we did not look either is no silence of the server's.
        """
        now = self._port.monotonic()
        self._quiet += min(now - self._round, _ROUND)
        self._round = now
        wire = self.channels.wire
        # An idle link has an echo once a round, which is longer in a large fleet.
        most = _SILENCE + (self._rounds.seconds - ROUND_SECONDS if self._idle else 0.0)
        if wire is not None and self._quiet > most:
            log.warning("link: no echo for %.0f s", most)
            self._quiet = 0.0
            wire.close()

    # The end

    def end(self) -> None:
        """Let it run out: we subscribe to nothing here any more."""
        self.over = True
        self._wanted.set()
        wire = self.channels.wire
        if wire is not None:
            wire.close()

    async def close(self) -> None:
        """End it, and wait for that."""
        self.end()
        jobs = self._jobs
        self._jobs = []
        for job in jobs:
            await job.stop()


class NodeChannels:
    """The partitions to which we subscribe at one node, and their channels there.

    The wire sees requests in the order in which they changed the tables, so all of it is done under the mutex that the
    links of a replica share. Each subscription to a partition begins under another own name, asked for before the
    channels, so that a channel of ours never has a listener whom the server cannot tell from us.
    """

    def __init__(self, subscriptions: Subscriptions) -> None:
        self.partitions: dict[int, PartitionSubscription] = {}
        self.wire: Wire | None = None
        self.prober: PartitionSubscription | None = None  # the partition by which the node is probed
        self._requests = Requests()
        self._subscriptions = subscriptions

    @property
    def refused_some(self) -> bool:
        """Whether the node refuses subscriptions to some of its partitions, while it is connected."""
        return self.wire is not None and not all(subscription.asked for subscription in list(self.partitions.values()))

    @property
    def nothing_kept(self) -> bool:
        """Whether hot keeps nothing of the partitions here."""
        return all(
            subscription.channels.keys() <= self._subscriptions.unkept
            for subscription in list(self.partitions.values())
        )

    def connected(self, wire: Wire) -> None:
        """Ask for everything on another connection."""
        self.wire = wire
        self._requests = Requests()
        self.prober = None
        self.ask_again()

    def ask_again(self) -> None:
        """Ask for what was refused, or not asked for yet."""
        for subscription in self.partitions.values():
            if not subscription.asked:
                self._subscribe(subscription)

    def down(self) -> list[Freshness]:
        """The connection is lost; what ends with that."""
        self.wire = self.prober = None
        return [self.end(subscription) for subscription in self.partitions.values()]

    def add(self, subscription: PartitionSubscription) -> None:
        """Subscribe to this partition here."""
        self.partitions[subscription.partition] = subscription
        self._subscribe(subscription)

    def remove(self, subscription: PartitionSubscription) -> Freshness:
        """Unsubscribe from it here; what ends with that."""
        del self.partitions[subscription.partition]
        if subscription.asked:
            # Our name first, as in `leave`. A server that gave the slot away has ended them itself, and refuses.
            self._ask(UNSUBSCRIBE, subscription.own, *subscription.channels)
        return self.end(subscription)

    def end(self, subscription: PartitionSubscription) -> Freshness:
        """No subscription to this partition is left here; what ends with that."""
        subscription.asked = False
        for channel in subscription.channels:
            self._subscriptions.confirmed.pop(channel, None)
        if self.prober is subscription:
            self.probe_another()
        return subscription.renew()

    def watch(self, subscription: PartitionSubscription, channel: bytes) -> None:
        """Ask for a channel of one of the partitions."""
        if subscription.asked:
            self._ask(SUBSCRIBE, channel)

    def leave(self, subscription: PartitionSubscription, channel: bytes) -> None:
        """Unsubscribe from a channel."""
        if subscription.asked:
            if channel in subscription.named:
                # First: a write may be on its way that names us as a listener, and no one would be notified.
                self._ask(UNSUBSCRIBE, subscription.own)
                subscription.rename()
                self._ask(SUBSCRIBE, subscription.own)
            self._ask(UNSUBSCRIBE, channel)

    def probe_another(self) -> None:
        """Probe by the next partition here, if there is one."""
        places = [each for each in self.partitions.values() if each.asked]
        at = places.index(self.prober) + 1 if self.prober in places else 0
        self._probe_by(places[at % len(places)] if places else None)

    def _probe_by(self, subscription: PartitionSubscription | None) -> None:
        former = self.prober
        if subscription is not former:
            self.prober = subscription
            if former is not None:
                self._ask(UNSUBSCRIBE, former.echoes)
            if subscription is not None:
                self._ask(SUBSCRIBE, subscription.echoes)

    def _subscribe(self, subscription: PartitionSubscription) -> None:
        if self.wire is None:
            return
        if self.prober is None:
            self._probe_by(subscription)
        subscription.asked = True
        subscription.rename()
        self._ask(SUBSCRIBE, subscription.own, *subscription.channels)

    def _ask(self, kind: bytes, *channels: bytes) -> None:
        if self.wire is not None:
            for channel in channels:
                self._requests.ask(kind, channel)
            # One command a channel: a refusal is one answer, however many a command names.
            self.wire.post_all(kind, channels)

    # Answers

    def confirmed(self, channel: bytes) -> bool:
        """Take a confirmation; whether everything that is published on the channel arrives from now on."""
        # Left and asked for again: only the last request's confirmation counts.
        if not self._requests.confirmed(channel) or channel not in self._subscriptions.handlers:
            return False
        subscription = self._subscriptions.find(channel)
        if (
            subscription is None
            or not subscription.asked
            or self.partitions.get(subscription.partition) is not subscription
        ):
            return False
        self._subscriptions.confirmed[channel] = subscription
        return True

    def ended(self, channel: bytes) -> PartitionSubscription | None:
        """Take the end of a subscription; the partition, if nobody asked for that end."""
        return None if self._requests.ended(channel) else self._mine(self._subscriptions.find(channel))

    def refused(self, text: bytes) -> PartitionSubscription | None:
        """Take an error; the partition that it is about."""
        word, _, rest = text.decode(errors="replace").partition(" ")
        oldest = self._requests.oldest()
        subscription = self._subscriptions.find(oldest) if oldest is not None else None
        if word == "MOVED":
            slot = int(rest.split()[0])
            if subscription is None or subscription.slot != slot:
                # To a request to leave what the server had ended of itself, which was taken for the answer.
                return next((each for each in self.partitions.values() if each.slot == slot and each.asked), None)
        self._requests.refused()
        return self._mine(subscription)

    def _mine(self, subscription: PartitionSubscription | None) -> PartitionSubscription | None:
        mine = (
            subscription is not None
            and subscription.asked
            and self.partitions.get(subscription.partition) is subscription
        )
        return subscription if mine else None


class Requests:
    """Subscriptions that were asked for on one connection and are not answered yet.

    Answers come in order, pushes anywhere. A server that does not have a slot refuses (UN)SUBSCRIBE without naming the
    channel, so it takes the order to know which one was meant. What it pushes of itself, as the end of a subscription
    whose slot has moved, stands between the answers.
    """

    def __init__(self) -> None:
        self._asked: deque[tuple[bytes, bytes]] = deque()
        self._open: Counter[bytes] = Counter()

    def ask(self, kind: bytes, channel: bytes) -> None:
        """Note that this is sent now."""
        self._asked.append((kind, channel))
        self._open[channel] += 1

    def confirmed(self, channel: bytes) -> bool:
        """Note the answer to a subscription; whether it counts: nothing was asked about the channel since."""
        wanted = SUBSCRIBE, channel
        if wanted in self._asked:
            while self._drop() != wanted:
                pass
        return channel not in self._open

    def ended(self, channel: bytes) -> bool:
        """Note the end of a subscription; whether it was asked for."""
        if self._asked and self._asked[0] == (UNSUBSCRIBE, channel):
            self._drop()
            return True
        # The server ended it of itself, and answers what was asked later.
        return self._open[channel] > 0 and (UNSUBSCRIBE, channel) in self._asked

    def refused(self) -> bytes | None:
        """Note an error; the channel that it is about, None if nothing was asked."""
        return self._drop()[1] if self._asked else None

    def oldest(self) -> bytes | None:
        """The channel whose answer comes next."""
        return self._asked[0][1] if self._asked else None

    def _drop(self) -> tuple[bytes, bytes]:
        kind, channel = self._asked.popleft()
        self._open[channel] -= 1
        if not self._open[channel]:
            del self._open[channel]
        return kind, channel


# What the links share


class PartitionSubscription:
    """The channels of one partition to which we subscribe, and the name by which commits there say so."""

    def __init__(self, partition: int, slot: int, meta: bytes, echoes: bytes) -> None:
        self.partition = partition
        self.slot = slot
        self.meta = meta
        self.echoes = echoes
        self.own = b""
        self.named: set[bytes] = set()  # channels that a write named together with our present name
        self.channels: dict[bytes, None] = {}
        self.freshness = Freshness(partition)
        self.node: str | None = None  # where we subscribe, or will
        self.asked = False  # on the present connection to there
        self._count = 0

    def rename(self) -> None:
        """Take a name that was never used before."""
        self.named.clear()
        self._count += 1
        self.own = b"%b.%d" % (self.echoes, self._count)

    def renew(self) -> Freshness:
        """End what was read until now; the freshness of that."""
        gone = self.freshness
        gone.end()
        self.freshness = Freshness(self.partition)
        return gone


@dataclass(slots=True)
class Subscriptions:
    """What all links of a replica share. The tables change under the mutex only."""

    mutex: AbstractContextManager[Any]
    find: Callable[[bytes], PartitionSubscription | None]  # by a channel
    lost: Callable[[list[Freshness]], None]
    relocate: Callable[[], Coroutine[Any, Any, None]]
    epoch_received: Callable[[int, str], None]
    time_received: Callable[[str, Any, float], None]
    handlers: dict[bytes, Handler] = field(default_factory=dict)
    confirmed: dict[bytes, PartitionSubscription] = field(default_factory=dict)
    unkept: set[bytes] = field(default_factory=set)  # channels of which nothing is kept that has to be proved
