"""A commit: one atomic change, applied once, with dense versions. Law: what was refused changed nothing."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from copy import copy
from typing import Any
from unittest import mock

import pytest
from below import Worker, keys_of, own_server, redis_of, shift, tiers, until
from controls import sabotage
from counting import asked
from proxy import Proxy
from sync_api import core

from distributed_state import (
    Backpressure,
    ColdUnavailable,
    Conflict,
    Deleted,
    DurabilityUnknown,
    InvalidValue,
    Message,
    Settings,
    StateError,
    TooLarge,
    WarmUnavailable,
)
from distributed_state.tiers.changes import MOST_STEPS, Changes
from distributed_state.values.codec import Codec
from distributed_state.warm import client
from distributed_state.warm.answers import Cold, Committed, Draft
from distributed_state.warm.scripts import COMMIT, INSTALL, MINT, READ

real = pytest.mark.only(warm="real")
single = pytest.mark.only(warm="single")


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def contents(session: Any) -> list[Any]:
    return [each.content for each in await session.messages(fresh=True)]


def stored(store: Any, id: str = "s") -> dict[bytes, bytes]:
    """What lies in Redis."""
    with redis_of(store) as client:
        return dict(client.hgetall(keys_of(store, id).record))


def written(store: Any) -> tuple[dict[bytes, bytes], list[Any]]:
    """What a commit writes; without what the archiver notes in passing, which is at work meanwhile."""
    with redis_of(store) as client:
        record = {name: value for name, value in stored(store).items() if name != b"#md"}
        return record, client.hget(keys_of(store, "s").meta, "journal").split()[:3]


async def unchanged(
    store: Any, call: Callable[[], Awaitable[Any]], error: type[Exception], match: str | None = None
) -> None:
    """The call is refused, and neither the record nor the journal has changed."""
    before = written(store)
    with pytest.raises(error, match=match):
        await call()
    assert written(store) == before


# Kinds of change


async def test_every_kind_of_change_is_one_version(store: Any) -> None:
    session = store.session("s")
    versions = [
        await session.set("a", 1),
        await session.set_many({"b": 2, "c": [3]}),
        await session.update("d", {"x": 1}),
        await session.append_to("e", 1, 2),
        (await session.increment("n", 5), await session.version())[1],
        await session.append(message("one"), message("two")),
        await session.delete("a"),
        await session.checkpoint("here"),
        (await session.write(set={"f": 6}, increment={"n": 1}, append=[message("three")], phase="busy")).version,
        await session.clear(),
        await session.clear(messages=True),
    ]
    assert versions == list(range(1, 12))
    assert [change.version for change in await session.history()] == versions
    kinds = [
        "set",
        "set",
        "update",
        "append_to",
        "increment",
        "append",
        "delete",
        "checkpoint",
        "write",
        "clear",
        "clear",
    ]
    assert [change.kind for change in await session.history()] == kinds


async def test_delete_and_clear(store: Any) -> None:
    session = store.session("s")
    await session.write(set={"a": 1, "b": 2}, append=[message("kept")], phase="busy")
    await session.delete("a")
    assert not await session.has("a")
    await session.delete("never there")
    await session.clear()
    assert await session.get_all(fresh=True) == {}
    assert await contents(session) == ["kept"]
    assert await session.phase() == "busy"
    await session.append(message("also kept"))
    await session.clear(messages=True)
    assert await contents(session) == []
    await session.append(message("new"))
    assert await contents(session) == ["new"]


async def test_update_merges_one_level(store: Any) -> None:
    session = store.session("s")
    await session.update("prefs", {"theme": "dark"})
    await session.update("prefs", {"size": {"w": 1, "h": 2}})
    await session.update("prefs", {"size": {"w": 3}, "none": None})
    assert await session.get("prefs", fresh=True) == {"theme": "dark", "size": {"w": 3}, "none": None}
    for other in ("text", 1, [1], None, True):
        await session.set("other", other)
        await unchanged(store, lambda: session.update("other", {"a": 1}), InvalidValue, "not an object")
    await unchanged(store, lambda: session.update("prefs", [1]), InvalidValue, "takes a mapping")
    await unchanged(store, lambda: session.update("prefs", {"a": {1}}), InvalidValue, r"prefs\['a'\]: a set")


async def test_append_to_lengthens_a_list(store: Any) -> None:
    session = store.session("s")
    await session.append_to("list", 1)
    await session.append_to("list", [2], None)
    assert await session.get("list", fresh=True) == [1, [2], None]
    await session.set("text", "abc")
    await unchanged(store, lambda: session.append_to("text", 1), InvalidValue, "not a list")


INCREMENTS: list[tuple[Any, Any]] = [
    (None, 1), (0, 0), (1, -1), (-5, 3), (None, 10**14), (999_999_999_999_999, 1), (999_999_999_999_999, 10**15 - 1),
    (-99_999_999_999_999, -1), (-999_999_999_999_999, -999_999_999_999_999), (2**53, 1), (2**53 + 1, 2**53 + 1),
    (2**63 - 1, 1), (10**30, 1), (1, 10**30), (0.1, 0.2), (1.5, 0.5), (1.0, 1), (1, 0.5), (None, 0.1), (1e308, 1e292),
    (-0.0, 0), (None, -(10**15 - 1)),
]  # fmt: skip


async def test_increment_adds_exactly_as_python_does(store: Any) -> None:
    for number, (start, by) in enumerate(INCREMENTS):
        session = store.session(f"s{number}")
        if start is not None:
            await session.set("n", start)
        wanted = (0 if start is None else start) + by
        found = await session.increment("n", by)
        assert (type(found), found) == (type(wanted), wanted), (start, by)
        back = await session.get("n", fresh=True)
        assert (type(back), back) == (type(wanted), wanted), (start, by)


async def test_increment_refuses_what_is_no_number(store: Any) -> None:
    session = store.session("s")
    for other in ("1", "text", [1], {}, None, True):
        await session.set("n", other)
        await unchanged(store, lambda: session.increment("n"), InvalidValue, "not a number")
    for by in (True, "1", None, [1]):
        await unchanged(store, lambda by=by: session.increment("n", by), InvalidValue, "is not a number")
    await session.set("n", 1)
    for by in (float("nan"), float("inf")):
        await unchanged(store, lambda by=by: session.increment("n", by), InvalidValue, "not a JSON number")


async def test_write_changes_all_at_once_or_nothing(store: Any) -> None:
    session = store.session("s", user="u")
    await session.write(set={"a": 1, "old": 0}, phase="idle")
    done = await session.write(
        set={"a": 2, "b": [1]}, delete=["old"], increment={"n": 3, "m": -1}, append=[message("x"), message("y")],
        phase="busy", expect_version=1, expect_phase="idle",
    )  # fmt: skip
    assert (done.version, done.results, done.first_message) == (2, {"n": 3, "m": -1}, 0)
    assert await session.get_all(fresh=True) == {"a": 2, "b": [1], "n": 3, "m": -1}
    assert (await session.write(append=[message("z")])).first_message == 2
    assert (await session.write(set={"b": [1]})).first_message is None, "it added none"
    assert await contents(session) == ["x", "y", "z"]
    assert await session.phase() == "busy"
    change = (await session.history())[1]
    assert (change.set, change.deleted) == ({"a": 2, "b": [1], "n": 3, "m": -1}, ("old",))
    assert ([each.content for each in change.appended], change.phase) == (["x", "y"], "busy")
    everything: dict[str, Any] = {"set": {"a": 9}, "increment": {"n": 1}, "append": [message("no")], "phase": "no"}
    await unchanged(store, lambda: session.write(**everything, expect_version=2), Conflict, "expected version 2, found")
    await unchanged(store, lambda: session.write(**everything, expect_phase="idle"), Conflict)
    await unchanged(store, lambda: session.write(**everything | {"increment": {"b": 1}}), Conflict, "at most 15 digits")


async def test_a_refusal_names_things_as_their_user_does_and_shows_no_value(store: Any) -> None:
    session = store.session("s")
    await session.write(set={"f0": 1.25, "\udc80": "secret"}, phase="busy")
    unfit = "does not hold an integer of at most 15 digits, so that a write cannot add to it; increment() can"
    refused: list[tuple[dict[str, Any], str]] = [
        ({"increment": {"f0": 1}}, f"field 'f0' {unfit}"),
        ({"increment": {"\udc80": 1}}, rf"field '\udc80' {unfit}"),
        ({"phase": "x", "expect_phase": "idle"}, "expected phase = 'idle', found 'busy' at version 1"),
        ({"phase": "x", "expect": {"\udc80": "no"}}, r"field '\udc80' holds another value"),
        ({"phase": "x", "expect_version": 2}, "expected version 2, found version 1"),
    ]
    for change, said in refused:
        with pytest.raises(Conflict) as error:
            await session.write(**change)
        assert str(error.value) == f"session:s: {said}"


async def test_what_is_refused_before_it_is_sent(store: Any) -> None:
    session = store.session("s")
    await session.set("a", 1)
    for refused in (
        lambda: session.write(),
        lambda: session.set_many({}),
        lambda: session.append(),
        lambda: session.write(set={"n": 1}, increment={"n": 1}),
        lambda: session.write(delete=["n"], increment={"n": 1}),
        lambda: session.write(increment={"n": 10**15}),
        lambda: session.write(increment={"n": 0.5}),
        lambda: session.write(increment={"n": True}),
        lambda: session.write(phase=""),
        lambda: session.write(set={"a": 1, "#v": 9}),
        lambda: session.write(set={"a": 1, "b": {1}}),
        lambda: session.write(set=[1]),
        lambda: session.set("#v", 1),
        lambda: session.delete("#v"),
        lambda: session.increment("#v"),
        lambda: session.set("a", 1, expect_version=-1),
        lambda: session.set("a", 1, expect_version=True),
        lambda: session.set("a", 1, expect_version="1"),
        lambda: session.append(message("fine"), {"role": "wizard"}),
        lambda: session.checkpoint(""),
    ):
        await unchanged(store, refused, InvalidValue)


async def test_expect_version(store: Any) -> None:
    session = store.session("s")
    assert await session.set("a", 1, expect_version=0) == 1
    none = "expected no record .version 0., found version 1"
    await unchanged(store, lambda: session.set("a", 2, expect_version=0), Conflict, none)
    assert await session.set_many({"a": 2}, expect_version=1) == 2
    with pytest.raises(Conflict) as caught:
        await session.delete("a", expect_version=1)
    assert caught.value.version == 2
    await unchanged(store, lambda: store.session("s").set("a", 1, expect_version=99), Conflict, "found version 2")
    with pytest.raises(Conflict, match="found version 0"):
        await store.session("absent").set("a", 1, expect_version=1)


@pytest.mark.only(api="asyncio", warm="redis")
async def test_a_check_that_comes_after_a_write_would_be_noticed(store: Any) -> None:
    """The negative control of every test here that says: refused, and nothing has changed (G11)."""
    await store.session("s").set("a", 1)
    late = "if mismatch then call('HSET', record, 'half', 'written') return"
    with sabotage("commit", "if mismatch then return", late), pytest.raises(AssertionError):
        await unchanged(store, lambda: store.session("s").set("a", 2, expect_version=7), Conflict)


async def test_create_only_once(store: Any) -> None:
    session = store.session("s")
    assert await session.create({"a": 1}) == 1
    await unchanged(store, lambda: session.create({"a": 2}), Conflict, "exists already, at version 1")
    await store.delete("s")
    await unchanged(store, lambda: session.set("a", 1), Deleted)
    assert await session.create() == 3
    assert await session.get_all(fresh=True) == {}
    assert await session.exists()


async def test_messages_come_back_exactly(store: Any) -> None:
    given = [
        {"role": "system", "content": "rules\0 \ud800"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "x"}}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "t", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "t", "content": "", "name": "f"},
        {
            "role": "assistant",
            "content": "done",
            "timestamp": 1.25,
            "metadata": {"n": 2**70, "f": 1.0, "e": [], "x": {}},
        },
        {"role": "user", "content": "é" * 100_000, "unknown": {"deep": [None, True]}, "cls": 1},
    ]
    session = store.session("s")
    await session.append(*given[:3])
    await session.append(*(Message(**each) for each in given[3:5]), given[5])
    for fresh in (False, True):
        assert [each.to_dict() for each in await session.messages(fresh=fresh)] == given
    assert [each.to_dict() for each in (await session.at(version=2)).messages] == given


# Views


async def test_a_transaction_commits_at_the_end_or_not_at_all(store: Any) -> None:
    session = store.session("s")
    await session.set_many({"a": 1, "b": {"x": [1]}, "gone": 0})
    async with session.transaction() as view:
        assert (dict(view), view.version, view.phase) == ({"a": 1, "b": {"x": [1]}, "gone": 0}, 1, None)
        view["b"]["x"].append("kept")
        view["sum"] = view["a"] + 1
        del view["gone"]
        assert (view["sum"], len(view), "gone" in view) == (2, 3, False)
        with pytest.raises(KeyError):
            view["gone"]
        with pytest.raises(KeyError):
            del view["gone"]
        view.append(message("hi"))
        view.move_to("busy")
        assert await session.version(fresh=True) == 1
    assert await session.get_all(fresh=True) == {"a": 1, "b": {"x": [1, "kept"]}, "sum": 2}
    assert (await contents(session), await session.phase(), await session.version()) == (["hi"], "busy", 2)

    async def broken() -> None:
        async with session.transaction() as view:
            view["a"] = 9
            raise ZeroDivisionError

    await unchanged(store, broken, ZeroDivisionError)
    async with session.transaction():
        pass
    assert await session.version(fresh=True) == 2


async def test_a_transaction_of_a_record_never_written_creates_it(store: Any) -> None:
    async with store.session("s").transaction() as view:
        assert (dict(view), view.version) == ({}, 0)
        view["a"] = 1
    assert await store.session("s").version(fresh=True) == 1


async def test_a_transaction_is_refused_when_somebody_was_faster(store: Any) -> None:
    session = store.session("s")
    await session.set("a", 1)

    async def slow() -> None:
        async with session.transaction() as view:
            await session.set("other", 1)
            view["a"] = 2

    with pytest.raises(Conflict):
        await slow()
    assert await session.get_all(fresh=True) == {"a": 1, "other": 1}


async def test_apply_repeats_until_nobody_was_faster(store: Any) -> None:
    session, other, calls = store.session("s"), store.session("s"), 0
    await session.set("a", 1)

    async def rival() -> None:
        await other.increment("rival")

    def change(view: Any) -> str:
        nonlocal calls
        calls += 1
        view["a"] += 1
        if calls < 4:
            # Somebody else's commit arrives between our read and our write.
            with redis_of(store) as client:
                client.hincrby(keys_of(store, "s").record, "#v", 1)
        return f"attempt {calls}"

    assert await session.apply(change) == "attempt 4"
    assert await session.get("a", fresh=True) == 2
    assert await session.version(fresh=True) == 5


async def test_apply_gives_up_and_passes_on_what_the_change_raises(opener: Any) -> None:
    store = await opener(conflict_retries=3)
    session, calls = store.session("s"), 0
    await session.set("a", 1)

    def always_late(view: Any) -> None:
        nonlocal calls
        calls += 1
        view["a"] = 0
        with redis_of(store) as client:
            client.hincrby(keys_of(store, "s").record, "#v", 1)

    with pytest.raises(Conflict):
        await session.apply(always_late)
    assert 3 <= calls <= 4
    await unchanged(store, lambda: session.apply(lambda view: view["missing"]), KeyError)


# Batches


async def test_a_batch_changes_many_records_in_one_round_trip(store: Any) -> None:
    sessions = [store.session(f"s{number}") for number in range(20)]
    async with store.batch() as batch:
        for number, session in enumerate(sessions):
            batch.on(session).set("n", number)
            batch.on(session).append(message("hi"))
            batch.on(session).increment("i", 2)
        assert await sessions[0].version(fresh=True) == 0
    assert batch.versions == {session.ref: 1 for session in sessions}
    assert await store.get_many(sessions) == [{"n": number, "i": 2} for number in range(20)]


@real
async def test_a_batch_is_one_round_trip(opener: Any) -> None:
    store = await opener(archiver=False)
    sessions = [store.session(f"s{number}") for number in range(20)]
    for session in sessions:
        await session.set("a", 0)
    with asked(store) as seen:
        async with store.batch() as batch:
            for session in sessions:
                batch.on(session).set("a", 1)
    # Beside them only the look for what is archived, which comes once a second and is no script.
    scripts = [each for each in seen.sent if each.startswith("EVAL")]
    assert len(scripts) == 20
    assert all(COMMIT.sha.decode() in each for each in scripts)


async def test_changes_of_one_record_in_a_batch_are_one_commit(store: Any) -> None:
    """Also when two handles name it: a record changes wholly or not at all."""
    async with store.batch() as batch:
        batch.on(store.session("s")).set("a", 1)
        batch.on(store.session("s")).set("b", 2)
        batch.on(store.user("s")).set("c", 3)
    assert await store.session("s").version(fresh=True) == 1
    assert await store.session("s").get_all() == {"a": 1, "b": 2}
    assert await store.user("s").get_all() == {"c": 3}
    assert len(batch.versions) == 2


async def test_a_batch_that_is_refused_in_part_says_so(store: Any) -> None:
    deleted, fine = store.session("s"), store.session("fine")
    await deleted.set("a", 1)
    await store.delete("s")

    async def send() -> None:
        async with batch:
            batch.on(deleted).set("a", 2)
            batch.on(fine).set("a", 2)

    batch = store.batch()
    with pytest.raises(Deleted) as caught:
        await send()
    assert "1 of 2 records" in caught.value.__notes__[0]
    assert batch.versions == {fine.ref: 1}
    assert await fine.get("a") == 2


async def test_a_batch_whose_body_fails_sends_nothing(store: Any) -> None:
    session = store.session("s")

    async def fail() -> None:
        async with store.batch() as batch:
            batch.on(session).set("a", 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert await session.version(fresh=True) == 0
    async with store.batch():
        pass
    with pytest.raises(InvalidValue, match="a batch takes sessions"):
        store.batch().on("s")


async def test_what_is_added_after_a_clear_starts_from_nothing(store: Any) -> None:
    session = store.session("s")
    await session.set_many({"n": 5, "a": 1})
    async with store.batch() as batch:
        batch.on(session).clear(messages=False)
        batch.on(session).increment("n", 1)
        batch.on(session).set("b", 2)
    for fresh in (False, True):
        assert await session.get_all(fresh=fresh) == {"n": 1, "b": 2}
    assert (await session.at(version=2)).fields == {"n": 1, "b": 2}


# Contention: nothing is lost, versions are dense (G1)


async def dense_under_contention(store: Any, rounds: int) -> None:
    """Many writers of one record: every acknowledged version is different, and none is left out."""
    session, versions = store.session("s"), list[int]()

    async def writer(me: int) -> None:
        mine = store.session("s")
        for number in range(rounds):
            versions.append(await mine.set(f"{me}-{number}", number))
            versions.append((await mine.write(increment={"n": 1}, append=[message(f"{me}-{number}")])).version)
            await mine.increment("n")

    await asyncio.gather(*(writer(me) for me in range(8)))
    changes = await session.history()
    assert [change.version for change in changes] == list(range(1, 8 * rounds * 3 + 1))
    assert len(set(versions)) == len(versions)
    fields = await session.get_all(fresh=True)
    assert fields.pop("n") == 8 * rounds * 2
    assert fields == {f"{me}-{number}": number for me in range(8) for number in range(rounds)}
    assert sorted(await contents(session)) == sorted(f"{me}-{number}" for me in range(8) for number in range(rounds))


async def test_writers_of_one_record_lose_nothing_and_versions_are_dense(store: Any) -> None:
    await dense_under_contention(store, 12)


@pytest.mark.only(api="asyncio", warm="redis")
async def test_without_counting_versions_in_the_script_they_are_not_dense(store: Any) -> None:
    skipped = "version = format('%d', (version or 0) + (version == '7' and 2 or 1))"
    with sabotage("commit", "version = format('%d', (version or 0) + 1)", skipped), pytest.raises(AssertionError):
        await dense_under_contention(store, 2)


async def swaps_under_contention(store: Any, rounds: int) -> None:
    """Changes that are made here, of what somebody else may have changed meanwhile."""
    session = store.session("s")

    async def writer(me: int) -> None:
        mine = store.session("s")
        for number in range(rounds):
            await mine.update("object", {f"{me}-{number}": number})
            await mine.append_to("list", [me, number])
            await mine.increment("float", 0.5)
            await mine.apply(lambda view: view.__setitem__("total", view.get("total", 0) + 1))

    await asyncio.gather(*(writer(me) for me in range(6)))
    fields = await session.get_all(fresh=True)
    pairs = [[me, number] for me in range(6) for number in range(rounds)]
    assert fields["object"] == {f"{me}-{number}": number for me, number in pairs}
    assert sorted(fields["list"]) == pairs
    for me in range(6):
        assert [number for writer, number in fields["list"] if writer == me] == list(range(rounds))
    assert (fields["float"], fields["total"]) == (len(pairs) / 2, len(pairs))


async def test_swaps_lose_nothing(store: Any) -> None:
    await swaps_under_contention(store, 4)


@pytest.mark.only(api="asyncio", warm="redis")
async def test_without_comparing_in_the_script_swaps_lose_changes(store: Any) -> None:
    with (
        sabotage("commit", "if mismatch then return", "if mismatch and false then return"),
        pytest.raises(AssertionError),
    ):
        await swaps_under_contention(store, 4)


@pytest.mark.replicas
async def test_replicas_that_swap_one_field_lose_nothing(opener: Any) -> None:
    stores = [await opener() for _ in range(3)]

    async def writer(me: int) -> None:
        session = stores[me % 3].session("s")
        for number in range(10):
            await session.append_to("list", [me, number])
            await session.update("object", {f"{me}-{number}": 1})

    await asyncio.gather(*(writer(me) for me in range(6)))
    for store in stores:
        fields = await store.session("s").get_all(fresh=True)
        assert sorted(fields["list"]) == [[me, number] for me in range(6) for number in range(10)]
        assert len(fields["object"]) == 60
        assert await store.session("s").version() == 120


@pytest.mark.replicas
@pytest.mark.only(api="blocking", warm="valkey")
@pytest.mark.wide
@pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=pytest.mark.full)])
async def test_eight_processes_lose_nothing(opener: Any, rounds: int) -> None:
    """Each writes as many distinct keys of one record, and increments one field of it as often."""
    store = await opener()
    settings = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    workers = [Worker("count", id="s", me=me, rounds=rounds, **settings) for me in range(8)]
    try:
        for worker in workers:
            assert worker.line() == "opened"
        for worker in workers:
            worker.say("go")
        versions = [version for worker in workers for version in json.loads(worker.line())]
    finally:
        for worker in workers:
            with worker:
                pass
    assert sorted(versions) == list(range(1, 16 * rounds + 1))
    fields = await store.session("s").get_all(fresh=True)
    assert fields.pop("n") == 8 * rounds
    assert fields == {f"{me}-{number}": number for me in range(8) for number in range(rounds)}


# A lost reply (G3)


@pytest.mark.parametrize("between", ["nothing", "expired", "hydrated", "hydrated and changed"])
@single
async def test_a_write_whose_reply_was_lost_is_applied_once(opener: Any, between: str) -> None:
    await applied_once(opener, between)


async def applied_once(opener: Any, between: str) -> None:
    """The server applied a write and its answer was lost; meanwhile others go on, or the record leaves Redis."""
    other = await opener(archiver=False)
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False)
        session = store.session("s")
        await session.write(set={"n": 10, "list": [0], "object": {"a": 0}, "f": 0.5}, append=[message("first")])

        async def lost(call: Callable[[], Awaitable[Any]]) -> tuple[int, Any]:
            before = await other.session("s").version(fresh=True)
            loss = proxy.lose(COMMIT.sha)
            task = asyncio.ensure_future(call())
            await until(loss.happened.is_set)
            await until(lambda: stored(other).get(b"#v") == b"%d" % (before + 1))
            if between != "nothing":
                await other.admin.archive()
                with redis_of(other) as client:
                    assert client.pttl(keys_of(other, "s").record) > 0
                    client.delete(keys_of(other, "s").record)
            if between.startswith("hydrated"):
                await other.session("s").get("n", fresh=True)
            if between == "hydrated and changed":
                await other.session("s").increment("n", 100)
                await other.session("s").append(message("between"))
            loss.go.set()
            return before + 1, await task

        version, found = await lost(lambda: session.set("a", 1))
        assert found == version
        added = await other.session("s").get("n", fresh=True)
        version, found = await lost(lambda: session.increment("n"))
        assert found == added + 1
        version, found = await lost(lambda: session.increment("f", 0.25))
        assert found == 0.75
        version, found = await lost(lambda: session.append(message("second")))
        assert found == version
        version, found = await lost(lambda: session.append_to("list", 1))
        assert found == version
        version, found = await lost(lambda: session.update("object", {"b": 1}))
        assert found == version
        version, found = await lost(lambda: session.write(increment={"n": 1, "m": 7}, append=[message("third")]))
        assert (found.version, found.results["m"]) == (version, 7)
        version, _ = await lost(lambda: session.apply(lambda view: view.__setitem__("sum", view["n"])))

        extra = 2 * 8 if between == "hydrated and changed" else 0
        assert await session.version(fresh=True) == 9 + extra
        fields = await session.get_all()
        assert (fields["list"], fields["object"], fields["f"], fields["m"]) == ([0, 1], {"a": 0, "b": 1}, 0.75, 7)
        assert fields["n"] == 12 + 100 * extra // 2
        texts = [text for text in await contents(session) if text != "between"]
        assert texts == ["first", "second", "third"]
        assert [change.version for change in await session.history()] == list(range(1, 10 + extra))
        await store.close()


@pytest.mark.parametrize(
    ("between", "guard"),
    [
        ("nothing", "      if at then\n"),
        ("nothing", "if only ~= replica or oldest - last <= 0 then"),
        ("expired", "if since < hydrated then"),
        ("hydrated and changed", "if since < hydrated then"),
    ],
)
@pytest.mark.only(api="asyncio", warm="redis")
async def test_without_looking_for_the_op_id_it_is_applied_twice(opener: Any, between: str, guard: str) -> None:
    where = guard[: len(guard) - len(guard.lstrip())]
    with sabotage("commit", guard, f"{where}if false then"), pytest.raises((AssertionError, StateError)):
        await applied_once(opener, between)


@single
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("stays", [True, False])
async def test_a_full_redis_refuses_no_write_that_it_has_applied(opener: Any, begun: bool, stays: bool) -> None:
    """Its answer was lost, its record stayed or was evicted, and there is no room to bring it back: SQL knows."""
    with own_server(opener) as server, Proxy(server.url) as proxy:
        opener.url = server.url
        given = {"archiver": False, "partitions": 1}
        store, other = await opener(url=proxy.url, **given), await opener(**given)
        await other.session("other").set("n", 1)
        await store.session("known").set(
            "n", 1
        )  # of a first one the answer may be that the server is to be asked again
        session = store.session()
        if begun:
            await session.set("n", 1)
        loss = proxy.lose(COMMIT.sha)
        task = asyncio.ensure_future(session.increment("n", 5))
        await until(loss.happened.is_set)
        with redis_of(other) as client:
            assert client.exists(keys_of(other, session.id).record), "it was applied"
            if not stays:
                await other.admin.archive()
                client.delete(keys_of(other, session.id).record)
            client.config_set("maxmemory", "1mb")
            with pytest.raises(Backpressure, match="maxmemory"):
                await other.session("full").set("n", 1)
            loss.go.set()
            assert await task == 5 + begun
            client.config_set("maxmemory", "0")
        assert await other.session(session.id).version(fresh=True) == 1 + begun
        assert await other.session(session.id).get("n") == 5 + begun
        await opener.close()


@single
async def test_a_full_redis_refuses_a_lost_write_that_sql_does_not_know(opener: Any) -> None:
    with own_server(opener) as server, Proxy(server.url) as proxy:
        opener.url = server.url
        store, other = await opener(url=proxy.url, archiver=False), await opener(archiver=False)
        await store.session("s").set("n", 1)
        await other.admin.archive()
        request = proxy.hold(COMMIT.sha)
        task = asyncio.ensure_future(store.session("s").increment("n"))
        await until(request.arrived.is_set)
        with redis_of(other) as client:
            client.delete(keys_of(other, "s").record)
            client.config_set("maxmemory", "1mb")
            proxy.cut()
            with pytest.raises(Backpressure, match="maxmemory"):
                await task
            client.config_set("maxmemory", "0")
        request.go.set()
        await opener.close()


@single
async def test_a_batch_whose_replies_were_lost_is_applied_once(opener: Any) -> None:
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False)
        sessions = [store.session(f"s{number}") for number in range(5)]
        for session in sessions:
            await session.set("n", 0)

        async def send() -> Any:
            async with store.batch() as batch:
                for session in sessions:
                    batch.on(session).increment("n", 1)
                    batch.on(session).append(message("once"))
            return batch

        loss = proxy.lose(COMMIT.sha)
        task = asyncio.ensure_future(send())
        await until(lambda: all(stored(store, f"s{number}").get(b"#v") == b"2" for number in range(5)))
        loss.go.set()
        batch = await task
        assert set(batch.versions.values()) == {2}
        for session in sessions:
            assert await session.get("n", fresh=True) == 1
            assert await contents(session) == ["once"]
        await store.close()


def evicted(store: Any, *ids: str) -> None:
    """What volatile-lru may do with what is archived."""
    with redis_of(store) as client:
        for id in ids or ("s",):
            assert client.pttl(keys_of(store, id).record) > 0, "only archived records carry a TTL"
            client.delete(keys_of(store, id).record)


@pytest.mark.parametrize("emptied", [False, True], ids=["evicted", "emptied"])
@single
async def test_many_writes_whose_replies_were_lost_are_applied_once_though_redis_forgot_them(
    opener: Any, emptied: bool
) -> None:
    """However many they are: what left Redis is in SQL, and so are the ids of the writes that made it."""
    many = 200 if opener.api == "asyncio" else 24  # there each is a thread with a connection
    with own_server(opener) as server, Proxy(server.url) as proxy:
        other = await opener(url=server.url, archiver=False)
        store = await opener(url=proxy.url, archiver=False)
        await store.session("s").set("n", 0)
        losses = [proxy.lose(COMMIT.sha) for _ in range(1 if opener.api == "asyncio" else many)]
        tasks = [asyncio.ensure_future(store.session("s").increment("n")) for _ in range(many)]
        await until(lambda: stored(other).get(b"n") == b"%d" % many)
        await other.admin.archive()
        if emptied:
            with redis_of(other) as client:
                client.flushall()
        else:
            evicted(other)
        assert await other.session("s").increment("other") == 1
        for loss in losses:
            loss.go.set()
        assert sorted(await asyncio.gather(*tasks)) == list(range(1, many + 1))
        assert await other.session("s").get_all(fresh=True) == {"n": many, "other": 1}
        assert await other.session("s").version(fresh=True) == many + 2
        assert [change.version for change in await other.session("s").history()] == list(range(1, many + 3))
        await store.close()
        await other.close()


@pytest.mark.parametrize("wrong", [-600, 0, 600])
@single
async def test_a_write_is_applied_once_however_much_came_after_it_and_whatever_the_workers_clock_says(
    opener: Any, wrong: float
) -> None:
    other = await opener(archiver=False)
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False)
        wall = tiers(store).port.wall
        tiers(store).port.wall = lambda: wall() + wrong  # type: ignore[method-assign]
        await store.session("s").set("n", 0)
        loss = proxy.lose(COMMIT.sha)
        task = asyncio.ensure_future(store.session("s").increment("n"))
        await until(lambda: stored(other).get(b"n") == b"1")
        for _ in range(100 if wrong == 0 else 3):
            await other.session("s").append(message("between"))
        await other.admin.archive()
        evicted(other)
        loss.go.set()
        assert await task == 1
        assert await other.session("s").get("n", fresh=True) == 1
        await store.close()


async def applied_once_by_another_clock(opener: Any) -> None:
    """Who brings the record back and answers the repetition is a replica that was promoted: its clock is behind."""
    other = await opener(archiver=False)
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False)
        several = mock.patch.object(type(tiers(store).port), "several", True)
        await store.session("s").set("n", 0)
        loss = proxy.lose(COMMIT.sha)
        task = asyncio.ensure_future(store.session("s").increment("n"))
        await until(lambda: stored(other).get(b"n") == b"1")
        await other.admin.archive()
        evicted(other)
        now = "local now = redis.call('TIME')\n"
        behind = now + "now[1] = string.format('%d', now[1] - 1)\n"
        with sabotage("hydrate", now, behind), several:
            await other.session("s").get("n", fresh=True)
            loss.go.set()
            assert await task == 1
        assert await other.session("s").get("n", fresh=True) == 1
        await store.close()


@single
async def test_a_write_is_applied_once_though_another_server_with_another_clock_answers(opener: Any) -> None:
    await applied_once_by_another_clock(opener)


@single
async def test_without_a_margin_for_other_clocks_a_write_is_applied_twice(opener: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(client, "_MARGIN_MS", 0)
    with pytest.raises(AssertionError, match="2 == 1"):
        await applied_once_by_another_clock(opener)


@single
async def test_a_batch_is_applied_once_though_its_records_left_redis_meanwhile(opener: Any) -> None:
    other = await opener(archiver=False)
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False)
        ids = ["s0", "s1", "s2"]
        for id in ids:
            await store.session(id).set("n", 0)

        async def send() -> Any:
            async with store.batch() as batch:
                for id in ids:
                    batch.on(store.session(id)).increment("n", 1)
            return batch

        loss = proxy.lose(COMMIT.sha)
        task = asyncio.ensure_future(send())
        await until(lambda: all(stored(other, id).get(b"n") == b"1" for id in ids))
        for _ in range(70):
            async with other.batch() as batch:
                for id in ids:
                    batch.on(other.session(id)).increment("m", 1)
        await other.admin.archive()
        evicted(other, *ids)
        await other.session("s1").get("n", fresh=True)
        loss.go.set()
        assert set((await task).versions.values()) == {2}
        for id in ids:
            assert await other.session(id).get_all(fresh=True) == {"n": 1, "m": 70}
        await store.close()


@single
async def test_a_request_that_lay_about_is_not_applied_after_its_repetition(opener: Any) -> None:
    """The repetition was applied, and the record left Redis and came back, before the first sending arrives."""
    other = await opener(archiver=False)
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False, timeout=0.5)
        await other.session("s").set("n", 0)
        delay = proxy.hold(COMMIT.sha)
        assert await store.session("s").increment("n") == 1
        assert delay.arrived.is_set()
        for _ in range(70):
            await other.session("s").append(message("between"))
        await other.admin.archive()
        evicted(other)
        assert await other.session("s").get("n", fresh=True) == 1
        delay.go.set()
        await until(delay.happened.is_set)
        assert await other.session("s").get("n", fresh=True) == 1
        await store.close()


@pytest.mark.wide
@single
async def test_a_request_that_lay_about_for_longer_than_the_window_is_not_applied(opener: Any) -> None:
    """By then nobody need remember that its repetition was applied."""
    other = await opener(archiver=False, op_window=2, timeout=0.3, retry_for=0.7)
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False, op_window=2, timeout=0.3, retry_for=0.7)
        await other.session("s").set("n", 0)
        delay = proxy.hold(COMMIT.given(window_ms=2000).sha)
        assert await store.session("s").increment("n") == 1
        replica = tiers(store).replica.encode()

        async def forgotten() -> bool:
            await other.session("s").set("other", 1)
            return replica not in stored(other)[b"#ops"]

        await until(forgotten, every=0.1)
        delay.go.set()
        await until(delay.happened.is_set)
        assert await other.session("s").get("n", fresh=True) == 1
        await store.close()


@single
async def test_a_generated_id_is_not_started_anew_by_a_request_that_lay_about(opener: Any) -> None:
    other = await opener(archiver=False, partitions=1)
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False, partitions=1, timeout=0.5)
        await other.session("warm up").set("a", 1)
        session = store.session()
        id = core(session)._context.ref.id  # its `id` would give it away
        delay = proxy.hold(COMMIT.sha)
        assert await session.append(message("once")) == 1
        assert delay.arrived.is_set()
        await other.admin.archive()
        evicted(other, id)
        delay.go.set()
        await until(delay.happened.is_set)
        assert stored(other, id) == {}, "it is in SQL, and nowhere else"
        assert await contents(other.session(id)) == ["once"]
        assert [change.version for change in await other.session(id).history()] == [1]
        await store.close()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("guard", "check"),
    [
        ("if since < hydrated then", test_a_request_that_lay_about_is_not_applied_after_its_repetition),
        (
            "if now_ms - since > window_ms then",
            test_a_request_that_lay_about_for_longer_than_the_window_is_not_applied,
        ),
        (
            "if (creation == '*' or creation == '+') and since <= (fresh or 0) + 0 then",
            test_a_generated_id_is_not_started_anew_by_a_request_that_lay_about,
        ),
    ],
    ids=["hydrated", "late", "fresh"],
)
@pytest.mark.only(api="asyncio", warm="redis")
async def test_without_its_time_a_request_that_lay_about_is_applied(opener: Any, guard: str, check: Any) -> None:
    """Negative controls of the three above."""
    with sabotage("commit", guard, "if false then"), pytest.raises(AssertionError):
        await check(opener)


@single
async def test_later_than_half_of_the_window_after_the_first_sending_nothing_is_repeated(opener: Any) -> None:
    """Who looks for its op id by then may find it forgotten: whether it was applied is left open, and said."""
    other = await opener(archiver=False)
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False)
        port, cold = tiers(store).port, core(store)._lifecycle.cold
        monotonic, load = port.monotonic, cold.load
        await store.session("s").set("n", 0)
        loss = proxy.lose(COMMIT.sha)
        task = asyncio.ensure_future(store.session("s").increment("n"))
        await until(lambda: stored(other).get(b"n") == b"1")
        await other.admin.archive()
        evicted(other)

        def slow(*arguments: Any, **named: Any) -> Any:
            port.monotonic = lambda: monotonic() + 151
            return load(*arguments, **named)

        cold.load = slow
        loss.go.set()
        with pytest.raises(DurabilityUnknown, match="may have been applied"):
            await task
        port.monotonic, cold.load = monotonic, load
        assert await other.session("s").get("n", fresh=True) == 1
        assert await store.session("s").get("n") == 1, "hot shows nothing from before it"
        await store.close()


@single
async def test_while_sql_cannot_say_whether_it_was_applied_a_write_is_not_repeated(opener: Any) -> None:
    other = await opener(archiver=False)
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False)
        await store.session("s").set("n", 0)
        loss = proxy.lose(COMMIT.sha)
        task = asyncio.ensure_future(store.session("s").increment("n"))
        await until(lambda: stored(other).get(b"n") == b"1")
        await other.admin.archive()
        evicted(other)

        def away(*_: Any) -> int:
            raise ColdUnavailable("it is away")

        core(store)._lifecycle.cold.applied = away
        loss.go.set()
        with pytest.raises(DurabilityUnknown, match="only SQL knows: it is away"):
            await task
        assert await other.session("s").get("n", fresh=True) == 1
        await store.close()


async def test_a_worker_whose_machine_was_suspended_writes_on(store: Any) -> None:
    """Its monotonic clock stood still, so that what it takes for the server's time is long past."""
    await store.session("s").set("n", 0)
    clock = tiers(store).clock
    shift(store, -3600)
    assert await store.session("s").increment("n") == 1
    with redis_of(store) as client:
        seconds, _ = client.time()
    assert abs(clock.now() - seconds) < 60
    assert await store.session("s").get("n", fresh=True) == 1


