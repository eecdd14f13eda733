"""Workers of a test, and what is known of the sessions that they serve. Law: a worker ends with its block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from below import keys_of, redis_of, until
from sync_api import core

from distributed_state.errors import Locked
from distributed_state.store import work
from distributed_state.values.model import SCHEDULE
from distributed_state.values.schedule import Schedule


@asynccontextmanager
async def working(store: Any, handlers: dict[str, Any], **options: Any) -> AsyncIterator[None]:
    """A worker with these handlers, until the block ends."""
    for name, serves in handlers.items():
        store.handler(name, serves)
    running = asyncio.ensure_future(store.work(**options))
    try:
        await until(lambda: running.done() or core(store)._handlers.working is not None)
        yield
    finally:
        store.stop_working()
        await running


async def retried(session: Any) -> bool:
    """Call `session.retry`, and again while a turn of the worker still has the lease."""
    while True:
        try:
            return bool(await session.retry())
        except Locked:
            await asyncio.sleep(0.01)


def answering(seen: list[Any]) -> Callable[[Any], Any]:
    """A handler that answers each input, in either API."""

    def answer(turn: Any) -> None:
        for each in turn.take():
            seen.append(each.message.content)
            turn.append(each.message, {"role": "assistant", "content": f"to {each.message.content}"})

    return answer


def answers(of: Any) -> list[Any]:
    """The answers among these messages."""
    return [each.content for each in of if each.role == "assistant"]


def schedule(store: Any, id: str) -> Schedule | None:
    """When the session is served next."""
    with redis_of(store) as redis:
        stored = redis.hget(keys_of(store, id).record, SCHEDULE)
    return None if stored is None else Schedule.read(stored)


def due_set(store: Any, id: str, handler: str = "a") -> dict[bytes, float]:
    """The due times of the sessions in this one's partition."""
    with redis_of(store) as redis:
        return dict(redis.zrange(keys_of(store, id).due_of(handler), 0, -1, withscores=True))


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let failed turns be tried again soon."""
    monkeypatch.setattr(
        work.Plan, "retry_ms", lambda self, failed: None if failed >= self.max_attempts else 50 * failed
    )
