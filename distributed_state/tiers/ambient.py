"""Settings of the caller's context: the actor, and the durability of changes. Law: the innermost `with` wins.

Contexts are those of `contextvars`, so this applies exactly to the work started inside: a task inherits its creator's
context; a new thread starts without one, unless `asyncio.to_thread` or `contextvars.copy_context().run` starts it.

Design: sections 4, 14.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from distributed_state.errors import InvalidValue
from distributed_state.settings import Settings
from distributed_state.values.levels import Level
from distributed_state.values.model import escape

_MOST = 1024
_actor: ContextVar[str] = ContextVar("distributed_state_actor", default="")
_levels: ContextVar[Mapping[int, Level] | None] = ContextVar("distributed_state_durability", default=None)


def noted(actor: Any) -> str:
    """Convert an actor to the form that is stored in commits."""
    if not isinstance(actor, str) or len(actor) > _MOST:
        raise InvalidValue(f"an actor is a str of at most {_MOST} characters, not {actor!r:.80}")
    return escape(actor)


def actor() -> str:
    """The actor of this context, '' if none was set."""
    return _actor.get()


def acting_as(actor: str) -> AbstractContextManager[None]:
    """Record `actor` with each commit made inside `with`."""
    name = noted(actor)
    if not name:
        raise InvalidValue("an actor is a non-empty str")
    return _set(_actor, name)


def level(settings: Settings) -> Level | None:
    """The level that this context sets for the store with these settings, None if it does not set one."""
    levels = _levels.get()
    return None if levels is None else levels.get(id(settings))


def durable(settings: Settings, level: Level) -> AbstractContextManager[None]:
    """Require this level for each commit made inside `with` to the store with these settings."""
    return _set(_levels, {**(_levels.get() or {}), id(settings): level})


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)
