"""Identifies the callers of requests, and checks their rights. Law: a request without a caller never uses the store.

Without a setting for authentication, only this machine may send requests. A caller is recognized by the headers of a
trusted proxy, else by a bearer token. A token with our own beginning is looked up in SQL; any other token is a JWT. A
proxy is recognized by the address of the connection itself, not by an address in `X-Forwarded-For`.

A request with a known token does not wait for a server. A token is valid for a few seconds after it was read, and is
then read again in the background, so a revoked token is refused within `Ages.revoked` seconds. While SQL is unavailable
a known token is accepted for `Ages.away` seconds, unless Redis has it as revoked; an unknown one can be neither
accepted nor refused, so a worker that knows no valid token is not ready (`needs_sql`). One query runs at a time, and
all tokens that arrive meanwhile go into the next query, so guessing tokens causes no additional queries. A request
takes a place among the served requests only when its caller is known: otherwise strangers could displace known callers.

JWTs must be signed with a key pair. If shared secrets were accepted, an attacker could sign with the provider's public
key as the secret. Source: RFC 8725, "JSON Web Token Best Current Practices".

An attacker can use a browser on the same machine: a web page resolves its own name to 127.0.0.1, and its scripts can
then read the service's answers (DNS rebinding). `Host` still holds the page's name, so it is compared with the allowed
names of the service.

A caller acts within one tenant, which is a prefix of ids: the ids of all its records, users and tasks begin with it.
Every other id is refused before a server is asked, so the answer does not show whether the record exists. A tenant may
lie within another one, as `acme:eu:` within `acme:`. Callers of both count for `acme:`: its admin can make tokens for
tenants within it, and otherwise each of these would add the limits of another tenant.

The store itself asks the policy for every record that a request names, so an operation that forgets to check cannot
give a tenant another tenant's data. The policy denies everything that it does not allow. Outside a request there is no
caller, and the service does its own work, such as ending sessions.

Design: section 24.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from hmac import compare_digest
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import urlsplit

import jwt
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from distributed_state.errors import (
    AccessDenied,
    ColdUnavailable,
    ConfigurationError,
    InvalidValue,
    StateError,
    Unauthenticated,
    Unavailable,
)
from distributed_state.records import access
from distributed_state.records.access import MOVES, VERSION, Policy
from distributed_state.records.context import context_of
from distributed_state.results import Event
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.store.lifecycle import lifecycle_of
from distributed_state.tiers.revoking import ACCEPTED_WITHOUT_SQL, revoked_in_redis
from distributed_state.values.access_tokens import BEGINNING, RIGHTS, FoundToken, Right, digest, id_of, prefix_of
from distributed_state.values.model import SCOPES, unescape

_DEEPEST = 8  # nesting levels of tenants that are counted separately; a deeper tenant counts only for these


@dataclass(frozen=True, slots=True)
class Caller:
    """A recognized caller: history shows `actor`; `prefix` is the tenant, "" for all tenants.

    `credential` identifies the token or login, as several of them may share an actor; `expires` is when a JWT does, in
    seconds since 1970.
    """

    actor: str = ""
    prefix: str = ""
    rights: frozenset[Right] = frozenset(RIGHTS)
    credential: str = ""
    expires: float | None = field(default=None, compare=False)
    tenants: tuple[str, ...] = field(init=False)
    """The prefixes that its requests count for, the outermost first: its own prefix and those that contain it."""
    tenant: str = field(init=False)
    """The outermost of these, "" for callers of all tenants."""
    parties: tuple[str, ...] = field(init=False)
    """The names of parties for these prefixes; without a tenant, the actor is the party.

    A tenant never equals an actor's name."""
    party: str = field(init=False)
    """The party for fair shares: the outermost tenant, or the actor of a caller of all tenants."""

    def __post_init__(self) -> None:
        ends = (at + 1 for at, letter in enumerate(self.prefix) if letter == ":" or at == len(self.prefix) - 1)
        tenants = tuple(self.prefix[:end] for end in islice(ends, _DEEPEST))
        parties = tuple(f"prefix {each}" for each in tenants) or (f"actor {self.actor}",)
        derived = {"tenants": tenants, "tenant": tenants[0] if tenants else "", "parties": parties, "party": parties[0]}
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def token(self) -> str | None:
        """The id of the caller's access token, None if it was recognized in another way."""
        kind, _, id = self.credential.partition(":")
        return id if kind == "token" else None

    def hears(self, event: Event) -> bool:
        """Whether the caller may receive an event: a tenant's caller receives only events of the tenant's records."""
        scope, _, name = event.subject.partition(":")
        return not self.prefix or (scope in SCOPES and unescape(name).startswith(self.prefix))


