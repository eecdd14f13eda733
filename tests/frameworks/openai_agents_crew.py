"""What the processes do that the test of a fleet of OpenAI Agents kills. Law: a line for each acknowledged turn."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

from agents import Agent, RunConfig, Runner, function_tool
from agents.extensions.memory.redis_session import RedisSession
from agents.testing import ModelCall, ModelStep, ScriptedModel
from frameworks.speaking import QUESTION, TTL, Words, begin, fall_silent
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDeltaEvent,
)

from distributed_state import AsyncSession, AsyncStateStore, Stopped
from distributed_state.adapters.openai_agents import DistributedSession, stream

QUIET = RunConfig(tracing_disabled=True)
OPEN = "open "


def spoken(text: str) -> ResponseOutputMessage:
    content = ResponseOutputText(text=text, type="output_text", annotations=[])
    return ResponseOutputMessage(
        id=f"m {text}", type="message", role="assistant", content=[content], status="completed"
    )


def called(name: str, **arguments: Any) -> ResponseFunctionToolCall:
    call = f"{name} {json.dumps(arguments)}"
    return ResponseFunctionToolCall(
        id=f"f {call}", call_id=call, type="function_call", name=name, arguments=json.dumps(arguments)
    )


@function_tool
async def look_up(turn: str) -> str:
    """Look something up; where nobody holds the session, for longer than who waits for a turn of ours stays away."""
    await asyncio.sleep(0.1 if turn.startswith(OPEN) else 0.002)
    return f"found {turn}"


def agent(turn: str) -> Agent[Any]:
    """One whose turn is a call of a tool and an answer, four items in all."""
    return Agent(name="crew", model=ScriptedModel([[called("look_up", turn=turn)], [spoken(turn)]]), tools=[look_up])


def turn_of(item: Any) -> str:
    """The turn that an item belongs to."""
    if item.get("type") == "function_call":
        return str(json.loads(item["arguments"])["turn"])
    if item.get("type") == "function_call_output":
        return str(item["output"]).removeprefix("found ")
    content = item["content"]
    return str(content if isinstance(content, str) else content[0]["text"])


async def take_turns(id: str, me: str, settings: dict[str, Any]) -> None:
    """Take turns with the others until killed: one on our session, which is held for it, and one on the SDK's."""
    async with AsyncStateStore.open(**settings) as store:
        ours, theirs = DistributedSession(id, store), RedisSession.from_url(id, url=settings["url"])
        for number in range(1_000_000):
            turn = f"{me}-{number}"
            async with ours.lock(ttl=2, wait=60):
                await Runner.run(agent(turn), turn, session=ours, run_config=QUIET)
            print(f"ours {turn}", flush=True)  # noqa: T201 - to the test
            await Runner.run(agent(OPEN + turn), OPEN + turn, session=theirs, run_config=QUIET)
            print(f"theirs {turn}", flush=True)  # noqa: T201


# An answer that is streamed


def session(store: AsyncStateStore) -> AsyncSession:
    return store.session("t")


def saying(words: Words) -> ModelStep:
    """A model's step that says these words."""

    async def events(call: ModelCall) -> AsyncIterator[Any]:
        said = ""
        async for word in words:
            said += word
            yield ResponseTextDeltaEvent(
                type="response.output_text.delta", delta=word, item_id="m", content_index=0, output_index=0,
                sequence_number=0, logprobs=[],
            )  # fmt: skip
        response = Response(
            id="r", created_at=0, model="scripted", object="response", output=[spoken(said)], tool_choice="none",
            tools=[], parallel_tool_calls=False,
        )  # fmt: skip
        yield ResponseCompletedEvent(type="response.completed", response=response, sequence_number=0)

    return ModelStep.stream(events)


async def serve(store: AsyncStateStore, words: Words) -> None:
    model = ScriptedModel([[called("look_up", turn="it")], saying(words)])
    async with session(store).turn(request_id="r", ttl=TTL) as turn:
        await begin(turn, "attempt")
        ours = DistributedSession("t", store)
        agent = Agent(name="crew", model=model, tools=[look_up])
        said = stream(turn, Runner.run_streamed(agent, QUESTION, session=ours, run_config=QUIET))
        try:
            async with turn.stoppable():
                async for _ in said:
                    pass
        except Stopped:
            await ours.add_items([{"role": "assistant", "content": said.text}])
        turn.outcome = said.text


async def kept(store: AsyncStateStore) -> list[str]:
    return [turn_of(item) for item in await DistributedSession("t", store).get_items()]


async def speak(**arguments: Any) -> None:
    await fall_silent(serve, **arguments)


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](**json.loads(os.environ["ARGUMENTS"])))
