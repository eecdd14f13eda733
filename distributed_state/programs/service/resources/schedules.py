"""Conversations that go on by themselves, over HTTP: handlers, wakes, and questions to people.

Law: the right to read shows what a conversation waits for, and the right to write changes it.

Listings come from SQL, which the last commits may not have reached. So each listed conversation is read from Redis, and
one that was served, answered or tried again meanwhile is left out.

Design: section 31.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from distributed_state.conversation import asks, inbox
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.requests import Answer, Asked, Body, Id, Limit, Name, Query
from distributed_state.programs.service.resources import output, records
from distributed_state.records.access import MESSAGES
from distributed_state.records.context import context_of
from distributed_state.results import Ask
from distributed_state.tiers import read as read_path
from distributed_state.values.model import OWNER, unescape

Handler = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Seconds = Annotated[float, Field(ge=0, le=1e11)]
QuestionName = Annotated[str, Field(max_length=100)]


# Handlers


class Handling(Answer):
    """When a worker calls the conversation's handler; without one, `handler` is null. Times are in seconds since 1970.

    `due` is null if nothing waits, or if the conversation is stuck: then `failures` turns in a row failed, and no
    worker tries again. `error` is the class of the last error, and `failed` when it happened.
    """

    handler: str | None
    due: float | None
    failures: int
    stuck: bool
    error: str | None
    failed: float | None


def handling(entry: CachedRecord) -> dict[str, Any]:
    """How a conversation that was read is handled, as a Handling."""
    schedule = inbox.schedule_of(entry)
    if schedule is None:
        return {"handler": None, "due": None, "failures": 0, "stuck": False, "error": None, "failed": None}
    failure = inbox.failure_of(entry) if schedule.failed else None
    return {
        "handler": schedule.handler,
        "due": None if schedule.due is None else schedule.due / 1000,
        "failures": schedule.failed,
        "stuck": schedule.stuck,
        "error": None if failure is None else failure.error,
        "failed": None if failure is None else failure.at / 1000,
    }


async def stuck(asked: Asked, ids: Sequence[str]) -> list[dict[str, Any] | None]:
    """How each of these conversations is handled, None for one that is not stuck. One round trip."""
    contexts = [context_of(records.of(asked, "session", each)) for each in ids]
    for context in contexts:
        context.allow("read", MESSAGES)
    keys = [each.keys for each in contexts]
    entries = await read_path.read_many(contexts[0].tiers, keys, fresh=True) if keys else []
    found = [handling(entry) for entry in entries]
    return [each if each["stuck"] else None for each in found]


class Retried(Answer):
    """`retried` is false if nothing failed or was stopped."""

    retried: bool


async def retry(asked: Asked) -> Response:
    """Let a conversation go on whose handler failed, or whose workflow failed or was stopped.

    A worker goes on with it, or if it has no handler, the program that runs its workflow.
    """
    session = records.handle(asked, "session")
    return answer({"retried": await session.retry()})


# Questions to people


class Question(Answer):
    """An open question of a conversation; times are in seconds since 1970, `expires` is null if it has no end.

    `id` distinguishes questions of the same name.
    """

    conversation: str
    name: str
    id: str
    question: str
    data: Any
    asked: float
    expires: float | None
    user: str | None


def question(ask: Ask) -> dict[str, Any]:
    """An open question as a Question."""
    row = asdict(ask)
    return {"conversation": row.pop("session"), **row}


class Asking(Query):
    """Selects open questions: of conversations of this `user`, of at most `limit` conversations that wait.

    `after` is the value that the previous page returned. A page may have few questions or none although `after`
    continues: not every conversation that waits has an open one.
    """

    user: Id | None = None
    limit: Limit = 50
    after: Name | None = None


class Questions(Answer):
    """A page of open questions; `after` is null if it is the last."""

    asks: list[Question]
    after: str | None


async def questions(asked: Asked, given: Asking) -> Response:
    """List the open questions to people."""
    found, after = await open_questions(asked, given)
    return answer({"asks": found, "after": after}, headers=requests.next_page(asked.request, after))


async def open_questions(asked: Asked, given: Asking) -> tuple[list[dict[str, Any]], str | None]:
    """A page of open questions, and where the next page begins."""
    if given.user is not None:
        records.within(asked, given.user)
    page = await asked.store.sessions(
        user=given.user, prefix=records.narrowed(asked, None), phase=asks.PHASE, limit=given.limit, after=given.after,
        fresh=True,
    )  # fmt: skip
    contexts = [context_of(records.of(asked, "session", each.id)) for each in page]
    found = await asks.of_page(contexts, [each.user for each in page])
    return [question(each) for each in found], page[-1].cursor if len(page) == given.limit else None


class Reply(Body):
    """The answer to an open question of the conversation, any JSON value; `name` is that of the question.

    With the `id` of a question, a later question of its name is not answered: 404.
    """

    value: Any
    name: QuestionName = ""
    id: Annotated[str, Field(max_length=100)] | None = None


class Replied(Answer):
    """`accepted` is false if somebody had answered already."""

    accepted: bool


async def reply(asked: Asked, given: Reply) -> Response:
    """Answer an open question, which the conversation's next turn closes."""
    session = records.handle(asked, "session")
    return answer({"accepted": await session.answer(given.value, given.name, id=given.id)})


# Wakes


class Wake(Body):
    """Begins a turn later: after some seconds, or `at` a time in seconds since 1970, by the clock of the server.

    The handler gets `text`. With `every` it repeats after this many seconds. A wake replaces the one of its `name`.
    """

    text: str = ""
    after: Seconds | None = None
    at: Seconds | None = None
    every: Annotated[float, Field(ge=1, le=1e11)] | None = None
    name: Annotated[str, Field(max_length=200)] = ""
    handler: Handler | None = None


class Woken(Answer):
    """`name` is that of the wake."""

    name: str


async def wake(asked: Asked, given: Wake) -> Response:
    """Set a wake."""
    session = records.handle(asked, "session")
    await output.begun(asked, session)
    await session.wake(
        given.text, after=given.after, at=given.at, name=given.name, every=given.every, handler=given.handler
    )
    return answer({"name": given.name})


class Named(Query):
    """`name` is that of the wake."""

    name: Name = ""


class Cancelled(Answer):
    """`cancelled` is false if there is no wake of this name."""

    cancelled: bool


async def cancel_wake(asked: Asked, given: Named) -> Response:
    """Remove a wake."""
    session = records.handle(asked, "session")
    return answer({"cancelled": await session.cancel_wake(given.name)})


# All of it


class Schedule(Handling):
    """When the conversation goes on: its handler, its wakes, the next one first, and its open questions.

    The `time` of a wake is when it is due.
    """

    wakes: list[output.InputShown]
    asks: list[Question]


async def read(asked: Asked) -> Response:
    """Read when a conversation goes on."""
    session = records.handle(asked, "session")
    context = context_of(session)
    entry = await records.look(session, True, MESSAGES)
    await context.tiers.clock.know()
    owner = entry.fields.get(OWNER)
    user = unescape(owner.decode()) if owner else None
    wakes = [output.shown(each) for each in inbox.wakes(entry)]
    found = [question(each) for each in asks.open_in(context, entry, user)]
    return answer({**handling(entry), "wakes": wakes, "asks": found})
