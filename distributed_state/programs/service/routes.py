"""What is served: one line for each operation. Law: an operation names the right that it needs.

The description of the interface is made from the same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from distributed_state.programs.service.budget import Budget
from distributed_state.programs.service.callers import Caller
from distributed_state.programs.service.limits import Limits
from distributed_state.programs.service.quotas import Quota, Rates
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.values.access_tokens import Right


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and all that answering it takes."""

    store: AsyncStateStore
    limits: Limits
    caller: Caller
    request: Request
    quota: Quota
    rates: Rates
    budget: Budget


PREFIX = "/v1"
Serve = Callable[[Asked], Coroutine[Any, Any, Response]]

IF_MATCH = "If-Match"
IF_NONE_MATCH = "If-None-Match"
IDEMPOTENCY_KEY = "Idempotency-Key"
LEASE = "Lease"
LAST_EVENT_ID = "Last-Event-ID"
SESSION = "X-Session-Id"
REQUEST_ID = "X-Request-Id"
CONDITIONS = (IF_MATCH, IF_NONE_MATCH, IDEMPOTENCY_KEY, LEASE)
"""Headers that change what a request means: an operation that does not take one refuses it, rather than ignore it."""
READ = (
    *("Authorization", "Content-Type", REQUEST_ID, LAST_EVENT_ID, SESSION, *CONDITIONS),
    *("Mcp-Session-Id", "Mcp-Protocol-Version", "Mcp-Method", "Mcp-Name"),
)
"""Headers of a request that a web page may send. X-Actor is none of them: it is set by what knows who is asking."""
SENT = (
    *("ETag", "Link", "Location", REQUEST_ID, "Retry-After", "RateLimit", "RateLimit-Policy", "WWW-Authenticate"),
    "Mcp-Session-Id",
)
"""Headers of an answer that say more than its body."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path: `path` as Starlette writes it.

    `query` and `body` are what it takes, `answer` what it gives with `status`; `headers` those of CONDITIONS that it
    takes. `media` is the type of the answer. Without a `right` what is served asks for rights itself.

    `copies` says how often an answer is in memory while it is made, and `kind` which of them are about as large, beside
    those of one path and record.
    """

    method: str
    path: str
    right: Right | None
    serve: Serve
    summary: str = ""
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    status: int = 200
    headers: tuple[str, ...] = ()
    media: str = "application/json"
    copies: int | None = None
    kind: Callable[[Request], tuple[str, ...]] = lambda _: ()
