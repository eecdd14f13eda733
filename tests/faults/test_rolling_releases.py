"""A release while the one before it runs, as processes on real servers.

Law: of two steps none loses a count or is refused a record; the tables are migrated first, beside workers that run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from below import ROOT, Worker
from later_releases import later_release
from releases import RELEASES, Release

from distributed_state import StateStore
from distributed_state.programs.servers import redis_server

pytestmark = pytest.mark.wide
IDS = ["a", "b", "c"]


class Fleet:
    """Workers of releases, one after the other, and what all of them said."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.did = 0
        self.failed: list[str] = []
        self._workers: list[Worker] = []

    def start(self, release: str) -> Worker:
        worker = Release("work", release=release, ids=IDS, **self.settings)
        self._workers.append(worker)
        self._hear(worker.line())
        return worker

    def go_on(self, *workers: Worker, lines: int = 20) -> None:
        """Until each has done some more."""
        for worker in workers:
            for _ in range(lines):
                self._hear(worker.line())

    def end(self, *workers: Worker) -> None:
        for worker in workers:
            worker.say("stop")
        for worker in workers:
            for line in worker.lines():
                self._hear(line)
            assert worker.process.exit_code == 0

    def _hear(self, line: str) -> None:
        assert line, "a worker ended"
        self.did += line.startswith("did")
        if line.startswith("failed"):
            self.failed.append(line)

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()


@pytest.fixture
def fleet(postgres_url: str) -> Iterator[Fleet]:
    with redis_server() as server:
        found = Fleet({"url": server.url, "archive": postgres_url, "namespace": "n"})
        try:
            yield found
        finally:
            found.kill()


def stored(fleet: Fleet, release: str) -> int:
    """What was counted, as a worker of this release reads it."""
    settings = dict(fleet.settings)
    with StateStore.open(settings.pop("url"), **settings) as store:
        field = "n" if release == "old" else "total"
        return sum(getattr(store.session(id, schema=RELEASES[release]).load(fresh=True), field) for id in IDS)


def test_a_canary_and_then_the_switch_lose_no_count_and_refuse_no_record(fleet: Fleet) -> None:
    first, second = fleet.start("old"), fleet.start("old")
    fleet.go_on(first, second)
    fleet.end(first)
    canary = fleet.start("canary")
    fleet.go_on(second, canary)
    fleet.end(second)
    other = fleet.start("canary")
    fleet.go_on(canary, other)
    assert not fleet.failed
    assert fleet.did > 80
    # The switch: beside workers of the first step, which read what it writes.
    fleet.end(canary)
    new = fleet.start("new")
    fleet.go_on(other, new)
    fleet.end(other, new)
    assert not fleet.failed
    assert stored(fleet, "new") == stored(fleet, "canary") == fleet.did


def test_what_the_canary_wrote_is_read_by_the_release_before_so_it_can_be_taken_back(fleet: Fleet) -> None:
    canary = fleet.start("canary")
    fleet.go_on(canary)
    fleet.end(canary)
    old = fleet.start("old")
    fleet.go_on(old)
    fleet.end(old)
    assert not fleet.failed
    assert stored(fleet, "old") == fleet.did > 40


def test_without_the_canary_the_release_before_is_refused(fleet: Fleet) -> None:
    """The negative control: the new version is written at once."""
    old = fleet.start("old")
    fleet.go_on(old)
    new = fleet.start("new")
    fleet.go_on(old, new)
    fleet.end(old, new)
    assert set(fleet.failed) == {"failed SchemaMismatch"}
    assert stored(fleet, "new") == fleet.did, "refused, not lost"


# The tables


class Other(Worker):
    """A process of another release: this one's code, and other tables."""

    root: Path


def release(folder: Path, *steps: str) -> type[Other]:
    later_release(folder, *steps)
    return type("OtherHere", (Other,), {"root": folder})


