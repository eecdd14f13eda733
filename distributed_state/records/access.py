"""Asks the store's access policy. Law: it is asked before any server, and any answer other than True denies.

Design: section 17.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from distributed_state.errors import AccessDenied, ConfigurationError
from distributed_state.values.model import (
    INITIALIZED,
    PHASE,
    SEGMENTS,
    START,
    SUMMARY,
    TAG,
    TIMED,
    Ref,
    is_kept,
    unescape,
)

Action = Literal["read", "write", "lock", "admin"]
MESSAGES = "#messages"
MOVES = "#phase"
ITEMS = "#items"
VERSION = "#version"
TAGS = "#tags"


@dataclass(frozen=True, slots=True)
class Request:
    """An action that needs permission.

    `actor` and `user` are those of the handle: `store.session(id, user=..., actor=...)`. `field` is a field's name,
    "#messages", "#items", "#phase", "#tags", "#version" (the record's version, whether it exists, its checkpoints), or
    None for the record as a whole: a policy that guards a field must guard None too. A read of a whole record asks for
    None first and then for everything in it; so do listing or counting the names of its fields, and forking it. A turn
    asks for "lock", and a repeated request asks to read the turn's outcome. `id` is None for an action on many records:
    a listing and `stats` ask for "read", `announce` for "write", and archive, doctor, purge and similar actions for
    "admin". `prefix` is the prefix of a listing's ids, if one was given. `import_` asks for "admin" of the record, with
    the future owner as `user`. A test holds the whole table, a row for each public method.
    """

    actor: str
    action: Action
    scope: str | None
    id: str | None
    field: str | None
    user: str | None
    prefix: str | None = None


Policy = Callable[[Request], bool]
"""The `access` policy of a store: a plain function that is asked before everything; False raises AccessDenied."""


class Guard:
    """Asks the policy for a store's records."""

    def __init__(self, policy: Policy) -> None:
        if not callable(policy) or inspect.iscoroutinefunction(policy):
            raise ConfigurationError("access: give a plain function that takes a Request and returns True or False")
        self._policy = policy

    def ask(
        self,
        action: Action,
        ref: Ref | None,
        field: str | None = None,
        *,
        actor: str = "",
        user: str | None = None,
        scope: str | None = None,
        prefix: str | None = None,
    ) -> None:
        """Return if the policy says True, else raise AccessDenied. `actor` and `user` come escaped."""
        request = Request(
            actor=unescape(actor),
            action=action,
            scope=scope if ref is None else ref.scope,
            id=None if ref is None else ref.id,
            field=field,
            user=None if not user else unescape(user),
            prefix=prefix,
        )
        try:
            allowed = self._policy(request)
        except Exception as error:
            raise AccessDenied(f"{_denied(request, ref)}: the policy failed with {type(error).__name__}") from error
        if allowed is not True:
            if inspect.iscoroutine(allowed):
                allowed.close()
            raise AccessDenied(_denied(request, ref))


def _denied(request: Request, ref: Ref | None) -> str:
    who = f"{request.actor[:80]!r}" if request.actor else "an unnamed caller"
    what = "everything" if ref is None else ref.text[:200]
    field = request.field
    return f"{who} may not {request.action} {what if field is None else f'{field!r:.80} of {what}'}"


def written(operations: Iterable[tuple[bytes, bytes, bytes]]) -> dict[tuple[Action, str | None], None]:
    """The permissions that a change needs, in order. A change that returns a sum also reads the field."""
    wanted: dict[tuple[Action, str | None], None] = {}
    for kind, name, _ in operations:
        items = kind in (b"p", b"q", b"n", b"y")  # whose names begin with anything
        if kind == b"D":
            continue  # when a worker serves the session, which the operations beside it decide
        if not items and (is_kept(name) or name in (TIMED, INITIALIZED)):
            continue  # internal fields of a turn, or parts of a field that was asked for already
        field: str | None = None
        if items:
            field = ITEMS
        elif kind == b"l":
            field = VERSION
        elif kind in (b"m", b"w", b"I", b"T", b"W") or name in (SUMMARY, START, SEGMENTS):
            field = MESSAGES
        elif name == PHASE:
            field = MOVES
        elif name[:2] == TAG and kind != b"c":
            field = TAGS
        elif kind in (b"s", b"d", b"i") and name[:1] != b"#":
            field = name.decode("utf-8", "surrogatepass")
        if kind == b"i":
            wanted["read", field] = None
        wanted["write", field] = None
    return wanted
