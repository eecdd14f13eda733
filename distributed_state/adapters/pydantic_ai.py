"""Conversations of Pydantic AI, kept in a store: `DistributedConversationStore(store)`.

Law: a save is one commit, of the new entries and of the record that points at them, and a conversation has all entries
that its history and its branches need.

| Pydantic AI | here |
|---|---|
| conversation | `store.session("pydantic-ai/<conversation_id>", user=scope)` |
| its record | field `pydantic_ai` |
| its revision | field `pydantic_ai_revision` |
| entry | a message: role and text, and under `pydantic_ai` the entry |

Pydantic AI asks for an entry by its id alone. So the ids that are read here know their conversation (`Place`), and no
index of entries has to be kept.

Design: section 22.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from distributed_state import ABSENT, AsyncSession, AsyncStateStore, Conflict, StateStore
from distributed_state.adapters.stores import Streamed, Used, infos_below, lacking, named, newest, open_store

try:
    from pydantic_ai import AgentStreamEvent, FunctionToolCallEvent, FunctionToolResultEvent
    from pydantic_ai.conversation_store import (
        ConversationConflict,
        ConversationEntry,
        ConversationRecord,
        ConversationStore,
    )
    from pydantic_ai.messages import (
        ModelMessagesTypeAdapter,
        ModelResponse,
        PartDeltaEvent,
        PartStartEvent,
        TextPart,
        TextPartDelta,
    )
    from pydantic_ai.run import AgentRunResultEvent
except ImportError as error:
    raise lacking("pydantic-ai", error) from error

_OURS, _REVISION = "pydantic_ai", "pydantic_ai_revision"
_TEXTS = {"user-prompt": "user", "text": "assistant"}
_RECORD = TypeAdapter(ConversationRecord)


class Place(str):
    """The id of an entry, with the conversation in which it was found."""

    conversation: str

    @classmethod
    def of(cls, id: str, conversation: str) -> Place:
        """The id, with its conversation."""
        made = cls(id)
        made.conversation = conversation
        return made


class DistributedConversationStore(ConversationStore):
    """Conversations that any worker continues: in place of `InMemoryConversationStore()`.

    Example::

        conversations = DistributedConversationStore(store)
        conversation = await conversations.load("c1", scope="ada") or Conversation(conversation_id="c1")
        result = await agent.run("A sauna, please", conversation=conversation)
        await conversations.save(result, scope="ada")

    `store` is an open StateStore or AsyncStateStore, which its owner closes. Creating the object does no I/O. A scope
    is the owner of its conversations, so `store.forget("ada")` removes them. `options` are those of `store.session`:
    `idle`, `lifetime`, ... `prefix` begins the ids of the sessions.

    A save raises ConversationConflict if another worker has saved or deleted the conversation since it was loaded, and
    stores nothing then. `delete` removes a conversation permanently, with all of its entries; a fork has its own
    copies of them. Other errors are the store's (`distributed_state.StateError`).
    """

    def __init__(self, store: AsyncStateStore | StateStore, *, prefix: str = "pydantic-ai/", **options: Any) -> None:
        self._store = open_store(store).aio
        self._prefix = prefix
        self._options = options

    def session_record(self, conversation_id: str, *, scope: str | None = None) -> AsyncSession:
        """Return the session of the store that holds a conversation, for its lock, turns, inbox and history. No I/O."""
        id = self._prefix + named(conversation_id, "a conversation's id")
        session: AsyncSession = self._store.session(id, user=scope, **self._options)
        return session

    # ConversationStore

    async def read_record(self, conversation_id: str) -> ConversationRecord | None:
        """Read a conversation's record as the server has it now, None if there is none."""
        return _record(conversation_id, await self.session_record(conversation_id).get_all(fresh=True))

    async def read_records(self, *, scope: str | None = None, limit: int | None = None) -> Sequence[ConversationRecord]:
        """Read the records of all conversations, or of a scope's, the most recently saved first."""
        infos = await infos_below(self._store, self._prefix, user=scope)
        infos.sort(key=lambda info: info.updated, reverse=True)
        ids = [info.id.removeprefix(self._prefix) for info in infos[:limit]]
        fields = await newest(map(self.session_record, ids))
        found = [_record(id, each) for id, each in zip(ids, fields, strict=True)]
        records = [record for record in found if record is not None and scope in (None, record.scope)]
        return sorted(records, key=lambda record: record.updated_at, reverse=True)

    async def write_record(
        self,
        record: ConversationRecord,
        *,
        new_entries: Sequence[ConversationEntry] = (),
        expected_revision: str | None,
    ) -> None:
        """Store a record and new entries in one commit, or raise ConversationConflict and store neither."""
        entries = [*await self._inherited(record, new_entries, expected_revision), *new_entries]
        fields = to_jsonable_python(record, bytes_mode="base64", exclude={"conversation_id", "revision"})
        session = self.session_record(record.conversation_id, scope=record.scope)
        try:
            await session.write(
                set={_OURS: fields, _REVISION: record.revision},
                append=map(_message, entries),
                expect={_REVISION: ABSENT if expected_revision is None else expected_revision},
                revive=expected_revision is None,
            )
        except Conflict as error:
            raise ConversationConflict(record.conversation_id) from error

    async def delete_record(self, conversation_id: str, *, expected_revision: str) -> None:
        """Remove a conversation permanently, with its entries and history, or raise ConversationConflict."""
        session = self.session_record(conversation_id)
        async with session.lock():  # so that no other worker saves in between
            if await session.get(_REVISION, fresh=True) != expected_revision:
                raise ConversationConflict(conversation_id)
            await self._store.erase(session.id)

    async def read_history(self, head_id: str | None, *, limit: int | None = None) -> list[ConversationEntry]:
        """Read the entries up to one, or the last `limit` of them. Raises LookupError if there are not all."""
        if head_id is None or limit == 0:
            return []
        if not isinstance(head_id, Place):
            raise LookupError(f"entry {head_id!r:.80} was not read here: load the entries of its conversation")
        session = self.session_record(head_id.conversation)
        for last in (None,) if limit is None else (limit, None):
            entries = {entry.id: entry for entry in await self._entries(session, head_id.conversation, last)}
            found: list[ConversationEntry] = []
            at: str | None = head_id
            while at in entries and len(found) != limit:
                found.append(entries[at])
                at = entries[at].parent_id
            if at is None or len(found) == limit:
                return found[::-1]
        raise LookupError(f"entry {at!r:.80} is not in conversation {head_id.conversation!r:.80}")

    async def read_entry(self, entry_id: str) -> ConversationEntry:
        """Read an entry by an id that was read here. Raises LookupError."""
        return (await self.read_history(entry_id, limit=1))[0]

    async def _entries(self, session: AsyncSession, conversation: str, last: int | None) -> list[ConversationEntry]:
        found = [_entry(each) for each in await session.raw_messages(last=last, fresh=True) if _OURS in each]
        messages = ModelMessagesTypeAdapter.validate_python([entry["message"] for entry in found])
        return [
            ConversationEntry(
                id=Place.of(entry["id"], conversation),
                parent_id=entry["parent_id"] and Place.of(entry["parent_id"], conversation),
                message=message,
            )
            for entry, message in zip(found, messages, strict=True)
        ]

    async def _inherited(
        self, record: ConversationRecord, new_entries: Sequence[ConversationEntry], expected_revision: str | None
    ) -> list[ConversationEntry]:
        """The entries that a new conversation needs of another one."""
        before = new_entries[0].parent_id if new_entries else record.head_id
        if expected_revision is not None or before is None:
            return []
        try:
            return await self.read_history(before)
        except LookupError as error:
            raise ConversationConflict(record.conversation_id) from error


