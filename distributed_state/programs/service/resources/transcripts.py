"""Messages as they were given, and taken back. Law: what was said, and what the store knows of it, stand apart.

So a message that names a `number` or a `timestamp` of its own is told from one that does not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.responses import Response

from distributed_state.conversation import replacing
from distributed_state.programs.service import requests, writing
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.remembering import OnceOnly
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.messages import page_of
from distributed_state.programs.service.resources.shapes import Answer, Body, Messages, Values, Version, Written
from distributed_state.programs.service.routes import Asked
from distributed_state.records import history
from distributed_state.records.access import VERSION
from distributed_state.records.context import RecordContext, context_of
from distributed_state.values.model import Message


class Line(Answer):
    """A message as it was given; `time` of its commit in seconds since 1970, null if it names a time of its own."""

    number: int | None
    time: float | None
    message: Values


class Transcript(Answer):
    """A page of messages of one version, in the order asked for."""

    version: int
    messages: list[Line]


async def page(asked: Asked) -> Response:
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
