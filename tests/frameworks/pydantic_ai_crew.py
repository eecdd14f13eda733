"""What the processes do that the test of a fleet of Pydantic AI kills. Law: a line for each acknowledged turn."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

from frameworks.speaking import QUESTION, TTL, Words, begin, fall_silent
from pydantic_ai import Agent
from pydantic_ai.conversation import Conversation
from pydantic_ai.conversation_store import ConversationConflict
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, ToolCallPart, UserPromptPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.usage import UsageLimits

from distributed_state import AsyncSession, AsyncStateStore, Stopped
from distributed_state.adapters.pydantic_ai import DistributedConversationStore, stream

ID = "t"


def repeating(messages: list[ModelMessage], info: Any) -> ModelResponse:
    """A model that calls a tool, and repeats the newest prompt."""
    asked = next(texts(each)[-1] for each in reversed(messages) if isinstance(each, ModelRequest) and texts(each))
    if info.function_tools and not any(part.part_kind == "tool-return" for part in messages[-1].parts):
        return ModelResponse([ToolCallPart("look_up", {"what": asked})])
    return ModelResponse([TextPart(asked)])


def texts(message: ModelMessage) -> list[str]:
    """What a user or the model said in a message."""
    parts = [part for part in message.parts if isinstance(part, UserPromptPart | TextPart)]
    return [part.content if isinstance(part.content, str) else "a list" for part in parts]


agent = Agent(FunctionModel(repeating))


@agent.tool_plain
def look_up(what: str) -> str:
    """Look something up."""
    return f"found {what}"


async def turn_of(conversations: Any, prompt: str, id: str = ID, **more: Any) -> Any:
    """The next turn of a conversation, saved."""
    conversation = await conversations.load(id, **more) or Conversation(conversation_id=id)
    # The usage of all turns is counted, and ends a conversation of 50 requests otherwise.
    result = await agent.run(prompt, conversation=conversation, usage_limits=UsageLimits(request_limit=None))
    await conversations.save(result, **more)
    return result


async def said(conversations: Any, id: str = ID) -> list[str]:
    found = await conversations.load(id)
    return [text for message in found.messages for text in texts(message)] if found else []


async def take_turns(me: str, settings: dict[str, Any]) -> None:
    """Take turns with the others until killed, each again until nobody else saved meanwhile."""
    async with AsyncStateStore.open(**settings) as store:
        conversations = DistributedConversationStore(store)
        for number in range(1_000_000):
            while True:
                try:
                    await turn_of(conversations, f"{me}-{number}")
                    break
                except ConversationConflict:
                    continue
            print(f"{me}-{number}", flush=True)  # noqa: T201 - to the test


# An answer that is streamed


def session(store: AsyncStateStore) -> AsyncSession:
    return DistributedConversationStore(store).session_record(ID)


async def serve(store: AsyncStateStore, words: Words) -> None:
    async def says(messages: Any, info: Any) -> AsyncIterator[str]:
        async for word in words:
            yield word

    conversations = DistributedConversationStore(store)
    speaker = Agent(FunctionModel(stream_function=says))
    async with session(store).turn(request_id="r", ttl=TTL) as turn:
        await begin(turn, "attempt")
        conversation = Conversation(conversation_id=ID, messages=[ModelRequest([UserPromptPart(QUESTION)])])
        async with speaker.run_stream_events(conversation=conversation) as events:
            answer = stream(turn, events)
            try:
                async with turn.stoppable():
                    async for _ in answer:
                        pass
            except Stopped:
                pass
        conversation.messages.append(ModelResponse([TextPart(answer.text)]))
        await conversations.save(conversation)
        turn.outcome = answer.text


async def kept(store: AsyncStateStore) -> list[str]:
    return await said(DistributedConversationStore(store))


async def speak(**arguments: Any) -> None:
    await fall_silent(serve, **arguments)


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](**json.loads(os.environ["ARGUMENTS"])))
