"""What an operator is told, by each instrument, of each fault: within 15 s, and nothing while all is well.

pytest --wide -n 0 -s tests/faults/test_told.py     prints the table of docs/reliability.md
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hiredis import ReplyError
from watching import SECONDS, Fleet, Named, named, status, turns, within

from distributed_state.programs.servers import RedisServer, free_port, postgres_server, redis_server


@dataclass(frozen=True)
class Fault:
    """What is broken, and the words by which each instrument names it."""

    begin: Callable[[Any], None]
    doctor: str
    log: str
    metric: str  # what of Prometheus holds then, and no sooner
    alert: str
    apart: bool = False  # archivers of their own, as in docker-compose.yml
    tokens: bool = False  # callers have to have a token
    workers: int = 1  # that are expected, and run until it begins
    small: str = ""  # "sql": its tables are on a disk of their own, of 64 MB; "redis": its files are


class Scene:
    """A fleet and its servers, of one test alone."""

    def __init__(self, stack: ExitStack, folder: Path, fault: Fault | None) -> None:
        small = "" if fault is None else fault.small
        self.disk = folder / "disk"
        if small == "redis":
            self._mount(stack)
        directory = self.disk if small == "redis" else None
        self.redis: RedisServer = stack.enter_context(redis_server("--appendonly", "yes", directory=directory))
        self.postgres = stack.enter_context(postgres_server())
        archive = self._on_small_disk(stack) if small == "sql" else self.postgres.url
        self.fleet = Fleet(self.redis.url, archive, folder, {"LOG_LEVEL": "info"})
        if fault is not None and fault.tokens:
            self.fleet.make_token()
        stack.callback(self.fleet.close)
        apart = fault is not None and fault.apart
        if apart:
            self.fleet.archiver()
        workers = 1 if fault is None else fault.workers
        if workers > 1:
            self.fleet.settings["EXPECTED_WORKERS"] = str(workers)
        self.fleet.worker(archives=not apart)
        if workers > 1:
            self.fleet.worker("second", archives=False)
        self.fleet.watch(stack)
        self.stack = stack

    def sql(self, statement: str, database: str = "postgres") -> None:
        """Have PostgreSQL do something, as whoever restores a dump does."""
        url = self.postgres.url.replace("+psycopg", "").removesuffix("postgres") + database
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statement.encode())

    def _on_small_disk(self, stack: ExitStack) -> str:
        """The URL of a database whose tables are on a disk of 64 MB; the server's log of changes is elsewhere."""
        self.disk = self.postgres.directory / "disk"  # where its user may enter
        self._mount(stack)
        tables = self.disk / "tables"
        tables.mkdir()
        owner = (self.postgres.directory / "data").stat()
        os.chown(tables, owner.st_uid, owner.st_gid)
        self.sql(f"CREATE TABLESPACE small LOCATION '{tables}'")
        self.sql("CREATE DATABASE small TEMPLATE template0 TABLESPACE small")
        return self.postgres.url.removesuffix("postgres") + "small"

    def _mount(self, stack: ExitStack) -> None:
        """Make the small disk."""
        self.disk.mkdir()
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64m,mode=777", "none", str(self.disk)],
            capture_output=True,
            check=False,
        )
        if made.returncode:
            pytest.skip("a small disk cannot be mounted here: it needs root")
        stack.callback(subprocess.run, ["umount", "--lazy", str(self.disk)], check=False)


def archivers_die(scene: Scene) -> None:
    scene.fleet.processes["archiver"].kill()


def redis_dies(scene: Scene) -> None:
    scene.redis.kill()


def a_worker_dies(scene: Scene) -> None:
    scene.fleet.processes["second"].kill()


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


