"""What is read of SQL: imported records, listings, events, and which messages a state shows."""

from __future__ import annotations

import random
import sqlite3
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import pairwise

import pytest
from sqlalchemy import select

from distributed_state.cold import tables
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Sought, Wanted
from distributed_state.errors import Conflict, InvalidValue
from distributed_state.values import message_ranges
from distributed_state.values.journal import Happened, JournalEntry, Segment, State, pack
from distributed_state.values.model import ITEMS, NEXT, OWNER, SEGMENTS, START
from tests.journals import EVERYTHING, Journal, put, rows, shown

# Importing


def test_an_imported_record_has_its_whole_history(cold: ColdStore, journal: Journal) -> None:
    """Base, shared messages, changes and index."""
    base = State("x", 40, {b"k": b"0", NEXT: b"2", START: b"2", SEGMENTS: b'[["session:gone",0,2]]', OWNER: b"u"})
    entries = [
        JournalEntry(
            0,
            f"i{n}",
            "session:a",
            n,
            500 + n,
            "set",
            "",
            0,
            pack([put("k", str(n)), (b"m", b"%d" % (n - 39), b"x")]),
            0,
        )
        for n in range(41, 75)
    ]

    def adopt() -> None:
        cold.adopt(
            "session:a",
            partition=0,
            epoch=journal.epoch,
            base=base,
            base_messages=[(0, b"a"), (1, b"b")],
            entries=entries,
        )

    adopt()
    assert cold.history("session:a") == entries
    assert cold.oldest("session:a") == 40
    assert cold.state_at("session:a", 40).fields == base.fields
    assert cold.state_at("session:a", 60).fields[b"k"] == b"60"
    assert shown(cold, "session:a")[:3] == [b"a", b"b", b"x"]
    assert [row.record for row in cold.listing(Wanted("session", 5, owner="u"))] == ["session:a"]
    gaps = [row.version for row in rows(cold, tables.snapshots)]
    assert max(b - a for a, b in pairwise(gaps)) <= 10
    with pytest.raises(Conflict) as caught:
        adopt()
    assert caught.value.version == 74


def test_an_import_conflicts_with_what_is_there(cold: ColdStore, journal: Journal) -> None:
    """With a deleted record too, and with an erased one unless its versions are lower."""
    journal.commit("session:a", put("k", "1"))
    journal.delete("session:a")
    journal.flush()

    def adopt(version: int) -> None:
        entry = JournalEntry(0, "i", "session:a", version, 5, "set", "", 0, pack([put("k", "1")]), 0)
        cold.adopt("session:a", partition=0, epoch=journal.epoch, base=None, base_messages=[], entries=[entry])

    with pytest.raises(Conflict):
        adopt(3)
    cold.erase(["session:a"])
    with pytest.raises(Conflict, match="erased"):
        adopt(2)
    adopt(3)
    assert cold.version("session:a") == 3
    with pytest.raises(InvalidValue):
        cold.adopt("session:b", partition=0, epoch=journal.epoch, base=None, base_messages=[], entries=[])


# Listing


