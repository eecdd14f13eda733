"""Values that enter and leave the cold tier. Law: texts are escaped by `model.escape`, bytes are opaque.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from distributed_state.values.journal import Happened, JournalEntry, KeptItems, Loaded, Segment, State


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a partition's journal was archived: the offset and event id of its last archived entry.

    `ended`, for a newly minted epoch: the number of the last lifecycle event of the previous epoch.
    """

    partition: int
    epoch: str
    ordinal: int
    offset: int
    event: str
    ended: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Minted:
    """How many partitions began another epoch recently, and how many seconds ago the last of them did."""

    partitions: int
    ago: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries of one partition's journal, in order, after the one at `from_offset`, `from_event`; 0: from the first."""

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
    """The events of those entries of an epoch that SQL lacks, and the present heads of their records.

    Entries of a record that was erased meanwhile do not count as lacking. `last_event` numbers the epoch's last
    lifecycle event.
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
    """The conditions of a listing of one scope, as escaped texts: all of these tags, with `deleted` records or not.

    With a `prefix` of ids or with tags it is in the order of ids, else the newest change comes first, to the minute.
    `changed_from_ms` and `changed_to_ms` (exclusive) bound the last change, `size` is the least number of bytes
    written.
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
    stuck: bool = False

    @property
    def by_id(self) -> bool:
        """Whether the listing is in the order of ids."""
        return self.prefix is not None or bool(self.tags)

    @property
    def text(self) -> str:
        """The beginning of the records' texts."""
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
"""The reason of a row of the quarantine that needs no attention."""
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
class DueRow:
    """A session with a handler; `due`: see `Schedule.column`."""

    record: str
    due: str


@dataclass(frozen=True, slots=True)
class Mortal:
    """A record with a lifetime, written as in `model.LIFETIME`, and the time of its last commit."""

    record: str
    partition: int
    lifetime: str
    updated_ms: int


@dataclass(frozen=True, slots=True)
class Erasure:
    """A record that is to be erased everywhere, with its `forks` or without.

    `version` is the last version that was erased in SQL, 0 while its rows exist; Redis may still have it. `actor` is
    the stored actor of the request, '' if there was none.
    """

    record: str
    partition: int
    owner: str | None
    forks: bool
    version: int
    actor: str = ""


@dataclass(frozen=True, slots=True)
class Kept:
    """How many commits of a record were just added to a branch, and the first of their versions."""

    record: str
    branch: str
    first: int
    commits: int


@dataclass(frozen=True, slots=True)
class Branched:
    """A branch of a record: commits of an ended epoch that are outside the record's history.

    The branch begins after version `base`; `missing` are runs of lost versions (first and last).
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
    published: bool


@dataclass(frozen=True, slots=True)
class BranchState:
    """A state on a branch. `messages` are the branch's own, which begin at number `first_message`."""

    state: State
    base: int
    first_message: int
    messages: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class Sought:
    """A query of events: in `type`, `*` stands for any characters.

    It finds the newest `limit`, or with `after`, a `Happened.place`, the first `limit` that follow it.
    """

    subject: str | None
    type: str | None
    since_ms: int
    until_ms: int
    limit: int
    after: tuple[int, int, str, int] | None


@dataclass(slots=True)
class Backfilled:
    """How many records got a whole state, how many commits and events were archived, how many were put aside.

    `branched` commits belong to a history that Redis left when it read the older SQL. `lost` are messages that neither
    Redis nor SQL has, by the record that showed them. Records in `lost_items` may lack items, because Redis has only
    the newest ones. Entries of records in `refused` went to quarantine and are not counted. Of `deleted` records Redis
    has only the deletion or erasure after the backup. Redis shows an outdated state of `stale` records.
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
        """Add the counts of another one."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True, slots=True)
class Held:
    """The data that Redis has of some records of a partition under its epoch: their states, and their journal entries.

    `deleted` are the last events by which records were deleted or expired. A missing record has no state.
    `archived` is an offset up to which everything was archived once, and `archived_ms` is the time of the commit there.
    `elsewhere` are messages that Redis has of records from which these were forked.
    """

    partition: int
    epoch: str
    archived: int
    archived_ms: int
    states: Mapping[str, Loaded]
    entries: Mapping[str, Sequence[JournalEntry]]
    deleted: Mapping[str, Happened]
    elsewhere: Mapping[str, Mapping[int, bytes]]
    items: Mapping[str, KeptItems]

    def ended(self, record: str) -> int:
        """The version at which a record was deleted or expired; 0 if no event says so."""
        return self.deleted[record].version if record in self.deleted else 0
