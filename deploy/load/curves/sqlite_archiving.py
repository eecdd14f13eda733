"""What it takes to carry commits into a file of SQLite, as a store opens it: each batch is on the disk when it returns.

A change sets one field, and adds a message of 270 bytes or none, as `archiving` says.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from statistics import median

from deploy.load.curves.archiving import CHANGES, Steps, field, field_and_message, seconds_of
from deploy.load.curves.curve import Curve, Progress
from distributed_state.cold.store import ColdStore

_TURNS = 5
_KINDS: dict[str, Steps] = {"a field and a message": field_and_message, "a field": field}


def _seconds(size: int, steps: Steps) -> float:
    with tempfile.TemporaryDirectory(prefix="distributed-state-growth-") as folder:
        cold = ColdStore.open(f"sqlite:///{folder}/archive.db", "n")
        try:
            return seconds_of(cold, size, steps)
        finally:
            cold.close()


def sqlite_archiving(sizes: Sequence[int], progress: Progress, *, turns: int = _TURNS) -> list[Curve]:
    """The archiver's time for one change, each time into a new file; in turns, the median."""
    taken: dict[str, list[list[float]]] = {kind: [[] for _ in sizes] for kind in _KINDS}
    for turn in range(turns):
        for kind, steps in _KINDS.items():
            for at, size in enumerate(sizes):
                progress(f"{size} records, turn {turn + 1} of {turns}: {kind}")
                taken[kind][at].append(_seconds(size, steps) / CHANGES * 1e6)
    return [
        Curve(f"archiver into SQLite, {kind}", "us a change", "active records", list(sizes), costs, 1e6 / 60_000)
        for kind, costs in ((kind, [median(each) for each in found]) for kind, found in taken.items())
    ]
