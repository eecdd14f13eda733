"""What an agent is on either face: its state, config, commands, figures. Law: state is where every replica finds it.

Design: section 12.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel

from distributed_state.agents import invocation
from distributed_state.agents.commands import Command, CommandArgument, Commands, Progress
from distributed_state.agents.context import AgentContext, AgentHost, StoreSource
from distributed_state.agents.defaults import Defaults, tolerant
from distributed_state.agents.display import Listener, LogLevel
from distributed_state.agents.hooks import Hooks
from distributed_state.agents.invocation import Invocation
from distributed_state.agents.status import Limits
from distributed_state.errors import CommandFailed, ConfigurationError, InvalidValue
from distributed_state.events import config as configs
from distributed_state.store.services import acting_by_default
from distributed_state.values.model import Ref
from distributed_state.values.results import Event

_LONGEST_NAME = 200


class BaseAgent(Hooks):
    """The base of `Agent` and `AsyncAgent`.

    `store` is a store, or a function that opens one, by default as the settings in the environment say; `name`, by
    default the class's, says whose replicas share the persistent state; `config` is a mapping or the path of a YAML or
    JSON file; `client` is the one whose conversation is the current one, "" follows what is no client's in particular.

    `ephemeral` is a dict of this process, `persistent` a record that all replicas of the agent share, `conversation`
    the session that a hook or command is about, elsewhere the one that the client is at. Whatever is written to these
    two is a commit: nothing has to be saved on a switch or at the end, and nothing loaded.
    """

    # What a subclass may set. A model that the config has to fit; without it any object will do.
    Config: ClassVar[type[BaseModel] | None] = None
    # Put in once for the fleet, and for a conversation again when it was cleared.
    persistent_defaults: Defaults = MappingProxyType({})
    conversation_defaults: Defaults = MappingProxyType({})
    pause_when_inactive: bool = False  # pause() when the last client leaves, resume() when one comes
    slow_hook: float = 0.1  # seconds; a hook that takes longer is logged
    stuck_hook: float = 10.0  # seconds; one that has not returned by then is logged while it runs
    shutdown_timeout: float = 20.0  # seconds that what runs gets to finish; what follows takes at most 15 more
    watch_config: float | None = None  # seconds between two looks at the file, 0 never; by default only without SIGHUP
    limits: Limits = Limits()  # beyond which a figure of the status is worth a warning

    def __init__(
        self,
        store: StoreSource,
        *,
        name: str | None,
        config: configs.Source | None,
        client: str,
        since: str | None,
    ) -> None:
        self.name = name or getattr(type(self), "name", "") or type(self).__name__
        for what, value in ("name", self.name), ("client", client):
            if not isinstance(value, str) or len(value) > _LONGEST_NAME:
                raise InvalidValue(f"{what} is a str of at most {_LONGEST_NAME} characters, not {value!r:.80}")
        settings = configs.Config(self.name, self._model(), config)
        self._context = AgentContext(self.name, store, settings, client, since)
        Ref("app", self._context.persistent_id)
        self._commands = Commands()
        self.ephemeral: dict[str, Any] = {}
        self.requests = self.errors = self.queue_size = 0
        self.active = False
        self.invocation_directory = ""

    @classmethod
    def _model(cls) -> type[BaseModel] | None:
        found = cls.Config
        if found is not None and not (isinstance(found, type) and issubclass(found, BaseModel)):
            raise ConfigurationError(f"{cls.__name__}.Config is a pydantic model class, not {found!r:.80}")
        return found

    @property
    def agent_context(self) -> AgentContext:
        """What the agent shares with the host that runs it; not for use in an agent's own code."""
        return self._context

    # State. Whether it is a blocking store's or an asyncio one's, only the subclass knows: so it is Any.

    @property
    def store(self) -> Any:
        """The store. Raises ConfigurationError while the agent has not opened it yet."""
        return self._context.open_store

    @property
    def persistent(self) -> Any:
        """The record of scope app that all replicas of this agent share, with `persistent_defaults`."""
        context = self._context
        return tolerant(context, context.open_store.app(context.persistent_id), self.persistent_defaults)

    @property
    def conversation(self) -> Any:
        """The session that this is about, None if there is none; for a deleted one its last state, to read.

        A field that cannot be read gives the default, with a warning in the log; the stored bytes are kept.
        """
        last_state = invocation.present().last_state
        if last_state is not None:
            return last_state
        id = self.conversation_id
        return tolerant(self._context, self._context.open_store.session(id), self.conversation_defaults) if id else None

    @property
    def conversation_id(self) -> str:
        """The id of that session, "" if there is none."""
        return invocation.present().conversation_id or self._context.conversation_id

    @property
    def client(self) -> str:
        """The client whose conversation is the current one."""
        return self._context.client

    def follow(self, client: str, conversation_id: str = "") -> None:
        """Let another client's conversation be the current one, and say which it is at now.

        For whoever serves a client by this process. Which events reach the agent's hooks does not change.
        """
        self._context.client = client
        self._context.conversation_id = conversation_id

    def get_invocation_directory(self) -> str:
        """The folder that the user works from whose command this is, else the client's; "" if it is not known."""
        return invocation.present().directory or self.invocation_directory

    def get_working_directory(self) -> str:
        """The folder that this process runs in."""
        return os.getcwd()

    async def _activate(self, client: str | None, conversation_id: str | None) -> Event:
        context = self._context
        with acting_by_default(context.persistent_id):
            return await context.services.store.activate_agent(
                self.name,
                client=context.client if client is None else client,
                conversation_id=self.conversation_id if conversation_id is None else conversation_id,
            )

    async def _change_directory(self, new_path: str, client: str | None) -> Event:
        context = self._context
        with acting_by_default(context.persistent_id):
            return await context.services.store.change_directory(
                new_path, client=context.client if client is None else client
            )

    @property
    def config(self) -> Any:
        """The config as it is now: a dict, or an instance of the class's model `Config`."""
        return self._context.config.value

    @property
    def position(self) -> str:
        """How far this replica is in the events, those whose hooks have run included, for `since=` of its next start.

        With `since` an agent runs the hooks of what it missed before anything new. After a crash the hooks of events
        since the position was saved run again. Raises ConfigurationError while the agent does not run.
        """
        return self._hosted().position

    # Background work

    @property
    def paused(self) -> bool:
        """Whether background work is to rest."""
        return self._context.paused

    def pause(self) -> None:
        """Let background work rest: `wait()` does not return until `resume()` or the end."""
        self._context.set_paused(True)

    def resume(self) -> None:
        """Let background work go on."""
        self._context.set_paused(False)

    @property
    def stopping(self) -> bool:
        """Whether the agent is to end: finish what is begun, and begin nothing."""
        host = self._context.host
        return host is not None and host.stopping

    def stop(self) -> None:
        """Let the agent end, from any thread. Returns at once."""
        host = self._context.host
        if host is not None:
            host.stop()

    async def _wait(self, seconds: float | None) -> bool:
        return await self._hosted().wait(self.name, seconds)

    def _hosted(self) -> AgentHost:
        return self._context.running_host

    # Commands

    def register_command(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        description: str = "",
        arguments: Iterable[CommandArgument] = (),
    ) -> None:
        """Offer a command. `function` gets what it names of its arguments, `args` (all as a dict) and `progress`.

        `progress(text, **fields)` reports how far it is. What it returns is any JSON value.
        """
        self._commands.register(Command(name, function, description, tuple(arguments)))
        self._context.display.show("commands", self._commands.to_list())

    async def _run_command(
        self,
        name: str,
        args: Mapping[str, Any] | None,
        conversation_id: str | None,
        directory: str,
        progress: Progress | None,
    ) -> Any:
        command = self._commands.find(name)
        values = command.read(args)
        if self.stopping:
            raise CommandFailed(f"{name}: the agent {self.name} is ending")

        self.requests += 1
        # A command that a hook calls belongs to that hook: what it deletes must not wait for the hook to end.
        runner = invocation.present().runner
        here = Invocation(runner, conversation_id or self.conversation_id, directory=directory)
        with self._context.invoke(here), self._context.command():
            try:
                return await command.run(self._context.services.port, values, progress)
            except Exception:
                self.errors += 1
                raise

    # What it shows

    @property
    def shown(self) -> dict[str, Any]:
        """What the replica's heartbeat says of the agent; `store.replicas()` lists it."""
        context = self._context
        status = context.last_status
        return {
            "name": self.name,
            "active": bool(self.active),
            "paused": context.paused,
            "status": status,
        } | self.visible

    @property
    def visible(self) -> dict[str, Any]:
        """All that the agent shows, as a dict of JSON values: description, system_prompt, sections, commands."""
        return self._context.display.visible

    @property
    def listeners(self) -> list[Listener]:
        """The functions called with each change, in whichever thread made it; append to it.

        A change is `("section", {...})` and the like, each line of the log, `("started", {})`, and `("event", {...})`
        when the hooks for an event have run.
        """
        return self._context.display.listeners

    def log(self, level: LogLevel | str | int, message: str, **fields: Any) -> None:
        """Log a line with fields, by the logger `distributed_state.agent.<name>`.

        `level` is a LogLevel or its name. The record has the attributes `agent` and `fields` for structured handlers.
        """
        self._context.display.log(level, message, fields)

    def set_system_prompt(self, prompt: str) -> None:
        """Show the system prompt by which a model is this agent."""
        self._context.display.show_text("system_prompt", prompt)

    def set_description(self, description: str) -> None:
        """Say in a sentence what the agent is for."""
        self._context.display.show_text("description", description)

    def register_section(self, id: str, title: str, content: str = "", *, collapsed: bool = False) -> None:
        """Add a section of text that users of the agent see, or replace the one of that id."""
        self._context.display.register_section(id, title, content, collapsed)

    def update_section(
        self, id: str, content: str | None = None, *, title: str | None = None, collapsed: bool | None = None
    ) -> None:
        """Change what a section shows. Raises NotFound if there is none of that id."""
        self._context.display.update_section(id, content, title, collapsed)

    def remove_section(self, id: str) -> None:
        """Take a section away. Raises NotFound if there is none of that id."""
        self._context.display.remove_section(id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"
