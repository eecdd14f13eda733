"""Redis' clock, as this replica knows it. Law: deadlines are compared by one clock, whatever the workers' own say."""

from __future__ import annotations

import math
from typing import Any

from distributed_state.port import Port

_STALE = 60.0


class ServerClock:
    """This process's clock, corrected by what Redis was last heard to say."""

    def __init__(self, port: Port) -> None:
        self._port, self._ahead, self._asked, self._took = port, 0.0, -math.inf, math.inf

    def now(self) -> float:
        """Seconds since 1970; wrong by at most half the round trip of the last answer, and what has drifted since."""
        return self._port.wall() + self._ahead

    def heard(self, answer: Any, sent: float) -> None:
        """An answer of TIME to a question that was sent at this monotonic time. The quickest of a minute counts."""
        received = self._port.monotonic()
        took = received - sent
        if isinstance(answer, list) and (took <= self._took or received - self._asked > _STALE):
            server = int(answer[0]) + int(answer[1]) / 1e6
            self._ahead = server + took / 2 - self._port.wall()
            self._asked, self._took = received, took

    async def know(self) -> None:
        """Ask, if nothing was heard for a minute."""
        sent = self._port.monotonic()
        if sent - self._asked > _STALE:
            self.heard(await self._port.command(b"TIME"), sent)
