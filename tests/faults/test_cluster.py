"""In a cluster: slots that move and primaries that end, under load. Law: callers wait and go on; nothing is lost twice.

Nothing at all is lost where nothing failed: while slots move and when a primary hands its part over.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from below import hidden, server_binary, until
from sync_api import Blocking, core, in_thread
from typer.testing import CliRunner
from under_load import IDS, listening, load, now

from distributed_state import AsyncStateStore, ConfigurationError, StateStore, WarmUnavailable
from distributed_state.port.topology import slot_of
from distributed_state.programs.cli import shell
from distributed_state.programs.servers import (
    ClusterNode,
    RedisCluster,
    begin_move,
    end_move,
    move_keys,
    redis_cluster,
    wait_until,
)
from distributed_state.values.model import Ref


@pytest.fixture(scope="module")
def formed() -> Iterator[RedisCluster]:
    with redis_cluster(replicas=0, binary=server_binary("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(formed: RedisCluster) -> RedisCluster:
    """Three primaries, empty, for tests that leave them whole."""
    for node in formed.nodes:
        node.ask("FLUSHALL")
    return formed


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    return {"archive": f"sqlite:///{tmp_path}/archive.db", "namespace": f"t{uuid.uuid4().hex[:12]}", "partitions": 16}


async def opened(api: str, url: str, **settings: Any) -> Any:
    if api == "asyncio":
        return await AsyncStateStore.open(url, **settings)
    return Blocking(await in_thread(lambda: StateStore.open(url, **settings)))


def slots(store: Any) -> list[int]:
    """Those that the partitions of this store are in."""
    keys = core(store)._lifecycle.context.keys
    return sorted({slot_of(keys.partition(each).meta) for each in range(keys.partitions)})


def slot(store: Any, id: str) -> int:
    return slot_of(core(store)._lifecycle.context.keys.of(Ref("session", id)).record)


def redirections(cluster: RedisCluster) -> int:
    """How often any node has answered with a redirection."""
    found = 0
    for node in cluster.nodes:
        for name, value in node.info("errorstats").items():
            if name in ("errorstat_MOVED", "errorstat_ASK", "errorstat_TRYAGAIN"):
                found += int(value.partition("=")[2])
    return found


def wait_for(seconds: float) -> None:
    """Let the load run."""
    time.sleep(seconds)


def wait_for_calls(cluster: RedisCluster, count: int) -> None:
    """Let the load run until the nodes have executed this many more commits."""

    def executed() -> int:
        found = [node.info("commandstats") for node in cluster.primaries()]
        words = [stats[name] for stats in found for name in stats if name in ("cmdstat_evalsha", "cmdstat_eval")]
        return sum(int(each.partition("calls=")[2].partition(",")[0]) for each in words)

    wanted = executed() + count
    wait_until(lambda: executed() >= wanted, "the load came to nothing")


# Nothing fails


@pytest.mark.wide
async def test_in_a_steady_state_nobody_is_redirected(cluster: RedisCluster, place: Any) -> None:
    with load(2, url=cluster.url, **place) as running:
        wait_for_calls(cluster, 500)
        before = redirections(cluster)
        wait_for_calls(cluster, 500)
        after = redirections(cluster)
    assert running.acknowledged() > 300
    assert after == before
    await running.check()
    # The negative control: one who asks the wrong node is counted.
    with pytest.raises(Exception, match="MOVED"):
        cluster.primaries()[0].ask("GET", "123456789")
    assert redirections(cluster) == after + 1


@pytest.mark.wide
async def test_a_url_of_any_node_is_the_cluster(place: Any) -> None:
    with redis_cluster() as cluster:
        first = cluster.nodes[0]
        replica = cluster.replicas_of(first)[0]
        for node in (first, replica):
            store = await opened("asyncio", node.url, **place)
            for id in IDS:
                await store.session(id).increment("n")
            assert len(core(store)._lifecycle.tiers().port.nodes()) == 3
            await store.close()
        for url in (first.url.replace("/0", "/1"), cluster.url + "/1"):
            with pytest.raises(ConfigurationError, match="database 0"):
                await opened("asyncio", url, **place)
        first.kill()
        cluster.wait_converged()
        store = await opened("asyncio", cluster.url, **place)  # its first seed is dead
        assert await store.session(IDS[0]).increment("n") == 3
        await store.close()


# Slots move


@pytest.mark.wide
async def test_a_slot_that_moved_is_followed_and_asked_there_from_then_on(cluster: RedisCluster, place: Any) -> None:
    store = await opened("asyncio", cluster.url, **place)
    assert await store.session("s").set("a", 1) == 1
    number = slot(store, "s")
    source = cluster.primary_of(number)
    target = next(node for node in cluster.primaries() if node is not source)
    cluster.move_slots([number], target)
    assert await store.session("s").set("a", 2) == 2
    before = redirections(cluster)
    for value in range(3, 6):
        assert await store.session("s").set("a", value) == value
    assert redirections(cluster) == before
    assert [change.version for change in await store.session("s").history()] == [1, 2, 3, 4, 5]
    await store.close()


@pytest.mark.wide
async def test_what_hot_held_of_a_slot_that_moved_answers_again_from_where_it_is(
    cluster: RedisCluster, place: Any
) -> None:
    store, other = await opened("blocking", cluster.url, **place), await opened("asyncio", cluster.url, **place)
    number, hot = slot(store, "s0"), core(store)._lifecycle.tiers().hot
    ids = [id for id in map("s{}".format, range(100)) if slot(store, id) == number]
    assert len(ids) > 1
    sessions = [store.session(id) for id in ids]
    for each in sessions:
        await each.set("n", 1)

    async def all_hit() -> bool:
        before = hot.hits
        await store.get_many(sessions)
        return bool(hot.hits - before == len(ids))

    await until(all_hit)
    before = {each.ref.text: hot.entries[each.ref.text] for each in sessions}
    former = before[sessions[0].ref.text].freshness
    cluster.move_slots([number], next(each for each in cluster.primaries() if each is not cluster.primary_of(number)))
    await until(lambda: former.over and before.keys() <= hot.entries.keys())
    assert all(hot.entries[text] is entry for text, entry in before.items()), "nobody read one"
    assert not any(entry.freshness.over for entry in before.values())
    await other.session(ids[0]).set("n", 2)
    await until(lambda: hot.entries[sessions[0].ref.text].version == 2)
    await store.close()
    await other.close()


@contextmanager
def on_its_way(cluster: RedisCluster, number: int, keys: int) -> Iterator[tuple[ClusterNode, ClusterNode]]:
    """A slot of which so many keys were moved, and not yet the others, until the block ends."""
    source = cluster.primary_of(number)
    target, *others = [node for node in cluster.primaries() if node is not source]
    begin_move(number, source, target)
    if keys:
        move_keys(number, source, target, keys)
    yield source, target
    while move_keys(number, source, target):
        pass
    end_move(number, source, target, others)


@pytest.mark.parametrize(
    ("api", "moved"),
    [
        pytest.param("blocking", 0, marks=pytest.mark.wide),
        ("asyncio", 1),
        pytest.param("blocking", 1000, marks=pytest.mark.wide),
    ],
    ids=["none", "one", "all"],
)
async def test_while_a_slot_is_on_its_way_its_callers_wait_and_no_others(
    api: str, moved: int, cluster: RedisCluster, place: Any
) -> None:
    store = await opened(api, cluster.url, retry_for=1.0, archiver=False, beat=0.0, **place)
    for id in IDS:
        await store.session(id).set("a", 1)
    number = slot(store, IDS[0])
    elsewhere = next(id for id in IDS if slot(store, id) != number)
    with on_its_way(cluster, number, moved):
        with pytest.raises(WarmUnavailable, match="on their way to another server"):
            await store.session(IDS[0]).set("a", 2)
        for value in range(2, 12):
            began = now()
            await store.session(elsewhere).set("a", value)
            assert now() - began < 0.2
    await store.session(IDS[0]).set("a", 3)
    assert await store.session(IDS[0]).get("a", fresh=True) == 3
    versions = [change.version for change in await store.session(IDS[0]).history()]
    assert versions == list(range(1, len(versions) + 1))
    await store.close()


@pytest.mark.parametrize("api", ["asyncio", pytest.param("blocking", marks=pytest.mark.wide)])
async def test_inputs_that_are_posted_while_their_slot_is_on_its_way_are_served_once(
    api: str, cluster: RedisCluster, place: Any
) -> None:
    store = await opened(api, cluster.url, retry_for=0.5, archiver=False, beat=0.0, **place)
    session = store.session(IDS[0])
    texts = [str(number) for number in range(4)]

    async def post(text: str) -> int:
        number: int = await session.post({"role": "user", "content": text}, request_id=text)
        return number

    assert await post(texts[0]) == 1
    with on_its_way(cluster, slot(store, IDS[0]), 1), pytest.raises(WarmUnavailable):
        await post(texts[1])
    number = slot(store, IDS[0])
    source = cluster.primary_of(number)
    target = next(node for node in cluster.primaries() if node is not source)
    async with session.turn() as turn:
        turn.append(*(each.message for each in turn.take()))
        assert [await post(text) for text in texts[1:3]] == [2, 3]
        await asyncio.to_thread(cluster.move_slots, [number], target)
        turn.append(*(each.message for each in await turn.arrived()))
        assert [each.number for each in turn.take()] == [2, 3]
    assert [await post(text) for text in (*texts, texts[3])] == [1, 2, 3, 4, 4]
    assert [each.number for each in await session.inbox()] == [4]
    assert [message.content for message in await session.messages(fresh=True)] == texts[:3]
    await store.close()


@pytest.mark.parametrize("kind", [pytest.param("redis", marks=pytest.mark.wide), "valkey"])
async def test_a_partition_is_noted_whole_only_where_its_slot_is_not_leaving(kind: str, place: Any) -> None:
    with redis_cluster(replicas=0, binary=server_binary(kind)) as cluster:
        store = await opened("asyncio", cluster.url, archiver=False, beat=0.0, **place)
        await store.session("s").set("a", 1)
        partitions, keys = core(store)._lifecycle.tiers().warm.partitions, core(store)._lifecycle.context.keys
        partition = keys.partition(keys.of(Ref("session", "s")).partition)

        async def advances() -> bool:
            """Whether a script that the node executes, in the first epoch, notes the partition."""
            before = (await partitions.states([partition]))[partition.partition].proved_ms
            wait_for(0.05)
            (epoch, *_) = await partitions.tail(partition)
            assert epoch.startswith("1-")
            return bool((await partitions.states([partition]))[partition.partition].proved_ms > before)

        assert await advances()
        with on_its_way(cluster, slot(store, "s"), 0):
            assert not await advances()
        await store.session("s").set("a", 2)
        assert await advances()
        await store.close()


async def test_a_record_that_is_there_without_the_meta_of_its_partition_is_read_from_sql(
    cluster: RedisCluster, place: Any
) -> None:
    """As after a restart of a node that was handed the record, before `meta` was on its disk."""
    store = await opened("asyncio", cluster.url, archiver=False, unarchived_bytes=0, **place)
    session = store.session("s")
    await session.set("a", 1)
    await store.admin.archive()
    await session.set("a", 2)
    keys = core(store)._lifecycle.context.keys.of(Ref("session", "s"))
    node = cluster.primary_of(slot(store, "s"))
    assert node.ask("DEL", keys.meta.decode(), keys.journal.decode()) == 2
    assert await session.set("a", 3) == 2, "the second change was known to Redis alone"
    assert [change.version for change in await session.history()] == [1, 2]
    await store.close()


async def test_a_partition_whose_journal_is_newer_than_the_rest_is_recovered(cluster: RedisCluster, place: Any) -> None:
    """As after a restart of the node that it was moved from, or to."""
    store = await opened("asyncio", cluster.url, archiver=False, **place)
    session = store.session("s")
    await session.set("a", 1)
    meta = core(store)._lifecycle.context.keys.of(Ref("session", "s")).meta.decode()
    node = cluster.primary_of(slot(store, "s"))
    before = node.ask("HGET", meta, "journal")
    await session.set("a", 2)
    wait_for(0.05)
    node.ask("HSET", meta, "journal", before)
    assert await session.set("a", 3) == 3
    assert [change.version for change in await session.history()] == [1, 2, 3]
    assert node.ask("HGET", meta, "epoch").startswith("2-")
    await store.close()


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["redis", pytest.param("valkey", marks=pytest.mark.full)])
@pytest.mark.timeout(240)
async def test_slots_move_under_load_and_nobody_notices(kind: str, place: Any) -> None:
    """One at a time, each for a while on its way; then many to a node that was added, which is removed."""
    with redis_cluster(replicas=0, binary=server_binary(kind)) as cluster:
        async with AsyncStateStore.open(cluster.url, **place) as store:
            mine = slots(store)
        with (
            listening(url=cluster.url, **place) as listener,
            load(2, url=cluster.url, retry_for=30.0, **place) as running,
        ):
            wait_for_calls(cluster, 50)
            for number in mine[:4]:
                source = cluster.primary_of(number)
                target = next(node for node in cluster.primaries() if node is not source)
                cluster.move_slots([number], target, pause=0.15)
            fourth = cluster.add_node()
            many = sorted({*range(0, 16_384, 1000), *mine[::2]})
            cluster.move_slots(many, fourth)
            wait_for_calls(cluster, 50)
            cluster.move_slots(many, cluster.nodes[0])
            cluster.remove_node(fourth)
            wait_for_calls(cluster, 50)
            running.end()
            assert running.emitted
            listener.check(running.emitted)
        assert running.acknowledged() > 100
        await running.check()


@pytest.mark.wide
@pytest.mark.timeout(240)
async def test_primaries_hand_over_under_load_and_nobody_notices(place: Any) -> None:
    """CLUSTER FAILOVER: the replica has all that its primary acknowledged."""
    given = {"retry_for": 30.0} | place
    with redis_cluster() as cluster, load(2, url=cluster.url, **given) as running:
        wait_for_calls(cluster, 50)
        for _ in range(2):
            cluster.failover(cluster.primaries()[0])
            wait_for_calls(cluster, 50)
        running.end()
        assert running.acknowledged() > 100
        # Another data id has begun, so all earlier leases have ended.
        running.failed[:] = [each for each in running.failed if " Fenced(" not in each]
        await running.check()


# A primary ends


def of_node(store: Any, cluster: RedisCluster, node: ClusterNode) -> list[str]:
    return [id for id in IDS if cluster.primary_of(slot(store, id)) is node]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("redis", "killed"),
        ("valkey", "frozen"),
        pytest.param("redis", "frozen", marks=pytest.mark.full),
        pytest.param("valkey", "killed", marks=pytest.mark.full),
    ],
)
@pytest.mark.timeout(240)
async def test_when_a_primary_ends_the_others_go_on_and_its_replica_takes_over(kind: str, how: str, place: Any) -> None:
    with redis_cluster(binary=server_binary(kind)) as cluster:
        async with AsyncStateStore.open(cluster.url, **place) as store:
            node = cluster.primaries()[0]
            theirs = of_node(store, cluster, node)
        others = [id for id in IDS if id not in theirs]
        assert theirs
        assert others
        # Of each session its own processes: who waits for one that is away asks for no other.
        given = {"url": cluster.url, "retry_for": 30.0} | place
        with load(2, theirs, **given) as waiting, load(2, others, **given) as going_on:
            wait_for_calls(cluster, 50)
            ended = now()
            node.kill() if how == "killed" else node.pause()
            wait_until(lambda: len(cluster.primaries()) == 3, "no replica was promoted")
            elected = now()
            wait_for_calls(cluster, 100)
            wait_for(2.0)
        # The leases of the earlier data id have ended.
        left = [each for each in waiting.failed if " Fenced(" not in each]
        assert not left + going_on.failed, (left + going_on.failed)[:3]
        assert going_on.gap(others, ended, elected) < (elected - ended) / 2, "the others go on"
        after = min(at for id in theirs for at in waiting.times[id] if at >= elected)
        assert after - elected < 10.0
        await going_on.check()
        print(f"{waiting.acknowledged()} acknowledged, {await waiting.check_what_is_left()} lost")  # noqa: T201 - shown with -s
        node.resume()


@pytest.mark.wide
@pytest.mark.parametrize(("api", "whole"), [("asyncio", "no"), ("blocking", "yes")])
async def test_slots_that_nobody_has_are_unavailable_and_never_empty(api: str, whole: str, place: Any) -> None:
    """With require-full-coverage the others are, too."""
    with redis_cluster("--cluster-require-full-coverage", whole, replicas=0) as cluster:
        store = await opened(api, cluster.url, retry_for=1.0, archiver=False, beat=0.0, timeout=1.0, **place)
        for id in IDS:
            await store.session(id).set("a", id)
        node = cluster.primaries()[0]
        theirs = of_node(store, cluster, node)
        others = [id for id in IDS if id not in theirs]
        await store.admin.archive()
        node.kill()
        if whole == "yes":
            rest = cluster.nodes[1:]
            wait_until(lambda: all("state:fail" in each.ask("CLUSTER", "INFO") for each in rest), "unnoticed")
        for id in theirs[:2]:
            for fresh in (True, False):
                with pytest.raises(WarmUnavailable):
                    await store.session(f"{id}").get("a", fresh=fresh)
            with pytest.raises(WarmUnavailable):
                await store.session(id).set("a", 2)
        for id in others[:3]:
            if whole == "yes":
                with pytest.raises(WarmUnavailable):
                    await store.session(id).set("a", 2)
            else:
                assert await store.session(id).get("a", fresh=True) == id
                assert await store.session(id).set("a", 2) == 2
        await store.close()


# Each thing that a store does, once


@pytest.mark.wide
async def test_what_goes_over_all_nodes_in_one_exchange(cluster: RedisCluster, place: Any) -> None:
    store = await opened("blocking", cluster.url, **place)
    other = await opened("blocking", cluster.url, **place)
    async with store.batch() as batch:
        for number, id in enumerate(IDS):
            batch.on(store.session(id, user="u")).set("n", number)
    assert {cluster.primary_of(slot(store, id)) for id in IDS} == set(cluster.nodes)
    found = [await other.session(id).get("n", fresh=True) for id in IDS]
    assert found == list(range(len(IDS)))
    await store.app("shop").set("open", True)
    assert await other.app("shop").get("open") is True
    assert len(await store.admin.replicas()) == 2
    while await store.admin.archive():
        pass
    assert {info.id for info in await store.sessions(user="u", limit=50)} == set(IDS)
    exported = await store.admin.export(IDS[0])
    assert exported is not None
    assert await store.forget("u") == len(IDS)
    assert all(finding.ok for finding in await store.admin.doctor() if finding.fatal)
    await other.close()
    await store.close()


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["redis", pytest.param("valkey", marks=pytest.mark.full)])
def test_the_command_line_asks_a_cluster(kind: str, place: Any) -> None:
    with redis_cluster(replicas=0, binary=server_binary(kind)) as cluster:
        del place["partitions"]
        with StateStore.open(cluster.url, **place) as store:
            for id in IDS:
                store.session(id, user="u").set("a", 1)
            while store.admin.archive():
                pass
        given, urls = hidden(*(word for name, value in place.items() for word in (f"--{name}", str(value))))
        urls |= {"DISTRIBUTED_STATE_URL": cluster.url}
        for words, found in (
            (["doctor"], "3 primaries"),
            (["sessions", "--user", "u"], IDS[3]),
            (["get", IDS[3]], "a"),
        ):
            done = CliRunner().invoke(shell.app, [*given, *words], env=urls)
            assert done.stderr == ""
            assert done.exit_code == (words == ["doctor"]), "it has advice: nothing is on disk, nobody has a replica"
            assert found in done.stdout
