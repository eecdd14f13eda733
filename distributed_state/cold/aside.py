"""Commits outside of any history: the quarantine, and branches. Law: each commit is kept once, and complete.

**The quarantine** has entries that SQL refuses, and commits that others replaced. An entry is quarantined only for an
error that does not go away with time:

| fault | errors | result |
|---|---|---|
| `ROW` | a value that does not fit: too long for an index, out of range, not in the database's encoding, refused by a constraint or by a trigger of the owner's; a history that cannot be read | the row is put into quarantine, the others are archived |
| `PLACE` | a part of the database takes nothing: a tablespace is full, a file is damaged, a right or a column is missing | its partition waits there and reports it, the others are archived |
| none | SQL is down, busy or being restored; SQLite's disk is full | all wait |

PostgreSQL's codes are in its manual, appendix A. An error of an unknown kind makes its partition wait, which loses
nothing.

**Branches** are acknowledged commits of an ended epoch that are not part of their record's history. Erased data never
comes back. A commit is identified by its event, never by its version: after a failover another commit may have the same
version, in the archive or in another branch. A state is folded only from versions without a gap. A branch is named
after its epoch, `3-9f2c01ab`. If two servers took writes until one of them noticed, an epoch has two lines of a record;
the second is `3-9f2c01ab.2`. A branch gets its name when its first commit is kept, and the name never changes. A branch
begins after the last version in SQL that its record had under the branch's epoch or an earlier one.

Design: sections 9, 14.
"""  # noqa: E501  # a table's row is a line

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from itertools import groupby
from typing import Any

from sqlalchemy import and_, delete, exc, func, insert, select, update

from distributed_state.cold import blocks, record_history, record_index, tables
from distributed_state.cold.engine import Part, Row, Sql, reads, writes
from distributed_state.cold.epochs import ordinal
from distributed_state.cold.record_history import states
from distributed_state.cold.record_index import (
    LARGEST,
    Head,
    erased_unknown,
    forgotten,
    hashed,
    key_of,
    parse,
    refuse_long,
    subject,
)
from distributed_state.cold.tables import (
    branches,
    changes,
    erasures,
    items,
    layers,
    messages,
    records,
    shares,
    snapshots,
)
from distributed_state.cold.values import RESOLVED, UNRESOLVED, Branched, BranchState, Kept, Quarantined
from distributed_state.errors import ColdUnavailable, CorruptState, NotFound, UnknownOperation
from distributed_state.values.journal import JournalEntry, State, fold, unpack
from distributed_state.values.model import NEXT, log_fields

log = logging.getLogger(__name__)
# data_exception, integrity_constraint_violation, with_check_option_violation, program_limit_exceeded, PL/pgSQL's RAISE
_ROW = ("22", "23", "44", "54", "P0")
# connection_exception, invalid_transaction_state, transaction_rollback, insufficient_resources,
# object_not_in_prerequisite_state, operator_intervention; missing tables: a dump is being restored
_AWAY = ("08", "25", "40", "53", "55", "57", "42P01", "3F000")
_FULL = "53100"
_CLOCKS_MS = 60_000  # the largest allowed difference between the clocks of Redis and of the worker that erased


# The causes of errors


class Fault(Enum):
    """The cause of a refusal by SQL."""

    ROW = "row"
    PLACE = "place"


class ArchivingStopped(ColdUnavailable):
    """SQL refuses an entry for now. `places` has its offset and the reason, by partition; nothing was archived."""

    def __init__(self, places: Mapping[int, tuple[int, str]]) -> None:
        super().__init__("; ".join(f"partition {each}: {why}" for each, (_, why) in places.items()))
        self.places = places


