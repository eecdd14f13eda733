"""Leases that a client holds. Law: the client carries all that there is of one, so any worker serves under it.

It is renewed by its client alone, and ends with its time. What a client is given is opaque to it and cannot be guessed.
Design: section 23.
"""

from __future__ import annotations

import base64
import binascii

from distributed_state.errors import InvalidValue
from distributed_state.programs.service import requests
from distributed_state.programs.service.routes import LEASE, Asked
from distributed_state.records.context import RecordContext
from distributed_state.warm.carried_lease import CarriedLease


def shown(lease: CarriedLease) -> str:
    """A lease as its client carries it."""
    return base64.urlsafe_b64encode(lease.lock_value.encode()).decode().rstrip("=")


def given(asked: Asked) -> CarriedLease | None:
    """The lease that a request names, None if it names none. Raises InvalidValue for what is none."""
    text = requests.header(asked.request, LEASE)
    if LEASE not in asked.request.headers:
        return None
    try:
        found = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode("ascii")
        return CarriedLease(found)
    except (ValueError, binascii.Error) as error:
        raise InvalidValue("Lease is what was given with the lease, as it was given") from error


def carry(asked: Asked, context: RecordContext) -> None:
    """Have this request write under the lease that it names, if it names one."""
    lease = given(asked)
    if lease is not None:
        context.allow("lock", None)
        lease.carry(context.tiers.leases, context.tiers.lock(context.keys, wait=0, ttl=lease.TTL))
