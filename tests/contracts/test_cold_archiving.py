"""How changes come into SQL: in order, once, and whatever one of them is.

Law: every test has a namespace of its own, so that they can share a database.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import LargeBinary, update

from distributed_state.cold import archive, erasure, record_index, tables
from distributed_state.cold.engine import Sql
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Batch, Cursor, Wanted
from distributed_state.errors import NotFound
from distributed_state.values.journal import JournalEntry, State, pack, unpack
from distributed_state.values.model import DELETED, NEXT, OWNER, PHASE
from tests.journals import EVERYTHING, Journal, put, rows, shown, statements

Opener = Callable[..., ColdStore]


# Cursors


@pytest.mark.memory
def test_of_two_archivers_with_one_batch_one_wins(cold: ColdStore, journal: Journal) -> None:
    """The cursor moves once, and every row is there once."""
    for round_ in range(10):
        for n in range(20):
            told = f"{round_ * 40 + n + 1} session.phase session:{n}".encode()
            journal.commit(f"session:{n}", put("k", str(round_)), (b"e", told, b"{}"), messages=1)
        for n in range(20, 40):
            journal.tell(b"%d lock.lost client:web" % (round_ * 40 + n + 1))
        batch = journal.batch()
        with ThreadPoolExecutor(4) as pool:
            moved = list(pool.map(cold.archive, [[batch]] * 4))
        assert sorted(map(len, moved)) == [0, 0, 0, 1]
        journal.pending.clear()
    assert len(rows(cold, tables.changes)) == 200
    assert len(rows(cold, tables.messages)) == 200
    assert [row.offset for row in cold.audit(EVERYTHING)] == list(range(1, 401))
    assert cold.quarantined() == []


def test_without_the_compare_and_set_events_would_be_told_twice(
    cold: ColdStore, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: then only the key of the table is left, and what came twice lands in quarantine."""
    monkeypatch.setattr(archive, "_moved", lambda sql, batches: list(batches))
    journal.tell(b"1 lock.lost client:web")
    assert cold.archive([journal.batch()]).keys() == cold.archive([journal.batch()]).keys() == {0}
    assert len(cold.audit(EVERYTHING)) == 1
    assert len(cold.quarantined()) == 1


def test_a_batch_that_does_not_continue_the_cursor_is_left_out(cold: ColdStore, journal: Journal) -> None:
    """The others of the same call are archived."""
    other = Journal(cold, partition=1)
    journal.commit("session:a", put("k", "1"))
    other.commit("session:b", put("k", "1"))
    early = replace(journal.batch(), from_offset=7)
    assert cold.archive([early, other.batch()]).keys() == {1}
    unlike = replace(journal.batch(), from_event="another history's")
    assert cold.archive([unlike]) == {}
    assert cold.version("session:a") is None
    assert cold.version("session:b") == 1


def test_a_mark_moves_the_cursor_and_nothing_else(cold: ColdStore, journal: Journal) -> None:
    """An entry without a record is not a change."""
    journal.pending.append(JournalEntry(1, "m1", "", 0, 5, "mark", "", 0, b"", 0))
    journal.offset = 1
    assert journal.flush() == {0}
    assert cold.cursor(0) == Cursor(0, journal.epoch, 1, 1, "m1")
    assert rows(cold, tables.changes) == rows(cold, tables.events) == []


def test_an_event_written_alone_is_a_row_of_events_and_of_nothing_else(cold: ColdStore, journal: Journal) -> None:
    journal.tell(b"1 note.added a subject with spaces", b'{"a":1}')
    assert journal.flush() == {0}
    (row,) = cold.audit(EVERYTHING)
    assert (row.id, row.type, row.subject, row.version) == ("r.1001.0", "note.added", "a subject with spaces", 0)
    assert (row.time_ms, row.actor, row.data, row.epoch) == (1001, "worker", b'{"a":1}', journal.epoch)
    assert [len(rows(cold, table)) for table in (tables.changes, tables.records, tables.snapshots)] == [0, 0, 0]


def test_events_of_one_change_are_numbered(cold: ColdStore, journal: Journal) -> None:
    """The id says which entry told of it, and which of its events it is."""
    told = [(b"e", b"%d session.phase session:a" % n, b"{}") for n in (1, 2)]
    journal.commit("session:a", put("k", "1"), *told, event="r.7.digest")
    journal.flush()
    assert [(row.id, row.offset, row.version) for row in cold.audit(EVERYTHING)] == [("r.7.0", 1, 1), ("r.7.1", 2, 1)]
    assert cold.state_at("session:a", 1).fields == {b"k": b"1"}