def fault_of(sql: Sql, error: Exception) -> Fault | None:
    """The cause of an error; None if everything may be accepted later, or the error is a bug of this package."""
    if isinstance(error, (ValueError, OverflowError, CorruptState)):
        return Fault.ROW
    driver: Any = sql.connection.dialect.dbapi
    original = error.orig if isinstance(error, exc.DBAPIError) else error
    if not isinstance(original, driver.Error) or (isinstance(error, exc.DBAPIError) and error.connection_invalidated):
        return None
    if isinstance(original, (driver.DataError, driver.IntegrityError)):
        return Fault.ROW
    code = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    if code is None or (code.startswith(_AWAY) and code != _FULL):
        return None
    return Fault.ROW if code.startswith(_ROW) else Fault.PLACE


def is_collision(sql: Sql, error: Exception) -> bool:
    """Whether another row has the key of a new one, or a constraint refused it."""
    driver: Any = sql.connection.dialect.dbapi
    return isinstance(error.orig if isinstance(error, exc.DBAPIError) else error, driver.IntegrityError)


def reason_of(error: Exception) -> str:
    """The reason for an error, in one line."""
    return f"{type(error).__name__}: {getattr(error, 'orig', None) or error}".strip().partition("\n")[0]


# Quarantining


def keep_refused(sql: Sql, entry: JournalEntry, partition: int, epoch: str, error: Exception) -> None:
    """Quarantine an entry, with the reason."""
    reason = reason_of(error)
    text = "%s version %d at offset %d is quarantined: %s"
    of = entry.record or entry.event
    log.error(text, of, entry.version, entry.offset, reason, extra=log_fields(entry.record))
    row = _row(sql, entry, partition, epoch, reason)
    # An event without a record is kept under its subject, so that erasing the subject removes it, too.
    row["record"] = entry.record or subject(entry.data)
    row |= {name: max(0, min(row[name], LARGEST)) for name in ("offset", "version", "time_ms")}
    row |= {name: storable(row[name]) for name in ("event", "record", "reason")}
    try:
        with sql.begin_nested():
            sql.execute(insert(tables.quarantine), row)
    except Exception as refused:
        if fault_of(sql, refused) is not Fault.ROW:
            raise
        # The entry may have been refused for a character that the database's encoding lacks.
        plain = {name: row[name].encode("ascii", "backslashreplace").decode() for name in ("event", "record", "reason")}
        sql.execute(insert(tables.quarantine), row | plain)


def _row(sql: Sql, entry: JournalEntry, partition: int, epoch: str, reason: str) -> dict[str, Any]:
    return {
        "namespace": sql.namespace, "partition": partition, "epoch": epoch, "offset": entry.offset,
        "event": entry.event, "record": entry.record, "version": entry.version, "reason": reason, "data": entry.data,
        "time_ms": entry.time_ms,
    }  # fmt: skip


def storable(text: str) -> str:
    """The text in a form that every database can hold."""
    return text.replace("\0", "%00").encode("utf-8", "backslashreplace").decode()


def set_aside(sql: Sql, head: Head, first: int, reason: str) -> None:
    """Move a record's changes from version `first` on to quarantine, and remove all that was derived from them."""
    blocks.expand(sql, [head["key"]])
    commits = record_history.whole(sql, head["key"], head["record"], first - 1)
    rows = [_row(sql, entry, head["partition"], epoch, reason) for epoch, entry in commits]
    sql.each(insert(tables.quarantine), rows)
    _remove_from(sql, head, first)


def undo(sql: Sql, record: str, first: int, before: State | None) -> None:
    """Remove a record's unacknowledged changes from version `first` on; its state is `before` again."""
    head = record_index.lock(sql, [record])[record]
    blocks.expand(sql, [head["key"]])
    _remove_from(sql, head, first)
    record_index.put(sql, [{**head, "version": first - 1, **record_index.about(before)}])
    record_index.replace_tags(sql, record, before.fields if before else {})


def _remove_from(sql: Sql, head: Head, first: int) -> None:
    for table in (changes, messages, snapshots, items):
        sql.execute(delete(table).where(table.c.record == head["key"], table.c.version >= first))
    for table in (shares, layers):
        mine = and_(table.c.namespace == head["namespace"], table.c.record == head["record"])
        sql.execute(delete(table).where(mine, table.c.version >= first))


