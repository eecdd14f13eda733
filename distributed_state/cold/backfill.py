"""Brings SQL up to a Redis that is newer: it was restored from an older backup, or a journal has a gap.

Law: what Redis shows is what SQL has afterwards, under the same version. Of how it came about SQL gets what the journal
still holds; where commits are missing in between, the state comes whole, as one change, and the commits that lead up to
it are put aside: a state in the middle cannot be told.

Design: section 14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, and_, insert, select, update

from distributed_state.cold import bulk, remembered, tables
from distributed_state.cold.archive import Intake
from distributed_state.cold.history import states
from distributed_state.cold.recovery import clock_us
from distributed_state.cold.values import Batch, Cursor
from distributed_state.values.journal import Happened, JournalEntry, Loaded, Segment, State, Step, pack
from distributed_state.values.model import DELETED, NEXT, OWNER, START

REPAIR = "repair"  # the kind of a change that brings a state whole
_ASIDE = "SQL lacks what came before it; what it did is in a later version, which was brought back whole"


@dataclass(slots=True)
class Backfilled:
    """How many records came whole, how many commits and events of the journal one by one, and how many were put aside.

    `lost` are messages that neither has, of records that came whole. `deleted` are records that Redis only knows to
    have been deleted, or erased, since the backup.
    """

    records: int = 0
    commits: int = 0
    events: int = 0
    aside: int = 0
    lost: list[Segment] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)

    def add(self, other: Backfilled) -> None:
        """Count what another one counted."""
        self.records += other.records
        self.commits += other.commits
        self.events += other.events
        self.aside += other.aside
        self.lost += other.lost
        self.deleted += other.deleted


@dataclass(frozen=True, slots=True)
class Held:
    """What Redis has of some records of a partition under its epoch: how they stand, and their entries of the journal.

    `deleted` are versions at which records were deleted, as events tell. A record that is not there has no state.
    `archived` is an offset up to which all was archived, once.
    """

    partition: int
    epoch: str
    archived: int
    states: Mapping[str, Loaded]
    entries: Mapping[str, Sequence[JournalEntry]]
    deleted: Mapping[str, int]


def backfill(
    connection: Connection, namespace: str, held: Held, after: Cursor | None, snapshot_every: int, *, keep: bool
) -> Backfilled | None:
    """Bring these records to SQL if that still is where it was `after`; None if it is not. `keep`: change nothing."""
    if not keep and not _is_at(connection, namespace, held.partition, after):
        return None
    names = {*held.states, *held.entries, *held.deleted} - {""}
    heads = remembered.heads(connection, namespace, names)
    before = states(connection, namespace, {name: head.version for name, head in heads.items()})
    plan = _Plan(held, clock_us(connection) // 1000)
    for name in sorted(names):
        plan.add(name, heads[name].version if name in heads else 0, before.get(name))
    alone = held.entries.get("", ())
    lacking = remembered.lacking(connection, namespace, held.partition, held.epoch, [*alone, *plan.aside])
    carried = plan.carried + [entry for entry in alone if entry.event in lacking]
    plan.done.aside = sum(entry.event in lacking for entry in plan.aside)
    if not keep:
        batch = Batch(held.partition, held.epoch, 0, sorted(carried, key=lambda entry: entry.offset))
        Intake(connection, namespace).take([batch], snapshot_every)
        remembered.set_aside(connection, namespace, held.partition, held.epoch, plan.aside, _ASIDE)
    return plan.done


class _Plan:
    """What is to be archived of the records that are added, what put aside, and the counts."""

    def __init__(self, held: Held, now_ms: int) -> None:
        self._held = held
        self._now_ms = now_ms
        self.carried: list[JournalEntry] = []
        self.aside: list[JournalEntry] = []
        self.done = Backfilled()

    def add(self, name: str, version: int, before: State | None) -> None:
        """Add a record, which SQL has up to a version, with the state before."""
        entries = [entry for entry in self._held.entries.get(name, ()) if entry.version > version]
        whole = self._whole(name, version, before)
        last = entries[-1].version if entries else version
        continues = [entry.version for entry in entries] == [*range(version + 1, last + 1)]
        if continues and (whole is None or whole.state.version == last):
            self.carried += entries
            self.done.commits += len(entries)
        elif whole is None:
            self.aside += entries
        else:
            old = before.fields if before else {}
            self.carried.append(self._as_one_change(name, whole, old, entries))
            self.aside += [entry for entry in entries if entry.version != whole.state.version]
            self.done.records += 1
            self.done.lost += _lost(name, whole, old)

    def _as_one_change(
        self, name: str, whole: Loaded, old: Mapping[bytes, bytes], entries: Sequence[JournalEntry]
    ) -> JournalEntry:
        """The entry that leads from the fields that SQL has to those of a state, with the messages that SQL lacks."""
        version = whole.state.version
        fields = whole.state.fields
        first = int(old.get(NEXT, b"0"))
        steps: list[Step] = [(b"c", b"", b"")] if old else []
        steps += [(b"d", each, b"") for each in old if each[:1] == b"#" and each not in fields]
        steps += [(b"m", b"%d" % number, data) for number, data in whole.messages if number >= first]
        steps += [(b"s", each, value) for each, value in fields.items()]
        last = next((entry for entry in entries if entry.version == version), None)
        return JournalEntry(
            offset=last.offset if last else self._held.archived,
            event=last.event if last else f"{REPAIR}.{self._held.epoch}.{version}",
            record=name,
            version=version,
            time_ms=last.time_ms if last else whole.time_ms or self._now_ms,
            kind=REPAIR,
            actor=last.actor if last else "",
            token=last.token if last else 0,
            data=pack(steps),
            total_bytes=0,
            next_message=int(fields.get(NEXT, b"0")),
        )

    def _whole(self, name: str, version: int, before: State | None) -> Loaded | None:
        """The record as Redis has it, if that is newer."""
        whole = self._held.states.get(name)
        there = whole.state.version if whole else 0
        ended = self._held.deleted.get(name, 0)
        if before is not None and not before.deleted and ended > max(version, there):
            # Where Redis shows it, that was read from SQL since.
            self.done.deleted.append(name)
            return _tombstone(before, ended)
        return whole if there > version else None


def _tombstone(state: State, version: int) -> Loaded:
    """What a record is that was deleted, or erased, as far as its last state tells."""
    end = state.fields.get(NEXT, b"0")
    kept = {name: value for name, value in state.fields.items() if name in (OWNER, NEXT)}
    return Loaded(State(state.epoch, version, {**kept, DELETED: b"1", START: end}), [])


def add_events(connection: Connection, namespace: str, happened: Sequence[Happened], *, keep: bool) -> int:
    """Add those of a partition's events that SQL lacks; how many. `keep`: only count them."""
    if not happened:
        return 0
    c = tables.events.c
    oldest = min(each.time_ms for each in happened)
    here = and_(c.namespace == namespace, c.partition == happened[0].partition, c.time_ms >= oldest)
    # By their ids, too: of a stream that went on from one epoch to the next SQL may have some under the first.
    known = connection.execute(select(c.id, c.epoch, c.offset).where(here)).all()
    ids = {row.id for row in known}
    places = {(row.epoch, row.offset) for row in known}
    lacking = [each for each in happened if each.id not in ids and (each.epoch, each.offset) not in places]
    if not keep:
        rows = [
            (namespace, *place, e.id, e.type, e.subject, e.time_ms, e.actor, e.version, e.data)
            for e in lacking
            for place in [(e.partition, e.epoch, e.offset)]
        ]
        bulk.add(connection, tables.events, rows)
    return len(lacking)


