"""Fields, tags and items of a record. Law: all changes of a request are one commit, made only if its conditions hold.

A request sets or deletes one field, changes several fields, or updates one field from its current value, where no
concurrent update is lost. Items are large collections of values beside the fields, read page by page. A whole write
takes everything that a record's `write` takes; the client of this package sends it. It creates a missing record, while
the other operations refuse to begin a conversation by mistake.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.responses import Response

from distributed_state.conversation.turn import AsyncTurn
from distributed_state.errors import InvalidValue, NotFound
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.requests import (
    Answer,
    Asked,
    Body,
    Encoded,
    Id,
    Label,
    Limit,
    Messages,
    Name,
    Query,
    Span,
    Texts,
    Ttl,
    Values,
    Version,
    Written,
    expected,
    together,
    value_shown,
)
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.records import OnceOnly, Write
from distributed_state.records import history
from distributed_state.records.access import ITEMS, TAGS, VERSION
from distributed_state.records.context import RecordContext, context_of
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.changes import Changes, add
from distributed_state.values import as_text, codec, field_ttl
from distributed_state.values.items import Item
from distributed_state.values.model import INITIALIZED, MAX_PHASE, PHASE, Scope
from distributed_state.values.search import tags_in
from distributed_state.warm.answers import Draft, Expectations

_GONE: Any = object()
Kind = Literal[
    "set", "delete", "write", "append", "clear", "transaction", "transition", "checkpoint", "put", "lifetime"
]


# Fields


class Fields(Answer):
    """All fields of one version; those with bytes are in `bytes`, in base64."""

    version: int
    fields: Values
    bytes: Encoded | None = None


async def read(scope: Scope, asked: Asked, given: records.Fresh) -> Response:
    """All fields of a record."""
    record = records.handle(asked, scope)
    entry, known, size = await records.whole(asked, record, scope, given.fresh)
    if known is not None:
        return known
    return await requests.in_turn(size, lambda: _shown(context_of(record), entry))


def _shown(context: RecordContext, entry: CachedRecord) -> Response:
    return answer({"version": entry.version, **as_text.apart(context.fields(entry))}, version=entry.version)


class FieldAt(records.Fresh):
    """Reads the current field, or the field at a `version`."""

    version: Version | None = None


class FieldValue(Answer):
    """A field: its value, or its bytes in base64."""

    version: int
    value: Any = None
    bytes: str | None = None


async def get(scope: Scope, asked: Asked, given: FieldAt) -> Response:
    """One field of a record."""
    record, key = records.handle(asked, scope), asked.request.path_params["key"]
    if given.version is None:
        entry = await records.look(record, given.fresh, key)
    else:
        context_of(record).allow("read", key)
        entry = await history.fields_at(context_of(record), given.version)
    value = context_of(record).value(entry, key, _GONE)
    if value is _GONE:
        raise NotFound(f"there is no field {key!r:.80}")
    known = records.not_modified(asked.request, entry)
    if known is not None:
        return known
    return answer({"version": entry.version, **value_shown(value)}, version=entry.version)


class SetField(Body):
    """A value, or bytes in base64; with `ttl` it expires after that many seconds."""

    value: Any = None
    bytes: str | None = None
    ttl: Ttl | None = None

    @model_validator(mode="after")
    def _one(self) -> SetField:
        if ("value" in self.model_fields_set) is (self.bytes is not None):
            raise ValueError("give either a value or bytes")
        return self


async def put(scope: Scope, asked: Asked, given: SetField) -> Response:
    """Set one field."""
    record, key = records.handle(asked, scope), asked.request.path_params["key"]
    value = given.value if given.bytes is None else as_text.bytes_of(given.bytes, key)
    if given.ttl is not None:
        await context_of(record).tiers.clock.know()
    change = Write("set", lambda changes: changes.set(key, value, ttl=given.ttl))
    return records.written(await records.write(asked, record, change))


async def delete(scope: Scope, asked: Asked) -> Response:
    """Delete one field; a missing field is not an error."""
    record, key = records.handle(asked, scope), asked.request.path_params["key"]
    return records.written(await records.write(asked, record, Write("delete", lambda changes: changes.delete(key))))


class Patch(Body):
    """Changes of several fields, in one commit.

    `increment` adds integers. The request is refused unless each field of `expect` has that value (compared as JSON),
    all fields of `expect_absent` are missing, and all of `expect_present` exist.
    """

    set: Values | None = None
    bytes: Encoded | None = None
    delete: list[Name] = Field(default_factory=list)
    increment: dict[Name, int] = Field(default_factory=dict)
    expect: Values | None = None
    expect_absent: list[Name] = Field(default_factory=list)
    expect_present: list[Name] = Field(default_factory=list)


class Patched(Written):
    """The new version, and the new values of the incremented fields."""

    results: dict[str, int]


async def patch(scope: Scope, asked: Asked, given: Patch) -> Response:
    """Change several fields in one commit."""
    fields = together(given.set, given.bytes)

    def build(changes: Changes) -> None:
        for key in given.delete:
            changes.delete(key)
        changes.set_many(fields)
        for key, by in given.increment.items():
            changes.increment(key, by)

    expect = expected(given.expect, given.expect_absent, given.expect_present)
    done = await records.write(asked, records.handle(asked, scope), Write("write", build, expect))
    found = {"version": done.version, "repeated": done.repeated, "results": done.results}
    return answer(found, version=done.version)


# Updates of one field from its current value


class FieldChange(Body):
    """An update of the field `key`: add a number, merge an object one level deep, or extend a list.

    A missing field counts as 0, {} or []. If this creates the record, `user` owns it.
    """

    key: Name
    add: int | float | None = None
    merge: Values | None = None
    extend: list[Any] | None = None
    user: Id | None = None
    durability: str | None = None

    @model_validator(mode="after")
    def _one(self) -> FieldChange:
        if sum(each is not None for each in (self.add, self.merge, self.extend)) != 1:
            raise ValueError("give exactly one of add, merge and extend")
        return self

    @property
    def kind(self) -> str:
        """The kind of the commit in the history."""
        return "update" if self.merge is not None else "append_to" if self.extend is not None else "increment"

    def applied(self, stored: Any) -> Any:
        """The new value of the field. Raises InvalidValue."""
        if self.add is not None:
            return add(stored, self.add, self.key)
        if self.merge is not None:
            return {**_kept(stored, dict, "an object", self.key), **self.merge}
        return [*_kept(stored, list, "a list", self.key), *(self.extend or ())]


def _kept(stored: Any, kind: type, what: str, key: str) -> Any:
    if not isinstance(stored, kind):
        raise InvalidValue(f"{key!r:.80}: holds a {type(stored).__name__}, not {what}; set() replaces it")
    return stored


class FieldChanged(Written):
    """The new version; `sum` is the new number if one was added, else null."""

    sum: int | float | None


async def change_field(scope: Scope, asked: Asked, given: FieldChange) -> Response:
    """Update a field from its current value."""
    context = context_of(await owned(asked, scope, given.user))
    await records.write_under_lease(asked, context)
    # The rights are checked first, because a repeated request also gets the result.
    context.allow("write", given.key)
    context.allow("read", given.key)
    once = OnceOnly.of(asked, context)
    with context.durable(given.durability):
        swapping = write_path.until_no_conflict(context.tiers, partial(_swap, context, once, given))
        found, done = await once.settle(swapping)
    version, total = found if done is None else (done.version, done.found.get("sum"))
    return answer({"version": version, "repeated": done is not None, "sum": total}, version=version)


async def _swap(context: RecordContext, once: OnceOnly, given: FieldChange) -> tuple[int, int | float | None]:
    """The new version, and the new number if one was added."""
    entry = await context.read(True, VERSION)
    once.look(entry)  # before the value is checked, which the first attempt changed
    name = codec.encode_key(given.key)
    empty: Any = 0 if given.add is not None else {} if given.merge is not None else []
    value = given.applied(empty if entry.deleted else entry.value(given.key, empty))
    total = value if given.add is not None else None
    changes = context.changes()
    changes.set(given.key, value, until=entry.deadline(name))
    once.log(entry, changes, sum=total)
    draft = changes.draft(given.kind, expected=entry.version, epoch=entry.epoch)
    return (await context.commit(draft)).version, total


# Tags


class Tags(Answer):
    """The tags of one version: texts by key."""

    version: int
    tags: Texts


async def tags(scope: Scope, asked: Asked, given: records.Fresh) -> Response:
    """The tags of a record."""
    record = records.handle(asked, scope)
    entry = await records.look(record, given.fresh, TAGS)
    known = records.not_modified(asked.request, entry)
    if known is not None:
        return known
    return answer({"version": entry.version, "tags": tags_in(entry.fields)}, version=entry.version)


class Retag(Body):
    """Tags to add and to remove: texts by key."""

    tag: Texts = Field(default_factory=dict)
    untag: Texts = Field(default_factory=dict)


async def retag(scope: Scope, asked: Asked, given: Retag) -> Response:
    """Add tags to a record, or remove them."""
    change = Write("write", lambda changes: changes.put_tags(given.tag, given.untag))
    return records.written(await records.write(asked, records.handle(asked, scope), change))


# Items


class ItemAt(Query):
    """Reads the current item, or the item at a `version` of the record."""

    version: Version | None = Field(None, ge=1)


class ItemPage(ItemAt):
    """Selects items: keys with `prefix`, between two keys, both exclusive; at most `limit`, in this order."""

    prefix: Name = ""
    after: Name | None = None
    before: Name | None = None
    limit: Limit = 100
    order: Literal["asc", "desc"] = "asc"


class ItemShown(Answer):
    """An item: its value, or its bytes in base64.

    `version` is the one that put it, of this record or of the record `origin`, from which this one was forked.
    """

    key: str
    version: int
    origin: str
    value: Any = None
    bytes: str | None = None


class Items(Answer):
    """A page, in the order of the keys' bytes; `next` is the key to continue from, null if it is the last page."""

    items: list[ItemShown]
    next: str | None


