"""fork(), threads and event loops: what is inherited is never used."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed_state import AsyncStateStore, ConfigurationError, Locked, StateStore


def in_child(work: Callable[[], Any]) -> Any:
    """Run in a forked child; what it returns, as JSON. A child that raises fails the test."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = json.dumps({"answer": work()})
        except BaseException:  # noqa: BLE001 - the parent reports it
            answer = json.dumps({"error": traceback.format_exc()})
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = json.loads(pipe.read() or '{"error": "the child died"}')
    os.waitpid(child, 0)
    assert "error" not in found, found["error"]
    return found["answer"]


def warmed(store: StateStore, id: str) -> Any:
    """A session that is hot."""
    session = store.session(id)
    deadline = time.monotonic() + 10
    while not store._core._lifecycle.tiers().hot.entries:
        session.get("n")
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return session


# The fork is what is tested; Python warns of it where threads run.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_is_a_replica_of_its_own(redis_url: str, archive_url: str, namespace: str) -> None:
    """Forked with a warm hot cache, a held lease and open connections."""
    with StateStore.open(redis_url, archive=archive_url, namespace=namespace) as store:
        store.session("s").set("n", 1)
        session, replica = warmed(store, "s"), store.replica

        def child() -> dict[str, Any]:
            found: dict[str, Any] = {
                "entries": len(store._core._lifecycle.tiers().hot.entries),
                "new": store.replica != replica,
            }
            try:
                session.set("n", 99)
            except Locked:
                found["locked"] = True
            found["read"] = session.get("n")
            other = store.session("child")
            found["versions"] = [other.set("n", n) for n in range(50)]
            with other.lock(wait=1):
                other.increment("n")
            found["history"] = len(other.history())
            store.close()
            return found

        with session.lock(ttl=5, wait=0) as lease:
            found = in_child(child)
            # The child has not released it, and the parent's connections still belong to the parent.
            assert session.set("n", 2) == 2
            assert not lease.lost
        assert found == {
            "entries": 0, "new": True, "locked": True, "read": 1, "versions": list(range(1, 51)), "history": 51,
        }  # fmt: skip
        assert session.get("n", fresh=True) == 2
        assert store.session("child").get("n", fresh=True) == 50
        assert len(session.history()) == 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_leaves_its_parents_lock_does_not_release_it(
    redis_url: str, tmp_path: Path, namespace: str
) -> None:
    """The `with` block that the fork happened in ends in the child too."""
    with StateStore.open(redis_url, archive=f"sqlite:///{tmp_path}/a.db", namespace=namespace) as store:
        session = store.session("s")
        lease = session.lock(ttl=5, wait=0).acquire()

        def child() -> bool:
            lease.release()
            return True

        assert in_child(child)
        assert session.set("n", 1) == 1
        lease.release()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_embedded_store_says_that_it_cannot_be_shared(tmp_path: Path) -> None:
    with StateStore.open(archive=f"sqlite:///{tmp_path}/a.db") as store:
        session = store.session("s")
        session.set("n", 1)

        def child() -> str:
            try:
                session.set("n", 2)
            except ConfigurationError as error:
                return str(error)
            return "nothing"

        assert "forked" in in_child(child)
        assert session.set("n", 3) == 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_closes_an_embedded_store_does_not_free_its_file(tmp_path: Path) -> None:
    with StateStore.open(archive=f"sqlite:///{tmp_path}/state.db") as store:
        assert in_child(store.close) is None
        with pytest.raises(ConfigurationError, match="another store"):
            StateStore.open(archive=f"sqlite:///{tmp_path}/state.db")
        store.session("s").set("a", 1)


async def test_the_blocking_store_works_inside_a_running_loop(redis_url: str, tmp_path: Path, namespace: str) -> None:
    with StateStore.open(redis_url, archive=f"sqlite:///{tmp_path}/a.db", namespace=namespace) as store:
        session = store.session("s")
        with session.lock():
            assert session.set("n", 1) == 1
        assert session.get("n") == 1


def test_one_asyncio_store_serves_several_loops(redis_url: str, tmp_path: Path, namespace: str) -> None:
    """One after another, and at once in threads; each loop sees what the others wrote."""
    store = AsyncStateStore.open(redis_url, archive=f"sqlite:///{tmp_path}/a.db", namespace=namespace)

    async def work(me: int) -> int:
        async with store.session("lock").lock(wait=20):
            await store.session("s").increment("n")
        return await store.session(f"mine-{me}").set("n", me)

    async def first() -> None:
        await store
        await work(0)

    async def closing() -> Any:
        found = await store.session("s").get("n", fresh=True)
        await store.close()
        return found

    asyncio.run(first())
    asyncio.run(work(1))
    threads = [threading.Thread(target=lambda n=n: asyncio.run(work(n))) for n in range(2, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asyncio.run(closing()) == 6


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_child_that_is_forked_inside_a_running_loop_has_both_apis(
    redis_url: str, archive_url: str, namespace: str
) -> None:
    """Nothing of that loop runs there, though its thread is in the middle of it."""
    async with AsyncStateStore.open(redis_url, archive=archive_url, namespace=namespace) as store:
        replica = store.replica
        await store.session("s").set("n", 1)
        store.blocking.session("s").set("n", 2)

        def child() -> list[Any]:
            store.blocking.session("s").set("n", 3)
            anew = store.replica != replica
            written = asyncio.run(_set(store, 4))
            store.blocking.close()
            return [anew, written]

        assert in_child(child) == [True, 4]
        assert await store.session("s").get("n", fresh=True) == 4
        assert await store.session("s").set("n", 5) == 5
        assert store.replica == replica


async def _set(store: AsyncStateStore, value: int) -> int:
    return await store.session("s").set("n", value)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_remembers_nothing_of_its_parents_commits(redis_url: str, archive_url: str, namespace: str) -> None:
    """It could not let go of them, and its parent remembers them; what it commits itself it remembers."""
    with StateStore.open(
        redis_url, archive=archive_url, namespace=namespace, archiver=False, unarchived_bytes=2**20
    ) as store:
        store.session("s").set("n", 1)

        def child() -> list[int]:
            before = len(store._core._lifecycle.tiers().unarchived)
            store.session("s").set("n", 2)
            return [before, len(store._core._lifecycle.tiers().unarchived)]

        assert in_child(child) == [0, 1]
        assert len(store._core._lifecycle.tiers().unarchived) == 1
