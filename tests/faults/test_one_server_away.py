"""One server of a cluster is gone, and nobody replaces it. Law: work in the background goes on for the others' keys."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from below import nodes_of, server_binary, tiers, until
from reaping import exists
from sync_api import core

from distributed_state import WarmUnavailable
from distributed_state.port.connections import Connections
from distributed_state.programs.servers import RedisCluster, redis_cluster
from distributed_state.warm.consumers import RESYNC, Subscription
from distributed_state.warm.per_server import PerServer

pytestmark = [
    pytest.mark.wide,
    pytest.mark.only(warm="cluster", cold=("sqlite", "postgres")),
    pytest.mark.timeout(90),
]
PARTITIONS = 16


@contextmanager
def cluster() -> Iterator[RedisCluster]:
    """One whose servers go on alone when another is away."""
    options = ("--cluster-node-timeout", "60000", "--cluster-require-full-coverage", "no", "--appendonly", "yes")
    with redis_cluster(*options, replicas=0, binary=server_binary("cluster")) as running:
        yield running


def kill(running: RedisCluster, node: str) -> Any:
    """Kill the server of this name."""
    (chosen,) = [each for each in running.nodes if node.endswith(f":{each.port}")]
    return running.kill_primary(chosen)


def ids(store: Any, count: int = 2) -> dict[str, list[str]]:
    """By server, so many sessions that it has, each in another partition."""
    keys, found = core(store)._lifecycle.context.keys, {node: dict[int, str]() for node in nodes_of(store)}
    for number in range(400):
        partition = keys.partition_of(f"session:s{number}")
        found[tiers(store).port.node_of(keys.partition(partition).meta)].setdefault(partition, f"s{number}")
    return {node: list(each.values())[:count] for node, each in found.items()}


def by_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no consumer take what is published: it looks into the stream for all."""
    monkeypatch.setattr(Subscription, "receive", lambda *_: False)


async def emit(store: Any, names: list[str]) -> set[str]:
    for name in names:
        await store.emit("note.made", subject=f"session:{name}")
    return {f"session:{name}" for name in names}


async def subjects(events: Any, count: int) -> set[str]:
    """Of so many events, resyncs apart."""
    found = set[str]()
    while len(found) < count:
        event = await events.next(timeout=15)
        assert event is not None, f"only {found}"
        if event.type != RESYNC:
            found.add(event.subject)
    return found


async def test_events_of_the_other_servers_are_read_and_later_its_own(opener: Any, monkeypatch: Any) -> None:
    by_stream(monkeypatch)
    with cluster() as running:
        opener.url = running.url
        store = await opener(partitions=PARTITIONS, retry_for=1.0)
        places = ids(store)
        away, *others = places
        async with store.events("note.*") as events:
            every = [name for names in places.values() for name in names]
            assert await subjects_of(store, events, every)
            gone = kill(running, away)
            for _ in range(3):
                tiers(store).consumers.stir(range(PARTITIONS))
                assert await subjects_of(store, events, [name for node in others for name in places[node]])
            gone.start()
            await until(running.converged, every=0.1)
            assert await subjects_of(store, events, places[away])


async def subjects_of(store: Any, events: Any, names: list[str]) -> bool:
    """Emit an event of each; whether these were delivered, and no others."""
    emitted = await emit(store, names)
    return await subjects(events, len(emitted)) == emitted


@pytest.mark.parametrize("away", ["of the team", "of no team"])
async def test_a_group_goes_on_with_the_other_servers(opener: Any, monkeypatch: Any, away: str) -> None:
    """That of the list of its members as well: who is in it does not change meanwhile."""
    by_stream(monkeypatch)
    with cluster() as running:
        opener.url = running.url
        store = await opener(partitions=PARTITIONS, retry_for=1.0)
        places = ids(store)
        team = tiers(store).port.node_of(core(store)._lifecycle.context.keys.team("g"))
        lost = team if away == "of the team" else next(node for node in places if node != team)
        others = [name for node, names in places.items() if node != lost for name in names]
        async with store.events("note.*", group="g") as events:
            assert await subjects_of(store, events, [name for names in places.values() for name in names])
            kill(running, lost)
            end = tiers(store).port.monotonic() + 9.0  # the claims of before have run out by then
            while tiers(store).port.monotonic() < end:
                emitted = await emit(store, others)
                got = set[str]()
                while got < emitted:
                    event = await events.next(timeout=4)
                    assert event is not None, f"only {got} of {emitted}"
                    assert event.type != RESYNC, "nothing was lost: its server is away"
                    got.add(event.subject)


