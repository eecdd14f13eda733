"""Which messages SQL keeps for later states and forks. Law: what the state before showed is not noted, none is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from distributed_state.cold import archive, tables
from distributed_state.cold.engine import Row, Sql
from distributed_state.cold.record_index import Parsed
from distributed_state.cold.store import ColdStore
from distributed_state.values import message_ranges
from distributed_state.values.journal import JournalEntry, State, pack, unpack
from distributed_state.values.model import DELETED, ITEMS, NEXT, PARENT, RESTORED, SEGMENTS
from tests.journals import Journal, Step, rows

Opener = Callable[..., ColdStore]

LATER = 10**12
RECORDS = tuple(f"session:{name}" for name in "abcdef")
Rule = Callable[[Sql, Sequence[Parsed]], list[Row]]
_the_rule: Rule = archive._shown_again


def every_run(sql: Sql, changes: Sequence[Parsed]) -> list[Row]:
    """The plainest rule: a row for each run of each `#segments`, whatever the states before showed."""
    of_each = ((item.entry.record, item.entry.version, run) for item in changes for run in item.runs)
    return [*{(sql.namespace, run.source, name, version, run.start, run.stop) for name, version, run in of_each}]


def no_row_twice(sql: Sql, changes: Sequence[Parsed]) -> list[Row]:
    """A rule that is wrong: what is noted already is not noted again, though a state hid it since."""
    noted = {tuple(row[:3]) + tuple(row[4:]) for row in sql.execute(tables.shares.select())}
    found = []
    for row in every_run(sql, changes):
        if (mark := row[:3] + row[4:]) not in noted:
            noted.add(mark)
            found.append(row)
    return found


@dataclass
class Conversations:
    """Records of one archive, to which a seeded chance writes, and what each version of each of them shows."""

    journal: Journal
    chance: random.Random
    texts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    shows: dict[tuple[str, int], list[bytes]] = field(default_factory=dict)
    entries: dict[tuple[str, int], JournalEntry] = field(default_factory=dict)
    forked: dict[str, int] = field(default_factory=dict)  # from which version on, at the latest

    def commit(self, record: str, *steps: Step, messages: int = 0) -> None:
        state = self.journal.states.get(record)
        first = int(state.fields.get(NEXT, b"0")) if state else 0
        if state and state.deleted:
            steps = ((b"d", DELETED, b""), *steps)
        said = [
            (b"m", b"%d" % n, b"%s said %d at %d" % (record.encode(), n, self.journal.now))
            for n in range(first, first + messages)
        ]
        entry = self.journal.commit(record, *steps, *said)
        self.texts.setdefault(record, {}).update({int(number): text for _, number, text in said})
        self.entries[record, entry.version] = entry
        self.note(record)

    def note(self, record: str) -> None:
        state = self.journal.states[record]
        numbers = (n for run in message_ranges.segments(record, state.fields) for n in range(run.start, run.stop))
        self.shows[record, state.version] = [self.texts[record][n] for n in numbers]

    def write(self) -> None:
        record = self.chance.choice(RECORDS)
        state = self.journal.states.get(record)
        runs = message_ranges.segments(record, state.fields) if state else []
        if state is None or not state.fields or not runs:
            acts: list[Callable[..., None]] = [self.append, self.append, self.start_as_fork, self.adopt]
        else:
            acts = [self.append, self.append, self.take_back, self.take_back, self.take_back, self.roll_back]
            acts += [self.roll_back, self.fork, *([self.clear, self.delete] if self.chance.random() < 0.3 else [])]
        self.chance.choice(acts)(record)

    def append(self, record: str) -> None:
        self.commit(record, messages=self.chance.randint(1, 4))

    def take_back(self, record: str) -> None:
        """The last message, or a suffix that others stand in for, or the oldest ones, as retention does."""
        fields = self.journal.states[record].fields
        runs = message_ranges.segments(record, fields)
        count = message_ranges.count(runs)
        left = self.chance.choice((count - 1, count - 1, self.chance.randint(0, count)))
        kept = message_ranges.part(runs, 0, left)
        if self.chance.random() < 0.15:
            kept = message_ranges.last(runs, left)
        steps = [(b"s", name, value) for name, value in message_ranges.shown(kept, fields).items()]
        self.commit(record, *steps, messages=self.chance.choice((0, 0, 2)))

    def clear(self, record: str) -> None:
        self.journal.wipe(record)
        self.note(record)

    def delete(self, record: str) -> None:
        self.journal.delete(record)
        self.note(record)

    def roll_back(self, record: str) -> None:
        """To a version that is kept; without a flush the newest ones are in the batch that archives this, too."""
        oldest = self.oldest(record)
        if not oldest:
            return
        version = self.chance.randint(oldest, self.journal.states[record].version)
        past = self.journal.past[record, version]
        if DELETED in past:
            return
        ended = self.journal.states[record].fields.get(NEXT, b"0")
        steps = [(b"w", b"", ended), (b"s", SEGMENTS, message_ranges.close(record, past))]
        self.commit(record, *steps, (b"s", RESTORED, b"%d" % version))

    def oldest(self, record: str) -> int:
        """The oldest version that the archive has of what the record is now, 0 if nothing of it is archived."""
        known = self.journal.store.version(record)
        kept = self.journal.store.oldest(record) if known else 0
        return kept if kept and (record, kept) in self.shows else 0

    def fork(self, record: str) -> None:
        new = self.chance.choice(RECORDS)
        oldest = self.oldest(record)
        if new in self.journal.states or not oldest:
            return
        version = self.chance.randint(oldest, self.journal.states[record].version)
        if DELETED in self.journal.past[record, version]:
            return
        self.journal.fork(record, new, version)
        self.texts[new] = dict(self.texts[record])
        self.forked[record] = max(version, self.forked.get(record, 0))
        self.note(new)

    def start_as_fork(self, record: str) -> None:
        sources = [each for each, state in self.journal.states.items() if state.fields and each != record]
        if record not in self.journal.states and sources:
            self.journal.flush()
            source = self.chance.choice(sorted(sources))
            oldest = self.oldest(source)
            if oldest and DELETED not in self.journal.past[source, oldest]:
                self.journal.fork(source, record, oldest)
                self.texts[record] = dict(self.texts[source])
                self.forked[source] = max(oldest, self.forked.get(source, 0))
                self.note(record)

    def adopt(self, record: str) -> None:
        """Import what is exported of another record: a state, and the changes after it; all messages become its own."""
        if record in self.journal.states or self.journal.store.version(record):
            return
        self.journal.flush()
        for source, state in sorted(self.journal.states.items()):
            first = self.oldest(source) if state.fields else 0
            entries = [self.entries.get((source, n)) for n in range(first + 1, state.version + 1)]
            if first and all(entries) and DELETED not in self.journal.past[source, first]:
                self._adopt(source, record, first, [each for each in entries if each])
                return

    def _adopt(self, source: str, record: str, first: int, entries: list[JournalEntry]) -> None:
        def taken(fields: dict[bytes, bytes]) -> dict[bytes, bytes]:
            fields = {name: value for name, value in fields.items() if name not in (PARENT, ITEMS)}
            if SEGMENTS in fields:
                fields[SEGMENTS] = message_ranges.taken_over(fields[SEGMENTS], record)
            return fields

        epoch, fields = self.journal.epoch, taken(self.journal.past[source, first])
        said = [(n, text) for n, text in self.texts[source].items() if n < int(fields.get(NEXT, b"0"))]
        steps = [
            [(kind, name, message_ranges.taken_over(value, record) if name == SEGMENTS else value)
             for kind, name, value in unpack(entry.data)]
            for entry in entries
        ]  # fmt: skip
        changes = [replace(entry, record=record, data=pack(each)) for entry, each in zip(entries, steps, strict=True)]
        base = State(epoch, first, fields)
        imported = {"base": base, "base_messages": said, "entries": changes}
        self.journal.store.adopt(record, partition=0, epoch=epoch, **imported)  # type: ignore[arg-type]
        self.texts[record] = dict(self.texts[source])
        for version in range(first, first + len(entries) + 1):
            past = taken(self.journal.past[source, version])
            self.journal.past[record, version] = past
            self.journal.states[record] = State(epoch, version, past)
            self.note(record)

    def lose(self) -> None:
        """Redis goes on from before commits that SQL has of some records, of which none was forked since."""
        self.journal.renew()
        for record, state in sorted(self.journal.states.items()):
            oldest = self.oldest(record) if state.fields else 0
            version = max(oldest, self.forked.get(record, 0), state.version - self.chance.randint(0, 3))
            if oldest and version < state.version:
                fields = self.journal.past[record, version]
                self.journal.states[record] = State(self.journal.epoch, version, fields)
                for gone in range(version + 1, state.version + 1):
                    self.shows.pop((record, gone), None)
                self.commit(record, (b"s", b"k", b"1"), messages=1)
        self.journal.flush()

    def erase(self) -> None:
        record = self.chance.choice(RECORDS)
        self.journal.store.erase([record])
        self.forked.pop(record, None)
        for known in [each for each in self.shows if each[0] == record]:
            del self.shows[known]
            self.entries.pop(known, None)
        if state := self.journal.states.pop(record, None):
            self.texts[record] = {}
            self.journal.states[record] = State(self.journal.epoch, state.version, {})  # versions are not used twice

    def tend(self) -> Any:
        """Archive what was written, and erase, purge or compact; what that says it did."""
        self.journal.flush()
        kind = self.chance.random()
        cutoff, keep = self.journal.now - self.chance.randint(0, 40), self.chance.choice((None, None, 1, 4))
        if kind < 0.15:
            return self.lose()
        if kind < 0.35:
            return self.erase()
        if kind < 0.85:
            done = self.journal.store.purge(cutoff, keep=keep)
            for record in [each for each, state in self.journal.states.items() if state.deleted]:
                # Of one that was deleted long ago nothing is left: what is written next begins with this.
                self.journal.states[record] = self.journal.store.state_at(record, self.journal.states[record].version)
            return done
        return self.journal.store.compact(cutoff)

    def lost(self) -> list[tuple[str, int]]:
        """The versions of which the archive does not show each message that they showed."""
        found = []
        store = self.journal.store
        for record in RECORDS:
            for version in range(self.oldest(record) or LATER, (store.version(record) or 0) + 1):
                fields = store.state_at(record, version).fields
                parent = fields.get(PARENT, b"").decode().rpartition("@")[0] or None
                runs = message_ranges.segments(record, fields)
                kept = store.messages(record, runs, parent)
                if [kept.get(n) for run in runs for n in range(run.start, run.stop)] != self.shows[record, version]:
                    found.append((record, version))
        return found

    def stored(self) -> Any:
        """All messages that the archive keeps, in rows and in blocks, by their records."""
        kept = (tables.messages, tables.message_blocks)
        return {record: [sorted(row[1:] for row in rows(self.journal.store, each, record=record)) for each in kept]
                for record in RECORDS}  # fmt: skip


def under_both(url: str, opened: Opener, seed: int, monkeypatch: Any, rule: Rule = _the_rule) -> list[Conversations]:
    """Two archives to which the same is written, under a rule and under the plainest."""
    both = [Conversations(Journal(opened(url, snapshot_every=10)), random.Random(seed)) for _ in range(2)]
    plain = both[1].journal.store.namespace

    def chosen(sql: Sql, changes: Sequence[Parsed]) -> list[Row]:
        return (every_run if sql.namespace == plain else rule)(sql, changes)

    monkeypatch.setattr(archive, "_shown_again", chosen)
    return both


def live(both: list[Conversations], rounds: int = 8) -> list[str]:
    """Write to both and tend them; where they differ, or have lost something."""
    for number in range(rounds):
        for _ in range(both[0].chance.randint(3, 12)):
            both[1].chance.setstate(both[0].chance.getstate())
            for each in both:
                each.write()
        both[1].chance.setstate(both[0].chance.getstate())
        did = [each.tend() for each in both]
        lost = both[0].lost()
        found = [f"round {number}: {lost} lost"] if lost else []
        found += [f"round {number}: {did}"] if did[0] != did[1] else []
        found += [f"round {number}: other messages are kept"] if both[0].stored() != both[1].stored() else []
        if found:
            return found
    return []


@pytest.mark.parametrize("seed", [8, *(pytest.param(n, marks=pytest.mark.wide) for n in (1, 9, 10))])
def test_what_is_noted_keeps_the_same_messages_as_if_every_run_were_noted(
    url: str, opened: Opener, seed: int, monkeypatch: Any
) -> None:
    """However states are written, rolled back, forked, purged, erased, packed, lost and imported."""
    both = under_both(url, opened, seed, monkeypatch)
    assert live(both) == []
    count = [len(rows(each.journal.store, tables.shares)) for each in both]
    assert count[0] <= count[1]


def test_a_rule_that_takes_what_is_noted_for_shown_loses_messages(opened: Opener, monkeypatch: Any) -> None:
    """The comparison above finds it: a rollback may show again what a purge of its record removes otherwise."""
    assert live(under_both("memory", opened, 8, monkeypatch, no_row_twice))


def test_a_message_that_is_taken_back_writes_no_row(cold: ColdStore, monkeypatch: Any) -> None:
    """Each of them makes one more run of `#segments`; what is shown was shown before."""
    records = Conversations(Journal(cold), random.Random(0))
    sizes = []
    for rounds in range(1, 25):
        records.commit("session:a", messages=2)
        fields = records.journal.states["session:a"].fields
        runs = message_ranges.segments("session:a", fields)
        kept = message_ranges.part(runs, 0, message_ranges.count(runs) - 1)
        records.commit("session:a", *((b"s", name, data) for name, data in message_ranges.shown(kept, fields).items()))
        if rounds % 8 == 0:
            records.journal.flush()
            sizes.append(len(rows(cold, tables.shares)))
    assert sizes == [0, 0, 0]
    assert len(message_ranges.parse(records.journal.states["session:a"].fields[SEGMENTS])) == 24
    for _ in range(5):
        records.roll_back("session:a")
    records.journal.flush()
    assert records.lost() == []
