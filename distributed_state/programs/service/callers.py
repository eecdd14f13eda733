"""Who asks, and what they may. Law: a request has a caller before anything of the store's is done for it.

A caller acts within one tenant, which is a prefix of ids: all records, users and tasks of a tenant have ids that begin
with it, and a caller of a tenant is refused every other id before a server is asked, so that the answer says nothing
about whether that exists.

A tenant may lie within another one, as `acme:eu:` within `acme:`. Callers of both count for `acme:`: its admin makes
tokens of tenants within it, and each would else have the limits of a tenant of its own.

The policy is asked by the store itself for every record that a request names, whichever operation names it: an
operation that forgets to check cannot give a tenant what is another's. What no line of it allows is denied. Outside of
any request there is no caller: then it is the service's own work, such as ending sessions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

from distributed_state.errors import AccessDenied, ConfigurationError
from distributed_state.records.access import MOVES, VERSION, Policy, Request
from distributed_state.records.context import context_of
from distributed_state.store.asyncio import AsyncStateStore
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
        """Whether it may receive an event: a caller of a tenant only those of the tenant's records."""
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
    """Serve this caller inside the block.

    None is the service's own work, which must itself leave out what the client may not have.
    """
    before = CALLER.set(caller)
    try:
        yield
    finally:
        CALLER.reset(before)


# The policy


_NOBODY = Caller(prefix="nobody:", rights=frozenset())


class _Recognized(Exception):
    """Raised by our policy for `_NOBODY`, so that it is distinguished from another policy that denies."""


def callers_policy(also: Policy | None = None) -> Policy:
    """The `access` policy for the store of a service; with a policy of your own, both must allow it."""

    def policy(request: Request) -> bool:
        caller = CALLER.get()
        if caller is _NOBODY:
            raise _Recognized
        if caller is not None and not (_in_tenant(caller.prefix, request) and _has_right(caller, request)):
            return False
        return also is None or also(request)

    return policy


def _in_tenant(prefix: str, request: Request) -> bool:
    if not prefix:
        return True
    if request.user is not None and not request.user.startswith(prefix):
        return False
    if request.id is not None:
        return request.id.startswith(prefix)
    # Many records: those of one of its users, or a listing of ids that begin so.
    return request.user is not None or (request.prefix is not None and request.prefix.startswith(prefix))


def _has_right(caller: Caller, request: Request) -> bool:
    rights = caller.rights
    if request.action == "read":
        # A writer is answered with the new version and phase.
        return "read" in rights or ("write" in rights and request.field in (VERSION, MOVES))
    if request.action == "write":
        # Of a record as a whole: deleting it is one of those writes.
        return "write" in rights or ("delete" in rights and request.id is not None and request.field is None)
    if request.action == "lock":
        return "write" in rights
    # Erasing a record and forgetting a user; what is about the whole store takes the right itself.
    about_some = request.id is not None or request.user is not None
    return "admin" in rights or ("delete" in rights and about_some)


def require_policy(store: AsyncStateStore) -> None:
    """Raise ConfigurationError if the store was opened without `callers_policy`: every tenant would read all."""
    try:
        with serving(_NOBODY):
            context_of(store.session("somebody:s")).allow("read", None)
    except AccessDenied as error:
        if isinstance(error.__cause__, _Recognized):
            return
    raise ConfigurationError("a service with callers needs a store that was opened with access=callers_policy()")
