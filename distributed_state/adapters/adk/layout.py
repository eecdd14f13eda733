"""How a session of ADK is stored and read. Law: whatever ADK calls something, its name here belongs to nothing else.

| ADK | here |
|---|---|
| session (app, user, id) | `store.session("app/user/id", user="app/user")`, its events as messages |
| keys `k` of it | field `k` of that |
| keys `user:k` of (app, user) | field `k` of `store.user("app/user")` |
| keys `app:k` of app | field `k` of `store.app("app")` |
| keys `temp:k` | nowhere |

A session has two fields more: `adk:updated`, the time of its last event, by which ADK orders sessions, and
`adk:revision`, how many events continued its conversation. An event that is read equals the one that was stored. What
is read is what the server has, and of one version of each record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from google.adk.events.event import Event
from google.adk.sessions.base_session_service import GetSessionConfig

from distributed_state import AsyncRecord, AsyncSession, AsyncStateStore, InvalidValue

UPDATED = "adk:updated"
REVISION = "adk:revision"
_OURS = "adk:"
_APP, _USER, _TEMP = "app:", "user:", "temp:"
_EVENT = "event"
# Parts of an event that a model does not read: its author, its time, and its changes to the state.
_ASIDE = {
    "id",
    "timestamp",
    "author",
    "invocationId",
    "branch",
    "isolationScope",
    "nodeInfo",
    "actions",
    "customMetadata",
}
_ASIDE_ACTIONS = {"stateDelta", "artifactDelta"}
_PAGE = 100
_ROUNDS = 20


def joined(*parts: str) -> str:
    """One id of several; two lists of parts never give the same. Raises InvalidValue for one that is no text."""
    for part in parts:
        if not isinstance(part, str):
            raise InvalidValue(f"an app's name, a user's id and a session's are str, not {part!r:.80}")
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in parts)


def trimmed(id: str) -> str:
    """A session's id, as ADK's own services take it."""
    if not isinstance(id, str):
        raise InvalidValue(f"a session's id is a str, not {id!r:.80}")
    return id.strip()


def parted(id: str) -> list[str]:
    """The parts of which `joined` made it."""
    return [part.replace("%2F", "/").replace("%25", "%") for part in id.split("/")]


def stored_name(key: str) -> str:
    """The field that holds a key of the state: of the same name, if that can be one and is not ours."""
    return f"%{key}" if not key or key[0] in "#%" or key.startswith(_OURS) else key


def state_of(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The state in these fields, each key behind a prefix."""
    return {
        prefix + (name[1:] if name[0] == "%" else name): value
        for name, value in fields.items()
        if not name.startswith(_OURS)
    }


def merged(session: Mapping[str, Any], user: Mapping[str, Any], app: Mapping[str, Any]) -> dict[str, Any]:
    """The state that a session shows, of the fields of the three records."""
    return {**state_of(session), **state_of(app, _APP), **state_of(user, _USER)}


@dataclass(frozen=True, slots=True)
class Delta:
    """A change of the state as fields of the records that hold it. What is `temp:` is in none."""

    session: dict[str, Any] = field(default_factory=dict)
    user: dict[str, Any] = field(default_factory=dict)
    app: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """The parts of a change as ADK has it."""
        delta = cls()
        for key, value in state.items():
            if key.startswith(_APP):
                delta.app[stored_name(key.removeprefix(_APP))] = value
            elif key.startswith(_USER):
                delta.user[stored_name(key.removeprefix(_USER))] = value
            elif not key.startswith(_TEMP):
                delta.session[stored_name(key)] = value
        return delta


# Events


def dumped(event: Event) -> dict[str, Any]:
    """The event as JSON values, as ADK writes it: bytes in base64, what JSON cannot hold as null or its `repr`."""
    found: dict[str, Any] = event.model_dump(mode="json", by_alias=True, exclude_none=True)
    return found


def changed(stored: dict[str, Any]) -> dict[str, Any]:
    """The changes that an event makes to the state."""
    found: dict[str, Any] = stored["actions"]["stateDelta"]
    return found


