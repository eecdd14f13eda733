"""Search of what records say. Law: a caller finds what is its own tenant's alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from distributed_state.errors import ConfigurationError, InvalidValue, TooLarge
from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import answer, log_seldom
from distributed_state.programs.service.fairness import searching
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.conversations import narrowed
from distributed_state.programs.service.resources.shapes import Answer, Body, Id, Name, Values
from distributed_state.programs.service.routes import Asked
from distributed_state.values.model import Scope
from distributed_state.values.search import KINDS, Kind, SearchHit


class Search(Body):
    """What to look for; without a `query` everything, the newest first. `filter` is about objects' values."""

    query: str | None = None
    scope: Scope | None = None
    prefix: Name = ""
    user: Id | None = None
    kinds: list[Kind] = Field(default_factory=lambda: list(KINDS))
    collection: Name | None = None
    filter: Values | None = None
    match: Literal["all", "any"] = "all"
    limit: Annotated[int, Field(ge=1, le=100)] = 10
    offset: Annotated[int, Field(ge=0, le=10_000)] = 0
    fresh: bool = False


class Hit(Answer):
    """Something that was found: a message by its number, a field by its key, an item by both."""

    scope: str
    id: str
    user: str | None
    kind: str
    key: str | None
    collection: str | None
    number: int | None
    text: str
    value: Any
    version: int
    score: float


class Hits(Answer):
    """What was found, the most relevant first."""

    hits: list[Hit]


async def search(asked: Asked) -> Response:
    """Find messages, fields and items by what they say."""
    given = requests.body(asked.request, asked.limits, Search)
    if given.user is not None:
        records.within(asked, given.user)
    try:
        found = await _found(asked, given)
    except TooLarge as error:
        raise InvalidValue(f"{error}: ask for fewer with limit, and go on with offset") from error
    except ConfigurationError as error:
        log_seldom(str(error))
        raise HTTPException(501, "search is not set up here; the log says why") from error
    # Not by `asdict`, which copies all that a value holds.
    return answer({"hits": [{name: getattr(each, name) for name in Hit.model_fields} for each in found]})


async def _found(asked: Asked, given: Search) -> list[SearchHit]:
    async with searching(asked.caller.party):
        return await asked.store.search(
            given.query, scope=given.scope, prefix=narrowed(asked, given.prefix) or "", user=given.user,
            kinds=given.kinds, collection=given.collection, filter=given.filter, match=given.match, limit=given.limit,
            offset=given.offset, fresh=given.fresh,
        )  # fmt: skip
