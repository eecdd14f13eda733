"""Items of a record behind a service, asyncio face. Law: a method is one request, and a change one commit.

Design: section 26.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never

from distributed_state.errors import Deleted, InvalidValue, NotFound
from distributed_state.remote import values
from distributed_state.remote.requests import RecordPlace, path_of
from distributed_state.values.items import (
    MOST_ITEMS,
    DeleteItem,
    Item,
    ItemPage,
    PutItem,
    encode_collection,
    encode_item_key,
)


class AsyncRemoteItems:
    """A collection of a record's items behind a service: values under keys, of which there may be many thousands.

    Example::

        notes = store.user("u1").items("notes")
        await notes.put("2026-05-01", {"text": "buy milk"})
        assert await notes.get("2026-05-01") == {"text": "buy milk"}
        page = await notes.list(prefix="2026-", limit=50)
        print([item.key for item in page.items])

    Each change is a commit of the record, which begins with it if it is not there. With `version` a read gives what
    was so at that version of the record.
    """

    def __init__(self, place: RecordPlace, collection: str) -> None:
        encode_collection(collection)
        self._place = place
        self._collection = collection
        self._path = path_of(place.ref, "/items/{}", collection)

    def __getattr__(self, name: str) -> Any:
        raise values.refuse(type(self).__name__, name, values.ITEMS)

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
            try:
                return self._item(await self._place.requests.read(path))
            except (NotFound, Deleted):
                return None
        # As the first that begins with it: what is not found at its path may be the item, or the version, and an empty
        # last part of a path may be lost on its way.
        found = await self.list(prefix=key, limit=1, version=version)
        return found.items[0] if found.items and found.items[0].key == key else None

    async def exists(self, key: str, *, version: int | None = None) -> bool:
        """Tell whether there is such an item."""
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

        Those whose key begins with `prefix` and lies between `after` and `before` (exclusive), the smallest first, or
        with `reverse` the greatest: then go on with `before=page.next`.
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
            return ItemPage((), None)  # of a record that is not there
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

        With `if_absent` or `if_present` Conflict, and nothing is written, unless there is none, or one.
        """
        values.refuse_options("put", others)
        where = self._collection
        item = PutItem(collection=where, key=key, value=value, if_absent=if_absent, if_present=if_present)
        return await self._change([item], "put", durability)

    async def put_many(
        self, values: Mapping[str, Any], *, if_absent: bool = False, durability: str | None = None
    ) -> int:
        """Put several items in one commit, 1,000 at most, and return the record's new version.

        With `if_absent` Conflict, and nothing is written, if there is any of them.
        """
        if not isinstance(values, Mapping):
            raise InvalidValue(f"items must come as a mapping, not as {type(values).__name__}")
        where = self._collection
        items = [PutItem(collection=where, key=key, value=values[key], if_absent=if_absent) for key in values]
        return await self._change(items, "put", durability)

    async def delete(self, *keys: str, if_present: bool = False, durability: str | None = None, **others: Never) -> int:
        """Delete items in one commit and return the record's new version. One that is not there is no error.

        With `if_present` Conflict, and nothing is written, if any is not there.
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
