"""Keeps what diverged: acknowledged commits of a closed epoch that their record does not continue.

Law: nothing is kept twice and nothing comes back that was erased. A commit is known by its event, never by its version:
after a failover there may be another one of the same version, in the archive or in another branch.

A branch is named by its epoch, `3-9f2c01ab`. Where an epoch had two lines of a record (two servers took writes until
one of them noticed), the second is `3-9f2c01ab.2`. The name is given when a commit is kept, and stays.

Design: section 14.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from sqlalchemy import Connection, select

from distributed_state.cold import archive, blocks, branch_reading, record_index, refusals
from distributed_state.cold.branch_reading import ordinal
from distributed_state.cold.bulk import Row, chunks, put
from distributed_state.cold.engine import Database
from distributed_state.cold.entries import LARGEST, parse
from distributed_state.cold.record_index import erased_unknown, forgotten, hashed
from distributed_state.cold.refusals import Fault
from distributed_state.cold.tables import branches, changes, erasures, records
from distributed_state.cold.values import Branched, BranchState, Kept
from distributed_state.errors import CorruptState, UnknownStep
from distributed_state.values.journal import JournalEntry

log = logging.getLogger(__name__)
_CLOCKS_MS = 60_000  # how far the clocks of Redis and of who asked to forget may be apart


def keep(
    connection: Connection, namespace: str, partition: int, epoch: str, entries: Iterable[JournalEntry], cause: str
) -> list[Kept]:
    """Keep those of these commits that SQL does not have; what was added, by branch. Part of the caller's transaction.

    `epoch` is the one that they were written under, and is closed. Entries without a record (marks, and events that
    were written alone) are passed over. So is what was erased since; it is counted in the log. The rows of the
    records are locked.
    """
    by_record: dict[str, list[JournalEntry]] = defaultdict(list)
    for entry in entries:
        if entry.record:
            by_record[entry.record].append(entry)
    stones = [hashed(namespace, record) for record in by_record]
    rows = record_index.lock(connection, namespace, [*by_record, *stones])
    doomed = _doomed(connection, namespace, by_record)
    kept = []
    for record in sorted(by_record):
        living = [] if record in doomed else _living(rows, namespace, record, epoch, by_record[record])
        if record in rows:
            living = _since_it_began(connection, namespace, rows[record], living)
        elif _is_gone(connection, namespace, record, living):
            living = []
        if len(living) < len(by_record[record]):
            # Not its name, which nobody is to find any more.
            count = len(by_record[record]) - len(living)
            log.warning("partition %d: %d commits under epoch %s are of something erased", partition, count, epoch)
        head = rows.get(record)
        owner = head["owner"] if head else None
        try:
            with connection.begin_nested():
                kept += _Line(connection, namespace, record, partition, epoch, owner).keep(living, cause)
        except Exception as error:
            if refusals.fault_of(connection, error) is not Fault.ROW:
                raise
            # Else the partition could not start again, with all its other records.
            for entry in living:
                archive.quarantine(connection, namespace, entry, partition, epoch, error)
    return kept


def _doomed(connection: Connection, namespace: str, records: Collection[str]) -> set[str]:
    """Those of the records that are to be erased."""
    e = erasures.c
    found = set[str]()
    for chunk in chunks(sorted(records), 500):
        query = select(e.record).where(e.namespace == namespace, e.record.in_(chunk), e.version == 0)
        found.update(connection.execute(query).scalars())
    return found


def _living(
    rows: Mapping[str, record_index.Head], namespace: str, record: str, epoch: str, entries: Sequence[JournalEntry]
) -> Sequence[JournalEntry]:
    """What of a record was not erased: it is of a later life than its erasure, or of one that began again after it."""
    stone = rows.get(hashed(namespace, record))
    if stone is None or ordinal(epoch) > ordinal(stone["epoch"]):
        return entries
    if ordinal(epoch) == ordinal(stone["epoch"]) and record in rows:
        return [entry for entry in entries if entry.version > stone["version"]]
    return []


def _since_it_began(
    connection: Connection, namespace: str, row: record_index.Head, entries: Sequence[JournalEntry]
) -> Sequence[JournalEntry]:
    """Drop the entries of a record's first life, if it was erased before SQL knew it and has begun again since."""
    if not entries or _stone(connection, namespace, erased_unknown(namespace, row["record"])) is None:
        return entries
    return [entry for entry in entries if entry.time_ms >= row["created_ms"]]


