"""A Redis Cluster on loopback. Law: it is formed, and changed, by the commands that `redis-cli --cluster` sends.

A node is asked each time what it knows of the others. A slot is moved step by step, so that a test can stop between any
two steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from hiredis import ReplyError

from distributed_state.errors import ConfigurationError
from distributed_state.programs.servers.process import free_port, redis_binary, wait_until, working_folder
from distributed_state.programs.servers.redis import RedisServer, info, with_password

SLOTS = 16_384
_KEYS_AT_ONCE = 100
_MIGRATE_MS = 5000


@contextmanager
def redis_cluster(
    *options: str, primaries: int = 3, replicas: int = 1, binary: str | None = None, directory: Path | None = None
) -> Iterator[RedisCluster]:
    """Run a cluster of Redis or Valkey servers while the block runs, formed anew each time.

    `options` are words of each node's command line; a later one wins (`"--cluster-node-timeout", "5000"`).
    """
    with working_folder(directory) as place:
        cluster = RedisCluster(binary or redis_binary(), options, place)
        try:
            cluster.start(primaries, replicas)
            yield cluster
        finally:
            cluster.kill()


class RedisCluster:
    """Some primaries, each with its replicas. A primary that is silent for a second is replaced by a replica."""

    def __init__(self, binary: str, options: Sequence[str], directory: Path) -> None:
        self.binary = binary
        self.directory = directory
        self.nodes: list[ClusterNode] = []
        self._options = with_password(options)
        self._started = 0

    @property
    def url(self) -> str:
        """The URL for `StateStore.open`, with every node as a seed."""
        return f"redis+cluster://:{self.nodes[0].password}@{self._places()}"

    def start(self, primaries: int, replicas: int) -> None:
        """Start `primaries` nodes, each with this many `replicas`, share the slots out, and wait until all agree."""
        first = [self._new_node() for _ in range(primaries)]
        rest = [self._new_node() for _ in range(primaries * replicas)]
        for at, node in enumerate(first):
            # Different from the start: two primaries with the same epoch would first have to settle that.
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", at + 1)
            node.ask("CLUSTER", "ADDSLOTSRANGE", SLOTS * at // primaries, SLOTS * (at + 1) // primaries - 1)
        for one, other in combinations(self.nodes, 2):
            one.ask("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus_port)
        wait_until(self._all_met, "the nodes of a cluster did not meet")
        for at, node in enumerate(rest):
            node.ask("CLUSTER", "REPLICATE", first[at % primaries].id)
        self.wait_converged()

    # Who is what

    def primaries(self) -> list[ClusterNode]:
        """The nodes that answer and have slots, in the order of their first slots."""
        asked = [(node, node.itself()) for node in self._answering()]
        owners = [(member.slot_ranges[0].start, node) for node, member in asked if member.is_owner]
        return [node for _, node in sorted(owners, key=lambda each: each[0])]

    def replicas_of(self, primary: ClusterNode) -> list[ClusterNode]:
        """The replicas of a primary that answer; it need not answer itself."""
        return [node for node in self._answering() if node.itself().primary_id == primary.id]

    def primary_of(self, slot: int) -> ClusterNode:
        """The node that has a slot. Raises ConfigurationError if none that answers has it."""
        for node in self._answering():
            if node.itself().owns(slot):
                return node
        raise ConfigurationError(f"no node that answers has slot {slot}")

    # Faults

    def kill_primary(self, primary: ClusterNode | None = None) -> ClusterNode:
        """Kill a primary, the first one if none is given, and return it; `start` brings it back as a replica.

        Its replica replaces it some seconds later: `wait_converged` waits for that.
        """
        chosen = primary or self.primaries()[0]
        chosen.kill()
        return chosen

    def failover(self, primary: ClusterNode) -> ClusterNode:
        """Hand a primary's part over to one of its replicas, which has all its writes; return the new primary."""
        return self._promote(primary, ())

    def takeover(self, primary: ClusterNode) -> ClusterNode:
        """Let a replica take a primary's part without asking anyone, the primary least of all; return the replica."""
        return self._promote(primary, ("TAKEOVER",))

    def wait_converged(self) -> None:
        """Wait until all nodes that answer agree on who is what, serve every slot, and replicas are in sync."""
        wait_until(self.converged, f"the nodes {self._places()} did not agree")

    def converged(self) -> bool:
        """Whether all nodes that answer agree, serve every slot, and replicas are in sync. May raise OSError."""
        nodes = self._answering()
        ports = {node.port for node in nodes}
        views = {frozenset(m for m in node.members() if m.port in ports) for node in nodes}
        if len(views) != 1:
            return False
        (view,) = views
        served = sum(len(each) for member in view if member.is_owner for each in member.slot_ranges)
        return {m.port for m in view} == ports and served == SLOTS and all(node.serving() for node in nodes)

    # Growing, shrinking, resharding

    def add_node(self) -> ClusterNode:
        """Add a primary without slots, and return it when all nodes know it."""
        node = self._new_node()
        for other in self._answering():
            if other is not node:
                node.ask("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus_port)
        wait_until(self._all_met, "a node did not meet the others")
        self.wait_converged()
        return node

    def add_replica(self, primary: ClusterNode) -> ClusterNode:
        """Add a replica of this primary, and return it when it is in sync."""
        node = self.add_node()
        node.ask("CLUSTER", "REPLICATE", primary.id)
        self.wait_converged()
        return node

    def remove_node(self, node: ClusterNode) -> None:
        """Let all others forget a node, and stop it. Raises ConfigurationError if it still has slots."""
        if node in self.primaries():
            raise ConfigurationError(f"the node on port {node.port} has slots; move them first")
        for replica in self.replicas_of(node):
            replica.ask("CLUSTER", "REPLICATE", self.primaries()[0].id)
        gone = node.id
        self.nodes.remove(node)
        node.kill()
        for other in self._answering():
            other.ask("CLUSTER", "FORGET", gone)
        self.wait_converged()

    def move_slots(self, slots: Iterable[int], to: ClusterNode, *, pause: float = 0.0) -> None:
        """Move slots to a node one after the other, as under load: each stays on its way for `pause` seconds."""
        by_port = {node.port: node for node in self.nodes}
        for slot in slots:
            # The target is updated first when a slot is handed over, so its view is the newest.
            owners = [member for member in to.members() if member.is_owner]
            source = next(by_port[member.port] for member in owners if member.owns(slot))
            if source is to:
                continue
            others = [by_port[member.port] for member in owners if member.port not in (source.port, to.port)]
            begin_move(slot, source, to)
            time.sleep(pause)
            while move_keys(slot, source, to):
                pass
            end_move(slot, source, to, others)

    def kill(self) -> None:
        """End every process at once; what they hold goes with their folders."""
        for node in self.nodes:
            node.kill()

    def _places(self) -> str:
        return ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def _promote(self, primary: ClusterNode, how: tuple[str, ...]) -> ClusterNode:
        replicas = self.replicas_of(primary)
        if not replicas:
            raise ConfigurationError(f"the primary on port {primary.port} has no replica that answers")
        chosen = replicas[0]
        chosen.ask("CLUSTER", "FAILOVER", *how)
        wait_until(lambda: chosen in self.primaries(), f"the replica on port {chosen.port} was not promoted")
        self.wait_converged()
        return chosen

    def _new_node(self) -> ClusterNode:
        self._started += 1
        node = ClusterNode(self.binary, self._options, self.directory / f"node-{self._started}")
        self.nodes.append(node)
        node.start()
        return node

    def _answering(self) -> list[ClusterNode]:
        return [node for node in self.nodes if node.answering]

    def _all_met(self) -> bool:
        ports = {node.port for node in self._answering()}
        return all({m.port for m in node.members() if m.joined} >= ports for node in self._answering())


# One node, and what it knows of the others


class ClusterNode(RedisServer):
    """A Redis or Valkey process in cluster mode. It comes back with its id and its slots, on its ports."""

    def __init__(self, binary: str, options: Sequence[str], directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(binary, options, directory)
        self.bus_port = free_port()
        self.id = ""  # the server chooses it

    def _settings(self) -> dict[str, str]:
        settings = {"cluster-enabled": "yes", "cluster-config-file": "nodes.conf", "cluster-node-timeout": "1000"}
        # Not the port + 10000: that may be lent to an outgoing connection.
        return super()._settings() | settings | {"cluster-port": str(self.bus_port)}

    def start(self) -> None:
        """Start, or start again as the same node, and wait until the server answers."""
        super().start()
        self.id = str(self.ask("CLUSTER", "MYID"))

    def itself(self) -> Member:
        """What it believes of itself. Raises OSError if it does not answer."""
        return next(member for member in self.members() if member.port == self.port)

    def members(self) -> list[Member]:
        """All nodes that it knows, itself among them. Raises OSError if it does not answer."""
        return [Member.of(line) for line in self.ask("CLUSTER", "NODES").splitlines()]

    def serving(self) -> bool:
        """Whether it takes commands for all slots, and as a replica has its primary's data. May raise OSError."""
        with self.connect() as connection:
            if info(connection.ask("CLUSTER", "INFO"))["cluster_state"] != "ok":
                return False
            state = info(connection.ask("INFO", "replication"))
        return state["role"] == "master" or state["master_link_status"] == "up"


@dataclass(frozen=True, slots=True)
class Member:
    """A line of CLUSTER NODES: what one node believes of another, or of itself."""

    id: str
    port: int
    primary_id: str | None
    slot_ranges: tuple[range, ...]
    joined: bool

    @classmethod
    def of(cls, line: str) -> Member:
        """Read a line; slots on their way (`[93-<-id]`) belong to whom they belonged."""
        id, address, flags, primary, _, _, _, _, *slots = line.split()
        port = int(address.partition("@")[0].rpartition(":")[2])
        ends = (word.split("-") for word in slots if not word.startswith("["))
        ranges = tuple(range(int(first_last[0]), int(first_last[-1]) + 1) for first_last in ends)
        return cls(id, port, None if primary == "-" else primary, ranges, "handshake" not in flags.split(","))

    @property
    def is_owner(self) -> bool:
        """Whether it is a primary with slots."""
        return self.primary_id is None and bool(self.slot_ranges)

    def owns(self, slot: int) -> bool:
        """Whether it is the primary of this slot."""
        return self.primary_id is None and any(slot in each for each in self.slot_ranges)


# Slots moved from node to node


def begin_move(slot: int, source: ClusterNode, target: ClusterNode) -> None:
    """Mark a slot as on its way: from now on its keys may be on either node."""
    # The target first: the source may redirect a client to it at once.
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)


def move_keys(slot: int, source: ClusterNode, target: ClusterNode, count: int = _KEYS_AT_ONCE) -> int:
    """Move up to `count` keys of a slot on its way, and return how many were moved."""
    with source.connect() as connection:
        keys = connection.ask("CLUSTER", "GETKEYSINSLOT", slot, count)
        if keys:
            destination = ("127.0.0.1", target.port, "", 0, _MIGRATE_MS)
            connection.ask("MIGRATE", *destination, "AUTH", target.password, "KEYS", *keys)
        return len(keys)


def end_move(slot: int, source: ClusterNode, target: ClusterNode, others: Iterable[ClusterNode]) -> None:
    """Hand a slot over, and tell the `others` at once rather than by gossip."""
    # The target first: were it the source, a crash in between would leave a slot that nobody has.
    for node in (target, source, *others):
        try:
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.id)
        except ReplyError as error:
            # A node that gave its last slot away, and learned so by gossip, is already a replica of the new owner.
            if node is target or "only with masters" not in str(error):
                raise
