"""What a remote store asks of the outside: HTTP, time, something done in the background. Law: it knows no meaning.

A request is answered, or `Unanswered` says whether it can have arrived. Neither its text nor a log of ours holds a
header of a request, for one of them is the token.

Design: section 26.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from distributed_state.errors import ConfigurationError, StateError
from distributed_state.port import background

Work = Callable[[], Coroutine[Any, Any, bool]]
_CONNECT = 5.0  # seconds at most for a connection


class Unanswered(Exception):
    """No answer came. `sent` says whether the request may have arrived all the same."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What came back; the names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class HttpPlace:
    """Where requests go, and what each of them carries."""

    url: str
    headers: Mapping[str, str] = field(repr=False)


class HttpLines(Protocol):
    """An answer that is read line by line, as long as it lasts."""

    status: int
    waits: float  # how long `line` waits at least, whatever it is told; 0 where it does as it is told

    async def whole(self) -> bytes:
        """Read all of it."""
        ...

    async def line(self, timeout: float) -> str | None:
        """The next line, None at the end. Raises TimeoutError, and Unanswered if the connection broke."""
        ...

    async def close(self) -> None:
        """Read no more."""
        ...


class Http(Protocol):
    """A transport: what remote stores are written against."""

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, timeout: float
    ) -> HttpAnswer:
        """Ask, and wait for the answer for so many seconds. Raises Unanswered."""
        ...

    async def lines(self, path: str, headers: Mapping[str, str], timeout: float) -> HttpLines:
        """Ask for what has no end; `timeout` is how long one line may take at most. Raises Unanswered."""
        ...

    def every(self, seconds: float, work: Work) -> Callable[[], None]:
        """Do this again and again in the background, until it returns False, or what is returned here is called."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""
        ...

    async def close(self) -> None:
        """Drop the connections."""
        ...


def httpx() -> Any:
    """The library. Raises ConfigurationError where it is not installed."""
    try:
        return import_module("httpx")
    except ImportError as error:
        raise ConfigurationError(
            "a store at an http:// or https:// URL needs httpx: pip install 'distributed-state[remote]'"
        ) from error


def _unanswered(error: Any) -> Unanswered:
    library = httpx()
    unsent = isinstance(error, (library.ConnectError, library.ConnectTimeout, library.PoolTimeout))
    return Unanswered(f"{type(error).__name__}: {error}"[:300], sent=not unsent)


def _answer(found: Any) -> HttpAnswer:
    return HttpAnswer(found.status_code, {name.lower(): value for name, value in found.headers.items()}, found.content)


class AsyncHttp:
    """Over an `httpx.AsyncClient` for each event loop."""

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

    def _times(self, timeout: float | None) -> Any:
        return self._library.Timeout(timeout, connect=_CONNECT if timeout is None else min(timeout, _CONNECT))

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, timeout: float
    ) -> HttpAnswer:
        try:
            found = await self._client().request(
                method, path, headers=dict(headers), content=body, timeout=self._times(timeout)
            )
        except self._library.TransportError as error:
            raise _unanswered(error) from error
        return _answer(found)

    async def lines(self, path: str, headers: Mapping[str, str], timeout: float) -> HttpLines:
        client = self._client()
        try:
            request = client.build_request("GET", path, headers=dict(headers), timeout=self._times(None))
            return _AsyncLines(await client.send(request, stream=True))
        except self._library.TransportError as error:
            raise _unanswered(error) from error

    def every(self, seconds: float, work: Work) -> Callable[[], None]:
        async def repeat() -> None:
            going = True
            while going:
                await asyncio.sleep(seconds)
                going = await work()

        task = asyncio.get_running_loop().create_task(repeat())
        return lambda: (task.cancel(), None)[1]

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
    def __init__(self, response: Any) -> None:
        self.status: int = response.status_code
        self.waits = 0.0
        self._response = response
        self._lines = response.aiter_lines()

    async def whole(self) -> bytes:
        found: bytes = await self._response.aread()
        return found

    async def line(self, timeout: float) -> str | None:
        try:
            async with asyncio.timeout(timeout):
                found: str | None = await anext(self._lines, None)
        except httpx().TransportError as error:
            raise _unanswered(error) from error
        return found

    async def close(self) -> None:
        await self._response.aclose()


class BlockingHttp:
    """Over an `httpx.Client`, from any thread; no await here ever suspends."""

    def __init__(self, place: HttpPlace) -> None:
        self._place = place
        self._library = httpx()
        self._made: tuple[int, Any] | None = None
        self._making = threading.Lock()
        self._closed = False

    def _client(self) -> Any:
        if self._closed:
            raise StateError("this store is closed")
        with self._making:
            if self._made is None or self._made[0] != os.getpid():
                # After fork() the parent's connections are not this process's to use.
                client = self._library.Client(base_url=self._place.url, headers=dict(self._place.headers))
                self._made = os.getpid(), client
            return self._made[1]

    def _times(self, timeout: float) -> Any:
        return self._library.Timeout(timeout, connect=min(timeout, _CONNECT))

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, timeout: float
    ) -> HttpAnswer:
        try:
            found = self._client().request(
                method, path, headers=dict(headers), content=body, timeout=self._times(timeout)
            )
        except self._library.TransportError as error:
            raise _unanswered(error) from error
        return _answer(found)

    async def lines(self, path: str, headers: Mapping[str, str], timeout: float) -> HttpLines:
        client = self._client()
        try:
            request = client.build_request("GET", path, headers=dict(headers), timeout=self._times(timeout))
            return _BlockingLines(client.send(request, stream=True), timeout)
        except self._library.TransportError as error:
            raise _unanswered(error) from error

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
        if self._made is not None and self._made[0] == os.getpid():
            self._made[1].close()


class _BlockingLines:
    def __init__(self, response: Any, waits: float) -> None:
        self.status: int = response.status_code
        self.waits = waits
        self._response = response
        self._lines = response.iter_lines()

    async def whole(self) -> bytes:
        found: bytes = self._response.read()
        return found

    async def line(self, timeout: float) -> str | None:
        try:
            return next(self._lines, None)
        except httpx().ReadTimeout as error:
            raise TimeoutError from error
        except httpx().TransportError as error:
            raise _unanswered(error) from error

    async def close(self) -> None:
        self._response.close()
