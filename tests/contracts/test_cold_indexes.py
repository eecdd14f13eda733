"""How records stand in SQL: their indexes change once a minute, and rows are found by keys without statistics.

PostgreSQL has no statistics after a restore, for one, when maintenance may be due.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from distributed_state.cold import connections, record_index, tables
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Wanted
from tests.journals import Journal, put, rows

LATER = 10**12
_STAYED = "SELECT relname, n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname IN ('records', 'cursors')"
_SEEN = "SELECT sum(n_tup_del)::int, sum(seq_tup_read)::int FROM pg_stat_user_tables WHERE relname = 'changes'"


def order(cold: ColdStore, limit: int = 50) -> list[str]:
    """The ids of all sessions, page by page."""
    found: list[str] = []
    after = None
    while page := cold.listing(Wanted("session", limit, after=after, deleted=True)):
        found += [row.record.partition(":")[2] for row in page]
        after = page[-1].cursor
    return found


def test_a_record_moves_to_the_front_of_listings_once_a_minute(cold: ColdStore, journal: Journal) -> None:
    """Its row says when it changed, all the while."""
    journal.commit("session:a", put("n", "1"), time_ms=1_000)
    journal.commit("session:b", put("n", "1"), time_ms=2_000)
    journal.flush()
    journal.commit("session:a", put("n", "2"), time_ms=60_999)
    journal.flush()
    assert order(cold) == order(cold, limit=1) == ["b", "a"]
    page = cold.listing(Wanted("session", 9))
    assert [row.updated_ms for row in page] == [2_000, 60_999]
    journal.commit("session:a", put("n", "3"), time_ms=61_000)
    journal.flush()
    assert order(cold) == order(cold, limit=1) == ["a", "b"]
    journal.commit("session:b", put("n", "2"), time_ms=61_500)
    journal.now = 61_600
    journal.delete("session:b")
    journal.flush()
    assert order(cold) == ["b", "a"], "a deletion is in the indexes all the same"


def test_all_that_changed_lately_is_found_although_its_place_in_listings_is_older(
    cold: ColdStore, journal: Journal
) -> None:
    """Whoever starts a partition that lost its end looks for what has to leave Redis."""
    for record, first, last in (("session:a", 100_000, 159_999), ("session:b", 90_000, 90_000)):
        journal.commit(record, put("n", "1"), time_ms=first)
        journal.commit(record, put("n", "2"), time_ms=last)
    journal.flush()
    assert [row.listed_ms for row in rows(cold, tables.records, record="session:a")] == [100_000]
    assert cold.changed_since(journal.partition, 159_999).records == ["session:a"]
    assert cold.changed_since(journal.partition, 160_000).records == []


@pytest.mark.wide
@pytest.mark.parametrize("listed_ms", [60_000, 0], ids=["once a minute", "control"])
def test_an_update_leaves_the_indexes_alone(
    postgres_url: str, opened: Callable[..., ColdStore], monkeypatch: pytest.MonkeyPatch, listed_ms: int
) -> None:
    """It is a HOT update, of records and cursors; of records none would be if each moved to the front of listings."""
    monkeypatch.setattr(record_index, "LISTED_MS", listed_ms)
    cold = opened(postgres_url)
    journal = Journal(cold)
    for _ in range(12):
        for number in range(20):
            journal.commit(f"session:s{number}", put("n", "1"))
        journal.flush()
    cold.close()
    found: dict[str, tuple[int, int]] = {}
    deadline = time.monotonic() + 20
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
        while found.get("records", (0, 0))[0] < 11 * 20 and time.monotonic() < deadline:
            found = {name: (all_, hot) for name, all_, hot in connection.execute(_STAYED)}
            time.sleep(0.02)
    updated, stayed = found["records"]
    assert updated == 11 * 20
    assert stayed >= 0.9 * updated if listed_ms else stayed == 0
    assert found["cursors"][1] >= 11


# Without statistics


def compact(cold: ColdStore) -> int:
    after: int | None = 0
    packed = 0
    while after is not None:
        found, after = cold.compact(LATER, after=after)
        packed += found.changes
    return packed


def purge(cold: ColdStore) -> int:
    return cold.purge(LATER).changes


def seen(url: str, removed: int) -> int:
    """How many rows of `changes` were read one after the other, once it is known that so many were removed."""
    deadline = time.monotonic() + 20
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        while True:
            row: Any = connection.execute(_SEEN).fetchone()
            if row[0] >= removed:
                return int(row[1])
            assert time.monotonic() < deadline, f"{row[0]} of {removed} rows were removed"
            time.sleep(0.02)


@pytest.mark.parametrize("by_keys", [True, False], ids=["by keys", "control"])
@pytest.mark.parametrize("work", [compact, purge])
def test_maintenance_reads_no_whole_table(
    postgres_url: str,
    opened: Callable[..., ColdStore],
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[ColdStore], int],
    by_keys: bool,
) -> None:
    """Of thirty records with twenty changes each; PostgreSQL would rather read them all, at this size too."""
    if not by_keys:
        monkeypatch.setattr(connections, "_BY_KEYS", {})
    cold = opened(postgres_url)
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("ALTER TABLE changes SET (autovacuum_enabled = off)")
    journal = Journal(cold)
    for _ in range(20):
        for number in range(30):
            journal.commit(f"session:s{number}", put("n", "1"))
        journal.flush()
    removed = work(cold)
    cold.close()
    read = seen(postgres_url, removed)
    assert (read == 0) if by_keys else read > 0
