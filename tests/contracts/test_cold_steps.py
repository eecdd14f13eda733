"""What SQLite does for a question about few rows. Law: it does not grow with what others have.

PostgreSQL plans by what it knows of the tables; SQLite by guesses, of which one made each recovery look at all changes
of the namespace for each commit that a writer remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import FromClause, Join, and_, event, join

from distributed_state.cold import listings, maintenance, record_history, tables
from distributed_state.cold.engine import Sql
from distributed_state.cold.record_items import Range
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Wanted
from distributed_state.values.model import ITEMS
from tests.journals import Journal, put

Opener = Callable[..., ColdStore]

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
    engine = store.database._engine
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
    with journal.store.database.write(journal.store.namespace) as sql:
        maintenance.purge(sql, [ASKED], journal.now, keep=10)


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


@pytest.fixture
def paged(opened: Opener, tmp_path: Path) -> ColdStore:
    """An archive of a record with 2,000 items, put at two versions, and of 1,000 records with a tag."""
    journal = Journal(opened(f"sqlite:///{tmp_path}/a.db"))
    for half in (0, 1):
        puts = [(b"p", b"x\0k%04d" % number, b"v") for number in range(half, 2000, 2)]
        journal.commit(ASKED, (b"s", ITEMS, b"1"), *puts)
    for number in range(1000):
        journal.commit(f"session:p{number:04}", put("k", "v"), (b"s", b"##run:r1", b"1"))
        journal.now += 60_000
    journal.commit(ASKED, put("k", "v"))
    journal.flush()
    return journal.store


PAGES: dict[str, Callable[[ColdStore, int], object]] = {
    "items": lambda store, at: store.list_items(ASKED, None, Range(b"x", after=b"k%04d" % (2 * at)), 100, 10**6),
    "items of the past": lambda store, at: store.list_items(
        ASKED, 2, Range(b"x", after=b"k%04d" % (2 * at)), 100, 10**6, exact=True
    ),
    "items backwards": lambda store, at: store.list_items(
        ASKED, 2, Range(b"x", before=b"k%04d" % (2000 - 2 * at), reverse=True), 100, 10**6
    ),
    "items of a prefix": lambda store, at: store.list_items(
        ASKED, 2, Range(b"x", prefix=b"k", before=b"l", after=b"k%04d" % (2 * at)), 100, 10**6
    ),
    "records of a prefix": lambda store, at: store.listing(
        Wanted("session", 50, prefix="p", after=listings._cursor(f"session:p{at:04}"))
    ),
    "records with a tag": lambda store, at: store.listing(
        Wanted("session", 50, tags=("run:r1",), after=listings._cursor(f"session:p{at:04}"))
    ),
}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_costs_the_same_wherever_it_begins(paged: ColdStore, page: str) -> None:
    """Not what lies before it, nor what lies between its own rows and its first one."""
    cost = [steps(paged, lambda at=at: PAGES[page](paged, at)) for at in (10, 400, 800)]  # type: ignore[misc]
    assert min(cost) > 50
    assert max(cost) < 1.3 * min(cost)


def test_a_page_by_time_costs_the_same_wherever_it_begins(paged: ColdStore) -> None:
    def wanted(limit: int, after: str | None = None) -> Wanted:
        return Wanted("session", limit, changed_to_ms=10**13, after=after)

    cursors = [paged.listing(wanted(at))[-1].cursor for at in (10, 400, 800)]
    cost = [steps(paged, lambda at=at: paged.listing(wanted(50, at))) for at in cursors]  # type: ignore[misc]
    assert max(cost) < 1.3 * min(cost)


def test_a_page_of_items_costs_by_its_size(paged: ColdStore) -> None:
    first, whole = (
        steps(paged, lambda limit=limit: paged.list_items(ASKED, 2, Range(b"x"), limit, 10**6))  # type: ignore[misc]
        for limit in (100, 1000)
    )
    assert whole < 12 * first


def test_without_its_order_a_join_looks_at_everything(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    r, c = tables.records.c, tables.changes.c

    def inner(sql: Sql, wanted: FromClause) -> Join:
        named = join(wanted, tables.records, and_(r.namespace == sql.namespace, r.record == wanted.c.record))
        return named.join(tables.changes, and_(c.record == r.key, c.version == wanted.c.version))

    monkeypatch.setattr(record_history, "_changes", inner)
    few, many = asked(opened, tmp_path, "lacking")
    assert many > 2 * few
