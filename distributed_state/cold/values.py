"""Values that travel in and out of the cold tier. Law: texts are escaped by `model.escape`, bytes are opaque.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from distributed_state.values.journal import JournalEntry, KeptItems, Loaded, Segment, State


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a partition's journal was archived: the offset and event id of its last archived entry.

    `ended`: of an epoch that is minted, the number of the last lifecycle event of the one before.
    """

    partition: int
    epoch: str
    ordinal: int
    offset: int
    event: str
    ended: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Minted:
    """How many partitions began another epoch lately, and how many seconds ago the last of them did."""

    partitions: int
    ago: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries of one partition's journal, in order, that follow the one at `from_offset`, `from_event`; 0: none."""

    partition: int
    epoch: str
    from_offset: int
    entries: list[JournalEntry]
    from_event: str = ""


@dataclass(frozen=True, slots=True)
class Archived:
    """How far a record is archived: its last version, with the epoch, offset and event of the commit that made it.

    The offset is 0 and the event '' if that commit was purged or erased.
    """

    version: int
    epoch: str
    offset: int
    event: str


@dataclass(frozen=True, slots=True)
class Commits:
    """What SQL has of some entries of an epoch: the events of those it lacks, and the records' heads before them.

    What it lacks of a record that was erased since is left out. `last_event` numbers the epoch's last lifecycle event.
    """

    lacking: set[str]
    heads: dict[str, Archived]
    last_event: int


@dataclass(frozen=True, slots=True)
class Listed:
    """One row of a listing. `cursor` continues the listing after this row."""

    record: str
    owner: str | None
    version: int
    created_ms: int
    updated_ms: int
    deleted: bool
    cursor: str
    phase: str | None
    size: int | None

    @property
    def id(self) -> str:
        """The record's id within its scope."""
        return self.record.partition(":")[2]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records of a scope a listing is to have, by escaped texts: with all of these tags, `deleted` ones as well.

    With a `prefix` of ids or with tags they come in order of their ids, else the newest change first, to the minute.
    `changed_from_ms` and `changed_to_ms` (exclusive) bound their last change, `size` how much was written to them.
    """

    scope: str
    limit: int
    owner: str | None = None
    prefix: str | None = None
    tags: tuple[str, ...] = ()
    after: str | None = None
    deleted: bool = False
    phase: str | None = None
    changed_from_ms: int | None = None
    changed_to_ms: int | None = None
    size: int | None = None

    @property
    def by_id(self) -> bool:
        """Whether they come in order of their ids."""
        return self.prefix is not None or bool(self.tags)

    @property
    def text(self) -> str:
        """What the texts of their records begin with."""
        return f"{self.scope}:{self.prefix or ''}"


@dataclass(frozen=True, slots=True)
class Purged:
    """How much a purge removed, and from how many records."""

    records: int
    changes: int
    messages: int
    events: int = 0

    def __add__(self, other: Purged) -> Purged:
        changes = self.changes + other.changes
        messages = self.messages + other.messages
        return Purged(self.records + other.records, changes, messages, self.events + other.events)


@dataclass(frozen=True, slots=True)
class Compacted:
    """How many changes and messages were packed into blocks, and of how many records."""

    records: int
    changes: int
    messages: int

    def __add__(self, other: Compacted) -> Compacted:
        return Compacted(self.records + other.records, self.changes + other.changes, self.messages + other.messages)


RESOLVED = "SQL lacks what came before it; what it did is in a later version, which was brought back whole"
"""The reason of a row of the quarantine that nobody needs to look at."""
UNRESOLVED = "SQL lacks what came before it, and refused the later version with which it came; that is here, too"


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


@dataclass(frozen=True, slots=True)
class Mortal:
    """A record that has a lifetime, as `model.LIFETIME` is written, and when it was last committed."""

    record: str
    partition: int
    lifetime: str
    updated_ms: int


@dataclass(frozen=True, slots=True)
class Erasure:
    """A record that is to be erased everywhere, with its `forks` or without.

    `version` is the last one that was erased in SQL, 0 while its rows are there; Redis may still hold it. `actor` asked
    for it, as stored, '' if nobody said.
    """

    record: str
    partition: int
    owner: str | None
    forks: bool
    version: int
    actor: str = ""


@dataclass(frozen=True, slots=True)
class Kept:
    """How many commits of a record were added to a branch just now, and the first of their versions."""

    record: str
    branch: str
    first: int
    commits: int


@dataclass(frozen=True, slots=True)
class Branched:
    """A branch of a record: the commits that a closed epoch had of it, and that the record does not continue.

    `base` is the version that it begins behind, `missing` are runs of versions (first and last) that are lost.
    """

    record: str
    partition: int
    id: str
    epoch: str
    base: int
    versions: tuple[int, ...]
    missing: tuple[tuple[int, int], ...]
    first_ms: int
    last_ms: int
    kept_ms: int
    cause: str
    actors: tuple[str, ...]
    told: bool


@dataclass(frozen=True, slots=True)
class BranchState:
    """A state on a branch. Of its messages those from number `first_message` on are the branch's own: `messages`."""

    state: State
    base: int
    first_message: int
    messages: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class Sought:
    """Which events are asked for: in `type`, `*` stands for any characters.

    Of those the newest `limit`, or with `after`, a `Happened.place`, the first `limit` that follow it.
    """

    subject: str | None
    type: str | None
    since_ms: int
    until_ms: int
    limit: int
    after: tuple[int, int, str, int] | None


@dataclass(slots=True)
class Backfilled:
    """How many records came whole, how many commits and events of the journal one by one, and how many were put aside.

    `branched` commits are of a line that Redis left as it read the older SQL. `lost` are messages that neither has, by
    the record that showed them. Of the items of those in `lost_items` some may be lost: Redis has only the newest.
    SQL put something of those in `refused` into quarantine, which is not counted.
    `deleted` are records of which Redis only knows that they were deleted, or erased, since the backup. Of `stale` ones
    Redis shows what they are not any more.
    """

    records: int = 0
    commits: int = 0
    events: int = 0
    aside: int = 0
    branched: int = 0
    lost: list[Segment] = field(default_factory=list)
    lost_items: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)

    def add(self, other: Backfilled) -> None:
        """Count what another one counted."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True, slots=True)
class Held:
    """What Redis has of some records of a partition under its epoch: how they stand, and their entries of the journal.

    `deleted` are versions at which records were deleted, as events tell. A record that is not there has no state.
    `archived` is an offset up to which all was archived, once, and `archived_ms` is when the commit there was written.
    `elsewhere` are messages that Redis has of records from which these were forked.
    """

    partition: int
    epoch: str
    archived: int
    archived_ms: int
    states: Mapping[str, Loaded]
    entries: Mapping[str, Sequence[JournalEntry]]
    deleted: Mapping[str, int]
    elsewhere: Mapping[str, Mapping[int, bytes]]
    items: Mapping[str, KeptItems]
