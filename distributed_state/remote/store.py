"""A store behind its HTTP service, asyncio API. Law: a method does the same as the direct store's, or raises.

Design: section 26.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, Never, Self

from distributed_state.errors import AccessDenied, ConfigurationError, InvalidValue
from distributed_state.port.http import AsyncHttp, Http, HttpPlace
from distributed_state.remote import values
from distributed_state.remote.admin import AsyncRemoteAdmin
from distributed_state.remote.record import AsyncRemoteRecord
from distributed_state.remote.requests import (
    EventSource,
    RecordPlace,
    Requests,
    address,
    kind_of,
    path_of,
    with_query,
)
from distributed_state.remote.session import AsyncRemoteSession
from distributed_state.results import Ask, Event, SessionInfo, Usage
from distributed_state.values import chance
from distributed_state.values.model import Ref, escape, seconds_of
from distributed_state.values.search import KINDS, Filter, Kind, SearchHit
from distributed_state.warm.consumers import pattern


class AsyncRemoteEvents:
    """A stream of events, from `store.events(...)`.

    Example::

        async with store.events("conversation.*") as events:
            await session.set("city", "Oslo")
            while (event := await events.next(timeout=0.5)) is not None:
                print(event.type, event.conversation_id)

    `async for event in events` waits without limit. The stream starts when it is entered, or at the first `next`. An
    event of type `resync` means that some events were missed: reload any data that you cached.
    """

    def __init__(self, requests: Requests, types: tuple[str, ...], since: str | None) -> None:
        self._requests = requests
        self._source = EventSource(requests, with_query("/v1/events", {"types": [*types], "since": since}), since or "")

    @property
    def position(self) -> str:
        """The position after the last returned event, as text for `since=` of another stream."""
        return self._source.position

    async def next(self, timeout: float | None = None) -> Event | None:
        """Wait for the next event; None after `timeout` seconds without one, or when the events were closed."""
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout != timeout
        ):
            raise InvalidValue(f"timeout is a number of seconds or None, not {timeout!r:.80}")
        clock = self._requests.http.monotonic
        end = None if timeout is None else clock() + timeout
        while not self._source.closed:
            found = await self._source.next(None if end is None else max(0.0, end - clock()))
            if found is not None and "data" in found:
                return values.event(json.loads(found["data"]))
            if found is None and end is not None and clock() >= end:
                return None
        return None

    async def join(self) -> None:
        """Start the stream: all later events are received."""
        await self._source.join()

    async def close(self) -> None:
        """End the stream."""
        await self._source.close()

    async def __aenter__(self) -> Self:
        await self.join()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await self.next()
        if event is None:
            raise StopAsyncIteration
        return event


RETRY_FOR = 10.0
TIMEOUT = 35.0  # seconds: a worker answers within 30


class AsyncRemoteStore:
    """A store behind its service. `AsyncStateStore.open("https://...")` returns one; `RemoteStore` blocks.

    Example::

        async with AsyncRemoteStore.open("http://127.0.0.1:8080") as store:
            session = store.session("c1", user="u1")
            await session.append({"role": "user", "content": "A weekend in Oslo, please"})
            await session.set("city", "Oslo")
            assert await session.get("city") == "Oslo"

    Each read is a request: nothing is cached here. A method that only the direct store has raises an error with advice.
    """

    def __init__(self, url: str, http: Http, *, retry_for: float = RETRY_FOR, timeout: float = TIMEOUT) -> None:
        self._url = url
        self._requests = Requests(http, retry_for=retry_for, timeout=timeout)
        self._prefix = ""

    def __getattr__(self, name: str) -> Any:
        raise values.refuse(self, name, _direct)

    @classmethod
    def open(
        cls,
        url: str | None = None,
        *,
        token: str | None = None,
        retry_for: float = RETRY_FOR,
        timeout: float = TIMEOUT,
    ) -> Self:
        """Open a store behind a service: `async with AsyncRemoteStore.open(url) as store`.

        `token` is that of the service; by default it comes from DISTRIBUTED_STATE_TOKEN, or from the file that
        DISTRIBUTED_STATE_TOKEN_FILE names; `url` may be in DISTRIBUTED_STATE_URL. A failed request is repeated for
        `retry_for` seconds; a request waits at most `timeout` seconds for data from the service. Raises
        ConfigurationError, Unauthenticated for an unknown token, and Unavailable.
        """
        place = checked(url, token, retry_for, timeout)
        return cls(place.url, AsyncHttp(place), retry_for=retry_for, timeout=timeout)

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        try:
            with suppress(AccessDenied):  # the token may only write, so the client generates ids itself
                self._prefix = (await self._requests.read("/v1/caller"))["prefix"]
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop the connections. Has no effect on a closed store."""
        await self._requests.http.close()

    @property
    def admin(self) -> AsyncRemoteAdmin:
        """The methods for operators: replicas, leases, branches, compaction and purge."""
        return AsyncRemoteAdmin(self._requests)

    # Records

    def session(self, id: str | None = None, *, user: str | None = None, **others: Never) -> AsyncRemoteSession:
        """Return a conversation by its id, or a new one. No I/O. `user` owns it from its first write on."""
        values.refuse_options("session", others)
        found = self._prefix + chance.token_hex(16) if id is None else id
        return AsyncRemoteSession(self._requests, Ref("session", found), user)

    def user(self, id: str, **others: Never) -> AsyncRemoteRecord:
        """Return the record of a user, across sessions. No I/O."""
        values.refuse_options("user", others)
        return AsyncRemoteRecord(self._requests, Ref("user", id))

    def task(self, id: str, *, user: str | None = None, **others: Never) -> AsyncRemoteRecord:
        """Return the record of a task, which `user` owns. No I/O."""
        values.refuse_options("task", others)
        return AsyncRemoteRecord(self._requests, Ref("task", id), user)

    async def delete(self, id: str, *, scope: str = "session") -> int:
        """Delete a record and return its last version; its history stays."""
        return int((await RecordPlace(self._requests, Ref(scope, id)).order("DELETE", ""))["version"])

    async def erase(self, id: str, *, scope: str = "session") -> bool:
        """Remove a record permanently, with its history. Return False if it never existed."""
        place = RecordPlace(self._requests, Ref(scope, id))
        return bool((await place.order("DELETE", "/everything", repeatable=True))["erased"])

    async def forget(self, user: str) -> int:
        """Remove every trace of a user: records, sessions and tasks, their forks and history. Returns how many."""
        path = path_of(Ref("user", user), "/traces")
        return int((await self._requests.order("DELETE", path, repeatable=True))["records"])

    # Many records

    async def sessions(
        self,
        *,
        user: str | None = None,
        prefix: str | None = None,
        tags: Mapping[str, str | Iterable[str]] | None = None,
        limit: int = 50,
        after: str | None = None,
        scope: str = "session",
        fresh: bool = False,
        phase: str | None = None,
        changed_since: float | None = None,
        changed_before: float | None = None,
        larger_than: int | None = None,
        stuck: bool = False,
    ) -> list[SessionInfo]:
        """List records, the most recently archived change first; `after` is the `cursor` of a previous page's last row.

        With `prefix` or `tags` the order is that of the ids. `fresh` also lists unarchived records. `phase`,
        `changed_since`, `changed_before`, `larger_than` (bytes) and `stuck` restrict the list to matching records.
        """
        if type(limit) is not int or not 1 <= limit <= 1000:
            raise InvalidValue(f"limit is an int from 1 to 1000, not {limit!r}")
        wanted = values.tags(tags, None).get("tag", {})
        query = {
            "user": user, "prefix": prefix, "limit": limit, "after": after, "fresh": fresh or None,
            "tag": [f"{escape(key)}:{text}" for key, texts in wanted.items() for text in texts], "phase": phase,
            "changed_since": changed_since, "changed_before": changed_before, "larger_than": larger_than,
            "stuck": stuck or None,
        }  # fmt: skip
        kind = kind_of(Ref(scope, "any").scope)
        return [values.made(SessionInfo, each) for each in (await self._requests.read(f"/v1/{kind}", query))[kind]]

    async def asks(
        self, *, user: str | None = None, limit: int = 50, fresh: bool = False, **others: Never
    ) -> list[Ask]:
        """List open questions to people, those of the last changed sessions first, of at most `limit` sessions.

        The service always looks at unarchived changes, too, as `fresh` asks for.
        """
        values.refuse_options("asks", others)
        found = await self._requests.read("/v1/asks", {"user": user, "limit": limit})
        return [values.ask(each) for each in found["asks"]]

    async def usage(
        self,
        *,
        user: str | None = None,
        since: float | datetime | None = None,
        fresh: bool = False,
        **others: Never,
    ) -> Usage:
        """Add up the tokens that models used in the turns of sessions, by model and day, as on a direct store."""
        values.refuse_options("usage", others)
        query = {"user": user, "since": seconds_of(since), "fresh": fresh or None}
        return values.usage(await self._requests.read("/v1/usage", query))

    async def search(
        self,
        query: str | None = None,
        *,
        scope: str | None = None,
        prefix: str = "",
        user: str | None = None,
        kinds: Sequence[Kind] = KINDS,
        collection: str | None = None,
        filter: Filter | None = None,
        match: Literal["all", "any"] = "all",
        limit: int = 10,
        offset: int = 0,
        fresh: bool = False,
    ) -> list[SearchHit]:
        """Find messages, fields and items by their text, the most relevant first."""
        given = {
            "query": query, "scope": scope, "prefix": prefix, "user": user, "kinds": [*kinds],
            "collection": collection, "filter": None if filter is None else dict(filter), "match": match,
            "limit": limit, "offset": offset, "fresh": fresh,
        }  # fmt: skip
        body = {name: each for name, each in given.items() if each is not None}
        found = (await self._requests.order("POST", "/v1/search", body, repeatable=True))["hits"]
        return [values.made(SearchHit, each) for each in found]

    def events(self, *types: str, since: str | None = None, **others: Never) -> AsyncRemoteEvents:
        """Return a stream of events for `async for`. Use it inside `async with`, which closes it at the end.

        Example::

            async with store.events("conversation.*") as events:
                event = await events.next(timeout=1.0)

        `types` are names, or patterns like "mail.*"; `since` is the `position` of an earlier stream, to continue there.
        """
        values.refuse_options("events", others)
        for each in types:
            pattern(each)
        return AsyncRemoteEvents(self._requests, types, since)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._url}>"


def _direct() -> type:
    from distributed_state.store.asyncio import AsyncStateStore  # it loads all drivers

    return AsyncStateStore


def checked(url: str | None, token: str | None, retry_for: float, timeout: float) -> HttpPlace:
    """The address, after a check of the times. Raises ConfigurationError."""
    for name, seconds in ("retry_for", retry_for), ("timeout", timeout):
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e6:
            raise ConfigurationError(f"{name}: is a number of seconds, not {seconds!r:.80}")
    return address(url, token)
