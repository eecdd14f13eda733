"""A Redis or Valkey server. Law: it persists and evicts nothing unless its options say so."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributed_state.programs.servers.asking import Connection, info
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

    @property
    def password(self) -> str | None:
        """The password that its options ask for."""
        words = list(self._options)
        return words[words.index("--requirepass") + 1] if "--requirepass" in words else None

    def connect(self) -> Connection:
        """Connect for plain commands. Raises OSError."""
        return Connection(self.port, password=self.password)

    def ask(self, *words: str | int) -> Any:
        """Return the answer to one plain command. Raises hiredis.ReplyError or OSError."""
        with self.connect() as connection:
            return connection.ask(*words)

    def info(self, section: str) -> dict[str, str]:
        """Return the fields of one section of INFO. Raises OSError."""
        return info(self.ask("INFO", section))

    def in_sync(self) -> bool:
        """Whether it is a replica that has the data of its primary and hears its writes. May raise OSError."""
        return self.info("replication").get("master_link_status") == "up"

    def _settings(self) -> dict[str, str]:
        defaults = {"bind": "127.0.0.1", "save": "", "appendonly": "no", "maxmemory-policy": "noeviction"}
        # A replica is synchronised at once, not after the five seconds in which others might ask for the same.
        defaults |= {"repl-diskless-sync-delay": "0"}
        return defaults | {"port": str(self.port), "dir": str(self.directory)}

    def _launch(self, log: int) -> subprocess.Popen[bytes]:
        words = [word for name, value in self._settings().items() for word in (f"--{name}", value)]
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
