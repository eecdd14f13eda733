"""Searching: what records say is found, nothing else is, and what finds it never holds up who writes."""

from __future__ import annotations

from typing import Any

import pytest
from below import until
from searching import MARK, places, run_sql, said, searching
from sqlalchemy import make_url

from distributed_state import InvalidValue, PutItem, TooLarge
from distributed_state.cold import search_store
from distributed_state.search import querying

pytestmark = pytest.mark.usefixtures("database_of_its_own")


async def test_messages_and_fields_are_found_by_what_they_say(opener: Any) -> None:
    store = await searching(opener)
    await store.session("c1", user="u1").write(
        set={"city": "Bergen", "plan": {"stops": ["Oslo", "Trondheim"]}}, append=[said("A weekend in Oslo, please")]
    )
    await store.user("u1").set("home", "Oslo")
    assert set(await places(store, "oslo")) == {("c1", 0), ("c1", "plan"), ("u1", "home")}
    assert await places(store, "oslo weekend") == [("c1", 0)]
    assert await places(store, "Bergen", kinds=["message"]) == []
    (hit,) = await store.search("weekend")
    assert (hit.scope, hit.id, hit.user, hit.kind, hit.number) == ("session", "c1", "u1", "message", 0)
    assert hit.text == "A weekend in Oslo, please"
    assert hit.value["role"] == "user"
    assert hit.version == 1
    assert hit.score > 0


async def test_what_a_user_types_is_words_and_never_the_syntax_of_a_query(opener: Any) -> None:
    """Quotes, operators, columns and wildcards of FTS5 and of tsquery mean nothing."""
    store = await searching(opener)
    await store.session("c1").append(said('she said "hello" to Ana-Maria by the gate'))
    await store.session("c2").append(said("nothing of that"))
    asked = (
        ('"hello"', 1), ("hello AND gate", 0), ("hel*", 0), ("NEAR(hello gate)", 0), ("text:hello", 0), ("-hello", 1),
        ("hello OR nothing", 0), ('hello" OR "nothing', 0), ("hello'); DROP TABLE records; --", 0), ("'hello'", 1),
        ("hello & gate", 1), ("!hello", 1), ("hello <-> gate", 1), ("hello:*", 1), ("(hello", 1), ("^hello", 1),
        ("hello\0gate", 1), ("\ud800 hello", 1), ("Ana-Maria", 1), ("ana maria", 1), ("{hello}", 1), ("\\hello\\", 1),
    )  # fmt: skip
    for query, count in asked:
        assert len(await places(store, query)) == count, query
    for query in ("", '"', "***", "()", "' '", "\0", '"" AND ""', "<->"):
        assert await places(store, query or " ") == [], query
    with pytest.raises(InvalidValue, match="at most 64 words"):
        await store.search("a " * 65)


@pytest.mark.only(cold="postgres")
@pytest.mark.parametrize("by", ["database", "url"])
async def test_a_server_that_reads_backslashes_in_its_own_way_finds_the_same(opener: Any, by: str) -> None:
    """The driver escaped the bytes of a list for a statement's text, and they were sent as a parameter."""
    if by == "database":
        name = make_url(opener.archive).database
        run_sql(opener, f'ALTER DATABASE "{name}" SET standard_conforming_strings = off')
    else:
        opener.archive += "?options=-c%20standard_conforming_strings%3Doff"
    store = await searching(opener)
    text = "ba\\ck 'slash' \"x\" \\x22"
    await store.session("c1").write(
        set={f"k{text}": {"place": MARK, text: text}}, append=[said(f"{MARK} {text}")],
        items=[PutItem(collection=f"c{text}", key=f"i{text}", value=f"{MARK} {text}")],
    )  # fmt: skip
    hits = await store.search(MARK, fresh=True)
    assert {(hit.kind, hit.collection, hit.key, hit.number) for hit in hits} == {
        ("field", None, f"k{text}", None), ("item", f"c{text}", f"i{text}", None), ("message", None, None, 0),
    }  # fmt: skip
    assert all(text in str(hit.text) for hit in hits)
    await store.session("c1").write(delete=[f"k{text}"])
    assert len(await places(store, MARK)) == 2


async def test_words_are_found_whatever_their_case_accents_and_script(opener: Any) -> None:
    store = await searching(opener)
    for number, text in enumerate(("Über Ärger", "Ελλάδα", "Привет мир", "naïve café")):
        await store.session(f"c{number}").append(said(text))
    assert await places(store, "über") == [("c0", 0)]
    assert await places(store, "ελλάδα") == [("c1", 0)]
    assert await places(store, "МИР") == [("c2", 0)]
    assert await places(store, "CAFÉ") == [("c3", 0)]
    if opener.cold != "postgres":
        assert set(await places(store, "cafe uber", match="any")) == {("c0", 0), ("c3", 0)}


