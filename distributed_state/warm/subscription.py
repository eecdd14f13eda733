"""The links of this replica: what it hears of every partition, at whichever node has it. Law: a name is used once.

A write names our own channel of its partition if we hear the record's too, so that the script can see whether anybody
else does. That name says: while it has a subscriber, that one hears the record as well. So it lies in the same slot -
when that moves, the server ends both; another slot's would stay and hide that nobody else was notified - and it is
another one at each subscription - the server may keep an earlier one for long after we lost it - and from the moment on
when a channel that was named with it is left.

Each node that has partitions of which something is heard has a link of its own (`node_link`): one that falls silent
ends what hot answers of its partitions alone.

Design: sections 7, 20.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed_state.errors import WarmUnavailable
from distributed_state.port import Port
from distributed_state.values.freshness import Freshness
from distributed_state.values.keys import Keys
from distributed_state.warm.heard import Handler, Heard, HeardPartition
from distributed_state.warm.node_link import NodeLink
from distributed_state.warm.rounds import Rounds


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
