"""What Agno's agents remember of users. Law: a memory is a field of its user's record, and each is written alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from agno.db.schemas.memory import UserMemory

from distributed_state import Deleted
from distributed_state.adapters.agno.layout import TAG, joined, plain
from distributed_state.adapters.agno.listing import every, in_pieces, page_of
from distributed_state.adapters.agno.sessions import Sessions


class Memories(Sessions):
    """The user memories of Agno. Who is asked for one without naming its user looks at all users."""

    def __init__(self, store: Any, sessions: str, runs: str, memories: str) -> None:
        super().__init__(store, sessions, runs)
        self._memories = memories

    def _of(self, user_id: str | None) -> Any:
        return self._store.user(user_id) if user_id else self._store.app(self._memories)

    async def _read(self, user_id: str | None) -> dict[str, dict[str, Any]]:
        """All memories by their ids, of a user or of all."""
        records = [self._of(user_id)]
        if user_id is None:
            records += map(self._store.user, await every(self._store, "user", "", tags={TAG: self._memories}))
        prefix = joined(self._memories, "")
        return {
            name.removeprefix(prefix): memory
            for fields in await in_pieces(self._store, records)
            for name, memory in fields.items()
            if name.startswith(prefix)
        }

    async def upsert_user_memory(self, memory: UserMemory, deserialize: bool | None = True) -> Any:
        """Store a memory and return it: one commit of its user's record. One without an id gets one."""
        return await self._remember(memory, deserialize, int(time.time()))

    async def upsert_memories(
        self, memories: Sequence[UserMemory], deserialize: bool | None = True, preserve_updated_at: bool = False
    ) -> list[Any]:
        """Store these memories."""
        found = []
        for memory in filter(None, memories):
            updated = memory.updated_at if preserve_updated_at else None
            found.append(await self._remember(memory, deserialize, updated or int(time.time())))
        return found

    async def _remember(self, memory: UserMemory, deserialize: bool | None, now: int) -> Any:
        if memory.memory_id is None:
            memory.memory_id = str(uuid4())
        stored = plain({**memory.to_dict(), "updated_at": now})
        named = {joined(self._memories, memory.memory_id): stored}
        await self._of(memory.user_id).write(set=named, tag={TAG: self._memories}, revive=True)
        return UserMemory.from_dict(stored) if deserialize else stored

    async def get_user_memory(
        self, memory_id: str, deserialize: bool | None = True, user_id: str | None = None
    ) -> UserMemory | dict[str, Any] | None:
        """Read a memory, None if there is none of that user."""
        memory = (await self._read(user_id)).get(memory_id)
        return memory if memory is None or not deserialize else UserMemory.from_dict(memory)

    async def get_user_memories(
        self,
        user_id: str | None = None,
        agent_id: str | None = None,
        team_id: str | None = None,
        topics: Sequence[str] | None = None,
        search_content: str | None = None,
        limit: int | None = None,
        page: int | None = None,
        sort_by: str | None = None,
        sort_order: str | None = None,
        deserialize: bool | None = True,
    ) -> Any:
        """Read memories of a user, or of all; without `deserialize` a page of them and how many there are."""
        found = [
            memory
            for memory in (await self._read(user_id)).values()
            if agent_id in (None, memory.get("agent_id"))
            and team_id in (None, memory.get("team_id"))
            and (topics is None or set(topics) & set(memory.get("topics") or []))
            and (search_content is None or search_content.lower() in str(memory.get("memory", "")).lower())
        ]
        found.sort(key=lambda memory: (memory.get("created_at") or "", memory["memory_id"]))
        rows = page_of(found, limit, page, sort_by, sort_order)
        return [UserMemory.from_dict(row) for row in rows] if deserialize else (rows, len(found))

    async def get_all_memory_topics(self, user_id: str | None = None) -> list[str]:
        """List the topics of memories, each once."""
        memories = (await self._read(user_id)).values()
        return sorted({topic for memory in memories for topic in memory.get("topics") or []})

    async def get_user_memory_stats(
        self, limit: int | None = None, page: int | None = None, user_id: str | None = None
    ) -> tuple[list[dict[str, Any]], int]:
        """Count the memories of each user, and say when the last changed; the user of the newest first."""
        stats: dict[str, dict[str, Any]] = {}
        for memory in (await self._read(user_id)).values():
            if user := memory.get("user_id"):
                mine = stats.setdefault(user, {"user_id": user, "total_memories": 0, "last_memory_updated_at": 0})
                mine["total_memories"] += 1
                mine["last_memory_updated_at"] = max(mine["last_memory_updated_at"], memory.get("updated_at") or 0)
        rows = sorted(stats.values(), key=lambda each: each["last_memory_updated_at"], reverse=True)
        return page_of(rows, limit, page, None, None), len(rows)

    async def delete_user_memory(self, memory_id: str, user_id: str | None = None) -> None:
        """Delete a memory, if it is that user's."""
        await self.delete_user_memories([memory_id], user_id)

    async def delete_user_memories(self, memory_ids: Sequence[str], user_id: str | None = None) -> None:
        """Delete these memories, those that are that user's if one is given."""
        found = await self._read(user_id)
        owners: dict[str | None, list[str]] = {}
        for id in memory_ids:
            if id in found:
                owners.setdefault(found[id].get("user_id"), []).append(joined(self._memories, id))
        for owner, names in owners.items():
            with suppress(Deleted):  # all of that user was
                await self._of(owner).write(delete=names)

    async def clear_memories(self) -> None:
        """Delete all memories of all users."""
        await self.delete_user_memories(list(await self._read(None)))
