"""Frozen values that travel between the tiers.

Law: the state of a record at a version is the result of `journal.fold` over its changes up to that version.

Design: section 1.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from itertools import repeat
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from distributed_state.errors import Deleted, InvalidValue, TooLarge

Scope = Literal["session", "user", "app", "task"]
SCOPES: tuple[Scope, ...] = ("session", "user", "app", "task")
MAX_ID_BYTES = 1024  # an index row of PostgreSQL holds an id and an owner, in 2,704 bytes
MAX_PHASE = 200  # characters

# Reserved hash fields start with '#'. These belong to the state, and are folded like a user's field.
PHASE = b"#phase"
OWNER = b"#owner"
DELETED = b"#deleted"
PARENT = b"#parent"
SCHEMA = b"#schema"
SEGMENTS = b"#segments"
START = b"#ms"
NEXT = b"#mn"
SUMMARY = b"#summary"  # of messages that are no longer sent to a model
# some field has or had a deadline; defaults were set
TIMED = b"#timed"
INITIALIZED = b"#initialized"
ITEMS = b"#items"  # the version that began the present layer of items, and the one below: item_window.lua
RESTORED = b"#restored"  # set by each rollback: the version whose state it is
LIFETIME = b"#lifetime"  # "idle_ms until_ms", 0 for none: how long it lives without a commit, and its latest end
# special tombstones: erase the record, with its forks or without
FORGET = "forget"
ERASE = "erase"
REPAIR = "repair"  # a change by a repair, which brings a whole state to SQL or leaves out lost messages
STATE_FIELDS = frozenset(
    {
        PHASE,
        OWNER,
        DELETED,
        PARENT,
        SEGMENTS,
        START,
        NEXT,
        SCHEMA,
        SUMMARY,
        TIMED,
        INITIALIZED,
        RESTORED,
        LIFETIME,
        ITEMS,
    }
)
REQUEST = b"#q"  # followed by the id of a request that was answered; its outcome
TIMES = REQUEST + b"#times "  # not a real field: its deletion carries a note in the name, see values/turn_times.py
INBOX = b"#b"  # counts of its inputs, as in inbox.lua; followed by a number: an input; by q and a tag: its number
FAILURE = b"#be"  # when and how the last turn of its handler failed: see values/schedule.py
SCHEDULE = b"#bh"  # its handler, and when it is due: see values/schedule.py
USAGE = b"#u"  # followed by the name of a model: the tokens that it used, see values/usage.py
TAG = b"##"  # followed by a tag of the record: see values/search.py


class Expiry(NamedTuple):
    """Why a session expired, "idle" or "lifetime", and when, in seconds since 1970.

    Its `#deleted` holds both; that of a record which was deleted on request, or by an earlier release, holds 1.
    """

    reason: str
    time: float

    @classmethod
    def read(cls, deleted: bytes | None) -> Expiry | None:
        """Parse a `#deleted` field; None if the record is live or was deleted on request."""
        found = _EXPIRY.fullmatch(deleted or b"")
        return found and cls(found[1].decode(), int(found[2]) / 1000)

    @property
    def stored(self) -> bytes:
        """The content of its `#deleted` field."""
        return b"%b %d" % (self.reason.encode(), round(self.time * 1000))


_EXPIRY = re.compile(rb"(idle|lifetime) (\d{1,18})")
_ENDED = {"idle": "idle for longer than session_idle allows", "lifetime": "as old as session_lifetime allows"}


def deleted_error(record: str, version: int, deleted: bytes | None) -> Deleted:
    """The error for a record with this `#deleted` field."""
    expiry = Expiry.read(deleted)
    if expiry is None:
        return Deleted(f"{record[:200]}: deleted at version {version}", version=version)
    moment = datetime.fromtimestamp(expiry.time, UTC).isoformat(timespec="seconds")
    text = f"{record[:200]}: expired at {moment}, {_ENDED[expiry.reason]} (version {version})"
    advice = 'begin it again with revive=True or create(), or every session with the setting expired="begin again"'
    return Deleted(f"{text}; {advice}", version=version, expired=expiry.time)


def is_state(name: bytes) -> bool:
    """Whether a stored field is part of the state; other reserved fields are internal to the tiers."""
    return name[:1] != b"#" or name in STATE_FIELDS or name[:2] in (REQUEST, TAG, INBOX, USAGE)


def is_input(name: bytes) -> bool:
    """Whether a stored field is an input that waits for a turn."""
    return name[:2] == INBOX and name[2:].isdigit()


def is_value(name: bytes) -> bool:
    """Whether a stored field holds user data: a field, the outcome of a request, an input, or a summary."""
    return name[:1] != b"#" or name == SUMMARY or name[:2] == REQUEST or is_input(name)


def is_kept(name: bytes) -> bool:
    """Whether a stored field stays as it is when an earlier state is restored: answered requests, the inbox, the usage.

    Otherwise a request would be applied again when its caller repeats it, and an input would be served twice.
    """
    return name[:2] in (REQUEST, INBOX, USAGE)


@dataclass(frozen=True, slots=True)
class Ref:
    """The address of a record: a scope and an id. `text` is its escaped form, the same in Redis and SQL."""

    scope: str
    id: str
    text: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise InvalidValue(f"scope {self.scope!r} is not one of {', '.join(SCOPES)}")
        if not isinstance(self.id, str) or not self.id:
            raise InvalidValue(f"an id must be a non-empty str, not {self.id!r}")
        refuse_pair(self.id, "id")
        # The length is checked first, because escaping 10 MB only to reject it would be work for an attacker.
        escaped = escape(self.id) if len(self.id) <= MAX_ID_BYTES else ""
        if not 0 < len(escaped.encode()) <= MAX_ID_BYTES:
            raise TooLarge(f"an id of {len(self.id)} characters takes more than {MAX_ID_BYTES} bytes when escaped")
        object.__setattr__(self, "text", f"{self.scope}:{escaped}")

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> Ref:
        """Parse the form that `text` has."""
        scope, _, name = text.partition(":")
        return cls(scope, unescape(name))


def is_storable(text: str) -> bool:
    """Whether every database can store the text: it has no NUL and no lone surrogate."""
    return not re.search("[\0\ud800-\udfff]", text)


_UNSAFE = re.compile("[%:\x00-\x1f\x7f\ud800-\udfff]")
_ESCAPED = re.compile("%(u[0-9A-F]{4}|[0-9A-F]{2})")


_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def has_pair(text: str) -> bool:
    """Whether a high surrogate precedes a low one. JSON reads such a pair back as one character, a different text."""
    return not text.isascii() and _PAIR.search(text) is not None


def refuse_pair(text: str, what: str) -> None:
    """Raise InvalidValue if JSON would change this text."""
    if has_pair(text):
        raise InvalidValue(f"{what} {text!r:.80}: two surrogates in a row, which JSON reads back as one character")


def escape(text: str) -> str:
    """Make text printable, free of ':' and storable in any database; different texts have different results."""
    return _UNSAFE.sub(lambda m: f"%{ord(m[0]):02X}" if ord(m[0]) < 256 else f"%u{ord(m[0]):04X}", text)


def log_fields(subject: str) -> dict[str, str]:
    """The `extra` of a log line about a subject: `record`, if the subject is a record's text, such as session:c1."""
    scope, colon, _ = subject.partition(":")
    return {"record": subject[:200]} if colon and scope in SCOPES else {}


