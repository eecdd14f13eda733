"""Recognizes callers by JWTs of an identity provider. Law: what a token says counts if all of it was checked.

Only signatures of key pairs are accepted: with a shared secret, the provider's public key would be one that everybody
knows. Source: RFC 8725, "JSON Web Token Best Current Practices".
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import jwt

from distributed_state.errors import ConfigurationError, InvalidValue, Unauthenticated, Unavailable
from distributed_state.programs.service.auth.strangers import Strangers
from distributed_state.programs.service.callers import Caller
from distributed_state.values.access_tokens import RIGHTS, prefix_of

log = logging.getLogger(__name__)
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_KEY_TYPES = ("RSA", "EC", "OKP")
_LONGEST = 16_384  # characters of a token
_REMEMBERED = 10_000  # tokens that were checked
_CHECKED_FOR = 60.0  # seconds that the check of a token counts, if it does not expire before
_RENEW = 300.0  # seconds after which the keys are fetched again
_LASTING = 3600.0  # seconds that they count while the provider is away
_PAUSE = 10.0  # seconds between two fetches, whatever keys tokens name
_FETCHING = 5.0  # seconds that the provider may be silent, and that a request waits for the keys
_LONGEST_ACTOR = 200


@dataclass(frozen=True, slots=True)
class Issuer:
    """An identity provider, and where its tokens say what: `tenant`, `rights` and `actor` are names of claims."""

    issuer: str
    audience: str
    keys_url: str  # of its JSON Web Key Set
    tenant: str = "tenant"
    rights: str = "scope"  # a list, or a text with spaces between; what is none of our rights is passed over
    actor: str = "sub"
    algorithms: tuple[str, ...] = ALGORITHMS
    leeway: float = 10.0  # seconds that its clock and ours may be apart

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
        """Whose token this is. Raises Unauthenticated, or Unavailable if the provider's keys cannot be had."""
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
        left = min(_CHECKED_FOR, float(claims["exp"]) + self._issuer.leeway - time.time())
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
            # The user, and the program that it was given to: what is renewed is not another one.
            known = [claims.get(each, "") for each in ("sub", "azp", "client_id")]
            return Caller(actor, prefix_of(tenant), rights, f"jwt:{known}")
        except InvalidValue as error:
            raise Unauthenticated from error

    def _names(self) -> tuple[str, str, str]:
        return self._issuer.tenant, self._issuer.actor, self._issuer.rights


class _Keys:
    """The keys of a provider, fetched when one is missing, and at most every few seconds."""

    def __init__(self, url: str, strangers: Strangers) -> None:
        self._strangers = strangers
        # Without a cache of its own: a key that it does not know would be fetched for each token that names one.
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
        if self._fetching is None and now - self._tried > _PAUSE:
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
