"""What the processes of Agent Framework's fleet do until they are killed. Law: a line when a change is acknowledged."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from agent_framework import (
    Agent,
    AgentSession,
    BaseChatClient,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FileHistoryProvider,
    FileSessionStore,
    Message,
    ResponseStream,
)
from frameworks.speaking import QUESTION, TTL, Words, fall_silent

from distributed_state import AsyncSession, AsyncStateStore, Conflict, Stopped
from distributed_state.adapters.agent_framework import DistributedHistoryProvider, DistributedSessionStore, stream

SESSIONS = ("s0", "s1")


class Speaker(BaseChatClient[Any]):
    """A model that says scripted words, or how many messages it was sent."""

    words: Any = None

    def _inner_get_response(self, *, messages: Sequence[Message], stream: bool, options: Any, **more: Any) -> Any:
        async def streamed() -> AsyncIterator[ChatResponseUpdate]:
            async for word in self.words or [f"{len(messages)} messages"]:
                yield ChatResponseUpdate(role="assistant", contents=[Content.from_text(word)])

        async def whole() -> ChatResponse:
            return ChatResponse(messages=[Message("assistant", [f"{len(messages)} messages"])])

        return ResponseStream(streamed(), finalizer=ChatResponse.from_updates) if stream else whole()


def agent(history: Any, words: Words | None = None) -> Agent[Any]:
    client = Speaker()
    client.words = words
    return Agent(client=client, name="travel", context_providers=[history])


async def _turns(history: Any, sessions: Any, me: str) -> None:
    """Change two sessions as a service does: read, run, save."""
    for number in itertools.count():
        id, name = random.choice(SESSIONS), f"{me}-{number}"
        session = await sessions.get(id) or AgentSession(session_id=id)
        await history.save_messages(id, [Message("user", [name]), Message("assistant", [name])])
        print(id, name, flush=True)  # noqa: T201 - the pipe to the test
        session.state[name] = number
        try:
            await sessions.set(id, session)
        except Conflict:
            continue
        print(id, f"state:{name}", flush=True)  # noqa: T201


def ours(me: str, settings: dict[str, Any], folder: str) -> None:
    async def work() -> None:
        async with AsyncStateStore.open(**settings) as store:
            await _turns(DistributedHistoryProvider(store), DistributedSessionStore(store), me)

    asyncio.run(work())


def theirs(me: str, settings: dict[str, Any], folder: str) -> None:
    """The same on the framework's own files."""
    path = Path(folder)
    asyncio.run(_turns(FileHistoryProvider(path / "history"), FileSessionStore(path / "sessions"), me))


# An answer that is streamed


def session(store: AsyncStateStore) -> AsyncSession:
    return DistributedHistoryProvider(store, owner=lambda id: "ada").record("s")


async def serve(store: AsyncStateStore, words: Words) -> None:
    history = DistributedHistoryProvider(store, owner=lambda id: "ada")
    async with history.record("s").turn(request_id="r", ttl=TTL) as turn:
        run = agent(history, words).run(QUESTION, session=AgentSession(session_id="s"), stream=True)
        said = stream(turn, run)
        try:
            async with turn.stoppable():
                async for _ in said:
                    pass
        except Stopped:  # the framework stores a run at its end
            await history.save_messages("s", [Message("user", [QUESTION]), Message("assistant", [said.text])])
        turn.outcome = said.text


async def kept(store: AsyncStateStore) -> list[str]:
    return [message.text for message in await DistributedHistoryProvider(store).get_messages("s")]


def speak(**arguments: Any) -> None:
    asyncio.run(fall_silent(serve, **arguments))


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(os.environ["ARGUMENTS"]))
