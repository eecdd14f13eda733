"""The common part of all adapters: opening the store, beginning a deleted conversation again, streaming, questions.

Law: an adapter's logic is written once, for asyncio. Its blocking methods run that to its end (`finish`), in any thread
and within any event loop.

Design: section 22.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic_core import to_json, to_jsonable_python

from distributed_state import (
    AsyncItems,
    AsyncRecord,
    AsyncSession,
    AsyncStateStore,
    ConfigurationError,
    Conflict,
    Deleted,
    InvalidValue,
    Item,
    StateStore,
)
from distributed_state.conversation import asks
from distributed_state.port.background import finish as finish
from distributed_state.port.bodies import loop
from distributed_state.records.context import context_of
from distributed_state.results import SessionInfo

T = TypeVar("T")
ASK = asks.FIELD
"""Begins the names of the fields that hold a session's open questions to people."""
WAITING = asks.PHASE
"""The phase of a session that has open questions: `store.asks` looks for it."""
_PAGE = 1000
_RECORDS_AT_ONCE = 100
_ASKED = 1000  # characters of a question


def open_store(given: Any) -> StateStore | AsyncStateStore:
    """The store, if it is one; else raise ConfigurationError."""
    if not isinstance(given, StateStore | AsyncStateStore):
        from distributed_state import AsyncRemoteStore, RemoteStore

        if isinstance(given, AsyncRemoteStore | RemoteStore):
            raise ConfigurationError(
                "adapters work on Redis and SQL themselves, not through a service: open the store at its redis:// URL"
            )
        # Without the value: a URL may contain a password.
        raise ConfigurationError(f"give an open StateStore or AsyncStateStore, not a {type(given).__name__}")
    return given


def named(id: Any, what: str) -> str:
    """The id, if it is a non-empty string; else raise InvalidValue. For None, the store would generate an id."""
    if not isinstance(id, str) or not id:
        raise InvalidValue(f"{what} must be a non-empty str, not {id!r:.80}")
    return id


def joined(*parts: str) -> str:
    """Join parts into one id; different lists of parts give different ids. Raises InvalidValue for non-strings."""
    for part in parts:
        if not isinstance(part, str):
            raise InvalidValue(f"the parts of an id are str, not {part!r:.80}")
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in parts)


def parted(id: str) -> list[str]:
    """The parts of an id made by `joined`."""
    return [part.replace("%2F", "/").replace("%25", "%") for part in id.split("/")]


def ending(session: AsyncSession) -> AsyncSession:
    """The session, for an adapter that itself begins an expired one again, whatever the setting `expired` says."""
    context_of(session).begins_again = False
    return session


def lacking(extra: str, error: ImportError) -> ImportError:
    """The error to raise if a framework cannot be imported."""
    return ImportError(f"{error}: pip install 'distributed-state[{extra}]'", name=error.name, path=error.path)


def dumped(fields: Mapping[str, Any]) -> dict[str, str]:
    """Each field as JSON text, equal for equal values: 1, 1.0 and true are different."""
    return {name: json.dumps(value, sort_keys=True) for name, value in fields.items()}