@pytest.mark.memory
def test_minting_is_a_compare_and_set(cold: ColdStore) -> None:
    """Of many who saw the same cursor one gets the next epoch."""
    after = None
    for ordinal in range(1, 6):
        with ThreadPoolExecutor(4) as pool:
            minted = [cursor for cursor in pool.map(lambda _, a=after: cold.mint(3, a), range(4)) if cursor]
        assert [cursor.ordinal for cursor in minted] == [ordinal]
        assert minted[0].epoch.startswith(f"{ordinal}-")
        after = minted[0]
        assert cold.cursor(3) == after
    assert cold.mint(3, None) is None


def test_epochs_that_are_long_over_leave_nothing_behind(cold: ColdStore) -> None:
    """A store that is embedded begins one of each partition with each start."""
    made = [cold.mint(partition, None) for partition in (3, 4)]
    other = made[1]
    after = made[0]
    for _ in range(40):
        after = cold.mint(3, after)
    assert after is not None
    assert after.ordinal == 41
    assert cold.cursors() == {3: after, 4: other}
    assert cold.check()["cursors"] == "18", "of one partition this one and 16 before it, and the other's"
    journal = Journal(cold, partition=4)
    journal.commit("session:a", put("k", "1"))
    journal.flush()
    used = cold.cursor(4)
    for _ in range(40):
        cold.mint(4, cold.cursor(4))
    assert used is not None
    assert cold.last_begun(4, used.epoch) == used, "Redis may still be there: nobody told it of another"
    last = cold.mint(3, after)
    assert cold.last_begun(3, after.epoch) == after
    assert last is not None
    assert cold.last_begun(3, made[0].epoch if made[0] else "") is None


@pytest.mark.memory
def test_a_closed_epoch_archives_nothing_more(cold: ColdStore) -> None:
    """Whichever comes first: what an old epoch archived was there before the mint returned."""
    journal = Journal(cold)
    for n in range(20):
        late = JournalEntry(1, f"late{n}", f"session:{n}", 1, 5, "set", "", 0, pack([put("k", "old")]), 0)
        old = journal.epoch
        seen: list[set[int]] = []
        start = threading.Barrier(2)

        def archives(batch: Batch, start: threading.Barrier = start, seen: list[set[int]] = seen) -> None:
            start.wait()
            seen.append(cold.archive([batch]))

        thread = threading.Thread(target=archives, args=(Batch(0, old, 0, [late]),))
        thread.start()
        start.wait()
        journal.cursor = cold.cursor(0)
        journal.renew()
        there = cold.version(f"session:{n}")
        thread.join()
        assert (cold.version(f"session:{n}"), bool(seen[0])) == (there, there is not None)
        assert cold.archive([Batch(0, old, 1 if there else 0, [late])]) == {}


def test_two_namespaces_share_a_database(url: str, opened: Opener, tmp_path: Path) -> None:
    """The same record, partition and user in another namespace is another one."""
    if url == "memory":
        url = f"sqlite:///{tmp_path}/both.db"
    first, second = (Journal(opened(url)) for _ in range(2))
    first.commit("session:a", put("k", "1"), (b"s", OWNER, b"u"), messages=2)
    first.flush()
    assert second.store.load("session:a", window=5) is None
    second.commit("session:a", put("k", "2"), messages=1)
    second.flush()
    second.store.erase(["session:a"])
    second.store.purge(10**12)
    assert len(shown(first.store, "session:a")) == 2
    assert second.store.owned("u") == []
    assert first.store.register(1)[0] != second.store.register(1)[0]


# Folding


def test_every_version_equals_the_fold_of_its_changes(cold: ColdStore, journal: Journal) -> None:
    """Random steps in random batches; snapshots change nothing."""
    dice = random.Random(7)
    for _ in range(150):
        record = f"session:{dice.randrange(3)}"
        ops = [put(f"k{dice.randrange(5)}", str(dice.random())) for _ in range(dice.randrange(3))]
        ops += [(b"d", b"k%d" % dice.randrange(5), b"")] * dice.randrange(2) + [(b"c", b"", b"")] * (
            dice.random() < 0.1
        )
        ops += [(b"l", b"", b"named")] * (dice.random() < 0.1)
        journal.commit(record, *ops, messages=dice.randrange(3))
        if dice.random() < 0.15:
            journal.flush()
    journal.flush()
    for (record, version), fields in journal.past.items():
        assert cold.state_at(record, version) == State(journal.epoch, version, fields)
    for record, state in journal.states.items():
        loaded = cold.load(record, window=3)
        assert loaded
        assert loaded.state == state
        assert [seq for seq, _ in loaded.messages] == list(range(int(state.fields[NEXT])))[-3:]


