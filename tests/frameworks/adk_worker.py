"""Workers that run turns of ADK's sessions until they are killed. Law: a line on stdout for each event acknowledged."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

from frameworks.nursery import say, serve
from google.adk.errors import StaleSessionError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.integrations.redis._redis_session_service import RedisSessionService, RedisSessionServiceConfig
from google.genai import types

from distributed_state import AsyncStateStore
from distributed_state.adapters.adk import DistributedSessionService

SESSIONS = ("s0", "s1")
EVENTS = 3  # of a turn


async def turn(service: Any, id: str, name: str) -> None:
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
        say(f"{id} {text}")


async def work(service: Any, me: str) -> None:
    say("ready")
    for number in itertools.count():
        await turn(service, SESSIONS[random.randrange(len(SESSIONS))], f"{me}-{number}")
        await asyncio.sleep(random.random() * 0.01)


async def main(kind: str, me: str, url: str, archive: str, namespace: str) -> None:
    if kind == "ours":
        async with AsyncStateStore.open(url, archive=archive, namespace=namespace) as store:
            await work(DistributedSessionService(store), me)
    else:
        await work(RedisSessionService(RedisSessionServiceConfig(uri=url, key_prefix=f"peer{namespace}:")), me)


if __name__ == "__main__":
    serve(main)