def command(root: Path, settings: dict[str, Any], *words: str) -> subprocess.CompletedProcess[str]:
    urls = {f"DISTRIBUTED_STATE_{name.upper()}": text for name, text in settings.items()}
    line = [sys.executable, "-m", "distributed_state", "--namespace", settings["namespace"], *words]
    # `-m` looks into the folder that it is run in first.
    return subprocess.run(
        line, env=os.environ | urls, cwd=root, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("cold", ["sqlite", "postgres"])
def test_workers_of_two_releases_start_and_stop_beside_one_another_and_the_new_one_is_taken_back(
    cold: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Tables are expanded beside workers that go on; old ones start then, too, and are the only ones at the end."""
    sqlite = f"sqlite:///{tmp_path}/archive.db"
    archive = sqlite if cold == "sqlite" else request.getfixturevalue("postgres_url")
    after = release(tmp_path / "after", "next")
    with redis_server() as server:
        settings = {"url": server.url, "archive": archive, "namespace": "n"}
        assert command(ROOT, settings, "migrate").returncode == 0
        said: list[str] = []

        def start(kind: type[Worker]) -> Worker:
            worker = kind("write", ids=IDS, migrate=False, **settings)
            assert worker.line() == "opened"
            return worker

        def go_on(*workers: Worker) -> None:
            for worker in workers:
                said.extend(worker.line() for _ in range(30))

        def end(worker: Worker) -> None:
            worker.say("stop")
            said.extend(worker.lines())
            assert worker.process.exit_code == 0
            worker.kill()

        first = start(Worker)
        go_on(first)
        early = command(after.root, settings | {"migrate": "false"}, "audit")
        assert early.returncode
        assert "run `distributed-state migrate`" in " ".join(early.stderr.split()), "a new one waits for its tables"
        done = command(after.root, settings, "migrate")
        assert done.returncode == 0, done.stderr
        new = start(after)
        go_on(first, new, first)
        scaled = start(Worker)  # as an autoscaler starts it while the release rolls
        go_on(scaled, new)
        done = command(ROOT, settings, "migrate")
        assert done.returncode == 0, done.stderr
        end(new)
        end(first)
        go_on(scaled)
        again = start(Worker)
        go_on(scaled, again)
        end(scaled)
        end(again)
        whole(said, server.url, archive)
        server.stop()
    with redis_server() as empty:
        whole(said, empty.url, archive)


def whole(said: list[str], url: str, archive: str) -> None:
    """Everything that workers were acknowledged is in SQL: in order, and once."""
    written = list(map(str.split, said))
    with StateStore.open(url, archive=archive, namespace="n") as store:
        store.admin.archive()
        assert not [each for each in store.admin.doctor() if not each.ok and each.name.startswith("partition")]
        for id in IDS:
            mine = sorted(
                (int(version), f"{id} {replica} {number}") for each, version, replica, number in written if each == id
            )
            messages = [message.content for message in store.session(id).messages()]
            assert messages == [text for _, text in mine]
            assert [change.version for change in store.session(id).history()] == [version for version, _ in mine]


def test_a_contraction_waits_until_no_worker_needs_what_it_removes(tmp_path: Path, postgres_url: str) -> None:
    """It names those that do, and afterwards a worker of their release is refused by what it lacks, not by a number."""
    after, last = release(tmp_path / "after", "next"), release(tmp_path / "last", "next", "last")
    with redis_server() as server:
        settings = {"url": server.url, "archive": postgres_url, "namespace": "n"}
        assert command(after.root, settings, "migrate").returncode == 0
        with after("write", ids=IDS, migrate=False, **settings) as worker:
            assert worker.line() == "opened"
            assert command(last.root, settings, "migrate").returncode == 0
            said = [worker.line() for _ in range(30)]
            refused = command(last.root, settings, "migrate", "--contract")
            assert refused.returncode
            message = " ".join(refused.stderr.split())
            assert "workers older than 99 need what would be removed; replace them first: " in message
            assert f"process {worker.process.pid} on " in message
            said += [worker.line() for _ in range(30)]
            worker.say("stop")
            said += worker.lines()
        done = command(last.root, settings, "migrate", "--contract")
        assert done.returncode == 0, done.stderr
        late = command(after.root, settings, "migrate")
        assert late.returncode
        assert "needs quarantine.of_the_next: install the newer release" in " ".join(late.stderr.split())
        with Worker("write", ids=IDS, migrate=False, **settings) as worker:
            assert worker.line() == "opened", "this release never needed it"
            said += [worker.line() for _ in range(30)]
            worker.say("stop")
            said += worker.lines()
        whole(said, server.url, postgres_url)
