"""Frozen values returned to users: outcomes of writes, changes, snapshots, events. Law: they hold no connection.

Design: section 1.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from distributed_state.errors import InvalidValue
from distributed_state.values.items import Item
from distributed_state.values.model import Message, unescape
from distributed_state.values.turn_times import TimedRun as TimedRun
from distributed_state.values.turn_times import TurnTimes as TurnTimes
from distributed_state.values.usage import Tokens as Tokens
from distributed_state.values.usage import Usage as Usage

__all__ = [
    "Abandoned",
    "Ask",
    "Branch",
    "Change",
    "Checkpoint",
    "Chunk",
    "Ended",
    "Event",
    "Failed",
    "Finding",
    "HeldLease",
    "Indexed",
    "Input",
    "Lifetime",
    "LostMessages",
    "Notice",
    "OutputPart",
    "Reencrypted",
    "Repaired",
    "Replica",
    "Restarted",
    "SessionInfo",
    "Snapshot",
    "StopRequested",
    "StopResult",
    "TimedRun",
    "Tokens",
    "Truncated",
    "TurnTimes",
    "Upcast",
    "Usage",
    "Waiter",
    "Written",
    "fold",
]


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of a `write` or a turn: the new version, results of increments, the number of its first message.

    That number is None if no message was added, or if the reply of the commit was lost and the request was repeated so
    late that only SQL still has the commit.
    """

    version: int
    results: dict[str, int] = field(default_factory=dict)
    first_message: int | None = None


@dataclass(frozen=True, slots=True)
class Input:
    """A message that waits for a turn of its session: see `session.post`.

    `number` counts the inputs of the session from 1, in the order in which they were accepted; `time` is when, in
    seconds since 1970 by the server's clock. For a wake, see `session.wake`, `time` is when it was due, `wake` its
    name, and `every` the seconds until it is due again, if it repeats.
    """

    number: int
    message: Message
    request_id: str | None
    time: float
    wake: str | None = None
    every: float | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """An open question to a person: see `turn.ask`. Times are in seconds since 1970 by the server's clock.

    `id` distinguishes questions of the same name. `data` is what the turn gave, for example the choices; `expires` is
    None for a question that waits without limit.
    """

    session: str
    name: str
    id: str
    question: str
    data: Any
    asked: float
    expires: float | None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a running turn's answer, as `turn.stream` got it. `position`: where to go on, for `session.output`."""

    position: str
    data: Any


@dataclass(frozen=True, slots=True)
class Restarted:
    """The request is served again, by another attempt: drop the chunks of the earlier one."""

    position: str


@dataclass(frozen=True, slots=True)
class Truncated:
    """Chunks before this position are missing: there were too many of them, or Redis could not keep them."""

    position: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody asked the turn to stop. Its end follows."""

    position: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The turn ended without an end: its worker died, or lost its lease to another request. Nothing was written."""

    position: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The turn raised an error. Nothing was written."""

    position: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The turn is over. `version` is that of its commit, None if it changed nothing; `outcome` is `turn.outcome`.

    The outcome is None for a turn without a request id.
    """

    position: str
    version: int | None
    outcome: Any


@dataclass(frozen=True, slots=True)
class Notice:
    """Something happened to the session: numbers and names, no contents. Only with `session.output(notices=True)`.

    `name` and `data`:

    - `turn.started`, `turn.ended`: `token`, the fencing token of the turn's lease. Within a second, unless it streams;
      a turn that streams nothing and is over earlier has neither.
    - `message.appended`: `version`, and the number of the `first` and `last` message.
    - `fields.changed`: `version`, the `names` of the fields, and the collections of the `items`; `phase` is true if the
      phase moved.
    - `inbox.posted`: `version`, and the `number` of the input.
    - `inbox.taken`: `version`, and the `numbers` of the inputs that a turn took, or that were withdrawn.
    - `resync`: notices are missing, or a commit was too large to be named: read what you show again.

    `position` is that of the last part of the output: notices are not kept, and cannot be read again.
    """

    position: str
    name: str
    data: dict[str, Any]


OutputPart = Chunk | Restarted | Truncated | StopRequested | Abandoned | Failed | Ended | Notice
"""The parts that `session.output` yields."""


@dataclass(frozen=True, slots=True)
class StopResult:
    """The result of `session.stop`. `version`: of the turn's commit, None if it wrote nothing or that is unknown.

    `state` is "stopped" (the turn ended because of it), "finished" (it had ended, or ended without noticing),
    "nothing ran", or "stopping" (it still runs after `wait` seconds).
    """

    state: str
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of a record's history. `time` is in seconds since 1970; `set` and `appended` are decoded values.

    `items` maps collection and key to the item that was put, or to None for a deleted one. `tagged` and `untagged` are
    pairs of key and text. `replica` is the process that wrote the change, as `store.admin.replicas()` names it. `times`
    says how a turn spent its time, `usage` which tokens it used; None for other changes.

    A change may remove or restore parts before it sets values:

    - `cleared`: which parts it emptied, of "fields", "messages", "items", "tags" and "phase", and "record" if it
      deleted the record.
    - `kept`: the earlier messages that are shown after it, as pairs of the first and the last number, None for "to the
      newest"; `kept` is None if the change removed and restored no messages.
    - `restored`: the version whose state a rollback restored.
    - `from_version`: of a fork's first change, the version of its source.

    `fold` rebuilds a state from changes.
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
    usage: Usage | None = None
    cleared: tuple[str, ...] = ()
    kept: tuple[tuple[int, int | None], ...] | None = None
    restored: int | None = None
    from_version: int | None = None