def reach(connection: Connection, namespace: str, after: Cursor | None, to: Cursor) -> bool:
    """Note that SQL has all up to there, if it still is where it was `after`."""
    if not _is_at(connection, namespace, to.partition, after):
        return False
    c = tables.cursors.c
    here = and_(c.namespace == namespace, c.partition == to.partition)
    if after is not None and after.epoch == to.epoch:
        at = update(tables.cursors).where(here, c.epoch == to.epoch)
        connection.execute(at.values(offset=to.offset, event=to.event))
        return True
    connection.execute(update(tables.cursors).where(here).values(closed=True))
    row = {"namespace": namespace, "partition": to.partition, "ordinal": to.ordinal, "epoch": to.epoch}
    connection.execute(insert(tables.cursors), row | {"offset": to.offset, "event": to.event, "closed": False})
    return True


def _is_at(connection: Connection, namespace: str, partition: int, after: Cursor | None) -> bool:
    """Whether SQL has a partition up to there and no further; held until the transaction ends."""
    c = tables.cursors.c
    here = and_(c.namespace == namespace, c.partition == partition)
    query = select(c.ordinal, c.epoch, c.offset, c.event).where(here).with_for_update()
    newest = max(connection.execute(query).all(), default=None)
    return newest == ((after.ordinal, after.epoch, after.offset, after.event) if after else None)


def _lost(name: str, whole: Loaded, old: Mapping[bytes, bytes]) -> list[Segment]:
    """The messages behind those that SQL has and before those that Redis has."""
    fields = whole.state.fields
    end = int(fields.get(NEXT, b"0"))
    first = max(int(old.get(NEXT, b"0")), int(fields.get(START, b"0")))
    held = min((number for number, _ in whole.messages if number >= first), default=end)
    return [Segment(name, first, held)] if held > first else []
