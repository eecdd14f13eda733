"""The history of a record, with rollbacks, forks and branches. Law: history is read and never rewritten.

There are four views of the past: whole versions, one by one; a comparison of two versions; a timeline, which names the
changes of each version and has its first words; and an overview, which is as much of one version as fits on a page. A
part that is too large is named; the other parts are still shown.

A checkpoint names a version. A rollback restores an earlier state as a new version. A fork begins another record from a
state of this one, and their common data is stored once. A branch holds acknowledged commits outside its record's
history; it can be read, or dropped permanently.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.responses import Response

from distributed_state.errors import Conflict
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
    Query,
    Texts,
    Times,
    Values,
    Version,
    copying,
    times_shown,
    value_shown,
)
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.records import OnceOnly, Write
from distributed_state.programs.service.resources.usage import UsageShown, usage_shown
from distributed_state.records import history as past
from distributed_state.records import restoring
from distributed_state.records.access import VERSION
from distributed_state.records.context import RecordContext, context_of
from distributed_state.records.messages import Page
from distributed_state.results import Branch, Change, Checkpoint, Snapshot
from distributed_state.tiers.changes import Changes
from distributed_state.values import as_text
from distributed_state.values.model import OWNER, PARENT, PHASE, Message, Ref, Scope, unescape
from distributed_state.values.search import tags_in

_NAMED = 200  # left-out fields that are named


# Versions


class Past(Query):
    """Selects versions between two, both exclusive, of the record or of one of its branches."""

    after: Version = 0
    before: Version | None = None
    limit: Limit = 50
    branch: str | None = None


class ChangedItem(Answer):
    """An item that was put or deleted; a deleted one has no value."""

    collection: str
    key: str
    deleted: bool
    value: Any = None
    bytes: str | None = None


class VersionChange(Answer):
    """One version with its changes, its actor, and its time in seconds since 1970.

    Before it set anything, it emptied the parts in `cleared` ("record": it deleted the record), and kept the earlier
    messages in `kept`, pairs of the first and the last number (null: to the newest), or all. `restored` is the version
    whose state a rollback restored, `from_version` that from which a fork began.
    """

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
    items: list[ChangedItem]
    tagged: list[list[str]]
    untagged: list[list[str]]
    times: Times | None
    usage: UsageShown | None
    cleared: list[str] = Field(default_factory=list)
    kept: list[tuple[int, int | None]] | None = None
    restored: int | None = None
    from_version: int | None = None


class Versions(Answer):
    """A page of versions, the oldest first."""

    versions: list[VersionChange]


async def history(scope: Scope, asked: Asked, given: Past) -> Response:
    """A page of the versions of a record."""
    record = records.handle(asked, scope)
    found = await records.read_history(
        context_of(record), asked.limits, after=given.after, before=given.before, limit=given.limit,
        branch=given.branch,
    )  # fmt: skip
    if not found and given.after == 0 and given.branch is None:
        await records.look(record, False)  # NotFound, unless only its history is gone
    more = requests.next_page(asked.request, found[-1].version if len(found) == given.limit else None)
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
        **as_text.apart(change.set),
        "deleted": change.deleted,
        "messages": [_message(each) for each in change.appended],
        "phase": change.phase,
        "label": change.label,
        "items": items,
        "tagged": change.tagged,
        "untagged": change.untagged,
        "times": times_shown(change.times),
        "usage": usage_shown(change.usage),
        "cleared": change.cleared,
        "kept": change.kept,
        "restored": change.restored,
        "from_version": change.from_version,
    }


def _message(message: Message) -> dict[str, Any]:
    return message.to_dict() | ({} if message.number is None else {"number": message.number})


class OnBranch(Query):
    """Selects the record's own versions, or those of one of its branches."""

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


async def at(scope: Scope, asked: Asked, given: OnBranch) -> Response:
    """The record as it was at a version."""
    record, version = records.handle(asked, scope), asked.request.path_params["version"]
    found = await records.read_version(context_of(record), asked.limits, version=version, branch=given.branch)
    shown = {
        "version": found.version,
        **as_text.apart(found.fields),
        "messages": [_message(each) for each in found.messages],
        "phase": found.phase,
        "deleted": found.deleted,
        "tags": found.tags,
    }
    return answer(shown, version=found.version)


