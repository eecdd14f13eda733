"""What graphs ask people: `interrupt` as a question of the store. Law: an answer is given to the graph once."""

from __future__ import annotations

import asyncio
import operator
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from math import nan
from typing import Annotated, Any

import pytest
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.graph import StateGraph
from langgraph.types import Command, interrupt
from typing_extensions import TypedDict
from working import quick

from distributed_state import AsyncStateStore, NotFound, StateStore
from distributed_state.adapters.langgraph import DistributedStateSaver, resume


class Trip(TypedDict):
    """What was asked for, and the answers."""

    city: str
    said: Annotated[list[Any], operator.add]


def twice(state: Trip) -> dict[str, Any]:
    """Ask two questions, one after the other."""
    return {"said": [interrupt(f"Book {state['city']}?"), interrupt({"seats": [1, 2], "why": {state["city"]}})]}


def graph_of(saver: Any, *nodes: Any) -> Any:
    """A graph of these nodes, all at once, and one after them."""
    builder = StateGraph(Trip)
    builder.add_node("end", lambda state: {"said": ["end"]})
    for node in nodes:
        name = getattr(node, "__name__", "inner")
        builder.add_node(name, node)
        builder.add_edge("__start__", name)
    builder.add_edge([getattr(node, "__name__", "inner") for node in nodes], "end")
    return builder.compile(checkpointer=saver)


def config_of(session: Any) -> Any:
    return {"configurable": {"thread_id": session.id.removeprefix("langgraph/")}}


@asynccontextmanager
async def working(store: AsyncStateStore, serves: Any) -> AsyncIterator[None]:
    """A worker that calls this function for each turn."""
    store.handler("trips", serves)
    running = asyncio.create_task(store.work())
    yield
    store.stop_working()
    await running


async def asked(store: AsyncStateStore) -> list[tuple[Any, Any]]:
    """The open questions, with their data. No other session has the field of any."""
    found = await store.asks(fresh=True)
    for info in await store.sessions(prefix="", fresh=True):
        kept = {name for name in await store.session(info.id).get_all(fresh=True) if name.startswith("ask.")}
        assert kept == {f"ask.{each.name}" for each in found if each.session == info.id}
    return [(each.question, each.data) for each in found]


async def next_ask(store: AsyncStateStore, *, but: str = "") -> Any:
    """The only open question, as soon as there is one of another name."""
    async with asyncio.timeout(30):
        while True:
            found = await store.asks(fresh=True)
            if [each.name for each in found] not in ([], [but]):
                [ask] = found
                return ask
            await asyncio.sleep(0.01)


def runs(graph: Any, **options: Any) -> Any:
    """A handler that runs a graph."""

    async def run(turn: Any) -> None:
        given = resume(turn)
        if given is None:
            [first, *_] = turn.take()
            given = {"city": first.message.content}
        await graph.ainvoke(given, config_of(turn.session), **options)

    return run


@pytest.mark.parametrize("durability", ["async", "sync", "exit"])
@pytest.mark.only(api="asyncio")
async def test_what_a_graph_asks_is_listed_and_the_answer_resumes_it(store: AsyncStateStore, durability: str) -> None:
    graph = graph_of(DistributedStateSaver(store), twice)
    session = store.session("langgraph/t", user="ada")
    async with working(store, runs(graph, durability=durability)):
        await session.post({"role": "user", "content": "Oslo"}, handler="trips")
        first = await next_ask(store)
        assert (first.session, first.question, first.data, first.user) == ("langgraph/t", "Book Oslo?", None, "ada")
        assert await session.phase(fresh=True) == "waiting_feedback"
        assert await session.answer("yes", first.name) is True
        second = await next_ask(store, but=first.name)
        assert (second.question, second.data) == ('{"seats":[1,2],"why":["Oslo"]}', {"seats": [1, 2], "why": ["Oslo"]})
        with pytest.raises(NotFound, match="no open question"):
            await session.answer("no", first.name)
        assert await session.answer({"seat": 2}, second.name) is True
        assert await session.answer({"seat": 1}, second.name) is False
        while await session.phase(fresh=True) != "idle":
            await asyncio.sleep(0.01)
        while await session.inbox():
            await asyncio.sleep(0.01)
    assert await asked(store) == []
    state = await graph.aget_state(config_of(session))
    assert (state.values["said"], state.next) == (["yes", {"seat": 2}, "end"], ())


