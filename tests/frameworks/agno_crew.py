"""What the processes of Agno's fleet do until they are killed. Law: a line is printed when a change is acknowledged."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from agno.agent import Agent
from agno.db.redis import RedisDb
from agno.models.base import Model
from agno.models.message import Message
from agno.models.response import ModelResponse, ModelResponseEvent
from agno.run.agent import RunOutput
from frameworks.speaking import QUESTION, TTL, Words, fall_silent

from distributed_state import AsyncSession, AsyncStateStore, StateStore, Stopped
from distributed_state.adapters.agno import AsyncDistributedDb, DistributedDb, stream

SESSIONS = ("s0", "s1")


def peer(settings: dict[str, Any]) -> RedisDb:
    """Agno's own database, on the same server."""
    return RedisDb(db_url=settings["url"], db_prefix=f"peer{settings['namespace']}")


def _changes(db: Any, me: str) -> None:
    """Set a key as Agno's agents do, and store a run."""
    agent = Agent(id="a1", db=db)
    for number in itertools.count():
        id, name = random.choice(SESSIONS), f"{me}-{number}"
        agent.update_session_state({name: number}, session_id=id)
        print(id, name, flush=True)  # noqa: T201 - the pipe to the test
        db.upsert_run(RunOutput(run_id=name, session_id=id, agent_id="a1", content=name), id, "ada", run_index=number)
        print(id, f"run:{name}", flush=True)  # noqa: T201
        time.sleep(random.random() * 0.01)


def ours(me: str, settings: dict[str, Any]) -> None:
    """Changes of our sessions."""
    with StateStore.open(**settings) as store:
        _changes(DistributedDb(store), me)


def theirs(me: str, settings: dict[str, Any]) -> None:
    """The same on Agno's own Redis database."""
    _changes(peer(settings), me)


# An answer that is streamed


class Speaker(Model):
    """A model that says scripted words."""

    words: Any = None

    async def aresponse_stream(self, messages: list[Message], **more: Any) -> AsyncIterator[ModelResponse]:
        said = ""
        async for word in self.words:
            said += word
            yield ModelResponse(event=ModelResponseEvent.assistant_response.value, content=word)
        messages.append(Message(role="assistant", content=said))

    def invoke(self, *args: Any, **more: Any) -> Any:
        raise NotImplementedError

    ainvoke = invoke_stream = ainvoke_stream = _parse_provider_response = _parse_provider_response_delta = invoke


def _speaking(store: AsyncStateStore, words: Words) -> Agent:
    model = Speaker(id="speaker")
    model.words = words
    return Agent(id="travel", model=model, db=AsyncDistributedDb(store), telemetry=False)


def session(store: AsyncStateStore) -> AsyncSession:
    return AsyncDistributedDb(store).session_record("s", user_id="ada")


async def serve(store: AsyncStateStore, words: Words) -> None:
    agent = _speaking(store, words)
    async with session(store).turn(request_id="r", ttl=TTL) as turn:
        said = stream(turn, agent.arun(QUESTION, session_id="s", user_id="ada", stream=True, stream_events=True))
        with suppress(Stopped):  # Agno stores what it has
            async with turn.stoppable():
                async for _ in said:
                    pass
        turn.outcome = said.text


async def kept(store: AsyncStateStore) -> list[str]:
    runs = await AsyncDistributedDb(store).get_runs("s")
    return [message.content for run in runs for message in run.messages or []]


def speak(**arguments: Any) -> None:
    asyncio.run(fall_silent(serve, **arguments))


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(os.environ["ARGUMENTS"]))
