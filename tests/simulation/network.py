"""The network between replicas and servers. Law: a connection keeps its order; only another connection can overtake it.

A request and its answer each take a drawn time. A connection may be cut before or after the server has acted. A
direction may be silent for a while: messages then wait, as TCP retransmits them, and arrive unless the client gave up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from distributed_state.errors import WarmUnavailable
from distributed_state.port.commands import ReplyError, encode, filled
from tests.simulation.node import Node
from tests.simulation.world import Future, Process, World

TO, FROM = "to", "from"  # the directions, as seen by a replica
SLOW = 0.002  # fraction of messages that take long
_WAITS = (b"WAIT", b"WAITAOF")


class Server(Protocol):
    """A peer that answers: a server, or a Sentinel."""

    name: str
    frozen_until: float

    @property
    def is_down(self) -> bool: ...


@dataclass(slots=True)
class Silence:
    """A direction in which nothing arrives until a certain time; "" stands for every process, and for every node."""

    process: str
    direction: str
    until: float
    node: str = ""

    def is_between(self, process: Process, node: Server) -> bool:
        """Whether it affects messages between these two."""
        return self.process in ("", process.name) and self.node in ("", node.name)


class Network:
    """The nodes by name, and the quality of the network."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.nodes: dict[str, Node] = {}
        self.loss = 0.0  # fraction of exchanges that are lost: half before the server acts, half after
        self.slow = SLOW
        self.silences: list[Silence] = []
        self.held = b""  # requests that contain these bytes are held, with those that follow them on the connection
        self.lost = self.exchanges = 0

    def delay(self) -> float:
        """Seconds that one message takes: usually half a millisecond, sometimes much longer."""
        draw = self.world.chance
        seconds = draw.expovariate(2000)
        return seconds + draw.uniform(0.01, 0.3) if draw.random() < self.slow else seconds

    def is_heard(self, process: Process, node: Server) -> bool:
        """Whether a process would get an answer from a server now."""
        now = self.world.now
        if node.is_down or node.frozen_until > now:
            return False
        return not any(each.until > now and each.is_between(process, node) for each in self.silences)

    def arrives(self, process: Process, node: Server, direction: str, not_before: float) -> float:
        """When a message sent now arrives: after all messages sent earlier on its connection."""
        now = self.world.now
        at = max(not_before, now + self.delay())
        for silence in self.silences:
            if silence.until > now and silence.is_between(process, node) and silence.direction == direction:
                at = max(at, silence.until + self.delay())
        return at


