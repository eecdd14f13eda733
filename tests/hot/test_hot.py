"""The hot tier: no I/O on a hit, never older than `max_staleness`, never back in time (G10)."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import time
import tracemalloc
from typing import Any

import pytest
from below import deafened, keys_of, own_server, redis_of, tiers, until
from counting import asked
from proxy import Proxy

from distributed_state import StateError, WarmUnavailable
from distributed_state.hot.cache import Hot
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.tiers import changes
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.codec import Codec
from distributed_state.values.levels import Freshness
from distributed_state.warm import link
from distributed_state.warm.scripts import COMMIT

real = pytest.mark.only(warm="real")
single = pytest.mark.only(warm="single")
LINK = b"SSUBSCRIBE"  # sent on the link's connection and on no other


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def warmed(session: Any, store: Any) -> None:
    """Read until hot answers."""
    hot = tiers(store).hot

    async def hit() -> bool:
        before = hot.hits
        await session.get("n")
        return hot.hits > before

    await until(hit)


# Hits


@real
async def test_a_hit_asks_nobody(opener: Any) -> None:
    store = await opener(archiver=False)
    session = store.session("s", user="u")
    await session.write(set={"n": 1, "d": {"x": [1]}}, append=[message("hi")], phase="busy")
    await warmed(session, store)
    with asked(store) as seen:
        for _ in range(50):
            assert await session.get("n") == 1
            assert await session.get("missing", "default") == "default"
            assert await session.has("d")
            assert await session.get_all() == {"n": 1, "d": {"x": [1]}}
            assert await session.version() == 1
            assert await session.exists()
            assert await session.phase() == "busy"
            assert [each.content for each in await session.messages(last=5)] == ["hi"]
            assert [each.content for each in await session.messages()] == ["hi"]
            assert await store.get_many([session, store.session("s")]) == [{"n": 1, "d": {"x": [1]}}] * 2
    assert seen.sent == []


@real
async def test_that_a_record_does_not_exist_is_known_without_asking_too(opener: Any) -> None:
    store, other = await opener(archiver=False), await opener(archiver=False)
    session = store.session("s")
    await warmed(session, store)
    with asked(store) as seen:
        assert await session.get("n") is None
        assert not await session.exists()
    assert seen.sent == []
    await other.session("s").set("n", 1)
    await until(lambda: tiers(store).hot.entries["session:s"].version == 1)
    with asked(store) as seen:
        assert await session.get("n") == 1
    assert seen.sent == []


@real
async def test_reads_of_ones_own_writes_ask_nobody(opener: Any) -> None:
    store = await opener(archiver=False)
    session = store.session("s")
    await session.set("n", 0)
    await warmed(session, store)
    with asked(store) as seen:
        for number in range(1, 20):
            await session.increment("n")
            assert await session.get("n") == number
    assert len(seen.sent) == 19
    assert seen.publishes() == [], "nobody else listens"


@pytest.mark.parametrize("settings", [{"max_staleness": 0}, {"hot_entries": 0}, {"hot_bytes": 0}])
@real
async def test_hot_can_be_switched_off(opener: Any, settings: dict[str, Any]) -> None:
    store = await opener(archiver=False, **settings)
    session = store.session("s")
    await session.set("n", 1)
    await session.get("n")  # the server is taught the script
    with asked(store) as seen:
        for _ in range(5):
            assert await session.get("n") == 1
    assert len(seen.sent) == 5
    assert not any("SUBSCRIBE" in each for each in seen.sent)


async def test_what_a_read_returned_is_the_callers(store: Any) -> None:
    """Whatever is done to it, the next read is as before."""
    session = store.session("s")
    value = {"list": [1, {"deep": [2]}], "text": "x"}
    await session.write(set={"n": value}, append=[{"role": "user", "content": [{"a": 1}], "metadata": {"m": [1]}}])
    await warmed(session, store)
    for fresh in (False, False, True):
        found = await session.get("n", fresh=fresh)
        found["list"][1]["deep"].append(3)
        found["new"] = 1
        everything = await session.get_all(fresh=fresh)
        everything["n"]["list"].clear()
        everything["other"] = 1
        [one] = await session.messages(fresh=fresh)
        one.content[0]["a"] = 2
        one.metadata["m"].append(2)
        (await store.get_many([session]))[0]["n"].clear()
        value["list"].append("changed after it was set")
    assert await session.get("n") == {"list": [1, {"deep": [2]}], "text": "x"}
    assert await session.get_all() == {"n": {"list": [1, {"deep": [2]}], "text": "x"}}
    [one] = await session.messages()
    assert one.to_dict() == {"role": "user", "content": [{"a": 1}], "metadata": {"m": [1]}}
    assert await session.version(fresh=True) == 1


# Changes arrive


async def change_anything(session: Any, dice: random.Random) -> None:
    key, number = f"k{dice.randrange(4)}", dice.randrange(1000)
    match dice.randrange(10):
        case 0:
            await session.delete(key)
        case 1:
            await session.clear(messages=dice.random() < 0.5)
        case 2:
            await session.increment(f"i{dice.randrange(2)}", number)
        case 3:
            await session.append(message(str(number)), message("two"))
        case 4:
            await session.append_to("list", number)
        case 5:
            await session.update("object", {key: number})
        case 6:
            await session.write(set={key: [number]}, append=[message("w")], phase=str(number), increment={"i0": 1})
        case 7:
            await session.set(key, "x" * dice.choice([10, 6000]))  # larger than what is published
        case 8:
            await session.rollback(version=dice.randrange(1, await session.version(fresh=True) + 1))
        case _:
            await session.set(key, number)


async def everything(session: Any, fresh: bool) -> Any:
    texts = [each.content for each in await session.messages(last=10, fresh=fresh)]
    return await session.version(), await session.get_all(), texts, await session.phase()


async def test_hot_is_what_the_server_has_after_any_changes_of_ones_own(store: Any) -> None:
    dice, session = random.Random(3), store.session("s")
    await session.set("n", 0)
    await warmed(session, store)
    for _ in range(60):
        await change_anything(session, dice)
        hot = await everything(session, fresh=False)
        tiers(store).hot.forget("session:s")
        assert hot == await everything(session, fresh=True)


@pytest.mark.replicas
async def test_another_replica_hears_every_change(opener: Any) -> None:
    store, other = await opener(), await opener()
    dice, session, theirs = random.Random(4), store.session("s"), other.session("s")
    await session.set("n", 0)
    await warmed(theirs, other)
    for _ in range(60):
        await change_anything(session, dice)
        wanted = await everything(session, fresh=True)

        async def received(version: int = wanted[0]) -> bool:
            return bool(await theirs.version() >= version)

        await until(received)
        assert await everything(theirs, fresh=False) == wanted


@pytest.mark.replicas
async def test_a_small_change_arrives_whole_and_a_large_one_is_fetched(opener: Any) -> None:
    store, other = await opener(archiver=False), await opener(archiver=False)
    session, theirs = store.session("s"), other.session("s")
    await session.set("n", 0)
    await warmed(theirs, other)
    entries = tiers(other).hot.entries
    with asked(store) as seen:
        await session.set("n", 1)
        await until(lambda: entries["session:s"].version == 2)
        assert await theirs.get("n") == 1
    assert len(seen.sent) == 1
    assert len(seen.publishes()) == 1
    with asked(store) as seen:
        await session.set("n", "x" * 5000)
        await until(lambda: "session:s" not in entries)
        assert await theirs.get("n") == "x" * 5000
    assert len(seen.sent) == 2


@pytest.mark.replicas
async def test_only_replicas_that_hold_a_record_hear_of_it(opener: Any) -> None:
    store, other = await opener(archiver=False), await opener(archiver=False)
    await warmed(other.session("another"), other)
    await warmed(store.session("s"), store)
    with asked(store) as seen:
        for _ in range(5):
            await store.session("s").increment("n")
    assert seen.publishes() == []


@single
@pytest.mark.replicas
async def test_a_writer_whose_link_is_dead_still_tells_the_others(opener: Any) -> None:
    """It believes that it listens itself, so what the server counts are others: nobody may be left out."""
    with Proxy(opener.url) as proxy:
        store, other = await opener(url=proxy.url, archiver=False), await opener(archiver=False)
        session, theirs = store.session("s"), other.session("s")
        await session.set("n", 0)
        await warmed(session, store)
        await warmed(theirs, other)
        # The server ends the writer's subscription; the writer's side of the connection hears nothing of that.
        assert proxy.mute(LINK) == 1
        with redis_of(other) as client:
            addresses = {f"{host}:{port}" for host, port in proxy.towards_server(LINK)}
            assert client.client_kill_filter(addr=addresses.pop()) == 1
            channel = keys_of(other, "s").channel
            await until(lambda: dict(client.pubsub_shardnumsub(channel))[channel] == 1)
        await session.set("n", 1)

        async def received() -> bool:
            return bool(await theirs.get("n") == 1)

        await until(received, 5)
        await store.close()


@single
@pytest.mark.replicas
async def test_a_writer_whose_former_link_is_half_open_still_tells_the_others(opener: Any, monkeypatch: Any) -> None:
    """The server keeps it for long, so the writer is there twice, and once for what it has come to hear since."""
    monkeypatch.setattr(link, "_SILENCE", 0.5)
    with Proxy(opener.url) as proxy:
        store, other = (
            await opener(url=proxy.url, archiver=False, max_staleness=0.3),
            await opener(archiver=False, max_staleness=1.0),
        )
        await warmed(store.session("before"), store)
        assert proxy.mute(LINK) == 1
        home = tiers(store)
        await until(lambda: home.link.breaks == 1 and home.link.up)
        with redis_of(other) as client:
            channels = client.pubsub_shardchannels(f"{opener.namespace}:*")
            assert keys_of(other, "before").channel in channels, "the server has not noticed"
        session, theirs = store.session("s"), other.session("s")
        await session.set("n", 0)
        await warmed(session, store)
        await warmed(theirs, other)
        assert home.link.confirmed(keys_of(store, "s").channel)
        await session.set("n", 1)
        fresh_from = time.monotonic() + tiers(other).settings.max_staleness

        async def received() -> bool:
            began, found = time.monotonic(), await theirs.get("n")
            assert found == 1 or began <= fresh_from, "hot shows what was overwritten longer ago than agreed"
            return bool(found == 1)

        await until(received)
        await store.close()


@pytest.mark.replicas
async def test_a_write_on_its_way_while_its_channel_is_left_is_told(opener: Any) -> None:
    """It says that its writer hears the record, which is over when it arrives."""
    store, other = await opener(archiver=False), await opener(archiver=False)
    home, channel, theirs = tiers(store), keys_of(store, "s").channel, other.session("s")
    await store.session("s").set("n", 0)
    await warmed(store.session("s"), store)
    await warmed(theirs, other)
    said = home.link.subscribed_as(channel)
    assert said
    home._stop_listening("session:s")
    with redis_of(other) as client:
        await until(lambda: dict(client.pubsub_shardnumsub(channel))[channel] == 1)
    home.link.subscribed_as = lambda _: said  # type: ignore[method-assign]
    await store.session("s").set("n", 1)

    async def received() -> bool:
        return bool(await theirs.get("n") == 1)

    await until(received, 5)


@pytest.mark.replicas
async def test_a_gap_is_noticed(opener: Any) -> None:
    """A message that got lost shows in the next one's version."""
    store, other = await opener(), await opener()
    session, theirs = store.session("s"), other.session("s")
    await session.set("n", 0)
    await warmed(theirs, other)
    lost: list[bytes] = []
    with deafened(tiers(other), lambda channel, payload: lost.append(payload)):
        await session.set_many({"n": 1, "a": 1})
        await until(lambda: lost)
    assert await theirs.get("n") == 0, "as agreed: within max_staleness"
    await session.set("b", 2)

    async def complete() -> bool:
        return bool(await theirs.get_all() == {"n": 1, "a": 1, "b": 2})

    await until(complete)


