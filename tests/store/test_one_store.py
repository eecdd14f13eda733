"""Both APIs of one open store: one replica, whatever thread or event loop calls."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest
from below import keys_of, redis_of, tiers, until
from sync_api import core

from distributed_state import AsyncStateStore, ConfigurationError, Locked, LockTimeout, StateStore, WarmUnavailable
from distributed_state.events import handlers
from distributed_state.port import bodies
from distributed_state.port.shared import SharedPort


def apis(store: Any) -> tuple[AsyncStateStore, StateStore]:
    aio: AsyncStateStore = core(store)
    return aio, aio.blocking


def in_loop_of_its_own(work: Callable[[], Coroutine[Any, Any, Any]]) -> threading.Thread:
    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    return thread


async def test_each_api_names_the_other(store: Any) -> None:
    aio, blocking = apis(store)
    assert aio.aio is aio
    assert aio.blocking is blocking
    assert blocking.blocking is blocking
    assert blocking.aio is aio
    assert isinstance(blocking, StateStore)


async def test_what_one_api_writes_the_other_reads_from_the_same_cache(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without asking any server, and neither through another thread nor another task."""
    store = await opener(retry_for=1.0)
    aio, blocking = apis(store)
    await aio.session("s").set("a", 1)
    assert await aio.session("s").get("a") == 1
    blocking.session("s").set("a", 2)  # inside the running loop
    text = keys_of(store, "s").ref.text

    async def hot() -> Any:
        return await aio.session("s").get("a") == 2 and tiers(store).hot.get(text)

    await until(hot)

    async def fail(*_: Any) -> Any:
        raise WarmUnavailable("asked")

    with monkeypatch.context() as patched:
        patched.setattr(SharedPort, "exchange", fail)
        reading = aio.session("s").get("a")
        with pytest.raises(StopIteration) as done:
            reading.send(None)  # it ends before it ever suspends
        assert done.value.value == blocking.session("s").get("a") == 2
        with pytest.raises(WarmUnavailable, match="asked"):  # the control: what is not hot is asked for
            await aio.session("other").get("a")


async def test_both_are_one_replica(store: Any) -> None:
    aio, blocking = apis(store)
    await aio.session("a").set("n", 1)
    await asyncio.to_thread(blocking.session("b").set, "n", 1)
    in_loop_of_its_own(lambda: aio.session("c").set("n", 1)).join()
    assert [each.id for each in await aio.admin.replicas()] == [aio.replica]
    assert aio.replica == blocking.replica
    assert [each.id for each in blocking.admin.replicas()] == [aio.replica]


async def test_a_lock_is_its_tasks_on_both_apis_and_nobody_elses(store: Any) -> None:
    aio, blocking = apis(store)
    theirs = blocking.session("s")

    async def another_task() -> None:
        with pytest.raises(LockTimeout), theirs.lock(wait=0):  # in the same thread, and with its parent's context
            pass

    async with aio.session("s").lock() as lease:
        theirs.set("a", 1)
        with theirs.lock() as inner:
            assert inner.token == lease.token
            await aio.session("s").set("a", 2)
        await asyncio.create_task(another_task())
        with pytest.raises(Locked):
            await asyncio.to_thread(lambda: threading_set(theirs))
    assert await asyncio.to_thread(lambda: threading_set(theirs)) == 3


