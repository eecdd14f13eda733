"""The events of a service as they come. Law: a broken stream goes on where it was, so none is missed.

Source: the WHATWG HTML standard, "Server-sent events".

Design: section 26.
"""

from __future__ import annotations

import json
from types import TracebackType
from typing import Self

from distributed_state.errors import InvalidValue, Unavailable
from distributed_state.port.http import HttpAnswer, HttpLines, Unanswered
from distributed_state.remote import values
from distributed_state.remote.refusals import LATER, refusal
from distributed_state.remote.requests import Requests, with_query
from distributed_state.values.results import Event

_SILENT = 45.0  # seconds: a worker says something each 15, so this connection is dead
_PAUSE = 0.2


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
        self._last = 0.0  # when the service was heard, or last known to be there

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
        self._last = clock()
        while not self._closed:
            left = _SILENT if end is None else end - clock()
            if left <= 0:
                return None
            event = await self._heard_within(min(left, _SILENT))
            if event is not None:
                return event
        return None

    async def _heard_within(self, seconds: float) -> Event | None:
        """One line; an event if it ends one."""
        try:
            if self._lines is None or self._lines.waits > seconds * 1.5 + 0.1:
                await self._open(seconds)
            assert self._lines is not None
            line = await self._lines.line(seconds)
        except TimeoutError:
            # What waits for a line cannot be left half way: the next one comes over another connection.
            await self._leave()
            return None
        except Unanswered as error:
            await self._leave()
            if self._requests.http.monotonic() - self._last > self._requests.retry_for:
                raise Unavailable(f"the service did not answer: {error}") from error
            await self._requests.http.sleep(_PAUSE)
            return None
        self._last = self._requests.http.monotonic()
        if line is None:
            await self._leave()
            await self._requests.http.sleep(_PAUSE)
            return None
        return self._taken(line)

    async def _open(self, seconds: float) -> None:
        await self._leave()
        headers = {"Last-Event-ID": self._position} if self._position else {}
        lines = await self._requests.http.lines(self._path, {**headers, "Accept": "text/event-stream"}, seconds)
        if lines.status != 200:
            answer = HttpAnswer(lines.status, {"content-type": "application/problem+json"}, await lines.whole())
            await lines.close()
            error = refusal(answer)
            if answer.status in LATER:
                raise Unanswered(str(error), sent=True)
            raise error
        self._lines = lines

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
        self._last = clock()
        while not self._joined and not self._closed:
            if clock() > end:
                raise Unavailable("the service did not begin to send events")
            await self._heard_within(_SILENT)

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
