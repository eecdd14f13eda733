"""Handlers of events, each with a job that passes events to it. Law: a failed or hanging handler does not stop others.

A handler receives one event at a time, in a task or thread of its own.

Design: section 12.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from distributed_state.errors import CorruptState, InvalidValue, StateError
from distributed_state.events.consumer import AsyncEvents
from distributed_state.results import Event
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.workers import HandlerWorker
from distributed_state.values.model import log_fields
from distributed_state.warm.consumers import RESYNC
from distributed_state.warm.telemetry import Facts, observed

log = logging.getLogger(__name__)
Handler = Callable[[Event], Any | Awaitable[Any]]
_CLOSING = 5.0
_HANGING = 5.0
# In a handler: its event, and since when it handles that. It is also set in the thread of a plain function.
_handled: ContextVar[tuple[float, Event] | None] = ContextVar("distributed_state_handled", default=None)


def inside() -> bool:
    """Whether the caller is a handler, which must not wait for work that waits for handlers."""
    return _handled.get() is not None


def _facts(_: Handling, event: Event) -> Facts:
    return {"partition": event.partition, "kind": event.type}


class Handling(HandlerWorker):
    """A handler and the job that passes events to it."""

    def __init__(self, tiers: Tiers, events: AsyncEvents, handler: Handler) -> None:
        if not callable(handler):
            raise InvalidValue(f"a handler is a function that takes an event, not {handler!r:.80}")
        port = tiers.port
        self._awaits = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004 - whether it is a coroutine function
        )
        if self._awaits and not port.suspends:
            raise InvalidValue(f"{_name(handler)}: a coroutine function is a handler for asyncio only")
        super().__init__(handler, port.signal(), port.here())
        self._events = events
        self._port = port
        self._feed = tiers.consumers
        self._slow = tiers.settings.slow_handler
        self.telemetry = tiers.warm.telemetry
        self._at: tuple[float, Event] | None = None  # the event that is being handled, and since when
        self._noticed: Any = None
        self._feed.watching.append(self._notice_hanging)
        self._idle = port.signal()
        self._idle.set()
        self._until = 0.0  # the end of the wait for the event that is being handled
        self._closing = False
        self._leaves = False  # the job ends by itself when its event loop continues
        self._all = tiers.handlings
        self._job = port.spawn_here(self._run, f"distributed-state-on-{_name(handler)}"[:60])

    async def _run(self) -> None:
        try:
            await self._hand_over()
            if self._leaves:
                await self._leave()
        except BaseException as error:
            # Not cancelled by this store: the handler's event loop ends while the store stays open.
            if not isinstance(error, Exception) and not self._closing:
                self.end()
                self._events.leave()
                if self in self._all:
                    self._all.remove(self)
            raise

    async def _hand_over(self) -> None:
        pause = 0.05
        while not self._closing:
            try:
                await self._events.join()
                self.joined.set()
                event = await self._events.next()
            except CorruptState as error:
                # No pause before the next event: this event is unreadable because of its data, not because of a server.
                self.failed += 1
                log.error("%s was not called for an event: %s", _name(self.handler), error)
                continue
            except StateError as error:
                if isinstance(error, InvalidValue):
                    self.joined.set()
                    raise
                log.warning("%s: %s; trying again in %.2f s", _name(self.handler), error, pause)
                await self._port.sleep(pause)
                pause = min(pause * 2, 2.0)
                continue
            pause = 0.05
            if event is None:
                return
            if event.type == RESYNC and not self._events.asks(RESYNC):
                log.warning("%s missed events: %s", _name(self.handler), event.data)
                continue
            self._idle.clear()
            if self._closing:
                return  # counts as busy, because the event was not handled
            await self._handle(event)
            self._idle.set()

    async def _handle(self, event: Event) -> None:
        began = self._port.monotonic()
        self._at = began, event
        outer = _handled.set(self._at)
        try:
            await self._call(event)
        except (Exception, SystemExit):  # also SystemExit, which would end a thread silently
            self.failed += 1
            text = "%s failed on %s %s of %r"
            about = log_fields(event.subject)
            log.exception(text, _name(self.handler), event.type, event.id, event.subject[:200], extra=about)
        finally:
            _handled.reset(outer)
        self._at = None
        self.handled += 1
        took = self._port.monotonic() - began
        if took > self._slow:
            self.slowed += 1
            log.warning(
                "%s took %.0f ms for %s %s of %r",
                _name(self.handler), took * 1000, event.type, event.id, event.subject[:200],
                extra=log_fields(event.subject),
            )  # fmt: skip

    @observed("event.handle", "handler", _facts)
    async def _call(self, event: Event) -> None:
        if self._awaits:
            await self._port.complete(self.handler(event))
        else:
            await self._port.thread(self.handler, event)

    def _notice_hanging(self) -> None:
        at = self._at  # read once, because the handler's thread changes it
        if at is not None and at is not self._noticed:
            since, event = at
            took = self._port.monotonic() - since
            if took > max(_HANGING, self._slow):
                self._noticed = at
                log.warning(
                    "%s has been handling %s %s of %r for %.0f s, and %d events are waiting",
                    _name(self.handler), event.type, event.id, event.subject[:200], took, self._events.waiting,
                    extra=log_fields(event.subject),
                )  # fmt: skip

    def end(self) -> None:
        """Stop passing events to the handler."""
        if self._closing:
            return
        self._closing = True
        self._until = self._port.monotonic() + _CLOSING
        self._feed.watching.remove(self._notice_hanging)
        self._feed.past.update(handled=self.handled, failed=self.failed, slowed=self.slowed)
        self._events.end()

    def _is_caller(self) -> bool:
        handled = _handled.get()
        return handled is not None and handled is self._at

    async def finish(self) -> None:
        """Wait briefly for the event that is being handled, and ask the job to end."""
        if not self._is_caller() and not self._port.holds_up(self.here):
            await self._idle.wait(max(0.0, self._until - self._port.monotonic()))
            self._job.ask()

    async def close(self) -> None:
        """Stop passing events to the handler, and wait briefly for the event that is being handled.

        A handler may call this itself, through `off` or by closing the store: its event then counts as handled, and the
        handler continues. Blocking code that runs in the handler's event loop does not wait for the handler; the job
        ends as soon as the loop continues.
        """
        self.end()
        if self._is_caller():
            await self._events.close()
        elif self._port.holds_up(self.here):
            self._leaves = True
        else:
            await self.finish()
            await self._job.stop()
            await self._leave()

    async def _leave(self) -> None:
        await self._events.close(handled=await self._idle.wait(0))


def _name(handler: Any) -> str:
    return str(getattr(handler, "__qualname__", handler))[:80]
