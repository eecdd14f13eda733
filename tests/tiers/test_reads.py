"""Reads: from the nearest tier that knows, in as few round trips as that takes."""

from __future__ import annotations

from typing import Any

import pytest
from below import keys_of, own_server, redis_of, tiers
from counting import Asked, asked

from distributed_state import CorruptState, InvalidValue
from distributed_state.port import Script
from distributed_state.programs.servers import redis_server
from distributed_state.warm.scripts import HYDRATE, READ

real = pytest.mark.only(warm="real")


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def calls(seen: Asked, script: Script) -> int:
    return sum(script.sha.decode() in each for each in seen.sent)


async def evict(store: Any, *ids: str) -> None:
    """Archive, then take records out of Redis and out of hot, as idle ones go in time."""
    await store.admin.archive()
    with redis_of(store) as client:
        for id in ids:
            client.delete(keys_of(store, id).record)
    tiers(store).hot.clear()


async def test_reading_a_record_never_written(store: Any) -> None:
    session = store.session("s")
    assert await session.get("a") is None
    assert await session.get("a", "default") == "default"
    assert not await session.has("a")
    assert await session.get_all() == {}
    assert await session.version() == 0
    assert not await session.exists()
    assert await session.messages() == []
    assert await session.phase() is None
    assert await store.get_many([session, store.user("u")]) == [{}, {}]
    assert await store.get_many([]) == []
    with redis_of(store) as client:
        assert not client.exists(keys_of(store, "s").record), "reading creates nothing"


async def test_none_is_a_value(store: Any) -> None:
    session = store.session("s")
    await session.set_many({"none": None, "false": False, "zero": 0, "empty": ""})
    for fresh in (True, False):
        assert await session.get("none", "default", fresh=fresh) is None
        assert await session.has("none", fresh=fresh)
        assert await session.get("false", "default", fresh=fresh) is False
        assert await session.get("missing", "default", fresh=fresh) == "default"


async def test_scopes_do_not_see_one_another(store: Any) -> None:
    handles = [store.session("x"), store.user("x"), store.app("x"), store.task("x")]
    for number, handle in enumerate(handles):
        await handle.set("n", number)
    assert [await handle.get("n", fresh=True) for handle in handles] == [0, 1, 2, 3]
    assert await store.get_many(handles) == [{"n": number} for number in range(4)]


@pytest.mark.parametrize("tier", ["hot", "warm", "cold"])
async def test_every_read_from_every_tier(store: Any, tier: str) -> None:
    session = store.session("s", user="u")
    fields = {"text": "x", "big": 2**70, "f": 1.0, "list": [], "object": {"a": {}}, "é\0\ud800": "\0\ud800"}
    await session.write(set=fields, append=[message(str(number)) for number in range(50)], phase="busy")
    if tier == "cold":
        await evict(store, "s")
    elif tier == "warm":
        tiers(store).hot.clear()
    else:
        await session.get("text")
    for fresh in (False, True):
        assert await session.get("big", fresh=fresh) == 2**70
        assert type(await session.get("f", fresh=fresh)) is float
        assert await session.get_all(fresh=fresh) == fields
        assert await session.has("list", fresh=fresh)
        assert (await session.version(fresh=fresh), await session.exists(fresh=fresh)) == (1, True)
        assert await session.phase(fresh=fresh) == "busy"
        for last in (0, 1, 32, 33, 49, 50, 51, 10**9, None):
            found = [each.content for each in await session.messages(last=last, fresh=fresh)]
            assert found == [str(number) for number in range(50)][-last if last else (50 if last == 0 else 0) :]
    assert await store.get_many([session]) == [fields]


async def test_many_messages_over_many_commits_come_in_order(store: Any) -> None:
    """Whichever part of them lies in Redis and which in SQL only."""
    session, wanted = store.session("s"), list[str]()
    for number in range(12):
        wanted += [f"{number}.{part}" for part in range(7)]
        await session.append(*(message(text) for text in wanted[-7:]))
        if number % 4 == 1:
            await store.admin.archive()
        if number % 4 == 2:
            await evict(store, "s")
        for last in (3, 7, 40, None):
            found = [each.content for each in await session.messages(last=last)]
            assert found == (wanted if last is None else wanted[-last:])


@pytest.mark.parametrize("last", [-1, 1.0, "1", True])
async def test_a_number_of_messages_that_is_none_is_refused(store: Any, last: Any) -> None:
    with pytest.raises(InvalidValue, match="last is an int"):
        await store.session("s").messages(last=last)


