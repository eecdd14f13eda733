"""Runs the hooks of a process's agents for events, and updates their configs.

Law: a failed hook does not stop the next.

Events about a client (its conversation, its agent, its folder) reach the agents that follow this client, and those that
follow no particular client. A client has one agent at a time.

A config comes from the agent's file or from the fleet; an invalid one never replaces a valid one. The fleet's config is
read from its record, never from the event, which only announces a change.

Design: section 12.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed_state.agents.agent import BaseAgent
from distributed_state.agents.blocking_deleted_state import LastState
from distributed_state.agents.deleted_state import AsyncLastState
from distributed_state.agents.worker import HookRunner, while_unavailable
from distributed_state.conversation.session import AsyncSession
from distributed_state.errors import ConfigurationError, StateError
from distributed_state.events import config
from distributed_state.port.background import HAS_RELOAD
from distributed_state.records.context import context_of
from distributed_state.results import Event
from distributed_state.store.services import StoreServices
from distributed_state.values.model import Ref

RECORD = Ref("app", config.RECORD)
_WATCH_EVERY = 0.0 if HAS_RELOAD else 5.0  # the default: with SIGHUP the file need not be polled


class Dispatcher:
    """Runs the hooks for an event, and updates the contexts of the agents: each client's conversation and agent."""

    def __init__(
        self, agents: Sequence[BaseAgent], services: StoreServices, runner: HookRunner, configs: ConfigUpdates
    ) -> None:
        self._agents = agents
        self._services = services
        self._port = services.port
        self._runner = runner
        self._configs = configs
        self._reached: dict[str, str] = {}  # by partition
        self._deleting: set[str] = set()  # conversations that this replica deletes, whose hooks have already run
        self._handlers = {
            "conversation.created": self._created,
            "conversation.cleared": self._created,
            "conversation.switched": self._switched,
            "conversation.deleted": self._deleted,
            "session.expired": self._deleted,
            "agent.switched": self._agent_switched,
            "directory.changed": self._directory_changed,
            "config.changed": self._config_changed,
            "resync": self._missed_events,
        }

    async def dispatch(self, event: Event) -> None:
        """Run the agents' hooks for an event, or `on_event` if its type has no hook of its own."""
        lag = max(0.0, await self._services.store.time() - event.time)
        for agent in self._agents if event.time else ():
            agent.agent_context.lag = lag
        handler = self._handlers.get(event.type)
        if handler is None or not await handler(event):
            for agent in self._agents:
                await self._runner.run(agent, "on_event", {"event": event}, event, event.conversation_id)
        if event.partition >= 0:
            await self.reach(f"{event.partition}={event.epoch}@{event.sequence}")
        done = {"id": event.id, "type": event.type, "conversation_id": event.conversation_id, "version": event.version}
        for agent in self._agents:
            agent.agent_context.display.notify("event", done)

    async def reach(self, position: str) -> None:
        """Note that the hooks of all events before this position, in some or all partitions, have run."""
        for each in position.split(","):
            partition, _, at = each.partition("=")
            if at:
                self._reached[partition] = at

    @property
    def position(self) -> str:
        """The position after the last event whose hooks have run, for `since=`."""
        return ",".join(f"{partition}={at}" for partition, at in self._reached.items()) or "oldest"

    # Conversations

    async def _created(self, event: Event) -> bool:
        id = event.conversation_id
        if not id:
            return False
        self._deleting.discard(id)
        is_clear = event.type == "conversation.cleared" or event.data.get("is_clear") is True
        arguments = {"conversation_id": id, "is_clear": is_clear}
        for agent in self._agents:
            await self._arrive(agent, event, id)
            await self._runner.run(agent, "on_new_conversation", arguments, event, id)
        return True

    async def _switched(self, event: Event) -> bool:
        id = event.conversation_id
        if not id:
            return False
        count = event.data.get("message_count")
        arguments = {
            "conversation_id": id,
            "previous_id": _text(event, "previous_id"),
            "message_count": count if type(count) is int else 0,
        }
        for agent in self._concerned(event):
            await self._arrive(agent, event, id)
            await self._runner.run(agent, "on_conversation_switched", arguments, event, id)
        return True

    async def _arrive(self, agent: BaseAgent, event: Event, id: str) -> None:
        """Note that a client is in this conversation now, and give the conversation the agent's defaults."""
        agent.agent_context.count_conversation(id)
        if _follows(agent, event):
            agent.agent_context.conversation_id = id
        record = self._services.store.session(id)
        context_of(record).begins_again = False  # it may have expired since the event
        wanted = agent.conversation_defaults
        with agent.agent_context.logging_missing_defaults(id):
            await while_unavailable(self._port, partial(agent.agent_context.put_in_defaults, record, wanted))

    async def _is_there(self, agent: BaseAgent, id: str) -> bool:
        with agent.agent_context.logging_missing_defaults(id):
            return await self._services.store.session(id).exists()
        return False

    async def _deleted(self, event: Event) -> bool:
        id = event.conversation_id
        if not id:
            return False
        session = self._services.store.session(id)
        ours = id in self._deleting and event.source == self._services.store.replica
        for agent in self._agents:
            if not ours:
                last_state = self._last_state(agent, event, session)
                arguments = {"conversation_id": id}
                await self._runner.run(agent, "on_conversation_deleted", arguments, event, id, last_state)
            agent.agent_context.forget_conversation(id)
        self._deleting.discard(id)
        self._services.forget_record(session)
        return True

    def _last_state(self, agent: BaseAgent, event: Event, session: AsyncSession) -> AsyncLastState | LastState:
        warn = partial(agent.agent_context.log_unreadable, record=event.subject, field="*")
        # The last version is the tombstone, the version before it the deleted state.
        found = AsyncLastState(session, event.version - 1, warn)
        return found if self._port.suspends else LastState(found)

    async def before_deletion(self, ref: Ref) -> None:
        """Run the hooks before this replica deletes a conversation, while its data still exists."""
        self._deleting.add(ref.id)
        for agent in self._agents:
            await self._runner.run(agent, "on_conversation_deleted", {"conversation_id": ref.id}, None, ref.id)

    # Agents and folders

    async def _agent_switched(self, event: Event) -> bool:
        before = event.data.get("previous_agent")
        after = event.data.get("next_agent")
        client = _text(event, "client")
        id = _text(event, "conversation_id")
        meant = _text(event, "agent")
        concerned = [agent for agent in self._concerned(event) if meant in ("", agent.agent_context.name)]
        # A client has one agent. The publisher of a switch may not know the previous one, so the one known here is
        # named.
        contexts = [agent.agent_context for agent in concerned]
        had = [context.name for context in contexts if client in context.active_for and context.name != after]
        before = before or next(iter(had), before)
        for agent, context in zip(concerned, contexts, strict=True):
            if id and _follows(agent, event):
                context.conversation_id = id
            if context.name in (before, *had) and context.name != after:
                context.active_for.discard(client)
                agent.active = bool(context.active_for)
                if agent.pause_when_inactive and not agent.active:
                    context.set_paused(True)
                await self._runner.run(agent, "on_agent_deactivated", {"next_agent": after}, event, id)
        for agent, context in zip(concerned, contexts, strict=True):
            if context.name == after:
                context.active_for.add(client)
                agent.active = True
                if id and await self._is_there(agent, id):
                    await self._arrive(agent, event, id)
                arguments = {"previous_agent": before, "conversation_id": id}
                await self._runner.run(agent, "on_agent_activated", arguments, event, id)
                if agent.pause_when_inactive:
                    # After the hook, which may check `self.paused` to resume its own background work.
                    context.set_paused(False)
        return True

    async def _directory_changed(self, event: Event) -> bool:
        arguments = {"old_path": _text(event, "old_path"), "new_path": _text(event, "new_path")}
        for agent in self._concerned(event):
            if not agent.agent_context.client or _follows(agent, event):
                agent.invocation_directory = arguments["new_path"]
            await self._runner.run(agent, "on_invocation_directory_changed", arguments, event)
        return True

    def _concerned(self, event: Event) -> list[BaseAgent]:
        """The agents that an event about a client reaches."""
        return [agent for agent in self._agents if not agent.agent_context.subscribed_client or _follows(agent, event)]

    # Config, and missed events

    async def _config_changed(self, event: Event) -> bool:
        name = event.data.get("agent", "")
        if event.subject != RECORD.text:
            return False
        concerned = [agent for agent in self._agents if name in ("", agent.agent_context.name)]
        if concerned:
            await self._configs.take_newest(concerned, event)
        return True

    async def _missed_events(self, event: Event) -> bool:
        try:
            await self._configs.catch_up(self._agents)
            for agent in self._agents:
                await self._check_conversation(agent)
        except StateError as error:
            for agent in self._agents:
                agent.agent_context.display.log("ERROR", "not everything could be read again", {"error": str(error)})
        for agent in self._agents:
            await self._runner.run(agent, "on_resync", {"event": event}, event)
        return True

    async def _check_conversation(self, agent: BaseAgent) -> None:
        """Reread the current conversation after missed events: it may have been changed or deleted."""
        id = agent.agent_context.conversation_id
        if id:
            session = self._services.store.session(id)
            if not await session.exists(fresh=True):
                agent.agent_context.conversation_id = ""


