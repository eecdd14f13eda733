"""How costs grow: the measurements run, and a curve says what its numbers say."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
import redis

from deploy.load.curves.archiving import archiving, field, field_and_message
from deploy.load.curves.beside import beside, beside_compact, beside_purge
from deploy.load.curves.claims import claims
from deploy.load.curves.collection import collections
from deploy.load.curves.curve import Curve, flat
from deploy.load.curves.events import events, unwanted
from deploy.load.curves.first_writes import first_writes
from deploy.load.curves.forgetting import forgetting
from deploy.load.curves.holders import Held, holders
from deploy.load.curves.idle import idle, resting
from deploy.load.curves.many_items import many_items
from deploy.load.curves.picture import placed
from deploy.load.curves.purging import compacting, purging
from deploy.load.curves.reads import Archive, reads
from deploy.load.curves.refill import refills
from deploy.load.curves.small_sessions import small_sessions
from deploy.load.curves.sql_bytes import sql_bytes
from deploy.load.curves.sqlite_archiving import sqlite_archiving
from deploy.load.curves.tagged import tagged
from deploy.load.curves.wal import written
from deploy.load.curves.warm_bytes import warm_bytes
from deploy.load.growth import MEASURED
from distributed_state.cold.store import ColdStore
from distributed_state.programs.servers import postgres_server, redis_server
from distributed_state.warm.link import NodeChannels

GROWTH = Path(__file__).parents[2] / "deploy" / "load" / "growth.py"


def growth(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, GROWTH, *words], capture_output=True, text=True, check=False, timeout=120)


def test_a_slope_is_that_of_the_logarithms() -> None:
    def curve(*costs: float) -> Curve:
        return Curve("n", "s", "of", [10, 100, 1000], list(costs), 5.0)

    assert curve(2, 2, 2).slope == pytest.approx(0)
    assert curve(1, 10, 100).slope == pytest.approx(1)
    assert curve(1, 100, 10_000).slope == pytest.approx(2)
    assert curve(2, 2, 5).reached
    assert not curve(2, 2, 5.1).reached
    assert Curve("n", "s", "of", [10], [3.0], 5.0).slope == 0
    assert curve(5, 0, 0).slope == pytest.approx(-1.5), "nothing is shown as a thousandth of the goal"
    assert curve(5, 0, 0).reached


def test_what_must_not_grow_has_its_smallest_for_a_goal() -> None:
    assert flat("n", "ms", "of", [1, 2], [2.0, 3.0]).reached
    assert not flat("n", "ms", "of", [1, 2], [2.0, 3.1]).reached


@pytest.mark.parametrize("count", [4, *(pytest.param(n, marks=pytest.mark.wide) for n in (1, 23))])
def test_every_curve_has_a_place_in_the_picture(count: int) -> None:
    pytest.importorskip("matplotlib")
    shown = [Curve(f"n{n}", "us", "things", [10, 1000], [0.0, n], 5.0) for n in range(count)]
    grid = [axes.get_title() for axes in placed(shown).axes]
    assert [title.partition("\n")[0] for title in grid[:count]] == [curve.name for curve in shown]
    assert not any(grid[count:])
    assert len(grid) - count < 4


@pytest.mark.full
def test_starts_are_measured_and_said(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = ("--json", str(tmp_path / "g.json"), "--png", str(tmp_path / "g.png"))
    run = growth("--only", "starts", "--sizes", "2,1", *files)
    stored = json.loads((tmp_path / "g.json").read_text())
    (found,) = stored["curves"]["starts"]
    servers = r"(Redis|Valkey) \d+\.\d+.*, PostgreSQL \d+\.\d+"
    assert re.fullmatch(f"Python {re.escape(platform.python_version())}, {servers}", stored["setting"]["software"])
    assert found["sizes"] == [1, 2]
    assert len(found["costs"]) == 2
    assert min(found["costs"]) > 0
    assert run.returncode == (0 if found["costs"][-1] <= found["goal"] else 1)
    assert "embedded" in run.stdout
    assert (tmp_path / "g.png").stat().st_size > 5_000


@pytest.mark.full
def test_replicas_at_rest_are_measured() -> None:
    curve = claims([1, 2], lambda _: None, seconds=2.0)
    assert min(curve.costs) > 0


@pytest.mark.full
def test_a_fleet_at_rest_is_measured() -> None:
    curve = idle([1, 2], lambda _: None, settled=0.5, seconds=1.0)
    assert curve.sizes == [1, 2]
    assert min(curve.costs) >= 0


def probes_for_each_beat() -> float:
    """Of replicas that have nothing in hot; both are counted by the server in the same seconds."""
    _, asked = resting(2, settled=4.0, seconds=12.0)
    return (asked["persist"] - asked["zscore"]) / asked["zscore"]  # a beat has one of each


@pytest.mark.wide
def test_replicas_at_rest_hardly_probe() -> None:
    assert probes_for_each_beat() < 1.2


@pytest.mark.wide
def test_if_no_link_rested_they_would_probe_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeChannels, "nothing_kept", False)
    assert probes_for_each_beat() > 3


@pytest.mark.full
@pytest.mark.parametrize("measure", [events, unwanted])
def test_events_to_many_connections_are_measured(measure: Callable[..., Curve]) -> None:
    curve = measure([2, 4], lambda _: None, rate=200, seconds=1.0)
    assert len(curve.costs) == 2
    assert min(curve.costs) > 0


def test_what_items_cost_is_measured() -> None:
    """Whatever else the record holds: one script, and no item that was not asked for."""
    puts, guarded, gets, *times, read = many_items([10, 600], lambda _: None)
    assert puts.reached
    assert guarded.reached
    assert gets.reached
    assert read.reached
    assert all(min(curve.costs) > 0 for curve in times)


@pytest.mark.full
def test_listings_by_tag_are_measured() -> None:
    curves = tagged([100, 200], lambda _: None, rounds=3)
    assert len(curves) == 4
    assert all(min(curve.costs) > 0 for curve in curves)


@pytest.mark.wide
def test_first_writes_are_measured() -> None:
    curve = first_writes([10, 100], lambda _: None)
    assert min(curve.costs) > 0.5
    assert max(curve.costs) < 3, "without the names it is 5"


def test_what_a_small_session_takes_is_measured() -> None:
    curve = small_sessions([1, 3], lambda _: None)
    assert min(curve.costs) > 200
    assert curve.reached


@pytest.mark.wide
def test_what_sql_takes_is_measured() -> None:
    curve = sql_bytes([3, 30], lambda _: None)
    assert 1 < curve.costs[1] < curve.costs[0], "of few conversations most is what tables have at least"


@pytest.mark.full
@pytest.mark.parametrize(("measure", "sizes"), [(purging, [4_000]), (compacting, [4_000]), (forgetting, [3])])
def test_what_sql_does_is_measured(measure: Callable[..., Curve], sizes: list[int]) -> None:
    curve = measure(sizes, lambda _: None)
    assert len(curve.costs) == 1
    assert min(curve.costs) > 0


@pytest.mark.full
def test_archiving_is_measured_beside_psycopg_and_by_itself() -> None:
    bare, taken, alike = archiving([5], lambda _: None)
    assert min(bare.costs) > 0.1
    assert min(alike.costs) > 0.1
    assert 1 < min(taken.costs) < 10_000


@pytest.mark.wide
def test_archiving_into_sqlite_is_measured_with_messages_and_without() -> None:
    whole, fields = sqlite_archiving([5, 50], lambda _: None, turns=1)
    assert "and a message" in whole.name
    assert "message" not in fields.name
    for curve in (whole, fields):
        assert len(curve.costs) == 2
        assert 1 < min(curve.costs) < 10_000


def test_a_change_with_a_message_has_two_steps() -> None:
    assert [kind for kind, *_ in field(7)] == [b"s"]
    assert [(kind, name) for kind, name, _ in field_and_message(7)] == [(b"s", b"step"), (b"m", b"6")]


@pytest.mark.full
@pytest.mark.parametrize("measure", [beside_purge, beside_compact])
def test_passes_beside_maintenance_are_measured(measure: Callable[..., Curve]) -> None:
    curve = measure([2_000], lambda _: None, alone=2)
    assert curve.goal == 1.3
    assert min(curve.costs) > 0


@pytest.mark.wide
def test_maintenance_that_fails_is_no_measurement() -> None:
    with postgres_server() as database, pytest.raises(EOFError):
        beside(database.url, 2_000, failing, alone=1)


def failing(cold: ColdStore, changes: int, last_ms: int) -> None:
    """Ended as one that was killed: another process runs it, whose traceback nobody wants to see."""
    os._exit(1)


@pytest.mark.wide
def test_what_the_log_of_postgresql_gets_is_measured() -> None:
    with postgres_server() as database:
        found = written(database.url, 20, batches=2)
    assert found.updates == {"records": 2 * 20, "cursors": 2}, "a row of each record and of the cursor for each batch"
    assert all(0 <= found.elsewhere[table] <= found.updates[table] for table in found.updates)
    assert 100 < found.bytes_ < 10_000


@pytest.mark.wide
def test_what_an_index_has_is_not_changed_in_place() -> None:
    """So `elsewhere` counts what it says: with an index of the cursors' offset no update of theirs is HOT."""
    with postgres_server() as database:
        ColdStore.open(database.url, "w20").close()
        with psycopg.connect(database.url.replace("+psycopg", "")) as connection:
            connection.execute('CREATE INDEX beside ON cursors ("offset")')
        found = written(database.url, 20, batches=2)
    assert found.elsewhere["cursors"] == found.updates["cursors"] == 2


