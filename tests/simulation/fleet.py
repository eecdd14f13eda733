"""A fleet in one process: replicas, servers and SQL of one run. Law: the product runs unchanged."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from fakeredis.commands_mixins import scripting_mixin

from distributed_state import AsyncStateStore
from distributed_state.port.identities import ServerIdentity
from distributed_state.store import lifecycle
from distributed_state.values.keys import Keys
from tests.simulation.cluster import Cluster, is_away, slot_of
from tests.simulation.network import Network
from tests.simulation.node import Node, Persistence
from tests.simulation.port import SimulatedConnections, SimulatedPort
from tests.simulation.replication import Group
from tests.simulation.sentinels import SERVICE, Sentinel, Sentinels
from tests.simulation.sql import SimulatedSql
from tests.simulation.world import Process, Task, World

SERVER = "server:6379"


def _nothing(*_: object) -> None:
    """Skip the check for global variables: tests with real servers cover it, and it takes a tenth of a run."""


class Fleet:
    """All parts of one run."""

    def __init__(
        self, world: World, persistence: Persistence, lags: tuple[float, ...] = (), primaries: int = 0, *,
        watched: bool = False, **settings: Any,
    ) -> None:  # fmt: skip
        self.world = world
        self.settings = settings
        self.network = Network(world)
        self.sql = SimulatedSql(world)
        self.data_ids = 0
        self.groups = [
            Group(self.network, persistence, names, lags, self._identity) for names in self._names(primaries, lags)
        ]
        self.group = self.groups[0]
        self.cluster = self._cluster() if primaries else None
        self.sentinels = Sentinels(self.group) if watched else None
        self._opening: Process | None = None

    def _cluster(self) -> Cluster:
        """A cluster; the slots that contain data may move."""
        keys = Keys(self.settings["namespace"], self.settings["partitions"])
        single = [keys.slot(each) for each in range(keys.partitions)] + [slot_of(keys.store), slot_of(keys.archivers)]
        return Cluster(self.world, self.groups, single, is_whole=self.world.seed % 2 == 0)

    @staticmethod
    def _names(primaries: int, lags: tuple[float, ...]) -> list[list[str]]:
        """The names of the servers of each group, its first primary first."""
        if not primaries:
            return [[SERVER, *(f"copy{at}:6379" for at in range(len(lags)))]]
        copies = range(len(lags))
        return [
            [f"n{at}:{7000 + at}", *(f"n{at}{'bcd'[each]}:{7000 + at}" for each in copies)]
            for at in range(1, primaries + 1)
        ]

    @property
    def servers(self) -> list[Node]:
        """The primaries."""
        return [group.primary for group in self.groups]

    @property
    def server(self) -> Node:
        """The primary; in a cluster, that of the first group."""
        return self.group.primary

    def _identity(self) -> ServerIdentity:
        self.data_ids += 1
        # Hexadecimal digits, as in real ids, and as long as the part of INFO that is kept.
        return ServerIdentity(f"da7a{self.data_ids:08}", f"4ace{self.data_ids:08}", True)

    @property
    def url(self) -> str:
        """The URL with which a store is opened."""
        if self.sentinels is not None:
            return f"redis+sentinel://{','.join(self.sentinels.all)}/{SERVICE}"
        scheme = "redis" if self.cluster is None else "redis+cluster"
        return f"{scheme}://{','.join(group.names[0] for group in self.groups)}"

    def who_is(self, name: str) -> Node | Sentinel:
        """A server, or a Sentinel."""
        found = self.sentinels.all.get(name) if self.sentinels is not None else None
        return found or self.network.nodes[name]

    # Replicas

    def run(self, process: Process, work: Coroutine[Any, Any, Any], name: str) -> Task:
        """A task of a replica."""
        return Task(process, work, f"{process.name}/{name}")

    async def open(self, name: str) -> tuple[AsyncStateStore, Process]:
        """Start a replica. Raises the errors of opening a store."""
        process = self._opening = Process(self.world, name)
        store = AsyncStateStore.open(self.url, archive="memory", **self.settings)
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

    def is_sound(self) -> bool:
        """Whether all servers serve, and no slot is moving."""
        if any(map(is_away, self.servers)) or (self.sentinels is not None and not self.sentinels.is_settled()):
            return False
        return self.cluster is None or self.cluster.is_sound()

    def home(self, text: str) -> str:
        """The name of the first server of the group that has a record."""
        keys = Keys(self.settings["namespace"], self.settings["partitions"])
        assert self.cluster is not None, "else all are of one group"
        return self.cluster.owner(keys.slot(keys.partition_of(text))).group.names[0]

    def everything(self) -> bytes:
        """Everything that SQL and the servers hold, to be searched.

        Data that a recovery collected and could not delete is left out: it expires within a minute.
        """
        kept = [each for server in self.servers for each in server.contents() if b":gathered:" not in each[:100]]
        return self.sql.contents() + b"".join(kept)

    def left_over(self) -> list[str]:
        """Leases and connections that no longer have an owner."""
        nodes = [node for group in self.groups for node in group.nodes()]
        connections = [f"a connection of {each.process.name}" for node in nodes for each in node.connections]
        keys = [key for server in self.servers for key in server.present() if key.endswith(b":lock")]
        return connections + [f"the lease {key.decode()}" for key in keys]

    # Faults of a server

    def freeze_server(self, server: Node, seconds: float) -> None:
        """Freeze a server for this many seconds; afterwards it executes the commands that it received."""
        self.world.note("server freezes", server.name, f"{seconds:.3f}")
        server.frozen_until = max(server.frozen_until, self.world.now + seconds)
        if server.member is not None:
            server.member.falls_silent(seconds)

    def move_slot(self, drawn: int, pause: float) -> None:
        """Begin to move a slot of the cluster to another node."""
        if self.cluster is not None:
            slots = sorted(self.cluster.slots.single)
            slot = slots[drawn % len(slots)]
            others = [each for each in self.groups if each is not self.cluster.owner(slot).group]
            target = others[drawn // len(slots) % len(others)]
            self.run(self.world.outside, self.cluster.move(slot, target, pause), "move")

    def evict(self, server: Node) -> None:
        """Let a server that has reached its memory limit evict a key that may be evicted."""
        if keys := server.mortal_keys():
            key = self.world.chance.choice(keys)
            self.world.note("evicted", key.decode(errors="replace"))
            server.carry_out([(b"DEL", key)])
