"""Connections to a database: parses URLs, and ends waits for a silent PostgreSQL.

Law: an error about a URL never repeats a password; a caller that waits for a silent server gets an error soon, and
later callers get one at once.

A server that is stopped, or whose machine is, accepts connections and answers nothing. Its own limits
(statement_timeout and the like) end slow work on a running server; they cannot end this. So a thread watches the
transactions under way. If one gets no answer for a moment, the thread asks the server for a sign of life, on a
connection of its own. If none comes, it cuts every connection: the threads that wait on them get an error. Until the
server answers again, each new transaction is refused at once.

A cut is a shutdown of the socket through a second handle (`Line`). *An earlier version only answered the callers: each
silent call kept a thread and a connection, until all were in use.*

Design: section 9.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote, unquote

from sqlalchemy import Connection, Engine, event, exc, make_url
from sqlalchemy.engine import URL

from distributed_state.errors import ColdUnavailable, ConfigurationError
from distributed_state.settings import UNREADABLE, absolute, refuse_unescaped, require_files

log = logging.getLogger(__name__)
LONG = 60  # factor on the limits of work that may take long
# Maintenance looks rows up by their keys. Without statistics, as after a restore, PostgreSQL would instead read whole
# tables for every few records.
_BY_KEYS = {"enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off", "jit": "off"}
_ISOLATION = {True: "READ COMMITTED", False: "REPEATABLE READ"}
_TICK = 0.2
_LOOK_AFTER = 0.3  # seconds without an answer after which the server is asked for a sign of life
_SIGN_SECONDS = 1.0
_AGAIN = 2.0  # seconds until it is asked again, while the server lives and the answer does not come
_WHILE_SILENT = 0.5
_IDLE_SECONDS = 5.0
MEMORY_URLS = ("memory", "memory://", "sqlite://", "sqlite:///:memory:")
_DRIVERS = ("sqlite", "sqlite+pysqlite", "postgresql+psycopg")
_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
_PATHS = (*_FILES, "sslcrldir", "passfile", "servicefile")  # the last three are optional for libpq
_YES = ("true", "yes", "on", "y", "t", "1")  # as SQLAlchemy reads uri=


def parse_url(url: str | URL) -> URL:
    """The URL of a database in parts, with absolute paths. A parsed URL is returned unchanged.

    Raises ConfigurationError for any mistake that shows without I/O.
    """
    if isinstance(url, URL):
        return url
    if url in MEMORY_URLS:
        return make_url("sqlite://")
    if url.startswith(("redis:", "rediss:", "unix:")):
        raise ConfigurationError("archive must be a SQL database; name Redis or Valkey with url=")
    try:
        if not url.startswith("sqlite"):  # SQLite's paths may contain any character
            refuse_unescaped(url, "archive")
        parsed = make_url(url)
        if parsed.port is not None and not 0 < parsed.port < 65536:
            raise ValueError
    except exc.ArgumentError:
        # The error omits the URL and its cause, which may contain a password.
        raise ConfigurationError("the archive is not an SQLAlchemy URL; use sqlite:///path or postgresql://") from None
    except ValueError:
        raise ConfigurationError(f"archive: {UNREADABLE}") from None
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in _DRIVERS:
        # Other databases differ in conflicts, locks and isolation, and were never tested.
        raise ConfigurationError(
            f"archive: the driver {parsed.drivername[:80]!r} is not supported; use sqlite:///path or "
            f"postgresql://user@host/database (supported drivers: {', '.join(_DRIVERS)})"
        )
    if parsed.get_backend_name() == "postgresql":
        files = {name: str(parsed.query[name]) for name in _FILES if name in parsed.query}
        require_files(display_name(parsed), {name: path for name, path in files.items() if path != "system"})
    return _with_absolute_paths(parsed)


def _with_absolute_paths(url: URL) -> URL:
    """Make paths absolute: connections are made while a store is open, and the current folder may change."""
    if url.get_backend_name() == "postgresql":
        found = {name: path for name in _PATHS if isinstance(path := url.query.get(name), str) and path != "system"}
        return url.update_query_dict({name: absolute(path) for name, path in found.items()})
    path = sqlite_file(url)
    if path is None or os.path.isabs(path):
        return url
    return url.set(database=f"file:{quote(absolute(path))}" if _is_file_url(url) else absolute(path))


def display_name(url: URL) -> str:
    """The URL without its password and options, for messages."""
    return url.set(query={}).render_as_string(hide_password=True)


def is_memory(url: URL) -> bool:
    """Whether the URL is a database in this process's memory, with one connection."""
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def sqlite_file(url: URL) -> str | None:
    """The path of SQLite's file; None for another database, or one in memory."""
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
    """The hosts and ports in a URL."""
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
    """Return the URL and psycopg's arguments, with limits that end a wait for a silent server after seconds."""
    arguments: dict[str, Any] = {"connect_timeout": max(2, min(5, math.ceil(timeout)))}
    # keepalives detect a network that is down; tcp_user_timeout detects that sent data is not received.
    arguments |= {"keepalives_idle": 10, "keepalives_interval": 5, "tcp_user_timeout": math.ceil(timeout * 1000)}
    # From a database in SQL_ASCII psycopg would otherwise return text as bytes.
    arguments |= {"keepalives_count": 3, "client_encoding": "utf8"}
    query = dict(url.query)
    threshold = query.pop("prepare_threshold", None)
    if threshold is not None:
        off = str(threshold).lower() in ("none", "off", "0")
        if not off and not str(threshold).isdigit():
            raise ConfigurationError(f"prepare_threshold={threshold}: use a number, or `none` behind PgBouncer")
        arguments["prepare_threshold"] = None if off else int(str(threshold))
    return url.set(query=query), {name: value for name, value in arguments.items() if name not in query}


