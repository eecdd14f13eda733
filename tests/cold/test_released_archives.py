"""Archives that earlier versions wrote. Law: each layout that was released is opened, and all of it is there."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from archives import make

from distributed_state import StateStore
from distributed_state.cold.tables import REVISIONS

ARCHIVES = Path(__file__).parents[1] / "archives"


def restored(revision: str, folder: Path) -> str:
    with sqlite3.connect(folder / "archive.db") as database:
        database.executescript((ARCHIVES / f"{revision}.sql").read_text())
    return f"sqlite:///{folder}/archive.db"


def test_there_is_one_of_every_layout() -> None:
    assert {path.stem for path in ARCHIVES.glob("*.sql")} == set(REVISIONS)


@pytest.mark.parametrize("revision", REVISIONS)
def test_an_archive_of_an_earlier_version_is_read_and_written_on(revision: str, tmp_path: Path) -> None:
    expected: dict[str, Any] = json.loads((ARCHIVES / "expected.json").read_text())
    archive = restored(revision, tmp_path)
    with StateStore.open(archive=archive) as store:
        assert make.read(store) == expected
        version = store.session("s").set("n", "new")
    with StateStore.open(archive=archive) as store:
        changes = store.session("s").history()
        assert [change.version for change in changes] == [*range(1, version + 1)]
        assert make.read(store)["forked"] == expected["forked"]


def test_a_row_that_is_missing_is_noticed(tmp_path: Path) -> None:
    expected = json.loads((ARCHIVES / "expected.json").read_text())
    archive = restored(REVISIONS[0], tmp_path)
    with sqlite3.connect(tmp_path / "archive.db") as database:
        database.execute("DELETE FROM snapshots WHERE version = (SELECT max(version) FROM snapshots)")
        database.execute("DELETE FROM changes WHERE version = 3")
        database.execute("DELETE FROM change_blocks")
    with StateStore.open(archive=archive) as store, pytest.raises(Exception, match=r"version|assert"):
        assert make.read(store) == expected
