"""Count the functions and files that one operation passes through, and how often it returns to a file.

    python tools/ways.py              a table of all ways
    python tools/ways.py set turn     only these
    python tools/ways.py --path set   the files of one way, in the order in which it enters them
    python tools/ways.py --json       one object a way

Each operation runs once before it is measured, so that imports and loaded scripts are not counted. It runs on a Redis
server of its own and SQLite. Only functions of the package count, and only in the thread that makes the call. A return
is a call into a file that was entered before, from another file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import redis

import distributed_state
from distributed_state import StateStore
from distributed_state.programs.servers import redis_server
from distributed_state.programs.service import Service

COLD = "get, cold"
PACKAGE = Path(distributed_state.__file__).parent


@dataclass
class Way:
    """What one operation passed through. `path`: each file as often as it was entered."""

    name: str
    functions: int = 0
    files: int = 0
    returns: int = 0
    lines: int = 0
    path: list[str] = field(default_factory=list)


@contextmanager
def followed(way: Way) -> Iterator[None]:
    """Count the calls of this thread inside."""
    functions = set[CodeType]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return
        if frame.f_code.co_code[frame.f_lasti + 1] & 3:
            return  # the RESUME of a coroutine that waited, not of one that begins
        functions.add(frame.f_code)
        file = frame.f_code.co_filename.removeprefix(f"{PACKAGE}/")
        if not way.path or way.path[-1] != file:
            way.path.append(file)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
    files = set(way.path)
    way.functions, way.files, way.returns = len(functions), len(files), len(way.path) - len(files)
    way.lines = sum(len((PACKAGE / file).read_text().splitlines()) for file in files)


class Library:
    """Operations of the sync API, which runs the core in the thread of its caller."""

    def __init__(self, store: StateStore, url: str) -> None:
        self.store = store
        self.url = url
        self.user = store.user("u")
        self.session = store.session("s")
        self.turns = 0
        self.set()

    def get(self) -> None:
        """A read of one field."""
        self.user.get("a")

    def evict(self) -> None:
        """Let nothing have the record but SQL."""
        self.set()
        self.store.admin.archive()
        with redis.Redis.from_url(self.url) as server:
            server.delete(*server.keys("*:user:u*"))
        self.store.invalidate()

    def set(self) -> None:
        """A write of one field."""
        self.user.set("a", 1)

    def turn(self) -> None:
        """A turn that appends two messages and sets a field."""
        self.turns += 1
        with self.session.turn(request_id=f"r{self.turns}") as turn:
            turn.append({"role": "user", "content": "hello"})
            turn.append({"role": "assistant", "content": "hello"})
            turn["a"] = self.turns

    def ways(self) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
        """Each operation, and what happens before it without being counted."""
        return {
            "get, hot": (lambda: None, self.get),
            "get, miss": (self.store.invalidate, self.get),  # the hot copy is gone, so Redis answers
            COLD: (self.evict, self.get),
            "set": (lambda: None, self.set),
            "turn": (lambda: None, self.turn),
        }


async def post(service: Service, number: int) -> None:
    """POST a turn to the service's application, as the HTTP server calls it."""
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "set": {"a": number}}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"idempotency-key", f"k{number}".encode()),
        (b"host", b"127.0.0.1"),
    ]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/conversations/c/turns", "raw_path": b"/v1/conversations/c/turns", "query_string": b"",
        "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "root_path": "",
    }  # fmt: skip
    status: list[int] = []
    answer = b""
    given = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        found = next(given, None)
        if found is None:
            await asyncio.Event().wait()
        return found

    async def send(message: Any) -> None:
        nonlocal answer
        if message["type"] == "http.response.start":
            status.append(message["status"])
        answer += message.get("body", b"")

    application: Callable[..., Awaitable[None]] = service.app
    await application(scope, receive, send)
    if status[0] >= 300:
        raise SystemExit(f"the service answered {status[0]}: {answer.decode()}")


async def over_http(url: str, archive: str) -> Way:
    """The way of a turn through the HTTP service."""
    way = Way("HTTP POST of a turn")
    async with distributed_state.AsyncStateStore.open(url, archive=archive, namespace="ways-http") as store:
        service = Service()
        service.begin(store)
        await store.session("c").set("a", 0)
        try:
            for number in range(3):
                await post(service, number)
            with followed(way):
                await post(service, 3)
        finally:
            await service.drain()
            await service.close()
    return way


def follow(name: str, prepare: Callable[[], None], operation: Callable[[], None]) -> Way:
    """Follow an operation, once it was prepared and done a few times."""
    for _ in range(3):
        prepare()
        operation()
    prepare()
    way = Way(name)
    with followed(way):
        operation()
    return way


def measured(names: list[str]) -> list[Way]:
    """Follow these ways, or all."""
    found: list[Way] = []
    with tempfile.TemporaryDirectory() as folder, redis_server() as server:
        archive = f"sqlite:///{folder}/archive.db"
        with StateStore.open(server.url, archive=archive, namespace="ways") as store:
            ways = Library(store, server.url).ways()
            found += [follow(name, *ways[name]) for name in ways if name in (names or ways) and name != COLD]
            if COLD in (names or ways):
                # The main thread has SQL called in another one, so that Ctrl-C does not stop it halfway.
                with ThreadPoolExecutor(1) as thread:
                    found.append(thread.submit(follow, COLD, *ways[COLD]).result())
        if not names or "HTTP POST of a turn" in names:
            found.append(asyncio.run(over_http(server.url, archive)))
    return found


def main() -> None:
    """Print the ways that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these ways, as the table names them")
    parser.add_argument("--path", action="store_true", help="print the files of each way, in order")
    parser.add_argument("--json", action="store_true", help="print one object a way")
    given = parser.parse_args()
    ways = measured(given.names)
    if not ways:
        parser.error(f"no such way: {', '.join(given.names)}")
    for way in ways if given.json else ():
        print(json.dumps(asdict(way)))
    if given.json:
        return
    print(f"{'way':<22} functions  files  returns  lines of these files")
    for way in ways:
        print(f"{way.name:<22} {way.functions:>9} {way.files:>6} {way.returns:>8} {way.lines:>6}")
        if given.path:
            print("   " + "\n   ".join(way.path))


if __name__ == "__main__":
    main()
