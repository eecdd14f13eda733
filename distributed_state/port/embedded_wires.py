"""A subscription to the embedded server. Law: whoever publishes is never held up by whoever receives.

Design: section 19.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from distributed_state.errors import WarmUnavailable
from distributed_state.port.embedded import EmbeddedServer

_CLOSED = "the embedded server: the link is closed"


class EmbeddedWire:
    """A subscription read by one thread and written by any."""

    def __init__(self, server: EmbeddedServer, end_if_stopped: Callable[[], None]) -> None:
        self._messages: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._end_if_stopped = end_if_stopped
        self._subscription = server.subscribe(self._messages.put)
        self.post = self._subscription.post
        self.post_all = self._subscription.post_all

    async def receive(self) -> list[Any]:
        """The next message. In short steps: a background thread notices its own stop."""
        while True:
            self._end_if_stopped()
            try:
                message = self._messages.get(timeout=0.5)
            except Empty:
                continue
            if message is not None:
                return message
            self._messages.put(None)  # for whoever receives again
            raise WarmUnavailable(_CLOSED)

    def close(self) -> None:
        """End it; whoever receives gets an error."""
        self._subscription.close()
        self._messages.put(None)
