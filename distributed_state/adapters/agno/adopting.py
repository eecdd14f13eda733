"""Copies sessions, runs and user memories of any of Agno's databases into ours.

Law: changes that others made in the target are not overwritten.

Design: section 22.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from agno.db.base import AsyncBaseDb, BaseDb
from agno.db.schemas.memory import UserMemory

from distributed_state import AsyncStateStore, InvalidValue, NotFound, StateStore
from distributed_state.adapters.adopting import (
    DELETED,
    EQUAL,
    Found,
    Name,
    canonical,
    deleted,
    opened,
    read_only_url,
    removed,
    removed_item,
    sqlite_path,
    untouched,
)
from distributed_state.adapters.agno.databases import AsyncDistributedDb
from distributed_state.adapters.agno.records import RUNS, joined, plain

_PAGE = 500


async def threads(
    stack: AsyncExitStack,
    store: StateStore | AsyncStateStore,
    source: Any,
    *,
    into: Callable[[Any], AsyncDistributedDb] = AsyncDistributedDb,
) -> Threads:
    """The sessions and memories of a database, or of a PostgreSQL, SQLite or Redis URL, and of the target."""
    if isinstance(source, str):
        source = _of_url(source)
        stack.callback(source.close)
        tables = (source.session_table_name, source.memory_table_name)
        if not any(map(source.table_exists, tables)):
            raise NotFound(f"no tables of Agno in the source: it has no {tables[0]!r}, nor {tables[1]!r}")
    database = await opened(stack, source, (BaseDb, AsyncBaseDb))
    return Threads(store.aio, database, into(store))


def _of_url(url: str) -> BaseDb:
    path = sqlite_path(url)
    if path is not None:
        from agno.db.sqlite import SqliteDb

        return SqliteDb(db_url=read_only_url(path))
    if url.startswith(("postgres://", "postgresql")):
        from agno.db.postgres import PostgresDb

        return PostgresDb(db_url="postgresql+psycopg://" + url.partition("://")[2])
    if url.startswith(("redis://", "rediss://")):
        from agno.db.redis import RedisDb

        return RedisDb(db_url=url)
    raise InvalidValue(
        f"{url.partition('://')[0]}:// is not one of postgresql, sqlite, redis; name a database as module:NAME"
    )


class Threads:
    """The sessions of a database and of the target, and the memories of each user."""

    def __init__(self, store: AsyncStateStore, source: BaseDb | AsyncBaseDb, target: AsyncDistributedDb) -> None:
        self._store = store
        self._source = source
        self._target = target

    async def _ask(self, method: str, *args: Any, **more: Any) -> Any:
        """The source's answer, from a sync or an asyncio database."""
        answer = getattr(self._source, method)(*args, **more)
        return await answer if inspect.isawaitable(answer) else answer

    async def names(self) -> Sequence[Name]:
        """Each session, the oldest first, and the memories of each user."""
        found: list[Name] = [("session", id) for id in await self._session_ids()]
        memories, _ = await self._ask("get_user_memories", deserialize=False)
        owners = dict.fromkeys(memory.get("user_id") or "" for memory in memories)
        return found + [("memories", user) for user in owners]

    async def _session_ids(self) -> Sequence[str]:
        wanted: dict[str, Any] = {"sort_by": "created_at", "sort_order": "asc", "deserialize": False}
        # It is in BaseDb's interface, but Agno's document databases, such as RedisDb, do not take it.
        if "include_runs" in inspect.signature(self._source.get_sessions).parameters:
            wanted["include_runs"] = False
        found: dict[str, None] = {}
        page = 1
        while True:
            rows, count = await self._ask("get_sessions", limit=_PAGE, page=page, **wanted)
            found |= {row["session_id"]: None for row in rows}
            page += 1
            if len(rows) < _PAGE:
                break
        if len(found) < count:
            # Sessions created in one second have no defined order, so pages may miss one.
            rows, _ = await self._ask("get_sessions", **wanted)
            found |= {row["session_id"]: None for row in rows}
        return list(found)

    async def compare(self, name: Name) -> Found:
        """Compare a session with its runs, or the memories of a user."""
        kind, id = name
        return await (self._compare_session(id) if kind == "session" else self._compare_memories(id or None))

    async def copy(self, name: Name, work: Any) -> None:
        """Save the missing parts."""
        kind, id = name
        if kind == "memories":
            await self._target.upsert_memories(work, preserve_updated_at=True)
            return
        session, begins, runs = work
        await self._target.upsert_sessions([session], preserve_updated_at=True)
        if not begins:
            for at, run in runs:
                await self._target.upsert_run(run, id, session.user_id, run_index=at)

    # Sessions

    async def _compare_session(self, id: str) -> Found:
        record = self._store.session(joined(self._target.session_table_name, id))
        if await deleted(record):
            return DELETED
        theirs, ours = await self._ask("get_session", id), await self._target.get_session(id)
        if theirs is None:
            return EQUAL  # deleted after it was listed
        if ours is None:
            return Found(work=(theirs, True, []))
        row, runs = _rows(theirs)
        has, there = _rows(ours)
        left = [(at, run) for at, run in enumerate(runs.values()) if there.get(run["run_id"]) != run]
        if canonical(row) == canonical(has) and not left and list(runs) == list(there):
            return EQUAL
        if extra := there.keys() - runs.keys():
            return Found(differs=f"it went on here: {len(extra)} runs of {len(there)} are not in the source")
        changed = canonical(row) != canonical(has) or any(run["run_id"] in there for _, run in left)
        if (changed or not left) and not await untouched(record):
            return Found(differs="it was changed here" if changed else "its runs are in another order here")
        lacking = runs.keys() - there.keys()
        if lacking and await removed(record, lambda changes: removed_item(changes, RUNS)):
            return Found(differs=f"runs were removed here: {len(lacking)} of {len(runs)} in the source are not there")
        return Found(work=(theirs, False, left))

    # Memories

    async def _compare_memories(self, user: str | None) -> Found:
        theirs, ours = await self._memories(self._ask, user), await self._memories(self._of_target, user)
        unlike = [id for id, memory in theirs.items() if canonical(ours.get(id)) != canonical(memory)]
        extra = ours.keys() - theirs.keys()
        if not unlike and not extra:
            return EQUAL
        record = self._store.user(user) if user else self._store.app(self._target.memory_table_name)
        if await deleted(record):
            return DELETED
        if extra:
            return Found(differs=f"{len(extra)} memories of {len(ours)} are not in the source")
        if any(id in ours for id in unlike) and not await untouched(record):
            return Found(differs="they were changed here")
        lacking = {joined(self._target.memory_table_name, id) for id in unlike if id not in ours}
        if lacking and await removed(
            record, lambda changes: any(not lacking.isdisjoint(each.deleted) for each in changes)
        ):
            return Found(
                differs=f"memories were removed here: {len(lacking)} of {len(theirs)} in the source are not there"
            )
        return Found(work=[UserMemory.from_dict(theirs[id]) for id in unlike])

    async def _of_target(self, method: str, **more: Any) -> Any:
        return await getattr(self._target, method)(**more)

    async def _memories(self, ask: Callable[..., Any], user: str | None) -> dict[str, Any]:
        found = await ask("get_user_memories", user_id=user)
        return {each.memory_id: plain(each.to_dict()) for each in found if (each.user_id or None) == user}


def _rows(session: Any) -> tuple[Any, dict[str, Any]]:
    """A session as JSON, and its runs by their ids."""
    row = plain(session.to_dict(include_runs=False))
    runs = [plain(run if isinstance(run, dict) else run.to_dict()) for run in session.runs or []]
    return row, {run["run_id"]: run for run in runs}
