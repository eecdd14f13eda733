"""What records in hot take: the bytes of the process, and how long a full collection of Python's garbage stops it."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from deploy.load.curves.curve import Curve, Progress
from deploy.load.hot_reads import resident
from distributed_state import StateStore
from distributed_state.programs.servers import redis_server

_GROUP = 500


class Hot(NamedTuple):
    """Records in hot, and what is there because of them: objects that a collection walks, bytes of the process."""

    records: int
    collected_ms: float
    objects: int
    grown: int


def keep(store: StateStore, first: int, count: int) -> None:
    """Have so many records more in hot."""
    sessions = [store.session(f"s{first + number}") for number in range(count)]
    with store.batch() as batch:
        for session in sessions:
            batch.on(session).set_many({f"field-{n}": "x" * 20 for n in range(5)})
    deadline = time.monotonic() + 20
    hits = 0
    while hits < count and time.monotonic() < deadline:
        before = store.admin.stats()["hot_hits"]
        store.get_many(sessions)
        hits = store.admin.stats()["hot_hits"] - before


def _collect(url: str, sizes: Sequence[int], told: Any) -> None:
    """Tell, for each size, what there is then. What was there before the records is left out: it is frozen."""
    settings: dict[str, Any] = {"hot_entries": 10**7, "hot_bytes": 2**34, "unarchived_bytes": 0, "archiver": False}
    settings |= {"journal_entries": 10**7, "journal_bytes": 2**32}
    with StateStore.open(url, archive="memory", **settings) as store:
        keep(store, 0, 1)
        gc.collect()
        gc.freeze()
        walked, resident_before = len(gc.get_objects()), resident()
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
            hot = store.admin.stats()["hot_entries"]
            told.send(Hot(hot, sorted(taken)[2], len(gc.get_objects()) - walked, resident() - resident_before))


def collections(sizes: Sequence[int], progress: Progress) -> list[Hot]:
    """What so many records take, for each size."""
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


def collection(sizes: Sequence[int], progress: Progress) -> list[Curve]:
    """How long a full collection takes, the median of five; and the bytes of a record with 100 letters in 5 fields."""
    found = collections(sizes, progress)
    each = [there.grown / there.records for there in found]
    return [
        Curve("a full gc.collect()", "ms", "hot records", list(sizes), [there.collected_ms for there in found], 30.0),
        Curve("a record of 5 fields, 100 letters, in hot", "bytes", "hot records", list(sizes), each, 3_500.0),
    ]
