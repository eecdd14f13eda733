"""Defaults on first use, backup and restore, cleanup by age, staleness per read, and what never leaves the process."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from below import keys_of, later, redis_of, tiers, until
from controls import sabotage
from counting import asked
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select, update
from sync_api import core

from distributed_state import Deleted, InvalidValue, StateStore, TooLarge
from distributed_state.cold.tables import changes, records
from distributed_state.hot.cache import Hot
from distributed_state.records import messages
from distributed_state.records.context import RECORDS, Ephemeral
from distributed_state.store.lifecycle import core_of
from distributed_state.values import codec
from distributed_state.values.levels import Freshness

real = pytest.mark.only(warm="real")


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def texts(session: Any, **options: Any) -> list[str]:
    return [each.content for each in await session.messages(**options)]


async def is_hot(store: Any, session: Any) -> None:
    async def hit() -> bool:
        before = tiers(store).hot.hits
        await session.get_all()
        return bool(tiers(store).hot.hits > before)

    await until(hit)


# Defaults on first use


async def test_defaults_are_set_once_and_overwrite_nothing(store: Any) -> None:
    session = store.session("s")
    await session.set("language", "de")
    assert await session.initialize({"language": "en", "count": 0}) is True
    assert await session.get_all() == {"language": "de", "count": 0}
    assert await session.version() == 2
    await session.delete("count")
    assert await session.initialize({"count": 5, "more": 1}) is False
    assert await session.get_all(fresh=True) == {"language": "de"}
    assert (await session.history())[1].set == {"count": 0}


async def test_a_cleared_deleted_or_rolled_back_record_begins_anew(store: Any) -> None:
    session = store.session("s")
    await session.set("x", 1)
    assert await session.initialize({"n": 0})
    await session.clear()
    assert await session.initialize({"n": 1})
    await session.rollback(version=1)
    assert await session.initialize({"n": 2})
    await store.delete("s")
    with pytest.raises(Deleted):
        await session.initialize({"n": 3})
    await session.create()
    assert await session.initialize({"n": 4})
    assert await session.get_all() == {"n": 4}


@real
async def test_once_it_is_known_to_be_done_nobody_is_asked(opener: Any) -> None:
    store, calls = await opener(archiver=False), []
    session = store.session("s")

    def expensive() -> dict[str, Any]:
        calls.append(1)
        return {"n": 0}

    assert await session.initialize(expensive)
    await is_hot(store, session)
    with asked(store) as seen:
        assert not await session.initialize(expensive)
    assert seen.sent == []
    assert len(calls) == 1


@pytest.mark.only(api="asyncio")
async def test_defaults_may_be_awaited_for(store: Any) -> None:
    async def load() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"n": 1}

    assert await store.session("s").initialize(load)
    assert await store.session("s").get("n") == 1


async def test_defaults_that_cannot_be_stored_set_nothing(store: Any) -> None:
    session = store.session("s")
    for nonsense in ({"a": 1, "b": {1}}, {"#a": 1}, [("a", 1)], lambda: None):
        with pytest.raises(InvalidValue):
            await session.initialize(nonsense)
    assert await session.version(fresh=True) == 0
    assert await session.initialize({})
    assert not await session.initialize({"n": 1})


async def begin_together(opener: Any, rounds: int) -> AsyncIterator[tuple[int, int]]:
    """For each round: how many of the replicas did it, and how many values of others were overwritten."""
    stores = [await opener(archiver=False) for _ in range(3)]

    async def one(store: Any, session: Any, number: int) -> bool:
        if number == 2:
            await session.set("set", "mine")
        return bool(await session.initialize({"by": number, "set": "default"}))

    for step in range(rounds):
        sessions = [store.session(f"s{step}") for store in stores]
        did = await asyncio.gather(*(one(store, sessions[n], n) for n, store in enumerate(stores)))
        state = await sessions[0].get_all(fresh=True)
        yield sum(did), int(state["set"] != "mine")


@pytest.mark.replicas
async def test_of_many_replicas_one_sets_the_defaults(opener: Any) -> None:
    assert [each async for each in begin_together(opener, 30)] == [(1, 0)] * 30


@pytest.mark.replicas
async def test_without_the_guard_of_the_version_several_would(opener: Any) -> None:
    """The negative control."""
    guard = "local mismatch = expected ~= '' and expected ~= (version or '0')"
    with sabotage("commit", guard, "local mismatch = false"):
        async for each in begin_together(opener, 2000):  # whether they meet is chance
            if each != (1, 0):
                return
    raise AssertionError("the guard was never needed")


# Backup


async def test_a_state_that_was_exported_is_restored(store: Any) -> None:
    session = store.session("s")
    await session.write(set={"a": [1, {"b": None}], "big": 2**70}, append=[message("1"), message("2")], phase="busy")
    await session.set("otp", 7, ttl=600)
    state = await session.export_state(messages=True)
    assert json.loads(json.dumps(state)) == state
    assert set(state) == {"fields", "phase", "expires", "messages"}
    await session.clear(messages=True)
    await session.write(set={"a": 0, "other": 1}, append=[message("3")], phase="idle")

    for target in (session, store.session("another"), store.task("t")):
        version = await target.version(fresh=True)
        assert await target.restore_state(state) == version + 1, "one commit"
        assert await target.get_all(fresh=True) == {"a": [1, {"b": None}], "big": 2**70, "otp": 7}
        found = await target.export_state(messages=True)
        assert found.pop("expires")["otp"] == pytest.approx(state["expires"]["otp"], abs=0.1)
        assert found == {key: value for key, value in state.items() if key != "expires"}
    assert await texts(session) == ["1", "2"]
    assert await session.phase() == "busy"


async def test_what_a_state_does_not_hold_stays(store: Any) -> None:
    session = store.session("s")
    await session.write(set={"a": 1}, append=[message("1")], phase="busy")
    await session.restore_state({"fields": {"b": 2}})
    assert await session.get_all() == {"b": 2}
    assert await session.phase() == "busy"
    assert await texts(session) == ["1"]
    await session.restore_state({"fields": {}, "phase": None, "messages": []})
    assert (await session.get_all(), await session.phase(), await texts(session)) == ({}, None, [])


async def test_what_get_all_returned_is_restored_as_the_fields(store: Any) -> None:
    session = store.session("s")
    assert await session.restore_state(await session.get_all()) == 1, "of an empty one, too"
    await session.write(set={"a": [1], "messages": [], "phase": {"x": 1}}, append=[message("1")], phase="busy")
    saved = await session.get_all()
    await session.write(set={"a": 0, "other": 1}, append=[message("2")], phase="idle")
    assert await session.restore_state(saved) == 4
    assert await session.get_all(fresh=True) == {"a": [1], "messages": [], "phase": {"x": 1}}
    assert (await session.phase(), await texts(session)) == ("idle", ["1", "2"])


async def test_one_bad_entry_restores_nothing_and_every_bad_one_is_named(store: Any) -> None:
    session = store.session("s")
    await session.write(set={"a": 1}, append=[message("1")], phase="busy")
    bad = {
        "fields": {"good": 1, "circle": {1, 2}, "#x": 1, "nan": float("nan")},
        "messages": [message("ok"), {"role": "alien"}, "text"],
        "phase": 7,
        "expires": {"good": "soon", "nobody": 1.0},
        "extra": 1,
    }
    with pytest.raises(InvalidValue) as caught:
        await session.restore_state(bad)
    for named in ("circle", "'#x'", "nan", "messages[1]", "messages[2]", "phase", "'good'", "'nobody'", "'extra'"):
        assert named in str(caught.value), named
    assert "messages[0]" not in str(caught.value)
    for nonsense in (None, [], "x", {"fields": [1]}, {"fields": {}, "messages": {}}, {"#a": 1}, {1: 1}, {"a": {1}}):
        with pytest.raises(InvalidValue):
            await session.restore_state(nonsense)
    assert await session.version(fresh=True) == 1
    assert await session.get_all() == {"a": 1}


async def test_a_restore_that_is_too_large_is_refused(opener: Any) -> None:
    store = await opener(max_field_bytes=100, max_record_bytes=200)
    session = store.session("s")
    with pytest.raises(InvalidValue, match="'long'"):
        await session.restore_state({"fields": {"long": "x" * 200, "ok": 1}})
    with pytest.raises(InvalidValue, match="max_record_bytes"):
        await session.restore_state({"fields": {f"k{n}": "x" * 50 for n in range(5)}})
    with pytest.raises(TooLarge):
        await session.set("long", "x" * 200)
    assert await session.version(fresh=True) == 0


async def test_a_value_whose_time_is_over_is_not_restored(store: Any) -> None:
    session = store.session("s")
    await session.restore_state({"fields": {"otp": 1, "a": 2}, "expires": {"otp": 1000.5}})
    assert await session.get_all() == {"a": 2}


# Cleanup


async def age(store: Any, days: float, *, upto: int, record: str = "session:s") -> None:
    """Make the first commits of a record older than they are."""
    await store.admin.archive()
    cold = tiers(store).cold
    c = changes.c
    begun = (records.c.namespace == cold.namespace) & (records.c.record == record)
    mine = (c.record == select(records.c.key).where(begun).scalar_subquery()) & (c.version <= upto)
    with cold.database.write() as connection:
        connection.execute(update(changes).where(mine).values(time_ms=c.time_ms - int(days * 86_400_000)))
        connection.execute(update(records).where(begun).values(created_ms=0))


async def test_old_messages_are_hidden_and_kept_in_the_history(store: Any) -> None:
    session = store.session("s")
    for number in range(6):
        await session.append(message(f"{number}a"), message(f"{number}b"))
    assert await store.admin.cleanup(session.id, days=30) == 0
    await age(store, 40, upto=4)
    assert await store.admin.cleanup(session.id, days=50) == 0
    assert await session.version(fresh=True) == 6, "nothing to hide, nothing committed"
    assert await store.admin.cleanup(session.id, days=30) == 8
    for fresh in (False, True):
        assert await texts(session, fresh=fresh) == ["4a", "4b", "5a", "5b"]
        assert await texts(session, last=3, fresh=fresh) == ["4b", "5a", "5b"]
    await session.append(message("6"))
    assert await texts(session) == ["4a", "4b", "5a", "5b", "6"]
    assert await store.admin.cleanup(session.id, days=30) == 0
    before = await session.at(version=6)
    assert len(before.messages) == 12
    await session.rollback(version=6)
    assert len(await session.messages()) == 12
    assert await store.admin.cleanup(session.id, days=30) == 8
    assert await texts(session) == ["4a", "4b", "5a", "5b"]
    await store.admin.archive()
    with redis_of(store) as client:
        client.delete(keys_of(store, "s").record)
    store.invalidate()
    assert await texts(session) == ["4a", "4b", "5a", "5b"]


async def test_everything_may_be_old(store: Any) -> None:
    session = store.session("s")
    await session.append(message("1"), message("2"))
    await age(store, 40, upto=1)
    assert await store.admin.cleanup(session.id, days=1) == 2
    assert await texts(session) == []
    await session.append(message("3"))
    assert await texts(session, fresh=True) == ["3"]
    assert await store.admin.cleanup("never", days=1) == 0
    await store.delete("s")
    assert await store.admin.cleanup(session.id, days=0) == 0


async def test_a_fork_hides_what_it_shares_by_its_age(store: Any) -> None:
    session = store.session("s")
    for number in range(4):
        await session.append(message(str(number)))
    await session.fork("f")
    fork = store.session("f")
    await fork.append(message("own"))
    await age(store, 40, upto=2)
    assert await store.admin.cleanup(fork.id, days=30) == 2
    assert await texts(fork) == ["2", "3", "own"]
    assert await texts(session) == ["0", "1", "2", "3"]


async def test_after_a_purge_only_what_is_known_to_be_old_is_hidden(store: Any) -> None:
    session = store.session("s")
    for number in range(6):
        await session.append(message(str(number)))
    await age(store, 40, upto=4)
    await age(store, 40, upto=2)  # 80 days
    await store.admin.purge(older_than=60 * 86400)
    assert await store.admin.cleanup(session.id, days=50) == 0, "what is left begins 40 days ago"
    assert await store.admin.cleanup(session.id, days=30) == 4
    assert await texts(session, fresh=True) == ["4", "5"]


async def test_its_cost_does_not_grow_with_the_messages(opener: Any) -> None:
    store, sizes = await opener(), []
    for name, count in (("few", 20), ("many", 2000)):
        session = store.session(name)
        await session.append(*(message(str(n)) for n in range(count)))
        await age(store, 40, upto=1, record=f"session:{name}")
        await session.append(message("new"))
        assert await store.admin.cleanup(session.id, days=30) == count
        await store.admin.archive()
        rows = tiers(store).cold.history(f"session:{name}", after=2)
        sizes.append(len(rows[0].data))
        assert await texts(session) == ["new"]
    assert abs(sizes[0] - sizes[1]) < 10


@pytest.mark.replicas
async def test_a_message_that_comes_meanwhile_is_not_hidden(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = await opener(), await opener()
    await here.session("s").append(message("old"))
    await age(here, 40, upto=1)
    plan, late = messages.plan_cleanup, [message("late")]

    async def slow(*args: Any) -> Any:
        found = await plan(*args)
        if late:
            text = late.pop()
            if hasattr(there, "it"):
                there.it.session("s").append(text)
            else:
                await there.session("s").append(text)
        return found

    monkeypatch.setattr(messages, "plan_cleanup", slow)
    assert await here.admin.cleanup("s", days=30) == 1
    assert await texts(here.session("s"), fresh=True) == ["late"]


async def test_days_are_a_number(store: Any) -> None:
    for nonsense in (-1, True, "30", float("nan"), None, float("inf")):
        with pytest.raises(InvalidValue, match="days"):
            await store.admin.cleanup("s", days=nonsense)


# Staleness and copies


@real
async def test_a_read_may_ask_for_more_than_the_setting_gives(opener: Any, monkeypatch: Any) -> None:
    store = await opener(archiver=False, max_staleness=5)
    session = store.session("s")
    await session.write(set={"n": 1}, append=[message("hi")], phase="busy")
    await is_hot(store, session)
    freshness = tiers(store).hot.entries["session:s"].freshness
    freshness.good_until = tiers(store).hot.clock() + 3.5  # as after 1.5 s without an echo
    monkeypatch.setattr(Freshness, "prove", lambda self, until: None)

    async def read_everything(max_staleness: float | None) -> None:
        assert await session.get("n", max_staleness=max_staleness) == 1
        assert await session.get("m", "d", max_staleness=max_staleness) == "d"
        assert await session.has("n", max_staleness=max_staleness)
        assert await session.get_all(max_staleness=max_staleness) == {"n": 1}
        assert await session.version(max_staleness=max_staleness) == 1
        assert await session.exists(max_staleness=max_staleness)
        assert await session.phase(max_staleness=max_staleness) == "busy"
        assert await texts(session, last=1, max_staleness=max_staleness) == ["hi"]

    for seconds, questions in ((None, 0), (4, 0), (5, 0), (0.5, 8), (0, 8)):
        with asked(store) as seen:
            await read_everything(seconds)
        assert len(seen.sent) == questions, seconds
    for nonsense in (-1, "1", True, float("nan")):
        with pytest.raises(InvalidValue, match="max_staleness"):
            await session.get("n", max_staleness=nonsense)
    for more in (5.1, 300, float("inf")):
        for read in session.get_all, session.messages:
            with pytest.raises(InvalidValue, match=rf"max_staleness={more:g} is more than the store's 5"):
                await read(max_staleness=more)
    without_hot = (await opener(archiver=False, max_staleness=0)).session("s")
    assert await without_hot.get("n", max_staleness=300) == 1


@real
async def test_an_invalidated_copy_is_read_again(opener: Any) -> None:
    store = await opener(archiver=False)
    one, other = store.session("one"), store.session("other")
    for session in (one, other):
        await session.set("n", 1)
        await is_hot(store, session)
    store.invalidate()
    with asked(store) as seen:
        assert await one.get("n") == await other.get("n") == 1
    assert len(seen.sent) == 2


@pytest.mark.only(api="asyncio")
async def test_a_read_after_invalidation_does_not_join_one_that_began_before(store: Any) -> None:
    hot: Hot = tiers(store).hot
    before, _ = hot.take_off("session:s", freshness=Freshness(0), alone=False)
    assert hot.take_off("session:s", freshness=Freshness(0), alone=False) == (before, False)
    core(store).invalidate()
    after, ours = hot.take_off("session:s", freshness=Freshness(0), alone=False)
    assert ours
    for flight in (before, after):
        hot.land("session:s", flight, None)


# Values of this process


async def test_ephemeral_values_are_shared_by_handles_and_sent_nowhere(opener: Any) -> None:
    store = await opener()
    session = store.session("s")
    session.ephemeral["client"] = marker = object()
    session.ephemeral["secret"] = "do-not-store"
    assert store.session("s", actor="other").ephemeral["client"] is marker
    assert store.session("t").ephemeral == {}
    assert store.user("s").ephemeral == {}
    await session.set("n", 1)
    assert await session.get_all(fresh=True) == {"n": 1}
    assert "secret" not in await session.export_state()
    await store.admin.archive()
    with redis_of(store) as client:
        assert b"do-not-store" not in repr(client.hgetall(keys_of(store, "s").record)).encode()
    another = store.session()
    another.ephemeral["x"] = 1
    assert await another.get("x") is None


@pytest.mark.replicas
async def test_another_replica_has_its_own(opener: Any) -> None:
    here, there = await opener(), await opener()
    here.session("s").ephemeral["x"] = 1
    assert there.session("s").ephemeral == {}


def test_they_are_bounded_by_the_records_used_last() -> None:
    kept = Ephemeral()
    kept.of("first")["x"] = 1
    for number in range(RECORDS - 1):
        kept.of(str(number))["x"] = number
    assert kept.of("first") == {"x": 1}
    kept.of("one more")
    assert kept.of("first") == {"x": 1}, "it was used"
    assert kept.of("0") == {}, "it was not"
    assert len(kept._values) == RECORDS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_begins_without(tmp_path: Any) -> None:
    with StateStore.open(archive=f"sqlite:///{tmp_path}/a.db") as store:
        values = store.session("s").ephemeral
        values["x"] = 1
        child = os.fork()
        if child == 0:
            os._exit(0 if not values and not store.session("s").ephemeral else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_store_that_fails_in_a_forked_child_keeps_no_other_from_letting_go(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("broken")

    with StateStore.open(archive=f"sqlite:///{tmp_path}/a.db") as a, StateStore.open(archive="memory") as b:
        for store in (a, b):
            store.session("s").ephemeral["x"] = 1
            monkeypatch.setattr(core_of(store)._lifecycle.tiers().port, "abandon", fail)
        child = os.fork()
        if child == 0:
            os._exit(sum(bool(store.session("s").ephemeral) for store in (a, b)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.session("s").ephemeral == {"x": 1}


# Sanitizing


class Odd:
    def __str__(self) -> str:
        return "odd"


class Rude:
    def __str__(self) -> str:
        raise RuntimeError


async def test_what_json_cannot_hold_is_an_error_unless_chosen_otherwise(store: Any) -> None:
    strict, session = store.session("s"), store.session("s", on_invalid="stringify")
    value = {"odd": Odd(), "list": [1, float("inf"), (1, Odd())], 7: None, "set": {1}}
    with pytest.raises(InvalidValue):
        await strict.set("x", value)
    await session.set("x", value)
    assert await session.get("x") == {"odd": "odd", "list": [1, "inf", [1, "odd"]], "7": None, "set": "{1}"}
    await session.append_to("l", Odd())
    await session.update("d", {"a": Odd()})
    await session.write(set={"w": Odd()}, append=[{"role": "user", "content": "hi", "metadata": {"o": Odd()}}])
    await session.apply(lambda tx: tx.update(tx=[Odd()]))
    assert await session.restore_state({"fields": {"r": Odd()}})
    assert await session.get_all() == {"r": "odd"}
    assert (await session.messages())[0].metadata == {"o": "odd"}
    assert (await session.at(version=5)).fields["tx"] == ["odd"]
    circle: list[Any] = [1]
    circle.append({"again": circle})
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    for hopeless in (circle, deep, Rude(), {1: "a", "1": "b"}):
        with pytest.raises(InvalidValue):
            await session.set("x", hopeless)
    with pytest.raises(InvalidValue, match="on_invalid"):
        store.session("s", on_invalid="ignore")
    with pytest.raises(TypeError, match="a handle has no option uesr"):
        store.session("s", uesr="u1")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc"), inner, max_size=4),
)  # fmt: skip


@given(json_values)
@settings(max_examples=30)
def test_a_json_value_is_left_as_it_is(value: Any) -> None:
    from distributed_state.records.sanitizing import stringified

    found = stringified(value, "x")
    assert found == value
    assert codec.encode(found) == codec.encode(value)


async def test_a_hook_cleans_what_is_stored(opener: Any) -> None:
    def shorten(key: str, value: Any) -> Any:
        return value[:5] if isinstance(value, str) else value

    def upper(key: str, value: Any) -> Any:
        return value.upper() if isinstance(value, str) and key != "asis" else value

    def redact(message: Any) -> Any:
        return message.model_copy(update={"content": message.content.replace("4711", "****")})

    store = await opener(clean=upper, clean_messages=redact)
    session = store.session("s", clean=shorten)
    await session.write(set={"a": "lengthy", "asis": "lengthy", "n": 1}, append=[message("pin 4711")])
    async with store.batch() as batch:
        batch.on(session).set("b", "batched")
    await session.apply(lambda tx: tx.update(t="transaction"))
    await store.user("u").set("a", "lengthy")
    everything = {"a": "LENGT", "asis": "lengt", "n": 1, "b": "BATCH", "t": "TRANS"}
    assert await session.get_all(fresh=True) == everything
    assert await store.user("u").get("a") == "LENGTHY"
    assert await texts(session) == ["pin ****"]


async def test_a_hook_that_fails_stores_nothing(store: Any) -> None:
    def raises(*given: Any) -> Any:
        raise KeyError("no")

    async def later(*given: Any) -> Any:
        return given

    for hook in (raises, lambda key, value: {1}, lambda key, value: None, lambda value: value):
        session = store.session("s", clean=hook)
        for write in (session.set("k", 1), session.update("k", {"a": 1}), session.initialize({"k": 1})):
            with pytest.raises(InvalidValue, match="k"):
                await write
    for hook in (raises, lambda message: "text", lambda message: None):
        with pytest.raises(InvalidValue, match="message"):
            await store.session("s", clean_messages=hook).append(message("hi"))
    for nonsense in (later, "strip", 7):
        with pytest.raises(InvalidValue, match="clean"):
            store.session("s", clean=nonsense)
    assert await store.session("s").version(fresh=True) == 0


async def test_a_turn_shows_what_is_stored_and_finds_what_is_over_absent(store: Any) -> None:
    def redact(message: Any) -> Any:
        return message.model_copy(update={"content": message.content.replace("4711", "****")})

    session = store.session("s", clean=lambda key, value: value * 2, clean_messages=redact)
    await session.set("otp", 1, ttl=60)
    later(store, 61)
    with store.acting_as("user:7"):
        async with session.turn() as turn:
            assert "otp" not in turn
            turn.append(message("pin 4711"))
            turn["n"] = 2
            assert [each.content for each in await turn.messages()] == ["pin ****"]
    assert await session.get_all() == {"n": 4}
    assert await texts(session) == ["pin ****"]
    assert (await session.history())[-1].actor == "user:7"
