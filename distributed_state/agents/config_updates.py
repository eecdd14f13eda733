"""How the config of a running agent changes: by its file, or by the fleet. Law: a broken one never replaces a good one.

What the fleet is given is read from its record, never from the event, which says only that there is something new.

Design: section 12.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distributed_state.agents.base_agent import BaseAgent
from distributed_state.agents.hook_runner import HookRunner, while_unavailable
from distributed_state.errors import ConfigurationError, StateError
from distributed_state.events import config
from distributed_state.port.signals import HAS_RELOAD
from distributed_state.store.services import StoreServices
from distributed_state.values.model import Ref
from distributed_state.values.results import Event

RECORD = Ref("app", config.RECORD)
_WATCH_EVERY = 0.0 if HAS_RELOAD else 5.0  # by default; where SIGHUP says so, nobody has to look


@dataclass(frozen=True, slots=True)
class Given:
    """What the fleet was given, for all agents and for single ones, at a version of the record."""

    version: int
    fields: Mapping[str, Any]

    def newest(self, agent: BaseAgent) -> config.Spread | None:
        """What was given last to this agent, by its name or to all."""
        return config.newest(self.fields, agent.name, self.version)


class ConfigUpdates:
    """The configs of the agents of one host."""

    def __init__(self, services: StoreServices, runner: HookRunner) -> None:
        self._services = services
        self._port = services.port
        self._runner = runner
        self._watched: dict[str, float] = {}  # when each agent's file was looked at

    async def begin(self, agents: Iterable[BaseAgent]) -> None:
        """Take the newest of file and fleet. Raises ConfigurationError if there is none that is valid."""
        given = await self._of_fleet()
        for agent in agents:
            agent.agent_context.config.begin(given.newest(agent))

    async def catch_up(self, agents: Iterable[BaseAgent]) -> None:
        """Take a config that was given to the fleet while nobody here listened."""
        given = await self._of_fleet()
        for agent in agents:
            await self._take(agent, given.newest(agent), None)

    async def take_newest(self, agents: Sequence[BaseAgent], event: Event) -> None:
        """The fleet was given a config: take it, and run `on_config_update` if it is another one."""
        try:
            given = await while_unavailable(self._port, self._of_fleet)
        except StateError as error:
            for agent in agents:
                agent.agent_context.display.log(
                    "ERROR", "the fleet's new config cannot be read: the old one stays", {"error": str(error)}
                )
            return
        for agent in agents:
            await self._take(agent, given.newest(agent), event)

    async def reload(self, agent: BaseAgent) -> None:
        """Read the agent's config file again, and run `on_config_update` if it changed."""
        log = agent.agent_context.display.log
        try:
            changed = await self._port.thread(agent.agent_context.config.reload)
        except ConfigurationError as error:
            log("ERROR", "the config file is broken: the old config stays", {"error": str(error)})
            return
        log("INFO", "config file read", {"changed": sorted(changed)})
        await self._updated(agent, changed, None)

    async def watch(self, agents: Iterable[BaseAgent]) -> None:
        """Look whether the files changed, each after `watch_config` seconds, and reload those that did."""
        now = self._port.monotonic()
        for agent in agents:
            every = _WATCH_EVERY if agent.watch_config is None else agent.watch_config
            if every and now - self._watched.get(agent.name, 0.0) >= every:
                self._watched[agent.name] = now
                if await self._port.thread(agent.agent_context.config.touched):
                    await self.reload(agent)

    async def _of_fleet(self) -> Given:
        record = self._services.store.app(RECORD.id)
        # The version first: with that of a later look, a config that came in between would never be taken.
        version = await record.version(fresh=True)
        return Given(version, await record.get_all(fresh=True))

    async def _take(self, agent: BaseAgent, found: config.Spread | None, event: Event | None) -> None:
        if found is None:
            return
        try:
            changed = agent.agent_context.config.take(found)
        except ConfigurationError as error:
            agent.agent_context.display.log(
                "ERROR", "the fleet's new config is broken: the old one stays", {"error": str(error)}
            )
            return
        await self._updated(agent, changed, event)

    async def _updated(self, agent: BaseAgent, changed: set[str], event: Event | None) -> None:
        if changed:
            arguments = {"config": agent.config, "changed": changed}
            await self._runner.run(agent, "on_config_update", arguments, event)
