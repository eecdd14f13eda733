"""Every name in Redis. Law: only this file builds names, and two ids never share a name.

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


def due_of(lifetimes: bytes, handler: str) -> bytes:
    """The due set of a handler in the partition with this set of lifetimes."""
    return b"%bdue:%b" % (lifetimes.removesuffix(b"lifetimes"), handler.encode())


@dataclass(frozen=True, slots=True)
class PartitionKeys:
    """The keys of a partition that do not belong to one record."""

    partition: int
    journal: bytes  # stream: every commit until it is archived; an entry's id is a dense offset
    meta: bytes  # hash: the epoch, how far the journal is written and archived, the last fencing token, names
    archiver: bytes  # string: the replica that archives the partition, with a TTL
    events: bytes  # stream: the newest lifecycle events; an entry's id is a dense offset
    events_channel: bytes  # channel: its events, for every replica that subscribed to them
    lifetimes: bytes  # sorted set: sessions that end by themselves, by the time of the next check
    gathering: bytes  # string, temporary: replicas report unarchived commits, because Redis lost data
    leases: bytes  # sorted set: the locked records, by their fencing tokens
    due_channel: bytes  # channel: the due set of a session that has become due, for workers with its handler

    def due_of(self, handler: str) -> bytes:
        """A sorted set: the sessions with this handler, by when they are due."""
        return due_of(self.lifetimes, handler)

    def worker(self, handler: str) -> bytes:
        """A string: the worker that serves the partition's sessions with this handler, with a TTL."""
        return due_of(self.lifetimes, handler) + b":worker"

    @property
    def emit_keys(self) -> tuple[bytes, ...]:
        """The keys that an event outside a commit uses."""
        return self.journal, self.meta, self.events, self.events_channel


@dataclass(frozen=True, slots=True)
class RecordKeys:
    """The keys and channels of one record."""

    ref: Ref
    text: bytes
    partition: int
    record: bytes  # hash: the fields as JSON; names that begin with `#` are the store's own, messages among them
    lock: bytes  # string: the holder of the record, with a TTL
    wait: bytes  # sorted set: the waiters for the record, in order
    hydration: bytes  # string: the replica that restores the record from SQL, with a TTL
    journal: bytes
    meta: bytes
    channel: bytes  # channel: its changes, for the replicas that have it hot
    lock_channel: bytes  # channel: notifies waiters that the record was released
    event_keys: tuple[bytes, bytes]
    lifetimes: bytes
    items: bytes  # hash: its newest items
    forks: bytes  # hash: forks of it that are being made, each with a deadline; the hash has a TTL
    leases: bytes
    stop: bytes  # string, temporary: the lock value of the holder that is asked to stop, and why
    output: bytes  # stream, temporary: chunks of turns; an entry is named by the token and its last chunk's number
    output_channel: bytes  # channel: entries of the output, and stops, for followers of turns
    due_channel: bytes  # channel: the due set of a session that has become due, for workers with its handler
    commit_keys: tuple[bytes, ...] = field(init=False, compare=False, repr=False)

    def due_of(self, handler: str) -> bytes:
        """A sorted set: the sessions of its partition with this handler, by when they are due."""
        return due_of(self.lifetimes, handler)

    def stop_of(self, tag: str) -> bytes:
        """A string, temporary: why the workflow of the request with this tag is to stop before its next step."""
        return self.stop + b":" + tag.encode()

    def ticket_of(self, digest: str) -> bytes:
        """A string, temporary: the caller of the ticket with this digest, by which the record may be followed."""
        return self.stop + b":ticket:" + digest.encode()

    def __post_init__(self) -> None:
        keys = (self.record, self.lock, self.hydration, self.journal, self.meta, self.channel)
        object.__setattr__(self, "commit_keys", keys)


