"""A TCP proxy in front of Redis that loses, mutes and delays. Law: what it does to a connection, a network can do.

A rule names connections by bytes that were sent on them (a script's SHA, SSUBSCRIBE), so that commands and the link of
one store can be treated apart. It runs in threads and so serves stores of either API, in any process.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from urllib.parse import urlsplit

from below import relocated

_CHUNK = 1 << 20
_sleep = time.sleep  # real time, also while another test simulates it


class Loss:
    """One answer that gets lost. `happened`: the server has answered; the connection is cut when `go` is set."""

    def __init__(self, needle: bytes) -> None:
        self.needle = needle
        self.happened, self.go = threading.Event(), threading.Event()


class Delay:
    """One request that lies about.

    `arrived`: it does; it goes on to the server when `go` is set, even if its sender has left meanwhile. `happened`:
    the server has answered it.
    """

    def __init__(self, needle: bytes) -> None:
        self.needle = needle
        self.arrived, self.go, self.happened = threading.Event(), threading.Event(), threading.Event()


class Proxy:
    """`with Proxy(server.url) as proxy: StateStore.open(proxy.url, ...)`."""

    def __init__(self, url: str) -> None:
        self.lead_to(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = relocated(url, f"127.0.0.1:{self._listener.getsockname()[1]}")
        self._pairs: list[_Pair] = []
        self._losses: list[Loss] = []
        self._delays: list[Delay] = []
        self._mutex = threading.Lock()
        self._lag: tuple[bytes, float] = (b"", 0.0)
        self._closed = False
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def lead_to(self, url: str) -> None:
        """Lead new connections to this server."""
        parts = urlsplit(url)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 6379)

    def lose(self, needle: bytes) -> Loss:
        """Lose the answer to the next request that holds these bytes."""
        loss = Loss(needle)
        with self._mutex:
            self._losses.append(loss)
        return loss

    def hold(self, needle: bytes) -> Delay:
        """Let the next request that holds these bytes lie until it is told to go on."""
        delay = Delay(needle)
        with self._mutex:
            self._delays.append(delay)
        return delay

    def mute(self, needle: bytes) -> int:
        """From now on nothing passes, either way, on the connections that sent this; they stay open. How many."""
        chosen = [pair for pair in self._living() if pair.sent(needle)]
        for pair in chosen:
            pair.muted = True
        return len(chosen)

    def towards_server(self, needle: bytes) -> list[tuple[str, int]]:
        """How the server sees the connections that sent this."""
        return [pair.own_address for pair in self._living() if pair.sent(needle)]

    def lag(self, needle: bytes, seconds: float) -> None:
        """Answers on connections that sent this arrive so much later, in order."""
        self._lag = (needle, seconds)

    def cut(self, needle: bytes = b"") -> int:
        """Close the connections that sent this. How many."""
        chosen = [pair for pair in self._living() if pair.sent(needle)]
        for pair in chosen:
            pair.close()
        return len(chosen)

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        self.cut()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _living(self) -> list[_Pair]:
        with self._mutex:
            self._pairs = [pair for pair in self._pairs if not pair.closed]
            return list(self._pairs)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            pair = _Pair(self, client, server)
            with self._mutex:
                self._pairs.append(pair)
            pair.start()

    def _loss_of(self, chunk: bytes) -> Loss | None:
        with self._mutex:
            for loss in self._losses:
                if loss.needle in chunk:
                    self._losses.remove(loss)
                    return loss
        return None

    def _delay_of(self, chunk: bytes) -> Delay | None:
        with self._mutex:
            for delay in self._delays:
                if delay.needle in chunk:
                    self._delays.remove(delay)
                    return delay
        return None


class _Pair:
    """One connection and its continuation."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self._seen = b""
        self._answers: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        self.muted = self.closed = False
        self._loss: Loss | None = None
        self._delay: Delay | None = None
        self.own_address: tuple[str, int] = server.getsockname()
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        for target in (self._requests, self._receive, self._deliver):
            threading.Thread(target=target, name="proxy-pair", daemon=True).start()

    def sent(self, needle: bytes) -> bool:
        return needle in self._seen

    def close(self) -> None:
        self.closed = True
        self._answers.put((0.0, b""))
        for each in (self._client, self._server):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _requests(self) -> None:
        with suppress(OSError):
            while chunk := self._client.recv(_CHUNK):
                self._seen = (self._seen + chunk)[-(1 << 16) :]
                loss = self._proxy._loss_of(chunk)
                if loss is not None:
                    self._loss = loss
                    threading.Thread(target=self._end, args=(loss,), name="proxy-loss", daemon=True).start()
                delay = self._proxy._delay_of(chunk)
                if delay is not None:
                    delay.arrived.set()
                    delay.go.wait(60)
                    self._delay = delay
                if not self.muted:
                    self._server.sendall(chunk)
                if delay is not None:
                    delay.happened.wait(10)  # its sender may have left: that must not end it before it was answered
        # Half-open the other way round: the server hears nothing of the end either, and keeps its side.
        if not self.muted:
            self.close()

    def _end(self, loss: Loss) -> None:
        loss.go.wait(60)
        self.close()

    def _receive(self) -> None:
        with suppress(OSError):
            while chunk := self._server.recv(_CHUNK):
                if self._delay is not None:
                    self._delay.happened.set()
                if self._loss is not None:
                    self._loss.happened.set()
                elif not self.muted:
                    needle, seconds = self._proxy._lag
                    late = seconds if needle and self.sent(needle) else 0.0
                    self._answers.put((time.monotonic() + late, chunk))
        # A muted connection shows nothing of its end: half-open, as after a cable was pulled.
        if not self.muted and self._loss is None:
            self._answers.put((0.0, b""))

    def _deliver(self) -> None:
        with suppress(OSError):
            while True:
                at, chunk = self._answers.get()
                if not chunk:
                    break
                _sleep(max(0.0, at - time.monotonic()))
                if not self.muted and self._loss is None:
                    self._client.sendall(chunk)
        self.close()
