"""What an operator is told, by each instrument, of each fault: within 15 s, and nothing while all is well.

pytest --wide -n 0 -s tests/faults/test_told.py     prints the table of docs/reliability.md
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from watching import SECONDS, Fleet, named, turns

from distributed_state.programs.servers import RedisServer, postgres_server, redis_server


@dataclass(frozen=True)
class Fault:
    """What is broken, and the words by which each instrument names it."""

    begin: Callable[[Any], None]
    doctor: str
    log: str
    alert: str
    apart: bool = False  # archivers of their own, as in docker-compose.yml


class Scene:
    """A fleet and its servers, of one test alone."""

    def __init__(self, stack: ExitStack, folder: Path, fault: Fault | None) -> None:
        self.redis: RedisServer = stack.enter_context(redis_server("--appendonly", "yes"))
        self.postgres = stack.enter_context(postgres_server())
        self.fleet = Fleet(self.redis.url, self.postgres.url, folder)
        stack.callback(self.fleet.close)
        apart = fault is not None and fault.apart
        if apart:
            self.fleet.archiver()
        self.fleet.worker(archives=not apart)
        self.fleet.watch(stack)
        self.stack = stack


def archivers_die(scene: Scene) -> None:
    scene.fleet.processes["archiver"].kill()


def sql_freezes(scene: Scene) -> None:
    scene.postgres.pause()
    scene.stack.callback(scene.postgres.resume)


def redis_is_emptied(scene: Scene) -> None:
    scene.redis.ask("FLUSHALL")


def redis_is_demoted(scene: Scene) -> None:
    other = scene.stack.enter_context(redis_server())
    scene.redis.follow(other)


def redis_is_full(scene: Scene) -> None:
    scene.redis.ask("CONFIG", "SET", "maxmemory", "1mb")


FAULTS = {
    "the archivers are dead": Fault(
        archivers_die, "^archivers: 0 of", "was lost; it archived", "^NobodyArchives$", apart=True
    ),
    "SQL is frozen": Fault(sql_freezes, "^sql: .*no sign of life", "no sign of life", "^(SqlDown|ArchiverFailing)$"),
    "Redis was emptied": Fault(redis_is_emptied, "^lost data: ", "Redis was emptied", "^RedisLostData$"),
    "Redis was demoted": Fault(redis_is_demoted, "a read-only replica", "READONLY|replica", "^RedisRefusing$"),
    "Redis is full": Fault(redis_is_full, "^memory: |at maxmemory", "at maxmemory", "^RedisFull$"),
}


@pytest.fixture
def scene_of(tmp_path: Path) -> Iterator[Callable[[Fault | None], Scene]]:
    if shutil.which("prometheus") is None:
        assert os.environ.get("CI") != "true", "CI watches a fleet with a Prometheus: install it"
        pytest.skip("there is no prometheus here: apt-get install prometheus")
    tmp_path.chmod(0o755)
    with ExitStack() as stack:
        yield lambda fault: Scene(stack, tmp_path, fault)


@pytest.mark.wide
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", FAULTS)
def test_every_instrument_names_the_fault(name: str, scene_of: Callable[[Fault | None], Scene]) -> None:
    fault = FAULTS[name]
    scene = scene_of(fault)
    with turns(scene.fleet):
        time.sleep(5)  # an archive has begun, and Prometheus has seen a healthy fleet
        code, said = scene.fleet.doctor()
        assert code == 0, said
        assert not scene.fleet.alerts()
        past = len(scene.fleet.logged("worker"))
        began = time.monotonic()
        fault.begin(scene)
        found = named(scene.fleet, {"doctor": fault.doctor, "log": fault.log, "alert": fault.alert}, began, past)
    shown = [f"{each.seconds:.1f}" if each.seconds is not None else each.words for each in found.values()]
    sys.stdout.write(f"| {name} | {' | '.join(shown)} |\n")
    late = {instrument: each for instrument, each in found.items() if each.seconds is None or each.seconds > SECONDS}
    assert not late