def set_aside_lacking(sql: Sql, partition: int, epoch: str, entries: Sequence[JournalEntry], reason: str) -> int:
    """Quarantine the entries that SQL lacks, with the reason; return how many."""
    # An erasure locks these rows too, so an erased record is recognised here, and its entries are left out.
    named = {entry.record for entry in entries}
    record_index.lock(sql, named | {record_index.hashed(sql.namespace, each) for each in named})
    lost = record_history.lacking(sql, partition, epoch, entries)
    rows = [_row(sql, entry, partition, epoch, reason) for entry in entries if entry.event in lost]
    sql.each(insert(tables.quarantine), rows)
    return len(rows)


def set_aside_acknowledged(sql: Sql, partition: int, epoch: str, entries: Sequence[JournalEntry]) -> int:
    """Quarantine the entries that SQL has neither in the history nor elsewhere; return how many."""
    reason = f"acknowledged under epoch {epoch}, which ended before it was archived"
    return set_aside_lacking(sql, partition, epoch, entries, reason)


def unresolve(sql: Sql, events: Collection[str]) -> None:
    """Note that SQL refused the later version that contains these commits: they are not archived."""
    q = tables.quarantine.c
    if events:
        here = and_(q.namespace == sql.namespace, sql.among(q.event, sorted(events)), q.reason == RESOLVED)
        sql.execute(update(tables.quarantine).where(here).values(reason=UNRESOLVED))


# The content of the quarantine


def quarantined(sql: Sql) -> list[Quarantined]:
    """The entries that could not be archived, or that a newer epoch replaced, oldest first."""
    q = tables.quarantine.c
    names = [q.id, q.partition, q.epoch, q.offset, q.event, q.record, q.version, q.reason, q.data, q.time_ms]
    rows = sql.execute(select(*names).where(q.namespace == sql.namespace).order_by(q.id))
    return [Quarantined(*row) for row in rows]


def newest_quarantined(sql: Sql) -> tuple[str, int, str] | None:
    """The record, version and reason of the newest entry in quarantine."""
    q = tables.quarantine.c
    query = select(q.record, q.version, q.reason).where(q.namespace == sql.namespace).order_by(q.id.desc()).limit(1)
    row = sql.execute(query).first()
    return None if row is None else (row.record, row.version, row.reason)


def count_quarantined(sql: Sql) -> int:
    """How many entries are in quarantine, without those whose content is archived in a later version."""
    q = tables.quarantine.c
    query = select(func.count()).where(q.namespace == sql.namespace, q.reason != RESOLVED)
    return int(sql.execute(query).scalar_one())


def refusal(sql: Sql, event: str) -> str:
    """The reason why the entry of this event is in quarantine; "" if it is not there."""
    q = tables.quarantine.c
    found = sql.execute(select(q.reason).where(q.namespace == sql.namespace, q.event == event)).scalar()
    return str(found or "")


# Branches: keeping


def keep(sql: Sql, partition: int, epoch: str, entries: Iterable[JournalEntry], cause: str) -> list[Kept]:
    """Keep the commits that SQL lacks, in the caller's transaction; return the added commits by branch.

    They were written under `epoch`, which has ended. Entries without a record (marks, and events without a commit) are
    skipped, and so are commits of erased records, whose number is logged. The rows of the records are locked.
    """
    by_record: dict[str, list[JournalEntry]] = defaultdict(list)
    for entry in entries:
        if entry.record:
            by_record[entry.record].append(entry)
    stones = [hashed(sql.namespace, record) for record in by_record]
    rows = record_index.lock(sql, [*by_record, *stones])
    doomed = _doomed(sql, by_record)
    kept = []
    for record in sorted(by_record):
        living = [] if record in doomed else _living(sql, rows, record, epoch, by_record[record])
        if record in rows:
            living = _since_it_began(sql, rows[record], living)
        elif _is_gone(sql, record, living):
            living = []
        if len(living) < len(by_record[record]):
            # The log must not repeat the name of an erased record.
            count = len(by_record[record]) - len(living)
            log.warning("partition %d: %d commits under epoch %s belong to an erased record", partition, count, epoch)
        head = rows.get(record)
        owner = head["owner"] if head else None
        try:
            with sql.begin_nested():
                kept += _Line(sql, record, partition, epoch, owner).keep(living, cause)
        except Exception as error:
            if fault_of(sql, error) is not Fault.ROW:
                raise
            # Otherwise one unreadable entry would prevent the start of the partition with all its other records.
            for entry in living:
                keep_refused(sql, entry, partition, epoch, error)
    return kept


