"""Ready tools on a session's state and its user's. Law: each is a plain function, and an example of one.

Design: section 13.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Annotated, Any

from pydantic import Field, JsonValue

from distributed_state.conversation.tools import tool
from distributed_state.errors import InvalidValue

State = MutableMapping[str, Any]
Name = Annotated[str, Field(min_length=1, max_length=200, description="Its name.")]


@tool
def count(state: State, name: Name = "counter", by: int = 1) -> int:
    """Add to a counter of this conversation and return the sum."""
    state[name] = _number(state, name) + by
    return int(state[name])


@tool
def reset(state: State, name: Name = "counter") -> int:
    """Set a counter of this conversation to zero and return what it was."""
    before = _number(state, name)
    state[name] = 0
    return before


@tool
def note(state: State, key: Name, text: str) -> str:
    """Keep a note for later in this conversation."""
    state["notes"] = {**state.get("notes", {}), key: text}
    return f"noted under {key}"


@tool
def get_preference(user_state: State, name: Name) -> Any:
    """Look up what the user prefers; null if nothing is known."""
    return user_state.get("preferences", {}).get(name)


@tool
def set_preference(user_state: State, name: Name, value: JsonValue) -> str:
    """Remember what the user prefers, in all conversations."""
    user_state["preferences"] = {**user_state.get("preferences", {}), name: value}
    return f"{name} is remembered"


@tool
def user_statistics(state: State, user_state: State) -> dict[str, Any]:
    """Sum up what is known: counters of this conversation, notes taken, and the user's preferences."""
    counters = {key: value for key, value in state.items() if isinstance(value, int) and not isinstance(value, bool)}
    return {
        "counters": counters,
        "notes": len(state.get("notes", {})),
        "preferences": user_state.get("preferences", {}),
        "conversations": user_state.get("conversations", 0),
    }


TOOLBOX = (count, reset, note, get_preference, set_preference, user_statistics)
"""Tools that most agents can use: counters and notes of the session, preferences and figures of its user."""


def _number(state: State, name: str) -> int:
    value = state.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidValue(f"{name!r} is no counter, it holds {value!r:.80}")
    return value
