"""What is asked of one node's subscription. Law: the wire sees requests in the order in which they changed the tables.

So all of it is done under the mutex that the links of a replica share.

Each subscription to a partition begins under another own name, asked for before the channels, so that a channel of ours
never has a listener whom the server cannot tell from us.

Design: sections 7, 20.
"""

from __future__ import annotations

from distributed_state.port import Wire
from distributed_state.values.freshness import Freshness
from distributed_state.warm.heard import Heard, HeardPartition
from distributed_state.warm.requests import SUBSCRIBE, UNSUBSCRIBE, Requests


class NodeChannels:
    """The partitions that are heard at one node, and their channels there."""

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
