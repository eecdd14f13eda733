"""Levels of durability on real servers: what was acknowledged is where the level says it is, whoever dies then.

A frozen replica acknowledges nothing, though it will read what was sent to it; one that was cut off as well is behind.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from below import keys_of, server_binary, tiers, until
from controls import sabotage
from sync_api import Blocking, in_thread

from distributed_state import AsyncStateStore, DurabilityUnknown, StateStore, WarmUnavailable
from distributed_state.port.addresses import node_name
from distributed_state.programs.servers import (
    RedisSentinel,
    RedisServer,
    redis_cluster,
    redis_sentinel,
    redis_server,
    wait_until,
)
from distributed_state.settings import Settings
from distributed_state.warm.confirming import Confirming, Replicated

KIND = pytest.mark.parametrize("kind", [pytest.param("redis", marks=pytest.mark.wide), "valkey"])
API = pytest.mark.parametrize("api", [pytest.param("asyncio", marks=pytest.mark.full), "blocking"])
# Each server and each API once; by default one of each.
PAIR = pytest.mark.parametrize(
    ("api", "kind"), [pytest.param("asyncio", "redis", marks=pytest.mark.wide), ("blocking", "valkey")]
)
LONG = 60.0  # seconds for what is surely going to happen, on a machine with other things to do


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    return {
        "archive": f"sqlite:///{tmp_path}/archive.db", "namespace": f"t{uuid.uuid4().hex[:12]}", "archiver": False,
        "max_staleness": 0,
    }  # fmt: skip


async def opened(api: str, url: str, **settings: Any) -> Any:
    if api == "asyncio":
        return await AsyncStateStore.open(url, **settings)
    return Blocking(await in_thread(lambda: StateStore.open(url, **settings)))


@contextmanager
def replicated(kind: str, replicas: int = 1) -> Iterator[list[RedisServer]]:
    """A primary and its replicas, which nobody watches."""
    binary = server_binary(kind)
    with redis_server(binary=binary) as primary:
        if not replicas:
            yield [primary]
            return
        with replicated(kind, replicas - 1) as others:
            for each in others:
                each.follow(primary)
            wait_until(lambda: all(each.in_sync() for each in others), "the replicas were not in sync")
            yield [primary, *others]


def attached(server: RedisServer) -> int:
    return int(server.info("replication")["connected_slaves"])


def held(server: RedisServer, store: Any, id: str = "s", field: str = "a") -> str | None:
    """What a server has of a record's field, asked past the store."""
    found = server.ask("HGET", keys_of(store, id).record.decode(), field)
    return None if found is None else str(found)


async def cut_off(primary: RedisServer, replica: RedisServer, left: int = 0) -> None:
    """Freeze a replica and end its connection, so that it does not have what is written from now on."""
    replica.pause()
    primary.ask("CLIENT", "KILL", "TYPE", "replica")
    await until(lambda: attached(primary) == left, LONG)


def blocked(server: RedisServer) -> bool:
    """Whether somebody waits there for replicas."""
    return int(server.info("clients")["blocked_clients"]) > 0


async def kept(call: Any) -> int:
    """Repeat until it has its level: a replica that was woken is not there at once."""

    async def so() -> int:
        try:
            return int(await call())
        except DurabilityUnknown:
            return 0

    return int(await until(so, LONG, every=0.1))


# A replica that is late


async def waits(store: Any, primary: RedisServer, replica: RedisServer) -> None:
    """A write waits for a replica that is late, and nobody else waits for that."""
    session = store.session("s")
    await session.set("a", 1)
    assert held(replica, store) == "1"
    replica.pause()
    writing = asyncio.create_task(session.set("a", 2))
    try:
        await until(lambda: writing.done() or blocked(primary), LONG)
        assert not writing.done(), "it does not wait"
        assert await session.get("a", fresh=True) == 2, "a read does not stand behind it"
        assert await session.set("b", 1, durability="memory") == 3
    finally:
        replica.resume()
        await asyncio.gather(writing, return_exceptions=True)
    assert writing.result() == 2
    assert held(replica, store) == "2"


@PAIR
async def test_a_write_is_acknowledged_when_the_replica_has_it(api: str, kind: str, place: Any) -> None:
    with replicated(kind) as (primary, replica):
        store = await opened(api, primary.url, durability="replicated", timeout=LONG, retry_for=0.0, **place)
        await waits(store, primary, replica)
        await store.close()


