"""Who asks, and what they may. Law: a request has a caller before anything of the store's is done for it.

A caller acts within one tenant, which is a prefix of ids: all records, users and tasks of a tenant have ids that begin
with it, and a caller of a tenant is refused every other id before a server is asked, so that the answer says nothing
about whether that exists.

A tenant may lie within another one, as `acme:eu:` within `acme:`. Callers of both count for `acme:`: its admin makes
tokens of tenants within it, and each would else have the limits of a tenant of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

from distributed_state.values.access_tokens import RIGHTS, Right
from distributed_state.values.model import SCOPES, unescape
from distributed_state.values.results import Event

_DEEPEST = 8  # tenants within each other that are counted by themselves; one that lies deeper counts for these


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who was recognized: `actor` is what the history shows; `prefix` "" is every tenant.

    `credential` is what it was recognized by, as far as that outlives a request: two may have one actor.
    """

    actor: str = ""
    prefix: str = ""
    rights: frozenset[Right] = frozenset(RIGHTS)
    credential: str = ""

    @property
    def token(self) -> str | None:
        """The id of the access token that it was recognized by, if that was one."""
        kind, _, id = self.credential.partition(":")
        return id if kind == "token" else None

    @property
    def tenants(self) -> tuple[str, ...]:
        """The prefixes for which it counts, the uppermost first: its own, and those that this lies within."""
        return _within(self.prefix)

    @property
    def tenant(self) -> str:
        """The uppermost of these, "" for callers of all tenants."""
        return self.tenants[0] if self.prefix else ""

    @property
    def parties(self) -> tuple[str, ...]:
        """The same as names of parties; without a tenant its actor is the party. Of one text the two are different."""
        return tuple(f"prefix {each}" for each in self.tenants) or (f"actor {self.actor}",)

    @property
    def party(self) -> str:
        """The party that shares what is shared out: the uppermost tenant, or where there is none the actor."""
        return self.parties[0]

    def hears(self, event: Event) -> bool:
        """Whether an event may be passed on: of a tenant's records only, and of nothing that is no record."""
        scope, _, name = event.subject.partition(":")
        return not self.prefix or (scope in SCOPES and unescape(name).startswith(self.prefix))


@lru_cache(maxsize=1000)
def _within(prefix: str) -> tuple[str, ...]:
    found = [prefix[: at + 1] for at, letter in enumerate(prefix) if letter == ":" or at == len(prefix) - 1]
    return tuple(found[:_DEEPEST])


CALLER: ContextVar[Caller | None] = ContextVar("distributed_state_caller", default=None)
"""Of the request that is being served; None outside of any: then it is the service's own work."""


@contextmanager
def serving(caller: Caller | None) -> Iterator[None]:
    """What is called inside is done for this caller.

    For None it is the service's own work, which must itself leave out what whoever asked may not have.
    """
    before = CALLER.set(caller)
    try:
        yield
    finally:
        CALLER.reset(before)