# Never back in time


async def never_back(opener: Any, rounds: int) -> None:
    """Whatever arrives in whatever order: what a replica has shown, or acknowledged, it never takes back."""
    stores = [await opener() for _ in range(2)]
    dice = random.Random(5)
    for number in range(rounds):
        id, shown = f"s{number}", [0, 0]

        async def reader(me: int, id: str = id, shown: list[int] = shown) -> None:
            session = stores[me].session(id)
            for _ in range(6):
                before = shown[me]
                if dice.random() < 0.5:
                    version = await session.version(fresh=dice.random() < 0.3)
                else:
                    version = await session.get("n", 0)  # which counts the commits
                assert version >= before, f"replica {me} went back from {before} to {version}"
                shown[me] = max(shown[me], version)
                await asyncio.sleep(dice.random() * 0.003)

        async def writer(me: int, id: str = id, shown: list[int] = shown) -> None:
            session = stores[me].session(id)
            for _ in range(4):
                shown[me] = max(shown[me], int(await session.increment("n")))
                if dice.random() < 0.3:
                    tiers(stores[me]).hot.forget(f"session:{id}")
                await asyncio.sleep(dice.random() * 0.003)

        await asyncio.gather(*(role(me) for me in range(2) for role in (reader, writer, reader)))


@pytest.mark.replicas
async def test_a_replica_never_goes_back_in_time(opener: Any) -> None:
    await never_back(opener, 15)