class Keys:
    """The names of one namespace of one store."""

    def __init__(self, namespace: str, partitions: int) -> None:
        if not _NAMESPACE.fullmatch(namespace):
            raise ConfigurationError(f"namespace {namespace!r}: use 1 to 64 letters, digits, '.', '_' or '-'")
        self.namespace = namespace
        self._divide(partitions)

    def _divide(self, partitions: int) -> None:
        namespace = self.namespace
        if not 1 <= partitions <= 1024:
            raise ConfigurationError(f"{partitions} partitions: use 1 to 1024")
        self.partitions = partitions
        self.store = f"{namespace}:meta".encode()  # string: partitions, layout and archive, compared at open
        self.archivers = f"{namespace}:archivers".encode()  # sorted set: the archivers, and until when each counts
        # In the slot of partition 0, as the events that report lost replicas.
        self._fleet = f"{namespace}:{{{tag(0, partitions)}}}"
        self.roll = f"{self._fleet}:roll".encode()  # sorted set: the replicas, and when each counts as lost
        self.failed_starts = f"{self._fleet}:failed_starts".encode()  # hash: replicas that failed to start, and why
        self.maintenance = f"{self._fleet}:maintenance".encode()  # string: when the maintenance ends, by whom, and why
        self.revoked = f"{self._fleet}:revoked".encode()  # sorted set: access tokens, by when they were revoked
        self.gatherings = f"{self._fleet}:gatherings".encode()  # hash, temporary: partitions that replicas must report
        self.gatherings_channel = f"{self._fleet}:gather".encode()  # channel: a report is requested
        self._partitions = lru_cache(maxsize=None)(self._partition)
        self.of = lru_cache(maxsize=8192)(self._record)

    def adopt(self, partitions: int) -> bool:
        """Use this number of partitions from now on; False, with no effect, if a name was already built."""
        if self.of.cache_info().misses or self._partitions.cache_info().misses:
            return False
        self._divide(partitions)
        return True

    def link(self, partition: int, replica: str) -> bytes:
        """A channel: a replica's probes of a partition; its own channels there have this prefix."""
        return f"{self.namespace}:{{{tag(partition, self.partitions)}}}:link:{replica}".encode()

    def probe(self, partition: int) -> bytes:
        """A string that never exists: writing it shows whether the partition's server accepts writes."""
        return f"{self.namespace}:{{{tag(partition, self.partitions)}}}:probe".encode()

    def partition_at(self, name: bytes) -> int:
        """The partition of a key or channel that belongs to one."""
        begin = len(self.namespace) + 2
        return int(name[begin : name.index(b".", begin)])

    def text_of(self, channel: bytes) -> str:
        """The text of the record whose changes are published on this channel."""
        # A namespace and a hash tag contain no brace, so the first brace ends the hash tag, whatever the record's name.
        return channel.partition(b"}:c:")[2].decode()

    def record_of(self, channel: bytes) -> bytes:
        """The key of the record whose changes are published on this channel."""
        return channel.replace(b"}:c:", b"}:r:", 1)

    def named(self, record: bytes) -> RecordKeys:
        """The keys of the record with this key."""
        return self.of(Ref.parse(record.partition(b"}:r:")[2].decode()))

    def slot(self, partition: int) -> int:
        """The cluster slot of a partition."""
        return crc_hqx(tag(partition, self.partitions).encode(), 0) % SLOTS

    def replica(self, replica: str) -> bytes:
        """A string, temporary once the replica is lost: its report about itself."""
        return f"{self._fleet}:replica:{replica}".encode()

    def partition(self, partition: int) -> PartitionKeys:
        """The keys of one partition."""
        return self._partitions(partition)

    def partition_of(self, text: str) -> int:
        """The partition in which the record with this text lives."""
        return crc32(text.encode()) % self.partitions

    def _partition(self, partition: int) -> PartitionKeys:
        prefix = f"{self.namespace}:{{{tag(partition, self.partitions)}}}"
        named = ("journal", "meta", "archiver", "events", "e", "lifetimes", "gathering", "leases", "due")
        return PartitionKeys(partition, *(f"{prefix}:{name}".encode() for name in named))

    def gathered(self, partition: int, token: str) -> bytes:
        """A list, temporary: the replicas' answers to one request for unarchived commits."""
        return f"{self.namespace}:{{{tag(partition, self.partitions)}}}:gathered:{token}".encode()

    def team(self, group: str) -> bytes:
        """A sorted set: the members of a group of consumers, and the time until which each counts."""
        return f"{self.namespace}:g:{escape(group)}".encode()

    def workers(self, handler: str) -> bytes:
        """A sorted set: the workers with this handler, and the time until which each counts."""
        return f"{self.namespace}:w:{handler}".encode()

    def group(self, partition: int, group: str) -> tuple[bytes, bytes]:
        """Strings: the member of a group that handles a partition's events, with a TTL, and the group's position."""
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
            event_keys=(f"{prefix}:events".encode(), f"{prefix}:e".encode()),
            lifetimes=f"{prefix}:lifetimes".encode(),
            items=f"{prefix}:i:{ref.text}".encode(),
            forks=f"{prefix}:f:{ref.text}".encode(),
            leases=f"{prefix}:leases".encode(),
            stop=f"{record}:lock:stop".encode(),
            output=f"{prefix}:o:{ref.text}".encode(),
            output_channel=f"{prefix}:oc:{ref.text}".encode(),
            due_channel=f"{prefix}:due".encode(),
        )
