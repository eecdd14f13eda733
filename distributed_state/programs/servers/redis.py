"""Redis or Valkey servers: one alone, or a primary with replicas and the Sentinels that watch it.

Law: a server persists and evicts nothing unless its options say so, and lets nobody in unasked. Its password is a new
one each time, unless the options name one. The server reads it from its stdin: everybody on the machine can read a
command line. Commands to it go over one plain socket, without a driver. Who is the primary, the Sentinels say.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hiredis import Reader, ReplyError

from distributed_state.cold.private_files import opener
from distributed_state.errors import ConfigurationError
from distributed_state.port.commands import packed
from distributed_state.programs.servers.process import (
    Server,
    launch,
    new_password,
    redis_binary,
    wait_until,
    working_folder,
)
from distributed_state.settings import without_password

_CHUNK = 65_536
SERVICE = "mymaster"
# A Sentinel asks for INFO every ten seconds and greets the others every two; a failover would take twenty.
_PERIODS_MS = ("info-period", 500, "publish-period", 200, "ping-period", 200)


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


@contextmanager
def redis_server_unless(url: str | None, directory: Path) -> Iterator[tuple[str, str]]:
    """Run a server unless the URL of one is given: the URL to use, and a name for people, without its password."""
    if url:
        yield url, without_password(url)
        return
    with redis_server(directory=directory) as server:
        yield server.url, Path(server.binary).name


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
        """Whether it is a replica that has the data of its primary and receives its writes. May raise OSError."""
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


# Sentinels


@contextmanager
def redis_sentinel(
    *options: str,
    replicas: int = 2,
    sentinels: int = 3,
    down_after_ms: int = 1000,
    binary: str | None = None,
    directory: Path | None = None,
) -> Iterator[RedisSentinel]:
    """Run a primary, its replicas and their Sentinels, who replace a primary that is silent for `down_after_ms`.

    `options` are words of the servers' command line, not of the Sentinels'.
    """
    with working_folder(directory) as place:
        watched = RedisSentinel(binary or redis_binary(), options, place)
        try:
            watched.start(replicas, sentinels, down_after_ms)
            yield watched
        finally:
            watched.kill()


class RedisSentinel:
    """A primary, its replicas and their Sentinels. A quorum is more than half of the Sentinels."""

    def __init__(self, binary: str, options: Sequence[str], directory: Path) -> None:
        self.binary = binary
        self.directory = directory
        self.servers: list[RedisServer] = []
        self.sentinels: list[SentinelServer] = []
        self._options = with_password(options)

    @property
    def url(self) -> str:
        """The URL for `StateStore.open`, with every Sentinel."""
        return _url(self.servers[0].password, self._places())

    def start(self, replicas: int, sentinels: int, down_after_ms: int) -> None:
        """Start a primary, its `replicas` and `sentinels`, and wait until all agree."""
        for at in range(replicas + 1):
            server = self._new_server(at)
            if at:
                server.ask("REPLICAOF", "127.0.0.1", self.servers[0].port)
        wait_until(lambda: all(map(RedisServer.in_sync, self.servers[1:])), "the replicas were not in sync")
        for at in range(sentinels):
            folder = self.directory / f"sentinel-{at + 1}"
            sentinel = SentinelServer(self.binary, folder, self.servers[0], sentinels // 2 + 1, down_after_ms)
            self.sentinels.append(sentinel)
            sentinel.start()
        self.wait_converged()

    # Who is what

    @property
    def primary(self) -> RedisServer:
        """The server that most Sentinels name as the primary. It may be one that was just killed."""
        named = [sentinel.primary_port() for sentinel in self._answering()]
        port = max(named, key=named.count)
        return next(server for server in self.servers if server.port == port)

    @property
    def replicas(self) -> list[RedisServer]:
        """The servers that answer and are not the primary."""
        primary = self.primary
        return [server for server in self.servers if server.answering and server is not primary]

    # Faults

    def kill_primary(self) -> RedisServer:
        """Kill the primary and return it; `start` brings it back, and the Sentinels make a replica of it.

        They replace it some seconds later: `wait_replaced` waits for that.
        """
        primary = self.primary
        primary.kill()
        return primary

    def failover(self) -> RedisServer:
        """Let the Sentinels replace a primary that is well, and return the new one when all agree."""
        before = self.primary
        self._answering()[0].ask("SENTINEL", "FAILOVER", SERVICE)
        return self.wait_replaced(before)

    def wait_replaced(self, before: RedisServer) -> RedisServer:
        """Wait until another server than this one is the primary for all, and return it."""
        wait_until(lambda: self.primary is not before, f"the primary on port {before.port} was not replaced")
        self.wait_converged()
        return self.primary

    def wait_converged(self) -> None:
        """Wait until the Sentinels that answer name one primary, and the other servers are its replicas and in sync."""
        wait_until(self.converged, f"the Sentinels {self._places()} did not agree")

    def converged(self) -> bool:
        """Whether the Sentinels that answer agree, and the other servers are replicas in sync. May raise OSError."""
        sentinels, primary = self._answering(), self.primary
        if {sentinel.primary_port() for sentinel in sentinels} != {primary.port}:
            return False
        replicas = self.replicas
        if primary.info("replication")["role"] != "master" or not all(_follows(each, primary) for each in replicas):
            return False
        ports = {replica.port for replica in replicas}
        return all(sentinel.knows(len(sentinels) - 1, ports) for sentinel in sentinels)

    def kill(self) -> None:
        """End every process at once; what they hold goes with their folders."""
        for server in (*self.sentinels, *self.servers):
            server.kill()

    def _places(self) -> str:
        return ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)

    def _new_server(self, at: int) -> RedisServer:
        folder = self.directory / f"server-{at + 1}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        server = RedisServer(self.binary, self._options, folder)
        self.servers.append(server)
        server.start()
        return server

    def _answering(self) -> list[SentinelServer]:
        found = [sentinel for sentinel in self.sentinels if sentinel.answering]
        if not found:
            raise ConfigurationError("no Sentinel answers")
        return found


class SentinelServer(RedisServer):
    """One Sentinel. It keeps what it learns in its configuration, so it comes back knowing the others."""

    def __init__(self, binary: str, directory: Path, primary: RedisServer, quorum: int, down_after_ms: int) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(binary, ("--requirepass", primary.password), directory)
        self._configuration = directory / "sentinel.conf"
        # It holds the password, of which the command line says nothing.
        with open(self._configuration, "w", encoding="utf-8", opener=opener) as file:
            file.write(self._first_configuration(primary, quorum, down_after_ms))

    @property
    def url(self) -> str:
        """The URL for `StateStore.open`, with this Sentinel as the only one."""
        return _url(self.password, f"127.0.0.1:{self.port}")

    def start(self) -> None:
        """Start, or start again with what it knew, and wait until it answers."""
        super().start()
        self.ask("SENTINEL", "DEBUG", *_PERIODS_MS)

    def primary_port(self) -> int:
        """The port of the primary that it names. May raise OSError."""
        return int(self.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])

    def knows(self, others: int, replicas: set[int]) -> bool:
        """Whether it knows this many `others`, and these `replicas` by their ports. May raise OSError."""
        watched = _fields(self.ask("SENTINEL", "MASTER", SERVICE))
        listed = [_fields(each) for each in self.ask("SENTINEL", "REPLICAS", SERVICE)]
        heard = {
            int(each["port"]) for each in listed if each["flags"] == "slave" and each["master-link-status"] == "ok"
        }
        return int(watched["num-other-sentinels"]) >= others and watched["flags"] == "master" and heard >= replicas

    def _first_configuration(self, primary: RedisServer, quorum: int, down_after_ms: int) -> str:
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f'dir "{self.directory}"',
            f"sentinel monitor {SERVICE} 127.0.0.1 {primary.port} {quorum}",
            f"sentinel down-after-milliseconds {SERVICE} {down_after_ms}",
            f"sentinel failover-timeout {SERVICE} 3000",
            f"sentinel parallel-syncs {SERVICE} 5",
            f"sentinel auth-pass {SERVICE} {primary.password}",
            f"requirepass {self.password}",  # which it gives to the other Sentinels too
        ]
        return "\n".join(lines) + "\n"

    def _launch(self, log: int) -> subprocess.Popen[bytes]:
        return launch([self.binary, str(self._configuration), "--sentinel"], self.directory, log)


def _url(password: str, places: str) -> str:
    return f"redis+sentinel://:{password}@{places}/{SERVICE}/0?sentinel_password={password}"


def _follows(replica: RedisServer, primary: RedisServer) -> bool:
    state = replica.info("replication")
    return state.get("master_link_status") == "up" and int(state["master_port"]) == primary.port


def _fields(answer: list[str]) -> dict[str, str]:
    return dict(zip(answer[::2], answer[1::2], strict=True))


# Plain commands


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
