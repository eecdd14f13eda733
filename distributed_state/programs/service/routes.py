"""What is served: one line for each operation. Law: an operation names the right that it needs.

The description of the interface is made from the same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from distributed_state.programs.service.callers import Caller, Right
from distributed_state.programs.service.limits import Limits
from distributed_state.store.asyncio import AsyncStateStore


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and all that answering it takes."""

    store: AsyncStateStore
    limits: Limits
    caller: Caller
    request: Request


Serve = Callable[[Asked], Coroutine[Any, Any, Response]]


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path: `path` as Starlette writes it."""

    method: str
    path: str
    right: Right
    serve: Serve
