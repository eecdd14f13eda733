"""The main job: conversations served by several worker processes, some of which are killed in the middle of a turn."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from distributed_state import InvalidValue, StateError, StateStore
from distributed_state.programs.replay.coordinator import (
    BEFORE,
    COMMITTED,
    IDLE,
    REPLY_LOST,
    Ack,
    Conversation,
    Coordinator,
    Worker,
    WorkerDied,
    read_conversations,
)
from distributed_state.programs.replay.run import Plan, replay, show, verify

SAMPLE = read_conversations(None)
QUIET = Console(file=io.StringIO())


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "distributed_state", "replay", *words]


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.wide
def test_nothing_acknowledged_is_lost_when_workers_are_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        command(
            "--workers", "2", "--kill", "2", "--seed", "7", "--keep", str(tmp_path), "--json", f"{tmp_path}/r.json"
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each once, in order, equal to the input; versions dense" in " ".join(done.stdout.split())
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["verified"]
    assert report["failures"] == []
    kills = [kill for kill in report["kills"] if kill["where"] != IDLE]
    assert len(kills) >= 2
    assert report["workers"] >= 4, "every killed worker was replaced"
    for kill in kills:
        assert f"worker {kill['worker']} was killed in {kill['conversation']}, turn {kill['turn'] + 1}," in done.stdout
        assert (kill["successor"] is None) == (kill["where"] == COMMITTED)
    assert all(line == line.rstrip() for line in done.stdout.splitlines())
    assert done.stdout.isascii()
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert set(report["latencies"]) == {"begin", "read", "commit", "turn"}
    acks = [json.loads(line) for line in (tmp_path / "acknowledged.jsonl").read_text().splitlines()]
    assert len({(ack["conversation"], ack["turn"]) for ack in acks}) == len(acks)
    assert report["turns"] - len(acks) == sum(kill["where"] == REPLY_LOST for kill in kills)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.wide
@pytest.mark.parametrize("kills", [0, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("redis_url", ["redis", pytest.param("valkey", marks=pytest.mark.full)], indirect=True)
@pytest.mark.parametrize("archive_url", ["postgres", pytest.param("sqlite", marks=pytest.mark.full)], indirect=True)
def test_the_servers_that_are_named_are_used(redis_url: str, archive_url: str, namespace: str, kills: int) -> None:
    plan = Plan(SAMPLE[:8], url=redis_url, archive=archive_url, namespace=namespace, workers=2, kills=kills)
    report = replay(plan, QUIET)
    assert report.differences == []
    assert len(report.kills) >= kills
    with StateStore.open(redis_url, archive=archive_url, namespace=namespace) as store:
        assert len(store.session(SAMPLE[0].id).messages()) == len(SAMPLE[0].messages)
    with pytest.raises(InvalidValue, match=f"{namespace}.*name another"):
        replay(plan, QUIET)


@pytest.mark.wide
def test_without_servers_threads_do_it(tmp_path: Path) -> None:
    report = replay(Plan(SAMPLE, workers=3, in_process=True, keep=tmp_path), QUIET)
    assert (report.differences, report.kills, report.messages) == ([], [], 480)
    assert 0 < report.hot_hit_rate <= 1
    shown = Console(file=io.StringIO(), width=200)
    show(report, shown)
    assert "480 messages of 24 conversations" in shown.file.getvalue()  # type: ignore[attr-defined]  # a StringIO


@pytest.mark.wide
@pytest.mark.parametrize("redis_url", ["valkey"], indirect=True)
def test_what_should_not_be_there_is_found_and_named(redis_url: str, tmp_path: Path, namespace: str) -> None:
    """The negative control: a message that nobody acknowledged, a turn that never came, and the verdict turns."""
    archive = f"sqlite:///{tmp_path}/archive.db"
    replay(Plan(SAMPLE[:2], url=redis_url, archive=archive, namespace=namespace, workers=2), QUIET)
    with StateStore.open(redis_url, archive=archive, namespace=namespace) as store:
        assert verify(store, SAMPLE[:2], []) == []
        store.session(SAMPLE[0].id).append({"role": "user", "content": "stray"})
        found = verify(store, SAMPLE[:3], [Ack(SAMPLE[2].id, 0, 1, 0)])
    assert any(text.startswith(f"{SAMPLE[0].id}: ") and "messages instead of" in text for text in found)
    assert any(text.startswith(f"{SAMPLE[2].id}: 0 messages") for text in found)
    assert not any(text.startswith(f"{SAMPLE[1].id}: ") for text in found)


def in_process(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of the command."""
    from distributed_state.programs import cli

    monkeypatch.setattr(sys, "argv", ["distributed-state", "replay", *words])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ended.value.code if isinstance(ended.value.code, int) else 0