def redis_is_full_while_sql_is_away(scene: Scene) -> None:
    """What is archived makes room, and what is not fills Redis."""
    scene.redis.ask("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
    scene.redis.ask("CONFIG", "SET", "maxmemory", scene.redis.info("memory")["used_memory"])
    scene.postgres.kill()

    def refused() -> bool:
        with suppress(ReplyError):
            scene.redis.ask("SET", "large", "x" * 50_000, "PX", 1)
            return False
        return True

    within(60, refused, lambda: "Redis is not full")


def disk_is_full(scene: Scene) -> None:
    with (scene.disk / "others").open("wb") as file, suppress(OSError):
        while True:
            file.write(b"x" * 65_536)
            file.flush()


def sql_was_restored(scene: Scene) -> None:
    scene.sql("UPDATE cursors SET \"offset\" = 1, event = 'of yesterday' WHERE NOT closed")


FAULTS = {
    "the archivers are dead": Fault(
        archivers_die,
        "archivers:? 0 of",
        "was lost; it archived",
        "(sum(distributed_state_archived_partitions) or vector(0)) == 0",
        "^NobodyArchives$",
        apart=True,
    ),
    "SQL is frozen": Fault(
        sql_freezes,
        "sql:? .*no sign of life",
        "no sign of life",
        "distributed_state_sql_up == 0",
        "^(SqlDown|ArchiverFailing)$",
    ),
    "SQL's disk is full": Fault(
        disk_is_full,
        "(archiver|partition [0-3]).*No space left on device",
        "No space left on device",
        "distributed_state_partition_diverged == 1 or distributed_state_archiver_failing == 1",
        "^(ArchiveDiverged|ArchiverFailing)$",  # as the full disk is needed by what is written, or by the cursors
        small="sql",
    ),
    "SQL was restored": Fault(
        sql_was_restored,
        "partition [0-3].*(SQL is older|do not fit|lacks|SQL has)",
        "journal and archive do not match|SQL is older",
        "distributed_state_partition_diverged == 1",
        "^ArchiveDiverged$",
    ),
    "Redis was emptied": Fault(
        redis_is_emptied,
        "lost data:? ",
        "Redis was emptied",
        "increase(distributed_state_restarted_partitions_total[1m]) > 0",
        "^RedisLostData$",
    ),
    "Redis was demoted": Fault(
        redis_is_demoted,
        "a read-only replica",
        "READONLY|replica",
        'distributed_state_redis_refusing{reason="replica"} == 1',
        "^RedisRefusing$",
    ),
    "Redis' disk is full": Fault(
        disk_is_full,
        "(server|persistence):? .*(make room there|cannot write its append-only file)",
        "make room there",
        'distributed_state_redis_refusing{reason="disk"} == 1',
        "^RedisRefusing$",
        small="redis",
    ),
    "no worker is ready, as Redis is down": Fault(
        redis_dies,
        "server: .*(refused|cannot be reached|no answer)|Redis.*(refused|cannot be reached)",
        "not ready: redis: ",
        'max(distributed_state_http_ready{need="redis"}) == 0',
        "^(NobodyServes|WorkerNotReady)$",
    ),
    "fewer workers run than are expected": Fault(
        a_worker_dies,
        "workers:? 1 of 2 expected workers run",
        "replica .* was lost",
        'sum(distributed_state_http_ready{need="redis"}) < max(distributed_state_expected_workers)',
        "^FewWorkers$",
        workers=2,
    ),
    "Redis is full": Fault(
        redis_is_full,
        "memory:? |at maxmemory",
        "at maxmemory",
        'increase(distributed_state_refused_writes_total{reason="full"}[1m]) > 0',
        "^RedisFull$",
    ),
    "Redis is full while SQL is away": Fault(
        redis_is_full_while_sql_is_away,
        "full:? writes are refused because Redis is full",
        "at maxmemory",
        "distributed_state_redis_memory_ratio > 0.8 and on() distributed_state_sql_up == 0",
        "^(RedisFull|RedisMemory)$",
        apart=True,
    ),
}


@dataclass(frozen=True)
class NoStart:
    """What a second worker is given that it cannot start with, and the words by which each instrument names that.

    `own`: the fleet hears nothing of it, so its own page, and a doctor with its settings, are asked.
    """

    settings: Callable[[Scene], dict[str, str]]
    said: str
    metric: str
    alert: str
    own: str = ""


def of_a_newer_release(scene: Scene) -> dict[str, str]:
    scene.sql("CREATE DATABASE newer")
    scene.sql("CREATE TABLE alembic_version (version_num text)", "newer")
    scene.sql("INSERT INTO alembic_version VALUES ('99')", "newer")
    return {"ARCHIVE": scene.postgres.url.removesuffix("postgres") + "newer"}


NO_STARTS = {
    "SQL's password is wrong": NoStart(
        lambda scene: {"ARCHIVE": scene.postgres.url.replace(scene.postgres.password, "wrong")},
        "password authentication failed",
        "distributed_state_failed_starts > 0",
        "^StartFailing$",
    ),
    "SQL's tables are of a newer release": NoStart(
        of_a_newer_release, "revision 99", "distributed_state_failed_starts > 0", "^StartFailing$"
    ),
    "Redis' URL is wrong": NoStart(
        lambda _: {"URL": f"redis://127.0.0.1:{free_port()}/0"},
        "127.0.0.1:.*(refused|cannot be reached)",
        "distributed_state_http_ready == 0",
        "^WorkerNotReady$",
        own="waiting for Redis, which does not answer",
    ),
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
    with turns(scene.fleet) as answered:
        within(20, lambda: answered[200] >= 10, lambda: f"turns are refused: {answered}")
        time.sleep(2)  # Prometheus has seen a healthy fleet
        code, said = scene.fleet.doctor()
        assert code == 0, said
        assert not scene.fleet.alerts()
        assert not scene.fleet.page()
        assert not scene.fleet.holds(fault.metric)
        past = len(scene.fleet.text("worker")().splitlines())
        fault.begin(scene)
        began = time.monotonic()
        wanted = {"doctor": fault.doctor, "page": fault.doctor, "log": fault.log}
        found = named(scene.fleet, wanted | {"metric": fault.metric, "alert": fault.alert}, began, past)
        assert not scene.fleet.malformed("worker", past)
    report(name, found)


@pytest.mark.wide
@pytest.mark.timeout(150)
def test_a_restart_of_redis_with_its_file_is_information(scene_of: Callable[[Fault | None], Scene]) -> None:
    """Each instrument names it, and none calls it a loss."""
    scene = scene_of(None)
    fleet = scene.fleet
    with turns(fleet) as answered:
        within(20, lambda: answered[200] >= 10, lambda: f"turns are refused: {answered}")
        past = len(fleet.text("worker")().splitlines())
        scene.redis.stop()
        scene.redis.start()
        began = time.monotonic()
        ways = {
            "doctor": lambda: fleet.finding("restarted redis"),
            "page": lambda: fleet.whole_page().splitlines(),
            "log": lambda: fleet.text("worker")().splitlines()[past:],
        }
        wanted = {
            "doctor": "^well: .*nothing is missing",
            "page": "nothing is missing",
            "log": "has everything that SQL",
            "metric": "distributed_state_complete_restarts_total > 0",
        }
        found = named(fleet, wanted, began, past, ways=ways)
        lost = "increase(distributed_state_restarted_partitions_total[1m]) > 0"
        assert not fleet.holds(f'{lost} or max_over_time(ALERTS{{alertname="RedisLostData"}}[1m]) > 0')
        assert not [line for line in fleet.page() if "lost data" in line]
        assert "lost: commits" not in "".join(ways["log"]())
    report("restart with its file", found)


@pytest.mark.wide
@pytest.mark.timeout(200)
def test_a_known_token_is_accepted_while_sql_is_away_for_more_than_a_minute(
    scene_of: Callable[[Fault | None], Scene],
) -> None:
    """Meanwhile each instrument names SQL; an unknown token can be neither accepted nor refused."""
    scene = scene_of(Fault(sql_freezes, "", "", "", "", tokens=True))
    fleet = scene.fleet
    with turns(fleet) as answered:
        within(20, lambda: answered[200] >= 50, lambda: f"turns are refused: {answered}")
        past = len(fleet.text("worker")().splitlines())
        began = time.monotonic()
        scene.postgres.kill()
        wanted = {"doctor": "sql:? .*refused", "page": "sql:? .*refused", "log": "not ready: sql|refused"}
        metric = {"metric": "distributed_state_sql_up == 0", "alert": "^SqlDown$"}
        found = named(fleet, wanted | metric, began, past)
        time.sleep(max(0.0, began + 75 - time.monotonic()))
        before = answered[200]
        within(5, lambda: answered[200] >= before + 10, lambda: f"turns are refused: {answered}")
        known, fleet.token = fleet.token, "unknown"
        assert status(f"http://127.0.0.1:{fleet.ports[0]}/v1/conversations/c1", fleet.headers) in (401, 503)
        fleet.token = known
    report("tokens while SQL is away", found)


@pytest.mark.wide
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", NO_STARTS)
def test_a_worker_that_cannot_start_is_named(name: str, scene_of: Callable[[Fault | None], Scene]) -> None:
    fault = NO_STARTS[name]
    scene = scene_of(None)
    fleet = scene.fleet
    within(10, lambda: not fleet.alerts(), fleet.alerts)  # Prometheus has seen a healthy fleet
    assert not fleet.page()
    settings = fault.settings(scene)
    port = fleet.unready("second", **settings)
    began = time.monotonic()  # how long a process takes to load says nothing of the instruments
    wanted = {"doctor": fault.said, "page": fault.own or fault.said, "log": fault.said}
    found = named(
        fleet, wanted | {"metric": fault.metric, "alert": fault.alert}, began, 0, log="second",
        page=port if fault.own else None, settings=settings if fault.own else None,
    )  # fmt: skip
    report(name, found)


@pytest.mark.wide
@pytest.mark.timeout(150)
def test_nothing_is_named_while_all_is_well(scene_of: Callable[[Fault | None], Scene]) -> None:
    """For as long as a fault has to be named, with the same turns."""
    scene = scene_of(None)
    fleet = scene.fleet
    wrong = " or ".join(f"({each.metric})" for each in (*FAULTS.values(), *NO_STARTS.values()))
    past = len(fleet.text("worker")().splitlines())
    with turns(fleet) as answered:
        within(20, lambda: answered[200] >= 10, lambda: f"turns are refused: {answered}")
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            code, said = fleet.doctor()
            assert (code, said, fleet.page(), fleet.alerts(), fleet.holds(wrong)) == (0, [], [], set(), [])
            assert not fleet.logged("worker", past)
            assert not fleet.malformed("worker", past)
    assert set(answered) <= {200, 201}, answered


def report(name: str, found: dict[str, Named]) -> None:
    """Print a line of the table; each instrument has to be in time."""
    shown = [f"{each.seconds:.1f}" if each.seconds is not None else each.words for each in found.values()]
    sys.stdout.write(f"| {name} | {' | '.join(shown)} |\n")
    assert not {
        instrument: each for instrument, each in found.items() if each.seconds is None or each.seconds > SECONDS
    }
