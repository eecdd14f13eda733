"""What the cold tier does when Redis or SQL lost data: epochs, commits that writers remember, repairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import RESOLVED, Archived, Backfilled, Cursor, Held, Minted, Wanted
from distributed_state.values.journal import Happened, JournalEntry, Loaded, State, pack
from distributed_state.values.schedule import due_ms
from tests.journals import EVERYTHING, Journal, put, shown

LATELY = 600.0  # seconds


def held(journal: Journal, **given: Any) -> Held:
    """What Redis has of the partition of this journal: nothing, but what is given."""
    nothing: dict[str, Any] = {each: {} for each in ("states", "entries", "deleted", "elsewhere", "items")}
    return Held(journal.partition, journal.epoch, 0, 0, **(nothing | given))


# Epochs


def test_an_epoch_that_never_began_is_no_loss(cold: ColdStore) -> None:
    first = cold.mint(0, None)
    assert first is not None
    assert not cold.any_begun(0)
    cold.begin(0, first.epoch)
    assert cold.any_begun(0)
    cold.never_begun(0, first.epoch)
    assert not cold.any_begun(0)
    assert not cold.any_begun(1)
    second = cold.mint(0, first)
    assert second is not None
    cold.begin(0, second.epoch)
    assert cold.any_begun(0)
    assert cold.minted_since(LATELY) == Minted(0, 0.0), "none began before it"


def test_epochs_that_began_behind_another_one_are_counted_by_partition(cold: ColdStore) -> None:
    for partition in (0, 1, 2):
        after = cold.mint(partition, None)
        assert after is not None
        cold.begin(partition, after.epoch)
        for _ in range(partition):
            after = cold.mint(partition, after)
            assert after is not None
            cold.begin(partition, after.epoch)
    minted = cold.minted_since(LATELY)
    assert minted.partitions == 2
    assert 0 <= minted.ago < LATELY
    assert cold.minted_since(-LATELY).partitions == 0


def test_an_epoch_that_a_repair_begins_is_not_counted(cold: ColdStore) -> None:
    first = cold.mint(0, None)
    assert first is not None
    cold.begin(0, first.epoch)
    second = cold.mint(0, first)
    assert second is not None
    cold.begin_complete(0, second.epoch)
    assert cold.minted_since(LATELY).partitions == 0
    assert cold.any_begun(0)


def test_the_clock_of_the_database_goes_on(cold: ColdStore) -> None:
    first = cold.clock_us()
    assert first > 1_600_000_000_000_000
    assert cold.clock_us() >= first


def test_a_repair_that_reached_the_end_of_an_epoch_is_noted(cold: ColdStore, journal: Journal) -> None:
    journal.commit("session:a", put("k", "1"))
    journal.flush()
    at = cold.cursor(0)
    assert at is not None
    assert not cold.is_repaired(0, journal.epoch)
    assert not cold.reach(replace(at, offset=7), replace(at, offset=9)), "SQL is not there"
    assert cold.cursor(0) == at
    further = replace(at, offset=9, event="e9")
    assert cold.reach(at, further)
    assert cold.cursor(0) == further
    assert cold.is_repaired(0, journal.epoch)
    other = Cursor(0, "5-other", at.ordinal + 1, 3, "e3")
    assert cold.reach(further, other), "an epoch that SQL did not know"
    assert cold.cursor(0) == other
    assert cold.is_repaired(0, "5-other")


# Commits that writers remember


def test_a_commit_is_held_by_its_event(cold: ColdStore, journal: Journal) -> None:
    entry = journal.commit("session:a", put("k", "1"))
    assert not cold.holds("session:a", 1, entry.event)
    assert not cold.has_version("session:a", 1)
    journal.flush()
    assert cold.holds("session:a", 1, entry.event)
    assert not cold.holds("session:a", 1, "another")
    assert not cold.holds("session:a", 2, entry.event)
    assert not cold.holds("session:b", 1, entry.event)
    assert cold.has_version("session:a", 1)
    assert not cold.has_version("session:a", 2)
    cold.purge(10**12)
    assert cold.has_version("session:a", 1), "it had it"


def test_of_remembered_commits_those_that_sql_lacks_are_told_and_put_aside(cold: ColdStore, journal: Journal) -> None:
    there = [journal.commit("session:a", put("k", str(n))) for n in range(3)]
    journal.flush()
    lost = [journal.commit("session:a", put("k", "lost")), journal.commit("session:b", put("k", "lost"))]
    journal.pending.clear()
    entries = [*there, *lost]
    events = {entry.event for entry in lost}
    assert cold.lacking(0, journal.epoch, entries) == events
    known = cold.known(0, journal.epoch, entries)
    assert known.lacking == events
    assert known.heads == {"session:a": Archived(3, journal.epoch, 3, there[-1].event)}
    assert known.last_event == 0
    assert cold.refusal(lost[0].event) == ""
    assert cold.newest_quarantined() is None
    assert cold.set_aside(0, journal.epoch, entries) == 2
    assert cold.set_aside(0, journal.epoch, entries) == 0, "they are held in quarantine now"
    assert cold.lacking(0, journal.epoch, entries) == set()
    assert f"acknowledged under epoch {journal.epoch}" in cold.refusal(lost[0].event)
    assert cold.count_quarantined() == 2
    newest = cold.newest_quarantined()
    assert newest is not None
    assert newest[:2] == ("session:b", 1)
    assert "ended before it was archived" in newest[2]


def test_what_was_erased_since_is_not_lacking(cold: ColdStore, journal: Journal) -> None:
    journal.commit("session:a", put("k", "1"))
    journal.flush()
    late = replace(journal.commit("session:a", put("k", "2")), version=1, event="late")
    journal.pending.clear()
    assert cold.lacking(0, journal.epoch, [late]) == {"late"}
    cold.erase(["session:a"])
    assert cold.lacking(0, journal.epoch, [late]) == set()
    assert cold.set_aside(0, journal.epoch, [late]) == 0


def test_the_records_of_a_partition_are_known_by_name(cold: ColdStore, journal: Journal) -> None:
    other = Journal(cold, partition=1)
    for each, record in ((journal, "session:a"), (journal, "task:b"), (other, "session:c")):
        each.commit(record, put("k", "1"))
        each.flush()
    assert sorted(cold.known_names(0) or []) == ["session:a", "task:b"]
    assert cold.known_names(1) == ["session:c"]
    assert cold.known_names(2) == []


# Repairs of SQL


def test_a_record_that_only_redis_has_is_brought_to_sql_entry_by_entry(cold: ColdStore, journal: Journal) -> None:
    after = cold.cursor(0)
    entries = [journal.commit("session:a", put("k", str(n)), messages=1) for n in range(3)]
    journal.pending.clear()
    state = Loaded(journal.states["session:a"], [], journal.now)
    here = held(journal, states={"session:a": state}, entries={"session:a": entries})
    assert cold.backfill(here, after, keep=True) == Backfilled(commits=3)
    assert cold.version("session:a") is None, "with `keep` nothing is changed"
    assert cold.backfill(here, Cursor(0, journal.epoch, 1, 99, ""), keep=False) is None, "SQL is not there"
    assert cold.version("session:a") is None
    assert cold.backfill(here, after, keep=False) == Backfilled(commits=3)
    assert cold.history("session:a") == entries
    assert len(shown(cold, "session:a")) == 3
    again = cold.backfill(here, after, keep=False)
    assert again == Backfilled(), "there is nothing more to bring"


def test_a_record_of_which_commits_are_missing_comes_whole(cold: ColdStore, journal: Journal) -> None:
    journal.commit("session:a", put("k", "0"))
    journal.flush()
    after = cold.cursor(0)
    journal.commit("session:a", put("k", "missing"))
    entries = [journal.commit("session:a", put("k", str(n))) for n in (2, 3)]
    journal.pending.clear()
    state = Loaded(journal.states["session:a"], [], journal.now)
    done = cold.backfill(held(journal, states={"session:a": state}, entries={"session:a": entries}), after, keep=False)
    assert done is not None
    assert (done.records, done.commits, done.aside) == (1, 0, 1)
    assert cold.state_at("session:a", 4).fields == {b"k": b"3"}
    assert [(row.version, row.reason) for row in cold.quarantined()] == [(3, RESOLVED)]
    assert cold.count_quarantined() == 0, "nothing of it is lost"
    assert cold.has_version("session:a", 2), "a later one came whole"


def test_events_that_sql_lacks_are_added_once(cold: ColdStore, journal: Journal) -> None:
    told = journal.tell(b"1 note.added client:a")
    journal.flush()
    (there,) = cold.audit(EVERYTHING)
    assert cold.event_archived(0, journal.epoch, 1, there.id)
    assert not cold.event_archived(0, journal.epoch, 1, "another")
    assert not cold.event_archived(0, journal.epoch, 2, there.id)
    lost = Happened(0, journal.epoch, 2, "r.9.0", "note.added", "client:a", told.time_ms, "worker", 0, b"{}")
    assert cold.add_events([there, lost], keep=True) == 1
    assert cold.audit(EVERYTHING) == [there]
    assert cold.add_events([there, lost], keep=False) == 1
    assert cold.add_events([there, lost], keep=False) == 0
    assert cold.audit(EVERYTHING) == [there, lost]
    assert cold.event(0, "r.9.0", told.time_ms) == lost
    assert cold.event(0, "another", told.time_ms) is None


def test_events_are_stored_under_another_encryption_page_by_page(cold: ColdStore, journal: Journal) -> None:
    for n in range(1, 4):
        journal.tell(b"%d a client:%d" % (n, n))
    journal.flush()
    begin = (-1, "", 0)

    def convert(subject: str, name: str, data: bytes) -> bytes:
        return subject.encode()

    assert cold.rewrite_events(begin, convert, keep=True) == ((0, journal.epoch, 3), 3)
    assert {row.data for row in cold.audit(EVERYTHING)} == {b"{}"}
    end, count = cold.rewrite_events(begin, convert, keep=False)
    assert count == 3
    assert end == (0, journal.epoch, 3)
    assert [row.data for row in cold.audit(EVERYTHING)] == [b"client:1", b"client:2", b"client:3"]
    assert cold.rewrite_events(end, convert, keep=False) == (None, 0)


def test_an_entry_of_another_history_is_in_no_epoch(cold: ColdStore, journal: Journal) -> None:
    entry = JournalEntry(1, "e", "session:a", 1, 5, "set", "", 0, pack([put("k", "1")]), 0)
    assert cold.lacking(0, "9-nobody", [entry]) == {"e"}
    assert cold.last_begun(0, "9-nobody") is None
    assert State("9-nobody", 0, {}) not in journal.states.values()


@pytest.mark.parametrize("limit", [1, 9])
def test_records_with_a_lifetime_are_listed_in_order(cold: ColdStore, journal: Journal, limit: int) -> None:
    for name in ("b", "a", "c"):
        journal.commit(f"session:{name}", put("#lifetime", "5000 0"))
    journal.commit("session:immortal", put("k", "1"))
    journal.delete("session:c")
    journal.flush()
    found, after = [], ""
    while page := cold.mortal([0], after=after, limit=limit):
        found += page
        after = page[-1].record
    assert [(each.record, each.partition, each.lifetime) for each in found] == [
        ("session:a", 0, "5000 0"),
        ("session:b", 0, "5000 0"),
    ]
    assert cold.mortal([1], after="", limit=9) == []


@pytest.mark.parametrize("limit", [1, 9])
def test_sessions_with_a_handler_are_listed_as_they_are_due(cold: ColdStore, journal: Journal, limit: int) -> None:
    for name, stored in {
        "c": "a 5000 0 -", "b": "a 5000 2 4000", "late": "a 70000 0 -", "idle": "a - 0 -", "stuck": "a - 8 !",
        "gone": "a 1 0 -", "cleared": "a 1 0 -", "other": "ab 1 0 -",
    }.items():  # fmt: skip
        journal.commit(f"session:{name}", put("#bh", stored))
    journal.delete("session:gone")
    journal.commit("session:cleared", (b"c", b"##", b""))
    journal.flush()
    found, after = [], None
    while page := cold.due(0, "a", after=after, limit=limit):
        found += page
        after = page[-1]
    assert [(each.record, due_ms(each.due)) for each in found] == [
        ("session:b", 5000),
        ("session:c", 5000),
        ("session:late", 70000),
    ]
    assert cold.due(1, "a", after=None, limit=9) == []
    assert [row.record for row in cold.listing(Wanted("session", 9, stuck=True), [])] == ["session:stuck"]
    assert cold.count_stuck() == 1


def test_the_last_lifecycle_event_of_each_open_epoch_is_known(cold: ColdStore, journal: Journal) -> None:
    assert cold.last_events() == {0: (0, None)}, "nothing was archived under the first epoch"
    journal.tell(b"1 lock.lost client:web")
    journal.tell(b"2 lock.lost client:web")
    journal.flush()
    assert cold.last_events() == {0: (1, 2)}
    journal.renew()
    assert cold.last_events() == {0: (1, None)}, "the second one may never begin"