CALLER: ContextVar[Caller | None] = ContextVar("distributed_state_caller", default=None)
"""The caller of the current request; None outside requests, in the service's own work."""


@contextmanager
def serving(caller: Caller | None) -> Iterator[None]:
    """Serve this caller inside the block.

    None is the service's own work, which must filter the client's data itself.
    """
    before = CALLER.set(caller)
    try:
        yield
    finally:
        CALLER.reset(before)


# The policy


_NOBODY = Caller(prefix="nobody:", rights=frozenset())


class _Recognized(Exception):
    """Raised by this policy for `_NOBODY`, to distinguish it from another policy that denies."""


def callers_policy(also: Policy | None = None) -> Policy:
    """The `access` policy for the store of a service. Your own policy, `also`, must allow a request too."""

    def policy(request: access.Request) -> bool:
        caller = CALLER.get()
        if caller is _NOBODY:
            raise _Recognized
        if caller is not None and not (_in_tenant(caller.prefix, request) and _has_right(caller, request)):
            return False
        return also is None or also(request)

    return policy


def _in_tenant(prefix: str, request: access.Request) -> bool:
    if not prefix:
        return True
    if request.user is not None and not request.user.startswith(prefix):
        return False
    if request.id is not None:
        return request.id.startswith(prefix)
    # Many records: those of one of the tenant's users, or of a prefix within the tenant.
    return request.user is not None or (request.prefix is not None and request.prefix.startswith(prefix))


def _has_right(caller: Caller, request: access.Request) -> bool:
    rights = caller.rights
    if request.action == "read":
        # A writer may read version and phase, as the answers to writes hold them.
        return "read" in rights or ("write" in rights and request.field in (VERSION, MOVES))
    if request.action == "write":
        # The right to delete covers writes of a whole record, as deleting it is one of them.
        return "write" in rights or ("delete" in rights and request.id is not None and request.field is None)
    if request.action == "lock":
        return "write" in rights
    # The right to delete covers erasing a record and forgetting a user; the whole store needs the right admin.
    about_some = request.id is not None or request.user is not None
    return "admin" in rights or ("delete" in rights and about_some)


def require_policy(store: AsyncStateStore) -> None:
    """Raise ConfigurationError if the store was opened without `callers_policy`: every tenant would read all."""
    try:
        with serving(_NOBODY):
            context_of(store.session("somebody:s")).allow("read", None)
    except AccessDenied as error:
        if isinstance(error.__cause__, _Recognized):
            return
    raise ConfigurationError("a service with callers needs a store that was opened with access=callers_policy()")


log = logging.getLogger(__name__)
T = TypeVar("T")
Find = Callable[[Collection[str]], Awaitable[dict[str, FoundToken]]]
FindRevoked = Callable[[Collection[str]], Awaitable[set[str]]]

# Access tokens
_KNOWN = 10_000  # tokens that are remembered, and as many ids without a token
_TOGETHER = 500  # ids in one query
_WAITING = 10_000  # unknown ids that wait for a query; more are answered 429
_PAUSE = 0.02  # seconds between two queries

