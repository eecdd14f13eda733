"""The policy of a store that is served: who may what. Law: what no line here allows is denied.

It is asked by the store itself, before any server is, for every record that a request names, whichever operation names
it: an operation that forgets to check cannot give a tenant what is another's. Outside of any request there is no
caller: then it is the service's own work, such as ending sessions.
"""

from __future__ import annotations

from distributed_state.errors import AccessDenied, ConfigurationError
from distributed_state.programs.service.callers import CALLER, Caller, serving
from distributed_state.records.access import MOVES, VERSION, Policy, Request
from distributed_state.records.context import context_of
from distributed_state.store.asyncio import AsyncStateStore

_NOBODY = Caller(prefix="nobody:", rights=frozenset())


class _Recognized(Exception):
    """Raised by our policy for `_NOBODY`, so that it is told from a policy of somebody else's that denies."""


def callers_policy(also: Policy | None = None) -> Policy:
    """What to give as `access` to the store of a service; with a policy of your own, both must allow it."""

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
        # Who writes is told the version and the phase that came of it.
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
