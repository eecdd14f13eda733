"""The fault matrix itself: its cells, its network, two real cells, and one whose writes are destroyed on purpose."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis
from below import ROOT

from deploy.load.matrix import __main__ as program
from deploy.load.matrix import report, running, soak
from deploy.load.matrix.cells import Cell, all_cells
from deploy.load.matrix.faults import BY_NAME, Fault
from deploy.load.matrix.proxy import Network
from deploy.load.matrix.run import Lane, Outcome, run
from deploy.load.matrix.scene import Scene
from distributed_state.programs.servers import RedisServer, free_port, redis_server

CELL = Cell((BY_NAME["flushall"],), "single")


def test_every_fault_is_run_on_each_topology_or_says_why_not() -> None:
    cells = list(all_cells())
    assert {cell.topology for cell in cells} == {"single", "sentinel", "cluster"}
    assert all(cell.impossible or cell.faults[0].about for cell in cells)
    assert sum(not cell.impossible for cell in cells) > 60
    with pytest.raises(ValueError, match="a fault is one of"):
        list(all_cells(["earthquake"]))


def test_one_server_is_not_asked_for_replicas() -> None:
    by_topology = {cell.topology: cell.levels for cell in all_cells(["flushall"])}
    assert "replicated" in by_topology["sentinel"]
    assert "replicated" not in by_topology["single"]


def test_the_list_names_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list(all_cells()))
    assert "failover-lag-1 on single: one server has no replica to fail over to" in lines


def test_the_same_seed_gives_the_same_soak() -> None:
    def names(seed: int) -> list[str]:
        endless = soak.cells(1.0, seed, ("single", "cluster"), 4)
        return [f"{cell.name} on {cell.topology}" for cell, _ in zip(endless, range(5), strict=False)]

    assert names(3) == names(3)
    assert names(3) != names(4)


# The network


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as own:
        yield own


def client(server: RedisServer, port: int) -> redis.Redis:
    return redis.Redis(port=port, password=server.password, retry=None, socket_timeout=5)


def test_a_dropped_answer_closes_its_connection_and_its_command_was_carried_out(server: RedisServer) -> None:
    with Network() as network:
        proxy = network.proxy(port := free_port(), server.port)
        with client(server, port) as through:
            assert through.incr("n") == 1
            proxy.dropped = 1.0
            with pytest.raises(redis.ConnectionError):
                through.incr("n")
            proxy.dropped = 0.0
            assert through.incr("n") == 3


def test_a_muted_connection_stays_open_and_others_go_on(server: RedisServer) -> None:
    with Network() as network:
        proxy = network.proxy(port := free_port(), server.port)
        with socket.create_connection(("127.0.0.1", port), timeout=5) as plain, client(server, port) as later:
            plain.sendall(b"AUTH %b\r\n" % server.password.encode())
            assert plain.recv(64) == b"+OK\r\n"
            proxy.mute("client")
            plain.sendall(b"PING\r\n")
            plain.settimeout(0.3)
            with pytest.raises(TimeoutError):
                plain.recv(64)
            assert later.ping()


def test_only_the_kind_that_is_blocked_is_cut_off(server: RedisServer) -> None:
    with Network() as network:
        proxy = network.proxy(port := free_port(), server.port)
        proxy.blocked = frozenset({"replica"})
        with socket.create_connection(("127.0.0.1", port), timeout=5) as replica, client(server, port) as through:
            replica.sendall(b"REPLCONF listening-port 1\r\n")
            replica.settimeout(0.3)
            with pytest.raises(TimeoutError):
                replica.recv(64)
            assert through.ping()


# Real cells


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lane]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # Not below tmp_path: PostgreSQL may run as another user, who may not look into that.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        Path(place).chmod(0o755)
        with contextlib.closing(Lane(Path(place), threading.Event())) as own:
            yield own


def real(lane: Lane, fault: Fault, topology: str) -> Outcome:
    return run(Cell((fault,), topology), lane, 2.0, seed=1)


@pytest.mark.wide
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "topology"), [("worker-kill", "single"), pytest.param("script-flush", "sentinel", marks=pytest.mark.full)]
)
def test_a_cell_keeps_to_what_is_required(lane: Lane, fault: str, topology: str) -> None:
    outcome = real(lane, BY_NAME[fault], topology)
    assert outcome.missed == []
    assert outcome.levels["memory"].acknowledged > 0
    assert outcome.levels["archived"].acknowledged > 0
    assert outcome.count("lost") == 0


@pytest.mark.wide
@pytest.mark.timeout(300)
def test_writes_that_are_destroyed_in_every_tier_are_found_missing(lane: Lane) -> None:
    """Negative control: neither Redis nor SQL has them, and no writer can know."""
    destroyed = threading.Event()

    def destroy(scene: Scene) -> None:
        with psycopg.connect(scene.sql.url.replace("+psycopg", "")) as connection:
            mine = "(SELECT key FROM records WHERE record = 'session:archived/0')"
            for table in ("changes", "messages", "snapshots"):
                connection.execute(f"DELETE FROM {table} WHERE record IN {mine}")
            connection.execute(f"DELETE FROM records WHERE key IN {mine}")
        for server in scene.warm.servers():
            with redis.Redis(port=server.own_port, password=server.password) as direct:
                for key in direct.scan_iter(match=b"*r:session:archived*"):
                    direct.delete(key)
        destroyed.set()

    outcome = real(lane, Fault("vandal", destroy), "single")
    assert destroyed.is_set()
    assert any("archived" in each and "lost" in each for each in outcome.missed), outcome.missed


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_random_faults_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert soak.main(["--minutes", "60"]) == 0


def test_a_table_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- matrix -->\nan old table\n<!-- end of matrix -->\nAfter.\n")
    for _ in range(2):
        report.put(page, "matrix", report.markdown([Outcome(CELL, missed=["memory: 1 lost"])], [], "command"))
        text = page.read_text()
        assert "an old table" not in text
        assert text.startswith("Before.\n")
        assert text.endswith("<!-- end of matrix -->\nAfter.\n")
        assert text.count("|flushall|single|") == 1
        assert "- flushall on single: memory: 1 lost" in text


def test_a_cell_that_missed_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert running.conclude([Outcome(CELL)], whole=True) == 0
    assert running.conclude([Outcome(CELL), Outcome(CELL, missed=["memory: 1 lost"])], whole=True) == 1
    assert "1 of 2 cells meet the requirements" in capsys.readouterr().out


def test_an_interrupted_run_is_no_pass() -> None:
    assert running.conclude([], whole=False) == running.INTERRUPTED
    assert running.conclude([], whole=True) == 0
