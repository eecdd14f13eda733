"""Plain commands to a Redis server, for those who start one. Law: one socket, one answer at a time, and no driver."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Any, Self

from hiredis import Reader

from distributed_state.port.commands import packed

_CHUNK = 65_536


class Connection:
    """One socket to a server on loopback. Answers are text; bytes that are none survive a round trip."""

    def __init__(self, port: int, *, password: str | None = None, timeout: float = 5.0) -> None:
        """Connect, or raise OSError (a TimeoutError if the server stays silent), or ReplyError for a wrong password."""
        self._socket = socket.create_connection(("127.0.0.1", port), timeout)
        self._reader = Reader(encoding="utf-8", errors="surrogateescape")
        if password is not None:
            try:
                self.ask("AUTH", password)
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    def ask(self, *words: str | int) -> Any:
        """Send one command and return its answer. Raises hiredis.ReplyError if it is an error."""
        self._socket.sendall(packed([str(word).encode("utf-8", "surrogateescape") for word in words]))
        while (answer := self._reader.gets()) is False:
            received = self._socket.recv(_CHUNK)
            if not received:
                raise ConnectionResetError(f"the server closed the connection instead of answering {words[0]}")
            self._reader.feed(received)
        if isinstance(answer, Exception):
            raise answer
        return answer


def ask(port: int, *words: str | int, password: str | None = None, timeout: float = 5.0) -> Any:
    """Return the answer to one command, on a connection of its own. Raises hiredis.ReplyError or OSError."""
    with Connection(port, password=password, timeout=timeout) as connection:
        return connection.ask(*words)


def info(text: str) -> dict[str, str]:
    """Return the fields of an answer to INFO or CLUSTER INFO."""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
