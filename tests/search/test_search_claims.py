"""Who brings the index up, and what befalls it in between: other writers, other settings, a step that is broken off."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from below import everything_in_sql, tiers, until
from searching import MARK, places, run_sql, said, searching
from sqlalchemy import create_engine, text

from distributed_state import ColdUnavailable, ConfigurationError, Encryption, KeyRing, Search
from distributed_state.cold import search_index, search_store
from distributed_state.search.querying import follower_of
from tests.journals import Journal

pytestmark = pytest.mark.usefixtures("database_of_its_own")
files = pytest.mark.only(cold=("sqlite", "postgres"))
NOTE = "INSERT INTO search_due (namespace, partition, record) SELECT namespace, partition, key FROM records"


def rows_of(opener: Any, table: str) -> list[Any]:
    return everything_in_sql(opener.archive, opener.namespace)[table]


def claims(opener: Any) -> set[str]:
    engine = create_engine(opener.archive)
    with engine.connect() as connection:
        found = set(connection.execute(text("SELECT claim FROM search_partitions")).scalars())
    engine.dispose()
    return found


async def finding(store: Any) -> Any:
    return next((each for each in await store.admin.doctor() if each.name == "index"), None)


@files
async def test_whoever_waits_for_the_index_does_not_wait_for_what_is_written_meanwhile(
    opener: Any, monkeypatch: Any
) -> None:
    """Each round finds all records changed again."""
    store = await searching(opener, archiver=False)
    for number in range(3):
        await store.session(f"c{number}").append(said(MARK))
    await store.admin.archive()
    write, rounds = search_index.write, 0

    def overtaken(connection: Any, *arguments: Any) -> Any:
        nonlocal rounds
        rounds += 1
        done = write(connection, *arguments)
        if rounds < 50:
            connection.exec_driver_sql(NOTE)
        return done

    monkeypatch.setattr(search_index, "write", overtaken)
    assert (await store.admin.update_index()).behind == 0
    assert len(await places(store, MARK)) == 3
    assert rounds < 10


@files
@pytest.mark.parametrize("noted", [True, False])
async def test_what_was_read_before_it_was_encrypted_is_not_written_after_that(opener: Any, noted: bool) -> None:
    """Without the trigger's note of it, the control, it would stand there as plain text."""
    store = await searching(opener, archiver=False)
    await store.session("c1").write(set={"secret": MARK, "open": "zagreb"})
    await store.admin.archive()
    await store.close()
    encryption = Encryption(KeyRing({"k1": b"1" * 32}), fields=("secret*",), accept_plaintext=True)
    sealed = await searching(opener, encryption=encryption, archiver=False)
    search = tiers(sealed).cold.search
    assert search.claim(range(4), "first", 10**15, 60.0, search.settings())
    (one,), _ = search.next_due(range(4), 10)
    stored = [
        search_index.Stored(("field", b"", name), 1, None, b"d", value, b'"%b"' % value.encode())
        for name, value in ((b"secret", MARK), (b"open", "zagreb"))
    ]
    await sealed.admin.reencrypt()
    if not noted:
        run_sql(opener, "DELETE FROM search_heads")
    write = search_index.Write(one, put=stored, done=(one.epoch, one.version))
    assert search.write("first", 10**15, [write], "simple") == (set() if noted else {one.key})
    assert (MARK in repr(rows_of(opener, "search_documents"))) is not noted
    search.release("first")
    if noted:
        assert await places(sealed, "zagreb") == [("c1", "open")]
        assert await places(sealed, MARK) == []
        assert MARK not in repr(rows_of(opener, "search_documents"))


@files
async def test_what_is_indexed_and_encrypted_later_is_indexed_again(opener: Any) -> None:
    store = await searching(opener)
    await store.session("c1").write(set={"secret": MARK, "open": "zagreb"})
    assert len(await places(store, MARK)) == 1
    await store.close()
    for key in (b"1", b"2"):
        keys = KeyRing({f"k{key.decode()}": key * 32, "k1": b"1" * 32}, current=f"k{key.decode()}")
        sealed = await searching(opener, encryption=Encryption(keys, fields=("secret*",), accept_plaintext=True))
        await sealed.admin.reencrypt()
        assert await places(sealed, "zagreb") == [("c1", "open")]
        assert await places(sealed, MARK) == []
        await sealed.close()