def test_pages_are_complete_and_without_duplicates(cold: ColdStore, journal: Journal) -> None:
    """Also where many records changed in the same millisecond."""
    for n in range(50):
        owned = (b"s", OWNER, b"u%d" % (n % 2))
        journal.commit(f"session:Ä{n}" if n % 3 else f"session:{n}", owned, time_ms=2_000 + n // 10)
    journal.commit("task:t", put("k", "1"))
    journal.commit("session:gone", put("k", "1"), time_ms=2_002)
    journal.delete("session:gone")
    journal.flush()
    cases: list[tuple[str | None, bool, int]] = [(None, False, 50), ("u1", False, 25), (None, True, 51)]
    for owner, deleted, expected in cases:
        seen: list[tuple[int, str]] = []
        after = None
        while page := cold.listing(Wanted("session", 7, owner=owner, after=after, deleted=deleted)):
            seen += [(row.updated_ms, row.record) for row in page]
            after = page[-1].cursor
        assert len(set(seen)) == len(seen) == expected
        assert seen == sorted(seen, key=lambda row: (row[0], row[1].encode()), reverse=True)


def test_a_bad_cursor_is_refused(cold: ColdStore) -> None:
    """Only what a listing gave is taken."""
    for cursor in ("", "x", "é", "MTI0", "MTI0OTpzZXNzaW9uOmE=", "a" * 10_000, "%%%"):
        with pytest.raises(InvalidValue):
            cold.listing(Wanted("session", 5, after=cursor))


def test_owner_deletion_and_parent_follow_the_changes(cold: ColdStore, journal: Journal) -> None:
    """A change that does not name them leaves them; the first time of creation stays."""
    journal.commit("session:a", (b"s", OWNER, b"u"))
    journal.commit("session:a", put("k", "1"))
    journal.flush()
    journal.delete("session:a")
    journal.flush()
    journal.fork("session:a", "session:f")
    journal.flush()
    (row,) = rows(cold, tables.records, record="session:a")
    assert (row.owner, row.deleted, row.created_ms, row.updated_ms, row.version) == ("u", True, 1001, 1003, 3)
    (row,) = rows(cold, tables.records, record="session:f")
    assert row.parent == "session:a"
    assert cold.listing(Wanted("session", 5, owner="u", deleted=True))[-1].record == "session:a"


def test_forks_of_forks_are_owned_too(cold: ColdStore, journal: Journal) -> None:
    """Whoever they belong to now."""
    journal.commit("session:a", (b"s", OWNER, b"u"), messages=1)
    journal.fork("session:a", "session:b")
    journal.fork("session:b", "task:c")
    journal.commit("task:c", (b"s", OWNER, b"someone"))
    journal.commit("session:no", (b"s", OWNER, b"uu"))
    journal.flush()
    assert cold.owned("u") == ["session:a", "session:b", "task:c"]


def test_runs_are_cut_counted_and_joined() -> None:
    """`lineage` knows which messages a state shows."""
    fields = {
        SEGMENTS: message_ranges.dump([Segment("a", 0, 3), Segment("a", 3, 5), Segment("b", 5, 5)]),
        START: b"7",
        NEXT: b"9",
    }
    runs = message_ranges.segments("c", fields)
    assert runs == [Segment("a", 0, 5), Segment("c", 7, 9)]
    assert message_ranges.count(runs) == 7
    assert message_ranges.last(runs, 3) == [Segment("a", 4, 5), Segment("c", 7, 9)]
    assert message_ranges.last(runs, 0) == []
    assert message_ranges.parse(message_ranges.close("c", fields)) == runs
    assert message_ranges.segments("c", {}) == []


def test_a_page_of_events_is_what_a_list_of_all_would_give(cold: ColdStore) -> None:
    """Whatever is asked for, wherever a page ends; several partitions at the same millisecond too."""
    dice = random.Random(11)
    for partition in range(3):
        journal = Journal(cold, partition=partition)
        for n in range(60):
            type = dice.choice([b"a", b"a.b", b"a.c", b"a.b.c", b"a/b", b"b.a"])
            journal.tell(b"%d %b s%d" % (n + 1, type, dice.randrange(4)), time_ms=1000 + n // 4)
        journal.flush()
    every = cold.audit(EVERYTHING)
    assert len(every) == 180
    assert every == sorted(every, key=lambda row: row.place)
    for _ in range(200):
        type, subject = dice.choice([None, "a", "a.*", "a.b.*", "b.*", "c.*", "*.b*"]), dice.choice([None, "s1", "s9"])
        since, until = sorted(dice.choices(range(995, 1020), k=2))
        after = dice.choice([None, (0, 0, "", 0), dice.choice(every).place])
        sought = Sought(subject, type, since, until, dice.randrange(1, 60), after)

        def wanted(row: Happened, sought: Sought = sought) -> bool:
            fits = fnmatchcase(row.type, sought.type or "*")
            same = sought.subject in (None, row.subject) and sought.since_ms <= row.time_ms < sought.until_ms
            return fits and same and (sought.after is None or row.place > sought.after)

        expected = [row for row in every if wanted(row)]
        expected = expected[-sought.limit :] if after is None else expected[: sought.limit]
        assert cold.audit(sought) == expected, sought


# Parts of a record


def test_outlines_are_the_changes_without_what_messages_say(cold: ColdStore, journal: Journal) -> None:
    written = [journal.commit("session:a", put("k", str(n)), messages=1) for n in range(6)]
    journal.flush()
    outlines = cold.outlines("session:a")
    assert [replace(each, data=b"") for each in outlines] == [replace(each, data=b"") for each in written]
    assert all(b"message" in each.data for each in written)
    assert not any(b"session:a message" in each.data for each in outlines)
    assert [each.version for each in cold.outlines("session:a", after=2, before=5, limit=1)] == [3]
    assert [each.version for each in cold.outlines("session:a", most=1)] == [1], "at least one"
    assert cold.outlines("session:b") == []


def test_messages_are_as_long_as_their_lengths_say_at_most(cold: ColdStore, journal: Journal) -> None:
    journal.append("session:a", 5)
    journal.flush()
    runs = [Segment("session:a", 1, 4)]
    messages = cold.messages("session:a", runs)
    lengths = cold.message_lengths("session:a", runs)
    assert messages.keys() == lengths.keys() == {1, 2, 3}
    assert all(len(messages[number]) <= lengths[number] for number in messages)


def test_records_that_show_more_or_older_messages_than_wanted_are_found(cold: ColdStore, journal: Journal) -> None:
    journal.append("session:few", 2)
    journal.append("session:many", 5)
    journal.append("session:few", 1)
    journal.flush()
    assert cold.overfull(4, None, 0) == (["session:many"], None)
    assert cold.overfull(2, None, 0) == (["session:few", "session:many"], None)
    assert cold.overfull(9, None, 0) == ([], None)
    assert cold.overfull(None, journal.now, 0) == (["session:few", "session:many"], None)
    assert cold.overfull(None, 1001, 0) == ([], None)


def test_items_are_counted_and_their_changes_noticed(cold: ColdStore, journal: Journal) -> None:
    journal.commit("session:a", (b"p", b"notes\0one", b"1"), (b"p", b"notes\0two", b"2"), (b"s", ITEMS, b"1"))
    journal.commit("session:a", (b"q", b"notes\0two", b""))
    journal.commit("session:a", put("k", "1"))
    journal.commit("session:b", (b"p", b"notes\0one", b"1"), (b"s", ITEMS, b"1"))
    journal.flush()
    assert cold.count_items("", 99) == 2
    assert cold.count_items("a", 99) == 1
    assert cold.count_items("", 1) == 1
    assert cold.items_changed_since("session:a", 1)
    assert not cold.items_changed_since("session:a", 2)
    assert not cold.items_changed_since("session:c", 0)
    older = cold.older_items("session:a", 1, {})
    assert [(each.at, each.name, each.origin, each.data) for each in older] == [
        (1, b"notes\0one", "session:a", b"1"),
        (1, b"notes\0two", "session:a", b"2"),
    ]


def test_records_that_begin_so_are_counted_up_to_a_number(cold: ColdStore, journal: Journal) -> None:
    for name in ("ab", "ac", "b", "ad"):
        journal.commit(f"session:{name}", put("k", "1"))
    journal.delete("session:ad")
    journal.commit("task:ab", put("k", "1"))
    journal.flush()
    assert cold.count("session", "", 99) == 3
    assert cold.count("session", "a", 99) == 2
    assert cold.count("session", "", 2) == 2
    assert cold.count("user", "", 99) == 0


def test_forks_of_a_record_are_found_with_their_versions(cold: ColdStore, journal: Journal) -> None:
    journal.append("session:a", 2)
    journal.append("session:a", 1)
    journal.fork("session:a", "session:old", 1)
    journal.flush()
    journal.fork("session:a", "session:new")
    journal.delete("session:new")
    journal.flush()
    assert cold.forked("session:a", 9) == [("session:new", 2, 1004, True), ("session:old", 1, 1003, False)]
    assert cold.forked("session:a", 1) == [("session:new", 2, 1004, True)]
    assert cold.forked("session:old", 9) == []


# The database


def test_the_connections_of_a_server_are_counted(cold: ColdStore) -> None:
    found = cold.connections()
    if cold.database.dialect == "sqlite":
        assert found is None
    else:
        assert found is not None
        assert 1 <= found[0] <= found[1]


def test_all_that_was_committed_is_moved_into_the_file(cold: ColdStore, journal: Journal) -> None:
    journal.commit("session:a", put("k", "1"))
    journal.flush()
    assert cold.sync()
    file = cold.database._engine.url.database
    if cold.database.dialect == "sqlite" and not cold.database.memory:
        with sqlite3.connect(f"file:{file}?immutable=1", uri=True) as alone:  # without what is beside it
            assert alone.execute("SELECT record FROM records").fetchall() == [("session:a",)]
        alone.close()
        with cold.database.read() as connection:
            connection.execute(select(tables.records)).all()
            journal.commit("session:a", put("k", "2"))
            journal.flush()
            assert not cold.sync(), "a reader is in the way"
        assert cold.sync()
