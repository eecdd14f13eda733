"""The tokens of models, over HTTP: of a conversation, and of all that a caller may read. Law: sums, and no contents.

Design: section 32.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.requests import Answer, Asked, Body, Id, Query
from distributed_state.programs.service.resources import records
from distributed_state.records.access import VERSION
from distributed_state.results import Usage
from distributed_state.values.usage import MOST_TOKENS, used

Count = Annotated[int, Field(ge=0, le=MOST_TOKENS)]


class TokensUsed(Body):
    """Calls of a model, and the tokens that it read and wrote."""

    calls: Count = 1
    input_tokens: Count = 0
    output_tokens: Count = 0


class ModelTokens(Answer):
    """Calls of models, and the tokens that they read and wrote."""

    calls: int
    input_tokens: int
    output_tokens: int


class UsageShown(ModelTokens):
    """The tokens of all models, and of each in `models`."""

    models: dict[str, ModelTokens]


class UsageByDay(UsageShown):
    """The tokens of all models, of each in `models`, and of each day (UTC) in `days`."""

    days: dict[str, UsageShown]


def usage_shown(usage: Usage | None) -> dict[str, Any] | None:
    """The usage of a turn or a conversation, as it is answered."""
    if usage is None:
        return None
    found = asdict(usage)
    del found["days"]
    return found


async def of_conversation(asked: Asked) -> Response:
    """The tokens that a conversation's models have used so far."""
    session = records.handle(asked, "session")
    entry = await records.look(session, True, VERSION)
    known = records.not_modified(asked.request, entry)
    return known or answer(usage_shown(Usage.of(used(entry.fields))), version=entry.version)


class Since(Query):
    """Selects conversations of this `user`, and days from the one (UTC) that contains `since`, in seconds since 1970.

    With `fresh` commits count that are not archived yet.
    """

    user: Id | None = None
    since: Annotated[float, Field(ge=0, le=1e12)] | None = None
    fresh: bool = False


async def of_all(asked: Asked, given: Since) -> Response:
    """Add up the tokens of conversations, by model and day."""
    if given.user is not None:
        records.within(asked, given.user)
    prefix = records.narrowed(asked, None)
    found = await asked.store.usage(user=given.user, prefix=prefix, since=given.since, fresh=given.fresh)
    days = {day: usage_shown(each) for day, each in found.days.items()}
    return answer({**(usage_shown(found) or {}), "days": days})
