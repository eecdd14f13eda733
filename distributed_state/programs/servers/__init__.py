"""Real servers on free loopback ports, for the replay, the tests and the benchmarks."""

from distributed_state.programs.servers.asking import Connection, ask
from distributed_state.programs.servers.binaries import postgres_binaries, redis_binary
from distributed_state.programs.servers.cluster import RedisCluster, redis_cluster
from distributed_state.programs.servers.cluster_node import ClusterNode
from distributed_state.programs.servers.postgres import PostgresServer, postgres_server
from distributed_state.programs.servers.process import free_port, wait_until, working_folder
from distributed_state.programs.servers.redis import RedisServer, redis_server
from distributed_state.programs.servers.resharding import begin_move, end_move, move_keys
from distributed_state.programs.servers.sentinel import RedisSentinel, SentinelServer, redis_sentinel

__all__ = [
    "ClusterNode",
    "Connection",
    "PostgresServer",
    "RedisCluster",
    "RedisSentinel",
    "RedisServer",
    "SentinelServer",
    "ask",
    "begin_move",
    "end_move",
    "free_port",
    "move_keys",
    "postgres_binaries",
    "postgres_server",
    "redis_binary",
    "redis_cluster",
    "redis_sentinel",
    "redis_server",
    "wait_until",
    "working_folder",
]
