"""The links of this replica: its subscriptions, each at the node that has the partition.

Law: a lack of messages never proves that nothing was published; only the echo of a probe proves a node's link. At
intervals each node is asked to run a script that writes, and that publishes the time of the request. While the newest
echo is at most `max_staleness` old, everything published before it has arrived, because one connection keeps its order.
No echo comes from a node that lost its slots, became a replica, or is cut off from its cluster. Where hot keeps no data
of the node, the link is idle: it is probed once a round, and at once when data is to be kept. Each node with
subscriptions has its own link: if one falls silent, hot stops answering only for its partitions.

A subscription ends together with the data that was read under it: when the connection is lost; when its slot moves,
whereupon the server ends the subscriptions of that slot and reports it; when Redis gets another data id.

In each partition a replica also subscribes to a channel of its own. A write names this own channel if the replica is
subscribed to the record's channel, so that the script can see whether there are other subscribers. While the own
channel has a subscriber, the same connection receives the record's messages. For that the own channel is in the same
slot: when the slot moves, the server ends both subscriptions; a channel in another slot would stay and hide that no
subscriber was notified. Its name is used once: it changes at each subscription, because the server may keep a lost
subscription for long, and when a channel that a write named together with it is left.

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
Handler = Callable[[bytes, bytes], None]  # the channel, and the message
_SILENCE = 5.0  # seconds
_ROUND = 1.5  # maximum seconds that one round of the probe adds to the silence
SUBSCRIBE = b"SSUBSCRIBE"
UNSUBSCRIBE = b"SUNSUBSCRIBE"


class Link:
    """Channels with a handler each, kept through reconnections, and while partitions move from node to node.

    Handlers are plain and quick; they run on the reader, and are called with the channel and the message. An empty
    message says that the channel is confirmed. One handler serves many channels: a function for each would be four more
    objects per record for the garbage collector.
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
        self.echoed: set[bytes] = set()
        self._subscriptions = Subscriptions(self._mutex, self._find, lost, self.relocate, epoch_received, time_received)
        self._handlers = self._subscriptions.handlers
        self._confirmed = self._subscriptions.confirmed

    @property
    def up(self) -> bool:
        """Whether the links to all needed nodes are up."""
        nodes = list(self._nodes.values())
        return bool(nodes) and all(each.up for each in nodes)

    @property
    def breaks(self) -> int:
        """How often a connection was lost."""
        return self._ended_breaks + sum(each.breaks for each in list(self._nodes.values()))

    @property
    def silence(self) -> float | None:
        """Seconds since the last proof of the link that was silent longest; None if no link was needed yet."""
        return max((each.silence for each in list(self._nodes.values())), default=None)

    @property
    def figures(self) -> dict[str, int]:
        """Whether the links are up and, once one was needed, the milliseconds since the last proof."""
        silence = self.silence
        return {"link_up": int(self.up)} | ({} if silence is None else {"link_silence_ms": int(silence * 1000)})

    def confirmed(self, channel: bytes) -> bool:
        """Whether all messages on the channel from now on will arrive here."""
        return channel in self._confirmed

    def freshness(self, channel: bytes) -> Freshness | None:
        """Return the freshness to keep with a record that is read from now on; None: it must not be kept."""
        subscription = self._confirmed.get(channel)
        return None if subscription is None else subscription.freshness

    def subscribed_as(self, channel: bytes) -> bytes:
        """Return the own channel if this one is subscribed to, else b"".

        On the server both subscriptions end together. Writes to a channel of `echoed` are always published.
        """
        subscription = self._confirmed.get(channel)
        if subscription is None or channel in self.echoed:
            return b""
        own = subscription.own
        subscription.named.add(channel)
        # Checked again, because `leave` may have run just before the name was noted.
        return own if channel in self._confirmed else b""

    def watch(self, channel: bytes, handler: Handler) -> None:
        """Subscribe to a channel. Does not wait."""
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
        """Subscribe to a channel of which hot keeps no data. A link with only such channels is probed less often."""
        with self._mutex:
            if channel not in self._handlers and not self._closed:
                self._subscriptions.unkept.add(channel)
                self._watch(channel, handler)

    def echo(self, channel: bytes) -> None:
        """Let this replica's own writes be published on the channel, too, also those under way."""
        with self._mutex:
            self.echoed.add(channel)
            subscription = self._partition(self._keys.partition_at(channel))
            if subscription.node is not None:
                self._nodes[subscription.node].channels.rename(subscription, channel)

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
        """End all data read from this partition's node, because the partition has another data id."""
        subscription = self._partitions.get(partition)
        # The partition has just answered, so its node is known.
        node = (subscription and subscription.node) or self._port.node_of(self._keys.partition(partition).meta)
        link = self._nodes.get(node)
        if link is not None:
            self._subscriptions.lost(link.renew())

    async def relocate(self) -> None:
        """Subscribe to each partition at the node that has it now."""
        await self._port.relocate()
        lost: list[Freshness] = []
        with self._mutex:
            for subscription in self._partitions.values() if not self._closed else ():
                lost += self._subscribe_where_it_is(subscription)
            for link in [each for each in self._nodes.values() if not each.channels.partitions]:
                del self._nodes[link.node]
                self._ended_breaks += link.breaks
                self._ending = [each for each in [*self._ending, link] if each.running]
                link.end()
        if lost:
            self._subscriptions.lost(lost)

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
        """Subscribe to a partition at the node that has it now; return the freshness that ends with that.

        The subscription of a partition without a node is unchanged: reads of it fail, and it is moved once a node has
        it.
        """
        try:
            node = self._port.node_of(subscription.meta)
        except WarmUnavailable:
            return []
        lost = []
        if subscription.node != node:
            if subscription.node is not None:
                lost.append(self._nodes[subscription.node].channels.remove(subscription))
            self._subscribe_at(subscription, node)
        return lost

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
    """The connections to one node, one after another, while partitions there have subscriptions."""

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
        self._quiet = 0.0  # seconds without an echo in which this process ran and could have received one
        self._idle = False  # true if no reader depends on the next proof
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
        """Seconds since its last proof."""
        return self._port.monotonic() - max(self._echo, self._since)

    def renew(self) -> list[Freshness]:
        """End all data read until now, because Redis has another data id; the subscriptions continue."""
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
            lost = self.channels.down()
        self._subscriptions.lost(lost)
        if wire is not None:
            wire.close()

    def _take(self, message: list[bytes]) -> bool:
        """Handle a message; return whether a partition has to be looked for elsewhere."""
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
                # An empty partition cannot show that it was emptied, so the node is probed by another one.
                self.channels.probe_another()

    def _confirmed(self, channel: bytes) -> None:
        self.up = True
        with self._subscriptions.mutex:
            handler = self._subscriptions.handlers.get(channel) if self.channels.confirmed(channel) else None
            subscription = self._subscriptions.find(channel)
            if handler is not None and subscription is not None and self._echo >= self._since:
                # Data read from now on is as current as the last echo, which came on this connection.
                subscription.freshness.prove(self._echo + self._max_staleness)
        if handler is not None:
            handler(channel, b"")

    def _gone(self, take: Callable[[bytes], PartitionSubscription | None], answer: bytes, why: str) -> bool:
        """Handle the end of a subscription, or an error; return whether a partition has left this node."""
        with self._subscriptions.mutex:
            subscription = take(answer)
            if subscription is None:
                return False
            lost = self.channels.end(subscription)
        log.info("link: no subscription to partition %d at %s: %s", subscription.partition, self.node, why)
        self._subscriptions.lost([lost])
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
                    self._quiet = 0.0  # silence before a probe was needed does not count
                if (self._due() and not await self._prove()) or self.channels.refused_some:
                    await self._ask_again()
                self._give_up_if_silent()
                await self._wanted.wait(self._pause())
        finally:
            self.running -= 1

    def _pause(self) -> float:
        """Return the seconds until the next probe: an idle link is probed at the common moments of its replica."""
        if not self.up and not self.channels.refused_some:
            return 0.02
        return min(self._every, self._rounds.left) if self._idle else self._every

    def _due(self) -> bool:
        """Whether to probe the node now; an idle link is probed just often enough not to count as silent."""
        idle = self._idle and self._echo >= self._since
        return self.up and not (idle and not self._rounds.passed(self._echo))

    async def _prove(self) -> bool:
        """Ask the node to publish an echo; return whether it did."""
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
                    # A partition whose slot is moving answers TRYAGAIN until that is done, so another one is used for
                    # the probe.
                    with self._subscriptions.mutex:
                        self.channels.probe_another()
                    raise WarmUnavailable(f"{self.node}: {answer}") from answer
                if answer[0] == b"ok":
                    self._subscriptions.time_received(self.node, answer[1:], sent)
                    done = True
                else:
                    # Its connections have an earlier data id: this replaces them.
                    await self._port.identity_of(self.node)
        except StateError as error:
            log.debug("probe: %s", error)
        return done

    async def _ask_again(self) -> None:
        """Find out where the partitions are, and subscribe again to those that are here."""
        await self._relocate()
        with self._subscriptions.mutex:
            self.channels.ask_again()

    async def _relocate(self) -> None:
        try:
            await self._subscriptions.relocate()
        except StateError as error:
            log.debug("link: the servers of the partitions cannot be found: %s", error)

    def _give_up_if_silent(self) -> None:
        """Close a connection that died silently, on which a read would wait forever, so that the reader reconnects.

        This includes a connection whose first request is never answered. After a blocked loop or a stopped process
        echoes may have arrived unread, so time in which this process did not read does not count as silence.
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
        """Let the link end, because nothing is subscribed to here any longer."""
        self.over = True
        self._wanted.set()
        wire = self.channels.wire
        if wire is not None:
            wire.close()

    async def close(self) -> None:
        """End the link, and wait for that."""
        self.end()
        jobs = self._jobs
        self._jobs = []
        for job in jobs:
            await job.stop()


class NodeChannels:
    """The partitions with subscriptions at one node, and their channels there.

    Requests must be sent in the order in which the tables change, so both are done under the mutex that the links of a
    replica share. Each subscription to a partition begins with a new own channel, subscribed to before the others, so
    that the server can always recognise this replica among a channel's subscribers.
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
        """Subscribe to everything on a new connection."""
        self.wire = wire
        self._requests = Requests()
        self.prober = None
        self.ask_again()

    def ask_again(self) -> None:
        """Subscribe to channels that were refused, or not requested yet."""
        for subscription in self.partitions.values():
            if not subscription.asked:
                self._subscribe(subscription)

    def down(self) -> list[Freshness]:
        """Note that the connection is lost; return the freshness that ends with that."""
        self.wire = self.prober = None
        return [self.end(subscription) for subscription in self.partitions.values()]

    def add(self, subscription: PartitionSubscription) -> None:
        """Subscribe to this partition here."""
        self.partitions[subscription.partition] = subscription
        self._subscribe(subscription)

    def remove(self, subscription: PartitionSubscription) -> Freshness:
        """Unsubscribe from it here; return the freshness that ends with that."""
        del self.partitions[subscription.partition]
        if subscription.asked:
            # The own channel first, as in `leave`. A server that gave the slot away has ended the subscriptions
            # already, and refuses.
            self._ask(UNSUBSCRIBE, subscription.own, *subscription.channels)
        return self.end(subscription)

    def end(self, subscription: PartitionSubscription) -> Freshness:
        """Note that no subscription to this partition is left here; return the freshness that ends with that."""
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
            # The own channel first: otherwise a write under way could count this replica as a listener that it no
            # longer is.
            self.rename(subscription, channel)
            self._ask(UNSUBSCRIBE, channel)

    def rename(self, subscription: PartitionSubscription, channel: bytes) -> None:
        """Change the own channel if a write may have named it together with this one."""
        if subscription.asked and channel in subscription.named:
            self._ask(UNSUBSCRIBE, subscription.own)
            subscription.rename()
            self._ask(SUBSCRIBE, subscription.own)

    def probe_another(self) -> None:
        """Use the next partition here for the probe, if there is one."""
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
            # One command per channel: a refusal is one reply, however many channels a command names.
            self.wire.post_all(kind, channels)

    # Answers

    def confirmed(self, channel: bytes) -> bool:
        """Handle a confirmation; return whether everything published on the channel arrives from now on."""
        # If the channel was left and requested again, only the last request's confirmation counts.
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
        """Handle the end of a subscription; return its partition if that end was not requested."""
        return None if self._requests.ended(channel) else self._mine(self._subscriptions.find(channel))

    def refused(self, text: bytes) -> PartitionSubscription | None:
        """Handle an error; return its partition."""
        word, _, rest = text.decode(errors="replace").partition(" ")
        oldest = self._requests.oldest()
        subscription = self._subscriptions.find(oldest) if oldest is not None else None
        if word == "MOVED":
            slot = int(rest.split()[0])
            if subscription is None or subscription.slot != slot:
                # The server refused an unsubscription because the subscription had ended already; that end counted as
                # the reply.
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
    """Subscription requests on one connection that are not answered yet.

    Replies come in order, with pushed messages in between. A server that does not have a slot refuses (UN)SUBSCRIBE
    without naming the channel, so only the order shows which one was meant. Messages that the server pushes on its own,
    such as the end of a subscription whose slot has moved, may come between the replies.
    """

    def __init__(self) -> None:
        self._asked: deque[tuple[bytes, bytes]] = deque()
        self._open: Counter[bytes] = Counter()

    def ask(self, kind: bytes, channel: bytes) -> None:
        """Note that this is sent now."""
        self._asked.append((kind, channel))
        self._open[channel] += 1

    def confirmed(self, channel: bytes) -> bool:
        """Note the reply to a subscription; return whether it counts: nothing was asked about the channel since."""
        wanted = SUBSCRIBE, channel
        if wanted in self._asked:
            while self._drop() != wanted:
                pass
        return channel not in self._open

    def ended(self, channel: bytes) -> bool:
        """Note the end of a subscription; return whether it was requested."""
        if self._asked and self._asked[0] == (UNSUBSCRIBE, channel):
            self._drop()
            return True
        # The server ended it on its own, and answers the request later.
        return self._open[channel] > 0 and (UNSUBSCRIBE, channel) in self._asked

    def refused(self) -> bytes | None:
        """Note an error; return its channel, None if no request is open."""
        return self._drop()[1] if self._asked else None

    def oldest(self) -> bytes | None:
        """Return the channel whose reply comes next."""
        return self._asked[0][1] if self._asked else None

    def _drop(self) -> tuple[bytes, bytes]:
        kind, channel = self._asked.popleft()
        self._open[channel] -= 1
        if not self._open[channel]:
            del self._open[channel]
        return kind, channel


