"""HTTP for remote stores, asynchronous and blocking, with httpx. Law: no exception of httpx leaves this module.

A request is answered, or `Unanswered` says whether it may have arrived. Error texts and logs never contain a header of
a request, because one of them is the token.

Design: section 26.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from distributed_state.errors import ConfigurationError, StateError
from distributed_state.port import background

Work = Callable[[], Coroutine[Any, Any, bool]]


class Unanswered(Exception):
    """No answer came. `sent` says whether the request may nevertheless have arrived."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The answer to a request; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class HttpPlace:
    """The URL of requests, and the headers that each of them carries."""

    url: str
    headers: Mapping[str, str] = field(repr=False)


class HttpLines(Protocol):
    """An answer that is read in the background, line by line, until it ends."""

    async def line(self, timeout: float) -> str | HttpAnswer | None:
        """Return the next line, None at the end, or the whole answer if its status is not 200.

        Raises TimeoutError, after which it may be called again, and Unanswered if the connection broke.
        """
        ...

    async def close(self) -> None:
        """Stop reading."""
        ...


class Http(Protocol):
    """The transport that remote stores use."""

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, timeout: float
    ) -> HttpAnswer:
        """Send a request, and wait up to `timeout` seconds for the answer. Raises Unanswered."""
        ...

    def lines(self, path: str, headers: Mapping[str, str], silent: float) -> HttpLines:
        """Request an endless answer; after `silent` seconds without data the connection counts as broken."""
        ...

    def every(self, seconds: float, work: Work) -> Callable[[], None]:
        """Repeat this function in the background until it returns False, or until the returned function is called."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    def monotonic(self) -> float:
        """Return the seconds of a clock that never goes back."""
        ...

    async def close(self) -> None:
        """Drop the connections."""
        ...


_CONNECT = 5.0  # maximum time in seconds to connect
_AHEAD = 100  # maximum number of lines that are read ahead


def httpx() -> Any:
    """Return the module. Raises ConfigurationError where it is not installed."""
    try:
        return import_module("httpx")
    except ImportError as error:
        raise ConfigurationError(
            "a store at an http:// or https:// URL needs httpx: pip install 'distributed-state[remote]'"
        ) from error


def _times(timeout: float) -> Any:
    return httpx().Timeout(timeout, connect=min(timeout, _CONNECT))


def _unanswered(error: Any) -> Unanswered:
    library = httpx()
    unsent = isinstance(error, (library.ConnectError, library.ConnectTimeout, library.PoolTimeout))
    return Unanswered(f"{type(error).__name__}: {error}"[:300], sent=not unsent)


def _answer(found: Any) -> HttpAnswer:
    return HttpAnswer(found.status_code, {name.lower(): value for name, value in found.headers.items()}, found.content)


_Received = str | HttpAnswer | Unanswered | None


def _over() -> Unanswered:
    return Unanswered("the stream is over", sent=True)


def _unwrap(received: _Received) -> str | HttpAnswer | None:
    if isinstance(received, Unanswered):
        raise received
    return received


class _Splitter:
    """Splits bytes into lines. httpx would also split at characters such as U+2028, which may occur within a text."""

    def __init__(self) -> None:
        self._rest = b""

    def lines(self, data: bytes) -> list[str]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.removesuffix(b"\r").decode() for line in whole]


class AsyncHttp:
    """The transport over an `httpx.AsyncClient` for each event loop."""

    def __init__(self, place: HttpPlace) -> None:
        self._place = place
        self._library = httpx()
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()
        self._closed = False

    def _client(self) -> Any:
        if self._closed:
            raise StateError("this store is closed")
        loop = asyncio.get_running_loop()
        found = self._clients.get(loop)
        if found is None:
            found = self._library.AsyncClient(base_url=self._place.url, headers=dict(self._place.headers))
            self._clients[loop] = found
        return found

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, timeout: float
    ) -> HttpAnswer:
        try:
            found = await self._client().request(
                method, path, headers=dict(headers), content=body, timeout=_times(timeout)
            )
        except self._library.RequestError as error:
            raise _unanswered(error) from error
        return _answer(found)

    def lines(self, path: str, headers: Mapping[str, str], silent: float) -> HttpLines:
        return _AsyncLines(self._client().stream("GET", path, headers=dict(headers), timeout=_times(silent)))

    def every(self, seconds: float, work: Work) -> Callable[[], None]:
        async def repeat() -> None:
            going = True
            while going:
                await asyncio.sleep(seconds)
                going = await work()

        task = asyncio.get_running_loop().create_task(repeat())

        def stop() -> None:
            task.cancel()

        return stop

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def monotonic(self) -> float:
        return time.monotonic()

    async def close(self) -> None:
        self._closed = True
        client = self._clients.pop(asyncio.get_running_loop(), None)
        self._clients.clear()
        if client is not None:
            await client.aclose()


class _AsyncLines:
    """The lines, read by a task, so that a timeout in the middle of a line loses nothing."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._received = asyncio.Queue[_Received](_AHEAD)
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        end: _Received = _over()
        try:
            async with self._stream as response:
                if response.status_code == 200:
                    splitter = _Splitter()
                    async for data in response.aiter_bytes():
                        for line in splitter.lines(data):
                            await self._received.put(line)
                    end = None
                else:
                    await response.aread()
                    end = _answer(response)
        except httpx().RequestError as error:
            end = _unanswered(error)
        finally:
            with suppress(asyncio.QueueFull):  # then no caller waits for it
                self._received.put_nowait(end)

    async def line(self, timeout: float) -> str | HttpAnswer | None:
        if self._received.empty() and self._reader.done():
            raise _over()
        async with asyncio.timeout(timeout):
            return _unwrap(await self._received.get())

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.wait([self._reader])


