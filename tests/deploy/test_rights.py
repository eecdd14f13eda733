"""The warm tier's users in deploy/valkey/users.acl: what the package needs is granted, and nothing else.

A right that is missing shows late, inside a script, so everything that a fleet does is done here under these rights.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from below import ROOT, logged_in, own_server, server_binary, until

from distributed_state import ConfigurationError, Encryption, KeyRing, StateError
from distributed_state.programs.servers import RedisServer, redis_cluster, redis_sentinel

USERS = ROOT.joinpath("deploy/valkey/users.acl").read_text()
PASSWORD = hashlib.sha256(b"secret").hexdigest()
single = pytest.mark.only(api=("asyncio", "blocking"), warm="single", cold=("sqlite", "postgres"))


def users(namespace: str, text: str = USERS) -> str:
    """As deploy/valkey/start.sh writes them."""
    lines = "".join(f"{line}\n" for line in text.splitlines() if not line.startswith("#"))
    return lines.replace("@STORE@", PASSWORD).replace("@OPERATOR@", PASSWORD).replace("@NAMESPACE@", namespace)


def is_redis_7_0(binary: str) -> bool:
    return b"Redis server v=7.0." in subprocess.run([binary, "--version"], stdout=subprocess.PIPE, check=True).stdout


@contextmanager
def guarded(opener: Any, folder: Path, text: str = USERS) -> Iterator[tuple[RedisServer, str]]:
    """A server with these users and an append-only file, and the URL of the store's user."""
    if is_redis_7_0(server_binary(opener.warm)):
        text = text.replace(" +client|setinfo", "").replace(" +waitaof", "")  # which it calls errors, not knowing them
    (folder / "users.acl").write_text(users(opener.namespace, text))
    with own_server(opener, "--aclfile", str(folder / "users.acl"), "--appendonly", "yes") as server:
        with operator(server) as client:
            client.acl_log_reset()  # whoever started it asked as the user `default`
        yield server, logged_in(server.url, "distributed-state:secret")


@contextmanager
def operator(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port, username="operator", password="secret") as client:
        yield client


def denied(client: redis.Redis) -> list[tuple[str, str]]:
    return [(each["context"], each["object"]) for each in client.acl_log()]


async def live(store: Any, other: Any) -> None:
    """Everything that a fleet does with its servers."""
    received: list[Any] = []
    store.on(["conversation.*", "note.*"], received.append)
    other.on("note.*", received.append, group="notes")
    await store.ready()
    await other.ready()
    session = store.session("s", user="u", idle=60, lifetime=3600)
    await session.create({"a": 1, "gone": 1})
    async with session.turn(request_id="r") as turn:
        turn.append({"role": "user", "content": "hello"})
    await other.session("s").get("a")
    await session.increment("a")
    await session.increment("a", 0.5)
    await session.set("otp", 1, ttl=60)
    await session.delete("gone")
    await session.set("b", [1])
    await session.append_to("b", 2)
    await session.update("d", {"x": 1})
    await session.checkpoint("here")
    async with session.lock(ttl=5):
        await session.write(set={"c": 1}, phase="planning", expect_version=await session.version(fresh=True))
    await session.rollback(label="here")
    assert (await session.at(version=1)).fields == {"a": 1, "gone": 1}
    await session.fork("fork")
    await session.set_lifetime(idle=5)
    lines = await store.admin.export("s")
    await store.admin.import_(lines, id="copy")
    await store.user("u").set("x", 1)
    await store.get_many([store.session("s"), store.session("absent")])
    await store.emit("note.made", {"n": 1}, subject=session)
    await until(lambda: [each.type for each in received].count("note.made") == 2)
    async with store.events("note.*", since="oldest") as events:
        assert (await events.next(timeout=5)).type == "note.made"
    assert len(await store.admin.replicas()) == 2
    await session.clear(messages=True)
    await store.admin.archive()
    assert {each.id for each in await store.sessions(user="u")} >= {"s"}
    await store.session("short", idle=0.01).set("a", 1)
    await until(_gone(other, "short"))
    await store.delete("copy")
    await store.forget("u")
    await store.admin.purge(older_than=0)
    await store.admin.reencrypt(dry_run=True)
    assert not [each for each in await store.admin.doctor() if not each.ok]


