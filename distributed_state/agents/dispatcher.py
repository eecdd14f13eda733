"""What an event means to the agents of a process. Law: hooks run one after another, and none stops the next.

What concerns a client (which conversation it is at, which agent it talks to, its folder) reaches the agents that follow
this client, and those that follow none in particular. A client has one agent at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from distributed_state.agents.base_agent import BaseAgent, Scene, core, defaults_of, scene
from distributed_state.agents.deleted_state import AsyncLastState
from distributed_state.agents.hooks import call, is_defined
from distributed_state.errors import ConfigurationError, Deleted, StateError, Unavailable
from distributed_state.events import config
from distributed_state.port import Port
from distributed_state.records.context import context_of
from distributed_state.values.model import Ref
from distributed_state.values.results import Event

_TRIES = 3


class Hearing:
    """Runs the hooks of some agents."""

    def __init__(self, agents: Sequence[BaseAgent], dress_past: Any) -> None:
        self.agents = agents
        self._dress_past = dress_past
        self.running: tuple[float, str] | None = None  # since when which hook runs
        self._port: Port
        self._store: Any
        self._reached: dict[str, str] = {}
        self._deleting: set[str] = set()  # deleted by this replica: the hooks have run already
        self._meanings = {
            "conversation.created": self._created,
            "conversation.cleared": self._created,
            "conversation.switched": self._switched,
            "conversation.deleted": self._deleted,
            "session.expired": self._deleted,
            "agent.switched": self._chosen,
            "directory.changed": self._moved,
            "config.changed": self._configured,
            "resync": self._missed,
        }

    async def hear(self, event: Event) -> None:
        """Let the agents know of an event."""
        clock = self._store.tiers().clock
        await clock.know()
        lag = max(0.0, clock.now() - event.time)
        for agent in self.agents if event.time else ():
            agent._lag = lag
        meaning = self._meanings.get(event.type)
        if meaning is None or not await meaning(event):
            for agent in self.agents:
                await self.hook(agent, "on_event", {"event": event}, event, event.conversation_id)
        if event.partition >= 0:
            await self.reach(f"{event.partition}={event.epoch}@{event.sequence}")
        told = {"id": event.id, "type": event.type, "conversation_id": event.conversation_id, "version": event.version}
        for agent in self.agents:
            agent._tell("event", told)

    async def reach(self, position: str) -> None:
        """The hooks of what is before this position, of some partitions or all, have run."""
        for each in position.split(","):
            partition, _, at = each.partition("=")
            if at:
                self._reached[partition] = at

    @property
    def position(self) -> str:
        """How far the hooks are, as `since=` takes it."""
        return ",".join(f"{partition}={at}" for partition, at in self._reached.items()) or "oldest"

    async def hook(
        self,
        agent: BaseAgent,
        name: str,
        given: Mapping[str, Any],
        event: Event | None = None,
        conversation_id: str = "",
        past: Any = None,
    ) -> None:
        """Run one hook, if the agent has it. What it raises is logged and counted.

        The event does not come again: a hook that found a server away is run once more, and the events behind it wait.
        """
        if not is_defined(agent, name):
            return
        about = {} if event is None else {"event": event.type, "event_id": event.id, "subject": event.subject}
        about = {"hook": name, **about}
        began = self._port.monotonic()
        self.running = (began, f"{agent.name}.{name}")
        agent.requests += 1
        try:
            tries = _TRIES if event is not None or conversation_id else 1
            for attempt in range(1, tries + 1):
                try:
                    with agent._on(Scene(self, conversation_id, past)):
                        await call(self._port, getattr(agent, name), given)
                    break
                except Unavailable as error:
                    if attempt == tries:
                        raise
                    agent._log("WARNING", "a hook is run again", about | {"error": f"{type(error).__name__}: {error}"})
                    await self._port.sleep(0.1 * attempt)
        except Exception as error:  # noqa: BLE001 - the next hook is nobody's fault
            agent.errors += 1
            agent._log("ERROR", "a hook failed", about | {"error": f"{type(error).__name__}: {error}"}, error)
        finally:
            self.running = None
            took = self._port.monotonic() - began
            if took > agent.slow_hook:
                agent._log("WARNING", "a slow hook holds up the others", about | {"seconds": round(took, 3)})

    async def begin(self, agent: BaseAgent, name: str) -> None:
        """Run a hook that the beginning depends on: what it raises ends that."""
        self.running = (self._port.monotonic(), f"{agent.name}.{name}")
        try:
            with agent._on(Scene(self)):
                await call(self._port, getattr(agent, name), {})
        finally:
            self.running = None

    def in_a_hook(self) -> bool:
        """Whether the caller is a hook of these agents."""
        now = scene.get()
        return now is not None and now.host is self

    # Conversations

    async def _created(self, event: Event) -> bool:
        id = event.conversation_id
        if not id:
            return False
        self._deleting.discard(id)
        given = {
            "conversation_id": id,
            "is_clear": event.type == "conversation.cleared" or event.data.get("is_clear") is True,
        }
        for agent in self.agents:
            agent._know(id)
            if _follows(agent, event):
                agent._current = id
            await self._defaults(agent, id)
            await self.hook(agent, "on_new_conversation", given, event, id)
        return True

    async def _switched(self, event: Event) -> bool:
        id = event.conversation_id
        if not id:
            return False
        previous = _text(event, "previous_id")
        count = event.data.get("message_count")
        given = {"conversation_id": id, "previous_id": previous, "message_count": count if type(count) is int else 0}
        for agent in self._concerned(event):
            agent._know(id)
            if _follows(agent, event):
                agent._current = id
            await self._defaults(agent, id)
            await self.hook(agent, "on_conversation_switched", given, event, id)
        return True

    async def _deleted(self, event: Event) -> bool:
        id = event.conversation_id
        if not id:
            return False
        ours = id in self._deleting and event.source == self._store.replica
        for agent in self.agents:
            if not ours:
                twin = core(agent._session(id))
                # The tombstone is the last version; what it took away is the one before.
                warn = partial(agent._unreadable, text=event.subject, field="*")
                past = AsyncLastState(twin, event.version - 1, warn)
                given = {"conversation_id": id}
                await self.hook(agent, "on_conversation_deleted", given, event, id, self._dress_past(past))
            agent._conversations.pop(id, None)
            if agent._current == id:
                agent._current = ""
        self._deleting.discard(id)
        ref = Ref("session", id)
        self._store.ephemeral.drop(ref.text)
        self._store.session(id).invalidate()
        return True

    async def deleting(self, ref: Ref) -> None:
        """This replica is about to delete a record: the hooks that have to come first."""
        self._deleting.add(ref.id)
        for agent in self.agents:
            await self.hook(agent, "on_conversation_deleted", {"conversation_id": ref.id}, None, ref.id)

    async def _defaults(self, agent: BaseAgent, id: str) -> None:
        for attempt in range(1, _TRIES + 1):
            try:
                await agent._set_defaults(agent._session(id), defaults_of(agent)[1])
                return
            except Deleted:
                return  # meanwhile
            except Unavailable as error:
                if attempt == _TRIES:
                    agent._log("ERROR", "no defaults were set", {"conversation": id, "error": str(error)})
                    return
                await self._port.sleep(0.1 * attempt)
            except Exception as error:  # noqa: BLE001 - a function of the agent's
                agent._log("ERROR", "no defaults were set", {"conversation": id}, error)
                return

    # Agents and folders

    async def _chosen(self, event: Event) -> bool:
        before = event.data.get("previous_agent")
        after = event.data.get("next_agent")
        client, id, meant = (_text(event, name) for name in ("client", "conversation_id", "agent"))
        concerned = [agent for agent in self._concerned(event) if meant in ("", agent.name)]
        # A client has one agent, and who told of the switch need not know which: whoever it had here is named too.
        had = [agent.name for agent in concerned if client in agent._active_for and agent.name != after]
        before = before or next(iter(had), before)
        for agent in concerned:
            if id and _follows(agent, event):
                agent._current = id
            if agent.name in (before, *had) and agent.name != after:
                agent._active_for.discard(client)
                agent.active = bool(agent._active_for)
                if agent.pause_when_inactive and not agent.active:
                    agent.pause()
                await self.hook(agent, "on_agent_deactivated", {"next_agent": after}, event, id)
        for agent in concerned:
            if agent.name == after:
                agent._active_for.add(client)
                agent.active = True
                if agent.pause_when_inactive:
                    agent.resume()
                given = {"previous_agent": before, "conversation_id": id}
                await self.hook(agent, "on_agent_activated", given, event, id)
        return True

    async def _moved(self, event: Event) -> bool:
        given = {"old_path": _text(event, "old_path"), "new_path": _text(event, "new_path")}
        for agent in self._concerned(event):
            if not agent._client or _follows(agent, event):
                agent.invocation_directory = given["new_path"]
            await self.hook(agent, "on_invocation_directory_changed", given, event)
        return True

    def _concerned(self, event: Event) -> list[BaseAgent]:
        return [agent for agent in self.agents if not agent._of_client or _follows(agent, event)]

    # Config

    async def _configured(self, event: Event) -> bool:
        name = event.data.get("agent", "")
        if event.subject != Ref("app", config.RECORD).text:
            return False
        for agent in self.agents:
            if name in ("", agent.name):
                await self._take_newest(agent, event)
        return True

    async def _take_newest(self, agent: BaseAgent, event: Event) -> None:
        for attempt in range(1, _TRIES + 1):
            try:
                spread = await self.spread(agent)
            except StateError as error:
                if attempt == _TRIES or not isinstance(error, Unavailable):
                    agent._log(
                        "ERROR", "the fleet's new config cannot be read: the old one stays", {"error": str(error)}
                    )
                    return
                await self._port.sleep(0.1 * attempt)
                continue
            if spread is not None:
                await self._take(agent, spread, event)
            return

    async def _take(self, agent: BaseAgent, spread: config.Spread, event: Event | None) -> None:
        try:
            changed = agent._config.take(spread)
        except ConfigurationError as error:
            agent._log("ERROR", "the fleet's new config is broken: the old one stays", {"error": str(error)})
            return
        await self._config_update(agent, changed, event)

    async def _config_update(self, agent: BaseAgent, changed: set[str], event: Event | None = None) -> None:
        if changed:
            given = {"config": agent.config, "changed": changed}
            await self.hook(agent, "on_config_update", given, event)

    async def reload(self, agent: BaseAgent) -> None:
        """Read the agent's config file again."""
        try:
            changed = await self._port.thread(agent._config.reload)
        except ConfigurationError as error:
            agent._log("ERROR", "the config file is broken: the old config stays", {"error": str(error)})
            return
        agent._log("INFO", "config file read", {"changed": sorted(changed)})
        await self._config_update(agent, changed)

    async def spread(self, agent: BaseAgent) -> config.Spread | None:
        """The config that the fleet was given last, for this agent."""
        record = context_of(self._store.app(config.RECORD))
        # One look: with the version of a later one, what came in between would never be taken.
        entry = await record.read(fresh=True)
        return config.newest(record.fields(entry), agent.name, entry.version)

    async def catch_up(self) -> None:
        """Take a config that was given to the fleet while nobody here heard."""
        for agent in self.agents:
            spread = await self.spread(agent)
            if spread is not None:
                await self._take(agent, spread, None)

    async def _missed(self, event: Event) -> bool:
        try:
            await self.catch_up()
            for agent in self.agents:
                if agent._current:
                    session = core(agent._session(agent._current))
                    session.invalidate()
                    if not await session.exists(fresh=True):
                        agent._current = ""
        except StateError as error:
            for agent in self.agents:
                agent._log("ERROR", "not everything could be read anew", {"error": str(error)})
        for agent in self.agents:
            await self.hook(agent, "on_resync", {"event": event}, event)
        return True


def _follows(agent: BaseAgent, event: Event) -> bool:
    """Whether this is of the client whose conversation is the agent's current one."""
    return agent._client == _text(event, "client")


def _text(event: Event, name: str) -> str:
    found = event.data.get(name)
    return found if isinstance(found, str) else ""
