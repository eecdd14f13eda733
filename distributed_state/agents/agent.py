"""The agent, common to the sync and the asyncio API: the interface for its author, and the one for its host.

Authors subclass `BaseAgent`, so everything that the host, dispatcher and worker keep about an agent is in a separate
object, its `AgentContext`; a subclass cannot overwrite it by accident. `Invocation` describes the running hook or
command. Law: state that replicas share is in the store; state of this process is in the context.

Design: section 12.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel

from distributed_state.agents.blocking_deleted_state import LastState
from distributed_state.agents.deleted_state import AsyncLastState
from distributed_state.agents.display import Display, Limits, Listener, LogLevel, Status
from distributed_state.agents.hooks import Command, CommandArgument, Commands, Hooks, Progress, call, exposures, plain
from distributed_state.errors import CommandFailed, ConfigurationError, CorruptState, Deleted, InvalidValue, StateError
from distributed_state.events import config as configs
from distributed_state.events.config import Config
from distributed_state.port import Mutex
from distributed_state.records.record import AsyncRecord
from distributed_state.results import Event
from distributed_state.store.services import Handle, Store, StoreServices, acting_by_default, with_stand_in
from distributed_state.values.model import Ref

# A store, or a function that opens one.
StoreSource = Store | Callable[[], Store | Awaitable[Store]]
# A mapping, or a function that returns one and may take the record's id.
Defaults = Mapping[str, Any] | Callable[..., Any]
_LONGEST_NAME = 200


class BaseAgent(Hooks):
    """The base of `Agent` and `AsyncAgent`.

    `store` is a store or a function that opens one; by default the agent opens one from the environment's settings.
    Replicas with the same `name`, by default the class's, share the persistent state. `config` is a mapping or the path
    of a YAML or JSON file. The agent follows the current conversation of `client`; "" means events without a client.

    `ephemeral` is a dict of this process and `persistent` a record that all replicas of the agent share. `conversation`
    is the session that a hook or command is about; elsewhere it is the client's current one. Every write to
    `persistent` and `conversation` is a commit, so nothing has to be saved or loaded when the conversation changes or
    the agent ends.
    """

    # A subclass may set these. Config is a pydantic model for the config; without it any object is valid.
    Config: ClassVar[type[BaseModel] | None] = None
    # Default values, set once for the fleet; a cleared conversation gets them again.
    persistent_defaults: Defaults = MappingProxyType({})
    conversation_defaults: Defaults = MappingProxyType({})
    pause_when_inactive: bool = False  # pause() when the last client leaves, resume() when one activates the agent
    slow_hook: float = 0.1  # seconds; a hook that takes longer is logged
    stuck_hook: float = 10.0  # seconds; a hook that has not returned by then is logged while it runs
    shutdown_timeout: float = 20.0  # seconds for running work to finish; later steps take at most 15 more
    watch_config: float | None = None  # seconds between checks of the file, 0: never; None: if SIGHUP is missing
    limits: Limits = Limits()  # the status warns of figures beyond these

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
        settings = configs.Config(self.name, _model(type(self)), config)
        self.__context = AgentContext(self.name, store, settings, client, since)
        Ref("app", self.__context.persistent_id)
        self.ephemeral: dict[str, Any] = {}
        self.queue_size = 0
        self.active = False
        self.invocation_directory = ""

    @property
    def agent_context(self) -> AgentContext:
        """The state that the agent shares with its host; not for the code of agents."""
        return self.__context

    # State. The types are Any because only the subclass knows whether its store is blocking or asyncio.

    @property
    def store(self) -> Any:
        """The store. Raises ConfigurationError if the agent has not opened it yet."""
        return self.__context.open_store

    @property
    def persistent(self) -> Any:
        """The record of scope app that all replicas of this agent share, with `persistent_defaults`."""
        context = self.__context
        return context.with_defaults(context.open_store.app(context.persistent_id), self.persistent_defaults)

    @property
    def conversation(self) -> Any:
        """The session that the hook or command is about, None without one; if deleted, its last state, read-only.

        A field that cannot be read gives the default, with a warning in the log; the stored bytes are kept.
        """
        last_state = present().last_state
        if last_state is not None:
            return last_state
        id = self.conversation_id
        context = self.__context
        return context.with_defaults(context.open_store.session(id), self.conversation_defaults) if id else None

    @property
    def conversation_id(self) -> str:
        """The id of the session in `conversation`, "" without one."""
        return self.__context.present_conversation

    @property
    def client(self) -> str:
        """The client whose conversation is the current one."""
        return self.__context.client

    def follow(self, client: str, conversation_id: str = "") -> None:
        """Follow another client, whose current conversation is `conversation_id`.

        For programs that serve a client from this process. The choice of events for the agent's hooks does not change.
        """
        self.__context.follow(client, conversation_id)

    def get_invocation_directory(self) -> str:
        """The working folder of the user who ran this command, else the client's; "" if unknown."""
        return present().directory or self.invocation_directory

    def get_working_directory(self) -> str:
        """The folder that this process runs in."""
        return os.getcwd()

    @property
    def config(self) -> Any:
        """The current config: a dict, or an instance of the class's model `Config`."""
        return self.__context.config.value

    @property
    def position(self) -> str:
        """The position after the last event whose hooks have run, for `since=` of the next start.

        An agent that starts with `since` first runs the hooks of the events that it missed. After a crash, the hooks of
        events after the saved position run again. Raises ConfigurationError while the agent is not running.
        """
        return self.__context.running_host.position

    # Background work

    @property
    def paused(self) -> bool:
        """Whether background work is paused; setting it is the same as `pause()` or `resume()`."""
        return self.__context.paused

    @paused.setter
    def paused(self, wanted: bool) -> None:
        self.__context.set_paused(bool(wanted))

    def pause(self) -> None:
        """Pause background work: `wait()` does not return until `resume()` or the end."""
        self.__context.set_paused(True)

    def resume(self) -> None:
        """Continue background work."""
        self.__context.set_paused(False)

    @property
    def stopping(self) -> bool:
        """Whether the agent is stopping: finish the work in progress, and start nothing new."""
        return self.__context.stopping

    def stop(self) -> None:
        """Stop the agent. Returns at once; may be called from any thread."""
        self.__context.stop()

    # Commands

    def register_command(
        self,
        name: str,
        handler: Callable[..., Any],
        *,
        description: str | None = "",
        arguments: Iterable[CommandArgument | Mapping[str, Any]] | None = (),
        async_enabled: bool = False,
        title: str | None = "",
        expose_as: str | Iterable[str] | None = None,
        slash_command: str | None = "",
        slash_scope: str | None = "",
        argument_hint: str | None = "",
        argument_required: bool = False,
        progress_label: str | None = "",
        hidden: bool = False,
    ) -> None:
        """Offer a command.

        `handler` receives those of its arguments, `args` (a dict) and `progress` that it has parameters for.

        `args` has all arguments; `progress(text, **fields)` reports progress. The handler returns any JSON value.
        Under an Opperator daemon, commands run one after another, in order with the daemon's events; a command that is
        `async_enabled` runs beside them. The other options are shown to users of the agent: a title; `expose_as`,
        "agent_tool", "slash_command" or both; the name and scope of the slash command, "local" or "global"; and so on.
        """
        shown = {
            "async_enabled": bool(async_enabled),
            "title": title,
            "expose_as": exposures(name, expose_as),
            "slash_command": slash_command,
            "slash_scope": plain(slash_scope),
            "argument_hint": argument_hint,
            "argument_required": bool(argument_required),
            "progress_label": progress_label,
            "hidden": bool(hidden),
        }
        described = tuple(
            each if isinstance(each, CommandArgument) else CommandArgument(**each) for each in arguments or ()
        )
        given = {option: value for option, value in shown.items() if value}
        self.__context.commands.register(Command(name, handler, description or "", described, given))
        self.__context.display.show("commands", self.__context.commands.to_list())

    def unregister_command(self, name: str) -> bool:
        """Withdraw a command. Returns False, and logs a warning, if there is none with that name."""
        if not self.__context.commands.remove(name):
            self.log(LogLevel.WARNING, "no such command to withdraw", command=name)
            return False
        self.__context.display.show("commands", self.__context.commands.to_list())
        return True

    def report_progress(
        self,
        text: str = "",
        *,
        metadata: Mapping[str, Any] | None = None,
        status: str = "",
        progress: float | None = None,
    ) -> None:
        """Report the progress of the command that calls this; elsewhere it does nothing."""
        report = present().progress
        if report is not None:
            more = {"status": status or None, "progress": progress}
            report(text or "", dict(metadata or {}) | {name: each for name, each in more.items() if each is not None})

    # Display

    @property
    def shown(self) -> dict[str, Any]:
        """The agent's part of the replica's heartbeat; `store.admin.replicas()` lists it."""
        context = self.__context
        status = context.last_status
        return {
            "name": self.__context.name,
            "active": bool(self.active),
            "paused": context.paused,
            "status": status,
        } | self.visible

    @property
    def visible(self) -> dict[str, Any]:
        """The agent's display as a dict of JSON values: description, system_prompt, sections, commands."""
        return self.__context.display.visible

    @property
    def listeners(self) -> list[Listener]:
        """Functions that are called with each change, in the thread that makes it; append yours to the list.

        A change is a pair like `("section", {...})`: a change of the display, a line of the log, `("started", {})`, or
        `("event", {...})` after the hooks for an event have run.
        """
        return self.__context.display.listeners

    def log(self, level: LogLevel | str | int, message: str, **fields: Any) -> None:
        """Log a line with fields, to the logger `distributed_state.agent.<name>`.

        `level` is a LogLevel or its name. The record has the attributes `agent` and `fields` for structured handlers.
        """
        self.__context.display.log(level, message, fields)

    def set_system_prompt(self, prompt: str | None, *, replace: bool = False) -> None:
        """Display the system prompt with which a model acts as this agent; with `replace` it is the only one."""
        self.__context.display.show_system_prompt("" if prompt is None else prompt, replace)

    def set_description(self, description: str | None) -> None:
        """Set a one-sentence description of the agent."""
        self.__context.display.show_description("" if description is None else description)

    def register_section(self, section_id: str, title: str, content: str = "", collapsed: bool = False) -> None:
        """Add a section of text that users of the agent see, or replace the one with that id."""
        self.__context.display.register_section(section_id, title, content, collapsed)

    def update_section(
        self, section_id: str, content: str | None = None, *, title: str | None = None, collapsed: bool | None = None
    ) -> None:
        """Change a section, or add one; the title of a new one is its id unless given."""
        self.__context.display.update_section(section_id, content, title, collapsed)

    def unregister_section(self, section_id: str) -> bool:
        """Remove a section. Returns False, and logs a warning, if there is none with that id."""
        return self.__context.display.remove_section(section_id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class AgentHost(Protocol):
    """The interface of an agent to its host, a HostRun. `agent` is the agent's name."""

    @property
    def stopping(self) -> bool:
        """Whether its agents are stopping."""
        ...

    @property
    def working(self) -> bool:
        """Whether hooks run, or events wait for them."""
        ...

    @property
    def position(self) -> str:
        """The position after the last event whose hooks have run, for `since=`."""
        ...

    def stop(self) -> None:
        """Stop the agents; may be called from any thread."""
        ...

    def wake(self, agent: str) -> None:
        """Wake the agent's `wait` to check its conditions again."""
        ...

    async def wait(self, agent: str, seconds: float | None) -> bool:
        """Wait `seconds`, and longer while the agent is paused; False as soon as the agent is stopping."""
        ...

    async def status(self, agent: str) -> Status:
        """The agent's status."""
        ...

    async def reload(self, agent: str) -> None:
        """Read the agent's config file again."""
        ...

    async def close(self, error: BaseException | None) -> None:
        """End the agents; raise the exception of a failed `main_loop`, unless `error` is already being raised."""
        ...


_COUNTED = 100_000  # conversations


class AgentContext:
    """One agent in this process: its store, config and display, the client it follows, and its figures."""

    def __init__(self, name: str, source: StoreSource, config: Config, client: str, since: str | None) -> None:
        self.name = name
        self.persistent_id = (
            f"agent:{name}"  # the id of the record that its replicas share, and the actor of its changes
        )
        self.source = source
        self.since = since
        self.config = config
        self.display = Display(name)
        self.store: Store | None = None if callable(source) else source
        self.host: AgentHost | None = None
        self.subscribed_client = client  # only this client's events reach the agent; "" for all clients
        self.client = client  # the client whose conversation is the current one
        self.conversation_id = ""
        self.active_for: set[str] = set()  # the clients that chose this agent
        self.paused = False
        self.lag = 0.0
        self.began = 0.0
        self.last_status: dict[str, Any] | None = None
        self.commands = Commands()
        self.requests = self.errors = 0  # commands and hooks that ran, and that failed
        self._conversations: dict[str, None] = {}
        self._mutex = Mutex()
        self._running_commands = 0

    # Its host

    def begin(self, host: AgentHost, store: Store) -> None:
        """Note that a host starts running the agent on this store."""
        self.store = store
        self.host = host
        self.began = StoreServices(store).port.monotonic()

    def end(self) -> None:
        """Note that the host has ended.

        A store that was opened for the run is dropped; a store that the user opened is kept.
        """
        self.host = None
        if callable(self.source):
            self.store = None

    @property
    def open_store(self) -> Store:
        """The store. Raises ConfigurationError if the agent has not opened it yet."""
        if self.store is None:
            raise ConfigurationError(f"agent {self.name}: is not running, and opens its store only when it runs")
        return self.store

    @property
    def services(self) -> StoreServices:
        """The asyncio store that underlies the agent's store, and its port."""
        return StoreServices(self.open_store)

    @property
    def running_host(self) -> AgentHost:
        """The host that runs the agent. Raises ConfigurationError while the agent is not running."""
        if self.host is None:
            raise ConfigurationError(f"agent {self.name} is not running; enter it or call run()")
        return self.host

    @property
    def stopping(self) -> bool:
        """Whether the host is stopping."""
        return self.host is not None and self.host.stopping

    def stop(self) -> None:
        """Stop the host, if one runs the agent; may be called from any thread."""
        if self.host is not None:
            self.host.stop()

    def wake(self) -> None:
        """Wake the waits for a change of this agent."""
        if self.host is not None:
            self.host.wake(self.name)

    # Its client

    def follow(self, client: str, conversation_id: str) -> None:
        """Follow another client, whose current conversation is `conversation_id`."""
        self.client = client
        self.conversation_id = conversation_id

    @property
    def present_conversation(self) -> str:
        """The conversation of the running hook or command, else the client's current one; "" without one."""
        return present().conversation_id or self.conversation_id

    async def activate(self, client: str | None, conversation_id: str | None) -> Event:
        """Publish that a client, by default the agent's own, uses this agent."""
        with acting_by_default(self.persistent_id):
            return await self.services.store.activate_agent(
                self.name,
                client=self.client if client is None else client,
                conversation_id=self.present_conversation if conversation_id is None else conversation_id,
            )

    async def change_directory(self, new_path: str, client: str | None) -> Event:
        """Publish that the user of a client, by default the agent's own, works from this folder."""
        with acting_by_default(self.persistent_id):
            return await self.services.store.change_directory(
                new_path, client=self.client if client is None else client
            )

    # Current work

    async def run_command(
        self,
        name: str,
        args: Mapping[str, Any] | None,
        conversation_id: str | None,
        directory: str,
        progress: Progress | None,
        defaults: Defaults,
    ) -> Any:
        """Run a command on a conversation, which gets these defaults, and return its result."""
        command = self.commands.find(name)
        values = command.read(args)
        if self.stopping:
            raise CommandFailed(f"{name}: the agent {self.name} is ending")

        self.requests += 1
        # A command that a hook calls is part of the hook: a deletion in the command must not wait for the hook to end.
        id = conversation_id or self.present_conversation
        here = Invocation(present().runner, id, directory=directory, progress=progress)
        with self.invoke(here), self.command():
            if id and defaults:
                # The event that sets the defaults may still be on its way.
                with self.logging_missing_defaults(id):
                    await self.put_in_defaults(self.services.store.session(id), defaults)
            try:
                return await command.run(self.services.port, values, progress)
            except Exception as error:
                self.errors += 1
                missing = error.__cause__
                if isinstance(missing, AttributeError) and missing.obj is None and not self.present_conversation:
                    # Most likely the handler used `self.conversation`, which is None.
                    raise CommandFailed(f"{name}: no active conversation") from missing
                raise

    @contextmanager
    def invoke(self, invocation: Invocation) -> Iterator[None]:
        """Run a hook or command inside `with`: commits get the agent as their actor, unless another actor is set."""
        with inside(invocation), acting_by_default(self.persistent_id):
            yield

    @contextmanager
    def command(self) -> Iterator[None]:
        """Count the command that runs inside `with`; the agent's end waits for it."""
        with self._mutex:
            self._running_commands += 1
        try:
            yield
        finally:
            with self._mutex:
                self._running_commands -= 1
            self.wake()

    @property
    def busy(self) -> bool:
        """Whether a command is running."""
        return self._running_commands > 0

    def set_paused(self, paused: bool) -> None:
        """Pause or continue background work; listeners are notified of a change."""
        if paused != self.paused:
            self.paused = paused
            self.display.notify("paused", {"paused": paused})
            self.wake()

    def count_conversation(self, id: str) -> None:
        """Count a conversation as known to this agent; at most 100,000 are counted."""
        self._conversations.pop(id, None)
        self._conversations[id] = None
        if len(self._conversations) > _COUNTED:
            del self._conversations[next(iter(self._conversations))]

    def forget_conversation(self, id: str) -> None:
        """Stop counting a deleted conversation; it is no longer the current one."""
        self._conversations.pop(id, None)
        if self.conversation_id == id:
            self.conversation_id = ""

    @property
    def conversations(self) -> int:
        """The number of conversations that the agent knows."""
        return len(self._conversations)

    # The defaults of its records

    async def put_in_defaults(self, record: AsyncRecord, defaults: Defaults) -> None:
        """Set the missing fields of a record, unless a replica of this agent has already done so."""
        if not defaults:
            return
        services = self.services

        async def made() -> Mapping[str, Any]:
            if isinstance(defaults, Mapping):
                return defaults
            found: Mapping[str, Any] = await call(services.port, defaults, {"id": record.ref.id})
            return found

        with acting_by_default(self.persistent_id):
            await services.initialize(record, self.persistent_id, made)

    @contextmanager
    def logging_missing_defaults(self, conversation_id: str) -> Iterator[None]:
        """Log why a conversation gets no defaults, and go on: hooks and commands run without them."""
        about = {"conversation": conversation_id}
        try:
            yield
        except Deleted:
            """Deleted in the meantime; the event for the deletion follows."""
        except StateError as error:
            self.display.log("ERROR", "no defaults were set", about | {"error": str(error)})
        except Exception as error:  # noqa: BLE001 - raised by the agent's function
            self.display.log("ERROR", "no defaults were set", about, error)

    def with_defaults(self, handle: Handle, defaults: Defaults) -> Handle:
        """A handle that returns the default for a field that cannot be read, and logs a warning."""

        def stand_in(error: CorruptState, field: str, default: Any) -> Any:
            self.log_unreadable(error, handle.ref.text, field)
            return copy.deepcopy(defaults.get(field)) if default is None and isinstance(defaults, Mapping) else default

        return with_stand_in(handle, stand_in)

    def log_unreadable(self, error: CorruptState, record: str, field: str) -> None:
        """Log a warning about stored state that cannot be read; "*" means every field."""
        fields = {"record": record[:200], "field": field, "error": str(error)}
        self.display.log("WARNING", "stored state cannot be read: the default is used, the bytes are kept", fields)


@dataclass(frozen=True, slots=True)
class Invocation:
    """The running hook or command: its conversation, or a deleted one's last state; a command's folder and reports.

    `runner` runs the hook; it is None for a command that no hook called.
    """

    runner: object = None
    conversation_id: str = ""
    last_state: AsyncLastState | LastState | None = None
    directory: str = ""
    progress: Progress | None = None


NONE = Invocation()
_present: ContextVar[Invocation] = ContextVar("distributed_state_invocation", default=NONE)


def present() -> Invocation:
    """The innermost hook or command in which the caller runs; NONE outside of hooks and commands."""
    return _present.get()


@contextmanager
def inside(invocation: Invocation) -> Iterator[None]:
    """Make this the present invocation until the end of `with`."""
    token = _present.set(invocation)
    try:
        yield
    finally:
        _present.reset(token)


def _model(kind: type[BaseAgent]) -> type[BaseModel] | None:
    found = kind.Config
    if found is not None and not (isinstance(found, type) and issubclass(found, BaseModel)):
        raise ConfigurationError(f"{kind.__name__}.Config is a pydantic model class, not {found!r:.80}")
    return found


def check_defaults(agent: BaseAgent, name: str) -> None:
    """Raise ConfigurationError if the agent's attribute of this name cannot be used as defaults."""
    found = getattr(agent, name)
    if callable(found):
        return
    place = f"{type(agent).__name__}.{name}"
    if not isinstance(found, Mapping):
        text = f"{place} is a mapping or a function that returns one"
        raise ConfigurationError(f"{text}, not {type(found).__name__}")
    try:
        agent.agent_context.services.check_fields(found)
    except InvalidValue as error:
        text = f"{place}: {error}; for values that are made at run time, use a function that returns the mapping"
        raise ConfigurationError(text) from error
