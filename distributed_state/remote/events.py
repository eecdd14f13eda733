"""The events of a service as they come. Law: a broken stream goes on where it was, so none is missed.

Source: the WHATWG HTML standard, "Server-sent events".

Design: section 26.
"""

from __future__ import annotations

import json
from types import TracebackType
from typing import Self

from distributed_state.errors import InvalidValue, StateError, Unavailable
from distributed_state.port.http import HttpAnswer, HttpLines, Unanswered
from distributed_state.remote import values
from distributed_state.remote.requests import LATER, Requests, refusal, with_query
from distributed_state.values.results import Event

_SILENT = 45.0  # seconds: a worker says something each 15, so this connection is dead
_PAUSE = 0.2
_EVENT_STREAM = {"Accept": "text/event-stream"}


class AsyncRemoteEvents:
    """Events as they come, from `store.events(...)`.

    Example::

        async with store.events("conversation.*") as events:
            await session.set("city", "Oslo")
            while (event := await events.next(timeout=0.5)) is not None:
                print(event.type, event.conversation_id)

    `async for event in events` waits without limit. Listening begins when it is entered, or first asked. An event of
    type `resync` says that some were missed: reload what you keep.
    """

    def __init__(self, requests: Requests, types: tuple[str, ...], since: str | None) -> None:
        self._requests = requests
        self._path = with_query("/v1/events", {"types": [*types], "since": since})
        self._position = since or ""
        self._lines: HttpLines | None = None
        self._joined = False
        self._closed = False
        self._heard: dict[str, str] = {}
        self._failing: float | None = None  # since when it is tried in vain to hear the service

    @property
    def position(self) -> str:
        """How far these events are, the last one that was returned included: text for `since=` of others."""
        return self._position

    async def next(self, timeout: float | None = None) -> Event | None:
        """Wait for the next event; None after `timeout` seconds without one, or when the events were closed."""
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout != timeout
        ):
            raise InvalidValue(f"timeout is a number of seconds or None, not {timeout!r:.80}")
        clock = self._requests.http.monotonic
        end = None if timeout is None else clock() + timeout
        while not self._closed:
            line = await self._line(_SILENT if end is None else min(_SILENT, max(0.0, end - clock())))
            event = None if line is None else self._taken(line)
            if event is not None:
                return event
            if line is None and end is not None and clock() >= end:
                return None
        return None

    async def _line(self, seconds: float) -> str | None:
        """The next line; None if none came, within this time or over this connection."""
        http = self._requests.http
        if self._lines is None:
            headers = {"Last-Event-ID": self._position} if self._position else {}
            self._lines = http.lines(self._path, headers | _EVENT_STREAM, _SILENT)
        try:
            heard = await self._lines.line(seconds)
        except TimeoutError:
            return None
        except Unanswered as error:
            await self._broken(Unavailable(f"the service did not answer: {error}"))
            return None
        if isinstance(heard, HttpAnswer):
            await self._broken(refusal(heard), again=heard.status in LATER)
            return None
        self._failing = None
        if heard is None:
            await self._pause()
        return heard

    async def _broken(self, error: StateError, *, again: bool = True) -> None:
        """Connect once more after a moment, unless that was tried for long enough, or is in vain."""
        now = self._requests.http.monotonic()
        self._failing = now if self._failing is None else self._failing
        if not self._closed and (not again or now - self._failing >= self._requests.retry_for):
            await self._leave()
            raise error
        await self._pause()

    async def _pause(self) -> None:
        await self._leave()
        await self._requests.http.sleep(_PAUSE)

    def _taken(self, line: str) -> Event | None:
        name, _, text = line.partition(":")
        if line:
            self._heard[name] = text.removeprefix(" ")
            return None
        self._joined = True
        heard, self._heard = self._heard, {}
        found = values.event(json.loads(heard["data"])) if "data" in heard else None
        self._position = heard.get("id", self._position)
        return found

    async def _leave(self) -> None:
        lines, self._lines, self._heard = self._lines, None, {}
        if lines is not None:
            await lines.close()

    async def join(self) -> None:
        """Begin to listen. Events from now on are not missed."""
        clock = self._requests.http.monotonic
        end = clock() + self._requests.timeout
        while not self._joined and not self._closed:
            line = await self._line(max(0.0, end - clock()))
            if line is not None:
                self._taken(line)
            elif clock() > end:
                raise Unavailable("the service did not begin to send events")

    async def close(self) -> None:
        """Stop listening."""
        self._closed = True
        await self._leave()

    async def __aenter__(self) -> Self:
        await self.join()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await self.next()
        if event is None:
            raise StopAsyncIteration
        return event
