"""`deploy/roll.py`, with a docker on PATH whose containers are objects of the test, or real workers under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingUnixStreamServer
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from below import ROOT

from deploy.load.client import Client, Target
from deploy.load.fleet import Child, LocalFleet, LocalWorker, local_fleet
from distributed_state.programs.servers import free_port, wait_until, working_folder

# Few imports, because each command of docker starts it.
DOCKER = f"""#!{sys.executable} -SEs
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as engine:
    engine.connect(os.path.dirname(__file__) + "/engine")
    engine.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
    code, out, err = json.load(engine.makefile())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


class Container:
    """A worker that is ready at once, or never."""

    def __init__(self, name: str, *, ready: bool = True, ends_with: int = 0) -> None:
        self.name = name
        self.code: int | None = None  # None while it runs
        self._ready, self._ends_with = ready, ends_with

    def ready(self) -> bool:
        return self._ready and self.code is None

    def stop(self) -> None:
        self.code = self._ends_with

    def log(self) -> str:
        return "waiting: redis://valky:6379: Name or service not known"


class Engine:
    """Answers the commands of docker that roll.py runs, as Docker does."""

    def __init__(self, old: int, make: Callable[[str], Any] = Container) -> None:
        self.make = make
        self.workers: dict[str, Any] = {name: make(name) for name in (f"old-{n}" for n in range(old))}
        self.stopped: list[str] = []
        self.comes_up = True  # or `up` fails
        self.least = old  # the fewest that were ready at a time
        self.pauses_at = ""  # up or stop, which then waits
        self.reached, self.go_on = threading.Event(), threading.Event()

    @property
    def running(self) -> list[str]:
        return [name for name, each in self.workers.items() if each.code is None]

    def run(self, words: list[str]) -> tuple[int, str, str]:
        """Its exit code, and what it writes."""
        match words:
            case ["compose", "rm", "--force", "worker"]:
                self.workers = {name: self.workers[name] for name in self.running}
            case ["compose", "ps", "--quiet", "worker"]:
                return 0, "".join(f"id-{name}\n" for name in self.running), ""
            case ["compose", "up", "-d", "--no-deps", "--no-recreate", "--scale", scale, "worker"]:
                self._pause("up")
                if not self.comes_up:
                    return 1, "", "all ports are allocated\n"
                self._up(int(scale.removeprefix("worker=")))
            case ["inspect", "--format", "{{.Name}}", *ids]:
                return 0, "".join(f"/{each.removeprefix('id-')}\n" for each in ids), ""
            case ["exec", name, "python", "-c", code] if "9464/readyz'" in code:
                return int(not self.workers[name].ready()), "", ""
            case ["logs", "--tail", "10", name]:
                return 0, "", self.workers[name].log()
            case ["stop", *names]:
                self._pause("stop")
                for name in names:
                    self.workers[name].stop()
                    self.stopped.append(name)
                    self.least = min(self.least, sum(each.ready() for each in list(self.workers.values())))
            case ["wait", name]:
                return 0, f"{self.workers[name].code}\n", ""
            case _:
                return 125, "", f"unknown: {words}\n"
        return 0, "", ""

    def _pause(self, command: str) -> None:
        if command == self.pauses_at:
            self.reached.set()
            assert self.go_on.wait(30)

    def _up(self, wanted: int) -> None:
        for each in self.workers.values():
            each.code = None  # compose starts those that exited, and counts them
        for number in range(wanted - len(self.workers)):
            self.workers[f"new-{number}"] = self.make(f"new-{number}")


@contextmanager
def docker(engine: Engine) -> Iterator[dict[str, str]]:
    """The environment in which `docker` is this engine."""

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(json.dumps(engine.run(json.loads(self.rfile.readline()))).encode())

    with TemporaryDirectory() as name, ThreadingUnixStreamServer(f"{name}/engine", Handler) as server:
        program = Path(name, "docker")
        program.write_text(DOCKER)
        program.chmod(0o755)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield {"PATH": f"{name}:{os.environ['PATH']}"}
        finally:
            server.shutdown()
            thread.join()