# JWTs
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_KEY_TYPES = ("RSA", "EC", "OKP")
_LONGEST = 16_384  # characters of a token
_LONGEST_ACTOR = 200
_REMEMBERED = 10_000  # tokens that were checked
_CHECKED_FOR = 60.0  # seconds that the check of a token counts, unless the token expires earlier
_RENEW = 300.0  # seconds after which the keys are fetched again
_LASTING = 3600.0  # seconds that the keys count while the provider is unavailable
_FETCH_PAUSE = 10.0  # seconds between two fetches, also if tokens name unknown keys
_FETCHING = 5.0  # seconds that the provider may be silent, and that a request waits for the keys

# Proxies, and names of this machine
ACTOR, TENANT, GRANTED = "x-actor", "x-tenant", "x-rights"
_ALL = "*"
_HOPS = 20
LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Access:
    """Ways to recognize callers: the namespace's `tokens`, JWTs of an `issuer`, headers of a proxy, or one `key`.

    Without any of them the service is for its own machine only, and is called by a name of `allow_host` or of this
    machine; `insecure` opens it to everybody.
    """

    tokens: bool = False
    issuer: Issuer | None = None
    trust_proxy: tuple[str, ...] = ()
    allow_host: tuple[str, ...] = ()
    insecure: bool = False
    key: str = ""

    @property
    def known(self) -> bool:
        """Whether callers must authenticate."""
        return self.tokens or self.issuer is not None or bool(self.trust_proxy or self.key)


class Authentication:
    """Recognizes the callers of one service. At most `strangers` requests of a kind wait to be recognized."""

    def __init__(self, access: Access | None = None, *, strangers: int = 512) -> None:
        self._access = access or Access()
        self.known = self._access.known
        self.proxies = Proxies(self._access.trust_proxy)
        # A caller with the key is on this machine, where an attacker's web page may use the browser.
        closed = (self.known and not self._access.key) or self._access.insecure
        local = () if closed else LOCAL
        self.hosts = Hosts({*local, *self._access.allow_host})
        # Counted separately: JWTs that wait for a slow provider's keys take no place from tokens that wait for SQL.
        self._tokens = AccessTokens(strangers=Strangers(strangers)) if self._access.tokens else None
        self._jwts = Jwts(self._access.issuer, Strangers(strangers)) if self._access.issuer else None

    def require_place(self, address: str) -> None:
        """Raise ConfigurationError if it would be unsafe to listen on this address with these settings."""
        if self.known:
            return
        if self._access.insecure:
            log.warning(
                "INSECURE: anyone who reaches %s may read, change and delete everything, under any name", address
            )
        else:
            require_loopback(address)

    def begin(self, store: AsyncStateStore) -> None:
        """Read tokens from this store's SQL from now on.

        Raises ConfigurationError if its policy is not `callers_policy`.
        """
        if self.known:
            require_policy(store)
        if self._tokens is not None:
            tiers = lifecycle_of(store).tiers()
            find = partial(tiers.port.sql, tiers.cold.access_tokens.find)
            self._tokens.begin(find, partial(revoked_in_redis, tiers))

    @property
    def needs_sql(self) -> bool:
        """Whether a caller can be recognized only with an answer of SQL: by a token, and no valid one is known here."""
        others = self._jwts is not None or bool(self.proxies) or bool(self._access.key)
        return self._tokens is not None and not others and not self._tokens.knows_one

    async def close(self) -> None:
        """Stop reading tokens."""
        if self._tokens is not None:
            await self._tokens.close()

    async def caller(self, request: Request) -> Caller:
        """Find the caller of a request. Raises Unauthenticated, or Unavailable if the caller cannot be checked now."""
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

    async def still(self, caller: Caller) -> None:
        """Return if this caller's access token is still valid. Raises Unauthenticated, or Unavailable."""
        if self._tokens is not None and caller.token is not None:
            await self._tokens.still(caller.token)


def _bearer(given: list[str]) -> str:
    """The token of the header `Authorization`, "" if there is none."""
    scheme, _, text = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    return text.strip() if scheme.lower() == "bearer" and text.isascii() else ""


def _text(header: str) -> str:
    return header.encode("latin-1").decode("utf-8", "replace")


# Access tokens of SQL