def _gone(store: Any, id: str) -> Any:
    async def gone() -> bool:
        return not await store.session(id).exists(fresh=True)

    return gone


@single
async def test_a_fleet_needs_no_more_than_its_users_rights(opener: Any, tmp_path: Path) -> None:
    with guarded(opener, tmp_path) as (server, url):
        more = {"url": url, "sweep": 0.02, "encryption": Encryption(KeyRing({"k": bytes(32)}))}
        store, other = await opener(**more, warm_ttl=0.05), await opener(**more)
        await live(store, other)
        await store.close()
        await other.close()
        with operator(server) as client:
            assert denied(client) == []


def granted() -> list[str]:
    (line,) = [each for each in USERS.splitlines() if each.startswith("user distributed-state")]
    return [word for word in line.split() if word.startswith("+")]


def test_its_rights_are_the_commands_of_the_code() -> None:
    """Of the scripts, and of those that are sent by name; redis-py names itself to the server by CLIENT SETINFO."""
    package = ROOT / "distributed_state"
    words = {"count", "withscores", "maxlen", "minid", "limit", "keepttl"}  # which are said after a command
    sent = {
        name.lower()
        for module in package.rglob("*.py")
        for name in re.findall(r'\bb"([A-Z]{3,})"', module.read_text())
        if name.lower() not in words
    }
    called = {
        name.lower()
        for script in package.glob("warm/lua/**/*.lua")
        for name in re.findall(r"\bcall\('([A-Z]+)'", script.read_text())
    }
    named = {word[1:].partition("|")[0] for word in granted()}
    # To the servers of a cluster, to those behind Sentinels, and to the Sentinels: with their subcommands.
    more = {word for kind in ("cluster", "sentinel") for word in more_rights(kind)}
    more |= {word for word in watched_rights() if word.startswith("+")} - set(granted())
    named |= {part for word in more for part in word[1:].split("|") if part.isalpha()}
    # HELLO needs no right. CONFIG shows passwords; the doctor does without, and says so. durability="fsynced" does not.
    assert named == (sent - {"hello", "config"}) | called | {"client"}


def more_rights(kind: str) -> list[str]:
    """What an override adds on its servers."""
    (words,) = re.findall(r"^  MORE_RIGHTS: (.+)$", ROOT.joinpath(f"deploy/{kind}.yml").read_text(), re.MULTILINE)
    return words.split()


def watched_rights() -> list[str]:
    """What the store's user may do at a Sentinel."""
    text = ROOT.joinpath("deploy/valkey/sentinel.acl").read_text()
    (line,) = [each for each in text.splitlines() if each.startswith("user distributed-state")]
    return line.split()[4:]


@contextmanager
def several(kind: str, namespace: str) -> Iterator[tuple[list[RedisServer], str]]:
    """Servers on which the store's user has the rights of the overrides, and its URL."""
    (line,) = [each for each in users(namespace).splitlines() if each.startswith("user distributed-state")]
    rules = ["SETUSER", "distributed-state", "on", ">secret"]
    binary = server_binary("valkey")
    if kind == "cluster":
        with redis_cluster("--appendonly", "yes", binary=binary) as cluster:
            for node in cluster.nodes:
                node.ask("ACL", *rules, *line.split()[4:], *more_rights(kind))
            yield list(cluster.nodes), logged_in(cluster.url, "distributed-state:secret")
        return
    with redis_sentinel("--appendonly", "yes", binary=binary) as watched:
        for server in watched.servers:
            server.ask("ACL", *rules, *line.split()[4:], *more_rights(kind))
        for sentinel in watched.sentinels:
            sentinel.ask("ACL", *rules, *watched_rights())
        url = logged_in(watched.url.partition("?")[0], "distributed-state:secret")
        named = "?sentinel_username=distributed-state&sentinel_password=secret"
        yield [*watched.servers, *watched.sentinels], url + named


@pytest.mark.wide
@pytest.mark.only(api=("asyncio", "blocking"), warm="valkey", cold="sqlite")
@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
async def test_several_servers_need_no_more_than_their_users_rights(opener: Any, kind: str) -> None:
    with several(kind, opener.namespace) as (servers, url):
        more = {"url": url, "sweep": 0.02, "encryption": Encryption(KeyRing({"k": bytes(32)}))}
        store, other = await opener(**more, warm_ttl=0.05), await opener(**more)
        await live(store, other)
        await store.close()
        await other.close()
        for server in servers:
            with redis.Redis(port=server.port, password=server.password) as client:
                # Only the doctor of a cluster asks for settings, and says that it was refused.
                assert {what for _, what in denied(client)} <= ({"config|get"} if kind == "cluster" else set())


