"""A Redis or Valkey server. Law: it persists and evicts nothing unless its options say so."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from distributed_state.programs.servers.binaries import redis_binary
from distributed_state.programs.servers.process import Server, launch, working_folder


class RedisServer(Server):
    """A Redis or Valkey process."""

    def __init__(self, binary: str, options: Sequence[str], directory: Path) -> None:
        super().__init__(directory)
        self.binary = binary
        self._options = options

    @property
    def url(self) -> str:
        """The URL for `StateStore.open`."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _launch(self, log: int) -> subprocess.Popen[bytes]:
        defaults = {"bind": "127.0.0.1", "save": "", "appendonly": "no", "maxmemory-policy": "noeviction"}
        defaults |= {"port": str(self.port), "dir": str(self.directory)}
        words = [word for name, value in defaults.items() for word in (f"--{name}", value)]
        return launch([self.binary, *words, *self._options], self.directory, log)

    def _answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            # A server that asks for a password is up too; one that still loads its files says -LOADING.
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))


@contextmanager
def redis_server(*options: str, binary: str | None = None, directory: Path | None = None) -> Iterator[RedisServer]:
    """Run a Redis or Valkey server while the block runs; by default it persists nothing and evicts nothing.

    `options` are words of its command line (`"--appendonly", "yes"`). Files in a `directory` of yours are kept.
    """
    with working_folder(directory) as place:
        server = RedisServer(binary or redis_binary(), options, place)
        try:
            server.start()
            yield server
        finally:
            server.stop()