def test_a_load_takes_three_statements_and_folds_a_bounded_number_of_changes(journal: Journal, cold: ColdStore) -> None:
    """However long the history is."""
    for n in range(200):
        journal.commit("session:a", put("k", str(n)), messages=1)
        journal.flush()
    sent = statements(cold)
    loaded = cold.load("session:a", window=5)
    assert len([statement for statement in sent if statement.startswith("SELECT")]) == 3
    assert loaded
    newest = max(row.version for row in rows(cold, tables.snapshots, record="session:a"))
    assert newest >= 190


def test_a_label_makes_a_snapshot_and_a_checkpoint(cold: ColdStore, journal: Journal) -> None:
    """Labels keep every character, also those that SQL text cannot hold."""
    journal.commit("session:a", put("k", "1"))
    journal.commit("session:a", (b"l", b"", "before: \0 Zürich".encode()))
    journal.flush()
    assert cold.checkpoints("session:a") == [("before: \0 Zürich", 2, 1002)]
    assert [row.version for row in rows(cold, tables.snapshots)] == [2]


def test_history_is_between_exclusive_bounds(cold: ColdStore, journal: Journal) -> None:
    """Entries come back as they were written."""
    written = [journal.commit("session:a", put("k", str(n)), actor=f"w{n}", token=n) for n in range(10)]
    journal.flush()
    assert cold.history("session:a") == written
    assert cold.history("session:a", after=3, before=7) == written[3:6]
    assert cold.history("session:a", after=3, limit=2) == written[3:5]


def test_a_commit_is_found_by_its_event_id_however_long_ago_it_was(cold: ColdStore, journal: Journal) -> None:
    """The error does not claim that a version never existed if a purge may have removed it."""
    for n in range(300):
        journal.commit("session:a", put("k", str(n)))
    journal.commit("session:b", put("k", "1"))
    journal.flush()
    assert [cold.applied("session:a", f"e{1000 + n}", 0) for n in (1, 150, 300)] == [1, 150, 300]
    assert cold.applied("session:a", "e1301", 0) == 0, "that is another record's"
    assert cold.applied("session:c", "e1301", 0) == 0
    cold.purge(1200)
    assert cold.applied("session:a", "e1299", 0) == 299
    assert cold.applied("session:a", "other", since_ms=1250) == 0
    with pytest.raises(NotFound, match="purged"):
        cold.applied("session:a", "other", since_ms=1100)
    cold.purge(10_000)
    assert cold.applied("session:a", "other", since_ms=5_000) == 0
    with pytest.raises(NotFound, match="purged"):
        cold.applied("session:a", "other", since_ms=1250)


def test_what_is_not_there_is_not_found(cold: ColdStore, journal: Journal) -> None:
    """The error for a missing version names those that exist."""
    journal.commit("session:a", put("k", "1"))
    journal.flush()
    assert cold.load("session:b", window=1) is None
    assert cold.version("session:b") is None
    for record, version in (("session:a", 2), ("session:a", 0), ("session:b", 1)):
        with pytest.raises(NotFound):
            cold.state_at(record, version)
    with pytest.raises(NotFound):
        cold.oldest("session:b")


def test_a_new_epoch_replaces_what_redis_lost(cold: ColdStore, journal: Journal) -> None:
    """The replaced changes are kept in quarantine; the new line is read without a trace of them."""
    for n in range(12):
        journal.commit("session:a", put("k", str(n)), put(f"only{n}", "1"), messages=1)
    journal.flush()
    journal.renew()
    journal.states["session:a"] = State(journal.epoch, 8, journal.past["session:a", 8])
    journal.commit("session:a", put("k", "new"), messages=1)
    journal.flush()
    loaded = cold.load("session:a", window=100)
    assert loaded
    assert loaded.state == journal.states["session:a"]
    assert [seq for seq, _ in loaded.messages] == list(range(9))
    assert [row.version for row in cold.quarantined()] == [9, 10, 11, 12]


