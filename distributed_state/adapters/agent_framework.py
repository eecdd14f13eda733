"""Microsoft Agent Framework on a store: the history of an agent, its sessions, and the checkpoints of workflows.

| Agent Framework | here |
|---|---|
| message of a session | message of `store.session("agent-framework/id")` |
| session (`SessionStore`): its ids, each entry of its state | fields `agent_framework/...` of that session |
| checkpoint of a workflow | item `id` of the collection `checkpoints` of that session |
| the order of a workflow's checkpoints | items of the collection `order`, whose keys have its name and the time |

Law: a method is one read or one commit, and data that was erased does not come back with a run that began before.
"""

from __future__ import annotations

import builtins
import json
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from distributed_state import (
    PRESENT,
    AsyncSession,
    AsyncStateStore,
    Conflict,
    Deleted,
    DeleteItem,
    Item,
    PutItem,
    StateStore,
)
from distributed_state.adapters.stores import Conversation, Streamed, Used, every, lacking, named, open_store

try:
    from agent_framework import (
        AgentResponseUpdate,
        AgentSession,
        HistoryProvider,
        Message,
        ResponseStream,
        SessionStore,
        WorkflowCheckpoint,
        WorkflowCheckpointException,
    )

    # Storages of the framework's other packages use these as well.
    from agent_framework._workflows._checkpoint_encoding import decode_checkpoint_value, encode_checkpoint_value
except ImportError as error:
    raise lacking("agent-framework", error) from error

Owner = Callable[[str], str | None]
_PREFIX = "agent-framework/"
_KEY = "agent_framework"
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class _Sessions:
    """The sessions of a store, by the ids of the framework's."""

    def __init__(self, store: AsyncStateStore | StateStore, prefix: str, owner: Owner | None, options: Any) -> None:
        self._store = open_store(store)
        self._prefix = prefix
        self._owner = owner
        self._options = options

    def name(self, id: str) -> list[Any]:
        """The identity of a session: its store, and its id there."""
        return [builtins.id(self._store.aio), self._prefix, id]

    def session(self, id: Any) -> AsyncSession:
        """The session of this id."""
        name = named(id, "a session's id")
        owner = None if self._owner is None else self._owner(name)
        record: AsyncSession = self._store.aio.session(self._prefix + name, user=owner, **self._options)
        return record


# History


