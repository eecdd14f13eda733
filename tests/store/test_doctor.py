"""What a doctor says: what is wrong with the fleet is named, and a server that is away hides nothing of the other."""

from __future__ import annotations

import json
import os
import platform
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from below import keys_of, redis_of, tiers, until
from tenants import Served
from typer.testing import CliRunner

from distributed_state import ColdUnavailable, ConfigurationError, StateStore
from distributed_state.programs.cli import records, shell
from distributed_state.programs.servers import RedisServer, redis_server
from distributed_state.programs.service import Access, callers_policy
from distributed_state.results import Finding
from distributed_state.store import doctor
from distributed_state.warm import heartbeat

fleet = pytest.mark.only(warm="single", cold=("sqlite", "postgres"))
FULL = "the disk of SQL is full"


async def found(store: Any) -> dict[str, Finding]:
    return {each.name: each for each in await store.admin.doctor()}


@fleet
async def test_where_nobody_archives_somebody_is_told(opener: Any) -> None:
    writer = await opener(archiver=False, beat=0.2)
    await writer.session("c").set("n", 1)
    alone = await found(writer)
    assert not alone["archivers"].ok
    assert "start `distributed-state archiver`" in alone["archivers"].advice
    assert "1 commit, the oldest" in alone["archive lag"].found
    archiver = await opener(beat=0.2)

    async def archives() -> bool:
        return bool((await found(writer))["archivers"].ok)

    await until(archives, 10)
    assert "1 of 2 replicas archive" in (await found(writer))["archivers"].found
    await archiver.close()


