"""Conversations: begun, read and listed. Law: ids that are made here begin with the caller's prefix."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from distributed_state.errors import AccessDenied, InvalidValue
from distributed_state.programs.service import conditions, fairness, reading, requests, writing
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.shapes import (
    Answer,
    Body,
    Encoded,
    Id,
    Limit,
    Messages,
    Name,
    Query,
    Values,
    together,
)
from distributed_state.programs.service.routes import Asked
from distributed_state.records import creation
from distributed_state.records.access import MESSAGES, MOVES
from distributed_state.records.context import RecordContext, context_of
from distributed_state.records.messages import Page, Shown
from distributed_state.values import bytes_as_text
from distributed_state.values.model import MAX_PHASE, PHASE, Scope
from distributed_state.warm import held


class Create(Body):
    """A conversation or task to begin; without an `id` one is made. `user` owns it."""

    id: Id | None = None
    user: Id | None = None
    fields: Values | None = None
    bytes: Encoded | None = None


async def create(scope: Scope, asked: Asked) -> Response:
    """Begin a conversation or a task."""
    given = requests.body(asked.request, asked.limits, Create)
    fields = together(given.fields, given.bytes)
    user = records.owner(asked, given.user)
    id = records.begun(asked, given.id)
    if id is None and (asked.caller.prefix or scope == "task"):
        id = asked.caller.prefix + secrets.token_hex(16)
    store = asked.store
    # A session without an id gets one of its own, of which the store knows that it is new.
    record = store.session(id, user=user) if id is None or scope == "session" else store.task(id, user=user)
    await writing.begins(asked, context_of(record))
    change = writing.Write(
        "create",
        lambda changes: changes.set_many(fields),
        draft=lambda context, changes: creation.creation(context, changes, False),
        unique=given.id is None,
    )
    done = await writing.write(asked, record, change)
    found = {"id": record.id, "version": done.version}
    return answer(found, 201, version=done.version, headers=records.place(scope, record.id))


class Last(Query):
    """How much of a conversation is read: its `last` messages."""

    last: Annotated[int, Field(ge=0, le=10_000)] = 20
    fresh: bool = False


class Conversation(Answer):
    """A conversation as it is, its fields, phase and messages of one version."""

    id: str
    version: int
    phase: str | None
    fields: Values
    bytes: Encoded | None = None
    messages: Messages


async def read(asked: Asked) -> Response:
    """A conversation with its last messages."""
    given = requests.query(asked.request, Last)
    id = records.id_of(asked)
    context = context_of(asked.store.session(id))
    context.allow("read", MESSAGES, MOVES)
    shown, size = await reading.shown(context, Page(last=given.last), asked.limits, fresh=given.fresh)
    entry = shown.entry
    records.there(entry, "session", id)
    known = conditions.not_modified(asked.request, entry)
    if known is not None:
        return known
    return await fairness.in_turn(size, lambda: _shown(id, shown, context))


def _shown(id: str, shown: Shown, context: RecordContext) -> Response:
    entry = shown.entry
    phase = entry.fields.get(PHASE)
    found = {
        "id": id,
        "version": entry.version,
        "phase": None if phase is None else phase.decode("utf-8", "surrogatepass"),
        **bytes_as_text.apart(context.fields(entry)),
        "messages": [each.to_dict() for each in shown.messages()],
    }
    return answer(found, version=entry.version)


_LOOKED_AT = 500  # records of which it is asked whether they are held
_TAGS = 32  # of one query: SQL takes some hundreds, and is said to be away for more


class Listing(Query):
    """Which records are listed.

    Without `prefix` and `tag` the last changed first, else in the order of their ids. A `tag` is `key:text`, and may
    stand several times: records that have all of them are listed. `after` is what the page before gave. `phase` is of
    their state machine, `changed_since` and `changed_before` are in seconds since 1970, `larger_than` in bytes that
    were committed. `held` are those that somebody has a lease of now: of 500 records that fit otherwise, so that there
    may be few on a page, or none, and `after` goes on.
    """

    user: Id | None = None
    prefix: Name | None = None
    tag: list[Name] = Field(default_factory=list, max_length=_TAGS)
    limit: Limit = 50
    after: Name | None = None
    fresh: bool = False
    phase: Annotated[str, Field(max_length=MAX_PHASE)] | None = None
    changed_since: Annotated[float, Field(ge=0, le=1e12)] | None = None
    changed_before: Annotated[float, Field(ge=0, le=1e12)] | None = None
    larger_than: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    held: bool = False


class Row(Answer):
    """A record of a listing. Times are in seconds since 1970; `cursor` continues behind it.

    `size` is in bytes that were committed, as far as they were counted. With `held`, `held_for` is how long its lease
    lasts unless it is renewed, in seconds.
    """

    id: str
    user: str | None
    version: int
    created: float
    updated: float
    deleted: bool
    cursor: str
    phase: str | None
    size: int | None
    held_for: float | None = None


class Conversations(Answer):
    """A page; `after` is null if it is the last."""

    conversations: list[Row]
    after: str | None


class Users(Answer):
    """A page; `after` is null if it is the last."""

    users: list[Row]
    after: str | None


class Tasks(Answer):
    """A page; `after` is null if it is the last."""

    tasks: list[Row]
    after: str | None


async def listing(scope: Scope, asked: Asked) -> Response:
    """A page of conversations, users or tasks."""
    given = requests.query(asked.request, Listing)
    tags: dict[str, list[str]] = {}
    for each in given.tag:
        key, found, text = each.partition(":")
        if not found:
            raise InvalidValue(f"a tag is key:text, not {each!r:.80}")
        tags.setdefault(key, []).append(text)
    if given.user is not None:
        records.within(asked, given.user)
    limit = _LOOKED_AT if given.held else given.limit
    page = await asked.store.sessions(
        user=given.user, prefix=narrowed(asked, given.prefix), tags=tags or None, limit=limit, after=given.after,
        scope=scope, fresh=given.fresh, phase=given.phase, changed_since=given.changed_since,
        changed_before=given.changed_before, larger_than=given.larger_than,
    )  # fmt: skip
    after = page[-1].cursor if len(page) == limit else None
    rows: list[dict[str, Any]] = [asdict(each) for each in page]
    if given.held:
        keys = [context_of(records.of(asked, scope, each.id)).keys for each in page]
        left = await held.seconds(asked.store.tiers().warm, keys)
        rows = [row | {"held_for": ends} for row, ends in zip(rows, left, strict=True) if ends is not None]
    more = conditions.next_page(asked.request, after=after) if after is not None else None
    return answer({f"{records.NAMES[scope]}s": rows, "after": after}, headers=more)


def narrowed(asked: Asked, prefix: str | None) -> str | None:
    """What the ids of a listing begin with: what was asked for, within what is the caller's. Raises AccessDenied."""
    mine = asked.caller.prefix
    if not mine or (prefix is not None and prefix.startswith(mine)):
        return prefix
    if prefix is None or mine.startswith(prefix):
        return mine
    raise AccessDenied(f"ids of yours begin with {mine!r}, not {prefix!r:.80}")
