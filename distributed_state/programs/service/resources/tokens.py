"""Access tokens over HTTP. Law: nobody makes a token that has more rights than the one that it was asked for with.

It is valid for a time of its own, also after the one that it was made with has expired; it is revoked with that.

Design: section 17.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from pydantic import Field
from starlette.responses import Response

from distributed_state.cold.access_tokens import AccessTokenStore
from distributed_state.errors import AccessDenied, InvalidValue, NotFound
from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.resources.shapes import Answer, Body, Limit, Query, Span
from distributed_state.programs.service.routes import PREFIX, Asked
from distributed_state.values import access_tokens
from distributed_state.values.access_tokens import AccessToken, Right

_EXPIRES = 90 * 86400.0


class MakeToken(Body):
    """Whose ids it may name, and what it may.

    Without `tenant` it is of the caller's own; a caller of all tenants says which one, or `all_tenants`. `expires` is
    in seconds from now, null for never.
    """

    tenant: str | None = None
    all_tenants: bool = False
    rights: list[Right] = Field(min_length=1, max_length=len(access_tokens.RIGHTS))
    actor: str = Field("", max_length=200)
    expires: Span | None = _EXPIRES


class Token(Answer):
    """What is known of a token. Times are in seconds since 1970 by SQL's clock; `prefix` "" is every tenant.

    `made_by` is the id of the token with which it was made, null if that was none.
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
    """A new token: its text is shown this once."""

    token: str


class Page(Query):
    """Which tokens are listed: so many, behind the one of this id."""

    limit: Limit = 50
    after: str | None = None


class Tokens(Answer):
    """Those within the caller's tenant, the oldest first; `after` is null if this is the last page."""

    tokens: list[Token]
    after: str | None


async def create(asked: Asked) -> Response:
    """Make a token."""
    given = requests.body(asked.request, asked.limits, MakeToken)
    prefix = _prefix(asked, given)
    more = set(given.rights) - asked.caller.rights
    if more:
        raise AccessDenied(f"{asked.caller.actor!r:.80} has no right to {', '.join(sorted(more))}, and can give none")
    id, text = access_tokens.make()
    made = await asked.store.tiers().port.sql(
        partial(
            _tokens(asked).add, id, access_tokens.digest(text), prefix=prefix, rights=set(given.rights),
            actor=given.actor, seconds=given.expires, made_by=asked.caller.token,
        )
    )  # fmt: skip
    response = answer(_shown(made) | {"token": text}, 201, headers={"Location": f"{PREFIX}/tokens/{id}"})
    response.headers["Cache-Control"] = "no-store"
    return response


async def listing(asked: Asked) -> Response:
    """A page of the tokens."""
    given = requests.query(asked.request, Page)
    if given.after is not None and not access_tokens.is_id(given.after):
        raise InvalidValue(f"{given.after!r:.80} is no id of a token")
    read = partial(_tokens(asked).page, asked.caller.prefix, given.after, given.limit)
    found = await asked.store.tiers().port.sql(read)
    after = found[-1].id if len(found) == given.limit else None
    more = requests.next_page(asked.request, after=after) if after is not None else None
    return answer({"tokens": [_shown(each) for each in found], "after": after}, headers=more)


async def revoke(asked: Asked) -> Response:
    """Refuse a token, and those that were made with it, from now on."""
    id = asked.request.path_params["token"]
    port = asked.store.tiers().port
    # What is no id may be what SQL cannot even look for.
    found = (await port.sql(_tokens(asked).find, [id])).get(id) if access_tokens.is_id(id) else None
    if found is None or not found.token.prefix.startswith(asked.caller.prefix):
        raise NotFound(f"there is no token {id!r:.80}")
    return answer(_shown(await port.sql(_tokens(asked).revoke, id)))


def _prefix(asked: Asked, given: MakeToken) -> str:
    own = asked.caller.prefix
    if given.all_tenants:
        if own or given.tenant is not None:
            raise InvalidValue("all_tenants is for a caller of all tenants, and in place of a tenant")
        return ""
    if given.tenant is None:
        if not own:
            raise InvalidValue("say which tenant, or all_tenants")
        return own
    prefix = access_tokens.prefix_of(given.tenant)
    if not prefix.startswith(own):
        raise AccessDenied(f"{asked.caller.actor!r:.80} is of another tenant")
    return prefix


def _tokens(asked: Asked) -> AccessTokenStore:
    return asked.store.tiers().cold.access_tokens


def _shown(token: AccessToken) -> dict[str, object]:
    return asdict(token) | {"rights": list(token.rights)}