class Connection:
    """One connection of a replica to a server, made under one data id of the server."""

    def __init__(
        self,
        network: Network,
        process: Process,
        node: Node,
        on_error: Callable[[str], Exception],
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.network, self.process, self.node = network, process, node
        self.data_id = node.identity.data_id
        self.broken: str | None = None
        self._world = network.world
        self._on_error, self._lost = on_error, lost
        self._waiting: deque[Future] = deque()
        self._sent = self._received = 0.0
        self._is_cut = False  # messages in transit do not arrive
        self._inbox: deque[partial[None]] = deque()  # arrived, but not executed yet
        self._is_blocked = False  # by a command that waits, such as WAIT
        self._thaws = 0.0  # the end of the server's freeze, at which `serve` is due
        self._subscription: Any = None
        node.connections[self] = None
        process.connections.append(self)

    # Requests

    def send(self, commands: Sequence[Any]) -> Future:
        """The future answers of the server to these commands. Raises like the real one for a word of a wrong type."""
        answer = Future()
        sent = [tuple(map(encode, filled(words, self.data_id))) for words in commands]
        if self.broken is not None:
            answer.settle(error=WarmUnavailable(f"connection lost: {self.broken}"))
            return answer
        network = self.network
        network.exchanges += 1
        self._waiting.append(answer)
        fate = self._world.chance.random() / network.loss if network.loss else 1.0
        self._transmit(partial(self._work, sent, answer, fate, []))
        return answer

    def _transmit(self, request: partial[None]) -> None:
        self._sent = self.network.arrives(self.process, self.node, TO, self._sent)
        self._world.at(self._sent, lambda: self._arrive(request))

    def _arrive(self, request: partial[None]) -> None:
        # The kernel of a frozen process accepts the request; it is executed even if its sender has given up meanwhile.
        self._inbox.append(request)
        self.serve()

    def serve(self) -> None:
        """Let the server execute the requests that have arrived, in order, unless it is frozen or down."""
        node, world = self.node, self._world
        while self._inbox and not self._is_blocked:
            if self._is_cut or node.is_down:
                self._inbox.clear()
                if not self._is_cut:
                    self.fail("the server closed the connection")
            elif node.frozen_until > world.now:
                if self._thaws != node.frozen_until:
                    self._thaws = node.frozen_until
                    world.at(node.frozen_until, self.serve)
                return
            elif (held := self.network.held) and any(
                held in word for words in self._inbox[0].args[0] for word in words
            ):
                return
            else:
                self._inbox.popleft()()

    def _is_held(self, commands: list[tuple[bytes, ...]]) -> bool:
        return any(self.network.held in word for words in commands for word in words)

    def _work(self, sent: list[Any], answer: Future, fate: float, answers: list[Any]) -> None:
        """Execute the commands without an answer, up to one that waits; the commands after it wait, too."""
        node, world = self.node, self._world
        if fate < 0.5:
            self._cut("request", sent)
            return
        at = len(answers)
        end = next((each for each in range(at, len(sent)) if sent[each][0] in _WAITS), len(sent))
        answers += node.answer(sent[at : end + 1])
        if fate < 1.0:
            self._cut("answer", sent)
        elif end < len(sent) and answers[-1] in _WAITS:
            self._is_blocked = True
            self._look(sent, answer, answers, world.now)
        elif len(answers) < len(sent):
            self._work(sent, answer, fate, answers)
        else:
            world.note("served", node.name, self.process.name, more=lambda: f"{shown(sent)} -> {shown(answers)}")
            self._received = self.network.arrives(self.process, self.node, FROM, self._received)
            world.at(self._received, lambda: self._deliver(answers, answer))

    def _look(self, sent: list[Any], answer: Future, answers: list[Any], since: float) -> None:
        """Check whether enough replicas, or the disk, have everything written up to that time."""
        world, node = self._world, self.node
        if node.is_down or self._is_cut:
            return
        if node.frozen_until > world.now:
            world.at(node.frozen_until, lambda: self._look(sent, answer, answers, since))
            return
        words = sent[len(answers) - 1]
        if node.link is not None:
            answers[-1] = ReplyError("UNBLOCKED force unblock from blocking operation, instance state changed")
            self._go_on(sent, answer, answers)
            return
        wanted, within = int(words[1]), float(words[-1]) / 1000 or math.inf
        if words[0] == b"WAIT":
            found: Any = node.replicas_with(since)
            is_enough = found >= wanted
        else:
            found = [int(node.is_on_disk(since)), 0]
            is_enough = found[0] >= wanted
        if not is_enough and world.now < since + within:
            world.after(0.01, lambda: self._look(sent, answer, answers, since))
            return
        answers[-1] = found
        self._go_on(sent, answer, answers)

    def _go_on(self, sent: list[Any], answer: Future, answers: list[Any]) -> None:
        self._is_blocked = False
        self._work(sent, answer, 1.0, answers)
        self.serve()

    def _cut(self, what: str, sent: list[Any]) -> None:
        self.network.lost += 1
        self._world.note("lost", what, self.process.name, more=lambda: shown(sent))
        self._is_cut = True
        self._world.after(self.network.delay(), lambda: self.fail("the connection was cut"))

    def _deliver(self, answers: list[Any], answer: Future) -> None:
        if self._is_cut or self.broken is not None:
            return
        self._waiting.remove(answer)
        answer.settle([self._on_error(str(each)) if isinstance(each, Exception) else each for each in answers])

    def fail(self, why: str) -> None:
        """Give the connection up: waiters get an error. Requests in transit may still be executed."""
        if self.broken is not None:
            return
        self.broken = why
        self._leave()
        self._lost()
        while self._waiting:
            self._waiting.popleft().settle(error=WarmUnavailable(f"{self.node.name}: connection lost: {why}"))

    def vanish(self) -> None:
        """Its process died. Requests that it sent may or may not arrive."""
        self._is_cut = self._world.chance.random() < 0.5
        self.broken = "the process died"
        self._leave()

    def _leave(self) -> None:
        self.node.connections.pop(self, None)
        if self._subscription is not None:
            self._world.after(self.network.delay(), self._subscription.close)


class Wire(Connection):
    """A subscription: a connection on which the server sends messages by itself."""

    def __init__(self, network: Network, process: Process, node: Node) -> None:
        super().__init__(network, process, node, RuntimeError)
        self.messages: deque[list[Any]] = deque()
        self.arrived = Future()
        self._subscription = node.subscribe(self._speak)

    def _speak(self, message: list[Any]) -> None:
        self._received = self.network.arrives(self.process, self.node, FROM, self._received)
        self._world.at(self._received, lambda: self._hear(message))

    def _hear(self, message: list[Any]) -> None:
        if self.broken is None and not self._is_cut and not self.process.is_dead:
            self._world.note("message", self.process.name, more=lambda: shown(message))
            self.messages.append(message)
            self.arrived.settle()

    def post(self, *words: Any) -> None:
        """Send without waiting for an answer."""
        encoded = tuple(map(encode, words))
        if self.broken is None:
            self._transmit(partial(self._post, [encoded]))

    def _post(self, commands: list[tuple[bytes, ...]]) -> None:
        self._world.server_clock = self.node.clock
        try:
            for words in commands:
                member = self.node.member
                refused = member.refusal(words) if member is not None and len(words) > 1 else None
                if refused is None:
                    self._subscription.post(*words)
                else:
                    self._subscription.receive(refused)
        finally:
            self._world.server_clock = None

    def post_all(self, kind: bytes, channels: Sequence[bytes]) -> None:
        """Post one such command for each channel."""
        for channel in channels:
            self.post(kind, channel)

    def fail(self, why: str) -> None:
        """End the subscription; a receiver gets an error."""
        super().fail(why)
        self.arrived.settle()


def shown(thing: Any) -> str:
    """Commands and answers in one line of readable length."""
    if isinstance(thing, list | tuple):
        parts = [shown(each) for each in thing]
        text = f"[{' '.join(parts)}]"
    elif isinstance(thing, bytes):
        text = thing.decode(errors="backslashreplace")
    else:
        text = str(thing)
    return text if len(text) <= 120 else f"{text[:90]}...{text[-27:]}"
