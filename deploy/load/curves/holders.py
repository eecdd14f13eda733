"""What a server's CPU pays for a commit that two replicas are told of, by how many hold other records.

Replicas that hold others are connections that listen to channels of records as a replica does: what is measured is the
server, not they.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import selectors
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import redis

from deploy.load.baseline import login
from deploy.load.curves.curve import Curve, Progress, flat
from distributed_state import AsyncStateStore
from distributed_state.programs.servers import redis_server
from distributed_state.values.keys import Keys
from distributed_state.values.model import Ref

_NAMESPACE = "holders"
_PARTITIONS = 64
_OTHERS = 20  # records that each of the others holds
_TURNS = 5
_SETTINGS: dict[str, Any] = {
    "namespace": _NAMESPACE, "partitions": _PARTITIONS, "archiver": False, "beat": 0, "journal_entries": 10**7,
    "journal_bytes": 2**32, "unarchived_bytes": 0,
}  # fmt: skip


def _listen(url: str, count: int, said: Any) -> None:
    """Connections that hold records of their own, until they are told to end."""
    keys = Keys(_NAMESPACE, _PARTITIONS)
    place = urlsplit(url)
    selector = selectors.DefaultSelector()
    for number in range(count):
        channels = [keys.of(Ref("session", f"other-{number}-{each}")).channel for each in range(_OTHERS)]
        subscribe = b"".join(b"*2\r\n$10\r\nSSUBSCRIBE\r\n$%d\r\n%b\r\n" % (len(each), each) for each in channels)
        sock = socket.create_connection((place.hostname, place.port))
        sock.sendall(login(url) + b"*2\r\n$5\r\nHELLO\r\n$1\r\n3\r\n" + subscribe)
        selector.register(sock, selectors.EVENT_READ)
    said.send("listening")
    while not said.poll():
        for key, _ in selector.select(0.5):
            key.fileobj.recv(2**18)  # type: ignore[union-attr]  # all are sockets


class Held:
    """A server with a record that one replica writes and two others hold."""

    def __init__(self, url: str, writer: AsyncStateStore, holders: Sequence[AsyncStateStore]) -> None:
        self._client = redis.Redis.from_url(url)
        self._session = writer.session("held")
        self._channel = Keys(_NAMESPACE, _PARTITIONS).of(Ref("session", "held")).channel
        self._holders = holders
        self._number = 0

    async def hold(self) -> None:
        """Write it, and read it until both have it in hot."""
        await self._commit()
        for holder in self._holders:
            deadline = time.monotonic() + 20
            while (await holder.admin.stats())["hot_hits"] == 0:
                assert time.monotonic() < deadline, "a replica does not keep what it reads"
                await holder.session("held").get("number")

    async def _commit(self) -> None:
        self._number += 1
        await self._session.set("number", self._number)

    def _used(self) -> float:
        """The server's seconds of CPU until now."""
        cpu = self._client.info("cpu")
        return float(cpu["used_cpu_sys"] + cpu["used_cpu_user"])

    def _heard(self) -> int:
        """By how many connections the record's changes are heard."""
        ((_, count),) = self._client.pubsub_shardnumsub(self._channel)
        return int(count)

    async def us_of_a_commit(self, commits: int) -> float:
        """The server's CPU for each of so many."""
        before = self._used()
        for _ in range(commits):
            await self._commit()
        spent = self._used() - before
        assert self._heard() == len(self._holders), f"{self._heard()} replicas hold the record"
        return spent / commits * 1e6

    def close(self) -> None:
        self._client.close()


@asynccontextmanager
async def held(connections: int) -> AsyncIterator[Held]:
    """A server with so many connections that hold records, three of them replicas."""
    context = multiprocessing.get_context("spawn")
    with redis_server() as server, tempfile.TemporaryDirectory(prefix="distributed-state-growth-") as folder:
        ours, theirs = context.Pipe()
        others = context.Process(target=_listen, args=(server.url, connections - 3, theirs), daemon=True)
        others.start()
        try:
            assert ours.recv() == "listening"
            archive = f"sqlite:///{folder}/holders.db"
            async with AsyncExitStack() as stack:
                stores = [
                    await stack.enter_async_context(AsyncStateStore.open(server.url, archive=archive, **_SETTINGS))
                    for _ in range(3)
                ]
                found = Held(server.url, stores[0], stores[1:])
                stack.callback(found.close)
                await found.hold()
                yield found
        finally:
            ours.send("end")
            others.join()


async def _measured(sizes: Sequence[int], progress: Progress, turns: int, commits: int) -> list[float]:
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    async with AsyncExitStack() as stack:
        all_ = {size: await stack.enter_async_context(held(size)) for size in sizes}
        for turn in range(turns + 1):
            for size, each in all_.items():
                progress(f"{size} connections, turn {turn} of {turns}")
                cost = await each.us_of_a_commit(commits)
                if turn:  # what the first finds is cold
                    taken[size].append(cost)
    return [median(each) for each in taken.values()]


def holders(sizes: Sequence[int], progress: Progress, *, turns: int = _TURNS, commits: int = 2_000) -> Curve:
    """A commit that two of so many replicas are told of: in turns, the median."""
    costs = asyncio.run(_measured(sizes, progress, turns, commits))
    return flat("server CPU a commit that 2 replicas hold", "us", "connections", sizes, costs)