# A server that is silent


class Line:
    """A second handle of a connection's socket, with which another thread ends a wait for it.

    The connection's own descriptor cannot be used: if it is closed meanwhile, its number may belong to another socket.
    """

    def __init__(self, number: int) -> None:
        self._socket = socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM)

    def cut(self) -> None:
        """Shut the socket down in both directions."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this handle; the connection stays open."""
        self._socket.close()

    def __del__(self) -> None:
        self.close()


class Attempt:
    """A transaction under way. `since`: when its last request was sent; `cut`: why it was cut."""

    __slots__ = ("cut", "limit", "line", "look_at", "since")

    def __init__(self, limit: float) -> None:
        self.line: Line | None = None
        self.limit = limit
        self.cut = ""
        self.asked()

    def asked(self) -> None:
        """Note that something is sent to the server now."""
        self.since = time.monotonic()
        self.look_at = self.since + _LOOK_AFTER

    def end(self, why: str) -> None:
        """Cut the connection, which ends the thread's wait for it."""
        if self.line is not None and not self.cut:
            self.cut = why
            self.line.cut()


class Watcher:
    """Watches the transactions of one database. `alive` waits up to that many seconds for a sign of life."""

    def __init__(self, name: str, alive: Callable[[float], bool]) -> None:
        self._name = name
        self._alive = alive
        self.forget()

    def forget(self) -> None:
        """In a forked child: start with no transactions and no watching thread."""
        self._lock = threading.Lock()  # the old lock may be held by a thread that the child does not have
        self._attempts: set[Attempt] = set()
        self._here = threading.local()
        self._watching = False
        self._ended = threading.Event()
        self._answered = 0.0
        self.silent_since = 0.0  # 0: not known to be silent

    @contextmanager
    def attempt(self, limit: float) -> Iterator[Attempt]:
        """Watch a transaction of this thread; it waits at most `limit` seconds for one answer.

        Raises ColdUnavailable at once while the server is silent.
        """
        attempt = Attempt(limit)
        with self._lock:
            self._watch()
            if self.silent_since:
                raise ColdUnavailable(self._silence())
            self._attempts.add(attempt)
        outer = getattr(self._here, "attempt", None)
        self._here.attempt = attempt
        try:
            yield attempt
            self._answered = time.monotonic()
        except Exception as error:
            if attempt.cut:
                raise ColdUnavailable(attempt.cut) from error
            raise
        finally:
            with self._lock:
                self._attempts.discard(attempt)
            self._here.attempt = outer

    def connected(self, line: Line) -> None:
        """Note the connection that this thread's transaction uses."""
        attempt: Attempt | None = getattr(self._here, "attempt", None)
        if attempt is not None:
            attempt.line = line
            attempt.asked()

    def asked(self) -> None:
        """Note that this thread sends a statement."""
        attempt: Attempt | None = getattr(self._here, "attempt", None)
        if attempt is not None:
            attempt.asked()

    def answered(self) -> None:
        """Note that the server answered."""
        self._answered = time.monotonic()

    def require_life(self) -> None:
        """Before connecting, which cannot be cut: raise ColdUnavailable unless the server gives a sign of life."""
        begun = time.monotonic()
        if self.silent_since:
            raise ColdUnavailable(self._silence())
        if not self._alive(_SIGN_SECONDS) and self._answered < begun:
            with self._lock:
                self._fall_silent(begun)
                self._watch()
            raise ColdUnavailable(self._silence())

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _silence(self) -> str:
        return f"{self._name}: no sign of life for {time.monotonic() - self.silent_since:.1f} s"

    def _watch(self) -> None:
        if not self._watching and not self._ended.is_set():
            self._watching = True
            threading.Thread(target=self._run, name="distributed-state-sql-watch", daemon=True).start()

    def _run(self) -> None:
        used = time.monotonic()
        while not self._ended.wait(_WHILE_SILENT if self.silent_since else _TICK):
            now = time.monotonic()
            with self._lock:
                if self._attempts or self.silent_since:
                    used = now
                if now - used > _IDLE_SECONDS:
                    break
                waiting = [each for each in self._attempts if each.look_at <= now]
                for each in waiting:
                    if now - each.since > each.limit:  # the server is alive, but this connection is not
                        each.end(f"{self._name}: no answer within {each.limit:g} s")
            if self.silent_since or (waiting and self._answered < now - _LOOK_AFTER):
                self._look(now)
        with self._lock:
            self._watching = False

    def _look(self, begun: float) -> None:
        alive = self._alive(_SIGN_SECONDS)
        with self._lock:
            if not alive and self._answered < begun:
                self._fall_silent(begun)
                return
            if self.silent_since:
                log.warning("%s: answers again after %.1f s", self._name, begun - self.silent_since)
                self.silent_since = 0.0
            for each in self._attempts:
                each.look_at = begun + _AGAIN

    def _fall_silent(self, begun: float) -> None:
        if not self.silent_since:
            self.silent_since = min([begun, *(each.since for each in self._attempts)])
            log.warning("%s; closing its connections", self._silence())
        for each in self._attempts:
            each.end(self._silence())


