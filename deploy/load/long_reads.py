"""What reading a long conversation costs beside a Redis list of the same messages. Law: one run, interleaved, medians.

    python deploy/load/long_reads.py

Starts its own Redis or Valkey on a free port.
"""

from __future__ import annotations

import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import orjson
import redis

from distributed_state import StateStore
from distributed_state.programs.servers import redis_server

SIZES = (100, 1_000, 10_000)
ROUNDS = 15
Compared = tuple[str, float, float, float, str, str]


def conversation(count: int) -> list[dict[str, Any]]:
    """Questions, calls of a tool, what it gave, and answers: some 200 bytes each."""
    found: list[dict[str, Any]] = []
    for n in range(0, count, 4):
        asked = {"city": "Oslo", "nights": n % 7, "travellers": ["Alice", "Bob"]}
        call = {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": "find_hotels", "arguments": orjson.dumps(asked).decode()},
        }
        hotels = [{"name": f"Hotel {at}", "price": 80 + at, "free": at % 2 == 0} for at in range(4)]
        found += (
            {
                "role": "user",
                "content": f"Question {n}: which hotels are free in Oslo for {n % 7} nights, near the port?",
            },
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{n}", "content": orjson.dumps(hotels).decode()},
            {"role": "assistant", "content": "There are two that suit you, both a short walk from the port. " * 4},
        )
    return found[:count]


def interleaved(calls: dict[str, Callable[[], Any]], times: int) -> dict[str, float]:
    """Median microseconds a call, the candidates in turn."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            for _ in range(times):
                call()
            taken[name].append((time.perf_counter() - began) / times * 1e6)
    return {name: statistics.median(values[1:]) for name, values in taken.items()}


def long_reads(url: str) -> list[Compared]:
    """What `bench.at_most` takes for each row; measuring takes half a minute.

    Example::

        rows += [at_most(*each) for each in long_reads(server.url)]

    Beside LRANGE and orjson of the same texts, all messages being in Redis: `messages()` of a record that this process
    has hot, confirmed by the server; of one that it does not have; each of them looked at; as dicts. And of a record
    that is in SQLite but for its end, beside a SELECT and orjson.
    """
    rows: list[Compared] = []
    with tempfile.TemporaryDirectory() as directory:
        for size in SIZES:
            said = conversation(size)
            rows += _in_redis(url, said) + _in_sql(url, said, f"{directory}/{size}.db")
    return rows


def _in_redis(url: str, said: list[dict[str, Any]]) -> list[Compared]:
    size = len(said)
    options: dict[str, Any] = {"archiver": False, "recent_messages": size, "hot_bytes": 2**30}
    with (
        redis.Redis.from_url(url) as client,
        StateStore.open(url, archive="memory", namespace=f"long{size}", **options) as store,
    ):
        session = store.session("c")
        _append(session, said)
        name = f"bench:long{size}"
        client.delete(name)
        client.rpush(name, *map(orjson.dumps, said))
        assert [each.to_dict() for each in session.messages()] == said
        found = interleaved(
            {
                "list": lambda: [orjson.loads(text) for text in client.lrange(name, 0, -1)],
                "hot": lambda: session.messages(fresh=True),
                "first": lambda: (store.invalidate(), session.messages()),
                "looked at": lambda: [each.content for each in session.messages(fresh=True)],
                "raw": lambda: session.raw_messages(fresh=True),
            },
            max(2_000 // size, 1),
        )
        beside = found["list"], "us", "LRANGE and orjson"

        def row(what: str, name: str, limit: float) -> Compared:
            return (what, found[name], beside[0], limit, *beside[1:])

        return [
            row(f"messages() of {size:,}", "hot", 2),
            row(f"messages() of {size:,}, not hot", "first", 5),
            row(f"messages() of {size:,}, each read", "looked at", 10),
            row(f"raw_messages() of {size:,}", "raw", 5),
        ]


def _in_sql(url: str, said: list[dict[str, Any]], path: str) -> list[Compared]:
    size = len(said)
    with StateStore.open(url, archive=f"sqlite:///{path}", namespace=f"cold{size}", archiver=False) as store:
        session = store.session("c")
        _append(session, said)
        store.admin.archive()
        store.invalidate()
        named = "SELECT key FROM records WHERE namespace = ? AND record = ?"
        query = f"SELECT record, seq, data FROM messages WHERE record = ({named}) AND seq BETWEEN ? AND ?"
        connection = sqlite3.connect(path)

        def select() -> list[Any]:
            stored = connection.execute(query, (f"cold{size}", "session:c", 0, size)).fetchall()
            return [orjson.loads(data.partition(b" ")[2]) for _, _, data in stored]

        assert select() == said
        assert [each.to_dict() for each in session.messages()] == said
        found = interleaved({"select": select, "messages": lambda: session.messages(fresh=True)}, max(1_000 // size, 1))
        connection.close()
        named = f"messages() of {size:,} from SQLite"
        return [(named, found["messages"], found["select"], 10 if size < 1_000 else 5, "us", "SELECT and orjson")]


def _append(session: Any, said: list[dict[str, Any]]) -> None:
    for at in range(0, len(said), 500):
        session.append(*said[at : at + 500])


if __name__ == "__main__":
    with redis_server() as server:
        for what, measured, baseline, limit, unit, versus in long_reads(server.url):
            ratio = measured / baseline
            print(f"{what}: {measured:,.0f} {unit}, {versus}: {baseline:,.0f} {unit}, {ratio:.2f}x, goal <= {limit:g}x")
