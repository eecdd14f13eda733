"""Maintenance of a PostgreSQL that has no statistics yet, as after a restore: rows are found by their keys."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from distributed_state.cold import dialects
from distributed_state.cold.store import ColdStore
from tests.journals import Journal, put

LATER = 10**12
_SEEN = "SELECT sum(n_tup_del)::int, sum(seq_tup_read)::int FROM pg_stat_user_tables WHERE relname = 'changes'"


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
        monkeypatch.setattr(dialects, "_BY_KEYS", {})
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