@real
async def test_a_first_sending_costs_one_round_trip_though_the_record_was_brought_back(opener: Any) -> None:
    store, other = await opener(archiver=False), await opener(archiver=False)
    await store.session("s").set("n", 0)
    await store.admin.archive()
    evicted(store)
    await other.session("s").get("n", fresh=True)
    await asyncio.sleep(0.05)  # or the two are too close to be told apart by the server's clock
    with asked(store) as seen:
        await store.session("s").set("n", 1)
    assert [each.split()[0] for each in seen.sent] == ["EVALSHA"]


@single
@pytest.mark.parametrize("lost", [MINT.sha, b"\r\nGET\r\n", INSTALL.sha], ids=["mint", "mark", "install"])
async def test_the_first_write_of_a_partition_is_made_though_an_answer_is_lost(opener: Any, lost: bytes) -> None:
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False)
        loss = proxy.lose(lost)
        task = asyncio.ensure_future(store.session("s").set("a", 1))
        await until(loss.happened.is_set)
        loss.go.set()
        assert await task == 1
        assert [change.version for change in await store.session("s").history()] == [1]
        await store.close()


@single
async def test_the_first_write_of_a_generated_id_is_applied_once_even_if_redis_is_emptied(opener: Any) -> None:
    """Such a write asks no SQL; after a loss it must."""
    with own_server(opener) as server, Proxy(server.url) as proxy:
        other = await opener(url=server.url, archiver=False, partitions=1)
        store = await opener(url=proxy.url, archiver=False, partitions=1)
        await store.session("warm up").set("a", 1)
        await other.admin.archive()
        session = store.session()
        id = core(session)._context.ref.id  # its `id` would give it away
        loss = proxy.lose(COMMIT.sha)
        task = asyncio.ensure_future(session.append(message("first")))
        await until(loss.happened.is_set)
        await until(lambda: stored(other, id))
        await other.session(id).append(message("second"))
        await other.admin.archive()
        with redis_of(other) as client:
            client.flushall()
        loss.go.set()
        assert await task == 1
        assert await session.version(fresh=True) == 2
        assert await contents(session) == ["first", "second"]
        assert [change.version for change in await session.history()] == [1, 2]
        await store.close()
        await other.close()


