"""Frozen values that users get back: what was written, changes, snapshots, events. Law: they hold no connection.

Design: section 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from distributed_state.values.items import Item
from distributed_state.values.model import Message, unescape
from distributed_state.values.turn_times import TurnTimes


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of a `write` or a turn: the new version, results of increments, the number of its first message.

    That number is None if no message was added, or if only SQL remembers it: the commit's reply was lost and asked for
    again much later.
    """

    version: int
    results: dict[str, int] = field(default_factory=dict)
    first_message: int | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of a record's history. `time` is in seconds since 1970; `set` and `appended` are decoded values.

    `items` has by collection and key what was put, None for what was deleted. `tagged`
    and `untagged` are pairs of key and text. `replica` is the process that wrote it, as `store.replicas()` names it.
    `times` says where a turn's time went; None of all else.
    """

    version: int
    time: float
    kind: str
    actor: str
    token: int
    set: dict[str, Any]
    deleted: tuple[str, ...]
    appended: tuple[Message, ...]
    phase: str | None
    label: str | None
    items: dict[tuple[str, str], Item | None] = field(default_factory=dict)
    replica: str = ""
    tagged: tuple[tuple[str, str], ...] = ()
    untagged: tuple[tuple[str, str], ...] = ()
    times: TurnTimes | None = None


@dataclass(frozen=True, slots=True)
class ChangeOutline:
    """An entry of a history without what it says: `fields` and `deleted` are names, a few of them, `more` how many not.

    `restored` is the version whose state a rollback brought back; `size` is in bytes, without messages and items.
    `phase` is where it moved, "" if it has none since; None: it stayed. `times`
    says where a turn's time went.
    """

    version: int
    time: float
    kind: str
    actor: str
    replica: str
    token: int
    fields: tuple[str, ...]
    deleted: tuple[str, ...]
    more: int
    messages: int
    items: int
    phase: str | None
    label: str | None
    restored: int | None
    size: int
    times: TurnTimes | None = None


@dataclass(frozen=True, slots=True)
class Forked:
    """A record that was forked from another one, at `version` of it; None if that is not known any more."""

    id: str
    version: int | None
    created: float
    deleted: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A record as it was at `version`: fields decoded, messages in order, tags (texts by key)."""

    version: int
    fields: dict[str, Any]
    messages: tuple[Message, ...]
    phase: str | None
    deleted: bool
    tags: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Branch:
    """Commits that were acknowledged and that their record does not continue, as their server was replaced.

    It begins behind version `base` of the record `record_id`, of the kind `scope`, and has `commits` versions of its
    own up to `version`, written under `epoch`. `missing` are runs of versions (first and last) that are lost between
    them, mostly none. `cause` says what happened; `actors` who wrote. Times are in seconds since 1970: of its first and
    last commit by the server's clock, and when it was `kept`. `id` is short, unique within the record, and stays.
    `cursor` continues `store.branches` behind this record.
    """

    id: str
    scope: str
    record_id: str
    epoch: str
    base: int
    version: int
    commits: int
    missing: tuple[tuple[int, int], ...]
    first_time: float
    last_time: float
    kept: float
    cause: str
    actors: tuple[str, ...]
    cursor: str

    @property
    def complete(self) -> bool:
        """Whether no version between `base` and `version` is missing, so that all its states can be read."""
        return not self.missing


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A version with a name. `time` is in seconds since 1970."""

    label: str
    version: int
    time: float


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How long a session lives: `idle` seconds without a commit, and at most until `until`; None is without end.

    `ends` is when that will be if nobody writes any more. Times are in seconds since 1970 by the server's clock.
    """

    idle: float | None
    until: float | None
    ends: float | None


