"""The past of a record: its versions, checkpoints, rollback and forks. Law: the past is read and never rewritten."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from pydantic import model_validator
from starlette.responses import Response

from distributed_state.programs.service import conditions, reading, requests, writing
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.fairness import copying
from distributed_state.programs.service.remembering import OnceOnly
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.shapes import (
    Answer,
    Body,
    Encoded,
    Label,
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
from distributed_state.programs.service.writing import Write
from distributed_state.records import rollback as rollbacks
from distributed_state.records.context import context_of
from distributed_state.tiers.changes import Changes
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


# Checkpoints and rollback


class CheckpointRow(Answer):
    """A version with a name; `time` in seconds since 1970."""

    label: str
    version: int
    time: float


class CheckpointPage(Query):
    """Which checkpoints: those between two versions, both exclusive, `limit` of them in this order."""

    after: Version = 0
    before: Version | None = None
    limit: Limit = 100
    order: Literal["asc", "desc"] = "asc"


class Checkpoints(Answer):
    """A page of the named versions, the oldest first, or with `desc` the newest."""

    checkpoints: list[CheckpointRow]


async def checkpoints(scope: Scope, asked: Asked) -> Response:
    """The checkpoints of a record, a page of them."""
    given = requests.query(asked.request, CheckpointPage)
    found = await records.handle(asked, scope).checkpoints(**given.model_dump())
    rows = [{"label": each.label, "version": each.version, "time": each.time} for each in found]
    more = None
    if len(found) == given.limit:
        end = {"before" if given.order == "desc" else "after": found[-1].version}
        more = conditions.next_page(asked.request, **end)
    return answer({"checkpoints": rows}, headers=more)


class Checkpoint(Body):
    """A name for the present state."""

    label: Label


async def checkpoint(scope: Scope, asked: Asked) -> Response:
    """Name the present state of a record."""
    given = requests.body(asked.request, asked.limits, Checkpoint)

    def build(changes: Changes) -> None:
        changes.label(given.label)
        changes.emit("session.checkpoint", {"label": given.label})

    done = await writing.write(asked, records.handle(asked, scope), Write("checkpoint", build))
    return writing.written(done, 201)


class Rollback(Body):
    """Where to go back to: so many states, a checkpoint, or a version; one of them."""

    steps: Version | None = None
    label: Label | None = None
    version: Version | None = None

    @model_validator(mode="after")
    def _one(self) -> Rollback:
        if sum(each is not None for each in (self.steps, self.label, self.version)) != 1:
            raise ValueError("give steps, a label or a version, one of them")
        return self


async def rollback(scope: Scope, asked: Asked) -> Response:
    """Make a record what it was, by a new version."""
    given = requests.body(asked.request, asked.limits, Rollback)
    context = context_of(records.written_by(asked, scope))
    once = OnceOnly.of(asked, context)
    rolled = partial(rollbacks.rollback, context, given.steps, given.label, given.version, note=once.note)
    async with copying(asked.caller.party):
        version, done = await once.settle(once.looked(context, rolled))
    version = version if done is None else done.version
    return answer({"version": version, "repeated": done is not None}, version=version)
