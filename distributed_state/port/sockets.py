"""A connection that one thread uses at a time. Law: it is closed unless all its replies were read completely.

Otherwise its next user would get the reply to another caller's command.

Design: section 19.
"""

from __future__ import annotations

import math
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import redis.exceptions as driver
from hiredis import Reader

from distributed_state.errors import WarmUnavailable
from distributed_state.port.commands import LOST, Packer, ReplyError, packed

_READ = 65_536
LATE = 1.0  # seconds without a reply after which another server may have the keys


_SHORTEST = 0.001  # seconds; a timeout of 0 would mean no timeout


def nothing(*_: float) -> None:
    """Ignore a late reply: the default where no other server could have the keys."""


def reader(make_error: Callable[[str], Exception]) -> Any:
    """Return a parser of replies. It returns False while no reply is complete; RESP2 has no booleans."""
    return Reader(protocolError=driver.InvalidResponse, replyError=make_error, errors="replace")


def _timeval(seconds: float) -> bytes:
    seconds = max(seconds, _SHORTEST)
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


class Socket:
    """A connection after its handshake. `on_error` makes the exception of an error reply.

    `late` is called, by the waiting thread, for each second without a reply, with the seconds that are left; it may
    `shut` the connection. `begun` is called with the connection when its handshake begins; it may be `shut` from then
    on.
    """

    __slots__ = (
        "__weakref__", "_buffer", "_chunk", "_connection", "_feed", "_gets", "_late", "_receive", "_receives_for",
        "_send", "_sends_for", "_socket", "_timeout", "packer",
    )  # fmt: skip

    def __init__(
        self,
        connection: Any,
        timeout: float,
        on_error: Callable[[str], Exception] = ReplyError,
        late: Callable[[float], None] = nothing,
        begun: Callable[[Socket], None] = lambda _: None,
    ) -> None:
        self._socket: Any = None  # until the driver has connected it
        connection.redis_connect_func = partial(self._handshake, begun)
        try:
            connection.connect()
        except BaseException:
            connection.disconnect()  # the driver does so for its own errors only
            raise
        finally:
            connection.redis_connect_func = None  # it would keep this object alive
        self._connection = connection  # the driver closes it, without shutting it down in a forked child
        found: socket.socket | None = self._socket
        if found is None:
            raise driver.ConnectionError("the connection was closed at once")
        self.packer = Packer()  # replaced by one with the server's data id
        self._timeout = timeout
        self._late = late
        self._chunk = timeout if late is nothing else min(timeout, LATE)  # seconds of one wait
        self._receives_for = self._sends_for = 0.0  # seconds, as last set in the kernel
        self._send: Callable[[bytes], None] = self._send_slowly
        if isinstance(found, ssl.SSLSocket):
            self._receives_for = self._chunk
            found.settimeout(self._chunk)
        else:
            # The kernel limits the time; Python would call poll() before each call.
            found.settimeout(None)
            self._send = found.sendall
            self._wait_for(timeout)
        parser = reader(on_error)
        self._buffer = bytearray(_READ)
        self._feed = parser.feed
        self._gets = parser.gets
        self._receive = found.recv_into

    def _handshake(self, begun: Callable[[Socket], None], connection: Any) -> None:
        """Called by the driver when the socket is connected."""
        self._socket = getattr(connection, "_sock", None)
        begun(self)
        connection.on_connect()

    def exchange(self, packed: bytes, count: int, seconds: float = math.inf) -> list[Any]:
        """Send, and read `count` replies; wait for each up to `seconds`, at most the timeout.

        Raises driver.RedisError or OSError; the connection is closed then.
        """
        try:
            if packed:
                self._wait_for(seconds)
                self._send(packed)
            return self._answers(count, min(seconds, self._timeout))
        except BaseException:
            self.close()
            raise

    def send(self, packed: bytes, seconds: float = math.inf) -> None:
        """Send without reading; `answers` reads the replies."""
        try:
            self._wait_for(seconds)
            self._send(packed)
        except BaseException:
            self.close()
            raise

    def answers(self, count: int, seconds: float = math.inf) -> list[Any]:
        """Read this many replies."""
        return self.exchange(b"", count, seconds)

    def _answers(self, count: int, left: float) -> list[Any]:
        answers: list[Any] = []
        gets = self._gets
        while True:
            self._wait_for(left)
            try:
                received = self._receive(self._buffer)
            except (BlockingIOError, TimeoutError) as error:
                left -= self._receives_for
                if left > _SHORTEST:
                    began = time.monotonic()
                    self._late(left)
                    left -= time.monotonic() - began
                if left <= _SHORTEST:
                    raise driver.TimeoutError("no answer in time") from error
                continue
            if not received:
                raise driver.ConnectionError("the server closed the connection")
            self._feed(self._buffer, 0, received)
            while (answer := gets()) is not False:
                answers.append(answer)
                if len(answers) == count:
                    return answers

    def _wait_for(self, seconds: float) -> None:
        """Set the timeout of the next reads and writes, at most the connection's own."""
        receives_for = seconds if seconds < self._chunk else self._chunk
        sends_for = seconds if seconds < self._timeout else self._timeout
        if receives_for == self._receives_for and sends_for == self._sends_for:
            return
        self._receives_for, self._sends_for = receives_for, sends_for
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(receives_for)
        else:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(receives_for))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(sends_for))

    def _send_slowly(self, packed: bytes) -> None:
        """Send all, with a longer timeout than for the first byte of a reply."""
        self._socket.settimeout(self._sends_for)
        self._socket.sendall(packed)
        self._socket.settimeout(self._receives_for)

    def read(self) -> None:
        """Wait for bytes and give them to the parser."""
        try:
            received = self._receive(self._buffer)
        except (BlockingIOError, TimeoutError) as error:
            raise driver.TimeoutError("no answer in time") from error
        if not received:
            raise driver.ConnectionError("the server closed the connection")
        self._feed(self._buffer, 0, received)

    def answer(self) -> Any:
        """Read one message."""
        while (answer := self._gets()) is False:
            self.read()
        return answer

    def arrived(self) -> list[Any]:
        """Read once, and return the complete messages."""
        self.read()
        return list(iter(self._gets, False))

    def fileno(self) -> int:
        """Return the socket's file descriptor, for a selector."""
        number: int = self._socket.fileno()
        return number

    def shut(self) -> None:
        """Shut the socket down from another thread: a pending read raises an error at once."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()


class SocketWire:
    """A subscription read by one thread and written by any."""

    def __init__(self, connection: Socket, place: str, end_if_stopped: Callable[[], None]) -> None:
        self._connection = connection
        self._place = place
        self._end_if_stopped = end_if_stopped
        self._writing = threading.Lock()
        self._closed = False

    def post(self, *words: Any) -> None:
        """Send without waiting for a reply."""
        with self._writing, suppress(*LOST, driver.RedisError):  # the reader meets the same broken socket
            self._connection.send(packed(words))

    def post_all(self, kind: bytes, channels: Sequence[bytes]) -> None:
        """Send one command per channel, in one write."""
        with self._writing, suppress(*LOST, driver.RedisError):
            self._connection.send(for_each(kind, channels))

    async def receive(self) -> list[Any]:
        """Return the next message; an error reply comes as [b"error", its text].

        Waits without limit: in a quiet partition messages are rare, and the reader detects a dead connection by its
        probes.
        """
        try:
            while True:
                self._end_if_stopped()
                if self._closed:
                    raise WarmUnavailable(f"{self._place}: the link is closed")
                with suppress(driver.TimeoutError):
                    answer = self._connection.answer()
                    break
        except (driver.RedisError, *LOST, ValueError) as error:
            # close() in another thread removes the socket while this one reads: ValueError.
            raise WarmUnavailable(f"{self._place}: link lost: {error}") from error
        return message(answer)

    def close(self) -> None:
        """Drop the connection; a pending `receive` raises an error."""
        self._closed = True
        self._connection.shut()
        self._connection.close()


def for_each(kind: bytes, channels: Sequence[bytes]) -> bytes:
    """Encode one command of this kind for each channel."""
    return b"".join([packed((kind, channel)) for channel in channels])


def message(answer: Any) -> list[Any]:
    """Return a message of a subscription in the form of `Wire.receive`."""
    if isinstance(answer, ReplyError):
        return [b"error", str(answer).encode()]
    return answer if isinstance(answer, list) else [answer]


def speaks_plainly(place: tuple[str, int], seconds: float) -> bool:
    """Whether a server answers at this host and port without TLS."""
    try:
        with socket.create_connection(place, seconds) as found:
            found.sendall(packed((b"PING",)))
            return found.recv(1) in (b"+", b"-")
    except OSError:
        return False


def speaks_tls(place: tuple[str, int], seconds: float) -> bool:
    """Whether a server answers at this host and port with TLS. Its certificate does not matter: nothing is sent."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with socket.create_connection(place, seconds) as found, context.wrap_socket(found):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # it refused us, in TLS
    except OSError:
        return False
