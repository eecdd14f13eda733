"""Brings SQL up to a newer Redis, after SQL was restored from an older backup or a journal lost entries.

Law: afterwards SQL has the state that Redis shows, under the same version. SQL also gets the history that the journal
still holds. Where commits are missing in between, the state is stored whole, as one change, and the commits that lead
up to it are put in the quarantine, because the states in between are unknown.

Design: section 14.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import and_, func, select

from distributed_state.cold import aside, blocks, erasure, record_history, record_index
from distributed_state.cold.archive import Intake
from distributed_state.cold.engine import Sql
from distributed_state.cold.epochs import clock_us, is_at
from distributed_state.cold.record_history import states
from distributed_state.cold.record_index import LARGEST
from distributed_state.cold.tables import events
from distributed_state.cold.values import RESOLVED, Archived, Backfilled, Batch, Cursor, Held
from distributed_state.values import codec, field_ttl, message_ranges
from distributed_state.values.journal import (
    Happened,
    JournalEntry,
    KeptItems,
    Loaded,
    Operation,
    Segment,
    State,
    pack,
    unpack,
)
from distributed_state.values.model import DELETED, ERASE, FORGET, ITEMS, NEXT, OWNER, PARENT, REPAIR, START, Expiry

_REPAIRED = "conversation.repaired"
_BESIDE = "SQL was restored older, and Redis had read that state before it was repaired"


def backfill(sql: Sql, held: Held, after: Cursor | None, snapshot_every: int, *, keep: bool) -> Backfilled | None:
    """Bring these records to SQL if its cursor is still at `after`; None if that moved. `keep`: change nothing."""
    if not keep and not is_at(sql, held.partition, after):
        return None
    names = {*held.states, *held.entries, *held.deleted} - {""}
    heads = record_history.heads(sql, names)
    # Undo changes of a repair that was interrupted before Redis had them.
    unseen = {name: head for name, head in heads.items() if _is_unseen(held, name, head)}
    undone = {name: head.version for name, head in unseen.items() if _is_passed(held, name, head)}
    known = {name: head.version - (name in undone) for name, head in heads.items()}
    before = states(sql, known)
    plan = _Plan(held, clock_us(sql) // 1000, partial(_kept, sql))
    plan.done.stale += sorted(unseen.keys() - undone.keys())
    for name in sorted(names):
        plan.add(name, known.get(name, 0), before.get(name))
    for name in _lacking_items(sql, plan):
        plan.lose_items(name, known.get(name, 0))
    alone = held.entries.get("", ())
    left = [*alone, *plan.aside, *plan.beside]
    lacking = record_history.lacking(sql, held.partition, held.epoch, left)
    carried = plan.carried + [entry for entry in alone if entry.event in lacking]
    plan.done.aside = sum(entry.event in lacking for entry in plan.aside)
    beside = [entry for entry in plan.beside if entry.event in lacking]
    plan.done.branched = len(beside)
    if not keep:
        for name in sorted(undone):
            aside.undo(sql, name, undone[name], before.get(name))
        batch = Batch(held.partition, held.epoch, 0, sorted(carried, key=plan.place))
        # Inserted first: after a whole state they would be taken for purged.
        aside.set_aside_lacking(sql, held.partition, held.epoch, plan.aside, RESOLVED)
        aside.keep(sql, held.partition, held.epoch, beside, _BESIDE)
        erasure.erase(sql, plan.erased)
        intake = Intake(sql)
        intake.take([batch], snapshot_every)
        aside.unresolve(sql, plan.refuse(intake.quarantined))
        erasure.hand(sql, plan.borrowed)
        _note(sql, held, plan.notes)
    return plan.done


def _is_unseen(held: Held, name: str, head: Archived) -> bool:
    """Whether SQL's last version is a repair's own change that Redis, which has the record, does not continue."""
    if name not in held.states or head.event != _event(held, head.version):
        return False
    return held.states[name].state.version < head.version or _is_passed(held, name, head)


def _is_passed(held: Held, name: str, head: Archived) -> bool:
    """Whether Redis has given SQL's last version to another commit meanwhile."""
    entries = held.entries.get(name, ())
    return any(entry.version == head.version and entry.offset > head.offset for entry in entries)


