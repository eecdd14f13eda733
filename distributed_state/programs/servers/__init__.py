"""Real servers on free loopback ports, for the replay, the tests and the benchmarks."""

from distributed_state.programs.servers.binaries import postgres_binaries, redis_binary
from distributed_state.programs.servers.postgres import PostgresServer, postgres_server
from distributed_state.programs.servers.process import free_port
from distributed_state.programs.servers.redis import RedisServer, redis_server

__all__ = [
    "PostgresServer",
    "RedisServer",
    "free_port",
    "postgres_binaries",
    "postgres_server",
    "redis_binary",
    "redis_server",
]