async def item_page(scope: Scope, asked: Asked, given: ItemPage) -> Response:
    """A page of a collection."""
    record = records.handle(asked, scope)
    found = await record.items(asked.request.path_params["collection"]).list(
        prefix=given.prefix, after=given.after, before=given.before, limit=given.limit,
        reverse=given.order == "desc", version=given.version,
    )  # fmt: skip
    if not found.items:
        await records.look(record, False, ITEMS)
    shown = {"items": [_item_shown(each) for each in found.items], "next": found.next}
    return answer(shown, headers=requests.next_page(asked.request, found.next, given.order))


async def get_item(scope: Scope, asked: Asked, given: ItemAt) -> Response:
    """One item."""
    collection, key = asked.request.path_params["collection"], asked.request.path_params["key"]
    found = await records.handle(asked, scope).items(collection).find(key, version=given.version)
    if found is None:
        raise NotFound(f"there is no item {key!r:.80} of {collection!r:.80}")
    return answer(_item_shown(found))


def _item_shown(item: Item) -> dict[str, Any]:
    return {"key": item.key, "version": item.version, "origin": item.origin, **value_shown(item.value)}


class ItemChange(Body):
    """An item to put, by its value or its bytes in base64, or to `delete`; `keep` leaves an existing item unchanged.

    If `expect` does not hold, nothing of the whole write is applied.
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
            raise ValueError("give exactly one of value, bytes and delete")
        return self

    def build(self, changes: Changes | AsyncTurn) -> None:
        """Add this item's change to the changes. Raises InvalidValue."""
        collection, key = self.collection, self.key
        absent, present = self.expect == "absent", self.expect == "present"
        if self.delete:
            if absent or self.keep:
                raise InvalidValue(f"item {key!r:.80}: delete cannot be combined with keep or with expect 'absent'")
            changes.delete_item(collection, key, if_present=present)
            return
        value = self.value if self.bytes is None else as_text.bytes_of(self.bytes, key)
        changes.put_item(collection, key, value, if_absent=absent, if_present=present, keep=self.keep)


