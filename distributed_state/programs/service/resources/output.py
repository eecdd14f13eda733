"""The output of running turns over HTTP, with stops and the inbox. Law: the right to read is the right to follow.

The output is a stream of server-sent events. The id of an event is its position, so a browser's `EventSource` goes on
after the last one that it received, at any worker. `EventSource` cannot send headers, so a page asks for a *ticket*,
and names it in the URL. A URL ends up in logs, so a ticket opens one stream, within a minute. Later it only resumes
that stream, while the access token of its caller is valid.

A client that runs a turn itself, under a lease that it carries, numbers its chunks, so that it may repeat a request.

Design: sections 24, 29, 30.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import quote

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from distributed_state.conversation import inbox, request_log
from distributed_state.conversation.output import PART_NAMES, AsyncOutput
from distributed_state.errors import Fenced, InvalidValue, TooLarge, Unauthenticated
from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import answer, encode
from distributed_state.programs.service.authentication import Authentication, Caller
from distributed_state.programs.service.requests import (
    LAST_EVENT_ID,
    LEASE,
    Answer,
    Asked,
    Body,
    Query,
    Values,
    value_shown,
)
from distributed_state.programs.service.resources import conversations, records
from distributed_state.records.access import VERSION
from distributed_state.records.context import RecordContext, context_of
from distributed_state.results import (
    Chunk,
    Ended,
    Input,
    Notice,
    OutputPart,
    Restarted,
    StopRequested,
    Truncated,
)
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.store.lifecycle import lifecycle_of
from distributed_state.values import as_text
from distributed_state.values.model import Ref
from distributed_state.warm.output import Taken, frame_of

_OPENS_MS = 60_000  # a ticket opens a stream within this time
_LASTS = 24 * 3600.0  # seconds for which it resumes the stream, while its access token is valid
_LASTS_UNCHECKED = 3600.0  # likewise, if the caller has no access token that could be looked up
_BEGINNING = (
    "beginning"  # the position of a stream's first line, so that `EventSource` resumes, and does not open again
)

Number = Annotated[int, Field(ge=1, lt=2**48)]
Request_ = Annotated[str, Field(min_length=1, max_length=1000)]


# Following


class Follow(Query):
    """Follows the turn of a `request`, or without one the turn that runs and the next ones.

    `after` is a position (the `id` of an event), `Last-Event-ID` overrides it. With `notices` the stream also says when
    a turn begins or ends, and when messages, fields or the inbox change. `format=ai-sdk` is the UI message stream of
    Vercel's AI SDK: one turn, from its first chunk; without a `request`, 204 if none runs. `ticket` replaces the token.
    """

    request: Request_ | None = None
    after: str | None = None
    notices: bool = False
    format: Literal["events", "ai-sdk"] = "events"
    ticket: str | None = None


def followed(asked: Asked, given: Follow) -> AsyncOutput:
    """The output that a request follows."""
    session = records.handle(asked, "session")
    after = requests.header(asked.request, LAST_EVENT_ID) or given.after
    messages = given.format == "ai-sdk"
    if messages or after == _BEGINNING:
        after = None
    found: AsyncOutput = session.output(given.request, after=after or None, notices=given.notices and not messages)
    return found


def is_known(part: OutputPart | None, asked: Asked, given: Follow) -> bool:
    """Whether a client that resumes has this end already. The answer is 204, after which `EventSource` stops."""
    after = requests.header(asked.request, LAST_EVENT_ID) or given.after
    return isinstance(part, Ended) and part.position == after


class Events:
    """Shows each part as an event, with its position as the id."""

    last = b""
    over = False
    patient = True

    def __init__(self, given: Follow) -> None:
        self.first = "" if given.ticket is None else f"id: {_BEGINNING}\n"

    def show(self, part: OutputPart) -> bytes:
        """A part of the output as an event."""
        if isinstance(part, Notice):
            return b"event: %b\ndata: %b\n\n" % (part.name.encode(), encode(part.data))
        data: dict[str, Any] = {}
        if isinstance(part, Chunk):
            data = value_shown(part.data)
        elif isinstance(part, StopRequested):
            data = {"reason": part.reason}
        elif isinstance(part, Ended):
            outcome = part.outcome
            if isinstance(outcome, dict):
                outcome = {name: value for name, value in outcome.items() if name != records.DIGEST}
            data = {"version": part.version, "outcome": outcome}
        name = PART_NAMES[type(part)].encode()
        return b"id: %b\nevent: %b\ndata: %b\n\n" % (part.position.encode(), name, encode(data))


class UiMessages:
    """Shows one turn as a UI message stream of the AI SDK.

    Text chunks are the text of the message. A chunk that is an object with a `type` is passed on as a part of the
    protocol; any other is a part `data-chunk`. After `data-restarted` the parts before it do not count. Source: AI SDK,
    "Stream Protocols", data stream protocol version 1.
    """

    HEADERS: ClassVar = {"x-vercel-ai-ui-message-stream": "v1"}
    first = ""
    last = b"data: [DONE]\n\n"

    def __init__(self, given: Follow) -> None:
        self.patient = given.request is not None
        self._text = 0  # the number of the text part that is open, negative: it is closed
        self._begun = self.over = False

    def show(self, part: OutputPart) -> bytes:
        """A part of the output as parts of the protocol."""
        found: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = self.patient = True
            found.append({"type": "start", "messageId": f"turn-{part.position.partition('-')[0]}"})
        if isinstance(part, Chunk) and isinstance(part.data, str):
            if self._text <= 0:
                self._text = 1 - self._text
                found.append({"type": "text-start", "id": str(self._text)})
            found.append({"type": "text-delta", "id": str(self._text), "delta": part.data})
        else:
            if self._text > 0:
                found.append({"type": "text-end", "id": str(self._text)})
                self._text = -self._text
            found += self._other(part)
        return b"".join(b"data: %b\n\n" % encode(each) for each in found)

    def _other(self, part: OutputPart) -> list[dict[str, Any]]:
        if isinstance(part, Chunk):
            if isinstance(part.data, dict) and isinstance(part.data.get("type"), str):
                return [part.data]
            return [{"type": "data-chunk", "data": value_shown(part.data)}]
        if isinstance(part, (Restarted, Truncated)):
            return [{"type": f"data-{PART_NAMES[type(part)]}", "data": {}}]
        if isinstance(part, StopRequested):
            return [{"type": "data-stop_requested", "data": {"reason": part.reason}}]
        self.over = True
        if isinstance(part, Ended):
            return [{"type": "finish"}]
        return [{"type": "error", "errorText": "the turn did not finish, and nothing was written"}]


# Tickets


class Ticket(Answer):
    """`ticket` opens the conversation's output once, within `opens` seconds, as `GET .../output?ticket=`.

    Later it only resumes that stream, after a `Last-Event-ID`, for `lasts` seconds at most.
    """

    ticket: str
    opens: float
    lasts: float


async def create_ticket(asked: Asked) -> Response:
    """Make a ticket for a conversation's output."""
    context = context_of(records.handle(asked, "session"))
    context.allow("read", None)
    caller = asked.caller
    ticket = secrets.token_urlsafe(32)
    await context.tiers.clock.know()
    now = context.tiers.clock.now()
    lasts = _LASTS if caller.token is not None else _LASTS_UNCHECKED
    if caller.expires is not None:
        lasts = min(lasts, max(0.0, caller.expires - now))
    kept = [caller.actor, caller.prefix, caller.credential, context.ref.id, now + lasts]
    key = context.keys.ticket_of(_digest(ticket))
    await context.tiers.warm.command(b"SET", key, encode(kept), b"PX", _OPENS_MS)
    return answer({"ticket": ticket, "opens": _OPENS_MS / 1000, "lasts": lasts}, 201)


