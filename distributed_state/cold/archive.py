"""Archives journal entries in the tables, and imports a record with its history.

Law: one transaction moves the cursors by compare-and-set of offset and event, and inserts the entries they pass. So two
archivers, or one that was restarted in the middle, archive every entry once and in order. A record is imported
completely or not at all, and never replaces an existing one.

Design: sections 9, 11.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from sqlalchemy import and_, bindparam, exc, select, update

from distributed_state.cold import aside, erasure, record_index, record_items, tables, usage
from distributed_state.cold.aside import Fault, set_aside
from distributed_state.cold.engine import Row, Sql
from distributed_state.cold.epochs import ordinal
from distributed_state.cold.erasure import inherit
from distributed_state.cold.record_history import note_shown, snapshot_row, states
from distributed_state.cold.record_index import (
    Parsed,
    hashed,
    keys,
    lock,
    parent_record,
    parse,
    phase_text,
    put,
    refuse_long,
)
from distributed_state.cold.record_items import OlderItem
from distributed_state.cold.values import Batch
from distributed_state.errors import ColdUnavailable, Conflict, CorruptState, InvalidValue, UnknownOperation
from distributed_state.values import message_ranges
from distributed_state.values.journal import JournalEntry, Segment, State, fold
from distributed_state.values.model import DELETED, OWNER, PARENT, PHASE, REPAIR, Expiry
from distributed_state.values.usage import used

log = logging.getLogger(__name__)


def archive(sql: Sql, batches: Iterable[Batch], snapshot_every: int) -> dict[int, set[str]]:
    """Archive the batches whose cursor is at their start; return their partitions, each with its quarantined entries.

    A quarantined entry is named by its event, and must not be reported as archived.
    """
    moved = _moved(sql, [batch for batch in batches if batch.entries])
    intake = Intake(sql)
    intake.take(moved, snapshot_every)
    return {batch.partition: intake.quarantined.intersection(e.event for e in batch.entries) for batch in moved}


def _moved(sql: Sql, batches: Sequence[Batch]) -> list[Batch]:
    """Move the cursors of the batches, one for each partition, that continue the archive; return these batches."""
    c = tables.cursors.c
    here = and_(
        c.namespace == sql.namespace,
        sql.among(c.partition, [batch.partition for batch in batches]),
        c.closed.is_(False),
    )
    # Always in the same order, so that archivers that share partitions cannot deadlock.
    found = sql.execute(
        select(c.partition, c.epoch, c.offset, c.event).where(here).order_by(c.partition).with_for_update()
    )
    at = {(row.partition, row.epoch): (row.offset, row.event) for row in found}
    moved = [
        batch
        for batch in batches
        if at.get((batch.partition, batch.epoch)) == (batch.from_offset, aside.storable(batch.from_event))
    ]
    if moved:
        change = update(tables.cursors).where(
            c.namespace == sql.namespace, c.partition == bindparam("p"), c.epoch == bindparam("e")
        )
        rows = [
            {"p": batch.partition, "e": batch.epoch, "o": last.offset, "id": aside.storable(last.event)}
            for batch in moved
            for last in batch.entries[-1:]
        ]
        sql.execute(change.values(offset=bindparam("o"), event=bindparam("id"), begun=True), rows)
    return moved


class Intake:
    """The entries of one transaction on their way into the tables."""

    def __init__(self, sql: Sql) -> None:
        self.sql = sql
        self.quarantined: set[str] = set()  # events
        self._stopped: dict[int, tuple[int, str]] = {}  # by partition: the offset that SQL refuses for now, and why

    def take(self, batches: Sequence[Batch], snapshot_every: int) -> None:
        """Insert all entries of these batches. Raises ArchivingStopped if SQL refuses an entry for now."""
        self._insert([item for batch in batches for item in self._parse(batch)], snapshot_every)
        if self._stopped:
            raise aside.ArchivingStopped(self._stopped)

    def _parse(self, batch: Batch) -> list[Parsed]:
        parsed = []
        for entry in batch.entries:
            if not entry.record and not entry.data:
                continue  # a mark only moves the cursor
            try:
                item = parse(entry, batch.partition, batch.epoch)
                refuse_long(item)
                parsed.append(item)
            except (ValueError, CorruptState) as error:
                self._refuse(entry, batch.partition, batch.epoch, error)
        return parsed

    def _insert(self, parsed: list[Parsed], every: int) -> None:
        """Insert entries. A refused list is halved until the entry that causes the error is found.

        The error does not name the entry: an index of `records`, for example, may have refused it.
        """
        parsed = [item for item in parsed if item.partition not in self._stopped]
        if not parsed:
            return
        try:
            with self.sql.begin_nested():
                self._carry(parsed, every)
            return
        except Exception as error:
            fault = aside.fault_of(self.sql, error)
            if fault is None:
                raise
            if len(parsed) == 1:
                (blamed,) = parsed
                if aside.is_collision(self.sql, error) and self._make_way(blamed):
                    self._insert(parsed, every)
                elif fault is Fault.ROW:
                    self._refuse(blamed.entry, blamed.partition, blamed.epoch, error, blamed)
                else:
                    self._stop(blamed.entry, blamed.partition, error)
                return
        middle = len(parsed) // 2
        self._insert(parsed[:middle], every)
        self._insert(parsed[middle:], every)

    def _make_way(self, item: Parsed) -> bool:
        """Quarantine changes that a repair or another epoch wrote under an entry's version; whether there were any."""
        record, version = item.entry.record, item.entry.version
        row = record_index.lock(self.sql, [record]).get(record)
        c = tables.changes.c
        there = select(c.epoch, c.kind).where(c.record == (row["key"] if row else 0), c.version == version)
        found = self.sql.execute(there).first()
        if row is None or found is None or (found.epoch == item.epoch and found.kind != REPAIR):
            return False
        row = self._set_aside(row, item)
        record_index.put(self.sql, [{**row, "version": version - 1}])
        return True

    def _carry(self, parsed: Sequence[Parsed], every: int) -> None:
        """Insert entries and everything derived from them."""
        changes = [item for item in parsed if item.entry.record]
        wanted = {item.entry.record for item in changes} | {run.source for item in changes for run in item.runs}
        wanted |= {item.parent for item in changes if item.parent is not None}
        existing = record_index.lock(self.sql, wanted)
        self._set_aside_replaced(changes, existing)
        keys = self._put(record_index.heads(self.sql, changes, existing), existing)
        insert_parsed(self.sql, parsed, keys)
        self._insert_events(parsed)
        inherit(self.sql, changes, keys)
        self._note_layers(changes, keys)
        record_index.note_tags(self.sql, changes)
        usage.note(self.sql, changes, keys)
        erasure.note_late(self.sql, changes, existing)
        self._snapshot(changes, existing, keys, every)

    def _put(
        self, heads: Mapping[str, Mapping[str, Any]], existing: Mapping[str, record_index.Head]
    ) -> Mapping[str, int]:
        """Write the rows of the records at their new heads; return their keys."""
        record_index.put(self.sql, [heads[record] for record in sorted(heads)], existing)
        keys = {record: row["key"] for record, row in existing.items()}
        return keys | record_index.keys(self.sql, heads.keys() - existing.keys())

    def _refuse(
        self, entry: JournalEntry, partition: int, epoch: str, error: Exception, item: Parsed | None = None
    ) -> None:
        """Put an entry into quarantine."""
        try:
            with self.sql.begin_nested():
                aside.keep_refused(self.sql, entry, partition, epoch, error)
            self.quarantined.add(entry.event)
        except Exception as again:
            if aside.fault_of(self.sql, again) is None:
                raise
            self._stop(entry, partition, again)
        if item is not None and item.entry.record:
            try:
                with self.sql.begin_nested():
                    self._use_up(item)
            except Exception as again:
                # SQL may refuse the record's row itself. Then the row stays at the previous version.
                if aside.fault_of(self.sql, again) is None:
                    raise

    def _use_up(self, item: Parsed) -> None:
        """Note that an entry used its version, so that the next change of its record does not get the same one."""
        existing = record_index.lock(self.sql, [item.entry.record])
        self._set_aside_replaced([item], existing)
        for row in existing.values():
            record_index.put(self.sql, [{**row, "version": max(row["version"], item.entry.version)}])

    def _stop(self, entry: JournalEntry, partition: int, error: Exception) -> None:
        """Note that SQL refuses an entry for now."""
        text = f"SQL does not accept entry {entry.offset}"
        text += f" ({entry.record[:200]} version {entry.version})" if entry.record else ""
        why = f"{text}: {aside.reason_of(error)}; retrying until SQL accepts it"
        self._stopped.setdefault(partition, (entry.offset, why))

    def _set_aside_replaced(self, parsed: Sequence[Parsed], existing: dict[str, record_index.Head]) -> None:
        """Quarantine commits that Redis lost: SQL has them, and a new epoch continues from an earlier version."""
        first: dict[str, Parsed] = {}
        for item in parsed:
            first.setdefault(item.entry.record, item)
        for record, item in first.items():
            row = existing.get(record)
            if row and item.entry.version <= row["version"] and item.epoch != row["epoch"]:
                existing[record] = self._set_aside(row, item)
                # Written now, because later writes cover only the differences from this row, not from the row in the
                # table.
                record_index.put(self.sql, [existing[record]])

    def _set_aside(self, row: record_index.Head, item: Parsed) -> record_index.Head:
        """Quarantine a record's versions from an entry's on; return the row that results, except for the version."""
        record, version = item.entry.record, item.entry.version
        log.error("%s: epoch %s replaces versions from %d on", record, item.epoch, version, extra={"record": record})
        set_aside(self.sql, row, version, f"replaced by {item.epoch}")
        before = states(self.sql, {record: version - 1}).get(record)
        record_index.replace_tags(self.sql, record, before.fields if before else {})
        return {**row, **record_index.about(before)}

    def _note_layers(self, changes: Iterable[Parsed], keys: Mapping[str, int]) -> None:
        """Note whose items new forks show, including those that their source inherits; likewise for rollbacks."""
        made = [item for item in changes if record_items.source_of(item) in keys]
        if made:
            have = record_items.with_items(self.sql, {keys[record_items.source_of(item)] for item in made})
            record_items.note_layers(self.sql, made, keys, have)

    def _insert_events(self, parsed: Iterable[Parsed]) -> None:
        """Insert the events of these entries. An import does not: its events happened elsewhere."""
        rows = []
        for item in parsed:
            e = item.entry
            for event in item.events:
                place = (self.sql.namespace, item.partition, item.epoch, event.offset)
                rows.append((*place, event.id, event.type, event.subject, e.time_ms, e.actor, e.version, event.data))
        self.sql.add(tables.events, rows)

    def _snapshot(
        self, changes: Sequence[Parsed], existing: Mapping[str, record_index.Head], keys: Mapping[str, int], every: int
    ) -> None:
        """Write the state of each record that crossed a multiple of `every`, got a label or got a whole state."""
        by_record: dict[str, list[Parsed]] = {}
        for item in changes:
            by_record.setdefault(item.entry.record, []).append(item)
        due = {record: items for record, items in by_record.items() if _is_due(items, every)}
        before = {record: items[0].entry.version - 1 for record, items in due.items() if record in existing}
        bases = states(self.sql, before)
        rows = []
        for record, items in due.items():
            fields = bases[record].fields if record in bases else {}
            for item in items:
                fold(fields, item.ops)
            rows.append(snapshot_row(keys[record], State(items[-1].epoch, items[-1].entry.version, fields)))
        self.sql.add(tables.snapshots, rows)


