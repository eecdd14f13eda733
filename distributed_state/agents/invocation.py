"""What the running hook or command is about. Law: it belongs to the context of the call, as `contextvars` have it.

Design: section 12.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from distributed_state.agents.blocking_deleted_state import LastState
from distributed_state.agents.deleted_state import AsyncLastState


@dataclass(frozen=True, slots=True)
class Invocation:
    """A conversation, with its last state if it was deleted, and the folder that a command was called from.

    `runner` is what runs the hook, None for a command that no hook called.
    """

    runner: object = None
    conversation_id: str = ""
    last_state: AsyncLastState | LastState | None = None
    directory: str = ""


NONE = Invocation()
_present: ContextVar[Invocation] = ContextVar("distributed_state_invocation", default=NONE)


def present() -> Invocation:
    """The innermost hook or command that the caller runs in; NONE outside of any."""
    return _present.get()


@contextmanager
def inside(invocation: Invocation) -> Iterator[None]:
    """Make it the present one until the end of `with`."""
    token = _present.set(invocation)
    try:
        yield
    finally:
        _present.reset(token)
