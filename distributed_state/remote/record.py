"""Records behind a service, asyncio API, and their history.

Law: a method is one request, unless its docstring gives another number.

Handles hold no state. The names, options and errors are those of the direct store's `AsyncRecord`, whose docstrings say
more. History is never rewritten: a rollback adds a new version.

Design: section 26.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Literal, Never, TypeVar

from distributed_state.errors import Deleted, InvalidValue, NotFound
from distributed_state.records.items import AsyncItems
from distributed_state.records.messages import Page
from distributed_state.records.record import AsyncRecord
from distributed_state.remote import values
from distributed_state.remote.requests import AsyncRemoteLease, RecordPlace, Requests, State, path_of
from distributed_state.results import Change, Checkpoint, Snapshot, Written
from distributed_state.values import codec
from distributed_state.values.items import (
    MOST_ITEMS,
    DeleteItem,
    Item,
    ItemPage,
    PutItem,
    encode_collection,
    encode_item_key,
)
from distributed_state.values.model import Message, Ref
from distributed_state.warm.lock import check_times

_GONE: Any = object()


class RemoteTransaction(MutableMapping[str, Any]):
    """The record's fields as a dict. All changes are one commit at the end, or nothing.

    As in a dict, changing a list or object that was read or set here changes the field.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._now: dict[str, Any] = {}
        self._more: dict[str, Any] = {}
        self._messages: list[dict[str, Any]] = []
        self._tags: dict[tuple[str, str], str] = {}  # the change of each tag: "tag" or "untag"
        self._items: dict[tuple[str, str], dict[str, Any]] = {}
        self._set: set[str] = set()
        self._closed = ""  # why the fields can no longer be changed

    @property
    def version(self) -> int:
        """The version that this view shows, and that the commit expects."""
        return self._state.version

    @property
    def phase(self) -> str | None:
        """The phase before this transaction."""
        return self._state.phase

    def __getitem__(self, key: str) -> Any:
        if key not in self._now:
            codec.encode_key(key)
            # A copy, so that a change in place is found at the end. KeyError if the field is missing.
            self._now[key] = copy.deepcopy(self._state.fields[key])
        found = self._now[key]
        if found is _GONE:
            raise KeyError(key)
        return found

    def __setitem__(self, key: str, value: Any) -> None:
        self._open()
        values.fields({key: value})
        self._now[key] = value
        self._set.add(key)

    def __delitem__(self, key: str) -> None:
        self[key]  # KeyError if it is missing
        self._open()
        self._now[key] = _GONE

    def __iter__(self) -> Iterator[str]:
        keys = dict.fromkeys([*self._state.fields, *self._now])
        yield from (key for key in keys if self._now.get(key) is not _GONE)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def append(self, *messages: Message | dict[str, Any]) -> None:
        """Add messages to the conversation with this commit."""
        self._open()
        self._messages += values.messages(messages)

    def tag(self, key: str, *texts: str) -> None:
        """Tag the record with one text or several under a key, with this commit."""
        self._open()
        self._add("tag", key, texts)

    def untag(self, key: str, *texts: str) -> None:
        """Remove tags with this commit."""
        self._open()
        self._add("untag", key, texts)

    def _add(self, what: str, key: str, texts: tuple[str, ...]) -> None:
        values.tags({key: texts}, None)
        self._tags.update(dict.fromkeys(((key, text) for text in texts), what))

    def put_item(
        self,
        collection: str,
        key: str,
        value: Any,
        *,
        if_absent: bool = False,
        if_present: bool = False,
        keep: bool = False,
        **others: Never,
    ) -> None:
        """Put an item of the record with this commit. `keep` leaves an existing item as it is."""
        values.refuse_options("put_item", others)
        self._change(PutItem(
            collection=collection, key=key, value=value, if_absent=if_absent, if_present=if_present, keep=keep
        ))  # fmt: skip

    def delete_item(self, collection: str, key: str, *, if_present: bool = False, **others: Never) -> None:
        """Delete an item of the record with this commit; a missing item is not an error, unless `if_present`."""
        values.refuse_options("delete_item", others)
        self._change(DeleteItem(collection=collection, key=key, if_present=if_present))

    def _change(self, item: PutItem | DeleteItem) -> None:
        self._open()
        self._items[item.collection, item.key] = values.items([item])[0]

    def move_to(self, phase: str | None) -> None:
        """Set the phase with this commit."""
        self._open()
        self._more["phase"] = phase

    def body(self) -> dict[str, Any] | None:
        """End the transaction and return the change as a request body, None if nothing changed."""
        self._closed = "this transaction is over; it can no longer change anything"
        before = self._state.fields
        put = {key: value for key, value in self._now.items() if value is not _GONE and self._changed(key, value)}
        gone = [key for key, value in self._now.items() if value is _GONE and key in before]
        body = {**self._more, **values.fields(put)}
        for (key, text), what in self._tags.items():
            body.setdefault(what, {}).setdefault(key, []).append(text)
        body |= {"delete": gone} if gone else {}
        body |= {"append": self._messages} if self._messages else {}
        body |= {"items": [*self._items.values()]} if self._items else {}
        return {**body, "kind": "transaction"} if body else None

    def _changed(self, key: str, value: Any) -> bool:
        before = self._state.fields.get(key, _GONE)
        return key in self._set or before is _GONE or codec.encode_value(value, key) != codec.encode_value(before, key)

    def _open(self) -> None:
        if self._closed:
            raise InvalidValue(self._closed)


