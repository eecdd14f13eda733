"""Fields and tags of a record. Law: several are changed in one commit, under what they must hold before."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator
from starlette.responses import Response

from distributed_state.errors import NotFound
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.programs.service import conditions, fairness, requests, writing
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.shapes import (
    Answer,
    Body,
    Encoded,
    Name,
    Texts,
    Ttl,
    Values,
    Version,
    Written,
    expected,
    together,
    value_shown,
)
from distributed_state.programs.service.routes import Asked
from distributed_state.programs.service.writing import Write
from distributed_state.records import inspection
from distributed_state.records.access import TAGS
from distributed_state.records.context import RecordContext, context_of
from distributed_state.tiers.changes import Changes
from distributed_state.values import bytes_as_text
from distributed_state.values.model import Scope
from distributed_state.values.tags import tags_in

_GONE: Any = object()


class Fields(Answer):
    """All fields of one version; those that are bytes stand beside, in base64."""

    version: int
    fields: Values
    bytes: Encoded | None = None


async def read(scope: Scope, asked: Asked) -> Response:
    """All fields of a record."""
    given = requests.query(asked.request, records.Fresh)
    record = records.handle(asked, scope)
    entry, known, size = await records.whole(asked, record, scope, given.fresh)
    if known is not None:
        return known
    return await fairness.in_turn(size, lambda: _shown(context_of(record), entry))


def _shown(context: RecordContext, entry: CachedRecord) -> Response:
    return answer({"version": entry.version, **bytes_as_text.apart(context.fields(entry))}, version=entry.version)


class FieldAt(records.Fresh):
    """As it is, or as it was at a `version`."""

    version: Version | None = None


class FieldValue(Answer):
    """A field: its value, or its bytes in base64."""

    version: int
    value: Any = None
    bytes: str | None = None


async def get(scope: Scope, asked: Asked) -> Response:
    """One field of a record."""
    given = requests.query(asked.request, FieldAt)
    record, key = records.handle(asked, scope), asked.request.path_params["key"]
    if given.version is None:
        entry = await records.look(record, scope, given.fresh, key)
    else:
        context_of(record).allow("read", key)
        entry = await inspection.at(context_of(record), given.version)
    value = context_of(record).value(entry, key, _GONE)
    if value is _GONE:
        raise NotFound(f"there is no field {key!r:.80}")
    known = conditions.not_modified(asked.request, entry)
    if known is not None:
        return known
    return answer({"version": entry.version, **value_shown(value)}, version=entry.version)


class SetField(Body):
    """A value, or bytes in base64; `ttl` seconds later it is gone."""

    value: Any = None
    bytes: str | None = None
    ttl: Ttl | None = None

    @model_validator(mode="after")
    def _one(self) -> SetField:
        if ("value" in self.model_fields_set) is (self.bytes is not None):
            raise ValueError("give a value or bytes, one of them")
        return self


async def put(scope: Scope, asked: Asked) -> Response:
    """Set one field."""
    given = requests.body(asked.request, asked.limits, SetField)
    record, key = records.handle(asked, scope), asked.request.path_params["key"]
    value = given.value if given.bytes is None else bytes_as_text.bytes_of(given.bytes, key)
    if given.ttl is not None:
        await context_of(record).tiers.clock.know()
    change = Write("set", lambda changes: changes.set(key, value, ttl=given.ttl))
    return writing.written(await writing.write(asked, record, change))


async def delete(scope: Scope, asked: Asked) -> Response:
    """Delete one field; one that is not there is no error."""
    record, key = records.handle(asked, scope), asked.request.path_params["key"]
    return writing.written(await writing.write(asked, record, Write("delete", lambda changes: changes.delete(key))))


class Patch(Body):
    """What becomes of several fields, in one commit.

    `increment` adds whole numbers. It is refused unless each field holds what `expect` says (compared as JSON), is
    not there if it is among `expect_absent`, and is there if among `expect_present`.
    """

    set: Values | None = None
    bytes: Encoded | None = None
    delete: list[Name] = Field(default_factory=list)
    increment: dict[Name, int] = Field(default_factory=dict)
    expect: Values | None = None
    expect_absent: list[Name] = Field(default_factory=list)
    expect_present: list[Name] = Field(default_factory=list)


class Patched(Written):
    """The new version, and the sums of what was incremented."""

    results: dict[str, int]


async def patch(scope: Scope, asked: Asked) -> Response:
    """Change several fields in one commit."""
    given = requests.body(asked.request, asked.limits, Patch)
    fields = together(given.set, given.bytes)

    def build(changes: Changes) -> None:
        for key in given.delete:
            changes.delete(key)
        changes.set_many(fields)
        for key, by in given.increment.items():
            changes.increment(key, by)

    expect = expected(given.expect, given.expect_absent, given.expect_present)
    done = await writing.write(asked, records.handle(asked, scope), Write("write", build, expect))
    found = {"version": done.version, "repeated": done.repeated, "results": done.results}
    return answer(found, version=done.version)


class Tags(Answer):
    """The tags of one version, texts by key."""

    version: int
    tags: Texts


async def tags(scope: Scope, asked: Asked) -> Response:
    """The tags of a record."""
    given = requests.query(asked.request, records.Fresh)
    record = records.handle(asked, scope)
    entry = await records.look(record, scope, given.fresh, TAGS)
    known = conditions.not_modified(asked.request, entry)
    if known is not None:
        return known
    return answer({"version": entry.version, "tags": tags_in(entry.fields)}, version=entry.version)


class Retag(Body):
    """Tags to add and to take away, texts by key."""

    tag: Texts = Field(default_factory=dict)
    untag: Texts = Field(default_factory=dict)


async def retag(scope: Scope, asked: Asked) -> Response:
    """Tag a record, or take tags away."""
    given = requests.body(asked.request, asked.limits, Retag)
    change = Write("write", lambda changes: changes.put_tags(given.tag, given.untag))
    return writing.written(await writing.write(asked, records.handle(asked, scope), change))
