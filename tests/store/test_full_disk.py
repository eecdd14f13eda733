"""SQL's disk is full: doctor, page, log and metrics name it, and nothing does before, nor when there is room again.

What a whole fleet says of this and of other faults, and what its alerts do, is tried in tests/faults/test_told.py.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from below import tiers, until
from scraping import Scrape
from sqlalchemy import event
from tenants import Served

from distributed_state import AsyncStateStore
from distributed_state.programs.inspector import PATH, inspector
from distributed_state.programs.service import Access

FULL = "database or disk is full"


class Disk:
    """The disk of a SQLite file: it has room for no page more while it is `full`."""

    def __init__(self, store: Any) -> None:
        self.full = False
        event.listen(tiers(store).cold.database._engine.pool, "checkout", self._limit)

    def _limit(self, connection: Any, *_: Any) -> None:
        connection.execute(f"PRAGMA max_page_count = {1 if self.full else 2**30}")


async def instruments(store: AsyncStateStore, caplog: pytest.LogCaptureFixture) -> dict[str, bool]:
    """Which of them say something is wrong."""
    served = Served(store, Access(insecure=True))
    served.service.app.mount(PATH, inspector(served.service.app))
    page = (await served.http.get(f"{PATH}/fleet")).text
    scrape = Scrape(store)
    return {
        "doctor": any(FULL in each.found for each in await store.admin.doctor() if not each.ok),
        "page": FULL in page or "No problems" not in page,
        "log": any(each.levelno >= logging.WARNING for each in caplog.records),
        "metric": scrape("archiver_failing") == 1,
    }


async def test_a_full_disk_is_named_by_each_instrument(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive = f"sqlite:///{tmp_path}/archive.db"
    async with AsyncStateStore.open(archive=archive, durability="memory", archive_every=0.02) as store:
        disk, session, archiver = Disk(store), store.session("c"), tiers(store).archiver
        await session.append({"role": "user", "content": "x" * 10_000})
        await until(lambda: archiver.archived == 1)
        assert await instruments(store, caplog) == dict.fromkeys(("doctor", "page", "log", "metric"), False)
        disk.full = True
        await session.append({"role": "user", "content": "x" * 100_000})
        await until(lambda: archiver.failure)
        assert await instruments(store, caplog) == dict.fromkeys(("doctor", "page", "log", "metric"), True)
        disk.full = False
        await until(lambda: archiver.archived == 2)
        caplog.clear()  # a pass that began before there was room may have spoken until now
        await session.append({"role": "user", "content": "y"})
        await until(lambda: archiver.archived == 3)
        assert await instruments(store, caplog) == dict.fromkeys(("doctor", "page", "log", "metric"), False)