class AsyncRemoteTransactionBody:
    """The `async with` around a RemoteTransaction."""

    def __init__(self, place: RecordPlace, durability: str | None = None) -> None:
        self._place = place
        self._durability = durability

    async def __aenter__(self) -> RemoteTransaction:
        self._view = RemoteTransaction(await self._place.state(fresh=True))
        return self._view

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await commit(self._place, self._view, self._durability)


async def commit(place: RecordPlace, view: RemoteTransaction, durability: str | None) -> None:
    """Write the changes against the version that was read. Raises Conflict."""
    body = view.body()
    if body is not None:
        await place.write(body, durability, expect_version=view.version)


class AsyncRemoteItems:
    """A collection of a record's items behind a service: values under keys, of which there may be many thousands.

    Example::

        notes = store.user("u1").items("notes")
        await notes.put("2026-05-01", {"text": "buy milk"})
        assert await notes.get("2026-05-01") == {"text": "buy milk"}
        page = await notes.list(prefix="2026-", limit=50)
        print([item.key for item in page.items])

    Each change is a commit of the record, which is created if it does not exist. With `version` a read returns the
    items as they were at that version of the record.
    """

    def __init__(self, place: RecordPlace, collection: str) -> None:
        encode_collection(collection)
        self._place = place
        self._collection = collection
        self._path = path_of(place.ref, "/items/{}", collection)

    def __getattr__(self, name: str) -> Any:
        raise values.refuse(self, name, lambda: AsyncItems)

    @property
    def collection(self) -> str:
        """The collection's name."""
        return self._collection

    # Reading

    async def get(self, key: str, default: Any = None, *, version: int | None = None) -> Any:
        """Read an item's value, or `default` if there is none."""
        item = await self.find(key, version=version)
        return default if item is None else item.value

    async def find(self, key: str, *, version: int | None = None) -> Item | None:
        """Read an item with its version, None if there is none."""
        encode_item_key(key)
        if version is None and key:
            path = path_of(self._place.ref, "/items/{}/{}", self._collection, key)
            found = await self._place.read(path, absent=None)
            return None if found is None else self._item(found)
        # Read by a listing: a 404 for the item's path could mean the item or the version, and a proxy may drop an empty
        # last part of a path.
        page = await self.list(prefix=key, limit=1, version=version)
        return page.items[0] if page.items and page.items[0].key == key else None

    async def exists(self, key: str, *, version: int | None = None) -> bool:
        """Return whether such an item exists."""
        return await self.find(key, version=version) is not None

    async def list(
        self,
        *,
        prefix: str = "",
        after: str | None = None,
        before: str | None = None,
        limit: int = 100,
        reverse: bool = False,
        version: int | None = None,
    ) -> ItemPage:
        """Read a page of items in the order of their keys' bytes, `limit` at most and about a megabyte.

        Example::

            notes = store.user("u1").items("notes")
            page = await notes.list(limit=100)
            while page.next is not None:
                page = await notes.list(limit=100, after=page.next)

        Returns items whose key begins with `prefix` and lies between `after` and `before` (exclusive), the smallest
        first, or with `reverse` the greatest first: then continue with `before=page.next`.
        """
        if type(limit) is not int or not 1 <= limit <= MOST_ITEMS:
            raise InvalidValue(f"limit is an int from 1 to {MOST_ITEMS}, not {limit!r:.80}")
        if version is not None and (type(version) is not int or not 1 <= version < 2**63):
            raise InvalidValue(f"a version is an int from 1 on, not {version!r:.80}")
        for name, key in ("a prefix", prefix), ("after", after), ("before", before):
            if key is not None:
                encode_item_key(key, name)
        query = {
            "prefix": prefix or None, "after": after, "before": before, "limit": limit,
            "order": "desc" if reverse else "asc", "version": version,
        }  # fmt: skip
        try:
            found = await self._place.requests.read(self._path, query)
        except (NotFound, Deleted):
            if version is not None:
                raise
            return ItemPage((), None)  # the record does not exist
        return ItemPage(tuple(map(self._item, found["items"])), found["next"])

    def _item(self, found: Mapping[str, Any]) -> Item:
        value = values.value(found, found["key"])
        return Item(self._collection, found["key"], value, found["version"], found["origin"], "")

    # Changing

    async def put(
        self,
        key: str,
        value: Any,
        *,
        if_absent: bool = False,
        if_present: bool = False,
        durability: str | None = None,
        **others: Never,
    ) -> int:
        """Put an item and return the record's new version.

        With `if_absent` (or `if_present`), raises Conflict and writes nothing if the item exists (or does not exist).
        """
        values.refuse_options("put", others)
        where = self._collection
        item = PutItem(collection=where, key=key, value=value, if_absent=if_absent, if_present=if_present)
        return await self._change([item], "put", durability)

    async def put_many(
        self, values: Mapping[str, Any], *, if_absent: bool = False, durability: str | None = None
    ) -> int:
        """Put several items in one commit, 1,000 at most, and return the record's new version.

        With `if_absent`, raises Conflict and writes nothing if any of them exists.
        """
        if not isinstance(values, Mapping):
            raise InvalidValue(f"items must come as a mapping, not as {type(values).__name__}")
        where = self._collection
        items = [PutItem(collection=where, key=key, value=values[key], if_absent=if_absent) for key in values]
        return await self._change(items, "put", durability)

    async def delete(self, *keys: str, if_present: bool = False, durability: str | None = None, **others: Never) -> int:
        """Delete items in one commit and return the record's new version. A missing item is not an error.

        With `if_present`, raises Conflict and writes nothing if one of them does not exist.
        """
        values.refuse_options("delete", others)
        where = self._collection
        return await self._change(
            [DeleteItem(collection=where, key=key, if_present=if_present) for key in keys], "delete", durability
        )

    async def _change(self, items: Any, kind: str, durability: str | None) -> int:
        body = {"kind": kind, "items": values.items(items)}
        return int((await self._place.write(body, durability))["version"])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._collection!r} of {self._place.ref.text[:200]}>"


