"""The handlers of measured workers, for `distributed-state work deploy.load.workers.handlers:opened`.

Law: a turn takes all that waits, and its answers name the inputs.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable
from typing import Any

import redis.asyncio

from distributed_state import AsyncStateStore

COUNT, NOTE, HOLD, ANSWER = "count", "note", "hold", "answer"
BEGAN = "began"  # a list in Redis: what the handlers `note` and `hold` began to serve
GO = "go"  # a key in Redis: turns of `hold` wait until it is there


def opened() -> AsyncStateStore:
    """The store with its handlers, on the servers of the environment."""
    store = AsyncStateStore.open()
    client = redis.asyncio.Redis.from_url(os.environ["DISTRIBUTED_STATE_URL"])

    async def note_began(taken: Iterable[Any]) -> None:
        await client.rpush(BEGAN, *(json.dumps([each.message.content, time.time(), os.getpid()]) for each in taken))

    def answer_all(turn: Any, taken: Iterable[Any]) -> None:
        for each in taken:
            turn.append(each.message, {"role": "assistant", "content": f"to {each.message.content}"})

    @store.handler(COUNT)
    async def count(turn: Any) -> None:
        turn["n"] = len(turn.take())

    @store.handler(ANSWER)
    async def answer(turn: Any) -> None:
        answer_all(turn, turn.take())

    @store.handler(NOTE)
    async def note(turn: Any) -> None:
        taken = turn.take()
        await note_began(taken)
        answer_all(turn, taken)

    @store.handler(HOLD)
    async def hold(turn: Any) -> None:
        taken = turn.take()
        await note_began(taken)
        while not await client.exists(GO):  # noqa: ASYNC110 - another process sets it
            await asyncio.sleep(0.1)
        answer_all(turn, taken)

    return store
