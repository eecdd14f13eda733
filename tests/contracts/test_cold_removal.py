"""What leaves SQL: by a purge, and when a record is erased."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from distributed_state.cold import erasure, maintenance, record_index, tables
from distributed_state.cold.store import ColdStore
from distributed_state.errors import NotFound
from distributed_state.values import message_ranges
from distributed_state.values.journal import State
from distributed_state.values.model import DELETED, OWNER, PARENT, SEGMENTS
from tests.journals import EVERYTHING, Journal, put, rows, shown, statements

Opener = Callable[..., ColdStore]


# Purging


def test_a_purge_of_events_goes_by_time_in_steps(
    cold: ColdStore, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "_TOGETHER", 10)
    for n in range(1, 101):
        journal.tell(b"%d a b" % n, time_ms=1000 + n // 7)
    journal.flush()
    assert cold.purge(1010).events == 69
    assert [row.time_ms for row in cold.audit(EVERYTHING)] == [1000 + n // 7 for n in range(70, 101)]
    assert cold.purge(1010).events == 0
    assert cold.purge(10**12).events == 31


def test_a_purge_keeps_the_base_and_all_that_is_newer(cold: ColdStore, journal: Journal) -> None:
    """Versions from the last one before the cutoff on stay readable; older ones are not found."""
    for n in range(30):
        journal.commit("session:a", put("k", str(n)), (b"l", b"", b"%d" % n), messages=1)
    journal.flush()
    purged = cold.purge(1021)
    assert (purged.records, purged.changes, purged.messages) == (1, 20, 0)
    assert cold.oldest("session:a") == 20
    for version in range(20, 31):
        assert cold.state_at("session:a", version).fields == journal.past["session:a", version]
    with pytest.raises(NotFound, match="oldest is 20"):
        cold.state_at("session:a", 19)
    assert [version for _, version, _ in cold.checkpoints("session:a")] == list(range(21, 31))
    assert len(shown(cold, "session:a")) == 30
    assert cold.purge(1021).records == 0


def test_a_live_record_outlives_its_changes(cold: ColdStore, journal: Journal) -> None:
    """After a purge of everything it loads, and goes on."""
    for n in range(13):
        journal.commit("session:a", put("k", str(n)), messages=1)
    journal.flush()
    assert cold.purge(10**12).changes == 13
    loaded = cold.load("session:a", window=2)
    assert loaded
    assert loaded.state == journal.states["session:a"]
    assert (cold.version("session:a"), cold.oldest("session:a"), len(loaded.messages)) == (13, 13, 2)
    journal.commit("session:a", put("k", "next"), messages=1)
    journal.flush()
    assert cold.state_at("session:a", 14).fields == journal.past["session:a", 14]


def test_a_record_deleted_before_the_cutoff_keeps_its_version_only(cold: ColdStore, journal: Journal) -> None:
    """It loads as deleted; created anew it counts on."""
    journal.commit("session:a", put("k", "1"), messages=3)
    journal.delete("session:a")
    journal.flush()
    assert cold.purge(journal.now).changes == 1  # the tombstone itself is not older than the cutoff
    assert cold.purge(journal.now + 1).records == 1
    for table in (tables.changes, tables.messages, tables.snapshots, tables.shares):
        assert rows(cold, table) == []
    loaded = cold.load("session:a", window=5)
    assert loaded
    assert loaded.state == State(journal.epoch, 2, {DELETED: b"1"})
    assert cold.state_at("session:a", 2).deleted
    assert cold.purge(10**12).records == 0
    journal.states["session:a"] = loaded.state
    journal.commit("session:a", (b"d", DELETED, b""), put("k", "new"), messages=1)
    journal.flush()
    loaded = cold.load("session:a", window=5)
    assert loaded
    assert (loaded.state.version, loaded.state.deleted, len(loaded.messages)) == (3, False, 1)


def test_messages_that_nothing_shows_any_more_are_purged(cold: ColdStore, journal: Journal) -> None:
    """Except those that a later rollback brought back."""
    journal.append("session:a", 5)
    journal.wipe("session:a")
    journal.append("session:a", 3)
    journal.commit("session:b", put("k", "1"), messages=5)
    journal.wipe("session:b")
    cutoff = journal.now + 1
    back = message_ranges.close("session:b", journal.past["session:b", 1])
    journal.wipe("session:b", (b"s", SEGMENTS, back))
    journal.flush()
    assert cold.purge(cutoff).messages == 5
    assert shown(cold, "session:a") == [b"session:a message %d" % n for n in (5, 6, 7)]
    assert shown(cold, "session:b") == [b"session:b message %d" % n for n in range(5)]
    assert cold.purge(10**12).messages == 0
    assert len(shown(cold, "session:b")) == 5


def test_a_fork_outlives_its_source(cold: ColdStore, journal: Journal) -> None:
    """Shared messages are copied before they go, those after the fork are not; a fork of a fork too."""
    journal.append("session:a", 5)
    journal.fork("session:a", "session:b")
    journal.append("session:b", 2)
    journal.fork("session:b", "session:c")
    journal.append("session:c", 1)
    journal.append("session:a", 4)
    journal.flush()
    expected = {record: shown(cold, record) for record in ("session:b", "session:c")}
    assert [len(messages) for messages in expected.values()] == [7, 8]
    for record in ("session:a", "session:b"):
        journal.delete(record)
        journal.flush()
        cold.purge(10**12)
        assert shown(cold, "session:c") == expected["session:c"]
        if record == "session:a":
            assert shown(cold, "session:b") == expected["session:b"]
            assert len(rows(cold, tables.messages, record="session:b")) == 7
    assert cold.version("session:a") == 3
    journal.states["session:a"] = State(journal.epoch, 3, {DELETED: b"1"})
    journal.commit("session:a", (b"d", DELETED, b""), messages=5)
    journal.flush()
    assert shown(cold, "session:c") == expected["session:c"]


@pytest.mark.parametrize("end", ["erased", "purged"])
def test_a_fork_that_went_back_to_what_it_shared_outlives_its_source(
    cold: ColdStore, journal: Journal, end: str
) -> None:
    """A purge of the fork up to the state that hid them leaves the copies that a later one shows again."""
    journal.append("session:a", 5)
    journal.fork("session:a", "session:b")
    journal.wipe("session:b")
    cutoff = journal.now + 1
    journal.wipe("session:b", (b"s", SEGMENTS, message_ranges.close("session:b", journal.past["session:b", 1])))
    journal.delete("session:a")
    journal.flush()
    if end == "erased":
        cold.erase(["session:a"])
    else:
        cold.purge(10**12, keep=2)
    cold.purge(cutoff)
    assert shown(cold, "session:b") == [b"session:a message %d" % n for n in range(5)]


@pytest.mark.memory
def test_a_purge_beside_an_archiver_loses_nothing(cold: ColdStore, journal: Journal) -> None:
    """Whatever is newer than the cutoff reads the same afterwards."""
    stop = threading.Event()

    def purges() -> None:
        while not stop.is_set():
            cold.purge(journal.now - 20)

    thread = threading.Thread(target=purges)
    thread.start()
    try:
        for n in range(60):
            for record in ("session:a", "session:b", "session:c"):
                journal.commit(record, put(f"k{n % 7}", str(n)), messages=1)
            if n % 3 == 0:
                journal.flush()
    finally:
        stop.set()
        thread.join()
    journal.flush()
    assert cold.quarantined() == []
    for record, state in journal.states.items():
        assert cold.state_at(record, state.version).fields == state.fields
        assert cold.state_at(record, state.version - 5).fields == journal.past[record, state.version - 5]
        assert len(shown(cold, record)) == 60


def test_a_purge_goes_in_chunks(cold: ColdStore, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a transaction of its own."""
    monkeypatch.setattr("distributed_state.cold.maintenance.CHUNK", 10)
    for n in range(25):
        journal.commit(f"session:{n}", put("k", "1"))
    journal.flush()
    seen: list[int] = []
    purge = maintenance.purge

    def counted(sql: Any, names: Any, *rest: Any) -> Any:
        seen.append(len(names))
        return purge(sql, names, *rest)

    monkeypatch.setattr(maintenance, "purge", counted)
    assert cold.purge(10**12).records == 25
    assert seen == [10, 10, 5]


