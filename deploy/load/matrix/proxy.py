"""A network that can be broken: a port in front of each server. Law: what it does to a connection, a network can do.

A connection is of a client, of a replica (it says REPLCONF) or of a Sentinel (it names itself so): each kind can be
delayed, muted and cut apart from the others. All proxies of a cell share one thread with an event loop.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

_CHUNK = 1 << 16
KINDS = ("client", "replica", "sentinel")


class Network:
    """The thread in which the proxies of a cell run: `with Network() as network: network.proxy(port, target)`."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._proxies: list[Proxy] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def proxy(self, port: int, target: int) -> Proxy:
        """Listen on `port` of loopback and pass everything on to `target`."""
        proxy = Proxy(self, target)
        self.run(proxy.listen(port))
        self._proxies.append(proxy)
        return proxy

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something in the loop, and wait for it."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _close(self) -> None:
        for proxy in self._proxies:
            await proxy.close()
        await _some_turns()  # who was just accepted becomes a task
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await _some_turns()  # a transport says goodbye a turn later


async def _some_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Proxy:
    """One port before one server."""

    def __init__(self, network: Network, target: int) -> None:
        self.network = network
        self.late = dict.fromkeys(KINDS, 0.0)  # seconds by which the server's answers are late
        self.dropped = 0.0  # share of the answers to clients that get lost, and their connections with them
        self.uneven = 0.0  # seconds by which requests are late at most, each connection by chance
        self.blocked: frozenset[str] = frozenset()
        self._target = target
        self._server: asyncio.Server | None = None
        self._pairs: set[_Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def mute(self, *kinds: str) -> None:
        """From now on nothing passes, either way, on living connections of these kinds; they stay open."""
        self.network.run(self._mute(kinds))

    def cut(self, *kinds: str) -> None:
        """Close the living connections of these kinds."""
        self.network.run(self._cut(kinds))

    async def listen(self, port: int) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for pair in list(self._pairs):
            pair.abort()

    async def _mute(self, kinds: tuple[str, ...]) -> None:
        for pair in self._pairs:
            pair.muted = pair.muted or pair.kind in kinds

    async def _cut(self, kinds: tuple[str, ...]) -> None:
        for pair in list(self._pairs):
            if pair.kind in kinds:
                pair.abort()

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: a server of asyncio takes the end of its own tasks for an error.
        task = asyncio.ensure_future(self._pass_on(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, requests = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        pair = _Pair(self, reader, requests, answers, writer)
        self._pairs.add(pair)
        try:
            await pair.run()
        finally:
            pair.close()
            self._pairs.discard(pair)


class _Pair:
    """One connection and its continuation."""

    def __init__(
        self,
        proxy: Proxy,
        client: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
    ) -> None:
        self.kind = "client"
        self.muted = False
        self._proxy = proxy
        self._client, self._to_server, self._server, self._to_client = client, to_server, server, to_client
        self._passed = 0
        self._late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def run(self) -> None:
        """Pass everything on until either side ends it."""
        work = [asyncio.ensure_future(each) for each in (self._requests(), self._answers(), self._deliver())]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    def close(self) -> None:
        for writer in (self._to_server, self._to_client):
            with suppress(RuntimeError, OSError):
                writer.close()

    def abort(self) -> None:
        """As `close`, without what is still to be sent."""
        for writer in (self._to_server, self._to_client):
            writer.transport.abort()

    def _silent(self) -> bool:
        # What was once blocked stays mute: the bytes that are missing would never come.
        self.muted = self.muted or self.kind in self._proxy.blocked
        return self.muted

    async def _requests(self) -> None:
        with suppress(OSError):
            while chunk := await self._client.read(_CHUNK):
                if self._passed < 4096:
                    self._name(chunk)
                self._passed += len(chunk)
                if self._proxy.uneven:
                    await asyncio.sleep(self._proxy.network.random.random() * self._proxy.uneven)
                if not self._silent():
                    self._to_server.write(chunk)
                    await self._to_server.drain()
        await self._while_muted()

    def _name(self, chunk: bytes) -> None:
        if b"sentinel-" in chunk:
            self.kind = "sentinel"
        elif b"REPLCONF" in chunk or b"PSYNC" in chunk:
            self.kind = "replica"

    async def _answers(self) -> None:
        loop, proxy = asyncio.get_running_loop(), self._proxy
        with suppress(OSError):
            while chunk := await self._server.read(_CHUNK):
                if self._silent():
                    continue
                if self.kind == "client" and proxy.dropped and proxy.network.random.random() < proxy.dropped:
                    return
                self._late.put_nowait((loop.time() + proxy.late[self.kind], chunk))
        if self.kind == "client" and not self.muted:
            # A replica gets no more of what was on its way: the primary that is gone had it in its own buffers.
            self._late.put_nowait((0.0, b""))
            await asyncio.Event().wait()
        await self._while_muted()

    async def _deliver(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while True:
                at, chunk = await self._late.get()
                if not chunk:
                    return
                if (wait := at - loop.time()) > 0:
                    await asyncio.sleep(wait)
                if not self._silent():
                    self._to_client.write(chunk)
                    await self._to_client.drain()

    async def _while_muted(self) -> None:
        """Half-open: a muted connection shows nothing of its end."""
        if self.muted:
            await asyncio.Event().wait()
