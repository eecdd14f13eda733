"""Scripted answers that are streamed into turns, and workers that are killed in the middle of one.

Law: a crew has `serve(store, words)`, which serves request r as its how-to page says and keeps the part of a stopped
answer, `session(store)` in which the turn is, and `kept(store)`: the texts that the framework itself has of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from distributed_state import AsyncStateStore

QUESTION = "Where to?"
TTL = 2.0  # of a turn: seconds after which the second attempt begins


class Words:
    """What a scripted model says, word by word. It is silent for ever `after` so many."""

    def __init__(self, said: Sequence[str], after: int | None = None) -> None:
        self._said = said
        self._after = after

    async def __aiter__(self) -> AsyncIterator[str]:
        for number, word in enumerate(self._said):
            if number == self._after:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            yield word


async def begin(turn: Any, field: str) -> None:
    """Remove what the attempt of a dead worker stored, as docs/how-to/streaming.md says."""
    earlier = turn.get(field)
    if earlier and earlier["request"] == turn.request_id:
        await turn.session.rollback(version=earlier["version"])
    version = await turn.session.version() + 1
    await turn.session.set(field, {"request": turn.request_id, "version": version})
    turn[field] = None


async def fall_silent(
    serve: Callable[[Any, Words], Awaitable[None]], settings: dict[str, Any], said: Sequence[str], after: int
) -> None:
    """Answer in a process that is to be killed."""
    async with AsyncStateStore.open(**settings) as store:
        await serve(store, Words(said, after))
