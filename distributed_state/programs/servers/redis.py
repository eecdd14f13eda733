"""A Redis or Valkey server. Law: it persists and evicts nothing unless its options say so, and lets nobody in unasked.

Its password is a new one each time, unless the options name one. The server reads it from its stdin: everybody on the
machine can read a command line.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hiredis import ReplyError

from distributed_state.programs.servers.asking import Connection, info
from distributed_state.programs.servers.binaries import redis_binary
from distributed_state.programs.servers.process import Server, launch, new_password, working_folder


class RedisServer(Server):
    """A Redis or Valkey process."""

    def __init__(self, binary: str, options: Sequence[str], directory: Path) -> None:
        super().__init__(directory)
        self.binary = binary
        self._options = list(options)
        self.password = _taken("--requirepass", self._options) or new_password()
        # Those that share a password, as a cluster's nodes do, replicate each other.
        self._primary_password = _taken("--masterauth", self._options) or self.password

    @property
    def url(self) -> str:
        """The URL for `StateStore.open`."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

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

    def follow(self, primary: RedisServer) -> None:
        """Become a replica of another server, until it ends. Raises OSError."""
        with self.connect() as connection:
            connection.ask("CONFIG", "SET", "masterauth", primary.password)
            connection.ask("REPLICAOF", "127.0.0.1", primary.port)

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
        secret = f"requirepass {self.password}\nmasterauth {self._primary_password}\n"
        return launch([self.binary, "-", *words, *self._options], self.directory, log, secret=secret)

    def _answers(self) -> bool:
        try:
            return str(self.ask("PING")) == "PONG"
        except ReplyError as error:
            # One whose options name other users is up too. To who gives no password it would not say that it loads.
            return not str(error).startswith("LOADING")


@contextmanager
def redis_server(*options: str, binary: str | None = None, directory: Path | None = None) -> Iterator[RedisServer]:
    """Run a Redis or Valkey server while the block runs; by default it persists nothing and evicts nothing.

    `options` are words of its command line (`"--appendonly", "yes"`), but passwords (`"--requirepass", "word"`), which
    others must not see there. Files in a `directory` of yours are kept.
    """
    with working_folder(directory) as place:
        server = RedisServer(binary or redis_binary(), options, place)
        try:
            server.start()
            yield server
        finally:
            server.stop()


def with_password(options: Sequence[str]) -> list[str]:
    """The same with a new password, unless they name one: for servers that share it."""
    return [*options] if "--requirepass" in options else [*options, "--requirepass", new_password()]


def _taken(name: str, words: list[str]) -> str | None:
    """The value of an option, which is no longer among the words."""
    if name not in words:
        return None
    at = words.index(name)
    value = words[at + 1]
    del words[at : at + 2]
    return value