def _is_gone(connection: Connection, namespace: str, record: str, entries: Iterable[JournalEntry]) -> bool:
    """Whether a record that SQL has no row of was erased, or a user's who was forgotten, or is a fork of such a one."""
    scope, _, name = record.partition(":")
    erased = _stone(connection, namespace, erased_unknown(namespace, record))
    for entry in entries:
        if erased and entry.time_ms <= erased["updated_ms"] + _CLOCKS_MS:
            return True
        try:
            parsed = parse(entry, 0, "")
        except (ValueError, CorruptState, UnknownStep):
            continue  # it goes into quarantine, or is kept unread
        owner = parsed.owner or (name if scope == "user" else "")
        stone = _stone(connection, namespace, forgotten(namespace, owner)) if owner else None
        if stone and entry.time_ms <= stone["updated_ms"] + _CLOCKS_MS:
            return True
        if parsed.parent is not None:
            stone = _stone(connection, namespace, hashed(namespace, parsed.parent))
            if (stone and parsed.parent_version <= stone["version"]) or _doomed(connection, namespace, [parsed.parent]):
                return True
    return False


def _stone(connection: Connection, namespace: str, name: str) -> record_index.Head | None:
    query = select(records).where(records.c.namespace == namespace, records.c.record == name)
    return connection.execute(query).mappings().first()


class _Line:
    """What one epoch had of one record."""

    def __init__(
        self, connection: Connection, namespace: str, record: str, partition: int, epoch: str, owner: str | None
    ) -> None:
        self._connection = connection
        self._namespace = namespace
        self._record = record
        self._partition = partition
        self._epoch = epoch
        self._owner = owner
        self._known = set[str]()
        self._held: dict[str, dict[int, int]] = {}  # by branch: version and offset of each commit

    def keep(self, entries: Sequence[JournalEntry], cause: str) -> list[Kept]:
        """Insert what is new, in the order of versions."""
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
            place = (self._namespace, self._record, self._epoch, entry.event, branch, self._partition)
            said = (entry.version, entry.offset, entry.time_ms, entry.kind, entry.actor, entry.token, entry.data)
            rows.append((*place, *said, cause, now, self._owner, False))
        put(self._connection, branches, rows, [])
        return [Kept(self._record, branch, min(some), len(some)) for branch, some in sorted(added.items())]

    def _look(self) -> None:
        b = branches.c
        mine = (b.namespace == self._namespace, b.record == self._record, b.epoch == self._epoch)
        query = select(b.event, b.branch, b.version, b.offset).where(*mine)
        for event, branch, version, offset in self._connection.execute(query.order_by(b.version)):
            self._known.add(event)
            self._held.setdefault(branch, {})[version] = offset

    def _new(self, entries: Sequence[JournalEntry]) -> list[JournalEntry]:
        """Those that are in no branch, if one of them is not in the archive either.

        A commit that was repeated in another life is in the archive under that one: nothing of it is lost. It stays
        with those that came after it here, whose state it is a part of.
        """
        new = list({entry.event: entry for entry in entries if entry.event not in self._known}.values())
        archived = self._archived({entry.event for entry in new})
        new = [entry for entry in new if archived.get(entry.event) != (entry.version, self._epoch)]
        lost = any(entry.event not in archived for entry in new)
        return new if lost or self._held else []

    def _archived(self, events: Collection[str]) -> dict[str, tuple[int, str]]:
        """The version and the epoch of those of these commits that the record has."""
        c = changes.c
        key = record_index.key_of(self._namespace, self._record)
        found: dict[str, tuple[int, str]] = {}
        for chunk in chunks(events, 500):
            rows = select(c.event, c.version, c.epoch).where(c.record == key, c.event.in_(chunk))
            found.update((event, (version, epoch)) for event, version, epoch in self._connection.execute(rows))
        if len(found) < len(events):
            for block in blocks.downwards(self._connection, key, LARGEST):
                found.update((row.event, (row.version, row.epoch)) for row in block if row.event in events)
        return found

    def _readable(self, entry: JournalEntry) -> bool:
        """Whether a database can hold it, and its steps can be read; else it goes into quarantine."""
        try:
            parsed = parse(entry, self._partition, self._epoch)
            archive.refuse_long(parsed)
        except UnknownStep:
            return True  # it is kept as it is, for who knows it
        except (ValueError, CorruptState) as error:
            archive.quarantine(self._connection, self._namespace, entry, self._partition, self._epoch, error)
            return False
        self._owner = parsed.owner or self._owner
        return True

    def _name(self, entry: JournalEntry) -> str:
        """The branch that has no such version yet, best the one whose version before it was written last before it."""
        free = [branch for branch, held in self._held.items() if entry.version not in held]
        if not free:
            return f"{self._epoch}.{len(self._held) + 1}" if self._held else self._epoch

        def nearness(branch: str) -> int:
            before = self._held[branch].get(entry.version - 1, -1)
            return before if before < entry.offset else -1

        return max(sorted(free, key=lambda branch: (len(branch), branch)), key=nearness)


