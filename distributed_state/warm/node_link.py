"""The subscription to one node. Law: silence is never taken for calm; only an echo of our own proves the node's link.

Every so often the node is asked to run a script that writes, and publishes when it was asked. While the newest echo is
at most `max_staleness` old, all that was published before it has arrived, because one connection keeps its order. Any
other answer is silence: of a node that lost its slots, that is a replica now, that is cut off from its cluster. Where
hot keeps nothing of what the node has, it is probed once a round, and at once when something is to be kept.

What a partition's subscription is worth ends with it: when the connection is lost; when its slot moves, upon which the
server ends the subscriptions of that slot and says so; when Redis begins another life.

Design: sections 7, 20.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import Job, Port, Wire
from distributed_state.values.freshness import Freshness
from distributed_state.warm.heard import Heard, HeardPartition
from distributed_state.warm.node_channels import NodeChannels
from distributed_state.warm.rounds import SECONDS, Rounds
from distributed_state.warm.scripts import PROBE

log = logging.getLogger(__name__)
_SILENCE = 5.0  # seconds
_ROUND = 1.5  # seconds, which one round of the probe counts at most


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
        most = _SILENCE + (self._rounds.seconds - SECONDS if self._at_rest else 0.0)
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
