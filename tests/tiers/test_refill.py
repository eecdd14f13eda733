"""After a link was cut, hot answers again what it held without being asked for it, and misses no change (G10)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from below import keys_of, own_server, redis_of, tiers, until
from counting import asked
from proxy import Proxy

from distributed_state.hot.cache import Hot
from distributed_state.tiers.refill import Refill
from distributed_state.values.levels import Freshness
from distributed_state.warm.client import Warm
from distributed_state.warm.link import Link
from distributed_state.warm.scripts import READ, UNCHANGED

single = pytest.mark.only(warm="single")
replicas = pytest.mark.replicas
control = pytest.mark.only(api="asyncio")
LINK = b"SSUBSCRIBE"  # sent on the link's connection and on no other


async def used(store: Any, ids: list[str]) -> None:
    """Have these records in hot, and each used there."""
    sessions = [store.session(id) for id in ids]

    async def all_hit() -> bool:
        before = tiers(store).hot.hits
        await store.get_many(sessions)
        return bool(tiers(store).hot.hits - before == len(ids))

    await until(all_hit)


async def written(store: Any, ids: list[str], value: Any) -> None:
    async with store.batch() as batch:
        for id in ids:
            batch.on(store.session(id)).set("n", value)


async def all_back(store: Any, ids: list[str]) -> None:
    """Wait until all of them may be answered from hot, without asking for any."""
    hot = tiers(store).hot
    texts = {f"session:{id}" for id in ids}
    await until(lambda: texts <= hot.entries.keys() and not hot._flights)
    await until(lambda: all(hot.clock() < hot.entries[text].freshness.good_until for text in texts))


def times(seen: Any, script: Any, by: str = "") -> int:
    """How often a script was called; READ names its replica, by which those of others can be left out."""
    return sum(by in each and (script.sha.decode() in each or script.text.decode()[:40] in each) for each in seen.sent)


@asynccontextmanager
async def cut_off(store: Any, proxy: Proxy) -> AsyncIterator[None]:
    """The link is cut, and hears nothing of what happens in this block."""
    silence = proxy.hold(LINK)
    assert proxy.cut(LINK)
    await until(silence.arrived.is_set)
    await until(lambda: not tiers(store).hot.entries)
    yield
    silence.go.set()


# Back in batches


async def all_are_back_after_a_cut(opener: Any) -> None:
    ids = [f"s{number}" for number in range(300)]
    with own_server(opener) as server:
        store = await opener(url=server.url, archiver=False, partitions=2)
        await written(store, ids, "x" * 2000)
        await used(store, ids)
        home = tiers(store)
        hot = home.hot
        before = dict(hot.entries)
        with redis_of(store) as client, asked(store) as seen:
            sent = client.info("stats")["total_net_output_bytes"]
            assert client.execute_command("CLIENT", "KILL", "TYPE", "pubsub") >= 1
            await until(lambda: home.link.breaks)
            await all_back(store, ids)
            answered = client.info("stats")["total_net_output_bytes"] - sent
        # The monitor repeats what it sees: 300 names that are subscribed to, and asked about.
        assert answered < 300 * 1000 / 2, "not one of the values came once more"
        assert times(seen, READ) == 0
        assert 3 <= times(seen, UNCHANGED) <= 60, "in batches"
        assert all(hot.entries[text] is entry for text, entry in before.items())
        with asked(store) as seen:
            assert await store.get_many([store.session(id) for id in ids]) == [{"n": "x" * 2000}] * 300
        assert seen.sent == []
        assert hot.bytes == sum(entry.size for entry in hot.entries.values())
        await store.close()


@single
async def test_after_a_cut_all_records_answer_from_hot_again_without_being_asked_for(opener: Any) -> None:
    await all_are_back_after_a_cut(opener)


@single
@control
async def test_if_each_were_read_that_would_be_noticed(opener: Any, monkeypatch: Any) -> None:
    async def forgetful(self: Warm, groups: Any) -> Any:
        return [[b"other"] * len(versions) for _, versions in groups]

    monkeypatch.setattr(Warm, "unchanged", forgetful)
    with pytest.raises(AssertionError):
        await all_are_back_after_a_cut(opener)


@single
@replicas
async def test_what_changed_meanwhile_is_read_and_nothing_else(opener: Any) -> None:
    ids = [f"s{number}" for number in range(20)]
    with Proxy(opener.url) as proxy:
        store, other = await opener(url=proxy.url, archiver=False), await opener(archiver=False)
        await written(other, ids, 1)
        await used(store, ids)
        with asked(other) as seen:
            async with cut_off(store, proxy):
                await other.session("s3").set("n", 2)
                await other.session("s4").append({"role": "user", "content": "hi"})
                await other.delete("s5")
            await all_back(store, ids)
        assert times(seen, READ, tiers(store).replica) == 3
        with asked(other) as seen:
            assert await store.session("s3").get("n") == 2
            assert [each.content for each in await store.session("s4").messages()] == ["hi"]
            assert not await store.session("s5").exists()
            assert await store.session("s6").get("n") == 1
        assert seen.sent == []
        await store.close()


@pytest.mark.wide
@single
async def test_who_reads_before_that_is_told_in_a_few_bytes_too(opener: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Refill, "add", lambda self, channels: None)
    with own_server(opener) as server, Proxy(server.url) as proxy:
        store = await opener(url=proxy.url, archiver=False)
        await written(store, ["s", "t"], "x" * 50_000)
        await used(store, ["s", "t"])
        hot = tiers(store).hot
        async with cut_off(store, proxy):
            pass
        await until(lambda: all(tiers(store).link.confirmed(keys_of(store, id).channel) for id in ("s", "t")))
        with redis_of(store) as client:
            sent = client.info("stats")["total_net_output_bytes"]
            assert await store.session("s").get("n") == "x" * 50_000
            assert await store.get_many([store.session("t")]) == [{"n": "x" * 50_000}]
            assert client.info("stats")["total_net_output_bytes"] - sent < 50_000
        assert hot.entries.keys() >= {"session:s", "session:t"}, "and it is kept"
        await store.close()


@single
async def test_who_reads_while_it_is_asked_about_waits_for_that_answer(opener: Any) -> None:
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False)
        await written(store, ["s"], 1)
        await used(store, ["s"])
        asking = proxy.hold(UNCHANGED.sha)
        with asked(store) as seen:
            proxy.cut(LINK)
            await until(asking.arrived.is_set)
            misses = tiers(store).hot.misses
            readers = [asyncio.ensure_future(store.session("s").get("n")) for _ in range(5)]
            await until(lambda: tiers(store).hot.misses == misses + 5)
            asking.go.set()
            assert await asyncio.gather(*readers) == [1] * 5
        assert times(seen, READ) == 0
        await store.close()


@single
async def test_what_was_never_used_is_not_brought_back(opener: Any) -> None:
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False)
        await written(store, ["s", "once"], 1)
        await used(store, ["s", "once"])
        hot = tiers(store).hot
        hot.entries["session:once"].used = False
        async with cut_off(store, proxy):
            assert hot.all_aside() == ["session:s"]
            assert hot.bytes == hot.cached("session:s").size
        await all_back(store, ["s"])
        assert "session:once" not in hot.entries
        await store.close()


@single
async def test_a_conversation_that_is_only_used_by_turns_is_brought_back(opener: Any) -> None:
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False)
        session, hot = store.session("s"), tiers(store).hot

        async def known_to_a_turn() -> bool:
            before = hot.hits
            async with session.turn() as turn:
                turn["n"] = 1
            return bool(hot.hits > before)

        await until(known_to_a_turn)
        async with cut_off(store, proxy):
            assert hot.all_aside() == ["session:s"]
        await all_back(store, ["s"])
        await store.close()


@single
async def test_what_left_redis_is_let_go_and_sql_is_not_asked(opener: Any) -> None:
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False)
        await written(store, ["s", "t"], 1)
        await store.admin.archive()
        await used(store, ["s", "t"])
        home = tiers(store)
        with redis_of(store) as client, asked(store) as seen:
            async with cut_off(store, proxy):
                client.delete(keys_of(store, "s").record)
            await all_back(store, ["t"])
            await until(lambda: not home.hot.all_aside())
            assert not client.exists(keys_of(store, "s").hydration), "nor is anything left there for who would"
        assert times(seen, READ) == 0
        assert "session:s" not in home.hot.entries
        assert home.hot.bytes == home.hot.entries["session:t"].size
        assert await store.session("s").get("n") == 1
        await store.close()


@single
async def test_a_server_that_does_not_answer_is_asked_again(opener: Any) -> None:
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False)
        await written(store, ["s"], 1)
        await used(store, ["s"])
        for _ in range(2):
            loss = proxy.lose(UNCHANGED.sha)
            proxy.cut(LINK)
            await until(loss.happened.is_set)
            loss.go.set()
            await all_back(store, ["s"])
        await store.close()


# Nothing is missed


async def a_change_before_its_channel_is_confirmed(opener: Any) -> None:
    """Somebody wants the record brought back too early, and then it changes."""
    with Proxy(opener.url) as proxy:
        store, other = await opener(url=proxy.url, archiver=False), await opener(archiver=False)
        await other.session("s").set("n", 1)
        await used(store, ["s"])
        home = tiers(store)
        async with cut_off(store, proxy):
            home.refill.add([keys_of(store, "s").channel])
            await until(lambda: home.refill._job is None)
            await other.session("s").set("n", 2)
        await all_back(store, ["s"])
        assert await store.session("s").get("n") == 2
        await store.close()


@single
@replicas
async def test_nothing_is_asked_about_before_its_channel_is_confirmed(opener: Any) -> None:
    await a_change_before_its_channel_is_confirmed(opener)


@single
@replicas
@control
async def test_if_it_were_a_change_would_be_missed(opener: Any, monkeypatch: Any) -> None:
    def careless(self: Link, channel: bytes) -> Any:
        return self._partition(self._keys.partition_at(channel)).freshness

    monkeypatch.setattr(Link, "freshness", careless)
    with pytest.raises(AssertionError):
        await a_change_before_its_channel_is_confirmed(opener)


async def a_change_while_the_answer_is_on_its_way(opener: Any) -> None:
    with Proxy(opener.url) as proxy:
        store, other = await opener(url=proxy.url, archiver=False), await opener(archiver=False)
        await other.session("s").set("n", 1)
        await used(store, ["s"])
        hot = tiers(store).hot
        proxy.cut(LINK)
        await until(lambda: "session:s" not in hot.entries)
        await all_back(store, ["s"])  # the server knows the script, and the connection is there
        await used(store, ["s"])
        proxy.lag(UNCHANGED.sha, 0.5)
        proxy.cut(LINK)
        await until(lambda: "session:s" in hot._flights)
        await asyncio.sleep(0.1)  # the server has answered
        await other.session("s").set("n", 2)
        await until(lambda: "session:s" not in hot._flights)
        proxy.lag(b"", 0)
        await all_back(store, ["s"])
        assert await store.session("s").get("n") == 2
        await store.close()


@single
@replicas
async def test_a_change_that_is_heard_while_the_answer_is_on_its_way_wins(opener: Any) -> None:
    await a_change_while_the_answer_is_on_its_way(opener)


@single
@replicas
@control
async def test_without_the_floor_of_the_flight_the_answer_would_win(opener: Any, monkeypatch: Any) -> None:
    apply = Hot.apply

    def deaf(self: Hot, *change: Any) -> None:
        flights, self._flights = self._flights, {}
        apply(self, *change)
        self._flights = flights

    monkeypatch.setattr(Hot, "apply", deaf)
    with pytest.raises(AssertionError):
        await a_change_while_the_answer_is_on_its_way(opener)


async def cut_twice(opener: Any) -> None:
    """What the server said under the subscription that is over is worth nothing."""
    ids = [f"s{number}" for number in range(10)]
    with Proxy(opener.url) as proxy:
        store, other = await opener(url=proxy.url, archiver=False), await opener(archiver=False)
        await written(other, ids, 1)
        await used(store, ids)
        hot = tiers(store).hot
        for number in range(2, 5):
            proxy.lag(b"EVALSHA", 0.3)
            proxy.cut(LINK)
            await until(lambda: hot._flights)
            await asyncio.sleep(0.05)
            async with cut_off(store, proxy):
                await other.session("s7").set("n", number)
                await until(lambda: not hot._flights)
                assert not hot.entries
                proxy.lag(b"", 0)
            await all_back(store, ids)
            assert await store.get_many([store.session(id) for id in ids]) == [
                {"n": number if id == "s7" else 1} for id in ids
            ]
        await store.close()


@single
@replicas
async def test_a_second_cut_in_the_middle_begins_anew(opener: Any) -> None:
    await cut_twice(opener)


@single
@replicas
@control
@pytest.mark.wide
async def test_if_what_was_said_before_the_second_cut_counted_a_change_would_be_missed(
    opener: Any, monkeypatch: Any
) -> None:
    keep = Hot._keep

    def careless(self: Hot, text: str, entry: Any, freshness: Any) -> Any:
        return keep(self, text, entry, freshness or Freshness(0))

    monkeypatch.setattr(Hot, "_keep", careless)
    with pytest.raises(AssertionError):
        await cut_twice(opener)


@single
@replicas
@pytest.mark.parametrize("bring_back", [True, False])
async def test_what_was_erased_is_not_shown_again(opener: Any, bring_back: bool) -> None:
    """Its versions are not used again, so what begins under its name is another one."""
    with Proxy(opener.url) as proxy:
        store, other = await opener(url=proxy.url, archiver=False), await opener(archiver=False)
        await other.session("s").set("n", "erased")
        await used(store, ["s"])
        home = tiers(store)
        home.refill._closed = not bring_back
        async with cut_off(store, proxy):
            assert await other.erase("s")
            await other.session("s").create({"n": "anew"})
        await until(lambda: home.link.confirmed(keys_of(store, "s").channel))
        if bring_back:
            await all_back(store, ["s"])
        assert await store.session("s").get("n") == "anew"
        async with store.session("s").lock():
            assert await store.session("s").get("n") == "anew"
        await store.close()


@single
@replicas
async def test_no_change_is_missed_while_links_are_cut_and_others_write(opener: Any) -> None:
    """After any change, however it falls into a cut: hot comes to show it, and never goes back."""
    ids = [f"s{number}" for number in range(8)]
    with Proxy(opener.url) as proxy:
        store, other = await opener(url=proxy.url, archiver=False), await opener(archiver=False)
        await written(other, ids, 0)
        await used(store, ids)
        shown = dict.fromkeys(ids, 0)
        for number in range(1, 40):
            if number % 3 == 0:
                proxy.cut(LINK)
            await other.session(ids[number % 8]).set("n", number)
            for id in ids:
                value = await store.session(id).get("n")
                assert value >= shown[id], "back in time"
                shown[id] = value
        for id in ids:
            newest = await other.session(id).get("n", fresh=True)

            async def arrived(id: str = id, newest: int = newest) -> bool:
                return bool(await store.session(id).get("n") == newest)

            await until(arrived)
        await store.close()


# Another data id


@single
async def test_an_epoch_that_ends_alone_costs_the_records_of_others_one_question(opener: Any) -> None:
    """Nothing says which entries of a server changed, when one of its partitions begins anew; their channels stay."""
    with own_server(opener) as server:
        store = await opener(url=server.url, partitions=2)
        keys = tiers(store).keys
        ids = [f"s{number}" for number in range(12)]
        await written(store, ids, 1)
        await store.admin.archive()
        await used(store, ids)
        hot = tiers(store).hot
        (node,) = tiers(store).link._nodes.values()
        assert node.channels.prober is not None
        emptied = node.channels.prober.partition  # whose echo shows that it holds nothing
        lost = [id for id in ids if keys_of(store, id).partition == emptied]
        others = [id for id in ids if id not in lost]
        before = dict(hot.entries)
        with redis_of(store) as client, asked(store) as seen:
            client.delete(keys.partition(emptied).meta, *(keys_of(store, id).record for id in lost))
            await until(lambda: all(f"session:{id}" not in hot.entries for id in lost))
            await all_back(store, others)
            await until(lambda: not hot.all_aside())
        assert all(hot.entries[f"session:{id}"] is before[f"session:{id}"] for id in others)
        assert times(seen, UNCHANGED) >= 1
        assert await store.get_many([store.session(id) for id in ids]) == [{"n": 1}] * 12
        await store.close()


@pytest.mark.wide
@single
async def test_after_a_restart_what_came_back_is_brought_back(opener: Any) -> None:
    """Under another epoch nothing is the same, so it is read."""
    with own_server(opener, "--appendonly", "yes", "--appendfsync", "always") as server:
        store = await opener(url=server.url)
        await written(store, ["s", "t"], 1)
        await used(store, ["s", "t"])
        before = tiers(store).hot.entries["session:s"]
        server.kill()
        await until(lambda: not tiers(store).hot.entries)
        server.start()
        await all_back(store, ["s", "t"])
        assert tiers(store).hot.entries["session:s"].epoch != before.epoch
        assert await store.session("s").get("n") == 1
        await store.close()


# Bounds


BOUNDS = pytest.mark.parametrize("bound", ["entries", "bytes"])


async def bounded(opener: Any, bound: str) -> None:
    ids = [f"s{number}" for number in range(20)]
    new = [f"new{number}" for number in range(15)]
    settings = {"hot_entries": 25} if bound == "entries" else {"hot_bytes": 25 * 12_500}
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False, **settings)
        await written(store, ids + new, "x" * 10_000)
        await used(store, ids)
        home = tiers(store)
        hot = home.hot

        def within() -> bool:
            kept = [*hot.entries.values(), *hot._aside.values()]
            assert len(kept) <= store.settings.hot_entries
            assert hot.bytes == sum(entry.size for entry in kept)
            return hot.bytes <= store.settings.hot_bytes

        home.refill._closed = True
        async with cut_off(store, proxy):
            assert within()
            assert len(hot.all_aside()) == 20
        await used(store, new)
        assert within()
        assert {f"session:{id}" for id in new} <= hot.entries.keys(), "whoever reads now needs it more"
        left = hot.all_aside()
        assert 0 < len(left) < 15
        assert left == [f"session:{id}" for id in reversed(ids[-len(left) :])], "the oldest left first"
        home.refill._closed = False
        home.refill.add([keys_of(store, id).channel for id in ids])
        await all_back(store, [*new, *ids[-len(left) :]])
        assert within()
        await store.close()


@pytest.mark.wide
@single
@BOUNDS
async def test_what_is_put_aside_counts_and_makes_room_first(opener: Any, bound: str) -> None:
    await bounded(opener, bound)


@single
@control
@BOUNDS
async def test_if_it_did_not_count_that_would_be_noticed(opener: Any, bound: str, monkeypatch: Any) -> None:
    put = Hot._put

    def careless(self: Hot, text: str, entry: Any) -> Any:
        aside, self._aside = self._aside, {}
        self.bytes -= sum(each.size for each in aside.values())
        try:
            return put(self, text, entry)
        finally:
            self._aside = aside
            self.bytes += sum(each.size for each in aside.values())

    monkeypatch.setattr(Hot, "_put", careless)
    with pytest.raises(AssertionError):
        await bounded(opener, bound)


@single
async def test_a_store_is_closed_while_it_asks(opener: Any) -> None:
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False, timeout=0.5)
        await written(store, ["s"], 1)
        await used(store, ["s"])
        home = tiers(store)
        asking = proxy.hold(UNCHANGED.sha)
        proxy.cut(LINK)
        await until(asking.arrived.is_set)
        await store.close()
        home.refill.add([b"one more"])
        assert not home.hot._flights
        assert "distributed-state-refill" not in {each.name for each in threading.enumerate()}
        asking.go.set()


@pytest.mark.wide
@pytest.mark.only(warm="fake")
async def test_the_embedded_server_cuts_nobody_off(store: Any) -> None:
    """Its link can only be renewed; what is in hot then is asked about as elsewhere."""
    await written(store, ["s"], 1)
    await used(store, ["s"])
    home = tiers(store)
    before = home.hot.entries["session:s"]
    (link,) = home.link._nodes.values()
    home._lost(link.renew())  # as when another data id is met
    home.refill.add([keys_of(store, "s").channel])
    await all_back(store, ["s"])
    assert home.hot.entries["session:s"] is before