def insert_parsed(sql: Sql, parsed: Sequence[Parsed], keys: Mapping[str, int]) -> None:
    """Insert the changes, messages, items and shares of entries, except of those without a record."""
    changes: list[Row] = []
    messages: list[Row] = []
    items: list[Row] = []
    for item in parsed:
        e = item.entry
        if not e.record:
            continue
        key = keys[e.record]
        place = (key, e.version, e.offset, e.time_ms, e.token, item.epoch, e.event, e.kind, e.actor)
        changes.append((*place, item.label, item.data))
        for seq, data in item.messages:
            messages.append((key, seq, e.version, data))
        for (collection, name), data in item.items:
            items.append((key, collection, name, e.version, None, data))
    # Before the changes are inserted: this reads the states before them.
    shares = _shown_again(sql, [item for item in parsed if item.entry.record])
    # In the order of their keys: neighbouring rows fill the pages of an index, while scattered ones split them.
    sql.add(tables.changes, sorted(changes))
    sql.add(tables.messages, sorted(messages))
    sql.add(tables.items, sorted(items, key=lambda row: row[:4]))
    sql.add(tables.shares, shares)


def _shown_again(sql: Sql, changes: Sequence[Parsed]) -> list[Row]:
    """The rows of `shares`: the messages that each change shows by `#segments` and the state before it did not.

    A message stays shown from a noted change, or a base, on. The states are compared, not the rows noted so far: a
    later state may have hidden the message.
    """
    last = {item.entry.record: item.entry.version for item in changes if item.runs}
    by_record: dict[str, list[Parsed]] = {}
    for item in changes:
        if item.entry.version <= last.get(item.entry.record, 0):
            by_record.setdefault(item.entry.record, []).append(item)
    before = {record: items[0].entry.version - 1 for record, items in by_record.items() if items[0].entry.version > 1}
    try:
        bases = states(sql, before) if before else {}
    except CorruptState:
        # A damaged archive must not stop a commit. All runs are noted then, because extra rows are harmless and missing
        # ones are not.
        return [
            (sql.namespace, run.source, item.entry.record, item.entry.version, run.start, run.stop)
            for item in changes
            for run in dict.fromkeys(item.runs)
        ]
    rows = []
    for record, items in by_record.items():
        fields = bases[record].fields if record in bases else {}
        for item in items:
            shown = _shown(record, fields) if item.runs else []
            for run in message_ranges.without(dict.fromkeys(item.runs), shown):
                rows.append((sql.namespace, run.source, record, item.entry.version, run.start, run.stop))
            fold(fields, item.ops)
    return [*dict.fromkeys(rows)]