class BranchStore:
    """The branches of one namespace. Law as in `ColdStore`: every method is one transaction."""

    def __init__(self, database: Database, namespace: str) -> None:
        self._database = database
        self._namespace = namespace

    def keep(self, partition: int, epoch: str, entries: Iterable[JournalEntry], cause: str) -> list[Kept]:
        """Keep those of these commits, of a closed epoch, that SQL does not have; what was added."""
        with self._database.write() as connection:
            return keep(connection, self._namespace, partition, epoch, entries, cause)

    def of(self, record: str) -> list[Branched]:
        """The branches of a record, the oldest epoch first."""
        with self._database.read() as connection:
            return branch_reading.of_record(connection, self._namespace, record)

    def one(self, record: str, branch: str) -> Branched:
        """A branch by its id. Raises NotFound."""
        with self._database.read() as connection:
            return branch_reading.one(connection, self._namespace, record, branch)

    def page(self, after: str, limit: int) -> list[Branched]:
        """The branches of the next `limit` records that have any, in the order of their texts."""
        with self._database.read() as connection:
            records = branch_reading.records_with(connection, self._namespace, after, limit)
            return [
                each for record in records for each in branch_reading.of_record(connection, self._namespace, record)
            ]

    def entries(self, record: str, branch: str) -> list[JournalEntry]:
        """The commits of a branch, by version. Raises NotFound."""
        with self._database.read() as connection:
            branch_reading.one(connection, self._namespace, record, branch)
            return branch_reading.entries(connection, self._namespace, record, branch)

    def state_at(self, record: str, branch: str, version: int | None) -> BranchState:
        """The state of a branch at a version, None: at the last that can be folded. Raises NotFound."""
        with self._database.read() as connection:
            return branch_reading.state_at(connection, self._namespace, record, branch, version)

    def drop(self, record: str, branch: str) -> int:
        """Remove a branch; how many commits it had. Raises NotFound."""
        with self._database.write() as connection:
            return branch_reading.drop(connection, self._namespace, record, branch)

    def told(self, record: str, branch: str) -> None:
        """Note that an event was published about a branch."""
        with self._database.write() as connection:
            branch_reading.told(connection, self._namespace, record, branch)

    def survey(self, partitions: Sequence[int]) -> tuple[int, list[str]]:
        """How many branches there are, and the records of these partitions of which no event told of them."""
        with self._database.read() as connection:
            return branch_reading.survey(connection, self._namespace, partitions)