class Past:
    """The methods for a record's earlier states."""

    _place: RecordPlace

    async def history(
        self, *, after: int = 0, before: int | None = None, limit: int | None = None, branch: str | None = None
    ) -> list[Change]:
        """Read the changes between two versions (exclusive), oldest first: who, when, what.

        One request for each 500, or fewer if they are large.
        """
        Page(limit=limit).checked()
        query = {"after": after, "before": before, "branch": branch}
        try:
            found = await self._place.pages("versions", query, limit, "version")
        except (NotFound, Deleted):
            if branch is not None:
                raise
            found = []  # the record does not exist
        return [values.change(each, self._place.ref) for each in found]

    async def at(self, *, version: int | None = None, branch: str | None = None) -> Snapshot:
        """Read the record at a version, with messages and phase. Raises NotFound if it never existed or was purged."""
        if type(version) is not int or version < 1:
            raise InvalidValue(
                f"a remote store reads a version, also of a branch: an int from 1 on, not {version!r:.80}"
            )
        found = await self._place.requests.read(f"{self._place.path}/versions/{version}", {"branch": branch})
        return values.snapshot(found)

    async def checkpoint(self, label: str) -> int:
        """Name the present state and return its version; `rollback(label=...)` restores it.

        A name is text of 1 to 500 characters, else InvalidValue; `rollback` uses the last checkpoint of a name.
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
        """Read the named versions between two versions (exclusive), oldest first; at most `limit`.

        One request for each 500.
        """
        Page(limit=limit, before=before, after=after, order=order).checked()
        query = {"after": after, "before": before}
        found = await self._place.pages("checkpoints", query, limit, "version", order=order)
        return [values.made(Checkpoint, each) for each in found]

    async def rollback(
        self,
        *,
        steps: int | None = None,
        label: str | None = None,
        version: int | None = None,
        checkpoints: int | None = None,
    ) -> int:
        """Restore an earlier state, by default one step back, and return the new version: as a local record does."""
        given = {"steps": steps, "label": label, "version": version, "checkpoints": checkpoints}
        body = {name: each for name, each in given.items() if each is not None}
        return int((await self._place.write(body, to="/rollback", owned=False))["version"])

    async def fork(self, new_id: str, *, version: int | None = None, branch: str | None = None) -> int:
        """Start another record, of the same scope and owner, from this one's state at `version` (default: now)."""
        given = {"id": Ref(self._place.ref.scope, new_id).id, "version": version, "branch": branch}
        body = {name: each for name, each in given.items() if each is not None}
        # The call's Idempotency-Key lets the service recognize a record that an earlier attempt created.
        return int((await self._place.requests.write("POST", self._place.path + "/forks", body))["version"])


