"""Copies the files of Strands' FileSessionManager into a store. Law: changes made here are never overwritten.

S3SessionManager keeps the same files in a bucket: copy them into a folder first, for example by `aws s3 sync`.

Design: section 22.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from heapq import merge
from pathlib import Path
from typing import Any, TypeAlias

from distributed_state import AsyncSession, AsyncStateStore, InvalidValue, NotFound, StateStore
from distributed_state.adapters.adopting import DELETED, EQUAL, Found, Name, canonical, deleted, untouched
from distributed_state.adapters.stores import lacking
from distributed_state.adapters.strands import (
    SESSION,
    fields_of,
    is_ours,
    message_of,
    messages_of,
    multi_agent_field,
    next_of,
    plain,
)

try:
    from strands.session import FileSessionManager
    from strands.session.file_session_manager import AGENT_PREFIX, MULTI_AGENT_PREFIX, SESSION_PREFIX
except ImportError as error:
    raise lacking("strands", error) from error

_AT_ONCE = 200
Into: TypeAlias = Callable[[str, AsyncStateStore], AsyncSession]


async def threads(
    stack: AsyncExitStack,
    store: StateStore | AsyncStateStore,
    source: Any,
    *,
    into: Into = lambda id, store: store.session(id),
) -> Threads:
    """The sessions in a folder, which is FileSessionManager's `storage_dir`, and those of the target."""
    if not isinstance(source, str | Path):
        raise InvalidValue(f"the source is the folder of a FileSessionManager, not a {type(source).__name__}")
    folder = Path(source)
    if not any(_below(folder, SESSION_PREFIX, "session.json")):
        raise NotFound(f"no sessions of Strands in the source: no {SESSION_PREFIX}.../session.json in {folder}")
    return Threads(store.aio, folder, into)


def _below(folder: Path, prefix: str, file: str) -> Iterator[str]:
    """The ids whose file is there, sorted."""
    for each in sorted(folder.glob(f"{prefix}*/{file}")):
        yield each.parent.name.removeprefix(prefix)


class Threads:
    """The sessions of a folder and of the target."""

    def __init__(self, store: AsyncStateStore, folder: Path, into: Into) -> None:
        self._store = store
        self._folder = folder
        self._into = into

    async def names(self) -> Sequence[Name]:
        """The ids of sessions."""
        return [(id,) for id in _below(self._folder, SESSION_PREFIX, "session.json")]

    def _theirs(self, id: str) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
        """The fields that hold a session, and the messages of each agent."""
        source = FileSessionManager(id, f"{self._folder}")  # it exists, so that this only reads
        folder = self._folder / f"{SESSION_PREFIX}{id}"
        fields: dict[str, Any] = {SESSION: plain(source.session.to_dict())}
        messages: dict[str, list[dict[str, Any]]] = {}
        for agent_id in _below(folder / "agents", AGENT_PREFIX, "agent.json"):
            agent = source.read_agent(id, agent_id)
            if agent is not None:  # it was deleted meanwhile
                fields |= fields_of(agent)
                messages[agent_id] = [message_of(agent_id, each) for each in source.list_messages(id, agent_id)]
                fields[next_of(agent_id)] = len(messages[agent_id])
                for at, message in enumerate(messages[agent_id]):
                    if message[SESSION]["message_id"] != at:
                        raise InvalidValue(f"agent {agent_id} has no message {at} in the source")
        for graph_id in _below(folder / "multi_agents", MULTI_AGENT_PREFIX, "multi_agent.json"):
            fields[multi_agent_field(graph_id)] = source.read_multi_agent(id, graph_id)
        return fields, messages

    async def compare(self, name: Name) -> Found:
        """Compare a session: its agents, their messages, and the state of graphs."""
        record = self._into(name[0], self._store)
        if await deleted(record):
            return DELETED
        version = await record.version(fresh=True)
        fields, theirs = self._theirs(name[0])
        has = {field: value for field, value in (await record.get_all()).items() if is_ours(field)}
        missing = []
        for agent_id, messages in theirs.items():
            there = [_without_time(each) for each in await messages_of(record, agent_id)]
            for at, (one, other) in enumerate(zip(there, messages, strict=False)):
                if canonical(one) != canonical(other):
                    return Found(differs=f"message {at} of agent {agent_id} is not the same here")
            if len(there) > len(messages):
                extra = len(there) - len(messages)
                return Found(differs=f"it went on here: {extra} messages of agent {agent_id} are not in the source")
            missing.append(messages[len(there) :])
        if not any(missing) and canonical(fields) == canonical(has):
            return EQUAL
        if not await untouched(record):
            return Found(differs="it was changed here")
        # In the order of their times; those of one agent stay in their own.
        return Found(work=(record, version, fields, has.keys() - fields.keys(), [*merge(*missing, key=_time)]))

    async def copy(self, name: Name, work: Any) -> None:
        """Copy the missing parts, unless the record has changed since the comparison."""
        record, version, fields, gone, messages = work
        timed = [{**each, "timestamp": _time(each)} for each in messages]
        # The fields come last: until then the session does not exist, and no agent continues a half copied one.
        while len(timed) > _AT_ONCE:
            written = await record.write(append=timed[:_AT_ONCE], expect_version=version)
            version, timed = written.version, timed[_AT_ONCE:]
        await record.write(set=fields, delete=gone, append=timed, expect_version=version)


def _time(message: dict[str, Any]) -> float:
    return datetime.fromisoformat(message[SESSION]["created_at"]).timestamp()


def _without_time(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in ("number", "timestamp")}
