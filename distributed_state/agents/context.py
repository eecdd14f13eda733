"""What an agent, its host and its dispatcher share. Law: one object for each agent, and no other way between them.

Design: section 12.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from distributed_state.agents.display import Display
from distributed_state.agents.invocation import Invocation, inside
from distributed_state.agents.status import Status
from distributed_state.errors import ConfigurationError
from distributed_state.events.config import Config
from distributed_state.port import Mutex
from distributed_state.store.services import Store, StoreServices, acting_by_default

# A store, or a function that opens one.
StoreSource = Store | Callable[[], Store | Awaitable[Store]]
_COUNTED = 100_000  # conversations


class AgentHost(Protocol):
    """What an agent asks of the host that runs it. `agent` is the agent's name."""

    @property
    def stopping(self) -> bool:
        """Whether its agents are to end."""
        ...

    @property
    def waiting(self) -> int:
        """How many events wait for a hook."""
        ...

    @property
    def position(self) -> str:
        """How far the hooks are, as `since=` takes it."""
        ...

    def stop(self) -> None:
        """Let the agents end, from any thread."""
        ...

    def wake(self, agent: str) -> None:
        """Let the agent's `wait` look again."""
        ...

    async def wait(self, agent: str, seconds: float | None) -> bool:
        """Wait so many seconds, and on while the agent is paused; False as soon as it is time to end."""
        ...

    async def status(self, agent: str) -> Status:
        """How the agent is."""
        ...

    async def reload(self, agent: str) -> None:
        """Read the agent's config file again."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class AgentContext:
    """One agent in this process: its store, config and display, the client it follows, and how it fares."""

    def __init__(self, name: str, source: StoreSource, config: Config, client: str, since: str | None) -> None:
        self.name = name
        self.persistent_id = f"agent:{name}"  # of the record that its replicas share; also how its changes are signed
        self.source = source
        self.since = since
        self.config = config
        self.display = Display(name)
        self.store: Store | None = None if callable(source) else source
        self.host: AgentHost | None = None
        self.subscribed_client = client  # whose events alone reach it; "" for everybody's
        self.client = client  # whose conversation is the current one
        self.conversation_id = ""
        self.active_for: set[str] = set()  # the clients that chose this agent
        self.paused = False
        self.lag = 0.0
        self.began = 0.0
        self.last_status: dict[str, Any] | None = None
        self._conversations: dict[str, None] = {}
        self._mutex = Mutex()
        self._commands = 0

    # Where it runs

    def begin(self, host: AgentHost, store: Store) -> None:
        """A host begins to run it, on this store."""
        self.store = store
        self.host = host
        self.began = StoreServices(store).port.monotonic()

    def end(self) -> None:
        """Its host has ended. A store that was opened for the run is given up, the user's own is kept."""
        self.host = None
        if callable(self.source):
            self.store = None

    @property
    def open_store(self) -> Store:
        """The store. Raises ConfigurationError while the agent has not opened it yet."""
        if self.store is None:
            raise ConfigurationError(f"agent {self.name}: opens its store when it runs, and does not run")
        return self.store

    @property
    def services(self) -> StoreServices:
        """The asyncio store below, and its port."""
        return StoreServices(self.open_store)

    @property
    def running_host(self) -> AgentHost:
        """The host that runs it. Raises ConfigurationError while none does."""
        if self.host is None:
            raise ConfigurationError(f"agent {self.name} does not run; enter it or call run()")
        return self.host

    def wake(self) -> None:
        """Let whatever waits for a change of this agent look again."""
        if self.host is not None:
            self.host.wake(self.name)

    # What it is at

    @contextmanager
    def invoke(self, invocation: Invocation) -> Iterator[None]:
        """Run a hook or command inside: what is committed there is noted as the agent's, unless somebody else acts."""
        with inside(invocation), acting_by_default(self.persistent_id):
            yield

    @contextmanager
    def command(self) -> Iterator[None]:
        """Count a command that runs inside: the agent's end waits for it."""
        with self._mutex:
            self._commands += 1
        try:
            yield
        finally:
            with self._mutex:
                self._commands -= 1
            self.wake()

    @property
    def busy(self) -> bool:
        """Whether a command runs."""
        return self._commands > 0

    def set_paused(self, paused: bool) -> None:
        """Pause background work or let it go on; listeners are notified if that is a change."""
        if paused != self.paused:
            self.paused = paused
            self.display.notify("paused", {"paused": paused})
            self.wake()

    def count_conversation(self, id: str) -> None:
        """Count a conversation among those that this agent knows, at most 100,000."""
        self._conversations.pop(id, None)
        self._conversations[id] = None
        if len(self._conversations) > _COUNTED:
            del self._conversations[next(iter(self._conversations))]

    def forget_conversation(self, id: str) -> None:
        """It was deleted: not counted, nor the current one any more."""
        self._conversations.pop(id, None)
        if self.conversation_id == id:
            self.conversation_id = ""

    @property
    def conversations(self) -> int:
        """How many conversations it knows."""
        return len(self._conversations)
