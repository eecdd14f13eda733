"""Named versions of a record, and the way back to one. Law: what is restored is a new version; none is rewritten."""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import model_validator
from starlette.responses import Response

from distributed_state.programs.service import conditions, requests, writing
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.fairness import copying
from distributed_state.programs.service.remembering import OnceOnly
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.shapes import Answer, Body, Label, Limit, Query, Version
from distributed_state.programs.service.routes import Asked
from distributed_state.programs.service.writing import Write
from distributed_state.records import rollback as rollbacks
from distributed_state.records.context import context_of
from distributed_state.tiers.changes import Changes
from distributed_state.values.model import Scope


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


async def listing(scope: Scope, asked: Asked) -> Response:
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


async def make(scope: Scope, asked: Asked) -> Response:
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
