"""The cold tier on each database. Law: every test has a namespace of its own, so that they can share a database."""

from __future__ import annotations

import multiprocessing
import os
import random
import sqlite3
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from below import logged_in
from sqlalchemy import LargeBinary, event, func, select, text, update

from distributed_state.cold import archive, auditing, bulk, erasure, record_index, tables
from distributed_state.cold.engine import Database
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Batch, Cursor, Sought, Wanted
from distributed_state.errors import ColdUnavailable, ConfigurationError, Conflict, InvalidValue, NotFound
from distributed_state.values import message_ranges
from distributed_state.values.journal import Happened, JournalEntry, Segment, State, pack, unpack
from distributed_state.values.model import DELETED, NEXT, OWNER, PARENT, PHASE, SEGMENTS, START
from tests.journals import EVERYTHING, Journal, put, rows, shown, statements

Opener = Callable[..., ColdStore]


# Opening


def test_the_migrations_make_the_tables_that_the_code_expects(real_migrations: None, cold: ColdStore) -> None:
    """Nothing is left for Alembic to change after its own migrations."""
    with cold._database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []


@pytest.mark.wide
def test_many_processes_migrate_an_empty_database_at_once(tmp_path: Path, servers: Any) -> None:
    """One does the work, the others wait for it; all register one archive."""
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(5) as pool:
        for url in (f"sqlite:///{tmp_path}/new.db", servers.database()):
            found = pool.starmap(_open_and_register, [(url, n) for n in range(5)], chunksize=1)
            assert len(set(found)) == 1


def _open_and_register(url: str, n: int) -> tuple[str, int]:
    store = ColdStore.open(url, "shared")
    try:
        return store.register(8 + n)
    finally:
        store.close()


def test_a_read_of_the_past_waits_no_longer_than_others(postgres_url: str, opened: Opener) -> None:
    """Only reads of whole pages of history have the limits of maintenance; both share the cursor's transaction."""
    cold = opened(postgres_url)

    def limit() -> Any:
        with cold._database.read() as connection:
            return connection.execute(text("SHOW statement_timeout")).scalar()

    assert cold.read_if(0, lambda cursor: True, limit, long=False) == [limit()] == ["10s"]
    assert cold.read_if(0, lambda cursor: True, limit, long=True) == ["10min"]
    assert cold.read_if(0, lambda cursor: False, limit, long=False) == []


def test_without_migrations_an_empty_database_is_refused(tmp_path: Path, postgres_url: str) -> None:
    """The message names the command that helps."""
    for url in ("memory", f"sqlite:///{tmp_path}/empty.db", postgres_url):
        with pytest.raises(ConfigurationError, match="distributed-state migrate"):
            ColdStore.open(url, "n", migrate=False)


def test_a_database_of_a_newer_release_is_refused(tmp_path: Path, postgres_url: str, opened: Opener) -> None:
    """An unknown revision is never migrated or used."""
    for url in (f"sqlite:///{tmp_path}/newer.db", postgres_url):
        with opened(url)._database.write() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        for migrate in (True, False):
            with pytest.raises(ConfigurationError, match="9999"):
                ColdStore.open(url, "n", migrate=migrate)


@pytest.mark.parametrize("revision", tables.UNRELEASED)
def test_tables_of_before_the_first_release_are_refused(
    tmp_path: Path, postgres_url: str, opened: Opener, revision: str
) -> None:
    """It says how what is in them is carried over."""
    for url in (f"sqlite:///{tmp_path}/before.db", postgres_url):
        with opened(url)._database.write() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = :r"), {"r": revision})
        for migrate in (True, False):
            with pytest.raises(ConfigurationError, match=rf"revision {revision}.*distributed-state export.*import"):
                ColdStore.open(url, "n", migrate=migrate)


def test_a_database_without_tables_is_not_given_any_unasked(tmp_path: Path, postgres_url: str) -> None:
    for url in (f"sqlite:///{tmp_path}/none.db", postgres_url):
        with pytest.raises(ConfigurationError, match="distributed-state migrate"):
            ColdStore.open(url, "n", migrate=False)


@pytest.mark.wide
def test_a_database_at_head_is_opened_without_alembic(tmp_path: Path, postgres_url: str, opened: Opener) -> None:
    """Only the revision is read; importing Alembic would cost more than all of the rest."""
    for url in (f"sqlite:///{tmp_path}/head.db", postgres_url):
        opened(url)
        program = f"""if True:
            import sys
            from distributed_state.cold.store import ColdStore
            ColdStore.open({url!r}, "n").close()
            assert "alembic" not in sys.modules"""
        spawned = multiprocessing.get_context("spawn").Process(target=exec, args=(program,))
        spawned.start()
        spawned.join()
        assert spawned.exitcode == 0


