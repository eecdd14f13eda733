"""What an operation is, and what requests and answers are made of. Law: an operation names the right that it needs.

A body names nothing unknown, and its values pass as they were sent: values of users are looked at by the store alone.
They are neither copied nor converted here, so that a large integer or an odd string comes back as it was sent. The
description of the interface is made from the same types.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from distributed_state.errors import InvalidValue
from distributed_state.programs.service.budget import Budget
from distributed_state.programs.service.callers import Caller
from distributed_state.programs.service.limits import Limits, Quota, Rates
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.values import as_text
from distributed_state.values.access_tokens import Right
from distributed_state.values.model import ABSENT, PRESENT
from distributed_state.values.turn_times import TurnTimes

PREFIX = "/v1"
Serve = Callable[["Asked"], Coroutine[Any, Any, Response]]

IF_MATCH = "If-Match"
IF_NONE_MATCH = "If-None-Match"
IDEMPOTENCY_KEY = "Idempotency-Key"
LEASE = "Lease"
LAST_EVENT_ID = "Last-Event-ID"
SESSION = "X-Session-Id"
REQUEST_ID = "X-Request-Id"
CONDITIONS = (IF_MATCH, IF_NONE_MATCH, IDEMPOTENCY_KEY, LEASE)
"""Headers that change what a request means: an operation that does not take one refuses it, rather than ignore it."""
READ = (
    *("Authorization", "Content-Type", REQUEST_ID, LAST_EVENT_ID, SESSION, *CONDITIONS),
    *("Mcp-Session-Id", "Mcp-Protocol-Version", "Mcp-Method", "Mcp-Name"),
)
"""Headers of a request that a web page may send. X-Actor is none of them: it is set by what knows who is asking."""
SENT = (
    *("ETag", "Link", "Location", REQUEST_ID, "Retry-After", "RateLimit", "RateLimit-Policy", "WWW-Authenticate"),
    "Mcp-Session-Id",
)
"""Headers of an answer that say more than its body."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path: `path` as Starlette writes it.

    `query` and `body` are what it takes, `answer` what it gives with `status`; `headers` those of CONDITIONS that it
    takes. `media` is the type of the answer. Without a `right` what is served asks for rights itself.

    `copies` says how often an answer is in memory while it is made, and `kind` which of them are about as large, beside
    those of one path and record.
    """

    method: str
    path: str
    right: Right | None
    serve: Serve
    summary: str = ""
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    status: int = 200
    headers: tuple[str, ...] = ()
    media: str = "application/json"
    copies: int | None = None
    kind: Callable[[Request], tuple[str, ...]] = lambda _: ()


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and all that answering it takes."""

    store: AsyncStateStore
    limits: Limits
    caller: Caller
    request: Request
    quota: Quota
    rates: Rates
    budget: Budget


# What requests bring, and what answers hold


class Body(BaseModel):
    """What a request brings."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Run(Body):
    """One run of a tool, or one call of a model, and the seconds that it took."""

    kind: Literal["tool", "model"]
    name: str = Field(min_length=1, max_length=200)
    seconds: float = Field(ge=0, le=1e9)


class Query(BaseModel):
    """What stands behind the ? of a request: texts, which are read as what is wanted."""

    model_config = ConfigDict(extra="forbid")


class Answer(BaseModel):
    """What an answer holds. It is a description: answers are not validated before they are sent."""

    model_config = ConfigDict(extra="forbid")


def _is_object(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("is an object")
    return value


def _is_text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("is a text")
    return value


def _is_id(value: Any) -> Any:
    if not 1 <= len(_is_text(value)) <= _LONGEST:
        raise ValueError(f"has 1 to {_LONGEST} characters")
    return value


def _are_messages(value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError("is a list of messages as {'role': 'user', 'content': 'hi'}")
    return value


_VALUES = {"type": "object", "additionalProperties": True}
_ENCODED = {"type": "object", "additionalProperties": {"type": "string", "contentEncoding": "base64"}}
_MESSAGE = {"type": "object", "properties": {"role": {"type": "string"}}, "additionalProperties": True}

Values = Annotated[dict[str, Any], PlainValidator(_is_object), WithJsonSchema(_VALUES)]
"""JSON values by name."""
Encoded = Annotated[dict[str, Any], PlainValidator(_is_object), WithJsonSchema(_ENCODED)]
"""Bytes by name, in base64: they stand beside the values, as JSON has none."""
Messages = Annotated[
    list[dict[str, Any]], PlainValidator(_are_messages), WithJsonSchema({"type": "array", "items": _MESSAGE})
]
"""Messages in the fields of the chat format; unknown ones are kept."""
_LONGEST = 1024
Id = Annotated[str, PlainValidator(_is_id), WithJsonSchema({"type": "string", "minLength": 1, "maxLength": _LONGEST})]
Name = Annotated[str, PlainValidator(_is_text), WithJsonSchema({"type": "string"})]
"""Any name that the store takes. Lone surrogates are among them, which pydantic does not take for text."""
Span = Annotated[float, Field(ge=0.001, le=3e9)]
"""Seconds that a conversation may live."""
Ttl = Annotated[float, Field(gt=0, le=1e9)]
"""Seconds that a field is there."""
Label = Annotated[str, Field(min_length=1, max_length=500)]
Texts = dict[Name, list[Name]]
Version = Annotated[int, Field(ge=0, lt=2**63)]
Limit = Annotated[int, Field(ge=1, le=1000)]


class Versioned(Answer):
    """The record's version, as this made it."""

    version: int


class Begun(Answer):
    """A record that began."""

    id: str
    version: int


class Written(Answer):
    """What a write came to: the new version; `repeated` if its Idempotency-Key was answered before."""

    version: int
    repeated: bool


def value_shown(value: Any) -> dict[str, Any]:
    """One value as an answer has it."""
    return {"bytes": as_text.text_of(value)} if isinstance(value, bytes) else {"value": value}


def expected(expect: Values | None, absent: list[str], present: list[str]) -> dict[str, Any]:
    """What fields are to hold before. Raises InvalidValue."""
    found = dict(expect or {})
    for names, word in (absent, ABSENT), (present, PRESENT):
        for name in names:
            if name in found:
                raise InvalidValue(f"{name!r:.80}: two things are expected of it")
            found[name] = word
    return found


def together(given: dict[str, Any] | None, encoded: dict[str, Any] | None) -> dict[str, Any]:
    """Values and bytes as the store takes them. Raises InvalidValue."""
    return as_text.together(given or {}, encoded or {})


class Times(Answer):
    """Where the time of a turn went, in seconds: `total` is until its commit was sent, `commit` what that took.

    `lock` was waited for the lease, `read` for Redis and SQL, `elsewhere` is what nobody measured. `runs` are the 12
    slowest of its tools and models, `more` that took `more_seconds` together. `commit` is null in a history.
    """

    total: float
    lock: float
    read: float
    elsewhere: float
    runs: list[Run]
    more: int
    more_seconds: float
    commit: float | None


def times_shown(times: TurnTimes | None) -> dict[str, Any] | None:
    """The times of a turn as they are answered."""
    return None if times is None else asdict(times)
