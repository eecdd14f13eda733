"""The warm tiers of a cell, each server behind a proxy. Law: a server is known by its proxy's port, and by no other.

So what Sentinels and cluster nodes name to clients and replicas is the proxy, too. Only the cluster's bus goes around.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from hiredis import ReplyError

from deploy.load.matrix.proxy import Network, Proxy
from deploy.load.warm_tiers import moment
from distributed_state.programs.servers import (
    ClusterNode,
    Connection,
    RedisCluster,
    RedisSentinel,
    RedisServer,
    free_port,
    redis_binary,
)

TOPOLOGIES = ("single", "sentinel", "cluster")
DEFAULTS = (
    "--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "volatile-lru",
    "--auto-aof-rewrite-percentage", "0",
)  # fmt: skip


class Proxied(RedisServer):
    """A server whose `port` is its proxy's; what is asked of it here goes to the server itself."""

    def __init__(self, binary: str, options: Sequence[str], directory: Path, network: Network) -> None:
        super().__init__(binary, options, directory)
        self.own_port = free_port()
        self.proxy: Proxy = network.proxy(self.port, self.own_port)

    def connect(self) -> Connection:
        """Connect for plain commands. Raises OSError."""
        return Connection(self.own_port, password=self.password)

    def _settings(self) -> dict[str, str]:
        announced = {"replica-announce-ip": "127.0.0.1", "replica-announce-port": str(self.port)}
        return super()._settings() | announced | {"port": str(self.own_port)}

    def _answers(self) -> bool:
        try:
            return str(self.ask("PING")) == "PONG"
        except ReplyError:  # it loads its files
            return False

    def append_only_file(self) -> Path | None:
        """The file that grows with every write, if there is one."""
        return next(iter(sorted(self.directory.glob("appendonlydir/*.incr.aof"), reverse=True)), None)


class ProxiedNode(Proxied, ClusterNode):
    """A node of a cluster whose `port` is its proxy's."""

    def _settings(self) -> dict[str, str]:
        return super()._settings() | {"cluster-announce-port": str(self.port)}


class Warm(Protocol):
    """What a cell's workers are given the URL of."""

    kind: str
    url: str

    def servers(self) -> Sequence[Proxied]: ...
    def primaries(self) -> Sequence[Proxied]: ...
    def replicas(self, primary: Proxied) -> Sequence[Proxied]: ...
    def wait_replaced(self, primary: Proxied) -> float: ...
    def converge(self) -> None: ...


class Single:
    """One server."""

    kind = "single"

    def __init__(self, server: Proxied) -> None:
        self.url = server.url
        self._server = server

    def servers(self) -> Sequence[Proxied]:
        return [self._server]

    def primaries(self) -> Sequence[Proxied]:
        return [self._server]

    def replicas(self, primary: Proxied) -> Sequence[Proxied]:
        return []

    def wait_replaced(self, primary: Proxied) -> float:
        raise RuntimeError("one server has no replica to fail over to")

    def converge(self) -> None:
        """It agrees with itself."""


class _Watched(RedisSentinel):
    """A primary with replicas and Sentinels; only the servers are behind proxies."""

    def __init__(self, binary: str, options: Sequence[str], directory: Path, network: Network) -> None:
        super().__init__(redis_binary(), options, directory)
        self._server_binary, self._network = binary, network

    def _new_server(self, at: int) -> RedisServer:
        folder = self.directory / f"server-{at + 1}"
        folder.mkdir(parents=True, exist_ok=True)
        server = Proxied(self._server_binary, self._options, folder, self._network)
        self.servers.append(server)
        server.start()
        return server


class Sentinel:
    """A primary, two replicas and three Sentinels."""

    kind = "sentinel"

    def __init__(self, watched: RedisSentinel) -> None:
        self.url = watched.url
        self._watched = watched

    def servers(self) -> Sequence[Proxied]:
        return [each for each in self._watched.servers if isinstance(each, Proxied)]

    def primaries(self) -> Sequence[Proxied]:
        primary = self._watched.primary
        return [each for each in self.servers() if each is primary]

    def replicas(self, primary: Proxied) -> Sequence[Proxied]:
        return [each for each in self.servers() if each is not primary and each.answering]

    def wait_replaced(self, primary: Proxied) -> float:
        return moment(lambda: self._watched.primary is not primary, "no Sentinel named another primary")

    def converge(self) -> None:
        self._watched.wait_converged()


class _Formed(RedisCluster):
    def __init__(self, binary: str, options: Sequence[str], directory: Path, network: Network) -> None:
        super().__init__(binary, options, directory)
        self._network = network

    def _new_node(self) -> ClusterNode:
        self._started += 1
        node = ProxiedNode(self.binary, self._options, self.directory / f"node-{self._started}", self._network)
        self.nodes.append(node)
        node.start()
        return node


class Cluster:
    """Three primaries, each with a replica."""

    kind = "cluster"

    def __init__(self, cluster: RedisCluster) -> None:
        self.url = cluster.url
        self._cluster = cluster

    def servers(self) -> Sequence[Proxied]:
        return [each for each in self._cluster.nodes if isinstance(each, Proxied)]

    def primaries(self) -> Sequence[Proxied]:
        owners = {node.port for node in self._cluster.primaries()}
        return [each for each in self.servers() if each.port in owners]

    def replicas(self, primary: Proxied) -> Sequence[Proxied]:
        assert isinstance(primary, ProxiedNode)
        found = {node.port for node in self._cluster.replicas_of(primary)}
        return [each for each in self.servers() if each.port in found]

    def wait_replaced(self, primary: Proxied) -> float:
        def replaced() -> bool:
            answering = [each for each in self._cluster.nodes if each.answering and each.port != primary.port]
            return all(any(m.port == primary.port and not m.is_owner for m in node.members()) for node in answering)

        return moment(replaced, "no replica was elected")

    def converge(self) -> None:
        self._cluster.wait_converged()


@contextmanager
def topology(kind: str, options: Sequence[str], folder: Path, network: Network, binary: str) -> Iterator[Warm]:
    """Start one of these, and end it."""
    words = [*DEFAULTS, *options]
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "single":
        server = Proxied(binary, words, folder, network)
        try:
            server.start()
            yield Single(server)
        finally:
            server.kill()
    elif kind == "sentinel":
        watched = _Watched(binary, words, folder, network)
        try:
            watched.start(replicas=2, sentinels=3, down_after_ms=1000)
            yield Sentinel(watched)
        finally:
            watched.kill()
    else:
        cluster = _Formed(binary, words, folder, network)
        try:
            cluster.start(primaries=3, replicas=1)
            yield Cluster(cluster)
        finally:
            cluster.kill()