def test_a_wrong_url_is_a_configuration_error(tmp_path: Path, postgres_url: str) -> None:
    """What waiting cannot mend says what is wrong, and never the password."""
    (tmp_path / "text").write_text("this is no database, " * 100)
    wrong = ["nonsense", "nosuch://x", f"sqlite:///{tmp_path}/no/such/folder.db", f"sqlite:///{tmp_path}"]
    wrong += [f"sqlite:///{tmp_path}/text", postgres_url + "x", postgres_url + "?prepare_threshold=often"]
    wrong += [logged_in(postgres_url, "nobody:hunter2"), "mssql+nosuchdriver://u:hunter2@h/d"]
    for url in wrong:
        with pytest.raises(ConfigurationError) as caught:
            ColdStore.open(url, "n")
        assert "hunter2" not in str(caught.value)


def in_encoding(postgres_url: str, encoding: str) -> str:
    """The URL of a new database in this encoding."""
    name = f"{encoding.lower()}_{uuid.uuid4().hex}"
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0")
    return postgres_url.rpartition("/")[0] + f"/{name}"


def test_a_database_without_an_encoding_keeps_text_as_it_is(postgres_url: str, opened: Opener) -> None:
    """SQL_ASCII stores the bytes it is given, which are ours in UTF-8."""
    archive = in_encoding(postgres_url, "SQL_ASCII")
    journal = Journal(opened(archive))
    journal.commit("session:日本語", put("名", '"é"'), messages=2)
    journal.flush()
    assert journal.store.state_at("session:日本語", 1) == journal.states["session:日本語"]
    assert journal.store.names("") == ["session:日本語"]
    with pytest.raises(ConfigurationError, match="client_encoding"):  # the URL's own counts
        ColdStore.open(f"{archive}?client_encoding=nonsense", "n")


def test_a_database_that_cannot_hold_every_letter_is_refused(postgres_url: str) -> None:
    """Or a commit by an actor of another alphabet would be acknowledged, and end in quarantine."""
    with pytest.raises(ConfigurationError, match="encoding is LATIN1; create one in UTF8"):
        ColdStore.open(in_encoding(postgres_url, "LATIN1"), "n")


def test_a_wrong_password_is_a_configuration_error_without_the_password(tmp_path: Path) -> None:
    """The server's refusal is told as it is, under the URL with stars in it."""
    from distributed_state.programs.servers import postgres_server

    with postgres_server() as server:
        plain = server.url.replace("+psycopg", "")
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute("CREATE ROLE agent LOGIN PASSWORD 'right'")
        ColdStore.open(server.url, "n").close()
        with pytest.raises(ConfigurationError, match="password authentication failed") as caught:
            ColdStore.open(logged_in(server.url, "agent:hunter2"), "n")
        assert "hunter2" not in str(caught.value)


def test_a_role_that_may_not_create_tables_is_told_so(postgres_url: str, opened: Opener) -> None:
    """Missing rights are a configuration error, also for one table later on."""
    name = f"r{uuid.uuid4().hex[:8]}"
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'word'")
        connection.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    as_role = logged_in(postgres_url, f"{name}:word")
    with pytest.raises(ConfigurationError, match="permission denied"):
        ColdStore.open(as_role, "n")
    opened(postgres_url)
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"GRANT SELECT ON alembic_version TO {name}")
    with pytest.raises(ConfigurationError, match="permission denied"):
        opened(as_role).cursors()


@pytest.mark.wide
def test_a_server_that_is_away_is_unavailable_and_comes_back(servers: Any) -> None:
    """Neither opening nor using a store takes a stopped server for a wrong setting."""
    from distributed_state.programs.servers import postgres_server

    with postgres_server() as server:
        store = ColdStore.open(server.url, "n")
        journal = Journal(store)
        journal.commit("session:a", put("k", "1"))
        server.kill()
        with pytest.raises(ColdUnavailable):
            store.archive([journal.batch()])
        with pytest.raises(ColdUnavailable):
            ColdStore.open(server.url, "n")
        server.start()
        assert journal.flush() == {0}
        assert store.version("session:a") == 1
        store.close()


