"""Runs of frameworks that are streamed into turns: any replica follows, a stop keeps what was said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import ModuleType
from typing import Any

import pytest
from agents import Agent, Runner
from agents.testing import ScriptedModel
from agno.models.response import ToolExecution
from agno.run.agent import RunContentEvent, RunStartedEvent, ToolCallStartedEvent
from following import plain, shown
from frameworks import (
    adk_crew,
    agent_framework_crew,
    agno_crew,
    claude_agent_sdk_crew,
    langchain_crew,
    langgraph_crew,
    openai_agents_crew,
    pydantic_ai_crew,
    strands_crew,
)
from frameworks.fleet import Member
from frameworks.speaking import QUESTION, Words
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.genai import types
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool

from distributed_state import AsyncStateStore, InvalidValue, StateStore, Stopped
from distributed_state.results import Chunk, StopResult

CREWS = [
    langgraph_crew,
    openai_agents_crew,
    adk_crew,
    agno_crew,
    langchain_crew,
    claude_agent_sdk_crew,
    pydantic_ai_crew,
    agent_framework_crew,
    strands_crew,
]
SAID = ["Oslo ", "is ", "lovely."]
AGAIN = ["Bergen ", "is ", "wet."]


def texts(parts: list[Any]) -> list[Any]:
    """What was shown as text, and what is not a chunk."""
    return [each for each in plain(parts) if not isinstance(each, dict)]


@pytest.mark.parametrize("crew", CREWS, ids=lambda crew: crew.__name__)
@pytest.mark.only(api="asyncio", warm=("fake", "valkey"))
async def test_followers_are_shown_the_text_that_the_framework_yields(crew: ModuleType, store: Any) -> None:
    following = asyncio.create_task(shown(crew.session(store), "r", wait=60))
    await crew.serve(store, Words(SAID))
    assert texts(await following)[:-1] == SAID
    assert plain(await following)[-1][2] == "".join(SAID)
    assert "".join(SAID) in await crew.kept(store)


async def test_a_run_of_agents_shows_its_items_beside_the_text() -> None:
    async with AsyncStateStore.open(archive="memory") as store:
        await openai_agents_crew.serve(store, Words(SAID))
        parts = plain(await shown(openai_agents_crew.session(store), "r"))[:-1]
    agent, arguments, called, result, *said, message = parts
    assert agent == {"type": "agent_updated", "agent": "crew"}
    assert arguments["type"] == "response.function_call_arguments.delta"
    assert (called["type"], called["item"]["name"]) == ("tool_called", "look_up")
    assert (result["type"], result["item"]["output"]) == ("tool_output", "found it")
    assert said == SAID
    assert (message["type"], message["item"]["content"][0]["text"]) == ("message_output_created", "".join(SAID))


async def test_a_run_of_agents_that_is_stopped_in_the_body_of_the_loop_has_ended_after_it() -> None:
    agent = Agent(name="crew", model=ScriptedModel([openai_agents_crew.saying(Words(SAID, after=2))]))
    async with AsyncStateStore.open(archive="memory") as store:
        session = store.session("t")
        async with session.turn(request_id="r") as turn:
            ours = openai_agents_crew.DistributedSession("t", store)
            run = Runner.run_streamed(agent, QUESTION, session=ours, run_config=openai_agents_crew.QUIET)
            said = openai_agents_crew.stream(turn, run)
            stopping = None
            with pytest.raises(Stopped):
                async with turn.stoppable(), aclosing(aiter(said)) as events:
                    async for _ in events:
                        if said.text:
                            stopping = stopping or asyncio.create_task(session.stop("r"))
                            await asyncio.Event().wait()
            assert run.run_loop_task is not None
            assert run.run_loop_task.done()
        assert stopping is not None
        assert (await stopping).state == "stopped"


async def test_a_run_of_adk_shows_each_text_once_and_events_as_json() -> None:
    thought, text = types.Part(text="hm", thought=True), types.Part(text="Oslo.")
    call = types.Part(function_call=types.FunctionCall(name="book", args={}))
    asked = [
        Event(author="user", content=types.Content(parts=[types.Part(text="Where to?")])),
        Event(author="a", content=types.Content(parts=[thought]), partial=True),
        Event(author="a", content=types.Content(parts=[text]), partial=True),
        Event(author="a", content=types.Content(parts=[thought, text])),
        Event(author="a", content=types.Content(parts=[text, call])),
        Event(author="a", actions=EventActions(state_delta={"city": "Oslo"})),
    ]

    async def events() -> AsyncIterator[Event]:
        for each in asked:
            yield each

    async with AsyncStateStore.open(archive="memory") as store:
        async with store.session("s").turn(request_id="r") as turn:
            said = adk_crew.stream(turn, events())
            assert [event async for event in said] == asked
            turn.outcome = said.text
        user, thinking, *rest, state = plain(await shown(store.session("s"), "r"))[:-1]
    assert (user["author"], thinking["content"]["parts"][0]["thought"]) == ("user", True)
    parts = [each if isinstance(each, str) else len(each["content"]["parts"]) for each in rest]
    assert parts == ["Oslo.", 2, "Oslo.", 2]
    assert state["actions"]["stateDelta"] == {"city": "Oslo"}
    assert said.text == "Oslo.Oslo."


def test_a_blocking_run_of_agno_shows_deltas_of_the_answer_and_other_events_as_json() -> None:
    asked = [
        RunStartedEvent(run_id="1"),
        RunContentEvent(run_id="1", content="Oslo."),
        RunContentEvent(run_id="2", parent_run_id="1", content="from a member"),
        RunContentEvent(run_id="1", content=None, reasoning_content="hm"),
        ToolCallStartedEvent(run_id="1", tool=ToolExecution(tool_name="book", tool_args={"city": "Oslo"})),
    ]
    with StateStore.open(archive="memory") as store:
        with store.session("s").turn(request_id="r") as turn:
            said = agno_crew.stream(turn, iter(asked))
            assert list(said) == asked
            turn.outcome = said.text
        began, text, member, reason, tool, _ = store.session("s").output("r", wait=5)
    assert (began.data["event"], text.data, said.text) == ("RunStarted", "Oslo.", "Oslo.")
    assert (member.data["content"], reason.data["reasoning_content"]) == ("from a member", "hm")
    assert (tool.data["event"], tool.data["tool"]["tool_args"]) == ("ToolCallStarted", {"city": "Oslo"})


def test_a_blocking_handler_of_langchain_shows_tokens_and_tools() -> None:
    @tool
    def book(city: str) -> str:
        """Book a city."""
        if city != "Oslo":
            raise ValueError("full")
        return f"booked {city}"

    with StateStore.open(archive="memory") as store:
        with store.session("s").turn(request_id="r") as turn:
            said = langchain_crew.stream(turn)
            model = GenericFakeChatModel(messages=iter([AIMessage("I book.")]))
            list(model.stream("Book!", {"callbacks": [said]}))
            book.invoke({"city": "Oslo"}, {"callbacks": [said]})
            with pytest.raises(ValueError, match="full"):
                book.invoke({"city": "Bergen"}, {"callbacks": [said]})
            said.on_llm_new_token([{"type": "text", "text": "!"}, {"type": "reasoning", "reasoning": "hm"}])
            turn.outcome = said.text
        *tokens, began, ended, _, failed, last, _ = [
            getattr(part, "data", None) for part in store.session("s").output("r", wait=5)
        ]
    assert (tokens, last, said.text) == (["I", " ", "book."], "!", "I book.!")
    assert (began["type"], began["name"], began["input"]) == ("on_tool_start", "book", {"city": "Oslo"})
    assert (ended["type"], ended["output"], ended["run_id"]) == ("on_tool_end", "booked Oslo", began["run_id"])
    assert (failed["type"], failed["error"]) == ("on_tool_error", "ValueError('full')")


def test_a_handler_of_langchain_ends_a_run_whose_turn_is_over() -> None:
    with StateStore.open(archive="memory") as store:
        with store.session("s").turn(request_id="r") as turn:
            said = langchain_crew.stream(turn)
            turn.outcome = "done"
        model = GenericFakeChatModel(messages=iter([AIMessage("Too late.")]))
        with pytest.raises(InvalidValue, match="over"):
            list(model.stream("Book!", {"callbacks": [said]}))


@pytest.mark.parametrize("crew", CREWS, ids=lambda crew: crew.__name__)
@pytest.mark.only(api="asyncio", warm="valkey")
@pytest.mark.replicas
@pytest.mark.timeout(180)
async def test_after_a_worker_was_killed_followers_are_shown_the_whole_second_attempt(
    crew: ModuleType, opener: Any
) -> None:
    store = await opener()
    settings = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    output = crew.session(store).output("r")
    parts: list[Any] = []

    async def follow(texts_shown: int) -> None:
        while len(texts(parts)) < texts_shown:
            parts.append(await output.next(120))

    with Member(f"{crew.__name__.rpartition('.')[2]}.py", "speak", settings=settings, said=SAID, after=2):
        await follow(2)
    await crew.serve(store, Words(AGAIN))
    while (part := await output.next(60)) is not None:
        parts.append(part)
    assert texts(parts)[:-1] == [*SAID[:2], "Restarted", *AGAIN]
    assert parts[-1].outcome == "".join(AGAIN)
    kept = await crew.kept(store)
    assert "".join(AGAIN) in kept
    assert kept.count(QUESTION) == 1


@pytest.mark.parametrize("crew", CREWS, ids=lambda crew: crew.__name__)
@pytest.mark.only(api="asyncio", warm="valkey")
@pytest.mark.replicas
async def test_a_stop_from_another_replica_keeps_the_partial_answer(crew: ModuleType, opener: Any) -> None:
    store, elsewhere = await opener(), await opener()
    answering = asyncio.create_task(crew.serve(store, Words(SAID, after=2)))
    async for part in crew.session(elsewhere).output("r"):
        if isinstance(part, Chunk) and part.data == SAID[1]:
            break
    stopped = await crew.session(elsewhere).stop("r", reason="enough", wait=30)
    await answering
    assert isinstance(stopped, StopResult)
    assert stopped.state == "stopped"
    assert stopped.version is not None
    kept = await crew.kept(elsewhere)
    assert kept[0] == QUESTION
    assert kept.count(QUESTION) == 1
    assert kept[-1] == "".join(SAID[:2])
