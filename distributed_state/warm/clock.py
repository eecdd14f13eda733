"""Redis' clock, as this replica estimates it. Law: deadlines are compared by one clock, whatever the workers' own say.

Between two answers it goes on by this process's monotonic clock, which no setting of the time moves: a worker's wall
clock may jump either way, and nothing ends sooner or later. The monotonic clock may stand still while a machine is
suspended; then this one is late, so that things end later and none too soon, until it asks again: at least every
minute wherever something is to be found past its deadline, and with every probe of the link.

Design: section 5.
"""

from __future__ import annotations

import math
from typing import Any

from distributed_state.errors import WarmUnavailable
from distributed_state.port import Port

_STALE = 60.0
_DRIFT = 0.0005  # a clock that is being set right runs at most that much too fast or too slow (adjtime)


class ServerClock:
    """This process's monotonic clock, set by what Redis was last heard to say."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._ahead = 0.0
        self._asked = -math.inf
        self._took = math.inf

    @property
    def known(self) -> bool:
        """Whether the server was ever heard."""
        return self._took < math.inf

    def now(self) -> float:
        """Seconds since 1970; wrong by at most half the round trip of the last answer, and what has drifted since.

        Raises WarmUnavailable if the server was never heard: no other clock is good enough to end anything by.
        """
        if not self.known:
            raise WarmUnavailable("Redis has not yet said what time it is")
        return self._port.monotonic() + self._ahead

    def earliest_ms(self) -> int:
        """Milliseconds since 1970 that the server's clock shows already; 0 if it was never heard."""
        if not self.known:
            return 0
        now = self._port.monotonic()
        return math.floor((now + self._ahead - self._took / 2 - (now - self._asked) * _DRIFT) * 1000)

    def heard(self, answer: Any, sent: float) -> None:
        """An answer of TIME to a question that was sent at this monotonic time. The quickest of a minute counts."""
        received = self._port.monotonic()
        took = received - sent
        if isinstance(answer, list) and (took <= self._took or received - self._asked > _STALE):
            server = int(answer[0]) + int(answer[1]) / 1e6
            self._ahead = server + took / 2 - received
            self._asked = received
            self._took = took

    async def know(self) -> None:
        """Ask, if nothing was heard for a minute."""
        if self._port.monotonic() - self._asked > _STALE:
            await self.ask()

    async def ask(self) -> None:
        """Ask, whatever was heard before: it proved wrong."""
        sent = self._port.monotonic()
        answer = await self._port.command(b"TIME")
        self._took = math.inf
        self.heard(answer, sent)
