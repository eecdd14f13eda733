"""SQL refuses a row, or has no place for it: the rows of other records are archived."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from sqlalchemy import text

from distributed_state import ConfigurationError
from distributed_state.cold.aside import ArchivingStopped
from distributed_state.cold.engine import Database
from distributed_state.cold.store import ColdStore
from distributed_state.values.journal import State
from distributed_state.values.model import OWNER, PHASE
from tests.contracts.test_cold_opening import in_encoding
from tests.journals import Journal, put

Opener = Callable[..., ColdStore]
DICE = Random(7)
LONG = "".join(chr(DICE.randrange(0x4E00, 0x9FFF)) for _ in range(1_000))
MALLORY = (b"s", OWNER, b"mallory")
ITEM = (b"p", b"notes\0k", b"1")
REFUSES = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not him' {}; END $$;
CREATE TRIGGER refuse BEFORE INSERT ON {} FOR EACH ROW {} EXECUTE FUNCTION refuse()
"""
FULL = "USING ERRCODE = 'disk_full'"
# What an owner of the database may do to its tables, and the commit that they do not take then.
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "an index row too long": ("CREATE INDEX actors ON changes (actor)", "index row size", {"actor": LONG}),
    "a constraint": ("ALTER TABLE records ADD CHECK (owner <> 'mallory')", "CheckViolation|violates check", {}),
    "a unique index": ("CREATE UNIQUE INDEX owners ON records (owner, phase)", "duplicate key", {}),
    "a value out of range": (
        "ALTER TABLE changes ADD COLUMN short smallint GENERATED ALWAYS AS (token::smallint) STORED",
        "smallint out of range",
        {"token": 70_000},
    ),
    "a trigger": (REFUSES.format("", "records", "WHEN (NEW.owner = 'mallory')"), "not him", {}),
}


def execute(cold: ColdStore, statements: str) -> None:
    with cold.database.write() as connection:
        connection.execute(text(statements))


def surrounded(journal: Journal, **other: Any) -> None:
    """Commits to one record, and among them one to another record, which is refused."""
    for n in range(9):
        journal.commit("session:good", put("k", str(n)), messages=1)
        if n == 5:
            journal.commit("session:bad", put("k", "1"), MALLORY, (b"s", PHASE, b"here"), **other)


def require_one_refused(cold: ColdStore, reason: str) -> None:
    (row,) = cold.quarantined()
    assert (row.record, row.version) == ("session:bad", 1)
    assert cold.version("session:good") == 9
    loaded = cold.load("session:good", window=100)
    assert loaded
    assert len(loaded.messages) == 9
    assert loaded.state.fields[b"k"] == b"8"
    assert re.search(reason, row.reason), row.reason


@pytest.mark.parametrize("case", ROWS)
def test_a_row_that_postgresql_refuses_is_quarantined_and_the_others_are_archived(
    postgres_url: str, opened: Opener, case: str
) -> None:
    """Wherever it is refused: the table of the records was no part of what is bisected."""
    change, reason, other = ROWS[case]
    cold = opened(postgres_url, snapshot_every=2)
    journal = Journal(cold)
    if case == "a unique index":
        journal.commit("session:first", MALLORY, (b"s", PHASE, b"here"))
        journal.flush()
    execute(cold, change)
    surrounded(journal, **other)
    journal.flush()
    require_one_refused(cold, reason)
    journal.commit("session:good", put("k", "after"))
    journal.flush()
    assert cold.version("session:good") == 10


