"""A fleet in one process: replicas, servers and SQL of one run. Law: the product in it is the product, unchanged."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from fakeredis.commands_mixins import scripting_mixin

from distributed_state import AsyncStateStore
from distributed_state.port.facts import Life
from distributed_state.store import lifecycle
from tests.simulation.network import Network
from tests.simulation.node import Node, Persistence
from tests.simulation.port import SimulatedConnections, SimulatedPort
from tests.simulation.replication import Group
from tests.simulation.sql import SimulatedSql
from tests.simulation.world import Process, Task, World

SERVER = "server:6379"


def _nothing(*_: object) -> None:
    """Look at no globals: that our scripts leave none is tested on real servers, and it takes a tenth of a run."""


class Fleet:
    """Everything of one run."""

    def __init__(self, world: World, persistence: Persistence, lags: tuple[float, ...] = (), **settings: Any) -> None:
        self.world = world
        self.settings = settings
        self.network = Network(world)
        self.sql = SimulatedSql(world)
        self.lives = 0
        names = [SERVER, *(f"copy{at}:6379" for at in range(len(lags)))]
        self.group = Group(self.network, persistence, names, lags, self._life)
        self._opening: Process | None = None

    @property
    def server(self) -> Node:
        """The primary."""
        return self.group.primary

    def _life(self) -> Life:
        self.lives += 1
        # Of hexadecimal digits, as the real ones are, and as long as what is kept of INFO.
        return Life(f"da7a{self.lives:08}", f"4ace{self.lives:08}", True)

    # Replicas

    def run(self, process: Process, work: Coroutine[Any, Any, Any], name: str) -> Task:
        """A task of a replica."""
        return Task(process, work, f"{process.name}/{name}")

    async def open(self, name: str) -> tuple[AsyncStateStore, Process]:
        """Start a replica. Raises what opening raises."""
        process = self._opening = Process(self.world, name)
        store = AsyncStateStore.open(f"redis://{SERVER}", archive="memory", **self.settings)
        await self.run(process, store.__aenter__(), "open").ended
        return store, process

    @contextmanager
    def rules(self) -> Iterator[None]:
        """Inside, stores are opened in this fleet."""

        def connections(url: str, timeout: float, credentials: object = None, *, retry_for: float = 0.0) -> Any:
            assert self._opening is not None, "a store is opened by `open`"
            return SimulatedConnections(self, self._opening, url, timeout, retry_for=retry_for)

        def cold(url: object, namespace: Any, *, snapshot_every: int = 100, **_: object) -> Any:
            return self.sql.cold(getattr(namespace, "namespace", namespace), snapshot_every)

        with self.world.rules(), ExitStack() as stack:
            stack.enter_context(mock.patch.object(scripting_mixin, "_check_for_lua_globals", _nothing))
            stack.enter_context(mock.patch.object(lifecycle, "Connections", connections))
            stack.enter_context(mock.patch.object(lifecycle, "SharedPort", SimulatedPort))
            for way in ("open", "open_later"):
                stack.enter_context(mock.patch.object(lifecycle.ColdStore, way, cold))
            yield

    def everything(self) -> bytes:
        """All that SQL and the server hold, to be searched."""
        return self.sql.contents() + b"".join(self.server.contents())

    def left_over(self) -> list[str]:
        """Leases and connections that nobody has any more."""
        connections = [
            f"a connection of {each.process.name}" for node in self.group.nodes() for each in node.connections
        ]
        return connections + [f"the lease {key.decode()}" for key in self.server.present() if key.endswith(b":lock")]

    # Faults of the server

    def stop_server(self, *, away: float, power_cut: bool) -> None:
        """Let the primary die, and come back with what its file has."""
        self.group.stop(self.group.primary_name, away=away, power_cut=power_cut)

    def freeze_server(self, seconds: float) -> None:
        """Let the server stand still for so long; what it was sent is carried out afterwards."""
        self.world.note("server freezes", f"{seconds:.3f}")
        self.server.frozen_until = max(self.server.frozen_until, self.world.now + seconds)

    def evict(self) -> None:
        """Let a server at its limit of memory drop a key that may be dropped."""
        if keys := self.server.mortal_keys():
            key = self.world.chance.choice(keys)
            self.world.note("evicted", key.decode(errors="replace"))
            self.server.carry_out([(b"DEL", key)])