@files
async def test_a_claim_is_given_back_whatever_became_of_the_round(opener: Any, monkeypatch: Any) -> None:
    """Else whoever comes next would wait for a minute."""
    store = await searching(opener, archiver=False)
    await store.session("c1").append(said(MARK))
    await store.admin.archive()
    write, held = search_index.write, []

    def broken(*arguments: Any) -> Any:
        held.extend(claims(opener) - {""} if opener.cold == "postgres" else ["sqlite"])
        raise ColdUnavailable("broken off on purpose")

    monkeypatch.setattr(search_index, "write", broken)
    with pytest.raises(ColdUnavailable):
        await store.admin.update_index()
    assert held
    assert claims(opener) == {""}
    monkeypatch.setattr(search_index, "write", write)
    await store.admin.update_index()
    assert claims(opener) == {""}


@files
@pytest.mark.replicas
async def test_an_index_that_was_not_filled_is_none_until_it_is(opener: Any, monkeypatch: Any) -> None:
    plain = await opener(partitions=4, search=False)
    await plain.session("c1").append(said(MARK))
    await plain.admin.archive()
    fill = search_store._fill

    def broken(sql: Any) -> None:
        raise ColdUnavailable("broken off on purpose")

    monkeypatch.setattr(search_store, "_fill", broken)
    store = await searching(opener)
    with pytest.raises(ColdUnavailable, match="on purpose"):
        await store.search(MARK)
    assert len(rows_of(opener, "search_indexes")) == 1
    assert tiers(plain).cold.search.settings() is None
    monkeypatch.setattr(search_store, "_fill", fill)
    assert await places(store, MARK) == [("c1", 0)]


@files
async def test_all_that_is_noted_of_a_record_goes_at_once(opener: Any) -> None:
    store = await searching(opener, archiver=False)
    for number in range(150):
        await store.session("much").set("n", number)
        if number % 30 == 0:
            await store.admin.archive()
    await store.session("little").set("n", MARK)
    await store.admin.archive()
    noted, _ = tiers(store).cold.search.next_due(range(4), 5)
    assert sum(len(each.rows) for each in noted) >= 6
    await store.admin.update_index()
    assert rows_of(opener, "search_due") == []
    assert set(await places(store, f"{MARK} 149", match="any")) == {("much", "n"), ("little", "n")}


@files
async def test_a_record_of_which_only_its_last_state_was_imported_is_found(opener: Any) -> None:
    store = await searching(opener)
    session = store.session("c1")
    await session.write(set={"place": MARK}, append=[said(MARK)])
    await places(store)
    await store.admin.archive()
    await store.admin.purge(older_than=0)
    await store.admin.import_(await store.admin.export("c1"), id="c2")
    assert set(await places(store, MARK)) == {("c1", "place"), ("c1", 0), ("c2", "place"), ("c2", 0)}


# Removed, or made otherwise


@pytest.mark.wide
@files
@pytest.mark.replicas
async def test_a_worker_notices_that_its_index_was_removed_and_what_it_was_replaced_by(opener: Any) -> None:
    first = await searching(opener, archive_every=0.02)
    worker = await opener(partitions=4, archive_every=0.02)
    await first.session("c1").append(said(MARK))
    assert await places(worker, MARK) == [("c1", 0)]
    await first.close()
    other = await opener(partitions=4, search=False)
    assert await other.admin.remove_index()
    with pytest.raises(ConfigurationError, match="is off in this namespace"):
        await worker.search(MARK)
    fields = await searching(opener, search=Search(kinds=("field",)))
    await fields.session("c2").write(set={"place": MARK}, append=[said(MARK)])
    assert await places(fields, MARK) == [("c2", "place")]
    assert await places(worker, MARK) == [("c2", "place")]

    async def quiet() -> bool:
        return (await finding(worker)).ok and follower_of(tiers(worker)).behind == 0

    await until(quiet)


