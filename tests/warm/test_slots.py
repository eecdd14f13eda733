"""Redis Cluster is asked, not believed: everything that one script touches lies in one slot."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from below import keys_of, redis_of, server_binary, tiers, until
from slots import commands_of_several_slots, every_name, slot

from distributed_state import NotFound
from distributed_state.port.routing import Router
from distributed_state.programs.servers import RedisServer, free_port, redis_server
from distributed_state.values.keys import Keys, tag
from distributed_state.values.model import SCOPES, Ref

HOSTILE = [
    "a", "user-123", "{", "}", "{}", "{a}", "a}b{c", "}{", "{{a}}", ":", "::lock", "a:lock", "{a}:lock", "\n", "\r\n",
    "\0", "a\0{b}", "%", "%7B", "é", "日本語", "\U0001f600", "\ud800", " ", "*", "?", "[a]", '"', "'", "\\", "#v",
    "x" * 1024, "{" * 300, "\x7f\x80\xff", "{user1000}.following", "foo{}{bar}", "foo{{bar}}zap",
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisServer]:
    """A cluster of one node that holds every slot: it checks keys as any cluster does."""
    options = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--cluster-node-timeout", "2000"]
    # By default its port plus 10,000, which the system may have lent to an outgoing connection.
    options += ["--cluster-port", str(free_port())]
    with redis_server(*options, binary=server_binary("valkey")) as server:
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        yield server


def slots_of(server: RedisServer, names: list[bytes]) -> list[int]:
    with redis.Redis.from_url(server.url) as client:
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.execute_command("CLUSTER KEYSLOT", name)
        return [int(each) for each in pipeline.execute()]


@pytest.mark.parametrize("partitions", [1, 64, 1000])
def test_all_keys_and_channels_of_a_record_share_one_slot(cluster: RedisServer, partitions: int) -> None:
    keys = Keys("name.space-1", partitions)
    dice = random.Random(7)
    ids = [*HOSTILE, *("".join(chr(dice.randrange(1, 0x300)) for _ in range(12)) for _ in range(100))]
    groups = [sorted(every_name(keys, Ref(scope, id))) for scope in SCOPES for id in ids]
    assert min(map(len, groups)) >= 10
    answers = iter(slots_of(cluster, [name for group in groups for name in group]))
    for group in groups:
        found = [next(answers) for _ in group]
        assert len(set(found)) == 1, group
        assert found[0] == slot(group[0]), "so that the unit tests compute what the server does"


@pytest.mark.parametrize("partitions", [1, 64, 1000])
def test_partitions_lie_evenly_over_the_slots(cluster: RedisServer, partitions: int) -> None:
    found = slots_of(cluster, [f"ns:{{{tag(each, partitions)}}}:journal".encode() for each in range(partitions)])
    assert [int(each / (16384 / partitions)) for each in found] == list(range(partitions))
    for nodes in (3, 6, 12):
        on_each = [sum(each * nodes // 16384 == node for each in found) for node in range(nodes)]
        assert partitions < nodes or max(on_each) - min(on_each) <= 2


async def everything(opener: Any, **settings: Any) -> None:
    """What a store and its background work do."""
    store, other = await opener(**settings, sweep=0.05), await opener(**settings)
    received = list[Any]()
    store.on("*", received.append, group="all")
    await store.ready()
    for id in HOSTILE[:20]:
        session = store.session(id, user="u")
        await session.write(set={"a": 1}, increment={"n": 1}, append=[{"role": "user", "content": "hi"}], phase="p")
        async with session.lock():
            await session.update("o", {"x": 1})
    async with store.batch() as batch:
        for id in HOSTILE:
            batch.on(store.session(id)).set("b", 2)
    await store.session("short", idle=0.05).set("a", 1)
    assert len(await store.admin.replicas()) >= 1
    await store.admin.reload_config({"limit": 3})
    await store.emit("noted", {"n": 1})
    assert await store.admin.archive() >= 0
    session = store.session("fresh", user="u")
    for number in range(3):
        await session.set("n", number)
    await session.checkpoint("here")
    assert await session.rollback(label="here") == 5
    assert await session.fork("forked") == 1
    with redis_of(store) as client:
        for id in HOSTILE:
            client.delete(keys_of(store, id).record)
    for id in HOSTILE:
        assert await other.session(id).get("b") == 2
    assert len(await other.get_many([other.session(id) for id in HOSTILE])) == len(HOSTILE)
    assert await store.admin.import_(await store.admin.export("fresh"), id="copy") == "copy"
    assert await other.session("copy").get("n") == 2
    assert await store.delete("copy") > 0
    with pytest.raises(NotFound):
        await store.delete("never")
    await until(lambda: any(each.type == "session.expired" for each in received))
    await store.off(received.append)
    assert await store.forget("u") >= 21
    assert all(finding.ok for finding in await store.admin.doctor() if finding.name in ("scripts", "sql quarantine"))
    await store.close()
    await other.close()


@pytest.mark.wide
@pytest.mark.only(warm="valkey")
async def test_no_script_crosses_slots(opener: Any, cluster: RedisServer) -> None:
    """Everything a store does, on a server that refuses a script whose keys lie in two slots."""
    with redis.Redis.from_url(cluster.url) as client:
        await until(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
    await everything(opener, url=cluster.url)


@pytest.mark.wide
@pytest.mark.replicas
async def test_each_command_names_keys_and_all_of_one_slot(opener: Any, monkeypatch: Any) -> None:
    """The keys say to which server it goes. What names none is asked of each server by itself."""
    with commands_of_several_slots(monkeypatch) as found:
        await everything(opener)
    assert found == []


@pytest.mark.replicas
@pytest.mark.only(api="asyncio", warm="single")  # a cluster refuses the one by itself
@pytest.mark.parametrize("wrong", ["a key of another slot", "a command without a key"])
async def test_a_command_that_belongs_to_no_single_server_is_noticed(opener: Any, monkeypatch: Any, wrong: str) -> None:
    if wrong == "a key of another slot":
        monkeypatch.setattr(Keys, "replica", lambda self, replica: f"{self.namespace}:replica:{replica}".encode())
    else:
        monkeypatch.setattr(Router, "command_with", lambda self, node, *words: self.command(*words))
    with commands_of_several_slots(monkeypatch) as found:
        store = await opener()
        await store.admin.replicas()
        await tiers(store).clock.ask()  # as it opens something in the background may have been faster
        await store.close()
    assert any("replica" in each if wrong == "a key of another slot" else "TIME" in each for each in found)


@pytest.mark.only(warm="valkey")
async def test_the_doctor_looks_at_a_cluster(opener: Any, cluster: RedisServer) -> None:
    with redis.Redis.from_url(cluster.url) as client:
        await until(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        store = await opener(url=cluster.url, retry_for=4.5)
        hasty = await opener(url=cluster.url, retry_for=1)
        found = {each.name: each for each in await store.admin.doctor()}
        assert found["cluster"].ok
        assert found["cluster"].found == "1 primaries, 16384 of 16384 slots served"
        replicas = next(each for name, each in found.items() if name.endswith(" replicas"))
        assert not replicas.ok
        assert replicas.found == "0"
        assert found["failover"].ok
        assert "after 2 s (cluster-node-timeout)" in found["failover"].found
        assert "for 2 s more" in found["isolation"].found
        assert not {each.name: each for each in await hasty.admin.doctor()}["failover"].ok
        client.config_set("cluster-require-full-coverage", "no")
        client.execute_command("CLUSTER", "DELSLOTS", 0)
        try:
            found = {each.name: each for each in await store.admin.doctor()}
            assert not found["cluster"].ok
            assert "16383 of 16384" in found["cluster"].found
        finally:
            client.execute_command("CLUSTER", "ADDSLOTS", 0)
            await until(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        await store.close()
        await hasty.close()