async def test_messages_that_were_cleared_stay_hidden_in_every_tier(store: Any) -> None:
    session = store.session("s")
    await session.append(*(message("old") for _ in range(40)))
    await session.clear(messages=True)
    await session.append(message("new"))
    for _ in range(2):
        assert [each.content for each in await session.messages()] == ["new"]
        assert [each.content for each in await session.messages(last=10, fresh=True)] == ["new"]
        await evict(store, "s")


async def test_get_many_keeps_the_order_and_reads_from_all_tiers(store: Any) -> None:
    sessions = [store.session(f"s{number}") for number in range(12)]
    for number, session in enumerate(sessions[:9]):
        await session.set("n", number)
    await evict(store, "s0", "s1", "s2")
    for session in sessions[6:9]:
        await session.get("n")
    await store.delete("s8")
    handles = [sessions[number] for number in (11, 0, 4, 8, 7, 0, 2, 9, 4)]
    wanted = [{}, {"n": 0}, {"n": 4}, {}, {"n": 7}, {"n": 0}, {"n": 2}, {}, {"n": 4}]
    assert await store.get_many(handles) == wanted
    assert await store.get_many(iter(handles)) == wanted


# Round trips


@real
async def test_a_warm_read_is_one_round_trip_for_fields_and_messages(opener: Any) -> None:
    store = await opener(archiver=False, max_staleness=0)
    session = store.session("s")
    await session.write(set={"a": 1}, append=[message(str(number)) for number in range(20)])
    await session.get("a")  # the server is taught the script
    for read in (
        lambda: session.get("a"),
        lambda: session.get_all(),
        lambda: session.messages(last=20),
        lambda: session.version(),
        lambda: session.get("a", fresh=True),
    ):
        with asked(store) as seen:
            await read()
        assert len(seen.sent) == calls(seen, READ) == 1


@real
async def test_a_cold_read_is_two_round_trips_and_sql(opener: Any) -> None:
    store = await opener(archiver=False)
    session = store.session("s")
    await session.write(set={"a": 1}, append=[message("hi")])
    await evict(store, "s")
    await session.get("a")
    await evict(store, "s")
    with asked(store) as seen:
        assert await session.get("a") == 1
    assert (len(seen.sent), calls(seen, READ), calls(seen, HYDRATE)) == (2, 1, 1)
    with redis_of(store) as client:
        assert 0 < client.pttl(keys_of(store, "s").record) <= 3_600_000


@real
async def test_a_fresh_read_of_what_is_hot_moves_no_fields(opener: Any) -> None:
    """It asks for the version only."""
    store = await opener(archiver=False)
    session = store.session("s")
    await session.set("a", "x" * 100_000)
    hot = tiers(store).hot
    for _ in range(1000):
        await session.get("a")
        if hot.hits:
            break
    with asked(store) as seen:
        assert len(await session.get("a", fresh=True)) == 100_000
    assert calls(seen, READ) == 1
    assert not any(each.startswith("HGETALL") for each in seen.inside)


@real
async def test_many_records_are_one_round_trip(opener: Any) -> None:
    store = await opener(archiver=False, max_staleness=0)
    sessions = [store.session(f"s{number}") for number in range(30)]
    for session in sessions:
        await session.set("n", 1)
    await store.get_many([store.session(f"t{number}") for number in range(30)])  # every server knows the script now
    exchanges, exchange = list[int](), tiers(store).port.exchange

    async def counted(commands: Any) -> Any:
        exchanges.append(len(commands))
        return await exchange(commands)

    tiers(store).port.exchange = counted  # type: ignore[method-assign]
    with asked(store) as seen:
        assert await store.get_many(sessions) == [{"n": 1}] * 30
    assert len(seen.sent) == calls(seen, READ) == 30
    assert exchanges.count(30) == 1


@pytest.mark.only(api="asyncio", warm="redis")
async def test_a_server_that_forgot_the_scripts_is_taught_once(opener: Any) -> None:
    with own_server(opener) as server:
        store = await opener(url=server.url, archiver=False, max_staleness=0)
        sessions = [store.session(f"s{number}") for number in range(30)]
        for session in sessions:
            await session.set("n", 1)
        with redis_of(store) as client:
            client.script_flush()
        with asked(store) as seen:
            assert await store.get_many(sessions) == [{"n": 1}] * 30
        assert sum(each.startswith("EVAL ") for each in seen.sent) == 1
        assert calls(seen, READ) == 59  # all thirty, and those behind the one that was taught
        await store.close()


