"""How an agent under an Opperator daemon ends. Law: what was begun is finished, and nobody who is gone holds it up."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from below import own_server, until
from daemon import Here, Process
from opperator_agent import Troubled

from distributed_state.adapters.opperator import bridge

pytestmark = [
    pytest.mark.only(api="blocking", warm="real", cold=("sqlite", "postgres")),
]


def slow_begins(daemon: Process) -> str:
    id = daemon.command("slow")
    daemon.until("log", lambda data: data["message"] == "slow begins")
    return id


@pytest.mark.wide
@pytest.mark.parametrize("how", ["SIGTERM", "end of input"])
async def test_a_command_that_runs_is_finished_and_answered(opener: Any, how: str) -> None:
    with Process(opener, "Troubled") as daemon:
        id = slow_begins(daemon)
        if how == "SIGTERM":
            daemon.signal(signal.SIGTERM)
        else:
            daemon.hang_up()
        assert daemon.end() == 0
    assert daemon.answer(id) == {"command_id": id, "success": True, "result": "done"}
    assert await (await opener()).app("agent:Troubled").get("slow", fresh=True) == "done"


@pytest.mark.wide
async def test_a_command_that_is_killed_has_done_nothing(opener: Any) -> None:
    """The negative control of the test above."""
    with Process(opener, "Troubled") as daemon:
        slow_begins(daemon)
        daemon.signal(signal.SIGKILL)
        assert daemon.end() == -signal.SIGKILL
    assert daemon.of("response") == []
    assert await (await opener()).app("agent:Troubled").get("slow", fresh=True) is None


@pytest.mark.wide
@pytest.mark.parametrize("when", ["from the beginning", "when it is ready"])
async def test_a_daemon_that_reads_no_more_ends_its_agent(opener: Any, when: str) -> None:
    reads, writes = os.pipe()
    with Process(opener, "Troubled", stdout=writes) as daemon:
        os.close(writes)
        with os.fdopen(reads, "rb") as file:
            while when != "from the beginning" and b'"ready"' not in file.readline():
                """It has not begun yet."""
        daemon.command("double", {"number": 1})
        assert daemon.end() == 0
        assert "Traceback" not in daemon.errors()


@pytest.mark.wide
async def test_a_daemon_that_sleeps_holds_nobody_up(opener: Any) -> None:
    reads, writes = os.pipe()
    with Process(opener, "Troubled", stdout=writes) as daemon, os.fdopen(reads, "rb") as file:
        os.close(writes)
        while b'"ready"' not in file.readline():
            """It has not begun yet."""
        daemon.command("flood")
        daemon.command("slow")
        store = await opener()
        await until(lambda: store.it.app("agent:Troubled").get("slow", fresh=True), every=0.05)
        began = time.monotonic()
        daemon.signal(signal.SIGTERM)
        assert daemon.end() == 0
        assert time.monotonic() - began < 15


@pytest.mark.wide
async def test_signals_reload_the_config_and_ask_for_the_status(opener: Any, tmp_path: Path) -> None:
    file = tmp_path / "agents.yaml"
    file.write_text("poll_interval: 5\n")
    with Process(opener, "Noted", "--config", str(file)) as daemon:
        daemon.until("ready")
        file.write_text("poll_interval: 7\n")
        daemon.signal(signal.SIGHUP)
        daemon.hook("config", {"poll_interval": 7})
        daemon.signal(signal.SIGUSR1)
        status = daemon.until("log", lambda data: data["message"] == "status")
        assert (status["level"], status["fields"]["agent"]) == ("info", "note_agent")
        daemon.until("log", lambda data: data["message"] == "notes")
        daemon.signal(signal.SIGINT)
        assert daemon.end() == 0
        assert daemon.hooks()[-1] == ("shutdown",)
        assert "poll_interval" not in daemon.errors(), "what went to the daemon is not told twice"


@pytest.mark.only(warm="single")
async def test_what_is_said_while_redis_is_away_is_logged_and_what_comes_later_is_told(opener: Any) -> None:
    with own_server(opener) as server:
        store = await opener(url=server.url, archive="memory", retry_for=1.0)
        with Here(Troubled(store.it)) as daemon:
            daemon.until("ready")
            server.kill()
            daemon.tell("conversation_switched", conversation_id="lost", previous_id="", message_count=0)
            failed = daemon.until("log", lambda data: "could not be published" in data["message"])
            assert "WarmUnavailable" in failed["fields"]["error"]
            assert "WarmUnavailable" not in daemon.answer(daemon.command("double", {"number": 1})).get("error", "")
            server.start()
            daemon.tell("conversation_switched", conversation_id="told", previous_id="lost", message_count=0)
            assert daemon.ask("where") == ["told", ""]
            await until(lambda: store.it.session("told").exists(fresh=True))
        await store.close()


@pytest.mark.wide
async def test_a_command_that_hangs_is_left_when_the_daemon_is_gone(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "_LAST_MESSAGES", 0.2)
    release = threading.Event()

    class Hanging(Troubled):
        shutdown_timeout = 0.2

        def slow(self) -> None:
            self.log("INFO", "slow begins")
            release.wait(60)

    store = await opener()
    began = time.monotonic()
    with Here(Hanging(store.it)) as daemon:
        slow_begins(daemon)  # type: ignore[arg-type]
    assert time.monotonic() - began < 20
    release.set()
