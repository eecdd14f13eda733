"""Events of ADK as messages of a session. Law: an event that is read equals the one that was stored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.adk.events.event import Event

_EVENT = "event"
# What an event may hold and yet say nothing that a model reads: who wrote it, when, and what it does to the state.
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


def dumped(event: Event) -> dict[str, Any]:
    """The event as JSON values, as ADK writes it: bytes in base64, what JSON cannot hold as null or its `repr`."""
    found: dict[str, Any] = event.model_dump(mode="json", by_alias=True, exclude_none=True)
    return found


def changed(stored: dict[str, Any]) -> dict[str, Any]:
    """What an event does to the state."""
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
