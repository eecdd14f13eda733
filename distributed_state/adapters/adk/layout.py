"""How a session of ADK is stored. Law: whatever ADK calls something, its name here belongs to nothing else.

| ADK | here |
|---|---|
| session (app, user, id) | `store.session("app/user/id", user="app/user")`, its events as messages |
| keys `k` of it | field `k` of that |
| keys `user:k` of (app, user) | field `k` of `store.user("app/user")` |
| keys `app:k` of app | field `k` of `store.app("app")` |
| keys `temp:k` | nowhere |

A session has two fields more: `adk:updated`, the time of its last event, by which ADK orders sessions, and
`adk:revision`, how many events continued its conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from distributed_state import InvalidValue

UPDATED = "adk:updated"
REVISION = "adk:revision"
_OURS = "adk:"
_APP, _USER, _TEMP = "app:", "user:", "temp:"


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