@pytest.mark.parametrize("broken", ["nothing is waited for", "nothing is written before"])
async def test_negative_control_a_wait_that_is_none_is_noticed(
    broken: str, place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Valkey answers WAIT at once on a connection that wrote nothing, though another one's write is on its way."""
    with replicated("valkey") as (primary, replica):
        store = await opened("asyncio", primary.url, durability="replicated", timeout=LONG, retry_for=0.0, **place)
        if broken == "nothing is waited for":

            async def at_once(self: Any, node: str, sent: Any, answers: Any) -> str:
                return ""

            async def asks_none(self: Any, node: str) -> Any:
                return []

            monkeypatch.setattr(Replicated, "reached", at_once)
            monkeypatch.setattr(Replicated, "behind", asks_none)
            with pytest.raises(AssertionError):
                await waits(store, primary, replica)
        else:
            with (
                sabotage("confirm", "call('HSET', meta, 'confirmed', offset)\n", ""),
                pytest.raises(AssertionError),
            ):
                await waits(store, primary, replica)
        await store.close()


@KIND
async def test_tasks_share_one_wait(kind: str, place: Any) -> None:
    with replicated(kind) as (primary, replica):
        store = await opened("asyncio", primary.url, durability="replicated", timeout=LONG, **place)
        await store.session("s0").set("a", 1)
        replica.pause()
        try:
            before = waited(primary)
            writing = [asyncio.create_task(store.session(f"s{n}").set("a", n)) for n in range(50)]
            # All are applied, and wait for the same replica.
            await until(lambda: all(held(primary, store, f"s{n}") == str(n) for n in range(50)), LONG)
            await until(lambda: blocked(primary), LONG)
        finally:
            replica.resume()
        assert sorted(await asyncio.gather(*writing)) == [1] * 49 + [2]
        assert waited(primary) - before <= 10
        assert all(held(replica, store, f"s{n}") == str(n) for n in range(50))
        await store.close()


def waited(server: RedisServer) -> int:
    line = server.info("commandstats").get("cmdstat_wait", "calls=0,")
    return int(line.split(",")[0].removeprefix("calls="))


# A replica that is away


@pytest.mark.wide
@PAIR
async def test_a_level_that_is_not_reached_is_reported_and_a_repetition_reaches_it(
    api: str, kind: str, place: Any
) -> None:
    with replicated(kind) as (primary, replica):
        store = await opened(api, primary.url, durability="replicated", timeout=1.0, **place)
        session = store.session("s")
        replica.pause()
        with pytest.raises(DurabilityUnknown, match="not replicated: 0 of 1 replicas") as report:
            await session.set("a", 1)
        assert report.value.version == await session.version(fresh=True) == 1
        for _ in range(2):
            with pytest.raises(DurabilityUnknown):
                async with session.turn(request_id="r") as turn:
                    turn["b"] = turn.outcome = 1
        with pytest.raises(DurabilityUnknown):
            await session.version(durability="replicated")
        with pytest.raises(DurabilityUnknown):
            await store.emit("note.made", {"n": 1})
        async with store.batch(durability="memory") as batch:
            batch.on(session).set("c", 1)
        batch = store.batch()
        with pytest.raises(DurabilityUnknown):
            async with batch:
                batch.on(session).set("c", 2)
                batch.on(store.session("t")).set("c", 2)
        assert tiers(store).confirming.missed["replicated"] == 7
        replica.resume()
        assert await kept(lambda: session.version(durability="replicated")) == await session.version(fresh=True)
        async with session.turn(request_id="r") as turn:
            assert turn.repeated
        assert held(replica, store) == held(replica, store, field="b") == "1"
        await store.close()


@pytest.mark.wide
@KIND
async def test_a_replica_that_left_is_not_forgotten(kind: str, place: Any) -> None:
    """By the process that saw it; where nobody watches, its primary forgets it."""
    with replicated(kind, 2) as (primary, one, other):
        store = await opened("blocking", primary.url, durability="replicated", timeout=1.0, **place)
        assert await kept(lambda: store.session("s").set("a", 1))
        other.kill()
        await until(lambda: attached(primary) == 1, LONG)
        with pytest.raises(DurabilityUnknown, match="1 of 2 replicas"):
            await store.session("s").set("a", 2)
        await kept(lambda: store.session("s").set("a", 3, durability="replicated:1"))
        assert held(one, store) == "3"
        with pytest.raises(DurabilityUnknown, match="1 of 3 replicas"):
            await store.session("s").set("a", 4, durability="replicated:3")
        later = await opened("blocking", primary.url, durability="replicated", timeout=1.0, **place)
        assert await kept(lambda: later.session("s").set("a", 5)), "who never saw it knows nothing of it"
        one.kill()
        await until(lambda: attached(primary) == 0, LONG)
        alone = await opened("blocking", primary.url, durability="replicated", timeout=1.0, **place)
        with pytest.raises(DurabilityUnknown, match="0 of 1 replicas"):
            await alone.session("s").set("a", 6)
        for each in (store, later, alone):
            await each.close()


# Whoever answers must have the very commit


async def confirmed_elsewhere(store: Any, primary: RedisServer) -> None:
    """The commit's entry is gone when it is to be confirmed, as if an older server had taken the primary's place."""
    home, keys = tiers(store), keys_of(store, "s")
    confirm = home.confirming.confirm

    async def after_a_loss(claims: Any, level: Any) -> Any:
        primary.ask("XDEL", keys.journal.decode(), f"{claims[0].offset}-0")
        return await confirm(claims, level)

    home.confirming.confirm = after_a_loss  # type: ignore[method-assign]
    with pytest.raises(DurabilityUnknown, match="Redis lost it"):
        await store.session("s").set("a", 1)
    del home.confirming.confirm


@API
async def test_a_server_that_does_not_have_the_commit_confirms_nothing(api: str, place: Any) -> None:
    with replicated("valkey") as (primary, _):
        store = await opened(api, primary.url, durability="replicated", timeout=LONG, **place)
        await confirmed_elsewhere(store, primary)
        await store.close()


async def test_negative_control_a_commit_that_is_not_looked_for_is_noticed(place: Any) -> None:
    with replicated("valkey") as (primary, _):
        store = await opened("blocking", primary.url, durability="replicated", timeout=LONG, **place)
        with sabotage("confirm", "if not here then return {'other'} end\n", ""), pytest.raises(pytest.fail.Exception):
            await confirmed_elsewhere(store, primary)
        await store.close()


@API
async def test_what_is_archived_and_dropped_meanwhile_is_confirmed(api: str, place: Any) -> None:
    with replicated("valkey") as (primary, _):
        store = await opened(api, primary.url, durability="replicated", timeout=LONG, **place)
        home = tiers(store)
        confirm = home.confirming.confirm

        async def after_the_archiver(claims: Any, level: Any) -> Any:
            await home.archiver.drain()
            primary.ask("DEL", claims[0].journal.decode())
            return await confirm(claims, level)

        home.confirming.confirm = after_the_archiver  # type: ignore[method-assign]
        assert await store.session("s").set("a", 1) == 1
        await store.close()


@pytest.mark.wide
@pytest.mark.parametrize(("api", "others"), [("asyncio", 0), ("blocking", 3), ("asyncio", 40)])
async def test_a_write_that_is_sent_again_is_confirmed_as_well(api: str, others: int, place: Any) -> None:
    """Its answer was lost, and others wrote to the partition since: few, or so many that SQL has to have it."""
    with replicated("valkey") as (primary, replica):
        more = place | {"partitions": 1}
        store = await opened(api, primary.url, durability="replicated", timeout=1.0, **more)
        with StateStore.open(primary.url, timeout=LONG, **more) as other:
            await store.session("s").set("a", 0, durability="memory")  # so that it is there, and the next is one script
            port = tiers(store).warm.port
            script = port.script

            async def lost(*call: Any) -> Any:
                del port.script
                await script(*call)
                for n in range(others):
                    other.session(f"o{n}").set("a", n)
                raise WarmUnavailable("the answer was lost")

            port.script = lost  # type: ignore[method-assign]
            replica.pause()
            if others < 16:
                with pytest.raises(DurabilityUnknown, match="0 of 1 replicas"):
                    await store.session("s").increment("a")
            else:
                assert await store.session("s").increment("a") == 1
                assert tiers(store).cold.version("session:s") == 2
            replica.resume()
            assert await kept(lambda: store.session("s").version(durability="replicated")) == 2, "applied once"
            assert await until(lambda: held(replica, store), LONG) == "1"
        await store.close()


# Failovers


async def acknowledged_through_a_failover(api: str, kind: str, level: str, place: Any) -> tuple[int, str | None]:
    """What was acknowledged last when the primary died beside a replica that was behind, and what that one has."""
    with redis_sentinel(replicas=1, sentinels=1, binary=server_binary(kind)) as watched:
        store = await opened(api, watched.url, durability=level, timeout=1.0, **place)
        session, acknowledged = store.session("s"), 0
        await kept(lambda: session.set("a", 0))
        (behind,) = watched.replicas
        await cut_off(watched.primary, behind)
        for number in range(1, 4):
            try:
                await session.set("a", number)
                acknowledged = number
            except DurabilityUnknown:
                continue
        dead = watched.kill_primary()
        behind.resume()
        watched.wait_replaced(dead)
        found = held(watched.primary, store)
        await store.close()
        return acknowledged, found


@pytest.mark.wide
@pytest.mark.timeout(300)
@PAIR
async def test_what_is_acknowledged_as_replicated_survives_a_failover(api: str, kind: str, place: Any) -> None:
    acknowledged, found = await acknowledged_through_a_failover(api, kind, "replicated", place)
    assert int(found or -1) >= acknowledged


@pytest.mark.wide
@pytest.mark.timeout(300)
async def test_negative_control_what_is_acknowledged_in_memory_does_not(place: Any) -> None:
    acknowledged, found = await acknowledged_through_a_failover("asyncio", "valkey", "memory", place)
    assert (acknowledged, found) == (3, "0")


@contextmanager
def three(kind: str) -> Iterator[tuple[RedisSentinel, RedisServer, RedisServer]]:
    with redis_sentinel(replicas=2, sentinels=1, binary=server_binary(kind)) as watched:
        one, other = watched.replicas
        yield watched, one, other


@pytest.mark.wide
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["redis", "valkey"])
async def test_one_replica_is_not_enough_when_the_other_is_promoted(kind: str, place: Any) -> None:
    """So `replicated:1` says that one has it, and `replicated` waits for both."""
    with three(kind) as (watched, one, other):
        store = await opened("asyncio", watched.url, timeout=1.0, **place)
        session = store.session("s")
        await kept(lambda: session.set("a", 0, durability="replicated"))
        await cut_off(watched.primary, other, left=1)
        assert await kept(lambda: session.set("a", 1, durability="replicated:1"))
        assert held(one, store) == "1"
        with pytest.raises(DurabilityUnknown, match="1 of 2 replicas"):
            await session.set("a", 2, durability="replicated")
        dead = watched.kill_primary()
        one.kill()
        other.resume()
        watched.wait_replaced(dead)
        assert watched.primary is other
        assert held(other, store) == "0"
        await store.close()