def _shown(record: str, fields: Mapping[bytes, bytes]) -> list[Segment]:
    try:
        return message_ranges.segments(record, fields)
    except CorruptState:
        return []


def _is_due(items: Sequence[Parsed], every: int) -> bool:
    first = items[0].entry.version
    last = items[-1].entry.version
    return (first - 1) // every != last // every or any(
        item.label is not None or item.entry.kind == REPAIR for item in items
    )


# Import of a record


class Imported(TypedDict):
    """The arguments of an import: the oldest state, its messages and items, and the changes after it."""

    partition: int
    epoch: str
    base: State | None
    base_messages: Sequence[tuple[int, bytes]]
    entries: Sequence[JournalEntry]
    items: NotRequired[Sequence[OlderItem]]


def adopt(
    sql: Sql,
    record: str,
    *,
    partition: int,
    epoch: str,
    base: State | None,
    base_messages: Sequence[tuple[int, bytes]],
    entries: Sequence[JournalEntry],
    items: Sequence[OlderItem] = (),
    snapshot_every: int,
) -> None:
    """Insert the base as a snapshot, then the changes after it. Raises Conflict if the record exists."""
    if base is None and not entries:
        raise InvalidValue(f"{record}: there is no state or change to import")
    first = base.version if base else entries[0].version
    _refuse_existing(sql, record, first)
    parsed = [_parsed_of(entry, record, partition, epoch) for entry in entries]
    try:
        with sql.begin_nested():
            kept = _keep_states(epoch, base, parsed, snapshot_every)
            put(sql, [_imported_head(sql, record, partition, kept[-1], parsed)])
            key = keys(sql, [record])[record]
            sql.add(tables.snapshots, [snapshot_row(key, state) for state in kept])
            sql.add(tables.messages, [(key, seq, first, data) for seq, data in base_messages])
            insert_parsed(sql, parsed, {record: key})
            record_items.bring(sql, record, key, items, parsed)
            note_shown(sql, {record: base} if base else {})
            record_index.replace_tags(sql, record, kept[-1].fields)
            # Tokens used before the base count at the time of the first change: the history no longer has their turns.
            earlier = used(base.fields) if base else {}
            usage.add(sql, [(key, parsed[0].entry.time_ms if parsed else int(time.time() * 1000), earlier)])
            usage.note(sql, parsed, {record: key})
    except exc.IntegrityError as error:
        raise Conflict(f"{record}: a part of it is already in the archive") from error
    _refuse_newer_epoch(sql, partition, epoch)


