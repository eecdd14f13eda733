"""Fields that end by themselves: past their deadline they are absent on every tier, by the server's clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from below import deaf, keys_of, later, redis_of, tiers, until
from counting import asked
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from sync_api import core

from distributed_state import Conflict, Encryption, InvalidValue, KeyRing, Transaction, WarmUnavailable
from distributed_state.values import codec, field_ttl
from distributed_state.values.field_ttl import NEVER
from distributed_state.warm.scripts import COMMIT


class Login(BaseModel):
    otp: str | None = None
    items: list[int] = []


real = pytest.mark.only(warm="real")


async def is_hot(store: Any, session: Any) -> None:
    async def hit() -> bool:
        before = tiers(store).hot.hits
        await session.get_all()
        return bool(tiers(store).hot.hits > before)

    await until(hit)


@given(st.binary(min_size=1).filter(lambda data: data[:1] != b"!"), st.floats(0, 1e11))
def test_what_is_wrapped_is_split(data: bytes, deadline: float) -> None:
    found, inner = field_ttl.split(field_ttl.wrap(data, deadline))
    assert inner == data
    assert found == pytest.approx(deadline, abs=0.002, rel=1e-12)
    assert field_ttl.split(data) == (NEVER, data)
    assert field_ttl.wrap(data, NEVER) == data


def test_what_only_looks_like_a_deadline_is_corrupt_and_not_over() -> None:
    for data in (b"!", b"!1", b"!x 1", b"!-1 1"):
        assert field_ttl.split(data) == (NEVER, data)
        assert not field_ttl.over(data, 1e12)
        with pytest.raises(Exception, match="not JSON"):
            codec.decode(data)


@pytest.mark.parametrize("hot", [True, False])
async def test_past_its_deadline_a_field_is_absent(opener: Any, hot: bool) -> None:
    store = await opener(**({} if hot else {"max_staleness": 0}))
    session = store.session("s")
    await session.set("otp", {"code": [1, 2]}, ttl=60)
    await session.set("name", "Ana")
    if hot:
        await is_hot(store, session)
    for fresh in (False, True):
        assert await session.get("otp", fresh=fresh) == {"code": [1, 2]}
        assert await session.has("otp", fresh=fresh)
    later(store, 61)
    for fresh in (False, True):
        assert await session.get("otp", "gone", fresh=fresh) == "gone"
        assert not await session.has("otp", fresh=fresh)
        assert await session.get_all(fresh=fresh) == {"name": "Ana"}
        assert await session.get("name", fresh=fresh) == "Ana"
    assert await store.get_many([session]) == [{"name": "Ana"}]
    assert (await session.export_state())["fields"] == {"name": "Ana"}
    async with session.transaction() as tx:
        assert "otp" not in tx
        assert list(tx) == ["name"]
    # As it was written.
    assert (await session.at(version=1)).fields == {"otp": {"code": [1, 2]}}
    assert (await session.history(limit=1))[0].set == {"otp": {"code": [1, 2]}}


@real
async def test_it_ends_in_hot_without_asking(opener: Any) -> None:
    store = await opener(archiver=False)
    session = store.session("s")
    await session.set_many({"otp": 1, "other": 2}, ttl=60)
    await session.set("name", "Ana")
    await is_hot(store, session)
    with asked(store) as seen:
        assert await session.get("otp") == 1
        later(store, 61)
        assert await session.get("otp") is None
        assert await session.get_all() == {"name": "Ana"}
    assert seen.sent == []


async def test_a_rollback_does_not_bring_back_what_is_over(store: Any) -> None:
    """An expired field stays stored: it must go with the marker that the record has expiring fields."""
    session = store.session("s")
    await session.set("a", 1)
    await session.set("otp", 1, ttl=0.1)
    await until(lambda: _is_over(session))
    await session.rollback(version=1)
    assert await session.get_all(fresh=True) == {"a": 1}
    assert "otp" in (await session.history())[-1].deleted


async def _is_over(session: Any) -> bool:
    return not await session.has("otp", fresh=True)


async def test_it_ends_while_the_servers_time_passes(store: Any) -> None:
    """No clock is moved here."""
    session = store.session("s")
    await session.set("otp", 1, ttl=0.3)
    assert (await session.at(version=1)).fields == {"otp": 1}

    async def over() -> bool:
        return await session.get("otp") is None

    await until(over)
    assert not await session.has("otp", fresh=True)


@pytest.mark.replicas
async def test_a_worker_whose_clock_is_wrong_agrees_with_the_others(opener: Any) -> None:
    """Deadlines are by the server's clock; a worker an hour ahead neither ends them early nor writes them late."""
    right, wrong = await opener(), await opener()
    port = tiers(wrong).port
    wall = port.wall
    port.wall = lambda: wall() + 3600
    await right.session("s").set("a", 1, ttl=60)
    assert await wrong.session("s").get("a") == 1
    await wrong.session("s").set("b", 1, ttl=60)
    with redis_of(right) as client:
        stored = client.hmget(keys_of(right, "s").record, "a", "b")
    first, second = (field_ttl.split(data)[0] for data in stored)
    assert 0 <= second - first < 30
    assert abs(await wrong.time() - await right.time()) < 30
    later(right, 61)
    assert await right.session("s").get_all() == {}


