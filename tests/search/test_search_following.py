"""The index follows the archive: nothing is missing, nothing erased or encrypted stands there, nobody waits for it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from below import everything_in_sql, logged_in, tiers, until
from searching import MARK, places, run_sql, said, searching
from sqlalchemy import create_engine, text

from distributed_state import (
    AccessDenied,
    ColdUnavailable,
    ConfigurationError,
    Encryption,
    KeyRing,
    Request,
    Search,
    SearchDocument,
    SearchMatch,
    SearchQuery,
    SearchRemoval,
    Unavailable,
)
from distributed_state.cold import search_index
from distributed_state.search import follower
from distributed_state.search.querying import follower_of
from tests.journals import Journal

pytestmark = pytest.mark.usefixtures("database_of_its_own")


def standing(opener: Any, mark: str = MARK) -> list[str]:
    """Where a text stands in SQL: in rows, and in the pages of SQLite's file."""
    tables = everything_in_sql(opener.archive, opener.namespace)
    found = [f"{name}: {rows}"[:200] for name, rows in tables.items() if mark in repr(rows)]
    if opener.archive.startswith("sqlite"):
        path = Path(opener.archive.removeprefix("sqlite:///"))
        found += [file.name for file in path.parent.glob(f"{path.name}*") if mark.encode() in file.read_bytes()]
    return found


files = pytest.mark.only(cold=("sqlite", "postgres"))


# Erased


@files
@pytest.mark.parametrize("way", ["erase", "forget"])
async def test_what_is_erased_is_in_no_index_when_that_returns(opener: Any, way: str) -> None:
    store = await searching(opener)
    session = store.session("c1", user="u1")
    await session.write(set={"place": MARK}, append=[said(f"to {MARK}")])
    await session.fork("f1")
    await store.session("kept").append(said("to zagreb"))
    assert set(await places(store, MARK)) == {("c1", "place"), ("c1", 0), ("f1", "place"), ("f1", 0)}
    if way == "erase":
        await store.delete("f1")
        await store.erase("f1")
        await store.erase(session.id)
    else:
        await store.forget("u1")
    assert await store.search(MARK) == []
    assert standing(opener) == []
    assert await places(store, "zagreb") == [("kept", 0)]


@files
async def test_without_the_trigger_what_is_erased_would_stand_there(opener: Any) -> None:
    """The control of the test above."""
    # Without a follower: one that indexed the tombstone before SQL erased the record would remove the documents.
    store = await searching(opener, archiver=False)
    await store.session("c1", user="u1").append(said(f"to {MARK}"))
    await places(store)
    run_sql(opener, f"DROP TRIGGER search_erased{' ON records' if opener.cold == 'postgres' else ''}")
    await store.forget("u1")
    assert any("search_documents" in place for place in standing(opener))


async def erased_while_it_is_indexed(opener: Any, monkeypatch: Any, limit: float, *control: str) -> bool:
    """A follower has written what a record says and not committed it; the record is erased; whether that waited."""
    store = await searching(opener, archive_every=0.02)
    run_sql(opener, *control)
    await store.session("c1", user="u1").append(said(f"to {MARK}"))
    written, go_on = threading.Event(), threading.Event()
    write = search_index.write

    def paused(*arguments: Any) -> Any:
        done = write(*arguments)
        written.set()
        go_on.wait(5)
        return done

    monkeypatch.setattr(search_index, "write", paused)
    await until(written.is_set)
    forgetting = asyncio.create_task(store.forget("u1"))
    await asyncio.wait([forgetting], timeout=limit)
    waited = not forgetting.done()
    go_on.set()
    await forgetting
    monkeypatch.undo()
    await store.admin.update_index()
    return waited


@pytest.mark.only(cold="postgres")
async def test_an_erasure_waits_for_who_writes_the_index_and_takes_that_along(opener: Any, monkeypatch: Any) -> None:
    assert await erased_while_it_is_indexed(opener, monkeypatch, 0.5)
    assert standing(opener) == []


@pytest.mark.only(cold="postgres")
async def test_an_erasure_that_did_not_wait_would_leave_it_there(opener: Any, monkeypatch: Any) -> None:
    """The control of the test above."""
    hasty = search_index._POSTGRESQL[4].replace(search_index._WAIT.format("old_rows r"), "").replace("%", "%%")
    control = hasty.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")
    assert not await erased_while_it_is_indexed(opener, monkeypatch, 4.0, control)
    assert any("search_documents" in place for place in standing(opener))


