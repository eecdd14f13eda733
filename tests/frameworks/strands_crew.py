"""What the processes of Strands' fleet do until they are killed. Law: a line is printed when an agent has answered."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from frameworks.speaking import QUESTION, TTL, Words, begin, fall_silent
from strands import Agent, tool
from strands.models import Model
from strands.session import FileSessionManager
from strands.types.exceptions import EventLoopException, SessionException

from distributed_state import AsyncSession, AsyncStateStore, Fenced, StateStore, Stopped
from distributed_state.adapters.strands import DistributedSessionManager, stream

SESSION, TURN = "s0", 4  # messages of a turn: a question, a call of a tool, its result, an answer


class Scripted(Model):
    """A model whose answers are texts, words that are streamed, and calls of tools as a dict."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [*answers]

    async def stream(self, messages: Any, *given: Any, **more: Any) -> AsyncIterator[Any]:
        answer = self.answers.pop(0)
        yield {"messageStart": {"role": "assistant"}}
        if isinstance(answer, dict):
            yield {"contentBlockStart": {"start": {"toolUse": {"name": answer["name"], "toolUseId": "c1"}}}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(answer["input"])}}}}
        else:
            yield {"contentBlockStart": {"start": {}}}
            async for word in answer if isinstance(answer, Words) else Words([answer]):
                yield {"contentBlockDelta": {"delta": {"text": word}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use" if isinstance(answer, dict) else "end_turn"}}

    def structured_output(self, *given: Any, **more: Any) -> Any:
        raise NotImplementedError

    update_config = structured_output

    def get_config(self) -> dict[str, str]:
        return {"model_id": "scripted"}


@tool
async def look_up(turn: str) -> str:
    """Look something up."""
    await asyncio.sleep(random.random() * 0.01)
    return f"found {turn}"


def agent(manager: Any, *answers: Any, **options: Any) -> Agent:
    """An agent as a worker creates it for a request."""
    return Agent(Scripted(*answers), tools=[look_up], session_manager=manager, callback_handler=None, **options)


def answer(manager: Any, turn: str) -> None:
    agent(manager, {"name": "look_up", "input": {"turn": turn}}, turn)(turn)


def told(message: Any) -> str:
    """The turn that a message belongs to."""
    (block,) = message["content"]
    if "toolUse" in block:
        return str(block["toolUse"]["input"]["turn"])
    text = block["toolResult"]["content"][0]["text"] if "toolResult" in block else block["text"]
    return str(text).removeprefix("found ")


def ours(me: str, settings: dict[str, Any], folder: str) -> None:
    """Turns that wait for one another, on one conversation."""
    with StateStore.open(**settings) as store:
        for number in range(1_000_000):
            try:
                with store.session(SESSION).lock(wait=60, ttl=5):
                    answer(DistributedSessionManager(SESSION, store), f"{me}-{number}")
            except (Fenced, EventLoopException):  # this process was paused for too long
                continue
            print(f"{me}-{number}", flush=True)  # noqa: T201 - to the test


def races(me: str, settings: dict[str, Any], folder: str) -> None:
    """Turns that do not wait: of those that meet some are refused."""
    with StateStore.open(**settings) as store:
        for number in range(1_000_000):
            try:
                answer(DistributedSessionManager(SESSION, store), f"{me}-{number}")
            except (SessionException, EventLoopException):
                continue
            print(f"{me}-{number}", flush=True)  # noqa: T201


def theirs(me: str, settings: dict[str, Any], folder: str) -> None:
    """Turns on Strands' own files."""
    for number in range(1_000_000):
        try:
            answer(FileSessionManager(SESSION, storage_dir=folder), f"{me}-{number}")
        except (SessionException, OSError):  # another one is creating it
            continue
        print(f"{me}-{number}", flush=True)  # noqa: T201


# An answer that is streamed


def session(store: AsyncStateStore) -> AsyncSession:
    return store.session("t")


async def serve(store: AsyncStateStore, words: Words) -> None:
    async with session(store).turn(request_id="r", ttl=TTL) as turn:
        await begin(turn, "attempt")
        manager = DistributedSessionManager("t", store)
        speaker = agent(manager, words)
        said = stream(turn, speaker.stream_async(QUESTION))
        try:
            async with turn.stoppable():
                async for _ in said:
                    pass
        except Stopped:
            manager.append_message({"role": "assistant", "content": [{"text": said.text}]}, speaker)
        turn.outcome = said.text


async def kept(store: AsyncStateStore) -> list[str]:
    messages = DistributedSessionManager("t", store).list_messages("t", "default")
    return [told(each.to_message()) for each in messages]


def speak(**arguments: Any) -> None:
    asyncio.run(fall_silent(serve, **arguments))


def files(folder: Path) -> list[Any]:
    """The messages of Strands' own files."""
    return [each.to_message() for each in FileSessionManager(SESSION, f"{folder}").list_messages(SESSION, "default")]


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(os.environ["ARGUMENTS"]))
