"""How callers are known: JWTs of an identity provider, proxies, tokens while SQL is away, and who is let in without."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from sqlalchemy import Engine, event
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.testclient import TestClient
from typer.testing import CliRunner

from distributed_state.cold.store import ColdStore
from distributed_state.errors import (
    ColdUnavailable,
    ConfigurationError,
    InvalidValue,
    NotFound,
    StateError,
    Unauthenticated,
    Unavailable,
    WarmUnavailable,
)
from distributed_state.programs.cli import shell
from distributed_state.programs.service import Access, Issuer, Service, authentication
from distributed_state.programs.service.authentication import (
    AccessTokens,
    Ages,
    Authentication,
    Caller,
    Hosts,
    Jwts,
    Proxies,
    Strangers,
    require_loopback,
)
from distributed_state.values import access_tokens
from distributed_state.values.access_tokens import AccessToken, FoundToken

ISSUER, AUDIENCE = "https://identity.example/", "state"
CURVE = ec.generate_private_key(ec.SECP256R1())


@cache
def key(name: str = "ours") -> rsa.RSAPrivateKey:
    """One of several; made when it is first asked for, as that takes a tenth of a second."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def asked(*headers: tuple[str, str], client: str = "10.1.2.3") -> Request:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    return Request({"type": "http", "headers": raw, "client": (client, 5000)})


# JWTs


