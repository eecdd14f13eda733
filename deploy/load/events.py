"""What events cost: delivery to 10 and 100 replicas, catching up, and an event inside a commit; one run, ratios.

    python deploy/load/events.py [--png events.png] [--json events.json] [--replicas 10,100]

Starts its own Redis or Valkey on a free port. A replica is a store with its own connections; they are spread over four
processes. Beside them stand as many plain redis-py subscribers of one channel, which miss what they miss.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import redis
import redis.asyncio
import typer
from rich.console import Console

if not __package__:
    sys.path[0] = str(Path(__file__).parents[2])  # it is a program, and the rest of `deploy` is beside it

from deploy.load.rows import Row, at_most, interleaved, report
from distributed_state import AsyncStateStore, Event, StateStore
from distributed_state.programs.servers import redis_server

PROCESSES = 4
EVENTS = 200
PAUSE = 0.03
Delays = list[float]


async def replicas(url: str, archive: str, count: int, said: Any) -> Delays:
    """Stores that hear every event; how long each took to arrive, in seconds."""
    delays: Delays = []
    stores = [
        await AsyncStateStore.open(url, archive=archive, namespace="events", archiver=False) for _ in range(count)
    ]

    async def hear(event: Event) -> None:
        delays.append(time.monotonic() - event.data["at"])

    for store in stores:
        store.on("load.*", hear)
        await store.ready()
    said.send("listening")
    while len(delays) < count * EVENTS and not said.poll():  # noqa: ASYNC110 - a pipe of another process
        await asyncio.sleep(0.05)
    for store in stores:
        await store.close()
    return delays


async def plain(url: str, archive: str, count: int, said: Any) -> Delays:
    """As many subscribers of redis-py."""
    delays: Delays = []
    subscribers = [redis.asyncio.Redis.from_url(url).pubsub() for _ in range(count)]
    for each in subscribers:
        await each.subscribe("plain")

    async def hear(subscriber: Any) -> None:
        async for message in subscriber.listen():
            if message["type"] == "message":
                delays.append(time.monotonic() - json.loads(message["data"])["at"])

    tasks = [asyncio.create_task(hear(each)) for each in subscribers]
    said.send("listening")
    while len(delays) < count * EVENTS and not said.poll():  # noqa: ASYNC110 - a pipe of another process
        await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    return delays


def crew(listen: Callable[..., Any], url: str, archive: str, count: int, said: Any) -> None:
    said.send(asyncio.run(listen(url, archive, count, said)))


def fan_out(
    listen: Callable[..., Any], tell: Callable[[], Any], url: str, archive: str, count: int
) -> tuple[Delays, float]:
    """Delays of all deliveries, and the server's CPU seconds per event."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    for share in [count // PROCESSES + (n < count % PROCESSES) for n in range(PROCESSES)]:
        ours, theirs = context.Pipe()
        context.Process(target=crew, args=(listen, url, archive, share, theirs), daemon=True).start()
        pipes.append(ours)
    for pipe in pipes:
        assert pipe.recv() == "listening"
    with redis.Redis.from_url(url) as client:

        def used() -> float:
            stats = client.info("cpu")
            return float(stats["used_cpu_sys"] + stats["used_cpu_user"])

        time.sleep(1)
        before = used()
        time.sleep(EVENTS * PAUSE)
        rest = used() - before  # heartbeats and probes, which go on all the time
        before = used()
        for _ in range(EVENTS):
            tell()
            time.sleep(PAUSE)
        spent = used() - before - rest
    deadline = time.monotonic() + 20
    delays = Delays()
    for pipe in pipes:
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            pipe.send("stop")
        delays += pipe.recv()
    return delays, max(spent, 0.0) / EVENTS