@pytest.mark.wide
@pytest.mark.timeout(300)
async def test_a_replica_that_sentinels_know_counts_though_it_is_away(place: Any, caplog: Any) -> None:
    """Also for a process that never saw it; not if it is one that is never promoted."""
    with three("valkey") as (watched, one, other):
        other.kill()
        await until(lambda: attached(watched.primary) == 1, LONG)
        store = await opened("blocking", watched.url, durability="replicated", timeout=1.0, **place)
        away = node_name("127.0.0.1", other.port)
        assert f"1 of 2 replicas have it: {away}" in caplog.text
        with pytest.raises(DurabilityUnknown, match="1 of 2 replicas"):
            await store.session("s").set("a", 1)
        other.start()
        assert await kept(lambda: store.session("s").set("a", 2))
        assert held(one, store) == held(other, store) == "2"
        other.ask("CONFIG", "SET", "replica-priority", "0")
        wait_until(lambda: priority_of(watched, other) == "0", "the Sentinel did not learn the priority")
        other.kill()
        await until(lambda: attached(watched.primary) == 1, LONG)
        later = await opened("blocking", watched.url, durability="replicated", timeout=1.0, **place)
        assert await kept(lambda: later.session("s").set("a", 3))
        await store.close()
        await later.close()


def priority_of(watched: RedisSentinel, server: RedisServer) -> str:
    for each in watched.sentinels[0].ask("SENTINEL", "REPLICAS", "mymaster"):
        facts = dict(zip(each[::2], each[1::2], strict=True))
        if int(facts["port"]) == server.port:
            return str(facts["slave-priority"])
    return ""


