"""Attacks on one worker of the service, and what others notice: `python -m deploy.load.attacks`.

Law: it measures from outside, as another client does: /healthz and a read on new connections, and the worker's memory.
The table of docs/security.md is what it prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from distributed_state.programs.servers import redis_server

CONVERSATIONS = "/v1/conversations"
HONEST = "honest"  # the conversation that somebody reads meanwhile
_MEGABYTE = 10**6
MCP = " over MCP"
NINES = 24  # conversations of nine messages of a megabyte


class Target:
    """A worker, a process of its own, and what is seen of it."""

    def __init__(self, options: Sequence[str], *serve: str, before: str = "", descriptors: int | None = None) -> None:
        limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({descriptors},) * 2)\n"
        code = (limit if descriptors else "") + before + "\nfrom distributed_state.programs.cli import main; main()"
        command = [sys.executable, "-c", code, *options, "serve", "--port", "0", "--notice", "0", *serve]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "serving on " in line, line or self.process.wait(10)
        self.url = json.loads(line)["message"].split()[-1]
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        self.address = host, int(port)
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self._seen = psutil.Process(self.process.pid)
        self.post(CONVERSATIONS, id=HONEST, fields={"a": 1})

    def post(self, path: str, **given: Any) -> httpx.Response:
        """The answer to this."""
        return self.http.post(path, json=given)

    def rss(self) -> float:
        """Megabytes of memory that the worker has."""
        return float(self._seen.memory_info().rss) / _MEGABYTE

    def descriptors(self) -> int:
        """How many it has open."""
        return int(self._seen.num_fds())

    def close(self) -> None:
        """End the worker."""
        self.http.close()
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass
class Seen:
    """What another client saw, at worst: seconds, megabytes."""

    healthz: float = 0.0
    read: float = 0.0
    rss: float = 0.0
    failures: int = 0  # of its requests
    looks: int = 0


class Watch:
    """Another client, which asks again and again, in a thread."""

    def __init__(self, target: Target) -> None:
        self.seen = Seen()
        self._target = target
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(0.02):
            seen = self.seen
            seen.healthz = max(seen.healthz, self._asked("/healthz"))
            seen.read = max(seen.read, self._asked(f"{CONVERSATIONS}/{HONEST}"))
            seen.rss = max(seen.rss, self._target.rss())
            seen.looks += 1

    def _asked(self, path: str) -> float:
        began = time.perf_counter()
        try:
            with socket.create_connection(self._target.address, timeout=5) as connection:
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
                self.seen.failures += b" 200 " not in connection.recv(1000)
        except OSError:
            self.seen.failures += 1
        return time.perf_counter() - began

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        # At least once, however short the attack was.
        deadline = time.monotonic() + 10
        while not self.seen.looks and time.monotonic() < deadline:
            time.sleep(0.01)
        self._over.set()
        self._thread.join()


# Connections that are begun and not gone on with


def connected(target: Target, words: bytes, many: int) -> list[socket.socket]:
    """Connections, on each of which so much was sent. Those that the worker does not accept are left out."""
    found = []
    for _ in range(many):
        try:
            found.append(socket.create_connection(target.address, timeout=10))
            found[-1].sendall(words)
        except OSError:
            continue
    return found


def closed(connection: socket.socket) -> bool:
    """Whether the worker has closed it, whatever it said before."""
    connection.setblocking(False)
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def half_heads(target: Target, many: int) -> list[socket.socket]:
    """Requests whose heads do not end."""
    return connected(target, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 8000, many)


def silent(target: Target, many: int) -> list[socket.socket]:
    """Connections on which nothing is said."""
    return connected(target, b"", many)


def _post(length: int) -> bytes:
    head = f"POST {CONVERSATIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode()


def half_bodies(target: Target, many: int, size: int = 2**20) -> list[socket.socket]:
    """Bodies that lack their last byte."""
    return connected(target, _post(size) + b" " * (size - 1), many)


def begun_bodies(target: Target, many: int) -> list[socket.socket]:
    """Bodies of a megabyte of which nothing is sent yet."""
    return connected(target, _post(2**20), many)


def ten_bytes(target: Target, many: int) -> list[socket.socket]:
    """Bodies of ten bytes that do not come."""
    return connected(target, _post(10) + b"{", many)


def deaf(target: Target, path: str, many: int) -> list[socket.socket]:
    """Clients that ask and read no more than that they are answered."""
    found = []
    for _ in range(many):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(target.address)
        with contextlib.suppress(OSError):
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            connection.recv(1)  # it is answered
        found.append(connection)
    return found


# Requests that are large


def conversation(target: Target, id: str, messages: int, size: int) -> None:
    """Have one written, of so many messages of so many bytes."""
    target.post(CONVERSATIONS, id=id).raise_for_status()
    for _ in range(messages):
        said = [{"role": "user", "content": os.urandom(size // 2).hex()}]
        target.post(f"{CONVERSATIONS}/{id}/turns", messages=said).raise_for_status()


def fields(target: Target, id: str, many: int, size: int) -> None:
    """Have one written with so many fields of so many bytes."""
    target.post(CONVERSATIONS, id=id).raise_for_status()
    for number in range(many):
        path = f"{CONVERSATIONS}/{id}/fields/f{number}"
        target.http.put(path, json={"value": os.urandom(size // 2).hex()}).raise_for_status()


def many_fields(many: int) -> bytes:
    """A body with so many fields."""
    return json.dumps({"fields": {f"f{number}": 0 for number in range(many)}}).encode()


def deep(depth: int) -> bytes:
    """A body nested so deep."""
    return b'{"fields": {"a": ' + b"[" * depth + b"]" * depth + b"}}"


def wide_and_deep(size: int, depth: int) -> bytes:
    """A body of about so many bytes that is nested so deep again and again."""
    one = b"[" * depth + b"]" * depth
    return b'{"fields": {"a": [' + b",".join([one] * (size // len(one))) + b"]}}"


def sent(target: Target, body: bytes, times: int) -> set[int]:
    """The statuses with which a body is answered that is sent so often."""
    head = {"Content-Type": "application/json"}
    return {target.http.post(CONVERSATIONS, content=body, headers=head).status_code for _ in range(times)}


# The table


def wait_closed(connections: list[socket.socket], seconds: float) -> bool:
    """Whether the worker closes all of them within so many seconds."""
    deadline = time.monotonic() + seconds
    while connections and time.monotonic() < deadline:
        connections = [each for each in connections if not closed(each)]
        time.sleep(0.05)
    return not connections


@contextmanager
def held(connections: list[socket.socket]) -> Iterator[list[socket.socket]]:
    """Close them in the end."""
    try:
        yield connections
    finally:
        for each in connections:
            each.close()


def _hold(attack: Callable[[], list[socket.socket]]) -> Callable[[], int]:
    def run() -> int:
        with held(attack()) as connections:
            wait_closed(connections, 90)
            return len(connections)

    return run


def _ignore(target: Target, path: str, many: int, seconds: float = 15) -> Callable[[], int]:
    def run() -> int:
        before = target.descriptors()
        with held(deaf(target, path, many)) as connections:
            time.sleep(seconds)
            assert target.descriptors() < before + many / 2, "they are still there"
            return len(connections)

    return run


def _send(target: Target, body: bytes, times: int) -> Callable[[], int]:
    def run() -> int:
        statuses = sent(target, body, times)
        assert statuses <= {413, 422}, statuses
        return 1

    return run


def _ask_at_once(target: Target) -> int:
    """As it is, as it was, and as it became so."""
    for rest in (
        "?last=10000",
        "/messages?limit=1000",
        "/versions?limit=1000",
        "/versions/313",
        "/versions/1/diff?to=313",
    ):
        answer = target.http.get(f"{CONVERSATIONS}/huge{rest}")
        assert answer.status_code == 422, (rest, answer)
    return 1


def _fork_at_once(target: Target, id: str, many: int) -> Callable[[], int]:
    def fork(_: int) -> int:
        return target.post(f"{CONVERSATIONS}/{id}/forks").status_code

    def run() -> int:
        with ThreadPoolExecutor(many) as pool:
            statuses = set(pool.map(fork, range(many)))
        # A journal that is full of them is for whoever asks again.
        assert statuses <= {201, 429, 503}, statuses
        return many

    return run


def _read_at_once(target: Target, paths: Sequence[str], writing: bool) -> Callable[[], int]:
    """All of them together, three times, while somebody writes there or not."""
    over = threading.Event()

    def read(path: str) -> set[int]:
        with httpx.Client(base_url=target.url, timeout=60) as http:
            return {http.get(path).status_code for _ in range(3)}

    def write(_: int) -> None:
        with httpx.Client(base_url=target.url, timeout=60) as http:
            while not over.wait(0.05):
                http.put(f"{paths[0].partition('?')[0]}/fields/n", json={"value": os.urandom(400_000).hex()})

    def run() -> int:
        over.clear()
        with ThreadPoolExecutor(len(paths) + 4) as pool:
            writers = [pool.submit(write, number) for number in range(4 * writing)]
            try:
                statuses = set().union(*pool.map(read, paths))
            finally:
                over.set()
            for each in writers:
                each.result()
        assert statuses <= {200, 503}, statuses
        return len(paths) + 4 * writing

    return run


def _write_at_once(
    target: Target, ids: Sequence[str], rest: str, method: str = "POST", **given: Any
) -> Callable[[], int]:
    """A small write to each of these large ones together, three times."""

    def write(id: str) -> set[int]:
        with httpx.Client(base_url=target.url, timeout=60) as http:
            path, body = f"{CONVERSATIONS}/{id}{rest}", given if method == "POST" else None
            return {http.request(method, path, json=body).status_code for _ in range(3)}

    def run() -> int:
        with ThreadPoolExecutor(len(ids)) as pool:
            statuses = set().union(*pool.map(write, ids))
        assert statuses <= {200, 201, 503}, statuses
        return len(ids)

    return run


def _call_at_once(target: Target, sessions: Sequence[str]) -> Callable[[], int]:
    """The histories of all of them together over MCP, three times."""
    head = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-06-18"}

    def call(session: str) -> set[int]:
        params = {"name": "history", "arguments": {"session": session}}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        with httpx.Client(base_url=target.url, headers=head, timeout=60) as http:
            answers = [http.post("/v1/mcp", json=body) for _ in range(3)]
        found = [each.json()["result"] for each in answers if each.status_code == 200]
        # For one that waits too long the SDK writes its 503 into an answer.
        assert not any(each.get("isError") and "as many bytes" not in str(each) for each in found), found
        return {each.status_code for each in answers}

    def run() -> int:
        with ThreadPoolExecutor(len(sessions)) as pool:
            statuses = set().union(*pool.map(call, sessions))
        assert statuses <= {200, 503}, statuses
        return len(sessions)

    return run


def _follow_unread(target: Target, many: int) -> Callable[[], int]:
    """Streams of events that nobody reads, while there are thousands of events."""

    def write(number: int) -> None:
        with httpx.Client(base_url=target.url, timeout=60) as http:
            http.post(CONVERSATIONS, json={"id": f"e{number}"})
            for at in range(100):
                http.post(f"{CONVERSATIONS}/e{number}/checkpoints", json={"label": f"{at:0200}"})

    def run() -> int:
        with held(deaf(target, "/v1/events", many)) as connections, ThreadPoolExecutor(8) as pool:
            list(pool.map(write, range(8)))
            return len(connections)

    return run


def attacks(target: Target) -> dict[str, Callable[[], int]]:
    """Each of the table, and how many connections it takes."""
    limit = 19_000
    large = f"{CONVERSATIONS}/large?last=8"
    ids = [f"nine{number}" for number in range(NINES)]
    whole = [f"{CONVERSATIONS}/{each}" for each in ids]
    nine = [f"{each}?last=9" for each in whole]
    written = f"{CONVERSATIONS}/written?last=9"  # whose history is soon larger than an answer
    return {
        "6,000 half-sent heads": _hold(lambda: half_heads(target, 6_000)),
        f"{limit:,} silent connections": _hold(lambda: silent(target, limit)),
        "600 bodies of 1 MiB without their last byte": _hold(lambda: half_bodies(target, 600)),
        "1,000 bodies of ten bytes that do not come": _hold(lambda: ten_bytes(target, 1_000)),
        "a conversation of 312 MB at once": lambda: _ask_at_once(target),
        "30 readers that do not read 8 MB": _ignore(target, large, 30),
        "24 readers at once of 9 MB": _read_at_once(target, nine[:1] * 24, False),
        "24 readers at once of 9 MB, and 4 writers": _read_at_once(target, [written] * 24, True),
        "24 readers at once of 9 MB each": _read_at_once(target, nine, False),
        "24 exports at once of 9 MB each": _read_at_once(target, [f"{each}/export" for each in whole], False),
        "24 histories at once of 9 MB each": _read_at_once(target, [f"{each}/versions" for each in whole], False),
        f"24 histories at once of 9 MB each{MCP}": _call_at_once(target, ids),
        "250 streams of events that are not read": _follow_unread(target, 250),
        "16 forks at once of a conversation with 22 MB of fields": _fork_at_once(target, "wide", 16),
        "24 turns at once in 9 MB each": _write_at_once(
            target, ids, "/turns", messages=[{"role": "user", "content": "x"}]
        ),
        "24 merges at once in 9 MB each": _write_at_once(target, ids, "/changes", key="m", merge={"a": 1}),
        "24 forks at once of 9 MB each": _write_at_once(target, ids, "/forks"),
        "24 pops at once of 9 MB each": _write_at_once(target, ids, "/messages/last", "DELETE"),
        "380,000 fields in one request, 20 times": _send(target, many_fields(380_000), 20),
        "5,001 fields in one request, 20 times": _send(target, many_fields(5_001), 20),
        "500,000 brackets within each other, 20 times": _send(target, deep(500_000), 20),
        "a body of brackets 900 deep, 20 times": _send(target, wide_and_deep(2**20 - 1000, 900), 20),
    }


def main(*only: str) -> None:
    """Print the table, or those of its lines that contain one of these texts."""
    with tempfile.TemporaryDirectory() as folder, redis_server() as server:
        options = ["--url", server.url, "--archive", f"sqlite:///{folder}/archive.db"]
        with Target(options) as another:
            # Not by the worker that is attacked: what it wrote last is in its memory.
            conversation(another, "huge", 312, _MEGABYTE)
            conversation(another, "large", 8, _MEGABYTE)
            fields(another, "wide", 22, _MEGABYTE)
            for name in "written", *(f"nine{number}" for number in range(NINES)):
                conversation(another, name, 9, _MEGABYTE)
        print("| attack | connections | seconds | RSS, MB | `/healthz`, ms | a read, ms | failed |")
        print("|---|---|---|---|---|---|---|")
        for serve in (), ("--mcp",):  # which takes 25 MB by itself
            with Target(options, *serve) as target:
                for name, run in attacks(target).items():
                    if (MCP in name) == bool(serve) and (not only or any(each in name for each in only)):
                        _print(target, name, run)


def _print(target: Target, name: str, run: Callable[[], int]) -> None:
    began = time.perf_counter()
    with Watch(target) as watch:
        connections = run()
    took, seen = time.perf_counter() - began, watch.seen
    print(
        f"| {name} | {connections:,} | {took:.1f} | {seen.rss:.0f} | {seen.healthz * 1000:.0f} "
        f"| {seen.read * 1000:.0f} | {seen.failures} of {seen.looks * 2} |",
        flush=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
