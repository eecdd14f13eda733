"""What it takes to remove old history: changes and hidden messages, while what is newer stays readable."""

from __future__ import annotations

import time
from collections.abc import Sequence

from deploy.load.curves.curve import Curve, Progress
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Batch
from distributed_state.programs.servers import postgres_server
from distributed_state.values.journal import JournalEntry, pack

_VERSIONS = 20
_BATCH = 2_000
_DATA = pack([(b"s", b"step", b"1"), (b"s", b"note", b'"' + b"the window seat, if there is one; " * 4 + b'"')])


def _fill(cold: ColdStore, changes: int) -> int:
    """Archive so many changes; the time of the last, in milliseconds."""
    cursor = cold.mint(0, None)
    assert cursor is not None
    records, offset, event = changes // _VERSIONS, 0, ""
    while offset < changes:
        entries = [
            JournalEntry(
                number + 1, f"3f9a1c0b77de.{number + 1}.9c1e22aa", f"session:s{number % records}",
                number // records + 1, 1_000_000 + number, "write", "", 0, _DATA, total_bytes=0,
            )
            for number in range(offset, min(offset + _BATCH, changes))
        ]  # fmt: skip
        assert cold.archive([Batch(0, cursor.epoch, offset, entries, event)])
        offset, event = entries[-1].offset, entries[-1].event
    return 1_000_000 + changes


def purging(sizes: Sequence[int], progress: Progress) -> Curve:
    """`purge` of all but the newest tenth of so many changes, twenty of each record, in PostgreSQL."""
    costs = []
    with postgres_server() as database:
        for size in sizes:
            cold = ColdStore.open(database.url, f"p{size}")
            try:
                progress(f"{size} changes are archived")
                last = _fill(cold, size)
                began = time.perf_counter()
                removed = cold.purge(last - size // 10).changes
                costs.append((time.perf_counter() - began) / removed * 1e6)
            finally:
                cold.close()
    return Curve("purge", "us a change", "changes", list(sizes), costs, 25.0)
