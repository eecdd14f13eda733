"""What a start of an embedded store takes that was started often before."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Sequence

from deploy.load.curves.curve import Curve, Progress
from distributed_state import StateStore
from distributed_state.values.keys import Keys
from distributed_state.values.model import Ref

_PARTITIONS = 64


def _one_each() -> list[str]:
    """Ids of sessions, one in each partition."""
    keys = Keys("default", _PARTITIONS)
    found: dict[int, str] = {}
    for number in itertools.count():
        found.setdefault(keys.partition_of(Ref("session", f"s{number}").text), f"s{number}")
        if len(found) == _PARTITIONS:
            return list(found.values())
    raise AssertionError("there are ids without end")


def _start(archive: str, ids: Sequence[str]) -> float:
    """Seconds to open an embedded store, and to write to these sessions."""
    began = time.perf_counter()
    with StateStore.open(archive=archive, partitions=_PARTITIONS) as store:
        for id in ids:
            store.session(id).set("n", 1)
        return time.perf_counter() - began


def starts(sizes: Sequence[int], progress: Progress) -> Curve:
    """What a start of an embedded store takes that was started so often before: the median of five."""
    costs, ids = [], _one_each()
    with tempfile.TemporaryDirectory(prefix="distributed-state-growth-") as folder:
        taken: list[float] = []
        for size in sizes:
            while len(taken) < size:
                taken.append(_start(f"sqlite:///{folder}/state.db", ids))
                progress(f"start {len(taken)} of {sizes[-1]}")
            costs.append(sorted(taken[-5:])[len(taken[-5:]) // 2])
    return Curve("open and touch 64 partitions", "s", "embedded starts", list(sizes), costs, 0.5)
