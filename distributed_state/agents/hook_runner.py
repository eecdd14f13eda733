"""Runs the hooks of a host's agents. Law: what one hook raises is logged and counted, and keeps no other from running.

Where the agents' thread or task is at a hook can be seen from outside by `running`: a hook that hangs is noticed.

Design: section 12.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_incrementing

from distributed_state.agents import invocation
from distributed_state.agents.base_agent import BaseAgent
from distributed_state.agents.blocking_deleted_state import LastState
from distributed_state.agents.deleted_state import AsyncLastState
from distributed_state.agents.hooks import call, is_defined
from distributed_state.agents.invocation import Invocation
from distributed_state.errors import Unavailable
from distributed_state.port import Port
from distributed_state.values.results import Event

T = TypeVar("T")
_ATTEMPTS = 3


class HookRunner:
    """Runs hooks one at a time, by the port of the host that runs the agents."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self.running: tuple[float, str] | None = None  # since when which hook runs

    async def run(
        self,
        agent: BaseAgent,
        name: str,
        arguments: Mapping[str, Any],
        event: Event | None = None,
        conversation_id: str = "",
        last_state: AsyncLastState | LastState | None = None,
    ) -> None:
        """Run one hook, if the agent has it. What it raises is logged and counted.

        The event does not come again: a hook that found a server away is run once more, and later events wait.
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
        self.running = (began, f"{agent.name}.{name}")
        agent.requests += 1
        try:
            once = partial(self._call, agent, name, arguments, conversation_id, last_state)
            if event is not None or conversation_id:
                await while_unavailable(self._port, once, repeated)
            else:
                await once()
        except Exception as error:  # noqa: BLE001 - the other hooks have to run all the same
            agent.errors += 1
            log("ERROR", "a hook failed", about | {"error": _text(error)}, error)
        finally:
            self.running = None
            took = self._port.monotonic() - began
            if took > agent.slow_hook:
                log("WARNING", "a slow hook holds up the others", about | {"seconds": round(took, 3)})

    async def run_required(self, agent: BaseAgent, name: str) -> None:
        """Run a hook without which the agent cannot start: what it raises is raised here."""
        self.running = (self._port.monotonic(), f"{agent.name}.{name}")
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
        """Whether the caller is one of these hooks: to wait for the others' turn would be to wait for ever."""
        return invocation.present().runner is self


async def while_unavailable(
    port: Port, work: Callable[[], Awaitable[T]], repeated: Callable[[BaseException], None] | None = None
) -> T:
    """Do the work, and again if it raised Unavailable, three times at most; `repeated` is called before each other."""

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
