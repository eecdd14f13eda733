"""Ways back and aside. Law: what is restored is a new version, and what two records share is kept once.

A checkpoint names a version; a rollback makes an earlier state the present one; a fork begins another record from a
state of this one. A branch holds acknowledged commits that their record does not continue: it is read, or dropped for
good.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict
from functools import partial
from typing import Annotated, Literal

from pydantic import Field, model_validator
from starlette.responses import Response

from distributed_state.errors import Conflict
from distributed_state.programs.service import requests, writing
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.routes import Answer, Asked, Body, Id, Label, Limit, Query, Version
from distributed_state.programs.service.scheduling import copying
from distributed_state.programs.service.writing import OnceOnly, Write
from distributed_state.records import fork as forks
from distributed_state.records import inspection
from distributed_state.records import rollback as rollbacks
from distributed_state.records.access import VERSION
from distributed_state.records.context import context_of
from distributed_state.tiers.changes import Changes
from distributed_state.values.model import Scope

# Checkpoints, and the way back to one


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
        more = requests.next_page(asked.request, **end)
    return answer({"checkpoints": rows}, headers=more)


class Checkpoint(Body):
    """A name for the present state."""

    label: Label


async def make_checkpoint(scope: Scope, asked: Asked) -> Response:
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
    await writing.comes_back(asked, context)
    rolled = partial(rollbacks.rollback, context, given.steps, given.label, given.version, note=once.note)
    async with copying(asked.caller.party):
        version, done = await once.settle(once.looked(context, rolled))
    version = version if done is None else done.version
    return answer({"version": version, "repeated": done is not None}, version=version)


# Forks


class Fork(Body):
    """Another record to begin from this one, now or as it was at a `version`; without an `id` one is made."""

    id: Id | None = None
    version: Version | None = None
    branch: str | None = None


async def fork(scope: Scope, asked: Asked) -> Response:
    """Begin another record from the state of this one."""
    given = requests.body(asked.request, asked.limits, Fork)
    source = context_of(records.handle(asked, scope))
    id = records.begun(asked, given.id) or asked.caller.prefix + secrets.token_hex(16)
    target = context_of(records.of(asked, scope, id))
    await writing.begins(asked, target)
    once = OnceOnly.of(asked, target, source.ref.id)
    entry = await target.read(True, VERSION) if once.key is not None else None
    done = None if entry is None else once.answered(entry)
    if done is None:
        note = None if entry is None else partial(once.remember, entry)
        try:
            async with copying(asked.caller.party):
                version = await forks.fork(source, id, given.version, given.branch, note=note)
        except Conflict:
            # Perhaps the same request, at another worker.
            done = None if once.key is None else once.answered(await target.read(True, VERSION))
            if done is None:
                raise
    version = version if done is None else done.version
    return answer({"id": id, "version": version}, 201, version=version, headers=records.place(scope, id))


class ForkRow(Answer):
    """A record that began from version `version` of this one; null if that is not known any more."""

    id: str
    version: int | None
    created: float
    deleted: bool


class ForkPage(Query):
    """How many."""

    limit: Annotated[int, Field(ge=1, le=200)] = 50


class Forks(Answer):
    """Records that were forked from this one, the newest first, as far as they are archived."""

    forks: list[ForkRow]


async def list_forks(scope: Scope, asked: Asked) -> Response:
    """The forks of a record that are the caller's."""
    given = requests.query(asked.request, ForkPage)
    found = await inspection.forks(context_of(records.handle(asked, scope)), given.limit)
    return answer({"forks": [asdict(each) for each in found if each.id.startswith(asked.caller.prefix)]})


# Branches


class BranchRow(Answer):
    """A branch, behind version `base` of its record. Times are in seconds since 1970."""

    id: str
    scope: str
    record_id: str
    epoch: str
    base: int
    version: int
    commits: int
    missing: list[list[int]]
    first_time: float
    last_time: float
    kept: float
    cause: str
    actors: list[str]
    cursor: str


class Branches(Answer):
    """Branches of one record, the oldest first; mostly there are none."""

    branches: list[BranchRow]


async def branches_of(scope: Scope, asked: Asked) -> Response:
    """The branches of a record."""
    found = await records.handle(asked, scope).branches()
    return answer({"branches": [asdict(each) for each in found]})


class BranchPage(Query):
    """The branches of how many records; `after` is the cursor of the last one of the page before."""

    limit: Limit = 100
    after: str | None = None


async def all_branches(asked: Asked) -> Response:
    """The branches of all records."""
    given = requests.query(asked.request, BranchPage)
    found = await asked.store.branches(limit=given.limit, after=given.after)
    full = len({each.cursor for each in found}) == given.limit
    more = requests.next_page(asked.request, after=found[-1].cursor) if full else None
    return answer({"branches": [asdict(each) for each in found]}, headers=more)


class Dropped(Answer):
    """How many commits the branch had."""

    commits: int


async def drop_branch(scope: Scope, asked: Asked) -> Response:
    """Remove a branch for good."""
    commits = await records.handle(asked, scope).drop_branch(asked.request.path_params["branch"])
    return answer({"commits": commits})
