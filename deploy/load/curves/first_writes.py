"""What the first write of a record takes beside the second. Law: both in one run, in turns, by a blocking caller."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median

from deploy.load.curves.curve import Curve, Progress
from distributed_state import StateStore
from distributed_state.programs.servers import redis_server

_MEASURED = 500


def _ratio(store: StateStore, prefix: str) -> float:
    """The median time of first writes under names of one's own, over that of the writes that follow them."""
    firsts, seconds = [], []
    for number in range(_MEASURED):
        session = store.session(f"{prefix}-{number}")
        began = time.perf_counter()
        session.set("n", 1)
        between = time.perf_counter()
        session.set("n", 2)
        firsts.append(between - began)
        seconds.append(time.perf_counter() - between)
    return median(firsts) / median(seconds)


def first_writes(sizes: Sequence[int], progress: Progress) -> Curve:
    """The ratio where so many other sessions were written before, under one epoch."""
    costs = []
    with ExitStack() as stack:
        server = stack.enter_context(redis_server())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="distributed-state-growth-"))
        archive = f"sqlite:///{folder}/state.db"
        store = stack.enter_context(StateStore.open(server.url, archive=archive, archive_every=0.5))
        done = 0
        for size in sizes:
            for number in range(done, size):
                store.session(f"before-{number}").set("n", 1)
                if number % 1000 == 0:
                    progress(f"{number} sessions")
            done = size
            costs.append(_ratio(store, f"new-{size}"))
    return Curve("first write : second write", "", "sessions", list(sizes), costs, 1.5)
