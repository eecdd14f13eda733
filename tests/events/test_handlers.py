"""Handlers that do what they should not, and groups whose members share a process: nobody else's events suffer."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from below import redis_of, tiers, until
from sync_api import core

from distributed_state import AccessDenied, Event, InvalidValue, StateError, WarmUnavailable
from distributed_state.events import consumer

asynchronous = pytest.mark.only(api="asyncio")


# Ending from inside


async def test_a_handler_may_take_itself_off(store: Any) -> None:
    """At once, and what it is at is finished."""
    received: list[Any] = []
    inner = getattr(store, "it", store)

    def once(event: Event) -> None:
        began = time.monotonic()
        inner.off(once)
        received.append((event.data["n"], time.monotonic() - began < 2))

    async def once_awaited(event: Event) -> None:
        began = time.monotonic()
        await store.off(once_awaited)
        await asyncio.sleep(0.01)
        received.append((event.data["n"], time.monotonic() - began < 2))

    store.on("a", once_awaited if inner is store else once)
    for n in range(5):
        await store.emit("a", {"n": n}, subject="s")
    await until(lambda: received)
    await asyncio.sleep(0.05)
    assert received == [(0, True)]
    assert tiers(store).handlings == []


async def test_a_handler_may_close_the_store(opener: Any, caplog: Any) -> None:
    store = await opener(archiver=False)
    inner = getattr(store, "it", store)
    home, seen = tiers(store), []

    def close(event: Event) -> None:
        inner.close()
        seen.append(event)

    async def close_awaited(event: Event) -> None:
        await store.close()
        seen.append(event)

    store.on("a", close_awaited if inner is store else close)
    began = time.monotonic()
    with suppress(StateError):  # it may be closed before the archive has it
        await store.emit("a")
    await until(lambda: seen)
    assert time.monotonic() - began < 4
    assert core(store)._lifecycle.cold is None
    assert not home.link.up
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def test_off_hands_over_nothing_that_is_waiting(store: Any) -> None:
    received: list[int] = []

    def slow(event: Event) -> None:
        time.sleep(0.02)
        received.append(event.data["n"])

    store.on("a", slow)
    await store.ready()
    for n in range(100):
        await store.emit("a", {"n": n}, subject="s")
    await until(lambda: received)
    began = time.monotonic()
    before = len(received)
    await store.off(slow)
    assert time.monotonic() - began < 1
    assert len(received) <= before + 2


# Until it listens


async def test_ready_does_not_return_before_a_handler_listens(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It returned after `timeout`, whether Redis had said where events begin or not."""
    home, received = tiers(store), list[Any]()
    answered, positions = home.port.signal(), home.consumers.positions

    async def late(since: str | None) -> Any:
        await answered.wait()
        return await positions(since)

    monkeypatch.setattr(home.consumers, "positions", late)
    store.on("a", lambda event: received.append(event.data["n"]))
    monkeypatch.setattr(home.warm, "left", lambda: 0.05)
    with pytest.raises(WarmUnavailable, match="does not listen yet"):
        await store.ready()
    monkeypatch.undo()
    answered.set()
    await store.ready()
    await store.emit("a", {"n": 1}, subject="s")
    await until(lambda: received == [1])


# What a handler raises


async def test_a_handler_that_exits_is_logged_and_goes_on(store: Any, caplog: Any) -> None:
    received = []

    @store.on("a")
    def leaving(event: Event) -> None:
        received.append(event.data["n"])
        if event.data["n"] == 1:
            raise SystemExit(3)

    for n in range(3):
        await store.emit("a", {"n": n}, subject="s")
    await until(lambda: received == [0, 1, 2])
    await until(lambda: tiers(store).handlings[0].failed == 1)


async def test_whether_a_handler_hangs_is_asked_while_it_goes_on(store: Any) -> None:
    """Its thread is at its next event by the time that this one has been looked at."""
    store.on("a", lambda event: None)
    await store.ready()
    (handling,) = tiers(store).handlings
    at = (0.0, Event("", "a", "", 0.0, {}, "", 0, "", 0, 0, ""))
    given = iter([at, at])

    class Going(type(handling)):  # type: ignore[misc]
        _at = property(lambda self: next(given, None), lambda self, value: None)

    handling.__class__ = Going
    handling._notice_hanging()


