"""Items of a record: many values beside its fields. Law: a request reads a page of a collection, or is one commit."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator
from starlette.responses import Response

from distributed_state.errors import InvalidValue, NotFound
from distributed_state.programs.service import requests, writing
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.shapes import (
    Answer,
    Body,
    Encoded,
    Limit,
    Name,
    Query,
    Values,
    Version,
    together,
    value_shown,
)
from distributed_state.programs.service.routes import Asked
from distributed_state.records.access import ITEMS
from distributed_state.tiers.changes import Changes
from distributed_state.values import bytes_as_text
from distributed_state.values.items import Item
from distributed_state.values.model import Scope


class AtVersion(Query):
    """What is read: the item as it is, or as it was at a `version` of the record."""

    version: Version | None = Field(None, ge=1)


class Page(AtVersion):
    """Which items: those whose key begins with `prefix`, between two keys, both exclusive, `limit` in this order."""

    prefix: Name = ""
    after: Name | None = None
    before: Name | None = None
    limit: Limit = 100
    order: Literal["asc", "desc"] = "asc"


class ItemShown(Answer):
    """An item: its value, or its bytes in base64.

    `version` is the one that put it: of this record, or of the one named in `origin`, from which this was forked.
    """

    key: str
    version: int
    origin: str
    value: Any = None
    bytes: str | None = None


class Items(Answer):
    """A page, in the order of the keys' bytes; `next` is the key to go on from, null if it is the last."""

    items: list[ItemShown]
    next: str | None


async def page(scope: Scope, asked: Asked) -> Response:
    """A page of a collection."""
    given = requests.query(asked.request, Page)
    record = records.handle(asked, scope)
    found = await record.items(asked.request.path_params["collection"]).list(
        prefix=given.prefix, after=given.after, before=given.before, limit=given.limit,
        reverse=given.order == "desc", version=given.version,
    )  # fmt: skip
    if not found.items:
        await records.look(record, scope, False, ITEMS)
    more: dict[str, str] | None = None
    if found.next is not None:
        more = requests.next_page(asked.request, **{"before" if given.order == "desc" else "after": found.next})
    shown = {"items": [_shown(each) for each in found.items], "next": found.next}
    return answer(shown, headers=more)


async def get(scope: Scope, asked: Asked) -> Response:
    """One item."""
    given = requests.query(asked.request, AtVersion)
    collection, key = asked.request.path_params["collection"], asked.request.path_params["key"]
    found = await records.handle(asked, scope).items(collection).find(key, version=given.version)
    if found is None:
        raise NotFound(f"there is no item {key!r:.80} of {collection!r:.80}")
    return answer(_shown(found))


def _shown(item: Item) -> dict[str, Any]:
    return {"key": item.key, "version": item.version, "origin": item.origin, **value_shown(item.value)}


class ItemChange(Body):
    """An item to put, by its value or its bytes in base64, or to `delete`; `keep` leaves one that is there as it is.

    With `expect` it must be there, or not, else nothing of the whole write is done.
    """

    collection: Name
    key: Name
    value: Any = None
    bytes: str | None = None
    delete: bool = False
    keep: bool = False
    expect: Literal["absent", "present"] | None = None

    @model_validator(mode="after")
    def _one(self) -> ItemChange:
        if ("value" in self.model_fields_set) + (self.bytes is not None) + self.delete != 1:
            raise ValueError("give a value, bytes or delete, one of them")
        return self

    def build(self, changes: Changes) -> None:
        """Put it into a change. Raises InvalidValue."""
        collection, key = self.collection, self.key
        absent, present = self.expect == "absent", self.expect == "present"
        if self.delete:
            if absent or self.keep:
                raise InvalidValue(f"item {key!r:.80}: it is to be deleted, so it is neither kept nor to be absent")
            changes.delete_item(collection, key, if_present=present)
            return
        value = self.value if self.bytes is None else bytes_as_text.bytes_of(self.bytes, key)
        changes.put_item(collection, key, value, if_absent=absent, if_present=present, keep=self.keep)


class ChangeItems(Body):
    """Items to put and to delete, in one commit. With `expect` each of them must be there, or not, else nothing is."""

    put: Values | None = None
    bytes: Encoded | None = None
    delete: list[Name] = Field(default_factory=list)
    expect: Literal["absent", "present"] | None = None


async def change(scope: Scope, asked: Asked) -> Response:
    """Change items of a collection."""
    given = requests.body(asked.request, asked.limits, ChangeItems)
    collection = asked.request.path_params["collection"]
    values = together(given.put, given.bytes)
    absent, present = given.expect == "absent", given.expect == "present"

    def build(changes: Changes) -> None:
        for key in given.delete:
            changes.delete_item(collection, key, if_present=present)
        for key, value in values.items():
            changes.put_item(collection, key, value, if_absent=absent, if_present=present)

    kind = "put" if values or not given.delete else "delete"
    done = await writing.write(asked, records.handle(asked, scope), writing.Write(kind, build))
    return writing.written(done)