def test_a_locked_sqlite_file_is_unavailable_after_the_wait(tmp_path: Path, opened: Opener) -> None:
    """A writer that holds the file too long is not mistaken for a bug."""
    store = opened(f"sqlite:///{tmp_path}/locked.db")
    event.listen(store._database._engine, "checkout", lambda raw, *_: raw.execute("PRAGMA busy_timeout = 50"))
    other = sqlite3.connect(tmp_path / "locked.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ColdUnavailable, match="locked"):
        store.mint(0, None)
    other.execute("ROLLBACK")
    other.close()
    assert store.mint(0, None)


def test_prepared_statements_can_be_switched_off(shared_database: str, opened: Opener) -> None:
    """PgBouncer in transaction mode gives each transaction another server connection."""
    store = opened(shared_database + "?prepare_threshold=none")
    with store._database.read() as connection:
        assert connection.connection.driver_connection.prepare_threshold is None  # type: ignore[union-attr]


def test_a_forked_child_opens_connections_of_its_own(cold: ColdStore) -> None:
    """It drops the parent's without a word; the parent goes on."""
    journal = Journal(cold)
    journal.commit("session:a", put("k", "1"))
    journal.flush()
    child = os.fork()
    if child == 0:
        cold.abandon()
        os._exit(0 if cold.version("session:a") == 1 and journal.store.cursor(0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    journal.commit("session:a", put("k", "2"))
    assert journal.flush() == {0}


def test_the_doctor_gets_facts(cold: ColdStore, journal: Journal) -> None:
    """Revision, server and counts are there."""
    journal.commit("session:a", put("k", "1"))
    journal.flush()
    facts = cold.check()
    assert facts["revision"] == tables.HEAD
    assert facts["records"] == "1"
    assert facts["quarantined"] == "0"


# Cursors


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
    monkeypatch.setattr(archive, "_moved", lambda connection, namespace, batches: list(batches))
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
    """What a purge may have removed is not said to have never been."""
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
    """A missing version is told with those that exist."""
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
    with cold._database.write() as connection:
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
    add = bulk.add

    def refuses(connection: Any, table: Any, given: Any, *columns: Any) -> None:
        if any(b"poison" in (row[-1] or b"") for row in given if isinstance(row[-1], bytes)):
            raise ValueError("refused")
        add(connection, table, given, *columns)

    monkeypatch.setattr(bulk, "add", refuses)
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


# Purging


def test_a_purge_of_events_goes_by_time_in_steps(
    cold: ColdStore, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditing, "_TOGETHER", 10)
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
    seen: list[int] = []
    purged = cold.purge(1021, progress=seen.append)
    assert (purged.records, purged.changes, purged.messages, seen) == (1, 20, 0, [1])
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
    """Progress is told after each."""
    monkeypatch.setattr("distributed_state.cold.purging.CHUNK", 10)
    for n in range(25):
        journal.commit(f"session:{n}", put("k", "1"))
    journal.flush()
    seen: list[int] = []
    assert cold.purge(10**12, progress=seen.append).records == 25
    assert seen == [10, 20, 25]


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
    if cold._database.dialect == "sqlite" and not cold._database.memory:
        path = Path(cold._database._engine.url.database or "")
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


# Other databases


def test_a_database_without_upsert_gives_the_same(
    cold: ColdStore, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Existing rows are updated, new ones inserted."""
    monkeypatch.setattr(bulk, "_UPSERTS", {})
    for n in range(3):
        journal.commit("session:a", put("k", str(n)))
        journal.commit(f"session:{n}", put("k", str(n)))
        journal.flush()
    assert cold.version("session:a") == 3
    assert [cold.version(f"session:{n}") for n in range(3)] == [1, 1, 1]


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
        with cold._database.write() as connection:
            record_index.lock(connection, cold.namespace, ["session:fork"])
            holds.set()
            record_index.lock(connection, cold.namespace, ["session:z"])

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


def test_nothing_but_bytes_holds_what_users_wrote() -> None:
    """Text and JSON columns refuse some of what models write."""
    for table in tables.metadata.sorted_tables:
        assert all(isinstance(column.type, LargeBinary) for column in table.columns if column.name == "data")


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


def test_the_memory_database_serves_many_threads() -> None:
    """Its one connection is used by one thread at a time."""
    store = ColdStore.open("memory", "n")
    journals = [Journal(store, partition=n) for n in range(4)]

    def writes(journal: Journal) -> None:
        for n in range(30):
            journal.commit(f"session:{journal.partition}", put("k", str(n)))
            journal.flush()
            store.load(f"session:{journal.partition}", window=1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(writes, journals))
    assert [store.version(f"session:{n}") for n in range(4)] == [30] * 4
    with store._database.read() as connection:
        assert connection.execute(select(func.count()).select_from(tables.changes)).scalar() == 120
    store.close()


def test_a_database_is_named_without_its_password(tmp_path: Path) -> None:
    """The name goes into messages and logs."""
    assert "hunter2" not in Database("postgresql://u:hunter2@127.0.0.1:1/d").name


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
