"""A primary and the servers that follow it. Law: a promoted server continues with the data that it had.

Writes that the former primary acknowledged and the new one did not have are lost, until the former primary follows the
new one: until then it may accept more writes that will be lost, because it does not know that it was replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from distributed_state.port.identities import ServerIdentity
from tests.simulation.network import Network, Wire
from tests.simulation.node import Node, Persistence
from tests.simulation.world import Clock

_AHEAD = 0.02  # seconds by which the clock of a replica may be wrong


@dataclass(slots=True)
class Loss:
    """Writes that a server lost: all in this interval. `former`: the primary that may still be writing."""

    since: float
    until: float
    former: str = ""
    is_takeover: bool = False
    is_flush: bool = False  # whether they were deleted by a command, which no disk and no replica prevents


class Group:
    """Servers with the same data. The first one is the primary at the start.

    `lags`: seconds by which each of the others is behind; `identity`: makes a new id for data and process.
    """

    def __init__(
        self, network: Network, persistence: Persistence, names: Sequence[str], lags: Sequence[float],
        identity: Callable[[], ServerIdentity],
    ) -> None:  # fmt: skip
        self.network, self.world = network, network.world
        self.names = list(names)
        self.primary_name = self.names[0]
        self.losses: list[Loss] = []
        self.lags = dict(zip(self.names[1:], lags, strict=True)) | {self.names[0]: max(lags, default=0.05)}
        self._lags = dict(self.lags)
        self._identity = identity
        for name in self.names:
            self.network.nodes[name] = Node(self.world, name, identity(), persistence)
        for name in self.names[1:]:
            node = self.network.nodes[name]
            node.clock = Clock(self.world, self.world.chance.uniform(-_AHEAD, _AHEAD))
            node.follow(self.primary, self.lags[name], 0.0)

    @property
    def primary(self) -> Node:
        """The current primary, even if others accept writes."""
        return self.network.nodes[self.primary_name]

    def nodes(self) -> list[Node]:
        """All servers of the group."""
        return [self.network.nodes[name] for name in self.names]

    # Who follows whom

    @property
    def takeovers(self) -> list[tuple[float, float]]:
        """The intervals of writes that were lost because a replica with less data took over."""
        return [(each.since, each.until) for each in self.losses if each.is_takeover]

    def promote(self, name: str) -> None:
        """Make a replica the primary, with its present data. The former primary and other replicas are not notified."""
        node, now = self.network.nodes[name], self.world.now
        assert node.link is not None, "a primary needs no promotion"
        since = node.log[-1][0] if node.catch_up() and node.log else -1.0
        # Writes of the former primary at the same time as the last entry that arrived have arrived, too.
        self.losses.append(Loss(since, math.inf, self.primary_name, is_takeover=True))
        self.world.note("promoted", name, f"has what was written up to {since:.3f}")
        node.promote(self._identity().data)
        self.primary_name = name
        assert not now < since

    def attach(self, name: str, *, after: float = 0.0, kills: bool = False) -> None:
        """Let a server follow the primary: after `after` seconds it has the primary's data, and lost its own writes.

        `kills`: it first closes its clients' connections, as after a command of a Sentinel.
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
        """Let a replica receive nothing from its primary from now on."""
        link = self.network.nodes[name].link
        if link is not None:
            link.cut_at = min(link.cut_at, self.world.now)

    def cut_replicas(self, name: str) -> None:
        """Let all followers of a server receive nothing from it from now on."""
        for each in self.network.nodes[name].followers:
            self.cut(each.name)

    def rename(self) -> None:
        """Change the id of the primary's data, as a server does for its first replica if it never followed another."""
        node = self.primary
        if node.identity.former or node.is_down:
            return
        node.identity = ServerIdentity(self._identity().data, node.identity.process, True)
        self.world.note("renamed", node.name, node.identity.data_id)
        for each in list(node.followers):
            self.attach(each.name)

    def slow(self, lag: float, seconds: float) -> None:
        """Let all replicas lag by this much for a while."""
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
        """Make the primary follow a replica that is behind it, and then promote it again; connections stay open."""
        primary, copy = self.primary, self.network.nodes[name]
        if primary.is_down or copy.is_down or not copy.catch_up():
            return
        since = copy.log[-1][0] if copy.log else -1.0
        self.losses.append(Loss(since, self.world.now, is_takeover=True))
        self.world.note("made older", primary.name, f"as {name} at {since:.3f}")
        copy.promote(self._identity().data)
        primary.follow(copy, 0.0, self.world.now)
        primary.promote(self._identity().data)
        for each in [each for each in self.names if each != primary.name]:
            if (link := self.network.nodes[each].link) is None or link.source in (primary, copy):
                self.attach(each, after=0.01)

    # Faults of one server

    def stop(self, name: str, *, away: float, power_cut: bool) -> bool:
        """Let a server die and restart with the data in its file; a power cut removes what was not synced.

        Returns False if it is down already.
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
        made = self.network.nodes[name] = old.rebuilt(kept, self._identity())
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
        """Let a server close all connections, as CLIENT KILL does."""
        for connection in list(node.connections):
            connection.fail("the server closed the connection")

    def drop_subscribers(self) -> None:
        """Let the primary close all subscriptions, as it does for slow subscribers."""
        for connection in list(self.primary.connections):
            if isinstance(connection, Wire):
                connection.fail("the server closed the connection")
