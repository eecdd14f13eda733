"""Tags: short texts by which records are found, set in a commit with anything else; listings by prefix and by tag."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from below import keys_of, redis_of, tiers
from controls import sabotage

from distributed_state import AccessDenied, Encryption, InvalidValue, KeyRing, Request, TooLarge
from distributed_state.values.model import escape


async def ids(store: Any, **wanted: Any) -> list[str]:
    """All pages of a listing, of two rows each."""
    found: list[str] = []
    after = None
    while page := await store.sessions(limit=2, after=after, **wanted):
        found += [row.id for row in page]
        after = page[-1].cursor
    return found


async def test_tags_are_set_and_removed_with_anything_else(store: Any) -> None:
    session = store.session("s")
    assert await session.tags() == {}
    tag = {"run": ["r2", "r1"], "a:b%": "ü:\x00\ud800"}
    written = await session.write(set={"a": 1}, append=[{"role": "user", "content": "x"}], tag=tag)
    assert written.version == 1
    want = {"a:b%": ("ü:\x00\ud800",), "run": ("r1", "r2")}
    assert await session.tags() == await session.tags(fresh=True) == want
    assert await session.get_all(fresh=True) == {"a": 1}
    async with store.batch() as batch:
        batch.on(session).tag("run", "r3")
        batch.on(session).untag("run", "r1", "never")
    async with session.turn() as turn:
        turn.tag("run", "r4")
    async with session.transaction() as view:
        view.untag("a:b%", "ü:\x00\ud800")
    assert await session.tags() == await session.tags(fresh=True) == {"run": ("r2", "r3", "r4")}
    assert (await session.view()).tags == {"run": ("r2", "r3", "r4")}
    history = await session.history()
    assert [(sorted(each.tagged), each.untagged) for each in history][:2] == [
        ([("a:b%", "ü:\x00\ud800"), ("run", "r1"), ("run", "r2")], ()),
        ([("run", "r3")], (("run", "never"), ("run", "r1"))) if history[1].untagged[0] == ("run", "never")
        else ([("run", "r3")], (("run", "r1"), ("run", "never"))),
    ]  # fmt: skip
    assert (await session.at(version=1)).tags == want
    await store.admin.archive()
    assert await ids(store, tags={"run": "r3"}) == ["s"]
    assert await ids(store, tags={"run": "r1"}) == await ids(store, tags={"a:b%": "ü:\x00\ud800"}) == []


async def test_two_writers_of_tags_do_not_conflict(store: Any) -> None:
    session = store.session("s")
    await asyncio.gather(*(session.write(tag={"run": f"r{number}"}) for number in range(20)))
    assert len((await session.tags(fresh=True))["run"]) == 20


@pytest.mark.parametrize(
    "tag",
    [{"": "x"}, {"k": ""}, {"k": 1}, {1: "x"}, {"k" * 65: "x"}, {"k": "x" * 257}, {"k": ":" * 86}, {"k": [None]},
     ["k"], {"k": None}, "k", {"k": b"x"}],
)  # fmt: skip
async def test_what_is_no_tag_is_refused_before_anything_is_sent(store: Any, tag: Any) -> None:
    session = store.session("s")
    for given in ({"tag": tag}, {"untag": tag}):
        with pytest.raises(InvalidValue):
            await session.write(set={"a": 1}, **given)
    with pytest.raises(InvalidValue):
        await store.sessions(tags=tag)
    assert await session.version() == 0


async def test_tag_and_untag_of_one_are_a_contradiction(store: Any) -> None:
    with pytest.raises(InvalidValue):
        await store.session("s").write(tag={"k": "a"}, untag={"k": ["b", "a"]})


async def test_a_record_has_so_many_tags_at_most(store: Any) -> None:
    session = store.session("s")
    most = [f"r{number}" for number in range(256)]
    await session.set_many({f"f{number}": number for number in range(300)})
    await session.write(tag={"run": most})
    await session.write(tag={"run": most[:9]})  # they are there
    with pytest.raises(TooLarge):
        await session.write(tag={"run": "one more"}, set={"a": 1})
    assert await session.get("a") is None
    await session.write(tag={"run": "one more"}, untag={"run": "r0"})
    # It holds also where the record came back from SQL.
    await store.admin.archive()
    with redis_of(store) as client:
        client.delete(keys_of(store, "s").record)
    tiers(store).hot.clear()
    with pytest.raises(TooLarge):
        await session.write(tag={"run": "r0"})
    assert len((await session.tags(fresh=True))["run"]) == 256
    with sabotage("commit", "if tagged > 256 then", "if tagged > 1000 then"):  # the control
        await session.write(tag={"run": "r0"})
    assert len((await session.tags(fresh=True))["run"]) == 257


async def test_deleting_removes_tags_and_clearing_keeps_them(store: Any) -> None:
    session = store.session("s")
    await session.write(set={"a": 1}, tag={"k": "v"})
    await session.clear()
    assert await session.tags(fresh=True) == {"k": ("v",)}
    await session.restore_state({"fields": {"b": 2}})
    assert await session.tags() == {"k": ("v",)}
    await store.delete("s")
    assert await session.tags() == {}
    await store.admin.archive()
    assert await ids(store, tags={"k": "v"}) == []
    await session.write(set={"b": 1}, revive=True)
    assert await session.tags() == await session.tags(fresh=True) == {}
    await session.rollback(version=1)
    assert await session.tags() == {"k": ("v",)}
    await store.admin.archive()
    assert await ids(store, tags={"k": "v"}) == ["s"]
    await store.erase("s")
    assert await ids(store, tags={"k": "v"}) == []


async def test_forks_and_copies_have_the_tags_of_what_they_are_made_from(store: Any) -> None:
    session = store.session("s")
    await session.write(set={"a": 1}, tag={"k": ["v", "w"]})
    await session.write(untag={"k": "w"})
    await session.fork("f")
    await session.fork("g", version=1)
    await store.admin.import_(await store.admin.export("s"), id="copy")
    assert await store.session("f").tags() == await store.session("copy").tags() == {"k": ("v",)}
    assert await store.session("g").tags() == {"k": ("v", "w")}
    await store.admin.archive()
    assert await ids(store, tags={"k": "v"}) == ["copy", "f", "g", "s"]
    assert await ids(store, tags={"k": ["w", "v"]}) == ["g"]


@pytest.mark.parametrize("of", ["##", "##a", "##a:", "##:b", "##a:b:c", "##a:\x00", "##%61:b", "##a:" + "b" * 257])
async def test_a_forged_tag_is_not_imported(store: Any, of: str) -> None:
    await store.session("s").write(tag={"a": "b"})
    lines = await store.admin.export("s")
    forged = [line.replace("##a:b", of.replace("\x00", "\\u0000")) for line in lines]
    assert forged != lines
    with pytest.raises(InvalidValue):
        await store.admin.import_(forged, id="t")


async def test_a_listing_by_prefix_takes_every_letter_for_itself(store: Any) -> None:
    every = ["a", "a%", "a%b", "a_", "a_b", "ab", "a:b", "a:c", "a\x00", "aé", "a\U0010ffff", "a\ud800", "A", "b", "á"]
    async with store.batch() as batch:
        for each in every:
            batch.on(store.session(each)).set("n", 1)
        batch.on(store.user("ab")).set("n", 1)
    await store.admin.archive()
    for prefix in ("", "a", "a%", "a_", "a:", "a\x00", "a\U0010ffff", "a\ud800", "á", "c", "a:b", "a:bc"):
        want = {each for each in every if each.startswith(prefix)}
        found = await ids(store, prefix=prefix)
        assert set(found) == want, prefix
        assert len(found) == len(want)
    assert await ids(store, prefix="a", scope="user") == ["ab"]
    in_order = sorted((each for each in every if each.startswith("a")), key=lambda each: escape(each).encode())
    assert await ids(store, prefix="a") == in_order
    for prefix in (1, b"a", "x" * 1025):
        with pytest.raises(InvalidValue):
            await store.sessions(prefix=prefix)


async def test_prefix_tag_owner_and_page_go_together(store: Any) -> None:
    for number in range(12):
        session = store.session(f"app{number % 2}:{number:02}", user=f"u{number % 3}")
        await session.write(set={"n": 1}, tag={"run": [f"r{number % 4}", "all"]})
    await store.delete("app0:04")
    await store.admin.archive()
    assert await ids(store, tags={"run": "r0"}) == ["app0:00", "app0:08"]
    assert await ids(store, prefix="app1:", tags={"run": "all"}) == [f"app1:{number:02}" for number in range(1, 12, 2)]
    assert await ids(store, prefix="app0:", user="u2") == ["app0:02", "app0:08"]
    assert await ids(store, tags={"run": ["all", "r0"]}, user="u2") == ["app0:08"]
    newest = await store.sessions(limit=2)
    by_id = await store.sessions(limit=2, prefix="")
    with pytest.raises(InvalidValue):
        await store.sessions(prefix="", after=newest[-1].cursor)
    with pytest.raises(InvalidValue):
        await store.sessions(after=by_id[-1].cursor)


async def test_tags_are_plain_where_values_are_encrypted(opener: Any) -> None:
    keys = Encryption(KeyRing({"k": b"0123456789abcdef0123456789abcdef"}))
    store = await opener(encryption=keys)
    await store.session("s").write(set={"a": "secret"}, tag={"run": "r1"})
    with redis_of(store) as client:
        fields = client.hgetall(keys_of(store, "s").record)
    assert b"##run:r1" in fields
    assert b"secret" not in fields[b"a"]
    await store.admin.archive()
    assert await ids(store, tags={"run": "r1"}) == ["s"]


async def test_a_policy_is_asked_for_tags(opener: Any) -> None:
    denied: list[tuple[str, str | None]] = []
    denies = False

    def policy(request: Request) -> bool:
        if denies and request.field == "#tags":
            denied.append((request.action, request.field))
        return not denies or request.field != "#tags"

    store = await opener(access=policy)
    await store.session("s").write(set={"a": 1}, tag={"k": "v"})
    denies = True
    session = store.session("s")
    for work in (session.tags, session.view, session.history, lambda: session.at(version=1),
                 lambda: session.write(tag={"k": "w"}), lambda: session.write(untag={"k": "v"}),
                 lambda: store.sessions(tags={"k": "v"}),
                 lambda: session.fork("t")):  # fmt: skip
        denied.clear()
        with pytest.raises(AccessDenied):
            await work()
        assert denied
    assert await session.get("a") == 1
