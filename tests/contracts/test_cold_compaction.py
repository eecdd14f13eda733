"""Packed blocks are read as they were. Law: a second store that is never packed says what each read should give."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from distributed_state.cold import blocks, maintenance, tables
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Compacted, Wanted
from distributed_state.errors import CorruptState, NotFound
from distributed_state.values import message_ranges
from distributed_state.values.journal import Segment, State
from distributed_state.values.model import RESTORED, SEGMENTS
from tests.journals import Journal, put, rows, statements

Opener = Callable[..., ColdStore]

LATER = 10**12
RECORDS = ("session:a", "session:b", "session:c", "session:d")


class Both:
    """Two journals to which the same is written; `packed` is compacted now and then, `plain` is not."""

    def __init__(self, plain: ColdStore, packed: ColdStore) -> None:
        self.plain = Journal(plain)
        self.packed = Journal(packed)

    def each(self, act: Any) -> None:
        act(self.plain)
        act(self.packed)

    def write(self, chance: random.Random) -> None:
        """One random commit, or a fork, a rollback, a deletion, a record that begins again."""
        record = chance.choice(RECORDS)
        kind = chance.random()
        value = "x" * chance.choice((1, 5, 200, 30_000 if kind < 0.3 else 50))
        known = self.plain.states.get(record)
        if known is None and kind < 0.3 and self.plain.states:
            source = chance.choice(sorted(self.plain.states))
            self.each(lambda journal: journal.fork(source, record))
        elif kind < 0.05 and known is not None:
            self.each(lambda journal: journal.delete(record))
        elif kind < 0.15 and known is not None:
            version = chance.randint(1, known.version)
            self.each(lambda journal: roll_back(journal, record, version))
        elif kind < 0.25:
            label = (b"l", b"label", b"at %d" % chance.randint(0, 99))
            self.each(lambda journal: journal.commit(record, label, kind="checkpoint"))
        else:
            field, messages = f"field {chance.randint(0, 5)}", chance.randint(0, 3)
            self.each(lambda journal: journal.commit(record, put(field, value), messages=messages))
        if chance.random() < 0.3:
            self.each(lambda journal: journal.flush())


def roll_back(journal: Journal, record: str, version: int) -> None:
    """What a rollback commits: the fields of before, and which messages it shows."""
    fields = journal.past[record, version]
    kept = [(b"s", name, value) for name, value in fields.items() if not name.startswith(b"#")]
    shows = (b"s", SEGMENTS, message_ranges.close(record, fields))
    journal.commit(record, (b"c", b"", b""), *kept, shows, (b"s", RESTORED, b"%d" % version), kind="rollback")


def compact(store: ColdStore, before_ms: int = LATER) -> Compacted:
    done, after = store.compact(before_ms)
    while after is not None:
        more, after = store.compact(before_ms, after=after)
        done += more
    return done


def answer(ask: Callable[..., Any], *asked: Any) -> Any:
    try:
        return ask(*asked)
    except NotFound as error:
        return str(error)


def everything(journal: Journal, chance: random.Random) -> list[Any]:
    """What can be read of all records, without what differs between any two archives: epochs and keys."""
    store = journal.store
    listed = store.listing(Wanted("session", 99, deleted=True))
    found: list[Any] = [[replace(row, cursor="") for row in listed]]
    for record in RECORDS:
        last = store.version(record) or 0
        loaded = store.load(record, window=chance.randint(1, 30))
        found.append(loaded and (loaded.state.version, loaded.state.fields, loaded.messages, loaded.time_ms))
        for version in sorted(chance.sample(range(last + 2), min(last + 2, 6))):
            state = answer(store.state_at, record, version)
            found.append(getattr(state, "fields", state))
            found.append(answer(store.step_back, record, version, chance.randint(1, last + 1)))
            if isinstance(state, State):
                runs = message_ranges.segments(record, state.fields)
                found.append(sorted(store.messages(record, runs).items()))
                found.append(store.since(record, runs, journal.now - chance.randint(0, 60)))
        after, limit = chance.randint(0, last + 1), chance.randint(1, 12)
        for bounds in ({}, {"after": after}, {"before": after}, {"after": after, "limit": limit}, {"limit": limit}):
            found.append(store.history(record, **bounds))
        found.append(store.checkpoints(record))
        found.append(answer(store.oldest, record))
        found += [answer(store.applied, record, event, journal.now) for event in ("nobody's", f"e{journal.now}")]
    return found


@pytest.fixture
def both(url: str, opened: Opener) -> Both:
    return Both(opened(url, snapshot_every=10), opened(url, snapshot_every=10))


WIDE = [pytest.param(n, 4, marks=pytest.mark.wide) for n in range(3)]
FULL = [pytest.param(n, 4, marks=pytest.mark.full) for n in range(3, 8)]


@pytest.mark.parametrize(("seed", "rounds"), [(0, 2), *WIDE, *FULL])
def test_random_histories_read_the_same_packed_and_not(both: Both, seed: int, rounds: int, monkeypatch: Any) -> None:
    """Written on, packed again and again up to any time, in blocks of any size, and purged."""
    chance = random.Random(seed)
    monkeypatch.setattr(blocks, "RAW_BYTES", chance.choice((300, 2_000, 65_536)))
    monkeypatch.setattr(maintenance, "_ROWS", chance.choice((3, 10, 1000)))
    monkeypatch.setattr(maintenance, "_LEAST", chance.choice((1, 4)))
    packed = 0
    for _ in range(rounds):
        for _ in range(chance.randint(5, 20)):
            both.write(chance)
        both.each(lambda journal: journal.flush())
        if chance.random() < 0.2:
            both.each(lambda journal: journal.renew())
        packed += compact(both.packed.store, both.packed.now - chance.randint(-5, 30)).changes
        if chance.random() < 0.4:
            cutoff = both.packed.now - chance.randint(0, 60)
            keep = chance.choice((None, None, 5, 30))
            assert both.packed.store.purge(cutoff, keep=keep) == both.plain.store.purge(cutoff, keep=keep)
        question = chance.random()
        assert everything(both.packed, random.Random(question)) == everything(both.plain, random.Random(question))
    assert packed


def test_a_block_that_says_something_else_is_noticed(both: Both, monkeypatch: Any) -> None:
    """Without the law of blocks, the comparison above fails."""
    pack = blocks.CHANGES.pack
    broken = blocks.CHANGES._replace(pack=lambda some: pack(list(some)[:-1]))
    monkeypatch.setattr(blocks, "CHANGES", broken)
    for _ in range(20):
        both.each(lambda journal: journal.commit("session:a", put("k", "1"), messages=1))
    both.each(lambda journal: journal.flush())
    compact(both.packed.store)
    assert everything(both.packed, random.Random(1)) != everything(both.plain, random.Random(1))


def fill(journal: Journal, record: str = "session:a", commits: int = 20) -> None:
    for number in range(commits):
        journal.commit(record, put("k", f"{number}" * 50), messages=1)
    journal.flush()


def of_its_blocks(journal: Journal) -> Any:
    """Those of change_blocks that are this test's: others have the same database."""
    return tables.change_blocks.c.record.in_({row.record for row in rows(journal.store, tables.change_blocks)})


