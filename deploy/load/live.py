"""The cost of streaming turns: latency of chunks and stops, CPU and memory of the server; one run, ratios.

    python deploy/load/live.py --base ../the-commit-before [--json live.json] [--only latency,server]
    npm install --prefix FOLDER resumable-stream redis; python deploy/load/live.py --only server --node-modules FOLDER

Starts its own Redis or Valkey on a free port. Turns and their followers are stores in two processes; beside them, plain
redis-py publishes to subscribers, or runs a script with one XADD and one PUBLISH for each token. With --node-modules,
the npm package resumable-stream streams the same tokens.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import redis
import redis.asyncio
import typer
from rich.console import Console

if not __package__:
    sys.path[0] = str(Path(__file__).parents[2])  # it is a program, and the rest of `deploy` is beside it

from deploy.load.instructions import compared
from deploy.load.rows import Row, at_most, report
from distributed_state import AsyncStateStore, Stopped
from distributed_state.programs.servers import redis_server
from distributed_state.results import Chunk
from distributed_state.settings import Settings

TOKENS = 50  # a second and turn
USUAL = Settings.model_fields["stream_interval"].default
CALM = 5  # chunks a second and turn while latency is measured: plain redis-py must keep up with all of them, too
PER_TOKEN = """
redis.call('XADD', KEYS[1], 'MAXLEN', '~', 1000, '*', 'd', ARGV[1])
redis.call('PUBLISH', KEYS[2], ARGV[1])
"""


@dataclass(frozen=True)
class Place:
    """Where the stores of a run are, and how much they do."""

    url: str
    archive: str
    turns: int
    seconds: float

    def open(self, **given: Any) -> Any:
        settings = {"namespace": "live", "archive": self.archive, "archiver": False, "beat": 0}
        return AsyncStateStore.open(self.url, **settings | given)


@dataclass(frozen=True)
class Beside:
    """Optional baselines: a work tree of an earlier commit, and a folder in which npm installed packages."""

    base: Path | None
    node_modules: Path | None


@dataclass(frozen=True)
class Streamed:
    """The number of chunks that were streamed, and the seconds of the server's CPU that they took."""

    chunks: int
    seconds: float
    cpu: float


def _client(place: Place) -> redis.asyncio.Redis:
    return redis.asyncio.Redis.from_url(place.url, socket_timeout=90)  # longer than the stores take to open


Send = Callable[[str], Awaitable[Any]]


async def _at_a_rate(place: Place, client: Any, rate: float, sends: list[Send]) -> Streamed:
    """Send so many chunks a second by each, evenly spread, once the followers are there; a chunk is its time."""
    count = int(rate * place.seconds)
    await client.blpop(["live:ready"], timeout=60)
    used, began = await _cpu(client), time.monotonic()

    async def one(number: int, send: Send) -> None:
        for at in range(count):
            due = began + (at + number / len(sends)) / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await send(f"{time.monotonic():.6f}")

    await asyncio.gather(*(one(*each) for each in enumerate(sends)))
    return Streamed(count * len(sends), time.monotonic() - began, await _cpu(client) - used)


async def _cpu(client: Any) -> float:
    found = await client.info("cpu")
    return float(found["used_cpu_user"] + found["used_cpu_sys"])


async def _turns(place: Place, request: str, interval: float, rate: float) -> Streamed:
    async with place.open(stream_interval=interval) as store, _client(place) as client:
        turns = [store.session(f"s{number}").turn(request_id=request) for number in range(place.turns)]
        opened = asyncio.Event()
        begun: asyncio.Queue[Any] = asyncio.Queue()

        async def hold(turn: Any) -> None:
            async with turn:
                begun.put_nowait(turn.stream)
                await opened.wait()

        holding = [asyncio.create_task(hold(turn)) for turn in turns]
        streamed = await _at_a_rate(place, client, rate, [await begun.get() for _ in turns])
        opened.set()
        await asyncio.gather(*holding)
        return streamed


async def _following(place: Place, request: str) -> list[float]:
    async with place.open() as store, _client(place) as client:

        async def one(number: int) -> list[float]:
            parts = store.session(f"s{number}").output(request, wait=60)
            return [time.monotonic() - float(part.data) async for part in parts if isinstance(part, Chunk)]

        following = [asyncio.create_task(one(number)) for number in range(place.turns)]
        await asyncio.sleep(1)
        await client.rpush("live:ready", "1")
        return [delay for each in await asyncio.gather(*following) for delay in each]


async def _plain(place: Place, script: str | None, rate: float) -> Streamed:
    async with _client(place) as client:
        run = None if script is None else client.register_script(script)

        def sender(number: int) -> Send:
            channel = f"live:{number}"
            if run is None:
                return lambda text: client.publish(channel, text)
            return lambda text: run(keys=[f"stream:{number}", channel], args=[text])

        return await _at_a_rate(place, client, rate, [sender(number) for number in range(place.turns)])


