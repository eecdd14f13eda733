"""What the processes of LangChain's fleet do until they are killed. Law: a line is printed when a turn was added."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from frameworks.speaking import QUESTION, TTL, Words, fall_silent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from distributed_state import AsyncSession, AsyncStateStore, StateStore, Stopped
from distributed_state.adapters.langchain import DistributedChatMessageHistory, stream

SESSIONS = ("s0", "s1")


class Speaker(BaseChatModel):
    """A model that says scripted words."""

    words: Any

    @property
    def _llm_type(self) -> str:
        return "speaker"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **more: Any) -> ChatResult:
        raise NotImplementedError

    async def _astream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **more: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        async for word in self.words:
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=word))
            if run_manager:
                await run_manager.on_llm_new_token(word, chunk=chunk)
            yield chunk


def _turns(me: str, settings: dict[str, Any], *, at_once: bool) -> None:
    with StateStore.open(**settings) as store:
        for number in itertools.count():
            id, turn = random.choice(SESSIONS), f"{me}-{number}"
            history = DistributedChatMessageHistory(id, store)
            said = [HumanMessage(turn), AIMessage(turn)]
            for some in [said] if at_once else [[each] for each in said]:
                history.add_messages(some)
            print(id, turn, flush=True)  # noqa: T201 - the pipe to the test
            time.sleep(random.random() * 0.005)


def at_once(me: str, settings: dict[str, Any]) -> None:
    """Each turn is added as a chain adds it: all of its messages in one call."""
    _turns(me, settings, at_once=True)


def one_by_one(me: str, settings: dict[str, Any]) -> None:
    """Each message is added by a call of its own."""
    _turns(me, settings, at_once=False)


# An answer that is streamed


def session(store: AsyncStateStore) -> AsyncSession:
    return store.session("t")


async def serve(store: AsyncStateStore, words: Words) -> None:
    history = DistributedChatMessageHistory("t", store)
    async with session(store).turn(request_id="r", ttl=TTL) as turn:
        said, asked = stream(turn), HumanMessage(QUESTION)
        try:
            async with turn.stoppable():
                async for _ in Speaker(words=words).astream([asked], {"callbacks": [said]}):
                    pass
        except Stopped:
            pass
        await history.aadd_messages([asked, AIMessage(said.text)])
        turn.outcome = said.text


async def kept(store: AsyncStateStore) -> list[str]:
    return [str(message.content) for message in await DistributedChatMessageHistory("t", store).aget_messages()]


def speak(**arguments: Any) -> None:
    asyncio.run(fall_silent(serve, **arguments))


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(os.environ["ARGUMENTS"]))
