"""The lease of a record over HTTP. Law: only its holder can write, until the lease is released or expires.

A client takes the lease before it calls its model, sends it with each write of the turn in the header Lease, and renews
it if the turn takes long. Meanwhile writes of others are answered 423, and writes under an ended lease 412. A caller
with the right `admin` sees all held leases, and can take over or end each of them by its fencing token.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import Field
from starlette.responses import Response

from distributed_state.errors import Fenced, InvalidValue
from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.requests import LEASE, Answer, Asked, Body, Limit, Name, Query
from distributed_state.programs.service.resources import output, records
from distributed_state.records.context import RecordContext, context_of
from distributed_state.results import HeldLease
from distributed_state.values.model import Scope
from distributed_state.warm.held_leases import CarriedLease
from distributed_state.warm.output import ENDED, FAILED, STOPPED

_Ttl = Annotated[float, Field(ge=1, le=600, description="Seconds until it ends unless it is renewed.")]
_Wait = Annotated[float, Field(ge=0, le=30, description="Seconds to wait for the current holder.")]


class Take(Body):
    """How long to wait for the lease, and how long it lasts.

    With `turn` it is the lease of a turn, which the client runs: it may stream the answer, others may follow and stop
    it. `request` is the id of the request that the turn serves.
    """

    wait: _Wait = 5.0
    ttl: _Ttl = 30.0
    turn: bool = False
    request: str | None = None


class Taken(Answer):
    """`lease` is the value of the header Lease; `token` is the fencing token that the history shows."""

    lease: str
    token: int
    ttl: float


async def take(scope: Scope, asked: Asked, given: Take) -> Response:
    """Take the lease of a record."""
    context = _of(asked, scope)
    wait = min(given.wait, asked.limits.busy)
    if given.request is not None and not given.turn:
        raise InvalidValue("request is for the lease of a turn: give turn with it")
    turn = output.turn_tag(given.request) if given.turn else None
    lease = await CarriedLease.take(context.tiers.leases, context.keys, wait=wait, ttl=given.ttl, turn=turn)
    return answer({"lease": records.show_lease(lease), "token": lease.token, "ttl": given.ttl}, 201)


class Renew(Body):
    """How long the lease lasts from now on."""

    ttl: _Ttl = 30.0


async def renew(scope: Scope, asked: Asked, given: Renew) -> Response:
    """Renew the lease of a record."""
    context, lease = _of(asked, scope), _given(asked)
    if not await lease.renew(context.tiers.leases, context.keys, ttl=given.ttl):
        raise Fenced(f"{context.text[:200]}: the lease has ended")
    return answer({"lease": records.show_lease(lease), "token": lease.token, "ttl": given.ttl})


class Released(Answer):
    """`released` is false if the lease had ended, or another client holds the record. Releasing again is harmless."""

    released: bool


class Release(Query):
    """`streamed` is the number of chunks that the turn of the lease has streamed, and `failed` how it ended."""

    streamed: Annotated[int, Field(ge=0, lt=2**48)] = 0
    failed: bool = False


async def release(scope: Scope, asked: Asked, given: Release) -> Response:
    """Release the lease of a record, and end the output of its turn."""
    context, lease = _of(asked, scope), _given(asked)
    leases, keys = context.tiers.leases, context.keys
    ends = None
    if given.streamed:
        ends = lease.output(leases, keys, given.streamed)
        stopped = await lease.check(leases, keys, notify=False)
        ends.how = STOPPED if stopped else FAILED if given.failed else ENDED
    return answer({"released": await lease.give_back(leases, keys, ends=ends)})


class Page(Query):
    """Selects leases by kind of record and prefix of id. `after` is the value that the previous page returned."""

    scope: Literal["session", "user", "task", "app"] | None = None
    prefix: Name | None = None
    limit: Limit = 100
    after: str | None = None


class Leases(Answer):
    """Leases, those held longest first, and the time of the store's servers in seconds since 1970.

    `after` is null if this is the last page.
    """

    time: float
    leases: list[HeldLease]
    after: str | None


async def listing(asked: Asked, given: Page) -> Response:
    """List the held leases with their holders, and the waiting clients."""
    prefix = records.narrowed(asked, given.prefix) or ""
    found = await asked.store.admin.leases(scope=given.scope, prefix=prefix, limit=given.limit, after=given.after)
    after = found[-1].cursor if len(found) == given.limit else None
    shown = {"time": await asked.store.time(), "leases": [asdict(each) for each in found], "after": after}
    return answer(shown, headers=requests.next_page(asked.request, after))


async def take_over(scope: Scope, asked: Asked, given: Renew) -> Response:
    """Take a record's lease over; later writes of its former holder are refused."""
    context = _of(asked, scope)
    context.allow("admin", None)
    token = asked.request.path_params["token"]
    leases = context.tiers.leases
    lease = await CarriedLease.take(leases, context.keys, wait=0, ttl=given.ttl, take_over=token)
    return answer({"lease": records.show_lease(lease), "token": lease.token, "ttl": given.ttl})


async def end(scope: Scope, asked: Asked) -> Response:
    """End a lease; later writes of its holder are refused, and the next waiting client gets the record."""
    id = records.id_of(asked)
    ended = await asked.store.admin.end_lease(id, asked.request.path_params["token"], scope=scope)
    return answer({"released": ended})


def _of(asked: Asked, scope: Scope) -> RecordContext:
    context = context_of(records.handle(asked, scope))
    context.allow("lock", None)
    return context


def _given(asked: Asked) -> CarriedLease:
    lease = records.lease_of(asked)
    if lease is None:
        raise InvalidValue(f"the header {LEASE} must name the lease")
    return lease
