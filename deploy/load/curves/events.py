"""What a server's CPU pays for an event that many replicas hear, by how many they are."""

from __future__ import annotations

import asyncio
import multiprocessing
import selectors
import socket
import tempfile
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import redis

from deploy.load.baseline import login
from deploy.load.curves.curve import Curve, Progress
from distributed_state import AsyncStateStore, Event
from distributed_state.programs.servers import redis_server
from distributed_state.values.keys import Keys

_NAMESPACE = "events"
_PARTITIONS = 64
_OTHERS = "other.*"
_GOALS = {10: 110, 100: 200, 500: 600}  # us an event, by connections: 100, and 1 for each


def _drain(url: str, count: int, wanted: bool, said: Any) -> None:
    """Connections that hear events, as replicas do, and do nothing with them: they must not be the limit.

    All events if they are `wanted`, else those of another type.
    """
    keys = Keys(_NAMESPACE, _PARTITIONS)
    alone = b"" if wanted else b":" + _OTHERS.encode()
    channels = [keys.partition(each).events_channel + alone for each in range(_PARTITIONS)]
    subscribe = b"".join(b"*2\r\n$10\r\nSSUBSCRIBE\r\n$%d\r\n%b\r\n" % (len(each), each) for each in channels)
    place = urlsplit(url)
    selector = selectors.DefaultSelector()
    for _ in range(count):
        sock = socket.create_connection((place.hostname, place.port))
        sock.sendall(login(url) + b"*2\r\n$5\r\nHELLO\r\n$1\r\n3\r\n" + subscribe)
        selector.register(sock, selectors.EVENT_READ)
    said.send("listening")
    while not said.poll():
        for key, _ in selector.select(0.5):
            key.fileobj.recv(2**18)  # type: ignore[union-attr]  # all are sockets
            time.sleep(0)


async def _emit(url: str, archive: str, rate: int, seconds: float, wanted: bool) -> tuple[float, list[float], float]:
    """Emit for a while, and hear it: the server's CPU in us an event, the delays at one listener, and the rate."""
    settings: dict[str, Any] = {"archive": archive, "namespace": _NAMESPACE, "archiver": False, "beat": 0}
    stores = [await AsyncStateStore.open(url, partitions=_PARTITIONS, **settings) for _ in range(3)]
    writer, listener, other = stores
    delays: list[float] = []

    async def hear(event: Event) -> None:
        delays.append(time.monotonic() - event.data["at"])

    listener.on("*" if wanted else "load.*", hear)
    await listener.ready()
    if not wanted:
        other.on(_OTHERS, hear)
        await other.ready()

    async def some(until: float, first: int) -> int:
        """As much as there should have been by now, a few at a time."""
        began, sent = time.monotonic(), 0
        while time.monotonic() < until:
            due = int((time.monotonic() - began) * rate) - sent
            batch = [
                writer.emit("load.event", {"at": time.monotonic()}, subject=f"s{first + sent + n}")
                for n in range(min(due, 20))
            ]
            await asyncio.gather(*batch)
            sent += len(batch)
            await asyncio.sleep(0 if due > 20 else 0.002)
        return sent

    with redis.Redis.from_url(url) as client:

        def used() -> float:
            stats = client.info("cpu")
            return float(stats["used_cpu_sys"] + stats["used_cpu_user"])

        await some(time.monotonic() + 3.0, 0)  # the partitions are there by then
        await asyncio.sleep(0.3)
        delays.clear()
        before, began = used(), time.monotonic()
        sent = await some(began + seconds, 100_000)
        took = time.monotonic() - began
        await asyncio.sleep(0.3)
        spent = used() - before
    for store in stores:
        await store.close()
    return spent / sent * 1e6, sorted(delays), sent / took


def measured(size: int, *, rate: int, seconds: float, wanted: bool = True) -> tuple[float, list[float], float]:
    """The server's CPU in us an event among `size` connections, the delays at a replica, and the rate.

    If events are not `wanted` by the others, one replica alone handles their type.
    """
    context = multiprocessing.get_context("spawn")
    with redis_server() as server, tempfile.TemporaryDirectory(prefix="distributed-state-growth-") as folder:
        ours, theirs = context.Pipe()
        drain = context.Process(target=_drain, args=(server.url, size - 1, wanted, theirs), daemon=True)
        drain.start()
        try:
            assert ours.recv() == "listening"
            return asyncio.run(_emit(server.url, f"sqlite:///{folder}/events.db", rate, seconds, wanted))
        finally:
            ours.send("stop")
            drain.join()


def events(sizes: Sequence[int], progress: Progress, *, rate: int = 1000, seconds: float = 8.0) -> Curve:
    """An event, at 1,000 events a second in all partitions, or as many as the server publishes."""
    costs = []
    for size in sizes:
        progress(f"events to {size} connections")
        costs.append(measured(size, rate=rate, seconds=seconds)[0])
    return Curve("server CPU an event, 1,000 a second", "us", "connections", list(sizes), costs, _GOALS[500])


def unwanted(sizes: Sequence[int], progress: Progress, *, rate: int = 1000, seconds: float = 8.0) -> Curve:
    """The same, of a type that one of them handles."""
    costs = []
    for size in sizes:
        progress(f"events among {size} connections that want others")
        costs.append(measured(size, rate=rate, seconds=seconds, wanted=False)[0])
    return Curve("server CPU an event of one's type, 1,000 a second", "us", "connections", list(sizes), costs, 80.0)


if __name__ == "__main__":
    import sys

    for size in map(int, sys.argv[1:] or ["10", "100", "500"]):
        cost, delays, rate = measured(size, rate=1000, seconds=8.0)
        at = [f"{delays[int(len(delays) * part)] * 1000:.1f}" for part in (0.5, 0.99)]
        goal = f" (goal: {_GOALS[size]})" if size in _GOALS else ""
        print(
            f"{size} connections: {cost:.0f} us{goal} an event at {rate:.0f}/s; delay p50 {at[0]} ms, p99 {at[1]} ms",
            flush=True,
        )