async def a_late_answer(opener: Any) -> None:
    """An answer that left the server before a change arrives after it was heard of."""
    with Proxy(opener.url) as proxy:
        store, other = await opener(url=proxy.url, archiver=False), await opener(archiver=False)
        session, theirs = store.session("s"), other.session("s")
        await theirs.set("n", 1)
        await warmed(session, store)
        proxy.lag(b"EVALSHA", 0.3)
        late = asyncio.ensure_future(session.get("n", fresh=True))
        await until(lambda: tiers(store).hot._flights)
        await asyncio.sleep(0.05)  # the server has answered, the answer is on its way
        await theirs.set("n", 2)
        await until(lambda: tiers(store).hot.entries["session:s"].version == 2)
        assert await session.get("n") == 2
        assert await late == 2, "it was shown the newer one already"
        assert await session.get("n") == 2
        proxy.lag(b"", 0)
        await store.close()


@single
@pytest.mark.replicas
async def test_a_late_answer_does_not_bring_back_what_was_overtaken(opener: Any) -> None:
    await a_late_answer(opener)


@single
@pytest.mark.replicas
@pytest.mark.only(api="asyncio")
async def test_without_the_floor_of_a_flight_a_late_answer_brings_back_the_past(opener: Any, monkeypatch: Any) -> None:
    apply = Hot.apply

    def deaf(self: Hot, *change: Any) -> None:
        flights, self._flights = self._flights, {}
        apply(self, *change)
        self._flights = flights

    monkeypatch.setattr(Hot, "apply", deaf)
    with pytest.raises(AssertionError):
        await a_late_answer(opener)


