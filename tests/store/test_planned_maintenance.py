"""Announced maintenance: every replica reports its end, also while the server under maintenance is away."""

from __future__ import annotations

import json
from typing import Any

import pytest
from below import tiers, until
from scraping import Scrape
from typer.testing import CliRunner

from distributed_state import AsyncStateStore, StateStore
from distributed_state.errors import ColdUnavailable, InvalidValue, WarmUnavailable
from distributed_state.programs.cli import shell
from distributed_state.store import watch
from distributed_state.warm.maintenance import LONGEST

asyncio_api = pytest.mark.only(api="asyncio")


async def reported(store: AsyncStateStore) -> list[str]:
    """The findings of the doctor about maintenance."""
    return [each.found for each in await store.admin.doctor() if each.name == "maintenance"]


@asyncio_api
async def test_the_doctor_and_the_metric_report_maintenance_until_it_ends(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_EVERY", 0.1)
    store = await opener()
    scrape = Scrape(store)
    await until(lambda: scrape("maintenance_seconds") == 0)
    assert await reported(store) == []
    await tiers(store).maintenance.begin(600, "ada@host", "new Valkey")
    assert 590 < scrape("maintenance_seconds") < 601  # the clock of Redis is known within a round trip
    (found,) = await reported(store)
    assert found.startswith("maintenance until 2")
    assert found.endswith("UTC, announced by ada@host: new Valkey")
    await tiers(store).maintenance.finish("ada@host")
    assert scrape("maintenance_seconds") == 0
    assert await reported(store) == []


@pytest.mark.only(warm="single", cold="sqlite", api="asyncio")
async def test_other_replicas_learn_of_it_and_of_its_early_end(
    opener: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "_EVERY", 0.1)
    caplog.set_level("INFO", "distributed_state.warm.maintenance")
    one, other = await opener(), await opener()
    scrape = Scrape(other)
    await tiers(one).maintenance.begin(600, "ada@host")
    await until(lambda: (scrape("maintenance_seconds") or 0) > 0)
    await until(lambda: "maintenance until" in caplog.text)
    await tiers(one).maintenance.finish("bob@host")
    await until(lambda: scrape("maintenance_seconds") == 0)
    await until(lambda: "maintenance ended by bob@host" in caplog.text)


@asyncio_api
async def test_the_end_is_remembered_when_redis_returns_without_it(opener: Any) -> None:
    store = await opener()
    of = tiers(store)
    announced = await of.maintenance.begin(600, "ada@host")
    await of.port.command(b"DEL", of.keys.maintenance)
    assert await of.maintenance.refresh() == announced


@asyncio_api
async def test_the_end_is_remembered_while_redis_is_away(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await opener()
    of = tiers(store)
    announced = await of.maintenance.begin(600, "ada@host")

    async def away(*_: Any) -> Any:
        raise WarmUnavailable("it is being restarted")

    monkeypatch.setattr(of.port, "command", away)
    assert await of.maintenance.refresh() == announced
    assert 590 < (of.maintenance.seconds or 0) < 601


@asyncio_api
async def test_it_does_not_outlast_its_end(opener: Any) -> None:
    store = await opener()
    of = tiers(store)
    await of.maintenance.begin(0.05, "ada@host")
    await until(lambda: of.maintenance.seconds == 0)
    assert await of.maintenance.refresh() is None


@asyncio_api
@pytest.mark.parametrize("seconds", [0, -1, LONGEST + 1, float("nan")])
async def test_it_is_bounded(opener: Any, seconds: float) -> None:
    store = await opener()
    with pytest.raises(InvalidValue, match="at most 4 h"):
        await tiers(store).maintenance.begin(seconds, "ada@host")
    with pytest.raises(InvalidValue, match="reason is a printable text"):
        await tiers(store).maintenance.begin(60, "ada@host", "x" * 201)
    assert await reported(store) == []


def test_the_command_announces_shows_and_ends_it(
    servers: Any, namespace: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, archive = servers.redis("valkey").url, f"sqlite:///{tmp_path}/a.db"
    monkeypatch.setenv("DISTRIBUTED_STATE_URL", url)
    monkeypatch.setenv("DISTRIBUTED_STATE_ARCHIVE", archive)
    monkeypatch.setenv("DISTRIBUTED_STATE_NAMESPACE", namespace)

    def ran(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(shell.app, ["maintenance", *words])
        return done.exit_code, (done.stdout or str(done.exception)).strip()

    with StateStore.open(url, archive=archive, namespace=namespace) as store:
        assert ran() == (0, "no maintenance")
        assert ran("--json") == (0, "null")
        code, said = ran("on", "--for", "10m", "--reason", "new Valkey", "--actor", "ada")
        assert code == 0
        assert said.endswith("announced by ada: new Valkey")
        assert ran() == (0, said)
        assert json.loads(ran("--json")[1])["by"] == "ada"
        code, said = ran("on", "--for", "5h")
        assert code != 0
        assert "at most 4 h, not 18000 s" in said
        code, said = ran("on", "--for", "soon")
        assert code != 0
        assert "--for is a number and a unit" in said
        assert ran("off") == (0, "no maintenance")
        assert ran() == (0, "no maintenance")
        store.admin.archive()
        events = store.admin.audit(type="maintenance.*")
        assert [set(each.data) for each in events] == [{"ends", "reason"}, set()]
        done = [(each.type, each.actor) for each in events]
        assert [each[0] for each in done] == ["maintenance.announced", "maintenance.ended"]
        assert done[0][1] == "ada"
        assert "@" in done[1][1]


def test_the_command_refuses_a_store_without_a_fleet(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(shell.app, ["maintenance", "on", "--for", "10m"])
    assert done.exit_code != 0
    assert "an embedded store has no fleet" in str(done.exception)


def test_maintenance_is_announced_while_no_event_can_be_written(
    servers: Any, namespace: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while SQL is under maintenance, in a partition that no worker has used."""

    def away(*_: Any, **__: Any) -> Any:
        raise ColdUnavailable("SQL is being restarted")

    place = ["--url", servers.redis("valkey").url, "--archive", f"sqlite:///{tmp_path}/a.db", "--namespace", namespace]
    with StateStore.open(place[1], archive=place[3], namespace=namespace):
        monkeypatch.setattr(StateStore, "emit", away)
        done = CliRunner().invoke(shell.app, [*place, "maintenance", "on", "--for", "10m"])
        assert done.exit_code == 0
        assert "maintenance until" in done.stdout
        assert "the audit will not have this: SQL is being restarted" in done.stderr