@pytest.mark.parametrize("lost", [(b"s", DELETED, b"1"), (b"s", PHASE, b"done")])
def test_what_a_record_is_in_the_new_epoch_is_what_listings_and_purges_go_by(
    cold: ColdStore, journal: Journal, lost: Any
) -> None:
    """A record whose deletion Redis lost is there: a purge that took it for deleted would remove all of it."""
    journal.append("session:a", 3)
    journal.commit("session:a", (b"w", b"", b"3"), lost)
    journal.flush()
    journal.renew()
    journal.states["session:a"] = State(journal.epoch, 1, journal.past["session:a", 1])
    journal.append("session:a", 1)
    journal.flush()
    assert [(row.id, row.phase) for row in cold.listing(Wanted("session", 9))] == [("a", None)]
    cold.purge(10**12)
    assert len(shown(cold, "session:a")) == 4


def test_a_row_that_does_not_know_its_last_version_keeps_no_commit_out(cold: ColdStore, journal: Journal) -> None:
    """What has the version of a commit was written in another epoch: that is put aside, and the commit is archived."""
    for n in range(3):
        journal.commit("session:a", put("k", str(n)), messages=1)
    journal.flush()
    journal.renew()
    journal.states["session:a"] = State(journal.epoch, 2, journal.past["session:a", 2])
    late = journal.commit("session:a", put("k", "new"), messages=1)
    with cold.database.write() as connection:
        connection.execute(update(tables.records).where(tables.records.c.record == "session:a").values(version=2))
    assert cold.archive([journal.batch()]) == {0: set()}
    assert cold.history("session:a")[-1] == late
    assert [(row.version, row.reason) for row in cold.quarantined()] == [(3, f"replaced by {journal.epoch}")]
    loaded = cold.load("session:a", window=10)
    assert loaded
    assert loaded.state == journal.states["session:a"]


# Poison


