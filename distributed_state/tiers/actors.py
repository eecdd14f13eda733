"""Who acts: noted with every commit. Law: an actor belongs to a context, so it reaches exactly the work begun inside.

Contexts are those of `contextvars`: a task inherits its creator's; a new thread begins without one, unless it is
started by `asyncio.to_thread` or with `contextvars.copy_context().run`.

Design: section 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from distributed_state.errors import InvalidValue
from distributed_state.values.model import escape

_MOST = 1024
_present: ContextVar[str] = ContextVar("distributed_state_actor", default="")


def noted(actor: Any) -> str:
    """An actor in the form in which commits note it."""
    if not isinstance(actor, str) or len(actor) > _MOST:
        raise InvalidValue(f"an actor is a str of at most {_MOST} characters, not {actor!r:.80}")
    return escape(actor)


def present() -> str:
    """Who acts now, '' if nobody said."""
    return _present.get()


def acting_as(actor: str) -> AbstractContextManager[None]:
    """Note `actor` with what is committed inside; the innermost counts."""
    name = noted(actor)
    if not name:
        raise InvalidValue("an actor is a non-empty str")
    return _acting(name)


@contextmanager
def _acting(name: str) -> Iterator[None]:
    before = _present.set(name)
    try:
        yield
    finally:
        _present.reset(before)
