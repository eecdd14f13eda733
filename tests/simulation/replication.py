"""Servers of which one is the primary and the others follow it. Law: who is promoted goes on with what it had.

What the former primary acknowledged and the new one did not have is lost there, until the former one follows, too: so
long it may take writes, as it does not know that it was replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from distributed_state.port.facts import Life
from tests.simulation.network import Network, Wire
from tests.simulation.node import Node, Persistence
from tests.simulation.world import Clock

_AHEAD = 0.02  # seconds that the clock of a replica may be wrong


@dataclass(slots=True)
class Loss:
    """What a server lost: all that it wrote from when to when. `former`: the primary that may still be writing."""

    since: float
    until: float
    former: str = ""
    is_takeover: bool = False


class Group:
    """Servers that hold the same, of which the first is the primary in the beginning.

    `lags`: how many seconds each of the others is behind; `life`: makes a new name for data and process.
    """

    def __init__(
        self, network: Network, persistence: Persistence, names: Sequence[str], lags: Sequence[float],
        life: Callable[[], Life],
    ) -> None:  # fmt: skip
        self.network, self.world = network, network.world
        self.names = list(names)
        self.primary_name = self.names[0]
        self.losses: list[Loss] = []
        self.lags = dict(zip(self.names[1:], lags, strict=True)) | {self.names[0]: max(lags, default=0.05)}
        self._lags = dict(self.lags)
        self._life = life
        for name in self.names:
            self.network.nodes[name] = Node(self.world, name, life(), persistence)
        for name in self.names[1:]:
            node = self.network.nodes[name]
            node.clock = Clock(self.world, self.world.chance.uniform(-_AHEAD, _AHEAD))
            node.follow(self.primary, self.lags[name], 0.0)

    @property
    def primary(self) -> Node:
        """The one that counts, whoever else takes writes."""
        return self.network.nodes[self.primary_name]

    def nodes(self) -> list[Node]:
        """All of them."""
        return [self.network.nodes[name] for name in self.names]

    # Who follows whom

    @property
    def takeovers(self) -> list[tuple[float, float]]:
        """What was lost as a replica took over, which had less."""
        return [(each.since, each.until) for each in self.losses if each.is_takeover]

    def promote(self, name: str) -> None:
        """Make a replica the primary, with what it has. The former one is not told, nor are other replicas."""
        node, now = self.network.nodes[name], self.world.now
        assert node.link is not None, "a primary needs no promotion"
        since = node.log[-1][0] if node.catch_up() and node.log else -1.0
        # What the former primary wrote in the moment of the last entry that arrived had arrived, too.
        self.losses.append(Loss(since, math.inf, self.primary_name, is_takeover=True))
        self.world.note("promoted", name, f"has what was written up to {since:.3f}")
        node.promote(self._life().data)
        self.primary_name = name
        assert not now < since

    def attach(self, name: str, *, after: float = 0.0, kills: bool = False) -> None:
        """Let one follow the primary: it has what that has after so many seconds, and loses what it alone had.

        `kills`: it ends its clients' connections first, as when a Sentinel tells it to.
        """
        node, now = self.network.nodes[name], self.world.now
        if node.link is None:
            self.world.note("demoted", name)
            for loss in self.losses:
                if loss.former == name:
                    loss.until, loss.former = min(loss.until, now), ""
        node.follow(self.primary, self.lags[name], now + after)
        if kills:
            self.kill_clients(node)

    def cut(self, name: str) -> None:
        """Let a replica hear nothing of its primary from now on."""
        link = self.network.nodes[name].link
        if link is not None:
            link.cut_at = min(link.cut_at, self.world.now)

    def cut_replicas(self, name: str) -> None:
        """Let all that follow this one hear nothing of it from now on."""
        for each in self.network.nodes[name].followers:
            self.cut(each.name)

    def rename(self) -> None:
        """Let the primary call its data otherwise, as one that never followed does for its first replica."""
        node = self.primary
        if node.life.former or node.is_down:
            return
        node.life = Life(self._life().data, node.life.process, True)
        self.world.note("renamed", node.name, node.life.name)
        for each in list(node.followers):
            self.attach(each.name)

    def slow(self, lag: float, seconds: float) -> None:
        """Let all replicas be so much further behind for a while."""
        now = self.world.now
        for each in self.primary.followers:
            if each.link is not None:
                each.link.slow(lag, now)
        self.lags = {name: max(before, lag) for name, before in self._lags.items()}
        self.world.note("slow", f"{lag:.3f} s behind for {seconds:.3f}")
        self.world.after(seconds, self._hurry)

    def _hurry(self) -> None:
        self.lags = dict(self._lags)
        for each in self.primary.followers:
            if each.link is not None:
                each.link.slow(self.lags[each.name], self.world.now)

    def make_older(self, name: str) -> None:
        """Make the primary a replica of one that is behind it, and then the primary again; connections stay."""
        primary, copy = self.primary, self.network.nodes[name]
        if primary.is_down or copy.is_down or not copy.catch_up():
            return
        since = copy.log[-1][0] if copy.log else -1.0
        self.losses.append(Loss(since, self.world.now, is_takeover=True))
        self.world.note("made older", primary.name, f"as {name} at {since:.3f}")
        copy.promote(self._life().data)
        primary.follow(copy, 0.0, self.world.now)
        primary.promote(self._life().data)
        for each in [each for each in self.names if each != primary.name]:
            if (link := self.network.nodes[each].link) is None or link.source in (primary, copy):
                self.attach(each, after=0.01)

    # Faults of one server

    def stop(self, name: str, *, away: float, power_cut: bool) -> bool:
        """Let a server die, and come back as what it was with what its file has; a power cut takes what was not synced.

        False if it is down already.
        """
        old, world = self.network.nodes[name], self.world
        if old.is_down:
            return False
        died = old.died_at = world.now
        kept = old.kept_until(died) if power_cut or old.persistence.mode in ("none", "rdb") else died
        world.note("server dies", name, f"keeps {kept:.3f}")
        old.is_down = True
        if old.member is not None:
            old.member.falls_silent(away)
        for connection in list(old.connections):
            world.after(self.network.delay(), partial(connection.fail, "the server closed the connection"))
        world.after(away, lambda: self._back(name, old, kept))
        return True

    def _back(self, name: str, old: Node, kept: float) -> None:
        made = self.network.nodes[name] = old.rebuilt(kept, self._life())
        self.world.note("server is back", name)
        if old.member is not None:
            old.member.started(made)
        if name == self.primary_name:
            self.losses.append(Loss(kept, old.died_at))
        if old.link is not None:
            old.leave()
            made.follow(self.primary, self.lags[name], self.world.now + self.world.chance.uniform(0.0, 0.3))
        for each in list(old.followers):
            each.follow(made, self.lags[each.name], self.world.now + self.world.chance.uniform(0.0, 0.3))

    def kill_clients(self, node: Node) -> None:
        """Let a server end all connections, as CLIENT KILL does."""
        for connection in list(node.connections):
            connection.fail("the server closed the connection")

    def drop_subscribers(self) -> None:
        """Let the primary end all subscriptions, as it does with subscribers that are too slow."""
        for connection in list(self.primary.connections):
            if isinstance(connection, Wire):
                connection.fail("the server closed the connection")
