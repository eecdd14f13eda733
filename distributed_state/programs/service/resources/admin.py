"""The store as a whole, for the right `admin`. Law: operations on all tenants are refused to a caller of one tenant.

Replicas, partitions, servers and tenants; upkeep of the archive; access tokens; and `who`, the caller as the service
recognized it. A new token has no rights that its maker lacks. It has its own expiry, and outlives the token that it was
made with if that expires; but if that is revoked, so is the new one.

Design: section 17.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Annotated

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from distributed_state.cold.store import AccessTokenStore
from distributed_state.errors import AccessDenied, ColdUnavailable, InvalidValue, NotFound, Unavailable
from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.requests import PREFIX, Answer, Asked, Body, Limit, Query, Span, Values
from distributed_state.store import doctor
from distributed_state.store.lifecycle import lifecycle_of
from distributed_state.tiers.revoking import MEANWHILE, RevokedMeanwhile, revoke
from distributed_state.values import access_tokens
from distributed_state.values.access_tokens import AccessToken, Right
from distributed_state.values.model import escape

_TENANTS = 20  # shown
_CONVERSATIONS = 10_000  # counted at most for each tenant
_Age = Annotated[float, Field(ge=0, le=1e10, description="Seconds.")]  # three centuries; SQL's integers are limited
_Count = Annotated[int, Field(ge=0, le=2**31)]
_EXPIRES = 90 * 86400.0


# Replicas, partitions and servers


class Replicas(Answer):
    """The live replicas."""

    replicas: list[Values]


async def replicas(asked: Asked) -> Response:
    """The replicas of the store."""
    found = await asked.store.admin.replicas()
    return answer({"replicas": [asdict(each) | {"role": each.role} for each in found]})


class PartitionRow(Answer):
    """A partition: its epoch, the last offset of its journal, and how much of the journal waits for SQL.

    `lag` is the age of the oldest waiting commit, in seconds; `fill` is 1 where writes are refused. `diverged` is the
    reason why no archiver can archive the partition, or "". A diverged partition may have more commits that SQL lacks
    than those that wait, and its `lag` is null if their age is unknown.
    """

    partition: int
    epoch: str
    offset: int
    waiting: int
    bytes: int
    lag: float | None
    fill: float
    diverged: str


class Partitions(Answer):
    """The partitions whose server answers."""

    partitions: list[PartitionRow]


async def partitions(asked: Asked) -> Response:
    """How far each partition was written and archived."""
    _of_all_tenants(asked)
    tiers = lifecycle_of(asked.store).tiers()
    looked = await doctor.look(tiers)
    there, _ = await doctor.present(tiers)
    diverged = await doctor.diverged_partitions(tiers, there)
    rows = [
        {
            "partition": each, "epoch": place.epoch, "offset": place.offset,
            "waiting": max(0, place.offset - place.archived), "bytes": max(0, place.waiting),
            "lag": looked.ages.get(each, None if each in diverged else 0.0), "fill": place.fill(tiers.settings),
            "diverged": diverged.get(each, ""),
        }
        for each, place in sorted(looked.places.items())
    ]  # fmt: skip
    return answer({"partitions": rows})


class FindingRow(Answer):
    """A finding of the doctor, with advice if it is not `ok`."""

    name: str
    ok: bool
    found: str
    advice: str


class Findings(Answer):
    """The doctor's findings about the servers and the fleet."""

    findings: list[FindingRow]


async def findings(asked: Asked) -> Response:
    """Examine the servers and the fleet."""
    found = await asked.store.admin.doctor()
    rows = [{"name": each.name, "ok": each.ok, "found": each.found, "advice": each.advice} for each in found]
    return answer({"findings": rows})


# Tenants, and the caller


class TenantRow(Answer):
    """A tenant by its prefix of ids, "" for callers of all tenants.

    `requests` and `bytes` are totals since this worker started; the rates are current.
    `conversations` are counted once a minute, up to 10,000; null while SQL is unavailable.
    """

    prefix: str
    requests: int
    bytes: int
    requests_per_second: float
    bytes_per_second: float
    conversations: int | None


class Tenants(Answer):
    """The twenty tenants with the most requests to this worker now."""

    tenants: list[TenantRow]


async def tenants(asked: Asked) -> Response:
    """The traffic of tenants in this worker, and how many conversations they have."""
    _of_all_tenants(asked)
    tiers, traffic = lifecycle_of(asked.store).tiers(), asked.rates.traffic
    rows = []
    for each in traffic.busiest(_TENANTS):
        begin = escape(each.prefix)
        count = partial(tiers.port.sql, tiers.cold.count, "session", begin, _CONVERSATIONS)
        try:
            found: int | None = await traffic.conversations(each.prefix, count)
        except Unavailable:
            found = None
        rows.append(asdict(each) | {"conversations": found})
    return answer({"tenants": rows})


def _of_all_tenants(asked: Asked) -> None:
    """Raise AccessDenied for a caller of one tenant, where no call to the store would ask its policy."""
    if asked.caller.prefix:
        raise AccessDenied(f"{asked.caller.actor!r:.80} belongs to one tenant, and this concerns all tenants")


class Who(Answer):
    """The caller as the service recognized it: the actor of its history, the prefix of its ids, and its rights."""

    actor: str
    prefix: str
    rights: list[str]


async def who(asked: Asked) -> Response:
    """The caller as the service recognized it."""
    caller = asked.caller
    return answer({"actor": caller.actor, "prefix": caller.prefix, "rights": sorted(caller.rights)})


# Upkeep