@pytest.mark.replicas
async def test_without_the_servers_clock_they_would_not_agree(opener: Any) -> None:
    """The negative control."""
    right, wrong = await opener(), await opener()
    later(wrong, 3600)
    await right.session("s").set("a", 1, ttl=60)
    assert await wrong.session("s").get("a") is None


def jumped(store: Any, seconds: float) -> None:
    """Somebody sets the worker's clock. That it hears the server again would put nothing right here: it is deaf."""
    deaf(store)
    port = tiers(store).port
    wall = port.wall
    port.wall = lambda: wall() + seconds  # type: ignore[method-assign]


@pytest.mark.parametrize("seconds", [3600, -3600])
@pytest.mark.parametrize("hot", [True, False])
@pytest.mark.replicas
async def test_a_jump_of_the_workers_clock_ends_nothing_and_keeps_nothing_longer(
    opener: Any, hot: bool, seconds: float
) -> None:
    store, other = await opener(**({} if hot else {"max_staleness": 0})), await opener()
    session = store.session("s")
    await session.set("otp", 1, ttl=600)
    await session.set("short", 1, ttl=0.5)
    if hot:
        await is_hot(store, session)
    jumped(store, seconds)
    assert await session.get("otp") == 1
    assert await session.get("otp", fresh=True) == 1
    await session.set("name", "Ana")
    await session.set("new", 1, ttl=600)
    assert await session.increment("otp") == 2, "and so it keeps its deadline"
    with redis_of(store) as client:
        first, second = (field_ttl.split(data)[0] for data in client.hmget(keys_of(store, "s").record, "otp", "new"))
    assert 0 <= second - first < 30

    async def over() -> bool:
        return await session.get("short") is None

    await until(over)
    assert await other.session("s").get_all(fresh=True) == {"otp": 2, "name": "Ana", "new": 1}


async def test_a_worker_that_has_not_heard_the_servers_time_asks_before_it_ends_anything(opener: Any) -> None:
    store = await opener()
    await store.session("s").set("otp", 1, ttl=600)
    clock = tiers(store).clock
    for seconds in (3600, -3600):
        port = tiers(store).port
        clock._readings, clock._tried = {}, {}  # as it is made
        port.wall = lambda wall=port.wall, seconds=seconds: wall() + seconds
        if seconds < 0:
            with pytest.raises(WarmUnavailable, match="time of Redis is not known"):
                clock.now()
        await store.session("s").set("other", seconds)
        assert await store.session("s").get_all() == {"otp": 1, "other": seconds}


async def test_a_new_value_has_no_deadline_and_a_changed_one_keeps_it(store: Any) -> None:
    session = store.session("s")
    await session.set_many({"set": 1, "tx": 1}, ttl=60)
    await session.set_many({"number": 1, "float": 0.5, "written": 1, "object": {}, "list": [], "inside": [0]}, ttl=60)
    await session.set("set", 2)
    assert await session.increment("number") == 2
    assert await session.increment("float", 0.25) == 0.75
    written = await session.write(increment={"written": 4, "plain": 2})
    assert written.results == {"written": 5, "plain": 2}
    await session.update("object", {"a": 1})
    await session.append_to("list", 1)
    async with session.transaction() as tx:
        tx["tx"] += 1
        tx["inside"].append(1)
    everything = {
        "set": 2, "tx": 2, "plain": 2,
        "number": 2, "float": 0.75, "written": 5, "object": {"a": 1}, "list": [1], "inside": [0, 1],
    }  # fmt: skip
    for fresh in (False, True):
        assert await session.get_all(fresh=fresh) == everything
    later(store, 61)
    for fresh in (False, True):
        assert await session.get_all(fresh=fresh) == {"set": 2, "tx": 2, "plain": 2}