def _refuse_newer_epoch(sql: Sql, partition: int, epoch: str) -> None:
    """Raise ColdUnavailable if a newer epoch began: the known ids that Redis got for it lack this record."""
    c = tables.cursors.c
    here = select(c.epoch).where(c.namespace == sql.namespace, c.partition == partition, c.ordinal > ordinal(epoch))
    # Lock the rows that the next epoch would change, until the end; done last, because archivers wait for them.
    held = select(c.ordinal).where(c.namespace == sql.namespace, c.partition == partition).with_for_update(read=True)
    sql.execute(held).all()
    if newer := sql.execute(here).scalar():
        raise ColdUnavailable(f"partition {partition} began epoch {newer} meanwhile; nothing was changed")


def _refuse_existing(sql: Sql, record: str, first: int) -> None:
    stone = hashed(sql.namespace, record)
    found = lock(sql, [record, stone])
    if record in found:
        version = found[record]["version"]
        raise Conflict(f"{record} exists already, at version {version}", version=version)
    if stone in found and found[stone]["version"] >= first:
        version = found[stone]["version"]
        raise Conflict(
            f"{record} was erased at version {version}; version {first} cannot be used again", version=version
        )


def _parsed_of(entry: JournalEntry, record: str, partition: int, epoch: str) -> Parsed:
    if entry.record != record:
        raise InvalidValue(f"{record}: its changes contain an entry of {entry.record}")
    try:
        return parse(entry, partition, epoch)
    except (ValueError, CorruptState, UnknownOperation) as error:
        raise InvalidValue(f"{record} version {entry.version}: {error}") from error


