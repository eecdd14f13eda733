"""Many events in one message: one replica passes on what is published, and nothing rests on it (G6)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from below import own_server, redis_of, tiers, until
from controls import sabotage

from distributed_state import Event
from distributed_state.warm import consumers, event_channels
from distributed_state.warm.consumers import RESYNC
from distributed_state.warm.event_channels import EventRelay
from distributed_state.warm.scripts import RELAY

pytestmark = [pytest.mark.only(warm="single", face="asyncio"), pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay is worth it for two listeners and an event."""
    monkeypatch.setattr(event_channels, "_HURRIED", 0.0)
    monkeypatch.setattr(event_channels, "_WORTH", 0.0)


def relay_of(store: Any) -> EventRelay:
    found: EventRelay = tiers(store).consumers._relay
    return found


async def listening(opener: Any, count: int, **settings: Any) -> tuple[list[Any], list[list[Event]]]:
    """Replicas, and what each hears."""
    replicas = [await opener(partitions=4, archiver=False, **settings) for _ in range(count)]
    heard: list[list[Event]] = [[] for _ in replicas]
    for each, mine in zip(replicas, heard, strict=True):
        each.on("*", mine.append)
        await each.ready()
    return replicas, heard


async def relay_among(replicas: list[Any], heard: list[list[Event]]) -> Any:
    """One of them passes on all events; who that is."""
    seen = len(heard[0])
    while not (found := [each for each in replicas if len(relay_of(each)._mine) == 4]):
        await replicas[0].emit("wake", subject="s")
        await asyncio.sleep(0.05)
    link = tiers(found[0]).link
    keys = tiers(found[0]).keys
    await until(lambda: all(link.confirmed(keys.partition(at).relay_channel) for at in range(4)))
    await until(lambda: len({len(each) for each in heard}) == 1 and len(heard[0]) > seen)
    return found[0]


async def test_each_replica_hears_each_event_once_and_in_order_in_few_messages(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_channels, "_GATHERED", 0.2)
    monkeypatch.setattr(event_channels, "_LONGEST_GATHER", 0.2)
    replicas, heard = await listening(opener, 3)
    relay = await relay_among(replicas, heard)
    for each in heard:
        each.clear()
    received: list[bytes] = []
    feed = tiers(next(each for each in replicas if each is not relay)).consumers
    hear = feed._hear
    monkeypatch.setattr(feed, "_hear", lambda at, payload, types: (received.append(payload), hear(at, payload, types)))
    for n in range(300):
        await replicas[n % 3].emit("test.counted", {"n": n}, subject=f"s{n % 20}")
    await until(lambda: all(len(each) == 300 for each in heard))
    assert len(received) < 100
    assert [each.resyncs for each in (tiers(store).consumers for store in replicas)] == [0, 0, 0]
    for each in heard:
        by_partition = defaultdict(list)
        for event in each:
            by_partition[event.partition].append(event.sequence)
        assert all(numbers == sorted(set(numbers)) for numbers in by_partition.values())
        assert sorted(event.data["n"] for event in each) == list(range(300))


async def test_there_is_one_relay_and_who_has_the_right_keeps_it(opener: Any) -> None:
    store = await opener(partitions=1, archiver=False)
    keys = tiers(store).keys.partition(0)

    async def ask(name: str, ttl_ms: int, least: int = 0) -> bytes:
        answer = await tiers(store).port.script(RELAY, [keys.meta, keys.events_channel], [name, ttl_ms, least])
        return bytes(answer[0])

    assert await ask("a", 1000, 5) == b"few"
    assert await ask("a", 1900) == b"ok"
    assert await ask("b", 1900) == b"taken"
    assert await ask("b", 0) == b"taken"
    assert await ask("a", 1900) == b"ok"
    assert await ask("a", 0) == b"ok"
    assert await ask("b", 100) == b"ok"
    await asyncio.sleep(0.15)
    assert await ask("a", 1900) == b"ok", "it ran out"


async def test_a_relay_that_is_needed_no_more_ends(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_channels, "_RELAY_ASK_AGAIN", 0.6)
    replicas, heard = await listening(opener, 2)
    relay = await relay_among(replicas, heard)
    await until(lambda: not relay_of(relay)._mine)
    with redis_of(relay) as client:
        assert not any(client.hexists(tiers(relay).keys.partition(at).meta, "relay") for at in range(4))
    await replicas[0].emit("after", subject="s")
    await until(lambda: all(each[-1].type == "after" for each in heard))


async def test_the_right_is_not_kept_where_its_channel_is_not_heard(opener: Any) -> None:
    """A half-open connection of the relay's may count as a subscriber: then events would reach nobody."""
    replicas, heard = await listening(opener, 2)
    relay = await relay_among(replicas, heard)
    part = relay_of(relay)
    assert await part._ask([0], 1.0, 0) == {0}
    tiers(relay).link.leave(tiers(relay).keys.partition(0).relay_channel)
    assert await part._ask([0], 1.0, 0) == set()
    part._mine.discard(0)
    assert await part._ask([0], 1.0, 0) == {0}, "it was the server's to give"


