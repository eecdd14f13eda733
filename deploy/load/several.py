"""What several do at once: waiters of a lock, an archiver with its journals, processes that write one record."""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import redis

from deploy.load.rows import Row
from distributed_state import StateStore


def hand_over(lock: Callable[[], Any], waiters: int, rounds: int) -> tuple[float, float, int]:
    """Median and 95th percentile of milliseconds from a release to the next grant, and how many were overtaken.

    Overtaken is who asked at least 10 ms before somebody that was served first.
    """
    released = [0.0]
    waits = list[float]()
    turns = list[tuple[float, float]]()
    begin = threading.Barrier(waiters)

    def worker() -> None:
        with lock():
            pass  # connected, so that from now on whoever asks first also arrives first
        begin.wait()
        for _ in range(rounds):
            asked = time.perf_counter()
            with lock():
                granted = time.perf_counter()
                if released[0]:
                    waits.append((granted - released[0]) * 1000)
                turns.append((granted, asked))
                time.sleep(0.005)
                released[0] = time.perf_counter()

    threads = [threading.Thread(target=worker) for _ in range(waiters)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asked_in_order = [asked for _, asked in sorted(turns)]
    overtaken = sum(
        any(later > asked + 0.01 for later in asked_in_order[:at]) for at, asked in enumerate(asked_in_order)
    )
    return statistics.median(waits), statistics.quantiles(waits, n=20)[-1], overtaken


def hand_off(url: str, store: StateStore) -> list[Row]:
    client = redis.Redis.from_url(url)
    session = store.session("lock")
    ours, slow, overtaken = hand_over(lambda: session.lock(wait=60, ttl=10), 8, 25)
    theirs, slowly, passed = hand_over(lambda: client.lock("bench:hand-off", timeout=10), 8, 5)
    versus = f"redis-py Lock: {theirs:.1f} ms, p95 {slowly:.0f} ms, {passed} overtaken"
    measured = f"{ours:.2f} ms, p95 {slow:.1f} ms, {overtaken} overtaken"
    reached = ours <= 3 and not overtaken
    return [Row("lock hand-off p50, 8 waiters", measured, versus, slow / slowly, "<= 3 ms, none overtaken", reached)]


def archiver(url: str, archive: str, name: str, goal: int, changes: int = 30_000) -> Row:
    namespace = f"bench-{name.lower()}"
    settings: dict[str, Any] = {"namespace": namespace, "archiver": False, "partitions": 8}
    with StateStore.open(url, archive=archive, **settings) as store:
        sessions = [store.session(f"s{n}") for n in range(50)]
        for at in range(changes // 50):
            with store.batch() as batch:
                for session in sessions:
                    batch.on(session).set("field", {"step": at, "note": "x" * 40})
        began = time.perf_counter()
        archived = store.admin.archive()
        rate = archived / (time.perf_counter() - began)
    assert archived == changes, f"{archived} archived of {changes}"
    return Row(f"archiver into {name}", f"{rate:,.0f} changes/s", f"{changes:,} changes of 50 records", rate / goal,
               f">= {goal:,}/s", rate >= goal)  # fmt: skip


def _fields(url: str, archive: str, me: int, count: int) -> None:
    with StateStore.open(url, archive=archive, namespace="bench-processes", archiver=False) as store:
        for n in range(count):
            store.session("fields").set(f"{me}-{n}", n)
            store.session("counter").increment("count")


def processes(url: str, archive: str, count: int = 1000) -> list[Row]:
    with StateStore.open(url, archive=archive, namespace="bench-processes") as store:
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=_fields, args=(url, archive, me, count)) for me in range(8)]
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds = time.perf_counter() - began
        fields = store.session("fields").get_all(fresh=True)
        counter = store.session("counter").get("count", fresh=True)
    expected = {f"{me}-{n}": n for me in range(8) for n in range(count)}
    return [
        Row("8 processes x 1,000 keys of one record", f"{len(fields):,} kept, {seconds:.0f} s", "8,000 written",
            len(fields) / 8000, "= 1x", fields == expected),
        Row("8 processes x 1,000 increments", f"{counter:,}", "8,000 added", counter / 8000, "= 1x", counter == 8000),
    ]  # fmt: skip
