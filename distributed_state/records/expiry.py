"""How long a session lives, as its users see it. Law: the server's clock alone says when that is over.

Design: section 10.
"""

from __future__ import annotations

from distributed_state.errors import WarmUnavailable
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import field_ttl
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import LIFETIME
from distributed_state.values.results import Lifetime

_ROUNDS = 100


async def read(tiers: Tiers, names: RecordKeys) -> Lifetime:
    """The lifetime that a session has now, from Redis."""
    for _ in range(_ROUNDS):
        if not (await read_path.present(tiers, names)).version:
            return Lifetime(None, None, None)
        # Together, so that they fit; only a commit that leaves the record in Redis has changed either.
        version, lifetime, last_ms = await tiers.warm.command(b"HMGET", names.record, b"#v", LIFETIME, b"#t")
        if version is not None:
            return _read(lifetime, last_ms)
    raise WarmUnavailable(f"{names.ref.text[:200]}: comes and goes faster than it can be read")


def _read(lifetime: bytes | None, last_ms: bytes | None) -> Lifetime:
    if lifetime is None:
        return Lifetime(None, None, None)
    idle_ms, until_ms = field_ttl.parse_lifetime(lifetime)
    return Lifetime(
        idle=idle_ms / 1000 if idle_ms else None,
        until=until_ms / 1000 if until_ms else None,
        ends=field_ttl.end_ms(lifetime, int(last_ms or 0)) / 1000,
    )
