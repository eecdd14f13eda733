"""The tools of an agent. Law: a tool names the right that it needs, checks its session, and is one read or commit.

A tool is the model of its arguments: their descriptions are what the agent's model reads, and its docstring says what
the tool is for. Writing begins no session: an agent that mistypes an id gets an error, and does not go on in an empty
one. What is listed or found is the caller's own.

Design: section 25.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict
from functools import cache
from inspect import cleandoc
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from distributed_state.conversation.session import AsyncSession
from distributed_state.errors import AccessDenied, InvalidValue, NotFound
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.port import waited
from distributed_state.programs.service import requests, scheduling, writing
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.search import narrowed
from distributed_state.programs.service.resources.shapes import Limit, Version
from distributed_state.programs.service.routes import SESSION, Asked
from distributed_state.programs.service.scheduling import copying, searching
from distributed_state.records import messages as shown_messages
from distributed_state.records.access import ITEMS, MESSAGES, MOVES
from distributed_state.records.context import context_of
from distributed_state.values import bytes_as_text
from distributed_state.values.access_tokens import Right
from distributed_state.values.items import DeleteItem, PutItem, name_of
from distributed_state.values.model import PHASE

_WRONG = 5  # arguments that are named in one error
NOTES = "notes"
_LOOKED_AT = 100  # hits, to find those of one session among them


class Tool(BaseModel):
    """A tool, with its arguments when it runs."""

    model_config = ConfigDict(extra="forbid")

    name: ClassVar[str]
    right: ClassVar[Right]

    async def run(self, asked: Asked) -> Any:
        """What the agent reads, as JSON. Raises StateError."""
        raise NotImplementedError

    @classmethod
    def description(cls) -> str:
        """What the tool is for."""
        return cleandoc(cls.__doc__ or "")

    @classmethod
    @cache
    def schema_of_arguments(cls) -> dict[str, Any]:
        """JSON schema of the arguments; it is made once, and not to be changed."""
        schema = cls.model_json_schema()
        return {name: part for name, part in schema.items() if name not in ("title", "description")}

    @classmethod
    def read(cls, given: dict[str, Any] | None) -> Tool:
        """The tool with these arguments. Raises InvalidValue that says which do not fit, for the model to correct."""
        try:
            return cls.model_validate(given or {})
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)[:_WRONG]
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))[:80]}: {each['msg'][:200]}" for each in found)
            raise InvalidValue(f"{cls.name}: {wrong}; it takes {', '.join(cls.model_fields)}") from error


class OfSession(Tool):
    """A tool that is about one session."""

    session: str | None = Field(
        None, description="Id of the session. It may be left out where the client names one for all calls."
    )

    def chosen(self, asked: Asked) -> AsyncSession:
        """The session. Raises AccessDenied for another tenant's, before a server is asked."""
        return asked.store.session(records.within(asked, self.session or default_session(asked)))


def default_session(asked: Asked) -> str:
    """The session that the header names. Raises InvalidValue if none is named."""
    named = requests.header(asked.request, SESSION)
    if not named:
        raise InvalidValue("name the session: give its id as `session`, or let the client send the header X-Session-Id")
    return named


def allow(asked: Asked, right: Right) -> None:
    """Raise AccessDenied unless the caller has the right."""
    if right not in asked.caller.rights:
        raise AccessDenied(f"{asked.caller.actor!r:.80} has no right to {right}")


# State and messages


class GetState(OfSession):
    """Read the state of a session: its version, phase and fields, all of them or those named."""

    name: ClassVar[str] = "get_state"
    right: ClassVar[Right] = "read"
    keys: list[str] | None = Field(None, description="Names of the fields to read; all if left out.")

    async def run(self, asked: Asked) -> Any:
        """Version, phase and fields of one moment."""
        session = self.chosen(asked)
        context = context_of(session)
        context.allow("read", MOVES)

        async def read() -> CachedRecord:
            entry = records.there(await context.read(True), "session", session.id)
            if self.keys is None:
                records.size_of(entry, asked.limits)
            return entry

        entry = await waited.with_room(read)
        phase = entry.fields.get(PHASE)
        fields = context.fields(entry)
        if self.keys is not None:
            fields = {key: fields[key] for key in self.keys if key in fields}
        return {
            "session": session.id,
            "version": entry.version,
            "phase": None if phase is None else phase.decode("utf-8", "surrogatepass"),
            **bytes_as_text.apart(fields),
        }


