"""What sessions of Google ADK cost here and in its own services, on the same servers.

Law: each figure is of the same events; `rows` returns them under the name of the service.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from statistics import median
from typing import Any
from uuid import uuid4

from google.adk.errors import StaleSessionError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.integrations.redis._redis_session_service import RedisSessionService, RedisSessionServiceConfig
from google.adk.sessions.database_session_service import DatabaseSessionService
from google.genai import types

from distributed_state import AsyncStateStore
from distributed_state.adapters.adk import DistributedSessionService

APP, USER = "bench", "ada"
Make = Callable[[], AbstractAsyncContextManager[Any]]


def services(url: str, archive: str, sqlite: str) -> dict[str, Make]:
    """Ours on this Redis and this archive, ADK's Redis service on the same Redis, and its SQL one on this file."""
    mark = uuid4().hex[:8]

    @asynccontextmanager
    async def ours() -> AsyncIterator[Any]:
        async with AsyncStateStore.open(url, archive=archive, namespace=f"adk{mark}") as store:
            yield DistributedSessionService(store)

    @asynccontextmanager
    async def redis() -> AsyncIterator[Any]:
        service = RedisSessionService(RedisSessionServiceConfig(uri=url, key_prefix=f"peer{mark}:"))
        yield service
        await service._get_redis().aclose()

    @asynccontextmanager
    async def sql() -> AsyncIterator[Any]:
        async with DatabaseSessionService(f"sqlite+aiosqlite:///{sqlite}") as service:
            yield service

    return {"distributed_state": ours, "ADK Redis": redis, "ADK SQLite": sql}


def event(text: str, **delta: Any) -> Event:
    """An event of a kilobyte."""
    content = types.Content(role="model", parts=[types.Part(text=text.ljust(1000, "."))])
    return Event(author="agent", content=content, actions=EventActions(state_delta=delta))


async def rows(make: Make, lengths: tuple[int, ...] = (10, 100, 1000)) -> dict[str, Any]:
    """Microseconds of an append and of reading the whole session at these lengths, and keys kept of 200 raced."""
    found: dict[str, Any] = {}
    async with make() as service:
        session = await service.create_session(app_name=APP, user_id=USER)
        for length in lengths:
            appends = await _until(service, session, length)
            found[f"append at {length}, us"] = round(median(appends[-10:]) * 1e6)
            found[f"get at {length}, us"] = round(median([await _read(service, session.id) for _ in range(10)]) * 1e6)
        for place in ("user", "app"):
            found[f"{place}: keys kept of 200"] = await _race(service, place)
    return found


async def _until(service: Any, session: Any, length: int) -> list[float]:
    taken = []
    for number in range(len(session.events), length):
        began = time.perf_counter()
        await service.append_event(session, event(f"e{number}", k=number))
        taken.append(time.perf_counter() - began)
    return taken


async def _read(service: Any, id: str) -> float:
    began = time.perf_counter()
    await service.get_session(app_name=APP, user_id=USER, session_id=id)
    return time.perf_counter() - began


async def _race(service: Any, place: str) -> int:
    """Twenty sessions of one user set ten keys each at once; each is acknowledged."""
    sessions = [await service.create_session(app_name=APP, user_id="raced") for _ in range(20)]

    async def write(at: int) -> None:
        for key in range(10):
            try:
                await service.append_event(sessions[at], event("e", **{f"{place}:{at}.{key}": 1}))
            except StaleSessionError:
                continue

    await asyncio.gather(*map(write, range(20)))
    last = await service.get_session(app_name=APP, user_id="raced", session_id=sessions[0].id)
    return sum(key.startswith(f"{place}:") for key in last.state)
