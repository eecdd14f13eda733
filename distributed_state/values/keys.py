"""Every name in Redis. Law: no other file builds one, and two ids never share a name.

A record lives in one of a fixed number of partitions; all keys of a partition share one Redis Cluster slot.

Design: section 3.
"""

from __future__ import annotations

import re
from binascii import crc_hqx
from dataclasses import dataclass, field
from functools import lru_cache
from zlib import crc32

from distributed_state.errors import ConfigurationError
from distributed_state.values.model import Ref, escape

SLOTS = 16384
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")


@lru_cache(maxsize=4096)
def tag(partition: int, partitions: int) -> str:
    """The hash tag of a partition: the first `<partition>.<n>` whose slot lies in the partition's even share.

    Plain numbers would fall unevenly: 64 of them put 2 to 9 on each of 12 nodes.
    """
    share = SLOTS / partitions
    n = 0
    while int(crc_hqx(f"{partition}.{n}".encode(), 0) % SLOTS / share) != partition:
        n += 1
    return f"{partition}.{n}"


@dataclass(frozen=True, slots=True)
class PartitionKeys:
    """The keys of a partition that belong to no single record."""

    partition: int
    journal: bytes
    meta: bytes
    archiver: bytes
    events: bytes
    events_channel: bytes
    relay_channel: bytes
    lifetimes: bytes
    gathering: bytes

    @property
    def emit_keys(self) -> tuple[bytes, ...]:
        """What is touched by an event that belongs to no commit."""
        return self.journal, self.meta, self.events, self.events_channel, self.relay_channel


@dataclass(frozen=True, slots=True)
class RecordKeys:
    """The keys and channels of one record."""

    ref: Ref
    text: bytes
    partition: int
    record: bytes
    lock: bytes
    wait: bytes
    hydration: bytes
    journal: bytes
    meta: bytes
    channel: bytes
    lock_channel: bytes
    event_keys: tuple[bytes, bytes, bytes, bytes]
    items: bytes
    commit_keys: tuple[bytes, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        keys = (self.record, self.lock, self.hydration, self.journal, self.meta, self.channel)
        object.__setattr__(self, "commit_keys", keys)


class Keys:
    """Names for one namespace of one store."""

    def __init__(self, namespace: str, partitions: int) -> None:
        if not _NAMESPACE.fullmatch(namespace):
            raise ConfigurationError(f"namespace {namespace!r}: use 1 to 64 letters, digits, '.', '_' or '-'")
        if not 1 <= partitions <= 1024:
            raise ConfigurationError(f"{partitions} partitions: use 1 to 1024")
        self.namespace = namespace
        self.partitions = partitions
        self.store = f"{namespace}:meta".encode()
        self.archivers = f"{namespace}:archivers".encode()
        # With the events of partition 0, which say who is lost.
        self._fleet = f"{namespace}:{{{tag(0, partitions)}}}"
        self.roll = f"{self._fleet}:roll".encode()
        self.failed_starts = f"{self._fleet}:failed_starts".encode()
        self.gatherings = f"{self._fleet}:gatherings".encode()
        self.gatherings_channel = f"{self._fleet}:gather".encode()
        self._partitions = lru_cache(maxsize=None)(self._partition)
        self.of = lru_cache(maxsize=8192)(self._record)

    def link(self, partition: int, replica: str) -> bytes:
        """The channel on which a replica receives its probes of a partition; its own channels there begin so, too."""
        return f"{self.namespace}:{{{tag(partition, self.partitions)}}}:link:{replica}".encode()

    def probe(self, partition: int) -> bytes:
        """A key of a partition that is never there: a write of it, where it is, tells whether writes are taken."""
        return f"{self.namespace}:{{{tag(partition, self.partitions)}}}:probe".encode()

    def partition_at(self, name: bytes) -> int:
        """The partition in which a key or channel of one lies."""
        begin = len(self.namespace) + 2
        return int(name[begin : name.index(b".", begin)])

    def heard_of(self, channel: bytes) -> str:
        """The text of the record whose changes are published on this channel."""
        # A namespace and a hash tag hold no brace, so the first is ours, whatever the record is named.
        return channel.partition(b"}:c:")[2].decode()

    def record_of(self, channel: bytes) -> bytes:
        """The key of that record."""
        return channel.replace(b"}:c:", b"}:r:", 1)

    def slot(self, partition: int) -> int:
        """The slot of a cluster in which a partition lies."""
        return crc_hqx(tag(partition, self.partitions).encode(), 0) % SLOTS

    def bookmark(self, name: str) -> bytes:
        """A position of events that has a short name."""
        return f"{self.namespace}:bookmark:{name}".encode()

    def replica(self, replica: str) -> bytes:
        """What a replica reports of itself."""
        return f"{self._fleet}:replica:{replica}".encode()

    def partition(self, partition: int) -> PartitionKeys:
        """The keys of one partition."""
        return self._partitions(partition)

    def partition_of(self, text: str) -> int:
        """The partition in which the record with this text lives."""
        return crc32(text.encode()) % self.partitions

    def _partition(self, partition: int) -> PartitionKeys:
        prefix = f"{self.namespace}:{{{tag(partition, self.partitions)}}}"
        named = ("journal", "meta", "archiver", "events", "e", "relay", "lifetimes", "gathering")
        return PartitionKeys(partition, *(f"{prefix}:{name}".encode() for name in named))

    def gathered(self, partition: int, token: str) -> bytes:
        """What replicas answer who gathers what they remember of a partition; one key for each time that is asked."""
        return f"{self.namespace}:{{{tag(partition, self.partitions)}}}:gathered:{token}".encode()

    def team(self, group: str) -> bytes:
        """Who is in a group of consumers."""
        return f"{self.namespace}:g:{escape(group)}".encode()

    def group(self, partition: int, group: str) -> tuple[bytes, bytes]:
        """Who of a group of consumers handles a partition's events, and how far they are."""
        prefix = f"{self.namespace}:{{{tag(partition, self.partitions)}}}:g:{escape(group)}"
        return f"{prefix}:owner".encode(), f"{prefix}:position".encode()

    def _record(self, ref: Ref) -> RecordKeys:
        partition = self.partition_of(ref.text)
        prefix = f"{self.namespace}:{{{tag(partition, self.partitions)}}}"
        record = f"{prefix}:r:{ref.text}"
        return RecordKeys(
            ref=ref,
            text=ref.text.encode(),
            partition=partition,
            record=record.encode(),
            lock=f"{record}:lock".encode(),
            wait=f"{record}:wait".encode(),
            hydration=f"{prefix}:h:{ref.text}".encode(),
            journal=f"{prefix}:journal".encode(),
            meta=f"{prefix}:meta".encode(),
            channel=f"{prefix}:c:{ref.text}".encode(),
            lock_channel=f"{prefix}:l:{ref.text}".encode(),
            event_keys=(
                f"{prefix}:events".encode(),
                f"{prefix}:e".encode(),
                f"{prefix}:relay".encode(),
                f"{prefix}:lifetimes".encode(),
            ),
            items=f"{prefix}:i:{ref.text}".encode(),
        )
