"""`deploy/load/work.py`, with few sessions: each section comes to its end, and finds what went wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from below import ROOT

from deploy.load import verifying
from deploy.load.workers import job_queues, processes, queues, timers
from deploy.load.workers.posting import unanswered
from deploy.load.workers.processes import Place, due
from distributed_state import Message
from distributed_state.programs.servers import redis_server, wait_until
from distributed_state.values.model import Ref

WORK = [sys.executable, str(ROOT / "deploy/load/work.py")]


def messages(*texts: str) -> list[Message]:
    """Inputs, and answers that begin with "to"."""
    return [Message(role="assistant" if text.startswith("to ") else "user", content=text) for text in texts]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (["1", "to 1", "2", "to 2"], 0),
        (["1", "2", "to 1", "to 2"], 0),
        (["1", "to 1", "2"], 1),
        (["1", "to 1", "1", "to 1", "2", "to 2"], 2),
        (["2", "to 2", "1", "to 1"], 2),
        ([], 2),
    ],
)
def test_an_input_that_is_lost_or_answered_twice_is_found(found: list[str], wrong: int) -> None:
    assert len(list(unanswered({"s": ["1", "2"]}, {"s": messages(*found)}))) == wrong


@pytest.mark.unit
def test_an_input_that_is_lost_or_answered_twice_fails_a_run() -> None:
    expected = verifying.Expected("s", [(3, "i:a"), (5, "i:b")])

    def wrong(*texts: str) -> int:
        return len(list(verifying.differences([], expected, [each.to_dict() for each in messages(*texts)])))

    assert wrong("a", "to a", "b", "to b") == 0
    assert wrong("a", "to a") == 1
    assert wrong("a", "to a", "a", "to a", "b", "to b") == 1


@pytest.mark.unit
def test_a_pace_counts_once_the_processes_have_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 1.0

    monkeypatch.setattr(processes.time, "sleep", sleep)
    monkeypatch.setattr(processes.time, "perf_counter", lambda: now)
    left = iter([100, 100, 100, 70, 35, 0])
    assert processes.pace(lambda: next(left), 100) == pytest.approx(70 / 2)
    left = iter([100, 0])
    with pytest.raises(RuntimeError, match="too few"):
        processes.pace(lambda: next(left), 100)


@pytest.mark.unit
def test_what_is_compared_is_described_and_what_is_missing_is_named(tmp_path: Path) -> None:
    assert set(queues.WHAT) == set(job_queues.KINDS)
    for given in (None, tmp_path):
        with pytest.raises(ValueError, match="pip install rq arq, then --peers"):
            queues.python(given)


def test_copies_of_sleeping_sessions_are_sessions_that_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "_LOT", 7)
    names: list[str] = []
    with redis_server() as server, (place := Place(server.url, tmp_path, show=names.append)).open("sleeping") as store:
        for number in range(300):
            store.session(f"s{number}").wake("later", after=3600 + number, handler=timers.COUNT)
        store.admin.archive()
        timers._copied(place, store, 20)
        copied = [each.id for each in store.sessions(limit=1000) if not each.id.startswith("s")]
        assert len(copied) == 20
        place.client().flushall()
        store.invalidate()
        for id in copied:
            [wake] = store.session(id).wakes()
            assert (wake.wake, wake.message.content) == ("", "later")
        keys = store._core._lifecycle.context.keys  # type: ignore[attr-defined]
        with place.workers("sleeping") as workers:
            workers.start()
            wait_until(lambda: due(store, place.client(), timers.COUNT) == 320, "not all are due again", 60)
        one = keys.of(Ref("session", copied[0]))
        assert place.client().zscore(keys.partition(one.partition).due_of(timers.COUNT), one.text)


def run(*words: str) -> tuple[int, str]:
    environment = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(
        [*WORK, *words], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.wide
def test_a_killed_workers_sessions_are_begun_again_and_the_rows_are_written(tmp_path: Path) -> None:
    code, said = run("--only", "killed", "--held", "6", "--ttl", "2", "--json", str(tmp_path / "rows.json"))
    rows: dict[str, Any] = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert "6 sessions of a killed worker begun again, ttl 2 s" in rows, said
    assert rows["killed: sessions with an input lost or answered twice"]["reached"]
    assert code == int(not all(row["reached"] for row in rows.values())), said


@pytest.mark.wide
def test_an_interrupted_measurement_leaves_no_process(tmp_path: Path) -> None:
    command = [*WORK, "--only", "rolling", "--json", str(tmp_path / "rows.json")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        here = psutil.Process(process.pid)
        deadline = time.monotonic() + 60
        while len(children := here.children(recursive=True)) < 5:  # four workers and a server
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert "Traceback" not in said
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert json.loads((tmp_path / "rows.json").read_text()) == []


@pytest.mark.wide
def test_sections_that_are_not_known_or_lack_something_are_refused() -> None:
    for words, text in (
        (["--only", "quees"], "there are latency"),
        (["--only", "queues"], "pip install rq arq"),
        (["--only", "unhandled"], "needs --base"),
    ):
        code, said = run(*words)
        assert code == 2
        assert text in said
