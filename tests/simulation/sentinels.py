"""Sentinels that watch the servers of a group. Law: each answers from its own view, which may be out of date.

They detect a primary that is down, frozen or cut off from them, promote a replica, and demote any other server that
calls itself a primary once they reach it. The time at which each Sentinel learns of a failover is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from distributed_state.port.commands import ReplyError
from tests.simulation.node import Node
from tests.simulation.replication import Group

SERVICE = "main"
NAMES = tuple(f"sentinel{at}:26379" for at in range(3))
_QUORUM = 2
_EVERY = 0.1  # seconds between two checks of the servers
_SILENT_FOR = 0.4  # seconds for which a primary may be silent


@dataclass(eq=False)
class Sentinel:
    """A Sentinel and the failover that it knows. `listed`: the primary whose replicas it lists, `primary` later."""

    group: Group
    name: str
    primary: str
    listed: str
    epoch: int = 0
    frozen_until = 0.0
    member = None  # it is in no cluster
    away_until: float = 0.0
    alone_until: float = 0.0  # cut off from the others, but not from clients
    hears: dict[Callable[[], None], None] = field(default_factory=dict)

    @property
    def is_down(self) -> bool:
        """Whether it does not answer."""
        return self.away_until > self.group.world.now

    def answer(self, commands: Sequence[Sequence[bytes]]) -> list[Any]:
        """What it answers."""
        return [self._said(words) for words in commands]

    def _said(self, words: Sequence[bytes]) -> Any:
        assert words[0] == b"SENTINEL", words
        if words[2] != SERVICE.encode():
            return ReplyError("ERR No such master with that name")
        match words[1]:
            case b"GET-MASTER-ADDR-BY-NAME":
                return _address(self.primary)
            case b"MASTER":
                host, port = _address(self.listed)
                epoch, quorum = b"%d" % self.epoch, b"%d" % _QUORUM
                return [b"name", words[2], b"ip", host, b"port", port, b"config-epoch", epoch, b"quorum", quorum]
            case b"CKQUORUM":
                return b"OK"
        assert words[1] == b"REPLICAS", words
        listed = [(each, *_address(each)) for each in self.group.names if each != self.listed]
        return [
            [b"name", each.encode(), b"ip", host, b"port", port, b"slave-priority", b"100"]
            for each, host, port in listed
        ]


class Sentinels:
    """All that watch one group."""

    def __init__(self, group: Group) -> None:
        self.group, self.world = group, group.world
        self.all = {name: Sentinel(group, name, group.primary_name, group.primary_name) for name in NAMES}
        self.epoch = 0
        self.cut_off: dict[str, float] = {}  # servers cut off from all others and from the Sentinels, until when
        self._missed: float | None = None  # since when the primary has been silent
        self._electing = False
        self._due: dict[str, float] = {}  # when a server will be told to follow the primary
        self._tick()

    # What they see and do

    def sees(self, node: Node) -> bool:
        """Whether a server answers them."""
        now = self.world.now
        return not node.is_down and node.frozen_until <= now and self.cut_off.get(node.name, 0.0) <= now

    def is_settled(self) -> bool:
        """Whether all servers follow the primary, and all Sentinels know it."""
        primary = self.group.primary
        return (
            self.sees(primary)
            and all(each is primary or self._follows(each) for each in self.group.nodes())
            and all(each.listed == each.primary == primary.name for each in self.all.values())
        )

    def _follows(self, node: Node) -> bool:
        link = node.link
        return link is not None and link.source is self.group.primary and self.world.now < link.cut_at

    def _tick(self) -> None:
        world, primary = self.world, self.group.primary
        world.after(_EVERY, self._tick)
        if self.sees(primary):
            self._missed = None
        elif self._missed is None:
            self._missed = world.now
        elif world.now - self._missed >= _SILENT_FOR and not self._electing:
            self._electing = True
            world.after(world.chance.uniform(0.0, 0.4), self._elect)
        for node in self.group.nodes():
            if node is primary or not (self.sees(node) and self.sees(primary)) or self._follows(node):
                self._due.pop(node.name, None)
            elif world.now >= self._due.setdefault(node.name, world.now + world.chance.uniform(0.1, 1.5)):
                self.group.attach(node.name, after=world.chance.uniform(0.01, 0.4), kills=True)

    def _elect(self) -> None:
        self._electing = False
        if not self.sees(self.group.primary):
            self.hand_over()

    def hand_over(self) -> None:
        """Promote another server, whatever the state of the primary. Does nothing if that is impossible."""
        world, group = self.world, self.group
        voting = [each for each in self.all.values() if max(each.away_until, each.alone_until) <= world.now]
        replicas = [each for each in group.nodes() if each.link is not None and self.sees(each)]
        replicas = [each for each in replicas if each.link is not None and each.link.reached(world.now) >= 0]
        if len(voting) < _QUORUM or not replicas:
            return
        best = max(replicas, key=self._reached)
        group.promote(best.name)
        self.epoch += 1
        self._missed = None
        leader = world.chance.choice(voting)
        for each in self.all.values():
            if each is leader:
                # It names the new primary once that has confirmed its role, and later lists its replicas.
                world.after(world.chance.uniform(0.0, 0.3), partial(self._learn, each, self.epoch, is_leader=True))
            world.after(world.chance.uniform(0.3, 1.2), partial(self._learn, each, self.epoch))

    def _reached(self, node: Node) -> tuple[float, str]:
        assert node.link is not None
        return node.link.reached(self.world.now), node.name

    def _learn(self, sentinel: Sentinel, epoch: int, *, is_leader: bool = False) -> None:
        """Let one Sentinel learn what all agreed on."""
        world = self.world
        if (later := max(sentinel.away_until, sentinel.alone_until)) > world.now:
            world.at(later, partial(self._learn, sentinel, epoch))
            return
        if epoch != self.epoch:
            return  # it will learn of a later one
        sentinel.epoch, sentinel.primary = epoch, self.group.primary_name
        if not is_leader:
            sentinel.listed = sentinel.primary
        world.note("sentinel", sentinel.name, f"names {sentinel.primary} under {epoch}")
        for hear in list(sentinel.hears):
            hear()  # +promoted-slave, or +switch-master

    # Faults

    def isolate(self, name: str, seconds: float) -> None:
        """Cut a server off from the others and from all Sentinels; clients may still reach it."""
        now = self.world.now
        self.cut_off[name] = max(self.cut_off.get(name, 0.0), now + seconds)
        self.world.note("cut off", name, f"{seconds:.3f}")
        for node in self.group.nodes():
            if node.name == name or (node.link is not None and node.link.source.name == name):
                self.group.cut(node.name)

    def heal(self) -> None:
        """End all cuts and outages."""
        self.cut_off.clear()
        for each in self.all.values():
            each.away_until = each.alone_until = 0.0


def _address(name: str) -> list[bytes]:
    host, _, port = name.rpartition(":")
    return [host.encode(), port.encode()]
