"""What the processes do that the test of a fleet of OpenAI Agents kills. Law: a line for each acknowledged turn."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from agents import Agent, RunConfig, Runner, function_tool
from agents.extensions.memory.redis_session import RedisSession
from agents.testing import ScriptedModel
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from distributed_state import AsyncStateStore
from distributed_state.adapters.openai_agents import DistributedSession

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


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](**json.loads(os.environ["ARGUMENTS"])))
