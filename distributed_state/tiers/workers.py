"""Background work that uses the tiers and ends with them. Law: the tiers use it only through these classes.

Design: section 16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from distributed_state.port import Job, Port, Signal


class Worker(ABC):
    """Something that runs until it is closed."""

    @abstractmethod
    async def close(self) -> None:
        """End the work, and return when it has ended."""

    async def erased(self) -> None:
        """Drop records that SQL has erased; called before the erasure counts as complete."""
        return


class WorkCounts:
    """How many turns of handlers this replica's workers have committed, and how many failed."""

    served = failed = 0


class JobWorker(Worker):
    """A worker with one job, from `begin` to `close`: `_run`, under the name `job_name`."""

    job_name: ClassVar[str]

    def __init__(self, port: Port) -> None:
        self._port = port
        self._job: Job | None = None

    def begin(self) -> None:
        """Start in the background."""
        self._job = self._port.spawn(self._run, self.job_name)

    async def close(self) -> None:
        """End the job, and return when it has ended. Has no effect if it never started."""
        if self._job is not None:
            await self._job.stop()
            self._job = None

    @abstractmethod
    async def _run(self) -> None:
        """Run until the job is asked to end."""


class HandlerWorker(Worker):
    """Calls a handler of events. `joined` is set when it listens; the counts are of events.

    `here`: the event loop in which it is a task; None for a thread.
    """

    def __init__(self, handler: Any, joined: Signal, here: object) -> None:
        self.handler = handler
        self.joined = joined
        self.here = here
        self.handled = 0
        self.failed = 0
        self.slowed = 0  # events that took longer than `slow_handler`

    @abstractmethod
    def end(self) -> None:
        """Stop passing events to the handler."""

    @abstractmethod
    async def finish(self) -> None:
        """Wait briefly for the event that is being handled, and ask the job to end."""
