"""How long after its link was cut a process answers everything from hot again, by how many records it has there.

The alternative is that each is read again by whoever wants it next, one round trip each; it is measured beside it.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

import redis

from deploy.load.curves.collection import keep
from deploy.load.curves.curve import Curve, Progress
from distributed_state import StateStore
from distributed_state.programs.servers import redis_server

_GROUP = 500
_ROUNDS = 3
_LIMIT = 120.0  # seconds
_MOST = 5_000  # records that are read singly, for the alternative


def _until(store: StateStore, entries: range) -> None:
    """Wait until the store has so many records in hot."""
    deadline = time.monotonic() + _LIMIT
    while store.admin.stats()["hot_entries"] not in entries:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{store.admin.stats()['hot_entries']} records are in hot, after {_LIMIT:g} s")
        time.sleep(0.002)


def _hits(store: StateStore, first: int, count: int) -> int:
    """How many of some records are answered from hot."""
    before = store.admin.stats()["hot_hits"]
    store.get_many([store.session(f"s{number}") for number in range(first, first + count)])
    return store.admin.stats()["hot_hits"] - before


def _cut(store: StateStore, client: redis.Redis, size: int) -> float:
    """The seconds from a cut until all is in hot again; checked by reading it."""
    began = time.perf_counter()
    client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    _until(store, range(size))
    _until(store, range(size, size + 1))
    while not _hits(store, 0, 1):
        time.sleep(0.002)  # the new connection has not proved itself yet
    taken = time.perf_counter() - began
    hits = sum(_hits(store, first, min(_GROUP, size - first)) for first in range(0, size, _GROUP))
    if hits != size:
        raise AssertionError(f"{hits} of {size} records were answered from hot")
    return taken


def _singly(store: StateStore, size: int) -> float:
    """The seconds that it takes to ask for each of them."""
    count = min(size, _MOST)
    began = time.perf_counter()
    for number in range(count):
        store.session(f"s{number}").get("field-0", fresh=True)
    return (time.perf_counter() - began) * size / count


def _refill(url: str, sizes: Sequence[int], told: Any) -> None:
    """Tell, for each size, the best seconds of some cuts, and those of reading as many one by one."""
    settings: dict[str, Any] = {"hot_entries": 10**7, "hot_bytes": 2**34, "unarchived_bytes": 0, "archiver": False}
    settings |= {"journal_entries": 10**7, "journal_bytes": 2**32}
    with StateStore.open(url, archive="memory", **settings) as store, redis.Redis.from_url(url) as client:
        made = 0
        for size in sizes:
            while made < size:
                keep(store, made, min(_GROUP, size - made))
                made += min(_GROUP, size - made)
            told.send((min(_cut(store, client, size) for _ in range(_ROUNDS)), _singly(store, size)))


def refills(sizes: Sequence[int], progress: Progress) -> list[tuple[float, float]]:
    """For each size: the seconds until all is in hot again, and those of as many single reads."""
    found = []
    context = multiprocessing.get_context("spawn")
    with redis_server() as server:
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_refill, args=(server.url, sizes, theirs))
        worker.start()
        theirs.close()
        for size in sizes:
            progress(f"{size} records in hot, and its link is cut")
            found.append(ours.recv())
        worker.join()
    return found


def refill(sizes: Sequence[int], progress: Progress) -> Curve:
    """What the best of three cuts takes, as a part of what as many single reads take on the same machine just then."""
    found = refills(sizes, progress)
    costs = [taken / singly for taken, singly in found]
    taken, singly = (each / sizes[-1] * 1e6 for each in found[-1])
    name = f"hot is back after a cut ({taken:.0f} us a record, singly {singly:.0f})"
    return Curve(name, "of single reads", "hot records", list(sizes), costs, 0.7)
