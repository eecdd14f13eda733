"""Sessions that have a handler, for tests: some that failed too often, and some that ask a person."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from below import said, until

from distributed_state import AsyncStateStore
from distributed_state.conversation import inbox
from distributed_state.records.context import context_of
from distributed_state.values.schedule import Schedule


async def schedule_of(session: Any) -> Schedule | None:
    return inbox.schedule_of(await context_of(session).read(fresh=True))


@asynccontextmanager
async def worked(store: AsyncStateStore, serves: Callable[[Any], Any], **options: Any) -> AsyncIterator[None]:
    """A worker of the handler "support", until the block ends."""
    store._handlers.pop("support", None)
    store.handler("support", serves)
    running = asyncio.create_task(store.work(**options))
    try:
        yield
    finally:
        store.stop_working()
        await running


async def make_stuck(store: AsyncStateStore, *ids: str) -> None:
    """Let the handler of these sessions fail for good."""

    def fail(turn: Any) -> None:
        raise ZeroDivisionError("a secret")

    for id in ids:
        await store.session(id).post(said("hi"), handler="support")
    async with worked(store, fail, max_attempts=1):

        async def all_are() -> bool:
            found = [await schedule_of(store.session(id)) for id in ids]
            return all(each is not None and each.stuck for each in found)

        await until(all_are)


async def ask(store: AsyncStateStore, id: str, question: str, **options: Any) -> None:
    """Let a turn of a session ask a person."""
    async with store.session(id).turn() as turn:
        turn.ask(question, **options)
