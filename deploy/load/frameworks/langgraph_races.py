"""Fifty writers beside LangGraph's PostgresSaver: each on a thread of its own, and all of them on one.

A turn on the one thread reads the newest checkpoint, adds its name to a channel, and saves; one that is refused begins
again. What was acknowledged and is not in the thread's newest checkpoint at the end is lost.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.postgres import PostgresSaver
from psycopg.rows import dict_row
from psycopg_pool import ConnectionPool

from deploy.load.rows import Row
from distributed_state import Conflict, StateStore
from distributed_state.adapters.langgraph import DistributedStateSaver

WRITERS = 50
TURNS = 4
PUTS = 40


@dataclass(frozen=True, slots=True)
class Raced:
    """What fifty writers came to."""

    puts: float  # a second, each on a thread of its own
    turns: float  # a second that were acknowledged on one thread
    acknowledged: int
    kept: int


def turn(saver: Any, thread: str, name: str) -> None:
    """Take one turn, as often as it is refused."""
    while True:
        found = saver.get_tuple({"configurable": {"thread_id": thread, "checkpoint_ns": ""}})
        checkpoint = {**(found.checkpoint if found else empty_checkpoint()), "id": str(uuid6())}
        log = [*checkpoint["channel_values"].get("log", ()), name]
        version = saver.get_next_version(checkpoint["channel_versions"].get("log"), None)
        checkpoint["channel_values"] = {"log": log}
        checkpoint["channel_versions"] = {"log": version}
        # As LangGraph does: what was found is what is gone on from.
        given = found.config if found else {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
        try:
            saver.put(given, checkpoint, {"source": "loop", "step": len(log), "parents": {}}, {"log": version})
        except Conflict:
            continue
        return


def race(saver: Any, grow: Callable[[Any], Any]) -> Raced:
    """Let them write. `grow` makes what saves checkpoint after checkpoint on a thread of its own."""
    with ThreadPoolExecutor(WRITERS) as pool:
        own = [grow(saver) for _ in range(WRITERS)]
        list(pool.map(lambda put: put(), own))  # connections and scripts
        begun = time.perf_counter()
        list(pool.map(lambda put: [put() for _ in range(PUTS)], own))
        puts = WRITERS * PUTS / (time.perf_counter() - begun)
        thread = uuid.uuid4().hex
        begun = time.perf_counter()
        names = [[f"{at}-{number}" for number in range(TURNS)] for at in range(WRITERS)]
        list(pool.map(lambda mine: [turn(saver, thread, name) for name in mine], names))
        turns = WRITERS * TURNS / (time.perf_counter() - begun)
    log = saver.get_tuple({"configurable": {"thread_id": thread, "checkpoint_ns": ""}}).checkpoint["channel_values"]
    acknowledged = {name for mine in names for name in mine}
    return Raced(puts, turns, len(acknowledged), len(acknowledged & set(log["log"])))


def rows(name: str, redis_url: str, database: str, grow: Callable[[Any], Any]) -> list[Row]:
    """Both on the same servers."""
    archive = database.replace("postgresql://", "postgresql+psycopg://")
    with StateStore.open(url=redis_url, archive=archive, namespace=uuid.uuid4().hex[:8]) as store:
        mine = race(DistributedStateSaver(store), grow)
    options: Any = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    with ConnectionPool(database, min_size=WRITERS, max_size=WRITERS, kwargs=options) as pool:
        pool.wait()
        saver = PostgresSaver(pool)
        saver.setup()
        other = race(saver, grow)
    return [
        Row(
            f"{name}: put, {WRITERS} writers on as many threads", f"{mine.puts:,.0f} /s",
            f"PostgresSaver: {other.puts:,.0f} /s", mine.puts / other.puts, "-", True,
        ),
        Row(
            f"{name}: acknowledged turns of {WRITERS} writers on one thread that were kept",
            f"{mine.kept} of {mine.acknowledged}, {mine.turns:,.0f}/s",
            f"PostgresSaver: {other.kept} of {other.acknowledged}, {other.turns:,.0f}/s",
            mine.kept / mine.acknowledged, "= all", mine.kept == mine.acknowledged,
        ),
    ]  # fmt: skip