@single
async def test_a_generated_id_that_others_use_meanwhile_is_not_started_anew(opener: Any) -> None:
    """The handle that generated an id may make its first write long after others got to know the id."""
    with own_server(opener) as server:
        store = await opener(url=server.url, archiver=False)
        session = store.session()
        await store.session(session.id).set("a", 1)
        await store.admin.archive()
        with redis_of(store) as client:
            client.delete(keys_of(store, session.id).record)  # as eviction would
        assert await session.set("b", 2) == 2
        assert await session.get_all(fresh=True) == {"a": 1, "b": 2}
        await store.close()


async def test_a_generated_id_that_a_batch_used_is_not_started_anew(store: Any) -> None:
    session = store.session()
    async with store.batch() as batch:
        batch.on(session).set("a", 1)
    await store.admin.archive()
    with redis_of(store) as client:
        client.delete(keys_of(store, session.id).record)
    assert await session.set("b", 2) == 2
    assert await session.get_all(fresh=True) == {"a": 1, "b": 2}


def increment(store: Any) -> Draft:
    changes = Changes(tiers(store).settings, Codec("", ""))
    changes.increment("n", 1)
    return changes.draft("increment")


async def a_late_duplicate_changes_nothing(store: Any) -> None:
    """A network may deliver a request once more, long after it was answered."""
    warm, keys = tiers(store).warm, keys_of(store, "s")
    await store.session("s").set("n", 0)
    draft = increment(store)
    op = warm.ops.begin(draft.operations)
    first = await warm.commit(keys, draft, op)
    assert isinstance(first, Committed)
    again = await warm.commit(keys, draft, op)
    same = first._replace(offset=again.offset, time_ms=None, archived=0, text=b"")  # type: ignore[union-attr]  # Committed
    assert again == same
    warm.ops.end(op)
    for _ in range(3):
        await store.session("s").set("other", 1)
    for _ in range(3):
        with pytest.raises(WarmUnavailable, match="not applied again"):
            raise AssertionError(await warm.commit(keys, draft, op))
    assert await store.session("s").get("n", fresh=True) == 1
    assert await store.session("s").version() == 5