def _follows(agent: BaseAgent, event: Event) -> bool:
    """Whether the event is about the client whose conversation is the agent's current one."""
    return agent.agent_context.client == _text(event, "client")


def _text(event: Event, name: str) -> str:
    found = event.data.get(name)
    return found if isinstance(found, str) else ""


class ConfigUpdates:
    """The configs of the agents of one host."""

    def __init__(self, services: StoreServices, runner: HookRunner) -> None:
        self._services = services
        self._port = services.port
        self._runner = runner
        self._watched: dict[str, float] = {}  # when each agent's file was last checked

    async def begin(self, agents: Iterable[BaseAgent]) -> None:
        """Take the newer config of file and fleet. Raises ConfigurationError if neither is valid."""
        given = await self._of_fleet()
        for agent in agents:
            agent.agent_context.config.begin(given.newest(agent))

    async def catch_up(self, agents: Iterable[BaseAgent]) -> None:
        """Take a config that the fleet received while this process was not listening."""
        given = await self._of_fleet()
        for agent in agents:
            await self._take(agent, given.newest(agent), None)

    async def take_newest(self, agents: Sequence[BaseAgent], event: Event) -> None:
        """Take the fleet's new config, and run `on_config_update` if it differs."""
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
        if not agent.agent_context.config.has_file:
            log("WARNING", "no config file to read again: the agent was started without one", {})
            return
        try:
            changed = await self._port.thread(agent.agent_context.config.reload)
        except ConfigurationError as error:
            log("ERROR", "the config file is broken: the old config stays", {"error": str(error)})
            return
        log("INFO", "config file read", {"changed": sorted(changed)})
        await self._updated(agent, changed, None)

    async def watch(self, agents: Iterable[BaseAgent]) -> None:
        """Check each file every `watch_config` seconds, and reload those that changed."""
        now = self._port.monotonic()
        for agent in agents:
            every = _WATCH_EVERY if agent.watch_config is None else agent.watch_config
            if every and now - self._watched.get(agent.agent_context.name, 0.0) >= every:
                self._watched[agent.agent_context.name] = now
                if await self._port.thread(agent.agent_context.config.touched):
                    await self.reload(agent)

    async def _of_fleet(self) -> Given:
        record = self._services.store.app(RECORD.id)
        # Read the version before the config: otherwise a config that is set in between would never be taken.
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


@dataclass(frozen=True, slots=True)
class Given:
    """The fleet's configs, for all agents and for single ones, at a version of the record."""

    version: int
    fields: Mapping[str, Any]

    def newest(self, agent: BaseAgent) -> config.Spread | None:
        """The newest config for this agent, set by its name or for all agents."""
        return config.newest(self.fields, agent.agent_context.name, self.version)
