"""Connections to Redis from a URL, real or embedded. Law: every connection speaks RESP2 and never retries by itself.

Design: section 16.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from distributed_state.errors import ConfigurationError
from distributed_state.port.embedded import EmbeddedServer
from distributed_state.settings import UNREADABLE, refuse_unescaped, require_files

SCHEMES = ("redis://", "rediss://", "unix://")
_DATABASE = re.compile(r"/?|/\d+/?", re.ASCII)
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


class Connections:
    """Makes connections; holds none."""

    def __init__(self, url: str | None, timeout: float) -> None:
        self.timeout = timeout
        self.place = "the embedded server"
        self.embedded = url is None
        self.server: EmbeddedServer | None = None
        if url is None:
            self.server = EmbeddedServer()
            return
        self._url = url
        if not url.startswith(SCHEMES):
            raise ConfigurationError(
                "url is Redis or Valkey: use redis://, rediss:// or unix://; SQL goes into another parameter, archive="
            )
        refuse_unescaped(url, "url")
        try:
            parts = urlsplit(url)
            if parts.port == 0 or (parts.scheme != "unix" and "@" in parts.path + parts.fragment):
                raise ValueError
        except ValueError:
            # Without the cause: of a password with a slash it says a part.
            raise ConfigurationError(f"url: {UNREADABLE}") from None
        if parts.scheme != "unix" and not _DATABASE.fullmatch(parts.path):
            # The driver would take database 0 for it.
            raise ConfigurationError("url: after the host stands the number of the database, as in redis://host:6379/0")
        host = parts.hostname or (parts.path if parts.scheme == "unix" else "")
        self.place = f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")
        require_files(self.place, {name: value for name, value in parse_qsl(parts.query) if name in _FILES})
        try:
            self.blocking()
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{self.place}: an option of the url is wrong: {error}") from error

    def blocking(self) -> Any:
        """A connection for one caller at a time."""
        options: dict[str, Any] = {"protocol": 2, "retry": Retry(NoBackoff(), 0)}
        options |= {"socket_timeout": self.timeout, "socket_connect_timeout": self.timeout}
        pool: Any = redis.ConnectionPool.from_url(self._url, **options)
        return pool.make_connection()

    def asyncio(self) -> Any:
        """A connection that belongs to the running event loop."""
        options: dict[str, Any] = {"protocol": 2, "retry": AsyncRetry(NoBackoff(), 0)}
        # No timeout of the driver's on reads: a shared connection is read without pause, and each caller has its own.
        options |= {"socket_timeout": None, "socket_connect_timeout": self.timeout}
        pool: Any = redis.asyncio.ConnectionPool.from_url(self._url, **options)
        return pool.make_connection()
