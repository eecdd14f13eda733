"""Beside LangGraph's PostgresSaver: saving a checkpoint and reading the newest in threads of several lengths; bytes."""

from __future__ import annotations

import itertools
import random
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
import redis
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.postgres import PostgresSaver

from deploy.load.frameworks import langgraph_races
from deploy.load.rows import Row, at_least, at_most
from distributed_state import StateStore
from distributed_state.adapters.langgraph import DistributedStateSaver

LENGTHS = (10, 1_000, 10_000)
SAMPLES = 200
NAME = "LangGraph"
WORDS = [random.Random(at).randbytes(4).hex() for at in range(2_000)]


@dataclass(frozen=True, slots=True)
class Figures:
    """One thread's figures. Times are medians in microseconds; None where it does not apply.

    `bare_us` is what a put cannot go below: of ours the server's time in its script, of theirs a put that does not wait
    for the disk, which our servers' default level does not either. `ping_us` is a PING over the same sockets: no put of
    any store in a server can be faster.
    """

    saver: str
    checkpoints: int
    put_us: float
    bare_us: float
    ping_us: float | None
    latest_us: float
    put_scripts: float | None
    latest_scripts: float | None
    cold_us: float
    cold_bytes: int | None
    redis_bytes: int | None
    sql_bytes: int


class Thread:
    """A thread that grows: in each checkpoint one channel of two kilobytes and a counter are new, a profile is not."""

    def __init__(self) -> None:
        self.config: Any = {"configurable": {"thread_id": uuid.uuid4().hex, "checkpoint_ns": ""}}
        self.values: dict[str, Any] = {}
        self.versions: dict[str, Any] = {}
        self.length = 0

    def put(self, saver: Any) -> float:
        """Save one more checkpoint; the seconds that took."""
        changed: dict[str, Any] = {"messages": random.choices(WORDS, k=200), "turn": self.length}
        if not self.length:
            changed["profile"] = {"name": "Ada", "about": "x" * 200}
        for channel in changed:
            self.versions[channel] = saver.get_next_version(self.versions.get(channel), None)
        self.values |= changed
        checkpoint = {
            "v": 4, "id": str(uuid6(clock_seq=self.length % 8192)), "ts": "2026-01-01T00:00:00+00:00",
            "channel_values": dict(self.values), "channel_versions": dict(self.versions),
            "versions_seen": {"agent": dict(self.versions)}, "updated_channels": list(changed),
        }  # fmt: skip
        new = {channel: self.versions[channel] for channel in changed}
        metadata = {"source": "loop", "step": self.length, "parents": {}}
        begun = time.perf_counter()
        self.config = saver.put(self.config, checkpoint, metadata, new)
        took = time.perf_counter() - begun
        self.length += 1
        return took

    def latest(self, saver: Any) -> float:
        """Read the newest checkpoint as a run does that begins; the seconds that took."""
        thread = {"thread_id": self.config["configurable"]["thread_id"], "checkpoint_ns": ""}
        begun = time.perf_counter()
        found = saver.get_tuple({"configurable": thread})
        took = time.perf_counter() - begun
        assert found.checkpoint["channel_values"] == self.values
        return took


def _quietest(measure: Callable[[], float], samples: int, scripts: Callable[[], int]) -> tuple[float, float]:
    """Microseconds and scripts a call, of the quietest of ten parts: others use the machine, and the archiver works.

    Of times that is the median of a part; scripts are counted, all that the part took.
    """
    calls = max(samples // 10, 1)
    times, counts = [], []
    for _ in range(10):
        before = scripts()
        times.append(statistics.median(measure() for _ in range(calls)) * 1e6)
        counts.append((scripts() - before) / calls)
    return min(times), min(counts)


def _timed(call: Callable[[], Any]) -> float:
    """The seconds that it took."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _scripts(client: Any) -> int:
    """How many scripts and other commands of a store's user the server has run."""
    return int(client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0))