# Shared by the links


class PartitionSubscription:
    """The channels of one partition to which we subscribe, and our own name, which commits there mention."""

    def __init__(self, partition: int, slot: int, meta: bytes, echoes: bytes) -> None:
        self.partition = partition
        self.slot = slot
        self.meta = meta
        self.echoes = echoes
        self.own = b""
        self.named: set[bytes] = set()  # channels that a write named together with the present own name
        self.channels: dict[bytes, None] = {}
        self.freshness = Freshness(partition)
        self.node: str | None = None  # the node of the subscription, present or intended
        self.asked = False  # whether it was subscribed to on the present connection
        self._count = 0

    def rename(self) -> None:
        """Take a name that was never used before."""
        self.named.clear()
        self._count += 1
        self.own = b"%b.%d" % (self.echoes, self._count)

    def renew(self) -> Freshness:
        """End all data read until now; return its freshness."""
        lost = self.freshness
        lost.end()
        self.freshness = Freshness(self.partition)
        return lost


@dataclass(slots=True)
class Subscriptions:
    """The tables that all links of a replica share. They change only under the mutex."""

    mutex: AbstractContextManager[Any]
    find: Callable[[bytes], PartitionSubscription | None]  # by a channel
    lost: Callable[[list[Freshness]], None]
    relocate: Callable[[], Coroutine[Any, Any, None]]
    epoch_received: Callable[[int, str], None]
    time_received: Callable[[str, Any, float], None]
    handlers: dict[bytes, Handler] = field(default_factory=dict)
    confirmed: dict[bytes, PartitionSubscription] = field(default_factory=dict)
    unkept: set[bytes] = field(default_factory=set)  # channels of which hot keeps nothing, so that they need no proof
