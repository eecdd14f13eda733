"""Who asks for some types of events hears no others, and none of its own is missed (G6)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from below import redis_of, tiers, until
from controls import sabotage

from distributed_state import Event
from distributed_state.warm import consumers, event_channels
from distributed_state.warm.consumers import RESYNC
from distributed_state.warm.event_channels import types_of, types_together
from distributed_state.warm.stream import Head, Position

real = pytest.mark.only(warm="real", api="asyncio")
single = pytest.mark.only(warm="single", api="asyncio")
pytestmark = pytest.mark.timeout(120)
PARTITIONS = 4


def feed(store: Any) -> consumers.Consumers:
    return tiers(store).consumers


def hears_all(store: Any) -> list[int]:
    """The partitions of which this replica hears events of all types."""
    home = tiers(store)
    return [at for at in range(PARTITIONS) if home.link.confirmed(home.keys.partition(at).events_channel)]


async def listening(opener: Any, *types: str, **settings: Any) -> tuple[Any, list[Event]]:
    """A replica, and what it hears. Its partitions have begun."""
    store = await opener(partitions=PARTITIONS, archiver=False, **settings)
    for at in range(20):
        await store.session(f"s{at}").exists()
    heard: list[Event] = []
    store.on(list(types), heard.append)
    await store.ready()
    return store, heard


async def alone(store: Any) -> None:
    """Wait until it hears its types only."""
    home, types = tiers(store), feed(store)._channels.types
    assert types
    channels = [home.keys.partition(at).events_channel + b":" + types.encode() for at in range(PARTITIONS)]
    await until(lambda: not hears_all(store) and all(map(home.link.confirmed, channels)))


def received(store: Any, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is published to it from now on."""
    found: list[bytes] = []
    hear = feed(store)._receive

    def noted(partition: int, payload: bytes, types: Any) -> None:
        found.append(payload)
        hear(partition, payload, types)

    monkeypatch.setattr(feed(store), "_receive", noted)
    return found


async def emitted(store: Any, count: int, *types: str) -> list[int]:
    """Events of these types in turn, over all partitions; the numbers of those of the first."""
    for n in range(count):
        await store.emit(types[n % len(types)], {"n": n}, subject=f"s{n % 20}")
    return list(range(0, count, len(types)))


def numbers(heard: list[Event]) -> list[int]:
    places = [(each.partition, each.sequence) for each in heard]
    for at in range(PARTITIONS):
        own = [sequence for partition, sequence in places if partition == at]
        assert own == sorted(set(own)), "each once and in order"
    return sorted(each.data["n"] for each in heard)