def _lacking_items(sql: Sql, plan: _Plan) -> list[str]:
    """The forks of this plan whose inherited items may have changed: part of what their source had is missing."""
    brought = {(entry.record, entry.version) for entry in plan.carried}
    lacking = set(plan.done.lost_items)
    lacking |= _named(sql, {source for source, _ in plan.forks.values()})

    def lacks(name: str) -> bool:
        line = [name]
        while name not in lacking and (place := plan.forks.get(name)):
            if place not in brought and not _has(sql, *place, plan.begun_ms(name)):
                return True
            name = place[0]
            if name in line:
                break
            line.append(name)
        return name in lacking

    return [name for name in sorted(plan.forks) if name not in lacking and lacks(name)]


def _named(sql: Sql, records: Collection[str]) -> set[str]:
    """Those of these records for which a repair reported that items may be lost."""
    e = events.c
    query = select(e.subject, e.epoch, e.data).where(e.namespace == sql.namespace, e.type == _REPAIRED)
    return {
        subject
        for subject, epoch, data in sql.rows(query, e.subject, records)
        # Any user may emit an event of that type; a repair's events have a separate epoch.
        if epoch.endswith(f".{REPAIR}") and codec.decode(data)["items"]
    }


def _has(sql: Sql, record: str, version: int, until_ms: int) -> bool:
    """Whether SQL has this version of a record, written by that time."""
    key = record_index.keys(sql, [record]).get(record)
    found = blocks.changes_between(sql, key, version - 1, version + 1, 1) if key is not None else []
    return any(row.time_ms <= until_ms for row in found)


def _nothing_of(version: int) -> dict[str, Any]:
    """The note about a record without losses."""
    return {"version": version, "after": version, "aside": 0, "lost": [], "items": False, "deleted": False}


def _event(held: Held, version: int) -> str:
    """The event id of a repair's own change."""
    return f"{REPAIR}.{version}.{held.epoch.rpartition('-')[2]}"


