"""Items: many keyed values beside a record's fields. Law: none is lost, none is read that was not asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from below import keys_of, redis_of, tiers
from controls import sabotage
from counting import asked
from pydantic import BaseModel

from distributed_state import (
    ColdUnavailable,
    Conflict,
    CorruptState,
    DeleteItem,
    Encryption,
    InvalidValue,
    KeyRing,
    NotFound,
    PutItem,
    TooLarge,
    WarmUnavailable,
)


class Counted(BaseModel):
    n: int = 0


QUIET: dict[str, Any] = {"archiver": False, "durability": "memory"}
# Order is by bytes: neither by the language of a database nor by UTF-16; any text is a key, the empty one, too.
KEYS = ["", "B", "a", "a\0b", "b", "bb", "\x7f", "\xe9", "\uffff", "\U0001f600"]


def evict(store: Any, id: str = "u", scope: str = "user", *, record: bool = True, window: bool = True) -> None:
    """What volatile-lru may do at any time to what is archived, each key for itself."""
    mine = keys_of(store, id, scope)
    with redis_of(store) as client:
        for key in (mine.record,) * record + (mine.items,) * window:
            assert client.pttl(key) != -1, "what is not archived has no TTL"
            client.delete(key)
    tiers(store).hot.forget(mine.ref.text)


async def all_of(items: Any, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    page = await items.list(**options)
    found |= {item.key: item.value for item in page.items}
    while page.next is not None:
        page = await items.list(after=page.next, **options)
        found |= {item.key: item.value for item in page.items}
    return found


async def test_an_item_comes_back_as_it_was_put(store: Any) -> None:
    items = store.user("u").items("x")
    values = [None, True, 2**70, 1.5, "text", [], {}, {"a": [1, {"b": None}]}, b"", b"\0\x01\x02 bytes"]
    for number, value in enumerate(values):
        assert await items.put(f"k{number}", value) == number + 1
    for number, value in enumerate(values):
        found = await items.get(f"k{number}")
        assert found == value
        assert type(found) is type(value)
    assert await items.get("none", "default") == "default"
    assert await items.exists("k0")
    assert not await items.exists("none")
    assert await items.get_many(["k3", "none", "k4"]) == {"k3": 1.5, "k4": "text"}
    assert await items.delete("k3", "k4") == len(values) + 1
    assert await items.get_many(["k3", "k4"]) == {}
    assert await store.user("u").get_all() == {}, "items are no fields"
    assert await store.user("u").items("y").get("k0") is None, "nor of another collection"


async def test_every_scope_has_items_and_messages_stay_what_they_are(store: Any) -> None:
    for record in (store.session("s"), store.user("u"), store.app("a"), store.task("t")):
        await record.items("x").put("k", record.id)
        assert await record.items("x").get("k") == record.id
    session = store.session("s")
    await session.append({"role": "user", "content": "hello"})
    assert len(await session.messages()) == 1
    assert await session.items("x").get("k") == "s"


@pytest.mark.parametrize("where", ["redis", "window gone", "sql"])
async def test_a_list_is_in_the_order_of_bytes(opener: Any, where: str) -> None:
    store = await opener(**QUIET)
    items = store.user("u").items("x")
    await items.put_many({key: key for key in reversed(KEYS)})
    await store.user("u").items("w").put("a", "of another collection")
    if where != "redis":
        await store.admin.archive()
        evict(store, record=where == "sql")
    assert [item.key for item in (await items.list()).items] == KEYS
    assert [item.key for item in (await items.list(reverse=True)).items] == KEYS[::-1]
    assert list(await all_of(items, limit=3)) == KEYS
    assert [item.key for item in (await items.list(prefix="a")).items] == ["a", "a\0b"]
    assert [item.key for item in (await items.list(after="a", before="\x7f")).items] == ["a\0b", "b", "bb"]
    page = await items.list(after="a", before="\x7f", reverse=True, limit=2)
    assert [item.key for item in page.items] == ["bb", "b"]
    page = await items.list(after="a", before=page.next, reverse=True, limit=2)
    assert [item.key for item in page.items] == ["a\0b"]
    assert page.next is None


async def test_what_is_put_anew_lies_over_what_sql_has(opener: Any) -> None:
    store = await opener(**QUIET)
    items = store.user("u").items("x")
    with sabotage("mark_archived", "local window_items = 64", "local window_items = 2"):
        await items.put_many({f"k{number}": 1 for number in range(9)})
        await store.admin.archive()
    await items.put("k3", 2)
    await items.delete("k4")
    await items.put("k9", 2)
    expected = {f"k{number}": 1 for number in range(9)} | {"k3": 2, "k9": 2}
    del expected["k4"]
    assert await all_of(items) == expected
    assert await all_of(items, limit=1) == expected
    assert await items.get_many([f"k{number}" for number in range(10)]) == expected


async def test_a_page_has_about_a_megabyte(store: Any) -> None:
    """Of whatever size the items are: nobody is handed more than is asked for, and one is handed out in any case."""
    items = store.user("u").items("x")
    for number in range(6):
        await items.put(f"k{number}", b"x" * 700_000)
    await store.admin.archive()
    evict(store)
    page = await items.list()
    assert [item.key for item in page.items] == ["k0"]
    assert len(await all_of(items)) == 6
    await items.put("k6", b"x" * 700_000)
    assert len(await all_of(items)) == 7


async def test_a_precondition_that_does_not_hold_writes_nothing(opener: Any) -> None:
    store = await opener(**QUIET)
    user = store.user("u")
    items = user.items("x")
    assert await items.put("k", 1, if_absent=True) == 1
    refused: list[Callable[[], Awaitable[Any]]] = [
        lambda: items.put("k", 2, if_absent=True),
        lambda: items.put("other", 2, if_present=True),
        lambda: items.put("k", 2, equals=3),
        lambda: items.put("k", 2, equals=True),
        lambda: items.put("k", 2, equals=None),
        lambda: items.put("other", 2, equals=1),
        lambda: items.put_many({"new": 1, "k": 2}, if_absent=True),
        lambda: items.delete("other", if_present=True),
        lambda: items.delete("k", equals=2),
        lambda: user.write(set={"a": 1}, items=[PutItem(collection="x", key="k", value=2, if_absent=True)]),
    ]
    for where in ("redis", "sql"):
        for call in refused:
            with pytest.raises(Conflict):
                await call()
        assert await user.version(fresh=True) == 1, where
        await store.admin.archive()
        evict(store)
    assert await items.put("k", 2, if_present=True) == 2
    assert await items.put("k", 3, equals=2.0) == 3, "numbers by their value, as in `expect`"
    await store.admin.archive()
    evict(store)
    item = await items.find("k")
    assert await items.put("k", 4, equals=item) == 4
    with pytest.raises(Conflict):
        await items.put("k", 5, equals=item)
    assert await items.delete("k", if_present=True) == 5
    assert await items.put("k", 6, if_absent=True) == 6


async def test_values_are_equal_as_those_of_fields_are(opener: Any) -> None:
    items = (await opener(**QUIET)).user("u").items("x")
    await items.put("k", {"a": [1, True], "b": 2})
    with pytest.raises(Conflict):
        await items.put("k", 1, equals={"a": [1, 1], "b": 2})
    assert await items.put("k", 1, equals={"b": 2.0, "a": [1.0, True]}) == 2


@pytest.mark.parametrize("where", ["redis", "sql"])
async def test_of_two_who_saw_that_there_is_none_one_puts_it(opener: Any, where: str) -> None:
    """`find` returned None to both: that is something to be expected, and not nothing."""
    store = await opener(**QUIET)
    user = store.user("u")
    items = user.items("x")
    await items.put("other", 1)
    if where == "sql":
        await store.admin.archive()
        evict(store)
    seen = [await items.find("k"), await items.find("k")]
    assert await items.put("k", "one", equals=seen[0]) == 2
    refused: list[Callable[[], Awaitable[Any]]] = [
        lambda: items.put("k", "two", equals=seen[1]),
        lambda: items.delete("k", equals=seen[1]),
        lambda: user.write(items=[PutItem(collection="x", key="k", value="two", equals=seen[1])]),
    ]
    for call in refused:
        with pytest.raises(Conflict):
            await call()
    with pytest.raises(Conflict):
        async with user.transaction() as view:
            view.put_item("x", "k", "two", equals=seen[1])
    with pytest.raises(Conflict):
        async with store.batch() as batch:
            batch.on(user).put_item("x", "k", "two", equals=seen[1])
    assert await items.get("k") == "one"
    assert await items.put("k", "two") == 3, "nothing is expected by default"


async def test_an_item_is_expected_in_its_own_place(opener: Any) -> None:
    """Of another key, or of another collection, the version says nothing."""
    store = await opener(**QUIET)
    user = store.user("u")
    await user.write(items=[PutItem(collection=where, key=key, value=1) for where in "xy" for key in "ab"])
    item = await user.items("x").find("a")
    assert (item.collection, item.key) == ("x", "a")
    for where, key in (("x", "b"), ("y", "a")):
        with pytest.raises(InvalidValue):
            await user.items(where).put(key, 2, equals=item)
        with pytest.raises(InvalidValue):
            await user.items(where).delete(key, equals=item)
    assert await user.items("x").put("a", 2, equals=item) == 2


async def test_a_transaction_refuses_an_item_of_another_epoch(opener: Any) -> None:
    """Its version is of another history. Also where the transaction is merged and made once more."""
    store = await opener(**QUIET)
    user = store.user("u")
    await user.items("x").put("k", 1)
    item = await user.items("x").find("k")
    with pytest.raises(Conflict):
        async with user.transaction() as view:
            view.put_item("x", "k", 2, equals=replace(item, epoch="99-other"))
    async with user.transaction() as view:
        view.put_item("x", "k", 2, equals=item)
    assert await user.items("x").get("k") == 2


async def test_sums_are_those_of_fields_whatever_becomes_of_items(opener: Any) -> None:
    """An item's name may be a field's, and what may be kept has a result of its own."""
    store = await opener(**QUIET)
    for record in (store.user("u"), store.user("t", schema=Counted)):
        for n in (1, 2):
            name = "n" if record.id == "t" else "notes\0k"
            items = [
                PutItem(collection="notes", key="k", value=7, keep=True),
                PutItem(collection="notes", key=f"new {n}", value=7, keep=True),
                PutItem(collection="notes", key="plain", value=7),
            ]
            written = await record.write(increment={name: 2}, items=items)
            assert (written.version, written.results) == (n, {name: 2 * n})


@pytest.mark.wide
async def test_a_commit_of_as_many_items_as_there_may_be_is_carried_out(opener: Any) -> None:
    """Each in a collection of its own, of each it is expected that SQL has none: a script gets no more than that."""
    store = await opener(**QUIET)
    user = store.user("u")
    many = [PutItem(collection=f"c{number}", key="k", value=1, if_absent=True) for number in range(1000)]
    await user.items("x").put("a", 1)
    await store.admin.archive()
    evict(store)
    assert (await user.write(items=many)).version == 2
    with pytest.raises(Conflict):
        await user.write(items=many)
    await store.admin.archive()
    evict(store)
    with pytest.raises(Conflict):
        await user.write(items=many)
    assert (await user.write(items=[replace(each, if_absent=False) for each in many])).version == 3


async def test_what_is_there_stays_where_only_missing_ones_are_put(opener: Any) -> None:
    """Insert or ignore, by item: also of a commit whose answer is asked for again."""
    store = await opener(**QUIET)
    items = store.user("u").items("x")
    await items.put("a", 1)
    assert await items.put_missing({"a": 2, "b": 2}) == {"b"}
    await store.admin.archive()
    evict(store)
    assert await items.put_missing({"a": 3, "b": 3, "c": 3}) == {"c"}
    assert await all_of(items) == {"a": 1, "b": 2, "c": 3}
    changes = await store.user("u").history()
    assert [list(change.items) for change in changes] == [[("x", "a")], [("x", "b")], [("x", "c")]]


async def test_items_fields_and_messages_are_one_commit(opener: Any) -> None:
    store = await opener(**QUIET)
    session = store.session("s")
    await session.items("x").put("old", 1)
    written = await session.write(
        set={"a": 1},
        increment={"n": 2},
        append=[{"role": "user", "content": "hello"}],
        items=[
            PutItem(collection="x", key="k", value=b"\x01"),
            PutItem(collection="y", key="k", value=2, keep=True),
            DeleteItem(collection="x", key="old"),
        ],
    )
    assert (written.version, written.results) == (2, {"n": 2})
    (change,) = await session.history(after=1)
    assert change.set == {"a": 1, "n": 2}
    assert len(change.appended) == 1
    assert {name: item and item.value for name, item in change.items.items()} == {
        ("x", "k"): b"\x01", ("y", "k"): 2, ("x", "old"): None,
    }  # fmt: skip
    async with store.batch() as batch:
        batch.on(session).put_item("x", "k", 3)
        batch.on(store.user("u")).put_item("x", "k", 4)
    assert await session.items("x").get("k") == 3
    async with session.turn() as turn:
        turn["a"] = 2
        turn.put_item("x", "k", 5)
        turn.delete_item("y", "k")
    assert await session.items("x").get("k") == 5
    assert not await session.items("y").exists("k")
    async with session.transaction() as view:
        view["a"] = 3
        view.put_item("x", "k", 6)
    assert await session.items("x").get("k") == 6
    with pytest.raises(Conflict):
        async with session.transaction() as view:
            view["a"] = 4
            await session.items("x").put("other", 1)
            view.put_item("x", "k", 7)
    assert await session.items("x").get("k") == 6


async def test_bad_names_and_values_are_refused_and_change_nothing(store: Any) -> None:
    user = store.user("u")
    items = user.items("x")
    for collection in ("", "a\0b", 1):
        with pytest.raises(InvalidValue):
            user.items(collection)
    with pytest.raises(TooLarge):
        user.items("x" * 65)
    with pytest.raises(TooLarge):
        await items.put("k" * 1025, 1)
    wrong: list[Callable[[], Awaitable[Any]]] = [
        lambda: items.put(1, 1),
        lambda: items.put("k", {1: 2}),
        lambda: items.put("k", float("nan")),
        lambda: items.put("k", 1, if_absent=True, if_present=True),
        lambda: items.put_many(["k"]),
        lambda: items.get_many("k"),
        lambda: items.list(limit=0),
        lambda: items.list(limit=1001),
        lambda: items.list(prefix=1),
        lambda: items.get("k", version=0),
        lambda: user.write(items=["k"]),
        lambda: items.delete(),
    ]
    for call in wrong:
        with pytest.raises(InvalidValue):
            await call()
    with pytest.raises(TooLarge):
        await items.put_many({f"k{number}": 1 for number in range(1001)})
    assert await user.version(fresh=True) == 0
    await items.put("k" * 1024, 1)
    assert await items.get("k" * 1024) == 1


# The past


async def test_items_are_read_as_they_were_at_a_version(opener: Any) -> None:
    store = await opener(**QUIET)
    user = store.user("u")
    items = user.items("x")
    await items.put("a", 1)
    await items.put("b", 2)
    await items.put("a", 3)
    await items.delete("b")
    assert await items.get("a", version=2) == 1
    assert await items.get("b", version=3) == 2
    assert await all_of(items, version=3) == {"a": 3, "b": 2}
    assert await all_of(items, version=4) == {"a": 3}
    for version in (5, 99):
        with pytest.raises(NotFound):
            await items.get("a", version=version)
        with pytest.raises(NotFound):
            await items.list(version=version)


async def test_a_rollback_takes_items_along(opener: Any) -> None:
    store = await opener(**QUIET)
    user = store.user("u")
    items = user.items("x")
    await items.put_many({"a": 1, "b": 1})
    await user.checkpoint("here")
    await items.put("a", 2)
    await items.delete("b")
    await items.put("c", 2)
    await user.rollback(label="here")
    assert await all_of(items) == {"a": 1, "b": 1}
    await items.put("d", 3)
    assert await items.put("b", 4, equals=1)
    assert await all_of(items) == {"a": 1, "b": 4, "d": 3}
    await store.admin.archive()
    evict(store)
    assert await all_of(items) == {"a": 1, "b": 4, "d": 3}
    await user.rollback(version=5)
    assert await all_of(items) == {"a": 2, "c": 2}
    await store.admin.purge(older_than=0.0)
    assert await all_of(items) == {"a": 2, "c": 2}


async def test_a_rollback_of_fields_alone_leaves_the_newest_items_in_redis(opener: Any) -> None:
    store = await opener(**QUIET)
    user = store.user("u")
    await user.items("x").put("a", 1)
    await user.set("f", 1)
    await user.set("f", 2)
    await user.rollback(steps=1)
    assert await user.get("f", fresh=True) == 1
    with redis_of(store) as client:
        assert client.exists(keys_of(store, "u", "user").items)
    assert await user.items("x").get("a") == 1


async def test_what_was_cleared_or_deleted_is_gone_and_comes_back_by_a_rollback(opener: Any) -> None:
    store = await opener(**QUIET)
    session = store.session("s")
    items = session.items("x")
    await session.write(set={"a": 1}, items=[PutItem(collection="x", key="k", value=1)])
    await session.clear()
    assert await all_of(items) == {"k": 1}, "not asked for"
    await session.clear(items=True)
    assert await all_of(items) == {}
    assert await items.get("k") is None
    assert await items.put("k", 2, if_absent=True) == 4
    await store.admin.archive()
    evict(store, "s", "session")
    assert await all_of(items) == {"k": 2}
    await session.rollback(version=1)
    assert await all_of(items) == {"k": 1}
    await store.delete("s")
    assert await all_of(items) == {}
    with pytest.raises(NotFound):
        await items.get("k", version=99)
    await session.rollback(version=4)
    assert await all_of(items) == {"k": 2}


async def test_a_fork_shows_the_items_of_its_source_and_keeps_its_own(opener: Any) -> None:
    store = await opener(**QUIET)
    user = store.user("u")
    items = user.items("x")
    await items.put_many({"a": 1, "b": 1})
    await items.put("a", 2)
    await user.fork("f", version=1)
    fork = store.user("f")
    theirs = fork.items("x")
    assert await all_of(theirs) == {"a": 1, "b": 1}, "before it is archived, too"
    assert await theirs.put("b", 3, equals=await theirs.find("b")) == 2
    await theirs.delete("a")
    assert await all_of(theirs) == {"b": 3}
    assert await all_of(items) == {"a": 2, "b": 1}
    await fork.rollback(version=1)
    await fork.fork("g")
    await store.erase(user.id, scope="user")
    assert await all_of(theirs) == {"a": 1, "b": 1}
    assert await all_of(store.user("g").items("x")) == {"a": 1, "b": 1}
    await store.admin.purge(older_than=0.0)
    assert await all_of(store.user("g").items("x")) == {"a": 1, "b": 1}


async def test_an_erased_record_leaves_no_item(opener: Any) -> None:
    store = await opener(**QUIET)
    user = store.user("u")
    await user.items("x").put("a", "secret")
    await store.erase(user.id, scope="user")
    with redis_of(store) as client:
        assert not client.exists(keys_of(store, "u", "user").items)
    assert await all_of(user.items("x")) == {}
    await user.create()
    await user.items("x").put("b", 1)
    assert await all_of(user.items("x")) == {"b": 1}


# Between Redis and SQL


async def test_only_the_newest_items_stay_in_redis(opener: Any) -> None:
    """64 of them, once they are archived; before, all."""
    store = await opener(**QUIET)
    items = store.user("u").items("x")
    for number in range(100):
        await items.put(f"k{number:03}", number)
    with redis_of(store) as client:
        window = keys_of(store, "u", "user").items
        assert sum(field.startswith(b":") for field in client.hkeys(window)) == 100
        assert client.pttl(window) == -1
        await store.admin.archive()
        kept = [field for field in client.hkeys(window) if field.startswith(b":")]
        assert len(kept) == 64
        assert b":x\0k099" in kept
        assert client.pttl(window) > 0
        await items.put("large", b"x" * 300_000)
        await store.admin.archive()
        assert client.hkeys(window).count(b":x\0k099") == 0
    assert len(await all_of(items)) == 101


async def test_what_settling_walks_is_bounded(opener: Any) -> None:
    """An item that is put anew leaves a gap in the log: a later settling goes on where one ended."""
    store = await opener(**QUIET)
    items = store.user("u").items("x")
    with (
        sabotage("mark_archived", "local walked_entries = 10000", "local walked_entries = 10"),
        sabotage("mark_archived", "local window_items = 64", "local window_items = 2"),
        redis_of(store) as client,
    ):
        window = keys_of(store, "u", "user").items
        for number in range(25):
            await items.put("a", number)
        for key in "bcd":
            await items.put(key, 1)
        for begins in (11, 21, 27):
            await store.admin.archive()
            assert int(client.hget(window, "#d")) == begins
            await items.put("d", 1)
        assert sorted(each for each in client.hkeys(window) if each.startswith(b":")) == [b":x\0c", b":x\0d"]
    assert await all_of(items) == {"a": 24, "b": 1, "c": 1, "d": 1}


async def test_of_many_collections_redis_forgets_what_left(opener: Any) -> None:
    """Their greatest keys would be more than the items, and than a command takes: SQL is asked instead."""
    store = await opener(**QUIET)
    user = store.user("u")
    for start in range(0, 4200, 700):
        some = range(start, start + 700)
        await user.write(items=[PutItem(collection=f"c{number}", key="k", value=number) for number in some])
    await store.admin.archive()
    with redis_of(store) as client:
        window = keys_of(store, "u", "user").items
        kept = client.hkeys(window)
        assert sum(each.startswith(b":") for each in kept) == 64
        assert not any(each.startswith(b"#h") for each in kept)
        assert client.hget(window, "#u") == b"1"
    assert await user.items("c7").get("k") == 7
    assert await user.items("c7").get("z") is None
    with pytest.raises(Conflict):
        await user.items("c8").put("k", 1, if_absent=True)
    await user.items("c8").put("l", 1, if_absent=True)
    assert await all_of(user.items("c8")) == {"k": 8, "l": 1}


async def test_a_list_behind_the_greatest_key_that_left_needs_no_sql(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest of a log are read from Redis, though the older ones have left it; with SQL away, too."""
    store = await opener(**QUIET)
    items = store.user("u").items("x")
    with sabotage("mark_archived", "local window_items = 64", "local window_items = 4"):
        await items.put_many({f"k{number}": number for number in range(9)})
        await store.admin.archive()  # k5 to k8 stay
    await items.put("l0", 9)
    await items.delete("k8")

    def away(*args: Any, **options: Any) -> Any:
        raise ColdUnavailable("away")

    away.__name__ = "list_items"
    with monkeypatch.context() as patch:
        patch.setattr(tiers(store).cold, "list_items", away)
        assert [each.key for each in (await items.list(prefix="k5")).items] == ["k5"]
        assert [each.key for each in (await items.list(prefix="l")).items] == ["l0"]
        assert [each.key for each in (await items.list(after="k4")).items] == ["k5", "k6", "k7", "l0"]
        page = await items.list(limit=3, reverse=True)
        assert ([each.key for each in page.items], page.next) == (["l0", "k7"], "k7")
        page = await items.list(limit=2, before="k8", reverse=True)
        assert ([each.key for each in page.items], page.next) == (["k7", "k6"], "k6")
        for needs in ({"prefix": "k4"}, {"prefix": "k"}, {"after": "k3"}, {"limit": 6, "reverse": True}):
            with pytest.raises(ColdUnavailable):
                await items.list(**needs)
    assert list(await all_of(items)) == [f"k{number}" for number in range(8)] + ["l0"]
    assert [each.key for each in (await items.list(limit=5, before="k7", reverse=True)).items] == [
        "k6", "k5", "k4", "k3", "k2",
    ]  # fmt: skip


