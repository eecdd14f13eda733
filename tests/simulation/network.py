"""What lies between replicas and servers. Law: a connection keeps its order; what overtakes went over another one.

A request and its answer each take a drawn time. A connection may be cut before the server has acted, or after it has;
a direction may be silent for a while: then messages wait, as TCP repeats them, and arrive if nobody has given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distributed_state.errors import WarmUnavailable
from distributed_state.port.lives import filled
from distributed_state.port.words import encode
from tests.simulation.node import Node
from tests.simulation.world import Future, Process, World

TO, FROM = "to", "from"  # the directions, as seen by a replica


@dataclass(slots=True)
class Silence:
    """A direction in which nothing arrives until then."""

    process: str
    direction: str
    until: float


class Network:
    """The nodes by name, and how well messages travel."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.nodes: dict[str, Node] = {}
        self.loss = 0.0  # of exchanges: half before the server acts, half after
        self.silences: list[Silence] = []
        self.lost = self.exchanges = 0

    def delay(self) -> float:
        """Seconds that one message takes: mostly half a millisecond, at times much longer."""
        draw = self.world.chance
        seconds = draw.expovariate(2000)
        return seconds + draw.uniform(0.01, 0.3) if draw.random() < 0.002 else seconds

    def arrives(self, process: Process, direction: str, not_before: float) -> float:
        """When a message sent now arrives, after all that were sent before on its connection."""
        now = self.world.now
        at = max(not_before, now + self.delay())
        for silence in self.silences:
            if silence.process == process.name and silence.direction == direction and silence.until > now:
                at = max(at, silence.until + self.delay())
        return at


class Connection:
    """One connection of a replica to a server, made in one life of its data."""

    def __init__(self, network: Network, process: Process, node: Node, on_error: Callable[[str], Exception]) -> None:
        self.network, self.process, self.node = network, process, node
        self.life = node.life.name
        self.broken: str | None = None
        self._world = network.world
        self._on_error = on_error
        self._waiting: deque[Future] = deque()
        self._sent = self._received = 0.0
        self._is_cut = False  # nothing that is on its way arrives
        self._subscription: Any = None
        node.connections[self] = None
        process.connections.append(self)

    # Requests

    def send(self, commands: Sequence[Any]) -> Future:
        """The future answers of the server to these."""
        answer = Future()
        if self.broken is not None:
            answer.settle(error=WarmUnavailable(f"connection lost: {self.broken}"))
            return answer
        network, world = self.network, self._world
        network.exchanges += 1
        sent = [filled(words, self.life) for words in commands]
        self._waiting.append(answer)
        fate = world.chance.random() / network.loss if network.loss else 1.0
        self._sent = network.arrives(self.process, TO, self._sent)
        world.after(self._sent - world.now, lambda: self._arrive(sent, answer, fate))
        return answer

    def _arrive(self, sent: list[Any], answer: Future, fate: float) -> None:
        node, world = self.node, self._world
        if self._is_cut:
            return
        if node.is_down:
            self.fail("the server closed the connection")
        elif node.frozen_until > world.now:
            # The kernel of a process that stands still takes it; it is carried out whoever has given up meanwhile.
            world.after(node.frozen_until - world.now, lambda: self._arrive(sent, answer, fate))
        elif fate < 0.5:
            self._cut("request", sent)
        else:
            answers = node.carry_out(sent)
            world.note("served", node.name, self.process.name, more=lambda: f"{shown(sent)} -> {shown(answers)}")
            if fate < 1.0:
                self._cut("answer", sent)
            else:
                self._answer(answers, sent, answer, 0, world.now)

    def _cut(self, what: str, sent: list[Any]) -> None:
        self.network.lost += 1
        self._world.note("lost", what, self.process.name, more=lambda: shown(sent))
        self._is_cut = True
        self._world.after(self.network.delay(), lambda: self.fail("the connection was cut"))

    def _answer(self, answers: list[Any], sent: list[Any], answer: Future, first: int, written: float) -> None:
        """Send the answers when those that wait for replicas or a disk are known."""
        world, node = self._world, self.node
        for at in range(first, len(answers)):
            if answers[at] in (b"WAIT", b"WAITAOF"):
                words = sent[at]
                wanted, within = int(words[1]), float(words[-1]) / 1000
                if answers[at] == b"WAIT":
                    found: Any = node.replicas_with(written)
                    enough = found >= wanted
                else:
                    found = [int(node.is_on_disk(written)), 0]
                    enough = found[0] >= wanted
                if not enough and not node.is_down and world.now < written + within:
                    world.after(0.01, lambda at=at: self._answer(answers, sent, answer, at, written))
                    return
                answers[at] = found
        self._received = self.network.arrives(self.process, FROM, self._received)
        world.after(self._received - world.now, lambda: self._deliver(answers, answer))

    def _deliver(self, answers: list[Any], answer: Future) -> None:
        if self._is_cut or self.broken is not None:
            return
        self._waiting.remove(answer)
        answer.settle([self._on_error(str(each)) if isinstance(each, Exception) else each for each in answers])

    def fail(self, why: str) -> None:
        """Give it up: whoever waits gets an error. What is on its way may still be carried out."""
        if self.broken is not None:
            return
        self.broken = why
        self._leave()
        while self._waiting:
            self._waiting.popleft().settle(error=WarmUnavailable(f"{self.node.name}: connection lost: {why}"))

    def vanish(self) -> None:
        """Its process died. What it sent may arrive, or not."""
        self._is_cut = self._world.chance.random() < 0.5
        self.broken = "the process died"
        self._leave()

    def _leave(self) -> None:
        self.node.connections.pop(self, None)
        if self._subscription is not None:
            self._world.after(self.network.delay(), self._subscription.close)


