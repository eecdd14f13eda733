"""Revokes access tokens. SQL keeps the revocation; Redis repeats it for workers that cannot read SQL.

While SQL is unavailable a worker goes on to accept the tokens that it knows, at most for `ACCEPTED_WITHOUT_SQL`. For
these Redis has the ids of the tokens that were revoked in that time. Tokens that were made with a revoked one are
known only to SQL, and follow when it answers.

Design: section 24.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from distributed_state.errors import ColdUnavailable, NotFound, StateError
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.access_tokens import AccessToken, is_id
from distributed_state.warm.scripts import REVOKE

log = logging.getLogger(__name__)
ACCEPTED_WITHOUT_SQL = 3600.0
"""Seconds after its last reading from SQL for which a token is accepted while SQL is unavailable."""
_TOGETHER = 1000  # ids in one call of the script
MEANWHILE = "until SQL answers, services refuse the token, but not the tokens created with it; revoke it again then"


class RevokedMeanwhile(ColdUnavailable):
    """Redis has the revocation and SQL, which keeps it, is unavailable: revoke the token again later."""


async def revoke(tiers: Tiers, id: str, *, alone: bool = False) -> AccessToken:
    """Revoke a token, and unless `alone` all tokens made with it. Raises NotFound, and ColdUnavailable.

    Redis learns of the token itself first: if SQL is unavailable, services still refuse it (RevokedMeanwhile).
    """
    if not is_id(id):
        raise NotFound(f"there is no token {id!r:.80}")
    noted = await _mark(tiers, [id])
    tokens = tiers.cold.access_tokens
    try:
        token, revoked = await tiers.port.sql(tokens.revoke_alone if alone else tokens.revoke, id)
    except ColdUnavailable as error:
        if not noted:
            raise
        raise RevokedMeanwhile(f"{error}: {MEANWHILE}") from error
    await _mark(tiers, sorted(revoked - {id}))
    return token


async def _mark(tiers: Tiers, ids: list[str]) -> bool:
    """Note in Redis that these are revoked; return whether Redis did."""
    kept_ms = int(2 * ACCEPTED_WITHOUT_SQL * 1000)
    try:
        for at in range(0, len(ids), _TOGETHER):
            await tiers.warm.script(REVOKE, [tiers.keys.revoked], [kept_ms, *ids[at : at + _TOGETHER]])
    except StateError as error:  # workers that reach SQL refuse the tokens all the same
        log.warning("revoke: Redis did not note the revocation, so workers that cannot read SQL accept them: %s", error)
        return False
    return True


async def revoked_in_redis(tiers: Tiers, ids: Collection[str]) -> set[str]:
    """The ids of those tokens that Redis has as revoked. Raises WarmUnavailable."""
    scores = await tiers.warm.commands([(b"ZSCORE", tiers.keys.revoked, id) for id in ids])
    return {id for id, score in zip(ids, scores, strict=True) if score is not None}
