"""Every way to a server: TLS, logins, tokens that rotate, sockets, IPv6, and behind Sentinels and in a cluster too."""

from __future__ import annotations

import itertools
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from below import logged_in, relocated, server_binary, tiers, until
from certificates import TLS, signed_certificates, tls_words
from sync_api import Blocking, in_thread

from distributed_state import AsyncStateStore, ConfigurationError, StateStore, WarmUnavailable
from distributed_state.programs.servers import (
    ClusterNode,
    SentinelServer,
    free_port,
    redis_cluster,
    redis_sentinel,
    redis_server,
)

API = pytest.mark.parametrize("api", ["asyncio", pytest.param("blocking", marks=pytest.mark.wide)])
# Of tests that a default run leaves out.
ONE_FACE = pytest.mark.parametrize("api", ["blocking", pytest.param("asyncio", marks=pytest.mark.full)])


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    return {"archive": f"sqlite:///{tmp_path}/archive.db", "namespace": f"t{uuid.uuid4().hex[:12]}"}


async def works(api: str, url: str, **settings: Any) -> None:
    """Open a store, write to several partitions, and read it back."""
    if api == "asyncio":
        store: Any = await AsyncStateStore.open(url, **settings)
    else:
        store = Blocking(await in_thread(lambda: StateStore.open(url, **settings)))
    try:
        for number in range(6):
            assert await store.session(f"s{number}").set("a", number) == 1
            assert await store.session(f"s{number}").get("a", fresh=True) == number
    finally:
        await store.close()


# Certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return signed_certificates(tmp_path_factory.mktemp("certificates"))


@contextmanager
def with_tls(certificates: Path, *, clients: str = "no") -> Iterator[str]:
    port = free_port()
    with redis_server(*tls_words(certificates, port, clients=clients), binary=server_binary("redis")) as server:
        yield f"rediss://:{server.password}@127.0.0.1:{port}?ssl_ca_certs={certificates}/ca.crt"


@TLS
@API
async def test_tls_and_whom_it_trusts(api: str, certificates: Path, place: Any) -> None:
    with with_tls(certificates) as url:
        await works(api, url, **place)
        await works(api, url.replace("127.0.0.1", "localhost"), **place | {"namespace": "other"})
        with pytest.raises(ConfigurationError, match="certificate is not trusted"):
            await works(api, url.replace("ca.crt", "other.crt"), **place)
        with pytest.raises((WarmUnavailable, ConfigurationError)):
            await works(api, url.replace("rediss://", "redis://"), retry_for=0, timeout=1.0, **place)


@TLS
@API
async def test_client_certificates(api: str, certificates: Path, place: Any) -> None:
    with with_tls(certificates, clients="yes") as url:
        mine = f"{url}&ssl_certfile={certificates}/client.crt&ssl_keyfile={certificates}/client.key"
        await works(api, mine, **place)
        with pytest.raises((WarmUnavailable, ConfigurationError)):
            await works(api, url, retry_for=0, timeout=1.0, **place)


