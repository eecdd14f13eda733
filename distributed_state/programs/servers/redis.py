"""Redis or Valkey servers: a single one, a primary with replicas and Sentinels, or a cluster.

Law: a server persists and evicts nothing unless its options say so, and always requires a password. The password is new
each time, unless the options set one. The server reads it from stdin, because all users of the machine can read command
lines. Commands to it go over a plain socket, without a driver. The primary is the server that the Sentinels name.

A cluster is formed and changed by the commands that `redis-cli --cluster` sends. A node's view of the others is read
each time. A slot is moved step by step, so that a test can stop between any two steps.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hiredis import Reader, ReplyError

from distributed_state.errors import ConfigurationError
from distributed_state.port.commands import packed
from distributed_state.programs.servers.process import (
    Server,
    free_port,
    launch,
    new_password,
    redis_binary,
    wait_until,
    working_folder,
)
from distributed_state.settings import private_opener, without_password

_CHUNK = 65_536
SERVICE = "mymaster"
# By default a Sentinel reads INFO every ten seconds and announces itself every two; a failover would take twenty.
_PERIODS_MS = ("info-period", 500, "publish-period", 200, "ping-period", 200)


@contextmanager
def redis_server(*options: str, binary: str | None = None, directory: Path | None = None) -> Iterator[RedisServer]:
    """Run a Redis or Valkey server while the block runs; by default it persists nothing and evicts nothing.

    `options` are words of its command line (`"--appendonly", "yes"`); passwords (`"--requirepass", "word"`) are passed
    on stdin instead, to hide them from other users. Files in your own `directory` are kept.
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
    """Run a server unless a URL is given; yield the URL, and a name for display without the password."""
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
        # Servers that share a password, such as a cluster's nodes, can replicate each other.
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
        """Whether this server is a replica with its primary's data, and receives its writes. May raise OSError."""
        return self.info("replication").get("master_link_status") == "up"

    def _settings(self) -> dict[str, str]:
        defaults = {"bind": "127.0.0.1", "save": "", "appendonly": "no", "maxmemory-policy": "noeviction"}
        # A replica is synchronised at once, instead of waiting five seconds for other replicas.
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
            # A server that refuses the login is up too. Without a password it would not report that it is loading.
            return not str(error).startswith("LOADING")


def with_password(options: Sequence[str]) -> list[str]:
    """The options with a new password unless they set one, for servers that share it."""
    return [*options] if "--requirepass" in options else [*options, "--requirepass", new_password()]