def test_a_poison_entry_goes_to_quarantine_and_the_others_go_on(
    cold: ColdStore, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    """A NUL in a text, bytes that are no steps, a number beyond 64 bits, a version that is there already."""
    for n in range(5):
        journal.commit("session:a", put("k", str(n)), messages=1)
        bad: Any = [
            {"record": "session:\0"},
            {"data": b"s1:x"},
            {"token": 2**63},
            {"version": -1},
            {"actor": "\ud800"},
        ][n]
        journal.commit(f"session:bad{n}", put("k", "1"))
        journal.pending[-1] = replace(journal.pending[-1], **bad)
    twice = journal.commit("session:twice", put("k", "1"))
    journal.commit("session:twice", put("k", "again"), version=1)
    assert journal.flush() == {0}
    reasons = {row.record: row.reason for row in cold.quarantined()}
    bad_ones = {"session:%00", "session:bad1", "session:bad2", "session:bad3", "session:bad4", "session:twice"}
    assert set(reasons) == bad_ones
    assert cold.version("session:a") == 5
    assert cold.history("session:twice") in ([twice], [replace(twice, data=pack([put("k", "again")]))])
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 6
    assert any("session:bad2 version 1 at offset" in r.getMessage() for r in caplog.records)
    assert len(shown(cold, "session:a")) == 5


def test_an_event_that_no_database_could_hold_goes_to_quarantine(cold: ColdStore, journal: Journal) -> None:
    """Its neighbours are told; if it came with a change, that version stays used. Erasing what it is about takes it."""
    texts = [b"2 a\0 session:mango", b"2 a session:mango\0", b"2 a session:\xed\xa0\x80"]
    bad = [*texts, b"-2 a b", b"%d a b" % 2**63, b"x a b", b"2 a", b""]
    journal.tell(b"1 first session:mango")
    for step in bad:
        journal.tell(step)
    journal.tell(b"1 again session:mango")
    journal.pending.append(replace(journal.tell(b"9 a b"), data=b"e", offset=journal.offset + 1))
    journal.offset += 1
    journal.commit("session:a", put("k", "1"), (b"e", b"3 a\0 session:a", b"{}"))
    journal.commit("session:a", put("k", "2"), (b"e", b"3 last session:a", b"{}"))
    assert journal.flush() == {0}
    assert [row.type for row in cold.audit(EVERYTHING)] in (["first", "a", "last"], ["again", "a", "last"])
    kept = cold.quarantined()
    assert len(kept) == len(bad) + 3
    assert [row.version for row in cold.history("session:a")] == [2]
    cold.erase(["session:mango", "session:a"])
    assert {row.record for row in cold.quarantined()} & {"session:mango", "session:a"} == set()


def test_a_type_too_long_for_an_index_does_not_stop_the_archive(cold: ColdStore, journal: Journal) -> None:
    dice = random.Random(5)
    long = "".join(chr(dice.randrange(0x4E00, 0x9FFF)) for _ in range(3_000)).encode()
    journal.tell(b"1 " + long + b" client:web")
    journal.tell(b"2 a client:" + long)
    journal.tell(b"3 a client:web")
    assert journal.flush() == {0}
    assert [row.offset for row in cold.audit(EVERYTHING)][-1] == 3
    assert len(cold.audit(EVERYTHING)) + len(cold.quarantined()) == 3


def test_an_entry_that_the_database_refuses_is_bisected_out(
    cold: ColdStore, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its version stays used, its bytes are kept, and a later load goes on without it."""
    add = Sql.add

    def refuses(sql: Sql, table: Any, given: Any, *columns: Any) -> None:
        if any(b"poison" in (row[-1] or b"") for row in given if isinstance(row[-1], bytes)):
            raise ValueError("refused")
        add(sql, table, given, *columns)

    monkeypatch.setattr(Sql, "add", refuses)
    for n in range(40):
        journal.commit("session:a", put(f"k{n}", "poison" if n in (11, 39) else "good"))
    assert journal.flush() == {0}
    assert [(row.version, unpack(row.data)[0].value) for row in cold.quarantined()] == [
        (12, b"poison"),
        (40, b"poison"),
    ]
    assert cold.version("session:a") == 40
    assert len(cold.history("session:a")) == 38
    loaded = cold.load("session:a", window=0)
    assert loaded
    assert loaded.state.version == 40
    assert len(loaded.state.fields) == 38


def test_an_id_too_long_for_an_index_does_not_stop_the_archive(cold: ColdStore, journal: Journal) -> None:
    """PostgreSQL refuses what SQLite takes; either way the entries beside it are archived."""
    dice = random.Random(3)
    long = "session:" + "".join(chr(dice.randrange(0x4E00, 0x9FFF)) for _ in range(2_000))
    journal.commit(long, put("k", "1"))
    journal.commit("session:a", put("k", "1"))
    assert journal.flush() == {0}
    assert cold.version("session:a") == 1
    assert cold.version(long) == (None if cold.quarantined() else 1)


def test_an_error_that_is_no_fault_of_the_data_undoes_everything(
    cold: ColdStore, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cursor stays where it was, so the batch can be tried again."""
    journal.commit("session:a", put("k", "1"), (b"e", b"1 a session:a", b"{}"))
    journal.tell(b"2 a b")
    with monkeypatch.context() as patched:
        patched.setattr(erasure, "note_late", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cold.archive([journal.batch()])
    assert cold.audit(EVERYTHING) == []
    assert cold.version("session:a") is None
    assert cold.quarantined() == []
    assert journal.flush() == {0}
    assert len(cold.audit(EVERYTHING)) == 2


def test_records_that_are_there_are_updated_and_new_ones_inserted(cold: ColdStore, journal: Journal) -> None:
    for n in range(3):
        journal.commit("session:a", put("k", str(n)))
        journal.commit(f"session:{n}", put("k", str(n)))
        journal.flush()
    assert cold.version("session:a") == 3
    assert [cold.version(f"session:{n}") for n in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_batch_applies_its_tag_changes_in_proportion_to_their_number(cold: ColdStore) -> None:
    """Each deletion read the tag changes of all records before it: a batch of deleted records took quadratic time."""
    looked_up = 0

    class Counted(str):
        __slots__ = ()

        def __hash__(self) -> int:
            nonlocal looked_up
            looked_up += 1
            return super().__hash__()

    def archived(records: int) -> int:
        """How often a tag is looked up while that many records are tagged, deleted, and half of them tagged again."""
        nonlocal looked_up
        changes = []
        for number in range(records):
            entry = JournalEntry(number, f"e{number}", f"session:{records}-{number}", 1, 1, "set", "", 0, b"", 0)
            again = [(Counted("run:again"), True)] if number % 2 else []
            tags = [(Counted("run:old"), True), ("", False), *again]
            changes.append(record_index.Parsed(entry, 0, "1-a", b"", tags=tags))
        looked_up = 0
        with cold.database.write(cold.namespace) as sql:
            record_index.note_tags(sql, changes)
        return looked_up

    few, many = archived(50), archived(500)
    assert many <= 10 * few
    kept = rows(cold, tables.tags)
    assert {row.tag for row in kept} == {"run:again"}
    assert len(kept) == 25 + 250


def test_nothing_but_bytes_holds_what_users_wrote() -> None:
    """Text and JSON columns refuse some of what models write."""
    for table in tables.metadata.sorted_tables:
        assert all(isinstance(column.type, LargeBinary) for column in table.columns if column.name == "data")