@pytest.mark.wide
@pytest.mark.timeout(300)
async def test_in_a_cluster_each_primary_waits_for_its_own_replicas(place: Any) -> None:
    with redis_cluster(replicas=1, binary=server_binary("cluster")) as cluster:
        store = await opened("asyncio", cluster.url, durability="replicated", timeout=2.0, **place)
        ids = [f"s{n}" for n in range(30)]
        for id in ids:
            assert await kept(lambda id=id: store.session(id).set("a", 1))
        async with store.batch() as batch:
            for id in ids:
                batch.on(store.session(id)).set("a", 2)
        assert len(batch.versions) == len(ids)
        node = tiers(store).port.node_of(keys_of(store, "s0").meta)
        replica = next(each for each in cluster.nodes if follows(each, node))
        replica.kill()
        with pytest.raises(DurabilityUnknown, match="0 of 1 replicas"):
            await store.session("s0").set("a", 3)
        elsewhere = next(id for id in ids if tiers(store).port.node_of(keys_of(store, id).meta) != node)
        assert await kept(lambda: store.session(elsewhere).set("a", 3)), "others' replicas are there"
        await store.close()


def follows(server: RedisServer, primary: str) -> bool:
    state = server.info("replication")
    return state["role"] == "slave" and node_name(state["master_host"], int(state["master_port"])) == primary


def test_the_time_to_wait_is_below_that_of_the_connection() -> None:
    """Else the connection would be given up, with all that other tasks wait for on it."""
    confirming = Confirming(None, None, Settings(timeout=2.0))  # type: ignore[arg-type]  # it asks nobody
    assert 0 < confirming._wait_ms < 2000
    assert Confirming(None, None, Settings(timeout=0.001))._wait_ms >= 1  # type: ignore[arg-type]  # 0 waits for ever
