"""What bodies and answers are made of. Law: a body names nothing unknown, and its values pass as they were sent.

Values of users are looked at by the store alone: they are neither copied nor converted here, so that a large integer or
an odd string comes back as it was sent.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from distributed_state.errors import InvalidValue
from distributed_state.values import bytes_as_text
from distributed_state.values.presence import ABSENT, PRESENT
from distributed_state.values.turn_times import TurnTimes


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


def _object(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("is an object")
    return value


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("is a text")
    return value


def _id(value: Any) -> Any:
    if not 1 <= len(_text(value)) <= _LONGEST:
        raise ValueError(f"has 1 to {_LONGEST} characters")
    return value


def _messages(value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError("is a list of messages as {'role': 'user', 'content': 'hi'}")
    return value


_VALUES = {"type": "object", "additionalProperties": True}
_ENCODED = {"type": "object", "additionalProperties": {"type": "string", "contentEncoding": "base64"}}
_MESSAGE = {"type": "object", "properties": {"role": {"type": "string"}}, "additionalProperties": True}

Values = Annotated[dict[str, Any], PlainValidator(_object), WithJsonSchema(_VALUES)]
"""JSON values by name."""
Encoded = Annotated[dict[str, Any], PlainValidator(_object), WithJsonSchema(_ENCODED)]
"""Bytes by name, in base64: they stand beside the values, as JSON has none."""
Messages = Annotated[
    list[dict[str, Any]], PlainValidator(_messages), WithJsonSchema({"type": "array", "items": _MESSAGE})
]
"""Messages in the fields of the chat format; unknown ones are kept."""
_LONGEST = 1024
Id = Annotated[str, PlainValidator(_id), WithJsonSchema({"type": "string", "minLength": 1, "maxLength": _LONGEST})]
Name = Annotated[str, PlainValidator(_text), WithJsonSchema({"type": "string"})]
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
    return {"bytes": bytes_as_text.text_of(value)} if isinstance(value, bytes) else {"value": value}


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
    return bytes_as_text.together(given or {}, encoded or {})


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
