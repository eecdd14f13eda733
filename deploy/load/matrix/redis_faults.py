"""What befalls Redis. Law: a fault returns when it is over, with the servers agreeing again."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from deploy.load.matrix.histories import now
from deploy.load.matrix.scene import Scene
from deploy.load.matrix.topology import Proxied
from distributed_state.programs.servers import wait_until

# A server that writes to its disk once a second may lose what is younger, and keeps what is older.
_EVERYSEC = 1.0
_DATA = ("appendonlydir", "dump.rdb")


def kill_all(scene: Scene) -> None:
    """SIGKILL to every server at once; each comes back with its files."""
    scene.restart(*scene.warm.servers())


def begin_to_watch(scene: Scene) -> None:
    """From now on note how long each append-only file is."""
    lengths: dict[Proxied, deque[tuple[float, int]]] = {each: deque() for each in scene.warm.servers()}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            for server, noted in lengths.items():
                if path := server.append_only_file():
                    noted.append((now(), path.stat().st_size))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    scene.stack.callback(over.set)

    def cut() -> None:
        moment = now() - _EVERYSEC
        over.set()
        thread.join()

        def shorten(server: Proxied) -> None:
            path = server.append_only_file()
            if path is None or not lengths[server]:
                return
            kept = max((size for at, size in lengths[server] if at <= moment), default=lengths[server][0][1])
            with path.open("r+b") as file:
                file.truncate(min(kept, path.stat().st_size))

        scene.restart(*lengths, between=shorten)

    scene.undo.append(cut)


def lose_power(scene: Scene) -> None:
    """All servers die, and their files end where a second earlier they ended."""
    scene.undo.pop()()


def lag_of(seconds: float) -> Callable[[Scene], None]:
    """Replication of the first primary is late from now on."""

    def lag(scene: Scene) -> None:
        primary = scene.warm.primaries()[0]
        primary.proxy.late["replica"] = seconds

    return lag


def replace_primary(scene: Scene) -> None:
    """SIGKILL to the first primary; once another one is elected, it comes back."""
    primary = scene.warm.primaries()[0]
    primary.kill()
    scene.warm.wait_replaced(primary)
    primary.proxy.late["replica"] = 0.0
    primary.start()
    scene.warm.converge()


def freeze_primary(scene: Scene) -> None:
    """SIGSTOP to the first primary until another one is elected; it wakes up and takes itself for the primary."""
    primary = scene.warm.primaries()[0]
    primary.pause()
    try:
        scene.warm.wait_replaced(primary)
        scene.rest(0.5)
    finally:
        primary.resume()
    scene.warm.converge()


def partition_primary(scene: Scene) -> None:
    """The primary is cut off from its replicas and the Sentinels, and not from the workers, until it is replaced."""
    primary = scene.warm.primaries()[0]
    primary.proxy.blocked = frozenset({"replica", "sentinel"})
    primary.proxy.mute("replica", "sentinel")
    try:
        scene.warm.wait_replaced(primary)
        scene.rest(1.0)
    finally:
        primary.proxy.blocked = frozenset()
        primary.proxy.cut("replica", "sentinel")
    scene.warm.converge()


def empty_primary(scene: Scene) -> None:
    """SIGKILL to the first primary, and it starts at once, without its files, before anybody is elected."""
    scene.restart(scene.warm.primaries()[0], between=_without_data)


def _without_data(server: Proxied) -> None:
    for name in _DATA:
        _remove(server.directory / name)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def copy_files(scene: Scene) -> None:
    """Keep what every server has on its disk now."""
    for server in scene.warm.servers():
        place = scene.kept[server] = Path(tempfile.mkdtemp(prefix="older-", dir=scene.folder))
        for path in (server.directory / name for name in _DATA):
            if path.is_dir():
                shutil.copytree(path, place / path.name)
            elif path.exists():
                shutil.copy2(path, place / path.name)


def save_and_copy(scene: Scene) -> None:
    """Let every server save a snapshot, and keep that."""
    for server in scene.warm.servers():
        server.ask("SAVE")
    copy_files(scene)


def restart_older(scene: Scene) -> None:
    """All servers die, and come back with what was kept."""

    def put_back(server: Proxied) -> None:
        _without_data(server)
        for path in scene.kept[server].iterdir():
            if path.is_dir():
                shutil.copytree(path, server.directory / path.name)
            else:
                shutil.copy2(path, server.directory / path.name)

    scene.restart(*scene.kept, between=put_back)


def copy_server(scene: Scene) -> None:
    """Another server takes a copy of all data, and hears of no later write."""
    (primary,) = scene.warm.primaries()
    folder = Path(tempfile.mkdtemp(prefix="older-", dir=scene.folder))
    other = Proxied(primary.binary, (), folder, scene.network)
    scene.stack.callback(other.kill)
    other.start()
    other.follow(primary)
    wait_until(other.in_sync, "the copy was not made")
    other.ask("REPLICAOF", "NO", "ONE")

    def follow() -> None:
        primary.follow(other)
        wait_until(primary.in_sync, "the older data was not taken over")
        primary.ask("REPLICAOF", "NO", "ONE")
        other.kill()

    scene.undo.append(follow)


def follow_older(scene: Scene) -> None:
    """REPLICAOF that other server, and NO ONE: older data under connections that live."""
    scene.undo.pop()()


def flush_all(scene: Scene) -> None:
    """FLUSHALL at the first primary."""
    scene.warm.primaries()[0].ask("FLUSHALL")


def fill_memory(scene: Scene) -> None:
    """A limit of memory that is less than what is used, for a second and a half."""
    primaries = scene.warm.primaries()
    for server in primaries:
        server.ask("CONFIG", "SET", "maxmemory", int(server.info("memory")["used_memory"]) - 64 * 1024)
    scene.rest(1.5)
    for server in primaries:
        server.ask("CONFIG", "SET", "maxmemory", 0)


def flush_scripts(scene: Scene) -> None:
    """SCRIPT FLUSH everywhere, several times."""
    for _ in range(5):
        for server in scene.warm.servers():
            server.ask("SCRIPT", "FLUSH")
        scene.rest(0.2)


def jump_server_clocks(scene: Scene) -> None:
    """The servers' clocks go an hour ahead, then ten minutes back, then right."""
    _jump(scene, scene.server_clock)


def jump_worker_clocks(scene: Scene) -> None:
    """The workers' clocks go an hour ahead, then ten minutes back, then right."""
    _jump(scene, scene.worker_clock)


def _jump(scene: Scene, clock: Path) -> None:
    for seconds in ("+3600", "-600", "+0"):
        clock.write_text(f"{seconds}\n")
        until = time.monotonic() + 1.5
        scene.rest(max(0.0, until - time.monotonic()))