def threading_set(session: Any) -> Any:
    """Write from a thread that has no part of the caller's context."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(session.set("a", 3))
        except Locked as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


async def test_a_task_and_a_thread_wake_each_other(store: Any) -> None:
    """While a task waits for a lock, its loop runs on, or nobody would let the thread give it back."""
    aio, blocking = apis(store)
    held, leave = threading.Event(), threading.Event()

    def holder() -> None:
        with blocking.session("s").lock():
            held.set()
            assert leave.wait(10)

    thread = threading.Thread(target=holder)
    thread.start()
    await asyncio.to_thread(held.wait)
    waiting = asyncio.create_task(aio.session("s").lock(wait=20).acquire())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    leave.set()
    lease = await waiting
    thread.join()
    second = asyncio.create_task(asyncio.to_thread(lambda: blocking.session("s").lock(wait=20).acquire().release()))
    await asyncio.sleep(0.05)
    assert not second.done()
    await lease.release()
    await second


def spied(store: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each read that comes from now on leads its load, or waits for another's."""
    hot, leads = tiers(store).hot, list[bool]()
    take_off = hot.take_off

    def spy(*args: Any, **named: Any) -> Any:
        found = take_off(*args, **named)
        leads.append(found[1])
        return found

    monkeypatch.setattr(hot, "take_off", spy)
    return leads


