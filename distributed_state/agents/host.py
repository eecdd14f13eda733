"""Runs agents in a process, and handles its signals. Law: a host runs its agents once at a time, on one store.

All hooks of a process but `main_loop` run in one thread (one task under asyncio), those for signals too. What a
`main_loop` raises is logged at once, and raised where the agents end: it ends `run()`, but not the body of a `with`.

Design: section 12.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from types import TracebackType
from typing import Self

from distributed_state.agents.base_agent import BaseAgent
from distributed_state.agents.context import StoreSource
from distributed_state.agents.host_run import HostRun
from distributed_state.agents.status import Status
from distributed_state.errors import ConfigurationError, InvalidValue
from distributed_state.port.signals import listening
from distributed_state.store.services import Store

log = logging.getLogger(__name__)


class AsyncHost:
    """Runs one or several agents of one store in this process: `async with AsyncHost(a, b)`, or `await host.run()`.

    Example::

        class Notes(AsyncAgent):
            name = "notes"

        class Prices(AsyncAgent):
            name = "prices"

        async with AsyncHost(Notes(store), Prices(store)):
            await session.set("city", "Oslo")  # each replica's hooks hear of it

    Raises InvalidValue for agents of the same name, ConfigurationError for agents of several stores.
    """

    def __init__(self, *agents: BaseAgent) -> None:
        self.agents = agents
        self._run: HostRun | None = None
        names = [agent.name for agent in agents]
        if not agents or len(set(names)) < len(names):
            raise InvalidValue(f"a host runs agents with a name each, not {', '.join(names) or 'none'}")
        first = agents[0].agent_context
        if any(agent.agent_context.source != first.source for agent in agents):
            raise ConfigurationError(f"the agents {', '.join(names)} of one host use one store")
        if any(agent.agent_context.since != first.since for agent in agents):
            raise ConfigurationError(f"the agents {', '.join(names)} of one host go on from one position")

    async def run(self) -> None:
        """Run until the agents end or SIGTERM or SIGINT comes, finish what was begun, and return.

        SIGHUP reads the config files again, SIGUSR1 logs how the agents are. Raises what a `main_loop` raised.
        """
        run = await self._open()
        calls = {"SIGTERM": self.stop, "SIGINT": self.stop}
        calls |= {"SIGHUP": self.request_reload, "SIGUSR1": self.request_status}
        with listening(calls) as listens:
            if not listens:
                log.warning("signals are handled in the main thread only, and this is another one")
            try:
                await run.begin()
                run.loops.begin()
                await run.loops.join()
            finally:
                await self.close()
        if run.shutdown.failure is not None:
            raise run.shutdown.failure

    async def __aenter__(self) -> Self:
        run = await self._open()
        try:
            await run.begin()
            run.loops.begin()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run = self._run
        await self.close()
        if error is None and run is not None and run.shutdown.failure is not None:
            raise run.shutdown.failure

    async def _open(self) -> HostRun:
        if self._run is not None or any(agent.agent_context.host not in (None, self) for agent in self.agents):
            raise ConfigurationError(f"{self._names}: runs already")
        store = await _opened(self.agents[0].agent_context.source)
        self._run = run = HostRun(self.agents, store)
        for agent in self.agents:
            agent.agent_context.begin(self, store)
        return run

    async def close(self) -> None:
        """Finish what runs, run `on_shutdown` and `cleanup`, archive, and close the store if it was opened here."""
        run = self._run
        if run is None:
            return
        try:
            await run.end()
        finally:
            self._run = None
            for agent in self.agents:
                agent.agent_context.end()
            if callable(self.agents[0].agent_context.source):
                await run.services.store.close()

    def stop(self) -> None:
        """Let the agents end, from any thread; called again, without waiting for what runs."""
        run = self._run
        if run is not None:
            run.stop()

    def request_reload(self) -> None:
        """Have every agent read its config file, soon: SIGHUP, which may come until the very end."""
        run = self._run
        if run is not None:
            run.request_reload()

    def request_status(self) -> None:
        """Have every agent log its status, soon: SIGUSR1."""
        run = self._run
        if run is not None:
            run.request_status()

    # What an agent asks of its host

    @property
    def current_run(self) -> HostRun:
        """The run that goes on. Raises ConfigurationError if there is none."""
        if self._run is None:
            raise ConfigurationError(f"{self._names}: does not run")
        return self._run

    @property
    def stopping(self) -> bool:
        """Whether the agents are to end."""
        return self._run is not None and self._run.shutdown.requested

    @property
    def waiting(self) -> int:
        """How many events wait for their hooks."""
        return 0 if self._run is None else self._run.waiting

    @property
    def position(self) -> str:
        """How far the hooks are."""
        return self.current_run.position

    async def wait(self, agent: str, seconds: float | None) -> bool:
        """Wait so many seconds, and on while the agent is paused; False as soon as it is to end."""
        return await self.current_run.loops.wait(agent, seconds)

    def wake(self, agent: str) -> None:
        """Something about the agent changed; from any thread."""
        run = self._run  # once: it may end meanwhile
        if run is not None:
            run.wake(agent)

    async def status(self, agent: str) -> Status:
        """How the agent is on this replica; logged, and its `on_status` has run."""
        return await self.current_run.status(agent)

    async def reload(self, agent: str) -> None:
        """Read the agent's config file again."""
        await self.current_run.reload(agent)

    @property
    def _names(self) -> str:
        return ", ".join(each.name for each in self.agents)


async def _opened(source: StoreSource) -> Store:
    if not callable(source):
        return source
    found = source()
    # A blocking store is open when it is there, an asyncio one when it was awaited.
    return await found if isinstance(found, Awaitable) else found
