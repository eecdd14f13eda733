"""The processes of the generator, led from one. Law: they all begin at one moment, and none outlives this one."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from deploy.load import generator
from deploy.load.client import Target
from deploy.load.generator import Phase, Setup
from deploy.load.measures import Part, Result, Timeline, combine
from deploy.load.verifying import Expected, Source

_READY_SECONDS = 120.0
_LEAD = 0.2


class Lost(RuntimeError):
    """A process of the generator ended before its time."""


class Crew:
    """So many processes, while the block runs."""

    def __init__(
        self, processes: int, run: str, targets: Sequence[Target], source: Source, *, subscribers: int = 10
    ) -> None:
        self.began = time.monotonic()
        self.timeline = Timeline()
        self.expected = dict[str, Expected]()
        self.complaints = list[str]()
        self.results: list[Result] = []  # so far, a phase that was ended early too
        self.answered = 0
        self._setups = [Setup(at, processes, run, list(targets), source, subscribers) for at in range(processes)]
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._phases = 0

    @property
    def processes(self) -> int:
        """How many there are."""
        return len(self._setups)

    def __enter__(self) -> Crew:
        context = multiprocessing.get_context("spawn")
        for setup in self._setups:
            ours, theirs = context.Pipe()
            process = context.Process(target=generator.main, args=(theirs, setup), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()

    def run(
        self, scenario: str, rate: float, seconds: float, *, patience: float = 30.0,
        begun: Callable[[float], None] = lambda at: None, shown: Callable[[float], None] = lambda at: None,
    ) -> Result:  # fmt: skip
        """One phase. `begun` is called with the moment it begins, `shown` now and then; Ctrl-C ends it early."""
        self._phases += 1
        phase = Phase(self._phases, scenario, rate, seconds, patience)
        self._send([phase] * len(self._pipes))
        self._collect("ready", _READY_SECONDS)
        begin = time.monotonic() + _LEAD
        self._send([begin] * len(self._pipes))
        begun(begin)
        try:
            done = self._collect("done", seconds + patience + 30, begin, shown)
        except KeyboardInterrupt:
            self._send(["stop"] * len(self._pipes))
            self._finish(phase, begin, self._collect("done", 10, begin))
            raise
        return self._finish(phase, begin, done)

    def _finish(self, phase: Phase, begin: float, done: list[Any]) -> Result:
        parts: list[Part] = []
        last = begin
        for _, part, expected, complaints, at in done:
            parts.append(part)
            last = max(last, at)
            self.complaints += complaints
            for each in expected:
                if each.id in self.expected:
                    self.expected[each.id].merge(each)
                else:
                    self.expected[each.id] = each
        self.results.append(combine(phase.scenario, phase.rate, phase.seconds, parts, took=last - begin))
        return self.results[-1]

    def verify(self) -> list[str]:
        """Read everything back; what is wrong."""
        everything = list(self.expected.values())
        self._send([everything[at :: len(self._pipes)] for at in range(len(self._pipes))])
        found = self._collect("verified", 600)
        return [*self.complaints, *(text for _, texts in found for text in texts)]

    def _send(self, words: Sequence[Any]) -> None:
        for pipe, word in zip(self._pipes, words, strict=True):
            try:
                pipe.send(word)
            except OSError as error:
                raise Lost("a process of the generator ended before its time") from error

    def _collect(
        self, kind: str, seconds: float, begin: float = 0.0, shown: Callable[[float], None] = lambda at: None
    ) -> list[Any]:
        deadline = time.monotonic() + seconds
        found = list[Any]()
        open_pipes: list[Any] = list(self._pipes)
        while open_pipes:
            if time.monotonic() > deadline:
                raise Lost(f"the generator did not say {kind!r} within {seconds:g} s")
            ready: list[Any] = wait(open_pipes, 0.25)
            for pipe in ready:
                try:
                    said = pipe.recv()
                except (EOFError, OSError) as error:
                    raise Lost("a process of the generator ended before its time") from error
                if said[0] == "progress":
                    self.answered += self.timeline.add(begin - self.began, said[1], said[2])
                elif said[0] == kind:
                    found.append(said)
                    open_pipes.remove(pipe)
            shown(time.monotonic() - begin)
        return found
