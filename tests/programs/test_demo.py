"""The demo of the lifecycle: it runs for real, verifies what it shows, and leaves nothing behind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from distributed_state import StateStore
from distributed_state.programs.demo.lifecycle import Plan, Screen, lifecycle

FORGETFUL = Path(__file__).parent.parent / "faults" / "forgetful_replica.py"


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "distributed_state", "demo", "lifecycle", *words]


@pytest.mark.wide
def test_each_replica_sees_all_the_killed_one_too(tmp_path: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(command("--json", "--keep", str(tmp_path)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 60
    report = json.loads(done.stdout)
    assert report["verified"]
    assert report["differences"] == []
    assert len(report["steps"]) == 14
    types = Counter(event["type"] for event in report["events"])
    assert types.pop("replica.lost") >= 1
    assert types == {
        "conversation.created": 3,
        "conversation.cleared": 2,
        "conversation.switched": 2,
        "conversation.deleted": 2,
        "config.changed": 2,
    }
    lives = {each["name"]: (each["lives"], len(set(each["pids"])), each["exit_code"]) for each in report["replicas"]}
    assert lives == {"ada": (1, 1, 0), "ben": (1, 1, 0), "cleo": (2, 2, 0)}
    assert {each["received"] for each in report["replicas"]} == {len(report["events"])}
    assert [each["missed"] >= 5 for each in report["replicas"]] == [False, False, True]
    assert not [pid for each in report["replicas"] for pid in each["pids"] if psutil.pid_exists(pid)]
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    # What is kept can be looked at with the other commands.
    audit = ["--archive", f"sqlite:///{tmp_path}/archive.db", "--namespace", report["namespace"], "audit", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "distributed_state", *audit], capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == len(report["events"])


@pytest.mark.wide
@pytest.mark.parametrize("archive_url", ["postgres", pytest.param("sqlite", marks=pytest.mark.full)], indirect=True)
def test_servers_that_are_named_are_used_and_a_forgotten_event_is_found(
    servers: Any, archive_url: str, tmp_path: Path
) -> None:
    """The negative control: one replica leaves an event out of its notes, and the verdict turns."""
    url, shown = servers.redis("redis").url, Console(file=io.StringIO(), width=80)
    screen = Screen(shown)
    plan = Plan(url=url, archive=archive_url, keep=tmp_path, wait=2.0, program=(sys.executable, str(FORGETFUL)))
    report = lifecycle(plan, screen)
    screen.close(report)
    missed = [text for text in report.differences if "missed" in text]
    assert missed == [
        "ben: missed: conversation.cleared of session:food",
        "ben: missed: conversation.cleared of session:hotel",
    ]
    assert any("ben did not receive it" in text for text in report.differences)
    text = shown.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert max(map(len, text.splitlines())) <= 80
    assert "NOT VERIFIED" in text
    with StateStore.open(url, archive=archive_url, namespace=report.namespace, archiver=False) as store:
        assert len(store.admin.audit()) == len(report.events)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.full)]
)
def test_interrupted_it_ends_its_replicas_and_servers(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        command("--pause", "30", "--keep", str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    while "creates the conversation" not in process.stdout.readline():
        assert process.poll() is None
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 4
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert psutil.wait_procs(children, timeout=5)[1] == []
