"""The processes of a cell and all that they said. Law: whoever was started here is gone when the block is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from deploy.load.matrix.histories import Read, Write
from distributed_state.programs.worker_processes import Message, WorkerProcess

_PROGRAM = (sys.executable, "-m", "deploy.load.matrix.workload")
_READY = 60.0
_STOPPED = 30.0
_LEAVES = 15.0


class Interrupted(Exception):
    """The run is to end."""


@dataclass(slots=True)
class Said:
    """All that was said, by all processes."""

    writes: list[Write] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    emitted: list[str] = field(default_factory=list)
    heard: dict[str, list[Message]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    unread: int = 0


class Worker:
    """One process."""

    def __init__(self, workers: Workers, name: str, plan: Message) -> None:
        self.name = name
        self.plan = plan
        self.ready = self.stopped = self.gone = False
        self.levels: list[str] = []
        self.log = workers.folder / f"{name}.log"
        self._workers = workers
        self.process = WorkerProcess(_PROGRAM, self._listen, log=self.log)
        self.process.send(plan)

    def _listen(self, said: Message | None) -> None:
        self._workers.hear(self, said)


class Workers:
    """Writers w0 (blocking) and w1 (asyncio), a reader r0 and a listener l0."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        levels: Sequence[str],
        *,
        records: int,
        tasks: int,
        stop: threading.Event,
        clock: Path,
    ) -> None:
        self.folder = folder
        self.said = Said()
        self.dead: set[str] = set()
        self.paused: set[str] = set()
        self._mutex = threading.Lock()
        self._stop = stop
        self._levels = list(levels)
        self._shared: Message = {"settings": settings, "levels": self._levels, "clock": str(clock)}
        self._shared |= {"records": records, "tasks": tasks}
        self._workers: dict[str, Worker] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers.values():
            worker.process.close()
        deadline = time.monotonic() + (_LEAVES if kind is None else 0.0)
        for worker in self._workers.values():
            worker.process.wait(max(0.0, deadline - time.monotonic()))
            worker.process.end()

    def start(self) -> None:
        """Start all four, and wait until they have opened their stores."""
        # The listener first: what is published before it listens, it need not hear.
        listener = self._add("l0", role="listen", api="blocking", levels=["memory"])
        self.until(lambda: listener.ready, _READY, "the listener did not open")
        self._add("w0", role="write", api="blocking")
        self._add("w1", role="write", api="asyncio")
        self._add("r0", role="read", api="blocking")
        self.until(lambda: all(each.ready for each in self._workers.values()), _READY, "the workers did not open")

    def kill(self, name: str) -> None:
        """SIGKILL; one that is new takes its place, under another name."""
        worker = self._workers[name]
        self.dead.add(name)
        worker.process.kill()
        self.until(lambda: worker.gone, 10.0, f"{name} did not die")
        heir = self._add(f"{name}'", role=worker.plan["role"], api=worker.plan["api"])
        self.until(lambda: heir.ready, _READY, f"{heir.name} did not open")

    def pause(self, name: str) -> None:
        """SIGSTOP."""
        self.paused.add(name)
        os.kill(self._workers[name].process.pid, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """SIGCONT."""
        os.kill(self._workers[name].process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """No more writes and reads; the stores stay open."""
        for worker in self._workers.values():
            worker.process.send({"order": "stop"})
        self.until(lambda: all(each.stopped or each.gone for each in self._workers.values()), _STOPPED, "no stop")

    def levels(self) -> list[str]:
        """Those that all writers could open."""
        return [level for level in self._levels if level not in self.said.refused]

    def acknowledged_since(self, level: str, moment: float) -> bool:
        """Whether a write that was begun later than this was acknowledged."""
        with self._mutex:
            return any(
                each.version and each.level == level and each.start > moment for each in reversed(self.said.writes)
            )

    def until(self, condition: Callable[[], bool], seconds: float, missing: str = "") -> bool:
        """Wait for something; whether it came. Raises TimeoutError if it is to be `missing`, Interrupted at Ctrl-C."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self._stop.wait(0.02):
                raise Interrupted
            if gone := [each for each in self._workers.values() if each.gone and each.name not in self.dead]:
                raise RuntimeError(f"{gone[0].name} ended: {gone[0].process.complaint()}")
            if time.monotonic() > deadline:
                if missing:
                    raise TimeoutError(f"{missing} within {seconds:g} s")
                return False
        return True

    def rest(self, seconds: float) -> None:
        """Let them work for so long."""
        self.until(lambda: False, seconds)

    def logs(self) -> str:
        """What all of them logged."""
        return "\n".join(each.log.read_text(errors="replace") for each in self._workers.values() if each.log.exists())

    def hear(self, worker: Worker, said: Message | None) -> None:
        """Take in what a process said, None at its end."""
        if said is None:
            worker.gone = True
            return
        kind = said.pop("say")
        with self._mutex:
            if kind == "write":
                self.said.writes.append(Write(writer=worker.name, **said))
            elif kind == "read":
                self.said.reads.append(Read(reader=worker.name, **said))
            elif kind == "heard":
                self.said.heard.setdefault(worker.name, []).append(said)
            elif kind == "emitted":
                self.said.emitted.append(said["id"])
            elif kind == "refused":
                self.said.refused[said["level"]] = said["why"]
            elif kind == "unread":
                self.said.unread += 1
        if kind == "ready":
            worker.levels = said["levels"]
        # A listener is ready when it listens: what is written before, it would not hear.
        worker.ready = worker.ready or kind == ("listening" if worker.plan["role"] == "listen" else "ready")
        worker.stopped = worker.stopped or kind == "stopped"

    def _add(self, name: str, **plan: Any) -> Worker:
        worker = Worker(self, name, self._shared | {"name": name} | plan)
        self._workers[name] = worker
        return worker
