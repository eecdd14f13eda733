"""The items of a record: many keyed values beside its fields. Law: a method is one read or one commit.

Items are not part of the record's snapshots and are not cached in hot, so they do not slow down reads of the record.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from distributed_state.cold.record_items import ItemRow, Range
from distributed_state.errors import Conflict, CorruptState, InvalidValue
from distributed_state.port.waited import bounded
from distributed_state.records.access import ITEMS
from distributed_state.records.context import RecordContext
from distributed_state.records.transaction import equal
from distributed_state.tiers import items as item_tiers
from distributed_state.tiers.changes import Changes
from distributed_state.values import codec
from distributed_state.values.codec import Codec
from distributed_state.values.items import (
    ANY,
    MOST_ITEMS,
    DeleteItem,
    Item,
    ItemPage,
    PutItem,
    encode_collection,
    encode_item_key,
    name_of,
)


@bounded()
class AsyncItems:
    """A collection of a record's items: values under keys, of which there may be many thousands.

    Example::

        notes = store.user("u1").items("notes")
        await notes.put("2026-05-01", {"text": "buy milk"})
        await notes.put("photo", b"not text, and stored as it is")
        assert await notes.get("2026-05-01") == {"text": "buy milk"}
        page = await notes.list(prefix="2026-", limit=50)
        print([item.key for item in page.items])

    A key is text of at most 1,024 bytes, a value any JSON value, or `bytes`. Keys are in the order of their bytes. The
    newest items are in Redis, all are in SQL; `get_all` does not read items. Each change is a commit of the record: it
    has a version and is in the history; rollback and fork include items, by reference. With `version` a read returns
    the items as they were at that version of the record.
    """

    def __init__(self, context: RecordContext, collection: str) -> None:
        self._context = context
        self._name = encode_collection(collection)
        self._collection = collection

    @property
    def collection(self) -> str:
        """The collection's name."""
        return self._collection

    # Reading

    async def get(self, key: str, default: Any = None, *, version: int | None = None) -> Any:
        """Read an item's value, or `default` if there is none. One round trip if Redis has it, else SQL is read."""
        item = await self.find(key, version=version)
        return default if item is None else item.value

    async def find(self, key: str, *, version: int | None = None) -> Item | None:
        """Read an item with its version, None if there is none. The result can be passed as `equals`."""
        found = await self.find_many([key], version=version)
        return found.get(key)

    async def get_many(self, keys: Iterable[str], *, version: int | None = None) -> dict[str, Any]:
        """Read the values of several items in one exchange, 1,000 at most; items that do not exist are left out."""
        return {key: item.value for key, item in (await self.find_many(keys, version=version)).items()}

    async def find_many(self, keys: Iterable[str], *, version: int | None = None) -> dict[str, Item]:
        """Read several items with their versions, like `get_many`."""
        if isinstance(keys, str):
            raise InvalidValue(f"give several keys, as [{keys!r:.80}]")
        names = {self._name + b"\0" + encode_item_key(key): key for key in keys}
        if len(names) > MOST_ITEMS:
            raise InvalidValue(f"at most {MOST_ITEMS} items are read at once, not {len(names)}")
        found = await read(self._context, list(names), version)
        return {names[name]: item for name, item in found.items()}

    async def exists(self, key: str, *, version: int | None = None) -> bool:
        """Return whether an item with this key exists."""
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
        first, or with `reverse` the greatest first: then continue with `before=page.next`. Raises ColdUnavailable
        rather than omitting items that only SQL has.
        """
        if type(limit) is not int or not 1 <= limit <= MOST_ITEMS:
            raise InvalidValue(f"limit is an int from 1 to {MOST_ITEMS}, not {limit!r:.80}")
        self._context.allow("read", ITEMS)
        wanted = Range(
            self._name,
            encode_item_key(prefix, "a prefix"),
            None if after is None else encode_item_key(after, "after"),
            None if before is None else encode_item_key(before, "before"),
            reverse,
        )
        tiers, keys = self._context.tiers, self._context.keys
        if version is None:
            listing = await item_tiers.page(tiers, keys, wanted, limit)
        else:
            listing = await item_tiers.page_at(tiers, keys, checked(version), wanted, limit)
        epoch = listing.epoch
        items = [opened(self._context.codec, self._name + b"\0" + key, row, epoch) for key, row in listing.items]
        return ItemPage(tuple(items), None if listing.upto is None else _text(listing.upto))

    # Changing

    async def put(
        self,
        key: str,
        value: Any,
        *,
        if_absent: bool = False,
        if_present: bool = False,
        equals: Any = ANY,
        durability: str | None = None,
    ) -> int:
        """Put an item and return the record's new version. One round trip.

        With `if_absent` (or `if_present`), raises Conflict and writes nothing if the item exists (or does not exist).
        `equals` is the expected value, or the result of `find`: an `Item` that must be unchanged, or None if the item
        must still be absent; with a result of `find` no further read is needed. A condition on an item that only SQL
        has costs a read of SQL and one extra round trip.
        """
        item = PutItem(
            collection=self._collection, key=key, value=value, if_absent=if_absent, if_present=if_present, equals=equals
        )
        return await self._change([item], "put", durability)

    async def put_many(
        self, values: Mapping[str, Any], *, if_absent: bool = False, durability: str | None = None
    ) -> int:
        """Put several items in one commit, 1,000 at most, and return the record's new version.

        With `if_absent`, raises Conflict and writes nothing if any of them exists.
        """
        where = self._collection
        items = [PutItem(collection=where, key=key, value=value, if_absent=if_absent) for key, value in _pairs(values)]
        return await self._change(items, "put", durability)

    async def put_missing(self, values: Mapping[str, Any], *, durability: str | None = None) -> frozenset[str]:
        """Put only the items that do not exist yet, in one commit, and return their keys. Existing items do not change.

        Example::

            notes = store.user("u1").items("notes")
            added = await notes.put_missing({"2026-05-01": "buy milk", "2026-05-02": "rest"})
        """
        names = {name_of(self._collection, key): key for key in values}
        changes = self._context.changes()
        for key, value in _pairs(values):
            changes.put_item(self._collection, key, value, keep=True)
        done = await self._context.commit(changes.draft("put", durability=durability))
        put = await item_tiers.put_of(self._context.tiers, self._context.keys, done)
        return frozenset(names[name] for name in put)

    async def delete(
        self, *keys: str, if_present: bool = False, equals: Any = ANY, durability: str | None = None
    ) -> int:
        """Delete items in one commit and return the record's new version. A missing item is not an error.

        With `if_present`, raises Conflict and writes nothing if one of them does not exist; `equals` is as in `put`.
        """
        where = self._collection
        items = [DeleteItem(collection=where, key=key, if_present=if_present, equals=equals) for key in keys]
        return await self._change(items, "delete", durability)

    async def _change(self, items: Iterable[PutItem | DeleteItem], kind: str, durability: str | None) -> int:
        changes = self._context.changes()
        await add(self._context, changes, items)
        return (await self._context.commit(changes.draft(kind, durability=durability))).version

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._collection!r} of {self._context.text[:200]}>"


def _pairs(values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    if not isinstance(values, Mapping):
        raise InvalidValue(f"items must come as a mapping, not as {type(values).__name__}")
    return values.items()


def checked(version: int) -> int:
    """A version of a record that a caller gave, checked."""
    if type(version) is not int or not 1 <= version < 2**63:
        raise InvalidValue(f"a version is an int from 1 on, not {version!r:.80}")
    return version


async def read(context: RecordContext, names: list[bytes], version: int | None = None) -> dict[bytes, Item]:
    """Items by collection, NUL and key; missing ones are left out."""
    context.allow("read", ITEMS)
    tiers, keys = context.tiers, context.keys
    if not names:
        return {}
    if version is None:
        epoch, found = await item_tiers.read(tiers, keys, names)
    else:
        epoch, found = await item_tiers.read_at(tiers, keys, checked(version), names)
    return {name: opened(context.codec, name, row, epoch) for name, row in found.items()}


def opened(record_codec: Codec, name: bytes, row: ItemRow, epoch: str) -> Item:
    """An item from its stored form. Raises CorruptState and DecryptionFailed."""
    value = record_codec.written_to(row.source).decode(row.frame, codec.item_name(name))
    origin = "" if row.source == record_codec.record else row.source
    collection, _, key = name.partition(b"\0")
    return Item(_text(collection), _text(key), value, row.version, origin, epoch)


def _text(key: bytes) -> str:
    try:
        return key.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise CorruptState(f"an item's key of {len(key)} bytes is not UTF-8", field=repr(key), data=key) from error


async def add(context: RecordContext, changes: Changes, items: Iterable[PutItem | DeleteItem]) -> None:
    """Add items to a change. An item with an expected value is read first, and must be unchanged at the commit."""
    items = list(items)
    for item in items:
        if not isinstance(item, PutItem | DeleteItem):
            raise InvalidValue(f"items takes PutItem and DeleteItem, not {type(item).__name__}")
    by_value = {name_of(item.collection, item.key): item.equals for item in items if _by_value(item)}
    found = await read(context, list(by_value)) if by_value else {}
    for name, value in by_value.items():
        if name not in found or not equal(found[name].value, value):
            key = name.partition(b"\0")[2][:80]
            what = f"item {key.decode(errors='replace')!r}"
            raise Conflict(f"{context.text[:200]}: {what} has another value" if name in found else
                           f"{context.text[:200]}: {what} is not there")  # fmt: skip
    for item in items:
        if _by_value(item):
            item = replace(item, equals=found[name_of(item.collection, item.key)])
        changes.items.add(item)


def _by_value(item: PutItem | DeleteItem) -> bool:
    return item.equals is not ANY and item.equals is not None and not isinstance(item.equals, Item)
