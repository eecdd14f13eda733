"""`python -m deploy.load.load`: its own fleet with a worker killed, and workers that lose what they acknowledged."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from below import ROOT

from deploy.load import baseline, fleet
from deploy.load import load as loading
from deploy.load.bare import bare_workers
from deploy.load.baseline import Commands, Trip
from deploy.load.crew import GENERATOR, Crew
from deploy.load.faults import Broke
from deploy.load.reporting import Figure
from distributed_state import StateError
from distributed_state.programs.servers import redis_server, wait_until


def command(*words: str) -> tuple[list[str], dict[str, str]]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return [sys.executable, "-m", "deploy.load.load", *words], os.environ | {"PYTHONPATH": path, "COLUMNS": "200"}


def load(*words: str) -> tuple[int, str]:
    """Its exit code and what it said."""
    line, environment = command(*words)
    done = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.wide
def test_a_fleet_of_its_own_loses_nothing_when_a_worker_is_killed(tmp_path: Path) -> None:
    words = (
        "--local",
        "--seconds",
        "4",
        "--rate",
        "15",
        "--processes",
        "1",
        "--fault",
        "kill-worker@1",
        "--max-recovery",
        "60",
    )
    code, said = load(*words, "--out", str(tmp_path))
    assert code == 0, said
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert report["results"][0]["answered"] == 60
    assert sum(result["answered"] for result in report["results"]) == report["acknowledged"]
    assert [broke["kind"] for broke in report["broke"]] == ["kill-worker"]
    assert report["recoveries"][0] is not None
    assert "histories from SQL: every one is there once" in report["verified"]
    assert {"latency.png", "timeline.png"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.wide
def test_inputs_are_answered_once_although_those_who_answer_are_killed() -> None:
    words = ("--local", "--scenario", "inbox", "--rate", "10", "--processes", "1", "--seconds", "8")
    code, said = load(*words, "--fault", "kill-handler@1", "--fault", "kill-handler@3", "--max-recovery", "60")
    assert code == 0, said
    assert "80 turns acknowledged" in said
    assert "every one is there once" in said


def test_handlers_are_needed_by_what_uses_them() -> None:
    for words in (("--url", "http://127.0.0.1:1", "--scenario", "inbox"), ("--local", "--fault", "kill-handler")):
        code, said = load(*words)
        assert code == 2
        assert "handler" in said


ROLLING = ("--local", "--balanced", "--attempts", "1", "--rate", "30", "--processes", "1", "--no-verify")


@pytest.mark.full
def test_a_graceful_roll_fails_no_request_that_is_sent_once() -> None:
    code, said = load(*ROLLING, "--seconds", "8", "--fault", "roll@1", "--verify")
    assert code == 0, said
    assert "answers that were not the ones hoped for" not in said, "none was repeated, refused or sent elsewhere"
    assert int(re.findall(r"(\d+) turns acknowledged", said)[0]) >= 240
    assert "every one is there once" in said


@pytest.mark.full
@pytest.mark.parametrize("broken", [
    pytest.param(("--fault=kill-worker@1", "--fault=kill-worker@2", "--fault=kill-worker@3"), id="killed"),
    pytest.param(("--fault=roll@1", "--fault=roll@2", "--notice=0"), id="without notice"),
])  # fmt: skip
def test_workers_that_end_without_a_drain_fail_requests_that_are_sent_once(broken: tuple[str, ...]) -> None:
    """The negative control. When the client repeats, or goes to another worker that accepts, it fails none either."""
    code, said = load(*ROLLING, "--seconds", "8", *broken)
    assert code == 1, said
    assert "given up: ConnectionRefusedError" in said or "given up: Broken" in said


class Forgetful(BaseHTTPRequestHandler):
    """A worker that keeps what it is told in memory, but for the turn that it is to lose or to write twice."""

    protocol_version = "HTTP/1.1"
    kept: dict[str, list[Any]]
    times: dict[int, int]
    turns = 0
    lock = threading.Lock()

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            if self.path == "/v1/conversations":
                id = given.get("id") or f"of-the-worker-{len(self.kept)}"
                self.kept[id] = []
                return self._answer(201, {"id": id, "version": 1})
            cls = type(self)
            cls.turns += 1
            id = self.path.split("/")[3]
            self.kept[id] += given["messages"] * self.times.get(cls.turns, 1)
            return self._answer(200, {"version": cls.turns + 1, "repeated": False, "outcome": None})

    def do_GET(self) -> None:
        self._answer(200, {"messages": self.kept[self.path.split("/")[3].split("?")[0]]})

    def _answer(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *words: Any) -> None:
        pass


@contextmanager
def forgetful(times: dict[int, int]) -> Iterator[str]:
    class Worker(Forgetful):
        kept: dict[str, list[Any]] = {}  # noqa: RUF012 - one for each server

    Worker.times = times
    with ThreadingHTTPServer(("127.0.0.1", 0), Worker) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


SHORT = ("--seconds", "1", "--rate", "40", "--processes", "1")


@pytest.mark.wide
def test_what_is_there_once_passes() -> None:
    with forgetful({}) as url:
        code, output = load("--url", url, *SHORT)
    assert code == 0, output
    assert "every one is there once" in output


@pytest.mark.wide
def test_a_lost_and_a_doubled_turn_are_found() -> None:
    with forgetful({3: 0, 9: 2}) as url:
        code, output = load("--url", url, *SHORT)
    assert code == 1, output
    assert "is lost" in output
    assert "is there more than once" in output


@pytest.mark.wide
def test_a_missed_threshold_and_a_fleet_that_is_not_there_fail() -> None:
    with forgetful({}) as url:
        code, output = load("--url", url, *SHORT, "--max-p99", "0.000001")
    assert code == 1
    assert "is more than 1e-06 s" in output
    code, output = load("--url", url, *SHORT)
    assert (code, output) == (2, f"nobody listens at {url}\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code, output = load("--url", f"127.0.0.1:{silent.getsockname()[1]}", *SHORT, "--retry-for", "0.2")
    assert code == 1
    assert "100.00% failed" in output


@pytest.mark.wide
def test_an_interrupted_run_tells_what_it_measured() -> None:
    with forgetful({}) as url:
        line, environment = command("--url", url, "--seconds", "60", "--rate", "40", "--processes", "1")
        process = subprocess.Popen(line, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        deadline = threading.Event()
        while not Forgetful.__subclasses__()[-1].turns:
            assert not deadline.wait(0.01)
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in output
    assert "not verified" in output
    assert "chat" in output
    assert "passed" not in output, "what was not read back has not passed"


@pytest.mark.wide
def test_a_run_that_is_interrupted_while_it_is_prepared_ends_in_order() -> None:
    """Of a phase that has not begun there is nothing to tell."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        line, environment = command("--url", url, "--scenario", "reads", "--processes", "1")
        process = subprocess.Popen(
            line, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        silent.accept()[0].close()  # who looks whether anybody listens
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "interrupted" in output


@pytest.mark.wide
def test_a_run_that_is_killed_leaves_nobody() -> None:
    """Neither workers nor the archiver, who would try to reach their servers for ever; no files either."""
    line, environment = command("--local", "--seconds", "60", "--rate", "20", "--processes", "1")
    with subprocess.Popen(line, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        began: list[int] = []
        while len(began) < 3:  # two workers and an archiver
            assert time.monotonic() < deadline
            time.sleep(0.05)
            began = [pid for word in ("\0serve\0", "\0archiver") for pid in fleet._family(process.pid, word)[1:]]
        folder = next(Path(f"/proc/{pid}/fd/1").readlink().parent for pid in began)
        process.kill()
        process.wait()
    left = [folder, *(Path(f"/proc/{pid}") for pid in began)]
    wait_until(lambda: not any(each.exists() for each in left), "to be gone")


@pytest.mark.wide
def test_a_report_that_cannot_be_written_is_shown_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "report.json").symlink_to("/dev/full")
    with forgetful({}) as url:
        code, output = load("--url", url, *SHORT, "--out", str(tmp_path))
    assert code == 1, output
    assert "no report is written" in output
    assert "every one is there once" in output


MESSAGES = [{"role": "user", "content": "hi"}]


def test_what_a_turn_asks_of_redis_can_be_watched_as_often_as_it_is_asked_for() -> None:
    """Once before the knee is looked for, and once for the figures after it."""
    with redis_server() as server:
        found = [baseline.commands(server.url, MESSAGES) for _ in range(3)]
    counts = [each.count for each in found]
    assert min(counts) > 5
    assert max(counts) < 2 * min(counts), "beside the turn's own there is what goes on in the background"


def test_in_one_namespace_the_second_look_would_see_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "time", SimpleNamespace(time_ns=lambda: 1, monotonic_ns=time.monotonic_ns))
    with redis_server() as server:
        first = baseline.commands(server.url, MESSAGES)
        try:
            again = baseline.commands(server.url, MESSAGES).count
        except (StateError, IndexError):
            return
    assert again != first.count