@pytest.mark.wide
def test_differences_are_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from distributed_state.programs.replay import run

    monkeypatch.setattr(run, "verify", lambda *_: [f"c{at}: [red] differs" for at in range(30)])
    assert in_process(monkeypatch, "--in-process") == 1
    out = capsys.readouterr().out
    assert "30 differences" in out
    assert "c19: [red] differs" in out
    assert "and 10 more" in out


def test_a_truncated_file_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cut.jsonl"
    whole = json.dumps({"id": "a", "messages": [{"role": "user", "content": "hi"}]})
    file.write_text(whole + "\n" + whole[:-10])
    code, seen = in_process(monkeypatch, str(file), "--keep", f"{tmp_path}/run"), capsys.readouterr()
    assert (code, seen.out) == (1, "")
    assert "line 2" in seen.err.replace("\n", " ")
    assert not (tmp_path / "run").exists()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.full)]
)
def test_interrupted_it_ends_its_workers_and_servers(tmp_path: Path, number: signal.Signals, code: int) -> None:
    acks = tmp_path / "acknowledged.jsonl"
    process = subprocess.Popen(
        command("--rounds", "50", "--workers", "2", "--keep", str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: acks.exists() and acks.stat().st_size)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert out == ""
    assert "Traceback" not in err
    assert psutil.wait_procs(children, timeout=5)[1] == []


class Crashing(Worker):
    """A worker that dies in every turn, and not by our hand."""

    async def start(self) -> None:
        pass

    async def serve(self, order: dict[str, Any], listen: Callable[[dict[str, Any]], None]) -> None:
        listen({"report": "begin"})
        raise WorkerDied("worker 7 ended with -11")

    def kill(self) -> None:
        pass

    async def stop(self, listen: Any) -> None:
        pass


class Quick(Crashing):
    """A worker whose turns are over before a kill in the middle of one can come."""

    async def serve(self, order: dict[str, Any], listen: Callable[[dict[str, Any]], None]) -> None:
        listen({"report": "begin"})
        if not self.killed:
            listen({"report": "ack", "version": order["turn"] + 1, "first": 0})
            listen({"report": "done", "seconds": {"turn": 0.0}})
            await asyncio.sleep(0)
        if self.killed:
            raise WorkerDied("killed")

    def kill(self) -> None:
        self.killed = True


async def test_workers_are_killed_as_often_as_asked_however_quick_they_are() -> None:
    coordinator = Coordinator(SAMPLE[:8], lambda _: Quick(), workers=3, kills=2, seed=1, log=io.StringIO())
    tally = await coordinator.run()
    assert tally.turns == coordinator.total
    assert len(tally.kills) >= 2


async def test_workers_that_die_by_themselves_end_the_replay() -> None:
    coordinator = Coordinator(SAMPLE, lambda _: Crashing(), workers=2, kills=0, seed=1, log=io.StringIO())
    with pytest.raises(StateError, match=r"failed 3 times: turn 0 of .*: worker 7 ended with -11"):
        await coordinator.run()


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 0},
        {"kills": -1},
        {"archive": "memory"},
        {"in_process": True, "kills": 1},
        {"in_process": True, "url": "x"},
    ],
)
def test_plans_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue):
        Plan(SAMPLE, **wrong)


def test_more_kills_than_turns_are_refused() -> None:
    tiny = [Conversation("c", ((SAMPLE[0].messages[0],),))]
    with pytest.raises(InvalidValue, match="1 turns are too few for 1 kills"):
        Coordinator(tiny, lambda _: Crashing(), workers=1, kills=1, seed=1, log=io.StringIO())


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_many_kills(redis_url: str, archive_url: str, namespace: str) -> None:
    conversations = [each.again(round) for round in range(1, 9) for each in SAMPLE]
    plan = Plan(conversations, url=redis_url, archive=archive_url, namespace=namespace, workers=6, kills=60)
    report = replay(plan, QUIET)
    assert report.differences == []
    assert {kill.where for kill in report.kills} >= {BEFORE, REPLY_LOST, COMMITTED}
