"""What the processes of ADK's fleet do until they are killed. Law: a line is printed when an event is acknowledged."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
from typing import Any

from google.adk.errors import StaleSessionError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.integrations.redis._redis_session_service import RedisSessionService, RedisSessionServiceConfig
from google.genai import types

from distributed_state import AsyncStateStore
from distributed_state.adapters.adk import DistributedSessionService

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


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](**json.loads(os.environ["ARGUMENTS"])))
