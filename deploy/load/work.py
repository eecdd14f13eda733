"""The cost of workers: the time until a handler begins, sessions a second, sleeping wakes; one run, ratios.

    python deploy/load/work.py [--json work.json] [--only latency,served,sleeping]

Starts its own Redis or Valkey on a free port, with an archive in SQLite. Workers are processes of their own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import redis
import redis.asyncio
import typer
from rich.console import Console

if not __package__:
    sys.path[0] = str(Path(__file__).parents[2])  # it is a program, and the rest of `deploy` is beside it

from deploy.load.rows import Row, at_least, report
from distributed_state import AsyncStateStore, StateStore
from distributed_state.programs.servers import redis_server

BEGAN = "began"  # a list in Redis: when each turn of a handler began
DONE = "done"  # a counter in Redis: inputs that were served
HELLO = {"role": "user", "content": "hello"}


@dataclass(frozen=True)
class Place:
    """Where the store is, and how many sessions are measured."""

    url: str
    archive: str
    sessions: int
    wakes: int

    def options(self, namespace: str) -> dict[str, Any]:
        """How to open the store. The archiver runs in another process, as in a fleet."""
        return {"url": self.url, "archive": self.archive, "namespace": namespace, "archiver": False}


async def _work(place: Place, namespace: str, notes: bool) -> None:
    client = redis.asyncio.Redis.from_url(place.url)
    async with AsyncStateStore.open(**place.options(namespace)) as store:

        @store.handler("h")
        async def serve(turn: Any) -> None:
            if notes:
                await client.rpush(BEGAN, time.time())
            turn["n"] = len(turn.take())

        await store.work(concurrency=32)


def _worker(place: Place, namespace: str, notes: bool) -> None:
    asyncio.run(_work(place, namespace, notes))


@contextmanager
def _workers(count: int, place: Place, namespace: str, notes: bool = False) -> Iterator[list[Any]]:
    started = [multiprocessing.Process(target=_worker, args=(place, namespace, notes)) for _ in range(count)]
    for each in started:
        each.start()
    try:
        yield started
    finally:
        for each in started:
            each.kill()
            each.join()


def _share(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def latency(place: Place) -> Iterator[Row]:
    """From a post to the beginning of the handler, with four workers that have nothing else to do."""
    client = redis.Redis.from_url(place.url)
    with StateStore.open(**place.options("latency")) as store, _workers(4, place, "latency", notes=True):
        store.session("first").post(HELLO, handler="h")
        while not client.llen(BEGAN):
            time.sleep(0.01)
        time.sleep(2.0)  # until the workers share the partitions
        client.delete(BEGAN)
        posted = []
        for number in range(300):
            posted.append(time.time())
            store.session(f"s{number}").post(HELLO, handler="h")
            while client.llen(BEGAN) <= number:
                time.sleep(0.0005)
            time.sleep(0.02)
        began = [float(each) for each in client.lrange(BEGAN, 0, -1)]
    delays = [(at - sent) * 1000 for at, sent in zip(began, posted, strict=True)]
    for share, goal in (0.5, 5.0), (0.99, 25.0):
        found = _share(delays, share)
        name = f"post -> handler begins, p{share * 100:.0f}"
        yield Row(name, f"{found:.1f} ms", "", found / goal, f"<= {goal:g} ms", found <= goal)


def _turns(place: Place, first: int, count: int) -> None:
    async def run() -> None:
        async with AsyncStateStore.open(**place.options("bare")) as store:
            room = asyncio.Semaphore(32)

            async def one(number: int) -> None:
                async with room, store.session(f"s{number}").turn() as turn:
                    turn["n"] = 1

            await asyncio.gather(*(one(number) for number in range(first, first + count)))

    asyncio.run(run())


def served(place: Place) -> Iterator[Row]:
    """Sessions that two workers serve in a second, beside bare turns of two processes on the same sessions."""
    count = place.sessions
    with StateStore.open(**place.options("bare")) as store:
        for number in range(count):
            store.session(f"s{number}").set("n", 0)
    half = count // 2
    processes = [multiprocessing.Process(target=_turns, args=(place, at * half, half)) for at in range(2)]
    began = time.perf_counter()
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    bare = count / (time.perf_counter() - began)
    with StateStore.open(**place.options("served")) as store:
        for number in range(count):
            store.session(f"s{number}").set("n", 0)
            store.session(f"s{number}").post(HELLO, handler="h")
        due = [
            store._core._lifecycle.context.keys.partition(at).due_of("h")
            for at in range(store._core._lifecycle.context.keys.partitions)
        ]
        client = redis.Redis.from_url(place.url)
        began = time.perf_counter()
        with _workers(2, place, "served"):
            while True:
                pipe = client.pipeline(transaction=False)
                for each in due:
                    pipe.zcard(each)
                if not sum(pipe.execute()):
                    break
                time.sleep(0.05)
            taken = time.perf_counter() - began
        found = count / taken
    yield at_least(
        "sessions served a second, 2 processes", found, bare, 0.7, "/s", "bare turns, with the start of both"
    )


def sleeping(place: Place) -> Iterator[Row]:
    """Memory of Redis for each sleeping wake, CPU of a worker beside them, and the refill of an emptied Redis."""
    count, client = place.wakes, redis.Redis.from_url(place.url)
    with StateStore.open(**(place.options("sleeping") | {"archiver": True})) as store:
        for number in range(count):
            store.session(f"s{number}").wake("later", after=86_400, handler="h")
        store.admin.archive()
        keys = store._core._lifecycle.context.keys
        due = [keys.partition(at).due_of("h") for at in range(keys.partitions)]
        used = sum(client.memory_usage(each) or 0 for each in due)
        yield Row(
            "memory of a sleeping wake",
            f"{used / count:.0f} bytes",
            "",
            used / count / 150,
            "<= 150 bytes",
            used <= 150 * count,
        )
        with _workers(1, place, "empty") as [idle], _workers(1, place, "sleeping") as [beside]:
            time.sleep(5.0)
            before = [_cpu(each.pid) for each in (idle, beside)]
            time.sleep(10.0)
            rest, busy = (_cpu(each.pid) - at for each, at in zip((idle, beside), before, strict=True))
        yield Row(
            "CPU of a worker at rest beside them",
            f"{busy * 100:.0f} ms/s",
            f"without: {rest * 100:.0f} ms/s",
            busy / max(rest, 0.001),
            "",
            True,
        )
        client.flushall()
        store.invalidate()
        began = time.perf_counter()
        with _workers(1, place, "sleeping"):
            while sum(client.zcard(each) for each in due) < count:
                time.sleep(0.1)
        taken = time.perf_counter() - began
        yield Row(
            f"refill of {count:,} wakes",
            f"{taken:.1f} s",
            "",
            taken / 60,
            "<= 60 s for 1,000,000",
            taken * 1_000_000 / count <= 60,
        )


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


MEASURED = {"latency": latency, "served": served, "sleeping": sleeping}


def main(
    as_json: Annotated[Path | None, typer.Option("--json", help="write the rows as JSON")] = None,
    only: Annotated[str, typer.Option(help=f"of {', '.join(MEASURED)}, with commas between")] = "",
    sessions: Annotated[int, typer.Option(help="that are served")] = 4000,
    wakes: Annotated[int, typer.Option(help="that sleep")] = 20_000,
) -> None:
    """Measure what workers cost."""
    console = Console()
    chosen = only.split(",") if only else list(MEASURED)
    if unknown := set(chosen) - set(MEASURED):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are {', '.join(MEASURED)}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, redis_server() as server:
        place = Place(server.url, f"sqlite:///{folder}/work.db", sessions, wakes)
        for name in chosen:
            began = time.monotonic()
            rows += MEASURED[name](place)
            console.print(f"{name}: {time.monotonic() - began:.0f} s")
    report(console, rows, None, as_json)


if __name__ == "__main__":
    typer.run(main)