# Erasing


def test_erasing_leaves_nothing_but_a_version(cold: ColdStore, journal: Journal) -> None:
    """No row holds the id, the owner or a value; on SQLite the files do not either."""
    secret = b"mango-secret"
    journal.commit("session:mango-id", put("k", "mango-secret"), (b"s", OWNER, b"mango-user"), messages=12)
    journal.commit("session:mango-id", (b"l", b"", b"mango-label"))
    journal.fork("session:mango-id", "session:mango-fork")
    journal.commit("user:mango-user", put("name", "mango"))
    journal.commit("session:mango-id", put("k", "mango-secret"), token=2**63)
    journal.commit("session:other", put("k", "1"))
    journal.commit("session:mango-fork", put("k", "mango-secret"), data=secret)
    journal.flush()
    assert len(cold.quarantined()) == 2
    names = cold.owned("mango-user")
    assert names == ["session:mango-fork", "session:mango-id", "user:mango-user"]
    cold.erase(names)
    cold.erase(["session:never-there"])
    for table in tables.metadata.sorted_tables:
        for row in rows(cold, table):
            assert b"mango" not in b"|".join(v if isinstance(v, bytes) else str(v).encode() for v in row)
    if cold.database.dialect == "sqlite" and not cold.database.memory:
        path = Path(cold.database._engine.url.database or "")
        for file in path.parent.glob(path.name + "*"):
            assert b"mango" not in file.read_bytes()
    assert cold.owned("mango-user") == []
    loaded = cold.load("session:mango-id", window=5)
    assert loaded
    assert loaded.state == State(journal.epoch, 2, {DELETED: b"1"})
    assert cold.version("session:mango-id") == 2
    assert cold.version("session:other") == 1


