"""One node of a Redis Cluster, and what it knows of the others. Law: it is asked each time, but for its id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed_state.programs.servers.asking import info
from distributed_state.programs.servers.process import free_port
from distributed_state.programs.servers.redis import RedisServer

SLOTS = 16_384


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