@pytest.mark.parametrize("way", ["database", "connection"])
def test_a_letter_that_the_encoding_lacks_puts_its_own_commit_aside(
    postgres_url: str, opened: Opener, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A proxy may hide that the database is in LATIN1, and a URL may ask for a connection in it."""
    monkeypatch.setattr(Database, "_require_unicode", lambda *_: None)
    url = in_encoding(postgres_url, "LATIN1") if way == "database" else f"{postgres_url}?client_encoding=latin1"
    cold = opened(url)
    journal = Journal(cold)
    for n, record in enumerate(["session:good", "session:日本", "session:café", "session:good", "session:bad"]):
        journal.commit(record, put("k", f'"日本 {n}"'), **({"actor": "日本"} if record == "session:bad" else {}))
    journal.tell(b"1 a client:\xe6\x97\xa5")
    journal.flush()
    assert (cold.version("session:good"), cold.version("session:café")) == (2, 1)
    assert sorted(row.record for row in cold.quarantined()) == [
        "client:\\u65e5",
        "session:\\u65e5\\u672c",
        "session:bad",
    ]
    assert all("encod" in row.reason for row in cold.quarantined())


def test_a_database_without_an_encoding_takes_every_letter(postgres_url: str, opened: Opener) -> None:
    cold = opened(in_encoding(postgres_url, "SQL_ASCII"))
    journal = Journal(cold)
    journal.commit("session:日本", put("k", "1"), (b"s", PHASE, "é日本".encode()), actor="日本")
    journal.tell(b"1 a client:\xe6\x97\xa5")
    journal.flush()
    assert (cold.version("session:日本"), cold.quarantined()) == (1, [])


def test_a_database_in_another_encoding_is_refused_behind_a_proxy_that_does_not_say_so(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psycopg._connection_info.ConnectionInfo.parameter_status", lambda *_: None)
    with pytest.raises(ConfigurationError, match="encoding is LATIN1; create one in UTF8"):
        ColdStore.open(in_encoding(postgres_url, "LATIN1"), "n")
    ColdStore.open(postgres_url, "n").close()


def test_a_row_that_sqlite_refuses_is_quarantined_and_the_others_are_archived(tmp_path: Path, opened: Opener) -> None:
    cold = opened(f"sqlite:///{tmp_path}/cold.db", snapshot_every=2)
    said = "SELECT RAISE(ABORT, 'not him')"
    execute(cold, f"CREATE TRIGGER no BEFORE INSERT ON records WHEN NEW.owner = 'mallory' BEGIN {said}; END")
    journal = Journal(cold)
    surrounded(journal)
    journal.flush()
    require_one_refused(cold, "not him")


@pytest.mark.parametrize("kind", ["memory", "postgres"])
def test_a_refused_version_is_used_up_and_what_it_replaced_is_set_aside(
    request: pytest.FixtureRequest, opened: Opener, kind: str
) -> None:
    """Also where the first commit of a new epoch is the refused one."""
    cold = opened(request.getfixturevalue("postgres_url") if kind == "postgres" else kind)
    journal = Journal(cold)
    for n in range(4):
        journal.commit("session:a", put("k", str(n)))
    journal.flush()
    old = journal.epoch
    journal.renew()
    journal.states["session:a"] = State(journal.epoch, 2, journal.past["session:a", 2])
    poison = journal.commit("session:a", put("k", "refused"))
    if cold.database.dialect == "sqlite":
        refused = f"NEW.event = '{poison.event}' BEGIN SELECT RAISE(ABORT, 'no'); END"
        execute(cold, f"CREATE TRIGGER no BEFORE INSERT ON changes WHEN {refused}")
    else:
        execute(cold, f"ALTER TABLE changes ADD CHECK (event <> '{poison.event}') NOT VALID")
    journal.commit("session:a", put("k", "after"))
    journal.flush()
    loaded = cold.load("session:a", window=0)
    assert loaded
    assert (loaded.state.version, loaded.state.fields) == (4, {b"k": b"after"})
    aside = sorted((row.version, row.epoch) for row in cold.quarantined())
    assert aside == sorted([(3, old), (4, old), (3, journal.epoch)])


def test_a_branch_that_sql_refuses_is_quarantined_and_those_of_other_records_are_kept(
    postgres_url: str, opened: Opener
) -> None:
    """Else its partition could not start again after a failover."""
    cold = opened(postgres_url)
    journal = Journal(cold)
    execute(cold, "ALTER TABLE branches ADD CHECK (actor <> 'mallory')")
    closed = journal.epoch
    lost = [journal.commit("session:good", put("k", "1")), journal.commit("session:bad", actor="mallory", messages=1)]
    journal.renew()
    (kept,) = cold.branches.keep(journal.partition, closed, lost, "failover")
    assert (kept.record, kept.commits) == ("session:good", 1)
    (row,) = cold.quarantined()
    assert (row.record, row.version, row.event) == ("session:bad", 1, lost[1].event)
    assert "violates check" in row.reason


# A place in SQL


def test_where_sql_has_no_place_its_partition_waits_and_the_others_are_archived(
    postgres_url: str, opened: Opener
) -> None:
    """Nothing is put aside: it is archived once there is room, in order, and once."""
    cold = opened(postgres_url)
    full, other = Journal(cold, partition=0), Journal(cold, partition=1)
    execute(cold, REFUSES.format(FULL, "items", ""))
    for journal in (full, other):
        for n in range(6):
            journal.commit(
                f"session:{journal.partition}", put("k", str(n)), *([ITEM] if n == 4 and journal is full else [])
            )
    with pytest.raises(ArchivingStopped, match=r"entry 5 \(session:0 version 5\): .*not him") as caught:
        cold.archive([full.batch(), other.batch()])
    assert {each: offset for each, (offset, _) in caught.value.places.items()} == {0: 5}
    assert (cold.version("session:0"), cold.version("session:1")) == (None, None)
    execute(cold, "DROP TRIGGER refuse ON items")
    assert cold.archive([full.batch(), other.batch()]).keys() == {0, 1}
    assert (cold.version("session:0"), cold.version("session:1"), cold.quarantined()) == (6, 6, [])
