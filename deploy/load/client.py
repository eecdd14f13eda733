"""HTTP/1.1 as a load generator needs it. Law: it costs little, and a connection whose answer is unknown is closed.

httpx takes about a millisecond of this process for a request, which is more than a worker takes to serve it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Target = tuple[str, int]
_READY_EVERY = 0.25  # as often as a balancer that is tuned for it asks; a worker gives `--notice` (1 s)
TOKEN_FILE = "DISTRIBUTED_STATE_TOKEN_FILE"


class Broken(ConnectionError):
    """The connection ended before its answer; whether the request was served is unknown."""


def headers() -> dict[str, str]:
    """What each request has: that it is for this machine, and the token of the file that the environment names."""
    found = {"Host": "localhost"}
    if os.environ.get(TOKEN_FILE):
        found["Authorization"] = f"Bearer {Path(os.environ[TOKEN_FILE]).read_text().strip()}"
    return found


def targets(urls: Sequence[str]) -> list[Target]:
    """Every address of every URL: behind one name there may be several workers."""
    found: dict[Target, None] = {}
    for url in urls:
        parts = urlsplit(url if "//" in url else f"//{url}")
        if parts.scheme not in ("", "http") or not parts.hostname:
            raise ValueError(f"{url!r} is not the URL of a worker, as http://worker:8080")
        if parts.path not in ("", "/"):
            raise ValueError(f"{url!r}: a worker serves from the root of its address")
        for each in socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM):
            found[(str(each[4][0]), int(each[4][1]))] = None
    return list(found)


def reached(targets: Sequence[Target]) -> bool:
    """Whether somebody listens at one of them."""
    for target in targets:
        with suppress(OSError), socket.create_connection(target, timeout=3):
            return True
    return False


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.closed = False
        self._transport: Any = None
        self._buffer = b""
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Broken(str(error or "closed by the worker")))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or self._answer is None or self._answer.done():
            return
        head = self._buffer[:end].lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self._buffer) < end + 4 + length:
            return
        body = self._buffer[end + 4 : end + 4 + length]
        self._buffer = b""
        self._answer.set_result((int(head[9:12]), body))
        if b"connection: close" in head:
            self.close()

    async def request(self, data: bytes) -> tuple[int, bytes]:
        """The status and the body. Raises Broken."""
        if self.closed:
            raise Broken("closed while it was idle")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return await self._answer

    def close(self) -> None:
        """End it, without waiting for anything."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()


class Client:
    """A pool of connections to several workers, used in turn."""

    def __init__(
        self, targets: Sequence[Target], *, connections: int = 128, timeout: float = 10.0, tries: int | None = None
    ) -> None:
        """`tries` is how many workers at most are asked for a connection, all of them by default."""
        self._timeout = timeout
        self._tries = len(targets) if tries is None else tries
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers().items())
        # Not all clients begin with the same worker, and each asks all of them in turn, however few its connections.
        self._turn = cycle(random.sample(list(targets), len(targets)))
        self._idle: dict[Target, deque[Connection]] = {each: deque() for each in targets}
        self._free = asyncio.Semaphore(connections)
        self._out: set[Target] = set()

    async def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Ask one of the workers. Raises Broken, OSError or TimeoutError, after which nothing is known."""
        data = b"" if body is None else json.dumps(body).encode()
        kind = "Content-Type: application/json\r\n"
        head = f"{method} {path} HTTP/1.1\r\n{self._headers}{kind}Content-Length: {len(data)}\r\n\r\n"
        async with self._free:
            connection: Connection | None = None
            answered = False
            try:
                async with asyncio.timeout(self._timeout):
                    target, connection = await self._connection()
                    status, answer = await connection.request(head.encode() + data)
                answered = True
            finally:
                if connection is not None and not connection.closed:
                    if answered:
                        self._idle[target].append(connection)
                    else:
                        connection.close()
        return status, json.loads(answer) if answer else None

    async def _connection(self) -> tuple[Target, Connection]:
        """To the next worker, or where nobody listens to the one after it, as a balancer has it."""
        for left in reversed(range(self._tries)):
            target = self._next()
            idle = self._idle[target]
            while idle:
                connection = idle.pop()
                if not connection.closed:
                    return target, connection
            try:
                _, connection = await asyncio.get_running_loop().create_connection(Connection, *target)
                return target, connection
            except ConnectionRefusedError:
                if not left:
                    raise
        raise Broken("no worker is named")

    def _next(self) -> Target:
        """The next one that is ready, or if none is, the next one."""
        for _ in self._idle:
            target = next(self._turn)
            if target not in self._out:
                break
        return target

    async def balance(self) -> None:
        """Ask each worker again and again whether it is ready, and send none to those that are not, as a balancer."""
        await asyncio.gather(*(self._watch(target) for target in self._idle))

    async def _watch(self, target: Target) -> None:
        head = f"GET /readyz HTTP/1.1\r\n{self._headers}Content-Length: 0\r\n\r\n".encode()
        while True:
            status = 0
            with suppress(OSError):
                async with asyncio.timeout(1):
                    _, connection = await asyncio.get_running_loop().create_connection(Connection, *target)
                    try:
                        status, _ = await connection.request(head)
                    finally:
                        connection.close()
            (self._out.discard if status == 200 else self._out.add)(target)
            await asyncio.sleep(_READY_EVERY)

    async def events(self, path: str) -> AsyncIterator[dict[str, Any] | None]:
        """Server-sent events as they come, None once the stream stands; after a break it goes on where it was."""
        async for name, value in self._lines(path):
            if name == "data":
                yield json.loads(value)
            elif name == "retry":
                yield None

    async def ended(self, path: str) -> dict[str, Any]:
        """Follow the output of a request until its turn is committed; what the event `ended` says."""
        event = ""
        async for name, value in self._lines(path):
            if name == "event":
                event = value
            elif name == "data" and event == "ended":
                found: dict[str, Any] = json.loads(value)
                return found
        raise AssertionError("the lines of a stream have no end")

    async def _lines(self, path: str) -> AsyncIterator[tuple[str, str]]:
        """The lines of server-sent events; after a break they go on where they were."""
        last = ""
        while True:
            with suppress(OSError, asyncio.IncompleteReadError, ValueError):
                reader, writer = await asyncio.open_connection(*next(self._turn), limit=2**22)
                try:
                    again = f"Last-Event-ID: {last}\r\n" if last else ""
                    writer.write(f"GET {path} HTTP/1.1\r\n{self._headers}{again}\r\n".encode())
                    status = int((await reader.readline()).split()[1])
                    while status == 200 and (line := await reader.readline()):
                        name, _, value = line.decode().rstrip("\n").partition(": ")
                        if name == "id":
                            last = value
                        yield name, value
                finally:
                    writer.transport.abort()
            await asyncio.sleep(0.2)

    def close(self) -> None:
        """Close what is idle."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()