class DistributedHistoryProvider(HistoryProvider):
    """Keeps the messages of an agent's sessions in a store; replaces FileHistoryProvider or RedisHistoryProvider.

    Example::

        agent = Agent(client=client, context_providers=[DistributedHistoryProvider(store)])
        await agent.run("A sauna, please", session=AgentSession(session_id="c1"))

    `store` is an open StateStore or AsyncStateStore, which its owner closes. The messages are those of
    `store.session(prefix + session_id)`, in the package's usual fields, with the framework's message added; messages
    appended there are read here. `owner` is a function from a session's id to its user, for `store.forget`. `flags` are
    those of the framework's HistoryProvider: `store_inputs`, `store_outputs`, ... With `skip_excluded`, messages that a
    compaction excluded are not loaded. `options` are those of `store.session`: `idle`, `lifetime`, `actor`, ...

    A run adds its messages at its end, in one commit. If the session was deleted meanwhile, it raises Deleted.
    """

    DEFAULT_SOURCE_ID = "distributed_state"

    def __init__(
        self,
        store: AsyncStateStore | StateStore,
        source_id: str = DEFAULT_SOURCE_ID,
        *,
        prefix: str = _PREFIX,
        owner: Owner | None = None,
        skip_excluded: bool = False,
        flags: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(source_id, **(flags or {}))
        self.skip_excluded = skip_excluded
        self._sessions = _Sessions(store, prefix, owner, options)

    def record(self, session_id: str) -> AsyncSession:
        """Return the store's session that has these messages, for a turn and its other operations. No I/O."""
        return self._sessions.session(session_id)

    async def get_messages(
        self, session_id: str | None, *, state: dict[str, Any] | None = None, **more: Any
    ) -> list[Message]:
        """Read all messages from the server."""
        conversation = Conversation(self._sessions.session(session_id))
        found = [_message(stored) for stored in await conversation.read()]
        if state is not None:
            state[_KEY] = conversation.seen
        shown = [message for message in found if message is not None]
        if self.skip_excluded:
            shown = [message for message in shown if not message.additional_properties.get("_excluded")]
        return shown

    async def save_messages(
        self, session_id: str | None, messages: Sequence[Message], *, state: dict[str, Any] | None = None, **more: Any
    ) -> None:
        """Add messages in one commit: all of them, next to one another, or none."""
        conversation = Conversation(self._sessions.session(session_id), (state or {}).get(_KEY))
        if messages:
            await conversation.append([*map(_stored, messages)])
            if state is not None:
                state[_KEY] = conversation.seen


def _stored(message: Message) -> dict[str, Any]:
    """A message in the package's own fields, with the framework's form in one more field."""
    said = message.to_dict()
    fields: dict[str, Any] = {"role": said["role"]} if said["role"] in _ROLES else {"type": "message"}
    contents = said["contents"]
    if contents and all(each.get("type") == "text" for each in contents):
        fields["content"] = message.text
        if contents == [{"type": "text", "text": message.text, "additional_properties": {}}]:
            del said["contents"]  # equal content is stored once
    return {**fields, _KEY: said}


def _message(stored: dict[str, Any]) -> Message | None:
    """The message; None if it was not added by the framework and is not a chat message."""
    if _KEY in stored:
        text: Any = [{"type": "text", "text": stored.get("content"), "additional_properties": {}}]
        return Message.from_dict({"contents": text, **stored[_KEY]})
    if not isinstance(stored.get("content"), str) or "role" not in stored:
        return None
    return Message(stored["role"], [stored["content"]])


# Sessions

_ID, _SERVICE, _STATE = f"{_KEY}/session_id", f"{_KEY}/service_session_id", f"{_KEY}/state/"
_ABSENT = 1000  # ids of sessions that were not there when they were read, and may be begun
_READ_AS = "_distributed_state_read_as"  # an attribute of a session object; its to_dict leaves it out


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", r"\[SESSION_STORE\]")  # else each import of this module would warn

    class DistributedSessionStore(SessionStore):
        """Keeps the framework's sessions in a store; replaces FileSessionStore.

        Example::

            sessions = DistributedSessionStore(store)
            session = await sessions.get("c1") or AgentSession(session_id="c1")
            session.state["city"] = "Oslo"
            await sessions.set("c1", session)

        Each entry of a session's state is a field of `store.session(prefix + session_id)`. Saving a session that was
        read here writes only the entries that changed since, so two workers do not undo each other's changes; the last
        write of an entry wins. So does saving one that was not there when this store read it: another worker may have
        begun it meanwhile. A session that was not read at all replaces the stored one. `owner` and `options` are as for
        DistributedHistoryProvider. Keep messages with that: InMemoryHistoryProvider keeps all of them in one entry.
        """

        def __init__(
            self,
            store: AsyncStateStore | StateStore,
            *,
            prefix: str = _PREFIX,
            owner: Owner | None = None,
            **options: Any,
        ) -> None:
            self._distributed = _Sessions(store, prefix, owner, options)
            self._absent: dict[str, None] = {}  # the last ones that were read and not there

        async def get(self, session_id: str) -> AgentSession | None:
            """Read a session from the server, None if there is none."""
            self.validate_session_id(session_id)
            fields = _own(await self._distributed.session(session_id).get_all(fresh=True))
            if _ID not in fields:
                self._absent[session_id] = None
                if len(self._absent) > _ABSENT:
                    del self._absent[next(iter(self._absent))]
                return None
            self._absent.pop(session_id, None)
            state = {name.removeprefix(_STATE): value for name, value in fields.items() if name.startswith(_STATE)}
            said = {"session_id": fields[_ID], "service_session_id": fields.get(_SERVICE), "state": state}
            session: AgentSession = AgentSession.from_dict(said)
            setattr(session, _READ_AS, (self._distributed.name(session_id), fields))
            return session

        async def set(self, session_id: str, session: AgentSession) -> None:
            """Save a session in one commit. Raises Deleted if it was deleted after it was read."""
            self.validate_session_id(session_id)
            said = session.to_dict()
            fields = {_STATE + name: value for name, value in said["state"].items()}
            fields |= {_ID: said["session_id"], _SERVICE: said["service_session_id"]}
            record, name = self._distributed.session(session_id), self._distributed.name(session_id)
            read_from, read = getattr(session, _READ_AS, (None, None))
            if read_from != name:
                read = None
            if read is not None:
                base = read
            elif session_id in self._absent:
                base = {}
                del self._absent[session_id]
            else:
                base = _own(await record.get_all(fresh=True))
            changed = {name: value for name, value in fields.items() if _text(base.get(name, ...)) != _text(value)}
            gone = [name for name in base if name not in fields]
            try:
                if changed or gone:
                    expect = None if read is None else {_ID: PRESENT}
                    await record.write(set=changed, delete=gone, expect=expect, revive=read is None)
            except Conflict as error:
                raise Deleted(f"session {session_id!r:.80} was deleted after it was read: nothing was saved") from error
            setattr(session, _READ_AS, (name, fields))

        async def delete(self, session_id: str) -> None:
            """Remove a session. Its messages and checkpoints stay; `store.erase(prefix + session_id)` removes all."""
            self.validate_session_id(session_id)
            record = self._distributed.session(session_id)
            if fields := _own(await record.get_all(fresh=True)):
                await record.write(delete=list(fields))


def _own(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name.startswith(f"{_KEY}/")}


def _text(value: Any) -> str:
    """A value as text, equal for equal values only: 1 and true are different."""
    return "" if value is ... else json.dumps(value, sort_keys=True)


# Checkpoints

_CHECKPOINTS, _ORDER = "checkpoints", "order"


class DistributedCheckpointStorage:
    """Keeps the checkpoints of workflows in a store; replaces FileCheckpointStorage.

    Example::

        storage = DistributedCheckpointStorage(store, "c1")
        await workflow.run("A sauna, please", checkpoint_storage=storage)
        newest = await storage.get_latest(workflow_name=workflow.name)
        await workflow.run(checkpoint_id=newest.checkpoint_id, checkpoint_storage=storage)  # on any worker

    A storage has the checkpoints of one conversation, as items of `store.session(prefix + session_id)`. Make one for a
    run. `record` is that session: a run inside `async with storage.record.turn(...)` saves under the turn's lease, so a
    worker that lost it saves nothing. `options` are those of `store.session`: `user`, `idle`, `lifetime`, ... The
    values are encoded as by FileCheckpointStorage: with pickle, which reads only the framework's types and those of
    `allowed_checkpoint_types`, as "module:qualname", or of `register_checkpoint_type`.
    """

    def __init__(
        self,
        store: AsyncStateStore | StateStore,
        session_id: str,
        *,
        prefix: str = _PREFIX,
        allowed_checkpoint_types: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.record = open_store(store).aio.session(prefix + named(session_id, "a session's id"), **options)
        self._types = frozenset(allowed_checkpoint_types)
        self._begun = False

    async def save(self, checkpoint: WorkflowCheckpoint) -> str:
        """Save a checkpoint in one commit and return its id. Raises Deleted if the session was deleted meanwhile."""
        value = encode_checkpoint_value(checkpoint.to_dict())
        put = PutItem(collection=_CHECKPOINTS, key=checkpoint.checkpoint_id, value=value)
        order = PutItem(collection=_ORDER, key=_place(checkpoint), value=checkpoint.checkpoint_id)
        await self.record.write(items=[put, order], revive=not self._begun)
        self._begun = True
        return str(checkpoint.checkpoint_id)

    async def load(self, checkpoint_id: str) -> WorkflowCheckpoint:
        """Read a checkpoint. Raises WorkflowCheckpointException if it does not exist."""
        found = (await self._load([checkpoint_id])).get(checkpoint_id)
        if found is None:
            raise WorkflowCheckpointException(f"No checkpoint found with ID {checkpoint_id}")
        return found

    async def _load(self, ids: Sequence[str]) -> dict[str, WorkflowCheckpoint]:
        self._begun = self._begun or await self.record.exists(fresh=True)
        found: dict[str, Any] = {}
        for at in range(0, len(ids), _AT_ONCE):
            found |= await self.record.items(_CHECKPOINTS).get_many(ids[at : at + _AT_ONCE])
        decoded = {id: decode_checkpoint_value(value, allowed_types=self._types) for id, value in found.items()}
        return {id: WorkflowCheckpoint.from_dict(value) for id, value in decoded.items()}

    async def list_checkpoints(self, *, workflow_name: str) -> list[WorkflowCheckpoint]:
        """Read all checkpoints of a workflow, the oldest first."""
        places = await every(self.record.items(_ORDER), prefix=_below(workflow_name))
        found = await self._load([place.value for place in places])
        return [found[place.value] for place in places if _is_at(found.get(place.value), place)]

    async def list_checkpoint_ids(self, *, workflow_name: str) -> list[str]:
        """List the ids of a workflow's checkpoints, the oldest first."""
        return [str(each.checkpoint_id) for each in await self.list_checkpoints(workflow_name=workflow_name)]

    async def get_latest(self, *, workflow_name: str) -> WorkflowCheckpoint | None:
        """Read the checkpoint of a workflow with the latest time, None if there is none."""
        before: str | None = None
        while True:
            page = await self.record.items(_ORDER).list(
                prefix=_below(workflow_name), before=before, limit=1, reverse=True
            )
            for place in page.items:
                checkpoint = (await self._load([place.value])).get(place.value)
                if _is_at(checkpoint, place):
                    return checkpoint
            if page.next is None:
                return None
            before = page.next

    async def delete(self, checkpoint_id: str) -> bool:
        """Remove a checkpoint; False if it does not exist."""
        found = (await self._load([checkpoint_id])).get(checkpoint_id)
        if found is None:
            return False
        gone = DeleteItem(collection=_CHECKPOINTS, key=checkpoint_id, if_present=True)
        try:
            await self.record.write(items=[gone, DeleteItem(collection=_ORDER, key=_place(found))])
        except (Conflict, Deleted):
            return False
        return True


_AT_ONCE = 100


def _below(workflow_name: str) -> str:
    return workflow_name.replace("%", "%25").replace("/", "%2F") + "/"


def _place(checkpoint: WorkflowCheckpoint) -> str:
    """The key by which a workflow's checkpoints are in the order of their times."""
    time = datetime.fromisoformat(checkpoint.timestamp)
    micros = int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1_000_000)
    return f"{_below(checkpoint.workflow_name)}{micros:020}/{checkpoint.checkpoint_id}"


def _is_at(checkpoint: WorkflowCheckpoint | None, place: Item) -> bool:
    """Whether a checkpoint is still at this place: one that was saved again may have another time."""
    return checkpoint is not None and _place(checkpoint) == place.key


# Streaming a run


def stream(turn: Any, run: ResponseStream[Any, Any]) -> Streamed[Any]:
    """Stream a run of an agent or a workflow into a turn; iterate over the return value, which yields the same updates.

    Example::

        async with history.record("c1").turn(request_id="r1") as turn:
            answer = stream(turn, agent.run("A sauna, please", session=session, stream=True))
            async for update in answer:
                ...
            turn.outcome = answer.text

    Followers are shown the text of an agent's updates as str, other contents as the framework's JSON, and events of a
    workflow as `{"type": ..., "executor": ..., "data": ...}`. If the iteration is ended early, so is the run. The turn
    counts the tokens that updates report: see `turn.usage`.
    """
    return Streamed(turn, _updates(run), _shown, _used)


async def _updates(run: ResponseStream[Any, Any]) -> AsyncIterator[Any]:
    async with run:
        async for update in run:
            yield update


def _shown(update: Any) -> Iterator[Any]:
    if isinstance(update, AgentResponseUpdate):
        for content in update.contents:
            yield content.text if content.type == "text" else content.to_dict()
        return
    if isinstance(update.data, AgentResponseUpdate):
        yield from _shown(update.data)
        return
    data = update.data.to_dict() if hasattr(update.data, "to_dict") else update.data
    yield {"type": update.type, "executor": update.executor_id, "data": data}


def _used(update: Any) -> Iterator[Used]:
    if not isinstance(update, AgentResponseUpdate):
        if isinstance(update.data, AgentResponseUpdate):
            yield from _used(update.data)
        return
    for content in update.contents:
        if content.type == "usage" and content.usage_details:
            usage = content.usage_details
            model = getattr(update.raw_representation, "model", None)
            yield Used(model, usage.get("input_token_count"), usage.get("output_token_count"))