async def test_reading_in_a_transaction_changes_nothing(store: Any) -> None:
    session = store.session("s")
    await session.set("list", [1], ttl=60)
    async with session.transaction() as tx:
        assert tx["list"] == [1]
    assert await session.version(fresh=True) == 1


@pytest.mark.parametrize("hot", [True, False])
async def test_changes_find_an_expired_field_absent(opener: Any, hot: bool) -> None:
    store = await opener(**({} if hot else {"max_staleness": 0}))
    session = store.session("s")
    keys = ("number", "float", "written", "batched")
    await session.set_many(dict.fromkeys(keys, 100) | {"object": {"old": 1}, "list": [1]}, ttl=60)
    if hot:
        await is_hot(store, session)
    later(store, 61)
    assert await session.increment("number") == 1
    assert await session.increment("float", 0.5) == 0.5
    assert (await session.write(increment={"written": 3})).results == {"written": 3}
    async with store.batch() as batch:
        batch.on(session).increment("batched", 7)
    await session.update("object", {"new": 1})
    await session.append_to("list", 2)
    found = {"number": 1, "float": 0.5, "written": 3, "batched": 7, "object": {"new": 1}, "list": [2]}
    assert await session.get_all(fresh=True) == found
    assert await session.get_all() == found
    later(store, 1000)
    assert await session.get_all(fresh=True) == found, "they begin without a deadline"


async def test_a_transaction_finds_it_absent(store: Any) -> None:
    session = store.session("s")
    await session.set("n", 100, ttl=60)
    later(store, 61)
    await session.apply(lambda tx: tx.update(n=tx.get("n", 0) + 1))
    assert await session.get("n", fresh=True) == 1


@pytest.mark.replicas
async def test_writers_of_an_expired_counter_lose_nothing(opener: Any) -> None:
    stores = [await opener(archiver=False) for _ in range(3)]
    await stores[0].session("s").set("n", 500, ttl=60)
    for store in stores:
        later(store, 61)

    async def count(store: Any) -> None:
        for step in range(20):
            if step % 2:
                await store.session("s").increment("n")
            else:
                await store.session("s").apply(lambda tx: tx.update(n=tx.get("n", 0) + 1))

    await asyncio.gather(*map(count, stores))
    assert await stores[0].session("s").get("n", fresh=True) == 60


@real
async def test_the_next_commit_removes_what_is_over(opener: Any) -> None:
    store = await opener(archiver=False)
    session = store.session("s")
    await session.set_many({"a": 1, "b": [2], "c": 3}, ttl=60)
    await is_hot(store, session)
    later(store, 61)
    with asked(store) as seen:
        await session.set("c", 4)
    assert len(seen.sent) == 1
    with redis_of(store) as client:
        stored = client.hgetall(keys_of(store, "s").record)
    assert {name for name in stored if name[:1] != b"#"} == {b"c"}
    assert await session.get_all() == await session.get_all(fresh=True) == {"c": 4}
    await store.admin.archive()
    assert set((await session.history())[-1].deleted) == {"a", "b"}


@real
async def test_any_number_of_counters_with_deadlines_are_incremented_in_one_commit(opener: Any) -> None:
    """Each was asked for in a round trip of its own, and after a hundred of them the commit was given up."""
    store = await opener(archiver=False)
    session = store.session("s")
    await session.set_many({f"n{number}": number for number in range(120)} | {"plain": 0}, ttl=60)
    await session.set("plain", 5)
    with asked(store) as seen:
        written = await session.write(increment={"plain": 1} | {f"n{number}": 2 for number in range(120)})
    assert len([each for each in seen.sent if COMMIT.sha.decode() in each]) == 2
    assert written.results == {"plain": 6} | {f"n{number}": number + 2 for number in range(120)}
    with redis_of(store) as client:
        assert client.hget(keys_of(store, "s").record, "n119").startswith(b"!"), "it keeps its deadline"
    await session.set("n60", "text", ttl=60)
    with pytest.raises(Conflict, match="field 'n60' does not hold an integer"):
        await session.write(increment={f"n{number}": 2 for number in range(120)})


async def test_any_number_of_fields_may_be_over_at_once(opener: Any) -> None:
    """More than a script can pass on as arguments: each commit sweeps some of them."""
    store = await opener(archiver=False)
    session = store.session("s")
    await session.set_many({f"f{number}": number for number in range(9000)}, ttl=60)
    await is_hot(store, session)
    later(store, 61)
    for _ in range(2):
        await session.increment("n")
    assert await session.get_all(fresh=True) == {"n": 2}
    with redis_of(store) as client:
        assert 1 < client.hlen(keys_of(store, "s").record) < 9000


