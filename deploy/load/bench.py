"""How fast the store is beside the obvious alternative: one run, interleaved, medians, ratios.

    python deploy/load/bench.py [--png bench.png] [--json bench.json] [--only set,lock]

Starts its own Redis or Valkey and PostgreSQL on free ports. Absolute times belong to the machine; ratios travel.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import redis
import redis.asyncio
import typer
from rich.console import Console
from rich.table import Table

from distributed_state import AgentState, AsyncStateStore, Message, StateStore, ToolCall
from distributed_state.programs.servers import postgres_server, redis_server
from distributed_state.store.metrics import collector
from distributed_state.tiers import commit as write_path

ROUNDS = 9
# What commit.lua does for one `set`, without its logic. `same_commands` checks that it is the same.
BARE = """
redis.call('TIME')
redis.call('HGET', KEYS[5], 'journal')
redis.call('HMGET', KEYS[1], '#v', '#ops', '#deleted', '#mn', '#size', '#lifetime', ARGV[1])
redis.call('GET', KEYS[2])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2], '#v', ARGV[3], '#ops', ARGV[4])
redis.call('PERSIST', KEYS[1])
redis.call('HSET', KEYS[5], 'journal', ARGV[4])
redis.call('XADD', KEYS[4], ARGV[3] .. '-0', 'h', ARGV[4], 'd', ARGV[2])
redis.call('SPUBLISH', KEYS[6], ARGV[4])
return 'ok ' .. ARGV[3] .. ' 1-abcdef12 0  ' .. ARGV[3] .. ' 1795237177 378000'
"""
OPS = "aabbccddeeff 1 1795237177378 1:1:abcdef12:0,"


@dataclass(frozen=True)
class Row:
    """One line of the table. `ratio` is measured / baseline; `goal` is what it must be."""

    name: str
    measured: str
    baseline: str
    ratio: float
    goal: str
    reached: bool


def at_most(name: str, measured: float, baseline: float, limit: float, unit: str, versus: str) -> Row:
    ratio = measured / baseline
    return Row(
        name, f"{measured:,.4g} {unit}", f"{versus}: {baseline:,.4g} {unit}", ratio, f"<= {limit:g}x", ratio <= limit
    )


def at_least(name: str, measured: float, baseline: float, limit: float, unit: str, versus: str) -> Row:
    ratio = measured / baseline
    return Row(
        name, f"{measured:,.4g} {unit}", f"{versus}: {baseline:,.4g} {unit}", ratio, f">= {limit:g}x", ratio >= limit
    )


def per_call(call: Callable[[], Any], times: int) -> float:
    """Microseconds a call."""
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times * 1e6


def interleaved(calls: dict[str, tuple[Callable[[], Any], int]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median microseconds a call, the candidates in turn."""
    for call, times in calls.values():
        per_call(call, max(times // 10, 1))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (call, times) in calls.items():
            taken[name].append(per_call(call, times))
    return {name: statistics.median(values) for name, values in taken.items()}


class Bare:
    """redis-py calling BARE."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.count = 0
        self.name = f"bare{time.time_ns()}"
        self.sha = client.script_load(BARE) if isinstance(client, redis.Redis) else ""

    def call(self, n: int = 0) -> Any:
        self.count += 1
        key = f"{self.name}.{n}"
        keys = (f"{{{key}}}:r", f"{{{key}}}:l", f"{{{key}}}:h", f"{{{key}}}:j", f"{{{key}}}:m", f"{{{key}}}:c")
        return self.client.evalsha(self.sha, 6, *keys, "a", 7, self.count, OPS)


def same_commands(url: str, store: StateStore) -> str:
    """Compare what the server executed for a `set` of ours and a call of BARE."""
    client = redis.Redis.from_url(url)
    session = store.session("same")
    bare = Bare(client)

    def executed(call: Callable[[], Any]) -> dict[str, int]:
        call()
        client.config_resetstat()
        for _ in range(100):
            call()
        stats = client.info("commandstats")
        return {
            name: row["calls"]
            for name, row in stats.items()
            if name not in ("cmdstat_config|resetstat", "cmdstat_info")
        }

    ours = executed(lambda: session.set("a", 7))
    theirs = executed(bare.call)
    assert ours == theirs, f"the comparison is not fair: {ours} against {theirs}"
    return ", ".join(f"{name.removeprefix('cmdstat_')} {calls // 100}" for name, calls in ours.items())


def hot(url: str, store: StateStore) -> list[Row]:
    session = store.session("hot")
    client = redis.Redis.from_url(url)
    plain = {"name": "Alice"}
    session.set("name", "Alice")
    client.hset("bench:hot", "name", "Alice")
    deadline = time.monotonic() + 10
    while store.stats()["hot_hits"] < 3 and time.monotonic() < deadline:
        session.get("name")
        time.sleep(0.05)
    found = interleaved(
        {
            "ours": (lambda: session.get("name"), 20_000),
            "dict": (lambda: plain.get("name"), 20_000),
            "hget": (lambda: client.hget("bench:hot", "name"), 500),
        }
    )
    return [
        at_most("hot get of a small field", found["ours"], found["dict"], 15, "us", "dict.get"),
        at_least("redis-py hget, against a hot get", found["hget"], found["ours"], 40, "us", "hot get"),
    ]


def weight() -> list[Row]:
    """What a new process pays before it does anything, beside one that imports redis-py; interpreters and all."""
    programs = {
        "redis": ["-c", "import redis"],
        "drivers": ["-c", "import redis.asyncio, sqlalchemy, pydantic_settings"],
        "package": ["-c", "import distributed_state"],
        "store": ["-c", "from distributed_state import StateStore"],
        "help": ["-m", "distributed_state", "--help"],
    }

    def run(words: list[str]) -> None:
        subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)

    found = interleaved({name: (partial(run, words), 1) for name, words in programs.items()}, rounds=15)
    found = {name: microseconds / 1000 for name, microseconds in found.items()}
    drivers = "import redis.asyncio, sqlalchemy, pydantic_settings"
    return [
        at_most("import distributed_state", found["package"], found["redis"], 1.6, "ms", "import redis"),
        at_most("distributed-state --help", found["help"], found["redis"], 2.5, "ms", "import redis"),
        at_most("from distributed_state import StateStore", found["store"], found["drivers"], 2, "ms", drivers),
    ]


def resident() -> int:
    """How many bytes of memory this process takes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _fill_hot(url: str, kind: str, count: int, size: int, limit: int, told: Any) -> None:
    """Write, read and overwrite records until hot is full; tell how many bytes the process grew by."""
    settings: dict[str, Any] = {"namespace": f"bench-hot-{kind}-{size}", "archiver": False, "hot_entries": 10**6}
    with StateStore.open(url, archive="memory", hot_bytes=limit, **settings) as store:

        def write(sessions: list[Any], letter: str) -> None:
            with store.batch() as batch:
                for session in sessions:
                    if kind == "fields":
                        batch.on(session).set_many({f"field-{n}": letter * size for n in range(count)})
                    for _ in range(count if kind == "messages" else 0):
                        batch.on(session).append(Message(role="user", content=letter * size))

        def grow(first: int) -> None:
            sessions = [store.session(f"s{first + n}") for n in range(50)]
            write(sessions, "x")
            hits = 0
            deadline = time.monotonic() + 10
            while hits < 40 and time.monotonic() < deadline:
                before = store.stats()["hot_hits"]
                store.get_many(sessions)
                hits = store.stats()["hot_hits"] - before
            write(sessions, "y")
            for session in sessions if kind == "fields" else ():
                for n in range(count):
                    session.get(f"field-{n}")

        grow(0)
        store.invalidate()
        before = resident()
        made = 50
        while store.stats()["hot_bytes"] < 0.95 * limit:
            grow(made)
            made += 50
        told.send(resident() - before)


def hot_memory(url: str, limit: int = 32 * 2**20) -> list[Row]:
    """What a full hot tier adds to a process, a new one for each kind of value, beside what it is allowed to take."""
    rows = []
    context = multiprocessing.get_context("spawn")
    for kind, count, size in (("fields", 10, 20), ("fields", 2, 20_000), ("messages", 8, 60), ("messages", 16, 4000)):
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_fill_hot, args=(url, kind, count, size, limit, theirs))
        worker.start()
        theirs.close()
        grown = ours.recv()
        worker.join()
        name = f"memory of a full hot tier, {kind} of {size:,} letters"
        rows.append(at_most(name, grown / 2**20, limit / 2**20, 1.5, "MB", "hot_bytes"))
    return rows


def blocking_set(url: str, store: StateStore) -> list[Row]:
    """One field of a session of 20 fields, 2 KB as JSON, beside the whole session in one key under redis-py's lock."""
    client = redis.Redis.from_url(url)
    session = store.session("set")
    bare = Bare(client)
    state = {f"field-{n}": "x" * 85 for n in range(20)}
    session.set_many(state)
    client.set("bench:state", json.dumps(state))

    def locked() -> None:
        with client.lock("bench:lock"):
            state = json.loads(client.get("bench:state") or "{}")
            state["a"] = 7
            client.set("bench:state", json.dumps(state), ex=3600)

    found = interleaved(
        {"ours": (lambda: session.set("a", 7), 400), "bare": (bare.call, 400), "locked": (locked, 100)}, rounds=15
    )
    versus = "lock get loads dumps set unlock, 2 KB"
    return [
        at_most("blocking set", found["ours"], found["bare"], 1.35, "us", "redis-py evalsha, same commands"),
        at_least("blocking set, throughput", 1e6 / found["ours"], 1e6 / found["locked"], 3.5, "/s", versus),
    ]


def telemetry(url: str) -> list[Row]:
    """What the hooks of metrics and spans cost a `set`: beside the same code without them, in turn, ratios paired."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    trace.set_tracer_provider(TracerProvider())  # spans are made and dropped: exporting is the exporter's cost
    told = write_path.commit
    bare = told.__wrapped__  # type: ignore[attr-defined]  # what functools.wraps leaves
    taken: dict[str, list[float]] = {"bare": [], "off": [], "metrics": [], "spans": []}
    with ExitStack() as stack:
        calls = {}
        for name in taken:
            settings: dict[str, Any] = {"namespace": f"bench-{name}", "archiver": False, "traces": name == "spans"}
            store = stack.enter_context(StateStore.open(url, archive="memory", **settings))
            if name == "metrics":
                collector(store)
            calls[name] = partial(store.session("s").set, "a", 7)
        stack.callback(setattr, write_path, "commit", told)
        names = list(taken)
        for _ in range(30 * ROUNDS):
            for name in names:
                write_path.commit = bare if name == "bare" else told
                taken[name].append(per_call(calls[name], 50))
            names = names[1:] + names[:1]  # nobody is always the first
    beside = statistics.median(taken["bare"])
    rows = []
    for name, text, limit in (
        ("off", "set, metrics and spans off", 1.02),
        ("metrics", "set, metrics on", 1.15),
        ("spans", "set, spans on", 1.75),
    ):
        ratio = statistics.median(ours / plain for ours, plain in zip(taken[name], taken["bare"], strict=True))
        found = f"{statistics.median(taken[name]):,.4g} us"
        rows.append(Row(text, found, f"without hooks: {beside:,.4g} us", ratio, f"<= {limit:g}x", ratio <= limit))
    return rows


async def asyncio_set(url: str) -> list[Row]:
    async with AsyncStateStore.open(url, archive="memory", namespace="bench-async", archiver=False) as store:
        client = redis.asyncio.Redis.from_url(url)
        bare = Bare(client)
        bare.sha = await client.script_load(BARE)
        many = [store.session(f"task-{n}") for n in range(50)]
        for session in many:
            await session.set("a", 0)

        async def rate(call: Callable[[int], Any], each: int = 20) -> float:
            async def task(n: int) -> None:
                for _ in range(each):
                    await call(n)

            began = time.perf_counter()
            await asyncio.gather(*(task(n) for n in range(50)))
            return 50 * each / (time.perf_counter() - began)

        calls = {
            "records": lambda n: many[n].set("a", 7),
            "record": lambda n: many[0].set("a", 7),
            "bare": lambda n: bare.call(n),
        }
        rates: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            await rate(call)
        for _ in range(ROUNDS):
            for name, call in calls.items():
                rates[name].append(await rate(call))
        await client.aclose()
    found = {name: statistics.median(values) for name, values in rates.items()}
    versus = "redis-py asyncio evalsha, 50 tasks"
    return [
        at_least("asyncio set, 50 tasks, 50 records", found["records"], found["bare"], 0.85, "/s", versus),
        at_least("asyncio set, 50 tasks, one record", found["record"], found["bare"], 0.85, "/s", versus),
    ]


def long_conversation(url: str, store: StateStore) -> list[Row]:
    message = Message(role="user", content="What is the status of my booking? " * 3)
    short = store.session("short")
    long = store.session("long")
    for session, count in ((short, 40), (long, 10_000)):
        for at in range(0, count, 500):
            session.append(*[message] * min(500, count - at))
    store.archive()
    # Measured as a worker meets it that has nothing hot: each read goes to Redis.
    found = interleaved(
        {
            "append 40": (lambda: short.append(message), 100),
            "append 10000": (lambda: long.append(message), 100),
        },
        rounds=41,
    )
    store.archive()
    found |= interleaved(
        {
            "read 40": (lambda: short.messages(last=20, fresh=True), 50),
            "read 10000": (lambda: long.messages(last=20, fresh=True), 50),
        },
        rounds=31,
    )
    return [
        at_most("append at 10,000 messages", found["append 10000"], found["append 40"], 1.1, "us", "at 40"),
        at_most("messages(last=20) at 10,000", found["read 10000"], found["read 40"], 1.1, "us", "at 40"),
    ]


def turns(url: str, archive: str) -> list[Row]:
    """Round trips as the server counts them: how often it read from a socket. Nothing is hot, so that each counts."""
    settings: dict[str, Any] = {"namespace": "bench-turns", "archiver": False, "max_staleness": 0}
    with StateStore.open(url, archive=archive, **settings) as store, redis.Redis.from_url(url) as client:
        session = store.session("turn")
        session.append({"role": "user", "content": "hello"})

        def turn(number: int) -> None:
            with session.turn(request_id=f"r{number}") as turn:
                turn.messages(last=20)
                for role in ("user", "assistant", "tool", "assistant"):
                    turn.append({"role": role, "content": "text"})
                turn["a"] = number
                turn["b"] = 2
                turn["c"] = 3

        turn(0)
        before = client.info("stats")["total_reads_processed"]
        for number in range(1, 101):
            turn(number)
        trips = (client.info("stats")["total_reads_processed"] - before - 1) / 100
    return [Row("a turn: lease, read, 4 messages, 3 fields", f"{trips:g} round trips", "2 round trips", trips / 2,
                "<= 2 round trips", trips <= 2)]  # fmt: skip


def saving(url: str, archive: str) -> list[Row]:
    """One more message saved, at 10 and at 1,000 messages with half as many tool calls; nothing is hot."""
    settings: dict[str, Any] = {"namespace": "bench-saving", "archiver": False, "max_staleness": 0}
    with StateStore.open(url, archive=archive, **settings) as store:
        states: dict[int, AgentState] = {}
        for count in (10, 1000):
            state = AgentState.from_user_input("question", f"agent-{count}").to_executing()
            for number in range(count // 2 - 1):
                call = ToolCall(tool_name="look", call_id=f"c{number}", arguments={"at": number}, result="x" * 100)
                state = state.record_observation("I look", call)
            states[count] = store.session(f"agent-{count}").save_state(state)

        def save(count: int) -> None:
            state = states[count].with_messages({"role": "assistant", "content": "one more"})
            states[count] = store.session(f"agent-{count}").save_state(state)

        found = interleaved({"10": (lambda: save(10), 20), "1000": (lambda: save(1000), 20)}, rounds=31)
    return [at_most("save_state at 1,000 messages", found["1000"], found["10"], 1.2, "us", "at 10")]


def window(url: str, archive: str) -> list[Row]:
    """What a bounded context reads of a long conversation, in bytes of stored messages."""
    settings: dict[str, Any] = {"namespace": "bench-window", "archiver": False, "max_staleness": 0}
    with StateStore.open(url, archive=archive, **settings) as store:
        session = store.session("long")
        messages = [Message(role=("user", "assistant")[n % 2], content="What is the status? " * 5) for n in range(500)]
        for _ in range(20):
            session.append(*messages)
        store.archive()
        shown = session.window(max_tokens=4000)
        whole = sum(len(json.dumps(message.to_dict(), separators=(",", ":"))) for message in messages) * 20
    return [at_most("window(max_tokens=4000) of 10,000", shown.read_bytes, whole, 0.05, "bytes", "the conversation")]


def hand_over(lock: Callable[[], Any], waiters: int, rounds: int) -> tuple[float, float, int]:
    """Median and 95th percentile of milliseconds from a release to the next grant, and how many were overtaken.

    Overtaken is who asked at least 10 ms before somebody that was served first.
    """
    released = [0.0]
    waits = list[float]()
    turns = list[tuple[float, float]]()
    begin = threading.Barrier(waiters)

    def worker() -> None:
        with lock():
            pass  # connected, so that from now on whoever asks first also arrives first
        begin.wait()
        for _ in range(rounds):
            asked = time.perf_counter()
            with lock():
                granted = time.perf_counter()
                if released[0]:
                    waits.append((granted - released[0]) * 1000)
                turns.append((granted, asked))
                time.sleep(0.005)
                released[0] = time.perf_counter()

    threads = [threading.Thread(target=worker) for _ in range(waiters)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asked_in_order = [asked for _, asked in sorted(turns)]
    overtaken = sum(
        any(later > asked + 0.01 for later in asked_in_order[:at]) for at, asked in enumerate(asked_in_order)
    )
    return statistics.median(waits), statistics.quantiles(waits, n=20)[-1], overtaken


def hand_off(url: str, store: StateStore) -> list[Row]:
    client = redis.Redis.from_url(url)
    session = store.session("lock")
    ours, slow, overtaken = hand_over(lambda: session.lock(wait=60, ttl=10), 8, 25)
    theirs, slowly, passed = hand_over(lambda: client.lock("bench:hand-off", timeout=10), 8, 5)
    versus = f"redis-py Lock: {theirs:.1f} ms, p95 {slowly:.0f} ms, {passed} overtaken"
    measured = f"{ours:.2f} ms, p95 {slow:.1f} ms, {overtaken} overtaken"
    reached = ours <= 3 and not overtaken
    return [Row("lock hand-off p50, 8 waiters", measured, versus, slow / slowly, "<= 3 ms, none overtaken", reached)]


def archiver(url: str, archive: str, name: str, goal: int, changes: int = 30_000) -> Row:
    namespace = f"bench-{name.lower()}"
    settings: dict[str, Any] = {"namespace": namespace, "archiver": False, "partitions": 8}
    with StateStore.open(url, archive=archive, **settings) as store:
        sessions = [store.session(f"s{n}") for n in range(50)]
        for at in range(changes // 50):
            with store.batch() as batch:
                for session in sessions:
                    batch.on(session).set("field", {"step": at, "note": "x" * 40})
        began = time.perf_counter()
        archived = store.archive()
        rate = archived / (time.perf_counter() - began)
    assert archived == changes, f"{archived} archived of {changes}"
    return Row(f"archiver into {name}", f"{rate:,.0f} changes/s", f"{changes:,} changes of 50 records", rate / goal,
               f">= {goal:,}/s", rate >= goal)  # fmt: skip


def _fields(url: str, archive: str, me: int, count: int) -> None:
    with StateStore.open(url, archive=archive, namespace="bench-processes", archiver=False) as store:
        for n in range(count):
            store.session("fields").set(f"{me}-{n}", n)
            store.session("counter").increment("count")


def processes(url: str, archive: str, count: int = 1000) -> list[Row]:
    with StateStore.open(url, archive=archive, namespace="bench-processes") as store:
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=_fields, args=(url, archive, me, count)) for me in range(8)]
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds = time.perf_counter() - began
        fields = store.session("fields").get_all(fresh=True)
        counter = store.session("counter").get("count", fresh=True)
    expected = {f"{me}-{n}": n for me in range(8) for n in range(count)}
    return [
        Row("8 processes x 1,000 keys of one record", f"{len(fields):,} kept, {seconds:.0f} s", "8,000 written",
            len(fields) / 8000, "= 1x", fields == expected),
        Row("8 processes x 1,000 increments", f"{counter:,}", "8,000 added", counter / 8000, "= 1x", counter == 8000),
    ]  # fmt: skip


def plot(rows: list[Row], path: Path) -> None:
    """Ratios on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 0.45 * len(rows) + 1.2))
    names = [row.name for row in rows][::-1]
    ratios = [row.ratio for row in rows][::-1]
    colours = ["#2a7f62" if row.reached else "#b3392f" for row in rows][::-1]
    axes.barh(names, ratios, color=colours)
    axes.axvline(1, color="#444444", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("measured / baseline (see the table for what each is measured against)")
    for at, row in enumerate(rows[::-1]):
        axes.annotate(f" {row.ratio:.3g}x   goal {row.goal}", (row.ratio, at), va="center", fontsize=8)
    axes.margins(x=0.35)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def report(console: Console, rows: list[Row], png: Path | None, as_json: Path | None) -> None:
    """Print the table, write what was asked for, and exit 1 if a goal is missed."""
    table = Table("what", "measured", "beside", "ratio", "goal", "")
    for row in rows:
        table.add_row(
            row.name, row.measured, row.baseline, f"{row.ratio:.3g}x", row.goal, "ok" if row.reached else "MISSED"
        )
    console.print(table)
    if as_json:
        as_json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if png:
        plot(rows, png)
    sys.exit(0 if all(row.reached for row in rows) else 1)


def main(
    png: Annotated[Path | None, typer.Option(help="write the ratios as a picture")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="write the rows as JSON")] = None,
    only: Annotated[
        str,
        typer.Option(
            help="sections, by comma: import,hot,memory,set,telemetry,async,long,lock,agent,archiver,processes"
        ),
    ] = "",
) -> None:
    """Measure and print ratios; exit 1 if a goal is missed."""
    console = Console()
    rows = list[Row]()
    wanted = set(filter(None, only.split(",")))

    def run(name: str, measure: Callable[[], list[Row]]) -> None:
        if not wanted or name in wanted:
            console.print(f"{name} ...")  # no spinner: its thread would take part in the measurement
            rows.extend(measure())

    run("import", weight)
    with redis_server() as server, tempfile.TemporaryDirectory() as directory:
        with StateStore.open(server.url, archive="memory", namespace="bench", archiver=False) as store:
            console.print(f"a `set` executes: {same_commands(server.url, store)}")
            run("hot", lambda: hot(server.url, store))
            run("memory", lambda: hot_memory(server.url))
            run("set", lambda: blocking_set(server.url, store))
            run("telemetry", lambda: telemetry(server.url))
            run("long", lambda: long_conversation(server.url, store))
            run("lock", lambda: hand_off(server.url, store))
        run("async", lambda: asyncio.run(asyncio_set(server.url)))
        sqlite = f"sqlite:///{directory}/bench.db"
        run("agent", lambda: [
            *turns(server.url, sqlite), *saving(server.url, sqlite), *window(server.url, sqlite)
        ])  # fmt: skip
        run("archiver", lambda: [archiver(server.url, sqlite, "SQLite", 15_000)])
        if not wanted or "archiver" in wanted:
            with postgres_server() as postgres:
                run("archiver", lambda: [archiver(server.url, postgres.url, "PostgreSQL", 8_000)])
        run("processes", lambda: processes(server.url, sqlite))

    report(console, rows, png, as_json)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
