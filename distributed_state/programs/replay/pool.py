"""Workers that serve turns: processes that may be killed, or threads of this process.

Law: a worker either finishes a turn or is gone; WorkerDied says so, and nobody waits for the dead.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from distributed_state import StateError, StateStore
from distributed_state.programs.replay.worker import hot_figures, serve_turn

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
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = [sys.executable, "-m", "distributed_state.programs.replay.worker"]
        pipe = asyncio.subprocess.PIPE
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=log)
        self._send(self._settings)
        try:
            await self._receive(_START_SECONDS)
        except WorkerDied as error:
            said = self._log.read_text(errors="replace").strip()[-2000:]
            raise StateError(f"{error} before it was ready: {said or 'it said nothing'}") from error

    async def serve(self, order: dict[str, Any], listen: Listen) -> None:
        self._send(order)
        while True:
            report = await self._receive(_TURN_SECONDS)
            listen(report)
            if report["report"] in ("done", "failed"):
                return

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self.killed = True
            self._process.kill()

    async def stop(self, listen: Listen | None) -> None:
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        try:
            if listen is not None:
                listen(await self._receive(_STOP_SECONDS))
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._process.wait()
        except (TimeoutError, WorkerDied):
            log.warning("worker %d had to be ended", self._process.pid)
        finally:
            self.kill()
            await _gone(self._process)

    def _send(self, fields: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(fields).encode() + b"\n")

    async def _receive(self, seconds: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        name = f"worker {self._process.pid}"
        try:
            async with asyncio.timeout(seconds):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            self.kill()
            raise WorkerDied(f"{name} was silent for {seconds:g} s") from error
        if not line.endswith(b"\n"):
            # What a kill cut off was not said.
            raise WorkerDied(f"{name} ended with {await self._process.wait()}")
        report: dict[str, Any] = json.loads(line)
        return report


async def _gone(process: asyncio.subprocess.Process) -> None:
    """Wait for a killed process and its pipes, however often we are cancelled; a kill takes no time."""
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            await process.communicate()
            break
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


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