def test_rows_move_into_blocks_but_for_the_newest_and_those_with_labels(journal: Journal) -> None:
    """By the newest it is told how far a record is archived, by labels checkpoints are found."""
    fill(journal, commits=10)
    journal.commit("session:a", (b"l", b"label", b"here"), messages=1)
    fill(journal, commits=10)
    before = rows(journal.store, tables.changes)
    done = compact(journal.store)
    assert (done.records, done.changes, done.messages) == (1, 19, 20)
    assert sorted(row.version for row in rows(journal.store, tables.changes)) == [11, 21]
    assert [row.version for row in rows(journal.store, tables.messages)] == [21]
    (block,) = rows(journal.store, tables.change_blocks)
    assert (block.first, block.last) == (1, 20)
    assert len(block.data) < sum(len(row.data) + len(row.event) + len(row.epoch) for row in before) / 2
    assert compact(journal.store).changes == 0


def test_what_is_new_stays_a_row(journal: Journal) -> None:
    """Also what follows it and seems older, as the server's clock was set back."""
    fill(journal, commits=8)
    cut = journal.now + 1
    journal.commit("session:a", put("k", "new"))
    journal.commit("session:a", put("k", "clock set back"), time_ms=5)
    fill(journal, commits=3)
    compact(journal.store, cut)
    assert [row.version for row in rows(journal.store, tables.changes)] == [9, 10, 11, 12, 13]


def test_a_long_conversation_is_packed_in_many_transactions_and_read_in_few_blocks(
    journal: Journal, monkeypatch: Any
) -> None:
    """A page of its history opens the blocks that it needs, and not the others."""
    for _ in range(6):
        fill(journal, commits=100)
    monkeypatch.setattr(blocks, "RAW_BYTES", 4_000)
    monkeypatch.setattr(maintenance, "_ROWS", 300)
    sent = statements(journal.store)
    assert compact(journal.store).changes == 599
    assert len([each for each in sent if each.startswith("DELETE FROM changes")]) >= 2
    there = len(rows(journal.store, tables.change_blocks))
    assert there > 10
    opened: list[int] = []
    unpack = blocks.unpack_changes
    monkeypatch.setattr(blocks, "unpack_changes", lambda data: opened.append(1) or unpack(data))
    assert [entry.version for entry in journal.store.history("session:a", after=290, limit=10)] == [*range(291, 301)]
    assert 1 <= len(opened) <= 2
    opened.clear()
    assert journal.store.step_back("session:a", 300, 5) == 295
    assert 1 <= len(opened) <= 3
    opened.clear()
    assert journal.store.state_at("session:a", 303).version == 303
    assert 1 <= len(opened) <= 2
    sent = statements(journal.store)
    assert len(journal.store.messages("session:a", [Segment("session:a", 210, 230)])) == 20
    assert len([each for each in sent if each.startswith("SELECT")]) == 2  # the record's number, and the messages