@files
async def test_what_was_read_before_an_erasure_is_not_written_after_it(opener: Any, monkeypatch: Any) -> None:
    store = await searching(opener, archiver=False)
    await store.session("c1", user="u1").append(said(f"to {MARK}"))
    await store.admin.archive()
    cold = tiers(store).cold
    write, writes = search_index.write, 0

    def late(*arguments: Any) -> Any:
        nonlocal writes
        writes += 1
        if writes == 1:
            run_sql(opener, "DELETE FROM records") if opener.cold == "postgres" else arguments[0].exec_driver_sql(
                "DELETE FROM records"
            )
        return write(*arguments)

    monkeypatch.setattr(search_index, "write", late)
    await store.admin.update_index()
    await store.admin.update_index()  # of the erasure, which was noted while that one was at work
    assert writes
    assert (cold.search.records(), cold.search.lacking()) == (0, 0)
    assert not [place for place in standing(opener) if "search_" in place]


# Encrypted


@files
async def test_what_is_encrypted_is_in_no_index_unless_it_was_asked_for(opener: Any) -> None:
    encryption = Encryption(KeyRing({"k1": b"1" * 32}), fields=("secret*",))
    store = await searching(opener, encryption=encryption)
    await store.session("c1").write(set={"secret": MARK, "open": "zagreb"}, append=[said(MARK)])
    assert await places(store, MARK) == []
    assert await places(store, "zagreb") == [("c1", "open")]
    assert standing(opener) == []
    await store.close()  # first: as long as it is open, it makes an index that it wants
    plain = await opener(partitions=4, encryption=encryption)
    assert await plain.admin.remove_index()
    await plain.close()
    again = await opener(search=Search(encrypted=True), partitions=4, encryption=encryption)
    assert set(await places(again, MARK)) == {("c1", "secret"), ("c1", 0)}
    assert any("search_documents" in place for place in standing(opener))


@files
async def test_what_is_encrypted_later_leaves_the_index_with_that(opener: Any) -> None:
    store = await searching(opener)
    await store.session("c1").write(set={"place": MARK}, append=[said(MARK)])
    assert len(await places(store, MARK)) == 2
    await store.close()
    encryption = Encryption(KeyRing({"k1": b"1" * 32}), accept_plaintext=True)
    sealed = await searching(opener, encryption=encryption)
    await sealed.admin.reencrypt()
    assert not [place for place in standing(opener) if "search_" in place]
    assert await places(sealed, MARK) == []


# Allowed


@pytest.mark.parametrize("kept_apart", [True, False])
async def test_a_score_tells_a_tenant_nothing_of_what_others_say(opener: Any, kept_apart: bool) -> None:
    """SQLite ranks by how rare a word is among all documents: a tenant counted others' words by its own hits."""

    def policy(request: Request) -> bool:
        return request.action != "read" or (request.id or request.prefix or "").startswith("acme:")

    store = await searching(opener, **({"access": policy} if kept_apart else {}))
    for number in range(12):
        await store.session(f"acme:{number}").set("said", f"filler {number}")
    await store.session("acme:one").set("said", "xylophone")
    await store.session("acme:two").set("said", "trombone trombone")

    async def found(query: str, **how: Any) -> list[tuple[str, float]]:
        return [(hit.id, hit.score) for hit in await store.search(query, prefix="acme:", fresh=True, **how)]

    async def seen() -> list[Any]:
        return [
            await found("xylophone"),
            await found("xylophone trombone", match="any"),
            await found("xylophone piano"),
        ]

    before = await seen()
    assert [len(each) for each in before] == [1, 2, 0]
    for number in range(20):
        await store.session(f"bob:{number}").set("said", "my secret xylophone")
    same = await seen() == before
    # Without a policy nothing is kept from anybody, and rarity is part of what SQLite calls relevant.
    assert same is (kept_apart or opener.archive.startswith("postgresql"))


async def test_what_the_policy_denies_is_neither_shown_nor_counted(opener: Any) -> None:
    asked: list[Request] = []

    def policy(request: Request) -> bool:
        asked.append(request)
        if request.action != "read":
            return True
        return (request.id != "hidden" and request.field not in ("secret", "#messages")) or request.user == "u1"

    store = await searching(opener, access=policy)
    for id, user in (("a", "u1"), ("b", "u2"), ("hidden", "u2")):
        await store.session(id, user=user).write(set={"place": MARK})
    await store.user("u1").write(set={"secret": MARK})
    found = await places(store, MARK)
    assert set(found) == {("a", "place"), ("b", "place"), ("u1", "secret")}
    assert [await places(store, MARK, limit=1, offset=at) for at in range(4)] == [[each] for each in found] + [[]]
    assert {(each.id, each.field, each.user) for each in asked if each.id == "hidden" and each.action == "read"} == {
        ("hidden", "place", "u2")
    }


