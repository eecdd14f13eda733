"""What a remote store asks of the outside: HTTP, time, something done in the background. Law: it knows no meaning.

A request is answered, or `Unanswered` says whether it can have arrived. Neither its text nor a log of ours holds a
header of a request, for one of them is the token.

Design: section 26.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Work = Callable[[], Coroutine[Any, Any, bool]]


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
    """An answer that is read in the background, line by line, as long as it lasts."""

    async def line(self, timeout: float) -> str | HttpAnswer | None:
        """The next line, None at the end; the whole answer if that is no 200.

        Raises TimeoutError, after which it can be waited for again, and Unanswered if the connection broke.
        """
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

    def lines(self, path: str, headers: Mapping[str, str], silent: float) -> HttpLines:
        """Ask for what has no end; where nothing comes for `silent` seconds the connection counts as broken."""
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