T = TypeVar("T")
_ABSENT: Any = object()


class AsyncRemoteRecord(Past):
    """The state of a user or a task behind a service, from `store.user(id)` or `store.task(id)`.

    Example::

        user = store.user("u1")
        await user.set("language", "nb")
        visits = await user.increment("visits")
        assert await user.get_all() == {"language": "nb", "visits": visits}

    Each read asks the service; with `fresh` the service asks Redis as well. If the reply of a write is lost, the write
    is sent again, and still applied only once.
    """

    def __init__(self, requests: Requests, ref: Ref, user: str | None = None) -> None:
        self._place = RecordPlace(requests, ref, user)

    def __getattr__(self, name: str) -> Any:
        raise values.refuse(self, name, lambda: AsyncRecord)

    @property
    def ref(self) -> Ref:
        """The record's scope and id."""
        return self._place.ref

    @property
    def id(self) -> str:
        """The record's id within its scope; for a new session, the generated id."""
        return self._place.ref.id

    # Reading

    async def get(
        self, key: str, default: Any = None, *, fresh: bool = False, max_staleness: float | None = None
    ) -> Any:
        """Read one field, or `default` if it is not there. A `max_staleness` below the service's makes it ask Redis."""
        codec.encode_key(key)
        query = {"fresh": values.must_ask(fresh, max_staleness) or None}
        found = await self._place.read(path_of(self._place.ref, "/fields/{}", key), query, absent=None)
        return default if found is None else values.value(found, key)

    async def has(self, key: str, *, fresh: bool = False, max_staleness: float | None = None) -> bool:
        """Return whether a field exists."""
        return await self.get(key, _ABSENT, fresh=fresh, max_staleness=max_staleness) is not _ABSENT

    async def get_all(self, *, fresh: bool = False, max_staleness: float | None = None) -> dict[str, Any]:
        """Read all fields, as a new dict; {} for a record never written."""
        return (await self._place.state(fresh=values.must_ask(fresh, max_staleness))).fields

    async def version(self, *, fresh: bool = False, max_staleness: float | None = None, **others: Never) -> int:
        """Read the version: how many commits the record has had, 0 if it was never written."""
        values.refuse_options("version", others)
        return (await self._place.state(fresh=values.must_ask(fresh, max_staleness))).version

    async def exists(self, *, fresh: bool = False, max_staleness: float | None = None) -> bool:
        """Return whether the record was written and not deleted since."""
        state = await self._place.state(fresh=values.must_ask(fresh, max_staleness))
        return state.version > 0 and not state.deleted

    async def tags(self, *, fresh: bool = False, max_staleness: float | None = None) -> dict[str, tuple[str, ...]]:
        """Read the tags, texts by key in order; {} without tags."""
        query = {"fresh": values.must_ask(fresh, max_staleness) or None}
        found = await self._place.read(f"{self._place.path}/tags", query, absent={"tags": {}})
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
        """Delete one field and return the new version. A missing field is not an error."""
        codec.encode_key(key)
        return await self._written({"kind": "delete", "delete": [key]}, durability, expect_version)

    async def clear(self, *, messages: bool = False, items: bool = False, durability: str | None = None) -> int:
        """Delete all fields, and messages and items if asked; return the new version. History stays."""
        what = ["fields", *(["messages"] if messages else []), *(["items"] if items else [])]
        return await self._written({"kind": "clear", "clear": what}, durability)

    async def update(self, key: str, values: Mapping[str, Any] | None = None, *, durability: str | None = None) -> int:
        """Merge `values` into the object stored at `key`, one level deep, and return the new version."""
        merge = dict(codec.checked_merge(key, values))
        codec.encode_key(key)
        codec.encode(merge, key)
        return int((await self._place.write({"key": key, "merge": merge}, durability, to="/changes"))["version"])

    async def append_to(self, key: str, *items: Any, durability: str | None = None) -> int:
        """Add items to the list stored at `key`, atomically, and return the new version. Creates the list."""
        codec.encode_key(key)
        codec.encode([*items], key)
        return int((await self._place.write({"key": key, "extend": [*items]}, durability, to="/changes"))["version"])

    async def increment(self, key: str, by: int | float = 1, *, durability: str | None = None) -> int | float:
        """Add to a number, atomically, and return the sum. A missing field counts as 0."""
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

        Only one of `expect_version` and `expect_exists` can be given.
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
        """Change several fields inside `async with`: read at the beginning, committed together at the end, or Conflict.

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
        """Run `change(transaction)`, commit, and return its result; on a conflict, retry on the newest state."""
        values.refuse_options("apply", others)

        async def once() -> T:
            view = RemoteTransaction(await self._place.state(fresh=True))
            found = change(view)
            result: T = await found if inspect.isawaitable(found) else found
            await commit(self._place, view, durability)
            return result

        return await self._place.until_no_conflict(once)

    def lock(self, *, wait: float = 5.0, ttl: float = 30.0, **others: Never) -> AsyncRemoteLease:
        """Lock the record inside `async with`, or raise LockTimeout after `wait` seconds.

        Example::

            async with record.lock(wait=5.0) as lease:
                await record.set("seat", "12A")

        Writes inside carry the lease; others' writes raise Locked. The lease is renewed in the background until it is
        released, and ends `ttl` seconds (1 to 600) after its holder died. Once it is lost, writes raise Fenced; the
        body is not interrupted.
        """
        values.refuse_options("lock", others)
        check_times(wait, ttl, None)
        return AsyncRemoteLease(self._place.requests, self._place.path, wait=wait, ttl=ttl)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._place.ref.text[:200]}>"


def _fields(given: Mapping[str, Any], ttl: float | None) -> dict[str, Any]:
    # For methods with a parameter called `values`.
    return values.lasting({"kind": "set", **values.fields(given)}, ttl)
