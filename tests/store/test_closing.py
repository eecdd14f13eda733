"""How a store opens and closes when several are at it, or who closes it is cancelled: nothing of it is left behind."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from below import tiers, until
from sync_api import core

from distributed_state import AsyncStateStore
from distributed_state.port import background
from distributed_state.port.asyncio import Pools
from distributed_state.port.background import BlockingJob, SharedSignal
from distributed_state.port.shared import LoopJob

asynchronous = pytest.mark.only(api="asyncio")
fleet = pytest.mark.replicas


def working() -> set[threading.Thread]:
    """The background threads of all stores."""
    return {each for each in threading.enumerate() if each.name.startswith("distributed-state")}


async def held(opener: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, asyncio.Event, asyncio.Event]:
    """A store that stops in the middle of its closing; when it has come there, and what lets it go on."""
    store = await opener()
    await store.session("s").set("a", 1)
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def stop() -> None:
        reached.set()
        await go_on.wait()

    monkeypatch.setattr(tiers(store).refill, "close", stop)
    return store, reached, go_on


@asynchronous
@pytest.mark.parametrize("times", [1, 20])  # again and again, as anyio's scopes do
async def test_a_close_that_is_cancelled_goes_on_to_its_end(
    opener: Any, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    before = working()
    store, reached, go_on = await held(opener, monkeypatch)
    port: Any = tiers(store).port
    replica = core(store).replica
    closing = asyncio.create_task(store.close())
    await reached.wait()
    for _ in range(times):
        closing.cancel()
        await asyncio.sleep(0)
    assert closing.done() == (times > 1)
    again = asyncio.create_task(store.close())
    await asyncio.sleep(0.05)
    assert not again.done(), "it waits for the one that is under way"
    go_on.set()
    await again
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert core(store)._lifecycle.tiers_in_use is None
    assert port.closed
    await until(lambda: not working() - before)
    async with AsyncStateStore.open(opener.url, archive=opener.archive, namespace=opener.namespace) as other:
        assert replica not in [each.id for each in await other.admin.replicas()]


@asynchronous
async def test_a_loop_that_ends_while_its_store_closes_leaves_no_thread_behind(opener: Any) -> None:
    before = working()

    async def main() -> None:
        store = await opener()
        reached = asyncio.Event()

        async def never() -> None:
            reached.set()
            await asyncio.sleep(60)

        tiers(store).refill.close = never  # type: ignore[method-assign]
        closing.append(asyncio.create_task(store.close()))
        await reached.wait()

    closing: list[Any] = []
    await asyncio.to_thread(lambda: asyncio.run(main()))
    assert closing[0].cancelled()
    await until(lambda: not working() - before)


async def test_all_are_asked_to_end_before_one_is_waited_for(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a server that does not answer is waited for by one after the other."""
    store = await opener()
    await store.session("s").set("a", 1)
    async with store.session("s").lock():
        pass
    port: Any = tiers(store).port
    unasked: list[set[str]] = []

    async def spy(thread: threading.Thread, seconds: float) -> None:
        unasked.append({each._thread.name for each in port._jobs if not each.asked})
        await join(thread, seconds)

    join = background.join
    monkeypatch.setattr(background, "join", spy)
    await store.close()
    assert len(unasked) > 4
    assert set().union(*unasked) == set()


async def test_a_job_that_is_begun_after_the_end_ends(opener: Any) -> None:
    store = await opener()
    port = tiers(store).port
    await store.close()

    async def work() -> None:
        while True:
            await port.sleep(60)

    job: Any = port.spawn(work, "distributed-state-late")
    await until(lambda: not job._thread.is_alive())


@asynchronous
async def test_a_store_closes_where_the_users_work_fills_every_thread_of_asyncio(opener: Any) -> None:
    store = await opener()
    await store.session("s").set("a", 1)
    busy = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asyncio.get_running_loop().set_default_executor(pool)
        try:
            filling = asyncio.get_running_loop().run_in_executor(None, busy.wait)
            async with asyncio.timeout(20):
                await store.close()
            assert not filling.done()
        finally:
            busy.set()
        await filling


