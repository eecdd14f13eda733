"""Branches: acknowledged commits that their record does not continue. Law: they are read, or dropped for good."""

from __future__ import annotations

from dataclasses import asdict

from starlette.responses import Response

from distributed_state.programs.service import conditions, requests
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.shapes import Answer, Limit, Query
from distributed_state.programs.service.routes import Asked
from distributed_state.values.model import Scope


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


async def of_record(scope: Scope, asked: Asked) -> Response:
    """The branches of a record."""
    found = await records.handle(asked, scope).branches()
    return answer({"branches": [asdict(each) for each in found]})


class Dropped(Answer):
    """How many commits the branch had."""

    commits: int


async def drop(scope: Scope, asked: Asked) -> Response:
    """Remove a branch for good."""
    commits = await records.handle(asked, scope).drop_branch(asked.request.path_params["branch"])
    return answer({"commits": commits})


class Page(Query):
    """The branches of how many records; `after` is the cursor of the last one of the page before."""

    limit: Limit = 100
    after: str | None = None


async def listing(asked: Asked) -> Response:
    """The branches of all records."""
    given = requests.query(asked.request, Page)
    found = await asked.store.branches(limit=given.limit, after=given.after)
    full = len({each.cursor for each in found}) == given.limit
    more = conditions.next_page(asked.request, after=found[-1].cursor) if full else None
    return answer({"branches": [asdict(each) for each in found]}, headers=more)
