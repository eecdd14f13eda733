"""The links of this replica: what it hears of every partition, at whichever node has it.

Law: silence is never taken for calm; only an echo of our own proves a node's link. Every so often each node is asked to
run a script that writes, and publishes when it was asked. While the newest echo is at most `max_staleness` old, all
that was published before it has arrived, because one connection keeps its order. Any other answer is silence: of a node
that lost its slots, that is a replica now, that is cut off from its cluster. Where hot keeps nothing of what the node
has, it is probed once a round, and at once when something is to be kept. Each node that has partitions of which
something is heard has a link of its own: one that falls silent ends what hot answers of its partitions alone.

A subscription ends together with what was read under it: when the connection is lost; when its slot moves, upon which
the server ends the subscriptions of that slot and says so; when Redis begins another life.

A write names our own channel of its partition if we hear the record's too, so that the script can see whether anybody
else does. That name says: while it has a subscriber, that one hears the record as well. So it lies in the same slot -
when that moves, the server ends both; another slot's would stay and hide that nobody else was notified - and a name is
used once: it is another one at each subscription - the server may keep an earlier one for long after we lost it - and
from the moment on when a channel that was named with it is left.

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
        epoch_heard: Callable[[int, str], None],
        time_received: Callable[[str, Any, float], None],
    ) -> None:
        self._port = port
        self._keys = keys
        self._replica = replica
        self._max_staleness = max_staleness
        self._rounds = rounds
        self._mutex = port.mutex()
        self._partitions: dict[int, HeardPartition] = {}
        self._nodes: dict[str, NodeLink] = {}
        self._ending: list[NodeLink] = []
        self._ended_breaks = 0
        self._closed = False
        self._heard = Heard(self._mutex, self._find, lost, self.relocate, epoch_heard, time_received)
        self._handlers = self._heard.handlers
        self._confirmed = self._heard.confirmed

    @property
    def up(self) -> bool:
        """Whether every node that is to be heard is."""
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
        heard = self._confirmed.get(channel)
        return None if heard is None else heard.freshness

    def heard_on(self, channel: bytes) -> bytes:
        """Our own channel if we hear this one too, else b"". On the server both end together, before we know of it."""
        heard = self._confirmed.get(channel)
        if heard is None:
            return b""
        own = heard.own
        heard.named.add(channel)
        # Looked at again: `leave` may have looked for the name just before it was noted.
        return own if channel in self._confirmed else b""

    def watch(self, channel: bytes, handler: Handler) -> None:
        """Ask for a channel. Does not wait."""
        with self._mutex:
            self._watch(channel, handler)

    def _watch(self, channel: bytes, handler: Handler) -> None:
        if channel not in self._handlers and not self._closed:
            self._handlers[channel] = handler
            heard = self._partition(self._keys.partition_at(channel))
            heard.channels[channel] = None
            if heard.node is not None:
                self._nodes[heard.node].watch(heard, channel)
            else:
                self._hear_where_it_is(heard)

    def listen(self, channel: bytes, handler: Handler) -> None:
        """Ask for a channel of which nothing is kept in hot: for it alone the link is proved more rarely."""
        with self._mutex:
            if channel not in self._handlers and not self._closed:
                self._heard.unkept.add(channel)
                self._watch(channel, handler)

    def leave(self, channel: bytes) -> None:
        """Stop hearing a channel."""
        with self._mutex:
            if self._handlers.pop(channel, None) is None:
                return
            self._confirmed.pop(channel, None)
            self._heard.unkept.discard(channel)
            heard = self._partition(self._keys.partition_at(channel))
            heard.channels.pop(channel, None)
            if heard.node is not None:
                self._nodes[heard.node].channels.leave(heard, channel)

    def renew(self, partition: int) -> None:
        """This partition began another life: what was read of all that its node has is over."""
        heard = self._partitions.get(partition)
        # It has just answered, so where it is is known.
        node = (heard and heard.node) or self._port.node_of(self._keys.partition(partition).meta)
        link = self._nodes.get(node)
        if link is not None:
            self._heard.lost(link.renew())

    async def relocate(self) -> None:
        """Hear each partition at the node that has it now."""
        await self._port.relocate()
        gone: list[Freshness] = []
        with self._mutex:
            for heard in self._partitions.values() if not self._closed else ():
                gone += self._hear_where_it_is(heard)
            for link in [each for each in self._nodes.values() if not each.channels.partitions]:
                del self._nodes[link.node]
                self._ended_breaks += link.breaks
                self._ending = [each for each in [*self._ending, link] if each.running]
                link.end()
        if gone:
            self._heard.lost(gone)

    def _find(self, channel: bytes) -> HeardPartition | None:
        return self._partitions.get(self._keys.partition_at(channel))

    def _partition(self, partition: int) -> HeardPartition:
        heard = self._partitions.get(partition)
        if heard is None:
            keys = self._keys
            meta = keys.partition(partition).meta
            heard = HeardPartition(partition, keys.slot(partition), meta, keys.link(partition, self._replica))
            self._partitions[partition] = heard
        return heard

    def _hear_where_it_is(self, heard: HeardPartition) -> list[Freshness]:
        """Hear a partition at the node that has it now; what ends with that.

        One that nobody has is left as it is: who reads it is told, and it is heard once somebody has it.
        """
        try:
            node = self._port.node_of(heard.meta)
        except WarmUnavailable:
            return []
        gone = []
        if heard.node != node:
            if heard.node is not None:
                gone.append(self._nodes[heard.node].channels.remove(heard))
            self._hear(heard, node)
        return gone

    def _hear(self, heard: HeardPartition, node: str) -> None:
        link = self._nodes.get(node)
        if link is None:
            link = NodeLink(self._port, node, self._heard, max_staleness=self._max_staleness, rounds=self._rounds)
            self._nodes[node] = link
            link.begin()
        heard.node = node
        link.channels.add(heard)

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
    """One connection after another to one node, while partitions are heard there."""

    def __init__(self, port: Port, node: str, heard: Heard, *, max_staleness: float, rounds: Rounds) -> None:
        self.node = node
        self.channels = NodeChannels(heard)
        self.up = self.over = False
        self.breaks = 0
        self.running = 2  # jobs
        self._port = port
        self._heard = heard
        self._rounds = rounds
        self._max_staleness = max_staleness
        self._every = min(max(max_staleness / 4, 0.02), 1.0)
        self._echo = 0.0
        self._since = self._round = port.monotonic()
        self._quiet = 0.0  # seconds without an echo, as far as we were awake to hear one
        self._at_rest = False  # whether nobody waits for the next proof
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
        with self._heard.mutex:
            return [heard.renew() for heard in self.channels.partitions.values()]

    def watch(self, heard: HeardPartition, channel: bytes) -> None:
        """Hear a channel of one of the partitions here."""
        self.channels.watch(heard, channel)
        if self._at_rest and channel not in self._heard.unkept:
            self._wanted.set()

    # The reader

    async def _read(self) -> None:
        pause = 0.05
        try:
            while not self.over:
                wire = None
                try:
                    wire = await self._port.wire(self.node)
                    with self._heard.mutex:
                        self._since = self._port.monotonic()
                        self._quiet = 0.0
                        self.channels.connected(wire)
                    while True:
                        if self._hear(await wire.receive()):
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
        with self._heard.mutex:
            self.breaks += self.up
            self.up = False
            gone = self.channels.down()
        self._heard.lost(gone)
        if wire is not None:
            wire.close()

    def _hear(self, message: list[bytes]) -> bool:
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
        handler = self._heard.handlers.get(channel)
        if handler is not None:
            try:
                handler(channel, payload)
            except (StateError, ValueError) as error:
                log.error("link: a message on %r cannot be read: %s", channel, error)

    def _echoed(self, prober: HeardPartition, payload: bytes) -> None:
        epoch, _, sent = payload.decode().rpartition(" ")
        self._echo = float(sent)
        self._quiet = 0.0
        self._heard.epoch_heard(prober.partition, epoch)
        with self._heard.mutex:
            for heard in self.channels.partitions.values():
                if heard.asked:
                    heard.freshness.prove(self._echo + self._max_staleness)
            if not epoch and self.channels.prober is prober:
                # One that holds nothing cannot show that it was emptied: another one may.
                self.channels.probe_another()

    def _confirmed(self, channel: bytes) -> None:
        self.up = True
        with self._heard.mutex:
            handler = self._heard.handlers.get(channel) if self.channels.confirmed(channel) else None
            heard = self._heard.find(channel)
            if handler is not None and heard is not None and self._echo >= self._since:
                # What is read from now on was true when the node last proved itself, on this very connection.
                heard.freshness.prove(self._echo + self._max_staleness)
        if handler is not None:
            handler(channel, b"")

    def _gone(self, take: Callable[[bytes], HeardPartition | None], answer: bytes, why: str) -> bool:
        """Take the end of a subscription, or an error; whether a partition is not heard here any more."""
        with self._heard.mutex:
            heard = take(answer)
            if heard is None:
                return False
            gone = self.channels.end(heard)
        log.info("link: partition %d is not heard at %s: %s", heard.partition, self.node, why)
        self._heard.lost([gone])
        return True

    # The probe

    async def _probe(self) -> None:
        try:
            while not self.over:
                self._wanted.clear()
                rested = self._at_rest
                with self._heard.mutex:
                    self._at_rest = self.up and self.channels.nothing_kept
                if rested and not self._at_rest:
                    self._quiet = 0.0  # what nobody asked for was no silence
                if (self._due() and not await self._prove()) or self.channels.refused_some:
                    await self._ask_again()
                self._give_up_if_silent()
                await self._wanted.wait(self._pause())
        finally:
            self.running -= 1

    def _pause(self) -> float:
        """Seconds until the next round of the probe: at rest also when the replica asks for all else."""
        if not self.up and not self.channels.refused_some:
            return 0.02
        return min(self._every, self._rounds.left) if self._at_rest else self._every

    def _due(self) -> bool:
        """Whether the node is to be probed: where hot keeps nothing, only so often that it is not taken for silent."""
        rests = self._at_rest and self._echo >= self._since
        return self.up and not (rests and not self._rounds.passed(self._echo))

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
                    with self._heard.mutex:
                        self.channels.probe_another()
                    raise WarmUnavailable(f"{self.node}: {answer}") from answer
                if answer[0] == b"ok":
                    self._heard.time_received(self.node, answer[1:], sent)
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
        with self._heard.mutex:
            self.channels.ask_again()

    async def _relocate(self) -> None:
        try:
            await self._heard.relocate()
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
        # At rest an echo comes once a round, which is longer in a large fleet.
        most = _SILENCE + (self._rounds.seconds - ROUND_SECONDS if self._at_rest else 0.0)
        if wire is not None and self._quiet > most:
            log.warning("link: nothing heard for %.0f s", most)
            self._quiet = 0.0
            wire.close()

    # The end

    def end(self) -> None:
        """Let it run out: nothing is to be heard here any more."""
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
    """The partitions that are heard at one node, and their channels there.

    The wire sees requests in the order in which they changed the tables, so all of it is done under the mutex that the
    links of a replica share. Each subscription to a partition begins under another own name, asked for before the
    channels, so that a channel of ours never has a listener whom the server cannot tell from us.
    """

    def __init__(self, heard: Heard) -> None:
        self.partitions: dict[int, HeardPartition] = {}
        self.wire: Wire | None = None
        self.prober: HeardPartition | None = None  # the partition by which the node is probed
        self._requests = Requests()
        self._heard = heard

    @property
    def refused_some(self) -> bool:
        """Whether the node does not let some of its partitions be heard, while it is connected."""
        return self.wire is not None and not all(heard.asked for heard in list(self.partitions.values()))

    @property
    def nothing_kept(self) -> bool:
        """Whether hot keeps nothing of what is heard here."""
        return all(heard.channels.keys() <= self._heard.unkept for heard in list(self.partitions.values()))

    def connected(self, wire: Wire) -> None:
        """Ask for everything on another connection."""
        self.wire = wire
        self._requests = Requests()
        self.prober = None
        self.ask_again()

    def ask_again(self) -> None:
        """Ask for what was refused, or not asked for yet."""
        for heard in self.partitions.values():
            if not heard.asked:
                self._subscribe(heard)

    def down(self) -> list[Freshness]:
        """The connection is lost; what ends with that."""
        self.wire = self.prober = None
        return [self.end(heard) for heard in self.partitions.values()]

    def add(self, heard: HeardPartition) -> None:
        """Hear this partition here."""
        self.partitions[heard.partition] = heard
        self._subscribe(heard)

    def remove(self, heard: HeardPartition) -> Freshness:
        """Hear it here no more; what ends with that."""
        del self.partitions[heard.partition]
        if heard.asked:
            # Our name first, as in `leave`. A server that gave the slot away has ended them itself, and refuses.
            self._ask(UNSUBSCRIBE, heard.own, *heard.channels)
        return self.end(heard)

    def end(self, heard: HeardPartition) -> Freshness:
        """Nothing of this partition is heard here now; what ends with that."""
        heard.asked = False
        for channel in heard.channels:
            self._heard.confirmed.pop(channel, None)
        if self.prober is heard:
            self.probe_another()
        return heard.renew()

    def watch(self, heard: HeardPartition, channel: bytes) -> None:
        """Ask for a channel of one of the partitions."""
        if heard.asked:
            self._ask(SUBSCRIBE, channel)

    def leave(self, heard: HeardPartition, channel: bytes) -> None:
        """Stop hearing a channel."""
        if heard.asked:
            if channel in heard.named:
                # First: a write may be on its way that names us as a listener, and no one would be notified.
                self._ask(UNSUBSCRIBE, heard.own)
                heard.rename()
                self._ask(SUBSCRIBE, heard.own)
            self._ask(UNSUBSCRIBE, channel)

    def probe_another(self) -> None:
        """Probe by the next partition that is heard here, if there is one."""
        places = [each for each in self.partitions.values() if each.asked]
        at = places.index(self.prober) + 1 if self.prober in places else 0
        self._probe_by(places[at % len(places)] if places else None)

    def _probe_by(self, heard: HeardPartition | None) -> None:
        former = self.prober
        if heard is not former:
            self.prober = heard
            if former is not None:
                self._ask(UNSUBSCRIBE, former.echoes)
            if heard is not None:
                self._ask(SUBSCRIBE, heard.echoes)

    def _subscribe(self, heard: HeardPartition) -> None:
        if self.wire is None:
            return
        if self.prober is None:
            self._probe_by(heard)
        heard.asked = True
        heard.rename()
        self._ask(SUBSCRIBE, heard.own, *heard.channels)

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
        if not self._requests.confirmed(channel) or channel not in self._heard.handlers:
            return False
        heard = self._heard.find(channel)
        if heard is None or not heard.asked or self.partitions.get(heard.partition) is not heard:
            return False
        self._heard.confirmed[channel] = heard
        return True

    def ended(self, channel: bytes) -> HeardPartition | None:
        """Take the end of a subscription; the partition, if nobody asked for that end."""
        return None if self._requests.ended(channel) else self._mine(self._heard.find(channel))

    def refused(self, text: bytes) -> HeardPartition | None:
        """Take an error; the partition that it is about."""
        word, _, rest = text.decode(errors="replace").partition(" ")
        oldest = self._requests.oldest()
        heard = self._heard.find(oldest) if oldest is not None else None
        if word == "MOVED":
            slot = int(rest.split()[0])
            if heard is None or heard.slot != slot:
                # To a request to leave what the server had ended of itself, which was taken for the answer.
                return next((each for each in self.partitions.values() if each.slot == slot and each.asked), None)
        self._requests.refused()
        return self._mine(heard)

    def _mine(self, heard: HeardPartition | None) -> HeardPartition | None:
        mine = heard is not None and heard.asked and self.partitions.get(heard.partition) is heard
        return heard if mine else None


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


class HeardPartition:
    """What is heard of one partition, and under which name commits there say so."""

    def __init__(self, partition: int, slot: int, meta: bytes, echoes: bytes) -> None:
        self.partition = partition
        self.slot = slot
        self.meta = meta
        self.echoes = echoes
        self.own = b""
        self.named: set[bytes] = set()  # channels that a write was said to be heard on, under the present name
        self.channels: dict[bytes, None] = {}
        self.freshness = Freshness(partition)
        self.node: str | None = None  # where it is heard, or is to be
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
class Heard:
    """What all links of a replica share. The tables change under the mutex only."""

    mutex: AbstractContextManager[Any]
    find: Callable[[bytes], HeardPartition | None]  # by a channel
    lost: Callable[[list[Freshness]], None]
    relocate: Callable[[], Coroutine[Any, Any, None]]
    epoch_heard: Callable[[int, str], None]
    time_received: Callable[[str, Any, float], None]
    handlers: dict[bytes, Handler] = field(default_factory=dict)
    confirmed: dict[bytes, HeardPartition] = field(default_factory=dict)
    unkept: set[bytes] = field(default_factory=set)  # channels of which nothing is kept that has to be proved