class ChangeItems(Body):
    """Items to put and to delete, in one commit. If `expect` does not hold for each of them, nothing is applied."""

    put: Values | None = None
    bytes: Encoded | None = None
    delete: list[Name] = Field(default_factory=list)
    expect: Literal["absent", "present"] | None = None


async def change_items(scope: Scope, asked: Asked, given: ChangeItems) -> Response:
    """Change items of a collection."""
    collection = asked.request.path_params["collection"]
    values = together(given.put, given.bytes)
    absent, present = given.expect == "absent", given.expect == "present"

    def build(changes: Changes) -> None:
        for key in given.delete:
            changes.delete_item(collection, key, if_present=present)
        for key, value in values.items():
            changes.put_item(collection, key, value, if_absent=absent, if_present=present)

    kind = "put" if values or not given.delete else "delete"
    done = await records.write(asked, records.handle(asked, scope), records.Write(kind, build))
    return records.written(done)


# Whole writes


class Live(Body):
    """A conversation ends after `idle` seconds without a commit, and after `lifetime` seconds from now; null: never."""

    idle: Span | None = None
    lifetime: Span | None = None

    def build(self, changes: Changes) -> None:
        """Put the lifetime into a change."""
        changes.set_lifetime(field_ttl.span_ms("idle", self.idle), field_ttl.span_ms("lifetime", self.lifetime))