@dataclass(frozen=True, slots=True)
class ChangeOutline:
    """An entry of a history without its contents: `fields` and `deleted` are some of the names, `more` counts the rest.

    `restored` is the version whose state a rollback restored; `size` is in bytes, without messages and items. `phase`
    is the new phase, "" if the record no longer has one, None if it did not change. `times` says how a turn spent its
    time, `usage` which tokens it used. `said` are the first words of the messages, a user's if there are any, None
    without text; `tools` are the names of the tools that they call.
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
    usage: Usage | None = None
    said: str | None = None
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Forked:
    """The record that a fork was made from, and its `version` at that time, None if it is no longer known."""

    id: str
    version: int | None
    created: float
    deleted: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A record as of `version`: decoded fields, messages in order, and tags (texts by key)."""

    version: int
    fields: dict[str, Any]
    messages: tuple[Message, ...]
    phase: str | None
    deleted: bool
    tags: dict[str, tuple[str, ...]] = field(default_factory=dict)


_REPAIR = "repair"  # a change that holds a whole state, because the versions before it are lost


def fold(changes: Iterable[Change], *, start: Snapshot | None = None) -> Snapshot:
    """Rebuild a record's state from its changes, as `history` returns them: the state that `at` has of the last one.

    `fold(session.history())` is the present state. `start` is the state before the first change: `at(version=n)` for
    `history(after=n)`, and for a fork that of its source at the change's `from_version`. Without it the record begins
    empty. Items are not part of a Snapshot. An expired field stays until a change removes it, as in `at`. Raises
    InvalidValue if a change is missing, for example because it was purged.
    """
    version = 0 if start is None else start.version
    fields = {} if start is None else dict(start.fields)
    phase = None if start is None else start.phase
    deleted = start is not None and start.deleted
    known = {} if start is None else {each.number: each for each in start.messages}
    shown = list(known)
    tags = {(key, text) for key, texts in start.tags.items() for text in texts} if start else set()
    for change in changes:
        if change.version == 1 and version == change.from_version:
            version = 0  # it continues the state of another record
        if change.version != version + 1 and change.kind != _REPAIR:
            why = f"version {change.version} comes after version {version}: the changes between them are missing"
            raise InvalidValue(f"{why}; give the state before the first change as start=at(version=...)")
        version = change.version
        deleted = "record" in change.cleared
        fields = {} if "fields" in change.cleared else fields
        phase = None if "phase" in change.cleared else phase
        tags = set() if "tags" in change.cleared else tags
        if change.kept is not None:
            shown = [number for number in known if _within(number, change.kept)]
            _require_all(change, known)
        for name in change.deleted:
            fields.pop(name, None)
        fields |= change.set
        phase = phase if change.phase is None else change.phase
        tags = (tags - {*change.untagged}) | {*change.tagged}
        for message in change.appended:
            known[message.number] = message
            shown.append(message.number)
    texts: dict[str, tuple[str, ...]] = {}
    for key, text in sorted(tags):
        texts[key] = (*texts.get(key, ()), text)
    return Snapshot(version, fields, tuple(known[each] for each in shown), phase, deleted, texts)


def _require_all(change: Change, known: Container[int | None]) -> None:
    for first, last in change.kept or ():
        for number in () if last is None else range(first, last + 1):
            if number not in known:
                why = f"version {change.version} shows message {number}, which none of these changes added"
                raise InvalidValue(f"{why}; begin with an earlier change, or a fork with its source's state as start=")


def _within(number: int | None, runs: Iterable[tuple[int, int | None]]) -> bool:
    return number is not None and any(first <= number and (last is None or number <= last) for first, last in runs)


