"""Agents and their host for asyncio code; the blocking API is generated from this.

Law: the APIs differ only in waiting.

The common logic is in BaseAgent, and in the HostRun that a host creates each time it runs its agents.

Design: section 12.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from distributed_state.agents.agent import BaseAgent, StoreSource
from distributed_state.agents.display import Status
from distributed_state.agents.hooks import Progress
from distributed_state.agents.host_run import HostRun
from distributed_state.errors import ConfigurationError, InvalidValue
from distributed_state.events.config import Source
from distributed_state.port.background import listening
from distributed_state.results import Event
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.store.services import Store


class AsyncAgent(BaseAgent):
    """An agent of asyncio: subclass it, define the hooks that you need, `await agent.run()`, or `async with agent:`.

    Example::

        class Notes(AsyncAgent):
            conversation_defaults = {"notes": []}

            async def initialize(self):
                self.register_command("add", self.add, arguments=[CommandArgument("note", "string", required=True)])

            async def add(self, note):
                return await self.conversation.append_to("notes", note)

        async with Notes(store) as agent:
            await agent.run_command("add", {"note": "milk"}, conversation_id="c1")

    `store` is an AsyncStateStore, or a function that opens one, which is then closed at the end; by default it is
    opened from the environment's settings. Hooks, commands and `main_loop` are `async def`; plain functions run in a
    thread and cannot use the store there. A str in place of the store is the agent's name.
    """

    def __init__(
        self,
        store: AsyncStateStore | Callable[[], AsyncStateStore | Awaitable[AsyncStateStore]] | str | None = None,
        *,
        name: str | None = None,
        config: Source | None = None,
        client: str = "",
        since: str | None = None,
    ) -> None:
        if isinstance(store, str):  # as in the SDK of Opperator, where the name comes first
            store, name = None, name or store
        opens = AsyncStateStore.open if store is None else store
        super().__init__(opens, name=name, config=config, client=client, since=since)

    async def main_loop(self) -> Any:
        """Work in the background until the agent stops: `while await self.wait(5.0): ...`."""
        await self.agent_context.running_host.wait(self.agent_context.name, None)

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait `seconds`, and longer while the agent is paused; False as soon as the agent is stopping."""
        return await self.agent_context.running_host.wait(self.agent_context.name, seconds)

    async def run(self) -> None:
        """Run only this agent, until `main_loop` returns or SIGTERM or SIGINT arrives: see AsyncHost.run."""
        await AsyncHost(self).run()

    async def __aenter__(self) -> Self:
        await AsyncHost(self).__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.agent_context.running_host.close(error)

    async def run_command(
        self,
        name: str,
        args: Mapping[str, Any] | None = None,
        *,
        conversation_id: str | None = None,
        directory: str = "",
        progress: Progress | None = None,
    ) -> Any:
        """Run a command on a conversation, by default the current one, and return its result.

        In the command `get_invocation_directory` returns `directory`. `progress(text, fields)` receives the command's
        reports, in the thread that runs the command. Raises NotFound, InvalidValue for wrong arguments, and
        CommandFailed if the command raised; errors of the store are raised unchanged.
        """
        return await self.agent_context.run_command(
            name, args, conversation_id, directory, progress, self.conversation_defaults
        )

    async def activate(self, *, client: str | None = None, conversation_id: str | None = None) -> Event:
        """Notify every replica that a client, by default the agent's own, now uses this agent; return the event.

        The event also names the conversation, by default the current one. The client's previous agent is deactivated:
        see `activate_agent` of the store.
        """
        return await self.agent_context.activate(client, conversation_id)

    async def change_directory(self, new_path: str, *, client: str | None = None) -> Event:
        """Notify every replica that the user of a client, by default the agent's own, now works from this folder."""
        return await self.agent_context.change_directory(new_path, client)

    async def status(self) -> Status:
        """Return and log the status of this replica of the agent, after `on_status` has run. SIGUSR1 does the same."""
        return await self.agent_context.running_host.status(self.agent_context.name)

    async def reload(self) -> None:
        """Read the config file again, and call `on_config_update` if it changed. SIGHUP does the same."""
        await self.agent_context.running_host.reload(self.agent_context.name)


log = logging.getLogger(__name__)


class AsyncHost:
    """Runs one or more agents of one store in this process: `async with AsyncHost(a, b)`, or `await host.run()`.

    Example::

        class Notes(AsyncAgent):
            name = "notes"

        class Prices(AsyncAgent):
            name = "prices"

        async with AsyncHost(Notes(store), Prices(store)):
            await session.set("city", "Oslo")  # the hooks of each replica run

    Raises InvalidValue for agents of the same name, ConfigurationError for agents of several stores.
    """

    def __init__(self, *agents: BaseAgent) -> None:
        self._agents = agents
        self._run: HostRun | None = None
        names = [agent.agent_context.name for agent in agents]
        if not agents or len(set(names)) < len(names):
            raise InvalidValue(f"a host runs agents with a name each, not {', '.join(names) or 'none'}")
        first = agents[0].agent_context
        if any(agent.agent_context.source != first.source for agent in agents):
            raise ConfigurationError(f"the agents {', '.join(names)} of one host use one store")
        if any(agent.agent_context.since != first.since for agent in agents):
            raise ConfigurationError(f"the agents {', '.join(names)} of one host go on from one position")

    async def run(self) -> None:
        """Run until the agents end or SIGTERM or SIGINT arrives, finish the work in progress, and return.

        SIGHUP rereads the config files, SIGUSR1 logs the agents' status. Raises the exception of a failed `main_loop`.
        """
        early: list[str] = []  # requests that came before the agents could answer them; they would end the process
        with listening({name: partial(early.append, name) for name in ("SIGHUP", "SIGUSR1")}) as listens:
            if not listens:
                log.warning("signals are handled in the main thread only, and this is another one")
            run = await self._open()
            with listening({"SIGTERM": run.stop, "SIGINT": run.stop}):
                try:
                    await run.begin()
                    requests = {"SIGHUP": run.request_reload, "SIGUSR1": run.request_status}
                    with listening(requests):
                        for name in early:
                            requests[name]()
                        await run.loops.join()
                except BaseException as error:
                    await self._close(error)
                    raise
                await self._close(None)

    async def __aenter__(self) -> Self:
        run = await self._open()
        try:
            await run.begin()
        except BaseException as error:
            await self._close(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(error)

    def stop(self) -> None:
        """Stop the agents, from any thread; a second call stops them without waiting for running work."""
        run = self._run
        if run is not None:
            run.stop()

    async def _open(self) -> HostRun:
        contexts = [agent.agent_context for agent in self._agents]
        if any(context.host is not None for context in contexts):
            raise ConfigurationError(f"{', '.join(context.name for context in contexts)}: is running already")
        store = await _opened(contexts[0].source)
        self._run = run = HostRun(self._agents, store)
        for context in contexts:
            context.begin(run, store)
        return run

    async def _close(self, error: BaseException | None) -> None:
        run = self._run
        if run is not None:
            try:
                await run.close(error)
            finally:
                self._run = None


async def _opened(source: StoreSource) -> Store:
    if not callable(source):
        return source
    found = source()
    # A blocking store is open when it is created, an asyncio store once it was awaited.
    return await found if isinstance(found, Awaitable) else found