@pytest.mark.only(api="asyncio", warm="real")
async def test_a_store_that_two_loops_enter_at_once_is_opened_once(opener: Any) -> None:
    store = AsyncStateStore.open(opener.url, archive=opener.archive, namespace=opener.namespace)
    together = threading.Barrier(4)

    def enter(me: int) -> str:
        async def main() -> str:
            together.wait()
            await store
            await store.session(f"s{me}").set("a", 1)
            return store.replica

        return asyncio.run(main())

    try:
        found = await asyncio.gather(*(asyncio.to_thread(enter, me) for me in range(4)))
        assert set(found) == {store.replica}
        assert [each.id for each in await store.admin.replicas()] == [store.replica]
    finally:
        await store.close()


@pytest.mark.only(cold=("sqlite", "postgres"))  # 'memory' is another archive each time, and another's is refused
async def test_one_that_cannot_be_opened_can_be_closed_and_opened_again(opener: Any, monkeypatch: Any) -> None:
    store: Any = AsyncStateStore.open(opener.url, archive=opener.archive, namespace=opener.namespace)
    broken = pytest.MonkeyPatch()

    async def fail(*_: Any) -> None:
        raise RuntimeError("no")

    broken.setattr(store._lifecycle, "_require_index", fail)
    with pytest.raises(RuntimeError, match="no"):
        await store
    broken.undo()
    await store.close()
    async with store:
        await store.session("s").set("a", 1)


async def test_a_thread_that_closes_waits_for_the_one_that_is_at_it(opener: Any, monkeypatch: Any) -> None:
    store = await opener()
    blocking = core(store).blocking
    home: Any = tiers(store)
    reached, go_on = threading.Event(), threading.Event()

    async def stop() -> None:
        reached.set()
        go_on.wait(10)

    monkeypatch.setattr(home.refill, "close", stop)
    first = threading.Thread(target=blocking.close)
    first.start()
    await asyncio.to_thread(reached.wait)
    second = threading.Thread(target=blocking.close)
    second.start()
    await asyncio.sleep(0.05)
    assert second.is_alive()
    blocking.close()  # holds up a loop that the first may wait for, so it does not
    go_on.set()
    for each in (first, second):
        await asyncio.to_thread(each.join)
    assert core(store)._lifecycle.tiers_in_use is None


# What is driven


def test_those_that_ask_sql_leave_connections_to_the_background() -> None:
    pools = Pools()
    assert sum(each._max_workers for each in (pools.sql, pools.passes, pools.starts)) < 15
    pools.close().join()


@asynchronous
async def test_a_pass_waits_for_no_start(store: Any) -> None:
    """Partitions that start may take seconds each, after a failover 64 of them; a commit waits for its pass."""
    port = tiers(store).port
    over = threading.Event()

    async def start() -> None:
        over.wait(20)

    async def archive() -> str:
        return "archived"

    starting = [asyncio.create_task(port.drive_start(start())) for _ in range(64)]
    await asyncio.sleep(0)
    try:
        assert await asyncio.wait_for(port.drive(archive()), 10) == "archived"
        assert not any(each.done() for each in starting)
    finally:
        over.set()
    await asyncio.gather(*starting)


@asynchronous
async def test_a_task_of_a_loop_is_asked_to_end_once(store: Any) -> None:
    """A second cancellation would end what it does upon the first."""
    loop, ended = asyncio.get_running_loop(), list[str]()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            ended.append("cleanly")

    job = LoopJob(loop, work, "work")
    await asyncio.sleep(0)
    job.ask()
    await job.stop()
    assert ended == ["cleanly"]


def test_a_thread_that_waits_is_woken_when_it_is_asked_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_LOOK_EVERY", 600.0)
    waits = threading.Event()

    async def work() -> None:
        waits.set()
        await SharedSignal().wait()

    for _ in range(200):  # it may be asked before it waits, and as it begins to
        waits.clear()
        job = BlockingJob(work, "waits")
        waits.wait()
        job.ask()
        job._thread.join(10)
        assert not job._thread.is_alive()


