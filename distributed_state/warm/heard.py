"""What is heard of each partition, and by whom. Law: a subscription ends together with what was read under it.

Design: sections 7, 20.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from distributed_state.values.freshness import Freshness

Handler = Callable[[bytes, bytes], None]  # the channel, and what was published there


class HeardPartition:
    """What is heard of one partition, and under which name commits there say so."""

    def __init__(self, partition: int, slot: int, meta: bytes, echoes: bytes) -> None:
        self.partition = partition
        self.slot = slot
        self.meta = meta
        self.echoes = echoes
        self.own = b""
        self.named: set[bytes] = set()  # channels that a write was said to be heard on, under the present name
        self.channels: dict[bytes, None] = {}
        self.freshness = Freshness(partition)
        self.node: str | None = None  # where it is heard, or is to be
        self.asked = False  # on the present connection to there
        self._count = 0

    def rename(self) -> None:
        """Take a name that was never used before."""
        self.named.clear()
        self._count += 1
        self.own = b"%b.%d" % (self.echoes, self._count)

    def renew(self) -> Freshness:
        """End what was read until now; the freshness of that."""
        gone = self.freshness
        gone.end()
        self.freshness = Freshness(self.partition)
        return gone


@dataclass(slots=True)
class Heard:
    """What all links of a replica share. The tables change under the mutex only."""

    mutex: AbstractContextManager[Any]
    find: Callable[[bytes], HeardPartition | None]  # by a channel
    lost: Callable[[list[Freshness]], None]
    relocate: Callable[[], Coroutine[Any, Any, None]]
    epoch_heard: Callable[[int, str], None]
    time_received: Callable[[str, Any, float], None]
    handlers: dict[bytes, Handler] = field(default_factory=dict)
    confirmed: dict[bytes, HeardPartition] = field(default_factory=dict)
    unkept: set[bytes] = field(default_factory=set)  # channels of which nothing is kept that has to be proved