async def test_who_may_not_read_may_not_search(opener: Any) -> None:
    store = await searching(opener, access=lambda request: request.action != "read")
    with pytest.raises(AccessDenied):
        await store.search("x")


# Following


@pytest.mark.replicas
async def test_an_index_that_is_switched_on_later_has_what_was_there_before(opener: Any) -> None:
    """Also when it is broken off, and with what another worker archived that knows of no index."""
    plain = await opener(partitions=4)
    if opener.combination.warm == "fake":
        pytest.skip("searched by default")
    for number in range(30):
        await plain.session(f"c{number}").write(set={"n": number}, append=[said(f"{MARK} {number}")])
    await plain.admin.archive()
    with pytest.raises(ConfigurationError, match="is off in this namespace"):
        await plain.search(MARK)
    store = await searching(opener)
    seen: list[int] = []
    done = await store.admin.update_index(progress=lambda so_far: seen.append(so_far.behind))
    assert (done.records, done.behind) == (30, 0)
    assert len(await places(store, MARK)) == 30
    await plain.session("c3").append(said(f"{MARK} once more"))
    assert len(await places(store, MARK)) == 31
    assert len(await places(plain, MARK)) == 31


@pytest.mark.wide
@pytest.mark.only(cold=("sqlite", "postgres"))
async def test_a_follower_that_dies_anywhere_leaves_nothing_out_and_nothing_twice(
    opener: Any, monkeypatch: Any
) -> None:
    store = await searching(opener, archive_every=0.02)
    await store.session("c0").append(said("wake"))
    await places(store)
    real = search_index.write
    fails = 0

    def failing(*arguments: Any) -> Any:
        nonlocal fails
        fails += 1
        done = real(*arguments) if fails % 3 else None
        if fails % 3 != 1:
            raise ColdUnavailable("broken off on purpose")
        return done

    monkeypatch.setattr(search_index, "write", failing)
    count = 0
    while fails < 7:
        await store.session(f"c{count % 5}").write(set={"n": f"{MARK} {count}"}, append=[said(f"{MARK} {count}")])
        count += 1
        await asyncio.sleep(0.02)  # so that these are rounds, and not one
    monkeypatch.undo()
    found = await places(store, MARK, limit=1000)
    assert len(found) == len(set(found)) == count + min(count, 5)
    kept = {hit.value for hit in await store.search(MARK, kinds=["field"])}
    assert kept == {f"{MARK} {number}" for number in range(max(0, count - 5), count)}


async def test_large_texts_are_written_a_few_at_a_time(opener: Any, monkeypatch: Any) -> None:
    """Copies of a large record would all be in memory at once; as one record would."""
    monkeypatch.setattr(follower, "_BYTES", 10_000)
    store = await searching(opener, archiver=False)
    session = store.session("c0")
    await session.write(set={f"f{number}": f"{MARK} {number} " + "x" * 2000 for number in range(20)})
    for number in range(3):
        await session.fork(f"c{number + 1}")
    sizes = []
    real = search_index.write

    def seen(sql: Any, claimer: str, until_ms: int, writes: Any, language: str) -> Any:
        sizes.append(sum(len(each.text) for write in writes for each in write.put))
        return real(sql, claimer, until_ms, writes, language)

    monkeypatch.setattr(search_index, "write", seen)
    assert len(await places(store, MARK, limit=1000)) == 80
    assert max(sizes) < 10_000 + 3000, "at most a text more than the bound"
    assert sum(sizes) > 80 * 2000


@pytest.mark.replicas
async def test_who_lost_its_claim_writes_nothing_any_more(opener: Any, monkeypatch: Any) -> None:
    """A follower was stopped between reading and writing; another one went on; the first wakes up."""
    store = await searching(opener, archiver=False)
    session = store.session("c1")
    await session.set("place", "old")
    await store.admin.archive()
    search = tiers(store).cold.search
    now_ms, settings = 10**15, search.settings()
    assert search.claim(range(4), "first", now_ms, 60.0, settings)
    (one,), more = search.next_due(range(4), 10)
    assert (search.changes([one]), more) == ([None], False)
    assert not search.claim(range(4), "second", now_ms + 1, 60.0, settings)
    assert search.claim(range(4), "second", now_ms + 60_001, 60.0, settings)
    stored = search_index.Stored(("field", b"", b"place"), 1, None, b"d", "old", b'"old"')
    write = search_index.Write(one, put=[stored], done=(one.epoch, one.version))
    assert search.write("first", now_ms, [write], "simple") is None
    assert everything_in_sql(opener.archive, opener.namespace)["search_documents"] == []
    assert search.write("second", now_ms, [write], "simple") == {one.key}


