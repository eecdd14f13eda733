"""What the processes of LangGraph's fleet do until they are killed. Law: a line is printed when a run returned."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import random
import sys
import time
from contextlib import nullcontext
from typing import Annotated, Any

from frameworks.langchain_crew import Speaker
from frameworks.speaking import QUESTION, TTL, Words, fall_silent
from langchain_core.messages import AIMessage
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.graph import MessagesState, StateGraph
from typing_extensions import TypedDict

from distributed_state import AsyncSession, AsyncStateStore, Conflict, LockTimeout, StateStore, Stopped
from distributed_state.adapters.langgraph import DistributedStateSaver, stream

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


# An answer that is streamed

ASKED = config_of("t")


def session(store: AsyncStateStore) -> AsyncSession:
    return store.session("langgraph/t")


def _speaking(store: AsyncStateStore, words: Words) -> tuple[DistributedStateSaver, Any]:
    model = Speaker(words=words)

    async def answer(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    saver = DistributedStateSaver(store, exclusive=True)
    builder = StateGraph(MessagesState)
    builder.add_node("answer", answer)
    builder.set_entry_point("answer")
    return saver, builder.compile(checkpointer=saver)


async def serve(store: AsyncStateStore, words: Words) -> None:
    saver, graph = _speaking(store, words)
    async with saver.turn(ASKED, request_id="r", ttl=TTL, wait=60) as turn:
        question = {"messages": [("user", QUESTION)]}
        said = stream(turn, graph.astream(question, ASKED, stream_mode="messages", version="v2", durability="exit"))
        try:
            async with turn.stoppable():
                async for _ in said:
                    pass
        except Stopped:
            await graph.aupdate_state(ASKED, {"messages": [AIMessage(said.text)]}, as_node="answer")
        turn.outcome = said.text


async def kept(store: AsyncStateStore) -> list[str]:
    _, graph = _speaking(store, Words([]))
    return [message.text for message in (await graph.aget_state(ASKED)).values["messages"]]


def speak(**arguments: Any) -> None:
    asyncio.run(fall_silent(serve, **arguments))


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(os.environ["ARGUMENTS"]))
