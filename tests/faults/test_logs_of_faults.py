"""Logs while servers fail, as a collector reads them. Law: each line of stdout and stderr is one JSON object."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from watching import LINE, Fleet, turns, within

from distributed_state.programs.servers import PostgresServer, RedisServer, postgres_server, redis_server

pytestmark = [pytest.mark.wide, pytest.mark.timeout(150)]
NAMES = ("worker", "archiver")
Scene = tuple[Fleet, RedisServer, PostgresServer]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with redis_server("--appendonly", "yes") as redis, postgres_server() as postgres:
        fleet = Fleet(redis.url, postgres.url, tmp_path, {"LOG_LEVEL": "info"})
        try:
            fleet.archiver()
            fleet.worker(archives=False)
            yield fleet, redis, postgres
        finally:
            fleet.close()


def malformed(fleet: Fleet) -> dict[str, list[str]]:
    return {name: fleet.malformed(name, fields=LINE) for name in NAMES}


def stop(fleet: Fleet) -> list[int]:
    """End both by SIGTERM; their exit codes."""
    for name in NAMES:
        fleet.processes[name].send_signal(signal.SIGTERM)
    return [fleet.processes[name].wait(60) for name in NAMES]


def test_every_line_is_an_object_while_servers_are_killed_and_frozen(scene: Scene) -> None:
    fleet, redis, postgres = scene
    with turns(fleet) as answered:

        def served() -> None:
            before = answered[200]
            within(30, lambda: answered[200] >= before + 5, lambda: f"turns are refused: {answered}")

        served()
        for server in (redis, postgres):
            past = {name: len(fleet.text(name)().splitlines()) for name in NAMES}
            server.kill()
            name = "worker" if server is redis else "archiver"
            within(20, lambda name=name, past=past: fleet.logged(name, past[name]), lambda: "nothing is logged")
            time.sleep(2)  # for calls that wait
            server.start()
            served()
        for server in (redis, postgres):
            server.pause()
        time.sleep(4)
        for server in (redis, postgres):
            server.resume()
        served()
    assert stop(fleet) == [0, 0]
    assert malformed(fleet) == {name: [] for name in NAMES}


def test_every_line_is_an_object_when_processes_end_while_no_server_answers(scene: Scene) -> None:
    fleet, redis, postgres = scene
    with turns(fleet) as answered:
        within(30, lambda: answered[200] >= 5, lambda: f"turns are refused: {answered}")
        redis.kill()
        postgres.kill()
        time.sleep(2)
        assert stop(fleet) == [0, 0]
    assert malformed(fleet) == {name: [] for name in NAMES}


def test_every_line_is_an_object_when_a_port_is_taken(scene: Scene) -> None:
    fleet, *_ = scene
    port, ops = str(fleet.ports[0]), str(fleet.ops["archiver"][0])
    for name, words in {
        "second": ("serve", "--insecure", "--port", port),
        "other": ("archiver", "--metrics-port", ops),
    }.items():
        assert fleet.start(name, *words).wait(60) == 1
        assert "ended: " in fleet.text(name)()
        assert fleet.malformed(name, fields=LINE) == []