def continues(stored: dict[str, Any]) -> bool:
    """Whether the event goes on with the conversation; one that only changes state or artifacts does not.

    Whatever is not known to be aside continues it: a summary, a rewind, the state of an agent, an error.
    """
    said = {name for name, value in stored.items() if value not in (None, False)}
    acted = {name for name, value in stored["actions"].items() if value}
    return not (said <= _ASIDE and acted <= _ASIDE_ACTIONS)


def as_message(stored: dict[str, Any]) -> dict[str, Any]:
    """The message that holds an event."""
    return {"type": "adk.event", _EVENT: stored}


def as_events(messages: Iterable[dict[str, Any]]) -> list[Event]:
    """The events of a session; what somebody else said in it is none."""
    return [Event.model_validate(message[_EVENT]) for message in messages if _EVENT in message]


def holds(messages: Iterable[dict[str, Any]], stored: dict[str, Any]) -> bool:
    """Whether this very event is among the messages. Events that share an id alone are two."""
    return any(message.get(_EVENT) == stored for message in messages)


# Reading


@dataclass(frozen=True, slots=True)
class Seen:
    """A session at one version: its fields, and the messages that were asked for."""

    fields: dict[str, Any]
    messages: list[dict[str, Any]]


async def look(record: AsyncSession, config: GetSessionConfig | None) -> Seen | None:
    """The session as the server has it, with the events that `config` asks for; None if there is none."""
    version = await record.version(fresh=True)
    for _ in range(_ROUNDS):
        # From here on without a question to the server, as long as nobody writes.
        fields = await record.get_all()
        if UPDATED not in fields:
            return None
        messages = await _messages(record, config or GetSessionConfig())
        now = await record.version()
        if now == version:
            break
        version = now
    # Somebody writes all the while. Then the fields are the older part, and who appends is stale at most.
    return Seen(fields, messages)


async def _messages(record: AsyncSession, config: GetSessionConfig) -> list[dict[str, Any]]:
    if config.after_timestamp is None:
        return await record.raw_messages(last=config.num_recent_events)
    if config.num_recent_events is not None:
        page = await record.raw_messages(last=config.num_recent_events)
        return page[_first_after(page, config.after_timestamp) :]
    found: list[dict[str, Any]] = []
    before = None
    while page := await record.raw_messages(last=_PAGE, before=before):
        first = _first_after(page, config.after_timestamp)
        found = page[first:] + found
        if first or len(page) < _PAGE:
            break
        before = page[0]["number"]
    return found


def _first_after(page: list[dict[str, Any]], timestamp: float) -> int:
    """How many of a page, counted from its beginning, end with an event that is older."""
    for at in range(len(page), 0, -1):
        if page[at - 1].get("event", {}).get("timestamp", timestamp) < timestamp:
            return at
    return 0


async def newest(records: Iterable[AsyncRecord]) -> list[dict[str, Any]]:
    """The fields of records as the server has them now; what is asked at once leaves in one write."""
    many = list(records)
    found: list[dict[str, Any]] = []
    for at in range(0, len(many), _PAGE):
        found += await asyncio.gather(*(record.get_all(fresh=True) for record in many[at : at + _PAGE]))
    return found


async def listed(store: AsyncStateStore, app: str, user: str | None) -> list[tuple[str, str, str]]:
    """The sessions of an app, or of one of its users: each its app, user and id."""
    names = [app] if user is None else [app, user]
    # With an owner, who may see only what is their own may ask.
    owner = None if user is None else joined(*names)
    found: list[tuple[str, str, str]] = []
    after = None
    # In the order of ids, in which nothing that is written meanwhile moves past the pages.
    while page := await store.sessions(prefix=joined(*names, ""), user=owner, fresh=True, limit=1000, after=after):
        parts = [parted(info.id) for info in page]
        # A name with more parts is not ADK's: somebody forked a session to a name below its own.
        found += [(each[0], each[1], each[2]) for each in parts if len(each) == len(("app", "user", "id"))]
        after = page[-1].cursor
    return found