async def test_sessions_of_the_other_servers_expire(opener: Any) -> None:
    with cluster() as running:
        opener.url = running.url
        store = await opener(partitions=PARTITIONS, retry_for=1.0, sweep=0.2)
        places = ids(store)
        away, *others = places
        every = [name for names in places.values() for name in names]
        for name in every:
            await store.session(name, idle=2.0).set("a", 1)
        kill(running, away)
        reachable = [name for node in others for name in places[node]]

        async def ended() -> bool:
            return not any([await exists(store, name) for name in reachable])

        await until(ended, 15, every=0.1)


@pytest.mark.parametrize("looks", ["quick", "slow"])
async def test_of_a_batch_the_records_of_the_other_servers_are_written(
    opener: Any, monkeypatch: pytest.MonkeyPatch, looks: str
) -> None:
    """The error names the rest. With slow looks, no time is left to find out again where keys are."""
    with cluster() as running:
        opener.url = running.url
        store = await opener(partitions=PARTITIONS, retry_for=6.0, archiver=False)
        places = ids(store)
        away, *others = places
        every = [name for names in places.values() for name in names]
        for name in every:
            await store.session(name).set("n", 1)
        kill(running, away)
        if looks == "slow":
            look = Connections.look
            monkeypatch.setattr(Connections, "look", lambda *given: time.sleep(0.4) or look(*given))
        batch = store.batch()
        with pytest.raises(WarmUnavailable):
            async with batch:
                for name in every:
                    batch.on(store.session(name)).set("n", 2)
        reachable = [name for node in others for name in places[node]]
        assert batch.versions == {store.session(name).ref: 2 for name in reachable}
        assert [await store.session(name).get("n", fresh=True) for name in reachable] == [2] * len(reachable)


async def leases_beside_a_silent_server(opener: Any, running: RedisCluster) -> dict[str, bool]:
    """Hold a lease on each server, let one be silent until what it keeps is lost; by server, whether it is lost."""
    opener.url = running.url
    # A silent server is waited for longer than any lease lives.
    store = await opener(partitions=PARTITIONS, timeout=60.0, retry_for=0.0, op_window=300.0, archiver=False)
    leases: dict[str, Any] = {}
    for node, names in ids(store, 1).items():
        leases[node] = store.session(names[0]).lock(ttl=8.0)
        await leases[node].acquire()
    leases = {node: core(lease) for node, lease in leases.items()}
    away = next(iter(leases))
    (silent,) = [each for each in running.nodes if away.endswith(f":{each.port}")]
    silent.pause()
    try:
        await until(lambda: leases[away].lost, 60)
        before = {node: lease.deadline for node, lease in leases.items()}
        # The others end with it, or are renewed after it.
        await until(lambda: all(lease.lost or lease.deadline > before[node] for node, lease in leases.items()), 60)
        return {node: lease.lost for node, lease in leases.items()}
    finally:
        silent.resume()


async def test_leases_on_the_other_servers_are_renewed_while_one_is_silent(opener: Any) -> None:
    with cluster() as running:
        lost = await leases_beside_a_silent_server(opener, running)
        assert sorted(lost.values()) == [False] * (len(lost) - 1) + [True]


async def test_with_one_job_for_all_servers_a_silent_one_would_cost_every_lease(opener: Any, monkeypatch: Any) -> None:
    hand, keys = PerServer.hand, list[bytes]()

    def to_the_first(self: PerServer[Any], key: bytes, item: Any) -> None:
        keys.append(key)
        hand(self, keys[0], item)

    monkeypatch.setattr(PerServer, "hand", to_the_first)
    with cluster() as running:
        lost = await leases_beside_a_silent_server(opener, running)
        assert sum(lost.values()) > 1


@pytest.mark.parametrize("away", ["of the team", "of no team"])
async def test_the_journals_of_the_other_servers_are_archived(opener: Any, away: str) -> None:
    with cluster() as running:
        opener.url = running.url
        store = await opener(partitions=PARTITIONS, retry_for=0.5)
        places = ids(store)
        for names in places.values():
            for name in names:
                await store.session(name).set("n", 1)
        await store.admin.archive()
        team = tiers(store).port.node_of(core(store)._lifecycle.context.keys.archivers)
        lost = team if away == "of the team" else next(node for node in places if node != team)
        kill(running, lost)
        before = tiers(store).archiver.archived
        others = [name for node, names in places.items() if node != lost for name in names]
        for name in others:
            await store.session(name).set("n", 2)
        await until(lambda: tiers(store).archiver.archived >= before + len(others), 20)
