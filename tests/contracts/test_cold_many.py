"""Any number of records, partitions or rows goes in statements of bounded size.

Law: the parameters of a statement do not grow with what a caller gives. SQLite takes at most 32,766 of them, PostgreSQL
65,535.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import and_, bindparam, event, update

from distributed_state.cold import engine, record_index, tables
from distributed_state.cold.search_index import Stored, Write
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Sought, Wanted
from distributed_state.search.querying import checked
from distributed_state.values.journal import Segment
from distributed_state.values.search import KINDS, SearchQuery, tag_field
from tests.journals import Journal, put, rows

FEW, MANY = 3, 40
EVERY_MS = 2**53
Call = Callable[[], Any]


@contextmanager
def parameters(store: ColdStore) -> Iterator[list[tuple[str, Any]]]:
    """The statements that the store sends during the block, each with its parameters, or a list of them."""
    sent: list[tuple[str, Any]] = []

    def note(*arguments: Any) -> None:
        sent.append(arguments[2:4])

    event.listen(store.database._engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(store.database._engine, "before_cursor_execute", note)


def largest(store: ColdStore, call: Call) -> int:
    """The greatest number of parameters of a statement that a call sends."""
    with parameters(store) as sent:
        call()
    return max(len(given[0] if isinstance(given, list) else given) for _, given in sent)


# What each prepares for a number of partitions, records or types, and then asks


def archive(store: ColdStore, many: int) -> Call:
    journals = [Journal(store, partition=number) for number in range(many)]
    for journal in journals:
        journal.commit(f"session:{journal.partition}", put("n", "1"))
    batches = [journal.batch() for journal in journals]
    return lambda: store.archive(batches)


def archive_forks_of_forks(store: ColdStore, many: int) -> Call:
    journal = Journal(store)
    journal.append("session:first", 2)
    for number in range(many):
        journal.fork("session:first", f"session:fork{number}")
    journal.flush()
    for number in range(many):
        journal.fork(f"session:fork{number}", f"session:fork{number}of")
    return journal.flush


def find_erasures(store: ColdStore, many: int) -> Call:
    return lambda: store.pending(partitions=range(many))


def find_mortal_records(store: ColdStore, many: int) -> Call:
    return lambda: store.mortal(range(many), after="", limit=9)


def survey_branches(store: ColdStore, many: int) -> Call:
    journal = Journal(store)
    lost = journal.commit("session:lost", put("n", "1"))
    journal.renew()
    store.branches.keep(0, "1-a", [lost], "test")
    return lambda: store.branches.survey(range(many))


def find_events(store: ColdStore, many: int) -> Call:
    journal = Journal(store)
    for number in range(many):
        journal.tell(b"%d mail.sent%d session:s" % (number + 1, number))
    journal.flush()
    return lambda: store.audit(Sought("session:s", "mail.*", 0, EVERY_MS, 9, None))


def find_access_tokens(store: ColdStore, many: int) -> Call:
    return lambda: store.access_tokens.find([f"{number:016x}" for number in range(many)])


def measure_messages(store: ColdStore, many: int) -> Call:
    journal = Journal(store)
    runs = []
    for number in range(many):
        journal.append(f"session:{number}", 1)
        runs.append(Segment(f"session:{number}", number, number + 1))
    journal.flush()
    return lambda: store.message_lengths("session:0", runs)


@pytest.mark.parametrize(
    "prepared",
    [archive, archive_forks_of_forks, find_erasures, find_mortal_records, survey_branches, find_events,
     find_access_tokens, measure_messages],
)  # fmt: skip
def test_the_parameters_of_a_statement_do_not_grow_with_what_a_caller_gives(
    url: str, opened: Callable[..., ColdStore], prepared: Callable[[ColdStore, int], Call]
) -> None:
    few, many = (largest(store, prepared(store, count)) for count in (FEW, MANY) for store in [opened(url)])
    assert few == many


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_the_parameters_of_a_statement_do_not_grow_with_what_is_indexed_or_found(cold: ColdStore) -> None:
    search, sizes = cold.search, []
    for count in FEW, MANY:
        for journal in [Journal(cold, partition=number) for number in range(count)]:
            journal.commit(f"session:{count}-{journal.partition}", put("n", "1"))
            journal.flush()
        settings = search.switch_on("{}", None)

        def index_and_find(count: int = count, settings: str = settings) -> None:
            taken = search.claim(range(count), "me", 1, 9.0, settings)
            due, _ = search.next_due(taken or [], count)
            put = [Stored(("field", b"", b"n"), 1, None, b"", f"word{count}", b"1")]
            writes = [Write(each, put=put, done=(each.epoch, each.version)) for each in due]
            assert len(search.write("me", 9000, writes, "simple") or ()) == count
            query = SearchQuery(f"word{count}", "all", ("session",), KINDS, "", None, None, 1000, 0)
            found = search.search(query, 0, "simple", None, 0, settings, False)
            assert found
            assert len(found.rows) == count

        sizes.append(largest(cold, index_and_find))
    assert sizes[0] == sizes[1]


def test_a_listing_by_more_tags_than_sqlite_joins_tables_finds_the_records_with_all_of_them(
    cold: ColdStore, journal: Journal
) -> None:
    """It was taken for a database that is away."""
    wanted = tuple(f"run:{number}" for number in range(100))
    for record, held in ("session:all", wanted), ("session:most", wanted[:-1]), ("session:some", wanted[1:]):
        journal.commit(record, *((b"s", tag_field(tag), b"") for tag in held))
    journal.flush()
    assert [row.id for row in cold.listing(Wanted("session", 9, tags=wanted))] == ["all"]
    assert [row.id for row in cold.listing(Wanted("session", 9, tags=wanted[:-1]))] == ["all", "most"]
    assert [row.id for row in cold.listing(Wanted("session", 9, tags=wanted[5:8]))] == ["all", "most", "some"]
    assert cold.listing(Wanted("session", 9, tags=wanted, after=None, prefix="m")) == []


def held_at_once(given: Any) -> int:
    """The greatest number of rows that a statement gets: as parameters of each, or in one text."""
    if isinstance(given, list):
        return len(given)
    lists = [each for each in (given.values() if isinstance(given, dict) else given) if isinstance(each, str)]
    return max([1, *(each.count(",") + 1 for each in lists if each[:1] in ("{", "["))])


def test_any_number_of_rows_goes_in_statements_of_a_bounded_number(
    cold: ColdStore, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One statement of all rows takes as long as they are many, and each statement has a time after which it ends."""
    monkeypatch.setattr(engine, "_ROWS", 3)
    names = [f"session:{number}" for number in range(10)]
    for name in names:
        journal.commit(name, put("n", "1"))
    journal.flush()
    t, e = tables.tags.c, tables.erasures.c

    def mine(row: Any) -> Any:
        return and_(t.namespace == cold.namespace, t.record == row.r)

    with parameters(cold) as sent, cold.database.write(cold.namespace) as sql:
        found = record_index.lock(sql, names)
        assert list(found) == names
        sql.change(
            tables.records, tables.records.c.key, [tables.records.c.size], [(r["key"], 7) for r in found.values()]
        )
        sql.add(tables.tags, [(cold.namespace, "a:b", name) for name in names])
        for owner in "u1", "u2":
            sql.put(tables.erasures, [(cold.namespace, name, 0, owner, False, 0, "") for name in names])
        assert sql.remove(tables.tags, [{"r": name} for name in names[1:]], mine) == 9
        changed = sql.each(
            update(tables.erasures).where(e.namespace == cold.namespace, e.record == bindparam("r")).values(actor="me"),
            [{"r": name} for name in names],
        )
        assert changed == 10
    assert {row.size for row in rows(cold, tables.records)} == {7}
    assert [row.record for row in rows(cold, tables.tags)] == names[:1]
    assert [(row.owner, row.actor) for row in rows(cold, tables.erasures)] == [("u2", "me")] * 10
    assert max(held_at_once(given) for _, given in sent) == 3


def test_a_kind_that_is_asked_for_many_times_is_looked_for_once() -> None:
    query = checked("word", "all", None, ["item", "field"] * 100_000, "", None, None, 1, 0)
    assert query.kinds == ("field", "item")
