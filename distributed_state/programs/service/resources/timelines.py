"""What happened to a record, and what was forked from it. Law: names and numbers, however large the values are."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from pydantic import Field
from starlette.responses import Response

from distributed_state.programs.service import conditions, requests
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.shapes import Answer, Query, Times, Version, times_shown
from distributed_state.programs.service.routes import Asked
from distributed_state.records import inspection
from distributed_state.records.context import context_of
from distributed_state.values.model import Scope

_Limit = Annotated[int, Field(ge=1, le=200)]


class Below(Query):
    """How many versions below `before`; without it the last ones."""

    before: Version | None = None
    limit: _Limit = 50


class Outline(Answer):
    """A version without what it says. `fields` and `deleted` are some of the names that it changed, `more` the others.

    `restored` is the version that a rollback went back to; `size` is in bytes, without messages and items. `phase` is
    where it moved, "" if it has none since, null if it stayed.
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


class Timeline(Answer):
    """A page of versions, the newest first; fewer than `limit` where much would have to be read for more."""

    versions: list[Outline]


async def timeline(scope: Scope, asked: Asked) -> Response:
    """What the versions of a record changed."""
    given = requests.query(asked.request, Below)
    record = records.handle(asked, scope)
    found = await inspection.timeline(context_of(record), given.before, given.limit, most=asked.limits.answer)
    if not found and given.before is None:
        await records.look(record, scope, False)  # NotFound, unless only its history is gone
    more = conditions.next_page(asked.request, before=found[-1].version) if found and found[-1].version > 1 else None
    shown = [asdict(each) | {"times": times_shown(each.times)} for each in found]
    return answer({"versions": shown}, headers=more)


class Fork(Answer):
    """A record that began from version `version` of this one; null if that is not known any more."""

    id: str
    version: int | None
    created: float
    deleted: bool


class Some(Query):
    """How many."""

    limit: _Limit = 50


class Forks(Answer):
    """Records that were forked from this one, the newest first, as far as they are archived."""

    forks: list[Fork]


async def forks(scope: Scope, asked: Asked) -> Response:
    """The forks of a record that are the caller's."""
    given = requests.query(asked.request, Some)
    found = await inspection.forks(context_of(records.handle(asked, scope)), given.limit)
    return answer({"forks": [asdict(each) for each in found if each.id.startswith(asked.caller.prefix)]})