@single
@pytest.mark.replicas
async def test_a_record_that_made_room_during_a_read_is_not_kept_unheard(opener: Any) -> None:
    """With its place, its channel was given up: what is read then may only be returned."""
    with Proxy(opener.url) as proxy:
        store, other = await opener(url=proxy.url, archiver=False, hot_entries=1), await opener(archiver=False)
        session, theirs = store.session("s"), other.session("s")
        await theirs.set("n", 1)
        await warmed(session, store)
        proxy.lag(b"EVALSHA", 0.3)
        late = asyncio.ensure_future(session.get("n", fresh=True))
        await until(lambda: tiers(store).hot._flights)
        hot = tiers(store).hot
        hot.entries["session:s"].used = False
        for each in hot._put(
            "session:other", CachedRecord(Codec("", ""), "e", 1, {}, {})
        ):  # as another read that landed now would
            hot._evicted(each)
        assert "session:s" not in hot.entries
        assert await late == 1
        proxy.lag(b"", 0)
        await theirs.set("n", 2)
        for _ in range(20):
            assert await session.get("n") == 2
        await store.close()


# A write whose outcome is not known


@single
async def test_after_a_write_without_an_answer_hot_does_not_answer_from_before_it(opener: Any) -> None:
    with Proxy(opener.url) as proxy:
        store, other = await opener(url=proxy.url, archiver=False, retry_for=0), await opener(archiver=False)
        session = store.session("s")
        await session.set("n", 1)
        await warmed(session, store)
        loss = proxy.lose(COMMIT.sha)
        task = asyncio.ensure_future(session.set("n", 2))
        await until(loss.happened.is_set)
        loss.go.set()
        with pytest.raises(WarmUnavailable):
            await task
        assert await other.session("s").get("n", fresh=True) == 2
        assert await session.get("n") == 2
        await store.close()


