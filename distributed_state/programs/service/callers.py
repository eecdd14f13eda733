"""Who asks, and what they may. Law: a request has a caller before anything of the store's is done for it.

A caller acts within one tenant, which is a prefix of ids: all records, users and tasks of a tenant have ids that begin
with it, and a caller of a tenant is refused every other id before a server is asked, so that the answer says nothing
about whether that exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from distributed_state.values.access_tokens import RIGHTS, Right
from distributed_state.values.model import SCOPES, unescape
from distributed_state.values.results import Event


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
    def party(self) -> str:
        """Who shares what is shared out: a tenant, or where there is none an actor; of one text they are two."""
        return f"prefix {self.prefix}" if self.prefix else f"actor {self.actor}"

    def hears(self, event: Event) -> bool:
        """Whether an event may be passed on: of a tenant's records only, and of nothing that is no record."""
        scope, _, name = event.subject.partition(":")
        return not self.prefix or (scope in SCOPES and unescape(name).startswith(self.prefix))


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