def _keep_states(epoch: str, base: State | None, parsed: Sequence[Parsed], every: int) -> list[State]:
    """The states to keep as snapshots: the base, each after `every` changes, and the last."""
    fields = dict(base.fields) if base else {}
    kept = [State(epoch, base.version, dict(fields))] if base else []
    for number, item in enumerate(parsed, 1):
        fold(fields, item.ops)
        if number % every == 0 or item is parsed[-1]:
            kept.append(State(epoch, item.entry.version, dict(fields)))
    return kept


def _imported_head(sql: Sql, record: str, partition: int, state: State, parsed: Sequence[Parsed]) -> dict[str, Any]:
    now = int(time.time() * 1000)
    owner = state.fields.get(OWNER)
    parent = state.fields.get(PARENT)
    row: dict[str, Any] = {"namespace": sql.namespace, "record": record, "partition": partition}
    row |= {"scope": record.partition(":")[0], "epoch": state.epoch, "version": state.version}
    deleted = state.fields.get(DELETED)
    row |= {"deleted": deleted is not None, "lifetime": deleted.decode() if deleted and Expiry.read(deleted) else None}
    phase = state.fields.get(PHASE)
    row |= {"phase": None if phase is None else phase_text(phase), "due": None}
    row |= {"size": sum(map(len, state.fields.values())) + sum(len(item.entry.data) for item in parsed)}
    row |= {"owner": owner.decode() if owner is not None else None}
    row |= {"parent": parent_record(parent) if parent is not None else None}
    row |= {"created_ms": parsed[0].entry.time_ms if parsed else now}
    updated_ms = parsed[-1].entry.time_ms if parsed else now
    return row | {"updated_ms": updated_ms, "listed_ms": updated_ms}
