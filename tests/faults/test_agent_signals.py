"""Agents as processes that are sent signals. Law: what was begun is finished, then the process ends by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from below import ROOT, everything_in_sql

SCRIPT = Path(__file__).with_name("signalled_agent.py")
pytestmark = pytest.mark.only(warm="real", cold=("sqlite", "postgres"))


class Process:
    """The agent, what it said so far, and how to wait for more."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self.said = process, list[Any]()

    def until(self, *words: Any) -> Any:
        """Read on until a line begins with these words."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(json.loads(line))
            if self.said[-1][: len(words)] == list(words):
                return self.said[-1]
        raise AssertionError(f"never said {words}, but {self.said}")

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        """Its exit code, and all it said until then."""
        assert self._process.stdout is not None
        self.said += [json.loads(line) for line in self._process.stdout]
        return self._process.wait(60)


@contextmanager
def running(opener: Any, work: str, config: Path | None = None, **more: Any) -> Iterator[Process]:
    place = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    given = {"api": opener.api, "work": work, "place": place, "config": None if config is None else str(config)}
    command = [sys.executable, "-W", "error", str(SCRIPT)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "GIVEN": json.dumps(given | more)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            yield Process(process)
        finally:
            process.kill()


@pytest.mark.wide
async def test_sighup_reads_the_config_again_and_a_broken_one_changes_nothing(opener: Any, tmp_path: Path) -> None:
    file = tmp_path / "agents.yaml"
    file.write_text("poll_interval: 5\n")
    with running(opener, "wait", file) as agent:
        agent.until("started")
        for text, expected in (
            ("poll_interval: 5   # only a comment\n", ("log", "INFO", "config file read")),
            ("poll_interval: [\n", ("log", "ERROR", "the config file is broken: the old config stays")),
            ("poll_interval: 7\n", ("config", {"poll_interval": 7}, ["poll_interval"])),
        ):
            file.write_text(text)
            agent.send(signal.SIGHUP)
            agent.until(*expected)
        agent.send(signal.SIGTERM)
        assert agent.end() == 0
    assert [each for each in agent.said if each[0] == "config"] == [["config", {"poll_interval": 7}, ["poll_interval"]]]
    error = next(each[3]["error"] for each in agent.said if each[:2] == ["log", "ERROR"])
    assert error.startswith(f"{file}, line 2, column 1: ")


@pytest.mark.wide
async def test_sigusr1_tells_how_the_replica_is(opener: Any) -> None:
    with running(opener, "wait") as agent:
        agent.until("started")
        agent.send(signal.SIGUSR1)
        _, _, _, figures = agent.until("log", "INFO", "status")
        agent.until("status")
        agent.send(signal.SIGINT)
        assert agent.end() == 0
    wanted = {"uptime", "requests", "errors", "error_rate", "queue_size", "memory_mb", "conversations", "tiers", "lag"}
    assert wanted <= figures.keys()
    assert figures["memory_mb"] > 10
    assert figures["tiers"]["unarchived"] >= 0
    assert agent.said[-1][0] == "handlers"


@pytest.mark.wide
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_turn_that_runs_is_finished_before_the_end(opener: Any, number: int) -> None:
    with running(opener, "turns") as agent:
        agent.until("in a turn", 2)
        agent.send(number)
        assert agent.end() == 0
    rest = [each for each in agent.said[[*agent.said].index(["in a turn", 2]) :] if each[0] != "log"]
    handlers = ["handlers", True, True] if opener.api == "blocking" or number != signal.SIGINT else rest[-1]
    assert rest == [["in a turn", 2], ["stopping", True], ["turn done"], ["shutdown"], ["cleanup"], handlers]
    rows = everything_in_sql(opener.archive, opener.namespace)
    assert [row for row in rows["changes"] if "turn" in map(str, row)], "it archived what it had written"
    store = await opener()
    assert await store.session("c").get("n", fresh=True) == 2
    async with store.session("c").lock(wait=0.0):
        """Nobody holds it any more."""


@pytest.mark.wide
async def test_ctrl_c_in_the_body_of_a_with_ends_the_agent_as_the_end_of_it_does(opener: Any) -> None:
    with running(opener, "with") as agent:
        agent.until("in a turn", 2)
        agent.send(signal.SIGINT)
        assert agent.end() == -signal.SIGINT, "a KeyboardInterrupt that nobody caught"
    rest = [each for each in agent.said[[*agent.said].index(["in a turn", 2]) :] if each[0] != "log"]
    assert rest == [["in a turn", 2], ["stopping", True], ["turn done"], ["shutdown"], ["cleanup"]]
    assert not [each for each in agent.said if each[:2] == ["log", "ERROR"]]
    store = await opener()
    assert await store.session("c").get("n", fresh=True) == 2


@pytest.mark.wide
async def test_a_turn_that_is_killed_writes_nothing(opener: Any) -> None:
    """The negative control of the test above."""
    with running(opener, "turns") as agent:
        agent.until("in a turn", 2)
        agent.send(signal.SIGKILL)
        assert agent.end() == -signal.SIGKILL
    store = await opener()
    assert await store.session("c").get("n", fresh=True) == 1


@pytest.mark.wide
async def test_what_does_not_end_is_left_after_a_while(opener: Any) -> None:
    with running(opener, "hang", shutdown_timeout=0.5) as agent:
        agent.until("working")
        agent.send(signal.SIGTERM)
        assert agent.end() == 0
    assert [each[0] for each in agent.said if each[0] != "log"][-3:] == ["shutdown", "cleanup", "handlers"]


@pytest.mark.wide
async def test_a_second_signal_does_not_wait_any_longer(opener: Any) -> None:
    with running(opener, "hang", shutdown_timeout=600) as agent:
        agent.until("working")
        agent.send(signal.SIGTERM)
        agent.until("log", "INFO", "ending")
        agent.send(signal.SIGTERM)
        assert agent.end() == 0


@pytest.mark.wide
async def test_what_hangs_before_it_began_is_left_too(opener: Any) -> None:
    with running(opener, "hang early", shutdown_timeout=0.5) as agent:
        agent.until("working")
        agent.send(signal.SIGTERM)
        assert agent.end() == 0
    assert [each[0] for each in agent.said if each[0] != "log"] == ["working", "shutdown", "cleanup", "handlers"]
