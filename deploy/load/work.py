"""What workers cost: delays, sessions a second, deaths, restarts, sleeping wakes; one run, ratios.

    python deploy/load/work.py [--json work.json] [--only latency,served,killed,rolling,sleeping]
    python3 -m venv FOLDER && FOLDER/bin/pip install rq arq; python deploy/load/work.py --only queues --peers FOLDER
    python deploy/load/work.py --only unhandled --base ../the-commit-before [--callgrind]

Starts its own Redis or Valkey on a free port, with an archive in SQLite. Workers are processes of `distributed-state
work`. The load average is shown with each section: other work slows both sides of a ratio, but not always alike.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

if not __package__:
    sys.path[0] = str(Path(__file__).parents[2])  # it is a program, and the rest of `deploy` is beside it

from deploy.load.instructions import unhandled
from deploy.load.rows import Row, at_least, at_most, report
from deploy.load.workers import queues as beside
from deploy.load.workers.deaths import killed, rolling
from deploy.load.workers.handlers import BEGAN, COUNT, NOTE
from deploy.load.workers.processes import PROCESSES, SHARED_SECONDS, Place, began, said, served_pace, share
from deploy.load.workers.timers import sleeping
from distributed_state import AsyncStateStore
from distributed_state.programs.servers import redis_server, wait_until

INTERRUPTED = 130
_POSTS = 300


def latency(place: Place) -> Iterator[Row]:
    """From a post to the beginning of the handler, with four workers that have nothing else to do."""
    client = place.client()
    client.delete(BEGAN)
    posted = []
    with place.open("latency") as store, place.workers("latency") as workers:
        workers.start(4)
        store.session("first").post(said("first"), handler=NOTE)
        wait_until(lambda: client.llen(BEGAN) == 1, "no worker serves")
        time.sleep(SHARED_SECONDS)
        client.delete(BEGAN)
        for number in range(_POSTS):
            posted.append(time.time())
            store.session(f"s{number}").post(said(str(number)), handler=NOTE)
            while client.llen(BEGAN) <= number:
                time.sleep(0.0005)
            time.sleep(0.02)
        delays = [(each.at - sent) * 1000 for each, sent in zip(began(client), posted, strict=True)]
    for part, goal in (0.5, 5.0), (0.99, 25.0):
        yield at_most(f"post -> handler begins, p{part * 100:.0f}", share(delays, part), goal, 1, "ms", "the goal")


def _turns(settings: dict[str, Any], first: int, count: int) -> tuple[float, float]:
    """Take a turn of each session; return when the first began and the last one ended."""

    async def run() -> tuple[float, float]:
        async with AsyncStateStore.open(**settings) as store:
            room = asyncio.Semaphore(32)

            async def one(number: int) -> None:
                async with room, store.session(f"s{number}").turn() as turn:
                    turn["n"] = 1

            begin = time.time()
            await asyncio.gather(*(one(number) for number in range(first, first + count)))
            return begin, time.time()

    return asyncio.run(run())


def _bare(place: Place, namespace: str) -> float:
    """Turns a second of two processes, once both have begun, on sessions that are there."""
    half = place.sessions // PROCESSES
    with place.open(namespace) as store:
        for number in range(PROCESSES * half):
            store.session(f"s{number}").set("n", 0)
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        settings = place.settings(namespace)
        running = [pool.submit(_turns, settings, at * half, half) for at in range(PROCESSES)]
        times = [each.result() for each in running]
    return sum(half / (end - begin) for begin, end in times)


def served(place: Place) -> Iterator[Row]:
    """Sessions that two workers serve in a second, beside bare turns of two processes on as many sessions."""
    paces: dict[str, list[float]] = {"bare": [], "served": []}
    for number in range(place.rounds):
        for name, found in paces.items():
            place.show(f"served: {name}, round {number + 1} of {place.rounds}")
            namespace = f"{name}-{number}"
            found.append(_bare(place, namespace) if name == "bare" else served_pace(place, namespace, COUNT, new=False))
    bare, ours = (statistics.median(each) for each in paces.values())
    yield at_least("sessions served a second, 2 processes", ours, bare, 0.7, "/s", "bare turns")


def queues(place: Place) -> Iterator[Row]:
    """Inputs that two workers serve in a second, beside the jobs of RQ and arq."""
    yield from beside.queues(place)


MEASURED = {each.__name__: each for each in (latency, served, queues, killed, rolling, sleeping, unhandled)}


def main(
    as_json: Annotated[Path | None, typer.Option("--json", help="write the rows as JSON")] = None,
    only: Annotated[str, typer.Option(help=f"of {', '.join(MEASURED)}, with commas between")] = "",
    sessions: Annotated[int, typer.Option(min=100, help="that are served, and jobs beside them")] = 4000,
    rounds: Annotated[int, typer.Option(min=1, help="of what is measured in turn; medians are shown")] = 3,
    wakes: Annotated[int, typer.Option(min=3000, help="that sleep")] = 1_000_000,
    held: Annotated[int, typer.Option(min=1, help="sessions that the killed worker has in hand")] = 100,
    ttl: Annotated[float, typer.Option(min=1.0, help="of the leases of killed and restarted workers")] = 5.0,
    rate: Annotated[float, typer.Option(min=1.0, help="inputs a second while workers are restarted")] = 50.0,
    peers: Annotated[Path | None, typer.Option(help="a virtual environment that has RQ and arq")] = None,
    base: Annotated[Path | None, typer.Option(help="a work tree of the commit to compare `unhandled` with")] = None,
    callgrind: Annotated[
        bool, typer.Option("--callgrind", help="`unhandled` also counts the processor's instructions: ten minutes")
    ] = False,
) -> None:
    """Measure what workers cost. Exits with 1 if a goal is missed, with 130 after Ctrl-C."""
    console = Console()
    logging.getLogger("distributed_state").setLevel(logging.ERROR)  # nothing is archived, and Redis loses data
    chosen = only.split(",") if only else list(MEASURED)
    if unknown := set(chosen) - set(MEASURED):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are {', '.join(MEASURED)}")
    if callgrind and shutil.which("valgrind") is None:
        raise typer.BadParameter("--callgrind needs valgrind: apt-get install valgrind")
    left_out = {"unhandled": "needs --base, a work tree of the commit to compare with"} if base is None else {}
    try:
        beside.python(peers)
    except ValueError as error:
        left_out["queues"] = str(error)
    if only and (refused := [f"{name}: {left_out[name]}" for name in chosen if name in left_out]):
        raise typer.BadParameter("; ".join(refused))
    rows: list[Row] = []
    interrupted = False
    with console.status("") as status, tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            if name in left_out:
                console.print(f"{name}: not measured; {left_out[name]}")
                continue
            began_at, load = time.monotonic(), os.getloadavg()[0]
            try:
                with redis_server() as server:
                    counts = (sessions, wakes, held, rate, ttl, rounds)
                    place = Place(server.url, Path(folder) / name, *counts, peers, base, callgrind, status.update)
                    place.folder.mkdir()
                    rows += MEASURED[name](place)
            except KeyboardInterrupt:
                interrupted = True
                console.print("interrupted: this is what was measured until then")
                break
            busy = f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores"
            console.print(f"{name}: {time.monotonic() - began_at:.0f} s, {busy}")
            rows.append(Row(f"{name}: load average at its beginning", f"{load:.1f}", f"{os.cpu_count()} cores",
                            load / (os.cpu_count() or 1), "", True))  # fmt: skip
    report(console, rows, None, as_json, INTERRUPTED if interrupted else None)


if __name__ == "__main__":
    typer.run(main)
