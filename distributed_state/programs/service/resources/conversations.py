"""Conversations and their messages: creation, reads, turns and lifetimes.

Law: a turn is one commit, made once; the cost of a page of messages depends only on the page; a message's number never
changes.

Conversations and tasks are created by the same request. A generated id begins with the caller's prefix. Only the
server's clock decides when a conversation ends.

`messages` shows the number and time of a message among its own fields. A `transcript` shows them separately, so that a
message may have its own `number` or `timestamp`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from distributed_state.conversation import replacing, request_log
from distributed_state.conversation.turn import AsyncTurn
from distributed_state.errors import InvalidValue, NotFound
from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.requests import (
    Answer,
    Asked,
    Body,
    Encoded,
    Id,
    Limit,
    Messages,
    Name,
    Query,
    Run,
    Texts,
    Values,
    Version,
    Written,
    together,
)
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.fields import ItemChange, Live, owned
from distributed_state.programs.service.resources.records import DIGEST, OnceOnly
from distributed_state.programs.service.resources.usage import Count, TokensUsed
from distributed_state.records import history, lifecycle, messages
from distributed_state.records import messages as shown_messages
from distributed_state.records.access import MESSAGES, MOVES, VERSION
from distributed_state.records.context import RecordContext, context_of
from distributed_state.records.messages import Page, Shown
from distributed_state.results import TimedRun
from distributed_state.tiers.changes import Changes
from distributed_state.values import as_text
from distributed_state.values.items import name_of
from distributed_state.values.model import MAX_PHASE, PHASE, Message, Scope
from distributed_state.values.usage import MODEL_NAME

_TURN_TTL = 10.0  # seconds for which the turn of a worker that died blocks others
_Said = Callable[[shown_messages.Shown], list[dict[str, Any]]]


class Create(Body):
    """A conversation or task to begin; without an `id`, one is generated. `user` owns it."""

    id: Id | None = None
    user: Id | None = None
    fields: Values | None = None
    bytes: Encoded | None = None


async def create(scope: Scope, asked: Asked, given: Create) -> Response:
    """Begin a conversation or a task."""
    fields = together(given.fields, given.bytes)
    user = records.owner(asked, given.user)
    id = records.begun(asked, given.id)
    if id is None and (asked.caller.prefix or scope == "task"):
        id = asked.caller.prefix + secrets.token_hex(16)
    store = asked.store
    # The store generates an id for a session without one, and then knows that the session is new.
    record = store.session(id, user=user) if id is None or scope == "session" else store.task(id, user=user)
    await records.begins(asked, context_of(record))
    change = records.Write(
        "create",
        lambda changes: changes.set_many(fields),
        draft=lambda context, changes: lifecycle.creation(context, changes, False),
        unique=given.id is None,
    )
    done = await records.write(asked, record, change)
    found = {"id": record.id, "version": done.version}
    return answer(found, 201, version=done.version, headers=records.place(scope, record.id))


class Last(Query):
    """Reads the `last` messages of a conversation."""

    last: Annotated[int, Field(ge=0, le=10_000)] = 20
    fresh: bool = False


class Conversation(Answer):
    """The current state of a conversation: fields, phase and messages of one version."""

    id: str
    version: int
    phase: str | None
    fields: Values
    bytes: Encoded | None = None
    messages: Messages


async def read(asked: Asked, given: Last) -> Response:
    """A conversation with its last messages."""
    id = records.id_of(asked)
    context = context_of(asked.store.session(id))
    context.allow("read", MESSAGES, MOVES)
    shown, size = await records.read_shown(context, Page(last=given.last), asked.limits, fresh=given.fresh)
    entry = shown.entry
    records.there(entry, context)
    known = records.not_modified(asked.request, entry)
    if known is not None:
        return known
    return await requests.in_turn(size, lambda: _shown(id, shown, context))


def _shown(id: str, shown: Shown, context: RecordContext) -> Response:
    entry = shown.entry
    phase = entry.fields.get(PHASE)
    found = {
        "id": id,
        "version": entry.version,
        "phase": None if phase is None else phase.decode("utf-8", "surrogatepass"),
        **as_text.apart(context.fields(entry)),
        "messages": [each.to_dict() for each in shown.messages()],
    }
    return answer(found, version=entry.version)


# Turns


class Turn(Body):
    """The changes of a turn: messages to add, fields and items to change, an `event` or a new `phase`.

    A request with a key is logged with `outcome`, by default the version and the phase. With the header
    If-None-Match the turn begins the conversation, which `user` owns; other turns take no `user`. `request_id`
    replaces the header Idempotency-Key for clients that cannot send it. `runs` are the tools and models that the client
    ran for the turn, and `seconds` the time it took; the turn's version shows both among its times. `usage` has the
    tokens of models, by their names, which the commit adds to the conversation's; with `usage_below` the turn is
    refused unless those are fewer. With `revive` the turn begins a deleted or expired conversation again. `inputs` are
    the numbers of the inputs that it served, and `streamed` is how many chunks it streamed under the lease of the
    request.
    """

    request_id: str | None = None
    messages: Messages | None = None
    set: Values | None = None
    bytes: Encoded | None = None
    delete: list[Name] = Field(default_factory=list)
    items: list[ItemChange] = Field(default_factory=list)
    tag: Texts = Field(default_factory=dict)
    untag: Texts = Field(default_factory=dict)
    event: str | None = None
    phase: Annotated[str, Field(max_length=MAX_PHASE)] | None = None
    outcome: Any = None
    user: Id | None = None
    revive: bool = False
    runs: list[Run] = Field(default_factory=list)
    seconds: float = Field(0.0, ge=0, le=1e9)
    inputs: list[Version] = Field(default_factory=list)
    streamed: Version = 0
    usage: dict[Annotated[str, Field(min_length=1, max_length=MODEL_NAME)], TokensUsed] = Field(
        default_factory=dict, max_length=50
    )
    usage_below: Count | None = None

    def apply(self, now: AsyncTurn) -> None:
        """Apply these changes to the turn."""
        if self.inputs:
            now.take(*self.inputs)
        now.append(*(self.messages or ()))
        for key in self.delete:
            now.pop(key, None)
        now.update(together(self.set, self.bytes))
        for item in self.items:
            item.build(now)
        for key, texts in self.tag.items():
            now.tag(key, *texts)
        for key, texts in self.untag.items():
            now.untag(key, *texts)
        if self.event is not None:
            now.transition(self.event)
        if self.phase is not None:
            now.move_to(self.phase)


class Turned(Answer):
    """The version that the turn made. `outcome` is logged for requests with a key."""

    version: int
    repeated: bool
    outcome: Any


_CHANGES = ("messages", "set", "bytes", "delete", "items", "tag", "untag", "event", "phase", "inputs", "usage")


async def turn(asked: Asked, given: Turn) -> Response:
    """Serve one request to a conversation."""
    key = records.key_of(asked)
    if key is not None and given.request_id not in (None, key):
        raise InvalidValue("give request_id or Idempotency-Key, not both")
    key = given.request_id if key is None else key
    if "outcome" not in given.model_fields_set and not any(getattr(given, name) for name in _CHANGES):
        raise InvalidValue("a turn has messages, fields to set, an event, or other changes")
    wanted = records.conditions_of(asked.request)
    noted = {} if key is None else {DIGEST: requests.digest(asked.request)}
    begins = wanted.exists is False
    if given.user is not None and not begins:
        raise InvalidValue("user sets the owner of a new conversation: give If-None-Match: * with it")
    session = await owned(asked, "session", given.user) if begins else records.handle(asked, "session")
    await records.write_under_lease(asked, context_of(session), given.streamed)
    put = [name_of(each.collection, each.key) for each in given.items if not each.delete]
    await records.puts(asked, context_of(session), put)
    if not begins:
        await records.comes_back(asked, context_of(session), revive=given.revive)
    options = {"usage_below": given.usage_below, "revive": given.revive}
    async with session.turn(request_id=key, wait=asked.limits.busy, ttl=_TURN_TTL, **options) as now:
        if not now.repeated:
            version = now.version
            wanted.check(version)
            if version == 0 and not begins:
                raise NotFound(f"there is no conversation {session.id!r:.200}")
            now.reported(given.seconds, [TimedRun(each.kind, each.name, each.seconds) for each in given.runs])
            for name, each in given.usage.items():
                now.model(name).used(**each.model_dump())
            given.apply(now)
            # The turn holds the lease, so no other write comes between, and its commit is the next version.
            made = {"version": version + 1, "phase": now.phase, **noted}
            now.outcome = given.outcome if "outcome" in given.model_fields_set else made
    outcome = now.outcome
    if now.repeated and key is not None:
        records.same_request(outcome, noted[DIGEST], key)
    # Not taken from the outcome, because a process that uses the library may store any outcome.
    version = now.answered_version if now.written is None else now.written.version
    return _turned(version, now.repeated, outcome)


def _turned(version: int, repeated: bool, outcome: Any) -> Response:
    if isinstance(outcome, dict):
        outcome = {name: value for name, value in outcome.items() if name != DIGEST}
    return answer({"version": version, "repeated": repeated, "outcome": outcome}, version=version)


async def answered_turn(asked: Asked) -> Response:
    """Read the result of a request that a turn answered."""
    session = records.handle(asked, "session")
    request = asked.request.path_params["request"]
    name = request_log.name_of(request)
    entry = await records.look(session, True)
    kept = None if name is None else request_log.find(entry, name)
    if kept is None:
        raise NotFound(f"the request log has no turn of {request!r:.80}")
    return _turned(request_log.answered_at(kept), True, kept[1])


# Messages


class MessagePage(Query):
    """Selects messages: the first `limit` in this `order`, between two numbers, both exclusive."""

    limit: Limit = 50
    before: Version | None = None
    after: Version | None = None
    order: Literal["asc", "desc"] = "asc"
    fresh: bool = False


class Numbered(Answer):
    """Messages in the requested order, each with its `number` and the `timestamp` of its commit."""

    version: int
    messages: Messages


async def message_page(asked: Asked, given: MessagePage) -> Response:
    """A page of messages."""
    return await page_of(asked, given, shown_messages.Shown.raw)


async def page_of(asked: Asked, given: MessagePage, said: _Said) -> Response:
    """A page of messages, in the form that `said` makes of them."""
    session = records.handle(asked, "session")
    context = context_of(session)
    context.allow("read", MESSAGES)
    wanted = shown_messages.Page(limit=given.limit, before=given.before, after=given.after, order=given.order)
    shown, size = await records.read_shown(context, wanted, asked.limits, fresh=given.fresh)
    records.there(shown.entry, context)
    known = records.not_modified(asked.request, shown.entry)
    if known is not None:
        return known
    return await requests.in_turn(size, lambda: _page_shown(asked.request, given, shown, said))


def _page_shown(request: Request, given: MessagePage, shown: shown_messages.Shown, said: _Said) -> Response:
    found = said(shown)
    if given.order == "desc":
        found.reverse()
    more = requests.next_page(request, found[-1]["number"] if len(found) == given.limit else None, given.order)
    version = shown.entry.version
    return answer({"version": version, "messages": found}, version=version, headers=more)


class Single(Answer):
    """A message as it was appended, with its `number` and the `timestamp` of its commit."""

    model_config = ConfigDict(extra="allow")

    number: int


async def one_message(asked: Asked, given: records.Fresh) -> Response:
    """One message by its number."""
    number = asked.request.path_params["number"]
    context = context_of(records.handle(asked, "session"))
    context.allow("read", MESSAGES)
    message = await messages.message(context.tiers, context.keys, number, fresh=context.must_ask(given.fresh, None))
    found: dict[str, Any] = message.to_dict()
    if message.timestamp is not None:
        found.setdefault("timestamp", message.timestamp)
    return answer(found | {"number": number})


class Append(Body):
    """Messages to add."""

    messages: Annotated[Messages, Field(description="At least one.")]
    revive: bool = Field(False, description="Start a deleted or expired conversation again.")


class Appended(Answer):
    """The new version, and the number of the first message that was added."""

    version: int
    repeated: bool
    first_message: int | None


async def append_messages(asked: Asked, given: Append) -> Response:
    """Add messages to a conversation."""

    def build(changes: Changes) -> None:
        for message in given.messages:
            changes.append(message)

    change = records.Write("append", build, revive=given.revive)
    done = await records.write(asked, records.handle(asked, "session"), change)
    found = {"version": done.version, "repeated": done.repeated, "first_message": done.first_message}
    return answer(found, 201, version=done.version)


# Transcripts


class Line(Answer):
    """A message as it was given; `time` of its commit in seconds since 1970, null if it has its own `timestamp`."""

    number: int | None
    time: float | None
    message: Values


class Transcript(Answer):
    """A page of messages of one version, in the requested order."""

    version: int
    messages: list[Line]


async def transcript(asked: Asked, given: MessagePage) -> Response:
    """A page of messages, each as it was given."""
    return await page_of(asked, given, lambda shown: [line(each) for each in shown.messages()])


def line(message: Message) -> dict[str, Any]:
    """A message in the form of a transcript."""
    said = message.to_dict()
    return {"number": message.number, "time": None if "timestamp" in said else message.timestamp, "message": said}


class Popped(Written):
    """The removed message, null if there was none."""

    message: Line | None


async def pop(asked: Asked) -> Response:
    """Remove the last message."""
    context, once = await _begun(asked)
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
    """Messages that replace all after the number `after`; with `expect_last`, only if the last number is this one."""

    messages: Messages
    after: Version | None = None
    expect_last: Version | None = None


async def replace(asked: Asked, given: Replace) -> Response:
    """Replace messages."""
    context, once = await _begun(asked)
    await records.begins(asked, context)
    replaced = partial(
        replacing.replace, context, given.messages, given.after, given.expect_last, None, note=once.note
    )  # fmt: skip
    version, done = await once.settle(once.looked(context, replaced))
    version = version if done is None else done.version
    return answer({"version": version, "repeated": done is not None}, version=version)


async def _begun(asked: Asked) -> tuple[RecordContext, OnceOnly]:
    context = context_of(await records.written_by(asked, "session"))
    return context, OnceOnly.of(asked, context)


# How long a conversation lives


class Lives(Answer):
    """The conversation ends after `idle` seconds without a commit, and at `until` at the latest; null: never.

    It `ends` at that time if no further write comes. Times are in seconds since 1970 by the store's clock.
    """

    idle: float | None
    until: float | None
    ends: float | None


async def read_lifetime(asked: Asked) -> Response:
    """Read how long a conversation lives."""
    session = records.handle(asked, "session")
    await records.look(session, False, VERSION)
    return answer(asdict(await session.lifetime()))


async def put_lifetime(asked: Asked, given: Live) -> Response:
    """Set how long a conversation lives, which replaces the earlier lifetime."""
    session = records.handle(asked, "session")
    context_of(session).allow("write", None)
    return records.written(await records.write(asked, session, records.Write("lifetime", given.build)))