class Compact(Body):
    """The age in seconds from which on history is packed."""

    older_than: _Age = 86_400.0


class Purge(Body):
    """Limits of age and number beyond which the archive is purged: see `purge` of the store."""

    older_than: _Age | None = None
    keep_changes: _Count | None = None
    messages_older_than: _Age | None = None
    keep_messages: _Count | None = None
    events_older_than: _Age | None = None
    branches_older_than: _Age | None = None


class Counts(Answer):
    """The counts of processed data, by name."""

    counts: dict[str, int]


async def compact(asked: Asked, given: Compact) -> Response:
    """Pack old history; a repeated call continues where the last one was interrupted."""
    return answer({"counts": await asked.store.admin.compact(older_than=given.older_than)})


async def purge(asked: Asked, given: Purge) -> Response:
    """Remove old history, messages, events and branches; current states stay."""
    return answer({"counts": await asked.store.admin.purge(**given.model_dump())})


# Access tokens


class MakeToken(Body):
    """The tenant and the rights of a new token.

    Without `tenant` the token is for the caller's own tenant; a caller of all tenants must give `tenant` or
    `all_tenants`. `expires` is in seconds from now, null for never.
    """

    tenant: str | None = None
    all_tenants: bool = False
    rights: list[Right] = Field(min_length=1, max_length=len(access_tokens.RIGHTS))
    actor: str = Field("", max_length=200)
    expires: Span | None = _EXPIRES


class Token(Answer):
    """A token without its text. Times are in seconds since 1970 by SQL's clock; `prefix` "" is every tenant.

    `made_by` is the id of the token that it was made with, null if it was made without one.
    """

    id: str
    prefix: str
    rights: list[str]
    actor: str
    created: float
    expires: float | None
    revoked: float | None
    made_by: str | None


class Made(Token):
    """A new token; its text is shown only this once."""

    token: str


async def create_token(asked: Asked, given: MakeToken) -> Response:
    """Make a token."""
    prefix = _prefix(asked, given)
    more = set(given.rights) - asked.caller.rights
    if more:
        raise AccessDenied(
            f"{asked.caller.actor!r:.80} has no right to {', '.join(sorted(more))}, so it cannot grant it"
        )
    id, text = access_tokens.make()
    made = await lifecycle_of(asked.store).tiers().port.sql(
        partial(
            _tokens(asked).add, id, access_tokens.digest(text), prefix=prefix, rights=set(given.rights),
            actor=given.actor, seconds=given.expires, made_by=asked.caller.token,
        )
    )  # fmt: skip
    response = answer(_shown(made) | {"token": text}, 201, headers={"Location": f"{PREFIX}/tokens/{id}"})
    response.headers["Cache-Control"] = "no-store"
    return response


class TokenPage(Query):
    """A page of tokens: at most `limit`, after the one with the id `after`."""

    limit: Limit = 50
    after: str | None = None


class Tokens(Answer):
    """The tokens within the caller's tenant, the oldest first; `after` is null if this is the last page."""

    tokens: list[Token]
    after: str | None


async def list_tokens(asked: Asked, given: TokenPage) -> Response:
    """A page of the tokens."""
    if given.after is not None and not access_tokens.is_id(given.after):
        raise InvalidValue(f"{given.after!r:.80} is not the id of a token")
    read = partial(_tokens(asked).page, asked.caller.prefix, given.after, given.limit)
    found = await lifecycle_of(asked.store).tiers().port.sql(read)
    after = found[-1].id if len(found) == given.limit else None
    shown = {"tokens": [_shown(each) for each in found], "after": after}
    return answer(shown, headers=requests.next_page(asked.request, after))


async def revoke_token(asked: Asked) -> Response:
    """Refuse a token, and those that were made with it, from now on."""
    id = asked.request.path_params["token"]
    if not await _may_revoke(asked, id):
        raise NotFound(f"there is no token {id!r:.80}")
    try:
        return answer(_shown(await revoke(lifecycle_of(asked.store).tiers(), id)))
    except RevokedMeanwhile as error:
        raise HTTPException(503, MEANWHILE) from error


async def _may_revoke(asked: Asked, id: str) -> bool:
    """Whether the token is within the caller's tenant; SQL is asked only if it may not be, so it may be down."""
    if not access_tokens.is_id(id):
        return False  # SQL may not even accept such a text
    if not asked.caller.prefix or asked.caller.token == id:
        return True
    try:
        found = (await lifecycle_of(asked.store).tiers().port.sql(_tokens(asked).find, [id])).get(id)
    except ColdUnavailable as error:
        raise HTTPException(
            503, "SQL, which has the tenant of this token, does not answer; a caller of all tenants can revoke it now"
        ) from error
    return found is not None and found.token.prefix.startswith(asked.caller.prefix)


def _prefix(asked: Asked, given: MakeToken) -> str:
    own = asked.caller.prefix
    if given.all_tenants:
        if own or given.tenant is not None:
            raise InvalidValue("all_tenants replaces a tenant, and needs a caller without a tenant")
        return ""
    if given.tenant is None:
        if not own:
            raise InvalidValue("name a tenant, or give all_tenants")
        return own
    prefix = access_tokens.prefix_of(given.tenant)
    if not prefix.startswith(own):
        raise AccessDenied(f"{asked.caller.actor!r:.80} belongs to another tenant")
    return prefix


def _tokens(asked: Asked) -> AccessTokenStore:
    return lifecycle_of(asked.store).tiers().cold.access_tokens


def _shown(token: AccessToken) -> dict[str, object]:
    return asdict(token) | {"rights": list(token.rights)}