def test_blocks_that_are_not_full_are_filled_up(journal: Journal) -> None:
    """Packed every day, a conversation of a few commits a day is still in one block."""
    for _ in range(10):
        fill(journal, commits=8)
        compact(journal.store)
    assert len(rows(journal.store, tables.change_blocks)) == 1
    assert len(rows(journal.store, tables.message_blocks)) == 1


def test_what_was_put_back_is_packed_in_order_again(journal: Journal) -> None:
    fill(journal, commits=30)
    before = journal.store.history("session:a")
    compact(journal.store)
    its_own = of_its_blocks(journal)
    with journal.store.database.write() as sql:
        blocks.expand_some(sql, blocks.CHANGES, its_own)
    for _ in range(3):
        compact(journal.store)
        assert journal.store.history("session:a") == before
    assert len(rows(journal.store, tables.changes)) == 1
    assert len(rows(journal.store, tables.message_blocks)) == 1


def test_a_life_that_replaces_packed_versions_sets_them_aside_whole(journal: Journal) -> None:
    fill(journal, commits=12)
    before = journal.store.history("session:a")
    compact(journal.store)
    journal.renew()
    journal.states["session:a"] = replace(journal.states["session:a"], version=5, fields=journal.past["session:a", 5])
    journal.commit("session:a", put("k", "another record"), messages=1)
    journal.flush()
    assert [entry.version for entry in journal.store.history("session:a")] == [1, 2, 3, 4, 5, 6]
    aside = {entry.version: entry.data for entry in journal.store.quarantined()}
    assert aside == {entry.version: entry.data for entry in before[5:]}


def test_packed_commits_are_known_by_their_events(journal: Journal) -> None:
    """So a writer that remembers one does not think that it was lost."""
    fill(journal, commits=12)
    entries = journal.store.history("session:a")
    stranger = replace(entries[4], event="e.of.another.history")
    compact(journal.store)
    found = journal.store.known(0, journal.epoch, [*entries, stranger])
    assert found.lacking == {stranger.event}
    assert journal.store.branches.keep(0, journal.epoch, entries, "test") == []
    (kept,) = journal.store.branches.keep(0, journal.epoch, [stranger], "test")
    assert (kept.first, kept.commits) == (5, 1)
    (branch,) = journal.store.branches.of("session:a")
    assert branch.base == 4


def test_erasing_takes_the_blocks_and_hands_forks_what_they_show(journal: Journal) -> None:
    fill(journal, commits=12)
    journal.fork("session:a", "session:b")
    journal.flush()
    before = journal.store.load("session:b", window=99)
    compact(journal.store)
    (noted,) = journal.store.request("session:a")
    journal.store.erase([noted.record])
    for table in tables.OF_A_RECORD:
        assert rows(journal.store, table, record="session:a") == []
    with journal.store.database.read() as connection:
        left = connection.execute(tables.change_blocks.select()).all()
    assert not [block for block in left if b"session:a" in block.data]
    assert journal.store.load("session:b", window=99) == before


def test_values_in_blocks_are_encrypted_anew(journal: Journal) -> None:
    fill(journal, commits=12)
    count = journal.store.rewrite("session:a", lambda source, name, data: data[::-1], keep=True)
    compact(journal.store)
    before = journal.store.history("session:a")
    assert journal.store.rewrite("session:a", lambda source, name, data: data[::-1], keep=True) == count
    assert journal.store.history("session:a") == before
    assert journal.store.rewrite("session:a", lambda source, name, data: data[::-1], keep=False) == count
    after = journal.store.history("session:a")
    assert [entry.data for entry in after] != [entry.data for entry in before]
    journal.store.rewrite("session:a", lambda source, name, data: data[::-1], keep=False)
    assert journal.store.history("session:a") == before


def test_a_damaged_block_is_named(journal: Journal) -> None:
    fill(journal, commits=12)
    compact(journal.store)
    its_own = of_its_blocks(journal)
    with journal.store.database.write() as connection:
        connection.execute(tables.change_blocks.update().where(its_own).values(data=b"no block"))
    with pytest.raises(CorruptState, match="a block of 8 bytes cannot be read"):
        journal.store.history("session:a")


@pytest.mark.wide
@pytest.mark.memory
def test_compaction_beside_an_archiver_and_readers_loses_nothing(cold: ColdStore, monkeypatch: Any) -> None:
    """Readers see each history without a gap at every moment."""
    monkeypatch.setattr(maintenance, "_LEAST", 1)
    journal = Journal(cold)
    fill(journal)
    stop = threading.Event()
    broken: list[Any] = []

    def pack() -> None:
        while not stop.is_set():
            compact(cold)

    def read() -> None:
        while not stop.is_set():
            versions = [entry.version for entry in cold.history("session:a")]
            loaded = cold.load("session:a", window=10_000)
            if versions != [*range(1, len(versions) + 1)] or loaded is None or len(loaded.messages) < len(versions):
                broken.append(versions)

    threads = [threading.Thread(target=pack), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        fill(journal, commits=5)
    stop.set()
    for thread in threads:
        thread.join()
    assert not broken
    assert [entry.version for entry in cold.history("session:a")] == [*range(1, 321)]
    assert rows(cold, tables.change_blocks)
