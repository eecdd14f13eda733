"""Who waits in this process for locks. Law: a waiter is woken when it should ask the server, and asks no more often.

A free lock is offered to the head of its queue, and passes it by if that does not come within the grace, as one that
died will not. The first waiter of each process goes and sees then; those after it have nothing to ask.

Design: section 8.
"""

from __future__ import annotations

import math

from distributed_state.port import Port
from distributed_state.warm.subscription import Link

PATIENCE_MS = 4000  # who waits and is not heard of for so long has died
GRACE_MS = 500  # and who is offered the lock, for so long


class Waiter:
    """When one who waits should ask again."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._signal = port.signal()
        self._at = math.inf

    def ask(self, at: float = 0.0) -> None:
        """Ask at this time instead; who was to ask at once still does."""
        if not at or self._at:
            self._at = at
        self._signal.set()

    async def sleep(self, seconds: float) -> None:
        """Wait until then, at most so long."""
        end = self._port.monotonic() + seconds
        while (left := min(end, self._at) - self._port.monotonic()) > 0:
            await self._signal.wait(left)
            self._signal.clear()
        # What came until now is answered by asking.
        self._at = math.inf


class Waiters:
    """The waiters of one replica, by the channel of their lock and the name under which they ask."""

    def __init__(self, port: Port, link: Link) -> None:
        self._port = port
        self._link = link
        self._mutex = port.mutex()
        self._waiting: dict[bytes, dict[str, Waiter]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def join(self, channel: bytes, name: str) -> Waiter:
        """One more, that is woken from now on; `leave` must follow."""
        waiter = Waiter(self._port)
        with self._mutex:
            self._waiting.setdefault(channel, {})[name] = waiter
        self._link.watch(channel, self._wake)
        if self._link.confirmed(channel):
            waiter.ask()
        return waiter

    def leave(self, channel: bytes, name: str) -> None:
        """It waits no more."""
        with self._mutex:
            waiting = self._waiting.get(channel, {})
            waiting.pop(name, None)
            if waiting:
                return
            self._waiting.pop(channel, None)
            self._link.leave(channel)

    def pause(self, channel: bytes) -> float:
        """Seconds after which one who waits asks unbidden, and keeps its place; one whom nothing wakes, its turn."""
        return (PATIENCE_MS if self._link.confirmed(channel) else GRACE_MS) / 2000

    def _wake(self, channel: bytes, payload: bytes) -> None:
        """Somebody was offered the lock. An empty payload (the channel is confirmed): an offer may have been missed."""
        _, _, offered = payload.decode().partition(":")
        with self._mutex:
            waiting = dict(self._waiting.get(channel, {}))
        others = []
        for name, waiter in waiting.items():
            if not payload or name == offered:
                waiter.ask()
            else:
                others.append(waiter)
        for first in others[:1]:
            first.ask(self._port.monotonic() + GRACE_MS / 1000 + 0.002)