def test_the_cpu_of_the_generator_is_that_of_its_processes() -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("this system does not tell what its processes use")
    with Crew(2, "r", [], []) as crew, multiprocessing.get_context("spawn").Pool(1):
        theirs = {worker.pid for worker in crew._workers}
        assert set(fleet._family(os.getpid(), GENERATOR)) == {os.getpid(), *theirs}
        used = lambda: sum(map(fleet._cpu, theirs))  # noqa: E731 - said in one word
        deadline = time.monotonic() + 60
        while not used():  # what they import takes more than the kernel's least, a hundredth of a second
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.wide
def test_a_bare_worker_that_dies_is_no_comparison() -> None:
    """The others carry less than all of them would, and ours would look better beside that."""
    trip = Trip(1, (b"1",), "redis.call('XADD', KEYS[1], '*', 'd', ARGV[1])\nreturn 'ok'")
    with redis_server() as server:
        with bare_workers(server.url, 2, Commands([trip], [trip])) as urls:
            assert len(urls) == 2
            begun = multiprocessing.active_children()
        assert not any(process.is_alive() for process in begun)
        with pytest.raises(RuntimeError, match="died"), bare_workers(server.url, 1, Commands([trip], [trip])):
            worker = multiprocessing.active_children()[0]
            worker.kill()
            worker.join()


