"""SQL refuses a row, or has no place for it: the store goes on, and doctor and metrics say which record and why."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
import pytest
from below import keys_of, tiers, until
from scraping import Scrape
from sync_api import core

from distributed_state import DurabilityUnknown
from distributed_state.cold import tables

DICE = Random(7)
LONG = "".join(chr(DICE.randrange(0x4E00, 0x9FFF)) for _ in range(1_000))
REFUSES = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not him' {}; END $$;
CREATE TRIGGER refuse BEFORE INSERT ON {} FOR EACH ROW {} EXECUTE FUNCTION refuse()
"""
FULL = "USING ERRCODE = 'disk_full'"
SAID = "(No space left on device|not him)"


async def findings(store: Any, name: str) -> list[str]:
    return [each.found for each in await store.admin.doctor() if each.name.startswith(name) and not each.ok]


@pytest.mark.only(cold="postgres")
@pytest.mark.usefixtures("database_of_its_own")
async def test_a_row_that_sql_refuses_stops_nobody_else_and_is_named(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a phase was that is too long for an index: nothing more of its partition was archived."""
    store = await opener(partitions=1, durability="memory", archive_every=0.02)
    scrape = Scrape(store)
    await store.session("other").set("k", 1, durability="archived")
    with monkeypatch.context() as unbounded:
        unbounded.setattr("distributed_state.tiers.changes.checked_phase", lambda phase: phase)
        unbounded.setitem(tables.LONGEST, "phase", 2**20)
        with pytest.raises(DurabilityUnknown, match="index row size"):
            await store.session("long").write(phase=LONG * 3, durability="archived")
    await store.session("other").set("k", 2, durability="archived")
    await store.session("theirs", user="u1").set("k", 1)
    await store.erase("other")
    await store.forget("u1")
    (found,) = await findings(store, "sql quarantine")
    assert found.startswith("1; the newest: session:long version 1: ")
    assert "index row size" in found
    tiers(store).archiver._quarantined_at = 0.0  # it counts now and then
    await until(lambda: scrape("quarantined_entries") == 1)
    (labels,) = (each for each in scrape.all() if each[0] == "distributed_state_quarantined_newest")
    assert "session:long" in labels
    assert "index row size" in str(labels)


class Full:
    """A database in which items have a tablespace of their own, and that is full."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url.replace("+psycopg", ""), folder

    def execute(self, *statements: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)

    def fill(self, *, really: bool) -> None:
        if really:
            self.execute(
                f"CREATE TABLESPACE small LOCATION '{self.folder}'",
                "ALTER TABLE items SET TABLESPACE small",
                "ALTER INDEX items_pkey SET TABLESPACE small",
                "CREATE TABLE filling (data bytea) TABLESPACE small",
                "ALTER TABLE filling ALTER data SET STORAGE EXTERNAL",
            )
            with pytest.raises(psycopg.errors.DiskFull), psycopg.connect(self.url, autocommit=True) as connection:
                while True:
                    connection.execute("INSERT INTO filling SELECT decode(repeat('00', 2000), 'hex')")
        else:
            self.execute(*REFUSES.format(FULL, "items", "").strip().rsplit("\n", 1))

    def make_room(self, *, really: bool) -> None:
        self.execute("DROP TABLE filling" if really else "DROP TRIGGER refuse ON items")

    def end(self) -> None:
        """Nothing of it may be on the small disk when that goes: the server would not survive its next checkpoint."""
        self.execute(
            "ALTER TABLE items SET TABLESPACE pg_default",
            "ALTER INDEX items_pkey SET TABLESPACE pg_default",
            "DROP TABLE IF EXISTS filling",
            "DROP TABLESPACE IF EXISTS small",
        )


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A folder with room for a megabyte, whoever writes there."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=777", "none", str(folder)]
    try:
        subprocess.run(words, check=True, capture_output=True)
        shutil.chown(folder, "nobody")  # as whom the server runs where the tests run as root
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a small disk cannot be mounted here: it needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


@pytest.mark.only(api="asyncio", cold="postgres")
@pytest.mark.parametrize("really", [False, pytest.param(True, marks=pytest.mark.wide)])
async def test_a_full_tablespace_stops_only_those_who_need_it_and_is_named_until_there_is_room(
    opener: Any, servers: Any, really: bool
) -> None:
    """Not put aside: it heals. Partitions that put no item are archived, and so is what came before."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="small-")))
        place.chmod(0o755)
        folder = stack.enter_context(small_disk(place / "disk")) if really else place
        opener.archive = servers.database()
        store = await opener(partitions=4, durability="memory", archive_every=0.02)
        archiver, scrape = tiers(store).archiver, Scrape(store)
        mine = store.session("mine")
        partition = keys_of(store, "mine").partition
        other = next(f"o{n}" for n in range(99) if keys_of(store, f"o{n}").partition != partition)
        await mine.set("k", 1, durability="archived")
        await store.session(other).set("k", 1, durability="archived")
        full = Full(opener.archive, folder)
        stack.callback(full.end)
        full.fill(really=really)
        try:
            await mine.set("k", 2)
            await mine.items("notes").put("n", "x" * 20_000)
            assert await mine.set("k", 3) == 4
            for n in range(2, 5):
                await store.session(other).set("k", n, durability="archived")
            assert await store.session(other).history()
            await until(lambda: archiver.diverged.get(partition))
            with pytest.raises(DurabilityUnknown, match=SAID):
                await mine.set("k", 4, durability="archived")
            assert core(store)._lifecycle.cold.version("session:mine") == 2
            (found,) = await findings(store, f"partition {partition}")
            assert re.search(rf"SQL does not accept entry \d+ \(session:mine version 3\): .*{SAID}", found), found
            assert scrape("partition_diverged", str(partition)) == 1
            assert scrape("quarantined_entries") in (None, 0)
        finally:
            full.make_room(really=really)
        await until(lambda: core(store)._lifecycle.cold.version("session:mine") == 5)
        await until(lambda: not archiver.diverged)
        assert [change.version for change in await mine.history()] == [1, 2, 3, 4, 5]
        assert await findings(store, "partition") == []
