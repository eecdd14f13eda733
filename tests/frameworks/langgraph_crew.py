"""What the processes of LangGraph's fleet do until they are killed. Law: a line is printed when a run returned."""

from __future__ import annotations

import json
import operator
import os
import random
import sys
import time
from contextlib import nullcontext
from typing import Annotated, Any

from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.graph import StateGraph
from typing_extensions import TypedDict

from distributed_state import Conflict, LockTimeout, StateStore
from distributed_state.adapters.langgraph import DistributedStateSaver

Log = list[str]


class State(TypedDict):
    """What was asked and answered, in order."""

    log: Annotated[Log, operator.add]


def think(state: State) -> dict[str, Log]:
    time.sleep(0.003)
    return {"log": []}


def answer(state: State) -> dict[str, Log]:
    """Answer what was asked last."""
    return {"log": ["re:" + state["log"][-1]]}


def graph_on(saver: Any) -> Any:
    builder = StateGraph(State)
    builder.add_node("think", think)
    builder.add_node("answer", answer)
    builder.add_edge("__start__", "think")
    builder.add_edge("think", "answer")
    return builder.compile(checkpointer=saver)


def config_of(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}}


def _say(*words: str) -> None:
    print(*words, flush=True)  # noqa: T201 - the pipe to the test


def _turns(saver: Any, threads: list[str], me: str, held: Any) -> None:
    """Run turns on any of the threads, until killed; one that was refused is run again."""
    graph = graph_on(saver)
    for number in range(1_000_000):
        thread, turn = random.choice(threads), f"{me}-{number}"
        while True:
            try:
                with held(config_of(thread)):
                    graph.invoke({"log": [turn]}, config_of(thread))
                break
            except (Conflict, LockTimeout):
                _say("refused", thread, turn)
                turn += "'"
        _say("ack", thread, turn)


def exclusive(threads: list[str], me: str, settings: dict[str, Any], postgres: str) -> None:
    """Each run holds its thread."""
    with StateStore.open(**settings) as store:
        saver = DistributedStateSaver(store, exclusive=True)
        _turns(saver, threads, me, lambda config: saver.turn(config, ttl=2, wait=20))


def checked(threads: list[str], me: str, settings: dict[str, Any], postgres: str) -> None:
    """Nobody holds anything: a run that is behind is refused."""
    with StateStore.open(**settings) as store:
        _turns(DistributedStateSaver(store), threads, me, nullcontext)


def theirs(threads: list[str], me: str, settings: dict[str, Any], postgres: str) -> None:
    """The same on LangGraph's own saver for PostgreSQL."""
    with PostgresSaver.from_conn_string(postgres) as saver:
        _turns(saver, threads, me, nullcontext)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(os.environ["ARGUMENTS"]))