def test_a_run_that_fails_behind_a_fault_tells_what_it_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(run: Any, *_: Any) -> None:
        run.report.broke.append(Broke("kill-worker", 1.0, 2.0))
        raise RuntimeError("a worker does not come back")

    monkeypatch.setattr(loading.Run, "load", failing)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with forgetful({}) as url, pytest.raises(typer.Exit) as ended:
            loading.main(url=[url], seconds=1.0, processes=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.exit_code == 1
    output = capsys.readouterr().out
    assert "a worker does not come back" in output
    assert "first success" in output


@pytest.mark.parametrize(("reached", "code"), [(True, 0), (None, 0), (False, 1)])
def test_a_missed_goal_fails_a_run_that_lost_nothing(
    reached: bool | None, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_one = loading.Run.load

    def measured(run: Any, *given: Any) -> None:
        load_one(run, *given)
        run.report.figures.append(Figure("the knee", "550/s, 55%", goal=">= 90%", reached=reached))

    monkeypatch.setattr(loading.Run, "load", measured)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with forgetful({}) as url, pytest.raises(typer.Exit) as ended:
            loading.main(url=[url], seconds=0.5, rate=20.0, processes=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.exit_code == code
    assert ("the knee: 550/s, 55%, not >= 90%" in capsys.readouterr().out) == (code == 1)