@files
@pytest.mark.replicas
async def test_an_index_that_was_removed_is_no_failure_of_who_followed_it(opener: Any) -> None:
    first = await searching(opener)
    worker = await opener(partitions=4, archive_every=0.02)
    await first.session("c1").append(said(MARK))
    await places(worker, MARK)
    await first.close()
    other = await opener(partitions=4, search=False)
    assert await other.admin.remove_index()
    await worker.session("c1").set("n", 1, durability="archived")
    follower = follower_of(tiers(worker))
    await until(lambda: follower.behind is None and not follower.failure)
    assert await finding(worker) is None
    assert tiers(worker).cold.away == ""


@pytest.mark.only(cold="postgres")
async def test_who_removes_the_index_waits_for_an_erasure_before_it_holds_what_that_wants(opener: Any) -> None:
    """Each held what the other one wanted, and PostgreSQL ended one of them."""
    store = await searching(opener, archiver=False)
    await store.session("c1").append(said(MARK))
    await store.admin.update_index()
    engine = create_engine(opener.archive)
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'records'::regclass")

    def waits() -> bool:
        with engine.connect() as other:
            return bool(other.execute(waiting).scalar())

    with engine.begin() as erasure:
        erasure.execute(text("LOCK TABLE records IN ROW EXCLUSIVE MODE"))
        removing = asyncio.create_task(store.admin.remove_index())
        await until(waits)
        erasure.execute(text("SELECT 1 FROM search_partitions FOR UPDATE NOWAIT"))
    assert await removing
    engine.dispose()


@pytest.mark.wide
@pytest.mark.only(cold="postgres")
@pytest.mark.replicas
async def test_what_was_being_written_when_search_was_switched_on_is_noted(opener: Any) -> None:
    """Another namespace has an index already, so there is no trigger to be made that would wait for the writer."""
    await (await searching(opener, namespace=f"{opener.namespace}other")).admin.update_index()
    plain = await opener(partitions=4, search=False)
    await plain.session("c1").set("place", "zagreb", durability="archived")
    engine = create_engine(opener.archive)
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")

    def waits() -> bool:
        with engine.connect() as other:
            return bool(other.execute(waiting).scalar())

    with engine.begin() as writer:
        writer.execute(text("UPDATE changes SET kind = kind"))
        opening = asyncio.create_task(searching(opener))
        await until(waits)
    store = await opening
    assert await places(store, "zagreb") == [("c1", "place")]
    engine.dispose()


# How much at once


@files
async def test_large_values_are_read_a_few_at_a_time(opener: Any, monkeypatch: Any) -> None:
    """Of messages, items and changes, however large each may be."""
    monkeypatch.setattr(search_index, "_BYTES", 10_000)
    store = await searching(opener, archiver=False)
    cold = tiers(store).cold
    journal = Journal(cold)
    for number in range(12):
        text = f"{MARK} {number} " + "x" * 3000
        item = (b"p", b"notes\0%02d" % number, b'"%b"' % text.encode())
        journal.commit("session:c1", (b"m", b"%d" % number, b'{"role":"user","content":"%b"}' % text.encode()), item)
    journal.flush()
    read: list[int] = []

    def measured(name: str) -> None:
        real = getattr(search_store.SearchStore, name)

        def page(*arguments: Any) -> Any:
            found = real(*arguments)
            pieces = found.shown if name == "whole" else found[0] if name == "messages" else found
            read.append(sum(len(each.data or b"") for each in pieces))
            return found

        monkeypatch.setattr(search_store.SearchStore, name, page)

    monkeypatch.setattr(search_index, "_ENTRIES", 2)
    for name in ("whole", "messages", "items_page"):
        measured(name)
    await follower_of(tiers(store)).catch_up()
    assert len(await store.search(MARK, limit=100)) == 24
    assert max(read) < 20_000
    assert sum(read) > 70_000