@pytest.mark.wide
@TLS
@ONE_FACE
async def test_tls_in_a_cluster(api: str, certificates: Path, place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its servers name the ports of TLS to who asks with TLS."""
    plain, ports = ClusterNode._settings, dict[int, int]()

    def settings(self: ClusterNode) -> dict[str, str]:
        words = tls_words(certificates, ports.setdefault(self.port, free_port()))
        secured = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
        return plain(self) | secured | {"tls-cluster": "yes"}

    monkeypatch.setattr(ClusterNode, "_settings", settings)
    with redis_cluster(replicas=0, binary=server_binary("redis")) as cluster:
        seeds = ",".join(f"127.0.0.1:{ports[node.port]}" for node in cluster.nodes[:2])
        await works(
            api,
            f"{relocated(cluster.url, seeds).replace('redis', 'rediss', 1)}?ssl_ca_certs={certificates}/ca.crt",
            **place,
        )
        for node in cluster.nodes:
            assert any(line.startswith("cmdstat_evalsha") for line in node.ask("INFO", "commandstats").splitlines())


class SecuredSentinel(SentinelServer):
    """A Sentinel that speaks TLS to clients, and to a primary that does."""

    def __init__(self, binary: str, folder: Path, primary: Any, certificates: Path, primary_port: int) -> None:
        self.tls_port, self._certificates, self._primary_port = free_port(), certificates, primary_port
        super().__init__(binary, folder, primary, 1, 60_000)

    def _first_configuration(self, primary: Any, quorum: int, down_after_ms: int) -> str:
        lines = super()._first_configuration(primary, quorum, down_after_ms)
        words = tls_words(self._certificates, self.tls_port)
        secured = [f"{name.removeprefix('--')} {value}" for name, value in zip(words[::2], words[1::2], strict=True)]
        named = lines.replace(f" 127.0.0.1 {primary.port} ", f" 127.0.0.1 {self._primary_port} ")
        assert named != lines
        return "\n".join([*secured, "tls-replication yes", named])


@TLS
@ONE_FACE
@pytest.mark.wide
async def test_tls_to_sentinels_and_whom_it_trusts(api: str, certificates: Path, place: Any, tmp_path: Path) -> None:
    """Theirs are the servers' certificates, unless they have their own."""
    port, binary = free_port(), server_binary("redis")
    with redis_server(*tls_words(certificates, port), binary=binary) as primary:
        sentinel = SecuredSentinel(binary, tmp_path / "sentinel", primary, certificates, port)
        sentinel.start()
        try:
            at = f":{primary.password}@127.0.0.1:{sentinel.tls_port}/mymaster/0?sentinel_password={primary.password}&"
            ours, other = f"ssl_ca_certs={certificates}/ca.crt", f"ssl_ca_certs={certificates}/other.crt"
            await works(api, f"rediss+sentinel://{at}{ours}", **place)
            await works(api, f"rediss+sentinel://{at}{ours}&sentinel_{ours}", **place | {"namespace": "own"})
            for query in (other, f"{ours}&sentinel_{other}", f"{other}&sentinel_{ours}"):
                with pytest.raises(ConfigurationError, match="certificate is not trusted"):
                    await works(api, f"rediss+sentinel://{at}{query}", retry_for=0, **place)
            with pytest.raises((WarmUnavailable, ConfigurationError)):
                await works(api, f"redis+sentinel://{at.rstrip('&')}", retry_for=0, timeout=1.0, **place)
        finally:
            sentinel.kill()


# Logins


ACL = ("alice on >wonder ~* &* +@all", "bob on >builder ~* &* +@all -info")


@API
async def test_a_user_and_one_who_lacks_a_right(api: str, place: Any) -> None:
    with redis_server(binary=server_binary("redis")) as server:
        for rule in ACL:
            server.ask("ACL", "SETUSER", *rule.split())
        await works(api, logged_in(server.url, "alice:wonder"), **place)
        await works(api, logged_in(server.url, "bob:builder"), **place | {"namespace": "bobs"})
        with pytest.raises(ConfigurationError, match="refused user name or password") as caught:
            await works(api, logged_in(server.url, "alice:wrong-one"), **place)
        assert "wrong-one" not in str(caught.value)
        server.ask("ACL", "SETUSER", "carol", "on", ">c", "~*", "&*", "+@all", "-evalsha", "-eval")
        with pytest.raises(ConfigurationError, match="lacks a right"):
            await works(api, logged_in(server.url, "carol:c"), **place)


@API
async def test_sentinels_with_a_password_of_their_own(api: str, place: Any) -> None:
    with redis_sentinel(replicas=1) as watched:
        for sentinel in watched.sentinels:
            sentinel.ask("ACL", "SETUSER", "watcher", "on", ">sentinels", "+@all", "&*")
            sentinel.ask("ACL", "SETUSER", "default", "off")
        url = watched.url.partition("?")[0]
        await works(api, f"{url}?sentinel_username=watcher&sentinel_password=sentinels", **place)
        with pytest.raises(ConfigurationError, match="refused user name or password"):
            await works(api, url, **place)
        with pytest.raises(ConfigurationError, match="refused user name or password"):
            await works(api, f"{logged_in(url, '')}?sentinel_username=watcher&sentinel_password=sentinels", **place)


@API
async def test_a_token_that_rotates_is_asked_for_at_each_connection(api: str, place: Any) -> None:
    numbers, given = itertools.count(1), list[str]()
    with redis_server(binary=server_binary("redis")) as server:

        def credentials() -> tuple[str, str]:
            number = next(numbers)
            given.append(f"token-{number}")
            # Some older ones are good for a while, as another thread may be about to show the one before.
            server.ask("ACL", "SETUSER", "worker", "on", f">token-{number}", "~*", "&*", "+@all")
            if number > 5:
                server.ask("ACL", "SETUSER", "worker", f"<token-{number - 5}")
            return "worker", f"token-{number}"

        await works(api, logged_in(server.url, ""), credentials=credentials, **place)
        assert len(given) > 1
        with pytest.raises(ConfigurationError, match="give user and password in the url or by credentials="):
            await works(api, logged_in(server.url, "a:b"), credentials=credentials, **place)


@API
@pytest.mark.parametrize("raised", [OSError("the vault is away"), ValueError("no such vault")], ids=str)
async def test_who_has_no_token_to_give_is_told_so(api: str, raised: Exception, place: Any) -> None:
    def credentials() -> tuple[str, str]:
        raise raised

    said = f"credentials= raised {type(raised).__name__}: {raised}"
    with redis_server(binary=server_binary("redis")) as server, pytest.raises(WarmUnavailable, match=said) as caught:
        await works(api, logged_in(server.url, ""), credentials=credentials, retry_for=0, **place)
    assert caught.value.__cause__ is raised


@pytest.mark.wide
@ONE_FACE
async def test_without_tokens_for_a_while_work_in_the_background_goes_on_later(api: str, place: Any) -> None:
    """Archiver, link and renewals ask for another connection, and get whatever the user's function raises."""
    away: list[Exception] = []
    word = "any"
    asked: list[int] = []

    def credentials() -> tuple[str, str]:
        if away:
            asked.append(1)
            raise away[0]
        return "default", word

    with redis_server("--requirepass", word, binary=server_binary("redis")) as server:
        url = logged_in(server.url, "")
        settings = {"credentials": credentials, "retry_for": 0, **place}
        store: Any = (
            await AsyncStateStore.open(url, **settings)
            if api == "asyncio"
            else Blocking(await in_thread(lambda: StateStore.open(url, **settings)))
        )
        session = store.session("s")
        assert await session.set("n", 1) == 1
        lease = session.lock(ttl=60.0, wait=0)
        await lease.acquire()
        assert await session.get("n") == 1
        link, archiver, renewal = tiers(store).link, tiers(store).archiver, tiers(store).leases.renewal
        (held,) = renewal.leases
        await until(lambda: link.up and archiver.archived)
        breaks, archived, deadline = link.breaks, archiver.archived, held.deadline

        def renew() -> bool:
            held.renew_at = 0.0
            renewal._kept.set()
            return True

        away.append(KeyError("no token"))
        for kind in ("normal", "pubsub"):
            server.ask("CLIENT", "KILL", "TYPE", kind)
        with suppress(WarmUnavailable):
            await session.get("n", fresh=True)  # on the connection that was lost
        with pytest.raises(WarmUnavailable, match="credentials= raised KeyError: 'no token'"):
            await session.get("n", fresh=True)
        await until(lambda: link.breaks > breaks)
        count = len(asked)
        await until(lambda: renew() and len(asked) > count + 10)
        away.clear()
        await until(lambda: renew() and held.deadline > deadline)
        assert await session.set("n", 2) == 2
        await until(lambda: archiver.archived > archived)
        await until(lambda: link.up)
        assert not lease.lost
        await lease.release()
        await store.close()


# Other ways


@API
async def test_a_unix_socket(api: str, place: Any, tmp_path: Path) -> None:
    path = tmp_path / "r.sock"
    with redis_server("--unixsocket", str(path), "--requirepass", "secret", binary=server_binary("redis")):
        await works(api, f"unix://:secret@{path}", **place)
        await works(api, f"unix://:secret@{path}?db=4", **place | {"namespace": "four"})


@pytest.mark.wide
@ONE_FACE
async def test_a_url_of_another_kind_than_its_server_says_what_to_use(api: str, place: Any) -> None:
    with (
        redis_server(binary=server_binary("redis")) as server,
        redis_cluster("--unixsocket", "r.sock", replicas=0) as cluster,
    ):
        at = f":{server.password}@127.0.0.1:{server.port}"
        node = cluster.nodes[0]
        for url, said in (
            (
                f"redis+sentinel://{at}/mymaster?sentinel_password={server.password}",
                "is not a Sentinel: use redis:// for the server itself",
            ),
            (f"redis+cluster://{at}", "this server is not part of a cluster: use redis:// for a single server"),
            (
                f"redis+sentinel://:{node.password}@127.0.0.1:{node.port}/m?sentinel_password={node.password}",
                "is not a Sentinel: .*redis\\+cluster://",
            ),
            (
                f"unix://:{node.password}@{node.directory}/r.sock",
                "which a Unix socket cannot reach: use redis\\+cluster://",
            ),
        ):
            with pytest.raises(ConfigurationError, match=said) as caught:
                await works(api, url, **place)
            assert "ERR" not in str(caught.value)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.wide
@ONE_FACE
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_ipv6(api: str, place: Any) -> None:
    with redis_server("--bind", "127.0.0.1 ::1", binary=server_binary("redis")) as server:
        await works(api, relocated(server.url, f"[::1]:{server.port}"), **place)
    with redis_cluster("--bind", "127.0.0.1 ::1", "--cluster-announce-ip", "::1", replicas=0) as cluster:
        seeds = ",".join(f"[::1]:{node.port}" for node in cluster.nodes[:2])
        await works(api, relocated(cluster.url, seeds), **place | {"namespace": "clusters"})


@pytest.mark.wide
@ONE_FACE
async def test_a_cluster_whose_servers_know_no_address_of_their_own(api: str, place: Any) -> None:
    """Behind NAT: they leave it out, and mean the one where they were asked."""
    with redis_cluster("--cluster-preferred-endpoint-type", "unknown-endpoint", replicas=0) as cluster:
        await works(api, cluster.url, **place)
