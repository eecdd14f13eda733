"""Driver errors become ours here, and nowhere else.

Design: section 16.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import redis.exceptions as driver

from distributed_state.errors import Backpressure, ConfigurationError, StateError, WarmUnavailable

LOST = (driver.ConnectionError, driver.TimeoutError, OSError, EOFError)
_AWAY = (driver.ReadOnlyError, driver.MasterDownError, driver.ClusterDownError, driver.TryAgainError)
_AWAY_WORDS = ("READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY", "NOREPLICAS", "MISCONF")


class ReplyError(Exception):
    """What a server answered in place of a result; its first word says which kind of refusal, as NOSCRIPT does."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.word = text.partition(" ")[0]


def translate(error: BaseException, place: str) -> StateError:
    """The error of ours that says what the driver's means. `place` is the server without its password."""
    text = str(error)
    if isinstance(error, (driver.AuthenticationError, driver.AuthorizationError)) or text.startswith("WRONGPASS"):
        return ConfigurationError(f"{place}: the server refused user name or password ({text})")
    if isinstance(error, (driver.NoPermissionError,)) or text.startswith("NOPERM"):
        return ConfigurationError(f"{place}: the user lacks a right: {text}")
    if isinstance(error, driver.InvalidResponse):
        return ConfigurationError(f"{place}: what answers there is not a Redis or Valkey server ({text[:80]})")
    if refused := [each for each in _causes(error) if isinstance(each, ssl.SSLCertVerificationError)]:
        return ConfigurationError(f"{place}: the server's certificate is not trusted: {refused[0].verify_message}")
    if isinstance(error, driver.OutOfMemoryError) or text.startswith("OOM"):
        return Backpressure(f"{place}: Redis is at maxmemory and nothing more is evictable; nothing was written")
    if isinstance(error, LOST + _AWAY) or text.startswith(_AWAY_WORDS):
        return WarmUnavailable(f"{place}: {text or type(error).__name__}")
    return ConfigurationError(f"{place}: {type(error).__name__}: {text}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came from, as far as that is one attempt; a handshake's own is below the driver's."""
    while error is not None and not isinstance(error, StateError):
        yield error
        error = error.__cause__ or error.__context__