@asynchronous
async def test_what_a_handler_cancelled_itself_does_not_end_it(store: Any, caplog: Any) -> None:
    received = []

    @store.on("a")
    async def cancelling(event: Event) -> None:
        received.append(event.data["n"])
        task = asyncio.create_task(asyncio.sleep(10))
        await asyncio.sleep(0)
        task.cancel()
        await task

    for n in range(3):
        await store.emit("a", {"n": n}, subject="s")
    await until(lambda: received == [0, 1, 2])
    await until(lambda: tiers(store).handlings[0].failed == 3)


# Groups


async def test_two_members_of_a_group_in_one_process_share_its_events(store: Any) -> None:
    received: list[tuple[str, int]] = []
    store.on("a", lambda event: received.append(("one", event.data["n"])), group="g")
    store.on("a", lambda event: received.append(("two", event.data["n"])), group="g")
    await store.ready()
    for n in range(40):
        await store.emit("a", {"n": n}, subject=f"s{n}")
    await until(lambda: len(received) >= 40)
    await asyncio.sleep(0.1)
    assert sorted(n for _, n in received) == list(range(40))


@pytest.mark.only(warm="real")
async def test_a_member_that_was_away_longer_than_its_claims_does_not_go_on_where_it_was(opener: Any) -> None:
    """What another member may have handled meanwhile is not handed over, not even what had arrived already."""
    store = await opener(partitions=2)
    for n in range(6):
        await store.emit("a", {"n": n}, subject=f"s{n}")
    async with store.events("a", group="g", since="oldest") as found:
        await until(lambda: found.waiting == 6)
        group = core(found)._group
        await group._job.stop()  # it stands still, as in a process that is paused
        with redis_of(store) as client:
            keys = tiers(store).keys
            for partition in range(2):
                owner, position = keys.group(partition, "g")
                client.set(owner, "another member")
                client.set(position, str(events_end(store, partition)))
        group._assignment.ends = 0.0
        assert await found.next(0.1) is None


def events_end(store: Any, partition: int) -> str:
    with redis_of(store) as client:
        epoch, offset = client.hmget(tiers(store).keys.partition(partition).meta, "epoch", "event")
    return f"{epoch.decode()} {int(offset or 0)}"


@pytest.mark.wide
@pytest.mark.replicas
async def test_a_member_whose_clock_is_wrong_takes_no_more_than_its_share(opener: Any) -> None:
    one, other = [await opener(partitions=16, archiver=False) for _ in range(2)]
    tiers(one).port.wall = lambda: time.time() + 3600
    for each in (one, other):
        each.on("a", lambda event: None, group="g")
        await each.ready()
    await until(lambda: all(len(core_share(each)) == 8 for each in (one, other)), 20)


def core_share(store: Any) -> list[int]:
    group = tiers(store).handlings[0]._events._group
    return list(group._assignment.mine)


async def hung(opener: Any, monkeypatch: Any, limit: float = 10.0) -> tuple[list[int], list[int]]:
    """One of two members hangs at the first event that it gets; what each was given when all is handled."""
    monkeypatch.setattr(consumer, "_TEAM_SECONDS", 0.6)
    settings = {"handler_timeout": 1.0, "partitions": 8}
    stores, given, over = [await opener(**settings) for _ in range(2)], (list[int](), list[int]()), threading.Event()

    def hangs(event: Any) -> None:
        given[0].append(event.data["n"])
        over.wait(30)

    stores[0].on("a", hangs, group="g")
    stores[1].on("a", lambda event: given[1].append(event.data["n"]), group="g")
    for each in stores:
        await each.ready()
    try:
        await until(
            lambda: all(each._assignment.mine and not each._assignment.excess for each in map(group_of, stores))
        )
        for n in range(40):
            await stores[1].emit("a", {"n": n}, subject=f"subject {n}")
        await until(lambda: given[0])
        await until(lambda: set(given[1]) == set(range(40)), limit)
        over.set()
        await until(lambda: group_of(stores[0])._assignment.mine)
        await until(lambda: not group_of(stores[1])._assignment.excess)
        for n in range(40, 80):
            await stores[1].emit("a", {"n": n}, subject=f"subject {n}")
        await until(lambda: {*given[0], *given[1]} == set(range(80)))
    finally:
        over.set()
    return given