# Bytes that cannot be read


async def test_corrupt_bytes_are_named_kept_and_may_be_replaced(store: Any) -> None:
    session = store.session("s")
    await session.set_many({"bad": 1, "good": 2})
    keys = keys_of(store, "s")
    with redis_of(store) as client:
        client.hset(keys.record, "bad", b"{broken")
        tiers(store).hot.clear()
        for read in (
            lambda: session.get("bad"),
            lambda: session.get("bad", "default"),
            lambda: session.get_all(),
            lambda: store.get_many([session]),
        ):
            with pytest.raises(CorruptState) as caught:
                await read()
            assert (caught.value.field, caught.value.data) == ("bad", b"{broken")
            assert "bad" in str(caught.value)
        assert await session.get("good") == 2
        assert await session.has("bad")
        for change in (
            lambda: session.update("bad", {"a": 1}),
            lambda: session.append_to("bad", 1),
            lambda: session.increment("bad"),
        ):
            with pytest.raises(CorruptState):
                await change()
        async with session.transaction() as view:
            assert view["good"] == 2
            with pytest.raises(CorruptState):
                view["bad"]
        assert client.hget(keys.record, "bad") == b"{broken", "kept for whoever looks after it"
    await session.set("bad", "new")
    assert await session.get_all(fresh=True) == {"bad": "new", "good": 2}


async def test_a_corrupt_message_is_named(store: Any) -> None:
    session = store.session("s")
    await session.append(message("one"), message("two"))
    with redis_of(store) as client:
        client.hset(keys_of(store, "s").record, "#m1", b"\xff")
    tiers(store).hot.clear()
    one, two = await session.messages()
    assert (one.content, two.number) == ("one", 1)
    for _ in range(2):  # it stays so, whatever of it is asked for
        for look in (lambda: two.content, lambda: two == one, lambda: repr(two), two.to_dict, two.model_dump):
            with pytest.raises(CorruptState, match=r"^session:s: message 1: message: 1 stored bytes") as caught:
                look()
            assert (caught.value.field, caught.value.data) == ("message", b"\xff")
    for read in (session.raw_messages, lambda: session.export_state(messages=True)):
        with pytest.raises(CorruptState, match=r"^session:s: message 1: "):
            await read()
    assert [each["content"] for each in await session.raw_messages(limit=1)] == ["one"]
    await session.set("a", 1)
    assert await session.get("a") == 1


@pytest.mark.parametrize("name", ["#v", "#mn", "#ms", "#segments"])
async def test_corrupt_counts_are_named_too(store: Any, name: str) -> None:
    session = store.session("s")
    await session.append(message("one"))
    with redis_of(store) as client:
        client.hset(keys_of(store, "s").record, name, b"abc")
    tiers(store).hot.clear()
    with pytest.raises(CorruptState, match=name):
        await session.messages(fresh=True)


async def test_a_key_of_another_type_is_reported(store: Any) -> None:
    """Somebody else's key in our place is not an empty record."""
    with redis_of(store) as client:
        client.set(keys_of(store, "s").record, "text")
        with pytest.raises(Exception, match=r"WRONGTYPE|wrong kind") as caught:
            await store.session("s").get("a")
        assert type(caught.value).__module__ == "distributed_state.errors"
        client.delete(keys_of(store, "s").record)


@pytest.mark.only(warm="single")
async def test_reads_keep_working_on_another_server_than_this_one(tmp_path: Any) -> None:
    """A store on a socket file is a store like any other."""
    from distributed_state import StateStore

    path = tmp_path / "redis.sock"
    with (
        redis_server("--unixsocket", str(path)) as server,
        StateStore.open(f"unix://:{server.password}@{path}", archive="memory", namespace="n") as store,
    ):
        store.session("s").set("a", 1)
        assert store.session("s").get("a", fresh=True) == 1


async def test_a_read_that_newer_versions_overtake_is_answered_all_the_same(store: Any, monkeypatch: Any) -> None:
    """However fast others write: in the end what was read is told, though not kept."""
    session, warm = store.session("s"), tiers(store).warm
    await session.set("n", 1)
    load = warm.read

    async def overtaken(*arguments: Any) -> Any:
        answer = await load(*arguments)
        tiers(store).hot.expect(session.ref.text, tiers(store).epoch(keys_of(store, "s").partition), 99)
        return answer

    monkeypatch.setattr(warm, "read", overtaken)
    tiers(store).hot.clear()
    assert await session.get("n") == 1
    assert session.ref.text not in tiers(store).hot.entries
