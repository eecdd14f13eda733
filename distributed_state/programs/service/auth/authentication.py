"""Finds out who sent a request. Law: where nothing says how, nobody but this machine may send one.

By a trusted proxy's headers, else by a bearer token: one of SQL's by its beginning, any other one is a JWT.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from hmac import compare_digest

from starlette.requests import Request

from distributed_state.errors import Unauthenticated
from distributed_state.programs.service.auth.access_tokens import AccessTokens
from distributed_state.programs.service.auth.hosts import LOCAL, Hosts, require_loopback
from distributed_state.programs.service.auth.jwts import Issuer, Jwts
from distributed_state.programs.service.auth.policy import require_policy
from distributed_state.programs.service.auth.proxies import ACTOR, Proxies
from distributed_state.programs.service.auth.strangers import Strangers
from distributed_state.programs.service.callers import Caller
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.values.access_tokens import BEGINNING

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Access:
    """How callers are known: by the namespace's `tokens`, by JWTs of an `issuer`, by what a proxy says, by one `key`.

    By none of these: then the service is for its own machine, and called by one of `allow_host` or a name of this
    machine's; `insecure` opens it for everybody.
    """

    tokens: bool = False
    issuer: Issuer | None = None
    trust_proxy: tuple[str, ...] = ()
    allow_host: tuple[str, ...] = ()
    insecure: bool = False
    key: str = ""

    @property
    def known(self) -> bool:
        """Whether callers have to say who they are."""
        return self.tokens or self.issuer is not None or bool(self.trust_proxy or self.key)


class Authentication:
    """Recognizes the callers of one service; so many `strangers` of a kind wait at once until it knows who they are."""

    def __init__(self, access: Access | None = None, *, strangers: int = 512) -> None:
        self._access = access or Access()
        self.known = self._access.known
        self.proxies = Proxies(self._access.trust_proxy)
        # One who has the key is on this machine, and so may be a browser that a page of a stranger uses.
        closed = (self.known and not self._access.key) or self._access.insecure
        local = () if closed else LOCAL
        self.hosts = Hosts({*local, *self._access.allow_host})
        # Apart: who names keys that a slow provider has not takes no place of those whose token SQL is asked for.
        self._tokens = AccessTokens(strangers=Strangers(strangers)) if self._access.tokens else None
        self._jwts = Jwts(self._access.issuer, Strangers(strangers)) if self._access.issuer else None

    def require_place(self, address: str) -> None:
        """Raise ConfigurationError if a service with these settings must not listen on this address."""
        if self.known:
            return
        if self._access.insecure:
            log.warning("INSECURE: whoever reaches %s may read, change and delete everything, by any name", address)
        else:
            require_loopback(address)

    def begin(self, store: AsyncStateStore) -> None:
        """Read tokens from this store's SQL from now on. Raises ConfigurationError if its policy is not ours."""
        if self.known:
            require_policy(store)
        if self._tokens is not None:
            tiers = store.tiers()
            self._tokens.begin(lambda ids: tiers.port.sql(tiers.cold.access_tokens.find, ids))

    async def close(self) -> None:
        """Stop reading tokens."""
        if self._tokens is not None:
            await self._tokens.close()

    async def caller(self, request: Request) -> Caller:
        """Who sent this request. Raises Unauthenticated, or Unavailable if that cannot be found out now."""
        if not self.known:
            return Caller(actor=_text(request.headers.get(ACTOR, "")))
        if self.proxies.sent(request):
            return self.proxies.caller(request)
        text = _bearer(request.headers.getlist("authorization"))
        if self._access.key and compare_digest(text, self._access.key):
            return Caller()
        if self._tokens is not None and text.startswith(BEGINNING):
            return await self._tokens.caller(text)
        if self._jwts is not None and text:
            return await self._jwts.caller(text)
        raise Unauthenticated


def _bearer(given: list[str]) -> str:
    """The token of the header `Authorization`, "" if there is none."""
    scheme, _, text = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    return text.strip() if scheme.lower() == "bearer" and text.isascii() else ""


def _text(header: str) -> str:
    return header.encode("latin-1").decode("utf-8", "replace")
