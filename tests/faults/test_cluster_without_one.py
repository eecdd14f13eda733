"""One server of a cluster is away. Law: it holds up its own partitions alone, and each part is told what became of it.

The cluster says nothing of it yet (its timeout is long), so that only the answers that are missing show it.
"""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest
from below import tiers, until
from faces import Blocking, in_thread

from distributed_state import AsyncStateStore, StateStore, WarmUnavailable
from distributed_state.programs.servers import RedisCluster, redis_cluster

pytestmark = pytest.mark.wide
FACE = pytest.mark.parametrize("face", ["asyncio", "blocking"])
IDS = [f"s{number}" for number in range(24)]


async def opened(face: str, cluster: RedisCluster, folder: Path, **settings: Any) -> Any:
    given = {"archive": f"sqlite:///{folder}/a.db", "namespace": f"t{uuid.uuid4().hex[:12]}"} | settings
    given |= {"retry_for": 0.5, "timeout": 1.0, "beat": 0.0}
    if face == "asyncio":
        return await AsyncStateStore.open(cluster.url, **given)
    return Blocking(await in_thread(lambda: StateStore.open(cluster.url, **given)))


def without(store: Any, cluster: RedisCluster, *, archivers: bool = False) -> tuple[list[str], list[str]]:
    """End a server, the one with the list of archivers or another; the sessions that it had, and the others."""
    port, keys = tiers(store).port, tiers(store).keys
    ports = {int(port.node_of(keys.archivers).rpartition(":")[2])}
    gone = next(each for each in cluster.primaries() if (each.port in ports) == archivers)
    theirs = [id for id in IDS if port.node_of(keys.of(store.session(id).ref).record).endswith(f":{gone.port}")]
    gone.kill()
    return theirs, [id for id in IDS if id not in theirs]


@FACE
async def test_of_a_batch_the_records_of_the_others_are_written(face: str, tmp_path: Path) -> None:
    with redis_cluster("--cluster-node-timeout", "60000", replicas=0) as cluster:
        store = await opened(face, cluster, tmp_path, archiver=False)
        for id in IDS:
            await store.session(id).set("n", 1)
        theirs, others = without(store, cluster)
        assert theirs
        assert others
        batch = store.batch()
        with pytest.raises(WarmUnavailable):
            async with batch:
                for id in IDS:
                    batch.on(store.session(id)).set("n", 2)
        assert batch.versions == {store.session(id).ref: 2 for id in others}
        assert [await store.session(id).get("n", fresh=True) for id in others] == [2] * len(others)
        await store.close()


async def archived_meanwhile(face: str, folder: Path, archivers: bool = False) -> None:
    with redis_cluster("--cluster-node-timeout", "60000", replicas=0) as cluster:
        store = await opened(face, cluster, folder)
        for id in IDS:
            await store.session(id).set("n", 1)
        await store.archive()
        _, others = without(store, cluster, archivers=archivers)
        before = tiers(store).archiver.archived
        for id in others:
            await store.session(id).set("n", 2)
        try:
            async with asyncio.timeout(20):
                await until(lambda: tiers(store).archiver.archived >= before + len(others), 30)
        finally:
            await store.close()


@FACE
@pytest.mark.parametrize("archivers", [False, True])
async def test_the_journals_of_the_others_are_archived(face: str, archivers: bool, tmp_path: Path) -> None:
    await archived_meanwhile(face, tmp_path, archivers)