@fleet
async def test_an_archiver_that_makes_no_progress_is_named_with_its_reason(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    archiver, other = await opener(beat=0.1, archive_every=0.05), await opener(archiver=False, beat=0.1)

    def full(*_: Any) -> None:
        raise ColdUnavailable(FULL)

    with monkeypatch.context() as broken:
        broken.setattr(tiers(archiver).cold, "archive", full)
        await other.session("c").set("n", 1)

        async def named() -> bool:
            return FULL in (await found(other)).get(f"archiver {archiver.replica}", Finding("", True, "")).found

        await until(named, 30, every=0.1)
        (told,) = [each for each in await other.admin.replicas() if each.id == archiver.replica]
        assert told.archiving == FULL

    async def well_again() -> bool:
        return f"archiver {archiver.replica}" not in await found(other)

    await until(well_again, 15)


@pytest.mark.only(warm=("redis", "fake"), cold="sqlite")
async def test_a_damaged_archive_is_told_and_archiving_goes_on_when_it_is_repaired(opener: Any, tmp_path: Path) -> None:
    """An error of the driver that nobody expects would end the archiver's thread, and nobody would hear of it."""
    store = await opener(beat=0.1, archive_every=0.02, durability="memory")
    archiver, cold, file = tiers(store).archiver, tiers(store).cold, tmp_path / "archive.db"
    await store.session("c").set("n", 1)
    await until(lambda: cold.version("session:c") == 1)
    with closing(sqlite3.connect(file)) as connection:
        (size,) = connection.execute("PRAGMA page_size").fetchone()
        pages = connection.execute("SELECT rootpage FROM sqlite_master WHERE tbl_name = 'changes'").fetchall()

    def put(content: Callable[[int], bytes]) -> None:
        with file.open("r+b") as opened:
            for (page,) in pages:
                opened.seek((page - 1) * size)
                opened.write(content((page - 1) * size))

    number = 1
    while "malformed" not in archiver.failure:
        # Who wrote in between has these pages in memory or in the log: then it goes on, and puts them right.
        assert cold.sync()
        whole = file.read_bytes()
        put(lambda _: b"\xa5" * size)
        number += 1
        await store.session("c").set("n", number)
        await until(lambda number=number: "malformed" in archiver.failure or cold.version("session:c") == number)

    async def told() -> bool:
        return any(not each.ok and "malformed" in each.found for each in await store.admin.doctor())

    await until(told)
    put(lambda at: whole[at : at + size])
    await until(lambda: cold.version("session:c") == number, 15)
    await until(lambda: not archiver.failure)


@fleet
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_archiver_that_a_bug_ended_is_named(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replica goes on, and says with each beat which partitions it has."""
    archiver, other = await opener(beat=0.1, archive_every=0.05), await opener(archiver=False, beat=0.1)

    def wrong(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(tiers(archiver).cold, "archive", wrong)
    await other.session("c").set("n", 1)

    async def named() -> bool:
        told = (await found(other)).get(f"archiver {archiver.replica}")
        return told is not None and not told.ok and "it has ended: RuntimeError" in told.found

    await until(named, 10)


@fleet
async def test_commits_that_wait_too_long_are_told_by_partition(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await opener(archiver=False)
    session = store.session("c")
    await session.set("n", 1)
    assert (await found(store))["archive lag"].ok
    monkeypatch.setattr(doctor, "_OLD", 0.0)
    lag = (await found(store))["archive lag"]
    assert not lag.ok
    assert f"partitions {tiers(store).keys.of(session.ref).partition}" in lag.found
    await store.admin.archive()
    assert (await found(store))["archive lag"].ok


async def partition_rows(store: Any) -> dict[int, dict[str, Any]]:
    """The partitions as the interface has them."""
    served = Served(store, Access(key="k" * 43))
    answer = await served.ask("GET", "/v1/partitions", "k" * 43)
    assert answer.status_code == 200, answer.text
    return {each["partition"]: each for each in answer.json()["partitions"]}


@pytest.mark.only(api="asyncio", warm="single", cold=("sqlite", "postgres"))
async def test_a_journal_with_a_gap_is_told_by_who_does_not_archive_it(opener: Any) -> None:
    archiver = await opener(archiver=False)
    other = await opener(archiver=False, access=callers_policy())
    session = archiver.session("s")
    for number in range(4):
        await session.set("a", number)
        if not number:
            await archiver.admin.archive()
    partition = keys_of(archiver, "s").partition
    healthy = await partition_rows(other)
    assert [each["diverged"] for each in healthy.values()] == [""] * len(healthy), "the negative control"
    assert healthy[partition]["waiting"] == 3
    with redis_of(archiver) as client:
        client.xdel(keys_of(archiver, "s").journal, "2-0")
    row = (await partition_rows(other))[partition]
    assert "the journal lacks entry 2" in row["diverged"]
    assert row["lag"] is not None
    assert "the journal lacks entry 2" in (await found(other))[f"partition {partition}"].found
    with redis_of(archiver) as client:
        client.xdel(keys_of(archiver, "s").journal, "3-0", "4-0")
    row = (await partition_rows(other))[partition]
    assert (row["lag"], bool(row["diverged"])) == (None, True), "nobody knows how old it is"


@pytest.mark.only(api="asyncio", warm="single", cold=("sqlite", "postgres"))
async def test_what_an_archiver_alone_knows_it_says_with_its_beats(opener: Any) -> None:
    archiver = await opener(beat=0.1)
    other = await opener(archiver=False, beat=0.1, access=callers_policy())
    await archiver.session("s").set("a", 1)
    await archiver.admin.archive()
    working = tiers(archiver).archiver
    partition = keys_of(archiver, "s").partition

    async def told() -> bool:
        working.diverged[partition] = "a step that only a newer release knows"
        return "newer release" in (await partition_rows(other))[partition]["diverged"]

    await until(told, 15)
    (row,) = [each for each in await other.admin.replicas() if each.id == archiver.replica]
    assert row.diverged == {str(partition): "a step that only a newer release knows"}
    del working.diverged[partition]

    async def well_again() -> bool:
        return not (await partition_rows(other))[partition]["diverged"]

    await until(well_again, 15)


@fleet
async def test_a_fleet_that_archives_while_it_is_looked_at_is_not_taken_for_diverged(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is archived between the look at the one server and the one at the other is not missing in SQL."""
    store = await opener(archiver=False)
    await store.session("c").set("n", 0)
    await store.admin.archive()
    await store.session("c").set("n", 1)
    home = tiers(store)
    partitions, states = home.warm.partitions, home.warm.partitions.states

    async def archived_meanwhile(*asked: Any) -> Any:
        monkeypatch.setattr(partitions, "states", states)
        await home.archiver.drain()
        return await states(*asked)

    monkeypatch.setattr(partitions, "states", archived_meanwhile)
    assert not [name for name, each in (await found(store)).items() if name.startswith("partition") and not each.ok]
    assert partitions.states == states, "it was archived while it was looked at"


@fleet
async def test_a_replica_that_cannot_start_is_named_until_one_starts_there(opener: Any) -> None:
    store = await opener(archiver=False, partitions=4)
    name = f"start on {platform.node()}"
    assert name not in await found(store)
    with pytest.raises(ConfigurationError):
        await opener(partitions=8, beat=0.0)
    assert name not in await found(store), "a command is no replica"
    with pytest.raises(ConfigurationError):
        await opener(partitions=8)
    told = (await found(store))[name]
    assert not told.ok
    assert f"process {os.getpid()}, " in told.found
    assert "has 4 partitions, not 8" in told.found
    await opener(archiver=False, partitions=4)
    assert name not in await found(store)


@fleet
async def test_fewer_workers_than_are_expected_are_counted(opener: Any) -> None:
    store = await opener(beat=0.1, expected_workers=2)
    assert "workers" not in await found(await opener(beat=0.1)), "without the setting any number is right"
    told = (await found(store))["workers"]
    assert (told.ok, told.found) == (False, "0 of 2 expected workers run"), "neither archivers nor programs are workers"
    workers = [await opener(beat=0.1, archiver=archives) for archives in (True, False)]
    for each in workers:
        each.announce(role="service")

    async def says(text: str) -> bool:
        told = (await found(store))["workers"]
        return told.found == text and told.ok is text.startswith("2")

    await until(lambda: says("2 of 2 expected workers run"))
    await workers[0].close()
    await until(lambda: says("1 of 2 expected workers run"))


@fleet
async def test_replicas_of_two_releases_are_told(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await opener()
    assert (await found(store))["releases"].ok
    with monkeypatch.context() as older:
        older.setattr(heartbeat, "release", lambda: "0.0.1")
        await opener(beat=100.0)

    async def told() -> bool:
        releases = (await found(store))["releases"]
        return not releases.ok and "1 of 0.0.1" in releases.found

    await until(told)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


def asked(server: RedisServer, archive: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    """The exit code of `doctor --json`, and what it printed, by name."""
    monkeypatch.setenv("DISTRIBUTED_STATE_URL", server.url)
    monkeypatch.setenv("DISTRIBUTED_STATE_ARCHIVE", archive)
    done = CliRunner().invoke(shell.app, ["doctor", "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}


def test_a_server_that_is_away_hides_nothing_of_the_other(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert records.app is shell.app, "its commands are there"
    archive = f"sqlite:///{tmp_path}/a.db"
    with StateStore.open(server.url, archive=archive) as store:
        store.session("c").set("n", 1)
        store.admin.archive()
    away = f"postgresql://127.0.0.1:{server.port + 1 if server.port < 65535 else 1}/nowhere"
    code, without_sql = asked(server, away, monkeypatch)
    assert code == 1
    assert not without_sql["sql"]["ok"]
    assert without_sql["version"]["ok"]
    server.kill()
    code, without_redis = asked(server, archive, monkeypatch)
    assert code == 1
    assert not without_redis["server"]["ok"]
    assert without_redis["server"]["advice"]
    assert without_redis["sql records"]["found"] == "1"


def test_a_redis_that_was_never_used_is_looked_at_while_sql_is_away(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store cannot be opened then: which archive belongs to it nobody knows."""
    code, told = asked(server, "postgresql://127.0.0.1:1/nowhere", monkeypatch)
    assert code == 1
    assert not told["sql"]["ok"]
    assert told["version"]["ok"]