class Wire(Connection):
    """A subscription: a connection on which the server speaks by itself."""

    def __init__(self, network: Network, process: Process, node: Node) -> None:
        super().__init__(network, process, node, RuntimeError)
        self.messages: deque[list[Any]] = deque()
        self.arrived = Future()
        self._subscription = node.subscribe(self._speak)

    def _speak(self, message: list[Any]) -> None:
        self._received = self.network.arrives(self.process, FROM, self._received)
        self._world.after(self._received - self._world.now, lambda: self._hear(message))

    def _hear(self, message: list[Any]) -> None:
        if self.broken is None and not self.process.is_dead:
            self._world.note("message", self.process.name, more=lambda: shown(message))
            self.messages.append(message)
            self.arrived.settle()

    def post(self, *words: Any) -> None:
        """Send without waiting for an answer."""
        if self.broken is None:
            self._sent = self.network.arrives(self.process, TO, self._sent)
            self._world.after(self._sent - self._world.now, lambda: self._post(words))

    def _post(self, words: tuple[Any, ...]) -> None:
        node, world = self.node, self._world
        if node.is_down or self._is_cut:
            return
        if node.frozen_until > world.now:
            world.after(node.frozen_until - world.now, lambda: self._post(words))
            return
        world.server_clock = node.clock
        try:
            self._subscription.post(*map(encode, words))
        finally:
            world.server_clock = None

    def post_all(self, kind: bytes, channels: Sequence[bytes]) -> None:
        """The same, a command for each channel."""
        for channel in channels:
            self.post(kind, channel)

    def fail(self, why: str) -> None:
        """End it; whoever receives gets an error."""
        super().fail(why)
        self.arrived.settle()


def shown(thing: Any) -> str:
    """Commands and answers in a line, cut to a length that can be read."""
    if isinstance(thing, list | tuple):
        parts = [shown(each) for each in thing]
        text = f"[{' '.join(parts)}]"
    elif isinstance(thing, bytes):
        text = thing.decode(errors="backslashreplace")
    else:
        text = str(thing)
    return text if len(text) <= 120 else f"{text[:90]}...{text[-27:]}"
