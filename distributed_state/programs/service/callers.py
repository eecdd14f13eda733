"""Who asks, and what they may. Law: a request has a caller before anything of the store's is done for it.

A caller acts within one tenant, which is a prefix of ids: all records, users and tasks of a tenant have ids that begin
with it, and a caller of a tenant is refused every other id before a server is asked, so that the answer says nothing
about whether that exists.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from starlette.requests import Request

Right = Literal["read", "write", "delete", "events", "admin"]
RIGHTS: frozenset[Right] = frozenset(get_args(Right))


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who was recognized: `actor` is what the history shows; `prefix` "" is every tenant."""

    actor: str = ""
    prefix: str = ""
    rights: frozenset[Right] = RIGHTS


CALLER: ContextVar[Caller | None] = ContextVar("distributed_state_caller", default=None)
"""Of the request that is being served; None outside of any."""


class Authenticator(Protocol):
    """Recognizes callers."""

    async def caller(self, request: Request) -> Caller:
        """Who sent this request. Raises Unauthenticated if it does not say so, or not truly."""
        ...
