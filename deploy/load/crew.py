"""The processes of the generator, led from one. Law: they all begin at one moment, and none outlives this one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType

from deploy.load.client import Target
from deploy.load.generator import Phase, Setup
from deploy.load.measures import Part, Result, Timeline, combine
from deploy.load.verifying import Difference, Expected, Source
from distributed_state.programs.worker_processes import Message, WorkerProcess

GENERATOR = "deploy.load.generator"
PROGRAM = (sys.executable, "-m", GENERATOR)
_READY_SECONDS = 120.0
_LEAD = 0.2


class Lost(RuntimeError):
    """A process of the generator ended before its time."""


class Crew:
    """So many processes, while the block runs."""

    def __init__(
        self,
        processes: int,
        run: str,
        targets: Sequence[Target],
        source: Source,
        *,
        subscribers: int = 10,
        balanced: bool = False,
        attempts: int | None = None,
    ) -> None:
        self.began = time.monotonic()
        self.timeline = Timeline()
        self.expected = dict[str, Expected]()
        self.complaints = list[str]()
        self.results: list[Result] = []  # so far, a phase that was ended early too
        self.answered = 0
        self._setups = [
            Setup(at, processes, run, list(targets), source, subscribers, balanced, attempts) for at in range(processes)
        ]
        self._workers: list[WorkerProcess] = []
        self._mailbox: SimpleQueue[tuple[int, Message | None]] = SimpleQueue()
        self._phases = 0

    @property
    def processes(self) -> int:
        """How many there are."""
        return len(self._setups)

    def __enter__(self) -> Crew:
        for setup in self._setups:
            worker = WorkerProcess(PROGRAM, partial(self._listen, setup.process))
            self._workers.append(worker)
            worker.send(asdict(setup))
        return self

    def _listen(self, process: int, said: Message | None) -> None:
        self._mailbox.put((process, said))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.close()
        for worker in self._workers:
            worker.wait(2)
            worker.end()

    def run(
        self, scenario: str, rate: float, seconds: float, *, retry_for: float = 30.0,
        begun: Callable[[float], None] = lambda at: None, shown: Callable[[float], None] = lambda at: None,
    ) -> Result:  # fmt: skip
        """One phase. `begun` is called with the moment it begins, `shown` now and then; Ctrl-C ends it early."""
        self._phases += 1
        phase = Phase(self._phases, scenario, rate, seconds, retry_for)
        self._send({"order": "phase", "phase": asdict(phase)})
        self._collect("ready", _READY_SECONDS)
        begin = time.monotonic() + _LEAD
        self._send({"order": "begin", "at": begin})
        begun(begin)
        try:
            done = self._collect("done", seconds + retry_for + 30, begin, shown)
        except KeyboardInterrupt:
            self._send({"order": "stop"})
            self._finish(phase, begin, self._collect("done", 10, begin))
            raise
        return self._finish(phase, begin, done)

    def _finish(self, phase: Phase, begin: float, done: list[Message]) -> Result:
        parts: list[Part] = []
        last = begin
        for report in done:
            parts.append(Part(**report["part"]))
            last = max(last, report["last"])
            self.complaints += report["complaints"]
            for each in map(Expected.read, report["expected"]):
                if each.id in self.expected:
                    self.expected[each.id].merge(each)
                else:
                    self.expected[each.id] = each
        self.results.append(combine(phase.scenario, phase.rate, phase.seconds, parts, took=last - begin))
        return self.results[-1]

    def verify(self) -> list[Difference]:
        """Read everything back; what is wrong."""
        everything = [asdict(each) for each in self.expected.values()]
        for at, worker in enumerate(self._workers):
            worker.send({"order": "verify", "expected": everything[at :: len(self._workers)]})
        found = self._collect("verified", 600)
        read = (Difference(**each) for report in found for each in report["differences"])
        return [*map(Difference, self.complaints), *read]

    def _send(self, order: Message) -> None:
        for worker in self._workers:
            worker.send(order)

    def _collect(
        self, kind: str, seconds: float, begin: float = 0.0, shown: Callable[[float], None] = lambda at: None
    ) -> list[Message]:
        deadline = time.monotonic() + seconds
        found = list[Message]()
        while len(found) < len(self._workers):
            if time.monotonic() > deadline:
                raise Lost(f"the generator did not say {kind!r} within {seconds:g} s")
            with suppress(Empty):
                process, said = self._mailbox.get(timeout=0.25)
                if said is None:
                    self._mailbox.put((process, None))  # for whoever asks next
                    raise Lost("a process of the generator ended before its time")
                if said["report"] == "progress":
                    self.answered += self.timeline.add(begin - self.began, said["ends"], said["latencies"])
                elif said["report"] == kind:
                    found.append(said)
            shown(time.monotonic() - begin)
        return found
