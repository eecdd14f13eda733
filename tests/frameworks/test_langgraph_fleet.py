"""Four processes run the same threads of LangGraph and are killed, on our saver and on LangGraph's own."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from below import Worker
from frameworks.langgraph_crew import config_of, graph_on
from langgraph.checkpoint.postgres import PostgresSaver

from distributed_state import StateStore
from distributed_state.adapters.langgraph import DistributedStateSaver

THREADS = ["a", "b"]
WORKERS = 4
KILLS = 3
TURNS = 40
DEADLINE = 60.0


class Crewed(Worker):
    crew = "frameworks/langgraph_crew.py"


def run_fleet(kind: str, **arguments: Any) -> list[tuple[str, str]]:
    """Let processes take turns and kill one after the other; the thread and turn of each run that returned."""
    acknowledged: list[tuple[str, str]] = []
    names = iter(range(1000))
    end = time.monotonic() + DEADLINE

    def start() -> Crewed:
        return Crewed(kind, threads=THREADS, me=f"w{next(names)}", **arguments)

    def note(said: list[str]) -> None:
        acknowledged.extend((words[1], words[2]) for line in said if (words := line.split()) and words[0] == "ack")

    workers = [start() for _ in range(WORKERS)]
    try:
        for kill in range(KILLS):
            while len(acknowledged) < TURNS * (kill + 1) // (KILLS + 1) and time.monotonic() < end:
                note([each.line(DEADLINE) for each in workers])
            killed = workers.pop(0)
            killed.kill()
            note(killed.lines())
            workers.append(start())
        while len(acknowledged) < TURNS and time.monotonic() < end:
            note([workers[0].line(DEADLINE)])
    finally:
        for worker in workers:
            worker.kill()
    for worker in workers:
        note(worker.lines())
    return acknowledged


def judge(saver: Any, acknowledged: list[tuple[str, str]]) -> Counter[str]:
    """How many of the acknowledged turns are not there, there twice, or torn apart by others."""
    graph, found = graph_on(saver), Counter[str]()
    for thread in THREADS:
        log = graph.get_state(config_of(thread)).values.get("log", [])
        for turn in [turn for where, turn in acknowledged if where == thread]:
            times = log.count(turn)
            answered = times == 1 and log[log.index(turn) + 1 : log.index(turn) + 2] == [f"re:{turn}"]
            found["kept" if answered else "lost" if times == 0 else "twice" if times > 1 else "torn"] += 1
    return found


@pytest.mark.parametrize("kind", ["exclusive", "checked"])
def test_a_fleet_loses_no_turn_that_was_acknowledged(
    kind: str, redis_url: str, postgres_url: str, namespace: str
) -> None:
    settings = {"url": redis_url, "archive": postgres_url, "namespace": namespace}
    acknowledged = run_fleet(kind, settings=settings, postgres="")
    with StateStore.open(**settings) as store:
        found = judge(DistributedStateSaver(store), acknowledged)
    assert set(found) == {"kept"}
    assert found["kept"] >= TURNS


def test_on_langgraphs_own_saver_turns_are_lost(postgres_url: str) -> None:
    """The control of the test above, and why it is worth moving: all that is missing had been acknowledged."""
    plain = postgres_url.replace("postgresql+psycopg://", "postgresql://")
    with PostgresSaver.from_conn_string(plain) as saver:
        saver.setup()
        acknowledged = run_fleet("theirs", settings={}, postgres=plain)
        found = judge(saver, acknowledged)
    assert found["lost"] + found["torn"] > 0
    assert sum(found.values()) >= TURNS