def _doomed(sql: Sql, records: Collection[str]) -> set[str]:
    """Those of the records that are to be erased."""
    e = erasures.c
    query = select(e.record).where(e.namespace == sql.namespace, e.version == 0)
    return {record for (record,) in sql.rows(query, e.record, records)}


def _living(
    sql: Sql, rows: Mapping[str, record_index.Head], record: str, epoch: str, entries: Sequence[JournalEntry]
) -> Sequence[JournalEntry]:
    """The entries of a record that are newer than its erasure: of a later epoch, or after the record began again."""
    stone = rows.get(hashed(sql.namespace, record))
    if stone is None or ordinal(epoch) > ordinal(stone["epoch"]):
        return entries
    if ordinal(epoch) == ordinal(stone["epoch"]) and record in rows:
        return [entry for entry in entries if entry.version > stone["version"]]
    return []


def _since_it_began(sql: Sql, row: record_index.Head, entries: Sequence[JournalEntry]) -> Sequence[JournalEntry]:
    """Drop entries of an erased record before it began again, if SQL did not have it when it was erased."""
    if not entries or _stone(sql, erased_unknown(sql.namespace, row["record"])) is None:
        return entries
    return [entry for entry in entries if entry.time_ms >= row["created_ms"]]


def _is_gone(sql: Sql, record: str, entries: Iterable[JournalEntry]) -> bool:
    """Whether a record without a row was erased, belongs to a user who was forgotten, or is a fork of such a record."""
    scope, _, name = record.partition(":")
    erased = _stone(sql, erased_unknown(sql.namespace, record))
    for entry in entries:
        if erased and entry.time_ms <= erased["updated_ms"] + _CLOCKS_MS:
            return True
        try:
            parsed = parse(entry, 0, "")
        except (ValueError, CorruptState, UnknownOperation):
            continue  # it goes into quarantine, or is kept unread
        owner = parsed.owner or (name if scope == "user" else "")
        stone = _stone(sql, forgotten(sql.namespace, owner)) if owner else None
        if stone and entry.time_ms <= stone["updated_ms"] + _CLOCKS_MS:
            return True
        if parsed.parent is not None:
            stone = _stone(sql, hashed(sql.namespace, parsed.parent))
            if (stone and parsed.parent_version <= stone["version"]) or _doomed(sql, [parsed.parent]):
                return True
    return False


def _stone(sql: Sql, name: str) -> record_index.Head | None:
    query = select(records).where(records.c.namespace == sql.namespace, records.c.record == name)
    return sql.execute(query).mappings().first()