def checked_phase(phase: Any) -> str:
    """Return a valid phase. Raises InvalidValue."""
    if not isinstance(phase, str) or not 0 < len(phase) <= MAX_PHASE:
        raise InvalidValue(f"a phase is a str of 1 to {MAX_PHASE} characters or None, not {phase!r:.80}")
    refuse_pair(phase, "phase")
    return phase


def unescape(text: str) -> str:
    """Undo `escape`."""
    return _ESCAPED.sub(lambda m: chr(int(m[1].lstrip("u"), 16)), text)


# Where pydantic stores a model's data. Setting these one by one costs a tenth of `model_construct`.
_OWN = vars(BaseModel)
_dict_of, _set_dict = _OWN["__dict__"].__get__, _OWN["__dict__"].__set__
_set_given = _OWN["__pydantic_fields_set__"].__set__
_set_extra = _OWN["__pydantic_extra__"].__set__
_set_private = _OWN["__pydantic_private__"].__set__
_is_absent = _OWN["__getattr__"]
# Decodes the stored bytes of a message, given its number; returns its fields, and its commit time if a mark has it.
ReadMessage = Callable[[bytes, int | None], tuple[dict[str, Any], float | None]]


def seconds_of(time: Any) -> Any:
    """The seconds since 1970 of a datetime; another value as it is. Raises ValueError for a time without a zone."""
    if not isinstance(time, datetime):
        return time
    if time.tzinfo is None:
        raise ValueError("a datetime needs a time zone, as in datetime.now(UTC)")
    return time.timestamp()


