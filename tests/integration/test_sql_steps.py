"""What SQLite does for a question about few rows. Law: it does not grow with what others have.

PostgreSQL plans by what it knows of the tables; SQLite by guesses, of which one made each recovery look at all changes
of the namespace for each commit that a writer remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import FromClause, Join, and_, event, join

from distributed_state.cold import purging, remembered, tables
from distributed_state.cold.store import ColdStore
from tests.integration.conftest import Opener
from tests.journals import Journal, put

FEW, MANY = 5, 50
ASKED = "session:asked"


def filled(opened: Opener, tmp_path: Path, others: int) -> Journal:
    """An archive of one record that is asked for and of so many others; some of it is in blocks."""
    journal = Journal(opened(f"sqlite:///{tmp_path}/{others}.db", snapshot_every=10))
    for record in [ASKED, *(f"session:other{number}" for number in range(others))]:
        for number in range(50):
            journal.commit(record, put("k", f"{number}"), messages=1)
        journal.flush()
    after: int | None = 0
    while after is not None:
        _, after = journal.store.compact(journal.now - 10, after=after)
    for _ in range(30):
        journal.commit(ASKED, put("k", "v"), messages=1)
    return journal


def steps(store: ColdStore, ask: Callable[[], object]) -> int:
    """How many instructions of SQLite's machine a question takes, in tens."""
    engine = store._database._engine
    count = 0

    def one() -> int:
        nonlocal count
        count += 1
        return 0

    def begin(dbapi: object, *_: object) -> None:
        dbapi.set_progress_handler(one, 10)  # type: ignore[attr-defined]

    event.listen(engine, "checkout", begin)
    try:
        ask()
    finally:
        event.remove(engine, "checkout", begin)
    return count


def purge(journal: Journal) -> None:
    with journal.store._database.write() as connection:
        purging.purge(connection, journal.store.namespace, [ASKED], journal.now, keep=10)


QUESTIONS: dict[str, Callable[[Journal], object]] = {
    "known": lambda journal: journal.store.known(0, journal.epoch, journal.pending),
    "lacking": lambda journal: journal.store.lacking(0, journal.epoch, journal.pending),
    "archive": lambda journal: journal.flush(),
    "load": lambda journal: journal.store.load(ASKED, window=20),
    "state_at": lambda journal: journal.store.state_at(ASKED, 25),
    "step_back": lambda journal: journal.store.step_back(ASKED, 30, 3),
    "history": lambda journal: journal.store.history(ASKED, limit=20),
    "purge": purge,
    "erase": lambda journal: journal.store.erase([ASKED]),
}


def asked(opened: Opener, tmp_path: Path, question: str) -> tuple[int, int]:
    """What a question costs among few records, and among ten times as many."""
    few, many = (filled(opened, tmp_path, others) for others in (FEW, MANY))
    return steps(few.store, lambda: QUESTIONS[question](few)), steps(many.store, lambda: QUESTIONS[question](many))


@pytest.mark.wide
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_about_one_record_costs_the_same_among_many(opened: Opener, tmp_path: Path, question: str) -> None:
    few, many = asked(opened, tmp_path, question)
    assert few > 5
    assert many < 1.3 * few


def test_without_its_order_a_join_looks_at_everything(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    r, c = tables.records.c, tables.changes.c

    def inner(namespace: str, wanted: FromClause) -> Join:
        named = join(wanted, tables.records, and_(r.namespace == namespace, r.record == wanted.c.record))
        return named.join(tables.changes, and_(c.record == r.key, c.version == wanted.c.version))

    monkeypatch.setattr(remembered, "_changes", inner)
    few, many = asked(opened, tmp_path, "lacking")
    assert many > 2 * few
