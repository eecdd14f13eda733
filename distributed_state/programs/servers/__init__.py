"""Real servers on free loopback ports, for the replay, the tests and the benchmarks."""

from distributed_state.programs.servers.postgres import PostgresServer, postgres_server
from distributed_state.programs.servers.process import (
    free_port,
    postgres_binaries,
    redis_binary,
    wait_until,
    working_folder,
)
from distributed_state.programs.servers.redis import (
    ClusterNode,
    Connection,
    RedisCluster,
    RedisSentinel,
    RedisServer,
    SentinelServer,
    ask,
    begin_move,
    end_move,
    move_keys,
    redis_cluster,
    redis_sentinel,
    redis_server,
    redis_server_unless,
)

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
    "redis_server_unless",
    "wait_until",
    "working_folder",
]
