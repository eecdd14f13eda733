"""Work in the background that stands above the tiers and ends with them. Law: the tiers know it by these names only.

Design: section 16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from distributed_state.port import Job, Port, Signal


class Worker(ABC):
    """Something that works until it is closed."""

    @abstractmethod
    async def close(self) -> None:
        """End it, and return when it has ended."""

    async def erased(self) -> None:
        """SQL has erased something: what must have forgotten it before the erasure is complete does so here."""
        return


class JobWorker(Worker):
    """What one job does from `begin` to `close`: `_run`, under the name `job_name`."""

    job_name: ClassVar[str]

    def __init__(self, port: Port) -> None:
        self._port = port
        self._job: Job | None = None

    def begin(self) -> None:
        """Begin in the background."""
        self._job = self._port.spawn(self._run, self.job_name)

    async def close(self) -> None:
        """End it, and return when it has ended. Harmless if it never began."""
        if self._job is not None:
            await self._job.stop()
            self._job = None

    @abstractmethod
    async def _run(self) -> None:
        """Go on until the job is asked to end."""


class HandlerWorker(Worker):
    """What calls a handler of events. `joined` is set when it listens; the counts are of events.

    `here`: the event loop of which it is a task, None of a thread.
    """

    def __init__(self, handler: Any, joined: Signal, here: object) -> None:
        self.handler = handler
        self.joined = joined
        self.here = here
        self.handled = 0
        self.failed = 0
        self.slowed = 0  # took longer than `slow_handler`

    @abstractmethod
    def end(self) -> None:
        """Hand over no more events."""

    @abstractmethod
    async def finish(self) -> None:
        """Let the event that is being handled be handled, if that is soon, and ask the job to end."""
