"""Redis comes back empty: a new epoch, offsets from the start, and nothing written since mistaken for archived."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from below import until
from rewinding import Rewound, rewindable

from distributed_state import (
    AsyncStateStore,
    Backpressure,
    ColdUnavailable,
    DurabilityUnknown,
    StateError,
    StateStore,
    WarmUnavailable,
)
from distributed_state.cold.store import ColdStore
from distributed_state.programs.servers import RedisServer, postgres_server, redis_server
from distributed_state.tiers import archive_pass, recovery
from distributed_state.values.journal import unpack


@pytest.fixture
def server() -> Any:
    with redis_server() as own:
        yield own


def opened(server: RedisServer, archive: str, **settings: Any) -> StateStore:
    settings = {"unarchived_bytes": 0} | settings
    return StateStore.open(server.url, archive=archive, namespace="n", partitions=4, **settings)


def emptied(server: RedisServer, how: str) -> None:
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
        store.admin.archive()
        before = session.version(fresh=True)
        emptied(server, how)
        assert session.get("n", fresh=True) == 9
        for n in range(10, 15):
            session.set("n", n)
        store.admin.archive()
        assert session.version(fresh=True) == before + 5
        assert [change.set["n"] for change in session.history()] == list(range(15))
        assert [change.version for change in session.history()] == list(range(1, before + 6))


def test_hot_does_not_go_on_telling_what_redis_lost(server: RedisServer, archive_url: str) -> None:
    """G10 after FLUSHALL: no message tells that a record is gone, the probe does."""
    with opened(server, archive_url, archiver=False, max_staleness=0.4) as store:
        session = store.session("s")
        session.set("n", 1)
        store.admin.archive()
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
    return store._core._lifecycle.tiers()


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

        for _ in range(3):
            asyncio.run(until(each_wrote_more(10), 30.0))
            emptied(server, "flush")
        asyncio.run(until(each_wrote_more(10), 30.0))
        stop.set()
        for thread in threads:
            thread.join()
        assert not failed
        last = [each[-1] for each in acknowledged]
        stores[0].admin.archive()
        session = stores[0].session("s")
        fields = session.get_all(fresh=True)
        # Written after the last loss, so neither dropped nor taken for archived.
        assert [fields[str(me)] for me in range(4)] == last
        history = session.history()
        assert [change.version for change in history] == list(range(1, session.version(fresh=True) + 1))
        for me in range(4):
            mine = [change.set[str(me)] for change in history if str(me) in change.set]
            assert mine == sorted(set(mine)), "twice or out of order"
        assert stores[0].admin.stats()["unarchived"] == 0
    finally:
        stop.set()
        for store in stores:
            store.close()


def test_a_batch_read_before_the_loss_is_not_archived_after_it(server: RedisServer, archive_url: str) -> None:
    """A slow archiver holds a batch of the old epoch while a new one starts."""
    with opened(server, archive_url, archiver=False) as slow, opened(server, archive_url, archiver=False) as quick:
        session = quick.session("s")
        session.set("n", 1)
        quick.admin.archive()
        session.set("n", 2)
        holding, go = threading.Event(), threading.Event()
        archive = ColdStore.archive

        def held(self: ColdStore, batches: Any) -> set[int]:
            if self is slow._core._lifecycle.cold:
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
            quick.admin.archive()
            go.set()
            thread.join()
        quick.admin.archive()
        assert [change.set["n"] for change in session.history()] == [1, 3]
        assert quick._core._lifecycle.cold.quarantined() == []


def drained(store: StateStore) -> Any:
    try:
        return store.admin.archive()
    except ColdUnavailable as error:
        return error


@pytest.mark.wide
async def test_sql_down_is_felt_only_where_sql_is_needed(server: RedisServer) -> None:
    """Writes and warm reads go on up to the journal's limit; cold ones say so; all is archived afterwards."""
    with postgres_server() as postgres:
        settings: dict[str, Any] = {"archive": postgres.url, "namespace": "n", "journal_entries": 40, "partitions": 1}
        async with AsyncStateStore.open(server.url, **settings, archive_every=0.02) as store:
            session = store.session("s")
            await session.set("n", 0)
            await store.admin.archive()
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
                return (await store.admin.stats())["unarchived"] == 0

            await until(caught_up, 30.0)
            await session.set("n", n + 1)
            assert [change.set["n"] for change in await session.history()] == list(range(n + 2))


def test_redis_down_is_said_and_over_when_it_is_back(archive_url: str) -> None:
    with redis_server("--appendonly", "yes") as own, opened(own, archive_url, retry_for=1.0, timeout=0.5) as store:
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


# Redis comes back as it was some time ago


@pytest.fixture
def rewound() -> Iterator[Rewound]:
    with rewindable() as own:
        yield own


def in_sql(store: StateStore, id: str) -> dict[int, Any]:
    """What SQL has of field n, by version, whatever its journal is like."""
    entries = store._core._lifecycle.cold.history(f"session:{id}")
    return {each.version: int(op.value) for each in entries for op in unpack(each.data) if op.name == b"n"}