def _digest(ticket: str) -> str:
    return hashlib.sha256(ticket.encode("utf-8", "surrogatepass")).hexdigest()


async def admit(store: AsyncStateStore, authentication: Authentication, request: Request) -> Caller:
    """The caller of a request with a ticket. Raises Unauthenticated, or Unavailable if that cannot be checked now."""
    tiers = lifecycle_of(store).tiers()
    id = request.path_params["id"]
    key = tiers.keys.of(Ref("session", id)).ticket_of(_digest(request.query_params["ticket"]))
    kept = await tiers.warm.command(b"GET", key)
    await tiers.clock.know()
    if kept is None:
        raise Unauthenticated("the ticket is not valid, or its minute is over")
    actor, prefix, credential, conversation, until = json.loads(kept)
    left = until - tiers.clock.now()
    if conversation != id or left <= 0:
        raise Unauthenticated("the ticket has ended, or is for another conversation")
    caller = Caller(actor, prefix, frozenset({"read"}), credential)
    await authentication.still(caller)
    if LAST_EVENT_ID not in request.headers:
        left_ms = math.ceil(left * 1000)
        if await tiers.warm.command(b"SET", key + b":opened", b"", b"NX", b"PX", left_ms) is None:
            raise Unauthenticated("the ticket was used before: it opens one stream, and then resumes it")
        await tiers.warm.command(b"PEXPIRE", key, left_ms)
    return caller


