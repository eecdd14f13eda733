"""What the URL of a database says. Law: a password is never repeated, whatever is wrong with the rest.

Design: section 9.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, unquote

from sqlalchemy import exc, make_url
from sqlalchemy.engine import URL

from distributed_state.errors import ConfigurationError
from distributed_state.settings import UNREADABLE, absolute, refuse_unescaped, require_files

MEMORY_URLS = ("memory", "memory://", "sqlite://", "sqlite:///:memory:")
_DRIVERS = ("sqlite", "sqlite+pysqlite", "postgresql+psycopg")
_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
_PATHS = (*_FILES, "sslcrldir", "passfile", "servicefile")  # of which libpq can do without the last three
_YES = ("true", "yes", "on", "y", "t", "1")  # as SQLAlchemy reads uri=


def parse_url(url: str | URL) -> URL:
    """The URL of a database in parts, its paths absolute, unless it is that already.

    Raises ConfigurationError if it is wrong, as far as that is seen without I/O.
    """
    if isinstance(url, URL):
        return url
    if url in MEMORY_URLS:
        return make_url("sqlite://")
    if url.startswith(("redis:", "rediss:", "unix:")):
        raise ConfigurationError("archive is a SQL database; Redis or Valkey is another parameter, url=")
    try:
        if not url.startswith("sqlite"):  # whose paths may hold anything
            refuse_unescaped(url, "archive")
        parsed = make_url(url)
        if parsed.port is not None and not 0 < parsed.port < 65536:
            raise ValueError
    except exc.ArgumentError:
        # Not the text itself, nor the cause: it may hold a password.
        raise ConfigurationError("the archive is not an SQLAlchemy URL; use sqlite:///path or postgresql://") from None
    except ValueError:
        raise ConfigurationError(f"archive: {UNREADABLE}") from None
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in _DRIVERS:
        # Others have other ideas of conflicts, locks and isolation: what was never tried there promises nothing.
        said = "the archive is SQLite or PostgreSQL, sqlite:///path or postgresql://user@host/database"
        raise ConfigurationError(f"archive: {parsed.drivername[:80]!r} was never tried, so it is refused: {said}")
    if parsed.get_backend_name() == "postgresql":
        files = {name: str(parsed.query[name]) for name in _FILES if name in parsed.query}
        require_files(display_name(parsed), {name: path for name, path in files.items() if path != "system"})
    return _with_absolute_paths(parsed)


def _with_absolute_paths(url: URL) -> URL:
    """The same file however the current folder changes: connections are made for as long as a store is open."""
    if url.get_backend_name() == "postgresql":
        found = {name: path for name in _PATHS if isinstance(path := url.query.get(name), str) and path != "system"}
        return url.update_query_dict({name: absolute(path) for name, path in found.items()})
    path = sqlite_file(url)
    if path is None or os.path.isabs(path):
        return url
    return url.set(database=f"file:{quote(absolute(path))}" if _is_file_url(url) else absolute(path))


def display_name(url: URL) -> str:
    """The URL as it can be shown."""
    return url.set(query={}).render_as_string(hide_password=True)


def is_memory(url: URL) -> bool:
    """Whether it is a database in this process's memory, with one connection."""
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def sqlite_file(url: URL) -> str | None:
    """The path of SQLite's file; None of a database that has none."""
    if url.get_backend_name() != "sqlite":
        return None
    path = url.database or ""
    if _is_file_url(url):
        if url.query.get("mode") == "memory":
            return None
        path = path.removeprefix("file:")
        # file:///path and file://localhost/path
        path = unquote("/" + path[2:].partition("/")[2] if path.startswith("//") else path)
    return None if path in ("", ":memory:") else path


def _is_file_url(url: URL) -> bool:
    """Whether SQLite reads the path as a URL of its own; without uri=true a file may be called "file:a"."""
    return str(url.query.get("uri", "")).lower() in _YES and (url.database or "").startswith("file:")


def places(url: URL) -> list[tuple[str, int]]:
    """Where the servers of a URL listen, as far as it says so."""
    hosts = ",".join([url.host or "", *_words(url.query.get("host", ()))]).strip(",")
    ports = ",".join([str(url.port or ""), *_words(url.query.get("port", ()))]).strip(",").split(",")
    found = []
    for at, place in enumerate(filter(None, hosts.split(","))):
        host, _, port = place.partition(":") if place.count(":") == 1 else (place, "", "")
        port = port or ports[at if len(ports) > at else -1] or "5432"
        if port.isdigit():
            found.append((host, int(port)))
    return found


def _words(given: str | Sequence[str]) -> Sequence[str]:
    return (given,) if isinstance(given, str) else given


def driver_arguments(url: URL, timeout: float) -> tuple[URL, dict[str, Any]]:
    """Split off what psycopg wants as numbers, and give up on a silent server after seconds, not hours."""
    arguments: dict[str, Any] = {"connect_timeout": max(2, min(5, math.ceil(timeout)))}
    # An answer that does not come because the way is cut; what was sent and is not even received.
    arguments |= {"keepalives_idle": 10, "keepalives_interval": 5, "tcp_user_timeout": math.ceil(timeout * 1000)}
    # Of a database in SQL_ASCII psycopg would otherwise give bytes for text.
    arguments |= {"keepalives_count": 3, "client_encoding": "utf8"}
    query = dict(url.query)
    threshold = query.pop("prepare_threshold", None)
    if threshold is not None:
        off = str(threshold).lower() in ("none", "off", "0")
        if not off and not str(threshold).isdigit():
            raise ConfigurationError(f"prepare_threshold={threshold}: use a number, or `none` behind PgBouncer")
        arguments["prepare_threshold"] = None if off else int(str(threshold))
    return url.set(query=query), {name: value for name, value in arguments.items() if name not in query}
