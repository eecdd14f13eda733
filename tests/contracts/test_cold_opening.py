"""How the cold tier opens a database, and what it says of one that it cannot use."""

from __future__ import annotations

import multiprocessing
import os
import re
import sqlite3
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from below import logged_in
from sqlalchemy import MetaData, event, func, inspect, select, text, update

from distributed_state.cold import opening, tables
from distributed_state.cold.engine import Database
from distributed_state.cold.opening import Known
from distributed_state.cold.store import ColdStore
from distributed_state.errors import ColdUnavailable, ConfigurationError
from distributed_state.programs.servers import free_port
from tests.journals import Journal, put

Opener = Callable[..., ColdStore]


# Opening


def test_the_migrations_make_the_tables_that_the_code_expects(real_migrations: None, cold: ColdStore) -> None:
    """Nothing is left for Alembic to change after its own migrations."""
    with cold.database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection.connection), tables.metadata) == []


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
        with cold.database.read() as connection:
            return connection.execute(text("SHOW statement_timeout")).scalar()

    assert cold.read_if(0, lambda cursor: True, limit, long=False) == [limit()] == ["10s"]
    assert cold.read_if(0, lambda cursor: True, limit, long=True) == ["10min"]
    assert cold.read_if(0, lambda cursor: False, limit, long=False) == []


def test_without_migrations_an_empty_database_is_refused(tmp_path: Path, postgres_url: str) -> None:
    """The message names the command that helps."""
    for url in ("memory", f"sqlite:///{tmp_path}/empty.db", postgres_url):
        with pytest.raises(ConfigurationError, match="distributed-state migrate"):
            ColdStore.open(url, "n", migrate=False)


@pytest.mark.parametrize("migrate", [True, False])
def test_a_database_of_a_newer_release_is_used_while_it_has_what_this_one_needs(
    tmp_path: Path, postgres_url: str, opened: Opener, migrate: bool
) -> None:
    """So a worker of the release before may start, at any time, until a contraction removes what it needs."""
    for url in (f"sqlite:///{tmp_path}/newer.db", postgres_url):
        with opened(url).database.write() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
            connection.execute(text("ALTER TABLE records ADD COLUMN of_the_next INTEGER"))
            connection.execute(text("ALTER TABLE records ADD COLUMN counted INTEGER NOT NULL DEFAULT 0"))
            connection.execute(text("CREATE TABLE of_the_next (id INTEGER NOT NULL)"))
        ColdStore.open(url, "n", migrate=migrate).close()
        with opened(url).database.read() as sql:
            assert opening.revision(sql) == "9999", "an old release migrates nothing back"


CONTRACTED = {
    "ALTER TABLE access_tokens DROP COLUMN made_by": "access_tokens.made_by",
    "DROP TABLE quarantine": "quarantine",
    "ALTER TABLE tags ADD COLUMN of_the_next INTEGER NOT NULL": "tags without a required of_the_next",
}


@pytest.mark.parametrize("change", CONTRACTED)
def test_a_database_of_a_newer_release_is_refused_without_what_this_one_needs(
    tmp_path: Path, postgres_url: str, opened: Opener, change: str
) -> None:
    """An unknown revision is never migrated."""
    required = change.endswith("NOT NULL")
    for url in (f"sqlite:///{tmp_path}/newer.db", postgres_url):
        if required and url.startswith("sqlite"):
            continue  # it adds no such column to a table that exists
        with opened(url).database.write() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
            connection.execute(text(change))
        for migrate in (True, False):
            with pytest.raises(
                ConfigurationError, match=rf"9999.*needs {CONTRACTED[change]}: install the newer release"
            ):
                ColdStore.open(url, "n", migrate=migrate)


def test_every_migration_but_contractions_leaves_what_the_release_before_needs(
    tmp_path: Path, postgres_url: str, real_migrations: None
) -> None:
    """Its workers find all of their tables and columns, and can leave out those that they do not know."""
    for url in (f"sqlite:///{tmp_path}/each.db", postgres_url):
        database = Database(url, 10)
        before: MetaData | None = None
        for revision in tables.REVISIONS:
            with database.long_write() as sql:
                opening._upgrade(sql.connection, revision)
                if before is not None and revision not in tables.CONTRACTS:
                    assert opening.lacking(inspect(sql.connection), before) == [], revision
                before = MetaData()
                before.reflect(sql.connection)
        database.close()