async def test_redis_may_take_the_window_and_nothing_is_missing(opener: Any) -> None:
    store = await opener(**QUIET)
    items = store.user("u").items("x")
    await items.put_many({"a": 1, "b": 2})
    await store.admin.archive()
    evict(store, record=False)
    assert await all_of(items) == {"a": 1, "b": 2}
    await items.put("c", 3)
    assert await all_of(items) == {"a": 1, "b": 2, "c": 3}
    with pytest.raises(Conflict):
        await items.put("a", 4, if_absent=True)


async def test_a_field_written_later_does_not_let_redis_take_what_is_not_archived(opener: Any) -> None:
    """The window has a TTL of its own: only while all of its items are archived."""
    store = await opener(**QUIET)
    user = store.user("u")
    window = keys_of(store, "u", "user").items
    with redis_of(store) as client:
        await user.items("x").put("a", 1)
        await store.admin.archive()
        assert client.pttl(window) > 0
        await user.set("f", 1)
        assert client.pttl(window) > 0, "no item changed"
        await user.items("x").put("a", 2)
        assert client.pttl(window) == -1


async def test_while_sql_is_away_no_list_is_shorter(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await opener(**QUIET)
    items = store.user("u").items("x")
    await items.put("a", 1)
    assert await all_of(items) == {"a": 1}
    with sabotage("mark_archived", "local window_items = 64", "local window_items = 0"):
        await store.admin.archive()
    await items.put("b", 2)

    def away(*_: Any, **__: Any) -> Any:
        raise ColdUnavailable("away")

    for name in ("items", "list_items"):
        monkeypatch.setattr(tiers(store).cold, name, away)
    assert await items.get("b") == 2
    assert await items.get("c") is None, "greater than all that left: it is surely not in SQL"
    assert await items.put("c", 3, if_absent=True) == 3
    for call in (lambda: items.get("a"), lambda: items.list(), lambda: items.put("a", 2, if_absent=True)):
        with pytest.raises(ColdUnavailable):
            await call()


async def test_a_ghost_of_the_window_is_not_read(opener: Any) -> None:
    """Redis took the record and left its window; SQL, which was restored meanwhile, is older than that."""
    store = await opener(**QUIET)
    user = store.user("u")
    mine = keys_of(store, "u", "user")
    await user.items("x").put("a", 1)
    await store.admin.archive()
    evict(store, window=False)
    with redis_of(store) as client:
        client.hset(mine.items, b":x\0ghost", b"9 9 1")
        assert await user.get("f") is None
        assert not client.exists(mine.items)
    assert await all_of(user.items("x")) == {"a": 1}


async def test_a_repeated_put_is_applied_once(opener: Any) -> None:
    store = await opener(**QUIET)
    items = store.user("u").items("x")
    warm = tiers(store).warm
    plain = warm._attempt
    lost = iter([True, False, True, False])

    async def attempt(*given: Any) -> Any:
        answer = await plain(*given)
        if next(lost, False):
            raise WarmUnavailable("the answer was lost")
        return answer

    warm._attempt = attempt
    try:
        assert await items.put("a", 1, if_absent=True) == 1
        assert await items.put_missing({"a": 2, "b": 2}) == {"b"}
    finally:
        del warm._attempt
    assert await all_of(items) == {"a": 1, "b": 2}
    assert await store.user("u").version(fresh=True) == 2


# What it costs


@pytest.mark.only(warm=("redis", "valkey"))
async def test_a_put_is_one_script_and_a_cold_worker_reads_what_it_asks_for(opener: Any) -> None:
    store = await opener(**QUIET)
    user = store.user("u")
    items = user.items("x")
    for start in range(0, 3000, 500):
        await items.put_many({f"k{number:05}": "x" * 100 for number in range(start, start + 500)})
    await store.admin.archive()
    await items.put("k90000", 1)
    await items.get("k90000")  # the server knows both scripts
    with asked(store) as seen:
        await items.put("k90001", 2)
        await items.put("k90002", 2, if_absent=True)
        assert await items.get("k90001") == 2
        assert await items.get("k99999") is None
        assert await items.exists("k02999")
    assert len([each for each in seen.sent if each.startswith("EVAL")]) == 5, seen.sent
    evict_needs = keys_of(store, "u", "user")
    await store.admin.archive()
    with redis_of(store) as client:
        client.delete(evict_needs.record, evict_needs.items)
    tiers(store).hot.forget("user:u")
    with asked(store) as seen:
        assert await user.get_all(fresh=True) == {}
    assert not any("HGETALL" in each and ":i:" in each for each in seen.inside), "no item comes along"
    with redis_of(store) as client:
        assert client.hlen(evict_needs.record) < 10
    with asked(store) as seen:
        await items.put("k90003", 1, if_absent=True)
        await items.put("k90004", 1, if_absent=True)
    assert len([each for each in seen.sent if each.startswith("EVAL")]) == 3, "SQL was asked once for both"


@pytest.mark.replicas
async def test_other_replicas_hear_which_items_changed_and_not_what_they_say(opener: Any) -> None:
    one, two = await opener(**QUIET), await opener(**QUIET)
    await one.user("u").set("f", 1)
    assert await two.user("u").get("f") == 1
    with asked(one) as seen:
        await one.user("u").write(set={"f": 2}, items=[PutItem(collection="x", key="named", value="kept back")])
    (said,) = seen.publishes()
    assert "named" in said
    assert "kept back" not in said
    assert await two.user("u").get("f") in (1, 2)
    assert await two.user("u").items("x").get("named") == "kept back"


# Encryption, and files


async def test_items_are_encrypted_each_in_its_place(opener: Any) -> None:
    keys = KeyRing({"k1": b"1" * 32})
    store = await opener(**QUIET, encryption=Encryption(keys))
    user = store.user("u")
    items = user.items("x")
    await items.put("a", "secret one")
    await items.put("b", b"secret two")
    mine = keys_of(store, "u", "user")
    with redis_of(store) as client:
        raw = client.hgetall(mine.items)
        assert not any(b"secret" in value for value in raw.values())
        # Whoever can write to Redis moves one item's bytes to another: it does not open there.
        client.hset(mine.items, b":x\0b", raw[b":x\0a"])
    with pytest.raises(CorruptState):
        await items.get("b")
    await items.put("b", b"secret two")
    await user.fork("f")
    assert await all_of(store.user("f").items("x")) == {"a": "secret one", "b": b"secret two"}
    await store.admin.archive()
    evict(store)
    assert await all_of(items) == {"a": "secret one", "b": b"secret two"}


@pytest.mark.only(cold=("sqlite", "postgres"))
async def test_what_redis_has_under_an_old_key_is_read_under_the_new_one(opener: Any) -> None:
    old, new = b"1" * 32, b"2" * 32
    store = await opener(**QUIET, encryption=Encryption(KeyRing({"k1": old})))
    await store.user("u").items("x").put("a", "secret")
    await store.admin.archive()
    await store.close()
    both = Encryption(KeyRing({"k1": old, "k2": new}, current="k2"))
    store = await opener(**QUIET, encryption=both)
    await store.admin.reencrypt()
    await store.close()
    store = await opener(**QUIET, encryption=Encryption(KeyRing({"k2": new})))
    assert await all_of(store.user("u").items("x")) == {"a": "secret"}
    assert await store.user("u").items("x").get("a", version=1) == "secret"


@pytest.mark.parametrize("purged", [False, True])
async def test_an_exported_record_brings_its_items(opener: Any, purged: bool) -> None:
    """Those of the record that it was forked from, too, and what a rollback in the file brings back."""
    store = await opener(**QUIET)
    await store.user("u").items("x").put_many({"a": 1, "b": b"\0bytes", "c": 1})
    await store.user("u").fork("f")
    fork = store.user("f")
    items = fork.items("x")
    await items.put("a", 2)
    await items.delete("c")
    await fork.set("f", 1)
    await items.put("d", 4)
    if purged:
        await store.admin.archive()
        await store.admin.purge(keep_changes=1)
    if not purged:
        await fork.rollback(version=3)
    expected = await all_of(items)
    await store.admin.import_(await store.admin.export("f", scope="user"), id="copy")
    copy = store.user("copy").items("x")
    assert await all_of(copy) == expected
    for change in await fork.history():
        shown = await all_of(items, version=change.version)
        assert await all_of(copy, version=change.version) == shown


async def test_items_of_records_that_begin_so_are_counted_as_far_as_it_matters(opener: Any) -> None:
    store = await opener(**QUIET)
    for record in (store.user("acme:u"), store.session("acme:eu:s"), store.user("other:u")):
        await record.write(items=[PutItem(collection="c", key=str(at), value=at) for at in range(5)])
        for value in range(3):
            await record.items("c").put("0", value)
        await record.items("c").delete("1")
    gone = store.task("acme:t")
    await gone.write(items=[PutItem(collection="c", key="a", value=1)])
    await store.erase(gone.id, scope="task")
    await store.admin.archive()
    count = tiers(store).cold.count_items
    assert [count(prefix, 100) for prefix in ("acme%3A", "acme%3Aeu%3A", "other%3A", "no%3A")] == [8, 4, 4, 0]
    assert count("acme%3A", 6) == 6
