"""Agents and their host on the blocking face. Law: what differs from the asyncio one is who waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from distributed_state.agents.base_agent import BaseAgent
from distributed_state.agents.commands import Progress
from distributed_state.agents.host import AsyncHost
from distributed_state.agents.status import Status
from distributed_state.events.config import Source
from distributed_state.port.blocking import finish
from distributed_state.store.blocking import StateStore
from distributed_state.values.results import Event


class Agent(BaseAgent):
    """An agent of blocking code: subclass it, define the hooks that you need, `agent.run()`, or `with agent:`.

    `store` is a StateStore, or a function that opens one, which is then closed at the end; by default it is opened as
    the settings in the environment say. Hooks run in one thread of their own, `main_loop` in another; one that is
    `async def` runs to its end on an event loop of that thread.
    """

    def __init__(
        self,
        store: StateStore | Callable[[], StateStore] | None = None,
        *,
        name: str | None = None,
        config: Source | None = None,
        client: str = "",
        since: str | None = None,
    ) -> None:
        opens = StateStore.open if store is None else store
        super().__init__(opens, name=name, config=config, client=client, since=since)

    def main_loop(self) -> Any:
        """Work in the background until it is time to end: `while self.wait(5.0): ...`."""
        self.wait()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait so many seconds, and on while the agent is paused; False as soon as it is time to end."""
        return finish(self._wait(seconds))

    def run(self) -> None:
        """Run alone in this process until `main_loop` returns or SIGTERM or SIGINT comes: see Host.run."""
        Host(self).run()

    def __enter__(self) -> Self:
        Host(self).__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finish(self._hosted().__aexit__(kind, error, trace))

    def run_command(
        self,
        name: str,
        args: Mapping[str, Any] | None = None,
        *,
        conversation_id: str | None = None,
        directory: str = "",
        progress: Progress | None = None,
    ) -> Any:
        """Run a command on a conversation, by default the current one, and return what it returned.

        `directory` is what `get_invocation_directory` says there. `progress(text, fields)` gets its reports, in the
        thread that the command runs in. Raises NotFound, InvalidValue for wrong arguments, CommandFailed from what the
        command raised; errors of the store as they are.
        """
        return finish(self._run_command(name, args, conversation_id, directory, progress))

    def activate(self, *, client: str | None = None, conversation_id: str | None = None) -> Event:
        """Notify every replica that a client, by default the agent's own, goes on with this agent; return the event.

        And in which conversation, by default the current one. The agent that the client had before is deactivated:
        see `activate_agent` of the store.
        """
        return finish(self._activate(client, conversation_id))

    def change_directory(self, new_path: str, *, client: str | None = None) -> Event:
        """Notify every replica that a client's user, by default of the agent's own, works from this folder now."""
        return finish(self._change_directory(new_path, client))

    def status(self) -> Status:
        """How this replica of the agent is; logged, and `on_status` has run. SIGUSR1 does the same."""
        return finish(self._hosted().status(self.name))

    def reload(self) -> None:
        """Read the config file again, and call `on_config_update` if it changed. SIGHUP does the same."""
        finish(self._hosted().reload(self.name))


class Host:
    """Runs one or several agents of one store in this process: `with Host(a, b)`, or `host.run()`."""

    def __init__(self, *agents: Agent) -> None:
        self._twin = AsyncHost(*agents)

    def run(self) -> None:
        """Run until the agents end or SIGTERM or SIGINT comes, finish what was begun, and return.

        SIGHUP reads the config files again, SIGUSR1 logs how the agents are. Raises what a `main_loop` raised.
        """
        finish(self._twin.run())

    def stop(self) -> None:
        """Let the agents end, from any thread; called again, without waiting for what runs."""
        self._twin.stop()

    def __enter__(self) -> Self:
        finish(self._twin.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finish(self._twin.__aexit__(kind, error, trace))
