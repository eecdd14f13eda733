"""The tokens that frameworks report are counted with the turn into which a run is streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from agent_framework import AgentResponseUpdate, ChatResponseUpdate, Content
from agents.stream_events import RawResponsesStreamEvent
from agno.metrics import ModelMetrics, RunMetrics
from agno.run.agent import RunCompletedEvent, RunContentEvent
from claude_agent_sdk import AssistantMessage, ResultMessage, TextBlock
from google.adk.events.event import Event
from google.genai import types
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from openai.types.responses import Response, ResponseCompletedEvent, ResponseTextDeltaEvent, ResponseUsage
from pydantic_ai import Agent
from pydantic_ai.models.test import TestModel

from distributed_state import AsyncStateStore, StateStore
from distributed_state.adapters import (
    adk,
    agent_framework,
    agno,
    claude_agent_sdk,
    langchain,
    langgraph,
    openai_agents,
    pydantic_ai,
    strands,
)
from distributed_state.results import Tokens, Usage


async def each_of(events: list[Any]) -> AsyncIterator[Any]:
    for event in events:
        yield event


async def counted(stream: Callable[[Any, Any], Any], events: Any) -> Usage:
    """What a session has used after a turn with these events."""
    async with AsyncStateStore.open(archive="memory") as store:
        async with store.session("s").turn() as turn:
            async for _ in stream(turn, events):
                pass
        return await store.session("s").usage()


def of_openai() -> Any:
    usage = ResponseUsage.model_construct(input_tokens=812, output_tokens=90)
    response = Response.model_construct(model="gpt-5", usage=usage)
    done = ResponseCompletedEvent.model_construct(type="response.completed", response=response)
    delta = ResponseTextDeltaEvent.model_construct(type="response.output_text.delta", delta="Oslo")
    events = [RawResponsesStreamEvent(data=each) for each in (delta, done)]
    return SimpleNamespace(stream_events=lambda: each_of(events), is_complete=True, run_loop_task=None)


def of_langgraph() -> Any:
    def part(message: Any) -> Any:
        return {"type": "messages", "ns": (), "data": (message, {"ls_model_name": "gpt-5"})}

    def usage(read: int, written: int) -> Any:
        return {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}

    began = AIMessageChunk("Os", id="1", usage_metadata=usage(812, 0))  # some models report the two apart
    ended = AIMessageChunk("lo", id="1", usage_metadata=usage(0, 90))
    update = {"type": "updates", "ns": (), "data": {"agent": {"messages": [AIMessage("Oslo", id="1")]}}}
    return each_of([part(began), part(AIMessageChunk("", id="1")), part(ended), update])


def of_adk() -> Any:
    def usage(written: int) -> Any:
        return types.GenerateContentResponseUsageMetadata(
            prompt_token_count=812, candidates_token_count=written, thoughts_token_count=10
        )

    said = types.Content(parts=[types.Part(text="Oslo")])
    partial = Event(author="a", content=said, partial=True, usage_metadata=usage(5), model_version="gpt-5")
    whole = Event(author="a", content=said, usage_metadata=usage(80), model_version="gpt-5")
    return each_of([partial, whole, Event(author="user", content=said)])


def of_agno() -> Any:
    model = ModelMetrics(id="gpt-5", input_tokens=812, output_tokens=90)
    metrics = RunMetrics(input_tokens=812, output_tokens=90, details={"model": [model]})
    return each_of([RunContentEvent(run_id="1", content="Oslo"), RunCompletedEvent(run_id="1", metrics=metrics)])


def of_strands() -> Any:
    agent = SimpleNamespace(model=SimpleNamespace(get_config=lambda: {"model_id": "gpt-5"}))
    usage = {"inputTokens": 812, "outputTokens": 90, "totalTokens": 902}
    return each_of([
        {"init_event_loop": True, "agent": agent},
        {"event": {"contentBlockDelta": {"delta": {"text": "Oslo"}}}},
        {"event": {"metadata": {"usage": usage, "metrics": {"latencyMs": 1}}}},
    ])  # fmt: skip


def of_claude() -> Any:
    said = AssistantMessage(content=[TextBlock("Oslo")], model="gpt-5")
    usage = {"input_tokens": 10, "cache_creation_input_tokens": 2, "cache_read_input_tokens": 800, "output_tokens": 90}
    result = ResultMessage("success", 1, 1, False, 1, "s", usage=usage)
    return each_of([said, AssistantMessage(content=[], model="small", parent_tool_use_id="t"), result])


def of_agent_framework() -> Any:
    class Run:
        """What `stream` needs of a ResponseStream."""

        async def __aenter__(self) -> Run:
            return self

        async def __aexit__(self, *error: object) -> None:
            pass

        def __aiter__(self) -> Any:
            usage = Content.from_usage({"input_token_count": 812, "output_token_count": 90})
            raw = ChatResponseUpdate(model="gpt-5")
            text = AgentResponseUpdate(contents=[Content.from_text("Oslo")])
            return each_of([text, AgentResponseUpdate(contents=[usage], raw_representation=raw)])

    return Run()


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (openai_agents.stream, of_openai),
        (langgraph.stream, of_langgraph),
        (adk.stream, of_adk),
        (agno.stream, of_agno),
        (strands.stream, of_strands),
        (claude_agent_sdk.stream, of_claude),
        (agent_framework.stream, of_agent_framework),
    ],
    ids=lambda given: given.__module__.rpartition(".")[2] if given.__name__ == "stream" else "",
)
async def test_the_tokens_that_a_run_reports_are_counted_once(stream: Any, events: Any) -> None:
    assert (await counted(stream, events())).models == {"gpt-5": Tokens(1, 812, 90)}


async def test_a_run_of_pydantic_ai_counts_each_response() -> None:
    agent = Agent(TestModel(model_name="gpt-5"))
    calls: list[str] = []

    @agent.tool_plain
    def book(city: str) -> str:
        """Book."""
        calls.append(city)
        return "booked"

    async with agent.run_stream_events("For the weekend") as events:
        used = await counted(pydantic_ai.stream, events)
    assert calls
    assert used.models.keys() == {"gpt-5"}
    assert used.calls == 2
    assert used.input_tokens > 0
    assert used.output_tokens > 0


def test_a_handler_of_langchain_counts_each_answer() -> None:
    usage: Any = {"input_tokens": 812, "output_tokens": 90, "total_tokens": 902}
    said = AIMessage("Oslo", usage_metadata=usage, response_metadata={"model_name": "gpt-5"})
    with StateStore.open(archive="memory") as store:
        with store.session("s").turn() as turn:
            GenericFakeChatModel(messages=iter([said])).invoke("Where?", {"callbacks": [langchain.stream(turn)]})
            model = GenericFakeChatModel(messages=iter([AIMessage("without numbers")]))
            model.invoke("Where?", {"callbacks": [langchain.stream(turn)]})
        assert store.session("s").usage().models == {"gpt-5": Tokens(1, 812, 90)}
