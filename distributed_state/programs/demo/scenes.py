"""The steps of the lifecycle demo. Law: a step is one value: in words, as code, and as the command to a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NAMES = ("ada", "ben", "cleo")
VICTIM = "cleo"


@dataclass(frozen=True, slots=True)
class Step:
    """Something that one replica does. `hook` then runs on each that is alive; "" if the step causes no event."""

    who: str
    words: str
    code: str
    call: str
    arguments: dict[str, Any]
    hook: str = ""


def _create(who: str, id: str) -> Step:
    code = f'store.session("{id}").create()'
    return Step(who, f"creates the conversation {id}", code, "create", {"conversation": id}, "on_new_conversation")


def _write(who: str, id: str, note: str) -> Step:
    code = f'store.session("{id}").append(...)'
    return Step(who, f'writes two messages and the note "{note}"', code, "write", {"conversation": id, "note": note})


def _switch(who: str, id: str, previous: str) -> Step:
    code = f'store.session("{id}").switch(previous_id="{previous}")'
    arguments = {"conversation": id, "previous": previous}
    return Step(who, f"switches from {previous} to {id}", code, "switch", arguments, "on_conversation_switched")


def _clear(who: str, id: str) -> Step:
    code = f'store.session("{id}").clear(messages=True)'
    return Step(who, f"clears {id}", code, "clear", {"conversation": id}, "on_new_conversation")


def _delete(who: str, id: str) -> Step:
    code = f'store.delete("{id}")'
    return Step(who, f"deletes {id}", code, "delete", {"conversation": id}, "on_conversation_deleted")


def _configure(who: str, model: str) -> Step:
    code = f'store.reload_config({{"model": "{model}"}})'
    return Step(who, "gives the fleet a new config", code, "reload_config", {"model": model}, "on_config_update")


TOGETHER = (
    _create("ada", "trip"),
    _write("ben", "trip", "window seat"),
    _create("cleo", "food"),
    _switch("ben", "trip", "food"),
    _clear("cleo", "food"),
    _delete("ada", "trip"),
    _configure("ben", "large"),
)
AWAY = (
    _create("ada", "hotel"),
    _switch("ben", "hotel", "food"),
    _delete("ada", "food"),
    _configure("ben", "tiny"),
)
AGAIN = (_clear(VICTIM, "hotel"),)