async def test_a_store_that_closes_warns_of_nothing(opener: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its links are not lost: they end."""
    store = await opener()
    await store.session("s").set("a", 1)
    assert await store.session("s").get("a") == 1
    await until(lambda: tiers(store).link.up)
    await store.close()
    assert not [each for each in caplog.records if each.levelno > logging.INFO]


async def write_some(store: Any) -> None:
    for number in range(10):
        await store.session(f"s{number}").set("n", number)
    async with store.batch() as batch:
        for number in range(10, 20):
            batch.on(store.session(f"s{number}")).set("n", number)


@fleet
@pytest.mark.parametrize("unarchived_bytes", [0, None])
async def test_what_a_store_wrote_is_archived_when_it_is_closed(opener: Any, unarchived_bytes: int | None) -> None:
    """Also where it does not remember its commits, and however long its archiver pauses."""
    given = {} if unarchived_bytes is None else {"unarchived_bytes": unarchived_bytes}
    writer = await opener(archive_every=60, **given)
    await write_some(writer)
    await writer.close()
    other = await opener(archiver=False)
    assert (await other.admin.stats())["unarchived"] == 0
    assert len(await other.sessions()) == 20


@fleet
async def test_a_store_without_an_archiver_waits_for_that_of_another_process(opener: Any) -> None:
    other = await opener(archive_every=0.5)
    writer = await opener(archiver=False, close_timeout=60)
    await write_some(writer)
    await writer.close()
    assert len(await other.sessions()) == 20


@fleet
async def test_where_no_worker_archives_a_store_closes_at_once_and_says_what_it_leaves(
    opener: Any, caplog: pytest.LogCaptureFixture
) -> None:
    writer = await opener(archiver=False, close_timeout=600)
    await write_some(writer)
    await writer.close()
    (said,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert re.fullmatch(
        r"close: up to 20 commits of this process in \d+ partitions are in Redis and not archived yet: no worker .*",
        said,
    )
    assert len(await (await opener(archiver=False)).sessions(fresh=True)) == 20


@fleet
@pytest.mark.only(warm="single")
async def test_closing_waits_for_the_archive_no_longer_than_it_may(
    opener: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """With 0 it does not even begin."""
    answers, asked = threading.Event(), list[Any]()

    def hang(*batches: Any) -> Any:
        asked.append(batches)
        answers.wait(60)
        return {}

    async def said(close_timeout: float) -> list[str]:
        store = await opener(archive_every=60, close_timeout=close_timeout)
        await until(lambda: tiers(store).archiver.places)  # its first look is over, and the next one far away
        await store.session(f"s{close_timeout}").set("n", 1)
        tiers(store).cold.archive = hang
        caplog.clear()
        await store.close()
        assert not answers.is_set()
        return [each.getMessage() for each in caplog.records if "not archived yet" in each.getMessage()]

    try:
        assert await said(0) == []
        assert not asked
        for seconds in (0.3, 3.0, 20.0):  # on a busy machine it may be over before SQL is asked
            (text,) = await said(seconds)
            assert "up to 1 commits of this process in 1 partitions" in text
            assert text.endswith(f"not archived yet: close_timeout={seconds:g} is over")
            if asked:
                break
        assert asked
    finally:
        answers.set()


@fleet
@pytest.mark.only(warm="single")
async def test_a_store_whose_archiver_hangs_in_sql_leaves_its_redis_in_order(
    opener: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits for Redis were cut while SQL was waited for, so the replica stayed on the roll, and Redis was blamed."""
    monkeypatch.setattr(background, "JOINED", 2.0)
    answers, asked = threading.Event(), threading.Event()

    def hang(*_: Any) -> Any:
        asked.set()
        answers.wait(60)
        return {}

    other = await opener(archiver=False)
    store = await opener(archive_every=0.05, close_timeout=0, retry_for=1.0)
    replica = core(store).replica
    tiers(store).cold.archive = hang  # type: ignore[method-assign]
    await store.session("s").set("n", 1)
    try:
        await until(asked.is_set)
        caplog.clear()
        began = time.monotonic()
        closing = asyncio.create_task(store.close())

        async def listed() -> list[str]:
            return [each.id for each in await other.admin.replicas()]

        while replica in await listed():
            assert not closing.done()
            await asyncio.sleep(0.02)
        assert time.monotonic() - began < 1.5, "it is off the roll before SQL is given up"
        await closing
        assert time.monotonic() - began < 4.0
        assert not await tiers(other).archiver.anybody(time.time())
        assert not [each for each in caplog.records if "close: " in each.getMessage()]
    finally:
        answers.set()


def test_a_thread_is_waited_for_since_it_was_first_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    async def hangs() -> None:
        over.wait(20)

    monkeypatch.setattr(background, "JOINED", 0.05)
    job = BlockingJob(hangs, "hangs")
    job.ask()
    until = job._until
    background.finish(job.stop())
    assert job._until == until
    assert job._thread.is_alive()
    over.set()
    job._thread.join()