class SetState(OfSession):
    """Set fields of a session's state in one atomic commit; the other fields stay as they are.

    With expect_version nothing is written unless the session is still at that version: read the state again, and
    decide anew.
    """

    name: ClassVar[str] = "set_state"
    right: ClassVar[Right] = "write"
    fields: dict[str, Any] = Field(description="New values by the fields' names; any JSON values.")
    expect_version: Version | None = Field(None, description="Version of the session that this change is based on.")

    async def run(self, asked: Asked) -> Any:
        """The new version."""
        if not self.fields:
            raise InvalidValue("fields: name at least one field to set")
        written = await self.chosen(asked).write(
            set=self.fields, expect_version=self.expect_version, expect_exists=True
        )
        return {"version": written.version}


class AppendMessage(OfSession):
    """Add a message to the end of a session's conversation."""

    name: ClassVar[str] = "append_message"
    right: ClassVar[Right] = "write"
    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="Who says it.")
    content: str = Field(description="The text.")
    tool_call_id: str | None = Field(None, description="For the role tool: the call that this answers.")
    metadata: dict[str, Any] | None = Field(None, description="Whatever is to be kept with the message.")

    async def run(self, asked: Asked) -> Any:
        """The new version, and the message's number."""
        given = {"tool_call_id": self.tool_call_id, "metadata": self.metadata}
        message = {"role": self.role, "content": self.content} | {
            name: value for name, value in given.items() if value is not None
        }
        written = await self.chosen(asked).write(append=[message], expect_exists=True)
        return {"version": written.version, "number": written.first_message}


class ReadMessages(OfSession):
    """Read messages of a session in order, each with its number: the last ones, or a page beside a number.

    To read on into the past give the smallest number that you have as before; to read what came since then, give the
    greatest as after.
    """

    name: ClassVar[str] = "read_messages"
    right: ClassVar[Right] = "read"
    limit: Limit = Field(20, description="How many messages at most.")
    before: Version | None = Field(None, description="Only messages with a smaller number: the last of them.")
    after: Version | None = Field(None, description="Only messages with a greater number: the first of them.")

    async def run(self, asked: Asked) -> Any:
        """The messages, oldest first, and whether the page is full."""
        return await messages_of(asked, self)


async def messages_of(asked: Asked, wanted: ReadMessages) -> dict[str, Any]:
    """A page of messages. Raises NotFound and Deleted if there is no session."""
    session = wanted.chosen(asked)
    context = context_of(session)
    context.allow("read", MESSAGES)
    order: Literal["asc", "desc"] = "desc" if wanted.after is None else "asc"
    page = shown_messages.Page(limit=wanted.limit, before=wanted.before, after=wanted.after, order=order)
    shown, size = await records.read_shown(context, page, asked.limits, fresh=True)
    records.there(shown.entry, "session", session.id)
    found = await scheduling.in_turn(size, shown.raw)
    return {
        "session": session.id,
        "version": shown.entry.version,
        "messages": found,
        "more": len(found) == wanted.limit,
    }


# Notes


class AddNote(OfSession):
    """Write a note to remember in this session; a note of the same key is replaced."""

    name: ClassVar[str] = "add_note"
    right: ClassVar[Right] = "write"
    note: Any = Field(description="The note: a text, or any JSON value.")
    key: str | None = Field(None, description="Name of the note, such as a topic; one is made if left out.")

    async def run(self, asked: Asked) -> Any:
        """The note's key, and the new version."""
        key = uuid4().hex if self.key is None else self.key
        put, session = PutItem(collection=NOTES, key=key, value=self.note), self.chosen(asked)
        await writing.puts(asked, context_of(session), [name_of(NOTES, key)])
        written = await session.write(items=[put], expect_exists=True)
        return {"key": key, "version": written.version}


class ListNotes(OfSession):
    """Read the notes of a session in the order of their keys."""

    name: ClassVar[str] = "list_notes"
    right: ClassVar[Right] = "read"
    prefix: str = Field("", description="Only notes whose key begins with this.")
    after: str | None = Field(None, description="What the page before gave as next.")
    limit: Limit = Field(100, description="How many notes at most.")

    async def run(self, asked: Asked) -> Any:
        """A page of notes; `next` is null if it is the last."""
        session = self.chosen(asked)
        await records.look(session, "session", True, ITEMS)
        page = await session.items(NOTES).list(prefix=self.prefix, after=self.after, limit=self.limit)
        notes = [{"key": each.key, "note": each.value, "version": each.version} for each in page.items]
        return {"session": session.id, "notes": notes, "next": page.next}


class DeleteNote(OfSession):
    """Delete a note of a session."""

    name: ClassVar[str] = "delete_note"
    right: ClassVar[Right] = "delete"
    key: str = Field(description="The note's key.")

    async def run(self, asked: Asked) -> Any:
        """The new version."""
        gone = DeleteItem(collection=NOTES, key=self.key, if_present=True)
        return {"version": (await self.chosen(asked).write(items=[gone], expect_exists=True)).version}


# Sessions: found, begun, and taken back


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
