"""Redis comes back empty: a new epoch, offsets from the start, and nothing written since mistaken for archived."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from below import until

from distributed_state import AsyncStateStore, Backpressure, ColdUnavailable, StateError, StateStore, WarmUnavailable
from distributed_state.cold.store import ColdStore
from distributed_state.servers import RedisServer, postgres_server, redis_server


@pytest.fixture
def server() -> Any:
    with redis_server() as own:
        yield own


def opened(server: RedisServer, archive: str, **settings: Any) -> StateStore:
    return StateStore.open(server.url, archive=archive, namespace="n", partitions=4, **settings)


def emptied(server: RedisServer, how: str) -> None:
    import redis

    if how == "flush":
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
    else:
        server.kill()
        server.start()


@pytest.mark.parametrize("how", ["flush", "restart"])
def test_what_was_archived_is_back_and_all_after_is_archived(server: RedisServer, archive_url: str, how: str) -> None:
    with opened(server, archive_url, archive_every=0.02) as store:
        session = store.session("s")
        for n in range(10):
            session.set("n", n)
        store.archive()
        before = session.version(fresh=True)
        emptied(server, how)
        assert session.get("n", fresh=True) == 9
        for n in range(10, 15):
            session.set("n", n)
        store.archive()
        assert session.version(fresh=True) == before + 5
        assert [change.set["n"] for change in session.history()] == list(range(15))
        assert [change.version for change in session.history()] == list(range(1, before + 6))


def test_hot_does_not_go_on_telling_what_redis_lost(server: RedisServer, archive_url: str) -> None:
    """G10 after FLUSHALL: no message tells that a record is gone, the probe does."""
    with opened(server, archive_url, archiver=False, max_staleness=0.4) as store:
        session = store.session("s")
        session.set("n", 1)
        store.archive()
        session.set("n", 2)  # not archived

        async def hot() -> bool:
            session.get("n")
            return bool(tiers_of(store).hot.entries)

        asyncio.run(until(hot))
        emptied(server, "flush")

        async def back() -> bool:
            return bool(session.get("n") == 1)

        asyncio.run(until(back, 2.0))


def tiers_of(store: StateStore) -> Any:
    return store._twin.tiers()


def test_writers_on_several_replicas_go_on_under_one_epoch(server: RedisServer, archive_url: str) -> None:
    """Four replicas write while Redis is emptied again and again; versions stay dense, what was archived stays."""
    stores = [opened(server, archive_url, archive_every=0.01) for _ in range(4)]
    stop, acknowledged, failed = threading.Event(), [list[int]() for _ in stores], list[StateError]()

    def write(me: int) -> None:
        session, n = stores[me].session("s"), 0
        try:
            while not stop.is_set():
                n += 1
                session.set(f"{me}", n)
                acknowledged[me].append(n)
        except StateError as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(me,)) for me in range(4)]
    try:
        for thread in threads:
            thread.start()

        def each_wrote_more(count: int) -> Callable[[], bool]:
            wanted = [len(each) + count for each in acknowledged]
            return lambda: bool(failed) or all(len(a) >= n for a, n in zip(acknowledged, wanted, strict=True))

        for _ in range(4):
            asyncio.run(until(each_wrote_more(30), 30.0))
            emptied(server, "flush")
        asyncio.run(until(each_wrote_more(30), 30.0))
        stop.set()
        for thread in threads:
            thread.join()
        assert not failed
        last = [each[-1] for each in acknowledged]
        stores[0].archive()
        session = stores[0].session("s")
        fields = session.get_all(fresh=True)
        # Written after the last loss, so neither dropped nor taken for archived.
        assert [fields[str(me)] for me in range(4)] == last
        history = session.history()
        assert [change.version for change in history] == list(range(1, session.version(fresh=True) + 1))
        for me in range(4):
            mine = [change.set[str(me)] for change in history if str(me) in change.set]
            assert mine == sorted(set(mine)), "twice or out of order"
        assert stores[0].stats()["unarchived"] == 0
    finally:
        stop.set()
        for store in stores:
            store.close()


def test_a_batch_read_before_the_loss_is_not_archived_after_it(server: RedisServer, archive_url: str) -> None:
    """A slow archiver holds a batch of the old epoch while a new one starts."""
    with opened(server, archive_url, archiver=False) as slow, opened(server, archive_url, archiver=False) as quick:
        session = quick.session("s")
        session.set("n", 1)
        quick.archive()
        session.set("n", 2)
        holding, go = threading.Event(), threading.Event()
        archive = ColdStore.archive

        def held(self: ColdStore, batches: Any) -> set[int]:
            if self is slow._twin._cold:
                holding.set()
                assert go.wait(20)
            return archive(self, batches)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ColdStore, "archive", held)
            thread = threading.Thread(target=lambda: outcome.append(drained(slow)))
            outcome: list[Any] = []
            thread.start()
            assert holding.wait(10)
            emptied(server, "flush")
            assert session.get("n", fresh=True) == 1
            session.set("n", 3)
            quick.archive()
            go.set()
            thread.join()
        quick.archive()
        assert [change.set["n"] for change in session.history()] == [1, 3]
        assert quick._twin._cold.quarantined() == []


def drained(store: StateStore) -> Any:
    try:
        return store.archive()
    except ColdUnavailable as error:
        return error


async def test_sql_down_is_felt_only_where_sql_is_needed(server: RedisServer) -> None:
    """Writes and warm reads go on up to the journal's limit; cold ones say so; all is archived afterwards."""
    with postgres_server() as postgres:
        settings: dict[str, Any] = {"archive": postgres.url, "namespace": "n", "journal_entries": 40, "partitions": 1}
        async with AsyncStateStore.open(server.url, **settings, archive_every=0.02) as store:
            session = store.session("s")
            await session.set("n", 0)
            await store.archive()
            postgres.kill()
            n = 0
            with pytest.raises(Backpressure):
                while True:
                    await session.set("n", n + 1)
                    n += 1
            assert n >= 39
            assert await session.get("n", fresh=True) == n
            with pytest.raises(ColdUnavailable):
                await store.session("never heard of").get("n")
            with pytest.raises(ColdUnavailable):
                await session.history()
            postgres.start()

            async def caught_up() -> bool:
                return (await store.stats())["unarchived"] == 0

            await until(caught_up, 30.0)
            await session.set("n", n + 1)
            assert [change.set["n"] for change in await session.history()] == list(range(n + 2))


def test_redis_down_is_said_and_over_when_it_is_back(archive_url: str) -> None:
    with redis_server("--appendonly", "yes") as own, opened(own, archive_url, retry_for=0.2, timeout=0.5) as store:
        session = store.session("s")
        session.set("n", 1)
        own.kill()
        with pytest.raises(WarmUnavailable):
            session.set("n", 2)
        with pytest.raises(WarmUnavailable):
            session.get("n", fresh=True)
        own.start()
        assert session.get("n", fresh=True) == 1
        assert session.set("n", 3) == 2
