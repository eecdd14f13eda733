"""`probe` takes a turn as a user does, and says at once when that fails."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import served
from typer.testing import CliRunner
from watching import within

from distributed_state import RemoteStore
from distributed_state.programs.cli import probe, shell
from distributed_state.programs.servers import free_port
from distributed_state.programs.service import Access, Limits, Service, callers_policy
from distributed_state.programs.service.authentication import Authentication
from distributed_state.remote.blocking import RemoteSession

Probe = Callable[..., dict[str, Any]]
ID = "probe:here"


def run(*words: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(shell.app, [*words, "--conversation", ID, "--json"])
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a service with tokens, whose probe has one of its own."""
    archive, file = f"sqlite:///{tmp_path}/a.db", str(tmp_path / "token")
    words = ["--archive", archive, "--namespace", "n", "token", "create", "--tenant", "probe"]
    made = CliRunner().invoke(shell.app, [*words, "--rights", "read,write,delete", "--into", file])
    assert made.exit_code == 0, made.output
    monkeypatch.setenv("DISTRIBUTED_STATE_TOKEN_FILE", file)
    own = Service(Limits(), Authentication(Access(tokens=True)))
    with served(None, archive, "n", service=own, access=callers_policy()) as client:
        yield str(client.base_url)


def test_a_turn_over_http_is_read_back_and_its_conversation_stays_short(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_KEPT", 2)
    for turns in (1, 0, 1):  # the second one erases what there is
        outcome = run("--url", service, "probe")
        assert (outcome["ok"], outcome["error"]) == (True, "")
        assert 0 < outcome["seconds"] < 30
        with RemoteStore.open(service) as store:
            session = store.session(ID)
            assert len(session.messages(fresh=True)) == turns
            assert not turns or session.lifetime().idle == 3600, "it ends when no probe uses it"


def test_a_probe_of_its_own_store_needs_no_service(tmp_path: Path) -> None:
    store = ("--archive", f"sqlite:///{tmp_path}/a.db")
    assert CliRunner().invoke(shell.app, [*store, "set", "c", "n", "1"]).exit_code == 0
    assert run(*store, "probe")["ok"]


def test_a_failed_turn_is_named_and_is_the_exit_code(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    outcome = run("probe", "--url", nowhere, code=1)
    assert not outcome["ok"]
    assert "did not answer" in outcome["error"]
    monkeypatch.setattr(RemoteSession, "messages", lambda *_, **__: [])
    assert "another state was read" in run("probe", "--url", service, code=1)["error"]
    monkeypatch.setenv("DISTRIBUTED_STATE_TOKEN", "dstate_0123456789abcdef_" + "x" * 43)
    assert "Unauthenticated" in run("probe", "--url", service, code=1)["error"]


def test_a_result_is_shown_until_the_next_one_should_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, now = probe.Noted(15.0), [100.0]
    monkeypatch.setattr(probe.time, "monotonic", lambda: now[0])

    def shown() -> float | None:
        return noted.registry.get_sample_value("distributed_state_probe_ok")

    for ok in (True, False, True):
        noted.note(probe.Outcome(0.0, ok, 0.1, "" if ok else "away"))
        assert shown() == ok
    now[0] += 14
    assert shown() == 1
    now[0] += 2
    assert shown() == 0, "the probe hangs"


def test_turns_are_taken_and_counted_until_ctrl_c(service: str) -> None:
    port = free_port()
    words = ["probe", "--url", service, "--every", "0.2s", "--metrics-port", str(port), "--conversation", ID]
    process = subprocess.Popen(
        [sys.executable, "-m", "distributed_state", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def counted() -> bool:
        try:
            text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=3).text
        except httpx.HTTPError:
            return False
        count = re.search(r'probe_seconds_count\{outcome="ok"\} (\S+)', text)
        return count is not None and float(count[1]) >= 2 and "probe_ok 1.0" in text

    try:
        within(60, counted, lambda: process.poll())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    lines = [json.loads(each)["message"] for each in out.splitlines()]
    assert len(lines) >= 2
    assert all(re.fullmatch(r"ok after [\d.]+ ms", each) for each in lines)
