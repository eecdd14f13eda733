"""What it takes to remove old history, and to pack it, while all that is newer stays readable."""

from __future__ import annotations

import time
from collections.abc import Sequence

from deploy.load.curves.curve import Curve, Progress
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Batch
from distributed_state.programs.servers import postgres_server
from distributed_state.values.journal import JournalEntry, pack

VERSIONS = 20
_BATCH = 2_000
_BEGAN_MS = 1_000_000
_DATA = pack([(b"s", b"step", b"1"), (b"s", b"note", b'"' + b"the window seat, if there is one; " * 4 + b'"')])


def change(number: int, records: int) -> JournalEntry:
    """The change with this number, from 0 on, of so many records that take turns."""
    return JournalEntry(
        number + 1, f"3f9a1c0b77de.{number + 1}.9c1e22aa", f"session:s{number % records}",
        number // records + 1, _BEGAN_MS + number, "write", "", 0, _DATA, total_bytes=0,
    )  # fmt: skip


def fill(cold: ColdStore, changes: int) -> int:
    """Archive so many changes; the time after the last, in milliseconds."""
    cursor = cold.mint(0, None)
    assert cursor is not None
    records, offset, event = changes // VERSIONS, 0, ""
    while offset < changes:
        entries = [change(number, records) for number in range(offset, min(offset + _BATCH, changes))]
        assert cold.archive([Batch(0, cursor.epoch, offset, entries, event)])
        offset, event = entries[-1].offset, entries[-1].event
    return _BEGAN_MS + changes


def purging(sizes: Sequence[int], progress: Progress) -> Curve:
    """`purge` of all but the newest tenth of so many changes, twenty of each record, in PostgreSQL."""
    costs = []
    with postgres_server() as database:
        for size in sizes:
            cold = ColdStore.open(database.url, f"p{size}")
            try:
                progress(f"{size} changes are archived")
                last = fill(cold, size)
                began = time.perf_counter()
                removed = cold.purge(last - size // 10).changes
                costs.append((time.perf_counter() - began) / removed * 1e6)
            finally:
                cold.close()
    return Curve("purge", "us a change", "changes", list(sizes), costs, 25.0)


def compacting(sizes: Sequence[int], progress: Progress) -> Curve:
    """`compact` of all of so many changes but the newest of each record."""
    costs = []
    with postgres_server() as database:
        for size in sizes:
            cold = ColdStore.open(database.url, f"c{size}")
            try:
                progress(f"{size} changes are archived")
                last = fill(cold, size)
                began = time.perf_counter()
                packed = compact(cold, last)
                costs.append((time.perf_counter() - began) / packed * 1e6)
            finally:
                cold.close()
    return Curve("compact", "us a change", "changes", list(sizes), costs, 50.0)


def compact(cold: ColdStore, before_ms: int) -> int:
    """Pack all that is older, page by page as a store does; how many changes that were."""
    packed = 0
    after: int | None = 0
    while after is not None:
        done, after = cold.compact(before_ms, after=after)
        packed += done.changes
    return packed