class _Line:
    """The commits of one record in one epoch."""

    def __init__(self, sql: Sql, record: str, partition: int, epoch: str, owner: str | None) -> None:
        self._sql = sql
        self._record = record
        self._partition = partition
        self._epoch = epoch
        self._owner = owner
        self._known = set[str]()
        self._held: dict[str, dict[int, int]] = {}  # by branch: version and offset of each commit

    def keep(self, entries: Sequence[JournalEntry], cause: str) -> list[Kept]:
        """Insert new commits in the order of versions."""
        self._look()
        new = self._new(entries)
        now = int(time.time() * 1000)
        rows: list[Row] = []
        added: dict[str, list[int]] = defaultdict(list)
        for entry in sorted(new, key=lambda entry: (entry.version, entry.offset, entry.event)):
            if not self._readable(entry):
                continue
            branch = self._name(entry)
            self._held.setdefault(branch, {})[entry.version] = entry.offset
            added[branch].append(entry.version)
            place = (self._sql.namespace, self._record, self._epoch, entry.event, branch, self._partition)
            said = (entry.version, entry.offset, entry.time_ms, entry.kind, entry.actor, entry.token, entry.data)
            rows.append((*place, *said, cause, now, self._owner, False))
        self._sql.put(branches, rows)
        return [Kept(self._record, branch, min(some), len(some)) for branch, some in sorted(added.items())]

    def _look(self) -> None:
        b = branches.c
        mine = (b.namespace == self._sql.namespace, b.record == self._record, b.epoch == self._epoch)
        query = select(b.event, b.branch, b.version, b.offset).where(*mine)
        for event, branch, version, offset in self._sql.execute(query.order_by(b.version)):
            self._known.add(event)
            self._held.setdefault(branch, {})[version] = offset

    def _new(self, entries: Sequence[JournalEntry]) -> list[JournalEntry]:
        """The commits that are in no branch, if at least one of them is not archived either.

        A commit that was repeated in another epoch is archived there, so it is not lost. It is still kept together with
        later commits of this epoch, whose state includes it.
        """
        new = list({entry.event: entry for entry in entries if entry.event not in self._known}.values())
        archived = self._archived({entry.event for entry in new})
        new = [entry for entry in new if archived.get(entry.event) != (entry.version, self._epoch)]
        lost = any(entry.event not in archived for entry in new)
        return new if lost or self._held else []

    def _archived(self, events: Collection[str]) -> dict[str, tuple[int, str]]:
        """The version and the epoch of those commits that the record has."""
        c = changes.c
        key = record_index.key_of(self._sql, self._record)
        query = select(c.event, c.version, c.epoch).where(c.record == key)
        found = {event: (version, epoch) for event, version, epoch in self._sql.rows(query, c.event, events)}
        if len(found) < len(events):
            for block in blocks.downwards(self._sql, key, LARGEST):
                found.update((row.event, (row.version, row.epoch)) for row in block if row.event in events)
        return found

    def _readable(self, entry: JournalEntry) -> bool:
        """Whether a database can store the entry and its operations can be read; if not, it goes to quarantine."""
        try:
            parsed = parse(entry, self._partition, self._epoch)
            refuse_long(parsed)
        except UnknownOperation:
            return True  # kept as it is, for a release that can read it
        except (ValueError, CorruptState) as error:
            keep_refused(self._sql, entry, self._partition, self._epoch, error)
            return False
        self._owner = parsed.owner or self._owner
        return True

    def _name(self, entry: JournalEntry) -> str:
        """A branch without this version, preferably the one whose preceding version was written last before it."""
        free = [branch for branch, held in self._held.items() if entry.version not in held]
        if not free:
            return f"{self._epoch}.{len(self._held) + 1}" if self._held else self._epoch

        def nearness(branch: str) -> int:
            before = self._held[branch].get(entry.version - 1, -1)
            return before if before < entry.offset else -1

        return max(sorted(free, key=lambda branch: (len(branch), branch)), key=nearness)


# Branches: reading


def of_record(sql: Sql, record: str) -> list[Branched]:
    """The branches of a record, the oldest epoch first."""
    b = branches.c
    names = (b.branch, b.partition, b.epoch, b.version, b.offset, b.time_ms, b.kept_ms, b.cause, b.actor, b.told)
    rows = sql.execute(select(*names).where(b.namespace == sql.namespace, b.record == record)).all()
    found = []
    for id, group in groupby(sorted(rows, key=lambda row: (row.branch, row.version)), key=lambda row: row.branch):
        own = list(group)
        versions = tuple(row.version for row in own)
        base = _base(sql, record, versions[0], own[0].epoch, own[0].offset)
        found.append(
            Branched(
                record=record,
                partition=own[0].partition,
                id=id,
                epoch=own[0].epoch,
                base=base,
                versions=versions,
                missing=gaps(base, versions),
                first_ms=min(row.time_ms for row in own),
                last_ms=max(row.time_ms for row in own),
                kept_ms=min(row.kept_ms for row in own),
                cause=own[0].cause,
                actors=tuple(sorted({row.actor for row in own if row.actor})),
                published=all(row.told for row in own),
            )
        )
    return sorted(found, key=lambda each: (ordinal(each.epoch), len(each.id), each.id))


