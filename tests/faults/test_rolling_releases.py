"""A release while the one before it runs, as processes on real servers.

Law: of two steps none loses a count or is refused a record; the tables are migrated first, beside workers that run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from below import ROOT, Worker
from releases import RELEASES, Release
from sqlalchemy import create_engine, text

from distributed_state import StateStore
from distributed_state.cold.tables import REVISIONS
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


class After(Worker):
    """A process of the next release: this one's code, and tables with one more column."""

    root: Path


_NEXT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "next", {last!r}


def upgrade() -> None:
    op.add_column("records", sa.Column("of_the_next", sa.Integer, nullable=True))
"""


def release_after(folder: Path) -> type[After]:
    package = folder / "distributed_state"
    shutil.copytree(ROOT / "distributed_state", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "cold/migrations/versions/next_release.py").write_text(_NEXT.format(last=REVISIONS[-1]))
    tables = package / "cold/tables.py"
    revisions = f"REVISIONS = {(*REVISIONS, 'next')!r}"
    made, count = re.subn(r"^REVISIONS = .*$", revisions, tables.read_text(), flags=re.M)
    assert count == 1
    tables.write_text(made)
    return type("AfterHere", (After,), {"root": folder})


def command(root: Path, settings: dict[str, Any], *words: str) -> subprocess.CompletedProcess[str]:
    urls = {f"DISTRIBUTED_STATE_{name.upper()}": text for name, text in settings.items()}
    line = [sys.executable, "-m", "distributed_state", "--namespace", settings["namespace"], *words]
    # `-m` looks into the folder that it is run in first.
    return subprocess.run(
        line, env=os.environ | urls, cwd=root, capture_output=True, text=True, timeout=60, check=False
    )


def taken_back(archive: str) -> None:
    """The tables as this release knows them; a column that it does not know is of no concern to it."""
    engine = create_engine(archive)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :last"), {"last": REVISIONS[-1]})
    engine.dispose()


@pytest.mark.parametrize("cold", ["sqlite", "postgres"])
def test_tables_are_migrated_beside_workers_that_go_on_and_new_ones_start(
    cold: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    sqlite = f"sqlite:///{tmp_path}/archive.db"
    archive = sqlite if cold == "sqlite" else request.getfixturevalue("postgres_url")
    after = release_after(tmp_path / "after")
    with redis_server() as server:
        settings = {"url": server.url, "archive": archive, "namespace": "n"}
        done = command(ROOT, settings, "migrate")
        assert done.returncode == 0, done.stderr
        with Worker("write", ids=IDS, migrate=False, **settings) as old:
            assert old.line() == "opened"
            said = [old.line() for _ in range(50)]
            early = command(after.root, settings | {"migrate": "false"}, "audit")
            assert early.returncode
            assert "run `distributed-state migrate`" in " ".join(early.stderr.split()), "a new one waits for its tables"
            done = command(after.root, settings, "migrate")
            assert done.returncode == 0, done.stderr
            with after("write", ids=IDS, migrate=False, **settings) as new:
                assert new.line() == "opened"
                for worker in (old, new, old):
                    said += [worker.line() for _ in range(50)]
                late = command(ROOT, settings, "migrate")
                assert late.returncode
                assert "which this release" in late.stderr, "an old one that starts now is told to leave"
                for worker in (old, new):
                    worker.say("stop")
                    said += worker.lines()
                    assert worker.process.exit_code == 0
        taken_back(archive)
        with StateStore.open(server.url, archive=archive, namespace="n") as store:
            store.admin.archive()
            assert not [each for each in store.admin.doctor() if not each.ok and each.name.startswith("partition")]
        whole = list(map(str.split, said))
        server.stop()
    with redis_server() as empty, StateStore.open(empty.url, archive=archive, namespace="n") as store:
        for id in IDS:
            mine = sorted(
                (int(version), f"{id} {replica} {number}") for each, version, replica, number in whole if each == id
            )
            messages = [message.content for message in store.session(id).messages()]
            assert messages == [text for _, text in mine], "SQL alone has all of both, in order, once"
            assert [change.version for change in store.session(id).history()] == [version for version, _ in mine]