def test_a_contraction_waits_for_its_command(
    tmp_path: Path, postgres_url: str, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that is older is brought up to the revision before it, and a new one has it."""
    monkeypatch.setattr(opening, "CONTRACTS", {"3": "0.2"})
    head = tables.HEAD
    found = {each: opening.expanded(each) for each in (None, "1", "2", "3", head, "9999")}
    assert found == {None: head, "1": "2", "2": "2", "3": head, head: head, "9999": "9999"}
    assert [opening.pending(each) for each in (None, "1", "3", "9999")] == [{}, {"3": "0.2"}, {}, {}]
    for url in (f"sqlite:///{tmp_path}/each.db", postgres_url):
        database = Database(url, 10)
        with database.long_write() as sql:
            opening._upgrade(sql.connection, "1")
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=r"revision 2.*`distributed-state migrate --contract` of the"):
                ColdStore.open(url, "n")
        opening.migrate(database, contract=True)
        database.close()
        assert opened(url).database.opened


@pytest.mark.parametrize("revision", tables.UNRELEASED)
def test_tables_of_before_the_first_release_are_refused(
    tmp_path: Path, postgres_url: str, opened: Opener, revision: str
) -> None:
    """It says how what is in them is carried over."""
    for url in (f"sqlite:///{tmp_path}/before.db", postgres_url):
        with opened(url).database.write() as connection:
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


def test_a_wrong_password_is_a_configuration_error_without_the_password(postgres_url: str) -> None:
    """The server's refusal is told as it is, under the URL with stars in it."""
    role = f"r{uuid.uuid4().hex[:8]}"
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'right'")
    with pytest.raises(ConfigurationError, match="distributed-state migrate"):  # it is let in
        ColdStore.open(logged_in(postgres_url, f"{role}:right"), "n", migrate=False)
    with pytest.raises(ConfigurationError, match="password authentication failed") as caught:
        ColdStore.open(logged_in(postgres_url, f"{role}:hunter2"), "n")
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
    event.listen(store.database._engine, "checkout", lambda raw, *_: raw.execute("PRAGMA busy_timeout = 50"))
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
    with store.database.read() as connection:
        assert connection.connection.connection.driver_connection.prepare_threshold is None  # type: ignore[union-attr]


@pytest.mark.memory
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
    with store.database.read() as connection:
        assert connection.execute(select(func.count()).select_from(tables.changes)).scalar() == 120
    store.close()


def test_a_database_is_named_without_its_password(tmp_path: Path) -> None:
    """The name goes into messages and logs."""
    assert "hunter2" not in Database("postgresql://u:hunter2@127.0.0.1:1/d").name


BOTH = pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)  # one in memory is another each time


@BOTH
def test_a_database_that_is_opened_later_must_be_the_one_that_is_known(url: str, opened: Opener) -> None:
    store = opened(url, "later" + uuid.uuid4().hex[:8])
    archive_id, partitions = store.register(8)
    known = Known(store.namespace, archive_id, partitions)
    journal = Journal(store)
    journal.commit("session:a", put("k", "1"))
    journal.flush()
    later = ColdStore.open_later(url, known)
    assert later.version("session:a") == 1
    assert later.away == ""
    later.close()
    for wrong, why in (
        (replace(known, archive_id="another"), "expected 'another'"),
        (replace(known, partitions=9), "archive is"),
        (replace(known, namespace="nobody"), "has no namespace 'nobody'"),
    ):
        later = ColdStore.open_later(url, wrong)
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=why):
                later.version("session:a")
        later.close()


def test_a_database_that_is_away_is_unavailable_until_it_is_there() -> None:
    later = ColdStore.open_later(f"postgresql://u:hunter2@127.0.0.1:{free_port()}/d", Known("n", "id", 8), timeout=0.1)
    with pytest.raises(ColdUnavailable):
        later.version("session:a")
    assert later.away != ""
    assert "hunter2" not in later.away
    later.close()


@BOTH
def test_a_store_that_has_the_database_alone_keeps_others_out_until_it_is_closed(url: str, opened: Opener) -> None:
    namespace = "alone" + uuid.uuid4().hex[:8]
    first = ColdStore.open(url, namespace, alone=True)
    with pytest.raises(ConfigurationError, match="another store has it open"):
        ColdStore.open(url, namespace, alone=True)
    first.close()
    opened(url, namespace, alone=True)


def test_an_interval_of_snapshots_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="snapshot_every is 0"):
        ColdStore.open("memory", "n", snapshot_every=0)


@BOTH
def test_a_namespace_of_another_layout_is_refused(url: str, opened: Opener) -> None:
    store = opened(url)
    first = store.register(8)
    assert store.register(16) == first, "what was registered first counts"
    table = tables.namespaces
    with store.database.write() as connection:
        connection.execute(update(table).where(table.c.namespace == store.namespace).values(layout=99))
    with pytest.raises(ConfigurationError, match="has layout 99"):
        store.register(8)


def unnamed(text: str) -> list[str]:
    """The public methods of the cold tier that this text does not call."""
    public = [name for name in vars(ColdStore) if not name.startswith("_")]
    return [name for name in public if not re.search(rf"(cold|store|Store|later)\.{name}\b", text)]


def test_the_contract_names_every_method_of_the_cold_tier() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_cold_*.py"))
    assert len(vars(ColdStore)) > 60
    assert unnamed(text) == []
    assert unnamed(text.replace("cold.set_aside(", "")) == ["set_aside"], "a method that no test calls is noticed"
