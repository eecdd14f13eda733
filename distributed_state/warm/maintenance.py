"""Planned maintenance: when it ends, who announced it, and why. Law: while Redis is away, the end last read counts.

The alerts about restarts are silent until the end; those about lost or refused data are not. Redis may be restarted
during the maintenance, and return without the key: then each replica keeps what it read before. So `finish` writes the
end, and does not remove the key. The key never expires, because Redis under a volatile policy may evict keys that do.

Design: section 27.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from distributed_state.errors import InvalidValue, StateError
from distributed_state.port import Port
from distributed_state.values import codec
from distributed_state.values.keys import Keys
from distributed_state.warm.client import Warm

log = logging.getLogger(__name__)
LONGEST = 4 * 3600.0
"""Seconds: a forgotten maintenance would keep alerts silent."""
_LETTERS = 200


@dataclass(frozen=True, slots=True)
class Announced:
    """A maintenance until `ends`, in seconds since 1970 by the clock of Redis."""

    ends: float
    by: str
    reason: str

    def __str__(self) -> str:
        until = datetime.fromtimestamp(self.ends, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"maintenance until {until}, announced by {self.by}" + (f": {self.reason}" if self.reason else "")


class Maintenance:
    """Announces maintenance to all replicas, and remembers the last announcement."""

    def __init__(self, port: Port, warm: Warm, keys: Keys) -> None:
        self._port = port
        self._warm = warm
        self._keys = keys
        self._known: Announced | None = None

    @property
    def seconds(self) -> float | None:
        """Seconds until the end that was last read, 0 without maintenance; None until the time of Redis is known."""
        if not self._warm.clock.known:
            return None
        return 0.0 if self._known is None else max(0.0, self._known.ends - self._warm.clock.now())

    @property
    def current(self) -> Announced | None:
        """The maintenance that was last read, if it has not ended."""
        return self._known if self.seconds else None

    async def begin(self, seconds: float, by: str, reason: str = "") -> Announced:
        """Announce maintenance from now on; it replaces an earlier one. Raises InvalidValue, WarmUnavailable."""
        if not 0 < seconds <= LONGEST:
            raise InvalidValue(f"maintenance lasts more than 0 s and at most {LONGEST / 3600:g} h, not {seconds:g} s")
        for what, text in {"by": by, "reason": reason}.items():
            if len(text) > _LETTERS or not text.isprintable():
                raise InvalidValue(f"{what} is a printable text of at most {_LETTERS} characters, not {text!r:.80}")
        return await self._write(seconds, by, reason)

    async def finish(self, by: str) -> None:
        """End the maintenance now. Raises WarmUnavailable."""
        await self._write(0.0, by, "")

    async def _write(self, seconds: float, by: str, reason: str) -> Announced:
        key = self._keys.maintenance
        now, micros = await self._warm.retry(self._port.command_with, self._port.node_of(key), b"TIME")
        announced = Announced(int(now) + int(micros) / 1e6 + seconds, by, reason)
        await self._warm.retry(self._port.command, b"SET", key, codec.encode(asdict(announced), "maintenance"))
        self._known = announced
        return announced

    async def refresh(self) -> Announced | None:
        """Read the announcement; return the current one, from memory if Redis does not have it or is away."""
        try:
            found = await self._port.command(b"GET", self._keys.maintenance)
            if found is not None and (announced := Announced(**codec.decode(found, "maintenance"))) != self._known:
                self._known = announced
                log.info("%s", announced if self.current else f"maintenance ended by {announced.by}")
        except (StateError, TypeError) as error:
            log.debug("maintenance cannot be read: %s", error)
        return self.current