class BlockingHttp:
    """The transport over an `httpx.Client`, for any thread; no await here ever suspends."""

    def __init__(self, place: HttpPlace) -> None:
        self._place = place
        self._library = httpx()
        self._made: tuple[int, Any] | None = None
        self._making = threading.Lock()
        self._lines: weakref.WeakSet[_BlockingLines] = weakref.WeakSet()
        self._closed = False

    def _client(self) -> Any:
        if self._closed:
            raise StateError("this store is closed")
        with self._making:
            if self._made is None or self._made[0] != os.getpid():
                # After fork() this process must not use the parent's connections.
                client = self._library.Client(base_url=self._place.url, headers=dict(self._place.headers))
                self._made = os.getpid(), client
            return self._made[1]

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, timeout: float
    ) -> HttpAnswer:
        try:
            found = self._client().request(method, path, headers=dict(headers), content=body, timeout=_times(timeout))
        except self._library.RequestError as error:
            raise _unanswered(error) from error
        return _answer(found)

    def lines(self, path: str, headers: Mapping[str, str], silent: float) -> HttpLines:
        found = _BlockingLines(self._client().stream("GET", path, headers=dict(headers), timeout=_times(silent)))
        self._lines.add(found)
        return found

    def every(self, seconds: float, work: Work) -> Callable[[], None]:
        stop = threading.Event()

        def repeat() -> None:
            while not stop.wait(seconds) and background.finish(work()):
                pass

        threading.Thread(target=repeat, name="distributed-state-remote", daemon=True).start()
        return stop.set

    async def sleep(self, seconds: float) -> None:
        background.sleep(seconds)

    def monotonic(self) -> float:
        return time.monotonic()

    async def close(self) -> None:
        self._closed = True
        for each in [*self._lines]:
            await each.close()
        if self._made is not None and self._made[0] == os.getpid():
            self._made[1].close()


class _BlockingLines:
    """The lines, read by a thread: a connection on which a read timed out cannot be read again."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._received = queue.Queue[_Received](_AHEAD)
        self._socket: Any = None
        self._closed = False
        self._reader = threading.Thread(target=self._read, name="distributed-state-remote-lines", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        end: _Received = _over()
        try:
            with self._stream as response:
                self._socket = response.extensions["network_stream"].get_extra_info("socket")
                if response.status_code == 200:
                    end = None if self._pass_on(response) else _over()
                else:
                    response.read()
                    end = _answer(response)
        except httpx().RequestError as error:
            end = _unanswered(error)
        finally:
            with suppress(queue.Full):  # then no caller waits for it
                self._received.put_nowait(end)

    def _pass_on(self, response: Any) -> bool:
        """Pass on the lines; return False if closed meanwhile."""
        splitter = _Splitter()
        for data in response.iter_bytes():
            for line in splitter.lines(data):
                if self._closed:
                    return False
                self._received.put(line)
        return True

    async def line(self, timeout: float) -> str | HttpAnswer | None:
        if self._received.empty() and not self._reader.is_alive():  # after fork() it does not run in the child
            raise _over()
        try:
            return _unwrap(self._received.get(timeout=timeout))
        except queue.Empty:
            raise TimeoutError from None

    async def close(self) -> None:
        self._closed = True
        if self._socket is not None and self._reader.is_alive():
            with suppress(OSError):
                # As a plain socket: unwrapping TLS would disturb the thread that reads.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            with suppress(queue.Empty):
                self._received.get_nowait()  # the reader may wait for room
            self._reader.join(_CONNECT)
