"""Backup and restore. Law: what `docs/running/backup.md` says is carried out, line by line, and does it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from below import ROOT, logged_in, server_binary

from distributed_state import ColdUnavailable, StateStore
from distributed_state.programs.servers import RedisServer, postgres_server, redis_server
from distributed_state.programs.servers.process import postgres_binaries

PATH = f"{postgres_binaries()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
MISSING = [tool for tool in ("pg_dump", "pg_restore", "psql", "redis-cli") if shutil.which(tool, path=PATH) is None]
pytestmark = [pytest.mark.wide, pytest.mark.timeout(240)]
NAMESPACE = {"namespace": "backup", "partitions": 4}


def steps() -> Iterator[str]:
    """The shell blocks of the section, in order."""
    text = (ROOT / "docs/running/backup.md").read_text()
    section = text.split("## The same without containers")[1].split("\n## ")[0]
    yield from re.findall(r"```sh[^\n]*\n(.*?)```", section, re.DOTALL)


DUMP, RESTORE, REPAIR, EMPTY, COPY_FILE, RESTORE_FILE, COPY_BOTH, RESTORE_BOTH = steps()


class Place:
    """The servers, and a folder in which an operator works."""

    def __init__(self, folder: Path, sql: str, redis: RedisServer) -> None:
        self.folder, self.sql, self.redis = folder, sql, redis
        self.archive = f"{sql}/agents".replace("postgresql:", "postgresql+psycopg:")
        self._passwords = {
            "PGPASSWORD": urlsplit(sql).password or "",
            "REDISCLI_AUTH": redis.password,
            "DISTRIBUTED_STATE_URL": redis.url,
            "DISTRIBUTED_STATE_ARCHIVE": self.archive,
        }

    def run(self, lines: str) -> None:
        places = {"SQL": logged_in(self.sql, "postgres"), "REDIS": logged_in(self.redis.url, "")}
        given = places | self._passwords | {"REDIS_DIR": str(self.redis.directory), "PATH": PATH}
        given |= {
            f"{prefix}{name.upper()}": str(value)
            for name, value in NAMESPACE.items()
            for prefix in ("", "DISTRIBUTED_STATE_")
        }
        environment = os.environ | given
        done = subprocess.run(["sh", "-ec", lines], cwd=self.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def store(self, archive: str = "", **settings: Any) -> StateStore:
        return StateStore.open(self.redis.url, archive=archive or self.archive, **NAMESPACE, **settings)


@pytest.fixture(scope="module")
def sql() -> Iterator[str]:
    if MISSING:
        assert os.environ.get("CI") != "true", f"CI carries out what the manual says: install {', '.join(MISSING)}"
        pytest.skip(f"this machine has no {', '.join(MISSING)}")
    with postgres_server() as postgres:
        yield postgres.url.replace("+psycopg", "").removesuffix("/postgres")


@pytest.fixture
def place(tmp_path: Path, sql: str) -> Iterator[Place]:
    folder = tmp_path / "operator"
    folder.mkdir()
    valkey = redis_server("--appendonly", "yes", binary=server_binary("valkey"), directory=tmp_path / "warm")
    with valkey as redis:
        place = Place(folder, sql, redis)
        drop = "--command='DROP DATABASE IF EXISTS agents WITH (FORCE)'"
        place.run(f"psql \"$SQL/postgres\" {drop} --command='CREATE DATABASE agents'")
        yield place


def write(store: StateStore, id: str, values: range) -> None:
    for n in values:
        store.session(id).set("n", n)


def values(store: StateStore, id: str) -> list[int]:
    history = store.session(id).history()
    assert [change.version for change in history] == list(range(1, len(history) + 1))
    return [change.set["n"] for change in history]


def test_a_dump_brings_back_all_that_it_has(place: Place) -> None:
    """Lost is what came after it; conversations go on from there."""
    with place.store() as store:
        write(store, "old", range(10))
        store.admin.archive()
        place.run(DUMP)
        write(store, "old", range(10, 15))
        write(store, "young", range(5))
        store.admin.archive()
    place.run(RESTORE)
    place.run(EMPTY)
    with place.store() as store:
        assert store.session("old").get("n") == 9
        assert not store.session("young").exists()
        write(store, "old", range(20, 25))
        write(store, "young", range(3))
        store.admin.archive()
        assert values(store, "old") == [*range(10), *range(20, 25)]
        assert values(store, "young") == [*range(3)]


def test_what_redis_has_that_a_dump_has_not_is_brought_back(place: Place) -> None:
    """Until then Redis is served, and nothing is archived."""
    with place.store() as store:
        write(store, "old", range(10))
        store.admin.archive()
        place.run(DUMP)
        write(store, "old", range(10, 15))
        write(store, "young", range(5))
        store.admin.archive()
    place.run(RESTORE)
    with place.store(archiver=False) as store:
        assert store.session("old").get("n") == 14
        write(store, "old", range(15, 20))
        with pytest.raises(ColdUnavailable, match="not archived"):
            store.admin.archive()
        assert any(finding.name.startswith("partition") and not finding.ok for finding in store.admin.doctor())
    place.run(REPAIR)
    with place.store() as store:
        write(store, "old", range(20, 25))
        store.admin.archive()
        assert not [finding for finding in store.admin.doctor() if finding.name.startswith("partition")]
        assert {each.name for each in store.admin.doctor() if not each.ok} & {
            "sql quarantine",
            "epochs",
            "branches",
        } == set()
        assert {note.subject for note in store.admin.audit(type="conversation.repaired")} == {
            "session:old",
            "session:young",
        }
    place.run(EMPTY)
    with place.store() as store:
        assert [change.version for change in store.session("old").history()] == [*range(1, 11), *range(20, 26)]
        assert store.session("old").get("n") == 24
        assert store.session("young").get("n") == 4
        # Resolved commits go with a purge.
        assert store._core._lifecycle.cold.quarantined()
        store._core._lifecycle.cold.purge(2**62, events_before_ms=0)
        assert store._core._lifecycle.cold.quarantined() == []


def test_a_copy_of_a_file_brings_back_all_that_it_has(place: Place) -> None:
    archive = f"sqlite:///{place.folder}/agents.db"
    with place.store(archive) as store:
        write(store, "old", range(10))
        store.admin.archive()
        place.run(COPY_FILE)
        write(store, "old", range(10, 15))
        store.admin.archive()
    place.run(RESTORE_FILE)
    with place.store(archive) as store:
        assert store.session("old").get("n") == 9
        write(store, "old", range(20, 25))
        store.admin.archive()
        assert values(store, "old") == [*range(10), *range(20, 25)]


def test_a_copy_of_both_at_rest_brings_back_both(place: Place) -> None:
    """Redis' part too: what it has need not be read from SQL, and archiving goes on where it was."""
    with place.store() as store:
        write(store, "old", range(10))
        store.admin.archive()
    place.run(COPY_BOTH)
    place.redis.start()
    with place.store() as store:
        write(store, "old", range(10, 15))
        write(store, "young", range(5))
        store.admin.archive()
    place.redis.stop()
    place.run(RESTORE_BOTH)
    place.redis.start()
    with place.store() as store:
        assert store.session("old").get("n") == 9
        assert not store.session("young").exists()
        write(store, "old", range(20, 25))
        store.admin.archive()
        assert values(store, "old") == [*range(10), *range(20, 25)]
        assert not [finding for finding in store.admin.doctor() if finding.name.startswith("partition")]