@pytest.mark.only(api="asyncio", warm="valkey", cold="sqlite")
@pytest.mark.parametrize(("kind", "right"), [("cluster", "+cluster|slots"), ("sentinel", "+role")])
async def test_negative_control_a_right_that_several_servers_need_is_missed(
    opener: Any, kind: str, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = more_rights(kind)
    monkeypatch.setitem(globals(), "more_rights", lambda kind: [each for each in given if each != right])
    with several(kind, opener.namespace) as (_, url), pytest.raises(StateError):
        await opener(url=url, retry_for=1.0)


@single
@pytest.mark.parametrize("right", ["+xadd", "+hget", "+ssubscribe", "+zrangebyscore", "+spublish"])
async def test_negative_control_a_missing_right_is_seen(opener: Any, tmp_path: Path, right: str) -> None:
    assert right in granted()
    with guarded(opener, tmp_path, USERS.replace(f" {right} ", " ")) as (server, url):

        async def noticed() -> bool:
            # Again and again: only when the writer's link listens does a commit ask who else does.
            with suppress(ConfigurationError):  # any other error would be a wrong one
                await store.session("s").set_many({"a": 1, "b": 2})
                await store.session("s").get("a")
            with operator(server) as client:
                return bool(denied(client))

        store = await opener(url=url, retry_for=1.0)
        await until(noticed)


@pytest.mark.wide
@single
async def test_nothing_else_is_allowed(opener: Any, tmp_path: Path) -> None:
    with guarded(opener, tmp_path) as (server, url), redis.Redis.from_url(url) as client:
        client.set(f"{opener.namespace}:x", 1)
        for words in (["SET", "other:x", 1], ["SPUBLISH", "other", 1], ["GET", f"{opener.namespace}x:y"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words)
        for words in (["FLUSHALL"], ["CONFIG", "GET", "*"], ["KEYS", "*"], ["ACL", "LIST"], ["MONITOR"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words)
        with pytest.raises(redis.exceptions.ResponseError, match=r"can't run this command|no permissions"):
            client.execute_command("EVAL", "return redis.call('FLUSHALL')", 0)
        with redis.Redis(port=server.port) as nobody, pytest.raises(redis.exceptions.AuthenticationError):
            nobody.ping()
        with redis.Redis(port=server.port, username="health", password="any") as health:
            assert health.ping()
            with pytest.raises(redis.exceptions.NoPermissionError):
                health.get(f"{opener.namespace}:x")
        with pytest.raises(ConfigurationError, match="user name or password"):
            await opener(url=logged_in(server.url, "distributed-state:wrong"))
        with pytest.raises(ConfigurationError, match="lacks a right"):
            await opener(url=url, namespace="other")


@single
async def test_commits_survive_a_restart_of_the_server(opener: Any, tmp_path: Path) -> None:
    """It replays its append-only file as the user `default`, with that user's rights."""
    with guarded(opener, tmp_path) as (server, url):
        store = await opener(url=url, archiver=False)
        await store.session("s").set("a", 1)
        server.kill()
        server.start()
        assert await store.session("s").get("a", fresh=True) == 1
        with operator(server) as client:
            assert client.exists(f"{opener.namespace}:meta")


@pytest.mark.wide
@pytest.mark.only(warm="redis", cold="sqlite")
async def test_negative_control_a_default_user_without_rights_loses_them(opener: Any, tmp_path: Path) -> None:
    """On Redis 7.0; github.com/valkey-io/valkey/issues/3983 tells of the others."""
    text = re.sub(r"user default off.*", "user default off -@all", USERS)
    with guarded(opener, tmp_path, text) as (server, url):
        if not is_redis_7_0(server.binary):
            pytest.skip("needs the system's redis-server, of 7.0")
        store = await opener(url=url, archiver=False, unarchived_bytes=0)  # nor does its writer put it back
        await store.session("s").set("a", 1)
        server.kill()
        server.start()
        assert await store.session("s").get("a", fresh=True) is None