@contextmanager
def _database(url: str) -> Iterator[str]:
    """An empty database; its address for psycopg."""
    plain = url.replace("postgresql+psycopg://", "postgresql://")
    name = f"bench_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    try:
        yield plain.rpartition("/")[0] + "/" + name
    finally:
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _sql_bytes(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM")
        (size,) = connection.execute(
            "SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relkind = 'r' AND relnamespace = "
            "(SELECT oid FROM pg_namespace WHERE nspname = 'public')"
        ).fetchone()  # type: ignore[misc]
    return int(size)


def _growing(thread: Thread, length: int) -> Iterator[Thread]:
    """The thread, as often as it is put to; of short ones so many side by side that there is enough to measure."""
    return itertools.cycle([thread, *(Thread() for _ in range(SAMPLES // length - 1))])


def ours(length: int, redis_url: str, postgres_url: str) -> Figures:
    """The figures of our saver."""
    with _database(postgres_url) as database, redis.Redis.from_url(redis_url) as client:
        client.flushall()
        empty = client.info("memory")["used_memory"]
        archive = database.replace("postgresql://", "postgresql+psycopg://")
        settings = {"url": redis_url, "archive": archive, "namespace": uuid.uuid4().hex[:8], "archive_every": 0.2}
        thread = Thread()
        with StateStore.open(**settings) as store:
            saver, base = DistributedStateSaver(store), _sql_bytes(database)
            for _ in range(length - SAMPLES):
                thread.put(saver)
            growing = _growing(thread, length)
            before = client.info("commandstats")["cmdstat_evalsha"]
            put, put_scripts = _quietest(lambda: next(growing).put(saver), SAMPLES, lambda: _scripts(client))
            after = client.info("commandstats")["cmdstat_evalsha"]
            bare = (after["usec"] - before["usec"]) / (after["calls"] - before["calls"])
            ping, _ = _quietest(lambda: _timed(client.ping), SAMPLES, lambda: 0)
            store.admin.archive()
            latest, latest_scripts = _quietest(lambda: thread.latest(saver), SAMPLES, lambda: _scripts(client))
            used, sql = client.info("memory")["used_memory"] - empty, _sql_bytes(database) - base
        with StateStore.open(**settings) as store:
            cold = DistributedStateSaver(store)
            cold.get_tuple({"configurable": {"thread_id": "another"}})  # connections and scripts
            sent = client.info("stats")["total_net_output_bytes"]
            cold_us = thread.latest(cold) * 1e6
            read = client.info("stats")["total_net_output_bytes"] - sent
    return Figures("ours", length, put, bare, ping, latest, put_scripts, latest_scripts, cold_us, read, used, sql)


def theirs(length: int, redis_url: str, postgres_url: str) -> Figures:
    """The figures of PostgresSaver."""
    with _database(postgres_url) as database:
        thread = Thread()
        with PostgresSaver.from_conn_string(database) as saver:
            saver.setup()
            base = _sql_bytes(database)
            for _ in range(length - SAMPLES):
                thread.put(saver)
            with psycopg.connect(database, autocommit=True) as connection:
                connection.execute("ANALYZE")  # else it is a matter of luck which plan a young table gets
            growing = _growing(thread, length)
            put, _ = _quietest(lambda: next(growing).put(saver), SAMPLES, lambda: 0)
            latest, _ = _quietest(lambda: thread.latest(saver), SAMPLES, lambda: 0)
            sql = _sql_bytes(database) - base
            saver.conn.execute("SET synchronous_commit = off")  # type: ignore[union-attr]
            bare, _ = _quietest(lambda: next(growing).put(saver), SAMPLES, lambda: 0)
        with PostgresSaver.from_conn_string(database) as saver:
            saver.get_tuple({"configurable": {"thread_id": "another"}})
            cold = thread.latest(saver) * 1e6
    return Figures("PostgresSaver", length, put, bare, None, latest, None, None, cold, None, None, sql)


def _rows(mine: Figures, other: Figures) -> list[Row]:
    """Of one length."""
    at = f"{mine.checkpoints:,} checkpoints of 2 KB"
    rows = [
        at_least(f"{NAME}: put at {at}", 1e6 / mine.put_us, 1e6 / other.put_us, 5, "/s", other.saver),
        at_least(f"{NAME}: latest at {at}", 1e6 / mine.latest_us, 1e6 / other.latest_us, 3, "/s", other.saver),
    ]
    for what, scripts in (("put", mine.put_scripts), ("latest", mine.latest_scripts)):
        rows.append(at_most(f"{NAME}: scripts of a {what} at {at}", scripts or 0.0, 1.0, 1.1, "", "one"))
    put = f"{mine.put_us:,.0f} us, of it {mine.bare_us:,.0f} in the script"
    unsynced = f"{other.saver}, synchronous_commit off: {other.bare_us:,.0f} us"
    rows.append(
        Row(f"{NAME}: put compared with no disk at {at}", put, unsynced, mine.put_us / other.bare_us, "-", True)
    )
    ping = mine.ping_us or 0.0
    floor = f"a PING: {ping:,.0f} us"
    rows.append(
        Row(f"{NAME}: put compared with a PING at {at}", f"{mine.put_us:,.0f} us", floor, mine.put_us / ping, "-", True)
    )
    cold = f"{mine.cold_us:,.0f} us, {mine.cold_bytes:,} bytes of Redis"
    ratio = mine.cold_us / other.cold_us
    rows.append(
        Row(
            f"{NAME}: latest of a new worker at {at}", cold, f"{other.saver}: {other.cold_us:,.0f} us", ratio, "-", True
        )
    )
    kept = f"SQL {mine.sql_bytes // 1024:,} KB, Redis {(mine.redis_bytes or 0) // 1024:,} KB"
    beside = f"{other.saver}: SQL {other.sql_bytes // 1024:,} KB"
    rows.append(Row(f"{NAME}: kept at {at}", kept, beside, mine.sql_bytes / other.sql_bytes, "-", True))
    return rows


def rows(redis_url: str, archive: str) -> list[Row]:
    """Measure both at each length, one after the other, so that both meet the same machine."""
    found: list[Row] = []
    mine = dict[int, Figures]()
    for length in LENGTHS:
        mine[length] = ours(length, redis_url, archive)
        found += _rows(mine[length], theirs(length, redis_url, archive))
    short, long = mine[LENGTHS[-2]], mine[LENGTHS[-1]]
    what = f"{NAME}: a put's script at {long.checkpoints:,} checkpoints"
    found.append(at_most(what, long.bare_us, short.bare_us, 1.5, "us", f"at {short.checkpoints:,}"))
    with _database(archive) as database:
        found += langgraph_races.rows(NAME, redis_url, database, lambda saver: partial(Thread().put, saver))
    return found