async def test_the_most_relevant_comes_first_and_pages_follow_one_another(opener: Any) -> None:
    store = await searching(opener)
    await store.session("much").append(said("oslo oslo oslo oslo"))
    for number in range(5):
        await store.session(f"little{number}").append(said("oslo and " + "many other words " * 20))
    every = await places(store, "oslo")
    assert every[0] == ("much", 0)
    assert len(every) == 6
    pages = [await places(store, "oslo", limit=2, offset=at) for at in (0, 2, 4, 6)]
    assert [hit for page in pages for hit in page] == every
    scores = [hit.score for hit in await store.search("oslo")]
    assert scores == sorted(scores, reverse=True)


async def test_large_hits_are_read_a_few_at_a_time_and_not_more_than_fit(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await searching(opener)
    await store.session("s").append(*(said(f"{MARK} {number} {'x' * 5_000}") for number in range(12)))
    whole = await places(store, MARK)
    read = []
    search = search_store.search

    def counted(*asked: Any) -> Any:
        page = search(*asked)
        read.append(len(page.rows))
        return page

    monkeypatch.setattr(search_store, "search", counted)
    monkeypatch.setattr(search_store, "PAGE_BYTES", 20_000)
    assert await places(store, MARK) == whole
    assert (max(read), sum(read), len(whole)) == (3, 12, 12)
    assert await places(store, MARK, offset=7) == whole[7:]
    assert await places(store, MARK, limit=2) == whole[:2]
    monkeypatch.setattr(querying, "_MOST_BYTES", 30_000)
    assert await places(store, MARK, limit=5, offset=3) == whole[3:8]
    with pytest.raises(TooLarge, match="the first 6 hits"):
        await places(store, MARK)


async def test_only_what_was_asked_for_is_found(opener: Any) -> None:
    store = await searching(opener)
    await store.session("shop/1", user="u1").write(set={"a": {"color": "red", "size": 3, "what": "hat"}})
    await store.session("shop/2", user="u2").write(set={"a": {"color": "blue", "size": 5, "what": "hat"}})
    await store.session("shopping", user="u1").write(append=[said("a hat"), said("your hat", "assistant")])
    await store.app("shop/1").set("a", "hat")
    assert await places(store, "hat", scope="app") == [("shop/1", "a")]
    assert set(await places(store, "hat", prefix="shop/")) == {("shop/1", "a"), ("shop/2", "a")}
    assert set(await places(store, "hat", user="u1", kinds=["message"])) == {("shopping", 0), ("shopping", 1)}
    assert await places(store, "hat", filter={"role": "assistant"}) == [("shopping", 1)]
    assert await places(store, "hat", filter={"color": "red", "size": 3}) == [("shop/1", "a")]
    assert await places(store, filter={"size": {"$gt": 3, "$lte": 5}}) == [("shop/2", "a")]
    assert await places(store, filter={"size": {"$lt": "x"}}) == []
    assert await places(store, filter={"color": {"$ne": "red"}}, prefix="shop/", scope="session") == [("shop/2", "a")]
    assert await places(store, prefix="%") == await places(store, prefix="shop_") == []
    with pytest.raises(InvalidValue, match="is not one of"):
        await store.search("hat", filter={"size": {"$where": 1}})


async def test_what_is_shown_no_more_is_not_found(opener: Any) -> None:
    store = await searching(opener)
    session = store.session("c1", user="u1")
    await session.write(set={"city": "Oslo", "mood": "sunny"}, append=[said("first oslo")])
    await session.checkpoint("before")
    await session.append(said("second oslo"))
    assert set(await places(store, "oslo")) == {("c1", "city"), ("c1", 0), ("c1", 1)}
    await session.set("city", "Bergen")
    assert set(await places(store, "oslo")) == {("c1", 0), ("c1", 1)}
    await session.delete("mood")
    assert await places(store, "sunny") == []
    await session.rollback(label="before")
    assert set(await places(store, "oslo")) == {("c1", "city"), ("c1", 0)}
    assert await places(store, "bergen") == []
    assert await places(store, "sunny") == [("c1", "mood")]
    await session.fork("f1")
    fork = store.session("f1")
    await fork.append(said("only the fork has this oslo"))
    assert set(await places(store, "oslo", prefix="f1")) == {("f1", "city"), ("f1", 0), ("f1", 2)}
    await session.clear(messages=True)
    assert set(await places(store, "oslo")) == {("f1", "city"), ("f1", 0), ("f1", 2)}
    await store.delete("f1")
    assert await places(store, "oslo") == []


async def test_a_field_that_has_ended_is_not_found(opener: Any) -> None:
    store = await searching(opener)
    await store.session("c1").set("code", "zanzibar", ttl=0.5)
    await store.session("c2").set("code", "zanzibar", ttl=3600)
    assert ("c2", "code") in await places(store, "zanzibar")

    async def over() -> bool:
        return await places(store, "zanzibar") == [("c2", "code")]

    await until(over)
