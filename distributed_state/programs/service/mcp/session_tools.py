"""Tools about what a session holds: state, messages, notes. Law: a tool is one read or one commit of the store's.

Writing begins no session: an agent that mistypes an id reads of it, and does not go on in an empty one.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Field

from distributed_state.errors import InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.port import waited
from distributed_state.programs.service import fairness, writing
from distributed_state.programs.service.mcp.tool import OfSession
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.shapes import Limit, Version
from distributed_state.programs.service.routes import Asked
from distributed_state.records import messages as shown_messages
from distributed_state.records.access import ITEMS, MESSAGES, MOVES
from distributed_state.records.context import context_of
from distributed_state.values import bytes_as_text
from distributed_state.values.access_tokens import Right
from distributed_state.values.items import DeleteItem, PutItem, name_of
from distributed_state.values.model import PHASE

NOTES = "notes"


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
    found = await fairness.in_turn(size, shown.raw)
    return {
        "session": session.id,
        "version": shown.entry.version,
        "messages": found,
        "more": len(found) == wanted.limit,
    }


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
