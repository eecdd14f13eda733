"""Records behind a service, asyncio API, and their history. Law: a method is one request, or says how many.

Handles hold no state. The names, options and errors are those of the direct store's `AsyncRecord`, whose docstrings say
more. History is read, or made current by a new version; it is never rewritten.

Design: section 26.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal, Never, TypeVar

from distributed_state.errors import Deleted, InvalidValue, NotFound
from distributed_state.records.messages import Page
from distributed_state.remote import values
from distributed_state.remote.items import AsyncRemoteItems
from distributed_state.remote.requests import AsyncRemoteLease, RecordPlace, Requests, path_of
from distributed_state.remote.transaction import AsyncRemoteTransactionBody, RemoteTransaction, commit
from distributed_state.values import codec
from distributed_state.values.items import DeleteItem, PutItem
from distributed_state.values.model import Message, Ref
from distributed_state.values.results import Branch, Change, Checkpoint, Snapshot, Written
from distributed_state.warm.lock import check_times

_PAGE = 500


class Past:
    """The methods of a record that are about what it was."""

    _place: RecordPlace

    async def history(
        self, *, after: int = 0, before: int | None = None, limit: int | None = None, branch: str | None = None
    ) -> list[Change]:
        """Read the changes between two versions (exclusive), oldest first: who, when, what.

        One request for each 500, or fewer if they are large.
        """
        Page(limit=limit).checked()
        found: list[Change] = []
        largest = _PAGE
        while limit is None or len(found) < limit:
            size = largest if limit is None else min(largest, limit - len(found))
            query = {"after": after, "before": before, "limit": size, "branch": branch}
            try:
                page = (await self._read("/versions", query))["versions"]
            except InvalidValue:
                if size == 1:
                    raise
                largest = size // 2  # together they are more than a service puts into one answer
                continue
            found += [values.change(each, self._place.ref) for each in page]
            if len(page) < size:
                break
            after = page[-1]["version"]
        return found

    async def at(self, *, version: int | None = None, branch: str | None = None) -> Snapshot:
        """Read the record as it was at a version, with messages and phase. Raises NotFound if it is none or purged."""
        if type(version) is not int or version < 1:
            raise InvalidValue(
                f"a remote store reads a version, also of a branch: an int from 1 on, not {version!r:.80}"
            )
        return values.snapshot(await self._read(f"/versions/{version}", {"branch": branch}))

    async def branches(self) -> list[Branch]:
        """Read which commits were acknowledged and are not continued by the record, by branch."""
        return [values.branch(each) for each in (await self._read("/branches", {}))["branches"]]

    async def drop_branch(self, branch: str) -> int:
        """Remove a branch for good, by its id, and return how many commits it had. Raises NotFound if there is none."""
        # It changes nothing of the record itself, so no lease is asked for.
        path = path_of(self._place.ref, "/branches/{}", branch)
        return int((await self._place.requests.order("DELETE", path))["commits"])

    async def checkpoint(self, label: str) -> int:
        """Name the present state and return the version that carries the name; `rollback(label=...)` comes back to it.

        A name is text of 1 to 500 characters, else InvalidValue; the last checkpoint of a name counts.
        """
        return int((await self._place.write({"kind": "checkpoint", "label": label}))["version"])

    async def checkpoints(
        self,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        order: Literal["asc", "desc"] = "asc",
    ) -> list[Checkpoint]:
        """Read the named versions between two versions (exclusive), oldest first; `limit` of them in this order.

        One request for each 500.
        """
        Page(limit=limit, before=before, after=after, order=order).checked()
        found: list[Checkpoint] = []
        query: dict[str, Any] = {"after": after, "before": before, "order": order}
        while limit is None or len(found) < limit:
            size = _PAGE if limit is None else min(_PAGE, limit - len(found))
            page = (await self._read("/checkpoints", query | {"limit": size}))["checkpoints"]
            found += [values.made(Checkpoint, each) for each in page]
            if len(page) < size:
                break
            query["after" if order == "asc" else "before"] = page[-1]["version"]
        return found

    async def rollback(self, *, steps: int | None = None, label: str | None = None, version: int | None = None) -> int:
        """Make the record what it was `steps` states ago, at a checkpoint or at a version; return the new version."""
        given = {"steps": steps, "label": label, "version": version}
        body = {name: each for name, each in given.items() if each is not None}
        return int((await self._place.write(body, to="/rollback", owned=False))["version"])

    async def fork(self, new_id: str, *, version: int | None = None, branch: str | None = None) -> int:
        """Start another record, of the same scope and owner, from this one's state at `version` (default: now)."""
        given = {"id": Ref(self._place.ref.scope, new_id).id, "version": version, "branch": branch}
        body = {name: each for name, each in given.items() if each is not None}
        # Under the key of this call the record that an earlier attempt began is known as its own.
        return int((await self._place.requests.write("POST", self._place.path + "/forks", body))["version"])

    async def _read(self, path: str, query: dict[str, Any]) -> Any:
        try:
            return await self._place.requests.read(self._place.path + path, query)
        except (NotFound, Deleted):
            if path != "/versions" or query["branch"] is not None:
                raise
            return {"versions": [], "after": None}  # of a record that is not there


