"""Fleets of workers that are killed: forked from one process, which imports a framework once.

Law: a worker says `ready`, and then a line for each thing acknowledged, in two words: where, and what.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Nursery:
    """The process that workers are forked from."""

    def __init__(self, script: str) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / script)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}, text=True
        )

    def worker(self, said: Path, **arguments: str) -> Worker:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"said": str(said), **arguments}) + "\n")
        self.process.stdin.flush()
        return Worker(said, int(self.process.stdout.readline()))

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass
class Worker:
    """One of them; what it says is in a file that outlives it."""

    said: Path
    process: int

    def lines(self) -> list[str]:
        """What it said, without the line that it was at when it was killed."""
        return self.said.read_text().rpartition("\n")[0].splitlines() if self.said.exists() else []

    def busy(self) -> bool:
        """Whether it has acknowledged a few things."""
        return len(self.lines()) > 5

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)


def fleet(script: str, kind: str, opener: Any, folder: Path, kills: int) -> list[tuple[str, str]]:
    """Four workers, of which one after the other is killed and replaced; what they had acknowledged."""
    every: list[Worker] = []
    given = {"kind": kind, "url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    with Nursery(script) as nursery:

        def start() -> Worker:
            me = f"w{len(every)}"
            every.append(nursery.worker(folder / f"{kind}-{me}", me=me, **given))
            return every[-1]

        living = [start() for _ in range(4)]
        try:
            for _ in range(kills):
                victim = random.randrange(4)
                wait_for(living[victim].busy)
                time.sleep(random.random() * 0.01)  # somewhere in a turn
                living[victim].kill()
                living[victim] = start()
            for worker in living:
                wait_for(worker.busy)
        finally:
            for each in living:
                each.kill()
    said = [line for each in every for line in each.lines() if line != "ready"]
    return [tuple(line.split(" ")) for line in said]  # type: ignore[misc] # a session and a text


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# In the process that they are forked from


def say(text: str) -> None:
    """Say a line to the test."""
    print(text, flush=True)  # noqa: T201 - that is what it is for


def serve(main: Callable[..., Coroutine[Any, Any, None]]) -> None:
    """Fork a worker for each line of stdin, and say its process id."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        say(str(_begin(main, **json.loads(line))))


def _begin(main: Callable[..., Coroutine[Any, Any, None]], said: str, **arguments: str) -> int:
    child = os.fork()
    if child:
        return child
    random.seed()  # not as its siblings do
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    try:
        asyncio.run(main(**arguments))
    finally:
        os._exit(1)  # none ends but by being killed
