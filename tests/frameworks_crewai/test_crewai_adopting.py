"""Flows of CrewAI's SQLite are copied: whole, once, again after a change, and never over what others wrote."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from crewai.flow.persistence import SQLiteFlowPersistence
from frameworks_crewai.test_crewai import CONTEXT, Review

import distributed_state.adapters.crewai_adopting as crewai
from distributed_state import InvalidValue, NotFound
from distributed_state.adapters.adopting import Adopted, adopt
from distributed_state.adapters.crewai import TAG, DistributedFlowPersistence

pytestmark = pytest.mark.only(api="asyncio")


async def run(store: Any, source: Any, *, more: Any = None, **options: Any) -> Adopted:
    async with AsyncExitStack() as stack:
        return await adopt(await crewai.threads(stack, store, source, **(more or {})), store, **options)


def counts(done: Adopted) -> tuple[int, int, dict[str, str], dict[str, str]]:
    return done.copied, done.there, done.differ, done.failed


async def test_flows_are_copied_and_go_on(store: Any, tmp_path: Path) -> None:
    path = f"{tmp_path}/flows.db"
    theirs = SQLiteFlowPersistence(path)
    for n in range(3):
        theirs.save_state("f", f"m{n}", {"id": "f", "n": n, "": {"deep": [1.5, None]}})
    await Review(persistence=theirs, suppress_flow_events=True).kickoff_async(inputs={"id": "waits"})
    before = os.stat(path).st_mtime_ns
    assert counts(await run(store, path, dry_run=True)) == (2, 0, {}, {})
    assert await store.sessions(fresh=True) == []
    assert counts(await run(store, f"sqlite:///{path}")) == (2, 0, {}, {})
    assert counts(await run(store, path)) == (0, 2, {}, {})
    assert os.stat(path).st_mtime_ns == before, "a source is only read"
    ours = DistributedFlowPersistence(store)
    assert ours.load_state("f") == theirs.load_state("f")
    assert ours.load_pending_feedback("waits") == theirs.load_pending_feedback("waits")
    assert [info.id for info in await store.sessions(tags=TAG, fresh=True)] == ["waits"]
    # Both go on.
    theirs.save_state("f", "more", {"id": "f", "n": 9})
    resumed = Review.from_pending("waits", ours, suppress_flow_events=True)
    assert await resumed.resume_async("yes") == "booked, as they said 'yes'"
    assert counts(await run(store, path)) == (1, 0, {"waits": "it was changed here"}, {})
    assert ours.load_state("f") == {"id": "f", "n": 9}
    theirs.save_pending_feedback("f", CONTEXT, {"id": "f"})
    assert counts(await run(store, path, only=["f"])) == (1, 0, {}, {})
    theirs.clear_pending_feedback("f")
    assert counts(await run(store, path, only=["f"])) == (1, 0, {}, {})
    assert await store.sessions(tags=TAG, fresh=True) == []


async def test_what_was_deleted_here_is_not_brought_back_and_owners_are_those_of_the_function(
    store: Any, tmp_path: Path
) -> None:
    path = f"{tmp_path}/flows.db"
    SQLiteFlowPersistence(path).save_state("f", "m", {"id": "f"})
    into = {"into": lambda id, store: store.session(id, user="ada")}
    assert counts(await run(store, path, more=into)) == (1, 0, {}, {})
    await store.forget("ada")
    assert counts(await run(store, path)) == (0, 0, {"f": "it was deleted here"}, {})


async def test_what_is_no_file_of_flows_is_refused(store: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="the file of an SQLiteFlowPersistence"):
        await run(store, "redis://host")
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE other (id)")
    with pytest.raises(NotFound, match="no tables of CrewAI in the source: it has no 'flow_states'"):
        await run(store, f"{tmp_path}/other.db")


async def test_the_command_copies(tmp_path: Path) -> None:
    SQLiteFlowPersistence(f"{tmp_path}/flows.db").save_state("f", "m", {"id": "f"})
    command = [sys.executable, "-m", "distributed_state", "--archive", f"sqlite:///{tmp_path}/s.db"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DISTRIBUTED_STATE_")}
    command += ["adopt", "crewai", f"{tmp_path}/flows.db"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "1 found in the source: 1 copied, 0 already equal, 0 differ, 0 failed" in done.stdout + done.stderr
    assert done.returncode == 0