@pytest.mark.only(api="asyncio", warm="redis")
async def test_after_a_cancelled_write_hot_does_not_answer_from_before_it(opener: Any) -> None:
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False)
        session = store.session("s")
        await session.set("n", 1)
        await warmed(session, store)
        proxy.lag(b"EVALSHA", 0.2)
        for number, write in enumerate(
            (
                lambda: session.set("n", 2),
                lambda: session.append(message("hi")),
                lambda: session.apply(lambda view: view.__setitem__("n", 4)),
            )
        ):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1 if number < 2 else 0.3):
                    await write()
            with redis_of(store) as client:
                await until(lambda number=number: client.hget(keys_of(store, "s").record, "#v") == b"%d" % (number + 2))
            assert await session.version() == number + 2
        batch = store.batch()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), batch:
                batch.on(session).set("n", 5)
        assert await session.get("n") == 5
        await store.close()


# The link


async def stale_at_most(opener: Any, max_staleness: float) -> None:
    """The link's connection goes silent and stays open; another replica writes."""
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False, max_staleness=max_staleness)
        other = await opener(archiver=False)
        session, theirs = store.session("s"), other.session("s")
        for number in range(1, 3):
            await theirs.set("n", number)
            await warmed(session, store)
            assert proxy.mute(LINK) == 1
            silent = time.monotonic()
            await theirs.set("n", -number)
            stale = 0
            while (asked_at := time.monotonic()) < silent + 2 * max_staleness:
                if await session.get("n") != -number:
                    stale += 1
                    assert asked_at <= silent + max_staleness, f"{asked_at - silent:.3f} s after the link went silent"
                await asyncio.sleep(0.002)
            assert stale, "hot answered for a while, as agreed"
            assert all(each.freshness.good_until < time.monotonic() for each in tiers(store).hot.entries.values())
            proxy.cut(LINK)
        await warmed(session, store)
        await store.close()


@single
@pytest.mark.replicas
async def test_a_silent_link_ends_hot_answers_within_max_staleness(opener: Any) -> None:
    await stale_at_most(opener, 0.3)


@single
@pytest.mark.replicas
@pytest.mark.only(api="asyncio")
async def test_without_probes_a_silent_link_would_be_taken_for_calm(opener: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Freshness, "prove", lambda self, until: setattr(self, "good_until", math.inf))
    with pytest.raises(AssertionError):
        await stale_at_most(opener, 0.3)


@single
@pytest.mark.replicas
async def test_a_silent_link_is_replaced(opener: Any, monkeypatch: Any) -> None:
    """Nobody ends a connection that died without a word; the link does so itself."""
    monkeypatch.setattr(link, "_SILENCE", 0.5)
    with Proxy(opener.url) as proxy:
        store, other = await opener(url=proxy.url, archiver=False, max_staleness=0.3), await opener(archiver=False)
        session = store.session("s")
        await session.set("n", 1)
        await warmed(session, store)
        proxy.mute(LINK)
        await until(lambda: not tiers(store).hot.entries)
        await warmed(session, store)
        await other.session("s").set("n", 2)
        await until(lambda: tiers(store).hot.entries["session:s"].version == 2)
        await store.close()


