"""Requests to a service. Law: each is answered within its time, and one that changes something is applied once.

A write carries an Idempotency-Key, so that it may be sent again when its answer was lost, to another worker, too.
What has none is sent again only if it surely did not arrive.

Design: section 26.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_before_delay,
    wait_random_exponential,
)

from distributed_state.errors import StateError, Unavailable
from distributed_state.port.http import Http, HttpAnswer, Unanswered
from distributed_state.remote.refusals import may_come_later, refusal
from distributed_state.values import chance, path_names

KEY = "Idempotency-Key"
_PAUSE = wait_random_exponential(multiplier=0.05, max=2.0)


class _AskAgain(Exception):
    """The request may be repeated, `after` so many seconds if the service said so; `error` is why."""

    def __init__(self, error: StateError, after: float) -> None:
        super().__init__(str(error))
        self.error = error
        self.after = after


class Requests:
    """One service, whose answers come as their JSON says.

    `retry_for` is how long a request that failed is repeated, `timeout` how long one may wait for its answer.
    """

    def __init__(self, http: Http, *, retry_for: float, timeout: float) -> None:
        self.http = http
        self.retry_for = retry_for
        self.timeout = timeout

    async def read(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        """Ask for something; it may be asked often."""
        return await self._ask("GET", with_query(path, query), {}, None, True)

    async def write(self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None) -> Any:
        """Change something, once however often it has to be sent."""
        key = f"c-{chance.token_hex(16)}"
        return await self._ask(method, path, {**(headers or {}), KEY: key}, body, True)

    async def order(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = False,
        patience: float = 0.0,
    ) -> Any:
        """Have something done that takes no key; `patience` seconds are added to what it may take."""
        return await self._ask(method, path, dict(headers or {}), body, repeatable, patience)

    async def _ask(
        self, method: str, path: str, headers: Mapping[str, str], body: Any, repeatable: bool, patience: float = 0.0
    ) -> Any:
        data = None if body is None else encoded(body)
        sent = {**headers, "Content-Type": "application/json"} if data is not None else headers
        again = AsyncRetrying(
            retry=retry_if_exception_type(_AskAgain),
            stop=stop_before_delay(self.retry_for),
            wait=_pause,
            sleep=self.http.sleep,
            reraise=True,
        )
        try:
            return await again(self._once, method, path, sent, data, repeatable, self.timeout + patience)
        except _AskAgain as last:
            error = last.error
        raise error

    async def _once(
        self, method: str, path: str, headers: Mapping[str, str], data: bytes | None, repeatable: bool, timeout: float
    ) -> Any:
        try:
            answer = await self.http.send(method, path, headers, data, timeout)
        except Unanswered as lost:
            if not repeatable and lost.sent:
                raise Unavailable(f"{lost}; it may have been done, or not") from lost
            raise _AskAgain(Unavailable(f"the service did not answer: {lost}"), 0.0) from lost
        if answer.status < 300:
            return _said(answer)
        error = refusal(answer)
        if may_come_later(answer, error, repeatable=repeatable):
            raise _AskAgain(error, _seconds(answer.headers.get("retry-after", "")))
        raise error


def _pause(state: RetryCallState) -> float:
    """How long to wait before it is asked again: as the service says, else longer each time."""
    error = None if state.outcome is None else state.outcome.exception()
    asked = error.after if isinstance(error, _AskAgain) else 0.0
    # Not all at once, those who were told the same.
    return max(float(_PAUSE(state)), asked + asked * 0.1 * chance.source.random())


def _seconds(text: str) -> float:
    return float(text) if text.isdecimal() and len(text) < 6 else 0.0


def _said(answer: HttpAnswer) -> Any:
    """What a body says. Not by orjson, which reads large integers as floats."""
    try:
        return json.loads(answer.body)
    except ValueError as error:
        raise Unavailable("the service answered with what is no JSON") from error


def encoded(body: Any) -> bytes:
    """A body as JSON. Values were looked at before; a name that JSON would change is refused with InvalidValue."""
    text = json.dumps(body, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        path_names.checked(text)
    return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()


def with_query(path: str, query: Mapping[str, Any] | None) -> str:
    """The path with what is not None behind the `?`; a list stands there several times."""
    pairs = []
    for name, value in (query or {}).items():
        if isinstance(value, list):
            pairs += [(name, each) for each in value]
        elif value is not None:
            pairs.append((name, str(value).lower() if isinstance(value, bool) else value))
    return f"{path}?{urlencode(pairs, errors='surrogatepass')}" if pairs else path
