"""What the processes of ADK's fleet do until they are killed. Law: a line is printed when an event is acknowledged."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
from collections.abc import AsyncGenerator
from typing import Any

from frameworks.speaking import QUESTION, TTL, Words, begin, fall_silent
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.errors import StaleSessionError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.integrations.redis._redis_session_service import RedisSessionService, RedisSessionServiceConfig
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.genai import types

from distributed_state import AsyncSession, AsyncStateStore, Stopped
from distributed_state.adapters.adk import DistributedSessionService, stream

SESSIONS = ("s0", "s1")
EVENTS = 3  # of a turn


def peer(settings: dict[str, Any]) -> RedisSessionService:
    """ADK's own service, on the same server."""
    return RedisSessionService(RedisSessionServiceConfig(uri=settings["url"], key_prefix=f"p{settings['namespace']}:"))


async def _turn(service: Any, id: str, name: str) -> None:
    """One turn as a runner makes it: read the session, and append to it. Stale: somebody else's turn runs."""
    session = await service.get_session(app_name="shop", user_id="ada", session_id=id)
    for number in range(EVENTS):
        text = f"{name}.{number}"
        content = types.Content(role="model", parts=[types.Part(text=text)])
        delta = {f"k.{text}": 1, f"user:{text}": 1, f"app:{text}": 1}
        event = Event(author="agent", invocation_id=name, content=content, actions=EventActions(state_delta=delta))
        try:
            await service.append_event(session, event)
        except StaleSessionError:
            return
        print(id, text, flush=True)  # noqa: T201 - the pipe to the test


async def _turns(service: Any, me: str) -> None:
    for number in itertools.count():
        await _turn(service, random.choice(SESSIONS), f"{me}-{number}")
        await asyncio.sleep(random.random() * 0.01)


async def ours(me: str, settings: dict[str, Any]) -> None:
    """Turns on our sessions."""
    async with AsyncStateStore.open(**settings) as store:
        await _turns(DistributedSessionService(store), me)


async def theirs(me: str, settings: dict[str, Any]) -> None:
    """The same on ADK's own Redis service."""
    await _turns(peer(settings), me)


# An answer that is streamed

WHERE = {"app_name": "shop", "user_id": "ada", "session_id": "s"}


class Speaker(BaseLlm):
    """A model that says scripted words."""

    words: Any
    model: str = "speaker"

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        whole = ""
        async for word in self.words:
            whole += word
            yield LlmResponse(content=_spoken(word), partial=True)
        yield LlmResponse(content=_spoken(whole))


def _spoken(text: str, role: str = "model") -> types.Content:
    return types.Content(role=role, parts=[types.Part(text=text)])


def session(store: AsyncStateStore) -> AsyncSession:
    return DistributedSessionService(store).session_record(**WHERE)


async def serve(store: AsyncStateStore, words: Words) -> None:
    service = DistributedSessionService(store)
    agent = LlmAgent(name="speaker", model=Speaker(words=words))
    runner = Runner(app_name="shop", agent=agent, session_service=service, auto_create_session=True)
    config = RunConfig(streaming_mode=StreamingMode.SSE)
    async with session(store).turn(request_id="r", ttl=TTL) as turn:
        await begin(turn, "adk:attempt")
        asked = {**WHERE, "new_message": _spoken(QUESTION, "user"), "run_config": config}
        asked.pop("app_name")
        said = stream(turn, runner.run_async(**asked))
        try:
            async with turn.stoppable():
                async for _ in said:
                    pass
        except Stopped:
            await service.append_event(
                await service.get_session(**WHERE), Event(author=agent.name, content=_spoken(said.text))
            )
        turn.outcome = said.text


async def kept(store: AsyncStateStore) -> list[str]:
    found = await DistributedSessionService(store).get_session(**WHERE)
    assert found is not None
    return [part.text for event in found.events if event.content for part in event.content.parts or []]


async def speak(**arguments: Any) -> None:
    await fall_silent(serve, **arguments)


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](**json.loads(os.environ["ARGUMENTS"])))