def difference(fields: Mapping[str, Any], read: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `write` that turn the `dumped` fields that were read into these.

    A framework saves an object as a whole. If only its changes are written, those of another worker stay.
    """
    now = dumped(fields)
    changed = {name: value for name, value in fields.items() if now[name] != read.get(name)}
    return {"set": changed, "delete": read.keys() - now.keys()}


async def together(calls: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """The results of these calls: in a task they leave in one exchange, in blocking code one after the other."""
    if loop() is None:
        return [await each() for each in calls]
    return await asyncio.gather(*(each() for each in calls))


async def every(items: AsyncItems, **wanted: Any) -> list[Item]:
    """All items of a collection that match, read page by page; `wanted` are arguments of `list`."""
    page = await items.list(**wanted, limit=_PAGE)
    found = [*page.items]
    while page.next is not None:
        page = await items.list(**{**wanted, "after": page.next}, limit=_PAGE)
        found += page.items
    return found


async def infos_below(store: AsyncStateStore, prefix: str, **wanted: Any) -> list[SessionInfo]:
    """The rows of all sessions with this prefix, unarchived ones included.

    Pages are in the order of ids, so that concurrent writes do not move a session past them.
    """
    found: list[SessionInfo] = []
    after = None
    while True:
        page = await store.sessions(prefix=prefix, **wanted, fresh=True, limit=_PAGE, after=after)
        found += page
        if len(page) < _PAGE:
            return found
        after = page[-1].cursor


async def sessions_below(store: AsyncStateStore, prefix: str, **wanted: Any) -> list[str]:
    """The ids of all sessions with this prefix."""
    return [info.id for info in await infos_below(store, prefix, **wanted)]


async def newest(records: Iterable[AsyncRecord]) -> list[dict[str, Any]]:
    """The fields of records as the server has them now; concurrent requests leave in one write."""
    many = list(records)
    found: list[dict[str, Any]] = []
    for at in range(0, len(many), _RECORDS_AT_ONCE):
        found += await asyncio.gather(*(each.get_all(fresh=True) for each in many[at : at + _RECORDS_AT_ONCE]))
    return found


class Opening(Generic[T]):
    """A store that is about to be opened for one adapter: for `with` and for `async with`."""

    def __init__(
        self, make: Callable[[Any], T], url: str | None, archive: str | None, settings: Mapping[str, Any]
    ) -> None:
        self._make = make
        self._asked: dict[str, Any] = {"url": url, "archive": archive, **settings}
        self._store: Any = None

    def __enter__(self) -> T:
        self._store = StateStore.open(**self._asked)
        try:
            return self._make(self._store)
        except BaseException:  # otherwise the store would stay open
            self._store.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.__exit__(kind, error, trace)

    async def __aenter__(self) -> T:
        self._store = AsyncStateStore.open(**self._asked)
        made = self._make(self._store)
        await self._store.__aenter__()
        return made

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._store.__aexit__(kind, error, trace)


class Conversation:
    """A session, and the last state of it that a framework object saw: none yet, existing, or empty at a version.

    A run reads its conversation, works, and then adds messages. If the conversation was deleted meanwhile, these would
    bring erased content back. So an object that read it before the deletion may not begin it again.
    """

    def __init__(self, session: AsyncSession, seen: Any = None) -> None:
        self._session = session
        self._looked: bool
        self._empty_at: int | None
        self._looked, self._empty_at = seen or (False, None)

    @property
    def seen(self) -> list[Any]:
        """Its knowledge of the session, as JSON, for another object of the same run."""
        return [self._looked, self._empty_at]

    async def read(self, last: int | None = None) -> list[dict[str, Any]]:
        """Read the last messages, or all, from the server."""
        found = await self._session.raw_messages(last=last, fresh=True)
        # None if messages were found; otherwise the version of the empty record, which may be a deletion.
        self._looked, self._empty_at = True, None if found else await self._session.version()
        return found

    async def append(self, messages: list[dict[str, Any]]) -> None:
        """Add messages in one commit; a deleted conversation begins again, or Deleted is raised."""
        add = self._session.write
        may_begin = self._may_begin()
        try:
            await add(append=messages)
        except Deleted as error:
            if not may_begin(error):
                raise
            try:
                await add(append=messages, revive=True, expect_version=error.version)
            except Conflict:  # another writer has just begun it
                await add(append=messages)
        self._looked = True

    async def replace(self, messages: list[dict[str, Any]]) -> None:
        """Replace all messages, also those with which another writer began it again. Raises Deleted as `append`."""
        may_begin = self._may_begin()
        try:
            await self._session.replace_messages(messages)
        except Deleted as error:
            if not may_begin(error):
                raise
            await self._session.write(revive=True)
            await self._session.replace_messages(messages)
        self._looked = True

    def _may_begin(self) -> Callable[[Deleted], bool]:
        """A check whether the object may begin the session again after a deletion, by what it knew before the write."""
        looked, empty_at = self._looked, self._empty_at
        return lambda deletion: not looked or deletion.version == empty_at


# Questions to people


def question(session: AsyncSession, name: str, asked: Any, **more: Any) -> dict[str, Any]:
    """The content of the field `ASK + name`, which holds a question of a framework.

    The question is the text that was asked, or the JSON of another value, which is then `data` as well, unless it is
    large. The same name is the same question: only one answer to it is accepted.
    """
    data = None if isinstance(asked, str) else _as_json(asked)
    text = asked if isinstance(asked, str) else repr(asked) if data is None else to_json(data).decode()
    now = context_of(session).now()
    try:
        opened = asks.opened(text[:_ASKED] or "?", data, now, None)
    except InvalidValue:  # data is too large
        opened = asks.opened(text[:_ASKED] or "?", None, now, None)
    return {**opened, "id": name, **more}


def _as_json(value: Any) -> Any:
    """The value as JSON; None if it contains itself."""
    try:
        return to_jsonable_python(value, bytes_mode="base64", inf_nan_mode="null", fallback=repr)
    except ValueError:
        return None


# Streaming a run


class Used(NamedTuple):
    """The tokens of a model, as a framework reports them: a missing number is None, as is an unknown model."""

    model: str | None
    input_tokens: int | None
    output_tokens: int | None
    calls: int = 1


def no_usage(event: Any) -> Iterable[Used]:
    """The tokens that an event reports, of a framework that reports none."""
    return ()


class Shown:
    """Shows a run to the followers of a turn, which may be of either API."""

    text: str
    """The text that was streamed so far: all deltas, one after the other."""

    def __init__(self, turn: Any) -> None:
        self.text = ""
        self._turn = turn

    async def show(self, parts: Iterable[Any]) -> None:
        """Stream parts, as JSON.

        One that cannot be streamed is replaced by a note: a run must not fail because of its display.
        """
        for part in parts:
            self.text += part if isinstance(part, str) else ""
            try:
                await self._send(to_jsonable_python(part, bytes_mode="base64", inf_nan_mode="null", fallback=repr))
            except ValueError as error:  # it is too large, or contains itself
                await self._send({"omitted": f"{error}"[:200]})

    def note(self, used: Iterable[Used]) -> None:
        """Count tokens with the turn, under the name "unknown" if the framework does not name the model."""
        for model, read, written, calls in used:
            if read or written:
                self._turn.model(model or "unknown").used(
                    input_tokens=read or 0, output_tokens=written or 0, calls=calls
                )

    async def _send(self, chunk: Any) -> None:
        waiting = self._turn.stream(chunk)
        if waiting is not None:  # None in the blocking API
            await waiting


class Streamed(Shown, Generic[T]):
    """The events of a framework's run, for `for` and `async for`: each is streamed into a turn, and then returned.

    `used_by` are the tokens that an event reports, which the turn counts.
    """

    def __init__(
        self,
        turn: Any,
        events: Any,
        parts_of: Callable[[T], Iterable[Any]],
        used_by: Callable[[T], Iterable[Used]] = no_usage,
    ) -> None:
        super().__init__(turn)
        self._events = events
        self._parts_of = parts_of
        self._used_by = used_by

    def __iter__(self) -> Iterator[T]:
        for event in self._events:
            finish(self.show(self._parts_of(event)))
            self.note(self._used_by(event))
            yield event

    async def __aiter__(self) -> AsyncIterator[T]:
        # Closed at once: else an interrupted run ends later, while the program already keeps its partial answer.
        async with aclosing(self._events) as events:
            async for event in events:
                await self.show(self._parts_of(event))
                self.note(self._used_by(event))
                yield event
