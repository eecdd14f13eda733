"""Frozen values that travel in and out of the cold tier. Law: texts are escaped by `model.escape`, bytes are opaque."""

from __future__ import annotations

from dataclasses import dataclass

from distributed_state.model import Entry


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a partition's journal was archived: the offset and event id of its last archived entry."""

    partition: int
    epoch: str
    ordinal: int
    offset: int
    event: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries of one partition's journal, in order, that follow `from_offset`."""

    partition: int
    epoch: str
    from_offset: int
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class Listed:
    """One row of a listing. `cursor` continues the listing after this row."""

    record: str
    id: str
    owner: str | None
    version: int
    created_ms: int
    updated_ms: int
    deleted: bool
    cursor: str


@dataclass(frozen=True, slots=True)
class Purged:
    """How much a purge removed, and from how many records."""

    records: int
    changes: int
    messages: int

    def __add__(self, other: Purged) -> Purged:
        return Purged(self.records + other.records, self.changes + other.changes, self.messages + other.messages)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A journal entry that could not be archived, or that a newer epoch replaced, kept as it was."""

    id: int
    partition: int
    epoch: str
    offset: int
    event: str
    record: str
    version: int
    reason: str
    data: bytes
    time_ms: int
