"""Sessions of the OpenAI Agents SDK, kept in a store: `Runner.run(agent, "Hello", session=DistributedSession(...))`.

Law: a method is one read or one commit, and reads return the last write of any replica, never a stale local copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from distributed_state import AsyncLease, AsyncStateStore, Conflict, Deleted, StateStore
from distributed_state.adapters.stores import Conversation, Streamed, Used, lacking, named, open_store

try:
    from agents.items import TResponseInputItem
    from agents.memory.session import SessionABC
    from agents.memory.session_settings import SessionSettings, coerce_session_settings, resolve_session_limit
    from agents.result import RunResultStreaming
    from agents.stream_events import AgentUpdatedStreamEvent, RawResponsesStreamEvent, StreamEvent
except ImportError as error:
    raise lacking("openai-agents", error) from error

T = TypeVar("T")
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Fields that the store adds to messages it reads, fields whose type it checks in messages it writes, and the adapter's
# own field.
_NOT_AS_IT_IS = {"number", "timestamp", "tool_calls", "tool_call_id", "metadata", "item"}
_INSIDE = "item"  # the type of a message that has an item inside


@dataclass(frozen=True, slots=True)
class Suffix:
    """The newest items of a session, and a function that replaces them from one on; it returns False if any changed."""

    items: list[TResponseInputItem]
    complete: bool
    replace_suffix: Callable[[int, list[TResponseInputItem]], Awaitable[bool]]


class _Place(NamedTuple):
    """The identity of a message: a number may be reused after Redis lost data, but not with the same timestamp."""

    number: int
    time: float


class DistributedSession(SessionABC):
    """A conversation of the OpenAI Agents SDK that any replica can continue; replaces SQLiteSession or RedisSession.

    Example::

        session = DistributedSession("user-123", store, user="u1")
        result = await Runner.run(agent, "A weekend in Oslo, please", session=session)
        newest = await session.get_items(limit=2)

    `store` is an open StateStore or AsyncStateStore, which its owner closes; sessions need not be closed. Creating the
    object does no I/O. It works in any thread and event loop, including `Runner.run_sync`. Items are the messages of
    `store.session(session_id)`, so `history`, `fork`, `turn`, events and the rest are available as well; `options` are
    those of `store.session`: `user`, `idle`, `lifetime`, `actor`, ...

    A read checks with the server for a newer version. The setting `recent_messages` is the number of items that stay in
    Redis once they are archived: set it to the number usually sent to a model, as older items are read from SQL.

    A task that is cancelled during a write gets CancelledError when the outcome is known, so that later writes cannot
    overtake it. Errors are the store's own (`distributed_state.StateError`): WarmUnavailable, Locked while another
    worker is in a turn or holds the session, and CorruptState for an unreadable item, which is never skipped.
    """

    session_settings: SessionSettings | None = None

    def __init__(
        self,
        session_id: str,
        store: AsyncStateStore | StateStore,
        *,
        session_settings: SessionSettings | dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.session_id = named(session_id, "a session's id")
        self.session_settings = coerce_session_settings(
            SessionSettings() if session_settings is None else session_settings
        )
        self._session = open_store(store).aio.session(session_id, **options)
        self._conversation = Conversation(self._session)
        self._newest: list[_Place] | None = None  # as last read for a compaction; empty if there was none

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """Read the newest `limit` items in their order, by default `session_settings.limit` or all; 0 gives []."""
        wanted = resolve_session_limit(limit, self.session_settings)
        if wanted is not None and wanted <= 0:
            return []
        found = await self._conversation.read(wanted)
        if limit is None:  # not the read just before a replacement, which names a limit
            self._newest = [*map(_place, found[-1:])]
        return [_item(stored) for stored in found]

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Add items in one commit: all of them, next to one another, or none.

        A deleted session begins again, but a run that used it before the deletion gets Deleted.
        """
        if items:
            await _settled(self._conversation.append(_stored(items)))

    async def pop_item(self) -> TResponseInputItem | None:
        """Remove and return the newest item, or None if the session is empty.

        Concurrent callers get different items.
        """
        message = await _settled(self._session.pop_message())
        return None if message is None else _item(message.to_dict())

    async def clear_session(self) -> None:
        """Remove all items in one commit. The session's fields and history stay; `erase` removes them too."""
        await _settled(self._session.replace_messages([]))

    def lock(self, *, wait: float = 60.0, ttl: float = 30.0) -> AsyncLease:
        """Lock the session: `async with session.lock(): await Runner.run(agent, text, session=session)`.

        A run adds its items in several commits, so without the lock two runs at once on one session mix their items.
        Waits at most `wait` seconds for another holder, then raises LockTimeout; a dead holder's lock ends after `ttl`
        seconds.
        """
        lease: AsyncLease = self._session.lock(wait=wait, ttl=ttl)
        return lease

    async def _read_compaction_items(self, limit: int | None) -> tuple[list[TResponseInputItem], bool]:
        """The items to compact, and whether they are known to be all. Otherwise the SDK uses those in its cache."""
        items = await self.get_items(limit)
        return items, limit is not None and len(items) < limit

    async def _atomic_replace_items(self, items: list[TResponseInputItem]) -> bool:
        """Replace the items in one commit, for the SDK. Not for a subclass, which may store items differently.

        Raises Conflict if others changed them since they were read for a compaction. After False, the SDK would clear
        the session.
        """
        if type(self) is not DistributedSession:
            return False
        newest, self._newest = self._newest, None
        await _settled(self._replace_all(_stored(items), newest))
        return True

    async def _replace_all(self, output: list[dict[str, Any]], newest: list[_Place] | None) -> None:
        if newest is None:
            await self._conversation.replace(output)
            return
        changed = Conflict(
            f"session {self.session_id!r:.80}: items were added or removed while it was compacted, so nothing was "
            "replaced: compact it again"
        )
        found = await self._session.raw_messages(last=1, fresh=True)
        if not found and newest and not await self._session.exists():
            raise Deleted(f"session {self.session_id!r:.80} was deleted while it was compacted: nothing was saved")
        if found and [*map(_place, found)] != newest:
            raise changed
        if not newest:
            if output:
                await self._conversation.append(output)
            return
        try:
            await self._session.replace_messages(output, expect_last=newest[0].number)
        except Conflict as error:
            raise changed from error

    async def _get_compaction_snapshot(
        self, limit: int, *, prune_prefix: Callable[[TResponseInputItem], bool] | None = None
    ) -> Suffix | None:
        """The newest `limit` items, and a function that replaces them from one of them on, for the SDK.

        They are replaced in one commit, if they are still the newest. `prune_prefix` chooses older items to remove as
        well, from the oldest up to the first that it keeps.
        """
        if type(self) is not DistributedSession:
            return None
        found = await self._session.raw_messages(last=limit + 1, fresh=True)
        shown = found[-limit:] if limit else []
        places = [None, *map(_place, found)][-limit - 1 :]  # and the place before the first

        async def replace_suffix(start: int, output: list[TResponseInputItem]) -> bool:
            return await _settled(self._replace(places[start:], _stored(output), prune_prefix))

        return Suffix([_item(stored) for stored in shown], len(found) <= limit, replace_suffix)

    async def _replace(
        self,
        places: Sequence[_Place | None],
        output: list[dict[str, Any]],
        prune: Callable[[TResponseInputItem], bool] | None,
    ) -> bool:
        """Replace the newest messages, those at all `places` but the first, if they are still there."""
        before, expected = places[0] if places else None, places[1:]
        newest = await self._session.raw_messages(last=len(expected), fresh=True)
        if not expected or [_place(stored) for stored in newest] != expected:
            return False
        kept = None if prune is None or before is None else await self._unpruned(before, prune)
        try:
            # A message added since the read changes the newest number, so the commit is refused.
            await self._session.replace_messages(
                output if kept is None else [*kept, *output],
                after=before.number if before is not None and kept is None else None,
                expect_last=newest[-1]["number"],
            )
        except Conflict:
            return False
        return True

    async def _unpruned(self, last: _Place, prune: Callable[[TResponseInputItem], bool]) -> list[dict[str, Any]] | None:
        """The remaining messages up to this place; None if all of them stay."""
        oldest = await self._session.raw_messages(limit=1, before=last.number + 1)
        if not any(prune(_item(stored)) for stored in oldest):
            return None  # without reading all older messages
        older = await self._session.raw_messages(before=last.number + 1, fresh=True)
        at = next((at for at, stored in enumerate(older) if not prune(_item(dict(stored)))), len(older))
        return (
            [{name: value for name, value in each.items() if name != "number"} for each in older[at:]] if at else None
        )