def sign_of_postgresql(places: list[tuple[str, int]], seconds: float) -> bool:
    """Whether one of these servers answers the first bytes of a connection, or refuses it, which is also an answer.

    The bytes are those of SSLRequest, which a server answers by one letter before anything else, even if it has no
    connection left. A host that begins with / is the folder of a Unix socket.
    """
    deadline = time.monotonic() + seconds
    return not places or any(_answers(host, port, deadline) for host, port in places)


def _answers(host: str, port: int, deadline: float) -> bool:
    left = max(0.05, deadline - time.monotonic())
    try:
        if host.startswith("/"):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(left)
        else:
            connection = socket.create_connection((host, port), timeout=left)
        with connection:
            if host.startswith("/"):
                connection.connect(f"{host}/.s.PGSQL.{port}")
            connection.sendall(b"\0\0\0\x08\x04\xd2\x16\x2f")
            connection.settimeout(max(0.05, deadline - time.monotonic()))
            connection.recv(1)
        return True
    except TimeoutError:
        return False
    except (OSError, ValueError):
        return True  # refused, or no such host: the driver then fails at once


# Settings of a connection and a transaction of PostgreSQL
#
# Each BEGIN sets the limits in the same exchange: PgBouncer refuses them as options of the connection, and set for a
# session they would stay with a connection that is lent to others. They end slow statements, waits for locks, and
# transactions whose worker was stopped in the middle while others wait. They cannot end a wait for a server that
# answers nothing at all: see `Watcher`.


def limit_postgresql(engine: Engine, seconds: float) -> None:
    """Begin every transaction with limits: for a statement, for waiting for a lock, for doing nothing."""
    short = _limits(seconds, 2 * seconds, seconds)
    # Even long work waits only for a limited time for others' locks.
    long = _limits(seconds * LONG, seconds * LONG, seconds) | _BY_KEYS

    def begin(connection: Connection) -> None:
        chosen = connection.get_execution_options()
        limits = long if chosen.get("long") else short
        raw: Any = connection.connection.dbapi_connection  # also of a detached connection
        # Several statements in one text are one exchange, and cannot be prepared.
        settings = "; ".join(f"SET LOCAL {name} = {value}" for name, value in limits.items())
        isolation = _ISOLATION[bool(chosen.get("writes"))]
        raw.execute(f"BEGIN ISOLATION LEVEL {isolation}; {settings}", prepare=False)

    event.listen(engine, "begin", begin)


def _limits(statement: float, idle: float, lock: float) -> dict[str, int | str]:
    return {
        "statement_timeout": int(statement * 1000),
        "lock_timeout": int(lock * 1000),
        "idle_in_transaction_session_timeout": int(idle * 1000),
    }


def watch(engine: Engine, watcher: Watcher) -> None:
    """Report each connection and statement to `watcher`, and test a pooled connection before it is used."""

    def connecting(*_: Any) -> None:
        watcher.require_life()

    def connected(raw: Any, record: Any) -> None:
        record.info["line"] = line = Line(raw.fileno())
        watcher.connected(line)

    def taken(raw: Any, record: Any, _: Any) -> None:
        watcher.connected(record.info["line"])
        if not record.fresh:
            try:
                engine.dialect.do_ping(raw)
            except engine.dialect.loaded_dbapi.Error as error:
                raise exc.InvalidatePoolError("the connection was lost while it was idle") from error

    event.listen(engine, "do_connect", connecting)
    # Registered before all other listeners, because others send queries on a new connection.
    event.listen(engine, "connect", connected, insert=True)
    event.listen(engine, "checkout", taken)
    event.listen(engine, "close", lambda _, record: _close_line(record))
    event.listen(engine, "before_cursor_execute", lambda *_: watcher.asked())
    event.listen(engine, "after_cursor_execute", lambda *_: watcher.answered())
    event.listen(engine, "commit", lambda _: watcher.asked())


def _close_line(record: Any) -> None:
    line = record.info.pop("line", None) if record is not None else None
    if line is not None:
        line.close()
