"""How checkpoints, channel values and pending writes are stored: names, bytes. Law: stored items never change.

A checkpoint is an item of its thread's record, `namespace NUL id`. For each channel with a value it has the value
itself, if it is small, or refers to a separate item, `namespace NUL channel NUL version`. Later checkpoints repeat the
small values, so that most checkpoints are read in one piece; together these stay below INLINE_BYTES, and the rest
become items. So a checkpoint never depends on another one, and any may be removed.

Design: section 22.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ormsgpack

from distributed_state import CorruptState

CHECKPOINTS, BLOBS, WRITES = "checkpoints", "blobs", "writes"
RUN = "langgraph-run"
INLINE_BYTES = 4096
_SMALL_BYTES = 1024
_PART_BYTES = 300
_FORMAT = 1

Typed = tuple[str, bytes]
"""A serialized value: its type and bytes."""


def part(text: str) -> str:
    """A part of a key: the text itself, or its digest if it is long or contains the separator."""
    if len(text.encode("utf-8", "surrogatepass")) <= _PART_BYTES and "\0" not in text:
        return text
    return "#" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def run_tag(run: str) -> str:
    """The tag of threads that may contain a run: one of 128, as a record has few tags and a thread many runs."""
    return f"{hashlib.sha256(run.encode('utf-8', 'surrogatepass')).digest()[0] % 128}"


def within(namespace: str) -> str:
    """The prefix of a namespace's keys."""
    return part(namespace) + "\0"


def checkpoint_key(namespace: str, checkpoint_id: str) -> str:
    """The key of a checkpoint; keys within a namespace are ordered by id."""
    return within(namespace) + part(checkpoint_id)


def blob_key(namespace: str, channel: str, version: Any) -> str:
    """The key of a channel's value at a version."""
    return f"{within(namespace)}{part(channel)}\0{part(str(version))}"


def writes_prefix(namespace: str, checkpoint_id: str) -> str:
    """The prefix of the keys of a checkpoint's pending writes."""
    return checkpoint_key(namespace, checkpoint_id) + "\0"


def write_key(namespace: str, checkpoint_id: str, task_id: str, index: int) -> str:
    """The key of a pending write. Special writes (errors, interrupts) have a negative index."""
    return f"{writes_prefix(namespace, checkpoint_id)}{part(task_id)}\0{index}"


@dataclass(frozen=True, slots=True)
class Saved:
    """A stored checkpoint. `values` has each channel with a value: its bytes, or None if it is a separate item."""

    namespace: str
    id: str
    parent: str | None
    checkpoint: Typed
    metadata: Typed
    values: Mapping[str, Typed | None]
    run: str | None = None

    def pack(self) -> bytes:
        """The bytes that are stored."""
        fields = (self.namespace, self.id, self.parent, self.checkpoint, self.metadata, dict(self.values), self.run)
        return ormsgpack.packb((_FORMAT, *fields))

    @classmethod
    def unpack(cls, data: bytes) -> Saved:
        """Read a stored checkpoint back. Raises CorruptState."""
        try:
            layout, namespace, name, parent, checkpoint, metadata, values, run = ormsgpack.unpackb(data)
            if layout != _FORMAT:
                raise ValueError(f"layout {layout} is unknown to this release")
            kept = {channel: value and _typed(value) for channel, value in values.items()}
            return cls(namespace, name, parent, _typed(checkpoint), _typed(metadata), kept, run)
        except (ValueError, TypeError, AttributeError) as error:
            raise CorruptState(f"a checkpoint cannot be read: {error}", field=CHECKPOINTS, data=data) from error


def _typed(stored: Sequence[Any]) -> Typed:
    kind, data = stored
    return kind, data


@dataclass(frozen=True, slots=True)
class SavedWrite:
    """A stored pending write."""

    checkpoint_id: str
    task_id: str
    index: int
    channel: str
    value: Typed
    path: str

    def pack(self) -> bytes:
        """The bytes that are stored."""
        return ormsgpack.packb((self.checkpoint_id, self.task_id, self.index, self.channel, self.value, self.path))

    @classmethod
    def unpack(cls, data: bytes) -> SavedWrite:
        """Read a stored write back. Raises CorruptState."""
        try:
            checkpoint_id, task_id, index, channel, value, path = ormsgpack.unpackb(data)
            return cls(checkpoint_id, task_id, index, channel, _typed(value), path)
        except (ValueError, TypeError) as error:
            raise CorruptState(f"a pending write cannot be read: {error}", field=WRITES, data=data) from error


def pack_blob(value: Typed) -> bytes:
    """The bytes of a channel's value."""
    return ormsgpack.packb(value)


def unpack_blob(data: bytes) -> Typed:
    """Read a channel's value back. Raises CorruptState."""
    try:
        return _typed(ormsgpack.unpackb(data))
    except (ValueError, TypeError) as error:
        raise CorruptState(f"a channel's value cannot be read: {error}", field=BLOBS, data=data) from error


def placed(
    fresh: Mapping[str, Typed], carried: Mapping[str, Typed | None]
) -> tuple[dict[str, Typed | None], dict[str, Typed]]:
    """The places of a checkpoint's values: the values for its frame, and the values that become items now.

    `fresh` are the values that are new in this checkpoint, `carried` the entries of its parent's frame for the others.
    The smallest values go into the frame, up to its limit.
    """
    values: dict[str, Typed | None] = {channel: None for channel, value in carried.items() if value is None}
    known = {channel: value for channel, value in carried.items() if value is not None} | dict(fresh)
    items: dict[str, Typed] = {}
    size = 0
    for channel, value in sorted(known.items(), key=lambda each: len(each[1][1])):
        size += len(value[1])
        if size <= INLINE_BYTES and len(value[1]) <= _SMALL_BYTES:
            values[channel] = value
        else:
            values[channel] = None
            items[channel] = value
    return values, items
