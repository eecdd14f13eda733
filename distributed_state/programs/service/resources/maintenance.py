"""Upkeep of what is archived, and who asks. Law: what concerns all tenants the policy keeps from who is of one."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.responses import Response

from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.resources.shapes import Answer, Body
from distributed_state.programs.service.routes import Asked

_Age = Annotated[float, Field(ge=0, le=1e10, description="Seconds.")]  # three centuries; SQL's integers end
_Count = Annotated[int, Field(ge=0, le=2**31)]


class Who(Answer):
    """Who the service takes the caller for: what history shows, what ids begin with, and what is allowed."""

    actor: str
    prefix: str
    rights: list[str]


async def who(asked: Asked) -> Response:
    """The caller as the service knows it."""
    caller = asked.caller
    return answer({"actor": caller.actor, "prefix": caller.prefix, "rights": sorted(caller.rights)})


class Compact(Body):
    """History older than this is packed."""

    older_than: _Age = 86_400.0


class Purge(Body):
    """What is removed from the archive: see `purge` of the store."""

    older_than: _Age | None = None
    keep_changes: _Count | None = None
    messages_older_than: _Age | None = None
    keep_messages: _Count | None = None
    events_older_than: _Age | None = None
    branches_older_than: _Age | None = None


class Counts(Answer):
    """How much it concerned, by name."""

    counts: dict[str, int]


async def compact(asked: Asked) -> Response:
    """Pack what is old; repeated it goes on where it was broken off."""
    given = requests.body(asked.request, asked.limits, Compact)
    return answer({"counts": await asked.store.compact(older_than=given.older_than)})


async def purge(asked: Asked) -> Response:
    """Remove what is old; the present states stay."""
    given = requests.body(asked.request, asked.limits, Purge)
    return answer({"counts": await asked.store.purge(**given.model_dump())})
