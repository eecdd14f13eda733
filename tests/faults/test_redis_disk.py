"""Redis cannot write its file: the disk is named by the error of a write, by the doctor and by the metric."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from watching import within

from distributed_state import StateStore, WarmUnavailable
from distributed_state.programs.servers import RedisServer, redis_server

pytestmark = [pytest.mark.wide, pytest.mark.timeout(60)]
Running = tuple[RedisServer, Callable[[], Any], Callable[[], Any]]


@contextmanager
def full_disk(folder: Path) -> Iterator[Running]:
    """A server with an append-only file on a small disk; how to fill the disk, and how to make room."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m,mode=777", "none", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("a small disk cannot be mounted here: it needs root")

    def fill() -> None:
        others = (folder / "others").open("wb", buffering=0)
        try:
            while True:
                others.write(b"x" * 4096)
        except OSError:
            others.close()

    with ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=False)
        yield (
            stack.enter_context(redis_server("--appendonly", "yes", directory=folder)),
            fill,
            (folder / "others").unlink,
        )


@contextmanager
def snapshot_fails(folder: Path) -> Iterator[Running]:
    """A server that refuses writes because it could not save its RDB file: a folder is in its place."""
    file = folder / "dump.rdb"
    with redis_server(directory=folder) as server:

        def fail() -> None:
            server.ask("CONFIG", "SET", "save", "900 1")
            file.unlink(missing_ok=True)
            file.mkdir()
            server.ask("BGSAVE")
            within(10, lambda: server.info("persistence")["rdb_last_bgsave_status"] == "err", lambda: "it was saved")

        def mend() -> None:
            file.rmdir()
            server.ask("BGSAVE")

        yield server, fail, mend


@pytest.mark.parametrize(("running", "file"), [(full_disk, "append-only file"), (snapshot_fails, "RDB file")])
def test_a_disk_that_redis_cannot_write_to_is_named_with_its_cure(tmp_path: Path, running: Any, file: str) -> None:
    settings = {"archive": f"sqlite:///{tmp_path}/a.db", "retry_for": 0.5, "beat": 0.2}
    (tmp_path / "disk").mkdir()
    with running(tmp_path / "disk") as (server, fail, mend), StateStore.open(server.url, **settings) as store:
        session, refusals = store.session("s"), lambda: store._core._lifecycle.tiers().heartbeat.refusals
        session.set("n", 1)
        within(10, lambda: not store.admin.stats()["unarchived"], store.admin.stats)
        assert all(finding.ok or finding.name == "persistence" for finding in store.admin.doctor())
        assert not any(refusals().values())
        fail()
        with pytest.raises(WarmUnavailable, match="until it can write to its disk: make room there"):
            for number in range(50):  # what fits into the last block of the file is written
                session.set("text", "x" * 50_000 + str(number))
        within(10, lambda: refusals()[("disk",)], refusals)
        assert not refusals()[("away",)]
        found = {finding.name: finding for finding in store.admin.doctor() if not finding.ok}
        assert f"Redis cannot write its {file}" in found["persistence"].found
        assert "make room" in found["persistence"].advice
        mend()
        deadline = time.monotonic() + 20
        while True:
            try:
                session.set("n", 2)
                break
            except WarmUnavailable:
                assert time.monotonic() < deadline
        within(10, lambda: not any(refusals().values()), refusals)