async def test_a_late_duplicate_of_an_answered_write_changes_nothing(store: Any) -> None:
    await a_late_duplicate_changes_nothing(store)


@pytest.mark.only(api="asyncio", warm="redis")
async def test_without_the_oldest_unanswered_sequence_a_late_duplicate_is_applied(store: Any) -> None:
    guard = "if dropped < 0 and sequence - first < 0 then return {'forgotten'} end"
    with sabotage("commit", guard, ""), pytest.raises(AssertionError):
        await a_late_duplicate_changes_nothing(store)


async def test_one_op_id_for_two_changes_is_an_error(store: Any) -> None:
    warm, keys = tiers(store).warm, keys_of(store, "s")
    await store.session("s").set("n", 0)
    draft = increment(store)
    op = warm.ops.begin(draft.operations)
    await warm.commit(keys, draft, op)
    other = copy(op)
    other.digest = "0"
    await unchanged(store, lambda: warm.commit(keys, draft, other), StateError, "misused")


async def test_many_writes_in_flight_are_all_kept(opener: Any) -> None:
    """While an old write is unanswered, no later answer may be forgotten, or its retry would be applied twice."""
    store = await opener(archiver=False)  # what is archived, SQL remembers
    warm, keys = tiers(store).warm, keys_of(store, "s")
    await store.session("s").set("n", 0)
    open_since, sent = warm.ops.begin(increment(store).operations), []
    for _ in range(100):
        draft = increment(store)
        op = warm.ops.begin(draft.operations)
        sent.append((draft, op, await warm.commit(keys, draft, op)))
    random.Random(1).shuffle(sent)
    for draft, op, answer in sent:
        again = await warm.commit(keys, draft, op)
        assert again[:4] == answer[:4]  # type: ignore[index]  # both are Committed
        warm.ops.end(op)
    warm.ops.end(open_since)
    assert await store.session("s").get("n", fresh=True) == 100
    for _ in range(70):
        await store.session("s").increment("n")
    assert len(stored(store)[b"#ops"]) < 3000, "what was answered is forgotten in the end"


