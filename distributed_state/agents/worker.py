"""The threads or tasks that run a host's agents, and their shutdown. Law: one hook at a time, in the order of events.

All hooks run in the `Worker`, which handles events, and requests between events. `HookRunner` runs a single hook: an
exception is logged and counted, and does not keep other hooks from running; `running` names the current hook, so that a
hanging one is noticed. `MainLoops` has a thread or task for each `main_loop`; a failure ends the run. `Shutdown` holds
the deadline for this work; work that runs longer is abandoned.

Design: section 12.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_incrementing

from distributed_state.agents.agent import BaseAgent, Invocation, present
from distributed_state.agents.blocking_deleted_state import LastState
from distributed_state.agents.deleted_state import AsyncLastState
from distributed_state.agents.hooks import call, is_defined
from distributed_state.errors import Unavailable
from distributed_state.port import Job, Port
from distributed_state.results import Event
from distributed_state.values.model import log_fields

log = logging.getLogger(__name__)
T = TypeVar("T")
_LOOK_EVERY = 1.0  # seconds, while the inbox is empty
_ATTEMPTS = 3
_LAST_WORK = 5.0  # seconds for the hooks of the shutdown and for archiving, even after the deadline


class Worker:
    """Takes events and tasks from its inbox.

    Calls `after_each` after each of them, `when_idle` while the inbox is empty.
    """

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
        self.working = False  # whether it handles an event or a task
        self.awake = port.signal()  # set: the inbox is checked

    @property
    def waiting(self) -> int:
        """The number of events and tasks that wait for their turn."""
        return len(self._inbox)

    def add(self, event: Event) -> None:
        """Queue an event."""
        self._inbox.append(event)
        self.awake.set()

    def add_task(self, work: Callable[[], Awaitable[Any]], *, urgent: bool = False) -> Task:
        """Queue work at the end of the inbox, or at its front if it is urgent."""
        task = Task(work, self._port)
        (self._inbox.appendleft if urgent else self._inbox.append)(task)
        self.awake.set()
        return task

    async def do(self, work: Callable[[], Awaitable[Any]], *, limit: float | None = None, urgent: bool = False) -> Any:
        """Have work done by the worker, and return its result; None if it takes longer than `limit`.

        Without a limit, the call waits at most until the agents have to end.
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
                    self.working = True
                    it = self._inbox.popleft()
                    if isinstance(it, Task):
                        await it.run()
                    elif not self._shutdown.requested:
                        await self._handle(it)
                    self._after_each()
                    self.working = False
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
            # SystemExit ends the program as usual; raised in a thread, it would go unnoticed.
            self._shutdown.fail(error)
            self._stop()
        except Exception:  # the next event may succeed
            about = log_fields(event.subject)
            log.exception("event %s of type %s could not be handled", event.id, event.type, extra=about)


class Task:
    """Work to be done between events."""

    def __init__(self, work: Callable[[], Awaitable[Any]], port: Port) -> None:
        self._work = work
        self.done = port.signal()
        self.result: Any = None
        self.error: BaseException | None = None

    async def run(self) -> None:
        """Do the work, and keep its result or exception for the waiting caller."""
        try:
            self.result = await self._work()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - raised in the caller that waits
            self.error = error
        finally:
            self.done.set()