@dataclass(frozen=True, slots=True)
class Ages:
    """Ages in seconds of a known token, and how long requests wait until it is read again."""

    fresh: float = 2.0  # an older token is read again, in the background
    revoked: float = 4.0  # for an older token the request waits until it is read again
    wait: float = 0.9  # at most this long for a known token
    wait_unknown: float = 5.0  # at most this long for an unknown one
    away: float = ACCEPTED_WITHOUT_SQL  # an older token is no longer accepted, even while SQL is unavailable


@dataclass(slots=True)
class _Known:
    found: FoundToken | None  # None: there is no such token
    caller: Caller
    read: float  # when SQL was asked for it, by the monotonic clock
    checked: float = float("-inf")  # when Redis was asked whether it is revoked

    def ended(self, now: float) -> bool:
        """Whether the token has expired or is revoked, which leaves it 0 seconds."""
        return self.found is None or (self.found.left is not None and now >= self.read + self.found.left)


class AccessTokens:
    """The access tokens that callers have used, kept in memory."""

    def __init__(self, ages: Ages | None = None, strangers: Strangers | None = None) -> None:
        self._ages = ages or Ages()
        self._strangers = strangers or Strangers()
        self._find: Find | None = None
        self._find_revoked: FindRevoked | None = None
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._absent: OrderedDict[str, float] = OrderedDict()  # separate, so that guesses do not evict existing tokens
        self._wanted: dict[str, asyncio.Future[_Known | None]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._silent = False  # SQL did not answer when it was last asked

    def begin(self, find: Find, find_revoked: FindRevoked) -> None:
        """Read tokens from SQL with `find` from now on, and those revoked from Redis while SQL does not answer."""
        self._find, self._find_revoked = find, find_revoked

    async def close(self) -> None:
        """Stop reading. Requests that wait for a token fail."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))
        self._give_up([*self._wanted])

    async def caller(self, text: str) -> Caller:
        """The caller of this token. Raises Unauthenticated, or Unavailable if SQL does not answer."""
        id = id_of(text)
        known = None if id is None else await self._look(id)
        if known is None or known.found is None or not compare_digest(known.found.digest, digest(text)):
            raise Unauthenticated
        return known.caller

    async def still(self, id: str) -> None:
        """Return if the token with this id is valid. Raises Unauthenticated, or Unavailable if SQL does not answer."""
        if await self._look(id) is None:
            raise Unauthenticated

    async def _look(self, id: str) -> _Known | None:
        """The token with this id, None if it is not valid."""
        if self._find is None:
            return None
        known = self._known.get(id)
        now = time.monotonic()
        if known is None or now - known.read > self._ages.fresh:
            known = await self._read(id, known, now)
        # The present time counts, not that of the request: the token may have been read meanwhile.
        return None if known is None or known.ended(time.monotonic()) else known

    @property
    def knows_one(self) -> bool:
        """Whether there is a token that would be accepted without SQL."""
        now = time.monotonic()
        after = now - self._ages.away
        return any(each.read >= after and not each.ended(now) for each in reversed(self._known.values()))

    async def _read(self, id: str, known: _Known | None, now: float) -> _Known | None:
        """Return the known token, read again if it is too old."""
        absent = self._absent.get(id)
        if known is None and absent is not None and now - absent <= self._ages.fresh:
            return None
        if known is None and len(self._wanted) >= _WAITING:
            raise HTTPException(429, "too many unknown tokens are being looked up")
        reading = self._ask(id)
        age = 0.0 if known is None else now - known.read
        if known is not None and age <= self._ages.revoked:
            return known
        # After one request waited without result, others do not wait for SQL, so that an outage does not slow down
        # every request.
        if known is not None and self._silent and age <= self._ages.away:
            return await self._unless_revoked(id, known)
        try:
            if known is None:
                wait = self._ages.wait if self._silent else self._ages.wait_unknown
                return await self._strangers.wait(reading, wait)
            async with asyncio.timeout(self._ages.wait):
                return await asyncio.shield(reading)
        except (ColdUnavailable, TimeoutError) as error:
            self._silent = True
            if known is not None and age <= self._ages.away:
                return await self._unless_revoked(id, known)
            raise Unavailable("tokens cannot be checked now") from error

    async def _unless_revoked(self, id: str, known: _Known) -> _Known:
        """The known token; with nothing left if Redis has it as revoked. Redis is asked every `fresh` seconds."""
        assert self._find_revoked is not None, "begin comes first"
        now = time.monotonic()
        if now - known.checked <= self._ages.fresh:
            return known
        try:
            async with asyncio.timeout(self._ages.wait):
                revoked = await self._find_revoked([id])
        except (StateError, TimeoutError) as error:
            log.debug("revocations cannot be read: %s", error)  # without Redis, a request can read hot data at most
            return known
        known.checked = now
        if revoked and known.found is not None:
            known.found = replace(known.found, left=0.0)
        return known

    def _ask(self, id: str) -> asyncio.Future[_Known | None]:
        """A future for SQL's answer about an id."""
        wanted = self._wanted.get(id)
        if wanted is None:
            wanted = self._wanted[id] = asyncio.get_running_loop().create_future()
            wanted.add_done_callback(_look_at)
        if self._reading is None:
            self._reading = asyncio.create_task(self._ask_all())
        return wanted

    async def _ask_all(self) -> None:
        try:
            while self._wanted:
                await self._ask_some([*self._wanted][:_TOGETHER])
                await asyncio.sleep(_PAUSE)
        finally:
            self._reading = None

    async def _ask_some(self, ids: list[str]) -> None:
        assert self._find is not None, "call begin() first"
        began = time.monotonic()
        try:
            found = await self._find(ids)
        except Exception as error:
            if not isinstance(error, ColdUnavailable):
                log.error("tokens cannot be read", exc_info=error)
            self._give_up(ids)
            return
        self._silent = False
        for id in ids:
            self._wanted.pop(id).set_result(self._remember(id, found.get(id), began))

    def _give_up(self, ids: list[str]) -> None:
        for id in ids:
            self._wanted.pop(id).set_exception(ColdUnavailable("tokens cannot be read"))

    def _remember(self, id: str, found: FoundToken | None, read: float) -> _Known | None:
        if found is None:
            self._known.pop(id, None)
            self._absent[id] = read
            if len(self._absent) > _KNOWN:
                self._absent.popitem(last=False)
            return None
        self._absent.pop(id, None)
        token = found.token
        rights = frozenset(each for each in RIGHTS if each in token.rights)  # a newer release may have more
        caller = Caller(token.actor or f"token:{id}", token.prefix, rights, f"token:{id}")
        known = self._known[id] = _Known(found, caller, read)
        self._known.move_to_end(id)  # in the order of reads: a token in use is read every few seconds
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        return known


def _look_at(future: asyncio.Future[_Known | None]) -> None:
    if not future.cancelled():
        future.exception()  # marks it as retrieved: perhaps no request waited for it


# JWTs of an identity provider


@dataclass(frozen=True, slots=True)
class Issuer:
    """An identity provider and the claims of its tokens: `tenant`, `rights` and `actor` are names of claims."""

    issuer: str
    audience: str
    keys_url: str  # of its JSON Web Key Set
    tenant: str = "tenant"
    rights: str = "scope"  # a list, or words separated by spaces; unknown rights are ignored
    actor: str = "sub"
    algorithms: tuple[str, ...] = ALGORITHMS
    leeway: float = 10.0  # maximum difference in seconds between the provider's clock and this one

    def __post_init__(self) -> None:
        if not (self.issuer and self.audience and self.keys_url):
            raise ConfigurationError("JWTs need an issuer, an audience and the URL of the issuer's keys")
        url = urlsplit(self.keys_url)
        if url.scheme != "https" and not (url.scheme == "http" and url.hostname in ("localhost", "127.0.0.1", "::1")):
            raise ConfigurationError(
                "jwt_keys: the keys are fetched over https, or anybody on the way could change them"
            )
        wrong = set(self.algorithms) - set(ALGORITHMS)
        if wrong or not self.algorithms:
            raise ConfigurationError(f"jwt_algorithms: some of {', '.join(ALGORITHMS)}, not {', '.join(sorted(wrong))}")


class Jwts:
    """The tokens of one identity provider."""

    def __init__(self, issuer: Issuer, strangers: Strangers | None = None) -> None:
        self._issuer = issuer
        self._keys = _Keys(issuer.keys_url, strangers or Strangers())
        self._checked: OrderedDict[bytes, tuple[Caller, float]] = OrderedDict()

    async def caller(self, text: str) -> Caller:
        """The caller of this token. Raises Unauthenticated, or Unavailable if the provider's keys are missing."""
        if len(text) > _LONGEST:
            raise Unauthenticated
        digest = hashlib.sha256(text.encode()).digest()
        found = self._checked.get(digest)
        if found is not None and time.monotonic() < found[1]:
            return found[0]
        try:
            header = jwt.get_unverified_header(text)
            if header.get("alg") not in self._issuer.algorithms or not isinstance(header.get("kid"), str):
                raise Unauthenticated
            claims = self._claims(text, await self._keys.key(header["kid"]))
        except jwt.PyJWTError as error:
            raise Unauthenticated from error
        caller = self._caller(claims)
        left = min(_CHECKED_FOR, (caller.expires or 0.0) - time.time())
        self._checked[digest] = caller, time.monotonic() + left
        if len(self._checked) > _REMEMBERED:
            self._checked.popitem(last=False)
        return caller

    def _claims(self, text: str, key: jwt.PyJWK) -> dict[str, Any]:
        issuer = self._issuer
        claims: dict[str, Any] = jwt.decode(
            text, key, algorithms=[*issuer.algorithms], issuer=issuer.issuer, audience=issuer.audience,
            leeway=issuer.leeway, options={"require": ["exp", "iss", "aud"], "verify_signature": True},
        )  # fmt: skip
        return claims

    def _caller(self, claims: dict[str, Any]) -> Caller:
        tenant, actor, granted = (claims.get(each) for each in self._names())
        if isinstance(granted, str):
            granted = granted.split()
        if not (isinstance(tenant, str) and isinstance(actor, str) and 0 < len(actor) <= _LONGEST_ACTOR):
            raise Unauthenticated
        if not isinstance(granted, list) or not all(isinstance(each, str) for each in granted):
            raise Unauthenticated
        try:
            rights = frozenset(each for each in RIGHTS if each in granted)
            # The user and the client program: a renewed token counts as the same credential.
            known = [claims.get(each, "") for each in ("sub", "azp", "client_id")]
            expires = float(claims["exp"]) + self._issuer.leeway
            return Caller(actor, prefix_of(tenant), rights, f"jwt:{known}", expires)
        except InvalidValue as error:
            raise Unauthenticated from error

    def _names(self) -> tuple[str, str, str]:
        return self._issuer.tenant, self._issuer.actor, self._issuer.rights


class _Keys:
    """The keys of a provider. They are fetched when one is missing, but at most every few seconds."""

    def __init__(self, url: str, strangers: Strangers) -> None:
        self._strangers = strangers
        # The client's own cache would fetch the keys for each token that names an unknown one.
        self._client = jwt.PyJWKClient(url, cache_jwk_set=False, timeout=_FETCHING)
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched = self._tried = float("-inf")
        self._fetching: asyncio.Task[None] | None = None

    async def key(self, id: str) -> jwt.PyJWK:
        """The key of this id. Raises Unauthenticated if there is none, Unavailable if none could be fetched."""
        now = time.monotonic()
        if id not in self._keys or now - self._fetched > _RENEW:
            fetching = self._fetch(now)
            if fetching is not None and (id not in self._keys or now - self._fetched > _LASTING):
                try:
                    await self._strangers.wait(fetching, _FETCHING)
                except TimeoutError as error:
                    raise Unavailable("the identity provider's keys cannot be fetched in time") from error
        if time.monotonic() - self._fetched > _LASTING:
            raise Unavailable("the identity provider's keys cannot be fetched")
        if id not in self._keys:
            raise Unauthenticated
        return self._keys[id]

    def _fetch(self, now: float) -> asyncio.Task[None] | None:
        if self._fetching is None and now - self._tried > _FETCH_PAUSE:
            self._tried = now
            self._fetching = asyncio.create_task(self._fetch_all())
        return self._fetching

    async def _fetch_all(self) -> None:
        began = time.monotonic()
        try:
            found = await asyncio.to_thread(self._client.get_jwk_set)
        except (jwt.PyJWTError, OSError, ValueError) as error:
            log.warning("the identity provider's keys cannot be fetched: %s", error)
        else:
            self._keys = {each.key_id: each for each in found.keys if each.key_id and each.key_type in _KEY_TYPES}
            self._fetched = began
        finally:
            self._fetching = None


# Requests whose caller is not known yet


class Strangers:
    """Counts waiting requests, and bounds their number."""

    def __init__(self, most: int = 512) -> None:
        self._most = most
        self._waiting = 0

    async def wait(self, found: asyncio.Future[T], seconds: float) -> T:
        """Wait for a result. Raises TimeoutError, and HTTPException 429 at once if too many wait."""
        if self._waiting >= self._most:
            raise HTTPException(429, f"this worker is already authenticating {self._most} requests")
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(found)
        finally:
            self._waiting -= 1


# Proxies that authenticate callers


class Proxies:
    """The addresses and networks of trusted proxies."""

    def __init__(self, networks: Iterable[str] = ()) -> None:
        try:
            self._networks = [ipaddress.ip_network(each, strict=True) for each in networks]
        except ValueError as error:
            raise ConfigurationError(f"trust_proxy: {error}: give addresses or networks, such as 10.0.0.0/8") from error

    def __bool__(self) -> bool:
        return bool(self._networks)

    def sent(self, request: Request) -> bool:
        """Whether a trusted proxy sent this request, with headers that name the caller."""
        if not self._networks or request.client is None or not self._has(request.client.host):
            return False
        return any(name in request.headers for name in (ACTOR, TENANT, GRANTED))

    def caller(self, request: Request) -> Caller:
        """The caller that the headers name: `X-Tenant` (`*` for all tenants), `X-Rights`, and optionally `X-Actor`.

        Raises Unauthenticated if one is missing or occurs twice: the client may have sent one of the two.
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
        """The client's address: the last one of `X-Forwarded-For` that is not a trusted proxy."""
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
        mapped = getattr(found, "ipv4_mapped", None)  # an IPv4 peer of a dual-stack socket
        return any((mapped or found) in network for network in self._networks)


def _only(request: Request, name: str) -> str:
    values = request.headers.getlist(name)
    if len(values) != 1 or not values[0]:
        raise Unauthenticated
    return values[0].encode("latin-1").decode("utf-8", "replace")


# Names and addresses of the service


class Hosts:
    """The names that a service may be called by, without port; without names, any is allowed."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(name.lower() for name in names)
        for name in self._names:
            if (shaped := _HOST.fullmatch(name)) is None or shaped[2]:
                raise ConfigurationError(f"allow_host: {name!r:.80} is not a host name without a port")

    def allow(self, given: list[str]) -> bool:
        """Whether a request with these `Host` headers may be answered."""
        if not self._names:
            return True
        shaped = _HOST.fullmatch(given[0].lower()) if len(given) == 1 else None
        return shaped is not None and shaped[1] in self._names


def require_loopback(address: str) -> None:
    """Raise ConfigurationError if other machines can reach a service that listens on this address."""
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise ConfigurationError(
            f"listening on {address} without authentication would give everyone access to all data: "
            "name --tokens, --jwt-issuer or --trust-proxy, listen on 127.0.0.1, or use --insecure"
        )


class KnownHosts:
    """An ASGI application that lets `refuse` answer requests by unknown names with 421, and `app` all others."""

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
                app = await self._refuse(
                    Request(scope), HTTPException(421, "this service does not serve this host name")
                )
        await app(scope, receive, send)