async def a_younger_write_arrives_first(store: Any) -> None:
    """Two threads of one replica send side by side. The younger write is applied first, and its answer is lost."""
    warm, keys = tiers(store).warm, keys_of(store, "s")
    await store.session("s").set("n", 0)
    draft = increment(store)
    older, younger = warm.ops.begin(draft.operations), warm.ops.begin(draft.operations)
    first = await warm.commit(keys, draft, younger)
    await warm.commit(keys, draft, older)
    warm.ops.end(older)
    again = await warm.commit(keys, draft, younger)
    warm.ops.end(younger)
    assert again[:4] == first[:4]  # type: ignore[index]  # both are Committed
    assert await store.session("s").get("n", fresh=True) == 2


async def test_a_younger_write_that_arrives_first_is_applied_once(store: Any) -> None:
    await a_younger_write_arrives_first(store)


@pytest.mark.only(api="asyncio", warm="redis")
async def test_without_keeping_what_is_younger_than_the_oldest_it_is_applied_twice(store: Any) -> None:
    with sabotage("commit", "if s - oldest >= 0 then", "if oldest ~= sequence then"), pytest.raises(AssertionError):
        await a_younger_write_arrives_first(store)


# Scripts


async def test_nothing_to_send_is_answered_at_once(store: Any) -> None:
    """An archiver that holds no partition asks for nothing."""
    assert await tiers(store).port.exchange([]) == []
    assert await store.session("s").set("a", 1) == 1