class WholeWrite(Body):
    """Changes of a record, in one commit; the history shows its `kind`.

    `user` owns a record from its first write on. `clear` is applied first. A `phase` of null removes the phase; a
    `label` names the version. `expect`, `expect_absent` and `expect_present` are as for fields; `expect_phase` is the
    phase before. `lives` sets how long a conversation lives from now on. With `revive` a deleted record begins again.
    `durability` is how durable the write must be before it is answered.
    """

    kind: Kind = "write"
    user: Id | None = None
    clear: list[Literal["fields", "messages", "items"]] = Field(default_factory=list)
    set: Values | None = None
    bytes: Encoded | None = None
    ttl: Ttl | None = None
    delete: list[Name] = Field(default_factory=list)
    increment: dict[Name, int] = Field(default_factory=dict)
    append: Messages | None = None
    items: list[ItemChange] = Field(default_factory=list)
    lives: Live | None = None
    phase: Annotated[str, Field(max_length=MAX_PHASE)] | None = None
    label: Label | None = None
    tag: Texts = Field(default_factory=dict)
    untag: Texts = Field(default_factory=dict)
    expect: Values | None = None
    expect_absent: list[Name] = Field(default_factory=list)
    expect_present: list[Name] = Field(default_factory=list)
    expect_phase: Annotated[str, Field(max_length=MAX_PHASE)] | None = None
    revive: bool = False
    durability: str | None = None

    def build(self, changes: Changes) -> None:
        """Put these changes into the change of a record."""
        if self.clear:
            changes.clear(messages="messages" in self.clear, items="items" in self.clear)
            changes.reserved(INITIALIZED, None)
            changes.emit("conversation.cleared", {"messages": "messages" in self.clear})
        for key in self.delete:
            changes.delete(key)
        changes.set_many(together(self.set, self.bytes), ttl=self.ttl)
        for key, by in self.increment.items():
            changes.increment(key, by)
        for message in self.append or ():
            changes.append(message)
        for item in self.items:
            item.build(changes)
        if self.lives is not None:
            self.lives.build(changes)
        if "phase" in self.model_fields_set:
            changes.phase(self.phase)
        if self.tag or self.untag:
            changes.put_tags(self.tag, self.untag)
        if self.label is not None:
            changes.label(self.label)
            changes.emit("session.checkpoint", {"label": self.label})

    def draft(self, context: RecordContext, changes: Changes) -> Draft:
        """The draft of the commit."""
        if self.revive:
            changes.undelete()
        expectations: Expectations = ()
        if "expect_phase" in self.model_fields_set:
            expected = None if self.expect_phase is None else self.expect_phase.encode("utf-8", "surrogatepass")
            expectations = [(PHASE, expected)]
        deleted = "begin" if self.revive else "refuse"
        return changes.draft(self.kind, deleted=deleted, expectations=expectations)


class WholeWritten(Written):
    """The new version, the new values of incremented fields, and the number of the first added message."""

    results: dict[str, int]
    first_message: int | None


async def write_whole(scope: Scope, asked: Asked, given: WholeWrite) -> Response:
    """Change a record in one commit."""
    record = await owned(asked, scope, given.user)
    context = context_of(record)
    if given.lives is not None:
        if scope != "session":
            raise InvalidValue(f"a {records.NAMES[scope]} has no lifetime")
        context.allow("write", None)
    if given.ttl is not None:
        await context.tiers.clock.know()
    expect = expected(given.expect, given.expect_absent, given.expect_present)
    change = records.Write(given.kind, given.build, expect, given.draft)
    with context.durable(given.durability):
        done = await records.write(asked, record, change)
    found = {
        "version": done.version, "repeated": done.repeated, "results": done.results,
        "first_message": done.first_message,
    }  # fmt: skip
    return answer(found, version=done.version)


async def owned(asked: Asked, scope: Scope, user: str | None) -> Any:
    """The record that the path names; a new record will be owned by `user`. Raises AccessDenied and InvalidValue."""
    id = records.id_of(asked)
    if scope == "user" and user is not None:
        raise InvalidValue("a user has no owner: leave user out")
    user = records.owner(asked, user)
    store = asked.store
    if scope == "user":
        record: Any = store.user(id)
    else:
        record = store.session(id, user=user) if scope == "session" else store.task(id, user=user)
    await records.begins(asked, context_of(record))
    return record
