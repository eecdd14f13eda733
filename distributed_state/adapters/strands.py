"""Sessions of Strands Agents kept in a store: `Agent(session_manager=DistributedSessionManager("user-123", store))`.

Law: a message is added only after the last one that the agent has seen; of an agent only its changes are written.

| Strands | here |
|---|---|
| session | `store.session(id)`, its data in field `strands` |
| agent | field `agent/<agent id>`, and `state/<agent id>/<key>` for each key of its state |
| message of an agent | a message; field `next/<agent id>` is the `message_id` of the agent's next one |
| state of a graph or swarm | field `multi_agent/<id>` |

A message has the package's usual fields, so that a window, search and `to_openai` work on it; `strands` holds the rest.

Strands reads an agent once, when it is created, and then writes its whole state again and again. So the manager keeps
what it read, and writes the difference: two workers that change different keys do not undo each other.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from distributed_state import ABSENT, PRESENT, AsyncSession, AsyncStateStore, Conflict, StateStore
from distributed_state.adapters.stores import Streamed, Used, difference, dumped, finish, lacking, named, open_store

try:
    from strands.multiagent import MultiAgentBase
    from strands.session import RepositorySessionManager, SessionRepository
    from strands.types.exceptions import SessionException
    from strands.types.session import Session, SessionAgent, SessionMessage
except ImportError as error:
    raise lacking("strands", error) from error

SESSION = "strands"
_ROUNDS = 20


class DistributedSessionManager(RepositorySessionManager, SessionRepository):
    """A session of Strands that any worker can continue; replaces FileSessionManager or S3SessionManager.

    Example::

        with store.session("user-123").lock(wait=60):  # the next question waits for this one
            manager = DistributedSessionManager("user-123", store, user="ada")
            answer = Agent(model, session_manager=manager)("A weekend in Oslo, please")

    `store` is an open StateStore or AsyncStateStore, which its owner closes. An agent reads its session when it is
    created, so create one for each request: creating it costs two reads. An agent whose conversation was continued by
    another worker meanwhile gets SessionException at its next message, and nothing is overwritten. `options` are those
    of `store.session`: `user`, `idle`, `lifetime`, ... Other errors are the store's own (`StateError`).
    """

    def __init__(self, session_id: str, store: StateStore | AsyncStateStore, **options: Any) -> None:
        self._store = open_store(store).aio
        self._options = options
        self._read: dict[tuple[str, str], dict[str, str]] = {}  # fields of each agent as they were read, as JSON
        try:
            super().__init__(session_id, self)
        except SessionException:  # another worker has just created it
            super().__init__(session_id, self)

    def _session(self, session_id: str) -> AsyncSession:
        session: AsyncSession = self._store.session(named(session_id, "a session's id"), **self._options)
        return session

    def _write(self, session_id: str, refusal: str, **change: Any) -> None:
        try:
            finish(self._session(session_id).write(**change))
        except Conflict as error:
            raise SessionException(refusal) from error

    # Sessions

    def create_session(self, session: Session, **kwargs: Any) -> Session:
        """Create a session. Raises SessionException if it exists; a deleted one begins again."""
        self._write(
            session.session_id,
            f"Session {session.session_id} already exists",
            set={SESSION: plain(session.to_dict())}, expect={SESSION: ABSENT}, revive=True,
        )  # fmt: skip
        return session

    def read_session(self, session_id: str, **kwargs: Any) -> Session | None:
        """Read a session, None if it does not exist."""
        found = finish(self._session(session_id).get(SESSION, fresh=True))
        return None if found is None else Session.from_dict(found)

    # Agents

    def create_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        """Create an agent. Raises SessionException if the session does not exist, or has this agent."""
        id = session_agent.agent_id
        fields = fields_of(session_agent)
        self._write(
            session_id,
            f"Agent {id} already exists in session {session_id}, or the session does not exist",
            set={**fields, next_of(id): 0}, expect={SESSION: PRESENT, next_of(id): ABSENT},
        )  # fmt: skip
        self._read[session_id, id] = dumped(fields)

    def read_agent(self, session_id: str, agent_id: str, **kwargs: Any) -> SessionAgent | None:
        """Read an agent, None if it does not exist."""
        fields = own(finish(self._session(session_id).get_all(fresh=True)), agent_id)
        if not fields:
            return None
        self._read[session_id, agent_id] = dumped(fields)
        return agent_of(fields, agent_id)

    def update_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        """Write what changed in an agent since it was read. Raises SessionException if it does not exist."""
        id = session_agent.agent_id
        if (session_id, id) not in self._read:
            self.read_agent(session_id, id)
        read = self._read.get((session_id, id), {})
        if agent_field(id) in read:
            session_agent.created_at = json.loads(read[agent_field(id)])["created_at"]
        fields = fields_of(session_agent)
        refusal = f"Agent {id} in session {session_id} does not exist"
        self._write(session_id, refusal, **difference(fields, read), expect={agent_field(id): PRESENT})
        self._read[session_id, id] = dumped(fields)

    # Messages

    def create_message(self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any) -> None:
        """Add a message after the agent's last one. Raises SessionException if another worker has added one."""
        number = session_message.message_id
        self._write(
            session_id,
            f"Message {number} cannot be added to agent {agent_id} in session {session_id}: the agent does not exist, "
            "or another worker has continued its conversation; create the agent again, which reads it",
            set={next_of(agent_id): number + 1}, append=[message_of(agent_id, session_message)],
            expect={next_of(agent_id): number},
        )  # fmt: skip

    def read_message(self, session_id: str, agent_id: str, message_id: int, **kwargs: Any) -> SessionMessage | None:
        """Read a message, None if it does not exist."""
        found = finish(messages_of(self._session(session_id), agent_id, message_id))
        return _said(found[0]) if found and found[0][SESSION]["message_id"] == message_id else None

    def update_message(self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any) -> None:
        """Replace a message in one commit. Raises SessionException if it does not exist."""
        finish(self._replace(session_id, agent_id, session_message))

    async def _replace(self, session_id: str, agent_id: str, given: SessionMessage) -> None:
        session = self._session(session_id)
        for _ in range(_ROUNDS):
            found = await _from(session, given.message_id)
            ids = [_id(message, agent_id) for message in found]
            if given.message_id not in ids:
                break
            at = ids.index(given.message_id)
            given.created_at = found[at][SESSION]["created_at"]
            new = {**message_of(agent_id, given), "timestamp": found[at]["timestamp"]}
            before = await session.raw_messages(last=1, before=found[at]["number"])
            later = [{name: value for name, value in each.items() if name != "number"} for each in found[at + 1 :]]
            try:
                await session.replace_messages(
                    [new, *later],
                    after=before[-1]["number"] if before else None, expect_last=found[-1]["number"],
                )  # fmt: skip
            except Conflict:  # a message was added meanwhile
                continue
            return
        raise SessionException(f"Message {given.message_id} does not exist")

    def list_messages(
        self, session_id: str, agent_id: str, limit: int | None = None, offset: int = 0, **kwargs: Any
    ) -> list[SessionMessage]:
        """Read the messages of an agent in their order. Raises SessionException if the agent does not exist."""
        session = self._session(session_id)
        found = finish(messages_of(session, agent_id, offset))
        if not found and not finish(session.has(next_of(agent_id))):
            raise SessionException(f"Agent {agent_id} in session {session_id} does not exist")
        return [*map(_said, found[:limit])]

    # Graphs and swarms

    def create_multi_agent(self, session_id: str, multi_agent: MultiAgentBase, **kwargs: Any) -> None:
        """Store the state of a graph or swarm. Raises SessionException if the session does not exist."""
        self._write(
            session_id,
            f"Session {session_id} does not exist",
            set={multi_agent_field(multi_agent.id): plain(multi_agent.serialize_state())}, expect={SESSION: PRESENT},
        )  # fmt: skip

    def read_multi_agent(self, session_id: str, multi_agent_id: str, **kwargs: Any) -> dict[str, Any] | None:
        """Read the state of a graph or swarm, None if it does not exist."""
        found: dict[str, Any] | None = finish(
            self._session(session_id).get(multi_agent_field(multi_agent_id), fresh=True)
        )
        return found

    def update_multi_agent(self, session_id: str, multi_agent: MultiAgentBase, **kwargs: Any) -> None:
        """Replace the state of a graph or swarm. Raises SessionException if it does not exist."""
        field = multi_agent_field(multi_agent.id)
        self._write(
            session_id,
            f"MultiAgent state {multi_agent.id} in session {session_id} does not exist",
            set={field: plain(multi_agent.serialize_state())}, expect={field: PRESENT},
        )  # fmt: skip


