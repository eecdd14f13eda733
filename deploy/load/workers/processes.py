"""Processes of `distributed-state work`, and what is found out about them from outside.

Law: a process has ended when its block ends, also if this process is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

from deploy.load.workers.handlers import BEGAN
from deploy.load.workers.job_queues import TEXT
from distributed_state import StateStore
from distributed_state.programs.servers import wait_until
from distributed_state.programs.servers.process import guard, unguard
from distributed_state.programs.worker_processes import WorkerProcess

OPENED = "deploy.load.workers.handlers:opened"
_ROOT = Path(__file__).parents[3]
PROCESSES = 2
SHARED_SECONDS = 6.0  # until workers that begin together share the partitions
_START, _STOP = 90.0, 40.0
_LOOK = 0.1  # seconds between two looks at what is left: each costs the server something
_WARM = 0.3  # of all jobs are done before their pace is measured: processes that start do not count


def said(text: str) -> dict[str, Any]:
    """An input."""
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class Place:
    """Where the stores of a run are, and how much is measured."""

    url: str
    folder: Path
    sessions: int = 4000
    wakes: int = 1_000_000
    held: int = 100
    rate: float = 50.0  # inputs a second while workers are restarted
    ttl: float = 5.0
    rounds: int = 3
    peers: Path | None = None  # an environment with RQ and arq
    base: Path | None = None  # a work tree of the commit to compare with
    callgrind: bool = False  # whether valgrind counts instructions, too
    show: Callable[[str], None] = field(default=print)  # progress

    def settings(self, namespace: str, *, archiver: bool = False) -> dict[str, Any]:
        """How to open a store. What is not archived costs nobody anything here."""
        archive = f"sqlite:///{self.folder}/work.db"
        return {"url": self.url, "archive": archive, "namespace": namespace, "archiver": archiver}

    def open(self, namespace: str, *, archiver: bool = False) -> StateStore:
        """A store of this process."""
        return StateStore.open(**self.settings(namespace, archiver=archiver))

    def workers(self, namespace: str, *words: str) -> Workers:
        """Processes on this namespace, none at first."""
        return Workers(self.settings(namespace), self.folder, *words)

    def client(self) -> redis.Redis:
        """Plain redis-py."""
        return redis.Redis.from_url(self.url)


class Worker:
    """One process."""

    def __init__(self, words: Iterable[str], environment: Mapping[str, str], log: Path) -> None:
        self._working = threading.Event()
        command = (sys.executable, "-m", "distributed_state", "work", OPENED, *words)
        self.process = WorkerProcess(command, self._receive, log=log, environment=environment)
        guard(self.process.pid)

    def _receive(self, line: dict[str, Any] | None) -> None:
        if line is not None and line["message"] == "working":
            self._working.set()

    def wait(self) -> None:
        """Until it works."""
        process = self.process
        wait_until(lambda: self._working.is_set() or not process.running, "a worker does not start", _START)
        if not process.running:
            raise RuntimeError(f"a worker ended with {process.exit_code}: {process.complaint()}")

    def stop(self) -> None:
        """End it in order."""
        self.process.terminate()
        code = self.process.wait(_STOP)
        self.end()
        if code != 0:
            raise RuntimeError(f"a worker ended with {code} when it was told to: {self.process.complaint()}")

    def end(self) -> None:
        """Kill it, unless it has ended."""
        self.process.end()
        unguard(self.process.pid)


class Workers:
    """Processes that work on one namespace, while the block runs."""

    def __init__(self, settings: Mapping[str, Any], folder: Path, *words: str) -> None:
        names = {f"DISTRIBUTED_STATE_{name.upper()}": str(value) for name, value in settings.items()}
        path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
        self._environment = os.environ | names | {"PYTHONPATH": path}
        self._log = folder / f"workers-{settings['namespace']}.log"
        self._words = words
        self._started: list[Worker] = []

    def begin(self, count: int = 1, *words: str) -> list[Worker]:
        """Start so many more, and return them."""
        made = []
        for _ in range(count):
            made.append(Worker((*self._words, *words), self._environment, self._log))
            self._started.append(made[-1])
        return made

    def start(self, count: int = 1, *words: str) -> list[Worker]:
        """Start so many more; return them when they work."""
        made = self.begin(count, *words)
        for each in made:
            each.wait()
        return made

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """None of them runs meanwhile: for a few seconds, or others take their partitions."""
        for each in self._started:
            os.kill(each.process.pid, signal.SIGSTOP)
        yield
        for each in self._started:
            os.kill(each.process.pid, signal.SIGCONT)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._started:
            each.end()


@dataclass(frozen=True, slots=True)
class Began:
    """An input that a handler began to serve: when, by time.time(), and in which process."""

    text: str
    at: float
    pid: int


def began(client: redis.Redis) -> list[Began]:
    """Those that were noted, in that order."""
    return [Began(*json.loads(each)) for each in client.lrange(BEGAN, 0, -1)]


def due(store: StateStore, client: redis.Redis, handler: str, *, after_ms: float = 0) -> int:
    """How many sessions of a handler are due, or will be: after a time by the server's clock, if one is given."""
    keys = store._core._lifecycle.context.keys
    pipe = client.pipeline(transaction=False)
    for partition in range(keys.partitions):
        pipe.zcount(keys.partition(partition).due_of(handler), after_ms, "+inf")
    return sum(pipe.execute())


def begun(store: StateStore, client: redis.Redis) -> bool:
    """Whether Redis has all partitions."""
    keys = store._core._lifecycle.context.keys
    metas = [keys.partition(partition).meta for partition in range(keys.partitions)]
    return int(client.exists(*metas)) == len(metas)


def served_pace(place: Place, namespace: str, handler: str, *, new: bool) -> float:
    """Sessions a second that two workers serve which share the partitions: an input each, of new or old sessions."""
    client = place.client()
    with place.open(namespace) as store, place.workers(namespace) as workers:
        workers.start(PROCESSES)
        time.sleep(SHARED_SECONDS)
        with workers.frozen():
            for number in range(place.sessions):
                session = store.session(f"s{number}")
                if not new:
                    session.set("n", 0)
                session.post(said(TEXT), handler=handler)
        return pace(lambda: due(store, client, handler), place.sessions)


def pace(left: Callable[[], int], count: int) -> float:
    """Jobs a second, once the processes have warmed up, until none of so many is left."""
    seen: list[tuple[int, float]] = []
    while there := left():
        if there <= count * (1 - _WARM):
            seen.append((there, time.perf_counter()))
        time.sleep(_LOOK)
    if len(seen) < 2:
        raise RuntimeError(f"{count} jobs are too few to measure their pace")
    return (seen[0][0] - seen[-1][0]) / (seen[-1][1] - seen[0][1])


def share(values: Iterable[float], part: float) -> float:
    """The value that this part of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]