@single
async def test_a_server_that_forgot_the_scripts_is_taught_again(opener: Any) -> None:
    with own_server(opener) as server:
        store = await opener(url=server.url)
        session, sessions = store.session("s"), [store.session(f"b{number}") for number in range(5)]
        with redis_of(store) as client:
            for version in range(1, 20, 2):
                client.script_flush()
                assert await session.append(message("x")) == version
                client.script_flush()
                assert await session.increment("n") == (version + 1) // 2
                client.script_flush()
                assert await session.get("n", fresh=True) == (version + 1) // 2
                client.script_flush()
                async with store.batch() as batch:
                    for each in sessions:
                        batch.on(each).increment("n", 1)
                client.script_flush()
                async with session.lock():
                    client.script_flush()
        assert [fields["n"] for fields in await store.get_many(sessions)] == [10] * 5
        await store.close()


# Sizes


@real
async def test_what_is_too_large_is_refused_before_anything_is_sent(opener: Any) -> None:
    store = await opener(archiver=False, max_field_bytes=1000, max_message_bytes=500, max_record_bytes=3000)
    session = store.session("s")
    await session.set("a", 1)
    with asked(store) as seen:
        for refused in (
            lambda: session.set("a", "x" * 999),
            lambda: session.set_many({"fine": 1, "big": "x" * 1000}),
            lambda: session.set_many({str(number): "x" * 900 for number in range(4)}),
            lambda: session.write(set={"a": 2}, append=[message("x" * 500)]),
            lambda: session.append(message("fine"), message("x" * 500)),
            lambda: session.set("k" * 1025, 1),
        ):
            with pytest.raises(TooLarge):
                await refused()
    assert seen.sent == []
    await session.set("a", "x" * 998)
    with asked(store) as seen, pytest.raises(TooLarge):
        await session.apply(lambda view: view.__setitem__("a", "x" * 1000))
    assert not [each for each in seen.sent if COMMIT.sha.decode() in each]


