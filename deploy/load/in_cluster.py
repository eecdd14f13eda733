"""What a commit costs in a cluster of three, beside the same on one server."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import Any

from deploy.load.rows import ROUNDS, Row, at_most
from distributed_state import StateStore
from distributed_state.programs.servers import RedisServer, redis_cluster

_SESSIONS = 64
_EACH = 300


def in_cluster(single: RedisServer) -> list[Row]:
    """Commits of many sessions, over all nodes; nothing is hot, so that what is sent is the commits alone."""
    # Without replicas: what these send on their own would be counted as round trips.
    with redis_cluster(replicas=0, binary=single.binary) as cluster, ExitStack() as stack:
        stores = {}
        settings: dict[str, Any] = {"archive": "memory", "archiver": False, "beat": 0, "max_staleness": 0}
        for name, url in (("cluster", cluster.url), ("single", single.url)):
            store = stack.enter_context(StateStore.open(url, namespace=f"bench-{name}", **settings))
            stores[name] = [store.session(f"s{number}") for number in range(_SESSIONS)]
        taken: dict[str, list[float]] = {name: [] for name in stores}
        for sessions in stores.values():
            commit_many(sessions)
        before = reads(cluster.nodes)
        for _ in range(2 * ROUNDS):
            for name, sessions in stores.items():
                taken[name].append(commit_many(sessions))
        # Asking each node how often it read is one more time.
        trips = (reads(cluster.nodes) - before - len(cluster.nodes)) / (2 * ROUNDS * _EACH)
    found = {name: statistics.median(times) for name, times in taken.items()}
    return [
        Row("commit in a cluster of 3", f"{trips:.3g} round trips", "1 round trip", trips, "<= 1 round trip",
            trips <= 1.005),
        at_most("commit in a cluster of 3, client's CPU", found["cluster"], found["single"], 1.15, "us", "one server"),
    ]  # fmt: skip


def commit_many(sessions: list[Any]) -> float:
    """Microseconds of this thread for a commit."""
    used = time.thread_time()
    for number in range(_EACH):
        sessions[number % _SESSIONS].set("a", 7)
    return (time.thread_time() - used) / _EACH * 1e6


def reads(servers: list[RedisServer]) -> int:
    """How often servers read from a socket of a client."""
    return sum(int(server.info("stats")["total_reads_processed"]) for server in servers)
