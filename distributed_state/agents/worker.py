"""The one thread or task in which the hooks of a host's agents run. Law: one thing at a time, in the order it came.

Design: section 12.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from distributed_state.agents.shutdown import Shutdown
from distributed_state.port import Port
from distributed_state.values.model import log_fields
from distributed_state.values.results import Event

log = logging.getLogger(__name__)
_LOOK_EVERY = 1.0  # seconds, when nothing comes


class Task:
    """Something to be done between events."""

    def __init__(self, work: Callable[[], Awaitable[Any]], port: Port) -> None:
        self._work = work
        self.done = port.signal()
        self.result: Any = None
        self.error: BaseException | None = None

    async def run(self) -> None:
        """Do it, and keep what it returned or raised for whoever waits."""
        try:
            self.result = await self._work()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - raised where it is waited for
            self.error = error
        finally:
            self.done.set()


class Worker:
    """Takes events and tasks from its inbox. `after_each` is called after every one, `when_idle` when there is none."""

    def __init__(
        self,
        port: Port,
        shutdown: Shutdown,
        *,
        dispatch: Callable[[Event], Awaitable[None]],
        after_each: Callable[[], None],
        when_idle: Callable[[], Awaitable[None]],
        stop: Callable[[], None],
    ) -> None:
        self._port = port
        self._shutdown = shutdown
        self._dispatch = dispatch
        self._after_each = after_each
        self._when_idle = when_idle
        self._stop = stop
        self._inbox: deque[Event | Task] = deque()
        self._ending = False
        self._ended = port.signal()
        self.awake = port.signal()  # set: the inbox is looked at

    @property
    def waiting(self) -> int:
        """How many events and tasks wait for their turn."""
        return len(self._inbox)

    def add(self, event: Event) -> None:
        """Have an event dispatched after all that waits."""
        self._inbox.append(event)
        self.awake.set()

    def add_task(self, work: Callable[[], Awaitable[Any]], *, urgent: bool = False) -> Task:
        """Have something done after all that waits, or if it is urgent before that."""
        task = Task(work, self._port)
        (self._inbox.appendleft if urgent else self._inbox.append)(task)
        self.awake.set()
        return task

    async def do(self, work: Callable[[], Awaitable[Any]], *, limit: float | None = None, urgent: bool = False) -> Any:
        """Have something done, and return what it returns; None if it took longer than `limit`.

        Without a limit it is given up when the agents have to end.
        """
        task = self.add_task(work, urgent=urgent)
        began = self._port.monotonic()
        while not await task.done.wait(0.5):
            took = self._port.monotonic() - began
            if took >= limit if limit is not None else self._shutdown.overdue:
                log.warning("gave up waiting for the agents' hooks after %.0f s", took)
                return None
            if await self._ended.wait(0):
                return None
        if task.error is not None:
            raise task.error
        return task.result

    async def run(self) -> None:
        """Work until `end` is called."""
        try:
            while not self._ending:
                await self.awake.wait(_LOOK_EVERY)
                self.awake.clear()
                while self._inbox:
                    it = self._inbox.popleft()
                    if isinstance(it, Task):
                        await it.run()
                    elif not self._shutdown.requested:
                        await self._handle(it)
                    self._after_each()
                await self._when_idle()
                self._after_each()
        finally:
            self._ended.set()

    def end(self) -> None:
        """Let `run` return when the inbox is empty."""
        self._ending = True
        self.awake.set()

    async def _handle(self, event: Event) -> None:
        try:
            await self._dispatch(event)
        except SystemExit as error:
            # As in any program; but in a thread nobody would notice.
            self._shutdown.fail(error)
            self._stop()
        except Exception:  # the next event is not to blame
            about = log_fields(event.subject)
            log.exception("event %s of type %s could not be handled", event.id, event.type, extra=about)
