"""The link: this replica's subscription. Law: silence is never taken for calm; only an echo of our own proves the link.

Every so often the replica publishes its clock to itself. While the newest echo is at most `max_staleness` old, all that
was published before it has arrived, because one connection keeps its order.

A write names our own channel if we hear the record's too, so that the script can see whether anybody else does. That
name says: while it has a subscriber, that one hears the record as well. So it is another one for each connection - the
server may keep an earlier one for long after we lost it - and from the moment on when a channel that was named with it
is left.

Design: section 7.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from distributed_state.errors import StateError
from distributed_state.port import Job, Port, Wire

log = logging.getLogger(__name__)
_SILENCE = 5.0  # seconds
Handler = Callable[[bytes], None]


class Link:
    """Channels with a handler each, kept through reconnections.

    Handlers are plain and quick; they run on the reader. An empty payload says that the channel is confirmed.
    """

    def __init__(
        self, port: Port, *, own: bytes, store_key: bytes, max_staleness: float, lost: Callable[[], None]
    ) -> None:
        self._port = port
        self._echoes = own
        self._store_key = store_key
        self._lost = lost
        self._own = b""
        self._count = 0
        self._named: set[bytes] = set()  # channels that a write was said to be heard on, under the present name
        self._every = min(max(max_staleness / 4, 0.02), 1.0)
        self._echo = self._since = 0.0
        self._handlers: dict[bytes, Handler] = {}
        self._confirmed: set[bytes] = set()
        self._wire: Wire | None = None
        self._jobs: list[Job] = []
        self._mutex = port.mutex()
        self._pending: dict[bytes, int] = {}
        self._life: bytes | None = None  # the store's mark as last seen: another one each time Redis begins empty
        self.heard: Callable[[float], None] = lambda sent: None
        self.time_received: Callable[[Any, float], None] = lambda time, sent: None
        self.up = self._closed = False
        self.breaks = 0

    def confirmed(self, channel: bytes) -> bool:
        """Whether everything published on the channel from now on arrives here."""
        return channel in self._confirmed

    def heard_on(self, channel: bytes) -> bytes:
        """Our own channel if we hear this one too, else b"". On the server both end together, before we know of it."""
        own = self._own
        if channel not in self._confirmed:
            return b""
        self._named.add(channel)
        # Looked at again: `leave` may have looked for the name just before it was noted.
        return own if channel in self._confirmed else b""

    @property
    def silence(self) -> float | None:
        """For how many seconds the link has proved nothing; None if nobody has needed it yet."""
        return self._port.monotonic() - max(self._echo, self._since) if self._jobs else None

    def watch(self, channel: bytes, handler: Handler) -> None:
        """Ask for a channel. Does not wait."""
        with self._mutex:
            if channel in self._handlers:
                return
            self._handlers[channel] = handler
            if self._wire is not None:
                self._ask(channel)
            if not self._jobs:
                self._since = self._port.monotonic()
                self._jobs = [
                    self._port.spawn(self._read, "distributed-state-link"),
                    self._port.spawn(self._probe, "distributed-state-probe"),
                ]

    def leave(self, channel: bytes) -> None:
        """Stop hearing a channel."""
        with self._mutex:
            self._handlers.pop(channel, None)
            self._confirmed.discard(channel)
            if self._wire is not None:
                if channel in self._named:
                    # First: a write may be on its way that names us as a listener, and no one would be notified.
                    self._wire.post(b"SUNSUBSCRIBE", self._own)
                    self._rename()
                    self._ask(self._own)
                self._wire.post(b"SUNSUBSCRIBE", channel)

    def _rename(self) -> None:
        self._named.clear()
        self._count += 1
        self._own = b"%b.%d" % (self._echoes, self._count)

    def _ask(self, channel: bytes) -> None:
        # Posted under the mutex, so that the wire sees requests in the order in which they changed the table.
        assert self._wire is not None
        self._pending[channel] = self._pending.get(channel, 0) + 1
        # One command a channel: in a cluster, channels of one command must share a slot.
        self._wire.post(b"SSUBSCRIBE", channel)

    async def _read(self) -> None:
        pause = 0.05
        while True:
            wire = None
            try:
                wire = await self._port.wire(self._port.node_of(self._echoes))
                with self._mutex:
                    self._wire, self._since = wire, self._port.monotonic()
                    self._rename()
                    for channel in (self._echoes, self._own, *self._handlers):
                        self._ask(channel)
                while True:
                    self._hear(await wire.receive())
                    pause = 0.05
            except StateError as error:
                if self._closed:
                    return
                log.warning("link: %s; trying again in %.2f s", error, pause)
            finally:
                self._down(wire)
            await self._port.sleep(pause)
            pause = min(pause * 2, 2.0)

    def _hear(self, message: list[bytes]) -> None:
        kind, channel, payload = message[:3] if len(message) >= 3 else (b"", b"", b"")
        if kind == b"smessage":
            if channel == self._echoes:
                self._echo = float(payload)
                self.heard(self._echo)
                return
            handler = self._handlers.get(channel)
            if handler is not None:
                try:
                    handler(payload)
                except (StateError, ValueError) as error:
                    log.error("link: a message on %r cannot be read: %s", channel, error)
        elif kind == b"ssubscribe":
            self.up = True
            with self._mutex:
                left = self._pending.pop(channel, 1) - 1
                handler = None
                if left:
                    # Left and asked for again: only the last request's confirmation counts.
                    self._pending[channel] = left
                else:
                    handler = self._handlers.get(channel)
                    if handler is not None:
                        self._confirmed.add(channel)
            if handler is not None:
                handler(b"")

    def _down(self, wire: Wire | None) -> None:
        with self._mutex:
            self.breaks += self.up
            self.up = False
            self._wire = None
            self._confirmed.clear()
            self._pending.clear()
        self._lost()
        if wire is not None:
            wire.close()

    async def _probe(self) -> None:
        while True:
            if self.up:
                sent = self._port.monotonic()
                try:
                    time, here, _ = await self._port.exchange(
                        [(b"TIME",), (b"GET", self._store_key), (b"SPUBLISH", self._echoes, repr(sent).encode())]
                    )
                    self.time_received(time, sent)
                    if here is None or self._life not in (None, here):
                        # Redis was emptied, and perhaps started again since: nothing says which entries changed.
                        self._lost()
                    self._life = here
                except StateError as error:
                    log.debug("probe: %s", error)
                self._give_up_if_silent(sent)
            await self._port.sleep(self._every if self.up else 0.02)

    def _give_up_if_silent(self, now: float) -> None:
        """A connection that died without a word is never read from again: close it, so that the reader reconnects."""
        wire = self._wire
        if wire is not None and now - max(self._echo, self._since) > _SILENCE:
            log.warning("link: nothing heard for %.0f s", _SILENCE)
            self._since = now
            wire.close()

    async def close(self) -> None:
        """End the link."""
        with self._mutex:
            self._closed = True
            jobs = self._jobs
            self._jobs = []
            wire = self._wire
            self._handlers.clear()
        if wire is not None:
            wire.close()
        for job in jobs:
            await job.stop()