def gaps(base: int, versions: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The runs of versions after `base` that are missing from these, which ascend."""
    found = []
    at = base
    for version in versions:
        if version > at + 1:
            found.append((at + 1, version - 1))
        at = version
    return tuple(found)


def _base(sql: Sql, record: str, first: int, epoch: str, offset: int) -> int:
    """The base of a branch: the last version before `first` of an earlier epoch or a lower offset; 0 without one.

    A version at a higher offset of the same epoch belongs to the other line: Redis had gone back to an older SQL.
    """
    found = 0
    key = key_of(sql, record)
    for rows in blocks.downwards(sql, key, first - 1):
        known = (row for row in rows if ordinal(row.epoch) <= ordinal(epoch))
        found = max((row.version for row in known if row.epoch != epoch or row.offset < offset), default=0)
        if found:
            break
    c = changes.c
    later = select(c.version).where(c.record == key, c.version < first, c.epoch == epoch, c.offset > offset)
    for t in (changes.c, snapshots.c):
        query = select(t.epoch, func.max(t.version)).where(t.record == key, t.version.not_in(later))
        for theirs, version in sql.execute(query.where(t.version < first).group_by(t.epoch)):
            if ordinal(theirs) <= ordinal(epoch):
                found = max(found, version)
    return found


def one(sql: Sql, record: str, branch: str) -> Branched:
    """A branch by its id. Raises NotFound that names the existing branches."""
    found = {each.id: each for each in of_record(sql, record)}
    if branch not in found:
        there = f"it has {', '.join(found)}" if found else "it has no branches"
        raise NotFound(f"{record[:200]}: no branch {branch[:80]!r}; {there}")
    return found[branch]


def records_with(sql: Sql, after: str, limit: int) -> list[str]:
    """The records after `after` that have branches, in the order of their texts."""
    b = branches.c
    query = select(b.record).where(b.namespace == sql.namespace, b.record > after).distinct()
    return list(sql.execute(query.order_by(b.record).limit(limit)).scalars())


def page(sql: Sql, after: str, limit: int) -> list[Branched]:
    """The branches of the next `limit` records that have any, in the order of their texts."""
    records = records_with(sql, after, limit)
    return [each for record in records for each in of_record(sql, record)]


def entries(sql: Sql, record: str, branch: str) -> list[JournalEntry]:
    """The commits of a branch, by version. Raises NotFound."""
    one(sql, record, branch)
    return _entries(sql, record, branch)


def _entries(sql: Sql, record: str, branch: str) -> list[JournalEntry]:
    b = branches.c
    names = (b.offset, b.event, b.record, b.version, b.time_ms, b.kind, b.actor, b.token, b.data)
    query = select(*names).where(b.namespace == sql.namespace, b.record == record, b.branch == branch)
    return [JournalEntry(*row, total_bytes=0) for row in sql.execute(query.order_by(b.version))]


def state_at(sql: Sql, record: str, branch: str, version: int | None) -> BranchState:
    """The state of a branch at a version, or at the last that can be folded. Raises NotFound."""
    found = one(sql, record, branch)
    where = f"{record[:200]}, branch {branch}"
    state = states(sql, {record: found.base}).get(record) if found.base else State("", 0, {})
    if state is None or state.version != found.base:
        raise NotFound(f"{where}: version {found.base}, after which it begins, can no longer be read")
    fields = state.fields
    first_message = int(fields.get(NEXT, b"0"))
    messages: dict[int, bytes] = {}
    at = found.base
    for entry in _entries(sql, record, branch):
        if entry.version != at + 1 or (version is not None and entry.version > version):
            break
        operations = unpack(entry.data)
        fold(fields, operations)
        messages.update((int(operation.name), operation.value) for operation in operations if operation.kind == b"m")
        at = entry.version
    if at == found.base or (version is not None and at != version):
        lost = ", ".join(f"{first} to {last}" for first, last in found.missing) or "none"
        wanted = "its state" if version is None else f"version {version}"
        span = (
            f"it has {found.versions[0]} to {found.versions[-1]} after version {found.base}, of which {lost} are lost"
        )
        raise NotFound(f"{where}: {wanted} cannot be restored from the remaining commits: {span}")
    return BranchState(State(found.epoch, at, fields), found.base, first_message, messages)


def heads(sql: Sql, records: Iterable[str]) -> dict[str, Mapping[Any, Any]]:
    """The partitions of these records, of which SQL may have only branches."""
    b = branches.c
    query = select(b.record, b.partition).where(b.namespace == sql.namespace).distinct()
    return {record: {"partition": partition} for record, partition in sql.rows(query, b.record, records)}


def owned(sql: Sql, user: str) -> set[str]:
    """The records that belong to a user according to a branch."""
    b = branches.c
    return set(sql.execute(select(b.record).where(b.namespace == sql.namespace, b.owner == user)).scalars())


def bases(sql: Sql, records: Iterable[str]) -> dict[str, int]:
    """The oldest base version of each record's branches; records without branches are left out."""
    some = heads(sql, records)
    return {record: min(each.base for each in of_record(sql, record)) for record in some}


def survey(sql: Sql, partitions: Iterable[int]) -> tuple[int, list[str]]:
    """The number of branches, and the records of these partitions with a branch whose event is unpublished."""
    b = branches.c
    each = select(b.record, b.branch).where(b.namespace == sql.namespace).distinct().subquery()
    count = int(sql.execute(select(func.count()).select_from(each)).scalar_one())
    if not count:
        return 0, []
    query = select(b.record).where(
        b.namespace == sql.namespace, sql.among(b.partition, list(partitions)), b.told.is_(False)
    )
    return count, sorted(set(sql.execute(query).scalars()))


# Branches: removing


def drop(sql: Sql, record: str, branch: str) -> int:
    """Remove a branch; return how many commits it had. Raises NotFound."""
    found = one(sql, record, branch)
    sql.execute(delete(branches).where(_is(sql, record, branch)))
    return len(found.versions)


def erase(sql: Sql, records: Iterable[str]) -> None:
    """Remove every branch of these records."""
    b = branches.c
    sql.execute(delete(branches).where(b.namespace == sql.namespace, sql.among(b.record, list(records))))


def purge(sql: Sql, before_ms: int, limit: int) -> int:
    """Remove at most `limit` branches whose newest commit is older than this; return how many commits they had."""
    b = branches.c
    old = select(b.record, b.branch).where(b.namespace == sql.namespace).group_by(b.record, b.branch)
    removed = 0
    for record, branch in sql.execute(old.having(func.max(b.time_ms) < before_ms).limit(limit)).all():
        removed += sql.execute(delete(branches).where(_is(sql, record, branch))).rowcount
    return removed


def mark_published(sql: Sql, record: str, branch: str) -> None:
    """Note that a branch's event was published."""
    sql.execute(update(branches).where(_is(sql, record, branch)).values(told=True))


def _is(sql: Sql, record: str, branch: str) -> Any:
    return and_(branches.c.namespace == sql.namespace, branches.c.record == record, branches.c.branch == branch)


class BranchStore(Part):
    """The branches of one namespace."""

    keep = writes(keep)
    of = reads(of_record)
    one = reads(one)
    page = reads(page)
    entries = reads(entries)
    state_at = reads(state_at)
    drop = writes(drop)
    mark_published = writes(mark_published)
    survey = reads(survey)