@pytest.mark.full
def test_reads_among_few_and_many_are_measured() -> None:
    page, hydrate, *others = reads([80, 160], lambda _: None, rounds=3)
    assert "page" in page.name
    assert "left Redis" in hydrate.name
    assert len(others) == 3
    for curve in (page, hydrate, *others):
        assert curve.sizes == [80, 160]
        assert min(curve.costs) > 0


@pytest.mark.full
def test_a_session_that_is_read_was_not_in_redis() -> None:
    with ExitStack() as stack:
        server, database = stack.enter_context(redis_server()), stack.enter_context(postgres_server())
        archive = Archive(server.url, database, 80, lambda _: None, stack)
        client = stack.enter_context(redis.Redis.from_url(server.url))
        before = set(client.scan_iter("reads80:*:r:session:*"))
        for _ in range(3):
            archive.read()
        assert len(set(client.scan_iter("reads80:*:r:session:*")) - before) == 6, "three sessions and their forks"


@pytest.mark.full
def test_commits_that_two_replicas_hear_are_measured() -> None:
    curve = holders([4, 8], lambda _: None, turns=1, commits=50)
    assert len(curve.costs) == 2
    assert min(curve.costs) > 0


@pytest.mark.wide
def test_commits_that_nobody_hears_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Held, "hold", Held._commit)
    with pytest.raises(AssertionError, match="0 replicas hold the record"):
        holders([4], lambda _: None, turns=1, commits=50)