@pytest.mark.only(api="asyncio")
async def test_an_answer_that_the_graph_has_already_is_not_given_to_its_next_question(
    store: AsyncStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker dies when the graph has saved, and before the turn's commit removes the answer from the inbox."""
    quick(monkeypatch)
    graph = graph_of(DistributedStateSaver(store), twice)
    run = runs(graph)
    session = store.session("langgraph/t")
    died: list[str] = []

    async def dying(turn: Any) -> None:
        answered = [name for each in turn.inbox if (name := (each.message.metadata or {}).get("answers"))]
        await run(turn)
        for name in answered:
            if name not in died:
                died.append(name)
                raise ZeroDivisionError

    async def served(count: int) -> None:
        async with asyncio.timeout(60):
            while len(died) < count or await session.inbox():
                await asyncio.sleep(0.01)

    async with working(store, dying):
        await session.post({"role": "user", "content": "Oslo"}, handler="trips")
        first = await next_ask(store)
        await session.answer("yes", first.name)
        await served(1)
        second = await next_ask(store, but=first.name)
        assert second.data is not None
        assert (await graph.aget_state(config_of(session))).values.get("said", []) == []
        await session.answer([1], second.name)
        await served(2)
    assert (await graph.aget_state(config_of(session))).values["said"] == ["yes", [1], "end"]
    assert await asked(store) == []


@pytest.mark.only(api="asyncio")
async def test_questions_of_nodes_that_run_at_once_are_answered_one_by_one(store: AsyncStateStore) -> None:
    def left(state: Trip) -> dict[str, Any]:
        return {"said": [("left", interrupt("left?"))]}

    def right(state: Trip) -> dict[str, Any]:
        return {"said": [("right", interrupt("right?"))]}

    graph = graph_of(DistributedStateSaver(store), left, right)
    session = store.session("langgraph/t")
    async with working(store, runs(graph)):
        await session.post({"role": "user", "content": "Oslo"}, handler="trips")
        await session.post({"role": "user", "content": "ignored"})
        while len(found := await store.asks(fresh=True)) < 2:
            await asyncio.sleep(0.01)
        by = {each.question: each for each in found}
        await session.answer("r", by["right?"].name)
        while [each.question for each in await store.asks(fresh=True)] != ["left?"]:
            await asyncio.sleep(0.01)
        assert await session.phase(fresh=True) == "waiting_feedback"
        assert (await next_ask(store)).asked == by["left?"].asked
        await session.answer("l", by["left?"].name)
        while await session.phase(fresh=True) != "idle":
            await asyncio.sleep(0.01)
    said = (await graph.aget_state(config_of(session))).values["said"]
    assert [list(each) for each in said[:2]] == [["left", "l"], ["right", "r"]]
    assert await asked(store) == []


@pytest.mark.only(api="asyncio")
async def test_a_question_of_a_subgraph_is_answered_too(store: AsyncStateStore) -> None:
    inner = StateGraph(Trip)
    inner.add_node("twice", twice)
    inner.add_edge("__start__", "twice")
    graph = graph_of(DistributedStateSaver(store), inner.compile())
    session = store.session("langgraph/t")
    async with working(store, runs(graph)):
        await session.post({"role": "user", "content": "Oslo"}, handler="trips")
        first = await next_ask(store)
        await session.answer("yes", first.name)
        second = await next_ask(store, but=first.name)
        assert second.data == {"seats": [1, 2], "why": ["Oslo"]}
        await session.answer(2, second.name)
        while await session.phase(fresh=True) != "idle":
            await asyncio.sleep(0.01)
    assert (await graph.aget_state(config_of(session))).values["said"] == ["yes", 2, "end"]


@pytest.mark.only(api="asyncio")
async def test_a_graph_that_is_resumed_by_hand_leaves_no_question(store: AsyncStateStore) -> None:
    graph = graph_of(DistributedStateSaver(store), twice)
    session = store.session("langgraph/t")
    config = config_of(session)
    await graph.ainvoke({"city": "Oslo"}, config)
    first = await next_ask(store)
    await graph.ainvoke(Command(resume="yes"), config)
    second = await next_ask(store, but=first.name)
    await session.answer("late", second.name)
    await graph.ainvoke(Command(resume="no"), config)
    assert await asked(store) == []
    assert await session.phase(fresh=True) == "idle"
    async with session.turn() as turn:
        assert resume(turn) == Command(resume={}), "the graph has an answer"
    assert await session.inbox() == []
    async with session.turn() as turn:
        assert resume(turn) is None
    await graph.ainvoke({"city": "Bergen"}, config)
    assert await asked(store) == [("Book Bergen?", None)]
    await graph.ainvoke({"city": "Paris"}, config)
    assert await asked(store) == [("Book Paris?", None)]
    await graph.aupdate_state(config, {"city": "Rome"}, as_node="twice")
    assert await asked(store) == []


@pytest.mark.only(api="asyncio")
async def test_a_question_of_a_run_that_is_deleted_goes_with_it(store: AsyncStateStore) -> None:
    saver = DistributedStateSaver(store)
    graph = graph_of(saver, twice)
    for run in ("first", "second"):
        config: Any = {"configurable": {"thread_id": "t"}, "metadata": {"run_id": run}}
        await graph.ainvoke({"city": run}, config)
    await saver.adelete_for_runs(["second"])
    assert (await graph.aget_state(config)).values["city"] == "first"
    assert await asked(store) == []
    assert await store.session("langgraph/t").phase(fresh=True) == "idle"


@pytest.mark.only(api="asyncio")
async def test_a_question_of_a_turn_in_the_same_session_stays_open(store: AsyncStateStore) -> None:
    graph = graph_of(DistributedStateSaver(store), twice)
    session = store.session("langgraph/t")
    async with session.turn() as turn:
        turn.ask("How many?", name="people")
    await graph.ainvoke({"city": "Oslo"}, config_of(session))
    assert len(await asked(store)) == 2
    await graph.ainvoke(Command(resume="yes"), config_of(session))
    await graph.ainvoke(Command(resume="no"), config_of(session))
    assert await asked(store) == [("How many?", None)]


@pytest.mark.only(api="asyncio")
@pytest.mark.parametrize(
    ("value", "text", "data"),
    [("", "?", None), (nan, "nan", None), (["x" * 40_000], f'["{"x" * 998}', None), (b"\xff", '"_w=="', "_w==")],
)
async def test_what_is_asked_may_be_any_value(store: AsyncStateStore, value: Any, text: str, data: Any) -> None:
    def odd(state: Trip) -> dict[str, Any]:
        return {"said": [interrupt(value)]}

    graph = graph_of(DistributedStateSaver(store), odd)
    await graph.ainvoke({"city": "Oslo"}, {"configurable": {"thread_id": "t"}})
    assert await asked(store) == [(text, data)]


@pytest.mark.only(api="asyncio")
async def test_an_encrypted_graph_shows_only_that_it_asks(store: AsyncStateStore) -> None:
    serde = EncryptedSerializer.from_pycryptodome_aes(key=b"0" * 32)
    graph = graph_of(DistributedStateSaver(store, serde=serde), twice)
    await graph.ainvoke({"city": "secret"}, {"configurable": {"thread_id": "t"}})
    assert await asked(store) == [("the graph waits for an answer", None)]


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_blocking_handler_resumes_too(exclusive: bool) -> None:
    with StateStore.open(archive="memory") as store:
        saver = DistributedStateSaver(store, exclusive=exclusive)
        graph = graph_of(saver, twice)

        @store.handler("trips")
        def run(turn: Any) -> None:
            config = config_of(turn.session)
            given = resume(turn) or {"city": turn.take()[0].message.content}
            with saver.turn(config) if exclusive else nullcontext():
                graph.invoke(given, config)

        session = store.session("langgraph/t")
        session.post({"role": "user", "content": "Oslo"}, handler="trips")
        worker = threading.Thread(target=store.work)
        worker.start()
        try:
            name = ""
            for answer in ("yes", 3):
                while (names := [each.name for each in store.asks(fresh=True)]) in ([], [name]):
                    assert worker.is_alive()
                    time.sleep(0.01)
                [name] = names
                session.answer(answer, name)
            while session.phase(fresh=True) != "idle":
                assert worker.is_alive()
                time.sleep(0.01)
        finally:
            store.stop_working()
            worker.join()
        assert graph.get_state(config_of(session)).values["said"] == ["yes", 3, "end"]