async def test_a_relay_that_is_late_again_and_again_leaves_it_to_others(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas, heard = await listening(opener, 2)
    relay = await relay_among(replicas, heard)
    part = relay_of(relay)
    monkeypatch.setattr(event_channels, "_LATE", -1.0)
    terms = part._terms
    for n in range(5):
        await replicas[0].emit("test.counted", {"n": n}, subject="s")
        await until(lambda n=n: all(each[-1].data.get("n") == n for each in heard))
    await until(lambda: not part._mine)
    assert part._rests_until > tiers(relay).port.monotonic() + 20
    assert part._terms == terms


@asynccontextmanager
async def right(store: Any, name: str, until_ms: int = 0) -> AsyncIterator[Any]:
    """The right is had by a connection that stands still; `until_ms`: and ends at this time of the server's."""
    keys = tiers(store).keys.partition(0)
    with redis_of(store) as client:
        listener = client.pubsub(ignore_subscribe_messages=True)
        if name != "nobody":
            listener.ssubscribe(keys.relay_channel)
            listener.get_message(timeout=5)
        answer = await tiers(store).port.script(RELAY, [keys.meta, keys.events_channel], [name, 1900, 0])
        assert answer[0] == b"ok"
        if until_ms:
            client.hset(keys.meta, "relay", f"{until_ms} {name}")
        yield client
        listener.close()


async def heard_directly(opener: Any, monkeypatch: pytest.MonkeyPatch, name: str, far: bool = False) -> bool:
    """Whether an event was heard as it was published, though somebody has the right to pass it on."""
    monkeypatch.setattr(event_channels, "_HURRIED", 1e9)  # nobody else
    monkeypatch.setattr(consumers, "_CHECK", 0.5)
    store = await opener(partitions=1, archiver=False)
    async with store.events() as events:
        await store.emit("first", subject="s")
        assert (await events.next(10)).type == "first"
        with redis_of(store) as client:
            later = int(client.time()[0] * 1000) + 3_600_000
        async with right(store, name, later if far else 0):
            before = tiers(store).consumers.replayed
            await store.emit("next", subject="s")
            event = await events.next(10)
            assert event is not None, "whatever became of the relay"
            assert event.type == "next"
            return bool(tiers(store).consumers.replayed == before)


async def test_events_for_a_relay_that_is_gone_are_published_to_all(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await heard_directly(opener, monkeypatch, "nobody")
    with sabotage(
        "emit",
        "relay_channel, asked .. '\\n' .. place .. body) == 0",
        "relay_channel, asked .. '\\n' .. place .. body) < 0",
    ):
        assert not await heard_directly(opener, monkeypatch, "nobody")


async def test_a_right_that_seems_to_last_as_a_clock_was_set_back_is_none(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await heard_directly(opener, monkeypatch, "hangs", far=True)
    with sabotage("emit", "relay = left > 0 and left <= 2000", "relay = left > 0"):
        assert not await heard_directly(opener, monkeypatch, "hangs", far=True)


async def test_a_relay_that_hangs_holds_events_up_until_its_right_has_run_out(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_channels, "_HURRIED", 1e9)
    monkeypatch.setattr(consumers, "_CHECK", 100.0)
    store = await opener(partitions=1, archiver=False)
    async with store.events() as events, right(store, "hangs") as client:
        await store.emit("held", subject="s")
        meta = tiers(store).keys.partition(0).meta

        def over() -> bool:
            seconds, micros = client.time()
            return int(client.hget(meta, "relay").split()[0]) < seconds * 1000 + micros // 1000

        await until(over)
        await store.emit("next", subject="s")
        assert [(await events.next(10)).type for _ in range(2)] == ["held", "next"]


async def the_last_of_a_burst(opener: Any, monkeypatch: pytest.MonkeyPatch) -> Event | None:
    """A relay dies with what it heard and did not pass on; the writer is gone by then. What a listener hears."""
    with own_server(opener) as server:
        opener.url = server.url
        replicas, heard = await listening(opener, 2)
        relay = await relay_among(replicas, heard)
        (other,) = (each for each in replicas if each is not relay)
        writer = await opener(partitions=4, archiver=False)
        took: list[Any] = []

        async def dies() -> None:
            took.extend(relay_of(relay)._pending)
            relay_of(relay)._pending.clear()

        async with other.events("settled", "last") as events:
            await writer.emit("settled", subject="s")
            assert (await events.next(10)).type == "settled"
            monkeypatch.setattr(relay_of(relay), "_flush", dies)
            await writer.emit("last", subject="s")
            await writer.close()
            await until(lambda: took)
            await relay.close()
            return await events.next(2.0)  # type: ignore[no-any-return]


async def test_the_last_event_of_a_burst_is_heard_though_its_relay_died_with_it(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "_CHECK", 0.3)
    event = await the_last_of_a_burst(opener, monkeypatch)
    assert event is not None
    assert event.type == "last"


@pytest.mark.wide
async def test_without_the_comparison_of_positions_it_would_not_be(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(consumers, "_CHECK", 100.0)
    event = await the_last_of_a_burst(opener, monkeypatch)
    assert event is None


async def test_what_is_cut_off_while_a_relay_passes_on_misses_nothing(opener: Any) -> None:
    """Subscriptions of listeners and of relays are cut at any time."""
    with own_server(opener) as server:
        opener.url = server.url
        replicas, heard = await listening(opener, 3)
        await relay_among(replicas, heard)
        for each in heard:
            each.clear()
        with redis_of(replicas[0]) as client:
            for n in range(600):
                await replicas[n % 3].emit("test.counted", {"n": n}, subject=f"s{n % 20}")
                if n % 60 == 30:
                    # On a fast machine those that were cut off before are not there again yet.
                    links = await until(lambda: client.client_list(_type="pubsub"))
                    client.client_kill_filter(_id=links[n // 60 % len(links)]["id"])
        await until(lambda: all(len(each) >= 600 for each in heard), 30)
        for each in heard:
            assert [event for event in each if event.type == RESYNC] == []
            assert sorted(event.data["n"] for event in each) == list(range(600))