async def _subscribed(place: Place, rate: float) -> list[float]:
    async with _client(place) as client, client.pubsub() as listener:
        await listener.subscribe(*(f"live:{number}" for number in range(place.turns)))
        await client.rpush("live:ready", "1")
        delays: list[float] = []
        async for message in listener.listen():
            if message["type"] == "message":
                delays.append(time.monotonic() - float(message["data"]))
                if len(delays) == int(rate * place.seconds) * place.turns:
                    break
        return delays


def _run(work: Callable[..., Any], *given: Any) -> Any:
    return asyncio.run(work(*given))


def _two(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, Any]:
    """Run two coroutine functions with their arguments, each in a process of its own."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        one, other = pool.submit(_run, *first), pool.submit(_run, *second)
        return one.result(), other.result()


def _share(delays: list[float], share: float) -> float:
    """The delay within which this share of the chunks arrived, in ms."""
    return sorted(delays)[math.ceil(len(delays) * share) - 1] * 1000


def latency(place: Place, beside: Beside) -> Iterator[Row]:
    """How long a chunk takes to a follower on another replica."""
    _, usual = _two((_turns, place, "usual", USUAL, CALM), (_following, place, "usual"))
    _, bare = _two((_plain, place, None, CALM), (_subscribed, place, CALM))
    _, direct = _two((_turns, place, "direct", 0.0, CALM), (_following, place, "direct"))
    name = f"a chunk to its follower, {place.turns} turns at once"
    yield at_most(f"{name}, p50", _share(usual, 0.5), 35, 1, "ms", "the goal")
    yield at_most(f"{name}, p99", _share(usual, 0.99), _share(bare, 0.99), math.inf, "ms", "a bare PUBLISH, p99")
    for share in (0.5, 0.99):
        what = f"{name}, stream_interval=0, p{share * 100:.0f}"
        yield at_most(what, _share(direct, share), _share(bare, share), 3, "ms", "a bare PUBLISH")


def _resumable(place: Place, modules: Path) -> Streamed:
    """Stream the same tokens through the npm package, with one follower of each stream."""
    program = Path(__file__).with_name("resumable.mjs")
    command = ["node", program, modules, place.url, place.turns, TOKENS, place.seconds]
    found = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
    return Streamed(**json.loads(found.stdout))


def server(place: Place, beside: Beside) -> Iterator[Row]:
    """The CPU time of the server for tokens, with one follower of each turn."""
    ours, _ = _two((_turns, place, "tokens", USUAL, TOKENS), (_following, place, "tokens"))
    plain, _ = _two((_plain, place, PER_TOKEN, TOKENS), (_subscribed, place, TOKENS))
    rate = ours.chunks / ours.seconds
    name = f"server CPU, {place.turns} turns, {rate:,.0f} tokens a second"
    yield at_most(name, 100 * ours.cpu / ours.seconds, 10, 1, "% of a core", "the goal")
    yield at_most(
        "server CPU of a token", 1e6 * ours.cpu / ours.chunks, 1e6 * plain.cpu / plain.chunks, 0.2, "us",
        "one XADD and one PUBLISH each",
    )  # fmt: skip
    if beside.node_modules is not None:
        theirs = _resumable(place, beside.node_modules)
        yield at_most(
            "server CPU of a token, one follower each", 1e6 * ours.cpu / ours.chunks, 1e6 * theirs.cpu / theirs.chunks,
            math.inf, "us", f"resumable-stream, {theirs.chunks / theirs.seconds:,.0f} tokens a second",
        )  # fmt: skip


async def _stoppable(place: Place, rounds: int) -> list[float]:
    delays = []
    async with place.open() as store, _client(place) as client:
        for _ in range(rounds):
            async with store.session("stopped").turn() as turn:
                try:
                    async with turn.stoppable():
                        await client.rpush("live:ready", "1")
                        await asyncio.sleep(60)
                except Stopped as error:
                    delays.append(time.monotonic() - float(error.reason or "nan"))
    return delays


async def _stopping(place: Place, rounds: int) -> None:
    async with place.open() as store, _client(place) as client:
        for _ in range(rounds):
            await client.blpop(["live:ready"], timeout=60)
            await store.session("stopped").stop(reason=f"{time.monotonic():.6f}")


def stops(place: Place, beside: Beside) -> Iterator[Row]:
    """How long a body runs on after a stop on another replica."""
    rounds = 20 * max(1, round(place.seconds))
    delays, _ = _two((_stoppable, place, rounds), (_stopping, place, rounds))
    yield at_most("a stop on another replica ends the body, p99", _share(delays, 0.99), 50, 1, "ms", "the goal")


async def _memory(place: Place, chunk: str, bytes: int) -> int:
    async with place.open(output_bytes=bytes) as store, _client(place) as client:
        session = store.session("large")
        async with session.turn() as turn:
            for _ in range(2 * bytes // (len(chunk) + 64)):
                await turn.stream(chunk)
                await turn.flush()
        [key] = await client.keys("*:o:session:large")
        return int(await client.memory_usage(key, samples=0))


def memory(place: Place, beside: Beside) -> Iterator[Row]:
    """What Redis keeps of a turn that streams without end."""
    for size in (16, 4096):
        found = asyncio.run(_memory(place, "x" * size, 65_536))
        name = f"memory of a streaming turn, chunks of {size} bytes, each sent at once"
        yield at_most(name, found / 1024, 64, 1.1, "KiB", "output_bytes")


class _Worker:
    """A worker of the HTTP service, as a process."""

    def __init__(self, place: Place) -> None:
        given = {"URL": place.url, "ARCHIVE": place.archive, "NAMESPACE": "live", "ARCHIVER": "false"}
        told = {f"DISTRIBUTED_STATE_{name}": value for name, value in given.items()}
        command = [sys.executable, "-m", "distributed_state", "serve", "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | told)
        assert self.process.stdout is not None
        host, _, port = json.loads(self.process.stdout.readline())["message"].rpartition("/")[2].partition(":")
        self.place = host, int(port)

    @property
    def most_mib(self) -> float:
        """The most memory that it has used, in MiB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)