def _note(sql: Sql, held: Held, notes: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the changes of records to the audit, in the same transaction, so that a crash later loses no note."""
    # Under a separate epoch, because Redis numbers its events under `held.epoch`.
    epoch = f"{held.epoch}.{REPAIR}"
    e = events.c
    here = and_(e.namespace == sql.namespace, e.partition == held.partition, e.epoch == epoch)
    last = sql.execute(select(func.max(e.offset)).where(here)).scalar() or 0
    now_ms = clock_us(sql) // 1000
    rows = []
    for number, (name, note) in enumerate(sorted(notes.items()), last + 1):
        id = f"{REPAIR}.{held.partition}.{held.epoch}.{number}"
        place = (sql.namespace, held.partition, epoch, number, id, _REPAIRED, name)
        rows.append((*place, now_ms, "", note["version"], codec.encode(note)))
    sql.add(events, rows)


def _kept(sql: Sql, name: str, runs: Sequence[Segment]) -> dict[tuple[str, int], int]:
    """The messages of these runs that SQL has, each by the record that holds it, and when it was written."""
    found: dict[tuple[str, int], int] = {}
    keys = record_index.keys(sql, {name, *(run.source for run in runs)})
    names = {key: record for record, key in keys.items()}
    for run in runs:
        here = blocks.Run({keys[each] for each in (name, run.source) if each in keys}, run.start, run.stop)
        for key, seq, data in blocks.messages_in(sql, [here]):
            found[names[key], seq] = _written_ms(data)
    return found


def _written_ms(message: bytes) -> int:
    """When a message was committed; 0 if unknown."""
    time, _ = field_ttl.split(message)
    return 0 if time == field_ttl.NEVER else round(time * 1000)


_Kept = Callable[[str, Sequence[Segment]], Mapping[tuple[str, int], int]]


class _Plan:
    """The commits to archive, to quarantine or to erase for the added records, with counts.

    `kept` returns the messages of a record that SQL has, and when they were written.
    """

    def __init__(self, held: Held, now_ms: int, kept: _Kept) -> None:
        self._held = held
        self._now_ms = now_ms
        self._kept = kept
        self.carried: list[JournalEntry] = []
        self.aside: list[JournalEntry] = []
        self.beside: list[JournalEntry] = []  # commits that neither the record nor `carried` has
        self.erased: list[str] = []
        self.borrowed: dict[str, dict[int, bytes]] = {}  # messages of a fork's source that only Redis has
        self.forks: dict[str, tuple[str, int]] = {}  # the source whose items each fork shows, and as of which version
        self.whole: dict[str, int] = {}  # records that are stored as a whole state, and its version
        self.notes: dict[str, dict[str, Any]] = {}  # by record, as in the audit
        self.done = Backfilled()

    def add(self, name: str, version: int, before: State | None) -> None:
        """Add a record, with the version that SQL has and the state at it."""
        self._note = _nothing_of(version)
        self._add(name, version, before)
        if self._note != _nothing_of(version):
            self.notes[name] = self._note

    def refuse(self, events: Collection[str]) -> set[str]:
        """Uncount entries that went to quarantine; return the events of commits put aside with one of them."""
        refused = [entry for entry in self.carried if entry.event in events]
        whole = {entry.record for entry in refused if self.whole.get(entry.record) == entry.version}
        self.done.records -= len(whole)
        self.done.commits -= sum(entry.record not in self.whole and entry.kind != REPAIR for entry in refused)
        self.done.refused = sorted({entry.record for entry in refused})
        return {entry.event for entry in self.aside if entry.record in whole}

    def lose_items(self, name: str, version: int) -> None:
        """Note that items of a record may be lost."""
        self.done.lost_items.append(name)
        self.notes.setdefault(name, _nothing_of(version))["items"] = True

    def place(self, entry: JournalEntry) -> tuple[int, int, int]:
        """The sort key of an entry: a record's entries stay in order, after those of its fork's source."""
        name, depth = entry.record, 0
        while name in self.forks and depth < len(self.forks):
            name, depth = self.forks[name][0], depth + 1
        return depth, entry.offset, entry.version

    def begun_ms(self, name: str) -> int:
        """The latest possible begin of a record that SQL lacks: messages that it shares are older."""
        begun = [entry.time_ms for entry in self._held.entries.get(name, ()) if entry.version == 1]
        return begun[-1] if begun else self._held.archived_ms or LARGEST

    def _kept_of(self, name: str, runs: Sequence[Segment]) -> set[tuple[str, int]]:
        """The messages of these runs that SQL has, each with the record that holds it.

        Messages written later under the same number are left out: their record was read from the older SQL and written
        again.
        """
        until_ms = self.begun_ms(name)
        found = self._kept(name, runs)
        return {(record, number) for (record, number), ms in found.items() if record == name or ms <= until_ms}

    def _add(self, name: str, version: int, before: State | None) -> None:
        there = self._held.states.get(name)
        newer = there if there is not None and there.state.version > version else None
        if newer is not None and before is not None and _next(newer.state) < _next(before):
            # Message numbers start over if the record was erased and began again, or if SQL kept only its end.
            self.erased.append(name)
            before = None
        ended = self._held.ended(name)
        last = max(there.state.version if there else 0, version)
        gone = before is not None and not before.deleted and last <= ended > version
        if gone and not (there and there.state.deleted):
            # Redis read the record from the older SQL, and may have written to it since.
            self.done.deleted.append(name)
            self._note["deleted"] = True
            self.done.stale.append(name)
            if newer is None and before is not None:
                newer = _tombstone(before, ended, self._held.deleted[name])
        else:
            gone = False
        every = self._held.entries.get(name, ())
        entries = [entry for entry in every if entry.version > version]
        self.beside += [entry for entry in every if ended < entry.version <= version]
        carried = self._follow(name, version, before, entries, newer)
        if carried and newer is not None:
            if gone and not newer.state.deleted:
                end = _tombstone(newer.state, ended + 1, self._held.deleted[name])
                self._change(name, end, newer.state.fields, carried, [])
            elif not newer.state.deleted:
                self._leave_out(name, newer, carried)
        self.carried += carried

    def _follow(
        self, name: str, version: int, before: State | None, entries: list[JournalEntry], newer: Loaded | None
    ) -> list[JournalEntry]:
        """The entries that lead from SQL's version to that of Redis: those of the journal, or one change."""
        last = entries[-1].version if entries else version
        continues = [entry.version for entry in entries] == [*range(version + 1, last + 1)]
        if continues and (newer is None or newer.state.version == last):
            self.done.commits += len(entries)
            begun = unpack(entries[0].data) if entries and not version else []
            self._inherit(name, {op.name: op.value for op in begun if op.kind == b"s"})
            return entries
        ended = self._held.ended(name)
        if newer is None:
            self.beside += [entry for entry in entries if entry.version > ended]
            return []
        # The newest entry of this version: an older one may have the same version, if Redis hydrated the record from
        # SQL since.
        same = next((entry for entry in reversed(entries) if entry.version == newer.state.version), None)
        line = commits_of(newer.state.version, entries)
        aside = [entry for entry in entries if entry is not same and any(entry is each for each in line)]
        others = [entry for entry in entries if not any(entry is each for each in line)]
        self.aside += aside
        self.beside += [entry for entry in others if entry.version > ended]
        self.done.records += 1
        self.whole[name] = newer.state.version
        self._inherit(name, newer.state.fields if not version else {})
        self._note |= {"version": newer.state.version, "aside": len(aside)}
        carried: list[JournalEntry] = []
        known = version if before else 0
        items, missing = item_operations(self._held.items.get(name), known, newer, entries)
        if missing:
            self.done.lost_items.append(name)
            self._note["items"] = True
        runs = message_ranges.segments(name, newer.state.fields)
        kept = self._kept_of(name, runs) if before else set()
        sources = {number: run.source for run in runs for number in range(run.start, run.stop)}
        first = _next(before) if before else 0
        messages = {
            number: data
            for number, data in newer.messages
            if number >= first or (number in sources and not kept & {(name, number), (sources[number], number)})
        }
        operations = [*items, *((b"m", b"%d" % number, data) for number, data in messages.items())]
        newer = replace(newer, state=layered(newer.state, known))
        self._change(name, newer, before.fields if before else {}, carried, operations, same)
        return carried

    def _inherit(self, name: str, fields: Mapping[bytes, bytes]) -> None:
        """Note which items are inherited by a record that begins with these fields."""
        if place := inherited_items(fields):
            self.forks[name] = place

    def _change(
        self,
        name: str,
        whole: Loaded,
        old: Mapping[bytes, bytes],
        carried: list[JournalEntry],
        lacking: Sequence[Operation],
        same: JournalEntry | None = None,
    ) -> None:
        """Add the entry that leads from these fields to those of a state, with messages and items that SQL lacks."""
        version = whole.state.version
        fields = whole.state.fields
        operations: list[Operation] = [(b"c", b"", b"")] if old else []
        operations += [(b"d", each, b"") for each in old if each[:1] == b"#" and each not in fields]
        operations += lacking
        # Without `#parent`: the record would be taken for a new fork, and erased if its source was.
        operations += [
            (b"s", each, value) for each, value in fields.items() if each != PARENT or old.get(each) != value
        ]
        operations += [op for op in unpack(same.data) if op.kind == b"l"] if same else []
        carried.append(self._entry(name, version, operations, fields, whole.time_ms, carried, same))

    def _leave_out(self, name: str, newer: Loaded, carried: list[JournalEntry]) -> None:
        """Add a change that hides messages of the record that neither SQL nor Redis has."""
        fields = newer.state.fields
        runs = message_ranges.segments(name, fields)
        here = {number for number, _ in newer.messages}
        here.update(int(op.name) for entry in carried for op in unpack(entry.data) if op.kind == b"m")
        lacking = [
            Segment(run.source, number, number + 1)
            for run in runs
            for number in range(run.start, run.stop)
            if number not in here
        ]
        kept = self._kept_of(name, runs) if lacking else set()
        lacking = [each for each in lacking if not kept & {(name, each.start), (each.source, each.start)}]
        # The fork's source may leave Redis before it is repaired: it is in another partition, or this repair is
        # interrupted.
        borrowed = self._borrowed(name, lacking)
        if borrowed:
            self.borrowed[name] = borrowed
        lost = [each for each in lacking if each.start not in borrowed]
        if lost:
            gaps = message_ranges.joined(lost)
            self.done.lost += [replace(each, source=name) for each in gaps]
            self.done.stale.append(name)
            shown = message_ranges.shown(message_ranges.without(runs, gaps), fields)
            version = newer.state.version + 1
            self._note |= {"version": version, "lost": [[each.start, each.stop - 1] for each in gaps]}
            operations: list[Operation] = [(b"s", each, value) for each, value in shown.items()]
            carried.append(self._entry(name, version, operations, fields, newer.time_ms, carried, None))

    def _borrowed(self, name: str, lacking: Sequence[Segment]) -> dict[int, bytes]:
        """Those of these messages that Redis has in the records from which this one was forked."""
        until_ms = self.begun_ms(name)
        found = {each.start: self._held.elsewhere.get(each.source, {}).get(each.start) for each in lacking}
        return {number: data for number, data in found.items() if data is not None and _written_ms(data) <= until_ms}

    def _entry(
        self,
        name: str,
        version: int,
        operations: list[Operation],
        fields: Mapping[bytes, bytes],
        time_ms: int,
        carried: Sequence[JournalEntry],
        same: JournalEntry | None,
    ) -> JournalEntry:
        """A change made by the repair, after the `carried` ones of the record, or in the place of `same`."""
        # After those, because entries are taken by offset: otherwise SQL's head would stay at an older version.
        behind = max([self._held.archived, *(entry.offset for entry in carried)])
        return JournalEntry(
            offset=same.offset if same else behind,
            event=same.event if same else _event(self._held, version),
            record=name,
            version=version,
            time_ms=same.time_ms if same else time_ms or self._now_ms,
            kind=same.kind if same and same.kind in (ERASE, FORGET) else REPAIR,
            actor=same.actor if same else "",
            token=same.token if same else 0,
            data=pack(operations),
            total_bytes=0,
            next_message=int(fields.get(NEXT, b"0")),
        )


def _next(state: State) -> int:
    return int(state.fields.get(NEXT, b"0"))


def _tombstone(state: State, version: int, end: Happened) -> Loaded:
    """The tombstone of a record that was deleted or erased, or expired, made from its last state."""
    expired = end.type == "session.expired"
    deleted = Expiry(codec.decode(end.data)["reason"], end.time_ms / 1000).stored if expired else b"1"
    kept = {name: value for name, value in state.fields.items() if name in (OWNER, NEXT)}
    # Otherwise a record that begins again under its name would show the old items.
    kept |= {ITEMS: b"%d 0" % version} if ITEMS in state.fields else {}
    return Loaded(State(state.epoch, version, {**kept, DELETED: deleted, START: state.fields.get(NEXT, b"0")}), [])


def add_events(sql: Sql, happened: Sequence[Happened], *, keep: bool) -> int:
    """Add a partition's events that SQL lacks; return how many. `keep`: only count them."""
    if not happened:
        return 0
    c = events.c
    oldest = min(each.time_ms for each in happened)
    here = and_(c.namespace == sql.namespace, c.partition == happened[0].partition, c.time_ms >= oldest)
    # Also compared by id: if a stream continued from one epoch to the next, SQL may have some events under the first.
    known = sql.execute(select(c.id, c.epoch, c.offset).where(here)).all()
    ids = {row.id for row in known}
    places = {(row.epoch, row.offset) for row in known}
    lacking = [each for each in happened if each.id not in ids and (each.epoch, each.offset) not in places]
    if not keep:
        rows = [
            (sql.namespace, *place, e.id, e.type, e.subject, e.time_ms, e.actor, e.version, e.data)
            for e in lacking
            for place in [(e.partition, e.epoch, e.offset)]
        ]
        sql.add(events, rows)
    return len(lacking)


# Items of a record whose whole state comes from Redis. Possible losses are reported: Redis has all unarchived items,
# but only the newest of the archived ones; the journal may have more.


def item_operations(
    kept: KeptItems | None, known: int, newer: Loaded, entries: Sequence[JournalEntry]
) -> tuple[list[Operation], bool]:
    """The operations on items since the version that SQL knows, and whether some may be lost."""
    since, below = _layer(newer.state)
    if newer.state.deleted or not since:
        return [], False
    kept = kept or KeptItems({}, newer.state.version)
    found: dict[bytes, bytes] = {}
    reached = known
    for entry in commits_of(newer.state.version, entries):
        reached += entry.version == reached + 1
        if entry.version >= since:
            found |= {op.name: op.value for op in unpack(entry.data) if op.kind in (b"p", b"q")}
    # The items in Redis have the state at the end of the journal.
    found |= {item: frame for item, (at, frame) in kept.items.items() if known < at <= newer.state.version}
    missing = kept.missing > reached or since > known < below
    return [(b"p" if frame else b"q", item, frame) for item, frame in sorted(found.items())], missing


def inherited_items(fields: Mapping[bytes, bytes]) -> tuple[str, int] | None:
    """The record whose items a fork with these fields shows, and as of which version; None if there is none."""
    if PARENT not in fields or fields.get(ITEMS) != b"1":
        return None
    source, _, version = fields[PARENT].decode().rpartition("@")
    return source, int(version)


def commits_of(version: int, entries: Sequence[JournalEntry]) -> list[JournalEntry]:
    """The entries that led to a version. If hydration from the older SQL made a version twice, the last one counts."""
    line: list[JournalEntry] = []
    for entry in reversed(entries):
        if entry.version < (line[-1].version if line else version + 1):
            line.append(entry)
    return line[::-1]


def layered(state: State, known: int) -> State:
    """The fields of a whole state: a layer that began after the version known to SQL begins with this state instead."""
    since, separator, below = state.fields.get(ITEMS, b"").partition(b" ")
    if int(since or b"0") <= known:
        return state
    return replace(state, fields={**state.fields, ITEMS: b"%d" % state.version + separator + below})


def _layer(state: State) -> tuple[int, int]:
    """The version at which a state's own layer of items began, and the version whose items lie below; 0: none."""
    since, _, below = state.fields.get(ITEMS, b"").partition(b" ")
    return int(since or b"0"), int(below or b"0")