@pytest.mark.only(api="asyncio")
async def test_a_replica_is_sent_its_types_alone(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, heard = await listening(opener, "wanted.one", "family.*")
    await alone(store)
    found = received(store, monkeypatch)
    expected = await emitted(store, 120, "wanted.one", "other.one", "wanted.two")
    await store.emit("family.member", {"n": 1000}, subject="s")
    await until(lambda: len(heard) == len(expected) + 1)
    assert numbers(heard) == [*expected, 1000]
    # Each was published to it, and nothing else; a look at positions may have read one from the stream before it came.
    assert len(found) == len(heard)
    assert feed(store).resyncs == 0


@real
async def test_a_position_passes_what_was_not_sent(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the stream does not reach back that far: that is no loss."""
    monkeypatch.setattr(consumers, "_CHECK", 0.3)
    store, heard = await listening(opener, "wanted", kept_events=100)
    await alone(store)
    other = await opener(partitions=PARTITIONS, archiver=False, kept_events=100)
    await emitted(other, 1500, "unwanted")
    await other.emit("wanted", {"n": 1}, subject="s")
    await until(lambda: bool(heard))
    with redis_of(store) as client:
        ends = [int(client.hget(tiers(store).keys.partition(at).meta, "event")) for at in range(PARTITIONS)]
    await until(lambda: feed(store).reached == sum(ends))
    assert [each.type for each in heard] == ["wanted"]


@single
@pytest.mark.parametrize("broken", [False, True])
async def test_a_missed_message_is_noticed_by_the_next_one_of_its_types(
    opener: Any, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """The control: if the last one before is not told, whoever missed it does not know."""
    monkeypatch.setattr(consumers, "_CHECK", 60.0)
    kept, lost = "return types_of .. '@' .. number", "return types_of .. '@' .. before"
    with sabotage("emit", kept, lost if broken else kept):
        store, heard = await listening(opener, "wanted")
        await alone(store)
        hear = feed(store)._receive
        monkeypatch.setattr(feed(store), "_receive", lambda *_: None)
        await emitted(store, 3, "wanted", "unwanted")
        await asyncio.sleep(0.3)
        monkeypatch.setattr(feed(store), "_receive", hear)
        for n in range(20):
            await store.emit("wanted", {"n": 10 + n}, subject=f"s{n}")
        await until(lambda: len(heard) >= 20)
        await asyncio.sleep(0.2)
        missed = {0, 2} - {each.data["n"] for each in heard}
        assert bool(missed) == broken


@single
async def test_handlers_that_come_and_go_miss_nothing(opener: Any) -> None:
    store, wanted = await listening(opener, "wanted")
    writer = await opener(partitions=PARTITIONS, archiver=False)
    done = asyncio.Event()
    count = 0

    async def write() -> None:
        nonlocal count
        while not done.is_set():
            await emitted(writer, 10, "wanted", "unwanted")
            count += 5

    writing = asyncio.create_task(write())
    for types in (["second"], ["family.*"], ["*"], ["second", "third"]) * 3:
        handled: list[Event] = []
        store.on([*types, "marked"], handled.append)
        await store.ready()
        await writer.emit("marked", {"n": -1}, subject="s")
        await until(lambda handled=handled: any(each.type == "marked" for each in handled))
        await store.off(handled.append)
    done.set()
    await writing
    await until(lambda: len(wanted) >= count)
    places = {(each.partition, each.sequence) for each in wanted}
    assert len(wanted) == len(places) == count
    assert feed(store).resyncs == 0


@single
async def test_where_the_lists_are_full_all_is_heard(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_channels, "_MOST", 2)
    replicas = []
    for name in ("a", "b"):
        replicas.append(await listening(opener, name))
        await alone(replicas[-1][0])
    replicas.append(await listening(opener, "c"))
    await until(lambda: len(hears_all(replicas[2][0])) == PARTITIONS)
    expected = await emitted(replicas[0][0], 60, "c", "a", "b")
    for (_, heard), first in zip(replicas, (1, 2, 0), strict=True):
        await until(lambda heard=heard: len(heard) == 20)
        assert numbers(heard) == [each + first for each in expected]
    assert len(hears_all(replicas[2][0])) == PARTITIONS
    with redis_of(replicas[0][0]) as client:
        kept = client.hget(tiers(replicas[0][0]).keys.partition(0).meta, "interests").decode()
    assert [each.partition("@")[0] for each in kept.split()] == ["a", "b"]
    await replicas[1][0].close()
    monkeypatch.setattr(event_channels, "_FULL_FOR", 0.0)
    feed(replicas[2][0])._channels._again = 0.0
    feed(replicas[2][0]).stir(range(PARTITIONS))
    await alone(replicas[2][0])


@pytest.mark.wide
@real
async def test_a_redis_that_was_emptied_knows_no_types_until_it_is_told(opener: Any) -> None:
    store, heard = await listening(opener, "wanted")
    await alone(store)
    with redis_of(store) as client:
        client.flushall()
    other = await opener(partitions=PARTITIONS, archiver=False)
    await emitted(other, 40, "wanted", "unwanted")
    await until(lambda: {each.data["n"] for each in heard if each.type != RESYNC} >= set(range(0, 40, 2)), 30)
    await alone(store)
    before = len(heard)
    await emitted(other, 40, "wanted", "unwanted")
    await until(lambda: len(heard) == before + 20)


def test_types_are_never_fewer_than_what_was_asked_for() -> None:
    assert types_of(["turn.ended", "conversation.*"]) == {"turn.ended", "conversation.*"}
    assert types_of(["turn.end*", "tool.*.done"]) == {"turn.*", "tool.*"}
    assert types_of(["t*", "turn.ended"]) is None
    assert types_of(["*"]) is None
    assert types_together([frozenset({"a"}), frozenset({"b"})]) == {"a", "b"}
    assert types_together([frozenset({"a"}), None]) is None
    assert types_together([]) == frozenset()


def test_a_position_goes_on_only_where_nothing_was_missed() -> None:
    head = Head("1-a", 20, 15, "", "a@9 b,c.*@17 ")
    assert head.passed(Position("1-a", 9), "a") == Position("1-a", 20)
    assert head.passed(Position("1-a", 8), "a") == Position("1-a", 8)
    assert head.passed(Position("1-a", 16), "b,c.*") == Position("1-a", 16)
    assert head.passed(Position("1-a", 21), "a") == Position("1-a", 21), "a stream that lost its end"
    assert head.passed(Position("2-b", 10), "a") == Position("2-b", 10)
    assert head.passed(Position("1-a", 10), "unknown") == Position("1-a", 10)
    assert Head("2-b", 20, 0, "1-a@12", "a@9 ").passed(Position("1-a", 10), "a") == Position("2-b", 20)
