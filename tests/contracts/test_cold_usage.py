"""The tokens of sessions in SQL: each turn counts once, on the day of its commit, by its session, owner and model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import text

from distributed_state.cold import archive, tables
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Wanted
from distributed_state.values.model import OWNER, REPAIR
from distributed_state.values.usage import Tokens, counted
from tests.journals import Journal, rows

DAY_MS = 86_400_000


def turn(journal: Journal, record: str, tokens: int, day: int, *, model: str = "gpt-5", **more: Any) -> Any:
    """A turn of a record, on a day."""
    fields = dict(journal.states[record].fields) if record in journal.states else {}
    operations = [(b"s", name, value) for name, value in counted(fields, {model: Tokens(1, tokens, 0)})]
    more = {"kind": "turn", "time_ms": day * DAY_MS + 5} | more
    return journal.commit(record, (b"s", OWNER, b"ada"), *operations, **more)


def days(cold: ColdStore, since: int = 0, owner: str | None = "ada") -> dict[str, int]:
    found = cold.usage(Wanted("session", 1, owner=owner), since * DAY_MS, [])
    assert found.tokens == sum(each.tokens for each in found.days.values())
    assert found.tokens == sum(each.tokens for each in found.models.values())
    return {day: each.tokens for day, each in found.days.items()}


def test_turns_add_up_by_day(cold: ColdStore, journal: Journal) -> None:
    turn(journal, "session:a", 1, day=0)
    turn(journal, "session:b", 10, day=0)
    turn(journal, "session:a", 100, day=0)
    assert journal.flush()
    turn(journal, "session:a", 1000, day=0, model="mini")
    turn(journal, "session:a", 10_000, day=31)
    assert journal.flush()
    assert days(cold) == {"1970-01-01": 1111, "1970-02-01": 10_000}
    assert days(cold, since=1) == {"1970-02-01": 10_000}
    assert days(cold, owner="bob") == {}
    assert len(rows(cold, tables.usage)) == 4


@pytest.mark.memory
def test_a_batch_that_two_archivers_bring_counts_once(cold: ColdStore, journal: Journal) -> None:
    for tokens in (1, 10, 100):
        turn(journal, "session:a", tokens, day=0)
    batch = journal.batch()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(cold.archive, [[batch]] * 4))
    cold.archive([batch])
    assert days(cold) == {"1970-01-01": 111}


def test_without_the_compare_and_set_it_would_count_again(
    cold: ColdStore, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the rows of changes are what stops a second time then, so they are removed."""
    monkeypatch.setattr(archive, "_moved", lambda sql, batches: list(batches))
    turn(journal, "session:a", 1, day=0)
    for _ in range(2):
        cold.archive([journal.batch()])
        with cold.database.write() as sql:
            sql.execute(text("DELETE FROM changes"))
            sql.execute(text("UPDATE records SET version = 0"))
    assert days(cold) == {"1970-01-01": 2}


def test_only_turns_count(cold: ColdStore, journal: Journal) -> None:
    """A repair that brings a whole state has the field, too."""
    turn(journal, "session:a", 1, day=0)
    turn(journal, "session:a", 10, day=0, kind=REPAIR)
    turn(journal, "session:a", 100, day=0, kind="set")
    journal.flush()
    assert days(cold) == {"1970-01-01": 1}


def test_an_entry_with_other_counts_is_put_in_quarantine(cold: ColdStore, journal: Journal) -> None:
    journal.commit("session:a", (b"s", b"#ugpt-5", b"many"), kind="turn")
    journal.commit("session:b", (b"s", b"#u" + b"m" * 401, b"1 1 1 1 1 1"), kind="turn")
    turn(journal, "session:c", 1, day=0)
    journal.flush()
    assert [each.record for each in cold.quarantined()] == ["session:a", "session:b"]
    assert days(cold) == {"1970-01-01": 1}


def test_an_erased_session_has_no_rows(cold: ColdStore, journal: Journal) -> None:
    turn(journal, "session:a", 1, day=0)
    turn(journal, "session:b", 10, day=0)
    journal.flush()
    cold.erase(["session:a"])
    assert days(cold) == {"1970-01-01": 10}
    assert [row.input_tokens for row in rows(cold, tables.usage)] == [10]