class HookRunner:
    """Runs hooks one at a time, on the port of the agents' host."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self.running: tuple[float, str] | None = None  # when the running hook started, and its name

    async def run(
        self,
        agent: BaseAgent,
        name: str,
        arguments: Mapping[str, Any],
        event: Event | None = None,
        conversation_id: str = "",
        last_state: AsyncLastState | LastState | None = None,
    ) -> None:
        """Run one hook, if the agent defines it. An exception is logged and counted.

        The event is not delivered again: a hook that found a server down is repeated, and later events wait.
        """
        if not is_defined(agent, name):
            return
        log = agent.agent_context.display.log
        about = {"hook": name}
        if event is not None:
            about |= {"event": event.type, "event_id": event.id, "subject": event.subject}

        def repeated(error: BaseException) -> None:
            log("WARNING", "a hook is run again", about | {"error": _text(error)})

        began = self._port.monotonic()
        self.running = (began, f"{agent.agent_context.name}.{name}")
        agent.agent_context.requests += 1
        try:
            once = partial(self._call, agent, name, arguments, conversation_id, last_state)
            if event is not None or conversation_id:
                await while_unavailable(self._port, once, repeated)
            else:
                await once()
        except Exception as error:  # noqa: BLE001 - the other hooks still have to run
            agent.agent_context.errors += 1
            log("ERROR", "a hook failed", about | {"error": _text(error)}, error)
        finally:
            self.running = None
            took = self._port.monotonic() - began
            if took > agent.slow_hook:
                log("WARNING", "a slow hook holds up the others", about | {"seconds": round(took, 3)})

    async def run_required(self, agent: BaseAgent, name: str) -> None:
        """Run a hook that must succeed for the agent to start: its exception is raised here."""
        self.running = (self._port.monotonic(), f"{agent.agent_context.name}.{name}")
        try:
            await self._call(agent, name, {}, "", None)
        finally:
            self.running = None

    async def _call(
        self,
        agent: BaseAgent,
        name: str,
        arguments: Mapping[str, Any],
        conversation_id: str,
        last_state: AsyncLastState | LastState | None,
    ) -> None:
        with agent.agent_context.invoke(Invocation(self, conversation_id, last_state)):
            await call(self._port, getattr(agent, name), arguments)

    def calls_us(self) -> bool:
        """Whether the caller is one of these hooks, which would wait forever for another hook to run."""
        return present().runner is self


async def while_unavailable(
    port: Port, work: Callable[[], Awaitable[T]], repeated: Callable[[BaseException], None] | None = None
) -> T:
    """Do the work, at most three times while it raises Unavailable; `repeated` is called before each repetition."""

    def announce(state: RetryCallState) -> None:
        error = None if state.outcome is None else state.outcome.exception()
        if repeated is not None and error is not None:
            repeated(error)

    retrying = AsyncRetrying(
        retry=retry_if_exception_type(Unavailable),
        stop=stop_after_attempt(_ATTEMPTS),
        wait=wait_incrementing(start=0.1, increment=0.1),
        before_sleep=announce,
        sleep=port.sleep,
        reraise=True,
    )
    return await retrying(work)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# seconds


class MainLoops:
    """The main loops of one host's agents."""

    def __init__(self, agents: Sequence[BaseAgent], port: Port, shutdown: Shutdown, stop: Callable[[], None]) -> None:
        self._agents = agents
        self._port = port
        self._shutdown = shutdown
        self._stop = stop
        self._changed = {agent.agent_context.name: port.signal() for agent in agents}
        self.over = port.signal()  # set: one has ended, or all are stopping
        self.running = 0
        self.jobs: list[Job] = []

    def begin(self) -> None:
        """Run the main loops, unless the agents are already stopping."""
        agents = () if self._shutdown.requested else self._agents
        self.running = len(agents)
        self.jobs = [
            self._port.spawn_here(partial(self._run, agent), f"{agent.agent_context.name} main loop")
            for agent in agents
        ]

    async def join(self) -> None:
        """Wait until all have ended, one has failed, or the agents are stopping."""
        while self.running and not self._shutdown.requested and self._shutdown.failure is None:
            await self.over.wait(_LOOK_EVERY)
            self.over.clear()

    async def _run(self, agent: BaseAgent) -> None:
        try:
            await call(self._port, agent.main_loop, {})
        except SystemExit as error:
            self._shutdown.fail(error)
            self._stop()
        except Exception as error:  # noqa: BLE001 - raised at the end
            agent.agent_context.errors += 1
            fields = {"error": f"{type(error).__name__}: {error}"}
            agent.agent_context.display.log("ERROR", "main_loop failed", fields, error)
            self._shutdown.fail(error)
        finally:
            self.running -= 1
            self.over.set()

    async def wait(self, agent: str, seconds: float | None) -> bool:
        """Wait `seconds`, and longer while the agent is paused; False as soon as it is stopping."""
        changed = self._changed[agent]
        context = next(each.agent_context for each in self._agents if each.agent_context.name == agent)
        end = None if seconds is None else self._port.monotonic() + seconds
        while not self._shutdown.requested:
            left = _LOOK_EVERY if end is None else end - self._port.monotonic()
            if left <= 0 and not context.paused:
                return True
            await changed.wait(min(left, _LOOK_EVERY) if left > 0 else _LOOK_EVERY)
            changed.clear()
        return False

    def wake(self, agent: str) -> None:
        """Wake `wait` to check whether the agent is paused or stopping; may be called from any thread."""
        self._changed[agent].set()


class Shutdown:
    """Whether the agents are stopping, their deadline, and their first failure."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._deadline = 0.0
        self.requested = False
        self.failure: BaseException | None = None

    def request(self, timeout: float) -> None:
        """Stop the agents within `timeout` seconds, from any thread; a second call does not wait for running work."""
        if self.requested:
            self._deadline = 0.0
        else:
            # In this order: a thread that sees the request must not find the deadline already over.
            self._deadline = self._port.monotonic() + timeout
            self.requested = True

    def fail(self, error: BaseException) -> None:
        """Keep the first failure, which may have caused the later ones, to raise it at the end."""
        self.failure = self.failure or error

    @property
    def overdue(self) -> bool:
        """Whether the deadline for running work is over."""
        return self.requested and self._port.monotonic() >= self._deadline

    def time_left(self) -> float:
        """The number of seconds that a step of the end may take."""
        return max(self._deadline - self._port.monotonic(), _LAST_WORK)

    async def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait until the condition is true, at most until the deadline; return whether it is true."""
        while not condition():
            if self._port.monotonic() >= self._deadline:
                return False
            await self._port.sleep(0.01)
        return True
