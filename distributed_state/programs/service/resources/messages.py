"""Messages of a conversation, paged by their numbers. Law: a page costs what it holds, and a number stays.

`messages` shows a message with its number and time among what it says. A `transcript` keeps the two apart, so that a
message that brings a `number` or a `timestamp` of its own is told from one that does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from distributed_state.conversation import replacing
from distributed_state.programs.service import requests, scheduling, writing
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.shapes import (
    Answer,
    Body,
    Limit,
    Messages,
    Query,
    Values,
    Version,
    Written,
)
from distributed_state.programs.service.routes import Asked
from distributed_state.programs.service.writing import OnceOnly
from distributed_state.records import history
from distributed_state.records import messages as shown_messages
from distributed_state.records.access import MESSAGES, VERSION
from distributed_state.records.context import RecordContext, context_of
from distributed_state.tiers.changes import Changes
from distributed_state.values.model import Message

Said = Callable[[shown_messages.Shown], list[dict[str, Any]]]


class Page(Query):
    """Which messages: `limit` from the beginning of `order`, between two numbers, both exclusive."""

    limit: Limit = 50
    before: Version | None = None
    after: Version | None = None
    order: Literal["asc", "desc"] = "asc"
    fresh: bool = False


class Numbered(Answer):
    """Messages in the order asked for, each with its `number` and the `timestamp` of its commit."""

    version: int
    messages: Messages


async def page(asked: Asked) -> Response:
    """A page of messages."""
    return await page_of(asked, shown_messages.Shown.raw)


class Single(Answer):
    """A message as it was appended, with its `number` and the `timestamp` of its commit."""

    model_config = ConfigDict(extra="allow")

    number: int


async def one(asked: Asked) -> Response:
    """One message by its number."""
    given = requests.query(asked.request, records.Fresh)
    number = asked.request.path_params["number"]
    session = asked.store.session(records.id_of(asked))
    message = await session.message(number, fresh=given.fresh)
    found: dict[str, Any] = message.to_dict()
    if message.timestamp is not None:
        found.setdefault("timestamp", message.timestamp)
    return answer(found | {"number": number})


async def page_of(asked: Asked, said: Said) -> Response:
    """A page of messages, as this makes them of what was read."""
    given = requests.query(asked.request, Page)
    session = asked.store.session(records.id_of(asked))
    context = context_of(session)
    context.allow("read", MESSAGES)
    wanted = shown_messages.Page(limit=given.limit, before=given.before, after=given.after, order=given.order)
    shown, size = await records.read_shown(context, wanted, asked.limits, fresh=given.fresh)
    records.there(shown.entry, "session", session.id)
    known = records.not_modified(asked.request, shown.entry)
    if known is not None:
        return known
    return await scheduling.in_turn(size, lambda: _page(asked.request, given, shown, said))


def _page(request: Request, given: Page, shown: shown_messages.Shown, said: Said) -> Response:
    found = said(shown)
    if given.order == "desc":
        found.reverse()
    more: dict[str, str] | None = None
    if len(found) == given.limit:
        bound = "before" if given.order == "desc" else "after"
        more = requests.next_page(request, **{bound: found[-1]["number"]})
    version = shown.entry.version
    return answer({"version": version, "messages": found}, version=version, headers=more)


class Append(Body):
    """Messages to add."""

    messages: Annotated[Messages, Field(description="At least one.")]


class Appended(Answer):
    """The new version, and the number of the first message that was added."""

    version: int
    repeated: bool
    first_message: int | None


async def append(asked: Asked) -> Response:
    """Add messages to a conversation."""
    given = requests.body(asked.request, asked.limits, Append)

    def build(changes: Changes) -> None:
        for message in given.messages:
            changes.append(message)

    done = await writing.write(asked, records.handle(asked, "session"), writing.Write("append", build))
    found = {"version": done.version, "repeated": done.repeated, "first_message": done.first_message}
    return answer(found, 201, version=done.version)


# Transcripts


class Line(Answer):
    """A message as it was given; `time` of its commit in seconds since 1970, null if it names a time of its own."""

    number: int | None
    time: float | None
    message: Values


class Transcript(Answer):
    """A page of messages of one version, in the order asked for."""

    version: int
    messages: list[Line]


async def transcript(asked: Asked) -> Response:
    """A page of messages, each as it was given."""
    return await page_of(asked, lambda shown: [line(each) for each in shown.messages()])


def line(message: Message) -> dict[str, Any]:
    """A message as a transcript has it."""
    said = message.to_dict()
    return {"number": message.number, "time": None if "timestamp" in said else message.timestamp, "message": said}


class Popped(Written):
    """The message that was taken back, null if there was none."""

    message: Line | None


async def pop(asked: Asked) -> Response:
    """Take the last message back."""
    context, once = _begun(asked)
    popping = partial(replacing.pop, context, None, note=once.note)
    found, done = await once.settle(once.looked(context, popping))
    if done is None:
        version = (await context.read(field=VERSION)).version
    else:
        version = done.version
        (found,) = (await history.at(context, version - 1, None, last=1)).messages
    shown = None if found is None else line(found)
    return answer({"version": version, "repeated": done is not None, "message": shown}, version=version)


class Replace(Body):
    """What stands in place of all messages behind the one numbered `after`, if the last one is `expect_last`."""

    messages: Messages
    after: Version | None = None
    expect_last: Version | None = None


async def replace(asked: Asked) -> Response:
    """Replace messages."""
    given = requests.body(asked.request, asked.limits, Replace)
    context, once = _begun(asked)
    await writing.begins(asked, context)
    replaced = partial(
        replacing.replace, context, given.messages, given.after, given.expect_last, None, note=once.note
    )  # fmt: skip
    version, done = await once.settle(once.looked(context, replaced))
    version = version if done is None else done.version
    return answer({"version": version, "repeated": done is not None}, version=version)


def _begun(asked: Asked) -> tuple[RecordContext, OnceOnly]:
    context = context_of(records.written_by(asked, "session"))
    return context, OnceOnly.of(asked, context)