@dataclass(frozen=True, slots=True)
class Branch:
    """Acknowledged commits that are not part of their record's history, because their Redis server was replaced.

    The branch starts after version `base` of the record `record_id`, of the kind `scope`, and has `commits` versions of
    its own up to `version`, written under `epoch`. `missing` lists the ranges of versions (first and last) between them
    that are lost, usually none. `cause` says what happened, `actors` who wrote. Times are in seconds since 1970: the
    first and last commit by the server's clock, and when the branch was `kept`. `id` is short, unique within the
    record, and does not change. `cursor` continues `store.admin.branches` after this record.
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
    """When a session expires: after `idle` seconds without a commit, and at `until` at the latest; None means no limit.

    `ends` is when it ends if nothing else is written. Times are in seconds since 1970 by the server's clock.
    """

    idle: float | None
    until: float | None
    ends: float | None


@dataclass(frozen=True, slots=True)
class Waiter:
    """A client that waits for a lease: its replica, and since when it has waited, in seconds since 1970."""

    replica: str
    since: float


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A current lease on the record `record_id` of the kind `scope`.

    `kind` is its purpose: a "turn", a "lock", an "advisory" lock, or a "client" of the service. `replica` has held it
    since `since`. It ends at `ends` unless it is renewed; its holder renews it as long as it runs. Times are in seconds
    since 1970 by the server's clock. `token` is its fencing token, unique among the leases of the record. `waiting`
    counts the waiters, `waiters` has the first twenty of them in order. `cursor` continues `store.admin.leases` after
    this lease.
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

    `phase` is the state of its state machine, `size` the number of bytes committed to it. For data archived before the
    tables had these columns (revision 3), `phase` is None and `size` None or too small, until the session changes.
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
    """Something that happened to a conversation, an agent or the fleet.

    `subject` is the text of the record concerned (`session:` and the escaped id), or the subject given to `emit`;
    `time` is in seconds since 1970 by the server's clock; `source` is the replica that wrote it. `sequence` counts the
    events of a `partition` without a gap, within an `epoch`. `version` is the record's version after the change, and 0
    for an event that was written without a commit. `id` stays the same when an event is delivered again.
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
        """The id of the session that the event is about, "" if it is about something else."""
        scope, _, name = self.subject.partition(":")
        return unescape(name) if scope == "session" else ""

    @property
    def cursor(self) -> str:
        """The position from which `audit` continues after this event."""
        return f"{round(self.time * 1000)}.{self.partition}.{self.epoch}.{self.sequence}"

    def to_dict(self) -> dict[str, Any]:
        """The event as JSON values in the names of CloudEvents 1.0, our own attributes as extensions."""
        moment = datetime.fromtimestamp(self.time, UTC).isoformat(timespec="milliseconds")
        # CloudEvents has no empty subject, so it is left out.
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

    `started` is in seconds since 1970 by its own clock, `seen` the age of this report in seconds by the server's.
    `load` is its machine's load average over one minute. `positions` report its progress: `archived` commits, how many
    partitions it `archives`, and the position of its slowest consumer of `events`, summed over the partitions. `stats`
    is a part of `store.admin.stats()`, `status` is the text that it set with `store.announce`. `archiving` says why its
    archiver makes no progress, for example because SQL's disk is full; "" if it does, or has nothing to do. `diverged`
    gives, for the first ten partitions that cannot be archived because their journals do not continue SQL's history,
    the reason.
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
        """Its role in the fleet: `service`, `archiver`, `agents`, or `worker` for any other process that uses a store.

        A process that also archives is a `worker + archiver`. A `role` that it announced replaces the first word.
        """
        role = str(self.status.get("role") or ("agents" if self.status.get("agents") else "worker"))
        return f"{role} + archiver" if self.positions.get("archives", 0) and role != "archiver" else role


@dataclass(frozen=True, slots=True)
class Upcast:
    """The counts of an `upcast`: records upcast, up to date, and failed; the errors of the first 100."""

    upcast: int = 0
    unchanged: int = 0
    failed: int = 0
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reencrypted:
    """The counts of a `reencrypt`: records examined, values reencrypted in SQL, records in Redis, records unreadable.

    The data of an event counts as a value. An event that Redis keeps counts as a record in Redis. All unreadable events
    of one subject count as one unreadable record.
    """

    records: int = 0
    values: int = 0
    copies: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class LostMessages:
    """Messages of a conversation that neither Redis nor SQL has: from number `first` to number `last`."""

    scope: str
    id: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Repaired:
    """The counts of a repair, or of a dry run.

    `partitions` were examined; in the partitions `behind`, SQL was older than Redis. `commits` and `events` were
    archived one by one; `records` were copied whole at their present version, without earlier versions. `aside` counts
    commits put in the quarantine because their predecessors are missing; a record that was copied whole includes their
    changes. `branched` counts commits that do not continue a version in SQL or Redis: each is in a branch of its
    record. `deleted` has (scope, id) of the records of which Redis has only the deletion or erasure: they are deleted
    again, and their erasure is requested again. `lost` has the messages that neither Redis nor SQL has. Records in
    `lost_items` may have lost items, because Redis keeps only the newest. SQL refused some data of the records in
    `refused`: that data is in the quarantine, and not counted.
    """

    partitions: int = 0
    behind: tuple[int, ...] = ()
    records: int = 0
    commits: int = 0
    events: int = 0
    aside: int = 0
    branched: int = 0
    lost: tuple[LostMessages, ...] = ()
    deleted: tuple[tuple[str, str], ...] = ()
    lost_items: tuple[tuple[str, str], ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """One check and its result. `advice` says what to do when it is not `ok`."""

    name: str
    ok: bool
    found: str
    advice: str = ""
    fatal: bool = False

    def __post_init__(self) -> None:
        if self.ok:
            object.__setattr__(self, "advice", "")


@dataclass(frozen=True, slots=True)
class Indexed:
    """How complete a search index is: of the namespace's `records`, `behind` have changes that are not indexed yet."""

    records: int
    behind: int
