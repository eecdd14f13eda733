"""What an archiver feels of maintenance that runs beside it. Law: both work on the same records of one PostgreSQL.

A pass archives 1,000 changes of as many of the records that are purged or compacted, every tenth of a second: some
10,000 changes a second. Maintenance runs in a process of its own, as its command does.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from deploy.load.curves.curve import Curve, Progress
from deploy.load.curves.purging import VERSIONS, change, compact, fill
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Batch
from distributed_state.programs.servers import postgres_server

_BATCH = 1_000
_EVERY = 0.1
_ALONE = 30  # passes before maintenance, and as many after it
Maintain = Callable[[ColdStore, int, int], None]


@dataclass(frozen=True)
class Beside:
    """The seconds of each pass alone and beside maintenance, and of maintenance."""

    alone: list[float]
    beside: list[float]
    took: float

    @property
    def ratio(self) -> float:
        """How much longer the median pass takes."""
        return median(self.beside) / median(self.alone)


class _Archiver:
    """Passes, one after the other, that go on where `fill` ended."""

    def __init__(self, cold: ColdStore, changes: int) -> None:
        cursor = cold.cursor(0)
        assert cursor is not None
        self._cold, self._epoch = cold, cursor.epoch
        self._number, self._event = cursor.offset, cursor.event
        self._records = changes // VERSIONS
        self._due = time.monotonic()

    def seconds(self) -> float:
        """How long the next pass takes, once it is due."""
        first = self._number
        entries = [change(number, self._records) for number in range(first, first + _BATCH)]
        time.sleep(max(0.0, self._due - time.monotonic()))
        self._due = time.monotonic() + _EVERY
        began = time.perf_counter()
        moved = self._cold.archive([Batch(0, self._epoch, first, entries, self._event)])
        taken = time.perf_counter() - began
        assert moved.keys() == {0}, "somebody else archives"
        self._number, self._event = first + _BATCH, entries[-1].event
        return taken


def _purge(cold: ColdStore, changes: int, last_ms: int) -> None:
    cold.purge(last_ms - changes // 10)


def _compact(cold: ColdStore, _: int, last_ms: int) -> None:
    compact(cold, last_ms)


def _maintain(url: str, namespace: str, work: Maintain, changes: int, last_ms: int, said: Any) -> None:
    """Do it when asked to, and tell how long it took."""
    cold = ColdStore.open(url, namespace)
    try:
        said.send("ready")
        said.recv()
        began = time.perf_counter()
        work(cold, changes, last_ms)
        said.send(time.perf_counter() - began)
    finally:
        cold.close()


def beside(url: str, changes: int, work: Maintain, *, alone: int = _ALONE) -> Beside:
    """The passes of an archiver before, while and after so many changes are worked on, most of them at least."""
    namespace = f"{work.__name__.strip('_')}{changes}"
    cold = ColdStore.open(url, namespace)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    try:
        last_ms = fill(cold, changes)
        given = (url, namespace, work, changes, last_ms, theirs)
        worker = context.Process(target=_maintain, args=given, daemon=True)
        worker.start()
        theirs.close()
        assert ours.recv() == "ready"
        archiver = _Archiver(cold, changes)
        archiver.seconds()
        before = [archiver.seconds() for _ in range(alone)]
        ours.send("go")
        during = [archiver.seconds()]
        while not ours.poll():
            during.append(archiver.seconds())
        took = float(ours.recv())
        worker.join()
        return Beside(before + [archiver.seconds() for _ in range(alone)], during, took)
    finally:
        cold.close()


def _curve(sizes: Sequence[int], progress: Progress, name: str, work: Maintain, alone: int) -> Curve:
    costs = []
    with postgres_server() as database:
        for size in sizes:
            progress(f"{name} of {size} changes")
            costs.append(beside(database.url, size, work, alone=alone).ratio)
    return Curve(f"an archiver's pass beside {name} : alone", "", "changes", list(sizes), costs, 1.3)


def beside_purge(sizes: Sequence[int], progress: Progress, *, alone: int = _ALONE) -> Curve:
    """The median pass while all but the newest tenth of so many changes is purged, over the median of one alone."""
    return _curve(sizes, progress, "purge", _purge, alone)


def beside_compact(sizes: Sequence[int], progress: Progress, *, alone: int = _ALONE) -> Curve:
    """The same while all of them are compacted but the newest of each record."""
    return _curve(sizes, progress, "compact", _compact, alone)


def _said(seconds: Sequence[float]) -> str:
    inner = sorted(seconds)
    at = [inner[int(len(inner) * part)] for part in (0.5, 0.95)] + inner[-1:]
    return f"{len(inner)} passes, p50 / p95 / max " + " / ".join(f"{each * 1000:.0f}" for each in at) + " ms"


if __name__ == "__main__":
    import sys

    for size in map(int, sys.argv[1:] or ["160000"]):
        for work in (_purge, _compact):
            with postgres_server() as database:
                found = beside(database.url, size, work)
            name = work.__name__.strip("_")
            print(f"{name} of {size} changes: {found.took:.1f} s; median pass {found.ratio:.2f} times that alone")
            print(f"  alone: {_said(found.alone)}\n  beside: {_said(found.beside)}", flush=True)