@pytest.mark.only(warm="real")
async def test_blocking_code_waits_for_nothing_that_a_task_of_the_loop_it_holds_up_has_to_do(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    aio, blocking = apis(store)
    await aio.session("s").set("a", 1)
    tiers(store).hot.forget(keys_of(store, "s").ref.text)
    leads = spied(store, monkeypatch)
    loading = asyncio.create_task(aio.session("s").get("a"))
    await asyncio.sleep(0)
    assert leads == [True]
    assert not loading.done()
    assert blocking.session("s").get("a") == 1
    assert leads[1], "it would wait for a task that cannot go on"
    assert await loading == 1


async def test_a_load_that_nobody_ends_is_waited_for_once(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may end its leader at the one moment when nothing can be put right."""
    await store.session("s").set("a", 1)
    hot, text = tiers(store).hot, keys_of(store, "s").ref.text
    hot.forget(text)
    monkeypatch.setattr("distributed_state.tiers.read._FLIGHT_SECONDS", 0.05)
    here = tiers(store).port.here() if core(store) is store else None
    flight, ours = hot.take_off(text, freshness=None, alone=False)
    flight.here = here
    assert ours
    assert await store.session("s").get("a") == 1
    assert not flight.open


@pytest.mark.only(warm="real")
async def test_if_all_waited_together_it_would(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    aio, blocking = apis(store)
    await aio.session("s").set("a", 1)
    tiers(store).hot.forget(keys_of(store, "s").ref.text)
    leads = spied(store, monkeypatch)
    monkeypatch.setattr(SharedPort, "here", lambda self: None)
    monkeypatch.setattr("distributed_state.tiers.read._FLIGHT_SECONDS", 0.1)
    loading = asyncio.create_task(aio.session("s").get("a"))
    await asyncio.sleep(0)
    assert leads == [True]
    assert not loading.done()
    assert blocking.session("s").get("a") == 1
    assert not leads[1]
    await loading


async def test_loops_and_threads_work_at_once(store: Any) -> None:
    aio, blocking = apis(store)

    async def tasks(me: int) -> None:
        async def one(n: int) -> None:
            await aio.session("all").increment("n")
            await aio.session(f"{me}-{n}").set("a", n)
            if n % 3 == 0:
                blocking.session("all").increment("n")
                assert blocking.session(f"{me}-{n}").get("a") == n

        await asyncio.gather(*map(one, range(10)))

    def thread(me: int) -> None:
        for n in range(10):
            blocking.session("all").increment("n")
            blocking.session(f"{me}-{n}").set("a", n)

    working = [in_loop_of_its_own(lambda me=me: tasks(me)) for me in range(3)]  # type: ignore[misc]
    working += [threading.Thread(target=thread, args=(me,)) for me in range(3, 6)]
    for each in working[3:]:
        each.start()
    await tasks(6)
    for each in working:
        await asyncio.to_thread(each.join)
    assert await aio.session("all").get("n", fresh=True) == 4 * 14 + 3 * 10
    assert blocking.session("5-9").get("a") == 9


async def test_who_acts_is_noted_on_both_apis(store: Any) -> None:
    aio, blocking = apis(store)
    with aio.acting_as("anna"):
        await aio.session("s").set("a", 1)
        blocking.session("s").set("a", 2)
    assert [change.actor for change in await aio.session("s").history()] == ["anna", "anna"]


# Events


async def test_a_handler_runs_where_it_was_given(store: Any) -> None:
    """In a task of that loop, or in a thread; each hears an event once, as one replica does."""
    aio, blocking = apis(store)
    loop, received = asyncio.get_running_loop(), list[Any]()

    async def awaited(event: Any) -> None:
        received.append(("task", asyncio.get_running_loop() is loop, event.data["n"]))

    def plain(event: Any) -> None:
        received.append(("thread", bodies.running() is None, event.data["n"]))

    aio.on("a", awaited)
    blocking.on("a", plain)
    await aio.ready()
    blocking.emit("a", {"n": 1})
    await aio.emit("a", {"n": 2})
    await until(lambda: len(received) >= 4)
    assert sorted(received) == [("task", True, 1), ("task", True, 2), ("thread", True, 1), ("thread", True, 2)]
    await aio.off(plain)
    await asyncio.to_thread(blocking.off, awaited)  # from a thread a task is ended, too
    assert tiers(store).handlings == []


async def test_blocking_code_waits_for_no_handler_of_the_loop_that_it_holds_up(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends by itself, once the event is handled, and no other member of its group is given that."""
    aio, blocking = apis(store)
    began, go_on, received = asyncio.Event(), asyncio.Event(), list[Any]()

    async def first(event: Any) -> None:
        began.set()
        await go_on.wait()
        received.append(("first", event.data["n"]))

    aio.on("a", first, group="g")
    with pytest.raises(ConfigurationError, match=r"aio\.ready"):
        blocking.ready()
    await aio.ready()
    blocking.ready()
    await aio.emit("a", {"n": 1})
    await began.wait()
    monkeypatch.setattr(handlers, "_CLOSING", 0.1)
    handling: Any = tiers(store).handlings[0]
    blocking.off(first)
    assert not handling._idle._set
    go_on.set()
    await until(handling._job._task.done)
    aio.on("a", lambda event: received.append(("second", event.data["n"])), group="g")
    await aio.ready()
    await aio.emit("a", {"n": 2})
    await until(lambda: len(received) == 2)
    assert received == [("first", 1), ("second", 2)]


async def test_a_handler_in_a_thread_may_take_itself_off_by_the_sync_api(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for itself; it is the task's, though the thread is another."""
    aio, blocking = apis(store)
    monkeypatch.setattr(handlers, "_CLOSING", 60.0)
    over: list[Any] = []

    def once(event: Any) -> None:
        blocking.off(once)
        over.append(event.data["n"])

    aio.on("a", once)
    await aio.ready()
    await aio.emit("a", {"n": 1})
    await until(lambda: over == [1])
    assert tiers(store).handlings == []


async def test_a_handler_ends_with_its_loop_and_the_others_go_on(store: Any) -> None:
    aio, blocking = apis(store)
    received: list[str] = []

    async def listen() -> None:
        @aio.on("a")
        async def ends(event: Any) -> None:
            received.append("task")

        await aio.ready()
        await aio.emit("a")
        await until(lambda: "task" in received)

    @blocking.on("a")
    def stays(event: Any) -> None:
        received.append("thread")

    await aio.ready()
    await asyncio.to_thread(lambda: asyncio.run(listen()))
    await until(lambda: received.count("thread") == 1)
    assert [each.handler for each in tiers(store).handlings] == [stays]
    await aio.emit("a")
    await until(lambda: received.count("thread") == 2)
    assert received.count("task") == 1


# The end


async def write_and_leave(aio: AsyncStateStore) -> Any:
    """In a loop of its own; one lock is given back while the loop ends, the other one, which is returned, by nobody."""
    lease = await aio.session("s").lock().acquire()
    await aio.events("*").next(0)
    asyncio.create_task(under_lock(aio), name="cancelled when the loop ends")  # noqa: RUF006 - as users do
    await asyncio.sleep(0.05)
    return lease


async def under_lock(aio: AsyncStateStore) -> None:
    async with aio.session("t").lock():
        await asyncio.sleep(60)


async def test_a_loop_that_ends_leaves_nothing_behind(store: Any) -> None:
    aio, _ = apis(store)
    port: Any = tiers(store).port
    await aio.session("x").set("a", 1)
    assert len(port._loops) == 1
    mine = await aio.session("m").lock().acquire()
    async with aio.events("*") as events:
        left = await asyncio.to_thread(lambda: asyncio.run(write_and_leave(aio)))
        gc.collect()  # warnings are errors
        assert list(port._loops) == list(port._keepers) == [asyncio.get_running_loop()]
        assert await aio.session("t").lock(wait=0).acquire()
        assert left.lost, "else it would be renewed for ever"
        assert not mine.lost
        assert left not in tiers(store).leases.renewal.leases
        assert tiers(store).consumers._subscriptions == [core(events)._subscription]
    await left.release()
    assert await aio.session("s").lock(wait=0).acquire()


@pytest.mark.only(warm="single")
async def test_its_connection_is_closed(store: Any) -> None:
    aio, _ = apis(store)
    port: Any = tiers(store).port

    async def connected() -> str:
        await aio.session("x").set("a", 2)
        (pipe,) = port._loops[asyncio.get_running_loop()]._pipes.values()
        host, number = pipe._transport.get_extra_info("sockname")
        assert f"{host}:{number}" in there()
        return f"{host}:{number}"

    with redis_of(store) as client:

        def there() -> list[str]:
            return [each["addr"] for each in client.client_list()]

        left = await asyncio.to_thread(lambda: asyncio.run(connected()))
        await until(lambda: left not in there())


async def test_without_a_keeper_it_would_stay(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    aio, _ = apis(store)
    port: Any = tiers(store).port
    await aio.session("x").set("a", 1)
    left: list[Any] = []

    async def idle(self: SharedPort, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
        yield

    async def look() -> None:
        await aio.session("x").set("a", 2)
        left.extend(port._loops[asyncio.get_running_loop()]._pipes.values())

    with monkeypatch.context() as patched:
        patched.setattr(SharedPort, "_keep", idle)
        await asyncio.to_thread(lambda: asyncio.run(look()))
    assert len(port._loops) == 2
    for pipe in left:
        assert pipe.broken is None
        pipe._transport._sock.close()  # which nobody else does, as Python would complain
        pipe._transport._sock = None
    port._loops = {loop: each for loop, each in port._loops.items() if not loop.is_closed()}


@pytest.mark.parametrize("closes", ["aio", "blocking", "blocking in the loop", "all at once"])
async def test_either_api_closes_both_and_twice_is_harmless(opener: Any, closes: str) -> None:
    store = await opener()
    aio, blocking = apis(store)
    await aio.session("s").set("a", 1)
    blocking.session("s").set("a", 2)
    in_loop_of_its_own(lambda: aio.session("s").set("a", 3)).join()
    threads = threading.active_count()
    if closes == "aio":
        await aio.close()
    elif closes == "blocking":
        await asyncio.to_thread(blocking.close)
    elif closes == "blocking in the loop":
        blocking.close()
    else:
        await asyncio.gather(aio.close(), asyncio.to_thread(blocking.close), aio.close())
    assert aio._lifecycle.tiers_in_use is None
    assert aio._lifecycle.cold is None
    await aio.close()
    blocking.close()
    assert threading.active_count() < threads
    for refused in (aio._lifecycle.tiers, lambda: blocking.session("s").get("a")):
        with pytest.raises(Exception, match="it is closed"):
            refused()


async def test_a_blocking_store_may_be_entered_from_asyncio(opener: Any) -> None:
    store = await opener()
    async with core(store).blocking.aio as aio:
        await aio.session("s").set("a", 1)
    assert aio._lifecycle.tiers_in_use is None