def deliveries(url: str, archive: str, counts: list[int]) -> list[Row]:
    rows = []
    cost = dict[int, tuple[float, float]]()
    with (
        StateStore.open(url, archive=archive, namespace="events", archiver=False) as store,
        redis.Redis.from_url(url) as client,
    ):
        for count in counts:
            ours, cpu = fan_out(
                replicas, lambda: store.emit("load.event", {"at": time.monotonic()}, subject="s"), url, archive, count
            )
            theirs, bare = fan_out(
                plain, lambda: client.publish("plain", json.dumps({"at": time.monotonic()})), url, archive, count
            )
            cost[count] = cpu, bare
            rows.append(
                Row(f"events received, {count} replicas", f"{len(ours):,}", f"{count * EVENTS:,} sent to them",
                    len(ours) / (count * EVENTS), "= 1x", len(ours) == count * EVENTS)
            )  # fmt: skip
            for name, at in ("p50", 50), ("p99", 99):
                rows.append(
                    at_most(f"delivery {name}, {count} replicas", percentile(ours, at), percentile(theirs, at), 6, "ms",
                            "redis-py publish")
                )  # fmt: skip
    for count, (cpu, bare) in cost.items():
        rows.append(
            at_most(f"server CPU per event, {count} replicas", cpu * 1e6, max(bare * 1e6, 1.0), 3, "us",
                    "redis-py publish")
        )  # fmt: skip
    return rows


def percentile(delays: Delays, at: int) -> float:
    return statistics.quantiles(delays, n=100)[at - 1] * 1000


def catching_up(url: str, archive: str) -> list[Row]:
    """A replica that missed 10,000 events reads them."""
    taken: dict[str, Delays] = {"missed": [], "plain": []}
    with (
        StateStore.open(url, archive=archive, namespace="missed", archiver=False) as store,
        redis.Redis.from_url(url) as client,
    ):
        with store.events() as events:
            position = events.position
        for n in range(10_000):
            store.emit("load.event", {"n": n}, subject=f"s{n % 500}")
            client.xadd("plain stream", {"h": "load.event", "d": json.dumps({"n": n})})
        for _ in range(5):
            began = time.monotonic()
            with store.events(since=position) as events:
                for _ in range(10_000):
                    assert events.next(10) is not None
            taken["missed"].append(time.monotonic() - began)
            began = time.monotonic()
            last = "-"
            read = 0
            while rows := client.xrange("plain stream", f"({last}" if last != "-" else "-", count=500):
                read += len([json.loads(fields[b"d"]) for _, fields in rows])
                last = rows[-1][0].decode()
            assert read == 10_000
            taken["plain"].append(time.monotonic() - began)
    ours, theirs = (statistics.median(taken[name]) for name in ("missed", "plain"))
    return [
        Row("catching up with 10,000 events", f"{ours:.2f} s", f"redis-py xrange of as many: {theirs:.2f} s",
            ours / theirs, "<= 2 s", ours <= 2)
    ]  # fmt: skip


def inside_a_commit(url: str, archive: str) -> list[Row]:
    """The same change, with an event and without."""
    with StateStore.open(url, archive=archive, namespace="inside", archiver=False) as store:
        session = store.session("s")
        count = 0
        session.set("phase", "0")

        def phase() -> None:
            nonlocal count
            count += 1
            session.write(phase=f"p{count % 7}")

        def field() -> None:
            nonlocal count
            count += 1
            session.write(set={"phase": f"p{count % 7}"})

        found = interleaved({"with": (phase, 800), "without": (field, 800)}, rounds=21)
        heard: list[str] = []
        store.on("session.phase", lambda event: heard.append(event.id))
        store.ready()
        listened = interleaved({"with": (phase, 800), "without": (field, 800)}, rounds=21)
    return [
        at_most("a commit with an event", found["with"], found["without"], 1.3, "us", "the same without"),
        at_most("the same, its replica a listener", listened["with"], listened["without"], 2.5, "us", "without event"),
    ]


def main(
    png: Annotated[Path | None, typer.Option(help="write the ratios as a picture")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="write the rows as JSON")] = None,
    counts: Annotated[str, typer.Option("--replicas", help="how many replicas listen, by comma")] = "10,100",
) -> None:
    """Measure and print ratios; exit 1 if a goal is missed."""
    console = Console()
    with redis_server() as server, tempfile.TemporaryDirectory() as directory:
        archive = f"sqlite:///{directory}/events.db"
        console.print("an event inside a commit ...")
        rows = inside_a_commit(server.url, archive)
        console.print("catching up ...")
        rows += catching_up(server.url, archive)
        console.print("delivery ...")
        rows += deliveries(server.url, archive, [int(each) for each in counts.split(",")])
    report(console, rows, png, as_json)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