async def _over_http(place: Place, request: str, address: tuple[str, int]) -> list[float]:
    """The delays of all chunks to ten followers of each turn."""

    async def one(number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*address)
        path = f"/v1/conversations/s{number}/output?request={request}"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {address[0]}\r\n\r\n".encode())
        status = await reader.readline()
        assert b" 200 " in status, status
        return reader, writer

    async def delays(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[float]:
        found: list[float] = []
        while not (line := await reader.readline()).startswith(b"event: ended"):
            if line.startswith(b'data: {"value":"'):
                found.append(time.monotonic() - float(json.loads(line[6:])["value"]))
        writer.close()
        return found

    opened = [await one(number) for number in range(place.turns) for _ in range(10)]
    async with _client(place) as client:
        await client.rpush("live:ready", "1")
    return [delay for each in await asyncio.gather(*(delays(*each) for each in opened)) for delay in each]


def http(place: Place, beside: Beside) -> Iterator[Row]:
    """The cost of followers over HTTP for one worker."""
    found: dict[int, tuple[float, float]] = {}
    for turns in (1, 100):
        some, request = replace(place, turns=turns), f"http{turns}"
        with _Worker(place) as worker:
            _, delays = _two((_turns, some, request, USUAL, 1), (_over_http, some, request, worker.place))
            found[turns] = worker.most_mib, _share(delays, 0.99)
        assert len(delays) == 10 * turns * int(place.seconds), len(delays)
    (_, few), (memory, many) = found.values()
    what = "1,000 followers over HTTP, of 100 turns"
    yield at_most(f"memory of a worker with {what}", memory, 300, 1, "MiB", "the goal")
    yield at_most(f"a chunk to {what}, a chunk a second each, p99", many, few, 3, "ms", "to 10 followers")


def unstreamed(place: Place, beside: Beside) -> Iterator[Row]:
    """The cost of a turn that streams nothing, beside the same turn of the base commit."""
    if beside.base is not None:
        yield from compared(place.url, beside.base, "turn", "a turn that streams nothing")


MEASURED = {each.__name__: each for each in (unstreamed, latency, server, stops, memory, http)}


def main(
    as_json: Annotated[Path | None, typer.Option("--json", help="write the rows as JSON")] = None,
    base: Annotated[Path | None, typer.Option(help="a work tree of the commit to compare with")] = None,
    node_modules: Annotated[Path | None, typer.Option(help="where npm installed resumable-stream and redis")] = None,
    only: Annotated[str, typer.Option(help=f"of {', '.join(MEASURED)}, with commas between")] = "",
    turns: Annotated[int, typer.Option(help="that stream at once")] = 100,
    seconds: Annotated[float, typer.Option(help="for which they stream")] = 10.0,
) -> None:
    """Measure what streaming costs."""
    console = Console()
    chosen = only.split(",") if only else list(MEASURED)
    if unknown := set(chosen) - set(MEASURED):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are {', '.join(MEASURED)}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, redis_server() as server:
        place = Place(server.url, f"sqlite:///{folder}/live.db", turns, seconds)
        for name in chosen:
            began = time.monotonic()
            rows += MEASURED[name](place, Beside(base, node_modules))
            console.print(f"{name}: {time.monotonic() - began:.0f} s")
    if "unstreamed" in chosen and base is None:
        console.print("unstreamed: not measured without --base")
    if "server" in chosen and node_modules is None:
        console.print("server: not compared with resumable-stream without --node-modules")
    report(console, rows, None, as_json)


if __name__ == "__main__":
    typer.run(main)
