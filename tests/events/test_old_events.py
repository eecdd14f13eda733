"""What leaves the event stream: what is too old, and what is about somebody who is forgotten."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from below import everything_in_redis, keys_of, redis_of, tiers, until
from controls import sabotage
from reaping import Sweeps, quiet, run, score
from sync_api import core

from distributed_state.warm.consumers import RESYNC


async def kept(store: Any, partitions: int = 8) -> dict[int, tuple[list[int], int, int]]:
    """For each partition that has had events: their offsets, the last one's and the floor."""
    keys = [core(store)._lifecycle.context.keys.partition(each) for each in range(partitions)]
    heads = await run(store, tiers(store).stream.heads(keys))
    with redis_of(store) as client:
        found = {each.partition: [int(id.split(b"-")[0]) for id, _ in client.xrange(each.events)] for each in keys}
    return {at: (found[at], head.offset, head.floor) for at, head in enumerate(heads) if head.offset}


@pytest.mark.wide
async def test_old_events_leave_the_stream_and_stay_in_sql(opener: Any) -> None:
    store = await quiet(opener, events_for=1.0, partitions=1)
    sweeps = Sweeps(store)
    for number in range(10):
        await store.emit("old", {"n": number})
    await sweeps()
    assert await kept(store, 1) == {0: (list(range(1, 11)), 10, 0)}
    await asyncio.sleep(1.05)
    for number in range(3):
        await store.emit("new", {"n": number})
    await sweeps()
    assert await kept(store, 1) == {0: ([11, 12, 13], 13, 10)}
    async with store.events(since="oldest") as events:
        assert [(await events.next(2)).data["n"] for _ in range(3)] == [0, 1, 2]
    assert len(await store.admin.audit(type="old")) == 10
    await asyncio.sleep(1.05)
    await sweeps()
    assert await kept(store, 1) == {0: ([], 13, 13)}
    await store.emit("new", {"n": 3})
    assert await kept(store, 1) == {0: ([14], 14, 13)}


async def test_much_that_is_old_goes_in_bounded_steps(opener: Any) -> None:
    store = await quiet(opener, events_for=0.01, partitions=1)
    await store.emit("first")
    with redis_of(store) as client:
        keys = core(store)._lifecycle.context.keys.partition(0)
        for number in range(2, 2502):
            client.xadd(keys.events, {"h": f"a.{number}.0\nt\n\n5 0\n0\n", "d": "{}"}, id=f"{number}-0")
        client.hset(keys.meta, "event", 2501)
    reaper = Sweeps(store).reaper
    await asyncio.sleep(0.02)
    floors = []
    for more in (True, True, False):
        assert await run(store, reaper.sweep([0])) is more
        floors.append((await kept(store, 1))[0][2])
    assert floors == [1000, 2000, 2501]


async def test_the_floor_never_sinks(opener: Any) -> None:
    """What is kept by count and what is kept by age are two bounds, and the stricter one counts."""
    store = await quiet(opener, events_for=0.05, kept_events=100, partitions=1)
    for _ in range(110):
        await store.emit("old")
    await asyncio.sleep(0.06)
    await Sweeps(store)()
    assert (await kept(store, 1))[0][2] == 110

    async def on() -> int:
        for _ in range(64):
            await store.emit("new")
        await store.session("s").switch()
        for _ in range(20):
            await store.session("s").switch()
        return int((await kept(store, 1))[0][2])

    assert await on() == 110
    guard = "if floor > tonumber(call('HGET', meta, 'event_floor') or '0') then "
    with sabotage("emit", guard, "if true then "), sabotage("commit", guard, "if true then "):
        await store.emit("old")
        await asyncio.sleep(0.06)
        await Sweeps(store)()
        pruned = (await kept(store, 1))[0][2]
        assert await on() < pruned


async def pruned(store: Any, *gone: bytes) -> tuple[list[int], int]:
    """Which of six old events and six new ones, some of which were taken out, are kept; and the floor."""
    for _ in range(12):
        await store.emit("t")
    with redis_of(store) as client:
        stream = core(store)._lifecycle.context.keys.partition(0).events
        events = client.xrange(stream)
        client.delete(stream)
        for number, (id, event) in enumerate(events):
            lines = event[b"h"].split(b"\n")
            lines[3] = b"5 0" if number < 6 else lines[3]  # its time
            client.xadd(stream, event | {b"h": b"\n".join(lines)}, id=id)
        client.xdel(stream, *gone)
    await Sweeps(store)()
    offsets, _, floor = (await kept(store, 1))[0]
    return offsets, floor


async def test_events_that_were_taken_out_of_the_middle_do_not_mislead(opener: Any) -> None:
    store = await quiet(opener, events_for=60.0, partitions=1)
    assert await pruned(store, b"5-0", b"6-0", b"7-0") == ([8, 9, 10, 11, 12], 4)