class Provider:
    """An identity provider's set of keys."""

    def __init__(self) -> None:
        self.keys = {"one": key().public_key(), "curve": CURVE.public_key()}
        self.fetched = 0
        self.broken = False
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.fetched += 1
                self.send_response(500 if provider.broken else 200)
                self.end_headers()
                self.wfile.write(json.dumps({"keys": provider.set()}).encode())

            def log_message(self, *_: Any) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/keys"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def set(self) -> list[dict[str, Any]]:
        found = []
        for id, each in self.keys.items():
            kind = jwt.algorithms.RSAAlgorithm if isinstance(each, rsa.RSAPublicKey) else jwt.algorithms.ECAlgorithm
            found.append(kind.to_jwk(each, as_dict=True) | {"kid": id, "use": "sig"})
        return [*found, {"kty": "oct", "kid": "shared", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0"}]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def provider() -> Iterator[Provider]:
    found = Provider()
    yield found
    found.close()


def claims(**changed: Any) -> dict[str, Any]:
    given = {
        "iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60, "tenant": "acme", "sub": "Zoë",
        "scope": "openid read write",
    }  # fmt: skip
    return {name: value for name, value in (given | changed).items() if value is not None}


def signed(by: Any = None, id: str | None = "one", algorithm: str = "RS256", **changed: Any) -> str:
    return jwt.encode(claims(**changed), by or key(), algorithm, headers={} if id is None else {"kid": id})


def public() -> bytes:
    return key().public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def forged(header: dict[str, Any], secret: bytes) -> str:
    """A token with a shared secret, which the library would refuse to make of a public key."""
    parts = [base64.urlsafe_b64encode(json.dumps(each).encode()).rstrip(b"=") for each in (header, claims())]
    mac = hmac.new(secret, b".".join(parts), hashlib.sha256).digest() if secret else b""
    return b".".join([*parts, base64.urlsafe_b64encode(mac).rstrip(b"=")]).decode()


def jwts(provider: Provider, **options: Any) -> Jwts:
    return Jwts(Issuer(ISSUER, AUDIENCE, provider.url, **options))


async def test_a_jwt_says_tenant_rights_and_actor(provider: Provider) -> None:
    expected = Caller("Zoë", "acme:", frozenset({"read", "write"}))
    found = jwts(provider)
    assert replace(await found.caller(signed()), credential="") == expected
    curve = await found.caller(signed(CURVE, "curve", "ES256", scope=["read", "write", "x"]))
    assert replace(curve, credential="") == expected
    named = jwts(provider, tenant="org", rights="permissions", actor="email")
    text = signed(org="b:", permissions=["events"], email="z@example", tenant=None, scope=None, sub=None)
    assert replace(await named.caller(text), credential="") == Caller("z@example", "b:", frozenset({"events"}))
    assert provider.fetched == 2, "the keys are kept"


REFUSED = {
    "expired": lambda: signed(exp=time.time() - 60),
    "without an end": lambda: signed(exp=None),
    "not yet valid": lambda: signed(nbf=time.time() + 60),
    "of another issuer": lambda: signed(iss="https://identity.example.evil/"),
    "of no issuer": lambda: signed(iss=None),
    "for another audience": lambda: signed(aud="mail"),
    "for no audience": lambda: signed(aud=None),
    "without a tenant": lambda: signed(tenant=None),
    "of every tenant": lambda: signed(tenant=""),
    "of a tenant that is no name": lambda: signed(tenant=["acme"]),
    "of a tenant with a wildcard": lambda: signed(tenant="*"),
    "without rights": lambda: signed(scope=None),
    "with rights that are no names": lambda: signed(scope=[1]),
    "without an actor": lambda: signed(sub=None),
    "by another key": lambda: signed(key("another")),
    "by a key of another id": lambda: signed(CURVE, "one", "ES256"),
    "by a key that is unknown": lambda: signed(key("another"), "two"),
    "that names no key": lambda: signed(id=None),
    "without a signature": lambda: forged({"alg": "none", "kid": "one", "typ": "JWT"}, b""),
    "by the public key as a secret": lambda: forged({"alg": "HS256", "kid": "one", "typ": "JWT"}, public()),
    "by a shared secret": lambda: forged({"alg": "HS256", "kid": "shared"}, b"secret" * 5),
    "by a shared secret that claims to be none": lambda: forged({"alg": "RS256", "kid": "shared"}, b"secret" * 5),
    "with a changed claim": lambda: signed()[:40] + "A" + signed()[41:],
    "that is none": lambda: "a.b.c",
    "that is too long": lambda: signed(more="x" * 20_000),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_jwt_is_refused(kind: str, provider: Provider) -> None:
    found = jwts(provider)
    with pytest.raises(Unauthenticated):
        await found.caller(REFUSED[kind]())
    assert (await found.caller(signed())).prefix == "acme:"


async def test_a_token_that_was_checked_ends_when_it_says(provider: Provider) -> None:
    found = jwts(provider, leeway=0.0)
    text = signed(exp=int(time.time()) + 2)
    assert await found.caller(text)
    async with asyncio.timeout(10):
        with pytest.raises(Unauthenticated):
            while True:
                await found.caller(text)
                await asyncio.sleep(0.02)


async def test_unknown_keys_do_not_have_the_set_fetched_again_and_again(provider: Provider) -> None:
    found = jwts(provider)
    assert await found.caller(signed())
    for number in range(50):
        with pytest.raises(Unauthenticated):
            await found.caller(signed(key("another"), f"unknown-{number}"))
    assert provider.fetched == 1


async def test_without_the_providers_keys_nobody_is_refused_or_let_in(provider: Provider) -> None:
    provider.broken = True
    found = jwts(provider)
    for _ in range(3):
        with pytest.raises(Unavailable):
            await found.caller(signed())
    assert provider.fetched == 1


async def test_a_provider_that_does_not_end_its_answer_is_waited_for_so_long(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte may come in time: it is all of it that has to."""
    over = threading.Event()
    monkeypatch.setattr(authentication, "_FETCHING", 0.05)
    monkeypatch.setattr(jwt.PyJWKClient, "get_jwk_set", lambda _: over.wait(10))
    try:
        with pytest.raises(Unavailable, match="in time"):
            await jwts(provider).caller(signed())
    finally:
        over.set()


@pytest.mark.parametrize(
    "wrong",
    [
        {"issuer": ""}, {"audience": ""}, {"keys_url": ""}, {"keys_url": "http://identity.example/keys"},
        {"algorithms": ("HS256",)}, {"algorithms": ("none", "RS256")}, {"algorithms": ()},
    ],
)  # fmt: skip
def test_settings_of_jwts_that_protect_nobody_are_refused(wrong: dict[str, Any]) -> None:
    given = {"issuer": ISSUER, "audience": AUDIENCE, "keys_url": "https://identity.example/keys"}
    assert Issuer(**given)
    with pytest.raises(ConfigurationError):
        Issuer(**given | wrong)


# Proxies

SAID = (("X-Tenant", "acme"), ("X-Rights", "read, write"), ("X-Actor", "Zoë"))


async def test_what_a_proxy_says_is_believed_from_its_address_alone() -> None:
    found = Authentication(Access(trust_proxy=("10.0.0.0/8", "::1")))
    expected = Caller("Zoë", "acme:", frozenset({"read", "write"}))
    for client in ("10.1.2.3", "::1", "::ffff:10.9.9.9"):
        assert await found.caller(asked(*SAID, client=client)) == expected
    assert (await found.caller(asked(("X-Tenant", "*"), SAID[1]))).prefix == ""
    for client in ("11.1.2.3", "127.0.0.1", "::2", "", "testclient"):
        with pytest.raises(Unauthenticated):
            await found.caller(asked(*SAID, client=client))
        with pytest.raises(Unauthenticated):
            await found.caller(asked(*SAID, ("X-Forwarded-For", "10.1.2.3"), client=client))


@pytest.mark.parametrize(
    "headers",
    [
        SAID[:1], SAID[1:], SAID[:1] + SAID[2:], (*SAID, SAID[0]), (*SAID, SAID[1]), (*SAID, SAID[2]),
        (("X-Tenant", ""), *SAID[1:]), (("X-Tenant", "a b"), *SAID[1:]), (SAID[0], ("X-Rights", "read,all")), (),
    ],
)  # fmt: skip
async def test_a_proxy_that_says_too_little_or_too_much_is_not_believed(headers: Any) -> None:
    with pytest.raises(Unauthenticated):
        await Authentication(Access(trust_proxy=("10.0.0.0/8",))).caller(asked(*headers))


def test_the_address_in_the_log_is_that_of_who_asked_the_last_proxy_of_ours() -> None:
    found = Proxies(["10.0.0.0/8"])
    forwarded = ("X-Forwarded-For", "1.1.1.1, 9.9.9.9, 10.4.4.4")
    assert found.client(asked(forwarded)) == "9.9.9.9"
    assert found.client(asked(forwarded, client="8.8.8.8")) == "8.8.8.8"
    assert found.client(asked()) == "10.1.2.3"
    assert Proxies().client(asked(forwarded)) == "10.1.2.3"
    with pytest.raises(ConfigurationError, match="trust_proxy"):
        Proxies(["10.0.0.1/8"])


# Tokens while SQL is away


class Sql:
    """What answers in SQL's place."""

    def __init__(self, text: str) -> None:
        self.found = FoundToken(
            AccessToken(access_tokens.id_of(text) or "", "acme:", ("read",), "web", 1.0, None, None),
            access_tokens.digest(text),
            None,
        )
        self.away: StateError | None = None
        self.silent = False
        self.asked = 0
        self.revoked: set[str] | StateError = set()

    async def find_revoked(self, ids: Any) -> set[str]:
        """Redis, not SQL, answers this."""
        if isinstance(self.revoked, StateError):
            raise self.revoked
        return self.revoked & set(ids)

    async def find(self, ids: Any) -> dict[str, FoundToken]:
        self.asked += 1
        if self.silent:
            await asyncio.Event().wait()
        if self.away:
            raise self.away
        return {self.found.token.id: self.found} if self.found.token.id in ids else {}


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which what is known of tokens grows old."""
    monkeypatch.setattr(authentication, "time", found := Clock())
    return found


@pytest.mark.parametrize("how", ["refuses", "is silent"])
async def test_while_sql_is_away_a_known_token_goes_on_for_a_while_and_an_unknown_one_is_not_refused(
    how: str, clock: Clock
) -> None:
    text, unknown = access_tokens.make()[1], access_tokens.make()[1]
    sql = Sql(text)
    ages = Ages(wait=0.02, wait_unknown=0.02, away=60.0)
    tokens = AccessTokens(ages)
    tokens.begin(sql.find, sql.find_revoked)
    assert (await tokens.caller(text)).prefix == "acme:"
    sql.silent, sql.away = how == "is silent", ColdUnavailable("away")
    for seconds in (1, 3, 5, 30, 59):
        clock.now = 100 + seconds
        assert (await tokens.caller(text)).prefix == "acme:"
        with pytest.raises(Unavailable):
            await tokens.caller(unknown)
    clock.now = 161
    with pytest.raises(Unavailable):
        await tokens.caller(text)
    await tokens.close()
    sql.silent, sql.away = False, None
    tokens = AccessTokens(replace(ages, wait_unknown=60.0))
    tokens.begin(sql.find, sql.find_revoked)
    with pytest.raises(Unauthenticated):
        await tokens.caller(unknown)
    assert await tokens.caller(text)


async def test_while_sql_is_away_a_token_that_redis_has_as_revoked_is_refused_at_its_first_use(clock: Clock) -> None:
    text = access_tokens.make()[1]
    sql = Sql(text)
    tokens = AccessTokens(Ages(wait=0.02))
    tokens.begin(sql.find, sql.find_revoked)
    await tokens.caller(text)
    sql.away, sql.revoked = ColdUnavailable("away"), WarmUnavailable("away, too")
    clock.now += 3580
    assert (await tokens.caller(text)).prefix == "acme:", "nobody can say that it is revoked"
    sql.revoked = set()
    assert (await tokens.caller(text)).prefix == "acme:"
    sql.revoked = {sql.found.token.id}
    assert (await tokens.caller(text)).prefix == "acme:", "Redis was asked less than 2 seconds ago"
    clock.now += 2.1
    for _ in range(3):
        with pytest.raises(Unauthenticated):
            await tokens.caller(text)
    sql.away = None
    with suppress(Unauthenticated):
        await tokens.caller(text)  # so SQL is asked again
    async with asyncio.timeout(5):
        while tokens._reading is not None:
            await asyncio.sleep(0.001)
    assert (await tokens.caller(text)).prefix == "acme:", "SQL decides again"
    await tokens.close()


async def test_an_outage_of_sql_slows_no_known_token_down(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    text = access_tokens.make()[1]
    sql = Sql(text)
    tokens = AccessTokens(Ages(wait=0.021))
    tokens.begin(sql.find, sql.find_revoked)
    await tokens.caller(text)
    sql.silent = True
    clock.now += 5
    waits, timeout = list[float | None](), asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda delay: (waits.append(delay), timeout(delay))[1])
    for _ in range(20):
        await tokens.caller(text)
    assert waits.count(0.021) == 2, "one has waited for SQL and asked Redis, and no other"
    await tokens.close()


@pytest.mark.parametrize("most", [3, 100])
async def test_while_sql_is_silent_few_strangers_wait_and_none_of_them_in_anothers_place(most: int) -> None:
    """With room for all of them all wait."""
    text = access_tokens.make()[1]
    sql = Sql(text)
    tokens = AccessTokens(Ages(fresh=0.0, revoked=0.0, wait=0.05, wait_unknown=60.0), Strangers(most))
    tokens.begin(sql.find, sql.find_revoked)
    await tokens.caller(text)
    sql.silent = True
    asked = [asyncio.create_task(tokens.caller(access_tokens.make()[1])) for _ in range(20)]
    for _ in range(20):
        await asyncio.sleep(0)
    refused = [each for each in asked if each.done()]
    assert len(refused) == max(0, 20 - most)
    assert all(isinstance(each.exception(), HTTPException) for each in refused)
    assert (await tokens.caller(text)).prefix == "acme:"
    await tokens.close()
    async with asyncio.timeout(5):
        told = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(type(each) is Unavailable for each in told) == min(20, most), "when the worker stops"


async def test_guesses_that_wait_keep_no_known_token_from_being_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "_WAITING", 2)
    text = access_tokens.make()[1]
    sql = Sql(text)
    tokens = AccessTokens(Ages(fresh=0.0, revoked=0.0, wait=0.02, wait_unknown=0.02))
    tokens.begin(sql.find, sql.find_revoked)
    await tokens.caller(text)
    sql.silent = True
    for refusal in (Unavailable, Unavailable, HTTPException):
        with pytest.raises(refusal):
            await tokens.caller(access_tokens.make()[1])
    assert (await tokens.caller(text)).prefix == "acme:"
    await tokens.close()


async def test_tokens_end_by_the_clock_of_the_database_and_belong_to_a_namespace(servers: Any, namespace: str) -> None:
    archive = servers.database()
    cold, other = ColdStore.open(archive, namespace), ColdStore.open(archive, f"{namespace}-2")
    try:
        tokens, made = cold.access_tokens, [access_tokens.make() for _ in range(3)]
        for (id, text), seconds in zip(made, (60.0, None, 0.0), strict=True):
            kept = tokens.add(
                id, access_tokens.digest(text), prefix="a:", rights=["write", "read"], actor="Zoë", seconds=seconds
            )
            assert (kept.rights, kept.actor, kept.revoked) == (("read", "write"), "Zoë", None)
        for actor in ("Zoë\0", "Zoë\udceb"):
            with pytest.raises(InvalidValue, match="no NUL and no lone surrogate"):
                tokens.add("0" * 16, b"", prefix="a:", rights=["read"], actor=actor, seconds=None)
        first, lasting, ended = (id for id, _ in made)
        found = tokens.find([first, lasting, ended, "unknown"])
        assert found.keys() == {first, lasting, ended} == {each.id for each in tokens.all()}
        assert 50 < (found[first].left or 0) <= 60
        assert (found[lasting].left, found[ended].left) == (None, 0.0)
        assert found[first].digest == access_tokens.digest(made[0][1])
        revoked = tokens.revoke(lasting)
        assert revoked[1] == {lasting}
        assert tokens.revoke(lasting) == revoked, "it stays when it was"
        assert tokens.find([lasting])[lasting].left == 0.0
        assert other.access_tokens.find([first]) == {}
        with pytest.raises(NotFound):
            other.access_tokens.revoke(first)
    finally:
        cold.close()
        other.close()


async def test_a_chain_of_tokens_is_revoked_in_few_statements(servers: Any, namespace: str) -> None:
    """Who may make tokens makes one with the other; level by level, ten thousand kept SQLite from others for 40 s."""
    cold = ColdStore.open(servers.database(), namespace)
    statements: list[str] = []

    def note(*given: Any) -> None:
        statements.append(given[2])

    try:
        maker: str | None = None
        ids = [access_tokens.make()[0] for _ in range(30)]
        for id in ids:
            more = {"prefix": "a:", "rights": ["read"], "actor": "", "seconds": None}
            maker = cold.access_tokens.add(id, id.encode(), made_by=maker, **more).id
        event.listen(Engine, "before_cursor_execute", note)
        cold.access_tokens.revoke(ids[5])
        event.remove(Engine, "before_cursor_execute", note)
        assert len(statements) < 15
        left = {each.id for each in cold.access_tokens.all() if each.revoked is None}
        assert left == set(ids[:5])
    finally:
        cold.close()


# The command


def run(*words: str, code: int = 0) -> tuple[str, str]:
    """What a command prints on stdout and stderr."""
    done = CliRunner().invoke(shell.app, [*words])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout, done.stderr


def test_a_token_is_printed_once_and_listed_without_its_secret(tmp_path: Path) -> None:
    archive = ("--archive", f"sqlite:///{tmp_path}/a.db", "token")
    text, said = run(
        *archive, "create", "--tenant", "acme", "--rights", "read,events", "--expires", "2h", "--actor", "w"
    )
    assert said == ""
    id = access_tokens.id_of(text.removesuffix("\n"))
    listed, _ = run(*archive, "list", "--json")
    shown = json.loads(listed)
    assert (shown["id"], shown["prefix"], shown["rights"], shown["actor"]) == (id, "acme:", ["events", "read"], "w")
    assert shown["expires"] - shown["created"] == 7200
    secret = text.strip().partition(f"{id}_")[2]
    assert len(secret) == 43
    assert secret not in listed
    assert secret not in run(*archive, "list")[0]
    assert secret.encode() not in (tmp_path / "a.db").read_bytes()
    run(*archive, "revoke", str(id))
    assert json.loads(run(*archive, "list", "--json")[0])["revoked"]


def test_a_token_in_a_file_is_for_its_owner_and_made_once(tmp_path: Path) -> None:
    file = tmp_path / "token"
    archive = ("--archive", f"sqlite:///{tmp_path}/a.db", "token")
    make = (*archive, "create", "--all-tenants", "--rights", "read", "--into", str(file))
    said = run(*make)[0]
    assert file.read_text().strip() not in said, "a log is read by others"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    first = file.read_text()
    run(*make)
    assert file.read_text() == first
    run(*archive, "revoke", str(access_tokens.id_of(first.strip())))
    run(*make)
    assert file.read_text() != first, "that one is not valid any more"


def test_a_token_that_would_be_another_than_was_meant_is_not_made(tmp_path: Path) -> None:
    archive = ("--archive", f"sqlite:///{tmp_path}/a.db", "token")
    for words in (
        (), ("--tenant", "a b"), ("--tenant", "a", "--all-tenants"), ("--tenant", "a", "--rights", "read,all"),
        ("--tenant", "a", "--expires", "soon"), ("--tenant", ""), ("--tenant", "*"),
    ):  # fmt: skip
        run(*archive, "create", *words, code=1)
    assert run(*archive, "list", "--json")[0] == ""


# Closed without any of it


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.1", "fe80::1%eth0"])
def test_a_service_that_knows_no_callers_is_for_its_machine_alone(address: str) -> None:
    with pytest.raises(ConfigurationError, match="--tokens"):
        require_loopback(address)
    for known in (Access(tokens=True), Access(trust_proxy=("10.0.0.1",)), Access(insecure=True)):
        Authentication(known).require_place(address)
    require_loopback("127.0.0.1")
    require_loopback("::1")


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True), ("LOCALHOST:8080", True), ("127.0.0.1:1", True), ("[::1]:8080", True),
        ("api.example", True),
        ("evil.example", False), ("localhost.evil.example", False), ("localhost:8080@evil", False), ("", False),
        ("localhost, evil", False), ("127.0.0.2", False), ("api.example.", False),
    ],
)  # fmt: skip
async def test_only_a_name_that_is_known_is_answered(host: str, allowed: bool) -> None:
    service = Service(authentication=Authentication(Access(allow_host=("api.example",))))
    transport = httpx.ASGITransport(service.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for path in ("/healthz", "/v1/conversations", "/nowhere"):
            found = await http.get(path, headers={"Host": host, "X-Request-Id": "mine"})
            assert (found.status_code == 421) is not allowed
            if not allowed:
                assert found.headers["x-request-id"] == found.json()["instance"] == "mine"


def test_hosts_are_not_looked_at_where_callers_are_known_and_one_host_is_named() -> None:
    for access in (Access(tokens=True), Access(insecure=True)):
        assert Authentication(access).hosts.allow(["evil.example"])
    assert not Authentication(Access(tokens=True, allow_host=("api.example",))).hosts.allow(["evil.example"])
    assert not Hosts(["localhost"]).allow([])
    assert not Hosts(["localhost"]).allow(["localhost", "localhost"])
    with pytest.raises(ConfigurationError, match="allow_host"):
        Hosts(["localhost:8080"])


def test_metrics_on_the_services_own_port_are_for_who_may_see_all_tenants() -> None:
    service = Service(authentication=Authentication(Access(trust_proxy=("10.0.0.0/8",))))
    with TestClient(service.app, client=("10.0.0.1", 5)) as http:
        for headers, status in (
            ({}, 401),
            ({"X-Tenant": "*", "X-Rights": "read"}, 403),
            ({"X-Tenant": "acme", "X-Rights": "admin"}, 403),
            ({"X-Tenant": "*", "X-Rights": "admin"}, 200),
        ):
            assert http.get("/metrics", headers=headers).status_code == status
        assert http.get("/healthz").status_code == 200
