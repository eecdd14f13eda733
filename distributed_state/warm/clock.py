"""Time: this replica's estimate of Redis' clock, and the moments at which a replica sends requests that can wait.

Law: deadlines are compared by one clock, not by the workers' own. Between two answers this clock advances by the
process's monotonic clock, which is not affected by setting the time: a worker's wall clock may jump either way, and
nothing ends early or late. The monotonic clock may stop while a machine is suspended. Then this clock is late, and
deadlines pass late, never early, until the server is asked again: at least once a minute where deadlines are checked,
and with every probe of the link.

Each server of a cluster has its own clock. The earliest of them counts, for the same reason. A write states the
earliest time at which it can have been applied; it must not be later than the clock of the server that applies it.

Rounds: waking an idle server costs it more than most commands do. So an idle replica sends the probe of its link, its
heartbeat, its claims and its look at journals together, early enough for each of them. The moments of different
replicas are spread.

Design: sections 5, 12.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import Port
from distributed_state.values import chance

_STALE = 60.0
_DRIFT = 0.0005  # a clock that is being adjusted runs at most this much too fast or too slow (adjtime)
ROUND_SECONDS = 3.0  # between two common moments
_CALM = 300  # up to this many replicas have rounds of that length; in larger fleets the total rate stays the same
_RAREST = 3.0  # but no round is longer than this many times that length
_EARLY = 0.05  # a timer may be this early, and work that is due this soon is done with it


class ServerClock:
    """This process's monotonic clock, set by the last times that servers reported."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._readings: dict[str, Reading] = {}
        self._tried: dict[str, float] = {}
        self._ahead = 0.0
        self._earliest = 0.0  # like `_ahead`, for a monotonic clock that runs at the slowest possible rate

    @property
    def known(self) -> bool:
        """Whether a server has ever answered."""
        return bool(self._readings)

    def now(self) -> float:
        """Return seconds since 1970; off by at most half the round trip of the last answer, plus drift since then.

        Raises WarmUnavailable if no server has ever answered: no other clock is good enough to end anything by.
        """
        if not self._readings:
            raise WarmUnavailable("the time of Redis is not known yet")
        return self._port.monotonic() + self._ahead

    def earliest_ms(self) -> int:
        """Return a time in ms since 1970 that every server's clock has reached; 0 if none has ever answered."""
        if not self._readings:
            return 0
        return math.floor((self._port.monotonic() * (1 - _DRIFT) + self._earliest) * 1000)

    def received(self, node: str, answer: Any, sent: float) -> None:
        """Note a server's answer to TIME, asked at this monotonic time. The quickest answer of a minute counts."""
        received = self._port.monotonic()
        took = received - sent
        known = self._readings.get(node)
        if isinstance(answer, list) and (known is None or took <= known.took or received - known.asked > _STALE):
            server = int(answer[0]) + int(answer[1]) / 1e6
            self._readings = {**self._readings, node: Reading(server + took / 2 - received, received, took)}
            self._tried[node] = received
            self._take_earliest()

    def _take_earliest(self) -> None:
        readings = self._readings.values()
        self._ahead = min(each.ahead for each in readings)
        self._earliest = min(each.ahead - each.took / 2 + each.asked * _DRIFT for each in readings)

    async def know(self) -> None:
        """Ask every server that has not answered for a minute. One that fails is asked again by the next call."""
        now = self._port.monotonic()
        nodes = self._port.nodes()
        await self._ask([node for node in nodes if now - self._tried.get(node, -math.inf) > _STALE])
        gone = self._readings.keys() - set(nodes)
        if gone and len(gone) < len(self._readings):
            # A server that left the cluster must not hold back the clock.
            self._readings = {node: each for node, each in self._readings.items() if node not in gone}
            self._take_earliest()

    async def ask(self) -> None:
        """Ask all servers again: their earlier answers proved wrong."""
        nodes = self._port.nodes()
        # Infinite, so that any answer replaces it.
        self._readings = {node: replace(each, took=math.inf) for node, each in self._readings.items()}
        await self._ask(nodes)

    async def _ask(self, nodes: list[str]) -> None:
        error: StateError | None = None
        failed = []
        for node in nodes:
            sent = self._port.monotonic()
            try:
                self.received(node, await self._port.command_with(node, b"TIME"), sent)
            except StateError as problem:
                error = problem
                failed.append(node)
        if error is not None and len(failed) == len(nodes):
            raise error
        self._tried.update(dict.fromkeys(failed, self._port.monotonic()))


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer of one server: how far its clock is ahead of our monotonic one, when, and how long the answer took."""

    ahead: float
    asked: float
    took: float


class Rounds:
    """The moments, by the monotonic clock, at which one replica sends all requests that can wait."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._phase = chance.source.random() * ROUND_SECONDS
        self.seconds = ROUND_SECONDS  # between two moments, in a fleet of the size that was reported last

    def spread(self, members: int) -> None:
        """Make rounds longer in a large fleet, so that the server is not woken more often."""
        self.seconds = ROUND_SECONDS * min(max(members / _CALM, 1.0), _RAREST)

    def pause(self, seconds: float) -> float:
        """Return the seconds until the last common moment within `seconds`; all of them if less than a round."""
        if seconds < self.seconds:
            return seconds
        now = self._monotonic()
        return self._count(now + seconds) * self.seconds + self._phase - now

    def due(self, at: float) -> bool:
        """Whether this moment has come, or is at most 50 ms away."""
        return self._monotonic() + _EARLY >= at

    def passed(self, since: float) -> bool:
        """Whether a common moment has come since then."""
        return self._count(self._monotonic()) > self._count(since)

    @property
    def left(self) -> float:
        """Seconds until the next common moment."""
        return self.pause(self.seconds)

    def _count(self, at: float) -> int:
        return math.floor((at + _EARLY - self._phase) / self.seconds)