class Message(BaseModel):
    """One message of a conversation, in the field names of the OpenAI chat format; unknown fields are kept as they are.

    An entry that is not a chat message (a call or its result in the OpenAI Responses API, a framework's own data) has a
    `type` instead of a `role`.
    `content` is text, a list of parts, or None (a tool call). `timestamp` is in seconds since 1970; a datetime is
    converted. If the message was appended without one, reading it fills in the time of its commit by the server's
    clock. This time and the number are the store's knowledge, not part of the message: `to_dict()` and `==` leave them
    out.

    A message is read back exactly as it was given, so values that JSON would change are refused: bytes, tuples, a
    Decimal as a time.
    """

    # Slots, because private attributes make reading a message a third slower. `_unread` holds the reader and the stored
    # bytes of a message that is not decoded yet; such a message has no fields.
    __slots__ = ("_number", "_unread")
    # Strict: otherwise pydantic turns bytes into text, and a tuple into a list.
    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] | None = None
    content: str | list[Any] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    timestamp: float | None = None
    metadata: dict[str, Any] | None = Field(default_factory=dict)

    @field_validator("timestamp", mode="before")
    @classmethod
    def _as_seconds(cls, value: Any) -> Any:
        value = seconds_of(value)
        # Strict mode accepts anything with __float__, also a Decimal, and integers of any size.
        if value is not None and (not isinstance(value, (int, float)) or (type(value) is int and abs(value) > 2**53)):
            raise ValueError("a time is a float, in seconds since 1970, or a datetime")
        return value

    @model_validator(mode="after")
    def _has_role_or_type(self) -> Self:
        if self.role is None and not isinstance((self.__pydantic_extra__ or {}).get("type"), str):
            raise ValueError("a message has a role, or a type if it is not of a chat")
        return self

    @property
    def number(self) -> int | None:
        """The message's number in the conversation that it was read from; None if there is none, as for a copy."""
        return getattr(self, "_number", None)

    @classmethod
    def unread(cls, read: ReadMessage, stored: Sequence[bytes], numbers: Sequence[int | None]) -> list[Self]:
        """Messages that are decoded at first use; an error of `read` is raised then, and at each later use."""
        made = [*map(cls.__new__, repeat(cls, len(stored)))]
        # No Python loop here, because most messages of a long conversation are never decoded.
        deque(map(_set_number, made, numbers), 0)
        deque(map(_set_unread, made, zip(repeat(read), stored, numbers, strict=False)), 0)
        return made

    def looked_at(self) -> Self:
        """This message, decoded. Raises CorruptState or DecryptionFailed if it cannot be."""
        if not _dict_of(self):
            self._look()
        return self

    def _look(self) -> None:
        try:
            read, stored, number = _unread_of(self)
        except AttributeError:
            return  # pydantic is still constructing it
        if read is None:
            return  # another thread was faster
        said, time = read(stored, number)
        fields = {**_ABSENT, "metadata": {}, **said}
        extra = {name: fields.pop(name) for name in said if name not in _ABSENT} if len(fields) > len(_ABSENT) else {}
        if time is not None and "timestamp" not in said:
            fields["timestamp"] = time
        _set_given(self, set(said))
        _set_extra(self, extra)
        _set_private(self, None)
        # Last: a message with fields counts as complete. Two threads that decode it at once set the same fields.
        _set_dict(self, fields)
        _set_unread(self, (None, None, None))

    def _fields(self) -> dict[str, Any]:
        found: dict[str, Any] = _dict_of(self.looked_at())
        return found

    # Used by pydantic and `copy`. Attribute access is separate: Python looks into the dict, and then calls __getattr__.
    __dict__ = property(_fields, _set_dict)

    def to_dict(self) -> dict[str, Any]:
        """The fields that were given, as plain JSON values."""
        # Not getattr: an unknown field may have the name of a method.
        given = {**self.__dict__, **(self.__pydantic_extra__ or {})}
        names = self.model_fields_set
        return {name: value for name, value in given.items() if name in names}

    def _said(self) -> dict[str, Any]:
        said = {**self.__dict__, **(self.__pydantic_extra__ or {})}
        return said if "timestamp" in self.model_fields_set else {**said, "timestamp": None}

    def __eq__(self, other: object) -> bool:
        return self._said() == other._said() if isinstance(other, Message) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.role, self.content if isinstance(self.content, str) else None, self.tool_call_id))


def _attribute(message: Message, name: str) -> Any:
    message.looked_at()
    try:
        return object.__getattribute__(message, name)
    except AttributeError:
        return _is_absent(message, name)  # or it is one of the unknown fields


_ABSENT: dict[str, Any] = dict.fromkeys(Message.model_fields)
_set_number = vars(Message)["_number"].__set__
_unread_of, _set_unread = vars(Message)["_unread"].__get__, vars(Message)["_unread"].__set__
# Assigned here, so that type checkers know only the declared fields.
Message.__getattr__ = _attribute  # type: ignore[attr-defined]


class Presence(Enum):
    """A condition in `expect` instead of a value: ABSENT for a field that must not exist, PRESENT for one that must."""

    ABSENT = "absent"
    PRESENT = "present"

    def __repr__(self) -> str:
        return self.name


ABSENT = Presence.ABSENT
PRESENT = Presence.PRESENT
