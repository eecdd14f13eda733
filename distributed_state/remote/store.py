"""A store behind its HTTP service, asyncio face. Law: a name of the direct store does the same here, or says why not.

Design: section 26.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Never, Self

from distributed_state.errors import AccessDenied, ConfigurationError, InvalidValue
from distributed_state.port.http import AsyncHttp, Http, HttpPlace
from distributed_state.remote import values
from distributed_state.remote.events import AsyncRemoteEvents
from distributed_state.remote.record import AsyncRemoteRecord
from distributed_state.remote.requests import RecordPlace, Requests, address, kind_of, path_of
from distributed_state.remote.session import AsyncRemoteSession
from distributed_state.values import chance
from distributed_state.values.model import Ref
from distributed_state.values.results import Branch, HeldLease, Replica, SessionInfo
from distributed_state.values.search import KINDS, Filter, Kind, SearchHit
from distributed_state.warm.consumers import pattern

RETRY_FOR = 10.0
TIMEOUT = 35.0  # a worker answers within 30


class AsyncRemoteStore:
    """A store behind its service. `AsyncStateStore.open("https://...")` returns one; `RemoteStore` blocks.

    Example::

        async with AsyncRemoteStore.open("http://127.0.0.1:8080") as store:
            session = store.session("c1", user="u1")
            await session.append({"role": "user", "content": "A weekend in Oslo, please"})
            await session.set("city", "Oslo")
            assert await session.get("city") == "Oslo"

    Each read is a request: nothing is cached here. A name of the direct store that is not there says why.
    """

    def __init__(self, url: str, http: Http, *, retry_for: float = RETRY_FOR, timeout: float = TIMEOUT) -> None:
        self._url = url
        self._requests = Requests(http, retry_for=retry_for, timeout=timeout)
        self._prefix = ""

    def __getattr__(self, name: str) -> Any:
        raise values.refuse(type(self).__name__, name, values.STORE)

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

        `token` is that of the service, else what DISTRIBUTED_STATE_TOKEN holds, or the file that
        DISTRIBUTED_STATE_TOKEN_FILE names; `url` may be in DISTRIBUTED_STATE_URL. A request that fails is repeated for
        `retry_for` seconds; one that is running waits `timeout` at most for the service to say something. Raises
        ConfigurationError, Unauthenticated for a token that the service does not know, and Unavailable.
        """
        place = checked(url, token, retry_for, timeout)
        return cls(place.url, AsyncHttp(place), retry_for=retry_for, timeout=timeout)

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        try:
            with suppress(AccessDenied):  # a token that may write and not read: it names its ids itself
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
        """Drop the connections. Harmless when it is closed already."""
        await self._requests.http.close()

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
        """Return the record of a piece of work, which `user` owns. No I/O."""
        values.refuse_options("task", others)
        return AsyncRemoteRecord(self._requests, Ref("task", id), user)

    async def delete(self, id: str, *, scope: str = "session") -> int:
        """Delete a record and return its last version; its history stays."""
        return int((await RecordPlace(self._requests, Ref(scope, id)).order("DELETE", ""))["version"])

    async def erase(self, id: str, *, scope: str = "session") -> bool:
        """Remove a record for good, with its history; False if there was nothing."""
        return await AsyncRemoteRecord(self._requests, Ref(scope, id)).erase()

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
    ) -> list[SessionInfo]:
        """List records, the last archived change first; `after` is the `cursor` of a previous page's last row.

        With a `prefix` or `tags` in order of their ids. What is not archived yet is listed if `fresh`. With a `phase`,
        bounds of their last change and `larger_than` bytes only those that fit.
        """
        if type(limit) is not int or not 1 <= limit <= 1000:
            raise InvalidValue(f"limit is an int from 1 to 1000, not {limit!r}")
        wanted = values.tags(tags, None).get("tag", {})
        query = {
            "user": user, "prefix": prefix, "limit": limit, "after": after, "fresh": fresh or None,
            "tag": [f"{key}:{text}" for key, texts in wanted.items() for text in texts], "phase": phase,
            "changed_since": changed_since, "changed_before": changed_before, "larger_than": larger_than,
        }  # fmt: skip
        kind = kind_of(Ref(scope, "any").scope)
        return [values.made(SessionInfo, each) for each in (await self._requests.read(f"/v1/{kind}", query))[kind]]

    async def branches(self, *, limit: int = 100, after: str | None = None) -> list[Branch]:
        """List the branches of all records: what was acknowledged and is not continued."""
        found = await self._requests.read("/v1/branches", {"limit": limit, "after": after})
        return [values.branch(each) for each in found["branches"]]

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
        """Find messages, fields and items by what they say, the most relevant first."""
        given = {
            "query": query, "scope": scope, "prefix": prefix, "user": user, "kinds": [*kinds],
            "collection": collection, "filter": None if filter is None else dict(filter), "match": match,
            "limit": limit, "offset": offset, "fresh": fresh,
        }  # fmt: skip
        body = {name: each for name, each in given.items() if each is not None}
        found = (await self._requests.order("POST", "/v1/search", body, repeatable=True))["hits"]
        return [values.made(SearchHit, each) for each in found]

    async def replicas(self) -> list[Replica]:
        """List the processes that have the store open."""
        return [values.made(Replica, each) for each in (await self._requests.read("/v1/replicas"))["replicas"]]

    async def leases(
        self, *, scope: str | None = None, prefix: str = "", limit: int = 100, after: str | None = None
    ) -> list[HeldLease]:
        """List who holds which records, and who waits for them; those held longest first."""
        query = {"scope": scope, "prefix": prefix or None, "limit": limit, "after": after}
        return [values.held_lease(each) for each in (await self._requests.read("/v1/leases", query))["leases"]]

    async def end_lease(self, id: str, token: int, *, scope: str = "session") -> bool:
        """End the lease with this fencing token, whoever holds it; False if it is not held any more."""
        if type(token) is not int or token < 0:
            raise InvalidValue(f"a lease is named by its fencing token, not {token!r:.80}")
        path = f"{path_of(Ref(scope, id))}/lease/{token}"
        return bool((await self._requests.order("DELETE", path))["released"])

    def events(self, *types: str, since: str | None = None, **others: Never) -> AsyncRemoteEvents:
        """Events as they come, for `async for`; better inside `async with`, which says when that is over.

        Example::

            async with store.events("conversation.*") as events:
                event = await events.next(timeout=1.0)

        `types` are names or patterns as "mail.*"; `since` is the `position` of others, or where these go on.
        """
        values.refuse_options("events", others)
        for each in types:
            pattern(each)
        return AsyncRemoteEvents(self._requests, types, since)

    # Upkeep

    async def compact(self, *, older_than: float = 86_400.0, **others: Never) -> dict[str, int]:
        """Pack history older than this many seconds, in SQL; counts of records, changes and messages.

        A service ends a request after its time (30 s): then Unavailable is raised, and called again it goes on.
        """
        values.refuse_options("compact", others)
        return await self._upkeep("compact", {"older_than": older_than})

    async def purge(
        self,
        *,
        older_than: float | None = None,
        keep_changes: int | None = None,
        messages_older_than: float | None = None,
        keep_messages: int | None = None,
        events_older_than: float | None = None,
        branches_older_than: float | None = None,
    ) -> dict[str, int]:
        """Remove what is old from SQL; the present state of live records stays readable. Returns counts.

        A service ends a request after its time (30 s): then Unavailable is raised, and called again it goes on.
        """
        given = {
            "older_than": older_than, "keep_changes": keep_changes, "messages_older_than": messages_older_than,
            "keep_messages": keep_messages, "events_older_than": events_older_than,
            "branches_older_than": branches_older_than,
        }  # fmt: skip
        return await self._upkeep("purge", {name: each for name, each in given.items() if each is not None})

    async def _upkeep(self, what: str, body: dict[str, Any]) -> dict[str, int]:
        found: dict[str, int] = (await self._requests.order("POST", f"/v1/maintenance/{what}", body))["counts"]
        return found

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._url}>"


def checked(url: str | None, token: str | None, retry_for: float, timeout: float) -> HttpPlace:
    """The address, and times that can be. Raises ConfigurationError."""
    for name, seconds in ("retry_for", retry_for), ("timeout", timeout):
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e6:
            raise ConfigurationError(f"{name}: is a number of seconds, not {seconds!r:.80}")
    return address(url, token)
