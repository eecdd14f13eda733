"""How long a full collection of Python's garbage stops a process, by how many records it has in hot."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

from deploy.load.curves.curve import Curve, Progress
from distributed_state import StateStore
from distributed_state.programs.servers import redis_server

_GROUP = 500


def keep(store: StateStore, first: int, count: int) -> None:
    """Have so many records more in hot."""
    sessions = [store.session(f"s{first + number}") for number in range(count)]
    with store.batch() as batch:
        for session in sessions:
            batch.on(session).set_many({f"field-{n}": "x" * 20 for n in range(5)})
    deadline = time.monotonic() + 20
    hits = 0
    while hits < count and time.monotonic() < deadline:
        before = store.stats()["hot_hits"]
        store.get_many(sessions)
        hits = store.stats()["hot_hits"] - before


def _collect(url: str, sizes: Sequence[int], told: Any) -> None:
    """Tell, for each size, how many are in hot, the milliseconds of a collection, and how many objects it walks more.

    Collections of a process without records are left out: what there is before them is frozen.
    """
    settings: dict[str, Any] = {"hot_entries": 10**7, "hot_bytes": 2**34, "memory_bytes": 0, "archiver": False}
    settings |= {"journal_entries": 10**7, "journal_bytes": 2**32}
    with StateStore.open(url, archive="memory", **settings) as store:
        keep(store, 0, 1)
        gc.collect()
        gc.freeze()
        walked = len(gc.get_objects())
        made = 1
        for size in sizes:
            while made < size:
                keep(store, made, min(_GROUP, size - made))
                made += min(_GROUP, size - made)
            taken = []
            for _ in range(5):
                began = time.perf_counter()
                gc.collect()
                taken.append((time.perf_counter() - began) * 1000)
            told.send((store.stats()["hot_entries"], sorted(taken)[2], len(gc.get_objects()) - walked))


def collections(sizes: Sequence[int], progress: Progress) -> list[tuple[int, float, int]]:
    """For each size: records in hot, milliseconds of a full collection, objects that it walks because of them."""
    found = []
    context = multiprocessing.get_context("spawn")
    with redis_server() as server:
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_collect, args=(server.url, sizes, theirs))
        worker.start()
        theirs.close()
        for size in sizes:
            progress(f"{size} records in hot")
            found.append(ours.recv())
        worker.join()
    return found


def collection(sizes: Sequence[int], progress: Progress) -> Curve:
    """How long a full collection takes: the median of five."""
    costs = [taken for _, taken, _ in collections(sizes, progress)]
    return Curve("a full gc.collect()", "ms", "hot records", list(sizes), costs, 30.0)
