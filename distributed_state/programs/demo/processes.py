"""The replicas of the demo as processes of this one. Law: whoever was started is gone when the block is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from distributed_state.errors import StateError
from distributed_state.programs.demo import notebook
from distributed_state.programs.worker_processes import Message, WorkerProcess

PROGRAM = (sys.executable, "-m", "distributed_state.programs.demo.replica")
_START_SECONDS = 30.0
_STOP_SECONDS = 20.0
Mailbox = SimpleQueue[tuple["Replica", int, Message | None]]


class Replica:
    """One replica: a process, and what it reported in all its lives."""

    def __init__(self, name: str, folder: Path, place: Mapping[str, Any], program: Sequence[str]) -> None:
        self.name = name
        self.notes = folder / f"{name}.jsonl"
        self.log = folder / f"{name}.log"
        self.reports: list[Message] = []
        self.exit_code: int | None = None
        self._place = place
        self._program = program
        self._process: WorkerProcess | None = None
        self._starts = 0

    @property
    def alive(self) -> bool:
        return self._process is not None

    @property
    def lives(self) -> int:
        return len(self.of(notebook.START))

    def of(self, kind: str) -> list[Message]:
        """What it reported of one kind."""
        return [each for each in self.reports if each["kind"] == kind]

    def start(self, mailbox: Mailbox) -> None:
        """Start it, or start it again; what it reports goes to the mailbox."""
        self._starts += 1
        started = self._starts
        self._process = WorkerProcess(self._program, lambda report: mailbox.put((self, started, report)), log=self.log)
        self.send(name=self.name, notebook=str(self.notes), store=dict(self._place))

    def send(self, **fields: Any) -> None:
        assert self._process is not None
        self._process.send(fields)

    def hear(self, started: int, report: Message | None) -> None:
        """Keep what came from the mailbox. Raises StateError if it ended on its own."""
        if report is not None:
            self.reports.append(report)
        elif self._process is not None and started == self._starts:
            said = self._process.complaint()
            self._process.wait(_STOP_SECONDS)  # so that its own exit code is reported, not that of a SIGKILL
            self.kill()
            raise StateError(f"{self.name} ended with {self.exit_code}: {said}")

    def kill(self) -> None:
        """End it with SIGKILL, as a crash would."""
        if self._process is not None:
            self.exit_code = self._process.end()
            self._process = None

    def ask_to_end(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def wait(self) -> None:
        """Wait until it has ended, in the time that it has for that."""
        if self._process is not None:
            self._process.wait(_STOP_SECONDS)
            self.kill()


class Fleet:
    """All replicas, and what they report."""

    def __init__(self, names: Sequence[str], folder: Path, place: Mapping[str, Any], program: Sequence[str]) -> None:
        self.replicas = {name: Replica(name, folder, place, program) for name in names}
        self._mailbox: Mailbox = SimpleQueue()
        self._orders = 0

    def __iter__(self) -> Iterator[Replica]:
        return iter(self.replicas.values())

    def start(self, *replicas: Replica) -> None:
        """Start these and wait until they listen."""
        lives = {each.name: each.lives for each in replicas}
        for each in replicas:
            each.start(self._mailbox)
        if not self.until(lambda: all(each.lives > lives[each.name] for each in replicas), _START_SECONDS):
            raise StateError(f"not all replicas were ready within {_START_SECONDS:g} s")

    def order(self, name: str, call: str, **arguments: Any) -> None:
        """Have a replica do something, and wait until it is done. Raises StateError with what it said."""
        self._orders += 1
        number = self._orders
        replica = self.replicas[name]
        replica.send(order=number, call=call, arguments=arguments)

        def answers() -> list[Message]:
            return [each for each in replica.reports if each.get("order") == number]

        if not self.until(lambda: bool(answers()), _START_SECONDS):
            raise StateError(f"{name} did not answer within {_START_SECONDS:g} s")
        if answers()[0]["kind"] == "failed":
            raise StateError(f"{name}: {answers()[0]['error']}")

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Take in what the replicas report until the condition holds; whether it did in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with suppress(Empty):
                replica, started, report = self._mailbox.get(timeout=min(left, 0.2))
                replica.hear(started, report)
        return True

    def end(self) -> None:
        """Let all end in the orderly way."""
        for each in self:
            each.ask_to_end()
        for each in self:
            each.wait()


@contextmanager
def fleet(names: Sequence[str], folder: Path, place: Mapping[str, Any], program: Sequence[str]) -> Iterator[Fleet]:
    """A fleet that is ended with the block, by SIGKILL if it did not end before."""
    them = Fleet(names, folder, place, program)
    try:
        yield them
    finally:
        for each in them:
            each.kill()
