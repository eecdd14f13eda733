"""The agents' background work. Law: each `main_loop` has a thread or task of its own, and its failure ends the run.

Design: section 12.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from distributed_state.agents.base_agent import BaseAgent
from distributed_state.agents.hooks import call
from distributed_state.agents.shutdown import Shutdown
from distributed_state.port import Job, Port

_LOOK_EVERY = 1.0  # seconds


class MainLoops:
    """The main loops of one host's agents."""

    def __init__(self, agents: Sequence[BaseAgent], port: Port, shutdown: Shutdown, stop: Callable[[], None]) -> None:
        self._agents = agents
        self._port = port
        self._shutdown = shutdown
        self._stop = stop
        self._changed = {agent.name: port.signal() for agent in agents}
        self.over = port.signal()  # set: one has ended, or all are to end
        self.running = 0
        self.jobs: list[Job] = []

    def begin(self) -> None:
        """Run them, unless the agents are to end already."""
        agents = () if self._shutdown.requested else self._agents
        self.running = len(agents)
        self.jobs = [self._port.spawn_here(partial(self._run, agent), f"{agent.name} main loop") for agent in agents]

    async def join(self) -> None:
        """Wait until all have ended, one has failed, or the agents are to end."""
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
            agent.errors += 1
            fields = {"error": f"{type(error).__name__}: {error}"}
            agent.agent_context.display.log("ERROR", "main_loop failed", fields, error)
            self._shutdown.fail(error)
        finally:
            self.running -= 1
            self.over.set()

    async def wait(self, agent: str, seconds: float | None) -> bool:
        """Wait so many seconds, and on while the agent is paused; False as soon as it is to end."""
        changed = self._changed[agent]
        context = next(each.agent_context for each in self._agents if each.name == agent)
        end = None if seconds is None else self._port.monotonic() + seconds
        while not self._shutdown.requested:
            left = _LOOK_EVERY if end is None else end - self._port.monotonic()
            if left <= 0 and not context.paused:
                return True
            await changed.wait(min(left, _LOOK_EVERY) if left > 0 else _LOOK_EVERY)
            changed.clear()
        return False

    def wake(self, agent: str) -> None:
        """Let `wait` look again whether the agent is paused or is to end; from any thread."""
        self._changed[agent].set()
