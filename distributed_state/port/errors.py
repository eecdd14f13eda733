"""Errors of servers and of the driver become ours here, and nowhere else.

Design: section 19.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import redis.exceptions as driver

from distributed_state.errors import Backpressure, ConfigurationError, NotPermitted, StateError, WarmUnavailable

LOST = (driver.ConnectionError, driver.TimeoutError, OSError, EOFError)
BROKEN = (driver.RedisError, *LOST)
ELSEWHERE = frozenset(("READONLY", "CLUSTERDOWN", "MASTERDOWN"))  # another server may have the keys now
_AWAY = ELSEWHERE | {"MOVED", "ASK", "TRYAGAIN", "LOADING", "BUSY", "NOREPLICAS", "MISCONF", "UNBLOCKED"}
_OF_A_REPLICA = "cannot be used with replica instances"  # the answer to WAIT and WAITAOF

ONE_OF_A_CLUSTER = "a server of a cluster, whose others are not behind a Unix socket: use redis+cluster://host:port"


class ReplyError(Exception):
    """An answer of the server that is an error; `word` is its first word, as "NOSCRIPT"."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.word = text.partition(" ")[0]

    @property
    def demoted(self) -> bool:
        """Whether the server says that it is a replica."""
        return self.word == "READONLY" or _OF_A_REPLICA in str(self)


def translate(error: BaseException, place: str) -> StateError:
    """The error of ours that says what a server's or the driver's means. `place` is the server without its password."""
    if isinstance(error, StateError):
        return error
    text = str(error)
    word = text.partition(" ")[0]
    if isinstance(error, (driver.AuthenticationError, driver.AuthorizationError)) or word in ("WRONGPASS", "NOAUTH"):
        return NotPermitted(f"{place}: the server refused user name or password ({text})")
    if isinstance(error, driver.NoPermissionError) or word == "NOPERM":
        return NotPermitted(f"{place}: the user lacks a right: {text}")
    if isinstance(error, driver.InvalidResponse):
        return ConfigurationError(f"{place}: what answers there is not a Redis or Valkey server ({text[:80]})")
    if refused := [each for each in _causes(error) if isinstance(each, ssl.SSLCertVerificationError)]:
        return ConfigurationError(f"{place}: the server's certificate is not trusted: {refused[0].verify_message}")
    if isinstance(error, driver.OutOfMemoryError) or word == "OOM":
        return Backpressure(f"{place}: Redis is at maxmemory and nothing more is evictable; nothing was written")
    if text == ONE_OF_A_CLUSTER:
        return ConfigurationError(f"{place}: {text}")
    if "SELECT is not allowed in cluster mode" in text:
        return ConfigurationError(f"{place}: a server of a cluster, which has database 0 alone")
    if word == "TRYAGAIN":
        return WarmUnavailable(f"{place}: the keys are on their way to another server of the cluster ({text})")
    # The driver removes the error word from its text.
    demoted = isinstance(error, driver.ReadOnlyError) or (isinstance(error, ReplyError) and error.demoted)
    if demoted or isinstance(error, LOST) or word in _AWAY:
        away = WarmUnavailable(f"{place}: {text or type(error).__name__}")
        away.demoted = demoted
        return away
    return ConfigurationError(f"{place}: {type(error).__name__}: {text}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came from, as far as that is one attempt; a handshake's own is below the driver's."""
    while error is not None and not isinstance(error, StateError):
        yield error
        error = error.__cause__ or error.__context__
