"""One write with all that a record's `write` takes. Law: it is one commit, and begins the record if that is not there.

It is what the client of this package writes with; the operations beside it are the same by parts, and refuse to begin a
conversation by mistake.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

from distributed_state.errors import InvalidValue
from distributed_state.programs.service import requests, writing
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.items import ItemChange
from distributed_state.programs.service.resources.lifetimes import Live
from distributed_state.programs.service.resources.shapes import (
    Body,
    Encoded,
    Id,
    Label,
    Messages,
    Name,
    Texts,
    Ttl,
    Values,
    Written,
    expected,
    together,
)
from distributed_state.programs.service.routes import Asked
from distributed_state.records import creation
from distributed_state.records.context import RecordContext, context_of
from distributed_state.tiers.changes import Changes
from distributed_state.values.model import INITIALIZED, MAX_PHASE, PHASE, Scope
from distributed_state.warm.answers import Draft

Kind = Literal[
    "set", "delete", "write", "append", "clear", "transaction", "transition", "checkpoint", "put", "lifetime"
]


class WholeWrite(Body):
    """What becomes of a record, in one commit of this `kind`, as its history shows it.

    `user` owns it from its first write on. What `clear` lists goes first. A `phase` of null is none; a `label` names
    the version. `expect`, `expect_absent` and `expect_present` are as for fields; `expect_phase` is the phase before.
    `lives` says how long a conversation is there from now on. With `revive` a deleted record begins again.
    `durability` is how hard the write is kept before it is answered.
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
        """Put it into a change."""
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
        """The change as it is sent."""
        draft = creation.revival(changes) if self.revive else changes.draft(self.kind)
        draft.kind = self.kind
        if "expect_phase" in self.model_fields_set:
            expected = None if self.expect_phase is None else self.expect_phase.encode("utf-8", "surrogatepass")
            draft.expectations.append((PHASE, expected))
        return draft


class WholeWritten(Written):
    """The new version, the sums of what was incremented, and the number of the first message that was added."""

    results: dict[str, int]
    first_message: int | None


async def write(scope: Scope, asked: Asked) -> Response:
    """Change a record in one commit."""
    given = requests.body(asked.request, asked.limits, WholeWrite)
    record = await owned(asked, scope, given.user)
    context = context_of(record)
    if given.lives is not None:
        if scope != "session":
            raise InvalidValue(f"a {records.NAMES[scope]} has no lifetime")
        context.allow("write", None)
    if given.ttl is not None:
        await context.tiers.clock.know()
    expect = expected(given.expect, given.expect_absent, given.expect_present)
    change = writing.Write(given.kind, given.build, expect, given.draft)
    with context.durable(given.durability):
        done = await writing.write(asked, record, change)
    found = {
        "version": done.version, "repeated": done.repeated, "results": done.results,
        "first_message": done.first_message,
    }  # fmt: skip
    return answer(found, version=done.version)


async def owned(asked: Asked, scope: Scope, user: str | None) -> Any:
    """The record that the path names; if it begins, it is this user's. Raises AccessDenied and InvalidValue."""
    id = records.id_of(asked)
    user = records.owner(asked, user)
    store = asked.store
    if scope == "user":
        record: Any = store.user(id)
    else:
        record = store.session(id, user=user) if scope == "session" else store.task(id, user=user)
    await writing.begins(asked, context_of(record))
    return record