def _taken(name: str, words: list[str]) -> str | None:
    """Remove an option from the words, and return its value."""
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
    """Run a primary, its replicas and Sentinels, which replace a primary that is silent for `down_after_ms`.

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

    # Roles

    @property
    def primary(self) -> RedisServer:
        """The server that most Sentinels name as the primary. It may just have been killed."""
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
        """Kill the primary and return it; `start` brings it back, and the Sentinels make it a replica.

        They replace it some seconds later: `wait_replaced` waits for that.
        """
        primary = self.primary
        primary.kill()
        return primary

    def failover(self) -> RedisServer:
        """Let the Sentinels replace a working primary, and return the new one when all agree."""
        before = self.primary
        self._answering()[0].ask("SENTINEL", "FAILOVER", SERVICE)
        return self.wait_replaced(before)

    def wait_replaced(self, before: RedisServer) -> RedisServer:
        """Wait until all agree on another primary, and return it."""
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
        """Kill every process; their data is removed with their folders."""
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
    """One Sentinel. It stores the others in its configuration, so it finds them again after a restart."""

    def __init__(self, binary: str, directory: Path, primary: RedisServer, quorum: int, down_after_ms: int) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(binary, ("--requirepass", primary.password), directory)
        self._configuration = directory / "sentinel.conf"
        # The file holds the password, which must not appear in the command line.
        with open(self._configuration, "w", encoding="utf-8", opener=private_opener) as file:
            file.write(self._first_configuration(primary, quorum, down_after_ms))

    @property
    def url(self) -> str:
        """The URL for `StateStore.open`, with this Sentinel as the only one."""
        return _url(self.password, f"127.0.0.1:{self.port}")

    def start(self) -> None:
        """Start, or restart with its configuration, and wait until it answers."""
        super().start()
        self.ask("SENTINEL", "DEBUG", *_PERIODS_MS)

    def primary_port(self) -> int:
        """The port of the primary that it names. May raise OSError."""
        return int(self.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])

    def knows(self, others: int, replicas: set[int]) -> bool:
        """Whether the Sentinel knows this many `others`, and `replicas` with these ports. May raise OSError."""
        watched = _fields(self.ask("SENTINEL", "MASTER", SERVICE))
        listed = [_fields(each) for each in self.ask("SENTINEL", "REPLICAS", SERVICE)]
        listening = {
            int(each["port"]) for each in listed if each["flags"] == "slave" and each["master-link-status"] == "ok"
        }
        return int(watched["num-other-sentinels"]) >= others and watched["flags"] == "master" and listening >= replicas

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
            f"requirepass {self.password}",  # it also uses this to log in to the other Sentinels
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
    """One socket to a server on loopback. Answers are text; bytes that are not UTF-8 survive a round trip."""

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
        """Close the socket."""
        self._socket.close()

    def ask(self, *words: str | int) -> Any:
        """Send one command and return its answer. Raises hiredis.ReplyError for an error reply."""
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


SLOTS = 16_384
_KEYS_AT_ONCE = 100
_MIGRATE_MS = 5000


@contextmanager
def redis_cluster(
    *options: str, primaries: int = 3, replicas: int = 1, binary: str | None = None, directory: Path | None = None
) -> Iterator[RedisCluster]:
    """Run a new cluster of Redis or Valkey servers while the block runs.

    `options` are words of each node's command line; a later one wins (`"--cluster-node-timeout", "5000"`).
    """
    with working_folder(directory) as place:
        cluster = RedisCluster(binary or redis_binary(), options, place)
        try:
            cluster.start(primaries, replicas)
            yield cluster
        finally:
            cluster.kill()


class RedisCluster:
    """Some primaries, each with its replicas. A primary that is silent for a second is replaced by a replica."""

    def __init__(self, binary: str, options: Sequence[str], directory: Path) -> None:
        self.binary = binary
        self.directory = directory
        self.nodes: list[ClusterNode] = []
        self._options = with_password(options)
        self._started = 0

    @property
    def url(self) -> str:
        """The URL for `StateStore.open`, with every node as a seed."""
        return f"redis+cluster://:{self.nodes[0].password}@{self._places()}"

    def start(self, primaries: int, replicas: int) -> None:
        """Start `primaries` nodes with `replicas` each, distribute the slots, and wait until all agree."""
        first = [self._new_node() for _ in range(primaries)]
        rest = [self._new_node() for _ in range(primaries * replicas)]
        for at, node in enumerate(first):
            # Epochs differ from the start, because two primaries with the same epoch would first have to resolve that.
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", at + 1)
            node.ask("CLUSTER", "ADDSLOTSRANGE", SLOTS * at // primaries, SLOTS * (at + 1) // primaries - 1)
        for one, other in combinations(self.nodes, 2):
            one.ask("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus_port)
        wait_until(self._all_met, "the nodes of a cluster did not meet")
        for at, node in enumerate(rest):
            node.ask("CLUSTER", "REPLICATE", first[at % primaries].id)
        self.wait_converged()

    # Roles

    def primaries(self) -> list[ClusterNode]:
        """The nodes that answer and have slots, in the order of their first slots."""
        asked = [(node, node.itself()) for node in self._answering()]
        owners = [(member.slot_ranges[0].start, node) for node, member in asked if member.is_owner]
        return [node for _, node in sorted(owners, key=lambda each: each[0])]

    def replicas_of(self, primary: ClusterNode) -> list[ClusterNode]:
        """The replicas of a primary that answer; it need not answer itself."""
        return [node for node in self._answering() if node.itself().primary_id == primary.id]

    def primary_of(self, slot: int) -> ClusterNode:
        """The node that has a slot. Raises ConfigurationError if none that answers has it."""
        for node in self._answering():
            if node.itself().owns(slot):
                return node
        raise ConfigurationError(f"no node that answers has slot {slot}")

    # Faults

    def kill_primary(self, primary: ClusterNode | None = None) -> ClusterNode:
        """Kill a primary, the first one if none is given, and return it; `start` brings it back as a replica.

        Its replica replaces it some seconds later: `wait_converged` waits for that.
        """
        chosen = primary or self.primaries()[0]
        chosen.kill()
        return chosen

    def failover(self, primary: ClusterNode) -> ClusterNode:
        """Promote one of a primary's replicas after it received all writes; return the new primary."""
        return self._promote(primary, ())

    def takeover(self, primary: ClusterNode) -> ClusterNode:
        """Promote a replica without the agreement of its primary or of other nodes; return the replica."""
        return self._promote(primary, ("TAKEOVER",))

    def wait_converged(self) -> None:
        """Wait until all nodes that answer agree on the roles, serve every slot, and replicas are in sync."""
        wait_until(self.converged, f"the nodes {self._places()} did not agree")

    def converged(self) -> bool:
        """Whether all nodes that answer agree, serve every slot, and replicas are in sync. May raise OSError."""
        nodes = self._answering()
        ports = {node.port for node in nodes}
        views = {frozenset(m for m in node.members() if m.port in ports) for node in nodes}
        if len(views) != 1:
            return False
        (view,) = views
        served = sum(len(each) for member in view if member.is_owner for each in member.slot_ranges)
        return {m.port for m in view} == ports and served == SLOTS and all(node.serving() for node in nodes)

    # Growing, shrinking, resharding

    def add_node(self) -> ClusterNode:
        """Add a primary without slots, and return it when all nodes know it."""
        node = self._new_node()
        for other in self._answering():
            if other is not node:
                node.ask("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus_port)
        wait_until(self._all_met, "a node did not meet the others")
        self.wait_converged()
        return node

    def add_replica(self, primary: ClusterNode) -> ClusterNode:
        """Add a replica of this primary, and return it when it is in sync."""
        node = self.add_node()
        node.ask("CLUSTER", "REPLICATE", primary.id)
        self.wait_converged()
        return node

    def remove_node(self, node: ClusterNode) -> None:
        """Let all others forget a node, and stop it. Raises ConfigurationError if it still has slots."""
        if node in self.primaries():
            raise ConfigurationError(f"the node on port {node.port} has slots; move them first")
        for replica in self.replicas_of(node):
            replica.ask("CLUSTER", "REPLICATE", self.primaries()[0].id)
        gone = node.id
        self.nodes.remove(node)
        node.kill()
        for other in self._answering():
            other.ask("CLUSTER", "FORGET", gone)
        self.wait_converged()

    def move_slots(self, slots: Iterable[int], to: ClusterNode, *, pause: float = 0.0) -> None:
        """Move slots to a node one after the other; as under load, each move takes `pause` seconds."""
        by_port = {node.port: node for node in self.nodes}
        for slot in slots:
            # The target is updated first when a slot is handed over, so its view is the newest.
            owners = [member for member in to.members() if member.is_owner]
            source = next(by_port[member.port] for member in owners if member.owns(slot))
            if source is to:
                continue
            others = [by_port[member.port] for member in owners if member.port not in (source.port, to.port)]
            begin_move(slot, source, to)
            time.sleep(pause)
            while move_keys(slot, source, to):
                pass
            end_move(slot, source, to, others)

    def kill(self) -> None:
        """Kill every process; their data is removed with their folders."""
        for node in self.nodes:
            node.kill()

    def _places(self) -> str:
        return ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def _promote(self, primary: ClusterNode, how: tuple[str, ...]) -> ClusterNode:
        replicas = self.replicas_of(primary)
        if not replicas:
            raise ConfigurationError(f"the primary on port {primary.port} has no replica that answers")
        chosen = replicas[0]
        chosen.ask("CLUSTER", "FAILOVER", *how)
        wait_until(lambda: chosen in self.primaries(), f"the replica on port {chosen.port} was not promoted")
        self.wait_converged()
        return chosen

    def _new_node(self) -> ClusterNode:
        self._started += 1
        node = ClusterNode(self.binary, self._options, self.directory / f"node-{self._started}")
        self.nodes.append(node)
        node.start()
        return node

    def _answering(self) -> list[ClusterNode]:
        return [node for node in self.nodes if node.answering]

    def _all_met(self) -> bool:
        ports = {node.port for node in self._answering()}
        return all({m.port for m in node.members() if m.joined} >= ports for node in self._answering())


# One node, and its view of the others


class ClusterNode(RedisServer):
    """A Redis or Valkey process in cluster mode. It comes back with its id and its slots, on its ports."""

    def __init__(self, binary: str, options: Sequence[str], directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(binary, options, directory)
        self.bus_port = free_port()
        self.id = ""  # the server chooses it

    def _settings(self) -> dict[str, str]:
        settings = {"cluster-enabled": "yes", "cluster-config-file": "nodes.conf", "cluster-node-timeout": "1000"}
        # Not the port + 10000, which may be assigned to an outgoing connection.
        return super()._settings() | settings | {"cluster-port": str(self.bus_port)}

    def start(self) -> None:
        """Start, or start again as the same node, and wait until the server answers."""
        super().start()
        self.id = str(self.ask("CLUSTER", "MYID"))

    def itself(self) -> Member:
        """The node's view of itself. Raises OSError if it does not answer."""
        return next(member for member in self.members() if member.port == self.port)

    def members(self) -> list[Member]:
        """All nodes that it knows, including itself. Raises OSError if it does not answer."""
        return [Member.of(line) for line in self.ask("CLUSTER", "NODES").splitlines()]

    def serving(self) -> bool:
        """Whether the cluster is ok, and a replica has its primary's data. May raise OSError."""
        with self.connect() as connection:
            if info(connection.ask("CLUSTER", "INFO"))["cluster_state"] != "ok":
                return False
            state = info(connection.ask("INFO", "replication"))
        return state["role"] == "master" or state["master_link_status"] == "up"


@dataclass(frozen=True, slots=True)
class Member:
    """A line of CLUSTER NODES: one node's view of another, or of itself."""

    id: str
    port: int
    primary_id: str | None
    slot_ranges: tuple[range, ...]
    joined: bool

    @classmethod
    def of(cls, line: str) -> Member:
        """Parse a line; moving slots (`[93-<-id]`) still belong to their old node."""
        id, address, flags, primary, _, _, _, _, *slots = line.split()
        port = int(address.partition("@")[0].rpartition(":")[2])
        ends = (word.split("-") for word in slots if not word.startswith("["))
        ranges = tuple(range(int(first_last[0]), int(first_last[-1]) + 1) for first_last in ends)
        return cls(id, port, None if primary == "-" else primary, ranges, "handshake" not in flags.split(","))

    @property
    def is_owner(self) -> bool:
        """Whether the node is a primary with slots."""
        return self.primary_id is None and bool(self.slot_ranges)

    def owns(self, slot: int) -> bool:
        """Whether the node is the primary of this slot."""
        return self.primary_id is None and any(slot in each for each in self.slot_ranges)


# Slots moved from node to node


def begin_move(slot: int, source: ClusterNode, target: ClusterNode) -> None:
    """Mark a slot as moving: from now on its keys may be on either node."""
    # The target first: the source may redirect a client to it at once.
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)


def move_keys(slot: int, source: ClusterNode, target: ClusterNode, count: int = _KEYS_AT_ONCE) -> int:
    """Move up to `count` keys of a moving slot, and return their number."""
    with source.connect() as connection:
        keys = connection.ask("CLUSTER", "GETKEYSINSLOT", slot, count)
        if keys:
            destination = ("127.0.0.1", target.port, "", 0, _MIGRATE_MS)
            connection.ask("MIGRATE", *destination, "AUTH", target.password, "KEYS", *keys)
        return len(keys)


def end_move(slot: int, source: ClusterNode, target: ClusterNode, others: Iterable[ClusterNode]) -> None:
    """Hand a slot over, and notify the `others` at once rather than by gossip."""
    # The target first: with the source first, a crash in between would leave a slot without an owner.
    for node in (target, source, *others):
        try:
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.id)
        except ReplyError as error:
            # A node that gave away its last slot, and received that by gossip, is already a replica of the new owner.
            if node is target or "only with masters" not in str(error):
                raise