@single
@pytest.mark.replicas
async def test_a_link_that_lags_behind_does_not_answer(opener: Any) -> None:
    """Messages still arrive, one after another, but old ones: they prove nothing."""
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False, max_staleness=0.3)
        other = await opener(archiver=False)
        session, theirs, written = store.session("s"), other.session("s"), list[tuple[float, int]]()
        await theirs.set("n", 0)
        await warmed(session, store)
        proxy.lag(LINK, 1.0)
        end = time.monotonic() + 1.2
        for number in range(1, 10**6):
            await theirs.set("n", number)
            written.append((time.monotonic(), number))
            began = time.monotonic()
            found = await session.get("n")
            due = max((each for at, each in written if at <= began - 0.3), default=0)
            assert found >= due, f"{found} was overwritten by {due} more than 0.3 s before"
            if began > end:
                break
            await asyncio.sleep(0.01)
        assert all(each.freshness.good_until < time.monotonic() for each in tiers(store).hot.entries.values())
        proxy.lag(b"", 0)
        await store.close()


@single
@pytest.mark.replicas
async def test_a_killed_link_empties_hot_and_comes_back(opener: Any) -> None:
    with own_server(opener) as server:
        store, other = await opener(url=server.url, archiver=False), await opener(url=server.url, archiver=False)
        session, theirs = store.session("s"), other.session("s")
        with redis_of(store) as client:
            for number in range(3):
                await theirs.set("n", number)
                await warmed(session, store)
                entries = dict(tiers(store).hot.entries)
                assert client.execute_command("CLIENT", "KILL", "TYPE", "pubsub") >= 1
                await theirs.set("n", -number)
                await until(
                    lambda entries=entries: tiers(store).hot.entries.get("session:s") is not entries["session:s"]
                )
                assert await session.get("n") == -number
        await store.close()
        await other.close()


@single
@pytest.mark.replicas
async def test_no_change_is_missed_while_links_are_killed(opener: Any) -> None:
    """Whatever the moment: some time after the last change, every replica shows it without asking."""
    with own_server(opener) as server:
        stores = [await opener(url=server.url, archiver=False) for _ in range(3)]
        dice = random.Random(6)
        with redis_of(stores[0]) as client:
            for number in range(30):
                await asyncio.gather(
                    *(store.session(f"s{each}").get("n") for store in stores for each in range(3)),
                    stores[dice.randrange(3)].session(f"s{dice.randrange(3)}").set("n", number),
                )
                if dice.random() < 0.4:
                    client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
                await asyncio.sleep(dice.random() * 0.01)
            for each in range(3):
                newest = await stores[0].session(f"s{each}").version(fresh=True)
                for store in stores:

                    async def shown(store: Any = store, each: int = each, newest: int = newest) -> bool:
                        return bool(await store.session(f"s{each}").version() == newest)

                    await until(shown)
                    await warmed(store.session(f"s{each}"), store)
                    assert await shown()
        for store in stores:
            await store.close()


@single
async def test_an_emptied_redis_is_noticed_without_any_read(opener: Any) -> None:
    with own_server(opener) as server:
        store = await opener(url=server.url, max_staleness=0.4)
        session = store.session("s")
        await session.set("n", 1)
        await store.admin.archive()
        await warmed(session, store)
        with redis_of(store) as client:
            client.flushall()
        await until(lambda: not tiers(store).hot.entries)
        assert await session.get("n") == 1, "from SQL"
        assert await session.set("n", 2) == 2
        await warmed(session, store)
        await store.close()


async def a_frozen_server(opener: Any) -> None:
    """Hot answers a little longer; then reads raise, until the server is back."""
    with own_server(opener) as server:
        store = await opener(url=server.url, archiver=False, max_staleness=0.3, timeout=1, retry_for=0)
        session = store.session("s")
        await session.set("n", 1)
        await warmed(session, store)
        server.pause()
        try:
            frozen, refused = time.monotonic(), 0
            while refused < 2:
                began = time.monotonic()
                try:
                    assert await session.get("n") == 1
                    assert began <= frozen + 0.3
                    await asyncio.sleep(0.005)
                except WarmUnavailable:
                    refused += 1
            calls = (
                session.get_all(),
                session.exists(),
                session.version(),
                session.messages(),
                store.get_many([session]),
                session.set("n", 2),
                store.session("never written").get("n"),
            )
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(each) for each in found} == {WarmUnavailable}, found
        finally:
            server.resume()

        async def back() -> bool:
            try:
                return await session.get("n") in (1, 2)
            except StateError:
                return False

        await until(back)
        await warmed(session, store)
        await store.close()


