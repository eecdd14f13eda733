"""What a caller's context says of its changes: who acts, and how durable they must be. Law: the innermost `with` wins.

Contexts are those of `contextvars`, so that this reaches exactly the work begun inside: a task inherits its creator's;
a new thread begins without one, unless it is started by `asyncio.to_thread` or `contextvars.copy_context().run`.

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
    """An actor in the form in which commits note it."""
    if not isinstance(actor, str) or len(actor) > _MOST:
        raise InvalidValue(f"an actor is a str of at most {_MOST} characters, not {actor!r:.80}")
    return escape(actor)


def actor() -> str:
    """The actor of this context, '' if none was named."""
    return _actor.get()


def acting_as(actor: str) -> AbstractContextManager[None]:
    """Note `actor` with each commit that is made inside."""
    name = noted(actor)
    if not name:
        raise InvalidValue("an actor is a non-empty str")
    return _set(_actor, name)


def level(settings: Settings) -> Level | None:
    """The level that this context names for the store of these settings, None if it names none."""
    levels = _levels.get()
    return None if levels is None else levels.get(id(settings))


def durable(settings: Settings, level: Level) -> AbstractContextManager[None]:
    """Have each commit that is made inside, to the store of these settings, reach this level."""
    return _set(_levels, {**(_levels.get() or {}), id(settings): level})


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)
