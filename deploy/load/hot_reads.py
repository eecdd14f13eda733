"""What a hot read costs, what hot takes of a process' memory, and what an import costs before there is anything hot."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import redis

from deploy.load.rows import Row, at_least, at_most, interleaved
from distributed_state import Message, StateStore


def hot(url: str, store: StateStore) -> list[Row]:
    session = store.session("hot")
    client = redis.Redis.from_url(url)
    plain = {"name": "Alice"}
    session.set("name", "Alice")
    client.hset("bench:hot", "name", "Alice")
    deadline = time.monotonic() + 10
    while store.admin.stats()["hot_hits"] < 3 and time.monotonic() < deadline:
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
        "drivers": ["-c", "import redis.asyncio, sqlalchemy, pydantic"],
        "package": ["-c", "import distributed_state"],
        "store": ["-c", "from distributed_state import StateStore"],
        "help": ["-m", "distributed_state", "--help"],
    }

    def run(words: list[str]) -> None:
        subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)

    found = interleaved({name: (partial(run, words), 1) for name, words in programs.items()}, rounds=15)
    found = {name: microseconds / 1000 for name, microseconds in found.items()}
    drivers = "import redis.asyncio, sqlalchemy, pydantic"
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
    settings["unarchived_bytes"] = 0  # what a writer remembers has a row of its own
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
                before = store.admin.stats()["hot_hits"]
                store.get_many(sessions)
                hits = store.admin.stats()["hot_hits"] - before
            write(sessions, "y")
            for session in sessions if kind == "fields" else ():
                for n in range(count):
                    session.get(f"field-{n}")

        grow(0)
        store.invalidate()
        before = resident()
        made = 50
        while store.admin.stats()["hot_bytes"] < 0.95 * limit:
            grow(made)
            made += 50
        told.send(resident() - before)


def _fill_memory(url: str, size: int, limit: int, told: Any) -> None:
    """Write until a writer remembers all that it may, nothing archived; tell how many bytes the process grew by."""
    settings: dict[str, Any] = {"namespace": f"bench-memory-{size}", "archiver": False, "journal_entries": 10**7}
    settings |= {"journal_bytes": 2**30, "max_staleness": 0.0, "unarchived_bytes": limit}
    with StateStore.open(url, archive="memory", **settings) as store:
        sessions = [store.session(f"s{n}") for n in range(50)]

        def write(number: int) -> None:
            for session in sessions:
                session.set("field", str(number) * size)

        write(0)
        before = resident()
        number = 0
        while store.admin.stats()["unarchived_bytes"] < 0.95 * limit:
            number += 1
            write(number % 10)
        told.send(resident() - before)


def writers_memory(url: str, limit: int = 32 * 2**20) -> list[Row]:
    """What a writer that may not archive remembers, beside what it is allowed to."""
    return [
        _grown(
            f"memory of a writer's unarchived commits, {size:,} letters a write",
            _fill_memory,
            (url, size, limit),
            limit,
        )
        for size in (20, 20_000)
    ]


def hot_memory(url: str, limit: int = 32 * 2**20) -> list[Row]:
    """What a full hot tier adds to a process, a new one for each kind of value, beside what it is allowed to take."""
    name = "memory of a full hot tier"
    kinds = (("fields", 10, 20), ("fields", 2, 20_000), ("messages", 8, 60), ("messages", 16, 4000))
    return [
        _grown(f"{name}, {kind} of {size:,} letters", _fill_hot, (url, kind, count, size, limit), limit)
        for kind, count, size in kinds
    ]


def _grown(name: str, fill: Callable[..., None], words: tuple[Any, ...], limit: int) -> Row:
    """How much a new process grows as it fills what may take `limit` bytes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=fill, args=(*words, theirs))
    worker.start()
    theirs.close()
    grown = ours.recv()
    worker.join()
    return at_most(name, grown / 2**20, limit / 2**20, 1.5, "MB", "its bound")