@pytest.mark.wide
@single
async def test_a_frozen_server_is_never_taken_for_an_empty_one(opener: Any) -> None:
    await a_frozen_server(opener)


@pytest.mark.only(api="asyncio", warm="redis")
async def test_a_read_that_takes_silence_for_absence_would_be_noticed(opener: Any, monkeypatch: Any) -> None:
    load = read_path._load

    async def careless(home: Tiers, keys: Any, known: Any) -> CachedRecord:
        try:
            return await load(home, keys, known)
        except WarmUnavailable:
            return CachedRecord(Codec("", ""), "", 0, {}, {})

    monkeypatch.setattr(read_path, "_load", careless)
    with pytest.raises(AssertionError):
        await a_frozen_server(opener)


# Bounds


@real
async def test_hot_is_bounded_by_entries(opener: Any) -> None:
    store = await opener(hot_entries=10)
    home = tiers(store)
    for number in range(16):
        session = store.session(f"s{number}")
        await session.set("n", number)
        await warmed(session, store)
        assert len(home.hot.entries) <= 10
    for number in range(125):
        await store.session(f"once{number}").get("n")
    assert len(home._listening) <= 2 * 10 + 100, "what is read once is not listened to for ever"
    others = 1 + len(home.archiver.mine)  # who gathers, and the journals that it archives
    assert len(home.link._handlers) <= 2 * 10 + 100 + others
    assert home.hot.bytes == sum(entry.size for entry in home.hot.entries.values())


@real
async def test_hot_is_bounded_by_bytes(opener: Any) -> None:
    store = await opener(hot_bytes=100_000)
    hot = tiers(store).hot
    for number in range(30):
        session = store.session(f"s{number}")
        await session.set("n", "x" * 10_000)
        await warmed(session, store)
        assert hot.bytes <= 100_000
        assert hot.bytes == sum(entry.size for entry in hot.entries.values())
    assert 5 <= len(hot.entries) < 10
    for _ in range(20):  # one that grows does not push the sum beyond the bound either
        await session.append(message("y" * 5000))
        assert hot.bytes <= 100_000
    await store.session("huge").set("n", "x" * 200_000)
    for _ in range(5):
        assert len(await store.session("huge").get("n")) == 200_000
    assert hot.bytes <= 100_000


async def filled(store: Any, kind: str) -> int:
    """What the process holds more when hot is full of small values that were read and then overwritten here."""
    hot, made = tiers(store).hot, 0

    async def write(sessions: list[Any]) -> None:
        async with store.batch() as batch:
            for session in sessions:
                if kind == "fields":
                    batch.on(session).set_many({f"field-{number}": "x" * 80 for number in range(10)})
                for _ in range(10 if kind == "messages" else 0):
                    batch.on(session).append(message("x" * 80))

    async def grow() -> None:
        nonlocal made
        sessions = [store.session(f"s{made + number}") for number in range(40)]
        made += len(sessions)
        await write(sessions)

        async def hears() -> bool:
            await store.get_many(sessions)
            return sessions[-1].ref.text in hot.entries

        await until(hears)
        await write(sessions)
        for session in sessions if kind == "fields" else ():
            for number in range(10):
                await session.get(f"field-{number}")

    await grow()
    store.invalidate()
    gc.collect()
    tracemalloc.start()
    try:
        while hot.bytes < 0.95 * store.settings.hot_bytes:
            await grow()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.wide
@pytest.mark.only(api="asyncio", warm="redis")
@pytest.mark.parametrize("kind", ["fields", "messages"])
async def test_hot_takes_as_much_memory_as_it_says(opener: Any, kind: str) -> None:
    store = await opener(archiver=False, hot_bytes=2**20, unarchived_bytes=0)
    found = await filled(store, kind)
    assert 0.6 * 2**20 <= found <= 1.5 * 2**20