# Chunks of a holder that is a client


class Given(Body):
    """One chunk: a JSON `value`, or `bytes` in base64."""

    value: Any = None
    bytes: str | None = None

    @property
    def chunk(self) -> Any:
        """The chunk as the library has it. Raises InvalidValue."""
        if self.bytes is not None and "value" in self.model_fields_set:
            raise InvalidValue("a chunk has value or bytes, not both")
        return self.value if self.bytes is None else as_text.bytes_of(self.bytes, "bytes")


class Stream(Body):
    """Chunks of the turn whose lease the request carries, numbered from `first`; the first of a turn is 1.

    `inputs` are numbers of waiting inputs that the turn serves from here on: followers of their requests follow it.
    They count as one chunk, before the others. A request that is repeated has no further effect.
    """

    first: Number
    chunks: list[Given] = Field(default_factory=list, max_length=1000)
    inputs: list[Number] = Field(default_factory=list, max_length=1000)


class Streamed(Answer):
    """`last` is the number of the last chunk: the next one has the number after it."""

    last: int


async def stream(asked: Asked, given: Stream) -> Response:
    """Stream chunks of a turn that the client runs."""
    context = context_of(records.handle(asked, "session"))
    context.allow("lock", None)
    lease = records.lease_of(asked)
    if lease is None:
        raise InvalidValue(f"the header {LEASE} must name the lease of the turn")
    leases, keys = context.tiers.leases, context.keys
    most = leases.outputs.chunk_bytes
    frames = [frame_of(each.chunk, most) for each in given.chunks]
    if given.inputs:
        frames.insert(0, Taken(await _tags(context, given.inputs)).frame)
    if not frames:
        raise InvalidValue("give chunks, or inputs that the turn serves")
    if sum(map(len, frames)) > most:
        raise TooLarge(f"the chunks of one request have at most {most} bytes, a quarter of output_bytes")
    await lease.check(leases, keys)
    last = given.first + len(frames) - 1
    if not await lease.output(leases, keys, last).append(frames):
        raise Fenced(f"{context.text[:200]}: the lease has ended")
    return answer({"last": last})


async def _tags(context: RecordContext, numbers: list[int]) -> list[str]:
    waiting = await inbox.read(context)
    return [tag for each in waiting if each.number in numbers and (tag := inbox.tag_of(each))]


def turn_tag(request_id: str | None) -> str:
    """The tag of a client's turn, by which followers and stops know it."""
    name = request_log.name_of(request_id)
    return secrets.token_hex(4) if name is None else request_log.tag_of(name)