def test_what_a_session_takes_beyond_its_json_is_measured() -> None:
    curve = warm_bytes([200, 2_000], lambda _: None)
    assert min(curve.costs) > 100
    assert curve.reached


@pytest.mark.wide
def test_more_records_in_hot_are_no_more_objects_to_collect() -> None:
    (few, taken, before, _), (many, _, after, _) = collections([200, 1200], lambda _: None)
    assert (few, many) == (200, 1200)
    assert taken > 0
    # Cached keys and known ids are bounded, and four objects each until then. A record itself is none.
    assert after - before <= 4.1 * (many - few)


@pytest.mark.wide
def test_what_is_brought_back_after_a_cut_is_measured() -> None:
    ((taken, singly),) = refills([50], lambda _: None)
    assert taken > 0
    assert singly > 0


@pytest.mark.wide
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "nothing"], "there are " + ", ".join(MEASURED)),
        (["--sizes", "some"], "sizes are numbers"),
        (["--sizes", "0,1"], "at least 1"),
        (["--sizing", "nowhere.json"], "nowhere.json"),
        (["--into", "README.md"], "the table of --sizing"),
    ],
)
def test_what_it_cannot_measure_it_says(words: list[str], said: str) -> None:
    run = growth(*words)
    assert run.returncode == 2
    assert said in " ".join(run.stderr.replace("│", " ").split())
