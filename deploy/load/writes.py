"""What one write costs, beside the plain ways to send it."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import redis
import redis.asyncio

from deploy.load.plain import BARE, Bare, RawSocket
from deploy.load.rows import ROUNDS, Row, at_least, at_most, interleaved, per_call
from deploy.load.server_cpu import commit_cpu
from distributed_state import AsyncStateStore, StateStore
from distributed_state.store.metrics import collector
from distributed_state.tiers import commit as write_path


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

    raw = RawSocket(url, state)
    found = interleaved(
        {
            "ours": (lambda: session.set("a", 7), 400),
            "raw": (raw.call, 400),
            "bare": (bare.call, 400),
            "locked": (locked, 100),
        },
        rounds=15,
    )
    raw.close()
    versus = "lock get loads dumps set unlock, 2 KB"
    return [
        at_most(
            "blocking set, compared with a raw socket",
            found["ours"],
            found["raw"],
            1.25,
            "us",
            "a raw socket, the same words",
        ),
        at_most("blocking set", found["ours"], found["bare"], 1.35, "us", "redis-py evalsha, same commands"),
        at_least("blocking set, throughput", 1e6 / found["ours"], 1e6 / found["locked"], 6, "/s", versus),
    ]


def server_cpu() -> list[Row]:
    """What a commit of one field takes of the server's CPU."""
    taken = commit_cpu()
    return [Row("server CPU of a commit", f"{taken:.1f} us", "12 us", taken / 12, "<= 12 us", taken <= 12)]


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
    """Many tasks at once, which share what is sent, and one alone, for which nothing can be put together."""
    async with AsyncStateStore.open(url, archive="memory", namespace="bench-async", archiver=False) as store:
        client = redis.asyncio.Redis.from_url(url)
        bare = Bare(client)
        bare.sha = await client.script_load(BARE)
        many = [store.session(f"task-{n}") for n in range(50)]
        for session in many:
            await session.set("a", 0)

        async def rate(call: Callable[[int], Any], tasks: int, each: int) -> float:
            async def task(n: int) -> None:
                for _ in range(each):
                    await call(n)

            began = time.perf_counter()
            await asyncio.gather(*(task(n) for n in range(tasks)))
            return tasks * each / (time.perf_counter() - began)

        calls: dict[str, tuple[Callable[[int], Any], int, int]] = {
            "records": (lambda n: many[n].set("a", 7), 50, 20),
            "record": (lambda n: many[0].set("a", 7), 50, 20),
            "bare": (bare.call, 50, 20),
            "one": (lambda n: many[0].set("a", 7), 1, 400),
            "bare one": (bare.call, 1, 400),
        }
        rates: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            await rate(*call)
        for _ in range(ROUNDS):
            for name, call in calls.items():
                rates[name].append(await rate(*call))
        await client.aclose()
    found = {name: statistics.median(values) for name, values in rates.items()}
    versus = "redis-py asyncio evalsha, 50 tasks"
    return [
        at_least("asyncio set, 50 tasks, 50 records", found["records"], found["bare"], 3, "/s", versus),
        at_least("asyncio set, 50 tasks, one record", found["record"], found["bare"], 0.85, "/s", versus),
        at_least("asyncio set, 1 task", found["one"], found["bare one"], 1.2, "/s", "redis-py asyncio evalsha, 1 task"),
    ]