@pytest.mark.wide
@pytest.mark.only(api="asyncio", warm="redis")
async def test_without_compact_values_hot_would_take_many_times_what_it_says(opener: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(changes, "_compact", lambda data: data)
    store = await opener(archiver=False, hot_bytes=2**20, unarchived_bytes=0)
    assert await filled(store, "fields") > 3 * 2**20


@real
async def test_what_is_used_stays_and_what_was_read_once_goes(opener: Any) -> None:
    store = await opener(hot_entries=10)
    popular = [store.session(f"popular{number}") for number in range(5)]
    for session in popular:
        await session.set("n", 1)
        await warmed(session, store)
    for number in range(50):
        for session in popular:
            await session.get("n")
        await store.session(f"once{number}").set("n", 1)
        for _ in range(3):
            await store.session(f"once{number}").has("n")
    assert {session.ref.text for session in popular} <= tiers(store).hot.entries.keys()


# Flights


@real
async def test_many_readers_of_one_record_are_one_load(opener: Any) -> None:
    store = await opener(archiver=False)
    session = store.session("s")
    await session.set("n", 1)
    await store.admin.archive()
    with redis_of(store) as client:
        client.delete(keys_of(store, "s").record)
    loads, load, hot = list[float](), tiers(store).cold.load, tiers(store).hot
    misses = hot.misses

    def slow(*given: Any, **options: Any) -> Any:
        loads.append(time.monotonic())
        while hot.misses < misses + 40 and time.monotonic() < loads[0] + 10:
            time.sleep(0.01)
        time.sleep(0.05)  # and they all wait by now
        return load(*given, **options)

    tiers(store).cold.load = slow  # type: ignore[method-assign]
    with asked(store) as seen:
        found = await asyncio.gather(*(store.session("s").get("n") for _ in range(40)))
    assert found == [1] * 40
    assert len(loads) == 1
    assert len([each for each in seen.sent if "EVALSHA" in each]) == 2, "one read, one hydration"


@pytest.mark.only(api="asyncio", warm="redis")
async def test_a_cancelled_leader_does_not_cancel_those_who_joined(opener: Any) -> None:
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False)
        session = store.session("s")
        await session.set("n", 1)
        proxy.lag(b"EVALSHA", 0.2)
        leader = asyncio.create_task(session.get("n"))
        await until(lambda: tiers(store).hot._flights)
        followers = [asyncio.create_task(session.get("n")) for _ in range(5)]
        await asyncio.sleep(0)
        leader.cancel()
        assert await asyncio.gather(*followers) == [1] * 5
        assert leader.cancelled()
        assert not tiers(store).hot._flights
        await store.close()


@real
async def test_a_leader_that_fails_does_not_fail_those_who_joined(opener: Any) -> None:
    store = await opener(archiver=False, max_staleness=0)
    session = store.session("s")
    await session.set("n", 1)
    warm, calls = tiers(store).warm, 0
    read = warm.read

    async def first_fails(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            await tiers(store).port.sleep(0.05)
            raise WarmUnavailable("the leader's own bad luck")
        return await read(*given)

    warm.read = first_fails  # type: ignore[method-assign]
    found = await asyncio.gather(*(store.session("s").get("n") for _ in range(10)), return_exceptions=True)
    assert sorted(map(str, found)) == ["1"] * 9 + ["the leader's own bad luck"]


@single
@pytest.mark.replicas
async def test_a_fresh_read_sees_what_was_acknowledged_before_it(opener: Any) -> None:
    """Also while older reads of the same record are on their way."""
    with Proxy(opener.url) as proxy:
        store, other = await opener(url=proxy.url, archiver=False), await opener(archiver=False)
        session, theirs = store.session("s"), other.session("s")
        await theirs.set("n", 0)
        proxy.lag(b"EVALSHA", 0.05)
        for number in range(1, 8):
            older = [asyncio.ensure_future(session.get("n")) for _ in range(2)]
            await asyncio.sleep(0.02)
            await theirs.set("n", number)
            assert await session.get("n", fresh=True) == number
            await asyncio.gather(*older)
        await store.close()
