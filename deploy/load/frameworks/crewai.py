"""Beside CrewAI's own persistence in SQLite: saving and loading a flow, and keys that threads save at once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

from crewai.flow.persistence import SQLiteFlowPersistence

from deploy.load.rows import Row, at_least, at_most, interleaved
from distributed_state import StateStore
from distributed_state.adapters.crewai import DistributedFlowPersistence

NAME, PEER = "CrewAI", "SQLiteFlowPersistence"
SIZES = (10, 100)  # keys of a state
KEYS = 40
Make = Callable[[], Any]


def rows(redis: str, archive: str) -> list[Row]:
    """Ours on this Redis and this archive, theirs on a file."""
    with (
        StateStore.open(redis, archive=archive, namespace="adapters") as store,
        tempfile.TemporaryDirectory() as folder,
    ):

        def ours() -> Any:
            return DistributedFlowPersistence(store)

        def theirs() -> Any:
            return SQLiteFlowPersistence(str(Path(folder) / "flows.db"))

        found = [row for size in SIZES for row in _one(ours(), theirs(), size)]
        mine, other = _kept(ours), _kept(theirs)
        name = f"{NAME}: keys kept of {KEYS}, saved by {KEYS} workers at once"
        return [*found, at_least(name, mine, other, 1.0, "keys", PEER)]


def _one(ours: Any, theirs: Any, size: int) -> list[Row]:
    id = uuid4().hex
    state = {f"key {number}": "v" * 100 for number in range(size)}
    pair = {"ours": ours, "theirs": theirs}
    count = dict.fromkeys(pair, 0)

    def saving(name: str) -> Callable[[], None]:
        def save() -> None:
            count[name] += 1
            pair[name].save_state(id, "step", {**state, "n": count[name]})

        return save

    saved = interleaved({name: (saving(name), 10) for name in pair})
    loaded = interleaved({name: (lambda each=each: each.load_state(id), 10) for name, each in pair.items()})  # type: ignore[misc] # bound now
    return [
        at_most(f"{NAME}: save_state of {size} keys, one changed", saved["ours"], saved["theirs"], 1.2, "us", PEER),
        at_most(f"{NAME}: load_state of {size} keys", loaded["ours"], loaded["theirs"], 1.2, "us", PEER),
    ]


def _kept(make: Make) -> int:
    """How many keys a flow has after each worker loaded it, and saved it with a key of its own."""
    id = uuid4().hex
    make().save_state(id, "begin", {"id": id})

    def work(worker: int) -> None:
        persistence = make()
        state = persistence.load_state(id)
        persistence.save_state(id, "step", {**state, f"key {worker}": worker})

    with ThreadPoolExecutor(8) as workers:
        list(workers.map(work, range(KEYS)))
    return sum(name.startswith("key ") for name in make().load_state(id))
