"""Wakes that sleep: what a million of them takes, and how they come back after Redis lost everything.

Most are copied within SQL, from sessions that were written as users write them: a million calls would take the most
time. Redis has them from a refill, as it has all wakes after a restart without its data.
"""

from __future__ import annotations

import sqlite3
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from deploy.load.rows import Row, at_most
from deploy.load.workers.deaths import answered
from deploy.load.workers.handlers import BEGAN, COUNT, NOTE
from deploy.load.workers.posting import Poster, wait_for_answers
from deploy.load.workers.processes import Place, began, begun, due, share
from distributed_state import StateStore
from distributed_state.programs.servers import wait_until
from distributed_state.values.model import Ref

_WRITTEN = 2000  # by users' calls: some in each partition
_LATER = 86_400.0
_WINDOW = 15.0  # seconds for which CPU is counted
_LOT = 10_000
_SERVED_RATE = 20.0  # inputs a second while Redis is refilled
_SERVED_SESSIONS = 50
_REFILL_SECONDS = 600.0


def sleeping(place: Place) -> Iterator[Row]:
    """Memory of Redis for each wake, CPU of a fleet at rest beside them, and a refill while others are served."""
    count, client = place.wakes, place.client()
    for namespace in ("empty", "sleeping"):
        place.show(f"sleeping: {_WRITTEN} sessions of {namespace}")
        with place.open(namespace, archiver=True) as store:
            for number in range(_WRITTEN):
                session = store.session(uuid.uuid4().hex)
                if namespace == "empty":
                    session.set("n", 0)
                else:
                    session.wake("later", after=_LATER + number, handler=COUNT)
            store.admin.archive()
    with place.open("sleeping") as store:
        made = _copied(place, store, count - _WRITTEN)
        client.flushall()
        store.invalidate()
        yield from _memory(place, store, client, count, made)
    yield from _rest(place)
    with place.open("sleeping", archiver=True) as store:  # as in a fleet
        yield from _refill(place, store, client, count)


def _copied(place: Place, store: StateStore, count: int) -> float:
    """Copy rows of sessions with a wake under new names, in the archive; return the seconds that it took."""
    began_at = time.perf_counter()
    keys = store._core._lifecycle.context.keys
    with sqlite3.connect(place.folder / "work.db") as sql:
        columns = [name for _, name, *_ in sql.execute("pragma table_info(records)")]
        given = {name: columns.index(name) for name in ("key", "record", "partition")}
        patterns: dict[int, list[list[Any]]] = defaultdict(list)
        for row in sql.execute("select * from records where namespace = 'sleeping'"):
            patterns[row[given["partition"]]].append(list(row))
        changes = {row[0]: row for row in sql.execute("select * from changes")}
        (key,) = sql.execute("select max(key) from records").fetchone()
        done = 0
        while done < count:
            records, copied = [], []
            for _ in range(min(_LOT, count - done)):
                key += 1
                ref = Ref("session", uuid.uuid4().hex)
                there = patterns[keys.of(ref).partition]
                row = there[key % len(there)].copy()
                copied.append((key, *changes[row[given["key"]]][1:]))
                row[given["key"]], row[given["record"]] = key, ref.text
                records.append(row)
            _insert(sql, "records", records)
            _insert(sql, "changes", copied)
            done += len(records)
            place.show(f"sleeping: {done:,} of {count:,} sessions copied in SQL")
    sql.close()
    return time.perf_counter() - began_at


def _insert(sql: sqlite3.Connection, table: str, rows: list[Any]) -> None:
    sql.executemany(f"insert into {table} values ({', '.join('?' * len(rows[0]))})", rows)


def _memory(place: Place, store: StateStore, client: redis.Redis, count: int, made: float) -> Iterator[Row]:
    """The memory of all that Redis has of sleeping sessions that nobody uses."""
    empty = client.info("memory")["used_memory"]
    with place.workers("sleeping") as workers:
        workers.start()
        _wait_until_refilled(place, store, client, count)
    used = (client.info("memory")["used_memory"] - empty) / count
    how = f"{_WRITTEN:,} written by wake(), the others copied within SQL in {made:.0f} s"
    name, goal = f"memory of Redis for each of {count:,} sleeping wakes", 150
    yield Row(name, f"{used:.0f} bytes", how, used / goal, f"<= {goal} bytes", used <= goal)


def _wait_until_refilled(place: Place, store: StateStore, client: redis.Redis, count: int) -> None:
    deadline = time.monotonic() + _REFILL_SECONDS
    later = (time.time() + _LATER / 2) * 1000
    while (there := due(store, client, COUNT, after_ms=later)) < count:
        place.show(f"sleeping: {there:,} of {count:,} wakes are in Redis")
        if time.monotonic() > deadline:
            raise RuntimeError(f"after {_REFILL_SECONDS:g} s Redis has {there:,} of {count:,} wakes")
        time.sleep(0.2)


def _rest(place: Place) -> Iterator[Row]:
    """CPU of two workers and of Redis, in turn on a namespace without wakes and on the one with all of them."""
    client = place.client()
    server = int(client.info("server")["process_id"])
    used: dict[str, dict[str, list[float]]] = {
        part: {"empty": [], "sleeping": []} for part in ("two workers", "Redis beside them")
    }
    for number in range(place.rounds):
        for namespace in ("empty", "sleeping"):
            place.show(f"sleeping: CPU at rest, {namespace}, round {number + 1} of {place.rounds}")
            with place.open(namespace) as store, place.workers(namespace) as workers:
                pids = [each.process.pid for each in workers.start(2)]
                wait_until(lambda store=store: begun(store, client), "a partition does not start", _REFILL_SECONDS)
                time.sleep(_WINDOW / 2)
                before = sum(map(_cpu, pids)), _cpu(server)
                time.sleep(_WINDOW)
                after = sum(map(_cpu, pids)), _cpu(server)
            for part, first, last in zip(used, before, after, strict=True):
                used[part][namespace].append((last - first) / _WINDOW * 1000)
    for part, found in used.items():
        rest, beside = statistics.median(found["empty"]), statistics.median(found["sleeping"])
        yield at_most(f"CPU of {part} at rest", beside, max(rest, 0.1), 1.1, "ms/s", "without wakes")


def _cpu(pid: int) -> float:
    """Seconds of CPU of a process, to the nanosecond: a worker at rest takes less than the kernel's ticks show."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in threads) / 1e9


def _refill(place: Place, store: StateStore, client: redis.Redis, count: int) -> Iterator[Row]:
    """Redis is emptied while two workers serve inputs."""
    client.delete(BEGAN)
    with place.workers("sleeping") as workers:
        workers.start(2)
        with Poster(store, NOTE, _SERVED_RATE, _SERVED_SESSIONS) as poster:
            wait_until(lambda: client.llen(BEGAN) > 5 * _SERVED_RATE, "the workers do not serve", 60)
            kept = began(client)
            client.flushall()
            since = time.time()
            _wait_until_refilled(place, store, client, count)
            until = time.time()
        wrong = wait_for_answers(store, poster.posted)
    pauses = poster.pauses([*kept, *began(client)], since, until)
    taken = until - since
    yield at_most(f"refill of {count:,} wakes after FLUSHALL", taken, 60, 1, "s", "the goal")
    name = f"inputs served meanwhile, {_SERVED_RATE:g}/s: the pause, p99"
    yield at_most(name, share(pauses, 0.99), 5.0, 1, "s", "the goal")
    yield answered(wrong, len(poster.posted), "refill")