@dataclass(frozen=True, slots=True)
class Waiter:
    """Somebody who waits for a lease: on which replica, and `since` when, in seconds since 1970."""

    replica: str
    since: float


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease that is held now, of the record `record_id` of the kind `scope`.

    `kind` is what it is held for: a "turn", a "lock", an "advisory" lock, or a "client" of the service. `replica` took
    it, `since` then; it `ends` then unless it is renewed, as it is while its holder lives. Times are in seconds since
    1970, by the server's clock. `token` is its fencing token: it names this lease and no other of the record.
    `waiting` is how many wait for it, `waiters` the first twenty of them, in order. `cursor` continues `store.leases`
    behind it.
    """

    scope: str
    record_id: str
    kind: str
    token: int
    replica: str
    since: float
    ends: float
    waiting: int
    waiters: tuple[Waiter, ...]
    cursor: str


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One row of a listing. Times are in seconds since 1970; `cursor` continues the listing after this row.

    `phase` is where its state machine is, `size` how many bytes were committed to it. What was archived before the
    tables had them (revision 3) is in neither: they are None, or `size` is less, until it changes.
    """

    id: str
    user: str | None
    version: int
    created: float
    updated: float
    deleted: bool
    cursor: str
    phase: str | None = None
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to a conversation, an agent or the fleet.

    `subject` is the text of the record that it is about (`session:` and the escaped id), or what `emit` was given;
    `time` is in seconds since 1970 by the server's clock; `source` is the replica that wrote it. `sequence` counts
    the events of a `partition` without a gap, within an `epoch`. `version` is the record's, as the change made it, and
    0 for an event that was written alone. `id` stays the same when an event is delivered again.
    """

    id: str
    type: str
    subject: str
    time: float
    data: dict[str, Any]
    source: str
    sequence: int
    epoch: str
    partition: int
    version: int
    actor: str

    @property
    def conversation_id(self) -> str:
        """The id of the session that it is about, "" if it is about something else."""
        scope, _, name = self.subject.partition(":")
        return unescape(name) if scope == "session" else ""

    @property
    def cursor(self) -> str:
        """Where `audit` goes on after this event."""
        return f"{round(self.time * 1000)}.{self.partition}.{self.epoch}.{self.sequence}"

    def to_dict(self) -> dict[str, Any]:
        """The event as JSON values in the names of CloudEvents 1.0, our own attributes as extensions."""
        moment = datetime.fromtimestamp(self.time, UTC).isoformat(timespec="milliseconds")
        # An empty subject is left out: CloudEvents has no such thing.
        return {
            "specversion": "1.0",
            "id": self.id,
            "source": self.source,
            "type": self.type,
            "time": moment.replace("+00:00", "Z"),
            **({"subject": self.subject} if self.subject else {}),
            "datacontenttype": "application/json",
            "data": self.data,
            "sequence": self.sequence,
            "epoch": self.epoch,
            "partition": self.partition,
            "version": self.version,
            "actor": self.actor,
        }


@dataclass(frozen=True, slots=True)
class Replica:
    """A process that has this namespace's store open, as it reports itself.

    `started` is in seconds since 1970 by its own clock, `seen` how many seconds ago it reported this, by the server's.
    `load` is its machine's (of one minute). `positions` say how far its work is: `archived` commits, how many
    partitions it `archives`, and where its slowest consumer is in the `events`, as a sum over the partitions. `stats`
    are some of `store.stats()`, `status` is what it was given by `store.announce`. `archiving` says why its archiver
    makes no progress, as a full disk of SQL's; "" if it does, or has nothing to do. `diverged` says of the first ten
    partitions of which it archives nothing why, as their journals do not continue what SQL has.
    """

    id: str
    host: str
    pid: int
    version: str
    started: float
    seen: float
    load: float
    positions: dict[str, int]
    stats: dict[str, int]
    status: dict[str, Any]
    archiving: str = ""
    diverged: dict[str, str] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """What it does in the fleet: `service`, `archiver`, `agents`, or `worker` for anything else that uses a store.

        What archives beside its work is a `worker + archiver`. A `role` that it announced stands for the first.
        """
        role = str(self.status.get("role") or ("agents" if self.status.get("agents") else "worker"))
        return f"{role} + archiver" if self.positions.get("archives", 0) and role != "archiver" else role
