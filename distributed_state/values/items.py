"""The public values for items. Law: an item is a value under a collection and a key, both text.

Design: section 9.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from distributed_state.errors import InvalidValue, TooLarge
from distributed_state.values.journal import COLLECTION_BYTES, KEY_BYTES
from distributed_state.values.model import refuse_pair

MOST_ITEMS = 1000  # per commit, and per read


class Anything(Enum):
    """The default of `equals`: any state of the item. Not None, which means that the item does not exist."""

    ANY = "any"

    def __repr__(self) -> str:
        return self.name


ANY: Final = Anything.ANY


@dataclass(frozen=True, slots=True)
class Item:
    """An item that was read: its value, and `version`, the version of the record that put it.

    `origin` is the text of the record that put it, if this record was forked from that one and shows its item. An item
    can be the expected state of a change (`equals=`): exactly this item, put by that commit.
    """

    collection: str
    key: str
    value: Any
    version: int
    origin: str
    epoch: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ItemPage:
    """Some items, in the order of their keys' bytes. `next` is where the next page starts; None after the last page.

    Request the next page with `after=page.next`, in reverse order with `before=page.next`. A page may be empty and
    still not be the last.
    """

    items: tuple[Item, ...]
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PutItem:
    """An item to put, for `write(items=[...])`, with its conditions, as in `record.items(...).put`."""

    collection: str
    key: str
    value: Any
    if_absent: bool = False
    if_present: bool = False
    equals: Any = ANY
    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteItem:
    """An item to delete, for `write(items=[...])`. A missing one is not an error, unless it is required to exist."""

    collection: str
    key: str
    if_present: bool = False
    equals: Any = ANY


def encode_collection(collection: str) -> bytes:
    """The bytes of a collection's name. Raises InvalidValue."""
    if not isinstance(collection, str) or not collection or "\0" in collection:
        raise InvalidValue(
            f"a collection is a str of 1 to {COLLECTION_BYTES} bytes without NUL, not {collection!r:.80}"
        )
    refuse_pair(collection, "collection")
    data = collection.encode("utf-8", "surrogatepass")
    if len(data) > COLLECTION_BYTES:
        raise TooLarge(f"a collection's name of {len(data)} bytes is longer than {COLLECTION_BYTES}")
    return data


def encode_item_key(key: str, what: str = "an item's key") -> bytes:
    """The bytes of an item's key, which may be any text, or of a key's prefix. Raises InvalidValue."""
    if not isinstance(key, str):
        raise InvalidValue(f"{what} is a str, not {key!r:.80}")
    refuse_pair(key, what)
    data = key.encode("utf-8", "surrogatepass")
    if len(data) > KEY_BYTES:
        raise TooLarge(f"{what} of {len(data)} bytes is longer than {KEY_BYTES}")
    return data


def name_of(collection: str, key: str) -> bytes:
    """An item's name in the journal."""
    return encode_collection(collection) + b"\0" + encode_item_key(key)


def stamp_of(version: int, origin: str, record: str) -> bytes:
    """The server's stamp of an item's state: its version, with the record that put it if that is another one."""
    return b"%d" % version if origin in ("", record) else f"{version}@{origin}".encode()
