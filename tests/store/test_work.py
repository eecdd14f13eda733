"""Workers that serve sessions by their handlers. Law: what is posted is served once, whoever dies."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from below import evict, keys_of, later, redis_of, said, tiers, until
from scraping import Scrape
from sync_api import core
from working import answering, answers, due_set, quick, retried, schedule, working

from distributed_state import Backpressure, Conflict, Fenced, InvalidValue, LockTimeout, NotFound, Stopped
from distributed_state.port import shared
from distributed_state.results import StopResult
from distributed_state.store import due_sets, watch, work
from distributed_state.values.schedule import Schedule
from distributed_state.warm.scripts import DUE


async def test_what_is_posted_is_answered_by_the_handler(store: Any) -> None:
    seen: list[Any] = []
    session = store.session("s")
    async with working(store, {"a": answering(seen)}):
        await session.post(said("1"), handler="a")
        await until(lambda: seen == ["1"])
        await session.post(said("2"))
        await session.post(said("3"))
        await until(lambda: len(seen) == 3)
    assert answers(await session.messages(fresh=True)) == ["to 1", "to 2", "to 3"]
    assert await session.inbox() == []
    assert schedule(store, "s") == Schedule("a")
    assert due_set(store, "s") == {}


async def test_what_was_posted_before_the_worker_began_is_answered(store: Any) -> None:
    seen: list[Any] = []
    for number in range(20):
        await store.session(f"s{number}").post(said(str(number)), handler="a")
    async with working(store, {"a": answering(seen)}, concurrency=3):
        await until(lambda: len(seen) == 20)
    assert sorted(seen, key=int) == [str(number) for number in range(20)]


@pytest.mark.unit
def test_of_places_that_have_many_sessions_few_are_asked() -> None:
    places = [("a", partition) for partition in range(6)]
    assert work.looked_at(places, set(), 4) == places[:4]
    assert work.looked_at(places, set(places), 4) == places[:1]
    assert work.looked_at(places, set(places), 20) == places[:3]
    assert work.looked_at(places, set(places[2:]), 20) == places[:2]


async def test_what_a_worker_took_while_it_was_told_to_stop_is_given_back(store: Any, monkeypatch: Any) -> None:
    port, seen = tiers(store).port, list[Any]()
    scripts = port.scripts

    async def stopping(calls: Any, *given: Any, **named: Any) -> Any:
        answers = await scripts(calls, *given, **named)
        if any(call[0] is DUE and answer[4:5] not in ([], [[]]) for call, answer in zip(calls, answers, strict=True)):
            store.stop_working()
        return answers

    monkeypatch.setattr(port, "scripts", stopping)
    await store.session("s").post(said("1"), handler="a")
    store.handler("a", answering(seen))
    await store.work()
    assert seen == []
    assert due_set(store, "s")[b"session:s"] / 1000 <= tiers(store).clock.now()


@pytest.mark.unit
async def test_a_worker_with_one_free_slot_looks_at_full_places_in_turn() -> None:
    places = [("a", partition) for partition in range(8)]
    seen: list[Any] = []

    async def look(some: list[Any], most: int) -> int:
        seen.extend(some)
        return most

    worker = object.__new__(work.SessionWorker)
    worker._full, worker._published, worker._last = set(places), set(), dict.fromkeys(places, -1.0)
    worker._mutex, worker._port, worker._look = threading.Lock(), time, look  # type: ignore[assignment]
    for _ in range(2 * len(places)):
        await worker._take(places, 1)
    assert sorted(seen[:8]) == sorted(seen[8:]) == places


async def test_a_session_has_one_handler_and_others_leave_it_alone(store: Any) -> None:
    seen: list[Any] = []
    session = store.session("s")
    await session.post(said("1"), handler="b")
    with pytest.raises(Conflict, match="handler is 'b'"):
        await session.post(said("2"), handler="a")
    async with working(store, {"a": answering(seen)}):
        await store.session("other").post(said("x"), handler="a")
        await until(lambda: seen == ["x"])
        await asyncio.sleep(1.2)
    assert [each.message.content for each in await session.inbox()] == ["1"]
    assert seen == ["x"]


async def test_wakes_arrive_when_they_are_due_and_repeat(store: Any) -> None:
    seen: list[Any] = []

    def note(turn: Any) -> None:
        seen.extend((each.wake, each.message.content, each.time) for each in turn.take())
        turn["n"] = len(seen)

    session = store.session("s")
    now = tiers(store).clock.now()
    await session.wake("late", after=3600, name="late", handler="a")
    assert await session.inbox() == []
    await session.wake("replaced", after=1, name="once")
    await session.wake("once", at=now + 1.5, name="once")
    await session.wake("again", every=2, name="again")
    assert [(each.wake, each.every) for each in await session.wakes()] == [("once", None), ("again", 2), ("late", None)]
    async with working(store, {"a": note}):
        await until(lambda: [each[0] for each in seen].count("again") == 2)
        assert await session.cancel_wake("again") is True
        assert await session.cancel_wake("again") is False
    assert [each[:2] for each in seen if each[0] != "again"] == [("once", "once")]
    [first, second] = [each[2] for each in seen if each[0] == "again"]
    assert second == pytest.approx(first + 2, abs=0.002)
    assert [each.wake for each in await session.wakes()] == ["late"]
    found = schedule(store, "s")
    assert found is not None
    assert found.due is not None
    assert found.due / 1000 == pytest.approx(now + 3600, abs=30)


async def test_a_wake_that_is_cancelled_while_it_is_served_does_not_repeat(store: Any) -> None:
    session = store.session("s")
    await session.wake("w", after=0, every=1, name="w", handler="a")
    await session.wake("v", after=0, every=1, name="v")
    async with session.turn() as turn:
        assert {each.wake for each in turn.take()} == {"v", "w"}
        assert await session.cancel_wake("w") is True
        turn["n"] = 1
    assert [each.wake for each in await session.wakes()] == ["v"]


async def test_a_turn_sets_wakes_of_its_session(store: Any) -> None:
    seen: list[Any] = []

    def count(turn: Any) -> None:
        taken = turn.take()
        seen.extend(each.message.content for each in taken)
        if len(seen) < 5:
            turn.wake(str(len(seen)), after=0)
        turn["n"] = len(seen)

    async with working(store, {"a": count}):
        await store.session("s").post(said("0"), handler="a")
        await until(lambda: len(seen) == 5)
    assert seen == ["0", "1", "2", "3", "4"]
    assert await store.session("s").wakes() == []


async def test_a_rollback_keeps_wakes_and_a_deletion_ends_them(store: Any) -> None:
    session = store.session("s")
    await session.set("n", 1)
    await session.wake("later", after=3600, handler="a")
    await session.set("n", 2)
    await session.rollback()
    assert [each.message.content for each in await session.wakes()] == ["later"]
    await store.delete("s")
    assert schedule(store, "s") is None
    seen: list[Any] = []
    async with working(store, {"a": answering(seen)}):
        with redis_of(store) as redis:  # as if it were due
            redis.zadd(keys_of(store, "s").due_of("a"), {keys_of(store, "s").text: 1})
        await until(lambda: due_set(store, "s") == {})
    assert seen == []


async def test_a_handler_that_fails_is_tried_again_until_the_session_is_stuck(
    store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quick(monkeypatch)
    seen: list[Any] = []
    broken = True

    def fail(turn: Any) -> None:
        taken = turn.take()
        seen.extend(each.message.content for each in taken)
        turn["n"] = 1
        if broken:
            raise ZeroDivisionError("a secret")

    session = store.session("s", user="u")
    async with working(store, {"a": fail}, max_attempts=3):
        await session.post(said("1"), handler="a")
        await until(lambda: (schedule(store, "s") or Schedule("a")).stuck)
        assert seen == ["1"] * 3
        assert schedule(store, "s") == Schedule("a", None, 3, None, True)
        assert await session.get("n", fresh=True) is None
        await session.post(said("2"))
        await asyncio.sleep(0.3)
        assert len(seen) == 3, "it is stuck"
        await store.admin.archive()
        assert [each.id for each in await store.sessions(stuck=True)] == ["s"]
        [found] = [each for each in await store.admin.doctor() if each.name == "stuck sessions"]
        assert (found.ok, found.found) == (False, "sessions that are no longer served: 1")
        broken = False
        assert await retried(session)
        await until(lambda: seen[3:] == ["1", "2"])
    assert schedule(store, "s") == Schedule("a")
    assert (tiers(store).work.served > 0, tiers(store).work.failed) == (True, 3)
    assert await session.inbox() == []
    assert await session.retry() is False
    await store.admin.archive()
    assert await store.sessions(stuck=True) == []
    with pytest.raises(NotFound, match="no handler"):
        await store.session("none").retry()
    assert "ZeroDivisionError" in caplog.text


async def test_stuck_sessions_are_counted_by_a_scrape(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_SQL_EVERY", 0.05)

    def fail(turn: Any) -> None:
        raise ZeroDivisionError

    store = await opener(archive_every=0.01)
    scrape = Scrape(store)
    await until(lambda: scrape("stuck_sessions") == 0)
    async with working(store, {"a": fail}, max_attempts=1):
        await store.session("s").post(said("1"), handler="a")
        await until(lambda: scrape("stuck_sessions") == 1)
    assert await store.session("s").retry() is True
    await until(lambda: scrape("stuck_sessions") == 0)


async def test_a_handler_that_takes_nothing_counts_as_failed(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    turns = Counter[str]()

    def idle(turn: Any) -> None:
        turns["all"] += 1
        if turns["all"] % 2:
            turn["n"] = turns["all"]

    async with working(store, {"a": idle}, max_attempts=4):
        await store.session("s").post(said("1"), handler="a")
        await until(lambda: (schedule(store, "s") or Schedule("a")).stuck)
    assert turns["all"] == 4
    assert [each.message.content for each in await store.session("s").inbox()] == ["1"]


async def test_a_turn_that_is_stopped_is_not_repeated(store: Any) -> None:
    began = asyncio.Event()
    loop = asyncio.get_running_loop()
    turns = Counter[str]()

    def busy(turn: Any) -> None:
        turns["all"] += 1
        turn.take()
        loop.call_soon_threadsafe(began.set)
        while True:
            time.sleep(0.01)
            if turn.stopping:
                raise Stopped("stopped")

    session = store.session("s")
    async with working(store, {"a": busy}):
        await session.post(said("1"), handler="a")
        await began.wait()
        assert (await session.stop()).state in ("stopped", "finished")
        await until(lambda: schedule(store, "s") == Schedule("a"))
        await asyncio.sleep(1.2)
    assert turns["all"] == 1
    assert await session.inbox() == []


@pytest.mark.only(api="asyncio")
async def test_a_stop_of_a_coroutine_handler_ends_it(store: Any) -> None:
    began = asyncio.Event()
    kept: list[str] = []

    async def speak(turn: Any) -> None:
        turn.take()
        try:
            async with turn.stoppable():
                began.set()
                await asyncio.sleep(60)
        except Stopped:
            kept.append("half")
        turn["answer"] = "half"

    session = store.session("s")
    async with working(store, {"a": speak}):
        await session.post(said("1"), handler="a", request_id="q")
        await began.wait()
        assert await session.stop("q") == StopResult("stopped", 2)
    assert await session.get("answer", fresh=True) == "half"
    assert await session.inbox() == []
    assert kept == ["half"]


@pytest.mark.replicas
async def test_workers_share_the_sessions_and_serve_each_input_once(opener: Any) -> None:
    one, other, third = await opener(), await opener(), await opener()
    seen: list[Any] = []
    ids = [f"s{number % 10}" for number in range(100)]
    async with working(one, {"a": answering(seen)}, concurrency=4), working(other, {"a": answering(seen)}):
        for number, id in enumerate(ids):
            await third.session(id).post(said(str(number)), handler="a", request_id=f"r{number}")
        await until(lambda: len(seen) >= len(ids), 60.0)
    assert Counter(seen) == Counter(str(number) for number in range(100))
    for at in range(10):
        found = answers(await third.session(f"s{at}").messages(fresh=True))
        assert found == [f"to {number}" for number in range(at, 100, 10)]


@pytest.mark.replicas
async def test_a_worker_that_begins_later_gets_its_share_of_the_partitions(opener: Any) -> None:
    one, other = await opener(), await opener()
    partitions = tiers(one).keys.partitions

    def share(store: Any) -> int:
        return len(core(store)._handlers.working._places())

    async with working(one, {"a": answering([])}):
        await until(lambda: share(one) == partitions)
        async with working(other, {"a": answering([])}):
            await until(lambda: share(one) == share(other) == partitions // 2, 30.0)
        await until(lambda: share(one) == partitions, 30.0)


@pytest.mark.replicas
@pytest.mark.only(api="asyncio")
async def test_a_worker_that_ends_leaves_its_partitions_at_once(opener: Any) -> None:
    """Others serve them while its last turns run, and do not wait for their next look at the claims."""
    one, other = await opener(), await opener()
    going = asyncio.Event()
    seen: list[Any] = []

    async def slow(turn: Any) -> None:
        taken = turn.take()
        seen.extend(each.message.content for each in taken)
        while taken[0].message.content == "slow" and not going.is_set():
            await asyncio.sleep(0.01)
        turn["n"] = 1

    async with working(one, {"a": slow}), working(other, {"a": slow}):
        workers = [core(each)._handlers.working for each in (one, other)]
        await until(lambda: all(each._places() for each in workers), 30.0)
        number = 0
        while not all(each._running for each in workers):  # neither is idle, and looks at what others have
            await one.session(f"slow{number}").post(said("slow"), handler="a")
            number += 1
            await asyncio.sleep(0.2)
        one.stop_working()
        await until(lambda: len(workers[1]._places()) == tiers(one).keys.partitions, 5.0)
        assert workers[0]._running
        for number in range(8):
            await other.session(f"s{number}").post(said(str(number)), handler="a")
        await until(lambda: {*map(str, range(8))} <= {*seen})
        going.set()


@pytest.mark.replicas
async def test_a_session_whose_worker_died_is_served_by_another_one(opener: Any) -> None:
    store, other = await opener(), await opener()
    session = store.session("s")
    await session.post(said("1"), handler="a")
    # As a worker does that dies after it has taken the session.
    dead = work.SessionWorker(tiers(store), {"a": print}, work.Plan(1, 1.0, 8, 1.0), lambda id: None, lambda it: it)
    assert await dead._take([("a", keys_of(store, "s").partition)], 1) == 1
    seen: list[Any] = []
    async with working(other, {"a": answering(seen)}):
        await asyncio.sleep(0.3)
        assert seen == []
        await until(lambda: seen == ["1"])


@pytest.mark.replicas
async def test_a_worker_that_has_room_serves_partitions_that_a_dead_one_has_claimed(opener: Any) -> None:
    store, other = await opener(), await opener()
    dead = work.SessionWorker(tiers(store), {"a": print}, work.Plan(1, 1.0, 8, 1.0), lambda id: None, lambda it: it)
    assert len(await dead._mine()) == tiers(store).keys.partitions
    going = threading.Event()
    seen: list[Any] = []

    def slow(turn: Any) -> None:
        seen.extend(each.message.content for each in turn.take())
        while seen[-1] == "slow" and not going.wait(0.01):
            pass
        turn["n"] = 1

    async with working(other, {"a": slow}):
        try:
            await store.session("slow").post(said("slow"), handler="a")
            await until(lambda: seen == ["slow"])
            for number in range(4):
                await store.session(f"s{number}").post(said(str(number)), handler="a")
            await until(lambda: len(seen) == 5, 5.0)
            assert not core(other)._handlers.working._places(), "the claims have not ended"
        finally:
            going.set()


async def test_a_session_that_somebody_holds_is_served_afterwards(store: Any) -> None:
    seen: list[Any] = []
    session = store.session("s")
    await session.set("n", 0)
    async with working(store, {"a": answering(seen)}):
        async with session.turn() as turn:
            await session.post(said("1"), handler="a")
            await asyncio.sleep(0.3)
            assert seen == []
            turn["n"] = 1
        await until(lambda: seen == ["1"])


async def test_a_worker_whose_clock_is_late_writes_nothing_until_it_sees_the_wake(store: Any) -> None:
    seen: list[Any] = []
    session = store.session("s")
    async with working(store, {"a": answering(seen)}):
        await session.wake("w", after=1, handler="a")
        later(store, -0.7)  # as if another server of the cluster were behind
        await until(lambda: seen == ["w"], 30.0)
    with redis_of(store) as redis:
        assert redis.hget(keys_of(store, "s").record, "#v") == b"2"


async def test_an_ordinary_turn_that_takes_the_inputs_leaves_nothing_to_do(store: Any) -> None:
    seen: list[Any] = []
    session = store.session("s")
    await session.post(said("1"), handler="a")
    async with session.turn() as turn:
        assert [each.message.content for each in turn.take()] == ["1"]
        turn["n"] = 1
    assert schedule(store, "s") == Schedule("a")
    assert due_set(store, "s") == {}
    async with working(store, {"a": answering(seen)}):
        await asyncio.sleep(0.2)
    assert seen == []


@pytest.mark.replicas
async def test_sessions_are_due_again_after_redis_lost_everything(opener: Any) -> None:
    store = await opener()
    now = tiers(store).clock.now()
    for number in range(5):
        await store.session(f"s{number}").post(said(str(number)), handler="a")
    await store.session("later").wake("later", at=now + 3600, handler="a")
    await store.session("stuck").post(said("x"), handler="b")
    await store.admin.archive()
    with redis_of(store) as redis:
        redis.flushall()
    store.invalidate()
    seen: list[Any] = []
    async with working(store, {"a": answering(seen)}):
        await until(lambda: len(seen) == 5, 60.0)
        await until(lambda: b"session:later" in due_set(store, "later"), 60.0)
    assert sorted(seen) == ["0", "1", "2", "3", "4"]
    assert due_set(store, "later")[b"session:later"] / 1000 == pytest.approx(now + 3600, abs=30)
    for number in range(5):
        assert answers(await store.session(f"s{number}").messages()) == [f"to {number}"]


@pytest.mark.replicas
async def test_a_worker_with_one_slot_finds_all_that_redis_lost(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due_sets, "_UNKNOWN_SECONDS", 3600.0)  # it asks SQL once, for all partitions
    store = await opener()
    for number in range(4):
        await store.session(f"s{number}").post(said(str(number)), handler="a")
    await store.admin.archive()
    with redis_of(store) as redis:
        redis.flushall()
    store.invalidate()
    seen: list[Any] = []
    async with working(store, {"a": answering(seen)}, concurrency=1):
        await until(lambda: len(seen) == 4, 12.0)  # later the reaper would find them


async def test_a_session_that_left_redis_is_served(store: Any) -> None:
    seen: list[Any] = []
    await store.session("s").wake("now", after=0.2, handler="a")
    await evict(store, "s")
    async with working(store, {"a": answering(seen)}):
        await until(lambda: seen == ["now"])
    assert answers(await store.session("s").messages()) == ["to now"]


async def test_a_worker_that_ends_finishes_its_turns_and_hands_back_the_rest(store: Any) -> None:
    began, go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    seen: list[Any] = []

    def slow(turn: Any) -> None:
        taken = turn.take()
        loop.call_soon_threadsafe(began.set)
        while not go.is_set():
            time.sleep(0.01)
        seen.extend(each.message.content for each in taken)
        turn["n"] = 1

    for number in range(3):
        await store.session(f"s{number}").post(said(str(number)), handler="a")
    store.handler("a", slow)
    running = asyncio.ensure_future(store.work(concurrency=1))
    await began.wait()
    store.stop_working()
    await asyncio.sleep(0.1)
    assert not running.done()
    go.set()
    await running
    assert len(seen) == 1
    now = tiers(store).clock.now() * 1000
    waiting = [due for number in range(3) for due in due_set(store, f"s{number}").values()]
    assert len({*waiting}) <= 3
    assert all(due <= now + 1000 for due in waiting)


@pytest.mark.only(api="asyncio")
async def test_turns_that_ignore_their_end_delay_that_of_the_worker_together(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "JOINED", 3.0)
    began, go = 0, asyncio.Event()

    async def stubborn(turn: Any) -> None:
        nonlocal began
        turn.take()
        began += 1
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await go.wait()

    async with working(store, {"a": stubborn}, shutdown_timeout=0.1):
        for number in range(5):
            await store.session(f"s{number}").post(said("x"), handler="a")
        await until(lambda: began == 5)
        asked = time.monotonic()
    took = time.monotonic() - asked
    go.set()
    assert took < 10


@pytest.mark.only(warm="real")
async def test_what_a_commit_says_of_a_schedule_is_what_redis_has(opener: Any) -> None:
    """The hot copy, and what recovery would write, are made from the answer."""
    store = await opener()
    session = store.session("s")
    await session.set("n", 0)
    while "session:s" not in tiers(store).hot.entries:
        await session.get("n")
        await asyncio.sleep(0.01)

    async def same() -> None:
        hot = tiers(store).hot.entries["session:s"]
        with redis_of(store) as redis:
            stored = redis.hgetall(keys_of(store, "s").record)
        kept = {name: value for name, value in stored.items() if name[:2] == b"#b"}
        assert {name: value for name, value in hot.fields.items() if name[:2] == b"#b"} == kept

    await session.post(said("1"), request_id="q", handler="a")
    await same()
    await session.wake("w", after=50, name="w")
    await session.wake("v", after=40, name="v", every=5)
    await session.wake("w again", after=30, name="w")
    await same()
    async with session.turn() as turn:
        turn.take()
        turn.wake("x", after=20)
    await same()
    await session.cancel_wake("v")
    await same()
    assert [each.message.content for each in await session.wakes()] == ["x", "w again"]
    await store.admin.archive()
    history = await session.history()
    assert len(history) == await session.version()


# What handlers do


async def other_deleted(store: Any) -> None:
    await store.session("other").set("n", 1)
    await store.delete("other")


class Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.only(api="asyncio")
@pytest.mark.parametrize(
    "kind", ["Deleted", "LockTimeout", "Fenced", "CancelledError", "Stopped", "SystemExit", "Panic"]
)
async def test_an_error_of_the_handler_itself_counts_as_its_failure(
    store: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    quick(monkeypatch)
    calls = 0
    await other_deleted(store)

    async def fail(turn: Any) -> None:
        nonlocal calls
        calls += 1
        turn.take()
        if kind == "Deleted":
            await store.session("other").set("n", 2)
        if kind == "CancelledError":
            raise asyncio.CancelledError
        if kind == "SystemExit":
            raise SystemExit
        if kind == "Panic":
            raise Panic
        raise {"LockTimeout": LockTimeout, "Fenced": Fenced, "Stopped": Stopped}[kind]("of something else")

    async with working(store, {"a": fail}, max_attempts=3):
        await store.session("s").post(said("1"), handler="a")
        await until(lambda: (schedule(store, "s") or Schedule("a")).stuck)
    assert calls == 3
    assert [each.message.content for each in await store.session("s").inbox()] == ["1"]


@pytest.mark.only(api="asyncio")
async def test_a_function_that_returns_a_coroutine_is_awaited(store: Any) -> None:
    seen: list[Any] = []

    async def answer(turn: Any, text: str) -> None:
        seen.extend(text + each.message.content for each in turn.take())
        turn["n"] = 1

    async with working(store, {"a": lambda turn: answer(turn, "to ")}):
        await store.session("s").post(said("1"), handler="a")
        await until(lambda: seen == ["to 1"])


async def test_a_store_works_once_at_a_time(store: Any) -> None:
    async with working(store, {"a": print}):
        store.handler("a", print)
        with pytest.raises(InvalidValue, match="works already, without handler 'b'"):
            store.handler("b", print)
        with pytest.raises(InvalidValue, match="works already:"):
            await store.work()
    async with working(store, {"a": print}):
        pass


async def test_a_stop_before_the_work_ends_it_at_once_and_one_after_it_does_nothing(store: Any) -> None:
    seen: list[Any] = []
    await store.session("s").post(said("1"), handler="a")
    store.handler("a", answering(seen))
    store.stop_working()
    await store.work()
    assert seen == []
    store.stop_working()
    async with working(store, {}):
        await until(lambda: seen == ["1"])


async def test_nothing_is_left_of_many_short_turns(store: Any) -> None:
    seen: list[Any] = []
    found: list[work.SessionWorker] = []
    async with working(store, {"a": answering(seen)}, concurrency=8):
        for number in range(60):
            await store.session(f"s{number % 20}").post(said(str(number)), handler="a")
        await until(lambda: len(seen) == 60, 60.0)
        found.append(core(store)._handlers.working)
        await until(lambda: found[0]._running == set())
    assert found[0]._running == set()


@pytest.mark.only(api="asyncio")
async def test_a_worker_without_room_waits_without_looking(store: Any) -> None:
    go, rounds = asyncio.Event(), 0

    async def slow(turn: Any) -> None:
        turn.take()
        await go.wait()
        turn["n"] = 1

    await store.session("s").post(said("1"), handler="a")
    async with working(store, {"a": slow}, concurrency=1):
        await until(lambda: core(store)._handlers.working._running)
        worker = core(store)._handlers.working
        whole = worker._round

        async def counted() -> float:
            nonlocal rounds
            rounds += 1
            return await whole()

        worker._round = counted
        await asyncio.sleep(0.5)
        go.set()
    assert rounds < 5


@pytest.mark.only(api="asyncio", warm="real")
@pytest.mark.replicas
async def test_a_full_worker_leaves_what_it_cannot_serve_to_others(opener: Any) -> None:
    store, other = await opener(), await opener()
    go, seen = asyncio.Event(), list[Any]()

    async def slow(turn: Any) -> None:
        turn.take()
        await go.wait()
        turn["n"] = 1

    async with working(store, {"a": slow}, concurrency=1):
        await store.session("first").post(said("x"), handler="a")
        await until(lambda: core(store)._handlers.working._running)
        for number in range(10):
            await store.session(f"s{number}").post(said(str(number)), handler="a")
        async with working(other, {"a": answering(seen)}):
            await until(lambda: len(seen) == 10, 60.0)
            go.set()


# Stops and locks


@pytest.mark.only(api="asyncio")
async def test_a_stop_before_the_inputs_are_taken_ends_them_too(store: Any) -> None:
    began, turns = asyncio.Event(), 0

    async def late(turn: Any) -> None:
        nonlocal turns
        turns += 1
        began.set()
        await asyncio.sleep(60)
        turn.take()

    session = store.session("s")
    async with working(store, {"a": late}):
        await session.post(said("1"), handler="a")
        await began.wait()
        assert (await session.stop()).state == "stopped"
        await until(lambda: schedule(store, "s") == Schedule("a"))
        await asyncio.sleep(0.2)
    assert turns == 1
    assert await session.inbox() == []


@pytest.mark.only(api="asyncio")
async def test_failures_and_stops_are_noted_while_somebody_else_has_the_lease(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    began = asyncio.Event()

    async def fail(turn: Any) -> None:
        turn.take()
        began.set()
        await asyncio.sleep(0.1)
        raise ZeroDivisionError

    session = store.session("s")
    async with working(store, {"a": fail}, max_attempts=1):
        await session.post(said("1"), handler="a")
        await began.wait()
        async with session.turn(wait=20) as turn:  # it waits behind the handler's
            await until(lambda: (schedule(store, "s") or Schedule("a")).stuck)
            assert await retried(session)
            turn["n"] = 1


async def test_a_stuck_session_whose_poison_is_withdrawn_is_served_again(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    seen: list[Any] = []

    def picky(turn: Any) -> None:
        for each in turn.take():
            if each.message.content == "poison":
                raise ZeroDivisionError
            seen.append(each.message.content)
        turn["n"] = len(seen)

    session = store.session("s")
    async with working(store, {"a": picky}, max_attempts=2):
        number = await session.post(said("poison"), handler="a")
        await until(lambda: (schedule(store, "s") or Schedule("a")).stuck)
        assert await session.withdraw(number)
        await session.post(said("2"))
        await until(lambda: seen == ["2"])


async def test_what_is_deleted_or_erased_is_not_due(store: Any) -> None:
    for id in ("deleted", "erased"):
        await store.session(id).wake("later", after=3600, handler="a")
        assert keys_of(store, id).text in due_set(store, id)
    await store.delete("deleted")
    await store.erase("erased")
    assert due_set(store, "deleted") == due_set(store, "erased") == {}
    await store.session("past").wake("at once", at=0, handler="a")
    assert [each.message.content for each in await store.session("past").inbox()] == ["at once"]


@pytest.mark.replicas
@pytest.mark.parametrize("archived", [True, False])
async def test_a_worker_that_began_before_redis_lost_everything_serves_what_comes_back(
    opener: Any, archived: bool
) -> None:
    store, other = await opener(), await opener()
    seen: list[Any] = []
    async with working(other, {"a": answering(seen)}):
        await asyncio.sleep(1.2)  # it has seen partitions that nobody has begun
        for number in range(5):
            await store.session(f"s{number}").wake(str(number), after=2, handler="a")
        if archived:
            await store.admin.archive()
        with redis_of(store) as redis:
            redis.flushall()
        await until(lambda: len(seen) == 5, 60.0)
    assert sorted(seen) == ["0", "1", "2", "3", "4"]


async def test_the_wakes_of_turns_have_a_bound(opener: Any) -> None:
    store = await opener(inbox_limit=3)
    session = store.session("s")
    for number in range(6):
        async with session.turn() as turn:
            turn.wake("x", after=60, name=str(number))
    with pytest.raises(Backpressure, match="inbox"):
        async with session.turn() as turn:
            turn.wake("x", after=60, name="6")
    async with session.turn() as turn:
        turn.wake("in place of an earlier one", after=60, name="5")
    assert len(await session.wakes()) == 6


async def test_a_handler_that_overfills_the_inbox_has_failed(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    store = await opener(inbox_limit=2)

    def greedy(turn: Any) -> None:
        turn.take()
        for number in range(10):
            turn.wake("x", after=60, name=str(number))

    async with working(store, {"a": greedy}, max_attempts=2):
        await store.session("s").post(said("1"), handler="a")
        await until(lambda: (schedule(store, "s") or Schedule("a")).stuck)
    assert [each.message.content for each in await store.session("s").inbox()] == ["1"]


@pytest.mark.unit
def test_bad_handlers_and_plans_are_refused() -> None:
    handlers = work.Handlers()
    handlers.add("a", print)
    handlers.add("a", print)
    for name, serves in [("a", len), ("", print), ("a b", print), ("x" * 65, print), (1, print), ("b", None)]:
        with pytest.raises(InvalidValue, match="handler"):
            handlers.add(name, serves)  # type: ignore[arg-type]
    for bad in [(0, 1.0, 1, 1.0), (True, 1.0, 1, 1.0), (1, 0.0, 1, 1.0), (1, 1.0, 0, 1.0), (1, 1.0, 1, float("inf"))]:
        with pytest.raises(InvalidValue):
            work.Plan(*bad)
    plan = work.Plan(1, 30.0, 20, 30.0)
    assert [round((plan.retry_ms(failed) or 0) / 1000 / min(2 ** (failed - 1), 300)) for failed in range(1, 20)] == [
        1
    ] * 19
    assert plan.retry_ms(20) is None


async def test_work_without_handlers_and_bad_wakes_are_refused(store: Any) -> None:
    with pytest.raises(InvalidValue, match="no handler"):
        await store.work()
    session = store.session("s")
    for bad in [
        {},
        {"after": -1},
        {"after": 1, "at": 1},
        {"every": 0.5},
        {"after": True},
        {"after": "1"},
        {"after": 1e12},
    ]:
        with pytest.raises(InvalidValue):
            await session.wake("x", **bad)
    with pytest.raises(InvalidValue, match="name"):
        await session.wake("x", after=1, name="n" * 201)
    with pytest.raises(InvalidValue, match="handler"):
        await session.post(said("x"), handler="a b")
