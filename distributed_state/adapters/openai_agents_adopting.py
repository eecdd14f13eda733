"""Copies sessions of the OpenAI Agents SDK into a store. Law: items are added only if all existing ones are equal.

The SDK cannot list sessions: their ids are read from its database, or given by the caller.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, closing
from typing import Any

from distributed_state import AsyncStateStore, InvalidValue, StateStore
from distributed_state.adapters.adopting import (
    DELETED,
    EQUAL,
    Found,
    Name,
    canonical,
    deleted,
    demand,
    demand_in_file,
    read_only,
    removed,
    sqlite_path,
)
from distributed_state.adapters.openai_agents import DistributedSession
from distributed_state.adapters.stores import lacking

try:
    from agents.memory.session import Session
    from agents.memory.session_settings import SessionSettings
    from agents.memory.sqlite_session import SQLiteSession
except ImportError as error:
    raise lacking("openai-agents", error) from error

_AT_ONCE = 200
_LISTED = "SELECT session_id FROM agent_sessions ORDER BY created_at, session_id"
_KEYS = "agents:session:"
_FRAMEWORK = "OpenAI Agents"
_TABLES = {"agent_sessions": ("session_id", "created_at"), "agent_messages": ("id", "session_id", "message_data")}
Make = Callable[[str], Session]
Ids = Callable[[], Awaitable[Sequence[str]]]


async def threads(
    stack: AsyncExitStack,
    store: StateStore | AsyncStateStore,
    source: Any,
    *,
    into: Callable[[str, Any], DistributedSession] = DistributedSession,
    ids: Sequence[str] | None = None,
) -> Threads:
    """The sessions that `source` creates from an id, or those of a database or Redis URL, and those of the target."""
    make, listed = await _of_url(stack, source) if isinstance(source, str) else (source, None)
    if not callable(make):
        raise InvalidValue("the source is not a function that makes a session from its id")
    if ids is not None:
        wanted = list(ids)

        async def given() -> Sequence[str]:
            return wanted

        listed = given
    if listed is None:
        raise InvalidValue("the SDK has no listing of sessions: name those of your own function by --ids FILE")
    return Threads(store.aio, make, listed, into)


async def _of_url(stack: AsyncExitStack, url: str) -> tuple[Make, Ids]:
    if "://" not in url or url.startswith("sqlite:///"):
        return _of_sqlite(stack, sqlite_path(url) or "")
    if url.startswith(("redis://", "rediss://")):
        return await _of_redis(stack, url)
    return await _of_database(stack, url)


def _of_sqlite(stack: AsyncExitStack, path: str) -> tuple[Make, Ids]:
    demand_in_file(path, _FRAMEWORK, _TABLES)  # each session would create missing tables

    def make(id: str) -> Session:
        return SQLiteSession(id, path)

    async def listed() -> Sequence[str]:
        with closing(sqlite3.connect(read_only(path), uri=True)) as connection:
            return [id for (id,) in connection.execute(_LISTED)]

    return make, listed


async def _of_redis(stack: AsyncExitStack, url: str) -> tuple[Make, Ids]:
    from agents.extensions.memory.redis_session import RedisSession
    from redis.asyncio import Redis

    client: Any = Redis.from_url(url)
    stack.push_async_callback(client.aclose)
    end = ":messages"

    async def listed() -> Sequence[str]:
        keys = [key.decode() async for key in client.scan_iter(match=f"{_KEYS}*{end}", count=1000)]
        return sorted({key[len(_KEYS) : -len(end)] for key in keys})

    return lambda id: RedisSession(id, redis_client=client), listed


async def _of_database(stack: AsyncExitStack, url: str) -> tuple[Make, Ids]:
    from agents.extensions.memory.sqlalchemy_session import SQLAlchemySession
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import create_async_engine

    # psycopg works with asyncio; the default driver of a URL without a driver does not.
    engine = create_async_engine(
        "postgresql+psycopg" + url[len("postgresql") :] if url.startswith("postgresql:") else url
    )
    stack.push_async_callback(engine.dispose)
    async with engine.connect() as found:
        await found.run_sync(demand, _FRAMEWORK, _TABLES)

    async def listed() -> Sequence[str]:
        async with engine.connect() as connection:
            return [str(id) for (id,) in await connection.execute(text(_LISTED))]

    return lambda id: SQLAlchemySession(id, engine=engine), listed


class Threads:
    """The sessions of the SDK and of the target."""

    def __init__(
        self, store: AsyncStateStore, make: Make, ids: Ids, into: Callable[[str, Any], DistributedSession]
    ) -> None:
        self._store = store
        self._make = make
        self._ids = ids
        self._into = into

    async def names(self) -> Sequence[Name]:
        """The ids of sessions."""
        return [(id,) for id in await self._ids()]

    async def _theirs(self, id: str) -> list[Any]:
        session = self._make(id)
        # All items are copied, regardless of the session's own limit.
        session.session_settings = SessionSettings()
        items: list[Any] = await session.get_items()
        if isinstance(session, SQLiteSession):
            session.close()
        return items

    def _ours(self, id: str) -> DistributedSession:
        session = self._into(id, self._store)
        session.session_settings = SessionSettings()
        return session

    async def compare(self, name: Name) -> Found:
        """Compare all items of a session."""
        session = self._ours(name[0])
        record = self._store.session(session.session_id)
        if await deleted(record):
            return DELETED
        theirs, ours = await self._theirs(name[0]), await session.get_items()
        common = min(len(theirs), len(ours))
        for at in range(common):
            if canonical(theirs[at]) != canonical(ours[at]):
                return Found(differs=f"item {at + 1} is not the same here")
        if len(ours) > common:
            return Found(differs=f"it went on here: {len(ours) - common} items of {len(ours)} are not in the source")
        if len(theirs) == common:
            return EQUAL
        if await removed(record, lambda changes: sum(len(change.appended) for change in changes) > common):
            return Found(differs=f"items were removed here: {common} are left of {len(theirs)} in the source")
        return Found(work=(common, theirs[common:]))

    async def copy(self, name: Name, work: tuple[int, list[Any]]) -> None:
        """Add the missing items, unless another writer has added some meanwhile."""
        before, items = work
        session = self._ours(name[0])
        async with session.lock(ttl=10.0):
            if len(await session.get_items()) != before:
                return
            for at in range(0, len(items), _AT_ONCE):
                await session.add_items(items[at : at + _AT_ONCE])
