"""Listings: an index walk in SQL, with what the journals have beyond it laid over; nothing missing, nothing twice."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from below import own_server, redis_of, tiers
from counting import round_trips
from sqlalchemy import func, select, text

from distributed_state import InvalidValue, UnknownOperation
from distributed_state.cold import listings
from distributed_state.cold.store import ColdStore
from distributed_state.cold.tables import records
from distributed_state.cold.values import Wanted
from distributed_state.store import maintenance
from distributed_state.tiers import fresh_listings as journals
from distributed_state.values.model import PHASE
from distributed_state.values.schedule import Schedule
from distributed_state.values.search import tag_field, tag_text
from tests.journals import Journal, put, statements

UNARCHIVED = {"archive_every": 3600, "durability": "memory"}
ORDERS: list[dict[str, Any]] = [{}, {"user": "u0"}, {"prefix": ""}, {"prefix": "a"}, {"tags": {"run": "r0"}}]


async def shown(store: Any, limit: int = 3, **wanted: Any) -> list[tuple[str, int, str | None]]:
    """All pages of a listing."""
    found = []
    after = None
    while page := await store.sessions(limit=limit, after=after, fresh=True, **wanted):
        found += [(row.id, row.version, row.user) for row in page]
        after = page[-1].cursor
    return found


async def write_some(store: Any, rounds: int) -> None:
    """Sessions that begin, change, are tagged, deleted and begun again."""
    chosen = random.Random(rounds)
    for _ in range(rounds):
        name = f"{chosen.choice('ab')}{chosen.randrange(12)}"
        session = store.session(name, user=f"u{ord(name[-1]) % 3}")
        what = chosen.randrange(5)
        if what == 0 and await session.exists():
            await store.delete(name)
        else:
            tags = {"run": [f"r{chosen.randrange(3)}"]}
            await session.write(increment={"n": 1}, revive=True, **({"tag": tags} if what % 2 else {"untag": tags}))


@pytest.mark.only(warm="single")
async def test_a_fresh_listing_is_two_round_trips(opener: Any) -> None:
    """How far the journals are archived, and what they have beyond that; a caller waits for both."""
    with own_server(opener) as server:
        store = await opener(url=server.url, archiver=False, beat=0, durability="memory")
        await store.session("s").set("n", 1)
        with round_trips(store) as trips:
            assert [row.id for row in await store.sessions(fresh=True)] == ["s"]
        assert trips == [2]
        await opener.close()


@pytest.mark.parametrize("wanted", ORDERS)
async def test_a_fresh_listing_shows_what_it_will_show_when_all_is_archived(opener: Any, wanted: Any) -> None:
    store = await opener(**UNARCHIVED)
    for rounds in (12, 8):
        await write_some(store, rounds)
        fresh = await shown(store, **wanted)
        assert await shown(store, limit=100, **wanted) == fresh
        assert len({id for id, _, _ in fresh}) == len(fresh) > 0
        before = await store.sessions(limit=1000, **wanted)
        assert [(row.id, row.version, row.user) for row in before] != fresh  # the control: SQL alone shows less
        await store.admin.archive()
        after = await store.sessions(limit=1000, **wanted)
        rows = [(row.id, row.version, row.user) for row in after]
        if "prefix" in wanted or "tags" in wanted:
            assert rows == fresh
        else:
            # Those of one millisecond come in the order of their numbers, which those that begin do not have yet.
            assert sorted(rows) == sorted(fresh)


async def test_a_page_of_ids_goes_on_behind_its_last_row_whatever_is_archived_meanwhile(opener: Any) -> None:
    store = await opener(**UNARCHIVED)
    every = [f"s{number:02}" for number in range(20)]
    for each in every:
        await store.session(each).write(set={"n": 1}, tag={"k": "v"})
    for wanted in ({"prefix": "s"}, {"tags": {"k": "v"}}):
        found: list[str] = []
        after = None
        while page := await store.sessions(limit=3, after=after, fresh=True, **wanted):
            found += [row.id for row in page]
            after = page[-1].cursor
            await store.admin.archive()
            await store.session(f"s{len(found) - 1:02}").set("n", 2)
        assert found == every


@pytest.mark.wide
@pytest.mark.replicas
@pytest.mark.parametrize("wanted", [{}, {"prefix": ""}, {"tags": {"k": "v"}}])
async def test_while_others_archive_no_record_is_missing_and_none_is_twice(opener: Any, wanted: Any) -> None:
    """What is listed is what was acknowledged before the listing began."""
    store = await opener(archive_every=0.01)
    other = await opener(archive_every=0.01)
    acknowledged: list[str] = []
    done = False

    async def write() -> None:
        nonlocal done
        for number in range(50):
            await other.session(f"s{number:03}").write(set={"n": 1}, tag={"k": "v"})
            acknowledged.append(f"s{number:03}")
        done = True

    async def look() -> None:
        while not done:
            before = list(acknowledged)
            found = [row.id for row in await store.sessions(limit=1000, fresh=True, **wanted)]
            assert len(found) == len(set(found))
            assert not set(before) - set(found)

    await asyncio.gather(write(), look())


async def test_read_after_sql_a_journal_would_lack_what_is_archived_in_between(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: with the two reads the other way round a record is missing."""
    store = await opener(**UNARCHIVED)
    await store.session("s").set("n", 1)

    async def too_late(at: Any, wanted: Wanted) -> Any:
        await at.archiver.drain()
        return await journals.unarchived_changes(at, wanted)

    kept: list[Any] = []
    page = ColdStore.listing

    def first(self: Any, wanted: Any, late: Any = ()) -> Any:
        kept.append(page(self, wanted, ()))
        return kept[0]

    assert [row.id for row in await store.sessions(fresh=True)] == ["s"]
    monkeypatch.setattr(ColdStore, "listing", first)
    await store.sessions(fresh=True)
    monkeypatch.setattr(maintenance, "unarchived_changes", too_late)
    monkeypatch.setattr(ColdStore, "listing", lambda self, wanted, late: page(self, wanted, late) if late else kept[0])
    assert await store.sessions(fresh=True) == []
    monkeypatch.setattr(ColdStore, "listing", page)
    assert [row.id for row in await store.sessions(fresh=True)] == ["s"]