# Items


def _stored(items: Sequence[TResponseInputItem]) -> list[dict[str, Any]]:
    """Items as messages: unchanged if they are valid messages, else wrapped in a message of type "item"."""
    return [_message(cast(dict[str, Any], item)) for item in items]


def _message(item: dict[str, Any]) -> dict[str, Any]:
    as_it_is = (
        isinstance(item, dict)
        and _NOT_AS_IT_IS.isdisjoint(item)
        and (item["role"] in _ROLES if "role" in item else isinstance(item.get("type"), str))
        and isinstance(item.get("content"), str | list | None)
        and isinstance(item.get("name"), str | None)
    )
    return item if as_it_is else {"type": _INSIDE, "item": item}


def _item(stored: dict[str, Any]) -> TResponseInputItem:
    """The item in a message, without the fields that the store adds."""
    stored.pop("number", None)
    stored.pop("timestamp", None)
    inside = stored.keys() == {"type", "item"} and stored["type"] == _INSIDE
    return cast(TResponseInputItem, stored["item"] if inside else stored)


def _place(stored: dict[str, Any]) -> _Place:
    return _Place(stored["number"], stored["timestamp"])


# Streaming a run


def stream(turn: Any, result: RunResultStreaming) -> Streamed[StreamEvent]:
    """Stream the events of a run into a turn; iterate over the return value, which yields the same events.

    Example::

        async with store.session("user-123").turn(request_id="r1") as turn:
            answer = stream(turn, Runner.run_streamed(agent, "A weekend in Oslo, please", session=session))
            async for event in answer:
                ...
            turn.outcome = answer.text

    Followers are shown deltas of the answer's text as str, other deltas of the model as JSON, an item of the run as
    `{"type": <the event's name>, "item": <raw item>}`, another agent as `{"type": "agent_updated", "agent": <name>}`.
    If the iteration is ended early, so is the run. The turn counts the tokens of each response: see `turn.usage`.
    """
    return Streamed(turn, _events(result), _shown, _used)


