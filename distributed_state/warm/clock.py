"""Redis' clock, as this replica estimates it. Law: deadlines are compared by one clock, whatever the workers' own say.

Between two answers it goes on by this process's monotonic clock, which no setting of the time moves: a worker's wall
clock may jump either way, and nothing ends sooner or later. The monotonic clock may stand still while a machine is
suspended; then this one is late, so that things end later and none too soon, until it asks again: at least every
minute wherever something is to be found past its deadline, and with every probe of the link.

Each server of a cluster has a clock of its own. What counts is the earliest of them, for the same reason; and a write
says since when it can have been applied, which must not be later than what the server's clock shows that applies it.

Design: section 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import Port

_STALE = 60.0
_DRIFT = 0.0005  # a clock that is being set right runs at most that much too fast or too slow (adjtime)


@dataclass(frozen=True, slots=True)
class Heard:
    """What one server said: how far its clock is ahead of our monotonic one, when, and how long the answer took."""

    ahead: float
    asked: float
    took: float


class ServerClock:
    """This process's monotonic clock, set by what the servers were last heard to say."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._heard: dict[str, Heard] = {}
        self._tried: dict[str, float] = {}
        self._ahead = 0.0
        self._earliest = 0.0  # as `_ahead`, of a clock that runs slow by as much as it may, since the start of ours

    @property
    def known(self) -> bool:
        """Whether a server was ever heard."""
        return bool(self._heard)

    def now(self) -> float:
        """Seconds since 1970; wrong by at most half the round trip of the last answer, and what has drifted since.

        Raises WarmUnavailable if no server was ever heard: no other clock is good enough to end anything by.
        """
        if not self._heard:
            raise WarmUnavailable("Redis has not yet said what time it is")
        return self._port.monotonic() + self._ahead

    def earliest_ms(self) -> int:
        """Milliseconds since 1970 that the clock of every server shows already; 0 if none was ever heard."""
        if not self._heard:
            return 0
        return math.floor((self._port.monotonic() * (1 - _DRIFT) + self._earliest) * 1000)

    def heard(self, node: str, answer: Any, sent: float) -> None:
        """A server's answer of TIME to a question sent at this monotonic time. The quickest of a minute counts."""
        received = self._port.monotonic()
        took = received - sent
        known = self._heard.get(node)
        if isinstance(answer, list) and (known is None or took <= known.took or received - known.asked > _STALE):
            server = int(answer[0]) + int(answer[1]) / 1e6
            self._heard = {**self._heard, node: Heard(server + took / 2 - received, received, took)}
            self._tried[node] = received
            self._take_earliest()

    def _take_earliest(self) -> None:
        heard = self._heard.values()
        self._ahead = min(each.ahead for each in heard)
        self._earliest = min(each.ahead - each.took / 2 + each.asked * _DRIFT for each in heard)

    async def know(self) -> None:
        """Ask every server of which nothing was heard for a minute. One that does not answer is left to the next."""
        now = self._port.monotonic()
        nodes = self._port.nodes()
        await self._ask([node for node in nodes if now - self._tried.get(node, -math.inf) > _STALE])
        gone = self._heard.keys() - set(nodes)
        if gone and len(gone) < len(self._heard):
            # One that has left must not hold up the clock of those that are there.
            self._heard = {node: each for node, each in self._heard.items() if node not in gone}
            self._take_earliest()

    async def ask(self) -> None:
        """Ask, whatever was heard before: it proved wrong."""
        nodes = self._port.nodes()
        # Any answer is quicker than this.
        self._heard = {node: replace(each, took=math.inf) for node, each in self._heard.items()}
        await self._ask(nodes)

    async def _ask(self, nodes: list[str]) -> None:
        error: StateError | None = None
        failed = []
        for node in nodes:
            sent = self._port.monotonic()
            try:
                self.heard(node, await self._port.command_with(node, b"TIME"), sent)
            except StateError as problem:
                error = problem
                failed.append(node)
        if error is not None and len(failed) == len(nodes):
            raise error
        self._tried.update(dict.fromkeys(failed, self._port.monotonic()))