async def test_a_step_of_a_newer_release_stops_a_fresh_listing_and_leaves_sql_alone(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page would lack what was acknowledged; SQL is as well as before."""
    store = await opener(**UNARCHIVED)
    await store.session("s").set("n", 1)

    def newer(entry: Any, partition: int, epoch: str) -> Any:
        raise UnknownOperation(f"a step that partition {partition} has")

    monkeypatch.setattr(listings, "parse", newer)
    with pytest.raises(UnknownOperation):
        await store.sessions(fresh=True)
    assert tiers(store).cold.away == ""
    assert await store.sessions() == []


async def test_what_is_erased_is_in_no_fresh_listing(opener: Any) -> None:
    store = await opener(**UNARCHIVED)
    for each in ("s", "t"):
        await store.session(each).write(set={"n": 1}, tag={"k": "v"})
    await store.erase("s")
    for wanted in ({}, {"prefix": ""}, {"tags": {"k": "v"}}):
        assert [row.id for row in await store.sessions(fresh=True, **wanted)] == ["t"]


async def test_redis_that_was_emptied_takes_nothing_out_of_a_fresh_listing(opener: Any) -> None:
    store = await opener(**UNARCHIVED)
    await store.session("s").set("n", 1)
    await store.admin.archive()
    with redis_of(store) as client:
        for key in client.scan_iter(match=f"{store.settings.namespace}*"):
            client.delete(key)
    assert [row.id for row in await store.sessions(fresh=True)] == ["s"]


# In SQL


WALKS = [
    Wanted("session", 20, prefix="a5"),
    Wanted("session", 20, prefix=""),
    Wanted("session", 20, tags=(tag_text("run", "r3"),)),
    Wanted("session", 20, tags=(tag_text("run", "r3"),), prefix="a"),
    Wanted("session", 20, tags=(tag_text("run", "r3"), tag_text("all", "x"))),
]


def filled(cold: ColdStore, journal: Journal, many: int) -> None:
    for number in range(many):
        tags = [(b"s", tag_field(tag_text("run", f"r{number % (many // 50)}")), b"1")]
        tags.append((b"s", tag_field(tag_text("all", "x")), b"1"))
        tags.append((b"s", PHASE, b"p%d" % (number % 50)))
        journal.commit(f"session:a{number}", put("n", "1"), *tags)
    journal.flush()
    if cold.database._engine.dialect.name == "postgresql":
        with cold.database.write() as connection:
            connection.execute(text("ANALYZE records"))
            connection.execute(text("ANALYZE tags"))


def plan(cold: ColdStore, wanted: Wanted) -> str:
    """How the database says that it goes about a page."""
    with cold.database.read(cold.namespace) as sql:
        walk = listings._by_id(sql, wanted, None)
        query = (walk if wanted.by_id else listings._newest(sql, wanted, None, False)).limit(wanted.limit)
        explain = "EXPLAIN " if sql.postgresql else "EXPLAIN QUERY PLAN "
        compiled = query.compile(sql.connection, compile_kwargs={"literal_binds": True})
        rows = sql.execute(text(explain + str(compiled).replace(":", "\\:")))
        return "\n".join(" ".join(map(str, row)) for row in rows)


NEWEST = [
    Wanted("session", 20),
    Wanted("session", 20, phase="p3"),
    Wanted("session", 20, phase="p3", changed_from_ms=0, changed_to_ms=10**9),
    Wanted("session", 20, changed_from_ms=0, changed_to_ms=10**9, size=1),
]


def test_a_page_is_an_index_walk(archive_url: str, opened: Callable[..., ColdStore]) -> None:
    """No table is read whole, and nothing is sorted. The rows of others in a database would change its plans."""
    cold = opened(archive_url, snapshot_every=10)
    filled(cold, Journal(cold), 3000)
    for wanted in (*WALKS, *NEWEST):
        said = plan(cold, wanted)
        assert not re.search(r"Seq Scan|SCAN (?!.*USING)|Sort|TEMP B-TREE", said), (wanted, said)
        assert len(cold.listing(wanted)) == 20, wanted


def test_a_phase_is_followed_before_and_after_it_is_archived(cold: ColdStore, journal: Journal) -> None:
    def found(phase: str, **more: Any) -> list[tuple[str, str | None, int | None]]:
        wanted = Wanted("session", 20, phase=phase, **more)
        rows = cold.listing(wanted, listings.parsed(journal.batch(), wanted))
        return [(row.id, row.phase, row.size) for row in rows]

    size = 0
    for phase in ("p1", "p2"):
        entry = journal.commit("session:a", put("n", "1"), (b"s", PHASE, phase.encode()))
        journal.commit("session:b", put("n", "1"))
        for _ in range(2):
            assert [each[:2] for each in found(phase)] == [("a", phase)]
            assert found(phase, prefix="a") == found(phase)
            journal.flush()
        size += len(entry.data)
        assert found(phase) == [("a", phase, size)]
    assert found("p1") == []
    assert found("p2", changed_to_ms=0) == found("p2", changed_from_ms=10**9) == found("p2", size=size + 1) == []
    assert found("p2", changed_to_ms=10**9, changed_from_ms=0, size=size) == found("p2")
    journal.commit("session:a", (b"d", PHASE, b""))
    assert found("p2") == []
    journal.flush()
    assert found("p2") == []


def test_by_like_it_would_be_none(cold: ColdStore, journal: Journal) -> None:
    """The control."""
    filled(cold, journal, 3000)
    with cold.database.read() as connection:
        postgresql = connection.postgresql
        explain = "EXPLAIN" if postgresql else "EXPLAIN QUERY PLAN"
        rows = connection.execute(
            text(f"{explain} SELECT * FROM records WHERE record LIKE '%a5%' ORDER BY updated_ms LIMIT 20")
        )
        said = "\n".join(" ".join(map(str, row)) for row in rows)
    assert re.search(r"Sort|TEMP B-TREE", said)


STUCK_PAGES = [
    (Wanted("session", 3, stuck=True), 10),
    (Wanted("session", 3, stuck=True, prefix="a1"), 2),
    (Wanted("session", 3, stuck=True, phase="p1"), 5),
    (Wanted("session", 3, stuck=True, changed_from_ms=0, changed_to_ms=10**12), 10),
    (Wanted("task", 3, stuck=True), 0),
]


def stuck_and_others(journal: Journal, many: int) -> None:
    for number in range(many):
        schedule = Schedule("a", None, 8, None, True) if number % 10 == 1 else Schedule("a", 4 * 10**12 + number)
        journal.commit(f"session:a{number}", put("#bh", schedule.stored.decode()), (b"s", PHASE, b"p%d" % (number % 4)))
    journal.flush()


@pytest.mark.parametrize(("wanted", "count"), STUCK_PAGES)
def test_pages_of_stuck_sessions_are_the_same_however_many_there_are(
    cold: ColdStore, journal: Journal, wanted: Wanted, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pages() -> list[list[str]]:
        found, after = [], wanted.after
        while page := cold.listing(replace(wanted, after=after)):
            found.append([row.record for row in page])
            after = page[-1].cursor
        return found

    stuck_and_others(journal, 100)
    few = pages()
    monkeypatch.setattr(listings, "_FEW", -1)
    assert few == pages()
    assert sum(map(len, few)) == count


def test_stuck_sessions_are_found_among_many_that_are_due_later(
    archive_url: str, opened: Callable[..., ColdStore]
) -> None:
    """A worker counts them every few seconds, and a page of the inspector lists them."""
    cold = opened(archive_url, snapshot_every=10)
    stuck_and_others(Journal(cold), 3000)
    with cold.database.write() as connection:
        connection.execute(text("ANALYZE"))
    with cold.database.read(cold.namespace) as sql:
        for wanted in (select(records), select(func.count())):
            query = wanted.where(*listings._stuck(sql), records.c.deleted.is_(False))
            explain = "EXPLAIN " if sql.postgresql else "EXPLAIN QUERY PLAN "
            compiled = query.compile(sql.connection, compile_kwargs={"literal_binds": True})
            rows = sql.execute(text(explain + str(compiled).replace(":", "\\:")))
            said = "\n".join(" ".join(map(str, row)) for row in rows)
            assert re.search(r"partition = cursors\.partition\)? AND \(?due|partition=\? AND due>", said), said
    assert cold.count_stuck() == 300


def test_a_page_costs_few_statements_however_much_is_unarchived(cold: ColdStore, journal: Journal) -> None:
    filled(cold, journal, 300)
    for number in range(0, 300, 2):
        journal.commit(f"session:a{number}", put("n", "2"))
    sent = statements(cold)
    wanted = Wanted("session", 100, prefix="")
    found = cold.listing(wanted, listings.parsed(journal.batch(), wanted))
    assert len(found) == 100
    assert {row.version for row in found if int(row.record[9:]) % 2 == 0} == {2}
    assert len(sent) < 10


def test_what_is_no_cursor_of_ids_is_refused(cold: ColdStore, journal: Journal) -> None:
    filled(cold, journal, 100)
    for cursor in ("", "x", "é", "MTI0", "MTI0OjU", "a" * 10_000, "%%%", "_____w"):
        with pytest.raises(InvalidValue):
            cold.listing(Wanted("session", 5, prefix="", after=cursor))


def test_what_another_life_replaced_takes_its_tags_along(cold: ColdStore, journal: Journal) -> None:
    """Redis lost version 2, which SQL has, and another one came in its place."""
    tag = [(b"s", tag_field(tag_text("k", value)), b"1") for value in ("a", "b", "c")]
    journal.commit("session:s", tag[0])
    journal.flush()
    kept = dict(journal.states)
    journal.commit("session:s", tag[1])
    journal.flush()
    journal.states.update(kept)
    journal.renew()
    journal.commit("session:s", tag[2])
    journal.flush()
    for value, there in ("a", True), ("b", False), ("c", True):
        found = cold.listing(Wanted("session", 5, tags=(tag_text("k", value),)))
        assert [row.version for row in found] == [2] * there
