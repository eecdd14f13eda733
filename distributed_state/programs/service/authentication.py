"""Finds out who sent a request. Law: where nothing says how, nobody but this machine may send one.

A caller is known by the headers of a trusted proxy, else by a bearer token: one of SQL's by its beginning, any other
one is a JWT. What a proxy's header says counts by the address of the connection itself, not by one that
`X-Forwarded-For` names.

A browser on the same machine is one way in for strangers: a page of theirs has its own name resolved to 127.0.0.1, and
its scripts may then read what the service answers (DNS rebinding). The name that it was called by stays in `Host`,
which is compared with the names that the service may be called by.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from hmac import compare_digest

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from distributed_state.errors import ConfigurationError, InvalidValue, Unauthenticated
from distributed_state.programs.service.callers import Caller, require_policy
from distributed_state.programs.service.credentials import AccessTokens, Issuer, Jwts, Strangers
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.values.access_tokens import BEGINNING, RIGHTS, prefix_of

LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?", re.ASCII)
ACTOR, TENANT, GRANTED = "x-actor", "x-tenant", "x-rights"
_ALL = "*"
_HOPS = 20
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


# Proxies that authenticate for us


class Proxies:
    """The addresses and networks whose headers are believed."""

    def __init__(self, networks: Iterable[str] = ()) -> None:
        try:
            self._networks = [ipaddress.ip_network(each, strict=True) for each in networks]
        except ValueError as error:
            raise ConfigurationError(f"trust_proxy: {error}: give addresses or networks, as 10.0.0.0/8") from error

    def __bool__(self) -> bool:
        return bool(self._networks)

    def sent(self, request: Request) -> bool:
        """Whether one of them sent this request, and says whose it is."""
        if not self._networks or request.client is None or not self._has(request.client.host):
            return False
        return any(name in request.headers for name in (ACTOR, TENANT, GRANTED))

    def caller(self, request: Request) -> Caller:
        """Who it says has sent this request: `X-Tenant` (`*` is every one), `X-Rights`, and `X-Actor` if it names one.

        Raises Unauthenticated if one is missing, or there twice: then one of the two is from somebody else.
        """
        tenant, granted = _only(request, TENANT), _only(request, GRANTED)
        actor = _only(request, ACTOR) if ACTOR in request.headers else ""
        rights = {each.strip() for each in granted.split(",")}
        try:
            prefix = "" if tenant == _ALL else prefix_of(tenant)
        except InvalidValue as error:
            raise Unauthenticated from error
        if not rights <= set(RIGHTS):
            raise Unauthenticated
        return Caller(actor, prefix, frozenset(each for each in RIGHTS if each in rights))

    def client(self, request: Request) -> str:
        """The address of who sent the request: the last one of `X-Forwarded-For` that is no proxy of ours."""
        address = request.client.host if request.client else ""
        if not self._networks or not self._has(address):
            return address
        forwarded = ",".join(request.headers.getlist("x-forwarded-for")).split(",")[-_HOPS:]
        for each in reversed([hop.strip() for hop in forwarded if hop.strip()]):
            address = each[:100]
            if not self._has(address):
                break
        return address

    def _has(self, address: str) -> bool:
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        mapped = getattr(found, "ipv4_mapped", None)  # an IPv4 peer of a socket that listens on both
        return any((mapped or found) in network for network in self._networks)


def _only(request: Request, name: str) -> str:
    values = request.headers.getlist(name)
    if len(values) != 1 or not values[0]:
        raise Unauthenticated
    return values[0].encode("latin-1").decode("utf-8", "replace")


# Names and addresses that the service is reached by


class Hosts:
    """The names that a service may be called by, without their port; none: by any."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(name.lower() for name in names)
        for name in self._names:
            if (shaped := _HOST.fullmatch(name)) is None or shaped[2]:
                raise ConfigurationError(f"allow_host: {name!r:.80} is no name of a host without its port")

    def allow(self, given: list[str]) -> bool:
        """Whether a request with these `Host` headers may be answered."""
        if not self._names:
            return True
        shaped = _HOST.fullmatch(given[0].lower()) if len(given) == 1 else None
        return shaped is not None and shaped[1] in self._names


def require_loopback(address: str) -> None:
    """Raise ConfigurationError if others than this machine reach a service that listens on this address."""
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise ConfigurationError(
            f"listening on {address} without authentication would give everything to whoever reaches it: "
            "name --tokens, --jwt-issuer or --trust-proxy, or listen on 127.0.0.1; --insecure listens all the same"
        )


class KnownHosts:
    """An ASGI application that has 421 answered by `refuse` to requests by another name, and the others by `app`."""

    def __init__(self, app: ASGIApp, hosts: Hosts, refuse: Callable[[Request, Exception], Awaitable[Response]]) -> None:
        self._app = app
        self._hosts = hosts
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let `app` answer."""
        app = self._app
        if scope["type"] == "http":
            given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if not self._hosts.allow(given):
                app = await self._refuse(Request(scope), HTTPException(421, "it is not called by this name"))
        await app(scope, receive, send)