@pytest.mark.only(cold="postgres")
async def test_an_index_that_hangs_holds_up_no_archiver(opener: Any) -> None:
    """Its rows are locked for as long as you like, and its function fails: commits are archived all the same."""

    def embed(texts: list[str]) -> list[list[float]]:
        raise ValueError("no model today")

    store = await searching(opener, archive_every=0.02, sql_timeout=5.0)
    engine = create_engine(opener.archive)
    with engine.begin() as connection:
        connection.execute(text("SELECT * FROM search_partitions FOR UPDATE"))
        connection.execute(text("LOCK TABLE search_documents, search_heads IN ACCESS EXCLUSIVE MODE"))
        for number in range(5):
            await asyncio.wait_for(store.session("c1").set("n", number, durability="archived"), 2.0)
    engine.dispose()
    assert await places(store, "4") == [("c1", "n")]


async def test_what_the_index_lacks_is_counted(opener: Any) -> None:
    store = await searching(opener, archiver=False)
    for number in range(3):
        await store.session(f"c{number}").set("n", MARK)
    await store.admin.archive()
    findings = {finding.name: finding for finding in await store.admin.doctor()}
    assert findings["index"].found.startswith("3 of 3 records")
    await store.admin.update_index()
    findings = {finding.name: finding for finding in await store.admin.doctor()}
    assert findings["index"].ok


# Items


@pytest.mark.only(api="asyncio", cold=("sqlite", "postgres"))
async def test_items_are_found_in_their_collection_and_by_their_values(opener: Any) -> None:
    """A fork finds those that it shows of its source, until it says otherwise itself."""
    store = await searching(opener, archiver=False)
    await store.admin.update_index()
    cold = tiers(store).cold
    journal = Journal(cold)
    put, gone = (b"p", b"notes\0a", b'{"text":"a red hat","size":3}'), (b"q", b"notes\0a", b"")
    journal.commit("session:c1", put, (b"p", b"other\0b", b'"a blue hat"'))
    fork = journal.fork("session:c1", "session:f1")
    journal.commit("session:f1", gone)
    journal.commit(
        "session:c1", (b"p", b"notes\0c", b"\xff\xfe no JSON"), (b"p", b"notes\0d", b'{"text":"hat","size":5}')
    )
    journal.flush()
    assert fork.version == 1
    await follower_of(tiers(store)).catch_up()

    async def found(words: str | None = None, **options: Any) -> set[tuple[str, Any, Any]]:
        hits = await store.search(words, kinds=["item"], **options)
        return {(hit.id, hit.collection, hit.key) for hit in hits}

    assert await found("hat") == {
        ("c1", "notes", "a"), ("c1", "other", "b"), ("c1", "notes", "d"), ("f1", "other", "b"),
    }  # fmt: skip
    assert await found("hat", collection="notes", filter={"size": 5}) == {("c1", "notes", "d")}
    assert await found(filter={"size": {"$lt": 5}}) == {("c1", "notes", "a")}


# One of the user's own