# Two versions compared


class Other(Query):
    """The other version of a comparison."""

    to: Version


class Difference(Answer):
    """The changes from `version` to `to`: new or changed values, and the names and numbers of removed ones.

    Messages are compared by number; tags are pairs of key and text; `phase` is that of `to`, and `moved` says whether
    the two phases differ.
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


async def diff(scope: Scope, asked: Asked, given: Other) -> Response:
    """Compare two versions of a record."""
    context, version = context_of(records.handle(asked, scope)), asked.request.path_params["version"]
    one = await records.read_version(context, asked.limits, version=version)
    return answer(_difference(one, await records.read_version(context, asked.limits, version=given.to)))


def _difference(one: Snapshot, other: Snapshot) -> dict[str, Any]:
    absent = object()
    changed = {key: value for key, value in other.fields.items() if not _same(one.fields.get(key, absent), value)}
    before = {each.number: each for each in one.messages}
    after = {each.number: each for each in other.messages}
    had, has = _pairs(one), _pairs(other)
    return {
        "version": one.version,
        "to": other.version,
        **as_text.apart(changed),
        "deleted": [key for key in one.fields if key not in other.fields],
        "messages": [_message(each) for number, each in after.items() if number not in before],
        "removed_messages": [number for number in before if number not in after],
        "phase": other.phase,
        "moved": one.phase != other.phase,
        "tagged": sorted(has - had),
        "untagged": sorted(had - has),
    }


def _same(one: Any, other: Any) -> bool:
    # 1, 1.0 and true are equal in Python, but different values.
    return type(one) is type(other) and bool(one == other) and repr(one) == repr(other)


def _pairs(found: Snapshot) -> set[tuple[str, str]]:
    return {(key, text) for key, texts in found.tags.items() for text in texts}


# The timeline


class Below(Query):
    """Selects `limit` versions below `before`; without it, the last ones."""

    before: Version | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50


class Outline(Answer):
    """A version without values. `fields` and `deleted` are some of the changed names, `more` counts the others.

    `said` are the first words of its messages, a user's if there are any, and `tools` the tools that they call, in its
    first eight messages as far as these are not too large.

    `restored` is the version that a rollback restored; `size` is in bytes, without messages and items. `phase` is the
    new phase, "" if the version removed the phase, null if it did not change it.
    """

    version: int
    time: float
    kind: str
    actor: str
    replica: str
    token: int
    fields: list[str]
    deleted: list[str]
    more: int
    messages: int
    items: int
    phase: str | None
    label: str | None
    restored: int | None
    size: int
    times: Times | None
    usage: UsageShown | None
    said: str | None
    tools: list[str]


class Timeline(Answer):
    """A page of versions, the newest first; fewer than `limit` where more would require large reads."""

    versions: list[Outline]


async def timeline(scope: Scope, asked: Asked, given: Below) -> Response:
    """The timeline of a record: the changes of its versions, without values."""
    record = records.handle(asked, scope)
    found = await past.timeline(context_of(record), given.before, given.limit, most=asked.limits.answer)
    if not found and given.before is None:
        await records.look(record, False)  # NotFound, unless only its history is gone
    end = found[-1].version if found and found[-1].version > 1 else None
    shown = [asdict(each) | {"times": times_shown(each.times), "usage": usage_shown(each.usage)} for each in found]
    return answer({"versions": shown}, headers=requests.next_page(asked.request, end, "desc"))


# The overview


class Looked(Query):
    """Selects a version, by default the current one, and the last `limit` messages with numbers below `before`.

    The answer has at most `most` bytes of fields, the shortest first, and at most `most` bytes of messages, the last
    first.
    """

    version: Version | None = None
    before: Version | None = None
    limit: Annotated[int, Field(ge=0, le=200)] = 30
    most: Annotated[int, Field(ge=0, le=2**24)] = 2**19


class LeftOut(Answer):
    """A field that did not fit, and its stored size in bytes."""

    name: str
    size: int


class Parent(Answer):
    """The record and version that a record was forked from."""

    id: str
    version: int


class Overview(Answer):
    """A record at a version; `newest` is its current version.

    `left_out` are the largest fields that did not fit, and `left_out_count` counts all of them. `earlier`: there are
    earlier messages. `too_large` is the number of the last message if that does not fit even alone.
    """

    id: str
    version: int
    newest: int
    user: str | None
    parent: Parent | None
    phase: str | None
    deleted: bool
    tags: Texts
    fields: Values
    bytes: Encoded | None = None
    left_out: list[LeftOut]
    left_out_count: int
    messages: Messages
    earlier: bool
    too_large: int | None


async def overview(scope: Scope, asked: Asked, given: Looked) -> Response:
    """As much of a record as fits."""
    record = records.handle(asked, scope)
    context = context_of(record)
    page = Page(limit=given.limit, before=given.before, order="desc")
    if given.version is None:
        await records.look(record, True)
    most = min(given.most, asked.limits.answer // 4)
    found = await past.overview(context, given.version, page, fields=most, said=most)
    return answer(_overview_shown(context, found), version=found.entry.version)


def _overview_shown(context: RecordContext, found: past.Overview) -> dict[str, Any]:
    entry = found.entry
    kept = entry.fields
    phase, owner = kept.get(PHASE), kept.get(OWNER)
    parent, _, version = kept.get(PARENT, b"").decode().rpartition("@")
    left = sorted(found.left_out.items(), key=lambda field: -field[1])[:_NAMED]
    return {
        "id": context.ref.id,
        "version": entry.version,
        "newest": found.newest,
        "user": None if not owner else unescape(owner.decode()),
        "parent": {"id": Ref.parse(parent).id, "version": int(version)} if parent else None,
        "phase": None if phase is None else phase.decode("utf-8", "surrogatepass"),
        "deleted": entry.deleted,
        "tags": tags_in(kept),
        **as_text.apart(context.fields(entry)),
        "left_out": [{"name": name, "size": size} for name, size in left],
        "left_out_count": len(found.left_out),
        "messages": found.shown.raw(),
        "earlier": found.earlier,
        "too_large": found.too_large,
    }


# Checkpoints and rollbacks


class CheckpointPage(Query):
    """Selects checkpoints between two versions, both exclusive; at most `limit`, in this order."""

    after: Version = 0
    before: Version | None = None
    limit: Limit = 100
    order: Literal["asc", "desc"] = "asc"


class Checkpoints(Answer):
    """A page of the named versions, the oldest first, or with `desc` the newest first."""

    checkpoints: list[Checkpoint]


async def checkpoints(scope: Scope, asked: Asked, given: CheckpointPage) -> Response:
    """A page of the checkpoints of a record."""
    found = await records.handle(asked, scope).checkpoints(**given.model_dump())
    end = found[-1].version if len(found) == given.limit else None
    return answer(
        {"checkpoints": [asdict(each) for each in found]}, headers=requests.next_page(asked.request, end, given.order)
    )


class MakeCheckpoint(Body):
    """A name for the current state."""

    label: Label


async def make_checkpoint(scope: Scope, asked: Asked, given: MakeCheckpoint) -> Response:
    """Name the current state of a record."""

    def build(changes: Changes) -> None:
        changes.label(given.label)
        changes.emit("session.checkpoint", {"label": given.label})

    done = await records.write(asked, records.handle(asked, scope), Write("checkpoint", build))
    return records.written(done, 201)


class Rollback(Body):
    """The state to restore, by one of these: `steps` back, a checkpoint's `label`, last `checkpoints`, a `version`.

    Without any it is one step back.
    """

    steps: Version | None = None
    label: Label | None = None
    version: Version | None = None
    checkpoints: Version | None = None

    @model_validator(mode="after")
    def _one(self) -> Rollback:
        if sum(each is not None for each in (self.steps, self.label, self.version, self.checkpoints)) > 1:
            raise ValueError("give exactly one of steps, label, version and checkpoints")
        return self


async def rollback(scope: Scope, asked: Asked, given: Rollback) -> Response:
    """Restore an earlier state of a record as a new version."""
    context = context_of(await records.written_by(asked, scope))
    once = OnceOnly.of(asked, context)
    await records.comes_back(asked, context, revive=True)
    target = restoring.Target(given.steps, given.label, given.version, given.checkpoints)
    rolled = partial(restoring.rollback, context, target, note=once.note)
    async with copying(asked.caller.party):
        version, done = await once.settle(once.looked(context, rolled))
    version = version if done is None else done.version
    return answer({"version": version, "repeated": done is not None}, version=version)


# Forks


class Fork(Body):
    """A new record from the current state of this one, or from a `version`; without an `id`, one is generated."""

    id: Id | None = None
    version: Version | None = None
    branch: str | None = None


async def fork(scope: Scope, asked: Asked, given: Fork) -> Response:
    """Begin another record from the state of this one."""
    source = context_of(records.handle(asked, scope))
    id = records.begun(asked, given.id) or asked.caller.prefix + secrets.token_hex(16)
    target = context_of(records.of(asked, scope, id))
    await records.begins(asked, target)
    once = OnceOnly.of(asked, target, source.ref.id)
    entry = await target.read(True, VERSION) if once.key is not None else None
    done = None if entry is None else once.answered(entry)
    if done is None:
        note = None if entry is None else partial(once.log, entry)
        try:
            async with copying(asked.caller.party):
                version = await restoring.fork(source, id, given.version, given.branch, note=note)
        except Conflict:
            # Another worker may have served the same request.
            done = None if once.key is None else once.answered(await target.read(True, VERSION))
            if done is None:
                raise
    version = version if done is None else done.version
    return answer({"id": id, "version": version}, 201, version=version, headers=records.place(scope, id))


class ForkRow(Answer):
    """A record that was forked from `version` of this one; null if the version is no longer known."""

    id: str
    version: int | None
    created: float
    deleted: bool


class ForkPage(Query):
    """Limits the number of forks."""

    limit: Annotated[int, Field(ge=1, le=200)] = 50


class Forks(Answer):
    """Archived records that were forked from this one, the newest first."""

    forks: list[ForkRow]


async def list_forks(scope: Scope, asked: Asked, given: ForkPage) -> Response:
    """The forks of a record that belong to the caller's tenant."""
    found = await past.forks(context_of(records.handle(asked, scope)), given.limit)
    return answer({"forks": [asdict(each) for each in found if each.id.startswith(asked.caller.prefix)]})


# Branches


class Branches(Answer):
    """Branches of one record, the oldest first; most records have no branches."""

    branches: list[Branch]


async def branches_of(scope: Scope, asked: Asked) -> Response:
    """The branches of a record."""
    found = await asked.store.admin.branches(records.id_of(asked), scope=scope)
    return answer({"branches": [asdict(each) for each in found]})


class BranchPage(Query):
    """Selects the branches of at most `limit` records; `after` is the last cursor of the previous page."""

    limit: Limit = 100
    after: str | None = None


async def all_branches(asked: Asked, given: BranchPage) -> Response:
    """The branches of all records."""
    found = await asked.store.admin.branches(limit=given.limit, after=given.after)
    full = len({each.cursor for each in found}) == given.limit
    more = requests.next_page(asked.request, found[-1].cursor if full else None)
    return answer({"branches": [asdict(each) for each in found]}, headers=more)


class Dropped(Answer):
    """The number of commits of the dropped branch."""

    commits: int


async def drop_branch(scope: Scope, asked: Asked) -> Response:
    """Remove a branch for good."""
    branch = asked.request.path_params["branch"]
    commits = await asked.store.admin.drop_branch(records.id_of(asked), branch, scope=scope)
    return answer({"commits": commits})