T = TypeVar("T")
_ABSENT: Any = object()


class AsyncRemoteRecord(Past):
    """The state of a user or a task behind a service, from `store.user(id)` or `store.task(id)`.

    Example::

        user = store.user("u1")
        await user.set("language", "nb")
        visits = await user.increment("visits")
        assert await user.get_all() == {"language": "nb", "visits": visits}

    Each read asks the service, whatever `fresh` says: with it the service asks Redis, too. Each write is sent again
    while its answer is lost, and applied once.
    """

    def __init__(self, requests: Requests, ref: Ref, user: str | None = None) -> None:
        self._place = RecordPlace(requests, ref, user)

    def __getattr__(self, name: str) -> Any:
        raise values.refuse(type(self).__name__, name, values.RECORD)

    @property
    def ref(self) -> Ref:
        """What the record is called: its scope and id."""
        return self._place.ref

    @property
    def id(self) -> str:
        """The record's id within its scope; for a new session the one that was generated."""
        return self._place.ref.id

    # Reading

    async def get(
        self, key: str, default: Any = None, *, fresh: bool = False, max_staleness: float | None = None
    ) -> Any:
        """Read one field, or `default` if it is not there. `max_staleness` below what the service has asks Redis."""
        codec.encode_key(key)
        query = {"fresh": values.must_ask(fresh, max_staleness) or None}
        try:
            found = await self._place.requests.read(path_of(self._place.ref, "/fields/{}", key), query)
        except (NotFound, Deleted):
            return default
        return values.value(found, key)

    async def has(self, key: str, *, fresh: bool = False, max_staleness: float | None = None) -> bool:
        """Tell whether a field is there."""
        return await self.get(key, _ABSENT, fresh=fresh, max_staleness=max_staleness) is not _ABSENT

    async def get_all(self, *, fresh: bool = False, max_staleness: float | None = None) -> dict[str, Any]:
        """Read all fields, as a dict of the caller's own; {} for a record never written."""
        return (await self._place.state(fresh=values.must_ask(fresh, max_staleness))).fields

    async def version(self, *, fresh: bool = False, max_staleness: float | None = None) -> int:
        """Read the version: how many commits the record has had, 0 if it was never written."""
        return (await self._place.state(fresh=values.must_ask(fresh, max_staleness))).version

    async def exists(self, *, fresh: bool = False, max_staleness: float | None = None) -> bool:
        """Tell whether the record was written and not deleted since."""
        state = await self._place.state(fresh=values.must_ask(fresh, max_staleness))
        return state.version > 0 and not state.deleted

    async def tags(self, *, fresh: bool = False, max_staleness: float | None = None) -> dict[str, tuple[str, ...]]:
        """Read the tags, texts by key in order; {} if it has none."""
        query = {"fresh": values.must_ask(fresh, max_staleness) or None}
        try:
            found = await self._place.requests.read(f"{self._place.path}/tags", query)
        except (NotFound, Deleted):
            return {}
        return {key: tuple(texts) for key, texts in found["tags"].items()}

    def items(self, collection: str) -> AsyncRemoteItems:
        """Return a collection of items: many keyed values beside the fields, which are read one by one. No I/O."""
        return AsyncRemoteItems(self._place, collection)

    # Changing

    async def set(
        self,
        key: str,
        value: Any,
        *,
        ttl: float | None = None,
        expect: Mapping[str, Any] | None = None,
        expect_version: int | None = None,
        durability: str | None = None,
    ) -> int:
        """Set one field and return the record's new version."""
        body = {"kind": "set", **values.fields({key: value}), **values.expectations(expect)}
        return await self._written(values.lasting(body, ttl), durability, expect_version)

    async def set_many(
        self,
        values: Mapping[str, Any],
        *,
        ttl: float | None = None,
        expect_version: int | None = None,
        durability: str | None = None,
    ) -> int:
        """Set several fields in one commit and return the new version."""
        return await self._written(_fields(values, ttl), durability, expect_version)

    async def delete(self, key: str, *, expect_version: int | None = None, durability: str | None = None) -> int:
        """Delete one field and return the new version. A field that is not there is no error."""
        codec.encode_key(key)
        return await self._written({"kind": "delete", "delete": [key]}, durability, expect_version)

    async def clear(self, *, messages: bool = False, items: bool = False, durability: str | None = None) -> int:
        """Delete all fields, and messages and items if asked; return the new version. History stays."""
        what = ["fields", *(["messages"] if messages else []), *(["items"] if items else [])]
        return await self._written({"kind": "clear", "clear": what}, durability)

    async def update(self, key: str, values: Mapping[str, Any], *, durability: str | None = None) -> int:
        """Merge `values` into the object stored at `key`, one level deep, and return the new version."""
        if not isinstance(values, Mapping):
            raise InvalidValue(f"{key!r}: update takes a mapping, not {type(values).__name__}")
        codec.encode_key(key)
        codec.encode(dict(values), key)
        return int((await self._place.write({"key": key, "merge": dict(values)}, durability, to="/changes"))["version"])

    async def append_to(self, key: str, *items: Any, durability: str | None = None) -> int:
        """Add items to the list stored at `key`, atomically, and return the new version. Creates the list."""
        codec.encode_key(key)
        codec.encode([*items], key)
        return int((await self._place.write({"key": key, "extend": [*items]}, durability, to="/changes"))["version"])

    async def increment(self, key: str, by: int | float = 1, *, durability: str | None = None) -> int | float:
        """Add to a number, atomically, and return the sum. A field that is not there counts as 0."""
        codec.encode_key(key)
        if isinstance(by, bool) or not isinstance(by, (int, float)):
            raise InvalidValue(f"{key!r}: a {type(by).__name__} is not a number")
        codec.encode(by, key)
        found: int | float = (await self._place.write({"key": key, "add": by}, durability, to="/changes"))["sum"]
        return found

    async def write(
        self,
        *,
        set: Mapping[str, Any] | None = None,
        delete: Iterable[str] = (),
        increment: Mapping[str, int] | None = None,
        append: Iterable[Message | dict[str, Any]] = (),
        items: Iterable[PutItem | DeleteItem] = (),
        phase: str | None = None,
        tag: Mapping[str, str | Iterable[str]] | None = None,
        untag: Mapping[str, str | Iterable[str]] | None = None,
        expect: Mapping[str, Any] | None = None,
        expect_exists: bool | None = None,
        expect_version: int | None = None,
        expect_phase: str | None = None,
        revive: bool = False,
        durability: str | None = None,
    ) -> Written:
        """Change fields, counters, messages, items, phase and tags in one atomic commit of one request.

        Example::

            written = await session.write(
                set={"city": "Oslo"}, increment={"questions": 1}, append=[{"role": "user", "content": "And Bergen?"}]
            )
            print(written.version, written.results["questions"])

        Of `expect_version` and `expect_exists` one can be given.
        """
        codec.check_containers(
            {"set": set, "increment": increment, "tag": tag, "untag": untag, "expect": expect},
            {"delete": delete, "append": append, "items": items},
        )
        given = {
            "delete": [*delete], "increment": dict(increment or {}), "append": values.messages(append), "phase": phase,
            "expect_phase": expect_phase, "revive": revive, "items": values.items(items),
        }  # fmt: skip
        body = {name: each for name, each in given.items() if each} | values.fields(set or {})
        body |= values.tags(tag, untag) | values.expectations(expect)
        done = await self._place.write(body, durability, expect_version=expect_version, expect_exists=expect_exists)
        return Written(done["version"], done["results"], done["first_message"])

    async def _written(self, body: dict[str, Any], durability: str | None, expect_version: int | None = None) -> int:
        return int((await self._place.write(body, durability, expect_version=expect_version))["version"])

    def transaction(self, *, durability: str | None = None) -> AsyncRemoteTransactionBody:
        """Change several fields by what they hold: read at the beginning, one commit at the end, or Conflict.

        Example::

            await record.set_many({"price": 120, "guests": 2})
            async with record.transaction() as tx:
                tx["total"] = tx["price"] * tx["guests"]

        Two requests.
        """
        return AsyncRemoteTransactionBody(self._place, durability)

    async def apply(
        self,
        change: Callable[[RemoteTransaction], T | Awaitable[T]],
        *,
        durability: str | None = None,
        **others: Never,
    ) -> T:
        """Do the same in a function, which is called again while others are faster; return what it returns."""
        values.refuse_options("apply", others)

        async def once() -> T:
            view = RemoteTransaction(await self._place.state(fresh=True))
            found = change(view)
            result: T = await found if inspect.isawaitable(found) else found
            await commit(self._place, view, durability)
            return result

        return await self._place.until_no_conflict(once)

    def lock(self, *, wait: float = 5.0, ttl: float = 30.0, **others: Never) -> AsyncRemoteLease:
        """Hold the record alone inside `async with`, or raise LockTimeout after `wait` seconds.

        Example::

            async with record.lock(wait=5.0) as lease:
                await record.set("seat", "12A")

        Writes inside carry the lease, others' raise Locked. It is renewed in the background until it is released, and
        ends `ttl` seconds (1 to 600) after its holder died. Once it is lost, writes raise Fenced; the body goes on
        until then.
        """
        values.refuse_options("lock", others)
        check_times(wait, ttl, None)
        return AsyncRemoteLease(self._place.requests, self._place.path, wait=wait, ttl=ttl)

    async def erase(self) -> bool:
        """Remove the record for good: fields, messages, history, in every tier; False if there was nothing."""
        return bool((await self._place.order("DELETE", "/everything", repeatable=True))["erased"])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._place.ref.text[:200]}>"


def _fields(given: Mapping[str, Any], ttl: float | None) -> dict[str, Any]:
    # Where a parameter is called `values`.
    return values.lasting({"kind": "set", **values.fields(given)}, ttl)
