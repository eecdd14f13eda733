"""How checkpoints, values of channels and pending writes are stored: names, bytes. Law: what is stored never changes.

A checkpoint is an item of its thread's record, `namespace NUL id`. It says of each channel that has a value where
that is: in the frame itself, if it is small, or in an item of its own, `namespace NUL channel NUL version`. Such a
small value is carried along by the checkpoints that follow, so that most checkpoints are read in one piece; together
they are kept below INLINE_BYTES, and what is too much becomes an item. So a checkpoint never leans on another one,
and any may be removed.

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
"""What a serializer makes of a value: its type and bytes."""


def part(text: str) -> str:
    """A part of a key: as it is, or a digest where it is long or holds what separates parts."""
    if len(text.encode("utf-8", "surrogatepass")) <= _PART_BYTES and "\0" not in text:
        return text
    return "#" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def run_tag(run: str) -> str:
    """The tag of threads in which a run may be found. One of 128, as a record has few tags and a thread many runs."""
    return f"{hashlib.sha256(run.encode('utf-8', 'surrogatepass')).digest()[0] % 128}"


def within(namespace: str) -> str:
    """What the keys of a namespace begin with."""
    return part(namespace) + "\0"


def checkpoint_key(namespace: str, checkpoint_id: str) -> str:
    """The key of a checkpoint; in a namespace they are in the order of their ids."""
    return within(namespace) + part(checkpoint_id)


def blob_key(namespace: str, channel: str, version: Any) -> str:
    """The key of a channel's value at a version."""
    return f"{within(namespace)}{part(channel)}\0{part(str(version))}"


def writes_prefix(namespace: str, checkpoint_id: str) -> str:
    """What the keys of a checkpoint's pending writes begin with."""
    return checkpoint_key(namespace, checkpoint_id) + "\0"


def write_key(namespace: str, checkpoint_id: str, task_id: str, index: int) -> str:
    """The key of a pending write. Special ones (errors, interrupts) have a negative index."""
    return f"{writes_prefix(namespace, checkpoint_id)}{part(task_id)}\0{index}"


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint as it is stored. `values` has each channel with a value: bytes, or None: an item of its own."""

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
        """Read it back. Raises CorruptState."""
        try:
            layout, namespace, name, parent, checkpoint, metadata, values, run = ormsgpack.unpackb(data)
            if layout != _FORMAT:
                raise ValueError(f"of a layout {layout} that this release does not know")
            kept = {channel: value and _typed(value) for channel, value in values.items()}
            return cls(namespace, name, parent, _typed(checkpoint), _typed(metadata), kept, run)
        except (ValueError, TypeError, AttributeError) as error:
            raise CorruptState(f"a checkpoint cannot be read: {error}", field=CHECKPOINTS, data=data) from error


def _typed(stored: Sequence[Any]) -> Typed:
    kind, data = stored
    return kind, data


@dataclass(frozen=True, slots=True)
class SavedWrite:
    """A pending write as it is stored."""

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
        """Read it back. Raises CorruptState."""
        try:
            checkpoint_id, task_id, index, channel, value, path = ormsgpack.unpackb(data)
            return cls(checkpoint_id, task_id, index, channel, _typed(value), path)
        except (ValueError, TypeError) as error:
            raise CorruptState(f"a pending write cannot be read: {error}", field=WRITES, data=data) from error


def pack_blob(value: Typed) -> bytes:
    """The bytes of a channel's value."""
    return ormsgpack.packb(value)


def unpack_blob(data: bytes) -> Typed:
    """Read them back. Raises CorruptState."""
    try:
        return _typed(ormsgpack.unpackb(data))
    except (ValueError, TypeError) as error:
        raise CorruptState(f"a channel's value cannot be read: {error}", field=BLOBS, data=data) from error


def placed(
    fresh: Mapping[str, Typed], carried: Mapping[str, Typed | None]
) -> tuple[dict[str, Typed | None], dict[str, Typed]]:
    """Where each value of a checkpoint is: what its frame says, and which values become items now.

    `fresh` are the values that are new with it, `carried` what its parent's frame says of the others. The smallest
    are in the frame, as long as all of them together are small.
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
