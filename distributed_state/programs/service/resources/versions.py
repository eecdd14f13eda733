"""The past of a record: its versions, one by one and compared. Law: the past is read and never rewritten."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from distributed_state.programs.service import conditions, reading, requests
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.shapes import (
    Answer,
    Encoded,
    Limit,
    Messages,
    Query,
    Texts,
    Times,
    Values,
    Version,
    times_shown,
    value_shown,
)
from distributed_state.programs.service.routes import Asked
from distributed_state.records.context import context_of
from distributed_state.values import bytes_as_text
from distributed_state.values.model import Message, Scope
from distributed_state.values.results import Change, Snapshot


class Past(Query):
    """Which versions: between two, both exclusive; of the record, or of one of its branches."""

    after: Version = 0
    before: Version | None = None
    limit: Limit = 50
    branch: str | None = None


class ItemChange(Answer):
    """An item that was put, or deleted: then it has no value."""

    collection: str
    key: str
    deleted: bool
    value: Any = None
    bytes: str | None = None


class VersionChange(Answer):
    """One version: what it changed, who made it, and when (seconds since 1970)."""

    version: int
    time: float
    kind: str
    actor: str
    token: int
    replica: str
    fields: Values
    bytes: Encoded | None = None
    deleted: list[str]
    messages: Messages
    phase: str | None
    label: str | None
    items: list[ItemChange]
    tagged: list[list[str]]
    untagged: list[list[str]]
    times: Times | None


class Versions(Answer):
    """A page of versions, the oldest first."""

    versions: list[VersionChange]


async def history(scope: Scope, asked: Asked) -> Response:
    """The versions of a record, a page of them."""
    given = requests.query(asked.request, Past)
    record = records.handle(asked, scope)
    found = await reading.history(
        context_of(record), asked.limits, after=given.after, before=given.before, limit=given.limit,
        branch=given.branch,
    )  # fmt: skip
    if not found and given.after == 0 and given.branch is None:
        await records.look(record, scope, False)  # NotFound, unless only its history is gone
    more = conditions.next_page(asked.request, after=found[-1].version) if len(found) == given.limit else None
    return answer({"versions": [_change(each) for each in found]}, headers=more)


def _change(change: Change) -> dict[str, Any]:
    items = []
    for (collection, key), item in change.items.items():
        shown: dict[str, Any] = {}
        if item is not None:
            shown = value_shown(item.value)
        items.append({"collection": collection, "key": key, "deleted": item is None, **shown})
    return {
        "version": change.version,
        "time": change.time,
        "kind": change.kind,
        "actor": change.actor,
        "token": change.token,
        "replica": change.replica,
        **bytes_as_text.apart(change.set),
        "deleted": change.deleted,
        "messages": [_message(each) for each in change.appended],
        "phase": change.phase,
        "label": change.label,
        "items": items,
        "tagged": change.tagged,
        "untagged": change.untagged,
        "times": times_shown(change.times),
    }


def _message(message: Message) -> dict[str, Any]:
    return message.to_dict() | ({} if message.number is None else {"number": message.number})


class OnBranch(Query):
    """Where a version is: of the record, or of one of its branches."""

    branch: str | None = None


class State(Answer):
    """A record as it was at a version."""

    version: int
    fields: Values
    bytes: Encoded | None = None
    messages: Messages
    phase: str | None
    deleted: bool
    tags: Texts


async def at(scope: Scope, asked: Asked) -> Response:
    """The record as it was at a version."""
    given = requests.query(asked.request, OnBranch)
    record, version = records.handle(asked, scope), asked.request.path_params["version"]
    found = await reading.at(context_of(record), asked.limits, version=version, branch=given.branch)
    shown = {
        "version": found.version,
        **bytes_as_text.apart(found.fields),
        "messages": [_message(each) for each in found.messages],
        "phase": found.phase,
        "deleted": found.deleted,
        "tags": found.tags,
    }
    return answer(shown, version=found.version)


class Other(Query):
    """The version that it is compared with."""

    to: Version


class Difference(Answer):
    """What `to` has that `version` has not, or has otherwise, and what it lacks.

    Messages by their numbers; tags as pairs of key and text; `phase` is that of `to`, `moved` says whether it is
    another one.
    """

    version: int
    to: int
    fields: Values
    bytes: Encoded | None = None
    deleted: list[str]
    messages: Messages
    removed_messages: list[int]
    phase: str | None
    moved: bool
    tagged: list[list[str]]
    untagged: list[list[str]]


async def diff(scope: Scope, asked: Asked) -> Response:
    """What changed from a version to another one."""
    given = requests.query(asked.request, Other)
    context, version = context_of(records.handle(asked, scope)), asked.request.path_params["version"]
    one = await reading.at(context, asked.limits, version=version)
    return answer(_difference(one, await reading.at(context, asked.limits, version=given.to)))


def _difference(one: Snapshot, other: Snapshot) -> dict[str, Any]:
    absent = object()
    changed = {key: value for key, value in other.fields.items() if not _same(one.fields.get(key, absent), value)}
    before = {each.number: each for each in one.messages}
    after = {each.number: each for each in other.messages}
    had, has = _pairs(one), _pairs(other)
    return {
        "version": one.version,
        "to": other.version,
        **bytes_as_text.apart(changed),
        "deleted": [key for key in one.fields if key not in other.fields],
        "messages": [_message(each) for number, each in after.items() if number not in before],
        "removed_messages": [number for number in before if number not in after],
        "phase": other.phase,
        "moved": one.phase != other.phase,
        "tagged": sorted(has - had),
        "untagged": sorted(had - has),
    }


def _same(one: Any, other: Any) -> bool:
    # 1, 1.0 and true are equal to Python, and not the same value.
    return type(one) is type(other) and bool(one == other) and repr(one) == repr(other)


def _pairs(found: Snapshot) -> set[tuple[str, str]]:
    return {(key, text) for key, texts in found.tags.items() for text in texts}