async def _in_transaction(session: Any, number: int) -> None:
    async with session.transaction() as transaction:
        for at in range(number):
            transaction[f"t{at}"] = at


async def _in_turn(session: Any, number: int) -> None:
    async with session.turn() as turn:
        turn.append(*[message("m")] * number)


async def _in_batch(store: Any, session: Any, number: int) -> None:
    async with store.batch() as batch:
        batch.on(session).set_many({f"b{at}": at for at in range(number)})


@real
async def test_more_steps_than_a_commit_takes_are_refused_before_anything_is_sent(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they are asked for, and a field that is changed twice is one step. A whole state may have any number."""
    monkeypatch.setattr("distributed_state.tiers.changes.MOST_STEPS", 20)
    store = await opener(archiver=False)
    session = store.session("s")
    ways: list[Callable[[int], Awaitable[Any]]] = [
        lambda number: session.set_many({f"s{at}": at for at in range(number)}),
        lambda number: session.write(delete=[f"d{at}" for at in range(number)]),
        lambda number: session.write(increment={f"i{at}": at for at in range(number)}),
        lambda number: session.write(append=[message("m")] * number),
        lambda number: session.write(tag={"run": [f"r{at}" for at in range(number)]}),
        lambda number: session.write(untag={"run": [f"r{at}" for at in range(number)]}),
        lambda number: session.write(set={f"s{at}": at for at in range(number - 5)}, append=[message("m")] * 5),
        lambda number: session.replace_messages([message("m")] * (number - 2)),
        lambda number: _in_transaction(session, number),
        lambda number: _in_batch(store, session, number),
    ]
    for way in ways:
        await way(20)
        version = await session.version(fresh=True)
        with asked(store) as seen, pytest.raises(TooLarge, match="one commit changes at most 20 fields, messages and"):
            await way(23)
        assert not [each for each in seen.sent if COMMIT.sha.decode() in each]
        assert await session.version(fresh=True) == version
    with pytest.raises(TooLarge):
        await _in_turn(session, 21)
    async with session.transaction() as transaction:
        for at in range(40):
            transaction["same"] = at
    state = await session.export_state()
    assert len(state["fields"]) > 20
    await store.session("other").restore_state(state)
    assert (await store.session("other").export_state())["fields"] == state["fields"]


@single
async def test_increments_cost_the_server_as_much_as_sets_do(opener: Any) -> None:
    """As many as one commit takes: with one text of sums that each step copied it was thirteen times as much."""
    store = await opener(archiver=False)
    with redis_of(store) as client:

        async def seconds(**steps: Any) -> float:
            before = client.info("cpu")
            await store.session("s").write(**steps)
            after = client.info("cpu")
            return sum(float(after[name]) - before[name] for name in ("used_cpu_user", "used_cpu_sys"))

        many = {f"n{number}": number for number in range(MOST_STEPS)}
        sets = await seconds(set=many)
        assert await seconds(increment=many) < 4 * sets
    assert await store.session("s").get(f"n{MOST_STEPS - 1}", fresh=True) == 2 * (MOST_STEPS - 1)


class _Compared(str):
    """A name that counts how often it is compared."""

    count = 0

    def __eq__(self, other: object) -> bool:
        _Compared.count += 1
        return str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


def test_names_are_not_looked_for_one_by_one() -> None:
    changes = Changes(Settings(), Codec("n", "session:s"))
    names = [_Compared(f"n{number}") for number in range(500)]
    for _ in range(2):
        for name in names:
            changes.increment(name, 1)
    assert list(changes.sums) == names
    assert _Compared.count < 10 * len(names)


async def test_a_record_does_not_grow_beyond_its_limit(opener: Any) -> None:
    store = await opener(max_record_bytes=1000)
    session = store.session("s")
    for number in range(9):
        await session.set(f"f{number}", "x" * 96)
    await unchanged(store, lambda: session.set("f9", "x" * 97), TooLarge, "would grow to 1001 bytes")
    await session.set("f9", "x" * 96)
    await unchanged(store, lambda: session.set("f0", "x" * 97), TooLarge, "would grow to 1001 bytes")
    await session.set("f0", "x" * 95)
    await session.delete("f1")
    await session.set("f10", "x" * 96)
    async with store.batch() as batch:
        batch.on(session).clear(messages=False)
        batch.on(session).set("big", "x" * 900)
    assert stored(store)[b"#size"] == b"%d" % (3 + 902)
    await session.clear()
    assert stored(store)[b"#size"] == b"0"


async def test_the_size_is_kept_exactly(store: Any) -> None:
    """After any changes it is the sum of what is there: a wrong sum would refuse, or let in, ever more."""
    random_changes, session = random.Random(2), store.session("s")
    for _ in range(60):
        key = f"k{random_changes.randrange(6)}"
        match random_changes.randrange(5):
            case 0 | 1:
                await session.set(key, "x" * random_changes.randrange(50))
            case 2:
                await session.delete(key)
            case 3:
                await session.increment(f"n{random_changes.randrange(3)}", random_changes.randrange(10_000))
            case 4 if random_changes.random() < 0.2:
                await session.clear()
            case _:
                await session.write(set={key: []}, delete=[f"k{random_changes.randrange(6)}"], append=[message("x")])
    found = stored(store)
    assert int(found[b"#size"]) == sum(len(k) + len(v) for k, v in found.items() if not k.startswith(b"#"))


@real  # fakeredis takes ten seconds
async def test_a_record_of_many_fields_and_messages_is_one_commit(store: Any) -> None:
    """More than a script's `unpack` can take at once."""
    session = store.session("s")
    fields = {f"key-{number}": number for number in range(5000)}
    await session.write(set=fields, append=[message(str(number)) for number in range(5000)])
    assert await session.get_all(fresh=True) == fields
    assert len(await session.messages(fresh=True)) == 5000
    assert await session.clear(messages=True) == 2
    assert await session.get_all(fresh=True) == {}
    assert await contents(session) == []
    left = {name for name in stored(store) if not name.startswith(b"#") or name[2:].isdigit()}
    assert left == set()


@pytest.mark.parametrize("repeated", ["commit", "read"])
async def test_a_request_that_is_repeated_leaves_no_token_that_others_hold_already(store: Any, repeated: str) -> None:
    """A slow reader may put a record back only if nothing was committed since its token was left."""
    warm, keys, cold = tiers(store).warm, keys_of(store, "s"), tiers(store).cold
    await store.session("s").set("n", 1)
    await store.admin.archive()
    draft = increment(store)
    op, (read_keys, arguments) = warm.ops.begin(draft.operations), warm.read_call(keys, "", None)

    async def ask() -> Any:
        if repeated == "commit":
            return await warm.commit(keys, draft, op)
        return warm.read_answer(await tiers(store).port.script(READ, read_keys, arguments))

    with redis_of(store) as client:
        client.delete(keys.record)
        assert isinstance(await ask(), Cold)
        left = await warm.read(keys)
        loaded = cold.load(keys.ref.text, window=10)
        assert await store.session("s").set("n", 2) == 2
        await store.admin.archive()
        client.delete(keys.record)
    assert isinstance(await ask(), Cold), "its first answer was lost, say"
    assert not await warm.hydrate(keys, left, loaded)
    warm.ops.end(op)
    assert await store.session("s").version(fresh=True) == 2


async def test_a_list_or_object_changed_in_place_is_changed(store: Any) -> None:
    """A transaction is a dict: what was read or set in it belongs to it until the end."""
    session = store.session("s")
    await session.set_many({"l": [1], "d": {"a": 1}, "same": [1], "gone": [1], "put": [1]})
    async with session.transaction() as tx:
        tx["l"].append(2)
        tx["d"]["b"] = 2
        tx.setdefault("new", []).append(1)
        assert tx["same"] == [1]
        tx["gone"].append(2)
        del tx["gone"]
        tx["put"] = other = [5]
        other.append(6)
        assert sorted(tx) == ["d", "l", "new", "put", "same"]
    expected = {"l": [1, 2], "d": {"a": 1, "b": 2}, "same": [1], "new": [1], "put": [5, 6]}
    assert await session.get_all(fresh=True) == expected
    assert sorted((await session.history())[-1].set) == ["d", "l", "new", "put"]
    async with session.transaction() as tx:
        assert tx["l"] == [1, 2]
    assert await session.version(fresh=True) == 2, "nothing was changed"
    with pytest.raises(InvalidValue, match="over"):
        tx["late"] = 1
