"""Workers that serve turns: processes that may be killed, or threads of this process.

Law: a worker either finishes a turn or is gone; WorkerDied says so, and nobody waits for the dead.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from distributed_state import StateError, StateStore
from distributed_state.programs.replay.worker import hot_figures, serve_turn
from distributed_state.programs.worker_processes import WorkerProcess

PROGRAM = (sys.executable, "-m", "distributed_state.programs.replay.worker")
Listen = Callable[[dict[str, Any]], None]
_START_SECONDS = 60.0
_TURN_SECONDS = 120.0
_STOP_SECONDS = 10.0
log = logging.getLogger(__name__)


class WorkerDied(Exception):
    """The worker ended in the middle of a turn."""


class Worker(ABC):
    """Serves one turn at a time."""

    killed = False

    @abstractmethod
    async def start(self) -> None:
        """Be ready for turns. Raises StateError saying why not."""

    @abstractmethod
    async def serve(self, order: dict[str, Any], listen: Listen) -> None:
        """Have one turn served; reports go to `listen`. Raises WorkerDied."""

    @abstractmethod
    def kill(self) -> None:
        """End it with SIGKILL, wherever it is."""

    @abstractmethod
    async def stop(self, listen: Listen | None) -> None:
        """End it: at once, or, for one who listens, after it said its last words and closed its store."""


class ProcessWorker(Worker):
    """A process of its own, as it would run on another machine."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        self._settings = settings
        self._log = log
        self._process: WorkerProcess | None = None
        self._reports: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()

        def listen(report: dict[str, Any] | None) -> None:
            loop.call_soon_threadsafe(self._reports.put_nowait, report)

        self._process = WorkerProcess(PROGRAM, listen, log=self._log)
        self._process.send(self._settings)
        try:
            await self._receive(self._process, _START_SECONDS)
        except WorkerDied as error:
            raise StateError(f"{error} before it was ready: {self._process.complaint()}") from error

    async def serve(self, order: dict[str, Any], listen: Listen) -> None:
        assert self._process is not None
        self._process.send(order)
        while True:
            report = await self._receive(self._process, _TURN_SECONDS)
            listen(report)
            if report["report"] in ("done", "failed"):
                return

    def kill(self) -> None:
        if self._process is not None and self._process.running:
            self.killed = True
            self._process.kill()

    async def stop(self, listen: Listen | None) -> None:
        if self._process is None:
            return
        self._process.close()
        try:
            if listen is not None:
                listen(await self._receive(self._process, _STOP_SECONDS))
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._reports.get()  # it has closed its store
                self._process.wait(_STOP_SECONDS)
        except (TimeoutError, WorkerDied):
            log.warning("worker %d had to be ended", self._process.pid)
        finally:
            self._process.end()

    async def _receive(self, process: WorkerProcess, seconds: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds):
                report = await self._reports.get()
        except TimeoutError as error:
            self.kill()
            raise WorkerDied(f"worker {process.pid} was silent for {seconds:g} s") from error
        if report is None:
            raise WorkerDied(f"worker {process.pid} ended with {process.wait(_STOP_SECONDS)}")
        return report


class ThreadWorker(Worker):
    """A thread on the store of this process; it cannot be killed."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "replay-worker")

    async def start(self) -> None:
        pass  # the store is open already

    async def serve(self, order: dict[str, Any], listen: Listen) -> None:
        loop = asyncio.get_running_loop()

        def report(fields: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(listen, fields)

        await loop.run_in_executor(self._thread, serve_turn, self._store, order, report)

    def kill(self) -> None:
        raise StateError("a thread cannot be killed")

    async def stop(self, listen: Listen | None) -> None:
        if listen is not None:
            listen({"report": "bye", "hot": hot_figures(self._store)})
        self._thread.shutdown(wait=False)