async def test_events_that_were_taken_out_of_the_end_do_not_mislead(opener: Any) -> None:
    store = await quiet(opener, events_for=60.0, partitions=1)
    assert await pruned(store, b"9-0", b"10-0", b"11-0", b"12-0") == ([7, 8], 6)


async def test_new_events_would_go_with_those_that_were_taken_out(opener: Any) -> None:
    """The negative control: who does not look back takes what is not there for old."""
    store = await quiet(opener, events_for=60.0, partitions=1)
    with sabotage("prune", "'XREVRANGE', events, format('%d', middle)", "'XREVRANGE', events, '0'"):
        offsets, _ = await pruned(store, b"8-0", b"9-0", b"10-0", b"11-0", b"12-0")
    assert offsets != [7]


@pytest.mark.replicas
async def test_a_replica_that_was_away_longer_is_told_once_to_resync(opener: Any) -> None:
    store = await quiet(opener, events_for=0.2)
    sweeps = Sweeps(store)
    async with store.events("t") as events:
        for number in range(20):
            await store.emit("t", subject=f"s{number}")
        for _ in range(20):
            assert (await events.next(5)).type == "t"
        position = events.position
        near = position
    for number in range(20):
        await store.emit("t", subject=f"s{number}")
    await asyncio.sleep(0.25)
    await sweeps()
    away = await quiet(opener, events_for=0.2)
    async with away.events("t", since=position) as events:
        first = await events.next(5)
        assert first.type == RESYNC
        assert first.data["reason"] == "trimmed"
        assert await events.next(0.3) is None
        await store.emit("t", {"n": 1}, subject="s1")
        assert (await events.next(5)).data == {"n": 1}
        near = events.position
    await store.emit("t", {"n": 2}, subject="s1")
    async with away.events("t", since=near) as events:
        assert (await events.next(5)).data == {"n": 2}, "who was not away that long misses nothing"


# Forgetting


async def test_nothing_of_who_is_forgotten_is_left_in_the_stream(opener: Any) -> None:
    """But for the last word that the conversation is deleted, which replicas must hear; readers step over the holes."""
    store = await quiet(opener, partitions=2)
    session = store.session("s-of-ann", user="ann", idle=60)
    async with store.events() as events:
        await session.set("a", 1)
        await session.write(phase="secret-phase")
        await session.checkpoint("secret-label")
        await store.emit("mail", {"to": "secret-mail"}, subject=session)
        await store.emit("mail", {"to": "secret-user"}, subject=store.user("ann"))
        await store.user("ann").set("a", 1)
        await store.delete("s-of-ann")
        await session.create({"a": 2})
        for number in range(300):
            await store.emit("other", {"n": number}, subject=f"bob{number}")
        await session.fork("fork-of-ann")
        assert score(store, "s-of-ann") is not None
        assert await store.forget("ann") == 3
        await store.emit("other", {"n": 300}, subject="s-of-ann, as others may call something")
        assert score(store, "s-of-ann") is None
        with redis_of(store) as client:
            prefix = f"{core(store).settings.namespace}:"
            blob = everything_in_redis(client, prefix)
            assert b"secret" not in blob
            keys = [keys_of(store, id) for id in ("s-of-ann", "fork-of-ann")]
            left = {
                each.text: [row[b"h"].split(b"\n")[1] for _, row in client.xrange(each.event_keys[0])
                            if row[b"h"].split(b"\n")[2] == each.text]
                for each in keys
            }  # fmt: skip
        assert left == {each.text: [b"conversation.deleted"] for each in keys}
        received = []
        while event := await events.next(0.5):
            received.append(event)
        assert not any(event.type == RESYNC for event in received)
        assert [event.data["n"] for event in received if event.type == "other"].count(300) == 1
    async with store.events(since="oldest") as events:
        late = []
        while event := await events.next(0.5):
            late.append(event)
    assert sorted(event.data["n"] for event in late if event.type == "other") == list(range(301))
    assert {event.type for event in late} == {"other", "conversation.deleted"}


async def test_a_copy_that_is_imported_has_no_lifetime(opener: Any) -> None:
    """It would end at once, if it was kept for longer than that."""
    store = await quiet(opener)
    session = store.session("s", idle=60, lifetime=60)
    await session.set("a", 1)
    await session.set_lifetime(idle=0.01)
    lines = await store.admin.export("s")
    assert any("#lifetime" in line for line in lines)
    assert await store.admin.import_(lines, id="copy") == "copy"
    assert await store.session("copy").get_all() == {"a": 1}
    assert (await store.session("copy").lifetime()).ends is None
    assert [change.kind for change in await store.session("copy").history()] == ["set", "lifetime"]

    async def swept() -> int:
        return await sweeps()

    sweeps = Sweeps(store)
    await until(swept)
    assert await store.session("copy").exists(fresh=True)
