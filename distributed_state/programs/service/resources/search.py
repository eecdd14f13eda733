"""Finding records. Law: a caller finds only records of its own tenant.

A listing finds conversations, users and tasks by their properties; search finds messages, fields and items by their
content.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from distributed_state.errors import ConfigurationError, InvalidValue, TooLarge
from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import answer, log_seldom
from distributed_state.programs.service.requests import Answer, Asked, Body, Id, Limit, Name, Query, Values, searching
from distributed_state.programs.service.resources import records, schedules
from distributed_state.records.context import context_of
from distributed_state.store.lifecycle import lifecycle_of
from distributed_state.values.model import MAX_PHASE, Scope, unescape
from distributed_state.values.search import KINDS, Kind, SearchHit
from distributed_state.warm.held_leases import seconds_left

_LOOKED_AT = 500  # records whose leases are checked
_TAGS = 32  # of one query: SQL takes some hundreds, and more would be reported as SQL being unavailable


# Listings


class Listing(Query):
    """Selects the records of a listing.

    Without `prefix` and `tag` the last changed come first; else the order is that of the ids. A `tag` is `key:text`,
    with a colon in the key as `%3A` and a percent sign as `%25`, and may occur several times to list records that have
    all these tags. `after` is the value that the previous page returned. `phase` is that of the state machine,
    `changed_since` and `changed_before` are in seconds since 1970, `larger_than` is in committed bytes. `stuck` lists
    only conversations whose handler failed too often to be called again, and `held` only records under a lease: of 500
    matching records each time. With these two, a page may have few or none although `after` continues.
    """

    user: Id | None = None
    prefix: Name | None = None
    tag: list[Name] = Field(default_factory=list, max_length=_TAGS)
    limit: Limit = 50
    after: Name | None = None
    fresh: bool = False
    phase: Annotated[str, Field(max_length=MAX_PHASE)] | None = None
    changed_since: Annotated[float, Field(ge=0, le=1e12)] | None = None
    changed_before: Annotated[float, Field(ge=0, le=1e12)] | None = None
    larger_than: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    stuck: bool = False
    held: bool = False


class Row(Answer):
    """A record of a listing. Times are in seconds since 1970; `cursor` continues after it.

    `size` is in committed bytes, null if they were not counted. With `held`, `held_for` is the number of seconds until
    its lease ends unless it is renewed. With `stuck`, `schedule` says how its handler failed.
    """

    id: str
    user: str | None
    version: int
    created: float
    updated: float
    deleted: bool
    cursor: str
    phase: str | None
    size: int | None
    held_for: float | None = None
    schedule: schedules.Handling | None = None


class Conversations(Answer):
    """A page; `after` is null if it is the last."""

    conversations: list[Row]
    after: str | None


class Users(Answer):
    """A page; `after` is null if it is the last."""

    users: list[Row]
    after: str | None


class Tasks(Answer):
    """A page; `after` is null if it is the last."""

    tasks: list[Row]
    after: str | None


async def listing(scope: Scope, asked: Asked, given: Listing) -> Response:
    """A page of conversations, users or tasks."""
    tags: dict[str, list[str]] = {}
    for each in given.tag:
        key, found, text = each.partition(":")
        if not found:
            raise InvalidValue(f"a tag is key:text, not {each!r:.80}")
        tags.setdefault(unescape(key), []).append(text)
    if given.user is not None:
        records.within(asked, given.user)
    limit = _LOOKED_AT if given.held else given.limit
    page = await asked.store.sessions(
        user=given.user, prefix=records.narrowed(asked, given.prefix), tags=tags or None, limit=limit,
        after=given.after, scope=scope, fresh=given.fresh, phase=given.phase, changed_since=given.changed_since,
        changed_before=given.changed_before, larger_than=given.larger_than, stuck=given.stuck,
    )  # fmt: skip
    after = page[-1].cursor if len(page) == limit else None
    rows: list[dict[str, Any]] = [asdict(each) for each in page]
    if given.stuck:
        still = await schedules.stuck(asked, [each.id for each in page])
        rows = [row | {"schedule": each} for row, each in zip(rows, still, strict=True) if each is not None]
    if given.held:
        keys = [context_of(records.of(asked, scope, each["id"])).keys for each in rows]
        left = await seconds_left(lifecycle_of(asked.store).tiers().warm, keys)
        rows = [row | {"held_for": ends} for row, ends in zip(rows, left, strict=True) if ends is not None]
    shown = {f"{records.NAMES[scope]}s": rows, "after": after}
    return answer(shown, headers=requests.next_page(asked.request, after))


# Search


class Search(Body):
    """A search; without a `query` it finds everything, the newest first. `filter` compares values of objects."""

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


class Hits(Answer):
    """The hits, the most relevant first."""

    hits: list[SearchHit]


async def search(asked: Asked, given: Search) -> Response:
    """Find messages, fields and items by their content."""
    if given.user is not None:
        records.within(asked, given.user)
    try:
        found = await _found(asked, given)
    except TooLarge as error:
        raise InvalidValue(f"{error}: request fewer with limit, and continue with offset") from error
    except ConfigurationError as error:
        log_seldom(str(error))
        raise HTTPException(501, "search is not set up here; see the log") from error
    # Not with `asdict`, which copies values deeply.
    return answer({"hits": [{name: getattr(each, name) for name in SearchHit.__slots__} for each in found]})


async def _found(asked: Asked, given: Search) -> list[SearchHit]:
    async with searching(asked.caller.party):
        return await asked.store.search(
            given.query, scope=given.scope, prefix=records.narrowed(asked, given.prefix) or "", user=given.user,
            kinds=given.kinds, collection=given.collection, filter=given.filter, match=given.match, limit=given.limit,
            offset=given.offset, fresh=given.fresh,
        )  # fmt: skip
