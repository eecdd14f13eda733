"""The embedded server: Redis in this process, called directly. Law: calls never wait, and commands are atomic.

The words of a command are passed to fakeredis directly: no socket, no connection, no RESP. Threads and event loops
share one server; its lock makes each command atomic, scripts too. The lock is held while a script publishes, and a
subscriber may send a command next. So messages are put into a queue, and delivered when the command is over.

Design: section 19.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from distributed_state.errors import ConfigurationError
from distributed_state.port import Words
from distributed_state.port.commands import ReplyError, encode, filled
from distributed_state.port.identities import EMBEDDED

log = logging.getLogger(__name__)


class EmbeddedServer:
    """A Redis in this process."""

    def __init__(self) -> None:
        try:
            # Imported here because it takes a quarter of a second, and a fleet never needs it.
            from fakeredis import FakeServer

            from distributed_state.port.embedded_client import EmbeddedClient
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"the embedded server needs {error.name}, which is not installed: run "
                "`pip install 'distributed-state[embedded]'`, or give the url of a server"
            ) from error
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(
                "the embedded server needs fakeredis 2.40, and the one installed is built differently: "
                f"pip install 'fakeredis[lua]==2.40.*', or give the url of a server ({error})"
            ) from error
        self.fake = FakeServer(version=(7,))  # fakeredis' server, for tests that inspect it
        self._client = EmbeddedClient
        self._free: list[EmbeddedClient] = []
        self._outbox: deque[tuple[EmbeddedSubscription, Any]] = deque()
        self._delivering = threading.Lock()

    def exchange(self, commands: Sequence[Words]) -> list[Any]:
        """Execute commands at once, in order; return the replies of RESP2, with errors in their place as ReplyError."""
        # Encode all of them first: an invalid word is an error before anything was done.
        encoded = [list(map(encode, filled(words, EMBEDDED.data_id))) for words in commands]
        try:
            client = self._free.pop()
        except IndexError:
            client = self._client(self.fake)
        # A client that was interrupted is not reused.
        answers = client.answers(encoded)
        self._free.append(client)
        if self._outbox:
            self.deliver()
        return answers

    def subscribe(self, deliver: Callable[[list[Any]], None]) -> EmbeddedSubscription:
        """Subscribe to channels.

        `deliver` gets each message, in order, in the publishing thread; no lock is held then.
        """
        return EmbeddedSubscription(self, deliver)

    def client(self, subscription: EmbeddedSubscription) -> Any:
        """Return a client for the subscription, whose replies and messages are put into the queue for it."""
        return self._client(self.fake, lambda message: self._outbox.append((subscription, message)))

    def deliver(self) -> None:
        """Deliver all published messages, one thread at a time, so that every subscriber gets them in order."""
        # Checked again after each round: another thread may have added a message and returned, because this one
        # delivers. A message that a subscriber publishes during the delivery is delivered by the round under way.
        while self._outbox and self._delivering.acquire(blocking=False):
            try:
                while self._outbox:
                    subscription, message = self._outbox.popleft()
                    subscription.receive(message)
            finally:
                self._delivering.release()


class EmbeddedSubscription:
    """A client that receives the messages of channels."""

    def __init__(self, server: EmbeddedServer, deliver: Callable[[list[Any]], None]) -> None:
        self._server = server
        self._deliver = deliver
        self._client = server.client(self)
        self._closed = False
        self._posting = threading.Lock()  # never held while anything is delivered

    def post(self, *words: Any) -> None:
        """Send SSUBSCRIBE, SUNSUBSCRIBE or PING; the reply is a message. Does nothing after `close`."""
        with self._posting:
            if self._closed:
                return
            self._client.answers([list(map(encode, words))])
        self._server.deliver()

    def post_all(self, kind: bytes, channels: Sequence[bytes]) -> None:
        """Send one command per channel."""
        for channel in channels:
            self.post(kind, channel)

    def receive(self, message: Any) -> None:
        """Pass on one message; an error reply as [b"error", its text]."""
        if self._closed:
            return
        if isinstance(message, ReplyError):
            message = [b"error", str(message).encode()]
        try:
            self._deliver(message if isinstance(message, list) else [message])
        except Exception as error:  # noqa: BLE001 - the error is the subscriber's, not the publisher's
            log.error("a subscription ended: its reader failed with %r", error)
            self.close()

    def close(self) -> None:
        """Deliver no further messages, not even those under way."""
        with self._posting:
            if not self._closed:
                self._closed = True
                self._client.leave()
