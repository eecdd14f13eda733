"""Brings SQL up to a Redis that is newer: it was restored from an older backup, or a journal has a gap.

Law: what Redis shows is what SQL has afterwards, under the same version. Of how it came about SQL gets what the journal
still holds; where commits are missing in between, the state comes whole, as one change, and the commits that lead up to
it are put aside: a state in the middle cannot be told.

Design: section 14.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from sqlalchemy import Connection, and_, select

from distributed_state.cold import backfill_items, blocks, bulk, erasure, record_index, remembered, tables
from distributed_state.cold.archive import Intake
from distributed_state.cold.epochs import clock_us
from distributed_state.cold.history import states
from distributed_state.cold.recovery import is_at
from distributed_state.cold.values import RESOLVED, Backfilled, Batch, Cursor, Held
from distributed_state.values import message_ranges
from distributed_state.values.journal import Happened, JournalEntry, Loaded, Segment, State, Step, pack, unpack
from distributed_state.values.model import DELETED, ERASE, FORGET, ITEMS, NEXT, OWNER, PARENT, REPAIR, START


def backfill(
    connection: Connection, namespace: str, held: Held, after: Cursor | None, snapshot_every: int, *, keep: bool
) -> Backfilled | None:
    """Bring these records to SQL if that still is where it was `after`; None if it is not. `keep`: change nothing."""
    if not keep and not is_at(connection, namespace, held.partition, after):
        return None
    names = {*held.states, *held.entries, *held.deleted} - {""}
    heads = remembered.heads(connection, namespace, names)
    before = states(connection, namespace, {name: head.version for name, head in heads.items()})
    plan = _Plan(held, clock_us(connection) // 1000, partial(_kept, connection, namespace))
    for name in sorted(names):
        plan.add(name, heads[name].version if name in heads else 0, before.get(name))
    alone = held.entries.get("", ())
    lacking = remembered.lacking(connection, namespace, held.partition, held.epoch, [*alone, *plan.aside])
    carried = plan.carried + [entry for entry in alone if entry.event in lacking]
    plan.done.aside = sum(entry.event in lacking for entry in plan.aside)
    if not keep:
        batch = Batch(held.partition, held.epoch, 0, sorted(carried, key=lambda entry: (entry.offset, entry.version)))
        # First these: behind a record that came whole they would be taken for purged.
        remembered.set_aside(connection, namespace, held.partition, held.epoch, plan.aside, RESOLVED)
        erasure.erase(connection, namespace, plan.erased)
        Intake(connection, namespace).take([batch], snapshot_every)
    return plan.done


def _kept(connection: Connection, namespace: str, name: str, runs: Sequence[Segment]) -> set[tuple[str, int]]:
    """Which messages of these runs SQL has, by the record under which it has them."""
    found: set[tuple[str, int]] = set()
    keys = record_index.keys(connection, namespace, {name, *(run.source for run in runs)})
    names = {key: record for record, key in keys.items()}
    for run in runs:
        here = blocks.Run({keys[each] for each in (name, run.source) if each in keys}, run.start, run.stop)
        found.update((names[key], seq) for key, seq, _ in blocks.messages_in(connection, [here]))
    return found


class _Plan:
    """What is to be archived of the records that are added, what put aside or erased, and the counts.

    `kept` says which messages of a record SQL has.
    """

    def __init__(self, held: Held, now_ms: int, kept: Callable[[str, Sequence[Segment]], set[tuple[str, int]]]) -> None:
        self._held = held
        self._now_ms = now_ms
        self._kept = kept
        self.carried: list[JournalEntry] = []
        self.aside: list[JournalEntry] = []
        self.erased: list[str] = []
        self.done = Backfilled()

    def add(self, name: str, version: int, before: State | None) -> None:
        """Add a record, which SQL has up to a version, with the state before."""
        there = self._held.states.get(name)
        newer = there if there is not None and there.state.version > version else None
        if newer is not None and before is not None and _next(newer.state) < _next(before):
            # Messages are numbered anew when it was erased, and began again, or SQL kept nothing but its end.
            self.erased.append(name)
            before = None
        ended = self._held.deleted.get(name, 0)
        last = max(there.state.version if there else 0, version)
        gone = before is not None and not before.deleted and last <= ended > version
        if gone and not (there and there.state.deleted):
            # What Redis shows of it was read from the older SQL since, and perhaps written on.
            self.done.deleted.append(name)
            self.done.stale.append(name)
            if newer is None and before is not None:
                newer = _tombstone(before, ended)
        else:
            gone = False
        entries = [entry for entry in self._held.entries.get(name, ()) if entry.version > version]
        carried = self._follow(name, version, before, entries, newer)
        if carried and newer is not None:
            if gone and not newer.state.deleted:
                end = _tombstone(newer.state, ended + 1)
                self._change(name, end, newer.state.fields, carried, [])
            elif not newer.state.deleted:
                self._leave_out(name, newer, carried)
        self.carried += carried

    def _follow(
        self, name: str, version: int, before: State | None, entries: list[JournalEntry], newer: Loaded | None
    ) -> list[JournalEntry]:
        """What leads from the version that SQL has to that of Redis: the entries of the journal, or one change."""
        last = entries[-1].version if entries else version
        continues = [entry.version for entry in entries] == [*range(version + 1, last + 1)]
        if continues and (newer is None or newer.state.version == last):
            self.done.commits += len(entries)
            return entries
        if newer is None:
            self.aside += entries
            return []
        # The newest one that has its version: where it was hydrated from SQL since, an older one may have it, too.
        same = next((entry for entry in reversed(entries) if entry.version == newer.state.version), None)
        self.aside += [entry for entry in entries if entry is not same]
        self.done.records += 1
        carried: list[JournalEntry] = []
        known = version if before else 0
        items, missing = backfill_items.steps(self._held.items.get(name), known, newer, entries)
        if missing:
            self.done.lost_items.append(name)
        runs = message_ranges.segments(name, newer.state.fields)
        kept = self._kept(name, runs) if before else set()
        sources = {number: run.source for run in runs for number in range(run.start, run.stop)}
        first = _next(before) if before else 0
        messages = {
            number: data
            for number, data in newer.messages
            if number >= first or (number in sources and not kept & {(name, number), (sources[number], number)})
        }
        steps = [*items, *((b"m", b"%d" % number, data) for number, data in messages.items())]
        newer = replace(newer, state=backfill_items.layered(newer.state, known))
        self._change(name, newer, before.fields if before else {}, carried, steps, same)
        return carried

    def _change(
        self,
        name: str,
        whole: Loaded,
        old: Mapping[bytes, bytes],
        carried: list[JournalEntry],
        lacking: Sequence[Step],
        same: JournalEntry | None = None,
    ) -> None:
        """Add the entry that leads from these fields to those of a state, with messages and items that SQL lacks."""
        version = whole.state.version
        fields = whole.state.fields
        steps: list[Step] = [(b"c", b"", b"")] if old else []
        steps += [(b"d", each, b"") for each in old if each[:1] == b"#" and each not in fields]
        steps += lacking
        # Not a parent that SQL knows: it would be taken for a fork that is made only now, and erased if its source was.
        steps += [(b"s", each, value) for each, value in fields.items() if each != PARENT or old.get(each) != value]
        steps += [op for op in unpack(same.data) if op.kind == b"l"] if same else []
        carried.append(self._entry(name, version, steps, fields, whole.time_ms, carried, same))

    def _leave_out(self, name: str, newer: Loaded, carried: list[JournalEntry]) -> None:
        """Add a change after which it shows its messages without those that are nowhere."""
        fields = newer.state.fields
        runs = message_ranges.segments(name, fields)
        here = {number for number, _ in newer.messages}
        here.update(int(op.name) for entry in carried for op in unpack(entry.data) if op.kind == b"m")
        kept: set[tuple[str, int]] = set()
        if any(not here.issuperset(range(run.start, run.stop)) for run in runs):
            kept = self._kept(name, runs)
        lost = [
            Segment(run.source, number, number + 1)
            for run in runs
            for number in range(run.start, run.stop)
            if number not in here
            and number not in self._held.elsewhere.get(run.source, ())
            and not kept & {(name, number), (run.source, number)}
        ]
        if lost:
            self.done.lost += [replace(each, source=name) for each in message_ranges.joined(lost)]
            self.done.stale.append(name)
            shown = message_ranges.shown(message_ranges.without(runs, message_ranges.joined(lost)), fields)
            version = newer.state.version + 1
            steps: list[Step] = [(b"s", each, value) for each, value in shown.items()]
            carried.append(self._entry(name, version, steps, fields, newer.time_ms, carried, None))

    def _entry(
        self,
        name: str,
        version: int,
        steps: list[Step],
        fields: Mapping[bytes, bytes],
        time_ms: int,
        carried: Sequence[JournalEntry],
        same: JournalEntry | None,
    ) -> JournalEntry:
        """A change of ours, behind those that are `carried` of the record, or in the place of the `same` one."""
        # Not before those, as they are taken in the order of their offsets: SQL's head would stay at an older version.
        behind = max([self._held.archived, *(entry.offset for entry in carried)])
        return JournalEntry(
            offset=same.offset if same else behind,
            event=same.event if same else f"{REPAIR}.{version}.{self._held.epoch.rpartition('-')[2]}",
            record=name,
            version=version,
            time_ms=same.time_ms if same else time_ms or self._now_ms,
            kind=same.kind if same and same.kind in (ERASE, FORGET) else REPAIR,
            actor=same.actor if same else "",
            token=same.token if same else 0,
            data=pack(steps),
            total_bytes=0,
            next_message=int(fields.get(NEXT, b"0")),
        )


def _next(state: State) -> int:
    return int(state.fields.get(NEXT, b"0"))


def _tombstone(state: State, version: int) -> Loaded:
    """What a record is that was deleted, or erased, as far as its last state tells."""
    end = state.fields.get(NEXT, b"0")
    kept = {name: value for name, value in state.fields.items() if name in (OWNER, NEXT)}
    # Else what begins again under its name would show the items of before.
    kept |= {ITEMS: b"%d 0" % version} if ITEMS in state.fields else {}
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