def roll(engine: Engine, *words: str) -> tuple[int, str]:
    """Its exit code and what it said."""
    with docker(engine) as environment:
        command = [sys.executable, str(ROOT / "deploy/roll.py"), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("count", [1, 4, 9])
def test_old_workers_are_stopped_one_at_a_time_once_as_many_new_ones_are_ready(count: int) -> None:
    engine = Engine(count)
    code, said = roll(engine)
    assert code == 0, said
    assert engine.stopped == [f"old-{n}" for n in range(count)]
    assert engine.running == [*engine.workers] == [f"new-{n}" for n in range(count)]
    assert engine.least == count
    assert f"running: {count}; starting as many new workers" in said
    assert f"done: {count} old workers are replaced" in said


def test_without_workers_there_is_nothing_to_replace() -> None:
    engine = Engine(0)
    code, said = roll(engine)
    assert code == 1
    assert not engine.workers
    assert "no worker runs here. To start some: docker compose up --wait --scale worker=4" in said


@pytest.mark.parametrize("count", [1, 4])
def test_a_new_worker_that_does_not_get_ready_is_named_and_the_old_ones_continue(count: int) -> None:
    engine = Engine(count)
    engine.make = lambda name: Container(name, ready=name != f"new-{count - 1}")
    code, said = roll(engine, "--within", "0.1")
    assert code == 1
    assert engine.running == [*engine.workers] == [f"old-{n}" for n in range(count)]
    assert engine.stopped == [f"new-{n}" for n in range(count)], "those that were ready may have served: they drain"
    assert f"new-{count - 1} is not ready after 0.1 s; its last lines:\nwaiting: redis://valky:6379" in said
    assert "refused: the new workers were removed, the old ones continue" in said


@pytest.mark.parametrize("fails", [True, False])
def test_if_nothing_new_comes_up_the_old_ones_continue(fails: bool) -> None:
    engine = Engine(2)
    if fails:
        engine.comes_up = False
    else:
        engine._up = lambda wanted: None  # type: ignore[method-assign]
    code, said = roll(engine)
    assert code == 1
    assert engine.running == ["old-0", "old-1"]
    assert not engine.stopped
    assert ("all ports are allocated" if fails else "0 of 2 new workers started") in said


def test_an_old_worker_that_has_exited_is_not_started_again() -> None:
    engine = Engine(3)
    engine.workers["old-1"].code = 137
    code, said = roll(engine)
    assert code == 0, said
    assert engine.stopped == ["old-0", "old-2"]
    assert engine.running == ["new-0", "new-1"]


def test_a_worker_that_was_killed_before_it_drained_is_named() -> None:
    engine = Engine(1, lambda name: Container(name, ends_with=137))
    code, said = roll(engine)
    assert code == 0
    assert "old-0 ended with exit code 137 instead of 0" in said


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("during", ["up", "stop"])
def test_an_interrupted_roll_leaves_as_many_workers_as_there_were(during: str, sent: int) -> None:
    """The command of docker at hand is not cancelled: the engine would carry out half of it later."""
    engine = Engine(3)
    engine.pauses_at = during
    with docker(engine) as environment:
        command = [sys.executable, str(ROOT / "deploy/roll.py")]
        rolling = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        assert engine.reached.wait(30)
        os.killpg(rolling.pid, sent)  # as a terminal does, to all of its foreground
        engine.go_on.set()
        _, said = rolling.communicate(timeout=60)
    assert rolling.returncode == 1
    assert "interrupted" in said
    assert engine.least == 3
    if during == "up":
        assert engine.running == ["old-0", "old-1", "old-2"]
    else:
        assert engine.running == ["old-1", "old-2", "new-0", "new-1", "new-2"]
        assert "To finish: docker stop old-1 old-2 && docker compose rm --force worker" in said


# Real workers


class Served(Child):
    """A worker of a local fleet as a container."""

    def __init__(self, port: int, fleet: LocalFleet, folder: Path) -> None:
        self.port = port
        self.code: int | None = None
        words = ["--namespace", fleet.namespace, "serve", "--port", str(port), "--tokens"]
        urls = {"DISTRIBUTED_STATE_URL": fleet.warm.url, "DISTRIBUTED_STATE_ARCHIVE": fleet.postgres.url}
        super().__init__(f"worker-{port}", words, urls, folder)

    ready = LocalWorker.ready

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.code = self.process.wait(30)


async def turns_while(rolling: asyncio.subprocess.Process, targets: list[Target], serving: int) -> int:
    """How many turns were acknowledged, each sent once to a worker that a balancer considers ready."""
    client = Client(targets, tries=1)
    balancing = asyncio.create_task(client.balance())
    while len(client._out) != len(targets) - serving:
        await asyncio.sleep(0.02)
    status, _ = await client.request("POST", "/v1/conversations", {"id": "rolled"})
    assert status == 201
    acknowledged = 0
    while rolling.returncode is None:
        turn = {"messages": [{"role": "user", "content": str(acknowledged)}]}
        status, answer = await client.request("POST", "/v1/conversations/rolled/turns", turn)
        assert status == 200, answer
        acknowledged += 1
        await asyncio.sleep(0.01)
    _, found = await client.request("GET", "/v1/conversations/rolled")
    assert found["version"] == acknowledged + 1, "each is there, once"
    balancing.cancel()
    client.close()
    await asyncio.wait([balancing])
    return acknowledged


async def rolled(environment: dict[str, str], targets: list[Target], serving: int) -> int:
    rolling = await asyncio.create_subprocess_exec(sys.executable, str(ROOT / "deploy/roll.py"), env=environment)
    return await turns_while(rolling, targets, serving)


@pytest.mark.wide
@pytest.mark.parametrize("count", [1, 3])
def test_a_roll_under_load_fails_no_request_that_is_sent_once(count: int) -> None:
    ports = [free_port() for _ in range(2 * count)]
    free = iter(ports)
    with ExitStack() as stack:
        folder = stack.enter_context(working_folder(None))
        folder.chmod(0o755)  # PostgreSQL may run as another user
        fleet = stack.enter_context(local_fleet(0, folder, "rolled"))

        def make(name: str) -> Served:
            worker = Served(next(free), fleet, folder)
            stack.callback(worker.end, 0.0)
            return worker

        engine = Engine(count, make)
        old = list(engine.workers.values())
        for each in old:
            wait_until(each.ready, "a worker is not ready", 60)
        environment = stack.enter_context(docker(engine))
        turns = asyncio.run(rolled(environment, [("127.0.0.1", port) for port in ports], count))
        assert engine.stopped == [f"old-{n}" for n in range(count)]
        assert engine.running == [f"new-{n}" for n in range(count)]
        assert [each.code for each in old] == [0] * count
        assert turns > 50