def test_an_erased_text_can_be_used_again_and_erased_again(cold: ColdStore, journal: Journal) -> None:
    """Versions continue, and the higher one is kept."""
    journal.commit("session:a", put("k", "1"))
    journal.flush()
    cold.erase(["session:a"])
    journal.states["session:a"] = State(journal.epoch, 1, {})
    journal.commit("session:a", put("k", "2"))
    journal.flush()
    assert cold.state_at("session:a", 2).fields == {b"k": b"2"}
    assert cold.oldest("session:a") == 2
    cold.erase(["session:a"])
    assert cold.version("session:a") == 2
    cold.erase(["session:a"])
    assert cold.version("session:a") == 2
    assert [row.scope for row in rows(cold, tables.records)] == ["erased"]


def test_many_are_erased_in_as_many_statements_as_few(cold: ColdStore, journal: Journal) -> None:
    """Of a user with a thousand sessions each took several."""
    for user, count in (("few", 3), ("many", 60)):
        for number in range(count):
            journal.commit(f"session:{user}-{number}", put("k", "1"), (b"s", OWNER, user.encode()), messages=1)
    journal.flush()
    taken = {}
    for user in ("few", "many"):
        noted = cold.request_owned(user)
        sent = statements(cold)
        cold.erase([each.record for each in noted])
        cold.complete({each.record: each.version for each in cold.pending(names=[each.record for each in noted])})
        taken[user] = len(sent)
    assert taken["many"] == taken["few"]
    assert cold.pending() == []
    assert cold.owned("many") == []


def test_a_user_is_forgotten_while_an_archiver_holds_a_new_fork(
    postgres_url: str, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for the fork and held the source, for which the archiver waited: PostgreSQL ended one of the two."""
    cold = opened(postgres_url)
    journal = Journal(cold)
    journal.commit("session:z", put("k", "1"), (b"s", OWNER, b"u"))
    journal.flush()
    owned, looks, holds = erasure.owned, 0, threading.Event()

    def archiver() -> None:
        with cold.database.write(cold.namespace) as sql:
            record_index.lock(sql, ["session:fork"])
            holds.set()
            record_index.lock(sql, ["session:z"])

    with ThreadPoolExecutor() as pool:
        archiving = []

        def look(*given: Any) -> list[str]:
            nonlocal looks
            looks += 1
            found = owned(*given)
            if looks == 1:  # before it holds anything
                journal.commit("session:fork", put("k", "1"), (b"s", PARENT, b"session:z@1"))
                journal.flush()
            if looks == 2:
                archiving.append(pool.submit(archiver))
                assert holds.wait(10)
            return found

        monkeypatch.setattr(erasure, "owned", look)
        noted = cold.request_owned("u")
        archiving[0].result()
    assert {each.record for each in noted} == {"session:fork", "session:z"}