@pytest.mark.parametrize("knows_the_cursor", [True, False])
def test_what_was_acknowledged_as_archived_is_there_when_redis_comes_back_older(
    rewound: Rewound, archive_url: str, knows_the_cursor: bool
) -> None:
    """G5 and G8: no offset or version of Redis' is believed, as SQL has other events there."""
    settings: dict[str, Any] = {"durability": "archived", "archiver": False, "max_staleness": 0}
    store = opened(rewound.server, archive_url, **settings)
    try:
        session, acknowledged = store.session("s"), dict[int, int]()
        for n in range(40):
            acknowledged[session.set("n", n)] = n
            if n == 19:
                rewound.note()
        rewound.rewind()
        if not knows_the_cursor:
            store.close()
            store = opened(rewound.server, archive_url, **settings)
            session = store.session("s")
        for n in range(100, 110):
            version = session.set("n", n)
            assert version not in acknowledged, "given before, to another commit"
            acknowledged[version] = n
        assert sorted(acknowledged) == list(range(1, 51))
        assert in_sql(store, "s") == acknowledged
        assert [change.version for change in session.history()] == list(range(1, 51))
        assert not store._core._lifecycle.tiers().archiver.diverged
        assert all(each.ok for each in store.admin.doctor() if each.name.startswith("partition"))
    finally:
        store.close()


def rewound_past_the_cursor(rewound: Rewound, archive: str) -> None:
    """Redis has ten commits, SQL forty. Of a journal that goes on from the ten nothing may pass for SQL's."""
    settings: dict[str, Any] = {"archiver": False, "max_staleness": 0, "archive_batch": 20}
    with opened(rewound.server, archive, **settings) as store:
        session = store.session("s")
        for n in range(40):
            session.set("n", n)
            if n == 9:
                store.admin.archive()
                rewound.note()
        store.admin.archive()
    rewound.rewind()
    with opened(rewound.server, archive, **settings) as store:
        session, before = store.session("s"), in_sql(store, "s")
        assert session.get("n") == 39, "what SQL has newer is not hidden"
        written = {session.set("n", n): n for n in range(100, 200)}
        store.admin.archive()
        assert in_sql(store, "s") == before | written
        assert sorted(before | written) == list(range(1, 141))


def test_a_rewound_redis_goes_on_from_what_sql_has(rewound: Rewound, archive_url: str) -> None:
    rewound_past_the_cursor(rewound, archive_url)


@pytest.mark.parametrize("archive_url", ["sqlite"], indirect=True)
def test_by_offsets_alone_what_sql_has_newer_would_be_hidden(
    rewound: Rewound, archive_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the journal's entry at the cursor is not looked at."""
    for module in (archive_pass, recovery):
        monkeypatch.setattr(module, "why_unmatched", lambda cursor, journal: "")
    with pytest.raises(AssertionError):
        rewound_past_the_cursor(rewound, archive_url)


def test_a_commit_that_redis_lost_is_not_called_archived_because_others_came_after_it(
    rewound: Rewound, archive_url: str
) -> None:
    """Nothing of SQL's was lost: the journal fits, and goes on past the offset, with somebody else's commits."""
    with (
        opened(rewound.server, archive_url, archiver=False, durability="archived") as writer,
        opened(rewound.server, archive_url, archiver=False) as other,
    ):
        writer.session("s").set("n", 0)
        rewound.note()
        its = writer._core._lifecycle.tiers().archiver
        reach = its.reach

        async def lost(*arguments: Any) -> Any:
            its.reach = reach
            rewound.rewind()
            for n in range(10, 15):
                other.session("s").set("n", n)
            other.admin.archive()
            return await reach(*arguments)

        its.reach = lost  # type: ignore[method-assign]
        with pytest.raises(DurabilityUnknown, match="lost"):
            writer.session("s").set("n", 1)
        assert sorted(in_sql(other, "s").values()) == [0, 10, 11, 12, 13, 14]
        assert writer.session("s").set("n", 15) == 7
        assert not other._core._lifecycle.tiers().archiver.diverged


def test_an_event_that_redis_lost_is_not_called_archived(rewound: Rewound, archive_url: str) -> None:
    with (
        opened(rewound.server, archive_url, archiver=False, durability="archived") as writer,
        opened(rewound.server, archive_url, archiver=False) as other,
    ):
        writer.emit("mail.sent", {"n": 0}, subject="x")
        rewound.note()
        stream = writer._core._lifecycle.tiers().stream
        emit = stream.emit

        async def lost(*arguments: Any) -> Any:
            written = await emit(*arguments)
            rewound.rewind()
            other.emit("mail.sent", {"n": 2}, subject="x")
            other.admin.archive()
            return written

        stream.emit = lost  # type: ignore[method-assign]
        with pytest.raises(DurabilityUnknown, match="lost"):
            writer.emit("mail.sent", {"n": 1}, subject="x")
        assert [event.data["n"] for event in other.admin.audit(type="mail.sent")] == [0, 2]