async def _events(result: RunResultStreaming) -> AsyncIterator[StreamEvent]:
    try:
        async for event in result.stream_events():
            yield event
    finally:
        if not result.is_complete:
            result.cancel()
        if result.run_loop_task is not None:
            await asyncio.wait((result.run_loop_task,))  # it may be adding items to the session


def _shown(event: StreamEvent) -> Iterator[Any]:
    if isinstance(event, RawResponsesStreamEvent):
        if event.data.type == "response.output_text.delta":
            yield event.data.delta
        elif event.data.type.endswith(".delta"):
            yield event.data
    elif isinstance(event, AgentUpdatedStreamEvent):
        yield {"type": "agent_updated", "agent": event.new_agent.name}
    else:
        yield {"type": event.name, "item": event.item.raw_item}


def _used(event: StreamEvent) -> Iterator[Used]:
    if isinstance(event, RawResponsesStreamEvent) and event.data.type == "response.completed":
        usage = event.data.response.usage
        if usage is not None:
            yield Used(event.data.response.model, usage.input_tokens, usage.output_tokens)


# Cancellation


async def _settled(work: Coroutine[Any, Any, T]) -> T:
    """Complete the work before raising CancelledError, if the caller was cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # retrieve it, or asyncio would log it as never retrieved
    raise cancelled
