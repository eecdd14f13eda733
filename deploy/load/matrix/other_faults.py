"""What befalls workers, SQL and the network. Law: a fault returns when it is over."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

from deploy.load.matrix.scene import Scene
from distributed_state import StateStore
from distributed_state.programs.servers import wait_until

_LASTS = 2.0


def kill_worker(scene: Scene) -> None:
    """SIGKILL to a writer; another process takes its place."""
    scene.workers.kill("w0")


def stop_worker(scene: Scene) -> None:
    """SIGSTOP to a writer, for two seconds."""
    scene.workers.pause("w0")
    scene.rest(_LASTS)
    scene.workers.resume("w0")


def kill_sql(scene: Scene) -> None:
    """SIGKILL to PostgreSQL, for two seconds."""
    scene.sql.kill()
    scene.rest(_LASTS)
    scene.sql.start()


def freeze_sql(scene: Scene) -> None:
    """SIGSTOP to PostgreSQL and its backends, for two seconds."""
    scene.sql.pause()
    try:
        scene.rest(_LASTS)
    finally:
        scene.sql.resume()


def fill_disk(scene: Scene) -> None:
    """No byte is left on the disk of PostgreSQL, for two seconds; if it ends by that, it is started again."""
    ballast = scene.sql.directory / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 65_536)
    try:
        scene.rest(_LASTS)
    finally:
        ballast.unlink()
    time.sleep(0.5)
    scene.sql.start()
    wait_until(scene.sql._answers, "PostgreSQL did not answer")


def copy_sql(scene: Scene) -> None:
    """Keep a copy of all files of PostgreSQL, made while it is down."""
    data = scene.sql.directory / "data"
    scene.sql.stop()
    subprocess.run(["cp", "-a", str(data), str(data.with_name("older"))], check=True)
    scene.sql.start()


def restore_sql(scene: Scene) -> None:
    """PostgreSQL dies, and comes back with that copy; after two seconds somebody runs `repair`."""
    data = scene.sql.directory / "data"
    scene.sql.kill()
    os.rename(data, data.with_name("newer"))
    os.rename(data.with_name("older"), data)
    scene.sql.start()
    scene.rest(_LASTS)
    with StateStore.open(**scene.settings, archiver=False) as store:
        store.admin.repair()


def drop_answers(scene: Scene) -> None:
    """One answer of ten gets lost, and its connection with it, for as long as the run lasts without that."""
    proxies = [server.proxy for server in scene.warm.servers()]
    for proxy in proxies:
        proxy.dropped = 0.1
    scene.rest(scene.seconds)
    for proxy in proxies:
        proxy.dropped = 0.0


def drop_and_disorder(scene: Scene) -> None:
    """As net-dropped, and what two connections sent one after the other may arrive the other way round."""
    proxies = [server.proxy for server in scene.warm.servers()]
    for proxy in proxies:
        proxy.uneven = 0.02
    drop_answers(scene)
    for proxy in proxies:
        proxy.uneven = 0.0


def half_open(scene: Scene) -> None:
    """Nothing passes any more on the workers' connections, and nobody closes them."""
    for server in scene.warm.servers():
        server.proxy.mute("client")
    scene.rest(_LASTS)


def delay_of(seconds: float) -> Callable[[Scene], None]:
    """A fault: see its sentence."""

    def delay(scene: Scene) -> None:
        """Every answer to a worker is a tenth of a second late, for two seconds."""
        proxies = [server.proxy for server in scene.warm.servers()]
        for proxy in proxies:
            proxy.late["client"] = seconds
        scene.rest(_LASTS)
        for proxy in proxies:
            proxy.late["client"] = 0.0

    return delay
