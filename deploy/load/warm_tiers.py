"""The warm tiers of a fleet on this machine: one server, Sentinels, a cluster. Law: what is ended here comes back.

A fault that replaces a primary returns the moment at which the new one was elected, as Sentinel or CLUSTER NODES say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from distributed_state.programs.servers import (
    RedisCluster,
    RedisSentinel,
    RedisServer,
    redis_cluster,
    redis_sentinel,
    redis_server,
)
from distributed_state.programs.servers.redis import SERVICE, ClusterNode

_OPTIONS = ("--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "volatile-lru")
_LOOK = 0.02
_ELECTED = 30.0
SHARE = 5  # one slot of so many is moved by `reshard`


class WarmTier(Protocol):
    """What the workers are given the URL of."""

    kind: str
    url: str

    def servers(self) -> list[RedisServer]: ...
    def stop(self, seconds: float) -> None: ...
    def kill_primary(self, seconds: float) -> float | None: ...
    def failover(self) -> float | None: ...
    def reshard(self) -> None: ...


class Single:
    """One server."""

    kind = "single"

    def __init__(self, server: RedisServer) -> None:
        self.url = server.url
        self._server = server

    def servers(self) -> list[RedisServer]:
        """The processes that hold data."""
        return [self._server]

    def stop(self, seconds: float) -> None:
        """End it in order, and start it again with its append-only file."""
        stop_all([self._server], seconds)

    def kill_primary(self, seconds: float) -> None:
        """SIGKILL. Nobody stands in, so it is down for so long and comes back by itself."""
        self._server.kill()
        time.sleep(seconds)
        self._server.start()

    def failover(self) -> float | None:
        """Nobody could take over."""
        raise RuntimeError("one server has no replica to fail over to")

    def reshard(self) -> None:
        """It has no slots."""
        raise RuntimeError("one server has no slots to move")


class Sentinel:
    """A primary, two replicas and three Sentinels."""

    kind = "sentinel"

    def __init__(self, watched: RedisSentinel) -> None:
        self.url = watched.url
        self._watched = watched

    def servers(self) -> list[RedisServer]:
        """The processes that hold data."""
        return list(self._watched.servers)

    def stop(self, seconds: float) -> None:
        """End the primary in order; by the time it is back another one has taken over."""
        primary = self._watched.primary
        stop_all([primary], seconds)
        self._watched.wait_converged()

    def kill_primary(self, seconds: float) -> float:
        """SIGKILL; once another one is elected, it comes back as its replica."""
        killed = self._watched.kill_primary()
        elected = self._elected(killed)
        killed.start()
        self._watched.wait_converged()
        return elected

    def failover(self) -> float:
        """SENTINEL FAILOVER: the primary is well, and replaced."""
        before = self._watched.primary
        self._watched.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)
        elected = self._elected(before)
        self._watched.wait_converged()
        return elected

    def primary(self) -> RedisServer:
        """The one that the Sentinels name."""
        return self._watched.primary

    def _elected(self, before: RedisServer) -> float:
        return moment(lambda: self.primary() is not before, "no Sentinel named another primary")

    def reshard(self) -> None:
        """It has no slots."""
        raise RuntimeError("a primary with replicas has no slots to move")


class Cluster:
    """Three primaries, each with a replica."""

    kind = "cluster"

    def __init__(self, cluster: RedisCluster) -> None:
        self.url = cluster.url
        self._cluster = cluster
        self._turn = 0

    def servers(self) -> list[RedisServer]:
        """The processes that hold data."""
        return list(self._cluster.nodes)

    def stop(self, seconds: float) -> None:
        """End every node in order, and start them again with their files."""
        stop_all(self._cluster.nodes, seconds)
        self._cluster.wait_converged()

    def kill_primary(self, seconds: float) -> float:
        """SIGKILL to the next primary; once its replica is elected, it comes back as a replica of that."""
        primary = self._next_primary()
        replicas = self._cluster.replicas_of(primary)
        self._cluster.kill_primary(primary)
        elected = self._elected(replicas)
        primary.start()
        self._cluster.wait_converged()
        return elected

    def failover(self) -> float:
        """CLUSTER FAILOVER: the next primary is well, and handed over."""
        replica = self._cluster.replicas_of(self._next_primary())[0]
        replica.ask("CLUSTER", "FAILOVER")
        elected = self._elected([replica])
        self._cluster.wait_converged()
        return elected

    def reshard(self, share: int = SHARE) -> None:
        """Move the first fifth (one of `share`) of every primary's slots to the next one, a slot after the other."""
        primaries = self._cluster.primaries()
        owned = [[slot for each in node.itself().slot_ranges for slot in each] for node in primaries]
        for at, slots in enumerate(owned):
            self._cluster.move_slots(slots[: len(slots) // share], primaries[(at + 1) % len(primaries)])
        self._cluster.wait_converged()

    def primaries(self) -> list[ClusterNode]:
        """Those that have slots."""
        return self._cluster.primaries()

    def _next_primary(self) -> ClusterNode:
        primaries = self._cluster.primaries()
        self._turn += 1
        return primaries[(self._turn - 1) % len(primaries)]

    def _elected(self, replicas: Iterable[ClusterNode]) -> float:
        return moment(lambda: any(each.itself().is_owner for each in replicas), "no replica was elected")


def stop_all(servers: Iterable[RedisServer], seconds: float) -> None:
    """End servers in order, and start them again after so long."""
    servers = list(servers)
    for server in servers:
        server.stop()
    time.sleep(seconds)
    for server in servers:
        server.start()


def moment(reached: Callable[[], bool], otherwise: str) -> float:
    """Wait until this is so; when it was first looked at and so, by time.monotonic(). Raises TimeoutError."""
    deadline = time.monotonic() + _ELECTED
    while (now := time.monotonic()) < deadline:
        with suppress(OSError):
            if reached():
                return now
        time.sleep(_LOOK)
    raise TimeoutError(f"{otherwise} within {_ELECTED:g} s")


@contextmanager
def warm_tier(kind: str, folder: Path) -> Iterator[WarmTier]:
    """Start one of these on free ports, and end it."""
    if kind == "single":
        with redis_server(*_OPTIONS, directory=folder) as server:
            yield Single(server)
    elif kind == "sentinel":
        with redis_sentinel(*_OPTIONS, directory=folder) as watched:
            yield Sentinel(watched)
    else:
        with redis_cluster(*_OPTIONS, directory=folder) as cluster:
            yield Cluster(cluster)