@pytest.mark.replicas
async def test_what_somebody_set_anew_is_not_swept_away(opener: Any) -> None:
    here, there = await opener(archiver=False), await opener(archiver=False)
    session = here.session("s")
    await session.set("otp", 1, ttl=60)
    await is_hot(here, session)
    tiers(here).hot.apply = lambda *args: None  # it does not hear of the new one
    await there.session("s").set("otp", 2, ttl=600)
    later(here, 61)
    await session.set("other", 1)
    assert await there.session("s").get_all(fresh=True) == {"otp": 2, "other": 1}


async def test_a_deadline_survives_cold_storage_rollback_and_fork(store: Any) -> None:
    session = store.session("s")
    await session.set("otp", 1, ttl=60)
    await session.set("otp", "other")
    await session.rollback(version=1)
    await session.fork("f")
    await store.admin.import_(await store.admin.export("s"), id="i")
    await store.admin.archive()
    with redis_of(store) as client:
        client.delete(keys_of(store, "s").record, keys_of(store, "f").record)
    copies = (session, store.session("f"), store.session("i"))
    for each in copies:
        store.invalidate()
        assert await each.get_all(fresh=True) == {"otp": 1}
    later(store, 61)
    for each in copies:
        assert await each.get_all() == await each.get_all(fresh=True) == {}


async def test_a_ttl_is_a_number_of_seconds(store: Any) -> None:
    session = store.session("s")
    for nonsense in (0, -1, True, "60", float("nan"), float("inf"), 1e12, [1]):
        with pytest.raises(InvalidValue, match="ttl"):
            await session.set("otp", 1, ttl=nonsense)
        with pytest.raises(InvalidValue, match="ttl"):
            await session.set_many({"otp": 1}, ttl=nonsense)
    assert await session.version() == 0


async def test_a_batch_may_set_deadlines(store: Any) -> None:
    session = store.session("s")
    async with store.batch() as batch:
        batch.on(session).set("otp", 1, ttl=60)
        batch.on(store.user("u")).set("n", 1)
    later(store, 61)
    assert await session.get_all(fresh=True) == {}
    assert await store.user("u").get_all() == {"n": 1}


async def test_a_merge_keeps_clear_of_deadlines(store: Any) -> None:
    session = store.session("s")
    await session.set("n", 1)
    runs = 0

    def change(tx: Transaction) -> None:
        nonlocal runs
        runs += 1
        tx["n"] = tx["n"] + 1
        if runs == 1 and hasattr(session, "it"):
            session.it.set("n", 10, ttl=60)

    async def changed(tx: Transaction) -> None:
        change(tx)
        if runs == 1:
            await session.set("n", 10, ttl=60)

    await session.apply(change if hasattr(session, "it") else changed, merge={"n": lambda *_: 99})
    assert runs == 2
    assert await session.get("n") == 11


async def test_a_record_without_deadlines_pays_nothing(store: Any) -> None:
    session = store.session("s")
    await session.set("n", 1)
    await is_hot(store, session)
    entry = tiers(store).hot.entries["session:s"]
    assert entry.expires == NEVER
    assert b"#timed" not in entry.fields
    assert core(session)._context.peek("n") == 1


async def test_encrypted_and_typed_fields_have_deadlines_too(opener: Any) -> None:
    keys = KeyRing({"k": b"k" * 32})
    store = await opener(encryption=Encryption(keys=keys, fields=("otp", "items")))
    session = store.session("s", schema=Login)
    await session.set("otp", "4711", ttl=60)
    await session.set("items", [1], ttl=60)
    await session.append_to("items", 2)
    async with session.transaction() as tx:
        tx["items"].append(3)
    await session.fork("f")
    await store.admin.import_(await store.admin.export("s"), id="i")
    with redis_of(store) as client:
        stored = client.hget(keys_of(store, "s").record, "otp")
    assert field_ttl.marked(stored)
    assert b"4711" not in stored
    copies = [store.session(each, schema=Login) for each in "sfi"]
    for each in copies:
        assert await each.get_all(fresh=True) == {"otp": "4711", "items": [1, 2, 3]}
    later(store, 61)
    for each in copies:
        assert await each.get_all(fresh=True) == await each.get_all() == {}
    await session.append_to("items", 9)
    await session.apply(lambda tx: tx.update(otp="0815"), merge={"otp": lambda base, theirs, mine: mine})
    later(store, 1000)
    assert await session.get_all(fresh=True) == {"otp": "0815", "items": [9]}
