"""What an agent is on either face: its state, config, commands, figures. Law: state is where every replica finds it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel

from distributed_state.agents.commands import Command, CommandArgument, Commands, Progress, given
from distributed_state.agents.display import Visible
from distributed_state.agents.hooks import Hooks, call
from distributed_state.agents.status import Limits, Status, memory_mb
from distributed_state.errors import CommandFailed, ConfigurationError, CorruptState, InvalidValue, StateError
from distributed_state.events import config as configs
from distributed_state.port import Port
from distributed_state.records.context import context_of
from distributed_state.records.creation import initialize
from distributed_state.tiers import actors
from distributed_state.values import codec
from distributed_state.values.model import Ref
from distributed_state.values.results import Event

LONG = ("system_prompt", "sections", "commands")  # what is left out of a heartbeat that would be too large
# conversations that are counted; a name
_KNOWN = 100_000
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Scene:
    """What a hook or command is about: a conversation, and how it was if it is no more."""

    host: Any
    conversation_id: str = ""
    past: Any = None
    directory: str = ""


scene: ContextVar[Scene | None] = ContextVar("distributed_state_scene", default=None)


def core(it: Any) -> Any:
    """The asyncio object inside a blocking one."""
    return getattr(it, "_twin", it)


class BaseAgent(Hooks, Visible):
    """The base of `Agent` and `AsyncAgent`.

    `store` is a store, or a function that opens one, by default as the settings in the environment say; `name`, by
    default the class's, says whose replicas share the persistent state; `config` is a mapping or the path of a YAML or
    JSON file; `client` is the one whose conversation is the current one, "" follows what is no client's in particular.

    `ephemeral` is a dict of this process, `persistent` a record that all replicas of the agent share, `conversation`
    the session that a hook or command is about, elsewhere the one that the client is at. Whatever is written to these
    two is a commit: nothing has to be saved on a switch or at the end, and nothing loaded.
    """

    _opens: ClassVar[Any] = None  # what opens a store of this face
    # What a subclass may set. A model that the config has to fit; without it any object will do.
    Config: ClassVar[type[BaseModel] | None] = None
    # Mappings, or functions that return one; put in once for the fleet, of a conversation anew when it was cleared.
    persistent_defaults: Any = MappingProxyType({})
    conversation_defaults: Any = MappingProxyType({})
    pause_when_inactive: bool = False  # pause() when the last client leaves, resume() when one comes
    slow_hook: float = 0.1  # seconds; a hook that takes longer is logged
    stuck_hook: float = 10.0  # seconds; one that has not returned by then is logged while it runs
    shutdown_timeout: float = 20.0  # seconds that what runs gets to finish; what follows takes at most 15 more
    watch_config: float | None = None  # seconds between two looks at the file, 0 never; by default only without SIGHUP
    limits: Limits = Limits()  # beyond which a figure of the status is worth a warning

    def __init__(
        self,
        store: Any = None,
        *,
        name: str | None = None,
        config: configs.Source | None = None,
        client: str = "",
        since: str | None = None,
    ) -> None:
        self.name = name or getattr(type(self), "name", "") or type(self).__name__
        for what, value in ("name", self.name), ("client", client):
            if not isinstance(value, str) or len(value) > _LONGEST:
                raise InvalidValue(f"{what} is a str of at most {_LONGEST} characters, not {value!r:.80}")
        Ref("app", self._persistent_id)
        super().__init__()
        self._source = store = self._opens if store is None else store
        self._store = None if callable(store) else store
        self._of_client = self._client = client  # whom alone it hears; whose conversation is the current one
        self._since = since
        self.ephemeral: dict[str, Any] = {}
        self.requests = self.errors = self.queue_size = 0
        self._config = configs.Config(self.name, self._model(), config)
        self._commands = Commands()
        self._host: Any = None
        self._current = ""
        self._paused = False
        self._busy = 0
        self._lag = 0.0
        self._active_for: set[str] = set()
        self._last_status: dict[str, Any] | None = None
        self._conversations: dict[str, None] = {}
        self._began = 0.0

    @classmethod
    def _model(cls) -> type[BaseModel] | None:
        found = cls.Config
        if found is not None and not (isinstance(found, type) and issubclass(found, BaseModel)):
            raise ConfigurationError(f"{cls.__name__}.Config is a pydantic model class, not {found!r:.80}")
        return found

    # State

    @property
    def store(self) -> Any:
        """The store. Raises ConfigurationError while the agent has not opened it yet."""
        if self._store is None:
            raise ConfigurationError(f"agent {self.name}: opens its store when it runs, and does not run")
        return self._store

    @property
    def _persistent_id(self) -> str:
        return f"agent:{self.name}"

    @property
    def persistent(self) -> Any:
        """The record of scope app that all replicas of this agent share, with `persistent_defaults`."""
        return self._tolerant(self.store.app(self._persistent_id), self.persistent_defaults)

    @property
    def conversation(self) -> Any:
        """The session that this is about, None if there is none; for a deleted one its last state, to read.

        A field that cannot be read gives the default, with a warning in the log; the stored bytes are kept.
        """
        now = scene.get()
        if now is not None and now.past is not None:
            return now.past
        id = self.conversation_id
        return self._session(id) if id else None

    @property
    def conversation_id(self) -> str:
        """The id of that session, "" if there is none."""
        now = scene.get()
        return (now.conversation_id if now is not None else "") or self._current

    @property
    def client(self) -> str:
        """The client whose conversation is the current one."""
        return self._client

    def follow(self, client: str, conversation_id: str = "") -> None:
        """Let another client's conversation be the current one, and say which it is at now.

        For whoever serves a client by this process. What the agent hears stays what it was.
        """
        self._client = client
        self._current = conversation_id

    def get_invocation_directory(self) -> str:
        """The folder that the user works from whose command this is, else the client's; "" if nobody told."""
        now = scene.get()
        return (now.directory if now is not None else "") or self.invocation_directory

    def _session(self, id: str) -> Any:
        return self._tolerant(self.store.session(id), self.conversation_defaults)

    def _tolerant(self, handle: Any, defaults: Any) -> Any:
        def unreadable(error: CorruptState, key: str, default: Any) -> Any:
            self._unreadable(error, core(handle).ref.text, key)
            return copy.deepcopy(defaults.get(key)) if default is None and isinstance(defaults, Mapping) else default

        core(handle).unreadable = unreadable
        return handle

    def _unreadable(self, error: CorruptState, text: str, field: str) -> None:
        fields = {"record": text[:200], "field": field, "error": str(error)}
        self._log("WARNING", "stored state cannot be read: the default is used, the bytes are kept", fields)

    async def _set_defaults(self, handle: Any, defaults: Any) -> bool:
        """Put in the defaults, once for the fleet; whether it was done here."""
        if not defaults:
            return False

        async def made() -> Mapping[str, Any]:
            if not callable(defaults):
                return defaults  # type: ignore[no-any-return]  # a mapping, as initialize() checks
            found = await call(self._port(), defaults, {"id": core(handle).ref.id})
            return found  # type: ignore[no-any-return]

        with self._signing():
            return await initialize(context_of(core(handle)), made, self._persistent_id)

    async def _activate(self, client: str | None, conversation_id: str | None) -> Event:
        place = {"client": self._client if client is None else client}
        place["conversation_id"] = self.conversation_id if conversation_id is None else conversation_id
        with self._signing():
            told: Event = await core(self.store).activate_agent(self.name, **place)
        return told

    async def _change_directory(self, new_path: str, client: str | None) -> Event:
        with self._signing():
            told: Event = await core(self.store).change_directory(
                new_path, client=self._client if client is None else client
            )
        return told

    # Config

    @property
    def config(self) -> Any:
        """The config as it is now: a dict, or an instance of the class's model `Config`."""
        return self._config.value

    # Events

    @property
    def position(self) -> str:
        """How far this replica is in the events, those whose hooks have run included, for `since=` of its next life.

        With `since` an agent runs the hooks of what it missed before anything new. After a crash the hooks of events
        since the position was saved run again. Raises ConfigurationError while the agent does not run.
        """
        return str(self._hosted().position)

    # Background work

    @property
    def paused(self) -> bool:
        """Whether background work is to rest."""
        return self._paused

    def pause(self) -> None:
        """Let background work rest: `wait()` does not return until `resume()` or the end."""
        self._set_paused(True)

    def resume(self) -> None:
        """Let background work go on."""
        self._set_paused(False)

    def _set_paused(self, paused: bool) -> None:
        if paused != self._paused:
            self._paused = paused
            self._tell("paused", {"paused": paused})
            self._wake()

    @property
    def stopping(self) -> bool:
        """Whether the agent is to end: finish what is begun, and begin nothing."""
        return self._host is not None and bool(self._host.stopping)

    def stop(self) -> None:
        """Let the agent end, from any thread. Returns at once."""
        if self._host is not None:
            self._host.stop()

    def _wake(self) -> None:
        if self._host is not None:
            self._host.wake(self)

    async def _wait(self, seconds: float | None) -> bool:
        return bool(await self._hosted().wait(self, seconds))

    def _hosted(self) -> Any:
        if self._host is None:
            raise ConfigurationError(f"agent {self.name} does not run; enter it or call run()")
        return self._host

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
        self._show("commands", "commands", self._commands.to_list())

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

        def report(text: str = "", **fields: Any) -> None:
            if progress is not None:
                progress(text, fields)

        self.requests += 1
        before = scene.get()
        id = conversation_id or self.conversation_id
        here = Scene(None if before is None else before.host, id, directory=directory)
        with self._on(here), self._at_work():
            try:
                result = await call(self._port(), command.function, given(command, values, report))
                codec.encode(result, f"the result of {name}")
            except Exception as error:
                self.errors += 1
                if isinstance(error, StateError):
                    raise
                raise CommandFailed(f"{name}: {type(error).__name__}: {error}") from error
        return result

    @contextmanager
    def _on(self, it: Scene) -> Iterator[None]:
        token = scene.set(it)
        try:
            with self._signing():
                yield
        finally:
            scene.reset(token)

    def _signing(self) -> AbstractContextManager[None]:
        """What nobody in particular does inside is noted as the agent's."""
        return nullcontext() if actors.present() else actors.acting_as(self._persistent_id)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        with self._mutex:
            self._busy += 1
        try:
            yield
        finally:
            with self._mutex:
                self._busy -= 1
            self._wake()

    def _port(self) -> Port:
        found: Port = core(self.store).tiers().port
        return found

    # Figures

    @property
    def shown(self) -> dict[str, Any]:
        """What the replica tells of the agent with its heartbeat; `store.replicas()` lists it."""
        now = {"name": self.name, "active": bool(self.active), "paused": self._paused, "status": self._last_status}
        return now | self.visible

    def _know(self, id: str) -> None:
        self._conversations.pop(id, None)
        self._conversations[id] = None
        if len(self._conversations) > _KNOWN:
            del self._conversations[next(iter(self._conversations))]

    async def _status(self) -> Status:
        """Gather the figures and log them, with a warning for each that is beyond its limit."""
        store = core(self.store)
        port = self._port()
        try:
            tiers = await store.stats()
        except StateError as error:
            tiers = {}
            self._log("WARNING", "no figures of the tiers", {"error": str(error)})
        waiting = 0 if self._host is None else self._host.waiting
        status = Status(
            agent=self.name,
            replica=store.replica,
            uptime=round(port.monotonic() - self._began, 3) if self._began else 0.0,
            requests=self.requests,
            errors=self.errors,
            error_rate=round(100 * self.errors / self.requests, 2) if self.requests else 0.0,
            queue_size=self.queue_size + waiting,
            memory_mb=round(memory_mb(), 1),
            conversations=len(self._conversations),
            lag=round(self._lag, 3),
            active=bool(self.active),
            paused=self._paused,
            tiers=tiers,
        )
        self._last_status = status.to_dict()
        self._log("INFO", "status", self._last_status)
        for words, name, found, allowed in status.warnings(self.limits):
            self._log("WARNING", words, {name: found, "limit": allowed})
        return status

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


def defaults_of(agent: BaseAgent) -> tuple[Any, Any]:
    """The defaults of the fleet's record and of each conversation. Raises ConfigurationError."""
    for name in ("persistent_defaults", "conversation_defaults"):
        found = getattr(agent, name)
        if not callable(found) and not isinstance(found, Mapping):
            text = f"{type(agent).__name__}.{name} is a mapping or a function that returns one"
            raise ConfigurationError(f"{text}, not {type(found).__name__}")
    return agent.persistent_defaults, agent.conversation_defaults
