"""The lease of a record over HTTP. Law: who holds it writes alone, until it is given back or its time is over.

A client takes it before it asks its model, sends it with each write of the turn in the header Lease, and renews it if
that takes long. Writes of others are answered 423 meanwhile; writes under one that has ended 412.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.responses import Response

from distributed_state.errors import Fenced, InvalidValue
from distributed_state.programs.service import leasing, requests
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.shapes import Answer, Body
from distributed_state.programs.service.routes import LEASE, Asked
from distributed_state.records.context import RecordContext, context_of
from distributed_state.values.model import Scope
from distributed_state.warm.carried_lease import CarriedLease

_Ttl = Annotated[float, Field(ge=1, le=600, description="Seconds until it ends, if it is not renewed.")]
_Wait = Annotated[float, Field(ge=0, le=30, description="Seconds to wait for whoever holds it.")]


class Take(Body):
    """How long to wait for the lease, and how long it lives."""

    wait: _Wait = 5.0
    ttl: _Ttl = 30.0


class Taken(Answer):
    """`lease` goes into the header Lease; `token` is the fencing token, as the history shows it."""

    lease: str
    token: int
    ttl: float


async def take(scope: Scope, asked: Asked) -> Response:
    """Hold a record alone."""
    given = requests.body(asked.request, asked.limits, Take)
    context = _of(asked, scope)
    wait = min(given.wait, asked.limits.busy)
    lease = await CarriedLease.take(context.tiers.leases, context.keys, wait=wait, ttl=given.ttl)
    return answer({"lease": leasing.shown(lease), "token": lease.token, "ttl": given.ttl}, 201)


class Renew(Body):
    """How long it lives from now on."""

    ttl: _Ttl = 30.0


async def renew(scope: Scope, asked: Asked) -> Response:
    """Hold a record for longer."""
    given = requests.body(asked.request, asked.limits, Renew)
    context, lease = _of(asked, scope), _given(asked)
    if not await lease.renew(context.tiers.leases, context.keys, ttl=given.ttl):
        raise Fenced(f"{context.text[:200]}: the lease has ended")
    return answer({"lease": leasing.shown(lease), "token": lease.token, "ttl": given.ttl})


class Released(Answer):
    """False: the lease had ended, and somebody else holds the record. What has ended may be released again."""

    released: bool


async def release(scope: Scope, asked: Asked) -> Response:
    """Give a record back."""
    context, lease = _of(asked, scope), _given(asked)
    return answer({"released": await lease.give_back(context.tiers.leases, context.keys)})


def _of(asked: Asked, scope: Scope) -> RecordContext:
    context = context_of(records.handle(asked, scope))
    context.allow("lock", None)
    return context


def _given(asked: Asked) -> CarriedLease:
    lease = leasing.given(asked)
    if lease is None:
        raise InvalidValue(f"the header {LEASE} says which lease is meant")
    return lease
