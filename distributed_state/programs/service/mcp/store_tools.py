"""Tools that look for sessions, begin them, and go back in them. Law: what is listed or found is the caller's own."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from typing import Annotated, Any, ClassVar

from pydantic import Field

from distributed_state.errors import NotFound
from distributed_state.programs.service import writing
from distributed_state.programs.service.fairness import copying, searching
from distributed_state.programs.service.mcp.tool import OfSession, Tool
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.search import narrowed
from distributed_state.programs.service.resources.shapes import Limit, Version
from distributed_state.programs.service.routes import Asked
from distributed_state.records.context import context_of
from distributed_state.values.access_tokens import Right

_LOOKED_AT = 100  # hits, to find those of one session among them


class Search(Tool):
    """Find messages, state and notes by what they say, in all sessions or one; the best hits first."""

    name: ClassVar[str] = "search"
    right: ClassVar[Right] = "read"
    query: str = Field(description="Words to look for, in any order.")
    session: str | None = Field(None, description="Only in the session of this id.")
    limit: Annotated[int, Field(ge=1, le=100)] = Field(10, description="How many hits at most.")

    async def run(self, asked: Asked) -> Any:
        """The hits."""
        prefix = asked.caller.prefix if self.session is None else records.within(asked, self.session)
        # Other ids may begin with the same text, and their hits be the better ones.
        limit = self.limit if self.session is None else _LOOKED_AT
        async with searching(asked.caller.party):
            found = await asked.store.search(self.query, scope="session", prefix=prefix, limit=limit)
        own = [each for each in found if self.session in (None, each.id)]
        return {"hits": [asdict(each) for each in own[: self.limit]]}


class History(OfSession):
    """Read who changed what in a session, and when: one entry for each version, the oldest first."""

    name: ClassVar[str] = "history"
    right: ClassVar[Right] = "read"
    after: Version = Field(0, description="Only changes after this version.")
    limit: Limit = Field(50, description="How many changes at most.")

    async def run(self, asked: Asked) -> Any:
        """The changes; times are in seconds since 1970."""
        context = context_of(self.chosen(asked))
        changes = await records.read_history(context, asked.limits, after=self.after, limit=self.limit)
        if not changes and not self.after:
            raise NotFound("there is no such session, or nothing of its history is left")
        return {
            "changes": [
                {
                    "version": each.version,
                    "time": each.time,
                    "actor": each.actor,
                    "kind": each.kind,
                    "set": each.set,
                    "deleted": each.deleted,
                    "appended": [message.to_dict() for message in each.appended],
                    "phase": each.phase,
                    "label": each.label,
                    "items": [
                        {"collection": collection, "key": key, "value": None if item is None else item.value}
                        for (collection, key), item in each.items.items()
                    ],
                }
                for each in changes
            ]
        }


class ListSessions(Tool):
    """List sessions: the last changed first, or, where ids of yours begin with a prefix, in the order of their ids."""

    name: ClassVar[str] = "list_sessions"
    right: ClassVar[Right] = "read"
    prefix: str | None = Field(None, description="Only sessions whose id begins with this.")
    user: str | None = Field(None, description="Only sessions of this user.")
    limit: Limit = Field(50, description="How many sessions at most.")
    after: str | None = Field(None, description="What the page before gave as next.")

    async def run(self, asked: Asked) -> Any:
        """A page of sessions; `next` is null if it is the last."""
        prefix = narrowed(asked, self.prefix)
        if self.user is not None:
            records.within(asked, self.user)
        rows = await asked.store.sessions(user=self.user, prefix=prefix, limit=self.limit, after=self.after)
        shown = [{"session": each.id, **asdict(each)} for each in rows]
        for row in shown:
            del row["id"], row["cursor"]
        return {"sessions": shown, "next": rows[-1].cursor if len(rows) == self.limit else None}


class CreateSession(Tool):
    """Begin a session; its id is what the other tools take as session."""

    name: ClassVar[str] = "create_session"
    right: ClassVar[Right] = "write"
    session: str | None = Field(None, description="Id of the new session; one is made if left out.")
    user: str | None = Field(None, description="Id of the user whose session it is.")
    fields: dict[str, Any] = Field(default_factory=dict, description="State to begin with, by the fields' names.")

    async def run(self, asked: Asked) -> Any:
        """The session's id and version."""
        user = records.owner(asked, self.user)
        session = asked.store.session(_new(asked, self.session), user=user)
        await asked.quota.ask(asked.store, asked.caller, "session")
        return {"session": session.id, "version": await session.create(self.fields)}


class ForkSession(OfSession):
    """Begin another session from the state and messages of this one, as it is or as it was at a version."""

    name: ClassVar[str] = "fork_session"
    right: ClassVar[Right] = "write"
    new_session: str | None = Field(None, description="Id of the new session; one is made if left out.")
    version: Version | None = Field(None, description="Version of this session to begin from; the last if left out.")

    async def run(self, asked: Asked) -> Any:
        """The new session's id and version."""
        id, session = _new(asked, self.new_session), self.chosen(asked)
        await asked.quota.ask(asked.store, asked.caller, "session")
        async with copying(asked.caller.party):
            return {"session": id, "version": await session.fork(id, version=self.version)}


class Rollback(OfSession):
    """Make a session what it was at an earlier version. That is a new version: nothing of the history is lost."""

    name: ClassVar[str] = "rollback"
    right: ClassVar[Right] = "write"
    version: Version = Field(description="The version to go back to, from the history.")

    async def run(self, asked: Asked) -> Any:
        """The new version."""
        session = self.chosen(asked)
        await writing.comes_back(asked, context_of(session))
        async with copying(asked.caller.party):
            return {"version": await session.rollback(version=self.version)}


def _new(asked: Asked, id: str | None) -> str:
    if id is None:
        return asked.caller.prefix + secrets.token_hex(16)
    return records.within(asked, records.checked(id))