# Agents as fields. Strands refuses an agent's id that contains a path separator.


def agent_field(agent_id: str) -> str:
    """The field with the data of an agent."""
    return f"agent/{agent_id}"


def next_of(agent_id: str) -> str:
    """The field with the id of an agent's next message."""
    return f"next/{agent_id}"


def multi_agent_field(id: str) -> str:
    """The field with the state of a graph or swarm."""
    return f"multi_agent/{id}"


def fields_of(agent: SessionAgent) -> dict[str, Any]:
    """The fields that hold an agent."""
    data = plain(agent.to_dict())
    state = {f"state/{agent.agent_id}/{key}": value for key, value in data.pop("state").items()}
    return {agent_field(agent.agent_id): data, **state}


def is_ours(field: str) -> bool:
    """Whether this adapter writes the field."""
    return field == SESSION or field.startswith(("agent/", "state/", "next/", "multi_agent/"))


def own(fields: dict[str, Any], agent_id: str) -> dict[str, Any]:
    """The fields of this agent; none if it does not exist."""
    if agent_field(agent_id) not in fields:
        return {}
    prefix = f"state/{agent_id}/"
    return {name: each for name, each in fields.items() if name == agent_field(agent_id) or name.startswith(prefix)}


def agent_of(fields: dict[str, Any], agent_id: str) -> SessionAgent:
    """The agent that these fields hold."""
    prefix = f"state/{agent_id}/"
    state = {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
    return SessionAgent.from_dict({**fields[agent_field(agent_id)], "state": state})


def plain(value: Any) -> Any:
    """The value as JSON values, as Strands' own managers write it."""
    return json.loads(json.dumps(value))


# Messages


def message_of(agent_id: str, given: SessionMessage) -> dict[str, Any]:
    """A message of an agent: its content in the package's fields, the rest in `strands`."""
    rest = {name: value for name, value in plain(given.to_dict()).items() if value is not None}
    shown = rest[_shown(rest)]
    content = [*map(_part, shown.pop("content"))]
    return {"role": shown.pop("role"), "content": _content(content), SESSION: {"agent_id": agent_id, **rest}}


async def _from(session: AsyncSession, id: int) -> list[dict[str, Any]]:
    """The messages among which an agent's message with this id is, and those after it."""
    # Numbers and ids both begin with 0, and agents share the numbers: a message's id is at most its number.
    return await session.raw_messages(after=id - 1 if id else None, fresh=True)


async def messages_of(session: AsyncSession, agent_id: str, offset: int = 0) -> list[dict[str, Any]]:
    """The messages of an agent from this one on."""
    found = await _from(session, offset)
    return [message for message in found if _id(message, agent_id) >= offset]


def _id(message: dict[str, Any], agent_id: str) -> int:
    """The id of an agent's message, -1 for another one."""
    rest = message.get(SESSION, {})
    return int(rest["message_id"]) if rest.get("agent_id") == agent_id else -1


def _said(message: dict[str, Any]) -> SessionMessage:
    rest, content = message[SESSION], message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    shown = {"role": message["role"], "content": [*map(_block, parts)], **rest[_shown(rest)]}
    return SessionMessage.from_dict({**rest, _shown(rest): shown})


def _shown(rest: dict[str, Any]) -> str:
    """The name of the message that a model is shown: the original one, or what replaced it."""
    return "redact_message" if "redact_message" in rest else "message"


def _content(parts: list[Any]) -> Any:
    return parts[0]["text"] if [part.get("type") for part in parts] == ["text"] else parts


def _part(block: Any) -> Any:
    """A block of Strands as the part that the package's formats know; other blocks stay as they are."""
    match block:
        case {"text": text, **rest} if not rest:
            return {"type": "text", "text": text}
        case {"toolUse": {"toolUseId": id, **given}, **rest} if not rest and "type" not in given:
            return {"type": "tool_use", "id": id, **given}
        case {"toolResult": {"toolUseId": id, "content": found, **given}, **rest} if not rest and "type" not in given:
            return {"type": "tool_result", "tool_use_id": id, "content": [*map(_part, found)], **given}
    return block


def _block(part: Any) -> Any:
    """The block of Strands that a part was."""
    match part:
        case {"type": "text", "text": text}:
            return {"text": text}
        case {"type": "tool_use", "id": id, **given}:
            return {"toolUse": {"toolUseId": id, **given}}
        case {"type": "tool_result", "tool_use_id": id, "content": found, **given}:
            return {"toolResult": {"toolUseId": id, "content": [*map(_block, found)], **given}}
    return part


# Streaming a run


def stream(turn: Any, events: AsyncIterator[Any]) -> Streamed[Any]:
    """Stream the events of a run into a turn; iterate over the return value, which yields the same events.

    Example::

        async with store.session("user-123").turn(request_id="r1") as turn:
            agent = Agent(model, session_manager=DistributedSessionManager("user-123", store))
            answer = stream(turn, agent.stream_async("A weekend in Oslo, please"))
            async for event in answer:
                ...
            turn.outcome = answer.text

    Followers are shown deltas of the answer's text as str, other deltas of the model as `{"type": "delta", "delta":
    ...}`, and a complete message as `{"type": "message", "message": ...}`. If the iteration is ended early, so is the
    run. The turn counts the tokens of each answer of the model: see `turn.usage`.
    """
    model: str | None = None

    def used(event: dict[str, Any]) -> Iterator[Used]:
        nonlocal model
        if "agent" in event:
            model = (event["agent"].model.get_config() or {}).get("model_id")
        metadata = event["event"].get("metadata") if isinstance(event.get("event"), dict) else None
        if metadata and "usage" in metadata:
            usage = metadata["usage"]
            yield Used(model, usage["inputTokens"], usage["outputTokens"])

    return Streamed(turn, events, _shown_of, used)


def _shown_of(event: dict[str, Any]) -> Iterator[Any]:
    if "data" in event:
        yield event["data"]
    elif "delta" in event:
        yield {"type": "delta", "delta": event["delta"]}
    elif "message" in event:
        yield {"type": "message", "message": event["message"]}