# Stops


class Stop(Body):
    """Stops the turn of a request, or without `request` the turn that runs; waits up to `wait` seconds for its end.

    `token`: only a turn with this fencing token, as in the notice `turn.started`.
    """

    request: Request_ | None = None
    token: Annotated[int, Field(ge=1, lt=2**53)] | None = None
    reason: str | None = None
    wait: Annotated[float, Field(ge=0, le=20)] = 5.0


class Stopped(Answer):
    """`state` is "stopped", "finished", "nothing ran", or "stopping" if the turn still runs after `wait` seconds.

    `version` is that of the turn's commit, null if it wrote nothing or that is unknown.
    """

    state: str
    version: int | None


async def stop(asked: Asked, given: Stop) -> Response:
    """Stop a turn, wherever it runs."""
    session = records.handle(asked, "session")
    done = await session.stop(given.request, token=given.token, reason=given.reason, wait=given.wait)
    return answer({"state": done.state, "version": done.version})


# The inbox


class Post(Body):
    """A message for a turn of the conversation. `request_id` replaces the header Idempotency-Key.

    With a `handler`, a worker that has it begins a turn for the message; a conversation keeps its first handler.
    """

    message: Values
    handler: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = None
    request_id: Request_ | None = None


class Posted(Answer):
    """The number of the input, the same one if the request is repeated."""

    number: int


class InputShown(Answer):
    """An input that waits; `time` is when it was accepted, in seconds since 1970.

    A wake has its name as `wake`, when it was due as `time`, and `every` if it repeats after this many seconds.
    """

    number: int
    time: float
    request_id: str | None
    message: Values
    wake: str | None
    every: float | None


class Inbox(Answer):
    """The inputs that wait for a turn, in the order in which they were accepted."""

    inputs: list[InputShown]


async def post(asked: Asked, given: Post) -> Response:
    """Leave a message for a turn, even while another one runs. The Location is where that turn is followed."""
    key = records.key_of(asked)
    if key is not None and given.request_id not in (None, key):
        raise InvalidValue("give request_id or Idempotency-Key, not both")
    session = records.handle(asked, "session")
    request_id = given.request_id if key is None else key
    number = await posted(asked, session, given.message, request_id, given.handler)
    place = asked.request.url.path.removesuffix("/inbox") + "/output"
    followed = "" if request_id is None else f"?request={quote(request_id, safe='')}"
    return answer({"number": number}, 202, headers={"Location": place + followed})


async def posted(
    asked: Asked, session: Any, message: dict[str, Any], request_id: str | None, handler: str | None = None
) -> int:
    """Leave a message for a turn of a session that exists; its number. Raises NotFound and Deleted."""
    await begun(asked, session)
    number: int = await session.post(message, request_id=request_id, handler=handler)
    return number


async def begun(asked: Asked, session: Any) -> None:
    """Return if the session exists, or if an input begins it again. Raises NotFound and Deleted."""
    context = context_of(session)
    await records.comes_back(asked, context)
    entry = await context.read(field=VERSION)
    if not (entry.deleted and context.begins_again):
        records.there(entry, context)


async def read_inbox(asked: Asked) -> Response:
    """Read the inputs that wait."""
    session = records.handle(asked, "session")
    return answer({"inputs": [shown(each) for each in await session.inbox()]})


def shown(each: Input) -> dict[str, Any]:
    """An input as an InputShown."""
    return {
        "number": each.number,
        "time": each.time,
        "request_id": each.request_id,
        "message": conversations.line(each.message)["message"],
        "wake": each.wake,
        "every": each.every,
    }


class Withdrawn(Answer):
    """`withdrawn` is false if the input was no longer there."""

    withdrawn: bool


async def withdraw(asked: Asked) -> Response:
    """Take an input out of the inbox."""
    session = records.handle(asked, "session")
    return answer({"withdrawn": await session.withdraw(asked.request.path_params["number"])})