def _record(conversation_id: str, fields: Mapping[str, Any]) -> ConversationRecord | None:
    if _REVISION not in fields:
        return None
    found = _RECORD.validate_python(
        {**fields[_OURS], "conversation_id": conversation_id, "revision": fields[_REVISION]}
    )
    head = found.head_id
    return replace(
        found,
        head_id=None if head is None else Place.of(head, conversation_id),
        branches=[Place.of(each, conversation_id) for each in found.branches],
    )


def _message(entry: ConversationEntry) -> dict[str, Any]:
    """An entry as a message, with a role and content if it has one text of a user or of a model."""
    (message,) = ModelMessagesTypeAdapter.dump_python([entry.message], mode="json")
    texts = [part for part in message["parts"] if part["part_kind"] in _TEXTS and isinstance(part["content"], str)]
    chat = {"type": "message"}
    if len(texts) == 1:  # its content is stored once
        chat = {"role": _TEXTS[texts[0]["part_kind"]], "content": texts[0].pop("content")}
    return {**chat, _OURS: {"id": entry.id, "parent_id": entry.parent_id, "message": message}}


def _entry(stored: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = stored[_OURS]
    for part in entry["message"]["parts"]:
        if part["part_kind"] in _TEXTS:
            part.setdefault("content", stored.get("content"))
    return entry


# Streaming a run


def stream(turn: Any, events: AsyncIterator[Any]) -> Streamed[Any]:
    """Stream the events of a run into a turn; iterate over the return value, which yields the same events.

    Example::

        async with conversations.session_record("c1").turn(request_id="r1") as turn:
            async with agent.run_stream_events("For the weekend", conversation=conversation) as events:
                answer = stream(turn, events)
                async for event in answer:
                    ...
            turn.outcome = answer.text

    Followers are shown the model's text as str, in its deltas. Calls and results of tools follow as JSON:
    `{"event_kind": "function_tool_call", ...}`. When the run ends, the turn counts the tokens of its responses: see
    `turn.usage`.
    """
    return Streamed(turn, _closing(events), _shown, _used)


async def _closing(events: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for event in events:  # which are closed where they were opened
        yield event


def _shown(event: AgentStreamEvent | AgentRunResultEvent[Any]) -> Iterator[Any]:
    if isinstance(event, PartStartEvent) and isinstance(event.part, TextPart):
        yield from filter(None, [event.part.content])
    elif isinstance(event, PartDeltaEvent) and isinstance(event.delta, TextPartDelta):
        yield event.delta.content_delta
    elif isinstance(event, FunctionToolCallEvent | FunctionToolResultEvent):
        yield event


def _used(event: AgentStreamEvent | AgentRunResultEvent[Any]) -> Iterator[Used]:
    if isinstance(event, AgentRunResultEvent):
        for each in event.result.new_messages():
            if isinstance(each, ModelResponse):
                yield Used(each.model_name, each.usage.input_tokens, each.usage.output_tokens)