class Elsewhere:
    """An index in memory, which forgets to answer now and then."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, ...], SearchDocument] = {}
        self.calls = 0

    async def apply(self, rows: Any) -> None:
        self.calls += 1
        for row in rows:
            if isinstance(row, SearchRemoval):
                names = (
                    (row.scope, row.id) if row.kind is None else (row.scope, row.id, row.kind, row.collection, row.name)
                )
                for place in [place for place in self.kept if place[: len(names)] == names]:
                    del self.kept[place]
            else:
                self.kept[row.scope, row.id, row.kind, row.collection, row.name] = row
        if self.calls % 2:
            raise TimeoutError("its answer was lost")

    def search(self, query: SearchQuery) -> list[SearchMatch]:
        found = [each for each in self.kept.values() if all(word in each.text for word in query.words.split())]
        return [SearchMatch(each, 1.0) for each in found][query.offset : query.offset + query.limit]


async def test_an_index_of_the_users_own_hears_of_everything_at_least_once(opener: Any) -> None:
    index = Elsewhere()
    store = await opener(search=Search(index=index), partitions=2, archive_every=0.02)
    session = store.session("c1", user="u1")

    async def found(words: str) -> list[Any]:
        async def asked() -> Any:
            try:
                return [(hit.id, hit.key, hit.number) for hit in await store.search(words, fresh=True)] + [None]
            except Unavailable:
                return None

        return (await until(asked))[:-1]

    await session.write(set={"place": MARK, "gone": MARK}, append=[said(f"to {MARK}")])
    assert set(await found(MARK)) == {("c1", "place", None), ("c1", "gone", None), ("c1", None, 0)}
    await session.delete("gone")
    assert set(await found(MARK)) == {("c1", "place", None), ("c1", None, 0)}
    await session.set("place", "zagreb")
    assert set(await found(MARK)) == {("c1", None, 0)}

    async def forgotten() -> bool:
        try:
            await store.forget("u1")
        except Unavailable:
            return False
        return True

    await until(forgotten)
    assert index.kept == {}
    await found("x")
    assert (
        everything_in_sql(opener.archive, opener.namespace)["search_documents"] == [] if opener.cold != "memory" else 1
    )


# Refused


@pytest.mark.only(cold=("sqlite", "memory"))
async def test_an_sqlite_without_fts5_says_so(opener: Any, monkeypatch: Any) -> None:
    create = tuple(each.replace("USING fts5", "USING fts99") for each in search_index._SQLITE)
    monkeypatch.setattr(search_index, "_SQLITE", create)
    with pytest.raises(ConfigurationError, match="no such module: fts99"):
        await searching(opener)


@pytest.mark.replicas
@pytest.mark.only(cold="postgres")
async def test_a_role_that_may_not_make_the_index_is_told_who_may(opener: Any) -> None:
    plain = await opener(partitions=4)
    await plain.session("c1").set("place", MARK, durability="archived")
    run_sql(
        opener,
        "DROP ROLE IF EXISTS reader_search",
        "CREATE ROLE reader_search LOGIN PASSWORD 'word'",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO reader_search",
        "GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO reader_search",
    )
    archive = opener.archive
    try:
        with pytest.raises(ConfigurationError, match="distributed-state index"):
            await searching(opener, archive=logged_in(archive, "reader_search:word"))
        with pytest.raises(ConfigurationError, match="no language 'klingon'"):
            await searching(opener, search=Search(language="klingon"))
        await searching(opener, search=Search(language="english"))
        # Whose rights end at the tables of the archive writes on: what notes its changes has rights of its own.
        other = await opener(
            archive=logged_in(archive, "reader_search:word"), archive_every=0.02, search=False, partitions=4
        )
        await other.session("c2").set("places", f"{MARK}s", durability="archived")
        assert await places(await searching(opener, search=Search(language="english")), "zanzibars running") == []
    finally:
        run_sql(opener, "DROP OWNED BY reader_search")


@pytest.mark.parametrize(
    ("search", "complaint"),
    [
        (Search(embed=lambda texts: []), "given together"),
        (Search(dimensions=3), "given together"),
        (Search(kinds=()), "kinds are some of"),
        (Search(embed=lambda texts: [], dimensions=0), "dimensions is an int"),
        ("yes", "give True or Search"),
    ],
)
async def test_what_makes_no_sense_is_refused_at_once(opener: Any, search: Any, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        await opener(search=search)


async def test_an_index_made_otherwise_is_not_taken_for_another(opener: Any) -> None:
    store = await searching(opener)
    await store.session("c1").set("place", MARK)
    await store.admin.update_index()
    if opener.cold == "memory":
        return
    await store.close()
    with pytest.raises(ConfigurationError, match="open the store with the same options"):
        await opener(search=Search(kinds=("field",)), partitions=4)
    again = await opener(partitions=4)  # one that does not want it: else its follower makes it again
    assert await again.admin.remove_index()
    assert not await again.admin.remove_index()
    await again.close()
    assert await places(await opener(search=Search(kinds=("message",)), partitions=4), MARK) == []


@files
@pytest.mark.replicas
async def test_settings_that_a_newer_release_added_to_an_index_are_ignored(opener: Any) -> None:
    """A worker of this release could not search in a fleet of which one worker was updated."""
    store = await searching(opener)
    await store.session("c1").set("place", MARK)
    await store.admin.update_index()
    await store.close()
    added = r"""UPDATE search_indexes SET settings = replace(settings, '{', '{"fuzzy"\:true,')"""
    run_sql(opener, added)
    for search in True, None:
        assert await places(await opener(search=search, partitions=4), MARK) == [("c1", "place")]
    with pytest.raises(ConfigurationError, match="open the store with the same options"):
        await opener(search=Search(kinds=("field",)), partitions=4)