def group_of(store: Any) -> Any:
    return tiers(store).handlings[0]._events._group


@pytest.mark.wide
@pytest.mark.replicas
async def test_a_handler_that_hangs_does_not_stall_its_share_of_a_group(opener: Any, monkeypatch: Any) -> None:
    hanging, other = await hung(opener, monkeypatch)
    assert len(other) == len(set(other)), "the other member got each once"
    assert len([n for n in hanging if n in other]) <= 1, "and of those only what the first one hung at"


@pytest.mark.wide
@pytest.mark.replicas
@pytest.mark.only(api="blocking")
async def test_without_the_limit_a_hanging_handler_stalls_its_share(opener: Any, monkeypatch: Any) -> None:
    """Negative control of the test above."""

    async def never(self: Any) -> None:
        pass

    monkeypatch.setattr(consumer.Group, "_lapse", never)
    with pytest.raises(AssertionError, match=r"set\(given\[1\]\)"):
        await hung(opener, monkeypatch, 3.0)


async def test_a_slow_handler_of_a_group_of_one_still_handles_each_event_once(opener: Any, monkeypatch: Any) -> None:
    """It loses its share with each event, and takes it back behind it."""
    monkeypatch.setattr(consumer, "_TEAM_SECONDS", 0.6)
    store, given, lapsed = await opener(handler_timeout=0.05), list[int](), list[bool]()
    home = tiers(store)

    def slow(event: Any) -> None:
        given.append(event.data["n"])
        group = home.handlings[0]._events._group
        end = time.monotonic() + 5
        while group._assignment.mine and time.monotonic() < end:
            time.sleep(0.01)
        lapsed.append(not group._assignment.mine)

    store.on("a", slow, group="g")
    await store.ready()
    for n in range(3):
        await store.emit("a", {"n": n}, subject="s")
    await until(lambda: len(lapsed) == 3)
    assert (given, lapsed) == ([0, 1, 2], [True] * 3)


# Who may


async def test_a_subject_given_as_text_is_asked_for_as_the_record_that_it_names(opener: Any) -> None:
    """Otherwise whoever may write one conversation could tell of another one that it is deleted."""
    store = await opener(access=lambda request: request.action == "read" or request.id in (None, "mine"))
    await store.emit("conversation.left", subject="session:mine")
    await store.emit("mail.sent", subject="client:tui")
    with pytest.raises(AccessDenied, match="session:theirs"):
        await store.emit("conversation.deleted", subject="session:theirs")


# A resync


async def test_a_position_before_a_resync_leads_to_it_again(opener: Any) -> None:
    """Whoever stops between what was lost and being told of it is told when it goes on."""
    store = await opener(partitions=1, kept_events=64)
    async with store.events("a", since="oldest") as events:
        await store.emit("a", {"n": 0}, subject="s")
        assert (await events.next(5)).data == {"n": 0}
        subscription = core(events)._subscription
        place = subscription.taken()[0]
        subscription.lose({0: (place, place._replace(offset=place.offset + 100))}, "trimmed")
        assert events.position == store_position(place)
        assert (await events.next(5)).type == "resync"
        assert events.position != store_position(place)


def store_position(place: Any) -> str:
    return f"0={place.epoch}@{place.offset}"


# Bad input


async def test_more_bad_input_is_refused_by_name(store: Any) -> None:
    with pytest.raises(InvalidValue, match="since"):
        store.events(since="0=a@" + "9" * 5000)
    with pytest.raises(InvalidValue, match="since"):
        store.events(since="9" * 5000 + "=a@1")
    for types in ([["a"]], [{}], 5):
        with pytest.raises(InvalidValue):
            store.on(types, print)
    for timeout in ("x", float("nan"), True):
        async with store.events() as events:
            with pytest.raises(InvalidValue):
                await events.next(timeout)


@pytest.mark.timeout(20)
async def test_a_pattern_of_many_stars_takes_no_longer(store: Any) -> None:
    async with store.events("*a" * 60 + "*b") as events:
        began = time.monotonic()
        await store.emit("a" * 200)
        assert await events.next(0.05) is None
        assert time.monotonic() - began < 2
